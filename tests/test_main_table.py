"""The main table: mean and deviation over seeds, grouped as in the paper, with the paper's numbers beside ours."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualprompt.cli import main
from dualprompt.errors import DualPromptError
from dualprompt.methods.base import METHODS
from dualprompt.report.columns import MEASURES
from dualprompt.report.sheet import Column, Sheet, as_latex, as_markdown, as_rich
from dualprompt.report.tables import text, wide
from dualprompt.sweeps import main_table, paper
from sandbox import World, call, contents


@pytest.fixture(scope="module")
def benchmark(world: World) -> Path:
    """A tiny benchmark that bears the name of one of the paper's."""
    values = yaml.safe_load(world.preset.read_text())["benchmark"]
    return world.preset_with("cifar.yaml", benchmark=values | {"name": "split-cifar100"})


@pytest.fixture(scope="module")
def made(benchmark: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[object, ...], Any]:
    """A command that makes the table of two methods over two seeds, and what it printed."""
    root = tmp_path_factory.mktemp("table") / "runs"
    command = ("table", "main", "--benchmark", benchmark, "--methods", "frozen-head,dualprompt,dualprompt:keys=mean")
    command = (*command, "--seeds", 2, "--runs", root, "--train.epochs", 1)
    done = call(*command, "--json")
    assert done.code == 0, done.err
    return command, done.json


def line_of(shown: str, method: str) -> str:
    """The line of a table that begins with a method's name."""
    lines = {line: re.split("[│|&]", line.replace("\\", "").strip("│| "))[0].strip() for line in shown.splitlines()}
    return next(line for line, first in lines.items() if first == method)


def test_mean_and_deviation_over_seeds(made: tuple[tuple[object, ...], Any]) -> None:
    _, value = made
    assert [row["method"] for row in value["rows"]] == ["frozen-head", "dualprompt", "dualprompt:keys=mean"]
    for row in value["rows"]:
        results = [json.loads((Path(run) / "result.json").read_text()) for run in row["runs"]]
        assert row["seeds"] == [result["seed"] for result in results] == [0, 1]
        absent = {
            "forward_transfer",
            "buffer_bytes",
            "area_under_curve",
            "last_accuracy",
            *({"matching_accuracy"} if row["method"] == "frozen-head" else ()),
        }
        for each in MEASURES:
            numbers = [number for result in results if (number := each.of(result)) is not None]
            assert (not numbers) == (each.key in absent), each
            assert row[each.key] == (pytest.approx(statistics.mean(numbers)) if numbers else None)
            assert row[f"{each.key}_std"] == (pytest.approx(statistics.stdev(numbers)) if numbers else None)
        assert row["additional_parameters"] == results[0]["parameters"]["additional"]["count"]
        assert row["kept_mb"] == results[0]["parameters"]["kept"]["mb"]
        assert row["training_seconds"] > 0
    folders = [Path(str(other["runs"][0])) for other in value["rows"][1:]]
    plain, mean = (json.loads((folder / "manifest.json").read_text()) for folder in folders)
    assert (plain["config"]["method"]["keys"], mean["config"]["method"]["keys"]) == ("learned", "mean")


def test_columns_are_those_that_are_asked_for(made: tuple[tuple[object, ...], Any]) -> None:
    command, value = made
    shown = call(*command, "--format", "markdown", "--columns", "ECE,A,passes").out
    head = next(line for line in shown.splitlines() if line.startswith("| method"))
    titles = [cell.strip() for cell in head.strip("|").split("|")]
    assert titles == ["method", "buffer", "ECE (%)", "A (%)", "passes in prediction", "seeds"]
    for row in value["rows"]:
        cells = [cell.strip() for cell in line_of(shown, row["method"]).strip("|").split("|")]
        assert cells[2] == f"{row['calibration_error']:.2f} ± {row['calibration_error_std']:.2f}"
        assert cells[4] == f"{row['cost_predict_passes']:.2f} ± 0.00"
    assert "ECE: how far off probabilities are" in shown
    every = call(*command, "--format", "markdown", "--columns", "all").out
    assert all(each.heading.replace("\n", " ") in every for each in MEASURES)
    assert "there is no column 'ecf'; did you mean 'ECE'?" in call(*command, "--columns", "A,ecf").error


