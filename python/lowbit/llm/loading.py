"""Loads language models, processors and tokenizers from directories, with checks that raise one clear error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import _C
from ..files.config_json import CONFIG, SPEECH_TYPES, quantization_method, read_config
from ..files.tokenizer_json import check_tokenizer
from ..files.untrusted import interpreting, read_json

if TYPE_CHECKING:
    import torch

    from ..hf.config import LowBitConfig

_GENERATION = "generation_config.json"


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint has packed weights of lowbit.

    Raises:
        OSError, ValueError: config.json is missing or damaged, or the weights were quantized by another method or a later
            lowbit.
    """
    file, config = Path(path) / CONFIG, read_config(path)
    method = quantization_method(config)
    if method is None:
        return False
    from ..transformers import METHOD, LowBitConfig

    if method != METHOD:
        raise ValueError(f"{file} has weights quantized by the method {method!r}; expected {METHOD!r} or none")
    try:
        LowBitConfig(**config["quantization_config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return True


def load_model(
    path: str | os.PathLike[str],
    quantization: LowBitConfig | None = None,
    *,
    kind: str = "text",
    progress: Callable[[int, int], None] | None = None,
) -> torch.nn.Module:
    """Loads a model in eval mode, with the dtypes of its files.

    Args:
        path: a directory with config.json and safetensors files, float or packed by :func:`lowbit.quantize_checkpoint`.
        quantization: how to quantize a float checkpoint while it is loaded; None: not at all.
        kind: "text", a causal language model; "images", an image-text model; or "speech", a speech-to-text model.
        progress: called as ``progress(tensors loaded, tensors)``.

    Raises:
        ImportError: transformers is not installed.
        OSError: a file is missing, or cannot be read.
        ValueError: an unknown architecture, a damaged file, tensors that are missing or have the wrong shape for
            config.json, or ``quantization`` for a packed checkpoint.
    """
    # Check first what needs no import of transformers, which takes seconds.
    from ..files.safetensors import files_of, read_files

    directory = Path(path)
    model_type = read_config(directory).get("model_type")
    tensors = read_files(*files_of(directory))
    if (directory / _GENERATION).exists():
        read_json(directory / _GENERATION)
    packed = is_packed(directory)
    transformers = import_module("transformers")
    from ..hf.building import check_fits
    from ..hf.from_pretrained import counting, meta_model
    from ..hf.mtp_layers import prefix_of
    from ..machine.memory import read_in_huge_pages

    check, auto = _KINDS[kind]
    check(model_type, directory / CONFIG)
    if kind == "speech":
        auto = _HEADS.get(str(model_type).rpartition("_")[2], auto)
    if packed and quantization is not None:
        raise ValueError(
            f"{directory} is packed already; to quantize it differently, start from the float checkpoint, or from "
            "the result of lowbit dequantize"
        )
    # None must not be passed, because it would mean float weights.
    arguments = {} if quantization is None else {"quantization_config": quantization}
    with counting(progress), interpreting(f"{directory} does not load"):
        check_fits(meta_model(directory, len(tensors), causal="Causal" in auto), tensors, directory)
        model, loading = getattr(transformers, auto).from_pretrained(
            directory,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,  # reported by _check_loaded
            ignore_mismatched_sizes=True,
            **arguments,
        )
    _check_loaded(directory, model, loading, prefix_of(model, tensors))
    if packed:
        read_in_huge_pages(directory.glob("*.safetensors"))
    return model.eval()


load_speech_model = partial(load_model, kind="speech")
load_image_model = partial(load_model, kind="images")


def load_speech_processor(path: str | os.PathLike[str]) -> Any:
    """Loads the processor of a Whisper, Moonshine or Parakeet model: its tokenizer and feature extractor.

    Raises:
        ImportError: transformers is not installed.
        OSError, ValueError: files are missing or damaged.
    """
    transformers = import_module("transformers")
    check_tokenizer(Path(path))
    options = {"local_files_only": True, "trust_remote_code": False}
    with interpreting(f"the processor in {path} does not load"):
        if read_config(Path(path)).get("model_type") == "whisper":
            return transformers.WhisperProcessor.from_pretrained(path, **options)
        parts = {"feature_extractor": transformers.AutoFeatureExtractor, "tokenizer": transformers.AutoTokenizer}
        return SimpleNamespace(**{name: auto.from_pretrained(path, **options) for name, auto in parts.items()})


def load_image_processor(path: str | os.PathLike[str]) -> Any:
    """Loads the processor of an image-text model: its tokenizer and image processor.

    Raises:
        ImportError: transformers, Pillow or torchvision is not installed.
        OSError, ValueError: files are missing or damaged.
    """
    transformers = import_module("transformers")
    from ..hf.from_pretrained import counting
    from ..hf.processors import without_videos

    try:
        import_module("PIL.Image")
    except ImportError as error:
        raise ImportError("images are read by Pillow, which is not installed: pip install pillow") from error
    tokenizer = load_tokenizer(path)  # raises clearer errors
    with counting(None), interpreting(f"the processor in {path} does not load"):
        try:
            processor = transformers.AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            if "torchvision" not in str(error).lower():
                raise
            processor = without_videos(path, tokenizer)
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"{path} has a {type(processor).__name__} without an image processor; expected preprocessor_config.json"
        )
    return processor


def _check_causal(model_type: Any, file: Path) -> None:
    from ..hf.from_pretrained import causal_model_types

    if not isinstance(model_type, str) or model_type not in causal_model_types():
        raise ValueError(
            f"{file} has model_type {model_type!r}, which transformers {import_module('transformers').__version__} "
            "does not know as a causal language model; for a new architecture install a newer transformers"
        )


def check_image_type(model_type: Any, file: Path) -> None:
    """Raises ValueError unless ``model_type``, from ``file``, is that of an image-text model."""
    from ..hf.from_pretrained import image_model_types

    if not isinstance(model_type, str) or model_type not in image_model_types():
        raise ValueError(f"{file} has model_type {model_type!r}, which takes no images; expected a model of images and text")


def _check_speech(model_type: Any, file: Path) -> None:
    if model_type not in SPEECH_TYPES:
        raise ValueError(f"{file} has model_type {model_type!r}; expected {' or '.join(map(repr, SPEECH_TYPES))}")


# The end of the model_type of a speech model -> its class
_HEADS = {head.lower(): f"AutoModelFor{head}" for head in ("CTC", "RNNT", "TDT")}
_KINDS: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "text": (_check_causal, "AutoModelForCausalLM"),
    "images": (check_image_type, "AutoModelForImageTextToText"),
    "speech": (_check_speech, "AutoModelForSpeechSeq2Seq"),
}


