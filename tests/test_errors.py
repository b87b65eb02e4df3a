"""Every mistake gets one line that names it and its remedy, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualprompt.errors import DualPromptError
from dualprompt.run.folder import Run
from sandbox import (
    HEADER,
    VIT,
    World,
    call,
    contents,
    elsewhere,
    interrupted,
    make_world,
    remains,
    shell,
    write_weights,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def refused(*arguments: object, out: Path) -> str:
    """Return the one line with which a run is refused; nothing may be written."""
    answer = call("run", *arguments, "--out", out)
    message = answer.error
    assert answer.out == ""
    assert not out.exists()
    return message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--method", "dualpromt"], ["unknown method 'dualpromt'", "did you mean 'dualprompt'?"]),
        (["--recipe", "ofical"], ["has no recipe 'ofical'", "known: augmented, plain"]),
        (["--backbone", "embeded"], ["unknown backbone 'embeded'", "did you mean 'embedded'?"]),
        (["--backbone", "absent.safetensors"], ["absent.safetensors does not exist"]),
        (["--train.epoch", "3"], ["unknown key 'train.epoch'", "did you mean 'epochs'?"]),
        (["--trian.epochs", "3"], ["unknown key 'trian'", "did you mean 'train'?"]),
        (["--method.e_lenght", "3"], ["unknown key 'method.e_lenght'", "did you mean 'e_length'?"]),
        (["--epochs", "3"], ["unknown option '--epochs'", "did you mean '--train.epochs'?"]),
        (["--bakbone", "embedded"], ["unknown option '--bakbone'", "did you mean 'backbone'?"]),
        (["--benchmark.dataset", "cifar10O"], ["unknown dataset 'cifar10O'", "did you mean 'cifar10'?"]),
        (["--train.epochs", "0"], ["'train.epochs'", "greater than or equal to 1", "found 0"]),
        (["--train.lr", "-0.1"], ["'train.lr'", "greater than 0", "found -0.1"]),
        (["--train.epochs", "many"], ["'train.epochs'", "valid integer", "found 'many'"]),
        (["--train.augment", "mixup"], ["'train.augment'", "'random_resized_crop' or 'pad_crop'", "found 'mixup'"]),
        (["--train.betas", "3"], ["'train.betas'", "found 3", "write it as a,b"]),
        (["--train.betas", "0.9,x"], ["'train.betas'", "valid number", "found 'x'"]),
        (["--train.epochs.x", "1"], ["'train.epochs'", "valid integer"]),
        (["--method.e_layers", "{a: 3}"], ["'method.e_layers'", "write it as a,b"]),
        (["--method.selection", "guess"], ["'method.selection'", "'query', 'batch_vote' or 'oracle'"]),
        (["--method.e_length", "-1"], ["'method.e_length'", "greater than or equal to 0"]),
        (["--method.e_layers", "3,4"], ["method.e_layers has layer 4", "layers are 1 to 3"]),
        (["--method.g_layers", "0,1"], ["method.g_layers has layer 0", "layers are 1 to 3"]),
        (["--method.length_counts", "split"], ["length", "3", "even"]),
        (["--benchmark.tasks", "x"], ["'benchmark.tasks'", "found 'x'", "number of equal tasks, or class counts"]),
        (["--benchmark.tasks", "[[ash], 3]"], ["'benchmark.tasks'", "number of equal tasks"]),
        (["--benchmark.tasks", "4"], ["6 classes cannot be cut into 4 equal tasks", "1, 2, 3, 6"]),
        (["--benchmark.tasks", "[[ash, elm], [fir, ash]]"], ["class 'ash' is in two tasks, 1 and 2"]),
        (["--benchmark.tasks", "[[ash, oak], [fir]]"], ["unknown class 'oak'"]),
        (["--benchmark.evaluate_on", "validation"], ["evaluate_on: validation needs benchmark.validation > 0"]),
        (["--backbone.input_size", "20"], ["input size 20 is not a multiple of the patch size 8", "16 or 24"]),
        (["--train.betas", "1.5,0.9"], ["'train.betas", "less than 1"]),
        (["--train.lr", ".inf"], ["'train.lr'", "finite number"]),
        (["--benchmark.tasks", "[1, 2, 3]"], ["task 1", "has one class", "method.training_logits: unmasked"]),
        (
            ["--method", "dualprompt-rp", "--method.training_logits", "unmasked"],
            ["'method.training_logits'", "a classifier of its own classes", "leave it masked"],
        ),
        (["--e_length", "3"], ["unknown option '--e_length'", "did you mean '--method.e_length'?"]),
        (["--seeds", "0"], ["--seeds must be at least 1, found 0"]),
        (["--seeds", "two"], ["argument --seeds", "'two'", "dualprompt run --help"]),
        (["--seed", "-1"], ["'seed'", "greater than or equal to 0"]),
        (["--device", "tpu"], ["'device'", "'auto', 'cpu', 'cuda' or 'mps'"]),
        (["--devices", "0"], ["'devices'", "greater than or equal to 1"]),
        (["--device", "mps"], ["device: mps", "use --device cpu or auto"]),
        (["--train.epochs", "{"], ["cannot read the value '{'"]),
        (["stray"], ["unknown argument 'stray'"]),
        (["--train.epochs"], ["'--train.epochs' needs a value"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_bad_options(options: list[str], parts: list[str], world: World, out: Path) -> None:
    answer = call("run", world.preset, "--out", out, *options)
    for part in parts:
        assert part in answer.error
    assert answer.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train"], ["unknown command 'train'"]),
        (["run"], ["required: preset", "dualprompt run --help"]),
        (["run", "mni"], ["unknown preset 'mni'", "did you mean 'mini'?", "path of a .yaml file"]),
        (["run", "absent.yaml"], ["preset file absent.yaml does not exist"]),
        (["list", "method"], ["'method'", "methods"]),
        (["show", "x", "--train.epochs", "3"], ["'--train.epochs' only goes with `run`"]),
        (["show", "x", "--quick"], ["unknown argument '--quick'; see dualprompt show --help"]),
        (["data", "show", "cifra10"], ["unknown dataset 'cifra10'", "did you mean 'cifar10'?"]),
        (["data", "get", "cifra10"], ["unknown dataset 'cifra10'", "did you mean 'cifar10'?"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_commands(arguments: list[str], parts: list[str]) -> None:
    answer = call(*arguments)
    for part in parts:
        assert part in answer.error


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("benchmark: [unclosed", ["is not valid YAML"]),
        ("a: b: c", ["is not valid YAML"]),
        ("just words", ["must hold a mapping of keys, found str"]),
        ("", ["must hold a mapping of keys, found NoneType"]),
        ("train: {epochs: 3}", ["missing key 'benchmark'"]),
        ("benchmark: {name: x}", ["missing key 'benchmark.dataset'"]),
        ("benchmark: {dataset: mnist}\nrecipes: 3", ["'recipes' must be a mapping", "found 3"]),
        ("benchmark: {dataset: mnist}\nrecipe: a\nrecipes: {a: 3}", ["'recipes.a' must be a mapping", "found 3"]),
        ("benchmark: {dataset: mnist}\nrecipe: 7\nrecipes: {a: {}}", ["has no recipe '7'", "known: a"]),
        ("benchmark: {dataset: mnist}\nmethod: l2p", ["'method' must be a mapping", "found 'l2p'"]),
        ("benchmark: {dataset: mnist}\nmethods: [1]", ["'methods' must be a mapping"]),
        ("benchmark: {dataset: mnist}\nmethod: {name: [1]}", ["method.name"]),
        ("benchmark: 5", ["'benchmark'", "found 5"]),
        ("benchmark: {dataset: mnist}\ntrain: 5", ["'train'", "found 5"]),
        ("benchmark: {dataset: [[a]]}", ["'benchmark.dataset'", "dataset name or image folder"]),
        ("benchmark: {dataset: mnist}\n3: 4", ["'3'", "keys should be strings"]),
        ("benchmark: {dataset: [a, b], tasks: 2}", ["a list of datasets is one task for each"]),
    ],
)
def test_bad_presets(text: str, parts: list[str], tmp_path: Path, out: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(text)
    message = refused(preset, out=out)
    for part in parts:
        assert part in message, message


def test_a_preset_that_is_no_text(tmp_path: Path, out: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_bytes(b"\xff\xfe\x00binary")
    assert "cannot be read as text" in refused(preset, out=out)
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml cannot be read as text (Is a directory)" in refused(tmp_path / "folder.yaml", out=out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(world: World, out: Path) -> None:
    message = refused(world.preset, "--device", "cuda", out=out)
    assert message == "device: cuda was asked for, but PyTorch sees no GPU; use --device cpu or auto"


def empty_class(world: World) -> list[str]:
    for path in (world.images / "train" / "elm").iterdir():
        path.unlink()
    return [f"{world.images / 'train'} has class folders without images: 'elm'"]


def absent_folder(world: World) -> list[str]:
    shutil.rmtree(world.images)
    return [f"{world.images} does not exist"]


def truncated_images(world: World) -> list[str]:
    paths = [world.images / "train" / "ash" / "0.png", world.images / "test" / "fir" / "1.png"]
    for path in paths:
        path.write_bytes(path.read_bytes()[:60])
    return ["2 of 66 images cannot be read", *map(str, paths), "--skip-bad"]


def class_in_two_datasets(world: World) -> list[str]:
    other = world.folder / "more"
    for split in ("train", "test"):
        shutil.copytree(world.images / split / "ash", other / split / "ash")
        shutil.copytree(world.images / split / "elm", other / split / "oak")
    text = world.preset.read_text().replace(f"dataset: {world.images}", f"dataset: [{world.images}, {other}]")
    world.preset.write_text(text.replace("  tasks: 3\n", ""))
    return ["class 'ash' is in two tasks, 1 ('trees') and 2 ('more')"]


def other_architecture(world: World) -> list[str]:
    save_file({"conv1.weight": torch.ones(8, 3, 3, 3), "fc.weight": torch.ones(2, 8)}, world.weights)
    return [str(world.weights)]


def wrong_shape(world: World) -> list[str]:
    tensors = load_file(world.weights)
    tensors["blocks.1.attn.proj.weight"] = torch.ones(16, 15)
    save_file(tensors, world.weights, HEADER)
    return [f"{world.weights}: tensor 'blocks.1.attn.proj.weight' has shape [16, 15], expected [16, 16]"]


def shallower(world: World) -> list[str]:
    write_weights(world.weights, replace(VIT, depth=2))
    return ["method.e_layers has layer 3; the backbone's layers are 1 to 2"]


def no_weights(world: World) -> list[str]:
    world.weights.write_bytes(b"not a tensor in sight")
    return [f"{world.weights} is damaged or no weights file"]


@pytest.mark.parametrize(
    "spoil",
    [
        empty_class,
        absent_folder,
        truncated_images,
        class_in_two_datasets,
        other_architecture,
        wrong_shape,
        shallower,
        no_weights,
    ],
)
def test_bad_files(spoil: Callable[[World], list[str]], tmp_path: Path, out: Path) -> None:
    world = make_world(tmp_path)
    parts = spoil(world)
    message = refused(world.preset, out=out)
    for part in parts:
        assert part in message, message


def test_bad_images_can_be_skipped(tmp_path: Path, out: Path) -> None:
    world = make_world(tmp_path)
    *_, first, second, _ = truncated_images(world)
    done = call("run", world.preset, "--out", out, "--skip-bad", "--no-baseline", "--json")
    assert done.code == 0, done.err
    assert done.json["skipped_images"] == 2
    assert json.loads((out / "result.json").read_text())["skipped_images"] == 2
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["skipped_images"] == [first, second]
    assert [(task["train"], task["test"]) for task in manifest["tasks"]] == [(12, 9), (13, 9), (13, 8)]


def test_no_network(world: World, out: Path, tmp_path: Path) -> None:
    answer = elsewhere(
        "run", world.preset, "--out", out, "--backbone", "nobody/nothing", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert answer.code == 2
    *notes, error = answer.err.splitlines()
    assert error.startswith("dualprompt: error: backbone 'nobody/nothing' could not be fetched: it is not in the hub's")
    assert notes == ["asking the hub for backbone nobody/nothing"]
    assert not out.exists()


def test_as_a_user_sees_it(world: World, out: Path) -> None:
    answer = shell("run", world.preset, "--out", out, "--train.epoch", "3")
    assert "did you mean 'epochs'?" in answer.error
    assert answer.out == ""
    assert not out.exists()


@pytest.fixture(scope="module")
def truth(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("truth") / "run"
    assert call("run", world.preset, "--out", out).code == 0
    return remains(out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def last_line(answer: Any) -> str:
    assert answer.code == 2, answer
    assert "Traceback" not in answer.err
    *notes, error = answer.err.splitlines()
    assert not any(note.startswith("dualprompt: error") for note in notes)
    assert error.startswith("dualprompt: error: ")
    return error


def checkpoints(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(run / "checkpoints").items() if not name.endswith(".partial")}


def test_a_full_disk(small_disk: Path, world: World, truth: dict[str, Any]) -> None:
    run = interrupted(world, small_disk / "run")
    before = checkpoints(run)
    filler = small_disk / "filler"
    fill(filler)
    for _ in range(2):
        error = last_line(call("resume", run))
        assert "the disk is full: " in error
        assert "free some space" in error
        assert before.items() <= checkpoints(run).items()
    filler.unlink()
    assert call("resume", run).code == 0
    assert remains(run) == truth


def test_a_full_disk_from_the_start(small_disk: Path, world: World) -> None:
    fill(small_disk / "filler")
    assert "the disk is full: " in last_line(call("run", world.preset, "--out", small_disk / "run"))


def test_a_log_that_cannot_grow(world: World, tmp_path: Path) -> None:
    """/dev/full answers every write as a full disk does, also to those who may not mount one."""
    run = interrupted(world, tmp_path / "run")
    log = run / "metrics.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    with pytest.raises(DualPromptError, match=f"the disk is full: {log} could not be written"):
        Run(run).log(event="epoch", task=1, epoch=1, loss=0.5)
    before = checkpoints(run)
    assert f"{log} is a link" in last_line(call("resume", run))  # nobody who resumes a run writes through one
    assert checkpoints(run) == before


def test_a_limit_on_the_size_of_files(world: World, truth: dict[str, Any], tmp_path: Path) -> None:
    run = interrupted(world, tmp_path / "run", "--checkpoint.every_seconds", "0")
    before = checkpoints(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        answer = call("resume", run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "safetensors cannot be written (" in last_line(answer)
    assert "File too large" in last_line(answer)
    assert before.items() <= checkpoints(run).items()
    assert call("resume", run).code == 0
    assert remains(run) == truth


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(world: World, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written (Permission denied)" in refused(world.preset, out=tmp_path / "out")


def test_a_loss_that_is_not_finite(world: World, out: Path) -> None:
    answer = call("run", world.preset, "--out", out, "--no-baseline", "--train.lr", "1e30", "--train.epochs", "3")
    assert answer.code == 2
    last = answer.err.splitlines()[-1]
    assert "the loss of task 1" in last
    assert "is not finite; lower train.lr (and rates of the method's own, as head_lr) or set train.clip" in last
    assert not (out / "result.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--version", "list presets", "list presets --json"])
def test_output_that_nobody_takes(words: str) -> None:
    """A full disk is an error; a reader that has gone is none of ours; a closed stdout is left alone."""
    command = f"{sys.executable} -m dualprompt {words}"

    def end(how: str) -> tuple[int, str]:
        done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{command} {how}"], stderr=subprocess.PIPE, text=True)
        return done.returncode, done.stderr

    said = "dualprompt: error: the output cannot be read or written (No space left on device)\n"
    assert end("> /dev/full") == (2, said)
    assert end("| true") == (141, "")
    assert end(">&-") == (0, "")


def test_what_nobody_foresaw_of_a_file_is_one_line(world: World, out: Path) -> None:
    assert "File name too long" in call("info", "x" * 5000).error
    assert "unknown key" in call("run", world.preset, f"--{'a.' * 2000}b", "1", "--out", out).error
