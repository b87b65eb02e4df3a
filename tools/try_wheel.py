"""Try the wheel as someone who has just installed it: in a clean environment, in an empty folder, without a network.

    python -m build                                  # or: make dist
    python tools/try_wheel.py                        # with this Python: no extras, then each extra by itself
    python tools/try_wheel.py --python python3.13 --extras none
    python tools/try_wheel.py --extras serve,export --keep /tmp/tried

Every step is one line; the first that goes wrong ends it, with what was printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 30_000_000  # bytes of a distribution
TINY = [
    "--benchmark.train_per_class", "2", "--benchmark.test_per_class", "2", "--backbone.input_size", "64",
    "--train.epochs", "1", "--train.batch_size", "8", "--device", "cpu",
]  # fmt: skip
PHOTOS = """
import pathlib, numpy, PIL.Image
rng = numpy.random.default_rng(0)
for label, colour in (("red", (200, 40, 40)), ("blue", (40, 60, 200))):
    for split, count in (("train", 6), ("test", 3)):
        folder = pathlib.Path("photos", split, label); folder.mkdir(parents=True)
        for number in range(count):
            pixels = numpy.clip(colour + rng.normal(0, 30, (80, 100, 3)), 0, 255).astype("uint8")
            PIL.Image.fromarray(pixels).save(folder / f"{number}.jpg")
