"""Whatever happens to a file that we read back: it is read as something whole, or refused in one line.

So many mutations are tried of each file; `tools/faults.py files --files N` tries more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dualprompt.backbones import weights
from dualprompt.config import compose
from dualprompt.data.cache import Decoded, Store, decode
from dualprompt.data.folder import load_folder
from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.learning import card
from dualprompt.methods.base import method_config
from dualprompt.studies import publish, tables
from dualprompt.studies.store import Obtained
from dualprompt.training import checkpoint, group
from dualprompt.training.checkpoint import Checkpoints
from dualprompt.training.run import Run
from dualprompt.training.tracking import _Story
from mutations import changed, changed_archive, changed_json, changed_lines, changed_tensors, damaged
from sandbox import VIT, World, call, interrupted
from test_vit_parity import random_google

Mutate = Callable[[bytes, Random], bytes]
EXAMPLES = int(os.environ.get("DUALPROMPT_EXAMPLES", "25"))
many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
randomly = given(rng=st.randoms(use_true_random=False))


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert call("run", world.preset, "--out", out, "--train.epochs", 1).code == 0
    return out


@pytest.fixture(scope="module")
def stopped(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(world, tmp_path_factory.mktemp("stopped") / "run", "--checkpoint.every_seconds", 0)


@contextlib.contextmanager
def mutated(path: Path, mutate: Mutate, rng: Random) -> Iterator[None]:
    content = path.read_bytes()
    try:
        path.write_bytes(mutate(content, rng))
        yield
    finally:
        path.write_bytes(content)


def outcome(read: Callable[[], Any]) -> Any:
    """What was read, or the one line that it was refused with; any other exception fails the test."""
    refused = ""
    try:
        return read()
    except DualPromptError as error:
        refused = str(error)
    assert refused.isprintable()
    assert 0 < len(refused) < 2000
    return None


def uses_model(path: Path) -> None:
    """Do with a model what commands and the server do."""
    learner = ContinualLearner.load(path, "cpu")
    json.dumps(learner.info(), allow_nan=False)
    card.text(learner.info())
    learner.accuracy_matrix()
    if learner.tasks:
        answers = learner.predict_pixels(np.full((2, learner.side, learner.side, 3), 200, np.uint8))
        json.dumps([answer.to_dict() for answer in answers], allow_nan=False)
        learner.forget(learner.tasks[0].id)


@many
@randomly
def test_model_json(rng: Random, model: Path) -> None:
    with mutated(model / "model.json", changed_json, rng):
        outcome(lambda: uses_model(model))


@many
@randomly
def test_tensors_of_a_model(rng: Random, model: Path) -> None:
    tensors = next(model.glob("weights-*"))
    before = {name: value.clone() for name, value in load_file(tensors).items()}
    with mutated(tensors, changed_tensors, rng):
        found = outcome(lambda: ContinualLearner.load(model, "cpu"))
        if found is not None:
            assert {name: value.tolist() for name, value in load_file(tensors).items()} == {
                name: value.tolist() for name, value in before.items()
            }


def signed(model: Path, tensors: Path) -> None:
    """Write the checksum of changed tensors into model.json, as an enemy would."""
    facts = json.loads((model / "model.json").read_text())
    facts["tensors"]["sha256"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
    (model / "model.json").write_text(json.dumps(facts))


@many
@randomly
def test_tensors_of_a_model_with_their_checksum(rng: Random, model: Path) -> None:
    tensors = next(model.glob("weights-*"))
    with mutated(tensors, changed_tensors, rng), mutated(model / "model.json", lambda content, _: content, rng):
        signed(model, tensors)
        outcome(lambda: uses_model(model))


@many
@randomly
def test_tensors_of_a_model_of_other_shapes(rng: Random, model: Path) -> None:
    tensors = next(model.glob("weights-*"))

    def reshape(content: bytes, rng: Random) -> bytes:
        state = load_file(tensors)
        name = rng.choice(sorted(state))
        kind = rng.randrange(6)
        if kind == 0:
            del state[name]
        elif kind == 1:
            state[f"{name.rpartition('.')[0]}.7"] = state[name].clone()
        elif kind == 2:
            state[name] = state[name][:-1].clone() if state[name].ndim else torch.zeros(2)
        elif kind == 3:
            state[name] = torch.full_like(state[name], torch.nan if state[name].is_floating_point() else -1)
        elif kind == 4:
            state[name] = state[name].double() * 1e30
        else:
            state[name] = state[name].flatten().clone()
        save_file(state, tensors, {"dualprompt": "{}"})
        return tensors.read_bytes()

    with mutated(tensors, reshape, rng), mutated(model / "model.json", lambda content, _: content, rng):
        signed(model, tensors)
        outcome(lambda: uses_model(model))


def looks_at(folder: Path) -> None:
    """Do with a run what commands do, but for drawing."""
    members = group.members_of(folder)
    runs = [Run(folder / member.folder) for member in members]
    for run in runs:
        run.check_same(run_identity(run))
        assert run.precision in ("fp32", "bf16")
    results = [run.result() for run in runs]
    tables.text(tables.headline(results), *(tables.accuracy_matrix(result) for result in results))
    json.dumps(publish.combined(runs, folder))
    publish.task_keys(runs[0])
    story = _Story()
    for line in runs[0].lines():
        story.point(line)
    story.headline(results[0])
    assert Obtained(runs[0], members[0].config).seconds >= -1e300


def run_identity(run: Run) -> Any:
    from dualprompt.training.run import Identity

    return Identity(**run.manifest()["identity"])


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("manifest.json", changed_json),
        ("group.json", changed_json),
        ("result.json", changed_json),
        ("metrics.jsonl", changed_lines),
    ],
)
@many
@randomly
def test_papers_of_a_run(rng: Random, name: str, mutate: Mutate, finished: Path) -> None:
    with mutated(finished / name, mutate, rng):
        outcome(lambda: looks_at(finished))


@pytest.mark.parametrize("name", ["task-0001", "progress"])
@many
@randomly
def test_checkpoints_are_what_was_written_or_refused(rng: Random, name: str, stopped: Path) -> None:
    path = stopped / "checkpoints" / f"{name}.safetensors"
    tensors, position = checkpoint.read(path)
    with mutated(path, changed_tensors, rng):
        found = outcome(lambda: checkpoint.read(path))
        outcome(lambda: Checkpoints(stopped / "checkpoints").last())
        if found is not None:
            assert asdict(found[1]) == asdict(position)
            assert found[0].keys() == tensors.keys()
            assert all(torch.equal(found[0][key], tensors[key]) for key in tensors)


@many
@randomly
def test_headers_of_checkpoints_without_checksum(rng: Random, stopped: Path) -> None:
    """As a version without checksums wrote them, or an enemy."""
    path = stopped / "checkpoints" / "task-0001.safetensors"
    tensors, position = checkpoint.read(path)

    def header(content: bytes, rng: Random) -> bytes:
        text = changed_json(json.dumps(asdict(position)).encode(), rng).decode(errors="replace")
        save_file(tensors, path, {"dualprompt": text})
        return path.read_bytes()

    with mutated(path, header, rng):
        found = outcome(lambda: Checkpoints(stopped / "checkpoints").last())
        assert found is None or (found[0].task, len(found[0].accuracy)) == (1, 1)


@pytest.fixture(scope="module")
def cached(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoded]:
    cache = tmp_path_factory.mktemp("own-cache")
    return cache, decoded(world, cache)


def decoded(world: World, cache: Path) -> Decoded:
    return decode(load_folder(world.images, 0.2).train, Store(16, keep_aspect=False), cache=cache)


@pytest.mark.parametrize("name", ["contents/*.json", "*/index.json"])
@many
@randomly
def test_indices_of_the_cache(rng: Random, name: str, world: World, cached: tuple[Path, Decoded]) -> None:
    cache, before = cached
    path = next((cache / "images").glob(name))
    with mutated(path, changed_json, rng):
        found = outcome(lambda: decoded(world, cache))
        if found is not None:
            assert found.kept.tolist() == before.kept.tolist()
            assert int(found.images.shapes.prod(dim=1).sum()) * 3 == len(found.images.flat)
    shutil.rmtree(cache / "images")
    again = decoded(world, cache)
    assert torch.equal(again.images.flat, before.images.flat)


@many
@randomly
def test_pixels_of_the_cache(rng: Random, world: World, cached: tuple[Path, Decoded]) -> None:
    cache, before = cached
    path = next((cache / "images").glob("*/pixels.bin"))
    with mutated(path, lambda content, rng: content[: rng.randrange(len(content))], rng):
        assert torch.equal(decoded(world, cache).images.flat, before.images.flat)


def changed_yaml(content: bytes, rng: Random) -> bytes:
    if rng.randrange(2):
        return damaged(content, rng)
    return yaml.safe_dump(changed(yaml.safe_load(content), rng), allow_unicode=True).encode()


@many
@randomly
def test_presets(rng: Random, world: World, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(world.preset.read_bytes())
    with mutated(path, changed_yaml, rng):
        found = outcome(lambda: compose(str(path), None, {}))
        if found is not None:
            outcome(lambda: method_config(found.method))
            json.dumps(found.model_dump(mode="json"), allow_nan=False)


def builds(name: str) -> None:
    read = weights.read(name)
    weights.build(read)
    json.dumps(asdict(read.info), allow_nan=False)


@many
@randomly
def test_weights_in_safetensors(rng: Random, world: World, tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    shutil.copy(world.weights, path)
    with mutated(path, changed_tensors, rng):
        outcome(lambda: builds(str(path)))


@pytest.mark.parametrize("kind", [".npz", ".pth"])
@many
@randomly
def test_weights_in_archives(rng: Random, kind: str, world: World, tmp_path: Path) -> None:
    path = tmp_path / f"vit{kind}"
    if kind == ".npz":
        np.savez(path, **random_google(dim=16, heads=2, depth=1, mlp=8, patch=4, grid=2))
    else:
        torch.save(load_file(world.weights), path)
    with mutated(path, changed_archive if kind == ".npz" else damaged, rng):
        outcome(lambda: builds(str(path)))


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@many
@randomly
def test_papers_of_a_backbone(rng: Random, name: str, world: World, tmp_path: Path) -> None:
    shutil.copy(world.weights, tmp_path / "model.safetensors")
    papers = {
        "config.json": {"num_attention_heads": 2, "layer_norm_eps": 1e-6, "image_size": 16, "hidden_act": "gelu"}
        if rng.randrange(2)
        else {
            "architecture": "vit",
            "model_args": {"num_heads": VIT.heads},
            "pretrained_cfg": {
                "input_size": [3, 16, 16], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5],
                "interpolation": "bicubic", "license": "mit",
            },
        },
        "preprocessor_config.json": {
            "size": {"height": 16}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
        },
    }  # fmt: skip
    for file, values in papers.items():
        (tmp_path / file).write_text(json.dumps(values))
    with mutated(tmp_path / name, changed_json, rng):
        outcome(lambda: builds(str(tmp_path)))
