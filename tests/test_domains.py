"""Streams in which labels come back: domains of the same classes, from pictures to tables."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualprompt.config import BenchmarkConfig, compose
from dualprompt.data.cache import Store
from dualprompt.data.sources import Dataset
from dualprompt.data.stream import STREAMS, Plan, Stream, build_stream
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS, Batch, Method, StreamKind, method_config
from dualprompt.methods.er import ER
from dualprompt.progress import Advanced, Event, Progress
from dualprompt.run.checkpoint import of_buffer, of_method
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, prepare
from helpers import backbone_for
from sandbox import NETWORKS, World, call, remains, start

CLASSES = ("circle", "cross", "square")
REFUSE = {
    "ease": "a class has one prototype in each adapter's features",
    "hide-prompt": "it finds an image's task by its class",
    "bic": "it corrects the logits of new classes",
    "dualprompt-rp": "it finds an image's task by its class",
    "dynaer": "a task's backbone learns to tell its new classes",
    "rpsnet": "how much it distils is decided by the tasks",
    "supsup": "a mask holds the classes of one task",
}
SMALL: dict[str, dict[str, Any]] = {
    "anacp": {"projection": 40, "heads": 2, "samples": 8},
    "aper": {"bottleneck": 4, "first_factor": 1},
    "hide-prompt": {"e_layers": [1, 2]},
    "inflora": {"rank": 3},
    "lae": {"layers": [1, 2], "rank": 3},
    "lora": {"rank": 3},
    "sd-lora": {"rank": 3},
    "slca": {"align_epochs": 2, "align_samples": 8},
    "coda-prompt": {"layers": [1, 2], "components": 2, "length": 2},
    "dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "align_steps": 20},
    "dualprompt-pool": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "pool_size": 3},
    "single-prompt": {"length": 3},
    "s-prompts": {"length": 3, "keys": 2},
    "klda": {"projection": 40},
    "gdumb": {"cycles": 2, "buffer_size": 8},
    "l2p": {"pool_size": 4, "length": 2, "top_n": 2},
    "ranpac": {"projection": 40},
    "dualprompt-rp": {"g_layers": [1], "e_layers": [2, 3], "projection": 40},
    "dualnet": {"slow_batch": 4, "outer": 1, "buffer_size": 8},
    **{name: {"buffer_size": 8} for name in ("bic", "co2l", "der++", "er")},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS.names() if name not in REFUSE},
    "dualprompt, ridge": ("dualprompt", {"method.head": "ridge"}),
    "dualprompt, Gaussians": ("dualprompt", {"method.head": "gaussian", "method.matching": "gaussian"}),
    "s-prompts, one classifier": ("s-prompts", {"method.classifier": "shared"}),
    "l2p, by task": ("l2p", {"method.pool": "by_task"}),
    "lwf, warmed up": ("lwf", {"method.warmup_epochs": 1}),
    "ewc, unmasked": ("ewc", {"method.training_logits": "unmasked"}),
    "ranpac, first session": (
        "ranpac",
        {"method.first_session": "prompts", "method.g_layers": [1], "method.e_layers": [2, 3]},
    ),
}

KILLED = {
    "dualprompt",
    "s-prompts",
    "dualprompt, Gaussians",
    "frozen-head",
    "simple-cil",
    "lda",
    "ranpac",
    "er",
    "ewc",
    "co2l",
}


def draw_domain(folder: Path, seed: int, names: tuple[str, ...] = CLASSES) -> str:
    """Draw the classes in colours of the domain's own: noise around one colour a class, moved by the domain."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(names):
        for split, count in (("train", 5 + number % 2), ("test", 3)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                colour = (np.array([60, 120, 180]) * (number + 1) + 50 * seed) % 256
                pixels = colour + rng.normal(0, 30, size=(18, 20, 3))
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return str(folder)


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("domains")
    return [draw_domain(folder / name, seed) for seed, name in enumerate(("photos", "paintings", "sketches"))]


@pytest.fixture
def preset(world: World, domains: list[str]) -> str:
    benchmark = {"name": "domains", "stream": "domain", "dataset": domains[:2]}
    return str(world.preset_with("domains.yaml", methods=SMALL, benchmark=benchmark))


def stream(dataset: Any, seed: int = 0, **fields: Any) -> Stream:
    return build_stream(BenchmarkConfig(dataset=dataset, stream="domain", **fields), seed, Store(64, True))


def test_domains_share_their_labels(domains: list[str]) -> None:
    found = stream(domains, validation=0.2)
    assert [each.name for each in found.experiences] == ["photos", "paintings", "sketches"]
    assert found.classes == CLASSES
    assert found.returns
    for each in found.experiences:
        assert each.labels == each.seen == (0, 1, 2)
        assert each.new_labels == ((0, 1, 2) if each.index == 0 else ())
        assert each.classes == CLASSES
        assert [len(each.train), len(each.validation), len(each.test)] == [13, 3, 9]
        assert each.train.labels.bincount().tolist() == [4, 5, 4]
    assert len({id(each.train.images) for each in found.experiences}) == 3
    orders = {tuple(e.name for e in stream(domains, seed, class_order="shuffled").experiences) for seed in range(20)}
    assert len(orders) > 2
    assert all(set(order) == {"photos", "paintings", "sketches"} for order in orders)
    assert stream(domains[::-1]).fingerprint != stream(domains).fingerprint
    by_name = stream(domains, class_order=["sketches", "photos", "paintings"])
    assert [each.name for each in by_name.experiences] == ["sketches", "photos", "paintings"]


def test_classes_are_found_by_name_in_whatever_order_a_domain_lists_them(tmp_path: Path) -> None:
    one = draw_domain(tmp_path / "one", 0, ("b", "a"))
    (tmp_path / "two").mkdir()
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "two" / split / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(tmp_path / "two" / split / name / f"{i}.png")
    found = stream([one, str(tmp_path / "two")]).experiences[1]
    red = found.train.images.gather(found.train.indices).pixels[:, 0, 0, 0]
    assert [chr(value) for value in red.tolist()] == [found.classes[label] for label in found.train.labels]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("circle", "cross"), "'square' is in 'photos' and not in 'other'"),
        ((*CLASSES, "ring"), "'ring' is in 'other' and not in 'photos'"),
    ],
)
def test_domains_of_other_classes_are_refused(
    names: tuple[str, ...], message: str, domains: list[str], tmp_path: Path
) -> None:
    with pytest.raises(DualPromptError, match=f"domains have the same classes, but {message}"):
        stream([domains[0], draw_domain(tmp_path / "other", 4, names)])


