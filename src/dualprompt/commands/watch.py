"""`watch`: label the pictures that come into a folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.common import DEVICE, Commands, emit
from dualprompt.errors import DualPromptError
from dualprompt.progress import counted

if TYPE_CHECKING:
    from dualprompt.watch import Watched

ANSWERS = Path("answers.csv")
WATCH = """\
Each picture is labelled once, when it has not changed for 2 seconds. Rows are added to a CSV file, answers.csv in the
current folder unless --to names another. With --sort, copies go into folders named like the labels, beside a
labels.csv. Originals are never moved or changed. The state is kept beside the CSV file (.NAME.watch), so that the watch
continues after a stop or a kill. Pictures that cannot be read get one row, with the reason. An answer is unsure if it
is none of these, or below 50 %; their share is kept for each day. A name that a spreadsheet would take for a formula
(=, +, -, @) gets an apostrophe before it, and a path gets ./.

examples:
  dualprompt watch my-model inbox
  dualprompt watch my-model inbox --to answers.csv --every 30
  dualprompt watch my-model inbox --sort sorted --link
  dualprompt watch my-model inbox --once --json
"""


def add(commands: Commands) -> None:
    """Add this subcommand."""
    watch = commands.add("watch", do_watch, "label pictures as they arrive in a folder", WATCH)
    watch.add_argument("model", type=Path, help="the model's folder")
    watch.add_argument("folder", type=Path, help="that pictures come into")
    place = watch.add_mutually_exclusive_group()
    place.add_argument("--to", type=Path, default=ANSWERS, help="CSV file (default: %(default)s)")
    place.add_argument("--sort", type=Path, metavar="FOLDER", help="also copy each picture into a folder of its label")
    watch.add_argument("--link", action="store_true", help="with --sort: hard links instead of copies")
    watch.add_argument("--once", action="store_true", help="label what is there, then end")
    watch.add_argument("--every", type=float, default=5.0, help="seconds between looks (default: %(default)s)")
    watch.add_argument("--device", default="auto", help=DEVICE)


def do_watch(options: argparse.Namespace) -> None:
    """Label new pictures until someone stops it."""
    from dualprompt.model import saved
    from dualprompt.watch import SETTLED, Watch, Watched

    if not 0 < options.every <= 86_400:
        raise DualPromptError(f"--every takes seconds above 0 and at most 86400, found {options.every}")
    if options.link and options.sort is None:
        raise DualPromptError("--link goes with --sort")
    saved.record(options.model)  # it says what is wrong
    table = options.to if options.sort is None else options.sort / "labels.csv"
    if table.is_symlink() and (options.sort is not None or table == ANSWERS):  # which we named, and nobody else
        raise DualPromptError(f"{table} is a link, which we never make; look what it is, and remove it")
    found = Watched()
    with Watch(options.model, options.folder, table, options.sort, options.link).opened(options.device) as watch:
        found = watch.look()
        if options.once:
            if found.waiting:  # what has just come may be complete already
                time.sleep(SETTLED)
                found = watch.look(found)
        else:
            tell(Watched(), found)
        while not options.once:
            time.sleep(options.every)
            before, found = found, watch.look(found)
            tell(before, found)
    emit(options, found.to_dict() | {"table": str(table)}, *words(found, table))


def tell(before: Watched, found: Watched) -> None:
    """Say on stderr what a look has found, if anything."""
    new, bad = found.labelled - before.labelled, found.unreadable - before.unreadable
    if new or bad:
        unsure = f", {found.unsure - before.unsure} unsure" if new else ""
        unreadable = f", {bad} cannot be read" if bad else ""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {counted(new, 'picture')} labelled{unsure}{unreadable}\n")
        sys.stderr.flush()


def words(found: Watched, table: Path) -> list[str]:
    """Return what was done, and the share of unsure answers of the last days."""
    lines = [f"{counted(found.labelled, 'picture')} labelled, {found.unsure} unsure → {table}"]
    if found.unreadable:
        lines.append(f"{found.unreadable} cannot be read; {table} says why")
    if found.waiting:
        lines.append(f"{counted(found.waiting, 'picture')} still being written; look again later")
    for day, own in sorted(found.days.items())[-7:]:
        if own["images"]:
            lines.append(f"{day}: {own['unsure']} of {own['images']} unsure ({own['unsure'] / own['images']:.0%})")
    return lines
