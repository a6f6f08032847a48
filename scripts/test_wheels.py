"""Installs wheels of dist/ beside torch wheels of PyPI, and uses them: `make test-wheels`.

    python scripts/test_wheels.py [--only x86_64:3.11:2.10.0,...] [--keep]

Each case is a processor, a CPython and a torch. It gets a directory with lowbit's wheel, torch and what torch imports,
and nothing else of the project; tests/package/wheel.py runs there. Another processor than this machine's is emulated.
torch's wheels are downloaded once, to build/torch-wheels. Stand-ins take the place of CUDA's libraries, which PyPI's
torch for Linux needs to be imported (scripts/cuda_stand_ins.py).
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
# Every torch on the oldest CPython, every CPython with the newest torch, and on Arm the oldest torch, whose wheel is for CPUs:
# that of 2.15, for CUDA, ends with a segmentation fault in `import torch` under QEMU with stand-ins.
CASES = (
    *(("x86_64", "3.11", torch) for torch in ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    *(("x86_64", python, "2.15.0") for python in ("3.12", "3.13", "3.14")),
    ("aarch64", "3.11", "2.10.0"),
    ("aarch64", "3.11", "2.9.1"),
)
OLDEST = (2, 10)  # with an older torch lowbit refuses to be imported
# Where other wheels are tried, too, and executorch is installed beside, with what it imports when it exports and runs.
WHOLE = ("x86_64", "3.11", "2.13.0")
TORCH_COMPILES_WITH = "setuptools==80.9.0"  # torch asks for it from CPython 3.12 on, where an environment begins without
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
        raise wheels.Missing(f"CPython {python} for {processor} is not to be had here")
    return found


def pip(*arguments) -> None:
    wheels.run([sys.executable, "-m", "pip", *arguments])


def flags(python: str, processor: str) -> list[str]:
    """pip's options for packages of another interpreter than its own."""
    tag = "cp" + python.replace(".", "")
    platforms = (f"manylinux_2_28_{processor}", f"manylinux_2_17_{processor}", f"manylinux2014_{processor}")
    result = ["--only-binary=:all:", "--implementation=cp", f"--python-version={tag[2:]}"]
    result += [f"--abi={abi}" for abi in (tag, "abi3", "none")]
    return result + [f"--platform={name}" for name in platforms]


def torch_wheel(processor: str, python: str, torch: str) -> Path:
    """The file on this machine; downloaded when it is used first."""
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
    """The last line that a program writes which must fail."""
    done = subprocess.run(list(map(str, command)), check=False, env=os.environ | environment, capture_output=True, text=True)
    return done.stderr.splitlines()[-1] if done.returncode else "no error"


def refuse_others(processor: str, python: str, site: Path, program: Path, environment: dict[str, str]) -> None:
    """Another processor's wheel, and another Python's: pip installs neither, and unpacked by hand neither is imported."""
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
    # The wheel of `make wheel-aarch64`, which `make test` makes, may lie beside it.
    found = list((ROOT / "dist").glob(f"lowbit-*-cp{python.replace('.', '')}-manylinux*_{processor}.whl"))
    if len(found) != 1:
        raise wheels.Missing(f"dist/ has {len(found)} wheels for it; expected one, of `make wheels`")
    return found[0]


def check(processor: str, python: str, torch: str, keep: bool) -> str:
    """Runs one case and returns what it says of itself."""
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
            sys.exit(f"beside torch {torch}, `import lowbit` ends with: {said}")
    else:
        said = wheels.run([program, "-W", "ignore", ROOT / "tests/package/wheel.py", *options], **environment)
    if whole:
        refuse_others(processor, python, site, program, environment)
    if not keep:
        shutil.rmtree(directory)
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases, processor:python:torch with commas between them; all when left out")
    parser.add_argument("--keep", action="store_true", help="leave the directories in build/test-wheels")
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
