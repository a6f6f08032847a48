"""Writes the output of bench/compare.py: JSON, a Markdown document and a roofline plot."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from pathlib import Path

from peers.contender import ERROR_LIMITS

FLOAT_COUNTERPART = "lowbit 4 bits g128"  # what float contenders are compared with


METHOD = """\
Bandwidth: one pass over {mebibytes} MiB in huge pages, in the access pattern that is fastest on this machine (number of
streams, prefetch or not). It is measured before each timing with one row of activations; the table has the median. Peak:
int8 products of the widest ISA on registers, the best of many short passes.

## How it was measured

* A time covers the whole operator: it takes float activations, quantizes them, and returns the output. lowbit and
  torch are called from Python once per weight; onnxruntime and ggml run a graph.
* All contenders take turns. A figure is the median of {rounds} rounds with one row of activations, of
  {rounds_of_several_rows} with more (of one if a call takes a second). Untimed calls wake the threads and the CPU before
  each turn.
* With up to {most_rows_from_memory} rows of activations, each turn goes through many copies of the weights, so that they come
  from memory: {cycled:.1f} GB or more are read before a copy is used again. With more rows every call uses the same weight.
* Each library has its own process, and only one process runs at a time. lowbit and torch share torch's OpenMP pool;
  onnxruntime and ggml have their own. All use the same number of threads, not pinned, with each library's default settings
  for waiting and spinning.
* lowbit's weights are symmetric. g128: groups of 128. Means over shapes are geometric. A ratio above 1 says that lowbit
  is faster. Float contenders are compared with {counterpart}. torch's int8, which has one scale per output row, is compared
  with lowbit's 8 bits per row, all others with lowbit at the same width in groups of 32 or 128.
* lowbit's weights are in huge pages if the system provides them, as after `quantize_` and `use_huge_pages`.
* Share of the read bandwidth: packed bytes (codes, scales, sums) / time / the bandwidth measured just before with the same
  number of threads; the median of the rounds. The two are not measured at the same time, so a share can be a little above
  100 %.
"""


def wrong(results: dict) -> list[str]:
    """Contenders whose results are far from the float result; their times do not count."""
    return [
        f"{spec['name']}: relative error {spec['relative_error']:.3g}, expected {limit(spec):g} at most"
        for spec in results["contenders"]
        if spec["relative_error"] is not None and not spec["relative_error"] <= limit(spec)
    ]


def limit(spec: dict) -> float:
    return spec["error_limit"] or ERROR_LIMITS[spec["bits"]]


def counterpart(spec: dict) -> str | None:
    """lowbit's contender to compare with: of the same width, and the nearest of groups of 32, of 128, and whole rows."""
    if spec["library"] == "lowbit":
        return None
    if spec["bits"] >= 16:
        return FLOAT_COUNTERPART
    if spec["group_size"] is None and spec["bits"] == 8:
        return "lowbit 8 bits per row"
    group_size = 128 if spec["group_size"] is None or spec["group_size"] >= 128 else 32
    return f"lowbit {spec['bits']} bit{'s' * (spec['bits'] > 1)} g{group_size}"


class Times:
    """Medians by contender, shape, rows and threads."""

    def __init__(self, results: dict):
        self.shapes = [tuple(shape) for shape in results["settings"]["shapes"]]
        self.sections = {f"{n} x {k}" for n, k in self.shapes}
        self.found = {
            (row["section"] in self.sections, row["contender"], row["n"], row["k"], row["m"], row["threads"]): row
            for row in results["results"]
        }

    def get(self, name: str, shape: tuple[int, int], m: int, threads: int, by_rows: bool = False) -> dict | None:
        return self.found.get((not by_rows, name, *shape, m, threads))

    def all(self, name: str, m: int, threads: int) -> list[dict]:
        rows = (self.get(name, shape, m, threads) for shape in self.shapes)
        return [row for row in rows if row is not None]

    def ratio(self, ours: str | None, peer: str, m: int, threads: int) -> float | None:
        """Speedup of ours: the geometric mean over the shapes that both have."""
        both = [(self.get(ours, shape, m, threads), self.get(peer, shape, m, threads)) for shape in self.shapes]
        ratios = [theirs["seconds"] / mine["seconds"] for mine, theirs in both if mine and theirs]
        return statistics.geometric_mean(ratios) if ratios else None


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def machine_lines(results: dict) -> str:
    machine = results["machine"]
    isa = machine["isa"]
    cap = f", capped by LOWBIT_ISA={isa['cap']}" if isa["cap"] else ""
    cache = machine["last_level_cache_bytes"]
    return (
        f"{machine['cpu']} ({machine['architecture']}, {machine['cpus']} CPUs usable, "
        f"ISA: {', '.join(isa['cpu'])}{cap}; "
        f"last-level cache {'unknown' if cache is None else f'{cache / 2**20:.0f} MiB'}, "
        f"memory {machine['memory_bytes'] / 2**30:.0f} GiB), {machine['system']}"
    )


