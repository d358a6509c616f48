"""Where a request's tokens came from, and for those that were computed why no tier or child had them.

The engine tells the story (`engine_messages.Story`); what it can't know, why a store does not have a block, is asked
of the stores now, so it is what they remember.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

from raykv.admin_messages import Absence
from raykv.api.asking import ask, at_all
from raykv.api.explanation import COMPUTED, NOT_RUN, Explanation, Piece, Reason
from raykv.api.objects import Engine, Store
from raykv.api.reach import Caller
from raykv.api.results import absence_said
from raykv.engine_messages import Missed, Story, TokenRange, Why
from raykv.store_messages import HASH_NBYTES

BEHIND = "it is there, behind one that is not: only a whole prefix can be loaded"
LATER = "it came after this request had asked, as far as the store remembers"
ASKED_BLOCKS = 256
"""Of how many of the missing blocks the stores are asked why: later ones follow the first."""
STORE_SAYS = frozenset({Why.NOT_FOUND, Why.NEVER_STORED, Why.EVICTED, Why.EXPIRED, Why.CLEARED, Why.CORRUPT,
                        Why.OTHER_FINGERPRINT, Why.OVER_QUOTA, Why.NO_ROOM})  # fmt: skip


def explained(
    story: Story, engine: Engine, stores: Sequence[Store], callers: Mapping[str, Caller], timeout: float
) -> Explanation:
    """Merge the engine's story with what the stores remember of the blocks that were missing."""
    gaps = _gaps(story)
    wanted = _asked_blocks(story, gaps, engine.block_size)
    absences, silent = _ask_stores(story, engine, stores, callers, wanted, timeout)
    pieces: list[Piece] = []
    for one in story.ranges:
        pieces += _pieces(one, story, engine, stores, absences)
    by_source: dict[str, int] = {}
    for one in story.ranges:
        by_source[one.source] = by_source.get(one.source, 0) + one.last - one.first
    return Explanation(
        request=str(story.request),
        engine=engine.id,
        model=engine.model,
        arrived=story.arrived,
        ended=story.ended,
        prompt_tokens=story.prompt_tokens,
        pieces=tuple(pieces),
        by_source=by_source,
        lookup_s=story.lookup_s,
        load_s=story.load_s,
        recompute_s=story.recompute_s,
        saved_tokens=story.saved_tokens,
        preemptions=story.preemptions,
        tenant=story.tenant,
        silent=silent,
    )


Absences = Mapping[str, Mapping[int, Absence | None]]
"""By store's actor and block: why it is not there; None: it is."""


def _gaps(story: Story) -> list[Missed]:
    """What some child did not find, so that a store may say more of it."""
    return [missed for missed in story.missed if missed.why in STORE_SAYS]


