"""SIGKILL of runs and of servers, at seeded moments; nothing is lost, and a run ends as if nobody had come."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.faults.common import NEW, TESTS, Server, copied, ended, left_over, lesson, state_of, until

from dualprompt.bench.load import picture
from dualprompt.learner import ContinualLearner
from dualprompt.methods.base import METHODS

WAIT = 300  # seconds for a run


def campaign_runs(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Kill runs of every method in turn until so many died; each must end in the bits of one that nobody killed."""
    sys.path.insert(0, str(TESTS))  # for the tiny world of the tests, and lives that are forked and so start at once
    os.environ |= {"DUALPROMPT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    from sandbox import make_world  # pyright: ignore[reportMissingImports]

    (folder / "world").mkdir()
    world, rng = make_world(folder / "world"), random.Random(seed)
    methods, lives = METHODS.names(), {}
    died: Counter[str] = Counter()
    problems: list[str] = []
    turn = 0
    while died.total() < count and turn < 2 * count + len(methods):
        name = methods[turn % len(methods)]
        if name not in lives:
            lives[name] = _Lives(world, name, folder / f"runs-{turn}")
        deaths, problem = lives[name].killed(turn, min(rng.choice((1, 1, 2, 3)), count - died.total()), rng)
        died[name] += deaths
        sys.stderr.write(f"{died.total()} of {count} kills; {name}: {problem or 'the same end'}\n")
        problems += [f"{name}, life {turn}: {problem}"] if problem else []
        turn += 1
    if died.total() < count:
        problems.append(f"only {died.total()} of {count} kills hit a run that was still going on")
    return {"kills": died.total(), "lives": turn, "by_method": dict(sorted(died.items())), "problems": problems}


class _Lives:
    """The runs of one method: one that nobody kills, and others that must end as it does."""

    def __init__(self, world: Any, method: str, folder: Path) -> None:
        from sandbox import remains, start  # pyright: ignore[reportMissingImports]
        from test_methods_life import preset_and_options  # pyright: ignore[reportMissingImports]

        preset, options = preset_and_options(world, method, {})
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        self.begin, self.folder = ["run", preset, "--no-baseline", *words], folder
        folder.mkdir()
        out, began = folder / "undisturbed", time.monotonic()
        life = start(folder / "log", *self.begin, "--out", out, watch=out)
        if life.end(WAIT) != 0:
            raise RuntimeError(f"{method}: the undisturbed run failed: {life.text}")
        self.seconds, self.changes, self.remains = time.monotonic() - began, len(life.changes), remains(out)

    def killed(self, number: int, times: int, rng: random.Random) -> tuple[int, str]:
        """Live once, killed so often on the way; return how often it died, and what was wrong with its end."""
        from sandbox import remains, start  # pyright: ignore[reportMissingImports]

        out, log, deaths = self.folder / str(number), self.folder / f"{number}.log", 0
        for kill in [*range(times), None]:
            words = ["resume", out] if (out / "group.json").is_file() else [*self.begin, "--out", out]
            by_change = kill is not None and rng.randrange(2)  # right before a file changes, or at any moment
            life = start(log, *words, watch=out, at=1 + rng.randrange(self.changes) if by_change else None)
            if kill is not None and not by_change:
                life.wait(rng.uniform(0, self.seconds))
                life.process.kill()
            code = life.end(WAIT)
            deaths += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL) or (kill is None and code):
                return deaths, f"it ended with code {code}: {life.text[-300:]}"
            if code == 0:
                break
        same = remains(out) == self.remains
        shutil.rmtree(out)
        return deaths, "" if same else "it came to another end than the undisturbed run"


def campaign_server(source: Path, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Kill the server or what learns while it learns or switches; return what the next server found."""
    rng = random.Random(seed)
    probe = [picture(64, 64, n) for n in range(3)]
    old = ContinualLearner.load(source, "cpu")
    expected = [answer.to_dict() for answer in old.predict(probe)]
    tally: Counter[str] = Counter()
    problems: list[str] = []
    seconds = 6.0
    for number in range(count):
        victim = ("server", "learner")[number % 2]
        moment = ("learning", "switch")[number // 2 % 2]
        model, watched = copied(source, folder / f"kill-{number}"), folder / "watched-kills"
        with Server(model, watched) as server, server.client() as client:
            began = time.monotonic()
            job = client.post("/tasks", files=lesson(), data={"epochs": "2", "name": "new"}).json()["id"]
            mark = model / ".serve" / "jobs" / f"{job:06}" / "learned.json"
            if moment == "switch":
                until(
                    lambda mark=mark, client=client, job=job: mark.exists() or state_of(client, job)["state"] == "done"
                )
                time.sleep(rng.uniform(0, 0.03))
            else:
                time.sleep(rng.uniform(0, seconds))
            child = server.learner()
            if victim == "server":
                server.kill()
            elif child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                state = ended(client, job)["state"]
                tally[f"{moment}: learner killed, job {state}"] += 1
                check_model(model, old.classes, probe, expected, problems, number, tally)
            if moment == "learning" and number % 2 and child is not None:
                seconds = max(2.0, min(seconds, time.monotonic() - began))
        if victim == "server":
            with Server(model, watched) as server, server.client() as client:
                served = set(client.get("/model").json()["classes"])
                if served not in (set(old.classes), {*old.classes, NEW}):
                    problems.append(f"{number}: the server came back with {sorted(served)}")
                if client.post("/predict", files={"images": probe[0]}).status_code != 200:
                    problems.append(f"{number}: no answer after the restart")
                came_back = "new" if NEW in served else "old"
                state = ended(client, job)["state"]
                tally[f"{moment}: server killed, back with the {came_back} model, job {state}"] += 1
            check_model(model, old.classes, probe, expected, problems, number, tally)
        if left := left_over(model):
            problems.append(f"{number}: uploads left: {left[:3]}")
        shutil.rmtree(model)
    return {"kills": count, "outcomes": dict(sorted(tally.items())), "problems": problems}


def check_model(
    model: Path,
    known: tuple[str, ...],
    probe: list[bytes],
    expected: list[dict[str, Any]],
    problems: list[str],
    number: int,
    tally: Counter[str],
) -> None:
    """Load what is on disk as anybody would, and see whether it is the old model or the new."""
    learner = ContinualLearner.load(model, "cpu")
    if learner.classes == known:
        tally["models found: old"] += 1
        if [answer.to_dict() for answer in learner.predict(probe)] != expected:
            problems.append(f"{number}: the old model answers otherwise")
    elif learner.classes == (*known, NEW):
        tally["models found: new"] += 1
    else:
        problems.append(f"{number}: a mixture: {learner.classes}")
