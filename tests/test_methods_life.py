"""One life for every method: learn two tasks, be killed and go on, be saved, loaded, judged and shown."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dualprompt.config import RunConfig, compose, parse
from dualprompt.methods.base import METHODS, Method, method_config
from dualprompt.run.checkpoint import of_buffer, of_method
from dualprompt.run.folder import Run
from dualprompt.run.identity import config_digest
from dualprompt.training import group
from dualprompt.training.feed import Feed
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, prepare
from sandbox import NETWORKS, VIT, World, call, remains, start
from test_online import Until

SMALL: dict[str, dict[str, Any]] = {
    "anacp": {"projection": 40, "heads": 2, "samples": 8},
    "aper": {"bottleneck": 4, "first_factor": 1},
    "ease": {"bottleneck": 4},
    "hide-prompt": {"e_layers": [1, 2], "e_length": 2, "align_epochs": 2, "align_samples": 8, "centroids": 3},
    "inflora": {"rank": 3},
    "lae": {"layers": [1, 2], "rank": 3, "decay": 0.9},
    "lora": {"rank": 3},
    "sd-lora": {"rank": 3},
    "slca": {"align_epochs": 2, "align_samples": 8},
    "coda-prompt": {"layers": [1, 2], "components": 2, "length": 2},
    "dualprompt": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "align_steps": 20},
    "dualprompt-pool": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "pool_size": 3},
    "single-prompt": {"length": 3},
    "s-prompts": {"length": 3, "keys": 2},
    "klda": {"projection": 40},
    "dualnet": {"slow_batch": 4, "outer": 1},
    "dynaer": {"warmup_epochs": 1, "classifier_epochs": 2},
    "gdumb": {"cycles": 2},
    "l2p": {"pool_size": 4, "length": 2, "top_n": 2},
    "ranpac": {"projection": 40},
    "rpsnet": {"width": 2, "modules": 3, "tasks_per_path": 1},
    "dualprompt-lda": {"e_layers": [2, 3], "e_length": 3},
    "dualprompt-rp": {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "projection": 40},
}
FINE_TUNERS = [name for name in METHODS.names() if "train_backbone" in METHODS[name].Config.model_fields]
REHEARSE = ["bic", "co2l", "der++", "dualnet", "dynaer", "er", "gdumb", "rpsnet"]
HERDS = ["dynaer"]  # as many of every class, rounded down
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS.names()},
    **{f"{name}, frozen": (name, {"method.train_backbone": False}) for name in FINE_TUNERS},
    "bic, two rates": ("bic", {"method.head_lr": 0.02, "train.schedule": "cosine"}),
    "ft-seq, two rates": ("ft-seq", {"method.head_lr": 0.02, "train.schedule": "cosine"}),
    "dualnet, offered at a task's end": ("dualnet", {"method.offered": "task"}),
    "dynaer, aligned": ("dynaer", {"method.second_stage": "align", "method.warmup_epochs": 0}),
    "rpsnet, three candidates": ("rpsnet", {"method.candidates": 3}),
    "rpsnet, as released": ("rpsnet", {"method.candidates": 2, "method.parity": True}),
    "supsup, binary": ("supsup", {"method.inference": "binary", "method.superposed": "image"}),
    "supsup, min_entropy": ("supsup", {"method.inference": "min_entropy"}),
    "l2p, by task": ("l2p", {"method.pool": "by_task"}),
    "lwf, warmed up": ("lwf", {"method.warmup_epochs": 2}),
    "dualprompt-lda, no prompts": ("dualprompt-lda", {"method.prompts": "never"}),
    "dualprompt-lda, prompts": ("dualprompt-lda", {"method.prompts": "always"}),
    "dualprompt-rp, class token": ("dualprompt-rp", {"method.reads": "class"}),
    "ranpac, patches too": ("ranpac", {"method.reads": "class+patches"}),
    "ranpac, first session": (
        "ranpac",
        {
            "method.first_session": "prompts",
            "method.g_layers": [1],
            "method.e_layers": [2, 3],
            "method.first_factor": 2,
        },
    ),
    "s-prompts, one classifier": ("s-prompts", {"method.classifier": "shared"}),
    "lda, first session": ("lda", {"method.first_session": "prompts", "method.prompt_length": 2}),
    "ranpac, LoRA": ("ranpac", {"method.first_session": "lora", "method.rank": 3, "method.first_factor": 1}),
    "inflora, merged": ("inflora", {"method.merge": True}),
    "dualprompt, ridge": ("dualprompt", {"method.head": "ridge"}),
    "dualprompt, Gaussians": ("dualprompt", {"method.head": "gaussian"}),
    "dualprompt, several keys": ("dualprompt", {"method.matching": "keys"}),
    "dualprompt, Gaussian matching": ("dualprompt", {"method.matching": "gaussian"}),
}
CLASSES, TASKS, DIM = 6, 2, VIT.dim


RESNET = 4 + 4 * 4 + sum(5 * width for width in (8, 16, 32))  # channels of the BatchNorms of a ResNet-18 of width 4
CONVOLUTIONS = 9 * (12 + 4 * 16) + sum(9 * (w * w // 2 + 3 * w * w) + w * w // 2 for w in (8, 16, 32))
SUPSUP_TASK = -(-(CONVOLUTIONS + 3 * 32) // 8) + 2 * RESNET  # bytes of masks, and statistics


def packed(dim: int) -> int:
    """Numbers in the triangle of a symmetric matrix."""
    return dim * (dim + 1) // 2


# Means, samples, scatter, counts of samples and freedom, what images left out have shown, and biases of own heads.
LDA = CLASSES * (2 * DIM + 1) + packed(2 * DIM) + 2 + 9 * 12 + CLASSES
KEPT: dict[str, Callable[[int], int]] = {  # numbers kept besides what is trained; the argument is how many those are
    "dualprompt, ridge": lambda _: packed(DIM + 1) + (DIM + 1) * CLASSES,
    "dualprompt-lda": lambda _: LDA,
    "dualprompt-lda, no prompts": lambda _: LDA,
    "dualprompt-lda, prompts": lambda _: LDA + TASKS * 2 * 2 * 3 * DIM + CLASSES * 2 * DIM,
    # Two projections, sums and counts (each class's, and of all), and the first task's E-Prompt.
    "dualprompt-rp": lambda _: 2 * (2 * DIM * 40 + packed(40) + 40 * CLASSES + CLASSES + 1) + 2 * 2 * 3 * DIM,
    "dualprompt-rp, class token": lambda _: 2 * (DIM * 40 + packed(40) + 40 * CLASSES + CLASSES + 1) + 2 * 2 * 3 * DIM,
    "dualprompt, Gaussians": lambda _: CLASSES * DIM + TASKS * DIM**2,
    "dualprompt, several keys": lambda _: TASKS * 5 * DIM,
    "dualprompt, Gaussian matching": lambda _: CLASSES * DIM + DIM * (DIM + 1) // 2 + 1,
    # Statistics of BatchNorms: of the slow learner, the fast one and the projector, and how often the last two moved.
    **dict.fromkeys(("dualnet", "dualnet, offered at a task's end"), lambda _: 2 * RESNET + 2 * 60 + 4 + 2 * 16 + 1),
    **dict.fromkeys(
        ("supsup", "supsup, binary", "supsup, min_entropy"), lambda _: TASKS * SUPSUP_TASK + 3 * 32 + TASKS
    ),
    "ewc": lambda trained: 2 * trained,
    "ewc, frozen": lambda trained: 2 * trained,
    **dict.fromkeys(("s-prompts", "s-prompts, one classifier"), lambda _: TASKS * 2 * DIM + CLASSES),
    # Two projections and the head's, what is solved for, sums of both, means and a covariance.
    "anacp": lambda _: 3 * DIM * 40 + 2 * (40 * DIM + packed(40) + 40 * CLASSES) + CLASSES * DIM + packed(DIM) + 1,
    "klda": lambda _: DIM * 40 + 40 + CLASSES * 40 + 40 * 41 // 2 + 1,
    "lda": lambda _: CLASSES * DIM + DIM * (DIM + 1) // 2 + 1,
    "ridge": lambda _: packed(DIM + 1) + (DIM + 1) * CLASSES,
    "ranpac": lambda _: DIM * 40 + packed(40) + 40 * CLASSES,
    "ranpac, patches too": lambda _: 2 * DIM * 40 + packed(40) + 40 * CLASSES,
    **dict.fromkeys(("ranpac, first session", "ranpac, LoRA"), lambda _: DIM * 40 + packed(40) + 40 * CLASSES),
    "lda, first session": lambda _: CLASSES * DIM + DIM * (DIM + 1) // 2 + 1,
    # Prototypes of the first task's classes under one adapter, of the second's under two.
    "ease": lambda _: (3 * 1 + 3 * 2) * DIM,
    # Three centroids and as many deviations of each class, of both kinds of features.
    "hide-prompt": lambda _: 2 * CLASSES * 3 * 2 * DIM,
    "lae": lambda _: 2 * (2 * 3 * DIM + 2 * DIM * 3),  # as much as is trained, in two layers
    # Rows before the alignment, means and roots.
    **dict.fromkeys(("slca", "slca, frozen"), lambda _: CLASSES * (DIM + 1 + DIM + packed(DIM))),
}


def test_the_matrix_knows_who_rehearses() -> None:
    assert [name for name in METHODS.names() if "buffer_size" in METHODS[name].Config.model_fields] == REHEARSE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_life(variant: str, world: World, tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    arguments = preset_and_options(world, name, options)
    setup, truth = learn(arguments, tmp_path / "truth")

    check_result(variant, name, truth)
    check_config(setup, truth)
    check_loaded(setup, truth)
    out = killed_and_resumed(arguments, truth, tmp_path, often=variant == name)
    check_commands(out, truth.result(), shown=variant == name)


@pytest.mark.parametrize("name", FINE_TUNERS)
def test_a_backbone_trains_in_bf16(name: str, world: World, tmp_path: Path) -> None:
    setup, truth = learn(preset_and_options(world, name, {"precision": "bf16"}), tmp_path / "truth")
    check_result(name, name, truth)
    check_loaded(setup, truth)
    assert {p.dtype for p in setup.method.parameters()} == {torch.float32}  # small steps would be lost in bf16


@pytest.mark.parametrize(("name", "kind"), [("aper", "adapter"), ("lda", "lora"), ("ranpac", "lora")])
def test_a_first_session_goes_on_where_it_was(name: str, kind: str, world: World, tmp_path: Path) -> None:
    """The other lives end in the second task, which trains nothing here."""
    arguments = preset_and_options(world, name, {"method.first_session": kind, "method.first_factor": 2})
    setup, truth = learn(arguments, tmp_path / "truth")
    run = Run.create(tmp_path / "run", setup.config, setup.stream, setup.weights, setup.precision)
    with pytest.raises(KeyboardInterrupt):
        train(prepare(setup.config, share=setup), run, progress=Until(5))
    assert run.checkpoints.progress_path.exists()
    train(prepare(setup.config, share=setup), run)
    mine, wanted = remains(run.folder)["."], remains(truth.folder)["."]
    for what in ("result", "log", "state"):
        assert mine[what] == wanted[what], what


def preset_and_options(world: World, name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a preset of two tasks of three classes, and what is asked for on top: also augmentation, now and then."""
    small = {name: own | ({"buffer_size": 8} if name in REHEARSE else {}) for name, own in SMALL.items()}
    small |= {name: {"buffer_size": 8} for name in REHEARSE if name not in SMALL}
    benchmark = {"name": "tiny", "dataset": str(world.images), "tasks": TASKS}
    preset = world.preset_with("two-tasks.yaml", methods=small, benchmark=benchmark)
    augmented = {"train.augment": "random_resized_crop"} if "method.train_backbone" in options else {}
    common = {"method.name": name, "train.lr": 0.002, "checkpoint.every_seconds": 0} | NETWORKS.get(name, {})
    return str(preset), common | augmented | options


