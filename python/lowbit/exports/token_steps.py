"""The parts of a tokenizer.json around its model as steps for C++: normalizers, pre-tokenizers, decoders."""

from __future__ import annotations

import base64
import unicodedata
from functools import lru_cache
from typing import Any

from .token_charsmap import GRAPHEME, graphemes, replacements
from .token_patterns import Code, Ranges, Unsupported, characters, found_by, kept_by, ranges_of, without

_MAP, _NORMALIZE, _REPLACE, _PREPEND, _STRIP, _BYTES, _SPLIT, _SURROUND, _CHARSMAP = range(9)  # StepOp
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
# DecodeOp
_DECODE_BYTES, _BYTE_TOKENS, _FUSE, _DECODE_REPLACE, _DECODE_STRIP, _WORD_PIECE, _METASPACE, _SUFFIX, _PATTERN, _CTC = range(10)
# The expression of the pre-tokenizer ByteLevel, which is only in the library's source.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BETWEEN = "7"  # a character that no normalizer changes
_MANY = 64  # characters that become the same text are replaced as a class


def _normalizer(kind: str, **settings: Any) -> Any:
    from tokenizers import normalizers

    return getattr(normalizers, kind)(**settings)


def _pre_tokenizer(kind: str, **settings: Any) -> Any:
    from tokenizers import pre_tokenizers

    return getattr(pre_tokenizers, kind)(**settings)


@lru_cache
def _changed(kind: str, **settings: Any) -> dict[str, str]:
    """The characters that a normalizer changes, each by itself, and what they become."""
    normalizer, result = _normalizer(kind, **settings), dict[str, str]()
    for text in characters():
        parts = normalizer.normalize_str(_BETWEEN.join(text)).split(_BETWEEN) if _BETWEEN not in text else []
        if len(parts) != len(text):
            parts = [normalizer.normalize_str(letter) for letter in text]
        result |= {letter: part for letter, part in zip(text, parts, strict=True) if letter != part}
    return result


@lru_cache
def letters() -> Ranges:
    """The characters that the library's Rust expressions call letters: \\w."""
    split = _pre_tokenizer("Whitespace")
    # After an "a", a character is in the same piece if it is a letter.
    return ranges_of(
        ord(letter)
        for text in characters()
        for letter, (piece, _) in _pairs(text, split)
        if len(piece) == 2
    )  # fmt: skip


def _pairs(text: str, split: Any) -> list[tuple[str, tuple[str, Any]]]:
    joined = "".join(f"a{letter} " for letter in text)
    pieces = {at: (piece, (at, end)) for piece, (at, end) in split.pre_tokenize_str(joined)}
    return [(letter, pieces[3 * i]) for i, letter in enumerate(text)]


@lru_cache
def rust_spaces() -> Ranges:
    """The characters that Rust calls white space."""
    return without(kept_by(_pre_tokenizer("WhitespaceSplit")))


