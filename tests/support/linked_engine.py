"""A process with the real link to a desk, and all but nothing behind it: requests come and end as a test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace, TracebackType
from typing import Any, Self

PATIENCE_S = 90.0


class LinkedEngine:
    """Joins the Ray cluster that RAY_ADDRESS names. Use it as a context manager."""

    def __init__(self, engine: str, **environ: str) -> None:
        from tests.support.process import REPOSITORY

        self.engine = engine
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.linked_engine", engine],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        assert self._read() == "started"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def request(self, name: str) -> None:
        """A request of 20 tokens has come and gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def desk(self) -> Any:
        """Its desk, once there is one."""
        from raykv.actors import desk_handle
        from raykv.errors import RayKVError
        from raykv.types import EngineId

        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return desk_handle.find_desk(desk_handle.desk_name(EngineId(self.engine)))
            except RayKVError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def told(self) -> tuple[str, ...]:
        """The requests that its desk, of whatever life, has heard of."""
        from raykv.errors import RayKVError

        try:
            return tuple(self.desk().call("requests", timeout=PATIENCE_S))
        except RayKVError:
            return ()

    def end(self) -> dict[str, Any]:
        """It closes its link and ends; what it says then."""
        self.request("")
        said = json.loads(self._read())
        assert self._process.wait(PATIENCE_S) == 0
        return dict(said)


def main() -> None:
    from raykv.connector import desk_setup
    from raykv.connector.desk_link import DeskLink
    from raykv.connector.engine_view import EngineSight, NoChain, TierFacts
    from raykv.core.load_cost import LoadCost
    from raykv.core.stories import Stories
    from raykv.engine_messages import Hashed
    from raykv.types import EngineId, RequestId

    engine, made = EngineId(sys.argv[1]), SimpleNamespace
    config = made(
        kv_transfer_config=made(engine_id=engine, kv_role="kv_both"),
        model_config=made(model="tiny", served_model_name="small", max_model_len=100),
        cache_config=made(block_size=16),
        parallel_config=made(world_size=1),
    )
    stories = Stories(engine, 16, 10)
    sight = EngineSight(config, 1, "", lambda: [], TierFacts, stories, LoadCost(), dict, 1.0)
    link = DeskLink(
        lambda: desk_setup._open(None, "raykv", engine, 10),
        sight,
        NoChain(),
        lambda order: Hashed(order.number, b"x" * 32),
    )
    link.start()
    print("started", flush=True)
    for line in sys.stdin:
        name = RequestId(line.strip())
        if not name:
            break
        stories.arrived(name, made(num_computed_tokens=0, num_output_tokens=1, block_hashes=[]), 20)
        stories.ended(name)
    link.close(timeout=PATIENCE_S)
    print(json.dumps({"alive": link._thread.is_alive()}), flush=True)


if __name__ == "__main__":
    main()
