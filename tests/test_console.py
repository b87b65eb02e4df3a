"""What is shown of long work: the figures beside a bar are those on record, and nothing of it is among results."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dualprompt.config import compose
from dualprompt.console import Terminal, words
from dualprompt.progress import (
    Advanced,
    Began,
    Ended,
    Event,
    Loss,
    Note,
    Pace,
    Progress,
    Remarked,
    RunBegan,
    RunEnded,
    RunUnderWay,
    TaskEvaluated,
    Work,
)
from dualprompt.run.folder import Run
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import prepare
from sandbox import World, call


@dataclass
class Shown:
    """What was told of a piece of work."""

    label: str
    work: Work
    done: float
    remarks: list[str] = field(default_factory=list)
    ended: bool = False


class Listener(Progress):
    """Takes down all that would be shown."""

    def __init__(self) -> None:
        self.bars: dict[Work, Shown] = {}
        self.notes: list[str] = []

    def receive(self, event: Event) -> None:
        match event:
            case Began(work):
                self.bars[work] = Shown(words(event), work, work.done)
            case Advanced(work, done):
                self.bars[work].done = done
            case Remarked(work, _):
                self.bars[work].remarks.append(words(event))
            case Ended(work):
                self.bars[work].ended = True
            case _:
                self.notes.append(words(event))


@pytest.fixture(scope="module")
def learned(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Listener, Path, dict[str, Any]]:
    """A run that somebody listens to."""
    config = group.plan([compose(str(world.preset), None, {})], baseline=False)[0].config
    listener = Listener()
    setup = prepare(config, listener)
    folder = tmp_path_factory.mktemp("listened") / "run"
    run = Run.create(folder, config, setup.stream, setup.weights, setup.precision)
    return listener, folder, train(setup, run, listener)


def log_of(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def test_every_bar_says_which_work_it_is_and_ends_full(learned: tuple[Listener, Path, dict[str, Any]]) -> None:
    listener, _, result = learned
    work = [bar for bar in listener.bars.values() if bar.work.unit == "img"]
    assert all(bar.done == bar.work.total and bar.ended for bar in work)
    tasks = [bar for bar in work if bar.label.startswith("task ")]
    assert [bar.label for bar in tasks] == [f"task {n + 1}/3 {name}" for n, name in enumerate(result["tasks"])]
    assert [bar.work.total for bar in tasks] == [2 * 13] * 3
    # Nine images a task, and those to come: how sure the model is of what it has not learned is measured too.
    assert [bar.work.total for bar in work if bar.label == "evaluate"] == [27, 27, 27]
    assert {bar.label for bar in work if bar not in tasks} == {"evaluate", "frozen features"}


def test_the_remark_beside_a_task_is_the_epochs_loss(learned: tuple[Listener, Path, dict[str, Any]]) -> None:
    listener, folder, _ = learned
    remarks = [remark for bar in listener.bars.values() for remark in bar.remarks]
    assert remarks == [f"loss {line['loss']:.3f}" for line in log_of(folder, "epoch")]
    assert len(remarks) == 3 * 2


def test_the_note_after_a_task_has_the_numbers_on_record(learned: tuple[Listener, Path, dict[str, Any]]) -> None:
    listener, folder, result = learned
    notes = [note for note in listener.notes if note.startswith("after task ")]
    for note, line in zip(notes, log_of(folder, "task"), strict=True):
        mean, matching = (sum(line[what]) / len(line[what]) for what in ("accuracy", "matching"))
        assert re.findall(r"[\d.]+ %", note) == [f"{value:.2f} %" for value in (mean, line["accuracy"][-1], matching)]
        assert note.startswith(f"after task {line['task']} ({line['name']}): A = ")
    assert f"A = {result['average_accuracy']:.2f} %" in notes[-1]
    assert f"matching {result['matching_accuracy']:.2f} %" in notes[-1]


WORK = Work("evaluating", 9, "img")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Began(Work("training", 9, "img", name="elm", task=2, tasks=3)), "task 2/3 elm"),
        (Began(Work("training", 9, "img", name="elm", task=2, tasks=3, phase="head")), "task 2/3 elm, head"),
        (Began(Work("reading", 9, "images")), "reading images"),
        (Began(Work("decoding", 9, "images")), "decoding images"),
        (Began(Work("downloading", 9, "B", name="a.tar")), "downloading a.tar"),
        (Began(Work("unpacking", None, "files", name="a.tar")), "unpacking a.tar"),
        (Began(Work("features", 9, "img")), "frozen features"),
        (Began(WORK), "evaluate"),
        (Began(Work("runs", 9, "runs")), "all runs"),
        (Advanced(WORK, 3), ""),
        (Ended(WORK), ""),
        (Remarked(WORK, RunUnderWay(2, 5, "er", 1, 300)), "run 2 of 5: er, seed 1"),
        (Remarked(WORK, Pace(61.7, 120)), "62 s a run"),
        (Remarked(WORK, Loss(0.1234)), "loss 0.123"),
        (RunBegan(RunUnderWay(2, 5, "er", 1, None), "out"), "[2/5] er, seed 1 → out"),
        (RunEnded(2, 5, "er-1", 71.256, Pace(10, 0)), "[2/5] er-1: A = 71.26 % (10 s a run)"),
        (RunEnded(2, 5, "er-1", "no memory", Pace(10, 0)), "[2/5] er-1: failed: no memory (10 s a run)"),
        (RunEnded(2, 5, "er", 71.256, Pace(10, 120)), "[2/5] er: A = 71.26 % (10 s a run, about 2 min left)"),
        (TaskEvaluated(2, "elm", (50.0, 100.0)), "after task 2 (elm): A = 75.00 %, newest task 100.00 %"),
        (Note("a note"), "a note"),
    ],
)
def test_every_event_has_its_words(event: Event, text: str) -> None:
    assert words(event) == text


def screen(**options: Any) -> tuple[Terminal, io.StringIO]:
    text = io.StringIO()
    return Terminal(Console(file=text, width=150, **options)), text


def test_a_terminal_shows_label_count_and_remark_while_work_lasts_and_keeps_notes() -> None:
    terminal, text = screen(force_terminal=True)
    with terminal:
        with terminal.bar(Work("training", 1300, "img", 300, "elm", task=2, tasks=3)) as bar:
            bar.advance(200)
            bar.remark(Loss(0.125))
            terminal._bars.refresh()
            seen = text.getvalue()
            terminal.note("a [bold]note[/bold] with 12 %")
        with terminal.bar(Work("downloading", 5_000_000, "B", name="fetch")) as bar:
            bar.advance(2_000_000)
            terminal._bars.refresh()
        after = len(text.getvalue())
        terminal._bars.refresh()
    for part in ("task 2/3 elm", "500/1,300 img", "loss 0.125"):
        assert part in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", seen), part
    assert "a [bold]note[/bold] with 12 %\n" in text.getvalue()
    assert "2.0 MB/5.0 MB" in text.getvalue()
    assert "task 2/3" not in text.getvalue()[after:]
    assert "fetch" not in text.getvalue()[after:]


def test_the_time_that_all_runs_will_take_is_counted_down(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, text = screen(force_terminal=True)
    now = time.monotonic()
    monkeypatch.setattr("dualprompt.console.time.monotonic", lambda: now)
    with terminal, terminal.bar(Work("runs", 3, "runs")) as bar:
        bar.remark(RunUnderWay(1, 3, "er", 0, None))
        terminal._bars.refresh()
        assert not re.findall(r"1:01:\d\d", text.getvalue())
        bar.remark(RunUnderWay(2, 3, "er", 1, 3665))
        terminal._bars.refresh()
        assert "1:01:05" in text.getvalue()
        now += 3.0
        terminal._bars.refresh()
        assert "1:01:02" in text.getvalue()
    assert "run 2 of 3: er, seed 1" in text.getvalue()


def test_before_a_task_is_learned_the_time_of_all_runs_is_guessed_from_it() -> None:
    terminal, _ = screen(force_terminal=True)
    with terminal, terminal.bar(Work("runs", 2, "runs")) as bar:
        bar.remark(RunUnderWay(1, 2, "er", 0, None))
        assert terminal._guess() is None
        with terminal.bar(Work("training", 100, "img", name="elm", task=2, tasks=5)) as images:
            assert terminal._guess() is None
            images.advance(25)
            shown = terminal._bars.tasks[-1]
            assert shown.start_time is not None
            shown.start_time -= 10  # seconds: 40 for a task
            left = terminal._guess()
    assert left == pytest.approx(30 + 3 * 40 + 5 * 40, rel=0.05)


@pytest.mark.parametrize(("options", "shown"), [({}, "a note\n"), ({"quiet": True}, "")], ids=["file", "quiet"])
def test_where_there_is_no_terminal_only_notes_are_shown(options: dict[str, bool], shown: str) -> None:
    terminal, text = screen(force_terminal=False, **options)
    with terminal, terminal.bar(Work("training", 10, "img", name="elm", task=1, tasks=3)) as bar:
        bar.advance(4)
        bar.remark(Loss(1.0))
        terminal.note("a note")
    assert text.getvalue() == shown


def test_results_and_progress_are_apart(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("run", world.preset, "--out", tmp_path / "run", "--no-baseline", "--json")
    assert done.out == json.dumps(done.json, indent=2) + "\n"
    told = [line for line in done.err.splitlines() if line.startswith("after task ")]
    means = [sum(line["accuracy"]) / len(line["accuracy"]) for line in log_of(tmp_path / "run", "task")]
    assert all(f"A = {mean:.2f} %" in line for line, mean in zip(told, means, strict=True))
    assert all(name in line for name, line in zip(done.json["tasks"], told, strict=True))
    table = call("show", tmp_path / "run")
    assert table.err == ""
    assert "after task 1 (" not in table.out
    monkeypatch.setenv("RANK", "1")  # another process speaks for all
    assert call("run", world.preset, "--out", tmp_path / "other", "--no-baseline", "--json").err == ""
