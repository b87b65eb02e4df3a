"""Archives of arrays (`.npz`) as NumPy writes them, from whoever: nothing in them is run, nothing larger is made."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO

import numpy as np

MOST_LETTER = 0x10FFFF  # of Unicode
# What zipfile and NumPy raise on broken archives.
BROKEN = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the headers of arrays, which are Python
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


def read_arrays(file: IO[bytes], most: int) -> dict[str, np.ndarray]:
    """Return the arrays of an archive, which may unpack to so many bytes; one of `BROKEN` says why it has none."""
    with zipfile.ZipFile(file) as archive:  # what it says it holds, before any memory is taken for it
        members = archive.infolist()
        if sum(member.file_size for member in members) > most:
            raise ValueError("it would unpack to far more than it holds")
        for member in members:
            with archive.open(member) as part:
                if _array_bytes(part) > member.file_size:
                    raise ValueError(f"'{member.filename}' says that it is larger than it is")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        found = {key: arrays[key] for key in arrays.files}
    for key, values in found.items():
        if values.dtype.kind == "U" and values.nbytes:
            letters = np.frombuffer(values.tobytes(), f"{values.dtype.str[0]}u4")
            # Python cannot make a text of others, and none of these can be written.
            if (letters > MOST_LETTER).any() or ((letters >= 0xD800) & (letters < 0xE000)).any():
                raise ValueError(f"'{key}' has letters that there are not")
    return found


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an archive of arrays; equal arrays make equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # whose date is 1980, whenever it is
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as part:
                np.lib.format.write_array(part, values, allow_pickle=False)


def _array_bytes(file: IO[bytes]) -> int:
    """Return the size of an array by its header; 0 for what is no array."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError:
        return 0
    return math.prod(shape) * dtype.itemsize
