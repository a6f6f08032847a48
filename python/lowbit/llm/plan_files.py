"""Plans beside the weights of a checkpoint: what the program needs in addition, so that it runs them without torch.

A plan has a description in its facts: settings of the model's files as transformers reads them, and the states of those files.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import _C, __version__
from ..files.plan_facts import PLAN as PLAN
from ..files.plan_facts import NoPlan as NoPlan
from ..files.plan_facts import described, facts_of, states
from .plain_tokenizer import PlainTokenizer, tables_of
from .plan_decoder import PlanDecoder
from .sampling import check_max_length

if TYPE_CHECKING:
    from .decoder import Decoder

_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "tokenizer.model",
)  # fmt: skip
_NAMES = ("cache", "caches", "stop", "special", "settings")  # of a description


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

    def decoder(self, max_length: int, *, windows: bool = True) -> PlanDecoder:
        """Its decoder for texts of up to ``max_length`` tokens; raises ValueError if the model's texts are shorter."""
        check_max_length(max_length, self.plan.positions, 16)
        return PlanDecoder(self.plan, max_length, self.cache, self.prefix, windows=windows)


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
    files, content, refusal = states(directory, _FILES), dict[str, Any](), None
    config = getattr(model, "generation_config", None)
    try:
        if sees_only(directory):
            raise ValueError("it is a model of images")
        if decoder.plan is not None and not decoder.plan.gives_kept_rows:
            raise ValueError("it computes the logits of all tokens")
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
    return facts_of(content | {"lowbit": __version__, "files": files, "refusal": refusal})


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
        plan = _C.PlanModel(os.fsencode(file), threads)
    except (OSError, ValueError) as error:
        raise NoPlan(f"{file} is not used: {error}") from error
    content = described(directory, plan.about, __version__, _FILES)
    try:
        default, caches, stop, special, settings = (content[name] for name in _NAMES)
        prefix = bytes.fromhex(content["prefix"]) if "prefix" in content else str(content["no_prefix"])
        generation = SimpleNamespace(**settings)
    except (KeyError, TypeError, ValueError):  # written by an earlier commit
        raise NoPlan("") from None
    if (cache or default) not in caches:
        raise NoPlan("", caches=tuple(caches))
    config = SimpleNamespace(vocab_size=plan.vocabulary)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, generation_config=generation)
    tokenizer = PlainTokenizer(directory, special, tables_of(directory), checked=True)
    return PlannedModel(directory, plan, model, tokenizer, cache or default, stop, prefix)
