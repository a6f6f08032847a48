"""Chat templates as pieces of text between the messages, for programs without jinja."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

from .token_patterns import NONE, Unsupported
from .token_steps import Tables, python_spaces

_STRIPS: dict[int, Callable[[str], str]] = {  # by their numbers in ChatPieces::Strip
    0: lambda text: text, 1: str.strip, 2: str.lstrip, 3: str.rstrip,
    5: lambda text: text.lstrip("\n"), 6: lambda text: text.strip("\n"),
}  # fmt: skip
_CUTS: tuple[Callable[[str], str], ...] = (  # ChatPieces::Cut
    lambda text: text,
    lambda text: text.rpartition(_THINKING_ENDS)[2],
    lambda text: text.partition(_THINKING_ENDS)[2] if _THINKING_ENDS in text else text,
)
_THINKING_ENDS = "</think>"
_NOT_EMPTY, _LATER = 256, 65536
_DATE = re.compile("\ue000(.*?)\ue001", re.DOTALL)
_MESSAGES = (
    "Hi", " What is 2 + 2?\n", "", "\U0001f600 東京 שלום", "\n\n  a\tb  \n\n", "<think>\nwell\n</think>\n\nTwo\n",
    "\u3000\x1f x \x85", "First <b>&amp;</b> {{ name }} {% if %}", "</think>", "x\n</think>\n\n\n y </think>z",
    "<think>\nq</think>\n \tr \n\n",
    "[INST] a [/INST]", "0", "```\ncode\n```",
)  # fmt: skip
_CONTENTS = "QXZWSYSTEM", "QXZWUSER", "QXZWANSWER"
Render = Callable[[list[dict[str, str]]], str]


def _conversation(system: str | None, messages: list[str]) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]


def renderer(template: str, special: dict[str, str], with_dates: bool = True) -> Render:
    """A function that renders conversations up to the answer.

    Args:
        special: names of special tokens and their texts.
        with_dates: templates that ask for the date get its format, between two marks.
    """
    from ..llm.template_environment import compiled

    dates = {"strftime_now": lambda form: f"\ue000{form}\ue001"} if with_dates else {}
    made = compiled(template)

    def render(messages: list[dict[str, str]]) -> str:
        return made.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special, **dates
        )  # fmt: skip

    return render


def _cut(text: str, contents: list[str]) -> list[str]:
    """The pieces of a text around contents."""
    pieces = []
    for content in contents:
        if text.count(content) != 1:
            raise Unsupported("the chat template writes a message more than once, or not as it is")
        before, _, text = text.partition(content)
        pieces.append(before)
    return [*pieces, text]


def _form(render: Render, has_system: bool) -> tuple[list[str], tuple[int, int, int]]:
    """The five pieces of ChatPieces::Form, and how each role's messages change."""
    names = [f"{name}{i}QXZW" for i in range(3) for name in _CONTENTS[1:]][:5]
    system = [_CONTENTS[0]] if has_system else []
    text = render(_conversation(system[0] if system else None, names))
    pieces = _cut(text, system + names)
    before_system = pieces.pop(0) if has_system else ""
    before_user, answer, user, answer2, user2, end = pieces
    if (answer, user) != (answer2, user2):
        raise Unsupported("the chat template writes later turns in another way than the first one")
    made = [before_system, before_user, answer, user, end]
    changes = []
    for role in range(0 if has_system else 1, 4):
        texts = [text for text in _MESSAGES if text or role]  # templates may treat an empty system prompt as none
        change = _change([(text, _written(render, made, role, has_system, text)) for text in texts])
        if change is None:
            name = ("system", "user", "assistant", "user")[role]
            raise Unsupported(f"the chat template changes messages of the {name} in an unknown way")
        changes.append(change)
    system_change = changes.pop(0) if has_system else 0
    first, answer_change, later = changes
    return made, (system_change, first + (later + 1) * _LATER, answer_change)


def _change(pairs: list[tuple[str, str | None]]) -> int | None:
    """The number of the change that turns each message into its text in ``pairs``; None: no change does."""
    for cut, remove in enumerate(_CUTS):
        for strip, (if_cut, strip_cut) in product(_STRIPS, _STRIPS.items()):
            if cut == 0 and strip != if_cut:
                continue
            results = [strip_cut(remove(text)) if _THINKING_ENDS in text else _STRIPS[strip](text) for text, _ in pairs]
            wrong = [result for result, (_, written) in zip(results, pairs, strict=True) if result != written]
            if not any(wrong):  # an empty message may differ, as programs refuse it then
                return strip + 8 * cut + 32 * (if_cut if cut else 0) + (_NOT_EMPTY if wrong else 0)
    return None


def _written(render: Render, form: list[str], role: int, has_system: bool, text: str) -> str | None:
    """What the template writes for a message of the system, the user, the assistant or again the user.

    None: it changes more than the message, or refuses it.
    """
    words = [text if i == role else name for i, name in enumerate((*_CONTENTS, "QXZWLAST"))]
    try:
        written = render(_conversation(words[0] if has_system else None, words[1:]))
    except Exception:  # jinja's, and those of a template's own raise_exception
        return None
    skipped = 0 if has_system else 2
    parts = [part for pair in zip(form, [*words, ""], strict=True) for part in pair][skipped:]
    at = 2 * role + 1 - skipped
    head, tail = "".join(parts[:at]), "".join(parts[at + 1 :])
    if not (written.startswith(head) and written.endswith(tail) and len(written) >= len(head) + len(tail)):
        return None
    return written[len(head) : len(written) - len(tail)]


def chat_head(template: str | None, refusal: str, special: dict[str, str], tables: Tables) -> list[int]:
    """The part of a tokens file about the chat template: a refusal, or a form without and one with a system prompt."""
    if not template:
        return [tables.text(refusal)]
    render = renderer(template, special)
    forms: list[list[int]] = []
    for has_system in (False, True):
        try:
            pieces, changes = _form(render, has_system)
        except Exception as error:  # jinja's, those of a template's own raise_exception, and Unsupported
            reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            prompt = "conversations with a system prompt" if has_system else "conversations without a system prompt"
            forms.append([tables.text(f"the chat template is not supported for {prompt}: {reason}")])
            continue
        head = [NONE]
        for piece in pieces:
            parts = [(i % 2, part) for i, part in enumerate(_DATE.split(piece)) if part]
            head += [len(parts), *(number for date, part in parts for number in (date, tables.text(part)))]
        forms.append([*head, *changes])
    return [NONE, python_spaces(tables), *forms[0], *forms[1]]


def conversations(control: list[str]) -> list[tuple[str | None, list[str]]]:
    """Conversations of many kinds, for comparing; some messages have the texts of control tokens."""
    made: list[tuple[str | None, list[str]]] = [(f"x {text}", [f"a{text} b", text, f"{text[1:]} {text}\n"]) for text in control]
    for i, system in enumerate((None, "Be brief.", "x", "  You are {{ name }}\n", "東京 \U0001f600")):
        for turns in (1, 3, 5, 7):
            made.append((system, [_MESSAGES[(i + 3 * turn + turns) % len(_MESSAGES)] for turn in range(turns)]))
    return made
