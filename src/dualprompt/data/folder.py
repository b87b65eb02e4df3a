"""A folder of class folders of images, as people have them, read as a dataset."""

from __future__ import annotations

import contextlib
import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np

from dualprompt.data.formats import EXTENSIONS, below, is_archive, of_system, why_no_image
from dualprompt.data.sources import Dataset, FileSource, Split
from dualprompt.errors import DualPromptError
from dualprompt.files import with_home
from dualprompt.progress import counted

T = TypeVar("T")
TRAINING, HELD_OUT = ("train", "training"), ("test", "testing", "val", "valid", "validation")  # names of splits
ClassFiles = Mapping[str, Sequence[Path]]


def load_folder(path: Path, test_share: float) -> Dataset:
    """Return the images below `path` as a dataset whose classes are the folders' names, sorted.

    `path` holds one folder for each class (images may lie deeper in it), or `train/` and `test/` (else
    `val/`) that each do; anything beside these is ignored. Without them, `test_share` of each class, at least
    one image, becomes the test split: those whose relative paths have the lowest SHA-256, so that the choice
    is the same on every machine and hardly changes when images are added.
    """
    path = with_home(path)
    refuse_no_folder(path)
    try:
        train, test = _splits(path, test_share)
    except OSError as error:
        raise DualPromptError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    classes = tuple(sorted(train))
    return Dataset(path.resolve().name, classes, _split(train, classes), _split(test, classes))


def own_test_images(path: Path) -> Path | None:
    """Return the folder of a dataset's own test images, if there is one beside train/."""
    folders = (path / name for name in ("test", "val"))
    return next((folder for folder in folders if folder.is_dir()), None) if (path / "train").is_dir() else None


def _splits(path: Path, test_share: float) -> tuple[ClassFiles, ClassFiles]:
    train, held_out = path / "train", own_test_images(path)
    if held_out:
        train_files, test_files = class_files(train), class_files(held_out)
        if unpaired := sorted(set(train_files) ^ set(test_files)):
            raise DualPromptError(
                f"{train} and {held_out} must hold the same classes; only one of them has {named(unpaired)}"
            )
        return train_files, test_files
    files = class_files(path)
    if set(files) <= {"train", "test", "val"}:
        raise DualPromptError(f"{path} holds only {named(sorted(files))}; it needs both train/ and test/ (or val/)")
    if single := sorted(name for name, images in files.items() if len(images) == 1):
        raise DualPromptError(
            f"{path} has a single image of {named(single)}; a class needs 2, one to train and one to test"
        )
    test = {name: _test_images(images, path, test_share) for name, images in files.items()}
    train_files = {name: [image for image in files[name] if image not in test[name]] for name in files}
    return train_files, {name: [image for image in files[name] if image in test[name]] for name in files}


def refuse_no_folder(path: Path) -> None:
    """Refuse what is no folder; an archive is to be unpacked."""
    if path.is_dir():
        return
    found = "is not a folder" if path.exists() else "does not exist"
    unpacked = "unpack it, and " if path.exists() and is_archive(path) else ""
    raise DualPromptError(f"{path} {found}; {unpacked}give a folder that holds one folder of images for each class")


def refuse_splits(path: Path) -> None:
    """Refuse a folder that holds a benchmark's splits, and no class; say which of them is to be learned."""
    names = [folder.name for folder in _folders(path)]
    if not names or not set(names) <= {*TRAINING, *HELD_OUT}:
        return
    trained = next((name for name in TRAINING if name in names), None)
    first = f"give {path / trained}, with the classes" if trained else "give the folder below it, with the classes"
    others = next((f"; {path / name} is for `evaluate`" for name in HELD_OUT if trained and name in names), "")
    raise DualPromptError(f"{path} holds '{names[0]}', a split and no class; {first}{others}")


def class_files(path: Path) -> dict[str, list[Path]]:
    """Return the images of each class folder in `path`; one without images is refused."""
    folders = _folders(path)
    if not folders:
        raise _no_classes(path)
    if strange := [folder.name for folder in folders if not folder.name.isprintable()]:
        raise DualPromptError(f"{path}: {strange[0]!r} cannot be the name of a class; give it printable characters")
    files = one_name(path, ((folder.name, images_in(folder)) for folder in folders))
    if empty := sorted(name for name, images in files.items() if not images):
        known = ", ".join(sorted(EXTENSIONS))
        raise DualPromptError(
            f"{path} has class folders without images: {named(empty)}; fill or remove them (images end in {known})"
        )
    return files


def one_form(name: str) -> str:
    """Return a name in the one form (NFC) that all its spellings in Unicode have in common."""
    return unicodedata.normalize("NFC", name)


