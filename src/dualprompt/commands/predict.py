"""`predict`: what images show, and where the model looks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualprompt.commands.common import DEVICE, Commands, emit, to_width
from dualprompt.errors import DualPromptError

if TYPE_CHECKING:
    from dualprompt.learner import Answer, ContinualLearner
    from dualprompt.model.images import ImageLike

PREDICT = """\
Images that cannot be read are named on stderr, the others are answered, and the command ends with exit code 2. With
--explain it draws one image with a heat map of where the model looks: attention rollout over all layers of a Vision
Transformer, prompts left out. It does not show why the model chose the class. In --csv, a name that a spreadsheet would
take for a formula (=, +, -, @) gets an apostrophe before it, and a path gets ./; --json has them as they are.

examples:
  dualprompt predict my-model picture.jpg
  dualprompt predict my-model picture.jpg --explain heat.png
  dualprompt predict my-model inbox/ --csv > answers.csv
  dualprompt predict my-model a.jpg b.png --top-k 3 --json
  curl https://example.org/cat.jpg | dualprompt predict my-model -
"""
STDIN = "-"


def add(commands: Commands) -> None:
    """Add this subcommand."""
    predict = commands.add("predict", do_predict, "classify images", PREDICT)
    predict.add_argument("model", type=Path, help="the model's folder")
    predict.add_argument("--device", default="auto", help=DEVICE)
    predict.add_argument("images", nargs="+", help="files, or folders of them; - is one image from stdin")
    predict.add_argument("--top-k", type=int, default=5, help="how many classes each answer has (default: %(default)s)")
    predict.add_argument("--csv", action="store_true", help="print one line an image, with commas")
    predict.add_argument("--explain", type=Path, metavar="OUT.png", help="draw what the model looks at, of one image")


def do_predict(options: argparse.Namespace) -> None:
    """Answer what images show."""
    from dataclasses import replace

    import numpy as np

    from dualprompt.learner import ContinualLearner

    if options.json and options.csv:
        raise DualPromptError("--json and --csv cannot go together; choose one")
    learner = ContinualLearner.load(options.model, options.device)
    images = wanted(options.images)
    if options.explain is not None:
        refuse_drawing(options.explain, len(images))
    answers, faults = [], []
    for start in range(0, len(images), 64):
        good, pixels = [], []
        for name, image in images[start : start + 64]:
            try:
                pixels.append(learner.pixels(image))
                good.append(name)
            except DualPromptError as error:
                faults.append(str(error))
        if good:
            found = learner.predict_pixels(np.stack(pixels), options.top_k)
            answers += [replace(answer, path=path) for answer, path in zip(found, good, strict=True)]
    if options.explain is not None and not faults:
        draw(learner, images[0][1], options.explain)
    if options.csv:
        write_csv(answers)
    elif answers or options.json:
        from dualprompt.model_tables import answers_table

        table = to_width(lambda brief: answers_table(answers, brief))
        emit(options, [answer.to_dict() for answer in answers], table)
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise DualPromptError(f"{len(faults)} of {len(images)} images: {'; '.join(faults[:5])}{more}")


def wanted(words: Sequence[str]) -> list[tuple[str, ImageLike]]:
    """Return the images that are meant, and what each is called."""
    from dualprompt.data.cache import MOST_BYTES
    from dualprompt.model.images import listed

    if list(words).count(STDIN) > 1:
        raise DualPromptError("stdin holds one image; give - once")
    found: list[tuple[str, ImageLike]] = []
    for word in words:
        if word != STDIN:
            found += [(str(image), image) for image in listed([word])[0]]
            continue
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
        if not content or len(content) > MOST_BYTES:
            what = "nothing came" if not content else f"more than {MOST_BYTES:,} bytes came"
            raise DualPromptError(f"{what} from stdin; give one image there, or its path instead of -")
        found.append((STDIN, content))
    return found


def refuse_drawing(out: Path, images: int) -> None:
    """Refuse what cannot be drawn, before anything is computed."""
    if images != 1:
        raise DualPromptError(f"--explain draws one image, found {images}; give one")
    if out.suffix.lower() != ".png":
        raise DualPromptError(f"--explain writes a PNG, found '{out.name}'; give a name that ends in .png")


def draw(learner: ContinualLearner, image: ImageLike, out: Path) -> None:
    """Write the heat map of an image."""
    from dualprompt.files import atomic
    from dualprompt.model.explain import heat_map

    drawn = heat_map(learner, image)
    with atomic(out) as partial:
        drawn.save(partial, "PNG")


def write_csv(answers: Sequence[Answer]) -> None:
    """Print one line an image."""
    import csv

    from dualprompt.texts import in_csv, path_in_csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    most = max((len(answer.top) for answer in answers), default=0)
    ranks = [f"{word}_{n + 1}" for n in range(most) for word in ("label", "probability")]
    writer.writerow(["path", "label", "probability", "task", "similarity", *ranks])
    for a in answers:
        top = [cell for score in a.top for cell in (score.label, f"{score.probability:.6f}")]
        sure = "" if a.label is None else f"{a.probability:.6f}"  # of no class that is not named beside it
        said = (a.label or "", sure, a.task or "", f"{a.similarity:.6f}", *top)
        writer.writerow([path_in_csv(a.path or ""), *map(in_csv, said)])
