"""Runs a server: socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import http
import ipaddress
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError
from .limits import Limits
from .routes import Model, Server

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_SILENT = 30.0  # seconds that a client has to send the head of a request, and to read sent data
_CONNECTIONS = 1024  # at a time

_LAST = 3  # seconds after the grace period, for sending errors to all requests


class _Http(H11Protocol):
    """uvicorn's connections with limits of number and time; malformed HTTP gets an error in OpenAI's format.

    A connection is closed if it does not send a complete head of a request in time, or does not read the rest of an answer that
    has ended. uvicorn itself closes only connections that send nothing after an answer.
    """

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > _CONNECTIONS:
            # An idle connection is closed to make room, so that idle ones cannot keep others out.
            idle = [each for each in self.connections if isinstance(each, _Http) and each.idle and each is not self]
            self._longest(idle).refuse(
                ApiError(
                    503,
                    f"{len(self.connections)} connections are open; expected at most {_CONNECTIONS}: connect again later",
                    code="too_many_connections",
                    retry_after=1,
                )
            )

    def _longest(self, idle: list[_Http]) -> _Http:
        """The connection that has waited longest; this one if there is none."""
        return min(idle, key=lambda each: each._head.when() if each._head is not None else 0.0, default=self)

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's answer to malformed HTTP."""
        message = "the connection has sent something other than a request; expected HTTP/1.1, and a head of at most 64 KiB"
        self.refuse(ApiError(400, message, code="invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Sends an error if the application has not begun an answer, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.document).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            reason = http.HTTPStatus(error.status).phrase
            begin = h11.Response(status_code=error.status, headers=[*(headers | error.headers).items()], reason=reason)
            for event in (begin, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def on_response_complete(self) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.cycle.scope["headers"]}:
            # A proxy and h11 may disagree about where such a body ends, so bytes after it are not read as a request
            # (RFC 9112, 6.1).
            self.transport.close()
        self._await_head()  # before the next request, which may have arrived already
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(_SILENT, self._close_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(_SILENT, self._close_silent)

    def _close_silent(self) -> None:
        if self.idle:
            self.transport.close()

    def _close_stalled(self) -> None:
        if self.transport.is_closing():  # no more data follows, and close() would wait for the reader forever
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(_SILENT, self._close_stalled)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signals again after the shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_local(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allow_connections() -> None:
    """Raises this process's limit of open connections to the system's maximum; the default is often 1024."""
    with contextlib.suppress(ModuleNotFoundError, ValueError, OSError):  # Windows has no limit, macOS a different one
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(
    models: Sequence[Model], host: str, port: int, api_key: str | None, *, origins: Sequence[str], queue: int, timeout: float,
    grace: int, note: Callable[[str], None], warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Serves requests until SIGINT or SIGTERM.

    Running requests then have `grace` seconds, and get status 503 afterwards. A second signal ends the server at once.

    Args:
        origins: other sites whose pages may send requests; "*" is any.
        queue: largest number of waiting texts.
        timeout: seconds per request.
        note, warn: print lines for the user.

    Raises:
        OSError: the server cannot listen on the address.
    """
    local = is_local(host)
    limits = Limits(api_key, timeout, waiting=queue, hosts=(*_LOCAL, host.lower()) if local else None, origins=tuple(origins))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror or error}; expected a free --port") from error
    if not local and api_key is None:
        warn(f"anyone who can reach {host} can use this server; --api-key requires a key")
    elif "*" in origins and api_key is None:
        warn("any page in a browser on this machine can use this server; --api-key requires a key")
    allow_connections()
    # The package's loggers print nothing by default, but causes of status 500 must be logged.
    logging.getLogger("lowbit.serve").addHandler(logging.StreamHandler())
    application = Server(models, limits)
    config = uvicorn.Config(
        application.app(), http=_Http, log_level="warning", access_log=False, limit_concurrency=None, server_header=False,
        lifespan="on", timeout_graceful_shutdown=grace + _LAST,
    )  # fmt: skip
    server = _Uvicorn(config)
    shown = f"[{host}]" if ":" in host else host

    async def live() -> None:
        def stop() -> None:
            server.force_exit = server.should_exit
            server.should_exit = True
            loop.call_later(grace, application.end)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        names = ", ".join(model.name for model in models)
        # The socket already listens, so readers of this line can connect.
        listener.listen(config.backlog)
        url = f"http://{shown}:{listener.getsockname()[1]}"
        note(f"{names} on {url}/v1, a chat page on {url}/")
        await server.serve(sockets=[listener])

    asyncio.run(live())
    note("ended")
