"""The foreign JSON at the door: what is inherited, what is refused, and with which words."""

import dataclasses
import importlib.util
import json
import logging
import math
import pickle
import random
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import (
    ChildConfig,
    ChildOptions,
    LoadPolicy,
    MultiConfig,
    RunMode,
    SaveMode,
    known_synchronous,
    parse,
    unknown_connector,
)
from raykv.config.model import INLINE_ONLY, RENAMED, SYNCHRONOUS
from raykv.config.parse import VLLM_FIELDS
from raykv.errors import ConfigError, RayKVError, UnknownConnectorError
from tests.support.examples import examples

CHILD = "connectors[0]"
CHILD_RAYKV = "kv_connector_extra_config.raykv"


def top(*children: Any, raykv: Any = None, **fields: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"connectors": list(children)}
    if raykv is not None:
        extra["raykv"] = raykv
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "raykv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    } | fields


def child(connector: str = "NixlConnector", raykv: Any = None, **fields: Any) -> dict[str, Any]:
    extra = {} if raykv is None else {"kv_connector_extra_config": {"raykv": raykv}}
    return {"kv_connector": connector} | extra | fields


def one(raw: dict[str, Any], **top_fields: Any) -> ChildConfig:
    (result,) = parse(top(raw, **top_fields)).children
    return result


def refused(config: object, *words: str) -> str:
    """The message of the refusal: one paragraph that has all these words."""
    with pytest.raises(ConfigError) as caught:
        parse(config)
    message = str(caught.value)
    assert isinstance(caught.value, RayKVError)
    assert "\n" not in message and len(message) < 700
    for word in words:
        assert word in message, message
    return message


# --- what a good config means ---


def test_defaults() -> None:
    config = parse(top(child()))
    assert config == MultiConfig(
        children=(
            ChildConfig(
                index=0,
                connector="NixlConnector",
                module_path=None,
                role="kv_both",
                engine_id=None,
                load_failure_policy="fail",
                buffer_device=None,
                kv_port=None,
                extra={},
                options=ChildOptions(name=config.children[0].name),
            ),
        )
    )
    assert config.load_policy is LoadPolicy.FIRST
    assert (config.lookup_timeout_s, config.ray_address) == (None, None)
    assert (config.namespace, config.stories) == ("raykv", 1000)
    options = config.children[0].options
    assert (options.name, options.run, options.load, options.save) == (
        "NixlConnector",
        RunMode.ACTOR,
        True,
        SaveMode.ALL,
    )
    assert (options.timeout_s, options.startup_timeout_s, options.lookup_timeout_s) == (10.0, 180.0, 5.0)
    assert (options.max_faults, options.fault_window_s, options.retry_s) == (3, 60.0, 5.0)
    assert options.warm_spare is False


def test_every_option_is_read() -> None:
    options: dict[str, Any] = {
        "name": "p-d.1_x",
        "run": "inline",
        "load": False,
        "save": "none",
        "timeout_s": 1,
        "load_timeout_s": 4,
        "promise_timeout_s": 8,
        "startup_timeout_s": 2.5,
        "lookup_timeout_s": 0.25,
        "max_faults": 7,
        "fault_window_s": 9,
        "retry_s": 60,
        "warm_spare": False,
    }
    assert dataclasses.asdict(one(child(raykv=options)).options) == options
    assert one(child(raykv={"warm_spare": True})).options.warm_spare is True
    whole: dict[str, Any] = {
        "load_policy": "longest",
        "lookup_timeout_s": 1.5,
        "ray_address": "ray-head:6379",
        "namespace": "team",
        "stories": 0,
    }
    config = dataclasses.asdict(parse(top(child(), raykv=whole)))
    assert {key: config[key] for key in whole} == whole


def test_a_child_inherits_from_the_top_and_its_own_value_wins() -> None:
    inherited = one(
        child(),
        kv_role="kv_producer",
        engine_id="engine",
        kv_load_failure_policy="recompute",
        kv_buffer_device="cpu",
        kv_port=1,
    )
    assert inherited.role == "kv_producer"
    assert inherited.engine_id == "engine"
    assert inherited.load_failure_policy == "recompute"
    assert inherited.buffer_device == "cpu"
    assert inherited.kv_port is None  # as in vLLM
    own = {
        "kv_role": "kv_consumer",
        "engine_id": "mine",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cuda",
        "kv_port": 5,
    }
    overriding = one(child(**own), engine_id="engine", kv_load_failure_policy="recompute", kv_buffer_device="cpu")
    assert {key: overriding.kv_transfer_kwargs()[key] for key in own} == own
    # An explicit null is not a value of one's own.
    assert one(child(kv_role=None, engine_id=None), engine_id="engine").engine_id == "engine"


