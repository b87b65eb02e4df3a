"""Mutation testing: does a test notice when the code is wrong?

    python tools/mutants.py [--seed 0] [--count 60] [--minutes 20] [--files PART,…] [--out mutants.json]

A seeded sample of small mistakes is made in a copy of the tree, one at a time, and the tests that should notice are
run. A mutant is killed if one fails, timed out if they do not end, and survives otherwise. `--again FILE …` takes over
what earlier campaigns found, and tries their survivors once more, after a test was added. The working tree is never
changed. The summary is one JSON object.

What options are set to by default, texts and what is raised are left alone: those are choices, not behaviour.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process with threads must not be forked

ROOT = Path(__file__).parents[1]
PACKAGE = "src/dualprompt/"
PROMPTS = ("test_dualprompt", "test_reference_step")
PROTOTYPES = ("test_methods_prototypes", "test_ridge")
REGULARISED = ("test_methods_regularised", "test_rates")
REHEARSAL = ("test_methods_rehearsal", "test_methods_replaying")
ADAPTERS = ("test_methods_adapters", "test_alignment", "test_adaptation")
ADAPTED = ("aper", "ease", "hide-prompt", "inflora", "lae", "lora", "sd-lora", "single-prompt", "slca")
HOSTILE = (
    "test_crafted_files.py::test_a_checkpoint_with_one_bit_changed",
    "test_crafted_files.py::test_checkpoints_of_another_run",
    "test_hostile_files.py::test_mutations_of_checkpoints",
    "test_hostile_files.py::test_mutations_of_headers_of_checkpoints_without_checksum",
)


def lives(*names: str) -> tuple[str, ...]:
    """Return the tests that take methods through a whole life."""
    return tuple(f"test_methods_life.py::test_a_life[{name}]" for name in names)


# The tests that are run for a file, quick ones first.
TESTS: dict[str, tuple[str, ...]] = {
    "metrics": ("test_metrics",),
    "training/evaluate": ("test_evaluate", "test_dualprompt", "test_predictions", "test_cli.py::test_eval"),
    "methods/buffer": ("test_buffer", *REHEARSAL),
    "run/checkpoint": ("test_checkpoint", "test_rates", *lives("dualprompt", "er"), *HOSTILE),
    "backbones/base": ("test_deltas", "test_resnet"),
    "backbones/resnet": ("test_resnet",),
    "prompts/attach": ("test_prompts", *PROMPTS),
    "prompts/bank": ("test_prompts", *PROMPTS),
    "methods/base": (*PROMPTS, "test_methods_prompts", *REHEARSAL, *lives("dualprompt")),
    "methods/dualprompt": (*PROMPTS, "test_golden", *PROTOTYPES, *lives("dualprompt")),
    "methods/prompted": (*PROMPTS, "test_methods_prompts"),
    "methods/coda_prompt": ("test_methods_prompts",),
    "methods/l2p": ("test_methods_prompts", "test_reference_step"),
    "methods/dualprompt_rp": ("test_dualprompt_rp", *lives("dualprompt-rp")),
    "methods/experts": ("test_dualprompt_rp", *PROTOTYPES, *lives("dualprompt-rp")),
    "methods/ranpac": (*PROTOTYPES, "test_dualprompt_rp"),
    "methods/frozen_head": (*PROMPTS, "test_features"),
    "methods/heads": (*PROMPTS, *REGULARISED),
    **{f"methods/{name}": REGULARISED for name in ("ewc", "finetune", "lwf", "upper_bound")},
    **{f"methods/{name}": REHEARSAL for name in ("bic", "co2l", "derpp", "er", "gdumb", "rehearsal")},
    **{f"methods/{name}": PROTOTYPES for name in ("closed_form", "klda", "lda", "ridge", "simple_cil", "statistics")},
    **{f"methods/{name}": ("test_methods_analytic", *lives(name)) for name in ("anacp", "fecam")},
    "methods/ridge_head": (*PROTOTYPES, *lives("dualprompt, ridge")),
    **{f"methods/{name}": (*ADAPTERS, "test_one_class") for name in ("adaptation", "adapted", "alignment")},
    **{f"methods/{name.replace('-', '_')}": (*ADAPTERS, *lives(name)) for name in ADAPTED},
    "methods/s_prompts": ("test_methods_online", "test_domains"),
    "methods/dualprompt_pool": ("test_methods_online", "test_online"),
    **{f"methods/{name}": (f"test_{name}", *lives(name)) for name in ("dualnet", "dynaer", "rpsnet", "supsup")},
    "features": ("test_features",),
    "run/predictions": ("test_predictions",),
    "training/arrivals": ("test_online_streams", "test_online"),
    "data/arrival": ("test_online_streams", "test_online"),
    "data/thinning": ("test_online_streams",),
    "data/streams/class_incremental": ("test_stream", "test_class_orders"),
    "data/streams/domain": ("test_domains",),
    **{f"data/streams/{name}": ("test_online_streams", "test_online") for name in ("blurry", "online")},
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {
    "argmax": "argmin", "argmin": "argmax", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "sum": "mean", "mean": "sum", "any": "all", "all": "any", "log_softmax": "softmax", "zeros": "ones",
    "ones": "zeros", "sin": "cos", "cos": "sin", "no_grad": "enable_grad",
}  # fmt: skip
# Mutants that no test can kill, since they change nothing that is ever read: file, part of the line, why.
EQUIVALENT = (
    ("methods/statistics.py", "torch.empty(0, dim), persistent", "replaced before anything is matched"),
    ("methods/statistics.py", 'if values.device.type == "mps"', "differs on Apple's GPUs only"),
    ("methods/buffer.py", "zip(labels.tolist(), chances, strict=True)", "equally long, as they were made"),
    ("run/checkpoint.py", 'partition("\\n")[0][:200]', "how much is told of what another library says"),
    ("prompts/bank.py", "[torch.empty(0)] * len(e_prompts)", "stands for keys where there are none"),
    ("prompts/bank.py", "nn.Parameter(torch.zeros(self.g_shape))", "drawn or loaded before it is used"),
    ("data/streams/blurry.py", "zip(alone, stay, back, strict=True)", "all of a task are shuffled afterwards"),
    ("methods/s_prompts.py", "torch.empty(0, 0, dtype=torch.int64)", "no columns, before there is a domain"),
    ("methods/s_prompts.py", "self.columns.new_empty(0, 0)", "nobody restores a model without a domain"),
)
DROPPED = {"detach", "clone", "normalize", "contiguous", "abs", "square", "sqrt", "float", "flatten"}


@dataclass(frozen=True)
class Mutant:
    """One small mistake: the bytes from `start` to `end` of a file become `after`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def made_in(self, source: bytes) -> bytes:
        """Return the file with the mistake in it."""
        assert source[self.start : self.end].decode() == self.before, f"{self.file} is not what it was"
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return every mistake that we know how to make in a file."""
    lines = [0]
    for line in source.split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    found = []
    for node in _code(ast.parse(source)):
        for kind, after in _mistakes(node):
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = f"({after})" if isinstance(node, ast.expr) else after
            found.append(Mutant(file, node.lineno, kind, start, end, source[start:end].decode(), text))
    return found


def _code(node: ast.AST) -> Iterator[Any]:
    """Yield the expressions and statements that are carried out, but for texts, annotations and what is raised."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if text or (isinstance(node, ast.ClassDef | ast.Module) and not inside):
                continue  # docstrings, options and their defaults, constants
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _code(child)