def _check_loaded(directory: Path, model: torch.nn.Module, loading: dict[str, Any], head: str | None) -> None:
    """Raises ValueError for missing and mismatched tensors, and warns of unexpected ones.

    Args:
        loading: the loading info of transformers' from_pretrained().
        head: from :func:`lowbit.hf.mtp_layers.prefix_of`.
    """
    wrong = [
        (f"{name} has shape {list(shape)}; expected {list(expected)}") for name, shape, expected in loading["mismatched_keys"]
    ] + [f"{name} is missing" for name in loading["missing_keys"]]
    if wrong:
        more = f" ({len(wrong) - 1} more such tensors)" if len(wrong) > 1 else ""
        raise ValueError(f"{directory}: {wrong[0]}, as config.json says{more}; the files do not belong together")
    # A multi-token prediction head is loaded by lowbit.llm.Mtp.
    unexpected = sorted(name for name in loading["unexpected_keys"] if head is None or not name.startswith(head))
    if unexpected:
        more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        warnings.warn(
            f"{directory} has tensors that {type(model).__name__} has no place for, as {CONFIG} describes it: "
            f"{unexpected[0]}{more}; they are left out",
            stacklevel=4,  # the caller of load_model()
        )


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Loads the fast tokenizer of a checkpoint.

    Args:
        path: a directory with tokenizer.json.

    Raises:
        ImportError: transformers is not installed.
        OSError, ValueError: there is no tokenizer, or it is not a fast one.
    """
    transformers = import_module("transformers")
    from ..hf.from_pretrained import counting

    directory = Path(path)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory; expected one with tokenizer.json")
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise FileNotFoundError(f"{directory} has no tokenizer.json; copy the files of its tokenizer there")
    check_tokenizer(directory)
    with counting(None), interpreting(f"the tokenizer in {directory} does not load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{directory} has a {type(tokenizer).__name__}, written in Python; expected one with a tokenizer.json")
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(f"the tokenizer in {directory} has model_max_length {longest!r}; expected a number")
    return tokenizer


def stop_tokens(model: torch.nn.Module, tokenizer: Any = None) -> list[int]:
    """The stop tokens of generation_config.json; if it has none, those of config.json, then the tokenizer's."""
    configs = getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer
    ids = next((ids for ids in (getattr(config, "eos_token_id", None) for config in configs) if ids is not None), None)
    ids = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"the eos_token_id of the model is {ids}; expected token ids, as in {_GENERATION}")
    vocabulary = model.config.get_text_config().vocab_size
    if beyond := [token for token in ids if token >= vocabulary]:
        warnings.warn(f"the eos_token_id of the model has {beyond}; its tokens are 0 to {vocabulary - 1}", stacklevel=2)
    return list(ids)


def check_tokens(model: torch.nn.Module, tokens: list[int], path: str | os.PathLike[str]) -> None:
    """Raises ValueError for tokens outside the model's vocabulary; ``path`` is that of their tokenizer."""
    vocabulary = model.config.get_text_config().vocab_size
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(
            f"the tokenizer in {path} gives the token {wrong}; expected 0 to {vocabulary - 1}, the model's "
            "vocabulary: it is the tokenizer of another model"
        )


class TextStream:
    """Decodes tokens to text one by one; a character of several tokens is emitted with its last token."""

    def __init__(self, tokenizer: Any, prompt: list[int]):
        """
        Args:
            tokenizer: a fast tokenizer.
            prompt: ids of the preceding text, because some tokenizers drop the space before the first word of a text.
        """
        tables = getattr(tokenizer, "tables", None)
        if tables is not None:  # of a PlainTokenizer
            self._push: Callable[[int], str | None] = _C.TokenStream(tables, prompt).push
        else:
            from tokenizers.decoders import DecodeStream

            stream = DecodeStream(ids=prompt, skip_special_tokens=True)
            self._push = partial(stream.step, tokenizer.backend_tokenizer)

    def push(self, token: int) -> str:
        """The text that a token completes; empty if a character is incomplete."""
        return self._push(token) or ""