def test_a_vllm_object_does_as_well_as_a_mapping() -> None:
    raw = top(child(), engine_id="engine", kv_load_failure_policy="recompute")
    assert parse(SimpleNamespace(**raw)) == parse(raw)


def test_the_fields_of_a_later_vllm_are_valid_for_its_children() -> None:
    later = dataclasses.make_dataclass("KVTransferConfig", [*top(), "kv_new_field"])
    raw = top(child(kv_new_field={"a": [1]}, enable_permute_local_kv=True))
    kwargs = parse(later(**raw, kv_new_field=None)).children[0].kv_transfer_kwargs()
    assert kwargs["kv_new_field"] == {"a": [1]}
    assert kwargs["enable_permute_local_kv"] is True
    refused(raw, '"kv_new_field"', CHILD)


def test_kv_transfer_kwargs_is_the_childs_own_copy_without_raykvs_part() -> None:
    raw = child(kv_connector_extra_config={"path": {"a": [1, (2,)]}, "raykv": {"name": "x"}}, engine_id="e")
    before = json.dumps(raw)
    config = one(raw)
    kwargs = config.kv_transfer_kwargs()
    assert kwargs == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"path": {"a": [1, (2,)]}},
    }
    kwargs["kv_connector_extra_config"]["path"]["a"].append(3)
    assert config.kv_transfer_kwargs()["kv_connector_extra_config"] == {"path": {"a": [1, (2,)]}}
    assert json.dumps(raw) == before


