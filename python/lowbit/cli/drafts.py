"""Draft models for speculative decoding: by torch, and by the plans beside their weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.plan_facts import PLAN, NoPlan, are_allowed
from .models import imported, load, positions
from .output import Output
from .plans import keep_plan, open_model

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..llm import Decoder, Mtp
    from ..llm.plan_decoder import PlanDecoder
    from ..llm.plan_files import PlannedModel

MTP = Path("mtp")  # value of --draft for the model's own multi-token prediction head


def load_draft(
    output: Output, path: Path, tokenizer: Any, model: str | Path, decoder: Any, config: LowBitConfig | None, cache: str | None
) -> Decoder | Mtp:
    """Loads the decoder of a draft model for ``model``; for the path ``mtp``, the model's multi-token prediction head.

    Args:
        tokenizer, decoder: those of ``model``.
        config: how ``model`` was quantized, if it is a float checkpoint.

    Raises:
        ValueError: the draft model has other tokens or supports only shorter texts; or the model has no such head.
    """
    from .. import llm
    from ..llm.loading import load_tokenizer, stop_tokens

    if path == MTP:
        return llm.Mtp(decoder, quantization=config)
    max_length = decoder.max_length
    with imported(output, path) as path:
        tokens = load_tokenizer(path)
        draft = load(output, path, None)
    check_draft(path, tokens, positions(draft), tokenizer, model, max_length)
    made = llm.Decoder(draft, max_length, cache)
    if are_allowed() and not (path / PLAN).exists():
        keep_plan(output, path, made, stop_tokens(draft, tokens), ())
    return made


def check_draft(path: Path, tokenizer: Any, positions: int, expected: Any, model: str | Path, max_length: int) -> None:
    """Checks that a draft model fits.

    Args:
        path: the directory of the draft model.
        tokenizer: its tokenizer.
        positions: its context length in tokens.
        expected: the tokenizer of ``model``.
        max_length: the longest text of the decoders.

    Raises:
        ValueError: the draft model has other tokens or supports only shorter texts.
    """
    ours, theirs = (each.backend_tokenizer.get_vocab(with_added_tokens=True) for each in (tokenizer, expected))
    if ours != theirs:
        other = min(token for token in ours.keys() | theirs if ours.get(token) != theirs.get(token))
        raise ValueError(
            f"{path} has other tokens than {model}, {other!r} for example, and cannot guess them; expected a "
            "smaller model of the same family"
        )
    if positions < max_length:
        raise ValueError(f"{path} supports {positions} tokens; expected {max_length} or more, as --max-length")


def open_with_draft(
    output: Output, path: Path, threads: int | None, cache: str | None, draft: Path | None
) -> tuple[PlannedModel, PlannedModel | None]:
    """Opens a model and its draft model, both with their plans.

    Raises:
        NoPlan: one has none, or the draft is the model's own head, which needs torch.
    """
    if draft == MTP:
        raise NoPlan("", stale=False)
    model = open_model(output, path, threads, cache)
    if draft is None:
        return model, None
    try:
        return model, open_model(output, draft, threads, model.cache)
    except NoPlan as reason:
        raise NoPlan(str(reason), stale=False) from None  # the model's own plan is as it should be


def draft_decoder(draft: PlannedModel, model: PlannedModel, max_length: int) -> PlanDecoder:
    """The decoder of a draft model; raises ValueError as :func:`check_draft`."""
    check_draft(draft.directory, draft.tokenizer, draft.plan.positions, model.tokenizer, model.directory, max_length)
    return draft.decoder(max_length)
