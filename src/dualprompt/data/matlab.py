"""Reads the arrays of a Matlab file as datasets use them."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from dualprompt.data.sources import damaged, missing


def arrays_of(dataset: str, path: Path, *names: str) -> tuple[np.ndarray, ...]:
    """Return arrays of an official Matlab file by their names."""
    # Few datasets need scipy.io, and importing it takes a while.
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if not path.is_file():
        raise missing(dataset, path)
    # What loadmat was seen to raise on truncated and altered files; NotImplementedError is for Matlab 7.3's format.
    unreadable = (MatReadError, ValueError, TypeError, LookupError, ArithmeticError, NameError)
    try:
        content = loadmat(path, variable_names=names)
    except (*unreadable, NotImplementedError, EOFError, OSError, MemoryError, zlib.error) as error:
        raise damaged(dataset, path, f"is not a readable Matlab file ({error})") from None
    for name in names:
        if not isinstance(content.get(name), np.ndarray):
            raise damaged(dataset, path, f"holds no array '{name}'")
    return tuple(content[name] for name in names)
