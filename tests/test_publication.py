"""What is published: one JSON file of every run, without paths; pages that are filled from it, and held to it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dualprompt.files import sha256
from dualprompt.report import blocks, publication
from dualprompt.report.sheet import as_markdown
from sandbox import World, call

DOCS = Path(__file__).parent.parent / "docs"
JSON = {path: json.loads(path.read_text()) for path in sorted(DOCS.rglob("*.json"))}
RECORDS = [path for path, value in JSON.items() if all(key in value for key in publication.KEYS)]
PAGES = [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]


@pytest.fixture(scope="module")
def published(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A table, a study and a sweep, published."""
    folder = tmp_path_factory.mktemp("published")
    short = ("--runs", folder / "runs", "--train.epochs", 1)
    commands = {
        "table": ("table", "main", "--benchmark", world.preset, "--methods", "dualprompt,frozen-head", "--seeds", 2),
        "study": ("study", "matching", world.preset, "--seeds", 2),
        "sweep": ("sweep", world.preset, "--methods", "frozen-head", "--grid", "train.lr=1e-3,2e-2"),
    }
    files = {name: folder / f"{name}.json" for name in commands}
    for name, words in commands.items():
        done = call(*words, *short, "--publish", files[name])
        assert done.code == 0, done.err
    return files


@pytest.mark.parametrize("name", ["table", "study", "sweep"])
def test_it_holds_what_one_needs_to_make_it_again(name: str, published: dict[str, Path], world: World) -> None:
    text = published[name].read_text()
    value = json.loads(text)
    assert str(world.folder) not in text
    assert str(published[name].parent) not in text
    assert value["command"].startswith(f"dualprompt {name} ")
    for gone in ("--runs", "--publish"):
        assert gone not in value["command"]
    for row in value["rows"]:
        assert row["config"]["backbone"]["name"] == "vit.safetensors"
        assert row["config"]["benchmark"]["dataset"] == "trees"
        for run in row["runs"]:
            environment = value["environments"][run["environment"]]
            assert environment["backbone"] == {"name": "vit.safetensors", "sha256": sha256(world.weights)}
            assert environment["versions"]["torch"]
            assert run["identity"].keys() == {"config", "data", "weights", "code"}
            assert run["started"].startswith(value["date"][:4])
            assert len(run["accuracy_matrix"]) == len(run["judged_images"]) == 3
    assert not publication.contradictions(value)


def test_a_study_is_published_with_its_verdicts(published: dict[str, Path]) -> None:
    value = json.loads(published["study"].read_text())
    (row,) = value["rows"]
    gaps = [run["judged_again"]["oracle"]["average_accuracy"] - run["average_accuracy"] for run in row["runs"]]
    assert value["verdicts"][0]["difference"]["mean"] == pytest.approx(sum(gaps) / 2)
    assert all(verdict["sentence"] in value["finding"] for verdict in value["verdicts"])


def test_a_number_that_was_changed_is_found_out(published: dict[str, Path], tmp_path: Path) -> None:
    value = publication.read(published["table"])
    wrong: list[Any] = [copy.deepcopy(value) for _ in range(4)]
    wrong[0]["rows"][0]["runs"][0]["average_accuracy"] += 1
    wrong[1]["rows"][0]["runs"][0]["accuracy_matrix"][-1][0] += 3
    first = wrong[2]["sheets"][0]["groups"][0][0]
    first[2] = "99.99 ± 0.01"
    wrong[3]["verdicts"] = [{"sentence": "That all is well holds here."}]
    for each in wrong:
        assert publication.contradictions(each)
    (tmp_path / "wrong.json").write_text(json.dumps(wrong[2]))
    assert "contradicts itself: dualprompt: no line" in call("publish", tmp_path / "wrong.json").error


def page(folder: Path, *markers: str) -> Path:
    path = folder / "page.md"
    path.write_text(
        "# Page\n\n" + "\n".join(f"<!-- published {m} -->\n<!-- /published -->" for m in markers) + "\nend\n"
    )
    return path


