"""The process that learns beside the server: `python -m dualprompt.hosted.teach MODEL JOB`.

It loads the saved model, learns what lies in the job's folder, and saves the new model in place of the old. It tells
the server how far it is, one JSON object a line; the server holds the other end of its standard input, so that it ends
with the server however that ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import Field, TypeAdapter

from dualprompt.console import words
from dualprompt.errors import DualPromptError
from dualprompt.files import write_json
from dualprompt.hosted.places import read_record
from dualprompt.hosted.review import REMEDY, Reviewed
from dualprompt.progress import Advanced, Began, Ended, Event, Loss, Progress, Remarked, Work

LEARNED = "learned.json"
LESSON = "lesson.json"
FINDINGS = "findings.json"
# Where on the way from 0 to 1 each piece of work lies; what is not named is the training itself.
SPANS = {
    "reading": (0.0, 0.1),
    "decoding": (0.0, 0.1),
    "features": (0.1, 0.3),
    "evaluating": (0.9, 0.98),
}
TRAINING = (0.3, 0.9)
SECONDS_BETWEEN = 0.2
OF_UPLOADS = "skip_bad=true leaves them out; POST /check names all"
TEXT_CHARACTERS = 2000  # the server reads lines of at most 64 KiB

OwnName = Annotated[str, Field(pattern=r"^[0-9]{6}\.[a-z0-9]{1,5}$")]  # no picture is read from anywhere else


JobKind = Literal["learn", "more", "check"]


@dataclass
class Lesson:
    """What a job is to do with pictures: for each class our names of its pictures' files, and the sender's."""

    name: str | None
    epochs: Annotated[int, Field(ge=1)] | None
    again: bool
    pictures: dict[str, list[tuple[OwnName, str]]]
    kind: JobKind = "learn"
    skip_bad: bool = False
    # What a check is to tell besides: files that came with the pictures and are none, pictures that cannot be opened,
    # each with the reason, and why the folders seem to be the wrong ones.
    left_out: list[tuple[str, str]] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    level: str | None = None
    reviewed: list[Reviewed] = field(default_factory=list)  # what of the pictures to look at is in it


@dataclass
class Learned:
    """The task that a job has learned, when, the version that the model has with it, and then of how many images."""

    id: int
    learned: str
    version: int
    images: int = 0


LESSON_KIND, LEARNED_KIND = TypeAdapter(Lesson), TypeAdapter(Learned)


class Reporter(Progress):
    """Writes progress as JSON lines: how far from 0 to 1, what is being done, the loss."""

    def __init__(self, channel: TextIO) -> None:
        self.channel, self.furthest, self._last = channel, 0.0, 0.0
        self.loss: float | None = None  # of the work in hand
        self.names: Mapping[str, str] = {}  # what the senders call the files of ours that a message names

    def tell(self, **values: Any) -> None:
        """Write one line; what would be too long for it is cut."""
        told = {key: _renamed(value, self.names) if isinstance(value, str) else value for key, value in values.items()}
        cut = {key: value[:TEXT_CHARACTERS] if isinstance(value, str) else value for key, value in told.items()}
        self.channel.write(json.dumps(cut) + "\n")
        self.channel.flush()

    def receive(self, event: Event) -> None:
        """Pass on what stays, what begins, and how far it is."""
        match event:
            case Advanced(work, done):
                self._advance(work, done)
            case Remarked(_, remark):
                if isinstance(remark, Loss):
                    self.loss = round(remark.value, 3)
            case Ended():
                self.loss = None
            case Began():
                self.loss = None
                self.tell(message=words(event))
            case _:
                self.tell(message=words(event))

    def _advance(self, work: Work, done: float) -> None:
        """Pass on how far a piece of work is, a few times a second at most."""
        if not work.total:
            return
        first, last = SPANS.get(work.kind, TRAINING)
        self.furthest = max(self.furthest, first + min(done / work.total, 1.0) * (last - first))
        if time.monotonic() - self._last > SECONDS_BETWEEN:
            self._last = time.monotonic()
            self.tell(progress=round(self.furthest, 4), **({} if self.loss is None else {"loss": self.loss}))


def teach(model: Path, job: Path, reporter: Reporter) -> None:
    """Learn what a job's folder holds and save the model, or only look at it."""
    import torch

    from dualprompt.learner import ContinualLearner
    from dualprompt.lessons.teaching import SKIP_BAD
    from dualprompt.model import saved

    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    lesson = read_record(job / LESSON, LESSON_KIND)
    names = {str(job / "images" / file): name for pictures in lesson.pictures.values() for file, name in pictures}
    reporter.names = names
    data = {label: [job / "images" / file for file, _ in pictures] for label, pictures in lesson.pictures.items()}
    try:
        learner = ContinualLearner.load(model)
        if lesson.kind == "check":
            write_json(job / FINDINGS, findings(lesson, data, learner, names, reporter))
            return
        if lesson.kind == "more":
            task = learner.more(data, progress=reporter, skip_bad=lesson.skip_bad)[0]
        else:
            asked = {"epochs": lesson.epochs, "again": lesson.again, "skip_bad": lesson.skip_bad}
            task = learner.learn(data, lesson.name, progress=reporter, work=job / "work", **asked)
    except DualPromptError as error:
        told = str(error).replace(SKIP_BAD, REMEDY if lesson.reviewed else OF_UPLOADS)
        raise DualPromptError(_renamed(told, names)) from error
    reporter.tell(progress=0.99, message="saving the model")
    # Whoever finds this job after a crash sees by it whether the saved model already has what it learned.
    version = saved.record(model).version.number + 1
    write_json(job / LEARNED, asdict(Learned(task.id, task.learned, version, task.images)))
    learner.save(model, held=True)  # by the server, whose lock we inherited


def findings(
    lesson: Lesson, data: Mapping[str, Sequence[Path]], learner: Any, names: Mapping[str, str], progress: Progress
) -> Any:
    """Return what a look at pictures finds: lines for people, and all of it as data; files by their senders' names."""
    from dualprompt.lessons.check import LeftOut, check

    found = check(data, learner, progress)  # type: ignore[arg-type]
    others, unread = (tuple(LeftOut(*each) for each in told) for told in (lesson.left_out, lesson.unreadable))
    found = replace(found, left_out=others, unreadable=(*unread, *found.unreadable), level=lesson.level)
    text = json.dumps({"lines": found.summary(), **found.to_dict()})
    return json.loads(_renamed(text, {json.dumps(path)[1:-1]: json.dumps(name)[1:-1] for path, name in names.items()}))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Put the senders' names for their pictures in the place of ours, which they do not know."""
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def main() -> int:
    """Teach; return 0 when the new model is saved, 2 when the error was reported."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not end up among our lines
    threading.Thread(target=_end_with_server, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(5)  # who asks goes first; more would starve learning on a busy machine
    warnings.filterwarnings("ignore", module="PIL")  # what clients send must not fill the server's log
    reporter = Reporter(channel)
    try:
        teach(Path(sys.argv[1]), Path(sys.argv[2]), reporter)
    except DualPromptError as error:
        reporter.tell(error=str(error))
        return 2
    except MemoryError:
        reporter.tell(error="the machine has too little memory for this task; send fewer or smaller images")
        return 2
    return 0


def _end_with_server() -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock would be waited for when we end by ourselves
        pass
    os._exit(3)


if __name__ == "__main__":
    raise SystemExit(main())
