"""The command `evoalign`. Every subcommand is a call into the library.

What the library refuses is a line on standard error and exit code 1, without traceback; a mistyped argument is exit
code 2.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="EvoAlign: Evolution Strategies beside GRPO.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from evoalign_lib import __version__

        typer.echo(f"evoalign {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """EvoAlign: Evolution Strategies beside GRPO."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Say on standard error what the library refuses, and exit with code 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        typer.echo(
            f"{error}: pip install 'evoalign[analysis,notebooks,judges]' brings what the commands need.", err=True
        )
        raise typer.Exit(1) from error
    except (ValueError, OSError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _need_checkout(command: str) -> None:
    from evoalign_lib import paths

    if not paths.RESULTS.is_dir():
        raise typer.BadParameter(
            f"evoalign {command} needs a checkout of the repository, with its notebooks and records, and there is none "
            f"at {paths.ROOT}: clone it, run make there, and call .venv/bin/evoalign."
        )


def _named(what: str, given: str, known: Sequence[str]) -> str:
    """Return the known name that is meant, in upper or lower case: of a notebook also a path, or its number alone.

    what: of the names, for the error. Raises BadParameter, with the nearest name, where none is meant.
    """
    from evoalign_lib.checks import nearest

    name = Path(given.strip()).name.lower().removesuffix(".ipynb")
    for one in known:
        number, _, title = one.lower().partition("_")
        if name in (one.lower(), number, number.lstrip("0"), title) and name:
            return one
    raise typer.BadParameter(f"no {what} {given!r}.{nearest(given, known)} There are: {', '.join(known)}")


def _notebooks(given: Sequence[str]) -> list[str]:
    """Return the names of notebooks, and of notebooks that have records alone, that are meant."""
    from evoalign_lib import paths, records

    places = [*paths.NOTEBOOKS.glob("*.ipynb"), *(file.parent for file in records.record_files("tiny"))]
    known = sorted({place.stem for place in places})
    return [_named("notebook", name, known) for name in given]


def _new_folder(out: str) -> None:
    """Raise ValueError, before any work, where something would be overwritten."""
    if (place := Path(out)).exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{out!r} exists: give a new folder.")


@app.command()
def verify(
    notebook: Annotated[list[str] | None, typer.Option(help="Only this, such as 01; may be repeated.")] = None,
    write: Annotated[bool, typer.Option(help="Replace the committed artefacts instead of comparing.")] = False,
    drawn: Annotated[str | None, typer.Option(help="Folder that make test has drawn into: executes nothing.")] = None,
) -> None:
    """Check the seals of the committed records, draw every table, number and plotted value again, and compare."""
    _need_checkout("verify")
    from evoalign_lib import artifacts, claims

    chosen = _notebooks(notebook or ())
    if drawn and write:
        raise typer.BadParameter("--write draws anew: leave --drawn out")
    if drawn and not Path(drawn, "generated", "manifest.json").is_file():
        raise typer.BadParameter(f"no notebook was drawn into {drawn}: make test draws all into runs/test")
    disagree = False
    with _refusals():
        for problem in artifacts.verify(chosen or None, write, Path(drawn) if drawn else None):
            typer.echo(problem)
            disagree = True
    if claims.once_locked() is None:
        typer.echo("no history of git here: paper/claims.lock was not compared with it")
    if disagree:
        raise typer.Exit(1)
    for name in artifacts.undrawn():
        typer.echo(f"paper/results/{name} has records that no notebook draws yet: nothing to compare them with")
    typer.echo("written" if write else "all tables, numbers and plotted data agree with the committed records")


@app.command()
def execute(
    notebook: Annotated[list[str], typer.Argument(help="Name or number, such as 01_es_countdown or 01; or several.")],
) -> None:
    """Execute notebooks in place as they are committed: outputs without times, and with what they come from."""
    _need_checkout("execute")
    from evoalign_lib import artifacts
    from evoalign_lib.study import provenance

    for name in _notebooks(notebook):
        with _refusals():
            failure = artifacts.redraw(name)
        if failure:
            typer.echo(failure, err=True)
            raise typer.Exit(1)
        typer.echo(f"{name}: executed at commit {provenance.commit()}")
    if provenance.commit().endswith("+"):
        typer.echo("The code has changes that are not committed. Commit them, and execute once more.")


@app.command()
def seal(
    pack: Annotated[list[str] | None, typer.Option(help="Compress this notebook's records; may be repeated.")] = None,
) -> None:
    """Seal the committed records that a killed writer or a merge left without seal."""
    _need_checkout("seal")
    from evoalign_lib import artifacts, records

    chosen = _notebooks(pack or ())
    for path in records.record_files():
        try:
            if number := records.seal(path):
                typer.echo(f"{path}: {number} records sealed")
        except ValueError as error:
            typer.echo(f"{path}: {error}")
    problems = artifacts.unsealed()
    typer.echo("\n".join(problems) or "every record is sealed")
    if problems:
        raise typer.Exit(1)
    for path in records.record_files():
        if path.parent.name in chosen:
            with _refusals():
                typer.echo(f"{path}.gz: {records.pack(path)} records packed")


@app.command()
def claims(
    id: Annotated[list[str] | None, typer.Option(help="Only this claim, in full; may be repeated.")] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Add the hashes of new rules to paper/claims.lock.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known of each, as JSON.")] = False,
) -> None:
    """Print the claims, with the verdicts that the committed records give."""
    import datetime

    _need_checkout("claims")
    from evoalign_lib import artifacts, claims

    if lock and (id or as_json):
        raise typer.BadParameter("--lock prints the lines that it adds: leave --id and --json out")
    if problems := artifacts.unsealed():
        typer.echo("\n".join(problems), err=True)
        raise typer.Exit(1)
    with _refusals():
        if lock:
            added = claims.lock(datetime.date.today().isoformat())
            typer.echo("\n".join(added) or "every rule is locked")
            return
        known = [claim["id"] for claim in claims.load_claims()]
        chosen = [_named("claim", name, known) for name in id or known]
        verdicts = [verdict for verdict in claims.evaluate_all() if verdict.id in chosen]
    if as_json:
        typer.echo(_json([dataclasses.asdict(verdict) for verdict in verdicts]))
        return
    for v in verdicts:
        if id:
            typer.echo(f"{v.id}  {v.verdict.upper()}\n    {v.statement.strip()}\n    {v.text}")
        else:
            typer.echo(f"{v.id:5}{v.verdict:28}{v.title}" + (f"\n{'':33}{v.key}" if v.key else ""))


def _json(value: Any) -> str:
    """Return a value as JSON that every parser reads: null for what is not finite."""
    from evoalign_lib.records import without_nonfinite

    plain = json.loads(json.dumps(value, default=lambda number: number.item()))
    return json.dumps(without_nonfinite(plain, "", []), indent=1, ensure_ascii=False, allow_nan=False)


@app.command()
def replay(
    ledger: Annotated[str, typer.Argument(help="The run's ledger.jsonl (or .jsonl.gz).")],
    out: Annotated[str | None, typer.Option(help="Folder to write the model to.")] = None,
    step: Annotated[int | None, typer.Option(help="Steps to replay.  [default: all]")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or name of the run's starting model.  [default: a shipped base]")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain and recompute every digest.")] = False,
) -> None:
    """Write the model of any step of an ES run, bit for bit, from the run's ledger; or check the ledger."""
    from evoalign_lib import ledger as ledgers

    if not (out or verify):
        raise typer.BadParameter("say what to do: --out FOLDER, --verify, or both")
    with _refusals():
        if out:
            _new_folder(out)
        run = ledgers.read(ledger)
        if verify:
            report = ledgers.verify(run, ledgers.start_of(run, model))
            typer.echo(report.text())
        if out:
            digest = ledgers.write_model(run, out, model, step)
            typer.echo(f"{out}: the model after step {len(run.steps) if step is None else step}, weights {digest}")
            if run.torn:
                typer.echo(f"{ledger} has a torn last line of {len(run.torn)} bytes, which does not count")


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="Folder, shipped base or name of the model that both started from.")],
    a: Annotated[str, typer.Argument(help="One end: a folder, a LoRA adapter's folder, or a run's ledger.")],
    b: Annotated[str, typer.Argument(help="The other end.")],
    out: Annotated[str, typer.Option(help="Folder for figure and tables.")] = "compare",
    alpha: Annotated[float | None, typer.Option(help="Step size of A, if it is an ES run without ledger.")] = None,
    steps: Annotated[int | None, typer.Option(help="Its steps whose population was not tied.")] = None,
    population: Annotated[int | None, typer.Option(help="Its members per step.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace figure and tables that are there.")] = False,
) -> None:
    """Compare the weights of two models trained from one base, and say what a random direction would show as well."""
    from evoalign_lib import comparison

    if Path(out).is_file():
        raise typer.BadParameter(f"--out {out} is a file: name a folder")
    if there := [str(path) for name in comparison.WRITTEN if (path := Path(out, name)).exists() and not overwrite]:
        raise typer.BadParameter(f"{there[0]} exists: name another folder by --out, or say --overwrite")
    with _refusals():
        import seaborn  # noqa: F401  # of an extra: missed before the weights are read, not when all is to be drawn

        found = comparison.compare(base, a, b, alpha, steps, population)
        typer.echo(found.text())
        written = comparison.write(found, out)
    typer.echo("\n" + "\n".join(f"{path}" for path in written))


