"""Files may only grow to a limit, as on a full disk: the job says so, and the old model stays and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.faults.common import Server, copied, ended, kept_files, left_over, lesson

from dualprompt.bench.load import picture
from dualprompt.learner import ContinualLearner


def campaign_disk(source: Path, folder: Path) -> dict[str, Any]:
    """Let files grow only so far; return what the server said and whether the old model stayed."""
    rows, problems = [], []
    largest = max(len(content) for content in kept_files(source).values())
    for share in (
        0.3,
        0.6,
        0.9,
        1.0,
        1.1,
        1.5,
        4.0,
    ):  # of what the old model's largest file takes; the new one is larger
        limit = int(share * largest)
        model = copied(source, folder / f"disk-{limit}")
        before = kept_files(model)
        with Server(model, folder / "watched-disk", limit) as server, server.client() as client:
            reply = client.post("/tasks", files=lesson(side=16), data={"epochs": "1", "name": "new"})
            row = {"largest_file": limit, "upload": reply.status_code, "said": reply.json().get("error", "")}
            if reply.status_code == 202:
                job = ended(client, reply.json()["id"])
                row |= {"job": job["state"], "said": job["error"] or ""}
            if row.get("job") != "done" and kept_files(model) != before:
                problems.append(f"{limit}: the model was changed")
            if row.get("job") != "done" and not row["said"]:
                problems.append(f"{limit}: no error was said")
            if client.post("/predict", files={"images": picture(64, 64)}).status_code != 200:
                problems.append(f"{limit}: no answer afterwards")
            if not server.alive:
                problems.append(f"{limit}: the server is gone")
        ContinualLearner.load(model, "cpu")
        if left := left_over(model):
            problems.append(f"{limit}: uploads left: {left[:3]}")
        rows.append(row)
    return {"rounds": rows, "problems": problems}
