"""Converts between the tokenizer in a GGUF file's metadata and a fast tokenizer, with the tables of transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, normalizers, processors

from ..files.untrusted import interpreting, printable
from .from_pretrained import counting

_PREFIX = "tokenizer.ggml."
_FIELDS = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# A "cut" is the name of a pre-tokenizer, which splits a text into words.
_PLAIN_CUTS = ("default", "gpt-2", "gpt2")  # GPT-2's pre-tokenizer, the converter's default
# Pre-tokenizers that transformers does not know -> an equivalent one that it knows (_SAME_CUTS), or expressions that split a
# text one after the other, and whether GPT-2's expression follows (_MORE_CUTS).
_SAME_CUTS = {"glm4": "llama-bpe", "glm5": "llama-bpe", "chatglm-bpe": "llama-bpe"}
# Character class of DeepSeek's first tokenizer: cased letters, without some scripts and mathematical letters.
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
_DEEPSEEK_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MORE_CUTS = {
    "deepseek-v3": (
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        ),
        False,
    ),
    "deepseek-llm": (("[\r\n]", rf"\s?{_CASED}+", rf"\s?{_DEEPSEEK_PUNCTUATION}+", r"\s+$", _EAST_ASIAN, r"\p{N}+"), False),
    "deepseek-coder": (("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"), False),
    "falcon": (
        (r"[\p{P}$+<=>^~|`]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", "[0-9][0-9][0-9]"),
        False,
    ),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r"), ((r"\p{N}",), True)),
}
_QWEN_CUTS = ("qwen2", "qwen35")


def _converter() -> ModuleType:
    try:
        return import_module("transformers.integrations.gguf")
    except ImportError:  # earlier 5.x versions
        return import_module("transformers.integrations.ggml")


def _cuts(converter: ModuleType) -> Mapping[str, str] | None:
    """The pre-tokenizer expressions that transformers knows, by their names in GGUF files."""
    known = getattr(converter, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if known is None and hasattr(converter, "__path__"):
        known = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    return known


def _check(path: Path, fields: Mapping[str, Any], vocabulary: int) -> None:
    tokens = fields["tokens"]
    texts = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if not texts or not 1 <= len(tokens) <= vocabulary:
        actual = f"{len(tokens)} texts" if texts else "something else"
        raise ValueError(f"{path} has {actual} as tokenizer.ggml.tokens; expected 1 to {vocabulary} texts")
    seen = set()
    for token in tokens:
        if token in seen:
            raise ValueError(f"{path} has the token {printable(token)!r} twice")
        seen.add(token)
    for name in ("scores", "token_type"):
        if name in fields and (not isinstance(fields[name], list) or len(fields[name]) != len(tokens)):
            raise ValueError(f"{path} has tokenizer.ggml.{name} for another number of tokens than {len(tokens)}")
    wrong = [kind for kind in fields.get("token_type", []) if isinstance(kind, bool) or kind not in range(_BYTE + 1)]
    if wrong:
        raise ValueError(f"{path} has the type {wrong[0]!r:.100} of a token; expected 0 to {_BYTE}")
    if fields["tokenizer_type"] in ("llama", "t5"):
        wrong = [score for score in fields.get("scores", [None]) if not isinstance(score, int | float) or not isfinite(score)]
        if wrong:
            raise ValueError(f"{path} has the score {wrong[0]!r:.100} of a token; expected a finite number for each")
    merges = fields.get("merges", [])
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ValueError(f"{path} has no list of texts as tokenizer.ggml.merges")


def save_tokenizer(path: Path, metadata: Mapping[str, Any], architecture: str, vocabulary: int, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template of the model in a GGUF file.

    Warns if the file has no tokenizer or names an unknown pre-tokenizer.

    Args:
        path: the path of the file, for messages.
        architecture: the name in the file.
        vocabulary: number of rows of the embedding table.

    Raises:
        ValueError: the tokenizer is damaged, or of a kind that transformers cannot build.
    """
    for key in ("model", "pre"):
        value = metadata.get(_PREFIX + key, "")
        if not isinstance(value, str):
            raise ValueError(f"{path} has a {type(value).__name__} as {_PREFIX}{key}; expected a text")
    if metadata.get(f"{_PREFIX}model", "no_vocab") == "no_vocab" or f"{_PREFIX}tokens" not in metadata:
        warnings.warn(f"{path} has no tokenizer: copy a tokenizer's files into the directory", stacklevel=4)
        return
    fields = {}
    for key, name in _FIELDS.items():
        if f"{_PREFIX}{key}" in metadata:
            value = metadata[f"{_PREFIX}{key}"]
            fields[name] = value.tolist() if isinstance(value, np.ndarray) else value
    _check(path, fields, vocabulary)
    tokens = fields["tokens"]
    special = {}
    for name, key in _SPECIAL.items():
        number = metadata.get(f"{_PREFIX}{key}_token_id")
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
                raise ValueError(f"{path} has {_PREFIX}{key}_token_id {number!r}; expected 0 to {len(tokens) - 1}")
            special[name] = tokens[number]
    add_bos = _flag(path, metadata, "add_bos_token", fields["tokenizer_type"] == "llama")
    add_eos = _flag(path, metadata, "add_eos_token", False)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{path} has a {type(template).__name__} as tokenizer.chat_template; expected a text")
    with counting(None), interpreting(f"the tokenizer in {path} cannot be built"):
        converter = _converter()
        known = _cuts(converter)
        cut = fields.get("pre_tokenizer_type", "default")
        if cut in _SAME_CUTS and cut not in (known or ()):
            fields["pre_tokenizer_type"] = cut = _SAME_CUTS[cut]
        backend, _ = converter.convert_gguf_tokenizer(architecture, fields)
        if cut in _MORE_CUTS and cut not in (known or ()):
            backend, known = _with_cuts(backend, *_MORE_CUTS[cut]), {**(known or {}), cut: ""}
        backend = _without_others(backend, len(tokens))
        if fields["tokenizer_type"] == "gpt2":
            # A token that the file names for a purpose, such as "bos", is a control token, whatever its type in the file.
            types = fields.get("token_type") or [_NORMAL] * len(tokens)
            named = set(special.values())
            types = [_OUTSIDE_TEXT if token in named else kind for token, kind in zip(tokens, types, strict=True)]
            backend = _with_whole_tokens(backend, tokens, types)
        if fields["tokenizer_type"] == "llama":
            backend = _with_spaces(backend, _flag(path, metadata, "add_space_prefix", True))
        # Qwen's original tokenizer normalizes texts. GGUF has no field for that, and llama.cpp does not do it.
        if architecture.startswith("qwen") and cut in _QWEN_CUTS and backend.normalizer is None:
            backend.normalizer = normalizers.NFC()
        if fields["tokenizer_type"] == "gpt2" and cut not in {*(known or (cut,)), *_PLAIN_CUTS}:
            warnings.warn(
                f"{path} has the pre-tokenizer {printable(str(cut))!r}, which transformers {transformers.__version__} does "
                "not know. GPT-2's is used instead, so some texts get other tokens: copy the model's own tokenizer.json "
                "into the directory",
                stacklevel=4,
            )
        _add_ends(backend, special, add_bos, add_eos, path)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(directory)
    _check_special(path, tokenizer.backend_tokenizer, fields, special)


