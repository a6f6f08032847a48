"""Embedding models and rerankers by the plan beside their weights, without torch, transformers and sentence-transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import _C, __version__
from ..files.plan_facts import PLAN, NoPlan, described, facts_of, states
from ..files.tokenizer_json import TOKENIZER, load_backend
from ..machine.cpus import default_threads
from .sentence_files import check_files, folders_of

_KIND = "sentences"
_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "modules.json",
    "config_sentence_transformers.json", "sentence_bert_config.json",
)  # fmt: skip


def _names(directory: Path) -> list[str]:
    """The files with settings. A plan is out of date if one of them has changed."""
    return [*_FILES, *(f"{folder}/config.json" for folder in folders_of(directory))]


class _Tokens:
    """A tokenizer that can be called like those of transformers."""

    def __init__(self, directory: Path, most: int | None = None, side: str = "right"):
        """
        Args:
            most: tokens of the longest text; longer ones are cut.
            side: where long texts are cut, "right" or "left".
        """
        self.backend = load_backend(directory, checked=True)
        if most is not None:
            self.backend.enable_truncation(most, strategy="longest_first", direction=side)

    def __call__(self, texts: list[Any], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [each.ids for each in self.backend.encode_batch(texts)]}

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size())


class PlannedTexts:
    """A model whose texts a plan computes, called as a SentenceTransformer or CrossEncoder of sentence-transformers."""

    def __init__(self, directory: Path, threads: int | None = None):
        """
        Raises:
            NoPlan: there is no plan, or it does not fit the files beside it.
            OSError, ValueError: as :func:`lowbit.serve.sentence_files.check_files`.
        """
        file = directory / PLAN
        if not file.exists():
            raise NoPlan("")
        check_files(directory)
        try:
            self._plan = _C.PlanModel(os.fsencode(file), threads or default_threads())
        except (OSError, ValueError) as error:
            raise NoPlan(f"{file} is not used: {error}") from error
        content = described(directory, self._plan.about, __version__, _names(directory), _KIND)
        try:
            self.max_seq_length, self._types, self.truncate_dim = content["most"], content["types"], content["width"]
            self.prompts, self.default_prompt_name = content["prompts"], content["prompt"]
            self.scores, self.activation = content["scores"], content["activation"]
            self.similarity_fn_name = content["similarity"]
            self.tokenizer, self._cut = _Tokens(directory), _Tokens(directory, self.max_seq_length, content["side"])
        except Exception as error:  # tokenizers raises no other kind
            raise NoPlan(f"{file} is not used: {error}") from error

    def encode(self, texts: Sequence[str], prompt_name: str | None = None, **_: Any) -> np.ndarray:
        """Embeddings [texts, width], float32."""
        prompt = self.prompts.get(prompt_name or self.default_prompt_name, "")
        return self._rows([prompt + text for text in texts])[:, : self.truncate_dim]

    def embed_tokens(self, tokens: list[int]) -> np.ndarray:
        """The embedding of a text of tokens."""
        return self._run([tokens], [])[0, : self.truncate_dim]

    def predict(self, pairs: Sequence[tuple[str, str]], **_: Any) -> np.ndarray:
        """The scores of pairs before the activation, float32."""
        return self._rows(pairs)[:, 0]

    def _rows(self, texts: Sequence[Any]) -> np.ndarray:
        encoded = self._cut.backend.encode_batch(list(texts))
        return self._run([each.ids for each in encoded], [each.type_ids for each in encoded] if self._types else [])

    def _run(self, ids: list[list[int]], types: list[list[int]]) -> np.ndarray:
        rows = np.empty((len(ids), self._plan.width), np.float32)
        tokens, kinds = ([each for text in texts for each in text] for texts in (ids, types))
        self._plan.embed(tokens, kinds, [len(text) for text in ids], rows.ctypes.data)
        return rows


def keep_plan(model: Any, directory: Path, note: Callable[[str], None]) -> None:
    """Writes the plan of a fused and packed model beside its weights, so that the next run needs no torch.

    Never raises. The plan is used only if it computes the same bits for some texts.
    """
    from ..llm.loading import is_packed

    if not is_packed(directory) or not os.access(directory, os.W_OK):
        return
    try:
        refusal = _write(model, directory, None) or _difference(model, directory)
        if refusal is not None:
            _write(model, directory, refusal)
    except Exception as error:  # the model still runs with torch, so nothing is lost
        note(f"{directory / PLAN} is not written: {error}")
    else:
        what = "the next run starts without torch" if refusal is None else f"it is not used: {refusal}"
        note(f"{directory / PLAN} is written: {what}")


def _write(model: Any, directory: Path, refusal: str | None) -> str | None:
    """Writes a plan; returns why it must not be used.

    Raises:
        ValueError: the model has no plan.
    """
    from ..exports.plan_export import placed_bytes, write_bytes
    from ..hf.encoder_plan import plan_for_files

    made = plan_for_files(model)
    scores, tokenizer = hasattr(model, "num_labels"), model.tokenizer
    most = model.max_seq_length
    if most is None or most > made.positions:
        refusal = refusal or f"its texts may have {most} tokens; the plan has {made.positions} positions"
    if not (directory / TOKENIZER).exists():
        refusal = refusal or f"there is no {TOKENIZER}"
    activation = type(model.activation_fn).__name__ if scores else None
    if scores and activation not in ("Sigmoid", "Identity"):
        refusal = refusal or f"its activation is {activation}"
    content = {
        "kind": _KIND, "lowbit": __version__, "files": states(directory, _names(directory)), "refusal": refusal, "most": most,
        "types": "token_type_ids" in tokenizer.model_input_names, "side": tokenizer.truncation_side,
        "width": None if scores else model.truncate_dim, "prompts": dict(getattr(model, "prompts", {})),
        "prompt": getattr(model, "default_prompt_name", None), "scores": scores, "activation": activation,
        "similarity": None if scores else str(model.similarity_fn_name),
    }  # fmt: skip
    plan = made.plan
    plan.buffers = [replace(buffer) for buffer in plan.buffers]
    plan.about = made.facts | facts_of(content)
    write_bytes(placed_bytes(plan, made.weights, directory), directory / PLAN)
    return refusal


def _difference(model: Any, directory: Path) -> str | None:
    """How the results of the plan in a directory differ from the model's; None if they are equal."""
    from ..llm.plain_tokenizer import TEXTS

    planned = PlannedTexts(directory)
    texts = [*TEXTS, "many words " * (planned.max_seq_length or 1)]
    if planned.scores:
        pairs = [(texts[number - 1], text) for number, text in enumerate(texts)]
        given, names = {"convert_to_numpy": True, "show_progress_bar": False, "activation_fn": _identity}, [None]
        found = [(planned.predict(pairs), model.predict(pairs, **given))]
    else:
        names = [None, *planned.prompts]
        found = [
            (planned.encode(texts, name), model.encode(texts, prompt_name=name, show_progress_bar=False)) for name in names
        ]
    for ours, theirs in found:
        wrong = next((text for text, a, b in zip(texts, ours, theirs, strict=True) if not np.array_equal(a, b)), None)
        if wrong is not None:
            return f"the result for {wrong[:40]!r} differs"
    return None


def _identity(scores: Any) -> Any:
    return scores
