"""Embedding models and rerankers: their requests, and batching of texts of several requests."""

from __future__ import annotations

import base64
import copy
import inspect
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..files.config_json import read_config
from ..files.plan_facts import NoPlan, are_allowed
from ..files.tokenizer_json import check_tokenizer
from ..files.untrusted import interpreting, read_json
from .bodies import check_bytes
from .engine import Engine, ordinary
from .errors import ApiError, bad, shortened
from .planned_texts import PlannedTexts, keep_plan
from .protocol import Embeddings, Ranking
from .sentence_files import check_files
from .speech import SpeechModel

AT_ONCE = 32  # texts per call of the model
_LEAST = 6  # oldest version of sentence-transformers
_INSTALL = f"pip install 'sentence-transformers>={_LEAST}'"
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")  # names of prompts in sentence-transformers


@dataclass(frozen=True)
class Input:
    """A text, or its tokens, and the name of the prompt that comes before the text."""

    text: str | list[int]
    prompt: str | None = None


Item = Input | tuple[str, str]  # for an encoder; query and document for a reranker


@dataclass
class TextModel:
    """A model of sentence-transformers, or its plan: computes a row of numbers for each text or pair of texts."""

    name: str
    model: Any
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        # A copy, because tokenizers have state, and tokens are not counted on the engine's thread.
        self.tokenizer = copy.deepcopy(self.model.tokenizer)

    @property
    def at_once(self) -> int:
        """Texts per call of the model."""
        if isinstance(self.model, PlannedTexts):
            return AT_ONCE
        # Attention that is the model's own code computes padding, too, and rounds other tokens differently beside it.
        from ..hf.masked import ATTENTION

        config = getattr(getattr(self.model[0], "model", None), "config", None)  # None: a table without attention
        return AT_ONCE if config is None or getattr(config, "_attn_implementation", None) == ATTENTION else 1

    @property
    def max_length(self) -> int | None:
        """Largest number of tokens of a text or pair; None: no limit."""
        found: int | None = self.model.max_seq_length
        return found

    def encode(self, text: str, *pair: str) -> list[int]:
        given = (text, *pair) if pair else text
        # A list, because transformers treats a single empty text as a missing one.
        found: list[int] = self.tokenizer([given], truncation=False, verbose=False)["input_ids"][0]
        return found

    def tokens(self, item: Item) -> list[int]:
        raise NotImplementedError

    def compute(self, items: Sequence[Item]) -> list[np.ndarray]:
        """The row of each item, float32, from one call of the model."""
        raise NotImplementedError

    def count(self, name: str, items: Sequence[Item], cut: bool, first: int | None) -> list[int]:
        """The number of tokens of each item that the model reads.

        Args:
            name: the parameter, for errors.
            cut: truncates texts that are too long.
            first: index of the first item in the parameter; None: the item is the parameter.

        Raises:
            ApiError: an item is too long.
        """
        counts, most = [], self.max_length
        for number, item in enumerate(items):
            count = len(self.tokens(item))
            if most is not None and count > most:
                if not cut:
                    place = name if first is None else f"{name}[{number + first}]"
                    raise bad(
                        name,
                        f"{place} has {count} tokens; expected at most the {most} of the model, or truncate true",
                        "context_length_exceeded",
                    )
                count = most
            counts.append(count)
        return counts


class Encoder(TextModel):
    """A sentence-embedding model."""

    def tokens(self, item: Item) -> list[int]:
        assert isinstance(item, Input)
        if not isinstance(item.text, str):
            return item.text
        prompts = getattr(self.model, "prompts", {})
        return self.encode(prompts.get(item.prompt or getattr(self.model, "default_prompt_name", None), "") + item.text)

    def compute(self, items: Sequence[Item]) -> list[np.ndarray]:
        rows: dict[int, np.ndarray] = {}
        groups: dict[str | None, list[int]] = {}
        for place, item in enumerate(items):
            assert isinstance(item, Input)
            if isinstance(item.text, str):
                groups.setdefault(item.prompt, []).append(place)
            else:
                rows[place] = self._embed_tokens(item.text)
        for prompt, places in groups.items():
            texts = [items[place].text for place in places]  # type: ignore[union-attr]
            found = self.model.encode(texts, prompt_name=prompt, batch_size=self.at_once, show_progress_bar=False)
            rows.update(zip(places, found, strict=True))
        return [rows[place] for place in range(len(items))]

    def _embed_tokens(self, tokens: list[int]) -> np.ndarray:
        tokens = tokens[: self.max_length]
        if isinstance(self.model, PlannedTexts):
            return self.model.embed_tokens(tokens)
        import torch

        ids = torch.tensor([tokens])
        with torch.inference_mode():
            row = self.model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
        found: np.ndarray = row.float()[: self.model.truncate_dim].numpy()
        return found

    def prompt_of(self, names: Sequence[str]) -> str | None:
        """The first of these prompts that the model has; None: its default."""
        return next((name for name in names if name in getattr(self.model, "prompts", {})), None)


