"""Absolute paths of the repository's folders, whatever the current directory is.

The notebooks, records and figures belong to a checkout, and so does this package: `make` installs it from there with
`pip install -e notebooks`.
"""

from pathlib import Path

ROOT: Path = Path(__file__).resolve().parents[2]
"""The checkout's top folder."""
NOTEBOOKS: Path = ROOT / "notebooks"
"""The numbered notebooks."""
FIGURES: Path = ROOT / "figures"
"""Figures of the notebooks: NAME.pdf, NAME.png, and NAME.csv with the plotted data."""
PAPER: Path = ROOT / "paper"
"""The paper's sources and `claims.yaml`."""
RESULTS: Path = PAPER / "results"
"""Run records, one JSON line per run: RESULTS / notebook / scale.jsonl, with their index, scale.index."""
GENERATED: Path = PAPER / "generated"
"""Tables, number macros and the manifest, all rendered from the records."""
RUNS: Path = ROOT / "runs"
"""Output of runs; git ignores it."""
