"""A run directory: what was run, what happened, and everything needed to go on."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dualprompt import __version__
from dualprompt.backbones.known import EMBEDDED, REPLACED
from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import RunConfig, parse, read_record, recorded
from dualprompt.data.stream import Stream, refuse_idle_share
from dualprompt.errors import DualPromptError, one_line
from dualprompt.files import MOST_JSON, disk_errors, read_bytes, reason, write_json
from dualprompt.metrics import area_under_curve, average_accuracy, calibration_error, summarise
from dualprompt.progress import Progress
from dualprompt.run.checkpoint import Checkpoints, State
from dualprompt.run.code import code_of
from dualprompt.run.identity import Identity, digest_of
from dualprompt.run.measures import UNKNOWN
from dualprompt.run.provenance import git_state, products, versions
from dualprompt.run.records import LogLine, ManifestRecord, ResultRecord

ROUNDING = 1e-6  # how far a metric may be from what its own matrix gives


def _repeated(value: dict[str, Any]) -> dict[str, float]:
    """Return the other numbers of a result that follow from something in it."""
    found: dict[str, float] = {}
    if curve := value.get("anytime_curve"):
        found["area_under_curve"] = area_under_curve(curve)
    if value.get("last_accuracy") is not None:
        found["last_accuracy"] = average_accuracy(value["accuracy_matrix"])
    if matrix := value.get("task_known_matrix"):
        found["task_known_accuracy"] = average_accuracy(matrix)
    if bins := value.get("calibration"):
        found["calibration_error"] = calibration_error(bins)
    return found


def config_in(path: Path, values: dict[str, Any]) -> RunConfig:
    """Return the config that a file of a run holds."""
    try:
        return parse(RunConfig, values)
    except DualPromptError as error:
        raise DualPromptError(f"{path} is damaged or of another version ({error}); restore it") from None


class Run:
    """One method on one benchmark with one seed, in a directory of its own.

    `first` and `begin`: see Checkpoints.
    """

    def __init__(self, folder: Path, first: int = 0, begin: State | None = None) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder / "checkpoints", first, begin)
        self.line: str | None = None  # what tables call it, where that is more than its method
        self.listener: Callable[[dict[str, Any]], None] | None = None  # receives what is logged, and the result

    @property
    def manifest_path(self) -> Path:
        """The file that says what was run."""
        return self.folder / "manifest.json"

    @property
    def metrics_path(self) -> Path:
        """The log, one JSON object a line."""
        return self.folder / "metrics.jsonl"

    @property
    def result_path(self) -> Path:
        """The final numbers; there when the run is finished."""
        return self.folder / "result.json"

    @property
    def predictions_path(self) -> Path:
        """What the run answered for every test image, after each task."""
        return self.folder / "predictions.npz"

    @classmethod
    def create(cls, folder: Path, config: RunConfig, stream: Stream, weights: CheckpointInfo, precision: str) -> Run:
        """Make the directory of a new run and write its manifest."""
        refuse_idle_share(config.benchmark)
        run = cls(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        manifest = {
            "dualprompt": __version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": one_line(shlex.join(sys.argv)),
            "seed": config.seed,
            "config": config.model_dump(mode="json"),
            "identity": asdict(Identity.of(config, stream, weights)),
            "backbone": asdict(weights),
            "precision": precision,
            "threads": torch.get_num_threads(),
            "products": products(),
            "tasks": [
                {"name": t.name, "classes": list(t.classes), "train": len(t.train), "test": len(t.test)}
                for t in stream.experiences
            ],
            "skipped_images": [one_line(str(path)) for path in stream.bad],
            "versions": versions(),
            "git": git_state(),
        }
        write_json(run.manifest_path, manifest)
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Return the run in `folder`, or say that there is none."""
        run = cls(folder)
        if not run.manifest_path.is_file():
            raise no_run(folder)
        return run

    def manifest(self) -> dict[str, Any]:
        """Return what was run."""
        return read_record(self.manifest_path, ManifestRecord).model_dump(exclude_unset=True)

    def config(self) -> RunConfig:
        """Return the resolved config of this run, refusing one that was edited after the start."""
        manifest = self.manifest()
        config = config_in(self.manifest_path, manifest["config"])
        if manifest["identity"]["config"] != digest_of(manifest["config"]):
            raise DualPromptError(
                f"the config in {self.manifest_path} was changed after the run began, or an older dualprompt began "
                "it; undo the change or start a new run"
            )
        return config

    def check_backbone(self) -> None:
        """Refuse to go on with a run of an embedded backbone that this version does not have any more."""
        manifest = self.manifest()
        replaced = REPLACED.get(manifest["identity"]["weights"])
        if replaced and manifest["config"]["backbone"]["name"] == EMBEDDED.name:
            raise DualPromptError(
                f"run {self.folder} began with an embedded backbone ({replaced}) that this version of dualprompt has "
                "replaced; start a new run, or go on with the version that began it"
            )

    def check_same(self, found: Identity) -> None:
        """Refuse other data or weights than the run began with."""
        began = self.identity
        for what, remedy in (("data", "restore the images"), ("weights", "restore the weights file")):
            if getattr(began, what) != getattr(found, what):
                raise DualPromptError(
                    f"the {what} of run {self.folder} changed since it began; {remedy} or start a new run"
                )

    @property
    def identity(self) -> Identity:
        """What decided the result, as the manifest says."""
        return Identity(**self.manifest()["identity"])

    @property
    def code_changed(self) -> bool:
        """Whether it was continued by other code than it began with."""
        return bool(self.manifest().get("continued_by_other_code"))

    @property
    def of_other_code(self) -> bool:
        """Whether other code than that at hand made it, all or in part; a run that does not say counts so too."""
        return self.code_changed or self.identity.code != code_of(self.config())

    def check_code(self) -> None:
        """Refuse to go on with other code than the run began with, or was last continued with."""
        if self._last_code() != code_of(self.config()):
            manifest = self.manifest()
            commit = (manifest.get("git") or {}).get("commit", "")[:12]
            began = f"dualprompt {manifest['dualprompt']}" + (f", commit {commit}" if commit else "")
            raise DualPromptError(
                f"run {self.folder} was made by other code ({began}); go on with that version, start a new run, "
                "or mix both with `dualprompt resume --anyway`, which its result will say"
            )

    def accept_code(self) -> None:
        """Put on record that the code at hand goes on with a run, if it is not what made it so far."""
        code = code_of(self.config())
        if self._last_code() == code:
            return
        manifest = self.manifest()
        now = {
            "code": code,
            "dualprompt": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "git": git_state(),
        }
        manifest["continued_by_other_code"] = [*manifest.get("continued_by_other_code", []), now]
        write_json(self.manifest_path, manifest)

    def _last_code(self) -> str | None:
        continued = self.manifest().get("continued_by_other_code")
        return continued[-1]["code"] if continued else self.identity.code

    @property
    def precision(self) -> str:
        """The precision that the run began with, as a config says it."""
        return {"float32": "fp32", "bfloat16": "bf16"}[self.manifest()["precision"]]

    @contextmanager
    def as_begun(self, progress: Progress) -> Iterator[None]:
        """Compute with as many threads as the run began with: how sums are cut decides their last bits.

        Which library multiplies decides them too; it is not changed, but told of.
        """
        manifest, here = self.manifest(), torch.get_num_threads()
        if manifest.get("products") not in (None, products()):
            progress.note(
                f"{self.folder} began where {manifest['products']} multiplies frozen layers on a CPU; here "
                f"{products()} does, and last digits may differ"
            )
        began = manifest.get("threads") or here
        if began == here:
            yield
            return
        if began > (os.cpu_count() or 1):
            progress.note(
                f"{self.folder} began with {began} threads, more than this machine has cores; it goes on with {here}, "
                "and its last digits may differ"
            )
            yield
            return
        progress.note(
            f"{self.folder} began with {began} of PyTorch's threads and keeps to that; the environment says {here}"
        )
        torch.set_num_threads(began)
        try:
            yield
        finally:
            torch.set_num_threads(here)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.result_path.is_file()

    def result(self) -> dict[str, Any]:
        """Return the final numbers."""
        if not self.finished:
            raise DualPromptError(
                f"run {self.folder} is not finished; "
                f"continue it with: dualprompt resume {shlex.quote(str(self.folder))}"
            )
        result = self.read_result(self.result_path)
        return result if self.line is None else result | {"line": self.line}

    def read_result(self, path: Path) -> dict[str, Any]:
        """Return the numbers in a file of this run: `result.json`, or one of those that `dualprompt eval` writes.

        Files that are older than a metric lack it: it is worked out from what they have and the log.
        """
        value = read_record(path, ResultRecord).model_dump(exclude_unset=True)
        S, matching = value["accuracy_matrix"], value.get("matching_matrix")
        images = value.get("judged_images") or self._evaluated_images()
        computed = summarise(S, matching[-1] if matching else None, images)
        for key, number in (computed | _repeated(value)).items():
            stated = value.get(key)
            if number is not None and stated is not None and abs(stated - number) > ROUNDING:
                raise DualPromptError(
                    f"{path} is damaged ('{key}' is {stated:.10g}, but {number:.10g} by what it is made of); restore it"
                )
        value = UNKNOWN | {"judged_images": images} | computed | value
        if self.manifest()["config"]["method"].get("e_layers") == []:  # no E-Prompt to match; older files count keys
            value |= dict.fromkeys(("matching_accuracy", "matching_matrix", "matching_confusion"))
        return {key: value[key] for key in value if key != "anytime_average_accuracy"}  # now mean_over_steps

    def _evaluated_images(self) -> list[int] | None:
        tasks = [line for line in self.lines() if line["event"] == "task"]
        return tasks[-1]["images"] if tasks else None

    def log(self, **event: Any) -> None:
        """Append one line to the log."""
        with disk_errors(self.metrics_path), self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint that is on disk counts these lines
        if self.listener is not None:
            self.listener(event)

    def lines(self) -> list[dict[str, Any]]:
        """Return all that was logged."""
        if not self.metrics_path.exists():
            return []
        try:
            *lines, rest = read_bytes(self.metrics_path, MOST_JSON).split(b"\n")
        except OSError as error:
            raise DualPromptError(f"{self.metrics_path} cannot be read ({reason(error)}); restore it") from None
        if rest:
            raise DualPromptError(f"line {len(lines) + 1} of {self.metrics_path} is cut off; restore it or remove it")
        remedy = "restore it or remove it"
        where = [f"line {number} of {self.metrics_path}" for number in range(1, len(lines) + 1)]
        wrapped = [b'{"line": %b}' % line for line in lines]
        found = [recorded(LogLine, line, place, remedy).line for line, place in zip(wrapped, where, strict=True)]
        return [line.model_dump(exclude_unset=True) for line in found]

    def seconds(self) -> dict[str, float]:
        """Return how long training and evaluation took; an interrupted task counts from where it went on."""
        tasks = [line["seconds"] for line in self.lines() if line["event"] == "task"]
        return {what: round(sum(each[what] for each in tasks), 3) for what in ("train", "evaluate")}

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final numbers; the listener receives them first, since a finished run says nothing more."""
        result |= {"code_changed": True} if self.code_changed else {}
        if self.listener is not None:
            self.listener({"event": "result"} | result)
        write_json(self.result_path, result)

    def log_bytes(self) -> int:
        """Return the length of the log."""
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def cut_log(self, length: int) -> None:
        """Drop what was logged after a checkpoint, since it will happen again."""
        found = self.log_bytes()
        if 0 < found < length:
            raise DualPromptError(
                f"{self.metrics_path} is damaged (its end is missing); restore it, or remove it to go on without it"
            )
        if found > length:
            with disk_errors(self.metrics_path):
                os.truncate(self.metrics_path, length)


def no_run(folder: Path) -> DualPromptError:
    """Return the error about a folder that holds no run; that of a model is shown by another command."""
    shown = (
        f"; it holds a model: dualprompt info {shlex.quote(str(folder))}" if (folder / "model.json").exists() else ""
    )
    return DualPromptError(f"{folder} is not a run directory (it has no manifest.json){shown}")
