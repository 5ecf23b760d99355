"""GET /metrics, in Prometheus' text: made at each scrape from what the fleet knows, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpod.proxy.replicas import Fleet

# kind in Fleet.tally -> (name, help, labels)
COUNTERS = {
    "requests": (
        "grpod_proxy_requests_total",
        "Completions by how they ended: ok, failed_over, failed, refused, client_left",
        ("outcome",),
    ),
    "routed": (
        "grpod_proxy_routed_total",
        "Choices of a replica by reason; several a request when it fails over or waits",
        ("reason",),
    ),
    "spoilt": ("grpod_proxy_spoilt_answers_total", "Answers that did not come, or not whole", ("replica", "why")),
    "broadcasts": ("grpod_proxy_broadcasts_total", "Loads, unloads, pauses and resumes", ("call", "outcome")),
}
# name -> (help, labelled by replica?)
GAUGES = {
    "grpod_proxy_replica_up": ("1: healthy at the last look", True),
    "grpod_proxy_replica_adapters": ("Adapters that it holds", True),
    "grpod_proxy_outstanding_tokens": ("Tokens of prompts and completions asked for and not yet answered", True),
    "grpod_proxy_adapters": ("Live adapters", False),
    "grpod_proxy_paused": ("1: the replicas are paused", False),
}


class FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        for kind, (name, help_text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=labels)
            for key, count in self._fleet.tally.items():
                if key[0] == kind:
                    counter.add_metric(key[1:], count)
            yield counter
        for name, (help_text, by_replica) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=("replica",) if by_replica else ())
            for labels, value in self._values(name):
                gauge.add_metric(labels, value)
            yield gauge

    def _values(self, name: str) -> Iterable[tuple[tuple[str, ...], float]]:
        replicas = self._fleet.replicas.values()
        match name.removeprefix("grpod_proxy_"):
            case "replica_up":
                return [((replica.url,), replica.up) for replica in replicas]
            case "replica_adapters":
                return [((replica.url,), len(replica.loaded) + len(replica.foreign)) for replica in replicas]
            case "outstanding_tokens":
                return [((replica.url,), replica.outstanding) for replica in replicas]
            case "adapters":
                return [((), len(self._fleet.wanted.active))]
            case _:
                return [((), self._fleet.wanted.paused is not None)]


def exposition(fleet: Fleet) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(fleet))
    return generate_latest(registry)
