"""Readers of published layouts, each on small stand-ins: files, labels and splits come back, damage is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from dualprompt.config import BenchmarkConfig
from dualprompt.data import download
from dualprompt.data.cache import Store
from dualprompt.data.datasets.core50 import OBJECTS
from dualprompt.data.sources import DATASETS, GROUPS, FileSource, Split
from dualprompt.data.stream import build_stream
from dualprompt.errors import DualPromptError
from sandbox import World, call

PILOT = {
    "cub200-pilot": ("cub", 200),
    "imagenet-r-pilot": ("imagenet-r", 200),
    "imagenet-a-pilot": ("imagenet-a", 200),
    "objectnet": ("objectnet", 200),
    "omnibenchmark": ("omnibenchmark", 300),
    "vtab5": ("vtab", 50),
}


def put(root: Path, *files: str) -> None:
    """Write stand-ins for images: readers list files, they do not decode them."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"image")


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(str, lines)) + "\n")


def listed(split: Split, root: Path) -> list[tuple[str, int]]:
    assert isinstance(split.source, FileSource)
    paths = [path.relative_to(root).as_posix() for path in split.source.paths]
    return list(zip(paths, split.labels.tolist(), strict=True))


def refusal(name: str, root: Path) -> str:
    with pytest.raises(DualPromptError) as caught:
        DATASETS[name].load(root)
    message = str(caught.value)
    assert "\n" not in message
    reader = DATASETS[name]
    assert (reader.by_hand or f"`dualprompt data get {name}`") in message
    return message


def make_cub(root: Path) -> None:
    folder = root / "CUB_200_2011"
    write(folder / "classes.txt", *(f"{n} {n:03}.Bird_{n}" for n in range(1, 201)))
    files = [f"{(n + 1) // 2:03}.Bird/{n}.jpg" for n in range(1, 401)]
    put(folder / "images", *files)
    write(folder / "images.txt", *(f"{n} {file}" for n, file in enumerate(files, start=1)))
    write(folder / "image_class_labels.txt", *(f"{n} {(n + 1) // 2}" for n in range(1, 401)))
    write(folder / "train_test_split.txt", *(f"{n} {n % 2}" for n in range(1, 401)))


def test_cub_follows_its_lists(tmp_path: Path) -> None:
    make_cub(tmp_path)
    dataset = DATASETS["cub200"].load(tmp_path)
    assert dataset.classes[:2] == ("001.Bird_1", "002.Bird_2")
    images = tmp_path / "CUB_200_2011" / "images"
    assert listed(dataset.train, images)[:2] == [("001.Bird/1.jpg", 0), ("002.Bird/3.jpg", 1)]
    assert listed(dataset.test, images)[199] == ("200.Bird/400.jpg", 199)
    assert (len(dataset.train), len(dataset.test)) == (200, 200)


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("classes.txt", "1 one", "1 classes instead of 200"),
        ("image_class_labels.txt", "1 1", "other images than images.txt (1, not 400)"),
        ("train_test_split.txt", "1", "one word in line 1"),
        ("images.txt", "1 ../../secret.jpg", "other images than images.txt"),
    ],
)
def test_cub_names_the_damage(tmp_path: Path, file: str, line: str, said: str) -> None:
    make_cub(tmp_path)
    write(tmp_path / "CUB_200_2011" / file, line)
    assert said in refusal("cub200", tmp_path)


def test_a_list_may_not_lead_outside_its_folder(tmp_path: Path) -> None:
    make_cub(tmp_path)
    path = tmp_path / "CUB_200_2011" / "images.txt"
    for file in ("../../secret.jpg", "/etc/passwd"):
        write(path, f"1 {file}", *path.read_text().splitlines()[1:])
        assert f"its list has '{file}'" in refusal("cub200", tmp_path)


def marks(files: list[tuple[str, int]]) -> dict[str, np.ndarray]:
    kinds = [("class", object), ("fname", object)]
    rows = [(np.array([[label]], np.uint8), np.array([file])) for file, label in files]
    return {"annotations": np.array([rows], dtype=kinds)}


def make_cars(root: Path) -> Path:
    folder = root / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    put(folder, *(f"{place}/{number:05}.jpg" for place in ("cars_train", "cars_test") for number in (1, 2, 9)))
    names = np.empty((1, 196), dtype=object)
    names[0] = [f"Car {n} C/V" for n in range(1, 197)]
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": names})
    savemat(folder / "devkit" / "cars_train_annos.mat", marks([("00001.jpg", 196), ("00002.jpg", 1)]))
    savemat(folder / "cars_test_annos_withlabels.mat", marks([("00001.jpg", 3), ("00009.jpg", 2)]))
    return folder


