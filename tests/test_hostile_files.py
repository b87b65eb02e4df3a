"""Whatever happens to a file that we read back: it is read as something whole, or refused in one line.

So many mutations are tried of each file; `python -m tools.faults files --files N` tries more.
"""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
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
from torch import Tensor

from dualprompt.backbones import weights
from dualprompt.config import compose
from dualprompt.data.cache import Decoded, Store, decode
from dualprompt.data.folder import load_folder
from dualprompt.hosted import jobs, places, review
from dualprompt.hosted.teach import LEARNED_KIND, LESSON_KIND, Learned, Lesson
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import method_config
from dualprompt.report import publication, study_files
from dualprompt.report.build import report
from dualprompt.run import checkpoint, predictions
from dualprompt.run.checkpoint import Checkpoints
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.watch import Watch
from hostile import Mutate, finished, looks_at, mutated, outcome, stopped, study, uses_model
from mutations import changed, changed_archive, changed_json, changed_lines, changed_tensors, damaged
from sandbox import VIT, World
from test_vit_parity import random_google

EXAMPLES = int(os.environ.get("DUALPROMPT_EXAMPLES", "25"))
many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
randomly = given(rng=st.randoms(use_true_random=False))


@many
@randomly
def test_mutations_of_model_json(rng: Random, model: Path) -> None:
    with mutated(model / "model.json", changed_json, rng):
        outcome(lambda: uses_model(model))


@many
@randomly
def test_mutations_of_tensors_of_a_model(rng: Random, model: Path) -> None:
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
def test_mutations_of_tensors_with_their_checksum(rng: Random, model: Path) -> None:
    tensors = next(model.glob("weights-*"))
    with mutated(tensors, changed_tensors, rng), mutated(model / "model.json", lambda content, _: content, rng):
        signed(model, tensors)
        outcome(lambda: uses_model(model))


@many
@randomly
def test_mutations_of_tensors_of_other_shapes(rng: Random, model: Path) -> None:
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
def test_mutations_of_papers_of_a_run(rng: Random, name: str, mutate: Mutate, finished: Path) -> None:
    with mutated(finished / name, mutate, rng):
        outcome(lambda: looks_at(finished))


