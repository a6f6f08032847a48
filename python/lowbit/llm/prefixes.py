"""Prefix caching on disk: keys and values of text prefixes, in files that later processes read."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from .. import __version__
from ..files.replace import PartialDirectory, lock
from ..machine.numbers import check_whole
from ..operators.cache_layout import (
    SPAN,
    bytes_of,
    can_continue,
    first_held,
    first_kept,
    is_held,
    is_state,
    states_of,
    stretches,
)
from .texts_call import TextsDecoder

if TYPE_CHECKING:
    import torch

    from .decoder import Decoder

BLOCK = 64  # tokens per file; only whole blocks of a text are stored
MOST_BYTES = 8_000_000_000
_SUFFIX = ".lowbit-prefix"
_HEADER = struct.Struct("<8s32sI20x")  # magic, hash of the block's tokens, checksum of the keys and values after the header
_MAGIC = b"LOWBITK2"  # changes with the layout of caches
_WAIT_SECONDS = 60.0  # largest time to wait for another process that writes

Layers = Sequence[tuple[Any, ...]]


class PrefixCache:
    """A directory with keys and values of texts, in blocks of 64 tokens.

    States of recurrent layers hold all of a text and cannot be cut back, and layers with a window hold only the end of a text.
    Files have both as they were at the ends of some blocks, and a text continues from the last of these.

    A block's file name is a hash of all tokens up to its end, the model's weights, the type of the KV cache and the versions
    of the libraries that compute it. So other models do not use it, and texts with a common prefix share files. The files are
    the same for every instruction set. When they exceed ``most_bytes``, the least recently used ones are removed. Several
    processes may use a directory. Damaged files are removed and computed again.
    """

    def __init__(
        self, directory: str | os.PathLike[str], decoder: TextsDecoder, most_bytes: int = MOST_BYTES, *, snapshots: bool = False
    ):
        """
        Args:
            directory: created if it does not exist, accessible only to its owner, because the files reveal the texts.
            decoder: not compiled. All linear layers of its model except the head must be packed: results of torch's layers
                depend on the number of rows, so a text would depend on the content of the directory.
            most_bytes: largest total size of the files.
            snapshots: :meth:`write` is called where blocks end, as by :class:`Batch`, and gets states of recurrent layers.

        Raises:
            ValueError: another kind of decoder, a model with float matrices, one with recurrent layers or windows without
                snapshots, or most_bytes is not positive.
            OSError: the directory cannot be created.
            RuntimeError: the decoder was released.
        """
        if not isinstance(decoder, TextsDecoder):
            raise ValueError(f"a prefix cache is for a Decoder, not compiled; found a {type(decoder).__name__}")
        decoder.check()
        if decoder.recurrent and not snapshots:
            raise ValueError(
                "a prefix cache of single texts requires a model with keys and values only; recurrent layers of this one have "
                "states, which depend on the whole text: lowbit serve stores them"
            )
        if decoder.windowed and not snapshots:
            raise ValueError(
                "a prefix cache of single texts needs the keys and values of whole texts, and layers of this decoder keep only "
                "a window; expected Decoder(windows=False)"
            )
        most_bytes = check_whole("most_bytes", most_bytes, 1)
        model = decoder.prefix_key()
        self.directory, self.most_bytes = Path(directory), most_bytes
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{self.directory} is not a directory")
        layers = decoder.new_caches(16).layers
        attention = [_keys_and_values(layer) for layer in layers]
        sizes = [sum(cache.nbytes // cache.shape[2] for cache in pair) for pair in attention]  # of a position
        self._windows = {layer: (window, sizes[layer]) for layer, window in decoder.windows.items()}
        self._block_bytes = BLOCK * (sum(sizes) - sum(size for _, size in self._windows.values()))
        self._state_bytes = sum(state.nbytes for state in states_of(layers))
        kind: list[Any] = [decoder.cache_type, [[list(cache.shape[1::2]) for cache in pair] for pair in attention]]
        kind += [[list(state.shape), state.nbytes] for state in states_of(layers)]
        kind += [sorted(decoder.windows.items())] if decoder.windows else []
        self._key = hashlib.sha256(model + json.dumps(kind).encode()).digest()
        self._may_write = True

    def count(self, tokens: Sequence[int]) -> int:
        """The number of cached tokens at the beginning of a text. The last token does not count, as it must be computed."""
        there = self.stored(tokens) // BLOCK
        if self._has_ends:
            blocks = list(self._blocks(tokens[: there * BLOCK]))
            there = next((number for number in range(there, 0, -1) if _end(blocks[number - 1][1]).exists()), 0)
        return BLOCK * there

    def stored(self, tokens: Sequence[int]) -> int:
        """:meth:`count`, and further tokens whose blocks are there, but not the states and windows after them."""
        return BLOCK * sum(1 for _ in takewhile(lambda block: block[1].exists(), self._blocks(tokens[:-1])))

    def read(self, tokens: Sequence[int], layers: Layers, start: int = 0) -> int:
        """Fills caches with the longest stored prefix of a text, if it is longer than what they have.

        Args:
            tokens: the tokens of the text.
            layers: keys and values of each layer, from :meth:`Decoder.caches` or a :class:`Caches`.
            start: number of tokens of the text that are already in the caches; 0 with states or windows.

        Returns:
            The number of tokens of the text that are in the caches now.
        """
        # Caches without a window take the end of a text only if that has all positions.
        most = {layer: window + SPAN for layer, (window, _) in self._windows.items()}
        whole = {number: _keys_and_values(layer) for number, layer in enumerate(layers) if not any(map(is_held, layer))}
        rooms = [min(cache.shape[2], most.get(number, cache.shape[2])) for number, pair in whole.items() for cache in pair]
        room = min(rooms, default=len(tokens))
        there = min(self.count(tokens), room) // BLOCK
        if there * BLOCK <= start:
            return start
        blocks = list(self._blocks(tokens[: there * BLOCK]))
        for number in range(start // BLOCK, there):
            if not self._read_file(*blocks[number], self._block_bytes, self._block(layers, number * BLOCK)):
                there = number
                break
        used = [path for _, path in blocks[:there]]
        if self._has_ends:
            (digest, path), count = blocks[there - 1], there * BLOCK
            for layer, (window, _) in self._windows.items():
                for held in filter(is_held, layers[layer]):
                    held[0], held[1] = first_kept(window, count), count
            pieces = self._pieces_of_end(layers, count, states_of(layers))
            if there < len(blocks) or not self._read_file(digest, _end(path), self._end_bytes(count), pieces):
                return start
            used.append(_end(path))
        self._touch(used)
        return int(max(start, there * BLOCK))

    def write(self, tokens: Sequence[int], layers: Layers, snapshots: Mapping[int, Sequence[Any]] | None = None) -> int:
        """Stores the keys and values of a text that are not stored yet, and states and windows.

        If writing fails, for example because the disk is full, it warns once.

        Args:
            snapshots: the states after some numbers of tokens, multiples of 64; without states, windows are those after the
                last whole block.

        Returns:
            The number of blocks written.
        """
        ends = dict(snapshots or {})
        if not self._state_bytes:
            ends = {len(tokens) // BLOCK * BLOCK: ()} if self._windows else {}
        windows = {layer: window for layer, (window, _) in self._windows.items()}
        ends = {count: states for count, states in ends.items() if count and can_continue(layers, windows, count)}
        room = self.most_bytes - sum(_HEADER.size + self._end_bytes(count) for count in ends)
        blocks = list(self._blocks(tokens))[: max(0, room // (_HEADER.size + self._block_bytes))]
        if self._has_ends:  # later blocks would not be used
            blocks = blocks[: max((count for count in ends if count <= len(blocks) * BLOCK), default=0) // BLOCK]
        new = [number for number, (_, path) in enumerate(blocks) if not path.exists()]
        paths = {count: _end(blocks[count // BLOCK - 1][1]) for count in ends if count <= len(blocks) * BLOCK}
        new_ends = [count for count, path in paths.items() if not path.exists()]
        if not (new or new_ends) or not self._may_write:
            return 0
        try:
            with self._locked(), PartialDirectory(self.directory / "blocks") as partial:
                used = [*(path for _, path in blocks), *paths.values()]
                self._touch(used)  # so that they are removed last
                size = len(new) * self._block_bytes + sum(map(self._end_bytes, new_ends))
                self._make_room(size + (len(new) + len(new_ends)) * _HEADER.size)
                files = [(*blocks[number], self._block(layers, number * BLOCK)) for number in new]
                files += [
                    (blocks[count // BLOCK - 1][0], paths[count], self._pieces_of_end(layers, count, ends[count]))
                    for count in new_ends
                ]
                for digest, path, pieces in files:
                    _write_file(partial.path / path.name, digest, pieces)
                    os.rename(partial.path / path.name, path)
                self._touch(used)
        except OSError as error:
            self._may_write = False
            warnings.warn(
                f"the prefix cache in {self.directory} is not written to: {error.strerror or error}; the text is the same "
                "without it",
                stacklevel=2,
            )
            return 0
        return len(new)

    @property
    def _has_ends(self) -> bool:
        """Whether a text can continue only from the end of some blocks, where files have its states and windows."""
        return bool(self._state_bytes or self._windows)

    def _end_bytes(self, count: int) -> int:
        """Bytes of the states and windows after ``count`` tokens."""
        sizes = ((count - first_kept(window, count)) * size for window, size in self._windows.values())
        return int(self._state_bytes + sum(sizes))

    def _pieces_of_end(self, layers: Layers, count: int, states: Iterable[Any]) -> Iterator[numpy.ndarray]:
        """The bytes of the states and windows after ``count`` tokens."""
        for layer, (window, _) in self._windows.items():
            first = first_held(layers[layer])
            for cache in _keys_and_values(layers[layer]):
                yield from map(bytes_of, stretches(cache, first_kept(window, count) - first, count - first))
        yield from map(_flat, states)

    def _block(self, layers: Layers, at: int) -> Iterator[numpy.ndarray]:
        """The bytes of a block in the caches of layers that keep whole texts."""
        for number, layer in enumerate(layers):
            for cache in _keys_and_values(layer) if number not in self._windows else ():
                yield from map(bytes_of, stretches(cache, at, at + BLOCK))

    def _blocks(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, Path]]:
        """The hash and the file of each whole block of a text."""
        digest = self._key
        for at in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
            digest = hashlib.sha256(digest + struct.pack(f"<{BLOCK}q", *tokens[at : at + BLOCK])).digest()
            yield digest, self.directory / (digest.hex() + _SUFFIX)

    def _read_file(self, digest: bytes, path: Path, size: int, pieces: Iterable[numpy.ndarray]) -> bool:
        try:
            with open(path, "rb", buffering=0) as file:
                data = numpy.empty(_HEADER.size + size, dtype=numpy.uint8)
                view, done = memoryview(data), 0
                while count := file.readinto(view[done:]):
                    done += count
                whole = done == len(view) and not file.read(1)
        except FileNotFoundError:
            return False  # another process has removed it
        except OSError as error:
            warnings.warn(f"{path} cannot be read: {error.strerror}; it is computed again", stacklevel=4)
            return False
        expected = _MAGIC, digest, zlib.crc32(view[_HEADER.size :])
        if not whole or _HEADER.unpack(view[: _HEADER.size]) != expected:
            warnings.warn(f"{path} is damaged or belongs to another text; it is removed and computed again", stacklevel=4)
            path.unlink(missing_ok=True)
            return False
        begin = _HEADER.size
        for stretch in pieces:
            stretch[...] = data[begin : begin + stretch.size].reshape(stretch.shape)
            begin += stretch.size
        return True

    def _touch(self, paths: list[Path]) -> None:
        """Marks files as used now, the first blocks of a text last, because later blocks are useless without them."""
        now = time.time_ns()
        for number, path in enumerate(paths):
            try:
                os.utime(path, ns=(now, now + len(paths) - number))
            except FileNotFoundError:
                pass

    def _make_room(self, size: int) -> None:
        found = []
        for entry in os.scandir(self.directory):
            if entry.name.endswith(_SUFFIX):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append((stat.st_mtime_ns, stat.st_size, entry.path))
        size += sum(each[1] for each in found)
        for _, bytes_, path in sorted(found):
            if size <= self.most_bytes:
                break
            Path(path).unlink(missing_ok=True)  # a process that is reading it keeps it open
            size -= bytes_

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A context that keeps other processes from writing, so that the total size stays within the limit."""
        end = time.perf_counter() + _WAIT_SECONDS
        try:
            while (held := lock(self.directory)) is None and time.perf_counter() < end:
                time.sleep(0.02)
        except OSError:  # no locks on this file system
            held = None
        try:
            yield
        finally:
            if held is not None:
                os.close(held)


