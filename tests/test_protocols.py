"""Published set-ups: what they resolve to, and tables that put our runs beside reported numbers, honestly marked."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from dualprompt.backbones import weights
from dualprompt.backbones.known import KNOWN
from dualprompt.benchmark import CLASS_ORDER
from dualprompt.config import preset_names
from dualprompt.data.sources import DATASETS, GROUPS
from dualprompt.methods.base import METHODS, method_config
from dualprompt.methods.first_session import FirstSessionConfig
from dualprompt.report import publication
from dualprompt.sweeps import paper
from dualprompt.sweeps.protocol_table import NO_DATA, NO_WEIGHTS, NOT_OURS, Asked, Place, places
from dualprompt.sweeps.protocols import protocols
from sandbox import World, call, write_weights

PART = (
    "other data: cifar100 has 200 + 100 images to learn from and to test on, published 50,000 + 10,000"  # `make_cifar`
)
PENDING = {"slca", "ease", "aper"} - set(METHODS.names())  # of other branches
EVERY = [(name, setup) for name, protocol in protocols().items() for setup in protocol.setups]


def of(name: str, **options: Any) -> list[Place]:
    return places(name, Asked(**options))


@pytest.mark.parametrize(("name", "setup"), EVERY)
def test_every_line_resolves_to_a_run(name: str, setup: str) -> None:
    for place in of(f"{name}/{setup}", backbone="embedded"):
        if place.line.method in PENDING or (PENDING and place.line.options.get("first_session") == "adapter"):
            assert (place.not_run, place.config) == (NOT_OURS, None)
            continue
        assert place.not_run in (None, NO_DATA), place.details
        config = place.config
        assert config is not None
        assert place.backbone in KNOWN
        assert protocols()[name].setups[setup].preset in preset_names()
        assert isinstance(config.benchmark.class_order, str)
        assert CLASS_ORDER.fullmatch(config.benchmark.class_order)
        assert config.train.recipe == f"{name}'s"
        assert config.seed == place.seeds[0]
        assert 0 < place.line.reported.accuracy < 100
        assert any("other weights" in obstacle for obstacle in place.obstacles)


def test_the_papers_numbers_are_those_of_its_own_tables() -> None:
    for setup, table in (("cifar100", "split-cifar100"), ("imagenet-r", "split-imagenet-r"), ("5-datasets",) * 2):
        [line] = protocols()["dualprompt"].setups[setup].lines
        told = line.reported
        published = paper.TABLES[table][0]["dualprompt"]
        assert (told.accuracy, told.accuracy_std, told.forgetting, told.forgetting_std) == published
    [_, ft] = protocols()["l2p"].setups["cifar100"].lines
    assert (ft.reported.accuracy, ft.reported.accuracy_std) == paper.SPLIT_CIFAR100[0]["ft-seq"][:2]


def test_orders_and_cuts_are_the_papers() -> None:
    found = {place.setup: place.config for place in of("ranpac", methods=["simple-cil"], backbone="embedded")}
    cars, cifar, core50 = (found[setup] for setup in ("cars196", "cifar100", "core50"))
    assert cars
    assert cifar
    assert core50
    assert (cars.benchmark.first, cars.benchmark.tasks) == (16, 9)
    assert (cifar.benchmark.class_order, cifar.benchmark.tasks, cifar.seed) == ("pilot", 10, 1993)
    assert (core50.benchmark.stream, core50.benchmark.dataset) == ("domain", "core50")
    [coda] = [place.config for place in of("coda-prompt/imagenet-r-20", methods=["coda-prompt"], backbone="embedded")]
    assert coda
    assert (coda.benchmark.dataset, coda.benchmark.tasks, coda.benchmark.class_order) == ("imagenet-r-coda", 20, "coda")
    assert (coda.method["components"], coda.train.lr, coda.train.schedule, coda.train.epochs) == (
        5,
        0.001,
        "cosine",
        50,
    )


@pytest.mark.parametrize(("setup", "method"), [("ease/cifar100-20", "aper"), ("ranpac/cifar100", "ranpac")])
def test_a_first_session_is_trained_as_the_authors_train_it(setup: str, method: str) -> None:
    """By SGD at 0.01 for 20 epochs, whatever is trained: `args` of RanPAC, `exps` of PILOT."""
    place, *_ = of(setup, methods=[method], backbone="embedded")
    assert place.config
    train, options = place.config.train, method_config(place.config.method)
    assert isinstance(options, FirstSessionConfig)
    assert (train.optimiser, train.momentum, train.weight_decay, train.batch_size) == ("sgd", 0.9, 0.0005, 48)
    assert options.first_session == "adapter"
    assert (options.session.epochs_of(train.epochs), options.session.lr) == (20, 0.01)
    assert options.own_lr("adaptation.down.0") == 0.01


def test_numbers_of_images_are_known_where_a_row_may_be_comparable() -> None:
    """But for PILOT's ImageNet-A, of which papers that use it tell different numbers."""
    found = set[str]()
    for name, protocol in protocols().items():
        for place in of(name, backbone="embedded"):
            if place.config and not protocol.setups[place.setup].not_comparable:
                dataset = place.config.benchmark.dataset
                names = [dataset] if isinstance(dataset, str) else dataset
                found |= {member for each in names for member in GROUPS.get(each, (each,))}
    assert "core50/s1" in found
    assert "notmnist" not in found, "the authors' split of it is not published"
    assert {name for name in found if DATASETS[name].images == (None, None)} == {"imagenet-a-pilot"}


