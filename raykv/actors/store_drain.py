"""Empties a store whose node is to go: its host blocks go into the directory that all nodes share, if it has one as a
tier, else to other nodes' stores, which read them by NIXL. The store serves on meanwhile and saves nothing new.

Nothing is taken away here: a block that has moved is still served until the store ends, and what a target says that it
has was verified by it. A target that fails is asked again after a pause, and all that it had said is asked anew; so a
kill of either side costs time only. The source's slots are pinned while a batch is offered.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from raykv.actors.drain_targets import Target, Targets
from raykv.actors.peer_finder import OpenPeer
from raykv.actors.store_sessions import Engine, Session
from raykv.actors.store_stock import Stock
from raykv.core.drain_book import FIRST_PLACE, HOPELESS, LAST_PLACE
from raykv.core.peer_part import seal
from raykv.core.store_plans import Published
from raykv.engine_messages import Why
from raykv.errors import DiskError, HostError, RayKVError
from raykv.peer_messages import Adopt, Adopted, Adoption, PeerMemory
from raykv.storage.fs_pool import FsPool
from raykv.storage.headers import Header
from raykv.store_messages import DrainReport, JobDone, Medium, SaveJob
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

BATCH_NBYTES, BATCH_BLOCKS = 64 << 20, 512
"""Of one offer to a target: tens of milliseconds, and 30 KB to say."""
FILE_WINDOW = 64
FILE_THREADS = 4
"""As the movers: half of the directory's threads are left for loads."""
HOLD_S = 60.0
"""After its drain a store is ended at once; one that nobody has ended in this time takes saves again."""
LOOK_S = 0.1
NO_WAY = "it has neither an fs tier nor a peer tier that others can read, so what its host tier holds goes with it"
SHARED = FIRST_PLACE
"""The number of the directory among the places; those of stores come after it."""


