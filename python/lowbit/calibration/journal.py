"""Stores the finished layers of a calibration on disk, so that a later run can continue an interrupted one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.replace import lock, naming_full_disk, sync, sync_path
from ..packed.matrix import verify

_LOG = logging.getLogger(__name__)
_VERSION = 4
_IDENTITY, _LAYERS, _WIDTHS = "identity.json", "layers.jsonl", "widths.json"


def digest(parts: Iterable[Path | bytes]) -> str:
    """The SHA-256 of the digests of files and bytes."""
    result = hashlib.sha256()
    for part in parts:
        if isinstance(part, bytes):
            result.update(hashlib.sha256(part).digest())
        else:
            with open(part, "rb") as file:
                result.update(hashlib.file_digest(file, "sha256").digest())
    return result.hexdigest()


def journal_path(target: Path) -> Path:
    """The directory of the journal for a target, a path without symbolic links."""
    return target.parent / f".{target.name}.calibration"


class Journal:
    """The packed layers of an unfinished run, in a hidden directory next to its target.

    As a context manager it holds the directory's lock. The directory is removed when the run succeeds or has stored no layer.
    It is kept after an error, Ctrl-C or a kill, because it may hold hours of work.

    Args:
        target: the path that the run writes.
        identity: digests or names of the calibration's inputs. Layers of an earlier run with another identity are removed.

    Attributes:
        packed: the finished layers, each with its method and its memory-mapped packed weight.
        changes: names of the parts of the identity that differ from an earlier run, whose layers were therefore removed.
    """

    def __init__(self, target: Path, identity: Mapping[str, str]):
        self.path = journal_path(target)
        self.identity = {"version": str(_VERSION), **identity}
        self.packed: dict[str, tuple[str, Tensor]] = {}
        self._files = 0
        self._lock: int | None = None
        self.changes: list[str] = []

    def __enter__(self) -> Journal:
        try:
            self.path.mkdir(exist_ok=True)
            sync_path(self.path.parent)  # makes the new directory itself durable
            self._lock = lock(self.path)
        except OSError as error:
            raise OSError(error.errno, f"{self.path} cannot be written: {error.strerror}") from error
        if self._lock is None:
            raise BlockingIOError(f"{self.path} is in use: another run calibrates for the same target")
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _open(self) -> None:
        identity = _read(self.path / _IDENTITY)
        if identity == self.identity:
            self._resume()
            return
        entries = list(self.path.iterdir())
        for entry in entries:
            entry.unlink()
        sync_path(self.path)  # before the new identity is written, so that old layers cannot reappear after a power failure
        if entries:
            self.changes = [key for key in self.identity if not identity or identity.get(key) != self.identity[key]]
        self._write(_IDENTITY, self.identity)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self.packed = {}
        if kind is None or not self.holds_work():
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def holds_work(self) -> bool:
        """Whether there is something to resume."""
        return self._files > 0 or (self.path / _WIDTHS).exists()

    def _resume(self) -> None:
        """Reads finished layers up to the first incomplete line or file."""
        log, whole = self.path / _LAYERS, b""
        try:
            lines = log.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            try:
                entries = json.loads(line)
                weights = [self._map(entry["file"], entry.get("experts")) for entry in entries]
                for packed in weights:
                    for matrix in packed if packed.dim() == 2 else (packed,):
                        verify(matrix)
            except (ValueError, KeyError, TypeError, OSError, RuntimeError):
                break
            whole += line
            self._files += len(weights)
            for entry, packed in zip(entries, weights, strict=True):
                for name in entry["layers"]:
                    self.packed[name] = (entry["method"], packed)
        if len(whole) < sum(map(len, lines)):
            self._replace(_LAYERS, whole)
            _LOG.warning("%s: the layers from the first incomplete line on are calibrated again", log)
        _LOG.info("%s: %d layers of an earlier run are used", self.path, len(self.packed))

    def _map(self, name: str, experts: int | None) -> Tensor:
        path = self.path / name
        packed = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return packed if experts is None else packed.view(experts, -1)

    def _write(self, name: str, content: Any) -> None:
        self._replace(name, json.dumps(content).encode())

    def _replace(self, name: str, content: bytes) -> None:
        partial = self.path / f"{name}.new"
        with self._naming_full_disk():
            with open(partial, "wb") as file:
                file.write(content)
                sync(file)
            os.replace(partial, self.path / name)
            sync_path(self.path)

    def _naming_full_disk(self) -> AbstractContextManager[None]:
        return naming_full_disk(self.path, kept="its finished layers are kept")

    def keep(self, layers: list[tuple[list[str], str, Tensor]]) -> list[Tensor]:
        """Stores layers, all or none, and returns their weights as mapped files.

        Args:
            layers: names that share a packed weight, their method, and the weight, uint8 [bytes] or [experts, bytes].
        """
        entries: list[dict[str, Any]] = []
        with self._naming_full_disk():
            for names, method, packed in layers:
                name, experts = f"{self._files:05}.packed", {"experts": len(packed)} if packed.dim() == 2 else {}
                entries.append({"layers": names, "method": method, "file": name, **experts})
                self._files += 1
                with open(self.path / name, "wb") as file:
                    file.write(packed.numpy())
                    sync(file)
            with open(self.path / _LAYERS, "ab") as file:  # an incomplete line is ignored
                file.write(json.dumps(entries).encode() + b"\n")
                sync(file)
            sync_path(self.path)  # makes the file names durable
        weights = [self._map(entry["file"], entry.get("experts")) for entry in entries]
        for (names, method, _), mapped in zip(layers, weights, strict=True):
            for name in names:
                self.packed[name] = (method, mapped)
        return weights

    def widths(self) -> Any:
        """What :meth:`keep_widths` has stored; None: nothing."""
        return _read(self.path / _WIDTHS)

    def keep_widths(self, content: Any) -> None:
        """Stores the config of a run with mixed precision, as JSON."""
        self._write(_WIDTHS, content)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
