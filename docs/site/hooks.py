"""Additions of `make docs`: links for file names, line breaks in long names in tables, plots, and pages from outside docs.

The documents are also read as files, so they may name each other as ``docs/NAME.md``, and link to documents outside docs. On
the site each such name becomes a link, and a broken link is an error. Plots are generated from the tables, so that each figure
is stored only once.
"""

import io
import posixpath
import re
from pathlib import Path

import matplotlib
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

# Pages of the site whose text is in a file outside docs, by this file.
_ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "examples/cpp/README.md": "cpp.md",
}
_NAMES = _ELSEWHERE | {"examples/cpp": "cpp.md"}
# A line that is only a link to a document outside docs; on the site the document replaces it.
_WHOLE = re.compile(r"^\[[^]]+\]\(\.\./([\w/]+\.md)\)$", re.M)
_NAME = re.compile(r"`(docs/([a-z0-9_]+(?:/[a-zA-Z0-9_]+)?\.md)|" + "|".join(map(re.escape, _NAMES)) + ")`(?!\\])")
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?=[#)])")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    root = Path(config.docs_dir).parent
    uri = page.file.src_uri
    # Where the links of the page start: the text of such a page is that of a file in another directory.
    base = next(
        (posixpath.dirname(source) for source, name in _ELSEWHERE.items() if name == uri), posixpath.dirname(f"docs/{uri}")
    )
    markdown = _WHOLE.sub(lambda found: (root / found[1]).read_text(encoding="utf-8"), markdown)
    up = "../" * uri.count("/")

    def name(found: re.Match) -> str:
        target = found[2] or _NAMES[found[1]]
        return found[0] if target == uri else f"[{found[0]}]({up}{target})"

    def link(found: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(base, found[1]))
        target = _ELSEWHERE.get(target) or (target[len("docs/") :] if target.startswith("docs/") else None)
        return f"]({up}{target}" if target else found[0]

    # Not in blocks of code, which are indented or fenced.
    lines, fenced = markdown.split("\n"), False
    for at, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith("    "):
            lines[at] = _NAME.sub(name, _LINK.sub(link, line))
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Allows line breaks inside long names in tables, which would otherwise be wider than a screen."""

    def name(found: re.Match) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[._])(?=\w)", "<wbr>", found[0])

    def table(found: re.Match) -> str:
        parts = re.split(r"(<[^>]*>)", found[0])  # every other one is a tag
        parts[::2] = [re.sub(r"[\w.]{12,}", name, text) for text in parts[::2]]
        return "".join(parts)

    return re.sub(r"<table>.*?</table>", table, html, flags=re.S)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    # Removes the notebooks' script for formulas, which has a server's address or none, because ours have no formulas.
    return re.sub(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", "", output, flags=re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for name, svg in {
        "perplexity": _language_model(root / "examples/tiny_llama/README.md"),
        "sentences": _sentences(root / "examples/minilm/README.md"),
        "methods": _methods(root / "docs/measurements/quality.md"),
        "answers": _answers(root / "docs/measurements/answers.md", "Equal, 64 tokens, %"),
        "answers_calls": _answers(root / "docs/measurements/answers.md", "Function calls, %"),
    }.items():
        files.append(File.generated(config, f"plots/{name}.svg", content=svg))
    for source, name in _ELSEWHERE.items():
        if name not in files.src_uris:
            files.append(File.generated(config, name, content=(root / source).read_text(encoding="utf-8")))
    return files


# Curves of the plots of answers, by their rows.
_ANSWERS = {
    "lowbit": r"^lowbit, (8 bits|\d bits, calibrated)$",
    "lowbit, mixed widths": r"^lowbit, mixed widths",
    "llama.cpp": r"^llama\.cpp's (Q8_0|Q4_K|Q3_K|Q2_K)",
}


def _tables(path: Path) -> list[list[list[str]]]:
    """The tables of a document: rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", path.read_text(encoding="utf-8"), re.M)
    rows = ([[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks)
    return [[row for row in table if set(row[0]) != {"-"}] for table in rows]


def _table(path: Path, *columns: str) -> list[dict[str, str]]:
    """The first table that has these columns."""
    for header, *rows in _tables(path):
        if set(columns) <= set(header):
            return [dict(zip(header, row, strict=True)) for row in rows]
    raise PluginError(f"{path} has no table with the columns {', '.join(columns)}, which the site plots")


def _figure(title: str, x: str, y: str) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: plt.Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def _marked(axes: plt.Axes, points: list[tuple[str, float, float]], above: bool = True) -> None:
    """A line through points, each with its name to the right."""
    axes.plot([x for _, x, _ in points], [y for *_, y in points], "o-")
    for name, x, y in points:
        axes.annotate(name, (x, y), xytext=(5, 5 if above else -12), textcoords="offset points", fontsize=8)
    axes.margins(x=0.1, y=0.15)


def _language_model(path: Path) -> str:
    rows = _table(path, "weights", "size, MB", "perplexity")
    points = [
        (row["weights"].removesuffix("s") if row["weights"] == "1 bits" else row["weights"], float(row["size, MB"]),
         float(row["perplexity"]))
        for row in rows
        if "bit" in row["weights"] and float(row["perplexity"]) < 200
    ]  # fmt: skip
    title = "a language model of 3.3 M parameters, rounded to nearest"
    figure, axes = _figure(title, "size, MB", "perplexity (lower is better)")
    _marked(axes, points)
    return _svg(figure)


def _sentences(path: Path) -> str:
    rows = _table(path, "weights", "size, MB", "cosine to float32, mean", "batches of 32, sentences/s")
    points = [(row["weights"], float(row["size, MB"]), float(row["cosine to float32, mean"])) for row in rows]
    figure, axes = _figure("all-MiniLM-L6-v2, rounded to nearest", "size, MB", "mean cosine with float32 (higher is better)")
    _marked(axes, [point for point in points if "bit" in point[0]], above=False)
    return _svg(figure)


def _answers(path: Path, column: str) -> str:
    """A share by bits per weight, with standard errors: a plot for each table of the page that has the column."""
    tables = [table for table in _tables(path) if {"Bits per weight", column} <= set(table[0])]
    if not tables:
        raise PluginError(f"{path} has no table with the column {column}, which the site plots")
    figure, plots = plt.subplots(1, len(tables), figsize=(4.6 * len(tables), 3.6), layout="constrained", squeeze=False)
    titles = re.findall(r"^### (.*?) \(", path.read_text(encoding="utf-8"), re.M)
    for axes, (header, *lines), title in zip(plots[0], tables, titles, strict=True):
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        for name, chosen in _ANSWERS.items():
            points = [
                (float(row["Bits per weight"]), *map(float, row[column].split(" ± ")))
                for row in rows
                if re.search(chosen, row["Weights"]) and row[column]
            ]
            if points:
                axes.errorbar(*zip(*sorted(points), strict=True), fmt="o-", capsize=3, label=name)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("bits per weight")
        axes.set_ylabel(column)
        axes.set_xlim(2, 9)
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    plots[0][0].legend(fontsize=8, frameon=False)
    return _svg(figure)


def _methods(path: Path) -> str:
    """Each method's perplexity ratio, by bits per weight."""
    for header, *rows in _tables(path):
        widths = {column: float(found[1]) for column in header if (found := re.fullmatch(r"\d bits \(([\d.]+)\)", column))}
        if len(widths) > 1 and header[0] == "Method":
            break
    else:
        raise PluginError(f"{path} has no table of methods at several widths, which the site plots")
    figure, axes = _figure("the same model, by method", "bits per weight", "perplexity ratio")
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        points = [(widths[column], float(cells[column])) for column in widths if re.fullmatch(r"[\d.]+", cells[column])]
        axes.plot(*zip(*points, strict=True), "o-", label=row[0])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([1, 1.1, 1.2, 1.4, 1.6, 2, 2.5, 3, 4]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)
