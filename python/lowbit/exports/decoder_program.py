"""Exports decoders to .plan, .pte and .pt2 files, and loads them.

>>> import lowbit.llm
>>> lowbit.llm.export_decoder(decoder, "model.pte")  # doctest: +SKIP
>>> step = lowbit.llm.load_decoder("model.pte")  # doctest: +SKIP
>>> lowbit.llm.generate(step, prompt, 100, stop=step.stop)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .. import _C
from ..files.plan_facts import check_settings
from ..llm.decoder import Decoder
from ..llm.loading import stop_tokens
from ..llm.plan_step import PlanStep
from ..llm.token_calls import check_call
from ..machine.one_text import OneText
from .module import Delegate, described, export_delegates, export_pt2, export_pte, zeros
from .plan_export import Outline, SessionOutline, plan_with_weights, write_plan
from .token_file import write_tokens

# Setting -> name of the constant method in a .pte that ExecuTorch's language model runners read.
_PTE_NUMBERS = {"max_length": "get_max_context_len", "chunk": "get_max_seq_len", "vocabulary": "get_vocab_size"}
_PTE_STOP = "get_eos_ids"
_PTE_RECURRENT = "has_states"  # lowbit's own: whether layers have states, which cannot be truncated
_BACKEND, _SESSION = "LowbitPlan", "session"  # plan/executorch_backend.cpp
_LONGEST_COMMAND = 4096  # bytes, most of which name a file
_EXAMPLE_COMMAND = (torch.zeros(3, dtype=torch.uint8),), ({0: torch.export.Dim("n", min=1, max=_LONGEST_COMMAND)},)
_PT2 = "lowbit.llm."  # prefix of the names of our metadata in a .pt2

ExportProgress = Callable[[int, int, str], None]


class _Texts(Protocol):
    """The texts of a program; see :class:`ExportedDecoder`."""

    def use(self, number: int) -> int: ...
    def end(self, number: int) -> None: ...
    def save(self, file: str) -> int: ...
    def load(self, file: str) -> int: ...


class _PlanTexts:
    def __init__(self, begin: Callable[[], PlanStep]):
        self.begin = begin
        self.texts = {0: begin()}
        self.step = self.texts[0]

    def use(self, number: int) -> int:
        if number not in self.texts:
            self.texts[number] = self.begin()
        self.step = self.texts[number]
        return self.step.position

    def end(self, number: int) -> None:
        if self.texts.get(number) in (None, self.step):
            raise ValueError(f"text {number} does not exist, or is in use; expected another one")
        del self.texts[number]

    def save(self, file: str) -> int:
        return self.step.save(file)

    def load(self, file: str) -> int:
        return self.step.load(file)


class _PteTexts:
    """Texts of a .pte with a plan, by the commands of its method ``session``."""

    def __init__(self, execute: Callable[[tuple[Tensor]], Any], max_length: int | None, cache: str | None):
        self.execute, self.settings = execute, f"{max_length or 0} {cache or ''}".strip()
        self.numbers = {0}
        if (max_length, cache) != (None, None):
            self.command(f"begin 0 {self.settings}")

    def command(self, text: str) -> int:
        content = os.fsencode(text)
        if len(content) > _LONGEST_COMMAND:
            raise ValueError(f"{text[:40]!r}... has {len(content)} bytes; expected at most {_LONGEST_COMMAND}")
        return int(self.execute((torch.tensor(list(content), dtype=torch.uint8),))[0])

    def use(self, number: int) -> int:
        tokens = self.command(f"use {number}" if number in self.numbers else f"begin {number} {self.settings}")
        self.numbers.add(number)
        return tokens

    def end(self, number: int) -> None:
        self.command(f"end {number}")
        self.numbers.discard(number)

    def save(self, file: str) -> int:
        return self.command(f"save {file}")

    def load(self, file: str) -> int:
        return self.command(f"load {file}")


@dataclass
class ExportedDecoder:
    """A decoder loaded from a file, with its own caches; called as the exported :class:`Decoder`."""

    max_length: int  # of a text, in tokens
    chunk: int  # largest number of tokens of one run of the program; longer calls are split
    vocabulary: int
    stop: tuple[int, ...]  # tokens that end a text
    recurrent: bool  # layers have states or sliding-window caches: a text must continue at its end or start at 0
    _run: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    _position: int | None = field(default=0, repr=False)  # tokens of the text; None after a failed call, if states are unknown
    _texts: _Texts | None = field(default=None, repr=False)
    one_text: OneText = field(default_factory=OneText, repr=False, compare=False)

    def kept(self, count: int) -> int:
        """The number of the first `count` tokens of the text after which a call can continue."""
        if self.recurrent:
            return count if count == self._position else 0
        return min(count, self._position or 0)

    def use(self, number: int) -> int:
        """Continues another text in the next calls; returns the number of its tokens. The first text has number 0.

        A number begins an empty text when it is first used, with caches of its own.

        Raises:
            ValueError: the file has only one text: it is a .pt2, or a .pte without a plan.
            RuntimeError: the program failed; its log says why.
        """
        with self.one_text:
            self._position = self._all_texts().use(number)
            return self._position

    def end(self, number: int) -> None:
        """Frees a text that is not in use. Errors as :meth:`use`, also if there is no such text, or it is in use."""
        self._all_texts().end(number)

    def save(self, file: str | os.PathLike[str]) -> int:
        """Writes the text in use and its caches to a file, so that it need not be computed again.

        Returns the number of its tokens. Errors as :meth:`use`, and OSError or RuntimeError if the file cannot be written; an
        earlier file is left as it is.
        """
        return self._all_texts().save(os.fspath(file))

    def load(self, file: str | os.PathLike[str]) -> int:
        """Replaces the text in use by one that was saved by the same file's program with the same type of caches.

        Returns the number of its tokens. Errors as :meth:`use`, and ValueError or RuntimeError for other files; the text is
        then as before.
        """
        with self.one_text:
            self._position = self._all_texts().load(os.fspath(file))
            return self._position

    def _all_texts(self) -> _Texts:
        if self._texts is None:
            raise ValueError("the program has one text, which cannot be saved; expected a .plan, or a .pte with a plan")
        return self._texts

    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Computes a step, as :meth:`Decoder.forward`.

        Args:
            tokens: [1, s] int64, s at least 1.
            start: [1] int64, the number of tokens in the caches.

        Returns:
            [1, vocabulary] of the model's dtype: the logits after the last token.

        Raises:
            ValueError: tokens or start has another shape or dtype, a token is not in the vocabulary, or the states are not
                those after ``start`` tokens.
            IndexError: the text is longer than max_length, or has fewer than ``start`` tokens.
            RuntimeError: the program failed, or is computing another text.
        """
        with self.one_text:
            count = self.max_length if self.recurrent else self._position or 0  # the text of states is checked below
            check_call(tokens, start, self.vocabulary, self.max_length, count)
            before = int(start)
            if before and self.kept(before) != before:
                raise ValueError(
                    f"start is {before}; expected 0 or {self._position}, the number of tokens so far: states of recurrent "
                    "layers and caches of a sliding window cannot be cut back"
                )
            self._position = None if self.recurrent else before  # if the call fails
            for begin in range(0, tokens.shape[1], self.chunk):
                logits = self._run(tokens[:, begin : begin + self.chunk].contiguous(), start + begin)
            self._position = before + tokens.shape[1]
            return logits


