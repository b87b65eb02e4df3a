"""Models for places without this package: ONNX, on request in int8, and torch.export programs.

One graph holds all of prediction: normalisation, query, matching, the choice of an E-Prompt for each image, the
prompted pass and the classifier. It takes (batch, side, side, 3) uint8 images, in batches of any size.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dualprompt import __version__
from dualprompt.errors import DualPromptError, nearest
from dualprompt.files import atomic
from dualprompt.methods.base import METHODS
from dualprompt.model.results import trust
from dualprompt.model.saved import is_model

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    from dualprompt.learner import ContinualLearner
    from dualprompt.model.images import ImageLike

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2"}
INPUT, OUTPUTS = "images", ("logits", "probabilities", "task", "similarity")
BATCH = torch.export.Dim("batch", min=1)
METADATA = "metadata.json"  # what a torch.export program carries beside its graph
ONNX_LIMIT = 2**31 - 1  # bytes of one protocol buffer
RANDOM_IMAGES = 64

Predictor = Callable[[np.ndarray], Mapping[str, Any]]
"""(batch, side, side, 3) uint8 images to the outputs' arrays by name."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    format: str
    int8: bool
    bytes: int
    fp32_bytes: int  # the same unless int8
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Sample:
    """Images to compare predictions on."""

    images: Sequence[ImageLike]
    truth: Sequence[str] | None = None  # their labels, if known
    folder: str | None = None


@dataclass(frozen=True)
class Comparison:
    """How an exported file answers beside the model that it was made from."""

    images: int
    folder: str | None  # where the images come from; None: drawn at random
    changed: int  # images that it gives another label
    before: float | None  # percent right of the model, where the truth is known
    after: float | None  # and of the file

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    def sentence(self) -> str:
        """Say it."""
        if self.before is None or self.after is None:
            return (
                f"{self.images - self.changed} of {self.images} random images get the model's own label; "
                "for what that means for accuracy give labelled images with --check FOLDER"
            )
        return (
            f"accuracy {self.before:.2f} % before, {self.after:.2f} % after ({self.after - self.before:+.2f}) "
            f"on {self.images} images of {self.folder}; {self.changed} of them get another label than before"
        )


