"""CMake builds: static libraries, and the kernel files of the target processor."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import pytest
import torch
from makefiles import TEXT, rules
from runners import EXAMPLE, Runner, build, tool

ROOT = Path(__file__).parents[3]
# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.first,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
    ),
]


def installed(directory: Path, name: str, *definitions: str) -> list[str]:
    """Builds and installs the C++ package; returns the names of its libraries."""
    # As deep in the checkout as other builds, so that ccache reuses objects of `make test-x86`.
    if shutil.which("ccache"):
        os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))  # as the Makefile does
        definitions = (*definitions, f"CMAKE_CXX_COMPILER_LAUNCHER={shutil.which('ccache')}")
    build(ROOT, ROOT / "build" / name, *definitions, f"CMAKE_INSTALL_PREFIX={directory}")
    subprocess.run([tool("cmake"), "--install", ROOT / "build" / name], check=True, capture_output=True)
    return sorted(path.name for path in directory.rglob("*") if path.suffix in (".a", ".so"))


@pytest.fixture(scope="module")
def static(executorch, tmp_path_factory) -> Path:
    """A static installation, with the operators for ExecuTorch."""
    (packages,) = importlib.util.find_spec("executorch").submodule_search_locations
    directory = tmp_path_factory.mktemp("installed")
    definitions = ["LOWBIT_STATIC=ON", "LOWBIT_BUILD_EXECUTORCH=ON", f"LOWBIT_EXECUTORCH_DIR={packages}"]
    assert installed(directory, "test-static", *definitions) == ["liblowbit.a", "liblowbit_executorch.a"]
    return directory


@pytest.fixture(scope="module")
def runner(static, tmp_path_factory) -> Runner:
    """pte_runner of examples/cpp, built with the CMake package of a static installation."""
    (packages,) = importlib.util.find_spec("executorch").submodule_search_locations
    program = tmp_path_factory.mktemp("program")
    build(
        EXAMPLE, program, "PT2_RUNNER=OFF", f"CMAKE_PREFIX_PATH={static}",
        f"executorch_DIR={packages}/lib/cmake/executorch",
    )  # fmt: skip
    return Runner("pte_runner", [str(program / "pte_runner")])


def built_without_cmake(prefix: Path, program: Path) -> set[str]:
    """Builds and runs a C program by pkg-config and the C compiler; returns the libraries that it loads."""
    (pc,) = prefix.rglob("lowbit.pc")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "lowbit"], env=os.environ | {"PKG_CONFIG_PATH": str(pc.parent)},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    (library,) = (path for path in prefix.rglob("liblowbit.*"))
    command = ["cc", "-std=c99", ROOT / "tests/package/consumer.c", "-o", program, *flags, f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    ran = subprocess.run([program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "version 2 of the interface\n"), ran.stderr
    return Runner("consumer", [str(program)]).libraries()


@pytest.mark.more
def test_a_program_in_c_that_is_one_file(static, tmp_path):
    assert not any("lowbit" in name for name in built_without_cmake(static, tmp_path / "consumer"))


@pytest.mark.more
def test_a_library_that_contains_the_cpp_library(tmp_path):
    """It needs nothing but the C library, and is small."""
    assert installed(tmp_path / "installed", "test-runtime", "LOWBIT_STATIC_RUNTIME=ON") == ["liblowbit.so"]
    libraries = built_without_cmake(tmp_path / "installed", tmp_path / "consumer")
    assert "liblowbit.so" in libraries and not any(re.match("libstdc|libgcc", name) for name in libraries), libraries
    (library,) = (tmp_path / "installed").rglob("liblowbit.so")
    assert library.stat().st_size < 8_000_000
    assert exported_by(library) == exported_by(INSTALLED)


INSTALLED = Path(lowbit._C.__file__).parent / "liblowbit.so"


def exported_by(library: Path) -> set[str]:
    lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[2] for line in lines.splitlines()}


@pytest.mark.skipif(sys.platform != "linux", reason="ELF only")
def test_the_library_exports_only_its_own_names():
    """Another library of a process must not get templates of the C++ library from this one, which may be of another version."""
    names = exported_by(INSTALLED)
    header = (ROOT / "plan/lowbit.h").read_text(encoding="utf-8")
    assert set(re.findall(r"^LOWBIT_C_API .*?\b(lowbit_\w+)\(", header, re.M)) <= names
    assert {name for name in names if not re.match("lowbit_|_ZT[ISV]?N?6lowbit|_ZNK?6lowbit", name)} == set()


@pytest.mark.more
def test_a_program_that_is_one_file_runs_a_pte(runner, tmp_path):
    """The program does not refer to the objects that register operators; the CMake package links the whole archive."""
    assert not any("lowbit" in name for name in runner.libraries())
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 48)).eval()
    model, x = lowbit.quantize_(layers, lowbit.LinearConfig(bits=4, group_size=32)), torch.randn(3, 64)
    lowbit.export_pte(model, (x,), tmp_path / "model.pte")
    np.save(tmp_path / "x.npy", x.numpy())
    ran = runner("--output", tmp_path / "y", tmp_path / "model.pte", tmp_path / "x.npy")
    assert ran.returncode == 0, ran.stderr
    (written,) = tmp_path.glob("y*.npy")
    with torch.inference_mode():
        assert torch.equal(torch.from_numpy(np.load(written)), model(x))


def configure(directory: Path, *definitions: str) -> subprocess.CompletedProcess:
    command = [tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", ROOT, "-B", directory]
    command += [f"-D{definition}" for definition in definitions]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)


def for_a_mac(directory: Path, architectures: str) -> subprocess.CompletedProcess:
    """With the target setting of Xcode's tools, on a Mac with any processor. Nothing is compiled."""
    mac = ["CMAKE_SYSTEM_NAME=Darwin", "CMAKE_SYSTEM_PROCESSOR=other", "CMAKE_OSX_SYSROOT=", "CMAKE_CXX_COMPILER=g++"]
    mac += ["CMAKE_CXX_COMPILER_WORKS=ON", "CMAKE_INSTALL_NAME_TOOL=none", "LOWBIT_STATIC=ON"]
    return configure(directory, *mac, f"CMAKE_OSX_ARCHITECTURES={architectures}")