def test_the_result_is_frozen_and_crosses_processes() -> None:
    config = parse(top(child(kv_connector_extra_config={"a": {"b": 1}}), child("ExampleConnector")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.children[0].options.load = False  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def names(*children: Any) -> list[str]:
    return [c.name for c in parse(top(*children)).children]


def test_children_of_one_class_get_names_of_their_own() -> None:
    nixl = child()
    assert names(nixl, nixl, child("ExampleConnector"), nixl) == [
        "NixlConnector",
        "NixlConnector-2",
        "ExampleConnector",
        "NixlConnector-3",
    ]
    # A given name is kept, wherever it stands.
    assert names(nixl, nixl, child(raykv={"name": "NixlConnector-2"})) == [
        "NixlConnector",
        "NixlConnector-3",
        "NixlConnector-2",
    ]
    assert names(child("Verbinder_ä")) == ["Verbinder__"]


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_a_class_that_needs_vllms_process_runs_inline(connector: str) -> None:
    assert one(child(connector)).options.run is RunMode.INLINE
    assert one(child(connector, raykv={"run": "inline"})).options.run is RunMode.INLINE
    refused(top(child(connector, raykv={"run": "actor"})), f"{CHILD}.{CHILD_RAYKV}.run", connector, "stream")
    # A class of the user's own by that name is the user's to know.
    own = child(connector, raykv={"run": "actor"}, kv_connector_module_path="my.module")
    assert one(own).options.run is RunMode.ACTOR


def test_the_old_name_of_the_example_connector(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raykv"):
        config = one(child("SharedStorageConnector"))
    assert (config.connector, config.name) == ("ExampleConnector", "ExampleConnector")
    assert "SharedStorageConnector" in caplog.text and "ExampleConnector" in caplog.text
    own = one(child("SharedStorageConnector", kv_connector_module_path="my.module"))
    assert own.connector == "SharedStorageConnector"


def test_known_synchronous() -> None:
    assert known_synchronous(one(child("ExampleConnector")))
    assert known_synchronous(one(child("SharedStorageConnector")))
    assert not known_synchronous(one(child("NixlConnector")))
    assert not known_synchronous(one(child("ExampleConnector", kv_connector_module_path="my.module")))


# --- what is refused ---


@pytest.mark.parametrize("extra", [None, {}, {"connectors": None}])
def test_connectors_missing(extra: Any) -> None:
    refused(top(kv_connector_extra_config=extra), "kv_connector_extra_config.connectors is missing")


@pytest.mark.parametrize("connectors", [[], {}, {"kv_connector": "NixlConnector"}, "NixlConnector", 3, True])
def test_connectors_not_a_list_with_children(connectors: Any) -> None:
    refused(top(kv_connector_extra_config={"connectors": connectors}), "connectors is", "a list")


@pytest.mark.parametrize("raw", [None, "NixlConnector", 3, []])
def test_a_child_that_is_no_object(raw: Any) -> None:
    refused(top(child(), raw), "connectors[1] is", "object")


@pytest.mark.parametrize("raw", [{}, {"kv_connector": None}])
def test_a_child_without_a_class(raw: Any) -> None:
    refused(top(raw), f"{CHILD}.kv_connector is missing")


@pytest.mark.parametrize("config", [None, "x", 3, True, [], b"x"])
def test_a_config_that_is_no_object(config: Any) -> None:
    refused(config, "must be an object")


@pytest.mark.parametrize("connector", ["MultiConnector", "RayMultiConnector"])
def test_a_nested_multi_connector(connector: str) -> None:
    refused(top(child(connector)), f"{CHILD}.kv_connector", connector, "children into this list")


@pytest.mark.parametrize(
    ("config", "key", "place", "meant"),
    [
        (
            top(kv_connector_extra_config={"conectors": []}),
            "conectors",
            "kv_connector_extra_config",
            "connectors",
        ),
        (top(child(), raykv={"load_polcy": "first"}), "load_polcy", CHILD_RAYKV, "load_policy"),
        (top(child(), kv_rolle="kv_both"), "kv_rolle", "the KV transfer config", "kv_role"),
        (
            top(child(kv_connector_modul_path="m")),
            "kv_connector_modul_path",
            CHILD,
            "kv_connector_module_path",
        ),
        (top(child(), {"kv_conector": "A"}), "kv_conector", "connectors[1]", "kv_connector"),
        (top(child(), child(raykv={"timeout": 3})), "timeout", f"connectors[1].{CHILD_RAYKV}", "timeout_s"),
        (top(child(raykv={"Load": True})), "Load", f"{CHILD}.{CHILD_RAYKV}", "load"),
        (top(child(kv_connector_extra_config={"rayvk": {}})), "rayvk", CHILD, "raykv"),
        (top(child(kv_connector_extra_config={"RayKV": {}})), "RayKV", CHILD, "raykv"),
    ],
)
def test_a_misspelt_key(config: Any, key: str, place: str, meant: str) -> None:
    refused(config, f'Unknown key "{key}" in {place}', f'Did you mean "{meant}"?')


def test_a_key_that_is_near_to_none() -> None:
    message = refused(top(child(raykv={"xyzzy": 1})), '"xyzzy"', "Valid: fault_window_s, ")
    assert "Did you mean" not in message
    refused(top(child(**{"\n": 1})), r'"\n"')
    refused(top({"kv_connector": "A", 3: 4}), "Unknown key 3")


def test_a_childs_own_extra_keys_are_its_own_business() -> None:
    extra = {"lmcache.mp.port": 1, "timeout_s": 3, "ray": 1, "connectors": []}
    assert one(child(kv_connector_extra_config=extra)).extra == extra


@pytest.mark.parametrize(
    ("config", "belongs"),
    [
        (top(child(), load_policy="first"), f"{CHILD_RAYKV} at the top"),
        (top(child(), lookup_timeout_s=1), f"{CHILD_RAYKV} at the top"),
        (top(child(), connectors=[]), "kv_connector_extra_config at the top"),
        (top(child(connectors=[])), "kv_connector_extra_config at the top"),
        (top(child(timeout_s=3)), f"{CHILD_RAYKV} of the child"),
        (top(child(lookup_timeout_s=3)), f"{CHILD_RAYKV} of the child"),
        (top(child(), {"kv_connector": "A", "raykv": {}}), "kv_connector_extra_config"),
        (top(child()) | {"raykv": {}}, "kv_connector_extra_config"),
        (top(child(raykv={"load_policy": "first"})), f"{CHILD_RAYKV} at the top"),
        (top(child(raykv={"kv_role": "kv_both"})), CHILD),
        (top(child(), raykv={"timeout_s": 3}), f"{CHILD_RAYKV} of the child"),
    ],
)
def test_a_key_in_the_wrong_place(config: Any, belongs: str) -> None:
    refused(config, "Unknown key", f"It belongs in {belongs}.")


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("kv_sender", "kv_producer"),
        ("kv_prefill", "kv_producer"),
        ("receiver", "kv_consumer"),
        ("kv_produser", "kv_producer"),
        ("both", "kv_both"),
    ],
)
def test_a_bad_role(role: str, meant: str) -> None:
    refused(top(child(kv_role=role)), f'{CHILD}.kv_role is "{role}"', f'Did you mean "{meant}"?')
    message = refused(top(child(), kv_role=role), f'kv_role is "{role}"')
    assert message.startswith("kv_role")  # the top's is the one to mend


def test_no_role_anywhere() -> None:
    refused(top(child(), kv_role=None), f"{CHILD}.kv_role is missing", "kv_role at the top", "kv_both")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (child(kv_load_failure_policy="recomput"), ["kv_load_failure_policy", '"recompute"']),
        (child(raykv={"run": "actr"}), ["raykv.run", 'mean "actor"']),
        (child(raykv={"run": None}), ["raykv.run is null", "actor, inline"]),
        (child(raykv={"save": "all "}), ["raykv.save", 'mean "all"']),
        (child(raykv={"save": True}), ["raykv.save is true", "all, none"]),
    ],
)
def test_a_bad_choice(raw: Any, words: list[str]) -> None:
    refused(top(raw), CHILD, *words)


