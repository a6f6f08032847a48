"""``lowbit generate``."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer

from lowbit._machine import cpp_compiler, peak_memory

from .models import (
    check_text,
    imported,
    load,
    make_decoder,
    make_prefix_cache,
    make_step,
    parse_prefix_size,
    positions,
    read_text,
    set_threads,
)
from .options import (
    PREFIX_SIZE,
    Cache,
    Compile,
    DryAllowedLength,
    DryBase,
    DryBreakers,
    DryMultiplier,
    EmbeddingBits,
    FrequencyPenalty,
    GroupSize,
    Json,
    LogitBias,
    Mapping,
    MaxLength,
    MinP,
    Model,
    OptionalBits,
    PrefixDirectory,
    PrefixSize,
    PresencePenalty,
    RepetitionPenalty,
    Stop,
    Threads,
    finite,
    make_config,
    refuse_unused,
    refuse_without_bits,
    sampling_of,
)
from .output import Output, print_piece, set_stdout_errors, size

if TYPE_CHECKING:
    from lowbit.llm import PrefixCache


def generate(
    model: Model,
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
            help='File with many texts, one a line (.jsonl: a string or {"prompt": ...}); - is stdin.',
            show_default=False,
        ),
    ] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Number of texts of --prompts in one call.")] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Largest number of new tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, callback=finite, help="0 always takes the most likely token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Sample from this number of most likely tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            callback=finite,
            help="Sample from the most likely tokens that reach this probability.",
            show_default="1",
        ),
    ] = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    dry_multiplier: DryMultiplier = None,
    dry_base: DryBase = None,
    dry_allowed_length: DryAllowedLength = None,
    dry_breaker: DryBreakers = None,
    logit_bias: LogitBias = None,
    stop: Stop = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            help="Print the log-probability of each token, and of this many alternatives.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling.")] = 0,
    guesses: Annotated[
        int | None,
        typer.Option(
            "--guesses",
            min=0,
            help="Speculative decoding: guess this number of tokens; the text is the same.",
            show_default="0; 4 with --draft",
        ),
    ] = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", help="Draft model: a smaller model with the same tokens.", show_default=False)
    ] = None,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    max_length: MaxLength = None,
    cache: Cache = None,
    prefix_cache: PrefixDirectory = None,
    prefix_cache_size: PrefixSize = PREFIX_SIZE,
    threads: Threads = None,
    compile_: Compile = False,
    as_json: Json = False,
) -> None:
    """Continue a text: the new text goes to stdout as it comes, all else to stderr."""
    from lowbit import llm
    from lowbit.llm.chat import chat_template, render
    from lowbit.llm.loading import check_tokens, load_tokenizer, stop_tokens
    from lowbit.llm.stopping import check_stop_strings

    output = Output(as_json)
    refuse_without_bits(bits, group_size, mapping, embedding_bits)
    most_bytes = parse_prefix_size(prefix_cache, prefix_cache_size)
    if prompts is None:
        refuse_unused("without --prompts", at_once=at_once != 16)
    if not temperature:
        unused = {"top_k": top_k is not None, "top_p": top_p is not None, "min_p": min_p is not None}
        refuse_unused("at --temperature 0, which draws nothing", **unused)
    if logprobs is not None and not as_json and prompts is None:
        raise typer.BadParameter("it requires --json or --prompts", param_hint="--logprobs")
    strings = check_stop_strings(check_text(text, "--stop") for text in stop or ())
    texts = _prompts(prompt, prompt_file, prompts)
    config = None if bits is None else make_config(bits, group_size, mapping, embedding_bits)
    if draft is not None and guesses == 0:
        raise typer.BadParameter("a draft needs guesses of 1 or more", param_hint="--guesses")
    guesses = (0 if draft is None else 4) if guesses is None else guesses
    if prompts is not None and (compile_ or guesses):
        raise typer.BadParameter(
            f"{'--compile' if compile_ else '--guesses'} is for one text at a time", param_hint="--prompts"
        )
    if compile_ and guesses:
        raise typer.BadParameter("compiled decoders give no logits behind guesses", param_hint="--guesses")
    if compile_:
        cpp_compiler()
    set_threads(threads)
    with imported(output, model) as model:
        loaded = load(output, model, config)
        tokenizer = load_tokenizer(model)
        template = chat_template(tokenizer, model) if chat else None
    drawn = sampling_of(tokenizer, {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "dry_multiplier": dry_multiplier, "dry_base": dry_base,
        "dry_allowed_length": dry_allowed_length, "dry_breakers": dry_breaker, "logit_bias": logit_bias,
    })  # fmt: skip
    if template is not None:
        all_ids = [render(tokenizer, [{"role": "user", "content": text}], template) for text in texts]
    else:
        all_ids = [tokenizer(text)["input_ids"] for text in texts]
    for ids in all_ids:
        check_tokens(loaded, ids, model)
    if max_length is None:
        max_length = min(-(-(max(map(len, all_ids)) + max_new_tokens) // 16), positions(loaded) // 16) * 16
    needs = {"--draft": draft is not None, "--guesses": guesses > 0, "--prompts": prompts is not None}
    step = make_step(output, loaded, max_length, compile_, cache, needs)
    kept = make_prefix_cache(output, prefix_cache, most_bytes, step)
    settings: dict[str, Any] = {
        "seed": seed, "stop": stop_tokens(loaded, tokenizer), "logprobs": logprobs
    } | drawn  # fmt: skip
    if prompts is not None:
        _many(output, model, tokenizer, step, all_ids, max_new_tokens, at_once, strings, kept, settings)
        return
    ids = all_ids[0]
    guesser = None
    if draft is not None:
        guesser = _draft(output, draft, tokenizer, model, max_length, cache)
    if not as_json:
        set_stdout_errors("replace")  # the text is for people
    written = llm.TextUntil(tokenizer, ids, strings, None if as_json else print_piece)
    caches, tokens = [] if kept is None else cast(llm.Decoder, step).caches(), list[int]()
    cached = 0 if kept is None else kept.read(ids, caches)
    try:
        generation = llm.generate(
            step, ids, max_new_tokens, max_length=max_length, guesses=guesses, draft=guesser, until=written, cached=cached,
            on_token=tokens.append, **settings,
        )  # fmt: skip
    finally:
        if kept is not None and tokens:  # also of a text that Ctrl-C ends; its last token may not have been computed
            kept.write(ids + tokens[:-1], caches)
    written.finish()
    memory = peak_memory()
    document = {
        "model": str(model),
        "text": written.text,
        "tokens": generation.tokens,
        "stopped": generation.stopped,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "prefill_tokens_per_second": generation.prefill_rate,
        "decode_tokens_per_second": generation.decode_rate,
        "decode_calls": generation.decode_calls,
        "guessed": generation.guessed,
        "right": generation.right,
        "peak_memory_bytes": memory,
        "threads": torch.get_num_threads(),
        "refusal": getattr(step, "refusal", None),
        "logprobs": None if logprobs is None else [vars(each) for each in generation.logprobs],
    }
    if not as_json:
        print(flush=True)
        decode = "" if math.isnan(generation.decode_rate) else f", decode {generation.decode_rate:.1f} tokens/s"
        if generation.guessed:
            decode += f" in {generation.decode_calls} calls, {generation.right} of {generation.guessed} guesses right"
        used = "" if memory is None else f", peak memory {size(memory)}"
        found = f" ({cached} from {kept.directory})" if kept is not None else ""
        output.note(
            f"{generation.prompt_tokens} prompt tokens{found}, prefill {generation.prefill_rate:.1f} tokens/s; "
            f"{len(generation.tokens)} new tokens{decode}{used}"
        )
    else:
        output.result(document)


def _many(
    output: Output,
    model: Path,
    tokenizer: Any,
    decoder: Callable[..., torch.Tensor],
    prompts: list[list[int]],
    max_new_tokens: int,
    at_once: int,
    strings: tuple[str, ...],
    kept: PrefixCache | None,
    settings: dict[str, Any],
) -> None:
    """Continues several texts at once, and writes each as a line of JSON when it ends."""
    from lowbit import llm
    from lowbit.llm.generation import rate

    written = [llm.TextUntil(tokenizer, prompt, strings) for prompt in prompts]

    def line(number: int, generation: llm.Generation) -> dict[str, Any]:
        return {
            "number": number,
            "text": written[number].finish(),
            "tokens": generation.tokens,
            "stopped": generation.stopped,
            "prompt_tokens": generation.prompt_tokens,
            "cached_tokens": generation.cached_tokens,
            "logprobs": None if settings["logprobs"] is None else [vars(each) for each in generation.logprobs],
        }

    def on_end(number: int, generation: llm.Generation) -> None:
        if not output.as_json:
            print(json.dumps(line(number, generation)), flush=True)

    begin = time.perf_counter()
    found = llm.generate_batch(
        cast(llm.Decoder, decoder),
        prompts,
        max_new_tokens,
        at_once=at_once,
        until=written,
        on_end=on_end,
        prefix_cache=kept,
        **settings,
    )
    seconds = time.perf_counter() - begin
    tokens, memory = sum(len(each.tokens) for each in found), peak_memory()
    if output.as_json:
        output.result(
            {
                "model": str(model),
                "texts": [line(number, each) for number, each in enumerate(found)],
                "seconds": seconds,
                "tokens_per_second": rate(tokens, seconds),
                "peak_memory_bytes": memory,
                "threads": torch.get_num_threads(),
            }
        )
        return
    used = "" if memory is None else f", peak memory {size(memory)}"
    output.note(
        f"{len(found)} texts, {sum(map(len, prompts))} prompt tokens, of which {sum(each.cached_tokens for each in found)} "
        f"were copied from another text; {tokens} new tokens, {rate(tokens, seconds):.1f} tokens/s{used}"
    )


def _draft(
    output: Output, draft: Path, tokenizer: Any, model: Path, max_length: int, cache: str | None
) -> Callable[..., torch.Tensor]:
    """The decoder of a model that guesses for another one."""
    from lowbit.llm.loading import load_tokenizer

    with imported(output, draft) as draft:
        found, expected = load_tokenizer(draft).get_vocab(), tokenizer.get_vocab()
        if found != expected:
            other = min(token for token in found.keys() | expected if found.get(token) != expected.get(token))
            raise ValueError(
                f"{draft} has other tokens than {model}, {other!r} for example, and cannot guess them; expected a smaller "
                "model of the same family"
            )
        loaded = load(output, draft, None)
    if positions(loaded) < max_length:
        raise ValueError(f"{draft} is made for {positions(loaded)} tokens; expected {max_length} or more, as --max-length")
    return make_decoder(output, loaded, max_length, False, cache)


def _prompts(prompt: str | None, prompt_file: Path | None, prompts: Path | None) -> list[str]:
    if sum(each is not None for each in (prompt, prompt_file, prompts)) != 1:
        raise typer.BadParameter("give one of the three", param_hint="--prompt, --prompt-file, --prompts")
    if prompts is not None:
        return _lines(prompts, _read(prompts))
    if prompt_file is None and prompt not in (None, "-"):
        return [check_text(prompt, "--prompt")]
    return [_read(prompt_file)]


def _read(path: Path | None) -> str:
    return check_text(sys.stdin.read(), "stdin") if path is None or str(path) == "-" else read_text(path)


def _lines(path: Path, content: str) -> list[str]:
    """The texts of a file of --prompts; empty lines are none."""
    found = []
    for number, line in enumerate(content.split("\n"), 1):  # not splitlines, to which U+2028 and others end one, too
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
        found.append(text)
    if not found:
        raise ValueError(f"{path} has no prompts; expected one a line")
    return found
