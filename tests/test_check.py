"""Folders as people have them, good and bad, and what the user is shown of each."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from dualprompt.cli import main
from dualprompt.data.doubts import doubts
from dualprompt.data.formats import open_image, reads_heic
from dualprompt.data.looks import ROWS, Looks
from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.lessons.check import check
from dualprompt.model.images import pixels_of
from sandbox import Outcome, World, call, contents, forked

FLAGS = ("--method=dualprompt", "--device=cpu", "--epochs=1", "--method.g_layers=[1]", "--method.e_layers=[2,3]")


def picture(seed: int, side: int = 48) -> Image.Image:
    """A picture of many edges, unlike all others."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    return coarse.resize((side, side), Image.Resampling.NEAREST)


def fill(folder: Path, start: int = 0, **classes: int) -> Path:
    """Put so many pictures into each class folder."""
    seeds = iter(range(start, 1_000_000))
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            picture(next(seeds)).save(folder / name / f"{n}.png")
    return folder


def learn(world: World, folder: Path, *options: object) -> Outcome:
    return call("learn", folder.parent / "model", folder, "--backbone", world.weights, *FLAGS, *options)


def test_a_good_folder_has_nothing_to_tell(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=6, dog=7)
    found = check(folder)
    assert found.summary() == []
    assert found.to_dict()["classes"] == {"cat": 6, "dog": 7}
    assert found.doubted is None
    shown = call("check", folder)
    assert (shown.code, "nothing stands out" in shown.out) == (0, True)
    assert learn(world, folder).err == ""


def test_files_that_are_no_images_are_named_with_the_reason(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=5, dog=5)
    reasons = {
        "cat/notes.txt": "not named like an image ('.txt')",
        "cat/.DS_Store": "a file of the operating system",
        "dog/Thumbs.db": "a file of the operating system",
        "dog/run.MP4": "a video",
        "dog/IMG_1.CR2": "a camera's raw file",
        "loose.jpg": "an image that lies in no class folder",
        "readme": "not named like an image",
        "cat/.hidden/x.png": None,
        "cat/.hidden": "a hidden folder",
        "dog/gone.png": "a link that leads nowhere",
        "dog/linked": "a link to a folder",
    }
    for name, reason in reasons.items():
        if reason is None or not name.endswith(("hidden", "gone.png", "linked")):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"-")
    (folder / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "dog" / "linked").symlink_to(folder / "cat")
    expected = {str(folder / name): reason for name, reason in reasons.items() if reason}
    found = {each.path: each.reason for each in check(folder).left_out}
    assert found.keys() == expected.keys()
    assert {path for path, reason in expected.items() if not found[path].startswith(reason)} == set()
    learned = learn(world, folder)
    assert learned.code == 0, learned.err
    for path in expected:
        assert f"left out: {path} (" in learned.err
    assert call("check", folder, "--json").json["left_out"] == [
        {"path": path, "reason": reason} for path, reason in found.items()
    ]


def test_months_of_classes_are_asked_about_not_learned(world: World, tmp_path: Path) -> None:
    year = tmp_path / "year"
    fill(year / "january", cat=3, dog=3)
    fill(year / "february", start=6, fox=3, owl=3)
    refused = learn(world, year).error
    assert "one level too high" in refused
    assert f"learn {year / 'february'}, then the others" in refused
    assert "--nested" in refused
    assert "one level too high" in call("check", year).out
    assert learn(world, year, "--nested").code == 0
    assert ContinualLearner.load(tmp_path / "model").classes == ("february", "january")
    with pytest.raises(DualPromptError, match="one level too high"):
        ContinualLearner.load(tmp_path / "model").learn(year)


def at_terminal(words: list[str], terminal: str) -> None:
    """Be the command in a process whose stdin and stderr are a terminal."""
    file = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(file, 0)
    os.dup2(file, 2)
    sys.stdin, sys.stderr = open(0), open(2, "w")  # noqa: SIM115
    sys.exit(main(words))


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"\n", 2)])
def test_on_a_terminal_it_asks(world: World, tmp_path: Path, answer: bytes, code: int) -> None:
    fill(tmp_path / "year" / "january", cat=3, dog=3)
    fill(tmp_path / "year" / "february", start=6, fox=3, owl=3)
    words = ("learn", tmp_path / "model", tmp_path / "year", "--backbone", world.weights, *FLAGS)
    ours, theirs = pty.openpty()
    process = forked(at_terminal, list(map(str, words)), os.ttyname(theirs))
    shown = b""
    while b"[y/N]" not in shown:
        assert select.select([ours], [], [], 60)[0], shown
        shown += os.read(ours, 1000)
    os.close(theirs)  # it is open there by now
    os.write(ours, answer)
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while os.read(ours, 1000):
            pass
    process.join(60)
    assert process.exitcode == code
    assert b"one level too high" in shown
    assert (tmp_path / "model").exists() == (code == 0)