def _mistakes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what may be written in a node's place, and what kind of mistake that is."""
    other: Any = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[first, *_]):
            other.ops[0] = COMPARISONS[type(first)]()
            yield "comparison", ast.unparse(other)
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            other.op = ARITHMETIC[type(operator)]()
            yield "arithmetic", ast.unparse(other)
        case ast.BoolOp():
            other.op = ast.And() if isinstance(other.op, ast.Or) else ast.Or()
            yield "and/or", ast.unparse(other)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield "negation", ast.unparse(other.operand)
        case ast.Constant(value=bool()):
            yield "constant", str(not other.value)
        case ast.Constant(value=float() as number):
            yield "constant", repr(number * 2 if number else 1.0)
        case ast.Constant(value=int() as number):
            yield "constant", repr(number + random.Random(f"{other.lineno}:{other.col_offset}").choice((1, -1)))
        case ast.IfExp():
            other.test = ast.UnaryOp(ast.Not(), other.test)
            yield "condition", ast.unparse(other)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", "pass"
        case ast.Call(func=ast.Attribute(attr=name, value=inner)) if name in DROPPED and not other.args:
            yield "dropped call", ast.unparse(inner)
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in NAMES:
            function.attr = NAMES[name]
            yield "other function", ast.unparse(other)
        case ast.Call(func=ast.Name(id=name) as function) if name in ("max", "min", "any", "all"):
            function.id = NAMES[name]
            yield "other function", ast.unparse(other)
        case ast.Call(args=[first, second, *_]) if not any(isinstance(a, ast.Starred) for a in (first, second)):
            other.args[:2] = second, first
            yield "swapped arguments", ast.unparse(other)


