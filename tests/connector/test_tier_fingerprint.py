"""Who shares blocks with whom: each thing that decides their bytes changes the fingerprint, and nothing else does."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from raykv.connector import fingerprint, tier_setup
from raykv.connector.fingerprint import RankPlace
from raykv.errors import ConfigError
from raykv.store_messages import GroupLayout
from tests.support.fake_config import kv_cache_config, vllm_config
from tests.support.tier_bench import tier_child

pytestmark = pytest.mark.vllm
GROUPS = (GroupLayout(("a", "b")),)
PLACE = RankPlace(0, 2, 0, 1, True)
NUM_BLOCKS = 10


def caches(num_blocks: int = NUM_BLOCKS, dtype: torch.dtype = torch.float16, heads: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2, num_blocks, 16, heads, 8, dtype=dtype) for name in ("a", "b")}


class World:
    """All that a fingerprint is made of, to be changed piece by piece."""

    def __init__(self) -> None:
        self.config = vllm_config({**tier_child(), "engine_id": "e"})
        self.config.model_config = copy.copy(self.config.model_config)
        self.config.model_config.hf_config = copy.deepcopy(self.config.model_config.hf_config)
        self.groups, self.place, self.weights, self.num_blocks = GROUPS, PLACE, "w", NUM_BLOCKS
        self.caches = caches()

    def digest(self) -> bytes:
        found = fingerprint.facts(self.config, self.groups, self.caches, self.num_blocks, self.place, self.weights)
        return fingerprint.digest(found)


def test_it_is_16_bytes_and_always_the_same() -> None:
    assert World().digest() == World().digest() and len(World().digest()) == 16


def change(name: str, value: Any) -> Callable[[World], None]:
    """`name` is a dotted path below the world."""

    def do(world: World) -> None:
        *path, last = name.split(".")
        target: Any = world
        for part in path:
            target = getattr(target, part)
        assert getattr(target, last) != value
        setattr(target, last, value)

    return do


@pytest.mark.parametrize(
    "edit",
    [
        change("weights", "other"),
        change("config.model_config.hf_config.rms_norm_eps", 0.5),
        change("config.model_config.dtype", torch.float64),
        change("config.model_config.quantization", "fp8"),
        change("config.model_config.model_impl", "transformers"),
        change("config.model_config.disable_sliding_window", True),
        change("config.cache_config.cache_dtype", "fp8"),
        change("config.cache_config.block_size", 32),
        change("config.cache_config.prefix_caching_hash_algo", "xxhash"),
        change("config.cache_config.kv_cache_dtype_skip_layers", ["0"]),
        change("groups", (GroupLayout(("b", "a")),)),
        change("groups", (GroupLayout(("a", "b"), 4),)),
        change("place", replace(PLACE, tensor_rank=1)),
        change("place", replace(PLACE, tensor_size=4)),
        change("place", replace(PLACE, pipeline_rank=1)),
        change("place", replace(PLACE, pipeline_size=2)),
        lambda world: setattr(world, "caches", caches(dtype=torch.bfloat16)),
        lambda world: setattr(world, "caches", caches(heads=4)),
        lambda world: world.caches.update(a=torch.zeros(NUM_BLOCKS, 2, 16, 2, 8, dtype=torch.float16)),
        lambda world: world.caches.update(a=world.caches["a"].transpose(2, 3).contiguous().transpose(2, 3)),
    ],
    ids=lambda edit: "",
)
def test_each_field_changes_it(edit: Callable[[World], None]) -> None:
    world = World()
    edit(world)
    assert world.digest() != World().digest()


def test_environment_and_versions_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {World().digest()}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    found.add(World().digest())
    monkeypatch.setattr(fingerprint.vllm, "__version__", "9.9")
    found.add(World().digest())
    monkeypatch.setattr(fingerprint, "FORMAT", 99)
    found.add(World().digest())
    assert len(found) == 4


@pytest.mark.parametrize("scaled", [True, False])
def test_the_engines_length_counts_where_positions_depend_on_it(scaled: bool) -> None:
    found = set()
    for length in (1024, 2048):
        world = World()
        if scaled:
            world.config.model_config.hf_config.rope_parameters = {"rope_type": "longrope"}
        world.config.model_config.max_model_len = length
        found.add(world.digest())
    assert len(found) == (2 if scaled else 1)


def test_the_number_of_blocks_and_who_writes_do_not_count() -> None:
    world = World()
    world.num_blocks, world.caches = 24, caches(24)
    world.place = replace(PLACE, writes=False)
    world.config.kv_transfer_config.engine_id = "another"
    world.config.scheduler_config.max_num_seqs = 3
    world.config.model_config.hf_config._name_or_path = "/another/folder"
    assert world.digest() == World().digest()


def test_layers_that_lie_interleaved_in_one_storage_have_the_same_bytes() -> None:
    world = World()
    whole = torch.zeros(NUM_BLOCKS, 3, 16, 2, 8, dtype=torch.float16)
    world.caches = {"a": whole[:, 0], "b": whole[:, 1]}
    own = World()
    own.caches = {name: torch.zeros(NUM_BLOCKS, 16, 2, 8, dtype=torch.float16) for name in ("a", "b")}
    assert world.digest() == own.digest()


# -- places ---------------------------------------------------------------------------------------------------


def test_replicas_are_one_place_and_one_of_them_writes() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=2)
    config = SimpleNamespace(parallel_config=parallel)
    plain = [RankPlace.of(config, rank) for rank in range(8)]
    assert len(set(plain)) == 8 and all(place.writes for place in plain)
    mla = [RankPlace.of(config, rank, replicas=4) for rank in range(8)]
    assert [place.writes for place in mla] == [True, False, False, False] * 2
    assert {(place.tensor_rank, place.pipeline_rank) for place in mla} == {(0, 0), (0, 1)}


# -- weights --------------------------------------------------------------------------------------------------


def model_of(folder: Path, load_format: str = "auto", seed: int = 0) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), model_weights="", revision=None, seed=seed),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        cache_config=SimpleNamespace(),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"one" * 1000)
    (folder / "model-2.safetensors").write_bytes(b"two" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_weights_are_known_by_their_content(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "weights.json"
    first = fingerprint.weights_identity(model_of(folder), None, cache)
    assert cache.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "elsewhere"
    folder.rename(other)
    assert fingerprint.weights_identity(model_of(other), None, cache) == first
    (other / "model-2.safetensors").write_bytes(b"TWO" * 1000)
    assert fingerprint.weights_identity(model_of(other), None, cache) != first
    (other / "model-2.safetensors").write_bytes(b"two" * 1000)
    assert fingerprint.weights_identity(model_of(other), None, cache) == first
    (other / "model-2.safetensors").rename(other / "model-3.safetensors")
    assert fingerprint.weights_identity(model_of(other), None, cache) != first


def test_a_file_is_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "weights.json"
    first = fingerprint.weights_identity(model_of(folder), None, cache)

    class Never:
        def __init__(self) -> None:
            raise AssertionError("it was read again")

    with monkeypatch.context() as patched:
        patched.setattr(fingerprint.xxhash, "xxh3_128", Never)
        assert fingerprint.weights_identity(model_of(folder), None, cache) == first
        # A write that sets the old time again is seen by the inode's change time.
        stat = (folder / "model-1.safetensors").stat()
        (folder / "model-1.safetensors").write_bytes(b"ONE" * 1000)
        os.utime(folder / "model-1.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(AssertionError):
            fingerprint.weights_identity(model_of(folder), None, cache)
    cache.write_text("no json")
    assert fingerprint.weights_identity(model_of(folder), None, cache) != first
    cache.chmod(0o666)  # anybody may have written it
    cache.write_text('{"x": 1}')
    fingerprint.weights_identity(model_of(folder), None, cache)
    assert cache.read_text() == '{"x": 1}'


@pytest.mark.parametrize("load_format", ["auto", "tensorizer", "my-own"])
def test_unreadable_weights_are_shared_with_nobody(tmp_path: Path, load_format: str, raykv_log: list[str]) -> None:
    where = tmp_path / "not-there"
    found = {fingerprint.weights_identity(model_of(where, load_format), None, tmp_path / "c") for _ in range(2)}
    assert len(found) == 2
    assert all("model_identity" in line for line in raykv_log) and len(raykv_log) == 2
    given = [fingerprint.weights_identity(model_of(where, load_format), name, tmp_path / "c") for name in "aab"]
    assert given[0] == given[1] != given[2]


def test_random_weights_are_known_by_their_seed(tmp_path: Path) -> None:
    found = [fingerprint.weights_identity(model_of(tmp_path, "dummy", seed), None) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_scales_that_an_engine_finds_by_itself_are_its_own(folder: Path, tmp_path: Path) -> None:
    model = model_of(folder)
    model.cache_config.calculate_kv_scales = True
    assert len({fingerprint.weights_identity(model, "given", tmp_path / "c") for _ in range(2)}) == 2


# -- what vLLM's hashes cover ---------------------------------------------------------------------------------


def test_salts_adapters_and_images_are_in_vllms_hashes() -> None:
    """So the fingerprint need not know them. An adapter is there by name and path only: see TierScheduler's salt."""
    init_none_hash(sha256)

    def hashes(tokens: int = 0, **more: Any) -> tuple[bytes, ...]:
        request = Request("r", [tokens + i for i in range(40)], SamplingParams(max_tokens=1), None, **more)
        return tuple(get_request_block_hasher(16, sha256)(request))

    def image(name: str) -> Any:
        place = PlaceholderRange(offset=2, length=20)
        return [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)]

    found = [
        hashes(),
        hashes(1),
        hashes(cache_salt="a"),
        hashes(cache_salt="b"),
        hashes(lora_request=LoRARequest("l", 1, "/l")),
        hashes(lora_request=LoRARequest("l", 1, "/m")),
        hashes(mm_features=image("x")),
        hashes(mm_features=image("y")),
    ]
    assert hashes() == found[0] and all(len(one) == 2 for one in found)
    assert len({one[0] for one in found}) == len({one[1] for one in found}) == len(found)


