"""Metrics of a server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
disable_created_metrics()


class Metrics:
    """The counters, histograms and gauges of a server."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        """
        Args:
            gauges: name -> description, and function that reads it.
        """
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"lowbit_{name}", what, labels, registry=self.registry)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"lowbit_{name}", what, buckets=_BOUNDS, registry=self.registry)

        self.requests = counter("requests", "Answered requests, by path and HTTP status.", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose keys and values were copied from another text.")
        self.new_tokens = counter("new_tokens", "Generated tokens.")
        self.guessed = counter("guessed_tokens", "Guesses of speculative decoding.")
        self.accepted = counter("accepted_tokens", "Accepted guesses of speculative decoding.")
        self.canceled = counter("canceled_requests", "Requests whose client disconnected before the end.")
        self.first = histogram("time_to_first_token_seconds", "Seconds from a request to its first token.")
        self.whole = histogram("request_seconds", "Seconds from a request to the end of its answer.")
        for name, (what, read) in gauges.items():
            Gauge(f"lowbit_{name}", what, registry=self.registry).set_function(read)