class Copy:
    """A copy of the tree in which tests are run, each time in a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, {}
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)

    def judge(self, mutant: Mutant, tests: tuple[str, ...]) -> tuple[str, str]:
        """Return what became of a mutant, and the test that noticed it."""
        if tests not in self.seconds:
            began = time.monotonic()
            outcome, first = self._run(tests, 600)
            if outcome != "survived":
                raise SystemExit(f"without any mistake, {first or tests} fails")
            self.seconds[tests] = time.monotonic() - began
        path = self.folder / PACKAGE / mutant.file
        source = path.read_bytes()
        path.write_bytes(mutant.made_in(source))
        try:
            return self._run(tests, 30 + 4 * self.seconds[tests])
        finally:
            path.write_bytes(source)

    def _run(self, tests: tuple[str, ...], limit: float) -> tuple[str, str]:
        log = self.folder / "log"
        child = os.fork()
        if child == 0:
            os._exit(self._tested(tests, log))
        deadline, status = time.monotonic() + limit, None
        try:
            while status is None and time.monotonic() < deadline:
                ended, code = os.waitpid(child, os.WNOHANG)
                status = code if ended else None
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what it started
            if status is None:
                os.waitpid(child, 0)
        failed = [line.split()[1] for line in log.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return "timed out" if status is None else "killed" if status else "survived", failed[0] if failed else ""

    def _tested(self, tests: tuple[str, ...], log: Path) -> int:
        """Run tests in this process, a child; return pytest's exit code."""
        os.setsid()
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder)
        sys.dont_write_bytecode = True  # a mistake of the same length in the same second would not be seen
        os.environ |= {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(self.folder / "src"))
        import pytest
        from hypothesis import Phase, settings

        # No search for the smallest example: one that fails is enough.
        settings.register_profile("once", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True)
        settings.load_profile("once")
        names = [f"tests/{name}" if ".py" in name else f"tests/{name}.py" for name in tests]
        plain = ["-x", "-q", "-n0", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={self.folder}/pytest"]
        return int(pytest.main([*plain, *names]))


def preload() -> None:
    """Import what every test imports but for our own code, so that a fork has it at once."""
    import hypothesis  # noqa: F401
    import lightning_fabric  # noqa: F401
    import pytest  # noqa: F401
    import sklearn.discriminant_analysis  # noqa: F401
    import torch._dynamo  # noqa: F401

    assert "dualprompt" not in sys.modules


def _equivalent(mutant: Mutant) -> str:
    """Return why a mutant is none, if it is known to change nothing."""
    line = (ROOT / PACKAGE / mutant.file).read_text().splitlines()[mutant.line - 1]
    return next((why for file, part, why in EQUIVALENT if file == mutant.file and part in line), "")


def rooms(judged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many mutants of each room of the package were killed, and of all."""
    found: dict[str, Counter[str]] = {}
    for each in judged:
        for name in (each["file"].removesuffix(".py").partition("/")[0], "all"):
            found.setdefault(name, Counter())[each["outcome"]] += 1
    outcomes = ("killed", "timed out", "killed since", "equivalent", "survived")
    return [
        {"room": name, "mutants": own.total()} | {outcome: own[outcome] for outcome in outcomes}
        for name, own in sorted(found.items(), key=lambda pair: (pair[0] == "all", pair[0]))
    ]


def found_again(old: dict[str, Any]) -> Mutant:
    """Return a mutant of an earlier campaign in the file as it is now."""
    now = mutants_of(old["file"], (ROOT / PACKAGE / old["file"]).read_bytes())
    same = [each for each in now if (each.kind, each.before, each.after) == (old["kind"], old["before"], old["after"])]
    if not same:
        raise SystemExit(f"{old['file']} has no {old['before']!r} any more; leave that campaign out")
    return min(same, key=lambda each: abs(each.line - old["line"]))


def campaign(
    mutants: list[Mutant], minutes: float, out: Path, facts: dict[str, Any], known: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """Judge mutants one after another until the time is over; what is known so far is in `out` all the time.

    `known` is what earlier campaigns found, whose survivors these mutants are; None: there were none.
    """
    preload()
    deadline, judged, summary = time.monotonic() + 60 * minutes, list(known or ()), facts
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Copy(Path(folder))
        for mutant in mutants:
            late = time.monotonic() > deadline
            if late and known is None:
                break
            began = time.monotonic()
            tests = TESTS[mutant.file.removesuffix(".py")]
            tests = tests if "methods" not in mutant.file else (*tests, "test_methods_contract")
            outcome, test = ("survived", "") if late else tree.judge(mutant, tests)  # as it did before
            took = round(time.monotonic() - began, 1)
            why = _equivalent(mutant) if outcome == "survived" else ""
            if known is not None and outcome != "survived":
                outcome = "killed since"
            facts_of = {"outcome": "equivalent" if why else outcome, "why": why, "test": test, "seconds": took}
            judged.append(asdict(mutant) | facts_of)
            what = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before!r} → {mutant.after!r}"
            sys.stderr.write(f"{outcome}: {what}\n")
            files: dict[str, Counter[str]] = {}
            for each in judged:
                files.setdefault(each["file"], Counter())[each["outcome"]] += 1
            counts = {"counts": Counter(e["outcome"] for e in judged), "rooms": rooms(judged)}
            summary = facts | counts | {"files": files, "mutants": judged}
            part = out.with_suffix(".partial")
            part.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
            part.replace(out)
    return summary


def main() -> None:
    """Read the command line and run a campaign."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="mutants at most")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--files", default="", help="only files whose name has one of these in it, with commas")
    parser.add_argument("--again", type=Path, nargs="+", help="summaries whose survivors are tried again")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()
    every = [
        mutant
        for name in sorted(TESTS)
        if any(part in name for part in options.files.split(","))
        for mutant in mutants_of(f"{name}.py", (ROOT / PACKAGE / f"{name}.py").read_bytes())
    ]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    known, before = None, []
    if options.again:
        before = [json.loads(path.read_text()) for path in options.again]
        old = [each for summary in before for each in summary["mutants"]]
        known, chosen = [], []
        for each in old:
            if each["outcome"] != "survived":
                known.append(each)
            elif why := _equivalent(mutant := found_again(each)):
                known.append(each | {"outcome": "equivalent", "why": why})
            else:
                chosen.append(mutant)
    command = f"python tools/mutants.py --seed {options.seed} --count {options.count} --minutes {options.minutes:g}"
    command += (f" --files {options.files}" if options.files else "") + (" --again …" if options.again else "")
    facts = {"command": command, "date": time.strftime("%Y-%m-%d"), "seed": options.seed, "possible": len(every)}
    facts |= {"campaigns": [summary["command"] for summary in before]} if options.again else {}
    counts = campaign(chosen, options.minutes, options.out, facts, known).get("counts", {})
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
