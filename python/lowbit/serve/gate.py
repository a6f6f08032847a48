"""Admits requests, receives their bodies in limited time, and answers errors in the format of a path's API."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from . import messages
from .answers import failure
from .engine import shutting_down
from .errors import ApiError
from .events import Events, reported
from .limits import Limits
from .metrics import Metrics

_OPEN = ("/", "/health")  # need no key


class Gate:
    """What all requests pass: hosts, origins and keys, limits of their number and time, and errors."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self.limits, self.metrics = limits, metrics
        self.busy = 0  # requests without a complete response
        self.bodies: dict[asyncio.Timeout, None] = {}  # bodies being received, in order of their start
        self._times: set[asyncio.Timeout] = set()  # timeouts that expire when the server shuts down
        self._ending = False

    def end(self) -> None:
        """Ends the time of all open requests. Call it on the server's thread."""
        self._ending = True
        for limit in self._times:
            _expire(limit)

    @contextlib.asynccontextmanager
    async def _time(self, seconds: float | None = None) -> AsyncIterator[None]:
        """A time limit that raises ApiError, also when the server shuts down."""
        limit = asyncio.timeout(0 if self._ending else seconds)
        try:
            async with limit:
                self._times.add(limit)
                try:
                    yield
                finally:
                    self._times.discard(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise (shutting_down() if self._ending else failure(error)) from error

    def within(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The time limit of a request, which raises ApiError."""
        return self._time(self.limits.timeout)

    def guarded(self, path: str, handler: Callable[[Request], Awaitable[Response]]):
        async def handle(request: Request) -> Response:
            try:
                self._admit(request, path)
                self.busy += 1
                response = None
                try:
                    async with self._time():
                        response = await handler(request)
                finally:
                    if isinstance(response, Events):
                        response.on_sent, response.refusal = self._sent, _refusal(path)
                    else:
                        self.busy -= 1
            except ClientDisconnect:
                self.metrics.canceled.inc()
                return Response(status_code=499)
            except Exception as error:
                found = reported(error)
                response = JSONResponse(_refusal(path)(found), found.status, found.headers)
            self.metrics.requests.labels(path, response.status_code).inc()
            return response

        return handle

    def _sent(self) -> None:
        self.busy -= 1

    def _admit(self, request: Request, path: str) -> None:
        """Raises ApiError for a request that is not allowed."""
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.limits.hosts is not None and name.lower() not in self.limits.hosts:
            # DNS rebinding: a page of another site whose name now points here.
            raise ApiError(403, f"the host is {name!r}; expected one of {', '.join(self.limits.hosts)}", code="wrong_host")
        origin = request.headers.get("origin")
        allowed = self.limits.origins
        if origin is not None and origin.partition("://")[2].lower() != host.lower() and not {origin, "*"} & set(allowed):
            raise _wrong_origin(origin, allowed)
        if self.busy >= self.limits.requests and path not in _OPEN:
            if not self.bodies:
                raise self._crowded()
            # Evict a request with an incomplete body, so that slow bodies cannot block others.
            slowest = next(iter(self.bodies))
            del self.bodies[slowest]
            _expire(slowest)
        if self.limits.api_key is None or path in _OPEN:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's header
        if not hmac.compare_digest(key.encode(), self.limits.api_key.encode()):
            found = "another one" if key else "none"
            raise ApiError(401, f"an API key is needed, and the request has {found}", code="invalid_api_key")

    def _crowded(self) -> ApiError:
        message = f"{self.busy} requests are open; expected at most {self.limits.requests}: send the request again later"
        return ApiError(503, message, code="too_many_requests", retry_after=1)

    @contextlib.asynccontextmanager
    async def arriving(self, request: Request, most: int) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Yields the pieces of a body, which must arrive at a minimum rate.

        Raises:
            ApiError: the body is too large or too slow, or was evicted for another request.
        """
        began, limits = asyncio.get_running_loop().time(), self.limits
        limit = asyncio.timeout(min(limits.timeout, limits.body_seconds))

        async def pieces() -> AsyncGenerator[bytes]:
            count = 0
            async for piece in request.stream():
                count += len(piece)
                if count > most:
                    raise ApiError(413, f"the body has more than {most} bytes; expected fewer")
                limit.reschedule(began + min(limits.timeout, limits.body_seconds + count / limits.body_rate))
                yield piece

        try:
            async with limit:
                self.bodies[limit] = None
                yield pieces()
        except TimeoutError as error:
            if not limit.expired():
                raise
            if limit not in self.bodies:
                raise self._crowded() from error
            raise ApiError(408, f"the body is not complete after {(limit.when() or 0) - began:.3g} seconds") from error
        finally:
            self.bodies.pop(limit, None)

    async def body(self, request: Request) -> bytes:
        """The whole body of a request; errors as :meth:`arriving`."""
        data = bytearray()
        async with self.arriving(request, self.limits.body_bytes) as pieces:
            async for piece in pieces:
                data += piece
        return bytes(data)


class Origins(CORSMiddleware):
    """Allows pages of other sites."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        asked = request_headers["access-control-request-method"]
        if asked not in self.allow_methods:
            found = ApiError(
                405, f"the method is {asked}; expected {' or '.join(self.allow_methods)}", code="method_not_allowed"
            )
        else:
            found = _wrong_origin(request_headers["origin"], self.allow_origins)
        return JSONResponse(found.document, found.status)


def _wrong_origin(origin: str, allowed: Iterable[str]) -> ApiError:
    expected = " or ".join(["one of this server", *allowed])
    return ApiError(403, f"the request comes from a page of {origin}; expected {expected}", code="wrong_origin")


def _refusal(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """Makes the JSON body of an error in the format of a path's API."""
    return messages.refusal if path.startswith("/v1/messages") else lambda error: error.document


def _expire(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


async def no_endpoint(request: Request, error: Exception) -> Response:
    """The error for an unknown path, or for a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path, headers = request.scope["raw_path"].decode("latin-1"), error.headers or {}
    if error.status_code == 405:
        methods = " or ".join(sorted(headers["Allow"].split(", ")))
        found = ApiError(405, f"the method is {request.method}; {path} expects {methods}", code="method_not_allowed")
    else:
        message = f"there is no {request.method} {path}; docs/serving.md lists the endpoints"
        found = ApiError(error.status_code, message, code="not_found")
    return JSONResponse(_refusal(path)(found), found.status, headers)
