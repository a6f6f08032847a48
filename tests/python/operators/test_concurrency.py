"""Many Python threads, both runtimes in one process, kernels loaded during calls, forks, and an interpreter that exits during
calls: the same bits, constant memory, and no deadlocks."""

import os
import subprocess
import sys
from pathlib import Path

import lowbit
import pytest

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def acme(tmp_path_factory) -> Path:
    """The example vendor kernel."""
    library = tmp_path_factory.mktemp("acme") / "acme_kernels.so"
    source = ROOT / "examples" / "vendor_kernel" / "acme_kernels.cpp"
    headers = Path(lowbit.cmake_prefix_path) / "include"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-I", headers, source, "-o", library]
    done = subprocess.run([os.environ.get("CXX", "c++"), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def checked(run_python, script: str, *arguments) -> str:
    done = run_python(script, *arguments)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


@pytest.mark.more
def test_many_threads(run_python, acme, tmp_path):
    """Runs call_soak.py; `make soak` runs it with more calls."""
    command = [sys.executable, (Path(__file__).parents[1] / "support" / "call_soak.py"), "1000", acme, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("1000 calls")


FORK = """
import faulthandler, multiprocessing, os, sys, threading
import torch, lowbit
from reference import random_packed, random_rows

faulthandler.dump_traceback_later(120, exit=True)
packed, x = random_packed(600, 512, 4, 32, "affine"), random_rows(70, 512)
indices = torch.arange(2000) % 600
torch.set_num_threads(3)
expected = lowbit.linear(x, packed, 600).numpy().tobytes(), lowbit.embedding(indices, packed, 512).numpy().tobytes()

def call():
    # No operator of torch's: with threads these would wait forever.
    assert torch.get_num_threads() == 3
    found = lowbit.linear(x, packed, 600).numpy().tobytes(), lowbit.embedding(indices, packed, 512).numpy().tobytes()
    assert found == expected
    lowbit.unpack(packed)

def in_child(action):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

def and_its_child():
    call()
    in_child(call)
    # A thread that begins here may use others.
    counts = []
    def begun_here():
        torch.set_num_threads(3)
        call()
        counts.append(len(os.listdir("/proc/self/task")))
    for _ in range(2):
        thread = threading.Thread(target=begun_here)
        thread.start()
        thread.join()
    assert min(counts) >= 4, counts

assert len(os.listdir("/proc/self/task")) > 2
in_child(and_its_child)
call()  # and here as before
# Forks in another thread, while others are in calls.
stop = threading.Event()
def busy():
    torch.set_num_threads(2)
    while not stop.is_set():
        lowbit.linear(x, packed, 600)
threads = [threading.Thread(target=busy) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    in_child(call)
stop.set()
for thread in threads:
    thread.join()
with multiprocessing.get_context("fork").Pool(3) as pool:
    pool.starmap(call, [()] * 30)
print("same")
"""


@pytest.mark.more
def test_forked_after_threads_were_used(run_python):
    """A child has none of its parent's threads, and OpenMP would wait for them."""
    assert checked(run_python, FORK) == "same\n"


FORK_FIRST = """
import os, sys
import torch, lowbit
from reference import random_packed, random_rows

torch.set_num_threads(1)
packed, x = random_packed(6000, 512, 4, 32, "affine"), random_rows(70, 512)
assert len(os.listdir("/proc/self/task")) == 1, "there were threads before"
torch.set_num_threads(2)
child = os.fork()
lowbit.linear(x, packed, 6000)
threads = len(os.listdir("/proc/self/task"))
if child == 0:
    os._exit(threads)
print(threads, os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""


def test_forked_before_threads_were_used(run_python):
    """Like a server that loads its model before forking: parent and child use two threads each."""
    one = "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'"  # importing numpy starts its threads
    assert checked(run_python, one + FORK_FIRST).split() == ["2", "2"]


SPAWN = """
import multiprocessing, sys
import torch, lowbit

def call(packed, x, n):
    return lowbit.linear(x, packed, n).numpy().tobytes()

if __name__ == "__main__":
    from reference import random_packed, random_rows
    packed, x = random_packed(600, 512, 4, 32, "affine").share_memory_(), random_rows(7, 512)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # the packed weight goes there as shared memory
        assert pool.starmap(call, [(packed, x, 600)] * 3) == [call(packed, x, 600)] * 3
    print("same")
"""


@pytest.mark.more
def test_spawned_processes_share_weights(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stdout == "same\n", done.stderr


EXIT = """
import sys, threading, time
import torch, lowbit
from reference import random_packed, random_rows

packed, x = random_packed(600, 512, 4, 32, "affine"), random_rows(70, 512)
codes, scales = torch.zeros(600, 512, dtype=torch.uint8), torch.ones(600, 16)

def work(call):
    torch.set_num_threads(2)
    while True:
        call()

running = threading.Barrier(4)
for call in (lambda: lowbit.linear(x, packed, 600), lambda: lowbit.unpack(packed),
             lambda: lowbit.pack(codes, scales, bits=4, group_size=32)):
    call()
    threading.Thread(target=lambda call=call: (running.wait(), work(call)), daemon=True).start()
running.wait()
time.sleep(0.1)
print("done", flush=True)
"""


# Calls with one thread, or from two threads at once.
ABORTS = ("terminate called without an active exception", "terminate called recursively")


def test_the_interpreter_ends_during_calls(run_python):
    """Daemon threads are in operators at exit. CPython before 3.14 ends such threads in a way that makes C++ abort(), also in
    torch's operators; but no freed memory is accessed."""
    for _ in range(2):
        done = run_python(EXIT)
        assert done.stdout == "done\n", done.stderr
        if done.returncode != 0:
            assert done.returncode == -6 and any(text in done.stderr for text in ABORTS), done.stderr
            assert sys.version_info < (3, 14), done.stderr