def test_a_bad_load_policy() -> None:
    refused(top(child(), raykv={"load_policy": "fist"}), f'{CHILD_RAYKV}.load_policy is "fist"', 'mean "first"')
    refused(top(child(), raykv={"load_policy": "composed"}), 'mean "compose"')


TIMES = [
    "timeout_s",
    "load_timeout_s",
    "promise_timeout_s",
    "startup_timeout_s",
    "lookup_timeout_s",
    "fault_window_s",
    "retry_s",
]
BAD_TIMES = [0, -1, -0.5, math.nan, math.inf, 10**400, 10**5, True, False, None, "5", [5], {}]


@pytest.mark.parametrize("value", BAD_TIMES, ids=lambda value: repr(value)[:9])
def test_a_bad_time(value: Any) -> None:
    for key in TIMES:
        refused(top(child(raykv={key: value})), f"{CHILD}.{CHILD_RAYKV}.{key} is ", "seconds above 0")
    if value is not None:
        refused(top(child(), raykv={"lookup_timeout_s": value}), f"{CHILD_RAYKV}.lookup_timeout_s is ")


def test_the_retry_pause_has_a_bound_of_its_own() -> None:
    refused(top(child(raykv={"retry_s": 61})), "retry_s is 61", "at most 60")


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "3", 100_001])
def test_a_bad_count_of_stories(value: Any) -> None:
    refused(top(child(), raykv={"stories": value}), f"{CHILD_RAYKV}.stories is ", "whole number from 0 to 100000")


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "3", 10**400])
def test_a_bad_fault_count(value: Any) -> None:
    refused(top(child(raykv={"max_faults": value})), "max_faults is ", "whole number")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (child(raykv={"load": 1}), ["raykv.load is 1", "true or false"]),
        (child(raykv={"warm_spare": "true"}), ['raykv.warm_spare is "true"', "true or false"]),
        (child(raykv=[]), ["raykv is []", "object"]),
        (child(raykv=True), ["raykv is true", "object"]),
        (child(kv_connector_extra_config="a"), ['kv_connector_extra_config is "a"', "object"]),
        (child(engine_id=3), ["engine_id is 3", "text"]),
        (child(engine_id=""), ['engine_id is ""', "text"]),
        (child(kv_connector_module_path=" "), ["kv_connector_module_path", "not empty"]),
        ({"kv_connector": ["A"]}, ['kv_connector is ["A"]', "text"]),
        (child(kv_role=True), ["kv_role is true", "text"]),
        (child(kv_port=True), ["kv_port is true", "65535"]),
        (child(kv_port="1"), ['kv_port is "1"', "65535"]),
        (child(kv_port=65536), ["kv_port is 65536", "65535"]),
        (child(kv_buffer_device=0), ["kv_buffer_device is 0", "text"]),
        (child(enable_permute_local_kv=1), ["enable_permute_local_kv is 1", "true or false"]),
    ],
)
def test_a_wrong_type(raw: Any, words: list[str]) -> None:
    refused(top(raw), CHILD, *words)


