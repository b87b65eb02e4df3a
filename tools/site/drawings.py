"""The drawings of the documentation: `python -m tools.site.drawings docs/images` writes them as SVG.

Where prompts go in, how a stream of tasks comes, who does what in the training loop, and the published accuracies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.site.svg import Drawing

from dualprompt.files import write_text

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def prompts() -> Drawing:
    """Return DualPrompt at test time: one image, two passes, one E-Prompt."""
    d = Drawing(680, 404, "DualPrompt: a query finds the task's E-Prompt; prompts go into the layers of a frozen ViT")
    d.words(20, 28, "1  A pass without prompts finds the task", look="bold")
    picture(d, 20, 46)
    d.arrow([(78, 71), (108, 71)])
    d.box(110, 46, 252, 50, "frozen", "frozen ViT")
    d.arrow([(362, 71), (400, 71)])
    d.box(402, 46, 96, 50, "plain", "query q(x)")
    d.arrow([(498, 71), (536, 71)])
    for number, name in enumerate(("k₁", "k₂", "k₃")):
        d.box(538 + 42 * number, 46, 36, 50, "own", name)
    d.words(599, 116, "keys: k₂ is nearest", "middle", "small quiet")

    d.words(20, 160, "2  A pass with prompts names the class", look="bold")
    d.box(110, 176, 66, 44, "shared", "G-Prompt", small=True)
    for number, name in enumerate(("e₁", "e₂", "e₃")):
        d.box(330 + 56 * number, 176, 48, 44, "own", name)
    d.words(506, 203, "E-Prompts, one a task", look="small quiet")
    d.arrow([(598, 124), (598, 146), (410, 146), (410, 174)], "own")

    picture(d, 20, 276)
    d.arrow([(78, 301), (108, 301)])
    for layer in range(1, 13):
        d.box(110 + 33 * (layer - 1), 276, 29, 50, "frozen", str(layer), small=True)
    for layer in (1, 2):
        x = 110 + 33 * (layer - 1) + 14
        d.arrow([(x, 220), (x, 274)], "shared")
    for layer in (3, 4, 5):
        x = 110 + 33 * (layer - 1) + 14
        d.arrow([(410, 220), (410, 246), (x, 246), (x, 274)], "own")
    d.words(304, 346, "layers of the same frozen ViT", "middle", "small quiet")
    d.arrow([(502, 301), (534, 301)])
    d.box(536, 276, 56, 50, "own", "head")
    d.arrow([(592, 301), (616, 301)])
    d.words(620, 306, "class")
    legend(d, 20, 376, {"frozen": "frozen", "shared": "trained by all tasks", "own": "a task's own"})
    return d


def picture(d: Drawing, x: float, y: float) -> None:
    """Draw an image cut into patches."""
    kinds = ("good", "shared", "plain", "plain", "own", "good", "good", "good", "plain")
    for place, kind in enumerate(kinds):
        d.box(x + 18 * (place % 3), y + 17 * (place // 3), 16, 15, kind)


def legend(d: Drawing, x: float, y: float, names: dict[str, str]) -> None:
    """Say what colours mean."""
    for kind, text in names.items():
        d.box(x, y, 14, 14, kind)
        d.words(x + 21, y + 12, text, look="small")
        x += 46 + 6.4 * len(text)


def stream() -> Drawing:
    """Return three tasks, what the model keeps of each, and when it is evaluated on what."""
    d = Drawing(680, 372, "A stream: tasks come one after another, images are not kept, all tasks so far are evaluated")
    tasks = (("task 1", "cat, dog"), ("task 2", "boat, tram"), ("task 3", "oak, elm"))
    for number, (name, classes) in enumerate(tasks):
        x = 150 + 180 * number
        d.words(x, 30, name, look="bold")
        d.words(x + 52, 30, classes, look="quiet")
        for place in range(6):
            d.box(x + 22 * (place % 3), 42 + 22 * (place // 3), 18, 18, "good" if place % 2 else "plain")
        d.words(x + 74, 68, "images", look="small quiet")
        d.arrow([(x + 31, 88), (x + 31, 118)])
        d.box(x, 120, 130, 34, "own", "prompts, head rows", small=True)
        if number:
            d.arrow([(x - 48, 137), (x - 2, 137)])
    d.words(20, 68, "comes", look="small quiet")
    d.words(20, 141, "is kept", look="small quiet")
    d.words(20, 172, "Images of a task are gone when the next one begins.", look="small quiet")

    d.words(20, 212, "Accuracy after each task, on the test images of all tasks so far (%)", look="bold")
    for column in range(3):
        d.words(215 + 130 * column, 238, f"on task {column + 1}", "middle", "small quiet")
    for row in range(3):
        d.words(140, 264 + 34 * row, f"after task {row + 1}", "end", "small quiet")
        for column in range(row + 1):
            kind = "good" if row == column else "plain"
            d.box(155 + 130 * column, 246 + 34 * row, 120, 28, kind, f"S({row + 1}, {column + 1})")
    d.words(560, 292, "A: the mean of", look="small quiet")
    d.words(560, 308, "the last row", look="small quiet")
    d.words(20, 360, "F, forgetting: how far each column fell from its best.", look="small quiet")
    return d


def loop() -> Drawing:
    """Return the training loop, and which of its steps are the method's."""
    d = Drawing(680, 388, "The training loop: which steps are the method's, and which the loop's")
    d.box(20, 20, 640, 312, "plain")
    d.words(36, 44, "for each task", look="bold")
    d.box(36, 58, 150, 34, "own", "begin_task(task)")
    d.words(200, 80, "grow what must grow: prompts, a key, rows of the head", look="small quiet")
    d.box(36, 106, 608, 132, "plain")
    d.words(52, 130, "for each phase, epoch and batch", look="bold")
    for number, text in enumerate(
        ("images,\nin a view", "loss(batch)", "backward,\nclip", "optimiser's\nstep", "checkpoint,\nif it is time")
    ):
        d.box(52 + 118 * number, 146, 100, 48, "own" if number == 1 else "shared", text, small=True)
        if number:
            d.arrow([(34 + 118 * number, 170), (50 + 118 * number, 170)])
    d.words(52, 222, "the order and every random number follow from (seed, task, epoch, step)", look="small quiet")
    d.box(36, 252, 150, 34, "own", "end_task(task)")
    d.words(200, 274, "closed forms, statistics", look="small quiet")
    d.box(370, 252, 150, 34, "shared", "evaluate all so far")
    d.arrow([(340, 269), (368, 269)])
    d.box(540, 252, 104, 34, "shared", "save task")
    d.arrow([(520, 269), (538, 269)])
    d.words(644, 312, "predict(batch) is the method's: each image alone", "end", "small quiet")
    legend(d, 20, 354, {"own": "the method's, one file", "shared": "the loop's, the same for all methods"})
    return d


