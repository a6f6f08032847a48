"""Renders the page of a machine in docs/perf from its figures, and checks these figures."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ...files.replace import replacing
from ...machine.sizes import size

SCHEMA = 2
_NUMBER, _MAYBE = float, (float, None)
_KEYS: dict[str, Any] = {
    "schema": int,
    "date": str,
    "seconds": _NUMBER,
    "threads": int,
    "machine": {
        "cpu": str,
        "board": (str, None),
        "architecture": str,
        "cpus": int,
        "cpus_allowed": int,
        "clusters": [{"cpus": int, "mhz": int}],
        "governor": (str, None),
        "memory_bytes": (int, None),
        "cache_bytes": (int, None),
        "huge_pages": (str, None),
        "system": str,
        "kernel": str,
    },
    "isa": {"active": [str], "cap": (str, None), "absent": [str]},
    "versions": {"lowbit": str, "compiler": str, "python": str, "torch": str, "transformers": (str, None)},
    "load": {"before": _MAYBE, "after": _MAYBE, "others_cpus": _MAYBE, "stolen_cpus": _MAYBE, "busy": bool},
    "kernels": (
        {
            "out_features": int,
            "in_features": int,
            "group_size": int,
            "rows": int,
            "rounds": int,
            "read_bandwidth": [{"threads": int, "bytes_per_second": _NUMBER}],
            "widths": [
                {
                    "bits": int,
                    "threads": int,
                    "isas": [str],
                    "gemv_bytes_per_second": _NUMBER,
                    "gemv_share": _NUMBER,
                    "gemv_gops": _NUMBER,
                    "gemm_gops": _NUMBER,
                }
            ],
        },
        None,
    ),
    "models": [
        {
            "shape": str,
            "bits": int,
            "group_size": int,
            "packed_bytes_per_token": int,
            "threads": int,
            "prompt": int,
            "new": int,
            "rounds": int,
            "read_bandwidth": _NUMBER,
            "joules_per_token": _MAYBE,
            "energy_counter": (str, None),
            "start": ({"seconds": _NUMBER, "cpu_seconds": _NUMBER, "memory_bytes": _NUMBER}, None),
            "programs": [
                {
                    "program": str,
                    "version": str,
                    "prefill_tokens_per_second": _NUMBER,
                    "decode_tokens_per_second": _NUMBER,
                    "bandwidth_share": _MAYBE,
                }
            ],
        }
    ],
    "not_reached": [{"what": str, "why": str}],
}


def check(figures: Any) -> None:
    """Checks the figures of a machine: exactly the expected keys, values of the right types, and no negative numbers.

    Raises:
        ValueError: the message names the key, what was found and what was expected.
    """
    _check(figures, _KEYS, "figures")
    if figures["schema"] != SCHEMA:
        raise ValueError(f"figures.schema is {figures['schema']}; expected {SCHEMA}")


def _check(value: Any, expected: Any, name: str) -> None:
    if isinstance(expected, tuple):
        kind, _ = expected
        if value is not None:
            _check(value, kind, name)
    elif isinstance(expected, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r}; expected a list")
        for at, item in enumerate(value):
            _check(item, expected[0], f"{name}[{at}]")
    elif isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            found = ", ".join(sorted(map(str, value))) if isinstance(value, dict) else repr(value)
            raise ValueError(f"{name} has {found}; expected the keys {', '.join(sorted(expected))}")
        for key, kind in expected.items():
            _check(value[key], kind, f"{name}.{key}")
    else:
        kinds = (int, float) if expected is float else expected
        if not isinstance(value, kinds) or isinstance(value, bool) != (expected is bool):
            raise ValueError(f"{name} is {value!r}; expected {expected.__name__}")
        if not isinstance(value, str | bool) and not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; expected a finite number, 0 or more")


def name_of(figures: dict[str, Any]) -> str:
    """The file name for a machine: its board or CPU, the widest instruction set, the number of CPUs."""
    machine = figures["machine"]
    parts = (machine["board"] or machine["cpu"], figures["isa"]["active"][-1], f"{machine['cpus_allowed']}_cpus")
    return re.sub(r"[^a-z0-9]+", "_", " ".join(parts).lower()).strip("_")


def _cell(text: object) -> str:
    """Escapes a value for a Markdown table, because names of CPUs and systems come from the machine."""
    return re.sub(r"([|<>`*\[\]\\])", r"\\\1", str(text))


def _table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *(tuple(map(_cell, row)) for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _rounds(part: dict[str, Any]) -> str:
    return f"{part['rounds']} round{'s' * (part['rounds'] != 1)}"


def _or(value: object, other: str = "unknown") -> str:
    return other if value is None else str(value)


def render(figures: dict[str, Any]) -> str:
    """The page as Markdown; depends only on the figures."""
    machine, isa, versions = (figures[name] for name in ("machine", "isa", "versions"))
    threads = figures["threads"]
    title = machine["board"] or machine["cpu"]
    lines = [
        f"# {_cell(title)}, {isa['active'][-1]}, {machine['cpus_allowed']} CPUs",
        "",
        f"Written by `lowbit bench --publish` on {figures['date']} (UTC) in {figures['seconds']:.0f} s; do not edit. "
        "[What each figure means](README.md).",
        "",
        *_warning(figures),
        "## Machine",
        "",
    ]
    clusters = ", ".join(f"{each['cpus']} x {each['mhz']} MHz" for each in machine["clusters"])
    memory, cache = (None if machine[key] is None else size(machine[key]) for key in ("memory_bytes", "cache_bytes"))
    capped = f" (capped by LOWBIT_ISA={_cell(isa['cap'])})" if isa["cap"] else ""
    lines += [
        "| Fact | Value |",
        "| --- | --- |",
        f"| CPU | {_cell(machine['cpu'])}, {_cell(machine['architecture'])} |",
        *([f"| Board | {_cell(machine['board'])} |"] if machine["board"] else []),
        f"| Instruction sets in use | {_cell(', '.join(isa['active']))}{capped} |",
        f"| CPUs | {machine['cpus']}, of which this process may use {machine['cpus_allowed']}; {threads} threads |",
        f"| Highest frequency | {clusters or 'unknown'} |",
        f"| Frequency governor | {_cell(_or(machine['governor']))} |",
        f"| Memory; last-level cache | {_or(memory)}; {_or(cache)} |",
        f"| Huge pages | {_cell(_or(machine['huge_pages']))} |",
        f"| System | {_cell(machine['system'])}, {_cell(machine['kernel'])} |",
        f"| Versions | lowbit {_cell(versions['lowbit'])} (built by {_cell(versions['compiler'])}), "
        f"torch {_cell(versions['torch'])}, transformers {_cell(_or(versions['transformers'], 'not installed'))}, "
        f"Python {_cell(versions['python'])} |",
        f"| Load | {_load(figures['load'])} |",
        "",
    ]
    if figures["kernels"] is not None:
        lines += _kernels(figures["kernels"])
    if figures["models"]:
        lines += ["## Models", "", "Whole models with random weights; nothing is scaled up from fewer layers.", ""]
        for model in figures["models"]:
            lines += _model(model)
    lines += ["## Not reached", ""]
    lines += [f"* {_cell(each['what'])}: {_cell(each['why'])}" for each in figures["not_reached"]] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _load(load: dict[str, Any]) -> str:
    before, after, others, stolen = (
        "unknown" if load[key] is None else f"{load[key]:.2f}" for key in ("before", "after", "others_cpus", "stolen_cpus")
    )
    return f"average {before} before, {after} after; CPUs taken by other programs {others}, by other virtual machines {stolen}"


def _warning(figures: dict[str, Any]) -> list[str]:
    if not figures["load"]["busy"]:
        return []
    return ["**The machine was busy with other work meanwhile** (see Load): an idle machine is faster.", ""]


def _kernels(kernels: dict[str, Any]) -> list[str]:
    n, k, rows = kernels["out_features"], kernels["in_features"], kernels["rows"]
    lines = [
        "## Kernels",
        "",
        f"A layer of {n} outputs and {k} inputs, symmetric, in groups of {kernels['group_size']}; float32 activations. "
        f"Medians of {_rounds(kernels)}, in which all widths take turns.",
        "",
    ]
    for roof in kernels["read_bandwidth"]:
        threads, speed = roof["threads"], _digits(roof["bytes_per_second"] / 1e9)
        lines += [f"### {threads} thread{'s' * (threads != 1)}: memory read at {speed} GB/s", ""]
        lines += _table(
            ("Bits", "One row, GB/s", "Of the read bandwidth", "One row, GOPS", f"{rows} rows, GOPS", "Kernels"),
            [
                (
                    row["bits"],
                    _digits(row["gemv_bytes_per_second"] / 1e9),
                    _percent(row["gemv_share"]),
                    _digits(row["gemv_gops"]),
                    _digits(row["gemm_gops"]),
                    ", ".join(row["isas"]),
                )
                for row in kernels["widths"]
                if row["threads"] == threads
            ],
        )
    return lines


def _model(model: dict[str, Any]) -> list[str]:
    weights = size(model["packed_bytes_per_token"])
    return [
        f"### {model['shape']}",
        "",
        f"{model['bits']} bits in groups of {model['group_size']}, {weights} of weights per token; "
        f"a prompt of {model['prompt']} tokens, then {model['new']} tokens; {model['threads']} threads, memory read at "
        f"{_digits(model['read_bandwidth'] / 1e9)} GB/s; medians of {_rounds(model)}.",
        "",
        *_table(
            ("Program", "Prefill, tokens/s", "Decode, tokens/s", "Decode, of the read bandwidth"),
            [
                (
                    f"{row['program']} ({row['version']})",
                    _digits(row["prefill_tokens_per_second"]),
                    _digits(row["decode_tokens_per_second"]),
                    "" if row["bandwidth_share"] is None else _percent(row["bandwidth_share"]),
                )
                for row in model["programs"]
            ],
        ),
        *_first_token(model),
    ]


def _first_token(model: dict[str, Any]) -> list[str]:
    """The lines about the start of a program, and about energy."""
    start, joules, lines = model["start"], model["joules_per_token"], list[str]()
    if start is not None:
        lines += [
            f"Start of `lowbit generate`: the first token after {_digits(start['seconds'])} s, with "
            f"{_digits(start['cpu_seconds'])} s of CPU time and {size(start['memory_bytes'])} of memory, including the "
            "mapped weights.",
            "",
        ]
    if joules is not None:
        lines += [f"Energy: {_digits(joules)} J per token in decode ({_cell(model['energy_counter'])}).", ""]
    return lines


def rehearse(directory: Path) -> None:
    """Creates the directory and tests that it can be written.

    Raises:
        OSError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(f"{directory} is a file; expected a directory") from error
    probe = directory / f".lowbit-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, f"{directory} cannot be written: {error.strerror}") from error


def write(figures: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Writes ``<machine>.md`` and ``<machine>.json``, replacing files of the same machine.

    Raises:
        ValueError: :func:`check` refuses the figures.
        OSError: the files cannot be written.
    """
    check(figures)
    page, data = (directory / f"{name_of(figures)}{suffix}" for suffix in (".md", ".json"))
    for path, text in ((data, json.dumps(figures, indent=2, ensure_ascii=False) + "\n"), (page, render(figures))):
        with replacing(path, path.suffix) as file:
            file.write_text(text, encoding="utf-8")
    return page, data