def test_a_wrong_type_at_the_top() -> None:
    refused(top(kv_connector_extra_config=[1]), "kv_connector_extra_config is [1]", "object")
    refused(top(child(), raykv=3), f"{CHILD_RAYKV} is 3", "object")
    refused(top(child(), raykv={"namespace": ""}), f"{CHILD_RAYKV}.namespace", "text")
    refused(top(child(), raykv={"ray_address": 6379}), f"{CHILD_RAYKV}.ray_address is 6379", "text")
    refused(top(child(), engine_id=3), "engine_id is 3", "text")


@pytest.mark.parametrize("name", ["a b", "a/b", "ä", "a\n", "a:b"])
def test_a_bad_name(name: str) -> None:
    refused(top(child(raykv={"name": name})), f"{CHILD}.{CHILD_RAYKV}.name is ", "letters")


def test_a_name_given_twice() -> None:
    raw = child(raykv={"name": "x"})
    refused(top(raw, child(), raw), 'connectors[2].kv_connector_extra_config.raykv.name is "x"', CHILD)


def test_a_warm_spare_needs_an_actor() -> None:
    refused(top(child(raykv={"run": "inline", "warm_spare": True})), "warm_spare is true", "inline")
    refused(top(child("OffloadingConnector", raykv={"warm_spare": True})), "warm_spare is true", "inline")


def test_a_config_without_end() -> None:
    deep: dict[str, Any] = {}
    deep["deep"] = [deep]
    refused(top(child(kv_connector_extra_config=deep)), "levels deep")
    refused(top(child(raykv={"timeout_s": deep})), "timeout_s is a dict")
    refused(top(child(raykv={"name": "x y" * 10_000})), "...")


def test_unknown_connector() -> None:
    error = unknown_connector("NixlConector", ["NixlConnector", "ExampleConnector"], where="connectors[1].kv_connector")
    assert isinstance(error, UnknownConnectorError) and isinstance(error, ConfigError)
    for words in [
        'connectors[1].kv_connector is "NixlConector"',
        'mean "NixlConnector"?',
        "kv_connector_module_path",
    ]:
        assert words in str(error)
    assert "Did you mean" not in str(unknown_connector("Zzz", ["NixlConnector"]))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# --- what RayKV knows of vLLM, against the vLLM that is installed ---


