"""The command line: `headrace run | submit | debug | config | export | trace | doctor | status | cancel`."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.config import Config, load

MISTAKE = 2
"""Exit status for what the user can mend."""


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""What a wrong command line raises. It is typer's own class or click's, by typer's version; this names both."""


class _Paragraphs(TyperGroup):
    """Shows a HeadraceError, and a wrong command line, as one paragraph without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            _refuse(str(error))
        except USAGE_ERROR as error:
            program = f"headrace {ctx.invoked_subcommand}" if ctx.invoked_subcommand else "headrace"
            message = error.format_message()
            end = "" if message.endswith((".", "?")) else "."
            _refuse(f"{message}{end} See `{program} --help`.")


def _refuse(paragraph: str) -> NoReturn:
    typer.echo(f"headrace: {paragraph}", err=True)
    raise typer.Exit(MISTAKE) from None


app = typer.Typer(
    cls=_Paragraphs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fully asynchronous reinforcement learning of language models as one MPI job.",
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `headrace config` explains its keys.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]…", help="Values that replace those of the file.")
]
Continue = Annotated[bool, typer.Option("--continue", help="--resume if the run has begun, else begin it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run from its newest checkpoint.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="If the run folder exists, use a new one: NAME-2, NAME-3, …")]
Ranks = Annotated[
    int | None, typer.Option("-n", "--ranks", help="MPI ranks in all: trainers as configured, the rest generates.")
]


ProfileName = Annotated[
    str, typer.Option("--profile", metavar="NAME|PATH", help="The cluster: cpu, nvidia, ascend, or a YAML file.")
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None: ...


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Resume = False,
    fresh: Fresh = False,
    go_on: Continue = False,
) -> None:
    """Train: start the ranks, by mpirun on this machine unless launch.starter says otherwise, and show how it goes."""
    from headrace.launcher.crew import with_ranks
    from headrace.launcher.runfolder import has_begun
    from headrace.launcher.start import run_job

    loaded = with_ranks(load(config, overrides or ()), ranks)
    raise typer.Exit(run_job(loaded, resume or (go_on and has_begun(loaded.run.folder)), fresh))


@app.command()
def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    profile: ProfileName = "cpu",
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Nodes for the ranks.")] = 1,
    spare_nodes: Annotated[
        int, typer.Option("--spare-nodes", min=0, help="More nodes, to take the place of lost ones.")
    ] = 0,
    ranks: Ranks = None,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="KEY.PATH=A,B", help="An array of runs, one per value.")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", metavar="JOB", help="Start once it has ended well.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Time limit of one start, as sbatch takes it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the script; write and send nothing.")] = False,
    resume: Resume = False,
    fresh: Fresh = False,
) -> None:
    """Train as a job of Slurm: write its script into the run folder, and send it."""
    from headrace.launcher.profile import load_profile
    from headrace.launcher.submit import Wish, prepare

    wish = Wish(config, overrides or (), nodes, spare_nodes, ranks, sweep or (), after, time, resume, fresh)
    submission = prepare(wish, load_profile(profile))
    if dry_run:
        typer.echo(submission.script, nl=False)
        return
    submission.write()
    job = submission.send()
    typer.echo(f"job {job}: {submission.file}\nits output: {submission.logs(job)}")


@app.command()
def debug(config: ConfigFile, overrides: Overrides = None, resume: Resume = False, fresh: Fresh = False) -> None:
    """Train in this one process, without MPI: one generator and one trainer by turns; breakpoints work."""
    from headrace.launcher.start import debug_job

    raise typer.Exit(debug_job(load(config, overrides or ()), resume, fresh))


@app.command("config")
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configs instead.")] = False,
) -> None:
    """Print the resolved config as YAML, every key under its documentation."""
    from headrace.launcher.describe import describe_config

    if schema:
        typer.echo(json.dumps(Config.model_json_schema(), indent=2))
    elif config is None:
        raise ConfigError("Give a config to explain, for instance `headrace config CONFIG`, or ask for --schema.")
    else:
        typer.echo(describe_config(load(config, overrides or ())), nl=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, for instance runs/NAME.")],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="New folder for the model.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint of this step rather than the newest.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder (safetensors, config, tokenizer)."""
    from headrace.launcher.export import export as write

    typer.echo(f"written: {write(run, out, step)}")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The job that is to run here.")] = None,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Ranks of the world to examine.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Examine so many nodes, in a Slurm job.")] = None,
    profile: ProfileName = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and measurements as JSON.")] = False,
) -> None:
    """Check whether a job can work here: this machine, and a small world of ranks."""
    from headrace.launcher.doctor.command import doctor as examine
    from headrace.launcher.profile import load_profile

    raise typer.Exit(examine(config, overrides or (), load_profile(profile), ranks, nodes, as_json))


RunName = typer.Argument(metavar="RUN", help="Name of a run under ./runs, or its folder.")


@app.command()
def trace(
    run: Annotated[Path, RunName],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="New file; RUN/trace/trace.json if none.")] = None,
) -> None:
    """Put the traces of a run's ranks (run.trace: true) into one file for https://ui.perfetto.dev."""
    from headrace.launcher.status import find_run
    from headrace.launcher.trace import merge_traces

    typer.echo(f"written: {merge_traces(find_run(run), out)}")


@app.command()
def status(run: Annotated[Path | None, RunName] = None) -> None:
    """Show how a run goes, or all runs under ./runs."""
    from rich.console import Console

    from headrace.launcher.status import all_runs, find_run, read_status, show, show_one

    if run is not None:
        show_one(read_status(find_run(run)), Console())
    else:
        show([read_status(folder) for folder in all_runs()], Console())


@app.command()
def cancel(
    run: Annotated[Path, RunName],
    now: Annotated[bool, typer.Option("--now", help="Kill it at once.")] = False,
) -> None:
    """Stop a run: it writes a checkpoint and leaves. A second call kills it."""
    from headrace.launcher.cancel import cancel as stop
    from headrace.launcher.status import find_run

    raise typer.Exit(stop(find_run(run), now, typer.echo))


def main() -> None:
    """The `headrace` program."""
    sys.exit(app())
