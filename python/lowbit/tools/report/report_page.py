"""Renders a report as one self-contained HTML file with SVG plots by matplotlib."""

from __future__ import annotations

import io
import math
from html import escape
from typing import Any

try:
    import matplotlib
    import matplotlib.ticker
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"matplotlib is not installed ({error}); a report needs it: pip install matplotlib") from error

MARK = b"<section><h2>All figures</h2>"  # tells pages of reports, of all versions, from others
_COLORS = {"nearest": "#767676", "nearest, levels": "#aaaaaa", "nearest, 16-bit activations": "#4caf50",
            "importance": "#0f7ba0", "auto": "#b3261e",
            "auto, levels": "#e07a5f", "widths by layer": "#1b1b1b", "widths by layer, distilled": "#1f4e9c",
            "GGUF": "#8a6d00", "GGUF, importance": "#2e7d32", "torchao": "#6b4fa0", "HQQ": "#c2185b",
            "GPTQ": "#00838f"}  # fmt: skip
_MARKS = {"nearest": "o", "nearest, levels": "o", "nearest, 16-bit activations": "h", "importance": "s",
          "auto": "D", "auto, levels": "D",
          "widths by layer": "*", "widths by layer, distilled": "*", "GGUF": "^", "GGUF, importance": "P",
          "torchao": "v", "HQQ": "X", "GPTQ": "<"}  # fmt: skip
_MOST_OVER_FLOAT = 4  # largest perplexity ratio shown in the plot; the table shows all
_MOST_LAYERS = 40  # the plot shows this many layers with the largest loss

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 70rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 45rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1.5rem; }
section { min-width: 0; margin-bottom: 1.5rem; }
svg { display: block; width: 100%; height: auto; max-width: 40rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
footer { color: #555; font-size: .9rem; overflow-wrap: anywhere; }
"""


def _svg(figure: Figure, name: str) -> str:
    """A plot as an SVG element whose ids are unique in the page and the same in every run."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # matplotlib uses the ids figure_1, axes_1 and so on in every plot.
    for mark in (' id="', 'href="#', "url(#"):
        text = text.replace(mark, f"{mark}{name}-")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(name, quote=True)}" data-plot="{name}" ', 1)


def _axes(height: float = 3.9) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _series(row: dict[str, Any]) -> str:
    if row["family"] in ("lowbit", "float"):
        return str(row["method"])
    return f"{row['family']}, importance" if row["method"].endswith(", importance") else row["family"]


def _quality(figures: dict[str, Any]) -> str:
    about, rows = figures["about"], figures["rows"]
    figure, axes = _axes()
    whole = next(row["quality"] for row in rows if row["family"] == "float")
    shown = [row for row in rows if row["family"] != "float" and _finite(row["quality"])]
    if about["quality"] == "perplexity":  # large ratios would hide the differences of the rest
        shown = [row for row in shown if row["quality"] <= _MOST_OVER_FLOAT * whole]
    for series in dict.fromkeys(map(_series, shown)):
        points = sorted((row["bytes"] / 1e6, row["quality"]) for row in shown if _series(row) == series)
        ours = any(row["family"] == "lowbit" for row in shown if _series(row) == series)
        axes.plot(*zip(*points, strict=True), linestyle="-" if ours else "none", marker=_MARKS.get(series, "."),
                  label=series, markersize=5, color=_COLORS.get(series))  # fmt: skip
    axes.axhline(whole, color="#1b1b1b", linestyle=":", linewidth=1, label="float")
    axes.set_xlabel("matrices, MB")
    if about["quality"] == "perplexity":
        axes.set_ylabel("perplexity (lower is better)")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6))
        axes.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    else:
        axes.set_ylabel("cosine with float (higher is better)")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure, "quality")


def _speed(figures: dict[str, Any]) -> str | None:
    rows = [row for row in figures["rows"] if row["tokens_per_second"]]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: (-row["bytes"], row["method"]))
    figure, axes = _axes()
    names = [
        "float" if row["bits"] is None else f"{row['bits']} bits" if row["method"] == "nearest" else f"{row['bits']} bits\nA16"
        for row in rows
    ]
    bars = axes.bar(names, [row["tokens_per_second"] for row in rows], color="#0f7ba0")
    axes.bar_label(bars, fmt="%.0f", fontsize=9)
    axes.set_ylabel("tokens per second")
    return _svg(figure, "speed")


def _layers(figures: dict[str, Any]) -> str | None:
    if not figures["sensitivity"]:
        return None
    layers = [layer for layer in figures["sensitivity"]["layers"] if layer["cost"] is not None]
    layers = sorted(layers, key=lambda layer: layer["cost"])[-_MOST_LAYERS:]
    if not layers:
        return None
    figure, axes = _axes(1.2 + 0.19 * len(layers))
    axes.barh([_short(layer["layer"]) for layer in layers], [layer["cost"] for layer in layers], color="#0f7ba0")
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.01)
    axes.set_xlabel("loss, nats per token" if figures["about"]["quality"] == "perplexity" else "loss of cosine")
    return _svg(figure, "layers")


def _short(name: str) -> str:
    usual = ("model", "layers", "encoder", "layer", "self_attn", "mlp")
    name = ".".join(part for part in name.split(".") if part not in usual) or name
    return name if len(name) <= 34 else f"…{name[-33:]}"


