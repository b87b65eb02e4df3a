"""What the files of a run hold: typed records, as they are read back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dualprompt import metrics
from dualprompt.config import Count, Percent, Record


class _TaskRecord(Record):
    name: str
    classes: list[str]
    train: Count
    test: Count


class _IdentityRecord(Record):
    config: str
    data: str
    weights: str
    code: str | None = None  # once it was not noted


class _BackboneRecord(Record):
    name: str
    sha256: str


class _GitRecord(Record):
    commit: str
    changed_files: Count


class _ContinuationRecord(Record):
    code: str
    dualprompt: str
    time: str
    git: _GitRecord | None


class ManifestRecord(Record):
    """What `manifest.json` holds."""

    dualprompt: str
    started: str
    command: str
    seed: Count
    config: dict[str, Any]
    identity: _IdentityRecord
    backbone: _BackboneRecord
    precision: Literal["float32", "bfloat16"]
    threads: Annotated[int, Field(ge=1, lt=2**16)] | None = None  # once they were not noted
    products: Literal["oneDNN", "PyTorch"] | None = None  # nor was what multiplies frozen layers on a CPU
    tasks: list[_TaskRecord]
    versions: dict[str, str | None]
    git: _GitRecord | None
    continued_by_other_code: tuple[_ContinuationRecord, ...] = ()


class _Size(Record):
    count: Count
    mb: float


class _ParametersRecord(Record):
    trained: Count
    mb: float
    percent_of_backbone: float
    backbone: Annotated[Count, Field(ge=1)]
    additional: _Size
    kept: _Size


class _CostRecord(Record):
    passes: float
    gflops: float


class _BothCosts(Record):
    train: _CostRecord
    predict: _CostRecord


class _TotalSeconds(Record):
    train: float
    evaluate: float


class _BufferRecord(Record):
    images: Count
    bytes: Count


class _CalibrationRecord(Record):
    """See metrics.reliability."""

    images: list[Count]
    confidence: list[Percent]
    accuracy: list[Percent]

    @model_validator(mode="after")
    def _consistent(self) -> _CalibrationRecord:
        if not len(self.images) == len(self.confidence) == len(self.accuracy) or not any(self.images):
            raise ValueError("every bin has images, a confidence and an accuracy, and some have images")
        return self


class ResultRecord(Record):
    """What `result.json` holds, and the files of `dualprompt eval`."""

    method: str
    benchmark: str
    backbone: str
    recipe: str
    seed: Count
    tasks: list[str]
    class_order: list[str] | None = None  # every class as it first came; once it was not noted
    average_accuracy: Percent
    forgetting: float
    matching_accuracy: Percent | None
    image_weighted_accuracy: Percent | None = None
    mean_over_steps: Percent | None = None
    anytime_average_accuracy: Percent | None = None  # what the mean over steps was once called
    judged_images: list[Count] | None = None
    backward_transfer: float
    coda_forgetting: float | None = None
    forward_transfer: float | None = None
    learning_accuracy: Percent
    task_known_accuracy: Percent | None = None
    task_known_matrix: list[list[Percent]] | None = None
    calibration_error: Percent | None = None
    calibration: _CalibrationRecord | None = None
    unseen_auroc: Percent | None = None
    unseen_auroc_over_tasks: list[Percent | None] | None = None
    class_accuracy: dict[str, Percent] | None = None
    accuracy_matrix: list[list[Percent]]
    matching_matrix: list[list[Percent]] | None
    matching_confusion: list[list[Count]] | None
    selection: str | None
    peeks: bool = False  # whether it chose by the images that it was judged on
    parameters: _ParametersRecord
    cost: _BothCosts | None = None
    seconds: _TotalSeconds | None = None
    queries: str
    buffer: _BufferRecord | None
    area_under_curve: Percent | None = None  # this and what follows: of an online stream
    last_accuracy: Percent | None = None
    anytime_curve: list[tuple[Count, Count, Percent]] | None = None  # images and classes so far, accuracy
    skipped_images: Count
    code_changed: bool = False  # whether it was begun by one code and continued by another

    @model_validator(mode="after")
    def _consistent(self) -> ResultRecord:
        for matrix in (self.accuracy_matrix, self.matching_matrix, self.task_known_matrix):
            if matrix is not None:
                metrics.check(matrix)
                if len(matrix) != len(self.tasks):
                    raise ValueError(f"{len(self.tasks)} tasks have {len(self.tasks)} rows, found {len(matrix)}")
        if self.judged_images is not None and (
            len(self.judged_images) != len(self.tasks) or min(self.judged_images, default=1) < 1
        ):
            raise ValueError("'judged_images' must have a positive number for each task")
        square = self.matching_confusion or []
        if square and {len(self.tasks)} != {len(square), *map(len, square)}:
            raise ValueError("'matching_confusion' must have a row and a column for each task")
        return self


class _Seconds(Record):
    train: float
    evaluate: float
    train_images_per_second: float | None


class _EpochLine(Record):
    event: Literal["epoch"]
    task: Count
    epoch: Count
    loss: float
    phase: str | None = None


class _TaskLine(Record):
    event: Literal["task"]
    task: Count
    name: str
    accuracy: list[Percent]
    matching: list[Percent] | None
    images: list[Count]
    seconds: _Seconds


class _AnytimeLine(Record):
    event: Literal["anytime"]
    images: Count
    classes: Count
    accuracy: Percent
    loss: float | None = None  # of gradient steps


class LogLine(Record):
    """A line of the log."""

    line: Annotated[_EpochLine | _AnytimeLine | _TaskLine, Field(discriminator="event")]
