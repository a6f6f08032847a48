"""Models the cycles of counted calls on several cores.

The QEMU plugin records how often a call executed each basic block. llvm-mca models how many cycles one block needs on a core
when it repeats forever. A call costs the sum over its blocks of times x cycles. The model has no cache misses, no mispredicted
branches, and neither waiting nor overlap between blocks. It fits loops whose body is one block best, as the kernels' inner
loops are.
"""

import concurrent.futures
import json
import os

from arm_tools import llvm, run
from costs import hot

# LLVM's name of a core: its name in text, and the ISAs of the kernels that it runs.
BASE = ("portable", "neon", "neondot")
CORES = {
    "cortex-a53": ("Cortex-A53", BASE[:-1]),
    "cortex-a55": ("Cortex-A55", BASE),
    "cortex-a510": ("Cortex-A510", (*BASE, "i8mm")),
    "neoverse-n1": ("Neoverse N1", BASE),
    "neoverse-v1": ("Neoverse V1", (*BASE, "i8mm")),
    "neoverse-v2": ("Neoverse V2", (*BASE, "i8mm")),
}
ITERATIONS = 100

MARKERS = (0xD5032C3F, 0xD5032C5F)
TRIPLE = "aarch64-linux-gnu"
Block = tuple  # of instruction words


class Trace:
    """The calls of one run of the plugin with blocks=on, in order."""

    def __init__(self, text: str):
        self.calls: list[tuple[int, dict[Block, int]]] = []  # instructions, {block: times}
        blocks = {}
        for line in text.splitlines():
            fields = line.split()
            if fields[0] == "block":
                blocks[fields[1]] = int(fields[2], 16), tuple(int(word, 16) for word in fields[3:])
                continue
            entered: dict[tuple, list] = {}  # QEMU may translate a block twice
            for entry in fields[1:]:
                number, times = entry.split("*")
                address, words = blocks[number]
                entered.setdefault((address, words), [address, words, 0])[2] += int(times)
            self.calls.append((int(fields[0]), whole_blocks(list(entered.values()))))


def is_branch(word: int) -> bool:
    return (
        word & 0x7C000000 == 0x14000000  # b, bl
        or word & 0xFF000000 == 0x54000000  # b.cond
        or word & 0x7C000000 == 0x34000000  # cbz, cbnz, tbz, tbnz
        or word & 0xFE000000 == 0xD6000000
    )  # br, blr, ret


def whole_blocks(entered: list) -> dict[Block, int]:
    """Joins blocks that QEMU cut at the end of a page or at a length limit: a block without a branch at its end continues in
    the next block."""
    behind: dict[int, list] = {}
    for block in entered:
        behind.setdefault(block[0], []).append(block)
    # in reverse order, so that a block is whole before it is joined to its predecessor
    for block in sorted(entered, key=lambda block: -block[0]):
        address, words, times = block
        following = behind.get(address + 4 * len(words), [])
        if is_branch(words[-1]) or len(following) != 1 or following[0][2] < times:
            continue
        following[0][2] -= times
        block[1] = words + following[0][1]
    found: dict[Block, int] = {}
    for _, words, times in entered:
        if times and not any(marker in words for marker in MARKERS):
            found[words] = found.get(words, 0) + times
    return found


def plain(word: int) -> int:
    """Replaces instructions that the models lack: calls and returns become jumps (llvm-mca assumes 100 cycles for a call), and
    atomic updates, as in PyTorch's dispatch, become nops."""
    if word & 0xFC000000 == 0x94000000:  # bl
        return word & 0x7FFFFFFF
    if word & 0xFF9FFC1F == 0xD61F0000:  # br, blr, ret
        return word & 0xFF9FFFFF
    if word & 0x3B200C00 == 0x38200000:  # ldadd, swp, ...
        return 0xD503201F  # nop
    return word


class Model:
    def __init__(self):
        self.mc, self.mca, self.version = llvm()
        self.text: dict[Block, list[str]] = {}
        self.cycles: dict[tuple[str, Block], float] = {}

    def disassemble(self, blocks: list[Block]) -> None:
        words = sorted({plain(word) for block in blocks for word in block})
        # One word per line, so that llvm-mc can continue after a word that it does not know.
        lines = [" ".join(f"0x{byte:02x}" for byte in word.to_bytes(4, "little")) for word in words]
        output = run([self.mc, "--disassemble", "--mattr=+all", f"--triple={TRIPLE}"], "llvm-mc", "\n".join(lines))
        text = [line.strip() for line in output.splitlines() if line.strip() and not line.strip().startswith(".")]
        if len(text) != len(words):
            raise ValueError(f"llvm-mc read {len(text)} of {len(words)} instructions")
        known = dict(zip(words, text))
        self.text = {block: [known[plain(word)] for word in block] for block in blocks}

    def measure(self, core: str, blocks: list[Block]) -> None:
        lines = []
        for number, block in enumerate(blocks):
            lines += [f"# LLVM-MCA-BEGIN {number}", *self.text[block], f"# LLVM-MCA-END {number}"]
        options = f"--mtriple={TRIPLE} --mcpu={core} --iterations={ITERATIONS} --json --instruction-info=0"
        output = run([self.mca, *options.split(), "--resource-pressure=0"], f"llvm-mca for {core}", "\n".join(lines) + "\n")
        regions = json.loads(output)["CodeRegions"]
        if len(regions) != len(blocks):
            raise ValueError(f"llvm-mca returned {len(regions)} of {len(blocks)} blocks")
        for region in regions:
            self.cycles[core, blocks[int(region["Name"])]] = region["SummaryView"]["TotalCycles"] / ITERATIONS


def model(traced: dict, cores: tuple = tuple(CORES)) -> dict:
    """{row: {task: (units, instructions, blocks)}} to {"llvm": version, core: {row: {task: cycles per unit}}}."""
    mca = Model()
    calls = {(row, task): (units, *hot(blocks)) for row, tasks in traced.items() for task, (units, _, blocks) in tasks.items()}
    mca.disassemble(list({block: None for _, blocks, _ in calls.values() for block in blocks}))
    wanted: dict[str, dict] = {core: {} for core in cores}
    for (row, _), (_, blocks, _) in calls.items():
        for core in cores:
            if row.rsplit("_", 1)[1] in CORES[core][1]:
                wanted[core] |= dict.fromkeys(blocks)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda core: mca.measure(core, list(wanted[core])), cores))
    found: dict = {"llvm": mca.version} | {core: {} for core in cores}
    for (row, task), (units, blocks, share) in calls.items():
        for core in cores:
            if row.rsplit("_", 1)[1] in CORES[core][1]:
                cycles = sum(times * mca.cycles[core, block] for block, times in blocks.items()) / share
                found[core].setdefault(row, {})[task] = round(cycles / units, 2)
    return found