class _CachesAsInputs(torch.nn.Module):
    """A decoder that takes its caches as inputs. As constants their zeros would be stored in the .pt2."""

    def __init__(self, decoder: Decoder, names: Sequence[str]):
        super().__init__()
        self.decoder = decoder
        self.names = names

    def forward(self, tokens: Tensor, start: Tensor, caches: list[Tensor]) -> Tensor:
        return torch.func.functional_call(self.decoder, dict(zip(self.names, caches)), (tokens, start))


def _describe(decoder: Decoder, chunk: int, stop: Iterable[int] | None) -> dict[str, Any]:
    if not 1 <= chunk <= decoder.max_length:
        raise ValueError(f"chunk is {chunk}; expected 1 to the decoder's max_length of {decoder.max_length}")
    return {
        "max_length": decoder.max_length,
        "chunk": chunk,
        "vocabulary": int(decoder.model.config.get_text_config().vocab_size),
        "stop": _stop_of(decoder, stop),
    }


def _stop_of(decoder: Decoder, stop: Iterable[int] | None) -> list[int]:
    return stop_tokens(decoder.model) if stop is None else [int(token) for token in stop]


def _example(chunk: int) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
    """Example inputs and their dynamic shapes."""
    tokens = torch.zeros((1, min(chunk, 3)), dtype=torch.int64)
    sizes = {1: torch.export.Dim("s", min=1, max=chunk)} if chunk > 1 else None
    return (tokens, torch.zeros(1, dtype=torch.int64)), (sizes, None)