@pytest.mark.parametrize(
    "architecture, has, has_not", [("arm64", {"neondot", "i8mm"}, {"avx2"}), ("x86_64", {"avx2", "amx"}, {"neondot"})]
)
def test_kernel_files_are_those_of_the_architecture(tmp_path, architecture, has, has_not):
    done = for_a_mac(tmp_path, architecture)
    assert done.returncode == 0, done.stderr
    files = set(re.findall(r"kernels/linear/(\w+)[.]cpp", (tmp_path / "build.ninja").read_text()))
    assert has | {"portable"} <= files and not has_not & files


@pytest.mark.parametrize(
    "definitions, found",
    [
        ([], "CMAKE_OSX_ARCHITECTURES is 'arm64;x86_64'; expected one: each has kernels of its own."),
        (["LOWBIT_STATIC_RUNTIME=ON"], "LOWBIT_STATIC_RUNTIME is ON; expected a shared library for Linux or Android"),
        (["LOWBIT_BUILD_TORCH=ON"], "LOWBIT_STATIC is ON; expected LOWBIT_BUILD_TORCH and LOWBIT_BUILD_PYTHON to be OFF"),
    ],
)
def test_refused_build_settings(tmp_path, definitions, found):
    done = configure(tmp_path, "LOWBIT_STATIC=ON", *definitions) if definitions else for_a_mac(tmp_path, "arm64;x86_64")
    assert done.returncode == 1 and found in " ".join(done.stderr.split())


