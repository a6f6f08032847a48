"""Decoders as machine code: with torch.compile, with AOTInductor in this process, and as .pt2 packages."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..export import _replacing
from .decoder import Decoder

# Loops over fewer values than this for each thread run on one thread. At one token there are a few thousand values,
# and a parallel region would take longer than they do.
# At more, the code asks when it runs how many threads there are.
_OPTIONS: dict[int, dict[str, Any]] = {
    1: {"cpp.min_chunk_size": 1 << 16},
    2: {"cpp.min_chunk_size": 1 << 12, "cpp.dynamic_threads": True},
}


class Step:
    """A compiled decoder: one graph for one token, one for any larger number; they share weights and caches."""

    def __init__(self, one: Callable, many: Callable, max_length: int, owner: Any = None):
        self._one, self._many, self.max_length = one, many, max_length
        self._owner = owner  # of memory that the graphs use

    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """As :meth:`Decoder.forward`.

        Raises:
            ValueError: tokens or start of another shape or dtype. Machine code would not notice.
        """
        if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens have shape {list(tokens.shape)} and {tokens.dtype}; expected [1, s] and torch.int64")
        if start.shape != (1,) or start.dtype != torch.int64:
            raise ValueError(f"start has shape {list(start.shape)} and {start.dtype}; expected [1] and torch.int64")
        return (self._one if tokens.shape[1] == 1 else self._many)(tokens, start)


def compile_decoder(decoder: Decoder, backend: str = "aot") -> Step:
    """Compiles a decoder for this process; the machine code uses the decoder's own weights and caches.

    It computes what the decoder computes, up to the rounding of fused float operations, which now and then makes an
    activation round to another int8 value. Needs a C++ compiler.

    Args:
        decoder: quantised or not.
        backend: "aot" compiles now, with AOTInductor, and calls machine code without Python. "inductor" is
            torch.compile, which compiles in the first call of each kind. Do not change the model afterwards: neither
            would notice.

    Returns:
        A step for :func:`generate`.

    Raises:
        ValueError: an unknown backend.
        Exception: whatever torch's compilers raise.
    """
    if backend == "inductor":
        # The model is the decoder's: checks of its hundreds of attributes on every call would find nothing.
        guards = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        one, many = (
            torch.compile(decoder, fullgraph=True, dynamic=tokens > 1, options=guards | _OPTIONS[tokens])
            for tokens in (1, 2)
        )
        return Step(one, many, decoder.max_length)
    if backend != "aot":
        raise ValueError(f"backend is {backend!r}; expected 'aot' or 'inductor'")
    # A package without weights: the decoder's are lent to both graphs.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "decoder.pt2"
        _package(decoder, path, {})
        step = load_decoder(path, _tensors(decoder))
    step._owner = decoder
    return step


def export_decoder(decoder: Decoder, path: str | os.PathLike) -> None:
    """Writes a package (.pt2) of a decoder, for :func:`load_decoder`; needs a C++ compiler here, and none there.

    It holds two models, "decode" for one token and "prefill" for any larger number, and the weights once.

    Args:
        decoder: quantised or not.
        path: a name that ends in .pt2; replaced in one step, and untouched when the export fails.

    Raises:
        ValueError, OSError: path does not end in .pt2, or cannot be written.
        Exception: whatever torch.export and AOTInductor raise.
    """
    with _replacing(path, ".pt2") as written:
        _package(decoder, written, {"aot_inductor.package_constants_on_disk_format": "pickle_weights"})


def load_decoder(path: str | os.PathLike, tensors: dict[str, Tensor] | None = None) -> Step:
    """Loads a package of :func:`export_decoder`.

    Args:
        path: of the package.
        tensors: weights and caches by name, to use in place of the package's.

    Returns:
        A step for :func:`generate`, with caches of its own.

    Raises:
        ValueError: the package holds no decoder.
        Exception: whatever torch raises on a file that is no package, or one for another CPU.
    """
    archive = import_module("torch.export.pt2_archive._package")
    models = archive.load_pt2(str(path), load_weights_from_disk=tensors is None).aoti_runners
    if not {"decode", "prefill"} <= models.keys():
        raise ValueError(f"{path} has the models {sorted(models)}; expected decode and prefill")
    if tensors is not None:
        for model in models.values():
            lent = {name: tensors[name] for name in model.get_constant_fqns()}
            model.load_constants(lent, check_full_update=True, user_managed=True)
    max_length = int(models["decode"].get_metadata()["max_length"])
    return Step(models["decode"], models["prefill"], max_length, tensors)


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    found = dict(decoder.named_parameters(remove_duplicate=False))
    return found | dict(decoder.named_buffers(remove_duplicate=False))


def _package(decoder: Decoder, path: Path, options: dict[str, Any]) -> None:
    aot_compile = import_module("torch._inductor").aot_compile
    files = {}
    for name, tokens in (("decode", 1), ("prefill", 2)):
        example = (torch.zeros(1, 4 if tokens > 1 else 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        length = torch.export.Dim("tokens", min=2, max=decoder.max_length)
        with torch.no_grad():
            exported = torch.export.export(decoder, example, dynamic_shapes=({1: length}, None) if tokens > 1 else None)
            files[name] = aot_compile(
                exported.module(check_guards=False),
                example,
                options={
                    "aot_inductor.package": True,
                    "aot_inductor.package_constants_in_so": False,
                    "aot_inductor.metadata": {"max_length": str(decoder.max_length)},
                    **_OPTIONS[tokens],
                    **options,
                },
            )
    import_module("torch._inductor.package").package_aoti(str(path), files)
