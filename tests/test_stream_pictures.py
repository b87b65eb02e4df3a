"""Pictures of streams: what they say of which classes come when, on their own and in a report; and `mini-domains`."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from dualprompt.config import BenchmarkConfig, compose
from dualprompt.data.cache import Store
from dualprompt.data.datasets.mini_domains import LOOKS
from dualprompt.data.sources import DATASETS, GROUPS, ArraySource, Dataset
from dualprompt.data.stream import build_stream, outline
from dualprompt.pictures.drawing import save_with_data
from dualprompt.report.figures import anytime, stream_map
from sandbox import World, call

DOMAINS = GROUPS["mini-domains"]


def blurry(world: World, **fields: object) -> BenchmarkConfig:
    values = {"dataset": str(world.images), "stream": "si-blurry", "tasks": 3, "class_order": "shuffled", **fields}
    return BenchmarkConfig.model_validate(values)


def test_an_outline_is_the_stream_without_its_pixels(world: World) -> None:
    for config in (blurry(world), blurry(world, stream="class", imbalance=3, validation=0.2)):
        bare, whole = outline(config, 2), build_stream(config, 2, Store(32, True))
        assert bare.classes == whole.classes
        for one, other in zip(bare.experiences, whole.experiences, strict=True):
            for split in ("train", "validation", "test"):
                assert getattr(one, split).indices.equal(getattr(other, split).indices)
                assert getattr(one, split).labels.equal(getattr(other, split).labels)
            assert (one.marks, one.labels, one.new_labels) == (other.marks, other.labels, other.new_labels)


def test_a_map_counts_every_image_when_it_comes(world: World, tmp_path: Path) -> None:
    stream = outline(blurry(world), 1)
    [task] = stream.experiences
    picture = stream_map(stream, "a stream", bins=6)
    counts = np.array(picture.values)
    assert counts.shape == (6, 6)
    assert counts.sum() == len(task.train) == 39
    assert counts.sum(axis=1).tolist() == task.train.labels.bincount().tolist()
    ends = [int(column) for column in picture.columns]
    assert counts.sum(axis=0).tolist() == np.diff([0, *ends]).tolist()
    for column, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        assert counts[:, column].tolist() == task.train.labels[start:end].bincount(minlength=6).tolist()
    assert picture.rows == list(stream.classes)
    assert len(picture.rules) == len([mark for mark in task.marks[:-1] if 0 < mark < 39])
    assert all(0 < rule <= 6 for rule in picture.rules)
    drawing = save_with_data(tmp_path, "stream", picture).read_text()
    assert "images that have come" in drawing
    assert (tmp_path / "stream.csv").read_text().count("\n") == 1 + int((counts > 0).sum())


def test_a_map_of_tasks_has_a_column_for_each(world: World) -> None:
    picture = stream_map(outline(blurry(world, stream="class", tasks=3), 0), "tasks")
    assert picture.columns == ["task 1", "task 2", "task 3"]
    assert [int((np.array(picture.values)[:, column] > 0).sum()) for column in range(3)] == [2, 2, 2]
    assert picture.rules == []


def test_the_curves_of_several_seeds_are_one_line() -> None:
    def result(method: str, *accuracies: float) -> dict[str, object]:
        curve = [(10 * (n + 1), 2, accuracy) for n, accuracy in enumerate(accuracies)]
        return {"method": method, "anytime_curve": curve, "seed": 0}

    picture = anytime([result("a", 10.0, 20.0), result("a", 30.0, 60.0), result("b", 5.0, 6.0), result("c")])
    assert [line.name for line in picture.lines] == ["a", "b"]
    assert (picture.lines[0].x, picture.lines[0].y) == ([10, 20], [20, 40])
    assert picture.lines[0].spread == pytest.approx([200**0.5, 800**0.5])
    assert picture.lines[1].spread is None


def test_the_command_draws_streams(world: World, tmp_path: Path) -> None:
    preset = world.preset_with("drawn.yaml", benchmark=blurry(world, name="blurred").model_dump(mode="json"))
    done = call("data", "show", preset, "--stream", "--out", tmp_path / "a.svg", "--json", "--seed", 3)
    assert done.code == 0, done.err
    assert done.json["stream"] == "si-blurry"
    [task] = done.json["tasks"]
    assert (task["classes"], task["train"], task["test"], task["border"]) == (6, 39, 27, False)
    assert task["marks"][-1] == 39
    assert "blurred (si-blurry), seed 3" in (tmp_path / "a.svg").read_text()
    other = call("data", "show", preset, "--stream", "--out", tmp_path / "b.svg", "--benchmark.stream", "class")
    assert other.code == 0, other.err
    assert "told" in other.out
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()
    alone = call("data", "show", preset, "--stream", "--json").json
    assert (alone["picture"], alone["tasks"][0]["classes"]) == (None, 6)  # drawn only where it is told
    both = call("data", "show", preset, world.preset, "--stream", "--out", tmp_path / "c.png", "--json")
    assert [Path(each["picture"]).name for each in both.json] == ["c-drawn.png", "c-tiny.png"]
    assert all(Path(each["picture"]).read_bytes()[1:4] == b"PNG" for each in both.json)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "mini-digits", "--seed", 1), "go with `data show PRESET --stream`"),
        (("get", "mini", "--stream"), "go with `data show PRESET --stream`"),
        (("show", "mini-digits", "--benchmark.tasks", 2), "go with `data show PRESET --stream`"),
        (("show", "mini", "--stream", "--out", "x.pdf"), "a picture of a stream is a .png or .svg, found 'x.pdf'"),
        (("show", "minni", "--stream"), "unknown preset 'minni'; did you mean 'mini'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(words: tuple[object, ...], message: str) -> None:
    assert message in call("data", *words).error


def test_a_report_shows_the_stream_and_the_curve(world: World, tmp_path: Path) -> None:
    benchmark = blurry(world, name="blurred", evaluate_every=10).model_dump(mode="json")
    recipes = {"plain": {"train": {"epochs": 1, "batch_size": 4}}}
    preset = world.preset_with("reported.yaml", benchmark=benchmark, recipes=recipes)
    done = call("run", preset, "--method", "lda", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert call("report", tmp_path / "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">As images come<" in page
    assert ">The stream<" in page
    assert ">Over the tasks<" not in page, "it has none that a method knows of"
    headings = re.findall(r"<th[^>]*>\s*([^<]*?)\s*</th>", page)
    assert "A_auc (%)" in headings
    assert "F (%)" not in headings
    csv = (tmp_path / "run" / "report-files" / "anytime.csv").read_text()
    assert csv.count("lda,") == 3
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert ",area_under_curve,last_accuracy," in rows[0]


@lru_cache
def loaded(name: str) -> Dataset:
    return DATASETS[name].load(Path("/nonexistent"))


def pixels(name: str) -> np.ndarray:
    source = loaded(name).train.source
    assert isinstance(source, ArraySource)
    return source.pixels


def test_mini_domains_share_classes_and_no_picture() -> None:
    fruit = pixels("mini-fruit")
    labels = loaded("mini-fruit").train.labels
    for place, (name, look) in enumerate(zip(DOMAINS, LOOKS, strict=True)):
        assert name == f"mini-domains/{look}"
        dataset = loaded(name)
        assert dataset.name == look
        assert dataset.classes == loaded("mini-fruit").classes
        assert np.bincount(dataset.train.labels).tolist() == [10] * 10
        assert np.bincount(dataset.test.labels).tolist() == [5] * 10
        # Which pictures it has, before they were changed: of each class every fourth, from its own place on.
        mine = np.sort(np.concatenate([np.flatnonzero(labels == label)[place::4] for label in range(10)]))
        assert np.array_equal(pixels(name), LOOKS[look](fruit[mine]))
        assert DATASETS[name].licence.startswith("MIT")
        assert f"`{name}` has a quarter" in DATASETS[name].notice()


def test_looks_change_what_they_say() -> None:
    fruit = pixels("mini-fruit")[:3]
    assert (LOOKS["grey"](fruit).std(axis=-1) == 0).all()
    assert np.array_equal(LOOKS["negative"](LOOKS["negative"](fruit)), fruit)
    sketch = LOOKS["sketch"](fruit)
    assert 0.005 < (sketch < 128).mean() < 0.5, "dark lines on white"
    assert (LOOKS["sketch"](np.full((1, 9, 9, 3), 70, np.uint8)) == 255).all(), "none where nothing changes"
    for look in LOOKS.values():
        assert look(fruit).dtype == np.uint8
        assert look(fruit).shape == fruit.shape


def test_the_preset_is_domain_incremental() -> None:
    stream = outline(compose("mini-domains", None, {}).benchmark, 0)
    assert [task.name for task in stream.experiences] == list(LOOKS)
    assert stream.returns
    assert stream.bordered
    assert len(stream.classes) == 10
    grouped = outline(BenchmarkConfig(dataset="mini-domains", stream="domain"), 0)
    assert [task.name for task in grouped.experiences] == list(LOOKS)
