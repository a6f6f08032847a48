"""The chat page of `lowbit serve` needs nothing from elsewhere, and shows a model's text as text."""

import re

from needs import need_packages

need_packages("starlette", "uvicorn")

from lowbit.serve.app import PAGE


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|url\(", text)
    assert "innerHTML" not in text
