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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from PIL import Image

from dualprompt import __version__
from dualprompt.backbones import weights
from dualprompt.backbones.known import EMBEDDED, REPLACED
from dualprompt.config import RunConfig, parse
from dualprompt.data.folder import one_form, refuse_case
from dualprompt.data.stream import TaskStream
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import digest
from dualprompt.methods.base import METHODS, Method, method_config, numbered
from dualprompt.methods.frozen_head import FrozenHead
from dualprompt.model import card, hub, saved
from dualprompt.model.images import (
    Data,
    ImageLike,
    complaint,
    gather,
    listed,
    named,
    pixels_of,
    read_all,
    read_some,
)
from dualprompt.model.names import Kind, find, free_name, refuse_unprintable
from dualprompt.model.network import HEAD, HeadRow, Kept, Network, bytes_of, compact, refuse_misfits, without
from dualprompt.model.results import Answer, Calibration, Evaluation, Level, Score, TaskInfo
from dualprompt.model.task import FEWEST, fingerprint, held_out, state_digest, task_of
from dualprompt.progress import SILENT, Progress
from dualprompt.training.checkpoint import State
from dualprompt.training.distributed import compute_dtype, launch
from dualprompt.training.feed import Feed
from dualprompt.training.loop import extend
from dualprompt.training.run import Run, config_digest
from dualprompt.training.setup import Setup
from dualprompt.values import merge, nested

__all__ = ["Answer", "Calibration", "ContinualLearner", "Evaluation", "ImageLike", "Level", "Score", "TaskInfo"]

DEFAULTS: dict[str, dict[str, Any]] = {
    # What is kept of old classes lets every task re-align the whole classifier. Its gentler rate left accuracy as it is
    # and took a fifth to a third off the log loss (12 photo classes, another small ViT).
    "dualprompt": {"head": "gaussian", "matching": "gaussian", "keys": "mean", "align_lr": 0.001},
}
RECIPE: dict[str, Any] = {"recipe": "learner", "epochs": 5, "batch_size": 32, "lr": 0.005}

