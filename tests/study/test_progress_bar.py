"""The bar of a sweep moves with the steps of its runs, and is full at the end."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

from evoalign_study import progress_bar
from evoalign_study.records import spec_hash

SPEC = {"kind": "train", "arm": "es", "base": "A0", "seed": 3, "steps": 40, "task": "countdown", "scale": "tiny"}


def test_a_run_counts_by_its_steps_and_all_futures_are_yielded(monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "SECONDS", 0.01)
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.02)
    shares = [0.0] * 4
    progress_bar.tell_in({spec_hash(SPEC): 3}, shares)
    progress_bar.tell(SPEC, 20)
    progress_bar.tell(SPEC | {"seed": 4}, 20)  # of no run of the sweep
    progress_bar.tell_in({}, [])
    assert shares == [0, 0, 0, 0.5]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(time.sleep, i / 10) for i in range(4)]
        assert set(progress_bar.followed(futures, shares, "01")) == set(futures)
    shown = capsys.readouterr().err
    assert re.search(r"01: .* [0-3]\.5/4 runs", shown) and re.search(r"100%.* 4/4 runs", shown)
