"""Classify images with a model that `dualprompt export MODEL --to onnx` wrote.

    python onnx_predict.py model.onnx photo.jpg other.png

Needs numpy, Pillow and onnxruntime, not dualprompt. Prints one line an image: path, label, probability, matched task
and similarity, with tabs between them.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def pixels(path: str, side: int, interpolation: str) -> np.ndarray:
    """Return an image as (side, side, 3) uint8, prepared as the model has learned from them."""
    with Image.open(path) as image:
        image.draft(image.mode, (2 * side, 2 * side))  # a large JPEG is decoded small, which is much faster
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:  # transparent pixels lie on white
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        resized = upright.convert("RGB").resize((side, side), Image.Resampling[interpolation.upper()])
    return np.asarray(resized)


def main() -> None:
    """Print what the model sees in each image."""
    model, *paths = sys.argv[1:]
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    images = np.stack([pixels(path, about["side"], about["interpolation"]) for path in paths])
    outputs = ["probabilities", "task", "similarity"]
    probabilities, tasks, similarities = session.run(outputs, {"images": images})
    for path, row, task, similarity in zip(paths, probabilities, tasks, similarities, strict=True):
        best = row.argmax()
        sure = about["threshold"] is None or max(similarity, 0) * row[best] ** 0.5 >= about["threshold"]
        if not sure:
            print(path, "(none of these)", "", "", f"{similarity:.4f}", sep="\t")
            continue
        label = about["labels"][best]
        # The task that the image was matched to, or another one if only that taught the label.
        owners = [each["name"] for each in (about["tasks"][task], *about["tasks"]) if label in each["classes"]]
        print(path, label, f"{row[best]:.4f}", owners[0], f"{similarity:.4f}", sep="\t")


if __name__ == "__main__":
    main()
