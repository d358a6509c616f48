"""RayKV's figures in vLLM's own /metrics: what `stats` brings, each with the child's name as a label."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from raykv.config import parse
from raykv.connector import vllm_compat
from raykv.connector.stats import BETWEEN, WHOLE
from raykv.observe.names import CHILD_COUNTERS, CHILD_GAUGES, CHILD_TIMES, WHOLE_COUNTERS, seconds_name

logger = logging.getLogger("raykv")

CHILD_LABEL = "raykv_child"


class RayMultiPromMetrics(KVConnectorPromMetrics):
    """RayKV's metrics and the children's own, each with the child's name as a label."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        config = parse(vllm_config.kv_transfer_config)
        self._config, self._labels = vllm_config, [*labelnames, CHILD_LABEL]
        self._shared = {kind: _once(cls) for kind, cls in metric_types.items()}
        self._children: dict[tuple[str, str], KVConnectorPromMetrics | None] = {}
        self._values = {engine: list(values) for engine, values in per_engine_labelvalues.items()}
        self._begun: set[tuple[int, str]] = set()
        self._counters = {
            name: self._counter_cls(f"vllm:raykv_{name}", documentation=text, labelnames=self._labels)
            for name, text in CHILD_COUNTERS.items()
        }
        self._times = {
            name: self._counter_cls(f"vllm:raykv_{seconds_name(name)}", documentation=text, labelnames=self._labels)
            for name, text in CHILD_TIMES.items()
        }
        self._whole = {
            name: self._counter_cls(f"vllm:raykv_{name}", documentation=text, labelnames=[*labelnames, *own])
            for name, (text, own) in WHOLE_COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(f"vllm:raykv_child_{name}", documentation=text, labelnames=self._labels)
            for name, text in CHILD_GAUGES.items()
        }
        for child in config.children:
            seen = vllm_compat.child_vllm_config(vllm_config, child)
            metrics = self._made(str(child.name), vllm_compat.connector_class(child), seen)
            self._children[str(child.name), child.connector] = metrics

    def _made(self, child: str, cls: Any, config: VllmConfig) -> KVConnectorPromMetrics | None:
        """The metrics of a child's own class, if it has any."""
        values = {engine: [*own, child] for engine, own in self._values.items()}
        return cls.build_prom_metrics(config, self._shared, self._labels, values)

    def _own(self, child: str, entry: Mapping[str, Any]) -> KVConnectorPromMetrics | None:
        """The same of one that may have come while the engine ran: no config told of it."""
        at = (child, entry["connector"])
        if at not in self._children:
            self._children[at] = None
            transfer = KVTransferConfig(
                kv_connector=entry["connector"], kv_connector_module_path=entry["module"], kv_role="kv_both"
            )
            config = copy.copy(self._config)
            config.kv_transfer_config = transfer
            try:
                self._children[at] = self._made(child, KVConnectorFactory.get_connector_class(transfer), config)
            except Exception as error:  # a child without its metrics is a child all the same
                logger.warning("the child %s has no metrics of its own here: %s", child, error)
        return self._children[at]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for child, entry in transfer_stats_data.items():
            if child == WHOLE:
                self._observe_whole(entry["counters"], engine_idx)
                continue
            labels = [*self._values[engine_idx], child]
            if (engine_idx, child) not in self._begun:  # all begin at 0: a first failure must be a rise
                self._begun.add((engine_idx, child))
                for counter in (*self._counters.values(), *self._times.values()):
                    counter.labels(*labels)
            for name, value in entry["counters"].items():
                if name in self._counters:
                    self._counters[name].labels(*labels).inc(value)
                elif name in self._times:
                    self._times[name].labels(*labels).inc(value / 1000)
            for name, value in entry["gauges"].items():
                if name in self._gauges:
                    self._gauges[name].labels(*labels).set(value)
            own = entry.get("own")
            metrics = self._own(child, entry) if own is not None else None
            if metrics is not None:
                metrics.observe(own.to_dict() if isinstance(own, KVConnectorStats) else own, engine_idx)

    def _observe_whole(self, counters: Mapping[str, int], engine_idx: int) -> None:
        for joint, value in counters.items():
            name, *labels = joint.split(BETWEEN)
            if name in self._whole:
                self._whole[name].labels(*self._values[engine_idx], *labels).inc(value)


def _once(cls: type) -> Any:
    """A metric class that gives the same metric for the same name: two children of one class share it."""
    made: dict[str, Any] = {}

    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in made:
            made[name] = cls(name, *args, **kwargs)
        return made[name]

    return make
