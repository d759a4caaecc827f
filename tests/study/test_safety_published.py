"""The published safety data: found, checked, read; and what the analysis of it says, down to the published numbers."""

import gzip
import hashlib
import json

import pytest
from evoalign_study import published_judgments as view
from evoalign_study import records
from evoalign_study import safety_published as data
from evoalign_study.kinds import judged as kind
from helpers import refused
from servers import answering

POINT = {"prompt": "Why?", "response": "", "reward": 0.5, "cost": -1, "label": "SH"}
# --------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A file of our own in the place of a published one; EVOALIGN_DATA and the cache are empty folders."""
    content = json.dumps(POINT).encode()
    entry = {"ES-100_points.jsonl": ("somewhere/points.jsonl", hashlib.sha256(content).hexdigest())}
    monkeypatch.setattr(data, "_PUBLIC", data._PUBLIC | entry)
    (tmp_path / "data" / "safety").mkdir(parents=True)
    monkeypatch.setenv("EVOALIGN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EVOALIGN_ACCEPT_LICENCE", raising=False)
    return content, tmp_path / "data" / "safety" / "ES-100_points.jsonl"


def test_local_files_are_read_plain_or_packed_without_consent(small):
    content, path = small
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(content))
    assert data.load_points("ES-100").rewards == [0.5]
    packed.unlink()
    path.write_bytes(content)
    assert data.load_points("ES-100").rewards == [0.5]


def test_a_changed_local_file_is_refused(small):
    """What is torn, or unpacks to too much, is found as in a packed ledger (`test_sweep`)."""
    content, path = small
    path.write_bytes(content + b" ")
    with pytest.raises(ValueError, match="ES-100_points.jsonl has SHA-256 .*, expected"):
        data.load_points("ES-100")


def test_nothing_is_fetched_before_the_licence_is_accepted(small, monkeypatch):
    asked = []

    def reply(path, body, headers):
        asked.append(path)
        return small[0]

    with answering(reply) as address:
        monkeypatch.setattr(data, "REPOSITORY", f"{address}/")
        with pytest.raises(PermissionError, match="academic and educational use only.*EVOALIGN_ACCEPT_LICENCE=es-"):
            data.load_points("ES-100")
        monkeypatch.setenv("EVOALIGN_ACCEPT_LICENCE", "yes")  # of what?
        with pytest.raises(PermissionError):
            data.load_points("ES-100")
        assert not asked
        assert data.load_points("ES-100", accept_licence=True).rewards == [0.5]
        monkeypatch.setenv("EVOALIGN_ACCEPT_LICENCE", data.LICENCE)
        assert data.load_points("ES-100").rewards == [0.5]
        assert asked == ["/somewhere/points.jsonl"]  # once: then from the cache


test_unknown_names_are_refused = refused(
    (lambda: data.load_points("ES-50"), "'ES-500'"), (lambda: kind.run_judgments({"part": "all"}), "'all'")
)


# --------------------------------------------------------------------------------------------------- the published data


def test_the_published_files_hold_what_they_are_said_to(external_data):
    judged, asked = data.load_judgments(), data.load_points("Beaver-V1").prompts
    assert len(judged) == 1000 and len({j.question for j in judged}) == 50
    assert {j.question for j in judged} <= set(asked)
    tie = data.Judgment("ES-500", "Beaver-V1", "helpfulness", "Why?", (8.0, 7.5), "")
    assert (tie.outcome(), tie.outcome(0), judged[0].outcome(20)) == (0.5, 1.0, 0.5)
    assert [j.outcome() for j in judged if j.scores is None] == [None] * 5
    # every pair once on every question, in one order
    assert len({(j.question, j.dimension, frozenset((j.a, j.b))) for j in judged}) == 1000
    assert len(asked) == 3036 and len(set(asked)) == 2954 and max(map(asked.count, asked[:40])) >= 1