# -- KV groups ------------------------------------------------------------------------------------------------

SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}


def config_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(("window", "blocks"), [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3), (64, 4)])
def test_a_window_needs_what_vllm_keeps(window: int, blocks: int) -> None:
    spec = SlidingWindowSpec(block_size=16, sliding_window=window, **SHAPE)
    (_, found) = tier_setup.kv_groups(config_of(FullAttentionSpec(block_size=16, **SHAPE), spec), 16)
    assert found.window_blocks == blocks
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    need = SlidingWindowManager._contiguous_blocks_for_hit(window, 16, use_eagle=False)
    assert blocks == max(1, need)


def test_groups_that_do_not_fit_are_refused() -> None:
    full = FullAttentionSpec(block_size=16, **SHAPE)
    with pytest.raises(ConfigError, match="blocks of 32 tokens"):
        tier_setup.kv_groups(config_of(full, FullAttentionSpec(block_size=32, **SHAPE)), 16)
    mamba = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float16,))
    with pytest.raises(ConfigError, match="Mamba"):
        tier_setup.kv_groups(config_of(full, mamba), 16)


def test_with_mla_all_ranks_are_replicas() -> None:
    config = vllm_config({**tier_child(), "engine_id": "e"}, ranks=2)
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    assert tier_setup.replicas(config, config_of(mla)) == 2
    assert tier_setup.replicas(config, config_of(mla, FullAttentionSpec(block_size=16, **SHAPE))) == 1
    assert tier_setup.replicas(config, kv_cache_config(8)) == 1
