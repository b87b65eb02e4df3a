"""Models in repositories of the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dualprompt.errors import DualPromptError
from dualprompt.model import saved


def upload(folder: Path, repo_id: str, message: str, private: bool, token: str | None) -> str:
    """Upload a saved model, in place of the one that is there; return the address of the change.

    `folder` is the saved model's. The repository `repo_id` is made where there is none, `private` or not; `message` is
    that of the commit, and `token` the user's own where it is not the one that the hub's client has on record.
    """
    import huggingface_hub

    with _hub_errors(repo_id):
        huggingface_hub.create_repo(repo_id, private=private, token=token, exist_ok=True)
        done = huggingface_hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=message,
            delete_patterns="weights-*.safetensors",
            token=token,
        )
    return str(getattr(done, "commit_url", done))


def download(repo_id: str, revision: str | None, token: str | None) -> Path:
    """Return the folder of a downloaded model."""
    import huggingface_hub

    with _hub_errors(repo_id):
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, token=token, allow_patterns=[saved.MODEL, "weights-*.safetensors"]
        )
    return Path(folder)


@contextlib.contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    import huggingface_hub

    try:
        yield
    except huggingface_hub.errors.HFValidationError as error:
        remedy = "to have the model in another folder, copy its folder"
        raise DualPromptError(f"'{repo_id}' is no repository of the hub, which is USER/NAME; {remedy}") from error
    except Exception as error:  # the client's own, its transport's and its downloader's errors share no base
        reason = str(error).strip().partition("\n")[0][:200]
        raise DualPromptError(f"the hub's repository '{repo_id}': {type(error).__name__}: {reason}") from error
