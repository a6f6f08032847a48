"""Projects the tokens per second of language models on several machines.

One token reads every linear layer once, with one row of activations; embedding, attention, norms and sampling are left out. Its
time is the larger of two, as if computing and reading overlapped perfectly and every core had its share:

    computing   sum over layers:  k x cycles per activation / clock of the first cores
                                  + n k / 128 / sum over cores (clock / cycles per 128 weights)
    reading     packed bytes / (PEAK_SHARE x peak bandwidth)

The cycles come from the model in arm_cycles.py, the bandwidths from specifications; nothing was measured. The projection shows
whether computing or reading limits a width.
"""

import dataclasses

GROUP_SIZE = 32
MAPPING = "symmetric"
PEAK_SHARE = 0.8  # share of the nominal bandwidth that a good streaming read reaches


@dataclasses.dataclass(frozen=True)
class Cores:
    count: int
    clock: float  # Hz
    model: str  # a key of arm_cycles.CORES


@dataclasses.dataclass(frozen=True)
class Machine:
    name: str
    cores: tuple[Cores, ...]
    bandwidth: float  # nominal peak, bytes per second
    memory: float  # largest memory that is sold with it, bytes
    source: str


MACHINES = (
    Machine(
        "Raspberry Pi 5",
        (Cores(4, 2.4e9, "neoverse-n1"),),
        4267e6 * 4,
        16e9,
        "Raspberry Pi's specification: 4 x Cortex-A76 (the same design as the Neoverse N1) at 2.4 GHz; "
        "LPDDR4X-4267, 32 bits wide",
    ),
    Machine(
        "RK3588 board",
        (Cores(4, 2.4e9, "neoverse-n1"), Cores(4, 1.8e9, "cortex-a55")),
        4267e6 * 8,
        32e9,
        "Rockchip's specification: 4 x Cortex-A76 up to 2.4 GHz and 4 x Cortex-A55 up to 1.8 GHz; "
        "LPDDR4X-4267, four channels of 16 bits",
    ),
    Machine(
        "RK3568 board",
        (Cores(4, 2.0e9, "cortex-a55"),),
        3200e6 * 4,
        8e9,
        "Rockchip's specification: 4 x Cortex-A55 up to 2.0 GHz; LPDDR4X-3200, 32 bits wide",
    ),
    Machine(
        "AWS Graviton3",
        (Cores(64, 2.6e9, "neoverse-v1"),),
        4800e6 * 8 * 8,
        512e9,
        "a whole chip: 64 x Neoverse V1 at 2.6 GHz, 8 channels of DDR5-4800 (AWS, and WikiChip for the clock)",
    ),
    Machine(
        "AWS Graviton4",
        (Cores(96, 2.8e9, "neoverse-v2"),),
        5600e6 * 8 * 12,
        768e9,
        "a whole chip: 96 x Neoverse V2 at 2.8 GHz, 12 channels of DDR5-5600 (AWS)",
    ),
)


def llama(layers: int, hidden: int, mlp: int, key_value: int, vocabulary: int) -> tuple:
    """(count, n, k) of the linear layers of a Llama."""
    return (
        (2 * layers, hidden, hidden),  # query, output
        (2 * layers, key_value, hidden),  # key, value
        (2 * layers, mlp, hidden),  # gate, up
        (layers, hidden, mlp),  # down
        (1, vocabulary, hidden),  # head
    )


MODELS = {
    "Llama 3.1 8B": llama(layers=32, hidden=4096, mlp=14336, key_value=1024, vocabulary=128256),
    "Llama 3.2 1B": llama(layers=16, hidden=2048, mlp=8192, key_value=512, vocabulary=128256),
}


def gemv_cycles(cycles: dict, core: str, bits: int) -> float:
    """Cycles of the best kernel for one row of activations."""
    task = f"{MAPPING} g{GROUP_SIZE} m1"
    return min(tasks[task] for row, tasks in cycles[core].items() if row.startswith(f"linear_a8w{bits}_") and task in tasks)


