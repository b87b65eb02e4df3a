"""What `model.json` holds, and the same of earlier versions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dualprompt.config import Count, Percent, Record
from dualprompt.data.folder import one_form

KEPT, MOST_KEPT, LAST = 5, 1000, 10**9  # earlier versions: by default, at most; and the highest number that one has
LAST_ID = 2**53 - 1  # of a task
_Label = Annotated[str, AfterValidator(one_form)]
_Id = Annotated[int, Field(ge=1, le=LAST_ID)]


class TensorsRecord(Record):
    """The file of the tensors."""

    file: Annotated[str, Field(pattern=r"^weights-[0-9a-f]{16}\.safetensors$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class BackboneRecord(Record):
    """The backbone that a model was made with."""

    name: Annotated[str, Field(min_length=1)]
    sha256: str
    input_size: int | None


class PromptRecord(Record):
    """Whether prompts were trained in a lesson, and why."""

    used: bool
    why: str
    held: Count
    without: Count
    with_prompts: Count


class TaskRecord(Record):
    """What is known of a task."""

    id: _Id
    name: str
    classes: Annotated[list[_Label], Field(min_length=1)]
    images: Count
    learned: str
    bytes: Count
    accuracy: Percent | None
    held: Count | None = None  # None: as many as there are trusts
    correct: Count = 0
    left_one_out: bool = False
    interval: tuple[Percent, Percent] | None = None  # for people; it follows from the others
    prompts: PromptRecord | None = None
    measured: dict[_Id, Percent] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _counted(self) -> TaskRecord:
        if self.held is not None and self.correct > self.held:
            raise ValueError("more of its images are right than were held out")
        return self


class VersionRecord(Record):
    """Which version a model is, and how many earlier ones are kept beside it."""

    number: Annotated[int, Field(ge=1, lt=LAST)] = 1
    saved: str = ""  # when, ISO 8601; models of earlier releases do not say
    why: str = ""  # what was done
    keep: Annotated[int, Field(ge=0, le=MOST_KEPT)] = KEPT


class ModelRecord(Record):
    """What `model.json` holds."""

    dualprompt: str
    backbone: BackboneRecord
    method: dict[str, Any]
    train: dict[str, Any]
    seed: Count
    threshold: float | None
    threshold_by: Literal["lessons", "user"] = "user"
    tasks: list[TaskRecord]
    rows: list[tuple[_Id, _Label] | None]  # of the head: the task that taught it and its label; None: forgotten
    next_id: _Id
    # Of each image held or left out: how sure it was, how sure if the class were not known, and the best labels.
    trust: list[tuple[_Id, dict[_Label, list[float | tuple[float, float | None, list[_Label]]]]]]
    tensors: TensorsRecord
    version: VersionRecord = VersionRecord()

    @model_validator(mode="after")
    def _consistent(self) -> ModelRecord:
        ids = [task.id for task in self.tasks]
        if len(set(ids)) < len(ids) or any(number >= self.next_id for number in ids):
            raise ValueError("the ids of its tasks are not those that it gave")
        taught = [(task.id, label) for task in self.tasks for label in task.classes]
        known = {row for row in self.rows if row is not None}  # a label has several where classes were merged
        if len(set(taught)) < len(taught) or known != set(taught):
            raise ValueError("its rows are not those of its classes")
        if any((number, label) not in known for number, own in self.trust for label in own):
            raise ValueError("its trust is not in its classes")
        return self
