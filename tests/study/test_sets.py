"""Mathematics and reasoning in the study: one set named by a setting, graded under a time limit."""

import json
import random

import pytest
from evoalign_study import measures

from evoalign_lib.checks import nearest

pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")


@pytest.mark.parametrize(("task", "name"), [("reasoning", "gcd"), ("mathematics", "gsm8k")])
def test_runs_measure_a_set_by_its_name(task: str, name: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "mathematics").mkdir()
    monkeypatch.setenv("EVOALIGN_DATA", str(tmp_path))
    for split in ("train", "validation", "test"):
        rows = [{"question": f"What is {i} + 7, in {split}?", "answer": f"#### {i + 7}"} for i in range(9)]
        (tmp_path / f"mathematics/gsm8k.{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    measure = measures.get(task)
    settings = {"problem_set": name, "validation_problems": 3, "test_problems": 4}
    spec = measure.spec_fields("a model", settings) | settings | {"prompts_per_step": 2, "seed": 1}
    assert spec.get("library") == ("0.1.25" if task == "reasoning" else None)
    sets = measure.sets(spec)
    assert (len(sets["validation"]), len(sets["test"])) == (3, 4) and sets["train"]
    said = [measure.right_answer(each, random.Random(0)) for each in sets["test"]]
    rows = [[(text, [1]) for text in said], [("I do not know.", [1])] * 4]
    assert measure.graded(sets["test"], rows).tolist() == [[True] * 4, [False] * 4]
    assert measure.right(sets["test"][0], said[0]) and measure.score(sets["test"][0], "") == 0.0
    assert measure.answer(said[0]) in said[0] and measure._rewards.timeout == 10.0
    with pytest.raises(ValueError, match="there are"):
        measure.spec_fields("a model", settings | {"test_problems": 10_000})
    for given, told in (({}, "say .*:NAME"), ({"problem_set": name + "x"}, nearest(name, [name]).strip())):
        with pytest.raises(ValueError, match=told[:-1]):
            measure.spec_fields("a model", given)
