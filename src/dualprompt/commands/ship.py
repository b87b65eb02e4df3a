"""`export` and `serve`: a model for others to use."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from dualprompt.commands.common import BACKBONE, DEVICE, Commands, Parser, emit
from dualprompt.errors import DualPromptError
from dualprompt.progress import counted

EXPORT_EXAMPLES = """\
The file holds everything between uint8 images (batch, side, side, 3) and the outputs logits, probabilities, task and
similarity; labels, tasks and side are in its metadata. examples/onnx_predict.py shows how to use it without dualprompt.
In int8 the range of activations is taken over the batch, so that an image's answer may depend a little on the others;
--check asks for one image at a time.

examples:
  dualprompt export my-model --to onnx
  dualprompt export my-model --to onnx --int8 --check photos/test
  dualprompt export my-model --to torch-export --out model.pt2
"""

SERVE_EXAMPLES = """\
The server answers this machine only. Teaching and forgetting need the token that it prints; the page takes it from its
address. To let other machines in, bind another address and set a token, which every request must then carry. Uploaded
images are deleted once they are learned or refused.

examples:
  dualprompt serve my-model
  dualprompt serve new-model --open
  dualprompt serve my-model --engine onnx --int8 --check photos/test
  curl -F images=@cat.jpg http://127.0.0.1:8000/predict
  curl -F archive=@classes.zip -H "Authorization: Bearer TOKEN" http://127.0.0.1:8000/tasks
  DUALPROMPT_TOKEN=$(openssl rand -hex 16) dualprompt serve my-model --host 0.0.0.0
"""


def add(commands: Commands) -> None:
    """Add these subcommands."""
    about = "export a model to one file for ONNX Runtime or PyTorch"
    add_export(commands.add("export", do_export, about, EXPORT_EXAMPLES))
    about = "serve a model: a web page and an HTTP API"
    add_serve(commands.add("serve", do_serve, about, SERVE_EXAMPLES))


def add_export(command: Parser) -> None:
    """Add the options of an export."""
    command.add_argument("model", type=Path, help="directory of a saved model, as `dualprompt learn` makes them")
    command.add_argument("--to", required=True, choices=("onnx", "torch-export"), help="format of the file")
    command.add_argument("--int8", action="store_true", help="8-bit weights: smaller, faster, not quite as exact")
    command.add_argument("--out", type=Path, help="the file (default: MODEL.onnx, MODEL.int8.onnx or MODEL.pt2)")
    command.add_argument(
        "--check", type=Path, metavar="FOLDER", help="compare accuracy before and after on a folder of class folders"
    )


def add_serve(command: Parser) -> None:
    """Add the options of the server."""
    command.add_argument("model", type=Path, help="the model's folder; if there is none, a new model is made")
    command.add_argument("--open", action="store_true", help="open the page in this machine's browser")
    command.add_argument(
        "--review",
        type=float,
        metavar="DAYS",
        help="keep images with unsure or corrected answers so long, for people to look at (default: none is kept)",
    )
    network = command.add_argument_group("who may ask")
    network.add_argument("--host", default="127.0.0.1", help="address to bind; other than loopback needs a token")
    network.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    network.add_argument(
        "--token", help="what every client must show (default: $DUALPROMPT_TOKEN; else one is made, for changes only)"
    )
    engine = command.add_argument_group("what computes")
    engine.add_argument("--device", default="auto", help=DEVICE)
    engine.add_argument("--max-batch", type=int, default=16, help="images predicted together (default: %(default)s)")
    engine.add_argument("--engine", choices=("torch", "onnx"), default="torch", help="default: %(default)s")
    engine.add_argument("--int8", action="store_true", help="with --engine onnx: 8-bit weights, faster, less exact")
    engine.add_argument(
        "--check", type=Path, metavar="FOLDER", help="with --engine onnx: tell the change of accuracy on class folders"
    )
    new = command.add_argument_group("of a new model")
    new.add_argument("--backbone", help=BACKBONE)
    new.add_argument("--method", help="see `dualprompt list methods` (default: dualprompt-lda)")
    new.add_argument("--input-size", type=int, help="pixels a side (default: the checkpoint's)")


def do_export(options: argparse.Namespace) -> None:
    """Write a model to one file, and say how it answers beside the model itself."""
    from dualprompt import export
    from dualprompt.learner import ContinualLearner

    learner = ContinualLearner.load(options.model, device="cpu")
    model = options.model.resolve()
    suffix = f"{'.int8' if options.int8 else ''}{export.FORMATS[options.to]}"
    out = options.out or model.with_name(f"{model.name}{suffix}")
    sample = export.sample(learner, options.check)
    written = export.export(learner, out, options.to, int8=options.int8)
    found = export.compare(learner, export.open_exported(out, options.to), sample)
    smaller = f", {written.fp32_bytes / 1e6:.1f} MB in fp32" if options.int8 else ""
    emit(
        options,
        written.to_dict() | {"comparison": found.to_dict()},
        f"{out}: {written.bytes / 1e6:.1f} MB{smaller}, {counted(len(learner.classes), 'class', 'classes')}, "
        f"{counted(len(learner.tasks), 'task')}, "
        f"written in {written.seconds:.0f} s",
        found.sentence(),
    )


def do_serve(options: argparse.Namespace) -> None:
    """Serve a model until a signal ends it."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise DualPromptError(f"serving needs the extra 'serve' ({error}): pip install 'dualprompt[serve]'") from None
    from dualprompt.hosted.engine import Engine
    from dualprompt.serve.run import Options, Told, serve

    if not 0 <= options.port <= 65535:
        raise DualPromptError(f"--port takes a number from 0 to 65535, found {options.port}")
    if not 1 <= options.max_batch <= 1024:
        raise DualPromptError(f"--max-batch takes a number from 1 to 1024, found {options.max_batch}")

    if options.review is not None and not 0 < options.review <= 365:
        raise DualPromptError(f"--review takes a number of days up to 365, found {options.review}")

    class Terminal(Told):
        def waiting(self, text: str) -> None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

        remark = waiting

        def started(self, address: str, token: str | None) -> None:
            page = address if token is None else f"{address}/#token={token}"
            lines = [f"{options.model} answers at {page}  (stop: Ctrl-C)"]
            if token is not None:
                lines.append("whoever has the token may change the model; others on this machine may only ask")
            emit(options, {"url": address, "page": page, "token": token}, *lines)
            sys.stdout.flush()
            if options.open:
                webbrowser.open(page)

    made_of = {"backbone": options.backbone, "method": options.method, "input_size": options.input_size}
    given = Options(
        host=options.host,
        port=options.port,
        token=options.token,
        device=options.device,
        largest_batch=options.max_batch,
        engine=Engine(options.engine, options.int8, options.check),
        review_days=options.review,
        new={key: value for key, value in made_of.items() if value is not None},
    )
    serve(options.model, given, Terminal())
