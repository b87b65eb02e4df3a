"""Where a model is learned: a folder beside it that holds checkpoints, and goes when they are of no more use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from dualprompt import files
from dualprompt.errors import DualPromptError
from dualprompt.files import LOCK, disk_errors, is_partial


@contextlib.contextmanager
def workplace(model: Path) -> Iterator[Path]:
    """Yield the folder in which a model is learned, held against all others who would learn it.

    It is removed at the end; but if that was an error, only where there is no checkpoint to go on from.
    """
    work = model.resolve().with_name(f".{model.resolve().name}.learning")
    if work.is_symlink():
        raise DualPromptError(f"{work} is a link; remove it: what is learned is kept there for a while, then deleted")
    made = [folder for folder in work.parents if not folder.exists()]  # the deepest first
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    done = False
    with files.held(work, f"{model} is being learned by another command; wait for that one, or stop it"):
        try:
            yield work
            done = True
        finally:
            if done or not _begun(work):
                shutil.rmtree(work, ignore_errors=True)
                for folder in made:
                    with contextlib.suppress(OSError):  # it holds the model, or what others have put there
                        folder.rmdir()


def _begun(work: Path) -> bool:
    """Return whether there is something to go on from."""
    return any(path.name != LOCK and path.is_file() and not is_partial(path) for path in work.rglob("*"))
