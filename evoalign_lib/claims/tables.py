"""Claims and verdicts as tables: a row per claim, and a row per comparison that a verdict was made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from evoalign_lib.claims.declarations import load_claims
from evoalign_lib.claims.findings import MISSING, decoding_words
from evoalign_lib.claims.verdicts import Verdict

if TYPE_CHECKING:
    from pandas import DataFrame


def table_of_statements(ids: Iterable[str]) -> DataFrame:
    """Return the claims of these ids as paper/claims.yaml declares them. Columns, both text: claim, what is claimed."""
    from pandas import DataFrame

    declared = {claim["id"]: " ".join(claim["statement"].split()) for claim in load_claims()}
    return DataFrame([{"claim": name, "what is claimed": declared[name]} for name in ids])


def table_of_verdicts(verdicts: Iterable[Verdict]) -> DataFrame:
    """Return a row per claim: its verdict, the comparison that speaks most against it, and what checks it.

    Columns, all text: claim, in short, verdict, closest comparison, other decodings, placebo.
    """
    from pandas import DataFrame

    columns = {"claim": "id", "in short": "title", "verdict": "verdict", "closest comparison": "key"}
    columns |= {"other decodings": "decodings", "placebo": "placebo"}
    rows = [[getattr(verdict, field) for field in columns.values()] for verdict in verdicts]
    return DataFrame(rows, columns=list(columns))


def table_of_comparisons(verdicts: Iterable[Verdict]) -> DataFrame:
    """Return a row per comparison, those of one claim together and the decisive ones first.

    Columns: claim, comparison, estimate with its interval and unit, n, decides ("yes" where the verdict rests on it),
    decoding. n is an integer, all else text. A comparison without runs says so.
    """
    from pandas import DataFrame

    columns = ["claim", "comparison", "estimate [95 %]", "n", "decides", "decoding"]
    rows = {}
    for verdict in verdicts:
        for finding in sorted(verdict.findings, key=lambda finding: not finding.decisive):
            what = (finding.compared or finding.label).replace("_", " ")
            words = decoding_words(finding.decoding) if finding.decoding else ""
            value = "not measured" if finding.value == MISSING else finding.value or "no runs"
            row = [verdict.id, what, value, finding.n, "yes" if finding.decisive else "no", words]
            # what a claim reports under another decoding is found again among the other decodings
            rows.setdefault((verdict.id, what, finding.decoding), row)
    return DataFrame(rows.values(), columns=columns)
