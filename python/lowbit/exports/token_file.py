"""Writes lowbit.tokens: a tokenizer and a chat template as tables, for programs without Python.

``runner/tokens_file.h`` reads it. If such programs would not give exactly the tokens of the library ``tokenizers``, the file
has only the reason.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import _C
from ..files.plan_facts import TOKENS as TOKENS
from ..files.replace import replacing, sync
from ..files.tokenizer_json import check_numbers
from .chat_pieces import chat_head, conversations
from .token_patterns import NONE, Unsupported
from .token_steps import Tables, decoders, letters, normalizers, pre_tokenizers, rust_spaces

_MAGIC, _VERSION, _HEADER, _ENTRY, _SECTIONS = b"lowbit tokens\n\0\0", 1, 24, 16, 11
_KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")  # SubwordKind
_SINGLE_WORD, _STRIP_LEFT, _STRIP_RIGHT, _SPECIAL, _CONTROL = 1, 2, 4, 8, 16
_CACHES = ("float32", "bfloat16", "float16", "int8", "int4")


@dataclass(frozen=True)
class TextSettings:
    """Settings of the model that programs need beside its tokens, and its chat template."""

    stop: list[int] = field(default_factory=list)
    cache: str = "float32"  # default type of the KV cache: one type, or "keys,values"
    sampling: dict[str, Any] = field(default_factory=dict)  # of a conversation
    max_new_tokens: int | None = None
    template: str | None = None
    no_chat: str = "the model has no chat template; expected -p TEXT to continue"  # why there is no template
    special: dict[str, str] = field(default_factory=dict)  # names of special tokens and their texts, for the template
    control: frozenset[int] = frozenset()  # tokens that the text of a message must not contain
    plan: int = 0  # the checksum of the plan beside the file; 0: there is none


def token_bytes(backend: Any, settings: TextSettings) -> bytes:
    """The bytes of a tokens file, proven against the tokenizer.

    Args:
        backend: a Tokenizer of the library ``tokenizers``, without truncation and padding.

    Raises:
        Unsupported: programs without Python do not run this tokenizer.
        ValueError: two of its tokens have one number (:func:`check_numbers`).
    """
    check_numbers(backend.get_vocab(with_added_tokens=False), ())  # to_str() keeps one of such tokens
    content = json.loads(backend.to_str())
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size == 0:
        raise Unsupported("the tokenizer has no tokens")
    texts = [""] * size
    for text, number in _vocabulary(content["model"]).items():
        texts[number] = text
    for added in content["added_tokens"]:
        if texts[added["id"]] not in ("", added["content"]):
            raise Unsupported(f"the token {added['id']} has two texts: {texts[added['id']]!r} and {added['content']!r}")
        texts[added["id"]] = added["content"]
    tables = Tables(texts)
    head = [NONE, size]
    model, order, merges, scores = _model(content["model"], tables)
    head += model
    head += _added(content["added_tokens"], backend, tables, settings.control)
    for steps in (normalizers(content["normalizer"], tables), pre_tokenizers(content["pre_tokenizer"], tables)):
        head += [len(steps), *(number for step in steps for number in step)]
    steps = [] if content["decoder"] is None else decoders(content["decoder"], tables)
    head += [int(content["decoder"] is not None), len(steps), *(number for step in steps for number in step)]
    for around in _around(backend):
        head += [len(around), *around]
    head += _settings(settings) + chat_head(settings.template, settings.no_chat, settings.special, tables)
    made = _file(head, tables, order, merges, scores)
    _prove(_C.Tokenizer(made), backend)
    return made


def refusal_bytes(reason: str) -> bytes:
    """The bytes of a tokens file without a tokenizer: it has only the reason."""
    return _file([0], Tables([reason]), [], [], [])


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    return vocabulary if isinstance(vocabulary, dict) else {text: i for i, (text, _) in enumerate(vocabulary)}


def _model(model: dict[str, Any], tables: Tables) -> tuple[list[int], list[int], list[tuple[int, ...]], list[float]]:
    """The model's numbers, its tokens by text, its merges and its scores."""
    vocabulary, kind = _vocabulary(model), model["type"]
    if kind not in _KINDS:
        raise Unsupported(f"the tokenizer has a model {kind!r}")
    if model.get("dropout"):
        raise Unsupported("the tokenizer drops merges at random")
    if len(vocabulary) != len(model["vocab"]):
        raise Unsupported("the tokenizer has two tokens of the same text")
    order = [number for _, number in sorted((text.encode(), number) for text, number in vocabulary.items())]
    unknown = model.get("unk_id") if kind == "Unigram" else vocabulary.get(model.get("unk_token") or "")
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    bytes_ = [vocabulary.get(f"<0x{byte:02X}>", NONE) for byte in range(256)] if model.get("byte_fallback") else []
    if bytes_ and (prefix or suffix):
        raise Unsupported("the tokenizer has tokens of bytes, and a prefix or suffix")
    scores = [score for _, score in model["vocab"]] if kind == "Unigram" else []
    fuses = model.get("fuse_unk", True) if kind == "Unigram" else model.get("fuse_unk", False)
    head = [
        _KINDS.index(kind), NONE if unknown is None else unknown, tables.text(prefix), tables.text(suffix), int(fuses),
        int(model.get("ignore_merges", False)), model.get("max_input_chars_per_word", 0), len(bytes_), *bytes_,
    ]  # fmt: skip
    return head, order, _merges(model.get("merges", []), vocabulary, len(prefix)), scores


