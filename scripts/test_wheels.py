"""Tests wheels of dist/ with torch wheels of PyPI: `make test-wheels`.

    python scripts/test_wheels.py [--only x86_64:3.11:2.10.0,...] [--keep]

Each case is a processor, a CPython and a torch. It gets a directory with lowbit's wheel, torch and torch's dependencies, and
nothing else of the project; tests/package/wheel.py runs there. Other processors are emulated. torch's wheels are downloaded
once, to build/torch-wheels. Stand-ins replace CUDA's libraries, which PyPI's torch for Linux needs at import
(scripts/cuda_stand_ins.py).
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import wheels

ROOT, BUILD = wheels.ROOT, wheels.BUILD
DOWNLOADS = BUILD / "torch-wheels"
# Every torch on the oldest CPython, every CPython with the newest torch, and on Arm the oldest torch, whose wheel is for CPUs.
# The CUDA wheel of 2.15 crashes in `import torch` under QEMU with stand-ins.
CASES = (
    *(("x86_64", "3.11", torch) for torch in ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    *(("x86_64", python, "2.15.0") for python in ("3.12", "3.13", "3.14")),
    ("aarch64", "3.11", "2.10.0"),
    ("aarch64", "3.11", "2.9.1"),
)
OLDEST = (2, 10)  # lowbit refuses to be imported with an older torch
# Cases that also try other wheels and install executorch with its dependencies.
WHOLE = ("x86_64", "3.11", "2.13.0")
TORCH_COMPILES_WITH = "setuptools==80.9.0"  # torch needs it from CPython 3.12 on, where new environments lack it
EXECUTORCH_IMPORTS = (
    "executorch==1.5.1", "torchao==0.18.0", "numpy==2.4.6", "flatbuffers==25.12.19", "ruamel.yaml==0.19.1",
    "tabulate==0.10.0",
)  # fmt: skip


def interpreter(python: str, processor: str) -> Path:
    """A CPython of that version for that processor."""
    if processor == platform.machine():
        include = wheels.headers_of_interpreter(python)
        if include and (found := include.parent.parent / f"bin/python{python}").is_file():
            return found
    elif python == "3.11":
        return BUILD / "arm-python/bin/python"
    wheels.headers(python, processor)
    found = BUILD / "pythons" / f"{python}-{processor}" / "bin/python"
    if not found.is_file():
        raise wheels.Missing(f"CPython {python} for {processor} is not available")
    return found


def pip(*arguments) -> None:
    wheels.run([sys.executable, "-m", "pip", *arguments])


def flags(python: str, processor: str) -> list[str]:
    """pip's options to install packages for another interpreter."""
    tag = "cp" + python.replace(".", "")
    platforms = (f"manylinux_2_28_{processor}", f"manylinux_2_17_{processor}", f"manylinux2014_{processor}")
    result = ["--only-binary=:all:", "--implementation=cp", f"--python-version={tag[2:]}"]
    result += [f"--abi={abi}" for abi in (tag, "abi3", "none")]
    return result + [f"--platform={name}" for name in platforms]