@torch.no_grad()
def export_decoder(
    decoder: Decoder,
    path: str | os.PathLike[str],
    *,
    chunk: int = 128,
    stop: Iterable[int] | None = None,
    xnnpack: bool = True,
    plan: bool = True,
    progress: ExportProgress | None = None,
) -> None:
    """Exports a decoder to a file that runs without Python.

    The program takes tokens [1, s], s from 1 to ``chunk``, and start [1]. The file name chooses the format:

    * **.plan**, for lowbit's own library: a small file in the directory of the model's checkpoint, whose weights it uses.
      Programs choose the length of texts and the type of caches. ``lowbit.tokens`` is written beside it, the tokenizer and
      the chat template for ``lowbit-run``, or why there is none. ``examples/cpp/llm_runner_plan`` runs the plan alone.
    * **.pte**, for ExecuTorch. If the decoder has a plan, a step is one call of a delegate, the plan with its weights: faster
      than operator by operator, and exported in seconds. Its caches hold the whole text, even in layers with a
      window. Otherwise the program has lowbit's operators among those of ExecuTorch. The caches are allocated by the loaded
      program and are not in the file. Constant methods hold the settings for runners. ExecuTorch's ``TextLLMRunner`` and
      ``examples/cpp/llm_runner`` run the file.
    * **.pt2**, for AOTInductor, which needs a C++ compiler for the export. The program takes all caches as inputs and updates
      them in place, so they are not in the file. Metadata holds the settings, which ``examples/cpp/llm_runner_pt2`` reads.

    :func:`load_decoder` runs both.

    Args:
        decoder: quantized, in eval mode.
        path: a name that ends in .plan, .pte or .pt2; replaced atomically, and unchanged if the export fails.
        chunk: largest number of tokens of one call of a .pte or .pt2. Longer prompts are split; a .pte reserves memory for one
            chunk.
        stop: tokens that end a text; None: those of the model's configuration.
        xnnpack: in a .pte without a plan, run the operators that XNNPACK supports there; otherwise all but lowbit's operators
            run on ExecuTorch's kernels.
        plan: in a .pte, run a step by the decoder's plan if it has one.
        progress: called as ``progress(steps done, steps, next step)``.

    Raises:
        ImportError: executorch is not installed, for a .pte.
        ValueError, OSError: chunk is not from 1 to max_length, or path has another ending or cannot be written; or for a .plan,
            the model has no plan, or its weights are not beside it.
        Exception: whatever torch.export, ExecuTorch and AOTInductor raise on models they cannot export.
    """
    suffix = Path(path).suffix
    if suffix not in _LOADERS:
        raise ValueError(f"path is {str(path)!r}; expected a name that ends in .plan, .pte or .pt2")
    if suffix == ".plan":
        write_plan(decoder, Path(path), _stop_of(decoder, stop))
        write_tokens(decoder.model, Path(path).absolute(), None if stop is None else _stop_of(decoder, stop))
        return
    about = _describe(decoder, chunk, stop)
    made = decoder.fitting_plan() if suffix == ".pte" and plan else None
    if made is not None:
        content, outline = plan_with_weights(decoder, made, about["stop"]), Outline(decoder.vocabulary, made.plan)
        methods = {
            "forward": Delegate(content, outline, *_example(chunk)),
            _SESSION: Delegate(_SESSION.encode(), SessionOutline(), *_EXAMPLE_COMMAND, name=_SESSION),
        }
        export_delegates(_BACKEND, methods, path, _constants(decoder, about, decoder.recurrent), progress)
        return
    with decoder.each_layer_alone():  # the same program decodes token by token
        if suffix == ".pte":
            _export_pte(decoder, path, about, xnnpack, progress)
        else:
            _export_pt2(decoder, path, about, progress)


def _constants(decoder: Decoder, about: dict[str, Any], recurrent: bool) -> dict[str, Any]:
    """The constant methods of a .pte."""
    config = decoder.model.config.get_text_config()
    constants = {method: about[name] for name, method in _PTE_NUMBERS.items()}
    constants |= {_PTE_STOP: about["stop"], "get_n_layers": decoder.layers, "use_kv_cache": True}
    constants |= {_PTE_RECURRENT: recurrent}
    constants |= {"use_sdpa_with_kv_cache": False, "enable_dynamic_shape": about["chunk"] > 1}
    if isinstance(config.bos_token_id, int):
        constants["get_bos_id"] = config.bos_token_id
    return constants


def _export_pte(
    decoder: Decoder, path: str | os.PathLike[str], about: dict[str, Any], xnnpack: bool, progress: ExportProgress | None
) -> None:
    inputs, sizes = _example(about["chunk"])
    # The only mutated buffers are caches, which lowbit's operators update, so XNNPACK cannot break them.
    export_pte(
        decoder, inputs, path, dynamic_shapes=sizes, xnnpack=xnnpack, progress=progress, check_buffers=False,
        constant_methods=_constants(decoder, about, decoder.recurrent or decoder.windowed),
    )  # fmt: skip


def _export_pt2(decoder: Decoder, path: str | os.PathLike[str], about: dict[str, Any], progress: ExportProgress | None) -> None:
    caches = {name: cache for name, cache in decoder.named_buffers() if "_cache_" in name and "." not in name}
    about["caches"] = [described(cache) for cache in caches.values()]
    metadata = {
        _PT2 + name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in about.items()
    }
    inputs, dynamic = _example(about["chunk"])
    export_pt2(
        _CachesAsInputs(decoder, list(caches)).eval(),
        (*inputs, [torch.zeros_like(cache) for cache in caches.values()]),
        path,
        dynamic_shapes=(*dynamic, [None] * len(caches)),
        metadata=metadata,
        progress=progress,
    )