@lru_cache
def _digits() -> Ranges:
    split = _pre_tokenizer("Digits", individual_digits=True)

    def places(text: str) -> list[int]:
        joined = "".join(f"a{letter}" for letter in text)
        return [at // 2 for _, (at, end) in split.pre_tokenize_str(joined) if at % 2 and end == at + 1]

    return found_by(places)


class Tables:
    """Texts, maps and patterns that steps refer to."""

    def __init__(self, texts: list[str]):
        self.texts, self.code = texts, Code()
        self.maps: list[tuple[int, int]] = []
        self.compositions: list[tuple[int, int, int, int]] = []
        self._known: dict[str, int] = {}
        self._forms: dict[str, tuple[int, ...]] = {}

    def text(self, text: str) -> int:
        """The number of a text."""
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
        return self._known[text]

    def add_map(self, entries: dict[int, int]) -> tuple[int, int]:
        """Adds a map; returns the index of its first entry and its length."""
        at = len(self.maps)
        self.maps += sorted(entries.items())
        return at, len(entries)

    def changes(self, changed: dict[str, str]) -> list[list[int]]:
        """Steps that change characters."""
        steps: list[list[int]] = []
        by_text: dict[str, list[str]] = {}
        for letter, text in changed.items():
            by_text.setdefault(text, []).append(letter)
        for text, alike in list(by_text.items()):
            if len(alike) >= _MANY and not any(letter in changed for letter in text):
                steps.append([_REPLACE, self.code.add(ranges_of(map(ord, alike))), self.text(text)])
                del by_text[text]
        few = {ord(letter): self.text(text) for text, alike in by_text.items() for letter in alike}
        return ([[_MAP, *self.add_map(few)]] if few else []) + steps

    def charsmap(self, content: bytes) -> list[int]:
        """The step of a normalizer with SentencePiece's table of characters."""
        found = replacements(content)
        few = {ord(key): self.text(text) for key, text in found.items() if len(key) == 1}
        at = self.add_map(few)
        longer = [(self.text(key), self.text(text)) for key, text in sorted(found.items()) if len(key) > 1]
        self.maps += longer
        return [_CHARSMAP, self.code.add(GRAPHEME, names=graphemes()), *at, len(self.maps) - len(longer), len(longer)]

    def form(self, kind: str) -> list[int]:
        """The step of one of Unicode's normalization forms: NFC, NFD, NFKC or NFKD."""
        compatible, composes = "K" in kind, kind.endswith("C")
        which = "NFKD" if compatible else "NFD"
        if which not in self._forms:
            self._forms[which] = self._decompositions(which)
        if composes and not self.compositions:
            self.compositions = _compositions()
        return [_NORMALIZE, *self._forms[which], int(composes)]

    def _decompositions(self, which: str) -> tuple[int, ...]:
        normalizer = _normalizer(which)
        entries, marks = dict[int, int](), dict[int, int]()
        for text in characters():
            plain = []
            for letter in text:
                if "\uac00" <= letter <= "\ud7a3":
                    continue
                if unicodedata.decomposition(letter):
                    become = normalizer.normalize_str(letter)
                    if become != letter:
                        entries[ord(letter)] = self.text(become)
                elif not unicodedata.combining(letter):
                    plain.append(letter)
                if (order := unicodedata.combining(letter)) and _is_mark(normalizer, letter, order):
                    marks[ord(letter)] = order
            if normalizer.normalize_str("".join(plain)) != "".join(plain):
                raise Unsupported("the tokenizer's tables of Unicode are newer than Python's")
        return (*self.add_map(entries), *self.add_map(marks))


def _is_mark(normalizer: Any, letter: str, order: int) -> bool:
    """Whether the library reorders a combining mark; Python's newer Unicode tables may have marks that it does not know."""
    if unicodedata.decomposition(letter):
        return True
    other = "\u0301" if order < 230 else "\u0334"  # marks of order 230 and 1
    first, second = (other, letter) if order < 230 else (letter, other)
    return bool(normalizer.normalize_str(first + second) == second + first)


def _compositions() -> list[tuple[int, int, int, int]]:
    normalizer, result = _normalizer("NFC"), []
    for text in characters():
        for letter in text:
            parts = unicodedata.decomposition(letter).split()
            if len(parts) == 2 and not parts[0].startswith("<"):
                first, second = (chr(int(part, 16)) for part in parts)
                if normalizer.normalize_str(first + second) == letter:
                    result.append((ord(first), ord(second), ord(letter), 0))
    return sorted(result)


def normalizers(content: dict[str, Any] | None, tables: Tables) -> list[list[int]]:
    """The steps of a normalizer in tokenizer.json."""
    if content is None:
        return []
    match content["type"]:
        case "Sequence":
            return [step for each in content["normalizers"] for step in normalizers(each, tables)]
        case "NFC" | "NFD" | "NFKC" | "NFKD" as kind:
            return [tables.form(kind)]
        case "Lowercase" | "StripAccents" | "Nmt" as kind:
            return tables.changes(_changed(kind))
        case "Strip":
            spaces = tables.code.add_class(rust_spaces())
            return [[_STRIP, spaces, int(content["strip_left"]), int(content["strip_right"])]]
        case "Prepend":
            return [[_PREPEND, tables.text(content["prepend"]), 0]]
        case "Replace":
            return _replace(_REPLACE, content, tables)
        case "ByteLevel":
            return [[_BYTES]]
        case "Precompiled":
            return [tables.charsmap(base64.b64decode(content["precompiled_charsmap"]))]
        case "BertNormalizer":
            return _bert(content, tables)
        case kind:
            raise Unsupported(f"the tokenizer has a normalizer {kind!r}")


def _bert(content: dict[str, Any], tables: Tables) -> list[list[int]]:
    none = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), False)
    steps: list[list[int]] = []
    if content["clean_text"]:
        steps += tables.changes(_changed("BertNormalizer", **none | {"clean_text": True}))
    if content["handle_chinese_chars"]:
        changed = _changed("BertNormalizer", **none | {"handle_chinese_chars": True})
        if any(text != f" {letter} " for letter, text in changed.items()):
            raise Unsupported("the tokenizer changes Chinese characters in an unknown way")
        steps.append([_SURROUND, tables.code.add_class(ranges_of(map(ord, changed))), tables.text(" ")])
    if content["lowercase"] if content["strip_accents"] is None else content["strip_accents"]:
        changed = _changed("BertNormalizer", **none | {"strip_accents": True})
        steps += [tables.form("NFD"), *tables.changes({letter: text for letter, text in changed.items() if not text})]
    if content["lowercase"]:
        steps += tables.changes(_changed("Lowercase"))
    return steps


