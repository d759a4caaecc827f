"""An engine of vLLM beside one of transformers, over weights, low-rank members in batches, and over adapters."""

import itertools
import signal

import numpy as np
import pytest
from small_models import ROWS, SETTINGS, adapted, engine, linear, members, move

from evoalign_lib.engines import vllm
from evoalign_lib.engines.base import Options
from evoalign_lib.engines.local import LocalEngine

pytest.importorskip("vllm", reason="make test-engines has an environment with vLLM")


@pytest.fixture(scope="module", params=["weights", "linear", "adapters"])
def pair(request):
    """One engine of each kind, with the same weights whatever a test did: each moves both."""
    few = {"settings": {"max_loras": 4} | SETTINGS}  # a batch has four members
    if request.param == "weights":
        both = engine(), engine(LocalEngine)
    elif request.param == "linear":  # three factors, where vLLM allocates eight
        both = engine(vllm.LowRankEngine, linear(), rank=3, **few), engine(LocalEngine, linear(), rank=3)
    else:
        pytest.importorskip("peft")
        both = engine(vllm.AdapterEngine, adapted(), **few), engine(LocalEngine, adapted())
    yield both
    both[0].close()


only_weights = pytest.mark.parametrize("pair", ["weights"], indirect=True)


def test_greedy_tokens_are_those_of_transformers(pair):
    (ours,), (theirs,) = (one.generate("train") for one in pair)
    assert ours == theirs
    assert len({tuple(ids) for _, ids in ours}) > len(ROWS) // 2, "a model that says one thing shows nothing"


def test_members_are_those_of_transformers(pair):
    found = [one.evaluate(members(5), 0.1, "train", np.arange(len(ROWS))) for one in pair]
    for ours, theirs in zip(*found, strict=True):
        assert ours.scored.rewards.tolist() == theirs.scored.rewards.tolist()
        assert ours.lengths.tolist() == theirs.lengths.tolist() and ours.clipped.tolist() == theirs.clipped.tolist()
    assert len({tuple(e.scored.rewards) for e in found[0]}) == 10, "members that do alike show nothing"


@pytest.mark.parametrize("pair", ["linear"], indirect=True)
def test_members_in_a_batch_write_what_each_writes_alone(pair):
    """Alone, a member's weights are written in place, and none of its tokens comes from an adapter."""
    asked = members(5), 0.1, "train", np.arange(len(ROWS))
    for _ in range(2):
        batch, alone = pair[0].evaluate(*asked), vllm.VLLMEngine.evaluate(pair[0], *asked)
        assert [e.written for e in batch] == [e.written for e in alone]
        move(pair)


@only_weights
def test_options_of_decoding_are_those_of_transformers(pair, monkeypatch):
    rows = np.arange(len(ROWS))

    def under(options, sampling=None):
        """Texts of greedy completions, or rewards of samples, by each engine."""
        found = []
        for one in pair:
            monkeypatch.setattr(one, "options", options)
            if sampling is None:
                found.append([text for text, _ in one.generate("train")[0]])
            else:
                found.append(one.evaluate(members(1)[:1], 1e-6, "train", rows, sampling=sampling)[0].scored.rewards)
            monkeypatch.undo()
        return found

    plain = under(Options())[0]
    stop = next(text[3:5] for text in plain if len(text) > 8)
    ours, theirs = under(Options(stop_strings=(stop,)))
    assert ours == theirs != plain
    assert ours == [text[: text.index(stop) + len(stop)] if stop in text else text for text in plain]

    greedy = [float(sum(c.isalpha() for c in text)) for text in plain]
    for options in (Options(top_k=1), Options(top_p=1e-6)):
        ours, theirs = under(options, (5, 1))
        assert ours.tolist() == theirs.tolist() == greedy, options
    assert under(Options(), (5, 1))[0].tolist() != greedy
    for refused in (lambda: under(Options(temperature=1e-3), (5, 1)), lambda: engine(options=Options(1e-3))):
        with pytest.raises(ValueError, match=r"temperature=0.001 .*would sample at 0.01"):
            refused()
    monkeypatch.undo()

    ours, theirs = under(Options(generation_kwargs={"repetition_penalty": 1.3}))
    assert ours == theirs != plain


def test_updates_have_the_same_bits_and_the_next_tokens_are_equal(pair):
    before = pair[0].generate("train")
    move(pair)
    assert pair[0].master.tobytes() == pair[1].master.tobytes()
    pair[0].check()  # the masters of the workers
    ours, theirs = (one.generate("train") for one in pair)
    assert ours == theirs != before
    assert pair[0].generate("train") == ours  # and evaluating members in between leaves no trace
    pair[0].evaluate(members(1), 0.3, "train", np.arange(4))
    assert pair[0].generate("train") == ours


@only_weights
def test_without_emptying_the_prefix_cache_members_would_be_wrong(pair, monkeypatch):
    def rewards(one=pair[0]):
        return [e.scored.rewards.tolist() for e in one.evaluate(members(2), 0.3, "train", np.arange(len(ROWS)))]

    expected = rewards(pair[1])
    assert rewards() == expected
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "_forget", lambda llm: None)
        assert rewards() != expected
    assert rewards() == expected
    monkeypatch.setattr(pair[0].generator.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="did not empty its prefix cache"):
        rewards()


def test_noise_on_the_weights_is_there_for_a_while(pair):
    before, noisy = pair[0].generate("train"), []
    for one in pair:
        with one.perturbed(members(1)[0].key, 0.1):
            noisy.append(one.generate("train"))
    assert noisy[0] == noisy[1] != before
    assert [one.generate("train") for one in pair] == [before, before]


def test_samples_are_common_random_numbers(pair):
    ours = pair[0]
    first = ours.generate("train", samples=2, seed=5)
    assert first == ours.generate("train", samples=2, seed=5)
    assert first[0] != first[1] and first != ours.generate("train", samples=2, seed=6)
    rows = np.arange(len(ROWS))  # all draws at once are those of one call each
    assert first == [ours.generate_rows("train", rows, 5, draw) for draw in range(2)]
    assert ours.generate("train", rows[:0], samples=2) == [[], []]
    some = ours.generate("train", np.array([3, 1]), samples=1, seed=5)
    assert some[0] == [first[0][3], first[0][1]]
    # the same member twice, with the same numbers, and with others
    twice = ours.evaluate([members(1)[0]] * 2, 0.05, "train", np.arange(4), sampling=(7, 3))
    other = ours.evaluate(members(1)[:1], 0.05, "train", np.arange(4), sampling=(8, 3))
    assert twice[0].lengths.shape == (12,)
    assert twice[0].scored.rewards.tolist() == twice[1].scored.rewards.tolist() != other[0].scored.rewards.tolist()


@only_weights
def test_a_second_engine_is_refused(pair):
    with pytest.raises(RuntimeError, match="works in this process already.*close"):
        engine().generate("train")


@only_weights
def test_an_interrupt_leaves_no_requests_behind(pair, monkeypatch):
    """Ctrl-C while vLLM decodes: it would go on with what was cut off."""
    # a shell that starts pytest in the background has interrupts ignored, and its children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ours, theirs = pair
    ours.generate("train")
    engine, steps = ours.generator.llm.llm_engine, itertools.count()
    step = engine.step

    def interrupted():
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.evaluate(members(1), 0.05, "train", np.arange(len(ROWS)))
    move(pair, seed=3)
    rows = np.arange(len(ROWS))
    first, second = ([e.scored.rewards.tolist() for e in one.evaluate(members(2), 0.05, "train", rows)] for one in pair)
    assert first == second
    assert ours.generate("train") == theirs.generate("train")
