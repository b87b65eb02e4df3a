"""Exported files must answer as the model that they were made from, without the package that made them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from dualprompt import export
from dualprompt.errors import DualPromptError
from dualprompt.learner import Answer, ContinualLearner
from sandbox import CLASSES, HEADER, VIT, World, call, elsewhere, make_world

EXAMPLE = Path(__file__).parents[1] / "examples" / "onnx_predict.py"
# Layers 2 and 3 of 3 are prompted, layer 2 by both prompts: layer 1 is shared by query and prompted pass.
OPTIONS = {"g_layers": [2], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "init": "wide"}


@dataclass(frozen=True)
class Case:
    learner: ContinualLearner
    saved: Path
    images: list[Path]
    pixels: np.ndarray  # of those images, and of coloured patches that nothing was learned from

    @property
    def answers(self) -> list[Answer]:
        return self.learner.predict_pixels(self.pixels, top_k=1)


def taught(world: World, method: str = "dualprompt", **options: Any) -> ContinualLearner:
    """A learner of two tasks of two classes."""
    learner = ContinualLearner(str(world.weights), method, options=options, device="cpu")
    for number, names in enumerate((CLASSES[:2], CLASSES[2:4])):
        learner.learn({name: sorted((world.images / "train" / name).iterdir()) for name in names}, f"trees {number}")
    return learner


def patches(count: int, side: int) -> np.ndarray:
    drawn = np.random.default_rng(7).integers(0, 256, (count, side // 4, side // 4, 3), dtype=np.uint8)
    return drawn.repeat(4, axis=1).repeat(4, axis=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def case(world: World) -> Case:
    learner = taught(world, **OPTIONS)
    images = sorted(path for name in CLASSES[:4] for path in (world.images / "test" / name).iterdir())
    pixels = np.concatenate([np.stack([learner.pixels(path) for path in images]), patches(40, learner.side)])
    answers = learner.predict_pixels(pixels, top_k=1)
    trust = sorted(answer.trust for answer in answers)
    middle = max(range(10, 40), key=lambda i: trust[i + 1] - trust[i])  # far from any image
    learner.threshold = (trust[middle] + trust[middle + 1]) / 2
    return Case(learner, learner.save(world.folder / "model"), images, pixels)


@pytest.fixture(scope="module")
def onnx_file(case: Case) -> Path:
    done = call("export", case.saved, "--to", "onnx", "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    written = done.json
    assert written["path"] == str(case.saved.with_name("model.onnx"))
    assert written["bytes"] == written["fp32_bytes"] == Path(written["path"]).stat().st_size
    assert written["comparison"] == {"images": 64, "folder": None, "changed": 0, "before": None, "after": None}
    return Path(written["path"])


def run(file: Path, pixels: np.ndarray) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert names == ["logits", "probabilities", "task", "similarity"]
    return dict(zip(names, session.run(None, {"images": pixels}), strict=True))


def agree(learner: ContinualLearner, pixels: np.ndarray, found: dict[str, Any], tolerance: float) -> None:
    """The outputs are those of the learner, which are obtained without any code of the export."""
    with torch.no_grad():
        logits, task, similarity = (t.numpy() for t in learner.network()(torch.from_numpy(pixels)))
    answers = learner.predict_pixels(pixels, top_k=1)
    assert np.abs(found["logits"] - logits).max() <= tolerance
    assert np.abs(found["similarity"] - similarity).max() <= tolerance
    np.testing.assert_array_equal(found["task"], task)
    assert [learner.classes[best] for best in found["logits"].argmax(axis=1)] == [a.top[0].label for a in answers]
    np.testing.assert_allclose(found["probabilities"].max(axis=1), [a.top[0].probability for a in answers], atol=1e-4)
    np.testing.assert_allclose(found["probabilities"].sum(axis=1), 1, atol=1e-5)
    assert export.decide(found, learner.classes, learner.threshold) == [answer.label for answer in answers]


@pytest.mark.parametrize("batch", [1, 3, 17])
def test_onnxruntime_predicts_what_the_learner_does_in_batches_of_any_size(case: Case, onnx_file: Path, batch: int):
    for start in range(0, len(case.pixels) - batch, max(batch, 7)):
        pixels = case.pixels[start : start + batch]
        agree(case.learner, pixels, run(onnx_file, pixels), 1e-3)


def test_the_images_try_every_task_class_and_the_threshold(case: Case):
    """Otherwise agreement would prove little."""
    assert {answer.task for answer in case.answers} - {None} == {"trees 0", "trees 1"}
    assert len({answer.top[0].label for answer in case.answers}) >= 3
    rejected = sum(answer.label is None for answer in case.answers)
    assert 5 < rejected < len(case.answers) - 5


def test_each_image_of_a_batch_gets_its_own_e_prompt(case: Case, onnx_file: Path):
    together = run(onnx_file, case.pixels)
    for row in (*range(0, 20, 5), *range(-5, 0)):
        alone = run(onnx_file, case.pixels[row][None])
        for name, values in alone.items():
            np.testing.assert_allclose(values[0], together[name][row], atol=1e-5)


def test_an_onnx_file_says_all_about_itself_and_nothing_about_this_machine(case: Case, onnx_file: Path):
    model = onnx.load(onnx_file, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    about = {prop.key: json.loads(prop.value) for prop in model.metadata_props}
    assert about["labels"] == list(CLASSES[:4])
    assert [(task["name"], task["classes"]) for task in about["tasks"]] == [
        ("trees 0", list(CLASSES[:2])),
        ("trees 1", list(CLASSES[2:4])),
    ]
    assert about["side"] == VIT.image_size
    assert about["interpolation"] == HEADER["interpolation"]
    assert about["threshold"] == case.learner.threshold
    assert "similarity" in about["trust"]
    assert set(about["versions"]) == {"dualprompt", "torch"}
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    (images,) = model.graph.input
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [dim.dim_param or dim.dim_value for dim in images.type.tensor_type.shape.dim] == ["batch", 16, 16, 3]
    for folder in (Path.cwd(), Path(export.__file__).parent, Path(torch.__file__).parent, case.saved):
        assert str(folder).encode() not in onnx_file.read_bytes()


def test_layers_before_the_first_prompted_one_run_once_and_weights_are_stored_once(case: Case, onnx_file: Path):
    model = onnx.load(onnx_file)
    assert Counter(node.op_type for node in model.graph.node)["Gelu"] == 2 * VIT.depth - 1  # two passes share a layer
    stored = sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer if len(tensor.dims) > 1)
    assert stored < 1.5 * case.learner.info()["backbone"]["parameters"]


def test_int8_is_smaller_and_its_change_is_told_as_it_is(case: Case, onnx_file: Path, world: World, tmp_path: Path):
    folder = tmp_path / "known"
    folder.mkdir()
    for name in CLASSES[:4]:
        (folder / name).symlink_to(world.images / "test" / name)
    out = tmp_path / "small.onnx"
    done = call("export", case.saved, "--to", "onnx", "--int8", "--out", out, "--check", folder, "--json")
    assert done.code == 0, done.err
    written = done.json
    assert written["bytes"] == out.stat().st_size < written["fp32_bytes"]
    assert written["fp32_bytes"] == pytest.approx(onnx_file.stat().st_size, rel=0.01)

    model = onnx.load(out)
    kinds = Counter(node.op_type for node in model.graph.node)
    passes = 2 * VIT.depth - 1
    # All that is left in fp32 are products of two activations: two an attention, and queries with class means.
    assert kinds["MatMul"] <= 2 * passes + 1
    assert kinds["MatMulInteger"] >= 4 * passes
    assert model.metadata_props == onnx.load(onnx_file).metadata_props

    images = len(case.images)
    alone = [run(out, case.pixels[row][None]) for row in range(images)]
    labels = [export.decide(each, case.learner.classes, case.learner.threshold)[0] for each in alone]
    truth = [path.parent.name for path in case.images]
    assert written["comparison"] == {
        "images": images,
        "folder": str(folder),
        "changed": sum(answer.label != label for answer, label in zip(case.answers, labels, strict=False)),
        "before": pytest.approx(case.learner.evaluate(folder).accuracy),
        "after": pytest.approx(100 * np.mean([a == b for a, b in zip(labels, truth, strict=True)])),
    }
    exact = run(onnx_file, case.pixels[:images])["logits"]
    change = np.abs(np.concatenate([each["logits"] for each in alone]) - exact).max()
    assert 0 < change < np.abs(exact).max() / 2


def test_a_torch_program_is_reloaded_equal(case: Case, tmp_path: Path):
    out = tmp_path / "model.pt2"
    done = call("export", case.saved, "--to", "torch-export", "--out", out)
    assert done.code == 0, done.err
    assert "64 of 64 random images get the model's own label" in done.out
    about = {"metadata.json": ""}
    module = torch.export.load(out, extra_files=about).module()
    assert json.loads(about["metadata.json"])["labels"] == list(CLASSES[:4])
    for batch in (1, 3, 17):
        pixels = case.pixels[10 : 10 + batch]
        found = [value.detach().numpy() for value in module(torch.from_numpy(pixels))]
        agree(case.learner, pixels, dict(zip(export.OUTPUTS, found, strict=True)), 1e-6)
    assert str(Path(export.__file__).parent).encode() not in out.read_bytes()


VARIANTS = {
    "several keys, ridge": {"matching": "keys", "keys_per_task": 2, "head": "ridge"},
    "the paper's, pro-t": {"matching": "key", "keys": "learned", "head": "linear", "prompting": "pro-t"},
    "prefix at the input": {"matching": "gaussian", "head": "linear", "prefix_at": "input"},
}


@pytest.mark.parametrize(
    "name",
    [
        *VARIANTS,
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in ("frozen-head", "ranpac", "klda", "fecam", "anacp")
        ),
    ],
)
@pytest.mark.parametrize("to", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_every_matching_and_head_is_exported(world: World, case: Case, tmp_path: Path, name: str, to: str):
    learner = taught(world, **OPTIONS, **VARIANTS[name]) if name in VARIANTS else taught(world, name)
    learner.predict_pixels(case.pixels)  # whatever prediction keeps for next time must not get in the way
    path = tmp_path / "file"
    export.export(learner, path, to)
    predict = export.open_exported(path, to)
    for batch in (1, 17):
        agree(learner, case.pixels[-batch:], dict(predict(case.pixels[-batch:])), 1e-3)


@pytest.mark.slow
def test_classes_taught_twice_and_forgotten_ones_are_exported_as_they_answer(world: World, case: Case, tmp_path: Path):
    learner = taught(world, **OPTIONS)
    learner.learn({"ash": sorted((world.images / "test" / "ash").iterdir())}, "once more", again=True)
    learner.forget("cedar")
    learner.forget("trees 0")
    assert learner.classes == ("elm", "ash")
    export.export(learner, tmp_path / "left.onnx")
    agree(learner, case.pixels, run(tmp_path / "left.onnx", case.pixels), 1e-3)


def test_the_example_needs_no_dualprompt_and_prepares_images_as_the_learner_does(
    case: Case, onnx_file: Path, tmp_path: Path
):
    rng = np.random.default_rng(5)
    photo = Image.fromarray(rng.integers(0, 256, (12, 9, 3), dtype=np.uint8).repeat(20, axis=0).repeat(20, axis=1))
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", exif=turned)
    photo.convert("L").save(tmp_path / "grey.png")
    glass = photo.convert("RGBA")
    glass.putalpha(photo.convert("L"))
    glass.save(tmp_path / "glass.png")
    paths = [*map(str, case.images), *(str(tmp_path / name) for name in ("turned.jpg", "grey.png", "glass.png"))]
    watched = (
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__'); "
        "assert not {'dualprompt', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", watched, str(EXAMPLE), str(onnx_file), *paths],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    for (path, label, probability, task, similarity), answer in zip(lines, case.learner.predict(paths), strict=True):
        assert (path, label, task) == (answer.path, answer.label or "(none of these)", answer.task or "")
        assert (
            probability == ""
            if answer.probability is None
            else float(probability) == pytest.approx(answer.probability, abs=2e-4)
        )
        assert float(similarity) == pytest.approx(answer.similarity, abs=2e-4)


def test_mistakes_are_one_line(case: Case, world: World, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("mine")
    empty = ContinualLearner(str(world.weights), "dualprompt", options=OPTIONS, device="cpu").save(tmp_path / "empty")
    assert "knows no classes yet" in call("export", empty, "--to", "onnx").error
    assert "knows no classes yet" in call("export", empty, "--to", "onnx", "--check", world.images / "test").error
    assert "onnx" in call("export", case.saved, "--to", "tflite").error
    assert "--to" in call("export", case.saved).error
    assert "does not exist" in call("export", tmp_path / "nowhere", "--to", "onnx").error
    assert "int8" in call("export", case.saved, "--to", "torch-export", "--int8").error
    assert "is a folder" in call("export", case.saved, "--to", "onnx", "--out", tmp_path).error
    assert "cannot be written" in call("export", case.saved, "--to", "onnx", "--out", file / "model.onnx").error
    inside = case.saved / "model.json"
    before = inside.read_bytes()
    assert "among a model's own files" in call("export", case.saved, "--to", "onnx", "--out", inside).error
    assert inside.read_bytes() == before
    strange = call("export", case.saved, "--to", "onnx", "--check", world.images / "test").error
    assert "class 'fir' is not known" in strange
    with pytest.raises(DualPromptError, match=r"unknown format 'onx'; did you mean 'onnx'"):
        export.export(case.learner, tmp_path / "x", "onx")
    assert file.read_text() == "mine"


def test_a_missing_package_is_named_with_the_extra_that_brings_it(case: Case, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    error = call("export", case.saved, "--to", "onnx", "--out", tmp_path / "x.onnx").error
    assert "'onnxscript'" in error
    assert "dualprompt[export]" in error
    assert not list(tmp_path.iterdir())


def test_what_was_there_stays_when_the_disk_refuses_the_new_file(case: Case, tmp_path: Path):
    out = tmp_path / "model.pt2"
    out.write_text("the old one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DualPromptError, match="cannot be written"):
            export.export(case.learner, out, "torch-export")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.pt2", "the old one")]


def test_a_whole_life(world: World, tmp_path: Path):
    """Three tasks from folders by the command, asked in other processes, one forgotten, the rest shipped as ONNX."""
    tasks = {"spring": ("ash", "birch"), "summer": ("cedar", "elm"), "autumn": ("fir", "hazel")}
    tiny = [f"--method.{key}={value}" for key, value in OPTIONS.items() if not key.startswith("train.")]
    model = tmp_path / "model"
    for name, classes in tasks.items():
        for label in classes:
            shutil.copytree(world.images / "train" / label, tmp_path / name / label)
        new = ["--backbone", world.weights, "--method", "dualprompt", *tiny] if name == "spring" else []
        done = elsewhere("learn", model, tmp_path / name, "--epochs", 2, "--device", "cpu", *new)
        assert done.code == 0, done.err
        shutil.rmtree(tmp_path / name)  # it must never need them again
    images = sorted(
        path for classes in tasks.values() for c in classes for path in (world.images / "test" / c).iterdir()
    )
    learner = ContinualLearner.load(model, "cpu")
    pixels = np.stack([learner.pixels(path) for path in images])
    asked = elsewhere("predict", model, *images, "--json", "--device", "cpu")
    here = learner.predict(images)
    for there, answer in zip(asked.json, here, strict=True):
        assert (there["path"], there["label"], there["task"]) == (answer.path, answer.label, answer.task)
        assert there["probability"] == pytest.approx(answer.probability, abs=1e-6)

    with torch.inference_mode():
        logits, matched, _ = learner.network()(torch.from_numpy(pixels))
        assert elsewhere("forget", model, "summer").code == 0
        left = ContinualLearner.load(model, "cpu")
        assert left.classes == ("ash", "birch", "fir", "hazel")
        after, _, _ = left.network()(torch.from_numpy(pixels))
    others = matched != 1
    assert 10 < others.sum() < len(images)
    assert torch.equal(after[others], logits[others][:, [0, 1, 4, 5]])

    exported = elsewhere("export", model, "--to", "onnx", "--json")
    assert exported.code == 0, exported.err
    agree(left, pixels, run(Path(exported.json["path"]), pixels), 1e-3)
