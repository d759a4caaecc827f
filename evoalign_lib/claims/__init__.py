"""The claims: declared in paper/claims.yaml before they are tested, judged by code from the run records."""

from evoalign_lib.claims.verdicts import (
    VERDICTS,
    Verdict,
    check_claim,
    committed_records,
    decide,
    evaluate,
    evaluate_all,
    evaluate_together,
    load_claims,
    lock,
    lock_problems,
    read_lock,
    rule_hash,
)

__all__ = [
    "VERDICTS",
    "Verdict",
    "check_claim",
    "committed_records",
    "decide",
    "evaluate",
    "evaluate_all",
    "evaluate_together",
    "load_claims",
    "lock",
    "lock_problems",
    "read_lock",
    "rule_hash",
]