SHOWN = {
    "frozen-head": "frozen head",
    "l2p": "L2P",
    "dualprompt": "DualPrompt",
    "coda-prompt": "CODA-Prompt",
    "lda": "LDA",
    "ranpac": "RanPAC",
    "ranpac:first_session=prompts": "RanPAC, first session",
    "dualprompt-rp": "dualprompt-rp (ours)",
    "upper-bound (joint, same budget)": "joint training",
}


def results() -> Drawing:
    """Return A of some methods on three benchmarks, from what was published."""
    names = {"split-cifar100": "Split CIFAR-100", "5-datasets": "5-datasets (reduced)", "mini": "mini"}
    step, first = 19, 44
    block = step * len(SHOWN) + 40
    d = Drawing(680, first + block * len(names) - 14, "Average accuracy A of nine methods on three benchmarks")
    d.words(20, 26, "A after the last task (%), no old image kept but for joint training", look="small quiet")
    for number, (file, title) in enumerate(names.items()):
        top = first + block * number
        d.words(20, top + 8, title, look="bold")
        for place, (label, shown) in enumerate(SHOWN.items()):
            y = top + 18 + step * place
            mean, spread = accuracy(file, label)
            kind = "own" if label == "dualprompt-rp" else "frozen" if label.startswith("upper") else "shared"
            d.words(170, y + 12, shown, "end", "small")
            d.box(178, y + 1, 4.2 * mean, 13, kind)
            if spread:
                d.line(178 + 4.2 * (mean - spread), y + 7.5, 178 + 4.2 * (mean + spread), y + 7.5, kind)
            d.words(186 + 4.2 * mean + 4.2 * spread, y + 12, f"{mean:.1f}", look="small")
    return d


def accuracy(benchmark: str, label: str) -> tuple[float, float]:
    """Return the mean of A over the seeds of a published line, and its standard deviation; 0 for one seed."""
    files = [f"main-{benchmark}.json", *(["mini-l2p.json"] if benchmark == "mini" else [])]
    values = [json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in files]
    name = label.split(" (")[0]
    (row,) = (row for value in values for row in value["rows"] if row["label"] == name)
    found = [run["average_accuracy"] for run in row["runs"]]
    mean = sum(found) / len(found)
    spread = (sum((each - mean) ** 2 for each in found) / (len(found) - 1)) ** 0.5 if len(found) > 1 else 0.0
    return mean, spread


DRAWINGS = {"prompts": prompts, "stream": stream, "loop": loop, "results": results}


def main() -> int:
    """Write all drawings."""
    folder = Path(sys.argv[1])
    for name, draw in DRAWINGS.items():
        write_text(folder / f"drawing-{name}.svg", draw().svg())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
