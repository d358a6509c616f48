"""What an operator's prefetch has to do with other nodes: whether they are asked, for what, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raykv.actors.peer_prefetch import FarOrder, PeerPrefetcher, Ranks, Windows
from raykv.actors.store_operations import Progress
from raykv.admin_messages import Operation
from raykv.core.selections import Chosen
from raykv.store_messages import Medium


@dataclass(frozen=True, slots=True)
class FromPeers:
    """The part of a prefetch that concerns other nodes. `prefetcher` None: there is no peer tier. `windows`: of the
    model with a fingerprint, empty where no engine says so."""

    prefetcher: PeerPrefetcher | None
    windows: Callable[[bytes], Windows]

    def fetch(self, operation: Operation, what: Chosen, most: int, total: int, progress: Progress) -> str:
        """Fetch up to `most` blocks; a sentence's part that says what came, or why nobody was asked. `total` blocks
        are the operation's without these."""
        models, strange = self._models(what, operation)
        why = self._why_not(what, strange if not models else [])
        if why:
            return f"other nodes were not asked: {why}"
        assert self.prefetcher is not None and what.hashes is not None
        order = FarOrder(progress, most)
        hashes = tuple(dict.fromkeys(what.hashes))
        wanted = {key for model in models for _, key in self.prefetcher.lacks(model, hashes)}
        if not wanted:
            return ""
        progress.total(total + len(wanted))
        for model in models:
            if not order.over():
                self.prefetcher.fetch(model, hashes, order)
        progress.total(total)  # or what is done, if that is more: nobody has the others
        return self._said(order, wanted, strange)

    def _models(self, what: Chosen, operation: Operation) -> tuple[list[Ranks], list[bytes]]:
        """The selected ranks by their windows, and those of which no windows are known."""
        found: dict[Windows, list[bytes]] = {}
        for fingerprint in sorted(what.fingerprints):
            found.setdefault(self.windows(fingerprint) or operation.windows, []).append(fingerprint)
        strange = found.pop((), [])
        return [Ranks(tuple(ranks), windows) for windows, ranks in found.items()], strange

    def _why_not(self, what: Chosen, strange: Sequence[bytes]) -> str:
        if self.prefetcher is None:
            return "this store has no peer tier"
        if what.hashes is None or not what.fingerprints:
            return "that takes the hashes of a prompt and the fingerprints of its model"
        if what.tenant is not None:
            return "they don't say whose their blocks are"
        if strange:
            return (
                f"no engine of the model {strange[0].hex()} is attached to this store, and the order does not say what "
                "windows it has"
            )
        return self.prefetcher.why_not()

    def _said(self, order: FarOrder, wanted: set[bytes], strange: Sequence[bytes]) -> str:
        assert self.prefetcher is not None
        missing = self.prefetcher.missing(wanted)
        said = [f"{order.came:,} blocks came from other nodes"]
        for peer, (why, keys) in order.failed.items():
            lost = len(keys & missing)
            missing -= keys
            said.append(f"the store {peer} failed, which cost {lost:,} blocks ({why})")
        homeless = order.homeless & missing
        if homeless:
            said.append(f"{len(homeless):,} that they have found no room here")
        if missing - homeless and not order.progress.stopped:
            said.append(f"{len(missing - homeless):,} are in no other node's host tier, as far as is known")
        if strange:
            said.append(f"for {len(strange)} of the fingerprints they were not asked, since its windows are not known")
        return "; ".join(said)


def can_fetch(what: Chosen, media: Sequence[Medium], far: FromPeers) -> bool:
    """Whether a store of these media could get such a selection from other nodes."""
    return bool(far.prefetcher and what.hashes and what.fingerprints and media and media[0] is Medium.HOST)
