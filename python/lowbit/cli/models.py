"""Loads models and makes decoders for the commands, and checks their options."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..machine.threads import available_cpus
from .options import PREFIX_SIZE, make_config, parse_size, refuse_unused
from .output import Output

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..llm import Decoder, Mtp, PrefixCache

_PREFIX_CACHE = "LOWBIT_PREFIX_CACHE"
MTP = Path("mtp")  # value of --draft for the model's own multi-token prediction head


def from_hub(output: Output, model: str | Path | None) -> str | Path | None:
    """The local copy of a model on a hub; other values unchanged.

    Raises:
        ValueError, OSError: an invalid hub name, or a path that does not exist; or as :func:`download`.
    """
    from ..files.hub import check_exists, download, endpoint, hub_name

    if model is None:
        return None
    if hub_name(model) is None:
        check_exists(model)
        return model
    output.note(f"getting {model} from {endpoint()} ...")
    if not sys.stderr.isatty():
        import_module("huggingface_hub.utils").disable_progress_bars()
    return type(model)(download(model))


def load(output: Output, model: Path, config: LowBitConfig | None, images: bool = False) -> torch.nn.Module:
    """Loads a checkpoint's model, quantized with ``config`` if given; with ``images``, an image-text model."""
    from ..llm.loading import load_image_model, load_model

    with output.progress(
        f"loading {model}" if config is None else f"loading {model} to {config.bits} bits", "tensors"
    ) as advance:
        return (load_image_model if images else load_model)(model, config, progress=advance)


def load_draft(
    output: Output, path: Path, tokenizer: Any, model: str | Path, decoder: Any, config: LowBitConfig | None, cache: str | None
) -> Decoder | Mtp:
    """Loads the decoder of a draft model for ``model``; for the path ``mtp``, the model's multi-token prediction head.

    Args:
        tokenizer, decoder: of ``model``.
        config: how ``model`` was quantized, if it is a float checkpoint.

    Raises:
        ValueError: the draft model has other tokens or supports only shorter texts; or the model has no such head.
    """
    from .. import llm
    from ..llm.loading import load_tokenizer

    if path == MTP:
        return llm.Mtp(decoder, quantization=config)
    max_length = decoder.max_length
    with imported(output, path) as path:
        tokens, expected = load_tokenizer(path).get_vocab(), tokenizer.get_vocab()
        if tokens != expected:
            other = min(token for token in tokens.keys() | expected if tokens.get(token) != expected.get(token))
            raise ValueError(
                f"{path} has other tokens than {model}, {other!r} for example, and cannot guess them; expected a "
                "smaller model of the same family"
            )
        draft = load(output, path, None)
    if positions(draft) < max_length:
        raise ValueError(f"{path} is made for {positions(draft)} tokens; expected {max_length} or more, as --max-length")
    return llm.Decoder(draft, max_length, cache, replay=True)


def make_decoder(
    output: Output, model: torch.nn.Module, max_length: int, compiled: bool, cache: str | None = None, windows: bool = True
) -> Callable[..., torch.Tensor]:
    """A decoder of the model with caches of this length, optionally compiled."""
    from .. import llm
    from ..llm.compiled_files import usable_directory

    step = llm.Decoder(model, max_length, cache, windows=windows, replay=True)
    if not compiled:
        return step
    with output.progress("compiling, or loading what was compiled before"):
        return llm.compile_decoder(step, directory=usable_directory(output.note))


def make_step(
    output: Output,
    model: torch.nn.Module,
    max_length: int,
    compiled: bool,
    cache: str | None = None,
    needs: dict[str, bool] | None = None,
    windows: bool = True,
) -> Callable[..., torch.Tensor]:
    """A decoder of the model; or, with a note, a :class:`lowbit.llm.Fallback` if the decoder refuses the model.

    Args:
        needs: option that requires the decoder -> whether it was given.
        windows: as for :class:`lowbit.llm.Decoder`.
    """
    from .. import llm

    try:
        return make_decoder(output, model, max_length, compiled, cache, windows)
    except llm.Refusal as refusal:
        for option, given in ({"--compile": compiled, "--cache": cache is not None} | (needs or {})).items():
            if given:
                raise ValueError(f"{option} requires lowbit's decoder; {refusal}") from refusal
        step = llm.Fallback(model, max_length)
        step.refusal = str(refusal).split("; use transformers' generate()")[0]
        output.note(f"{step.refusal}; it runs by transformers' own attention instead, and {step.how}")
        return step


def parse_prefix_size(directory: Path | None, size: str) -> int:
    if not wants_prefix_cache(directory):
        refuse_unused("without --prefix-cache", prefix_cache_size=size != PREFIX_SIZE)
    return parse_size(size, "--prefix-cache-size")


