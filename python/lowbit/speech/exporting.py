"""Exports Whisper models to two programs, an encoder and a decoder, and loads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..exports.module import described, export_pt2, export_pte, zeros
from ..llm.token_calls import check_call
from .speech_decoder import SpeechDecoder

_NUMBERS = ("max_length", "vocabulary", "positions", "mel_bins")
_PT2 = "lowbit.speech."  # prefix of the names of our metadata in a .pt2
_PTE = "get_"  # prefix of the names of constant methods in a .pte


class _Encoder(torch.nn.Module):
    def __init__(self, decoder: SpeechDecoder):
        super().__init__()
        self.encoder = decoder.model.model.encoder

    def forward(self, features: Tensor) -> Tensor:
        return self.encoder(features)[0]


class _Program(torch.nn.Module):
    """The decoder's program. A call first stores keys and values of encoder positions: all of them, or the last one again."""

    def __init__(self, decoder: SpeechDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, start: Tensor, states: Tensor, at: Tensor) -> Tensor:
        self.decoder.hear(states, at)
        # Attention refuses positions beyond the caches.
        count, last = tokens.shape[1], at + (states.shape[1] - 1)
        positions = (start + torch.arange(count)).clamp(0, self.decoder.max_length - 1)
        text = (0, count, start, self.decoder.caches())
        return self.decoder.step(tokens, positions, slice(-1, None), last, [text])[0]


class _CachesAsInputs(torch.nn.Module):
    """The program with caches as inputs. As constants their zeros would be stored in the .pt2."""

    def __init__(self, program: _Program, names: Sequence[str]):
        super().__init__()
        self.program, self.names = program, names

    def forward(self, tokens: Tensor, start: Tensor, states: Tensor, at: Tensor, caches: list[Tensor]) -> Tensor:
        return torch.func.functional_call(self.program, dict(zip(self.names, caches)), (tokens, start, states, at))


@torch.no_grad()
def export_speech(decoder: SpeechDecoder, encoder_path: str | os.PathLike[str], decoder_path: str | os.PathLike[str]) -> None:
    """Exports a Whisper model to two files that run without Python: for ExecuTorch (.pte) or as machine code (.pt2).

    * The encoder takes features [1, mel bins, frames] of a window, and returns states [1, positions, width].
    * The decoder takes tokens [1, s] and start [1], both int64, states [1, p, width], and ``at`` [1] int64; it returns logits
      [1, vocabulary] after the last token. The first call of a window gets all states and ``at`` 0, each later one the last
      state and ``at`` positions - 1. A .pt2 also takes all caches, and changes them in place; its metadata describes them.

    :func:`load_speech` runs them.

    Args:
        decoder: quantized, in eval mode.
        encoder_path, decoder_path: names that both end in .pte or both in .pt2; each is replaced atomically.

    Raises:
        ImportError: executorch is not installed, for .pte.
        ValueError, OSError: the names have another ending, or a file cannot be written.
        Exception: whatever torch.export, ExecuTorch and AOTInductor raise.
    """
    endings = {Path(path).suffix for path in (encoder_path, decoder_path)}
    if len(endings) != 1 or not endings <= {".pte", ".pt2"}:
        raise ValueError(f"the paths are {encoder_path} and {decoder_path}; expected names that end in .pte, or both in .pt2")
    config, dtype = decoder.model.config, decoder.model.dtype
    positions = config.max_source_positions
    about = dict(zip(_NUMBERS, (decoder.max_length, decoder.vocabulary, positions, config.num_mel_bins), strict=True))
    features = torch.zeros(1, config.num_mel_bins, 2 * positions, dtype=dtype)
    # Two objects, because torch.export would make a single input of one object.
    begin, at = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    inputs: tuple[Any, ...] = (torch.zeros(1, 3, dtype=torch.int64), begin, torch.zeros(1, 5, config.d_model, dtype=dtype), at)
    tokens, states = torch.export.Dim("s", min=1, max=decoder.max_length), torch.export.Dim("p", min=1, max=positions)
    sizes: tuple[Any, ...] = ({1: tokens}, None, {1: states}, None)
    program = _Program(decoder).eval()
    if endings == {".pte"}:
        export_pte(_Encoder(decoder).eval(), (features,), encoder_path)
        constants = {_PTE + name: value for name, value in about.items()}
        with _without_encoder(decoder.model.model):
            export_pte(program, inputs, decoder_path, dynamic_shapes=sizes, constant_methods=constants, check_buffers=False)
        return
    caches = {name: cache for name, cache in program.named_buffers() if _is_cache(name)}
    metadata = {_PT2 + name: str(value) for name, value in about.items()} | {
        f"{_PT2}caches": ",".join(map(described, caches.values()))
    }
    export_pt2(_Encoder(decoder).eval(), (features,), encoder_path)
    inputs = (*inputs, [torch.zeros_like(cache) for cache in caches.values()])
    sizes = (*sizes, [None] * len(caches))
    export_pt2(_CachesAsInputs(program, list(caches)).eval(), inputs, decoder_path, dynamic_shapes=sizes, metadata=metadata)


