"""A server's life: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import Limits, Model, Server

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_SILENT = 30.0  # seconds that a connection has for the head of its first request


class _Http(H11Protocol):
    """uvicorn's connections, of which those that send no request are closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(_SILENT, self._close_silent)

    def _close_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signals, which it would raise again when it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allow_connections() -> None:
    """Lets this process have as many connections as the system allows it; 1024 is a usual number without."""
    with contextlib.suppress(ModuleNotFoundError, ValueError, OSError):  # Windows has none, macOS another one
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(
    models: Sequence[Model], host: str, port: int, api_key: str | None, *, queue: int, timeout: float,
    grace: int, note: Callable[[str], None], warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Answers requests until SIGINT or SIGTERM; then those that run get `grace` seconds. A second signal ends at once.

    Args:
        queue: texts that may wait.
        timeout: seconds of a request.
        note, warn: lines for people.

    Raises:
        OSError: the address cannot be listened on.
    """
    local = is_local(host)
    limits = Limits(api_key, timeout, waiting=queue, hosts=(*_LOCAL, host) if local else None)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"{host}, port {port} cannot be listened on: {error.strerror or error}; expected a free --port"
        ) from error
    if not local and api_key is None:
        warn(f"everybody who reaches {host} can use this server; --api-key asks for a key")
    allow_connections()
    config = uvicorn.Config(
        Server(models, limits).app(), http=_Http, log_level="warning", access_log=False, timeout_graceful_shutdown=grace,
        limit_concurrency=None, server_header=False, lifespan="on",
    )  # fmt: skip
    server = _Uvicorn(config)
    shown = f"[{host}]" if ":" in host else host

    async def live() -> None:
        def stop() -> None:
            server.force_exit = server.should_exit
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        names = ", ".join(model.name for model in models)
        # The socket listens already: whoever reads this line can connect.
        listener.listen(config.backlog)
        url = f"http://{shown}:{listener.getsockname()[1]}"
        note(f"{names} on {url}/v1, a chat page on {url}/")
        await server.serve(sockets=[listener])

    asyncio.run(live())
    note("ended")