def vllm_source(path: str) -> str:
    """Read, not imported: that takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / path).read_text()


def test_the_fields_are_vllms() -> None:
    for name in VLLM_FIELDS:
        assert f"\n    {name}: " in vllm_source("config/kv_transfer.py"), name


def test_the_class_names_are_vllms() -> None:
    registry = vllm_source("distributed/kv_transfer/kv_connector/factory.py")
    for name in {*INLINE_ONLY, *SYNCHRONOUS, *RENAMED.values()} - set(RENAMED):
        assert f'"{name}"' in registry, name
    for name in RENAMED:
        assert f'"{name}"' not in registry, name


# --- whatever comes in ---

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
words = st.sampled_from(
    ["MultiConnector", "NixlConnector", "kv_both", "recompute", "first", "longest", "actor", "inline", "all"]
)
option_keys = st.sampled_from(
    sorted({f.name for f in dataclasses.fields(ChildOptions)} | {f.name for f in dataclasses.fields(MultiConfig)})
)
field_keys = st.sampled_from(sorted(top(engine_id=1, kv_port=1, kv_buffer_device=1, kv_load_failure_policy=1)))
keys = option_keys | field_keys | st.sampled_from(["connectors", "raykv"]) | st.text(max_size=8)
anything = st.recursive(
    scalars | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(good, good, good, anything)


def objects(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


seconds = st.floats(min_value=0, max_value=60, exclude_min=True) | st.integers(1, 60)
nonempty = st.text(min_size=1, max_size=8).filter(str.strip)
child_options = {
    "run": st.sampled_from(["actor", "inline"]),
    "load": st.booleans(),
    "save": st.sampled_from(["all", "none"]),
    **{key: seconds for key in TIMES},
    "max_faults": st.integers(1, 100),
}
child_fields = {
    "kv_role": st.sampled_from(["kv_producer", "kv_consumer", "kv_both"]) | st.none(),
    "engine_id": nonempty | st.none(),
    "kv_load_failure_policy": st.sampled_from(["recompute", "fail"]),
    "kv_buffer_device": st.sampled_from(["cpu", "cuda"]),
    "kv_port": st.integers(0, 65535) | st.none(),
    "kv_connector_module_path": st.just("my.module"),
    "enable_permute_local_kv": st.booleans(),
}
own_extra = st.dictionaries(st.sampled_from(["shared_storage_path", "host", "backends"]), anything, max_size=2)
classes = st.sampled_from(["NixlConnector", "ExampleConnector", "SharedStorageConnector", "LMCacheMPConnector"])
top_options = {
    "load_policy": st.sampled_from(["first", "longest"]),
    "lookup_timeout_s": seconds | st.none(),
    "ray_address": nonempty | st.none(),
    "namespace": nonempty,
    "stories": st.integers(0, 100_000),
}


@st.composite
def valid_configs(draw: st.DrawFn) -> dict[str, Any]:
    children = []
    for i in range(draw(st.integers(1, 4))):
        raykv = draw(objects({}, child_options | {"name": st.just(f"child.{i}")}))
        extra = draw(own_extra) | draw(st.sampled_from([{}, {"raykv": raykv}]))
        fields = draw(objects({"kv_connector": classes}, child_fields))
        children.append(fields | {"kv_connector_extra_config": extra})
    return top(
        *children,
        raykv=draw(objects({}, top_options)),
        engine_id="engine",
        kv_load_failure_policy=draw(st.sampled_from(["recompute", "fail"])),
    )


noisy_children = objects(
    {"kv_connector": mostly(classes)},
    {key: mostly(value) for key, value in child_fields.items()}
    | {"kv_connector_extra_config": mostly(objects({}, {"raykv": mostly(objects({}, child_options))}))},
)
noisy_configs = objects(
    {},
    {
        "kv_role": mostly(st.just("kv_both")),
        "engine_id": anything,
        "kv_connector_extra_config": mostly(
            objects(
                {"connectors": mostly(st.lists(mostly(noisy_children), max_size=3))},
                {"raykv": mostly(objects({}, {key: mostly(value) for key, value in top_options.items()}))},
            )
        ),
    },
)


@settings(max_examples=examples(30), deadline=None)
@given(anything | noisy_configs)
def test_parse_raises_nothing_but_config_errors(raw: Any) -> None:
    before = repr(raw)
    try:
        config = parse(raw)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert config.children
        assert len({c.name for c in config.children}) == len(config.children)
        assert [c.index for c in config.children] == list(range(len(config.children)))
    assert repr(raw) == before


@settings(max_examples=examples(20), deadline=None)
@given(valid_configs())
def test_a_valid_config_round_trips(raw: dict[str, Any]) -> None:
    """What the result says, written down as JSON again, means the same, now with nothing left to inherit."""
    first = parse(raw)
    children = []
    for c in first.children:
        kwargs = c.kv_transfer_kwargs()
        assert "raykv" not in kwargs["kv_connector_extra_config"]
        kwargs["kv_connector_extra_config"]["raykv"] = dataclasses.asdict(c.options)
        children.append(kwargs)
    options = {f.name: getattr(first, f.name) for f in dataclasses.fields(first) if f.name != "children"}
    again = json.loads(json.dumps(top(*children, raykv=options, kv_role=None)))
    assert repr(parse(again)) == repr(first)  # repr: nan is not equal to itself


@settings(max_examples=examples(20), deadline=None)
@given(valid_configs(), st.randoms(use_true_random=False))
def test_one_changed_letter_in_a_key_is_caught(raw: dict[str, Any], rng: random.Random) -> None:
    """A misspelt key is never ignored, at any place where the keys are RayKV's or vLLM's to know."""
    extra = raw["kv_connector_extra_config"]
    targets = [raw, extra, extra["raykv"], *extra["connectors"]]
    targets += [c["kv_connector_extra_config"].get("raykv", {}) for c in extra["connectors"]]
    target = rng.choice([t for t in targets if t])
    key = rng.choice(sorted(target))
    place = rng.randrange(len(key))
    wrong = key[:place] + rng.choice(string.ascii_uppercase) + key[place + 1 :]
    target[wrong] = target.pop(key)
    refused(raw, f'Unknown key "{wrong}"')
