"""The program ``lowbit``: runs the command line, or prints one line that says why the package cannot be imported."""

import gc
import json
import signal
import sys

import lowbit_autoload


def main() -> None:
    """Runs the command that ``sys.argv`` names, and exits."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C while libraries are imported ends the program without a traceback. Commands handle Ctrl-C themselves.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    lowbit_autoload.in_program = True
    # Imports make many objects that stay; looking for garbage among them takes a twentieth of the start. Commands enable it.
    gc.disable()
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    try:
        from lowbit.cli import main as run
    except (ImportError, OSError) as error:  # OSError: torch's own libraries do not load
        if "--debug" in sys.argv:
            raise
        if "--json" in sys.argv:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        sys.exit(f"lowbit: error: {error}")
    run()
