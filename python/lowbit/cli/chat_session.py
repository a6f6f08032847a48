"""``lowbit chat``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .models import read_text
from .output import Output, describe, print_piece, set_stdout_errors
from .session import Session, open_session

if TYPE_CHECKING:
    from ..llm.chat import Answer, Chat

_CONTEXT = 4096  # tokens, unless the model has fewer or --max-length says otherwise
_NEW_TOKENS = 1024
_HELP = """\
/reset           starts a new conversation with the same system prompt
/system TEXT     starts a new conversation with this system prompt, or without one
/image FILE      shows the model an image with the next message
/help            this list
/quit            ends the chat, as Ctrl-D does
Ctrl-C stops an answer, or clears the line. Alt-Enter begins a new line. Arrow keys bring earlier messages back."""


def chat(
    output: Output,
    model: options.Model,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.", show_default=False)] = None,
    template: options.Template = None,
    image: options.Images = None,
    sampling: options.Sampling,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling, for the first answer.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="New tokens per answer.", show_default=f"the model's, or {_NEW_TOKENS}"),
    ] = None,
    running: options.Running,
) -> None:
    """Talk with a model: answers go to stdout as they come, all else to stderr."""
    messages = _typed(output) if sys.stdin.isatty() else _piped()  # first, to report a missing library early
    system = None if system is None else options.check_text(system, "--system")
    text = None if template is None else read_text(template)
    session = open_session(output, model, running, sampling, template=text, images=image or ())
    conversation = _start(session, system, seed, max_new_tokens)
    with _at_ctrl_c(_ignore) if sys.stdin.isatty() else nullcontext():
        answers = list(_converse(output, conversation, messages))
    output.result(_document(session, conversation, answers))
    session.keep_plan()


def _start(session: Session, system: str | None, seed: int, max_new_tokens: int | None) -> Chat:
    """A conversation with the settings of the model's files, which options override."""
    from ..llm.chat import Chat, sampling_of

    output, model = session.output, session.model
    sampling, most, ignored = sampling_of(model)
    sampling = replace(sampling, **session.sampling)
    sampling.check_vocabulary(model.config.get_text_config().vocab_size)
    if not sampling.temperature:
        options.refuse_unused("at --temperature 0, which always takes the most likely token", "top_k", "top_p", "min_p")
    if ignored:
        output.warn(f"generation_config.json of {session.path} sets {', '.join(ignored)}, which lowbit does not support")
    session.start(session.running.max_length or min(_CONTEXT, session.positions // 16 * 16))
    kind: Any = Chat
    if session.processor is not None:
        from ..llm.images import ImageChat as kind
    more = {} if session.processor is None else {"processor": session.processor, "pending": session.images}
    conversation: Chat = kind(
        session.step, model, session.tokenizer, str(session.template), session.max_length, system=system, sampling=sampling,
        max_new_tokens=max_new_tokens or most or _NEW_TOKENS, seed=seed, stop=session.stop, stop_strings=session.strings,
        prefix_cache=session.prefix_cache, **more,
    )  # fmt: skip
    conversation.check()
    if not output.as_json:
        set_stdout_errors("replace")  # the output is for people
    if sys.stdin.isatty():
        output.note(f"{session.path}, {session.max_length} tokens of context; /help lists the commands, Ctrl-D ends")
    return conversation


def _document(session: Session, conversation: Chat, answers: list[tuple[str, Answer]]) -> dict[str, Any]:
    settings = {"stop": session.strings, "seed": conversation.seed, "max_new_tokens": conversation.max_new_tokens}
    return {
        "model": str(session.path),
        "system": conversation.system,
        "max_length": session.max_length,
        "refusal": session.refusal,
        "sampling": vars(conversation.sampling) | settings,
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


def _piped() -> Iterator[str]:
    """Yields the lines of stdin; each is a message."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # _converse refuses such a message in a sentence
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed(output: Output) -> Iterator[str]:
    """Yields messages typed in the terminal, with line editing and a history."""
    try:
        toolkit: Any = import_module("prompt_toolkit")
        bindings = import_module("prompt_toolkit.key_binding").KeyBindings()
        stream = sys.stderr if sys.stderr.isatty() else sys.stdout
        terminal = import_module("prompt_toolkit.output").create_output(stream)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} not installed, and typing messages needs it; install it with: pip install prompt_toolkit "
            "(or pipe the messages into lowbit chat, one per line)"
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
                    continue  # Ctrl-C clears the line
                except EOFError:
                    return

    return lines()


@contextmanager
def _modes_kept() -> Iterator[None]:
    """A context that restores the terminal's modes, even if a signal interrupts prompt_toolkit while it changes them."""
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


def _converse(output: Output, conversation: Chat, messages: Iterator[str]) -> Iterator[tuple[str, Answer]]:
    """Answers messages up to the last one or /quit."""
    typed = sys.stdin.isatty()
    for message in messages:
        if message in ("/quit", "/exit"):
            return
        try:
            message = options.check_text(message, "the message")
            if message.startswith("/"):
                _command(output, conversation, message)
            elif message.strip():
                yield message, _answer(output, conversation, message)
        except ValueError as error:
            if not typed:
                raise
            output.warn(describe(error))


def _command(output: Output, conversation: Chat, message: str) -> None:
    name, _, rest = message.partition(" ")
    if name == "/reset":
        conversation.reset(conversation.system)
        output.note("(new conversation)")
    elif name == "/system":
        conversation.reset(rest.strip() or None)
        output.note(
            "(new conversation with this system prompt)" if rest.strip() else "(new conversation without system prompt)"
        )
    elif name == "/image":
        show = getattr(conversation, "show", None)
        if show is None:
            raise ValueError("this model takes no images")
        show(Path(rest.strip()))
        output.note("(the model sees it with the next message)")
    elif name == "/help":
        output.note(_HELP)
    else:
        raise ValueError(f"there is no command {name}; /help lists them. A space before the / makes it a message")


def _answer(output: Output, conversation: Chat, message: str) -> Answer:
    typed = sys.stdin.isatty()
    try:
        with _at_ctrl_c(_stop) if typed else nullcontext():
            answer = conversation.answer(message, None if output.as_json else print_piece)
    except KeyboardInterrupt:
        if not typed:
            raise
        raise ValueError("stopped before the answer: the message was removed from the conversation") from None
    if answer.stopped == "interrupted" and not typed:
        raise KeyboardInterrupt  # ends the program, as in every command
    if not output.as_json:
        print(flush=True)
    if answer.forgotten:
        output.note(
            f"(the context of {conversation.max_length} tokens was full: the {answer.forgotten} oldest turns were dropped)"
        )
    if answer.stopped == "max_length":
        output.note(f"(the context of {conversation.max_length} tokens is full: the answer ends here)")
    elif answer.stopped == "max_new_tokens":
        output.note(f"(cut off after {conversation.max_new_tokens} tokens, see --max-new-tokens)")
    elif answer.stopped == "interrupted":
        output.note(
            "(stopped)" if answer.tokens else "(stopped before the answer: the message was removed from the conversation)"
        )
    return answer


def _ignore(number: int, frame: Any) -> None:
    """Ignores Ctrl-C between answers; at the prompt, prompt_toolkit handles it as a key."""


def _stop(number: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, _ignore)  # ignore further ones
    raise KeyboardInterrupt


@contextmanager
def _at_ctrl_c(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
