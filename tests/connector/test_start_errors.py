"""What can't work is refused at start-up, in one paragraph that names the thing and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

from raykv.connector import RayMultiConnector, start_checks
from raykv.errors import ConfigError
from tests.support.configs import example_child, multi
from tests.support.fake_config import child, kv_cache_config, vllm_config
from tests.support.fake_control import controls
from tests.support.fake_worker import Bench
from tests.support.models import tiny_llama
from tests.support.tier_bench import tier_child

pytestmark = pytest.mark.vllm

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
BOTH_HALVES = pytest.mark.parametrize("role", list(KVConnectorRole), ids=lambda role: role.name.lower())


def refusal(
    children: list[dict[str, Any]],
    role: KVConnectorRole = KVConnectorRole.SCHEDULER,
    window: int | None = None,
    pipeline: int = 1,
    **config: Any,
) -> str:
    """The error of starting with these children."""
    made = vllm_config({**multi(children), "kv_connector": "RayMultiConnector"}, **config)
    made.parallel_config.pipeline_parallel_size = pipeline
    with pytest.raises(ConfigError) as caught:
        KVConnectorFactory.create_connector(made, role, kv_cache_config(64, window=window))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    return text


@BOTH_HALVES
def test_a_child_without_hma_on_a_hybrid_model(role: KVConnectorRole) -> None:
    text = refusal([child("A"), child("B", cls="FakeChildNoHMA")], role, window=32)
    assert "B (FakeChildNoHMA)" in text and "2 KV cache groups" in text
    assert "--disable-hybrid-kv-cache-manager" in text


def test_a_child_without_hma_on_a_plain_model(hosted: bool) -> None:
    with Bench([child("A", hosted, cls="FakeChildNoHMA", hit=32, saves=True)]) as bench:
        bench.add(50)
        bench.run()
        assert bench.child("A").written


@BOTH_HALVES
def test_layouts_that_differ(role: KVConnectorRole) -> None:
    text = refusal([child("A", cls="FakeChildHND"), child("B"), child("C", cls="FakeChildNHD")], role)
    assert "HND for A (FakeChildHND)" in text and "NHD for C (FakeChildNHD)" in text


def test_layouts_that_agree() -> None:
    children = [child("A", cls="FakeChildHND"), child("B"), child("C", cls="FakeChildHND")]
    assert RayMultiConnector.get_required_kvcache_layout(vllm_config(multi(children))) == "HND"
    assert RayMultiConnector.get_required_kvcache_layout(vllm_config(multi([child("B")]))) is None


@BOTH_HALVES
def test_two_pd_children(role: KVConnectorRole) -> None:
    text = refusal([NIXL, child("A"), MOONCAKE], role)
    assert "NixlConnector" in text and "MooncakeConnector" in text and "remote_engine_id" in text


@BOTH_HALVES
def test_a_synchronous_child_with_overlapping_steps(role: KVConnectorRole) -> None:
    text = refusal([child("A"), example_child("somewhere")], role, async_scheduling=True)
    assert "ExampleConnector" in text and "--no-async-scheduling" in text and '"load": false' in text


@BOTH_HALVES
def test_a_synchronous_child_with_pipeline_parallelism(role: KVConnectorRole) -> None:
    """It overlaps steps as well, without asynchronous scheduling."""
    text = refusal([child("A"), example_child("somewhere")], role, pipeline=2)
    assert "ExampleConnector" in text and "pipeline" in text


@BOTH_HALVES
def test_a_synchronous_child_beside_an_inline_saver_on_two_ranks(role: KVConnectorRole) -> None:
    text = refusal([child("A", False), example_child("somewhere")], role, ranks=2)
    assert "ExampleConnector" in text and "child A saves inside vLLM's workers" in text


@BOTH_HALVES
def test_a_synchronous_child_beside_a_tier_on_two_ranks(role: KVConnectorRole) -> None:
    """A rank may save to it before it knows: the store commits what no rank dropped."""
    config = vllm_config({**multi([tier_child(), example_child("somewhere")]), "engine_id": "e"}, ranks=2)
    assert start_checks.checked_config(config, kv_cache_config(64)).children


@BOTH_HALVES
def test_a_synchronous_child_on_a_hybrid_model(role: KVConnectorRole) -> None:
    text = refusal([child("A"), example_child("somewhere")], role, window=32)
    assert "ExampleConnector" in text


@BOTH_HALVES
def test_a_role_that_is_none(role: KVConnectorRole) -> None:
    text = refusal([child("A", fields={"kv_role": "kv_reader"})], role)
    assert "kv_reader" in text and "kv_role" in text


@BOTH_HALVES
def test_a_class_that_is_none(role: KVConnectorRole) -> None:
    text = refusal([{"kv_connector": "NixlConector", "kv_role": "kv_both"}], role)
    assert "NixlConector" in text and "NixlConnector" in text


def test_a_scheduler_half_that_raises_is_named() -> None:
    failing = child("B", raises={"__init__": 1})
    controls.clear()
    text = refusal([child("A"), failing])
    assert "B (FakeChild)" in text and "B raises in __init__" in text


@pytest.mark.parametrize("module", ["tests.support.nowhere", "tests.support.fake_model"])
def test_a_module_path_that_is_wrong(module: str) -> None:
    entry = child("A") | {"kv_connector_module_path": module}
    text = refusal([entry])
    assert module in text and "FakeChild" in text


# -- where the config is made, before there is an engine ------------------------------------------------------


@pytest.mark.parametrize(
    ("connector", "by_name"),
    [
        ("MultiConnector", False),  # by its name alone it is vLLM's
        ("RayMultiConnector", False),
        ("RayMultiConnector", True),
        ("TierConnector", False),
        ("TierConnector", True),
    ],
)
def test_the_process_that_makes_the_config_says_so(connector: str, by_name: bool) -> None:
    wrong = {**tier_child(), "kv_role": "kv_both"}
    wrong["kv_connector_extra_config"]["casacde"] = "write"
    config = wrong if connector == "TierConnector" else {**multi([wrong]), "kv_connector": connector}
    config["kv_connector_module_path"] = None if by_name else "raykv.connector"
    arguments = EngineArgs(
        model=str(tiny_llama()), skip_tokenizer_init=True, kv_transfer_config=KVTransferConfig(**config)
    )
    with pytest.raises(ConfigError, match=r"casacde.*cascade") as caught:
        arguments.create_engine_config()
    assert connector == "TierConnector" or "Child TierConnector" in str(caught.value)


def test_the_options_of_a_tier_that_is_a_child_pass() -> None:
    """vLLM asks for the class of each child of a MultiConnector with the child's own JSON."""
    config = KVTransferConfig(**multi([tier_child(raykv={"name": "tier"})]))
    assert KVConnectorFactory.supports_hma_config(config)
