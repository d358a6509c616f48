"""Each command of `raykv`: for people, as JSON, its exit code; what is wrong is one sentence, or click's usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raykv.cli import main
from raykv.engine_messages import Missed, Story, TokenRange, Why
from raykv.store_messages import Medium
from raykv.types import EngineId, RequestId
from tests.api.cases import CHILD, HASHES, LEFT, RIGHT, TOKENS, caller, desk, store
from tests.cli.conftest import Run, said
from tests.support.fake_operators import FakeWorld

IDS = json.dumps(TOKENS)


@pytest.fixture(autouse=True)
def held(world: FakeWorld) -> None:
    store(world).put(HASHES[:2], Medium.DISK)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("tiers",), ["default@a1a1a1a1a1a1", "host", "serves"]),
        (("tiers", "list", "-s", "@right"), ["default@b2b2b2b2b2b2"]),
        (("tiers", "add", "fs", "1MiB", "--path", "/mnt/kv"), ["add tier fs is done at 2 of 2 stores"]),
        (("tiers", "resize", "disk", "2MiB"), ["resize tier disk is done"]),
        (("tiers", "drain", "disk", "-s", "default@a1a1"), ["drain tier is done"]),
        (("tiers", "remove", "disk", "--yes"), ["remove tier disk is done"]),
        (("child",), ["nixl", "NixlConnector", "engine-b"]),
        (("child", "list", "-e", "engine-a"), ["engine-a"]),
        (("child", "add", json.dumps(CHILD), "-e", "engine-b"), ["ExampleConnector was added to engine engine-b."]),
        (("child", "remove", "nixl", "-y"), ["nixl was removed from engine engine-a."]),
        (("child", "pause", "nixl"), ["nixl was paused in engine engine-a."]),
        (("child", "resume", "nixl"), ["nixl was resumed in"]),
        (("child", "restart", "nixl"), ["nixl was restarted in"]),
        (("child", "reorder", "files", "tiers", "nixl"), ["asks its 3 children in the order files, tiers, nixl."]),
        (("lookup", "--tokens", IDS), ["The first 32 of 50 tokens are held", "disk of default@a1a1a1a1a1a1"]),
        (("pin", "-t", IDS, "--for", "10m", "--note", "why"), ["2 blocks are pinned", "raykv unpin pin-"]),
        (("pins",), ["none"]),
        (("prefetch", "-t", IDS, "--to", "host"), ["prefetch is done"]),
        (("clear", "--model", "tiny", "--yes"), ["clear is done at 2 of 2 stores: 2 blocks"]),
        (("clear", "--everything", "--yes"), ["clear is done"]),
        (("quota",), ["tag:0000000000000000"]),
        (("quota", "alice", "1GiB"), ["quota 1 GiB is done"]),
        (("quota", "alice", "none"), ["quota none is done"]),
        (("verify",), ["verify is done at 2 of 2 stores"]),
        (("drain", "left"), ["Node a1a1a1a1a1a1 is empty: it can be removed."]),
        (("drain", "left", "--undo"), ["takes engines and stores again"]),
        (("top", "--once", "--every", "0.01"), ["tokens/s by source", "engine-a", "nixl", "tiers, in blocks/s"]),
        (("watch", "--every", "0.01", "--for", "0.02"), []),
        (("explain",), ["none"]),
    ],
)
def test_good_for_people_and_as_json(raykv: Run, args: tuple[str, ...], words: list[str]) -> None:
    done = raykv(*args)
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert all(word in text or word in done.output for word in words)
    again = raykv(*args, "--json")
    assert again.exit_code in (0, 1, 3)  # some can't be done twice
    for line in [again.stdout] if args[0] not in ("top", "watch") else again.stdout.splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("tiers", "resize", "hots", "1MiB"), 3, 'Did you mean "host"'),
        (("tiers", "resize", "host", "-5"), 2, ""),
        (("tiers", "resize", "host", "x"), 1, 'capacity is "x"'),
        (("tiers", "add", "fs", "1MiB"), 1, "path is missing"),
        (("tiers", "remove", "fs", "-y"), 3, "has no tier"),
        (("tiers", "explode"), 2, ""),
        (("child", "pause", "nixle"), 3, 'Did you mean "nixl"'),
        (("child", "reorder", "nixl"), 1, "without tiers, files"),
        (("child", "add", "{"), 1, "is no JSON"),
        (("child", "add", "@/nowhere.json"), 2, "can't be read"),
        (("lookup",), 2, "Give one prompt"),
        (("lookup", "Hello", "-t", "1"), 2, "Give one prompt"),
        (("lookup", "-t", "1,x"), 2, "is no list of numbers"),
        (("lookup", "-t", IDS, "-e", "nope"), 3, "There is no engine"),
        (("lookup", "-t", IDS, "--model", "big"), 3, "no engine of the model"),
        (("lookup", "-t", "-3"), 1, "prompt[0] is -3"),
        (("pin", "-t", IDS), 2, "--for"),
        (("pin", "-t", IDS, "--for", "x"), 1, "time_limit is"),
        (("pin", "-t", IDS, "--for", "1m", "-s", "@right"), 3, "None of the prompt's blocks is held"),
        (("unpin", "nope"), 3, "There is no pin"),
        (("prefetch", "-t", IDS, "--to", "fs"), 3, "has no tier"),
        (("clear",), 1, "--everything"),
        (("clear", "--tier", "fs", "-y"), 3, "no tier in these stores"),
        (("quota", "alice"), 2, "Give the tenant's SIZE"),
        (("quota", "alice", "lots"), 1, "quota is"),
        (("explain", "nope"), 3, "There is no request"),
        (("drain", "nowhere"), 3, "There is no node"),
        (("watch", "--every", "0"), 1, "every_s is 0"),
        (("top", "--once", "--every", "x"), 2, ""),
        (("completion", "tcsh"), 2, ""),
    ],
)
def test_bad_is_one_sentence_or_usage(
    raykv: Run, world: FakeWorld, args: tuple[str, ...], code: int, says: str
) -> None:
    before = dict(store(world).tiers), dict(store(world).blocks), dict(store(world).ops)
    done = raykv(*args)
    assert done.exit_code == code and says in done.stderr, done.output
    assert "Traceback" not in done.output
    assert (dict(store(world).tiers), dict(store(world).blocks), dict(store(world).ops)) == before
    assert not desk(world).orders
    if code != 2:
        again = raykv(*args, "--json")
        assert again.exit_code == code and says.replace("--everything", "everything") in said(again)["error"]


@pytest.mark.parametrize(
    "args",
    [("clear", "--tier", "disk"), ("tiers", "remove", "disk"), ("child", "remove", "nixl"), ("clear", "--everything")],
)
def test_what_destroys_is_asked_for(raykv: Run, world: FakeWorld, args: tuple[str, ...]) -> None:
    for text in ("n\n", ""):
        done = raykv(*args, text=text)
        assert done.exit_code == 1 and "[y/N]" in done.stderr
        assert not store(world).ops and len(store(world).blocks) == 2 and not desk(world).orders
    assert raykv(*args, text="y\n").exit_code == 0


def test_what_goes_on_is_partly_done(raykv: Run, world: FakeWorld) -> None:
    done = raykv("tiers", "drain", "disk", "--wait", "0", "--json")
    assert done.exit_code == 3 and said(done)["ok"] is False
    assert [part["running"] for part in said(done)["parts"]] == [True, True]
    again = raykv("tiers", "drain", "disk", "--number", said(done)["number"])
    assert again.exit_code == 0
    desk(world).steps = 10**9
    assert raykv("child", "pause", "nixl", "--wait", "0.01").exit_code == 3


def test_a_silent_store(raykv: Run, world: FakeWorld) -> None:
    caller(world, RIGHT).silent = True
    assert "did not answer" in " ".join(raykv("top", "--once", "--every", "0.01").stdout.split())
    done = raykv("verify")
    assert done.exit_code == 1 and "does not answer" in done.stderr
    assert raykv("verify", "-s", "@left").exit_code == 0


def test_prompts_from_files(raykv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("raykv.api.prompts.token_ids", lambda prompt, engine: asked.append(prompt) or tuple(TOKENS))
    (tmp_path / "prompt").write_text("Hello")
    messages = [{"role": "user", "content": "Hello"}]
    (tmp_path / "messages").write_text(json.dumps(messages))
    (tmp_path / "request").write_text(json.dumps({"model": "tiny", "messages": messages}))
    assert raykv("lookup", "Hello").exit_code == 0
    assert raykv("lookup", "-f", str(tmp_path / "prompt")).exit_code == 0
    assert raykv("lookup", "-f", "-", text="Hello").exit_code == 0
    for name in ("messages", "request"):
        assert raykv("lookup", "-m", str(tmp_path / name)).exit_code == 0
    assert asked == ["Hello"] * 3 + [messages] * 2
    assert raykv("lookup", "-m", str(tmp_path / "prompt")).exit_code == 1


def test_a_childs_config_from_a_file(raykv: Run, tmp_path: Path) -> None:
    (tmp_path / "child.json").write_text(json.dumps(CHILD))
    assert raykv("child", "add", f"@{tmp_path}/child.json").exit_code == 0
    assert raykv("child", "add", "-", "-e", "engine-b", text=json.dumps(CHILD)).exit_code == 0


def test_explain(raykv: Run, world: FakeWorld) -> None:
    missed = (Missed(0, 48, "nixl", Why.TIMED_OUT, "after 5 s"),)
    ranges = (TokenRange(0, 32, "disk", "tiers"), TokenRange(32, 50, "computed"))
    desk(world).kept["cmpl-1-0"] = Story(
        RequestId("cmpl-1-0"), EngineId("engine-a"), 1.0, 50, ranges, missed, ended=2.0, hashes=b"".join(HASHES)
    )
    done = raykv("explain", "cmpl-1")
    assert done.exit_code == 0 and "nixl: timed out (after 5 s)" in " ".join(done.stdout.split())
    found = said(raykv("explain", "cmpl-1-0", "--json"))
    assert sum(found["by_source"].values()) == found["prompt_tokens"] == 50 and found["reason"].startswith("nixl")
    assert said(raykv("explain", "--json")) == ["cmpl-1-0"]


def test_frames_of_top_as_lines(raykv: Run) -> None:
    done = raykv("top", "--json", "--every", "0.01", "--for", "0.05")
    frames = [json.loads(line) for line in done.stdout.splitlines()]
    assert frames and all(frame["rates"]["tokens"]["engine-a"]["host"] == 0 for frame in frames)
    assert [one["actor"] for one in frames[0]["stores"]] == [LEFT, RIGHT]


def test_completion(raykv: Run) -> None:
    for shell in ("bash", "zsh", "fish"):
        done = raykv("completion", shell)
        assert done.exit_code == 0 and "_RAYKV_COMPLETE" in done.stdout


def test_every_command_has_help_and_json(raykv: Run) -> None:
    without = {"completion"}
    commands = [(name, one) for name, one in main.commands.items() if not hasattr(one, "commands")]
    commands += [(f"{group} {name}", one) for group, of in main.commands.items() if hasattr(of, "commands")
                 for name, one in of.commands.items()]  # fmt: skip
    for name, one in commands:
        assert one.help, name
        assert name in without or any("--json" in parameter.opts for parameter in one.params), name
        assert raykv(*name.split(), "--help").exit_code == 0
    assert "3 done in part" in " ".join(raykv("--help").stdout.split())


def test_status_shows_engines_with_their_chains(raykv: Run, world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from raykv.actors import cluster, controller_handle, desk_handle, observer

    view = SimpleNamespace(address="10.0.0.1:6379", nodes=[], hosts=[], stores=[], directory=None)
    monkeypatch.setattr(observer, "look", lambda *_: view)
    monkeypatch.setattr(controller_handle, "find", lambda namespace: None)
    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(cluster, "nodes", lambda: [])
    monkeypatch.setattr(desk_handle, "desks", lambda namespace: list(world.desk_callers))
    monkeypatch.setattr(desk_handle, "find_desk", lambda name, namespace: world.desk_callers[name])
    desk(world).seen_s = 1800
    text = " ".join(raykv("status").stdout.split())
    assert "nixl up tiers up files up" in text and "host 64%, computed 20%, gpu 16%" in text
    assert "engine engine-a: no word from it for 30 m" in text
    found = said(raykv("status", "--json"))
    assert [child["name"] for child in found["engines"][0]["children"]] == ["nixl", "tiers", "files"]
