"""Builds and checks a kernel repository for Hugging Face's `kernels`: `make hub-kernel`. docs/hub.md says how to publish it.

    python scripts/hub_kernel.py [--output build/hub] [--name NAME]

Run it with the Python of the build environment (requirements.txt) on Linux. It adds the variant for this machine's processor;
variants for other processors stay.
"""

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_abi_check import ObjectFile

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "build" / "hub-objects"
FILES = ROOT / "adapters" / "hub"
VERSION = 0  # of the interface, which is the name of a branch; by convention 0 is not final
# torch as in CMakeLists.txt's TORCH_TARGET_VERSION; the system's libraries and CPython as the Hub requires.
TORCH, MANYLINUX, PYTHON = "2.10", "manylinux_2_28", "3.9"


def build_id() -> str:
    """A name that no build of other sources has."""
    digest = hashlib.sha256()
    for place in ("CMakeLists.txt", "cmake", "kernels", "ops", "adapters/hub"):
        for path in sorted([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*.*")):
            if path.suffix != ".pyc":
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"_lowbit_cpu_{digest.hexdigest()[:7]}"


def build(name: str) -> Path:
    """The library with core and operators, whose namespace is the name."""
    tools = Path(sys.executable).parent
    cmake, ninja = (str(tools / tool) if (tools / tool).exists() else tool for tool in ("cmake", "ninja"))
    settings = {
        "CMAKE_MAKE_PROGRAM": ninja, "CMAKE_SKIP_RPATH": "ON", "LOWBIT_STATIC": "ON", "LOWBIT_BUILD_TORCH": "ON",
        "LOWBIT_MANYLINUX_2_28": "ON", "LOWBIT_NAMESPACE": name, "Python_EXECUTABLE": sys.executable,
    }  # fmt: skip
    if launcher := shutil.which("ccache"):
        settings["CMAKE_CXX_COMPILER_LAUNCHER"] = launcher
    options = [f"-D{key}={value}" for key, value in settings.items()]
    environment = {"CCACHE_BASEDIR": str(ROOT)} | os.environ
    for command in (
        [cmake, "-G", "Ninja", "-S", ROOT, "-B", OBJECTS, *options],
        [cmake, "--build", OBJECTS, "--target", "lowbit_torch"],
    ):
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}failed: {' '.join(map(str, command))}")
    return OBJECTS / f"{name}.abi3.so"


def problems(library: Path) -> list[str]:
    """What makes a library depend on a newer glibc, libstdc++, Python or torch."""
    file = ObjectFile(library)
    found = [str(each) for each in (*file.check_manylinux(MANYLINUX), *file.check_python_abi(PYTHON))]
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    # C++ functions of torch: its stable ABI has functions in C only.
    found += re.findall(r"\b_ZNK?(?:2at|3c10|5torch)\w+", listed.stdout)
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    allowed = r"lib(torch_cpu|c10|stdc\+\+|m|gcc_s|c|dl|pthread)\.so|ld-linux"
    libraries = re.findall(r"NEEDED.*\[(.*?)\]", needed)
    return [*found, *(name for name in libraries if not re.match(allowed, name)), *re.findall(r"R(?:UN)?PATH.*", needed)]


def write_variant(library: Path, variant: Path, name: str) -> None:
    """Writes the folder of a variant."""
    shutil.rmtree(variant, ignore_errors=True)
    variant.mkdir(parents=True)
    for path in (*FILES.glob("*.py"), ROOT / "LICENSE", library):
        shutil.copy(path, variant)
    digests = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for path in sorted(variant.iterdir())
    }
    metadata = {
        "id": name, "name": "lowbit", "version": VERSION, "license": "BSD-3-Clause", "backend": {"type": "cpu"},
        "python-depends": [], "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "hub", help="the directory of the repository")
    parser.add_argument("--name", default=build_id(), help="the namespace of the operators; by default one of these sources")
    options = parser.parse_args()
    if platform.system() != "Linux":
        sys.exit(f"the system is {platform.system()}; expected Linux")
    name, output = options.name, options.output
    library = build(name)
    if wrong := problems(library):
        sys.exit(f"{library.name} would not load on every {MANYLINUX} system with torch >= {TORCH}: {', '.join(wrong)}")
    variant = output / "build" / f"torch-stable-abi{TORCH.replace('.', '')}-cpu-{platform.machine()}-linux"
    write_variant(library, variant, name)
    shutil.copy(FILES / "CARD.md", output / "build")  # where kernel-builder looks for the card
    print(variant)


if __name__ == "__main__":
    main()