def learn(arguments: tuple[str, dict[str, Any]], folder: Path) -> tuple[Setup, Run]:
    """Learn without being disturbed, in this process."""
    preset, overrides = arguments
    config = group.plan([compose(preset, None, overrides)], baseline=False)[0].config
    setup = prepare(config)
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    train(setup, run)
    return setup, run


def check_result(variant: str, name: str, run: Run) -> None:
    result, state = run.result(), run.checkpoints.after_task(TASKS - 1)
    assert [len(row) for row in result["accuracy_matrix"]] == [1, 2]
    parameters = result["parameters"]
    # RPSNet keeps statistics of BatchNorms, a few more with every module that a path has drawn; InfLoRA directions of
    # old inputs, as many as these have.
    if name not in ("inflora", "rpsnet"):
        assert parameters["kept"]["count"] == KEPT.get(variant, lambda _: 0)(parameters["trained"])
    held = of_buffer(state)
    if name not in REHEARSE:
        assert result["buffer"] is None
        assert not held
        return
    size = sum(value.nbytes for key, value in held.items() if key in ("pixels", "labels", "notes", "reserved"))
    images = CLASSES if name in HERDS else 8
    assert result["buffer"] == {"images": images, "bytes": size}
    assert len(held["labels"]) == images
    assert ("notes" in held) == (name in ("der++", "dualnet"))
    assert ("reserved" in held) == (name == "bic")


