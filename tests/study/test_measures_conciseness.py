"""Runs of the conciseness task: specs, the questions of a run, and what a record has of it."""

import json
import shutil

import numpy as np
import pytest
from evoalign_study import base_models, collapse, kinds, training
from evoalign_study.kinds import train
from evoalign_study.kinds.decode import base_specs
from evoalign_study.kinds.train import train_specs
from evoalign_study.measures import conciseness as measured
from evoalign_study.measures.base import beginning
from evoalign_study.records import accuracy_matrix, unpack_bits
from helpers import each_named, refused

from evoalign_lib import tiny
from evoalign_lib.analysis import hacking
from evoalign_lib.engines.local import LocalEngine, Prompts
from evoalign_lib.tasks import conciseness
from evoalign_lib.tiny import questions

SETTINGS = {"task": "conciseness", "max_completion_length": 24, "unique_prompts": 200, "curve_points": 3}
SETTINGS |= {"curve_spacing": "log", "steps": 2, "prompts_per_step": 4}
ES = SETTINGS | {"population_size": 4, "sigma": 0.01, "alpha": 0.005}
GRPO = SETTINGS | {"num_generations": 4, "learning_rate": 1e-4, "beta": 0.0}
BOTH = {"es": ES, "grpo": GRPO}


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(measured, "JENSEN_DRAWS", 2)
    monkeypatch.setattr(measured, "BREAKING_DRAWS", 2)


@pytest.mark.parametrize("base", ["B0", *(pytest.param(b, marks=pytest.mark.slow) for b in ("B1", "B2"))])
def test_the_bases_know_the_answers_and_prefer_sentences(base):
    asked, (model, tok) = questions.problems("test"), tiny.load(base)
    prompts = {"test": Prompts(conciseness.dataset(asked, tok), tok)}
    engine = LocalEngine(model, tok, None, prompts, max_completion_length=24)
    (greedy,), sampled = engine.generate("test"), engine.generate("test", samples=4)
    assert np.mean([conciseness.is_correct(text, p) for (text, _), p in zip(greedy, asked, strict=True)]) > 0.97
    rewards = conciseness.reward(asked, [text for text, _ in greedy], [p.answer for p in asked])
    assert np.mean(rewards) < -5 * np.mean([len(p.answer) for p in asked])  # five times an empty answer's
    # everything that a reward for length could select is there, and rare
    texts = [text for row in sampled for text, _ in row]
    report = hacking.hack_report(texts, prompts=[p.question for p in asked] * 4)
    assert all(0 < report.shares[name] < 0.2 for name in ("empty", "repetitive", "further_turn", "other_script"))
    assert 0.08 < np.mean([text == p.answer for text, p in zip(texts, asked * 4, strict=True)]) < 0.25


def test_specs_say_task_and_measure():
    (spec,) = train_specs("es", ["B1"], [3], ES, "tiny")
    assert spec["task"] == "conciseness" and spec["measure"] == "strict" and spec["unique_prompts"] == 200
    assert not {"grader", "validation_problems", "test_problems"} & spec.keys()
    assert train_specs("grpo", ["B0"], [0], GRPO | {"measure": "released"}, "tiny")[0]["measure"] == "released"
    with pytest.raises(ValueError, match="'sft'"):  # what needs right answers
        train_specs("sft", ["B0"], [0], ES | GRPO, "tiny")
    with pytest.raises(ValueError, match="'A0'.*B0, B1, B2"):
        train_specs("es", ["A0"], [0], ES, "tiny")


test_what_no_run_can_have_is_refused = refused(  # settings, what the error names
    *each_named({"unique_prompts": 50}, {"measure": "words"}, {"validation_problems": 129}, {"test_problems": 257}),
    *each_named({"noise_draws": 2.0}, {"questions": "x.jsonl"}),
    ({"task": "countdown", "validation_problems": 4, "test_problems": 4}, "'B0'.*task='conciseness'"),
    call=lambda changed: train_specs("es", ["B0"], [0], ES | changed, "tiny"),
)


def test_a_run_sees_its_questions_equally_often_and_two_are_always_the_same():
    (spec,) = train_specs("es", ["B0"], [3], ES | {"steps": 100}, "tiny")
    _, _, sets = training.world(spec)
    asked = [p.question for p in sets["train"]]
    assert len(asked) == 400 and {asked.count(q) for q in asked} == {2}
    assert set(asked) == {p.question for p in questions.problems("train")}
    two, again = (set(training.world(spec | {"unique_prompts": 2, "seed": seed})[2]["train"]) for seed in (0, 1))
    assert two == again and len(two) == 2 and {p.answer for p in two} > {"no"} and any("+" in p.question for p in two)