def _load_plan(path: str, max_length: int | None, cache: str | None) -> ExportedDecoder:
    model = _C.PlanModel(os.fsencode(path), torch.get_num_threads())
    check_settings(Path(path), model.about)
    length = min(2048, model.positions) if max_length is None else max_length
    texts = _PlanTexts(lambda: PlanStep(model, length, cache or "float32"))

    def run(tokens: Tensor, start: Tensor) -> Tensor:
        return torch.from_numpy(texts.step.feed(tokens[0].tolist(), int(start)))[None]

    return ExportedDecoder(
        length, length, model.vocabulary, tuple(model.stop), recurrent=texts.step.recurrent, _run=run, _texts=texts
    )


def _check(numbers: dict[str, int]) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"its {name} is {value!r}; expected a positive number")


def _load_pte(path: str, max_length: int | None, cache: str | None) -> ExportedDecoder:
    program = import_module("executorch.runtime").Runtime.get().load_program(path)
    numbers = {name: program.load_method(method).execute(())[0] for name, method in _PTE_NUMBERS.items()}
    _check(numbers)
    stop = tuple(program.load_method(_PTE_STOP).execute(()))
    recurrent = bool(program.load_method(_PTE_RECURRENT).execute(())[0])
    forward, texts = program.load_method("forward"), None
    if _SESSION in program.method_names:
        texts = _PteTexts(program.load_method(_SESSION).execute, max_length, cache)
    elif (max_length, cache) != (None, None):
        raise ValueError("it has no plan, so that its length and caches were chosen when it was exported")
    return ExportedDecoder(
        max_length or numbers["max_length"], numbers["chunk"], numbers["vocabulary"], stop, recurrent,
        lambda tokens, start: _copied(forward._method.call((tokens, start), clone_outputs=False)[0]), _texts=texts,
    )  # fmt: skip


def _copied(logits: Tensor) -> Tensor:
    # torch's copy of a large tensor starts its threads, which then spin, and take the CPUs from the plan's threads.
    return torch.from_numpy(logits.view(torch.uint8).numpy().copy()).view(logits.dtype)


def _load_pt2(path: str) -> ExportedDecoder:
    package = import_module("torch._inductor").aoti_load_package(path)
    metadata = package.loader.get_metadata()
    about = {name.removeprefix(_PT2): value for name, value in metadata.items() if name.startswith(_PT2)}
    numbers = {name: int(about[name]) for name in _PTE_NUMBERS}
    _check(numbers)
    stop = tuple(int(token) for token in about["stop"].split(",") if token)
    caches = [zeros(text) for text in about["caches"].split(",")]
    recurrent = any(cache.dim() != 4 for cache in caches)
    settings: dict[str, Any] = {**numbers, "stop": stop, "recurrent": recurrent}
    return ExportedDecoder(**settings, _run=lambda tokens, start: package(tokens, start, caches))


_LOADERS = {".plan": _load_plan, ".pte": _load_pte, ".pt2": _load_pt2}


def load_decoder(path: str | os.PathLike[str], *, max_length: int | None = None, cache: str | None = None) -> ExportedDecoder:
    """Loads a file of :func:`export_decoder`.

    A .plan runs in lowbit's library, a .pte in ExecuTorch's runtime in this process, a .pt2 in torch.

    A .pt2 holds machine code: load only files that you trust as much as a program.

    Args:
        max_length: for a .plan or a .pte with a plan, the longest text in tokens; None: for a .plan 2048, or the model's
            positions if they are fewer, for a .pte that of its export.
        cache: for the same, the type of the KV cache, as for :class:`Decoder`; None: for a .plan float32, for a .pte that of
            its export.

    Raises:
        ImportError: for a .pte, executorch is not installed, or lowbit was built without it.
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a decoder's program, or has another ending.
    """
    path = os.fspath(path)
    suffix = Path(path).suffix
    if suffix not in _LOADERS:
        raise ValueError(f"path is {path!r}; expected a name that ends in .plan, .pte or .pt2")
    if suffix == ".pt2" and (max_length, cache) != (None, None):
        raise ValueError(f"max_length and cache were chosen when {path} was exported; expected them for a .plan or .pte")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    if suffix == ".pte":
        import_module("lowbit.executorch").register()
    load: Any = _LOADERS[suffix]
    try:
        return cast(ExportedDecoder, load(path) if suffix == ".pt2" else load(path, max_length, cache))
    except Exception as error:
        raise ValueError(f"{path} does not load, or is not what lowbit.llm.export_decoder writes: {error}") from error