def test_runs_are_reused_and_every_form_says_the_same(made: tuple[tuple[object, ...], Any], tmp_path: Path) -> None:
    command, value = made
    root = Path(str(command[command.index("--runs") + 1]))
    before = contents(root)
    shown = {form: call(*command, "--format", form).out for form in ("text", "markdown", "latex", "csv")}
    assert contents(root) == before
    for row in value["rows"]:
        mean, deviation = f"{row['average_accuracy']:.2f}", f"{row['average_accuracy_std']:.2f}"
        for form, sign in (("text", " ± "), ("markdown", " ± "), ("latex", r" $\pm$ ")):
            line = line_of(shown[form], row["method"])
            assert f"{mean}{sign}{deviation}" in line
    rows = list(csv.DictReader(shown["csv"].splitlines()))
    assert [float(row["average_accuracy"]) for row in rows] == [row["average_accuracy"] for row in value["rows"]]
    assert [row["paper_accuracy"] for row in rows] == ["", "86.51", ""]
    for name, form in (("t.md", "markdown"), ("t.tex", "latex"), ("t.csv", "csv"), ("t.txt", "text")):
        assert call(*command, "--out", tmp_path / name).code == 0
        assert (tmp_path / name).read_text().splitlines() == shown[form].splitlines()


def test_the_papers_numbers_say_whose_they_are(made: tuple[tuple[object, ...], Any]) -> None:
    command, value = made
    shown = call(*command, "--format", "markdown").out
    head = next(line for line in shown.splitlines() if line.startswith("| method"))
    assert "paper's A (%) (other backbone: ViT-B/16, ImageNet-21k)" in head
    assert "| 86.51 ± 0.33 | 5.16 ± 0.09 |" in shown
    assert "another backbone (ViT-B/16, ImageNet-21k): not comparable with vit.safetensors" in shown
    assert (value["same_backbone"], value["paper_backbone"]) == (False, "ViT-B/16, ImageNet-21k")


def test_the_same_backbone_is_not_called_another(benchmark: Path) -> None:
    line = main_table.lines(str(benchmark), None, ["dualprompt"], [], {"backbone.name": "vit-b16-in21k"})[0]
    row = main_table.TableRow(line, (), paper.SPLIT_CIFAR100[0]["dualprompt"])
    sheet = main_table.sheet([row])
    assert [column.heading for column in sheet.columns][4:6] == ["paper's A (%)", "paper's F (%)"]
    assert not any("backbone" in remark for remark in sheet.remarks)
    for name in ("timm/vit_base_patch16_224.orig_in21k", "hf-hub:timm/vit_base_patch16_224.orig_in21k"):
        assert paper.is_its_backbone(name)
    assert not paper.is_its_backbone("vit-b16-augreg-in21k")


def test_a_benchmark_that_the_paper_lacks_has_no_such_column(world: World, tmp_path: Path) -> None:
    options = ("--methods", "frozen-head", "--seeds", 1, "--runs", tmp_path, "--train.epochs", 1)
    shown = call("table", "main", "--benchmark", world.preset, *options).out
    assert "paper" not in shown
    assert "seed 0" in shown


def test_lines_are_held_against_one_seed_by_seed(made: tuple[tuple[object, ...], Any]) -> None:
    command, value = made
    head, dualprompt, mean = value["rows"]
    assert dualprompt["difference"] is None
    for row in (head, mean):
        gaps = [a - b for a, b in zip(*(_accuracies(each) for each in (row, dualprompt)), strict=True)]
        assert (row["against"], row["difference_seeds"]) == ("dualprompt", 2)
        assert row["difference"] == pytest.approx(statistics.mean(gaps))
        if statistics.stdev(gaps) > 1e-9:  # else the seeds are one observation, and the images' noise counts
            assert row["difference_margin"] == pytest.approx(12.706 * statistics.stdev(gaps) / 2**0.5, rel=1e-4)
        beyond = abs(row["difference"]) > max(row["difference_margin"], 1e-9)
        assert row["difference_verdict"] == (
            "cannot be told" if not beyond else "above" if row["difference"] > 0 else "below"
        )
    shown = call(*command, "--against", "frozen-head", "--format", "markdown").out
    assert "A − A of frozen-head" in shown
    cells = next(line for line in shown.splitlines() if line.startswith("| dualprompt |"))
    gap = dualprompt["average_accuracy"] - head["average_accuracy"]
    assert f"| {gap:+.2f} ± " in cells
    assert "A − A" not in call(*command, "--against", "none").out
    assert "'l2p' is no line of the table" in call(*command, "--against", "l2p").error


