"""`raykv doctor`: what may hang or crash when it is imported, looked at in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from raykv.api.findings import Finding, Level

PROBE_S = 90.0
GPU_PROBE = """
import json, os, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"torch": torch.__version__, "gpus": names, "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}))
"""
NIXL_PROBE = """
import json
try:
    import nixl
except ImportError as error:
    print(json.dumps({"missing": str(error)})); raise SystemExit
api = nixl if hasattr(nixl, "nixlAgent") else nixl._bindings
config = api.nixlAgentConfig()
agent = api.nixlAgent("raykv-doctor", config)
plugins = list(agent.getAvailPlugins())
agent.createBackend("UCX", {})
print(json.dumps({"plugins": plugins}))
"""


def probe(code: str, timeout_s: float = PROBE_S) -> dict[str, Any]:
    """What this code prints as JSON in a Python of its own; {"error": why} if it does not."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        found = json.loads(lines[-1])
        if isinstance(found, dict):
            return found
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return {"error": last[:300]}


def gpus(deep: bool, run: Callable[[str], dict[str, Any]] = probe) -> Iterator[Finding]:
    """Whether an engine's KV cache can be shared by CUDA IPC."""
    found = run(GPU_PROBE)
    if "error" in found:
        yield Finding("torch", Level.ERROR, f"torch can't be imported: {found['error']}", "Install it again.")
        return
    if not found["gpus"]:
        yield Finding("CUDA", Level.OK, f"torch {found['torch']} sees no GPU: KV caches are shared by shared memory")
        return
    yield Finding("CUDA", Level.OK, f"torch {found['torch']} sees {', '.join(found['gpus'])}")
    if "expandable_segments:true" in found["conf"].lower().replace(" ", ""):
        yield Finding("CUDA IPC", Level.WARNING, "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
                      "RayKV puts the KV cache into a pool without; if an engine refuses, unset it.")  # fmt: skip
    if not deep:
        yield Finding("CUDA IPC", Level.OK, "not tried: `raykv doctor --deep` does (a minute, 3 GiB of GPU memory)")
        return
    done = subprocess.run([sys.executable, "-m", "raykv.kvcache.check_cuda"], capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.returncode == 0:
        yield Finding("CUDA IPC", Level.OK, "memory is shared between processes, all checks passed")
    else:
        yield Finding("CUDA IPC", Level.ERROR, f"a check failed: {last[:300]}",
                      "`python -m raykv.kvcache.check_cuda` says which. Engine and Ray node belong in one container "
                      "(PID and IPC namespace).")  # fmt: skip


def nixl(run: Callable[[str], dict[str, Any]] = probe) -> Iterator[Finding]:
    """The peer tier and P/D go over NIXL and UCX."""
    found = run(NIXL_PROBE)
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ)
    if "missing" in found:
        yield Finding("NIXL", Level.WARNING, f"not installed ({found['missing']})",
                      "Only a peer tier and NixlConnector need it: pip install 'raykv[nixl]'.")  # fmt: skip
    elif "error" in found:
        yield Finding("NIXL", Level.ERROR, f"it can't be used: {found['error']}",
                      "See UCX_TLS and UCX_NET_DEVICES, or take the peer tier out.")  # fmt: skip
    elif "UCX" not in found["plugins"]:
        yield Finding("NIXL", Level.ERROR, f"without UCX; it has {', '.join(found['plugins'])}",
                      "Install nixl's own package, which carries UCX.")  # fmt: skip
    else:
        yield Finding("NIXL", Level.OK, f"works with UCX{f' ({chosen})' if chosen else ''}; "
                      f"plugins: {', '.join(found['plugins'])}")  # fmt: skip
