"""A backend with which Ray Serve LLM's own P/D builder accepts RayKV's MultiConnector.

    from raykv.serve_llm import register
    register()                      # in the driver, before serve.run
    app = build_pd_openai_app({"prefill_config": ..., "decode_config": ...})

where the engines' `kv_transfer_config` has `kv_connector: MultiConnector` (or RayMultiConnector) and
`kv_connector_module_path: raykv.connector`. Ray's own backend for a MultiConnector sets its children up on a copy and
loses what they change (NIXL's engine id); a MultiConnector of vLLM's, without our module path, is still Ray's own.

The registry is private to Ray: this is a thin layer over it, for the versions that it was read from.
"""

from __future__ import annotations

import copy
import importlib
from typing import TYPE_CHECKING, Any

from raykv.config import parse
from raykv.errors import ConfigError, RayKVError

if TYPE_CHECKING:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend

READ_FROM = ((2, 56), (3, 0))
"""Ray's versions with the registry as it is used here: from the first to below the second."""
NAMES = ("RayMultiConnector", "MultiConnector")
MODULE = "raykv.connector"
_RAY_LLM = "ray.llm._internal.serve.engines.vllm.kv_transfer"


class ServeLLMError(RayKVError):
    """Ray Serve LLM is not there, or not as this layer knows it."""


def register() -> None:
    """Make the backend known to all of a cluster's Ray processes. May be called again. Raises ServeLLMError."""
    factory = _ray_llm().KVConnectorBackendFactory
    for name in NAMES:
        if factory.is_registered(name):
            factory.unregister_backend(name)
        factory.register_backend(name, f"{__name__}:backend_class")


def backend_class(llm_config: Any) -> BaseConnectorBackend:
    """Called by Ray as if it were the class: the backend that a config's MultiConnector needs."""
    config = llm_config.engine_kwargs.get("kv_transfer_config") or {}
    own = config.get("kv_connector") == NAMES[0] or str(config.get("kv_connector_module_path", "")).startswith(MODULE)
    if own:
        return _own_class()(llm_config)
    theirs = importlib.import_module(f"{_RAY_LLM}.multi_connector").MultiConnectorBackend
    return theirs(llm_config)


def _own_class() -> Any:
    """Made where it is needed: its bases are Ray's."""
    module = _ray_llm()
    base: Any = importlib.import_module(f"{_RAY_LLM}.base")
    above: Any = base.BaseConnectorBackend

    class RayKVBackend(above):
        """Sets each child up as Ray does it, and keeps what that changes. The first child that Ray knows decides how
        requests are shaped: a tier has no wishes there."""

        def __init__(self, llm_config: Any) -> None:
            super().__init__(llm_config)
            self._primary: Any = base.DefaultConnectorBackend(llm_config)

        def setup(self) -> None:
            config = self.kv_transfer_config
            parse(config)
            chosen = False
            for child in config["kv_connector_extra_config"]["connectors"]:
                backend = self._set_up(config, child)
                if not chosen and type(backend) is not base.DefaultConnectorBackend:
                    self._primary, chosen = backend, True

        def _set_up(self, config: dict[str, Any], child: dict[str, Any]) -> Any:
            inherited = {key: value for key, value in config.items() if key not in OF_THE_WHOLE}
            own = copy.copy(self.llm_config)
            own.engine_kwargs = {**self.llm_config.engine_kwargs, "kv_transfer_config": {**inherited, **child}}
            backend = _backend_of(module, child["kv_connector"], own)
            backend.setup()
            after = own.engine_kwargs["kv_transfer_config"]
            before = {**inherited, **child}
            child.update({key: value for key, value in after.items() if before.get(key) != value})
            return backend

        @property
        def requires_peer_binding(self) -> bool:
            return bool(self._primary.requires_peer_binding)

        @property
        def concurrent_handoff(self) -> bool:
            return bool(self._primary.concurrent_handoff)

        def replica_metadata(self) -> dict[str, Any]:
            return dict(self._primary.replica_metadata())

        def prepare_prefill_request(self, *, request: Any, peer: Any) -> Any:
            return self._primary.prepare_prefill_request(request=request, peer=peer)

        def prepare_decode_request(self, *, request: Any, peer: Any, prefill_response: Any) -> Any:
            return self._primary.prepare_decode_request(request=request, peer=peer, prefill_response=prefill_response)

    return RayKVBackend


OF_THE_WHOLE = frozenset({"kv_connector_extra_config", "kv_connector_module_path", "kv_connector"})


def _backend_of(module: Any, name: str, llm_config: Any) -> Any:
    if name in NAMES:
        raise ConfigError("A MultiConnector can't be another's child. Put its children into the list instead.")
    return module.KVConnectorBackendFactory.create_backend(name, llm_config)


def _ray_llm() -> Any:
    """Ray's module with the registry. Raises ServeLLMError if there is none, or its Ray was never read."""
    import ray

    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if not READ_FROM[0] <= version < READ_FROM[1]:
        raise ServeLLMError(
            f"Ray {ray.__version__} has another registry for connector backends than RayKV knows (2.56 to below 3). "
            "Use `raykv up`, which needs none, or a Ray in between."
        )
    try:
        module = importlib.import_module(f"{_RAY_LLM}.factory")
    except ImportError as error:
        raise ServeLLMError(
            f"Ray Serve LLM can't be imported ({error}). Install it: pip install 'ray[serve]' pyarrow, and what it "
            "names as missing."
        ) from error
    for method in ("register_backend", "unregister_backend", "is_registered", "create_backend"):
        if not hasattr(module.KVConnectorBackendFactory, method):
            raise ServeLLMError(f"Ray {ray.__version__} lacks KVConnectorBackendFactory.{method}: use `raykv up`.")
    return module
