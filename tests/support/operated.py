"""Two real engines on one Ray and one store, with a load that never rests, and both ways of operators to reach them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.configs import example_child, multi, tier_child
from tests.support.engine import Engine, Result
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

BLOCK = 32
SLOT = 128 << 10  # bytes of one block of the tiny model
EXAMPLE, TIERS = "example", "tiers"
CROWD = [name for name in PROMPTS if name.startswith("crowd")]
LIMITS = {"timeout_s": 60, "load_timeout_s": 60, "retry_s": 1}
HOST, DISK = 128 * SLOT, 512 * SLOT

API = {
    "tiers add": "add_tier",
    "tiers resize": "resize_tier",
    "tiers drain": "drain_tier",
    "tiers remove": "remove_tier",
    "child add": "add_child",
    "child remove": "remove_child",
    "child pause": "pause_child",
    "child resume": "resume_child",
    "child restart": "restart_child",
    "child reorder": "reorder_children",
}
"""The API's names of the command line's commands where they differ."""
FLAGS = {"time_limit": "for", "wait_s": "wait"}


class ByApi:
    """`way("tiers resize", "host", "16MiB")` by `raykv.connect()`; answers as its `to_dict` says."""

    def __init__(self, kv: Any) -> None:
        self.kv = kv

    def __call__(self, command: str, *arguments: Any, **options: Any) -> Any:
        if command == "quota" and not arguments:
            return self.kv.quotas().to_dict()
        if command == "quota":
            return self.kv.set_quota(arguments[0], None if arguments[1] == "none" else arguments[1]).to_dict()
        if command == "child list":
            return self.kv.engine(options["engine"]).children.to_dict()
        if command == "tiers list":
            return [tier for store in self.kv.stores.to_dict() for tier in store["tiers"]]
        if command == "child reorder":
            arguments = (list(arguments),)
        if "prompt" in options:
            arguments = (options.pop("prompt"), *arguments)
        return getattr(self.kv, API.get(command, command))(*arguments, **options).to_dict()


class CommandFailed(Exception):
    """A command's error, with its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ByCommand:
    """The same by the command line with --json, in this process."""

    def __call__(self, command: str, *arguments: Any, **options: Any) -> Any:
        from click.testing import CliRunner

        from raykv.cli import main

        line = [*command.split(), *map(str, arguments), "--json"]
        for name, value in options.items():
            if name == "prompt":
                line += ["--tokens", ",".join(map(str, value))] if not isinstance(value, str) else ["--", value]
            elif value is True:
                line.append(f"--{name}")
            else:
                flag = "to" if (command, name) == ("prefetch", "tier") else FLAGS.get(name, name.replace("_", "-"))
                line += [f"--{flag}", str(value)]
        if command in ("clear", "tiers remove", "child remove"):
            line.append("--yes")
        done = CliRunner().invoke(main, line)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        answer = json.loads(done.stdout) if done.stdout.strip() else {"error": done.stderr}
        if done.exit_code not in (0, 3) or (isinstance(answer, dict) and "error" in answer):
            raise CommandFailed(answer["error"] if isinstance(answer, dict) else done.output, done.exit_code)
        return answer


class Load:
    """Requests to one engine, three at a time, without end; each answer is compared. `still` holds it between two."""

    def __init__(self, engine: Engine, baseline: dict[str, list[int]], seed: int) -> None:
        self.engine, self.baseline, self.seed = engine, baseline, seed
        self.served = 0
        self.wrong: list[str] = []
        self.still = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load-{seed}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        dice, rounds = random.Random(self.seed), itertools.count()
        while not self._ended.is_set():
            with self.still:
                names = dice.sample(CROWD, 3)
                try:
                    if next(rounds) % 2:
                        self.engine.reset_prefix_cache()  # most often: a save under way keeps it from that
                    pending = [
                        self.engine.submit(PROMPTS[name], MAX_TOKENS, request_id=f"load{self.seed}.{self.served + i}")
                        for i, name in enumerate(names)
                    ]
                    for name, request in zip(names, pending, strict=True):
                        if (tokens := request.result().token_ids) != self.baseline[name]:
                            self.wrong.append(f"{name} ({request.request_id}): {tokens}")
                    self.served += len(names)
                except Exception as error:
                    self.wrong.append(f"{names}: {type(error).__name__}: {error}")
                    return
            self._ended.wait(0.05)  # who wants `still` gets it

    def close(self) -> None:
        self._ended.set()
        self._thread.join(120)


