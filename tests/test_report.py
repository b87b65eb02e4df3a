"""The report: one file that needs nothing else, says what the runs say, and looks right in a real browser."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import statistics
import sys
import warnings
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from contrast import CONTRAST
from dualprompt.pictures import drawing
from dualprompt.pictures import kinds as pictures
from dualprompt.report import figures, study_files
from dualprompt.report.page import LARGEST
from sandbox import World, call, contents, interrupted

NAME = 'trees <b> & "leaves"'
SECTIONS = (
    "results", "stream", "curves", "accuracy", "pictures", "matching", "keys", "prompts",
    "metrics", "calibration", "classes", "size", "time", "config",
)  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.parametrize(("low", "high"), [(100, 0), (None, 0), (5, None)])
def test_a_grid_of_a_stranger_is_drawn_whichever_way_its_colours_run(
    low: float | None, high: float | None, tmp_path: Path
) -> None:
    grid = pictures.Grid("t", "x", "y", ["a"], ["c"], [[1.0]], low=low, high=high)
    assert drawing.save(tmp_path / "grid.svg", grid).is_file()


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of two seeds beside their baselines, judged anew too; and the report of it and of a study."""
    folder = tmp_path_factory.mktemp("report")
    values = yaml.safe_load(world.preset.read_text())["benchmark"]
    preset = world.preset_with("named.yaml", benchmark=values | {"name": NAME})
    strong = ("--method.init", "wide", "--method.e_init", "fresh")
    done = call("run", preset, "--out", folder / "run", "--seeds", 2, *strong)
    assert done.code == 0, done.err
    assert call("eval", folder / "run", "--selection", "query,oracle").code == 0
    done = call("study", "lengths", preset, "--budget", 4, "--runs", folder / "runs", "--train.epochs", 1)
    assert done.code == 0, done.err
    done = call("report", folder / "run", folder / "runs" / "study-lengths-named", "--json")
    assert done.code == 0, done.err
    assert done.json == {"report": str(folder / "run" / "report.html")}
    return folder, folder / "run" / "report.html"


def result_of(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


def text_of(html: str) -> list[str]:
    """The cells of all tables."""
    return [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html, re.DOTALL)]


def test_it_needs_nothing_else(made: tuple[Path, Path]) -> None:
    html = made[1].read_text()
    assert len(html.encode()) < LARGEST
    assert "<script" not in html
    assert "@import" not in html
    loaded = re.findall(r'(?:src|xlink:href|href)="([^"#]+)', html)
    assert all(not place.startswith(("http", "//")) for place in loaded)
    assert not re.search(r"url\((?!#)", html)
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) == len(set(names))
    for reference in re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', html):
        assert reference in names


def test_the_headline_is_the_mean_over_seeds(made: tuple[Path, Path]) -> None:
    folder, report = made
    cells = text_of(report.read_text())
    for method, place in (("dualprompt", "."), ("frozen-head", "baseline")):
        start = cells.index(method)
        numbers = [result_of(folder / "run" / f"seed-{seed}" / place)["average_accuracy"] for seed in (0, 1)]
        assert cells[start + 1] == "2"
        assert cells[start + 2] == f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f}"
    oracle = [json.loads((folder / "run" / f"seed-{s}" / "eval-oracle.json").read_text()) for s in (0, 1)]
    mean = statistics.mean(result["average_accuracy"] for result in oracle)
    assert cells[cells.index("dualprompt (oracle)") + 2].startswith(f"{mean:.2f} ±")
    assert "dualprompt (query)" not in cells  # as the run judged itself


def test_names_are_shown_as_they_are(made: tuple[Path, Path]) -> None:
    html = made[1].read_text()
    assert "<b>" not in html
    assert f"{NAME}, vit.safetensors, recipe plain" in unescape(html)


