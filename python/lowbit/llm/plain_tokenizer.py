"""A tokenizer without transformers, whose import takes seconds, and the proof that it does the same."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from .. import _C
from ..files.plan_facts import PLAN, TOKENS
from ..files.tokenizer_json import TOKENIZER, load_backend
from ..files.untrusted import read_json
from .loading import TextStream
from .templates import chat_template, render

TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class _AddedToken:
    """What is asked of an AddedToken of the tokenizers library."""

    content: str
    special: bool

    def __str__(self) -> str:
        return self.content


def tables_of(directory: Path) -> _C.Tokenizer | None:
    """The tokenizer in the tokens file that was written and proven with the plan in ``directory``; None: there is none.

    A plan that fits the files beside it (:func:`lowbit.files.plan_facts.described`) was written for this tokenizer.json.
    """
    try:
        found = _C.open_tokenizer(os.fsencode(directory / TOKENS))
        with open(directory / PLAN, "rb") as file:
            file.seek(-4, 2)
            belongs = found.plan == int.from_bytes(file.read(), "little")
    except (OSError, ValueError):  # there is no such file, or it says why the tokenizer has no tables
        return None
    # The library would decode such a token to its own text in other places.
    return found if belongs and all(text == shown for _, text, shown, _ in found.added) else None


class PlainTokenizer:
    """What texts and conversations need of a fast tokenizer of transformers, by the tokenizers library alone.

    With ``tables``, whose files open in a tenth of the time, the library is loaded only for what they do not have.
    """

    def __init__(self, directory: Path, special: dict[str, str], tables: _C.Tokenizer | None = None, *, checked: bool = False):
        """
        Args:
            directory: has tokenizer.json.
            special: the names of special tokens, such as "bos_token", and their texts, for chat templates.
            tables: the same tokenizer as tables (:func:`tables_of`).
            checked: as for :func:`lowbit.files.tokenizer_json.load_backend`.

        Raises:
            OSError, ValueError: a file is missing or damaged.
        """
        self.name_or_path, self.tables, self._special, self._checked = str(directory), tables, special, checked
        if tables is None:
            self.added_tokens_decoder: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        else:
            self.added_tokens_decoder = {token: _AddedToken(text, special) for token, text, _, special in tables.added}

    @cached_property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the library."""
        return load_backend(Path(self.name_or_path), self._checked)

    @property
    def chat_template(self) -> Any:
        """The chat template; None: there is none."""
        directory = Path(self.name_or_path)
        if (directory / TEMPLATE).exists():
            return (directory / TEMPLATE).read_text(encoding="utf-8")
        found = read_json(directory / _CONFIG).get("chat_template") if (directory / _CONFIG).exists() else None
        return {each["name"]: each["template"] for each in found} if isinstance(found, list) else found

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False) -> dict[str, Any]:
        if self.tables is not None and not return_offsets_mapping:
            with suppress(ValueError, IndexError):  # a text that is too long or too hard for them
                return {"input_ids": self.tables.encode(text, add_special_tokens)}
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as transformers renders it."""
        from .template_environment import compiled

        assert not tokenize
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        return compiled(chat_template).render(
            messages=given, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
            **self._special | variables,
        )  # fmt: skip


# Each text has what some tokenizers treat in a way of their own.
TEXTS = (
    "", " ", "a", " a", "a ", "  two  spaces   three", "\n", "\n\nlines\r\nof\tother\x0bsystems\x85\u2028\u2029end\n ",
    "Hello, world! It's 3.14159 o'clock; 1234567890 times -- isn't it? I'll, we've, THEY'D", "CamelCase snake_case kebab-case",
    "def f(x):\n    return {'a': [x ** 2, not x], \"b\": f'{x!r}'}  # comment\n\n\n",
    "https://example.org/a?b=c&d=%20#e user@host",
    "Größe Ærø naïve Ångström A\u030angstro\u0308m \ufb01n \u1e9b\u0323 \u212b ①²½ Ⅷ", "Привет, мир! Ελληνικά Հայերեն ქართული",
    "שלום עולם \u202eабв\u202c العربية ١٢٣ فارسی ۴۵", "नमस्ते दुनिया বাংলা தமிழ் తెలుగు ไทย ພາສາລາວ မြန်မာ",
    "你好，世界！日本語のテキスト、カタカナ 한국어 ㄱㄴ ﾊﾝｶｸ 東京",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ ☺ 𝒳 𐍈 \U0001f9d1\U0001f3fd\u200d\U0001f4bb", "\u200b\u200c\u200d\ufeff\u00a0\u3000\u00ad\u2060 zero",
    "\x00\x01\x07\x1b[31m\x7f\x80\x9f control",
    "\ue000\U000f0000\U0010fffd \ufffd \ufdd0 private", "a\u0301\u0301\u0301e\u0300 o\u0308\u0304 q\u0307\u0323",
    "▁ ▁▁a Ġ Ċ ĠĠb Ã© <0x41> <0x0A> ##ing @@ </w>", "x" * 300, "1" * 40, " " * 70 + "end", "!?" * 40, "ÀÉÎ" * 30,
)  # fmt: skip
_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2?\n"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "\U0001f600 東京 שלום"}],
    [
        {"role": "user", "content": "First"}, {"role": "assistant", "content": "One\n\n"},
        {"role": "user", "content": "Second <|im_end|> </s> [/INST] <b>&amp;</b>"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nTwo"}, {"role": "user", "content": "Third"},
    ],
    [
        {"role": "system", "content": "You are {{ name }} {% if %}"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""}, {"role": "user", "content": "b"},
    ],
)  # fmt: skip
_MOST_TOKENS = 4096  # of the vocabulary and of the added tokens, whose texts are compared


def difference(tokenizer: Any, directory: Path, special: dict[str, str]) -> str | None:
    """What the plain tokenizer of a directory does not do as ``tokenizer`` of transformers; None: they do the same.

    Texts of many scripts, texts of tokens and conversations are compared.
    """
    if not (directory / TOKENIZER).exists():
        return f"there is no {TOKENIZER}"
    plain = PlainTokenizer(directory, special)
    added = [
        {number: (each.content, each.special) for number, each in one.added_tokens_decoder.items()}
        for one in (plain, tokenizer)
    ]
    if added[0] != added[1]:
        return "special tokens differ"
    vocabulary = tokenizer.get_vocab()
    if plain.backend_tokenizer.get_vocab(with_added_tokens=True) != vocabulary:
        return "the vocabulary differs"
    names = [name for name, _ in islice(added[0].values(), _MOST_TOKENS)]
    texts = [*TEXTS, *names, *(f"a {name} b{name}{name}\n" for name in names)]
    tokens = sorted(vocabulary.values())[:: len(vocabulary) // _MOST_TOKENS + 1]
    texts += plain.backend_tokenizer.decode_batch([[token, token] for token in tokens], skip_special_tokens=False)
    for special_tokens in (True, False):
        expected = tokenizer(texts, add_special_tokens=special_tokens, return_offsets_mapping=True)
        for text, ids, offsets in zip(texts, expected["input_ids"], expected["offset_mapping"], strict=True):
            found = plain(text, special_tokens)
            if found["input_ids"] != ids or found["offset_mapping"] != offsets:
                return f"the tokens of {text[:40]!r} differ"
    for text in TEXTS:
        ids = plain(text)["input_ids"]
        streams = [[stream.push(token) for token in ids] for stream in (TextStream(plain, ids), TextStream(tokenizer, ids))]
        if streams[0] != streams[1]:
            return f"the decoded text of {text[:40]!r} differs"
    return _template_difference(plain, tokenizer)


def _template_difference(plain: PlainTokenizer, tokenizer: Any) -> str | None:
    template, expected = plain.chat_template, tokenizer.chat_template
    if template != expected:
        return "the chat template is another one"
    if not template:
        return None
    template = chat_template(tokenizer, "")
    for messages in _CONVERSATIONS:
        rendered: list[Any] = []
        for one in (plain, tokenizer):
            try:
                rendered.append(render(one, messages, template))
            except ValueError as error:  # some templates take no system prompt
                rendered.append(str(error))
        if rendered[0] != rendered[1]:
            return "the chat template gives another text"
    return None
