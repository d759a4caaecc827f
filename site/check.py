"""Check a built site: links to pages and anchors work, and no page loads anything from another host.

`python site/check.py FOLDER` prints one line per fault and exits with status 1 if there is any. Links to other hosts
are not fetched.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# A browser loads nothing for a <link> with these relations.
_NOT_LOADED = {"author", "canonical", "index", "next", "prev", "search", "license"}
_ADDRESSES = ("src", "data", "poster", "action", "href", "xlink:href")
_IN_CSS = re.compile(r"""url\(\s*["']?(.*?)["']?\s*\)|@import\s+["'](.*?)["']""")
_IN_SCRIPT = re.compile(
    r"""(?:import|fetch|importScripts|Worker|EventSource|WebSocket)\(\s*["'`](\w+:)?//|from\s*["']https?:"""
)


class _Page(HTMLParser):
    """A page's anchors, its links, and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._tag = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found, self._tag = {name: value or "" for name, value in attrs}, tag
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        followed = tag == "a" or (tag == "link" and set(found.get("rel", "").split()) <= _NOT_LOADED)
        (self.links if followed else self.loads).extend(found[name] for name in _ADDRESSES if name in found)
        self.loads += [part.split()[0] for part in found.get("srcset", "").split(",") if part.strip()]
        self.loads += _in_css(found.get("style", ""))
        if found.get("http-equiv", "").lower() == "refresh":
            self.loads.append(found.get("content", "").partition("=")[2])

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "style":
            self.loads += _in_css(data)


def _in_css(text: str) -> list[str]:
    return [found[1] or found[2] or "" for found in _IN_CSS.finditer(text)]


def problems(folder: Path) -> Iterator[str]:
    """Yield the faults of the site in a folder, one line each. Raises FileNotFoundError if there is no site."""
    folder = folder.resolve()
    if not (folder / "index.html").is_file():
        raise FileNotFoundError(f"{folder} has no index.html: build the site there.")
    pages = {path: _Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            if fault := _fault(link, path, folder, pages, followed=True):
                yield f"{path.relative_to(folder)}: link {link!r} {fault}"
    loads = {path: page.loads for path, page in pages.items()}
    loads |= {path: _in_css(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.css"))}
    for path, addresses in loads.items():
        for address in addresses:
            if fault := _fault(address, path, folder, pages, followed=False):
                yield f"{path.relative_to(folder)}: loads {address[:100]!r}, which {fault}"
    for path in sorted(folder.rglob("*.js")):
        if found := _IN_SCRIPT.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(folder)}: loads from another host: {found[0]}"


def _fault(address: str, path: Path, folder: Path, pages: dict[Path, _Page], followed: bool) -> str:
    """Return what is wrong with an address in a file, or "". followed: by a reader, not loaded by the page."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        good = ("http", "https", "mailto") if followed else ("data",)
        return "" if parts.scheme in good and (followed or not parts.netloc) else "is on another host, or is not a page"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not (target.is_relative_to(folder) and target.is_file()):
        return "is not a file of the site"
    if followed and parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "leads to an anchor that the page does not have"
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python site/check.py FOLDER")
    _found = list(problems(Path(sys.argv[1])))
    print(*_found, sep="\n", end="\n" if _found else "")
    print(f"{len(_found) or 'no'} broken links or addresses on other hosts")
    sys.exit(bool(_found))
