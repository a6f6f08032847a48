"""``lowbit generate``."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..machine.facts import peak_memory
from . import options
from .models import read_text
from .output import Output, print_piece, set_stdout_errors, size
from .session import Session, open_session

if TYPE_CHECKING:
    from ..llm import Generation

_OBJECT = re.compile(r'\s*\{\s*"prompt"\s*:')


def generate(
    output: Output,
    model: options.Model,
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="File with the text to continue; - is stdin.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='File with many texts, one per line (.jsonl: a string or {"prompt": ...}); - is stdin.',
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Number of texts of --prompts in one call.")] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template, as --image always does.")] = False,
    image: options.Images = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Largest number of new tokens.")] = 128,
    sampling: options.GreedySampling,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", min=0, help="Print the log-probability of each token, and of this many alternatives.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling.")] = 0,
    speculation: options.Speculation,
    running: options.Running,
) -> None:  # fmt: skip
    """Continue a text: the new text goes to stdout as it comes, all else to stderr."""
    if prompts is None:
        options.refuse_unused("without --prompts", "at_once")
    if not sampling.temperature:
        options.refuse_unused("at --temperature 0, which always takes the most likely token", "top_k", "top_p", "min_p")
    if logprobs is not None and not output.as_json and prompts is None:
        raise typer.BadParameter("it requires --json or --prompts", param_hint="--logprobs")
    guesses = speculation.count
    if prompts is not None and (running.compile or guesses):
        raise typer.BadParameter(
            f"{'--compile' if running.compile else '--guesses'} is for one text at a time", param_hint="--prompts"
        )
    if running.compile and guesses:
        raise typer.BadParameter("compiled decoders give no logits for guesses", param_hint="--guesses")
    texts = _read_prompts(prompt, prompt_file, prompts)
    needs = {"--draft": speculation.draft is not None, "--guesses": guesses > 0, "--prompts": prompts is not None}
    session = open_session(
        output, model, running, sampling, needs, has_turns=chat or bool(image), images=image or (), draft=speculation.draft
    )
    ids = [session.prompt(text) for text in texts]
    max_length = running.max_length
    if max_length is None:
        needed = max(map(len, ids)) + max_new_tokens
        if running.compile:  # round to few lengths, so that cached machine code fits most prompts
            needed = max(1024, 1 << (needed - 1).bit_length())
        max_length = min(-(-needed // 16), session.positions // 16) * 16
    session.start(max_length)
    settings = session.sampling | {"seed": seed, "stop": session.stop, "logprobs": logprobs}
    if prompts is not None:
        _generate_batch(session, ids, max_new_tokens, at_once, settings)
    else:
        guesser = None if speculation.draft is None else session.draft(speculation.draft)
        _generate(session, ids[0], max_new_tokens, {"guesses": guesses, "draft": guesser, **settings})
    session.keep_plan()


def _generate(session: Session, ids: list[int], max_new_tokens: int, settings: dict[str, Any]) -> None:
    """Continues a text and prints it as it is generated, or a JSON document at the end."""
    from ..llm.generation import generate as generate_text
    from ..llm.stopping import TextUntil

    output = session.output
    if not output.as_json:
        set_stdout_errors("replace")  # the output is for people
    text = TextUntil(session.tokenizer, ids, session.strings, None if output.as_json else print_piece)
    disk, tokens = session.prefix_cache, list[int]()
    caches = [] if disk is None else session.step.caches()
    cached = 0 if disk is None else disk.read(ids, caches)
    try:
        generation = generate_text(
            session.step, ids, max_new_tokens, max_length=session.max_length, until=text, cached=cached, on_token=tokens.append,
            **settings,
        )  # fmt: skip
    finally:
        if disk is not None and tokens:  # also after Ctrl-C; the last token may not be in the caches
            disk.write(ids + tokens[:-1], caches)
    text.finish()
    memory = peak_memory()
    if output.as_json:
        document = {
            "model": str(session.path),
            "text": text.text,
            "cached_tokens": generation.cached_tokens,
            **_figures(generation, settings["logprobs"]),
            "prefill_seconds": generation.prefill_seconds,
            "decode_seconds": generation.decode_seconds,
            "prefill_tokens_per_second": generation.prefill_rate,
            "decode_tokens_per_second": generation.decode_rate,
            "decode_calls": generation.decode_calls,
            "guessed": generation.guessed,
            "accepted": generation.accepted,
            "peak_memory_bytes": memory,
            "threads": session.threads,
            "refusal": session.refusal,
        }
        output.result(document)
        return
    print(flush=True)
    decode = "" if math.isnan(generation.decode_rate) else f", decode {generation.decode_rate:.1f} tokens/s"
    if generation.guessed:
        decode += f" in {generation.decode_calls} calls, {generation.accepted} of {generation.guessed} guesses accepted"
    source = f" ({cached} from {disk.directory})" if disk is not None else ""
    output.note(
        f"{generation.prompt_tokens} prompt tokens{source}, prefill {generation.prefill_rate:.1f} tokens/s; "
        f"{len(generation.tokens)} new tokens{decode}{_memory_used(memory)}"
    )


def _figures(generation: Generation, logprobs: int | None) -> dict[str, Any]:
    """The fields common to the JSON documents of one text and of several."""
    return {
        "tokens": generation.tokens,
        "stopped": generation.stopped,
        "prompt_tokens": generation.prompt_tokens,
        "logprobs": None if logprobs is None else [vars(token) for token in generation.logprobs],
    }


def _memory_used(memory: int | None) -> str:
    return "" if memory is None else f", peak memory {size(memory)}"


def _generate_batch(
    session: Session, prompts: list[list[int]], max_new_tokens: int, at_once: int, settings: dict[str, Any]
) -> None:
    """Continues several texts at once, and prints each as a line of JSON when it ends."""
    from .. import llm
    from ..llm.generation import rate

    output = session.output
    texts = [llm.TextUntil(session.tokenizer, prompt, session.strings) for prompt in prompts]

    def document(number: int, generation: Generation) -> dict[str, Any]:
        figures = {"cached_tokens": generation.cached_tokens, **_figures(generation, settings["logprobs"])}
        return {"number": number, "text": texts[number].finish(), **figures}

    def on_end(number: int, generation: Generation) -> None:
        if not output.as_json:
            print(json.dumps(document(number, generation)), flush=True)

    begin = time.perf_counter()
    generations = llm.generate_batch(
        session.step,
        prompts,
        max_new_tokens,
        at_once=at_once,
        until=texts,
        on_end=on_end,
        prefix_cache=session.prefix_cache,
        **settings,
    )
    seconds = time.perf_counter() - begin
    tokens, memory = sum(len(generation.tokens) for generation in generations), peak_memory()
    if output.as_json:
        output.result(
            {
                "model": str(session.path),
                "texts": [document(number, generation) for number, generation in enumerate(generations)],
                "seconds": seconds,
                "tokens_per_second": rate(tokens, seconds),
                "peak_memory_bytes": memory,
                "threads": session.threads,
            }
        )
        return
    cached = sum(generation.cached_tokens for generation in generations)
    output.note(
        f"{len(generations)} texts, {sum(map(len, prompts))} prompt tokens, of which {cached} were copied from another text; "
        f"{tokens} new tokens, {rate(tokens, seconds):.1f} tokens/s{_memory_used(memory)}"
    )


def _read_prompts(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> list[str]:
    if sum(source is not None for source in (prompt, prompt_file, prompts)) != 1:
        raise typer.BadParameter("expected exactly one of the three", param_hint="--prompt, --prompt-file, --prompts")
    if prompts is not None:
        return _lines(prompts, _read(prompts))
    if prompt_file is None and prompt not in (None, "-"):
        return [options.check_text(prompt, "--prompt")]
    return [_read(prompt_file)]


def _read(path: Path | None) -> str:
    if path is None or str(path) == "-":
        return options.check_text(sys.stdin.read(), "stdin").removeprefix("\ufeff")
    return read_text(path)


def _lines(path: Path, content: str) -> list[str]:
    """The prompts in a file of --prompts, without empty lines."""
    texts = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would also split at U+2028 and others
        if not line.strip():
            continue
        text: Any = line
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            try:
                text = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
            text = text.get("prompt") if isinstance(text, dict) else text
            if not isinstance(text, str):
                raise ValueError(f'line {number} of {path} has no text; expected a string, or an object with a "prompt"')
        elif _OBJECT.match(line):
            raise ValueError(
                f"line {number} of {path} is an object with a prompt; expected texts, or a file whose name ends in .jsonl"
            )
        texts.append(options.check_text(text, f"line {number} of {path}"))
    if not texts:
        raise ValueError(f"{path} has no prompts; expected one per line")
    return texts
