"""Shows that a decoder computes what its model does, or says why it does not.

A model may keep more of a text than keys and values (recurrent layers, short convolutions), or have attention that is not
transformers' own kind. Behind a decoder such a model forgets, and nothing would say so: it goes on writing, and what it
writes looks like text. So a few tokens go through the model as it came, and through the decoder whole and in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import nn
from ..hf.decoding import Asked, Unsupported, tells_positions

if TYPE_CHECKING:
    from .decoder import Decoder

TOKENS = 10
PIECES = (3, 1, 4, 2)
# Differences are measured in parts of what the text before does to the logits of a token. A decoder that forgets is
# wrong by 1 or so. One that is right is wrong by rounding only, which in float32 is 1e-5 at the most. Quantized layers make
# more of it: float32 sums in another order move a few activations to the next of 255 values, and the layers behind
# carry that on. The two ways of attention add up in different orders; a text whole and in pieces goes through the same
# operators, and lowbit's give the same bits for any cut. docs/models.md has what was measured of models that are right:
# at most 4e-6 in floats and 0.003 at 4 bits. Of those that are wrong the least is 0.19 in pieces (recurrent_gemma, of
# whose layers the count tells as well) and 0.4 where nothing but these numbers tells (falcon_h1), and 0.5 whole.
EXACT = 1e-3  # in float32 alone
OWN = 0.3  # beside the model's own attention: 0.04 was seen in models of 16 and 28 layers with random weights
PIECES_MOST = 0.1  # in pieces: 0.02 was seen, in bfloat16
# Where the text before does nothing to the logits, they must be the same within the rounding of float32.
_ROUNDING = 1e-6


def sample_text(config: Any, count: int) -> Tensor:
    """[1, count]: tokens from all over the vocabulary, but for those that mean something to the model."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")):
            special.update(value if isinstance(value, (list, tuple)) else [value])
    size = config.vocab_size
    usual = [token for i in range(4 * count) if (token := (7 + i * max(1, size // count - 3)) % size) not in special]
    return torch.tensor([(usual or [0] * count)[:count]])


class Rounding:
    """Tells what rounding does to a model's logits from what a step does that forgets the text."""

    def __init__(self, model: torch.nn.Module, whole: Tensor, alone: Tensor):
        """
        Args:
            whole: [1, s, vocabulary], the logits of a text.
            alone: likewise, those of each token as if nothing were before it.

        Raises:
            Unsupported: the logits are not numbers.
        """
        if whole.isnan().any():
            raise Unsupported("its logits are NaN")
        rounds = any(isinstance(module, nn.Linear | nn.LinearExperts) for module in model.modules())
        self.exact = model.dtype == torch.float32 and not rounds
        self.effect = _size(alone, whole)

    def differences(self, logits: Tensor, expected: Tensor) -> Tensor:
        """[s] from [1, s, vocabulary]: 0 for the same; 1 for logits that differ as much as if nothing came before a token."""
        return _parts(logits, expected, self.effect)

    def difference(self, logits: Tensor, expected: Tensor) -> float:
        """The median over all tokens but the first: rounding may send one of them to another expert."""
        return float(self.differences(logits, expected)[1:].median())


class Reference(Rounding):
    """What a model makes of a few tokens with its own attention, before a decoder has it."""

    def __init__(self, model: torch.nn.Module, max_length: int):
        """Raises:
        Unsupported: the model's logits are not numbers.
        Exception: whatever the model raises.
        """
        told = tells_positions(model)
        config = model.config.get_text_config()
        self.tokens = sample_text(config, min(TOKENS, max_length))
        count = self.tokens.shape[1]
        positions = torch.arange(count)
        self.whole = _own(model, self.tokens)
        # Each token as if nothing were before it: what a decoder that forgets would make of it.
        alone = {"position_ids": positions[:, None]} if told else {}
        super().__init__(model, self.whole, _own(model, self.tokens.T, **alone).transpose(0, 1))
        # The same tokens at the end of the longest text: tables of positions must reach there.
        self.far = positions + (max_length - count)
        self.whole_far: Tensor | None = None
        if told is not None:
            self.whole_far = _own(model, self.tokens, position_ids=self.far[None]) if told else self.whole


def sees_what_follows(model: torch.nn.Module) -> str | None:
    """Says in half a sentence that the logits behind a token change with the tokens that follow it; None where they do not."""
    config = model.config.get_text_config()
    tokens = sample_text(config, TOKENS)
    whole = _own(model, tokens)
    rounding = Rounding(model, whole, _own(model, tokens.T).transpose(0, 1))
    behind = [_own(model, tokens[:, :end])[:, -1:] for end in range(1, TOKENS + 1)]
    return seen(rounding, torch.cat(behind, dim=1), whole)


def seen(rounding: Rounding, behind: Tensor, whole: Tensor) -> str | None:
    """The same from logits [1, s, vocabulary] behind the last token of each beginning of a text, and of the whole text."""
    most = EXACT if rounding.exact else OWN
    found = rounding.difference(behind, whole)
    if found <= most:
        return None
    return (
        f"its logits behind a token change with the tokens that follow ({found:.2g} of what the text before does to them; "
        f"rounding is below {most:g})"
    )


def _own(model: torch.nn.Module, tokens: Tensor, **more: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=False, **more).logits


def _size(a: Tensor, b: Tensor) -> Tensor:
    """[1, s]: root of the mean square of the difference. Some models give a token minus infinity always."""
    a, b = a.double(), b.double()
    return torch.where(a == b, 0.0, a - b).square().mean(-1).sqrt()


class _Counted(list):
    """The caches of all layers; counts which ones are asked for."""

    def __init__(self, caches: Sequence):
        super().__init__(caches)
        self.asked: Counter[int] = Counter()

    def __getitem__(self, layer):
        self.asked[layer] += 1
        return super().__getitem__(layer)


def _parts(logits: Tensor, expected: Tensor, effect: Tensor) -> Tensor:
    if not logits.isfinite().equal(expected.isfinite()):
        return torch.full((expected.shape[1],), float("inf"))
    scale = torch.maximum(effect, _ROUNDING / EXACT * expected.float().std(-1))
    return (_size(logits, expected) / scale)[0]


def _all_used(used: set[int], decoder: Decoder) -> None:
    """Refuses layers that use no caches, unless the configuration says that they are no more than an MLP."""
    config = decoder.model.config.get_text_config()
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
    alone = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    if len(used | alone) < decoder.layers:
        raise Unsupported(f"{len(used)} of its {decoder.layers} layers use the decoder's caches")


@torch.inference_mode()
def ask(decoder: Decoder, reference: Reference) -> Asked:
    """What the attention of each layer asks for.

    Raises:
        Unsupported: a layer has no attention over caches.
        Exception: whatever the model raises.
    """
    asked, count = Asked(), reference.tokens.shape[1]
    decoder.run(reference.tokens, torch.arange(count), torch.tensor([0]), asked)
    _all_used({*asked.shapes, *asked.states} & {*range(decoder.layers)}, decoder)
    return asked


@torch.inference_mode()
def prove(decoder: Decoder, reference: Reference, exact: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Fails unless a decoder computes what its model does.

    Args:
        exact: caches of each layer in the model's dtype, long enough for the reference's tokens.

    Returns:
        What was measured, by name.

    Raises:
        Unsupported: says what was found.
        Exception: whatever the model raises.
    """
    tokens, count = reference.tokens, reference.tokens.shape[1]

    def run(text: Tensor, positions: Tensor, start: int) -> Tensor:
        caches = _Counted(exact)
        logits = decoder.run(text, positions, torch.tensor([start]), caches)
        if any(caches.asked[layer] != decoder.uses(layer) for layer in {*caches.asked, *range(decoder.layers)}):
            times = caches.asked.total()
            raise Unsupported(f"its {decoder.layers} layers use the decoder's caches {times} times a call")
        return logits

    def pieces(sizes: Sequence[int]) -> Tensor:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return torch.cat(
            [run(tokens[:, at : at + size], torch.arange(at, at + size), at) for at, size in zip(begins, sizes)], dim=1
        )

    def near(name: str, logits: Tensor, expected: Tensor, most: float, found: str) -> None:
        measured[name] = reference.difference(logits, expected)
        most = EXACT if reference.exact else most
        if not measured[name] <= most:
            raise Unsupported(
                f"{found} ({measured[name]:.2g} of what the text before does to them; rounding is below {most:g})"
            )

    measured: dict[str, float] = {}
    whole = run(tokens, torch.arange(count), 0)
    near("whole", whole, reference.whole, OWN, "its logits are others than with its own attention")
    sizes = list(PIECES) if count == sum(PIECES) else [1, count - 1]
    forgets = "its logits are others when a text comes in pieces"
    near("one by one", pieces([1] * count), whole, PIECES_MOST, forgets)
    near("pieces", pieces(sizes), whole, PIECES_MOST, forgets)
    if reference.whole_far is not None:
        far = run(tokens, reference.far, 0)
        near("far", far, reference.whole_far, OWN, "its logits at far positions are others than its own")
    measured["texts"] = _beside_another(decoder, reference, whole)
    return measured


def _beside_another(decoder: Decoder, reference: Reference, whole: Tensor) -> float:
    """How far a text's logits move when another one, which it must not see, is in the same call. Nothing but
    :func:`check_texts` minds, so a model that fails here is a decoder all the same."""
    tokens, count = reference.tokens, reference.tokens.shape[1]
    shorter = max(1, count - 3)
    try:
        logits = torch.cat(
            decoder.run_texts(
                [(decoder.new_caches(16, decoder.model.dtype), tokens[0, :size].tolist()) for size in (shorter, count)], True
            )
        )
    except Exception:
        return float("inf")
    expected = torch.cat([whole[0, :shorter], whole[0]])
    scale = torch.cat([reference.effect[:, :shorter], reference.effect], dim=1)
    return float(_parts(logits[None], expected[None], scale).median())


def check_texts(decoder: Decoder) -> None:
    """Refuses several texts in a call where they would see each other.

    Raises:
        Unsupported: says what was found.
    """
    found = decoder.measured["texts"]
    most = EXACT if decoder.exact else PIECES_MOST
    if not found <= most:
        raise Unsupported(
            f"the logits of {type(decoder.model).__name__} are others when a call has several texts ({found:.2g} of what the "
            f"text before does to them; rounding is below {most:g}); expected one text at a time"
        )


@torch.inference_mode()
def measure_caches(decoder: Decoder, reference: Reference) -> float:
    """How far caches in a smaller type move the logits, in the same parts as in :func:`prove`.

    Raises:
        Unsupported: they make numbers of something else: keys or values are beyond what the type holds.
    """
    count = reference.tokens.shape[1]
    logits = decoder.run(reference.tokens, torch.arange(count), torch.tensor([0]), decoder.caches())
    difference = reference.difference(logits, reference.whole)
    if difference == float("inf"):
        kind = str(decoder.cache_dtype).removeprefix("torch.")
        raise Unsupported(f"its keys or values do not fit into a cache of {kind}: the logits are not numbers")
    return difference
