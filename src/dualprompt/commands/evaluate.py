"""`evaluate`: a finished run on its own test images, or a model on a folder of yours."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from dualprompt.commands.common import DEVICE, Commands, emit, names, to_width
from dualprompt.commands.models import changed, open_learner
from dualprompt.errors import DualPromptError

EVALUATE = """\
A run is evaluated on its own test images, after each of its tasks, if you like with another selection of prompts. Its
result stays as it is; the new numbers are written beside it, to eval-SELECTION.json. A model is evaluated on a folder
that holds one folder of images for each class.

examples:
  dualprompt evaluate runs/cifar
  dualprompt evaluate runs/cifar --selection query,batch_vote,oracle
  dualprompt evaluate my-model photos/test
  dualprompt evaluate my-model photos/test --record --json
"""


def add(commands: Commands) -> None:
    """Add this subcommand."""
    about = "evaluate a finished run again, or a model on a folder of images"
    evaluate = commands.add("evaluate", do_evaluate, about, EVALUATE, alias="eval")
    evaluate.add_argument(
        "path", type=Path, metavar="RUN|MODEL", help="the folder of a run, a group of runs or a model"
    )
    evaluate.add_argument("folder", type=Path, nargs="?", help="for a model: holds one folder of images for each class")
    evaluate.add_argument("--device", help=f"{DEVICE} (default: auto; of a run its own)")
    evaluate.add_argument(
        "--selection", help="for a run: query, batch_vote, oracle, or several with commas (default: the run's)"
    )
    evaluate.add_argument(
        "--record", action="store_true", help="for a model: note the accuracies in its accuracy matrix"
    )


def do_evaluate(options: argparse.Namespace) -> None:
    """Evaluate what lies there."""
    from dualprompt.model.saved import is_model
    from dualprompt.training.group import is_run

    if is_model(options.path) and options.folder is None:
        raise DualPromptError(
            f"{options.path} is a model: say on which images, with `dualprompt evaluate {options.path} FOLDER`"
        )
    if is_run(options.path) and options.folder is not None:
        raise DualPromptError(f"{options.path} is a run, evaluated on its own test images; leave {options.folder} out")
    if options.folder is None:
        _run(options)
    else:
        _model(options)


def _run(options: argparse.Namespace) -> None:
    """Evaluate the finished runs of a folder again; the baseline's own result stands beside them."""
    from dualprompt.console import Terminal
    from dualprompt.files import write_json
    from dualprompt.report import run_files, tables
    from dualprompt.training import group
    from dualprompt.training.evaluate import evaluate_again
    from dualprompt.training.setup import prepare

    if options.record:
        raise DualPromptError("--record is for a model; what is found of a run is written beside it anyway")
    runs = run_files.finished_runs(options.path)
    evaluated = [run for run in runs if run.config().method["name"] != group.BASELINE] or runs
    results = {run: run.result() for run in runs}
    selections: list[Any] = names(options.selection) or [None]
    here = {"device": options.device, "devices": 1, "nodes": 1}
    here = {key: value for key, value in here.items() if value is not None}
    found, setup = [], None
    with Terminal() as terminal:
        for run in evaluated:
            run.check_backbone()
            setup = prepare(group.elsewhere_config(run.folder, run.config(), here), terminal, share=setup)
            run.check_same(setup.identity)
            for selection in selections:
                setup.method.check_selection(selection)
            for selection in selections:
                result = evaluate_again(setup, run, selection, terminal)
                write_json(run.folder / f"eval-{selection or 'default'}.json", result)
                found.append(result)
    beside = [result for run, result in results.items() if run not in evaluated]
    if len(found) == 1:
        value = found[0]
    elif len(evaluated) == 1:
        value = {"selections": {result["selection"]: result for result in found}}
    else:
        value = {"results": found}
    matrices = [tables.accuracy_matrix(result) for result in found]
    emit(options, value, *matrices, to_width(lambda brief: tables.headline([*found, *beside], brief)))


def _model(options: argparse.Namespace) -> None:
    """Evaluate a model on a folder."""
    from rich.table import Column, Table
    from rich.text import Text

    from dualprompt.console import Terminal
    from dualprompt.model_tables import judged_table, share_cells

    if options.selection is not None:
        raise DualPromptError("--selection is for a run; leave it out")
    options.model, options.device = options.path, options.device or "auto"
    opened = changed(options) if options.record else contextlib.nullcontext(open_learner(options))
    with opened as learner, Terminal() as terminal:
        found = learner.evaluate(options.folder, terminal, record=options.record)
    table = judged_table(found.confusion)
    by_task = Table(Column("task", overflow="fold"), "images", "accuracy", "95 %")
    for task in learner.tasks:
        if task.id in found.by_task:
            own = {name: found.confusion[name] for name in task.classes if name in found.confusion}
            by_task.add_row(Text(task.name), *share_cells(own))
    matching = "" if found.matching is None else f"; {found.matching:.1f} % get a class of their own task"
    low, high = found.interval
    message = (
        f"{found.correct} of {found.images} images right: {found.accuracy:.1f} % ({low:.1f} to {high:.1f}){matching}"
    )
    if learner.threshold is not None:
        message += f"; {found.rejected:.1f} % answered with none of these, without which {found.best:.1f} % were right"
    emit(options, found.to_dict(), table, *([by_task] if len(found.by_task) > 1 else []), message)
