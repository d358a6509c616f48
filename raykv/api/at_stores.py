"""Operations at stores: pins, prefetch, clear, quotas, tiers, verify. A part of `Cluster`."""

from __future__ import annotations

from collections.abc import Sequence

from raykv.admin_messages import Operation, OperationKind, Selection
from raykv.api import finding, looking
from raykv.api.at_tiers import AtTiers
from raykv.api.checked import operation
from raykv.api.connection import WAIT_S, new_number
from raykv.api.errors import NotFoundError, OperationError
from raykv.api.held import Pin, Quota, RunningOperation
from raykv.api.objects import Engine, Listing, Node, Store
from raykv.api.prompts import Prompt
from raykv.api.results import Outcome, Tell
from raykv.api.words import nbytes, seconds, show_nbytes, show_seconds, unknown
from raykv.config.reader import show
from raykv.errors import ConfigError
from raykv.store_messages import Medium, TierSpec

NOTE_LEN = 200


class AtStores(AtTiers):
    """`store` names which: NAME (on all nodes), NAME@NODE, @NODE or an actor; None: all of them, or where a prompt is
    given the one of its engine."""

    # -- pins -------------------------------------------------------------------------------------------------------

    @operation
    def pin(
        self,
        prompt: Prompt,
        time_limit: float | str,
        *,
        engine: str | None = None,
        model: str | None = None,
        store: str | None = None,
        cache_salt: str = "",
        lora: str = "",
        note: str = "",
        number: str | None = None,
    ) -> Outcome:
        """Keep the blocks of a prompt that are held from eviction, for a time such as "10m".

        Give the outcome's `number` to `unpin`. Blocks that come later are not pinned by it. With the `number` of a pin
        that is kept nothing is changed, its time neither. Raises NotFoundError where none of the blocks is held.
        """
        limit_s = seconds(time_limit, "time_limit")
        if len(note) > NOTE_LEN:
            raise ConfigError(f"note has {len(note)} characters. It can have {NOTE_LEN} at most.")
        chosen = new_number("pin", number)
        selection, stores = self._of_prompt(prompt, engine, model, store, cache_salt, lora)
        done = self._ops().at_once(
            f"pin for {show_seconds(limit_s)}", chosen, stores, "pin", lambda _: (chosen, selection, limit_s, note)
        )
        if not done.blocks and done.ok:
            where = ", ".join(one.at for one in stores)
            raise NotFoundError(f"None of the prompt's blocks is held by {where}: nothing is pinned. See `lookup`.")
        return done

    @operation
    def unpin(self, number: str, *, store: str | None = None) -> Outcome:
        """Let the blocks of a pin be evicted again."""
        stores = finding.stores(self._stores(), store)
        known = {pin.number for one in stores for pin in one.pins}
        if number not in known:
            raise unknown("pin", number, known)
        stores = [one for one in stores if any(pin.number == number for pin in one.pins)]
        return self._ops().at_once("unpin", number, stores, "unpin", lambda _: (number,))

    @operation
    def pins(self, *, store: str | None = None) -> Listing[Pin]:
        """All pins of operators, those that end first at the top."""
        stores = finding.stores(self._stores(), store)
        found = [Pin(one.at, p.number, p.blocks, p.nbytes, p.expires, p.note) for one in stores for p in one.pins]
        return Listing(sorted(found, key=lambda pin: pin.expires))

    # -- content ----------------------------------------------------------------------------------------------------

    @operation
    def prefetch(
        self,
        prompt: Prompt,
        tier: str = "host",
        *,
        node: str | None = None,
        engine: str | None = None,
        model: str | None = None,
        store: str | None = None,
        cache_salt: str = "",
        lora: str = "",
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Copy the blocks of a prompt up into the fastest tier of stores: from their slower tiers, and from the host
        tiers of other nodes' stores into a host tier, where the store has a peer tier.

        Into the engine's own store unless `store` names some (NAME@NODE: the one there) or `node` says where: each
        store fetches what it lacks itself. Nothing is lost for it, so it may find no room: `parts` say what came.
        Waits until it is done, for `wait_s` at most (0: not at all); `tell` hears of its progress.
        """
        medium = finding.medium(tier)
        chosen = new_number("prefetch", number)
        if node is not None:
            if store is not None and "@" in store:
                raise ConfigError(f"store is {show(store)} and node {show(node)}. Name the node once.")
            store = f"{store or ''}@{finding.node(self._nodes(), node).id}"
        selection, stores = self._of_prompt(prompt, engine, model, store, cache_salt, lora)
        for one in stores:
            self._usable(one, medium)
        windows = self._windows(selection, stores)
        operation = Operation(chosen, OperationKind.PREFETCH, selection, TierSpec(medium, 0), windows=windows)
        return self._follow("prefetch", lambda _: operation, stores, wait_s, tell)

    @operation
    def clear(
        self,
        *,
        model: str | None = None,
        tenant: str | None = None,
        prefix: Prompt | None = None,
        tier: str | None = None,
        store: str | None = None,
        engine: str | None = None,
        cache_salt: str = "",
        lora: str = "",
        everything: bool = False,
    ) -> Outcome:
        """Forget the blocks that meet all that is given; those that are pinned or being read stay.

        `tenant`: its cache salt, or "tag:HEX"; `prefix`: a prompt, all its blocks. Without any of these `everything`
        must be said. At all stores unless `store` names some.
        """
        medium = None if tier is None else finding.medium(tier)
        if model is None and tenant is None and prefix is None and tier is None and not everything:
            raise OperationError(
                "clear was given neither model, tenant, prefix nor tier, so it would forget all blocks. If that is "
                "meant, say everything=True (--everything)."
            )
        tag = "" if tenant is None else finding.tenant(tenant)
        known = self._stores()
        stores = finding.stores(known, store)
        prints: tuple[str, ...] = ()
        hashes = b""
        if prefix is not None:
            of = finding.engine(self._engines(), engine, model)
            salt = cache_salt or (tenant if tenant is not None and not tenant.startswith(finding.TAG) else "")
            hashes, prints = self._some_blocks(prefix, of, known, salt, lora), of.fingerprints
        elif model is not None:
            prints = finding.fingerprints(known, self._engines(), model)
        if medium is not None:
            stores = [one for one in stores if one.tier(medium) is not None]
            if not stores:
                media = {one.medium for some in known for one in some.tiers}
                raise unknown("tier in these stores called", tier, media)
        selection = Selection(prints, tag, hashes, medium)
        return self._ops().at_once("clear", "", stores, "forget", lambda _: (selection,))

    @operation
    def set_quota(self, tenant: str, limit: int | str | None, *, store: str | None = None) -> Outcome:
        """Let a tenant have so many bytes over all tiers of each store ("10GiB"; None: no limit).

        `tenant`: its cache salt, or "tag:HEX" as `quotas` lists it. What it has beyond the limit goes now; new blocks
        beyond it are not saved. What has no tenant has no quota.
        """
        tag = finding.tenant(tenant)
        limit_nbytes = None if limit is None else nbytes(limit, "quota", least=0)
        stores = finding.stores(self._stores(), store)
        what = "quota " + ("none" if limit_nbytes is None else show_nbytes(limit_nbytes))
        return self._ops().at_once(what, "", stores, "set_quota", lambda _: (tag, limit_nbytes))

    @operation
    def quotas(self, *, store: str | None = None) -> Listing[Quota]:
        """What each tenant has in each store, largest first; those with a quota too that have nothing."""
        stores = finding.stores(self._stores(), store)
        found = [
            Quota(one.at, finding.TAG + t.tag, t.blocks, t.nbytes, t.quota, t.refused_blocks)
            for one in stores
            for t in one.tenants
        ]
        return Listing(sorted(found, key=lambda quota: -quota.nbytes))

    # -- long ones --------------------------------------------------------------------------------------------------

    @operation
    def verify(
        self,
        *,
        store: str | None = None,
        wait_s: float = WAIT_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Read every block now and check it; a bad one is taken out of use, and will be a miss."""
        operation = Operation(new_number("verify", number), OperationKind.VERIFY)
        return self._follow("verify", lambda _: operation, finding.stores(self._stores(), store), wait_s, tell)

    @operation
    def operations(self, *, store: str | None = None) -> Listing[RunningOperation]:
        """The long operations that stores know, those that have ended too, oldest first."""
        stores = finding.stores(self._stores(), store)
        found = [RunningOperation(one.at, state) for one in stores for state in one.operations]
        return Listing(sorted(found, key=lambda one: one.state.began))

    @operation
    def operation(self, number: str) -> Listing[RunningOperation]:
        """How far one is, at each store."""
        known = self.operations()
        found = Listing(one for one in known if one.state.number == number)
        if not found:
            raise unknown("operation", number, {one.state.number for one in known})
        return found

    # -- parts ------------------------------------------------------------------------------------------------------

    def _of_prompt(
        self, prompt: Prompt, engine: str | None, model: str | None, store: str | None, cache_salt: str, lora: str
    ) -> tuple[Selection, list[Store]]:
        """A prompt's blocks, and the stores that are meant: the engine's own where none is named."""
        of = finding.engine(self._engines(), engine, model)
        if not of.fingerprints:
            raise OperationError(f"Engine {of.id} uses no store: it has no TierConnector, so no block of it is in one.")
        known = self._stores()
        stores = finding.stores(known, store if store is not None else of.store or None)
        hashes = self._some_blocks(prompt, of, known, cache_salt, lora)
        return Selection(of.fingerprints, hashes=hashes), stores

    def _windows(self, selection: Selection, stores: Sequence[Store]) -> tuple[int, ...]:
        """Of the selected model's KV groups, for a store that no engine of it is attached to: as another one says."""

        def known(some: Sequence[Store]) -> list[tuple[int, ...]]:
            models = [model for one in some for model in one.models if model.fingerprint in selection.fingerprints]
            return [model.windows for model in models if model.windows]

        alone = [one for one in stores if not known([one])]
        return next(iter(known(stores) or known(self._stores())), ()) if alone else ()

    def _some_blocks(self, prompt: Prompt, of: Engine, known: Sequence[Store], cache_salt: str, lora: str) -> bytes:
        found = self._hashed(prompt, of, known, cache_salt, lora)
        if not found.blocks:
            raise OperationError(
                f"The prompt has {found.tokens} tokens, less than one block of {of.block_size}: nothing of it is ever "
                "stored. Give a longer one."
            )
        return found.hashes

    def _nodes(self) -> Listing[Node]:
        return looking.nodes_of(self._world.nodes(), Listing(), Listing())

    def _usable(self, store: Store, medium: Medium) -> None:
        """A tier that can be filled now."""
        tier = finding.tier(store, medium)
        if tier.off:
            raise OperationError(f"The tier {medium} of {store.at} is off: {tier.off}. Name another tier.")
        if tier.draining:
            raise OperationError(
                f"The tier {medium} of {store.at} is draining: nothing new is put there. Name another."
            )
        if store.drain:
            raise OperationError(f"The store {store.at} is drained ({store.drain}): nothing new is put there.")
