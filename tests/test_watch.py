"""Watching a folder: every picture is labelled once, whatever happens; originals stay as they are."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from dualprompt.errors import DualPromptError
from dualprompt.learner import ContinualLearner
from dualprompt.watch import Watch, _folder_name
from sandbox import World, call, contents, pictures, start

OLD = 1_700_000_000  # a date long ago: such a picture is complete


@pytest.fixture
def inbox(world: World, tmp_path: Path) -> Path:
    """Five pictures, one of them deeper, and a file that is none."""
    folder = tmp_path / "inbox"
    for n, name in enumerate(("ash", "birch", "cedar", "ash", "birch")):
        place = folder / ("deep" if n == 4 else "") / f"{n}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pictures(world, name, "test")[n // 3], place)
        os.utime(place, (OLD, OLD))
    (folder / "notes.txt").write_text("-")
    return folder


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def once(model: Path, inbox: Path, *options: object) -> dict:
    done = call("watch", model, inbox, "--once", "--json", "--device", "cpu", *options)
    assert done.code == 0, done.err
    return done.json


def test_answers_are_those_of_predict(saved: Path, inbox: Path, tmp_path: Path) -> None:
    table, before = tmp_path / "out.csv", contents(inbox)
    found = once(saved, inbox, "--to", table)
    assert (found["labelled"], found["unreadable"], found["waiting"]) == (5, 0, 0)
    learner = ContinualLearner.load(saved, "cpu")
    noted = {row["path"]: row for row in rows(table)}
    assert list(noted) == ["0.png", "1.png", "2.png", "3.png", "deep/4.png"]
    for path, row in noted.items():
        answer = learner.predict(inbox / path)
        assert (row["label"], row["probability"]) == (answer.label, f"{answer.probability:.6f}")
        assert row["unsure"] == str(int(answer.probability < 0.5))
    [day] = found["days"].values()
    assert day == {"images": 5, "unsure": sum(row["unsure"] == "1" for row in noted.values())}
    assert contents(inbox) == before


def test_only_what_is_new_or_changed_is_labelled_again(saved: Path, inbox: Path, tmp_path: Path) -> None:
    table = tmp_path / "out.csv"
    once(saved, inbox, "--to", table)
    before = table.read_bytes()
    assert once(saved, inbox, "--to", table)["labelled"] == 0
    assert table.read_bytes() == before
    shutil.copy(inbox / "0.png", inbox / "new.png")
    shutil.copy(inbox / "1.png", inbox / "2.png")
    for name in ("new.png", "2.png"):
        os.utime(inbox / name, (OLD + 5, OLD + 5))
    (inbox / "0.png").unlink()
    assert once(saved, inbox, "--to", table)["labelled"] == 2
    assert [row["path"] for row in rows(table)[5:]] == ["2.png", "new.png"]
    kept = json.loads((tmp_path / ".out.csv.watch" / "state.json").read_text())
    assert "0.png" not in kept["seen"]  # of what is gone nothing is kept


def test_what_people_write_into_the_table_stays(saved: Path, inbox: Path, tmp_path: Path) -> None:
    table = tmp_path / "out.csv"
    once(saved, inbox, "--to", table)
    table.write_text("my own words")
    shutil.copy(inbox / "0.png", inbox / "new.png")
    os.utime(inbox / "new.png", (OLD, OLD))
    once(saved, inbox, "--to", table)
    first, second = table.read_text().splitlines()
    assert first == "my own words"
    assert ",new.png," in second


def test_sorted_copies_and_links(saved: Path, inbox: Path, tmp_path: Path) -> None:
    before = contents(inbox)
    once(saved, inbox, "--sort", tmp_path / "copies")
    once(saved, inbox, "--sort", tmp_path / "links", "--link")
    for kind in ("copies", "links"):
        for row in rows(tmp_path / kind / "labels.csv"):
            copy = tmp_path / kind / row["label"] / row["path"]
            assert copy.read_bytes() == (inbox / row["path"]).read_bytes()
            assert copy.samefile(inbox / row["path"]) == (kind == "links")
    assert contents(inbox) == before
    shutil.copy(inbox / "0.png", inbox / "1.png")  # another picture of a name that is taken
    os.utime(inbox / "1.png", (OLD + 5, OLD + 5))
    once(saved, inbox, "--sort", tmp_path / "copies")
    held = sorted(path.read_bytes() for path in (tmp_path / "copies").rglob("*.png"))
    assert held == sorted([*(before[name] for name in before if name.endswith(".png")), before["0.png"]])


def test_half_written_pictures_are_waited_for(saved: Path, inbox: Path, tmp_path: Path) -> None:
    whole = (inbox / "0.png").read_bytes()
    late = inbox / "late.png"
    with Watch(saved, inbox, tmp_path / "out.csv").opened("cpu") as watch:
        late.write_bytes(whole[: len(whole) // 2])
        assert (watch.look().labelled, watch.look().waiting) == (5, 1)
        late.write_bytes(whole)
        assert watch.look().waiting == 1
        until = time.monotonic() + 30
        found = watch.look()
        while found.waiting and time.monotonic() < until:
            time.sleep(0.1)
            found = watch.look(found)
    assert (found.labelled, found.unreadable, found.waiting) == (1, 0, 0)
    assert [row["problem"] for row in rows(tmp_path / "out.csv") if row["path"] == "late.png"] == [""]


def test_unreadable_pictures_are_noted_once(saved: Path, inbox: Path, tmp_path: Path) -> None:
    (inbox / "bad.jpg").write_bytes(b"no image")
    os.utime(inbox / "bad.jpg", (OLD, OLD))
    table = tmp_path / "out.csv"
    assert once(saved, inbox, "--to", table)["unreadable"] == 1
    assert once(saved, inbox, "--to", table)["unreadable"] == 0
    [bad] = [row for row in rows(table) if row["problem"]]
    assert (bad["path"], bad["label"], bad["unsure"]) == ("bad.jpg", "", "")
    assert "it is no image, or damaged" in bad["problem"]


def test_names_of_all_kinds(saved: Path, inbox: Path, tmp_path: Path) -> None:
    names = [b"\xff\xfe.png", '🐱\n,".png'.encode(), b"-rf.png"]
    for name in names:
        place = inbox / os.fsdecode(name)
        shutil.copy(inbox / "0.png", place)
        os.utime(place, (OLD, OLD))
    assert once(saved, inbox, "--sort", tmp_path / "out")["labelled"] == 8
    assert once(saved, inbox, "--sort", tmp_path / "out")["labelled"] == 0
    paths = {row["path"] for row in rows(tmp_path / "out" / "labels.csv")}
    assert {"\\udcff\\udcfe.png", '🐱\n,".png', "./-rf.png"} < paths
    assert len(list((tmp_path / "out").rglob("*.png"))) == 8


def test_a_label_cannot_lead_elsewhere(world: World, inbox: Path, tmp_path: Path) -> None:
    options = {"g_layers": [1], "e_layers": [2, 3]}
    learner = ContinualLearner(str(world.weights), "dualprompt", options=options, device="cpu")
    learner.learn({"../../up": pictures(world, "ash"), "/tmp": pictures(world, "birch")}, epochs=1)
    model = learner.save(tmp_path / "model")
    out = tmp_path / "a" / "b" / "out"
    once(model, inbox, "--sort", out)
    assert len(list(out.rglob("*.png"))) == 5
    assert {path.name for path in out.iterdir() if path.name[0] != "."} <= {"_.._up", "_tmp", "labels.csv"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_killed_watch_loses_nothing_and_doubles_nothing(saved: Path, inbox: Path, tmp_path: Path) -> None:
    """Killed before each change that it makes to the disk, then begun again."""
    (inbox / "bad.jpg").write_bytes(b"no image")
    os.utime(inbox / "bad.jpg", (OLD, OLD))
    for name in ("0.png", "1.png", "2.png"):
        (inbox / name).unlink()
    whole = tmp_path / "whole"
    words = ("watch", saved, inbox, "--once", "--device", "cpu", "--sort")
    life = start(tmp_path / "log", *words, whole, watch=whole)
    assert life.end() == 0, life.text
    expected = picture_files(whole)
    changes = len(life.changes)
    assert changes > 8
    for number in range(1, changes + 1):
        out = tmp_path / f"killed {number}"
        life = start(tmp_path / f"log {number}", *words, out, watch=out, at=number)
        assert life.end() == -signal.SIGKILL, life.text
        once(saved, inbox, "--sort", out)
        noted = [(row["path"], row["label"], bool(row["problem"])) for row in rows(out / "labels.csv")]
        assert sorted(noted) == sorted(set(noted)), number
        assert len(noted) == 3, number
        assert picture_files(out) == expected, number
        assert not list(out.rglob("*.partial")), number
        state = json.loads((out / ".labels.csv.watch" / "state.json").read_text())
        assert sum(day["images"] for day in state["days"].values()) == 2, number


def picture_files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name.endswith(".png")}


def test_a_torn_row_is_completed(saved: Path, inbox: Path, tmp_path: Path) -> None:
    """A disk that kept half of what was written: the state says what the rest is."""
    table, home = tmp_path / "out.csv", tmp_path / ".out.csv.watch"
    life = start(tmp_path / "log", "watch", saved, inbox, "--once", "--device", "cpu", "--to", table, watch=table)
    assert life.end() == 0
    whole, state = table.read_bytes(), json.loads((home / "state.json").read_text())
    pending = [
        {"path": row["path"], "mark": state["seen"][row["path"]], "row": list(row.values())} for row in rows(table)
    ]
    for torn in (0, 1, 70, len(whole) - 1, len(whole)):
        table.write_bytes(whole[:torn])
        (home / "state.json").write_text(json.dumps({**state, "seen": {}, "days": {}, "bytes": 0, "pending": pending}))
        assert once(saved, inbox, "--to", table)["labelled"] == 0
        assert table.read_bytes() == whole


def test_refusals_are_one_line(saved: Path, inbox: Path, tmp_path: Path) -> None:
    table = tmp_path / "out.csv"

    def refused(*words: object) -> str:
        return call("watch", *words, "--once").error

    assert "is not a folder" in refused(saved, tmp_path / "nowhere", "--to", table)
    assert "holds no model" in refused(tmp_path, inbox, "--to", table)
    assert "--link goes with --sort" in refused(saved, inbox, "--to", table, "--link")
    assert "--every takes seconds" in refused(saved, inbox, "--to", table, "--every", 0)
    assert "lie in each other" in refused(saved, inbox, "--sort", inbox / "sorted")
    assert "lie in each other" in refused(saved, inbox, "--sort", tmp_path)
    [picture, *_] = sorted(inbox.rglob("*.png"))
    for other in (picture, saved / "model.json"):  # nothing of theirs is appended to
        before = other.read_bytes()
        assert f"{other} is there already" in refused(saved, inbox, "--to", other)
        assert other.read_bytes() == before
    once(saved, inbox, "--to", table)
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))  # as spreadsheets save it
    assert call("watch", saved, inbox, "--to", table, "--once").code == 0
    (tmp_path / "other").mkdir()
    assert f"{table} is of the folder {inbox}" in refused(saved, tmp_path / "other", "--to", table)
    with Watch(saved, inbox, table).opened("cpu"):
        assert "written by another watch" in refused(saved, inbox, "--to", table)
    state = tmp_path / ".out.csv.watch" / "state.json"
    good = json.loads(state.read_text())
    row = ["2026-01-01", "x", "ash", "", "", "", "0", ""]
    for path in ("../secret.png", "/etc/passwd", "", "ā.png"):
        state.write_text(json.dumps({**good, "pending": [{"path": path, "mark": "1 1", "row": row}]}))
        assert f"{state} is damaged ('pending.0.path'" in refused(saved, inbox, "--to", table)


def test_a_watched_folder_that_goes_ends_the_watch(saved: Path, inbox: Path, tmp_path: Path) -> None:
    with Watch(saved, inbox, tmp_path / "out.csv").opened("cpu") as watch:
        watch.look()
        shutil.rmtree(inbox)
        with pytest.raises(DualPromptError, match="has gone; the watch ends"):
            watch.look()


def test_the_model_is_read_again_when_it_changes(world: World, model: Path, inbox: Path, tmp_path: Path) -> None:
    with Watch(model, inbox, tmp_path / "out.csv").opened("cpu") as watch:
        watch.look()
        learner = ContinualLearner.load(model, "cpu")
        for name in ("ash", "birch"):
            learner.forget(name, "class")
        learner.save(model)
        Image.open(inbox / "0.png").save(inbox / "new.png")
        os.utime(inbox / "new.png", (OLD, OLD))
        watch.look()
    assert rows(tmp_path / "out.csv")[-1]["label"] == "cedar"


def test_a_watch_is_stopped_and_goes_on(saved: Path, inbox: Path, tmp_path: Path) -> None:
    table = tmp_path / "out.csv"
    life = start(tmp_path / "log", "watch", saved, inbox, "--every", 0.1, "--device", "cpu", "--to", table)
    until = time.monotonic() + 60
    while not (table.exists() and len(rows(table)) == 5) and time.monotonic() < until:
        time.sleep(0.1)
    shutil.copy(inbox / "0.png", inbox / "new.png")
    while len(rows(table)) < 6 and time.monotonic() < until:
        time.sleep(0.1)
    assert life.process.pid is not None
    os.kill(life.process.pid, signal.SIGINT)
    assert life.end() == 130
    assert "5 pictures labelled" in life.text
    assert [row["path"] for row in rows(table)][5:] == ["new.png"]


def test_links_in_its_own_folder_are_refused(saved: Path, inbox: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.csv.watch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DualPromptError, match="is a link"), Watch(saved, inbox, tmp_path / "out.csv").opened("cpu"):
        pass


@pytest.mark.parametrize("sort", [False, True])
def test_a_table_that_is_a_link_is_refused_where_we_named_it(
    sort: bool, saved: Path, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("precious\n")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    Path("labels.csv" if sort else "answers.csv").symlink_to(tmp_path / "mine.csv")
    refused = call("watch", saved, inbox, "--once", *(("--sort", tmp_path / "out") if sort else ()))
    assert "is a link" in refused.error
    assert (tmp_path / "mine.csv").read_text() == "precious\n"
    (tmp_path / "mine.csv").write_text("")
    (tmp_path / "named.csv").symlink_to(tmp_path / "mine.csv")
    assert call("watch", saved, inbox, "--once", "--to", tmp_path / "named.csv").code == 0  # the user named it


def test_what_stands_in_the_way_of_a_copy_does_not_end_the_watch(saved: Path, inbox: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "out", next(inbox.rglob("*.png"))
    content = picture.read_bytes()
    shutil.rmtree(inbox)

    def comes(name: str) -> None:
        path = inbox / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (OLD, OLD))
        assert once(saved, inbox, "--sort", out)["labelled"] == 1
        path.unlink()

    comes("a.png")
    comes("a.png/b.png")  # now that is a folder
    [copy] = out.rglob("a.png")
    copy.unlink()
    (copy / "c").mkdir(parents=True)
    (inbox / "a.png").rmdir()
    comes("a.png")  # and here it is one
    found = [path.read_bytes() for path in out.rglob("*.png") if path.is_file()]
    assert found == [content]
    assert len(rows(out / "labels.csv")) == 3


def test_a_file_of_a_labels_name_stays_and_the_watch_goes_on(saved: Path, inbox: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    labels = [task["classes"] for task in json.loads((saved / "model.json").read_text())["tasks"]]
    for label in {label for each in labels for label in each}:
        (out / label).write_text("mine")
    found = once(saved, inbox, "--sort", out)
    assert found["labelled"] == len([path for path in out.rglob("*.png") if path.is_file()]) > 0
    assert {path.read_text() for path in out.iterdir() if path.is_file() and path.name != "labels.csv"} == {"mine"}


def test_labels_of_any_length_become_folders() -> None:
    for label in ("梨" * 100, "a" * 300, "." * 300, "💐" * 99 + ".", "ü" * 127 + ". "):
        name = _folder_name(label)
        assert 0 < len(os.fsencode(name)) <= 255
        assert name.strip(". ") == name
    assert _folder_name("梨" * 85) == "梨" * 85
