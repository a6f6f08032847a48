"""``lowbit serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..machine.facts import keep_freed_memory
from . import options
from .models import from_hub, imported, load, load_draft, positions, read_text, set_threads
from .output import Output

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..serve.routes import Model

_CONTEXT = 4096  # tokens, unless the model has fewer or --max-length says otherwise


def serve(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Directories of checkpoints, or GGUF files.", show_default=False)
    ],
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key that requests must have; LOWBIT_API_KEY hides it from ps.", show_default=False),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Texts that are decoded at the same time.")] = 16,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Texts that may wait; further ones are refused.")] = 64,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Tokens of prompts in a call of the model.")] = 512,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, callback=options.finite, help="Seconds for a request.")
    ] = 600.0,
    grace: Annotated[int, typer.Option("--grace", min=0, help="Seconds for running requests when the server ends.")] = 10,
    prefix_memory: Annotated[
        str, typer.Option("--prefix-memory", help="Memory of each model for prefixes of finished texts; 0: none.")
    ] = "512MiB",
    prefixes: options.Prefixes,
    speculation: options.Speculation,
    template: options.Template = None,
    quantizing: options.Quantizing,
    max_length: options.MaxLength = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
) -> None:
    """Answer requests over HTTP, with OpenAI's interface, until Ctrl-C or SIGTERM."""
    run: Any = _needed()
    output = Output(False)
    config = quantizing.config()
    kept = 0 if prefix_memory == "0" else options.parse_size(prefix_memory, "--prefix-memory")
    prefixes.prefix_bytes()  # checks the option
    names = [path.name.removesuffix(".gguf") or str(path) for path in (each.absolute() for each in models)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two models have the name {twice}, by which requests choose; expected different names of directories")
    guesses, draft = speculation.count, speculation.draft
    if draft is not None and len(models) > 1:
        raise ValueError(f"--draft is for one model; found {len(models)}: start a server for each")
    text = None if template is None else read_text(template)
    set_threads(threads)
    keep_freed_memory()

    loaded = [
        _load(output, name, path, config, text, max_length, at_once=at_once, rows=rows, cache=cache, prefix_bytes=kept)
        for name, path in zip(names, models, strict=True)
    ]
    from ..serve.model_list import LanguageModel

    for model in loaded:
        if isinstance(model, LanguageModel):
            model.batch.prefix_cache = prefixes.open_prefix_cache(output, model.batch.decoder)
            if guesses:
                decoder = model.batch.decoder
                guesser = draft and load_draft(output, draft, model.tokenizer, model.name, decoder, config, cache)
                model.batch.speculate(guesses, guesser)
    run(
        loaded, host, port, api_key or os.environ.get("LOWBIT_API_KEY") or None, queue=queue, timeout=timeout, grace=grace,
        note=output.note, warn=output.warn,
    )  # fmt: skip


def _needed() -> Any:
    """Imports what a server needs, before models are loaded, because a library may be missing."""
    try:
        import python_multipart  # noqa: F401  starlette checks for it only when it receives a form

        from ..serve.run import run
    except ModuleNotFoundError as error:
        known = ("starlette", "uvicorn", "python_multipart", "prometheus_client", "pydantic", "pydantic_core")
        if error.name not in known:
            raise
        raise ImportError(f"{error.name} not installed; install it with: pip install 'lowbit[llm,serve]'") from error
    return run


def _load(
    output: Output,
    name: str,
    path: Path,
    config: LowBitConfig | None,
    template: str | None,
    max_length: int | None,
    **more: Any,
) -> Model:
    from .. import llm
    from ..llm.loading import load_tokenizer
    from ..llm.templates import chat_template
    from ..serve import embeddings, speech
    from ..serve.model_list import LanguageModel

    path = Path(from_hub(output, path) or path)
    if not path.is_file() and speech.is_speech(path):
        with output.progress(f"loading {path}", "tensors") as advance:
            return speech.load(name, path, config, cache=more["cache"], progress=advance)
    texts = None if path.is_file() else embeddings.load(name, path)
    if texts is not None:
        return texts
    with imported(output, path) as path:
        tokenizer = load_tokenizer(path)
        model = load(output, path, config)
        if template is None and tokenizer.chat_template:
            template = chat_template(tokenizer, path)
    length = max_length or min(_CONTEXT, positions(model) // 16 * 16)
    try:
        return LanguageModel.of(name, model, tokenizer, template, max_length=length, **more)
    except llm.Refusal as refusal:
        raise ValueError(f"lowbit serve needs lowbit's decoder; {refusal}") from refusal
