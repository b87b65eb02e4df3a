"""Frozen features: one pass over the images, however many methods, seeds and processes ask for them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor

from dualprompt import features
from dualprompt.backbones.vit import VisionTransformer
from dualprompt.config import RunConfig
from dualprompt.data.images import Images
from dualprompt.data.origin import Origin
from dualprompt.data.stream import Subset
from dualprompt.data.views import View
from dualprompt.errors import DualPromptError
from dualprompt.features import FILE, MOST, Compute, Table, in_order, tables
from dualprompt.progress import Bar, Event, Note, Progress
from dualprompt.training.feed import Feed
from helpers import SIDE, tiny_vit
from sandbox import World, call

CLOSED_FORM = ("simple-cil", "lda", "ranpac:projection=40")
IMAGES = 3 * 13 + 3 * 9  # of the world's three tasks
PIXELS = np.random.default_rng(5).integers(0, 256, (40, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("DUALPROMPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images of every pass through the backbone."""
    found: list[int] = []
    rest = VisionTransformer._rest

    def counted(self: VisionTransformer, x: Tensor, *arguments: Any) -> Tensor:
        found.append(len(x))
        return rest(self, x, *arguments)

    monkeypatch.setattr(VisionTransformer, "_rest", counted)
    return found


def table(world: World, runs: Path, *methods: str, seeds: int = 3) -> dict[str, Any]:
    options = ("--benchmark.class_order", "shuffled", "--against", "none", "--runs", runs, "--json")
    made = call(
        "table", "main", "--benchmark", world.preset, "--methods", ",".join(methods), "--seeds", seeds, *options
    )
    assert made.code == 0, made.err
    return made.json


@pytest.mark.parametrize("gigabytes", ["0", "1"])
def test_a_table_of_closed_form_methods_and_seeds_is_one_pass(
    gigabytes: str, world: World, cache: Path, passed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MOST, gigabytes)
    table(world, tmp_path / "runs", *CLOSED_FORM)
    runs = 3 * len(CLOSED_FORM)
    assert sum(passed) == IMAGES + runs  # each run looks at one image to count what a prediction takes
    assert passed.count(1) == runs
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/result.json")]
    assert len({str(result["accuracy_matrix"]) for result in results}) > len(CLOSED_FORM), "orders of classes differ"
    assert {result["cost"]["train"]["passes"] for result in results} == {1.0}, "whoever made the pass"
    assert cache.exists() == (gigabytes == "1")


def test_another_process_takes_them_from_the_cache_to_the_same_bits(
    world: World, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = table(world, tmp_path / "one", "lda", "ridge", seeds=2)

    def refuses(*_: object) -> Compute:
        raise AssertionError("they are known")

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "computing", refuses)
        with pytest.raises(AssertionError):
            feed(batch_size=5).features(some(images(), 0))
        table(world, tmp_path / "two", "simple-cil")
        two = table(world, tmp_path / "again", "lda", "ridge", seeds=2)
    for mine, other in zip(one["rows"], two["rows"], strict=True):
        for path, same in zip(mine["runs"], other["runs"], strict=True):
            files = sorted(Path(path).glob("checkpoints/task-*.safetensors"))
            assert len(files) == 3
            assert (Path(path) / "predictions.npz").read_bytes() == (Path(same) / "predictions.npz").read_bytes()


class Counting(Feed):
    """A feed that says how many images it computed, slowly."""

    computed = 0
    slow = 0.0

    def computing(self, images: Images, most: int, bar: Bar) -> Compute:
        compute = super().computing(images, most, bar)

        def counted(indices: Tensor) -> Tensor:
            self.computed += len(indices)
            time.sleep(self.slow)
            return compute(indices)

        return counted


def images(content: str = "noise") -> Images:
    found = Images.from_array(PIXELS)
    found.origin = Origin("noise", "test", np.arange(len(PIXELS)), (), content)
    return found


def feed(progress: Progress | None = None, batch_size: int = 4) -> Counting:
    values = {"benchmark": {"dataset": "x"}, "evaluate": {"batch_size": batch_size}}
    view = View(SIDE, (0.5,) * 3, (0.25,) * 3, "bilinear", "resize", "none")
    fabric = Fabric(accelerator="cpu", devices=1)
    return Counting(RunConfig.model_validate(values), view, tiny_vit(), fabric, progress or Progress())