def mean(values: list[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def bits_per_weight(spec: dict) -> str:
    sizes = [8 * size / (int(shape.split("x")[0]) * int(shape.split("x")[1])) for shape, size in spec["bytes"].items()]
    return f"{statistics.mean(sizes):.2f}" if sizes else ""


def width_tables(results: dict, times: Times) -> list[str]:
    """Per width: lowbit's speed and the fastest peer's."""
    settings, specs = results["settings"], results["contenders"]
    lines = []
    for m, unit in ((1, "weights_per_ns"), (128, "gops")):
        what = "one row, weights per ns" if m == 1 else f"{m} rows, GOPS"
        for threads in settings["threads"]:
            rows = []
            for bits in range(8, 0, -1):
                ours = {g: f"lowbit {bits} bit{'s' * (bits > 1)} g{g}" for g in (128, 32)}
                speeds = {g: mean([row[unit] for row in times.all(name, m, threads)]) for g, name in ours.items()}
                peers = {
                    spec["name"]: counterpart(spec)
                    for spec in specs
                    if spec["library"] != "lowbit" and spec["bits"] == bits and times.all(spec["name"], m, threads)
                }
                # The fastest peer is chosen by ratios to one contender of lowbit, which leave out shapes that a peer lacks.
                best = min(peers, key=lambda name: times.ratio(ours[128], name, m, threads) or math.inf, default=None)
                ratios = [number(times.ratio(ours[128], f"torch {name}", m, threads)) for name in ("bfloat16", "float32")]
                rows.append(
                    [
                        str(bits),
                        number(speeds[128]),
                        number(speeds[32]),
                        best or "no peer",
                        number(mean([row[unit] for row in times.all(best, m, threads)])) if best else "",
                        number(times.ratio(peers[best], best, m, threads)) if best else "",
                        *ratios,
                    ]
                )
            lines += [f"### {what}, {threads_text(threads)}", ""]
            lines += table(
                [
                    "bits",
                    "lowbit g128",
                    "lowbit g32",
                    "fastest peer of the width",
                    "its speed",
                    "lowbit with equal groups / peer",
                    "lowbit g128 / bfloat16",
                    "lowbit g128 / float32",
                ],
                rows,
            )
    return lines


def contender_tables(results: dict, times: Times) -> list[str]:
    lines = []
    shapes = [f"{n} x {k}" for n, k in times.shapes]
    peaks = results["roofs"]["int8_gops"]
    for m in (1, 128):
        for threads in results["settings"]["threads"]:
            rows = []
            for spec in results["contenders"]:
                found = times.all(spec["name"], m, threads)
                if not found:
                    continue
                cells = []
                for shape in times.shapes:
                    row = times.get(spec["name"], shape, m, threads)
                    if m == 1:
                        cells.append(
                            "" if row is None else f"{number(row['weights_per_ns'])} ({percent(row['share_of_bandwidth'])})"
                        )
                    else:
                        share = "" if row is None or not peaks else f" ({percent(row['gops'] / peaks[str(threads)])})"
                        cells.append("" if row is None else f"{number(row['gops'])}{share}")
                ours = counterpart(spec)
                ratio = times.ratio(ours, spec["name"], m, threads) if ours else None
                rows.append(
                    [
                        spec["name"],
                        bits_per_weight(spec),
                        *cells,
                        "" if ratio is None else f"{number(ratio)} ({ours.removeprefix('lowbit ')})",
                    ]
                )
            unit = "weights per ns (share of the read bandwidth)" if m == 1 else "GOPS (share of the int8 peak)"
            lines += [f"### {'one row' if m == 1 else f'{m} rows'}, {threads_text(threads)}: {unit}", ""]
            lines += table(["contender", "bits per weight", *shapes, "lowbit's speed / contender's (compared with)"], rows)
    return lines


def sweep_tables(results: dict, times: Times) -> list[str]:
    by_rows = [row for row in results["results"] if row["section"] not in times.sections]
    if not by_rows:
        return []
    n, k = by_rows[0]["n"], by_rows[0]["k"]
    names = list(dict.fromkeys(row["contender"] for row in by_rows))
    peer = "torch bfloat16"
    lines = [f"## By rows: 4 bits, groups of 128, {n} x {k}", "", "Microseconds per call.", ""]
    for threads in results["settings"]["threads"]:
        rows = []
        for m in dict.fromkeys(row["m"] for row in by_rows):
            found = {name: times.get(name, (n, k), m, threads, by_rows=True) for name in names}
            ours = [name for name in names if name != peer]
            ratios = (
                [
                    number(found[peer]["seconds"] / found[name]["seconds"]) if found[peer] and found[name] else ""
                    for name in ours
                ]
                if peer in found
                else []
            )
            rows.append([str(m), *(number(row and row["seconds"] * 1e6, 4) for row in found.values()), *ratios])
        ratio_names = [f"{name.removeprefix('lowbit ')} / bfloat16" for name in names if name != peer] if peer in names else []
        lines += [f"### {threads_text(threads)}", ""] + table(["rows", *names, *ratio_names], rows)
    return lines


def kind_of(results: dict) -> str:
    """Heading for the CPU of a run: its name and its best instruction set."""
    machine = results["machine"]
    return f"{machine['cpu']}, {machine['isa']['active'][-1]}"


def document(kinds: dict[str, dict]) -> str:
    """The document of all runs, one for each kind of CPU."""
    lines = ["# Speed of layers", "", "Written by `make bench DOC=1`, which replaces only the part of this machine's CPU.", ""]
    for kind, results in sorted(kinds.items()):
        lines += [f"## {kind}", "", *body(results, "##"), ""]
    return "\n".join(lines).rstrip() + "\n"


def markdown(results: dict) -> str:
    """The document of one run."""
    return "\n".join(["# Speed of layers", "", *body(results, "#")]).rstrip() + "\n"


def body(results: dict, above: str) -> list[str]:
    """The part of a document for one run, below a heading of level `above`."""
    times, roofs, settings = Times(results), results["roofs"], results["settings"]
    versions = ", ".join(f"{name} {text}" for name, text in results["versions"].items())
    lines = []
    if not results["complete"]:
        lines += ["**Not complete: the run was interrupted.**", ""]
    lines += [
        f"Written by `make bench DOC=1` (`{results['command']}`), {results['date']}.",
        "",
        f"Machine: {machine_lines(results)}.",
        "",
        f"Versions: {versions}.",
        "",
        "## Roofs",
        "",
    ]
    rows = [
        [
            threads_text(count),
            number(roofs["read_gbs"][str(count)]),
            number(roofs["int8_gops"] and roofs["int8_gops"][str(count)]),
        ]
        for count in settings["threads"]
    ]
    lines += table(["threads", "read bandwidth, GB/s", f"int8 peak, GOPS ({roofs['int8_isa'] or 'no dot product'})"], rows)
    lines += METHOD.format(
        mebibytes=roofs["buffer_bytes"] >> 20,
        cycled=settings["least_bytes_between_uses"] / 1e9,
        counterpart=FLOAT_COUNTERPART,
        **settings,
    ).splitlines()
    lines += ["", "## Widths", "", "Means over the shapes.", ""]
    lines += width_tables(results, times)
    lines += ["## Contenders", ""] + contender_tables(results, times)
    lines += sweep_tables(results, times)
    lines += ["## Results against float", "", "Relative error (2-norm) of the output, for normally distributed weights.", ""]
    lines += table(
        ["contender", "relative error", "limit", "activations", "operator"],
        [
            [
                spec["name"],
                "not run" if spec["relative_error"] is None else number(spec["relative_error"], 2),
                number(limit(spec)),
                spec["activations"],
                spec["note"],
            ]
            for spec in results["contenders"]
        ],
    )
    lines += ["## Absent", ""] + [f"* {entry['name']}: {' '.join(entry['reason'].split())}" for entry in results["absent"]]
    return [above[1:] + line if line.startswith("#") else line for line in lines]


MARKERS = {"lowbit": "o", "torch": "s", "onnxruntime": "^", "ggml": "D"}
COLORS = {"lowbit": "#1f6fb4", "torch": "#8a8a8a", "onnxruntime": "#d9772b", "ggml": "#3a8f4c"}


def draw(results: dict, path: Path) -> None:
    """Draws the roofline: operations per second over operations per byte of weights, with the measured peaks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times, roofs, counts = Times(results), results["roofs"], results["settings"]["threads"]
    figure, panels = plt.subplots(
        1, len(counts), figsize=(7.5 * len(counts), 6.5), dpi=110, squeeze=False, sharey=True, layout="constrained"
    )
    figure.suptitle(f"{machine_lines(results)}\n{results['date']}; `make bench DOC=1`", fontsize=8)
    for axes, threads in zip(panels[0], counts):
        bandwidth, peak = roofs["read_gbs"][str(threads)], (roofs["int8_gops"] or {}).get(str(threads))
        xs, ys = [], []
        for spec in results["contenders"]:
            for m in (1, 128):
                found = times.all(spec["name"], m, threads)
                if not found:
                    continue
                moved = [spec["bytes"][f"{row['n']}x{row['k']}"] for row in found]
                x = mean([2 * m * row["n"] * row["k"] / size for row, size in zip(found, moved)])
                y = mean([row["gops"] for row in found])
                ours = spec["library"] == "lowbit"
                axes.plot(
                    x,
                    y,
                    MARKERS[spec["library"]],
                    color=COLORS[spec["library"]],
                    markersize=7 if ours else 5,
                    markerfacecolor=None if ours else "white",
                    label=spec["library"],
                )
                if ours or spec["bits"] >= 16:
                    text = str(spec["bits"]) if ours else spec["name"].removeprefix("torch ")
                    axes.annotate(text, (x, y), (0, 6 if ours else -11), textcoords="offset points", ha="center", fontsize=7)
                xs.append(x)
                ys.append(y)
        if not xs:
            continue
        left, right = min(xs) / 2, max(xs) * 2
        knee = min(right, peak / bandwidth) if peak else right
        axes.plot([left, knee], [left * bandwidth, knee * bandwidth], "k-", linewidth=1)
        axes.annotate(f"{bandwidth:.1f} GB/s", (left, left * bandwidth), (8, -4), textcoords="offset points", fontsize=8)
        if peak:
            axes.plot([knee, right], [peak, peak], "k-", linewidth=1)
            axes.annotate(
                f"{peak:.0f} GOPS, {roofs['int8_isa']}",
                (right, peak),
                (0, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlim=(left, right),
            ylim=(min(ys) / 2, max(ys + [peak or 0]) * 2),
            xlabel="operations per byte of packed weights (left: 1 row, right: 128 rows)",
            title=f"{threads_text(threads)}; lowbit's points are labeled with their bits, g128 and g32",
        )
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3, which="both")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        axes.legend(handles.values(), handles.keys(), loc="lower right")
    panels[0][0].set_ylabel("GOPS (1e9 multiplications and additions per second)")
    figure.savefig(path, format="png")
    plt.close(figure)


def write_json(results: dict, path: Path) -> None:
    replace(path, json.dumps(results, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Replaces a file in one step: an interruption leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write(results: dict, output: Path) -> list[Path]:
    """Writes output.json, output.md and output.png."""
    paths = [output.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    write_json(results, paths[0])
    replace(paths[1], markdown(results))
    draw(results, paths[2])
    return paths


def write_document(results: dict, path: Path) -> list[Path]:
    """Writes path.json and path.md, in which this run replaces an earlier one on the same kind of CPU, and its plot."""
    data, text = path.with_suffix(".json"), path.with_suffix(".md")
    kinds = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
    kind = kind_of(results)
    kinds[kind] = results
    plot = path.with_name(f"{path.name}_{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.png")
    replace(data, json.dumps(dict(sorted(kinds.items())), indent=1) + "\n")
    replace(text, document(kinds))
    draw(results, plot)
    return [data, text, plot]
