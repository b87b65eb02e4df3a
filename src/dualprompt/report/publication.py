"""A table, study or sweep as one JSON file to publish: every number, and what one needs to make it again.

It holds no path of the machine it was made on. Markdown is rendered from it, so that no number in the docs is typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from dualprompt import metrics
from dualprompt.config import Count, Percent, Record, RunConfig, read_record
from dualprompt.errors import DualPromptError
from dualprompt.files import read_json, write_json
from dualprompt.report.sheet import Sheet, as_markdown
from dualprompt.report.tables import ABSENT, MORE, over_seeds
from dualprompt.report.verdict import Verdict
from dualprompt.run.folder import Run

STEPS = "A after each step (%)"  # title of the table of that
KEYS = ("kind", "title", "command", "date", "finding", "verdicts", "sheets", "rows")
NUMBERS = (
    "average_accuracy", "forgetting", "matching_accuracy", "image_weighted_accuracy", "mean_over_steps",
    "backward_transfer", "learning_accuracy", "accuracy_matrix", "matching_matrix", "judged_images",
    *MORE, "task_known_matrix", "calibration", "unseen_auroc_over_tasks", "class_accuracy",
)  # fmt: skip
ONLINE = ("area_under_curve", "last_accuracy", "anytime_curve")  # of online streams
CARRIED_OUT = ("--runs", "--out", "--publish", "--jobs", "--format", "--ray", "--ray-cpus", "--ray-gpus", "--track")


class Published(Protocol):
    """A finished run, and the config that asked for it."""

    @property
    def run(self) -> Run:
        """Where its files are."""
        ...

    @property
    def config(self) -> RunConfig:
        """What was asked for."""
        ...

    @property
    def seconds(self) -> float:
        """How long it trained."""
        ...


Group = tuple[Mapping[str, Any], Sequence[Published]]  # what a row is called, and its runs


def check_target(path: Path | None) -> None:
    """Refuse a file that is something else than what was published before."""
    if path is None:
        return
    if path.suffix != ".json":
        raise DualPromptError(f"--publish takes the name of a .json file, found {path}")
    if path.exists():
        read(path)


def publish(
    path: Path,
    kind: str,
    words: Sequence[str],
    sheets: Sequence[Sheet],
    groups: Iterable[Group],
    finding: str = "",
    verdicts: Sequence[Verdict] = (),
) -> dict[str, Any]:
    """Write a publication; return it. `words` are those of the command."""
    environments: list[dict[str, Any]] = []
    rows = [_row(about, obtained, environments) for about, obtained in groups]
    started = [run["started"] for row in rows for run in row["runs"]]
    value = {
        "kind": kind,
        "title": sheets[0].title if sheets else kind,
        "command": command(words),
        "date": max(started)[:10] if started else None,
        "environments": environments,
        "finding": finding,
        "verdicts": [verdict.plain() for verdict in verdicts],
        "sheets": [asdict(sheet) for sheet in sheets],
        "rows": rows,
    }
    write_json(path, value)
    return value


def command(words: Sequence[str]) -> str:
    """Return a command without what says only where and how it was carried out."""
    kept, queue = ["dualprompt"], list(words)
    while queue:
        word = queue.pop(0)
        if word.partition("=")[0] in CARRIED_OUT:
            if "=" not in word and queue and not queue[0].startswith("--"):
                queue.pop(0)
        elif word != "--json":
            kept.append(str(without_paths(word)))
    return " ".join(f"'{word}'" if set(word) & set(" []{}") else word for word in kept)


def without_paths(value: Any) -> Any:
    """Return a plain value in which files and folders of this machine are called by their names."""
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(each) for each in value]
    local = isinstance(value, str) and value.startswith(("/", "./", "../", "~"))
    return Path(value).name if local else value


def _row(about: Mapping[str, Any], obtained: Sequence[Published], environments: list[dict[str, Any]]) -> dict[str, Any]:
    config = obtained[0].config.model_dump(mode="json", exclude={"seed"})
    return {**about, "config": without_paths(config), "runs": [_run(each, environments) for each in obtained]}


def _run(each: Published, environments: list[dict[str, Any]]) -> dict[str, Any]:
    result, manifest = each.run.result(), each.run.manifest()
    environment = {
        "dualprompt": manifest["dualprompt"],
        "commit": (manifest.get("git") or {}).get("commit"),
        "changed_files": (manifest.get("git") or {}).get("changed_files"),
        "versions": {name: version for name, version in manifest["versions"].items() if name != "platform"},
        "precision": manifest["precision"],
        "backbone": without_paths({key: manifest["backbone"][key] for key in ("name", "sha256")}),
    }
    if environment not in environments:
        environments.append(environment)
    again = sorted(each.run.folder.glob("eval-*.json"))
    return {
        "seed": result["seed"],
        "started": manifest["started"],
        "environment": environments.index(environment),
        "identity": manifest["identity"],
        **{key: result[key] for key in NUMBERS},
        "cost": result.get("cost"),
        **{key: result[key] for key in ONLINE if key in result},
        "parameters": result["parameters"],
        "buffer": result["buffer"],
        "training_seconds": each.seconds,
        "judged_again": {
            path.stem.removeprefix("eval-"): {key: found[key] for key in NUMBERS}
            for path in again
            if (found := each.run.read_result(path))
        },
    }


def _rectangular(sheet: Sheet) -> Sheet:
    if any(len(row) != len(sheet.columns) for group in sheet.groups for row in group):
        raise ValueError("a row of a table has a cell for each column")
    return sheet


SheetRecord = Annotated[Sheet, AfterValidator(_rectangular)]


class _VerdictRecord(Record):
    sentence: str


class _RunRecord(Record):
    seed: Count
    accuracy_matrix: list[list[Percent]]
    judged_images: list[Annotated[Count, Field(ge=1)]] | None
    average_accuracy: Percent
    forgetting: float | None
    image_weighted_accuracy: Percent | None
    mean_over_steps: Percent | None
    area_under_curve: Percent | None = None
    anytime_curve: list[tuple[Count, Count, Percent]] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _RunRecord:
        metrics.check(self.accuracy_matrix)
        if self.judged_images is not None and len(self.judged_images) != len(self.accuracy_matrix):
            raise ValueError("'judged_images' must have a number for each task")
        return self


class _RowRecord(Record):
    label: str
    runs: list[_RunRecord]


class PublicationRecord(Record):
    """What a publication holds, as far as it is read again."""

    kind: str
    title: str
    command: str
    date: str | None
    finding: str
    verdicts: list[_VerdictRecord]
    sheets: list[SheetRecord]
    rows: list[_RowRecord]


def read(path: Path) -> dict[str, Any]:
    """Return a publication, or say that the file is none."""
    if not path.is_file():
        raise DualPromptError(f"{path} does not exist; make it with --publish of `table`, `study` or `sweep`")
    value = read_json(path)
    missing = [key for key in KEYS if key not in value]
    if missing:
        raise DualPromptError(f"{path} was not made by --publish (it has no '{missing[0]}'); choose another name")
    read_record(path, PublicationRecord, "restore it or publish again")
    return value


def sheets(value: Mapping[str, Any]) -> list[Sheet]:
    """Return the tables of a publication."""
    return TypeAdapter(list[Sheet]).validate_python(value["sheets"])


def markdown(value: Mapping[str, Any]) -> str:
    """Return a publication as Markdown: its tables, and what was found."""
    return "\n".join([*map(as_markdown, sheets(value)), *([value["finding"], ""] if value["finding"] else [])])


def contradictions(value: Mapping[str, Any]) -> list[str]:
    """Return where the numbers of a publication disagree: metrics with matrices, tables with runs."""
    found = []
    for row in value["rows"]:
        for run in row["runs"]:
            worked_out = metrics.summarise(run["accuracy_matrix"], None, run["judged_images"])
            for key in ("average_accuracy", "forgetting", "image_weighted_accuracy", "mean_over_steps"):
                if abs((worked_out[key] or 0) - (run[key] or 0)) > 1e-6:
                    found.append(f"{row['label']}, seed {run['seed']}: {key} is not that of its matrix")
            if run.get("anytime_curve"):
                area = metrics.area_under_curve([tuple(point) for point in run["anytime_curve"]])
                if abs(area - run["area_under_curve"]) > 1e-6:
                    found.append(f"{row['label']}, seed {run['seed']}: area_under_curve is not that of its curve")
        lines = [line for sheet in sheets(value) for line in _lines(sheet, row["label"])]
        accuracy, forgetting = (
            over_seeds([run[key] for run in row["runs"]]) for key in ("average_accuracy", "forgetting")
        )
        if lines and not {(accuracy, forgetting), (accuracy, ABSENT)} & set(lines):
            found.append(f"{row['label']}: no line of the tables has A = {accuracy} and F = {forgetting}")
        found += [f"{row['label']}: {said}" for said in _wrong_steps(sheets(value), row)]
    sentences = [verdict["sentence"] for verdict in value["verdicts"]]
    found += [f"not in the finding: {sentence}" for sentence in sentences if sentence not in value["finding"]]
    return found


def _wrong_steps(found: Sequence[Sheet], row: Mapping[str, Any]) -> list[str]:
    """Return what a table of accuracy after each step, or of the last and the mean, says other than a row's runs."""
    runs = row["runs"]
    each = [metrics.over_tasks(run["accuracy_matrix"])["average_accuracy"] for run in runs]
    by_step = enumerate(zip(*each, strict=False), start=1)
    expected = {str(step): f"{sum(values) / len(values):.1f}" for step, values in by_step}
    last, mean = (over_seeds([run[key] for run in runs]) for key in ("average_accuracy", "mean_over_steps"))
    expected |= {"last A (%)": last, "mean over steps (%)": mean}
    wrong = []
    for sheet in found:
        headings = [column.heading.replace("\n", " ") for column in sheet.columns]
        lines = [cells for group in sheet.groups for cells in group if cells[0] == row["label"]]
        if not lines or (sheet.title != STEPS and "last A (%)" not in headings):
            continue
        held = [place for place, heading in enumerate(headings) if heading in expected]
        fits = [all(cells[place] == expected[headings[place]] for place in held) for cells in lines]
        wrong += [] if any(fits) else [f"no line of '{sheet.title}' is that of its runs"]
    return wrong


def _lines(sheet: Sheet, label: str) -> list[tuple[str, str]]:
    """Return A and F of the lines of a table that bear a label."""
    headings = [column.heading for column in sheet.columns]
    if not {"A (%)", "F (%)"} <= set(headings):
        return []
    a, f = headings.index("A (%)"), headings.index("F (%)")
    return [(cells[a], cells[f]) for group in sheet.groups for cells in group if label in cells]
