"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Requests, batches, and the time that they take."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "monograph_requests", "Answers to requests for inference", ["model", "status"], registry=registry
        )
        self._seconds = Histogram(
            "monograph_request_seconds",
            "From a request to its answer",
            ["model"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._batches = Counter(
            "monograph_batches", "Batches that ran, by their rows", ["model", "rows"], registry=registry
        )
        self._running = Counter(
            "monograph_running_seconds", "Time in which a model ran", ["model"], registry=registry
        )
        self._inside = Gauge("monograph_requests_inside", "Requests that wait or run", registry=registry)

    def answered(self, model: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(model, str(status)).inc()
        self._seconds.labels(model).observe(seconds)

    def ran(self, model: str, rows: int, seconds: float) -> None:
        """Count a batch."""
        self._batches.labels(model, str(rows)).inc()
        self._running.labels(model).inc(seconds)

    def inside(self, number: Callable[[], float]) -> None:
        """Report how many requests there are when it is asked."""
        self._inside.set_function(number)

    def text(self) -> bytes:
        """All of it, in the format of Prometheus."""
        return generate_latest(self._registry)

    def requests(self, model: str) -> Mapping[str, int]:
        """How many answers each status had."""
        found: dict[str, int] = {}
        for metric in self._requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.labels["model"] == model:
                    found[sample.labels["status"]] = int(sample.value)
        return found
