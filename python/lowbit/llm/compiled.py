"""Compiles decoders for this process with torch.compile or AOTInductor. :mod:`lowbit.exports.decoder_program` exports files."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..exports.module import machine_code, write_package
from ..files.replace import replacing
from ..files.untrusted import one_line
from ..machine.facts import cpp_compiler
from ..machine.one_text import OneText
from .compiled_files import Unknown, check_owner, key_of, prune
from .decoder import Decoder

_LOG = logging.getLogger(__name__)

# Loops over fewer values per thread than this run on one thread: with one token there are a few thousand values, which take
# less time than starting a parallel region. Code for more tokens reads the number of threads at run time.
_OPTIONS: dict[int, dict[str, Any]] = {
    1: {"cpp.min_chunk_size": 1 << 16},
    2: {"cpp.min_chunk_size": 1 << 12, "cpp.dynamic_threads": True},
}


class Step:
    """A compiled decoder: a graph for one token and a graph for more tokens, which share weights and caches."""

    def __init__(self, one: Callable[..., Tensor], many: Callable[..., Tensor], decoder: Decoder):
        self._one, self._many, self.max_length = one, many, decoder.max_length
        self.vocabulary = decoder.vocabulary
        self._decoder = decoder  # owns the memory that the graphs use, until it is released

    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """The same as :meth:`Decoder.forward`."""
        graph = self._one if tokens.dim() == 2 and tokens.shape[1] == 1 else self._many
        return self._decoder.run_pieces(graph, tokens, start)

    @property
    def one_text(self) -> OneText:
        """That of the decoder, whose caches the graphs use."""
        return self._decoder.one_text

    @property
    def recurrent(self) -> bool:
        """The same as :attr:`Decoder.recurrent`."""
        return self._decoder.recurrent

    def kept(self, count: int) -> int:
        """The same as :meth:`Decoder.kept`."""
        return self._decoder.kept(count)


def compile_decoder(decoder: Decoder, backend: str = "aot", directory: Path | None = None) -> Step:
    """Compiles a decoder for this process; the machine code uses the decoder's weights and caches.

    Results equal the decoder's up to the rounding of fused float operations, which sometimes changes the int8 value of an
    activation. Requires a C++ compiler.

    Args:
        decoder: quantized or not.
        backend: "aot" compiles now, with AOTInductor, and calls machine code without Python. "inductor" is
            torch.compile, which compiles in the first call of each kind. Compiled code does not see later changes of the
            model.
        directory: a cache for the machine code of "aot", without weights, that later processes with the same model, versions,
            CPU, number of threads and settings use instead of compiling; created if it is missing. Only the user may have
            write access, because the files are executed. None: no cache.

    Returns:
        A step for :func:`generate`.

    Raises:
        ValueError: an unknown backend, or a directory for "inductor".
        OSError: there is no C++ compiler, or others may write to the directory.
        Exception: whatever torch's compilers raise.
    """
    if backend not in ("aot", "inductor"):
        raise ValueError(f"backend is {backend!r}; expected 'aot' or 'inductor'")
    cpp_compiler()
    if backend == "inductor" and directory is not None:
        raise ValueError(f"directory is {str(directory)!r} for 'inductor', which has torch's own cache; expected None")
    if backend == "inductor":
        # The decoder owns the model, so guards on its hundreds of attributes would cost time and never fail.
        guards = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        one, many = (
            torch.compile(decoder, fullgraph=True, dynamic=tokens > 1, options=guards | _OPTIONS[tokens]) for tokens in (1, 2)
        )
        return Step(one, many, decoder)
    models = _load_or_compile(decoder, directory)
    tensors = _tensors(decoder)
    for model in models.values():
        constants = {name: tensors[name] for name in model.get_constant_fqns()}
        model.load_constants(constants, check_full_update=True, user_managed=True)
    return Step(models["decode"], models["prefill"], decoder)


def _load_or_compile(decoder: Decoder, directory: Path | None) -> dict[str, Any]:
    """Loads or compiles the models "decode" and "prefill", both of which use the decoder's weights."""
    if directory is not None:
        check_owner(directory)
        try:
            path = directory / f"{key_of(decoder, _OPTIONS)}.pt2"
        except Unknown as unknown:
            _LOG.info("the compiled decoder is not kept: the model has %s", unknown)
            directory = None
    if directory is None:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "decoder.pt2"
            _package(decoder, path)
            return _load(path)
    if path.exists():
        try:
            models = _load(path)
            os.utime(path)  # marks it as used for prune()
            return models
        except Exception as error:  # whatever torch raises on a damaged file
            _LOG.warning("%s is damaged (%s: %s) and compiled again", path, type(error).__name__, one_line(error, 200))
    with replacing(path, ".pt2") as written:
        _package(decoder, written)
    prune(directory)
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    models: dict[str, Any] = import_module("torch.export.pt2_archive._package").load_pt2(str(path)).aoti_runners
    if not {"decode", "prefill"} <= models.keys():
        raise ValueError(f"it has the models {', '.join(models)}; expected decode and prefill")
    return models


def _tensors(decoder: Decoder) -> dict[str, Tensor]:
    return dict(decoder.named_parameters(remove_duplicate=False)) | dict(decoder.named_buffers(remove_duplicate=False))


def _package(decoder: Decoder, path: Path) -> None:
    """Writes a package of two models, "decode" and "prefill", without weights."""
    files = {}
    for name, tokens in (("decode", 1), ("prefill", 2)):
        example = (torch.zeros(1, 4 if tokens > 1 else 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        length = torch.export.Dim("tokens", min=2, max=decoder.max_length)
        with torch.no_grad():
            exported = torch.export.export(decoder, example, dynamic_shapes=({1: length}, None) if tokens > 1 else None)
            options = {"aot_inductor.package_constants_in_so": False, **_OPTIONS[tokens]}
            files[name] = machine_code(exported, example, options)
    write_package(path, files)
