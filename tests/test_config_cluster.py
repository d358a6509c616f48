"""SPEC.yaml: what it means, and one clear error for each thing that is wrong with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.cluster_messages import EngineRole
from raykv.config import parse
from raykv.config.cluster_parse import parse_spec
from raykv.config.cluster_spec import Listen, Placement, Transport
from raykv.config.engine_order import kv_transfer_config, order_for
from raykv.config.tiers import parse_tiers
from raykv.errors import ConfigError
from raykv.launch.spec_file import read_spec, router_options, spec_from

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

PAIR: dict[str, Any] = {
    "model": "org/model",
    "vllm": {"max-model-len": 4096, "enforce_eager": True},
    "engines": [
        {"name": "prefill", "role": "prefill", "replicas": 2, "resources": {"num_gpus": 1}},
        {"name": "decode", "role": "decode", "options": {"max_model_len": 8192}, "placement": "pack"},
    ],
    "tiers": [{"medium": "host", "capacity": "1GiB"}],
    "router": {"port": 9000, "prefill_timeout_s": 5},
}
HOST = {"medium": "host", "capacity": "1GiB"}
FS = {"medium": "fs", "path": "/mnt/kv", "capacity": "1TiB"}


def changed(**more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(PAIR), **more}


def with_engine(index: int = 0, **more: Any) -> dict[str, Any]:
    spec = copy.deepcopy(PAIR)
    spec["engines"][index].update(more)
    return spec


def test_what_it_means() -> None:
    spec = parse_spec(PAIR)
    prefill, decode = spec.engines
    assert (prefill.role, prefill.replicas, prefill.placement) == (EngineRole.PREFILL, 2, Placement.SPREAD)
    assert prefill.selector.resources == {"GPU": 1.0, "CPU": 1.0}
    assert prefill.transport is decode.transport is Transport.NIXL
    assert decode.placement is Placement.PACK
    assert decode.options == {"max_model_len": 8192, "enforce_eager": True}
    assert [engine.replica(index) for engine, index in spec.replicas] == ["prefill-0", "prefill-1", "decode-0"]
    assert spec.listen is Listen.LOOPBACK and spec.model_path is None
    assert parse_spec(json.loads(spec.raw)) == spec
    options = router_options(spec)
    assert options is not None
    assert (options.port, options.transport, options.prefill_timeout_s) == (9000, Transport.NIXL, 5.0)


def test_the_command_line_is_vllms() -> None:
    spec = parse_spec(
        changed(
            vllm={
                "max_model_len": 64,
                "enforce_eager": False,
                "seed": None,
                "lora_modules": ["a", "b"],
                "speculative_config": {"method": "ngram"},
            }
        )
    )
    command = list(order_for(spec, spec.engines[0], 1).command)
    assert command[:3] == ["vllm", "serve", "org/model"]
    text = " ".join(command)
    assert "--max-model-len 64 --no-enforce-eager --lora-modules a b" in text
    assert '--speculative-config {"method": "ngram"}' in text
    assert "seed" not in text


def test_each_transport_has_its_children() -> None:
    def children(transport: str, *tiers: dict[str, Any], index: int = 0, **more: Any) -> list[tuple[str, str]]:
        spec = changed(**{"tiers": [HOST, *tiers], **more})
        for engine in spec["engines"]:
            engine["transport"] = transport
        parsed = parse_spec(spec)
        config = kv_transfer_config(parsed, parsed.engines[index])
        assert config is not None
        multi = parse(config)  # RayKV's connector takes it
        for child in multi.children:
            if child.connector == "TierConnector":
                parse_tiers(child.extra)
        return [(child.connector, child.role) for child in multi.children]

    tier = ("TierConnector", "kv_both")
    assert children("nixl") == [tier, ("NixlConnector", "kv_producer")]
    assert children("nixl", index=1) == [tier, ("NixlConnector", "kv_consumer")]
    assert children("tiers", {"medium": "peer"}) == [tier]
    assert children("fs", tiers=None, stores=[{"cascade": "write", "tiers": [HOST, FS]}]) == [tier]


def test_a_multi_connector_waits_as_long_as_its_store_does() -> None:
    for own, around in ((1, 5.0), (4, 5.0), (10, 11.0)):
        spec = parse_spec(changed(tiers=None, stores=[{"lookup_timeout_s": own, "tiers": [HOST]}]))
        config = kv_transfer_config(spec, spec.engines[0])
        assert parse(config).children[0].options.lookup_timeout_s == around


def test_nixl_takes_the_cpus_memory_only_where_there_is_no_gpu() -> None:
    spec = parse_spec(PAIR)
    configs = [kv_transfer_config(spec, engine) for engine in spec.engines]
    nixl = [config["kv_connector_extra_config"]["connectors"][-1] for config in configs if config]
    assert ["kv_buffer_device" in child for child in nixl] == [False, True]


def test_an_engine_alone_without_a_store_gets_no_connector() -> None:
    spec = parse_spec({"model": "m", "engines": [{"name": "e"}]})
    order = order_for(spec, spec.engines[0], 0)
    assert "--kv-transfer-config" not in order.command
    assert order.side_ports == 0


def test_the_digest_changes_with_what_an_engine_runs_and_with_nothing_else() -> None:
    def digest(raw: dict[str, Any]) -> str:
        spec = parse_spec(raw)
        return order_for(spec, spec.engines[0], 0).digest

    same = digest(PAIR)
    assert digest(with_engine(1, replicas=7)) == same
    assert digest(with_engine(0, replicas=7)) == same
    assert digest(changed(router=None)) == same
    for other in (
        changed(model="other"),
        changed(vllm={"max_model_len": 1}),
        changed(tiers=[{"medium": "host", "capacity": "2GiB"}]),
        with_engine(0, environment={"A": "1"}),
        with_engine(0, port=8100),
        changed(listen="node"),
    ):
        assert digest(other) != same


WRONG: list[tuple[Any, str]] = [
    ([], "The spec is []. It must be a mapping"),
    ({"engines": []}, "model is missing"),
    (changed(model="./tiny"), 'model is "./tiny", a folder seen from where one stands'),
    (changed(model="models/llama/8b"), "Write the folder's whole path"),
    (changed(modle="x"), 'Unknown key "modle" in the spec. Did you mean "model"?'),
    (changed(engines=None), "engines is missing. It must be a list"),
    (changed(engines=[]), "engines is []. It must be a list with at least one entry"),
    (changed(engines=["e"]), 'engines[0] is "e". It must be a mapping'),
    (with_engine(nam="x"), 'Unknown key "nam" in engines[0]. Did you mean "name"?'),
    (with_engine(num_gpus=1), "It belongs in resources of the engine."),
    (with_engine(router={}), 'Unknown key "router" in engines[0]. It belongs in the spec, at its top.'),
    (with_engine(role="prefil"), 'engines[0].role is "prefil". Did you mean "prefill"?'),
    (with_engine(name="A b"), 'engines[0].name is "A b". It must be at most 32'),
    (with_engine(name="decode"), 'engines[0] and engines[1] would both have an engine called "decode-0"'),
    (with_engine(replicas=0), "engines[0].replicas is 0"),
    (with_engine(placement="spred"), 'Did you mean "spread"?'),
    (with_engine(resources={"gpu": 1}), 'Unknown key "gpu" in engines[0].resources.'),
    (with_engine(resources={"num_gpus": -1}), "engines[0].resources.num_gpus is -1"),
    (with_engine(resources={"labels": {"pool": 1}}), "labels.pool is 1. Labels of Ray's nodes are texts"),
    (with_engine(options={"kv_transfer_config": {}}), "engines[0].options.kv_transfer_config is not to be set there"),
    (changed(vllm={"port": 1}), "vllm.port is not to be set there. Set port of an engine."),
    (with_engine(store="defualt"), 'engines[0].store is "defualt". Did you mean "default"?'),
    (with_engine(transport="tiers"), "reads from no peer. Add {medium: peer}"),
    (with_engine(transport="fs"), "no tier in a shared folder"),
    (with_engine(transport="fs") | {"tiers": [HOST, FS]}, "`cascade: write` in its entry of `stores`"),
    (with_engine(1, role="both"), "only prefills and no engine decodes"),
    (
        with_engine(0, transport="tiers") | {"tiers": [{"medium": "host", "capacity": 4096}, {"medium": "peer"}]},
        "different transports",
    ),
    (with_engine(port=9000), "Port 9000 is wanted by the router and by engine prefill-0"),
    (
        changed(engines=[{"name": "a", "port": 8100, "replicas": 3}, {"name": "b", "port": 8102}]),
        "Port 8102 is wanted by engine a-2 and by engine b-0",
    ),
    (with_engine(port=65535), "Port 65536 of engine prefill-1 is above 65535"),
    (changed(tiers=[{"medium": "hots", "capacity": 1}]), 'tiers[0].medium is "hots". Did you mean "host"?'),
    (changed(stores=[]), "both tiers and stores"),
    (
        changed(tiers=None, stores=[{"tiers": [{"medium": "host", "capacity": 4096}], "nods": {}}]),
        'Did you mean "nodes"?',
    ),
    (
        changed(tiers=None, stores=[{"tiers": [{"medium": "disk", "capacity": 4096}]}]),
        "stores[0].tiers[0].path is missing",
    ),
    (changed(router={"prot": 1}), 'Unknown key "prot" in router. Did you mean "port"?'),
    (changed(router={"transport": "fs"}), "router.transport is not to be set in a spec"),
    (changed(listen="all"), 'listen is "all"'),
    (changed(environment={"A": [1]}), "environment.A is [1]. It must be a text"),
    (changed(command="vllm serve"), 'command is "vllm serve". It must be a list of texts'),
    (changed(startup_timeout_s=0), "startup_timeout_s is 0"),
]


def test_models_are_folders_and_names() -> None:
    for name in ("tiny", "Qwen/Qwen3-8B", "/models/a/b", "~/models/a/b", "s3://bucket/a/b", "org/m-GGUF:Q4_K_M"):
        assert spec_from(json.dumps(changed(model=name))).model == name


@pytest.mark.parametrize(("raw", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_one_clear_error(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_from(json.dumps(raw))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_yaml_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("model: m\nengines: [\n  {name: e}\n")
    with pytest.raises(ConfigError, match=r"spec\.yaml, line 4: this is no YAML"):
        read_spec(file)
    file.write_text("model: m\nengines: [{name: e}]\nmodel: n\n")
    with pytest.raises(ConfigError, match="line 3: the key 'model' stands there twice"):
        read_spec(file)
    with pytest.raises(ConfigError, match=r"can't be read: No such file"):
        read_spec(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="no YAML"):
        spec_from("!!python/object/apply:os.system ['true']")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70_000)
    | st.text(max_size=8)
    | st.sampled_from(["nixl", "decode", "1GiB"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_any_value_anywhere_is_taken_or_is_a_config_error(data: st.DataObject) -> None:
    raw = copy.deepcopy(PAIR)
    target: Any = data.draw(st.sampled_from([raw, raw["engines"][0], raw["engines"][0]["resources"], raw["router"]]))
    target[data.draw(st.sampled_from(sorted(target)) | st.text(max_size=6))] = data.draw(json_values)
    try:
        spec = parse_spec(raw)
        router_options(spec)
    except ConfigError as error:
        assert str(error)
    else:
        for engine, index in spec.replicas[:20]:
            order_for(spec, engine, index)


@pytest.mark.parametrize("name", ["pd_cluster.yaml", "one_engine.yaml"])
def test_the_examples_are_good(name: str) -> None:
    assert read_spec(EXAMPLES / name).engines
