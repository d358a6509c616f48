"""The Directory as its actor runs it: the same, and it reports its metrics to Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raykv.actors import directory, ray_metrics
from raykv.observe.samples import Sample
from raykv.observe.store import directory_samples


class Directory(directory.Directory):
    """One per cluster and namespace; `directory_handle` makes it an actor. Its name here is what people read in Ray."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reporter = ray_metrics.start("directory", self._samples)

    def _samples(self) -> Iterator[Sample]:
        return directory_samples(self.status())

    def close(self) -> None:
        self._reporter.close()
        super().close()