class Reranker(TextModel):
    """A cross-encoder with one score for a query and a document."""

    def tokens(self, item: Item) -> list[int]:
        assert isinstance(item, tuple)
        return self.encode(*item)

    def compute(self, items: Sequence[Item]) -> list[np.ndarray]:
        scores = self.model.predict(
            list(items), batch_size=self.at_once, show_progress_bar=False, activation_fn=lambda scores: scores
        )
        return [np.array([self._activated(score)], np.float32) for score in scores]

    def _activated(self, score: np.float32) -> float:
        model = self.model
        name = model.activation if isinstance(model, PlannedTexts) else type(model.activation_fn).__name__
        if name == "Identity":
            return float(score)
        if name == "Sigmoid":
            return 1 / (1 + math.exp(-max(float(score), -700.0)))
        torch = import_module("torch")
        # Each score separately, because the last bits of a function depend on whether its elements fill a vector.
        return float(model.activation_fn(torch.tensor([score]))[0])


def _has_scores(path: Path) -> bool:
    names = read_config(path).get("architectures")
    return isinstance(names, list) and any(str(each).endswith("ForSequenceClassification") for each in names)


def is_kind(path: Path) -> bool:
    """Whether a directory has an embedding model or a reranker."""
    return _has_scores(path) or (path / "modules.json").is_file()


def load(
    name: str,
    path: Path,
    threads: int | None = None,
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    note: Callable[[str], None] = lambda text: None,
) -> TextModel:
    """Loads the embedding model or reranker in a directory.

    Uses the plan beside the weights. If there is none, sentence-transformers loads the model, and the plan is written.

    Args:
        loading: makes a context for the use of torch.
        note: called with lines for the user.

    Raises:
        ImportError: sentence-transformers is not installed.
        OSError, ValueError: the files are damaged, or of an unknown kind.
    """
    scores, settings = _has_scores(path), path / "config_sentence_transformers.json"
    kind = read_json(settings).get("model_type") if settings.is_file() else None
    if kind not in (None, "SentenceTransformer", "CrossEncoder"):
        raise ValueError(f"{settings} has model_type {kind!r}; expected SentenceTransformer or CrossEncoder")
    check_files(path)
    stale = False
    if are_allowed():
        try:
            planned = PlannedTexts(path, threads)
            return Reranker(name, planned) if planned.scores else Encoder(name, planned)
        except NoPlan as reason:
            if str(reason):
                note(str(reason))
            stale = reason.stale
    with loading():
        model = _load_by_torch(path, scores or kind == "CrossEncoder")
    if stale:
        keep_plan(model, path, note)
    return Reranker(name, model) if hasattr(model, "num_labels") else Encoder(name, model)


