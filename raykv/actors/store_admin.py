"""What operators see of a store's content and do to it: `NodeStore`'s methods of the concurrency group "admin".

Any thread. What reads or changes many blocks does so a part at a time, each in a short hold of the book's lock, so that
look-ups come in between. Bad input raises StoreError with one sentence, before anything is changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from raykv.actors.store_forget import clear, forget
from raykv.actors.store_models import Models
from raykv.actors.store_notes import KeptPin, Notes, NotesFile
from raykv.actors.store_operations import Operations
from raykv.actors.store_quotas import apply_quota, checked_quota
from raykv.actors.store_sessions import Sessions
from raykv.actors.store_stock import Stock
from raykv.actors.store_view import view_of
from raykv.actors.store_why import Places, known_heads
from raykv.admin_messages import (
    Absence,
    BlockPlace,
    Done,
    Operation,
    OperationState,
    Selection,
    StoreView,
)
from raykv.core.known_models import KnownModel
from raykv.core.operator_pins import Pin
from raykv.core.selections import chosen
from raykv.engine_messages import Why
from raykv.errors import StoreError
from raykv.store_messages import Medium, RankAttach, StoreSpec
from raykv.types import StoreLife

logger = logging.getLogger("raykv")

LONGEST_PIN_S = 366 * 86400.0
NOTE_LEN = 1000


class StoreAdmin:
    """One per store, also before its pools are open: then it holds nothing. `opened` and `close` once each."""

    def __init__(
        self,
        spec: StoreSpec,
        host: Path,
        life: StoreLife,
        sessions: Sessions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`host`: the host tier's file. `clock`: seconds since the epoch."""
        self._spec, self._life, self._clock = spec, life, clock
        self._file = NotesFile(spec, host)
        self.models = Models(sessions)
        self._quotas: dict[bytes, int] = {}
        self._stock: Stock | None = None
        self._turn = threading.RLock()  # one change at a time, and the file with it
        self.operations_of = Operations(clock)
        """Where the owner of other kinds of operations adds its own (`add`)."""

    # -- the store's own calls ------------------------------------------------------------------------------

    def opened(self, stock: Stock) -> None:
        """The pools are open and recovered: what the life before had noted holds again."""
        with self._turn:
            self._stock = stock
            notes = self._file.read()
            for model in (*notes.models, *self.models.known.all()):
                self.models.known.learn(model)
            for tag, nbytes in notes.quotas.items():
                self._set_quota(stock, tag, nbytes)
            for pin in notes.pins:
                self._pin_again(stock, pin)

    def _pin_again(self, stock: Stock, kept: KeptPin) -> None:
        book = stock.book
        if kept.expires <= self._clock() or book.contents.pins.get(kept.number) is not None:
            return
        try:
            with stock.lock:
                book.contents.pins.begin(kept.number, kept.expires, kept.note)
                for medium, keys in kept.keys:
                    book.contents.pins.add(kept.number, book.lying(keys, medium))
        except StoreError as error:  # the tier is smaller by now: what fits stays
            logger.warning("a pin of the store's life before is kept in part: %s", error)

    def attached(self, attach: RankAttach) -> None:
        """A worker has joined: its facts are known from now on."""
        model = KnownModel(attach.fingerprint, attach.model, attach.facts, len(attach.groups))
        with self._turn:
            if self.models.known.learn(model) and self._stock is not None:
                self._note()

    def tick(self) -> None:
        """Once a second: pins end."""
        stock = self._stock
        if stock is None:
            return
        with stock.lock:
            late = stock.book.contents.pins.expire(self._clock())
            for pin in late:
                for key in pin.places:
                    stock.book.contents.absences.note(key, Why.EXPIRED)
        if late:
            with self._turn:
                self._note()

    def close(self) -> None:
        """No operation begins any more, and none runs. Before the pools are closed."""
        self.operations_of.close()
        with self._turn:
            self._stock = None

    def host_removed(self) -> None:
        """The host tier's memory was given back for good."""
        self._file.host_removed()

    def _note(self) -> None:
        """Write down what the next life must know. `_turn` is held."""
        stock = self._stock
        if stock is None:
            return
        media = stock.book.media
        with stock.lock:
            pins = [(pin, dict(pin.places)) for pin in stock.book.contents.pins.all()]
        kept = []
        for pin, places in pins:
            by_medium: dict[Medium, list[bytes]] = {}
            for key, place in places.items():
                by_medium.setdefault(media[place.tier], []).append(key)
            rows = tuple((medium, tuple(keys)) for medium, keys in by_medium.items())
            kept.append(KeptPin(pin.number, pin.expires, pin.note, rows))
        self._file.write(Notes(self.models.known.all(), dict(self._quotas), tuple(kept)))

    # -- questions ------------------------------------------------------------------------------------------

    def view(self) -> StoreView:
        """What the store holds, by model and by tenant, its pins and operations. A short hold of the lock."""
        stock, operations = self._stock, self.operations_of.all()
        return view_of(self._life, self._spec.name, stock, self.models, dict(self._quotas), operations)

    def where(self, fingerprints: tuple[str, ...], hashes: bytes) -> tuple[BlockPlace, ...]:
        """For each hash where its block lies, over all ranks and KV groups of these fingerprints."""
        return self._places().where(fingerprints, hashes)

    def why(self, fingerprints: tuple[str, ...], hashes: bytes, then: float = 0.0) -> tuple[Absence | None, ...]:
        """For each hash why its block is not here; None: it is, with all its parts. `then` as `Places.why` says."""
        return self._places().why(fingerprints, hashes, then)

    def _places(self) -> Places:
        return Places(self._stock, self.models.known)

    # -- pins -----------------------------------------------------------------------------------------------

    def pin(self, number: str, selection: Selection, seconds: float, note: str) -> Done:
        """Keep what is selected from eviction for so long; all that is found, or nothing. A block that lies in several
        tiers is kept in the fastest one. A number that is in use answers what it keeps."""
        _check_number(number)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= LONGEST_PIN_S:
            raise StoreError(f"A pin lasts more than 0 and up to {LONGEST_PIN_S:.0f} seconds, not {seconds!r:.40}.")
        if not isinstance(note, str) or len(note) > NOTE_LEN:
            raise StoreError(f"A pin's note is a text of up to {NOTE_LEN} characters, not {note!r:.40}.")
        stock, what = self._open_stock(), chosen(selection, self._media())
        pins = stock.book.contents.pins
        with self._turn:
            known = pins.get(number)
            if known is not None:
                return self._kept(stock, known, "was kept already")
            with stock.lock:
                pin = pins.begin(number, self._clock() + float(seconds), note)
            try:
                for part in stock.book.select(what, self._heads(stock)):
                    with stock.lock:
                        pins.add(number, part())
            except BaseException:
                with stock.lock:
                    pins.end(number)
                raise
            if not pin.places:
                with stock.lock:
                    pins.end(number)
                return Done(0, 0, "None of the selected blocks lies in a tier of this store's own: nothing is kept.")
            self._note()
            return self._kept(stock, pin, "is kept")

    def _kept(self, stock: Stock, pin: Pin, how: str) -> Done:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pin.expires))
        count = len(pin.places)
        blocks = "1 block" if count == 1 else f"{count:,} blocks"
        how = how if count == 1 else how.replace("is ", "are ").replace("was ", "were ")
        return Done(count, count * stock.tiers.slot_nbytes, f"{blocks} {how} until {until}.")

    def unpin(self, number: str) -> Done:
        """The pin is over. One that is not known (any more) is fine."""
        _check_number(number)
        stock = self._open_stock()
        with self._turn:
            with stock.lock:
                pin = stock.book.contents.pins.end(number)
            if pin is None:
                return Done(0, 0, f"There is no pin {number}: it was never made, or is over.")
            self._note()
        count = len(pin.places)
        return Done(count, count * stock.tiers.slot_nbytes, f"{count:,} blocks are not kept by pin {number} any more.")

    # -- what goes ------------------------------------------------------------------------------------------

    def forget(self, selection: Selection) -> Done:
        """Forget what is selected and nobody holds; of a shared folder the files too, as far as the selection says
        which. A file has no tenant: of a tenant's only those go that this store knows of."""
        stock, what = self._open_stock(), chosen(selection, self._media())
        return forget(stock, what, self._heads(stock))

    def clear(self, medium: Medium | None = None) -> int:
        """Forget the blocks that nobody holds, of one tier or of all; how many slots came free. Files of a shared
        folder stay."""
        stock = self._stock
        if stock is None or (medium is not None and medium not in self._media()):
            return 0
        return clear(stock, medium)

    def set_quota(self, tenant: str, nbytes: int | None) -> Done:
        """What a tenant's blocks may take up in all tiers of this node's own, counted in slots; None: no limit. What
        he has beyond goes now, as far as nobody holds it."""
        tag = checked_quota(tenant, nbytes)
        stock = self._open_stock()
        with self._turn:
            cut = self._set_quota(stock, tag, nbytes)
            self._note()
        if nbytes is None:
            return Done(0, 0, f"Tenant {tenant} has no limit any more.")
        said = f"Tenant {tenant} may have {nbytes:,} bytes, {nbytes // stock.tiers.slot_nbytes:,} blocks"
        if cut:
            said += f"; {cut:,} that were too much are gone"
        return Done(cut, cut * stock.tiers.slot_nbytes, f"{said}.")

    def _set_quota(self, stock: Stock, tag: bytes, nbytes: int | None) -> int:
        """How many blocks went for it. `_turn` is held."""
        if nbytes is None:
            self._quotas.pop(tag, None)
        else:
            self._quotas[tag] = nbytes
        return apply_quota(stock, tag, nbytes)

    # -- what takes long ------------------------------------------------------------------------------------

    def begin(self, operation: Operation) -> OperationState:
        """Begin an operation in a thread of its own, or answer for the one that has this number already."""
        return self.operations_of.begin(operation)

    def operation(self, number: str) -> OperationState:
        """How far it is. Raises StoreError if it is not known."""
        return self.operations_of.get(number)

    def operations(self) -> tuple[OperationState, ...]:
        """All that are known, oldest first."""
        return self.operations_of.all()

    # -- parts ----------------------------------------------------------------------------------------------

    def _open_stock(self) -> Stock:
        stock = self._stock
        if stock is None:
            raise StoreError(
                f"The store {self._spec.name} has no open tier: no engine has joined it yet, or it is being shut down."
            )
        return stock

    def _media(self) -> list[Medium]:
        stock = self._stock
        return stock.book.serving_media if stock is not None else [tier.medium for tier in self._spec.tiers]

    def _heads(self, stock: Stock) -> list[bytes]:
        return known_heads(stock, self.models.known)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless what is under way agrees with itself."""
        self.operations_of.book.check_integrity()


def _check_number(number: str) -> None:
    if not isinstance(number, str) or not 0 < len(number) <= 128:
        raise StoreError(f"A pin's number is a text of 1 to 128 characters, not {number!r:.80}.")