def test_without_weights_or_data_a_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("DUALPROMPT_DATA", str(tmp_path))
    done = call("table", "protocol", "coda-prompt", "--json", "--runs", tmp_path / "runs")
    assert done.code == 0, done.err
    assert {row["not_run"] for row in done.json["rows"]} == {NO_WEIGHTS}
    assert {row["comparable"] for row in done.json["rows"]} == {None}
    shown = call("table", "protocol", "coda-prompt", "--backbone", "embedded", "--runs", tmp_path / "runs").out
    assert "not run: data not here" in shown
    assert "dualprompt data get imagenet-r-coda" in shown
    assert "75.45 ± 0.56" in shown
    assert not (tmp_path / "runs").exists()


def make_cifar(root: Path) -> None:
    """Write a CIFAR-100 of two training images and one test image a class."""
    folder, rng = root / "cifar-100-binary", np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 2), ("test", 1)):
        records = rng.integers(0, 256, (100 * count, 2 + 3072), dtype=np.uint8)
        records[:, 1] = np.repeat(np.arange(100), count)
        (folder / f"{split}.bin").write_bytes(records.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{n:02}" for n in range(100)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_cifar(root)
    return root


def test_other_weights_run_but_are_marked(world: World, data: Path, tmp_path: Path) -> None:
    command = ("table", "protocol", "ranpac/cifar100", "--methods", "simple-cil,ridge", "--backbone", world.weights)
    command = (*command, "--benchmark.root", data, "--runs", tmp_path / "runs")
    done = call(*command, "--json", "--publish", tmp_path / "ranpac.json")
    assert done.code == 0, done.err
    means = {row["method"]: row for row in done.json["rows"]}["simple-cil (class means)"]
    assert (means["comparable"], means["seeds"]) == (False, [1993])
    assert means["not_comparable_because"] == [
        "other weights (vit.safetensors) than the paper's (vit-b16-augreg-in21k)",
        PART,
    ]
    result = json.loads((Path(means["runs"][0]) / "result.json").read_text())
    assert means["accuracy"] == result["image_weighted_accuracy"]
    assert means["difference"] == pytest.approx(result["image_weighted_accuracy"] - 83.4)
    assert result["class_order"][:3] == ["class68", "class56", "class78"]
    assert [len(row) for row in result["accuracy_matrix"]] == list(range(1, 11))
    published = publication.read(tmp_path / "ranpac.json")
    assert publication.contradictions(published) == []
    assert [row["label"] for row in published["rows"]] == [
        "cifar100: ridge (nor a projection)",
        "cifar100: simple-cil (class means)",
    ]
    again = call(*command)
    assert "2 of 2 runs are in" in again.err
    assert "not comparable" in again.out
    assert f"{means['difference']:+.2f}" not in again.out, "a difference that says nothing"
    lines = list(csv.DictReader(call(*command, "--format", "csv", "--stored").out.splitlines()))
    assert float(lines[1]["accuracy"]) == means["accuracy"]


def test_a_folder_in_the_place_of_the_papers_images_runs_but_is_marked(world: World, tmp_path: Path) -> None:
    command = ("table", "protocol", "ranpac/cifar100", "--methods", "simple-cil", "--backbone", world.weights)
    command = (
        *command,
        "--benchmark.dataset",
        world.images,
        "--benchmark.tasks",
        3,
        "--benchmark.class_order",
        "fixed",
    )
    done = call(*command, "--runs", tmp_path / "runs", "--json")
    assert done.code == 0, done.err
    [row] = done.json["rows"]
    assert not row["comparable"]
    assert f"other data: {world.images} is a folder" in row["not_comparable_because"]
    assert 0 <= row["accuracy"] <= 100


def test_the_papers_own_weights_are_comparable_until_something_changes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small network in the hub's cache under the name of the paper's."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = KNOWN["vit-b16-augreg-in21k"].source
    cached = tmp_path / "hub" / f"models--{source.replace('/', '--')}"
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    write_weights(cached / "snapshots" / ("a" * 40) / "model.safetensors")
    said = {"architecture": "vit", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (cached / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(said))
    assert weights.is_here("vit-b16-augreg-in21k")
    assert weights.is_here(source)
    command = ("table", "protocol", "ranpac/cifar100", "--methods", "simple-cil", "--runs", tmp_path / "runs")
    command = (*command, "--benchmark.root", data, "--json")
    [row] = call(*command).json["rows"]
    assert (row["comparable"], row["not_comparable_because"]) == (False, [PART])
    monkeypatch.setattr(DATASETS["cifar100"], "images", (200, 100))
    [row] = call(*command).json["rows"]
    assert (row["comparable"], row["not_comparable_because"], row["backbone"]) == (True, [], "vit-b16-augreg-in21k")
    [row] = call(*command, "--backbone", source).json["rows"]
    assert row["comparable"]
    [row] = call(*command, "--benchmark.class_order", "fixed").json["rows"]
    assert (row["comparable"], row["not_comparable_because"]) == (False, ["changed: benchmark.class_order"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "unknown protocol 'nobody'"),
        (("ranpac/cifar10",), "did you mean 'cifar100'?"),
        (("ranpac", "--seeds", 2), "has 1 to 1 seeds, found 2"),
        (("ranpac", "--methods", "l2p"), "has no method 'l2p'"),
        (("ranpac", "--recipe", "paper"), "--recipe does not go with table protocol"),
        (("ranpac", "--buffers", "5"), "--buffers does not go with table protocol"),
        (("slca" if not PENDING else "ranpac", "--train.epoch", 3), "unknown key 'train.epoch'"),
        ((), "`table protocol` takes the name of a protocol"),
    ],
)
def test_mistakes_get_one_line(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    assert said in call("table", "protocol", *words, "--runs", tmp_path).error


def test_other_tables_take_no_name(tmp_path: Path) -> None:
    assert "other tables none" in call("table", "main", "ranpac", "--runs", tmp_path).error


def test_protocols_are_listed() -> None:
    rows = call("list", "protocols", "--json").json
    assert [row["name"] for row in rows] == list(protocols())
    assert "SLCA" in call("list", "protocols").out
