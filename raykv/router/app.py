"""The router on Ray Serve: started by `deploy`, ended by `remove`. A part of RayKV's edge to Ray.

Serve's proxy listens, on the head's node only, and gives requests to the replicas of the router; Serve starts a replica
again that dies, and `front`, in the proxy, sees to that replica's requests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import logging
import time
from types import ModuleType
from typing import Any

import ray

import raykv
from raykv.actors import cluster
from raykv.actors.named_actor import HEAD
from raykv.config.router import RouterOptions
from raykv.errors import ClusterError
from raykv.router import front
from raykv.router.asgi import RouterApp
from raykv.router.controller_list import ControllerEngines
from raykv.router.engine_list import StaticEngines
from raykv.router.ray_residency import RayResidency

logger = logging.getLogger("raykv")

APPLICATION = "raykv-router"
DEPLOY_S = 120.0
POLL_S = 0.2
LAYERS = "raykv.router.front.layers"
FAILED = "DEPLOY_FAILED"
"""Serve gives up. What is "UNHEALTHY" has just lost a replica, and gets another one."""


def build(options: RouterOptions) -> RouterApp:
    """The application of one replica."""
    source = StaticEngines(options.engines) if options.engines else ControllerEngines(options.namespace)
    cluster = RayResidency(options.namespace) if options.residency else None
    return RouterApp(options, source, names_requests=False, cluster=cluster)  # Serve's proxy names requests


def deploy(options: RouterOptions, timeout_s: float = DEPLOY_S) -> str:
    """Start the router in this process's Ray cluster, or change one that runs to these options, if they are others.

    Returns its base address once it takes requests. Blocks for about 10 s. Raises ClusterError; what was started is
    ended then.
    """
    serve = _serve()
    before = _applications(serve)
    _start(serve, options)
    try:
        serve.run_many(
            [serve.RunTarget(deployment(serve, options).bind(), name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_running(serve, timeout_s)
    except BaseException as error:
        if APPLICATION not in before:
            remove()
        if isinstance(error, ClusterError) or not isinstance(error, Exception):
            raise
        raise ClusterError(f"The router could not be started: {type(error).__name__}: {error}") from error
    return f"http://{_display(options.host)}:{options.port}"


def remove() -> bool:
    """End the router, and Serve if nothing else runs on it; whether it ran. Requests in hand get 10 s to end."""
    serve = _serve()
    running = _applications(serve)
    if APPLICATION in running:
        serve.delete(APPLICATION)
    if not running - {APPLICATION}:
        serve.shutdown()
    return APPLICATION in running


def deployment(serve: ModuleType, options: RouterOptions) -> Any:
    """Serve's deployment of it, not yet run."""

    def make() -> RouterApp:
        return build(options)

    made = serve.deployment(
        serve.ingress(make)(),
        name="Router",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_requests,
        # It works for the engines and must find a place in a full cluster; it takes a core only under load. Beside
        # Serve's proxy, on the head's node: a replica elsewhere would lose its requests with a node of the engines.
        ray_actor_options={"num_cpus": 0, "resources": _beside_proxy()},
        # A dead replica is seen, and started again, at the next check.
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
    )
    # Serve takes what has no version for something new each time, and starts all replicas anew (Ray 2.60).
    made._version = _version(options)
    return made


def _version(options: RouterOptions) -> str:
    """Another one for whatever a replica has to be started anew for; their number is none of it."""
    wanted = dataclasses.replace(options, replicas=1)
    return hashlib.sha256(f"{raykv.__version__} {wanted!r}".encode()).hexdigest()[:16]


def _beside_proxy() -> dict[str, float]:
    """The head's node, or any where no node says that it is the head's."""
    known = any(node["alive"] and HEAD in node["resources"] for node in cluster.nodes())
    return {HEAD: 0.0001} if known else {}


def import_serve() -> ModuleType:
    """Raises ImportError where it is not installed. About 1 s, the first time."""
    return importlib.import_module("ray.serve")


def _serve() -> ModuleType:
    if not ray.is_initialized():  # Serve would start a cluster by itself
        raise ClusterError("The router needs a Ray cluster: this process is in none (cluster.connect).")
    try:
        return import_serve()
    except ImportError as error:
        raise ClusterError(f"Ray Serve is not installed ({error}). Install it: pip install 'raykv[router]'.") from error


def _applications(serve: ModuleType) -> set[str]:
    """What runs on Serve; empty if Serve does not run."""
    try:
        return set(serve.status().applications)
    except Exception:  # each Ray has its own error for it
        return set()


def _start(serve: ModuleType, options: RouterOptions) -> None:
    """Start Serve with the wanted address. Raises ClusterError if it runs with another one: it can't be changed."""
    fresh = not _running()
    more: dict[str, Any] = {}
    if "controller_options" in inspect.signature(serve.start).parameters:  # an experiment of Ray's, as of 2.60
        more["controller_options"] = {"runtime_env": {"env_vars": {front.VARIABLE: LAYERS}}}  # its proxies inherit it
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port}, **more)
    except Exception as error:
        if fresh:
            serve.shutdown()
        raise ClusterError(
            f"Ray Serve can't listen at {options.host}:{options.port} ({type(error).__name__}: {error}). Choose "
            "another port for the router, or end what listens there."
        ) from error
    from ray.serve.context import _get_global_client

    actual = _get_global_client().http_config
    if (actual.host, actual.port) != (options.host, options.port):
        raise ClusterError(
            f"Ray Serve runs already and listens at {actual.host}:{actual.port}, but the router is to listen at "
            f"{options.host}:{options.port}. Give the router that address, or end Serve first (`serve shutdown`)."
        )


def _running() -> bool:
    from ray.serve.context import _get_global_client

    try:
        return _get_global_client() is not None
    except Exception:  # it says so by an error, another one in each Ray
        return False


def _wait_running(serve: ModuleType, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        found = serve.status().applications.get(APPLICATION)
        state, why = (str(found.status.value), found.message) if found is not None else ("NOT_STARTED", "")
        if state == "RUNNING":
            return
        if state == FAILED:
            raise ClusterError(f"The router could not be started: {why}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The router did not start within {timeout_s:g} s; it is {state}. {why} (`serve status`)"
            )
        time.sleep(POLL_S)


def _display(host: str) -> str:
    """As a part of an URL that clients can use."""
    if host in ("0.0.0.0", "::"):
        heads = (node["ip"] for node in cluster.nodes() if node["alive"] and HEAD in node["resources"])
        host = next(heads, "127.0.0.1")
    return f"[{host}]" if ":" in host else host
