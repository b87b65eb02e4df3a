"""The `dualprompt` command: thin, one function a subcommand. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dualprompt import __version__
from dualprompt.errors import DualPromptError, InterruptedRunError, LostProcessError, nearest
from dualprompt.progress import speaks

if TYPE_CHECKING:
    from rich.table import Table

    from dualprompt.learner import Answer, ContinualLearner
    from dualprompt.studies.sheet import Sheet
    from dualprompt.training.run import Run

EXAMPLES = """\
examples:
  dualprompt run mini                                      five small tasks, no download, about a minute
  dualprompt run mini --seeds 3 --json
  dualprompt run split-cifar100 --backbone embedded --recipe official --out runs/cifar
  dualprompt run mini --train.epochs 10 --method.e_layers 3,4,5 --method.prompting pro-t
  dualprompt resume runs/cifar                             continue after a kill, to the same result
  dualprompt eval runs/cifar --selection query,batch_vote,oracle
  dualprompt table main --benchmark mini --seeds 3         every method, beside the paper's numbers
  dualprompt sweep mini --methods dualprompt,frozen-head   learning rates, on validation images
  dualprompt study ablation mini                           one of the paper's studies, with its figures
  dualprompt report runs/cifar                             one HTML page about a run, several, or a study
  dualprompt list methods
  dualprompt bench --quick
  dualprompt data get cifar100
  dualprompt learn my-model photos/january                 teach it a folder of class folders; again in February
  dualprompt predict my-model picture.jpg more-pictures/
  dualprompt forget my-model january
  dualprompt export my-model --to onnx --int8
  dualprompt serve my-model                                a page and an HTTP API on this machine
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise DualPromptError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    code = answer(list(sys.argv[1:] if argv is None else argv))
    torch = sys.modules.get("torch") if argv is None else None  # with argv, whoever called us goes on
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        # PyTorch's communication threads sometimes abort Python's clean-up at the end of a process (pytorch issue
        # 190489), and one process that ends so takes the others with it: end without the clean-up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def answer(arguments: list[str]) -> int:
    """Do what the arguments ask; mistakes become one line."""
    try:
        options = parse(arguments)
        options.do(options)
        sys.stdout.flush()
    except DualPromptError as error:
        if speaks() or not isinstance(error, InterruptedRunError | LostProcessError):
            sys.stderr.write(f"dualprompt: error: {error}\n")
        return 130 if isinstance(error, InterruptedRunError) else 2
    except KeyboardInterrupt:
        sys.stderr.write("dualprompt: stopped\n")
        return 130
    except BrokenPipeError:  # whoever read our output has gone; Python must not try again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; `--a.b VALUE` pairs are collected as overrides."""
    overrides, rest = split_overrides(arguments)
    options, unknown = build_parser().parse_known_args(rest)
    if unknown:
        flags = [flag for flag in unknown if flag.startswith("-")]
        if not flags or options.do not in TAKES_OVERRIDES:
            raise DualPromptError(f"unknown argument '{unknown[0]}'; see dualprompt --help")
        raise DualPromptError(f"unknown option '{flags[0]}'; {nearest_option(flags[0], options.command)}")
    if overrides and options.do not in TAKES_OVERRIDES:
        raise DualPromptError(
            f"'--{next(iter(overrides))}' only goes with `dualprompt run`, `sweep`, `table` and `learn`"
        )
    options.overrides = overrides
    return options