def _merges(merges: list[Any], vocabulary: dict[str, int], prefix: int) -> list[tuple[int, ...]]:
    made: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made[vocabulary[left], vocabulary[right]] = rank, vocabulary[left + right[prefix:]]
    return sorted((*pair, *merge) for pair, merge in made.items())


def _added(added: list[dict[str, Any]], backend: Any, tables: Tables, control: frozenset[int]) -> list[int]:
    flags_of = (("single_word", _SINGLE_WORD), ("lstrip", _STRIP_LEFT), ("rstrip", _STRIP_RIGHT), ("special", _SPECIAL))
    needs_words = any(each["single_word"] for each in added)
    needs_spaces = any(each["lstrip"] or each["rstrip"] for each in added)
    words = tables.code.add_class(letters()) if needs_words else NONE
    head = [words, tables.code.add_class(rust_spaces()) if needs_spaces else NONE, len(added)]
    for each in added:
        normalized = NONE
        if each["normalized"]:
            content = each["content"] if backend.normalizer is None else backend.normalizer.normalize_str(each["content"])
            normalized = tables.text(content)
        flags = sum(flag for name, flag in flags_of if each[name]) + _CONTROL * (each["id"] in control)
        shown = backend.id_to_token(each["id"])  # some versions return it normalized
        if shown != each["content"]:
            flags &= ~_SPECIAL  # the library knows special tokens by their contents
        head += [each["id"], tables.text(shown), normalized, flags]
    return head


