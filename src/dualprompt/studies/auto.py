"""Positions and lengths found automatically under a budget of runs, which the paper leaves as future work.

Optuna proposes settings; each is run seed by seed and given up when it falls behind the median after a seed. Trials
lie in an SQLite file, runs in the store: the same command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dualprompt.errors import DualPromptError
from dualprompt.files import beside, digest, disk_errors, refuse_links
from dualprompt.pictures.kinds import Line, Lines
from dualprompt.progress import counted
from dualprompt.report.tables import explained
from dualprompt.report.verdict import verdict_on
from dualprompt.run.code import code_of
from dualprompt.run.identity import config_digest
from dualprompt.seeds import derive
from dualprompt.studies.positions import attached
from dualprompt.studies.study import HELD_OUT, Context, Outcome, Row, Setting, Study, best
from dualprompt.studies.words import about, between, finding, spread, table
from dualprompt.sweeps import paper

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

BUDGET = 24  # runs
LONGEST = 4  # layers of a span


def run(context: Context) -> Outcome:
    """Search within the budget; set the best found beside the paper's choice, with the same seeds, on test images."""
    optuna = _optuna()
    budget = BUDGET if context.budget is None else context.budget
    if budget < context.seeds:
        raise DualPromptError(f"--budget counts runs and must be at least {context.seeds}, one setting, found {budget}")
    study = _open(optuna, context)
    _take_up(optuna, study)
    search = _Search(optuna, study, context, budget)
    search.go()
    chosen = best(
        [row for row in search.rows.values() if len(row.results) == context.seeds] or list(search.rows.values())
    )
    papers = _setting(_papers(context.depth), context.depth)
    settings = [chosen.setting] if chosen.setting.options == papers.options else [chosen.setting, papers]
    tested = context.test(settings)
    return _outcome(search, budget, chosen, papers, tested)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise DualPromptError(
            f"study auto needs the extra 'search' ({error}): pip install 'dualprompt[search]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open(optuna: Any, context: Context) -> optuna.Study:
    """Open the trials of this question; another config, code or number of seeds is another question."""
    config = context.config(HELD_OUT)
    name = digest([config_digest(config), context.seeds, code_of(config)])[:12]
    trials = context.folder / "trials.db"
    with disk_errors(context.folder):
        context.folder.mkdir(parents=True, exist_ok=True)
        refuse_links(context.folder)
        if context.fresh and trials.is_file():
            trials.rename(beside(trials))
    return optuna.create_study(
        storage=f"sqlite:///{trials.absolute()}",
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=0),
    )


def _take_up(optuna: Any, study: optuna.Study) -> None:
    """Ask again for trials that an interrupted search left; their finished runs are in the store."""
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params, user_attrs={"again": trial.number})


class _Search:
    """The trials so far, and the runs that they cost."""

    def __init__(self, optuna: Any, study: optuna.Study, context: Context, budget: int) -> None:
        self.study, self.context, self.budget = study, context, budget
        self.states, self.sampler = optuna.trial.TrialState, optuna.samplers.TPESampler
        self.rows: dict[int, Row] = {}  # by trial

    def go(self) -> None:
        """Try settings until the budget is spent; the paper's choice is the first."""
        if not self.study.get_trials(deepcopy=False):
            self.study.enqueue_trial(_papers(self.context.depth))
        used = self._recall()
        while used + self.context.seeds <= self.budget:
            count = min(self.context.jobs, (self.budget - used) // self.context.seeds)
            used += self._race([self._ask() for _ in range(count)])

    def _recall(self) -> int:
        """Take over the trials of earlier calls, whose runs are in the store; return how many they were."""
        trials = self.study.get_trials(states=(self.states.COMPLETE, self.states.PRUNED))
        used = 0
        for seed in range(self.context.seeds):
            done = [trial for trial in trials if len(trial.intermediate_values) > seed]
            if done:
                self._seed(done, seed)
            used += len(done)
        return used

    def _ask(self) -> Trial:
        # A sampler for each trial, so that an interrupted search goes on as it would have.
        finished = self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.PRUNED))
        self.study.sampler = self.sampler(seed=derive(0, "auto", len(finished)) % 2**32, n_startup_trials=5)
        trial = self.study.ask()
        _propose(trial, self.context.depth)
        return trial

    def _race(self, trials: Sequence[Trial]) -> int:
        """Run trials seed by seed, giving up what falls behind the median; return the runs that were spent."""
        alive, spent = list(trials), 0
        for seed in range(self.context.seeds):
            self._seed(alive, seed)
            spent += len(alive)
            for trial in list(alive):
                row, last = self.rows[trial.number], seed + 1 == self.context.seeds
                failed = len(row.results) <= seed
                if not failed:
                    trial.report(row.mean() or 0.0, seed)
                if failed or last or trial.should_prune():
                    states = self.states
                    state = states.FAIL if failed else states.COMPLETE if last else states.PRUNED
                    self.study.tell(trial, row.mean() if state == states.COMPLETE else None, state=state)
                    alive.remove(trial)
        return spent

    def _seed(self, trials: Sequence[Trial | FrozenTrial], seed: int) -> None:
        """Run or reuse one more seed of each trial."""
        if not trials:
            return
        first = self.context.config({}).seed
        context = replace(self.context, seeds=1, overrides=self.context.overrides | {"seed": first + seed})
        found = context.search("search", [_setting(trial.params, context.depth) for trial in trials])
        for trial, row in zip(trials, found, strict=True):
            before = self.rows[trial.number].obtained if seed else ()
            self.rows[trial.number] = replace(row, obtained=(*before, *row.obtained))


