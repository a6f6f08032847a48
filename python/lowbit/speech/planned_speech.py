"""Runs Whisper models by the plans beside their weights, without torch and transformers."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _C, __version__
from ..files.plan_facts import PLAN, NoPlan, are_allowed, described, facts_of, states
from ..files.tokenizer_json import TOKENIZER, load_backend
from ..machine.cpus import default_threads
from ..operators.cache_layout import PANEL, Slot
from .beams import BeamDecoder, Place, Queries, Text
from .transcriber import SETTINGS, Transcriber, load_transcriber
from .transcription import AnyTranscriber

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ..hf.config import LowBitConfig

LISTEN_PLAN = "lowbit.listen.plan"  # the encoder's; PLAN is the decoding step's
_KIND = "speech"
_FILES = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_MOST_INSIDE = 1 << 25  # bytes of a convolution or table of positions, which may have another type in the checkpoint
_ALIGNMENT = 64  # bytes, for caches
_TYPES = {0: np.dtype("float32"), 1: np.dtype("uint16"), 2: np.dtype("float16"), 7: np.dtype("int8")}  # by ElementType
_OF_TEXT = (Slot.KEYS, Slot.VALUES)
_Cache = tuple[np.ndarray, int, list[int]]  # memory, ElementType, shape
_TEXTS = ("", " Hello, world!  It's 3.5 o'clock .", "Größe naïve 東京 👩‍👩‍👧 שלום", "\n\ttabs", "<|en|> x <|endoftext|>")
_STEP = 2  # raised when inputs or results of the decoding step change
_NUMBERS = ("max_length", "vocabulary", "positions", "mel_bins", "median_filter_width")


class PlannedSpeech(BeamDecoder):
    """The encoder and the decoding step of a Whisper model by their plans, with the methods of :class:`SpeechDecoder`."""

    max_length: int
    vocabulary: int
    positions: int
    mel_bins: int
    median_filter_width: int

    def __init__(self, step: _C.PlanModel, listen: _C.PlanModel, content: dict[str, Any]):
        """
        Args:
            content: the description of the plans.
        """
        if content.get("step") != _STEP:
            raise ValueError("it was made by an earlier build")
        for name in _NUMBERS:
            setattr(self, name, int(content[name]))
        if content["dtype"] not in ("float32", "float16"):
            raise ValueError(f"the dtype is {content['dtype']!r}; expected float32 or float16")
        for _, _, size, kind, shape in content["caches"]:
            fits = len(shape) <= 16 and all(type(each) is int and 0 < each < 1 << 31 for each in shape)
            if type(kind) is not int or kind not in _TYPES or not fits or size != _TYPES[kind].itemsize * math.prod(shape):
                raise ValueError(f"a cache has {size!r} bytes of kind {kind!r} and shape {shape!r}; expected bytes that fit")
        self._step, self._listen = step, listen
        self._dtype, heads, width = np.dtype(content["dtype"]), content["heads"], content["width"]
        self.alignment_heads = [(layer, head) for layer, head in content["alignment_heads"]]
        self.aligned_layers: list[int] = sorted({layer for layer, _ in self.alignment_heads})
        self.queries: list[Queries] = []
        self._heads = (heads, width // heads)
        self._states = np.empty((1, self.positions, width), self._dtype)
        self._last = [np.zeros((1, heads, 1, width // heads), self._dtype) for _ in range(2 * content["layers"])]
        self._caches = {(layer, slot): (_zeros(size), kind, shape) for layer, slot, size, kind, shape in content["caches"]}
        self._heard = [self._caches[layer, Slot.STATE][0] for layer in self.aligned_layers]
        self._listen_caches = _described(listen, self._caches)
        self._layers = range(content["layers"])
        self._places, self._beams = [self._place(self._caches)], [0]

    def listen(self, features: np.ndarray) -> None:
        """As :meth:`SpeechDecoder.listen`."""
        expected = (1, self.mel_bins, 2 * self.positions)
        if features.shape != expected:
            raise ValueError(f"features is {list(features.shape)}; expected {list(expected)}")
        inputs = [np.ascontiguousarray(features, self._dtype), np.zeros(1, np.int64)]
        text = (0, self.positions, 0, self._listen_caches)
        self._listen.run(self.positions, 1, _memory(inputs), _memory([self._states, *self._last]), [text])

    def compute(self, tokens: list[int], positions: list[int], keep: list[int], texts: list[Text]) -> np.ndarray:
        kept = len(keep)
        logits = np.empty((kept, self.vocabulary), self._dtype)
        queries = [np.empty((kept, *self._heads), self._dtype) for _ in self.aligned_layers]
        inputs = [np.array(each, np.int64) for each in (tokens, positions, keep, [self.positions - 1])]
        given = [(begin, end, start, place.described) for begin, end, start, place in texts]
        self._step.run(len(tokens), kept, _memory([*inputs, *self._last]), _memory([logits, *queries]), given)
        self.queries = [list(row) for row in zip(*(each.astype(np.float32, copy=False) for each in queries), strict=True)]
        return logits.astype(np.float32, copy=False)

    def new_place(self) -> Place:
        own = {
            place: (_zeros(memory.nbytes), kind, shape)
            for place, (memory, kind, shape) in self._caches.items()
            if place[1] in _OF_TEXT
        }
        return self._place(self._caches | own)

    def _place(self, caches: dict[tuple[int, int], _Cache]) -> Place:
        arrays = {place: memory.view(_TYPES[kind]).reshape(shape) for place, (memory, kind, shape) in caches.items()}
        return Place([[arrays[layer, slot] for slot in _OF_TEXT] for layer in self._layers], _described(self._step, caches))

    def heard_keys(self) -> list[np.ndarray]:
        """As :meth:`SpeechDecoder.heard_keys`, from the caches, whose layout docs/internals/operators.md describes."""
        heads, width = self._heads
        panels = (memory.view(self._dtype).reshape(heads, -1, width, PANEL).swapaxes(2, 3) for memory in self._heard)
        return [each.reshape(heads, -1, width)[:, : self.positions].astype(np.float32) for each in panels]


def _described(plan: _C.PlanModel, caches: dict[tuple[int, int], _Cache]) -> Any:
    """Caches as a plan takes them."""
    described = {place: (memory.ctypes.data, kind, shape) for place, (memory, kind, shape) in caches.items()}
    return _C.PlanCaches([described.get(place[:2]) for place in plan.caches])


def _zeros(size: int) -> np.ndarray:
    block = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -block.ctypes.data % _ALIGNMENT
    return block[begin : begin + size]


def _memory(arrays: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes) for array in arrays]


class PlannedTranscriber(Transcriber):
    """A :class:`Transcriber` of the plans in a directory."""

    def __init__(self, directory: Path, threads: int | None = None):
        """
        Raises:
            NoPlan: there are no plans, or they do not fit the files beside them.
        """
        plans, files = [], [directory / PLAN, directory / LISTEN_PLAN]
        if not all(file.exists() for file in files):
            raise NoPlan("")
        for file in files:
            try:
                plans.append(_C.PlanModel(os.fsencode(file), threads or default_threads()))
            except (OSError, ValueError) as error:
                raise NoPlan(f"{file} is not used: {error}") from error
        contents = [described(directory, plan.about, __version__, _FILES, _KIND) for plan in plans]
        if contents[0] != contents[1]:
            raise NoPlan(f"{files[1]} is not used: it was made for another model than {files[0]}")
        try:
            decoder = PlannedSpeech(plans[0], plans[1], contents[0])
            settings = SimpleNamespace(**contents[0]["settings"])
            tokenizer = load_backend(directory, checked=True)
        except Exception as error:  # tokenizers raises no other kind
            raise NoPlan(f"{files[0]} is not used: {error}") from error
        self._begin(decoder, settings, SimpleNamespace(backend_tokenizer=tokenizer))


def open_transcriber(
    directory: Path,
    quantization: LowBitConfig | None = None,
    *,
    cache: str | None = None,
    threads: int | None = None,
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    note: Callable[[str], None] = lambda text: None,
) -> AnyTranscriber:
    """Opens a transcriber: with the plans beside the weights if they are current, else with torch, which also writes the plans.

    Args:
        loading: makes a context for the use of torch; it yields a function for progress.
        note: called with lines for the user.

    The other arguments and the errors are those of :func:`lowbit.speech.load_transcriber`.
    """
    stale = False
    if quantization is None and cache is None and are_allowed():
        try:
            return PlannedTranscriber(directory, threads)
        except NoPlan as reason:
            if str(reason):
                note(str(reason))
            stale = reason.stale
    with loading() as progress:
        made = load_transcriber(directory, quantization, cache=cache, progress=progress)
    if stale and isinstance(made, Transcriber):
        _keep_plans(made, directory, note)
    return made


def _keep_plans(transcriber: Transcriber, directory: Path, note: Callable[[str], None]) -> None:
    """Writes the plans of a packed model, if it has both, so that the next run needs no torch; never an error."""
    from ..llm.loading import is_packed

    decoder = transcriber.decoder
    if decoder.plan is None or decoder.listen_plan is None or not is_packed(directory) or not os.access(directory, os.W_OK):
        return
    try:
        write_plans(transcriber, directory)
    except (OSError, ValueError) as error:
        note(f"{directory / PLAN} is not written: {error}")
    else:
        note(f"{directory / PLAN} is written: the next run starts without torch")


def write_plans(transcriber: Transcriber, directory: Path) -> None:
    """Writes the plans of a model beside the weights in ``directory``, from which it was loaded.

    Raises:
        ValueError: the model has no plans, or the checkpoint has other weights.
        OSError: a file cannot be read or written.
    """
    from copy import copy
    from dataclasses import replace

    from ..exports.plan_export import placed_bytes, write_bytes
    from ..plan.plan_file import ELEMENT_TYPES

    decoder = transcriber.decoder
    if decoder.plan is None or decoder.listen_plan is None:
        raise ValueError(f"the model has no plans: {decoder.plan_refusal or decoder.listen_refusal}")
    config, dtype = decoder.model.config, str(decoder.model.dtype).removeprefix("torch.")
    content: dict[str, Any] = {"kind": _KIND, "step": _STEP} | {name: getattr(decoder, name) for name in _NUMBERS}
    content["alignment_heads"] = decoder.alignment_heads
    content |= {"dtype": dtype, "heads": decoder.heads, "width": config.d_model, "layers": config.decoder_layers}
    content["caches"] = [
        [*place, tensor.nbytes, ELEMENT_TYPES[tensor.dtype], list(tensor.shape)] for place, tensor in decoder.plan.kept.items()
    ]
    content["settings"] = {name: getattr(transcriber._settings, name, None) for name in SETTINGS}
    content |= {"lowbit": __version__, "files": states(directory, _FILES), "refusal": _refusal(transcriber, dtype, directory)}
    about = facts_of(content)
    for made, name in ((decoder.listen_plan, LISTEN_PLAN), (decoder.plan, PLAN)):
        plan = copy(made.planned.plan)
        plan.buffers = [replace(buffer) for buffer in plan.buffers]
        plan.about = about | {"vocabulary": [decoder.vocabulary], "positions": [decoder.max_length]}
        write_bytes(placed_bytes(plan, made.planned.weights, directory, _MOST_INSIDE), directory / name)


def _refusal(transcriber: Transcriber, dtype: str, directory: Path) -> str | None:
    """Why plans of a model would not give its results without torch; None if they do."""
    if dtype not in ("float32", "float16"):
        return f"numpy has no {dtype}"
    if not (directory / TOKENIZER).exists():
        return f"there is no {TOKENIZER}"
    other, own = load_backend(directory), transcriber._tokenizer
    if other.get_vocab(with_added_tokens=True) != own.get_vocab(with_added_tokens=True):
        return "the vocabulary differs"
    tokens = [own.encode(text).ids for text in _TEXTS] + [[token, token] for token in range(transcriber.decoder.vocabulary)]
    if any(other.decode(each, skip_special_tokens=True) != own.decode(each, skip_special_tokens=True) for each in tokens):
        return "the decoded text differs"
    return None
