"""Language models and their tokenizers from directories, checked beforehand: what is wrong is said in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files.untrusted import interpreting, read_json

if TYPE_CHECKING:
    from ..transformers import LowBitConfig

_GENERATION = "generation_config.json"


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """config.json of a checkpoint.

    Raises:
        OSError: no such directory, or no config.json in it.
        ValueError: it is not a JSON object.
    """
    directory = Path(path)
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise NotADirectoryError(
            f"{directory} {found}; expected a directory with config.json and model.safetensors. "
            "From the Hugging Face Hub: hf download OWNER/NAME --local-dir DIRECTORY"
        )
    file = directory / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{directory} has no config.json; expected a checkpoint of transformers")
    return read_json(file)


def is_packed(path: str | os.PathLike) -> bool:
    """Whether a checkpoint has packed weights of lowbit.

    Raises:
        OSError, ValueError: as :func:`read_config`; or weights that another method has quantised, or a later lowbit.
    """
    file, quantization = Path(path) / "config.json", read_config(path).get("quantization_config")
    if quantization is None:
        return False
    from ..transformers import METHOD, LowBitConfig

    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != METHOD:
        raise ValueError(
            f"{file} says that the weights are quantised by the method {method!r}; expected {METHOD!r} or none"
        )
    try:
        LowBitConfig(**quantization)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return True


def load_model(
    path: str | os.PathLike,
    quantization: LowBitConfig | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> torch.nn.Module:
    """A causal language model, in eval mode, with the dtypes of its files.

    Args:
        path: a directory with config.json and safetensors files, float or packed by :func:`lowbit.quantize_checkpoint`.
        quantization: how to quantise a float checkpoint while it is loaded; None: as it is.
        progress: called as ``progress(tensors loaded, tensors)``.

    Raises:
        ImportError: transformers is not installed.
        OSError: a file is missing, or cannot be read.
        ValueError: an unknown architecture, a damaged file, tensors that are missing or of another shape than
            config.json says, or ``quantization`` for a packed checkpoint.
    """
    from .. import _safetensors

    # First what needs no transformers, whose import takes seconds.
    directory = Path(path)
    file, text = directory / "config.json", read_config(directory)
    model_type = text.get("model_type")
    tensors = _safetensors.read_files(*_safetensors.files_of(directory))
    if (directory / _GENERATION).exists():
        read_json(directory / _GENERATION)
    packed = is_packed(directory)
    transformers = import_module("transformers")
    names = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not isinstance(model_type, str) or model_type not in names:
        raise ValueError(
            f"{file} has model_type {model_type!r}, which transformers {transformers.__version__} "
            "does not know as a causal language model; for a new architecture install a newer transformers"
        )
    if packed and quantization is not None:
        raise ValueError(f"{directory} is packed already; to quantise it otherwise, start from the float checkpoint")
    # Not given as None: that would mean float weights.
    chosen = {} if quantization is None else {"quantization_config": quantization}
    from ..hf.building import bounded, check_fits, check_numbers

    check_numbers(text, file)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _counting(progress), interpreting(f"{directory} does not load"):
        with interpreting(f"{file} describes no model that transformers {transformers.__version__} builds"):
            config = transformers.AutoConfig.from_pretrained(directory, **options)
            with bounded(len(tensors), file):
                check_fits(transformers.AutoModelForCausalLM.from_config(config), tensors, directory)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            **options,
            output_loading_info=True,  # reported below, in one line
            ignore_mismatched_sizes=True,
            **chosen,
        )
    wrong = [
        (f"{name} has shape {list(found)}; expected {list(expected)}")
        for name, found, expected in loading["mismatched_keys"]
    ] + [f"{name} is missing" for name in loading["missing_keys"]]
    if wrong:
        more = f" ({len(wrong) - 1} more such tensors)" if len(wrong) > 1 else ""
        raise ValueError(f"{directory}: {wrong[0]}, as config.json says{more}; the files do not belong together")
    return model.eval()


@contextmanager
def _counting(progress: Callable[[int, int], None] | None):
    """Reports transformers' progress in loading to a function, instead of by a bar and a table of its own."""
    logging = import_module("transformers.utils.logging")

    class Counter:
        def __init__(self, items=(), **kwargs):
            self._items, self._total = items, kwargs.get("total") or len(items)

        def __iter__(self):
            for done, item in enumerate(self._items, 1):
                yield item
                if progress is not None:
                    progress(done, self._total)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __getattr__(self, name):  # whatever else a bar can do
            return lambda *args, **kwargs: None

    previous = logging.set_tqdm_hook(lambda factory, args, kwargs: Counter(*args, **kwargs))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(previous)


def load_tokenizer(path: str | os.PathLike):
    """The fast tokenizer of a checkpoint.

    Raises:
        ImportError: transformers is not installed.
        OSError, ValueError: no tokenizer there, or none that decodes token by token.
    """
    transformers = import_module("transformers")
    directory = Path(path)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; copy the files of its tokenizer there")
    with _counting(None), interpreting(f"the tokenizer in {directory} does not load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{directory} has a {type(tokenizer).__name__}, written in Python; expected one with a tokenizer.json"
        )
    return tokenizer


def stop_tokens(model: torch.nn.Module, tokenizer=None) -> list[int]:
    """The ids that end a text: what generation_config.json, config.json or the tokenizer says, in this order."""
    configs = getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer
    ids = next((ids for ids in (getattr(config, "eos_token_id", None) for config in configs) if ids is not None), None)
    ids = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"the eos_token_id of the model is {ids}; expected token ids, as generation_config.json names them")
    return list(ids)


class TextStream:
    """Turns tokens into text as they come. A character of several tokens comes whole, with its last token."""

    def __init__(self, tokenizer, prompt: list[int]):
        """Args:
        tokenizer: a fast one.
        prompt: ids of the text before: some tokenizers write the first word of a text without its space.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, and empty within a character."""
        return self._stream.step(self._tokenizer, token) or ""
