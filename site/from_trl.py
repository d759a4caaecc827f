"""The table of what TRL's `GRPOTrainer` has and what became of it here: `python site/from_trl.py` writes it anew."""

import dataclasses
import inspect
from functools import cache
from pathlib import Path

from evoalign_lib.es import SURFACE

PAGE = Path(__file__).with_suffix(".md")
HEADINGS = {"arguments": "Arguments of the trainer", "settings": "Settings", "methods": "Methods of the trainer"}


@cache
def of_trl() -> dict[str, list[str]]:
    """Return the names that TRL's trainer has, by section, in its order."""
    from trl import GRPOConfig, GRPOTrainer

    public = inspect.getmembers(GRPOTrainer, inspect.isfunction)
    return {
        "arguments": [name for name in inspect.signature(GRPOTrainer.__init__).parameters if name != "self"],
        "settings": [f.name for f in dataclasses.fields(GRPOConfig)],
        "methods": [name for name, _ in public if not name.startswith("_")],
    }


def page() -> str:
    """Return the page with a table for each section after its lead."""
    order = {"same": 0, "missing": 1, "refused": 2}
    parts = [PAGE.read_text(encoding="utf-8").partition("\n\n## ")[0]]
    for section, names in of_trl().items():
        rows = sorted((order[SURFACE[section][name][0]], name) for name in names)
        lines = [f"## {HEADINGS[section]}", "", "| TRL | here | |", "| --- | --- | --- |"]
        for _, name in rows:
            status, remark = SURFACE[section][name]
            lines.append(f"| `{name}` | {status} | {remark} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