def _threads(about: dict[str, Any]) -> str:
    return f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _table(figures: dict[str, Any]) -> str:
    perplexity = figures["about"]["quality"] == "perplexity"
    whole = next(row["quality"] for row in figures["rows"] if row["family"] == "float")
    head = ["", "bits per weight", "MB", figures["about"]["quality"], "over float" if perplexity else "same neighbors"]
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in sorted(figures["rows"], key=lambda row: (-row["bytes"], row["method"])):
        quality = row["quality"]
        cells = [_name(row), f"{row['bits_per_weight']:.2f}", f"{row['bytes'] / 1e6:.3g}"]
        cells.append((f"{quality:.2f}" if perplexity else f"{quality:.4f}") if _finite(quality) else "none")
        cells.append(
            "none" if not _finite(quality) else f"{quality / whole:.4f}" if perplexity else f"{row['same_neighbors']:.3f}"
        )
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join(lines)


_NEAR = 0.25  # bits per weight; formats further apart are not comparable


def ahead(rows: list[dict[str, Any]], perplexity: bool) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Rows of other projects that are better than each lowbit row of the same size or less.

    Returns:
        These rows, the largest first, each with lowbit's best row of the same size or less, or None.
    """
    better = []
    for row in sorted(rows, key=lambda row: -row["bytes"]):
        if row["family"] in ("lowbit", "float") or not _finite(row["quality"]):
            continue
        ours = [
            our for our in rows if our["family"] == "lowbit" and our["bytes"] <= row["bytes"] and _finite(our["quality"])
        ]  # fmt: skip
        sign = 1 if perplexity else -1
        best = min(ours, key=lambda our: sign * our["quality"], default=None)
        if best is None or sign * best["quality"] > sign * row["quality"]:
            better.append((row, best))
    return better


def _ahead(figures: dict[str, Any]) -> str:
    rows, perplexity = figures["rows"], figures["about"]["quality"] == "perplexity"
    if all(row["family"] in ("lowbit", "float") for row in rows):
        return ""
    better = ahead(rows, perplexity)
    if not better:
        text = "No format of another project is better than lowbit at the same bytes or fewer."
        return f"<p>{text}</p>"
    items = []
    for row, best in better:
        digits = 2 if perplexity else 4

        def figure(our: dict[str, Any], digits: int = digits) -> str:
            return f"{our['quality']:.{digits}f} of {_name(our)} at {our['bits_per_weight']:.2f}"

        text = f"{row['method']} at {row['bits_per_weight']:.2f} bits per weight: {row['quality']:.{digits}f}, "
        text += "and no row of lowbit is as small" if best is None else f"against {figure(best)}"
        if best is not None and row["bits_per_weight"] - best["bits_per_weight"] > _NEAR:
            larger = [our for our in rows if our["family"] == "lowbit" and our["bytes"] > row["bytes"]]
            text += ", the best that was measured below this size"
            if larger:
                text += f"; the smallest above has {figure(min(larger, key=lambda our: our['bytes']))}"
            text += f". To measure lowbit at this size too: --target-bits {row['bits_per_weight']:.1f}"
        items.append(f"<li>{escape(text)}</li>")
    text = "These formats of other projects are better than lowbit at the same bytes or fewer:"
    return f"<p>{text}</p><ul>{''.join(items)}</ul>"


def _name(row: dict[str, Any]) -> str:
    return row["method"] if row["bits"] is None else f"{row['method']}, {row['bits']:g} bits"


def render(figures: dict[str, Any], command: str) -> str:
    """The HTML page of the figures of :func:`lowbit.tools.report.measure_methods.collect`.

    Args:
        figures: the content of the JSON file.
        command: the command that produced them, shown on the page.
    """
    about = figures["about"]
    title = f"{about['model']}: quality, bytes and speed"
    unit = "tokens predicted" if about["quality"] == "perplexity" else "sentences"
    text = (
        "Bytes of the matrices that are quantized: codes, scales and all else of the format. Other projects' formats are "
        "evaluated by dequantizing, with float activations; lowbit as it runs, with activations of "
        f"{about['activation_bits']} bits."
    )
    if about["quality"] == "cosine":
        text += " Same neighbors: which part of each sentence's five nearest others stays the same."
    parts = [("Quality per byte", text, _quality(figures))]
    if (speed := _speed(figures)) is not None:
        text = f"Decoding in eager mode after a short prompt; {_threads(about)} of {about['machine']}."
        if any(row["tokens_per_second"] and row["method"] not in ("float", "nearest") for row in figures["rows"]):
            text += " A16: activations of 16 bits."
        parts.append(("Decoding", text, speed))
    if (layers := _layers(figures)) is not None:
        text = f"What each layer costs when it alone is rounded to nearest at {figures['sensitivity']['bits']} bits."
        parts.append(("Layers", text, layers))
    sections = "\n".join(f"<section><h2>{escape(head)}</h2><p>{escape(text)}</p>{plot}</section>" for head, text, plot in parts)
    notes = "".join(f"<br>{escape(note)}" for note in figures["notes"])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(about["architecture"])}, {about["weights"] / 1e6:.3g} million weights in matrices; {about["quality"]} on
{about["measured_on"]:,} {unit}.</p>
<div class="plots">
{sections}
</div>
{MARK.decode()}{_ahead(figures)}<div class="wide"><table>
{_table(figures)}
</table></div></section>
<footer><code>{escape(command)}</code><br>{escape(about["machine"])}, {_threads(about)}, torch
{escape(figures["identity"]["torch"])}{notes}</footer>
</body>
</html>
"""
