"""The on-disk cache of compiled decoders: keys of everything that machine code depends on (except weights), and pruning."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import lowbit

from ..machine.facts import cpp_compiler

ENVIRONMENT = "LOWBIT_COMPILE_CACHE"
_MOST_FILES = 16
_SCALARS = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))
_KNOWN = ("lowbit", "transformers", "torch")  # packages whose code the key knows by its version or its text


class Unknown(Exception):
    """A model has something that the key cannot cover, such as a user's hook."""


def default_directory() -> Path | None:
    """The cache directory of commands: LOWBIT_COMPILE_CACHE, or by default a folder in the user's cache directory.

    None if the variable is set but empty.
    """
    named = os.environ.get(ENVIRONMENT)
    if named is not None:
        return Path(named) if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit" / "compiled"


def check_owner(directory: Path) -> None:
    """Creates the directory, accessible only to this user, if it is missing.

    Raises:
        OSError: it cannot be created; or others could write machine code into it, which this process would run.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(
            f"{directory} belongs to another user or is writable for others, who could put machine code into it; expected a "
            "directory that only you may write"
        )


def usable_directory(note: Callable[[str], None]) -> Path | None:
    """:func:`default_directory` if it can be used; otherwise None, with a note."""
    directory = default_directory()
    if directory is None:
        return None
    try:
        check_owner(directory)
        if not os.access(directory, os.W_OK):
            raise OSError(f"{directory} cannot be written")
    except OSError as error:
        note(f"the compiled decoder is not kept: {error}; {ENVIRONMENT} names another directory, or nothing")
        return None
    return directory


def prune(directory: Path) -> None:
    """Removes the least recently used compiled decoders."""
    used = []
    for path in directory.glob("*.pt2"):
        with contextlib.suppress(FileNotFoundError):  # another process removes files, too
            used.append((path.stat().st_mtime, path))
    for _, path in sorted(used, reverse=True)[_MOST_FILES:]:
        path.unlink(missing_ok=True)


@cache
def _text_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _own_code() -> Iterator[str]:
    """The text of lowbit's Python files, because the version does not change during development."""
    root = Path(lowbit.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield f"{path.relative_to(root)} {_text_of(str(path))}"


def _file_of(kind: type) -> str:
    """The source file of a class, which may have come with a checkpoint."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if path is None:
        raise Unknown(f"the class {kind.__qualname__}, of no file")
    return _text_of(path)


def _code_of(value: Callable[..., Any]) -> str:
    """Identifies a function or other callable of a known package.

    Raises:
        Unknown: it belongs to another package.
    """
    function = inspect.unwrap(getattr(value, "func", value))
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if module.partition(".")[0] not in _KNOWN:
        raise Unknown(f"{module}.{name}, which is code of another package")
    return f"{module}.{name}"


def _attributes(module: torch.nn.Module) -> Iterator[str]:
    """A module's attributes except tensors and modules: numbers and strings by value, code by name, other objects by class."""
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if "hooks" in name and isinstance(value, dict):
            for hook in value.values():
                yield f"{name} {_code_of(hook)}"
        elif isinstance(value, _SCALARS) or (
            isinstance(value, tuple | list) and all(isinstance(one, _SCALARS) for one in value)
        ):
            yield f"{name} {value!r}"
        elif inspect.isfunction(value) or inspect.ismethod(value):
            yield f"{name} {_code_of(value)}"
        else:
            yield f"{name} {type(value).__qualname__}"


def _tensors(model: torch.nn.Module) -> Iterator[str]:
    """The shapes of all tensors, and which of them share memory."""
    first: dict[tuple[int, int], str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            same = first.setdefault((tensor.data_ptr(), tensor.numel()), name)
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad} {same}"


def _plain(value: object) -> object:
    """Converts a setting for JSON; sets are sorted, because their order differs between processes."""
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def _surroundings() -> Iterator[str]:
    inductor = import_module("torch._inductor.config")
    yield f"{torch.__version__} {torch.version.git_version} {sys.version}"
    yield f"{version('transformers')} {lowbit.__version__}"
    yield f"{import_module('torch._inductor.cpu_vec_isa').pick_vec_isa()} {cpp_compiler()}"
    yield f"{torch.get_num_threads()} {torch.get_default_dtype()}"
    settings = inductor.save_config_portable()
    settings.pop("aot_inductor.metadata", None)  # torch changes it while compiling
    yield json.dumps(settings, sort_keys=True, default=_plain)


def key_of(decoder: torch.nn.Module, options: Any) -> str:
    """A hash of all that a decoder's machine code depends on.

    This is the model's code, configuration, shapes and attributes, and torch, compiler, CPU and number of threads.

    Args:
        options: further settings of the compiler.

    Raises:
        Unknown: the model has something that the key cannot cover.
    """
    digest = hashlib.sha256()

    def add(text: str) -> None:
        digest.update(text.encode(errors="surrogatepass") + b"\0")

    for text in (*_surroundings(), *_own_code(), repr(options)):
        add(text)
    model = decoder.model
    add(json.dumps(model.config.to_dict(), sort_keys=True, default=repr))
    for name, module in decoder.named_modules(remove_duplicate=False):
        kind = type(module)
        add(f"{name} {kind.__module__}.{kind.__qualname__} {_file_of(kind)}")
        for text in _attributes(module):
            add(text)
    for text in _tensors(decoder):
        add(text)
    return digest.hexdigest()[:40]