def _pattern(content: dict[str, str], tables: Tables) -> int:
    ((kind, pattern),) = content.items()
    return tables.code.add(pattern, literal=kind == "String")


def _replace(op: int, content: dict[str, Any], tables: Tables) -> list[list[int]]:
    if content["pattern"] == {"String": ""}:
        return []  # the library finds no empty texts
    return [[op, _pattern(content["pattern"], tables), tables.text(content["content"])]]


def _split(tables: Tables, pattern: int, behavior: str, invert: bool = False) -> list[int]:
    return [_SPLIT, pattern, _BEHAVIORS.index(behavior), int(invert)]


def pre_tokenizers(content: dict[str, Any] | None, tables: Tables) -> list[list[int]]:
    """The steps of a pre-tokenizer in tokenizer.json."""
    if content is None:
        return []
    code = tables.code
    match content["type"]:
        case "Sequence":
            return [step for each in content["pretokenizers"] for step in pre_tokenizers(each, tables)]
        case "Split":
            pattern = _pattern(content["pattern"], tables)
            return [_split(tables, pattern, content["behavior"], content["invert"])]
        case "ByteLevel":
            space = [[_PREPEND, tables.text(" "), 1]] if content["add_prefix_space"] else []
            split = [_split(tables, code.add(_GPT2), "Isolated")] if content.get("use_regex", True) else []
            return [*space, *split, [_BYTES]]
        case "Metaspace":
            mark, scheme = content["replacement"], {"never": None, "always": 1, "first": 2}[content["prepend_scheme"]]
            prepend = [] if scheme is None else [[_PREPEND, tables.text(mark), scheme]]
            literal = code.add(mark, literal=True)
            split = [_split(tables, literal, "MergedWithNext")] if content["split"] else []
            return [[_REPLACE, code.add(" ", literal=True), tables.text(mark)], *prepend, *split]
        case "Whitespace":
            return [_split(tables, code.add(rust_spaces()), "Removed"), _split(tables, code.add(letters()), "Contiguous")]
        case "WhitespaceSplit":
            return [_split(tables, code.add(rust_spaces()), "Removed")]
        case "BertPreTokenizer":
            return [_split(tables, code.add(rust_spaces()), "Removed"), _split(tables, code.add(_punctuation()), "Isolated")]
        case "Punctuation":
            return [_split(tables, code.add(_punctuation()), content["behavior"])]
        case "Digits":
            return [_split(tables, code.add(_digits()), "Isolated" if content["individual_digits"] else "Contiguous")]
        case "FixedLength" if content["length"] > 0:
            pattern = code.add(f"A{{1,{content['length']}}}", names={"A": ((0, 0x110000),)})
            return [_split(tables, pattern, "Isolated")]
        case "CharDelimiterSplit":
            return [_split(tables, code.add(content["delimiter"], literal=True), "Removed")]
        case kind:
            raise Unsupported(f"the tokenizer has a pre-tokenizer {kind!r}")


@lru_cache
def _punctuation() -> Ranges:
    return without(kept_by(_pre_tokenizer("Punctuation", behavior="removed")))


def decoders(content: dict[str, Any], tables: Tables) -> list[list[int]]:
    """The steps of a decoder in tokenizer.json."""
    match content["type"]:
        case "Sequence":
            return [step for each in content["decoders"] for step in decoders(each, tables)]
        case "ByteLevel":
            return [[_DECODE_BYTES]]
        case "ByteFallback":
            return [[_BYTE_TOKENS]]
        case "Fuse":
            return [[_FUSE]]
        case "Replace" if "String" in content["pattern"]:
            return [[_DECODE_REPLACE, tables.text(content["pattern"]["String"]), tables.text(content["content"])]]
        case "Replace":
            return _replace(_PATTERN, content, tables)
        case "Strip":
            return [[_DECODE_STRIP, tables.text(content["content"]), content["start"], content["stop"]]]
        case "WordPiece":
            return [[_WORD_PIECE, tables.text(content["prefix"]), int(content["cleanup"])]]
        case "Metaspace":
            return [[_METASPACE, tables.text(content["replacement"]), int(content["prepend_scheme"] != "never")]]
        case "CTC":
            pad, delimiter = tables.text(content["pad_token"]), tables.text(content["word_delimiter_token"])
            return [[_CTC, pad, delimiter, int(content["cleanup"])]]
        case "BPEDecoder":
            return [[_SUFFIX, tables.text(content["suffix"])]]
        case kind:
            raise Unsupported(f"the tokenizer has a decoder {kind!r}")


def python_spaces(tables: Tables) -> int:
    """The class of characters that ``str.strip`` removes."""
    return tables.code.add_class(found_by(lambda text: [i for i, letter in enumerate(text) if letter.isspace()]))
