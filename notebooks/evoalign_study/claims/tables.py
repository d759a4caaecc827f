"""Tables of claims and verdicts, with a row per claim or a row per comparison behind a verdict."""

from collections.abc import Iterable
from typing import Any

from pandas import DataFrame

from evoalign_study.claims.declarations import load_claims
from evoalign_study.claims.findings import MISSING, decoding_words
from evoalign_study.claims.verdicts import Verdict


def table_of_statements(ids: Iterable[str]) -> DataFrame:
    """Return the claims with these ids as paper/claims.yaml declares them. Text columns: claim, what is claimed."""
    declared = {claim["id"]: " ".join(claim["statement"].split()) for claim in load_claims()}
    return DataFrame([{"claim": name, "what is claimed": declared[name]} for name in ids])


def table_of_verdicts(verdicts: Iterable[Verdict]) -> DataFrame:
    """Return a row per claim: its verdict, the strongest comparison against it, and the checks made on it.

    Columns, all text: claim, in short, verdict, closest comparison, other decodings, placebo, positive control.
    """
    columns = {"claim": "id", "in short": "title", "verdict": "verdict", "closest comparison": "key"}
    columns |= {"other decodings": "decodings", "placebo": "placebo", "positive control": "control"}
    rows = [[getattr(verdict, field) for field in columns.values()] for verdict in verdicts]
    return DataFrame(rows, columns=list(columns))


def table_of_comparisons(verdicts: Iterable[Verdict]) -> DataFrame:
    """Return a row per comparison, grouped by claim, with decisive comparisons first.

    Columns: claim, comparison, decoding, estimate with its interval and unit, n, decides ("yes" if the verdict rests
    on it), other decodings (the same comparison under each decoding that decides nothing). n is an integer, all other
    columns are text. A comparison without runs says so.
    """
    columns = ["claim", "comparison", "decoding", "estimate [95 %]", "n", "decides", "other decodings"]
    rows: dict[tuple[str, str, str], list[Any]] = {}  # the last cell: other decoding -> its result
    for verdict in verdicts:
        first: dict[str, list[Any]] = {}  # comparison -> the row that lists its other decodings
        for finding in sorted(verdict.findings, key=lambda finding: not finding.decisive):
            what = (finding.compared or finding.label).replace("_", " ")
            words = decoding_words(finding.decoding) if finding.decoding else ""
            value = "not measured" if finding.value == MISSING else finding.value or "no runs"
            place = (verdict.id, what, finding.decoding)
            if place in rows:  # a comparison that the claim reports itself comes again among the other decodings
                continue
            if finding.decisive or what not in first:
                rows[place] = [verdict.id, what, words, value, finding.n, "yes" if finding.decisive else "no", {}]
                first.setdefault(what, rows[place])
            else:
                first[what][-1].setdefault(finding.decoding, f"{words}: {value}")
    told = [[*row, "; ".join(text for _, text in sorted(others.items()))] for *row, others in rows.values()]
    return DataFrame(told, columns=columns)
