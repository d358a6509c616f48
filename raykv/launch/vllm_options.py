"""Finds a mistyped option of `vllm serve` without starting vLLM, which would say it after 20 s, on another machine.

The names are read from the source of the vLLM that is installed here; nothing of it is run or imported. A name that is
like none of them is left for vLLM to judge.
"""

from __future__ import annotations

import ast
import re
from importlib import util
from pathlib import Path

from raykv.config.cluster_spec import ClusterSpec
from raykv.config.reader import nearest
from raykv.errors import ConfigError

FILES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "entrypoints/cli/serve.py")
FLAG = re.compile(r"--([a-z0-9][a-z0-9-]*)")
ALIKE = 0.8
ENOUGH = 50
"""Fewer names than that mean that vLLM's source looks otherwise than it did."""


def check(spec: ClusterSpec) -> None:
    """Raise ConfigError for an option that is not vLLM's and looks like one that is."""
    known = names() if spec.command is None else frozenset()
    if len(known) < ENOUGH:
        return
    for engine in spec.engines:
        for option in engine.options:
            plain = option.removeprefix("no_")
            if option in known or plain in known:
                continue
            meant = nearest(option, known, ALIKE)
            if meant is not None:
                raise ConfigError(
                    f"vLLM has no option {option} (engine {engine.name}). Did you mean {meant}? "
                    "`vllm serve --help=all` lists them."
                )


def names() -> frozenset[str]:
    """The options' names with underscores; empty if there is no vLLM here."""
    found = util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    root = Path(found.origin).parent
    options: set[str] = set()
    for pattern in FILES:
        for path in root.glob(pattern):
            try:
                tree = ast.parse(path.read_text())
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                match node:
                    case ast.Constant(value=str(text)) if (flag := FLAG.fullmatch(text)) is not None:
                        options.add(flag[1].replace("-", "_"))
                    case ast.ClassDef(name=name, body=body) if name.endswith("Args"):
                        fields = (one.target for one in body if isinstance(one, ast.AnnAssign))
                        options |= {target.id for target in fields if isinstance(target, ast.Name)}
    return frozenset(options)
