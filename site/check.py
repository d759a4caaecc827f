"""Check a built site: links to pages and places in them, and that no page loads anything from another host.

`python site/check.py FOLDER` prints what is wrong, one line each, and then ends with status 1. Links to other hosts,
which a reader follows or not, are not fetched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself: tag -> attributes. Of <link> only some relations are loaded.
_LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "form": ("action",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
_NOT_LOADED = {"author", "canonical", "index", "next", "prev", "search", "license"}
_IN_CSS = re.compile(r"""url\(\s*["']?(.*?)["']?\s*\)|@import\s+["'](.*?)["']""")
_IN_SCRIPT = re.compile(
    r"""(?:import|fetch|importScripts|Worker|EventSource|WebSocket)\(\s*["'`](\w+:)?//|from\s*["']https?:"""
)


class _Page(HTMLParser):
    """The places of a page that links can lead to, its links, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        self.loads += _in_css(found.get("style", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "meta" and found.get("http-equiv", "").lower() == "refresh":
            self.loads.append(found.get("content", "").partition("=")[2])
        for name in _LOADED.get(tag, ()):
            if name not in found:
                continue
            if tag == "link" and set(found.get("rel", "").split()) <= _NOT_LOADED:
                self.links.append(found[name])
            elif name == "srcset":
                self.loads += [part.split()[0] for part in found[name].split(",") if part.strip()]
            else:
                self.loads.append(found[name])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._style = False

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += _in_css(data)


def _in_css(text: str) -> list[str]:
    return [found[1] or found[2] or "" for found in _IN_CSS.finditer(text)]


def problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the site in a folder, in one line each. Raises FileNotFoundError where there is none."""
    if not (folder / "index.html").is_file():
        raise FileNotFoundError(f"{folder} has no index.html: build the site there")
    folder = folder.resolve()
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        where = path.relative_to(folder)
        for link in page.links:
            yield from (f"{where}: {fault}" for fault in _broken(link, path, folder, pages))
        for address in page.loads:
            yield from (f"{where}: {fault}" for fault in _foreign(address, path, folder))
    for path in sorted(folder.rglob("*.css")):
        for address in _in_css(path.read_text(encoding="utf-8")):
            yield from (f"{path.relative_to(folder)}: {fault}" for fault in _foreign(address, path, folder))
    for path in sorted(folder.rglob("*.js")):
        if found := _IN_SCRIPT.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(folder)}: loads from another host: {found[0]}"


def _broken(link: str, path: Path, folder: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    """Yield what is wrong with a link that a reader follows."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        if parts.scheme not in ("http", "https", "mailto"):
            yield f"link {link!r} is neither within the site nor on the web"
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(folder):
        yield f"link {link!r} leads out of the site"
    elif not target.is_file():
        yield f"link {link!r} leads to no file"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        yield f"link {link!r} leads to a place that the page does not have"


def _foreign(address: str, path: Path, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the address of something that a page loads."""
    parts = urlsplit(address)
    if parts.scheme == "data" or (not parts.path and not parts.netloc):
        return
    if parts.scheme or parts.netloc:
        yield f"loads {address[:100]!r} from another host"
        return
    target = (path.parent / unquote(parts.path)).resolve()
    if not (target.is_relative_to(folder) and target.is_file()):
        yield f"loads {address[:100]!r}, which is no file of the site"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python site/check.py FOLDER")
    _found = list(problems(Path(sys.argv[1])))
    print(*_found, sep="\n", end="\n" if _found else "")
    _pages = sum(1 for _ in Path(sys.argv[1]).rglob("*.html"))
    print(f"{_pages} pages, {len(_found) or 'no'} broken links or addresses of other hosts")
    sys.exit(bool(_found))
