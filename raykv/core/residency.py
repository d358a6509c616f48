"""Which engines can get at a prompt's blocks: what the stores of their nodes hold, and which engines saw it last.

The theory. A router has text, and stores know blocks by hashes of tokens. What the hashes of a prompt are never
changes, so it is learned once, behind the request (`router.learner`): an engine turns the text into tokens, and its
hasher these into hashes. From then on every prompt that begins alike is known up to where it does. How many blocks the
text up to some character makes is estimated by its share of the prompt: that only weighs engines against each other.

Who holds them changes all the time; it is asked again when it is older than STALE_S, also behind the request. So no
request waits for any of it, and what it goes by is the answer for the request before it.

What a store holds counts in full for every engine of its node. That an engine *saw* a prompt (`routing.TextPrefixes`)
counts in full where nothing is known of the stores, and else by half: its own cache may still have it, or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raykv.cluster_messages import EngineInfo
from raykv.core.routing import CHUNK_CHARS, Prefix, TextPrefixes
from raykv.errors import IntegrityError

STALE_S = 1.0
OLD_S = 60.0
"""What was held so long ago says nothing any more."""
MAX_CHUNKS = 100_000
"""That lead to hashes; about 200 bytes each."""
MAX_HASHES_NBYTES = 64 << 20
MORE_CHUNKS = 4
"""A prompt that goes on for so many chunks beyond what is known of it is worth learning."""
HELD_SHARE = 0.5


@dataclass(eq=False, slots=True)
class Learned:
    """A prompt's hashes (concatenated, `blocks` of them), and what was held when it was asked: by node, its blocks."""

    model: str
    hashes: bytes
    blocks: int
    chunks: int
    held: Mapping[str, int] = field(default_factory=dict)
    asked_at: float = 0.0
    answered_at: float | None = None


class LearnedPrompts:
    """A Residency. One thread. `now` is told by `at`, since a Residency is not."""

    def __init__(self, chunks: int = MAX_CHUNKS, hashes_nbytes: int = MAX_HASHES_NBYTES) -> None:
        self._text = TextPrefixes()
        self._most_chunks, self._most_nbytes = chunks, hashes_nbytes
        self._at: OrderedDict[bytes, tuple[Learned, int, int]] = OrderedDict()  # chunk: its chunks and blocks
        self._users: dict[Learned, int] = {}  # chunks that lead to it
        self._nbytes = 0
        self.now = 0.0
        """When it is, as the caller says. Seconds."""

    def __len__(self) -> int:
        return len(self._at)

    # -- what the router asks -------------------------------------------------------------------------------

    def held(self, prefix: Prefix, engines: Sequence[EngineInfo]) -> dict[str, int]:
        """As `Residency.held`."""
        seen = self._text.held(prefix, engines)
        found = self._find(prefix)
        if found is None or found[0].answered_at is None or self.now - found[0].answered_at > OLD_S:
            return seen
        learned, chunks, blocks = found
        return {
            one.name: max(_share(learned.held.get(one.node, 0), chunks, blocks), int(HELD_SHARE * seen[one.name]))
            for one in engines
        }

    def saw(self, prefix: Prefix, engine: EngineInfo) -> None:
        """As `Residency.saw`."""
        self._text.saw(prefix, engine)

    # -- what is to be found out ----------------------------------------------------------------------------

    def wants(self, prefix: Prefix) -> bool:
        """Whether the hashes of this prompt are worth learning."""
        found = self._find(prefix)
        return len(prefix) - (found[1] if found is not None else 0) >= MORE_CHUNKS

    def stale(self, prefix: Prefix) -> Learned | None:
        """What is to be asked for again, if that is due: who holds it. Counts as asked."""
        found = self._find(prefix)
        if found is None or self.now - found[0].asked_at < STALE_S:
            return None
        found[0].asked_at = self.now
        return found[0]

    def learn(self, model: str, prefix: Prefix, chars: int, hashes: bytes, blocks: int) -> Learned:
        """A prompt of so many characters has these hashes, `blocks` of them."""
        learned = Learned(model, hashes, blocks, len(prefix), asked_at=self.now)
        self._nbytes += len(hashes)
        self._users[learned] = 0
        # Tail first: the head, which most prompts share, is the last to be forgotten.
        for chunks in range(len(prefix), 0, -1):
            self._drop(prefix[chunks - 1])
            self._at[prefix[chunks - 1]] = learned, chunks, blocks * chunks * CHUNK_CHARS // max(chars, 1)
            self._users[learned] += 1
        self._trim(learned)
        return learned

    def answer(self, learned: Learned, held: Mapping[str, int]) -> None:
        """Who holds how many blocks of it now, by node."""
        learned.held, learned.answered_at = held, self.now

    def _find(self, prefix: Prefix) -> tuple[Learned, int, int] | None:
        """The longest beginning that is known. Chunks are forgotten from the tail on, so the known ones come first."""
        low, high = 0, len(prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle - 1] in self._at:
                low = middle
            else:
                high = middle - 1
        return self._at[prefix[low - 1]] if low else None

    def _trim(self, newest: Learned) -> None:
        while len(self._at) > self._most_chunks or (self._nbytes > self._most_nbytes and len(self._users) > 1):
            chunk = next(iter(self._at))
            if self._at[chunk][0] is newest and len(self._users) == 1:
                return
            self._drop(chunk)

    def _drop(self, chunk: bytes) -> None:
        found = self._at.pop(chunk, None)
        if found is not None:
            self._users[found[0]] -= 1
            if not self._users[found[0]]:
                del self._users[found[0]]
                self._nbytes -= len(found[0].hashes)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a count is wrong or a bound does not hold."""
        self._text.check_integrity()
        users: dict[Learned, int] = {}
        for learned, _, _ in self._at.values():
            users[learned] = users.get(learned, 0) + 1
        if users != self._users or self._nbytes != sum(len(one.hashes) for one in users):
            raise IntegrityError("the counts of what is known of prompts are wrong")
        if len(self._at) > self._most_chunks and len(users) > 1:
            raise IntegrityError(f"{len(self._at)} chunks are known, the limit is {self._most_chunks}")


def _share(held: int, chunks: int, blocks: int) -> int:
    """The chunks that so many held blocks make, of `chunks` that make `blocks`."""
    if not blocks:
        return 0
    return chunks if held >= blocks else chunks * held // blocks
