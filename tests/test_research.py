"""Runs in Python: fit in a line on presets, arrays and datasets of others; and what a run has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dualprompt
from dualprompt.data.memory import dataset_of
from dualprompt.data.sources import DATASETS, Dataset
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import Batch
from dualprompt.research import FinishedGroup, FinishedRun, FinishedStudy
from sandbox import World, call

SMALL = {"name": "dualprompt", "g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3}
QUICK: dict[str, Any] = {"train": {"epochs": 1, "batch_size": 4}, "device": "cpu"}


def noise(count: int, seed: int = 0, side: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8), np.arange(count) % 4


class Pairs:
    """A map-style dataset, as torch's are."""

    classes = ("a", "b", "c", "d")

    def __init__(self, images: list[Any], labels: list[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], self.labels[index]


class Names:
    names = ("ash", "birch", "cedar", "elm")


class Rows(Pairs):
    """One as Hugging Face has them: items are mappings, and features name the labels."""

    classes = None  # type: ignore[assignment]
    features: dict[str, Any] = {"img": None, "label": Names()}  # noqa: RUF012

    def __getitem__(self, index: int) -> Any:
        return {"img": self.images[index], "label": self.labels[index]}


def own(count: int = 16) -> Dataset:
    return dataset_of("own", noise(count), noise(8, 1))


def test_a_preset_in_a_line(world: World, tmp_path: Path) -> None:
    run = dualprompt.fit(str(world.preset), SMALL, backbone=str(world.weights), out=tmp_path / "run", **QUICK)
    assert isinstance(run, FinishedRun)
    assert run.accuracy_matrix.shape == (3, 3)
    assert np.isnan(run.accuracy_matrix[0, 1:]).all()
    assert run.accuracy_matrix[2].mean() == pytest.approx(run.result["average_accuracy"])
    again = dualprompt.load_run(tmp_path / "run")
    assert isinstance(again, FinishedRun)
    assert again.config == run.config
    assert again.frame().loc["task 3", "task 1"] == run.accuracy_matrix[2, 0]
    assert call("show", tmp_path / "run").code == 0
    assert again.predictions.answer.shape == (3, 27)
    figure = again.figure()
    assert "accuracy (%)" in figure.subfigs[0].get_suptitle()
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_the_model_of_any_task_answers_as_the_run_did(world: World, tmp_path: Path) -> None:
    data = own()
    run = dualprompt.fit(data, SMALL, backbone=str(world.weights), tasks=2, out=tmp_path / "run", **QUICK)
    assert isinstance(run, FinishedRun)
    assert run.tasks == (("0", "1"), ("2", "3"))
    pixels, labels = noise(8, 1)
    truth = np.concatenate([labels[labels < 2], labels[labels >= 2]])
    images = run.images(np.concatenate([pixels[labels < 2], pixels[labels >= 2]]))
    answered = run.model().predict(Batch(lambda: images, torch.from_numpy(truth))).logits.argmax(dim=1)
    assert answered.tolist() == run.predictions.answer[-1].tolist()
    assert run.model(0).predict(Batch(lambda: images, torch.from_numpy(truth))).logits.shape == (8, 2)
    assert run.state(0)["bank.e_prompt.0"].shape == (2, 2, 3, 16)
    assert torch.equal(run.state(0)["bank.task_key.0"], run.state(1)["bank.task_key.0"])
    with pytest.raises(DualPromptError, match="has 2 tasks, 0 to 1; found 2"):
        run.model(2)
    assert "own" not in DATASETS


def test_prompts_logits_and_answers(world: World, tmp_path: Path) -> None:
    run = dualprompt.fit(own(), SMALL, backbone=str(world.weights), tasks=2, out=tmp_path / "run", **QUICK)
    assert isinstance(run, FinishedRun)
    prompts = run.prompts()
    assert (prompts.g_layers, prompts.e_layers) == ((1,), (2, 3))
    assert prompts.g.shape == (1, 2, 2, 16)
    assert prompts.e.shape == (2, 2, 2, 3, 16)
    assert torch.equal(prompts.e[1], run.state()["bank.e_prompt.1"])
    assert prompts.keys is not None
    assert torch.equal(prompts.keys[0], run.state(0)["bank.task_key.0"])
    assert repr(prompts) == (
        "<prompts: g (1, 2, 2, 16) in layers (1,), e (2, 2, 2, 3, 16) in layers (2, 3), keys (2, 16)>"
    )
    assert run.prompts(0).e.shape[0] == 1
    assert not torch.equal(run.prompts(0).g, prompts.g)

    pixels, labels = noise(8, 1)
    order = np.argsort(labels // 2, kind="stable")  # the run's: task after task
    assert run.logits(pixels[order]).argmax(dim=1).tolist() == run.predictions.answer[-1].tolist()
    assert run.logits(pixels, task=0).shape == (8, 2)
    torch.testing.assert_close(run.logits([Image.fromarray(pixels[0])]), run.logits(pixels)[:1])
    sizes = [Image.fromarray(pixels[0]), Image.new("L", (40, 25), 90)]
    torch.testing.assert_close(run.logits(sizes)[:1], run.logits(pixels)[:1])
    with pytest.raises(DualPromptError, match="several images are meant"):
        run.logits(pixels[0])

    answers = run.answers()
    assert answers["right"].mean() * 100 == pytest.approx(run.accuracy_matrix[1].mean())
    assert answers["truth"].tolist() == [run.classes[label] for label in labels[order]]
    assert set(answers["matched"]) <= {"task 1", "task 2"}


def test_what_a_notebook_shows(world: World, tmp_path: Path) -> None:
    done = call("run", world.preset, "--out", tmp_path / "run", "--train.epochs", 1)
    assert done.code == 0, done.err
    found = dualprompt.load_run(tmp_path / "run")
    assert isinstance(found, FinishedGroup)
    assert (found.methods, len(found), found.accuracy_matrices.shape) == (("dualprompt", "frozen-head"), 2, (2, 3, 3))
    run = found["dualprompt"]
    assert isinstance(run, FinishedRun)
    assert repr(run).startswith("<dualprompt on tiny, 3 tasks, seed 0: A ")
    assert repr(run) in repr(found)
    assert f"{run.accuracy_matrix[2, 0]:.1f}</td>" in run._repr_html_()
    assert "frozen-head</td>" in found._repr_html_()
    assert found._ipython_key_completions_() == ["dualprompt", "frozen-head"]
    assert found.summary()["dualprompt"]["average_accuracy"] == (run.result["average_accuracy"], None)
    assert len(found.curves().axes) == len(run.curves().axes) == 2
    with pytest.raises(AttributeError, match=r"take one of the 2, as group\['dualprompt'\]\.accuracy_matrix"):
        found.accuracy_matrix  # noqa: B018
    assert not hasattr(found, "_repr_png_")
    with pytest.raises(DualPromptError, match="no run of 'dualpromt'; did you mean 'dualprompt'"):
        found["dualpromt"]
    with pytest.raises(DualPromptError, match="has no G- and E-Prompts"):
        found["frozen-head"].prompts()
    with pytest.raises(DualPromptError, match="holds run; give the folder of one of them"):
        dualprompt.load_run(tmp_path)
    assert {"fit", "load_run", "dataset_of", "ContinualLearner"} <= set(dir(dualprompt))


def test_a_study(world: World, tmp_path: Path) -> None:
    done = call("study", "prompting", world.preset, "--seeds", 1, "--train.epochs", 1, "--runs", tmp_path / "runs",
                "--out", tmp_path / "study")  # fmt: skip
    assert done.code == 0, done.err
    study = dualprompt.load_run(tmp_path / "study")
    assert isinstance(study, FinishedStudy)
    assert study.finding
    assert study.finding in repr(study)
    assert len(study.runs()) >= 2
    [first, *_] = study.frames().values()
    assert len(first) >= 2
    assert all(figure.axes for figure in study.figures().values())
    assert "<table>" in study._repr_html_()


def test_splits_as_others_have_them(world: World, tmp_path: Path) -> None:
    pixels, labels = noise(8)
    rows = Rows([Image.fromarray(each) for each in pixels], labels.tolist())
    pairs = Pairs(list(torch.from_numpy(pixels).permute(0, 3, 1, 2)), labels.tolist())
    given: dict[str, Any] = {"rows": {"train": rows, "validation": rows}, "pairs": (pairs, pairs)}
    given["arrays"] = ((pixels, labels), (pixels, labels))
    matrices = []
    for name, benchmark in given.items():
        run = dualprompt.fit(
            benchmark, "simple-cil", backbone=str(world.weights), tasks=2, out=tmp_path / name, progress=False
        )
        assert isinstance(run, FinishedRun)
        matrices.append(run.result["accuracy_matrix"])
    assert matrices[0] == matrices[1] == matrices[2]
    wrongs: list[tuple[Any, str]] = [({"train": rows}, "found train"), (rows, "found Rows"), ([rows] * 3, "Rows, Rows")]
    for wrong, message in wrongs:
        with pytest.raises(DualPromptError, match=message):
            dualprompt.fit(wrong, "simple-cil", out=tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_runs_of_one_second_have_folders_of_their_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALPROMPT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    for seed in range(3):
        dualprompt.fit(own(), "simple-cil", backbone=str(world.weights), tasks=2, seed=seed)
    [first, second, third] = sorted((tmp_path / "runs").iterdir())
    assert (second.name, third.name) == (f"{first.name}-2", f"{first.name}-3")
    with pytest.raises(DualPromptError, match="tasks"):
        dualprompt.fit(own(), "simple-cil", backbone=str(world.weights), tasks=77)
    assert len(list((tmp_path / "runs").iterdir())) == 3, "a run that did not begin leaves no folder"
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("DUALPROMPT_RUNS", str(tmp_path / "file"))
    with pytest.raises(DualPromptError, match="cannot be written"):
        dualprompt.fit(own(), "simple-cil", backbone=str(world.weights), tasks=2)


def test_several_seeds_are_a_group_of_other_runs(world: World, tmp_path: Path) -> None:
    found = dualprompt.fit(own(), "simple-cil", backbone=str(world.weights), tasks=2, seeds=2, out=tmp_path / "runs")
    assert isinstance(found, FinishedGroup)
    again = dualprompt.load_run(tmp_path / "runs")
    assert isinstance(again, FinishedGroup)
    assert again.frame()["seed"].tolist() == [0, 1]
    assert again.frame()["method"].tolist() == ["simple-cil"] * 2


def test_a_task_for_each_dataset(world: World, tmp_path: Path) -> None:
    pair = [dataset_of(name, noise(8, seed), noise(4, 9)) for seed, name in enumerate(("one", "two"))]
    run = dualprompt.fit(pair, "simple-cil", backbone=str(world.weights), out=tmp_path / "run")
    assert isinstance(run, FinishedRun)
    assert run.result["tasks"] == ["one", "two"]
    with pytest.raises(DualPromptError, match="two of the datasets have one name"):
        dualprompt.fit([pair[0], pair[0]], "simple-cil", out=tmp_path / "other")


def test_pictures_and_arrays_make_the_same_dataset() -> None:
    pixels, labels = noise(8)
    arrays = dataset_of("own", (pixels, labels), (pixels, labels), Pairs.classes)
    torches = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    forms: list[Any] = [
        Pairs([Image.fromarray(each) for each in pixels], labels.tolist()),
        Pairs(list(torches), labels.tolist()),
        (torches, torch.from_numpy(labels)),
    ]
    for form in forms:
        found = dataset_of("own", form, form, Pairs.classes)
        assert found.classes == arrays.classes
        assert np.array_equal(found.train.source.pixels, pixels)  # type: ignore[union-attr]
        assert found.train.labels.tolist() == labels.tolist()
    rows = Rows([Image.fromarray(each) for each in pixels], labels.tolist())
    assert dataset_of("own", rows, rows).classes == Names.names
    assert dataset_of("own", forms[0], forms[0]).classes == Pairs.classes


def test_pictures_of_all_sizes(world: World, tmp_path: Path) -> None:
    pictures = [Image.new("L" if i % 2 else "RGB", (10 + i, 30 - i), 20 * i) for i in range(8)]
    data = Pairs(pictures, [i % 4 for i in range(8)])
    run = dualprompt.fit(
        dataset_of("own", data, data), "simple-cil", backbone=str(world.weights), tasks=2, out=tmp_path / "run"
    )
    assert isinstance(run, FinishedRun)
    assert run.tasks == (("a", "b"), ("c", "d"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((np.zeros((2, 4, 4, 3)), [0, 1]), "without normalisation; found float64"),
        ((np.zeros((2, 4, 4, 3), np.uint8), [0]), "one whole number for each image"),
        ((np.zeros((2, 4, 4, 3), np.uint8), [0.5, 1]), "one whole number for each image"),
        ((np.zeros((2, 4, 4, 3), np.uint8), [-1, 1]), "labels count from 0"),
        (iter(()), "has items and a length"),
        (Pairs([{}], [0]).images, "it needs one of image, img"),
        ([1], "an item is a pair"),
    ],
)
def test_what_cannot_be_a_dataset_is_said(train: Any, message: str) -> None:
    with pytest.raises(DualPromptError, match=message):
        dataset_of("own", train, train)


def test_names_that_are_taken_are_refused(world: World, tmp_path: Path) -> None:
    data = dataset_of("cifar100", noise(8), noise(8))
    with pytest.raises(DualPromptError, match="there is a dataset 'cifar100' already"):
        dualprompt.fit(data, "simple-cil", backbone=str(world.weights), tasks=2, out=tmp_path / "run")
    with pytest.raises(DualPromptError, match="is not a run directory"):
        dualprompt.load_run(tmp_path)
