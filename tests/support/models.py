"""Small models made without a network, kept in the user's cache folder.

Real weights are not needed to test a KV cache: random ones are deterministic and make every wrong block
visible, if they are drawn wide enough that different contexts give different tokens (`initializer_range` 0.2;
with the usual 0.02 all outputs look alike).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = "2"
"""Part of the folder names: raise it whenever what is built here changes."""

VOCABULARY = 512
LAYERS = 4


def cache_dir() -> Path:
    """RayKV's folder below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "raykv"


def once(name: str, build: Callable[[Path], None], root: Path | None = None) -> Path:
    """Build the folder `name` at most once; a build that was cut short or raced leaves nothing half made."""
    target = (root or cache_dir() / "models") / name
    if target.is_dir():
        return target
    partial = target.with_name(f".{name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        build(partial)
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def tiny_llama(root: Path | None = None) -> Path:
    """A random Llama: hidden 256, 4 layers, 2 KV heads of 64, float32, byte-level tokenizer."""
    return once(f"tiny-llama-{VERSION}", lambda path: _build_llama(path, {}), root)


def tiny_hybrid(root: Path | None = None) -> Path:
    """The same with every other layer attending to a window of 64 tokens: two KV groups in vLLM."""
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    extra = {"layer_types": kinds, "sliding_window": 64}
    return once(f"tiny-hybrid-{VERSION}", lambda path: _build_llama(path, extra), root)


def tiny_mla(root: Path | None = None) -> Path:
    """A random DeepSeek-V2 without experts: its KV cache is that of multi-head latent attention, one head for all."""
    return once(f"tiny-mla-{VERSION}", _build_mla, root)


def _build_llama(path: Path, extra: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _build(path, LlamaConfig, LlamaForCausalLM, num_key_value_heads=2, head_dim=64)
    if extra:  # vLLM's Llama reads these, transformers' does not
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | extra, indent=2))


def _build_mla(path: Path) -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    _build(
        path,
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=LAYERS,
    )


def _build(path: Path, config_class: Any, model_class: Any, **shape: Any) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = _byte_tokenizer()
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    torch.manual_seed(0)
    model_class(config).to(torch.float32).save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    # Ids the bytes leave over get a name each, so that every token the model can produce has a text.
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), VOCABULARY)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
