"""The thread that runs the models, one call after the other, for all current texts."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ..llm.batch import Batch
from ..llm.generation import Text
from .errors import ApiError

log = logging.getLogger("lowbit.serve")


def shutting_down() -> ApiError:
    """The error of a request when the server shuts down."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


class Engine:
    """Runs batches in turns on its own thread. Call the public methods from other threads."""

    def __init__(self, batches: Iterable[Batch], most_waiting: int):
        """
        Args:
            most_waiting: largest number of texts that wait for a slot; more are refused.
        """
        self._batches = list(batches)
        self._most_waiting = most_waiting
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._open: set[Text] = set()  # added and not ended
        self._stopping = False
        self._closed = False  # accepts no more tasks
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ends the thread after its current call, without waiting for it. Unfinished texts get an error."""
        self._stopping = True
        self._wake.set()

    def stop(self) -> None:
        """Like :meth:`end`, but waits for the thread."""
        self.end()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def running(self) -> int:
        """Number of running texts."""
        return sum(len(batch.running) for batch in self._batches)

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a slot."""
        return max(0, len(self._open) - self.running)

    def add(self, batch: Batch, texts: list[Text]) -> None:
        """Queues texts for generation; all of them or none.

        Raises:
            ApiError: too many texts wait, or the server is shutting down.
        """
        with self._lock:
            if self._closed or not self.alive:
                raise shutting_down()
            free = max(0, sum(each.at_once for each in self._batches) - len(self._open))
            waiting = self.waiting
            if waiting + len(texts) > self._most_waiting + free:
                raise ApiError(
                    429,
                    f"{waiting} texts wait already; expected at most {self._most_waiting}: send the request again later",
                    code="queue_full",
                    retry_after=1 + waiting // max(1, batch.at_once),
                )
            for text in texts:
                text.on_end = self._closing(text, text.on_end)
                text.on_error = self._failing(text, text.on_error)
            self._open.update(texts)
            self._queue(lambda: batch.waiting.extend(texts))

    def remove(self, batch: Batch, texts: list[Text]) -> None:
        """Ends texts of disconnected clients; ended texts do not change."""
        with contextlib.suppress(ApiError):  # when the engine has stopped, all texts have ended
            self._queue(lambda: self._remove(batch, texts))

    def call(self, function: Callable[[], Any]) -> Future:
        """Runs a function between two calls of the models. If the engine stops, the result is an ApiError."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopping:
                    raise shutting_down()
                future.set_result(function())
            except BaseException as error:  # noqa: B036  nothing may end this thread
                future.set_exception(ordinary(error))

        try:
            self._queue(run)
        except ApiError as error:
            future.set_exception(error)
        return future

    def _queue(self, task: Callable[[], None]) -> None:
        """Queues a task for the engine's thread."""
        with self._lock:
            if self._closed:
                raise shutting_down()
            self._tasks.append(task)
        self._wake.set()

    def _closing(self, text: Text, told: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def close(result: Any) -> None:
            self._open.discard(text)
            if told is not None:
                told(result)

        return close

    def _failing(self, text: Text, told: Callable[[Exception], None] | None) -> Callable[[Exception], None]:
        close = self._closing(text, told)

        def fail(error: Exception) -> None:
            try:
                close(error)
            except Exception:  # an error of this text's callback, which must not affect other texts
                log.exception("an error could not be reported")

        return fail

    def _remove(self, batch: Batch, texts: list[Text]) -> None:
        for text in texts:
            batch.remove(text)
            self._open.discard(text)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self._run_tasks()
            busy = [self._step(batch) for batch in self._batches]
            if not any(busy):
                self._wake.wait()
        with self._lock:
            self._closed = True
        self._run_tasks()
        for batch in self._batches:
            self._fail(batch, shutting_down())

    def _run_tasks(self) -> None:
        for _ in range(len(self._tasks)):  # later tasks wait until each batch had its turn
            try:
                self._tasks.popleft()()
            except BaseException:  # noqa: B036
                log.exception("a task of the engine failed")

    def _step(self, batch: Batch) -> bool:
        try:
            return batch.step()
        except BaseException as error:  # noqa: B036  the model itself failed, so none of its texts can continue
            log.exception("a call of the model failed")
            self._fail(batch, ordinary(error))
            return True

    def _fail(self, batch: Batch, error: Exception) -> None:
        for text in [*batch.running, *batch.waiting]:
            batch.remove(text)
            if text.on_error is not None:
                text.on_error(error)


def ordinary(error: BaseException) -> Exception:
    """Converts errors to Exception, because Rust libraries raise BaseException."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
