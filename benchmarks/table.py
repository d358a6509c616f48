"""The benchmark's result for a person."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("worker hooks per decode step", "hooks_decode", 1e3, "ms"),
    ("worker hooks per step, saves in flight", "hooks_crowd", 1e3, "ms"),
    ("worker hooks in a step that saves 1000 tokens", "hooks_save", 1e3, "ms"),
    ("worker hooks in a step that loads 1000 tokens", "hooks_load", 1e3, "ms"),
    ("scheduler hooks per decode step", "scheduler_decode", 1e3, "ms"),
    ("time per output token, one request", "step_decode", 1e3, "ms"),
    ("TTFT of 1000 tokens, cold", "ttft_cold", 1e3, "ms"),
    ("TTFT of 1000 tokens, warm", "ttft_warm", 1e3, "ms"),
    ("throughput without reuse", "tokens_per_s", 1.0, "tokens/s"),
)
TITLES = {
    "none": "no connector",
    "vllm": "vLLM's MultiConnector",
    "raykv": "RayKV",
    "lmcache": "LMCacheMP",
    "tier": "TierConnector",
}
RATIOS = (("raykv", "vllm"), ("tier", "lmcache"), ("tier", "none"))


def show(result: dict[str, Any], console: Console) -> None:
    imports = result["import_raykv"]
    heavy = ", ".join(imports["imported"]) or "none of ray, torch, vllm"
    console.print(f"\n[bold]import raykv[/]: {imports['median_s'] * 1e3:.0f} ms; imports {heavy}")
    rounds = result["medians_by_round"]
    table = Table(
        title=f"MultiConnectors with ExampleConnector and LMCacheMPConnector; {result['model']}",
        caption="median of the rounds, below it the lowest and the highest; each round's figure is a median itself",
        box=box.ROUNDED,
        title_justify="left",
    )
    table.add_column("")
    for variant in rounds:
        table.add_column(TITLES[variant], justify="right")
    pairs = [pair for pair in RATIOS if set(pair) <= set(rounds)]
    for ours, theirs in pairs:
        table.add_column(f"{TITLES[ours]} / {TITLES[theirs]}", justify="right")
    for title, name, scale, unit in ROWS:
        by_variant = {v: [figures[name] for figures in runs if name in figures] for v, runs in rounds.items()}
        cells = [_cell([value * scale for value in values], unit) for values in by_variant.values()]
        table.add_row(title, *cells, *(_ratio(by_variant[ours], by_variant[theirs]) for ours, theirs in pairs))
    shares = [f"{median(v):.0%}" if v else "-" for v in result["loaded_share"].values()]
    table.add_row("share of the warm prompts that was loaded", *shares, *("" for _ in pairs))
    console.print(table)


def _cell(values: Sequence[float], unit: str) -> str:
    if not values:
        return "-"
    digits = 3 if max(values) < 10 else 0 if max(values) > 1000 else 1
    middle, low, high = (f"{x:.{digits}f}" for x in (median(values), min(values), max(values)))
    return f"{middle} {unit}\n[dim]{low} to {high}[/]"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{median(ours) / median(theirs):.2f}" if ours and theirs else "-"
