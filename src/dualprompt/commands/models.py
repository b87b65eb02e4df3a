"""`learn`, `evaluate`, `forget`, `calibrate`, `info`: a model taught from one's own folders."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.check import asked_nested
from dualprompt.commands.common import DEVICE, Commands, Do, Parser, emit
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.progress import counted

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.learner import ContinualLearner

LEARN = """\
A fifth of each class (at most 10 images, none of fewer than 5) is held out to measure the accuracy. Nothing of the
images is kept. Images that cannot be read are refused, or left out with --skip-bad. Interrupted learning goes on when
the same command is given again; until it is complete, the old model stays.

examples:
  dualprompt learn my-model photos/january
  dualprompt learn my-model photos/february --name "February" --epochs 10
  dualprompt learn other-model photos/january --backbone dinov2-s14 --method.e_length 10 --train.lr 0.002
"""

FORGET = """\
The prompts, key, statistics and classifier rows of a task go; of a class, its statistics and its row. All other
classes answer as before. Where all tasks share their prompts (coda-prompt, l2p) or have none, only rows go.

examples:
  dualprompt forget my-model january
  dualprompt forget my-model "grand piano"
"""

CALIBRATE = """\
The threshold is set by the images that were held out while learning.

examples:
  dualprompt calibrate my-model
  dualprompt calibrate my-model --accept 0.9 --unknown photos/other-things
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""

    def with_model(name: str, do: Do, about: str, examples: str = "", overrides: bool = False) -> Parser:
        sub = commands.add(name, do, about, examples, overrides=overrides)
        sub.add_argument("model", type=Path, help="the model's folder")
        sub.add_argument("--device", default="auto", help=DEVICE)
        return sub

    about = "teach a model new classes from a folder; make it if there is none"
    learn = with_model("learn", do_learn, about, LEARN, overrides=True)
    learn.add_argument("folder", type=Path, help="holds one folder of images for each class")
    learn.add_argument("--name", help="what the task is called (default: the folder's name)")
    learn.add_argument("--epochs", type=int, help="passes over the images (default: the model's)")
    learn.add_argument("--again", action="store_true", help="learn known classes once more, as further experts")
    learn.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read, and say which")
    learn.add_argument("--nested", action="store_true", help="its folders are the classes, though they hold folders")
    learn.add_argument("--backbone", help="of a new model: embedded, a known name, a hub id, or a weights file")
    learn.add_argument("--method", help="of a new model: see `dualprompt list methods` (default: dualprompt)")
    learn.add_argument("--input-size", type=int, help="of a new model: pixels a side (default: the checkpoint's)")
    learn.add_argument("--seed", type=int, help="of a new model (default: 0)")

    evaluate = with_model("evaluate", do_evaluate, "evaluate a model on a folder of class folders")
    evaluate.add_argument("folder", type=Path, help="holds one folder of images for each class")
    evaluate.add_argument("--record", action="store_true", help="note the accuracies in the model's accuracy matrix")

    forget = with_model("forget", do_forget, "make a model forget a task or a class, for good", FORGET)
    forget.add_argument("what", help="a task's name or id, or a class")
    kind = forget.add_mutually_exclusive_group()
    kind.add_argument("--task", dest="kind", action="store_const", const="task", help="a task is meant, not a class")
    kind.add_argument("--class", dest="kind", action="store_const", const="class", help="a class is meant, not a task")

    calibrate = with_model("calibrate", do_calibrate, "let a model answer 'none of these' to strange images", CALIBRATE)
    calibrate.add_argument("--unknown", type=Path, help="folder of images that show none of its classes")
    calibrate.add_argument(
        "--accept", type=float, default=0.95, help="share of known images that still get a class (default: %(default)s)"
    )
    calibrate.add_argument("--off", action="store_true", help="always answer with a class")

    info = with_model("info", do_info, "show what a model knows and what it is made of")
    info.add_argument("--backbone", dest="moved", help="where its backbone lies now, if that has moved; remembered")


def open_learner(options: argparse.Namespace) -> ContinualLearner:
    """Return the model that a command is about."""
    from dualprompt.learner import ContinualLearner

    return ContinualLearner.load(options.model, options.device, backbone=getattr(options, "moved", None))


@contextlib.contextmanager
def changed(options: argparse.Namespace) -> Iterator[ContinualLearner]:
    """Yield the model that a command changes, held against all others, and save it if nothing goes wrong."""
    from dualprompt.model import saved

    if not saved.is_model(options.model):
        open_learner(options)  # it says what is wrong
    with saved.held(options.model):
        learner = open_learner(options)
        yield learner
        learner.save(options.model, held=True)


