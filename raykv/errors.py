"""The errors of RayKV. Each message says what is wrong and how to fix it."""


class RayKVError(Exception):
    """Any error that RayKV raises on purpose."""


class KVCacheExportError(RayKVError):
    """The engine's KV cache can't be shared with another process."""


class KVCacheOpenError(RayKVError):
    """A shared KV cache can't be opened in this process."""


class ConfigError(RayKVError):
    """The configuration can't be used as it is. Raised at start-up, before any engine work."""


class UnknownConnectorError(ConfigError):
    """A child names a connector class that neither vLLM's registry nor a module path provides."""


class IntegrityError(RayKVError):
    """An invariant of RayKV's own bookkeeping does not hold: a defect, never the user's fault."""


class ClusterError(RayKVError):
    """This process can't use a Ray cluster. Raised at start-up."""


class HostError(RayKVError):
    """The base of what can go wrong with an actor that RayKV launched."""


class HostStartError(HostError):
    """The actor did not become ready: not placed in time, not startable, or its constructor raised."""


class VersionMismatchError(HostStartError):
    """The actor's process runs another Python, Ray, vLLM or RayKV than this one."""


class HostTimeout(HostError):
    """No answer in time. The actor was not touched: it may still be at work. Only a kill ends its jobs."""


class HostDied(HostError):
    """Ray reports that the actor is gone, so the call has no result.

    A report, not a proof: memory is given back after `RemoteHost.wait_dead` or `kill` only.
    """


class HostRaised(HostError):
    """The method itself raised. The actor lives."""

    def __init__(self, host: str, type_name: str, message: str, traceback_text: str) -> None:
        super().__init__(f"{host} raised {type_name}: {message}")
        self.host = host
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text


class HostUnkillable(HostError):
    """A killed actor's process was not seen to end in time: its memory must stay pinned."""


class HostedConnectorError(RayKVError):
    """A connector asked for something that it can't have outside vLLM's worker process."""


class ChildStartError(RayKVError):
    """A child could not be started; the message carries the child's own reason."""


class StoreError(RayKVError):
    """The node's store can't be used by this engine as it is, or can't be reached. Raised at start-up."""


class StorageError(RayKVError):
    """A pool can't be opened, or was used after its end."""


class DiskError(StorageError):
    """A read or write of the disk pool failed. `fatal`: the medium is gone, not one block of it."""

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal
