"""What the demo found out: as a table for a person, as JSON for a program."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tests.support.engine import Result

ROUNDS = ("plain", "cold", "warm", "killed", "back")


@dataclass
class Question:
    """One question and its answers, by round."""

    text: str
    answers: dict[str, Result] = field(default_factory=dict)
    loaded: dict[str, dict[str, int]] = field(default_factory=dict)
    """Tokens by round and child."""

    def add(self, round_name: str, result: Result, loaded: dict[str, int]) -> None:
        self.answers[round_name] = result
        self.loaded[round_name] = loaded

    def cell(self, round_name: str) -> str:
        """Seconds to the first token, and how many tokens needed no computing."""
        result = self.answers.get(round_name)
        if result is None or result.ttft_s is None:
            return "-"
        return f"{result.ttft_s:.2f}\n[dim]{sum(self.loaded[round_name].values())}[/]"

    def equal(self, round_name: str) -> bool:
        return self.answers[round_name].token_ids == self.answers["plain"].token_ids

    @property
    def all_equal(self) -> bool:
        return all(self.equal(name) for name in self.answers)


@dataclass(frozen=True)
class ChildStats:
    """RayKV's counters of one child since the engine's start, and the process it runs in."""

    tokens_saved: int
    tokens_loaded: int
    restarts: int
    pid: int


@dataclass
class Report:
    """Filled in as the demo goes."""

    versions: dict[str, str | None]
    model: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    before: dict[str, ChildStats] = field(default_factory=dict)
    after: dict[str, ChildStats] = field(default_factory=dict)
    back_after_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return all(question.all_equal for question in self.questions)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "versions": {name: text for name, text in self.versions.items() if text},
            "tokens_equal": self.equal,
            "child_back_after_s": self.back_after_s,
            "questions": [
                {
                    "question": question.text,
                    "answer": question.answers["plain"].text.strip(),
                    "tokens_equal": question.all_equal,
                    "rounds": {
                        name: {
                            "ttft_s": result.ttft_s,
                            "prompt_tokens": result.num_prompt_tokens,
                            "loaded_tokens": question.loaded[name],
                            "tokens_equal": question.equal(name),
                            "token_ids": result.token_ids,
                        }
                        for name, result in question.answers.items()
                    },
                }
                for question in self.questions
            ],
            "children": {
                name: asdict(stats) | {"pid_before_kill": self.before[name].pid} for name, stats in self.after.items()
            },
            "seconds": self.seconds,
            "kv_transfer_config": self.config,
        }


def show(report: Report, console: Console) -> None:
    """The end of the demo."""
    console.print()
    console.print(_answers(report))
    console.print(_children(report))
    if report.equal:
        console.print("[bold green]All answers have exactly the plain engine's tokens, also after the kill.[/]")
    else:
        console.print("[bold red]Some answers differ from the plain engine's.[/] This must not happen.")
    if report.back_after_s is None:
        console.print("[yellow]The killed child did not come back in time.[/]")


def _answers(report: Report) -> Table:
    table = Table(
        title=f"{report.model}: seconds to the first token",
        caption="In grey: prompt tokens that were loaded, not computed.",
        box=box.ROUNDED,
        title_justify="left",
        caption_justify="left",
        show_lines=True,
    )
    # All of it fits 80 columns.
    table.add_column("question and answer", ratio=1)
    for name in ROUNDS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    for question in report.questions:
        answer = " ".join(question.answers["plain"].text.split())
        cells = [question.cell(name) for name in ROUNDS]
        verdict = "[green]equal[/]" if question.all_equal else "[red]differ[/]"
        table.add_row(f"[bold]{question.text}[/]\n{answer}", *cells, verdict)
    return table


def _children(report: Report) -> Table:
    table = Table(title="The children, each in its own Ray actor", box=box.ROUNDED, title_justify="left")
    for name in ("child", "tokens saved", "loaded", "actor pid", "back after"):
        table.add_column(name, justify="left" if name == "child" else "right")
    for name, stats in report.after.items():
        old = report.before[name].pid
        killed = stats.pid != old
        pid = f"[red strike]{old}[/] → {stats.pid}" if killed else str(stats.pid)
        back = f"{report.back_after_s:.0f} s" if killed and report.back_after_s is not None else ""
        table.add_row(name, str(stats.tokens_saved), str(stats.tokens_loaded), pid, back)
    return table
