"""Builds the wheels for Linux: `make wheels`.

For each processor one CMake build: liblowbit and the operator libraries are compiled once, the module `_C` for each
version of CPython (pybind11 3.1 has no limited API). The tag is the one that auditwheel finds to be true.

    python scripts/wheels.py [--processors x86_64,aarch64] [--pythons 3.11,3.12] [--output dist]

Run by the Python of the build environment (requirements.txt). Headers of CPython come from an interpreter of that
version on this machine, else from Debian (scripts/debian_python.sh). A version without either is named at the end, with
exit code 1 where it was asked for by name.
"""

import argparse
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROCESSORS = ("x86_64", "aarch64")
GLIBC = 28  # the tag manylinux_2_28, as torch has it
# Libraries that torch and executorch bring.
HOSTS = ("libtorch_cpu.so", "libc10.so", "libexecutorch.so", "libexecutorch_threadpool.so")


class Missing(Exception):
    """What a wheel needs and this machine does not have."""


def headers_of_interpreter(python: str) -> Path | None:
    """The directory of Python.h of an interpreter of that version, if this machine has one with headers."""
    places = [sys.executable] if sys.version_info[:2] == tuple(map(int, python.split("."))) else []
    places += filter(None, [shutil.which(f"python{python}")])
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}")), reverse=True)
    code = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_paths()['include'])"
    for place in places:
        found = subprocess.run([place, "-c", code], check=False, capture_output=True, text=True)
        version, _, directory = found.stdout.strip().partition(" ")
        if found.returncode == 0 and version == python and (Path(directory) / "Python.h").is_file():
            return Path(directory)
    return None


@functools.cache
def headers(python: str, processor: str) -> Path:
    """The directory of Python.h.

    Of another processor's CPython if Debian has that version. Else of this machine's: on 64-bit Linux their
    pyconfig.h differ in nothing that a module sees.
    """
    own = BUILD / "pythons" / f"{python}-{processor}" / "include"
    if (own / "Python.h").is_file():
        return own
    if processor == platform.machine() and (found := headers_of_interpreter(python)):
        return found
    if processor == "aarch64" and python == "3.11" and (BUILD / "arm-python").is_dir():
        return BUILD / "arm-python/root/usr/include/python3.11"
    script = [ROOT / "scripts/debian_python.sh", python, processor, own.parent]
    own.parent.parent.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(script, check=False, stderr=subprocess.PIPE, text=True)
    if fetched.returncode == 0:
        return own
    if found := headers_of_interpreter(python):
        return found
    raise Missing(fetched.stderr.strip().splitlines()[-1])


def settings(processor: str, python: str) -> dict[str, str]:
    """CMake's settings for one wheel."""
    result = {
        "LOWBIT_MANYLINUX_2_28": "ON",
        "LOWBIT_BUILD_EXECUTORCH": "ON",
        "PYBIND11_USE_CROSSCOMPILING": "ON",  # headers are all that is needed of the CPython
        "Python_INCLUDE_DIR": str(headers(python, processor)),
        "PYTHON_MODULE_EXTENSION": f".cpython-{python.replace('.', '')}-{processor}-linux-gnu.so",
        "PYTHON_MODULE_DEBUG_POSTFIX": "",
    }
    host = Path(importlib.util.find_spec("torch").origin).parent
    result["LOWBIT_TORCH_DIR"] = str(host)
    result["LOWBIT_EXECUTORCH_DIR"] = str(host.parent / "executorch")
    if processor != platform.machine():
        # The headers of this environment's torch, the libraries of the oldest torch that there is for Arm.
        packages = BUILD / "arm-python/root/usr/lib/python3/dist-packages"
        if not (packages / "torch").is_dir():
            raise Missing("torch for aarch64 is missing: `make build/arm-python/bin/python`")
        result["CMAKE_TOOLCHAIN_FILE"] = str(ROOT / f"cmake/{processor}-linux-gnu.cmake")
        result["LOWBIT_TORCH_LIBRARY_DIR"] = str(packages / "torch/lib")
        result["LOWBIT_EXECUTORCH_DIR"] = str(packages / "executorch")
    return result


def run(command: list, **environment: str) -> str:
    """Runs it and returns what it printed; shows that, and ends, where it fails."""
    done = subprocess.run(
        list(map(str, command)), check=False, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"this failed: {' '.join(map(str, command))}")
    return done.stdout


def build(processor: str, python: str, output: Path) -> Path:
    """Builds one wheel; the objects of an earlier one for the same processor are used again."""
    defined = settings(processor, python)
    (BUILD / f"wheel-{processor}-objects/CMakeCache.txt").unlink(missing_ok=True)  # it knows the last CPython
    new = BUILD / f"wheel-{processor}-{python}"
    shutil.rmtree(new, ignore_errors=True)
    tag = "cp" + python.replace(".", "")
    options = ["-C", f"build-dir=build/wheel-{processor}-objects"]
    for name, value in defined.items():
        options += ["-C", f"cmake.define.{name}={value}"]
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "wheel", "-q", ".", "-w", new, "--no-build-isolation", "--no-deps", "--no-cache-dir", *options])
    (built,) = new.glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    if [name for name in names if "/_C." in name] != [f"lowbit/_C{defined['PYTHON_MODULE_EXTENSION']}"]:
        sys.exit(f"{built} has {[name for name in names if '/_C.' in name]}")
    # The backend tags a wheel for the Python that runs it.
    tags = ["--remove", "--python-tag", tag, "--abi-tag", tag, "--platform-tag", f"linux_{processor}"]
    run([sys.executable, "-m", "wheel", "tags", *tags, built])
    (built,) = new.glob("*.whl")
    tools = BUILD / "wheel-tools/bin"
    exclude = [f"--exclude={library}" for library in HOSTS]
    # auditwheel finds the oldest tag that is true, and another processor's wheel cannot be told which it must be.
    run([tools / "auditwheel", "repair", "--plat", "auto", "--only-plat", *exclude, "-w", new / "repaired", built],
        PATH=f"{tools}:{os.environ['PATH']}")
    (repaired,) = (new / "repaired").glob("*.whl")
    found = re.search(r"-(?:manylinux_2_(\d+)|linux)_\w+\.whl$", repaired.name)
    if not found or int(found[1] or 99) > GLIBC:
        sys.exit(f"{repaired.name} would need a newer C or C++ library than manylinux_2_{GLIBC} has")
    name = f"manylinux_2_{GLIBC}_{processor}"
    run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", name, repaired])
    (repaired,) = (new / "repaired").glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    wheel = output / repaired.name
    shutil.move(repaired, wheel)
    shutil.rmtree(new)
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--processors", type=names, default=PROCESSORS)
    parser.add_argument("--pythons", type=names, help=f"of {', '.join(PYTHONS)}; all that can be had when left out")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for kind, known in ("processors", PROCESSORS), ("pythons", PYTHONS):
        for name in getattr(arguments, kind) or ():
            if name not in known:
                sys.exit(f"--{kind} has '{name}'; expected some of: {', '.join(known)}")
    missing = []
    for processor in arguments.processors:
        for python in arguments.pythons or PYTHONS:
            started = time.monotonic()
            try:
                wheel = build(processor, python, arguments.output)
            except Missing as error:
                missing.append(f"no wheel for CPython {python} on {processor}: {error}")
                continue
            size = wheel.stat().st_size / 1e6
            print(f"{wheel.name}  {size:.2f} MB, {time.monotonic() - started:.0f} s", flush=True)
    for line in missing:
        print(line, file=sys.stderr)
    if missing and arguments.pythons:
        sys.exit(1)


if __name__ == "__main__":
    main()