def test_no_build_for_a_big_endian_processor(tmp_path):
    """The Arm compiler in big-endian mode, for which its C library has no headers."""
    (tmp_path / "gnu").mkdir()
    (tmp_path / "gnu" / "stubs-lp64_be.h").touch()
    for order, status in (("little", 0), ("big", 1)):
        command = ["aarch64-linux-gnu-g++", "-std=c++20", f"-m{order}-endian", "-fsyntax-only", "-I", tmp_path]
        done = subprocess.run([*command, ROOT / "kernels" / "header.cpp"], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert ("the packed format is little endian" in done.stderr) == (order == "big"), done.stderr


def steps() -> list[str]:
    """Make targets in the workflows."""
    workflows = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    return re.findall(r"^      - run: make ([a-z][\w-]*)", workflows, re.M)


def test_a_workflow_runs_every_test():
    """Directly, or as a part of `make test` and `make test-more`."""
    parts = rules()["test"] + re.search(r"^TEST_MORE =(.*)", TEXT, re.M)[1].split()
    tests = [target for target in rules() if re.match("test-|fuzz|(soak|models|ecosystem|coverage|docs|typecheck)$", target)]
    assert {"test-tsan", "fuzz-import", "docs", "test-macos-build"} <= set(tests) and "typecheck" in parts
    # test and test-more; with the runners, test-more's Python files; test-more lists its runs one by one;
    # and test-llama-vocab reads files that a user has fetched
    elsewhere = {"test-all", "test-arm-runner", "test-emulated-x86", "test-llama-vocab"}
    assert "$(X86_MORE)" in parts and "\nX86_MORE := $(X86_RUNS)\n" in TEXT
    assert set(tests) - set(parts) - set(steps()) == elsewhere


def test_the_table_of_platforms_names_what_runs():
    """docs/platforms.md: each target and job of the table exists, and the table has every one for another system, compiler or
    CPU."""
    targets = set(rules())
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    jobs = dict(re.findall(r"^  ([\w-]+):\n    runs-on: (\S+)$", workflow, re.M))
    assert {"x86", "macos"} <= set(jobs) and "test-x86" in targets
    page = (ROOT / "docs/platforms.md").read_text(encoding="utf-8").split("## Tested systems, compilers and CPUs")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    cells = [cell for row in rows[2:] for cell in row[3:]]
    assert rows[0][3:] == ["C++ tests", "Python tests"] and len(cells) > 20
    here, compiled, elsewhere = set(), set(), set()
    for cell in cells:
        if match := re.fullmatch(r"workflow: `tests.yml`, job `([\w-]+)`", cell):
            elsewhere.add(match[1])
        elif cell != "not run":
            assert (match := re.fullmatch(r"(here|compiled only): ((?:`make [\w-]+`(?:, )?)+)", cell)), cell
            (here if match[1] == "here" else compiled).update(re.findall(r"make ([\w-]+)", match[2]))
    assert here | compiled <= targets and elsewhere <= set(jobs)
    # Compile-only targets for iOS and Windows on Arm, and test-macos-build, a part of wheel-macos.
    assert compiled == {"test-ios-build", "test-windows-build", "wheel-macos"}
    others = {target for target in targets if re.match("test-(x86|arm|macos|windows|ios|android|emulated)", target)}
    assert others - here - compiled == {"test-macos-build", "test-arm-runner", "test-android"}  # the last is the job's
    assert {name for name, runner in jobs.items() if runner != "ubuntu-24.04"} | {"android"} == elsewhere


def test_a_fresh_clone_has_a_rule_for_everything(tmp_path):
    """Every target in a dry run with nothing built: the system's tools first."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    targets = sorted(rules())
    assert {"test", "docs", "wheel-macos", "test-more", *steps()} <= set(targets) and len(steps()) > 10
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "VENV"))}
    for target in targets:
        done = subprocess.run(
            ["make", "--dry-run", target], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (target, done.stderr)
        lines = [line for line in done.stdout.splitlines() if not line.startswith("make[")]
        first = next((number for number, line in enumerate(lines) if "/.venv/bin/" in line), len(lines))
        made = next((number for number, line in enumerate(lines) if "-m venv .venv" in line), len(lines))
        assert made < first or first == len(lines), f"make {target} uses .venv before it is there: {lines[first]}"


def test_a_project_that_adds_the_checkout_has_the_headers(tmp_path):
    """docs/export.md: add_subdirectory. The program is compiled but not linked, so that the kernels are not built."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(app LANGUAGES CXX)\n"
        f'add_subdirectory("{ROOT}" lowbit)\nadd_library(app OBJECT "{ROOT}/tests/package/consumer.cpp")\n'
        "target_link_libraries(app PRIVATE lowbit::kernels)\n"
    )
    for command in (
        ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-S", tmp_path, "-B", tmp_path / "build"],
        ["--build", tmp_path / "build", "--target", "app"],
    ):
        done = subprocess.run([tool("cmake"), *command], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    objects = [path.name for path in tmp_path.rglob("*.o")]
    assert objects == ["consumer.cpp.o"]


def test_the_programs_of_the_guide_call_the_operators(tmp_path):
    """examples/cpp/README.md: its C++, built by its CMake lines with only the installed headers and liblowbit, prints the
    text's output. The second program replaces the first one's main()."""
    guide = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (project,) = re.findall(r"^```cmake\n(.*?)^```", guide, re.M | re.S)
    first, second = re.findall(r"^```cpp\n(.*?)^```", guide, re.M | re.S)
    said = [re.findall(r"`([^`]+)`", line) for line in re.findall(r"^It prints (.+)$", guide, re.M)]
    assert len(said) == 2
    (tmp_path / "CMakeLists.txt").write_text(project)
    for number, code in enumerate((first, first[: first.index("int main()")] + second)):
        (tmp_path / "program.cpp").write_text(code)
        build = tmp_path / f"build{number}"
        settings = [f"-DCMAKE_PREFIX_PATH={lowbit.cmake_prefix_path}"]
        settings.append("-DCMAKE_CXX_FLAGS=-std=c++17 -Wall -Wextra -Wpedantic -Werror")
        for command in (
            ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *settings, "-S", tmp_path, "-B", build],
            ["--build", build],
        ):
            command = [tool("cmake"), *map(str, command)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
        ran = subprocess.run([build / "program"], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout.splitlines()) == (0, said[number]), ran.stderr


SAMPLING = """
#include "llm.h"

#include <limits>

int main() {
  LlmOptions options;
  std::mt19937_64 random(1);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const double temperature : {0.0, 1.0}) {
    for (const float bad : {nan, infinity}) {
      for (size_t at = 0; at < 3; ++at) {
        std::vector<float> logits = {0, 1, 0};
        logits[at] = bad;
        options.temperature = temperature;
        try {
          std::printf("token %d\\n", static_cast<int>(sample(logits, options, random)));
        } catch (const std::runtime_error& error) {
          std::puts(error.what());
        }
      }
    }
  }
  std::vector<float> logits = {-infinity, 1, -infinity};
  std::printf("token %d\\n", static_cast<int>(sample(logits, options, random)));
}
"""


def test_the_runners_refuse_logits_that_are_not_numbers(tmp_path):
    """examples/cpp/llm.h: also if the NaN is not the first logit and another is the largest."""
    (tmp_path / "program.cpp").write_text(SAMPLING)
    core = lowbit.cmake_prefix_path
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{EXAMPLE}", f"-I{core}/include"]
    library = [f"-L{core}", "-llowbit", f"-Wl,-rpath,{core}"]
    done = subprocess.run(
        [*command, "program.cpp", "-o", "program", *library], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["the model's logits are not finite"] * 12 + ["token 1"]
