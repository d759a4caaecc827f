"""Tables and numbers as text (LaTeX, CSV, Markdown, HTML, JSON); the same values give the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def tex_escape(text: str) -> str:
    r"""Return plain text as LaTeX: specials escaped, minus signs, comparison signs and some symbols set as maths.

    >>> print(tex_escape("-3.1 % of A_0 at σ ≤ 0.1"))
    $-$3.1 \% of A\_0 at $\sigma$ $\le$ 0.1
    """
    text = re.sub(r"(?<![\w.)-])-(?=\d)", "\N{MINUS SIGN}", text)
    return "".join(_TEX.get(character, character) for character in text)


def tex_plain(text: str) -> str:
    r"""Return the plain text behind the LaTeX of `tex_escape`; minus signs stay minus signs.

    >>> tex_plain(r"$-$3.1 \% of A\_0 at $\sigma$ $\le$ 0.1")
    '−3.1 % of A_0 at σ ≤ 0.1'
    """
    plain = {tex: character for character, tex in _TEX.items()}
    pattern = "|".join(re.escape(tex) for tex in sorted(plain, key=len, reverse=True))
    return re.sub(pattern, lambda found: plain[found[0]], text)


def cell_text(frame: DataFrame, formats: dict[str, str]) -> DataFrame:
    """Return a table with every cell as the text to print; one without rows needs no formats.

    >>> import pandas as pd
    >>> cell_text(pd.DataFrame({"share": [0.25, None]}), {"share": ".1f"}).share.tolist()
    ['0.2', '']
    >>> cell_text(pd.DataFrame({"share": [0.25]})[:0], {}).share.str.len().tolist()
    []
    """
    if unknown := [column for column in formats if column not in frame]:
        raise ValueError(f"formats names {unknown[0]!r}, which is not a column. Use one of: {', '.join(frame)}")
    # `frame.apply` would leave a table without rows as it is
    return frame.assign(**{name: _column_text(frame[name], formats.get(name)) for name in frame})


def _column_text(column: Series, fmt: str | None) -> Series:
    import pandas as pd

    if fmt is None and len(column) and pd.api.types.is_float_dtype(column):
        raise ValueError(
            f'column {column.name!r} holds floats without a format: pass formats={{"{column.name}": ".1f"}}'
        )

    def text(cell: Any) -> str:
        if isinstance(cell, list):
            return f"[{', '.join(map(str, cell))}]"
        return "" if pd.isna(cell) else format(cell, fmt or "")

    return column.map(text).astype(object)


def csv_text(frame: DataFrame) -> str:
    """Return a frame as CSV: floats with 4 significant digits, no negative zero."""
    import pandas as pd

    columns = {c: frame[c] + 0.0 if pd.api.types.is_float_dtype(frame[c]) else frame[c] for c in frame}
    return pd.DataFrame(columns).to_csv(index=False, float_format="%.4g", lineterminator="\n")


def _numeric(column: Series) -> bool:
    """Return whether every cell of a text column is empty or begins with a number."""
    return bool(column.str.match(r"^([-+\d].*)?$").all())


def tex_table(cells: DataFrame, name: str, caption: str) -> str:
    """Return caption, label and a booktabs tabular; columns that hold only numbers are right-aligned."""
    alignment = "".join("r" if _numeric(cells[c]) else "l" for c in cells)
    head, rows = _tex_rows(cells)
    lines = [r"\centering", rf"\caption{{{tex_escape(caption)}}}", rf"\label{{tab:{name}}}"]
    lines += [rf"\begin{{tabular}}{{{alignment}}}", *head, *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def tex_long_table(cells: DataFrame, name: str, caption: str, columns: str) -> str:
    """Return a longtable with caption and label, for one-column pages; its header is repeated on every page.

    Cells may take several lines, but an interval and a number of units stay on one.
    """
    kept = re.compile(r"\[[^\]]*\]|\(n = \d+\)")
    unbroken = cells.map(lambda cell: kept.sub(lambda found: found.group().replace(" ", "\N{NO-BREAK SPACE}"), cell))
    head, rows = _tex_rows(unbroken)
    lines = [rf"\begin{{longtable}}{{{columns}}}", rf"\caption{{{tex_escape(caption)}}}\label{{tab:{name}}}\\"]
    lines += [*head, r"\endfirsthead", *head, r"\endhead", r"\bottomrule", r"\endfoot"]
    return "\n".join([*lines, *rows, r"\end{longtable}"]) + "\n"


def _tex_rows(cells: DataFrame) -> tuple[list[str], list[str]]:
    head, *rows = (" & ".join(map(tex_escape, row)) + r" \\" for row in (cells, *cells.itertuples(index=False)))
    return [r"\toprule", head, r"\midrule"], rows


def tex_numbers(numbers: dict[str, str]) -> str:
    """Return one macro definition per number, sorted by name."""
    return "".join(rf"\newcommand{{\{name}}}{{{tex_escape(numbers[name])}}}" + "\n" for name in sorted(numbers))


def markdown_table(cells: DataFrame, caption: str) -> str:
    """Return a GitHub table with its caption below."""
    rows = [list(cells), ["---"] * len(cells.columns), *cells.itertuples(index=False)]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", f"*{caption}*"]) + "\n"


def html_table(cells: DataFrame, caption: str) -> str:
    """Return an HTML table for a notebook, with its caption above; columns that hold only numbers are right-aligned.

    It has no identifiers and no style sheet, so that the same cells give the same text, which checks compare.
    """
    # Jupyter's own sheet aligns cells right and to the middle, and only a style overrides it; GitHub aligns them left
    # and strips styles, so right needs the attribute. Repeated in every cell, they are most of a notebook's bytes: they
    # have no quotes, which its JSON would escape, and no spaces.
    numeric = [_numeric(cells[column]) for column in cells]

    def line(row: Iterable[str], tag: str, top: bool) -> str:
        left, right = "style=text-align:left", "align=right"
        if top:
            left, right = f"{left};vertical-align:top", f"{right} style=vertical-align:top"
        kinds = [right if number else left for number in numeric]
        return "".join(f"<{tag} {how}>{_breakable(cell)}</{tag}>" for cell, how in zip(row, kinds, strict=True))

    head = line(cells, "th", False)
    rows = [line(row, "td", any(len(cell) > _LONG for cell in row)) for row in cells.itertuples(index=False)]
    # without a minimum, a table of two narrow columns would break its caption after every other word
    lines = ["<table>", f'<caption style="text-align: left; min-width: 36em">{escape(caption)}</caption>']
    lines += [f"<thead><tr>{head}</tr></thead>", "<tbody>", *(f"<tr>{row}</tr>" for row in rows), "</tbody>"]
    return "\n".join([*lines, "</table>"])


_LONG = 40  # characters: a longer cell may take several lines, and its row is aligned to the top


def _breakable(cell: str) -> str:
    """Return a cell as HTML: an interval stays on one line, longer text may break."""
    return re.sub(r"\[[^\]]*\]", lambda found: found.group().replace(" ", "\N{NO-BREAK SPACE}"), escape(cell))


def html_answers(answers: Mapping[str, str]) -> str:
    """Return questions and answers as HTML for a notebook.

    They are paragraphs: JupyterLab floats the parts of a definition list, so that short answers lose their questions.
    """
    items = (f"<p><b>{escape(question)}</b><br>{escape(answer)}</p>" for question, answer in answers.items())
    return "\n".join(['<div class="answers">', *items, "</div>"])


def pretty_json(value: Any) -> str:
    """Return JSON with one line per value, keys sorted, so that a change shows as a changed line."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def first_difference(committed: str, drawn: str) -> str | None:
    """Describe the first line that differs; None if all agree."""
    for number, (here, there) in enumerate(zip_longest(committed.splitlines(), drawn.splitlines()), 1):
        if here != there:
            return f"line {number}: committed {_short(here)}, drawn {_short(there)}"
    return None if committed == drawn else "line ends"


def _short(text: str | None) -> str:
    return "has no such line" if text is None else repr(text if len(text) <= 160 else text[:157] + "...")


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
_TEX |= {sign: "\\" + sign for sign in "&%$#_{}"} | {"\N{NO-BREAK SPACE}": "~"}
_TEX |= {"<": "$<$", ">": "$>$", "\N{MINUS SIGN}": "$-$", "±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$"}
_TEX |= {"√": r"$\surd$", "α": r"$\alpha$", "β": r"$\beta$", "ε": r"$\epsilon$", "ρ": r"$\rho$", "σ": r"$\sigma$"}
