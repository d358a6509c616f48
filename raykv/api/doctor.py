"""`raykv doctor`: what on this machine would keep RayKV from working, each finding with its fix."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from raykv.actors import node_facts, ports, store_files
from raykv.api.doctor_cluster import cluster, of_snapshot, strangers
from raykv.api.doctor_probes import gpus, nixl, probe
from raykv.api.findings import Finding, Level, Wanted
from raykv.api.words import count, show_nbytes

__all__ = ["Finding", "Level", "Wanted", "examine", "of_snapshot", "probe", "strangers"]

GIB = 1 << 30
SUPPORTED = {"ray": ((2, 60), (3, 0)), "vllm": ((0, 32), (0, 34)), "nixl": ((1, 5), (2, 0)),
             "lmcache": ((0, 5, 6), (0, 6))}  # fmt: skip
"""As in pyproject.toml: at least, and below."""
SHM = Path(node_facts.SHM)


def examine(wanted: Wanted) -> Iterator[Finding]:
    """All checks, one after the other, each as soon as it is known. Never raises for what it finds."""
    yield from versions()
    yield from hash_seed()
    yield from shared_memory()
    yield from limits()
    yield from (port(number) for number in wanted.ports)
    for folder in wanted.folders:
        yield from disk(folder)
    yield from gpus(wanted.deep)
    yield from nixl()
    if wanted.connect:
        yield from cluster(wanted)


# -- this machine -----------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """Python and the packages that RayKV stands on."""
    python = sys.version_info[:3]
    text = ".".join(map(str, python))
    if python < (3, 11):
        yield Finding("python", Level.ERROR, f"Python {text}", "Use Python 3.11 or newer, the same on every node.")
    else:
        yield Finding("python", Level.OK, f"Python {text}")
    for name, (least, below) in SUPPORTED.items():
        found = _version(name)
        wants = f"{'.'.join(map(str, least))} or newer, below {'.'.join(map(str, below))}"
        if found is None:
            if name in ("ray", "vllm"):
                fix = "pip install 'raykv[cuda]' (or 'raykv[cpu]')"
                level = Level.ERROR if name == "ray" else Level.WARNING
                yield Finding(name, level, f"{name} is not installed", f"{fix}, on every node with an engine.")
        elif not least <= found[1] < below:
            yield Finding(name, Level.WARNING, f"{name} {found[0]}: RayKV was tested with {wants}",
                          f"pip install '{name}=={'.'.join(map(str, least))}.*'.")  # fmt: skip
        else:
            yield Finding(name, Level.OK, f"{name} {found[0]}")


def _version(name: str) -> tuple[str, tuple[int, ...]] | None:
    """As text and as numbers; vllm's CPU build has another package name."""
    for package in (name, f"{name}-cpu", f"{name}-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            text = metadata.version(package)
            numbers = []
            for part in text.split("+")[0].split("."):
                if not part.isdigit():
                    break
                numbers.append(int(part))
            return text, tuple(numbers)
    return None


def hash_seed() -> Iterator[Finding]:
    """vLLM seeds its block hashes with it: engines with different ones share nothing."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        yield Finding("hash seed", Level.OK, "PYTHONHASHSEED is not set: block hashes are the same everywhere")
    elif seed == "random":
        yield Finding("hash seed", Level.ERROR, "PYTHONHASHSEED is random: no two engines share a block, nor does one "
                      "after its restart", "Unset it, or set the same number for every engine.")  # fmt: skip
    else:
        yield Finding("hash seed", Level.OK, f"PYTHONHASHSEED is {seed}: every engine that is to share needs the same")


def shared_memory(folder: Path = SHM) -> Iterator[Finding]:
    """Host tiers and KV caches on a CPU live there."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        yield Finding("shared memory", Level.ERROR, f"{folder} can't be used: {error.strerror}",
                      "Mount a tmpfs there (docker: --shm-size).")  # fmt: skip
        return
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    said = f"{folder} has {show_nbytes(size)}, {show_nbytes(free)} free"
    memory = node_facts._total_memory()
    if not os.access(folder, os.W_OK):
        yield Finding("shared memory", Level.ERROR, f"{folder} is not writable", "Give this user the right to.")
    elif size < GIB:
        yield Finding("shared memory", Level.ERROR, said,
                      "A host tier does not fit: enlarge it (docker: --shm-size=64g).")  # fmt: skip
    elif size < memory // 4:
        yield Finding("shared memory", Level.WARNING, f"{said}, of {show_nbytes(memory)} memory",
                      "Host tiers can't be larger than it: enlarge it if you want more.")  # fmt: skip
    else:
        yield Finding("shared memory", Level.OK, said)
    left = _stale(folder)
    if left:
        yield Finding("left over", Level.WARNING, f"{count(len(left), 'host tier')} of stores that are gone: "
                      f"{', '.join(left)}", "`raykv stop` gives their memory back.")  # fmt: skip


def _stale(folder: Path) -> list[str]:
    """Host tiers of this user that nobody holds; nothing is removed."""
    import fcntl

    found = []
    for path in sorted(folder.glob(f"{store_files._own_prefix()}*.host")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(path.name)
            finally:
                os.close(fd)
    return found


def limits() -> Iterator[Finding]:
    """What the kernel lets this user's processes have."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 4096:
        yield Finding("open files", Level.WARNING, f"a process may open {files:,} files",
                      "Ray and an fs tier need more: ulimit -n 65536 before `ray start`.")  # fmt: skip
    else:
        yield Finding("open files", Level.OK, f"a process may open {files:,} files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        yield Finding("locked memory", Level.WARNING, f"a process may lock {show_nbytes(locked)}",
                      "RDMA registers whole tiers: ulimit -l unlimited before `ray start`.")  # fmt: skip


def port(number: int, host: str = "127.0.0.1") -> Finding:
    """Whether it is free, or what listens there answers."""
    if ports.is_free(host, number):
        return Finding(f"port {number}", Level.OK, "free")
    return Finding(f"port {number}", Level.WARNING, "something listens there",
                   "All is well if that is this cluster; else choose another port.")  # fmt: skip


def disk(folder: str) -> Iterator[Finding]:
    """A disk tier's folder: room, and I/O past the page cache."""
    name = f"disk {folder}"
    existing = next((path for path in (Path(folder), *Path(folder).parents) if path.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Finding(
            name, Level.ERROR, f"{existing} is not writable", "Give this user the right to, or choose another."
        )
        return
    low = free < GIB
    yield Finding(name, Level.ERROR if low else Level.OK, f"{show_nbytes(free)} free",
                  "Free space there: a tier's capacity is reserved in full." if low else "")  # fmt: skip
    problem = _direct(existing)
    if problem:
        yield Finding(name, Level.WARNING, f"no I/O past the page cache: {problem}",
                      "It works, slower, and takes memory: use ext4 or xfs on a local disk.")  # fmt: skip
    else:
        yield Finding(name, Level.OK, "I/O past the page cache works")


def _direct(folder: Path) -> str:
    """Why a page can't be written past the page cache there; empty: it can."""
    import mmap

    path = folder / f".raykv-doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        return str(error.strerror)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(fd, page, 0)
        return ""
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