# How sure it was of each held-out image, by task and class.
Trust: TypeAlias = Mapping[int, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class _Model:
    """All that a learner knows. It is replaced as a whole, so that whoever predicts sees the old one or the new."""

    method: Method
    network: Network
    tasks: tuple[TaskInfo, ...] = ()
    rows: tuple[HeadRow | None, ...] = ()
    next_id: int = 1
    trust: Trust = field(default_factory=dict)

    @property
    def kept(self) -> Kept:
        return Kept(self.method.state() if self.tasks else {}, self.rows)


class ContinualLearner:
    """A frozen backbone that learns new classes task by task, and keeps no images.

    `backbone` and `method` are names as for `dualprompt run`. `options` are the method's, or of training as in
    `{"train.lr": 0.01}`. Prediction is safe from several threads, also while another one teaches.
    """

    def __init__(
        self,
        backbone: str = "embedded",
        method: str = "dualprompt",
        *,
        options: Mapping[str, Any] | None = None,
        input_size: int | None = None,
        device: str = "auto",
        seed: int = 0,
    ) -> None:
        values: dict[str, Any] = {"method": {"name": method, **DEFAULTS.get(method, {})}, "train": RECIPE}
        for key, value in (options or {}).items():
            own = not key.startswith(("train.", "checkpoint."))
            values = merge(values, nested(f"method.{key}" if own else key, value))
        self._set_up(values, backbone, input_size, device, seed)

    def _set_up(self, values: dict[str, Any], backbone: str, input_size: int | None, device: str, seed: int) -> None:
        network = {"name": weights.absolute_name(backbone), "input_size": input_size}
        common = {"benchmark": {"name": "learner", "dataset": "images"}, "seed": seed, "device": device}
        config: RunConfig = parse(RunConfig, common | {"backbone": network} | values)
        options = method_config(config.method)
        config = config.model_copy(update={"method": options.model_dump(mode="json"), "device": _device(config.device)})
        checkpoint = weights.read(config.backbone.name)
        self._config, self._weights, self._options = config, checkpoint.info, options
        self._device = torch.device(config.device)
        self._dtype = compute_dtype(config, self._device)
        built = weights.build(checkpoint, input_size=config.backbone.input_size)
        kind = METHODS[options.name]
        if not issubclass(kind, FrozenHead) or (made := kind(options, built)).trains_backbone or made.joint:
            raise DualPromptError(f"method '{options.name}' trains the backbone or keeps images; take dualprompt")
        self._backbone = built.freeze().to(self._device, self._dtype)
        self._view = View(
            side=self._backbone.config.image_size,
            mean=self._weights.mean,
            std=self._weights.std,
            interpolation=self._weights.interpolation,
            test="resize",
            augment=config.train.augment,
        )
        self.threshold: float | None = None
        self._changing = threading.RLock()
        self._model = self._made((), (), 1, {}, {})

    def _made(
        self,
        tasks: tuple[TaskInfo, ...],
        rows: tuple[HeadRow | None, ...],
        next_id: int,
        trust: Trust,
        state: State,
        method: Method | None = None,
    ) -> _Model:
        if method is None:
            method = self._fresh()
            if state:
                method.load_state({name: value.to(self._device) for name, value in state.items()})
        network = Network(method, self._view.mean, self._view.std, rows)
        return _Model(method, network, tasks, rows, next_id, trust)

    def _fresh(self) -> Method:
        method = METHODS[self._options.name](self._options, self._backbone)
        method.compute_dtype = self._dtype
        return method.to(self._device)

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
        return self._view.side

    @property
    def interpolation(self) -> str:
        """How images are squeezed to a square: bilinear or bicubic."""
        return self._view.interpolation

    def network(self) -> torch.nn.Module:
        """Return what maps (batch, side, side, 3) uint8 to logits of `classes`, matched task and similarity.

        The task is a position in `tasks`.
        """
        return self._known().network

    def _known(self) -> _Model:
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
        work: str | Path | None = None,
    ) -> TaskInfo:
        """Learn a new task: a folder of class folders, a mapping from classes to images, or a dataset.

        A fifth of each class's images, at most 10 and none where there are fewer than 5, is held out and never trained
        on: it gives the accuracy and what `calibrate` needs. A class that is known already is refused, or with `again`
        learned once more, as a further expert for the same label. Images that cannot be read are refused, or with
        `skip_bad` left out and told to `progress`. If anything goes wrong, the model stays as it is.
        With `work`, a folder, learning that was interrupted goes on from its last checkpoint when it is asked for
        again; the folder is yours to remove afterwards.
        """
        with self._changing:
            model = self._model
            classes = gather(data)
            self._refuse_known(model, classes, again)
            self._refuse_alone(classes)
            task_name = free_name(name, data, model.tasks, model.next_id)
            train = self._config.train if epochs is None else {**self._config.train.model_dump(), "epochs": epochs}
            config: RunConfig = parse(RunConfig, {**self._config.model_dump(), "train": train})
            classes, pixels = self._read(classes, skip_bad, progress)
            with tempfile.TemporaryDirectory(prefix="dualprompt-") as temporary:
                place = Path(temporary if work is None else work)
                learned = self._train(model, config, task_name, classes, pixels, place, progress)
            self._model = learned
            return learned.tasks[-1]

    def _read(
        self, classes: dict[str, list[ImageLike]], skip_bad: bool, progress: Progress
    ) -> tuple[dict[str, list[ImageLike]], np.ndarray]:
        """Return the classes with the images that can be read, and their pixels."""
        labelled = [(name, image) for name, own in classes.items() for image in own]
        pixels, faults = read_some([image for _, image in labelled], self.side, self.interpolation, progress)
        if not faults:
            return classes, pixels
        if not skip_bad:
            raise DualPromptError(complaint(faults.values(), len(pixels)))
        progress.note(f"left out: {complaint(faults.values(), len(pixels))}")
        good = [row for row in range(len(pixels)) if row not in faults]
        left: dict[str, list[ImageLike]] = {name: [] for name in classes}
        for row in good:
            left[labelled[row][0]].append(labelled[row][1])
        if empty := [name for name, own in left.items() if not own]:
            raise DualPromptError(f"class '{empty[0]}' has no image that can be read; give some or leave it out")
        return left, pixels[good]

    def _train(
        self,
        model: _Model,
        config: RunConfig,
        name: str,
        classes: Mapping[str, Sequence[ImageLike]],
        pixels: np.ndarray,
        work: Path,
        progress: Progress,
    ) -> _Model:
        kept = compact(model.kept)
        labels = np.repeat(np.arange(len(classes)), [len(own) for own in classes.values()])
        held = held_out(labels, tuple(classes), config.seed)
        task = task_of(len(model.tasks), name, tuple(classes), len(kept.rows), pixels, labels, held)
        stream = TaskStream((task,), fingerprint(task), ())
        folder = work / digest(
            [config_digest(config), stream.fingerprint, self._weights.sha256, state_digest(kept.state)]
        )
        with saved.disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        fabric = launch(config)
        feed = Feed(config, self._view, self._backbone, fabric, progress)
        setup = Setup(config, fabric, self._fresh(), stream, feed, self._weights, self._dtype, self._pretrained)
        extend(setup, Run(folder, len(model.tasks), kept.state), progress)
        rows = (*kept.rows, *((model.next_id, label) for label in classes))
        learned = self._made(model.tasks, rows, model.next_id + 1, model.trust, {}, setup.method)
        info = TaskInfo(
            id=model.next_id,
            name=name,
            classes=tuple(classes),
            images=len(pixels),
            learned=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            bytes=bytes_of(setup.method.state(), setup.method.of_task, len(model.tasks)),
            accuracy=None,
        )
        learned = replace(learned, tasks=(*model.tasks, info))
        if not held.any():
            return learned
        truth = [tuple(classes)[label] for label in labels[held]]
        answers = self._answers(learned, pixels[held], 1, batch_size=64)
        right = [answer.top[0].label == label for answer, label in zip(answers, truth, strict=True)]
        trust: dict[str, list[float]] = {label: [] for label in dict.fromkeys(truth)}
        for answer, label in zip(answers, truth, strict=True):
            trust[label].append(round(answer.trust, 4))
        info = replace(info, accuracy=100 * sum(right) / len(right))
        return replace(learned, tasks=(*model.tasks, info), trust={**model.trust, info.id: trust})

    def _pretrained(self) -> Any:
        return weights.build(weights.read(self._config.backbone.name), input_size=self._config.backbone.input_size)

    def _refuse_known(self, model: _Model, classes: Mapping[str, Any], again: bool) -> None:
        refuse_unprintable("class", classes)
        owner = {label: task.name for task in model.tasks for label in task.classes}
        refuse_case("the classes to learn and those known", [*owner, *classes])
        if again:
            return
        if known := [name for name in classes if name in owner]:
            raise DualPromptError(
                f"class '{known[0]}' is known already, from task '{owner[known[0]]}', whose images are gone: its "
                "prompts cannot be trained on. Learn it as a further expert for the same label with again=True "
                "(--again), or forget it first"
            )

    def _refuse_alone(self, classes: Mapping[str, Any]) -> None:
        settles = getattr(self._options, "head", "linear") != "linear" or self._options.training_logits == "unmasked"
        if len(classes) == 1 and not settles:
            raise DualPromptError(
                f"one class alone cannot be learned by '{self._options.name}' with masked logits and a linear head; "
                "teach it with others, or set the option training_logits: unmasked or head: gaussian"
            )

    def pixels(self, image: ImageLike) -> np.ndarray:
        """Return an image as the network takes it, (side, side, 3) uint8: upright, RGB, squeezed to a square."""
        return pixels_of(image, self.side, self.interpolation)

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
            answered = self._answers(model, pixels, top_k, batch_size)
            answers.extend(replace(answer, path=path) for answer, path in zip(answered, paths, strict=True))
        return answers[0] if alone else answers

    def predict_pixels(self, pixels: np.ndarray, top_k: int = 5) -> list[Answer]:
        """Classify images that `pixels` made, (images, side, side, 3) uint8."""
        expected = (self.side, self.side, 3)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != expected:
            raise DualPromptError(f"pixels must be uint8 (images, {self.side}, {self.side}, 3), found {pixels.shape}")
        return self._answers(self._known(), pixels, top_k, batch_size=64)

    @torch.inference_mode()
    def _answers(self, model: _Model, pixels: np.ndarray, top_k: int, batch_size: int) -> list[Answer]:
        if top_k < 1:
            raise DualPromptError(f"top_k must be at least 1, found {top_k}")
        answers: list[Answer] = []
        for start in range(0, len(pixels), batch_size):
            part = torch.from_numpy(np.ascontiguousarray(pixels[start : start + batch_size])).to(self._device)
            logits, tasks, similarity = model.network(part)
            probability, best = logits.softmax(dim=1).topk(min(top_k, logits.shape[1]), dim=1)
            for values in zip(*(t.tolist() for t in (probability, best, tasks, similarity)), strict=True):
                answers.append(self._answer(model, *values))
        return answers

    def _answer(self, model: _Model, probability: list[float], best: list[int], task: int, similarity: float) -> Answer:
        names = model.network.classes
        top = tuple(Score(names[index], value) for index, value in zip(best, probability, strict=True))
        answer = Answer(None, top[0].label, top[0].probability, model.tasks[task].name, similarity, top)
        known = self.threshold is None or answer.trust >= self.threshold
        return answer if known else replace(answer, label=None)

    def evaluate(self, data: Data, progress: Progress = SILENT, *, record: bool = False) -> Evaluation:
        """Evaluate it on labelled images: a folder of class folders, or a mapping.

        With `record`, the accuracy on each task's images is noted in the accuracy matrix, for the model as it is now.
        That is the only way to fill it below the diagonal: of old tasks nothing is kept to evaluate a later model by.
        """
        model = self._known()
        classes = gather(data)
        if strange := [name for name in classes if name not in self.classes]:
            raise DualPromptError(f"class '{strange[0]}' is not known; {nearest(strange[0], self.classes)}")
        owners = {name: {task.name for task in model.tasks if name in task.classes} for name in classes}
        by_class, right, matched, rejected = {}, 0, 0, 0
        total = sum(map(len, classes.values()))
        with progress.bar("evaluate", total, "img") as bar:
            for name, images in classes.items():
                correct = 0
                for start in range(0, len(images), 64):
                    pixels = read_all(images[start : start + 64], self.side, self.interpolation)
                    for answer in self._answers(model, pixels, 1, 64):
                        correct += answer.label == name
                        matched += answer.task in owners[name]
                        rejected += answer.label is None
                    bar.advance(len(pixels))
                by_class[name] = 100 * correct / len(images)
                right += correct
        matching = 100 * matched / total if model.method.selections else None
        by_task = {}
        for task in model.tasks:
            counts = {name: len(classes[name]) for name in task.classes if name in classes}
            if counts:
                by_task[task.id] = sum(by_class[name] * n for name, n in counts.items()) / sum(counts.values())
        if record:
            self._record(model, by_task)
        return Evaluation(total, 100 * right / total, by_class, by_task, matching, 100 * rejected / total)

    def _record(self, model: _Model, by_task: Mapping[int, float]) -> None:
        with self._changing:
            if self._model is not model:
                raise DualPromptError("the model has changed while it was evaluated; evaluate it again")
            newest = model.tasks[-1]
            newest = replace(newest, measured={**newest.measured, **by_task})
            self._model = replace(model, tasks=(*model.tasks[:-1], newest))

    def accuracy_matrix(self) -> list[list[float | None]]:
        """Return the accuracy on each task (column) after each task (row) in percent, None where it was not measured.

        On the diagonal: on the images that were held out when the task was learned. Elsewhere, and on the diagonal if
        there is one: the last recorded evaluation before the next task was learned.
        """
        tasks = self.tasks
        return [
            [row.measured.get(task.id, task.accuracy if task is row else None) for task in tasks[: place + 1]]
            + [None] * (len(tasks) - place - 1)
            for place, row in enumerate(tasks)
        ]

    def calibrate(self, unknown: ImageLike | Sequence[ImageLike] | None = None, *, accept: float = 0.95) -> Calibration:
        """Set `threshold` so that `accept` of the held-out images of known classes get a class, the others none.

        `unknown`, images or a folder of images that show none of the classes, tells what each threshold would refuse.
        """
        model = self._known()
        if not 0 < accept <= 1:
            raise DualPromptError(f"accept must be above 0 and at most 1, found {accept}")
        scores = np.array([s for task in model.trust.values() for own in task.values() for s in own])
        if not len(scores):
            raise DualPromptError(
                f"no images were held out: every class had fewer than {FEWEST}; set threshold yourself (0 to 1)"
            )
        strange = np.empty(0)
        if unknown is not None:
            strange = np.array([answer.trust for answer in self.predict(listed(unknown)[0], top_k=1)])
        levels = []
        accepted = {0.99, 0.98, 0.95, 0.9, 0.8, 0.7, accept}
        for level in sorted({float(np.quantile(scores, 1 - wanted, method="lower")) for wanted in accepted}):
            refused = 100 * float(np.mean(strange < level)) if len(strange) else None
            levels.append(Level(level, 100 * float(np.mean(scores >= level)), refused))
        self.threshold = float(np.quantile(scores, 1 - accept, method="lower"))
        return Calibration(self.threshold, len(scores), len(strange), tuple(levels))

    def forget(self, what: str | int, kind: Kind | None = None) -> TaskInfo | str:
        """Forget a task, by name or id, or a class; return what was forgotten. `kind` says which of both is meant.

        Its classes can never be predicted again. The logits of all others stay as they are, bit for bit, for every
        image that was not matched to a task that is gone; dualprompt-rp matches by classes, so there it holds for
        every image whose match stays the same, up to rounding. Of a task, the E-Prompt, key, means, covariance and head
        rows are removed; of a class, its means and rows. What tasks share was shaped by the forgotten one too, and
        stays as it is: the G-Prompt, the covariance of all classes that matches images to tasks, later E-Prompts
        that began where this one ended, and the other rows. Forgetting the last class removes that as well. Methods
        that share all their prompts (`shares_prompts`), as coda-prompt and l2p, have only rows to remove.
        """
        with self._changing:
            model = self._model
            what = one_form(what) if isinstance(what, str) and what not in {t.name for t in model.tasks} else what
            task = find(model.tasks, what, kind)
            if task is not None:
                self._model = self._without(model, task.id, task.classes)
                return task
            for number in [task.id for task in model.tasks if what in task.classes]:
                model = self._without(model, number, (str(what),))
            self._model = model
            return str(what)

    def _without(self, model: _Model, number: int, labels: Sequence[str]) -> _Model:
        place, task = next((place, task) for place, task in enumerate(model.tasks) if task.id == number)
        rest = tuple(name for name in task.classes if name not in labels)
        rows = [i for i, row in enumerate(model.rows) if row is not None and row[0] == task.id and row[1] in labels]
        places = [task.classes.index(label) for label in labels] if rest else None
        kept = without(model.kept, model.method.of_task, place, places, rows)
        size = bytes_of(compact(kept).state, model.method.of_task, place) if rest else 0
        # What was measured on images of a class that is gone says nothing of those that are left.
        left = replace(task, classes=rest, bytes=size, accuracy=None)
        tasks = tuple(each if each is not task else left for each in model.tasks if each is not task or rest)
        trust = {
            number: {label: own for label, own in task_trust.items() if number != task.id or label not in labels}
            for number, task_trust in model.trust.items()
            if number != task.id or rest
        }
        if not tasks:
            return self._made((), (), model.next_id, {}, {})
        left_over = [{n: value for n, value in each.measured.items() if n != task.id} for each in tasks]
        tasks = tuple(replace(each, measured=own) for each, own in zip(tasks, left_over, strict=True))
        return self._made(tasks, kept.rows, model.next_id, trust, kept.state)

    @property
    def shares_prompts(self) -> bool:
        """Whether the method keeps nothing for a task alone but the classifier's rows."""
        own = set(self._model.method.of_task) - set(HEAD)
        return not any(numbered(self._model.kept.state, prefix) for prefix in own)

    def info(self) -> dict[str, Any]:
        """Return what it knows and what it is made of, as JSON has it."""
        model = self._model
        state = model.kept.state
        return {
            "classes": list(self.classes),
            "tasks": [task.to_dict() for task in model.tasks],
            "accuracy_matrix": self.accuracy_matrix(),
            "threshold": self.threshold,
            "side": self.side,
            "bytes": sum(value.nbytes for value in state.values()),
            "backbone": {
                "name": self._weights.name,
                "sha256": self._weights.sha256,
                "licence": self._weights.licence,
                "parameters": self._weights.parameters,
            },
            "method": dict(self._config.method),
            "device": str(self._device),
            "dualprompt": __version__,
        }

    def save(self, path: str | Path, *, held: bool = False) -> Path:
        """Keep it in a folder, in place of the model that is there; an interrupted save leaves the old one.

        A model that a server or another command holds is refused; `held` says that we ourselves hold it.
        """
        path = Path(path).expanduser()
        others = contextlib.nullcontext() if held or not saved.is_model(path) else saved.held(path)
        with self._changing, others:
            model = self._model
            facts = {
                "dualprompt": __version__,
                "backbone": {
                    "name": self._config.backbone.name,
                    "sha256": self._weights.sha256,
                    "input_size": self._config.backbone.input_size,
                },
                "method": self._config.method,
                "train": self._config.train.model_dump(mode="json"),
                "seed": self._config.seed,
                "threshold": self.threshold,
                "tasks": [task.to_dict() for task in model.tasks],
                "rows": model.rows,
                "next_id": model.next_id,
                "trust": [[number, own] for number, own in model.trust.items()],
            }
            saved.write(path, facts, model.kept.state, card.text(self.info()))
        return path

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", *, backbone: str | None = None) -> ContinualLearner:
        """Return the model in a folder; `backbone` says where its backbone lies now, if that has moved."""
        path = Path(path).expanduser()
        facts, state = saved.read(path)
        said = facts.backbone
        place = weights.absolute_name(said.name)
        if backbone is None and Path(place).is_absolute() and not Path(place).exists():
            raise DualPromptError(
                f"the backbone of {path} is not at {said.name} any more; say where it lies now with "
                f"`dualprompt info {path} --backbone PLACE` (in Python: load(…, backbone=PLACE))"
            )
        learner = cls.__new__(cls)
        values = {"method": facts.method, "train": facts.train}
        learner._set_up(values, backbone or said.name, said.input_size, device, facts.seed)
        if learner._weights.sha256 != said.sha256:
            if said.name == EMBEDDED.name and said.sha256 in REPLACED:
                raise DualPromptError(
                    f"{path} was made with an embedded backbone ({REPLACED[said.sha256]}) that this version of "
                    "dualprompt has replaced; learn its classes again, or keep the version that made it"
                )
            raise DualPromptError(
                f"{path} was made with another backbone than the '{learner._weights.name}' that is here "
                "(its SHA-256 differs); restore the file, or give its place with backbone="
            )
        learner.threshold = facts.threshold
        try:
            learner._take_over(facts, state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise DualPromptError(
                f"the model in {path} is damaged ({type(error).__name__}: {reason}); {saved.RESTORE}"
            ) from error
        return learner

    def _take_over(self, facts: saved.ModelRecord, state: State) -> None:
        """Become the model that was read; one that could not answer is refused now."""
        tasks = tuple(
            TaskInfo(t.id, t.name, tuple(t.classes), t.images, t.learned, t.bytes, t.accuracy, t.measured)
            for t in facts.tasks
        )
        model = self._made(tasks, tuple(facts.rows), facts.next_id, dict(facts.trust), state)
        if tasks:
            refuse_misfits(model.kept, model.method.of_task, [len(task.classes) for task in tasks])
            blank = torch.zeros(1, self.side, self.side, 3, dtype=torch.uint8, device=self._device)
            with torch.inference_mode():
                logits, task, similarity = model.network(blank)
            if not all(bool(torch.isfinite(value).all()) for value in (logits, similarity)) or int(task) >= len(tasks):
                raise ValueError("it has no answer to a black image")
        self._model = model

    def push(self, repo_id: str, *, private: bool = True, token: str | None = None, message: str | None = None) -> str:
        """Upload it to a repository of the Hugging Face hub, made where there is none; return its address."""
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
        return cls.load(hub.download(repo_id, revision, token), device, backbone=backbone)


def _device(name: str) -> str:
    if name != "auto":
        if name == "cuda" and not torch.cuda.is_available():
            raise DualPromptError("device: cuda was asked for, but PyTorch sees no GPU; use cpu or auto")
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
