"""Plans beside the weights of a checkpoint: what the program needs in addition, so that it runs them without torch.

A plan has a description in its facts: settings of the model's files as transformers reads them, and the states of those files.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import _C, __version__
from .plain_tokenizer import PlainTokenizer
from .plan_decoder import PlanDecoder
from .sampling import check_max_length

if TYPE_CHECKING:
    from .decoder import Decoder

PLAN = "lowbit.plan"  # beside the weights
_FACT = "program"
_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "tokenizer.model",
)  # fmt: skip
_PER_NUMBER = 7  # bytes of the description in a fact of 64 bits


class NoPlan(Exception):
    """A checkpoint does not run by a plan; the message, which may be empty, says why."""

    def __init__(self, reason: str, stale: bool = True, caches: tuple[str, ...] = ()):
        """
        Args:
            stale: a new plan would help.
            caches: the cache types for which the plan was proven.
        """
        super().__init__(reason)
        self.stale, self.caches = stale, caches


@dataclass(frozen=True)
class PlannedModel:
    """A checkpoint that runs by its plan."""

    directory: Path
    plan: _C.PlanModel
    model: Any  # stands for transformers' model where only its settings are asked for
    tokenizer: PlainTokenizer
    cache: str  # the type of the KV cache
    stop: list[int]
    prefix: bytes | str  # what identifies the model in a prefix cache, or why it supports none

    def decoder(self, max_length: int) -> PlanDecoder:
        """Its decoder for texts of up to ``max_length`` tokens; raises ValueError if the model's texts are shorter."""
        check_max_length(max_length, self.plan.positions, 16)
        return PlanDecoder(self.plan, max_length, self.cache, self.prefix)


def describe(decoder: Decoder, directory: Path, caches: tuple[str, ...] = ()) -> dict[str, list[int]]:
    """The facts that describe the checkpoint in ``directory``, whose model the decoder has.

    Args:
        caches: further cache types for which the decoder was proven.

    Raises:
        OSError: a file cannot be read.
    """
    from ..hf import decoding
    from .caches import name_of
    from .chat import SETTINGS
    from .images import sees_only
    from .loading import load_tokenizer, stop_tokens
    from .plain_tokenizer import difference

    model: Any = decoder.model
    states, content, refusal = _states(directory), dict[str, Any](), None
    config = getattr(model, "generation_config", None)
    try:
        if sees_only(directory):
            raise ValueError("it is a model of images")
        try:
            decoding.check_config(model.config.get_text_config(), 1 << 62)
        except decoding.Unsupported as error:
            raise ValueError("what it computes depends on the length of the text") from error
        tokenizer = load_tokenizer(directory)
        special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
        settings = {name: value for name in SETTINGS if (value := getattr(config, name, None)) is not None}
        content = {
            "cache": name_of(model.dtype), "caches": sorted({*caches, decoder.cache_type}),
            "stop": stop_tokens(model, tokenizer), "special": special, "settings": settings,
        }  # fmt: skip
        try:
            content["prefix"] = decoder.prefix_key().hex()
        except ValueError as error:
            content["no_prefix"] = str(error)
        refusal = difference(tokenizer, directory, special)
        if json.loads(json.dumps(content)) != content:
            raise ValueError("its settings are not those of JSON")
    except (ImportError, OSError, TypeError, ValueError) as error:
        refusal = str(error)
    if refusal is not None:
        content = {}
    text = json.dumps(content | {"lowbit": __version__, "files": states, "refusal": refusal}).encode()
    parts = [text[at : at + _PER_NUMBER] for at in range(0, len(text), _PER_NUMBER)]
    return {_FACT: [len(text), *(int.from_bytes(part, "little") for part in parts)]}


def _states(directory: Path) -> dict[str, list[int] | None]:
    """The size and checksum of each file of settings; None: there is no such file."""
    contents = ((name, directory / name) for name in _FILES)
    read = ((name, path.read_bytes() if path.exists() else None) for name, path in contents)
    return {name: None if content is None else [len(content), zlib.crc32(content)] for name, content in read}


def _description(facts: dict[str, list[int]]) -> dict[str, Any]:
    size, *numbers = facts[_FACT]
    text = b"".join(number.to_bytes(_PER_NUMBER, "little") for number in numbers)[:size]
    content = json.loads(text)
    if content["lowbit"] != __version__:  # another version may compute a plan in another way
        raise KeyError("lowbit")
    return dict(content)


def open_planned(directory: Path, threads: int, cache: str | None) -> PlannedModel:
    """Opens a checkpoint with its plan.

    Args:
        cache: the type of the KV cache; None: the model's.

    Raises:
        NoPlan: there is no plan, or it does not fit the files beside it.
    """
    file = directory / PLAN
    if not file.exists():
        raise NoPlan("")
    try:
        plan = _C.PlanModel(str(file), threads)
    except (OSError, ValueError) as error:
        raise NoPlan(f"{file} is not used: {error}") from error
    try:
        content = _description(plan.about)
    except (KeyError, ValueError, OverflowError):
        raise NoPlan("") from None  # written without a description, or by another version
    if content["files"] != _states(directory):
        raise NoPlan(f"{file} is not used: the files of settings beside it have changed")
    if content["refusal"] is not None:
        raise NoPlan(f"{file} is not used: {content['refusal']}", stale=False)
    if (cache or content["cache"]) not in content["caches"]:
        raise NoPlan("", caches=tuple(content["caches"]))
    config = SimpleNamespace(vocab_size=plan.vocabulary)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(**content["settings"]))
    tokenizer = PlainTokenizer(directory, content["special"])
    prefix = bytes.fromhex(content["prefix"]) if "prefix" in content else str(content["no_prefix"])
    return PlannedModel(directory, plan, model, tokenizer, cache or content["cache"], content["stop"], prefix)
