"""A NodeStore in this process as `TierBench` sees one, and a look at every byte that it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.config.tiers import parse_tiers
from raykv.connector import tier_setup
from raykv.connector.tier_known import block_key
from raykv.core import prefix
from raykv.core.store_plans import Place
from raykv.storage.disk_pool import aligned_buffer
from raykv.store_messages import Medium
from raykv.types import Rank
from tests.support.fake_model import chain, continuation, slots
from tests.support.fake_worker import Result
from tests.support.in_process_store import InProcessStore
from tests.support.waiting import eventually

BLOCK = 16
PATIENCE_S = 30.0


def block_hashes(tokens: list[int]) -> Sequence[bytes]:
    """vLLM's hashes of the whole blocks of some tokens."""
    make = get_request_block_hasher(BLOCK, sha256)
    return Request("tokens", tokens, SamplingParams(max_tokens=1), None, block_hasher=make).block_hashes


class RealStore:
    """The store and both ends of its links; several engines may use it, one after the other."""

    hold_answers = hold_jobs = False

    def __init__(self, folder: Path, tiers: list[dict[str, Any]], limit_s: float = 5.0, **options: Any) -> None:
        """`options`: more of a TierConnector's config."""
        (folder / "shm").mkdir()
        self.process = InProcessStore(parse_tiers({"tiers": tiers, **options}).store, folder / "shm")
        self.limit_s = limit_s
        self.fingerprints: dict[bytes, Rank] = {}
        self.askers: list[StoreAsker] = []

    def new_asker(self, options: Any, engine: Any) -> StoreAsker:
        asker = StoreAsker(self.process, engine, self.limit_s, wait_s=tier_setup.hand_over_s(options))
        eventually(lambda: asker.up, "the store to answer")
        self.askers.append(asker)
        return asker

    def new_link(self, options: Any, attach: Any) -> StoreWorkerLink:
        self.fingerprints[attach.fingerprint] = attach.rank
        return StoreWorkerLink(self.process, attach, self.limit_s, self.limit_s)

    def touching(self, blocks: Iterable[int]) -> list[str]:
        """It can't tell: what it reads too late is found by `check_bytes`."""
        return []

    def status(self) -> Any:
        return self.process.call("status", timeout=PATIENCE_S)

    def used(self, medium: Medium) -> int:
        return next(tier.used for tier in self.status().tiers if tier.medium is medium)

    def check_empty(self) -> None:
        """Nothing is owed to it, and no slot is lost."""
        eventually(lambda: self.status().leases == 0, "all leases to be given back")
        eventually(lambda: all(tier.writing == 0 for tier in self.status().tiers), "all jobs to be settled")
        self.process.call("check_integrity", timeout=PATIENCE_S)

    # -- every slot read back -------------------------------------------------------------------------------

    def ready(self) -> Iterator[tuple[Place, bytes, bytes]]:
        """Each published slot of each tier, read from its medium: place, key, bytes. Its checksum must hold."""
        tiers = self.process.store._stock.tiers  # type: ignore[union-attr]
        row = aligned_buffer(tiers.slot_nbytes)
        for tier, count in enumerate(tiers.num_slots):
            for place in (Place(tier, slot) for slot in range(count)):
                header = tiers.header(place)
                if header is not None:
                    assert tiers.read(place, header, row), f"{place}: its bytes are not those of its checksum"
                    yield place, header.key, row[: header.nbytes].numpy().tobytes()

    def check_bytes(
        self, results: Iterable[Result], groups: Sequence[Any], salts: Iterable[bytes] = (b"",)
    ) -> list[int]:
        """Compare every published slot with a recompute of its key: what a pass over these requests' tokens puts into
        that block. `salts`: what the engines hashed along. Returns the number of slots, by tier."""
        known: dict[bytes, tuple[list[int], Rank, int]] = {}
        for result in results:
            tokens = result.prompt + continuation(result.prompt, result.wanted)
            values = chain(tokens)
            for number, digest in enumerate(block_hashes(tokens)):
                mine = values[number * BLOCK : (number + 1) * BLOCK]
                for salt in salts:
                    for fingerprint, rank in self.fingerprints.items():
                        for group in range(len(groups)):
                            key = prefix.block_key(fingerprint, group, block_key(digest, salt))
                            known[key] = (mine, rank, group)
        counts = [0] * len(self.status().tiers)
        for place, key, data in self.ready():
            assert key in known, f"{place}: no request has this key, {key.hex()}"
            mine, rank, group = known[key]
            right = b"".join(slots(mine, layer, rank).numpy().tobytes() for layer in groups[group].layer_names)
            assert data == right, f"{place}: wrong bytes under the key {key.hex()}"
            counts[place.tier] += 1
        assert counts == [tier.used for tier in self.status().tiers], "headers and book disagree"
        return counts
