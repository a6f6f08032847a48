"""What the counts of instructions on Arm and on x86 share."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

GROWTH = 1.03
COVERED = 0.99  # of a call's instructions; the rest is taken to be as fast as these

Block = TypeVar("Block", bound=tuple[Hashable, ...])  # instructions


def growth(committed: Mapping, found: Mapping) -> list[str]:
    """What needs too many instructions, or is counted for the first time."""
    bad = []
    for name, tasks in found.items():
        for task, value in tasks.items():
            before = committed.get(name, {}).get(task)
            if before is None:
                bad.append(f"{name}, {task}: not in the committed counts; count anew without --check")
            elif value > before * GROWTH:
                bad.append(f"{name}, {task}: {value} instructions, {before} committed")
    return bad


def hot(blocks: Mapping[Block, int]) -> tuple[dict[Block, int], float]:
    """The blocks that most of the instructions are in, with how often each ran, and the share of the instructions in them."""
    total = sum(len(block) * times for block, times in blocks.items())
    found, covered = {}, 0
    for block, times in sorted(blocks.items(), key=lambda item: -len(item[0]) * item[1]):
        if covered >= COVERED * total:
            break
        found[block] = times
        covered += len(block) * times
    return found, covered / total
