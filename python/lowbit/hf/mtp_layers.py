"""Loads the multi-token prediction (MTP) head of a checkpoint: an extra decoder layer that drafts the token after the next.

transformers ignores its tensors when it loads a model. There are two layouts, which compute the same:

    h = block(projection([norm(embedding of token i + 1), norm(hidden state i)])), then a norm

where hidden state i is the model's input to its output head after token i. The norm's result goes to the same output head, for
token i + 2, and is the hidden state for the next draft token. The block is a layer of the model's class, with full attention.

Qwen's layout stores the head as ``mtp.*``. DeepSeek's, also used by GLM, stores it as a layer after the last one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..files.config_json import read_config
from ..files.safetensors import Stored, float_name
from ..files.untrusted import interpreting
from .from_pretrained import counting

if TYPE_CHECKING:
    from .config import LowBitConfig

_BESIDE = "mtp."
_BEHIND = re.compile(r"^((?:\w+\.)*layers\.(\d+)\.)eh_proj\.\w+$")
# Names in both layouts: norm of the embedding, norm of the hidden state, projection, block ("": the head itself), final norm.
_PARTS_BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm")
_PARTS_BEHIND = ("enorm", "hnorm", "eh_proj", "", "shared_head.norm")
# Tensors of DeepSeek's layout that duplicate the model's.
_SHARED = {"embed_tokens.weight": "get_input_embeddings", "shared_head.head.weight": "get_output_embeddings"}
_FULL = "full_attention"


def _layers(model: PreTrainedModel) -> int:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return count if isinstance(count, int) else 0


def prefix_of(model: PreTrainedModel, names: Iterable[str]) -> str | None:
    """The prefix of the head's tensors among the float or packed tensors of a model's files; None: no head."""
    for name in names:
        if name.startswith(f"{_BESIDE}pre_fc_norm_hidden."):
            return _BESIDE
        # The configuration is read only here, because that of some models has several text configs.
        if (match := _BEHIND.match(name)) and int(match[2]) == _layers(model):
            return match[1]
    return None


def shared_copies(model: PreTrainedModel, names: Collection[str]) -> dict[str, str]:
    """Tensor of the head in a model's files -> the model's weight that it should duplicate."""
    prefix, found = prefix_of(model, names), {}
    if prefix is None:
        return {}
    modules = {module: name for name, module in model.named_modules()}
    for end, getter in _SHARED.items():
        owner = modules.get(getattr(model, getter)())
        if owner is not None and f"{prefix}{end}" in names:
            found[f"{prefix}{end}"] = f"{owner}.weight"
    return found


def _block_config(config: Any, layers: int) -> Any:
    """The text configuration of a model with an additional layer."""
    longer = deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and name.endswith("_types"):
            longer.__dict__[name] = [*value, _FULL if _FULL in value else value[-1]]
    longer.__dict__["num_hidden_layers"] = layers + 1
    return longer


@dataclass(frozen=True)
class _Kinds:
    """The module classes of a head, taken from its model."""

    block: Callable[[Any, int], torch.nn.Module]
    norm: Callable[..., torch.nn.Module]
    layers: int  # of the model

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Kinds:
        decoder = model.get_decoder()
        return cls(type(decoder.layers[-1]), type(decoder.norm), _layers(model))


def _build(config: Any, kinds: _Kinds, prefix: str) -> torch.nn.Module:
    """The modules of a head, by their names in the files."""
    size = config.hidden_size

    def norm() -> torch.nn.Module:
        return kinds.norm(size, eps=config.rms_norm_eps)

    def projection() -> torch.nn.Module:
        return torch.nn.Linear(2 * size, size, bias=False)

    block = kinds.block(config, kinds.layers)
    if prefix != _BESIDE:
        block.enorm, block.hnorm, block.eh_proj = norm(), norm(), projection()
        block.shared_head = torch.nn.Module()
        block.shared_head.norm = norm()
        return block
    head = torch.nn.Module()
    head.fc, head.norm, head.layers = projection(), norm(), torch.nn.ModuleList([block])
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = norm(), norm()
    return head


def _put(root: torch.nn.Module, prefix: str, head: torch.nn.Module) -> None:
    *parents, leaf = prefix.removesuffix(".").split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, torch.nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, head)


def attach(model: PreTrainedModel, names: Collection[str]) -> None:
    """Adds the head in the files to a model on the meta device, under the names in the files.

    The model's ``forward`` does not use it. Heads that cannot be built from the model's layer classes are not attached.
    """
    prefix = prefix_of(model, names)
    if prefix is None or not hasattr(model.get_decoder(), "layers"):
        return
    with torch.device("meta"):
        kinds = _Kinds.of(model)
        _put(model, prefix, _build(_block_config(model.config.get_text_config(), kinds.layers), kinds, prefix))


class _Head:
    """A mixin that :func:`load_head` adds to a class of transformers, so that its loader fills the modules of a head."""

    prefix: str

    def forward(
        self, hidden: Tensor, embedding: Tensor, position_ids: Tensor, rotary: Any, caches: Any, start: Tensor
    ) -> Tensor:
        """Computes the head.

        Args:
            hidden: [1, s, size], hidden states of the model, or results of the head.
            embedding: [1, s, size], embeddings of the tokens after them.
            position_ids: [1, s] int64.
            rotary: the model's rotary embedding.
            caches: the caches of the block, by its layer index.
            start: [1] int64, number of positions in the caches.

        Returns:
            [1, s, size], the input of the model's output head.
        """
        embedding_norm, hidden_norm, projection, block, norm = self.parts
        inputs = projection(torch.cat([embedding_norm(embedding), hidden_norm(hidden)], dim=-1))
        result = block(
            inputs, position_embeddings=rotary(inputs, position_ids), position_ids=position_ids, caches=caches, start=start
        )
        return cast(Tensor, norm(result[0] if isinstance(result, tuple) else result))

    @property
    def parts(self) -> list[torch.nn.Module]:
        head = cast(torch.nn.Module, self).get_submodule(self.prefix.removesuffix("."))
        return [head.get_submodule(name) for name in (_PARTS_BESIDE if self.prefix == _BESIDE else _PARTS_BEHIND)]


def load_head(
    model: PreTrainedModel, directory: Path, tensors: Mapping[str, Stored], quantization: LowBitConfig | None = None
) -> PreTrainedModel | None:
    """Loads the MTP head of a model, float or packed as in its files; None if they have none.

    Args:
        directory: the model's checkpoint.
        tensors: the tensors of its files.
        quantization: how to quantize a float checkpoint.

    Raises:
        ValueError: tensors of the head are missing, or have other shapes.
    """
    names = {float_name(name, stored.shape) for name, stored in tensors.items()}
    prefix = prefix_of(model, names)
    if prefix is None:
        return None
    kinds, kind = _Kinds.of(model), type(model)
    base: Any = next(
        each for each in reversed(kind.__mro__) if issubclass(each, PreTrainedModel) and each is not PreTrainedModel
    )
    config = _block_config(model.config.get_text_config(), kinds.layers)
    config._attn_implementation_internal = "eager"
    # Use the files' quantization_config: a float model quantized during loading has one as well.
    config.__dict__.pop("quantization_config", None)
    if (stored := read_config(directory).get("quantization_config")) is not None:
        config.quantization_config = stored

    def begin(self: Any, config: Any, *_: Any, **__: Any) -> None:
        base.__init__(self, config)
        _put(self, prefix, _build(config, kinds, prefix))
        self.prefix = prefix
        self.post_init()

    members = {"__init__": begin, "__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": [".*"]}
    holder: Any = type(f"{kind.__name__}Mtp", (_Head, base), members)
    arguments: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    with counting(None), interpreting(f"the multi-token prediction head of {directory} does not load"):
        head, loading = holder.from_pretrained(
            directory, config=config, dtype=model.dtype, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **arguments,
        )  # fmt: skip
    wrong = [f"{name} has shape {list(shape)}; expected {list(own)}" for name, shape, own in loading["mismatched_keys"]]
    wrong += [f"{name} is missing" for name in sorted(loading["missing_keys"])]
    if wrong:
        more = f" ({len(wrong) - 1} more such tensors)" if len(wrong) > 1 else ""
        raise ValueError(f"{directory}: the multi-token prediction head's {wrong[0]}{more}; the files do not belong together")
    return cast(PreTrainedModel, head.eval())
