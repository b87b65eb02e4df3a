"""Whatever happens to a file that we read back: it is read as something whole, or refused in one line.

So many mutations are tried of each file; `python -m tools.faults files --files N` tries more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import resource
import secrets
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any, get_args

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
from dualprompt.errors import DualPromptError
from dualprompt.hosted import jobs, places, review
from dualprompt.hosted.teach import LEARNED_KIND, LESSON_KIND, Learned, Lesson
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS, method_config
from dualprompt.model import card, saved
from dualprompt.pictures.kinds import Cloud, Grid, Line, Lines, Points, as_plain
from dualprompt.progress import SILENT
from dualprompt.report import gallery, publication, run_files, study_files, tables
from dualprompt.report.build import report
from dualprompt.report.sheet import Column, Sheet
from dualprompt.run import checkpoint, predictions
from dualprompt.run.checkpoint import Checkpoints
from dualprompt.run.folder import Run
from dualprompt.run.tracking import _Story
from dualprompt.sweeps.obtained import Obtained
from dualprompt.training import group
from dualprompt.watch import Watch
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


def looks_at(folder: Path) -> None:
    """Do with a run what commands do, but for drawing."""
    members = group.members_of(folder)
    runs = [Run(folder / member.folder) for member in members]
    for run in runs:
        run.check_same(run_identity(run))
        assert run.precision in ("fp32", "bf16")
    results = [run.result() for run in runs]
    tables.text(tables.headline(results), *(tables.accuracy_matrix(result) for result in results))
    json.dumps(run_files.combined(runs, folder))
    run_files.task_keys(runs[0])
    with contextlib.suppress(DualPromptError):  # of other images, or none
        gallery._stream(runs[0], SILENT)
    story = _Story()
    for line in runs[0].lines():
        story.point(line)
    story.headline(results[0])
    assert Obtained(runs[0], members[0].config).seconds >= -1e300


def run_identity(run: Run) -> Any:
    from dualprompt.run.identity import Identity

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


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with a table, a photo and a picture of each kind."""
    folder = tmp_path_factory.mktemp("study")
    drawn = {
        "matrix": Grid("a", "x", "y", ["1", "2"], ["3"], [[5.0, None]], framed=[[0, 1]], spread=[[0.5, None]]),
        "curves": Lines("b", "x", "y", [Line("l", [0, 1], [2.0, 3.0], [0.1, None])], places=["p", "q"], mark_best=True),
        "plane": Points("c", [Cloud("d", [1.0], [2.0], 0)]),
    }
    value = {
        "study": "lengths", "title": "t", "paper": "p", "finding": "f", "benchmark": "b", "backbone": "e",
        "recipe": "r", "rows": [{"runs": ["/nowhere"]}], "photos": {"photo.png": "caption"},
        "tables": [asdict(Sheet("s", (Column("h"),), ((("cell",),),), ("remark",)))],
        "pictures": {name: as_plain(picture) for name, picture in drawn.items()},
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(value))
    (folder / "photo.png").write_bytes(b"any")
    return folder


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


def with_facts(model: Path, **facts: Any) -> None:
    said = json.loads((model / "model.json").read_text())
    (model / "model.json").write_text(json.dumps(said | facts))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"photos": {"/etc/hostname": "mine"}}, "'photos"),
        ({"photos": {"../letter.txt": "mine"}}, "'photos"),
        ({"photos": {"absent.png": "gone"}}, "absent.png cannot be read"),
        ({"study": "../../out"}, "'study'"),
        ({"pictures": {"../out": {"kind": "points", "title": "", "clouds": []}}}, "'pictures"),
        ({"pictures": {"out": {"kind": "points", "title": "", "clouds": []}}}, "has points"),
        (
            {"pictures": {"none": as_plain(Grid("a", "x", "y", ["1"], ["2"], [[None]]))}},
            "a number in one cell at least",
        ),
        ({"tables": [1]}, "'tables.0'"),
        ({"rows": {}}, "'rows'"),
        ({"finding": None}, "'finding'"),
    ],
)
def test_study_json_of_other_types(facts: dict[str, Any], said: str, study: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(study, tmp_path / "in" / "study"))
    (tmp_path / "in" / "letter.txt").write_text("mine")
    value = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(value | facts))
    assert said in call("report", folder, "--out", tmp_path / "page" / "report.html").error
    assert not list(tmp_path.rglob("*.html"))
    assert not list(tmp_path.rglob("out*"))


