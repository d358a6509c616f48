"""Imports point one way: connector → actors → storage, kvcache → core → types (and errors, config, messages).

The rules are read from the source, so a lazy import inside a function counts too. Only an import under
`if TYPE_CHECKING:` may name a foreign package that its layer may not use: it never runs.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "raykv"

WORDS = frozenset(
    {
        "types",
        "errors",
        "config",
        "messages",
        "store_messages",
        "directory_messages",
        "cluster_messages",
        "peer_messages",
        "engine_messages",
        "event_messages",
        "admin_messages",
    }
)
BELOW_ACTORS = WORDS | {"core", "kvcache", "storage", "observe"}

# What each part of raykv may import of the others. A new part gets a line here: decide where it belongs.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset({"api"}),  # raykv/__init__.py, lazily: test_import_time
    "types": WORDS,
    "errors": WORDS,
    "config": WORDS,
    "messages": WORDS,
    "store_messages": WORDS,
    "directory_messages": WORDS,
    "cluster_messages": WORDS,
    "peer_messages": WORDS,
    "engine_messages": WORDS,
    "event_messages": WORDS,
    "admin_messages": WORDS,
    "core": WORDS,
    "kvcache": WORDS | {"core"},
    "storage": WORDS | {"core"},
    "observe": WORDS | {"core"},
    "actors": BELOW_ACTORS,
    "connector": BELOW_ACTORS | {"actors"},
    "router": BELOW_ACTORS | {"actors"},
    "launch": BELOW_ACTORS | {"actors", "router"},
    "serve_llm": WORDS,
    "api": BELOW_ACTORS | {"actors", "router", "launch"},
    "cli": BELOW_ACTORS | {"actors", "router", "launch", "api"},
}

# Packages with one door each. A path is a part, or a single file of one.
DOORS = {
    "ray": (
        "actors/cluster.py",
        "actors/handles.py",
        "actors/named_actor.py",
        "actors/ray_calls.py",
        "actors/ray_metrics.py",
        "actors/store_handle.py",
        "actors/desk_handle.py",
        "actors/engine_actors.py",
        "actors/nodes.py",
        "serve_llm.py",
        "router/app.py",
        "router/controller_list.py",
    ),
    "vllm": ("connector", "actors/connector_host.py"),
    "torch": ("kvcache", "actors", "connector", "storage"),
}
# A file behind a door that may open it inside functions only.
LAZY_ONLY = {("actors/connector_host.py", "vllm")}

# Parts that stand on the standard library alone, but for what is named.
FOREIGN_ALLOWED = {
    "": frozenset(),
    **{word: frozenset({"msgpack", "msgspec"}) for word in WORDS},
    "core": frozenset({"msgpack", "msgspec"}),
    "kvcache": frozenset({"torch"}),
}


@dataclass(frozen=True)
class Import:
    """One import as it is written: the module's full dotted name and where it stands."""

    module: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING:`


def imports_of(source: str, package: str) -> list[Import]:
    """All imports of a module that lies in `package`, also `importlib.import_module("name")`."""
    found: list[Import] = []

    def add(module: str, node: ast.AST, lazy: bool, typing_only: bool) -> None:
        found.append(Import(module, node.lineno, lazy, typing_only))

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    add(alias.name, node, lazy, typing_only)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                # `from raykv import core` names a part of raykv, `from ray import get` a function of ray.
                for alias in names:
                    add(f"{origin}.{alias.name}", node, lazy, typing_only)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if called(func) in (
                "import_module",
                "__import__",
            ):
                add(name, node, lazy, typing_only)
        if isinstance(node, ast.If) and called(node.test) == "TYPE_CHECKING":
            for child in node.body:
                walk(child, lazy, True)
            for child in node.orelse:
                walk(child, lazy, typing_only)
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, inside, typing_only)

    walk(ast.parse(source), False, False)
    return found


def called(node: ast.expr) -> str:
    """The last name of `a.b.name`, or `name`."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def part_of(relative: str) -> str:
    """core/ledger.py → core; types.py → types; __init__.py → the package itself."""
    first = relative.split("/")[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def behind(relative: str, doors: tuple[str, ...]) -> bool:
    return relative in doors or part_of(relative) in doors


def violations(relative: str, source: str) -> list[str]:
    """What `source`, as raykv/<relative>, imports against the rules."""
    part = part_of(relative)
    package = ".".join(["raykv", *relative.split("/")[:-1]])
    wrong = []
    for imported in imports_of(source, package):
        root, *rest = imported.module.split(".")
        if root == "raykv":
            target = rest[0] if rest else ""
            fits = target in ("", "__version__", part) or target in MAY_IMPORT[part]
        elif imported.typing_only or root in sys.stdlib_module_names:
            fits = True
        else:
            fits = root not in DOORS or behind(relative, DOORS[root])
            fits = fits and (imported.lazy or (relative, root) not in LAZY_ONLY)
            fits = fits and root in FOREIGN_ALLOWED.get(part, {root})
        if not fits:
            wrong.append(f"raykv/{relative}:{imported.line} imports {imported.module}")
    return wrong


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("relative", FILES)
def test_imports_point_one_way(relative: str) -> None:
    part = part_of(relative)
    assert part in MAY_IMPORT, f"raykv/{part} has no line in MAY_IMPORT: decide what it may import"
    assert violations(relative, (PACKAGE / relative).read_text()) == []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("core/ledger.py", "import torch"),
        ("core/ledger.py", "from raykv.storage import pool"),
        ("core/ledger.py", "from ..actors.handles import Handle"),
        ("core/ledger.py", "def f():\n    from raykv import connector"),
        ("core/ledger.py", "import numpy"),
        ("types.py", "from .core import ledger"),
        ("kvcache/share.py", "import numpy"),
        ("kvcache/share.py", "from raykv.storage.pool import Pool"),
        ("storage/pool.py", "import ray"),
        ("storage/pool.py", "from vllm.config import VllmConfig"),
        ("observe/metrics.py", "import ray.util.metrics"),
        ("actors/node_store.py", "import ray"),
        ("actors/node_store.py", "def f():\n    import vllm"),
        ("actors/handles.py", "import vllm"),
        ("actors/connector_host.py", "from vllm.config import VllmConfig"),
        ("actors/connector_host.py", "def f():\n    from raykv.connector.hosted import Child"),
        ("actors/connector_host.py", "import importlib\nimportlib.import_module('raykv.connector.hosted')"),
        ("connector/hosted.py", "def f():\n    import ray"),
        ("cli.py", "def f():\n    import ray"),
        ("__init__.py", "from raykv.types import BlockId"),
    ],
)
def test_a_wrong_import_is_found(relative: str, source: str) -> None:
    assert len(violations(relative, source)) == 1


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        (
            "core/ledger.py",
            "import enum\nfrom raykv.types import JobId\nfrom . import pins\nfrom .. import errors",
        ),
        ("kvcache/share.py", "import torch\nfrom raykv.core.slots import Slot"),
        ("storage/nixl.py", "import nixl, numpy, xxhash"),
        ("actors/handles.py", "import ray\nfrom ray.util import metrics"),
        ("actors/connector_host.py", "def f():\n    from vllm.config import VllmConfig"),
        (
            "actors/node_store.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.config import VllmConfig",
        ),
        ("connector/hosted.py", "import vllm\nfrom raykv.actors.handles import Handle"),
        ("cli.py", "import click\ndef f():\n    from raykv.actors import cluster"),
    ],
)
def test_a_right_import_passes(relative: str, source: str) -> None:
    assert violations(relative, source) == []