def test_blocks_of_a_page_are_filled_and_held_to_the_json(published: dict[str, Path]) -> None:
    folder = published["table"].parent
    path = page(folder, 'table.json table columns="method|A (%)|seeds"', "study.json finding", "sweep.json table")
    stale = call("publish", path, "--check")
    assert "not what the published JSON says" in stale.error
    assert call("publish", path, "--json").json == {"files": [{"path": str(path), "blocks": 3, "changed": True}]}
    text = path.read_text()
    assert "| method | A (%) | seeds |" in text
    assert json.loads(published["study"].read_text())["finding"] in text
    (sheet,) = publication.sheets(publication.read(published["sweep"]))
    assert as_markdown(sheet) in text
    assert text.endswith("<!-- /published -->\nend\n")
    assert call("publish", path, "--check").code == 0
    assert call("publish", path).out == f"{path}: 3 blocks, unchanged\n"
    path.write_text(text.replace("| dualprompt | ", "| dualprompt | 1"))
    assert call("publish", path, "--check").code == 2
    assert call("publish", path).code == 0
    assert path.read_text() == text


def test_an_indented_marker_is_an_example_and_a_block_must_end(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("    <!-- published gone.json table -->\n    <!-- /published -->\n")
    assert blocks.fill(path) == (0, False)
    path.write_text("<!-- published gone.json table -->\n")
    assert "ends with <!-- /published -->" in call("publish", path).error


def test_a_publication_is_rendered(published: dict[str, Path]) -> None:
    shown = call("publish", published["study"]).out
    value = publication.read(published["study"])
    assert shown.strip() == publication.markdown(value).strip()
    assert value["finding"] in shown


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("table.json", "write <!-- published FILE table|finding|records|text … -->"),
        ("gone.json table", "does not exist; make it with --publish"),
        ("other.json table", "was not made by --publish (it has no 'kind')"),
        ("table.json picture", "write <!-- published FILE table|finding|records|text … -->"),
        ("table.json table sheets=1", "a table takes sheet=…, columns=…, rows=…, names=…, bare=…; found 'sheets'"),
        ("table.json table sheet=2", "sheet must be 1 to 1, found '2'"),
        ('table.json table columns="A"', "the table has no column 'A'; it has method, buffer"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_named(marker: str, words: str, published: dict[str, Path]) -> None:
    folder = published["table"].parent
    (folder / "other.json").write_text('{"a": 1}')
    path = page(folder, marker)
    before = path.read_text()
    assert words in call("publish", path).error
    assert path.read_text() == before
    assert "was not made by --publish" in call("study", "diversity", "--publish", folder / "other.json").error


def test_a_command_is_published_without_where_it_was_carried_out() -> None:
    words = [
        "table",
        "main",
        "--runs",
        "/a/b",
        "--benchmark",
        "/c/d.yaml",
        "--jobs=2",
        "--json",
        "--ray",
        "--seeds",
        "3",
    ]
    assert publication.command(words) == "dualprompt table main --benchmark d.yaml --seeds 3"
    words = ["study", "layers", "--method.e_layers", "[1, 2]", "--publish", "x.json"]
    assert publication.command(words) == "dualprompt study layers --method.e_layers '[1, 2]'"


def test_a_changed_number_of_the_second_table_is_found_out() -> None:
    value = publication.read(DOCS / "results" / "architecture.json")
    assert [sheet["title"] for sheet in value["sheets"]][1] == publication.STEPS
    for sheet, column in ((0, "last A (%)"), (0, "mean over\nsteps (%)"), (1, "1"), (1, "10")):
        wrong = copy.deepcopy(value)
        headings = [each["heading"] for each in wrong["sheets"][sheet]["columns"]]
        line = next(cells for cells in wrong["sheets"][sheet]["groups"][0] if cells[0] == "dynaer")
        line[headings.index(column)] = "99.9"
        [said] = publication.contradictions(wrong)
        assert said.startswith("dynaer: no line of")


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_records_in_the_docs_agree_with_themselves(record: Path) -> None:
    assert not publication.contradictions(publication.read(record))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_pages_of_the_docs_say_what_their_json_says(path: Path) -> None:
    _, stale = blocks.fill(path, check=True)
    assert not stale