def test_cars_count_classes_from_one(tmp_path: Path) -> None:
    folder = make_cars(tmp_path)
    dataset = DATASETS["cars196"].load(tmp_path)
    assert (len(dataset.classes), dataset.classes[0], dataset.classes[195]) == (196, "Car 1 C/V", "Car 196 C/V")
    assert listed(dataset.train, folder) == [("cars_train/00001.jpg", 195), ("cars_train/00002.jpg", 0)]
    assert listed(dataset.test, folder) == [("cars_test/00001.jpg", 2), ("cars_test/00009.jpg", 1)]


def test_cars_name_the_damage(tmp_path: Path) -> None:
    folder = make_cars(tmp_path)
    for label in (0, 197):
        savemat(folder / "cars_test_annos_withlabels.mat", marks([("1.jpg", label)]))
        assert "classes from 1 to 196" in refusal("cars196", tmp_path)
    savemat(folder / "cars_test_annos_withlabels.mat", {"annotations": np.ones((2, 2))})
    assert "no 'class' and 'fname'" in refusal("cars196", tmp_path)
    (folder / "cars_test_annos_withlabels.mat").write_bytes(b"<html>gone</html>")
    assert "not a readable Matlab file" in refusal("cars196", tmp_path)


def test_imagenet_a_is_split_as_imagenet_r_is_but_by_its_own_name(tmp_path: Path) -> None:
    files = [f"n{10_000_000 + c}/{number}.jpg" for c in range(200) for number in range(5)]
    put(tmp_path / "imagenet-a", *files)
    dataset = DATASETS["imagenet-a"].load(tmp_path)
    ranked = sorted(files, key=lambda file: hashlib.sha256(f"imagenet-a split v1:{file}".encode()).digest())
    assert [file for file, _ in listed(dataset.test, tmp_path / "imagenet-a")] == sorted(ranked[:200])
    assert len(dataset.train) == 800


def make_coda(root: Path) -> list[str]:
    wnids = [f"n{10_000_000 + 7 * (c * 37 % 200)}" for c in range(200)]  # labels are not the order of the ids
    put(root / "imagenet-r", *(f"{wnid}/{n}.jpg" for wnid in wnids for n in (1, 2)))
    for split, n in (("train", 1), ("test", 2)):
        names = [f"- data/imagenet-r/{wnid}/{n}.jpg" for wnid in reversed(wnids)]
        path = root / "imagenet-r-coda" / f"imagenet-r_{split}.yaml"
        write(path, "data:", *names, "targets:", *(f"- {label}" for label in reversed(range(200))))
    return wnids


def test_codas_lists_number_the_classes(tmp_path: Path) -> None:
    wnids = make_coda(tmp_path)
    dataset = DATASETS["imagenet-r-coda"].load(tmp_path)
    assert list(dataset.classes) == wnids != sorted(wnids)
    folder = tmp_path / "imagenet-r"
    assert listed(dataset.train, folder) == sorted((f"{wnid}/1.jpg", label) for label, wnid in enumerate(wnids))
    assert listed(dataset.test, folder) == sorted((f"{wnid}/2.jpg", label) for label, wnid in enumerate(wnids))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["data:", "- data/imagenet-r/n1/a.jpg"], "is not the list 'data' and then as many 'targets'"),
        (["data:", "- data/other/n1/a.jpg", "targets:", "- 1"], "instead of a file below data/imagenet-r/"),
        (["data:", "- data/imagenet-r/n1/a.jpg", "targets:", "- 200"], "instead of a number below 200"),
        (["data:", "- data/imagenet-r/n1/a.jpg", "targets:", "- -1"], "instead of a number below 200"),
        (["data:", "- data/imagenet-r/n1/a.jpg", "targets:", "- 0"], "gives label 0 to two classes"),
    ],
)
def test_codas_lists_name_the_damage(tmp_path: Path, lines: list[str], said: str) -> None:
    make_coda(tmp_path)
    write(tmp_path / "imagenet-r-coda" / "imagenet-r_test.yaml", *lines)
    assert said in refusal("imagenet-r-coda", tmp_path)


