"""Finding and joining the Ray cluster. One half of RayKV's edge to Ray; the other is `handles`.

Ray by itself waits 20 to 60 s before it says that a cluster is not there or refuses the token. So the address is
tried first with one bounded request, and Ray connects only to what has answered.
"""

import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import gcs_utils, ray_constants, services
from ray._private.authentication import authentication_token_setup
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from raykv.actors import error_listener, local_cluster, own_node, settings
from raykv.actors.addresses import parse, why_unreachable
from raykv.actors.processes import ray_processes
from raykv.errors import ClusterError

logger = logging.getLogger(__name__)

START_COMMAND = "raykv start"
PROBE_TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_lock = threading.Lock()
_owned = False  # this module called ray.init


@dataclass(frozen=True)
class ClusterInfo:
    """The cluster that this process is connected to."""

    address: str
    node_id: str
    node_ip: str
    namespace: str
    owns_connection: bool  # False: the process was in the cluster before RayKV asked


def connect(address: str | None = None, *, namespace: str = "raykv") -> ClusterInfo:
    """Join the cluster at `address`, else at RAY_ADDRESS, else the one that runs on this machine.

    Call it in every vLLM process that uses actors, as often as you like: only the first call connects. A process
    that is in a cluster already (an actor of vLLM's ray executor) stays in it. No cluster is ever started. Blocks
    for about a second, at most about 20; raises ClusterError if there is nothing to join.
    """
    global _owned
    with _lock:
        if not ray.is_initialized():
            host, port = parse(_named(address) or _named(os.environ.get("RAY_ADDRESS")) or _running_here())
            target = _reachable(host, port)
            _use_token_file(target)
            _check_alive(target)
            _init(target, namespace)
            _owned = True
        info = _current(namespace)
        if _named(address) and not _same(_named(address), info.address):
            raise ClusterError(
                f"This process is connected to the Ray cluster at {info.address} already, but the config asks for "
                f"{address}. A process can be in one cluster only: remove the address from the config, or start "
                f"the engine with RAY_ADDRESS={address}."
            )
        return info


def disconnect() -> None:
    """Leave the cluster if `connect` joined it; the non-detached actors of this process end with that."""
    global _owned
    with _lock:
        if _owned:
            ray.shutdown()
        _owned = False


def check_head_loss_settings() -> list[str]:
    """What is missing for this engine to survive a loss of the head, each as 'VARIABLE=value (where)'.

    Call it after `connect`. Empty when all is well, and for what can't be seen from here: the head of another
    machine or processes of another user.
    """
    missing = []
    wait = settings.GCS_RECONNECT
    if not settings.is_set(wait, os.environ, {}):
        missing.append(f"{wait.name}={wait.value} (this process: set it before the engine starts)")
    node_id = ray.get_runtime_context().get_node_id()
    address = ray.get_runtime_context().gcs_address
    for process in ray_processes():
        environ = process.environment()
        if environ is None:
            continue
        if process.kind == "raylet" and process.args.get("node_id") == node_id:
            if not settings.is_set(wait, environ, process.args):
                missing.append(f"{wait.name}={wait.value} (this node's `ray start`)")
        elif process.kind == "gcs_server" and _same(process.gcs_address, address):
            lacking = settings.missing_on_head(environ, process.args)
            missing += [f"{setting.name}={setting.value} (the head's `ray start`)" for setting in lacking]
    return missing


def head_reachable(timeout: float = 1) -> bool:
    """Whether something listens where this process's head is or was. No Ray call, so it never hangs."""
    host, port = parse(ray.get_runtime_context().gcs_address)
    return why_unreachable(host, port, timeout) is None


def nodes() -> list[dict[str, Any]]:
    """The cluster's nodes, dead ones too: node_id, host, ip, alive, resources. Needs the head."""
    return [
        {
            "node_id": node["NodeID"],
            "host": node["NodeManagerHostname"],
            "ip": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "resources": node.get("Resources", {}),
        }
        for node in ray.nodes()
    ]


def _named(address: str | None) -> str:
    """`address`, or "" where it names none."""
    return "" if address in (None, "auto") else str(address).strip()


def _running_here() -> str:
    """The address of a cluster that has a raylet on this machine; RayKV's own is preferred, then the latest."""
    running = {process.gcs_address for process in ray_processes() if process.kind == "raylet"} - {""}
    if not running:
        raise ClusterError(
            "No Ray cluster was found: the config names none, RAY_ADDRESS is not set and no Ray node runs on this "
            f"machine. Start one here with `{START_COMMAND}`, or set RAY_ADDRESS=host:port to join another."
        )
    own = local_cluster.read_record()
    for preferred in (own.address if own else None, _bootstrap_address()):
        if preferred in running:
            return str(preferred)
    if len(running) > 1:
        raise ClusterError(
            f"Nodes of {len(running)} Ray clusters run on this machine ({', '.join(sorted(running))}). Say which one "
            "to use: set RAY_ADDRESS to its address."
        )
    return running.pop()


