"""The Makefile and make/*.mk, for tests that read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "Makefile", *sorted((ROOT / "make").glob("*.mk"))]
TEXT = "".join(path.read_text(encoding="utf-8") for path in FILES).replace("\\\n", "")


def rules() -> dict[str, list[str]]:
    """Each target that is not a file, with its prerequisites."""
    found = re.findall(r"^([a-z][a-z0-9-]*(?: [a-z][a-z0-9-]*)*):(?!=)(?! export )([^#\n]*)", TEXT, re.M)
    return {target: needs.split() for targets, needs in found for target in targets.split()}
