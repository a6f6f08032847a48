"""Compiles regular expressions of tokenizers to steps for C++, and finds the characters of their classes.

The library ``tokenizers`` itself decides which characters are in a class, so the classes have its version of Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

Ranges = tuple[tuple[int, int], ...]  # [begin, end) of code points

NONE = 0xFFFFFFFF
_MATCH, _ONE, _GREEDY, _POSSESSIVE, _EITHER, _JUMP, _AHEAD, _NOT_AHEAD, _BEHIND, _NOT_BEHIND, _LINE_END = range(11)
_CHUNK = 4096
# All code points that are characters, or may become some. The others are in the same classes as all of their kind: each key of
# `_ALIKE` is tried for all code points in its ranges.
_CODES = (*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE1000), 0xFFFFE, 0xFFFFF, 0x10FFFE, 0x10FFFF)
_ALIKE = {0x40000: ((0x34000, 0xE0000), (0xE1000, 0xF0000)), 0xF0001: ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))}
_MOST_STEPS = 1 << 16


class Unsupported(ValueError):
    """A tokenizer or template that programs without Python do not run; the message says why."""


def characters() -> list[str]:
    """All characters that have to be tried, in several texts."""
    codes = (*_CODES, *_ALIKE)
    return ["".join(map(chr, codes[at : at + _CHUNK])) for at in range(0, len(codes), _CHUNK)]


def ranges_of(codes: Iterable[int]) -> Ranges:
    """Ranges of code points; a key of ``_ALIKE`` becomes its ranges."""
    ranges: list[list[int]] = []
    parts = [part for code in codes for part in _ALIKE.get(code, ((code, code + 1),))]
    for begin, end in sorted(parts):
        if ranges and ranges[-1][1] == begin:
            ranges[-1][1] = end
        else:
            ranges.append([begin, end])
    return tuple((begin, end) for begin, end in ranges)


def found_by(places: Callable[[str], Iterable[int]]) -> Ranges:
    """The characters in :func:`characters` whose positions ``places`` finds in a text."""
    return ranges_of(ord(text[place]) for text in characters() for place in places(text))


def kept_by(pre_tokenizer: Any) -> Ranges:
    """The characters that a pre-tokenizer keeps in its pieces."""
    return found_by(lambda text: [i for _, (begin, end) in pre_tokenizer.pre_tokenize_str(text) for i in range(begin, end)])


def without(ranges: Ranges) -> Ranges:
    """The complement of ranges."""
    edges = [0, *(edge for part in ranges for edge in part), 0x110000]
    return tuple((begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end)


@lru_cache(maxsize=256)
def class_of(atom: str) -> Ranges:
    """The characters that a part of a pattern matches; the part must match single characters."""
    from tokenizers import Regex, pre_tokenizers

    return kept_by(pre_tokenizers.Split(Regex(f"(?:{atom})+"), "removed", invert=True))


@dataclass(frozen=True)
class _One:
    atom: str
    ranges: Ranges | None = None


@dataclass(frozen=True)
class _Look:
    op: int
    inner: Any


@dataclass(frozen=True)
class _Repeat:
    inner: Any
    least: int
    most: int | None
    kind: str  # "", "+": possessive, "?": lazy


@dataclass(frozen=True)
class _LineEnd:
    pass


# A sequence is a tuple, alternatives are a list of tuples.
_ANY, _NEWLINE, _OTHER, _LETTER = (
    _One("", ((0, 0x110000),)),
    _One("", ((10, 11),)),
    _One("", ((0, 10), (11, 0x110000))),
    _One(r"\w"),
)
_END = _Look(_NOT_AHEAD, _ANY)
_PLACES: dict[str, Any] = {  # as in Ruby: each line has a beginning and an end
    "$": _LineEnd(),
    "^": (_Look(_NOT_BEHIND, _OTHER), _Look(_AHEAD, _ANY)),
    r"\A": _Look(_NOT_BEHIND, _ANY),
    r"\z": _END,
    r"\Z": _Look(_AHEAD, (_Repeat(_NEWLINE, 0, 1, ""), _END)),
    r"\b": [(_Look(_BEHIND, _LETTER), _Look(_NOT_AHEAD, _LETTER)), (_Look(_NOT_BEHIND, _LETTER), _Look(_AHEAD, _LETTER))],
}
_ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\x\{[0-9a-fA-F]+\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[sSdDwWrntfv]|\\[^\w\s]|[^\\]", re.DOTALL
)
_INTERVAL = re.compile(r"\{(\d+)(,?)(\d*)\}")


class _Parser:
    def __init__(self, pattern: str, names: dict[str, Ranges]):
        self.pattern, self.at, self.names = pattern, 0, names

    def refuse(self, what: str) -> Unsupported:
        return Unsupported(f"the pattern {self.pattern!r} has {what}")

    def take(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def alternatives(self, folded: bool) -> list[tuple[Any, ...]]:
        result = [self.sequence(folded)]
        while self.take("|"):
            result.append(self.sequence(folded))
        return result

    def sequence(self, folded: bool) -> tuple[Any, ...]:
        parts: list[Any] = []
        if self.take("(?i)"):
            folded = True
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            part = self.quantified(self.atom(folded))
            if folded and parts and isinstance(part, _One) and isinstance(parts[-1], _One):
                both = "".join(one.atom.removeprefix("(?i:").removesuffix(")") for one in (parts[-1], part))
                if class_of(f"(?i:{both})"):
                    raise self.refuse(f"{both!r} without case: a single character matches both letters")
            parts.append(part)
        return tuple(parts)

    def atom(self, folded: bool) -> Any:
        for start, look in (("(?=", _AHEAD), ("(?!", _NOT_AHEAD), ("(?<=", _BEHIND), ("(?<!", _NOT_BEHIND)):
            if self.take(start):
                return _Look(look, self.group(folded))
        if self.take("(?i:"):
            return self.group(True)
        if self.take("(?:"):
            return self.group(folded)
        if self.pattern.startswith("(?", self.at) or self.pattern.startswith("(*", self.at):
            raise self.refuse(f"a group {self.pattern[self.at : self.at + 4]!r}")
        if self.take("("):
            return self.group(folded)
        for text, part in _PLACES.items():
            if self.take(text):
                return part
        if self.pattern[self.at] == "[":
            text = self.bracket()
        else:
            found = _ATOM.match(self.pattern, self.at)
            if found is None or found[0] in "^*+?{":
                raise self.refuse(f"{self.pattern[self.at : self.at + 2]!r}")
            text = found[0]
            self.at = found.end()
            if text in self.names:
                return _One("", self.names[text])
            if len(text) == 1 and text != "." and not folded:
                return _One(re.escape(text), ((ord(text), ord(text) + 1),))
        return _One(f"(?i:{text})" if folded else text)

    def bracket(self) -> str:
        begin, depth = self.at, 0
        while self.at < len(self.pattern):
            letter = self.pattern[self.at]
            self.at += 2 if letter == "\\" else 1
            depth += (letter == "[") - (letter == "]")
            if depth == 0:
                return self.pattern[begin : self.at]
        raise self.refuse("a [ without its ]")

    def group(self, folded: bool) -> Any:
        inner = self.alternatives(folded)
        if not self.take(")"):
            raise self.refuse("a ( without its )")
        return inner[0][0] if len(inner) == 1 and len(inner[0]) == 1 else inner

    def quantified(self, part: Any) -> Any:
        while self.at < len(self.pattern):
            interval = _INTERVAL.match(self.pattern, self.at)
            if interval is not None:
                least, comma, most = interval.groups()
                self.at = interval.end()
                part = _Repeat(part, int(least), int(most) if most else None if comma else int(least), "")
                if self.pattern.startswith("?", self.at):
                    raise self.refuse("an interval with a ?")
                continue
            sign = self.pattern[self.at]
            if sign not in "*+?":
                break
            self.at += 1
            kind = next((kind for kind in "+?" if self.take(kind)), "")
            part = _Repeat(part, int(sign == "+"), 1 if sign == "?" else None, kind)
        return part


def _shortest(part: Any) -> int:
    """The length of the shortest text that a part matches."""
    match part:
        case _One():
            return 1
        case _Repeat():
            return part.least * _shortest(part.inner)
        case tuple():
            return sum(map(_shortest, part))
        case list():
            return min(map(_shortest, part))
    return 0


@dataclass
class Code:
    """Steps of patterns and the classes that they use, for the tables of PatternStep and CharacterClass in C++."""

    steps: list[tuple[int, int, int, int]] = field(default_factory=list)
    classes: dict[Ranges, int] = field(default_factory=dict)
    _known: dict[Any, int] = field(default_factory=dict)

    def add_class(self, ranges: Ranges) -> int:
        """The number of a class."""
        return self.classes.setdefault(ranges, len(self.classes))

    def add(self, pattern: str | Ranges, literal: bool = False, names: dict[str, Ranges] | None = None) -> int:
        """Compiles a pattern.

        Args:
            pattern: a regular expression, or ranges: any character in them.
            literal: whether the pattern is a plain text instead.
            names: letters in the pattern that stand for classes.

        Returns:
            The number of its first step.

        Raises:
            Unsupported: the pattern has unknown parts, or matches the empty text.
        """
        key = pattern, literal, bool(names)
        if key in self._known:
            return self._known[key]
        if not isinstance(pattern, str):
            parsed: Any = _One("", pattern)
        elif literal:
            parsed = tuple(_One("", ((ord(letter), ord(letter) + 1),)) for letter in pattern)
        else:
            parser = _Parser(pattern, names or {})
            parsed = parser.alternatives(False)
            if parser.at != len(pattern):
                raise parser.refuse("a ) without its (")
        if _shortest(parsed) == 0:
            raise Unsupported(f"the pattern {pattern!r} matches the empty text")
        self._known[key] = len(self.steps)
        self._emit(parsed)
        self._step(_MATCH)
        return self._known[key]

    def _step(self, op: int, a: int = 0, b: int = 0, c: int = 0) -> int:
        if len(self.steps) == _MOST_STEPS:
            raise Unsupported(f"the patterns take more than {_MOST_STEPS} steps")
        self.steps.append((op, a, b, c))
        return len(self.steps) - 1

    def _class(self, one: _One) -> int:
        return self.add_class(class_of(one.atom) if one.ranges is None else one.ranges)

    def _either(self, at: int, other: int, lazy: bool = False) -> None:
        """Sets a choice between the step after it and another one."""
        self.steps[at] = (_EITHER, other, at + 1, 0) if lazy else (_EITHER, at + 1, other, 0)

    def _emit(self, part: Any) -> None:
        match part:
            case _One():
                self._step(_ONE, self._class(part))
            case tuple():
                for each in part:
                    self._emit(each)
            case list():
                ends = []
                for each in part[:-1]:
                    choice = self._step(_EITHER)
                    self._emit(each)
                    ends.append(self._step(_JUMP))
                    self._either(choice, len(self.steps))
                self._emit(part[-1])
                for end in ends:
                    self.steps[end] = (_JUMP, len(self.steps), 0, 0)
            case _Repeat():
                self._repeat(part)
            case _LineEnd():
                self._step(_LINE_END)
            case _Look(op) if op in (_AHEAD, _NOT_AHEAD):
                look = self._step(op)
                self._emit(part.inner)
                self._step(_MATCH)
                self.steps[look] = (op, len(self.steps), 0, 0)
            case _Look(op, _One() as one):
                self._step(op, self._class(one))
            case _:
                raise Unsupported("a pattern looks behind for more than one character")

    def _repeat(self, part: _Repeat) -> None:
        if isinstance(part.inner, _One) and part.kind != "?":
            most = NONE if part.most is None else part.most
            self._step(_POSSESSIVE if part.kind else _GREEDY, self._class(part.inner), part.least, most)
            return
        if part.kind == "+" or _shortest(part.inner) == 0:
            raise Unsupported("a pattern repeats a group in a way that is not supported")
        lazy = part.kind == "?"
        for _ in range(part.least):
            self._emit(part.inner)
        choices = []
        for _ in range(1 if part.most is None else part.most - part.least):
            choices.append(self._step(_EITHER))
            self._emit(part.inner)
        if part.most is None:
            self._step(_JUMP, choices[0])
        for choice in choices:
            self._either(choice, len(self.steps), lazy)
