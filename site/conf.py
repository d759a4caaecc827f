"""Sphinx settings for the site. Nothing is fetched, neither when it is built nor when a page is viewed.

`pages.py` writes the pages, `mathml.py` turns formulas into MathML, `check.py` checks the built site. Docstrings are in
Google style or plain prose with lists and code in single backticks.
"""

import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

project = "EvoAlign"
author = "EvoAlign authors"
language = "en"
exclude_patterns = ["committed"]  # the notebooks as files
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]

# Notebooks are shown as committed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # the default is a script from another host
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 4

napoleon_use_ivar = True  # fields have their own descriptions
smartquotes = False  # quotes in docstrings are Python's

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "ignore-module-all": True, "no-value": True}
autodoc_typehints_format = "short"
# Type aliases that are shown by name, not expanded.
_NAMES = ("ArrayLike", "RewardFunction")
autodoc_type_aliases = {name: name for name in _NAMES}
# A bare name in a type may exist in two modules; the link may lead to either.
suppress_warnings = ["ref.python"]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
# Colours of verdicts, used in site.css.
html_theme_options = {
    "light_css_variables": {
        "verdict-supported": "#1a7f37",
        "verdict-contradicted": "#cf222e",
        "verdict-doubtful": "#9a6700",
    },
    "dark_css_variables": {
        "verdict-supported": "#56d364",
        "verdict-contradicted": "#ff7b72",
        "verdict-doubtful": "#e3b341",
    },
}
html_title = "EvoAlign"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


_ITEM = r"(?:-|\d+\.) "


def _plain_prose(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn plain prose into reStructuredText: escape its markup, set backticks as code, separate lists."""
    text = re.sub(r"^( +[\w*, ]+,)\n +", r"\1 ", "\n".join(lines), flags=re.M)  # join names of arguments on two lines
    joined = 1
    while joined:  # join the lines of a list item, so that nothing needs indenting
        text, joined = re.subn(rf"^(\s*{_ITEM}.*)\n +(?!{_ITEM})(?=\S)", r"\1 ", text, flags=re.M)
    text = re.sub(rf"^(?!{_ITEM})(\S.*)\n(?={_ITEM})", r"\1\n\n", text, flags=re.M)
    text = re.sub(rf"^({_ITEM}.*)\n(?!{_ITEM})(?=\S)", r"\1\n\n", text, flags=re.M)
    blocks = text.split("\n\n")
    lines[:] = "\n\n".join(b if b.lstrip().startswith(">>>") else _escaped(b) for b in blocks).split("\n")


def _escaped(text: str) -> str:
    parts = re.split(r"`+([^`]+)`+", text)
    parts[::2] = [re.sub(r"[\\*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    for n in range(1, len(parts), 2):  # separate code from letters that touch it, without a space
        parts[n - 1] += "\\ " if parts[n - 1][-1:].isalnum() else ""
        parts[n + 1] = ("\\ " if parts[n + 1][:1].isalnum() else "") + parts[n + 1]
    return "".join(parts)


def _signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, ...]:
    """Show the names in `autodoc_type_aliases` inside types, too, and show default factories as ..."""
    shown = (text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, result))
    return tuple(text and text.replace("<factory>", "...") for text in shown)


def setup(app: Any) -> None:
    """Escape docstrings before napoleon splits them into sections, and import the library before Sphinx forks."""
    app.connect("autodoc-process-docstring", _plain_prose, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("env-before-read-docs", _import_first)


def _import_first(app: Any, env: Any, names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("api/"):
            importlib.import_module(name.removeprefix("api/"))
