"""`learn`, `calibrate`, `info`: a model taught from one's own folders."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.check import asked_nested
from dualprompt.commands.common import (
    BACKBONE,
    DEVICE,
    Commands,
    Do,
    Parser,
    add_shards,
    emit,
    shards,
    to_width,
)
from dualprompt.commands.compare import do_compare
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.progress import counted

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.learner import ContinualLearner, TaskInfo

LEARN = """\
One pass over the images gives a model in closed form. Each image is classified by a model of all the others, which
gives the accuracy and the threshold for "none of these". Prompts are trained too if they win on held-out images and the
time allows. No image is kept. Images that cannot be read are refused, or left out with --skip-bad. To continue
interrupted learning, give the same command again; until it is complete, the old model stays.

examples:
  dualprompt learn my-model photos/january
  dualprompt learn my-model photos/march --prompts always --minutes 30
  dualprompt learn my-model photos/january --compare-backbones embedded,dinov2-s14
  dualprompt learn my-model photos/february --name "February" --epochs 10
  dualprompt learn other-model photos/january --backbone dinov2-s14 --method.e_length 10 --train.lr 0.002
"""

COMPARE = "learn nothing: size, speed and accuracy of backbones on this folder (default: those that are at hand)"
PROMPTS = "train prompts where they win on held-out images (auto, the default), always, or never"

ACCEPT = 0.95  # share of known images that still get a class

CALIBRATE = """\
Each lesson sets the threshold from images left out of the model, so that 99 % of them get a class. A threshold that you
set here stays.

examples:
  dualprompt calibrate my-model
  dualprompt calibrate my-model --accept 0.9 --unknown photos/other-things
"""

INFO = """\
examples:
  dualprompt info my-model
  dualprompt info my-model --json | jq .accuracy_matrix
  dualprompt info my-model --backbone ./moved/vit.safetensors
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""

    def with_model(name: str, do: Do, about: str, examples: str, overrides: bool = False) -> Parser:
        sub = commands.add(name, do, about, examples, overrides=overrides)
        sub.add_argument("model", type=Path, help="the model's folder")
        sub.add_argument("--device", default="auto", help=DEVICE)
        return sub

    about = "teach a model new classes from a folder; makes a new model if there is none"
    learn = with_model("learn", do_learn, about, LEARN, overrides=True)
    learn.add_argument("folder", type=Path, help="holds one folder of images for each class")
    learn.add_argument("--name", help="what the task is called (default: the folder's name; of `train`, its parent's)")
    learn.add_argument("--again", action="store_true", help="learn known classes once more, as a further task")
    learn.add_argument("--compare-backbones", nargs="?", const="", metavar="A,B", help=COMPARE)
    images = learn.add_argument_group("its images")
    images.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read, and say which")
    images.add_argument("--nested", action="store_true", help="its folders are the classes, though they hold folders")
    add_shards(images)
    prompts = learn.add_argument_group("prompts")
    prompts.add_argument("--prompts", choices=("auto", "always", "never"), default="auto", help=PROMPTS)
    prompts.add_argument("--minutes", type=float, help="time limit for training prompts (default: 2 for auto)")
    prompts.add_argument("--epochs", type=int, help="passes over the images (default: the model's)")
    new = learn.add_argument_group("of a new model")
    new.add_argument("--backbone", help=BACKBONE)
    new.add_argument("--method", help="see `dualprompt list methods` (default: dualprompt-lda)")
    new.add_argument("--input-size", type=int, help="pixels a side (default: the checkpoint's)")
    new.add_argument("--seed", type=int, help="random seed (default: 0)")

    calibrate = with_model("calibrate", do_calibrate, "set when a model answers 'none of these'", CALIBRATE)
    calibrate.add_argument("--unknown", type=Path, help="folder of images that show none of its classes")
    calibrate.add_argument(
        "--accept", type=float, help=f"share of known images that still get a class (default: {ACCEPT})"
    )
    either = calibrate.add_mutually_exclusive_group()
    either.add_argument("--off", action="store_true", help="always answer with a class")
    either.add_argument("--auto", action="store_true", help="let each lesson set it again, as in a new model")

    info = with_model("info", do_info, "show what a model knows and what it is made of", INFO)
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

    if options.compare_backbones is not None:
        do_compare(options)
        return
    made_of = {key: getattr(options, key) for key in ("backbone", "method", "input_size", "seed")}
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
        over = stack.enter_context(shards(options))
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
                prompts=options.prompts,
                minutes=options.minutes,
                over=over,
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; the model is as before; give the same command to go on") from None
        if not exists:
            if is_model(options.model):
                raise DualPromptError(f"another command has made {options.model} meanwhile; give this one again")
            learner.save(options.model)
    measured = "" if task.accuracy is None else f"; {accuracy_words(task)}"
    amount = f"{counted(len(task.classes), 'class', 'classes')} from {counted(task.images, 'image')}"
    messages = [f"learned task {task.id} ('{task.name}'): {amount}{measured}"]
    if task.prompts is not None:
        messages.append(f"prompts: {'trained' if task.prompts.used else 'not trained'} ({task.prompts.why})")
    messages.append(threshold_words(learner))
    value = {"model": str(options.model), "learned": task.to_dict(), **learner.info()}
    emit(options, value, known_table(learner), *messages)


