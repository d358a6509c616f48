"""What decides the bytes of a rank's KV blocks, in 16 bytes: two ranks share blocks exactly when these agree.

It covers more than the bytes need rather than less: engines that could share and don't compute twice, engines that
share and must not give wrong tokens. Adapters (LoRA), cache salts and multimodal inputs are in vLLM's block hashes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
import xxhash

from raykv.kvcache.blocks import LayerLayout, _find_block_dim
from raykv.store_messages import FINGERPRINT_NBYTES, GroupLayout

logger = logging.getLogger("raykv")

FORMAT = 1
"""Raise it whenever what lies in a slot, or what is written here, changes its meaning."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
FROM_FILES = frozenset(
    {"auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "fastsafetensors", "instanttensor"}
    | {"sharded_state", "runai_streamer", "runai_streamer_sharded", "bitsandbytes"}
)
"""vLLM's load formats that read the model's own files, so that these are what the weights are."""
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic", "ntk", "yarn", "deepseek_yarn", "mrope_yarn"})
"""Position encodings that may choose their factors by the engine's `max_model_len`."""
READ_NBYTES = 8 << 20
MAX_REMEMBERED = 2000


@dataclass(frozen=True)
class RankPlace:
    """A worker among those that share its layers. `replica` and its neighbours hold the same bytes; one writes."""

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    writes: bool

    @classmethod
    def of(cls, vllm_config: Any, rank: int, replicas: int = 1) -> RankPlace:
        """`replicas` neighbouring tensor-parallel ranks hold the same bytes (with MLA all of them)."""
        parallel = vllm_config.parallel_config
        tensor = parallel.tensor_parallel_size
        tensor_rank = rank % tensor
        return cls(
            tensor_rank=tensor_rank // replicas,
            tensor_size=tensor,
            pipeline_rank=rank // tensor,
            pipeline_size=parallel.pipeline_parallel_size,
            writes=tensor_rank % replicas == 0,
        )


def canonical(found: Mapping[str, Any]) -> str:
    """The same facts are the same text: what `digest` is of, and what operators are shown."""
    return json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)


def digest(found: Mapping[str, Any]) -> bytes:
    """16 bytes of canonical JSON."""
    return hashlib.blake2b(canonical(found).encode(), digest_size=FINGERPRINT_NBYTES).digest()


