"""``lowbit chat``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit._machine import cpp_compiler

from . import options
from .models import (
    check_text,
    imported,
    load,
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
)
from .output import Output, describe, print_piece, set_stdout_errors

if TYPE_CHECKING:
    from lowbit.llm.chat import Answer, Chat

_CONTEXT = 4096  # tokens, unless the model has fewer or --max-length says otherwise
_NEW = 1024
_HELP = """\
/reset           begins anew, with the same system prompt
/system TEXT     begins anew, with this system prompt; without TEXT with none
/help            this
/quit            ends, as Ctrl-D does
Ctrl-C stops an answer, or clears the line. Alt-Enter begins a new line. Arrow keys bring earlier messages back."""


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.", show_default=False)] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="Chat template, a Jinja file, instead of the model's.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0, callback=finite, help="0 always takes the most likely token.", show_default="the model's"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="Sample from this number of most likely tokens.", show_default="the model's"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            callback=finite,
            help="Sample from the most likely tokens that reach this probability.",
            show_default="the model's",
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
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling, for the first answer.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="New tokens per answer.", show_default=f"the model's, or {_NEW}"),
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
    """Talk with a model: answers go to stdout as they come, all else to stderr."""
    from lowbit.llm.chat import Chat, chat_template, sampling_of
    from lowbit.llm.loading import load_tokenizer, stop_tokens
    from lowbit.llm.stopping import check_stop_strings

    output = Output(as_json)
    refuse_without_bits(bits, group_size, mapping, embedding_bits)
    most_bytes = parse_prefix_size(prefix_cache, prefix_cache_size)
    asked = _typed(output) if sys.stdin.isatty() else _piped()  # first, in case a library is missing
    system = None if system is None else check_text(system, "--system")
    strings = check_stop_strings(check_text(each, "--stop") for each in stop or ())
    text = None if template is None else read_text(template)
    config = None if bits is None else make_config(bits, group_size, mapping, embedding_bits)
    if compile_:
        cpp_compiler()
    set_threads(threads)
    with imported(output, model) as model:
        tokenizer = load_tokenizer(model)
        text = chat_template(tokenizer, model) if text is None else text
        loaded = load(output, model, config)
    sampling, most, ignored = sampling_of(loaded)
    given = options.sampling_of(tokenizer, {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "dry_multiplier": dry_multiplier, "dry_base": dry_base,
        "dry_allowed_length": dry_allowed_length, "dry_breakers": dry_breaker, "logit_bias": logit_bias,
    })  # fmt: skip
    sampling = replace(sampling, **given)
    sampling.check_vocabulary(loaded.config.get_text_config().vocab_size)
    if not sampling.temperature:
        unused = {name: name in given for name in ("top_k", "top_p", "min_p")}
        refuse_unused("at --temperature 0, which draws nothing", **unused)
    if ignored:
        output.warn(f"generation_config.json of {model} sets {', '.join(ignored)}, which lowbit does not do")
    if max_length is None:
        max_length = min(_CONTEXT, positions(loaded) // 16 * 16)
    step = make_step(output, loaded, max_length, compile_, cache)
    kept = make_prefix_cache(output, prefix_cache, most_bytes, step)
    talk = Chat(
        step, loaded, tokenizer, text, max_length,
        system=system, sampling=sampling, max_new_tokens=max_new_tokens or most or _NEW, seed=seed,
        stop=stop_tokens(loaded, tokenizer), stop_strings=strings, prefix_cache=kept,
    )  # fmt: skip
    talk.check()
    if not as_json:
        set_stdout_errors("replace")  # the text is for people
    if sys.stdin.isatty():
        output.note(f"{model}, {max_length} tokens of context; /help lists the commands, Ctrl-D ends")
    with _at_ctrl_c(_nothing) if sys.stdin.isatty() else nullcontext():
        answers = list(_converse(output, talk, asked))
    document = {
        "model": str(model),
        "system": talk.system,
        "max_length": max_length,
        "refusal": getattr(step, "refusal", None),
        "sampling": vars(sampling) | {"stop": strings, "seed": seed, "max_new_tokens": talk.max_new_tokens},
        "turns": [
            {
                "message": message,
                "answer": answer.text,
                "tokens": answer.tokens,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "stopped": answer.stopped,
                "forgotten_turns": answer.forgotten,
                "seconds": answer.seconds,
            }
            for message, answer in answers
        ],
    }
    output.result(document)


def _piped() -> Iterator[str]:
    """Lines of stdin, each a message."""
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed(output: Output) -> Iterator[str]:
    """What is typed, line by line, with a history for the arrow keys."""
    try:
        toolkit: Any = import_module("prompt_toolkit")
        bindings = import_module("prompt_toolkit.key_binding").KeyBindings()
        stream = sys.stderr if sys.stderr.isatty() else sys.stdout
        terminal = import_module("prompt_toolkit.output").create_output(stream)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} not installed, which reads what is typed; install it with: pip install 'lowbit[llm]' (or "
            "pipe the messages into lowbit chat, one a line)"
        ) from error

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session = toolkit.PromptSession(key_bindings=bindings, output=terminal)

    def lines() -> Iterator[str]:
        with _modes_kept():
            while True:
                try:
                    yield session.prompt("> ")
                except KeyboardInterrupt:
                    continue  # the line is cleared
                except EOFError:
                    return

    return lines()


@contextmanager
def _modes_kept() -> Iterator[None]:
    """Leaves the terminal's modes as they were, also if a signal comes in the moment in which prompt_toolkit changes them."""
    try:
        termios: Any = import_module("termios")
    except ModuleNotFoundError:  # Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _converse(output: Output, talk: Chat, asked: Iterator[str]) -> Iterator[tuple[str, Answer]]:
    """Answers messages until they end, or one is /quit."""
    typed = sys.stdin.isatty()
    for message in asked:
        if message in ("/quit", "/exit"):
            return
        try:
            if message.startswith("/"):
                _command(output, talk, message)
            elif message.strip():
                yield message, _answer(output, talk, message)
        except ValueError as error:
            if not typed:
                raise
            output.warn(describe(error))


