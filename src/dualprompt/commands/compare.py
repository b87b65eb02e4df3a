"""`learn --compare-backbones`: which backbone suits one's own images; nothing is learned."""

from __future__ import annotations

import argparse

from dualprompt.commands.common import emit


def do_compare(options: argparse.Namespace) -> None:
    """Show how backbones do on a folder of class folders."""
    from rich.table import Table
    from rich.text import Text

    from dualprompt.console import Terminal
    from dualprompt.lessons.comparing import compare, names

    with Terminal() as terminal:
        found = compare(options.folder, names(options.compare_backbones), options.device, terminal)
    table = Table("backbone", "parameters", "pixels", "img/s here", "accuracy", "of", "95 %")
    for each in found:
        accuracy = "–" if each.accuracy is None else f"{each.accuracy:.1f} %"
        interval = "–" if each.interval is None else "{:.0f}–{:.0f}".format(*each.interval)
        made = (each.backbone, f"{each.parameters:,}", f"{each.side}", f"{each.images_per_second:.1f}")
        cells = (*made, accuracy, f"{each.held}", interval)
        table.add_row(*map(Text, cells))
    message = "each image was classified by a model of all others; nothing was learned: give --backbone to a new model"
    emit(options, {"backbones": [each.to_dict() for each in found]}, table, message)