def tabled(pixels: Images, made: Counting, monkeypatch: pytest.MonkeyPatch, *name: object, known: Any = ()) -> Table:
    """Give a feed a table of parts of eight images."""
    monkeypatch.setattr(features, "PART", 8)
    rows = torch.arange(len(pixels))
    made.tables = tables([Subset(pixels, rows, rows // 10)], 4, ["vit", *name], known)
    return made.tables[pixels]


def some(pixels: Images, *rows: int) -> Subset:
    return Subset(pixels, torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))


def test_images_are_in_one_order_whatever_the_tasks() -> None:
    """Classes as they first come in the source: a shuffle of tasks, and of labels, changes nothing."""
    pixels = images()
    source = torch.arange(40) * 7 % 4  # the class of each image

    def subsets(order: list[int]) -> list[Subset]:
        rows = [(source == member).nonzero()[:, 0] for member in order]
        return [Subset(pixels, mine, torch.full_like(mine, label)) for label, mine in enumerate(rows)]

    found = in_order(subsets([0, 1, 2, 3]))
    assert found.tolist() == [row for member in (0, 3, 2, 1) for row in range(40) if source[row] == member]
    assert in_order(subsets([2, 0, 3, 1])).equal(found)
    assert in_order([*subsets([1, 3, 0, 2]), subsets([2])[0]]).equal(found), "an image counts once"


def test_only_the_parts_that_are_needed_are_computed_and_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), images()
    tabled(pixels, made, monkeypatch)
    first = made.features(some(pixels, 3, 1, 17))
    assert made.computed == 16
    assert made.features(some(pixels, 2, 17)).shape == (2, 32)
    assert made.computed == 16
    whole = made.features(some(pixels, *range(40)))
    assert made.computed == 40
    assert whole[[3, 1, 17]].equal(first)
    direct = made.backbone(made.batch(pixels, made.fixed(some(pixels, *range(40)), torch.arange(40))).images)
    torch.testing.assert_close(whole, direct)


def test_they_are_the_same_bits_from_memory_and_from_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = feed(), feed(), feed()
    pixels, others = images(), images()
    known = tabled(pixels, one, monkeypatch)
    whole = one.features(some(pixels, *range(40)))
    tabled(others, two, monkeypatch)
    assert two.features(some(others, *range(40))).equal(whole)
    monkeypatch.setenv(MOST, "0")
    tabled(others, three, monkeypatch, known=[known])
    assert three.features(some(others, *range(40))).equal(whole)
    assert (one.computed, two.computed, three.computed) == (40, 0, 0)


@pytest.mark.parametrize("change", ["name", "content", "threads", "batch"])
def test_what_decides_them_is_in_their_name(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = feed(), feed(batch_size=2 if change == "batch" else 4)
    pixels, others = images(), images("other" if change == "content" else "noise")
    tabled(pixels, one, monkeypatch)
    one.features(some(pixels, *range(40)))
    monkeypatch.setattr(features, "PART", 8)
    rows = torch.arange(40)
    name = ["vit", "other"] if change == "name" else ["vit"]
    two.tables = tables([Subset(others, rows, rows // 10)], 2 if change == "batch" else 4, name)
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    two.features(some(others, *range(40)))
    assert two.computed == 40


def test_other_threads_in_one_process_compute_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), images()
    tabled(pixels, made, monkeypatch)
    made.features(some(pixels, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    made.features(some(pixels, 0))
    assert made.computed == 16


def test_two_processes_share_the_work(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for them: a lock belongs to whoever opened the file."""
    feeds = [feed(), feed()]
    own = [images(), images()]
    for made, pixels in zip(feeds, own, strict=True):
        tabled(pixels, made, monkeypatch)
        made.slow = 0.1
    found: dict[int, Tensor] = {}

    def ask(number: int) -> None:
        found[number] = feeds[number].features(some(own[number], *range(40)))

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert found[0].equal(found[1])
    assert feeds[0].computed + feeds[1].computed == 40, "each part once"
    assert min(made.computed for made in feeds) > 0, "nobody stands by"


def test_one_that_is_stuck_is_not_waited_for_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), images()
    part = tabled(pixels, made, monkeypatch)
    monkeypatch.setattr(features, "PATIENCE", 0.2)
    shelf = part._shelf(made)
    assert shelf is not None
    with shelf.claimed(1) as mine:
        assert mine
        made.features(some(pixels, *range(40)))
    assert made.computed == 40
    assert sorted(path.parent.name for path in cache.rglob(FILE)) == ["00000", "00002", "00003", "00004"]


def test_a_wait_ends_when_the_run_is_to_stop(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), images()
    shelf = tabled(pixels, made, monkeypatch)._shelf(made)
    assert shelf is not None

    def stops() -> None:
        raise KeyboardInterrupt

    with shelf.claimed(0):
        made.pause = stops
        with pytest.raises(KeyboardInterrupt):
            made.features(some(pixels, 0))


def test_what_is_not_whole_is_computed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), images()
    tabled(pixels, made, monkeypatch)
    whole = made.features(some(pixels, *range(40)))
    one, two, three, *_ = sorted(cache.rglob(FILE))
    content = one.read_bytes()
    one.write_bytes(content[:-3])
    two.write_bytes(content[:-3] + b"abc")
    three.unlink()
    again, others = feed(), images()
    tabled(others, again, monkeypatch)
    assert again.features(some(others, *range(40))).equal(whole)
    assert again.computed == 24
    assert one.read_bytes() == content


def test_the_cache_is_bounded_and_the_oldest_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = feed()
    sizes = []
    for number in range(3):
        pixels = images(f"content {number}")
        tabled(pixels, made, monkeypatch)
        made.features(some(pixels, *range(40)))
        sizes.append(sum(path.stat().st_size for path in cache.rglob(FILE)))
        time.sleep(0.02)  # dates tell which was used last
    assert sizes[2] == 3 * sizes[0]
    first, last = images("content 0"), images("content 3")
    again = feed()
    tabled(first, again, monkeypatch)
    again.features(some(first, *range(40)))  # used, so the second is the oldest now
    monkeypatch.setenv(MOST, str(3.2 * sizes[0] / 2**30))
    tabled(last, made, monkeypatch)
    made.features(some(last, *range(40)))
    assert sum(path.stat().st_size for path in cache.rglob(FILE)) <= 3.2 * sizes[0]
    for content, computed in (("content 0", 0), ("content 3", 0), ("content 1", 40)):
        asked, pixels = feed(), images(content)
        tabled(pixels, asked, monkeypatch)
        asked.features(some(pixels, *range(40)))
        assert asked.computed == computed, content


def test_a_cache_that_has_no_room_or_is_off_costs_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gigabytes in ("0", "1e-9"):
        monkeypatch.setenv(MOST, gigabytes)
        made, pixels = feed(), images()
        tabled(pixels, made, monkeypatch)
        made.features(some(pixels, *range(40)))
        assert made.computed == 40
        assert not list(cache.rglob(FILE))
    monkeypatch.setenv(MOST, "much")
    with pytest.raises(DualPromptError, match=r"DUALPROMPT_FEATURES_GB says how many GB .* found 'much'"):
        tabled(pixels, feed(), monkeypatch).look_up(torch.tensor([0]), feed())


class Heard(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def receive(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


def test_a_cache_that_cannot_be_written_costs_a_note(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    heard = Heard()
    made, pixels = feed(heard), images()
    tabled(pixels, made, monkeypatch)
    made.features(some(pixels, *range(40)))
    made.features(some(pixels, *range(40)))
    assert made.computed == 40
    assert cache.read_text() == "in the way"
    [note] = heard.notes
    assert note.startswith("frozen features are not kept for other runs: ")


def test_images_that_are_nobody_s_dataset_stay_in_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pixels = feed(), Images.from_array(PIXELS)
    tabled(pixels, made, monkeypatch)
    made.features(some(pixels, *range(40)))
    assert made.computed == 40
    assert not cache.exists()