def _asked_blocks(story: Story, gaps: Sequence[Missed], block_size: int) -> list[int]:
    """The full blocks in which a computed range and a gap overlap, the first ones."""
    full = len(story.hashes) // HASH_NBYTES
    found: set[int] = set()
    for one in story.ranges:
        for gap in gaps if one.source == COMPUTED else ():
            first, last = max(one.first, gap.first), min(one.last, gap.last)
            found.update(range(first // block_size, min(full, -(-last // block_size)) if first < last else 0))
    return sorted(found)[:ASKED_BLOCKS]


def _ask_stores(
    story: Story,
    engine: Engine,
    stores: Sequence[Store],
    callers: Mapping[str, Caller],
    blocks: Sequence[int],
    timeout: float,
) -> tuple[Absences, tuple[str, ...]]:
    if not blocks or not engine.fingerprints:
        return {}, ()
    hashes = b"".join(story.hashes[block * HASH_NBYTES : (block + 1) * HASH_NBYTES] for block in blocks)
    askable = {store.actor: store for store in stores if not store.problem and store.actor in callers}

    def one(actor: str) -> tuple[Absence | None, ...]:
        answer = ask(callers[actor], "why", engine.fingerprints, hashes, story.arrived, timeout=timeout)
        return cast("tuple[Absence | None, ...]", answer)

    answers, errors = at_all(one, askable)
    found = {actor: dict(zip(blocks, answer, strict=True)) for actor, answer in answers.items()}
    silent = [store.at for store in stores if store.actor in errors or store.problem]
    return found, tuple(silent)


def _pieces(one: TokenRange, story: Story, engine: Engine, stores: Sequence[Store], absences: Absences) -> list[Piece]:
    """A range as it is; of a computed one as many as there are neighbouring blocks with other reasons."""
    if one.source != COMPUTED:
        if one.source == NOT_RUN:
            return [Piece(one.first, one.last, one.source)]
        seconds = story.load_s * (one.last - one.first) / max(1, _loaded(story)) if one.child else 0.0
        return [Piece(one.first, one.last, one.source, one.child, one.node, seconds)]
    cuts = {one.first, one.last}
    for missed in story.missed:
        cuts |= {edge for edge in (missed.first, missed.last) if one.first < edge < one.last}
    for answer in absences.values():
        for block in answer:
            edges = (block * engine.block_size, (block + 1) * engine.block_size)
            cuts |= {edge for edge in edges if one.first < edge < one.last}
    ordered = sorted(cuts)
    found: list[Piece] = []
    for first, last in pairwise(ordered):
        reasons = _reasons(first, last, story, engine, stores, absences)
        if found and found[-1].reasons == reasons:
            first = found.pop().first
        rate = engine.prefill_rate
        found.append(Piece(first, last, one.source, seconds=(last - first) / rate if rate else 0.0, reasons=reasons))
    return found


def _loaded(story: Story) -> int:
    """The tokens that some child loaded, over which the time of the loads is spread."""
    return sum(one.last - one.first for one in story.ranges if one.child)


def _reasons(
    first: int, last: int, story: Story, engine: Engine, stores: Sequence[Store], absences: Absences
) -> tuple[Reason, ...]:
    """Why each child did not bring these tokens: the engine's word, for a look-up without a hit the stores'."""
    found: list[Reason] = []
    for missed in story.missed:
        if not (missed.first <= first and last <= missed.last):
            continue
        own = _own_store(engine, missed.child)
        told = []
        if missed.why in STORE_SAYS and own:
            told = _of_stores(first, own, engine, stores, absences)
        found += told or [Reason(missed.child or engine.id, str(missed.why), missed.detail)]
    if not found:
        full = len(story.hashes) // HASH_NBYTES * engine.block_size
        always = last > max(0, min(full, story.prompt_tokens - 1)) // engine.block_size * engine.block_size
        why = (Why.ALWAYS_COMPUTED, "") if always else (Why.NOT_FOUND, "no child had them")
        found.append(Reason(engine.id, str(why[0]), why[1]))
    return tuple(dict.fromkeys(found))


def _own_store(engine: Engine, child: str) -> str:
    """The store's actor, if this child is the one that uses it."""
    known = engine.child(child)
    return engine.store if known is None or known.connector == "TierConnector" else ""


def _of_stores(at: int, own: str, engine: Engine, stores: Sequence[Store], absences: Absences) -> list[Reason]:
    """What the child's own store says of the block, and which others hold it all the same."""
    block = at // engine.block_size
    reasons: list[Reason] = []
    for store in sorted(stores, key=lambda store: store.actor != own):
        answer = absences.get(store.actor, {})
        if block not in answer:
            continue
        absence = answer[block]
        if store.actor == own and absence is not None:
            said = absence_said(Absence("", absence.at, absence.detail), time.time()).strip().removeprefix(": ")
            reasons.append(Reason(store.at, str(absence.why), said))
        elif store.actor == own:
            before = any(gone is not None for earlier, gone in answer.items() if earlier < block)
            held = (Why.NOT_FOUND, BEHIND) if before else (Why.NEVER_STORED, LATER)
            reasons.append(Reason(store.at, str(held[0]), held[1]))
        elif absence is None and reasons:
            reasons.append(Reason(store.at, "held there", "and not read from there: see the peer tier"))
    return reasons