@pytest.mark.parametrize("name", PILOT)
def test_pilots_folders_count_classes_by_their_sorted_names(tmp_path: Path, name: str) -> None:
    folder, count = PILOT[name]
    for split in ("train", "test"):
        put(tmp_path / "pilot" / folder / split, *(f"{n}/{split}.jpg" for n in range(count)))
    dataset = DATASETS[name].load(tmp_path)
    assert dataset.name == name
    assert dataset.classes == tuple(sorted(map(str, range(count))))  # as ImageFolder: 0, 1, 10, 100 …
    assert listed(dataset.test, tmp_path / "pilot" / folder / "test")[2] == ("10/test.jpg", 2)
    (tmp_path / "pilot" / folder / "train" / "0" / "train.jpg").unlink()
    with pytest.raises(DualPromptError, match="without images"):
        DATASETS[name].load(tmp_path)
    put(tmp_path / "pilot" / folder / "train", "0/train.jpg", "extra/a.jpg")
    put(tmp_path / "pilot" / folder / "test", "extra/a.jpg")
    assert f"{count + 1} class folders instead of {count}" in refusal(name, tmp_path)


def make_domain(root: Path, domain: str, without: dict[str, int] | None = None) -> None:
    without = without or {}
    for split in ("train", "test"):
        lines = [f"{domain}/class_{n:03}/{split}_{n}.jpg {n}" for n in range(345) if n != without.get(split)]
        write(root / "domainnet" / f"{domain}_{split}.txt", *lines)
        put(root / "domainnet", *(line.split()[0] for line in lines))


def test_domainnet_follows_its_lists(tmp_path: Path) -> None:
    make_domain(tmp_path, "sketch")
    dataset = DATASETS["domainnet/sketch"].load(tmp_path)
    assert (dataset.name, dataset.classes[344]) == ("sketch", "class_344")
    assert listed(dataset.test, tmp_path / "domainnet")[344] == ("sketch/class_344/test_344.jpg", 344)
    path = tmp_path / "domainnet" / "sketch_test.txt"
    for line, said in (
        ("sketch/class_001/a.jpg 0", "no DOMAIN/CLASS/FILE of class 0"),
        ("a.jpg 3", "no DOMAIN/CLASS/FILE of class 3"),
        ("sketch/class_001/a.jpg 345", "instead of a number below 345"),
    ):
        write(path, line)
        assert said in refusal("domainnet/sketch", tmp_path)


def test_a_domain_may_lack_a_class_in_a_split(tmp_path: Path) -> None:
    """As DomainNet's paintings do: that class is no part of the domain, and all others stay."""
    make_domain(tmp_path, "real")
    make_domain(tmp_path, "painting", without={"train": 327, "test": 300})
    picture = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    for domain in ("real", "painting"):
        for split in (
            DATASETS[f"domainnet/{domain}"].load(tmp_path).train,
            DATASETS[f"domainnet/{domain}"].load(tmp_path).test,
        ):
            assert isinstance(split.source, FileSource)
            for path in split.source.paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                picture.save(path)
    config = BenchmarkConfig(dataset=["domainnet/real", "domainnet/painting"], stream="domain", root=str(tmp_path))
    first, second = build_stream(config, 0, Store(4, False)).experiences
    assert (first.name, second.name) == ("real", "painting")
    assert len(first.labels) == 345
    assert set(first.labels) - set(second.labels) == {300, 327}
    assert second.new_labels == ()
    assert second.seen == first.labels


def make_core50(root: Path, *sessions: int) -> None:
    for session in sessions:
        files = (f"s{session}/o{n}/C_{session:02}_{n:02}_{f:03}.png" for n in range(1, 51) for f in (2, 1))
        put(root / "core50_128x128", *files)


def test_core50_tests_every_session_on_the_same_three(tmp_path: Path) -> None:
    make_core50(tmp_path, 1, 3, 4, 7, 10)
    first, second = (DATASETS[f"core50/s{session}"].load(tmp_path) for session in (1, 4))
    folder = tmp_path / "core50_128x128"
    assert first.classes == second.classes == OBJECTS
    assert (OBJECTS[0], OBJECTS[49]) == ("plug adapter 1", "remote control 5")
    assert listed(first.train, folder)[:2] == [("s1/o1/C_01_01_001.png", 0), ("s1/o1/C_01_01_002.png", 0)]
    assert listed(first.test, folder) == listed(second.test, folder)
    assert {file.partition("/")[0] for file, _ in listed(first.test, folder)} == {"s3", "s7", "s10"}
    assert str(folder / "s2" / "o1") in refusal("core50/s2", tmp_path)
    assert not {"core50/s3", "core50/s7", "core50/s10"} & set(DATASETS.names())


def test_office_home_splits_each_domain_by_file_names(tmp_path: Path) -> None:
    folder = tmp_path / "OfficeHomeDataset_10072016" / "Real World"
    put(folder, *(f"Class {n:02}/{f:05}.jpg" for n in range(65) for f in range(5)))
    dataset = DATASETS["office-home/real-world"].load(tmp_path)
    assert (dataset.name, len(dataset.classes)) == ("real-world", 65)
    assert (len(dataset.train), len(dataset.test)) == (260, 65)
    put(folder, "Extra/1.jpg", "Extra/2.jpg")
    assert "66 class folders instead of 65" in refusal("office-home/real-world", tmp_path)


