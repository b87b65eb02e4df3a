"""An online stream from its images to its numbers: what the method is told, the curve, and going on after a death."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualprompt import metrics
from dualprompt.config import compose
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, TaskView
from dualprompt.methods.frozen_head import FrozenHead, FrozenHeadConfig
from dualprompt.methods.simple_cil import SimpleCIL
from dualprompt.progress import Advanced, Event, Progress
from dualprompt.run.checkpoint import of_buffer
from dualprompt.run.folder import Run
from dualprompt.training import group, loop
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, kind_of, prepare
from dualprompt.training.steps import Eager, Recorded
from helpers import backbone_for
from sandbox import World, call, remains, shell
from test_steps import Tape

EVERY = 10
SMALL: dict[str, dict[str, Any]] = {
    "anacp": {"projection": 30, "heads": 2, "samples": 8},
    "coda-prompt": {"layers": [1, 2], "components": 3, "length": 2},
    "der++": {"buffer_size": 6},
    "dualprompt-pool": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "pool_size": 3},
    "er": {"buffer_size": 6},
    "klda": {"projection": 30},
    "l2p": {"pool_size": 4, "length": 2, "top_n": 2},
    "lora": {"rank": 3},
    "ranpac": {"projection": 30},
    "single-prompt": {"length": 3},
}
TAKE = ["fecam", "frozen-head", "ft-seq", "ft++", "lda", "ridge", "simple-cil", *SMALL]


@pytest.fixture(scope="module")
def preset(world: World) -> str:
    benchmark = {"name": "blurry", "dataset": str(world.images), "stream": "si-blurry", "tasks": 3, "disjoint": 0.5}
    benchmark |= {"evaluate_every": EVERY, "class_order": "shuffled"}
    recipes = {"plain": {"train": {"epochs": 1, "batch_size": 4, "lr": 0.02}}}
    return str(world.preset_with("blurry.yaml", methods=SMALL, benchmark=benchmark, recipes=recipes))


def begin(preset: str, folder: Path, **overrides: Any) -> tuple[Setup, Run]:
    """Prepare a run that has not begun."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    config = group.plan([compose(preset, None, {"checkpoint.every_seconds": 0} | dotted)], baseline=False)[0].config
    setup = prepare(config)
    return setup, Run.create(folder, config, setup.stream, setup.weights, setup.precision)


def learn(preset: str, folder: Path, method: str, **overrides: Any) -> tuple[Setup, Run]:
    setup, run = begin(preset, folder, method__name=method, **overrides)
    train(setup, run)
    return setup, run


class Spied(FrozenHead[FrozenHeadConfig]):
    """Notes all that a method is told, in order."""

    told: list[tuple[str, Any]]

    def begin_task(self, task: TaskView) -> None:
        self.told.append(("begin", task))
        super().begin_task(task)

    def loss(self, batch: Batch) -> Tensor:
        assert batch.task is None
        self.told.append(("batch", batch.labels.tolist()))
        return super().loss(batch)

    def end_task(self, task: TaskView) -> None:
        self.told.append(("end", task))


class SpiedMeans(SimpleCIL):
    """The same of a method without gradient steps."""

    told: list[tuple[str, Any]]

    def begin_task(self, task: TaskView) -> None:
        self.told.append(("begin", task))
        super().begin_task(task)

    def end_task(self, task: TaskView) -> None:
        self.told.append(("end", task))
        super().end_task(task)


def spied(kind: Any, preset: str, folder: Path, **overrides: Any) -> tuple[Setup, list[tuple[str, Any]]]:
    setup, run = begin(preset, folder, method__name=kind.Config().name, **overrides)
    method = kind(setup.method.config, setup.backbones)
    method.accept(kind_of(setup.stream))
    method.told = []
    train(replace(setup, method=method), run)
    return setup, method.told


class SettingAside(Spied):
    """A mistake of who writes a method: of what comes once, nothing can be set aside."""

    @property
    def hold_out(self) -> float:
        return 0.5