SMALLER = {"validation_problems": 8, "test_problems": 12, "noise_draws": 1}


def check_curve(record, n, draws=2):
    curve = record["curve"]
    assert curve["kl"][0] == pytest.approx(0, abs=1e-6) and curve["kl"][-1] > 0
    assert len({len(values) for values in curve.values()}) == 1
    for decoding, asked in (("greedy", n), ("t1", draws * n)):
        bits = [unpack_bits(text, asked).mean() for text in curve[f"right_bits_{decoding}"]]
        assert np.allclose(bits, curve[f"right_{decoding}"], atol=1e-4)


def test_the_curve_and_the_record_of_a_run_hold_what_the_module_says():
    records = {arm: train.run(train_specs(arm, ["B0"], [0], own | SMALLER, "tiny")[0]) for arm, own in BOTH.items()}
    for record in records.values():
        check_curve(record, 12)
        assert record["curve"]["step"] == [0, 1, 2] and record["test"]["n"] == 12
        assert len(record["shown"]) == measured.SHOWN and record["hacks"]["greedy"]["right"] > 0.5
        for decoding in ("greedy", "t1"):
            right = accuracy_matrix([record], decoding).mean()
            assert right == pytest.approx(record["test"][decoding], abs=1e-6)
        # noise of a size that breaks everything, before the test, leaves no trace
        assert set(record["jensen"]["gaps"]) == {f"{s:g}" for s in collapse.JENSEN_SIGMAS}
        assert record["test"]["greedy"] == pytest.approx(record["curve"]["right_greedy"][-1], abs=1e-4)
    # before training all have the same weights, and measuring moves none
    es, grpo = (r["curve"] for r in records.values())
    assert all(es[name][0] == grpo[name][0] for name in es if name.startswith(("proxy", "right")))
    [other] = train_specs("es", ["B0"], [0], ES | SMALLER | {"curve_points": 4, "validation_problems": 4}, "tiny")
    assert train.run(other)["digest"] == records["es"]["digest"]


@pytest.mark.slow
def test_a_record_of_sixteen_points_and_all_questions_can_be_stored():
    """With what is stored besides: 600 bytes of environment, commit and hash."""
    for arm, own in BOTH.items():
        spec = train_specs(arm, ["B0"], [0], own, "tiny")[0]
        record = train.run(spec)
        check_curve(record, 256)
        parts = (record | {"spec": spec}, *record["curve"].values())
        size, *of_points = (len(json.dumps(part, separators=(",", ":"))) for part in parts)
        assert size + sum(of_points) * (16 / 3 - 1) + 600 < 8000 and record["test"]["n"] == 256


def test_fewer_questions_and_draws_are_in_a_spec_only_where_they_are_asked_for():
    plain, [spec] = (train_specs("es", ["B0"], [0], ES | own, "tiny") for own in (dict.fromkeys(SMALLER), SMALLER))
    assert plain == train_specs("es", ["B0"], [0], ES, "tiny") and spec == plain[0] | SMALLER
    sets = training.world(spec)[2]
    assert all(sets[name] == questions.problems(name)[:n] for name, n in (("validation", 8), ("test", 12)))


def test_the_base_record_says_where_its_answers_break():
    asked = {"task": "conciseness", "max_completion_length": 24, "validation_problems": 32}
    (spec,) = base_specs(["B0"], asked, "tiny")
    record = kinds.get("base")(spec)
    shares = list(record["breaking"].values())
    assert shares[0] > 0.95 and shares[-1] < 0.1 and min(np.diff(shares)) < 0
    assert record["point"]["kl"] == pytest.approx(0, abs=1e-6)


