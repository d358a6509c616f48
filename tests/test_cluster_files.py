"""ray_cluster.yaml and examples/kuberay.yaml: by Ray's own schema, and as far as their shape can be known offline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raykv.config.cluster_parse import parse_spec

ROOT = Path(__file__).resolve().parents[1]
LABEL = "raykv/pool"
SURVIVES_HEAD = "RAY_gcs_rpc_server_reconnect_timeout_s"


def ray_up() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


@pytest.fixture
def kuberay() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())


@pytest.mark.ray
def test_ray_up_takes_the_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(ray_up()))
    validate_config(config)
    assert set(config["available_node_types"]) == {"head", "prefill", "decode", "store"}
    assert config["head_node_type"] == "head"
    wrong = copy.deepcopy(ray_up())
    wrong["available_node_types"]["prefill"]["min_workrs"] = 1
    with pytest.raises(Exception, match="min_workrs"):
        validate_config(prepare_config(wrong))


def test_the_labels_are_those_of_the_example_spec() -> None:
    """Ray does not check labels, and an engine with a label that no node has waits for ever."""
    types = ray_up()["available_node_types"]
    pools = {name: kind["labels"] for name, kind in types.items() if "labels" in kind}
    assert pools == {name: {LABEL: name} for name in ("prefill", "decode", "store")}
    spec = parse_spec(yaml.safe_load((ROOT / "examples" / "pd_cluster.yaml").read_text()))
    for engine in spec.engines:
        assert dict(engine.selector.labels) in pools.values()
    for store in spec.stores:
        assert store.selector is None or dict(store.selector.labels) in pools.values()


def test_every_ray_start_survives_the_loss_of_the_head_and_wants_a_token() -> None:
    config = ray_up()
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        [start] = [command for command in commands if "ray start" in command]
        assert f"{SURVIVES_HEAD}=100000" in start
        assert "RAY_AUTH_MODE=token" in start
    assert "RAY_gcs_storage=rocksdb" in " ".join(config["head_start_ray_commands"])


def test_kuberay_is_a_ray_cluster_of_the_same_shape(kuberay: dict[str, Any]) -> None:
    assert (kuberay["apiVersion"], kuberay["kind"]) == ("ray.io/v1", "RayCluster")
    spec = kuberay["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert groups.keys() == {"prefill", "decode", "store"}
    images = {container["image"] for container in containers(spec["headGroupSpec"])}
    for name, group in groups.items():
        assert group["labels"] == {LABEL: name}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        images |= {container["image"] for container in containers(group)}
    assert len(images) == 1, "all nodes must run the same Ray, vLLM and RayKV"


def test_kuberays_pods_can_hold_stores_and_outlive_the_head(kuberay: dict[str, Any]) -> None:
    spec = kuberay["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in containers(group):
            names = {variable["name"]: variable["value"] for variable in container["env"]}
            assert names[SURVIVES_HEAD] == "100000"
            volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for group in spec["workerGroupSpecs"]:
        mounts = {mount["mountPath"]: mount["name"] for c in containers(group) for mount in c["volumeMounts"]}
        shm = next(v for v in group["template"]["spec"]["volumes"] if v["name"] == mounts["/dev/shm"])
        memory = containers(group)[0]["resources"]["limits"]["memory"]
        assert gi(shm["emptyDir"]["sizeLimit"]) < gi(memory), "shared memory counts as the pod's"


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group["template"]["spec"]["containers"]


def gi(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))
