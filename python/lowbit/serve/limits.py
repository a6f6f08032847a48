"""Limits of requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    api_key: str | None = None
    timeout: float = 600.0  # seconds per request
    body_bytes: int = 16 << 20
    recording_bytes: int = 25 << 20  # size of a body with a recording, as in OpenAI's API
    recordings: int = 2  # recordings in memory at a time; others wait
    images: int = 32  # images of a request
    image_pixels: int = 1 << 26  # of all images of a request, which then take 200 MB
    images_at_once: int = 2  # requests whose images are in memory; others wait
    body_seconds: float = 30.0  # within which a body must be complete; one second more for each `body_rate` bytes received
    body_rate: int = 16 << 10  # bytes
    stored_bytes: int = 64 << 20  # responses and their conversations, for later requests
    texts: int = 16  # texts per request
    waiting: int = 64  # texts that wait for a slot
    requests: int = 256  # open requests, each with a body in memory
    hosts: tuple[str, ...] | None = None  # accepted host names; None: any
    origins: tuple[str, ...] = ()  # other sites whose pages may send requests; "*": any
