"""Counts the instructions of KleidiAI's 4-bit linear layer, from PyTorch's aarch64 wheel, and of ours.

Both are torch operators, called from an emulated Python: float32 rows in, float32 rows out, on one thread. The count contains
everything that the call executes, including dispatch and activation quantization, minus an empty pair of markers.
"""

import os
import pathlib

from arm_cycles import Trace, model
from arm_tools import run, tool

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build/arm-python"  # scripts/arm_python.sh
TORCH = PYTHON / "root/usr/lib/python3/dist-packages/torch"
BUILD = ROOT / "build/arm_peer"
# Emulated CPU, the ISA that it stands for, and the cores whose cycles are modeled.
CPUS = {
    "cortex-a76": ("dot-product", "neondot", ("neoverse-n1",)),
    "max,sve=off": ("i8mm", "i8mm", ("neoverse-v1", "neoverse-v2")),
}
MARKERS = (
    'extern "C" void start() { __asm__ volatile("hint #97" ::: "memory"); }\n'
    'extern "C" void stop() { __asm__ volatile("hint #98" ::: "memory"); }\n'
)


def available() -> bool:
    return (PYTHON / "bin/python").exists()


def build(scratch: pathlib.Path) -> pathlib.Path:
    """Builds the operator library and the markers for Arm."""
    run(
        [
            tool("cmake"),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            "-S",
            ROOT,
            "-B",
            BUILD,
            "-DLOWBIT_BUILD_TORCH=ON",
            "-DLOWBIT_BUILD_EXECUTORCH=OFF",
            f"-DLOWBIT_TORCH_DIR={TORCH}",
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}",
        ],
        "cmake for the operators",
    )
    run([tool("cmake"), "--build", BUILD, "--target", "lowbit_torch"], "building the operators")
    markers = scratch / "libmarkers.so"
    run(
        [tool("aarch64-linux-gnu-g++"), "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", markers],
        "building the markers",
        MARKERS,
    )
    return markers


def count(plugin: pathlib.Path, scratch: pathlib.Path) -> dict:
    """{CPU: {task: {"KleidiAI" and "lowbit": instructions per 128 weights, and per core cycles}}}"""
    markers, counts = build(scratch), scratch / "peer"
    found: dict = {}
    for cpu, (name, isa, cores) in CPUS.items():
        # Do not load an installed lowbit before the one that was just built.
        environment = os.environ | {
            "QEMU_CPU": cpu,
            "QEMU_PLUGIN": f"{plugin},out={counts},blocks=on",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        text = run(
            [PYTHON / "bin/python", "-W", "ignore", ROOT / "bench/arm_peer_guest.py", markers, BUILD / "lowbit_torch.so"],
            f"counting KleidiAI on {cpu}",
            environment=environment,
        )
        calls = Trace(counts.read_text()).calls
        tasks = [line.split("\t") for line in text.splitlines()]
        if len(calls) != len(tasks) + 1:
            raise ValueError(f"{len(tasks)} calls but {len(calls)} counts on {cpu}")
        (empty, _), *calls = calls
        traced: dict = {}
        for (library, task, units), (instructions, blocks) in zip(tasks, calls):
            # The model takes the ISA from the end of a kernel's name.
            traced.setdefault(f"{library}_{isa}", {})[task] = int(units), instructions - empty, blocks
        cycles = model(traced, cores)
        for row, by_task in traced.items():
            for task, (units, instructions, _) in by_task.items():
                found.setdefault(name, {}).setdefault(task, {})[row.removesuffix(f"_{isa}")] = {
                    "instructions": round(instructions / units, 1),
                    **{core: round(cycles[core][row][task], 1) for core in cores},
                }
    return found


def document(found: dict | None, core_names: dict) -> list[str]:
    lines = [
        "## Comparison with KleidiAI: 4 bits",
        "",
        "PyTorch's aarch64 wheel (2.10) contains KleidiAI's 4-bit layer, `aten._dyn_quant_matmul_4bit`. One call of each",
        "from Python, 1024 outputs and inputs, float32, one thread, symmetric weights; activation",
        "quantization and dispatch included; instructions and modeled cycles per 128 weights and row.",
        "",
    ]
    if found is None:
        return lines + ["Not counted: there was no emulated Arm Python in build/arm-python.", ""]
    for name, tasks in found.items():
        cores = [core for core in next(iter(next(iter(tasks.values())).values())) if core != "instructions"]
        columns = [("instructions", "instructions"), *((core, f"cycles, {core_names[core]}") for core in cores)]
        both = [(library, *column) for column in columns for library in ("KleidiAI", "lowbit")]
        lines += [
            f"### CPU with {name}",
            "",
            "| | " + " | ".join(f"{library}, {title}" for library, _, title in both) + " |",
            "|---|" + "---|" * len(both),
        ]
        for task, libraries in tasks.items():
            cells = [f"{libraries[library][key]:.1f}" for library, key, _ in both]
            lines.append(f"| {task} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines
