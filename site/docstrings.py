"""A Sphinx extension: this project's docstrings, plain prose with a few conventions, as reStructuredText.

What docstrings have: words in single backticks, which become links where they name something of the library; numbered
and dashed lists; doctests; and arguments, results, errors and sources either in sections ("Args:") or in sentences
("seeds: one a run. Returns the mean. Raises ValueError for no seed."), which become the same lists.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_PACKAGE = "evoalign_lib"
_SECTIONS = {"Args": "Parameters", "Attributes": "Attributes", "Returns": "Returns", "Yields": "Yields"}
_SECTIONS |= {"Raises": "Raises", "Source": "Source", "Sources": "Source"}
_ITEMS = ("Parameters", "Attributes", "Raises")  # sections of "name: text", each a list
_FULL_LINE = 108  # a line of the source that is shorter, next word included, was ended on purpose
_LONGEST_VALUE = 100  # characters of a constant's value that are shown


def to_rst(lines: Sequence[str], obj: Any = None, name: str = "") -> list[str]:
    """Return a docstring as lines of reStructuredText.

    obj: what it documents, for the names of arguments and for links. name: its full name.
    """
    body, fields = _sections(lines)
    known = _arguments_of(obj)
    paragraphs: list[list[str]] = []
    for block in _blocks(body):
        if block[0].startswith(">>>"):
            paragraphs.append(block)
        elif _is_list(block[0]):
            paragraphs.append(_rst_list(block, obj, name))
        else:
            text, found = _sentences(block, known)
            paragraphs += [[_inline(part, obj, name)] for part in text]
            for title, entries in found.items():
                fields.setdefault(title, []).extend(entries)
    for title in dict.fromkeys(_SECTIONS.values()):
        if title in fields:
            paragraphs.append(_field(title, fields[title], obj, name))
    return [line for paragraph in paragraphs for line in [*paragraph, ""]]


def _sections(lines: Sequence[str]) -> tuple[list[str], dict[str, list[tuple[str, str]]]]:
    """Take the sections with a heading of their own out of a docstring: title -> (names, text) of each entry."""
    body, fields, title = [], {}, ""
    for line in lines:
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in _SECTIONS:
            title = _SECTIONS[heading[1]]
            fields.setdefault(title, [])
        elif title and (line.startswith(" ") or not line):
            if not line:
                continue
            entry = re.match(r" {1,4}([\w*, .]+): (.*)", line) if title in _ITEMS else None
            if entry and not line.startswith(" " * 5):
                fields[title].append((entry[1], entry[2]))
            elif fields[title]:
                names, text = fields[title][-1]
                fields[title][-1] = (names, f"{text} {line.strip()}".strip())
            else:
                fields[title].append(("", line.strip()))
        else:
            title = ""
            body.append(line)
    return body, fields


def _blocks(lines: Iterable[str]) -> list[list[str]]:
    """Split lines at blank ones, and where a list begins below text."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            blocks.append([])
        elif blocks[-1] and _is_list(line) and not _is_list(blocks[-1][0]) and not blocks[-1][0].startswith(">>>"):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return [block for block in blocks if block]


def _is_list(line: str) -> bool:
    return re.match(r"\s*(-|\d+\.) ", line) is not None


def _rst_list(block: Sequence[str], obj: Any, name: str) -> list[str]:
    """Return a list with each item on one line, which leaves nothing to indent; one of another item stands apart."""
    items: list[tuple[int, str, str]] = []
    for line in block:
        if found := re.match(r"(\s*)(-|\d+\.) (.*)", line):
            items.append((len(found[1]), found[2], found[3]))
        else:
            indent, marker, text = items[-1]
            items[-1] = (indent, marker, f"{text} {line.strip()}")
    lines, last = [], items[0][0]
    for indent, marker, text in items:
        if indent != last:
            lines.append("")
        last = indent
        lines.append(f"{' ' * indent}{marker} {_inline(text, obj, name)}")
    return lines


