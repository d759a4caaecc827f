"""What a model answers, problem by problem: the engine's own texts, in a record that stays small."""

from contextlib import closing

import numpy as np
import pytest
from evoalign_study import measures, sweep, training, weight_cache
from evoalign_study.kinds import weights as answers
from evoalign_study.kinds.weights import LONGEST, answers_spec, pack_texts, unpack_texts
from evoalign_study.records import MAX_RECORD, record_line, unpack_bits
from hypothesis import given
from hypothesis import strategies as st

from evoalign_lib import tiny
from evoalign_lib.files import canonical_json

SETTINGS = {
    "max_completion_length": 16, "validation_problems": 4, "test_problems": 4, "steps": 1, "prompts_per_step": 32,
    "curve_points": 2, "population_size": 4, "sigma": 0.03, "alpha": 0.01,
}  # fmt: skip
RUNS = [("es", 1)]
ASKED = {"max_completion_length": 16, "coverage_problems": 256}
MEASURE = measures.get("countdown")
needs_bases = pytest.mark.skipif(not (tiny.bases_folder() / "A0").is_dir(), reason="the bases have not been trained")


@pytest.fixture(scope="module")
def ends(es_runs):
    """The base, and the end of a run."""
    return {"base": None, "run": weight_cache.end(es_runs[0])}


@pytest.fixture(scope="module")
def recorded(ends):
    return {name: sweep.run(answers_spec("A0", end, ASKED, "tiny"), "nb", "commit") for name, end in ends.items()}


@pytest.mark.parametrize("name", ["base", "run"])
def test_the_texts_are_those_of_the_engine_and_are_graded_whole(ends, recorded, name):
    spec, record = answers_spec("A0", ends[name], ASKED, "tiny"), recorded[name]
    model, tokenizer, sets = training.world(spec)
    assert sets["test"] == tiny.problems("test", 256) and record["longest"] == LONGEST
    with closing(training.evaluation_engine(spec, model, tokenizer, sets)) as engine:
        if ends[name] is not None:
            (engine.master[:],) = weight_cache.of_group(ends[name]["of"])
        for decoding, samples in (("greedy", 0), ("t1", 1)):
            (row,) = engine.generate("test", samples=samples, seed=0)
            found = unpack_texts(record[decoding], 256)
            right = unpack_bits(record[f"{decoding}_bits"], 256)
            for problem, (text, _), one, is_right in zip(sets["test"], row, found, right, strict=True):
                answer = MEASURE.answer(text)
                assert (one.text, one.answered, one.cut) == (answer or text[:LONGEST], answer is not None, False)
                assert is_right == MEASURE.right(problem, text)
            assert len(set(found)) > 100 and (name == "run" or 0 < right.sum() < 256)


def test_two_models_answer_otherwise_and_one_the_same_again(ends, recorded):
    assert recorded["base"]["greedy"] != recorded["run"]["greedy"]
    again = sweep.run(answers_spec("A0", None, ASKED, "tiny"), "nb", "commit")
    assert all(again[name] == recorded["base"][name] for name in ("n", "longest", "greedy", "t1", "t1_bits"))


def test_a_record_of_256_problems_is_small(recorded):
    for record in recorded.values():
        assert record["n"] == 256 and len(record_line(record)) < MAX_RECORD - 1_000


@pytest.mark.parametrize("text", ["\ufffd" * 200, '"\\\n' * 60, "<|im_end|> " * 20, "", "12+3*(24-6)"])
def test_texts_of_any_kind_fit_beside_the_longest_spec(recorded, text):
    longest_spec = 2_600  # of a run in two parts, each of which is named in full
    room = MAX_RECORD - answers._REST - longest_spec - 128
    packed = answers._fitting({name: [(text, False)] * 256 for name in answers.DECODINGS}, room - 1)
    record = recorded["base"] | packed
    spare = longest_spec - len(canonical_json(record["spec"]))
    assert len(record_line(record)) + spare <= MAX_RECORD
    (one,) = set(unpack_texts(packed["t1"], 256))
    assert one.text == text[: packed["longest"]] and one.cut == (len(text) > packed["longest"])
    with pytest.raises(ValueError, match=r"answers in 50 bytes.*Ask fewer problems"):
        answers._fitting({"greedy": [(text, True)] * 256}, 50)


@needs_bases
def test_bases_whose_right_answers_are_not_listed_are_asked_too():
    few = {"coverage_problems": 4, "max_completion_length": 24, "filler_steps": 4}
    found = sweep.run(answers_spec("H0", None, few, "tiny"), "nb", "commit")
    assert len(unpack_texts(found["greedy"], 4)) == found["n"] == 4
    questions = {
        "coverage_problems": 4,
        "max_completion_length": 32,
        "task": "conciseness",
        "validation_problems": 9999,
    }
    found = sweep.run(answers_spec("B0", None, questions, "tiny"), "nb", "commit")
    # the task looks for no answer in a completion, so that these are completions
    assert all(one.answered and one.text for one in unpack_texts(found["greedy"], found["n"]))


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        ("A0", ASKED | {"coverage_problems": 0}, "coverage_problems=0: a record has room for the answers to 1 to 320"),
        ("A0", ASKED | {"coverage_problems": 321}, "coverage_problems=321"),
        ("A0", {"coverage_problems": 4}, "kind 'answers' needs the setting 'max_completion_length'"),
        ("A0", {"max_completion_length": 16}, "needs the setting 'coverage_problems'"),
        ("A0", ASKED | {"task": "conciseness"}, "base 'A0' was trained for the task 'countdown'"),
        ("gpt2", ASKED, "base 'gpt2' has no runs of kind 'answers'"),
        ("H0", ASKED, "base 'H0' needs filler_steps"),
    ],
)
def test_what_cannot_be_asked_is_refused(base, settings, message):
    with pytest.raises(ValueError, match=message):
        answers_spec(base, None, settings, "tiny")


def test_a_model_of_another_base_is_refused(ends):
    with pytest.raises(ValueError, match="started from base 'A0', the spec is of 'A1'"):
        answers_spec("A1", ends["run"], ASKED, "tiny")


# surrogates are no characters of a text that a tokenizer decodes
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.booleans()), min_size=1, max_size=20))
def test_packed_texts_come_back(texts):
    packed = pack_texts(texts)
    assert packed.isascii() and not {'"', "\\", "\n"} & set(packed)
    found = unpack_texts(packed, len(texts))
    assert [(one.text, one.answered, one.cut) for one in found] == [
        (t[:LONGEST], a, len(t) > LONGEST) for t, a in texts
    ]


def test_damaged_and_missing_texts_are_refused():
    with pytest.raises(ValueError, match="2 texts where there are 3 problems: damaged record"):
        unpack_texts("a b", 3)
    with pytest.raises(ValueError, match="no texts"):
        pack_texts([])
    assert np.array_equal(unpack_texts("", 1)[0], ("", True, False))
