"""The files of `deploy/` start commands that exist, with options that it takes, and let nobody in without a token."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dualprompt import __version__
from dualprompt.cli import build_parser

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_container_starts_a_command_that_exists_as_nobody_special():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    said = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if re.match(r"[A-Z]+ ", line)}
    program, *words = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"])]
    options = build_parser()[0].parse_args(words)
    assert (program, options.command, options.port) == ("dualprompt", "serve", 8000)
    assert str(options.model).startswith(said["VOLUME"])
    assert said["USER"] == "dualprompt"
    assert "/healthz" in said["HEALTHCHECK"]
    pinned = re.findall(r"^torch==(\S+)$", (DEPLOY.parent / "constraints.txt").read_text(), flags=re.M)
    assert len(pinned) == 1  # what the image is built with
    for path in re.findall(r"^COPY (?!--from)(.*) \S+$", "\n".join(lines), flags=re.M):
        assert all((DEPLOY.parent / name).exists() for name in path.split())


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "dualprompt.service"])
def test_files_name_the_version_they_came_with(name: str):
    named = re.findall(r"(?:dualprompt(?:\[serve\])?(?::|==)|version=\")(\d+\.\d+\.\d+)", (DEPLOY / name).read_text())
    assert set(named) == {__version__}


def test_only_the_proxy_is_reached_from_outside_and_a_token_must_be_set():
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert "ports" not in found["dualprompt"]
    assert ":?" in found["dualprompt"]["environment"]["DUALPROMPT_TOKEN"]
    assert (DEPLOY / found["dualprompt"]["build"]["context"] / found["dualprompt"]["build"]["dockerfile"]).exists()
    assert "dualprompt:8000" in (DEPLOY / "Caddyfile").read_text()


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path):
    text = (DEPLOY / "dualprompt.service").read_text()
    started = re.findall(r"^ExecStart=(.*)$", text, flags=re.M)[0].split()
    assert build_parser()[0].parse_args(started[1:]).host == "127.0.0.1"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = tmp_path / "dualprompt.service"
    unit.write_text(text.replace(started[0], "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
