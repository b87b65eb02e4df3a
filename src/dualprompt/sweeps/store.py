"""Many runs below one folder: what is finished is reused, what was interrupted goes on, what is new is run.

A run's folder is named after its method and the hash of its identity (config, images, weights, code), so the same
question always finds the same answer, whichever command asks, and never one that other code gave.
"""

from __future__ import annotations

import contextlib
import platform
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from dualprompt.backbones import weights
from dualprompt.backbones.weights import CheckpointInfo
from dualprompt.config import RunConfig
from dualprompt.data.stream import build_stream
from dualprompt.errors import DualPromptError, InterruptedRunError
from dualprompt.files import beside, digest, disk_errors, held, refuse_links, sweep, write_json
from dualprompt.progress import SILENT, Bar, Pace, Progress, RunEnded, Work
from dualprompt.run.code import code_of
from dualprompt.run.folder import Run
from dualprompt.run.identity import Identity, config_digest
from dualprompt.sweeps.obtained import AGAIN, BUSY, Count, Obtained, Workers, first_line, held_run
from dualprompt.sweeps.processes import side_by_side
from dualprompt.training import group
from dualprompt.training.loop import train
from dualprompt.training.setup import Setup, prepare, view_of

FAILURE = "failure.json"
ASIDE = "aside"  # the folder below the store for runs that made way for new ones


class Fresh:
    """The wish to run everything anew. A command renews a run once, however often it asks for it."""

    def __init__(self) -> None:
        self.renewed: set[Path] = set()

    def stale(self, run: Run) -> bool:
        """Return whether what lies in the folder of a run must make way."""
        if run.folder in self.renewed:
            return False
        self.renewed.add(run.folder)
        return group.is_run(run.folder)


def obtain(
    configs: Sequence[RunConfig],
    root: Path,
    progress: Progress = SILENT,
    jobs: int | Workers = 1,
    fresh: Fresh | None = None,
) -> list[Obtained]:
    """Return the run of every config, in their order, having run below `root` what was not finished there.

    With several `jobs`, so many runs are carried out at a time, each in a process of its own; workers decide that
    themselves. A run that fails is put on record in its folder while the others go on; the next call tries it again.
    With `fresh`, what is there already is set aside and run anew.
    """
    if isinstance(jobs, int) and jobs < 1:
        raise DualPromptError(f"--jobs must be at least 1, found {jobs}")
    identities = _Identities(progress)
    asked = [_asked(config, root, identities) for config in configs]
    every = {each.run.folder: each for each in asked}
    stale = [each.run for each in every.values() if (fresh and fresh.stale(each.run)) or _mixed(each.run)]
    _set_aside(stale, root, progress)
    missing = [each for each in every.values() if not each.run.finished]
    if len(missing) < len(every):
        progress.note(f"{len(every) - len(missing)} of {len(every)} runs are in {root} already")
    if missing:
        if others := _Others(missing, root, identities).count:
            progress.note(f"{others} results of other code are in {root}; they stay there, and are not reused")
        with progress.bar(Work("runs", len(missing), "runs")) as bar:
            tally = _Tally(missing, progress, bar)
            if not isinstance(jobs, int):
                jobs.carry_out(missing, progress, tally.count)
            elif jobs == 1:
                one_by_one(missing, progress, tally.count)
            else:
                side_by_side(missing, jobs, tally.count)
        every |= {each.run.folder: each for each in tally.done}
    return [every[each.run.folder] for each in asked]


def finished(
    configs: Sequence[RunConfig], root: Path, progress: Progress = SILENT, any_code: bool = False
) -> list[Obtained | None]:
    """Return the run of every config that is finished below `root`, and None for the others; nothing is run.

    With `any_code`, the latest that other code made stands for one that the code at hand has not made.
    """
    identities = _Identities(progress)
    asked = [_asked(config, root, identities) for config in configs]
    found = [each if each.run.finished and not _mixed(each.run) else None for each in asked]
    others = _Others([each for each, own in zip(asked, found, strict=True) if own is None], root, identities)
    if not any_code:
        if others.count:
            progress.note(f"{others.count} results of other code are in {root}; --any-code shows them too")
        return found
    return [own or others.latest(each) for each, own in zip(asked, found, strict=True)]


class _Others:
    """Finished runs of other code below a folder that are, but for it, those that are asked for."""

    def __init__(self, asked: Sequence[Obtained], root: Path, identities: _Identities) -> None:
        self.identities = identities
        wanted = {self._key(each) for each in asked}
        methods = {each.config.method["name"] for each in asked}
        self.runs: dict[Identity, list[Run]] = {}
        for folder in sorted(root.glob("*-" + 12 * "[0-9a-f]")):
            run = Run(folder)
            if folder.name[:-13] in methods and run.finished:
                with contextlib.suppress(DualPromptError):  # it is damaged; whoever asks for that one will be told
                    key = _but_for_code(run.identity)
                    if key in wanted and run.of_other_code:
                        self.runs.setdefault(key, []).append(run)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self.runs.values()))

    def latest(self, asked: Obtained) -> Obtained | None:
        """Return the one that was begun last of those that stand for a run."""
        runs = self.runs.get(self._key(asked))
        if not runs:
            return None
        return replace(asked, run=max(runs, key=lambda run: run.manifest()["started"]), other_code=True)

    def _key(self, asked: Obtained) -> Identity:
        return _but_for_code(self.identities.of(asked.config))


