"""`make demo` as a person runs it, with a model that is quick: all rounds have the same tokens, and it says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(900)]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def test_the_demo(tiny_model: Path, tmp_path: Path) -> None:
    model, report = tmp_path / "model", tmp_path / "report.json"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "examples.demo", "--model", str(model), "--report", str(report)]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=800, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-4000:]
    told = json.loads(report.read_text())
    assert told["tokens_equal"] and len(told["questions"]) == 3
    assert all(sum(one["rounds"]["warm"]["loaded_tokens"].values()) > 0 for one in told["questions"])
    assert b"kill -9 of ExampleConnector" in done.stdout and b"cold" in done.stdout