@pytest.fixture(scope="module")
def found(external_data):
    """Records of the ratings (few orders), the games (few resamples), and one model's responses."""
    specs = {(s["part"], s.get("model")): s for s in kind.judgments_specs("tiny")}
    assert len(specs) == 8
    chosen = [
        specs["elo", None] | {"orders": 50},
        specs["games", None] | {"resamples": 200},
        specs["responses", "Beaver-V3"] | {"resamples": 200},
    ]
    return [
        {"spec": spec, "spec_hash": records.spec_hash(spec), "status": "finished"} | kind.run_judgments(spec)
        for spec in chosen
    ]


def test_records_can_be_stored_and_hold_no_text(found):
    assert all(len(records.record_line(r)) < 5_000 for r in found)
    words = json.dumps(found)
    assert not any(j.question[:30] in words for j in data.load_judgments())


def test_published_elo_is_reproduced_and_is_one_of_many(found):
    published = data.load_elo()
    for dimension, of in found[0]["dimensions"].items():
        for model, row in of["models"].items():
            assert row["reproduced"] == row["published"] == round(published[dimension][model], 4)
            assert model == data.BASE or (45 < row["std"] < 80 and row["least"] < row["reproduced"] < row["most"])


def test_games_give_the_known_numbers(found):
    of = found[1]["dimensions"]
    won = [(of[d]["won_by_slot"]["A"], of[d]["won_by_slot"]["B"], of[d]["ties"]) for d in data.DIMENSIONS]
    assert won == [(255, 236, 4), (242, 236, 22)]
    known = {"reward": (0.784, 0.793), "-cost": (0.703, 0.751), "length": (0.77, 0.782), "reward - cost": (0.8, 0.847)}
    for name, values in known.items():
        for dimension, value in zip(data.DIMENSIONS, values, strict=True):
            # games of equal cost favour nobody, and are left out here
            room = 0.007 if name == "-cost" else 0.001
            assert of[dimension]["agreement"][name]["all"][0] == pytest.approx(value, abs=room)
    assert of["harmlessness"]["scores"]["9"] == 431 and sum(of["harmlessness"]["scores"].values()) == 1000
    for dimension in data.DIMENSIONS:
        lead = {key: of[dimension][key]["Beaver-V3"] for key in ("lead", "equal_length_lead")}
        assert lead["lead"][1] > 0  # it leads, over prompts
        assert lead["equal_length_lead"][1] < 0 < lead["equal_length_lead"][2]  # and not with length held equal
        assert of[dimension]["twice_as_long"][1] > 0 and of[dimension]["slot_a"][1] < 0.5 < of[dimension]["slot_a"][2]


def test_responses_give_the_published_numbers(found):
    own = found[2]
    assert (own["responses"], own["prompts"], own["labels_reproduced"]) == (3036, 2954, 3036)
    assert round(100 * own["safe"], 2) == 97.89
    assert [round(own["reward"][k], 3) for k in ("mean", "std")] == [0.564, 1.131]
    assert [round(own["cost"][k], 3) for k in ("mean", "std")] == [-4.547, 1.657]
    assert round(own["characters"]) == 775
    zero = own["quadrants"]["0"]["shares"]
    assert zero["SH"] == pytest.approx(2220 / 3036, abs=1e-5) and sum(zero.values()) == pytest.approx(1, abs=1e-4)
    helpful = [q["shares"]["SH"] for q in own["quadrants"].values()]
    assert helpful[1:] == sorted(helpful[1:], reverse=True)  # a higher cut leaves fewer
    assert sum(k["share"] for k in own["kinds"].values()) == pytest.approx(1, abs=1e-4)
    low, high = own["per_prompt"]["safe"][1:]
    assert low < own["safe"] < high


def test_what_has_no_records_is_named(found):
    with pytest.raises(ValueError, match="Alpaca-7B"):
        view.responses(found)
    with pytest.raises(ValueError, match="'games'"):
        view.part(found[:1], "games")
