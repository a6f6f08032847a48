"""Downloads, lists, removes and uploads models of a hub: hf:org/model, hf:org/model@revision, hf:org/model/file.gguf.

huggingface_hub does the work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .config_json import METHOD, quantization_method, read_config
from .untrusted import interpreting

PREFIX = "hf:"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:/([^@]+\.gguf))?(?:@([^@\s]+))?")
_PART = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
# Weights, configs and tokenizers: no code, no pickles, and no second copy in Mistral's format.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_IGNORED = ["consolidated*", "original/*", "onnx/*", "openvino/*"]


def hub_name(name: str | os.PathLike[str]) -> tuple[str, str | None, str | None] | None:
    """Parses a hub name into repository, GGUF file or None, and revision or None; returns None for a local path.

    Only names that begin with "hf:" are hub names, because any other could be a misspelled path.

    Raises:
        ValueError: "hf:" is not followed by org/model.
    """
    text = os.fspath(name)
    if not text.startswith(PREFIX) or os.path.lexists(text):
        return None
    found = _NAME.fullmatch(text.removeprefix(PREFIX))
    if found is None:
        raise ValueError(
            f"{text!r} is not a name on a hub; expected hf:org/model, hf:org/model@revision or hf:org/model/file.gguf"
        )
    return found[1], found[2], found[3]


def endpoint() -> str:
    """The address of the hub. Raises ImportError if huggingface_hub is not installed."""
    return str(import_module("huggingface_hub.constants").ENDPOINT)


def check_exists(name: str | os.PathLike[str]) -> None:
    """Raises FileNotFoundError for a path that does not exist and may be meant as a hub name."""
    if _NAME.fullmatch(os.fspath(name)) and not os.path.lexists(name):
        raise FileNotFoundError(f"{os.fspath(name)} does not exist; a model on a hub is named hf:{os.fspath(name)}")


def download(name: str | os.PathLike[str]) -> Path:
    """Downloads a model to huggingface_hub's cache and returns its path; returns a local path unchanged.

    Cached files are not downloaded again. The environment variables of huggingface_hub apply: HF_ENDPOINT, HF_HOME, HF_TOKEN
    and HF_HUB_OFFLINE.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: the hub has no such model or revision, requires a token, or cannot be reached.
        ValueError: an unexpected answer of the hub.
    """
    found = hub_name(name)
    if found is None:
        return Path(name)
    repository, file, revision = found
    hub: Any = import_module("huggingface_hub")
    errors: Any = import_module("huggingface_hub.errors")
    where = f"{repository} on {endpoint()}"
    patterns = _PATTERNS if file is None else [_PART.sub(r"-*-of-\1", file)]
    try:
        with interpreting(f"{where} cannot be downloaded"):
            directory = Path(
                hub.snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED)
            )
    except Exception as wrapped:
        error = wrapped.__cause__ if isinstance(wrapped, ValueError) and wrapped.__cause__ is not None else wrapped
        said = _explain(error, errors, hub.constants, name, where, revision)
        if said is None:
            raise
        raise said from error
    local = directory if file is None else directory / file
    if not local.exists():
        raise FileNotFoundError(f"{where} has no file {file}")
    return local


def files_to_push(directory: Path) -> dict[str, Path]:
    """The files of a checkpoint to upload, by their names on the hub: those that :func:`download` gets, and the model card."""
    found = [path for pattern in [*_PATTERNS, "README.md"] for path in directory.rglob(pattern)]
    names = {path.relative_to(directory).as_posix(): path for path in found if path.is_file()}
    return {name: path for name, path in sorted(names.items()) if not any(part.startswith(".") for part in name.split("/"))}


def push_files(repository: str, files: Mapping[str, Path | bytes], private: bool) -> tuple[str, str]:
    """Uploads files in one commit, creating the repository if needed.

    Returns:
        The commit and the URL of the repository.

    Raises:
        ImportError: huggingface_hub is not installed.
        ValueError: an invalid repository name, or the hub refuses the upload.
        OSError: the hub has no such namespace, or cannot be reached.
    """
    found = _NAME.fullmatch(repository)
    if found is None or found[2] or found[3]:
        raise ValueError(f"{repository!r} is not a name on a hub; expected org/model")
    hub: Any = import_module("huggingface_hub")
    api = hub.HfApi()
    operations = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
    where = f"{repository} on {hub.constants.ENDPOINT}"
    try:
        with interpreting(f"{where} cannot be written"):
            url = api.create_repo(repository, private=private, exist_ok=True)
            done = api.create_commit(repository, operations, commit_message="Weights packed by lowbit")
    except ValueError as wrapped:
        response = getattr(wrapped.__cause__, "response", None)
        if response is not None and response.status_code in (401, 403):
            raise PermissionError(
                f"{where} cannot be written by this user; set HF_TOKEN to a token that may write, or run `hf auth login`"
            ) from wrapped
        raise
    return done.oid, str(url)


def _explain(
    error: BaseException, errors: Any, constants: Any, name: str | os.PathLike[str], where: str, revision: str | None
) -> OSError | None:
    """An error that says what the user can do; None if the hub's message already says it."""
    token = "set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, errors.GatedRepoError):  # a subclass of the next one
        return PermissionError(f"{where} is gated: accept its terms in a browser; then {token}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError(f"there is no {where}; if it is private, {token}")
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{where} has no revision {revision!r}; expected a branch, a tag or a commit")
    if isinstance(error, errors.LocalEntryNotFoundError):
        missing = f"{os.fspath(name)} is not complete in {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            return FileNotFoundError(f"{missing}; HF_HUB_OFFLINE forbids downloads")
        return ConnectionError(f"{missing}; {constants.ENDPOINT} cannot be reached")
    return None


@dataclass(frozen=True)
class Snapshot:
    """A revision of a model in huggingface_hub's cache."""

    name: str  # hf:org/model
    revision: str  # the commit
    refs: list[str]  # branches and tags of the hub that led to it
    kind: str  # "packed", "GGUF", "float", the name of another quantization method, or "unknown"
    bytes: int  # of its files; revisions of a model may share files
    modified: float  # when its last file was written, in seconds since 1970
    path: str


def snapshots() -> tuple[list[Snapshot], list[str]]:
    """The models in huggingface_hub's cache, by their names, and a warning for each part of the cache that cannot be read.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    scanned = _scan()
    found = [
        Snapshot(
            f"{PREFIX}{repository.repo_id}", each.commit_hash, sorted(each.refs), _kind_of(each.snapshot_path),
            each.size_on_disk, each.last_modified, str(each.snapshot_path),
        )
        for repository in scanned.repos
        if repository.repo_type == "model"
        for each in repository.revisions
    ]  # fmt: skip
    return sorted(found, key=lambda each: (each.name, each.modified)), list(map(str, scanned.warnings))


def removal_of(name: str) -> tuple[int, Callable[[], None]]:
    """How to remove a model from huggingface_hub's cache: the bytes that become free, and the function that removes it.

    Args:
        name: hf:org/model for all revisions, or hf:org/model@revision with a branch, a tag or the beginning of a commit.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: the cache does not have it.
        ValueError: not a name on a hub, several commits begin with this revision, or one of the files is outside the cache.
    """
    found = hub_name(name)
    if found is None or found[1] is not None:
        raise ValueError(f"{name!r} is not a model in the hub's cache; expected hf:org/model or hf:org/model@revision")
    repository, _, revision = found
    scanned = _scan()
    commits = {
        each.commit_hash
        for one in scanned.repos
        if one.repo_type == "model" and one.repo_id == repository
        for each in one.revisions
        if revision is None or revision in each.refs or each.commit_hash.startswith(revision)
    }
    if not commits:
        raise FileNotFoundError(f"{name} is not in {_cache()}; lowbit list shows the models that are")
    if revision is not None and len(commits) > 1:
        raise ValueError(f"{name} may be any of {', '.join(sorted(commits))}; expected more characters of the commit")
    strategy = scanned.delete_revisions(*commits)
    root = _cache().resolve()
    for path in (*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs):
        # The last part may be a link, which is removed itself.
        if not (path.parent.resolve() / path.name).is_relative_to(root):
            raise ValueError(f"{name} has {path}, which is not in {root}; remove it by hand")
    return strategy.expected_freed_size, strategy.execute


def _cache() -> Path:
    return Path(import_module("huggingface_hub.constants").HF_HUB_CACHE)


def _scan() -> Any:
    """The content of huggingface_hub's cache."""
    hub: Any = import_module("huggingface_hub")
    return hub.scan_cache_dir(_cache()) if _cache().is_dir() else SimpleNamespace(repos=(), warnings=())


def _kind_of(directory: Path) -> str:
    if any(directory.rglob("*.gguf")):
        return "GGUF"
    try:
        method = quantization_method(read_config(directory))
    except (OSError, ValueError):
        return "unknown"
    return "float" if method is None else {METHOD: "packed"}.get(method, str(method))