def accuracy_words(task: TaskInfo) -> str:
    """Return a task's accuracy with its count and interval."""
    assert task.interval is not None
    low, high = task.interval
    how = "each classified by a model of all the others" if task.left_one_out else "held out of learning"
    count = f"{task.correct} of {task.held} images right, {how}"
    return f"accuracy {task.accuracy:.1f} % (95 % interval {low:.0f} to {high:.0f}): {count}"


def threshold_words(learner: ContinualLearner) -> str:
    """Return when the answer is "none of these", and what that was measured to do."""
    info = learner.info()
    if learner.threshold is None:
        return "'none of these' is never the answer" + (
            ": too few images to set a threshold by" if info["threshold_by"] == "lessons" else ""
        )
    words = f"'none of these' below a trust of {learner.threshold:.4f}"
    if does := info["threshold_does"]:
        words += f": {does['accepted']:.1f} % of {does['known']} images of known classes get a class"
        if does["rejected"] is not None:
            words += f", {does['rejected']:.1f} % would get none if their own class were not known"
    return words if info["threshold_by"] == "lessons" else f"{words} (set by hand)"


def known_table(learner: ContinualLearner) -> Table:
    """Return what a model knows, as wide as the terminal allows."""
    from dualprompt.model_tables import brief_tasks, tasks_table

    return to_width(lambda brief: brief_tasks(learner) if brief else tasks_table(learner))


def do_calibrate(options: argparse.Namespace) -> None:
    """Set or remove the threshold of a model."""
    from rich.table import Table

    if (options.off or options.auto) and (options.unknown is not None or options.accept is not None):
        given = "--unknown" if options.unknown is not None else "--accept"
        raise DualPromptError(f"{given} says how to measure a threshold; leave it out with --off and --auto")
    if options.off:
        with changed(options) as learner:
            learner.threshold = None
        emit(options, {"threshold": None}, "every image gets a class")
        return
    if options.auto:
        with changed(options) as learner:
            learner.calibrate_by_lessons()
        emit(options, {"threshold": learner.threshold}, threshold_words(learner))
        return
    with changed(options) as learner:
        found = learner.calibrate(options.unknown, accept=ACCEPT if options.accept is None else options.accept)
    table = Table("threshold", "known images that get a class", "unknown images that get none")
    for level in found.levels:
        rejected = "–" if level.rejected is None else f"{level.rejected:.1f} %"
        mark = " ←" if level.threshold == found.threshold else ""
        table.add_row(f"{level.threshold:.4f}{mark}", f"{level.accepted:.1f} %", rejected)
    message = f"threshold {found.threshold:.4f}, from {found.known} images held or left out while learning"
    if found.unknown and not found.unknown_given:
        message += "; the unknown ones are the same images, asked as if their class were not known"
    emit(options, found.to_dict(), table, message)


def do_info(options: argparse.Namespace) -> None:
    """Show a model."""
    from dualprompt.model_tables import judged_table, matrix_table

    with changed(options) if options.moved else contextlib.nullcontext(open_learner(options)) as learner:
        info = learner.info()
    backbone = info["backbone"]
    message = (
        f"backbone {backbone['name']} ({backbone['parameters']:,} parameters, licence: {backbone['licence']}), "
        f"images of {info['side']} × {info['side']} pixels\n"
        f"method {info['method']['name']}; {info['bytes']:,} bytes kept; {threshold_words(learner)}"
    )
    tables = [known_table(learner)]
    if info["accuracy_matrix"] is not None and len(info["tasks"]) > 1:
        tables.append(matrix_table(learner))
    if info["accuracy"] is not None:
        tables.append(judged_table(info["accuracy"]["confusion"], "images held or left out of lessons"))
    emit(options, info, *tables, message)
