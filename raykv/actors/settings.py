"""The Ray settings that RayKV depends on. Each name was found in Ray 2.60's binaries and its effect measured."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """An environment variable of Ray's, and the value that RayKV sets or asks for."""

    name: str
    value: str

    @property
    def key(self) -> str:
        """Its name in Ray's system config, which can set it too."""
        return self.name.removeprefix("RAY_")


# Every process of a cluster exits this long after it lost the GCS. 60 s by default: too short for an engine.
GCS_RECONNECT = Setting("RAY_gcs_rpc_server_reconnect_timeout_s", "100000")
# What an engine may survive at least, to count as set by somebody else.
GCS_RECONNECT_ENOUGH_S = 600
# In memory by default: a GCS that comes back then knows neither nodes nor actors.
GCS_STORAGE = Setting("RAY_gcs_storage", "rocksdb")
GCS_STORAGE_PATH = Setting("RAY_gcs_storage_path", "<a directory that outlives the head>")
# How long a failed call of a restartable actor waits to learn why. 1000 by default.
DEATH_INFO_WAIT = Setting("RAY_timeout_ms_task_wait_for_death_info", "50")
# Ray gives its workers niceness 15 by default: beside a busy engine a host then gets almost no time on a full machine.
WORKER_NICENESS = Setting("RAY_worker_niceness", "0")
# Ray turns a loopback address into the machine's own one, and then listens on all interfaces, except where it
# believes to be on a system without multi-node support. With this it does as told and listens on loopback only.
ONE_MACHINE = Setting("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# With it Ray hides the GPUs of an actor that asks for none, whatever CUDA_VISIBLE_DEVICES it is given.
HIDE_GPUS = Setting("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def is_set(setting: Setting, environ: Mapping[str, str], args: Mapping[str, str]) -> bool:
    """Whether a process of Ray's, started so, has a reconnect time that is long enough."""
    value = environ.get(setting.name) or _system_config(args).get(setting.key)
    try:
        return value is not None and float(value) >= GCS_RECONNECT_ENOUGH_S
    except ValueError:
        return False


def missing_on_head(environ: Mapping[str, str], args: Mapping[str, str]) -> list[Setting]:
    """What a GCS lacks to come back with its state; a GCS on Redis lacks nothing."""
    config = _system_config(args)
    if args.get("redis_address") or environ.get("RAY_REDIS_ADDRESS"):
        return []
    storage = environ.get(GCS_STORAGE.name) or config.get(GCS_STORAGE.key)
    if storage == GCS_STORAGE.value:
        return []
    return [GCS_STORAGE, GCS_STORAGE_PATH]


def _system_config(args: Mapping[str, str]) -> dict[str, str]:
    """What `ray start --system-config` set: base64 of JSON in the command line. A raylet gets it from the GCS."""
    try:
        return {key: str(value) for key, value in json.loads(base64.b64decode(args.get("config_list", ""))).items()}
    except (binascii.Error, ValueError, AttributeError):
        return {}