def _keys_and_values(layer: Iterable[Any]) -> list[Any]:
    return [cache for cache in layer if not (is_state(cache) or is_held(cache))]


def _end(path: Path) -> Path:
    """The file of the states and windows at the end of a block."""
    return path.with_name(path.name.removesuffix(_SUFFIX) + "-states" + _SUFFIX)


def _flat(state: Any) -> numpy.ndarray:
    return bytes_of(state.reshape(-1))


def _write_file(path: Path, digest: bytes, pieces: Iterable[numpy.ndarray]) -> None:
    data = numpy.concatenate([numpy.empty(0, dtype=numpy.uint8), *(piece.reshape(-1) for piece in pieces)])
    # Not synced: after a power failure the checksum detects incomplete files.
    with open(path, "xb") as file:
        file.write(_HEADER.pack(_MAGIC, digest, zlib.crc32(data)))
        file.write(data)
    path.chmod(0o600)


def _float_matrix(model: torch.nn.Module) -> str | None:
    """The name of a float matrix in a linear layer other than the head; None if there is none."""
    import torch

    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head or isinstance(module, torch.nn.Embedding):
            continue
        if isinstance(module, torch.nn.Conv1d) and module.groups == module.in_channels:
            continue  # of a recurrent layer: short_conv computes it token by token
        for parameter, value in module.named_parameters(recurse=False):
            if value.dim() > 1:
                return f"{name}.{parameter}"
    return None


def prefix_key(decoder: Decoder) -> bytes:
    """:func:`model_key`, if keys and values do not depend on how a text is split into calls.

    Raises:
        ValueError: the model has float matrices.
    """
    found = _float_matrix(decoder.model)
    if found is not None:
        raise ValueError(
            f"a prefix cache requires that all linear layers are packed; {found} is float, and its results depend on how a "
            "prompt is split"
        )
    return model_key(decoder.model)


def model_key(model: Any) -> bytes:
    """A hash of all that keys and values of a model of transformers depend on besides tokens and their type.

    For packed weights these are their checksums, which are verified already.
    """
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "quantization_config"):
        config.pop(name, None)
    said = {
        "block": BLOCK,
        "versions": [__version__, version("torch"), version("transformers")],
        "class": type(model).__name__,
        "keys": "balanced",  # hf/key_scales.py; version 0.1.0 also stored keys without scales
        "config": config,
    }
    key = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        key.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if name.endswith("packed_weight"):
            tensor = tensor[..., :128]  # the header of each matrix, with the checksums of all its bytes
        key.update(bytes_of(tensor.detach().contiguous().view(-1)))
    return key.digest()
