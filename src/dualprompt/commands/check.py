"""`check`: a look at a folder of images before it is learned."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.common import DEVICE, Commands, emit
from dualprompt.errors import DualPromptError
from dualprompt.progress import counted

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.lessons.check import Findings

CHECK = """\
It names files that are no images, and images that cannot be read; copies and near copies, within a class and across
classes; blurred images; classes with few images; and a folder that is one level too high. Nothing is changed.
With --doubts each image is also classified by a model of all the others, from the features of a frozen backbone; those
that look like another class are named. This takes about as long as learning.

examples:
  dualprompt check photos/january
  dualprompt check photos/january --doubts
  dualprompt check photos/january --json > findings.json
"""
SHOWN = 50  # files that are named, of each kind; --json names all


def add(commands: Commands) -> None:
    """Add this subcommand."""
    check = commands.add(
        "check", do_check, "check a folder before it is learned: bad files, copies, blur, doubtful labels", CHECK
    )
    check.add_argument("folder", type=Path, help="holds one folder of images for each class")
    check.add_argument("--doubts", action="store_true", help="also name images that may have the wrong label")
    check.add_argument("--backbone", default="embedded", help="whose features --doubts uses (default: %(default)s)")
    check.add_argument("--device", default="auto", help=DEVICE)


def do_check(options: argparse.Namespace) -> None:
    """Look at a folder."""
    from dualprompt.console import Terminal
    from dualprompt.learner import ContinualLearner
    from dualprompt.lessons.check import check

    learner = ContinualLearner(options.backbone, "simple-cil", device=options.device) if options.doubts else None
    with Terminal() as terminal:
        found = check(options.folder, learner, terminal)
    images, classes = counted(sum(found.classes.values()), "image"), counted(len(found.classes), "class", "classes")
    lines = [f"{images} of {classes}", *(found.summary(SHOWN) or ["nothing stands out"])]
    emit(options, found.to_dict(), classes_table(found), *lines, *said(found))


def classes_table(found: Findings) -> Table:
    """Return how many images there are of each class; of many classes, the smallest and the largest."""
    from rich.table import Table
    from rich.text import Text

    counts = sorted(found.classes.items(), key=lambda item: item[1])
    table = Table("class", "images")
    shown = counts if len(counts) <= SHOWN else [*counts[:10], ("…", None), *counts[-10:]]
    for name, images in shown:
        table.add_row(Text(name), "" if images is None else str(images))
    return table


def said(found: Findings) -> list[str]:
    """Return what was done about doubts."""
    if found.agreement is None:
        return ["labels were not checked; --doubts asks the other images about each, about as long as learning takes"]
    return [f"the other images agree with {found.agreement:.1f} % of the labels"]


def asked_nested(options: argparse.Namespace) -> bool:
    """Return whether folders that hold folders only are meant as classes; where someone can answer, they are asked."""
    if options.nested or not (sys.stdin.isatty() and sys.stderr.isatty()) or not options.folder.is_dir():
        return options.nested
    from dualprompt.data.folder import refuse_level

    try:
        refuse_level(options.folder)
    except DualPromptError as error:
        sys.stderr.write(f"{error}\nAre they the classes? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    return False