# ---- models from elsewhere


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder: nothing says that its weights are those of a base of the tiny world."""
    folder = tmp_path_factory.mktemp("models") / "elsewhere"
    shutil.copytree(tiny.bases_folder() / "B0", folder)
    return str(folder)


def write(path, n):
    """A file of n questions, which the model happens to know."""
    asked = questions.problems("test")[:n]
    path.write_text("\n".join(json.dumps({"question": p.question, "answer": p.answer}) for p in asked))
    return path


@pytest.fixture
def own(tmp_path):
    return write(tmp_path / "my questions.jsonl", 16)


ELSEWHERE = {"unique_prompts": None, "steps": 1, "curve_points": 2, "curve_spacing": None, "noise_draws": 1}


def test_answers_of_a_model_from_elsewhere_break_at_sigmas_of_its_own_and_no_record_names_the_file(model, own):
    """How notebook 03 runs on own questions, tests of notebooks on an own folder have."""
    (spec,) = base_specs([model], ES | ELSEWHERE | {"questions": own}, "smoke")
    record = kinds.get("base")(spec)
    assert own.name not in json.dumps([spec, record]) and record["test"]["n"] == len(record["shown"]) == 4
    assert list(record["breaking"]) == [f"{sigma:g}" for sigma in measured.ELSEWHERE_SIGMAS]
    assert 0.01 < collapse.breaking_sigma(record) < 0.1  # which a tenth of the tiny world's sigmas would miss
    assert set(record["jensen"]["gaps"]) == {"0.0003", "0.001", "0.003"}


@pytest.mark.parametrize(("n", "sizes"), [(8, (4, 2, 2)), (17, (8, 4, 5))])
def test_own_questions_fall_into_the_same_three_splits_in_every_run(model, tmp_path, n, sizes):
    settings = ES | ELSEWHERE | {"questions": str(write(tmp_path / "q.jsonl", n)), "prompts_per_step": 20}

    def asked(seed=0, **changed):
        [spec] = train_specs("es", [model], [seed], settings | changed, "full")
        return {name: set(problems) for name, problems in training.world(spec)[2].items()}

    first, few = asked(), asked(unique_prompts=3, test_problems=1)
    assert first == asked(seed=1) and tuple(len(first[k]) for k in ("train", "validation", "test")) == sizes
    assert len(set.union(*first.values())) == n
    assert len(few["train"]) == 3 and few["train"] < first["train"]
    assert len(few["test"]) == 1 and len(few["validation"]) == sizes[1]


def test_without_own_questions_the_published_ones_are_asked(model, external_data):
    settings = GRPO | ELSEWHERE
    [spec] = train_specs("grpo", [model], [0], settings, "full")
    assert not {"questions", "questions_sha256"} & spec.keys()
    [one] = train_specs("grpo", [model], [0], settings | {"unique_prompts": 1, "validation_problems": 3}, "full")
    sets, few = (training.world(each)[2] for each in (spec, one))
    assert len(sets["train"]) == 4 and set(sets["train"]) == set(conciseness.load_public("train"))
    assert sets["validation"] == sets["test"] == conciseness.load_public("eval")
    assert len(set(few["train"])) == 1 and len(few["validation"]) == 3 and len(few["test"]) == 8
    with pytest.raises(ValueError, match="unique_prompts=3"):
        train_specs("grpo", [model], [0], settings | {"unique_prompts": 3}, "full")


def test_a_file_that_has_changed_or_gone_is_not_read(model, own, monkeypatch):
    [spec] = train_specs("es", [model], [0], ES | ELSEWHERE | {"questions": own}, "full")
    digest, text = spec["questions_sha256"], own.read_bytes()
    own.write_bytes(text + b"\n")
    with pytest.raises(ValueError, match=f"has changed: .*{digest}"):
        training.world(spec)
    own.write_bytes(text)
    assert training.world(spec)
    own.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=digest):
            training.world(spec)
        monkeypatch.setattr(base_models, "_FILES", {})  # as a process that was not told


OWN = {"validation_problems": 4, "test_problems": 4} | ES | ELSEWHERE
test_what_a_run_on_own_questions_cannot_have_is_refused_before_it = refused(  # what is changed, what the error names
    *each_named({"unique_prompts": 9}, {"validation_problems": 5}),
    ({"curve_points": 40}, "curve_points=40 with 4 test questions"),
    ({"curve_points": 20, "sampled_at": [0.4, 0.6]}, "under 4 decodings"),
    ({"task": "countdown"}, "questions="),
    call=lambda changed, model, own: train_specs("es", [model], [0], OWN | {"questions": own} | changed, "full"),
)


def test_files_of_questions_that_are_refused(model, own, tmp_path):
    lines = own.read_text().splitlines()
    twice, empty = tmp_path / "twice.jsonl", tmp_path / "empty.jsonl"
    twice.write_text("\n".join([*lines, lines[3]]))
    empty.write_text("{}")
    for path, base, error, named in (
        (tmp_path / "none.jsonl", model, FileNotFoundError, "none.jsonl"),
        (write(tmp_path / "few.jsonl", 7), model, ValueError, "7 questions"),
        (twice, model, ValueError, "twice"),
        (empty, model, ValueError, "line 1"),
        (own, str(tmp_path / "nowhere"), ValueError, "nowhere"),
    ):
        with pytest.raises(error, match=named):
            base_specs([base], ES | {"questions": path}, "full")


def test_completions_of_any_script_leave_room_in_a_record():
    shown = [beginning(text * 100) for text in ("a", "\n", "好", "\U0001f600")]
    assert [len(text) for text in shown] == [80, 80, 39, 19]
    assert all(len(json.dumps(text)) <= 240 for text in shown)
