"""``lowbit serve``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lowbit

from ..machine.facts import keep_freed_memory
from . import options
from .models import by_torch, from_hub, imported, load, positions, read_text, set_threads
from .output import Output

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..serve.image_conversations import ImageModel
    from ..serve.model_list import LanguageModel
    from ..serve.routes import Model

_CONTEXT = 4096  # tokens, unless the model has fewer or --max-length says otherwise


def serve(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Directories of checkpoints, or GGUF files.", show_default=False)
    ],
    *,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key that requests must have; LOWBIT_API_KEY hides it from ps.", show_default=False),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Site whose pages may send requests, as https://example.com; *: any.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=DIRECTORY",
            help="LoRA adapter of the model, saved by peft; requests choose it by its name.",
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Texts that are decoded at the same time.")] = 16,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Texts that may wait; further ones are refused.")] = 64,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Largest number of prompt tokens in a call of the model.")] = 512,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, callback=options.finite, help="Seconds after which a request fails.")
    ] = 600.0,
    grace: Annotated[int, typer.Option("--grace", min=0, help="Seconds for running requests after SIGTERM.")] = 10,
    prefix_memory: Annotated[
        str, typer.Option("--prefix-memory", help="Memory of each model for prefixes of finished texts; 0: none.")
    ] = "512MiB",
    image_pixels: Annotated[
        int | None, typer.Option("--image-pixels", min=1, help="Scale images with more pixels down.", show_default=False)
    ] = None,
    prefixes: options.Prefixes,
    speculation: options.Speculation,
    template: options.Template = None,
    quantizing: options.Quantizing,
    max_length: options.MaxLength = None,
    cache: options.Cache = None,
    threads: options.Threads = None,
) -> None:
    """Answer requests over HTTP, with OpenAI's and Anthropic's interfaces, until Ctrl-C or SIGTERM."""
    run: Any = _needed()
    from ..serve.image_conversations import ImageModel
    from ..serve.model_list import LanguageModel

    output = Output(False)
    config = quantizing.config()
    kept = 0 if prefix_memory == "0" else options.parse_size(prefix_memory, "--prefix-memory")
    prefixes.prefix_bytes()  # checks the option
    sites = [_origin(each) for each in origins or ()]
    names = [path.name.removesuffix(".gguf") or str(path) for path in (each.absolute() for each in models)]
    named = _adapters(adapters or [], names)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two models have the name {twice}; expected different names of directories, which requests use")
    guesses, draft = speculation.count, speculation.draft
    if draft is not None and len(models) > 1:
        raise ValueError(f"--draft is for one model; found {len(models)}: start a server for each")
    text = None if template is None else read_text(template)
    keep_freed_memory()

    wish = _Wish(output, text, config, max_length, threads, cache, draft, at_once, rows, kept, image_pixels, named)
    loaded = [each for name, path in zip(names, models, strict=True) for each in _load(wish, name, path)]
    _refuse_unused([model for model, _ in loaded])
    for model, guesser in loaded:
        if isinstance(model, LanguageModel) and not isinstance(model, ImageModel):
            if model.parent is None:  # adapters are float, so their keys and values are not stored
                model.batch.prefix_cache = prefixes.open_prefix_cache(output, model.batch.decoder, snapshots=True)
            if guesses and (model.parent is None or draft is None):
                model.batch.speculate(guesses, guesser)
    run(
        [model for model, _ in loaded], host, port, api_key or os.environ.get("LOWBIT_API_KEY") or None,
        origins=sites, queue=queue, timeout=timeout, grace=grace, note=output.note, warn=output.warn,
    )  # fmt: skip


def _refuse_unused(models: list[Model]) -> None:
    """Refuses options that none of the models uses."""
    from ..serve.image_conversations import ImageModel
    from ..serve.model_list import LanguageModel
    from ..serve.speech import SpeechModel

    def refuse(needed: str, kinds: Any, *names: str) -> None:
        if not any(isinstance(model, kinds) for model in models):
            options.refuse_unused(f"without a {needed} model", *names)

    refuse("vision", ImageModel, "image_pixels")
    generating = "draft", "guesses", "prefix_cache", "prefix_memory", "template", "max_length", "at_once", "rows"
    refuse("language", LanguageModel, *generating)
    refuse("language or speech", (LanguageModel, SpeechModel), "cache", "bits")


def _origin(text: str) -> str:
    """The origin of a site as browsers send it."""
    found = re.fullmatch(r"(https?://)([^/?#@\s]+)/?", text, re.IGNORECASE)
    if text != "*" and found is None:
        raise ValueError(f"--allowed-origin is {text!r}; expected a site such as https://example.com, or *")
    return text if found is None else found[0].removesuffix("/").lower()


def _adapters(given: list[str], models: list[str]) -> dict[str, Path]:
    """The directories of adapters, by their names."""
    found: dict[str, Path] = {}
    if given and len(models) > 1:
        raise ValueError(f"--adapter is for one model; found {len(models)}: start a server for each")
    for each in given:
        name, sign, directory = each.partition("=")
        if not name or not sign or not directory:
            raise ValueError(f"--adapter is {each!r}; expected NAME=DIRECTORY")
        if name in found or name in models:
            raise ValueError(f"two models have the name {name}; expected different names of adapters, which requests use")
        found[name] = Path(directory)
    return found


def _needed() -> Any:
    """Imports what a server needs, before models are loaded, because a library may be missing."""
    try:
        import python_multipart  # noqa: F401  starlette checks for it only when it receives a form

        from ..serve.run import run
    except ModuleNotFoundError as error:
        known = ("starlette", "uvicorn", "python_multipart", "prometheus_client", "pydantic", "pydantic_core")
        if error.name not in known:
            raise
        raise ImportError(f"{error.name} not installed; install it with: pip install 'lowbit[serve]'") from error
    return run


@dataclass(frozen=True)
class _Wish:
    """How models are loaded."""

    output: Output
    template: str | None
    config: LowBitConfig | None
    max_length: int | None
    threads: int | None
    cache: str | None
    draft: Path | None
    at_once: int
    rows: int
    prefix_bytes: int
    pixels: int | None
    adapters: dict[str, Path]

    def language_model(
        self, name: str, decoder: Any, model: Any, tokenizer: Any, path: Path, stop: Iterable[int]
    ) -> LanguageModel:
        from ..llm.templates import chat_template
        from ..serve.model_list import LanguageModel

        template = self.template
        if template is None and tokenizer.chat_template:
            template = chat_template(tokenizer, path)
        return LanguageModel.of(
            name,
            decoder,
            model,
            tokenizer,
            template,
            stop,
            at_once=self.at_once,
            rows=self.rows,
            prefix_bytes=self.prefix_bytes,
        )

    def length(self, positions: int) -> int:
        """Tokens of the longest text."""
        return self.max_length or min(_CONTEXT, positions // 16 * 16)


def _load(wish: _Wish, name: str, path: Path) -> list[tuple[Model, Any]]:
    """A model and its adapters, with decoders of draft models: run by their plans if they have some, else by torch."""
    from ..serve import embeddings, speech
    from .drafts import draft_decoder, open_with_draft
    from .plans import NoPlan, missing

    output = wish.output
    path, caches = Path(from_hub(output, path) or path), None
    is_text = path.is_file() or not (speech.is_speech(path) or embeddings.is_kind(path))
    if is_text and path.is_dir() and (seeing := _load_with_images(wish, name, path)) is not None:
        return [(seeing, None)]
    if is_text and wish.config is None and not wish.adapters:
        try:
            model, draft = open_with_draft(output, path, wish.threads, wish.cache, wish.draft)
            decoder = model.decoder(wish.length(model.plan.positions))
            guesser = None if draft is None else draft_decoder(draft, model, decoder.max_length)
            return [(wish.language_model(name, decoder, model.model, model.tokenizer, model.directory, model.stop), guesser)]
        except NoPlan as reason:
            caches = missing(output, reason)
    if is_text:
        lowbit.load_torch()
        set_threads(wish.threads)
        return _load_by_torch(wish, name, path, caches)
    if wish.adapters:
        raise ValueError(f"--adapter is for language models; {path} is another model")
    loading = partial(by_torch, output, path, wish.threads)
    more: dict[str, Any] = {"threads": wish.threads, "loading": loading, "note": output.note}
    if speech.is_speech(path):
        return [(speech.load(name, path, wish.config, cache=wish.cache, **more), None)]
    return [(embeddings.load(name, path, **more), None)]


def _load_with_images(wish: _Wish, name: str, path: Path) -> ImageModel | None:
    """The model of images and text in a directory; None if it is another one, or is to be served without images."""
    from ..files.config_json import read_config

    if "vision_config" not in read_config(path):  # before transformers is imported, which takes seconds
        return None
    from .. import llm
    from ..llm.images import sees_only, takes_images
    from ..serve import image_conversations

    if not takes_images(path):
        return None
    only, others = sees_only(path), ("draft", "guesses", "prefix_cache", "adapters")
    if only:
        options.refuse_unused(f"for {path}, which takes images", *others)
    elif (given := next((each for each in others if each in options.on_command_line), None)) is not None:
        _without_images(wish, f"{path} is served without images, because of {options.on_command_line[given]}")
        return None
    lowbit.load_torch()
    set_threads(wish.threads)
    model = load(wish.output, path, wish.config, images=True)
    try:
        return image_conversations.load(
            name, path, model, max_length=wish.length(positions(model)), cache=wish.cache, template=wish.template,
            pixels=wish.pixels, at_once=wish.at_once, rows=wish.rows, prefix_bytes=wish.prefix_bytes,
        )  # fmt: skip
    except llm.Refusal as refusal:
        if only:
            raise ValueError(f"lowbit serve needs lowbit's decoder; {refusal}") from refusal
        _without_images(wish, f"{path} is served without images: {refusal}")
        return None


def _without_images(wish: _Wish, note: str) -> None:
    """Says why a model that takes images is served without them; a limit for them is then no mistake."""
    wish.output.note(note)
    options.on_command_line.pop("image_pixels", None)


def _load_by_torch(wish: _Wish, name: str, path: Path, caches: tuple[str, ...] | None) -> list[tuple[Model, Any]]:
    from .. import llm
    from ..llm.loading import load_tokenizer, stop_tokens
    from ..serve.adapters import adapted
    from .drafts import load_draft
    from .plans import keep_plan

    with imported(wish.output, path) as path:
        tokenizer = load_tokenizer(path)
        model = load(wish.output, path, wish.config)
    stop = stop_tokens(model, tokenizer)
    variants = {name: model} | {other: adapted(model, directory) for other, directory in wish.adapters.items()}
    made: list[LanguageModel] = []
    try:
        for each, variant in variants.items():
            decoder = llm.Decoder(variant, wish.length(positions(variant)), wish.cache)
            language = wish.language_model(each, decoder, variant, tokenizer, path, stop)
            language.parent = None if variant is model else name
            made.append(language)
    except llm.Refusal as refusal:
        raise ValueError(f"lowbit serve needs lowbit's decoder; {refusal}") from refusal
    base, *adapters = made
    own = base.batch.decoder
    keep_plan(wish.output, path, own, stop, caches)
    draft = wish.draft and load_draft(wish.output, wish.draft, tokenizer, name, own, wish.config, wish.cache)
    return [(base, draft), *((each, None) for each in adapters)]
