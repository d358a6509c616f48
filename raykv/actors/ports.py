"""Free ports of one address."""

from __future__ import annotations

import contextlib
import socket

TRIES = 200


def free_port(host: str) -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether a listener could be opened there now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports_in_a_row(host: str, count: int) -> int:
    """The first of `count` ports in a row that are free at this moment. Raises OSError if none were found."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket(_family(host)))
            first.bind((host, 0))
            port = int(first.getsockname()[1])
            if port + count <= 65_536 and all(is_free(host, port + offset) for offset in range(1, count)):
                return port
    raise OSError(f"no {count} free ports in a row on {host}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
