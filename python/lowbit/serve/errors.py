"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from ..files.untrusted import printable

_LONGEST = 400  # characters of a message, which may quote the request


def shortened(text: str, most: int = _LONGEST) -> str:
    """A text truncated to this many characters, with only characters that UTF-8 can encode."""
    text = text[: most + 1].encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."


class ApiError(Exception):
    """The error response to a request."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ):
        """
        Args:
            status: HTTP status.
            message: what was found and what was expected; a long one is truncated. Control characters of a quoted request
                are escaped, because clients show the message in a terminal.
            param: the invalid parameter.
            code: error code for programs.
            retry_after: seconds after which the client may retry.
        """
        self.status, self.code, self.retry_after = status, code, retry_after
        self.message = shortened(printable(shortened(message)))
        self.param = None if param is None else shortened(param, 64)
        super().__init__(self.message)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON body of the error, also used in a stream's event."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        more = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return more | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """An error for an invalid parameter of the request."""
    return ApiError(400, message, param=param, code=code)
