"""The sections of a report: of finished runs, and of a study."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from dualprompt.data.stream import drawn_by_run, outline
from dualprompt.errors import DualPromptError
from dualprompt.files import is_file
from dualprompt.progress import SILENT, Progress
from dualprompt.report import figures, gallery, more, study_files
from dualprompt.report.page import Code, Drawn, Item, Photo, Section, Shown, Text
from dualprompt.report.prompt_map import collect, plane
from dualprompt.report.run_files import task_keys
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import ABSENT, Result, by_method, headline_sheet, label
from dualprompt.run.folder import Run

MOST_STREAMS = 3  # pictures of streams on a page: those of several seeds look alike
Labelled = list[tuple[Run, Result]]  # runs and their results, whose labels tell settings apart


def of_runs(labelled: Labelled, progress: Progress = SILENT) -> list[Section]:
    """Return what there is to say of finished runs."""
    results = [result for _, result in labelled]
    evaluated = [*results, *(again for run, result in labelled for again in _evaluated_again(run, result))]
    sections = [
        Section("results", "Results", [Shown(headline_sheet(evaluated)), Text(_explained())]),
        Section("anytime", "As images come", _anytime(results)),
        Section("stream", "The stream", _streams([run for run, _ in labelled])),
        Section("curves", "Over the tasks", _curves(results)),
        Section("accuracy", "Accuracy matrices", _matrices(results)),
        Section("pictures", "Test pictures", gallery.items(labelled, progress)),
        Section("matching", "Which E-Prompt is selected", _matching(labelled)),
        Section("keys", "Task keys", _keys(labelled)),
        Section("prompts", "Prompts", _prompts(labelled)),
        *more.sections(results),
        Section("size", "Parameters and bytes", [Shown(_parameters(results))]),
        Section("time", "Time", [Shown(_times(labelled))]),
        Section("config", "Configuration and environment", _environment([run for run, _ in labelled])),
    ]
    return [section for section in sections if section.items]


def _explained() -> str:
    """Say what the columns of the first table are; its own remarks say what ± is."""
    return (
        "A is the accuracy after the last task, the mean over all tasks; images are classified among all classes. F is "
        "forgetting: how far the accuracy on a task fell from its best, the mean over all tasks but the last."
    )


def _evaluated_again(run: Run, result: Result) -> list[Result]:
    """Return what `dualprompt eval` found with other selections."""
    found = [run.read_result(path) for path in sorted(run.folder.glob("eval-*.json"))]
    other = [again for again in found if again["selection"] != result["selection"]]
    return [again | {"label": f"{label(result)} ({again['selection']})"} for again in other]


def _curves(results: Sequence[Result]) -> list[Item]:
    if max(len(result["tasks"]) for result in results) < 2:
        return []
    accuracy, forgetting = figures.curves(results)
    return [Drawn("curve-accuracy", accuracy), Drawn("curve-forgetting", forgetting)]


def _anytime(results: Sequence[Result]) -> list[Item]:
    if not any(result.get("anytime_curve") for result in results):
        return []
    return [Drawn("anytime", figures.anytime([result for result in results if result.get("anytime_curve")]))]


def _streams(runs: Sequence[Run]) -> list[Item]:
    """Return a picture of each stream that runs learned: which classes come when."""
    items: dict[str, Item] = {}
    for run in runs:
        data = run.manifest()["identity"]["data"]
        if data in items or len(items) == MOST_STREAMS:
            continue
        config, number = run.config(), len(items) + 1
        seeded = f", seed {config.seed}" if drawn_by_run(config.benchmark) else ""
        title = f"{config.benchmark.name}{seeded}: training images of each class"
        try:
            drawn = figures.stream_map(outline(config.benchmark, config.seed), title)
            items[data] = Drawn("stream" if number == 1 else f"stream-{number}", drawn)
        except DualPromptError as error:
            items[data] = Text(f"The stream is not drawn: {error}.")
    return list(items.values())


def _matrices(results: Sequence[Result]) -> list[Item]:
    return [
        Drawn(f"accuracy-{_file(name)}", figures.accuracy_grid(group))
        for name, group in by_method(results).items()
        if len({len(result["tasks"]) for result in group}) == 1
    ]


def _matching(labelled: Labelled) -> list[Item]:
    items: list[Item] = []
    for name, group in by_method([result for _, result in labelled if result["matching_matrix"]]).items():
        items.append(Drawn(f"matching-{_file(name)}", figures.accuracy_grid(group, "matching_matrix")))
        if all(result.get("matching_confusion") for result in group):
            items.append(Drawn(f"confusion-{_file(name)}", figures.confusion_grid(group)))
        else:
            items.append(Text(f"{name}: which wrong tasks are selected was not counted when this run was made."))
    return items


def _firsts(labelled: Labelled) -> dict[str, Run]:
    """Return the first run of every label."""
    found: dict[str, Run] = {}
    for run, result in labelled:
        found.setdefault(label(result), run)
    return found


def _keys(labelled: Labelled) -> list[Item]:
    items: list[Item] = []
    for name, run in _firsts(labelled).items():
        keys = task_keys(run)
        if keys is not None and len(keys) > 1:
            grid = figures.key_grid(keys, run.result()["tasks"])
            items.append(Drawn(f"keys-{_file(name)}", replace(grid, title=f"{name}: {grid.title}")))
    return items


def _prompts(labelled: Labelled) -> list[Item]:
    items: list[Item] = []
    for name, run in _firsts(labelled).items():
        prompts = collect(run)
        if prompts is not None and prompts.e[..., 0].size + prompts.g[..., 0].size >= 10:
            points = plane(prompts)
            items.append(Drawn(f"prompts-{_file(name)}", replace(points, title=f"{name}: {points.title}")))
    return items


def _parameters(results: Sequence[Result]) -> Sheet:
    rows = []
    for name, group in by_method(results).items():
        count, buffer = group[0]["parameters"], group[0].get("buffer") or {}
        additional, formula = count["additional"], count.get("paper_formula")
        rows.append(
            (
                name,
                f"{count['trained']:,}",
                f"{count['mb']:.2f}",
                f"{additional['count']:,}",
                f"{additional['mb']:.2f}",
                f"{additional['percent_of_backbone']:.2f}",
                ABSENT if formula is None else f"{formula:,}",
                f"{buffer['images']:,}" if buffer else ABSENT,
                f"{buffer['bytes'] / 1e6:.2f}" if buffer else ABSENT,
            )
        )
    headings = (
        "trained", "MB", "besides the\nclassifier", "MB", "% of the\nbackbone", "by the paper's\nformula",
        "images kept", "MB",
    )  # fmt: skip
    backbone = results[0]["parameters"]["backbone"]
    return Sheet(
        f"what was trained beside a backbone of {backbone:,} parameters",
        (Column("method", right=False), *map(Column, headings)),
        (tuple(rows),),
        ("MB: 10⁶ bytes; a trained number has 4",),
    )


def _times(labelled: Labelled) -> Sheet:
    rows = []
    for run, result in labelled:
        tasks = [line["seconds"] for line in run.lines() if line["event"] == "task"]
        rates = [seconds["train_images_per_second"] for seconds in tasks if seconds["train_images_per_second"]]
        rows.append(
            (
                label(result),
                str(result["seed"]),
                f"{sum(seconds['train'] for seconds in tasks):,.1f}",
                f"{sum(seconds['evaluate'] for seconds in tasks):,.1f}",
                f"{sum(rates) / len(rates):,.0f}" if rates else ABSENT,
            )
        )
    headings = ("seed", "training (s)", "evaluation (s)", "images a second\nin training")
    return Sheet("time by run", (Column("method", right=False), *map(Column, headings)), (tuple(rows),))


def _environment(runs: Sequence[Run]) -> list[Item]:
    """Return where the runs lie, on what they ran, and every config that differs by more than the seed."""
    manifests = [run.manifest() for run in runs]
    first = manifests[0]
    versions = "\n".join(f"{name} {version}" for name, version in sorted(first["versions"].items()) if version)
    git = first.get("git")
    commit = f"{git['commit']} ({git['changed_files']} files changed)" if git else "not a source tree"
    facts = [
        f"dualprompt {first['dualprompt']}, commit {commit}",
        f"started {first['started']}, precision {first['precision']}",
        f"backbone {first['backbone']['name']}, sha256 {first['backbone']['sha256']}",
        f"images {first['identity']['data']}",
        versions,
        f"report made on {platform.platform()}",
    ]
    items: list[Item] = [Code("environment", "\n".join(facts))]
    seen: dict[str, list[str]] = {}
    for manifest in manifests:
        config = {key: value for key, value in manifest["config"].items() if key != "seed"}
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        seen.setdefault(text, []).append(str(manifest["seed"]))
    for text, seeds in seen.items():
        config = yaml.safe_load(text)
        name = f"config of {config['method']['name']}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
        items.append(Code(name, text))
    places = [f"{run.folder}\n  {manifest['command']}" for run, manifest in zip(runs, manifests, strict=True)]
    items.append(Code("folders and commands", "\n".join(places)))
    return items


def of_study(folder: Path, name: str) -> Section:
    """Return what there is to say of a study: its finding, tables and pictures, and the config of its runs.

    `name` is that of its anchors and files.
    """
    value = study_files.read(folder)
    items: list[Item] = [Text(value.finding, strong=True), Text(f"The paper: {value.paper}.")]
    items += [Shown(sheet) for sheet in value.tables]
    drawings = value.pictures.items()
    items += [Drawn(f"{name}-{key}" if key != name else key, picture) for key, picture in drawings]
    items += [Photo(folder / file, caption) for file, caption in value.photos.items()]
    folders = list(dict.fromkeys(run for row in value.rows for run in row.runs))
    there = [run for path in folders if is_file((run := Run(Path(path))).result_path)]
    if there:
        items += [*_environment(there[:1]), Code(f"all {len(folders)} runs", "\n".join(folders))]
    return Section(name, value.title, items)


def _file(name: str) -> str:
    return "".join(character if character.isalnum() or character in "+-" else "-" for character in name).strip("-")
