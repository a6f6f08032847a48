"""``lowbit generate``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit._machine import cpp_compiler, peak_memory

from .models import imported, load, make_decoder, make_step, positions, read_text, set_threads
from .options import (
    Compile,
    EmbeddingBits,
    GroupSize,
    Json,
    Mapping,
    MaxLength,
    Model,
    OptionalBits,
    Threads,
    finite,
    make_config,
)
from .output import Output, set_stdout_errors, size


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="File with the text to continue; - is stdin.", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, callback=finite, help="0 takes the most likely token, always.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Draw from so many tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            callback=finite,
            help="Draw from the likeliest that reach this probability.",
            show_default="1",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    guesses: Annotated[
        int | None,
        typer.Option(
            "--guesses",
            min=0,
            help="Guess so many tokens from the text before; the text is the same.",
            show_default="0; 4 with --draft",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option("--draft", help="A smaller model with the same tokens, which guesses instead.", show_default=False),
    ] = None,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    max_length: MaxLength = None,
    threads: Threads = None,
    compile_: Compile = False,
    as_json: Json = False,
) -> None:
    """Continue a text: the new text goes to stdout as it comes, all else to stderr."""
    from lowbit import llm
    from lowbit.llm.chat import chat_template, render
    from lowbit.llm.loading import TextStream, check_tokens, load_tokenizer, stop_tokens

    output = Output(as_json)
    model = imported(output, model)
    text = _prompt(prompt, prompt_file)
    config = None if bits is None else make_config(bits, group_size, mapping, embedding_bits)
    if draft is not None and guesses == 0:
        raise typer.BadParameter("a draft needs guesses of 1 or more", param_hint="--guesses")
    guesses = (0 if draft is None else 4) if guesses is None else guesses
    if compile_ and guesses:
        raise typer.BadParameter("compiled decoders give no logits behind guesses", param_hint="--guesses")
    if compile_:
        cpp_compiler()
    set_threads(threads)
    loaded = load(output, model, config)
    tokenizer = load_tokenizer(model)
    if chat:
        ids = render(tokenizer, [{"role": "user", "content": text}], chat_template(tokenizer, model))
    else:
        ids = tokenizer(text)["input_ids"]
    check_tokens(loaded, ids, model)
    if max_length is None:
        max_length = min(-(-(len(ids) + max_new_tokens) // 16), positions(loaded) // 16) * 16
    needs = {"--draft": draft is not None, "--guesses": guesses > 0}
    step = make_step(output, loaded, max_length, compile_, needs)
    guesser = None if draft is None else _draft(output, imported(output, draft), tokenizer, model, max_length)
    stream, pieces = TextStream(tokenizer, ids), []
    if not as_json:
        set_stdout_errors("replace")  # the text is for people

    def on_token(token: int) -> None:
        pieces.append(stream.push(token))
        if not as_json:
            print(pieces[-1], end="", flush=True)

    generation = llm.generate(
        step,
        ids,
        max_new_tokens,
        max_length=max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop_tokens(loaded, tokenizer),
        guesses=guesses,
        draft=guesser,
        on_token=on_token,
    )
    memory = peak_memory()
    document = {
        "model": str(model),
        "text": "".join(pieces),
        "tokens": generation.tokens,
        "stopped": generation.stopped,
        "prompt_tokens": generation.prompt_tokens,
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
    }
    if not as_json:
        print(flush=True)
        decode = "" if math.isnan(generation.decode_rate) else f", decode {generation.decode_rate:.1f} tokens/s"
        if generation.guessed:
            decode += f" in {generation.decode_calls} calls, {generation.right} of {generation.guessed} guesses right"
        used = "" if memory is None else f", peak memory {size(memory)}"
        output.note(
            f"{generation.prompt_tokens} prompt tokens, prefill {generation.prefill_rate:.1f} tokens/s; "
            f"{len(generation.tokens)} new tokens{decode}{used}"
        )
    else:
        output.result(document)


def _draft(output: Output, draft: Path, tokenizer, model: Path, max_length: int):
    """The decoder of a model that guesses for another one."""
    from lowbit.llm.loading import load_tokenizer

    found, expected = load_tokenizer(draft).get_vocab(), tokenizer.get_vocab()
    if found != expected:
        other = min(token for token in found.keys() | expected if found.get(token) != expected.get(token))
        raise ValueError(
            f"{draft} has other tokens than {model}, {other!r} for example, and cannot guess them; expected a smaller model of "
            "the same family"
        )
    loaded = load(output, draft, None)
    if positions(loaded) < max_length:
        raise ValueError(f"{draft} is made for {positions(loaded)} tokens; expected {max_length} or more, as --max-length")
    return make_decoder(output, loaded, max_length, False)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give one of --prompt and --prompt-file", param_hint="--prompt")
    if prompt == "-" or str(prompt_file) == "-":
        return sys.stdin.read()
    return read_text(prompt_file) if prompt_file is not None else prompt or ""
