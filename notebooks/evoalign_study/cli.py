"""The paper's command line, `python -m evoalign_study`: check, execute and index the contents of a checkout.

A refusal prints one line on standard error, without a traceback, and exits with code 1; a mistyped argument exits with
code 2.
"""

import dataclasses
import datetime
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from evoalign_lib.checks import nearest
from evoalign_lib.cli import refusals

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The notebooks' records, claims and artefacts.")


def _named(what: str, given: str, known: Sequence[str]) -> str:
    """Return the known name that is meant, ignoring case; a notebook may also be given as a path or by its number.

    what: what the names stand for, for the error. Raises BadParameter, with the nearest name, if nothing matches.
    """
    name = Path(given.strip()).name.lower().removesuffix(".ipynb")
    for one in known:
        number, _, title = one.lower().partition("_")
        if name in (one.lower(), number, number.lstrip("0"), title) and name:
            return one
    raise typer.BadParameter(f"no {what} {given!r}.{nearest(given, known)} There are: {', '.join(known)}")


def _notebooks(given: Sequence[str]) -> list[str]:
    """Return the names of the notebooks that are meant, including notebooks of which only the records exist."""
    from evoalign_study import paths, records

    places = [*paths.NOTEBOOKS.glob("*.ipynb"), *(file.parent for file in records.record_files("tiny"))]
    known = sorted({place.stem for place in places})
    return [_named("notebook", name, known) for name in given]


@app.command()
def verify(
    notebook: Annotated[list[str] | None, typer.Option(help="Only this notebook, such as 01; may be repeated.")] = None,
    write: Annotated[bool, typer.Option(help="Replace the committed artefacts instead of comparing.")] = False,
    drawn: Annotated[str | None, typer.Option(help="Folder that make test drew into; nothing is executed.")] = None,
) -> None:
    """Check the committed records against their index; redraw and compare every table, number and plotted value."""
    from evoalign_study import artifacts, history

    chosen = _notebooks(notebook or ())
    if drawn and write:
        raise typer.BadParameter("--write draws everything again: omit --drawn")
    if drawn and not Path(drawn, "generated", "manifest.json").is_file():
        raise typer.BadParameter(f"no notebook was drawn into {drawn}: run make test, which draws all into runs/test")
    disagree = False
    with refusals():
        for problem in artifacts.verify(chosen or None, write, Path(drawn) if drawn else None):
            typer.echo(problem)
            disagree = True
    commits, shallow = history.commits("paper/results", "paper/claims.lock")
    if not commits:
        typer.echo("no git history here: records and paper/claims.lock were not compared with it")
    elif shallow:
        what = f"records and paper/claims.lock were compared with its {commits} commits only"
        typer.echo(f"a shallow clone: {what} (git fetch --unshallow gets the others)")
    if disagree:
        raise typer.Exit(1)
    typer.echo("written" if write else "all tables, numbers and plotted data agree with the committed records")


@app.command()
def execute(
    notebook: Annotated[list[str], typer.Argument(help="Names or numbers, such as 01_es_countdown or 01.")],
) -> None:
    """Execute notebooks in place; outputs are stored without timestamps, with the commit and cells behind them."""
    from evoalign_study import artifacts, provenance

    for name in _notebooks(notebook):
        with refusals():
            artifacts.redraw(name)
        typer.echo(f"{name}: executed at commit {provenance.commit()}")
    if provenance.commit().endswith("+"):
        typer.echo("The code has uncommitted changes. Commit them, then execute again.")


@app.command()
def seal() -> None:
    """Index the committed records that a killed writer or a merge left without a line in the index."""
    from evoalign_study import artifacts, records

    if lost := artifacts.lost_from_history():  # otherwise an index could begin anew over edited records
        typer.echo("\n".join(lost))
        raise typer.Exit(1)
    for path in records.record_files():
        with suppress(ValueError):  # lines that are not records are reported below
            if number := records.index(path):
                typer.echo(f"{path}: {number} records indexed")
    problems = artifacts.record_problems()
    typer.echo("\n".join(problems) or "every record is in its index")
    if problems:
        raise typer.Exit(1)


@app.command()
def claims(
    id: Annotated[list[str] | None, typer.Option(help="Only this claim, in full; may be repeated.")] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Add the hashes of new rules to paper/claims.lock.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything known about each claim, as JSON.")] = False,
    scale: Annotated[str, typer.Option(help="Scale of the records: tiny, full or real.")] = "tiny",
) -> None:
    """Print the claims with their verdicts from the committed records."""
    from evoalign_study import artifacts, claims, records

    if lock and (id or as_json):
        raise typer.BadParameter("--lock prints only the lines that it adds: omit --id and --json")
    if problems := artifacts.record_problems():
        typer.echo("\n".join(problems), err=True)
        raise typer.Exit(1)
    with refusals():
        if lock:
            added = claims.lock(datetime.date.today().isoformat())
            typer.echo("\n".join(added) or "every rule is locked")
            return
        known = [claim["id"] for claim in claims.load_claims()]
        chosen = [_named("claim", name, known) for name in id or known]
        _named("scale", scale, records.SCALES)
        verdicts = [verdict for verdict in claims.evaluate_all(scale) if verdict.id in chosen]
    if as_json:
        found = json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], default=lambda number: number.item())
        plain = records.plain_json(found)  # as JSON that every parser reads
        typer.echo(json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False))
        return
    for v in verdicts:
        if id:
            typer.echo(f"{v.id}  {v.verdict.upper()}\n    {v.statement.strip()}\n    {v.text}")
        else:
            typer.echo(f"{v.id:5}{v.verdict:28}{v.title}" + (f"\n{'':33}{v.key}" if v.key else ""))
