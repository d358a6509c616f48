"""Copy jobs of workers as they reach a store: `NodeStore`'s methods of the concurrency groups "save" and "load"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from raykv.actors.store_loads import not_done
from raykv.actors.store_sessions import Engine, Session, Sessions
from raykv.errors import StoreError
from raykv.store_messages import JobDone, LoadJob, SaveJob
from raykv.types import EngineId, Rank, StoreLife

logger = logging.getLogger("raykv")

Job = TypeVar("Job", SaveJob, LoadJob)


class Jobs:
    """One per store. Any thread: jobs of several ranks run at once."""

    def __init__(self, sessions: Sessions, life: StoreLife) -> None:
        self._sessions, self._life = sessions, life

    def run(
        self,
        life: StoreLife,
        engine: EngineId,
        rank: Rank,
        jobs: Sequence[Job],
        method: Callable[[Engine, Session, Job], JobDone] | None,
    ) -> tuple[StoreLife, list[JobDone]]:
        """This life, and how each job ended; `method` carries it out, None: nothing is open. Blocks for the copies."""
        return self._life, [self._run(life, engine, rank, job, method) for job in jobs]

    def _run(
        self,
        life: StoreLife,
        engine: EngineId,
        rank: Rank,
        job: Job,
        method: Callable[[Engine, Session, Job], JobDone] | None,
    ) -> JobDone:
        # Ray may deliver a call that was meant for the life before: its blocks belong to others by now.
        if life != self._life or method is None:
            return not_done(job, "it was meant for another life of the store")
        try:
            with self._sessions.use(engine, rank) as (found, session):
                return method(found, session, job)
        except StoreError as error:
            return not_done(job, str(error))
        except Exception as error:  # a defect; whatever it was, no copy runs any more when it gets here
            logger.exception("job %s of engine %s, rank %d", job.job, engine, rank)
            return not_done(job, f"{type(error).__name__}: {error}")
