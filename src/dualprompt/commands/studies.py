"""`sweep`, `study`, `report`, `publish` and `compare`: many runs, and what they say together."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualprompt.commands.common import (
    WRITTEN,
    Commands,
    Parser,
    add_choice,
    add_publish,
    add_store,
    add_track,
    emit,
    many_overrides,
    names,
    sheet_to_width,
    sizes,
    workers,
)
from dualprompt.errors import DualPromptError

SWEEP_EXAMPLES = """\
Every method is given the same number of configurations, and evaluated on images held out of its training images
(--benchmark.validation 0.2). The test images are never read. Dotted options as for `dualprompt run` go to every method.
Images and buffers are those of `dualprompt table main`; what is reduced is named in the result. While the best value of
a number is the least or the greatest of those tried, the next one by the same factor is tried too.

examples:
  dualprompt sweep mini --methods dualprompt,frozen-head
  dualprompt sweep mini --methods frozen-head --grid train.lr=1e-3,5e-3 --grid train.epochs=2,5 --budget 4
  dualprompt sweep split-cifar100 --backbone embedded --methods dualprompt --jobs 2 --json
"""

PUBLISH_EXAMPLES = """\
`--publish FILE.json` of table, study and sweep writes what is published: the configs without paths, accuracy matrices,
versions, hashes, tables and verdicts. In a page, a block is filled from such a file, named from the page's folder:

  <!-- published results/main.json table columns="method|A (%)|F (%)" -->
  <!-- /published -->
  <!-- published results/ablation.json finding -->
  <!-- /published -->

`records` makes a table of any JSON, and `text` a sentence:

  <!-- published bench.json records at=rates columns="what|batch|ours[,.0f] as images a second" -->
  <!-- /published -->
  <!-- published bench.json text "A matrix product ran at {matmul_tflops[.0f]} TFLOP/s." -->
  <!-- /published -->

