"""SentencePiece's table of replaced characters (the normalizer ``Precompiled``), and graphemes, as tables for C++.

The library ``tokenizers`` looks up each grapheme of at most five bytes: if the table has a start of it, the whole grapheme is
replaced, by the text of the shortest one. Characters of longer graphemes are looked up one by one.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy

from .token_patterns import Ranges, Unsupported, characters, ranges_of

_MOST_BYTES = 5  # graphemes with more bytes are not looked up: kMostGrapheme in steps.cpp
_MOST_STARTS = 1 << 16
# A grapheme by Unicode's text segmentation; graphemes() has the classes. Pairs of regional indicators are left out: each
# of the two has four bytes, so no pair is looked up.
GRAPHEME = "RN|C|P*(?:L*(?:V+|OV*|K)T*|L+|T+|X(?:E*ZX)*|I(?:B*+JW*I)+|A)M*"


def replacements(charsmap: bytes) -> dict[str, str]:
    """Text in a charsmap -> its replacement. Texts that begin with another one are left out: the library never finds them.

    A charsmap is the size of a double-array trie in bytes, the trie, and texts that end in a zero byte.

    Raises:
        Unsupported: the charsmap is damaged.
    """
    damaged = Unsupported("the tokenizer's precompiled_charsmap is damaged")
    size = int.from_bytes(charsmap[:4], "little") // 4 * 4
    if size < 4 or len(charsmap) < 4 + size:
        raise damaged
    units, texts = numpy.frombuffer(charsmap, "<u4", size // 4, 4).astype(numpy.int64), charsmap[4 + size :]
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    found: dict[bytes, int] = {}
    starts, nodes, covered, bytes_ = [b""], offsets[:1], numpy.zeros(1, bool), numpy.arange(1, 256)
    for _ in range(_MOST_BYTES):
        children = nodes[:, None] ^ bytes_
        if children.size and children.max() >= units.size:
            raise damaged
        rows, columns = numpy.nonzero((units[children] & (1 << 31 | 0xFF)) == bytes_)
        if rows.size > _MOST_STARTS:
            raise damaged
        places = children[rows, columns]
        starts = [starts[row] + bytes((column + 1,)) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
        nodes, ends, covered = places ^ offsets[places], (units[places] >> 8 & 1).astype(bool), covered[rows]
        if (nodes[ends] >= units.size).any():
            raise damaged
        for i in numpy.nonzero(ends & ~covered)[0].tolist():
            found[starts[i]] = int(units[nodes[i]]) & 0x7FFFFFFF
        covered |= ends
    try:
        return {key.decode(): _text_at(texts, at) for key, at in found.items()}
    except ValueError:
        raise damaged from None


def _text_at(texts: bytes, at: int) -> str:
    if at > len(texts):
        raise ValueError(at)
    end = texts.find(b"\0", at)
    return texts[at : len(texts) if end < 0 else end].decode()


def charsmap_of(*keys: str) -> bytes:
    """A charsmap that makes a b of each text. Each node of the trie has 256 units of its own."""
    blocks: dict[bytes, int] = {b"": 1}
    units = {0: 256 << 10}
    last = 256 * (2 + len({key[:i] for key in map(str.encode, keys) for i in range(1, len(key))}))  # of whole texts
    for key in map(str.encode, keys):
        for i in range(len(key)):
            whole = i + 1 == len(key)
            to = last if whole else 256 * blocks.setdefault(key[: i + 1], len(blocks) + 1)
            at = 256 * blocks[key[:i]] + key[i]
            units[at] = (at ^ to) << 10 | whole << 8 | key[i]
    trie = numpy.zeros(last + 256, "<u4")
    trie[list(units)] = list(units.values())
    return b"".join([struct.pack("<I", trie.nbytes), trie.tobytes(), b"b\0"])


@lru_cache
def graphemes() -> dict[str, Ranges]:
    """The classes of characters in ``GRAPHEME``, by the library's version of Unicode.

    The classes are found by normalizing texts with a table of one entry: what is replaced shows where graphemes begin and end.
    The letters in the table are short, so that a grapheme of two letters is looked up, and one of three is not.
    """
    mark, sign, prefix = "\u0301", "\u00a9", "\u0600"  # of the classes E, X and P
    lead, vowel, tail, consonant, linker = "\u1100", "\u1161", "\u11a8", "\u0915", "\u094d"  # of L, V, T, I and J
    every = {ord(letter) for text in characters() for letter in text}
    marks = _fit(every, prefix + consonant + "{}", f"b{consonant}{{}}", prefix)
    control = _fit(every, "{}" + mark * 2, "{}b", mark)
    others = every - marks
    after_lead, after_vowel = (_fit(others, prefix + each + "{}", f"b{each}{{}}", prefix) for each in (lead, vowel))
    before_lead, before_vowel = (_fit(after_lead, prefix + "{}" + each, f"b{{}}{each}", prefix) for each in (lead, vowel))
    vowels = after_lead & after_vowel
    syllables = after_lead - vowels - before_lead
    linkers = _fit(marks, f"{consonant}{{}}{consonant}{mark}", f"b{{}}b{mark}", consonant)
    between = _fit(marks, f"{consonant}{{}}{linker}{consonant}{mark}", f"b{{}}{linker}b{mark}", consonant)
    classes = {
        "R": {0x0D}, "N": {0x0A}, "C": control, "A": every - control, "M": marks, "Z": {0x200D},
        "P": _fit(others, "{}a" + mark, "{}a" + mark, "a" + mark),
        "L": before_lead - vowels, "V": vowels, "O": syllables & before_vowel, "K": syllables - before_vowel,
        "T": _fit(after_vowel, prefix + tail + "{}", f"b{tail}{{}}", prefix),
        "E": _fit(marks, f"{sign}{{}}\u200d{sign}{mark}", f"b{{}}\u200db{mark}", sign),
        "X": _fit(others, sign + "\u200d{}", "b\u200d{}", sign),
        "I": _fit(others, "{}" + linker + consonant + mark, f"{{}}{linker}b{mark}", consonant),
        "J": linkers, "B": between - linkers, "W": between | linkers,
    }  # fmt: skip
    return {name: ranges_of(codes) for name, codes in classes.items()}


def _fit(codes: set[int], question: str, answer: str, replaced: str) -> set[int]:
    """The characters with which ``question`` is normalized to ``answer``, by a table that replaces ``replaced`` by a b."""
    from tokenizers import normalizers

    normalizer = normalizers.Precompiled(charsmap_of(replaced))
    (before, after), (start, end), found = question.split("{}"), answer.split("{}"), set[int]()
    letters = "".join(map(chr, sorted(codes - {1})))
    answers = normalizer.normalize_str(before + f"{after}\x01{before}".join(letters) + after).split("\x01")
    for letter, got in zip(letters, answers, strict=True):
        if got == start + ("b" if letter == replaced else letter) + end:
            found.add(ord(letter))
    if 1 in codes and normalizer.normalize_str(f"{before}\x01{after}") == f"{start}\x01{end}":
        found.add(1)
    return found
