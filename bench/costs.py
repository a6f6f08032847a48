"""Shared by the instruction counts on Arm and on x86."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

GROWTH = 1.03
COVERED = 0.99  # share of a call's instructions that is modeled; the rest is assumed to be as fast

Block = TypeVar("Block", bound=tuple[Hashable, ...])  # instructions


def growth(committed: Mapping, found: Mapping) -> list[str]:
    """Messages about calls that need too many instructions or have no committed count."""
    bad = []
    for name, tasks in found.items():
        for task, value in tasks.items():
            before = committed.get(name, {}).get(task)
            if before is None:
                bad.append(f"{name}, {task}: not in the committed counts; count again without --check")
            elif value > before * GROWTH:
                bad.append(f"{name}, {task}: {value} instructions, {before} committed")
    return bad


def hot(blocks: Mapping[Block, int]) -> tuple[dict[Block, int], float]:
    """The blocks with most of the instructions, how often each ran, and their share of all instructions."""
    total = sum(len(block) * times for block, times in blocks.items())
    found, covered = {}, 0
    for block, times in sorted(blocks.items(), key=lambda item: -len(item[0]) * item[1]):
        if covered >= COVERED * total:
            break
        found[block] = times
        covered += len(block) * times
    return found, covered / total
