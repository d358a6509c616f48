"""Joining a cluster, and every way in which that fails. Each in a process of its own: Ray joins only once."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import REPOSITORY, free_ports
from tests.support.ray_cluster import RayCluster

CONNECT = """
import os, sys
from raykv.actors import cluster
from raykv.errors import ClusterError
{setup}
try:
    info = cluster.connect({address!r})
    assert cluster.connect() == info
    print("joined", info.address, info.namespace, info.owns_connection, "missing", cluster.check_head_loss_settings())
except ClusterError as error:
    print("refused", error)
"""
PLAIN = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"}


def connect(address: str | None = None, setup: str = "", **env: str) -> str:
    """What a fresh process says about connecting."""
    done = subprocess.run(
        [sys.executable, "-c", CONNECT.format(address=address, setup=setup)],
        env={**os.environ, **PLAIN, **env},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    assert "\n" not in said  # one paragraph
    return said


# Nothing of Ray's runs where the machine looks empty.
EMPTY = "cluster.ray_processes = lambda: []"


@pytest.mark.process
def test_no_cluster_names_the_one_command() -> None:
    said = connect(setup=EMPTY)
    assert said.startswith("refused") and "`raykv start`" in said and "RAY_ADDRESS" in said


@pytest.mark.process
@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1", "local", "here:port"])
def test_an_address_that_is_none(address: str) -> None:
    said = connect(address)
    assert said.startswith("refused") and repr(address) in said and "host:port" in said


@pytest.mark.process
def test_nothing_listens_there(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    said = connect(RAY_ADDRESS=address, RAYKV_STATE_DIR=str(tmp_path))
    assert said.startswith("refused") and address in said and "Connection refused" in said and "`raykv start`" in said


@pytest.mark.process
def test_something_else_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = connect(address)
    assert said.startswith("refused") and address in said and "does not answer as a Ray head" in said


@pytest.mark.process
def test_several_clusters_must_be_told_apart(tmp_path: Path) -> None:
    two = (
        "from raykv.actors.processes import RayProcess\n"
        "cluster.ray_processes = lambda: [RayProcess(i, 'raylet', {'gcs-address': f'127.0.0.1:{i}'}) for i in (7, 8)]"
    )
    said = connect(setup=two, RAYKV_STATE_DIR=str(tmp_path), RAY_TMPDIR=str(tmp_path))
    assert said.startswith("refused") and "127.0.0.1:7, 127.0.0.1:8" in said and "RAY_ADDRESS" in said


@pytest.fixture(scope="module")
def locked_cluster() -> Iterator[RayCluster]:
    """A cluster that wants a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "the-right-token-of-this-cluster")
        cluster = RayCluster(num_cpus=2)
    yield cluster
    cluster.stop()


@pytest.mark.ray
def test_joins_what_runs_here(locked_cluster: RayCluster) -> None:
    """Found without an address, by RayKV's record; all settings against a lost head are there."""
    said = connect(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="the-right-token-of-this-cluster")
    assert said == f"joined {locked_cluster.address} raykv True missing []"


@pytest.mark.ray
def test_a_process_in_another_cluster_says_so(locked_cluster: RayCluster) -> None:
    setup = "cluster.connect(); before = cluster.connect\ncluster.connect = lambda address: before('127.0.0.1:1')"
    said = connect(setup=setup, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="the-right-token-of-this-cluster")
    assert said.startswith("refused") and locked_cluster.address in said and "127.0.0.1:1" in said


@pytest.mark.ray
@pytest.mark.parametrize(
    "env",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-wrong-token-altogether"},
        {"RAY_AUTH_MODE": "token", "HOME": "/nonexistent"},
    ],
    ids=["none", "wrong", "missing"],
)
def test_wrong_token(locked_cluster: RayCluster, env: dict[str, str]) -> None:
    said = connect(locked_cluster.address, **env)
    assert said.startswith("refused") and "token" in said and locked_cluster.address in said
    assert "RAY_AUTH_TOKEN" in said and "a-wrong-token-altogether" not in said


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "the-right-token-of-this-cluster"}


@pytest.mark.ray
def test_another_ray_version(locked_cluster: RayCluster) -> None:
    said = connect(locked_cluster.address, setup="cluster.ray.__version__ = '2.1.0'", **TOKEN)
    assert said.startswith("refused") and "2.1.0" in said and "install ray==" in said


@pytest.mark.ray
def test_another_python_version(locked_cluster: RayCluster) -> None:
    # What Ray compares with the cluster's.
    setup = "import ray\nray._private.utils.compute_version_info = lambda: (ray.__version__, '3.9.1')"
    said = connect(locked_cluster.address, setup=setup, **TOKEN)
    assert said.startswith("refused") and "3.9.1" in said and "same environment" in said


@pytest.mark.ray
def test_not_a_node_of_that_cluster(locked_cluster: RayCluster) -> None:
    setup = (
        "cluster.socket.gethostname = lambda: 'elsewhere'; cluster.services.get_node_ip_address = lambda: '10.9.8.7'"
    )
    setup += "\ncluster._LOOPBACK = ()\ncluster._use_token_file = lambda target: None"
    said = connect(locked_cluster.address, setup=setup, **TOKEN)
    assert said.startswith("refused") and "elsewhere" in said and "ray start --address" in said
