"""Measures the divergence of a language model's predictions from a float reference."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..files.io import read_bytes
from ..files.replace import replacing
from ..files.safetensors import Stored, Writer, read_file, read_metadata
from ..files.tensors import read_rows
from ..llm.perplexity import Perplexity, check_causal, predictions, stride_of, windows_of
from ..machine.sizes import size

_VERSION = "1"
_KEY = "lowbit_reference"  # key of the format version in the file's metadata
_ROWS = 64  # tokens processed at a time; logits of one token take up to a megabyte


@dataclass(frozen=True)
class Divergence:
    """Result of :func:`compare`."""

    model: Perplexity
    reference: Perplexity
    kld: float  # mean over the predicted tokens of KL(reference || model), in nats
    kld_99: float  # its 99th percentile
    top1: float  # the share of tokens where both have the same most likely next token
    nats_error: float  # standard error of the mean, over the tokens, of log(p of reference) - log(p of model)


@dataclass(frozen=True)
class Expected:
    """A reference's predictions in a window with n new tokens."""

    rows: Callable[[int, int], Tensor]  # (begin, end) -> log-probabilities, float32 [end - begin, vocabulary]
    most_likely: Tensor  # ids, int64 [n]
    nats: Tensor  # -log(probability) of the text's tokens, float32 [n]


