"""A Sphinx extension that turns LaTeX formulas into MathML at build time, so that pages need no script for them."""

import re
from html import escape
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.application import Sphinx
from sphinx.util import logging

_logger = logging.getLogger(__name__)
# Environments that number every line; they are starred, because Sphinx numbers each formula once.
_NUMBERED = re.compile(r"\\(begin|end)\{(align|alignat|equation|flalign|gather|multline)\}")
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def to_mathml(latex: str, display: bool) -> str:
    """Return a formula as MathML. Raises ValueError, with the place of the fault, for invalid LaTeX.

    display: whether the formula is on a line of its own.
    """
    latex = _NUMBERED.sub(r"\\\1{\2*}", latex)
    try:
        return LatexToMathML().convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        raise ValueError(_COLOURS.sub("", str(error)).strip()) from error


def _write(translator: Any, node: nodes.Node, display: bool) -> None:
    try:
        formula = to_mathml(node.astext(), display)
    except ValueError as error:
        _logger.warning("formula %r: %s", node.astext(), error, location=node)
        formula = f"<code>{escape(node.astext())}</code>"
    if display:
        translator.body.append(translator.starttag(node, "div", CLASS="math"))
        if number := node.get("number"):
            translator.body.append(f'<span class="eqno">({number})</span>')
        translator.body.append(formula + "</div>\n")
    else:
        translator.body.append(formula)
    raise nodes.SkipNode


def _inline(translator: Any, node: nodes.math) -> None:
    _write(translator, node, display=False)


def _block(translator: Any, node: nodes.math_block) -> None:
    _write(translator, node, display=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer, which `html_math_renderer` selects."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