"""
HEIC = "import PIL.Image, pillow_heif; pillow_heif.from_pillow(PIL.Image.open('photos/test/red/0.jpg')).save('a.heic')"
FRAME = "import dualprompt; print(dualprompt.load_run('runs/mini').frame().to_string())"


class StepError(Exception):
    """A step that did not do what it should."""


@dataclass(frozen=True)
class Place:
    """A clean environment, and an empty folder to work in."""

    python: Path
    work: Path

    @property
    def command(self) -> str:
        """The installed command."""
        return str(self.python.with_name("dualprompt"))

    @property
    def environment(self) -> dict[str, str]:
        """No settings of whoever tries, and no hub."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DUALPROMPT", "VIRTUAL"))
        }
        own = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "DUALPROMPT_CACHE": str(self.work / "cache")}
        return kept | own | {"HOME": str(self.work), "MPLCONFIGDIR": str(self.work / "matplotlib")}

    def run(self, *words: str, code: int = 0, timeout: float = 1800) -> str:
        """Run a program in the folder; return what it printed, stderr last."""
        try:
            done = subprocess.run(
                words, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise StepError(f"{' '.join(words)}\ntook longer than {timeout:.0f} s") from None
        if done.returncode != code:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            raise StepError(f"{' '.join(words)}\nended with {done.returncode} instead of {code}:\n{said}")
        return done.stdout + done.stderr

    def dualprompt(self, *words: str, code: int = 0) -> str:
        """Run the command."""
        return self.run(self.command, *words, code=code)

    def pip(self, *words: str) -> None:
        """Run pip."""
        self.run(str(self.python), "-m", "pip", "--quiet", *words, timeout=3600)

    def has(self, *modules: str) -> bool:
        """Return whether modules can be imported."""
        find = f"import importlib.util as u; print(all(u.find_spec(m) for m in {modules!r}))"
        return self.run(str(self.python), "-c", find).strip() == "True"

    def installed(self) -> set[str]:
        """Return the distributions that are installed."""
        listed = self.run(str(self.python), "-m", "pip", "list", "--format", "json")
        return {each["name"] for each in json.loads(listed[: listed.rindex("]") + 1])}


def step(text: str, do: Callable[[], object]) -> None:
    """Do something, and say so."""
    start = time.monotonic()
    do()
    sys.stdout.write(f"ok {time.monotonic() - start:6.1f} s  {text}\n")
    sys.stdout.flush()


def expect(condition: object, text: str) -> None:
    """Complain unless something holds."""
    if not condition:
        raise StepError(text)


def check_contents(wheel: Path, sdist: Path) -> None:
    """See that both hold every file of the package, and neither the tests nor anything large."""
    tracked = subprocess.run(
        ["git", "ls-files", "src/dualprompt"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {name.removeprefix("src/") for name in tracked}
    with zipfile.ZipFile(wheel) as opened:
        inside = set(opened.namelist())
    with tarfile.open(sdist) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    expect(wanted <= inside, f"{wheel.name} lacks {sorted(wanted - inside)[:5]}")
    strange = {name for name in inside if not name.startswith("dualprompt")}
    expect(not strange, f"{wheel.name} holds {sorted(strange)[:5]}")
    lacking = {f"src/{name}" for name in wanted} | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    expect(lacking <= packed, f"{sdist.name} lacks {sorted(lacking - packed)[:5]}")
    expect(not [name for name in packed if name.startswith("tests/")], f"{sdist.name} holds the tests")
    for path in (wheel, sdist):
        expect(path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size:,} bytes")


def plain(place: Place, version: str) -> None:
    """Try what needs no extra."""
    python = str(place.python)
    where = "import dualprompt; print(dualprompt.__file__)"
    told = place.run(python, "-c", where).strip()
    expect(Path(told).is_relative_to(place.python.parent.parent), f"dualprompt was imported from {told}")
    step("--version", lambda: expect(version in place.dualprompt("--version"), "another version"))
    step("pip check", lambda: place.pip("check"))
    mini = ["run", "mini", *TINY, "--out", "runs/mini"]
    step("run mini", lambda: expect("A (%)" in place.dualprompt(*mini, "--no-baseline"), "no table"))
    step("list runs", lambda: expect("mini" in place.dualprompt("list", "runs"), "no run"))
    place.run(python, "-c", PHOTOS)
    step("learn", lambda: place.dualprompt("learn", "model", "photos/train"))
    step("evaluate", lambda: place.dualprompt("evaluate", "model", "photos/test"))

    def predict() -> None:
        told = place.dualprompt("predict", "model", "photos/test/red/0.jpg", "--json")
        found = json.loads(told[: told.rindex("]") + 1])
        expect(found[0]["top"][0]["label"] == "red", f"a red picture is {found[0]}")

    step("predict", predict)
    step("completion", lambda: place.run("bash", "-n", "-c", place.dualprompt("completion", "bash")))


def serve(place: Place) -> None:
    """Start the server, ask it something, and end it."""
    words = [place.command, "serve", "model", "--port", "0", "--json"]
    with subprocess.Popen(
        words, cwd=place.work, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            told = "".join(iter(server.stdout.readline, "}\n")) + "}"
            with urllib.request.urlopen(json.loads(told)["url"] + "/healthz", timeout=20) as answer:
                expect(answer.status == 200, f"/healthz: {answer.status}")
        finally:
            server.terminate()


def heic(place: Place) -> None:
    """Make a HEIC picture, and look at it."""
    place.run(str(place.python), "-c", HEIC)
    place.dualprompt("predict", "model", "a.heic")


def heic_missing(place: Place) -> str:
    """Look at what begins as a HEIC picture does."""
    (place.work / "none.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64))
    return place.dualprompt("predict", "model", "none.heic", code=2)


@dataclass(frozen=True)
class Extra:
    """An extra: the modules that it brings, and what needs it."""

    modules: Sequence[str]
    works: Callable[[Place], object]
    missing: Callable[[Place], str] | None = None  # by default the same with exit code 2


def commanded(*words: str) -> tuple[Callable[[Place], object], Callable[[Place], str]]:
    """Return a command that works with an extra and is refused without."""
    return lambda place: place.dualprompt(*words), lambda place: place.dualprompt(*words, code=2)


def tracked(name: str) -> tuple[Callable[[Place], object], Callable[[Place], str]]:
    """Return a run that is shown elsewhere."""
    return commanded(
        "run", "mini", "--method", "simple-cil", *TINY, "--no-baseline", "--out", f"runs/{name}", "--track", name
    )


TABLE = ["table", "main", "--benchmark", "mini", "--methods", "simple-cil", "--seeds", "1", "--against", "none"]
EXTRAS = {
    "cluster": Extra(["ray"], *commanded(*TABLE, "--runs", "runs/ray", *TINY, "--ray")),
    "export": Extra(["onnx", "onnxruntime"], *commanded("export", "model", "--to", "onnx", "--out", "model.onnx")),
    "heif": Extra(["pillow_heif"], heic, heic_missing),
    "pandas": Extra(
        ["pandas"],
        lambda place: place.run(str(place.python), "-c", FRAME),
        lambda place: place.run(str(place.python), "-c", FRAME, code=1),
    ),
    "report": Extra(["jinja2"], *commanded("report", "runs/mini")),
    "search": Extra(
        ["optuna"], *commanded("study", "auto", "mini", "--budget", "2", "--seeds", "1", "--runs", "runs/auto", *TINY)
    ),
    "serve": Extra(["fastapi", "uvicorn"], serve, commanded("serve", "model", "--port", "0")[1]),
    "tensorboard": Extra(["tensorboard"], *tracked("tensorboard")),
    "wandb": Extra(["wandb"], *tracked("wandb")),
}


def try_extra(place: Place, name: str, wheel: Path, constraints: Sequence[str]) -> None:
    """See that an extra is asked for by name where it is missing, and suffices where it is there; remove it again."""
    extra = EXTRAS[name]
    if place.has(*extra.modules):
        step(f"{name}: others bring it", lambda: extra.works(place))
        return
    missing = extra.missing
    assert missing is not None
    step(f"{name}: asked for", lambda: expect(f"dualprompt[{name}]" in missing(place), f"'{name}' is not named"))
    before = place.installed()
    step(f"{name}: installed", lambda: place.pip("install", *constraints, f"{wheel}[{name}]"))
    step(f"{name}: works", lambda: extra.works(place))
    place.pip("uninstall", "--yes", *sorted(place.installed() - before))


def main() -> int:
    """Try what the options name; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter of the environment (default: this one)"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of wheel and sdist (default: dist)")
    parser.add_argument("--extras", default="all", help="all, none, or names with commas (default: all)")
    parser.add_argument("--newest", action="store_true", help="the newest versions instead of those of constraints.txt")
    parser.add_argument("--keep", type=Path, help="a folder for the environment, which stays, and is used again")
    options = parser.parse_args()
    names = {"all": list(EXTRAS), "none": []}.get(options.extras, options.extras.split(","))
    wheels = sorted(options.dist.glob("dualprompt-*.whl"))
    if not wheels or set(names) - set(EXTRAS):
        parser.error(f"no wheel in {options.dist}; make dist" if not wheels else f"extras are {', '.join(EXTRAS)}")
    wheel = wheels[-1]
    version = wheel.name.split("-")[1]
    constraints = [] if options.newest else ["-c", str(ROOT / "constraints.txt")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder / "venv" / "bin" / "python", Path(tempfile.mkdtemp(prefix="empty-", dir=folder)))
        try:
            step("what they hold", lambda: check_contents(wheel, wheel.with_name(f"dualprompt-{version}.tar.gz")))
            if not place.python.exists():
                subprocess.run([options.python, "-m", "venv", str(place.python.parent.parent)], check=True)
            step(
                f"installed with {place.run(str(place.python), '-V').strip()}",
                lambda: place.pip("install", *constraints, str(wheel)),
            )
            place.pip("install", "--no-deps", "--force-reinstall", str(wheel))  # one of the same version may be there
            plain(place, version)
            for name in names:
                try_extra(place, name, wheel, constraints)
        except StepError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
