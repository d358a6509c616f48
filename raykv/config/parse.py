"""From vLLM's KVTransferConfig, or the mapping that it is made from, to a MultiConfig."""

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raykv.config.model import (
    MAX_RETRY_S,
    RENAMED,
    ChildConfig,
    ChildOptions,
    LoadPolicy,
    MultiConfig,
    RunMode,
    SaveMode,
    why_inline,
)
from raykv.config.reader import Reader, copy_json, did_you_mean, nearest, show
from raykv.errors import ConfigError, UnknownConnectorError
from raykv.types import ChildName

logger = logging.getLogger(__name__)

# The fields of vLLM 0.32's KVTransferConfig with a place in ChildConfig, and the others. Given an object of
# vLLM's class, its own fields are valid as well: a later vLLM may have more.
PLACED_FIELDS = frozenset(
    {
        "kv_connector",
        "kv_connector_module_path",
        "kv_connector_extra_config",
        "kv_role",
        "engine_id",
        "kv_load_failure_policy",
        "kv_buffer_device",
        "kv_port",
    }
)
VLLM_FIELDS = PLACED_FIELDS | {"enable_permute_local_kv"}

CHILD_OPTIONS = frozenset(f.name for f in dataclasses.fields(ChildOptions))
TOP_OPTIONS = frozenset(f.name for f in dataclasses.fields(MultiConfig)) - {"children"}
# Where a key that stands in a wrong place belongs: seen from a child, and from the top.
AT_TOP = dict.fromkeys(TOP_OPTIONS, "kv_connector_extra_config.raykv at the top")
OF_CHILD = dict.fromkeys(CHILD_OPTIONS, "kv_connector_extra_config.raykv of the child")
IN_EXTRA = {"raykv": "kv_connector_extra_config", "connectors": "kv_connector_extra_config at the top"}
BELONGS = {**AT_TOP, **OF_CHILD, **IN_EXTRA}
BELONGS_AT_TOP = {**OF_CHILD, **AT_TOP, **IN_EXTRA}

ROLES = ("kv_producer", "kv_consumer", "kv_both")
# What people call the roles: by letters alone a kv_sender is as near to kv_consumer as to kv_producer.
ROLE_WORDS = {
    "sender": "kv_producer",
    "prefill": "kv_producer",
    "prefiller": "kv_producer",
    "receiver": "kv_consumer",
    "decode": "kv_consumer",
    "decoder": "kv_consumer",
}
POLICIES = ("recompute", "fail")

MULTI = frozenset({"MultiConnector", "RayMultiConnector"})
NAME = re.compile(r"[A-Za-z0-9_.-]+")
EXAMPLE = 'such as [{"kv_connector": "NixlConnector"}]'


@dataclass(frozen=True)
class _Foreign:
    """A child's three objects, their keys checked, and its class."""

    fields: Reader
    extra: Reader
    raykv: Reader
    connector: str
    module_path: str | None


def unknown_connector(name: str, known: Iterable[str], where: str = "kv_connector") -> UnknownConnectorError:
    """The error for a class that is not found. `known`: the names there are; `where`: the path of the key."""
    return UnknownConnectorError(
        f"{where} is {show(name)}, which is not the name of a known connector. {did_you_mean(name, known)} "
        "For a class of your own set kv_connector_module_path to the Python module that defines it."
    )


def parse(kv_transfer: object) -> MultiConfig:
    """Translate a vLLM KVTransferConfig, or a mapping of its fields, completely.

    Raises ConfigError, and nothing else, for JSON that can't be used. `kv_transfer` is only read, and the
    result shares no dict, list or tuple with it.
    """
    top, valid_fields = _top(kv_transfer)
    extra = top.inner("kv_connector_extra_config")
    extra.only({"connectors", "raykv"}, BELONGS_AT_TOP)
    options = extra.inner("raykv")
    options.only(TOP_OPTIONS, BELONGS_AT_TOP)
    default = MultiConfig(children=())
    return MultiConfig(
        children=_children(top, extra, valid_fields),
        load_policy=options.choice("load_policy", LoadPolicy, default.load_policy),
        load_cost=options.flag("load_cost", default.load_cost),
        lookup_timeout_s=(
            None if options.raw.get("lookup_timeout_s") is None else options.seconds("lookup_timeout_s", 0)
        ),
        ray_address=options.text("ray_address"),
        namespace=options.text("namespace") or default.namespace,
        stories=options.count("stories", default.stories, least=0, most=100_000),
    )