def check_config(setup: Setup, run: Run) -> None:
    """The resolved config survives JSON: it parses to the same run."""
    manifest = json.loads(run.manifest_path.read_text())
    again = parse(RunConfig, manifest["config"])
    assert config_digest(again) == config_digest(setup.config) == manifest["identity"]["config"]
    assert method_config(again.method) == setup.method.config
    assert json.loads(again.model_dump_json()) == manifest["config"]


def logits(method: Method, feed: Feed, setup: Setup) -> torch.Tensor:
    method.eval()
    found = []
    for subset in setup.evaluated(TASKS):
        for spec in feed.evaluation(subset, method.uses_frozen):
            found.append(method.predict(feed.batch(subset.images, spec)).logits)
    return torch.cat(found)


def check_loaded(setup: Setup, run: Run) -> None:
    """What is on disk makes a fresh method predict the same, bit for bit."""
    fresh = prepare(setup.config)
    fresh.method.load_state(of_method(run.checkpoints.after_task(TASKS - 1)))
    assert fresh.method.state().keys() == setup.method.state().keys()
    mine, loaded = (logits(each.method, each.feed, each) for each in (setup, fresh))
    assert mine.shape[1] == CLASSES
    assert torch.equal(mine, loaded)
    both = mine, torch.stack(one_by_one(fresh))
    mine, alone = (found.float().masked_fill(found == -torch.inf, 0) for found in both)
    rounding = 0.05 if fresh.dtype == torch.bfloat16 else 1e-4
    assert (alone - mine).abs().max() <= rounding * mine.abs().max(), "an answer depends on what else is in its batch"


