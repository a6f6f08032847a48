"""Renders chat templates to tokens, such that only the template itself, not a message, can produce control tokens."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..files.untrusted import interpreting

_SECONDS = 10  # of CPU time; the template of a long conversation takes some milliseconds
_WORD = re.compile(r"\w+")
# Roles and types of which templates may make control tokens ('<|' + role + '|>'), as they may of those that they name.
_KNOWN = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "text", "image", "object", "array", "string", "number",
     "integer", "boolean", "null")
)  # fmt: skip
_PRIVATE = range(0xF0000, 0xFFFFE)  # letters that Unicode leaves to private use
# Tokenizers that do not call all of their control tokens special (DeepSeek's) write them so.
_LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)


def chat_template(tokenizer: Any, path: str | os.PathLike[str]) -> str:
    """The tokenizer's chat template, or the default one of several.

    Args:
        path: the path of the tokenizer, for the error.

    Raises:
        ValueError: there is none.
    """
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ValueError(
            f"the tokenizer in {path} has no chat template: the model may be "
            "made to continue texts only (lowbit generate without --chat), or chat_template.jinja was not copied; "
            "lowbit chat --template FILE gives one"
        )
    return template


def render(
    tokenizer: Any,
    messages: list[dict[str, str]] | list[dict[str, Any]],
    template: str,
    tools: list[dict[str, Any]] | None = None,
    *,
    answers: bool = True,
    continues: bool = False,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens of a conversation up to the model's answer. The template adds all special tokens, including a first one.

    The text of a control token in a message or a tool is encoded as ordinary tokens. Without such texts the whole
    conversation is tokenized at once.

    Args:
        tools: functions that the model may call, in OpenAI's format.
        answers: the template also writes the beginning of an answer.
        continues: the model continues the last message, so nothing of the template follows it.
        variables: values of further names that the template reads.

    Raises:
        ValueError: the template is damaged, loops, or refuses the messages (some accept no system prompt); or a message
            contains the text of a control token, and the template treats it differently from other text; or the template does
            not write the message to continue as it is, or does not read a variable.
    """
    control = _control_tokens(tokenizer)
    text, places = _rendered(tokenizer, messages, template, tools, control, answers, continues, variables or {})
    expected = [(control.ids[text[start:end]], start, end) for start, end in places]
    if getattr(tokenizer, "tables", None) is not None and len(places) == len(control.places(text)):
        # They give no offsets. If the text has control tokens only where the template wrote them, their order says as much.
        plain: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if [token for token in plain if token in control.names] == [token for token, _, _ in expected]:
            return plain
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    # A token that strips adjacent spaces covers a longer range than its text.
    found = [(token, *where) for token, where in zip(ids, encoded["offset_mapping"], strict=True) if token in control.names]
    if len(found) == len(expected) and all(
        token == wanted and first <= start and end <= last
        for (token, first, last), (wanted, start, end) in zip(found, expected, strict=True)
    ):
        return ids
    # Some tokens are recognized only between words: if the tokenizer finds none here, the template has written plain text.
    ends = [last for _, _, last in found]
    places = [(start, end) for start, end in places if (at := bisect_right(ends, start)) < len(found) and found[at][1] < end]
    return control.encode(text, places)


def check_control_tokens(
    tokenizer: Any, processor: Any, messages: list[Any], template: str, tools: list[dict[str, Any]] | None = None
) -> None:
    """Raises ValueError for a conversation with images in which a message contains the text of a control token."""
    control = _control_tokens(tokenizer)
    text, places = _rendered(processor, messages, template, tools, control)
    if len(places) != len(control.places(text)):
        raise ValueError(
            "a message has the text of a control token of the model; lowbit does not support this in a conversation with images"
        )