def test_a_study_with_long_names_is_drawn_and_runs_that_cannot_be_looked_at_are_not_there(study: Path) -> None:
    value, name = json.loads((study / "study.json").read_text()), "long name " * 90
    value["rows"] = [{"runs": [name]}]
    for picture in value["pictures"].values():
        picture |= {key: name for key in ("title", "x", "y", "unit") if key in picture}
        picture |= {key: [name] * len(picture[key]) for key in ("rows", "columns", "places") if key in picture}
        for part in picture.get("lines", []) + picture.get("clouds", []):
            part["name"] = name
    with mutated(study / "study.json", lambda *_: json.dumps(value).encode(), Random(0)):
        page = report([study], study.parent / "long" / "report.html")  # matplotlib's warnings are errors here
    assert "long name" in page.read_text()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"threshold": "0.5"}, "'threshold'"),
        ({"threshold": True}, "'threshold'"),
        ({"rows": []}, "its rows are not those of its classes"),
        ({"tasks": [1]}, "'tasks.0'"),
        ({"next_id": 2}, "the ids of its tasks"),
        ({"trust": [[9, {"ash": [0.5]}]]}, "its trust is not in its classes"),
        ({"tensors": {"file": "../x", "sha256": "0" * 64}}, "'tensors.file'"),
    ],
)
def test_model_json_of_other_types(facts: dict[str, Any], said: str, model: Path) -> None:
    with_facts(model, **facts)
    message = call("info", model).error
    assert said in message
    assert "restore the model from a copy" in message


@pytest.mark.parametrize("name", METHODS.names())
def test_no_option_calls_for_all_memory(name: str) -> None:
    """A number of any size is refused, or it is one that no memory goes by."""
    kind = METHODS[name].Config
    for option, field in kind.model_fields.items():
        if field.annotation is int or set(get_args(field.annotation)) == {int, NoneType}:
            assert any(getattr(bound, "le", None) for bound in field.metadata), option
            refused = refusal(lambda option=option: method_config({"name": name, option: 10**12}))
            assert f"'method.{option}': input should be less than or equal to" in refused


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [("dualprompt-rp", "projection", 30_000), ("klda", "projection", 30_000), ("l2p", "pool_size", 9_999)],
)
def test_a_model_that_calls_for_more_than_its_tensors_is_refused_before_they_are_made(
    method: str, option: str, value: int, world: World, tmp_path: Path
) -> None:
    small = {"projection": 20, "e_layers": [2, 3]} if method == "dualprompt-rp" else {option: 20}
    learner = ContinualLearner(str(world.weights), method, options=small | {"train.epochs": 1}, device="cpu")
    learner.learn({name: sorted((world.images / "train" / name).iterdir()) for name in ("ash", "elm")})
    path = learner.save(tmp_path / "model")
    ContinualLearner.load(path, "cpu")
    with_facts(path, method=json.loads((path / "model.json").read_text())["method"] | {option: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "but its options call for" in refusal(lambda: ContinualLearner.load(path, "cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_a_model_that_asks_for_huge_images(model: Path) -> None:
    backbone = json.loads((model / "model.json").read_text())["backbone"]
    with_facts(model, backbone=backbone | {"input_size": 8192})
    assert "less than or equal to 1024" in call("info", model).error
    with_facts(model, backbone=backbone | {"name": "/" + "x" * 300})
    assert "File name too long" in refusal(lambda: ContinualLearner.load(model))


def bomb() -> str:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(12)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), "more than 10,000 values"),
        ("a: &a [*a]", "more than 10,000 values"),
        ("seed: 2026-99-99", "month must be in 1..12"),
        ("[" * 100_000, "nested more than 32 deep"),
        ("a: !!bool x", "not valid YAML"),
        ("a: " + "x" * 300_000, "more than 262,144 bytes"),
    ],
)
def test_yaml_that_is_made_to_hurt(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert said in call("run", tmp_path / "mine.yaml", "--out", tmp_path / "out").error
    if len(text) < 100_000:
        assert "cannot read the value" in call("run", "mini", "--train.epochs", f"{{{text}}}").error


def test_aliases_that_are_needed_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "benchmark: {dataset: mini-shapes}\ntrain: &t {epochs: 7}\nmethods: {l2p: {train: *t}}"
    )
    assert compose(str(tmp_path / "mine.yaml"), None, {"method.name": "l2p"}).train.epochs == 7


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_is_nested_deeply(opening: str, finished: Path, model: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for name in ("manifest.json", "group.json", "result.json"):
        (run / name).write_text(opening * 100_000)
        assert f"{run / name} is damaged" in call("show", run).error
        shutil.copy(finished / name, run / name)
    (model / "model.json").write_text(opening * 100_000)
    assert "is damaged" in call("info", model).error


def test_an_archive_that_declares_more_than_it_holds(tmp_path: Path) -> None:
    arrays = random_google(dim=16, heads=2, depth=1, mlp=8, patch=4, grid=2)
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f4", "fortran_order": False, "shape": (50_000, 50_000)})
    np.savez(tmp_path / "vit.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "vit.npz", "a") as archive:
        archive.writestr("pre/kernel.npy", huge.getvalue())
    assert "says that it is larger than it is" in refusal(lambda: weights.read(str(tmp_path / "vit.npz")))
    bomb: dict[str, Any] = arrays | {"pre/kernel": np.zeros(2**26, np.float32)}
    np.savez_compressed(tmp_path / "bomb.npz", **bomb)
    assert "far more than it holds" in refusal(lambda: weights.read(str(tmp_path / "bomb.npz")))


def test_views_that_stand_for_more_than_the_file_holds(world: World, tmp_path: Path) -> None:
    state = load_file(world.weights)
    state["norm.weight"] = torch.zeros(1).expand(10**6, 10**6)
    torch.save(state, tmp_path / "vit.pth")
    assert "far more numbers than it holds" in refusal(lambda: weights.read(str(tmp_path / "vit.pth")))


@pytest.mark.parametrize("value", [-1, 0, 2, "x", None])
def test_a_wrong_epsilon(value: Any, world: World, tmp_path: Path) -> None:
    shutil.copy(world.weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "layer_norm_eps": value}))
    assert str(tmp_path / "config.json") in refusal(lambda: weights.read(str(tmp_path)))


