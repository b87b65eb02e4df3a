"""Names and answers that strangers chose: they command no terminal, no page, no spreadsheet, and break nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from dualprompt.client import Client
from dualprompt.config import compose
from dualprompt.console import Terminal
from dualprompt.errors import DualPromptError
from dualprompt.features import MOST, Shelf
from dualprompt.model import card
from dualprompt.pictures.drawing import as_csv
from dualprompt.progress import SILENT, Advanced, Began, Ended, Loss, Note, Remarked, Work
from dualprompt.report import gallery, tables
from dualprompt.report.blocks import fill
from dualprompt.report.sheet import Column, Sheet, as_markdown, as_rich
from dualprompt.run.folder import Run
from dualprompt.run.tracking import _number
from dualprompt.texts import in_csv, in_markdown, visible
from sandbox import World, call, pictures

EVIL = "\x1b[31mevil\x1b]0;title\x07<img src=x>\u202e|[a](b)\x9b"
OLD = 1_700_000_000


def harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\u202e")


def test_a_model_of_a_stranger_says_nothing_to_a_terminal(model: Path, world: World) -> None:
    path = model / "model.json"
    text = path.read_text().replace('"ash"', json.dumps(EVIL)).replace('"first"', json.dumps(f"{EVIL} task"))
    value = json.loads(text)
    value["version"] |= {"why": EVIL, "saved": EVIL}
    value["tasks"][0]["learned"] = EVIL
    path.write_text(json.dumps(value))
    image = pictures(world, "ash", "test")[0]
    for words in (("info", model), ("predict", model, image), ("predict", model, image, "--csv"), ("versions", model)):
        found = call(*words)
        assert found.code == 0, found.err
        assert "\\x1b[31mevil" in found.out, words
        assert harmless(found.out + found.err), words
    assert call("info", model, "--json").json["tasks"][0]["classes"][0] == EVIL  # JSON has it as it is


def test_its_card_is_no_page_of_a_stranger(model: Path) -> None:
    from dualprompt.learner import ContinualLearner

    learner = ContinualLearner.load(model, "cpu")
    info = learner.info()
    info["tasks"][0] |= {"name": EVIL, "classes": [EVIL], "learned": EVIL}
    info["backbone"] |= {"licence": EVIL}
    found = card.text(info)
    assert harmless(found)
    assert "<img" not in found
    assert "[a](b)" not in found.replace("\\[a](b)", "")
    assert "&lt;img src=x>" in found


def test_tables_of_results_are_harmless() -> None:
    sheet = Sheet(EVIL, (Column(EVIL), Column("n")), (((EVIL, "< 5"),),))
    assert harmless(tables.text(as_rich(sheet)))
    line = as_markdown(sheet).splitlines()[-1]
    assert harmless(line)
    assert "<img" not in line
    assert "< 5" in line  # what is no tag stays


def test_what_is_shown_of_work_is_no_markup_and_no_command() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, force_terminal=True, width=200, color_system=None)) as terminal:
        work = Work("training", 10, "img", name=f"[/b] [red] {EVIL}", task=1, tasks=2)
        for event in (Began(work), Advanced(work, 5), Remarked(work, Loss(0.5)), Note(EVIL)):
            terminal.receive(event)
        terminal._bars.refresh()
        terminal.receive(Ended(work))
    shown = out.getvalue()
    assert "[/b] [red] \\x1b[31mevil" in shown
    assert "\x1b[31mevil" not in shown


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("\t=1+1", "'\t=1+1"),
        (" =1", "' =1"),
        ("@x", "'@x"),
        ("-a", "'-a"),
        ("+a", "'+a"),
        ("-1.5", "-1.5"),
        ("+1e-5", "+1e-5"),
        ("-", "-"),
    ],
)
def test_no_cell_of_a_csv_file_is_worked_out(text: str, cell: str) -> None:
    assert in_csv(text) == cell
    assert as_csv([{"a": text, "b": -1.0}]).splitlines()[1] == f"{cell},-1.0"


def test_a_watched_folder_writes_no_formulas(model: Path, world: World, tmp_path: Path) -> None:
    path = model / "model.json"
    path.write_text(path.read_text().replace('"ash"', '"=1+1"').replace('"birch"', '"=2+2"').replace("cedar", "=3"))
    for number in range(3):
        place = tmp_path / "inbox" / f"=cmd{number}.png"
        place.parent.mkdir(exist_ok=True)
        shutil.copy(pictures(world, "ash", "test")[number], place)
        os.utime(place, (OLD, OLD))
    done = call("watch", model, tmp_path / "inbox", "--once", "--device", "cpu", "--sort", tmp_path / "out")
    assert done.code == 0, done.err
    with (tmp_path / "out" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [f"./=cmd{number}.png" for number in range(3)]
    assert all(row["label"].startswith("'=") for row in rows)
    folders = {place.parent.name for place in (tmp_path / "out").rglob("*.png")}
    assert folders <= {"=1+1", "=2+2", "=3"}  # which no spreadsheet opens


def test_a_picture_of_a_stranger_has_no_remarks_on_the_terminal(model: Path, tmp_path: Path) -> None:
    table = b"".join(struct.pack("<HHII", 3000 + n, 1, 40_000, 8) for n in range(50))  # each claims the whole file
    exif = (b"II*\0" + struct.pack("<IH", 8, 50) + table + bytes(4)).ljust(40_008, b"\0")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png", exif=exif)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert call("predict", model, tmp_path / "a.png").code == 0
    assert [str(each.message) for each in seen if "/PIL/" in each.filename] == []


def test_answers_name_files_by_which_they_are_found(
    model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("=1+1.png", "Screenshot at 9.41.00\u202fAM.png"):  # as macOS calls them
        shutil.copy(pictures(world, "ash", "test")[0], name)
        assert f"│ {name} " in call("predict", model, name).out
        [row] = csv.DictReader(io.StringIO(call("predict", model, name, "--csv").out))
        assert row["path"] in (name, f"./{name}")
        assert Path(row["path"]).is_file()
    assert row["path"] == name


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a|b", r"a\|b"),
        (r"a\|b", r"a\\\|b"),
        (r"\[a](b)", r"\\[a](b)"),
        (r"C:\photos", r"C:\photos"),
        ("\\\\|", r"\\\\\|"),
    ],
)
def test_a_backslash_takes_no_escape_away(text: str, cell: str) -> None:
    assert in_markdown(text) == cell
    assert card._cell(r"\[a](http://b)") == r"\\\[a](http://b)"  # else it is a link


def test_letters_of_all_languages_stay_as_they_are() -> None:
    text = "Käfer\tписьмо 漢字 שלום 👩‍🌾\nnext\u3000line"
    assert visible(text) == text


def test_only_tables_of_features_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("DUALPROMPT_CACHE", str(tmp_path))
    monkeypatch.setenv(MOST, "0.00001")  # some 10,000 bytes
    theirs = tmp_path / "features" / "my thesis" / "part" / "features.safetensors"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(bytes(20_000))
    os.utime(theirs.parents[1], (OLD, OLD))
    values = torch.zeros(1500)
    Shelf("a" * 64).put(0, values)
    shelf = Shelf("b" * 64)
    shelf.put(0, values)
    assert theirs.is_file()
    assert shelf.take(0, values) is not None
    assert Shelf("a" * 64).take(0, values) is None  # which was the oldest of ours


def test_numbers_that_python_cannot_print_are_no_numbers_of_a_preset(world: World, tmp_path: Path) -> None:
    for number in ("0x" + "f" * 100_000, "1" + ":1" * 100_000, "0b" + "1" * 100_000, "9" * 5000):
        began, preset = time.monotonic(), tmp_path / "preset.yaml"
        preset.write_text(f"{world.preset.read_text()}\nseed: {number}\n")
        with pytest.raises(DualPromptError, match="more than 400 digits") as refused:
            compose(str(preset), None, {})
        assert len(str(refused.value)) < 2000
        assert time.monotonic() - began < 2, number[:5]


def test_a_manifest_whose_backbone_is_none(world: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("run", world.preset, "--out", out, "--train.epochs", 1, "--method", "simple-cil").code == 0
    run = Run(next(path.parent for path in out.rglob("manifest.json")))
    manifest = json.loads(run.manifest_path.read_text())
    gallery._stream(run, SILENT)
    for change in ({"interpolation": EVIL}, {"mean": 5}, {"input_size": -1}, {"surplus": 1, "std": None}):
        run.manifest_path.write_text(json.dumps(manifest | {"backbone": manifest["backbone"] | change}))
        with pytest.raises(DualPromptError, match="no whole backbone"):
            gallery._stream(run, SILENT)


def test_a_count_of_told_lines_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("12")
    assert _number(path) == 12
    for text in ("x", "", "9" * 5000):
        path.write_text(text)
        with pytest.raises(DualPromptError, match="holds no number"):
            _number(path)


def test_what_fills_a_page_is_no_html_and_ends_no_block(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    said = "<script>x</script>\n<!-- /published -->\nfree \x1b[2J & a < b"
    (tmp_path / "a.json").write_text(json.dumps({"said": said, "n": 1}))
    page.write_text('<!-- published a.json text "**{said}** {n}" -->\n<!-- /published -->\n')
    assert fill(page) == (1, True)
    assert fill(page) == (1, False)  # its block ends where it ended
    assert "<script" not in page.read_text()
    assert "a < b** 1" in page.read_text()
    assert harmless(page.read_text())


def test_a_page_cannot_ask_for_a_number_that_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": 1}')
    page = tmp_path / "page.md"
    page.write_text('<!-- published a.json text "{x[99999999999d]}" -->\n<!-- /published -->\n')
    with pytest.raises(DualPromptError, match="has no format"):
        fill(page)


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """Something that listens, and answers every request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as bound:

        def answer() -> None:
            while True:
                try:
                    client = bound.accept()[0]
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    client.sendall(content)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):  # who closes with something unread says so in the place of the answer
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        bound.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"[]", b'{"answers": []}', b'{"answers": 5}', b'{"answers": null}', b"9" * 5000, b"\xff", b'"x"'],
    ids=["deep", "list", "none", "number", "null", "digits", "bytes", "text"],
)
def test_a_client_is_answered_by_something_else(body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    with answering(head + body) as url:
        client = Client(url, seconds=5)
        with pytest.raises(DualPromptError, match="dualprompt server"):
            client.predict(b"image")
        with pytest.raises(DualPromptError, match="dualprompt server"):
            client.wait({"id": 1})


def test_a_client_without_an_address_or_with_a_strange_token() -> None:
    for url in ("http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[", "ftp://127.0.0.1", "http://"):
        with pytest.raises(DualPromptError, match="no address of a server"):
            Client(url)
    with pytest.raises(DualPromptError, match="printable ASCII") as refused:
        Client("http://127.0.0.1:8000", token="secret\r\nX: y")
    assert "secret" not in str(refused.value)