class Operated:
    """What the tests operate. `engines` by id."""

    def __init__(self, engines: dict[str, Engine], baseline: dict[str, list[int]], folder: Path, store: str) -> None:
        import raykv

        self.engines, self.baseline, self.folder, self.store_name = engines, baseline, folder, store
        self.free = {name: engine.free_blocks() for name, engine in engines.items()}
        self.loads = {name: Load(engine, baseline, number) for number, (name, engine) in enumerate(engines.items())}
        self.kv = raykv.connect(timeout_s=30)
        self.api, self.command = ByApi(self.kv), ByCommand()
        self._numbers = itertools.count()

    # -- requests -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiet(self, *names: str) -> Iterator[None]:
        """No load at these engines (none named: at all), all their saves at their end, and the moves of the store."""
        with contextlib.ExitStack() as stack:
            for name in names or self.engines:
                stack.enter_context(self.loads[name].still)
            for name in names or self.engines:
                self.engines[name].wait_free_blocks(self.free[name], timeout_s=60)
            if len(names or self.engines) == len(self.engines):
                self.settle()
            yield

    def settle(self) -> None:
        """Every save is committed and every move has ended; then the store's books are checked."""
        engine = next(iter(self.engines.values()))
        engine.call_core("tests.support.probes:store_settle", self.store_name, 60.0)

    def ask(self, engine: str, name: str, **options: Any) -> Result:
        """A request of whose prompt vLLM itself has nothing; its answer is compared. Call it where it is quiet."""
        self.engines[engine].forget(60)
        request = f"{engine}.{name}.{next(self._numbers)}"
        result = self.engines[engine].generate(PROMPTS[name], MAX_TOKENS, request_id=request, **options)
        assert result.token_ids == self.baseline[name], f"{name} in {engine}"
        self.engines[engine].wait_free_blocks(self.free[engine], timeout_s=60)
        self.settle()
        return result

    def check_load(self) -> int:
        """Nothing was wrong and the load still runs. Returns how many requests it had."""
        for name, load in self.loads.items():
            assert not load.wrong, f"load at {name}: {load.wrong[:3]}"
        return sum(load.served for load in self.loads.values())

    # -- what is seen -------------------------------------------------------------------------------------------

    def tier(self, medium: str) -> Any:
        return self.kv.store(self.store_name).tier(medium)

    def child(self, engine: str, name: str) -> Any:
        return self.kv.engine(engine).child(name)

    def chain(self, engine: str) -> list[str]:
        return [child.name for child in self.kv.engine(engine).children]

    def wait_child(self, engine: str, name: str, state: str) -> Any:
        """Views are told every half second."""
        deadline = time.monotonic() + 90
        while (child := self.child(engine, name)) is None or child.state != state:
            assert time.monotonic() < deadline, f"{name} of {engine} is {child and child.state}, not {state}"
            time.sleep(0.1)
        return child

    def check_integrity(self) -> None:
        """Of the store and its tiers, and all blocks of both engines are free; no pin is left."""
        with self.quiet():
            assert not self.kv.pins()
            for name, engine in self.engines.items():
                half = engine.call_core("tests.support.probes:check_connector")
                assert half["chain"] == self.chain(name)

    def close(self) -> None:
        for load in self.loads.values():
            load.close()
        self.kv.close()


@contextlib.contextmanager
def operated(model: Path, ray: RayCluster, folder: Path, baseline: dict[str, list[int]]) -> Iterator[Operated]:
    """Starts both at once; a minute on two cores."""
    import raykv
    from raykv.actors import store_handle

    store = f"o{os.getpid()}"
    tiers = tier_child(store, host=str(HOST), disk=str(DISK), path=folder / "disk", raykv={"name": TIERS})
    env = {**ray.env, "PYTHONPATH": os.getcwd()}
    with raykv.connect():
        store_handle.shutdown_stores()  # other tests' stores would be operated on, too
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in ("one", "two"):
            children: Sequence[Any] = [new_example(folder / name / EXAMPLE, EXAMPLE), tiers]
            engines[name] = Engine(model, multi(children, engine_id=name), env=env)
            stack.callback(engines[name].close)
        for engine in engines.values():
            engine.wait_ready()
        made = Operated(engines, baseline, folder, store)
        stack.callback(made.close)
        eventually(lambda: set(engines) <= {engine.id for engine in made.kv.engines}, "the engines' desks")
        yield made


def new_example(folder: Path, name: str) -> dict[str, Any]:
    return example_child(folder, name=name, **LIMITS)