def test_one_domain_is_none(domains: list[str]) -> None:
    for dataset in (domains[0], domains[:1]):
        with pytest.raises(DualPromptError, match="needs a list of at least 2 datasets"):
            stream(dataset)
    with pytest.raises(DualPromptError, match="unknown stream 'domian'; did you mean 'domain'"):
        build_stream(BenchmarkConfig(dataset=domains, stream="domian"), 0, Store(64, True))
    with pytest.raises(DualPromptError, match=r"in two tasks.*or set benchmark\.stream: domain"):
        build_stream(BenchmarkConfig(dataset=domains), 0, Store(64, True))


def learn(preset: str, overrides: dict[str, Any], folder: Path) -> tuple[Setup, Run]:
    config = group.plan([compose(preset, None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    train(setup, run)
    return setup, run


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_life_in_two_domains(variant: str, preset: str, tmp_path: Path) -> None:
    """Learn two domains, be loaded, and where something is kept of labels also be killed and go on to the same end."""
    name, options = VARIANTS[variant]
    common = {"method.name": name, "train.lr": 0.002, "checkpoint.every_seconds": 0}
    overrides = common | options | NETWORKS.get(name, {})
    setup, truth = learn(preset, overrides, tmp_path / "truth")
    result = truth.result()
    matrix = result["accuracy_matrix"]
    assert result["tasks"] == ["photos", "paintings"]
    assert [len(row) for row in matrix] == [1, 2]
    assert result["forgetting"] == matrix[0][0] - matrix[1][0]
    assert result["average_accuracy"] == pytest.approx(sum(matrix[1]) / 2)
    fresh = prepare(setup.config)
    fresh.method.load_state(of_method(truth.checkpoints.after_task(1)))
    assert fresh.method.state().keys() == setup.method.state().keys()
    assert torch.equal(logits(fresh), logits(setup))
    assert logits(setup).shape[1] == len(CLASSES)
    if variant in KILLED:
        killed_and_resumed(preset, overrides, truth, tmp_path)


def killed_and_resumed(preset: str, overrides: dict[str, Any], truth: Run, tmp_path: Path) -> None:
    """Die in the second domain, go on to the same end, and be evaluated."""
    out, log = tmp_path / "run", tmp_path / "log"
    words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
    lines = [json.loads(line) for line in truth.metrics_path.read_text().splitlines()]
    first = next(number for number, line in enumerate(lines, start=1) if line["event"] == "task")
    command = ("run", preset, "--no-baseline", "--out", out, *words)
    life = start(log, *command, watch=out, at=("open metrics.jsonl", first + 1))
    assert life.end() == -signal.SIGKILL, life.text
    group.resume(out)
    mine, other = remains(out)["."], remains(truth.folder)["."]
    for what in ("result", "log", "state"):
        assert mine[what] == other[what], what
    judged = call("eval", out, "--json")
    assert judged.code == 0, judged.err
    assert judged.json["accuracy_matrix"] == truth.result()["accuracy_matrix"]


def logits(setup: Setup) -> Tensor:
    method, feed = setup.method.eval(), setup.feed
    found = []
    for subset in setup.evaluated(2):
        for spec in feed.evaluation(subset, method.uses_frozen):
            found.append(method.predict(feed.batch(subset.images, spec)).logits)
    return torch.cat(found)


@pytest.mark.parametrize("name", REFUSE)
def test_who_cannot_take_domains_says_so_before_anything_is_written(name: str, preset: str, tmp_path: Path) -> None:
    words = [word for key, value in NETWORKS.get(name, {}).items() for word in (f"--{key}", value)]
    done = call("run", preset, "--method", name, "--no-baseline", "--out", tmp_path / "run", *words)
    assert done.code != 0
    assert re.search(f"'{name}' cannot learn a stream in which labels come back: {REFUSE[name]}", done.err)
    assert "\n" not in done.err.strip()
    assert not (tmp_path / "run").exists()


def make(name: str, **options: Any) -> Method:
    return METHODS[name](method_config({"name": name, **options}), backbone_for(name))


@pytest.mark.parametrize("name", METHODS.names())
def test_who_needs_borders_says_so(name: str) -> None:
    takes = {
        *("frozen-head", "ft-seq", "ft++", "er", "simple-cil", "ridge", "lda", "klda", "l2p", "lora", "ranpac"),
        *("anacp", "fecam"),
        *("coda-prompt", "der++", "dualprompt-pool", "single-prompt"),
    }
    if name in takes:
        make(name).accept(StreamKind(bordered=False))
        return
    with pytest.raises(DualPromptError, match=re.escape(f"'{name}' cannot learn a stream without known borders")):
        make(name).accept(StreamKind(bordered=False))
    make(name).accept(StreamKind())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("l2p", {"pool": "by_task"}),
        *(
            (name, {"first_session": "lora"})
            for name in ("simple-cil", "lda", "klda", "ridge", "ranpac", "fecam", "anacp")
        ),
    ],
)
def test_an_option_may_need_borders(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(DualPromptError, match="without known borders"):
        make(name, **options).accept(StreamKind(bordered=False))


def test_dualprompt_has_a_prompt_and_a_key_for_each_domain_and_one_head(preset: str, tmp_path: Path) -> None:
    _, run = learn(preset, {"method.name": "dualprompt"}, tmp_path / "run")
    states = [of_method(run.checkpoints.after_task(task)) for task in range(2)]
    assert sorted(name for name in states[1] if name.startswith(("bank.e", "bank.t"))) == [
        "bank.e_prompt.0",
        "bank.e_prompt.1",
        "bank.task_key.0",
        "bank.task_key.1",
    ]
    assert states[1]["head.weight.0"].shape == (3, 16)
    assert "head.weight.1" not in states[1]
    for name in ("bank.e_prompt.0", "bank.task_key.0"):
        assert torch.equal(states[0][name], states[1][name])  # of the first domain, untouched by the second
    assert not torch.equal(states[0]["head.weight.0"], states[1]["head.weight.0"])  # shared, so it goes on


def test_tables_and_pictures_of_domains(preset: str, domains: list[str], tmp_path: Path) -> None:
    done = call("run", preset, "--method", "simple-cil", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    shown = call("show", tmp_path / "run")
    assert shown.code == 0, shown.err
    assert "photos" in shown.out
    assert "paintings" in shown.out
    listed = call("data", "show", *domains[:2], "--out", tmp_path / "all.png", "--json")
    assert listed.code == 0, listed.err
    assert [Path(each["gallery"]).name for each in listed.json] == ["all-photos.png", "all-paintings.png"]
    assert all(Path(each["gallery"]).exists() for each in listed.json)


@STREAMS.register("drops")
def drops(config: BenchmarkConfig, seed: int, datasets: Sequence[Dataset]) -> list[Plan]:
    """Two experiences without borders: half of the images of two classes, then the other half and a third class."""
    [dataset] = datasets
    halves = [slice(0, None, 2), slice(1, None, 2)]
    first = Plan("first", 0, [2, 0], [dataset.classes[i] for i in (2, 0)], [halves[0]] * 2, border=False)
    second = Plan("second", 0, [0, 1, 2], dataset.classes, [halves[1], slice(None), halves[1]], border=False)
    return [first, second]


def test_labels_are_numbered_as_they_come(domains: list[str]) -> None:
    found = build_stream(BenchmarkConfig(dataset=domains[0], stream="drops"), 0, Store(64, True))
    first, second = found.experiences
    assert found.classes == ("square", "circle", "cross")
    assert (first.labels, first.new_labels, first.seen) == ((0, 1), (0, 1), (0, 1))
    assert (second.labels, second.new_labels, second.seen) == ((0, 1, 2), (2,), (0, 1, 2))
    assert second.classes == ("square", "circle", "cross")
    assert first.train.labels.bincount().tolist() == [3, 3]
    assert second.train.labels.bincount().tolist() == [2, 2, 6]
    assert not found.bordered


class Watched(ER):
    """Notes how many batches are replayed with each step, and how many images."""

    replayed: list[tuple[int, int]]

    def loss(self, batch: Batch) -> Tensor:
        self.replayed.append((len(batch.replay), sum(len(each.labels) for each in batch.replay)))
        return super().loss(batch)


@pytest.fixture
def drops_preset(world: World, domains: list[str]) -> str:
    benchmark = {"name": "drops", "stream": "drops", "dataset": domains[0]}
    return str(world.preset_with("drops.yaml", methods=SMALL, benchmark=benchmark))


@pytest.mark.parametrize("options", [{}, {"method.train_backbone": False}])
def test_a_buffer_is_filled_as_images_are_trained_on(
    options: dict[str, Any], drops_preset: str, tmp_path: Path
) -> None:
    overrides = {"method.name": "er", "method.buffer_size": 5, "train.batch_size": 2, **options}
    config = group.plan([compose(drops_preset, None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    assert isinstance(setup.method, ER)
    method = Watched(setup.method.config, setup.backbones)
    method.accept(StreamKind(returns=True, bordered=False))
    method.replayed = []
    run = Run.create(tmp_path / "run", config, setup.stream, setup.weights, setup.precision)
    train(dataclasses.replace(setup, method=method), run)
    # Six images of the first experience make three steps: none is replayed in the first, all two are in the second.
    assert method.replayed[:3] == [(0, 0), (1, 2), (1, 2)]
    assert len(method.replayed) == 2 * 3 + 2 * 5  # two epochs
    held = of_buffer(run.checkpoints.after_task(1))
    assert int(held["seen"]) == 6 + 10  # each image once, in however many epochs
    assert len(held["labels"]) == 5


def test_a_run_without_borders_goes_on_where_it_was_killed(drops_preset: str, tmp_path: Path) -> None:
    overrides = {"method.name": "er", "method.buffer_size": 5, "train.batch_size": 2, "checkpoint.every_seconds": 0}
    setup, truth = learn(drops_preset, overrides, tmp_path / "truth")
    for steps, name in ((7, "one"), (14, "two")):  # in the first epoch of the second experience, and in the second
        out = tmp_path / name
        run = Run.create(out, setup.config, setup.stream, setup.weights, setup.precision)
        again = prepare(setup.config)
        with pytest.raises(KeyboardInterrupt):
            train(again, run, progress=Until(steps))
        assert (run.checkpoints.progress_path).exists()
        again = prepare(setup.config)
        train(again, run)
        mine, other = remains(out)["."], remains(truth.folder)["."]
        for what in ("result", "log", "state"):
            assert mine[what] == other[what], what


class Until(Progress):
    """Ends the process's work when a training step is told of for the `steps`-th time."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def receive(self, event: Event) -> None:
        if isinstance(event, Advanced) and event.work.kind == "training":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
