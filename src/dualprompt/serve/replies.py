"""What the routes answer, as types: they make the OpenAPI schema, and clients may rely on them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    """An answer; what later versions add to it is passed on."""

    model_config = ConfigDict(extra="allow")


class Refused(Reply):
    """Why something was refused, in one line."""

    error: str


class Health(Reply):
    """That the server answers."""

    status: str = Field(examples=["ok"])
    model_version: str


class ClassScore(Reply):
    """A class and how probable it is."""

    label: str
    probability: float


class Prediction(Reply):
    """What the model says of one image."""

    path: str | None = Field(description="the file's name as it was sent")
    label: str | None = Field(description="the class; null: none of those it knows")
    probability: float | None = Field(description="of that class, among all known ones; null: there is none")
    task: str | None = Field(description="the lesson that taught that class")
    similarity: float = Field(description="how like that lesson's images it is")
    top: list[ClassScore] = Field(description="the best classes, best first")
    version: str = Field(description="of the model that answered")


class BadImage(Reply):
    """An image, one of several, that could not be answered."""

    path: str | None
    error: str
    status: int = Field(description="that a request with this image alone would have")


class Predictions(Reply):
    """An answer for each image, in their order."""

    answers: list[Prediction | BadImage]


class Practice(Reply):
    """Whether prompts were trained in a lesson, and why."""

    used: bool
    why: str
    held: int = Field(description="images that both were compared on; 0: they were not compared")
    without: int = Field(description="of these, right without prompts")
    with_prompts: int = Field(description="and right with them")


class Task(Reply):
    """A lesson that was learned."""

    id: int
    name: str
    classes: list[str]
    images: int
    learned: str
    bytes: int
    accuracy: float | None = Field(description="percent of the images held or left out; null: not measured")
    held: int = Field(description="images behind the accuracy")
    correct: int
    interval: tuple[float, float] | None = Field(description="percent, where the accuracy lies with 95 % confidence")
    prompts: Practice | None = Field(None, description="null: its method always does as it does")


class Level(Reply):
    """What a threshold does, as far as lessons tell it."""

    threshold: float
    accepted: float = Field(description="percent of images of known classes that get a class")
    rejected: float | None = Field(description="percent of images of unknown classes that get none")


class ModelInfo(Reply):
    """What the model knows."""

    classes: list[str]
    tasks: list[Task]
    threshold: float | None = Field(description="below it the answer is 'none of these'; null: never")
    levels: list[Level]
    side: int
    bytes: int
    backbone: str
    method: str
    engine: dict[str, Any]
    version: str
    model_version: str
    token_required: bool


class Begun(Reply):
    """A job that waits for its turn."""

    id: int
    url: str


class Forgotten(Reply):
    """What is gone."""

    forgot: str
    purged: list[int] = Field(description="numbers of the earlier versions that were removed; without purge none is")
    before: bool = Field(description="whether the model had forgotten it before, so that only earlier versions held it")
    model_version: str


class Changed(Reply):
    """What the model knows now."""

    classes: list[str]
    model_version: str


class VersionInfo(Reply):
    """A state that the model was saved in."""

    number: int
    saved: str
    why: str
    classes: list[str]
    tasks: list[str]
    bytes: int
    current: bool


class Versions(Reply):
    """The versions that are kept, the newest last."""

    versions: list[VersionInfo]


class ReviewItem(Reply):
    """A picture that people should look at."""

    id: int
    added: float = Field(description="seconds since 1970")
    why: str = Field(description="unsure or wrong")
    name: str
    answered: str | None = Field(description="null: none of these")
    label: str | None = Field(description="what it is, as somebody said; null: nobody has")


class ReviewList(Reply):
    """The queue."""

    on: bool
    days: float | None = Field(description="how long a picture stays at most")
    items: list[ReviewItem]


class HourCount(Reply):
    """What was answered within an hour."""

    start: int = Field(description="seconds since 1970")
    answers: int
    unsure: int


class Drifting(Reply):
    """How often the model was unsure, since the server started, two weeks at most."""

    hours: list[HourCount]
