"""Embedding tables of transformers that scale or normalize the rows they look up.

Classes are recognized by name. A table of any other subclass stays float, because it may use its weight differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .replacing import class_name, class_of

NORM = "embed_norm"  # attribute of a table: the norm of its rows
_SCALE = "embed_scale"  # attribute of a table: the scale of its rows, a number or a buffer
_NUMBER = "scalar_embed_scale"  # attribute of a table whose embed_scale is a buffer: the same scale as a Python number
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Module in transformers.models -> prefix of the class name.
_SCALED = {  # rows times a Python number
    "bart": "Bart", "bigbird_pegasus": "BigBirdPegasus", "biogpt": "BioGpt", "blenderbot": "Blenderbot", "m2m_100": "M2M100",
    "mbart": "MBart", "nllb_moe": "NllbMoe", "pegasus_x": "PegasusX", "plbart": "PLBart", "pp_formulanet": "PPFormulaNet",
    "seamless_m4t": "SeamlessM4T", "seamless_m4t_v2": "SeamlessM4Tv2", "trocr": "TrOCR", "xglm": "XGLM",
}  # fmt: skip
_ROUNDED = {  # rows times a buffer, which has the table's dtype
    "diffusion_gemma": "DiffusionGemmaText", "embedding_gemma2": "EmbeddingGemma2Text", "gemma": "GemmaText",
    "gemma2": "Gemma2Text", "gemma3": "Gemma3Text", "gemma3n": "Gemma3nText", "gemma4": "Gemma4Text",
    "gemma4_unified": "Gemma4UnifiedText", "minicpm3": "MiniCPM3", "vaultgemma": "VaultGemmaText",
}  # fmt: skip
_NORMED = {  # normalized rows
    "inkling": "Inkling", "inkling2": "Inkling2", "inkling2_loop": "Inkling2Loop", "muse_glimmer": "MuseGlimmerText",
    "muse_spark": "MuseSparkText",
}  # fmt: skip


def _full_names(classes: dict[str, str], end: str) -> set[str]:
    return {f"transformers.models.{file}.modeling_{file}.{begin}{end}" for file, begin in classes.items()}


_SCALED_CLASSES = _full_names(_SCALED, "ScaledWordEmbedding")
_ROUNDED_CLASSES = _full_names(_ROUNDED, "ScaledWordEmbedding")
_NORMED_CLASSES = _full_names(_NORMED, "NormedEmbedding")


@dataclass(frozen=True)
class Scale:
    """The factor of a table's rows.

    Attributes:
        value: the factor.
        rounded: whether it is rounded to the dtype of the rows first.
    """

    value: float
    rounded: bool = False
    _factors: dict[torch.dtype, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Python numbers, so that exported programs contain no tensors for them.
        exact = torch.tensor(self.value, dtype=torch.float64, device="cpu")
        factors = {dtype: exact.to(dtype).item() if self.rounded else self.value for dtype in _DTYPES}
        object.__setattr__(self, "_factors", factors)

    def of(self, rows: Tensor) -> Tensor:
        return rows * self._factors[rows.dtype]


@dataclass(frozen=True)
class Table:
    """What follows a lookup: rows are multiplied by ``scale``, normalized by the table's :data:`NORM`, or left unchanged."""

    scale: Scale | None = None
    normed: bool = False

    def finish(self, rows: Tensor, layer: torch.nn.Module) -> Tensor:
        """The output of the table ``layer`` for looked-up rows."""
        if self.scale is not None:
            return self.scale.of(rows)
        return getattr(layer, NORM)(rows) if self.normed else rows


def table_of(layer: object) -> Table | None:
    """What follows a lookup in a float table; None if the layer is not an embedding table of a known class."""
    if class_of(layer) is torch.nn.Embedding:
        return Table()
    if not isinstance(layer, torch.nn.Embedding):
        return None
    known = getattr(layer, "_table", None)  # set by lowbit.qat
    if isinstance(known, Table):
        return known
    name = class_name(layer)
    if name in _NORMED_CLASSES:
        return Table(normed=True)
    if name in _SCALED_CLASSES | _ROUNDED_CLASSES:
        return Table(Scale(_number(layer), name in _ROUNDED_CLASSES))
    return None


def _number(layer: torch.nn.Embedding) -> float:
    scale = getattr(layer, _SCALE)
    if isinstance(scale, Tensor) and scale.is_meta:
        return float(getattr(layer, _NUMBER))
    return float(scale)


def give_state(layer: torch.nn.Module, table: Table, other: torch.nn.Module) -> None:
    """Copies the norm or scale of the table ``other`` to ``layer``, of the same class; either may be packed."""
    if table.normed:
        setattr(layer, NORM, getattr(other, NORM))
    elif table.scale is not None:
        scale = getattr(layer, _SCALE, None)
        if scale is None or (isinstance(scale, Tensor) and scale.is_meta):
            setattr(layer, _SCALE, torch.tensor(table.scale.value, device="cpu"))
