"""`table`: the paper's two tables and those of other papers, from runs that are there or are carried out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualprompt.commands.common import (
    WRITTEN,
    Commands,
    add_choice,
    add_columns,
    add_publish,
    add_store,
    add_track,
    chosen_columns,
    emit,
    many_overrides,
    names,
    sheet_to_width,
    sizes,
    workers,
)
from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from dualprompt.report.sheet import Sheet
    from dualprompt.sweeps.main_table import Line, Seeds, TableRow
    from dualprompt.sweeps.obtained import Obtained

TABLE_EXAMPLES = """\
Finished runs are reused, interrupted ones continued, failed ones tried again: give the same command once more.
Dotted options as for `dualprompt run` go to every method.

examples:
  dualprompt table main --benchmark mini --methods dualprompt,frozen-head --seeds 3
  dualprompt table main --backbone embedded --seeds 3 --buffers 1000,5000 --jobs 2
  dualprompt table main --benchmark 5-datasets --methods dualprompt,dualprompt:keys=mean --out table.tex
  dualprompt table main --benchmark mini --seeds 5 --seeds-finetune 1 --against frozen-head --publish mini.json
  dualprompt table architecture --recipe short --seeds 2 --backbone embedded
  dualprompt table architecture --methods dynaer,upper-bound --seeds 1 --resnet152 ./resnet152.safetensors
  dualprompt table architecture --recipe short --backbone none              without the lines on the ViT
  dualprompt table protocol ranpac                          reported beside ours, where weights and data are here
  dualprompt table protocol ranpac/cifar100 --backbone embedded
"""


def add(commands: Commands) -> None:
    """Add `table`."""
    table = commands.add(
        "table",
        do_table,
        "run and print one of the paper's tables, or another paper's, reusing finished runs",
        TABLE_EXAMPLES,
        overrides=True,
    )
    table.add_argument(
        "which",
        choices=("main", "architecture", "protocol"),
        help="main: Table 1, and the same for any other benchmark; architecture: Table 2, on ResNets beside the ViT; "
        "protocol: the set-ups of another paper",
    )
    table.add_argument(
        "name", nargs="?", help="of a protocol (`dualprompt list protocols`), or PROTOCOL/SETUP for one of its set-ups"
    )
    table.add_argument("--benchmark", default="split-cifar100", help="a preset or a YAML file (default: %(default)s)")
    table.add_argument(
        "--methods",
        help="with commas; NAME:OPTION=VALUE or NAME:train.OPTION=VALUE sets an option (default: all)",
    )
    table.add_argument("--seeds", type=int, help="how many seeds, counted up from 0 (default: 5, or a protocol's own)")
    table.add_argument(
        "--seeds-finetune", type=int, metavar="N", help="seeds of methods that train the backbone (default: as --seeds)"
    )
    table.add_argument(
        "--against",
        metavar="METHOD",
        help="the line that others are held against, seed by seed; METHOD@BUFFER, or none (default: dualprompt)",
    )
    table.add_argument("--buffers", help="buffer sizes of rehearsal methods, with commas (default: the paper's)")
    table.add_argument("--resnet", metavar="NAME", help="the ResNet-18 of table architecture (default: resnet18-cifar)")
    table.add_argument(
        "--resnet152", metavar="FILE", help="ImageNet weights of a ResNet-152, for its lines of table architecture"
    )
    add_choice(table)
    written = table.add_argument_group(WRITTEN)
    written.add_argument(
        "--format", choices=("text", "markdown", "latex", "csv"), help="default: by --out's name, or text"
    )
    written.add_argument("--out", type=Path, help="also write the table to this file")
    add_columns(written)
    add_publish(written)
    add_track(written)
    kept = add_store(table)
    kept.add_argument(
        "--stored", action="store_true", help="run nothing: show the seeds of each line that are finished already"
    )
    kept.add_argument(
        "--any-code", action="store_true", help="with --stored: show also what other code than this version's has made"
    )


def do_table(options: argparse.Namespace) -> None:
    """Print one of the paper's tables, running what it lacks."""
    from dualprompt.report import publication

    publication.check_target(options.publish)
    if options.any_code and not options.stored:
        raise DualPromptError("--any-code goes with --stored: only the code at hand runs anything")
    if options.fresh and options.stored:
        raise DualPromptError("--stored runs nothing and --fresh runs everything; leave one of them out")
    if (options.name is not None) != (options.which == "protocol"):
        raise DualPromptError(
            "`table protocol` takes the name of a protocol, other tables none: dualprompt list protocols"
        )
    {"main": do_main, "architecture": do_architecture, "protocol": do_protocol}[options.which](options)


def do_main(options: argparse.Namespace) -> None:
    """Print Table 1."""
    from dualprompt.sweeps import main_table

    if options.resnet or options.resnet152:
        raise DualPromptError("--resnet and --resnet152 are for table architecture; give a backbone with --backbone")
    methods, columns = names(options.methods) or main_table.default_methods(), chosen_columns(options)
    overrides = many_overrides(options)
    lines = main_table.lines(options.benchmark, options.recipe, methods, sizes(options.buffers), overrides)
    against = main_table.reference(lines, options.against)
    rows = carried_out(options, lines, main_table.Seeds(seeds_of(options), options.seeds_finetune))
    reference = next((row for row in rows if row.line is against), None)
    if reference is None and options.against not in (None, "none"):
        raise DualPromptError(f"--against: no run of '{options.against}' is finished; leave --stored out to run it")
    values = [row.values(reference) for row in rows]
    table = main_table.chosen_sheet(rows, columns) if columns else main_table.sheet(rows, reference)
    show(options, table, values, main_table.combined(rows, reference), groups_of(rows))


