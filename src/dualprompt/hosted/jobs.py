"""Learning jobs: one at a time, each in a process of its own, on record so that a restart finds them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, TypeAdapter

from dualprompt.errors import DualPromptError
from dualprompt.files import read_json, write_json
from dualprompt.hosted.model import ServedModel
from dualprompt.hosted.places import LAST_JOB, JobFolders, read_record
from dualprompt.hosted.review import Reviewed
from dualprompt.hosted.teach import FINDINGS, LEARNED, LEARNED_KIND, LESSON, LESSON_KIND, JobKind, Learned, Lesson
from dualprompt.inbound.limits import Limits, Refusal, busy
from dualprompt.inbound.pictures import Picture, short
from dualprompt.model import saved

State = Literal["queued", "running", "done", "failed"]
KEPT = 100
ATTEMPTS = 2
log = logging.getLogger("dualprompt.serve")


@dataclass
class Job:
    """One task to learn, from the upload until it is learned or has failed."""

    id: Annotated[int, Field(ge=1, le=LAST_JOB)]
    name: str | None
    classes: list[str]
    images: int
    state: State = "queued"
    progress: FiniteFloat = 0.0
    message: str = ""
    loss: FiniteFloat | None = None
    seconds: FiniteFloat = 0.0
    error: str | None = None
    task: int | None = None  # the learned task's id
    attempts: int = 0
    kind: JobKind = "learn"
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_dict(self) -> dict[str, Any]:
        """Return what clients see."""
        return asdict(self)


@dataclass
class _Record:
    """What is on record of all jobs."""

    next: Annotated[int, Field(ge=1, le=LAST_JOB)]
    jobs: list[Job]


_RECORD = TypeAdapter(_Record)


def _ignore(_: list[Reviewed]) -> None:
    pass


class Jobs:
    """The queue of jobs of one model.

    `switched` is awaited when a job has saved a new model; `reviewed` is told which pictures of the review queue a job
    has learned, perhaps more than once.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        switched: Callable[[], Awaitable[None]],
        reviewed: Callable[[list[Reviewed]], None] = _ignore,
    ) -> None:
        self.model, self.limits, self.switched, self.reviewed = model, limits, switched, reviewed
        self.folders = JobFolders(model.work / "jobs")
        self.file = model.work / "jobs.json"
        self.jobs: dict[int, Job] = {}
        self.changing = asyncio.Lock()  # held by whatever is changing the model
        self._next = 1
        self._uploading = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._cancelled: set[int] = set()
        self.findings: dict[int, Any] = {}  # of jobs that checked pictures; in memory alone, for they name files

    def start(self) -> None:
        """Take up what an earlier server left, clear the rest away, and begin to work."""
        self._recover()
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """End the running job's process; the job is taken up again by the next server."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[Path]:
        """Yield a new folder for an upload, which is deleted unless it becomes a job; refuse when too many wait."""
        waiting = self._uploading + self.count("queued") + self.count("running")
        if waiting >= self.limits.queued_jobs:
            raise busy(f"{waiting} tasks wait to be learned already; try again when one is done", 30)
        number = self._next
        self._next += 1
        self._uploading += 1
        try:
            yield self.folders.make(number)
        finally:
            self._uploading -= 1
            if number not in self.jobs:
                self.folders.remove(number)

    def add(self, folder: Path, pictures: list[Picture], lesson: Lesson) -> Job:
        """Queue a lesson with pictures that lie in `folder/images`, and say which file is of which class."""
        classes: dict[str, list[tuple[str, str]]] = {}
        for picture in pictures:
            classes.setdefault(picture.label, []).append((picture.path.name, short(picture.name)))
        write_json(folder / LESSON, asdict(replace(lesson, pictures=classes)))
        job = Job(int(folder.name), lesson.name, sorted(classes), len(pictures), kind=lesson.kind)
        self.jobs[job.id] = job
        try:
            self._save()
        except DualPromptError:  # whoever is told so must not find it learned later
            del self.jobs[job.id]
            raise
        self._wake.set()
        return job

    def waiting_reviewed(self) -> list[Reviewed]:
        """Return which pictures of the review queue are in jobs that have not ended."""
        waiting = [job for job in self.jobs.values() if job.state in ("queued", "running")]
        return [each for job in waiting for each in self._reviewed_in(job)]

    def _reviewed_in(self, job: Job) -> list[Reviewed]:
        """Return which pictures of the review queue are in a job, by its record."""
        if job.kind != "more":
            return []
        try:
            return read_record(self.folders.of(job.id) / LESSON, LESSON_KIND).reviewed
        except DualPromptError as problem:
            log.warning("%s", problem)
            return []

    def cancel(self, job: Job) -> None:
        """Give up a job that is not finished."""
        if job.state not in ("queued", "running"):
            raise Refusal(409, f"job {job.id} is {job.state} already")
        self._cancelled.add(job.id)
        if job.state == "queued":
            self._finish(job, "cancelled")
        elif self._process and self._process.returncode is None:
            self._process.kill()

    def forget(self, names: set[str], tasks: set[int]) -> None:
        """Drop the finished jobs that name classes or tasks which the model no longer knows."""
        for job in list(self.jobs.values()):
            named = job.task in tasks or names & {job.name, *job.classes}
            if named and job.state in ("done", "failed"):
                del self.jobs[job.id]
        self._try_to_save()

    def count(self, state: State) -> int:
        """Return how many jobs are in a state."""
        return sum(job.state == state for job in self.jobs.values())

    def _recover(self) -> None:
        if self.file.exists():
            try:
                found = read_record(self.file, _RECORD)
                self.jobs = {job.id: job for job in found.jobs}
                self._next = found.next
            except DualPromptError as problem:
                log.warning("%s; its jobs are forgotten", problem)
        for job in list(self.jobs.values()):
            if job.state in ("queued", "running"):
                self._take_up(job)
        kept = {job.id for job in self.jobs.values() if job.state == "queued"}
        for number in self.folders.numbers():
            if number not in kept:
                self.folders.remove(number)
        self._next = max([self._next, *(job + 1 for job in self.jobs)])
        self._save()
        # Commands may have made it forget while no server ran.
        done = [job for job in self.jobs.values() if job.state == "done"]
        tasks = {job.task for job in done if job.task is not None} - {task.id for task in self.model.learner.tasks}
        self.forget({label for job in done for label in job.classes} - set(self.model.learner.classes), tasks)

    def _take_up(self, job: Job) -> None:
        folder = self.folders.of(job.id)
        if self._learned(job):
            self._finish(job)
        elif job.attempts >= ATTEMPTS:
            self._finish(job, f"interrupted {job.attempts} times while learning; the model is unchanged, send it again")
        elif not (folder / LESSON).exists():
            self._finish(job, "interrupted before its images were complete; the model is unchanged, send it again")
        else:
            job.state, job.message = "queued", "taken up again after a restart" if job.attempts else job.message

    def _learned(self, job: Job) -> bool:
        """Return whether the saved model already has what a job learned."""
        mark = self.folders.of(job.id) / LEARNED
        if not mark.exists():
            return False
        try:
            found = read_record(mark, LEARNED_KIND)
        except DualPromptError as problem:
            log.warning("%s", problem)
            return False
        task = next((task for task in self.model.learner.tasks if task.id == found.id), None)
        if task is None or task.learned != found.learned:
            return False
        if job.kind == "more" and not self._has_more(found):
            return False
        job.task = task.id
        return True

    def _has_more(self, found: Learned) -> bool:
        """Return whether a job has added its images to a task; others may have changed the model since, or instead."""
        path = self.model.path
        with contextlib.suppress(DualPromptError):  # a version that is not kept any more says nothing
            current = saved.record(path)
            then = current if current.version.number == found.version else saved.record(path, found.version)
            images = {task.id: task.images for task in then.tasks}.get(found.id)
            return images is not None and found.images in (0, images)  # 0: an older release did not note them
        return False

    async def _work(self) -> None:
        while True:
            job = next((job for job in self.jobs.values() if job.state == "queued"), None)
            if job is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self.changing:
                if job.state == "queued":
                    await self._run(job)

    async def _run(self, job: Job) -> None:
        """Learn one job; whatever happens, it ends on record and its images are deleted."""
        began = time.monotonic()
        job.state, job.attempts, job.message = "running", job.attempts + 1, "starting"
        self._process = None
        error: str | None
        try:
            self._save()
            error = await self._teach(job, began)
            code = self._process.returncode if self._process else None
            if job.kind == "check" and error is None:
                self.findings[job.id] = read_json(self.folders.of(job.id) / FINDINGS)
            elif code == 0 or (self.folders.of(job.id) / LEARNED).exists():
                await self.switched()
                if self._learned(job):
                    error = None
                elif error is None:
                    error = "the new model was not saved; the model is unchanged"
        except (DualPromptError, OSError) as problem:
            error = str(problem) or type(problem).__name__
        except Exception:  # whatever it is, the next job must have its turn
            log.exception("job %d", job.id)
            error = "learning failed unexpectedly; the server's log says why"
        job.seconds = round(time.monotonic() - began, 2)
        self._finish(job, error)

    async def _teach(self, job: Job, began: float) -> str | None:
        """Run the process that learns; return what went wrong."""
        error: str | None = None
        places = [str(self.model.path), str(self.folders.of(job.id))]
        command = [sys.executable, "-m", "dualprompt.hosted.teach", *places]
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, pass_fds=self.model.held_files
        )
        assert process.stdout
        try:
            if job.id in self._cancelled:  # while there was no process yet
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            async with asyncio.timeout(self.limits.job_seconds):
                async for line in process.stdout:
                    values = json.loads(line)
                    error = values.pop("error", error)
                    for key, value in values.items():
                        setattr(job, key, value)
                    job.seconds = round(time.monotonic() - began, 2)
                code = await process.wait()
        except TimeoutError:
            return f"learning took longer than {self.limits.job_seconds:.0f} s and was stopped; the model is unchanged"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if code == 0:
            return None
        if job.id in self._cancelled:
            return "cancelled"
        how = f"was killed (signal {-code})" if code < 0 else f"ended with code {code}"
        return error or f"the learning process {how}; the model is unchanged, send the task again"

    def _finish(self, job: Job, error: str | None = None) -> None:
        error = error and error.replace(f"{self.model.path}{os.sep}", "")  # clients need not know where it lies
        job.state, job.error = ("failed", error) if error else ("done", None)
        job.progress, job.message = (job.progress, "") if error else (1.0, "")
        finished = [job.id for job in self.jobs.values() if job.state in ("done", "failed")]
        for old in finished[:-KEPT]:
            del self.jobs[old]
            self.findings.pop(old, None)
        if not error and (learned := self._reviewed_in(job)):
            try:
                self.reviewed(learned)
            except DualPromptError as problem:  # the model has learned them all the same
                log.warning("%s", problem)
        self._cancelled.discard(job.id)
        self._try_to_save()
        self.folders.remove(job.id)  # only now: what was learned is recognised by what lies there

    def _try_to_save(self) -> None:
        try:
            self._save()
        except DualPromptError as problem:  # a full disk; what is on record here is so all the same
            log.warning("%s", problem)

    def _save(self) -> None:
        write_json(self.file, {"next": self._next, "jobs": [asdict(job) for job in self.jobs.values()]})
