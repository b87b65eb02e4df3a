"""Blocks of pages that choose, join and format what JSON files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dualprompt.errors import DualPromptError
from dualprompt.report import blocks, publication

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SPEEDS = {
    "name": "machine",
    "rate": 681.66,
    "rates": [{"what": "train", "batch": 24, "ours": 5015.3}, {"what": "evaluate", "batch": 128, "ours": 12305.0}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("main-mini.json", "main-split-cifar100.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    (tmp_path / "speed.json").write_text(json.dumps(SPEEDS))
    return tmp_path


def filled(folder: Path, marker: str) -> list[str]:
    """Return the lines of a block."""
    page = folder / "page.md"
    page.write_text(f"<!-- published {marker} -->\n<!-- /published -->\n")
    blocks.fill(page)
    return [line for line in page.read_text().splitlines()[1:-1] if line]


def cells(path: Path, method: str, *headings: str) -> list[str]:
    """Return what a published table says of a method."""
    (sheet,) = publication.sheets(publication.read(path))
    names = [column.heading for column in sheet.columns]
    (row,) = (row for group in sheet.groups for row in group if row[0] == method)
    return [row[names.index(heading)] for heading in headings]


def test_rows_and_columns_are_chosen_ordered_and_renamed(folder: Path) -> None:
    marker = 'main-mini.json table bare=yes columns="method|F (%) as forgetting|A (%)" rows="lda as LDA|dualprompt"'
    lda, dualprompt = (cells(folder / "main-mini.json", name, "F (%)", "A (%)") for name in ("lda", "dualprompt"))
    assert filled(folder, marker) == [
        "| method | forgetting | A (%) |",
        "| --- | --: | --: |",
        f"| LDA | {lda[0]} | {lda[1]} |",
        f"| dualprompt | {dualprompt[0]} | {dualprompt[1]} |",
    ]


def test_two_tables_stand_side_by_side(folder: Path) -> None:
    files = ("main-mini.json", "main-split-cifar100.json")
    marker = f'{",".join(files)} table bare=yes names="mini|CIFAR" columns="method|A (%)" rows="ridge|coda-prompt"'
    found = [[name, *(cells(folder / file, name, "A (%)")[0] for file in files)] for name in ("ridge", "coda-prompt")]
    assert filled(folder, marker) == [
        "| method | mini: A (%) | CIFAR: A (%) |",
        "| --- | --: | --: |",
        *(f"| {' | '.join(row)} |" for row in found),
    ]


def test_files_of_one_name_are_one_table(folder: Path) -> None:
    value = json.loads((folder / "main-mini.json").read_text())
    for sheet in value["sheets"]:
        sheet["groups"] = [[["again", *row[1:]] for group in sheet["groups"] for row in group if row[0] == "ridge"]]
    (folder / "more.json").write_text(json.dumps(value))
    files = "main-mini.json,main-split-cifar100.json,more.json,more.json"
    head = f'{files} table bare=yes names="mini|CIFAR|mini|CIFAR" columns="method|A (%)"'
    again = cells(folder / "main-mini.json", "ridge", "A (%)")[0]
    lda = [cells(folder / file, "lda", "A (%)")[0] for file in ("main-mini.json", "main-split-cifar100.json")]
    assert filled(folder, f'{head} rows="lda|again as ridge"')[2:] == [
        f"| lda | {lda[0]} | {lda[1]} |",
        f"| ridge | {again} | {again} |",
    ]
    with pytest.raises(DualPromptError, match="several rows 'again'"):
        filled(folder, 'more.json,more.json,main-mini.json table names="mini|mini|other" columns="method|A (%)"')


def test_records_and_sentences_of_any_json(folder: Path) -> None:
    marker = 'speed.json records at=rates columns="what|batch|ours[,.0f]"'
    assert filled(folder, marker) == [
        "| what | batch | ours |",
        "| --- | --: | --: |",
        "| train | 24 | 5,015 |",
        "| evaluate | 128 | 12,305 |",
    ]
    assert filled(folder, 'speed.json,speed.json records columns="name|rates/1/ours[.0f] as ours"')[2:] == [
        "| machine | 12305 |",
        "| machine | 12305 |",
    ]
    assert filled(folder, 'speed.json text "- {name}: {rate[.0f]}" "- {rates/0/ours[+.1f]}"') == [
        "- machine: 682",
        "- +5015.3",
    ]


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("main-mini.json table rows=der", "the table has no row 'der'; it has er, der"),
        ("main-mini.json,speed.json table", "speed.json was not made by --publish"),
        ("main-mini.json,main-mini.json table names=one", 'need as many names="…|…", found 1'),
        ('main-mini.json table columns="seeds|A (%)" rows="5"', "several rows '2'"),
        ("speed.json records at=rates", 'records need columns="path'),
        ("speed.json records at=rate columns=a", "'rate' is no list"),
        ("speed.json records at=rates columns=speed", "there is no 'speed' of 'speed'; there is what, batch, ours"),
        ("speed.json text {rates/2/ours}", "there is no '2' of 'rates/2/ours'; there is 0 to 1"),
        ("speed.json text {rates}", "'rates' is no single value"),
        ("speed.json text {name[.1f]}", "'name' is 'machine', which has no format '.1f'"),
        ("speed.json text {a]}", "write a value as path or path"),
        ("speed.json text", "a text has one file, and lines in quotes"),
        ("speed.json,speed.json text a", "a text has one file"),
        ("speed.json finding at=rates", "a finding takes no options; found 'at'"),
    ],
)
def test_what_cannot_be_filled_is_said(folder: Path, marker: str, words: str) -> None:
    with pytest.raises(DualPromptError) as caught:
        filled(folder, marker)
    assert words in str(caught.value)