examples:
  dualprompt study ablation mini --publish docs/results/ablation.json
  dualprompt publish docs/results/ablation.json
  dualprompt publish docs/results.md
  dualprompt publish --check docs/*.md
"""

REPORT_EXAMPLES = """\
The page holds all that it shows, and needs no network. Several runs stand side by side in its tables.

examples:
  dualprompt report runs/cifar
  dualprompt report runs/cifar runs/cifar-l2p --out both.html
  dualprompt report runs/study-ablation-mini
"""

COMPARE_EXAMPLES = """\
It shows where the configs differ, and the second's numbers minus the first's. A group counts by the mean over its
seeds.

examples:
  dualprompt compare runs/cifar runs/cifar-l2p
  dualprompt compare runs/cifar/seed-0 runs/cifar/seed-1 --json
"""

STUDY_EXAMPLES = """\
Searches are evaluated on images held out of the training images; only what was chosen is run on the test images, in the
end. Finished runs are reused, interrupted ones continued, failed ones tried again: give the same command once more.
On mini, studies use fewer images and settings; on the other presets they are as in the paper.

examples:
  dualprompt study positions
  dualprompt study ablation split-cifar100 --backbone embedded --seeds 3 --jobs 2
  dualprompt study layers split-cifar100 --runs /shared/runs --ray auto --ray-cpus 4
  dualprompt study lengths split-imagenet-r --json
  dualprompt study auto mini --budget 20 --seeds 2
  dualprompt study buffers mini --methods er,dualprompt,l2p --buffers 50,200
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""
    add_sweep(commands)
    about = "run one of the paper's studies, reusing finished runs"
    add_study(commands.add("study", do_study, about, STUDY_EXAMPLES, overrides=True))
    add_pages(commands)


def add_sweep(commands: Commands) -> None:
    """Add `sweep`."""
    sweep = commands.add(
        "sweep", do_sweep, "choose the hyper-parameters of methods on validation images", SWEEP_EXAMPLES, overrides=True
    )
    sweep.add_argument("preset", help="a preset (`dualprompt list presets`) or a YAML file")
    sweep.add_argument("--methods", required=True, help="with commas")
    sweep.add_argument(
        "--grid", action="append", default=[], help="OPTION=VALUE,VALUE,…; may be repeated (default: each method's own)"
    )
    sweep.add_argument("--budget", type=int, help="configurations a method, the first of its grid (default: 4 or all)")
    sweep.add_argument(
        "--extend",
        type=int,
        default=3,
        help="tries beyond its grid that a method has at most, while its best is at an edge (default: %(default)s)",
    )
    sweep.add_argument("--buffer", type=int, help="images that rehearsal methods keep (default: the recipe's)")
    sweep.add_argument("--seed", type=int, help="the one seed (default: 0)")
    add_choice(sweep)
    written = sweep.add_argument_group(WRITTEN)
    written.add_argument(
        "--out", type=Path, help="folder for sweep.md and sweep.json (default: RUNS/sweep-PRESET, or beside it)"
    )
    add_publish(written)
    add_track(written)
    add_store(sweep)


def add_pages(commands: Commands) -> None:
    """Add what shows finished work: `report`, `publish` and `compare`."""
    about = "write one HTML page about runs and studies, with figures as SVG and CSV"
    report = commands.add("report", do_report, about, REPORT_EXAMPLES)
    report.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="directory of a run, of several, or of a study"
    )
    report.add_argument("--out", type=Path, help="the HTML file (default: report.html in the first directory)")

    publish = commands.add(
        "publish",
        do_publish,
        "render published JSON as Markdown, and fill the marked blocks of pages",
        PUBLISH_EXAMPLES,
    )
    publish.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="published .json, or a Markdown page")
    publish.add_argument("--check", action="store_true", help="change nothing; fail if a page says other than its JSON")

    compare = commands.add("compare", do_compare, "show two runs side by side", COMPARE_EXAMPLES)
    compare.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="the folder of a run or a group of runs")


def add_study(command: Parser) -> None:
    """Add the options of a study."""
    from dualprompt.studies import STUDIES

    command.add_argument("study", metavar="NAME", help=", ".join(STUDIES))
    command.add_argument("preset", nargs="?", default="mini", help="a preset or a YAML file (default: %(default)s)")
    command.add_argument("--seeds", type=int, help="how many seeds (default: 1 for searches, 3 for comparisons)")
    command.add_argument("--seed", type=int, help="first seed (default: 0)")
    command.add_argument("--budget", type=int, help="settings that each sweep of a search may try; auto: runs in all")
    command.add_argument("--buffers", help="buffer sizes of study buffers, with commas")
    command.add_argument("--methods", help="methods of study buffers, with commas")
    add_choice(command)
    written = command.add_argument_group(WRITTEN)
    written.add_argument(
        "--out", type=Path, help="folder for table and figures (default: RUNS/study-NAME-PRESET, or beside it)"
    )
    add_publish(written)
    add_track(written)
    add_store(command)


def do_sweep(options: argparse.Namespace) -> None:
    """Choose the hyper-parameters of methods."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root, write_json, write_text
    from dualprompt.report import publication
    from dualprompt.report.sheet import as_markdown
    from dualprompt.sweeps import folders, store, sweep
    from dualprompt.sweeps.obtained import complain

    publication.check_target(options.publish)
    grid = dict(read_axis(text) for text in options.grid)
    overrides = many_overrides(options) | ({} if options.seed is None else {"seed": options.seed})
    methods = names(options.methods)
    search = sweep.Sweep(
        options.preset, options.recipe, methods, grid, options.budget, overrides, options.buffer, options.extend
    )
    root = options.runs or runs_root()
    base = options.out or root / f"sweep-{Path(options.preset).stem}"
    folders.place(base, "sweep.json", search.question(), options.out is not None)  # refuses before anything is run
    with Terminal() as terminal, workers(options) as jobs:
        tries = search.run(root, terminal, jobs, store.Fresh() if options.fresh else None)
    folder = folders.place(base, "sweep.json", search.question(), options.out is not None)
    sheet = search.sheet(tries)
    where, lines = sweep.preset_lines(options.preset, options.recipe, sweep.winners(tries))
    value = search.combined(tries)
    write_text(folder / "sweep.md", f"{as_markdown(sheet)}\nTo put {where}:\n\n```yaml\n{lines}\n```\n")
    write_json(folder / "sweep.json", value)
    message = f"also in {folder / 'sweep.md'} and sweep.json; the winners, to put {where}:\n{lines}"
    emit(options, value, sheet_to_width(sheet), message)
    complain([each.obtained for each in tries])
    if options.publish:
        groups = [({"label": each.method, "values": each.values, "best": each.best}, [each.obtained]) for each in tries]
        publication.publish(options.publish, "sweep", options.words, [sheet], groups)


def read_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read OPTION=VALUE,VALUE,…"""
    from dualprompt.values import read_value

    key, equals, values = text.partition("=")
    if not equals or not values:
        raise DualPromptError(f"--grid takes OPTION=VALUE,VALUE, as train.lr=1e-4,5e-5; found '{text}'")
    found = read_value(values)
    return key.strip(), tuple(found) if isinstance(found, list) else (found,)


def do_study(options: argparse.Namespace) -> None:
    """Carry out a study, and print its tables and its finding."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root
    from dualprompt.report import publication
    from dualprompt.studies import results, study
    from dualprompt.sweeps import folders, store
    from dualprompt.sweeps.obtained import complain

    publication.check_target(options.publish)
    chosen = study.load(options.study)
    if options.budget is not None and not chosen.searches:
        raise DualPromptError(f"study {chosen.name} searches nothing; leave --budget out")
    if chosen.name != "buffers" and (options.buffers or options.methods):
        raise DualPromptError(f"--buffers and --methods are for study buffers, not {chosen.name}")
    root = options.runs or runs_root()
    mini = options.preset == "mini"
    fresh = store.Fresh() if options.fresh else None
    with Terminal() as terminal, workers(options) as jobs:
        context = study.Context(
            options.preset,
            options.recipe,
            many_overrides(options) | ({} if options.seed is None else {"seed": options.seed}),
            chosen.seeds if options.seeds is None else options.seeds,
            chosen.mini_budget if mini and options.budget is None else options.budget,
            options.out or root / f"study-{chosen.name}-{Path(options.preset).stem}",
            lambda configs: store.obtain(configs, root, terminal, jobs, fresh),
            terminal,
            tuple(sizes(options.buffers)),
            tuple(names(options.methods)),
            options.jobs,
            options.fresh,
        )
        asked = results.question(chosen, context)
        context = replace(context, folder=folders.place(context.folder, results.FILE, asked, options.out is not None))
        outcome = chosen.run(context)
        value = results.publish(chosen, context, outcome)
    where = f"also in {context.folder}; a page of it: dualprompt report {shlex.quote(str(context.folder))}"
    emit(options, value, *(sheet_to_width(sheet) for sheet in outcome.sheets), outcome.finding, where)
    complain([each for row in outcome.rows for each in row.obtained])
    if options.publish:
        groups = [
            ({"label": row.setting.label, "part": row.part, "options": row.setting.options}, row.obtained)
            for row in outcome.rows
        ]
        found = (outcome.finding, outcome.verdicts)
        publication.publish(options.publish, f"study {chosen.name}", options.words, outcome.sheets, groups, *found)


def do_report(options: argparse.Namespace) -> None:
    """Write a page about runs and studies."""
    from dualprompt.console import Terminal
    from dualprompt.report.build import report

    with Terminal() as terminal:
        path = report(options.paths, options.out, terminal)
    emit(options, {"report": str(path)}, str(path))


def do_publish(options: argparse.Namespace) -> None:
    """Render published JSON, and fill the marked blocks of pages from it."""
    from dualprompt.report import blocks, publication

    files, stale = [], []
    for path in options.paths:
        if path.suffix == ".json":
            value = publication.read(path)
            wrong = publication.contradictions(value)
            if wrong:
                raise DualPromptError(f"{path} contradicts itself: {'; '.join(wrong)}; publish it again")
            files.append({"path": str(path), "markdown": publication.markdown(value)})
        else:
            count, changed = blocks.fill(path, options.check)
            files.append({"path": str(path), "blocks": count, "changed": changed})
            stale += [str(path)] if changed else []
    lines = [
        each["markdown"].rstrip("\n") if "markdown" in each
        else f"{each['path']}: {each['blocks']} blocks, {'changed' if each['changed'] else 'unchanged'}"
        for each in files
    ]  # fmt: skip
    emit(options, {"files": files}, *lines)
    if options.check and stale:
        raise DualPromptError(f"not what the published JSON says: {', '.join(stale)}; run `dualprompt publish` on them")


def do_compare(options: argparse.Namespace) -> None:
    """Show two runs side by side."""
    from dualprompt.report import compare
    from dualprompt.report.run_files import finished_runs

    value = compare.compare(*(finished_runs(folder) for folder in options.runs))
    emit(options, value, *(sheet_to_width(sheet) for sheet in compare.sheets(value)))
