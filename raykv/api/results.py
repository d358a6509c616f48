"""What operations answer: each says in a sentence what was done, and has the figures for scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv.admin_messages import Absence, BlockPlace
from raykv.api.shown import Shown, table
from raykv.api.words import count, show_nbytes, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Progress(Shown):
    """How far an operation is at one place: `done` of `total` blocks; 0 of 0: it can't be counted."""

    what: str
    where: str
    done: int = 0
    total: int = 0
    detail: str = ""
    ended: bool = False


Tell = Callable[[Progress], None]
"""Called in the caller's thread whenever something has changed; it should be short."""


@dataclass(frozen=True)
class Part(Shown):
    """What was done at one store or engine. `error`: why it was not, or not all of it."""

    where: str
    said: str = ""
    blocks: int = 0
    nbytes: int = 0
    error: str = ""
    running: bool = False

    COLUMNS = ("where", "blocks#", "bytes#", "what")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        return (self.where, f"{self.blocks:,}", show_nbytes(self.nbytes), self.error or self.said)


@dataclass(frozen=True, repr=False)
class Outcome(Shown):
    """What an operation did. `number` names it: the same operation with it again does nothing a second time.

    `ok`: all of it was done at every place. `running`: at some place it goes on.
    """

    what: str
    said: str
    number: str = ""
    parts: tuple[Part, ...] = ()
    chain: tuple[str, ...] = ()
    """Of a change of an engine's chain: its children after it."""

    @property
    def ok(self) -> bool:
        """Whether nothing is left to do."""
        return not any(part.error or part.running for part in self.parts)

    @property
    def blocks(self) -> int:
        """The blocks that it was about, over all places."""
        return sum(part.blocks for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def running(self) -> bool:
        """Whether it goes on somewhere."""
        return any(part.running for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """With `ok`, `blocks` and `nbytes`."""
        return {**super().to_dict(), "ok": self.ok, "blocks": self.blocks, "nbytes": self.nbytes}

    def __repr__(self) -> str:
        return f"<Outcome {self.said}>"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        head = Text(self.said, style="" if self.ok else "yellow")
        if len(self.parts) < 2 and self.ok:
            return head
        return Group(head, table(Part.COLUMNS, [part.row() for part in self.parts]))


# -- where blocks lie -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place(Shown):
    """A block in one store: in all its parts in these `media`, fastest first; `parts` of `of` are somewhere there."""

    store: str
    node: str
    media: tuple[str, ...]
    parts: int
    of: int
    nbytes: int = 0
    pinned_until: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether a load can use it."""
        return bool(self.media)

    @classmethod
    def made(cls, store: str, node: str, place: BlockPlace) -> Place:
        """From what the store says."""
        media = tuple(map(str, place.media))
        return cls(store, node, media, place.parts, place.of, place.nbytes, place.expires)


@dataclass(frozen=True)
class Block(Shown):
    """Tokens [first, last) of the prompt, with vLLM's hash of it, and where it lies."""

    index: int
    first: int
    last: int
    hash: str
    places: tuple[Place, ...]

    @property
    def held(self) -> bool:
        """Whether some store has all parts of it."""
        return any(place.whole for place in self.places)


@dataclass(frozen=True)
class Run(Shown):
    """Neighbouring blocks that lie at the same places."""

    first_block: int
    blocks: int
    first: int
    last: int
    where: tuple[str, ...]
    nbytes: int = 0


@dataclass(frozen=True, repr=False)
class Found(Shown):
    """Where the blocks of a prompt lie, over all stores that answered.

    `held_tokens`: the longest prefix of which every block is whole in some store; an engine may load less of it, as a
    sliding window needs more or a tier is not its own. `silent`: stores that did not answer.
    """

    engine: str
    model: str
    tokens: int
    block_size: int
    blocks: tuple[Block, ...]
    silent: tuple[str, ...] = ()

    @property
    def held_blocks(self) -> int:
        """How many of the first blocks are held."""
        return next((block.index for block in self.blocks if not block.held), len(self.blocks))

    @property
    def held_tokens(self) -> int:
        """Their tokens."""
        return self.held_blocks * self.block_size

    @property
    def runs(self) -> tuple[Run, ...]:
        """The blocks, neighbours at the same places together."""
        return tuple(_runs(self.blocks))

    @property
    def said(self) -> str:
        """In a sentence."""
        full = count(len(self.blocks), "full block")
        if not self.blocks:
            return f"The prompt has {count(self.tokens, 'token')}, less than a block of {self.block_size}."
        if not self.held_blocks:
            rest = sum(block.held for block in self.blocks)
            more = f"; {count(rest, 'later block')} of it {'is' if rest == 1 else 'are'}" if rest else ""
            return f"Nothing of the prompt's beginning is held ({self.tokens:,} tokens, {full}){more}."
        return f"The first {self.held_tokens:,} of {self.tokens:,} tokens are held ({self.held_blocks:,} of {full})."

    def to_dict(self) -> dict[str, Any]:
        """With `held_tokens`, `held_blocks`, `runs` and `said`."""
        more = {"held_tokens": self.held_tokens, "held_blocks": self.held_blocks, "said": self.said}
        return {**super().to_dict(), **more, "runs": [run.to_dict() for run in self.runs]}

    def __repr__(self) -> str:
        return f"<Found {self.said}>"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows = [
            (
                f"{run.first:,}-{run.last:,}",
                f"{run.blocks:,}",
                show_nbytes(run.nbytes),
                "; ".join(run.where) or "nowhere",
            )
            for run in self.runs
        ]
        lines: list[Any] = [Text(self.said), table(("tokens", "blocks#", "bytes#", "where"), rows)]
        if self.silent:
            lines.append(Text(f"No answer from: {', '.join(self.silent)}.", style="yellow"))
        return Group(*lines)


def _where(block: Block) -> tuple[str, ...]:
    """Such as "host, disk of default@a1b2 (pinned)"; of a part of a block how much."""
    found = []
    for place in block.places:
        media = ", ".join(place.media) or f"{place.parts} of {place.of} parts"
        found.append(f"{media} of {place.store}" + (" (pinned)" if place.pinned_until else ""))
    return tuple(found)


def _runs(blocks: tuple[Block, ...]) -> Iterator[Run]:
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or _where(blocks[index]) != _where(blocks[start]):
            some = blocks[start:index]
            nbytes = sum(place.nbytes for block in some for place in block.places)
            yield Run(start, len(some), some[0].first, some[-1].last, _where(some[0]), nbytes)
            start = index


def absence_said(absence: Absence, now: float) -> str:
    """Such as "evicted 12 s ago: the host tier was full"."""
    when = f" {show_seconds(max(0.0, now - absence.at))} ago" if absence.at else ""
    return f"{absence.why}{when}" + (f": {absence.detail}" if absence.detail else "")