def _rendered(
    tokenizer: Any,
    messages: Any,
    template: str,
    tools: list[dict[str, Any]] | None,
    control: _Control,
    answers: bool = True,
    continues: bool = False,
    variables: dict[str, Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the ranges in which the template has written control tokens."""
    # Marks the end of the last message. The space after it shows whether the template strips messages.
    end = "".join(chr(_PRIVATE[_random(len(_PRIVATE))]) for _ in range(8)) if continues else ""

    def once(messages: Any, tools: Any, variables: dict[str, Any] | None) -> str:
        if end:
            *before, last = messages
            messages = [*before, _extended(last, f"{end} ")]
        with interpreting("the chat template does not take this conversation"), _time_limit():
            _check_powers(template)
            text = str(
                tokenizer.apply_chat_template(
                    messages, **({} if tools is None else {"tools": tools}), **(variables or {}), chat_template=template,
                    add_generation_prompt=answers and not continues, tokenize=False,
                )
            )  # fmt: skip
        return _until(text, end) if end else text

    if variables:
        _check_variables(template, variables)
    text = once(messages, tools, variables)
    # A template may make control tokens of any texts, so their letters are marked everywhere. Where it looks for such letters
    # itself ("</think>"), only those of texts that are control tokens, or pieces of one, are.
    for everywhere in (True, False):
        words = _words(template)
        marked = control.marked([messages, tools], everywhere, words | _KNOWN)
        # Values that the template compares stay as they are.
        marked.append(variables and {name: control.marked(each, everywhere, words, "type") for name, each in variables.items()})
        if marked == [messages, tools, variables]:
            return text, control.places(text)
        with suppress(ValueError):
            without = once(*marked)
            # One letter stands for one other, so that places are the same in both texts.
            if without.translate(control.originals) == text:
                return text, control.places(without)
    raise ValueError(
        "a message has the text of a control token of the model, and the chat template treats it differently from other "
        "texts, so that lowbit cannot distinguish it from the template's own tokens; leave it out or rephrase it"
    )


def _extended(message: dict[str, Any], end: str) -> dict[str, Any]:
    """A message with more text at its end; its content is a text, or parts of which the last is a text."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + end}
    *before, last = content
    return message | {"content": [*before, last | {"text": last["text"] + end}]}


def _until(text: str, end: str) -> str:
    """The text of a conversation before the end of its last message."""
    if text.count(end) != 1:
        raise ValueError("the chat template does not write the last message as it is, so that the model cannot continue it")
    before, _, after = text.partition(end)
    return before if after.startswith(" ") else before.rstrip()


def _check_variables(template: str, given: dict[str, Any]) -> None:
    from .template_environment import variables

    with interpreting("the chat template is damaged"):
        known = variables(template)
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise ValueError(f"the chat template reads no {wrong!r}; expected {' or '.join(sorted(known)) or 'no names'}")


@lru_cache
def _words(template: str) -> frozenset[str]:
    """The words that the template compares or writes."""
    return frozenset(re.findall(r"""(?<=['"])\w+(?=['"])""", template))


@lru_cache
def _check_powers(template: str) -> None:
    """Raises ValueError for a template with powers: a power of large numbers takes hours in a single step."""
    # The settings of chat templates, with which jinja2 makes a lexer once.
    lexer: Any = import_module("jinja2").Environment(trim_blocks=True, lstrip_blocks=True)
    if any(kind == "operator" and value == "**" for _, kind, value in lexer.lex(template)):
        raise ValueError("the chat template has the operator **; expected one without powers")


@contextmanager
def _time_limit() -> Iterator[None]:
    """A context in which a chat template that takes too long raises ValueError; jinja's sandbox does not limit time."""
    end = time.thread_time() + _SECONDS

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != "<template>":  # jinja's name for templates
            return None
        if time.thread_time() > end:
            raise ValueError(f"the chat template takes more than {_SECONDS} s for a conversation; expected one that ends")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _random(below: int) -> int:
    """A random number that a user cannot know; the module secrets is slow to import."""
    return int.from_bytes(os.urandom(16), "little") % below


@dataclass(eq=False)
class _Control:
    """The control tokens of a tokenizer."""

    tokenizer: Callable[[], Any]  # a weak reference
    ids: dict[str, int]  # text -> id

    @cached_property
    def names(self) -> dict[int, str]:
        """Id -> name that no text contains. Names are random, so that a user cannot know them."""
        start = "".join(chr(_PRIVATE[_random(len(_PRIVATE))]) for _ in range(8))
        return {number: f"{start}{chr(_PRIVATE[i])}" for i, number in enumerate(self.ids.values())}

    @cached_property
    def marks(self) -> dict[str, str]:
        """Character of a control token -> private use character, chosen at random like the names."""
        letters = set().union(*self.ids)
        start = _random(len(_PRIVATE) - len(letters))
        return {letter: chr(_PRIVATE[start + i]) for i, letter in enumerate(sorted(letters))}

    @cached_property
    def originals(self) -> dict[int, str]:
        return {ord(mark): letter for letter, mark in self.marks.items()}

    @cached_property
    def _any(self) -> re.Pattern[str]:
        longest_first = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _anywhere(self) -> re.Pattern[str]:
        return re.compile(f"(?={self._any.pattern})")

    @cached_property
    def _signs(self) -> re.Pattern[str]:
        """All letters of control tokens that are not of words."""
        signs = [re.escape(letter) for letter in self.marks if not letter.isalnum() and not letter.isspace()]
        return re.compile("|".join(signs) or r"(?!)")

    @cached_property
    def _starts(self) -> set[str]:
        return {text[:count] for text in self.ids for count in range(1, len(text))}

    @cached_property
    def _ends(self) -> set[str]:
        return {text[-count:] for text in self.ids for count in range(1, len(text))}

    @cached_property
    def _firsts(self) -> set[str]:
        return {text[0] for text in self.ids}

    @cached_property
    def _lasts(self) -> set[str]:
        return {text[-1] for text in self.ids}

    def places(self, text: str) -> list[tuple[int, int]]:
        """The ranges of control tokens in the text."""
        return [found.span() for found in self._any.finditer(text)]

    def marked(self, value: Any, everywhere: bool, words: frozenset[str], key: Any = None) -> Any:
        """A copy of a part of messages or tools in which no text is, or may become with its neighbors, a control token.

        Private letters replace the first letters of such texts. The same value if there are none.

        Args:
            everywhere: replace other letters, too, of which a template may make a control token: by '<|' + name + '|>', or in
                upper case.
            words: values of roles and types that stay as they are.
            key: the key of the value in its object.
        """
        if isinstance(value, dict):
            return {
                self.marked(name, False, words): self.marked(inner, everywhere, words, name) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(inner, everywhere, words) for inner in value]
        named = key in ("role", "type")
        if not isinstance(value, str) or (named and value in words):
            return value
        everywhere = everywhere or named
        at = {found.start() for found in self._anywhere.finditer(value)}
        core = value.strip()  # templates strip texts
        if everywhere:
            at |= {found.start() for found in self._signs.finditer(value)}
            if core[:1] in self.marks and _WORD.fullmatch(core):
                at.add(value.index(core[0]))
        longest = max(map(len, self.ids), default=1) - 1
        head, tail = core[:longest], core[-longest:]
        if not self._firsts.isdisjoint(tail):
            end = len(value.rstrip())
            at |= {end - count for count in range(1, len(tail) + 1) if tail[-count:] in self._starts}
        if not self._lasts.isdisjoint(head) and any(head[:count] in self._ends for count in range(1, len(head) + 1)):
            at.add(len(value) - len(value.lstrip()))
        if not at:
            return value
        letters = list(value)
        for place in at:
            letters[place] = self.marks[letters[place]]
        return "".join(letters)

    def encode(self, text: str, places: list[tuple[int, int]]) -> list[int]:
        """The tokens of a text with control tokens only at these ranges."""
        parts, before = [], 0
        for start, end in places:
            parts += [text[before:start], self.names[self.ids[text[start:end]]]]
            before = end
        renamed, checked = self._renamed
        ids: list[int] = renamed.encode("".join([*parts, text[before:]]), add_special_tokens=False).ids
        wanted = [self.ids[text[start:end]] for start, end in places]
        if [token for token in ids if token in checked] != [token for token in wanted if token in checked]:
            raise ValueError("the tokenizer does not keep the control tokens of the chat template apart from texts")
        return ids

    @cached_property
    def _renamed(self) -> tuple[Any, set[int]]:
        """The tokenizer with its control tokens renamed to names that no user text contains, and the ids that no text becomes.

        The unknown token is not among these ids, because characters that the tokenizer lacks become it.

        The flag `encode_special_tokens` of tokenizers is not enough: a Unigram model may still encode the text of a control
        token as that token, and the flag does not affect tokens that are not marked special.
        """
        backend = self.tokenizer().backend_tokenizer
        content = json.loads(backend.to_str())
        names = {text: self.names[number] for text, number in self.ids.items()}
        for added in content["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        model = content["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
        unknown = {model.get("unk_id"), self.ids.get(model.get("unk_token"))}
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
        content |= {"post_processor": None, "truncation": None, "padding": None}
        made = type(backend).from_str(json.dumps(content))
        wrong = [text for text, number in self.ids.items() if made.token_to_id(names[text]) != number]
        if wrong:
            raise ValueError(f"the tokenizer does not keep the control token {wrong[0]!r} apart from texts")
        return made, self.names.keys() - unknown


_CONTROL: WeakKeyDictionary[Any, _Control] = WeakKeyDictionary()


def _control_tokens(tokenizer: Any) -> _Control:
    """The tokens that a tokenizer marks as special, and others that look like control tokens, except blank ones."""
    ids = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
    }
    known = _CONTROL.get(tokenizer)
    if known is None or known.ids != ids:
        known = _CONTROL[tokenizer] = _Control(ref(tokenizer), ids)
    return known


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that no message may become, by their texts."""
    return dict(_control_tokens(tokenizer).ids)
