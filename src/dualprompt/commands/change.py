"""`more`, `rename`, `merge`, `forget`, `versions`, `rollback`, `push`, `pull`: a model changed, undone, shared."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.common import DEVICE, Commands, Do, Parser, emit, to_width
from dualprompt.commands.models import changed, known_table, open_learner
from dualprompt.errors import DamagedError
from dualprompt.progress import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from dualprompt.learner import ContinualLearner, TaskInfo
    from dualprompt.model.versions import Version

MORE = """\
If the classifier is solved from sums (dualprompt-lda, the default; lda, klda, fecam, ridge, ranpac, dualprompt-rp), the
images are added to these sums. Other methods learn them as a further task for the same classes.

examples:
  dualprompt more my-model photos/more-of-january
"""

RENAME = """\
Nothing is learned; the class answers under its new name.

examples:
  dualprompt rename my-model "granny's piano" "grand piano"
"""

MERGE = """\
Nothing is learned. The probabilities of the merged classes are added; all other classes answer as before. NAME may be
one of the classes, or another known class, which is then merged as well.

examples:
  dualprompt merge my-model kitten cat --into cat
"""

FORGET = """\
Of a task, its prompts, key, statistics and classifier rows are removed; of a class, its statistics and rows. All other
classes answer as before. Where all tasks share their prompts (coda-prompt, l2p) or have none, only rows are removed.
Sums over the images of all classes stay: one covariance of features (dualprompt-lda, the default; lda, klda), the sums
of ridge and ranpac, and how well each classifier did on images left out.

Earlier versions of the model still hold what is forgotten, so that `dualprompt rollback` can undo it. With --purge they
are removed as well, and it is gone for good. --purge also works for what was forgotten earlier without it.

examples:
  dualprompt forget my-model january
  dualprompt forget my-model "grand piano" --purge
"""

VERSIONS = """\
Each change that is saved makes a version. The last 5 before the current one are kept, or as many as --keep says, from
now on. Versions of the same tensors share one file.

examples:
  dualprompt versions my-model
  dualprompt versions my-model --keep 20
"""

ROLLBACK = """\
An earlier version becomes the model again, as a new version, so this can be undone too. Without a number it is the
version before the current one.

examples:
  dualprompt rollback my-model
  dualprompt rollback my-model 3
"""

PUSH = """\
The model is uploaded without its earlier versions and without its backbone. The token is that of `hf auth login`, or
$HF_TOKEN.

examples:
  dualprompt push my-model me/garden-birds
  dualprompt push my-model me/garden-birds --public
"""

PULL = """\
examples:
  dualprompt pull me/garden-birds my-model
  dualprompt pull me/garden-birds my-model --revision v2
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""

    def with_model(name: str, do: Do, about: str, examples: str) -> Parser:
        sub = commands.add(name, do, about, examples)
        sub.add_argument("model", type=Path, help="the model's folder")
        sub.add_argument("--device", default="auto", help=DEVICE)
        return sub

    more = with_model("more", do_more, "add images to classes that a model knows", MORE)
    more.add_argument("folder", type=Path, help="holds one folder of images for each class")
    more.add_argument("--skip-bad", action="store_true", help="leave out images that cannot be read, and say which")

    rename = with_model("rename", do_rename, "rename a class", RENAME)
    rename.add_argument("old", help="the class")
    rename.add_argument("new", help="its new name")

    merge = with_model("merge", do_merge, "merge several classes into one", MERGE)
    merge.add_argument("classes", nargs="+", help="the classes")
    merge.add_argument("--into", required=True, metavar="NAME", help="what they are called from now on")

    forget = with_model("forget", do_forget, "make a model forget a task or a class", FORGET)
    forget.add_argument("what", help="a task's name or id, or a class")
    forget.add_argument("--purge", action="store_true", help="for good: remove the earlier versions that hold it too")
    kind = forget.add_mutually_exclusive_group()
    kind.add_argument("--task", dest="kind", action="store_const", const="task", help="a task is meant, not a class")
    kind.add_argument("--class", dest="kind", action="store_const", const="class", help="a class is meant, not a task")

    versions = commands.add("versions", do_versions, "list the versions of a model", VERSIONS)
    versions.add_argument("model", type=Path, help="the model's folder")
    versions.add_argument("--keep", type=int, metavar="N", help="keep so many earlier versions from now on")

    rollback = with_model("rollback", do_rollback, "undo: go back to an earlier version of a model", ROLLBACK)
    rollback.add_argument("number", type=int, nargs="?", help="of the version (default: the one before)")

    push = with_model("push", do_push, "upload a model to a repository of the Hugging Face hub", PUSH)
    push.add_argument("repo", help="USER/NAME; it is made where there is none")
    push.add_argument("--public", action="store_true", help="of a new repository: everyone may see it")
    push.add_argument("--message", help="what the change is called")

    pull = commands.add("pull", do_pull, "download a model from a repository of the Hugging Face hub", PULL)
    pull.add_argument("repo", help="USER/NAME")
    pull.add_argument("model", type=Path, help="the model's folder; a model that is there becomes an earlier version")
    pull.add_argument("--revision", help="a branch, a tag or a commit (default: main)")
    pull.add_argument("--backbone", help="where its backbone lies here, if that is a file of its own")
    pull.add_argument("--device", default="auto", help=DEVICE)


def show(options: argparse.Namespace, learner: ContinualLearner, message: str, **value: object) -> None:
    """Print what a model knows after a change."""
    emit(options, {**value, **learner.info()}, known_table(learner), message)


