"""The bar of a sweep moves with the steps of its runs, whatever their processes leave behind."""

import io
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from evoalign_study import progress_bar
from tqdm import tqdm

SPEC = {"kind": "train", "arm": "es", "base": "A0", "seed": 3, "steps": 40, "task": "countdown", "scale": "tiny"}


@pytest.fixture
def folder(tmp_path):
    progress_bar.tell_in(tmp_path)
    yield tmp_path
    progress_bar.end()
    progress_bar.tell_in(None)


def drawn(ended: int, total: int, folder) -> str:
    """The line that a bar shows."""
    out = io.StringIO()
    with tqdm(total=total, desc="01", file=out, bar_format="{desc}: {n_fmt}/{total_fmt} runs{postfix}") as bar:
        progress_bar.show(bar, ended, progress_bar.told(folder))
    return out.getvalue().replace("\r", "\n")


def test_a_run_counts_by_its_steps(folder):
    progress_bar.tell(SPEC, 10, 0.12345)
    assert "01: 2.2/5 runs, es A0 3: step 10 of 40, reward 0.123" in drawn(2, 5, folder)
    progress_bar.tell(SPEC, 11, 0.5)  # within a second nothing new is written
    assert [run["step"] for run in progress_bar.told(folder)] == [10]
    progress_bar.end()
    assert "01: 3/5 runs\n" in drawn(3, 5, folder) + "\n" and progress_bar.told(folder) == []
    progress_bar.tell(SPEC, 1, None)  # the next run is told at once
    assert "step 1 of 40" in drawn(3, 5, folder) and "reward" not in drawn(3, 5, folder)


def test_what_cannot_be_read_or_written_is_left_out(folder):
    progress_bar.tell(SPEC, 10, 1.0)
    (folder / "1.json").write_text('{"run": "half a li')
    (folder / "2.part").write_text("{}")
    assert [run["run"] for run in progress_bar.told(folder)] == ["es A0 3"]
    progress_bar.end()
    progress_bar.tell_in(folder / "no such folder")
    progress_bar.tell(SPEC, 1, 1.0)
    progress_bar.end()


def test_all_futures_are_yielded_and_the_bar_is_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "SECONDS", 0.01)
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.02)
    (tmp_path / "7.json").write_text(json.dumps({"run": "es A0 3", "step": 20, "steps": 40, "reward": 0.5}))
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(time.sleep, i / 10) for i in range(4)]
        assert set(progress_bar.followed(futures, tmp_path, "01")) == set(futures)
    shown = capsys.readouterr().err
    assert re.search(r"[0-3]\.5/4 runs", shown) and "4/4 runs" in shown
    assert "es A0 3: step 20 of 40, reward 0.5" in shown
