"""CPU memory: move a storage into anonymous shared memory, in place, and open it from another process.

The memory is a memfd: it has no name, so nothing is ever left in /dev/shm, and the kernel frees it when the
last process that maps it is gone, killed or not. A memfd is also not bound by the size of the /dev/shm
mount (64 MiB in a container by default), which torch's own ways of sharing are. Another process reaches it
as /proc/<pid>/fd/<fd>, which the kernel allows to the same user only (a ptrace read check), in the same PID
namespace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

import torch

from raykv.errors import KVCacheExportError, KVCacheOpenError
from raykv.kvcache.handles import Origin, ShmStorageHandle

_NAME = "raykv-kvcache"  # shown in /proc/<pid>/maps, nowhere else
_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; os has no name for it in Python 3.11
_MADV_POPULATE_WRITE = 23  # mmap has no name for it in Python 3.11
_F_ADD_SEALS = 1033  # fcntl has these names only where it was built against new enough headers
_SEALS = 0x0001 | 0x0002 | 0x0004  # seal, shrink, grow: a mapping can't be cut short under its user


def move_to_shm(storage: torch.UntypedStorage) -> tuple[ShmStorageHandle, int]:
    """Move `storage` into shared memory under every view of it; return its handle and the descriptor to
    keep open.

    The caller owns the descriptor, and guarantees that nobody reads or writes the storage meanwhile and
    that no raw address of it was kept: the data moves. A storage that was moved before is shared again
    without a copy. Needs as much free memory as the storage has, until the old memory is freed before the
    return.
    """
    size = storage.nbytes()
    if size == 0:
        raise KVCacheExportError("A KV cache tensor has no memory yet: export it after the engine allocated it.")
    fd = _existing_fd(storage)
    if fd is None:
        fd = _new_memfd(size)
        try:
            moved = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # dups fd
            _bytes_of(moved).copy_(_bytes_of(storage))
            swap = getattr(storage, "_swap_data_ptr_", None)
            if swap is None:
                raise KVCacheExportError(
                    f"torch {torch.__version__} can't move a CPU storage in place (no _swap_data_ptr_). "
                    "RayKV needs torch 2.13 or newer to share a CPU engine's KV cache."
                )
            swap(moved)
        except BaseException:
            os.close(fd)
            raise
    status = os.fstat(fd)
    return ShmStorageHandle(fd=fd, device=status.st_dev, inode=status.st_ino, size=size), fd


def open_shm(handle: ShmStorageHandle, origin: Origin) -> torch.UntypedStorage:
    """Map the memory behind `handle`. It is unmapped when the last tensor on the returned storage is gone."""
    _check_reachable(origin)
    path = f"/proc/{origin.pid}/fd/{handle.fd}"
    try:
        _check_same(os.stat(path), handle, origin)  # before opening: the descriptor may be anything by now
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise KVCacheOpenError(_why_not(error, origin)) from error
    try:
        _check_same(os.fstat(fd), handle, origin)
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, handle.size)  # dups fd
    finally:
        os.close(fd)
    populate(storage.data_ptr(), handle.size)
    return storage


def populate(address: int, nbytes: int) -> None:
    """Map all pages of a shared mapping now, where the kernel can (Linux 5.14); `address` is that of a page.

    Else the first copy of each page pays a fault: measured, 1 to 2 GB/s instead of 5 to 6.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(address, nbytes, _MADV_POPULATE_WRITE)


def _existing_fd(storage: torch.UntypedStorage) -> int | None:
    """A new descriptor of the memfd that the storage already lives in, if it does."""
    if not storage.is_shared():
        return None
    try:
        fd = storage._get_shared_fd()
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except (RuntimeError, OSError):
        pass  # shared in some other way: it is moved like any other
    return None


def _new_memfd(size: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(_NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise KVCacheExportError(f"Can't create shared memory for the KV cache: {error}.") from error
        fd = os.memfd_create(_NAME, flags)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)  # all of it now: a full machine is an error here, not a SIGBUS later
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise KVCacheExportError(
            f"Can't reserve {size / 2**30:.2f} GiB of shared memory for the KV cache: {error}. Moving it "
            "needs that much free memory besides the engine's own, for a moment. Give the engine a smaller "
            "KV cache (VLLM_CPU_KVCACHE_SPACE) or the container a higher memory limit."
        ) from error
    return fd


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _check_same(status: os.stat_result, handle: ShmStorageHandle, origin: Origin) -> None:
    if (status.st_dev, status.st_ino, status.st_size) != (handle.device, handle.inode, handle.size):
        raise KVCacheOpenError(
            f"Process {origin.pid} no longer has the KV cache at descriptor {handle.fd}: it closed its "
            "export, or ended and its pid was reused. Ask the engine's worker to export again."
        )


def _check_reachable(origin: Origin) -> None:
    """Its pid means nothing on another machine or in another PID namespace, or worse, somebody else."""
    here = Origin.here()
    what = f"Can't map the engine's KV cache from process {origin.pid}: it "
    if origin.boot_id and here.boot_id and origin.boot_id != here.boot_id:
        raise KVCacheOpenError(what + "runs on another machine. Place this process on the engine's node.")
    if origin.pid_namespace != here.pid_namespace:
        raise KVCacheOpenError(
            what + "is in another PID namespace. Give both containers one: `shareProcessNamespace: true` in a "
            "Kubernetes pod, `--pid=host` or `--pid=container:<name>` with Docker; or run both in one "
            "container."
        )


def _why_not(error: OSError, origin: Origin) -> str:
    what = f"Can't map the engine's KV cache from process {origin.pid} ({error.strerror}): "
    if error.errno in (errno.EACCES, errno.EPERM):
        return what + (
            "the kernel forbids it. Run both processes as the same user, this one with at least the engine's "
            "capabilities, and the engine without set-uid or PR_SET_DUMPABLE=0."
        )
    if not origin.is_alive():
        return what + "it has ended. Start the engine again; its worker exports the KV cache anew."
    return what + "it closed its export. Ask the engine's worker to export again."
