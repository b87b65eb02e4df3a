"""The downloader against a real HTTP server on this machine: resumed, verified, and unpacked safely."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import socket
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualprompt.data import download
from dualprompt.data.download import fetch, get
from dualprompt.data.sources import DATASETS, Remote
from dualprompt.errors import DualPromptError
from dualprompt.progress import Advanced, Began, Event, Note, Progress

CONTENT = bytes(range(256)) * 4000


@dataclass
class Site:
    """What the server serves, how it misbehaves, and what it was asked."""

    base: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tag: str | None = '"v1"'
    ranges: bool = True  # False: answers a range request with the whole file
    skewed: bool = False  # True: answers a range request with another range
    redirect: str | None = None
    announce_length: bool = True
    cut_at: int | None = None  # close the connection after this many bytes of the body
    requests: list[Message] = field(default_factory=list)

    def remote(self, path: str, unpack: str | None = None, size: int | None = None) -> Remote:
        digest = hashlib.sha256(self.files[path]).hexdigest()
        return Remote((f"{self.base}/{path}",), path, f"sha256:{digest}", size, unpack)


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self):
        site = self.site
        site.requests.append(self.headers)
        content = site.files.get(self.path.lstrip("/"))
        if site.redirect:
            self.send_response(302)
            self.send_header("Location", site.redirect)
            self.end_headers()
            return
        if content is None:
            self.send_error(404)
            return
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range") in (None, site.tag)
        if wanted and site.ranges and same:
            start = int(wanted[1]) + site.skewed
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if site.tag:
            self.send_header("ETag", site.tag)
        if site.announce_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content) if site.cut_at is None else start + site.cut_at
        with suppress(ConnectionError):  # a client may hang up early
            self.wfile.write(content[start:stop])

    def log_message(self, format: str, *args):
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with serve() as running:
        yield running


@contextmanager
def serve() -> Iterator[Site]:
    site = Site(files={"file.bin": CONTENT})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"site": site}))
    site.base = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Watcher(Progress):
    """A listener that adds up what it is told."""

    notes: list[str] = field(default_factory=list)
    bars: list[tuple[str, float | None, float]] = field(default_factory=list)
    advanced: float = 0
    _before: float = 0

    def receive(self, event: Event) -> None:
        match event:
            case Began(work):
                self.bars.append((work.unit, work.total, work.done))
                self._before = work.done
            case Advanced(_, done):
                self.advanced += done - self._before
                self._before = done
            case Note(text):
                self.notes.append(text)
            case _:
                pass


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(remote: Remote, root: Path) -> str:
    with pytest.raises(DualPromptError) as caught:
        fetch(remote, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("announce_length", [True, False])
def test_downloads_and_leaves_nothing_else(tmp_path: Path, site: Site, announce_length: bool):
    site.announce_length = announce_length
    watcher = Watcher()
    path = fetch(site.remote("file.bin"), tmp_path / "data", watcher)
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["file.bin"]
    assert watcher.bars == [("B", len(CONTENT) if announce_length else None, 0)]
    assert watcher.advanced == len(CONTENT)


def test_what_is_there_and_right_is_not_asked_for(tmp_path: Path, site: Site):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    fetch(site.remote("file.bin"), tmp_path)
    assert site.requests == []


def test_a_file_of_the_user_is_kept_under_another_name(tmp_path: Path, site: Site):
    (tmp_path / "file.bin").write_bytes(b"mine")
    watcher = Watcher()
    fetch(site.remote("file.bin"), tmp_path, watcher)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert (tmp_path / "file.bin.old1").read_bytes() == b"mine"
    assert any("file.bin.old1" in note for note in watcher.notes)


@pytest.mark.parametrize("tag", ['"v1"', None])
def test_resumes_after_a_cut(tmp_path: Path, site: Site, tag: str | None):
    site.tag = tag
    site.cut_at = 300_000
    message = refusal(site.remote("file.bin"), tmp_path)
    assert f"300000 of {len(CONTENT)} bytes" in message
    assert "run the same command again" in message
    assert not (tmp_path / "file.bin").exists()

    site.cut_at = None
    watcher = Watcher()
    path = fetch(site.remote("file.bin"), tmp_path, watcher)
    assert path.read_bytes() == CONTENT
    assert site.requests[1]["Range"] == "bytes=300000-"
    assert site.requests[1]["If-Range"] == tag
    assert watcher.bars == [("B", len(CONTENT), 300_000)]
    assert watcher.advanced == len(CONTENT) - 300_000
    assert names(tmp_path) == ["file.bin"]


@pytest.mark.parametrize("change", ["ranges", "version"])
def test_starts_anew_when_the_server_cannot_continue(tmp_path: Path, site: Site, change: str):
    site.cut_at = 300_000
    refusal(site.remote("file.bin"), tmp_path)
    site.cut_at = None
    if change == "ranges":
        site.ranges = False
    else:
        site.tag, site.files["file.bin"] = '"v2"', CONTENT[::-1]
    path = fetch(site.remote("file.bin"), tmp_path)
    assert "Range" in site.requests[1]
    assert path.read_bytes() == site.files["file.bin"]


def test_a_partial_file_beyond_the_end_starts_anew(tmp_path: Path, site: Site):
    site.cut_at = 300_000
    refusal(site.remote("file.bin"), tmp_path)
    site.cut_at = None
    (tmp_path / "file.bin.partial").write_bytes(CONTENT * 2)
    assert fetch(site.remote("file.bin"), tmp_path).read_bytes() == CONTENT


def test_a_finished_but_unrenamed_download_is_not_asked_for_again(tmp_path: Path, site: Site):
    site.cut_at = 300_000
    refusal(site.remote("file.bin"), tmp_path)
    (tmp_path / "file.bin.partial").write_bytes(CONTENT)
    assert fetch(site.remote("file.bin", size=len(CONTENT)), tmp_path).read_bytes() == CONTENT
    assert len(site.requests) == 1


def test_a_wrong_range_is_not_spliced(tmp_path: Path, site: Site):
    site.cut_at = 300_000
    refusal(site.remote("file.bin"), tmp_path)
    site.cut_at, site.skewed = None, True
    assert "did not continue at byte 300000" in refusal(site.remote("file.bin"), tmp_path)
    assert names(tmp_path) == []
    assert fetch(site.remote("file.bin"), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("validator", [5, ["x"], '"v1"\r\nX-Evil: 1', {"a": 1}, "\u00e9"])
def test_what_is_remembered_of_a_download_may_be_anything(tmp_path: Path, site: Site, validator: object):
    site.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.partial").write_bytes(CONTENT[:1000])
    remembered = {"url": f"{site.base}/a.bin", "validator": validator}
    (tmp_path / "a.bin.partial.json").write_text(json.dumps(remembered))
    assert fetch(site.remote("a.bin"), tmp_path).read_bytes() == CONTENT
    assert all("X-Evil" not in asked for asked in site.requests)


def test_nothing_is_written_through_a_link(tmp_path: Path, site: Site):
    site.files["a.bin"] = CONTENT
    letter = tmp_path / "letter.txt"
    letter.write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin.partial").symlink_to(letter)
    assert fetch(site.remote("a.bin"), tmp_path / "data").read_bytes() == CONTENT
    assert letter.read_text() == "mine"


def test_wrong_checksum_deletes_the_file_and_names_both_sums(tmp_path: Path, site: Site):
    remote = site.remote("file.bin")
    site.files["file.bin"] = b"something else"
    message = refusal(remote, tmp_path)
    assert "file.bin" in message
    assert remote.checksum in message
    assert hashlib.sha256(b"something else").hexdigest() in message
    assert names(tmp_path) == []


def test_wrong_size_is_refused_before_the_transfer(tmp_path: Path, site: Site):
    remote = site.remote("file.bin", size=17)
    assert f"{len(CONTENT)} bytes where the official file has 17" in refusal(remote, tmp_path)
    assert names(tmp_path) == []


def test_no_more_is_written_than_the_official_file_has(tmp_path: Path, site: Site):
    site.announce_length = False
    remote = site.remote("file.bin", size=1000)
    site.files["file.bin"] = bytes(10_000_000)  # it could go on for ever
    assert "sends more than the 1000 bytes" in refusal(remote, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix == ".partial") <= 1000


def test_md5_sums_are_checked_too(tmp_path: Path, site: Site):
    good, bad = (f"md5:{hashlib.md5(content).hexdigest()}" for content in (CONTENT, b""))
    urls = (f"{site.base}/file.bin",)
    assert bad in refusal(Remote(urls, "file.bin", bad), tmp_path)
    assert fetch(Remote(urls, "file.bin", good), tmp_path).read_bytes() == CONTENT


def test_404_names_the_address_and_the_way_out(tmp_path: Path, site: Site):
    remote = Remote((f"{site.base}/gone.bin",), "gone.bin", "sha256:00")
    message = refusal(remote, tmp_path)
    assert f"{site.base}/gone.bin answered 404" in message
    assert f"download {site.base}/gone.bin yourself to {tmp_path / 'gone.bin'}" in message


def test_the_next_mirror_is_tried(tmp_path: Path, site: Site):
    remote = site.remote("file.bin")
    mirrored = Remote((f"{site.base}/gone.bin", *remote.urls), remote.path, remote.checksum)
    assert fetch(mirrored, tmp_path).read_bytes() == CONTENT


def test_the_mirror_that_broke_off_is_continued_first(tmp_path: Path, site: Site):
    remote = site.remote("file.bin")
    gone_then_cut = Remote((f"{site.base}/twin.bin", *remote.urls), remote.path, remote.checksum)
    site.cut_at = 300_000
    refusal(gone_then_cut, tmp_path)
    site.cut_at, site.files["twin.bin"] = None, CONTENT
    fetch(gone_then_cut, tmp_path)
    assert site.requests[-1]["Range"] == "bytes=300000-"


def test_no_network_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file.bin"
        message = refusal(Remote((url,), "file.bin", "sha256:00"), tmp_path)
    assert message.startswith(f"cannot reach {url} (Connection refused)")
    assert f"download {url} yourself to {tmp_path / 'file.bin'}" in message


def test_a_silent_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin"
        assert "timed out" in refusal(Remote((url,), "file.bin", "sha256:00"), tmp_path)


@pytest.mark.parametrize("scheme", ["file", "ftp", "data"])
def test_other_schemes_are_refused_directly_and_by_redirection(tmp_path: Path, site: Site, scheme: str):
    secret = tmp_path / "secret"
    secret.write_text("x")
    url = f"{scheme}://{secret}"
    root = tmp_path / "root"
    assert "not an http or https address" in refusal(Remote((url,), "secret", "sha256:00"), root)
    site.redirect = url
    refusal(Remote((f"{site.base}/file.bin",), "secret", "sha256:00"), root)
    assert names(root) == []


def test_redirections_keep_the_range(tmp_path: Path, site: Site):
    remote = site.remote("file.bin")
    with serve() as front:
        front.redirect = remote.urls[0]
        through = Remote((f"{front.base}/file.bin",), remote.path, remote.checksum)
        site.cut_at = 300_000
        refusal(through, tmp_path)
        site.cut_at = None
        assert fetch(through, tmp_path).read_bytes() == CONTENT
    assert site.requests[1]["Range"] == "bytes=300000-"


def test_an_unwritable_place_is_named(tmp_path: Path, site: Site):
    (tmp_path / "root").write_text("a file where the folder should be")
    with pytest.raises(DualPromptError, match=r"root.*cannot be written"):
        fetch(site.remote("file.bin"), tmp_path / "root" / "below")


def test_a_full_disk_is_named(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full" in refusal(site.remote("file.bin"), tmp_path)


def tar(entries: Sequence[tuple[str, bytes | tarfile.TarInfo]], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as bundle:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in entries:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                bundle.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                info.mode = 0o4777
                bundle.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def zipped(entries: list[tuple[str, bytes]], mode: int = stat.S_IFREG | 0o644) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            bundle.writestr(info, content)
    return buffer.getvalue()


GOOD = [("set/a.txt", b"one"), ("set/deep/b.txt", b"two")]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("set.tar.gz", tar([("set", special(tarfile.DIRTYPE)), *GOOD])),
        ("set.tar", tar([("./" + name, content) for name, content in [*GOOD, ("stray", b"")]], mode="w")),
        ("set.zip", zipped([("set/", b""), *GOOD])),
    ],
    ids=["gzip", "tar", "zip"],  # contents differ from process to process, by the time that gzip notes
)
def test_archives_are_unpacked_beside_themselves(tmp_path: Path, site: Site, file: str, content: bytes):
    site.files[file] = content
    remote = site.remote(file, unpack="set")
    watcher = Watcher()
    assert fetch(remote, tmp_path, watcher) == tmp_path / "set"
    assert (tmp_path / "set" / "a.txt").read_bytes() == b"one"
    assert (tmp_path / "set" / "deep" / "b.txt").read_bytes() == b"two"
    assert names(tmp_path) == ["set", file]
    assert not (tmp_path / "set" / "a.txt").stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)
    assert watcher.bars[-1] == ("files", None, 0)

    before = (tmp_path / "set").stat().st_mtime_ns
    fetch(remote, tmp_path, watcher)
    assert (tmp_path / "set").stat().st_mtime_ns == before
    assert len(site.requests) == 1


def test_a_damaged_folder_is_replaced_and_kept(tmp_path: Path, site: Site):
    site.files["set.tar.gz"] = tar(GOOD)
    remote = site.remote("set.tar.gz", unpack="set")
    fetch(remote, tmp_path)
    (tmp_path / "set" / "a.txt").write_bytes(b"o")
    watcher = Watcher()
    fetch(remote, tmp_path, watcher)
    assert (tmp_path / "set" / "a.txt").read_bytes() == b"one"
    assert (tmp_path / "set.old1" / "a.txt").read_bytes() == b"o"
    assert any("set.old1" in note for note in watcher.notes)


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path, site: Site):
    site.files["set.tar.gz"] = tar(GOOD)
    (tmp_path / ".set.unpacking" / "set").mkdir(parents=True)
    (tmp_path / ".set.unpacking" / "set" / "half.txt").touch()
    fetch(site.remote("set.tar.gz", unpack="set"), tmp_path)
    assert names(tmp_path / "set") == ["a.txt", "deep"]
    assert names(tmp_path) == ["set", "set.tar.gz"]


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "absolute.tar": lambda evil: tar([*GOOD, (str(evil), b"!")]),
    "climbing.tar": lambda evil: tar([*GOOD, ("set/../../evil", b"!")]),
    "symlink.tar": lambda evil: tar([*GOOD, ("set/out", special(tarfile.SYMTYPE, "..")), ("set/out/evil", b"!")]),
    "absolute-link.tar": lambda evil: tar([*GOOD, ("set/out", special(tarfile.SYMTYPE, "/etc/passwd"))]),
    "hardlink.tar": lambda evil: tar([*GOOD, ("set/out", special(tarfile.LNKTYPE, "../secret"))]),
    "fifo.tar": lambda evil: tar([*GOOD, ("set/pipe", special(tarfile.FIFOTYPE))]),
    "device.tar": lambda evil: tar([*GOOD, ("set/null", special(tarfile.CHRTYPE))]),
    "windows.tar": lambda evil: tar([*GOOD, ("C:\\evil", b"!"), ("..\\evil", b"!")]),
    "absolute.zip": lambda evil: zipped([*GOOD, (str(evil), b"!")]),
    "climbing.zip": lambda evil: zipped([*GOOD, ("set/../../evil", b"!")]),
    "symlink.zip": lambda evil: zipped([("set/out", b"..")], mode=stat.S_IFLNK | 0o777),
}


@pytest.mark.parametrize("file", HOSTILE)
def test_hostile_archives_write_nothing(tmp_path: Path, site: Site, file: str):
    evil = tmp_path / "evil"
    site.files[file] = HOSTILE[file](evil)
    root = tmp_path / "below" / "root"
    message = refusal(site.remote(file, unpack="set"), root)
    assert f"{root / file} is not safe to unpack" in message
    assert names(root) == [file]
    assert names(tmp_path) == ["below"]
    assert names(tmp_path / "below") == ["root"]


@given(st.lists(st.sampled_from(["..", ".", "", "a", "set", "/", "\\..", "C:"]), min_size=1, max_size=6))
def test_accepted_names_stay_inside(parts: list[str]):
    name = "/".join(parts)
    try:
        inside = download._inside(Path("x.tar"), name)
    except DualPromptError:
        return
    assert os.path.normpath(f"/root/{inside}").startswith("/root")
    assert ".." not in inside.parts


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("cut.tar.gz", tar([("set/a", os.urandom(50_000))])[:20_000], "cannot be unpacked"),
        ("text.tar", b"this is no archive at all", "cannot be unpacked"),
        ("other.tar", tar([("elsewhere/a", b"1")]), "holds no folder set"),
    ],
    ids=["cut", "text", "other"],
)
def test_broken_archives_leave_no_folder(tmp_path: Path, site: Site, file: str, content: bytes, found: str):
    site.files[file] = content
    message = refusal(site.remote(file, unpack="set"), tmp_path)
    assert str(tmp_path / file) in message
    assert found in message
    assert names(tmp_path) == [file]


def test_get_brings_every_file_of_a_group(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch):
    for number, name in enumerate(("cifar10", "mnist", "svhn", "notmnist", "fashion-mnist")):
        site.files[f"{number}.bin"] = bytes([number])
        monkeypatch.setattr(DATASETS[name], "remotes", (site.remote(f"{number}.bin"),))
    assert get("5-datasets", tmp_path) == [tmp_path / f"{number}.bin" for number in range(5)]
    assert get("svhn", tmp_path) == [tmp_path / "2.bin"]
    assert len(site.requests) == 5


def test_get_names_the_nearest_dataset_or_group(tmp_path: Path):
    with pytest.raises(DualPromptError, match="did you mean '5-datasets'"):
        get("5-dataset", tmp_path)
    with pytest.raises(DualPromptError, match="did you mean 'cifar100'"):
        get("cifar-100", tmp_path)


def test_get_says_when_there_is_nothing_to_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DATASETS["mnist"], "remotes", ())
    watcher = Watcher()
    assert get("mnist", tmp_path, watcher) == []
    assert "nothing to download" in watcher.notes[0]
