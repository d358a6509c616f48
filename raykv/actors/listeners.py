"""Which TCP ports of given processes can be reached from outside this machine. Read from /proc, IPv4 and IPv6."""

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A socket that accepts connections."""

    pid: int
    ip: str
    port: int


def reachable_from_outside(pids: Iterable[int]) -> list[Listener]:
    """The listeners of these processes that are not bound to a loopback address."""
    sockets = _open_sockets()
    found = {
        Listener(pid, *sockets[inode]) for pid in pids for inode in _inodes(pid) if inode in sockets
    }  # one socket may be open in a parent and its children
    return sorted(found, key=lambda listener: (listener.port, listener.pid))


def _open_sockets() -> dict[int, tuple[str, int]]:
    """Inode → address and port of every listening socket that is not on loopback."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                ip = _address(fields[1].partition(":")[0])
                if fields[3] == _LISTEN and not _is_loopback(ip):
                    found[int(fields[9])] = (str(ip), int(fields[1].partition(":")[2], 16))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def _is_loopback(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def _inodes(pid: int) -> Iterable[int]:
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                if match:
                    yield int(match[1])