def _top(kv_transfer: object) -> tuple[Reader, frozenset[str]]:
    """The fields at the top, and the names that are valid for a child's."""
    if isinstance(kv_transfer, Mapping):
        top = Reader(kv_transfer, "")
        top.only(VLLM_FIELDS, BELONGS_AT_TOP)
        return top, VLLM_FIELDS
    if kv_transfer is None or isinstance(kv_transfer, str | int | float | Sequence):
        raise ConfigError(f"The KV transfer config is {show(kv_transfer)}. It must be an object.")
    valid = VLLM_FIELDS
    if dataclasses.is_dataclass(kv_transfer):
        valid = valid | {f.name for f in dataclasses.fields(kv_transfer)}
    return Reader({name: getattr(kv_transfer, name, None) for name in PLACED_FIELDS}, ""), valid


def _children(top: Reader, extra: Reader, valid_fields: frozenset[str]) -> tuple[ChildConfig, ...]:
    connectors = extra.raw.get("connectors")
    if connectors is None:
        raise ConfigError(f"{extra.path('connectors')} is missing. List the child connectors there, {EXAMPLE}.")
    if not isinstance(connectors, list | tuple) or not connectors:
        raise extra.wrong("connectors", f"a list with at least one child connector, {EXAMPLE}")
    found = [_foreign(raw, index, valid_fields) for index, raw in enumerate(connectors)]
    names = _names(found)
    return tuple(_child(index, child, name, top) for index, (child, name) in enumerate(zip(found, names, strict=True)))


def _foreign(raw: object, index: int, valid_fields: frozenset[str]) -> _Foreign:
    where = f"connectors[{index}]"
    if not isinstance(raw, Mapping):
        raise ConfigError(f'{where} is {show(raw)}. It must be an object, such as {{"kv_connector": "NixlConnector"}}.')
    child = Reader(raw, where)
    child.only(valid_fields, BELONGS)
    if child.raw.get("enable_permute_local_kv") is not None:
        child.flag("enable_permute_local_kv", False)
    connector = child.text("kv_connector")
    if connector is None:
        raise ConfigError(f"{child.path('kv_connector')} is missing. Name the child's connector class there.")
    if connector in MULTI:
        raise ConfigError(
            f"{child.path('kv_connector')} is {show(connector)}: a MultiConnector can't be another's child. "
            "Put its children into this list instead."
        )
    module_path = child.text("kv_connector_module_path")
    if module_path is None and connector in RENAMED:
        logger.warning("%s: vLLM calls %s %s now; that is what is loaded.", where, connector, RENAMED[connector])
        connector = RENAMED[connector]
    extra = child.inner("kv_connector_extra_config")
    for key in extra.raw:  # all its other keys are the child's own business
        if key != "raykv" and nearest(str(key), ["raykv"], cutoff=0.8):
            raise ConfigError(f'Unknown key {show(key)} in {extra.where}. Did you mean "raykv"?')
    raykv = extra.inner("raykv")
    raykv.only(CHILD_OPTIONS, {**BELONGS, **dict.fromkeys(VLLM_FIELDS, where)})
    return _Foreign(child, extra, raykv, connector, module_path)


def _names(children: Sequence[_Foreign]) -> list[ChildName]:
    """Each child's name: the given one, else that of its class, made unique."""
    given: dict[str, str] = {}
    for child in children:
        name = child.raykv.text("name")
        if name is None:
            continue
        where = child.raykv.path("name")
        if not NAME.fullmatch(name):
            raise child.raykv.wrong("name", "made of the letters A-Z and a-z, digits, '_', '.' and '-'")
        if name in given:
            raise ConfigError(f"{where} is {show(name)}, as is {given[name]}. Give each child a name of its own.")
        given[name] = where
    taken = set(given)
    names = []
    for child in children:
        name = child.raykv.text("name")
        if name is None:
            base = re.sub(r"[^A-Za-z0-9_.-]", "_", child.connector)
            name, number = base, 1
            while name in taken:
                number += 1
                name = f"{base}-{number}"
            taken.add(name)
        names.append(ChildName(name))
    return names


