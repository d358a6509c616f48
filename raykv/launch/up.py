"""`raykv up` and `raykv down`: have the Controller want a spec, and wait until it is so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raykv.actors import cluster, controller_handle, directory_handle, event_handle, ports, store_handle
from raykv.actors.controller_handle import ControllerHandle
from raykv.cluster_messages import ClusterStatus, EngineRow, EngineState, StoreRow
from raykv.config.cluster_spec import ClusterSpec, Listen
from raykv.errors import ClusterError, ConfigError, RayKVError
from raykv.launch.spec_file import router_options, spec_from

POLL_S = 0.3
PATIENCE_S = 120.0
"""Beyond what an engine's start may take: for its actor, its store and its place."""
DOWN_S = 180.0
FATAL_FAILURES = 1
"""An engine that fails once while it starts for the first time will fail again: its options are wrong."""


class LaunchError(RayKVError):
    """What was wanted could not be started."""


@dataclass(frozen=True)
class Progress:
    """A line for people: what, which one, and what became of it."""

    kind: str
    name: str
    state: str
    detail: str = ""


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Up:
    """What runs. `router`: its base address."""

    address: str
    status: ClusterStatus
    router: str | None


def up(spec: ClusterSpec, tell: Tell, *, address: str | None = None, namespace: str = "raykv") -> Up:
    """Start what the spec wants and wait until all engines are ready; what runs as it wants is not touched.

    Raises ConfigError before anything is started, LaunchError with the engine's last lines after it; then the
    spec before this one is wanted again, or, if there was none, all that was started is ended.
    """
    options = router_options(spec, namespace)
    if options is not None:
        _check_router_installed()
    info = cluster.connect(address, namespace=namespace)
    _check_addresses(spec)
    controller, fresh = controller_handle.start(namespace)
    tell(Progress("controller", "", "started" if fresh else "found"))
    before = controller.status().spec
    try:
        _check_router_port(spec, before)
        controller.apply(spec.raw)
    except BaseException:
        if fresh:
            controller.end(namespace)
            tell(Progress("controller", "", "ended"))
        raise
    with _undone_on_failure(controller, before, namespace, tell):
        if spec.events is not None:
            tell(Progress("events", "", "ready", event_handle.open_events(spec.events, namespace).address))
        elif event_handle.shutdown_events(namespace):
            tell(Progress("events", "", "ended"))
        status = _wait_ready(controller, spec, tell)
        router = None
        if options is not None:
            from raykv.router import app

            tell(Progress("router", "", "starting"))
            router = app.deploy(options)
            tell(Progress("router", "", "ready", router))
        elif before and spec_from(before).router is not None:
            _remove_router(tell)
    return Up(info.address, status, router)


def down(tell: Tell, *, address: str | None = None, namespace: str = "raykv", timeout: float = DOWN_S) -> bool:
    """End all that `up` started: router, engines, stores (their disk tiers stay), Controller. False: nothing was."""
    cluster.connect(address, namespace=namespace)
    controller = controller_handle.find(namespace)
    if controller is None:
        if not controller_handle.left_over(namespace):
            return False
        controller, _ = controller_handle.start(namespace)  # it was killed for good; what it cared for runs
    status = controller.status()
    if status.spec and spec_from(status.spec).router is not None:
        _remove_router(tell)
    _end(controller, namespace, tell, timeout)
    return True


def drain(node: str, tell: Tell, *, address: str | None = None, namespace: str = "raykv", timeout: float) -> str:
    """Empty a node and wait until it is; returns its id. Raises ClusterError if that takes longer than `timeout`."""
    cluster.connect(address, namespace=namespace)
    controller = _running(namespace)
    found = controller.drain(node)
    deadline = time.monotonic() + timeout
    reporter = _Reporter(tell)
    while True:
        status = controller.status()
        reporter.report(status)
        row = next((row for row in status.nodes if row.node == found), None)
        if row is None or row.state == "drained":
            return found
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Node {found[:8]} is not empty after {timeout:g} s; it goes on being drained. See `raykv status`."
            )
        time.sleep(POLL_S)


def undrain(node: str, *, address: str | None = None, namespace: str = "raykv") -> str:
    """Use a node again; returns its id."""
    cluster.connect(address, namespace=namespace)
    return _running(namespace).undrain(node)


def _running(namespace: str) -> ControllerHandle:
    controller = controller_handle.find(namespace)
    if controller is None:
        raise ClusterError("No Controller runs in this cluster. Start engines with `raykv up SPEC.yaml`.")
    return controller


def _check_addresses(spec: ClusterSpec) -> None:
    addresses = {node["ip"] for node in cluster.nodes() if node["alive"]}
    if len(addresses) > 1 and spec.listen is Listen.LOOPBACK:
        raise ConfigError(
            f"The cluster's nodes have {len(addresses)} addresses, but engines would listen on loopback, where the "
            "router and other engines can't reach them. Set `listen: node` in the spec (then everybody in that "
            "network can reach them, so see to it that it is yours)."
        )


