"""README and docs name only what there is: files, headings, commands, targets, modules. Their configs are good."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from raykv.cli import main
from raykv.config import parse
from raykv.config.tiers import parse_tiers

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text()


def code_of(text: str) -> list[str]:
    """Lines of fenced blocks, and spans in a line."""
    fenced = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    return fenced + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(text_of(file)), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_modules_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in code_of(text_of(page)):
        for command in re.findall(r"^raykv ([a-z-]+)", code):
            assert command in main.commands, code
        for target in re.findall(r"\bmake ([a-z]+)", code):
            assert target in targets, code
        for module in re.findall(r"python -m (benchmarks\.\w+)", code):
            assert ROOT.joinpath(*module.split(".")).with_suffix(".py").exists(), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_tree_exist(page: Path) -> None:
    """`core/ledger.py` is a file of the package; `tests/...`, `examples/...` one of the tree."""
    for name in re.findall(r"`([a-z_]+/[\w/*.]+\.(?:py|yaml|md))`", text_of(page)):
        assert any([*ROOT.glob(name), *(ROOT / "raykv").glob(name)]), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configs_are_good(page: Path) -> None:
    for kind, block in FENCE.findall(text_of(page)):
        if kind != "json":
            continue
        config = json.loads(block)
        if config["kv_connector"] == "TierConnector":
            parse_tiers(config["kv_connector_extra_config"])
        else:
            assert parse(config).children


def test_every_command_is_in_the_readme_or_the_operators_page() -> None:
    pages = text_of(ROOT / "README.md") + text_of(ROOT / "docs" / "operators.md")
    assert {name for name in main.commands if f"raykv {name}" not in pages} == set()
