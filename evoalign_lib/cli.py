"""The command `evoalign`. Every subcommand is a call into the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="EvoAlign: Evolution Strategies beside GRPO.")


@app.command()
def verify(
    notebook: Annotated[list[str] | None, typer.Option(help="Only this notebook; may be repeated.")] = None,
    write: Annotated[bool, typer.Option(help="Replace the committed artefacts instead of comparing.")] = False,
    drawn: Annotated[str | None, typer.Option(help="Folder that make test has drawn into: executes nothing.")] = None,
) -> None:
    """Check the seals of the committed records, draw every table, number and plotted value again, and compare."""
    from evoalign_lib import artifacts

    if drawn and write:
        raise typer.BadParameter("--write draws anew: leave --drawn out")
    if drawn and not Path(drawn, "generated", "manifest.json").is_file():
        raise typer.BadParameter(f"no notebook was drawn into {drawn}: make test draws all into runs/test")
    disagree = False
    try:
        for problem in artifacts.verify(notebook or None, write, Path(drawn) if drawn else None):
            typer.echo(problem)
            disagree = True
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    if disagree:
        raise typer.Exit(1)
    for name in artifacts.undrawn():
        typer.echo(f"paper/results/{name} has records that no notebook draws yet: nothing to compare them with")
    typer.echo("written" if write else "all tables, numbers and plotted data agree with the committed records")


@app.command()
def execute(
    notebook: Annotated[list[str], typer.Argument(help="Name without suffix, such as 01_es_countdown; or several.")],
) -> None:
    """Execute notebooks in place as they are committed: outputs without times, and with what they come from."""
    from evoalign_lib import artifacts
    from evoalign_lib.study import provenance

    for name in notebook:
        try:
            failure = artifacts.redraw(name)
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error)) from error
        if failure:
            typer.echo(failure, err=True)
            raise typer.Exit(1)
        typer.echo(f"{name}: executed at commit {provenance.commit()}")
    if provenance.commit().endswith("+"):
        typer.echo("The code has changes that are not committed. Commit them, and execute once more.")


@app.command()
def seal() -> None:
    """Seal the committed records that a killed writer or a merge left without seal."""
    from evoalign_lib import artifacts, paths, records

    for path in sorted(paths.RESULTS.glob("*/*.jsonl")):
        if number := records.seal(path):
            typer.echo(f"{path}: {number} records sealed")
    problems = artifacts.unsealed()
    typer.echo("\n".join(problems) or "every record is sealed")
    if problems:
        raise typer.Exit(1)


@app.command()
def claims(
    id: Annotated[list[str] | None, typer.Option(help="Only this claim, in full; may be repeated.")] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Add the hashes of new rules to paper/claims.lock.")] = False,
) -> None:
    """Print the claims, with the verdicts that the committed records give."""
    import datetime

    from evoalign_lib import claims

    try:
        if lock:
            added = claims.lock(datetime.date.today().isoformat())
            typer.echo("\n".join(added) or "every rule is locked")
            return
        verdicts = claims.evaluate_all()
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    known = [verdict.id for verdict in verdicts]
    unknown = [name for name in id or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"no claim {unknown[0]!r}; there are {', '.join(known)}")
    for v in verdicts:
        if not id:
            typer.echo(f"{v.id:5}{v.verdict:28}{v.title}" + (f"\n{'':33}{v.key}" if v.key else ""))
        elif v.id in id:
            typer.echo(f"{v.id}  {v.verdict.upper()}\n    {v.statement.strip()}\n    {v.text}")


@app.command()
def replay(
    ledger: Annotated[str, typer.Argument(help="The run's ledger.jsonl (or .jsonl.gz).")],
    out: Annotated[str | None, typer.Option(help="Folder to write the model to.")] = None,
    step: Annotated[int | None, typer.Option(help="Steps to replay.  [default: all]")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or name of the run's starting model.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain and recompute every digest.")] = False,
) -> None:
    """Write the model of any step of an ES run, bit for bit, from the run's ledger; or check the ledger."""
    from evoalign_lib import ledger as ledgers

    if not (out or verify):
        raise typer.BadParameter("say what to do: --out FOLDER, --verify, or both")
    try:
        run = ledgers.read(ledger)
        if verify:
            report = ledgers.verify(run, model or ledgers.origin(run))
            typer.echo(report.text())
        if out:
            digest = ledgers.write_model(run, out, model, step)
            typer.echo(f"{out}: the model after step {len(run.steps) if step is None else step}, weights {digest}")
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="Folder, shipped base or name of the model that both started from.")],
    a: Annotated[str, typer.Argument(help="One end: a folder, a LoRA adapter's folder, or a run's ledger.")],
    b: Annotated[str, typer.Argument(help="The other end.")],
    out: Annotated[str, typer.Option(help="Folder for figure and tables.")] = "compare",
    alpha: Annotated[float | None, typer.Option(help="Step size of A, if it is an ES run without ledger.")] = None,
    steps: Annotated[int | None, typer.Option(help="Its steps whose population was not tied.")] = None,
    population: Annotated[int | None, typer.Option(help="Its members per step.")] = None,
) -> None:
    """Compare the weights of two models trained from one base, and say what a random direction would show as well."""
    from evoalign_lib import comparison

    if Path(out).is_file():
        raise typer.BadParameter(f"--out {out} is a file: name a folder")
    try:
        found = comparison.compare(base, a, b, alpha, steps, population)
        typer.echo(found.text())
        written = comparison.write(found, out)
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
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
    from evoalign_lib import scoring_server

    options = {"host": host, "port": port, "device": device, "dtype": dtype, "max_length": max_length}
    try:
        scoring_server.serve(model, text=text, api_key_env=api_key_env, **options)
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def tiny(
    out: Annotated[str, typer.Option(help="Folder to write.")],
    family: Annotated[str, typer.Option(help="Family of the tiny world: A, B, C or H.")] = "A",
    seed: Annotated[int, typer.Option(help="0, 1, 2 are the shipped bases; of families C and H, 0.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.  [default: those of the shipped bases]")] = None,
) -> None:
    """Train a base of the tiny world and print what it can do."""
    import json

    from evoalign_lib import models
    from evoalign_lib.study import measures
    from evoalign_lib.tiny import recipe, task_of

    recipe(family, seed, out, steps=steps)
    typer.echo(json.dumps(measures.get(task_of(f"{family}0")).describe(*models.load(out), family)))


if __name__ == "__main__":
    app()