def _around(backend: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    texts = ("ab", *(text for text in hard_texts(64, 2, [*backend.get_vocab()][:1000]) if text))
    text = next((text for text in texts if backend.encode(text, add_special_tokens=False).ids), "")
    inner, whole = (backend.encode(text, add_special_tokens=special).ids for special in (False, True))
    for at in range(len(whole) - len(inner) + 1):
        if whole[at : at + len(inner)] == inner:
            return whole[:at], whole[at + len(inner) :]
    raise Unsupported("the tokenizer changes tokens when it adds special ones")


def _settings(settings: TextSettings) -> list[int]:
    keys, _, values = settings.cache.partition(",")
    reals = [settings.sampling.get(name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")]
    given = [default if real is None else real for real, default in zip(reals, (0.0, 1.0, 0.0, 1.0), strict=True)]
    words = struct.unpack(f"<{2 * len(given)}I", struct.pack(f"<{len(given)}d", *given))
    caches = [_CACHES.index(keys), _CACHES.index(values or keys)]
    least = (1 << 32) - 2
    return [
        len(settings.stop), *settings.stop, *caches, *words, min(settings.sampling.get("top_k") or 0, least),
        min(settings.max_new_tokens or 0, least), settings.plan,
    ]  # fmt: skip


def _file(head: list[int], tables: Tables, order: list[int], merges: list[tuple[int, ...]], scores: list[float]) -> bytes:
    texts = [text.encode() for text in tables.texts]
    ends, end = [], 0
    for text in texts:
        end += len(text)
        ends.append(end)
    classes, ranges, spans = tables.code.classes, list[int](), list[int]()
    for each in classes:
        spans += [len(ranges) // 2, len(each)]
        ranges += [edge for part in each for edge in part]
    rows = (merges, tables.code.steps, tables.maps, tables.compositions)
    merged, code, maps, compositions = ([number for row in table for number in row] for table in rows)
    reals = struct.pack(f"<{len(scores)}d", *scores)
    words = [head, ends, b"".join(texts), order, merged, reals, ranges, spans, code, maps, compositions]
    sections = [each if isinstance(each, bytes) else struct.pack(f"<{len(each)}I", *each) for each in words]
    at, entries, body = _HEADER + _ENTRY * _SECTIONS, b"", b""
    for section in sections:
        entries += struct.pack("<QQ", at, len(section))
        section += bytes(-len(section) % 8)
        body += section
        at += len(section)
    return _MAGIC + struct.pack("<II", _VERSION, zlib.crc32(entries + body)) + entries + body


_SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x780), (0x900, 0xE80), (0x1100, 0x1200),
    (0x1E00, 0x2070), (0x2100, 0x2200), (0x3000, 0x3100), (0x4E00, 0x4E80), (0xAC00, 0xAC80), (0xFB00, 0xFB50),
    (0xFF00, 0xFFF0), (0x1F300, 0x1F700), (0x1D400, 0x1D480), (0, 0x110000),
)  # fmt: skip


def hard_texts(count: int, seed: int, pieces: list[str]) -> list[str]:
    """Random texts of many scripts, spaces, marks and pieces of a tokenizer's own tokens."""
    chance, texts = random.Random(seed), list[str]()
    spaces = [" ", " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\n\n", "   ", "\u2581", "'s", "'LL", "1", "2024", "."]
    for _ in range(count):
        parts = []
        for _ in range(chance.randrange(1, 24)):
            kind = chance.random()
            if kind < 0.3:
                parts.append(chance.choice(spaces))
            elif kind < 0.6 and pieces:
                parts.append(chance.choice(pieces))
            else:
                begin, end = chance.choice(_SCRIPTS)
                codes = (chance.randrange(begin, end) for _ in range(chance.randrange(1, 6)))
                parts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
        texts.append("".join(parts))
    return texts


def difference(made: _C.Tokenizer, backend: Any, texts: list[str]) -> str | None:
    """The first difference between a tokens file and its tokenizer; None: they give the same tokens and texts."""
    from tokenizers.decoders import DecodeStream

    for special in (True, False):
        for text, encoding in zip(texts, backend.encode_batch(texts, add_special_tokens=special), strict=True):
            if made.encode(text, special) != encoding.ids:
                return f"the tokens of {text[:40]!r} differ"
    for text, encoding in zip(texts, backend.encode_batch(texts), strict=True):
        ids = encoding.ids
        for plain in (True, False):
            if made.decode(ids, plain) != backend.decode(ids, skip_special_tokens=plain):
                return f"the decoded text of {text[:40]!r} differs"
    for text in texts[:: len(texts) // 64 + 1]:
        ids = backend.encode(text).ids
        stream = DecodeStream(ids=ids[:2], skip_special_tokens=True)
        if made.stream(ids[:2], ids[2:]) != [stream.step(backend, token) or "" for token in ids[2:]]:
            return f"the text of {text[:40]!r} differs when its tokens come one by one"
    return None


def _prove(made: _C.Tokenizer, backend: Any) -> None:
    from ..llm.plain_tokenizer import TEXTS

    names = [token.content for token in backend.get_added_tokens_decoder().values()]
    vocabulary = sorted(backend.get_vocab().values())
    few = [[token] for token in vocabulary[:: len(vocabulary) // 2048 + 1]]
    pieces = [*names[:256], *backend.decode_batch(few, skip_special_tokens=False)]
    texts = [*TEXTS, *(f"a {name} b{name}{name}\n" for name in names[:256]), *hard_texts(1000, 1, pieces)]
    found = difference(made, backend, texts)
    if found is not None:
        raise Unsupported(f"programs without Python would not give the tokenizer's tokens: {found}")


def write_tokens(model: Any, plan: Path, stop: list[int] | None) -> str | None:
    """Writes the tokens file beside a plan, if the checkpoint there has a tokenizer.

    Args:
        model: a model of transformers.
        stop: tokens that end a text; None: those of the model and the tokenizer.

    Returns:
        The reason why the file has no tokenizer, which the file has too; None if it has one.
    """
    file = plan.with_name(TOKENS)
    file.unlink(missing_ok=True)
    if not any((file.parent / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    try:
        content, refusal = _checkpoint_bytes(model, plan, stop), None
    except Exception as error:  # tokenizers raises Exception itself; struct.error: a number above 32 bits
        refusal = str(error) or type(error).__name__
        content = refusal_bytes(refusal)
    with replacing(file, ".tokens") as written, open(written, "wb") as opened:
        opened.write(content)
        sync(opened)
    return refusal


def _checkpoint_bytes(model: Any, plan: Path, stop: list[int] | None) -> bytes:
    from ..llm.caches import name_of
    from ..llm.chat import sampling_of
    from ..llm.loading import load_tokenizer, stop_tokens
    from ..llm.templates import control_tokens, render

    tokenizer = load_tokenizer(plan.parent)
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    sampling, most, _ = sampling_of(model)
    control = control_tokens(tokenizer)
    settings = TextSettings(
        stop_tokens(model, tokenizer) if stop is None else stop, name_of(model.dtype), vars(sampling), most, template,
        special=special, control=frozenset(control.values()), plan=int.from_bytes(plan.read_bytes()[-4:], "little"),
    )  # fmt: skip
    made = token_bytes(backend, settings)
    program = _C.Tokenizer(made)
    for system, messages in conversations([*control][:4]) if template else ():
        roles = ("system", "user", "assistant")
        dicts = [{"role": roles[0], "content": system}] if system is not None else []
        dicts += [{"role": roles[1 + i % 2], "content": text} for i, text in enumerate(messages)]
        try:
            found, expected = program.chat(system, messages), render(tokenizer, dicts, template)
        except ValueError:
            continue  # refused, here or there, with a message
        if found != expected:
            reason = f"the chat template is not supported: it treats {messages[-1][:40]!r} in an unknown way"
            return token_bytes(backend, replace(settings, template=None, no_chat=reason))
    return made
