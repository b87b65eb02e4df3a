"""Sections of a report beyond accuracy and forgetting: other metrics, calibration, single classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualprompt.pictures.kinds import Line, Lines
from dualprompt.report.columns import MEASURES, sheet
from dualprompt.report.page import Drawn, Item, Section, Shown, Text
from dualprompt.report.sheet import Column, Sheet
from dualprompt.report.tables import Result, by_method, over_seeds

SHOWN = ("CODA-F", "FWT", "task-known", "ECE", "AUROC", "passes", "GFLOPs", "train-passes", "train-GFLOPs")
HARDEST = 20  # classes that are listed


def sections(results: Sequence[Result]) -> list[Section]:
    """Return what there is to say; a section without items is left out by whoever asked."""
    return [
        Section("metrics", "Other metrics", _metrics(results)),
        Section("calibration", "Calibration", _calibration(results)),
        Section("classes", "Class by class", _classes(results)),
    ]


def _metrics(results: Sequence[Result]) -> list[Item]:
    columns = [each for each in MEASURES if each.name in SHOWN and any(each.of(r) is not None for r in results)]
    return [Shown(sheet(results, columns, "after the last task"))] if len(columns) > 1 else []


def _calibration(results: Sequence[Result]) -> list[Item]:
    """Return the reliability diagram: a calibrated method's line is the diagonal."""
    lines = [Line("calibrated", [0.0, 100.0], [0.0, 100.0])]
    for name, group in by_method(results).items():
        bins = [result["calibration"] for result in group if result.get("calibration")]
        if bins and len({len(each["images"]) for each in bins}) == 1:
            images, confidence, accuracy = (
                np.array([each[key] for each in bins], dtype=float) for key in ("images", "confidence", "accuracy")
            )
            total = images.sum(axis=0)
            there = total > 0
            x, y = ((images * values).sum(axis=0)[there] / total[there] for values in (confidence, accuracy))
            lines.append(Line(name, x.tolist(), y.tolist()))
    if len(lines) == 1:
        return []
    drawn = Lines("how right answers of some probability are", "probability (%)", "right (%)", lines, whole=False)
    text = (
        "All test images after the last task, in 15 bins of the probability that the method gave its answer; images of "
        "all seeds together. Below the diagonal a method is surer than it is right. Heads that are solved for give "
        "scores rather than probabilities: their softmax need not be near it."
    )
    return [Drawn("calibration", drawn), Text(text)]


def _classes(results: Sequence[Result]) -> list[Item]:
    """Return the accuracy on the classes that are hardest for all methods together."""
    groups = {
        name: [result["class_accuracy"] for result in group if result.get("class_accuracy")]
        for name, group in by_method(results).items()
    }
    groups = {name: found for name, found in groups.items() if found}
    if not groups:
        return []
    classes = list(dict.fromkeys(label for found in groups.values() for each in found for label in each))
    means = {
        label: np.mean([each[label] for found in groups.values() for each in found if label in each])
        for label in classes
    }
    hardest = sorted(classes, key=lambda label: means[label])[:HARDEST]
    rows = [
        (label, *(over_seeds([each.get(label) for each in found]) for found in groups.values())) for label in hardest
    ]
    which = f"the {HARDEST} hardest of {len(classes)} classes" if len(classes) > HARDEST else "all classes"
    columns = (Column("class", right=False), *map(Column, groups))
    remark = "hardest for all methods together; every class is in result.json and, image by image, in predictions.npz"
    return [Shown(Sheet(f"accuracy (%) on {which}", columns, (tuple(rows),), (remark,)))]