def test_every_figure_is_there_as_svg_and_csv(made: tuple[Path, Path]) -> None:
    folder, report = made
    html, files = report.read_text(), report.with_name("report-files")
    linked = re.findall(r'href="report-files/([^"]+)\.(svg|csv)"', html)
    assert len(linked) == 2 * html.count("<svg ")
    for name, suffix in linked:
        assert (files / f"{name}.{suffix}").stat().st_size > 50
    results = [result_of(folder / "run" / f"seed-{seed}") for seed in (0, 1)]
    written = list(csv.DictReader((files / "accuracy-dualprompt.csv").open()))
    assert len(written) == 6
    for row in written:
        t, task = int(row["after learning task"]) - 1, int(row["accuracy on task"]) - 1
        mean = statistics.mean(result["accuracy_matrix"][t][task] for result in results)
        assert float(row["accuracy (%)"]) == pytest.approx(mean)
        assert f">{mean:.0f}<" in (files / "accuracy-dualprompt.svg").read_text()
    curve = [row for row in csv.DictReader((files / "curve-accuracy.csv").open()) if row["line"] == "dualprompt"]
    last = [result["average_accuracy"] for result in results]
    assert float(curve[-1]["average accuracy A (%)"]) == pytest.approx(statistics.mean(last))
    assert float(curve[-1]["spread"]) == pytest.approx(statistics.stdev(last))
    confusion = list(csv.DictReader((files / "confusion-dualprompt.csv").open()))
    one, two = ([100 * n / 9 for n in result["matching_confusion"][0]] for result in results)
    found = [float(row["share (%)"]) for row in confusion[:3]]
    assert found == pytest.approx([(a + b) / 2 for a, b in zip(one, two, strict=True)])


