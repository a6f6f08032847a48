"""The description of a checkpoint in the facts of its plan: settings as JSON, and sizes and checksums of its files."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAN = "lowbit.plan"  # beside the weights
TOKENS = "lowbit.tokens"  # beside the plan
FACT = "program"
_PER_NUMBER = 7  # bytes of the description in a fact of 64 bits


class NoPlan(Exception):
    """A checkpoint does not run by a plan; the message, which may be empty, says why."""

    def __init__(self, reason: str, stale: bool = True, caches: tuple[str, ...] = ()):
        """
        Args:
            stale: a new plan would help.
            caches: the cache types for which the plan was proven.
        """
        super().__init__(reason)
        self.stale, self.caches = stale, caches


def are_allowed() -> bool:
    """Whether programs use plans beside weights: the environment variable LOWBIT_PLAN is not 0."""
    return os.environ.get("LOWBIT_PLAN", "1") != "0"


def states(directory: Path, names: Sequence[str]) -> dict[str, list[int] | None]:
    """The size and checksum of each file of settings; None: there is no such file."""
    contents = ((name, directory / name) for name in names)
    read = ((name, path.read_bytes() if path.is_file() else None) for name, path in contents)
    return {name: None if content is None else [len(content), zlib.crc32(content)] for name, content in read}


def facts_of(content: dict[str, Any]) -> dict[str, list[int]]:
    """A description as facts of a plan."""
    text = json.dumps(content).encode()
    parts = [text[at : at + _PER_NUMBER] for at in range(0, len(text), _PER_NUMBER)]
    return {FACT: [len(text), *(int.from_bytes(part, "little") for part in parts)]}


def description(facts: dict[str, list[int]], version: str) -> dict[str, Any]:
    """The description in the facts of a plan.

    Raises:
        KeyError, ValueError, OverflowError: there is none, or it is that of another version, which may compute a plan in
            another way.
    """
    content = _content(facts)
    if content["lowbit"] != version:
        raise KeyError("lowbit")
    return content


def _content(facts: dict[str, list[int]]) -> dict[str, Any]:
    size, *numbers = facts[FACT]
    return dict(json.loads(b"".join(number.to_bytes(_PER_NUMBER, "little") for number in numbers)[:size]))


def check_settings(file: Path, facts: dict[str, list[int]]) -> None:
    """Checks the files beside a plan that say what the model computes and where its texts end, as far as they are there.

    Raises:
        ValueError: one has changed since the plan was made.
    """
    try:
        recorded = _content(facts)["files"]
        sums = {name: recorded[name] for name in ("config.json", "generation_config.json")}
    except (KeyError, TypeError, ValueError, OverflowError):
        return  # the plan was made without a description
    for name, now in states(file.parent, list(sums)).items():
        if now is not None and now != sums[name]:
            raise ValueError(f"{name} beside {file} has changed since the plan was made; remove the plan, and make a new one")


def described(
    directory: Path, facts: dict[str, list[int]], version: str, names: Sequence[str], kind: str = "text"
) -> dict[str, Any]:
    """The description of the plan in a directory, if it is of this kind of model and fits the files beside it.

    Raises:
        NoPlan: it does not.
    """
    try:
        content = description(facts, version)
        found, refusal = content["files"], content["refusal"]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise NoPlan("") from None  # written without a description, or by another version
    if content.get("kind", "text") != kind:
        raise NoPlan("", stale=False)
    if found != states(directory, names):
        raise NoPlan(f"{directory / PLAN} is not used: the files of settings beside it have changed")
    if refusal is not None:
        raise NoPlan(f"{directory / PLAN} is not used: {refusal}", stale=False)
    return content
