"""Models and runs from a stranger, whose records and links point at other folders. Nothing there may change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.faults.common import Server, copied, tested, until

from dualprompt.bench.load import picture


def traps(model: Path, victim: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a stranger may have put into a model's folder, each with a name."""
    serve = model / ".serve"
    jobs = serve / "jobs"

    def record(**changes: Any) -> Callable[[], object]:
        plain = {"id": 1, "name": None, "classes": ["x"], "images": 1, "state": "failed", "attempts": 9}
        text = json.dumps({"next": changes.pop("following", 2), "jobs": [plain | changes]})
        return lambda: (jobs.mkdir(parents=True), (serve / "jobs.json").write_text(text))

    def link(place: Path, target: Path) -> Callable[[], object]:
        return lambda: (place.parent.mkdir(parents=True, exist_ok=True), place.symlink_to(target))

    def lesson_of(file: str) -> Callable[[], object]:
        text = json.dumps({"name": None, "epochs": 1, "again": False, "pictures": {"x": [[file, "x"]]}})

        def put() -> None:
            record(state="queued", attempts=0)()
            (jobs / "000001" / "images").mkdir(parents=True)
            (jobs / "000001" / "lesson.json").write_text(text)

        return put

    for state in ("queued", "running", "done", "failed"):
        yield f"a {state} job that is a path", record(id=str(victim), state=state)
        yield f"a {state} job that leads outside", record(id=f"../../../{victim.name}", state=state)
    yield "a next job that is a path", record(following=str(victim))
    for place in (serve, jobs, jobs / "000001", jobs / "000001" / "images"):
        yield f"a link at {place.relative_to(model)}", link(place, victim)
    for place in (serve / "jobs.json", model / ".lock"):
        yield f"a link at {place.relative_to(model)}", link(place, victim / "letter.txt")
    yield "a pipe for a record", lambda: (serve.mkdir(), os.mkfifo(serve / "jobs.json"))
    yield "a record without end", lambda: (serve.mkdir(), (serve / "jobs.json").write_text("[" * 10**6))
    yield "a picture from outside", lesson_of(str(victim / "a.jpg"))
    yield "a picture further up", lesson_of(f"../../../../../{victim.name}/a.jpg")


def campaign_folders(source: Path, folder: Path) -> dict[str, Any]:
    """Serve models from a stranger; return what became of a folder of ours, which must be nothing."""
    rows: dict[str, str] = {}
    problems: list[str] = []
    names = [name for name, _ in traps(folder, folder)]
    for number, name in enumerate(names):
        place = folder / f"stranger-{number}"
        victim, model = place / "victim", copied(source, place / "model")
        (victim / "000001" / "images").mkdir(parents=True)
        (victim / "a.jpg").write_bytes(picture(64, 64))
        (victim / "letter.txt").write_text("mine")
        before = {path: path.is_file() and path.read_bytes() for path in victim.rglob("*")}
        dict(traps(model, victim))[name]()
        try:
            with Server(model, place / "watched") as server, server.client() as client:
                until(lambda client=client: all(j["state"] in ("done", "failed") for j in client.get("/jobs").json()))
                known = client.get("/model").json()["classes"]
            rows[name] = "served"
            if "x" in known:
                problems.append(f"{name}: it learned a picture from outside")
        except RuntimeError as refused:
            rows[name] = f"refused: {str(refused).strip().splitlines()[-1].replace(str(place), '…')}"
        if {path: path.is_file() and path.read_bytes() for path in victim.rglob("*")} != before:
            problems.append(f"{name}: the folder was changed")
    runs = tested("test_hostile_folders.py")
    return {"outcomes": rows, "runs": runs["summary"], "problems": problems + runs["problems"]}
