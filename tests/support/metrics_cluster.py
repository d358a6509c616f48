"""A small real cluster in which every metric of RayKV's has a value: a store with traffic, a Directory, a Controller.

No engine runs here. Its part is played by a view and stories, which this process reports as EngineCore would; and by
`kv_rank.KVRank`, which saves to the store, looks up and loads.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import ray
from prometheus_client.parser import text_string_to_metric_families

from raykv.actors import (
    cluster,
    controller_handle,
    directory_handle,
    ray_metrics,
    store_files,
    store_handle,
)
from raykv.actors.store_link import StoreAsker, StoreWorkerLink
from raykv.engine_messages import ChildView, EngineView, Missed, Story, TokenRange, Why
from raykv.observe.engine import EngineMeter, engine_samples
from raykv.store_messages import LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import EngineId, JobId, RequestId
from tests.support.kv_rank import E, KVRank, load_job, look_up, save_job
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

SLOT = 16384
PATIENCE = 90.0

Series = dict[str, list[tuple[dict[str, str], float]]]


class MetricsCluster:
    """Runs from construction to `close`. `work` makes some more traffic."""

    def __init__(self, folder: Path, store: str = "") -> None:
        """`folder`: of the disk tier. `store`: its name; by default one that no other has on this machine."""
        self.ray = RayCluster(num_cpus=4, dashboard=True)
        self.meter = EngineMeter()
        self.rounds = 0
        try:
            cluster.connect(self.ray.address)
            self.node = ray.get_runtime_context().get_node_id()
            directory_handle.open_directory()
            controller_handle.start()
            # A little more than a prompt in each tier: it demotes, promotes and throws out.
            tiers = (TierSpec(Medium.HOST, 24 * SLOT), TierSpec(Medium.DISK, 30 * SLOT, str(folder)))
            self.spec = StoreSpec(store or f"metrics{os.getpid()}", tiers)
            self.rank = KVRank()
            self.link = StoreWorkerLink(
                lambda: store_handle.open_store(self.spec), self.rank.attach, PATIENCE, PATIENCE
            )
            self.asker = StoreAsker(lambda: store_handle.open_store(self.spec), E, PATIENCE)
            self.link.start(PATIENCE)
            eventually(lambda: self.asker.up, "the store")
        except BaseException:
            self.ray.stop()
            raise

    # -- traffic --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Save two prompts, commit, look the older ones up, load, and report what an engine would."""
        self.rounds += 1
        name = f"p{self.rounds}"
        self.link.save([save_job(2 * self.rounds, name, list(range(20)))])
        self._done()
        self.asker.settle(Settle(commits=(JobId(2 * self.rounds),)))
        for prompt in (name, "p1", "never"):
            self.asker.ask(look_up(prompt, 22, request=f"{prompt}.{self.rounds}"))
            found = self._answer()
            if found.num_blocks and found.lease is not None:
                self.link.load([load_job(2 * self.rounds + 1, found.lease, list(range(found.num_blocks)))])
                self._done()
                self.asker.settle(Settle(releases=(found.lease,)))
        self.report()

    def _done(self) -> None:
        eventually(self.link.take_done, "a job")

    def _answer(self) -> LookedUp:
        found: list[LookedUp] = []
        eventually(lambda: found.extend(self.asker.take_answers()) or found, "a look-up")
        return found[-1]

    def report(self) -> None:
        """As EngineCore's desk does every few seconds."""
        self.meter.add(story(self.rounds))
        ray_metrics.report(engine_samples(view(self.rounds, self.node), self.meter))

    # -- what is seen -----------------------------------------------------------------------------------------

    @property
    def targets(self) -> list[str]:
        """host:port of each node's page for Prometheus."""
        return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]

    def scrape(self) -> Series:
        """RayKV's series, as Prometheus reads them."""
        found: Series = {}
        for target in self.targets:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith("ray_raykv_"):
                        found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def close(self) -> None:
        try:
            self.asker.close()
            self.link.close()
            self.rank.close()
            store_handle.shutdown_stores()
            store_files.host_path("raykv", self.spec.name).unlink(missing_ok=True)
            cluster.disconnect()
        finally:
            self.ray.stop()


def story(number: int) -> Story:
    """A request of 100 tokens: 40 from the host tier, 60 computed, which the store never had."""
    ranges = (TokenRange(0, 40, "host", "TierConnector"), TokenRange(40, 100, "computed"))
    missed = (Missed(40, 100, "TierConnector", Why.NEVER_STORED), Missed(99, 100, "", Why.ALWAYS_COMPUTED))
    return Story(
        RequestId(f"r{number}"),
        EngineId("engine-a"),
        time.time(),
        100,
        ranges,
        missed,
        0.004,
        0.02,
        0.3,
        ended=time.time(),
    )


def view(rounds: int, node: str) -> EngineView:
    """An engine with a tier child and a P/D child that has been down once, after `rounds` requests."""
    counters = {"tokens_loaded": 40 * rounds, "loads": rounds, "load_ms": 20 * rounds, "tokens_saved": 60 * rounds}
    pd = {"tokens_loaded": 0, "loads": rounds, "load_failures": rounds, "sends": rounds, "restarts": 1, "recoveries": 1}
    return EngineView(
        EngineId("engine-a"), "m", ("m",), "kv_both", os.getpid(), node, "host", time.time(), 16, 4096, 1, "compose",
        (
            ChildView("TierConnector", "TierConnector", "inline", "up", True, True, 0, (), counters),
            ChildView("NixlConnector", "NixlConnector", "actor", "down", True, True, 1, (7,), {**pd, "down_ms": 4000}),
        ),
        prefill_rate=900.0,
        load_rates={"TierConnector": 40000.0},
        tokens={"host": 40 * rounds, "computed": 60 * rounds, "gpu": rounds, "disk": rounds},
        running=2,
    )  # fmt: skip


def metrics_cluster(folder: Path) -> Iterator[MetricsCluster]:
    """For a fixture."""
    found = MetricsCluster(folder)
    try:
        yield found
    finally:
        found.close()
