"""``lowbit quantize``."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .dequantize import as_float
from .models import read_text, set_threads
from .output import Output, packed_figures, size, table

if TYPE_CHECKING:
    from .. import CheckpointSummary, LowBitConfig
    from ..calibration import Calibration

_UNITS = {"writing": "bytes"}


@dataclass(frozen=True)
class _Quantizing(options.Quantizing):
    bits: Annotated[int, typer.Option("--bits", min=1, max=8, help="Bits per weight.")] = 4


def quantize(
    context: typer.Context,
    output: Output,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory of a float checkpoint.", show_default=False)],
    target: options.Target,
    *,
    quantizing: _Quantizing,
    scale: Annotated[
        Literal["mse", "absmax"], typer.Option("--scale", help="Least squared error, or the whole range of a group.")
    ] = "mse",
    conv_bits: Annotated[
        int | None,
        typer.Option(
            "--conv-bits", min=1, max=8, help="Bits of convolutions that are matrix products; 8 is advised.",
            show_default="they stay float",
        ),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="Rotate the inputs of linear layers by a Hadamard matrix: fewer bits lose less, tokens take a little longer.",
        ),
    ] = False,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="PATTERN=...",
            help="For layers whose names match: PATTERN=BITS[,GROUP[,MAPPING[,ACTIVATION_BITS]]] or PATTERN=float. "
            "The last match wins.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="TEXT",
            help="Calibration text, UTF-8, similar to what the model will be used on.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="With --calibrate: gptq, importance, auto (the better of these two), or tuned or distilled, which are slower, "
            "and better below 3 bits.",
        ),
    ] = "auto",
    calibrate_tokens: options.CalibrateTokens = 32768,
    window: Annotated[int, typer.Option("--window", min=8, help="Tokens that the model sees at once.")] = 512,
    target_size: Annotated[
        str | None,
        typer.Option(
            "--target-size",
            metavar="SIZE",
            help="With --calibrate: mixed precision per layer, for weight files of at most this size, such as 1.2GB or 800MB.",
            show_default=False,
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits",
            help="With --calibrate: mixed precision per layer, for this mean of bits per weight.",
            callback=options.finite,
            show_default=False,
        ),
    ] = None,
    threads: options.Threads = None,
) -> None:  # fmt: skip
    """Quantize a checkpoint, file by file, without loading it whole."""
    begin = time.perf_counter()
    set_threads(threads)
    if calibrate is None:
        options.refuse_unused("without --calibrate", "method", "calibrate_tokens", "window", "target_size", "target_bits")
    overrides = list(map(_override, override or ()))  # pairs, because their order matters and a pattern may occur twice
    config = quantizing.config_at(quantizing.bits, scale=scale, overrides=overrides, conv_bits=conv_bits, rotate=rotate)
    if target_size is not None and target_bits is not None:
        raise typer.BadParameter("--target-size is given too; expected only one of the two", param_hint="--target-bits")
    target_bytes = None if target_size is None else options.parse_size(target_size, "--target-size")
    text = None if calibrate is None else read_text(calibrate)
    if source.suffix == ".gguf" and source.is_file():
        raise ValueError(
            f"{source} is a GGUF file; expected a checkpoint's directory: {_through_import(context, source, target)}"
        )
    with as_float(output, source, target) as floats:
        if text is None:
            from .. import quantize_checkpoint

            with output.progress(f"quantizing {source}", "bytes") as advance:
                summary = quantize_checkpoint(floats, target, config, progress=advance)
            calibration = None
        else:
            summary, calibration = _calibrate(
                output, source, floats, target, config, text, method, calibrate_tokens, window, target_bytes, target_bits
            )
    from .plans import make_plan

    make_plan(output, target)
    _show(output, source, target, summary, calibration, time.perf_counter() - begin)


def _through_import(context: typer.Context, source: Path, target: Path) -> str:
    """The commands that import a GGUF file and then quantize it with the given options."""
    directory = source.with_suffix("")
    while directory.exists() or directory.absolute() == target.absolute():
        directory = directory.with_name(f"{directory.name}-imported")
    given: list[str] = []
    for name, option in options.on_command_line.items():
        if option.startswith("-"):
            value = context.params[name]
            for one in value if isinstance(value, list | tuple) else [value]:
                given += [option] if one is True else [option, str(one)]
    first = shlex.join(["lowbit", "import", str(source), str(directory)])
    return f"{first} && {shlex.join(['lowbit', 'quantize', str(directory), str(target), *given])}"


def _show(
    output: Output, source: Path, target: Path, summary: CheckpointSummary, calibration: Calibration | None, seconds: float
) -> None:
    """Prints the sizes of a quantized checkpoint, or the JSON document of --json."""
    count, packed = packed_figures(summary.entries)
    document = {
        "source": str(source),
        "target": str(target),
        "bytes_before": summary.source_bytes,
        "bytes_after": summary.target_bytes,
        "packed_layers": count,
        **packed,
        "float_bytes": summary.target_bytes - packed["packed_bytes"],
        "left_bytes": summary.unquantized_bytes,
        "left_float": summary.unquantized,
        "methods": None if calibration is None else calibration.methods,
        "calibration_tokens": None if calibration is None else calibration.tokens,
        "resumed_layers": None if calibration is None else calibration.resumed,
        "seconds": seconds,
    }
    shown = table("", "before", "after", "")
    share = f"{100 * summary.target_bytes / summary.source_bytes:.1f} %"
    shown.add_row("all tensors", size(summary.source_bytes), size(summary.target_bytes), share)
    shown.add_row(
        f"{count} packed layers", "", size(packed["packed_bytes"]), f"{packed['bits_per_weight']:.2f} bits per weight"
    )
    shown.add_row("not quantized", "", size(document["float_bytes"]), "")
    lines = _stays_float(summary)
    if calibration is not None:
        lines.append(_calibrated(calibration))
    output.result(document, shown, *lines, f"{target} written in {document['seconds']:.1f} s")
    if 2 * summary.unquantized_bytes > summary.target_bytes:
        output.warn(
            f"MOST OF THIS MODEL STAYS FLOAT: {len(summary.unquantized)} matrices, "
            f"{100 * summary.unquantized_bytes / summary.target_bytes:.0f} % of the bytes in {target}"
        )


def _calibrate(
    output: Output,
    named: Path,
    source: Path,
    target: Path,
    config: LowBitConfig,
    text: str,
    method: str,
    tokens: int,
    window: int,
    target_bytes: int | None,
    target_bits: float | None,
) -> tuple[CheckpointSummary, Calibration]:
    """Calibrates ``source``; messages call it ``named``, the path that the user gave."""
    from ..calibration.checkpoint import calibrate_checkpoint
    from ..calibration.journal import journal_path
    from ..files.replace import resolve_new_directory

    place = journal_path(resolve_new_directory(target))
    with _resumable(output, place), ExitStack() as stack:
        shown: dict[str, Callable[..., None]] = {}

        def progress(step: str, done: int, total: int, detail: str) -> None:
            if step not in shown:
                stack.close()  # ends the bar of the previous step
                shown[step] = stack.enter_context(
                    output.progress(f"{step}: {target if step == 'writing' else named}", _UNITS.get(step, "layers"))
                )
            shown[step](done, total, detail)

        return calibrate_checkpoint(
            source, target, config, text, method, window=window, max_tokens=tokens, target_bytes=target_bytes,
            target_bits=target_bits, progress=progress,
        )  # fmt: skip


@contextmanager
def _resumable(output: Output, journal: Path) -> Iterator[None]:
    """A context that prints how to continue a calibration if Ctrl-C or an error ends it."""
    try:
        yield
    except BaseException as error:
        if journal.exists() and not isinstance(error, BlockingIOError):  # BlockingIOError: another run holds the journal
            how = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "ended by an error"
            output.note(f"{how}: the finished layers are kept in {journal}; the same command goes on from there")
        raise


def _calibrated(calibration: Calibration) -> str:
    """Describes the calibration in a line."""
    counted = Counter(calibration.methods.values())
    ways = ", ".join(f"{count} by {method}" for method, count in sorted(counted.items()))
    part = "" if calibration.text_tokens == calibration.tokens else f" of {calibration.text_tokens}"
    resumed = f"; {calibration.resumed} are from an earlier run" if calibration.resumed else ""
    return f"layers calibrated on {calibration.tokens}{part} tokens: {ways}{resumed}"


def _stays_float(summary: CheckpointSummary) -> list[str]:
    """A line per reason why matrices stay float, with their number, an example and their share of the bytes."""
    lines = []
    for why in dict.fromkeys(summary.unquantized.values()):
        names = [name for name, reason in summary.unquantized.items() if reason == why]
        share = sum(entry.bytes for entry in summary.entries if entry.name in names) / summary.target_bytes
        what = f"{names[0]} stays" if len(names) == 1 else f"{len(names)} matrices ({names[0]}, ...) stay"
        lines.append(f"{what} float, {100 * share:.1f} % of the bytes: {why}")
    return lines


def _override(text: str) -> tuple[str, dict[str, Any] | None]:
    """An override of LowBitConfig from PATTERN=BITS[,GROUP[,MAPPING[,ACTIVATION_BITS]]] or PATTERN=float."""
    pattern, _, value = options.check_text(text, "--override").rpartition("=")
    if pattern and value == "float":
        return pattern, None
    bits, *rest = value.split(",")
    if not pattern or not bits.isdecimal() or len(rest) > 3 or (len(rest) == 3 and rest[2] not in ("8", "16")):
        raise typer.BadParameter(
            f"{text!r}; expected PATTERN=BITS[,GROUP[,MAPPING[,8 or 16]]] or PATTERN=float", param_hint="--override"
        )
    changes: dict[str, Any] = {"bits": int(bits)}
    if rest:
        changes["group_size"] = options.parse_group_size(rest[0], "--override")
    if len(rest) >= 2:
        changes["mapping"] = rest[1]
    if len(rest) == 3:
        changes["activation_bits"] = int(rest[2])
    return pattern, changes
