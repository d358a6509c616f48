"""Addresses of a cluster's head: host:port, and whether something listens there."""

import socket

from raykv.errors import ClusterError


def parse(address: str) -> tuple[str, int]:
    """Host and port of a GCS address. Raises ClusterError for anything else, ray:// too."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ClusterError(
            f"The Ray address {address!r} is not of the form host:port. An engine joins a cluster as a member of one "
            "of its nodes (a ray:// client can't): give the GCS address that `ray start` printed, for example "
            "127.0.0.1:6379."
        )
    return host.strip("[]"), int(port)


def why_unreachable(host: str, port: int, timeout: float) -> str | None:
    """None if something listens there, else why not."""
    try:
        socket.create_connection((host, port), timeout=timeout).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
