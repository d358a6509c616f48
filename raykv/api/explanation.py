"""Where a request's tokens came from, as records that show themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raykv.api.shown import Shown, table
from raykv.api.words import count, show_seconds
from raykv.engine_messages import Why

if TYPE_CHECKING:
    from rich.console import RenderableType

COMPUTED = "computed"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Reason(Shown):
    """Why `who` (a child, or a store) did not bring these tokens. `why` is a value of `engine_messages.Why`."""

    who: str
    why: str
    detail: str = ""

    @property
    def said(self) -> str:
        """In a few words."""
        return f"{self.who}: {self.why}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Piece(Shown):
    """Tokens [first, last) from one source. `reasons`: of computed ones, why each child did not bring them.

    `seconds`: what their load took, or their computing would take at the measured rate; 0: not known.
    """

    first: int
    last: int
    source: str
    child: str = ""
    node: str = ""
    seconds: float = 0.0
    reasons: tuple[Reason, ...] = ()

    COLUMNS = ("tokens", "count#", "source", "cost#", "why")

    def row(self) -> tuple[object, ...]:
        """Its line of a table."""
        source = self.source + (f" of {self.node}" if self.node else "")
        if self.child and self.child != self.source:
            source += f" by {self.child}"
        cost = f"{show_seconds(self.seconds)}" if self.seconds else "-"
        why = "\n".join(reason.said for reason in self.reasons) or "-"
        return (f"{self.first:,}-{self.last:,}", f"{self.last - self.first:,}", source, cost, why)


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """One request in one engine. `pieces` cover its prompt without gaps. Times in seconds; 0: not known."""

    request: str
    engine: str
    model: str
    arrived: float
    ended: float
    prompt_tokens: int
    pieces: tuple[Piece, ...]
    by_source: Mapping[str, int] = field(default_factory=dict)
    lookup_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0
    saved_tokens: Mapping[str, int] = field(default_factory=dict)
    preemptions: int = 0
    tenant: str = ""
    silent: tuple[str, ...] = ()
    others: tuple[Explanation, ...] = ()
    """The same request in other engines: its prefill, where this is its decode."""

    @property
    def said(self) -> str:
        """In a sentence or two."""
        parts = [
            f"{number:,} from {name}"
            for name, number in self.by_source.items()
            if name not in (COMPUTED, NOT_RUN) and number
        ]
        computed = self.by_source.get(COMPUTED, 0)
        text = f"Of {count(self.prompt_tokens, 'prompt token')}, {', '.join(parts) or 'none was loaded'}"
        text += f"; {computed:,} computed." if computed else "; none was computed."
        if self.load_s and self.recompute_s:
            text += f" The loads took {show_seconds(self.load_s)}, computing would have taken "
            text += f"about {show_seconds(self.recompute_s)}."
        if self.by_source.get(NOT_RUN):
            text += f" It ended before {self.by_source[NOT_RUN]:,} were run."
        if not self.ended:
            text += " The request still runs."
        return text

    @property
    def reason(self) -> str:
        """Why the first computed range beyond what is always computed was not loaded; empty: nothing was missing."""
        for piece in self.pieces:
            for reason in piece.reasons:
                if reason.why != Why.ALWAYS_COMPUTED:
                    return reason.said
        return ""

    def to_dict(self) -> dict[str, Any]:
        """With `said` and `reason`."""
        more = {"said": self.said, "reason": self.reason, "others": [one.to_dict() for one in self.others]}
        return {**super().to_dict(), **more}

    def __repr__(self) -> str:
        return f"<Explanation of {self.request}: {self.said}>"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        times = f"look-ups {show_seconds(self.lookup_s)}, loads {show_seconds(self.load_s)}"
        times += f", computing what was loaded about {show_seconds(self.recompute_s)}" if self.recompute_s else ""
        lines: list[Any] = [
            Text(f"{self.request} in engine {self.engine} ({self.model})", style="bold"),
            Text(self.said),
            table(Piece.COLUMNS, [piece.row() for piece in self.pieces]),
            Text(times, style="dim"),
        ]
        if self.saved_tokens:
            saved = ", ".join(f"{number:,} by {name}" for name, number in self.saved_tokens.items())
            lines.append(Text(f"saved: {saved}", style="dim"))
        if self.preemptions:
            lines.append(Text(f"preempted {count(self.preemptions, 'time')}", style="dim"))
        if self.silent:
            lines.append(Text(f"No answer from: {', '.join(self.silent)}.", style="yellow"))
        return Group(*lines, *(one.__rich__() for one in self.others))