def quantize_cycles(cycles: dict, core: str) -> float:
    task = f"f32 g{GROUP_SIZE}"
    return min(tasks[task] for row, tasks in cycles[core].items() if row.startswith("quantize_") and task in tasks)


def seconds(machine: Machine, layers: tuple, bits: int, cycles: dict, packed: float) -> tuple[float, float]:
    """Seconds of computing and of reading."""
    first = machine.cores[0]
    weights_per_second = sum(
        cores.count * cores.clock * 128 / gemv_cycles(cycles, cores.model, bits) for cores in machine.cores
    )
    computing = sum(
        count * (k * quantize_cycles(cycles, first.model) / first.clock + n * k / weights_per_second) for count, n, k in layers
    )
    return computing, packed / (PEAK_SHARE * machine.bandwidth)


def project(cycles: dict, packed_bytes) -> dict:
    """{model: {machine: {bits: (tokens per second, the limit)}}}, without models that do not fit in memory.

    `packed_bytes(n, k)`: {(bits, mapping, group size): bytes}.
    """
    found: dict = {}
    for model, layers in MODELS.items():
        sizes = {(n, k): packed_bytes(n, k) for _, n, k in layers}
        for bits in range(1, 9):
            packed = sum(count * sizes[n, k][bits, MAPPING, GROUP_SIZE] for count, n, k in layers)
            rows = found.setdefault(model, {})
            rows.setdefault("bytes", {})[str(bits)] = packed
            for machine in MACHINES:
                if packed <= 0.9 * machine.memory:
                    computing, reading = seconds(machine, layers, bits, cycles, packed)
                    rows.setdefault(machine.name, {})[str(bits)] = (
                        round(1 / max(computing, reading), 1),
                        "compute" if computing > reading else "memory",
                    )
    return found


def document(projected: dict, core_names: dict) -> list[str]:
    lines = [
        "## Tokens per second, projected",
        "",
        "A projection from the modeled cycles and from specifications; nothing was measured. One token reads every linear",
        f"layer once (one row, {MAPPING}, groups of {GROUP_SIZE}); attention, embedding and norms are left out. Its",
        "time is max(computing, reading), as if both overlapped perfectly and the work were spread evenly over all cores:",
        "",
        "    computing = sum over layers of k * (cycles per activation) / clock",
        "                                 + n * k / 128 / (sum over cores of clock / (cycles per 128 weights))",
        f"    reading   = packed bytes / ({PEAK_SHARE} * nominal bandwidth)",
        "",
        f"The share of {PEAK_SHARE} is an assumption. Starting and joining threads is left out too: on the servers a",
        "layer of the small model takes a few microseconds, as long as starting threads, so servers are slower than these",
        "figures. Bold: limited by computing; otherwise by memory. Empty: does not fit in the largest memory sold. The",
        "inputs are in a table in `bench/arm_project.py`.",
        "",
        "| machine | cores | GB/s | from |",
        "|---|---|---|---|",
    ]
    for machine in MACHINES:
        cores = ", ".join(
            f"{cores.count} x {cores.clock / 1e9:.1f} GHz (modeled as {core_names[cores.model]})" for cores in machine.cores
        )
        lines.append(f"| {machine.name} | {cores} | {machine.bandwidth / 1e9:.1f} | {machine.source} |")
    widths = [str(bits) for bits in range(1, 9)]
    for model, rows in projected.items():
        lines += ["", f"### {model}", "", "| | " + " | ".join(widths) + " |", "|---|" + "---|" * len(widths)]
        lines.append("| packed linear layers, GB | " + " | ".join(f"{rows['bytes'][bits] / 1e9:.2f}" for bits in widths) + " |")
        for machine in MACHINES:
            cells = [rows.get(machine.name, {}).get(bits) for bits in widths]
            shown = [
                "" if cell is None else f"**{cell[0]:.1f}**" if cell[1] == "compute" else f"{cell[0]:.1f}" for cell in cells
            ]
            lines.append(f"| {machine.name} | " + " | ".join(shown) + " |")
    return lines + [""]