def _arguments_of(obj: Any) -> list[str]:
    if not (inspect.isclass(obj) or inspect.isroutine(obj)):
        return []
    try:
        return [name for name in inspect.signature(obj).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return []


def _sentences(block: Sequence[str], known: Sequence[str]) -> tuple[list[str], dict[str, list[tuple[str, str]]]]:
    """Take the sentences about arguments, result, errors and sources out of a paragraph."""
    names = "|".join(sorted(map(re.escape, known), key=len, reverse=True)) or "(?!)"
    starts = rf"(?:{names})(?:, (?:{names}))*(?=: )|Returns(?= )|Yields(?= )|Raises(?= )|Sources?(?=: )"
    text = "\n".join(block)
    pieces = re.split(rf"(?:\A|(?<=[.;)\]])[ \n])({starts}):? ", text)
    if len(pieces) == 1:
        return [" ".join(block)], {}
    body, fields = [pieces[0]] if pieces[0] else [], {}
    for start, rest in zip(pieces[1::2], pieces[2::2], strict=True):
        rest, after = _until_break(rest)
        body += [after] if after else []
        if start in _SECTIONS:
            fields.setdefault(_SECTIONS[start], []).append(("", rest[:1].upper() + rest[1:]))
        else:
            fields.setdefault("Parameters", []).append((start, rest))
    return [re.sub(";$", ".", part.replace("\n", " ").strip()) for part in body], fields


def _until_break(text: str) -> tuple[str, str]:
    """Split a text where a sentence ends and its line was ended on purpose: what follows is about something else."""
    lines = text.split("\n")
    for number, (line, following) in enumerate(zip(lines, lines[1:], strict=False), 1):
        if line.endswith(".") and len(line) + 1 + len(following.split()[0]) <= _FULL_LINE:
            return " ".join(lines[:number]), " ".join(lines[number:])
    return " ".join(lines), ""


def _field(title: str, entries: Sequence[tuple[str, str]], obj: Any, name: str) -> list[str]:
    shown = [(f"**{_escaped(names)}** – " if names else "") + _inline(text, obj, name) for names, text in entries]
    if len(shown) == 1:
        return [f":{title}: {shown[0]}"]
    return [f":{title}:", *(f"    - {text}" for text in shown)]


def _inline(text: str, obj: Any, name: str) -> str:
    """Escape what has a meaning in reStructuredText, and link the names in backticks."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text.strip())
    shown = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            shown.append(_escaped(part))
            continue
        code = part.strip("`")
        target = _target(code, obj, name) if not part.startswith("``") else None
        before = "\\ " if shown[-1] and not shown[-1][-1].isspace() and shown[-1][-1].isalnum() else ""
        after = "\\ " if parts[number + 1][:1].isalnum() else ""
        shown.append(before + (f":py:obj:`{code} <{target}>`" if target else f"``{code}``") + after)
    return "".join(shown)


def _escaped(text: str) -> str:
    text = re.sub(r"([\\*|`])", r"\\\1", text)
    return re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)


def _target(code: str, obj: Any, name: str) -> str | None:
    """Return the full name of what a word in backticks names in the library; None where it names nothing."""
    word = code.removesuffix("()")
    if not re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", word):
        return None
    scopes = name.split(".")
    around = [".".join(scopes[:n]) for n in range(len(scopes), 0, -1)] or [_PACKAGE]
    for full in [f"{scope}.{word}" for scope in around] + [word]:
        if full.startswith(f"{_PACKAGE}.") and (found := _official(full)):
            return found
    return None


def _official(full: str) -> str | None:
    """Return the name by which the thing is documented, None if there is none of this name."""
    parts = full.split(".")
    at = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), 0)
    owner, value = None, sys.modules.get(".".join(parts[:at]))
    for attribute in parts[at:]:
        owner = value
        if hasattr(value, attribute):
            value = getattr(value, attribute)
        elif attribute in getattr(value, "__annotations__", {}):
            return full
        else:
            return None
    if isinstance(value, ModuleType):
        return value.__name__ if value.__name__.startswith(_PACKAGE) else None
    if isinstance(owner, ModuleType) and hasattr(value, "__qualname__"):
        module = getattr(value, "__module__", "") or ""
        return f"{module}.{value.__qualname__}" if module.startswith(_PACKAGE) else None
    return full


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    of_named_tuple = lines[:1] and lines[0].startswith("Alias for field number")  # Python's own text: says nothing
    lines[:] = [] if of_named_tuple else to_rst(lines, obj, name)


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Show the names in `autodoc_type_aliases` where they are a part of a type, too.

    A default that is made at each call is shown as ..., since Sphinx cannot read "<factory>" and then sets no types.
    """
    shown = (text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, result))
    return tuple(text and text.replace("<factory>", "...") for text in shown)


def _shorten(app: Sphinx, domain: str, objtype: str, content: nodes.Element) -> None:
    """Leave out the values of constants that would fill the page."""
    for signature in content.parent.findall(nodes.Element):
        if signature.tagname == "desc_signature":
            for part in list(signature.children):
                if part.tagname == "desc_annotation" and len(part.astext()) > _LONGEST_VALUE:
                    if part.astext().lstrip().startswith("="):
                        signature.remove(part)


def _import_first(app: Sphinx, env: Any, names: Sequence[str]) -> None:
    """Import the modules of the reference before Sphinx forks, or each of its processes would import all of them."""
    for name in names:
        if name.startswith("api/"):
            importlib.import_module(name.removeprefix("api/"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what autodoc calls."""
    app.connect("env-before-read-docs", _import_first)
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    app.connect("object-description-transform", _shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