def facts(
    vllm_config: Any,
    groups: Sequence[GroupLayout],
    kv_caches: Mapping[str, Any],
    num_blocks: int,
    place: RankPlace,
    weights: str,
) -> dict[str, Any]:
    """All that decides a block's bytes and its hash, as plain JSON."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf_config = model.hf_config.to_dict()
    hf_config.pop("_name_or_path", None)  # the content counts, wherever it lies
    where = asdict(place)
    del where["writes"]
    return {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "weights": weights,
        "hf_config": hf_config,
        "max_model_len": model.max_model_len if _depends_on_length(hf_config) else None,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "kv_dtype_skip_layers": [str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", ())],
        "quantization": [str(model.quantization), str(getattr(model, "quantization_config", None))],
        "model_impl": str(getattr(model, "model_impl", None)),
        "sliding_window": [str(getattr(cache, "sliding_window", None)), bool(model.disable_sliding_window)],
        "block_size": cache.block_size,
        "hash": [str(cache.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED")],
        "groups": [asdict(group) for group in groups],
        "layers": {name: layer_facts(kv_caches[name], num_blocks) for group in groups for name in group.layers},
        "place": where,
    }


def layer_facts(layer: torch.Tensor | Sequence[torch.Tensor], num_blocks: int) -> dict[str, Any]:
    """How a block of the layer lies in memory. Strides between blocks, and how many there are, don't matter."""
    tensors = [layer] if isinstance(layer, torch.Tensor) else list(layer)
    found = []
    for tensor in tensors:
        layout = LayerLayout.of(tensor, num_blocks)
        block_dim = _find_block_dim(tensor.shape, num_blocks)
        # The order of the strides tells that of the bytes. Those above a block's size depend on `num_blocks`.
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), dim))
        dims = []
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            inside = dim != block_dim and stride * tensor.itemsize < layout.block_nbytes
            dims.append([size // num_blocks if dim == block_dim else size, stride if inside else None])
        rows = [plane.shape[1] for plane in layout.planes]
        found.append({"dtype": str(tensor.dtype), "block_dim": block_dim, "dims": dims, "order": order, "rows": rows})
    return {"tensors": found}


def _depends_on_length(hf_config: Any) -> bool:
    if isinstance(hf_config, Mapping):
        kinds = (hf_config.get("rope_type"), hf_config.get("type"))
        return any(kind in LENGTH_DEPENDENT_ROPE for kind in kinds if isinstance(kind, str)) or any(
            _depends_on_length(value) for value in hf_config.values()
        )
    return isinstance(hf_config, list | tuple) and any(map(_depends_on_length, hf_config))


# -- the weights --------------------------------------------------------------------------------------------


def weights_identity(vllm_config: Any, given: str | None, cache: Path | None = None) -> str:
    """What the weights are, by content. `given` stands for it; without it and without readable files nobody shares.

    Reads all the model's files the first time (12 GB/s at most), then only their sizes and times.
    """
    models = [vllm_config.model_config]
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        models.append(draft)  # its layers are in the KV groups too
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return _nobodys("the scales of its KV cache are computed from what it serves first")
    if given is not None:
        return f"given:{given}"
    found = []
    for model in models:
        load_format = str(vllm_config.load_config.load_format)
        if load_format == "dummy":
            found.append(f"dummy:{model.seed}")
            continue
        files = weight_files(model, vllm_config.load_config) if load_format in FROM_FILES else []
        if not files:
            return _nobodys(f"the files of {model.model} can't be read (load format {load_format})")
        try:
            found.append(content_identity(files, cache or default_cache()))
        except OSError as error:
            return _nobodys(f"the files of {model.model} can't be read ({error})")
    return ",".join(found)


def _nobodys(why: str) -> str:
    logger.warning(
        "This engine shares its KV blocks with no other, nor with itself after a restart: %s. "
        "Set model_identity in the TierConnector's config to a text that stands for exactly these weights.",
        why,
    )
    return f"random:{os.urandom(16).hex()}"


def weight_files(model: Any, load_config: Any) -> list[Path]:
    """The files that vLLM loads the model from, or more; empty if they are not found on this machine."""
    named = Path(str(getattr(model, "model_weights", "") or model.model))
    if named.is_file():
        return [named]
    if not named.is_dir():
        named = _snapshot(model, load_config) or named
    if not named.is_dir():
        return []
    return sorted(path for path in named.rglob("*") if path.suffix in WEIGHT_SUFFIXES and path.is_file())


def _snapshot(model: Any, load_config: Any) -> Path | None:
    """The folder of a model that the Hugging Face hub's cache has."""
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=load_config.download_dir, local_files_only=True
            )
        )
    except Exception:
        return None


def content_identity(files: Sequence[Path], cache: Path) -> str:
    """One hash of all files, by name below their folder and content. Each is read once and then remembered by what
    the file system says of it, so that an engine's restart reads nothing."""
    base = os.path.commonpath([path.parent for path in files])
    with _remembered(cache) as known:
        lines = [f"{path.relative_to(base)} {_file_hash(path, known)}" for path in files]
    return "files:" + xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _file_hash(path: Path, known: dict[str, list[Any]]) -> str:
    real = os.path.realpath(path)
    key = _stat_of(real)
    entry = known.get(real)
    if entry is None or entry[:-1] != key:
        hasher = xxhash.xxh3_128()
        with open(real, "rb", buffering=0) as file:
            buffer = memoryview(bytearray(READ_NBYTES))
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
        if _stat_of(real) != key:
            raise OSError(f"{real} changed while it was read")
        known.pop(real, None)
        known[real] = [*key, hasher.hexdigest()]
    return str(known[real][-1])


def _stat_of(path: str) -> list[int]:
    """Any write changes this: the inode's change time can't be set by hand."""
    stat = os.stat(path)
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def default_cache() -> Path:
    """Below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "raykv" / "weights.json"


@contextmanager
def _remembered(cache: Path) -> Iterator[dict[str, list[Any]]]:
    """The remembered hashes, written back afterwards. One process at a time: the others of a machine would read the
    same files. Where it can't be kept, files are just read."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(cache, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.warning("the hashes of the weights can't be kept in %s: %s", cache, error)
        yield {}
        return
    with os.fdopen(fd, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        own = os.fstat(fd).st_uid == os.getuid() and not os.fstat(fd).st_mode & 0o022
        before = file.read() if own else b""
        known = _parsed(before)
        yield known
        kept = dict(list(known.items())[-MAX_REMEMBERED:])
        after = json.dumps(kept).encode()
        if own and after != before:
            file.seek(0)
            file.truncate()
            file.write(after)


def _parsed(data: bytes) -> dict[str, list[Any]]:
    """What is not as it was written is forgotten."""
    try:
        known = json.loads(data)
    except ValueError:
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        path: entry
        for path, entry in known.items()
        if isinstance(entry, list) and len(entry) == 6 and isinstance(entry[-1], str)
    }