def wants_prefix_cache(directory: Path | None) -> bool:
    """Whether the option or the environment names a prefix cache, which needs the keys and values of whole texts."""
    return directory is not None or bool(os.environ.get(_PREFIX_CACHE))


def make_prefix_cache(output: Output, directory: Path | None, most_bytes: int, step: Callable[..., Any]) -> PrefixCache | None:
    """The prefix cache in the directory of the option or the environment variable; None without either.

    Raises:
        ValueError: the option is given, and the model does not support a prefix cache. For the environment variable, which
            applies to all models, this is only a note.
    """
    from .. import llm

    decoder = cast("llm.Decoder", step)  # PrefixCache checks this
    if directory is not None:
        return llm.PrefixCache(directory, decoder, most_bytes)
    if not (named := os.environ.get(_PREFIX_CACHE)):
        return None
    try:
        return llm.PrefixCache(named, decoder, most_bytes)
    except ValueError as error:
        output.note(f"{_PREFIX_CACHE} is not used: {error}")
        return None


@contextmanager
def showing_import(output: Output, source: Path) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """Yields two progress functions for an import: for the steps of opening the source, and for the bytes of its weights."""
    with ExitStack() as stack:
        shown: list[Callable[..., None]] = []

        def part(number: int, what: str, unit: str) -> Callable[..., None]:
            def advance(*state: Any) -> None:
                if len(shown) <= number:
                    stack.close()  # ends the previous bar
                    shown.append(stack.enter_context(output.progress(f"{what} {source}", unit)))
                shown[number](*state)

            return advance

        yield part(0, "opening", "steps"), part(1, "importing", "bytes")


@contextmanager
def imported(output: Output, model: Path) -> Iterator[Path]:
    """A context with a checkpoint's directory; for a GGUF file, its cached import, which is created if it is missing.

    Load the model and its tokenizer inside the context: no other process replaces the import meanwhile.
    """
    from ..importing.cache import cache_of, is_current, loading_from_cache

    if model.suffix != ".gguf" or not model.is_file():
        yield model
        return
    cache = cache_of(model)

    def waiting() -> None:
        output.note(f"another process imports {model} or loads {cache}; waiting for it")

    with ExitStack() as stack:
        if is_current(model):
            output.note(f"{model} was imported before: {cache}")
            stack.enter_context(loading_from_cache(model, None, waiting))
        else:
            changed = "; the import of another file is replaced" if cache.exists() else ""
            output.note(f"{model} is imported to {cache}{changed}")
            with showing_import(output, model) as (opening, advance):
                stack.enter_context(loading_from_cache(model, advance, waiting, opening))
        yield cache


def load_packed(output: Output, model: Path, bits: int | None, group_size: str) -> torch.nn.Module:
    """Loads a packed checkpoint's model; a float one is quantized to ``bits``, by default 4."""
    from ..llm.loading import is_packed

    packed = bits is None and is_packed(model)
    if packed:
        refuse_unused(f"for {model}, which is packed already", group_size=group_size != "32")
    return load(output, model, None if packed else make_config(bits or 4, group_size))


def is_shape(name: str) -> bool:
    """Whether ``name`` is a known shape, for random weights, rather than a directory.

    Raises:
        FileNotFoundError: it is neither.
    """
    from ..llm.shapes import NAMES

    if name in NAMES:
        return True
    if not Path(name).exists():
        raise FileNotFoundError(f"{name} does not exist; expected the directory of a checkpoint, or one of {', '.join(NAMES)}")
    return False


def positions(model: torch.nn.Module) -> int:
    """The model's context length in tokens."""
    from ..hf.decoding import position_limit

    return position_limit(model.config.get_text_config()) or sys.maxsize


def set_threads(threads: int | None) -> None:
    """Sets torch's number of threads, with a warning if there are fewer CPUs."""
    if threads is None:
        return
    if threads > (cpus := available_cpus()):
        warnings.warn(
            f"--threads is {threads}, and this process may use {cpus} CPUs: more threads than CPUs wait for each other, and "
            f"all becomes slower; expected at most {cpus}",
            stacklevel=2,
        )
    torch.set_num_threads(threads)


def check_text(text: str, option: str) -> str:
    """Returns a text from the command line or stdin after checking it.

    Raises:
        ValueError: it is not UTF-8. Python represents invalid bytes by surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"the byte 0x{code & 0xFF:02x}" if 0xDC80 <= code <= 0xDCFF else f"half of a character, 0x{code:x},"
        raise ValueError(f"{option} is not UTF-8 text: found {problem} at character {error.start}") from error
    return text


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
