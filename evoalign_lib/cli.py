"""The command `evoalign`: a thin front, every command a call into the library."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="EvoAlign: Evolution Strategies beside GRPO.")


@app.command()
def verify(
    notebook: Annotated[list[str] | None, typer.Option(help="Only this notebook; may be repeated.")] = None,
    write: Annotated[bool, typer.Option(help="Replace the committed artefacts instead of comparing.")] = False,
) -> None:
    """Draw every table, number and plotted value again from the committed records and compare the text."""
    from evoalign_lib import artifacts

    problems = artifacts.verify(notebook or None, write)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("written" if write else "all tables, numbers and plotted data agree with the committed records")


@app.command()
def claims() -> None:
    """Print the ledger of claims with the verdicts that the committed records give."""
    from evoalign_lib.claims import evaluate_all

    for verdict in evaluate_all():
        typer.echo(f"{verdict.id}  {verdict.verdict.upper()}\n    {verdict.statement.strip()}\n    {verdict.text}\n")


@app.command()
def replay(
    ledger: Annotated[str, typer.Argument(help="The run's ledger.jsonl (or .jsonl.gz).")],
    out: Annotated[str | None, typer.Option(help="Folder to write.")] = None,
    step: Annotated[int | None, typer.Option(help="Steps to replay.  [default: all]")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or name of the run's starting model.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain and recompute every digest.")] = False,
) -> None:
    """Write the Hugging Face folder of any step of an ES run, bit for bit, from its ledger; or check the ledger."""
    from evoalign_lib import ledger as ledgers

    if not (out or verify):
        raise typer.BadParameter("say what to do: --out FOLDER, --verify, or both")
    try:
        run = ledgers.read(ledger)
        if verify:
            report = ledgers.verify(run, model or run.header["model"]["name"])
            typer.echo(report.text())
        if out:
            digest = ledgers.write_model(run, out, model, step)
            typer.echo(f"{out}: the model after step {len(run.steps) if step is None else step}, weights {digest}")
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def tiny(
    out: Annotated[str, typer.Option(help="Folder to write.")],
    family: Annotated[str, typer.Option(help="Family of the tiny world.")] = "A",
    seed: Annotated[int, typer.Option(help="0, 1, 2 are the shipped bases.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3500,
) -> None:
    """Train a base of the tiny world from nothing; print greedy accuracy, pass@16 and pass@64 on the validation set."""
    from evoalign_lib.tiny import recipe

    recipe(family, seed, out, steps=steps)


if __name__ == "__main__":
    app()
