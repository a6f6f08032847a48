"""Errors as OpenAI's API says them."""

from __future__ import annotations

from typing import Any

_LONGEST = 400  # characters of a message: it may quote what a request has


def shortened(text: str, most: int = _LONGEST) -> str:
    """A text of at most so many characters, all of which UTF-8 can say."""
    text = text[: most + 1].encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."


class ApiError(Exception):
    """What a request gets instead of its answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ):
        """
        Args:
            status: of HTTP.
            message: says what was found, and what was expected; a long one is cut.
            param: the parameter that is wrong.
            code: for programs.
            retry_after: seconds after which the request may be sent again.
        """
        self.status, self.message, self.code, self.retry_after = status, shortened(message), code, retry_after
        self.param = None if param is None else shortened(param, 64)
        super().__init__(self.message)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON body, also of an event in a stream."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        more = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return more | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A parameter of the request is wrong."""
    return ApiError(400, message, param=param, code=code)