def torch_wheel(processor: str, python: str, torch: str) -> Path:
    """Path of torch's wheel; downloaded at the first use."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    for attempt in range(2):
        tag = "cp" + python.replace(".", "")
        found = sorted(DOWNLOADS.glob(f"torch-{torch}*{tag}*manylinux*{processor}.whl"))
        if found:
            return found[0]
        if attempt == 0:
            pip("download", "-q", "--no-deps", "-d", DOWNLOADS, *flags(python, processor), f"torch==={torch}")
    raise wheels.Missing(f"torch {torch} for CPython {python} on {processor} was not found")


def refusal(command: list, environment: dict[str, str]) -> str:
    """Last line of output of a program that must fail."""
    done = subprocess.run(list(map(str, command)), check=False, env=os.environ | environment, capture_output=True, text=True)
    return done.stderr.splitlines()[-1] if done.returncode else "no error"


def refuse_others(processor: str, python: str, site: Path, program: Path, environment: dict[str, str]) -> None:
    """Checks that wheels for another processor and another Python cannot be installed by pip, nor imported when unpacked by
    hand."""
    other = "aarch64" if processor == "x86_64" else "x86_64"
    for wheel in (lowbit_wheel(other, python), lowbit_wheel(processor, "3.14" if python != "3.14" else "3.13")):
        installed = refusal([sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", wheel], {})
        if not installed.endswith(f"{wheel.name} is not a supported wheel on this platform."):
            sys.exit(f"pip install {wheel.name} ends with: {installed}")
        unpacked = site.parent / wheel.stem
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        environment = environment | {"PYTHONPATH": f"{unpacked}{os.pathsep}{site}"}
        said = refusal([program, "-W", "ignore", "-c", "import lowbit"], environment)
        if not said.startswith("ImportError: this lowbit was built for another Python or processor: found _C.cpython-"):
            sys.exit(f"{wheel.name}, unpacked by hand, ends with: {said}")


def lowbit_wheel(processor: str, python: str) -> Path:
    # There may also be the wheel of `make wheel-aarch64`, which `make test` makes.
    found = list((ROOT / "dist").glob(f"lowbit-*-cp{python.replace('.', '')}-manylinux*_{processor}.whl"))
    if len(found) != 1:
        raise wheels.Missing(f"dist/ has {len(found)} wheels for it; expected one, made by `make wheels`")
    return found[0]


def check(processor: str, python: str, torch: str, keep: bool) -> str:
    """Runs one case and returns its description."""
    lowbit = lowbit_wheel(processor, python)
    program = interpreter(python, processor)
    directory = BUILD / "test-wheels" / f"{processor}-{python}-{torch}"
    shutil.rmtree(directory, ignore_errors=True)
    site = directory / "site"
    install = ["install", "-q", "--no-deps", "--no-compile", "--root-user-action=ignore", f"--target={site}"]
    install += flags(python, processor)
    lines = (ROOT / "scripts/arm_python.txt").read_text().splitlines()
    needed = [line for line in lines if line and not line.startswith(("#", "torch", "executorch"))]
    pip(*install, *needed, TORCH_COMPILES_WITH)
    pip(*install, "--no-index", torch_wheel(processor, python, torch), lowbit)
    whole = (processor, python, torch) == WHOLE
    if whole:
        pip(*install, *EXECUTORCH_IMPORTS)
    compiler = "gcc" if processor == platform.machine() else f"{processor}-linux-gnu-gcc"
    wheels.run([sys.executable, ROOT / "scripts/cuda_stand_ins.py", site, directory / "cuda", compiler])
    environment = {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    if processor == platform.machine():
        environment["LD_LIBRARY_PATH"] = str(directory / "cuda")
        options = ["--executorch"] if whole else []
    else:
        environment |= {"QEMU_CPU": "max,sve=off", "QEMU_SET_ENV": f"LD_LIBRARY_PATH={directory / 'cuda'}"}
        options = ["--isa", "i8mm", "--no-compiler"]
    if tuple(map(int, torch.split(".")[:2])) < OLDEST:
        said = refusal([program, "-W", "ignore", "-c", "import lowbit"], environment)
        if said != f"ImportError: lowbit needs torch >= 2.10; found {torch}+cpu":
            sys.exit(f"with torch {torch}, `import lowbit` ends with: {said}")
    else:
        said = wheels.run([program, "-W", "ignore", ROOT / "tests/package/wheel.py", *options], **environment)
    if whole:
        refuse_others(processor, python, site, program, environment)
    if not keep:
        shutil.rmtree(directory)
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases processor:python:torch, separated by commas; default: all")
    parser.add_argument("--keep", action="store_true", help="keep the directories in build/test-wheels")
    arguments = parser.parse_args()
    cases = [tuple(case.split(":")) for case in arguments.only.split(",")] if arguments.only else CASES
    passed, missing = 0, []
    for processor, python, torch in cases:
        started = time.monotonic()
        try:
            said = check(processor, python, torch, arguments.keep)
        except wheels.Missing as error:
            missing.append(f"not tested: {processor}, CPython {python}, torch {torch}: {error}")
            continue
        passed += 1
        print(f"{processor}: {said}  ({time.monotonic() - started:.0f} s)", flush=True)
    for line in missing:
        print(line, file=sys.stderr)
    print(f"{passed} passed, {len(missing)} failed")
    if missing or not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
