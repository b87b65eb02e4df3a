"""`run`, `resume` and `show`: one benchmark, learned task by task."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualprompt.commands.common import (
    PRECISION,
    WRITTEN,
    Commands,
    add_choice,
    add_columns,
    add_devices,
    add_track,
    chosen_columns,
    emit,
    names,
    sheet_to_width,
    to_width,
    trackers,
)
from dualprompt.errors import DualPromptError
from dualprompt.progress import speaks

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.run.folder import Run
    from dualprompt.training.group import Member

LISTED = 8  # pictures that are named on the terminal
RUN_EXAMPLES = """\
Every key of the config can be set with a dotted option: --train.epochs 10 --method.g_layers 1,2
--benchmark.tasks 5 --evaluate.batch_size 64. A wrong key is answered with the nearest right one.

examples:
  dualprompt run mini
  dualprompt run mini --methods frozen-head,dualprompt,dualprompt:head=ridge --seeds 3
  dualprompt run split-cifar100 --backbone embedded --seeds 3
  dualprompt run mini --train.epochs 10 --method.e_layers 3-8 --method.prompting pro-t
  dualprompt run my-photos.yaml --method.e_length 10 --skip-bad --json
"""

RESUME_EXAMPLES = """\
A run saves itself at the end of each task, and once a minute. What is finished stays as it is. The device may be
another one than before.

examples:
  dualprompt resume runs/cifar
  dualprompt resume runs/cifar --device cpu --track tensorboard
"""

SHOW_EXAMPLES = """\
examples:
  dualprompt show runs/cifar
  dualprompt show runs/study-ablation-mini
  dualprompt show runs/cifar --json > result.json
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""
    run = commands.add(
        "run", do_run, "learn a benchmark task by task, beside the no-prompt baseline", RUN_EXAMPLES, overrides=True
    )
    run.add_argument("preset", help="a preset (`dualprompt list presets`) or a YAML file")
    run.add_argument("--method", help="see `dualprompt list methods` (default: the preset's)")
    run.add_argument(
        "--methods",
        help="several side by side, with commas; NAME:OPTION=VALUE or NAME:train.OPTION=VALUE sets an option",
    )
    add_choice(run)
    run.add_argument("--seed", type=int, help="first seed (default: 0)")
    run.add_argument("--seeds", type=int, default=1, help="how many seeds, counted up from the first (default: 1)")
    run.add_argument("--no-baseline", action="store_true", help="do not run frozen-head beside the methods")
    run.add_argument("--skip-bad", action="store_true", help="leave out unreadable images and count them")
    add_devices(run).add_argument("--precision", help=PRECISION)
    written = run.add_argument_group(WRITTEN)
    written.add_argument("--out", type=Path, help="run directory (default: runs/PRESET-METHOD-TIME)")
    add_track(written)

    about = "continue an interrupted run to the same result"
    resume = commands.add("resume", do_resume, about, RESUME_EXAMPLES)
    resume.add_argument("run", type=Path, help="the folder of a run or a group of runs")
    resume.add_argument(
        "--anyway", action="store_true", help="go on although the code has changed since; its result will say so"
    )
    add_track(resume)
    add_devices(resume)

    show = commands.add("show", do_show, "show the tables and pictures of a run, or of a study", SHOW_EXAMPLES)
    show.add_argument("run", type=Path, help="the folder of a run, a group of runs or a study")
    add_columns(show)


def do_run(options: argparse.Namespace) -> None:
    """Learn a benchmark."""
    from dualprompt.console import Terminal
    from dualprompt.files import new_folder, runs_root
    from dualprompt.training import group

    if options.seeds < 1:
        raise DualPromptError(f"--seeds must be at least 1, found {options.seeds}")
    overrides = dict(options.overrides)
    flags = {
        "backbone.name": options.backbone,
        "method.name": options.method,
        "seed": options.seed,
        "benchmark.skip_bad": options.skip_bad or None,
        "device": options.device,
        "devices": options.devices,
        "nodes": options.nodes,
        "precision": options.precision,
        "track": trackers(options),
    }
    overrides |= {key: value for key, value in flags.items() if value is not None}
    name, members = _one_method(options, overrides) if options.methods is None else _lines(options, overrides)
    own = runs_root() / f"{Path(options.preset).stem}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as stack:
        out = options.out or stack.enter_context(new_folder(own))
        runs = group.start(members, out, stack.enter_context(Terminal()))
    conclude(options, runs, out)


