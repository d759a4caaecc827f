"""The claims: declared in paper/claims.yaml before they are tested, judged by code from the run records."""

from evoalign_study.claims.decision import decide
from evoalign_study.claims.declarations import check_claim, load_claims, lock, lock_problems, once_locked, rule_hash
from evoalign_study.claims.selection import NULLS, committed_records
from evoalign_study.claims.tables import table_of_comparisons, table_of_statements, table_of_verdicts
from evoalign_study.claims.verdicts import VERDICTS, Verdict, evaluate_all, evaluate_named

__all__ = [
    "NULLS",
    "VERDICTS",
    "Verdict",
    "check_claim",
    "committed_records",
    "decide",
    "evaluate_all",
    "evaluate_named",
    "load_claims",
    "lock",
    "lock_problems",
    "once_locked",
    "rule_hash",
    "table_of_comparisons",
    "table_of_statements",
    "table_of_verdicts",
]
