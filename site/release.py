"""Write what is released into a new folder: wheel, records as a data set, ledgers, ends of runs, paper and site.

`make release URL=... OUT=...` calls it. The address stands in one place of the repository, `repository-code` of
CITATION.cff. If that is missing or another, it is written there, into the README's badges and into the cell of notebook
01 that fetches the repository on Colab, to be committed first: so none names an address that does not exist, and the
tag holds all. Nothing is uploaded.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from evoalign_study import execution, paths, records

from evoalign_lib import files, ledger, tiny

ROOT = paths.ROOT
BADGE = "[![checks]({0}/actions/workflows/checks.yml/badge.svg)]({0}/actions/workflows/checks.yml)"
COLAB = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{0}/blob/main/notebooks/01_es_countdown.ipynb)"
)
FIELDS = ("kind", "arm", "task", "base", "seed")
"""Fields of a spec that have columns of their own in the Parquet files."""


def release(url: str, out: Path) -> str:
    """Write everything into a new folder, and tag the commit. Returns what was written, in words.

    Raises ValueError for an address without https, a folder that exists, uncommitted changes, a tag of another commit,
    or a paper or site that has not been built; SystemExit if the address has to be committed first.
    """
    if not re.fullmatch(r"https://[\w./-]+[\w-]", url):
        raise ValueError(f"URL={url!r}: pass the repository's address, https://HOST/OWNER/NAME.")
    files.check_new_folder(out)
    if _named(url):
        sys.exit(
            f"README.md, CITATION.cff and notebook 01 name {url} now: look at them, commit them, and call this again."
        )
    if changed := _git("status", "--porcelain"):
        raise ValueError(f"uncommitted changes, such as {changed.split()[1]}: commit them first.")
    tag = "v" + re.search(r"^version: (\S+)$", _text("CITATION.cff"), re.M)[1]
    built = {"paper.pdf": ROOT / "runs/paper/main.pdf", "site": ROOT / "runs/site/html"}
    if missing := [str(path) for path in built.values() if not path.exists()]:
        raise ValueError(f"{missing[0]} is missing: `make paper site` first.")
    if tag in _git("tag", "--points-at", "HEAD").split():
        pass
    elif _git("tag", "--list", tag):
        raise ValueError(f"the tag {tag} is another commit's: set a new version in CITATION.cff and pyproject.toml.")
    else:
        _git("tag", "-a", tag, "-m", f"EvoAlign {tag}")
    out.mkdir(parents=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT)]
    subprocess.run(wheel, check=True)
    for name, path in built.items():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, out / name)
    said = [data_set(out / "records", url), ends(out / "models", url)]
    return "\n".join([f"{tag} in {out}:", *said])


def data_set(folder: Path, url: str) -> str:
    """Write all committed records as JSON lines and as Parquet, with their ledgers and a data card; read them back."""
    import pyarrow
    from pyarrow import parquet

    counts: dict[str, int] = {}
    for file in records.record_files():
        notebook, scale = file.parent.name, file.stem
        name, found = f"{notebook}-{scale}", records.read_records(file)
        (folder / "json").mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / "json" / f"{name}.jsonl")
        rows = [{"notebook": notebook, "scale": scale, "spec_hash": r["spec_hash"]} | _columns(r) for r in found]
        (folder / "data").mkdir(exist_ok=True)
        target = folder / "data" / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), target)
        back = [json.loads(text) for text in parquet.read_table(target)["record"].to_pylist()]
        if back != found:
            raise RuntimeError(f"{target} does not hold the records of {file}: report it.")
        counts[name] = len(rows)
        if (file.parent / "ledgers").is_dir():
            shutil.copytree(file.parent / "ledgers", folder / "ledgers" / notebook, dirs_exist_ok=True)
    listed = "\n".join(f"| {name} | {n:,} |" for name, n in counts.items())
    front = ["license: mit", "pretty_name: EvoAlign records", "configs:"]
    front += [f"- config_name: {name}\n  data_files: data/{name}.parquet" for name in counts]
    card = f"""# Records of EvoAlign