def said_at_last(*arguments: object) -> str:
    """The line with which a command ends that had begun to work."""
    found = call(*arguments)
    assert found.code == 2
    assert "Traceback" not in found.err
    last = found.err.splitlines()[-1]
    assert last.startswith("dualprompt: error: ")
    return last


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(DualPromptError) as error:
        read()
    return str(error.value)


def test_a_log_that_lost_its_end(stopped: Path, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    assert f"of {log} is cut off" in call("report", run).error
    run = Path(shutil.copytree(stopped, tmp_path / "stopped"))
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:10])
    assert "its end is missing" in said_at_last("resume", run)
    log.unlink()
    assert call("resume", run).code == 0


def test_a_checkpoint_with_one_bit_changed(stopped: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = run / "checkpoints" / "task-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "its checksum is wrong" in said_at_last("resume", run)


def test_checkpoints_of_another_run(stopped: Path, world: World, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    position = checkpoint.read(run / "checkpoints" / "task-0001.safetensors")[1]
    checkpoint.write(run / "checkpoints" / "task-0001.safetensors", {"other": torch.zeros(3)}, asdict(position))
    assert "are not those of this run" in said_at_last("resume", run)


def test_files_of_a_model_and_a_run_that_are_something_else(model: Path, finished: Path, tmp_path: Path) -> None:
    """Folders, pipes, links that lead nowhere or in a circle, empty files, where files should be."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    names = ("manifest.json", "group.json", "result.json", "metrics.jsonl", "checkpoints/task-0001.safetensors")
    targets: dict[Path, Callable[[], Any]] = {run / name: lambda: looks_at(run) for name in names}
    targets |= {path: lambda: uses_model(model) for path in (model / "model.json", next(model.glob("weights-*")))}
    wrong: tuple[Callable[[Path], Any], ...] = (
        Path.mkdir,
        os.mkfifo,
        Path.touch,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
    )
    for path, read in targets.items():
        kept = tmp_path / "kept"
        path.rename(kept)
        for make in wrong:
            make(path)
            outcome(read)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        kept.rename(path)
        read()


def test_pipes_and_devices_are_no_pictures(model: Path, world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with (tmp_path / "sparse.png").open("wb") as sparse:
        sparse.truncate(2**40)
    for path, said in (
        (tmp_path / "pipe.png", "no file"),
        ("/dev/zero", "no file"),
        (tmp_path / "sparse.png", "more than"),
    ):
        assert said in call("predict", model, path).error
    lesson = Path(shutil.copytree(world.images / "train" / "elm", tmp_path / "lesson" / "elm")).parent
    shutil.copytree(world.images / "train" / "fir", lesson / "fir")
    os.mkfifo(lesson / "elm" / "pipe.png")
    (lesson / "fir" / "zero.png").symlink_to("/dev/zero")
    assert call("learn", model, lesson, "--epochs", 1).code == 0  # what is no file is no picture


def test_names_of_files_with_line_breaks_stay_on_one_line(model: Path, tmp_path: Path) -> None:
    strange = tmp_path / "a\nb\x1b[31m.png"
    strange.write_bytes(b"none")
    assert "a\\nb\\x1b[31m.png" in call("predict", model, strange).error
    folder = tmp_path / "lesson"
    (folder / "two\nlines").mkdir(parents=True)
    shutil.copy(strange, folder / "two\nlines")
    assert "cannot be the name of a class" in call("learn", model, folder).error


def test_a_model_is_read_while_it_is_replaced(model: Path) -> None:
    """A reader who holds no lock always finds the old model or the new one."""
    learner = ContinualLearner.load(model, "cpu")
    seen: list[Any] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(len(saved.read(model)[0].tasks))
            except DualPromptError as error:
                seen.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(30):
        name = f"head.bias.{number % 2}"
        dict(learner.network().named_parameters())[f"method.{name}"].data += 1  # other tensors, so another file
        learner.save(model)
    done.set()
    for reader in readers:
        reader.join()
    assert len(seen) > 30
    assert set(seen) == {2}


def test_what_fails_after_the_switch_is_no_failure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = ContinualLearner.load(model, "cpu")
    learner.forget("cedar")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: refuse() if path.exists() else unlink(path, missing_ok=True))
    learner.save(model)
    monkeypatch.undo()
    assert "cedar" not in ContinualLearner.load(model, "cpu").classes
    assert len(list(model.glob("weights-*"))) == 2  # the old one stays until the next time


def test_everybody_may_read_what_they_may_read_of_a_model(model: Path) -> None:
    ContinualLearner.load(model, "cpu").save(model)
    assert next(model.glob("weights-*")).stat().st_mode == (model / "model.json").stat().st_mode