def _one_method(options: argparse.Namespace, overrides: dict[str, Any]) -> tuple[str, list[Member]]:
    """Return the name of a method, and the runs of it and of its baseline."""
    from dualprompt.config import compose, compose_beside
    from dualprompt.training import group

    first = compose(options.preset, options.recipe, overrides)
    configs = [first.model_copy(update={"seed": first.seed + n}) for n in range(options.seeds)]
    baseline = False
    if not options.no_baseline:
        baseline = compose_beside(options.preset, options.recipe, overrides, group.BASELINE)
    return first.method["name"], group.plan(configs, baseline)


def _lines(options: argparse.Namespace, overrides: dict[str, Any]) -> tuple[str, list[Member]]:
    """Return what several methods are called together, and the runs of all, the baseline's last if nobody asked."""
    from dualprompt.config import compose, compose_beside, read_line
    from dualprompt.methods.base import METHODS, method_config
    from dualprompt.training import group

    if "method.name" in overrides:
        raise DualPromptError("choose methods with --methods alone, without --method or --method.name")
    asked = names(options.methods)
    if not asked:
        raise DualPromptError("--methods names no method; see `dualprompt list methods`")
    lines = {}
    for line in asked:
        method, own = read_line(line)
        METHODS[method]  # refuses a wrong name with the nearest right one
        try:
            lines[line] = compose(options.preset, options.recipe, overrides | own | {"method.name": method})
            method_config(lines[line].method)
        except DualPromptError as error:
            raise DualPromptError(f"{line}: {error}") from None
    if group.BASELINE not in lines and not options.no_baseline:
        common = compose_beside(options.preset, options.recipe, overrides, group.BASELINE)
        lines[group.BASELINE] = group.beside(lines[asked[0]], common)
    return f"{len(lines)}-methods" if len(lines) > 1 else read_line(asked[0])[0], group.plan_lines(lines, options.seeds)


def do_resume(options: argparse.Namespace) -> None:
    """Continue an interrupted run."""
    from dualprompt.console import Terminal
    from dualprompt.report.run_files import refuse_other_folders
    from dualprompt.training import group

    refuse_other_folders(options.run)
    places = {"device": options.device, "devices": options.devices, "nodes": options.nodes, "track": trackers(options)}
    elsewhere = {key: value for key, value in places.items() if value is not None}
    with Terminal() as terminal:
        runs = group.resume(options.run, terminal, elsewhere, options.anyway)
    conclude(options, runs, options.run)


def conclude(options: argparse.Namespace, runs: list[Run], folder: Path) -> None:
    """Write and print what the finished runs of a folder have to show."""
    if not speaks():
        return
    from dualprompt.report import run_files, tables

    pictures = run_files.publish_group(runs, folder)
    results = [run.result() for run in runs]
    seeds = sorted({result["seed"] for result in results})
    shown = [result for result in results if result["seed"] == seeds[0]]
    more = [f"  and {len(pictures) - LISTED} more, in the folders of the runs"] if len(pictures) > LISTED else []
    emit(
        options,
        run_files.combined(runs, folder) | {"pictures": [str(path) for path in pictures]},
        *(tables.accuracy_matrix(result) for result in shown),
        _table(options, results),
        "\n".join(["pictures:", *(f"  {path}" for path in pictures[:LISTED]), *more]),
        f"a page of it: dualprompt report {shlex.quote(str(folder))}",
    )


def _table(options: argparse.Namespace, results: list[dict[str, Any]]) -> Table:
    """Return the numbers that are asked for, or those that say most."""
    from dualprompt.report import columns, tables
    from dualprompt.report.sheet import as_rich

    if not getattr(options, "columns", None):
        return to_width(lambda brief: tables.headline(results, brief))
    return as_rich(columns.sheet(results, chosen_columns(options), tables.headline_sheet(results).title))


def do_show(options: argparse.Namespace) -> None:
    """Show a finished run, or a study."""
    from dualprompt.report import study_files
    from dualprompt.report.run_files import finished_runs

    chosen_columns(options)  # refuses what there is not, before anything is written
    if study_files.is_study(options.run):
        study = study_files.read(options.run)
        value = study.model_dump(mode="json", exclude={"pictures", "photos"})
        emit(options, value, *map(sheet_to_width, study.tables), study.finding)
        return

    conclude(options, finished_runs(options.run), options.run)
