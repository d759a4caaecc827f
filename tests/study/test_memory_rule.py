"""Rule "memory" on hand-built records: every verdict, what is asked of the formula, and what is refused."""

from functools import partial

from claim_worlds import DECLARED, judge

RULE = DECLARED["C16"]["rule"] | {"sizes": ["7B"]}
verdict = partial(judge, "C16", rule=RULE)
METHODS = (RULE["of"], *RULE["against"])


def record(method: str, size: str, published: float, error: float = 0.0) -> dict:
    """A record of a model with three measured steps; the second is missed by this share."""
    cells = {
        str(rows): {
            "predicted": {"weights": 600 * (1 + error * (rows == 8)), "KV cache": 0},
            "measured": {"weights": 600},
        }
        for rows in (4, 8, 16)
    }
    spec = {"kind": "memory", "scale": "tiny", "base": "A0", "base_digest": "x", "method": method, "size": size}
    return {
        "spec": spec, "spec_hash": f"{method} {size}", "status": "finished", "d": 100, "cells": cells,
        "published": {"7B": {"d": 7, "bytes": {"weights": published / 2, "moments": published / 2}}},
    }  # fmt: skip


def world(error: float = 0.0, sizes: tuple[str, ...] = ("0.14M", "1M", "4M"), **published: float) -> list[dict]:
    """Records of all methods, in which ES takes 10 bytes and others 60 unless said otherwise."""
    taken = dict.fromkeys(METHODS, 60) | {"es": 10} | published
    return [record(method, size, taken[method], error) for method in METHODS for size in sizes]


def test_ratios_within_the_bounds_against_all_support_it():
    judged = verdict(world())
    assert (judged.verdict, judged.n) == ("supported", 9)
    assert judged.intervals["grpo over es at 7B, above 5"].value == 6
    assert len(judged.findings) == 6 and judged.placebo == "favours no arm"


def test_a_formula_that_misses_a_step_by_more_than_is_asked_decides_nothing():
    for error in (0.051, -0.06):
        for taken in (60, 7):
            judged = verdict(world(error, grpo_lora=taken))
            assert judged.verdict == "underpowered" and "not decided: the formula misses a step by" in judged.text
    assert verdict(world(-0.049)).verdict == "supported"
    # one miss, of a method that its own ratio does not need, is enough
    records = [*world(grpo_lora=7), record("grpo_adam8bit", "9M", 60, 0.2)]
    assert verdict(records).verdict == "underpowered"


def test_too_few_steps_decide_nothing_and_none_leave_it_open():
    few = verdict(world(sizes=("0.14M", "1M")))
    assert few.verdict == "underpowered" and "needs 8 a cell" in few.text and few.n == 6
    assert verdict([]).verdict == "open"
    without = [r for r in world() if r["spec"]["method"] != "grpo_lora"]
    assert verdict(without).verdict == "underpowered"
