"""``lowbit push``."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Output, packed_figures, size

if TYPE_CHECKING:
    from .. import CheckpointEntry


def push(
    output: Output,
    source_directory: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Directory of a packed checkpoint.", show_default=False)
    ],
    repository: Annotated[str, typer.Argument(metavar="NAME", help="Name on the hub: org/model.", show_default=False)],
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="Name on the hub of the float model, for the card.", show_default=False)
    ] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="License for the card, such as apache-2.0.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a packed checkpoint to a hub, with a model card."""
    from .. import inspect_checkpoint
    from ..checkpoint.card import CARD, without_note
    from ..files.hub import files_to_push, push_files
    from ..files.io import read_bytes
    from ..files.safetensors import files_of, read_files
    from ..operators import ops

    entries = inspect_checkpoint(source_directory)
    if not any(entry.kind == "packed" for entry in entries):
        raise ValueError(f"{source_directory} has no packed weights; expected a checkpoint of lowbit quantize or lowbit import")
    stored = read_files(*files_of(source_directory))
    packed = [stored[entry.name] for entry in entries if entry.kind == "packed"]
    with output.progress("checking", "matrices") as advance:
        for number, each in enumerate(packed, 1):
            data = read_bytes(each)
            if len(each.shape) == 1:
                ops.verify(data)
            else:
                ops.info_of_experts(data.view(each.shape), verified=True)
            advance(number, len(packed))
    files: dict[str, Path | bytes] = dict(files_to_push(source_directory))
    if not without_note(source_directory):
        files[CARD] = _card(repository, entries, base_model, license_).encode()
    total = sum(len(each) if isinstance(each, bytes) else each.stat().st_size for each in files.values())
    output.note(f"uploading {len(files)} files, {size(total)}, to {repository} ...")
    commit, url = push_files(repository, files, private)
    pinned = f"{repository}@{commit}"
    document = {
        "model": str(source_directory),
        "repository": repository,
        "revision": commit,
        "url": url,
        "files": sorted(files),
    }
    output.result(document, None, f"{url}\nload this very version as {pinned}")


def _card(repository: str, entries: list[CheckpointEntry], base_model: str | None, license_: str | None) -> str:
    """A model card: metadata for the hub, how the weights are packed, and how to run the model."""
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["lowbit"]}
    if license_ is not None:
        front["license"] = license_
    if base_model is not None:
        front |= {"base_model": base_model, "base_model_relation": "quantized"}
    kinds = Counter(
        (entry.bits, entry.mapping, "row" if entry.group_size is None else str(entry.group_size))
        for entry in entries
        if entry.kind == "packed"
    )
    figures = packed_figures(entries)[1]
    rows = "".join(f"| {bits} | {mapping} | {group} | {count} |\n" for (bits, mapping, group), count in sorted(kinds.items()))
    of = "" if base_model is None else f" of [{base_model}](https://huggingface.co/{base_model})"
    return f"""---
{import_module("yaml").safe_dump(front, sort_keys=False).strip()}
---
# {repository.partition("/")[2]}

The weights{of} in lowbit's packed format, for CPUs: {figures["bits_per_weight"]:.2f} bits per packed weight, {
        size(sum(entry.bytes for entry in entries))
    } in all.

| Bits | Mapping | Inputs per group | Matrices |
|---|---|---|---|
{rows}
Install the package lowbit with its extra `llm`. Then:

    lowbit generate hf:{repository} --prompt 'Once upon a time'

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repository}")
tokenizer = AutoTokenizer.from_pretrained("{repository}")
```
"""