def one_name(where: object, named: Iterable[tuple[str, Sequence[T]]]) -> dict[str, list[T]]:
    """Return what has each name: names that look the same are one, and those that differ by case only are refused."""
    found: dict[str, list[T]] = {}
    for name, things in named:
        found.setdefault(one_form(name), []).extend(things)
    refuse_case(where, found)
    return found


def refuse_case(where: object, names: Iterable[str]) -> None:
    """Refuse classes whose names differ by case only: many file systems, and people, take them for one."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise DualPromptError(f"{where}: classes '{other}' and '{name}' differ by case only; rename one of them")


def images_in(folder: Path) -> list[Path]:
    """Return all images below a folder, sorted."""
    return [entry for entry in below(folder) if why_no_image(entry) is None]


def left_out(path: Path) -> dict[Path, str]:
    """Return all that lies in a folder of class folders and is not taken by `class_files`, and why."""
    found: dict[Path, str] = {}
    classes = _folders(path)
    known = set(classes)
    for entry in sorted(path.iterdir()):
        if entry not in known:
            found[entry] = why_no_image(entry) or "an image that lies in no class folder"
    for folder in classes:
        found |= {entry: reason for entry in below(folder) if (reason := why_no_image(entry))}
    return found


def refuse_level(path: Path) -> None:
    """Refuse a folder of class folders that seems to be one level too high; say which folder to give.

    It is where none of its folders holds an image itself, but several folders of them: months of classes, say.
    Folders that each hold one folder of the same name (`cat/images`, `dog/images`) are classes.
    """
    folders = _folders(path)
    images = {folder: images_in(folder) for folder in folders}
    nested = too_high(image.relative_to(path) for own in images.values() for image in own)
    if not nested or not all(images.values()):
        return
    first, below_it = folders[0], named(nested[folders[0].name])
    several = f"{len(folders)} folders of folders" if len(folders) > 1 else "one folder of folders"
    raise DualPromptError(
        f"{path} seems one level too high: it holds {several} ('{first.name}' holds {below_it}); learn {first}"
        f"{', then the others, one at a time' if len(folders) > 1 else ''}, or say with --nested (nested=True) that "
        f"{named(folder.name for folder in folders)} {'are the classes' if len(folders) > 1 else 'is the class'}"
    )


def too_high(paths: Iterable[PurePath]) -> dict[str, list[str]]:
    """Return what each folder holds, where images in folders seem to be given one level too high; else nothing.

    `paths` are the images' own, relative to what was given. See `refuse_level`.
    """
    inner: dict[str, dict[str, None]] = {}
    for path in paths:
        if len(path.parts) < 3:  # an image of that folder itself
            return {}
        inner.setdefault(path.parts[0], {})[path.parts[1]] = None
    found = {folder: sorted(own) for folder, own in inner.items()}
    alike = len(found) > 1 and len({tuple(own) for own in found.values()}) == 1
    return {} if alike and all(len(own) == 1 for own in found.values()) else found


def _folders(path: Path) -> list[Path]:
    """Return the folders that may be classes: those that are neither hidden nor the operating system's."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not _aside(entry.name))


def _aside(name: str) -> bool:
    return name.startswith(".") or of_system(name)


def _images_of(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_file() and why_no_image(entry) is None]


def _no_classes(path: Path) -> DualPromptError:
    """Return the error about a folder without class folders: it may be the folder of one class."""
    own, parent = len(_images_of(path)), path.absolute().parent
    if own and (lists := sorted(path.glob("*.csv"))):
        return DualPromptError(
            f"{path} holds {counted(own, 'image')} and {lists[0].name}, but no class folders; put the images of each "
            "class into a folder of its own, or give Python's `learn` pairs of an image's path and its label"
        )
    others = 0
    with contextlib.suppress(OSError):  # what lies beside it may be closed to us
        others = sum(bool(_images_of(folder)) for folder in _folders(parent)) if own else 0
    if others > 1:
        return DualPromptError(
            f"{path} holds no class folders but {counted(own, 'image')}: it seems one level too deep; give {parent}, "
            f"whose {others} folders are the classes"
        )
    return DualPromptError(f"{path} holds no class folders; put the images of each class into a folder of its own")


def _test_images(images: Sequence[Path], root: Path, fraction: float) -> set[Path]:
    def rank(image: Path) -> bytes:
        return hashlib.sha256(image.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest()

    count = min(max(1, round(len(images) * fraction)), len(images) - 1)
    return set(sorted(images, key=rank)[:count])


def _split(files: ClassFiles, classes: Sequence[str]) -> Split:
    labels = [label for label, name in enumerate(classes) for _ in files[name]]
    paths = tuple(image for name in classes for image in files[name])
    return Split(FileSource(paths), np.array(labels, dtype=np.int64))


def named(names: Iterable[str]) -> str:
    """Return names in quotes, of many the first ten."""
    listed = [f"'{name}'" for name in names]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")
