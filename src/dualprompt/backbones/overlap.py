"""What a backbone has seen of a benchmark before it begins: said at the start, since it is part of every number."""

from __future__ import annotations

from dualprompt.backbones.known import known_as
from dualprompt.config import RunConfig
from dualprompt.data.sources import DATASETS
from dualprompt.data.stream import expanded, is_registered, names_of
from dualprompt.progress import Progress


def tell_overlaps(config: RunConfig, progress: Progress) -> None:
    """Say what overlaps, if anything does."""
    for line in overlaps(config):
        progress.note(line)


def overlaps(config: RunConfig) -> list[str]:
    """Return a line for each kind of overlap of the benchmark's classes with what the backbone was pre-trained on.

    Nothing is said of backbones and folders of whose past nobody knows.
    """
    backbone = known_as(config.backbone.name)
    if backbone is None:
        return []
    lines: dict[str, str] = {}
    for name in names_of(expanded(config.benchmark)):
        reader = DATASETS[name] if is_registered(name) else None
        if reader is None or not reader.seen:
            continue
        if backbone.labels.startswith("ImageNet"):
            past = f"was pre-trained with the labels of {backbone.labels}"
        elif reader.seen_pictures and backbone.images.startswith("ImageNet"):
            past = f"was pre-trained on pictures of {backbone.images}, without labels"
        else:
            continue
        lines.setdefault(reader.seen, f"{name} {reader.seen}; backbone '{backbone.name}' {past}")
    return list(lines.values())
