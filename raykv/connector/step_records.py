"""The records of a step for the hosts of its children. The worker's thread."""

from __future__ import annotations

from dataclasses import replace

from raykv.actors.child_link import ChildLink
from raykv.connector.metadata import RayMultiMetadata
from raykv.messages import ChildPlan, Phase, StepRecord
from raykv.types import Rank


def record_of(plan: ChildPlan, meta: RayMultiMetadata, phase: Phase, skip_saves: bool = False) -> StepRecord:
    """What a child's host is to run of its plan, which has metadata."""
    assert plan.meta is not None
    before = phase is Phase.LOAD
    return StepRecord(
        step=meta.step,
        phase=phase,
        meta=b"" if phase is Phase.SAVE else plan.meta,
        forward=meta.forward,
        loads=() if before else plan.loads,
        sync=bool(plan.sync_loads),
        finished=frozenset() if before else plan.finished,
        owed=frozenset() if before else frozenset(plan.owed_sends),
        skip_saves=skip_saves,
        idle=plan.idle,
    )


class StepRecords:
    """One rank's records that are ready and not handed over."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._ready: list[tuple[ChildLink, ChildPlan, StepRecord]] = []

    def add(self, link: ChildLink, plan: ChildPlan, record: StepRecord) -> None:
        """A record of a step whose hooks have all run."""
        self._ready.append((link, plan, record))

    def submit(self, skip_saves: bool) -> None:
        """Hand all over, a queue put each. `skip_saves`: the step computed garbage, nobody saves anything of it."""
        ready, self._ready = self._ready, []
        for link, plan, record in ready:
            record = replace(record, skip_saves=True) if skip_saves else record
            link.submit(record, plan.incarnations[self._rank], plan.owed_sends)
