"""scripts/setup.py against pyproject.toml and constraints.txt: all is installed, and with a version that was tested."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BACKENDS = {"cpu", "cuda"}


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("raykv_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement.strip())[0]).lower()


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    parts = [line.split("==") for line in lines if line]
    return {name_of(name): version for name, version in parts}


def test_every_extra_is_installed(setup: ModuleType) -> None:
    extras = set(re.fullmatch(r"\.\[(.*)\]", setup.TARGET)[1].split(","))
    assert extras == (PROJECT["optional-dependencies"].keys() - BACKENDS) | {setup.BACKEND}


def test_an_environment_of_another_target_is_not_up_to_date(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = setup.source_fingerprint()
    assert setup.source_fingerprint() == before
    monkeypatch.setattr(setup, "TARGET", setup.TARGET.replace(",router", ""))
    assert setup.source_fingerprint() != before


def test_an_environment_without_the_router_gets_it(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip is faked: what it would find missing is what it is then told to install, and nothing else."""
    ran: list[tuple[str, ...]] = []

    def pip(what: str, *args: str) -> None:
        ran.append(args)
        if "--report" in args:
            missing = '{"install": [{"metadata": {"name": "uvicorn", "version": "0.54.0"}}]}'
            Path(args[args.index("--report") + 1]).write_text(missing)

    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(setup, "LOG", tmp_path / "log")
    monkeypatch.setattr(setup, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(setup, "installed", lambda package, version="": [tmp_path / package])
    monkeypatch.setattr(setup, "pip", pip)
    monkeypatch.setattr(setup, "heal", lambda: None)
    monkeypatch.setattr(setup, "torch_index", list)
    setup.PYTHON.touch()
    setup.STAMP.write_text('{"source": "of a target without the router", "torch": []}')
    assert setup.main() == 0
    assert setup.TARGET in ran[0] and "--dry-run" in ran[0]
    assert ran[1] == ("install", "--no-deps", "uvicorn==0.54.0")
    ran.clear()
    assert setup.main() == 0 and ran == []


def test_what_is_asked_for_has_a_tested_version() -> None:
    """cuda's vLLM is the one exception: only a machine with a GPU can say which."""
    asked = [*PROJECT["dependencies"]]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        asked += requirements if extra != "cuda" else []
    assert {name_of(one) for one in asked} <= pins().keys()


def test_what_ray_serve_brings_has_a_tested_version() -> None:
    """Its servers are the ones that strangers can reach."""
    brought = of_ray("serve") - of_ray("default")
    assert {"uvicorn", "starlette"} <= brought
    assert brought <= pins().keys()


def of_ray(extra: str) -> set[str]:
    return {name_of(r) for r in metadata.requires("ray") or [] if re.search(rf"""extra == ['"]{extra}['"]""", r)}
