"""Mistyped options of vLLM are found before vLLM is started; others are vLLM's to judge."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.config.cluster_parse import parse_spec
from raykv.config.cluster_spec import ClusterSpec
from raykv.errors import ConfigError
from raykv.launch import vllm_options

pytestmark = pytest.mark.process


def spec(**more: Any) -> ClusterSpec:
    return parse_spec({"model": "m", "engines": [{"name": "e"}], **more})


def test_the_names_are_vllms() -> None:
    names = vllm_options.names()
    assert {
        "max_model_len",
        "enforce_eager",
        "tensor_parallel_size",
        "api_key",
        "block_size",
        "seed",
        "headless",
    } <= names
    assert "max_model_lenn" not in names


def test_a_typo_is_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"no option max_modle_len \(engine e\)\. Did you mean max_model_len\?"):
        vllm_options.check(spec(vllm={"max_modle_len": 64}))


@pytest.mark.parametrize(
    "more",
    [
        {"vllm": {"max-model-len": 64, "enforce_eager": False, "no_enable_prefix_caching": True}},
        {"vllm": {"something_of_a_later_vllm": 1}},
        {"vllm": {"max_modle_len": 1}, "command": ["other", "server"]},
    ],
)
def test_what_may_be_right_is_left_to_vllm(more: dict[str, Any]) -> None:
    vllm_options.check(spec(**more))


def test_without_vllm_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_options.util, "find_spec", lambda _: None)
    vllm_options.check(spec(vllm={"max_modle_len": 64}))