def _load_by_torch(path: Path, scores: bool) -> Any:
    """A model of sentence-transformers, fused so that a text has the same bits alone and in any batch."""
    try:
        library = import_module("sentence_transformers")
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} not installed; the model in {path} needs it: {_INSTALL}") from error
    if int(library.__version__.partition(".")[0]) < _LEAST:  # earlier versions import modules from the model's directory
        raise ImportError(
            f"sentence-transformers {library.__version__} runs code of the models that it loads; expected version {_LEAST} or "
            f"later: {_INSTALL}"
        )
    from ..hf.from_pretrained import counting
    from ..hf.fusing import fuse_

    check_tokenizer(path)
    make = library.CrossEncoder if scores else library.SentenceTransformer
    with counting(None), interpreting(f"{path} does not load"):
        model = make(
            str(path), device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    if scores and model.num_labels != 1:
        raise ValueError(f"{path} has a classifier of {model.num_labels} labels; expected 1, the score of a reranker")
    fuse_(model)
    _forget_padding(model)
    return model.eval()


def _forget_padding(model: Any) -> None:
    """Makes the positions of a text those that it has alone, also if the tokenizer pads at the left, as Qwen3 Embedding's."""
    if not any(type(module).__name__ == "LogitScore" for module in model):
        model.tokenizer.padding_side = "right"
        return
    # The score is read from the last column, so padding stays at the left.
    if "position_ids" in inspect.signature(type(model[0].model).forward).parameters:
        model[0].register_forward_pre_hook(_count_shown)


def _count_shown(module: Any, arguments: tuple[dict[str, Any], ...]) -> None:
    features = arguments[0]
    features["position_ids"] = (features["attention_mask"].cumsum(1) - 1).clamp(min=0)


@dataclass
class _Job:
    """The items of a request."""

    items: Sequence[Item]
    future: Future
    rows: dict[int, np.ndarray] = field(default_factory=dict)


class Batches:
    """Batches the items of waiting requests, on the engine's thread. All other methods are for other threads."""

    def __init__(self, model: TextModel, engine: Engine):
        self._model, self._engine = model, engine
        self._waiting: deque[tuple[_Job, int]] = deque()

    @property
    def waiting(self) -> int:
        """Number of texts that the model has not read yet."""
        return len(self._waiting)

    def add(self, items: Sequence[Item], counts: Sequence[int]) -> Future:
        """Computes items, those with most tokens first; returns a list of rows. A canceled request frees its slots."""
        job = _Job(items, Future())
        self._waiting.extend((job, place) for place in sorted(range(len(items)), key=lambda place: -counts[place]))
        self._ask()
        return job.future

    def _ask(self) -> None:
        self._engine.call(self._run).add_done_callback(self._called)

    def _called(self, call: Future) -> None:
        error = call.exception()
        while error is not None and self._waiting:  # the engine is stopping
            try:
                job, _ = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            _fail(job.future, error)

    def _run(self) -> None:
        batch: list[tuple[_Job, int]] = []
        while self._waiting and len(batch) < AT_ONCE:
            job, place = self._waiting.popleft()
            if not job.future.done():
                batch.append((job, place))
        if not batch:
            return
        try:
            rows = self._model.compute([job.items[place] for job, place in batch])
        except BaseException as error:  # noqa: B036  also a panic in Rust
            for future in {job.future for job, _ in batch}:
                _fail(future, ordinary(error))
        else:
            for (job, place), row in zip(batch, rows, strict=True):
                job.rows[place] = row
                if len(job.rows) == len(job.items) and job.future.set_running_or_notify_cancel():
                    job.future.set_result([job.rows[each] for each in range(len(job.items))])
        if self._waiting:
            self._ask()  # after the next token of the running texts


def _fail(future: Future, error: BaseException) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


@dataclass(frozen=True)
class Request:
    """A request to a model.

    Attributes:
        items, names: groups of items, and their parameters.
        cut: truncates long texts.
        document: makes the answer from the rows of all items and the number of their tokens.
    """

    model: TextModel
    groups: list[tuple[str, list[Item], bool]]  # parameter, items, whether they are an array
    cut: bool
    document: Callable[[list[np.ndarray], int], dict[str, Any]]

    @property
    def items(self) -> list[Item]:
        return [item for _, items, _ in self.groups for item in items]

    def counts(self) -> Iterator[Callable[[], list[int]]]:
        """Functions that each count the tokens of some items. They raise ApiError if an item is too long."""
        for name, items, many in self.groups:
            for start in range(0, len(items), AT_ONCE):
                yield partial(self.model.count, name, items[start : start + AT_ONCE], self.cut, start if many else None)


def embeddings(model: Any, asked: Embeddings) -> Request:
    """Parses a request in OpenAI's format.

    Raises:
        ApiError: the request is invalid, or the model makes no embeddings.
    """
    if not isinstance(model, Encoder):
        raise bad("model", f"the model {model.name} {_purpose(model)}; expected a sentence-embedding model")
    texts, prompt, width = asked.input, asked.prompt_name, asked.dimensions
    prompts = getattr(model.model, "prompts", {})
    if prompt is not None and prompt not in prompts:
        raise bad("prompt_name", f"prompt_name is {shortened(prompt, 64)!r}; expected {_either(prompts)}")
    for text in texts:
        check_bytes("input", [text] if isinstance(text, str) else [], model.max_length)
    size = len(model.tokenizer)
    wrong = next((token for text in texts if not isinstance(text, str) for token in text if token >= size), None)
    if wrong is not None:
        raise bad("input", f"input has a token {wrong}; expected 0 to {size - 1}")

    def document(rows: list[np.ndarray], count: int) -> dict[str, Any]:
        if width is not None and width > len(rows[0]):
            raise bad("dimensions", f"dimensions is {width}; expected at most {len(rows[0])}, those of the model")
        values = [_shortened(row, width).tolist() for row in rows]
        encoded = (
            values
            if asked.encoding_format == "float"
            else [base64.b64encode(struct.pack(f"<{len(x)}f", *x)).decode() for x in values]
        )
        data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(encoded)]
        return {"object": "list", "data": data, "model": model.name, "usage": _usage(count)}

    return Request(model, [("input", [Input(text, prompt) for text in texts], len(texts) > 1)], asked.truncate, document)


