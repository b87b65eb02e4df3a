"""One self-contained page about runs and studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualprompt.errors import DualPromptError
from dualprompt.progress import SILENT, Progress
from dualprompt.report import page, study_files
from dualprompt.report.run_files import finished_runs
from dualprompt.report.sections import Labelled, of_runs, of_study
from dualprompt.report.tables import label
from dualprompt.run.identity import config_digest
from dualprompt.training import group


def report(paths: Sequence[Path], out: Path | None = None, progress: Progress = SILENT) -> Path:
    """Write a page about the runs, groups of runs and studies in `paths`; return its place."""
    if not paths:
        raise DualPromptError("give the folder of a run or a study")
    for path in paths:
        if not path.is_dir():
            raise DualPromptError(f"{path} does not exist; give the folder of a run or a study")
        if not study_files.is_study(path) and not group.is_run(path):
            raise DualPromptError(f"{path} holds neither a run (manifest.json) nor a study (study.json)")
    studies = [path for path in paths if study_files.is_study(path)]
    labelled = _labelled([path for path in paths if path not in studies])
    sections = of_runs(labelled, progress) if labelled else []
    for number, path in enumerate(studies):
        name = study_files.read(path).study
        taken = any(section.name == name for section in sections)
        sections.append(of_study(path, f"{name}-{number + 1}" if taken else name))
    return page.write(out or paths[0] / "report.html", *_title(labelled, studies), sections)


def _title(labelled: Labelled, studies: Sequence[Path]) -> tuple[str, str]:
    if labelled:
        first = labelled[0][1]
        methods = list(dict.fromkeys(label(result) for _, result in labelled))
        seeds = sorted({result["seed"] for _, result in labelled})
        title = f"{' · '.join(methods[:3])}{' …' if len(methods) > 3 else ''} on {first['benchmark']}"
        name = Path(first["backbone"]).name
        numbers = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        return title, f"backbone {name}, recipe {first['recipe']}, {numbers}"
    value = study_files.read(studies[0])
    title = value.title if len(studies) == 1 else f"{len(studies)} studies"
    return title, f"{value.benchmark}, backbone {Path(value.backbone).name}, recipe {value.recipe}"


def _labelled(paths: Sequence[Path]) -> Labelled:
    """Return the runs of all folders; where one method has several configs, labels say which folder is which."""
    found = [(path, run) for path in paths for run in finished_runs(path)]
    digests: dict[str, set[str]] = {}
    for _, run in found:
        config = run.config().model_copy(update={"seed": 0})
        digests.setdefault(label(run.result()), set()).add(config_digest(config))
    labelled = []
    for path, run in found:
        result = run.result()
        name = label(result)
        if len(digests[name]) > 1 and len(paths) > 1:
            result |= {"label": f"{name}, {path.name}"}
        labelled.append((run, result))
    return labelled
