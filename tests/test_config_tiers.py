"""The JSON of a TierConnector at the door: what it means, and with which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.config.reader import Reader
from raykv.config.tiers import KEYS, TierOptions, parse_tiers, size
from raykv.errors import ConfigError
from raykv.store_messages import Cascade, Eviction, Medium, StoreSpec, TierSpec

HOST = {"medium": "host", "capacity": "1GiB"}
DISK = {"medium": "disk", "path": "/nvme/raykv", "capacity": "2TiB"}
FS = {"medium": "fs", "path": "/mnt/shared/kv", "capacity": "10TiB"}
PEER = {"medium": "peer"}


def refused(extra: Any, *words: str) -> None:
    """One paragraph that has all these words."""
    with pytest.raises(ConfigError) as caught:
        parse_tiers(extra)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for word in words:
        assert word in message, message


def test_defaults() -> None:
    spec = StoreSpec("default", (TierSpec(Medium.HOST, 1 << 30),), 0, True, Eviction.LRU, Cascade.EVICT, 60.0)
    assert parse_tiers({"tiers": [HOST]}) == TierOptions(spec, 1.0, 10.0, 30.0, None)


def test_everything_set() -> None:
    extra = {
        "tiers": [HOST, DISK],
        "store": "chat.v2",
        "checksum": False,
        "eviction": "s3fifo",
        "cascade": "write",
        "slot": "2MiB",
        "lease_s": 30,
        "lookup_timeout_s": 0.5,
        "timeout_s": 5,
        "load_timeout_s": 7,
        "model_identity": "my model 3",
        "ray_address": "10.0.0.1:6379",
        "namespace": "blue",
    }
    assert set(extra) == KEYS
    tiers = (TierSpec(Medium.HOST, 1 << 30), TierSpec(Medium.DISK, 2 << 40, "/nvme/raykv"))
    spec = StoreSpec("chat.v2", tiers, 2 << 20, False, Eviction.S3FIFO, Cascade.WRITE, 30.0)
    assert parse_tiers(extra) == TierOptions(spec, 0.5, 5.0, 7.0, "my model 3", "10.0.0.1:6379", "blue")


def test_a_disk_alone_and_a_path_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tier,) = parse_tiers({"tiers": [{**DISK, "path": "~/kv"}]}).store.tiers
    assert tier.path == "/home/me/kv"


def test_other_nodes_and_a_shared_folder() -> None:
    store = parse_tiers({"tiers": [HOST, PEER, FS]}).store
    assert store.peer and store.tiers == (
        TierSpec(Medium.HOST, 1 << 30),
        TierSpec(Medium.FS, 10 << 40, "/mnt/shared/kv"),
    )
    assert not parse_tiers({"tiers": [HOST, FS]}).store.peer
    assert parse_tiers({"tiers": [DISK, FS]}).store.tiers[1].medium is Medium.FS


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (8192, 8192),
        ("8192", 8192),
        ("8192B", 8192),
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("1.5TiB", 3 << 39),
        ("512MiB", 512 << 20),
        ("10GB", 10**10),
        ("8kb", 8000),
    ],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert size(Reader({"capacity": text}, ""), "capacity", 4096) == nbytes


@pytest.mark.parametrize(
    "wrong", [True, -1, 0, 4095, 1.5, None, "", "GiB", "64 GiBs", "64G", "1e9", "-1GiB", "0x10", [], "9" * 60, "∞"]
)
def test_a_bad_size_is_refused(wrong: Any) -> None:
    refused({"tiers": [{"medium": "host", "capacity": wrong}]}, "tiers[0].capacity", "64GiB")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["tiers is missing", "fastest first"]),
        ({"tiers": []}, ["tiers is []", "at least one tier"]),
        ({"tiers": "host"}, ['"host"', "a list"]),
        ({"tiers": ["host"]}, ["tiers[0]", "no object"]),
        ({"tiers": [{}]}, ["tiers[0].medium is missing", "host, disk"]),
        ({"tiers": [{"medium": "hots", "capacity": 1}]}, ['"hots"', 'Did you mean "host"']),
        ({"tiers": [{"medium": "host"}]}, ["tiers[0].capacity is missing", "64GiB"]),
        ({"tiers": [{**HOST, "path": "/x"}]}, ["tiers[0].path", "no folder"]),
        ({"tiers": [{**HOST, "size": "1GiB"}]}, ['"size"', "capacity"]),
        ({"tiers": [{**HOST, "cascade": "write"}]}, ['"cascade"', "It belongs in kv_connector_extra_config"]),
        ({"tiers": [HOST, {"medium": "disk", "capacity": "1GiB"}]}, ["tiers[1].path is missing", "/nvme/raykv"]),
        ({"tiers": [{**DISK, "path": "kv"}]}, ['"kv"', "absolute"]),
        ({"tiers": [HOST, HOST]}, ["tiers[1].medium", "tiers[0]", "one tier of each"]),
        ({"tiers": [HOST, {**PEER, "capacity": "1GiB"}]}, ["tiers[1].capacity", "left out"]),
        ({"tiers": [HOST, {**PEER, "path": "/x"}]}, ["tiers[1].path", "left out"]),
        ({"tiers": [PEER]}, ["nothing but", "tier of this node"]),
        ({"tiers": [PEER, FS]}, ["no tier of this node before", "host"]),
        ({"tiers": [FS]}, ["no tier of this node before", "host"]),
        ({"tiers": [FS, HOST]}, ["fs, host", "fastest first: host, disk, peer, fs"]),
        ({"tiers": [HOST, {"medium": "fs", "capacity": "1GiB"}]}, ["tiers[1].path is missing", "all nodes share"]),
        ({"tiers": [HOST, {**FS, "path": "kv"}]}, ['"kv"', "absolute"]),
        ({"tiers": [DISK, HOST]}, ["disk, host", "fastest first: host, disk"]),
        ({"tiers": [HOST], "capacity": "1GiB"}, ['"capacity"', "an entry of kv_connector_extra_config.tiers"]),
        ({"tiers": [HOST], "raykv": {}}, ['"raykv"', "MultiConnector"]),
        ({"tiers": [HOST], "evictoin": "lru"}, ['"evictoin"', 'Did you mean "eviction"']),
        ({"tiers": [HOST], "eviction": "fifo"}, ['"fifo"', "lru, s3fifo"]),
        ({"tiers": [HOST], "cascade": True}, ["cascade is true", "evict, write"]),
        ({"tiers": [HOST], "checksum": "yes"}, ['"yes"', "true or false"]),
        ({"tiers": [HOST], "slot": "5000"}, ['"5000"', "multiple of 4096"]),
        ({"tiers": [HOST], "slot": 0}, ["slot is 0"]),
        ({"tiers": [HOST], "lease_s": 0}, ["lease_s is 0", "above 0"]),
        ({"tiers": [HOST], "store": "a/b"}, ['"a/b"', "letters"]),
        ({"tiers": [HOST], "store": "x" * 65}, ["at most 64"]),
        ({"tiers": [HOST], "model_identity": ""}, ["model_identity", "not empty"]),
    ],
)
def test_what_is_refused(extra: Any, words: list[str]) -> None:
    refused(extra, *words)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
tiers = st.dictionaries(
    st.sampled_from(["medium", "capacity", "path", "x"]), scalars | st.sampled_from([*Medium, "1GiB", "/kv"])
)


@given(st.dictionaries(st.sampled_from([*sorted(KEYS), "x"]), scalars | st.lists(tiers | scalars, max_size=3)))
def test_whatever_comes_in_is_read_or_refused(extra: dict[str, Any]) -> None:
    try:
        parse_tiers(extra)
    except ConfigError as error:
        assert "\n" not in str(error)