@pytest.mark.parametrize("name", ["task-0001", "progress"])
@many
@randomly
def test_mutations_of_checkpoints(rng: Random, name: str, stopped: Path) -> None:
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
def test_mutations_of_headers_of_checkpoints_without_checksum(rng: Random, stopped: Path) -> None:
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
def cached(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    cache = tmp_path_factory.mktemp("own-cache")
    return cache, decoded(world, cache).images.flat.clone()  # a copy: what is mapped is the file, which is cut later


def decoded(world: World, cache: Path) -> Decoded:
    return decode(load_folder(world.images, 0.2).train, Store(16, keep_aspect=False), cache=cache)


@pytest.mark.parametrize("name", ["contents/*.json", "*/index.json"])
@many
@randomly
def test_mutations_of_indices_of_the_cache(rng: Random, name: str, world: World, cached: tuple[Path, Tensor]) -> None:
    cache, before = cached
    path = next((cache / "images").glob(name))
    with mutated(path, changed_json, rng):
        found = outcome(lambda: decoded(world, cache))
        if found is not None:
            assert found.kept.tolist() == list(range(len(found.images)))
            assert int(found.images.shapes.prod(dim=1).sum()) * 3 == len(found.images.flat)
    shutil.rmtree(cache / "images")
    again = decoded(world, cache)
    assert torch.equal(again.images.flat, before)


@many
@randomly
def test_mutations_of_pixels_of_the_cache(rng: Random, world: World, cached: tuple[Path, Tensor]) -> None:
    cache, before = cached
    path = next((cache / "images").glob("*/pixels.bin"))
    with mutated(path, lambda content, rng: content[: rng.randrange(len(content))], rng):
        assert torch.equal(decoded(world, cache).images.flat, before)


@many
@randomly
def test_mutations_of_study_json(rng: Random, study: Path, tmp_path: Path) -> None:
    def around() -> list[Path]:
        return sorted(path for path in study.parent.rglob("*") if not path.is_relative_to(tmp_path / "page"))

    (tmp_path / "page").mkdir(exist_ok=True)
    before = around()
    with mutated(study / "study.json", changed_json, rng):
        found = outcome(lambda: study_files.read(study))
        if found is not None:
            outcome(lambda: report([study], tmp_path / "page" / "report.html"))
    assert around() == before


@many
@randomly
def test_mutations_of_predictions(rng: Random, finished: Path) -> None:
    path = Run(finished / group.members_of(finished)[0].folder).predictions_path

    def reads() -> None:
        found = predictions.read(path)
        for number in range(len(found)):
            found.judged(number)
        found.frame()

    with mutated(path, changed_archive, rng):
        outcome(reads)


@pytest.fixture(scope="module")
def watched(saved: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was watched: an inbox of three pictures, and a table."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "inbox").mkdir()
    for picture in sorted((world.images / "test" / "ash").iterdir())[:3]:
        os.utime(shutil.copy(picture, folder / "inbox"), (1_700_000_000, 1_700_000_000))
    with Watch(saved, folder / "inbox", folder / "table.csv", folder / "sorted").opened("cpu") as watch:
        assert watch.look().labelled == 3
    return folder


@many
@randomly
def test_mutations_of_the_state_of_a_watch(rng: Random, watched: Path, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(watched, tmp_path / secrets.token_hex(8) / "watched", copy_function=shutil.copy2))
    state, table = folder / ".table.csv.watch" / "state.json", folder / "table.csv"
    before = table.read_bytes()
    value = json.loads(state.read_text()) | {"folder": str(folder / "inbox")}
    pending = [{"path": "0.png", "mark": "5 5", "row": ["2026-11-18", "0.png", "ash", "0.9", "t", "0.5", "0", ""]}]
    state.write_text(json.dumps(value | {"pending": pending} if rng.randrange(2) else value))
    state.write_bytes(changed_json(state.read_bytes(), rng))

    def watch() -> None:
        with Watch(saved, folder / "inbox", table, folder / "sorted").opened("cpu") as watch:
            watch.look()

    outcome(watch)
    assert table.read_bytes().startswith(before)  # what people have is never taken back
    assert {path.name for path in folder.parent.rglob("*") if path.is_dir()} <= {
        "watched", "inbox", "sorted", ".table.csv.watch", *(path.name for path in (folder / "sorted").iterdir()),
    }  # fmt: skip
    assert len(list((folder / "inbox").iterdir())) == 3


@many
@randomly
def test_mutations_of_records_of_a_server(rng: Random, tmp_path: Path) -> None:
    kinds: list[tuple[Any, Any]] = [
        (jobs._RECORD, {"next": 3, "jobs": [asdict(jobs.Job(2, "name", ["a"], 3))]}),
        (LESSON_KIND, asdict(Lesson("name", 1, False, {"a": [("000001.png", "b.png")]}))),
        (LESSON_KIND, asdict(Lesson(None, None, False, {}, "more", reviewed=[review.Reviewed(1, 5.0, "a")]))),
        (LEARNED_KIND, asdict(Learned(1, "2026-11-18", 2))),
        (review._ITEM, asdict(review.Item(1, 5.0, "unsure", "a.png", "a"))),
    ]
    kind, value = rng.choice(kinds)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(value))
    places.read_record(path, kind)
    with mutated(path, changed_json, rng):
        outcome(lambda: places.read_record(path, kind))


@many
@randomly
def test_mutations_of_publications(rng: Random, tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    shutil.copy(Path(__file__).parents[1] / "docs" / "experiments" / "mini-frozen-head-lr.json", path)
    with mutated(path, changed_json, rng):
        found = outcome(lambda: publication.read(path))
        if found is not None:
            publication.contradictions(found)
            publication.markdown(found)


def changed_yaml(content: bytes, rng: Random) -> bytes:
    if rng.randrange(2):
        return damaged(content, rng)
    return yaml.safe_dump(changed(yaml.safe_load(content), rng), allow_unicode=True).encode()


@many
@randomly
def test_mutations_of_presets(rng: Random, world: World, tmp_path: Path) -> None:
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
def test_mutations_of_weights_in_safetensors(rng: Random, world: World, tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    shutil.copy(world.weights, path)
    with mutated(path, changed_tensors, rng):
        outcome(lambda: builds(str(path)))


@pytest.mark.parametrize("kind", [".npz", ".pth"])
@many
@randomly
def test_mutations_of_weights_in_archives(rng: Random, kind: str, world: World, tmp_path: Path) -> None:
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
def test_mutations_of_papers_of_a_backbone(rng: Random, name: str, world: World, tmp_path: Path) -> None:
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