def _accuracies(row: Any) -> list[float]:
    return [json.loads((Path(run) / "result.json").read_text())["average_accuracy"] for run in row["runs"]]


@pytest.mark.parametrize("form", [(), ("--columns", "A,F")])
def test_lines_that_were_given_what_no_learner_has_are_named(form: Any, world: World, tmp_path: Path) -> None:
    peeks = "rpsnet:candidates=2:parity=true:width=2:modules=3:tasks_per_path=1:buffer_size=8"
    remarks = {
        "dualprompt:selection=batch_vote": "batch_vote leaks the task when a test batch holds one task",
        "dualprompt:selection=oracle": "oracle is told the true task of each image",
        peeks: f"chosen by the images that it is judged on, so no fair result: {peeks}",
    }
    command = ("table", "main", "--benchmark", world.preset, "--runs", tmp_path, "--train.epochs", 1, *form)
    for line in remarks:
        shown = call(*command, "--methods", f"dualprompt,{line}", "--format", "markdown")
        assert shown.code == 0, shown.err
        assert [other for other, remark in remarks.items() if remark in shown.out.splitlines()] == [line]


def test_a_reference_with_several_buffers_must_say_which() -> None:
    lines = main_table.lines("mini", None, ["er", "frozen-head"], [10, 20], {})
    found = main_table.reference(lines, "er@20")
    assert found is not None
    assert found.buffer == 20
    assert main_table.reference(lines, None) is None  # there is no dualprompt
    with pytest.raises(DualPromptError, match="'er' is there more than once: write er@10 or er@20"):
        main_table.reference(lines, "er")


def test_fine_tuners_may_have_fewer_seeds(world: World, tmp_path: Path) -> None:
    command = ("table", "main", "--benchmark", world.preset, "--methods", "ft-seq,dualprompt,frozen-head")
    command = (*command, "--seeds", 2, "--seeds-finetune", 1, "--runs", tmp_path, "--train.epochs", 1)
    found = call(*command, "--json")
    assert found.code == 0, found.err
    seeds = {row["method"]: row["seeds"] for row in found.json["rows"]}
    assert seeds == {"ft-seq": [0], "dualprompt": [0, 1], "frozen-head": [0, 1]}
    ft, dualprompt, _ = found.json["rows"]
    assert ft["difference_seeds"] == 1
    assert ft["difference"] == pytest.approx(_accuracies(ft)[0] - _accuracies(dualprompt)[0])
    shown = call(*command, "--format", "markdown").out
    assert "± is the standard deviation over seeds, 1 to 2 a row; a single seed has none" in shown
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines() if line.startswith("| ")]
    assert {cells[1]: cells[head.index("seeds")] for cells in lines[1:]} == {
        "ft-seq": "1", "dualprompt": "2", "frozen-head": "2",
    }  # fmt: skip


def test_lines_are_grouped_as_in_the_paper() -> None:
    names = ["upper-bound", "dualprompt", "er", "ft-seq", "der++"]
    found = main_table.lines("split-cifar100", None, names, [], {})
    assert [(line.label, line.buffer, line.joint) for line in found] == [
        ("er", 1000, False),
        ("der++", 1000, False),
        ("er", 5000, False),
        ("der++", 5000, False),
        ("dualprompt", None, False),
        ("ft-seq", None, False),
        ("upper-bound", None, True),
    ]
    assert [line.config.method.get("buffer_size") for line in found][:4] == [1000, 1000, 5000, 5000]
    assert {line.config.train.recipe for line in found} == {"paper"}  # a buffer's size is no change of the recipe
    five = main_table.lines("5-datasets", None, ["er"], [], {"benchmark.name": "reduced"})
    assert [line.buffer for line in five] == [250, 500]
    assert [line.buffer for line in main_table.lines("5-datasets", None, ["er"], [20], {})] == [20]
    assert len(main_table.lines("mini", None, ["er"], [], {})) == 1  # at the recipe's size


def test_options_of_a_line_are_read_as_dotted_options_are() -> None:
    labels = ["ft-seq", "ft-seq:head_lr=null", "ft-seq:train.lr=1e-3:training_logits=masked", "dualprompt:e_layers=[4]"]
    preset, plain, strict, moved = (line.config for line in main_table.lines("split-cifar100", None, labels, [], {}))
    assert (preset.method["head_lr"], plain.method["head_lr"]) == (0.005, None)
    assert (strict.train.lr, strict.method["training_logits"]) == (1e-3, "masked")
    assert moved.method["e_layers"] == [4]


