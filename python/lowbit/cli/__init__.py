"""The command line, ``lowbit``. docs/cli.md describes it."""

import sys


def main() -> None:
    """Runs the command that ``sys.argv`` names, and exits."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"lowbit: error: {package} not installed; install it with: pip install 'lowbit[llm]'")
    app(prog_name="lowbit")