One row per run (or measurement of one) behind every number of the paper, of [this repository]({url}): what was asked
(`spec`), what came out (curves, test results problem by problem in packed form, budgets), versions, device and commit.
`data/` has them as Parquet: the column `record` is the record as JSON, the others are taken from it. `json/` has the
files as committed, `ledgers/` the ledgers of ES runs that were kept, from which `evoalign replay` makes the weights
again. `evoalign_study.records` reads and unpacks them. Scale `tiny`: models of 0.14 to 0.16 million weights, trained
from scratch on made-up worlds; `real`: SmolLM2-135M-Instruct. Runs that collapsed are among them. Texts in the records
are completions of these models.

| notebook and scale | records |
| --- | --- |
{listed}
"""
    (folder / "README.md").write_text("---\n" + "\n".join(front) + f"\n---\n\n{card}", encoding="utf-8")
    n = len(list(folder.glob("ledgers/*/*")))
    return f"records/: {sum(counts.values()):,} records in {len(counts)} Parquet files, read back equal; {n} ledgers"


def ends(folder: Path, url: str) -> str:
    """Write the model at the end of each ES run whose ledger is kept and whose base is shipped, with a card."""
    written, left = 0, 0
    for record in _with_ledgers():
        source = records.ledger_file(record)
        run = ledger.read(source)
        if "adapter" in run.header["model"] or run.header["model"]["name"] not in tiny.SHIPPED:
            left += 1  # it needs a model that is not here; its ledger is in the data set
            continue
        target = folder / f"{record['spec']['base']}-{record['spec']['arm']}-{record['spec_hash']}"
        digest = ledger.write_model(run, target)
        spec = json.dumps(record["spec"], indent=2)
        tested = "greedy_bits" in record.get("test", {})
        share = 100 * records.accuracy_matrix([record]).mean() if tested else 0
        right = f" It is right on {share:.1f} % of the test problems greedily." if tested else ""
        card = f"""---
license: mit
library_name: transformers
---

# The end of a run of {record["spec"]["arm"]} on {record["spec"]["base"]}

A tiny model (trained from scratch on a made-up task; of no use but for study), trained by an Evolution Strategy in
[EvoAlign]({url}), notebook {record["notebook"]}.{right}

`evoalign replay {source.name} --out FOLDER` makes the same weights (SHA-256 {digest}) from the ledger of the run.

```json
{spec}
```
"""
        (target / "README.md").write_text(card, encoding="utf-8")
        written += 1
    return f"models/: {written} ends of runs, replayed; {left} more need a model that is not shipped"


def _with_ledgers() -> Iterator[Any]:
    for file in records.record_files():
        yield from (r for r in records.read_records(file) if "ledger" in r and r["spec"].get("kind") == "train")


def _columns(record: Any) -> dict[str, Any]:
    return {name: record["spec"].get(name) for name in FIELDS} | {"record": json.dumps(record)}


def _named(url: str) -> bool:
    """Write the address into CITATION.cff, the README's badges and notebook 01; return whether that changed them."""
    citation, readme = _text("CITATION.cff"), _text("README.md")
    rest = re.sub(r"^repository-code: .*\n", "", citation, flags=re.M)
    new = rest.replace("license: ", f'repository-code: "{url}"\nlicense: ', 1)
    plain = re.sub(r"\n\[!\[checks\].*\n", "", readme, count=1)
    badges = BADGE.format(url)
    if url.startswith("https://github.com/"):
        badges += " " + COLAB.format(url.removeprefix("https://github.com/"))
    badged = plain.replace("# EvoAlign\n", f"# EvoAlign\n\n{badges}\n", 1)
    (ROOT / "CITATION.cff").write_text(new, encoding="utf-8")
    (ROOT / "README.md").write_text(badged, encoding="utf-8")
    notebook = _text("notebooks/01_es_countdown.ipynb")
    content = nbformat.reads(notebook, as_version=4)
    for cell in content.cells:
        cell.source = re.sub(r'^( *address = )".*?"', rf'\1"{url}"', cell.source, flags=re.M)
    content.metadata["evoalign"]["cells"] = execution.digests(content)  # that cell has no outputs outside Colab
    addressed = nbformat.writes(content) + "\n"
    (ROOT / "notebooks/01_es_countdown.ipynb").write_text(addressed, encoding="utf-8")
    return (new, badged, addressed) != (citation, readme, notebook)


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) != 3 or "" in sys.argv:
        sys.exit("usage: make release URL=https://HOST/OWNER/NAME OUT=FOLDER")
    try:
        print(release(sys.argv[1], Path(sys.argv[2])))
    except ValueError as error:
        sys.exit(f"Nothing was released. {error}")
