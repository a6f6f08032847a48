"""``lowbit report``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from .models import read_text, set_threads
from .options import CalibrateTokens, Model, Quantizing, Threads, parse_group_size, parse_widths, refuse_unused
from .output import Output, table


def _methods(given: str, option: str) -> list[str]:
    from ..calibration import METHODS

    names = [] if given == "none" else given.split(",")
    if not set(names) <= set(METHODS):
        known = ", ".join(METHODS)
        raise typer.BadParameter(f"{given!r}; expected some of {known} with commas between, or none", param_hint=option)
    return list(dict.fromkeys(names))


_Bits = Annotated[str, typer.Option("--bits", metavar="N,N,...", help="Widths, 1 to 8.")]


@dataclass(frozen=True)
class _Widths(Quantizing):
    bits: _Bits = "8,4,3,2"  # type: ignore[assignment]
    activation_bits: Annotated[
        Literal["8", "16", "8,16"],
        typer.Option("--activation-bits", help="As in quantize; 8,16: weights rounded to nearest also with 16."),
    ] = "8"  # type: ignore[assignment]


def report(
    output: Output,
    model: Model,
    output_path: Annotated[
        Path, typer.Argument(metavar="OUT", help="The page, a name in .html, or its directory.", show_default=False)
    ],
    *,
    text: Annotated[Path, typer.Option("--text", help="File of text to measure on, UTF-8.", show_default=False)],
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="Calibration text for the methods that need one; not the same as --text.")
    ] = None,
    quantizing: _Widths,
    target_bits: Annotated[
        str,
        typer.Option(
            "--target-bits",
            metavar="N,N,...",
            help="With --calibrate: also mixed precision per layer, for these means of bits per weight; or none.",
        ),
    ] = "1.5,2,2.5,3,3.5,4.5,6.5,8.5",
    methods: Annotated[
        str,
        typer.Option("--methods", metavar="NAME,...", help="With --calibrate: methods for one width in all layers; or none."),
    ] = "importance,auto",
    target_methods: Annotated[
        str,
        typer.Option("--target-methods", metavar="NAME,...", help="With --calibrate: methods for mixed precision per layer."),
    ] = "auto",
    calibrate_tokens: CalibrateTokens = 32768,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that the model sees at once.")] = 512,
    skip_layers: Annotated[bool, typer.Option("--skip-layers", help="Skip the cost of each layer.")] = False,
    skip_speed: Annotated[bool, typer.Option("--skip-speed", help="Skip the decoding speed.")] = False,
    threads: Threads = None,
) -> None:
    """Write a page of plots: quality against bytes for every width and method, compared with other formats."""
    from ..files.config_json import refuse_gguf
    from ..files.replace import has_mark, refuse_other_file, replacing
    from ..tools.report.measure_methods import Options, collect
    from ..tools.report.report_page import MARK, render  # fails early if matplotlib is missing

    if calibrate is None:
        chosen = {"methods": methods, "target_methods": target_methods, "target_bits": target_bits}
        unused = [name for name, value in chosen.items() if value != "none"]
        refuse_unused("without --calibrate", "calibrate_tokens", *unused)
    widths = sorted(parse_widths(quantizing.bits), reverse=True)
    try:
        targets = sorted({float(part) for part in target_bits.split(",")} if target_bits != "none" else (), reverse=True)
    except ValueError:
        targets = [0.0]
    if not all(1 <= target <= 16 for target in targets):
        raise typer.BadParameter(
            f"{target_bits!r}; expected numbers from 1 to 16, as in 4.5,2.5, or none", param_hint="--target-bits"
        )
    of_bits, of_targets = (
        _methods(given, name) for given, name in ((methods, "--methods"), (target_methods, "--target-methods"))
    )
    set_threads(threads)
    page = output_path / "report.html" if output_path.is_dir() else output_path
    if page.suffix != ".html":
        raise ValueError(f"{page} does not end in .html; expected the name of the page, or an existing directory")
    if not page.parent.is_dir():
        raise NotADirectoryError(f"{page.parent} is not a directory; make it first")
    refuse_other_file(page, lambda path: has_mark(path, MARK), "a report")
    refuse_gguf(model)
    if not model.is_dir():
        raise NotADirectoryError(f"{model} is not a directory; expected a float checkpoint")
    calibration = None if calibrate is None else read_text(calibrate)
    content = read_text(text)
    if calibration is not None and calibration == content:
        raise ValueError(f"{calibrate} and {text} are the same text; calibrate on another text to avoid data leakage")
    options = Options(
        model, content, calibration, widths, targets, parse_group_size(quantizing.group_size), quantizing.mapping,
        quantizing.embedding_bits, of_bits, of_targets, window, calibrate_tokens, sensitivity=not skip_layers,
        speed=not skip_speed, activation_bits=[int(bits) for bits in quantizing.activation_bits.split(",")],
    )  # fmt: skip
    figures = collect(options, page.with_suffix(".json"), lambda what: output.note(f"{what} ..."))
    command = shlex.join(["lowbit", *sys.argv[1:]])
    with replacing(page, ".html") as target:
        target.write_text(render(figures, command), encoding="utf-8")
    shown = table("", "bits per weight", figures["about"]["quality"])
    for row in sorted(figures["rows"], key=lambda row: -row["bytes"]):
        name = row["method"] if row["bits"] is None else f"{row['method']}, {row['bits']:g} bits"
        shown.add_row(name, f"{row['bits_per_weight']:.2f}", f"{row['quality']:.4f}")
    written = {"output": str(page), "figures": str(page.with_suffix(".json"))}
    document = {**written, **figures["about"], "results": figures["rows"]}
    output.result(document, shown, f"written: {page}")
