"""Loads models and makes decoders for the commands, and checks their options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowbit

from ..machine.cpus import available_cpus
from .options import SHAPES, Widths, refuse_unused
from .output import Output

if TYPE_CHECKING:
    import torch

    from .. import LowBitConfig


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

    what = f"loading {model}" if config is None else f"loading {model} to {config.bits} bits"
    with output.progress(what, "tensors") as advance:
        return (load_image_model if images else load_model)(model, config, progress=advance)


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


def load_packed(output: Output, model: Path, widths: Widths) -> torch.nn.Module:
    """Loads a packed checkpoint's model; a float one is quantized, by default to 4 bits."""
    from ..llm.loading import is_packed

    packed = widths.bits is None and is_packed(model)
    if packed:
        refuse_unused(f"for {model}, which is packed already", "group_size", "activation_bits")
    return load(output, model, None if packed else widths.config_at(widths.bits or 4))


def is_shape(name: str) -> bool:
    """Whether ``name`` is a known shape, for random weights, rather than a directory.

    Raises:
        FileNotFoundError: it is neither.
    """
    if name in SHAPES:
        return True
    if not Path(name).exists():
        raise FileNotFoundError(f"{name} does not exist; expected the directory of a checkpoint, or one of {', '.join(SHAPES)}")
    return False


def positions(model: torch.nn.Module) -> int:
    """The model's context length in tokens."""
    from ..hf.decoding import position_limit

    return position_limit(model.config.get_text_config()) or sys.maxsize


def check_threads(threads: int | None) -> None:
    """Warns if there are fewer CPUs than threads."""
    if threads is not None and threads > (cpus := available_cpus()):
        warnings.warn(
            f"--threads is {threads}, and this process may use {cpus} CPUs; expected at most {cpus}, because more threads "
            "than CPUs wait for each other",
            stacklevel=3,
        )


def set_threads(threads: int | None) -> None:
    """Sets torch's number of threads, with a warning if there are fewer CPUs."""
    import torch

    check_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def by_torch(output: Output, path: Path, threads: int | None) -> Iterator[Any]:
    """A context in which torch loads a model: imports torch, and yields a function for progress."""
    lowbit.load_torch()
    set_threads(threads)
    with output.progress(f"loading {path}", "tensors") as advance:
        yield advance


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark, which is not text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
