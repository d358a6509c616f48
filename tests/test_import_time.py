"""What `import raykv` and its words bring with them. How long it takes is the benchmark's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"ray", "torch", "vllm", "numpy", "transformers", "lmcache", "nixl"}
LIGHT_MODULES = [
    "raykv",
    "raykv.types",
    "raykv.errors",
    "raykv.config",
    "raykv.messages",
    "raykv.core",
    "raykv.api",
    "raykv.cli",
]


def exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("module", [m for m in LIGHT_MODULES if exists(m)])
def test_imports_nothing_heavy(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(json.loads(done.stdout))
