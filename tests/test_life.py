"""Any sequence of changes, kills among them, keeps a model whole, and nothing that was forgotten is ever answered."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dualprompt.learner import ContinualLearner
from dualprompt.model import saved, versions
from sandbox import CLASSES, World, pictures

PROMPTS = {"g_layers": [1], "e_layers": [2, 3], "g_length": 2, "e_length": 2, "train.batch_size": 8, "train.epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    "dualprompt-lda": {},
    "ridge": {},
    "dualprompt-rp": {**PROMPTS, "projection": 24},
    "dualprompt": {**PROMPTS, "align_steps": 5},
}
NAMES = ("oak", "yew", "rowan")  # that classes may be given
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class Killed(BaseException):
    """Stands for the end of the process."""


class Killer:
    """Ends what is done to files below a folder at the n-th change, and lets nothing be changed from then on.

    That is what SIGKILL leaves on a disk (`tests/test_versions.py` has it in earnest), without a new process.
    """

    def __init__(self) -> None:
        self.folder, self.left = "", 0
        sys.addaudithook(self._hear)  # which can never be removed

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if not self.folder or event not in CHANGES or not str(details[0]).startswith(self.folder):
            return
        if event == "open" and details[1] in (None, "r", "rb"):
            return
        self.left -= 1
        if self.left < 0:
            raise Killed

    def do(self, folder: Path, at: int, work: Callable[[], object]) -> bool:
        """Return whether some work was done before it was killed."""
        self.folder, self.left = str(folder), at
        try:
            work()
        except Killed:
            return False
        finally:
            self.folder = ""
        return True


KILLER = Killer()


Knows = dict[str, frozenset[int]]  # classes, and the lessons that taught each, by their numbers


class Life(RuleBasedStateMachine):
    """A model on disk, and beside it what each of its versions must know and answers."""

    world: World
    method: str

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="life-"))
        self.model = self.root / "model"
        self.images = [image for name in CLASSES for image in pictures(self.world, name, "test")[:1]]
        learner = ContinualLearner(str(self.world.weights), self.method, options=METHODS[self.method], device="cpu")
        self.taught(learner, ["ash", "birch"])
        learner.save(self.model)
        self.knows: dict[int, Knows] = {}  # what each version must know, worked out here
        self.known: dict[int, Any] = {}  # what each version answers
        self.gone: set[str] = set()  # forgotten for good
        self.note(dict.fromkeys(("ash", "birch"), frozenset({1})))

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def taught(self, learner: ContinualLearner, names: list[str]) -> None:
        learner.learn({name: pictures(self.world, name)[:4] for name in names}, work=self.root / "work")

    @property
    def now(self) -> Knows:
        return self.knows[versions.listed(self.model)[-1].number]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.now)

    def load(self) -> ContinualLearner:
        return ContinualLearner.load(self.model, "cpu")

    def answers(self) -> Any:
        learner = self.load()
        if not learner.classes:
            return learner.classes, []
        answers = learner.predict(self.images, top_k=99)
        assert {score.label for answer in answers for score in answer.top} == set(learner.classes)
        for answer in answers:
            assert sum(score.probability for score in answer.top) == pytest.approx(1, abs=1e-4)
        return learner.classes, [[score.probability for score in answer.top] for answer in answers]

    def note(self, knows: Knows) -> None:
        number = versions.listed(self.model)[-1].number
        self.knows[number], self.known[number] = knows, self.answers()

    def change(self, do: Callable[[ContinualLearner], object], kill: int | None, knows: Knows) -> bool:
        """Change the model and save it, perhaps killed meanwhile; return whether one is there that `knows` so."""
        learner, number = self.load(), versions.listed(self.model)[-1].number
        KILLER.do(self.root, 10**9 if kill is None else kill, lambda: (do(learner), learner.save(self.model)))
        changed = versions.listed(self.model)[-1].number != number
        if changed:
            self.note(knows)
        else:
            assert self.answers() == self.known[number]
        return changed

    def some(self, data: st.DataObject, least: int = 1) -> list[str]:
        return data.draw(st.lists(st.sampled_from(self.classes), min_size=least, max_size=2, unique=True))

    kills = st.none() | st.integers(0, 14)

    @rule(data=st.data(), kill=kills)
    def learn(self, data: st.DataObject, kill: int | None) -> None:
        left = [name for name in CLASSES if name not in self.classes]
        if left:
            names = data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=2, unique=True))
            knows = self.now | dict.fromkeys(names, frozenset({self.load()._model.next_id}))
            if self.change(lambda learner: self.taught(learner, names), kill, knows):
                self.gone -= set(names)

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), kill=kills)
    def more(self, data: st.DataObject, kill: int | None) -> None:
        names = self.some(data)
        images = {name: pictures(self.world, data.draw(st.sampled_from(CLASSES)))[4:6] for name in names}
        model, knows = self.load()._model, self.now
        if not model.method.takes_more:  # then they are a further lesson
            knows = knows | {name: knows[name] | {model.next_id} for name in names}
        self.change(lambda learner: learner.more(images), kill, knows)

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), kill=kills)
    def rename(self, data: st.DataObject, kill: int | None) -> None:
        free = [name for name in (*NAMES, *CLASSES) if name not in self.classes]
        [old], new = self.some(data)[:1], data.draw(st.sampled_from(free))
        knows = {new if name == old else name: own for name, own in self.now.items()}
        if self.change(lambda learner: learner.rename(old, new), kill, knows):
            self.gone.discard(new)

    @precondition(lambda self: len(self.classes) > 1)
    @rule(data=st.data(), kill=kills)
    def merge(self, data: st.DataObject, kill: int | None) -> None:
        names = self.some(data, 2)
        into = data.draw(st.sampled_from([*self.classes, *NAMES]))
        parts = {*names, *({into} & set(self.classes))}
        one = frozenset[int]().union(*(self.now[name] for name in parts))
        knows = {name: own for name, own in self.now.items() if name not in parts} | {into: one}
        if self.change(lambda learner: learner.merge(names, into), kill, knows):
            self.gone.discard(into)

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), kill=kills)
    def forget(self, data: st.DataObject, kill: int | None) -> None:
        [name] = self.some(data)[:1]
        knows = {other: own for other, own in self.now.items() if other != name}
        self.change(lambda learner: learner.forget(name, "class"), kill, knows)

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), kill=kills)
    def forget_lesson(self, data: st.DataObject, kill: int | None) -> None:
        """What it taught goes; a class that other lessons taught too stays."""
        lesson = data.draw(st.sampled_from(sorted(frozenset[int]().union(*self.now.values()))))
        knows = {name: own - {lesson} for name, own in self.now.items() if own != {lesson}}
        self.change(lambda learner: learner.forget(lesson, "task"), kill, knows)

    @precondition(lambda self: self.classes)
    @rule(data=st.data(), kill=kills)
    def purge(self, data: st.DataObject, kill: int | None) -> None:
        [name] = self.some(data)[:1]
        owners = versions.holders(self.model, name, "class")
        knows = {other: own for other, own in self.now.items() if other != name}
        if self.change(lambda learner: learner.forget(name, "class"), None, knows):
            done = KILLER.do(self.root, 99 if kill is None else kill, lambda: versions.purge(self.model, owners))
            if not done:  # whoever is killed says nothing, and the command is given again
                versions.purge(self.model, owners)
            self.gone.add(name)
            for version in versions.listed(self.model):
                assert name not in version.classes

    @precondition(lambda self: len(versions.listed(self.model)) > 1)
    @rule(data=st.data(), kill=kills)
    def rollback(self, data: st.DataObject, kill: int | None) -> None:
        *earlier, current = versions.listed(self.model)
        number = data.draw(st.none() | st.sampled_from([version.number for version in earlier]))
        done = KILLER.do(
            self.root, 99 if kill is None else kill, lambda: versions.rollback(self.model, number, device="cpu")
        )
        now = versions.listed(self.model)[-1].number
        back = earlier[-1].number if number is None else number
        if done and now == current.number:  # nothing but the number would have been another
            assert self.known[back] == self.known[now]
        assert now in (current.number, current.number + 1)
        back = back if now > current.number else now
        expected, found = self.known[back], self.answers()
        assert found[0] == expected[0]
        torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), rtol=0, atol=1e-5)
        self.note(self.knows[back])

    @invariant()
    def everything_is_whole(self) -> None:
        *earlier, current = versions.listed(self.model)
        assert len(earlier) <= saved.KEPT
        for version in (*earlier, current):
            assert version.classes == self.known[version.number][0]
            assert set(version.classes) == set(self.knows[version.number])
            assert not self.gone & set(version.classes)
        for version in earlier:
            saved.read(self.model, version.number)  # its tensors have the checksum that it names


@pytest.mark.parametrize("lives", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_lives_through_anything(world: World, method: str, lives: int) -> None:
    machine = type("LifeOf", (Life,), {"world": world, "method": method})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=lives,
                stateful_step_count=10,
                deadline=None,
                derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    finally:
        torch.set_num_threads(threads)
