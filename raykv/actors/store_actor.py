"""The NodeStore as its actor runs it: the same, and it reports its metrics to Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from raykv.actors import node_store, ray_metrics
from raykv.observe.samples import Sample
from raykv.observe.store import store_samples
from raykv.store_messages import StoreSpec


class NodeStore(node_store.NodeStore):
    """One per node and store name; `store_handle` makes it an actor. Its name here is what people read in Ray."""

    def __init__(self, spec: StoreSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        node, started = ray_metrics.node_label(), time.time()

        def read() -> Iterator[Sample]:
            return store_samples(spec.name, node, started, self.metrics())

        self._reporter = ray_metrics.start("store", read)

    def shutdown(self, remove_host: bool) -> None:
        self._reporter.close()
        super().shutdown(remove_host)
