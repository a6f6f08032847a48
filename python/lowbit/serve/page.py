"""The chat page: one document with inline style and scripts, and a policy that allows nothing else."""

import base64
import hashlib
import re
from pathlib import Path

_FILES = Path(__file__).with_name("web")


def _read() -> str:
    def inside(found: re.Match) -> str:
        return f"<script>{(_FILES / found[1]).read_text(encoding='utf-8')}</script>"

    return re.sub(r'<script src="([^"]+)"></script>', inside, (_FILES / "page.html").read_text(encoding="utf-8"))


def _hashes(tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.S)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


PAGE = _read()

# A model's text is untrusted. Even if the page inserted it as HTML, it could not run scripts or fetch anything.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
    "connect-src 'self'; img-src data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",  # otherwise browsers look up the hosts of links before a click
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