class Drainer:
    """One per store. Any thread; drains take turns."""

    def __init__(
        self,
        stock: Stock,
        life: StoreLife,
        name: str,
        memory: Callable[[], PeerMemory | None],
        open_peer: OpenPeer | None,
    ) -> None:
        """`name` of the store's actor; `memory`: what others may read of it now, None: nothing."""
        self._stock, self._life, self._name = stock, life, name
        self._memory_now, self._open_peer = memory, open_peer
        self._turn = threading.Lock()
        self._wanted = False
        self._until = 0.0  # when nobody has ended the store by then, it is not drained any more
        self._moved_nbytes = self._left = self._skipped = 0
        self._problem = ""

    @property
    def _memory(self) -> PeerMemory | None:
        return self._memory_now()

    # -- what the store asks --------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether nothing is to be saved. Microseconds."""
        return self._wanted and (self._turn.locked() or time.monotonic() < self._until)

    def skip(self, engine: Engine, session: Session, job: SaveJob) -> JobDone:
        """In place of a save: nothing was touched, and nothing has failed."""
        blocks = sum(map(len, job.block_ids)) if session.attach.writes else 0
        with self._stock.lock:
            self._skipped += blocks
        return JobDone(job.job, ok=True, skipped=blocks)

    def undo(self) -> None:
        """Take saves again; what is under way ends."""
        self._wanted = False

    def close(self) -> None:
        """Returns when nothing of a drain touches the store's memory any more."""
        self.undo()
        with self._turn:
            pass

    def report(self) -> DrainReport:
        """Of this moment."""
        stock, running = self._stock, self._turn.locked()
        with stock.lock:
            tiers, settled = stock.book.figures().tiers, stock.book.drain.settled
        disk = sum(tier.used for tier in tiers if tier.medium is Medium.DISK)
        return DrainReport(
            self._life, settled, self._moved_nbytes, self._left, disk, self._skipped, running, self._problem
        )

    # -- the drain ------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float, targets: Sequence[str]) -> DrainReport:
        """Move what can be moved; `targets` are the names of the stores that may take it. Blocks for `timeout_s`, and
        a little longer where a directory hangs. A second time it goes on."""
        deadline = time.monotonic() + timeout_s
        self._wanted, self._until = True, deadline + HOLD_S
        if not self._turn.acquire(timeout=timeout_s):
            return self.report()
        try:
            self._problem = NO_WAY
            with self._stock.lock:
                self._stock.book.drain.start()
            self._count()
            self._to_files(deadline)
            if self._order():
                self._to_stores(deadline, targets)
            with self._stock.lock:
                self._left = self._stock.book.drain.left()
            if not self._left:
                self._problem = ""
            elif not self._wanted:
                self._problem = "it was undone"
            elif time.monotonic() >= deadline:
                self._problem = f"it did not end in {timeout_s:g} s"
            elif not self._problem:
                self._problem = "what is left can't be read"
        finally:
            self._until = time.monotonic() + HOLD_S
            self._turn.release()
        report = self.report()
        logger.info("the store %s is drained: %s", self._name, report)
        return report

    def _goes_on(self, deadline: float) -> bool:
        return self._wanted and time.monotonic() < deadline

    def _order(self) -> array[int]:
        with self._stock.lock:
            return self._stock.book.drain.order()

    def _count(self) -> None:
        """About how many blocks have no other place; at the end they are counted one by one."""
        with self._stock.lock:
            tiers, book = self._stock.book.figures().tiers, self._stock.book.drain
            self._left = max(0, sum(tier.used for tier in tiers if tier.medium is Medium.HOST) - book.settled)

    def _settle(self, moved: Iterable[tuple[Published, int]], where: int) -> None:
        """These blocks, with the bytes that were copied for them, lie there now."""
        moved = list(moved)
        with self._stock.lock:
            self._stock.book.drain.settle((block for block, _ in moved), where)
        self._moved_nbytes += sum(nbytes for _, nbytes in moved)
        self._count()

    # -- into the shared directory --------------------------------------------------------------------------

    def _to_files(self, deadline: float) -> None:
        shared = self._stock.tiers.shared()
        if shared is None or not self._stock.serves(shared[0]) or self._stock.tiers.host is None:
            return
        tier, pool = shared
        order = self._order()
        todo = order[: pool.slots]  # more would push each other out again
        self._problem = f"its fs tier takes {pool.slots:,} blocks" if len(order) > len(todo) else ""
        with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="raykv-drain") as threads:
            for at in range(0, len(todo), FILE_WINDOW):
                if not self._goes_on(deadline) or not self._stock.serves(tier):
                    break
                with self._stock.lock:
                    batch = self._stock.book.drain.begin(todo[at : at + FILE_WINDOW])
                try:
                    written = list(threads.map(lambda block: self._to_file(tier, pool, block), batch))
                finally:
                    with self._stock.lock:
                        self._stock.book.drain.end([place for _, place in batch])
                self._settle(((b, n) for b, n in zip(batch, written, strict=True) if n is not None), SHARED)

    def _to_file(self, tier: int, pool: FsPool, block: Published) -> int | None:
        """The bytes that were written; None: it is not there."""
        (key, place), rows = block, self._stock.tiers.rows(block[1].tier)
        if not self._wanted or not self._stock.serves(tier):  # a directory that hangs costs its limit once
            return None
        header = self._sound(block)
        if header is None or rows is None:
            return None
        try:
            return header.nbytes if pool.write(key, header.nbytes, header.checksum, rows[place.slot]) else 0
        except DiskError as error:
            self._problem = str(error)
            if error.fatal:
                self._stock.switch_off(tier, error)
            return None

    def _sound(self, block: Published) -> Header | None:
        """The header of a pinned slot whose bytes are right; one with others is taken out of use."""
        (key, place), tiers = block, self._stock.tiers
        header, rows = tiers.header(place), tiers.rows(place.tier)
        if header is not None and header.key == key and rows is not None and tiers.good(header, rows[place.slot]):
            return header
        with self._stock.lock, self._stock.book.contents.absences.because(Why.CORRUPT):
            if self._stock.book.drain.spoil(place):
                tiers.quarantine([place])
        return None

    # -- to other nodes' stores -----------------------------------------------------------------------------

    def _to_stores(self, deadline: float, names: Sequence[str]) -> None:
        memory = self._memory
        if memory is None or self._open_peer is None:
            return
        self._problem = ""
        others = [name for name in names if name != self._name]
        targets = Targets(others, self._open_peer, SHARED + 1, LAST_PLACE - SHARED)
        targets.ask_for_room(memory.slot_nbytes, lambda: self._goes_on(deadline))
        todo: deque[int] = deque()
        while self._goes_on(deadline):
            todo = todo or deque(self._order())
            if not todo:
                return
            target = targets.next(time.monotonic())
            if target is not None:
                todo.extendleft(reversed(self._move(target, todo, deadline)))
            elif targets.none_left:
                self._problem = targets.why()
                return
            else:
                time.sleep(LOOK_S)

    def _move(self, target: Target, todo: deque[int], deadline: float) -> list[int]:
        """Offer it the next slots; those of them that are to be offered again."""
        most = max(1, min(BATCH_BLOCKS, BATCH_NBYTES // self._stock.tiers.slot_nbytes))
        slots = [todo.popleft() for _ in range(min(len(todo), most))]
        with self._stock.lock:
            batch = self._stock.book.drain.begin(slots)
        try:
            offered, adopt = self._offer(batch)
            if not offered:
                return []
            answer = target.call("adopt", adopt, lambda: self._goes_on(deadline))
            if not isinstance(answer, Adopted) or len(answer.blocks) not in (0, len(offered)):
                raise HostError("it answered something else than it was asked for")
            return self._take_in(target, offered, answer)
        except RayKVError as error:
            if self._goes_on(deadline):
                target.failed(error, time.monotonic())
                with self._stock.lock:  # it may have lost what it had
                    self._stock.book.drain.doubt(target.number)
            return slots
        finally:
            with self._stock.lock:
                self._stock.book.drain.end([place for _, place in batch])

    def _offer(self, batch: Sequence[Published]) -> tuple[list[tuple[Published, int]], Adopt]:
        """The blocks whose headers are sound, with their bytes, and what is asked for them."""
        memory = self._memory
        offered: list[tuple[Published, int]] = []
        slots, sizes, seals = array("I"), array("I"), array("Q")
        for key, place in batch:
            header = self._stock.tiers.header(place)
            if header is None or header.key != key or header.checksum is None:
                self._settle([((key, place), 0)], HOPELESS)
                continue
            offered.append(((key, place), header.nbytes))
            slots.append(place.slot)
            sizes.append(header.nbytes)
            seals.append(seal(key, header.nbytes, header.checksum))
        keys = b"".join(key for (key, _), _ in offered)
        lists = (keys, sizes.tobytes(), slots.tobytes(), seals.tobytes())
        if memory is None:  # the host tier has just been removed
            return [], Adopt(self._name, self._life, PeerMemory(0, 0, 0, b""), *lists)
        return offered, Adopt(self._name, self._life, memory, *lists)

    def _take_in(self, target: Target, offered: Sequence[tuple[Published, int]], answer: Adopted) -> list[int]:
        """What it says of blocks that are still pinned; the slots to be offered again."""
        if target.is_new(answer.store):
            with self._stock.lock:
                self._stock.book.drain.doubt(target.number)
        outcomes = list(zip(offered, answer.blocks or bytes(len(offered)), strict=True))
        taken = [one for one, outcome in outcomes if outcome == Adoption.TAKEN]
        there = [(block, 0) for (block, _), outcome in outcomes if outcome == Adoption.WAS_HERE]
        bad = [block for (block, _), outcome in outcomes if outcome == Adoption.BAD]
        self._settle([*taken, *there], target.number)
        rotten = [block for block in bad if self._sound(block) is None]
        now = time.monotonic()
        if answer.refused and not answer.full:
            target.failed(answer.refused, now)
        elif len(bad) > len(rotten):
            target.failed("it has read other bytes than lie here", now)
        else:
            target.answered(len(taken), bool(there or rotten), answer, now)
        again = (Adoption.NOT_HERE, Adoption.BAD)
        return [place.slot for ((_, place), _), outcome in outcomes if outcome in again]