def _but_for_code(identity: Identity) -> Identity:
    return replace(identity, code=None)


def _mixed(run: Run) -> bool:
    """Return whether a folder holds a run that was continued by other code, and so is nobody's answer."""
    return run.manifest_path.is_file() and run.code_changed


def _set_aside(runs: Sequence[Run], root: Path, progress: Progress) -> None:
    """Move runs to where no question finds them; nothing is deleted."""
    for run in runs:
        with held(run.folder, f"run {run.folder}: {BUSY}"), disk_errors(run.folder):
            place = root / ASIDE
            refuse_links(place, itself=True)
            place.mkdir(exist_ok=True)
            run.folder.rename(beside(place / run.folder.name))
    if runs:
        progress.note(f"{len(runs)} runs that were there are now in {root / ASIDE}; new ones take their place")


def _asked(config: RunConfig, root: Path, identities: _Identities) -> Obtained:
    if config.devices * config.nodes > 1:
        raise DualPromptError("tables and sweeps give each run one device: set devices and nodes to 1, and use --jobs")
    resolved = group.plan([config], baseline=False)[0].config
    identity = identities.of(resolved)
    run = Run(root / _name(resolved, identity))
    refuse_links(run.folder, itself=True)
    if run.manifest_path.is_file() and run.manifest()["identity"] != asdict(identity):
        raise DualPromptError(f"{run.folder} holds another run than its name says; move it elsewhere")
    return Obtained(run, resolved)


def _name(config: RunConfig, identity: Identity) -> str:
    return f"{config.method['name']}-{digest(asdict(identity))[:12]}"


class _Identities:
    """What decides the result of each of many configs; weights and images that several share are read once."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.weights: dict[tuple[str, int], CheckpointInfo] = {}
        self.images: dict[str, str] = {}

    def of(self, config: RunConfig) -> Identity:
        name, order = config.backbone.name, config.benchmark
        which = name, config.seed if weights.drawn(name) else 0
        if which not in self.weights:
            self.weights[which] = weights.read(name, self.progress, config.seed).info
        info = self.weights[which]
        view = view_of(config, info)
        seed = config.seed if order.order_follows_run else 0
        key = digest([order.model_dump(mode="json"), seed, asdict(view.store)])
        if key not in self.images:
            self.images[key] = build_stream(order, config.seed, view.store, self.progress).fingerprint
        return Identity(config_digest(config), self.images[key], info.sha256, code_of(config))


class _Tally:
    """Counts finished runs, and says how long the others will take, by the epochs that each has."""

    def __init__(self, missing: Sequence[Obtained], progress: Progress, bar: Bar) -> None:
        self.total, self.progress, self.bar = len(missing), progress, bar
        self.epochs_left = sum(each.config.train.epochs for each in missing)
        self.epochs_done = 0
        self.done: list[Obtained] = []
        self.began = time.monotonic()

    def count(self, asked: Obtained, error: str | None, details: str) -> None:
        """Note that a run has come to its end, or why it has not."""
        record = asked.run.folder / FAILURE
        if error is None:
            record.unlink(missing_ok=True)
            outcome = float(asked.run.result()["average_accuracy"])
        else:
            if error != BUSY:  # then the folder is somebody else's
                moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                write_json(record, {"error": error, "time": moment, "details": details})
            outcome = error
        self.done.append(replace(asked, error=error))
        self.epochs_done += asked.config.train.epochs
        self.epochs_left -= asked.config.train.epochs
        elapsed = time.monotonic() - self.began
        pace = Pace(elapsed / len(self.done), left=elapsed / self.epochs_done * self.epochs_left)
        self.bar.advance()
        self.bar.remark(pace)
        self.progress.receive(RunEnded(len(self.done), self.total, asked.name, outcome, pace))


def one_by_one(missing: Sequence[Obtained], progress: Progress, count: Count, patience: float = 0) -> None:
    """Carry runs out in this process, where they share images and frozen features.

    It waits for another process that holds the folder of a run, but not longer than `patience` seconds.
    """
    setup = None
    for asked in missing:
        try:
            with held_run(asked.run.folder, patience):
                if not asked.run.finished:  # by another process, since we looked
                    setup = _carry_out(asked, progress, setup)
        except InterruptedRunError as stop:
            raise InterruptedRunError(f"{stop}; {AGAIN}") from None
        except DualPromptError as error:
            count(asked, str(error), "")
        except Exception as error:  # noqa: BLE001 — one run's bug or lack of memory must not cost the others
            setup = None  # which may hold the memory that was lacking
            count(asked, first_line(error), traceback.format_exc())
        else:
            count(asked, None, "")


def _carry_out(asked: Obtained, progress: Progress, shared: Setup | None) -> Setup:
    run = asked.run
    setup = prepare(group.elsewhere_config(run.folder, asked.config, {}), progress, share=shared)
    sweep(run.folder)
    if run.manifest_path.is_file():
        run.check_same(setup.identity)
    else:
        if run.folder.name != _name(asked.config, setup.identity):
            raise DualPromptError(
                f"the images, the weights or the code on {platform.node()} are not those that the run was asked for; "
                "give every machine the same, and leave them as they are while runs go on"
            )
        Run.create(run.folder, asked.config, setup.stream, setup.weights, setup.precision)
    progress.note(f"{asked.config.method['name']}, seed {asked.config.seed} → {run.folder}")
    with run.as_begun(progress):
        train(setup, run, progress)
    return setup