@torch.inference_mode()
def compare(
    model: torch.nn.Module,
    tokens: Sequence[int],
    reference: torch.nn.Module | str | os.PathLike[str],
    *,
    window: int = 512,
    stride: int | None = None,
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Divergence:
    """Compares a model's next-token distributions with a reference's, token by token.

    The windows are those of :func:`~lowbit.llm.perplexity.perplexity`, so every token except the first counts once. Memory
    holds the logits of one window, float32 [window, vocabulary], of the model and of a reference model.

    Args:
        model: a causal language model of transformers, quantized or not, in eval mode.
        tokens: ids of the text, at least two.
        reference: another such model with the same vocabulary, or the path of a file that :func:`save_logits` wrote.
        window, stride, cache, progress: as in :func:`~lowbit.llm.perplexity.perplexity`; ``cache`` is the model's only.

    Raises:
        ValueError: what :func:`~lowbit.llm.perplexity.perplexity` refuses; a reference with another vocabulary; or a file
            that holds no logits, or was made from other tokens, another window or another stride.
        OSError: the file cannot be read.
    """
    stride = stride_of(window, stride)
    if cache is None:  # a decoder makes this check itself
        check_causal(model)
    if isinstance(reference, torch.nn.Module):
        check_causal(reference)
        expected = _computed(reference, tokens, window, stride)
    else:
        expected = stored(Path(reference), tokens, window, stride)
    with closing(expected), closing(predictions(model, tokens, window, stride, cache, progress)) as predicted:
        return judge(predicted, expected)


@torch.inference_mode()
def save_logits(
    model: torch.nn.Module,
    tokens: Sequence[int],
    path: str | os.PathLike[str],
    *,
    window: int = 512,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Writes a model's predictions of a text to a file, for :func:`compare`.

    The file holds float16 log-probabilities of the whole vocabulary for each predicted token (:func:`logits_bytes`).
    :func:`compare` normalizes them again, so their rounding error is far below that of a quantized model: a model compared
    with its own file has a divergence of about 1e-7 nats. Perplexity and most likely tokens are stored exactly.

    Args:
        model: the reference, a causal language model of transformers in eval mode; best in float32.
        tokens: ids of the text, at least two.
        path: the file; its name ends in .safetensors. An existing file of logits is replaced atomically.
        window, stride, progress: as in :func:`~lowbit.llm.perplexity.perplexity`.

    Returns:
        The perplexity of the reference.

    Raises:
        ValueError: what :func:`~lowbit.llm.perplexity.perplexity` refuses, or another suffix.
        FileExistsError: the file has something else, such as a model's weights.
        OSError: the file cannot be written, or the disk has too little space for it.
    """
    check_causal(model)
    stride = stride_of(window, stride)
    count, vocabulary = len(tokens) - 1, model.config.get_text_config().vocab_size
    tensors = [
        ("log_probabilities", "F16", (count, vocabulary), 2 * count * vocabulary),
        ("tokens", "I32", (count + 1,), 4 * (count + 1)),
        ("most_likely", "I32", (count,), 4 * count),
        ("nats", "F32", (count,), 4 * count),
    ]
    metadata = {_KEY: _VERSION, "window": str(window), "stride": str(stride)}
    most_likely, nats = [], []
    with replacing(path, ".safetensors") as target:
        _refuse_other_file(Path(path))
        needed, free = logits_bytes(count + 1, vocabulary), shutil.disk_usage(target.parent).free
        if needed > free:
            raise OSError(f"{path} needs {size(needed)} and the disk has {size(free)} left; use another disk or a shorter text")
        with (
            closing(predictions(model, tokens, window, stride, None, progress)) as windows,
            Writer(target, tensors, metadata) as writer,
        ):
            for logits, of_text in windows:
                if logits.shape[-1] != vocabulary:
                    raise ValueError(f"the model predicts {logits.shape[-1]} tokens; expected its vocab_size, {vocabulary}")
                for begin in range(0, len(of_text), _ROWS):
                    rows = logits[begin : begin + _ROWS].log_softmax(-1)
                    writer.write(_bytes(rows.clamp_min(torch.finfo(torch.float16).min).half()))
                    most_likely.append(rows.argmax(-1))
                    nats.append(-rows.gather(1, of_text[begin : begin + _ROWS, None])[:, 0])
            for tensor in (torch.tensor(tokens).int(), torch.cat(most_likely).int(), torch.cat(nats)):
                writer.write(_bytes(tensor))
    return Perplexity(count, torch.cat(nats).double().sum().item())


def _refuse_other_file(path: Path) -> None:
    """Raises FileExistsError if there is a file that :func:`save_logits` has not written."""
    if path.exists() and path.stat().st_size:
        with suppress(ValueError):  # not a safetensors file
            read_file(path)
            if _KEY in read_metadata(path):
                return
        raise FileExistsError(f"{path} exists and holds no reference logits; choose another name, or delete it")


def logits_bytes(tokens: int, vocabulary: int) -> int:
    """The size of the file of :func:`save_logits` for a text with this number of tokens, without its header."""
    return (tokens - 1) * (2 * vocabulary + 8) + 4 * tokens


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().numpy()).cast("B")


def judge(predicted: Iterator[tuple[Tensor, Tensor]], expected: Iterator[Expected]) -> Divergence:
    """Compares predictions, window by window.

    Args:
        predicted: logits, float32 [n, vocabulary], and the text's tokens, int64 [n], as
            :func:`~lowbit.llm.perplexity.predictions` yields them.
        expected: the reference's, for the same windows.
    """
    divergence, nats, of_reference, same = [], [], [], 0
    for reference, (logits, tokens) in zip(expected, predicted, strict=True):  # expected first, for errors of its file
        for begin in range(0, len(tokens), _ROWS):
            end = min(begin + _ROWS, len(tokens))
            ours, theirs = logits[begin:end].log_softmax(-1), reference.rows(begin, end)
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"the model predicts {ours.shape[-1]} tokens and the reference {theirs.shape[-1]}; expected the same "
                    "vocabulary"
                )
            weighted = theirs.exp()
            # A token with probability 0 in the reference contributes nothing. Some models mask tokens with minus infinity.
            weighted = torch.where(weighted == 0, 0.0, weighted.mul(theirs - ours))
            divergence.append(weighted.sum(-1).clamp_min(0))
            nats.append(-ours.gather(1, tokens[begin:end, None])[:, 0])
            same += int((ours.argmax(-1) == reference.most_likely[begin:end]).sum())
        of_reference.append(reference.nats)
    kld, ours, theirs = (torch.cat(parts).double() for parts in (divergence, nats, of_reference))
    return Divergence(
        Perplexity(len(kld), ours.sum().item()),
        Perplexity(len(kld), theirs.sum().item()),
        kld.mean().item(),
        kld.quantile(0.99).item(),
        same / len(kld),
        (ours - theirs).std(correction=0).item() / len(kld) ** 0.5,
    )


def _computed(model: torch.nn.Module, tokens: Sequence[int], window: int, stride: int) -> Generator[Expected, None, None]:
    with closing(predictions(model, tokens, window, stride)) as windows:
        for logits, of_text in windows:

            def rows(begin: int, end: int, logits: Tensor = logits) -> Tensor:
                return logits[begin:end].log_softmax(-1)

            nats = torch.nn.functional.cross_entropy(logits, of_text, reduction="none")
            yield Expected(rows, logits.argmax(-1), nats)


def stored(path: Path, tokens: Sequence[int], window: int, stride: int) -> Generator[Expected, None, None]:
    """Yields the predictions in a file of :func:`save_logits`, window by window."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; expected a file of logits, or load the model in it")
    tensors = read_file(path)
    metadata = read_metadata(path)
    if _KEY not in metadata:
        raise ValueError(f"{path} holds no reference logits; expected a file that lowbit eval --save-logits wrote")
    if metadata[_KEY] != _VERSION:
        raise ValueError(f"{path} has version {metadata[_KEY]}; expected {_VERSION}: install a newer lowbit or write it again")
    _check_shapes(path, tensors)
    ids = read_bytes(tensors["tokens"]).view(torch.int32)
    if len(ids) != len(tokens):
        raise ValueError(f"{path} was made from {len(ids)} tokens and the text has {len(tokens)}; expected the same text")
    different = (ids != torch.tensor(tokens)).nonzero()
    if len(different):
        at = int(different[0])
        raise ValueError(
            f"{path} was made from another text or by another tokenizer: its token {at} is {int(ids[at])}, that of the text "
            f"is {tokens[at]}"
        )
    for name, value in (("window", window), ("stride", stride)):
        if metadata.get(name) != str(value):
            raise ValueError(f"{path} was made with a {name} of {metadata.get(name)}; expected {value}, as for the model")
    most_likely = read_bytes(tensors["most_likely"]).view(torch.int32).long()
    nats = read_bytes(tensors["nats"]).view(torch.float32)
    for _, end, first in windows_of(len(tokens), window, stride):

        def rows(begin: int, end: int, first: int = first - 1) -> Tensor:
            return read_rows(tensors["log_probabilities"], first + begin, first + end).float().log_softmax(-1)

        yield Expected(rows, most_likely[first - 1 : end - 1], nats[first - 1 : end - 1])


def _check_shapes(path: Path, tensors: dict[str, Stored]) -> None:
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    count, *rest = shapes.get("log_probabilities", ("", (0,)))[1]
    expected = {
        "log_probabilities": ("F16", (count, *rest)), "tokens": ("I32", (count + 1,)), "most_likely": ("I32", (count,)),
        "nats": ("F32", (count,)),
    }  # fmt: skip
    if shapes != expected or len(rest) != 1 or count < 1:
        raise ValueError(f"{path} is not a complete file of reference logits; write it again")
