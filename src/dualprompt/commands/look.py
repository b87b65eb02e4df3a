"""`list`, `bench` and `data`: what there is, and how fast this machine is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.common import DEVICE, PRECISION, Commands, emit, sizes
from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.listing import Entry

LIST = """\
Of runs: when they began, what was run, how much of it is finished, and the average accuracy after the last task, the
mean over seeds.

examples:
  dualprompt list methods
  dualprompt list presets
  dualprompt list runs
  dualprompt list runs /shared/runs --json
"""

BENCH = """\
The plain implementation ("twin") is the same training step, without this package's optimisations.

examples:
  dualprompt bench --quick
  dualprompt bench --batch 32,128 --device cuda --end-to-end mini
"""

DATA = """\
`get` downloads a dataset, checks it, and goes on where it was stopped. `show` counts its images by class; with --out it
also draws some of each class. Nothing is written otherwise.

examples:
  dualprompt data get cifar100
  dualprompt data show mini
  dualprompt data show photos/january --out january.png
  dualprompt data show si-blurry-mini --stream --out stream.svg
"""
OUT = "for show: draw some images of each class; of several datasets FILE-NAME.png each; with --stream also .svg"


def add(commands: Commands) -> None:
    """Add these subcommands."""
    listing = commands.add("list", do_list, "list methods, benchmarks, backbones, presets, protocols or runs", LIST)
    listing.add_argument("what", choices=("methods", "benchmarks", "backbones", "presets", "protocols", "runs"))
    listing.add_argument(
        "folder", nargs="?", type=Path, help="of runs: where they lie (default: $DUALPROMPT_RUNS or runs)"
    )

    about = "measure speed, beside a plain implementation and the machine's limit"
    bench = commands.add("bench", do_bench, about, BENCH)
    bench.add_argument("--backbone", default="embedded", help="as for run")
    bench.add_argument("--input-size", type=int, help="pixels a side (default: the checkpoint's)")
    bench.add_argument("--batch", help="images a step, or several numbers a,b (default: 32; on a GPU 128,24)")
    bench.add_argument("--device", default="auto", help=DEVICE)
    bench.add_argument("--precision", default="auto", help=PRECISION)
    bench.add_argument("--compile", default="auto", help="auto, on or off (default: on for a GPU)")
    bench.add_argument("--end-to-end", metavar="PRESET", help="also time a whole run of a benchmark, twice")
    bench.add_argument("--quick", action="store_true", help="shorter rounds: less exact, under a minute on 2 cores")

    data = commands.add("data", do_data, "download a dataset, or look at a dataset or stream", DATA, overrides=True)
    data.add_argument("action", choices=("get", "show"), help="download it, or look at it")
    data.add_argument(
        "datasets",
        nargs="+",
        metavar="NAME",
        help="dataset, group of datasets, or (for show) a folder; or several; with --stream a preset",
    )
    data.add_argument("--stream", action="store_true", help="show which classes of a preset's stream come when")
    data.add_argument("--seed", type=int, help="of --stream: the run's seed (default: 0)")
    data.add_argument("--root", type=Path, help="folder that holds the datasets (default: $DUALPROMPT_DATA)")
    data.add_argument("--out", type=Path, metavar="FILE.png", help=OUT)


def do_list(options: argparse.Namespace) -> None:
    """List methods, benchmarks, backbones, presets, protocols or runs."""
    from rich.table import Table
    from rich.text import Text

    from dualprompt.files import runs_root
    from dualprompt.listing import LISTS, runs

    if options.what == "runs":
        found = runs(options.folder or runs_root())
        emit(options, found, runs_table(found))
        return
    if options.folder is not None:
        raise DualPromptError(f"`list {options.what}` takes no folder; only `list runs` does")
    if options.what == "protocols":
        from dualprompt.sweeps.protocols import listed

        rows = listed()
    else:
        rows = LISTS[options.what]()
    columns = [key for key in rows[0] if key != "notes"]  # which stand below the table, for they are long
    table = Table(title=options.what)
    for key in columns:
        table.add_column(key.replace("_", " "), overflow="fold")  # a name that is cut cannot be copied
    for row in rows:
        table.add_row(*(Text(cell(row[key])) for key in columns))
    emit(options, rows, table, *(f"{row['name']}: {row['notes']}" for row in rows if row.get("notes")))


def cell(value: object) -> str:
    """Return a value of a list for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def runs_table(found: Sequence[Entry]) -> Table:
    """Return what was run, when, and what it came to."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="runs")
    for heading in ("date", "name", "benchmark", "A (%), mean over seeds", "seeds", "finished"):
        table.add_column(heading, overflow="fold")
    for entry in found:
        means = entry["average_accuracy"]
        lines = [f"{name} {means[name]:.2f}" if name in means else f"{name} –" for name in entry["methods"]]
        came_to = entry["error"] or ", ".join(lines) or entry["kind"]
        counts = (f"{entry['seeds']}", f"{entry['finished']} of {entry['runs']}") if entry["runs"] else ("–", "–")
        date = entry["date"][:16].replace("T", " ")
        table.add_row(*map(Text, (date, entry["name"], entry["benchmark"], came_to, *counts)))
    return table


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
    if options.stream and options.action == "show":
        show_streams(options)
        return
    if options.stream or options.seed is not None or options.overrides:
        raise DualPromptError("--stream, --seed and dotted options go with `data show PRESET --stream`")
    if options.out is not None and (options.action == "get" or options.out.suffix.lower() != ".png"):
        raise DualPromptError("--out names a PNG file for `data show` to draw, as photos.png")
    if options.action == "get":
        with Terminal() as terminal:
            paths = [path for name in options.datasets for path in download.get(name, root, terminal)]
        emit(options, {"files": [str(path) for path in paths]}, *(str(path) for path in paths))
        return
    names = [member for name in options.datasets for member in GROUPS.get(name, (name,))]
    summaries, notices = [], []
    for name in names:
        dataset = load_dataset(name, root)
        said = gallery.summary(dataset) | {"gallery": None}
        if options.out is not None:
            alone = options.out.with_name(f"{options.out.stem}-{dataset.name}{options.out.suffix}")
            picture = options.out if len(names) == 1 else alone  # one for each
            said["gallery"] = str(gallery.gallery(dataset, picture))
        if is_registered(name):
            said |= {"licence": DATASETS[name].licence, "notice": DATASETS[name].notice()}
            notices += [said["notice"]] if said["notice"] else []
        summaries.append(said)
    shown = (gallery.table(said) for said in summaries)
    drawn = (f"picture: {said['gallery']}" for said in summaries if said["gallery"])
    emit(options, summaries[0] if len(summaries) == 1 else summaries, *shown, *notices, *drawn)


def show_streams(options: argparse.Namespace) -> None:
    """Show the streams of presets, and draw which classes come when."""
    from dualprompt.config import compose
    from dualprompt.report.streams import describe_stream

    given = {"seed": options.seed, "benchmark.root": None if options.root is None else str(options.root)}
    overrides = options.overrides | {key: value for key, value in given.items() if value is not None}
    if options.out is not None and options.out.suffix not in (".png", ".svg"):
        raise DualPromptError(f"--out: a picture of a stream is a .png or .svg, found '{options.out}'")
    said, tables = [], []
    for name in options.datasets:
        path: Path | None = options.out
        if path is not None and len(options.datasets) > 1:
            path = path.with_name(f"{path.stem}-{Path(name).stem}{path.suffix}")
        found, table = describe_stream(compose(name, None, overrides), path)
        said.append({"preset": name} | found)
        tables.append(table)
    emit(options, said[0] if len(said) == 1 else said, *tables)