def do_learn(options: argparse.Namespace) -> None:
    """Teach a model."""
    from dualprompt.console import Terminal
    from dualprompt.learner import ContinualLearner
    from dualprompt.model.saved import is_model, refuse_other
    from dualprompt.model.workplace import workplace

    made_of = {"backbone": options.backbone, "method": options.method}
    made_of |= {"input_size": options.input_size, "seed": options.seed}
    given = {key: value for key, value in made_of.items() if value is not None}
    if options.overrides:
        given["options"] = {key.removeprefix("method."): value for key, value in options.overrides.items()}
    refuse_other(options.model)
    exists = is_model(options.model)
    if exists and given:
        option = next(iter({key: None for key in given if key != "options"} | options.overrides)).replace("_", "-")
        raise DualPromptError(f"{options.model} exists: --{option} is for a new model; leave it out, or name another")
    nested = asked_nested(options)  # before there are bars, which would hide the question
    with workplace(options.model) as work, contextlib.ExitStack() as stack:
        learner = stack.enter_context(changed(options)) if exists else ContinualLearner(device=options.device, **given)
        terminal = stack.enter_context(Terminal())
        try:
            task = learner.learn(
                options.folder,
                options.name,
                epochs=options.epochs,
                again=options.again,
                skip_bad=options.skip_bad,
                nested=nested,
                progress=terminal,
                work=work,
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; the model is as before; give the same command to go on") from None
        if not exists:
            if is_model(options.model):
                raise DualPromptError(f"another command has made {options.model} meanwhile; give this one again")
            learner.save(options.model)
    measured = "" if task.accuracy is None else f", {task.accuracy:.1f} % of the images held out were right"
    amount = f"{counted(len(task.classes), 'class', 'classes')} from {counted(task.images, 'image')}"
    messages = [f"learned task {task.id} ('{task.name}'): {amount}{measured}"]
    if learner.threshold is not None:
        messages.append("the threshold for 'none of these' is that of before; `dualprompt calibrate` sets it anew")
    value = {"model": str(options.model), "learned": task.to_dict(), **learner.info()}
    emit(options, value, tasks_table(learner), *messages)


def tasks_table(learner: ContinualLearner) -> Table:
    """Return what a model knows, a row a task."""
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "task", "classes", "images", "accuracy", "kept", "learned", title="what it knows")
    for task in learner.tasks:
        accuracy = "–" if task.accuracy is None else f"{task.accuracy:.1f} %"
        names = ", ".join(task.classes)
        cells = (f"{task.id}", task.name, names, f"{task.images}", accuracy, f"{task.bytes:,} B", task.learned)
        table.add_row(*(Text(cell) for cell in cells))  # Text: names may hold brackets
    return table


def do_evaluate(options: argparse.Namespace) -> None:
    """Judge a model on a folder."""
    from rich.table import Table
    from rich.text import Text

    from dualprompt.console import Terminal

    opened = changed(options) if options.record else contextlib.nullcontext(open_learner(options))
    with opened as learner, Terminal() as terminal:
        found = learner.evaluate(options.folder, terminal, record=options.record)
    table = Table("class", "accuracy")
    for name, accuracy in found.by_class.items():
        table.add_row(Text(name), f"{accuracy:.1f} %")
    matching = "" if found.matching is None else f", {found.matching:.1f} % matched to their own task"
    rejected = f", {found.rejected:.1f} % answered with none" if learner.threshold is not None else ""
    message = f"{found.images} images: {found.accuracy:.1f} % right{matching}{rejected}"
    emit(options, found.to_dict(), table, message)


def do_forget(options: argparse.Namespace) -> None:
    """Make a model forget."""
    with changed(options) as learner:
        names = {task.name for task in learner.tasks} | set(learner.classes)
        by_id = options.what.isdecimal() and options.what not in names and options.kind != "class"
        gone = learner.forget(int(options.what) if by_id else options.what, options.kind)
    value = {"class": gone} if isinstance(gone, str) else {"task": gone.to_dict()}
    message = f"forgot class '{gone}'" if isinstance(gone, str) else f"forgot task {gone.id} ('{gone.name}')"
    if learner.shares_prompts:
        message += "; the method keeps nothing else for a task alone: what tasks share was shaped by it, and stays"
    emit(options, {"forgotten": value, **learner.info()}, tasks_table(learner), message)


def do_calibrate(options: argparse.Namespace) -> None:
    """Set or remove the threshold of a model."""
    from rich.table import Table

    if options.off:
        with changed(options) as learner:
            learner.threshold = None
        emit(options, {"threshold": None}, "every image gets a class")
        return
    with changed(options) as learner:
        found = learner.calibrate(options.unknown, accept=options.accept)
    table = Table("threshold", "known images that get a class", "unknown images that get none")
    for level in found.levels:
        rejected = "–" if level.rejected is None else f"{level.rejected:.1f} %"
        mark = " ←" if level.threshold == found.threshold else ""
        table.add_row(f"{level.threshold:.4f}{mark}", f"{level.accepted:.1f} %", rejected)
    message = f"threshold {found.threshold:.4f}, from {found.known} images held out while learning"
    emit(options, found.to_dict(), table, message)


def do_info(options: argparse.Namespace) -> None:
    """Show a model."""
    with changed(options) if options.moved else contextlib.nullcontext(open_learner(options)) as learner:
        info = learner.info()
    backbone = info["backbone"]
    limit = "always a class" if learner.threshold is None else f"none of these below a trust of {learner.threshold:.4f}"
    message = (
        f"backbone {backbone['name']} ({backbone['parameters']:,} parameters, licence: {backbone['licence']}), "
        f"images of {info['side']} × {info['side']} pixels\n"
        f"method {info['method']['name']}; {info['bytes']:,} bytes kept; answers: {limit}"
    )
    tables = [tasks_table(learner)]
    if any(value is not None for n, row in enumerate(info["accuracy_matrix"]) for value in row[:n]):
        tables.append(matrix_table(learner))
    emit(options, info, *tables, message)


def matrix_table(learner: ContinualLearner) -> Table:
    """Return the accuracy on each task after each task, where it was measured."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    names = [task.name for task in learner.tasks]
    table = Table("after", *map(escape, names), title="accuracy on each task (%)")
    for name, row in zip(names, learner.accuracy_matrix(), strict=True):
        table.add_row(Text(name), *("" if value is None else f"{value:.1f}" for value in row))
    return table
