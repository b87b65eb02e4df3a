"""Runs that belong together: methods and the no-prompt baseline, for one or several seeds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from dualprompt.backbones.weights import absolute_name
from dualprompt.config import Record, RunConfig, parse, read_record
from dualprompt.data.stream import with_absolute_paths
from dualprompt.errors import DualPromptError, InterruptedRunError, LostProcessError
from dualprompt.files import LOCK, disk_errors, held, is_partial, refuse_links, sweep, write_json
from dualprompt.methods.base import METHODS, method_config
from dualprompt.progress import SILENT, Progress, RunBegan, Watch, Work, speaks
from dualprompt.run.folder import Run, config_in
from dualprompt.run.tracking import require
from dualprompt.training.distributed import lost_process
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, kind_of, prepare, refuse_misfits, refuse_single_classes

BASELINE = "frozen-head"


@dataclass(frozen=True)
class Member:
    """One run of a group, and its folder below the group's."""

    folder: str
    config: RunConfig
    line: str | None = None  # what tables call it, where that is more than its method

    @property
    def name(self) -> str:
        """What notes call its method."""
        return self.line or self.config.method["name"]

    def run(self, folder: Path) -> Run:
        """Return its run in the group's folder."""
        run = Run(folder / self.folder)
        run.line = self.line
        return run


class _MemberRecord(Record):
    folder: Annotated[str, Field(pattern=r"^[\w.+=~/-]{1,200}$")]  # ".", "baseline", "seed-3/der++"
    config: dict[str, Any]
    line: str | None = None  # as --methods said it

    @field_validator("folder")
    @classmethod
    def _inside(cls, folder: str) -> str:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ValueError("a member lies in the group's folder")
        return folder


class GroupRecord(Record):
    """What `group.json` holds."""

    members: Annotated[list[_MemberRecord], Field(min_length=1)]


def plan(configs: list[RunConfig], baseline: bool | RunConfig) -> list[Member]:
    """Lay out the runs of one method, a config for each seed, and of its baseline.

    `baseline` is the config of the baseline, whatever its seed; True stands for the method's, with another method
    in it. With one seed the method's run is the group's folder itself.
    """
    members = []
    for given in configs:
        require(given.track)
        config = _resolved(given)
        folder = "." if len(configs) == 1 else f"seed-{config.seed}"
        members.append(Member(folder, config))
        if baseline and config.method["name"] != BASELINE:
            own = config if isinstance(baseline, bool) else baseline
            members.append(Member(str(Path(folder) / "baseline"), beside(given, own)))
    return members


def plan_lines(lines: Mapping[str, RunConfig], seeds: int) -> list[Member]:
    """Lay out the runs of several methods, each under what tables call it, a folder for each.

    Seed after seed, so that the methods share the images of one class order; in each as they were asked for.
    """
    members, folders = [], _folders(lines)
    for number in range(seeds):
        for line, given in lines.items():
            require(given.track)
            config = _resolved(given.model_copy(update={"seed": given.seed + number}))
            folder = folders[line] if seeds == 1 else f"seed-{config.seed}/{folders[line]}"
            members.append(Member(folder, config, None if line == config.method["name"] else line))
    return members


def _folders(lines: Mapping[str, RunConfig]) -> dict[str, str]:
    """Return a folder's name for each line: what it is called, as far as every file system takes it."""
    found: dict[str, str] = {}
    for line in lines:
        name = re.sub(r"[^\w+.=-]+", "-", line)[:80].rstrip(".-")
        taken = sum(other == name or other.startswith(f"{name}~") for other in found.values())
        found[line] = f"{name}~{taken + 1}" if taken else name
    return found


def beside(config: RunConfig, own: RunConfig) -> RunConfig:
    """Return the baseline beside a run: the training values of `own`, under the run's seed and recipe.

    Where the run says how logits are trained, that holds for both, so that tasks of one class are learned by both.
    """
    options = own.method if own.method["name"] == BASELINE else {"name": BASELINE}
    common = {key: value for key, value in config.method.items() if key == "training_logits"}
    train = own.train.model_copy(update={"recipe": config.train.recipe})
    return _resolved(own.model_copy(update={"method": options | common, "train": train, "seed": config.seed}))


def _resolved(config: RunConfig) -> RunConfig:
    """Return the config with every option of its method written out and every path absolute.

    So a run can be continued from any directory.
    """
    method = method_config(config.method).model_dump(mode="json")
    backbone = config.backbone.model_copy(update={"name": absolute_name(config.backbone.name)})
    return config.model_copy(
        update={"method": method, "backbone": backbone, "benchmark": with_absolute_paths(config.benchmark)}
    )


def start(members: list[Member], folder: Path, progress: Progress = SILENT) -> list[Run]:
    """Run every member of a new group in `folder`."""
    _refuse_filled(folder)
    first = prepare(members[0].config, progress)  # whatever is wrong shows before anything is written
    _refuse_unfit(members, first)
    folder = Path(first.fabric.broadcast(str(folder)))  # processes may disagree about a name with the time in it
    with _alone(folder):
        if first.fabric.is_global_zero:
            _refuse_filled(folder)  # by another process, since we looked
            listing = [_listed(member) for member in members]
            write_json(folder / "group.json", {"members": listing})
        return _run(members, folder, progress, first)


def _refuse_unfit(members: list[Member], first: Setup) -> None:
    """Refuse methods that do not fit the tasks or the backbone, all of them before the first is trained."""
    seen = [members[0].config.method]
    for member in members:
        options = method_config(member.config.method)
        refuse_misfits(member.config, first.stream)
        refuse_single_classes(options, first.stream)
        if member.config.method not in seen:
            seen.append(member.config.method)
            METHODS[options.name](options, first.backbones.outline()).accept(kind_of(first.stream))