def do_more(options: argparse.Namespace) -> None:
    """Add images to known classes."""
    from dualprompt.console import Terminal

    with changed(options) as learner, Terminal() as terminal:
        before = sum(task.images for task in learner.tasks)
        tasks = learner.more(options.folder, progress=terminal, skip_bad=options.skip_bad)
    added = sum(task.images for task in learner.tasks) - before
    names = ", ".join(f"'{task.name}'" for task in tasks)
    show(options, learner, f"added {counted(added, 'image')} to {names}", changed=[task.to_dict() for task in tasks])


def do_rename(options: argparse.Namespace) -> None:
    """Rename a class."""
    with changed(options) as learner:
        learner.rename(options.old, options.new)
    show(options, learner, f"'{options.old}' is now called '{options.new}'")


def do_merge(options: argparse.Namespace) -> None:
    """Merge classes."""
    with changed(options) as learner:
        learner.merge(options.classes, options.into)
    show(options, learner, f"{', '.join(options.classes)}: one class now, '{options.into}'")


def do_forget(options: argparse.Namespace) -> None:
    """Make a model forget."""
    from dualprompt.data.folder import one_form
    from dualprompt.hosted import review
    from dualprompt.hosted.places import SERVE
    from dualprompt.model import saved, versions

    if not saved.is_model(options.model):
        open_learner(options)  # it says what is wrong
    with saved.held(options.model):
        learner = open_learner(options)
        names = {task.name for task in learner.tasks} | set(learner.classes)
        by_id = options.what.isdecimal() and options.what not in names and options.kind != "class"
        what = int(options.what) if by_id else options.what
        holders = versions.holders(options.model, what, options.kind) if options.purge else set()
        labels = versions.labels_of(options.model, holders)
        gone = None  # it was forgotten before, but earlier versions have it
        if not holders or {what, one_form(str(what))} & {*names, *(task.id for task in learner.tasks)}:
            gone = learner.forget(what, options.kind)
            learner.save(options.model, held=True)
        purged, pictures = (), 0
        if options.purge:  # the pictures first: what then fails can be asked for again
            pictures = review.purged(options.model / SERVE, labels - set(learner.classes))
            purged = versions.purge(options.model, holders)
        older = len(versions.listed(options.model)) - 1
    messages = [forgotten(learner, gone) if gone is not None else f"'{what}' was forgotten before"]
    if options.purge:
        messages.append(f"removed {counted(len(purged), 'earlier version')} that held it")
        if pictures:
            messages.append(f"removed {counted(pictures, 'picture')} of it that a server kept to be looked at")
    elif older:
        kind = [f"--{options.kind}"] if options.kind else []
        again = shlex.join(["dualprompt", "forget", str(options.model), options.what, *kind, "--purge"])
        messages.append(f"earlier versions still hold it, so that it can be undone; for good: {again}")
    value = {"class": gone} if isinstance(gone, str) else {"task": None if gone is None else gone.to_dict()}
    show(options, learner, "\n".join(messages), forgotten=value, purged=list(purged))


def forgotten(learner: ContinualLearner, gone: TaskInfo | str) -> str:
    """Say what a model has forgotten."""
    message = f"forgot class '{gone}'" if isinstance(gone, str) else f"forgot task {gone.id} ('{gone.name}')"
    if learner.tasks and learner.shares_prompts:
        message += "; the method keeps nothing else for a task alone: what tasks share was shaped by it, and stays"
    return message


def do_versions(options: argparse.Namespace) -> None:
    """List the versions of a model."""
    from dualprompt.model import versions

    if options.keep is not None:
        versions.keep(options.model, options.keep)
    found = versions.listed(options.model)
    size = sum(file.lstat().st_size for file in options.model.glob("weights-*.safetensors"))
    emit(
        options,
        {"versions": [version.to_dict() for version in found], "bytes": size},
        known_versions(found),
        f"{counted(len(found), 'version')}, {size:,} bytes of tensors in all",
    )


def known_versions(found: Sequence[Version]) -> Table:
    """Return the versions of a model, as wide as the terminal allows."""
    from dualprompt.model_tables import versions_table

    return to_width(lambda brief: versions_table(found, brief))


def do_rollback(options: argparse.Namespace) -> None:
    """Go back to an earlier version."""
    from dualprompt.model import versions
    from dualprompt.model.saved import DAMAGED

    before = None
    with contextlib.suppress(DamagedError):  # that is what earlier versions are for
        before = versions.listed(options.model)[-1].number
    made = versions.rollback(options.model, options.number, device=options.device)
    found = [made]
    with contextlib.suppress(DamagedError):  # another copy is damaged too
        found = [*versions.listed(options.model)]
    value = {"version": made.to_dict(), "versions": [version.to_dict() for version in found]}
    same = f"that version is the same as the model, version {made.number}; nothing was changed"
    said = same if made.number == before else f"{made.why}, which is now version {made.number}"
    if before is None and (options.model / DAMAGED).exists():
        said += (
            f"; what could not be read is kept as {options.model / DAMAGED}, to be mended or deleted; "
            "until then no tensors are removed"
        )
    emit(options, value, known_versions(found), said)


def do_push(options: argparse.Namespace) -> None:
    """Upload a model."""
    learner = open_learner(options)
    address = learner.push(options.repo, private=not options.public, message=options.message)
    emit(
        options, {"model": str(options.model), "repo": options.repo, "url": address}, f"{options.model} is at {address}"
    )


def do_pull(options: argparse.Namespace) -> None:
    """Download a model."""
    from dualprompt.learner import ContinualLearner
    from dualprompt.model.saved import refuse_other

    refuse_other(options.model)
    pulled = ContinualLearner.pull(
        options.repo, revision=options.revision, device=options.device, backbone=options.backbone
    )
    pulled.save(options.model)
    show(options, pulled, f"{options.repo} is in {options.model}", model=str(options.model))