def test_by_default_every_method_is_there_in_the_papers_order() -> None:
    found = main_table.default_methods()
    ours = [name for name in METHODS.names() if name not in paper.ARCHITECTURES]  # those of table architecture
    assert sorted(name for name in found if ":" not in name) == ours
    assert found[-2:] == ["upper-bound", "upper-bound:epochs_factor=4"]
    assert found.index("ft++") == found.index("ft-seq") + 1
    theirs = [name for name in found if name in paper.ORDER]
    assert theirs == [name for name in paper.ORDER if name in METHODS]
    joint = [METHODS[name.partition(":")[0]].joint for name in found]
    assert joint == sorted(joint)


def test_joint_training_says_what_its_budget_is() -> None:
    options = ("", ":epochs_factor=4", ":train.epochs=6", ":train.epochs=1")
    labels = ["ft-seq", *(f"upper-bound{option}" for option in options)]
    same = "joint, same budget"
    expected = [None, same, "joint, longer", "joint, longer", "joint, shorter"]
    found = main_table.lines("split-cifar100", None, labels, [], {})
    assert [line.budget for line in found] == expected
    assert found[1].title == f"upper-bound ({same})"
    assert found[0].title == "ft-seq"
    fewer = main_table.lines("split-cifar100", None, labels[1:3], [], {"train.epochs": 2})  # for all methods
    assert [line.budget for line in fewer] == expected[1:3]
    assert [line.config.train.epochs for line in fewer] == [2, 2]


def test_the_typed_numbers_agree_with_what_the_paper_says_elsewhere() -> None:
    cifar, imagenet = paper.SPLIT_CIFAR100[0], paper.SPLIT_IMAGENET_R[0]
    bound = cifar["upper-bound"].accuracy
    # "Diff" of Table 2, and the rows that the tables of prompting functions, ablation and matching repeat.
    assert bound - cifar["dualprompt"].accuracy == pytest.approx(4.34)
    assert bound - cifar["l2p"].accuracy == pytest.approx(6.99)
    assert (cifar["dualprompt"].accuracy, cifar["dualprompt"].forgetting) == (86.51, 5.16)
    assert (imagenet["dualprompt"].accuracy, imagenet["dualprompt"].forgetting) == (68.13, 4.68)
    for name, table in paper.TABLES.items():
        sizes = paper.buffers(name)
        assert [set(table[size]) for size in sizes] == [set(table[sizes[0]])] * 2
        assert set(table[0]) == {"ft-seq", "ewc", "lwf", "l2p", "dualprompt", "upper-bound"}
        assert all(method in METHODS for methods in table.values() for method in methods)
        for size in sizes:  # "5000 is large": every method gains by a larger buffer, and none passes the bound
            for method, numbers in table[size].items():
                assert table[sizes[0]][method].accuracy <= numbers.accuracy < table[0]["upper-bound"].accuracy
    assert (paper.buffers("split-cifar100"), paper.buffers("5-datasets"), paper.buffers("x")) == (
        [1000, 5000],
        [250, 500],
        [],
    )


def test_rehearsal_and_joint_training_in_the_table(world: World, tmp_path: Path) -> None:
    names = ("--methods", "upper-bound,upper-bound:epochs_factor=3,er,frozen-head", "--buffers", "3,6")
    command = ("table", "main", "--benchmark", world.preset, "--seeds", 1, "--runs", tmp_path, "--train.epochs", 1)
    found = call(*command, *names, "--json")
    assert found.code == 0, found.err
    rows = found.json["rows"]
    assert [(row["method"], row["buffer_size"], row["buffer_images"]) for row in rows] == [
        ("er", 3, 3),
        ("er", 6, 6),
        ("frozen-head", 0, None),
        ("upper-bound", 0, None),
        ("upper-bound:epochs_factor=3", 0, None),
    ]
    assert [row["budget"] for row in rows] == [None] * 3 + ["joint, same budget", "joint, longer"]
    logs = [(Path(row["runs"][0]) / "metrics.jsonl").read_text().splitlines() for row in rows[-2:]]
    passes = [max(line.get("epoch", 0) for line in map(json.loads, log)) for log in logs]
    assert passes == [1, 3]
    assert rows[0]["buffer_bytes"] > 0
    assert rows[0]["forgetting"] is not None
    assert rows[-1]["forgetting"] is None
    shown = call(*command, *names, "--format", "markdown").out
    bound = next(line for line in shown.splitlines() if line.startswith("| upper-bound (joint, same budget) |"))
    cells = [cell.strip() for cell in bound.split("|")[1:-1]]
    assert (cells[1], cells[3]) == ("–", "–")


