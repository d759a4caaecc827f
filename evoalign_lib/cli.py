"""The command `evoalign`. Every subcommand is a call into the library.

An error from the library is printed as a line on standard error, without traceback, and gives exit code 1; a mistyped
argument gives exit code 2.
"""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="EvoAlign: Evolution Strategies versus GRPO.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from evoalign_lib import __version__

        typer.echo(f"evoalign {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """EvoAlign: Evolution Strategies versus GRPO."""


@contextmanager
def refusals() -> Iterator[None]:
    """Print errors from the library on standard error and exit with code 1."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        remedy = ": pip install 'evoalign[analysis,judges]' installs what the commands need."
        typer.echo(f"{error}{remedy if isinstance(error, ModuleNotFoundError) else ''}", err=True)
        raise typer.Exit(1) from error


@app.command()
def replay(
    ledger: Annotated[str, typer.Argument(help="The run's ledger.jsonl (or .jsonl.gz).")],
    out: Annotated[str | None, typer.Option(help="Folder to write the model to.")] = None,
    step: Annotated[int | None, typer.Option(help="Number of steps to replay.  [default: all]")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or name of the run's starting model.  [default: a shipped base]")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain and recompute every digest.")] = False,
) -> None:
    """Reconstruct the model of any step of an ES run, bit for bit, from the run's ledger; or check the ledger."""
    from evoalign_lib import files
    from evoalign_lib import ledger as ledgers

    if not (out or verify):
        raise typer.BadParameter("nothing to do: pass --out FOLDER, --verify, or both")
    with refusals():
        if out:
            files.check_new_folder(out)
        run = ledgers.read(ledger)
        if verify:
            typer.echo(ledgers.verify(run, ledgers.start_of(run, model)).text())
        if out:
            digest = ledgers.write_model(run, out, model, step)
            typer.echo(f"{out}: the model after step {len(run.steps) if step is None else step}, weights {digest}")
            if run.torn:
                typer.echo(f"{ledger} has a torn last line of {len(run.torn)} bytes, which is ignored")


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="Folder, shipped base or name of the model that both runs started from.")],
    a: Annotated[str, typer.Argument(help="One trained model: a folder, a LoRA adapter's folder, or a run's ledger.")],
    b: Annotated[str, typer.Argument(help="The other trained model.")],
    out: Annotated[str, typer.Option(help="Folder for the figure and tables.")] = "compare",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing figure and tables.")] = False,
) -> None:
    """Compare the weights of two models trained from one base, and say what a random direction would show, too."""
    from evoalign_lib import comparison

    if Path(out).is_file():
        raise typer.BadParameter(f"--out {out} is a file: pass a folder")
    if there := [str(path) for name in comparison.WRITTEN if (path := Path(out, name)).exists() and not overwrite]:
        raise typer.BadParameter(f"{there[0]} exists: pass another folder as --out, or add --overwrite")
    with refusals():
        import seaborn  # noqa: F401  # of an extra: if missing, fail before the weights are read

        found = comparison.compare(base, a, b)
        typer.echo(found.text())
        written = comparison.write(found, out)
    typer.echo("\n" + "\n".join(f"{path}" for path in written))


@app.command()
def probe(
    model: Annotated[str, typer.Argument(help="Folder, shipped base or name of the model to train.")],
    task: Annotated[
        str,
        typer.Argument(
            help="Task, such as countdown or arithmetic; or task:set, such as mathematics:gsm8k or reasoning:sudoku."
        ),
    ],
    sigma: Annotated[float, typer.Option(help="Standard deviation of the perturbation.")] = 1e-3,
    alpha: Annotated[float | None, typer.Option(help="Step size.  [default: sigma / 2]")] = None,
    population: Annotated[int, typer.Option(help="N, members per step.")] = 30,
    prompts: Annotated[int | None, typer.Option(help="Prompts per step.  [default: 128 at most]")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the run that is asked about.")] = 200,
    completions: Annotated[int, typer.Option(help="Most completions to generate.")] = 130_000,
    max_completion_length: Annotated[int | None, typer.Option(help="Most new tokens.  [default: the task's]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of members, walks, samples and problems.")] = 0,
    engine: Annotated[str, typer.Option(help="local, cuda, vllm or ray.")] = "local",
    out: Annotated[str | None, typer.Option(help="JSON file to write the record to.")] = None,
) -> None:
    """Say beforehand whether ES will learn a task, by forward passes alone."""
    from evoalign_lib import probe as probes

    with refusals():
        if out and Path(out).exists():
            raise ValueError(f"--out {out} exists: pass a new file.")
        run = {"max_steps": steps, "seed": seed, "engine": engine, "max_completion_length": max_completion_length}
        run |= {"sigma": sigma, "alpha": sigma / 2 if alpha is None else alpha, "population_size": population}
        rows = max(prompts or 128, completions // max(population, 1))
        trainer, right, target = probes.trainer_of(model, task, rows, prompts_per_step=prompts, **run)
        with closing(trainer.engine):
            record = probes.probe(trainer, completions, right, target)
        typer.echo(probes.text(record))
        if out:
            Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@app.command("serve-scorer")
def serve_scorer(
    model: Annotated[str, typer.Argument(help="Folder or name of a reward or cost model.")],
    text: Annotated[
        str | None, typer.Option(help="Format that joins prompt and response: beaver, chat, continued or pair.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8100,
    device: Annotated[str | None, typer.Option(help="Device, such as cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type, such as bfloat16.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Maximum tokens per text.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the key for clients.")] = None,
) -> None:
    """Serve a reward or cost model to trainers on other GPUs or machines, until the process ends."""
    with refusals():
        from evoalign_lib import scoring_server

        options = {"host": host, "port": port, "device": device, "dtype": dtype, "max_length": max_length}
        scoring_server.serve(model, text=text, api_key_env=api_key_env, **options)


@app.command()
def tiny(
    out: Annotated[str, typer.Option(help="Folder to write.")],
    family: Annotated[str, typer.Option(help="Family of the tiny world: A, B, C, D or H.")] = "A",
    seed: Annotated[int, typer.Option(help="Seed; 0, 1, 2 gave the shipped bases (families C, D and H: 0).")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.  [default: as for the shipped bases]")] = None,
) -> None:
    """Train a base of the tiny world and print its scores."""
    from evoalign_lib import files, models
    from evoalign_lib.engines.local import LocalEngine, Prompts
    from evoalign_lib.tiny import describe, recipe

    with refusals():
        files.check_new_folder(out)
        recipe(family, seed, out, steps=steps)
    model, tokenizer = models.load(out)

    def engine_of(rows: list[dict[str, Any]], longest: int) -> LocalEngine:
        prompts = {"asked": Prompts(rows, tokenizer)}
        return LocalEngine(model, tokenizer, None, prompts, max_completion_length=longest)

    typer.echo(json.dumps(describe(engine_of, tokenizer, family)))