def test_the_preset_of_a_group_of_domains_runs(world: World, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for number in range(65):
            folder = tmp_path / "OfficeHomeDataset_10072016" / domain / f"Class {number:02}"
            folder.mkdir(parents=True)
            for file in range(2):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{file}.png")
    options = ("--backbone", world.weights, "--benchmark.root", tmp_path, "--method", "simple-cil", "--no-baseline")
    done = call("run", "office-home", *options, "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert done.json["tasks"] == ["art", "clipart", "product", "real-world"]
    assert done.json["class_order"] == [f"Class {number:02}" for number in range(65)]


def make_tiny(root: Path) -> Path:
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{10_000_000 + c}" for c in range(200)]
    write(folder / "wnids.txt", *reversed(wnids))
    write(folder / "words.txt", "n10000000\tgoldfish, Carassius auratus", "n10000001\tcrane", "n10000002\tcrane")
    put(folder, *(f"train/{wnid}/images/{wnid}_{n}.JPEG" for wnid in wnids for n in (1, 0)))
    write(
        folder / "val" / "val_annotations.txt", "val_0.JPEG\tn10000007\t0\t0\t9\t9", "val_1.JPEG\tn10000000\t0\t0\t9\t9"
    )
    put(folder / "val" / "images", "val_0.JPEG", "val_1.JPEG")
    return folder


LISTS = {
    "cub200": (make_cub, "CUB_200_2011/images/007.Bird"),
    "cars196": (make_cars, "stanford_cars/cars_test"),
    "imagenet-r-coda": (make_coda, "imagenet-r/n10000007"),
    "domainnet/sketch": (lambda root: make_domain(root, "sketch"), "domainnet/sketch/class_003"),
    "tiny-imagenet": (make_tiny, "tiny-imagenet-200/val/images"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_without_their_images_are_no_dataset(tmp_path: Path, name: str) -> None:
    make, place = LISTS[name]
    make(tmp_path)
    assert DATASETS[name].load(tmp_path).classes
    (tmp_path / place).rename(tmp_path / "elsewhere")
    assert refusal(name, tmp_path).startswith(f"{tmp_path / place} does not exist; ")


def test_tiny_imagenet_sorts_classes_and_tests_on_validation(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    dataset = DATASETS["tiny-imagenet"].load(tmp_path)
    assert dataset.classes[:4] == ("goldfish", "n10000001", "n10000002", "n10000003")
    assert listed(dataset.train, folder)[0] == ("train/n10000000/images/n10000000_0.JPEG", 0)
    assert len(dataset.train) == 400
    assert listed(dataset.test, folder) == [("val/images/val_0.JPEG", 7), ("val/images/val_1.JPEG", 0)]
    write(folder / "val" / "val_annotations.txt", "val_0.JPEG\tn99999999")
    assert "names no class of wnids.txt" in refusal("tiny-imagenet", tmp_path)


NEW = sorted(
    {"cub200", "cars196", "imagenet-a", "imagenet-r-coda", "tiny-imagenet", *PILOT}
    | {member for group in ("domainnet", "core50", "office-home") for member in GROUPS[group]}
)


@pytest.mark.parametrize("name", NEW)
def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    message = refusal(name, tmp_path)
    assert message.startswith(str(tmp_path))
    assert "does not exist" in message
    assert "--benchmark.root" in message


@pytest.mark.parametrize("name", NEW)
def test_remotes_are_complete_or_it_is_said_what_to_do_by_hand(tmp_path: Path, name: str) -> None:
    reader = DATASETS[name]
    assert reader.title
    assert reader.licence
    assert bool(reader.remotes) != bool(reader.by_hand)
    for remote in reader.remotes:
        algorithm, _, digest = remote.checksum.partition(":")
        assert len(bytes.fromhex(digest)) == hashlib.new(algorithm).digest_size
        assert all(url.startswith(("https://", "http://")) for url in remote.urls)
        assert all(url.endswith("/" + Path(remote.path).name) for url in remote.urls)
    if reader.by_hand:
        with pytest.raises(DualPromptError, match="cannot be downloaded from here; no checksum is published"):
            download.get(name, tmp_path)


def test_domains_that_share_an_archive_get_it_once(tmp_path: Path) -> None:
    assert [remote.path for remote in download.remotes_of("core50", tmp_path)] == ["core50_128x128.zip"]
    paths = [remote.path for remote in download.remotes_of("domainnet", tmp_path)]
    assert len(paths) == len(set(paths)) == 18
