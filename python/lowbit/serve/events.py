"""Streams of events, and canceling work whose client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import failure
from .errors import ApiError

if TYPE_CHECKING:
    from .speech import Listening

log = logging.getLogger("lowbit.serve")
_LAST_WORDS = 30.0  # seconds that a client has to read the end of a stream after its timeout


async def unless_gone(receive: Receive, work: Any) -> Any:
    """The result of work, which is canceled when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return await doing
    finally:
        for each in (doing, leaving):
            each.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reported(error: Exception) -> ApiError:
    found = failure(error)
    if found.status == 500:
        log.exception("a request failed")
    return found


async def deltas(hear: Callable[[Callable[[str], None]], Coroutine[Any, Any, Listening]]) -> AsyncIterator[dict | ApiError]:
    """Events of a transcription. It does not wait for a slow client, because its samples would stay in memory meanwhile."""
    texts: asyncio.Queue[str | None] = asyncio.Queue()
    hearing = asyncio.ensure_future(hear(texts.put_nowait))
    hearing.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        while (text := await texts.get()) is not None:
            yield {"type": "transcript.text.delta", "delta": text}
        yield {"type": "transcript.text.done", **(await hearing).document()}
    except Exception as error:
        yield reported(error)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


class StreamForm(Protocol):
    """How a stream writes its events."""

    @property
    def named(self) -> bool:
        """Whether a line "event: TYPE" precedes each event, and no [DONE] follows the last one."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The document of an error in a stream that has begun."""


class Events(Response):
    """A stream of events, each a JSON document. An error before the first event becomes a normal error response."""

    def __init__(
        self,
        events: AsyncIterator[dict | ApiError],
        time: Callable[[], contextlib.AbstractAsyncContextManager[None]],
        gone: Callable[[], None],
        close: Callable[[], None],
        form: StreamForm | None = None,
    ):
        """
        Args:
            time: time limit, which raises ApiError.
            gone: called if the client disconnects.
            close: called at the end.
            form: the format of the stream; None: OpenAI's.
        """
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._time, self._gone, self._close = events, time, gone, close
        self._form = form
        self.on_sent: Callable[[], None] = lambda: None
        self.refusal: Callable[[ApiError], dict[str, Any]] = lambda error: error.document  # the body of an error response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(scope, receive, send))
        except ClientDisconnect:
            self._gone()
        finally:
            self._close()
            self.on_sent()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, failed = False, None
        named = self._form is not None and self._form.named

        async def tell(document: dict) -> None:
            name = f"event: {document['type']}\n" if named else ""
            line = f"{name}data: {json.dumps(document, ensure_ascii=False, allow_nan=False)}\n\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})

        try:
            async with self._time(), contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, ApiError):
                        failed = event
                        break
                    if not started:
                        headers = [each for each in self.raw_headers if each[0] != b"content-length"]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        started = True
                    await tell(event)
        except ApiError as error:  # also while the client was not reading
            failed = error
        try:
            async with asyncio.timeout(_LAST_WORDS):
                if failed is not None and not started:
                    await JSONResponse(self.refusal(failed), failed.status, failed.headers)(scope, receive, send)
                    return
                if failed is not None:
                    await tell(failed.document if self._form is None else self._form.failed(failed))
                await send({"type": "http.response.body", "body": b"" if named else b"data: [DONE]\n\n"})
        except TimeoutError as error:
            raise ClientDisconnect from error
