"""Order another process's reads behind the engine's forward pass.

On a GPU the forward is still running when the worker's hook returns, and a copy in another process has its
own streams. A fence carries the order across: the worker records it behind the forward, the other process
makes its stream wait. On a CPU the forward is done when its call returns, so the same calls do nothing.

The way back needs no fence: whoever writes into the KV cache synchronises its stream before it reports
completion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from raykv.errors import KVCacheOpenError
from raykv.kvcache.cuda_ipc import device_uuid, local_device_index


@dataclass(frozen=True)
class FenceHandle:
    """A fence for another process. `event` is empty for the CPU's."""

    device_uuid: str
    event: bytes


class ForwardFence(ABC):
    """The engine's end. One per worker; it must outlive every `MappedFence` opened on it.

    `record` belongs to the thread that launched the forward; it neither blocks nor waits. Whoever tells the
    other process about the step does so after `record` returned.
    """

    @property
    @abstractmethod
    def handle(self) -> FenceHandle:
        """What the other process opens; constant, may be sent before the first `record`."""

    @abstractmethod
    def record(self) -> None:
        """Move the fence behind all work that is on the current stream by now."""


class MappedFence(ABC):
    """The other process's end; any thread.

    Both calls cover the last `record` that returned before they were made. A later one may be covered too,
    so waiting is never too short, at most too long.
    """

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream's future work wait. Does not block the caller."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the caller until the fence is passed."""


class CpuFence(ForwardFence, MappedFence):
    """Both ends on a CPU: nothing to do, the forward has ended when its call returned."""

    @property
    def handle(self) -> FenceHandle:
        """An empty handle."""
        return FenceHandle(device_uuid="", event=b"")

    def record(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""


class CudaFence(ForwardFence):
    """An interprocess CUDA event, recorded again every step."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=False, interprocess=True)
        with torch.cuda.device(device):
            self._event.record()  # creates the event, on this device
            self._handle = FenceHandle(device_uuid(device), self._event.ipc_handle())
        self._device = device

    @property
    def handle(self) -> FenceHandle:
        """The event's IPC handle and its GPU."""
        return self._handle

    def record(self) -> None:
        """Record on the current stream of the fence's device."""
        self._event.record(torch.cuda.current_stream(self._device))


class MappedCudaFence(MappedFence):
    """The same event in another process."""

    def __init__(self, handle: FenceHandle) -> None:
        self._device = torch.device("cuda", local_device_index(handle.device_uuid))
        try:
            self._event = torch.cuda.Event.from_ipc_handle(self._device, handle.event)
        except RuntimeError as error:
            raise KVCacheOpenError(
                f"Can't open the engine's CUDA event ({str(error).partition(chr(10))[0]}). It must be "
                "another process than the engine's, in the same IPC namespace (docker --ipc=host), and the "
                "engine must be alive."
            ) from error

    def wait(self) -> None:
        """Order the current stream of the fence's device."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Block until the event is reached."""
        self._event.synchronize()


def new_fence(device: torch.device) -> ForwardFence:
    """The engine's end for memory on `device`."""
    return CudaFence(device) if device.type == "cuda" else CpuFence()


def open_fence(handle: FenceHandle) -> MappedFence:
    """The other process's end. Raises `KVCacheOpenError`."""
    return MappedCudaFence(handle) if handle.event else CpuFence()
