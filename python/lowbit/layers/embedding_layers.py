"""Embedding tables of transformers that scale or normalize the rows that they look up.

Classes are known by name. A table of any other class stays float: it may use its weight in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NORM = "embed_norm"  # what a table calls the norm of its rows
_SCALE = "embed_scale"  # what a table calls the number that it multiplies its rows by
_NUMBER = "scalar_embed_scale"  # the same as a number of Python, where embed_scale is a buffer
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Files in transformers.models -> the beginning of a class's name.
_SCALED = {  # rows times a number of Python
    "bart": "Bart", "bigbird_pegasus": "BigBirdPegasus", "biogpt": "BioGpt", "blenderbot": "Blenderbot", "m2m_100": "M2M100",
    "mbart": "MBart", "nllb_moe": "NllbMoe", "pegasus_x": "PegasusX", "plbart": "PLBart", "pp_formulanet": "PPFormulaNet",
    "seamless_m4t": "SeamlessM4T", "seamless_m4t_v2": "SeamlessM4Tv2", "trocr": "TrOCR", "xglm": "XGLM",
}  # fmt: skip
_ROUNDED = {  # rows times a buffer, which is rounded to the dtype of the table
    "diffusion_gemma": "DiffusionGemmaText", "embedding_gemma2": "EmbeddingGemma2Text", "gemma": "GemmaText",
    "gemma2": "Gemma2Text", "gemma3": "Gemma3Text", "gemma3n": "Gemma3nText", "gemma4": "Gemma4Text",
    "gemma4_unified": "Gemma4UnifiedText", "minicpm3": "MiniCPM3", "vaultgemma": "VaultGemmaText",
}  # fmt: skip
_NORMED = {  # rows through a norm
    "inkling": "Inkling", "inkling2": "Inkling2", "muse_glimmer": "MuseGlimmerText", "muse_spark": "MuseSparkText",
}  # fmt: skip


def _full_names(classes: dict[str, str], end: str) -> set[str]:
    return {f"transformers.models.{file}.modeling_{file}.{begin}{end}" for file, begin in classes.items()}


_SCALED_CLASSES = _full_names(_SCALED, "ScaledWordEmbedding")
_ROUNDED_CLASSES = _full_names(_ROUNDED, "ScaledWordEmbedding")
_NORMED_CLASSES = _full_names(_NORMED, "NormedEmbedding")


@dataclass(frozen=True)
class Scale:
    """A number that a table multiplies its rows by.

    Attributes:
        value: the number.
        rounded: whether it is rounded to the dtype of the rows first.
    """

    value: float
    rounded: bool = False
    _factors: dict[torch.dtype, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Numbers of Python, so that exported programs get no tensor for them.
        exact = torch.tensor(self.value, dtype=torch.float64, device="cpu")
        factors = {dtype: exact.to(dtype).item() if self.rounded else self.value for dtype in _DTYPES}
        object.__setattr__(self, "_factors", factors)

    def of(self, rows: Tensor) -> Tensor:
        return rows * self._factors[rows.dtype]


@dataclass(frozen=True)
class Table:
    """The step after a lookup: rows are multiplied by ``scale``, go through the table's norm (:data:`NORM`), or stay."""

    scale: Scale | None = None
    normed: bool = False

    def finish(self, rows: Tensor, layer: torch.nn.Module) -> Tensor:
        """The output of the table ``layer`` for these rows."""
        if self.scale is not None:
            return self.scale.of(rows)
        return getattr(layer, NORM)(rows) if self.normed else rows


def table_of(layer: object) -> Table | None:
    """What a float table does with its rows; None if the layer is no embedding table, or of an unknown class."""
    if type(layer) is torch.nn.Embedding:
        return Table()
    if not isinstance(layer, torch.nn.Embedding):
        return None
    known = getattr(layer, "_table", None)  # set by lowbit.qat
    if isinstance(known, Table):
        return known
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
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
    """Copies the norm or the scale of another table of the same class to a table; either may be packed."""
    if table.normed:
        setattr(layer, NORM, getattr(other, NORM))
    elif table.scale is not None:
        scale = getattr(layer, _SCALE, None)
        if scale is None or (isinstance(scale, Tensor) and scale.is_meta):
            setattr(layer, _SCALE, torch.tensor(table.scale.value, device="cpu"))
