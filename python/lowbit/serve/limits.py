"""What a request may take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a request may take."""

    api_key: str | None = None
    timeout: float = 600.0  # seconds until a request's end
    body_bytes: int = 16 << 20
    recording_bytes: int = 25 << 20  # a body with a recording, as in OpenAI's API
    recordings: int = 2  # in memory at a time; further ones wait
    body_seconds: float = 30.0  # until a body is complete, and one more for each
    body_rate: int = 16 << 10  # bytes of it that have come
    texts: int = 16  # of one request
    waiting: int = 64  # texts that wait for their place
    requests: int = 256  # that are open; each may have a body in memory
    hosts: tuple[str, ...] | None = None  # names that the server goes by; None: any
