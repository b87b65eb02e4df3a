"""Fetching the official files: resumed where they broke off, verified, and unpacked whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any
from urllib.parse import urlsplit

from dualprompt.data.sources import DATASETS, GROUPS, Remote
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import MOST_JSON, disk_errors, parse_json, read_bytes, refuse_links, write_json
from dualprompt.progress import SILENT, Progress, Work

TIMEOUT = 30  # seconds without a byte before a server counts as unreachable
CHUNK = 1 << 18


class _MirrorError(Exception):
    """One mirror did not deliver; another may."""


def get(name: str, root: Path, progress: Progress = SILENT) -> list[Path]:
    """Bring the official files of a dataset, or of every dataset of a group, below `root`.

    What is there and right is left alone. Returns the verified files and the folders unpacked from archives.
    """
    if name not in GROUPS and name not in DATASETS:
        raise DualPromptError(f"unknown dataset '{name}'; {nearest(name, [*DATASETS.names(), *GROUPS])}")
    remotes = remotes_of(name, root)
    if not remotes:
        progress.note(f"{name} comes with the package: there is nothing to download")
    return [fetch(remote, root, progress) for remote in remotes]


def remotes_of(name: str, root: Path) -> list[Remote]:
    """Return the official files of a dataset or group, each once: domains may share an archive."""
    readers = [DATASETS[member] for member in GROUPS.get(name, (name,))]
    if by_hand := next((reader.by_hand for reader in readers if reader.by_hand), None):
        raise DualPromptError(f"{name} cannot be downloaded from here; {by_hand}, below {root}")
    return list(dict.fromkeys(remote for reader in readers for remote in reader.remotes))


def fetch(remote: Remote, root: Path, progress: Progress = SILENT) -> Path:
    """Bring one official file below `root` and return its path, or that of the folder unpacked from it."""
    target = root / remote.path
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and _sum(target, remote.checksum) == remote.checksum:
            progress.note(f"{target} is already there and right")
        else:
            _download(remote, target, progress)
    if remote.unpack is None:
        return target
    folder = target.with_name(remote.unpack)
    with disk_errors(folder):
        _unpack(target, folder, progress)
    return folder


def _download(remote: Remote, target: Path, progress: Progress) -> None:
    """Put the verified bytes of `remote` at `target`, from the first mirror that has them."""
    partial = target.with_name(target.name + ".partial")
    began = _remembered(partial).get("url")
    failures: list[str] = []
    for url in sorted(remote.urls, key=lambda url: url != began):  # first the one that can be continued
        try:
            _transfer(url, remote.size, partial, progress)
            found = _sum(partial, remote.checksum)
            if found != remote.checksum:
                _forget(partial)
                raise _MirrorError(
                    f"{url} sent a wrong {target.name}: expected {remote.checksum}, found {found} (deleted)"
                )
        except _MirrorError as failure:
            failures.append(str(failure))
            continue
        if target.exists():
            progress.note(f"{target} was not the official file; it is now {_set_aside(target)}")
        partial.replace(target)
        _forget(partial)
        return
    raise DualPromptError(f"{'; '.join(failures)}; try again later, or download {remote.urls[0]} yourself to {target}")


def _transfer(url: str, size: int | None, partial: Path, progress: Progress) -> None:
    """Append to `partial` what it lacks of `url`; start anew where that is not possible."""
    done = partial.stat().st_size if partial.is_file() else 0
    if partial.is_symlink():
        partial.unlink()  # nothing is written through a link that somebody put there
        done = 0
    memory = _remembered(partial)
    if memory.get("url") != url or (size is not None and done > size):
        done = 0  # what lies there belongs to another mirror or another file
    if done and done == size:
        return
    with _open(url, done, memory.get("validator")) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # the server ignores ranges, or its file has changed since
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            _forget(partial)
            raise _MirrorError(f"{url} did not continue at byte {done}; what had come before is deleted")
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None and length.isdigit() else None
        if None not in (total, size) and total != size:
            raise _MirrorError(f"{url} offers {total} bytes where the official file has {size}")
        with (
            partial.open("ab" if done else "wb") as out,
            progress.bar(Work("downloading", total, "B", done, partial.stem)) as bar,
        ):
            if not done:
                write_json(_memory(partial), {"url": url, "validator": _validator(response)})
            while chunk := _read(response, url, done, total):
                done += len(chunk)
                if size is not None and done > size:  # it did not say how much would come, or lied
                    raise _MirrorError(f"{url} sends more than the {size} bytes of the official file")
                out.write(chunk)
                bar.advance(len(chunk))
            out.flush()
            os.fsync(out.fileno())


def _open(url: str, start: int, validator: str | None) -> http.client.HTTPResponse:
    """Ask for `url` from byte `start` on; all of it again if it no longer matches `validator`."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise DualPromptError(f"{url} is not an http or https address")
    # Built by hand, because urllib's default opener would also follow a redirection to ftp.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    request = urllib.request.Request(url, headers={"User-Agent": "dualprompt", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        if validator:
            request.add_header("If-Range", validator)
    try:
        return opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0, None)
        raise _MirrorError(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorError(f"cannot reach {url} ({_reason(error)})") from None


def _read(response: http.client.HTTPResponse, url: str, done: int, total: int | None) -> bytes:
    """Return the next bytes, none at the end; a connection that breaks off keeps what has come."""
    reason = "closed early"
    try:
        chunk = response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        chunk, reason = b"", _reason(error)
    else:
        if chunk or total is None or done == total:
            return chunk
    of = "" if total is None else f" of {total}"
    raise DualPromptError(
        f"the connection to {url} broke after {done}{of} bytes ({reason}); "
        "run the same command again to continue from there"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _validator(response: http.client.HTTPResponse) -> str | None:
    """Return what identifies this version of a file to its server; weak tags do not identify bytes."""
    tag = response.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")


def _memory(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _remembered(partial: Path) -> dict[str, str]:
    """Return where the bytes in `partial` came from, as far as it is known."""
    memory: Any = {}
    with contextlib.suppress(OSError, ValueError):
        memory = parse_json(read_bytes(_memory(partial), MOST_JSON))
    values = memory.items() if isinstance(memory, dict) else ()
    return {key: value for key, value in values if isinstance(value, str) and value.isascii() and value.isprintable()}


def _forget(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _memory(partial).unlink(missing_ok=True)


def _sum(path: Path, like: str) -> str:
    """Return the checksum of a file, written as `like` is: "algorithm:hex"."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as handle:
        return f"{algorithm}:{hashlib.file_digest(handle, algorithm).hexdigest()}"


def _set_aside(path: Path) -> Path:
    """Rename what is in the way, so that nothing of the user's is lost, and return its new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old{number}")).exists():
        number += 1
    return path.rename(aside)


def _unpack(archive: Path, folder: Path, progress: Progress) -> None:
    """Extract the top folder of `archive` to `folder`, which appears complete or not at all."""
    try:
        if folder.is_dir() and all(
            _is_there(folder.parent / path, size) for path, size, _ in _files(archive) if path.parts[0] == folder.name
        ):
            progress.note(f"{folder} is already there and complete")
            return
        workshop = folder.with_name(f".{folder.name}.unpacking")
        shutil.rmtree(workshop, ignore_errors=True)  # left by a run that was killed
        refuse_links(workshop, itself=True)
        try:
            with progress.bar(Work("unpacking", None, "files", name=archive.name)) as bar:
                for path, _, opened in _files(archive):
                    place = workshop / path
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with opened() as content, place.open("wb") as out:
                        shutil.copyfileobj(content, out)
                    bar.advance()
            if not (workshop / folder.name).is_dir():
                raise DualPromptError(f"{archive} holds no folder {folder.name}; remove it and get it again")
            if folder.exists():
                progress.note(f"{folder} differed from {archive.name}; it is now {_set_aside(folder)}")
            (workshop / folder.name).rename(folder)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DualPromptError(f"{archive} cannot be unpacked ({_reason(error)}); remove it and get it again") from None


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _files(archive: Path) -> Iterator[tuple[PurePosixPath, int, Callable[[], IO[bytes]]]]:
    """Yield path, size and a way to open each file of an archive; refuse what could write outside its folder.

    Only plain files come out: permissions, owners, links and devices of the archive never reach the disk.
    """
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for entry in bundle.infolist():
                path = _inside(archive, entry.filename)
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise DualPromptError(f"{archive} is not safe to unpack: {entry.filename} is a link")
                if not entry.is_dir():
                    yield path, entry.file_size, functools.partial(bundle.open, entry)
        return
    with tarfile.open(archive) as bundle:
        for member in bundle:
            path = _inside(archive, member.name)
            if not (member.isreg() or member.isdir()):
                raise DualPromptError(f"{archive} is not safe to unpack: {member.name} is a link or a device")
            if member.isreg():
                yield path, member.size, functools.partial(_open_member, bundle, member)


def _open_member(bundle: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = bundle.extractfile(member)
    assert content is not None  # it is only for links and devices
    return content


def _inside(archive: Path, name: str) -> PurePosixPath:
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    if path.is_absolute() or windows.anchor or ".." in windows.parts:
        raise DualPromptError(f"{archive} is not safe to unpack: {name!r} lies outside its folder")
    return path