def test_who_sets_images_aside_learns_no_online_stream(preset: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sets no images aside"):
        spied(SettingAside, preset, tmp_path / "run")


@pytest.mark.parametrize("updates", [1, 3])
def test_a_method_is_told_of_labels_when_they_come_and_of_no_border(updates: int, preset: str, tmp_path: Path) -> None:
    setup, told = spied(Spied, preset, tmp_path / "run", train__updates=updates)
    [task] = setup.stream.experiences
    labels, come, trained = task.train.labels.tolist(), 0, list[int]()
    for what, told_now in told[:-1]:
        if what == "batch":
            trained += told_now
            continue
        come = len(trained) // updates  # before this batch
        batch = labels[come : come + 4]
        known = set(labels[:come])
        assert told_now.targets.tolist() == batch, "it sees the images that come, and no others"
        assert len(told_now.queries()) == len(batch)
        assert sum(len(each.labels) for each in told_now.batches()) == len(batch)
        assert set(told_now.labels) == set(told_now.seen) == known | set(batch), "labels of the future are not told"
        assert set(told_now.new_labels) == set(batch) - known
        assert told_now.new_labels, "without a new label there is nothing to begin"
        assert told_now.name == "stream"
    repeated = [labels[i : i + 4] for i in range(0, len(labels), 4) for _ in range(updates)]
    assert trained == [label for batch in repeated for label in batch], "each batch when it comes, and never again"
    assert told[-1][0] == "end"
    assert not [what for what, _ in told[:-1] if what == "end"]


def test_without_gradient_steps_a_method_gets_what_came_since_the_last_evaluation(preset: str, tmp_path: Path) -> None:
    setup, told = spied(SpiedMeans, preset, tmp_path / "run")
    [task] = setup.stream.experiences
    assert [what for what, _ in told] == ["begin", "end"] * (len(told) // 2)
    views = [view for what, view in told if what == "end"]
    assert [len(view.targets) for view in views] == [12, 8, 12, 7]  # 10, 20 and 30 are reached with batches of 4
    assert torch.cat([view.targets for view in views]).tolist() == task.train.labels.tolist()
    for view, stop in zip(views, (12, 20, 32, 39), strict=True):
        assert set(view.seen) == set(task.train.labels[:stop].tolist())


def twin(setup: Setup, updates: int = 1) -> Iterator[tuple[int, float]]:
    """Train a linear head on frozen features by hand; yield how many images had come, and the accuracy, at each batch.

    One Adam holds all rows, and is given those of new labels when they come.
    """
    [task] = setup.stream.experiences
    features, tested = setup.feed.features(task.train), setup.feed.features(task.test)
    rows: list[Tensor] = []
    optimiser = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=setup.config.train.lr)
    known = 0
    for start in range(0, len(features), 4):
        x, y = features[start : start + 4], task.train.labels[start : start + 4]
        new = int(y.max()) + 1 - known
        if new > 0:
            rows.append(torch.zeros(new, features.shape[1] + 1, requires_grad=True))
            optimiser.add_param_group({"params": [rows[-1]]})
            known += new
        for _ in range(updates):
            weight = torch.cat(rows)
            loss = F.cross_entropy(x @ weight[:, :-1].T + weight[:, -1], y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        weight = torch.cat(rows).detach()
        here = task.test.labels < known
        right = (tested[here] @ weight[:, :-1].T + weight[:, -1]).argmax(dim=1) == task.test.labels[here]
        yield start + len(x), 100 * float(right.float().mean())


@pytest.mark.parametrize("updates", [1, 2])
def test_the_curve_is_that_of_a_twin_that_is_trained_by_hand(updates: int, preset: str, tmp_path: Path) -> None:
    setup, run = learn(preset, tmp_path / "run", "frozen-head", train__updates=updates)
    by_hand = dict(twin(setup, updates))
    said = run.result()
    [task] = setup.stream.experiences
    assert [images for images, _, _ in said["anytime_curve"]] == [12, 20, 32]
    assert [classes for _, classes, _ in said["anytime_curve"]] == [
        len(set(task.train.labels[:n].tolist())) for n in (12, 20, 32)
    ]
    assert [accuracy for _, _, accuracy in said["anytime_curve"]] == pytest.approx([by_hand[n] for n in (12, 20, 32)])
    assert len({accuracy for _, _, accuracy in said["anytime_curve"]}) > 1
    assert said["area_under_curve"] == pytest.approx(sum(by_hand[n] for n in (12, 20, 32)) / 3)
    assert said["last_accuracy"] == pytest.approx(by_hand[39])
    assert said["last_accuracy"] == run.result()["average_accuracy"]
    lines = [line for line in run.lines() if line["event"] == "anytime"]
    logged = [(line["images"], line["classes"], line["accuracy"]) for line in lines]
    assert logged == [tuple(point) for point in said["anytime_curve"]]


def test_the_area_is_the_mean_of_evenly_spaced_evaluations() -> None:
    assert metrics.area_under_curve([(10, 2, 50.0), (20, 4, 20.0), (30, 4, 35.0)]) == 35.0
    with pytest.raises(ValueError, match="at least one point"):
        metrics.area_under_curve([])
    assert metrics.anytime([], [[40.0]]) == {"area_under_curve": None, "last_accuracy": 40.0, "anytime_curve": []}


def test_sums_do_not_care_in_which_portions_images_come(preset: str, tmp_path: Path) -> None:
    for method in ("simple-cil", "lda"):
        ends = [
            learn(preset, tmp_path / f"{method}-{every}", method, benchmark__evaluate_every=every)[0].method.state()
            for every in (5, 10, None)
        ]
        for other in ends[1:]:
            rows = [
                torch.cat([v for k, v in sorted(each.items()) if k.startswith("head.weight")])
                for each in (ends[0], other)
            ]
            torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)


class Until(Progress):
    """Ends the process's work when training is told of for the `steps`-th time."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def receive(self, event: Event) -> None:
        if isinstance(event, Advanced) and event.work.kind == "training":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


# Of methods that are alike in what they keep, one: lda for ridge, klda and simple-cil; der++ for er; ft-seq for ft++.
LIVE = [name for name in TAKE if name not in ("er", "ft++", "klda", "ridge", "simple-cil")]


@pytest.mark.parametrize("method", LIVE)
def test_a_life(method: str, preset: str, tmp_path: Path) -> None:
    """Learn; die at several moments and go on to the same end and the same curve, bit for bit; be loaded."""
    options: dict[str, Any] = {"train__updates": 2, "train__augment": "random_resized_crop"}
    setup, truth = learn(preset, tmp_path / "truth", method, **options)
    result, wanted = truth.result(), remains(truth.folder)["."]
    assert result["tasks"] == ["stream"]
    assert len(result["anytime_curve"]) == 3
    portions = 10 if any(line["event"] == "epoch" for line in truth.lines()) else 4
    for death in {2, portions - 1, portions} if method in ("frozen-head", "lda", "der++") else {2}:
        folder = tmp_path / f"{method}-{death}"
        run = Run.create(folder, setup.config, setup.stream, setup.weights, setup.precision)
        with pytest.raises(KeyboardInterrupt):
            train(prepare(setup.config, share=setup), run, progress=Until(death))
        assert run.checkpoints.progress_path.exists()
        train(prepare(setup.config, share=setup), run)
        mine = remains(run.folder)["."]
        for what in ("result", "log", "state", "progress"):
            assert mine[what] == wanted[what], (what, death)
    fresh = prepare(setup.config)
    fresh.method.load_state({k: v for k, v in truth.checkpoints.after_task(0).items() if not k.startswith("buffer/")})
    for mine, loaded in zip(logits(setup), logits(fresh), strict=True):
        assert torch.equal(mine, loaded)
    if method == "der++":
        held = of_buffer(truth.checkpoints.after_task(0))
        assert int(held["seen"]) == 39  # each image was offered once
        assert len(held["labels"]) == 6
        assert held["notes"].shape == (6, 6)


def logits(setup: Setup) -> list[Tensor]:
    method, feed = setup.method.eval(), setup.feed
    [subset] = setup.evaluated(1)
    specs = feed.evaluation(subset, method.uses_frozen)
    return [method.predict(feed.batch(subset.images, spec)).logits for spec in specs]


@pytest.mark.parametrize("method", ["frozen-head", "single-prompt", "coda-prompt"])
def test_recorded_steps_learn_the_same(
    method: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record holds tensors of its moment: labels that come call for another, and evaluations do not disturb it."""
    _, plain = learn(preset, tmp_path / "plain", method, train__updates=3)
    tape = Tape()

    def recorded(step: Callable[[Any], None], fabric: Any, full: int, record: bool = True) -> Recorded[Any]:
        return Recorded(Eager(step, fabric.device, full), tape)

    monkeypatch.setattr(loop, "carried_out", recorded)
    _, other = learn(preset, tmp_path / "recorded", method, train__updates=3)
    assert tape.told.count("replay") > 3
    mine, wanted = remains(other.folder)["."], remains(plain.folder)["."]
    for what in ("result", "log", "state"):
        assert mine[what] == wanted[what], what


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--train.epochs", 3),
            "train.epochs is 3, but stream 'si-blurry' brings each image once; set train.epochs: 1",
        ),
        (("--benchmark.evaluate_every", 40), "benchmark.evaluate_every is 40, but the stream has 39 images"),
        (
            ("--benchmark.stream", "class", "--benchmark.disjoint", "null"),
            "benchmark.evaluate_every is for online streams, and 'class' is none",
        ),
        (
            ("--method", "dualprompt", "--method.e_layers", 3),
            "a task has an E-Prompt of its own; dualprompt-pool has a pool for all images",
        ),
        (("--method", "s-prompts"), "a domain has a prompt, keys and a classifier of its own"),
        (("--method", "lwf"), "it learns task by task"),
        (("--method", "bic"), "in which labels come back: it corrects the logits of new classes"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: tuple[object, ...], message: str, preset: str, tmp_path: Path
) -> None:
    done = call(
        "run",
        preset,
        "--no-baseline",
        "--out",
        tmp_path / "run",
        *(words if "--method" in words else ("--method", "frozen-head", *words)),
    )
    assert message in done.error
    assert not (tmp_path / "run").exists()


