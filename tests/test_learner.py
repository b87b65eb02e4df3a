"""A learner is taught from folders, and asked: what it learns, from which images, and what it answers."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dualprompt.data.sources import ArraySource, Dataset, FileSource, Split
from dualprompt.errors import DualPromptError
from dualprompt.learner import Answer, ContinualLearner
from dualprompt.lessons.task import held_out
from dualprompt.methods.base import Batch
from dualprompt.model import images
from learning import ALL, FLAGS, TASKS, TINY, empty, outputs, reloaded, trees
from sandbox import World, call, elsewhere


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
    images = world.images / "test"
    mine = ContinualLearner.load(kept).predict(images)
    assert len(mine) == 27
    assert elsewhere("predict", kept, images, "--json").json == [answer.to_dict() for answer in mine]


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
    options, right = TINY | {"projection": 60}, []
    images = trees(world, "ash", "birch", "elm")
    for seed in range(3):  # of 13 images, one is 8 %
        learner = ContinualLearner(str(world.weights), "dualprompt-rp", options=options, device="cpu", seed=seed)
        for name in ("ash", "birch", "elm"):
            learner.learn({name: trees(world, name, split="train")})
        answers = learner.predict(images)
        right += [answer.label == path.parent.name for answer, path in zip(answers, images, strict=True)]
    assert sum(right) > 0.75 * len(right)  # a third by chance


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


def floats() -> bytes:
    file = io.BytesIO()
    Image.new("F", (8, 8), 0.5).save(file, "TIFF")
    return file.getvalue()


BAD: dict[str, tuple[Any, str]] = {
    "missing": ("nowhere.jpg", "nowhere.jpg cannot be read: No such file or directory"),
    "text": (b"hello", "an image given as bytes cannot be read: it is no image, or damaged"),
    "truncated": (jpeg(300, 300)[:500], "an image given as bytes cannot be read: it is no image, or damaged"),
    "floats": (floats(), "an image given as bytes has floating-point pixels; save it with 8 or 16 bits"),
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
        (world.images, {}, "give .*train, with the classes; .*test is for `evaluate`"),
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


@pytest.mark.parametrize(
    "method", ["frozen-head", "simple-cil", "lda", "klda", "ridge", "ranpac", "fecam", "anacp", "l2p", "coda-prompt"]
)
def test_other_methods_without_images(world: World, folders: dict[str, Path], method: str, tmp_path: Path) -> None:
    own: dict[str, dict[str, Any]] = {"l2p": {"pool_size": 4, "top_n": 2, "length": 2}, "ranpac": {"projection": 32}}
    own |= {name: {"projection": 32} for name in ("klda", "anacp")}
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


def test_methods_that_keep_images_or_train_the_backbone_are_refused(world: World) -> None:
    for method in ("er", "ft-seq", "upper-bound"):
        with pytest.raises(DualPromptError, match="take dualprompt"):
            ContinualLearner(str(world.weights), method, device="cpu")
    with pytest.raises(DualPromptError, match="unknown method"):
        ContinualLearner(str(world.weights), "nonsense", device="cpu")


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
