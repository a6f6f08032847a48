"""``lowbit generate``."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer

from ..machine.facts import peak_memory
from . import options
from .models import check_text, positions, read_text
from .output import Output, print_piece, set_stdout_errors, size
from .session import Session

if TYPE_CHECKING:
    from ..llm import Generation

_Prompt = Annotated[
    str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.", show_default=False)
]  # fmt: skip
_PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", help="File with the text to continue; - is stdin.", show_default=False)
]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help='File with many texts, one a line (.jsonl: a string or {"prompt": ...}); - is stdin.',
        show_default=False,
    ),
]
_AtOnce = Annotated[int, typer.Option("--at-once", min=1, help="Number of texts of --prompts in one call.")]
_Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template; --image does, too.")]
_MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Largest number of new tokens.")]
_Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", min=0, help="Print the log-probability of each token, and of this many alternatives.", show_default=False
    ),
]
_Seed = Annotated[int, typer.Option("--seed", help="Seed of sampling.")]


def generate(
    model: options.Model,
    prompt: _Prompt = None,
    prompt_file: _PromptFile = None,
    prompts: _Prompts = None,
    at_once: _AtOnce = 16,
    chat: _Chat = False,
    image: options.Images = None,
    max_new_tokens: _MaxNewTokens = 128,
    temperature: Annotated[float, options.temperature_option("0")] = 0.0,
    top_k: Annotated[int | None, options.top_k_option("all")] = None,
    top_p: Annotated[float | None, options.top_p_option("1")] = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    dry_breakers: options.DryBreakers = None,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    logprobs: _Logprobs = None,
    seed: _Seed = 0,
    guesses: options.Guesses = None,
    draft: options.Draft = None,
    bits: options.OptionalBits = None,
    group_size: options.GroupSize = "32",
    mapping: options.Mapping = "symmetric",
    embedding_bits: options.EmbeddingBits = None,
    max_length: options.MaxLength = None,
    cache: options.Cache = None,
    prefix_cache: options.PrefixDirectory = None,
    prefix_cache_size: options.PrefixSize = options.PREFIX_SIZE,
    expert_memory: options.ExpertMemory = None,
    threads: options.Threads = None,
    compile_: options.Compile = False,
    as_json: options.Json = False,
) -> None:
    """Continue a text: the new text goes to stdout as it comes, all else to stderr."""
    sampling = options.sampling_in(locals())
    output = Output(as_json)
    config = options.optional_config(bits, group_size, mapping, embedding_bits)
    _check_sampling(as_json, prompts, at_once, temperature, logprobs, {"top_k": top_k, "top_p": top_p, "min_p": min_p})
    guesses = _check_guesses(guesses, draft, prompts, compile_)
    texts = _read_prompts(prompt, prompt_file, prompts)
    session = Session(
        output, model, config, stop=stop, compiled=compile_, cache=cache, threads=threads, prefix_cache=prefix_cache,
        prefix_cache_size=prefix_cache_size, expert_memory=expert_memory,
    )  # fmt: skip
    needs = {"--draft": draft is not None, "--guesses": guesses > 0, "--prompts": prompts is not None}
    session.load(sampling, has_turns=chat or bool(image), images=image or (), needs=needs)
    ids = [session.prompt(text) for text in texts]
    if max_length is None:
        needed = max(map(len, ids)) + max_new_tokens
        if compile_:  # round to few lengths, so that cached machine code fits most prompts
            needed = max(1024, 1 << (needed - 1).bit_length())
        max_length = min(-(-needed // 16), positions(session.model) // 16) * 16
    session.start(max_length, needs)
    settings = session.sampling | {"seed": seed, "stop": session.stop, "logprobs": logprobs}
    if prompts is not None:
        _generate_batch(session, ids, max_new_tokens, at_once, settings)
        return
    guesser = None if draft is None else session.draft(draft)
    _generate(session, ids[0], max_new_tokens, {"guesses": guesses, "draft": guesser, **settings})


def _check_sampling(
    as_json: bool, prompts: Path | None, at_once: int, temperature: float, logprobs: int | None, draws: dict[str, Any]
) -> None:
    """Refuses sampling options without effect; ``draws`` are options that only affect random draws."""
    if prompts is None:
        options.refuse_unused("without --prompts", at_once=at_once != 16)
    if not temperature:
        options.refuse_unused(
            "at --temperature 0, which draws nothing", **{name: value is not None for name, value in draws.items()}
        )
    if logprobs is not None and not as_json and prompts is None:
        raise typer.BadParameter("it requires --json or --prompts", param_hint="--logprobs")


def _check_guesses(guesses: int | None, draft: Path | None, prompts: Path | None, compiled: bool) -> int:
    """The number of draft tokens, checked against the other options."""
    guesses = options.number_of_guesses(guesses, draft)
    if prompts is not None and (compiled or guesses):
        raise typer.BadParameter(
            f"{'--compile' if compiled else '--guesses'} is for one text at a time", param_hint="--prompts"
        )
    if compiled and guesses:
        raise typer.BadParameter("compiled decoders give no logits for guesses", param_hint="--guesses")
    return guesses


def _generate(session: Session, ids: list[int], max_new_tokens: int, settings: dict[str, Any]) -> None:
    """Continues a text and prints it as it is generated, or a JSON document at the end."""
    from .. import llm

    output = session.output
    if not output.as_json:
        set_stdout_errors("replace")  # the output is for people
    text = llm.TextUntil(session.tokenizer, ids, session.strings, None if output.as_json else print_piece)
    disk, tokens = session.prefix_cache, list[int]()
    caches = [] if disk is None else cast(llm.Decoder, session.step).caches()
    cached = 0 if disk is None else disk.read(ids, caches)
    try:
        generation = llm.generate(
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
            "threads": torch.get_num_threads(),
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
        cast(llm.Decoder, session.step),
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
                "threads": torch.get_num_threads(),
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
        raise typer.BadParameter("give one of the three", param_hint="--prompt, --prompt-file, --prompts")
    if prompts is not None:
        return _lines(prompts, _read(prompts))
    if prompt_file is None and prompt not in (None, "-"):
        return [check_text(prompt, "--prompt")]
    return [_read(prompt_file)]


def _read(path: Path | None) -> str:
    return check_text(sys.stdin.read(), "stdin") if path is None or str(path) == "-" else read_text(path)


def _lines(path: Path, content: str) -> list[str]:
    """The prompts in a file of --prompts, without empty lines."""
    texts = []
    for number, line in enumerate(content.split("\n"), 1):  # splitlines would also split at U+2028 and others
        if not line.strip():
            continue
        text: Any = line
        if path.suffix == ".jsonl":
            try:
                text = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
            text = text.get("prompt") if isinstance(text, dict) else text
            if not isinstance(text, str):
                raise ValueError(f'line {number} of {path} has no text; expected a string, or an object with a "prompt"')
        texts.append(text)
    if not texts:
        raise ValueError(f"{path} has no prompts; expected one a line")
    return texts
