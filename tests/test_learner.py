"""The life of a learner: taught from folders, asked, made to forget, kept, killed, resumed."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dualprompt.backbones.known import REPLACED
from dualprompt.data.sources import ArraySource, Dataset, FileSource, Split
from dualprompt.errors import DualPromptError
from dualprompt.learner import Answer, ContinualLearner, TaskInfo
from dualprompt.lessons.task import held_out
from dualprompt.methods.base import Batch
from dualprompt.model import images, saved, versions
from sandbox import World, call, contents, start, write_weights

TINY = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 3, "train.batch_size": 4, "train.epochs": 2}
FLAGS = ["--method", "dualprompt"]
FLAGS += [word for key, value in TINY.items() for word in (f"--{key if '.' in key else f'method.{key}'}", f"{value}")]
TASKS = {"spring": ("ash", "birch"), "summer": ("cedar", "elm"), "autumn": ("fir", "hazel")}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The world's trees, a folder of class folders for each task."""
    root = tmp_path_factory.mktemp("seasons")
    for name, classes in TASKS.items():
        for label in classes:
            shutil.copytree(world.images / "train" / label, root / name / label)
    return {name: root / name for name in TASKS}


@pytest.fixture(scope="module")
def kept(world: World, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows all three tasks."""
    torch.set_num_threads(1)
    learner = empty(world)
    for name in TASKS:
        learner.learn(folders[name])
    return learner.save(tmp_path_factory.mktemp("kept") / "model")


def empty(world: World, **options: Any) -> ContinualLearner:
    return ContinualLearner(str(world.weights), "dualprompt", options=TINY | options, device="cpu")


def trees(world: World, *classes: str, split: str = "test") -> list[Path]:
    return [path for label in classes for path in sorted((world.images / split / label).iterdir())]


def outputs(learner: ContinualLearner, images: list[Path]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return learner.network()(torch.from_numpy(np.stack([learner.pixels(path) for path in images])))


ALL = tuple(label for classes in TASKS.values() for label in classes)


def test_it_learns_three_tasks_and_tells_them_apart(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    assert learner.classes == ALL
    assert [(task.id, task.name, task.classes, task.images) for task in learner.tasks] == [
        (number, name, classes, 13) for number, (name, classes) in enumerate(TASKS.items(), start=1)
    ]
    found = learner.evaluate({label: trees(world, label) for label in ALL})
    assert found.images == 27
    assert found.accuracy > 60  # guessing gives 17
    assert found.accuracy == pytest.approx(
        sum(found.by_class[label] * len(trees(world, label)) for label in ALL) / found.images
    )


def test_a_new_process_answers_the_same(world: World, kept: Path) -> None:
    program = (
        "import sys, json, torch; torch.set_num_threads(1)\n"
        "from dualprompt import ContinualLearner\n"
        "answers = ContinualLearner.load(sys.argv[1]).predict(sys.argv[2])\n"
        "print(json.dumps([answer.to_dict() for answer in answers]))"
    )
    images = world.images / "test"
    done = subprocess.run(
        [sys.executable, "-c", program, str(kept), str(images)], capture_output=True, text=True, check=True
    )
    mine = ContinualLearner.load(kept).predict(images)
    assert len(mine) == 27
    assert json.loads(done.stdout) == [answer.to_dict() for answer in mine]


def test_an_answer_adds_up(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    image = trees(world, "ash")[0]
    answer = learner.predict(image, top_k=99)
    assert isinstance(answer, Answer)
    assert answer.path == str(image)
    assert sorted(score.label for score in answer.top) == sorted(ALL)
    assert sum(score.probability for score in answer.top) == pytest.approx(1, abs=1e-5)
    assert [answer.label, answer.probability] == [answer.top[0].label, answer.top[0].probability]
    assert answer.probability == max(score.probability for score in answer.top)
    logits, task, similarity = outputs(learner, [image])
    assert answer.label == learner.classes[int(logits.argmax())]
    assert answer.probability == pytest.approx(float(logits.softmax(dim=1).max()))
    assert (answer.task, answer.similarity) == (learner.tasks[int(task)].name, pytest.approx(float(similarity)))
    means = load_file(next(kept.glob("weights-*")))
    query = learner._base.backbones.frozen()(_normalised(learner, image))[0]
    all_means = torch.cat([means[f"matching.means.{number}"] for number in range(3)])
    cosines = torch.nn.functional.cosine_similarity(query[None], all_means)
    assert answer.similarity == pytest.approx(float(cosines.max()), abs=1e-5)


def _normalised(learner: ContinualLearner, image: Path) -> torch.Tensor:
    return torch.from_numpy(learner.pixels(image)).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.mark.parametrize("what", ["spring", "summer", "autumn", 2])
def test_forgetting_a_task_leaves_the_others_bit_for_bit(world: World, kept: Path, what: str | int) -> None:
    learner = ContinualLearner.load(kept)
    images = trees(world, *ALL)
    logits, task, _ = outputs(learner, images)
    gone = learner.forget(what)
    assert isinstance(gone, TaskInfo)
    place = gone.id - 1
    stay = [number for number, label in enumerate(ALL) if label not in gone.classes]
    others = task != place  # images that were matched to it must now be matched to another
    renumbered = task - (task > place).long()
    for asked in (learner, reloaded(learner, kept.parent / "forgetful")):
        after, matched, _ = outputs(asked, images)
        assert torch.equal(matched[others], renumbered[others])
        assert torch.equal(after[others], logits[others][:, stay])
        assert asked.classes == tuple(ALL[number] for number in stay)
    assert others.sum() > 10
    answers = learner.predict(images, top_k=99)
    assert not {score.label for answer in answers for score in answer.top} & set(gone.classes)


def test_forgetting_a_class_leaves_the_others_bit_for_bit(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    images = trees(world, *ALL)
    logits, task, _ = outputs(learner, images)
    assert learner.forget("cedar") == "cedar"
    after, matched, _ = outputs(learner, images)
    same = matched == task
    assert same[[label not in ("cedar",) for label in ALL for _ in trees(world, label)]].float().mean() > 0.8
    assert torch.equal(after[same], logits[same][:, [0, 1, 3, 4, 5]])
    assert learner.tasks[1].classes == ("elm",)
    assert learner.classes == ("ash", "birch", "elm", "fir", "hazel")


def test_what_is_forgotten_is_not_on_disk(kept: Path, tmp_path: Path) -> None:
    before = load_file(next(kept.glob("weights-*")))
    learner = ContinualLearner.load(kept)
    learner.forget("cedar")
    learner.forget("autumn")
    after = load_file(next(learner.save(tmp_path / "model").glob("weights-*")))
    kept_rows = [row for value in after.values() if value.ndim for row in value.reshape(-1, value.shape[-1])]
    rows = {row.numpy().tobytes() for row in kept_rows}
    for name, value in before.items():
        forgotten = name.endswith(".2") or name in ("gaussians.means.1", "matching.means.1", "head.weight.1")
        if forgotten and name != "head.bias.2":
            gone = value if name.endswith(".2") else value[:1]
            assert not {row.numpy().tobytes() for row in gone.reshape(-1, value.shape[-1])} & rows, name
    text = (tmp_path / "model" / "model.json").read_text() + (tmp_path / "model" / "README.md").read_text()
    assert not any(word in text for word in ("cedar", "fir", "hazel", "autumn"))
    assert "elm" in text


def reloaded(learner: ContinualLearner, path: Path) -> ContinualLearner:
    return ContinualLearner.load(learner.save(path))


def test_after_forgetting_it_learns_on(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    learner = ContinualLearner.load(kept)
    learner.forget("summer")
    learner.forget("ash")
    task = reloaded(learner, tmp_path / "model").learn(folders["summer"])
    assert (task.id, task.name) == (4, "summer")
    task = learner.learn(folders["summer"], "summer again")
    assert (task.id, task.name) == (4, "summer again")  # ids are never given twice
    assert learner.classes == ("birch", "fir", "hazel", "cedar", "elm")
    assert all(len(row) == 16 for row in torch.cat(list(learner._model.method.head.weight)))  # pyright: ignore
    assert sum(len(b) for b in learner._model.method.head.bias) == 5  # pyright: ignore
    found = learner.evaluate({label: trees(world, label) for label in learner.classes})
    assert found.accuracy > 60


def test_forgetting_everything_leaves_an_empty_learner(world: World, kept: Path, folders: dict[str, Path]) -> None:
    learner = ContinualLearner.load(kept)
    for label in ALL:
        learner.forget(label)
    learner = reloaded(learner, kept.parent / "empty")
    assert (learner.tasks, learner.classes) == ((), ())
    for ask in (lambda: learner.predict(trees(world, "ash")), learner.network, learner.calibrate):
        with pytest.raises(DualPromptError, match="knows no classes yet; teach it"):
            ask()
    again, new = learner.learn(folders["spring"]), empty(world)
    new.learn(folders["spring"])
    assert again.id == 4
    images = trees(world, "ash", "birch")
    assert learner.predict(images) == new.predict(images)  # nothing of the past is left


def test_a_task_of_one_class(world: World, folders: dict[str, Path]) -> None:
    learner = empty(world)
    learner.learn({"ash": trees(world, "ash", split="train")})
    assert learner.predict(trees(world, "ash")[0]).probability == 1
    learner.learn(folders["summer"])
    start_of_prompt = learner._model.method.state()["bank.e_prompt.1"].clone()
    g_prompt = learner._model.method.state()["bank.g_prompt"].clone()
    task = learner.learn({"fir": trees(world, "fir", split="train")}, "a fir")
    state = learner._model.method.state()
    assert torch.equal(state["bank.e_prompt.2"], start_of_prompt)  # where it starts from, untrained
    assert torch.equal(state["bank.g_prompt"], g_prompt)
    assert task.classes == ("fir",)
    found = learner.evaluate({label: trees(world, label) for label in ("ash", "cedar", "elm", "fir")})
    assert found.accuracy > 60
    assert learner.forget("a fir") == task
    assert learner.classes == ("ash", "cedar", "elm")


def test_a_single_image_is_enough(world: World, folders: dict[str, Path]) -> None:
    learner = empty(world)
    image = trees(world, "ash")[0]
    assert learner.learn({"ash": [image]}).accuracy is None
    learner.learn({"birch": trees(world, "birch")[:1], "elm": trees(world, "elm")[:1]})
    assert all(np.isfinite(answer.top[0].probability) for answer in learner.predict(trees(world, *ALL)))
    assert learner.predict(image).label == "ash"
    with pytest.raises(DualPromptError, match="no images were held out"):
        learner.calibrate()


def test_one_class_is_refused_where_it_cannot_be_learned(world: World) -> None:
    learner = empty(world, head="linear")
    with pytest.raises(DualPromptError, match="one class alone cannot be learned by 'dualprompt'"):
        learner.learn({"ash": trees(world, "ash")})


@pytest.mark.parametrize(
    ("method", "own", "advised"),
    [
        ("dualprompt", {"head": "linear", "e_layers": [2, 3]}, ["training_logits", "head"]),
        ("l2p", {"pool_size": 4, "top_n": 2}, ["training_logits"]),
    ],
)
def test_what_is_advised_for_one_class_can_be_done(
    method: str, own: dict[str, Any], advised: list[str], world: World
) -> None:
    lesson = {"ash": trees(world, "ash")[:2]}
    quick = own | {"train.epochs": 1}
    with pytest.raises(DualPromptError) as refused:
        ContinualLearner(str(world.weights), method, options=quick, device="cpu").learn(lesson)
    options = dict(re.findall(r"set (\w+): (\w+)", str(refused.value)))
    assert list(options) == advised
    for key, value in options.items():
        able = ContinualLearner(str(world.weights), method, options=quick | {key: value}, device="cpu")
        able.learn(lesson)
        assert able.classes == ("ash",)


def test_projected_heads_learn_one_class_after_another(world: World) -> None:
    options = TINY | {"projection": 60}
    learner = ContinualLearner(str(world.weights), "dualprompt-rp", options=options, device="cpu")
    for name in ("ash", "birch", "elm"):
        learner.learn({name: trees(world, name, split="train")})
    images = trees(world, "ash", "birch", "elm")
    right = [answer.label == path.parent.name for answer, path in zip(learner.predict(images), images, strict=True)]
    assert sum(right) > 0.8 * len(images)  # a third by chance


def test_more_of_a_known_class(world: World, folders: dict[str, Path]) -> None:
    learner = empty(world)
    learner.learn(folders["spring"])
    more = {"ash": trees(world, "ash"), "yew": trees(world, "fir")}
    with pytest.raises(DualPromptError, match=r"class 'ash' is known already, from task 'spring'.*again=True"):
        learner.learn(more)
    assert learner.classes == ("ash", "birch")
    learner.learn(more, "more", again=True)
    assert learner.classes == ("ash", "birch", "yew")
    images = trees(world, "ash", "birch", "fir")
    logits, *_ = outputs(learner, images)
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([learner.pixels(path) for path in images]))
        network: Any = learner.network()
        shown = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        raw = network.method.predict(Batch(lambda: shown, torch.zeros(len(shown)))).logits
    assert raw.shape[1] == 4
    expected = torch.stack([torch.logaddexp(raw[:, 0], raw[:, 2]), raw[:, 1], raw[:, 3]], dim=1)
    torch.testing.assert_close(logits, expected)
    assert learner.forget("ash") == "ash"  # both experts go
    assert learner.classes == ("birch", "yew")
    assert torch.equal(outputs(learner, images)[0].argmax(1), outputs(learner, images)[0].argmax(1))


def image_forms(path: Path) -> dict[str, Any]:
    with Image.open(path) as opened:
        opened.load()
        return {
            "path": path,
            "string": str(path),
            "bytes": path.read_bytes(),
            "pillow": opened.copy(),
            "array": np.asarray(opened),
        }


def test_every_form_of_an_image_is_the_same_image(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    forms = image_forms(trees(world, "elm")[0])
    answers = {name: learner.predict(form) for name, form in forms.items()}
    assert all(replace(answer, path=None) == replace(answers["path"], path=None) for answer in answers.values())
    together = learner.predict(list(forms.values()))  # sums in a batch are cut in other ways
    assert [(a.path, a.label, a.task) for a in together] == [(a.path, a.label, a.task) for a in answers.values()]
    assert together[0].probability == pytest.approx(answers["path"].probability, abs=1e-5)
    assert learner.predict_pixels(np.stack([learner.pixels(forms["path"])])) == [answers["array"]]
    grey = np.asarray(Image.open(forms["path"]).convert("L"))
    assert np.array_equal(learner.pixels(grey), learner.pixels(np.dstack([grey] * 3)))


def test_images_are_upright_and_square(kept: Path) -> None:
    learner = ContinualLearner.load(kept)
    picture = np.zeros((40, 20, 3), np.uint8)
    picture[:20] = (255, 0, 0)
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(picture[::-1, ::-1].copy()).save(turned, "PNG", exif=exif)
    assert np.array_equal(learner.pixels(turned.getvalue()), learner.pixels(picture))
    assert learner.pixels(picture).shape == (16, 16, 3)


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG")
    return file.getvalue()


BAD: dict[str, tuple[Any, str]] = {
    "missing": ("nowhere.jpg", "nowhere.jpg cannot be read: No such file or directory"),
    "text": (b"hello", "an image given as bytes cannot be read: it is no image, or damaged"),
    "truncated": (jpeg(300, 300)[:500], "an image given as bytes cannot be read: it is no image, or damaged"),
    "nothing": (b"", "an image given as bytes cannot be read"),
    "huge": (jpeg(8200, 8200), r"an image given as bytes has 8200 × 8200 pixels, more than 64,000,000"),
    "float": (np.zeros((4, 4, 3)), r"an array must be uint8 .* found float64 \(4, 4, 3\)"),
    "channels": (np.zeros((4, 4, 2), np.uint8), r"found uint8 \(4, 4, 2\)"),
    "empty": (np.zeros((0, 4, 3), np.uint8), r"found uint8 \(0, 4, 3\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named(world: World, kept: Path, name: str) -> None:
    image, message = BAD[name]
    learner = ContinualLearner.load(kept)
    with pytest.raises(DualPromptError, match=message) as error:
        learner.predict([trees(world, "ash")[0], image])
    assert "\n" not in str(error.value)
    before = learner.info()
    with pytest.raises(DualPromptError, match=message):
        learner.learn({"yew": [trees(world, "ash")[0], image], "oak": trees(world, "elm")})
    assert learner.info() == before


def test_bad_input_to_learn_is_one_line_and_changes_nothing(world: World, kept: Path, tmp_path: Path) -> None:
    learner = ContinualLearner.load(kept)
    before, images = learner.info(), trees(world, "ash")
    (tmp_path / "empty" / "oak").mkdir(parents=True)
    (tmp_path / "flat").mkdir()
    shutil.copy(images[0], tmp_path / "flat" / "a.png")
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "nowhere", {}, "nowhere does not exist; give a folder that holds one folder of images"),
        (images[0], {}, "is not a folder"),
        (tmp_path / "empty", {}, "class folders without images: 'oak'"),
        (tmp_path / "flat", {}, "holds no class folders"),
        (world.images, {}, "holds 'test', a split and no class"),
        ({3: images}, {}, "classes are called by strings, found 3"),
        (images, {}, "or a dataset of \\(image, label\\) pairs"),
        (7, {}, "found int"),
        ({"oak": [None]}, {}, "found NoneType"),
        ({}, {}, "there are no classes to learn"),
        ({"oak": []}, {}, "class 'oak' has no images"),
        ({"oak": images[0]}, {}, "class 'oak' must have a list of images"),
        ({"": images}, {}, "cannot be the name of a class"),
        ({"oak": images}, {"name": "spring"}, "a task is called 'spring' already"),
        ({"oak": images}, {"name": "\n"}, "cannot be the name of a task"),
        ({"oak": images, "yew": images}, {"epochs": 0}, "'train.epochs'"),
    ]
    for data, options, message in refusals:
        with pytest.raises(DualPromptError, match=message) as error:
            learner.learn(data, **options)
        assert "\n" not in str(error.value)
    for what, message in (("yew", "no task or class 'yew'"), (9, "no task with id 9")):
        with pytest.raises(DualPromptError, match=message):
            learner.forget(what)
    assert learner.info() == before


def test_names_for_forgetting_are_never_guessed(world: World) -> None:
    learner = empty(world)
    learner.learn({"ash": trees(world, "ash"), "birch": trees(world, "birch")}, "ash")
    with pytest.raises(DualPromptError, match="'ash' is a task and a class"):
        learner.forget("ash")
    with pytest.raises(DualPromptError, match="there is no class 'oak'"):
        learner.forget("oak", "class")
    assert learner.forget("ash", "class") == "ash"
    assert learner.classes == ("birch",)
    assert isinstance(learner.forget("ash", "task"), TaskInfo)
    assert learner.classes == ()


@pytest.mark.parametrize("other", [(), ("elm",)])
def test_a_class_of_several_tasks_is_forgotten_in_all(world: World, other: tuple[str, ...], tmp_path: Path) -> None:
    learner = empty(world)
    learner.learn({"ash": trees(world, "ash")}, "alone", epochs=1)
    learner.learn({name: trees(world, name) for name in ("ash", *other)}, "again", epochs=1, again=True)
    learner.learn({"fir": trees(world, "fir")}, "last", epochs=1)
    learner.evaluate({"ash": trees(world, "ash"), "fir": trees(world, "fir")}, record=True)
    assert learner.forget("ash") == "ash"
    for asked in (learner, reloaded(learner, tmp_path / "model")):
        assert asked.classes == (*other, "fir")
        assert [(task.name, task.classes) for task in asked.tasks] == [("again", other)] * bool(other) + [
            ("last", ("fir",))
        ]
        assert {score.label for score in asked.predict(trees(world, "fir")[0]).top} == set(asked.classes)
        assert asked.tasks[-1].measured.keys() == {3}  # what was measured with the forgotten class goes too
    learner.learn({"ash": trees(world, "ash")}, epochs=1)  # it is not known any more
    learner.forget("ash")
    with pytest.raises(DualPromptError, match="no task or class 'ash'"):
        learner.forget("ash")


class Pairs:
    """A dataset as other libraries have them."""

    classes = ("ash", "birch")

    def __init__(self, world: World) -> None:
        self.items = [(Image.open(path), n) for n, name in enumerate(self.classes) for path in trees(world, name)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.items[index]


def test_datasets_are_learned_as_their_images_are(world: World, folders: dict[str, Path]) -> None:
    plain, ours, others = empty(world), empty(world), empty(world)
    files = {name: trees(world, name) for name in Pairs.classes}
    plain.learn(files, epochs=1)
    labels = np.repeat([0, 1], [len(own) for own in files.values()])
    pixels = np.stack(
        [np.asarray(Image.open(path).convert("RGB").resize((20, 20))) for own in files.values() for path in own]
    )
    split = Split(FileSource(tuple(path for own in files.values() for path in own)), labels)
    ours.learn(Dataset("trees", Pairs.classes, split, split), epochs=1)
    others.learn(Pairs(world), epochs=1)
    images = trees(world, *ALL)
    for learner in (ours, others):
        assert learner.classes == plain.classes
        assert torch.equal(outputs(learner, images)[0], outputs(plain, images)[0])
    arrays = empty(world)
    arrays.learn(Dataset("trees", Pairs.classes, Split(ArraySource(pixels), labels), split), epochs=1)
    assert arrays.tasks[0].images == len(labels)
    numbered = empty(world)
    numbered.learn([(image, int(label)) for image, label in zip(pixels, labels, strict=True)], epochs=1)
    assert numbered.classes == ("0", "1")


def test_bad_images_are_left_out_if_asked(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["spring"], tmp_path / "photos"))
    (folder / "ash" / "0-broken.png").write_bytes(b"no image")
    model = tmp_path / "model"
    made = ("learn", model, folder, "--backbone", world.weights, "--device", "cpu", "--epochs", 1, *FLAGS)
    refused = call(*made)
    assert "1 of 14 images cannot be used" in refused.error
    assert "replace it or leave it out" in refused.error
    done = call(*made, "--skip-bad", "--json")
    assert done.code == 0, done.err
    assert "0-broken.png" in done.err
    assert done.json["learned"]["images"] == 13
    whole = empty(world)
    with pytest.raises(DualPromptError, match="class 'oak' has no image that can be read"):
        whole.learn({"ash": trees(world, "ash"), "oak": [b"none"]}, skip_bad=True)


def test_a_class_may_be_called_like_a_split(world: World, tmp_path: Path) -> None:
    for name in ("train", "bus"):
        shutil.copytree(world.images / "train" / "ash", tmp_path / name)
    learner = empty(world)
    learner.learn(tmp_path, epochs=1)
    assert learner.classes == ("bus", "train")


def test_a_backbone_may_move(world: World, kept: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    shutil.copy(world.weights, old)
    learner = ContinualLearner(str(old), "dualprompt", options=TINY, device="cpu")
    learner.learn({"ash": trees(world, "ash"), "elm": trees(world, "elm")}, epochs=1)
    model = learner.save(tmp_path / "model")
    assert str(tmp_path) not in (model / "README.md").read_text()  # it may be pushed
    expected = learner.predict(trees(world, "ash"))
    old.rename(new)
    assert f"dualprompt info {model} --backbone PLACE" in call("predict", model, trees(world, "ash")[0]).error
    assert call("info", model, "--backbone", new).code == 0
    assert ContinualLearner.load(model).predict(trees(world, "ash")) == expected


def test_a_card_that_cannot_be_written_is_told_and_the_model_saved(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(kept, tmp_path / "model"))
    (model / "README.md").unlink()
    (model / "README.md").mkdir()
    learner = ContinualLearner.load(model)
    learner.forget("elm")
    learner.save(model)
    assert "its card is not" in caplog.text
    assert "elm" not in ContinualLearner.load(model).classes


def test_two_commands_do_not_make_one_model(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / ".model.learning"
    work.mkdir()
    with saved.held(work):
        made = call("learn", tmp_path / "model", folders["spring"], "--backbone", world.weights, *FLAGS)
    assert f"{tmp_path / 'model'} is being learned by another command" in made.error
    assert ".learning" not in made.error
    assert call("learn", tmp_path / "model", folders["spring"], "--backbone", world.weights, *FLAGS).code == 0
    assert not work.exists()


def test_a_refused_lesson_leaves_nothing(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    model, new = Path(shutil.copytree(kept, tmp_path / "model")), tmp_path / "deep" / "new"
    new.parent.mkdir()
    (model / ".lock").touch()
    before = contents(tmp_path)
    assert "does not exist" in call("learn", new, tmp_path / "nowhere", "--backbone", world.weights, *FLAGS).error
    assert "is known already" in call("learn", model, folders["spring"]).error
    assert (
        "gone.safetensors does not exist"
        in call("learn", new, folders["spring"], "--backbone", tmp_path / "gone.safetensors").error
    )
    assert contents(tmp_path) == before
    assert not list(new.parent.iterdir())


def test_nothing_of_the_images_stays(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    cache = Path(os.environ["DUALPROMPT_CACHE"])
    before = contents(cache)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        learner = empty(world)
        learner.learn(folders["spring"])
        learner.predict(folders["spring"])
    assert contents(cache) == before
    assert list(temporary.iterdir()) == []
    kept = contents(learner.save(tmp_path / "model"))
    assert sorted(Path(name).suffix for name in kept) == [".json", ".md", ".safetensors"]
    # The largest things that are kept for a task are as large whatever the number of images.
    few = {label: trees(world, label, split="train")[:3] for label in TASKS["spring"]}
    other = empty(world)
    other.learn(few)
    sizes = [{name: tuple(v.shape) for name, v in each._model.method.state().items()} for each in (learner, other)]
    assert sizes[0] == sizes[1]


def test_held_out_images_are_never_trained_on(world: World, folders: dict[str, Path]) -> None:
    """Other pixels in held-out images give the same model, but other accuracy or trust."""
    learner, other = empty(world), empty(world)
    images = {label: [learner.pixels(path) for path in trees(world, label, split="train")] for label in ("ash", "elm")}
    labels = np.repeat([0, 1], [len(own) for own in images.values()])
    held = held_out(labels, ("ash", "elm"), seed=learner._base.config.seed)
    assert [held[labels == label].sum() for label in (0, 1)] == [1, 1]  # a fifth of 6 and 7
    task = learner.learn(images)
    changed = {label: list(own) for label, own in images.items()}
    changed["ash"][int(np.flatnonzero(held)[0])] = np.full((16, 16, 3), 7, np.uint8)
    other.learn(changed)
    for name, value in learner._model.method.state().items():
        assert torch.equal(value, other._model.method.state()[name]), name
    assert learner._model.trust != other._model.trust
    assert task.accuracy in (0, 50, 100)
    assert learner.learn({"oak": images["ash"][:4], "yew": images["elm"][:4]}).accuracy is None  # too few to hold out


def test_none_of_these(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    learner = empty(world)
    learner.learn(folders["spring"])
    learner.learn(folders["summer"])
    images = trees(world, *ALL)
    assert all(answer.label for answer in learner.predict(images))
    known = learner._model.trust
    scores = sorted(each.trust for own in known.values() for values in own.values() for each in values)
    found = learner.calibrate(trees(world, "fir", "hazel"), accept=0.75)
    assert found.known == len(scores) == 4
    assert found.unknown == 9
    assert learner.threshold == found.threshold == scores[0]
    for level in found.levels:
        assert level.accepted == 100 * sum(score >= level.threshold for score in scores) / 4
    loose = learner.predict(images)
    learner.threshold = 1.1
    strict = learner.predict(images)
    assert all(answer.label is None for answer in strict)
    assert {(answer.probability, answer.task) for answer in strict} == {(None, None)}  # of a class that is not named
    assert [answer.top for answer in strict] == [answer.top for answer in loose]
    assert learner.evaluate({"ash": trees(world, "ash")}).rejected == 100
    assert reloaded(learner, tmp_path / "model").threshold == 1.1
    with pytest.raises(DualPromptError, match="accept must be above 0"):
        learner.calibrate(accept=2)


def test_none_of_these_has_no_probability(world: World, kept: Path, tmp_path: Path) -> None:
    """The probability of the best class belongs to its name."""
    learner = ContinualLearner.load(kept, "cpu")
    learner.threshold = 1.1
    model, image = learner.save(tmp_path / "model"), trees(world, "ash")[0]
    best, second = learner.predict([image])[0].top[:2]
    row = call("predict", model, image).out.splitlines()[-2]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:3] == ["none of these", "–"]
    assert cells[-1].startswith(f"{best.label} {100 * best.probability:.0f} %, {second.label} ")
    header, line = csv.reader(io.StringIO(call("predict", model, image, "--csv").out))
    found = dict(zip(header, line, strict=True))
    assert (found["label"], found["probability"], found["label_1"]) == ("", "", best.label)


def test_what_was_measured_with_a_forgotten_class_is_dropped(world: World, kept: Path) -> None:
    learner = ContinualLearner.load(kept, "cpu")
    learner.evaluate({label: trees(world, label) for label in ALL}, record=True)
    before = {task.name: task for task in learner.tasks}
    label = before["spring"].classes[0]
    learner.forget(label)
    after = {task.name: task for task in learner.tasks}
    own = learner._model.trust[1]["birch"]
    assert (before["spring"].held, after["spring"].held) == (2, len(own)) == (2, 1)
    assert after["spring"].accuracy == 100 * sum(each.ranked[0] == "birch" for each in own)
    assert after["summer"].accuracy == before["summer"].accuracy
    said = {name for task in learner._model.trust.values() for own in task.values() for e in own for name in e.ranked}
    assert label not in said
    assert {task for row in after.values() for task in row.measured} == {2, 3}


def test_what_forgets_only_rows_says_so(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--backbone", world.weights, "--method", "coda-prompt", "--method.layers", "1,2", "--epochs", 1]
    assert call("learn", tmp_path / "model", folders["spring"], "--device", "cpu", *flags).code == 0
    assert "what tasks share was shaped by it, and stays" in call("forget", tmp_path / "model", "ash").out


def test_names_in_lessons(world: World, tmp_path: Path) -> None:
    """Names that look the same are one class; those that differ by case only are refused, here and across lessons."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    images = trees(world, "ash", split="train")
    learner = empty(world)
    with pytest.raises(DualPromptError, match="differ by case only"):
        learner.learn({"Oak": images, "oak": images})
    task = learner.learn({composed: images[:3], apart: images[3:], "elm": trees(world, "elm")}, epochs=1)
    assert task.classes == (composed, "elm")
    assert task.images == len(images) + len(trees(world, "elm"))
    for again in (False, True):
        with pytest.raises(DualPromptError, match="classes 'elm' and 'Elm' differ by case only"):
            learner.learn({"Elm": images, "fir": images}, again=again)
    with pytest.raises(DualPromptError, match="is known already"):
        learner.learn({apart: images, "fir": images})
    assert learner.evaluate({apart: images}).images == len(images)
    loaded = reloaded(learner, tmp_path / "model")
    assert loaded.forget(apart) == composed
    assert loaded.classes == ("elm",)


def test_a_model_of_another_backbone_is_refused(world: World, kept: Path, tmp_path: Path) -> None:
    write_weights(tmp_path / "other.safetensors", seed=4)
    with pytest.raises(DualPromptError, match="another backbone"):
        ContinualLearner.load(kept, backbone=str(tmp_path / "other.safetensors"))
    shutil.copy(world.weights, tmp_path / "moved.safetensors")
    moved = ContinualLearner.load(kept, backbone=str(tmp_path / "moved.safetensors"))
    images = trees(world, "ash")
    assert moved.predict(images) == ContinualLearner.load(kept).predict(images)


def test_a_model_of_an_embedded_backbone_that_was_replaced_is_refused(kept: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(kept, tmp_path / "old"))
    facts = json.loads((path / "model.json").read_text())
    for sha256, named in REPLACED.items():
        old = {"name": "embedded", "sha256": sha256, "input_size": None}
        (path / "model.json").write_text(json.dumps(facts | {"backbone": old}))
        before = contents(path)
        error = call("predict", path, tmp_path).error
        assert f"{path} was made with an embedded backbone ({named})" in error
        assert error.endswith("has replaced; learn its classes again, or keep the version that made it")
        assert contents(path) == before


def test_what_is_no_model_is_refused(kept: Path, tmp_path: Path) -> None:
    def broken(name: str, change: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(kept, path)
        change(path)
        return path

    def with_facts(**facts: Any) -> Any:
        def change(path: Path) -> None:
            said = json.loads((path / "model.json").read_text())
            (path / "model.json").write_text(json.dumps(said | facts))

        return change

    def short(path: Path) -> None:
        tensors = next(path.glob("weights-*"))
        tensors.write_bytes(tensors.read_bytes()[:-1])

    (tmp_path / "file").touch()
    cases = [
        (tmp_path / "nowhere", "does not exist; make one with `dualprompt learn"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path, "holds no model"),
        (broken("half", lambda path: (path / "model.json").unlink()), "holds no model"),
        (broken("no-tensors", lambda path: next(path.glob("weights-*")).unlink()), "cannot be read"),
        (broken("short", short), "wrong SHA-256"),
        (broken("text", lambda path: (path / "model.json").write_text("{")), "is damaged"),
        (broken("foreign", lambda path: (path / "model.json").write_text('{"a": 1}')), "of another program"),
        (broken("list", lambda path: (path / "model.json").write_text("[]")), "of another program"),
        (broken("newer", with_facts(format=2)), "has format 2, this version of dualprompt reads 1"),
        (broken("escape", with_facts(tensors={"file": "../x", "sha256": ""})), "is damaged"),
        (broken("rows", with_facts(rows=[7])), "is damaged"),
        (broken("tasks", with_facts(tasks=[{"id": 1}])), "is damaged"),
        (broken("method", with_facts(method={"name": "dualprompt", "bogus": 1})), "unknown key 'method.bogus'"),
    ]
    for path, message in cases:
        with pytest.raises(DualPromptError, match=message) as error:
            ContinualLearner.load(path)
        assert "\n" not in str(error.value)
    with pytest.raises(DualPromptError, match="holds no model, but"):
        ContinualLearner.load(kept).save(tmp_path)


def test_a_full_disk_leaves_the_old_model(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    shutil.copytree(kept, path)
    learner = ContinualLearner.load(path)
    learner.forget("elm")
    before = contents(path) | {".lock": b""}
    flush = os.fsync
    for allowed in range(3):  # the tensors, then the old model.json among the versions, then the new one
        left = [allowed]

        def full(handle: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            flush(handle)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DualPromptError, match="the disk is full"):
            learner.save(path)
        monkeypatch.setattr(os, "fsync", flush)
        assert contents(path) == before
    learner.save(path)
    assert "elm" not in ContinualLearner.load(path).classes
    assert {file.name[:7] for file in path.iterdir()} == {".lock", "README.", "model.j", "version", "weights"}


def test_push_and_pull(kept: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    remote = tmp_path / "remote"
    asked: list[Any] = []

    def create_repo(repo_id: str, **options: Any) -> None:
        asked.append((repo_id, options["private"]))

    def upload_folder(*, repo_id: str, folder_path: Path, delete_patterns: str, **_: Any) -> str:
        for old in remote.glob(delete_patterns):
            old.unlink()
        shutil.copytree(folder_path, remote, dirs_exist_ok=True)
        return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: str(remote))
    learner = ContinualLearner.load(kept)
    assert learner.push("me/trees") == "https://hub/me/trees"
    assert asked == [("me/trees", True)]
    images = trees(world, *ALL)
    assert ContinualLearner.pull("me/trees").predict(images) == learner.predict(images)

    assert call("push", kept, "me/trees", "--public", "--json").json["url"] == "https://hub/me/trees"
    assert asked[-1] == ("me/trees", False)
    assert not (remote / "versions").exists()
    pulled = tmp_path / "pulled"
    told = call("pull", "me/trees", pulled, "--json")
    assert told.json["classes"] == list(ALL), told.err
    assert ContinualLearner.load(pulled).predict(images) == learner.predict(images)
    assert call("forget", pulled, "ash").code == 0
    assert call("pull", "me/trees", pulled).code == 0  # what was there is an earlier version
    assert [version.why for version in versions.listed(pulled)][1:] == ["forgot a class", "pulled from me/trees"]
    with saved.held(pulled):
        assert "is being served" in call("pull", "me/trees", pulled).error
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert "holds no model, but 'letter.txt'" in call("pull", "me/trees", tmp_path / "other").error

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("403 Forbidden\nmore")

    monkeypatch.setattr(huggingface_hub, "create_repo", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DualPromptError, match=r"the hub's repository 'me/trees': .*403"):
        learner.push("me/trees")
    assert "the hub's repository 'me/trees': OSError: 403 Forbidden" in call("push", kept, "me/trees").error
    assert "the hub's repository 'me/trees': OSError: 403 Forbidden" in call("pull", "me/trees", tmp_path / "new").error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "method", ["frozen-head", "simple-cil", "lda", "klda", "ridge", "ranpac", "l2p", "coda-prompt"]
)
def test_other_methods_without_images(world: World, folders: dict[str, Path], method: str, tmp_path: Path) -> None:
    own: dict[str, dict[str, Any]] = {"l2p": {"pool_size": 4, "top_n": 2, "length": 2}, "ranpac": {"projection": 32}}
    own["klda"] = {"projection": 32}
    own["coda-prompt"] = {"layers": [2], "components": 2, "length": 2}
    options = {**own.get(method, {}), "train.batch_size": 4, "train.epochs": 1}
    learner = ContinualLearner(str(world.weights), method, options=options, device="cpu")
    for name in ("spring", "summer"):
        learner.learn(folders[name])
    images = trees(world, *ALL[:4])
    before, *_ = outputs(learner, images)
    learner.forget("spring")
    learner = reloaded(learner, tmp_path / "model")
    assert torch.equal(outputs(learner, images)[0], before[:, 2:])
    learner.learn(folders["autumn"])
    assert learner.classes == ("cedar", "elm", "fir", "hazel")
    assert [answer.label in learner.classes for answer in learner.predict(images)] == [True] * len(images)


def test_forgetting_a_task_takes_its_prompts_from_dualprompt_rp(
    world: World, folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {"g_layers": [1], "e_layers": [2], "projection": 32, "train.batch_size": 4, "train.epochs": 1}
    learner = ContinualLearner(str(world.weights), "dualprompt-rp", options=options, device="cpu")
    for name in ("spring", "summer"):
        learner.learn(folders[name])
    images = trees(world, *ALL[:4])
    for gone, left in (("spring", ("cedar", "elm")), ("elm", ("cedar",))):
        learner.forget(gone)
        answers = [answer.label for answer in learner.predict(images)]
        learner = reloaded(learner, tmp_path / gone)
        assert learner.classes == left
        assert [answer.label for answer in learner.predict(images)] == answers
        assert set(answers) <= set(left)
    learner.learn(folders["autumn"])
    assert learner.classes == ("cedar", "fir", "hazel")
    known = trees(world, "fir")
    assert [answer.label for answer in learner.predict(known)].count("fir") > len(known) / 2


def test_forgetting_a_task_takes_its_prompts_from_l2p(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"pool": "by_task", "top_n": 2, "length": 2, "train.batch_size": 4, "train.epochs": 1}
    learner = ContinualLearner(str(world.weights), "l2p", options=options, device="cpu")
    for name in ("spring", "summer"):
        learner.learn(folders[name])
    before = dict(learner._model.state)
    learner.forget("spring")
    learner = reloaded(learner, tmp_path / "model")
    left = learner._model.state
    for name in ("prompts", "keys"):
        assert torch.equal(left[f"{name}.0"], before[f"{name}.1"])
        assert f"{name}.1" not in left
    learner.learn(folders["autumn"])
    assert torch.equal(learner._model.state["prompts.0"], before["prompts.1"])
    assert learner.classes == ("cedar", "elm", "fir", "hazel")
    images = trees(world, *ALL[:4])
    assert all(answer.label in learner.classes for answer in learner.predict(images))


def test_methods_that_keep_images_or_train_the_backbone_are_refused(world: World) -> None:
    for method in ("er", "ft-seq", "upper-bound"):
        with pytest.raises(DualPromptError, match="take dualprompt"):
            ContinualLearner(str(world.weights), method, device="cpu")
    with pytest.raises(DualPromptError, match="unknown method"):
        ContinualLearner(str(world.weights), "nonsense", device="cpu")


def digest_of(model: Path) -> str:
    facts = json.loads((model / "model.json").read_text())
    assert hashlib.sha256((model / facts["tensors"]["file"]).read_bytes()).hexdigest() == facts["tensors"]["sha256"]
    return facts["tensors"]["sha256"]


def test_killed_learning_goes_on_to_the_same_model(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    def learn(model: Path, **options: Any) -> Any:
        model.parent.mkdir(exist_ok=True)
        flags = ["--backbone", world.weights, "--device", "cpu", "--checkpoint.every_seconds", 0, *FLAGS]
        words = ["learn", model, folders["spring"], *flags]
        return start(model.with_name(f"{model.name}.log"), *words, watch=model.parent, **options)

    whole = learn(tmp_path / "whole" / "model")
    assert whole.end() == 0, whole.text
    changes = whole.changes
    assert sum("progress" in change for change in changes) > 4  # checkpoints inside the task
    assert not list((tmp_path / "whole").glob(".*.learning"))
    for number, at in enumerate(np.linspace(2, len(changes), 8).astype(int)):
        model = tmp_path / f"killed{number}" / "model"
        life = learn(model, at=int(at))
        assert life.end() == -signal.SIGKILL, life.text
        if (model / "model.json").exists():  # then it is whole
            assert digest_of(model) == digest_of(tmp_path / "whole" / "model")
            continue
        life = learn(model)
        assert life.end() == 0, life.text
        assert digest_of(model) == digest_of(tmp_path / "whole" / "model")
        assert not list(model.parent.glob(".*.learning"))


def test_work_of_other_images_is_not_taken_up(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    learner, other = empty(world), empty(world)
    learner.learn(folders["spring"], work=tmp_path)
    other.learn(folders["summer"], work=tmp_path)
    plain = empty(world)
    plain.learn(folders["summer"])
    images = trees(world, "cedar", "elm")
    assert other.predict(images) == plain.predict(images)
    assert len(list(tmp_path.iterdir())) == 2


def test_commands(world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    model, picture = tmp_path / "model", trees(world, "ash")[0]
    made = call("learn", model, folders["spring"], "--backbone", world.weights, "--device", "cpu", *FLAGS, "--json")
    assert made.code == 0, made.err
    assert made.json["learned"]["classes"] == ["ash", "birch"]
    told = call("learn", model, folders["summer"], "--name", "hot [red]", "--epochs", 1)
    assert told.code == 0, told.err
    assert "hot [red]" in told.out
    assert "learned task 2 ('hot [red]'): 2 classes from 13 images" in told.out
    assert "class 'cedar' is known already" in call("learn", model, folders["summer"]).error
    assert "--backbone is for a new model" in call("learn", model, folders["autumn"], "--backbone", "embedded").error
    assert "--train.lr is for a new model" in call("learn", model, folders["autumn"], "--train.lr", 1).error

    answers = call("predict", model, picture, world.images / "test" / "elm", "--json").json
    assert [answer["path"] for answer in answers] == [str(picture), *map(str, trees(world, "elm"))]
    answers = call("predict", model, picture, "--top-k", 2, "--json").json
    expected = ContinualLearner.load(model).predict(picture, top_k=2)
    assert answers[0] == json.loads(json.dumps(expected.to_dict()))
    assert set(answers[0]) >= {"path", "label", "probability", "task", "top"}
    assert set(answers[0]["top"][0]) == {"label", "probability"}
    lines = call("predict", model, picture, "--csv", "--top-k", 2).out.splitlines()
    assert lines[0] == "path,label,probability,task,similarity,label_1,probability_1,label_2,probability_2"
    assert lines[1].startswith(f"{picture},{expected.label},{expected.probability:.6f},")
    assert expected.label in call("predict", model, picture).out

    (tmp_path / "broken.jpg").write_bytes(b"no image")
    mixed = call("predict", model, tmp_path / "broken.jpg", picture, "--json")
    assert mixed.code == 2
    assert [answer["path"] for answer in mixed.json] == [str(picture)]  # the others are not lost
    assert f"1 of 2 images: {tmp_path / 'broken.jpg'} cannot be read" in mixed.error
    assert "cannot go together" in call("predict", model, picture, "--json", "--csv").error

    judged = call("evaluate", model, folders["spring"], "--json").json
    assert judged["images"] == 13
    assert judged["accuracy"] == ContinualLearner.load(model).evaluate(folders["spring"]).accuracy
    assert "class 'fir' is not known" in call("evaluate", model, folders["autumn"]).error
    levels = call("calibrate", model, "--unknown", folders["autumn"], "--json").json["levels"]
    assert all(0 <= level["rejected"] <= 100 for level in levels)
    assert call("info", model, "--json").json["threshold"] is not None
    assert "every image gets a class" in call("calibrate", model, "--off").out
    assert call("info", model, "--json").json["threshold"] is None

    assert "forgot class 'ash'" in call("forget", model, "ash").out
    assert "forgot task 2" in call("forget", model, "2").out
    assert call("info", model, "--json").json["classes"] == ["birch"]
    assert "birch" in call("info", model).out
    assert "no task or class 'ash'" in call("forget", model, "ash").error
    assert "holds no model" in call("predict", tmp_path, picture).error


def test_the_accuracy_matrix_holds_what_was_measured(
    world: World, folders: dict[str, Path], kept: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(kept, tmp_path / "model"))
    learner = ContinualLearner.load(model)
    diagonal = [task.accuracy for task in learner.tasks]
    assert learner.accuracy_matrix() == [
        [diagonal[0], None, None],
        [None, diagonal[1], None],
        [None, None, diagonal[2]],
    ]
    test = tmp_path / "test"
    for label in ("ash", "birch", "fir"):
        shutil.copytree(world.images / "test" / label, test / label)
    found = learner.evaluate(test)
    assert learner.accuracy_matrix()[2] == [None, None, diagonal[2]]  # nobody asked to record it
    sizes = {label: len(trees(world, label)) for label in ("ash", "birch")}
    spring = sum(found.by_class[label] * n for label, n in sizes.items()) / sum(sizes.values())
    assert found.by_task == {1: pytest.approx(spring), 3: found.by_class["fir"]}

    judged = call("evaluate", model, test, "--record", "--json")
    assert judged.code == 0, judged.err
    assert judged.json["by_task"] == {str(task): value for task, value in found.by_task.items()}
    row = [found.by_task[1], None, found.by_task[3]]
    assert call("info", model, "--json").json["accuracy_matrix"] is None  # it is shown when it is complete
    learner = ContinualLearner.load(model)
    assert learner.accuracy_matrix() == [[diagonal[0], None, None], [None, diagonal[1], None], row]
    learner.forget(1)
    assert reloaded(learner, tmp_path / "less").accuracy_matrix() == [[diagonal[1], None], row[1:]]
    learner.learn({"rowan": trees(world, "hazel")}, epochs=1)
    assert learner.accuracy_matrix()[1][:2] == row[1:]


def test_who_changes_a_model_holds_it(world: World, folders: dict[str, Path], kept: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(kept, tmp_path / "model"))
    with saved.held(model):
        for command in (
            ("learn", model, folders["spring"], "--again"),
            ("forget", model, "ash"),
            ("calibrate", model),
            ("evaluate", model, folders["spring"], "--record"),
        ):
            assert "is being served, or changed by another command" in call(*command).error
        assert call("evaluate", model, folders["spring"]).code == 0  # whoever only looks is welcome
        assert call("predict", model, trees(world, "ash")[0]).code == 0
        learner = ContinualLearner.load(model)
        learner.forget("ash")
        with pytest.raises(DualPromptError, match="is being served"):
            learner.save(model)
        learner.save(model, held=True)
    assert call("forget", model, "--class", "elm").code == 0
    assert "ash" not in ContinualLearner.load(model).classes


def test_the_package_stays_light() -> None:
    program = (
        "import sys, dualprompt; assert 'torch' not in sys.modules; dualprompt.ContinualLearner; "
        "assert 'torch' in sys.modules\n"
        "try: dualprompt.nothing\n"
        "except AttributeError: print('ok')"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "ok\n"


def test_reading_is_the_same_as_resizing_by_hand(kept: Path) -> None:
    """Large JPEGs are decoded at a part of their size; what comes out differs by a shade at most."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)).resize(
        (900, 600), Image.Resampling.BICUBIC
    )
    file = io.BytesIO()
    smooth.save(file, "JPEG", quality=95)
    mine = images.pixels_of(file.getvalue(), 16, "bilinear").astype(int)
    plain = np.asarray(smooth.resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(mine - plain).max() <= 10