@contextmanager
def _without_encoder(model: Any) -> Iterator[None]:
    """A context without the encoder, because a .pte contains all weights of a module, even unused ones."""
    encoder, model.encoder = model.encoder, torch.nn.Identity()
    try:
        yield
    finally:
        model.encoder = encoder


def _is_cache(name: str) -> bool:
    return "_cache_" in name and name.count(".") == 1


class ExportedSpeech:
    """A Whisper model loaded from files of :func:`export_speech`, called as the :class:`SpeechDecoder`."""

    def __init__(self, about: dict[str, int], encode: Callable[[Tensor], Tensor], run: Callable[..., Tensor]):
        self.max_length, self.vocabulary = about["max_length"], about["vocabulary"]
        self.positions, self.mel_bins = about["positions"], about["mel_bins"]
        self._encode, self._run = encode, run
        self._states: Tensor | None = None  # input of the next decoder call
        self._at = torch.tensor([0])
        self._count = 0  # tokens of the text

    def listen(self, features: Tensor) -> None:
        """As :meth:`SpeechDecoder.listen`."""
        expected = (1, self.mel_bins, 2 * self.positions)
        if tuple(features.shape) != expected:
            raise ValueError(f"features is {list(features.shape)}; expected {list(expected)}")
        self._states, self._at = self._encode(features), torch.tensor([0])

    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """As :meth:`SpeechDecoder.forward`."""
        check_call(tokens, start, self.vocabulary, self.max_length, self._count)
        if self._states is None:
            raise RuntimeError("the decoder has no audio; call listen() first")
        self._count = int(start)  # if the call fails
        logits = self._run(tokens, start, self._states, self._at)
        self._count += tokens.shape[1]
        self._states, self._at = self._states[:, -1:].contiguous(), torch.tensor([self.positions - 1])
        return logits


def load_speech(encoder_path: str | os.PathLike[str], decoder_path: str | os.PathLike[str]) -> ExportedSpeech:
    """Loads files of :func:`export_speech`. A .pt2 holds machine code: load only files that you trust as much as a program.

    Raises:
        ImportError: for a .pte, executorch is not installed, or lowbit was built without it.
        FileNotFoundError: a file does not exist.
        ValueError: a file is not such a program.
    """
    paths = [os.fspath(encoder_path), os.fspath(decoder_path)]
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no file {path}")
    load = _load_pte if paths[1].endswith(".pte") else _load_pt2
    if load is _load_pte:
        import_module("lowbit.executorch").register()
    try:
        return load(*paths)
    except Exception as error:
        raise ValueError(f"{paths[0]} or {paths[1]} is not what lowbit.speech.export_speech writes: {error}") from error


def _load_pte(encoder_path: str, decoder_path: str) -> ExportedSpeech:
    runtime = import_module("executorch.runtime").Runtime.get()
    encoder, decoder = runtime.load_program(encoder_path), runtime.load_program(decoder_path)
    about = {name: int(decoder.load_method(_PTE + name).execute(())[0]) for name in _NUMBERS}
    encode, run = encoder.load_method("forward"), decoder.load_method("forward")
    return ExportedSpeech(
        about, lambda features: encode.execute((features,))[0].clone(), lambda *inputs: run.execute(inputs)[0]
    )


def _load_pt2(encoder_path: str, decoder_path: str) -> ExportedSpeech:
    load = import_module("torch._inductor").aoti_load_package
    encoder, decoder = load(encoder_path), load(decoder_path)
    metadata = decoder.loader.get_metadata()
    about = {name: int(metadata[_PT2 + name]) for name in _NUMBERS}
    caches = [zeros(text) for text in metadata[f"{_PT2}caches"].split(",")]
    return ExportedSpeech(about, encoder, lambda *inputs: decoder(*inputs, caches))