def test_a_failed_line_is_shown_and_the_command_fails(world: World, tmp_path: Path) -> None:
    names = ("--methods", "frozen-head,dualprompt", "--method.training_logits", "unmasked", "--seeds", 1)
    options = ("--train.lr", 1e30, "--train.epochs", 2, "--runs", tmp_path / "runs")
    done = call("table", "main", "--benchmark", world.preset, *names, *options)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("dualprompt: error: ")
    assert "runs failed, the next call tries them again" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    line = line_of(done.out, "dualprompt")
    assert "failed" in line
    assert "0 of 1" in line


SHEET = Sheet(
    "50% of [b]",
    (Column("name", right=False), Column("A (%)\nhere"), Column("more", lesser=True)),
    ((("a_b|c", "1.00 ± 0.10", "–"),), (("d&e", "2.00", "x"),)),
    ("a remark",),
)


def test_forms_of_a_sheet() -> None:
    assert as_markdown(SHEET) == (
        "**50% of [b]**\n\n| name | A (%) here | more |\n| --- | --: | --: |\n"
        "| a_b\\|c | 1.00 ± 0.10 | – |\n| d&e | 2.00 | x |\n\na remark\n"
    )
    lines = as_latex(SHEET).splitlines()
    assert r"\caption{50\% of [b]. A remark.}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    body = lines[lines.index(r"\toprule") : lines.index(r"\bottomrule")]
    assert body == [
        r"\toprule",
        r"name & A (\%) here & more \\",
        r"\midrule",
        r"a\_b|c & 1.00 $\pm$ 0.10 & -- \\",
        r"\midrule",
        r"d\&e & 2.00 & x \\",
    ]
    full, brief = as_rich(SHEET), as_rich(SHEET, brief=True)
    assert "50% of [b]" in text(full)
    assert "more" in text(full)
    assert "more" not in text(brief)
    assert wide(brief) <= wide(full)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seeds", "0"], ["--seeds must be at least 1, found 0"]),
        (["--seeds-finetune", "0"], ["--seeds-finetune must be at least 1, found 0"]),
        (["--publish", "table.md"], ["--publish takes the name of a .json file, found table.md"]),
        (["--buffers", "many"], ["--buffers takes numbers of images as 1000,5000, found 'many'"]),
        (["--buffers", "0,5"], ["--buffers takes numbers of at least 1"]),
        (["--method.buffer_size", "5"], ["give buffer sizes with --buffers"]),
        (["--method.name", "er"], ["choose methods with --methods"]),
        (["--methods", "dualprompt:e_length=[2"], ["cannot read the value '[2'; quote it as YAML"]),
        (["--methods", "dualprompt:keys"], ["write an option as name:option=value, found 'dualprompt:keys'"]),
        (["--methods", "dualprompt:kyes=mean"], ["dualprompt:kyes=mean: unknown key 'method.kyes'", "keys"]),
        (["--methods", "dualpromt"], ["unknown method 'dualpromt'", "did you mean 'dualprompt'?"]),
        (["--recipe", "x"], ["has no recipe 'x'"]),
        (["--benchmark", "min"], ["unknown preset 'min'", "did you mean 'mini'?"]),
        (["--bufers", "5"], ["unknown option '--bufers'", "did you mean 'buffers'?"]),
        (["--device", "tpu"], ["bad value for 'device'"]),
    ],
)
def test_mistakes_are_answered_with_the_remedy(
    options: list[str], words: list[str], world: World, tmp_path: Path
) -> None:
    start = ("table", "main", "--benchmark", world.preset, "--methods", "frozen-head", "--runs", tmp_path / "runs")
    error = call(*start, *options).error
    for word in words:
        assert word in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["table", "sweep"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for word in ("--methods", "--runs", "--jobs", "--json", "--recipe", "examples:", f"dualprompt {command}"):
        assert word in told
