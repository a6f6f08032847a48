"""Runs scripts in forks of this process, which has imported torch, for the fixture fork_python.

Each line of stdin is one: `script`, `argv`, `environment`, `directory`, `files` for its stdout and stderr. Prints its exit
code, or the negative number of the signal that ended it.
"""

import json
import os
import signal
import sys
import traceback

import torch  # noqa: F401

SECONDS = 1200  # limit for hangs


def run(order: dict) -> int:
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # As in `python -c`.
    sys.argv, sys.path[0] = order["argv"], ""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(order["files"], 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    try:
        exec(compile(order["script"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


assert "lowbit" not in sys.modules
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        code = 1
        try:
            code = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