@app.command("serve-scorer")
def serve_scorer(
    model: Annotated[str, typer.Argument(help="Folder or name of a reward or cost model.")],
    text: Annotated[
        str | None, typer.Option(help="How prompt and response are joined: beaver, chat, continued or pair.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8100,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Such as bfloat16.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text, at most.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the key of clients.")] = None,
) -> None:
    """Serve a reward or cost model to trainers on other GPUs or machines, until the process is ended."""
    with _refusals():
        from evoalign_lib import scoring_server

    options = {"host": host, "port": port, "device": device, "dtype": dtype, "max_length": max_length}
    with _refusals():
        scoring_server.serve(model, text=text, api_key_env=api_key_env, **options)


@app.command()
def tiny(
    out: Annotated[str, typer.Option(help="Folder to write.")],
    family: Annotated[str, typer.Option(help="Family of the tiny world: A, B, C or H.")] = "A",
    seed: Annotated[int, typer.Option(help="0, 1, 2 are the shipped bases; of families C and H, 0.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.  [default: those of the shipped bases]")] = None,
) -> None:
    """Train a base of the tiny world and print what it can do."""
    from evoalign_lib import models
    from evoalign_lib.study import measures
    from evoalign_lib.tiny import recipe, task_of

    with _refusals():
        _new_folder(out)
        recipe(family, seed, out, steps=steps)
    typer.echo(json.dumps(measures.get(task_of(f"{family}0")).describe(*models.load(out), family)))


if __name__ == "__main__":
    app()
