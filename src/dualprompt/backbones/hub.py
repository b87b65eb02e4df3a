"""Repositories of the Hugging Face hub: one commit of one, from the hub's cache or from the hub itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from dualprompt.backbones.facts import from_folder
from dualprompt.backbones.tensors import first_line
from dualprompt.errors import DualPromptError
from dualprompt.progress import Progress

FILES = ("model.safetensors", "pytorch_model.bin")  # with weights, the preferred one first


def download(repository: str, revision: str | None, progress: Progress) -> Path:
    """Return the folder of one commit of a hub repository.

    What lies complete in the hub's cache is taken from there without asking the network.
    """
    from huggingface_hub import errors

    try:
        with contextlib.suppress(errors.EntryNotFoundError):
            folder = _fetch(repository, revision, cached_only=True)
            if from_folder(folder).mean is not None:  # else another program left out the preprocessor's file
                return folder
        progress.note(f"asking the hub for backbone {repository}")
        with _quiet("huggingface_hub"):  # it reports each of its retries; the error below says it once
            return _fetch(repository, revision, cached_only=False)
    except DualPromptError:
        raise
    except Exception as error:  # the client's own, its transport's and its downloader's errors share no base
        reasons = {
            errors.LocalEntryNotFoundError: "it is not in the hub's cache and the hub cannot be reached",
            errors.GatedRepoError: "its owner wants you to ask for access first",
            errors.RepositoryNotFoundError: "the hub has no such repository, or it is private",
            errors.RevisionNotFoundError: f"it has no revision '{revision}'",
            errors.EntryNotFoundError: "it lacks a config.json or a weights file",
        }
        brief = f"{type(error).__name__}: {first_line(error)}"
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), brief)
        raise DualPromptError(
            f"backbone '{repository}' could not be fetched: {reason}; check the name and the network, or "
            f"download {FILES[0]} and config.json elsewhere and give their folder's path"
        ) from error


def is_cached(repository: str) -> bool:
    """Return whether a hub repository lies complete in the hub's cache."""
    from huggingface_hub import errors

    try:
        return from_folder(_fetch(repository, None, cached_only=True)).mean is not None
    except (DualPromptError, OSError, errors.EntryNotFoundError, errors.HFValidationError):
        return False


def _fetch(repository: str, revision: str | None, *, cached_only: bool) -> Path:
    from huggingface_hub import errors, hf_hub_download

    config = Path(hf_hub_download(repository, "config.json", revision=revision, local_files_only=cached_only))
    # The other files come from the commit that served the first one, even if the branch moves meanwhile. The
    # weights come last, so that weights in the cache mean that the rest was asked for too.
    commit = config.parent.name
    for file in ("preprocessor_config.json", *FILES):
        try:
            hf_hub_download(repository, file, revision=commit, local_files_only=cached_only)
        except errors.EntryNotFoundError:
            if file == FILES[-1]:
                raise
        else:
            if file in FILES:
                break
    return config.parent


@contextlib.contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