class _Graph(nn.Module):
    """The learner's network with the probabilities added, so that nobody needs to write a softmax."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, task, similarity = self.network(images)
        return logits, logits.softmax(dim=1), task, similarity


def export(learner: ContinualLearner, path: Path, to: str = "onnx", *, int8: bool = False) -> Exported:
    """Write a learner to one self-contained file; what was at `path` before stays until the new file is complete.

    `to` is "onnx" or "torch-export". `int8` (ONNX only) stores and multiplies weight matrices in 8 bits: smaller and
    faster, with slightly other predictions; `compare` says how many. The range of activations is then taken over the
    batch, so that an image's answer may depend a little on the others.
    """
    if to not in FORMATS:
        raise DualPromptError(f"unknown format '{to}'; {nearest(to, FORMATS)}")
    if int8 and to != "onnx":
        raise DualPromptError(f"int8 only goes with the format 'onnx', not with '{to}'")
    learner.network()  # refuses to be exported before it knows anything
    _refuse_gradients(learner)
    if path.is_dir():
        raise DualPromptError(f"{path} is a folder; give the name of a file to export to")
    if is_model(path.absolute().parent) and path.suffix not in FORMATS.values():
        raise DualPromptError(f"{path} lies among a model's own files; give a name that ends in {FORMATS[to]}")
    if to == "onnx":
        _require("onnx", "onnxscript", "onnxruntime")
    started = time.perf_counter()
    with atomic(path) as partial:
        partial.touch()  # a place that cannot be written to is refused before the work
        if to == "onnx":
            model = onnx_model(learner)
            plain = content = _bytes_of(model)
            if int8:
                content = _bytes_of(quantised(model))
        else:
            plain = content = _program_bytes(learner)
        partial.write_bytes(content)
    return Exported(str(path), to, int8, len(content), len(plain), time.perf_counter() - started)


def metadata(learner: ContinualLearner) -> dict[str, Any]:
    """Return what a file says of itself: all that is needed to prepare images and to name the outputs."""
    return {
        "labels": list(learner.classes),  # in the order of logits and probabilities
        "tasks": [{"id": t.id, "name": t.name, "classes": list(t.classes)} for t in learner.tasks],  # in `task`'s order
        "side": learner.side,
        "interpolation": learner.interpolation,  # by which images are squeezed to side × side
        "threshold": learner.threshold,  # of `trust`: what has less is none of these
        "trust": "max(similarity, 0) * max(probabilities) ** 0.5",
        "versions": {"dualprompt": __version__, "torch": torch.__version__},
    }


def program(learner: ContinualLearner) -> torch.export.ExportedProgram:
    """Return the whole of prediction as a torch.export program with a batch of any size."""
    _refuse_gradients(learner)
    graph = _Graph(copy.deepcopy(_on_cpu(learner).network())).eval()  # a copy: tracing replaces tensors for a while
    # Two images: with one, the tracer would take the batch's size for a constant.
    images = torch.zeros(2, learner.side, learner.side, 3, dtype=torch.uint8)
    with torch.no_grad(), _quiet():
        graph(images)  # what is put together at the first use is then there, and no part of the graph
        made = torch.export.export(graph, (images,), dynamic_shapes=({0: BATCH},), strict=False)
    for part in made.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # names of files and folders on this machine
    return made


def _refuse_gradients(learner: ContinualLearner) -> None:
    """Refuse a method whose prediction is more than a forward pass."""
    name = learner.info()["method"]["name"]
    if METHODS[name].predicts_with_gradients:
        raise DualPromptError(
            f"method '{name}' takes gradients to predict, which no exported file can; serve the model"
        )


def _on_cpu(learner: ContinualLearner) -> ContinualLearner:
    """Return the learner, or where it lives on a GPU one that does not and computes in fp32."""
    if learner.info()["device"] == "cpu":
        return learner
    with tempfile.TemporaryDirectory() as folder:
        return type(learner).load(learner.save(Path(folder, "model")), device="cpu")


def onnx_model(learner: ContinualLearner) -> onnx.ModelProto:
    """Return the whole of prediction as an ONNX model, with labels, tasks and threshold in its metadata."""
    with _quiet():
        made = torch.onnx.export(
            program(learner), (), dynamo=True, input_names=[INPUT], output_names=OUTPUTS, verbose=False
        )
        assert made is not None
        model = made.model_proto
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    # Where each node came from and the inferred shapes in between serve only whoever debugs the exporter.
    for thing in (model.graph, *model.graph.node):
        del thing.metadata_props[:]
    del model.graph.value_info[:]
    for key, value in metadata(learner).items():
        model.metadata_props.add(key=key, value=json.dumps(value))
    return model


def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return an ONNX model whose weight matrices are int8; activations are quantised as they come."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quiet():
        folded, small = Path(folder, "folded.onnx"), Path(folder, "int8.onnx")
        # Weights are slices and transposes of what the backbone stores. Only what is folded into a constant is seen
        # as a weight by the quantiser.
        options = _options(onnxruntime)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        onnxruntime.InferenceSession(_bytes_of(model), options, providers=["CPUExecutionProvider"])
        constant = onnx.load(folded)
        del constant.graph.value_info[:]  # the quantiser stumbles over shapes that it changes
        # 7 bits: processors without VNNI add pairs of 8 × 8 bit products in 16 bits, which would overflow.
        quantize_dynamic(constant, small, per_channel=True, reduce_range=True)
        result = onnx.load(small)
    used = {node.domain for node in result.graph.node}
    kept = [opset for opset in result.opset_import if opset.domain in used]
    del result.opset_import[:]
    result.opset_import.extend(kept)
    del result.metadata_props[:]
    result.metadata_props.extend(model.metadata_props)
    return result


def open_exported(path: Path, to: str = "onnx") -> Predictor:
    """Return a function that runs an exported file on one thread."""
    if to == "onnx":
        _require("onnxruntime")
        import onnxruntime

        session = onnxruntime.InferenceSession(path, _options(onnxruntime), providers=["CPUExecutionProvider"])
        return lambda images: dict(zip(OUTPUTS, session.run(OUTPUTS, {INPUT: images}), strict=True))
    with _quiet():
        module = torch.export.load(path).module()

    def predict(images: np.ndarray) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return dict(zip(OUTPUTS, (value.numpy() for value in module(torch.from_numpy(images))), strict=True))

    return predict


def sample(learner: ContinualLearner, folder: Path | None = None) -> Sample:
    """Return the images of a folder of class folders, or else coloured patches drawn at random."""
    learner.network()  # a model that knows nothing has nothing to compare
    if folder is None:
        patches = np.random.default_rng(0).integers(0, 256, (RANDOM_IMAGES, 4, 4, 3), dtype=np.uint8)
        return Sample(list(patches))
    from dualprompt.model.images import gather

    classes = gather(folder)
    if strange := [name for name in classes if name not in learner.classes]:
        raise DualPromptError(f"class '{strange[0]}' is not known; {nearest(strange[0], learner.classes)}")
    truth = [label for label, images in classes.items() for _ in images]
    return Sample([image for images in classes.values() for image in images], truth, str(folder))


def compare(learner: ContinualLearner, predict: Predictor, sample: Sample) -> Comparison:
    """Say how an exported file answers beside the learner that it was made from, on the same pixels.

    It is asked for one image at a time, for in int8 the answer depends a little on what else is in the batch.
    """
    before: list[str | None] = []
    after: list[str | None] = []
    for start in range(0, len(sample.images), 32):
        pixels = np.stack([learner.pixels(image) for image in sample.images[start : start + 32]])
        before += [answer.label for answer in learner.predict_pixels(pixels, top_k=1)]
        for image in pixels:
            after += decide(predict(image[None]), learner.classes, learner.threshold)
    changed = sum(a != b for a, b in zip(before, after, strict=True))
    right = None if sample.truth is None else [_percent(found, sample.truth) for found in (before, after)]
    return Comparison(len(before), sample.folder, changed, *(right or (None, None)))


def decide(outputs: Mapping[str, Any], labels: Sequence[str], threshold: float | None = None) -> list[str | None]:
    """Return the label of each image as the learner does; None, "none of these", where trust is below the threshold."""
    probabilities = outputs["probabilities"]
    sure = trust(outputs["similarity"], probabilities.max(axis=1))
    known = np.full(len(sure), True) if threshold is None else sure >= threshold
    best = probabilities.argmax(axis=1)
    return [labels[int(index)] if is_known else None for index, is_known in zip(best, known, strict=True)]


def _percent(found: Sequence[str | None], truth: Sequence[str]) -> float:
    return 100 * sum(a == b for a, b in zip(found, truth, strict=True)) / len(truth)


def _bytes_of(model: onnx.ModelProto) -> bytes:
    if model.ByteSize() > ONNX_LIMIT:
        raise DualPromptError(
            f"the model takes {model.ByteSize() / 1e9:.1f} GB and one ONNX file holds 2; use the format 'torch-export'"
        )
    return model.SerializeToString()


def _program_bytes(learner: ContinualLearner) -> bytes:
    buffer = io.BytesIO()
    made = program(learner)
    with _quiet():
        torch.export.save(made, buffer, extra_files={METADATA: json.dumps(metadata(learner))})
    return buffer.getvalue()


def _options(runtime: Any) -> onnxruntime.SessionOptions:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


def _require(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise DualPromptError(
                f"ONNX needs the package '{package}', which is not installed; pip install 'dualprompt[export]'"
            ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what exporters have to say about packages that play no part here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
