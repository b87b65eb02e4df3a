"""ContinualLearner: teach it classes from folders, month after month; ask it, make it forget, keep it, share it.

    learner = ContinualLearner()
    learner.learn("photos/january")          # a folder of class folders
    learner.learn("photos/february")         # the photos of January may be gone
    print(learner.predict("unknown.jpg").label)
    learner.save("model")

Nothing of the images is kept, in memory or on disk: only prompts, keys, class means and covariances of features, and
the classifier's rows.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image

from dualprompt.config import as_layer
from dualprompt.data.looks import Looks
from dualprompt.errors import DualPromptError
from dualprompt.files import refuse_links, with_home
from dualprompt.lessons import changing, check, sharded, teaching
from dualprompt.lessons.forgetting import forget
from dualprompt.lessons.prompting import Prompting, teach
from dualprompt.methods.base import METHODS
from dualprompt.model import card, foundation, hub, predicting, saved, saving
from dualprompt.model.foundation import Foundation, Model
from dualprompt.model.images import Data, ImageLike, gather, listed, named, pixels_of, read_all
from dualprompt.model.names import Kind, few, free_name
from dualprompt.model.results import Answer, Calibration, Evaluation, Level, Score, TaskInfo, Threshold
from dualprompt.progress import SILENT, Progress, counted
from dualprompt.values import merge, nested

__all__ = ["Answer", "Calibration", "ContinualLearner", "Evaluation", "ImageLike", "Level", "Score", "TaskInfo"]

RECIPE: dict[str, Any] = {"recipe": "learner", "epochs": 5, "batch_size": 32, "lr": 0.005}


class ContinualLearner:
    """A frozen backbone that learns new classes task by task, and keeps no images.

    `backbone` and `method` are names as for `dualprompt run`. `options` are the method's, or of training as in
    `{"train.lr": 0.01}`. Prediction is safe from several threads, also while another one teaches.
    """

    def __init__(
        self,
        backbone: str = "embedded",
        method: str = "dualprompt-lda",
        *,
        options: Mapping[str, Any] | None = None,
        input_size: int | None = None,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        values = merge({"train": RECIPE}, as_layer({"name": method, **METHODS[method].learner_defaults}))
        for key, value in (options or {}).items():
            own = not key.startswith(("train.", "checkpoint."))
            values = merge(values, nested(f"method.{key}" if own else key, value))
        self._build_on(foundation.build(values, backbone, input_size, device, seed))

    def _build_on(self, base: Foundation, model: Model | None = None, limit: Threshold | None = None) -> None:
        self._base, self._model = base, model or base.model()
        self._changing = threading.RLock()
        self._done: list[str] = []  # since it was loaded or saved
        self._limit = limit or Threshold()

    @property
    def threshold(self) -> float | None:
        """Below which trust the answer is "none of these"; None: never.

        Lessons set it, so that 99 % of the images left out of them get a class, unless it was set by hand.
        """
        return self._limit.value

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        self._limit = Threshold(value, "user")

    def calibrate_by_lessons(self) -> None:
        """Let lessons set the threshold, from now on and by those that were learned."""
        self._limit = predicting.by_lessons(self._known().trust)

    def _recalibrate(self) -> None:
        if self._limit.by == "lessons":
            self._limit = predicting.by_lessons(self._model.trust)

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """The tasks that it knows, oldest first."""
        return self._model.tasks

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it knows, oldest first."""
        return self._model.network.classes

    @property
    def side(self) -> int:
        """Width and height of the images that the network sees."""
        return self._base.view.side

    @property
    def interpolation(self) -> str:
        """How images are squeezed to a square: bilinear or bicubic."""
        return self._base.view.interpolation

    def network(self) -> torch.nn.Module:
        """Return what maps (batch, side, side, 3) uint8 to logits of `classes`, matched task and similarity.

        The task is a position in `tasks`.
        """
        return self._known().network

    def _known(self) -> Model:
        model = self._model
        if not model.tasks:
            raise DualPromptError("the model knows no classes yet; teach it some first, with `learn`")
        return model

    def learn(
        self,
        data: Data,
        name: str | None = None,
        *,
        epochs: int | None = None,
        progress: Progress = SILENT,
        again: bool = False,
        skip_bad: bool = False,
        nested: bool = False,
        work: str | Path | None = None,
        prompts: Prompting = "auto",
        minutes: float | None = None,
        over: sharded.Map | None = None,
    ) -> TaskInfo:
        """Learn a new task: a folder of class folders, a mapping from classes to images, or a dataset.

        One pass over the images gives a model in closed form. Each image is classified by a model of all the others,
        which gives the accuracy and the threshold. Methods that train throughout hold out a fifth of a class's images
        instead: at most 10, and none of fewer than 5. If it fails, the model stays as it is.

        Args:
            data: the images and their classes.
            name, epochs: what the task is called (the folder's name); passes where something is trained (the model's).
            progress: receives how far it is, and what the check of the images found (`lessons.check`).
            again, skip_bad, nested: accept what is refused else: known classes, unreadable images, folders in folders.
            work: a folder for checkpoints, from which interrupted learning continues; it is yours to remove then.
            prompts, minutes: train prompts where they win on held-out images (`auto`, at most 2 minutes), or as named.
            over: maps a function over shards of the images, as `map` or `sweeps.cluster.shards_on`; no prompts then.
        """
        with self._changing:
            model = self._model
            classes = gather(data, nested)
            teaching.refuse_known(model, classes, again)
            teaching.refuse_alone(self._base.options, classes)
            task_name = free_name(name, data, model.tasks, model.next_id)
            config = teaching.trained_for(self._base.config, epochs)
            if over is not None:
                progress.note("shards are read elsewhere: no copies are looked for, which flatter, nor blurred images")
                learned = sharded.learn(self._base, model, task_name, classes, over, progress, skip_bad)
                self._change(learned, f"learned '{task_name}'")
                return learned.tasks[-1]
            classes, pixels = teaching.read_classes(self._base.view, classes, skip_bad, progress)
            looks = Looks.at(pixels)
            progress.note_all(check.look(data, classes, looks).summary())
            with tempfile.TemporaryDirectory(prefix="dualprompt-") as temporary:
                place = Path(temporary if work is None else work)
                refuse_links(place)
                lesson = teaching.Lesson(task_name, classes, pixels, looks)
                learned = teach(self._base, model, config, lesson, place, progress, prompts, minutes)
            self._change(learned, f"learned '{task_name}'")
            return learned.tasks[-1]

    def more(self, data: Data, *, progress: Progress = SILENT, skip_bad: bool = False) -> tuple[TaskInfo, ...]:
        """Add images to classes that it knows; return the tasks that have them now.

        Where the head is solved for from sums (`dualprompt-lda`, `lda`, `klda`, `fecam`, `ridge`, `ranpac`,
        `dualprompt-rp`), they are added to these, and prompts stay. Other methods learn them `again`, as a task.
        `skip_bad` and the images held out are those of `learn`.
        """
        with self._changing:
            model, classes = self._model, gather(data)
            changing.refuse_unknown(model, list(classes))
            if not model.method.takes_more:
                return (self.learn(data, again=True, progress=progress, skip_bad=skip_bad),)
            classes, pixels = teaching.read_classes(self._base.view, classes, skip_bad, progress)
            looks = Looks.at(pixels)
            progress.note_all(check.look(data, classes, looks).of_more())
            changed, tasks = changing.more(self._base, model, classes, pixels, looks, progress)
            self._change(changed, f"added {counted(len(pixels), 'image')} of {few(classes)}")
            return tasks

    def rename(self, old: str, new: str) -> None:
        """Rename a class; a name that another class has is refused."""
        with self._changing:
            self._change(changing.rename(self._base, self._model, old, new), f"renamed '{old}' to '{new}'")

    def merge(self, classes: Sequence[str], into: str) -> None:
        """Make several classes one, called `into`: their probabilities add up, and all others stay what they are."""
        with self._changing:
            self._change(changing.merge(self._base, self._model, classes, into), f"merged {few(classes)} into '{into}'")

    def _change(self, model: Model, done: str) -> None:
        self._model = model
        self._done.append(done)
        self._recalibrate()

    def pixels(self, image: ImageLike) -> np.ndarray:
        """Return an image as the network takes it, (side, side, 3) uint8: upright, RGB, squeezed to a square."""
        return pixels_of(image, self.side, self.interpolation)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return the frozen backbone's features of images that `pixels` made, (images, dim)."""
        return self._base.features(pixels)

    @overload
    def predict(self, images: bytes | Image.Image | np.ndarray, top_k: int = 5, batch_size: int = 64) -> Answer: ...
    @overload
    def predict(self, images: str | Path, top_k: int = 5, batch_size: int = 64) -> Any: ...
    @overload
    def predict(self, images: Sequence[ImageLike], top_k: int = 5, batch_size: int = 64) -> list[Answer]: ...
    def predict(
        self, images: ImageLike | Sequence[ImageLike], top_k: int = 5, batch_size: int = 64
    ) -> Answer | list[Answer]:
        """Classify one image (returns an Answer), or a list or folder of them (returns a list)."""
        if batch_size < 1:
            raise DualPromptError(f"batch_size must be at least 1, found {batch_size}")
        model = self._known()
        found, alone = listed(images)
        answers: list[Answer] = []
        for start in range(0, len(found), batch_size):
            part = found[start : start + batch_size]
            pixels = read_all(part, self.side, self.interpolation)
            paths = [named(image) if isinstance(image, str | Path) else None for image in part]
            answered = predicting.answers_to(self._base, model, pixels, top_k, batch_size, self.threshold)
            answers.extend(replace(answer, path=path) for answer, path in zip(answered, paths, strict=True))
        return answers[0] if alone else answers

    def predict_pixels(self, pixels: np.ndarray, top_k: int = 5) -> list[Answer]:
        """Classify images that `pixels` made, (images, side, side, 3) uint8."""
        expected = (self.side, self.side, 3)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != expected:
            raise DualPromptError(f"pixels must be uint8 (images, {self.side}, {self.side}, 3), found {pixels.shape}")
        return predicting.answers_to(self._base, self._known(), pixels, top_k, threshold=self.threshold)

    def evaluate(self, data: Data, progress: Progress = SILENT, *, record: bool = False) -> Evaluation:
        """Evaluate it on labelled images: a folder of class folders, or a mapping.

        With `record`, the accuracy on each task's images is noted in the accuracy matrix, for the model as it is now.
        That is the only way to fill it below the diagonal: of old tasks nothing is kept to evaluate a later model by.
        """
        model = self._known()
        found = predicting.evaluate(self._base, model, gather(data), self.threshold, progress)
        if record:
            self._record(model, found.by_task)
        return found

    def _record(self, model: Model, by_task: Mapping[int, float]) -> None:
        with self._changing:
            if self._model is not model:
                raise DualPromptError("the model has changed while it was evaluated; evaluate it again")
            newest = model.tasks[-1]
            newest = replace(newest, measured={**newest.measured, **by_task})
            self._change(replace(model, tasks=(*model.tasks[:-1], newest)), "recorded an evaluation")

    def accuracy_matrix(self) -> list[list[float | None]]:
        """Return the accuracy on each task (column) after each task (row) in percent, None where it was not measured.

        On the diagonal: on the images that were held out when the task was learned. Elsewhere, and on the diagonal if
        there is one: the last recorded evaluation before the next task was learned.
        """
        return predicting.accuracy_matrix(self.tasks)

    def calibrate(self, unknown: ImageLike | Sequence[ImageLike] | None = None, *, accept: float = 0.95) -> Calibration:
        """Set `threshold` so that `accept` of the held-out images of known classes get a class, the others none.

        `unknown`, images or a folder of images that show none of the classes, tells what each threshold would refuse;
        without, images of each class do, asked as if it were not known. Later lessons leave the threshold as it is.
        """
        trust, strange = self._known().trust, None
        predicting.known_scores(trust, accept)  # or say why there are none
        if unknown is not None:
            strange = np.array([answer.trust for answer in self.predict(listed(unknown)[0], top_k=1)])
        found = predicting.calibration(trust, strange, accept)
        self.threshold = found.threshold
        return found

    def forget(self, what: str | int, kind: Kind | None = None) -> TaskInfo | str:
        """Forget a task, by name or id, or a class; return what was forgotten. `kind` says which of both is meant.

        Its classes can never be predicted again. Of a task, the E-Prompt, key, means, covariance and head rows are
        removed; of a class, its means and rows. Methods that share all their prompts (`shares_prompts`), as coda-prompt
        and l2p, have only rows to remove.

        Logits of other classes stay bit for bit as they are for every image that was not matched to a task that is gone
        (dualprompt-rp matches by classes: up to rounding, where the match stays the same). What tasks share stays: the
        G-Prompt, sums over all classes, how well each classifier did on images left out, later E-Prompts that began
        where this one ended, and the other rows. Forgetting the last class removes that as well.
        """
        with self._changing:
            model, gone = forget(self._base, self._model, what, kind)
            self._done = []  # of what is forgotten no name stays
            self._change(model, f"forgot a {'class' if isinstance(gone, str) else 'task'}")
            return gone

    @property
    def shares_prompts(self) -> bool:
        """Whether the method keeps nothing for a task alone but the classifier's rows."""
        return self._model.method.shares_prompts

    def info(self) -> dict[str, Any]:
        """Return what it knows and what it is made of, as JSON has it."""
        return saving.info(self._base, self._model, self._limit)

    def save(self, path: str | Path, *, held: bool = False, versions: int | None = None) -> Path:
        """Keep it in a folder, in place of the model that is there; an interrupted save leaves the old one.

        The old one becomes an earlier version (`dualprompt.model.versions`). The last 5 are kept, or so many as
        `versions` says, from now on; 0: nothing of what was stays. A model that a server or another command holds is
        refused; `held` says that we ourselves hold it.
        """
        path = with_home(path)
        others = contextlib.nullcontext() if held or not saved.is_model(path) else saved.held(path)
        with self._changing, others:
            facts = saving.facts(self._base, self._model, self._limit)
            why = "; ".join(self._done) or "saved"
            saved.write(path, facts, self._model.state, card.text(self.info()), why, versions)
            self._done = []
        return path

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", *, backbone: str | None = None) -> ContinualLearner:
        """Return the model in a folder; `backbone` says where its backbone lies now, if that has moved."""
        learner = cls.__new__(cls)
        learner._build_on(*saving.restore(with_home(path), device, backbone))
        return learner

    def push(self, repo_id: str, *, private: bool = True, token: str | None = None, message: str | None = None) -> str:
        """Upload it to a repository of the Hugging Face hub, made where there is none; return its address.

        `private`, `token` and `message` are those of `model.hub.upload`.
        """
        with tempfile.TemporaryDirectory(prefix="dualprompt-") as folder:
            text = message or f"{len(self.classes)} classes of {len(self.tasks)} tasks"
            return hub.upload(self.save(Path(folder) / "model"), repo_id, text, private, token)

    @classmethod
    def pull(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | None = None,
        device: str = "auto",
        backbone: str | None = None,
    ) -> ContinualLearner:
        """Return the model in a repository of the Hugging Face hub; `backbone` says where its backbone lies here."""
        learner = cls.load(hub.download(repo_id, revision, token), device, backbone=backbone)
        learner._done.append(f"pulled from {repo_id}")
        return learner