def test_a_folder_around_the_classes(world: World, tmp_path: Path) -> None:
    fill(tmp_path / "download" / "photos", cat=3, dog=3)
    refused = learn(world, tmp_path / "download").error
    assert f"learn {tmp_path / 'download' / 'photos'}" in refused


def test_classes_may_hold_their_images_deeper(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        fill(tmp_path / "photos" / name, start=ord(name[0]), images=3)
    assert check(tmp_path / "photos").level is None
    fill(tmp_path / "photos" / "cat", start=7, more=3)
    assert check(tmp_path / "photos").level is not None
    fill(tmp_path / "photos", start=20, dog=1)  # one that holds an image itself is a class
    assert check(tmp_path / "photos").level is None


def test_the_folder_of_one_class(world: World, tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", cat=3, dog=3)
    refused = learn(world, photos / "cat").error
    assert "one level too deep" in refused
    assert f"give {photos}, whose 2 folders are the classes" in refused
    assert refused == call("check", photos / "cat").error


def test_copies_within_and_across_classes(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=6, dog=6, fox=6)
    shutil.copy(folder / "cat" / "0.png", folder / "cat" / "same.png")
    shutil.copy(folder / "cat" / "1.png", folder / "dog" / "strange.png")
    Image.open(folder / "fox" / "2.png").save(folder / "fox" / "smaller.jpg", quality=60)
    found = {
        tuple(Path(image).relative_to(folder).as_posix() for image in each.images): (each.classes, each.exact)
        for each in check(folder).copies
    }
    assert found == {
        ("cat/1.png", "dog/strange.png"): (("cat", "dog"), True),
        ("cat/0.png", "cat/same.png"): (("cat",), True),
        ("fox/2.png", "fox/smaller.jpg"): (("fox",), False),
    }
    told = call("check", folder).out
    assert f"one picture with several labels: the same: {folder}/cat/1.png = {folder}/dog/strange.png" in told
    learned = learn(world, folder)
    assert f"the same: {folder}/cat/0.png = {folder}/cat/same.png" in learned.err


def test_a_few_copies_are_named_and_the_rest_counted(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", **{f"class {n}": 1 for n in range(7)})
    for each in sorted(folder.glob("*/0.png")):
        for n in range(1, 7):
            shutil.copy(each, each.with_name(f"{n}.png"))
    learned, checked = learn(world, folder).err, call("check", folder).out
    for told, groups in ((learned, 5), (checked, 7)):
        found = [line for line in told.splitlines() if line.startswith("the same: ")]
        assert [(line.count(".png"), line.endswith(" and 3 more")) for line in found] == [(4, True)] * groups
    assert "… and 2 more groups of copies" in learned


def test_flat_pictures_of_other_colours_are_no_copies() -> None:
    flat = np.stack([np.full((32, 32, 3), shade, np.uint8) for shade in (0, 100, 200, 203)])
    assert Looks.of(flat).copies == [([2, 3], False)]


def test_blurred_pictures(tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=1, dog=1)
    for n in range(2, 12):
        picture(n, 224).save(folder / "cat" / f"{n}.png")
    picture(30, 224).filter(ImageFilter.GaussianBlur(10)).save(folder / "dog" / "blurred.png")
    [found] = check(folder).blurred
    assert found.image == str(folder / "dog" / "blurred.png")
    assert "blurred: " in call("check", folder).out


def test_one_class_alone(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=6)
    assert "there is one class alone" in call("check", folder).out


def test_one_image_a_class(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=1, dog=1)
    told = "fewer than 5 images, too few to measure the accuracy well: 'cat' (1), 'dog' (1)"
    assert told in call("check", folder).out
    learned = learn(world, folder, "--json")
    assert told in learned.err
    assert learned.json["learned"]["accuracy"] is None


def test_unbalanced_classes(tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=61, dog=6, fox=7)
    assert check(folder).unbalanced == ("dog",)
    assert "'cat' has 61 images, more than 10 times those of 'dog' (6)" in call("check", folder).out


def test_three_hundred_classes(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", **{f"class {n:03}": 2 for n in range(300)})
    told = call("check", folder)
    assert "600 images of 300 classes" in told.out
    assert len(told.out.splitlines()) < 60
    learned = learn(world, folder, "--json")
    assert learned.code == 0, learned.err
    assert len(learned.json["classes"]) == 300


@pytest.mark.slow
def test_five_thousand_images(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", **{f"class {n:02}": 100 for n in range(50)})
    shutil.copy(folder / "class 03" / "7.png", folder / "class 41" / "99.png")
    told = call("check", folder)
    assert "5000 images of 50 classes" in told.out
    assert f"one picture with several labels: the same: {folder}/class 03/7.png = {folder}/class 41/99.png" in told.out
    made = call("learn", tmp_path / "model", folder, "--backbone", world.weights, "--prompts", "never", "--json")
    assert (made.json["learned"]["images"], made.json["learned"]["held"]) == (5000, 5000)


def test_more_images_than_are_compared_at_a_time() -> None:
    rng, count = np.random.default_rng(0), 3 * ROWS - 1
    images = rng.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    images[-2] = images[17]
    found = check({"odd": list(images[1::2]), "even": list(images[::2])})
    assert found.classes == {"even": count // 2 + 1, "odd": count // 2}
    copies = ("image 9 of 'odd'", f"image {count // 2} of 'odd'")
    assert [(each.images, each.exact) for each in found.copies] == [(copies, True)]


def declared(width: int, height: int) -> bytes:
    """A PNG that says it is so large and has no pixels."""
    encoded = io.BytesIO()
    Image.new("RGB", (4, 4)).save(encoded, "PNG")
    whole = encoded.getvalue()
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4, "big") + whole[33:]


def test_sixty_megapixels(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=5, dog=5)
    Image.new("RGB", (9500, 6340), "orange").save(folder / "cat" / "camera.jpg")
    assert check(folder).unreadable == ()
    (folder / "dog" / "claims.png").write_bytes(declared(9500, 6340))
    (folder / "dog" / "huge.png").write_bytes(declared(20_000, 20_000))
    told = {Path(each.path).name: each.reason for each in check(folder).unreadable}
    assert told.keys() == {"claims.png", "huge.png"}
    assert "it is no image, or damaged" in told["claims.png"]
    assert "has far more than 64,000,000 pixels; shrink it first" in told["huge.png"]
    refused = learn(world, folder).error
    assert "2 of 13 images cannot be used" in refused
    assert "--skip-bad" in refused
    learned = learn(world, folder, "--skip-bad", "--json")
    assert learned.json["learned"]["images"] == 11
    for name in told:
        assert f"left out: {folder / 'dog' / name}" in learned.err


def test_emoji_and_newlines_in_names(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", **{"🐱": 5, "dog": 5})
    (folder / "dog" / "0.png").rename(folder / "dog" / "🐶\n[bold].png")
    shutil.copy(folder / "dog" / "1.png", folder / "dog" / "a\nb.png")
    told = call("check", folder)
    assert "🐱" in told.out
    assert f"the same: {folder}/dog/1.png = {folder}/dog/a\\nb.png" in told.out
    learned = learn(world, folder)
    assert learned.code == 0, learned.err
    answered = call("predict", tmp_path / "model", folder / "dog" / "🐶\n[bold].png", "--json").json
    assert answered[0]["path"] == str(folder / "dog" / "🐶\n[bold].png")
    shutil.copytree(folder / "dog", folder / "two\nlines")
    for refused in (call("learn", tmp_path / "model", folder).error, call("check", folder).error):
        assert "'two\\nlines' cannot be the name of a class" in refused


def test_avif_is_read(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=5, dog=5)
    picture(77).save(folder / "cat" / "new.avif", quality=100)
    assert check(folder).classes == {"cat": 6, "dog": 5}
    seen = pixels_of(folder / "cat" / "new.avif", 48, "bilinear").astype(int)
    assert np.abs(seen - np.asarray(picture(77))).mean() < 20
    assert learn(world, folder).err == ""


def test_heic_is_read(world: World, tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="HEIC needs dualprompt[heif]")
    heif.register_heif_opener()
    folder = fill(tmp_path / "photos", cat=5, dog=5)
    picture(77).save(folder / "cat" / "IMG_1.HEIC", format="HEIF", quality=95)
    assert check(folder).classes == {"cat": 6, "dog": 5}
    seen = pixels_of(folder / "cat" / "IMG_1.HEIC", 48, "bilinear").astype(int)
    assert np.abs(seen - np.asarray(picture(77))).mean() < 20
    assert learn(world, folder).err == ""


def test_heic_names_the_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    reads_heic.cache_clear()
    try:
        folder = fill(tmp_path / "photos", cat=5, dog=5)
        (folder / "cat" / "IMG_1.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40)
        [found] = check(folder).unreadable
        assert found.reason.startswith(f"{folder / 'cat' / 'IMG_1.heic'} is a HEIC image; install dualprompt[heif]")
        assert "install dualprompt[heif]" in call("check", folder).out
    finally:
        reads_heic.cache_clear()


def test_what_is_neither_is_not_taken_for_heic() -> None:
    for head in (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", b"\0\0\0\x18ftypisom\0\0\0\0isommp42", b"", b"\0\0\0\xffftyp"):
        with pytest.raises(OSError, match="cannot identify"):
            open_image(io.BytesIO(head + b"\0" * 64))


def test_wrong_labels_are_doubted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    middles = rng.normal(0, 1, (4, 20))
    labels = np.repeat(np.arange(4), 25)
    features = middles[labels] + rng.normal(0, 0.3, (100, 20))
    assert doubts(features, labels) == ([], 100.0)
    labels[[3, 40, 90]] = 3, 0, 1
    found, agreement = doubts(features, labels)
    assert {each.row: each.instead for each in found} == {3: 0, 40: 1, 90: 3}
    assert agreement == 97.0
    assert found == sorted(found, key=lambda each: -each.margin)


def test_scores_are_those_of_a_regression_without_the_image() -> None:
    from dualprompt.data import doubts as module

    rng = np.random.default_rng(1)
    features, targets = rng.normal(0, 1, (30, 5)), np.eye(3)[rng.integers(0, 3, 30)]
    scale = float(np.sqrt(((features - features.mean(axis=0)) ** 2).mean()))
    found = module._left_out_scores(features, targets)
    for ridge in module.RIDGES:
        by_hand = np.empty_like(targets)
        for row in range(30):
            others = np.arange(30) != row
            middle = features[others].mean(axis=0)
            x = (features[others] - middle) / scale
            weights = np.linalg.solve(x.T @ x + ridge * 30 * np.eye(5), x.T @ targets[others])
            by_hand[row] = targets[others].mean(axis=0) + (features[row] - middle) / scale @ weights
        if np.allclose(found, by_hand, atol=1e-8):
            return
    raise AssertionError("no ridge gives these scores")


def test_doubts_by_a_backbone(world: World, tmp_path: Path) -> None:
    """Two classes of plain colours, which any network tells apart, and one picture in the wrong folder."""
    rng = np.random.default_rng(0)
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(12):
            pixels = np.clip(rng.normal(colour, 30, (24, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{n}.png")
    (tmp_path / "photos" / "red" / "3.png").rename(tmp_path / "photos" / "blue" / "wrong.png")
    before = contents(tmp_path / "photos")
    told = call("check", tmp_path / "photos", "--doubts", "--backbone", world.weights, "--device", "cpu", "--json")
    [doubted] = told.json["doubted"]
    assert (doubted["image"], doubted["label"], doubted["instead"]) == (
        str(tmp_path / "photos" / "blue" / "wrong.png"),
        "blue",
        "red",
    )
    assert contents(tmp_path / "photos") == before


def test_folders_of_the_system_are_no_classes_and_hold_none(world: World, tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=5, dog=5)
    for place in ("__MACOSX/cat", "@eaDir", "cat/@eaDir/0.png", "$RECYCLE.BIN"):  # thumbnails of a network drive
        (folder / place).mkdir(parents=True)
        shutil.copy(folder / "dog" / "0.png", folder / place / "thumb.png")
    found = check(folder)
    assert dict(found.classes) == {"cat": 5, "dog": 5}
    left_out = {Path(each.path).relative_to(folder).as_posix() for each in found.left_out}
    assert left_out == {"__MACOSX", "@eaDir", "cat/@eaDir", "$RECYCLE.BIN"}
    assert not found.copies
    assert learn(world, folder).code == 0


def test_what_is_no_folder_of_classes_names_its_remedy(tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=3, dog=3)
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", folder)
    assert "unpack it" in call("check", archive).error
    assert "unpack it" not in call("check", tmp_path / "no.zip").error
    (folder / "cat" / "labels.csv").write_text("file,label\n")
    refused = call("check", folder / "cat").error
    assert "labels.csv" in refused
    assert "one level too deep" not in refused