def test_it_says_what_was_trained_how_long_and_with_what(made: tuple[Path, Path]) -> None:
    folder, report = made
    html = unescape(report.read_text())
    result = result_of(folder / "run" / "seed-0")
    cells = text_of(html)
    assert f"{result['parameters']['trained']:,}" in cells
    assert f"{result['parameters']['paper_formula']:,}" in cells
    lines = [json.loads(line) for line in (folder / "run" / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["seconds"]["train"] for line in lines if line["event"] == "task")
    assert f"{seconds:,.1f}" in cells
    manifest = json.loads((folder / "run" / "seed-0" / "manifest.json").read_text())
    for part in (
        f"torch {manifest['versions']['torch']}",
        manifest["backbone"]["sha256"],
        manifest["identity"]["data"],
    ):
        assert part in html
    config = re.search(r"config of dualprompt, seeds 0, 1</summary><pre[^>]*>(.*?)</pre>", html, re.DOTALL)
    assert config is not None
    assert yaml.safe_load(config[1]) == {k: v for k, v in manifest["config"].items() if k != "seed"}


def test_a_study_brings_its_finding_tables_and_pictures(made: tuple[Path, Path]) -> None:
    folder, report = made
    value = json.loads((folder / "runs" / "study-lengths-named" / "study.json").read_text())
    html = unescape(report.read_text())
    assert value["finding"] in html
    assert value["title"] in html
    for row in value["rows"]:
        assert row["setting"] in html
        assert f"{row['average_accuracy']:.2f}" in html
    drawn = (report.with_name("report-files") / "lengths.svg").read_text()
    for row in value["rows"][:4]:
        assert f">{row['average_accuracy']:.2f}<" in drawn


def test_the_same_report_twice_and_elsewhere(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder, report = made
    assert (
        call("report", folder / "run", folder / "runs" / "study-lengths-named", "--out", tmp_path / "r.html").code == 0
    )
    assert (tmp_path / "r.html").read_text() == report.read_text().replace("report-files", "r-files")
    svgs = {name: data for name, data in contents(report.with_name("report-files")).items() if name.endswith("svg")}
    assert {name: data for name, data in contents(tmp_path / "r-files").items() if name.endswith("svg")} == svgs


def test_one_method_with_two_configs_is_told_apart(world: World, made: tuple[Path, Path], tmp_path: Path) -> None:
    for name, length in (("short", 1), ("long", 4)):
        options = ("--method.e_length", length, "--train.epochs", 1, "--no-baseline")
        assert call("run", world.preset, "--out", tmp_path / name, *options).code == 0
    assert call("report", tmp_path / "short", tmp_path / "long", "--out", tmp_path / "both.html").code == 0
    cells = text_of((tmp_path / "both.html").read_text())
    for name in ("short", "long"):
        accuracy = result_of(tmp_path / name)["average_accuracy"]
        assert cells[cells.index(f"dualprompt, {name}") + 2] == f"{accuracy:.2f}"


def test_mistakes_are_answered_with_the_remedy(
    world: World, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not exist; give the folder of a run or a study" in call("report", tmp_path / "none").error
    assert "holds neither a run (manifest.json) nor a study (study.json)" in call("report", tmp_path).error
    half = interrupted(world, tmp_path / "half")
    assert "is not finished; continue it with: dualprompt resume" in call("report", half).error
    assert "is not finished" in call("compare", half, half).error
    monkeypatch.setitem(sys.modules, "jinja2", None)
    error = call("report", made[0] / "run", "--out", tmp_path / "r.html").error
    assert "extra 'report'" in error
    assert "pip install 'dualprompt[report]'" in error


def test_compare_sets_two_runs_side_by_side(made: tuple[Path, Path], world: World, tmp_path: Path) -> None:
    one = made[0] / "run" / "seed-0"
    options = ("--method.e_length", 1, "--seed", 3, "--no-baseline")
    assert call("run", world.preset, "--out", tmp_path / "other", *options).code == 0
    value = call("compare", one, tmp_path / "other", "--json").json
    first, second = result_of(one), result_of(tmp_path / "other")
    assert value["seeds"] == [[0], [3]]
    assert value["config"]["method.e_length"] == [3, 1]
    assert value["config"]["method.init"] == ["wide", "uniform"]
    assert "method.g_length" not in value["config"]
    assert "seed" not in value["config"]
    assert value["accuracy_matrices"] == [first["accuracy_matrix"], second["accuracy_matrix"]]
    for key in ("average_accuracy", "forgetting", "matching_accuracy"):
        assert value["metrics"][key]["difference"] == pytest.approx(second[key] - first[key])
    shown = call("compare", one, tmp_path / "other").out
    assert f"{second['average_accuracy'] - first['average_accuracy']:+.2f}" in shown
    assert f"{second['accuracy_matrix'][2][0] - first['accuracy_matrix'][2][0]:+.1f}" in shown
    assert re.search(r"method\.e_length\W+3\W+1\W", shown)
    both = call("compare", made[0] / "run", tmp_path / "other", "--json").json  # a group counts by its mean
    means = [statistics.mean(result_of(made[0] / "run" / f"seed-{s}")["average_accuracy"] for s in (0, 1))]
    assert both["metrics"]["average_accuracy"]["values"] == pytest.approx([*means, second["average_accuracy"]])


def test_pictures_survive_json(tmp_path: Path) -> None:
    grid = pictures.Grid("t", "x", "y", ["a", "b"], ["c"], [[1.0, None]], framed=[[0, 1]])
    lines = pictures.Lines("t $5 & <b>", "x", "y", [pictures.Line("one", [1.0, 2.0], [3.0, 4.0], [0.1, 0.2])])
    points = pictures.Points("t", [pictures.Cloud("c", [1.0], [2.0], 0, "x")])
    for picture in (grid, lines, points):
        plain = json.loads(json.dumps(pictures.as_plain(picture)))
        assert TypeAdapter(study_files.PictureRecord).validate_python(plain) == picture
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drawn = drawing.save_with_data(tmp_path, picture.kind, picture).read_text()
        assert len(drawn) < 20_000
    assert "t $5 &amp; &lt;b&gt;" in (tmp_path / "lines.svg").read_text()
    assert (tmp_path / "grid.csv").read_text().splitlines() == ["y,x,accuracy (%)", "c,a,1.0"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


# Texts of drawings: those that stick out of their drawing, and those that paper of this colour hides.
DRAWN = """() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = (colour) => { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    const rgb = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
    const linear = rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]; };
  const paper = light(getComputedStyle(document.body).backgroundColor), wrong = [];
  let seen = 0;
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), around = text.closest("svg").getBoundingClientRect();
    if (box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1
        || box.bottom > around.bottom + 1) wrong.push(`clipped: ${text.textContent}`);
    const fill = getComputedStyle(text).fill;
    if (["rgb(30, 40, 50)", "rgb(255, 255, 255)"].includes(fill)) continue;  // on the colour of a cell
    seen += 1;
    const above = light(fill), ratio = (Math.max(paper, above) + 0.05) / (Math.min(paper, above) + 0.05);
    if (ratio < 4.5) wrong.push(`hidden: ${text.textContent} ${ratio.toFixed(2)}`);
  }
  return [seen > 50, wrong];
}"""


# Titles of tables that are cut, and do not say so.
CUT = """() => [...document.querySelectorAll(".box")].filter((box) => {
  const inner = box.querySelector(".scroll"), hint = box.querySelector(".hint");
  return inner && inner.scrollWidth > inner.clientWidth && !(hint && hint.offsetHeight);
}).map((box) => box.querySelector("h3").textContent)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_drawings_can_be_read_whatever_the_paper(
    width: int, scheme: Any, browser: Any, made: tuple[Path, Path]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True)
    page.goto(made[1].as_uri())
    assert page.evaluate(DRAWN) == [True, []]
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    hints = page.locator(".hint").all()
    assert hints
    assert all(hint.is_visible() for hint in hints) or width == 1280
    assert page.evaluate(CUT) == []
    first = page.locator("#results .scroll").first
    assert (first.evaluate("e => e.scrollWidth > e.clientWidth")) or width == 1280
    legend = page.locator("#prompts svg text", has_text="task 1").first.bounding_box()
    assert legend["x"] + legend["width"] <= width  # it stays in view, below its plane
    page.close()


def test_minus_signs_and_nothing_else_is_changed() -> None:
    told = "-1.85 ± 2.62 (-25.38 to +21.68), layers 3-8, 2026-11-18, dualprompt-01, --seed -1"
    assert pictures.signed(told) == "−1.85 ± 2.62 (−25.38 to +21.68), layers 3-8, 2026-11-18, dualprompt-01, --seed −1"


def test_small_differences_do_not_fill_the_scale(tmp_path: Path) -> None:
    near = pictures.Grid("t", "x", "y", ["a", "b"], ["c"], [[61.0, 61.5]], low=None, high=None, digits=2)
    assert near._range(np.array(near.values)) == (56.25, 66.25)
    noisy = dataclasses.replace(near, spread=[[5.0, 5.0]])
    assert noisy._range(np.array(near.values)) == (51.25, 71.25)
    assert dataclasses.replace(near, low=0, high=100)._range(np.array(near.values)) == (0, 100)
    far = pictures.Grid("t", "x", "y", ["a", "b"], ["c"], [[20.0, 61.5]], low=None, high=None)
    assert far._range(np.array(far.values)) == (20.0, 61.5)
    lines = pictures.Lines("t", "x", "A (%)", [pictures.Line("one", [1.0, 2.0], [61.0, 61.2])])
    low, high = drawing.figure_of(lines).axes[0].get_ylim()
    assert high - low == pytest.approx(pictures.LEAST)
    bars = pictures.Lines("t", "x", "A (%)", [pictures.Line("one", [1.0, 2.0], [98.0, 70.0], [9.0, None])])
    assert drawing.figure_of(bars).axes[0].get_ylim()[1] == 102


def test_one_seed_has_bars_from_the_number_of_images(made: tuple[Path, Path]) -> None:
    result = result_of(made[0] / "run" / "seed-0")
    accuracy, forgetting = figures.curves([result])
    row, images = result["accuracy_matrix"][1], result["judged_images"]
    errors = sum(s * (100 - s) / n for s, n in zip(row, images, strict=False)) ** 0.5 / 2
    assert accuracy.lines[0].spread is not None
    assert accuracy.lines[0].spread[1] == pytest.approx(2 * errors)
    assert "± is two standard errors" in accuracy.title
    assert forgetting.lines[0].spread is None
    both = figures.curves([result, result_of(made[0] / "run" / "seed-1")])[0]
    assert "± is the standard deviation over 2 seeds" in both.title


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_a_browser_shows_every_section(width: int, height: int, browser: Any, made: tuple[Path, Path]) -> None:
    page = browser.new_page(viewport={"width": width, "height": height}, offline=True)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.goto(made[1].as_uri())
    shown = [section.get_attribute("id") for section in page.locator("section").all()]
    assert shown == [*SECTIONS, "lengths"]
    for name in shown:
        section = page.locator(f"section#{name}")
        assert section.is_visible()
        assert section.locator("h2").inner_text()
        link = page.locator(f'nav a[href="#{name}"]')
        link.click()
        assert section.locator("h2").evaluate("e => e.getBoundingClientRect().top") < height
        for box in section.locator("svg, table, img").all():
            size = box.bounding_box()
            assert size["width"] > 100
            assert size["height"] > 40
    for summary in page.locator("summary").all():
        summary.click()
    assert page.locator("pre").first.is_visible()
    # Whatever is too wide scrolls inside its box; the page itself does not.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for text in page.locator("svg text").all()[:40]:
        assert text.bounding_box()["height"] > 6
    assert complaints == []
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    page.close()
