"""Errors as OpenAI's API says them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a request gets instead of its answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ):
        """
        Args:
            status: of HTTP.
            message: says what was found, and what was expected.
            param: the parameter that is wrong.
            code: for programs.
            retry_after: seconds after which the request may be sent again.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

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