def split_overrides(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `--a.b VALUE` and `--a.b=VALUE` out of the arguments."""
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or "." not in key:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise DualPromptError(f"option '{key}' needs a value")
            value = queue.pop(0)
        overrides[key.removeprefix("--")] = read_value(value)
    return overrides, rest


def read_value(text: str) -> Any:
    """Read a value as YAML; `a,b` without brackets is a list too, unless it is quoted or the path of something."""
    import yaml

    try:
        value = yaml.safe_load(text)
        if isinstance(value, str) and "," in value and text[0] not in "\"'" and not Path(text).exists():
            return [yaml.safe_load(part) for part in value.split(",")]
    except yaml.YAMLError:
        raise DualPromptError(f"cannot read the value '{text}'; quote it as YAML") from None
    return value


def nearest_option(flag: str, command: str) -> str:
    """Return a phrase that helps someone who mistyped a flag of a command or left out its group."""
    from dualprompt.config import RunConfig, Strict
    from dualprompt.methods.base import METHODS

    name = flag.lstrip("-").partition("=")[0]
    groups = {key: field.annotation for key, field in RunConfig.model_fields.items()}
    configs = [(key, group) for key, group in groups.items() if isinstance(group, type) and issubclass(group, Strict)]
    configs += [("method", METHODS[method].Config) for method in METHODS.names()]
    dotted = list(dict.fromkeys(f"{key}.{part}" for key, config in configs for part in config.model_fields))
    close = [option for option in dotted if option.endswith(f".{name}")]
    return f"did you mean '--{close[0]}'?" if close else nearest(name, [*flags_of(command), *dotted])


def flags_of(command: str) -> list[str]:
    """Return the undotted options of a command."""
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return [
        flag[2:] for action in commands.choices[command]._actions for flag in action.option_strings if flag[:2] == "--"
    ]


def build_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="dualprompt",
        description="Prompt-based continual learning with a frozen Vision Transformer.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dualprompt {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, do: Callable[[argparse.Namespace], None], about: str, examples: str = "") -> Parser:
        sub = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(do=do, command=name)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        return sub

    run = command("run", do_run, "learn a benchmark task by task, beside the no-prompt baseline", RUN_EXAMPLES)
    run.add_argument("preset", help="a preset (`dualprompt list presets`) or a YAML file")
    run.add_argument("--backbone", help="embedded, a known name, a hub id, or a weights file")
    run.add_argument("--method", help="see `dualprompt list methods` (default: the preset's)")
    run.add_argument("--recipe", help="one of the preset's recipes (`dualprompt list presets`)")
    run.add_argument("--seed", type=int, help="first seed (default: 0)")
    run.add_argument("--seeds", type=int, default=1, help="how many seeds, counted up from the first")
    run.add_argument("--out", type=Path, help="run directory (default: runs/PRESET-METHOD-TIME)")
    run.add_argument("--no-baseline", action="store_true", help="do not run frozen-head beside the method")
    run.add_argument("--skip-bad", action="store_true", help="leave out unreadable images and count them")
    add_devices(run)
    run.add_argument("--precision", help=PRECISION)

    resume = command("resume", do_resume, "continue an interrupted run to the same result")
    resume.add_argument("run", type=Path)
    add_devices(resume)

    evaluate = command("eval", do_eval, "judge a finished run again, after each of its tasks")
    evaluate.add_argument("run", type=Path)
    evaluate.add_argument("--device", help=DEVICE)
    evaluate.add_argument("--selection", help="query, batch_vote, oracle, or several with commas (default: the run's)")

    show = command("show", do_show, "show the tables and pictures of a run")
    show.add_argument("run", type=Path)

    table = command(
        "table", do_table, "run or reuse every run of one of the paper's tables, and print it", TABLE_EXAMPLES
    )
    table.add_argument("which", choices=("main",), help="main: Table 1, and the same for any other benchmark")
    table.add_argument("--benchmark", default="split-cifar100", help="a preset or a YAML file (default: %(default)s)")
    table.add_argument("--methods", help="with commas; NAME:OPTION=VALUE sets an option (default: every method)")
    table.add_argument("--seeds", type=int, default=5, help="how many seeds, counted up from 0 (default: %(default)s)")
    table.add_argument("--buffers", help="buffer sizes of rehearsal methods, with commas (default: the paper's)")
    table.add_argument(
        "--format", choices=("text", "markdown", "latex", "csv"), help="default: by --out's name, or text"
    )
    table.add_argument("--out", type=Path, help="also write the table to this file")
    add_store(table)

    sweep = command("sweep", do_sweep, "choose the hyper-parameters of methods on validation images", SWEEP_EXAMPLES)
    sweep.add_argument("preset", help="a preset (`dualprompt list presets`) or a YAML file")
    sweep.add_argument("--methods", required=True, help="with commas")
    sweep.add_argument(
        "--grid", action="append", default=[], help="OPTION=VALUE,VALUE,…; may be repeated (default: each method's own)"
    )
    sweep.add_argument("--budget", type=int, help="configurations a method, the first of its grid (default: 4 or all)")
    sweep.add_argument("--buffer", type=int, help="images that rehearsal methods keep (default: the recipe's)")
    sweep.add_argument("--seed", type=int, help="the one seed (default: 0)")
    sweep.add_argument("--out", type=Path, help="folder for sweep.md and sweep.json (default: RUNS/sweep-PRESET)")
    add_store(sweep)

    add_study(command("study", do_study, "carry out one of the paper's studies, reusing finished runs", STUDY_EXAMPLES))

    report = command("report", do_report, "write one HTML page about runs and studies, with figures as SVG and CSV")
    report.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="directory of a run, of several, or of a study"
    )
    report.add_argument("--out", type=Path, help="the HTML file (default: report.html in the first directory)")

    compare = command("compare", do_compare, "show two runs side by side")
    compare.add_argument("runs", type=Path, nargs=2, metavar="RUN")

    listing = command("list", do_list, "list what there is")
    listing.add_argument("what", choices=("methods", "benchmarks", "backbones", "presets"))

    bench = command("bench", do_bench, "measure speed against a straight-line twin and the machine's arithmetic")
    bench.add_argument("--backbone", default="embedded", help="as for run")
    bench.add_argument("--input-size", type=int, help="pixels a side (default: the checkpoint's)")
    bench.add_argument("--batch", help="images a step, or several numbers a,b (default: 32; on a GPU 128,24)")
    bench.add_argument("--device", default="auto", help=DEVICE)
    bench.add_argument("--precision", default="auto", help=PRECISION)
    bench.add_argument("--compile", default="auto", help="auto, on or off (default: on for a GPU)")
    bench.add_argument("--end-to-end", metavar="PRESET", help="also time a whole run of a benchmark, twice")
    bench.add_argument("--quick", action="store_true", help="shorter rounds: less exact, under a minute on 2 cores")

    add_learner(command)
    add_export(command("export", do_export, "write a model to one file for ONNX Runtime or PyTorch", EXPORT_EXAMPLES))
    add_serve(command("serve", do_serve, "answer, learn and forget over HTTP, with a page to do it on", SERVE_EXAMPLES))

    data = command("data", do_data, "get or look at a dataset")
    data.add_argument("action", choices=("get", "show"))
    data.add_argument("name", help="dataset, group of datasets, or (for show) a folder")
    data.add_argument("--root", type=Path, help="folder that holds the datasets (default: $DUALPROMPT_DATA)")
    data.add_argument("--out", type=Path, help="gallery picture (default: NAME.png)")
    return parser


DEVICE = "auto, cpu, cuda or mps"
PRECISION = "auto (bf16 on a GPU that has it, else fp32), fp32 or bf16"


def add_devices(command: Parser) -> None:
    """Add the options that say where a run is carried out."""
    command.add_argument("--device", help=DEVICE)
    command.add_argument("--devices", type=int, help="processes a machine, one device each")
    command.add_argument("--nodes", type=int, help="machines")


def add_store(command: Parser) -> None:
    """Add the options of commands that run many runs or reuse them."""
    command.add_argument("--recipe", help="one of the preset's recipes (`dualprompt list presets`)")
    command.add_argument("--backbone", help="embedded, a known name, a hub id, or a weights file")
    command.add_argument("--runs", type=Path, help="folder that holds the runs (default: $DUALPROMPT_RUNS or runs)")
    command.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each in a process of its own (default: 1)"
    )
    command.add_argument("--device", help=DEVICE)
    command.add_argument("--precision", help=PRECISION)


def add_learner(command: Callable[..., Parser]) -> None:
    """Add the commands for a model that is taught from folders."""

    def with_model(name: str, do: Callable[[argparse.Namespace], None], about: str, examples: str = "") -> Parser:
        sub = command(name, do, about, examples)
        sub.add_argument("model", type=Path, help="the model's folder")
        sub.add_argument("--device", default="auto", help=DEVICE)
        return sub

    learn = with_model("learn", do_learn, "teach a model new classes from a folder; make it if there is none", LEARN)
    learn.add_argument("folder", type=Path, help="holds one folder of images for each class")
    learn.add_argument("--name", help="what the task is called (default: the folder's name)")
    learn.add_argument("--epochs", type=int, help="passes over the images (default: the model's)")
    learn.add_argument("--again", action="store_true", help="learn known classes once more, as further experts")
    learn.add_argument("--backbone", help="of a new model: embedded, a known name, a hub id, or a weights file")
    learn.add_argument("--method", help="of a new model: see `dualprompt list methods` (default: dualprompt)")
    learn.add_argument("--input-size", type=int, help="of a new model: pixels a side (default: the checkpoint's)")
    learn.add_argument("--seed", type=int, help="of a new model (default: 0)")

    predict = with_model("predict", do_predict, "say what images show", PREDICT)
    predict.add_argument("images", nargs="+", help="files, or folders of them")
    predict.add_argument("--top-k", type=int, default=5, help="how many classes each answer has (default: %(default)s)")
    predict.add_argument("--csv", action="store_true", help="print one line an image, with commas")

    evaluate = with_model("evaluate", do_evaluate, "judge a model on a folder of class folders")
    evaluate.add_argument("folder", type=Path, help="holds one folder of images for each class")

    forget = with_model("forget", do_forget, "make a model forget a task or a class, for good", FORGET)
    forget.add_argument("what", help="a task's name or id, or a class")

    calibrate = with_model("calibrate", do_calibrate, "let a model answer 'none of these' to strange images", CALIBRATE)
    calibrate.add_argument("--unknown", type=Path, help="folder of images that show none of its classes")
    calibrate.add_argument(
        "--accept", type=float, default=0.95, help="share of known images that still get a class (default: %(default)s)"
    )
    calibrate.add_argument("--off", action="store_true", help="always answer with a class")

    with_model("info", do_info, "show what a model knows and what it is made of")


LEARN = """\
A fifth of each class (at most 10 images, none of fewer than 5) is held out to measure the accuracy. Nothing of the
images is kept. Interrupted learning goes on when the same command is given again; until it is complete, the old model
stays.

examples:
  dualprompt learn my-model photos/january
  dualprompt learn my-model photos/february --name "February" --epochs 10
  dualprompt learn other-model photos/january --backbone dinov2-s14 --method.e_length 10 --train.lr 0.002
"""

PREDICT = """\
Images that cannot be read do not keep the others from being answered: they are named on stderr, and the command then
ends with exit code 2.

examples:
  dualprompt predict my-model picture.jpg
  dualprompt predict my-model inbox/ --csv > answers.csv
  dualprompt predict my-model a.jpg b.png --top-k 3 --json
"""

FORGET = """\
The prompts, key, statistics and classifier rows of a task go; of a class, its statistics and its row. All other
classes answer as before.

examples:
  dualprompt forget my-model january
  dualprompt forget my-model "grand piano"
"""

CALIBRATE = """\
The threshold is set by the images that were held out while learning.

examples:
  dualprompt calibrate my-model
  dualprompt calibrate my-model --accept 0.9 --unknown photos/other-things
"""


def add_export(command: Parser) -> None:
    """Add the options of an export."""
    command.add_argument("model", type=Path, help="directory of a saved model, as `dualprompt learn` makes them")
    command.add_argument("--to", required=True, choices=("onnx", "torch-export"), help="format of the file")
    command.add_argument("--int8", action="store_true", help="8-bit weights: smaller, faster, not quite as exact")
    command.add_argument("--out", type=Path, help="the file (default: MODEL.onnx, MODEL.int8.onnx or MODEL.pt2)")
    command.add_argument(
        "--check", type=Path, metavar="FOLDER", help="compare accuracy before and after on a folder of class folders"
    )


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


def add_serve(command: Parser) -> None:
    """Add the options of the server."""
    command.add_argument("model", type=Path, help="directory of a saved model, as `dualprompt learn` makes them")
    command.add_argument("--host", default="127.0.0.1", help="address to bind; other than loopback needs a token")
    command.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    command.add_argument("--token", help="what clients must show (default: $DUALPROMPT_TOKEN, which others cannot see)")
    command.add_argument("--device", default="auto", help=DEVICE)
    command.add_argument("--max-batch", type=int, default=16, help="images predicted together (default: %(default)s)")


SERVE_EXAMPLES = """\
The server answers on this machine only. To let others in, bind another address and set a token, which every request
must then show. Uploaded images are deleted when they are learned or refused.

examples:
  dualprompt serve my-model
  curl -F images=@cat.jpg http://127.0.0.1:8000/predict
  DUALPROMPT_TOKEN=$(openssl rand -hex 16) dualprompt serve my-model --host 0.0.0.0
"""


def add_study(command: Parser) -> None:
    """Add the options of a study."""
    from dualprompt.studies import STUDIES

    command.add_argument("name", metavar="NAME", help=", ".join(STUDIES))
    command.add_argument("preset", nargs="?", default="mini", help="a preset or a YAML file (default: %(default)s)")
    command.add_argument("--seeds", type=int, help="how many seeds (default: 1 for searches, 3 for comparisons)")
    command.add_argument("--seed", type=int, help="first seed (default: 0)")
    command.add_argument("--budget", type=int, help="settings that each sweep of a search may try; auto: runs in all")
    command.add_argument("--buffers", help="buffer sizes of study buffers, with commas")
    command.add_argument("--methods", help="methods of study buffers, with commas")
    command.add_argument("--out", type=Path, help="folder for table and figures (default: RUNS/study-NAME-PRESET)")
    add_store(command)


STUDY_EXAMPLES = """\
Searches are judged on images held out of the training images; only what was chosen is run on the test images, in the
end. Finished runs are reused, interrupted ones continued, failed ones tried again: give the same command once more.
On mini, studies use fewer images and settings, and take minutes; on the other presets they are as in the paper.

examples:
  dualprompt study positions
  dualprompt study ablation split-cifar100 --backbone embedded --seeds 3 --jobs 2
  dualprompt study lengths split-imagenet-r --json
  dualprompt study auto mini --budget 20 --seeds 2
  dualprompt study buffers mini --methods er,dualprompt,l2p --buffers 50,200
"""

TABLE_EXAMPLES = """\
Finished runs are reused, interrupted ones continued, failed ones tried again: give the same command once more.
Dotted options as for `dualprompt run` go to every method.

examples:
  dualprompt table main --benchmark mini --methods dualprompt,frozen-head --seeds 3
  dualprompt table main --backbone embedded --recipe tuned --seeds 3 --buffers 1000,5000 --jobs 2
  dualprompt table main --benchmark 5-datasets --methods dualprompt,dualprompt:keys=mean --out table.tex
"""

SWEEP_EXAMPLES = """\
Every method is given the same number of configurations, and judged on images held out of its training images
(--benchmark.validation 0.2). The test images are never read. Dotted options as for `dualprompt run` go to every method.

examples:
  dualprompt sweep mini --methods dualprompt,frozen-head
  dualprompt sweep mini --methods frozen-head --grid train.lr=1e-3,5e-3 --grid train.epochs=2,5 --budget 4
  dualprompt sweep split-cifar100 --backbone embedded --recipe tuned --methods dualprompt --jobs 2 --json
"""

RUN_EXAMPLES = """\
Every key of the config can be set with a dotted option: --train.epochs 10 --method.g_layers 1,2
--benchmark.tasks 5 --evaluate.batch_size 64. A wrong key is answered with the nearest right one.

examples:
  dualprompt run mini
  dualprompt run split-cifar100 --backbone embedded --seeds 3
  dualprompt run my-photos.yaml --method.e_length 10 --skip-bad --json
"""


def emit(options: argparse.Namespace, value: Any, *tables: Table | str) -> None:
    """Print one JSON value, or tables."""
    if options.json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
        return
    from rich.console import Console

    from dualprompt.studies.tables import wide

    console = Console()
    if not console.is_terminal:
        console = Console(width=wide(*(table for table in tables if not isinstance(table, str))))
    for table in tables:
        if isinstance(table, str):
            console.print(table, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(table)


def do_run(options: argparse.Namespace) -> None:
    """Learn a benchmark."""
    from dualprompt.config import compose, compose_beside
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root
    from dualprompt.training import group

    if options.seeds < 1:
        raise DualPromptError(f"--seeds must be at least 1, found {options.seeds}")
    overrides = dict(options.overrides)
    flags = {
        "backbone.name": options.backbone,
        "method.name": options.method,
        "seed": options.seed,
        "benchmark.skip_bad": options.skip_bad or None,
        "device": options.device,
        "devices": options.devices,
        "nodes": options.nodes,
        "precision": options.precision,
    }
    overrides |= {key: value for key, value in flags.items() if value is not None}
    first = compose(options.preset, options.recipe, overrides)
    configs = [first.model_copy(update={"seed": first.seed + n}) for n in range(options.seeds)]
    name = f"{Path(options.preset).stem}-{first.method['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = options.out or runs_root() / name
    baseline = False
    if not options.no_baseline:
        baseline = compose_beside(options.preset, options.recipe, overrides, group.BASELINE)
    with Terminal() as terminal:
        runs = group.start(group.plan(configs, baseline), out, terminal)
    conclude(options, runs)


def do_resume(options: argparse.Namespace) -> None:
    """Continue an interrupted run."""
    from dualprompt.console import Terminal
    from dualprompt.training import group

    refuse_other_folders(options.run)
    places = {"device": options.device, "devices": options.devices, "nodes": options.nodes}
    elsewhere = {key: value for key, value in places.items() if value is not None}
    with Terminal() as terminal:
        runs = group.resume(options.run, terminal, elsewhere)
    conclude(options, runs)


def conclude(options: argparse.Namespace, runs: list[Run]) -> None:
    """Write and print what finished runs have to show."""
    if not speaks():
        return
    from dualprompt.studies import publish, tables

    folder = group_folder(runs)
    pictures = publish.publish_group(runs, folder)
    results = [run.result() for run in runs]
    seeds = sorted({result["seed"] for result in results})
    shown = [result for result in results if result["seed"] == seeds[0]]
    emit(
        options,
        publish.combined(runs, folder) | {"pictures": [str(path) for path in pictures]},
        *(tables.accuracy_matrix(result) for result in shown),
        fitting(results),
        "\n".join(["pictures:", *(f"  {path}" for path in pictures)]),
    )


def fitting(results: list[dict[str, Any]]) -> Table:
    """Return the headline table, without its lesser columns where the terminal is too narrow for them."""
    from rich.console import Console

    from dualprompt.studies import tables

    console, table = Console(), tables.headline(results)
    too_wide = console.is_terminal and tables.wide(table) > console.width
    return tables.headline(results, brief=True) if too_wide else table


def group_folder(runs: list[Run]) -> Path:
    """Return the folder that holds all runs of a group; with one seed that is the first run's own."""
    first = runs[0].folder
    return first if all(run.folder.is_relative_to(first) for run in runs) else first.parent


def do_eval(options: argparse.Namespace) -> None:
    """Judge the finished runs of a folder again; the baseline's own result stands beside them."""
    from dualprompt.console import Terminal
    from dualprompt.files import write_json
    from dualprompt.studies import tables
    from dualprompt.training import group
    from dualprompt.training.evaluate import evaluate_again
    from dualprompt.training.setup import prepare

    runs = runs_in(options.run)
    judged = [run for run in runs if run.config().method["name"] != group.BASELINE] or runs
    results = {run: run.result() for run in runs}
    selections: list[Any] = [s.strip() for s in options.selection.split(",")] if options.selection else [None]
    here = {"device": options.device, "devices": 1, "nodes": 1}
    here = {key: value for key, value in here.items() if value is not None}
    found, setup = [], None
    with Terminal() as terminal:
        for run in judged:
            setup = prepare(group.elsewhere_config(run.folder, run.config(), here), terminal, share=setup)
            run.check_same(setup.identity)
            for selection in selections:
                setup.method.check_selection(selection)
            for selection in selections:
                result = evaluate_again(setup, run, selection, terminal)
                write_json(run.folder / f"eval-{selection or 'default'}.json", result)
                found.append(result)
    beside = [result for run, result in results.items() if run not in judged]
    if len(found) == 1:
        value = found[0]
    elif len(judged) == 1:
        value = {"selections": {result["selection"]: result for result in found}}
    else:
        value = {"results": found}
    emit(options, value, *(tables.accuracy_matrix(result) for result in found), fitting([*found, *beside]))


def runs_in(folder: Path) -> list[Run]:
    """Return the finished runs of a folder: one, or those of its group."""
    from dualprompt.studies.publish import finished_runs

    return finished_runs(folder)


def refuse_other_folders(folder: Path) -> None:
    """Refuse a folder that holds no run."""
    from dualprompt.studies import publish

    publish.refuse_other_folders(folder)


def do_show(options: argparse.Namespace) -> None:
    """Show a finished run."""
    conclude(options, runs_in(options.run))


def do_table(options: argparse.Namespace) -> None:
    """Print one of the paper's tables, running what it lacks."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root, write_text
    from dualprompt.studies import main_table, store
    from dualprompt.studies.sheet import as_csv, as_latex, as_markdown, as_rich
    from dualprompt.studies.tables import text

    methods = names(options.methods) or main_table.default_methods()
    overrides = many_overrides(options)
    lines = main_table.lines(options.benchmark, options.recipe, methods, sizes(options.buffers), overrides)
    with Terminal() as terminal:
        root = options.runs or runs_root()
        rows = main_table.rows(options.benchmark, lines, options.seeds, root, terminal, options.jobs)
    sheet = main_table.sheet(rows)
    suffix = options.out.suffix if options.out else ""
    form = options.format or {".md": "markdown", ".tex": "latex", ".csv": "csv"}.get(suffix, "text")
    written = {
        "text": lambda: text(as_rich(sheet)),
        "markdown": lambda: as_markdown(sheet),
        "latex": lambda: as_latex(sheet),
        "csv": lambda: as_csv([row.values() for row in rows]),
    }[form]()
    if options.out:
        write_text(options.out, written)
    shown = fitting_sheet(sheet) if form == "text" else written.rstrip("\n")
    emit(options, main_table.combined(rows), shown)
    store.complain([each for row in rows for each in row.obtained])


def do_sweep(options: argparse.Namespace) -> None:
    """Choose the hyper-parameters of methods."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root, write_json, write_text
    from dualprompt.studies import store, sweep
    from dualprompt.studies.sheet import as_markdown

    grid = dict(read_axis(text) for text in options.grid)
    overrides = many_overrides(options) | ({} if options.seed is None else {"seed": options.seed})
    methods = names(options.methods)
    search = sweep.Sweep(options.preset, options.recipe, methods, grid, options.budget, overrides, options.buffer)
    root = options.runs or runs_root()
    with Terminal() as terminal:
        tries = search.run(root, terminal, options.jobs)
    sheet, lines = search.sheet(tries), sweep.preset_lines(sweep.winners(tries))
    value = search.combined(tries)
    folder = options.out or root / f"sweep-{Path(options.preset).stem}"
    write_text(folder / "sweep.md", f"{as_markdown(sheet)}\n```yaml\n{lines}\n```\n")
    write_json(folder / "sweep.json", value)
    recipe = str(value["recipe"]).removesuffix(", changed")
    told = f"also in {folder / 'sweep.md'} and sweep.json; the winners, to put below recipes.{recipe}:\n{lines}"
    emit(options, value, fitting_sheet(sheet), told)
    store.complain([each.obtained for each in tries])


def do_study(options: argparse.Namespace) -> None:
    """Carry out a study, and print its tables and its finding."""
    from dualprompt.console import Terminal
    from dualprompt.files import runs_root
    from dualprompt.studies import results, store, study

    chosen = study.load(options.name)
    if options.budget is not None and not chosen.searches:
        raise DualPromptError(f"study {chosen.name} searches nothing; leave --budget out")
    if chosen.name != "buffers" and (options.buffers or options.methods):
        raise DualPromptError(f"--buffers and --methods are for study buffers, not {chosen.name}")
    root = options.runs or runs_root()
    mini = options.preset == "mini"
    with Terminal() as terminal:
        lab = study.Lab(
            options.preset,
            options.recipe,
            many_overrides(options) | ({} if options.seed is None else {"seed": options.seed}),
            chosen.seeds if options.seeds is None else options.seeds,
            chosen.mini_budget if mini and options.budget is None else options.budget,
            options.out or root / f"study-{chosen.name}-{Path(options.preset).stem}",
            lambda configs: store.obtain(configs, root, terminal, options.jobs),
            terminal,
            tuple(sizes(options.buffers)),
            tuple(names(options.methods)),
            options.jobs,
        )
        outcome = chosen.run(lab)
        value = results.publish(chosen, lab, outcome)
    where = f"also in {lab.folder}; a page of it: dualprompt report {shlex.quote(str(lab.folder))}"
    emit(options, value, *(fitting_sheet(sheet) for sheet in outcome.sheets), outcome.finding, where)
    store.complain([each for row in outcome.rows for each in row.obtained])


def do_report(options: argparse.Namespace) -> None:
    """Write a page about runs and studies."""
    from dualprompt.studies.report import report

    path = report(options.paths, options.out)
    emit(options, {"report": str(path)}, str(path))


def do_compare(options: argparse.Namespace) -> None:
    """Show two runs side by side."""
    from dualprompt.studies import compare

    value = compare.compare(*(runs_in(folder) for folder in options.runs))
    emit(options, value, *(fitting_sheet(sheet) for sheet in compare.sheets(value)))


def many_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides of a command that runs several methods."""
    if "method.name" in options.overrides:
        raise DualPromptError("choose methods with --methods, not --method.name")
    flags = {"backbone.name": options.backbone, "device": options.device, "precision": options.precision}
    return options.overrides | {key: value for key, value in flags.items() if value is not None}


def names(text: str | None) -> list[str]:
    """Read names with commas between them, each once."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def sizes(text: str | None, option: str = "--buffers") -> list[int]:
    """Read numbers of images with commas between them."""
    try:
        found = [int(part) for part in names(text)]
    except ValueError:
        raise DualPromptError(f"{option} takes numbers of images as 1000,5000, found '{text}'") from None
    if any(size < 1 for size in found):
        raise DualPromptError(f"{option} takes numbers of at least 1, found '{text}'")
    return found


def read_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read OPTION=VALUE,VALUE,…"""
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise DualPromptError(f"--grid takes OPTION=VALUE,VALUE, as train.lr=1e-4,5e-5; found '{text}'")
    found = read_value(values)
    return key.strip(), tuple(found) if isinstance(found, list) else (found,)


def fitting_sheet(sheet: Sheet) -> Table:
    """Return a table, without its lesser columns where the terminal is too narrow for them."""
    from rich.console import Console

    from dualprompt.studies.sheet import as_rich
    from dualprompt.studies.tables import wide

    console, table = Console(), as_rich(sheet)
    return as_rich(sheet, brief=True) if console.is_terminal and wide(table) > console.width else table


def do_list(options: argparse.Namespace) -> None:
    """List methods, benchmarks, backbones or presets."""
    from dualprompt.listing import LISTS

    rows = LISTS[options.what]()
    from rich.table import Table

    table = Table(*rows[0].keys(), title=options.what)
    for row in rows:
        table.add_row(*(", ".join(value) if isinstance(value, list) else str(value) for value in row.values()))
    emit(options, rows, table)


def do_bench(options: argparse.Namespace) -> None:
    """Measure speed."""
    from dualprompt.config import RunConfig
    from dualprompt.config import parse as validated
    from dualprompt.console import Terminal
    from dualprompt.studies import bench

    values = {
        "benchmark": {"dataset": "random images"},
        "backbone": {"name": options.backbone, "input_size": options.input_size},
        "device": options.device,
        "precision": options.precision,
        "compile": options.compile,
    }
    with Terminal() as terminal:
        machine = bench.Bench(validated(RunConfig, values), bench.QUICK if options.quick else bench.FULL, terminal)
        batches = sizes(options.batch or ("128,24" if machine.device.type == "cuda" else "32"), "--batch")
        found = machine.run(batches, options.end_to_end)
    emit(options, found, *bench.tables(found))


def open_learner(options: argparse.Namespace) -> ContinualLearner:
    """Return the model that a command is about."""
    from dualprompt.learner import ContinualLearner

    return ContinualLearner.load(options.model, options.device)


def do_learn(options: argparse.Namespace) -> None:
    """Teach a model."""
    import shutil

    from dualprompt.console import Terminal
    from dualprompt.learner import ContinualLearner
    from dualprompt.learning.keep import is_model, refuse_other

    made_of = {"backbone": options.backbone, "method": options.method}
    made_of |= {"input_size": options.input_size, "seed": options.seed}
    given = {key: value for key, value in made_of.items() if value is not None}
    if options.overrides:
        given["options"] = {key.removeprefix("method."): value for key, value in options.overrides.items()}
    refuse_other(options.model)
    if not is_model(options.model):
        learner = ContinualLearner(device=options.device, **given)
    elif given:
        option = next(iter({key: None for key in given if key != "options"} | options.overrides)).replace("_", "-")
        raise DualPromptError(f"{options.model} exists: --{option} is for a new model; leave it out, or name another")
    else:
        learner = open_learner(options)
    work = options.model.resolve().with_name(f".{options.model.resolve().name}.learning")
    with Terminal() as terminal:
        try:
            task = learner.learn(
                options.folder, options.name, epochs=options.epochs, again=options.again, progress=terminal, work=work
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{error}; the model is as before; give the same command to go on") from None
    learner.save(options.model)
    shutil.rmtree(work, ignore_errors=True)
    measured = "" if task.accuracy is None else f", {task.accuracy:.1f} % of the images held out were right"
    told = f"learned task {task.id} ('{task.name}'): {len(task.classes)} classes from {task.images} images{measured}"
    emit(
        options, {"model": str(options.model), "learned": task.to_dict(), **learner.info()}, tasks_table(learner), told
    )


def tasks_table(learner: ContinualLearner) -> Table:
    """Return what a model knows, a row a task."""
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "task", "classes", "images", "accuracy", "kept", "learned", title="what it knows")
    for task in learner.tasks:
        accuracy = "–" if task.accuracy is None else f"{task.accuracy:.1f} %"
        names = ", ".join(task.classes)
        cells = (f"{task.id}", task.name, names, f"{task.images}", accuracy, f"{task.bytes:,} B", task.learned)
        table.add_row(*(Text(cell) for cell in cells))  # Text: names may hold brackets
    return table


def do_predict(options: argparse.Namespace) -> None:
    """Answer what images show."""
    from dataclasses import replace

    import numpy as np

    from dualprompt.learning.pictures import listed

    if options.json and options.csv:
        raise DualPromptError("--json and --csv cannot go together; choose one")
    learner = open_learner(options)
    images = listed(options.images)[0]
    answers, faults = [], []
    for start in range(0, len(images), 64):
        good, pixels = [], []
        for image in images[start : start + 64]:
            try:
                pixels.append(learner.pixels(image))
                good.append(str(image))
            except DualPromptError as error:
                faults.append(str(error))
        if good:
            found = learner.predict_pixels(np.stack(pixels), options.top_k)
            answers += [replace(answer, path=path) for answer, path in zip(found, good, strict=True)]
    if options.csv:
        write_csv(answers)
    elif answers or options.json:
        emit(options, [answer.to_dict() for answer in answers], answers_table(answers))
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise DualPromptError(f"{len(faults)} of {len(images)} images: {'; '.join(faults[:5])}{more}")


def write_csv(answers: Sequence[Answer]) -> None:
    """Print one line an image."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    most = max((len(answer.top) for answer in answers), default=0)
    ranks = [f"{word}_{n + 1}" for n in range(most) for word in ("label", "probability")]
    writer.writerow(["path", "label", "probability", "task", "similarity", *ranks])
    for a in answers:
        top = [cell for score in a.top for cell in (score.label, f"{score.probability:.6f}")]
        writer.writerow([a.path, a.label or "", f"{a.probability:.6f}", a.task or "", f"{a.similarity:.6f}", *top])


def answers_table(answers: Sequence[Answer]) -> Table:
    """Return answers for people: what it is, how sure, and what else it could be."""
    from rich.table import Table
    from rich.text import Text

    table = Table("image", "label", "probability", "task", "similarity", "else")
    for answer in answers:
        others = ", ".join(f"{score.label} {100 * score.probability:.0f} %" for score in answer.top[1:3])
        label = answer.label or "none of these"
        cells = (answer.path or "", label, f"{100 * answer.probability:.1f} %", answer.task or "–")
        table.add_row(*(Text(cell) for cell in (*cells, f"{answer.similarity:.2f}", others)))
    return table


def do_evaluate(options: argparse.Namespace) -> None:
    """Judge a model on a folder."""
    from rich.table import Table
    from rich.text import Text

    from dualprompt.console import Terminal

    learner = open_learner(options)
    with Terminal() as terminal:
        found = learner.evaluate(options.folder, terminal)
    table = Table("class", "accuracy")
    for name, accuracy in found.by_class.items():
        table.add_row(Text(name), f"{accuracy:.1f} %")
    matching = "" if found.matching is None else f", {found.matching:.1f} % matched to their own task"
    rejected = f", {found.rejected:.1f} % answered with none" if learner.threshold is not None else ""
    told = f"{found.images} images: {found.accuracy:.1f} % right{matching}{rejected}"
    emit(options, found.to_dict(), table, told)


def do_forget(options: argparse.Namespace) -> None:
    """Make a model forget."""
    learner = open_learner(options)
    names = {task.name for task in learner.tasks} | set(learner.classes)
    by_id = options.what.isdecimal() and options.what not in names
    gone = learner.forget(int(options.what) if by_id else options.what)
    learner.save(options.model)
    value = {"class": gone} if isinstance(gone, str) else {"task": gone.to_dict()}
    told = f"forgot class '{gone}'" if isinstance(gone, str) else f"forgot task {gone.id} ('{gone.name}')"
    emit(options, {"forgotten": value, **learner.info()}, tasks_table(learner), told)


def do_calibrate(options: argparse.Namespace) -> None:
    """Set or remove the threshold of a model."""
    from rich.table import Table

    learner = open_learner(options)
    if options.off:
        learner.threshold = None
        learner.save(options.model)
        emit(options, {"threshold": None}, "every image gets a class")
        return
    found = learner.calibrate(options.unknown, accept=options.accept)
    learner.save(options.model)
    table = Table("threshold", "known images that get a class", "unknown images that get none")
    for level in found.levels:
        rejected = "–" if level.rejected is None else f"{level.rejected:.1f} %"
        mark = " ←" if level.threshold == found.threshold else ""
        table.add_row(f"{level.threshold:.4f}{mark}", f"{level.accepted:.1f} %", rejected)
    told = f"threshold {found.threshold:.4f}, from {found.known} images held out while learning"
    emit(options, found.to_dict(), table, told)


def do_info(options: argparse.Namespace) -> None:
    """Show a model."""
    learner = open_learner(options)
    info = learner.info()
    backbone = info["backbone"]
    limit = "always a class" if learner.threshold is None else f"none of these below a trust of {learner.threshold:.4f}"
    told = (
        f"backbone {backbone['name']} ({backbone['parameters']:,} parameters, licence: {backbone['licence']}), "
        f"images of {info['side']} × {info['side']} pixels\n"
        f"method {info['method']['name']}; {info['bytes']:,} bytes kept; answers: {limit}"
    )
    emit(options, info, tasks_table(learner), told)


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
        f"{out}: {written.bytes / 1e6:.1f} MB{smaller}, {len(learner.classes)} classes, {len(learner.tasks)} tasks, "
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
    from dualprompt.serve.run import serve

    if not 0 <= options.port <= 65535:
        raise DualPromptError(f"--port takes a number from 0 to 65535, found {options.port}")
    if not 1 <= options.max_batch <= 1024:
        raise DualPromptError(f"--max-batch takes a number from 1 to 1024, found {options.max_batch}")

    def started(address: str) -> None:
        emit(options, {"url": address}, f"{options.model} answers at {address}  (stop: Ctrl-C)")
        sys.stdout.flush()

    place = (options.host, options.port, options.token)
    serve(options.model, *place, options.device, started, options.max_batch)


def do_data(options: argparse.Namespace) -> None:
    """Download or show a dataset."""
    from dualprompt.console import Terminal
    from dualprompt.data import download, gallery
    from dualprompt.data.sources import GROUPS
    from dualprompt.data.stream import load_dataset
    from dualprompt.files import data_root

    root = options.root or data_root()
    if options.action == "get":
        with Terminal() as terminal:
            paths = download.get(options.name, root, terminal)
        emit(options, {"files": [str(path) for path in paths]}, *(str(path) for path in paths))
        return
    names = GROUPS.get(options.name, (options.name,))
    summaries = []
    for name in names:
        dataset = load_dataset(name, root)
        picture = options.out or Path(f"{dataset.name}.png")
        if options.out and len(names) > 1:  # a picture for each member of a group
            picture = options.out.with_name(f"{options.out.stem}-{dataset.name}{options.out.suffix}")
        summaries.append(gallery.summary(dataset) | {"gallery": str(gallery.gallery(dataset, picture))})
    emit(options, summaries[0] if len(summaries) == 1 else summaries, *(gallery.table(s) for s in summaries))


TAKES_OVERRIDES = (do_run, do_sweep, do_study, do_table, do_learn)


if __name__ == "__main__":
    raise SystemExit(main())