def _papers(depth: int) -> dict[str, Any]:
    """Return the paper's choice as a trial has it, as far as the backbone has the layers."""
    (g_first, *_), (e_first, *_) = paper.G_LAYERS, paper.E_LAYERS
    first = {"g_first": min(g_first, depth), "e_first": min(e_first, depth)}
    layers = {"g_layers": len(paper.G_LAYERS), "e_layers": len(paper.E_LAYERS)}
    return first | layers | {"g_length": paper.G_LENGTH, "e_length": paper.E_LENGTH}


def _propose(trial: Trial, depth: int) -> None:
    """Let a trial draw where and how long its prompts are."""
    for kind in ("g", "e"):
        trial.suggest_int(f"{kind}_first", 1, depth)
        trial.suggest_int(f"{kind}_layers", 0 if kind == "g" else 1, LONGEST)
        trial.suggest_categorical(f"{kind}_length", paper.LENGTHS)


def _setting(values: dict[str, Any], depth: int) -> Setting:
    """Return the setting of a trial; a span that leaves the backbone ends with its last layer."""
    g, e = (
        range(values[f"{kind}_first"], min(depth, values[f"{kind}_first"] + values[f"{kind}_layers"] - 1) + 1)
        for kind in ("g", "e")
    )
    where = attached(g, e)
    options = where.options | {"method.g_length": values["g_length"], "method.e_length": values["e_length"]}
    return Setting(f"{where.label}, L_g {values['g_length']}, L_e {values['e_length']}", options)


def _outcome(search: _Search, budget: int, chosen: Row, papers: Setting, tested: list[Row]) -> Outcome:
    rows = list(search.rows.values())
    whole = [row for row in rows if len(row.obtained) == search.context.seeds]
    given_up = len(rows) - len(whole)
    summary = (
        f"Within {counted(budget, 'run')} ({len(rows)} settings, {given_up} given up early) the search chose "
        f"{chosen.setting.label}."
    )
    verdicts = []
    if len(tested) == 1:
        summary = f"Within {counted(budget, 'run')} nothing better than the paper's choice was found: {papers.label}."
    else:
        claim = f"the search's choice beats the paper's, {papers.label}, with the same training and seeds"
        verdicts = [verdict_on(claim, between(tested[0], tested[1]), of="on test images")]
    ranked = sorted(whole, key=lambda row: -(row.mean() or 0))[:10]
    sheet = table(
        f"auto: {about(rows)}",
        "setting",
        [ranked, tested],
        marked=[chosen],
        remarks=[f"the {len(ranked)} best of {len(rows)} settings; the paper's choice was the first tried"],
    )
    return Outcome(
        finding(summary, verdicts),
        (sheet,),
        {"search": _picture(rows)},
        (*rows, *tested),
        chosen.setting.options,
        verdicts=tuple(verdicts),
    )


def _picture(rows: Sequence[Row]) -> Lines:
    finished = [(float(number), row) for number, row in enumerate(rows, start=1) if row.results]
    numbers, found = [number for number, _ in finished], [row.mean() or 0.0 for _, row in finished]
    so_far = [max(found[: place + 1]) for place in range(len(found))]
    lines = [Line("setting", numbers, found, spread([row for _, row in finished]))]
    lines.append(Line("best so far", numbers, so_far))
    title = "; ".join(["search of positions and lengths", *explained(len(row.results) for _, row in finished)])
    return Lines(title, "setting", "average accuracy A (%), validation", lines)


STUDY = Study(
    "auto",
    "Positions and lengths found automatically",
    "an automatic choice is left as future work",
    run,
    seeds=2,
    searches=True,
    mini_budget=12,
    goes_on=True,
)
