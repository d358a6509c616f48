"""What is drawn on a terminal, and any command line at all."""

from __future__ import annotations

import io
import json
from typing import NoReturn

import pytest
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from raykv import api
from raykv.api import Cluster, OperationError, Progress, prompts, store_ops
from raykv.cli import connected, main, top
from raykv.store_messages import Medium
from tests.api.cases import HASHES, TOKENS, store
from tests.support.examples import examples
from tests.support.fake_operators import FakeWorld


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


@pytest.fixture(autouse=True)
def for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with --json leaves the shared console quiet."""
    monkeypatch.setattr(connected.out, "quiet", False)


def drawn(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "err", terminal())
    with connected.Bars() as bars:
        bars(Progress("verify", "default@a1", 1, 4))
        bars(Progress("verify", "default@a1", 4, 4, "4 blocks are well.", True))
        bars(Progress("pause nixl", "engine-a", detail="jobs are settled"))
        bars(Progress("pause nixl", "engine-a", detail="done", ended=True))
    text = drawn(connected.err)
    assert "verify at default@a1" in text and "4/4" in text and "pause nixl at engine-a" in text


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "err", Console(file=io.StringIO()))
    with connected.Bars() as bars:
        bars(Progress("verify", "s", 1, 4))
        bars(Progress("verify", "s", 2, 4))
        bars(Progress("verify", "s", 4, 4, ended=True))
    assert drawn(connected.err) == "verify at s: 4 of 4\n"


def test_top_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "out", terminal())
    world = FakeWorld()
    top._live(Cluster(world, 1.0), 0.001, 0.0)
    assert "tokens/s by source" in drawn(top.out)


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_of_top_fits_a_terminal(width: int) -> None:
    """No cell is folded, and names are whole."""
    console = Console(file=io.StringIO(), width=width)
    [(snapshot, speed)] = top._frames(Cluster(FakeWorld(), 1.0), 0.001, None, once=True)
    console.print(top.frame(snapshot, speed, width))
    lines = drawn(console).splitlines()
    assert sum(store.at in line for store in snapshot.stores for line in lines) == 4
    assert len(lines) == 22 + (width == 80), "the head alone takes two lines"
    assert ("growth/s" in drawn(console)) is (width == 120)


WORDS = st.sampled_from(
    ["tiers", "child", "lookup", "pin", "unpin", "pins", "prefetch", "clear", "quota", "verify", "explain", "drain",
     "list", "add", "remove", "resize", "pause", "resume", "restart", "reorder", "--json", "--yes", "-t", "--for",
     "10m", "--store", "@left", "--engine", "engine-a", "host", "disk", "fs", "1MiB", "-5", "nixl", "tiers", "files",
     "left", json.dumps(TOKENS), "1,2,3", "{}", "", "--path", "/x", "--wait", "0", "x", "--tier", "--model", "tiny",
     "--help",
     "--everything", "--undo", "alice", "none", "--number", "n1", "--to", "--node"]
)  # fmt: skip
FIRST = st.sampled_from([["tiers"], ["child"], ["lookup"], ["pin"], ["clear"], ["quota"], ["prefetch"], ["verify"],
                         ["explain"], ["drain"], ["unpin"], ["pins"]])  # fmt: skip


def no_tokenizer(model: str) -> NoReturn:
    """As for a model whose files are elsewhere; what looks for them (transformers) takes seconds to import."""
    raise OperationError(f"The tokenizer of {model} can't be loaded here.")


@settings(max_examples=examples(30), phases=(Phase.generate,))
@given(st.lists(st.tuples(FIRST, st.lists(WORDS, max_size=7)), min_size=1, max_size=2))
def test_any_command_line(lines: list[tuple[list[str], list[str]]]) -> None:
    """Done, partly, an error in a sentence, or click's usage; never a traceback. The state stays whole."""
    world = FakeWorld()
    store(world).put(HASHES, Medium.HOST, Medium.DISK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_ops, "POLL_S", 0.001)
        patch.setattr(api, "connect", lambda address, namespace, timeout: Cluster(world, 1.0))
        patch.setattr(prompts, "tokenizer", no_tokenizer)
        for first, rest in lines:
            done = CliRunner().invoke(main, [*first, *rest], input="")
            assert done.exception is None or isinstance(done.exception, SystemExit), (first, rest, done.exception)
            assert done.exit_code in (0, 1, 2, 3), (first, rest)
            if done.exit_code in (0, 3) and "--json" in rest and "--help" not in rest:
                json.loads(done.stdout)
    world.check_integrity()
