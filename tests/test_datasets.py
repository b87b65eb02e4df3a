"""Every reader on tiny files in its official layout: pixels and labels come back, damage is named."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from dualprompt.data.datasets.imagenet_r import draw_test
from dualprompt.data.datasets.notmnist import KNOWN_BAD
from dualprompt.data.sources import DATASETS, GROUPS, ArraySource, Dataset, FileSource, Split
from dualprompt.errors import DualPromptError


def draw(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def pixels(split: Split) -> np.ndarray:
    assert isinstance(split.source, ArraySource)
    found = split.source.pixels
    assert found.dtype == np.uint8
    assert found.shape[-1] == 3
    assert split.labels.dtype == np.int64
    assert len(found) == len(split) == len(split.labels)
    return found


def paths(split: Split) -> list[Path]:
    assert isinstance(split.source, FileSource)
    assert len(split.source.paths) == len(split)
    assert split.labels.dtype == np.int64
    return list(split.source.paths)


def refusal(name: str, root: Path) -> str:
    """Return the message with which the reader refuses what lies below `root`: one line, with the remedy."""
    with pytest.raises(DualPromptError) as caught:
        DATASETS[name].load(root)
    message = str(caught.value)
    assert f"`dualprompt data get {name}`" in message
    assert "\n" not in message
    return message


def write_cifar(path: Path, images: np.ndarray, labels: list[int], coarse: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [] if coarse is None else [coarse]
    path.write_bytes(
        b"".join(
            bytes([*head, label]) + image.transpose(2, 0, 1).tobytes()
            for image, label in zip(images, labels, strict=True)
        )
    )


def make_cifar10(root: Path) -> tuple[np.ndarray, np.ndarray]:
    folder, train, test = root / "cifar-10-batches-bin", draw(10, 32, 32, 3), draw(3, 32, 32, 3, seed=1)
    for batch in range(5):
        write_cifar(folder / f"data_batch_{batch + 1}.bin", train[2 * batch :][:2], [2 * batch, 2 * batch + 1])
    write_cifar(folder / "test_batch.bin", test, [9, 0, 5])
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    return train, test


def make_cifar100(root: Path) -> tuple[np.ndarray, np.ndarray]:
    folder, train, test = root / "cifar-100-binary", draw(4, 32, 32, 3), draw(2, 32, 32, 3, seed=1)
    write_cifar(folder / "train.bin", train, [99, 0, 7, 42], coarse=19)
    write_cifar(folder / "test.bin", test, [1, 98], coarse=3)
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{number}" for number in range(100)) + "\n")
    return train, test


def test_cifar10_reads_five_batches_in_order(tmp_path: Path):
    train, test = make_cifar10(tmp_path)
    dataset = DATASETS["cifar10"].load(tmp_path)
    assert dataset.name == "cifar10"
    assert dataset.classes == tuple("abcdefghij")
    np.testing.assert_array_equal(pixels(dataset.train), train)
    np.testing.assert_array_equal(pixels(dataset.test), test)
    assert dataset.train.labels.tolist() == list(range(10))
    assert dataset.test.labels.tolist() == [9, 0, 5]


def test_cifar100_takes_the_fine_label(tmp_path: Path):
    train, test = make_cifar100(tmp_path)
    dataset = DATASETS["cifar100"].load(tmp_path)
    assert dataset.classes[42] == "class42"
    np.testing.assert_array_equal(pixels(dataset.train), train)
    np.testing.assert_array_equal(pixels(dataset.test), test)
    assert dataset.train.labels.tolist() == [99, 0, 7, 42]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 4 * 3074 - 1).filter(lambda cut: cut % 3074 != 0 or cut == 0))
def test_cifar_refuses_every_truncation(tmp_path: Path, cut: int):
    make_cifar100(tmp_path)
    path = tmp_path / "cifar-100-binary" / "train.bin"
    path.write_bytes(path.read_bytes()[:cut])
    message = refusal("cifar100", tmp_path)
    assert str(path) in message
    assert f"{cut} bytes" in message


def test_cifar_refuses_a_label_out_of_range(tmp_path: Path):
    make_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    write_cifar(path, draw(1, 32, 32, 3), [10])
    message = refusal("cifar10", tmp_path)
    assert str(path) in message
    assert "label 10" in message


def test_cifar_refuses_missing_class_names(tmp_path: Path):
    make_cifar100(tmp_path)
    path = tmp_path / "cifar-100-binary" / "fine_label_names.txt"
    path.write_text("apple\n")
    assert "1 class names instead of 100" in refusal("cifar100", tmp_path)


def idx(array: np.ndarray, magic: bytes | None = None) -> bytes:
    head = magic or bytes([0, 0, 8, array.ndim])
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def make_mnist(root: Path, folder: str = "MNIST", zipped: bool = True) -> tuple[np.ndarray, np.ndarray]:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    train, test = draw(3, 28, 28), draw(2, 28, 28, seed=1)
    for prefix, images, labels in (("train", train, [9, 0, 4]), ("t10k", test, [1, 2])):
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array(labels, dtype=np.uint8))):
            content = idx(array)
            path = raw / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    return train, test


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "folder", "last"), [("mnist", "MNIST", "9"), ("fashion-mnist", "FashionMNIST", "Ankle boot")]
)
def test_mnist_becomes_rgb(tmp_path: Path, name: str, folder: str, last: str, zipped: bool):
    train, test = make_mnist(tmp_path, folder, zipped)
    dataset = DATASETS[name].load(tmp_path)
    assert len(dataset.classes) == 10
    assert dataset.classes[9] == last
    for channel in range(3):
        np.testing.assert_array_equal(pixels(dataset.train)[..., channel], train)
        np.testing.assert_array_equal(pixels(dataset.test)[..., channel], test)
    assert dataset.train.labels.tolist() == [9, 0, 4]
    assert dataset.test.labels.tolist() == [1, 2]


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the time of writing would end up in the test's name


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        (
            IMAGES,
            zipped(idx(draw(3, 28, 28), magic=b"\x00\x00\x0d\x03")),
            "00000d03 instead of 00000803",
        ),
        (
            IMAGES,
            zipped(idx(draw(3, 28, 28))[:-1]),
            "2367 bytes; its header (3, 28, 28) asks for 2368",
        ),
        (
            IMAGES,
            zipped(idx(draw(3, 28, 28)) + b"!"),
            "2369 bytes; its header (3, 28, 28) asks for 2368",
        ),
        (IMAGES, zipped(idx(draw(3, 28, 28))[:9]), "inside its header"),
        (IMAGES, zipped(idx(draw(0, 28, 28))), "its header (0, 28, 28)"),
        (IMAGES, zipped(idx(draw(3, 28, 28)))[:-12], "cannot be decompressed"),
        (IMAGES, b"<html>not found</html>", "cannot be decompressed"),
        (LABELS, zipped(idx(np.array([1, 2], dtype=np.uint8))), "2 labels for 3 images"),
        (LABELS, zipped(idx(np.array([1, 2, 10], dtype=np.uint8))), "label 10"),
    ],
)
def test_mnist_names_the_damage(tmp_path: Path, file: str, content: bytes, found: str):
    make_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / file
    path.write_bytes(content)
    message = refusal("mnist", tmp_path)
    assert str(path) in message
    assert found in message


def make_svhn(root: Path) -> np.ndarray:
    (root / "SVHN").mkdir()
    images = draw(4, 32, 32, 3)
    for split in ("train", "test"):
        write_svhn(root, split, images, np.array([10, 1, 9, 5]))
    return images


def write_svhn(root: Path, split: str, images: np.ndarray, labels: np.ndarray) -> Path:
    path = root / "SVHN" / f"{split}_32x32.mat"
    savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": labels.astype(np.uint8)[:, None]}, do_compression=True)
    return path


def test_svhn_label_ten_is_the_digit_zero(tmp_path: Path):
    images = make_svhn(tmp_path)
    dataset = DATASETS["svhn"].load(tmp_path)
    assert dataset.classes == tuple("0123456789")
    np.testing.assert_array_equal(pixels(dataset.train), images)
    np.testing.assert_array_equal(pixels(dataset.test), images)
    assert dataset.test.labels.tolist() == [0, 1, 9, 5]


def test_svhn_names_the_damage(tmp_path: Path):
    images = make_svhn(tmp_path)
    for labels, found in (
        ([10, 1, 9], "3 labels for 4 images"),
        ([10, 1, 9, 11], "1 to 10"),
        ([0] * 4, "1 to 10"),
    ):
        path = write_svhn(tmp_path, "test", images, np.array(labels))
        message = refusal("svhn", tmp_path)
        assert str(path) in message
        assert found in message
    savemat(path, {"X": images.transpose(1, 2, 3, 0)})
    assert "no array 'y'" in refusal("svhn", tmp_path)
    savemat(path, {"X": images.astype(float), "y": np.ones((4, 1))})
    assert "float64 (4, 32, 32, 3) instead of uint8" in refusal("svhn", tmp_path)
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n" + bytes(512))
    assert "not a readable Matlab file" in refusal("svhn", tmp_path)  # a format that scipy does not read


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999))
def test_svhn_refuses_every_truncation(tmp_path: Path, share: float):
    path = tmp_path / "SVHN" / "train_32x32.mat"
    if not path.exists():
        make_svhn(tmp_path)
    whole = (tmp_path / "SVHN" / "test_32x32.mat").read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert str(path) in refusal("svhn", tmp_path)


def write_letters(folder: Path, files: list[str], seed: int = 0) -> None:
    for label, letter in enumerate("ABCDEFGHIJ"):
        (folder / letter).mkdir(parents=True)
        for number, file in enumerate(files):
            image = Image.fromarray(draw(1, 28, 28, seed=seed + 100 * label + number)[0])
            image.save(folder / letter / file)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("notMNIST_large", "notMNIST_small"),
        ("notMNIST/train", "notMNIST/test"),
        ("notMNIST/Train", "notMNIST/Test"),
    ],
)
def test_notmnist_lists_sorted_files_of_each_layout(tmp_path: Path, train: str, test: str):
    files = [f"{number}.png" for number in (7, 2, 9, 4, 1, 8, 3)]  # no disk lists ten such folders sorted
    write_letters(tmp_path / train, files)
    write_letters(tmp_path / test, ["c.png"])
    (tmp_path / train / "A" / "notes.txt").write_text("no image")
    dataset = DATASETS["notmnist"].load(tmp_path)
    assert dataset.classes == tuple("ABCDEFGHIJ")
    assert paths(dataset.train) == [tmp_path / train / x / f for x in "ABCDEFGHIJ" for f in sorted(files)]
    assert dataset.train.labels.tolist() == [label for label in range(10) for _ in files]
    assert paths(dataset.test) == [tmp_path / test / letter / "c.png" for letter in "ABCDEFGHIJ"]
    assert dataset.test.labels.tolist() == list(range(10))


def test_notmnist_leaves_out_exactly_the_known_bad_files(tmp_path: Path):
    write_letters(tmp_path / "notMNIST_large", ["good.png"])
    write_letters(tmp_path / "notMNIST_small", ["good.png"])
    for bad in KNOWN_BAD:
        (tmp_path / "notMNIST_large" / bad).touch()
    kept = tmp_path / "notMNIST_small" / "C" / "Um9tYW5hIEJvbGQucGZi.png"  # it is only broken as a letter A
    kept.touch()
    dataset = DATASETS["notmnist"].load(tmp_path)
    assert {path.name for path in paths(dataset.train)} == {"good.png"}
    assert len(dataset.train) == 10
    assert kept in paths(dataset.test)


def test_notmnist_names_an_absent_or_empty_letter(tmp_path: Path):
    write_letters(tmp_path / "notMNIST_large", ["a.png"])
    message = refusal("notmnist", tmp_path)
    assert str(tmp_path / "notMNIST_small" / "A") in message
    assert "does not exist" in message
    write_letters(tmp_path / "notMNIST_small", ["a.png"])
    (tmp_path / "notMNIST_small" / "E" / "a.png").unlink()
    message = refusal("notmnist", tmp_path)
    assert str(tmp_path / "notMNIST_small" / "E") in message
    assert "no .png" in message


SPLIT = "imagenet-r split v1"


def make_imagenet_r(root: Path, a_class: int = 5) -> list[str]:
    """Write 200 class folders of stand-ins (the reader lists files, it does not decode them)."""
    files = [f"n{10_000_000 + 37 * c}/art_{number}.jpg" for c in range(200) for number in range(a_class)]
    for file in files:
        path = root / "imagenet-r" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"jpeg")
    return files


def test_imagenet_r_split_follows_from_file_names(tmp_path: Path):
    files = make_imagenet_r(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    dataset = DATASETS["imagenet-r"].load(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before

    folder = tmp_path / "imagenet-r"
    ranked = sorted(files, key=lambda file: hashlib.sha256(f"imagenet-r split v1:{file}".encode()).hexdigest())
    assert paths(dataset.test) == sorted(folder / file for file in ranked[:200])
    assert paths(dataset.train) == sorted(folder / file for file in ranked[200:])
    wnids = sorted({file.split("/")[0] for file in files})
    assert dataset.classes == tuple(wnids)
    for split in (dataset.train, dataset.test):
        assert [wnids[label] for label in split.labels] == [path.parent.name for path in paths(split)]


def test_imagenet_r_split_is_pinned():
    """A change of the split would silently change every published number: it needs a new version."""
    chosen = draw_test([f"n01443537/sketch_{number}.jpg" for number in range(10)], SPLIT)
    assert chosen == {"n01443537/sketch_9.jpg", "n01443537/sketch_7.jpg"}


def test_imagenet_r_test_split_is_a_fifth():
    assert len(draw_test([f"n01443537/{number}.jpg" for number in range(30_000)], SPLIT)) == 6_000


@given(names=st.sets(st.text("abc019_", min_size=1), min_size=1, max_size=60), order=st.randoms())
def test_imagenet_r_split_ignores_the_order_of_the_list(names, order):
    files = [f"n01443537/{name}.jpg" for name in names]
    shuffled = files.copy()
    order.shuffle(shuffled)
    assert draw_test(shuffled, SPLIT) == draw_test(files, SPLIT)
    assert len(draw_test(files, SPLIT)) == round(len(files) / 5)


def test_imagenet_r_takes_unique_names_from_the_readme(tmp_path: Path):
    files = make_imagenet_r(tmp_path, a_class=1)
    first, second, third, fourth = sorted({file.split("/")[0] for file in files})[:4]
    readme = f"30,000 images.\n\n{first} goldfish\n{second} crane\n{third} crane\nn99999999 none\n"
    (tmp_path / "imagenet-r" / "README.txt").write_text(readme)
    classes = DATASETS["imagenet-r"].load(tmp_path).classes
    assert classes[:4] == ("goldfish", second, third, fourth)
    assert len(set(classes)) == 200


def test_imagenet_r_names_the_damage(tmp_path: Path):
    files = make_imagenet_r(tmp_path, a_class=1)
    empty = tmp_path / "imagenet-r" / files[7]
    empty.unlink()
    message = refusal("imagenet-r", tmp_path)
    assert str(empty.parent) in message
    assert "no .jpg" in message
    empty.parent.rmdir()
    assert "199 class folders instead of 200" in refusal("imagenet-r", tmp_path)


REAL = ("cifar10", "cifar100", "mnist", "fashion-mnist", "svhn", "notmnist", "imagenet-r")


@pytest.mark.parametrize("name", REAL)
def test_missing_files_name_path_and_remedies(tmp_path: Path, name: str):
    message = refusal(name, tmp_path)
    assert message.startswith(str(tmp_path))
    assert "does not exist" in message
    assert "--benchmark.root" in message


@pytest.mark.parametrize("name", REAL)
def test_remotes_are_complete(name: str):
    reader = DATASETS[name]
    assert reader.title
    assert reader.licence
    assert reader.remotes
    for remote in reader.remotes:
        algorithm, _, digest = remote.checksum.partition(":")
        assert len(bytes.fromhex(digest)) == hashlib.new(algorithm).digest_size
        assert remote.size
        assert all(url.startswith(("https://", "http://")) for url in remote.urls)
        assert all(url.endswith("/" + Path(remote.path).name) for url in remote.urls)


def test_five_datasets_are_known():
    assert GROUPS["5-datasets"] == ("cifar10", "mnist", "svhn", "notmnist", "fashion-mnist")
    assert all(name in DATASETS for name in GROUPS["5-datasets"])


def test_loading_twice_gives_the_same(tmp_path: Path):
    make_cifar10(tmp_path)
    first, second = (DATASETS["cifar10"].load(tmp_path) for _ in range(2))
    assert isinstance(first, Dataset)
    np.testing.assert_array_equal(pixels(first.train), pixels(second.train))
    np.testing.assert_array_equal(first.train.labels, second.train.labels)