def _check_router_installed() -> None:
    """Here as on the head's node: it would be found out when all engines are ready."""
    try:
        from raykv.router import app

        app.import_serve()
    except ImportError as error:
        raise ConfigError(
            f"The spec has a router, and what that needs is not installed ({error}). Install it on all nodes, pip "
            "install 'raykv[router]', or leave `router` out."
        ) from error


def _check_router_port(spec: ClusterSpec, before: str) -> None:
    """Only where nothing of ours can be what listens there."""
    if spec.router is None or (before and spec_from(before).router is not None):
        return
    from raykv.actors.local_cluster import LOOPBACK

    with contextlib.suppress(OSError):  # an address of another machine
        if spec.router.host == LOOPBACK and not ports.is_free(LOOPBACK, spec.router.port):
            raise ConfigError(
                f"router.port is {spec.router.port}, and something listens there already. Choose another port for "
                "the router, or end what listens there."
            )


@contextlib.contextmanager
def _undone_on_failure(controller: ControllerHandle, before: str, namespace: str, tell: Tell) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if before:
            tell(Progress("spec", "", "restored", "the one before is wanted again"))
            with contextlib.suppress(RayKVError):
                controller.apply(before)
        else:
            tell(Progress("spec", "", "undone", "what was started is ended"))
            with contextlib.suppress(RayKVError):
                _end(controller, namespace, tell, DOWN_S)
        raise


def _wait_ready(controller: ControllerHandle, spec: ClusterSpec, tell: Tell) -> ClusterStatus:
    limit = spec.startup_timeout_s + PATIENCE_S
    deadline, most = time.monotonic() + limit, 0
    reporter = _Reporter(tell)
    failures = {row.name: row.restarts for row in controller.status().engines}
    names = {engine.replica(index) for engine, index in spec.replicas}
    while True:
        status = controller.status()
        if status.spec == spec.raw:
            reporter.report(status)
            as_wanted = sum(row.state == EngineState.READY for row in status.engines)
            if as_wanted > most:  # engines are changed one after the other: each has its time
                deadline, most = time.monotonic() + limit, as_wanted
            if status.ready and {row.name for row in status.engines} >= names:
                return status
            for row in status.engines:
                if row.name in names and row.restarts - failures.get(row.name, 0) >= FATAL_FAILURES:
                    raise LaunchError(_why(row))
            for store in status.stores:
                if store.state == "failed":
                    raise LaunchError(f"Store {store.store} on node {store.node[:8]} could not start: {store.error}")
        if time.monotonic() > deadline:
            late = [f"{row.name} ({row.state})" for row in status.engines if row.state != EngineState.READY]
            raise LaunchError(f"Not ready in time: {', '.join(late) or status.problem or 'the stores'}.")
        time.sleep(POLL_S)


def _why(row: EngineRow) -> str:
    text = f"Engine {row.name} could not start. {row.error}"
    return text + (" Its last lines:\n" + "\n".join(f"  {line}" for line in row.log_tail) if row.log_tail else "")


def _end(controller: ControllerHandle, namespace: str, tell: Tell, timeout: float) -> None:
    controller.down()
    deadline = time.monotonic() + timeout
    reporter = _Reporter(tell)
    while True:
        status = controller.status()
        if not status.spec:
            reporter.report(status)
            if not status.engines and not status.stores:
                break
        if time.monotonic() > deadline:
            left = [row.name for row in status.engines] + [f"{row.store} on {row.node[:8]}" for row in status.stores]
            raise ClusterError(f"These did not end within {timeout:g} s: {', '.join(left)}.")
        time.sleep(POLL_S)
    controller.end(namespace)
    tell(Progress("controller", "", "ended"))
    if event_handle.shutdown_events(namespace):
        tell(Progress("events", "", "ended"))
    if not store_handle.stores(namespace) and directory_handle.shutdown_directory(namespace):
        tell(Progress("directory", "", "ended"))  # it knew what stores hold, and there is none


def _remove_router(tell: Tell) -> None:
    from raykv.router import app

    if app.remove():
        tell(Progress("router", "", "ended"))


class _Reporter:
    """Tells what has changed since it looked last."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._seen: dict[tuple[str, str, str], str] = {}

    def report(self, status: ClusterStatus) -> None:
        """One line for each row with another state."""
        rows: dict[tuple[str, str, str], EngineRow | StoreRow] = {}
        for engine in status.engines:
            rows["engine", engine.name, engine.node] = engine
        for store in status.stores:
            rows["store", store.store, store.node] = store
        for key, row in rows.items():
            if self._seen.get(key) != row.state:
                detail = row.url if isinstance(row, EngineRow) and row.state == EngineState.READY else row.error
                self._tell(Progress(key[0], key[1], row.state, f"node {key[2][:8]} {detail}".strip()))
        for key in self._seen.keys() - rows.keys():
            self._tell(Progress(key[0], key[1], "ended", f"node {key[2][:8]}"))
        self._seen = {key: row.state for key, row in rows.items()}
