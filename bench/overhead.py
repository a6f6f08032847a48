"""Compares a small layer with torch's on every surface, and measures what lowbit adds to `import torch`: docs/overhead.md.

    python bench/overhead.py [--runners DIRECTORY] [--rounds N]

Needs lowbit installed with executorch, and a C++ compiler. DIRECTORY has the C++ programs pt2_runner and pte_runner, if they
were built. Writes docs/overhead.md and docs/overhead.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from importlib import import_module

import lowbit
import numpy
import torch
import torch._dynamo
import torch._inductor
from lowbit.machine.facts import cpu_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT, DATA = ROOT / "docs/overhead.md", ROOT / "docs/overhead.json"
SIZE, DEPTHS, THREADS = 64, (1, 9), (1, 2)
OURS, THEIRS = "lowbit", "torch"
SECONDS = 5e-4  # of one measurement: short, so that other processes rarely interrupt it
RUNNER_CALLS, RUNNER_ROUNDS = 3000, 7
IMPORTS = 15
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def make_models() -> dict[tuple[str, int], torch.nn.Module]:
    torch.manual_seed(0)
    models = {}
    for depth in DEPTHS:
        for kind in (OURS, THEIRS):
            model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(depth))).eval()
            if kind == OURS:
                lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32))
            models[kind, depth] = model
    return models


def prepare(surface: str, model, x, path: pathlib.Path) -> tuple[Callable, object]:
    """A function and its argument: one call of the model on `surface`. The files at `path` may already exist."""
    if surface == "eager":
        return model, x
    if surface.startswith("torch.compile"):
        return torch.compile(model, fullgraph=True, options={"cpp_wrapper": "cpp_wrapper" in surface}), x
    if surface == "AOTInductor, Python":
        path = path.with_suffix(".pt2")
        if not path.exists():
            lowbit.export_pt2(model, (x,), path)
        return torch._inductor.aoti_load_package(path), x
    path = path.with_suffix(".pte")
    if not path.exists():
        lowbit.export_pte(model, (x,), path)
    import_module("lowbit.executorch").register()
    Runtime = import_module("executorch.runtime").Runtime
    return Runtime.get().load_program(path).load_method("forward").execute, (x,)


PYTHON = ("eager", "torch.compile", "torch.compile, cpp_wrapper", "AOTInductor, Python", "ExecuTorch, Python")
PROGRAMS = {"AOTInductor, C++": "pt2_runner", "ExecuTorch, C++": "pte_runner"}


def measure(threads: int, rounds: int, directory: pathlib.Path) -> dict:
    """Microseconds per call in every round: {surface: {"lowbit 1": [...], ...}}. Surfaces and models take turns."""
    torch.set_num_threads(threads)
    portable_lib = import_module("executorch.extension.pybindings.portable_lib")
    portable_lib._unsafe_reset_threadpool(threads)  # before the model is loaded: XNNPACK keeps the pool that it finds
    x = torch.randn(1, SIZE)
    numpy.save(directory / "x.npy", x.numpy())
    models = make_models()
    torch._dynamo.config.recompile_limit = 2 * len(models)  # all of them share one forward
    timers = {}
    with torch.inference_mode():
        for surface in PYTHON:
            for (kind, depth), model in models.items():
                call, argument = prepare(surface, model, x, directory / f"{kind}{depth}")
                output, expected = call(argument), model(x)
                if isinstance(output, list | tuple):
                    (output,) = output
                same = torch.equal(output, expected) if kind == OURS else torch.allclose(output, expected, atol=1e-5)
                if not same:
                    sys.exit(f"overhead: {surface} differs from eager ({kind}, {depth} layers)")
                timers[surface, f"{kind} {depth}"] = timeit.Timer("f(x)", globals={"f": call, "x": argument})
        found = {surface: {} for surface in PYTHON}
        counts = {}
        for key, timer in timers.items():
            timer.timeit(100)
            counts[key] = max(1, int(SECONDS / min(timer.repeat(20, 20)) * 20))
        for _ in range(rounds):
            for (surface, case), timer in timers.items():
                count = counts[surface, case]
                timer.timeit(3)  # brings the surface's own code and data back into the caches
                found[surface].setdefault(case, []).append(timer.timeit(count) / count * 1e6)
    return found


def measure_program(program: pathlib.Path, directory: pathlib.Path, threads: int) -> dict:
    """Like `measure`, through a C++ program that times its calls."""
    found = {}
    suffix = ".pt2" if program.name == "pt2_runner" else ".pte"
    for _ in range(RUNNER_ROUNDS):
        for depth in DEPTHS:
            for kind in (OURS, THEIRS):
                path = directory / f"{kind}{depth}{suffix}"
                printed = run([program, "--runs", RUNNER_CALLS, path, directory / "x.npy"], OMP_NUM_THREADS=threads)
                took = re.search(r"one call: ([0-9.e+-]+) ms", printed)
                if took is None:
                    sys.exit(f"overhead: {program} printed no time of a call:\n{printed}")
                found.setdefault(f"{kind} {depth}", []).append(float(took[1]) * 1e3)
    return found


def run(command: list, **environment) -> str:
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        printed = (done.stdout + done.stderr)[-4000:]
        sys.exit(f"overhead: {' '.join(map(str, command))} ended with {done.returncode}:\n{printed}")
    return done.stdout


def import_milliseconds() -> dict[str, list[float]]:
    """CPU time of `import torch` with and without the autoload, and of the autoload timed alone; in new processes, in turns."""
    timed = "import time\nbegin = time.process_time()\n{}\nprint((time.process_time() - begin) * 1e3)"
    added = "import torch\n" + timed.format("import lowbit_autoload\nlowbit_autoload.register()")
    whole = timed.format("import torch")
    cases = {"with": (whole, 1), "without": (whole, 0), "added": (added, 0)}
    run([sys.executable, "-c", "import torch"], PYTHONDONTWRITEBYTECODE="")  # compiles to bytecode, as an installer does
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(IMPORTS):
        for name, (script, switch) in cases.items():
            found[name].append(float(run([sys.executable, "-c", script], **{SWITCH: switch})))
    return found


def machine() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "CPU": f"{cpu_name()}, {os.cpu_count()} CPUs, lowbit uses {lowbit.isa()['active']}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "executorch": importlib.metadata.version("executorch"),
    }


def summary(cases: dict) -> dict:
    """Quartiles of one call and of each further layer, from the same rounds, for both kinds."""
    first, last = DEPTHS
    found = {}
    for kind in (OURS, THEIRS):
        calls, longer = cases[f"{kind} {first}"], cases[f"{kind} {last}"]
        further = [(b - a) / (last - first) for a, b in zip(calls, longer, strict=True)]
        found[kind] = {"call": statistics.quantiles(calls, n=4), "further": statistics.quantiles(further, n=4)}
    return found


def table(microseconds: dict) -> str:
    """One line of medians per surface and number of threads; ratios are ours to torch's."""
    lines = [
        "| surface | threads | lowbit, one call | torch | ratio | lowbit, each further layer | torch | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for surface in (*PYTHON, *PROGRAMS):
        for threads, found in microseconds.items():
            if surface not in found:
                lines.append(f"| {surface} | {threads} | absent | absent | | absent | absent | |")
                continue
            cells = ""
            for what in ("call", "further"):
                ours, theirs = (found[surface][kind][what][1] for kind in (OURS, THEIRS))
                cells += f" {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |"
            lines.append(f"| {surface} | {threads} |{cells}")
    return "\n".join(lines)


def document(data: dict) -> str:
    facts = "\n".join(f"* {name}: {value}" for name, value in data["machine"].items())
    quartiles = {name: statistics.quantiles(times, n=4) for name, times in data["import"]["ms"].items()}
    added, measured = quartiles["added"], data["import"]["machine"]
    return f"""# What a call costs

Written by `make bench-overhead` (`bench/overhead.py`); `docs/overhead.json` has the quartiles.

{facts}

A linear layer of {SIZE} x {SIZE} with one row of float32, so small that little but the call itself is timed. "One call"
is a model of one such layer; "each further layer" is what one more costs in a model of {DEPTHS[1]}. lowbit: 4 bits,
groups of 32. torch: `torch.nn.Linear`, in ExecuTorch through XNNPACK. Microseconds, medians of {data["rounds"]} rounds
in which all cases take turns, under `torch.inference_mode()`. The C++ programs are those of `examples/cpp` and time
their own calls, {RUNNER_ROUNDS} times {RUNNER_CALLS}; ExecuTorch's takes a thread for every CPU, whatever the column
says. "absent": not built.

{table(data["microseconds"])}

`import torch` takes {added[1]:.1f} ms of CPU time more where lowbit is installed (median of {IMPORTS} processes; quartiles
{added[0]:.1f} and {added[2]:.1f}), timed alone: {added[1] / quartiles["without"][1]:.1%} of the whole. Whole imports,
in turns: {quartiles["with"][1]:.0f} ms, and with `{SWITCH}=0` {quartiles["without"][1]:.0f} ms. {measured["CPU"]}; load
{measured["load before"]}; {measured["date"]}.
`python bench/overhead.py --only-import` measures this part again.
"""


def write(data: dict) -> None:
    DOCUMENT.write_text(document(data))
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    print(DOCUMENT.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=pathlib.Path, default=ROOT / "build/runners")
    parser.add_argument("--rounds", type=int, default=501)
    parser.add_argument("--only-import", action="store_true", help="only measure `import torch` again")
    parser.add_argument("--measure", nargs=2, metavar=("THREADS", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:  # a process per number of threads
        threads, directory = arguments.measure
        (pathlib.Path(directory) / f"{threads}.json").write_text(
            json.dumps(measure(int(threads), arguments.rounds, pathlib.Path(directory)))
        )
        return
    imports = {"machine": machine(), "ms": import_milliseconds()}
    if arguments.only_import:
        write(json.loads(DATA.read_text()) | {"import": imports})
        return
    data = {"machine": machine(), "rounds": arguments.rounds, "import": imports, "microseconds": {}}
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        for threads in THREADS:
            command = [sys.executable, __file__, "--rounds", arguments.rounds, "--measure", threads, directory]
            run(command, OMP_NUM_THREADS=threads)
            found = json.loads((directory / f"{threads}.json").read_text())
            for surface, program in PROGRAMS.items():
                if (arguments.runners / program).exists():
                    found[surface] = measure_program(arguments.runners / program, directory, threads)
            data["microseconds"][threads] = {surface: summary(cases) for surface, cases in found.items()}
    write(data)


if __name__ == "__main__":
    main()
