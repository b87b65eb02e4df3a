"""What a run is made with: versions of packages, the library of products, and the commit of the source tree."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

from dualprompt.backbones.products import by_onednn

VERSIONS = ("torch", "numpy", "pillow", "safetensors", "lightning-fabric", "scikit-learn", "matplotlib")


def versions() -> dict[str, str | None]:
    """Return the versions of what decides numbers beside our own code."""
    found = {name: _version(name) for name in VERSIONS}
    return found | {"python": platform.python_version(), "platform": platform.platform()}


def products() -> Literal["oneDNN", "PyTorch"]:
    """Return which library multiplies frozen layers in fp32 on this CPU: it decides their last digits."""
    return "oneDNN" if by_onednn() else "PyTorch"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # put on the path by hand, say on a cluster
        return None


def git_state() -> dict[str, Any] | None:
    """Return the commit of the source tree that the package runs from, if it is one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            # Without optional locks: a run must not stand in the way of whoever commits meanwhile.
            ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed_files": len(git("status", "--porcelain").splitlines()),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
