"""The command line, ``lowbit``. docs/cli.md describes it."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command that ``sys.argv`` names, and exits."""
    try:
        from .app import make_app

        find_spec("rich.console")  # which is imported where it is needed; raises the error of a missing package
        app = make_app(sys.argv[1:])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"lowbit: error: {package} not installed; install it with: pip install {package}")
    app(prog_name="lowbit")
