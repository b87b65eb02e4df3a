"""Writes what a study leaves in its folder: table, pictures with their data, and study.json, which a report reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from dualprompt.errors import DualPromptError
from dualprompt.files import digest, write_json, write_text
from dualprompt.pictures.drawing import as_csv, save_with_data
from dualprompt.pictures.kinds import as_plain
from dualprompt.report.sheet import as_markdown, as_rich
from dualprompt.report.study_files import FILE
from dualprompt.report.tables import text
from dualprompt.run.identity import CIRCUMSTANCES, config_digest
from dualprompt.studies.study import Context, Outcome, Study
from dualprompt.sweeps.folders import free


def question(study: Study, context: Context) -> str:
    """Return the hash of all that decides what a study finds, but for images and weights."""
    budget = None if study.goes_on else context.budget
    return digest(
        [study.name, config_digest(context.config({})), context.seeds, budget, context.buffers, context.methods]
    )


def publish(study: Study, context: Context, outcome: Outcome) -> dict[str, Any]:
    """Write everything into the study's folder; return what study.json says."""
    folder, asked = context.folder, question(study, context)
    if not free(folder, FILE, asked):  # since another has come to its end while this one was carried out
        raise DualPromptError(f"{folder} now holds a study with other options; give the command again, runs are kept")
    rows = [row.plain() for row in outcome.rows]
    config = context.config({})
    value = {
        "study": study.name,
        "title": study.title,
        "paper": study.summary,
        "finding": outcome.finding,
        "verdicts": [verdict.plain() for verdict in outcome.verdicts],
        "question": asked,
        "folder": str(folder),
        "preset": context.preset,
        "benchmark": config.benchmark.name,
        "backbone": config.backbone.name,
        "recipe": config.train.recipe,
        "overrides": {key: v for key, v in context.overrides.items() if key.partition(".")[0] not in CIRCUMSTANCES},
        "seeds": context.seeds,
        "budget": context.budget,
        "chosen": outcome.chosen,
        "rows": rows,
        "tables": [asdict(sheet) for sheet in outcome.sheets],
        "pictures": {name: as_plain(picture) for name, picture in outcome.pictures.items()},
        "photos": outcome.photos,
    }
    for name, picture in outcome.pictures.items():
        save_with_data(folder, name, picture)
    tables = "\n".join(as_markdown(sheet) for sheet in outcome.sheets)
    shown = "\n\n".join(f"![{name}]({name})" for name in (*(f"{n}.svg" for n in outcome.pictures), *outcome.photos))
    write_text(folder / "table.md", f"# {study.title}\n\n{outcome.finding}\n\n{tables}\n{shown}\n")
    write_text(folder / "table.txt", text(*(as_rich(sheet) for sheet in outcome.sheets)) + f"\n{outcome.finding}\n")
    if rows:
        write_text(folder / "table.csv", as_csv([_flat(row) for row in rows]))
    write_json(folder / FILE, value)
    return value


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value if not isinstance(value, dict | list) else json.dumps(value) for key, value in row.items()}
