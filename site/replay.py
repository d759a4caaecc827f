"""Collect what the page of the replay shows: a committed ledger, the base that its run started from, and GRPO's end.

`replay.html` has the page's markup, style and glue; `static/noise.js`, `replay.js` and `model.js` do the work in the
browser. GRPO's weights follow from no ledger, so a rounded copy is kept beside this file. `python site/replay.py` makes
it again, which trains for some minutes (with AVX2 alone, as CONTRIBUTING.md describes).
"""

import base64
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = "02_grpo_countdown/tiny.jsonl"
RUN, OTHER = "d0164527e5666158", "dea73f35c70a3afb"
"""Spec hashes of the ES run that is replayed, and of the GRPO run with the same seed."""
END = HERE / "grpo_end.safetensors.gz"
"""GRPO's weights less the base's, in whole multiples (int16) of the step that the file's metadata give."""
STEP = 2.0**-15
"""The file's step, weight units; with four times as much, a few answers change."""
EVERY = 20
"""The page offers every so many of the 2,000 test problems."""


def data() -> dict[str, Any]:
    """Return the page's data: files as Base64, the ledger as its text, and what a prompt consists of."""
    from evoalign_study import records

    from evoalign_lib import tiny
    from evoalign_lib.tasks import countdown

    run, _ = both()
    spec = run["spec"]
    folder = tiny.bases_folder() / spec["base"]
    ends = gzip.decompress(END.read_bytes())
    asked = countdown.prompt(countdown.Problem((97, 98, 99), "96"), tokenizer=tiny.load(spec["base"])[1])
    return {
        "ledger": gzip.decompress(records.ledger_file(run).read_bytes()).decode(),
        "record": run["ledger"]["weights"],
        "base": _text(folder.joinpath("model.safetensors").read_bytes()),
        "config": json.loads((folder / "config.json").read_text(encoding="utf-8")),
        "tokenizer": json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")),
        "grpo": {"codes": _text(ends), "step": float(metadata(ends)["step"])},
        "prompt": re.split("97, 98, 99|96", asked),
        "most": spec["max_completion_length"],
        "problems": [[problem.numbers, problem.target] for problem in tiny.problems("test", 2000)[::EVERY]],
    }


def both() -> tuple[Any, Any]:
    """Return the records of the two runs."""
    from evoalign_study import paths, records

    found = {r["spec_hash"]: r for r in records.read_records(paths.RESULTS / RESULTS, [RUN, OTHER])}
    return found[RUN], found[OTHER]


def metadata(file: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    return json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"]


def _text(file: bytes) -> str:
    return base64.b64encode(file).decode()


def store() -> None:
    """Write GRPO's end. Raises ValueError if the rounded weights answer a test or validation problem differently."""
    from evoalign_study import training, weight_cache
    from safetensors.numpy import save

    from evoalign_lib import files
    from evoalign_lib.checks import require

    _, run = both()
    start, layout = weight_cache.of_base(run["spec"]["base"]), weight_cache.layout_of(run["spec"]["base"])
    end, _ = weight_cache.again(run["spec"], run["digest"])
    codes = np.rint((end.astype(np.float64) - start) / STEP).astype(np.int16)
    answers = []
    with training.opened(run["spec"]) as (engine, _):
        for master in (end, start + np.float32(STEP) * codes):
            engine.master[:] = master
            answers.append([engine.generate(name) for name in ("test", "validation")])
    require(answers[0] == answers[1], f"STEP={STEP} is too large: the rounded weights give other answers.")
    file = save(layout.views(codes), metadata={"step": str(STEP)})
    files.replace_bytes(END, gzip.compress(file, mtime=0))


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "notebooks")]
    store()
