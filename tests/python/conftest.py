import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import lowbit
import pytest
import torch
from needs import need_packages
from runners import ARM_RUNNERS, EXAMPLE, HERE, QEMU, Runner, build

# AOTInductor's C++ only calls kernels and operators, and compiles twice as fast without optimization. The called code is
# optimized as usual.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Commands store no compiled decoders in the home directory.
os.environ["LOWBIT_COMPILE_CACHE"] = ""

# Commands write no plans into models that tests share; test_cli_plan.py allows them.
os.environ["LOWBIT_PLAN"] = "0"

# The same examples in every run, so that failures can be repeated.
hypothesis.settings.register_profile("lowbit", derandomize=True, deadline=None, database=None)
# `make soak`: many different examples in every run; a failure prints how to repeat it.
hypothesis.settings.register_profile("soak", max_examples=5000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("LOWBIT_HYPOTHESIS", "lowbit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files marked `first` run first. By default xdist starts with the files that have most tests."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(autouse=True)
def _fixed_seed_and_threads():
    # One thread, because the reference's many small operations would wait for each other on a busy machine. Some tests set
    # more.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed() also records a stack for each kind of accelerator
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def executorch():
    """ExecuTorch's runtime with lowbit's operators. If it is not installed, tests are skipped, but fail on CI."""
    need_packages("executorch")
    import lowbit.executorch

    lowbit.executorch.register()
    from executorch.runtime import Runtime

    return Runtime.get()


@pytest.fixture(scope="session")
def runners(executorch, tmp_path_factory) -> Callable[[str, str], Runner]:
    """Finds a program of examples/cpp by name and CPU."""
    # The first pytest process that needs them builds them; parallel processes wait.
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "runners"
    prefixes = f"{lowbit.cmake_prefix_path};{torch.utils.cmake_prefix_path}"  # executorch is found next to lowbit
    with (shared / "runners.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Like many distributions' linkers, which drop unused libraries; libraries that only register operators must stay.
        build(EXAMPLE, directory, f"CMAKE_PREFIX_PATH={prefixes}", "CMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed")

    def find(name: str, cpu: str) -> Runner:
        if cpu == HERE:
            return Runner(name, [str(directory / name)])
        return Runner(name, [*QEMU, cpu, str(Path(ARM_RUNNERS) / name)], cpu)

    return find


def _environment(isa: str | None) -> dict[str, str]:
    """The environment of a new Python, which finds the modules of this directory."""
    environment = {name: value for name, value in os.environ.items() if name != "LOWBIT_ISA"}
    if isa is not None:
        environment["LOWBIT_ISA"] = isa
    paths = [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


@pytest.fixture
def run_python():
    """Runs a script in a new Python and returns the finished process; `isa` sets LOWBIT_ISA, None unsets it."""

    def run(script: str, *arguments: str, isa: str | None = None) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=1200,
            env=_environment(isa),
        )

    return run


@pytest.fixture(scope="session")
def _forking(tmp_path_factory):
    """A process of forking.py, and a directory for its scripts' output."""
    environment = _environment(None) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # otherwise torch imports lowbit
    command = [sys.executable, Path(__file__).parent / "support" / "forking.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process, tmp_path_factory.mktemp("forked")
        process.stdin.close()


@pytest.fixture
def fork_python(_forking):
    """Like run_python, but forked from a Python that has imported torch, which takes more than a second, and not lowbit. For
    tests that do not test the import of torch with lowbit."""
    process, directory = _forking

    def run(script: str, *arguments: str, isa: str | None = None) -> subprocess.CompletedProcess:
        files = [directory / "out", directory / "err"]
        order = {"script": script, "argv": ["-c", *map(str, arguments)], "environment": _environment(isa)}
        order |= {"directory": os.getcwd(), "files": list(map(str, files))}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(script, code, *(file.read_text() for file in files))

    return run


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> tuple[Path, dict]:
    """examples/tiny_llama at 4 bits, and the output of `lowbit quantize --json`; test_readme.py runs this in its own
    process."""
    from command_line import FLOAT, document, invoke

    target = tmp_path_factory.mktemp("packed") / "model"
    result = invoke("quantize", FLOAT, target, "--embedding-bits", 6, "--override", "*.0.*o_proj=8,none,affine", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == [f"quantizing {FLOAT} ..."]
    return target, document(result)


@pytest.fixture(scope="session")
def expected(packed):
    """The library's llm.Generation for `command_line.PROMPT` with the packed model."""
    from command_line import FLOAT, PROMPT
    from lowbit import llm
    from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens

    model = load_model(packed[0])
    tokens = load_tokenizer(FLOAT)(PROMPT)["input_ids"]
    stop = stop_tokens(model, load_tokenizer(FLOAT))
    return llm.generate(llm.Decoder(model, 128), tokens, 40, max_length=128, stop=stop)
