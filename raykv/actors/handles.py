"""Launching actors and making sure that they are gone: `RemoteHost`, of an engine's hosts. Part of RayKV's edge to Ray.

Ray answers what Ray knows: calls and their results. Whether a process lives is asked of the kernel (a pidfd),
because Ray never notices a stopped process, `ray.kill` confirms nothing, and both need the head, which may be away.
"""

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors import cluster, ray_calls, settings
from raykv.actors.host_base import LAUNCH_VARIABLE, OWNER_VARIABLE, HostInfo, compare_versions
from raykv.actors.processes import Pidfd, find_by_environment, start_time
from raykv.errors import (
    HostStartError,
    HostUnkillable,
)

HEAD_POLL_S = 0.5


class RemoteHost:
    """One actor, from its launch to its confirmed death. Every method may be called from any thread.

    The actor ends with this process, and when the last reference to this object goes.
    """

    def __init__(self, label: str, pending: "concurrent.futures.Future[Any]", launch_id: str | None) -> None:
        self.label = label  # what it is called in messages
        self.info: HostInfo | None = None  # set by wait_ready
        self._pending = pending  # the actor handle, once Ray has taken the actor
        self._launch_id = launch_id  # None: launched by another process
        self._methods: dict[str, Any] = {}  # bound, with their concurrency group
        self._control: frozenset[str] = frozenset({"info"})
        self._cuda: str | None = None  # what CUDA_VISIBLE_DEVICES must be
        self._process: Pidfd | None = None
        self._never_started = False  # killed before it had a process
        self._given_up = threading.Event()  # killed: a launch that still waits for the head must not happen

    # ---- life

    @classmethod
    def launch(
        cls,
        actor_class: type,
        args: tuple,
        *,
        name: str,
        env: Mapping[str, str],
        cuda_uuid: str | None = None,
        namespace: str = "raykv",
    ) -> "RemoteHost":
        """Start `actor_class(*args)`, a subclass of HostBase, as an actor on this node. Returns at once.

        `name` must be free in `namespace`: put the incarnation into it. The actor asks for no resources, is never
        restarted by Ray, sees the GPU `cuda_uuid` or none, and has `env` in its environment. `CONTROL_METHODS` of
        the class run in a thread of their own; all others run in one other thread, in the order of submission.
        What goes wrong is raised by `wait_ready`.
        """
        if not ray.is_initialized():  # Ray would start a cluster by itself
            raise HostStartError(f"{name} can't be launched: this process is in no Ray cluster (cluster.connect).")
        pending: concurrent.futures.Future[Any] = concurrent.futures.Future()
        host = cls(name, pending, uuid.uuid4().hex)
        host._control |= frozenset(getattr(actor_class, "CONTROL_METHODS", ()))
        host._cuda = cuda_uuid or ""
        variables = {
            **env,
            "CUDA_VISIBLE_DEVICES": cuda_uuid or "",
            OWNER_VARIABLE: f"{os.getpid()}:{start_time(os.getpid())}",
            LAUNCH_VARIABLE: host._launch_id or "",
        }
        # Ray asks the head for the name and waits for the answer, so not in this thread.
        threading.Thread(
            target=_create,
            args=(pending, host._given_up, actor_class, args, name, namespace, variables),
            name=f"raykv-launch-{name}",
            daemon=True,
        ).start()
        return host

    def wait_ready(self, timeout: float) -> HostInfo:
        """Block until the constructor has returned; then check versions, place and GPU. May be called again.

        Raises HostStartError with the cause. The actor is not ended by that: `kill` it.
        """
        deadline = time.monotonic() + timeout
        try:
            self._pending.result(timeout)
            answer = ray.get(self._bound("info").remote(), timeout=max(0.0, deadline - time.monotonic()))
        except (TimeoutError, ray.exceptions.GetTimeoutError):
            raise HostStartError(
                f"The actor {self.label} was not ready within {timeout:.0f} s: {self._why_not_ready()}"
            ) from None
        except Exception as error:
            raise _start_error(self.label, error) from error
        self.info = self._checked(HostInfo.from_wire(answer))
        return self.info

    def alive(self) -> bool:
        """Whether its process lives, without a Ray call. True as long as nothing else is known for sure."""
        return not self._never_started and (self._process is None or self._process.alive())

    def wait_dead(self, timeout: float) -> bool:
        """Wait for the end of its process; True is the proof that it touches no memory any more."""
        if self._never_started:
            return True
        return self._find_process() and self._process is not None and self._process.wait(timeout)

    def kill(self, timeout: float = 10) -> None:
        """End its process by SIGKILL and return when it is gone; works without the head, and on a stopped one.

        Raises HostUnkillable if it is not seen to end in time. Before `wait_ready` the process may not exist yet:
        then Ray is told to start none, and its word is all there is.
        """
        deadline = time.monotonic() + timeout
        self._given_up.set()
        told = threading.Thread(target=self._ray_kill, name=f"raykv-kill-{self.label}", daemon=True)
        found = self._find_process()
        if found:
            self._signal_kill()
        told.start()  # Ray's own books, which need the head
        if not found:
            told.join(_left(deadline))
            if told.is_alive() or not self._ray_says_dead(_left(deadline)):
                raise HostUnkillable(
                    f"{self.label} never became ready, no process of it was found, and Ray did not confirm within "
                    f"{timeout:.0f} s that it will not start: the head may be away. It is ended once it appears."
                )
            self._never_started = not self._find_process()  # it may have come to life just before Ray heard
            if self._never_started:
                return
            self._signal_kill()
        if not self.wait_dead(_left(deadline)):
            raise HostUnkillable(
                f"The process of {self.label} did not end within {timeout:.0f} s of SIGKILL: it is stuck in the "
                "kernel, most often in a device driver or a network file system. Its blocks stay pinned. Only a "
                "restart of the machine frees them for sure."
            )

    def retire(self, timeout: float = 5) -> None:
        """End it after the calls that were submitted so far; kill it if that takes longer than `timeout`."""
        with contextlib.suppress(Exception):
            if self.info is not None:
                self._pending.result(0).__ray_terminate__.remote()
                if self.wait_dead(timeout):
                    return
        self.kill()

    # ---- calls

    def call(self, method: str, *args: Any, timeout: float) -> Any:
        """`wait(submit(method, *args), timeout)`."""
        return self.wait(self.submit(method, *args), timeout)

    def submit(self, method: str, *args: Any) -> Any:
        """Send a call and return the reference to its result; no wait, about 0.1 to 0.4 ms. After `wait_ready`."""
        if not self._pending.done():
            raise HostStartError(f"{self.label} was called before it was ready: call wait_ready first")
        return self._bound(method).remote(*args)

    def wait(self, ref: Any, timeout: float) -> Any:
        """The result of a call. Raises HostTimeout, HostDied or HostRaised. Releases the GIL while it waits."""
        return ray_calls.result_of(self.label, ref, timeout)

    # ---- parts

    def _bound(self, method: str) -> Any:
        """The actor's method, in the group where it belongs. Kept, since Ray makes a new object each time."""
        bound = self._methods.get(method)
        if bound is None:
            bound = getattr(self._pending.result(0), method)
            if method in self._control or self._launch_id is None:  # an observer must not wait for work
                bound = bound.options(concurrency_group=ray_calls.CONTROL_GROUP)
            self._methods[method] = bound
        return bound

    def _checked(self, info: HostInfo) -> HostInfo:
        """`info`, if the process is one that we can work with; opens the pidfd."""
        if self._launch_id is None and info.node_id != ray_calls.runtime_ids()[0]:
            return info  # somebody else's actor on another node: only to look at
        compare_versions(self.label, info)
        self._process = self._process or Pidfd.open(info.pid, info.started)
        if self._process is None and start_time(info.pid) != info.started:
            raise HostStartError(
                f"{self.label} answered as process {info.pid}, which this process can't see: it has died, or the "
                "engine and its Ray node are in different PID namespaces. Run both in one container (or with a "
                "shared PID and IPC namespace): they share memory."
            )
        if self._launch_id is not None and (info.cuda_visible_devices or "") != self._cuda:
            hide = settings.HIDE_GPUS
            raise HostStartError(
                f"{self.label} was to have CUDA_VISIBLE_DEVICES={self._cuda!r} but has "
                f"{info.cuda_visible_devices!r}: Ray replaced it. Restart this Ray node without {hide.name}=1."
            )
        return info

    def _find_process(self) -> bool:
        """Look for a process that could not answer yet; True if there is one."""
        if self._launch_id is not None and self._process is None:
            pid = find_by_environment(LAUNCH_VARIABLE, self._launch_id)
            self._process = Pidfd.open(pid) if pid is not None else None
        return self._process is not None

    def _why_not_ready(self) -> str:
        if not cluster.head_reachable():
            return "Ray's head can't be reached; it is launched when the head is back."
        if not self._pending.done():
            return "Ray's head has not taken it yet."
        if self._find_process() and self._process is not None:
            return f"its process {self._process.pid} runs, so its constructor takes longer, or hangs."
        return "Ray has started no process for it on this node; `raykv status` and Ray's raylet.out say more."

    def _signal_kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def _ray_kill(self) -> None:
        with contextlib.suppress(Exception):  # a launch that failed has nothing to kill
            ray.kill(self._pending.result())

    def _ray_says_dead(self, timeout: float) -> bool:
        try:
            ray.get(self._bound("info").remote(), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            return False
        except Exception:  # the launch failed, or it is dead
            return True
        return False


def find(name: str, namespace: str = "raykv") -> RemoteHost | None:
    """A running actor that another process launched, to look at: call `wait_ready`, then its methods."""
    pending: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        pending.set_result(ray.get_actor(name, namespace))
    except ValueError:
        return None
    return RemoteHost(name, pending, None)


def _create(
    pending: "concurrent.futures.Future[Any]",
    given_up: threading.Event,
    actor_class: type,
    args: tuple,
    name: str,
    namespace: str,
    variables: Mapping[str, str],
) -> None:
    try:
        # Ray forgets a launch that the head did not take within 60 s, and says so to nobody.
        while not cluster.head_reachable():
            if given_up.wait(HEAD_POLL_S):
                raise HostStartError(f"{name} was given up before the head came back")
        remote_class = ray.remote(
            num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={ray_calls.CONTROL_GROUP: 1}
        )(actor_class)
        node_id = ray.get_runtime_context().get_node_id()
        handle = remote_class.options(
            name=name,
            namespace=namespace,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": dict(variables)},
        ).remote(*args)
        pending.set_result(handle)
    except BaseException as error:
        pending.set_exception(error)


def _start_error(label: str, error: Exception) -> HostStartError:
    """In one paragraph, with the cause that Ray buries in a traceback."""
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return HostStartError(f"Ray could not prepare the environment of {label}: {ray_calls.last_line(error)}")
    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return HostStartError(f"Ray can't place {label} on this node any more: {ray_calls.last_line(error)}")
    if isinstance(error, ray_calls.GONE):
        return HostStartError(f"The actor {label} died while it started: {ray_calls.last_line(error)}")
    return HostStartError(f"The actor {label} could not be launched: {type(error).__name__}: {error}")


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
