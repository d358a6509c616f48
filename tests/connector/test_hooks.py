"""Every hook of vLLM's connector interface is answered by RayMultiConnector on purpose."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from raykv.connector import MultiConnector, RayMultiConnector
from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

AS_THE_BASE = {
    "role": "a plain attribute of the object",
    "has_connector_metadata": "bind and clear keep the base's own attribute up to date",
}
"""Hooks that are the base's on purpose, and why."""

NEW_IN_033 = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")


def public_hooks(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers_static(cls) if not name.startswith("_")}


def test_each_hook_was_decided_about() -> None:
    known = public_hooks(KVConnectorBase_V1) | public_hooks(SupportsHMA) | set(NEW_IN_033)
    own = set(vars(RayMultiConnector))
    undecided = sorted(known - own - set(AS_THE_BASE))
    assert not undecided, (
        f"vLLM's connector interface has hooks that nobody decided about: {undecided}. Define them in "
        "RayMultiConnector, or list them in AS_THE_BASE with the reason."
    )
    assert not set(AS_THE_BASE) & own, "AS_THE_BASE lists hooks that are defined"
    assert set(AS_THE_BASE) <= known, "AS_THE_BASE lists hooks that vLLM does not have"


def test_signatures_are_those_of_the_base() -> None:
    """vLLM may call by position or by keyword."""
    for name in sorted(public_hooks(KVConnectorBase_V1) | public_hooks(SupportsHMA)):
        base = inspect.getattr_static(KVConnectorBase_V1, name, None) or inspect.getattr_static(SupportsHMA, name)
        own = inspect.getattr_static(RayMultiConnector, name)
        assert type(base) is type(own), name
        if isinstance(base, property):
            continue
        theirs, ours = (list(inspect.signature(getattr(f, "__func__", f)).parameters.values()) for f in (base, own))
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs], name


def test_it_adds_nothing_public() -> None:
    extra = public_hooks(RayMultiConnector) - public_hooks(KVConnectorBase_V1) - public_hooks(SupportsHMA)
    assert extra == set(NEW_IN_033)
    assert public_hooks(MultiConnector) - public_hooks(RayMultiConnector) == {"all_children_support_hma"}


def test_sleep_mode_is_refused(hosted: bool) -> None:
    with Bench([child("A", hosted)]) as bench:
        assert bench.connector.supports_sleep_mode is False
        for worker in bench.workers:
            for call in (worker.unregister_kv_caches, worker.restore_kv_caches):
                with pytest.raises(NotImplementedError, match="--enable-sleep-mode"):
                    call()


class Recorder:
    """A stand-in for a child's connector: every hook is recorded, and answered with one value."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.seen = answer, []

    def __getattr__(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return self._answer

        return hook


@pytest.mark.parametrize(
    ("hook", "args"),
    [
        ("set_host_xfer_buffer_ops", (None,)),
        ("wait_for_layer_load", ("layer.0",)),
        ("save_kv_layer", ("layer.0", None, None)),
        ("finish_forward", ()),
        ("reset_capture_state", ()),
    ],
)
def test_hooks_of_the_forward_pass_reach_inline_children(hook: str, args: tuple[Any, ...]) -> None:
    with Bench([child("A", False), child("B", False)]) as bench:
        bench.add(20)
        output = bench.scheduler.schedule()
        worker = bench.workers[0]
        worker.bind_connector_metadata(output.kv_connector_metadata)
        inline = worker._worker_half.inline
        real = [each.connector for each in inline]
        recorders = [Recorder(None) for _ in inline]
        for each, recorder in zip(inline, recorders, strict=True):
            each.connector = recorder
        getattr(worker, hook)(*args)
        for each, connector in zip(inline, real, strict=True):
            each.connector = connector
        worker.clear_connector_metadata()
        assert [r.seen for r in recorders] == [[hook], [hook]]
        bench._in_flight.append([output, None])
        bench._run_steps()
        output, done = bench._in_flight.popleft()
        for outputs in bench.scheduler.update_from_output(output, done).values():
            bench._take(outputs)


def test_reset_cache_asks_every_child(hosted: bool) -> None:
    with Bench([child("A", hosted), child("B", hosted)]) as bench:
        answers = [None, True]
        for each, answer in zip(bench.half.children, answers, strict=True):
            each._connector.reset_cache = lambda answer=answer: answer
        assert bench.connector.reset_cache() is True
        bench.half.children[0]._connector.reset_cache = lambda: False
        asked = []
        bench.half.children[1]._connector.reset_cache = lambda: asked.append(1)
        assert bench.connector.reset_cache() is False
        assert asked, "a child is asked although an earlier one has refused"


@pytest.mark.parametrize("wants", [(), ("A",), ("A", "B")])
def test_at_most_one_memory_pool(wants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from raykv.errors import ConfigError

    with Bench([child("A", False), child("B", False)]) as bench:
        for each in bench.workers[0]._worker_half.inline:
            name = each.connector.control.name
            pool = f"pool of {name}" if name in wants else None
            monkeypatch.setattr(each.connector, "get_mem_pool_context", lambda pool=pool: pool)
        if len(wants) > 1:
            with pytest.raises(ConfigError, match="memory pool"):
                bench.workers[0].get_mem_pool_context()
        else:
            found = bench.workers[0].get_mem_pool_context()
            assert found == (f"pool of {wants[0]}" if wants else None)
