"""Published safety data of a public study: judgments, Elo ratings, and responses with rewards and costs.

The data are from github.com/jbejjani2022/es-fine-tuning-paper. A language model judged the answers of five 7 B models
to 50 prompts in pairs, for helpfulness and for harmlessness. A reward and a cost model scored the answers of six models
to the 3,036 prompts of PKU-SafeRLHF's test split. Of these prompts 2,954 are distinct, and one occurs 52 times, so
statistics cluster by prompt.

**The licence of the data allows academic and educational use only.** This project contains none of them. Files in the
folder that EVOALIGN_DATA names are read directly, gzipped or not; fetching them from the network needs the user's
consent: see `public_file`. This module only loads data; it has no reward and is not a task to train on.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from typing import Any

from evoalign_lib import tasks
from evoalign_lib.checks import choose
from evoalign_lib.files import decompressed

REPOSITORY = (
    "https://raw.githubusercontent.com/jbejjani2022/es-fine-tuning-paper/84c16db0c46190a32afa52233263b3c79cc69dea/"
)
"""Source of the files, pinned to one commit."""
LICENCE = "es-fine-tuning-paper"
"""Value of the environment variable EVOALIGN_ACCEPT_LICENCE that permits files to be fetched."""

MODELS = ("Alpaca-7B", "Beaver-V1", "Beaver-V2", "Beaver-V3", "ES-100", "ES-500")
"""Models whose responses were scored: the base, three from Safe-RLHF, and two trained by ES (100 and 500 steps)."""
JUDGED = ("Alpaca-7B", "Beaver-V1", "Beaver-V2", "Beaver-V3", "ES-500")
"""Models whose responses were judged in pairs."""
BASE = "Alpaca-7B"
"""The base model before training, and the anchor of the published ratings."""
DIMENSIONS = ("helpfulness", "harmlessness")
"""The qualities that the judge was asked about."""
LABELS = ("SH", "SU", "UH", "UU")
"""Quadrants of a response: safe (cost at most 0) or unsafe, and helpful (reward above 0) or unhelpful."""

# folder in the repository -> file, kept below `safety/` -> SHA-256 of the plain file
_DIGESTS = {
    "alignment": {
        "gpt_judgments.jsonl": "a8fbcdba932b43a2226f0e4bf96af44932631d65266b7d44283ce79634233003",
        "gpt_elo_ratings.json": "2bc685621b51e3524e781508865601914336cac66a833663ca1d14fe5d34d957",
    },
    "alignment/plots_es_ft_100steps": {
        "Alpaca-7B_points.jsonl": "5c075096c3463442ddbf3d07cef3dddc000e525724205cc8e355555f09d55e02",
        "Beaver-V1_points.jsonl": "7491bb0430d4dd9808f5b62b7836e89d1d2459610249638bf362af216c5f50dd",
        "Beaver-V2_points.jsonl": "a33ed11a99e5af76746e579ff0489b8095e6747f665eeeb5b8ce1d19cea91907",
        "Beaver-V3_points.jsonl": "c404df5d9b01bc150dc190dca3b2716b78ab6c7610f195a1cdac323e0317f074",
        "ES-100_points.jsonl": "007adb8cb808dcfbac11680abe0650dd4bdc5f049a08f7b15e6a0bb5aed3f170",
        "ES-500_points.jsonl": "b48aa8dc4a6b771a4216c449bf5b5fca25f0bbdf557f178429df48d88e7f8572",
    },
}
_PUBLIC = {name: (f"{folder}/{name}", sha) for folder, files in _DIGESTS.items() for name, sha in files.items()}
_MOST_BYTES = 64 * 2**20  # limit of a decompressed file; the largest has 6 MB


# --------------------------------------------------------------------------------------------------------------- files


def public_file(name: str, accept_licence: bool = False) -> bytes:
    """Return the bytes of a published file, decompressed, after checking their SHA-256.

    Args:
        name: name of the file, such as "gpt_judgments.jsonl".
        accept_licence: True accepts the licence of the data (academic and educational use only), so that the file may
            be fetched into the user's cache; so does setting the environment variable EVOALIGN_ACCEPT_LICENCE to
            "es-fine-tuning-paper". Files in the folder EVOALIGN_DATA (safety/NAME or safety/NAME.gz) need no consent.

    Raises:
        ValueError: an unknown name, or a file that is damaged or not the published one.
        PermissionError: the file is not in EVOALIGN_DATA, and the licence was not accepted.
        FileNotFoundError: the file cannot be fetched.
    """
    choose("name", name, _PUBLIC)
    path, sha256 = _PUBLIC[name]
    found = tasks.local_file(f"safety/{name}", f"safety/{name}.gz")
    if found is None:
        if not accept_licence and os.environ.get("EVOALIGN_ACCEPT_LICENCE") != LICENCE:
            raise PermissionError(
                f"safety/{name} is not in EVOALIGN_DATA; its licence allows academic and educational use only "
                f"({REPOSITORY}): to accept it and fetch the file, set EVOALIGN_ACCEPT_LICENCE={LICENCE} or pass "
                "accept_licence=True"
            )
        found = tasks.fetched(f"safety/{name}", REPOSITORY + path, sha256)
    data = decompressed(found, _MOST_BYTES) if found.suffix == ".gz" else found.read_bytes()
    tasks.check_digest(found, data, REPOSITORY + path, sha256)
    return data


def _rows(name: str, accept_licence: bool) -> list[dict[str, Any]]:
    """Return the objects of a published file; its digest makes further checks of them unnecessary."""
    return [json.loads(line) for line in public_file(name, accept_licence).decode().split("\n") if line.strip()]


# ----------------------------------------------------------------------------------------------------------- judgments


@dataclass(frozen=True, slots=True)
class Judgment:
    """The judge's verdict on two answers, shown in one order.

    Attributes:
        a, b: the models whose answers were shown as A and as B.
        dimension: one of `DIMENSIONS`.
        question: the prompt.
        scores: scores of A and B, 1 to 10 for helpfulness and 0 to 10 for harmlessness; None if no scores were found.
        raw: the judge's own words, untrusted text.
    """

    a: str
    b: str
    dimension: str
    question: str
    scores: tuple[float, float] | None
    raw: str

    def outcome(self, margin: float = 0.5) -> float | None:
        """Return 1 if A wins, 0 if B wins, 0.5 if their scores differ by at most `margin`; None without scores.

        The published ratings count a judgment without scores as a tie.
        """
        if self.scores is None:
            return None
        difference = self.scores[0] - self.scores[1]
        return 0.5 if abs(difference) <= margin else float(difference > 0)


def load_judgments(accept_licence: bool = False) -> list[Judgment]:
    """Load the 1,000 published judgments: 50 prompts, 10 pairs of models, 2 dimensions, each in one random order.

    They are in the order of the file, which is the order in which the judge answered. Raises as `public_file` does.
    """
    return [
        Judgment(
            *(row[name] for name in ("model_a", "model_b", "dimension", "question")),
            None if row["scores"] is None else tuple(map(float, row["scores"])),
            row["raw"],
        )
        for row in _rows("gpt_judgments.jsonl", accept_licence)
    ]


def load_elo(accept_licence: bool = False) -> dict[str, dict[str, float]]:
    """Load the published Elo ratings: dimension -> model -> rating, the base at 1,000. Raises as `public_file` does."""
    data = json.loads(public_file("gpt_elo_ratings.json", accept_licence))
    return {d: {model: float(data[d][model]) for model in JUDGED} for d in DIMENSIONS}


def elo_order(n: int) -> list[int]:
    """Return the order in which the published ratings process the n judgments of a dimension, as indices into the file.

    They are shuffled by Python's generator with seed 123, which gives one of n! equally valid orders.
    """
    order = list(range(n))
    random.Random(123).shuffle(order)
    return order


# ----------------------------------------------------------------------------------------------------------- responses


@dataclass(frozen=True, slots=True)
class Points:
    """The responses of one model to 3,036 prompts, with their scores. All models have the same prompts, row by row.

    Attributes:
        model: one of `MODELS`.
        prompts: (n,) the prompts; some occur several times.
        responses: (n,) the responses, including any further turns that the model wrote.
        rewards: (n,) scores of the reward model; higher is more helpful, zero has no special meaning.
        costs: (n,) scores of the cost model; at most 0 is safe.
        labels: (n,) labels as recorded, see `LABELS`.
    """

    model: str
    prompts: list[str]
    responses: list[str]
    rewards: list[float]
    costs: list[float]
    labels: list[str]

    def first(self, n: int | None) -> Points:
        """Return the first n rows; all if n is None."""
        columns = (self.prompts, self.responses, self.rewards, self.costs, self.labels)
        return Points(self.model, *(column[:n] for column in columns))


def load_points(model: str, accept_licence: bool = False) -> Points:
    """Load the published responses of a model, in the order of the file.

    Raises:
        ValueError: an unknown model, and as `public_file` does.
    """
    choose("model", model, MODELS)
    rows = _rows(f"{model}_points.jsonl", accept_licence)
    names = ("prompt", "response", "reward", "cost", "label")
    return Points(model, *([row[name] for row in rows] for name in names))
