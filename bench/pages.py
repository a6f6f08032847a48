"""Tables in pages of the documentation, between two marks."""

from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two marks of a page, which are whole lines."""
    before, _, rest = page.read_text("utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{text.rstrip()}\n\n{end}{rest.partition(end)[2]}", "utf-8")
