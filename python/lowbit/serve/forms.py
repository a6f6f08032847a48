"""Reads forms with a recording."""

from __future__ import annotations

from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from .bodies import validated
from .errors import ApiError, bad, shortened
from .gate import Gate
from .speech import Wish

_CHARSETS = ("utf-8", "utf8", "us-ascii", "iso-8859-1", "latin-1")


async def read_form(request: Request, gate: Gate) -> tuple[Wish, UploadFile]:
    """Parses parameters and the file of a form; bytes after the first megabyte are on the disk.

    Raises:
        ApiError: the body is not such a form, or a parameter is invalid or unknown.
    """
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError(400, f"the body is {kind or 'of no type'}; expected multipart/form-data with a file")
    charset = parse_options_header(kind)[1].get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in _CHARSETS:
        # Python has further ones (punycode, idna) that take quadratic time, here on the server's thread.
        raise ApiError(400, f"the body is not a readable form: its charset is {shortened(charset, 40)!r}; expected utf-8")
    try:
        async with gate.arriving(request, gate.limits.recording_bytes) as pieces:
            form = await MultiPartParser(request.headers, pieces, max_files=1, max_fields=32).parse()
    except (MultiPartException, ValueError) as error:  # ValueError: bytes that are invalid in the charset
        raise ApiError(400, f"the body is not a readable form: {error}") from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise bad("file", f"file is {'missing' if file is None else 'a text'}; expected a recording")
        values: dict[str, Any] = {name: form.getlist(name) for name in form if name != "file"}
        for name, each in values.items():
            if len(each) > 1 and not name.endswith("[]"):
                raise bad(name, f"{name} comes {len(each)} times; expected once")
        return validated(Wish, {k: v if k.endswith("[]") else v[0] for k, v in values.items()}), file
    except ApiError:
        await form.close()
        raise