def _command(output: Output, talk: Chat, message: str) -> None:
    name, _, rest = message.partition(" ")
    if name == "/reset":
        talk.reset(talk.system)
        output.note("(begun anew)")
    elif name == "/system":
        talk.reset(rest.strip() or None)
        output.note("(begun anew, with this system prompt)" if rest.strip() else "(begun anew, without system prompt)")
    elif name == "/help":
        output.note(_HELP)
    else:
        raise ValueError(f"there is no command {name}; /help lists them. A space before the / makes it a message")


def _answer(output: Output, talk: Chat, message: str) -> Answer:
    typed = sys.stdin.isatty()
    try:
        with _at_ctrl_c(_stop) if typed else nullcontext():
            answer = talk.answer(message, None if output.as_json else print_piece)
    except KeyboardInterrupt:
        if not typed:
            raise
        raise ValueError("stopped before the answer: the message was removed from the conversation") from None
    if answer.stopped == "interrupted" and not typed:
        raise KeyboardInterrupt  # as in every command
    if not output.as_json:
        print(flush=True)
    if answer.forgotten:
        output.note(
            f"(the context of {talk.max_length} tokens was full: the model has forgotten the oldest turns, "
            f"{answer.forgotten} of them)"
        )
    if answer.stopped == "max_length":
        output.note(f"(the context of {talk.max_length} tokens is full: the answer ends here)")
    elif answer.stopped == "max_new_tokens":
        output.note(f"(cut off after {talk.max_new_tokens} tokens, see --max-new-tokens)")
    elif answer.stopped == "interrupted":
        output.note(
            "(stopped)" if answer.tokens else "(stopped before the answer: the message was removed from the conversation)"
        )
    return answer


def _nothing(number: int, frame: Any) -> None:
    """Between answers a late Ctrl-C has nothing to stop; at the prompt it is a key."""


def _stop(number: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, _nothing)  # once is enough
    raise KeyboardInterrupt


@contextmanager
def _at_ctrl_c(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