def _shortened(row: np.ndarray, width: int | None) -> np.ndarray:
    """The first numbers of an embedding (Matryoshka), normalized to length 1 if the embedding is."""
    if width in (None, len(row)):
        return row
    wide = row.astype(np.float64)
    unit = abs(np.linalg.norm(wide) - 1) < 1e-2  # bfloat16 is not more exact
    short = wide[:width] / max(np.linalg.norm(wide[:width]), 1e-12) if unit else wide[:width]
    return short.astype(np.float32)


def _similarity(name: str, one: np.ndarray, other: np.ndarray) -> float:
    """The similarity of two embeddings; ``name`` is that of the function in sentence-transformers."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    if name in ("cosine", "dot"):
        size = np.linalg.norm(a) * np.linalg.norm(b) if name == "cosine" else 1.0
        return float(np.float32(a @ b / max(size, 1e-24)))
    return float(np.float32(-np.linalg.norm(a - b, 2 if name == "euclidean" else 1)))


def ranking(model: Any, asked: Ranking) -> Request:
    """Parses a request in the format of Jina, Cohere and vLLM.

    Raises:
        ApiError: the request is invalid, or the model cannot compare texts.
    """
    if not isinstance(model, TextModel):
        raise bad("model", f"the model {model.name} {_purpose(model)}; expected a reranker or a sentence-embedding model")
    query, documents = asked.query, asked.documents
    check_bytes("query", [query], model.max_length)
    for each in documents:
        check_bytes("documents", [each], model.max_length)
    encoder = model if isinstance(model, Encoder) else None
    groups: list[tuple[str, list[Item], bool]]
    if encoder is not None:
        sides = encoder.prompt_of(_QUERY), encoder.prompt_of(_DOCUMENT)
        groups = [
            ("query", [Input(query, sides[0])], False), ("documents", [Input(text, sides[1]) for text in documents], True),
        ]  # fmt: skip
    else:
        groups = [("documents", [(query, text) for text in documents], True)]

    def document(rows: list[np.ndarray], count: int) -> dict[str, Any]:
        if encoder is not None:  # one by one, so that a score does not depend on the other documents
            scores = [_similarity(encoder.model.similarity_fn_name, rows[0], row) for row in rows[1:]]
        else:
            scores = [row.item() for row in rows]
        order = sorted(range(len(documents)), key=lambda index: -scores[index])[: asked.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if asked.return_documents else {})
            for index in order
        ]
        return {"model": model.name, "results": results, "usage": _usage(count)}

    return Request(model, groups, asked.truncate, document)


def _purpose(model: Any) -> str:
    known = {Encoder: "makes embeddings", Reranker: "scores documents", SpeechModel: "transcribes recordings"}
    return known.get(type(model), "writes texts")


def refuse_to_write(model: TextModel | SpeechModel) -> ApiError:
    """Raises ApiError for a request for text from a model that generates none."""
    paths = {Encoder: "/v1/embeddings", SpeechModel: "/v1/audio/transcriptions"}
    path = paths.get(type(model), "/v1/rerank")
    return bad("model", f"the model {model.name} {_purpose(model)}; expected one that writes texts, or {path}")


def _either(names: Sequence[str] | dict[str, Any]) -> str:
    return f"one of {', '.join(names)}" if names else "none: the model has no prompts"


def _usage(count: int) -> dict[str, int]:
    return {"prompt_tokens": count, "total_tokens": count}