def _without_others(backend: Tokenizer, count: int) -> Tokenizer:
    """Removes tokens that are not in the file: GPT-2's tokenizer class adds some beyond the model's table."""
    content = json.loads(backend.to_str())
    kept = [token for token in content["added_tokens"] if token["id"] < count]
    if len(kept) == len(content["added_tokens"]):
        return backend
    return type(backend).from_str(json.dumps(content | {"added_tokens": kept}))


def _with_whole_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> Tokenizer:
    """A byte-level tokenizer in which the file's control and user-defined tokens are added tokens, matched as a whole.

    transformers encodes tokens with non-ASCII characters as bytes, and does not add them.
    """
    whole = {number: tokens[number] for number, kind in enumerate(types) if kind in (_OUTSIDE_TEXT, _USER) and tokens[number]}
    content = json.loads(backend.to_str())
    vocab = {text: number for text, number in content["model"]["vocab"].items() if number not in whole}
    content["model"]["vocab"] = vocab | {text: number for number, text in whole.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {token["id"]: token for token in content["added_tokens"]}
    added |= {
        number: {"id": number, "content": text, **flags, "special": types[number] == _OUTSIDE_TEXT}
        for number, text in whole.items()
    }
    content["added_tokens"] = [added[number] for number in sorted(added)]
    return type(backend).from_str(json.dumps(content))


def _check_special(path: Path, backend: Tokenizer, fields: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Raises ValueError if a control token, or a special token named by the file, has another id or is split."""
    tokens = fields["tokens"]
    named = {text: tokens.index(text) for text in special.values()}
    control = {tokens[i]: i for i, kind in enumerate(fields.get("token_type") or []) if kind == _OUTSIDE_TEXT and tokens[i]}
    for text, number in (named | control).items():
        found = backend.token_to_id(text)
        pieces = backend.encode(text, add_special_tokens=False).ids if text in control else [number]
        if found != number or pieces != [number]:
            raise ValueError(
                f"{path} has the special token {printable(text)!r} as {number}; its tokenizer, as transformers "
                f"{transformers.__version__} builds it, gives {found} for it, and {pieces} in a text"
            )


def _with_cuts(backend: Tokenizer, expressions: tuple[str, ...], as_gpt2: bool) -> Tokenizer:
    """A byte-level tokenizer that pre-tokenizes texts with these expressions."""
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": as_gpt2}
    content = json.loads(backend.to_str()) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, letters]}}
    return type(backend).from_str(json.dumps(content))


def _with_spaces(backend: Tokenizer, prefix: bool) -> Tokenizer:
    """A SentencePiece tokenizer that, with ``prefix``, adds a space before each text between special tokens, as llama.cpp does.

    transformers adds a space before the first text only, and only if there is none already.
    """
    content = json.loads(backend.to_str())
    cut, change = content["pre_tokenizer"], content["normalizer"]
    metaspace = bool(cut) and cut["type"] == "Metaspace"
    if metaspace or (change and change["type"] == "Sequence"):
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        changes = [{"type": "Prepend", "prepend": _SPACE}, replaced] if prefix else [replaced]
        content["normalizer"] = {"type": "Sequence", "normalizers": changes}
        content["pre_tokenizer"] = None if metaspace else cut
    decoder = content["decoder"]
    if not prefix and decoder and decoder["type"] == "Sequence":  # this step strips the space that was added
        decoder["decoders"] = [step for step in decoder["decoders"] if step["type"] != "Strip"]
    return type(backend).from_str(json.dumps(content))


def _flag(path: Path, metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{path} has {_PREFIX}{name} {value!r}; expected true or false")
    return value


def _add_ends(backend: Tokenizer, special: Mapping[str, str], add_bos: bool, add_eos: bool, path: Path) -> None:
    """Makes the tokenizer add the special first and last token to each text, if the file says so."""
    wanted = {"bos_token": add_bos, "eos_token": add_eos}
    for name, wish in wanted.items():
        if wish and name not in special:
            raise ValueError(f"{path} adds a {name} to texts, but does not name one")
    first = [special["bos_token"]] if add_bos else []
    last = [special["eos_token"]] if add_eos else []
    if first or last:
        around = [(token, backend.token_to_id(token)) for token in dict.fromkeys(first + last)]
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=around
        )


_NORMAL, _UNKNOWN, _OUTSIDE_TEXT, _USER, _UNUSED, _BYTE = range(1, 7)  # token types
_SPACE = "\u2581"  # SentencePiece's symbol for a space


def tokenizer_metadata(directory: Path, tokenizer: Any, vocabulary: int) -> dict[str, Any]:
    """The GGUF metadata of a checkpoint's tokenizer.

    Warns if llama.cpp has no name for its pre-tokenizer.

    Args:
        directory: the directory of the checkpoint, for messages.
        tokenizer: a fast tokenizer.
        vocabulary: number of rows of the embedding table; rows without a token are written as unused.

    Raises:
        ValueError: the tokenizer is neither byte-level BPE nor SentencePiece BPE, the supported kinds.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ValueError(f"the tokenizer in {directory} is {model['type']}; lowbit writes BPE to GGUF")
    texts: dict[int, str] = {number: text for text, number in model["vocab"].items()}
    types = dict.fromkeys(texts, _NORMAL)
    for added in content["added_tokens"]:
        if added["id"] >= vocabulary:
            continue  # added by the tokenizer's class: the model has no row for it
        texts[added["id"]] = added["content"]
        types[added["id"]] = _OUTSIDE_TEXT if added["special"] else _USER
    if max(texts) >= vocabulary:
        raise ValueError(f"the tokenizer in {directory} has the token {max(texts)}; expected 0 to {vocabulary - 1}")
    if model.get("byte_fallback"):
        fields = _sentencepiece(directory, tokenizer, content, texts, types)
    else:
        fields = _byte_level(directory, content)
    fields |= {
        "tokens": [texts.get(number, f"[PAD{number}]") for number in range(vocabulary)],
        "token_type": [types.get(number, _UNUSED) for number in range(vocabulary)],
    }
    if "scores" in fields:
        fields["scores"] = [fields["scores"].get(texts.get(number), 0.0) for number in range(vocabulary)]
    for name, key in _SPECIAL.items():
        number = getattr(tokenizer, f"{name}_id")
        if number is not None and number < vocabulary:
            fields[f"{key}_token_id"] = number
    around = tokenizer.backend_tokenizer.encode("").ids  # the tokens added around every text
    fields["add_bos_token"] = around[:1] == [tokenizer.bos_token_id]
    fields["add_eos_token"] = around[fields["add_bos_token"] :] == [tokenizer.eos_token_id]
    metadata = {_PREFIX + key: value for key, value in fields.items()}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def _byte_level(directory: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer, without its tokens."""
    model, cut, normalizer = content["model"], content["pre_tokenizer"], content["normalizer"]
    parts = cut["pretokenizers"] if cut and cut["type"] == "Sequence" else [cut]
    if not any(part and part["type"] == "ByteLevel" for part in parts):
        raise ValueError(
            f"the tokenizer in {directory} is BPE on characters; lowbit writes to GGUF only byte-level BPE (Llama 3, Qwen) and "
            "SentencePiece's BPE with byte tokens (Llama 2, Gemma)"
        )
    if normalizer is not None and normalizer["type"] != "NFC":
        raise ValueError(f"the tokenizer in {directory} has the normalizer {normalizer['type']}; expected none, or NFC")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"model": "gpt2", "pre": _name_of_cut(directory, parts), "merges": merges}


def _sentencepiece(
    directory: Path, tokenizer: Any, content: dict[str, Any], texts: Mapping[int, str], types: dict[int, int]
) -> dict[str, Any]:
    """The metadata of a SentencePiece BPE tokenizer, without its tokens; `types` is updated with its token types.

    SentencePiece merges the neighbors whose joined token has the highest score; Hugging Face's BPE merges the pair that comes
    first in a list. The two agree if the list contains every possible pair, with all pairs of a token next to each other.
    """
    model = content["model"]
    vocab, pairs = model["vocab"], [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    for byte in range(256):
        if f"<0x{byte:02X}>" not in vocab:
            raise ValueError(f"the tokenizer in {directory} has no token <0x{byte:02X}>; expected one for each byte")
        types[vocab[f"<0x{byte:02X}>"]] = _BYTE
    unknown = model.get("unk_token") or tokenizer.unk_token
    if unknown in vocab:
        types[vocab[unknown]] = _UNKNOWN
    ranks: dict[str, float] = {}
    before = None
    for first, second in pairs:
        if first + second != before and first + second in ranks:
            raise ValueError(
                f"the tokenizer in {directory} merges {printable(first)!r} and {printable(second)!r} at another rank than "
                "other pairs that give the same token; GGUF has one score for a token"
            )
        before = first + second
        ranks.setdefault(before, -float(len(ranks)))
    known = set(pairs)
    for number, text in texts.items():
        if types[number] == _NORMAL:
            for at in range(1, len(text)):
                pair = text[:at], text[at:]
                if pair[0] in vocab and pair[1] in vocab and pair not in known:
                    raise ValueError(
                        f"the tokenizer in {directory} does not merge {printable(pair[0])!r} and {printable(pair[1])!r}, "
                        "which make a token; llama.cpp would merge them"
                    )
    stripped = [token["content"] for token in content["added_tokens"] if token["lstrip"] or token["rstrip"]]
    if stripped:
        warnings.warn(
            f"the tokenizer in {directory} drops spaces around {printable(stripped[0])!r}. GGUF has no field for this, and "
            "llama.cpp does it only for some models, which it knows by name",
            stacklevel=5,
        )
    scores = ranks | {text: -float(len(ranks)) for number, text in texts.items() if text not in ranks and types[number] == 1}
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": _prefix(directory, content)}


def _prefix(directory: Path, content: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer adds a space before a text.

    Raises:
        ValueError: it transforms texts in another way, which GGUF cannot express.
    """
    cut, change = content["pre_tokenizer"], content["normalizer"]
    changes = change["normalizers"] if change and change["type"] == "Sequence" else [change] if change else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepended = {"type": "Prepend", "prepend": _SPACE}
    if cut and cut["type"] == "Metaspace" and cut["replacement"] == _SPACE and not cut.get("split") and not changes:
        return bool(cut["prepend_scheme"] != "never")
    # Splitting at spaces has no effect if no spaces are left.
    uncut = cut is None or (cut["type"] == "Split" and cut["pattern"] == {"String": " "})
    if uncut and changes in ([replaced], [prepended, replaced]):
        return len(changes) == 2
    kinds = ", ".join(step["type"] for step in [*changes, *([cut] if cut else [])]) or "nothing"
    raise ValueError(
        f"the tokenizer in {directory} prepares texts by {kinds}; GGUF's SentencePiece replaces spaces, and may add one "
        "before a text, but does nothing else"
    )


def _name_of_cut(directory: Path, parts: list[dict[str, Any]]) -> str:
    rules = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    if len(parts) == 1 and parts[0]["use_regex"]:
        return "gpt-2"
    known = _cuts(_converter()) or {}
    names = [name for name, rule in known.items() if rules == [rule]]
    if not names:
        warnings.warn(
            f"the tokenizer in {directory} has a pre-tokenizer that llama.cpp has no name for. The GGUF file names GPT-2's "
            "instead, so llama.cpp gives other tokens for some texts",
            stacklevel=5,
        )
        return "gpt-2"
    return next((name for name in ("llama-bpe", "qwen2") if name in names), names[0])
