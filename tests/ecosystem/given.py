"""Shared by the programs of the ecosystem check: the checkpoints of prepare.py and the expected results.

A program imports lowbit only if its header gives a reason, because `import torch` must be enough.
"""

import os
from pathlib import Path
from typing import Any

import torch

DIRECTORY = Path(os.environ["LOWBIT_ECOSYSTEM"])
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LLAMA, FLOAT_LLAMA = DIRECTORY / "llama", DIRECTORY / "float_llama"  # packed at 4 bits; float32
MINILM, FLOAT_MINILM = DIRECTORY / "minilm", DIRECTORY / "float_minilm"  # packed at 8 bits; float32
TASK = DIRECTORY / "task"  # of lm-eval
PROMPTS = ["class HelpFormatter:", "def add_argument(self,", "import os\nimport"]
NEW_TOKENS = 24
SENTENCES = [
    line
    for line in (EXAMPLES / "minilm" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    if line[:1] not in ("", "#")
][:16]


def expected() -> dict[str, Any]:
    """Results of lowbit in transformers: ``texts`` after the PROMPTS, without the prompts; ``loglikelihoods`` of the texts, as
    sums; normalized ``packed`` and ``float`` embeddings of the SENTENCES."""
    return torch.load(DIRECTORY / "expected.pt")


def same(found: Any, wanted: Any) -> None:
    """Raises AssertionError, with both sides, unless they are equal bit for bit."""
    equal = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
    assert equal, f"found {found!r}; expected {wanted!r}"
