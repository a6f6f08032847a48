"""Refuses calls of a decoder from two threads at once, whose texts would overwrite each other in its caches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class OneText:
    """The right to use a decoder's own caches, which one thread has at a time; a context for one call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._whole = False  # whether a whole text is being computed

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise _busy()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context for all calls of a text."""
        with self:
            if self._whole:  # a function that the text calls begins another one
                raise _busy()
            self._whole = True
            try:
                yield
            finally:
                self._whole = False

    def __reduce__(self) -> tuple[type[OneText], tuple[()]]:
        return OneText, ()  # a copy of a decoder has caches of its own


def _busy() -> RuntimeError:
    return RuntimeError(
        "this decoder is computing another text; expected one text at a time: use Decoder.run_texts or generate_batch, or a "
        "decoder for each thread"
    )


def whole_text(step: Any) -> AbstractContextManager[None]:
    """A context for all calls of a text by a step; without effect for a step that has no :class:`OneText`."""
    own = getattr(step, "one_text", None)
    return own.whole() if isinstance(own, OneText) else nullcontext()