def do_architecture(options: argparse.Namespace) -> None:
    """Print Table 2."""
    from dualprompt.sweeps import architecture, main_table

    if options.buffers or options.against or options.columns:
        raise DualPromptError("--buffers, --against and --columns are for table main, not for this one")
    methods = names(options.methods) or architecture.default_methods()
    backbones = architecture.Backbones(options.resnet or architecture.CIFAR, options.resnet152)
    recipe = options.recipe or "original"
    entries = architecture.entries(options.benchmark, recipe, methods, backbones, many_overrides(options))
    lines = [entry.line for entry in entries if entry.line is not None]
    if not lines:
        raise DualPromptError(
            "no line of the table can be run: give other --methods, a ViT as --backbone, or weights as --resnet152 FILE"
        )
    rows = carried_out(options, lines, main_table.Seeds(seeds_of(options), options.seeds_finetune))
    table = architecture.rows(entries, rows)
    values = [row.values() for row in table]
    further = [each for each in (architecture.steps(table),) if each is not None]
    show(options, architecture.sheet(table), values, architecture.combined(table), groups_of(rows), further)


def do_protocol(options: argparse.Namespace) -> None:
    """Print the table of another paper's set-ups."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root
    from dualprompt.sweeps import protocol_table, store

    given = {
        f"--{name.replace('_', '-')}": getattr(options, name) for name in ("recipe", "buffers", "against", "columns")
    }
    given |= {"--resnet": options.resnet, "--resnet152": options.resnet152, "--seeds-finetune": options.seeds_finetune}
    if strange := next((flag for flag, value in given.items() if value is not None), None):
        raise DualPromptError(f"{strange} does not go with table protocol, which says it itself")
    overrides = {key: value for key, value in many_overrides(options).items() if key != "backbone.name"}
    asked = protocol_table.Asked(names(options.methods), options.backbone, options.seeds, overrides)
    places = protocol_table.places(options.name, asked)
    fresh, root = store.Fresh() if options.fresh else None, options.runs or runs_root()
    with Terminal() as terminal, workers(options) as jobs:
        rows = protocol_table.rows(places, root, terminal, jobs, options.stored, options.any_code, fresh)
    groups = [({"label": row.place.label}, row.obtained) for row in rows if row.obtained]
    show(options, protocol_table.sheet(rows), [row.values() for row in rows], protocol_table.combined(rows), groups)


def seeds_of(options: argparse.Namespace) -> int:
    """Return how many seeds the lines of the paper's own tables get."""
    return 5 if options.seeds is None else options.seeds


def carried_out(options: argparse.Namespace, lines: Sequence[Line], seeds: Seeds) -> list[TableRow]:
    """Return the runs of every line, having run what is not there; progress says how long the whole table will take."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root
    from dualprompt.sweeps import main_table, store

    fresh, root = store.Fresh() if options.fresh else None, options.runs or runs_root()
    with Terminal() as terminal, workers(options) as jobs:
        return main_table.rows(
            options.benchmark, lines, seeds, root, terminal, jobs, options.stored, options.any_code, fresh
        )


def groups_of(rows: Sequence[TableRow]) -> list[tuple[dict[str, Any], Sequence[Obtained]]]:
    """Return what a publication calls each line, and its runs."""
    return [({"label": row.line.label, "buffer": row.line.buffer}, row.obtained) for row in rows]


def show(
    options: argparse.Namespace,
    sheet: Sheet,
    values: list[dict[str, Any]],
    combined: dict[str, Any],
    groups: Sequence[tuple[dict[str, Any], Sequence[Obtained]]],
    further: Sequence[Sheet] = (),
) -> None:
    """Print a table in the form that is asked for, write it where it is asked for, and publish it.

    Args:
        options: of the command.
        sheet: the table.
        values: what CSV says of each line.
        combined: what JSON says.
        groups: what each line that has runs is called, and these.
        further: tables that belong below it; CSV has none of them.
    """
    from dualprompt.files import write_text
    from dualprompt.pictures.drawing import as_csv
    from dualprompt.report import publication
    from dualprompt.report.sheet import as_latex, as_markdown, as_rich
    from dualprompt.report.tables import text
    from dualprompt.sweeps.obtained import complain

    suffix = options.out.suffix if options.out else ""
    form = options.format or {".md": "markdown", ".tex": "latex", ".csv": "csv"}.get(suffix, "text")
    sheets = [sheet, *further]
    forms: dict[str, Callable[[], str]] = {
        "text": lambda: text(*map(as_rich, sheets)),
        "markdown": lambda: "\n".join(map(as_markdown, sheets)),
        "latex": lambda: "\n".join(map(as_latex, sheets)),
        "csv": lambda: as_csv(values),
    }
    written = forms[form]()
    if options.out:
        write_text(options.out, written)
    shown = map(sheet_to_width, sheets) if form == "text" else (written.rstrip("\n"),)
    emit(options, combined, *shown)
    complain([each for _, obtained in groups for each in obtained])
    if options.publish:
        publication.publish(options.publish, "table", options.words, sheets, groups)
