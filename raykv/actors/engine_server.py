"""An engine as an actor: a plain class that owns one real `vllm serve` process. `nodes` makes it a Ray actor.

Its GPUs are the actor's (Ray sets CUDA_VISIBLE_DEVICES, which is passed on), its lines are the actor's output, so that
Ray's dashboard shows them, and it ends with the actor, whatever ends that. The process is never started again here:
an engine that has failed stays so, with the reason and its last lines, until the Controller has read that.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from raykv.actors.engine_process import EngineProcess, engine_environment
from raykv.actors.host_base import be_as_nice_as_others, own_info
from raykv.actors.own_node import NAME_VARIABLE
from raykv.actors.ports import free_port, free_ports_in_a_row, is_free
from raykv.cluster_messages import EngineOrder, EngineReport, EngineState

POLL_S = 0.5
"""Between two looks at /health while the engine starts; ten times that when it is ready."""
HEALTH_TIMEOUT_S = 10.0
EMPTY_POLL_S = 0.2
OVER = (EngineState.FAILED, EngineState.STOPPED)
REQUESTS = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([0-9.e+]+)", re.MULTILINE)


class EngineServer:
    """One engine. Every method may be called from any thread; `stop` and `empty` block."""

    def __init__(
        self,
        order: EngineOrder,
        environment: Mapping[str, str],
        address: str,
        *,
        own_process: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`environment` is added to this process's own; `address` is the node's. `on_change` is told of a new state,
        in a thread of this object's. Returns once the process is started; what goes wrong is in `report`."""
        if own_process:
            be_as_nice_as_others()
        self.order = order
        self._on_change = on_change
        self._lock = threading.Lock()
        self._host = order.host or address
        self._process: EngineProcess | None = None
        self._ending = ""
        try:
            port = self._choose_port(order)
            command, variables = self._command(order, port)
        except OSError as error:
            self._report = self._first_report("", EngineState.FAILED, str(error))
            return
        self._port = port
        self._report = self._first_report(f"http://{_bracketed(self._host)}:{port}", EngineState.STARTING)
        variables |= {**environment, **dict(order.environment), NAME_VARIABLE: order.name}
        self._process = EngineProcess(
            command, engine_environment(os.environ, variables), on_line=self._print, on_end=self._ended
        )
        self._process.wait_started(10.0)
        self._update(EngineState.STARTING)
        threading.Thread(target=self._watch, name="raykv-engine-health", daemon=True).start()

    def __repr__(self) -> str:
        return f"Engine({self.order.name})"

    def info(self) -> dict[str, object]:
        """HostInfo, as every actor of RayKV's."""
        return {**own_info(), "digest": self.order.digest}

    def report(self) -> EngineReport:
        """How it is. Microseconds."""
        with self._lock:
            return self._report

    def status(self) -> EngineReport:
        """The same, under the name that every actor of RayKV's has."""
        return self.report()

    def empty(self, timeout: float) -> bool:
        """Wait until it runs and queues no request, twice in a row; False if it has not come to that in time."""
        deadline, quiet = time.monotonic() + timeout, 0
        while self._process is not None and self._process.alive():
            busy = self.requests()
            quiet = quiet + 1 if busy == 0 else 0
            if quiet == 2:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(EMPTY_POLL_S)
        return True

    def requests(self) -> int | None:
        """How many requests it runs or queues, by its own metrics; None if it does not say."""
        status, body = self._get("/metrics")
        counts = REQUESTS.findall(body) if status == 200 else []
        return int(sum(float(one) for one in counts)) if counts else None

    def stop(self, grace: float) -> None:
        """End the process; after `grace` seconds by SIGKILL. When this returns nothing of it is left."""
        self._end("it was told to end", EngineState.STOPPING)
        if self._process is not None:
            self._process.stop(grace)

    # -- parts ----------------------------------------------------------------------------------------------

    def _first_report(self, url: str, state: EngineState, error: str = "") -> EngineReport:
        info = own_info()
        order = self.order
        return EngineReport(
            order.name, order.role, state, url, str(info["node_id"]), 0, os.getpid(), order.digest, error
        )

    def _choose_port(self, order: EngineOrder) -> int:
        if order.port is None:
            return free_port(self._host)
        if not is_free(self._host, order.port):
            raise OSError(
                f"Port {order.port} on {self._host} is in use. Give engine {order.name} another `port`, or none."
            )
        return order.port

    def _command(self, order: EngineOrder, port: int) -> tuple[list[str], dict[str, str]]:
        command = [*order.command, "--host", self._host, "--port", str(port)]
        variables = {}
        if order.side_ports:
            variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self._host
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports_in_a_row(self._host, order.side_ports))
        return command, variables

    def _print(self, line: str) -> None:
        print(line, file=sys.stdout, flush=True)

    def _update(self, state: EngineState, error: str = "") -> None:
        """A new state, unless it is over with it. What fails when it was told to end has stopped."""
        with self._lock:
            old = self._report
            if old.state in OVER:
                return
            if old.state is EngineState.STOPPING:
                if state is not EngineState.FAILED:
                    return
                state = EngineState.STOPPED
            process = self._process
            failed = state in OVER
            self._report = replace(
                old,
                state=state,
                pid=process.pid if process is not None and not failed else 0,
                error=error,
                log_tail=tuple(process.tail) if process is not None and failed else (),
            )
        if old.state is not state:
            self._on_change()

    def _end(self, why: str, state: EngineState) -> None:
        with self._lock:
            self._ending = self._ending or why
        self._update(state)

    def _ended(self, code: int) -> None:
        how = f"by signal {signal.Signals(code - 128).name}" if 128 < code < 193 else f"with status {code}"
        with self._lock:
            ending = self._ending
        self._update(EngineState.FAILED, ending or f"Its process ended {how}.")

    def _watch(self) -> None:
        """Look at /health until the end."""
        process = self._process
        assert process is not None
        order, began = self.order, time.monotonic()
        last_well, ready = began, False
        while not process.wait(POLL_S * (10 if ready else 1)):
            well = self._get("/health")[0] == 200
            now = time.monotonic()
            if well:
                last_well, ready = now, True
                self._update(EngineState.READY)
            elif ready:
                self._update(EngineState.UNHEALTHY, "It does not answer /health.")
                if now - last_well > order.unhealthy_timeout_s:
                    self._end(f"It did not answer /health for {now - last_well:.0f} s.", EngineState.UNHEALTHY)
                    process.kill()
            elif now - began > order.startup_timeout_s:
                self._end(f"It was not ready within {order.startup_timeout_s:g} s.", EngineState.STARTING)
                process.kill()

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body; (0, b"") if it does not answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
