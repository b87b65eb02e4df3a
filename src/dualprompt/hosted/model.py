"""The model that is served: loaded from its directory, locked for us, replaced as a whole when it changes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dualprompt import __version__
from dualprompt.errors import DualPromptError
from dualprompt.files import digest, read_json
from dualprompt.hosted.engine import TORCH, Agreement, Engine, faster
from dualprompt.hosted.places import SERVE, make_own
from dualprompt.learner import Answer, ContinualLearner
from dualprompt.model import saved, versions

LOCK_SECONDS = 15.0
Changed = TypeVar("Changed")


class Versioned(NamedTuple):
    """An answer that always names a class, the version of the model that gave it, and that model's threshold."""

    answer: Answer
    version: str
    threshold: float | None

    def decided(self, threshold: float | None = None) -> Answer:
        """Return the answer by the model's threshold, or by another."""
        least = self.threshold if threshold is None else threshold
        return self.answer if least is None or self.answer.trust >= least else self.answer.as_none()


class Loaded(NamedTuple):
    """A learner, the version of its model, and the same learner without a threshold, as the engine computes it."""

    learner: ContinualLearner
    version: str
    answering: ContinualLearner
    agreement: Agreement | None = None  # of the engine with PyTorch; None: it is PyTorch


class ServedModel:
    """A saved learner that is asked from several threads while it may be replaced.

    Everything the server writes lies in the directory `work` inside the model's own. A lock keeps a second server and
    commands that change the model away; the process that learns inherits it, so that after a crash a new server waits
    until that one has ended too. `waiting` is called when somebody else holds the lock.

    A model that was changed is answered from by PyTorch until `accelerate` has made the engine ready for it.
    """

    def __init__(
        self,
        path: Path,
        device: str = "auto",
        waiting: Callable[[str], None] = lambda text: None,
        engine: Engine = TORCH,
    ) -> None:
        self.path, self.device, self.engine = path, "cpu" if engine.name == "onnx" else device, engine
        self.work = path / SERVE
        self.switches = 0
        # On a CPU, cores that each compute a part of a batch beat cores that share every operation of all of it.
        self._cores = torch.get_num_threads() if self.device == "cpu" or not torch.cuda.is_available() else 1
        self._pool = ThreadPoolExecutor(self._cores, thread_name_prefix="part of a batch")
        if not saved.is_model(path):
            ContinualLearner.load(path)  # it says what is wrong; nothing is written into a folder that is no model
        self._held = contextlib.ExitStack()
        self._lock = self._hold(waiting)
        with self._held:  # given back if anything goes wrong from here on
            make_own(self.work)
            self._loaded = self._load()  # only now: whoever held the lock may have saved a new one
            self._held = self._held.pop_all()

    @property
    def learner(self) -> ContinualLearner:
        """The learner that answers now."""
        return self._loaded.learner

    @property
    def version(self) -> str:
        """A short name for exactly this state of the model."""
        return self._loaded.version

    @property
    def agreement(self) -> Agreement | None:
        """How the engine answers beside PyTorch; None while PyTorch itself answers."""
        return self._loaded.agreement

    @property
    def held_files(self) -> tuple[int, ...]:
        """The files that a process which changes the model must inherit."""
        return (self._lock,)

    def answers(self, pixels: np.ndarray, top_k: Sequence[int]) -> list[Versioned]:
        """Return the answers for pictures, (pictures, side, side, 3) uint8, each with its own number of classes."""
        loaded = self._loaded
        pieces = np.array_split(pixels, min(self._cores, len(pixels)))
        threads = self._cores // len(pieces)

        def answer(piece: np.ndarray) -> list[Answer]:
            torch.set_num_threads(threads)  # of this thread alone; by default all cores share one image
            return loaded.answering.predict_pixels(piece, max(top_k))

        found = answer(pixels) if len(pieces) == 1 else itertools.chain(*self._pool.map(answer, pieces))
        told = (loaded.version, loaded.learner.threshold)
        return [Versioned(_shortened(answer, k), *told) for answer, k in zip(found, top_k, strict=True)]

    def reload(self) -> None:
        """Replace the learner by what is saved, in one step; keep the old one if that cannot be loaded."""
        self._loaded = self._load()
        self.switches += 1

    def accelerate(self) -> Agreement | None:
        """Make the engine ready for the model that answers now, unless that is replaced meanwhile."""
        loaded = self._loaded
        if self.engine.name == "torch" or not loaded.learner.classes or loaded.agreement:
            return None
        answering, agreement = faster(loaded.answering, self.engine, self.work)
        if self._loaded is not loaded:
            return None
        self._loaded = loaded._replace(answering=answering, agreement=agreement)
        return agreement

    def change(self, work: Callable[[ContinualLearner], Changed]) -> Changed:
        """Let `work` change the saved model, save that, then answer with it; return what `work` returns."""
        learner = ContinualLearner.load(self.path, self.device)
        try:
            found = work(learner)
            learner.save(self.path, held=True)
        finally:
            self.reload()  # also where saving failed, perhaps after the new model had taken the old one's place
        return found

    def rollback(self, number: int | None) -> None:
        """Answer with an earlier version of the model; None: the one before."""
        try:
            versions.rollback(self.path, number, held=True, device=self.device)
        finally:
            self.reload()

    def close(self) -> None:
        """Give the lock back."""
        self._pool.shutdown()
        self._held.close()

    def _hold(self, waiting: Callable[[str], None]) -> int:
        try:
            return self._held.enter_context(saved.held(self.path))
        except DualPromptError as error:
            if isinstance(error.__cause__, OSError):  # the disk's refusal, which no waiting mends
                raise
        waiting(f"{self.path} is being served or changed; waiting up to {LOCK_SECONDS:.0f} s for that to end")
        return self._held.enter_context(saved.held(self.path, LOCK_SECONDS))

    def _load(self) -> Loaded:
        learner = ContinualLearner.load(self.path, self.device)
        answering = copy.copy(learner)
        answering.threshold = None
        return Loaded(learner, digest(read_json(self.path / "model.json"))[:12], answering)


def _shortened(answer: Answer, count: int) -> Answer:
    return replace(answer, top=answer.top[:count])


def _levels(learner: ContinualLearner) -> list[dict[str, Any]]:
    """Return what thresholds would do, as far as lessons tell it."""
    try:
        return copy.copy(learner).calibrate().to_dict()["levels"]
    except DualPromptError:  # nothing was learned, or held out
        return []


def describe(model: ServedModel) -> dict[str, Any]:
    """Return what clients may know of the model."""
    found: dict[str, Any] = model.learner.info()
    names = {key: found[key]["name"] for key in ("backbone", "method")}
    engine = model.engine.to_dict() | {"agreement": model.agreement.to_dict() if model.agreement else None}
    told = {"levels": _levels(model.learner), "engine": engine, "version": __version__, "model_version": model.version}
    return found | names | {"details": found} | told