def _bootstrap_address() -> str | None:
    """What the last `ray start` of this machine wrote down."""
    try:
        return (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return None


def _reachable(host: str, port: int) -> str:
    """host:port as Ray will really use it, or ClusterError if nothing listens there.

    Ray replaces a loopback address by the machine's own one. A head that listens on loopback only, as
    `raykv start` makes it, can then not be reached, unless Ray is told that it works on one machine only.
    """
    if host not in _LOOPBACK:
        reason = why_unreachable(host, port, PROBE_TIMEOUT_S)
    else:
        seen = services.get_node_ip_address()
        reason = why_unreachable(seen, port, PROBE_TIMEOUT_S)
        if reason is None:
            host = seen
        elif why_unreachable("127.0.0.1", port, PROBE_TIMEOUT_S) is None:
            host, reason = "127.0.0.1", None
            os.environ[settings.ONE_MACHINE.name] = settings.ONE_MACHINE.value
            ray_constants.ENABLE_RAY_CLUSTER = False  # read from the variable at import, which may be over
    if reason is None:
        return f"{host}:{port}"
    own = local_cluster.read_record()
    if own is not None and own.address == f"{host}:{port}" and local_cluster.members(own):
        fix = "RayKV started it, and its node still runs: bring the head back with `raykv restart-head`."
    else:
        fix = (
            f"Check the address (config key `ray`, or RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}) and that the "
            f"head runs, or start a cluster on this machine with `{START_COMMAND}`."
        )
    raise ClusterError(f"The Ray cluster at {host}:{port} can't be reached: {reason}. {fix}")


def _use_token_file(target: str) -> None:
    """Use ~/.ray/auth_token, if there is one and RAY_AUTH_MODE does not say otherwise, as `ray start` does.

    Never for a head on another machine, which could be anybody's: Ray keeps that rule too.
    """
    if _same(target, f"127.0.0.1:{parse(target)[1]}"):
        logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _check_alive(target: str) -> None:
    """Ask the GCS whether it lives, accepts our token, runs our Ray and has this machine among its nodes."""
    channel = gcs_utils.create_gcs_channel(target)
    try:
        nodes = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        alive = nodes.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=PROBE_TIMEOUT_S)
        table = nodes.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=PROBE_TIMEOUT_S)
    except (grpc.RpcError, ray.exceptions.AuthenticationError) as error:
        raise _refused(target, error) from error
    finally:
        channel.close()
    if alive.ray_version != ray.__version__:
        raise ClusterError(
            f"The Ray cluster at {target} runs Ray {alive.ray_version}, this process Ray {ray.__version__}. Both "
            f"must be the same: install ray=={alive.ray_version} here, or restart the cluster from this environment."
        )
    here = {socket.gethostname(), services.get_node_ip_address(), *_LOOPBACK}
    hosts = {(n.node_manager_hostname, n.node_manager_address) for n in table.node_info_list if n.state == 0}
    if hosts and not any(here & set(host) for host in hosts):
        raise ClusterError(
            f"This machine ({socket.gethostname()}) is not a node of the Ray cluster at {target}; its nodes are "
            f"{', '.join(sorted(f'{name} ({ip})' for name, ip in hosts))}. Make it one with "
            f"`ray start --address={target}`, then start the engine again."
        )


def _refused(target: str, error: Exception) -> ClusterError:
    code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNAUTHENTICATED
    if code == grpc.StatusCode.UNAUTHENTICATED:
        mode, path = os.environ.get("RAY_AUTH_MODE", "not set"), os.environ.get("RAY_AUTH_TOKEN_PATH", "not set")
        token = "set" if os.environ.get("RAY_AUTH_TOKEN") else "not set"
        return ClusterError(
            f"The Ray cluster at {target} wants a token, and this process has none or the wrong one (RAY_AUTH_MODE "
            f"is {mode}, RAY_AUTH_TOKEN {token}, RAY_AUTH_TOKEN_PATH {path}). Set RAY_AUTH_MODE=token and give the "
            "cluster's token in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token."
        )
    return ClusterError(
        f"Something listens at {target} but does not answer as a Ray head within {PROBE_TIMEOUT_S:.0f} s "
        f"({code.name}). Check that the address is that of Ray's GCS (6379 by default, not the dashboard's 8265), or "
        f"start a cluster on this machine with `{START_COMMAND}`."
    )


def _init(target: str, namespace: str) -> None:
    # Without it Ray ends this process, an engine, 60 s after the head was lost.
    os.environ.setdefault(settings.GCS_RECONNECT.name, settings.GCS_RECONNECT.value)
    # Ray replaces the SIGTERM handler, and vLLM has its own.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        with own_node.joined(services):
            ray.init(
                address=target,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        error_listener.silence(ray._private.worker.global_worker)
    except Exception as error:
        ray.shutdown()
        text = " ".join(str(error).split())
        if "Version mismatch" in text or "version mismatch" in text:
            raise ClusterError(
                f"The Ray cluster at {target} and this process do not run the same Python and Ray: {text} Start both "
                "from the same environment."
            ) from error
        raise ClusterError(
            f"Ray could not join the cluster at {target}: {type(error).__name__}: {text} Check its nodes with "
            "`raykv status`."
        ) from error
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _current(namespace: str) -> ClusterInfo:
    context = ray.get_runtime_context()
    return ClusterInfo(
        address=context.gcs_address,
        node_id=context.get_node_id(),
        node_ip=services.get_node_ip_address(),
        namespace=namespace,
        owns_connection=_owned,
    )


def _same(one: str, other: str) -> bool:
    """The same GCS, also when one names it by a loopback address."""
    (host1, port1), (host2, port2) = parse(one), parse(other)
    here = {*_LOOPBACK, services.get_node_ip_address(), socket.gethostname()}
    return port1 == port2 and (host1 == host2 or {host1, host2} <= here)


__all__ = ["ClusterInfo", "check_head_loss_settings", "connect", "disconnect", "head_reachable", "nodes"]