def test_every_method_takes_an_online_stream_or_says_why_not(preset: str) -> None:
    kind = kind_of(prepare(compose(preset, None, {"method.name": "frozen-head"})).stream)
    assert (kind.returns, kind.bordered, kind.online) == (True, False, True)
    for name in METHODS.names():
        method = METHODS[name](METHODS[name].Config(name=name), backbone_for(name))
        refuses = nullcontext() if name in TAKE else pytest.raises(DualPromptError, match="cannot learn a stream")
        with refuses:
            method.accept(kind)


def test_the_command_shows_the_curve(preset: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = call("run", preset, "--method", "simple-cil", "--out", out)
    assert done.code == 0, done.err
    assert "after 12 images" in done.err
    result = json.loads((out / "result.json").read_text())
    assert f"{result['area_under_curve']:.2f}" in done.out
    assert "A_auc" in done.out
    judged = call("eval", out, "--json")
    assert judged.code == 0, judged.err
    assert judged.json["accuracy_matrix"] == result["accuracy_matrix"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single-prompt", "der++", "lda"])
def test_two_processes_learn_what_one_does(method: str, preset: str, tmp_path: Path) -> None:
    """Also the classes of a minibatch are those of both; batches of 3 make parts of 1 and 2."""
    states = []
    for devices in (1, 2):
        out, words = tmp_path / str(devices), ("--train.batch_size", 3, "--train.updates", 2, "--device", "cpu")
        done = shell("run", preset, "--method", method, "--no-baseline", "--out", out, "--devices", devices, *words)
        assert done.code == 0, done.err
        states.append((Run(out).result(), Run(out).checkpoints.after_task(0)))
    (one, state), (two, other) = states
    assert one["anytime_curve"] == two["anytime_curve"]
    assert one["average_accuracy"] == two["average_accuracy"]
    assert state.keys() == other.keys()
    for name, value in state.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
