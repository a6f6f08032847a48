"""Figures of a server, in the text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """How many values are at most so large, for each of some bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[sum(value > bound for bound in _BOUNDS)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts what happens; read on one thread, that of the server."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        """
        Args:
            gauges: name -> what it is, and how it is read.
        """
        self._gauges = gauges
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.prompt_tokens = self.cached_tokens = self.new_tokens = self.guessed = self.accepted = self.canceled = 0
        self.first, self.whole = Histogram(), Histogram()

    def text(self) -> str:
        """All figures."""
        lines: list[str] = []

        def head(name: str, kind: str, what: str) -> str:
            lines.extend((f"# HELP {name} {what}", f"# TYPE {name} {kind}"))
            return name

        name = head("lowbit_requests_total", "counter", "Requests that were answered, by path and HTTP status.")
        lines += [f'{name}{{path="{path}",status="{code}"}} {count}' for (path, code), count in sorted(self.requests.items())]
        for short, value, what in (
            ("prompt_tokens", self.prompt_tokens, "Tokens of prompts."),
            ("cached_tokens", self.cached_tokens, "Tokens of prompts that were copied from another text."),
            ("new_tokens", self.new_tokens, "Tokens that were written."),
            ("guessed_tokens", self.guessed, "Guesses of speculative decoding."),
            ("accepted_tokens", self.accepted, "Guesses that were right."),
            ("canceled_requests", self.canceled, "Requests whose client went away before the end."),
        ):
            lines.append(f"{head(f'lowbit_{short}_total', 'counter', what)} {value}")
        for short, (what, read) in self._gauges.items():
            lines.append(f"{head(f'lowbit_{short}', 'gauge', what)} {read()}")
        for short, histogram, what in (
            ("time_to_first_token_seconds", self.first, "Seconds from a request to its first token."),
            ("request_seconds", self.whole, "Seconds from a request to the end of its answer."),
        ):
            lines += histogram.lines(head(f"lowbit_{short}", "histogram", what))
        return "\n".join(lines) + "\n"
