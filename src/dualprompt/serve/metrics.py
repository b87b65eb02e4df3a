"""What the server counts, in Prometheus' words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dualprompt.hosted.jobs import Jobs
from dualprompt.hosted.model import ServedModel

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 1, 2, 5, 10, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        labels = ["method", "route", "status"]
        self.requests = Counter("dualprompt_requests", "Requests answered", labels, registry=self.registry)
        self.seconds = Histogram(
            "dualprompt_request_seconds", "Time to answer", ["route"], buckets=SECONDS, registry=self.registry
        )
        self.batches = Histogram(
            "dualprompt_batch_images", "Images predicted together", buckets=SIZES, registry=self.registry
        )
        self.answers = Counter(
            "dualprompt_answers", "Images answered, and whether it was sure", ["trust"], registry=self.registry
        )
        self.queue = Gauge("dualprompt_queue_images", "Images that wait for the network", registry=self.registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests.labels(method, route, status).inc()
        self.seconds.labels(route).observe(seconds)

    def watch(self, model: ServedModel, jobs: Jobs) -> None:
        """Also show the model's version and the jobs."""
        self.registry.register(_State(model, jobs))

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _State:
    def __init__(self, model: ServedModel, jobs: Jobs) -> None:
        self.model, self.jobs = model, jobs

    def collect(self) -> list[Metric]:
        """Read the present state."""
        version = GaugeMetricFamily("dualprompt_model_info", "The model that answers", labels=["version"])
        version.add_metric([self.model.version], 1)
        jobs = GaugeMetricFamily("dualprompt_jobs", "Learning jobs on record", labels=["state"])
        for state in ("queued", "running", "done", "failed"):
            jobs.add_metric([state], self.jobs.count(state))
        return [
            version,
            GaugeMetricFamily("dualprompt_model_switches", "Times the model was replaced", value=self.model.switches),
            GaugeMetricFamily("dualprompt_model_classes", "Classes known", value=len(self.model.learner.classes)),
            jobs,
        ]