def _child(index: int, child: _Foreign, name: ChildName, top: Reader) -> ChildConfig:
    fields = child.fields
    role = _inherited(fields, top, "kv_role", ROLES, ROLE_WORDS)
    if role is None:
        raise ConfigError(
            f"{fields.path('kv_role')} is missing, and so is kv_role at the top. Set one: {', '.join(ROLES)}."
        )
    found = ChildConfig(
        index=index,
        connector=child.connector,
        module_path=child.module_path,
        role=role,
        engine_id=_inherited(fields, top, "engine_id"),
        load_failure_policy=_inherited(fields, top, "kv_load_failure_policy", POLICIES) or "fail",  # vLLM's default
        buffer_device=_inherited(fields, top, "kv_buffer_device"),
        kv_port=None if fields.raw.get("kv_port") is None else fields.count("kv_port", 0, 0, 65_535),
        extra=copy_json({key: value for key, value in child.extra.raw.items() if key != "raykv"}),
        options=_options(child, name),
        more_fields=copy_json({key: v for key, v in fields.raw.items() if key not in PLACED_FIELDS}),
    )
    return _as_tier(found, child, top) if found.is_tier else found


def _as_tier(found: ChildConfig, child: _Foreign, top: Reader) -> ChildConfig:
    """RayKV's own connector joins the cluster of the whole, unless it names another."""
    if not found.saves and (not found.options.load or found.role == "kv_producer"):
        raise ConfigError(
            f"{child.fields.where}: the child {found.name} neither loads nor saves, with kv_role {show(found.role)}, "
            f'"load": {show(found.options.load)} and "save": {show(found.options.save)}. Take it out, or change one.'
        )
    whole = top.inner("kv_connector_extra_config").inner("raykv").raw
    shared = {key: whole[key] for key in ("ray_address", "namespace") if whole.get(key) is not None}
    return dataclasses.replace(found, extra={**shared, **found.extra})


def _inherited(
    child: Reader, top: Reader, key: str, valid: Sequence[str] = (), words: Mapping[str, str] | None = None
) -> str | None:
    """The child's own value, else the top's; one of `valid` if given. `words`: what is meant by others."""
    own = child.text(key)
    reader = top if own is None else child
    value = own if own is not None else top.text(key)
    if value is None or not valid or value in valid:
        return value
    meant = (words or {}).get(value.lower().removeprefix("kv_"))
    raise ConfigError(
        f"{reader.path(key)} is {show(value)}. "
        + (f"Did you mean {show(meant)}? Valid: {', '.join(valid)}." if meant else did_you_mean(value, valid))
    )


def _options(child: _Foreign, name: ChildName) -> ChildOptions:
    raykv = child.raykv
    default = ChildOptions(name)
    why = why_inline(child.connector, child.module_path)
    run = raykv.choice("run", RunMode, RunMode.INLINE if why else default.run)
    if why and run is not RunMode.INLINE:
        raise ConfigError(
            f'{raykv.path("run")} is "{run}", but {child.connector} can\'t run in an actor: {why}. '
            'Use "inline", or leave the key out.'
        )
    warm_spare = raykv.flag("warm_spare", default.warm_spare)
    if warm_spare and run is RunMode.INLINE:
        raise ConfigError(
            f"{raykv.path('warm_spare')} is true, but {name} runs inline: it has no actor to keep a "
            "spare for. Leave the key out."
        )
    return ChildOptions(
        name=name,
        run=run,
        load=raykv.flag("load", default.load),
        save=raykv.choice("save", SaveMode, default.save),
        timeout_s=raykv.seconds("timeout_s", default.timeout_s),
        load_timeout_s=raykv.seconds("load_timeout_s", default.load_timeout_s),
        promise_timeout_s=raykv.seconds("promise_timeout_s", default.promise_timeout_s),
        startup_timeout_s=raykv.seconds("startup_timeout_s", default.startup_timeout_s),
        lookup_timeout_s=raykv.seconds("lookup_timeout_s", default.lookup_timeout_s),
        max_faults=raykv.count("max_faults", default.max_faults),
        fault_window_s=raykv.seconds("fault_window_s", default.fault_window_s),
        retry_s=raykv.seconds("retry_s", default.retry_s, most=MAX_RETRY_S),
        warm_spare=warm_spare,
    )