def one_by_one(setup: Setup) -> list[torch.Tensor]:
    """The logits of each image alone, last ones first, by a method that is told no label."""
    found, frozen = [], setup.method.uses_frozen
    setup.method.eval()
    for subset in setup.evaluated(TASKS)[::-1]:
        known = setup.feed.features(subset) if frozen else None
        for row in range(len(subset) - 1, -1, -1):
            spec = setup.feed.fixed(subset, torch.tensor([row]), None if known is None else known[row : row + 1])
            found.append(setup.method.predict(setup.feed.question(subset.images, spec)).logits[0])
    return found[::-1]


def killed_and_resumed(arguments: tuple[str, dict[str, Any]], truth: Run, tmp_path: Path, often: bool) -> Path:
    """Die in the second task's first epoch, `often` again after its last step, and still come to the same end."""
    preset, overrides = arguments
    words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
    lines = [json.loads(line) for line in truth.metrics_path.read_text().splitlines()]
    first_task = next(number for number, line in enumerate(lines, start=1) if line["event"] == "task")
    out, log = tmp_path / "run", tmp_path / "log"
    command = ["run", preset, "--no-baseline", "--out", out, *words]
    life = start(log, *command, watch=out, at=("open metrics.jsonl", first_task + 1))
    assert life.end() == -signal.SIGKILL, life.text
    assert not (out / "checkpoints" / "task-0002.safetensors").exists()
    trains = any(line["event"] == "epoch" for line in lines)
    assert (out / "checkpoints" / "progress.safetensors").exists() == trains
    if often:
        life = start(log, "resume", out, watch=out, at="os.rename checkpoints/.task-0002")
        assert life.end() == -signal.SIGKILL, life.text
    group.resume(out)
    mine, other = remains(out)["."], remains(truth.folder)["."]
    for what in ("result", "log", "state", "progress"):
        assert mine[what] == other[what], what
    return out


def check_commands(out: Path, result: dict[str, Any], shown: bool) -> None:
    judged = call("eval", out, "--json")
    assert judged.code == 0, judged.err
    assert judged.json["accuracy_matrix"] == result["accuracy_matrix"]
    assert judged.json["matching_matrix"] == result["matching_matrix"]
    if not shown:  # pictures take longest, and are the same for all variants
        return
    told = call("show", out)
    assert told.code == 0, told.err
    assert f"accuracy matrix of {result['method']}" in told.out
    assert f"{result['average_accuracy']:.2f}" in told.out


def test_every_method_is_in_the_overview_and_on_one_page() -> None:
    pages = {path.name: path.read_text() for path in (Path(__file__).parent.parent / "docs" / "methods").glob("*.md")}
    overview = pages.pop("index.md").partition("Where to begin")[0]
    families = {page: row for row in overview.splitlines() for page in pages if f"]({page})" in row}
    assert families.keys() == pages.keys()
    for name in METHODS.names():
        homes = [page for page, row in families.items() if f"`{name}`" in row]
        assert len(homes) == 1, (name, homes)
        assert f"`{name}`" in pages[homes[0]], name
