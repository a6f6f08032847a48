"""The thread that runs the models: one call after the other, of the texts that are there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ..llm.batch import Batch, Text
from .errors import ApiError

log = logging.getLogger("lowbit.serve")


class Engine:
    """Runs batches in turns on a thread of its own. All other methods are for other threads."""

    def __init__(self, batches: Iterable[Batch], most_waiting: int):
        """
        Args:
            most_waiting: texts that wait for their place; further ones are refused.
        """
        self._batches = list(batches)
        self._most_waiting = most_waiting
        self._orders: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._open = 0  # texts that have been added and have not ended
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread behind its current call. Texts that are there get an error."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def running(self) -> int:
        """Texts that are being written."""
        return sum(len(batch.running) for batch in self._batches)

    @property
    def waiting(self) -> int:
        """Texts that wait for their place."""
        return max(0, self._open - self.running)

    def add(self, batch: Batch, texts: list[Text]) -> None:
        """Has texts written; all of them or none.

        Raises:
            ApiError: too many wait, or the server ends.
        """
        with self._lock:
            if not self.alive:
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
            free = max(0, sum(each.at_once for each in self._batches) - self._open)
            waiting = self.waiting
            if waiting + len(texts) > self._most_waiting + free:
                raise ApiError(
                    429,
                    f"{waiting} texts wait already; expected at most {self._most_waiting}: send the request again later",
                    code="queue_full",
                    retry_after=1 + waiting // max(1, batch.at_once),
                )
            self._open += len(texts)
        for text in texts:
            text.on_end = self._closing(text, text.on_end)
            text.on_error = self._closing(text, text.on_error)
        self._order(lambda: batch.waiting.extend(texts))

    def remove(self, batch: Batch, texts: list[Text]) -> None:
        """Ends texts whose reader has gone; those that have ended already stay so."""
        self._order(lambda: self._end(batch, texts))

    def call(self, function: Callable[[], Any]) -> Future:
        """Has a function run between two calls of the models."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._order(run)
        return future

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake.set()

    def _closing(self, text: Text, told: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def close(result: Any) -> None:
            with self._lock:
                self._open -= 1
            if told is not None:
                told(result)

        return close

    def _end(self, batch: Batch, texts: list[Text]) -> None:
        for text in texts:
            if text in batch.waiting or text in batch.running:
                batch.remove(text)
                with self._lock:
                    self._open -= 1

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            for _ in range(len(self._orders)):  # those that come meanwhile wait until each batch had its turn
                self._orders.popleft()()
            busy = [self._step(batch) for batch in self._batches]
            if not any(busy):
                self._wake.wait()
        ended = ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        while self._orders:
            self._orders.popleft()()
        for batch in self._batches:
            self._fail(batch, ended)

    def _step(self, batch: Batch) -> bool:
        try:
            return batch.step()
        except Exception as error:  # of the model itself: none of its texts can go on
            log.exception("a call of the model failed")
            self._fail(batch, error)
            return True

    def _fail(self, batch: Batch, error: Exception) -> None:
        for text in [*batch.running, *batch.waiting]:
            batch.remove(text)
            if text.on_error is not None:
                text.on_error(error)