def _listed(member: Member) -> dict[str, Any]:
    entry = {"folder": member.folder, "config": member.config.model_dump(mode="json")}
    return entry if member.line is None else entry | {"line": member.line}


def _refuse_filled(folder: Path) -> None:
    """Refuse a place for a new group that holds anything but what a killed process left of its beginning."""
    if folder.exists() and not folder.is_dir():
        raise DualPromptError(f"{folder} is a file; choose another --out")
    if is_run(folder):
        again = f"dualprompt resume {shlex.quote(str(folder))}"
        raise DualPromptError(f"{folder} holds a run; continue it with `{again}`, or choose another --out")
    if folder.exists() and not all(is_partial(path) or path.name == LOCK for path in folder.iterdir()):
        raise DualPromptError(f"{folder} is not empty; choose another --out")


def _alone(folder: Path) -> AbstractContextManager[Any]:
    """Keep everybody else from working in a folder of runs; where several processes share a run, the first does so."""
    if not speaks():
        return nullcontext()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return held(folder, f"another process is working on {folder}; wait until that one ends, or stop it first")


def resume(
    folder: Path, progress: Progress = SILENT, elsewhere: dict[str, Any] | None = None, anyway: bool = False
) -> list[Run]:
    """Continue a group, or a single run, where it stopped; what is finished stays as it is.

    `elsewhere` replaces `device`, `devices`, `nodes` or `track`, which do not decide a run's result: it keeps its
    precision. Runs that other code began, or finished beside others that are not, are refused; or, with `anyway`, put
    on record as made by both.
    """
    members = [
        replace(member, config=elsewhere_config(folder / member.folder, member.config, elsewhere or {}))
        for member in members_of(folder)
    ]
    if all((folder / m.folder / "result.json").is_file() for m in members):
        sweep(folder)
        return [member.run(folder) for member in members]
    for member in members:
        require(member.config.track)
    begun = [run for run in (member.run(folder) for member in members) if run.manifest_path.is_file()]
    if not anyway:
        for run in begun:
            run.check_code()
    with _alone(folder):
        if speaks():
            for run in (run for run in begun if not run.finished):
                run.accept_code()
        return _run(members, folder, progress, None)


def elsewhere_config(folder: Path, config: RunConfig, elsewhere: dict[str, Any]) -> RunConfig:
    """Return the config with which a run is carried out elsewhere: in the precision and batches it began with."""
    run = Run(folder)
    began = {"precision": run.precision, "evaluate": run.config().evaluate} if run.manifest_path.is_file() else {}
    return parse(RunConfig, config.model_dump() | began | elsewhere)


def members_of(folder: Path) -> list[Member]:
    """Return the runs that belong to `folder`: those of its group, or itself."""
    refuse_links(folder)
    listing = folder / "group.json"
    if not listing.is_file():
        return [Member(".", Run.open(folder).config())]
    members = []
    for entry in read_record(listing, GroupRecord).members:
        run = Run(folder / entry.folder)
        config = run.config() if run.manifest_path.is_file() else config_in(listing, entry.config)
        members.append(Member(entry.folder, config, entry.line))
    return members


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run or a group of runs."""
    return any((folder / name).is_file() for name in ("group.json", "manifest.json"))


def _run(members: list[Member], folder: Path, progress: Progress, first: Setup | None) -> list[Run]:
    setup, runs = first, [member.run(folder) for member in members]
    finished = [run.finished for run in runs]
    with progress.bar(Work("runs", len(members), "runs", done=sum(finished))) as bar:
        waiting = [(m.name, m.config.seed) for m, done in zip(members, finished, strict=True) if not done]
        watch = Watch(waiting, len(members), bar)
        for number, (member, run) in enumerate(zip(members, runs, strict=True)):
            if finished[number]:
                continue
            if run.manifest_path.is_file():
                run.check_backbone()  # before its images, which may have been replaced as well
            if setup is None or number > 0:
                setup = prepare(member.config, progress, share=setup)
            shown = progress if setup.fabric.is_global_zero else SILENT
            with nullcontext() if run.folder == folder else _alone(run.folder):
                _begin(run, member.config, setup)
                begun = replace(watch.begin(len(setup.stream.experiences)), number=number + 1)
                shown.receive(RunBegan(begun, str(run.folder)))
                with run.as_begun(shown), _continued_by(f"dualprompt resume {shlex.quote(str(folder))}"):
                    train(setup, run, shown, watch.learned)
    return runs


def _begin(run: Run, config: RunConfig, setup: Setup) -> None:
    """Lay down what is to be run, or make sure that it is what was begun."""
    if run.manifest_path.is_file():
        run.check_same(setup.identity)
    if setup.fabric.is_global_zero:
        sweep(run.folder)
        if not run.manifest_path.is_file():
            Run.create(run.folder, config, setup.stream, setup.weights, setup.precision)
    setup.fabric.barrier()


@contextmanager
def _continued_by(command: str) -> Iterator[None]:
    """Say how to continue a run that is stopped or loses one of its processes."""
    try:
        yield
    except InterruptedRunError as stop:
        raise InterruptedRunError(f"{stop}; nothing is lost, continue with: {command}") from None
    except RuntimeError as error:
        if not lost_process(error):
            raise
        raise LostProcessError(
            f"another process of this run ended, so this one did; continue from the last checkpoint with: {command}"
        ) from error
