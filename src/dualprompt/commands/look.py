"""`list`, `bench` and `data`: what there is, and how fast this machine is."""

from __future__ import annotations

import argparse
from pathlib import Path

from dualprompt.commands.common import DEVICE, PRECISION, Commands, emit, sizes
from dualprompt.errors import DualPromptError


def add(commands: Commands) -> None:
    """Add these subcommands."""
    listing = commands.add("list", do_list, "list what there is")
    listing.add_argument("what", choices=("methods", "benchmarks", "backbones", "presets", "protocols", "runs"))
    listing.add_argument("folder", nargs="?", type=Path, help="of runs: where they lie (default: runs)")

    bench = commands.add("bench", do_bench, "measure speed against a straight-line twin and the machine's arithmetic")
    bench.add_argument("--backbone", default="embedded", help="as for run")
    bench.add_argument("--input-size", type=int, help="pixels a side (default: the checkpoint's)")
    bench.add_argument("--batch", help="images a step, or several numbers a,b (default: 32; on a GPU 128,24)")
    bench.add_argument("--device", default="auto", help=DEVICE)
    bench.add_argument("--precision", default="auto", help=PRECISION)
    bench.add_argument("--compile", default="auto", help="auto, on or off (default: on for a GPU)")
    bench.add_argument("--end-to-end", metavar="PRESET", help="also time a whole run of a benchmark, twice")
    bench.add_argument("--quick", action="store_true", help="shorter rounds: less exact, under a minute on 2 cores")

    data = commands.add("data", do_data, "get or look at a dataset")
    data.add_argument("action", choices=("get", "show"))
    data.add_argument("name", nargs="+", help="dataset, group of datasets, or (for show) a folder; or several")
    data.add_argument("--root", type=Path, help="folder that holds the datasets (default: $DUALPROMPT_DATA)")
    data.add_argument("--out", type=Path, help="gallery picture (default: NAME.png)")


def do_list(options: argparse.Namespace) -> None:
    """List methods, benchmarks, backbones, presets, protocols or runs."""
    from rich.table import Table

    from dualprompt.listing import LISTS, runs

    if options.folder is not None and options.what != "runs":
        raise DualPromptError(f"`list {options.what}` takes no folder; only `list runs` does")
    if options.what == "protocols":
        from dualprompt.sweeps.protocols import listed

        rows = listed()
    else:
        rows = runs(options.folder or Path("runs")) if options.what == "runs" else LISTS[options.what]()

    columns = [key for key in rows[0] if key != "notes"]  # which stand below the table, for they are long
    table = Table(*columns, title=options.what)
    for row in rows:
        cells = (row[key] for key in columns)
        table.add_row(*(", ".join(value) if isinstance(value, list) else str(value) for value in cells))
    emit(options, rows, table, *(f"{row['name']}: {row['notes']}" for row in rows if row.get("notes")))


def do_bench(options: argparse.Namespace) -> None:
    """Measure speed."""
    from dualprompt.bench import speed
    from dualprompt.config import RunConfig
    from dualprompt.config import parse as validated
    from dualprompt.console import Terminal

    values = {
        "benchmark": {"dataset": "random images"},
        "backbone": {"name": options.backbone, "input_size": options.input_size},
        "device": options.device,
        "precision": options.precision,
        "compile": options.compile,
    }
    with Terminal() as terminal:
        machine = speed.Bench(validated(RunConfig, values), speed.QUICK if options.quick else speed.FULL, terminal)
        batches = sizes(options.batch or ("128,24" if machine.device.type == "cuda" else "32"), "--batch")
        found = machine.run(batches, options.end_to_end)
    emit(options, found, *speed.tables(found))


def do_data(options: argparse.Namespace) -> None:
    """Download or show a dataset."""
    from dualprompt.console import Terminal
    from dualprompt.data import download, gallery
    from dualprompt.data.sources import DATASETS, GROUPS
    from dualprompt.data.stream import is_registered, load_dataset
    from dualprompt.files import data_root

    root = options.root or data_root()
    if options.action == "get":
        with Terminal() as terminal:
            paths = [path for name in options.name for path in download.get(name, root, terminal)]
        emit(options, {"files": [str(path) for path in paths]}, *(str(path) for path in paths))
        return
    names = [member for name in options.name for member in GROUPS.get(name, (name,))]
    summaries, notices = [], []
    for name in names:
        dataset = load_dataset(name, root)
        picture = options.out or Path(f"{dataset.name}.png")
        if options.out and len(names) > 1:  # a picture for each
            picture = options.out.with_name(f"{options.out.stem}-{dataset.name}{options.out.suffix}")
        said = gallery.summary(dataset) | {"gallery": str(gallery.gallery(dataset, picture))}
        if is_registered(name):
            said |= {"licence": DATASETS[name].licence, "notice": DATASETS[name].notice()}
            notices += [said["notice"]] if said["notice"] else []
        summaries.append(said)
    shown = (gallery.table(said) for said in summaries)
    emit(options, summaries[0] if len(summaries) == 1 else summaries, *shown, *notices)
