"""RayKV's backend in Ray Serve LLM's own registry."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raykv import serve_llm
from raykv.errors import ConfigError
from raykv.serve_llm import ServeLLMError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TIER = {
    "kv_connector": "TierConnector",
    "kv_connector_module_path": "raykv.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"tiers": [{"medium": "host", "capacity": "64MiB"}]},
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def config(*children: dict[str, Any], **more: Any) -> Any:
    kv = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": copy.deepcopy(list(children))},
        **more,
    }
    return SimpleNamespace(engine_kwargs={"kv_transfer_config": kv, "data_parallel_rank": 3}, experimental_configs={})


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The registry with RayKV's backend in it; afterwards as it was."""
    module = serve_llm._ray_llm()  # imports Ray Serve, vLLM and more
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    serve_llm.register()
    yield module.KVConnectorBackendFactory
    for name in serve_llm.NAMES:
        module.KVConnectorBackendFactory.unregister_backend(name)
    module._initialize_registry()


def test_it_keeps_what_a_child_s_setup_changes(factory: Any) -> None:
    wanted = config(TIER, NIXL)
    before = copy.deepcopy(wanted.engine_kwargs["kv_transfer_config"])
    backend = factory.create_backend("MultiConnector", wanted)
    backend.setup()
    kv = wanted.engine_kwargs["kv_transfer_config"]
    tier, nixl = kv["kv_connector_extra_config"]["connectors"]
    assert nixl["engine_id"].endswith("-10.0.0.7-5600")
    assert {key: value for key, value in nixl.items() if key != "engine_id"} == NIXL
    assert tier == TIER
    assert {k: v for k, v in kv.items() if k != "kv_connector_extra_config"} == {
        k: v for k, v in before.items() if k != "kv_connector_extra_config"
    }


def test_requests_are_shaped_as_nixl_wants_them(factory: Any) -> None:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend

    backend = factory.create_backend("MultiConnector", config(TIER, NIXL))
    backend.setup()
    assert isinstance(backend._primary, NixlConnectorBackend)
    assert not backend.requires_peer_binding and not backend.concurrent_handoff

    class Request(SimpleNamespace):
        def model_copy(self, deep: bool) -> Any:
            return copy.deepcopy(self)

    request = Request(kv_transfer_params=None, max_tokens=100, stream=True)
    prefill = backend.prepare_prefill_request(request=request, peer=None)
    assert prefill.kv_transfer_params["do_remote_decode"] is True
    assert prefill.max_tokens == 1 and request.max_tokens == 100
    answer = SimpleNamespace(kv_transfer_params={"remote_engine_id": "e"})
    decode = backend.prepare_decode_request(request=request, peer=None, prefill_response=answer)
    assert decode.kv_transfer_params == {"remote_engine_id": "e"}


def test_its_own_name_needs_no_module_path(factory: Any) -> None:
    wanted = config(NIXL, kv_connector="RayMultiConnector", kv_connector_module_path=None)
    backend = factory.create_backend("RayMultiConnector", wanted)
    backend.setup()
    assert "engine_id" in wanted.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["connectors"][0]


def test_vllms_own_multiconnector_is_still_rays(factory: Any) -> None:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.multi_connector import MultiConnectorBackend

    backend = factory.create_backend("MultiConnector", config(NIXL, kv_connector_module_path=None))
    assert type(backend) is MultiConnectorBackend


def test_a_bad_config_is_raykvs_own_error(factory: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        factory.create_backend("MultiConnector", config({**NIXL, "kv_rol": "x"})).setup()


def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "__version__", "3.1.0")
    with pytest.raises(ServeLLMError, match=r"Ray 3\.1\.0 has another registry"):
        serve_llm.register()
    assert os.environ.get("RAY_ADDRESS") is None
