"""Conversations with pictures: models that see them, and the prompts of requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .engine import Engine
from .errors import ApiError, bad, shortened
from .limits import Limits
from .model_list import LanguageModel
from .protocol import Content, Conversation, Message, Url

if TYPE_CHECKING:
    from ..llm.image_decoder import ImageDecoder

_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)
_LOW_PIXELS = 1 << 18  # of a picture with the detail "low", as in OpenAI's API


@dataclass(eq=False)
class PictureModel(LanguageModel):
    """A model that generates texts about pictures."""

    processor: Any = None  # of transformers
    pixels: int | None = None  # pictures with more are scaled down

    @property
    def decoder(self) -> ImageDecoder:
        """The decoder of the batch."""
        decoder: Any = self.batch.decoder
        return decoder

    def _documents(self, asked: Conversation) -> list[dict[str, Any]]:
        return [_in_parts(each, [{"type": "text", "text": each["content"]}]) for each in asked.documents]

    def inputs(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The processor's inputs for a conversation with pictures.

        Raises:
            ApiError: the processor or the template refuses it.
        """
        from ..llm.images import inputs_of

        assert self.template is not None
        self.check_tools(tools)
        try:
            return inputs_of(self.processor, messages, self.template, tools)
        except ValueError as error:
            raise bad("messages", str(error)) from error


def load(
    name: str, path: Path, model: Any, *, max_length: int, cache: str | None, template: str | None, pixels: int | None,
    **settings: Any,
) -> PictureModel:  # fmt: skip
    """Prepares a loaded model.

    Args:
        path: its directory, with a processor.
        template: a chat template; None: the processor's.
        pixels: pictures with more are scaled down.
        settings: as for :meth:`LanguageModel.of`.

    Raises:
        ImportError, OSError, ValueError: the processor does not load, or the language model has no plan.
    """
    from ..llm.image_decoder import ImageDecoder
    from ..llm.images import image_template
    from ..llm.loading import load_image_processor, stop_tokens

    processor = load_image_processor(path)
    decoder, tokenizer = ImageDecoder(model, max_length, cache), processor.tokenizer
    template = template or image_template(processor, path)
    made = PictureModel.of(name, decoder, model, tokenizer, template, stop_tokens(model, tokenizer), **settings)
    assert isinstance(made, PictureModel)
    made.processor, made.pixels = processor, pixels
    return made


@dataclass
class _Opened:
    image: Any  # of Pillow
    digest: bytes


class Pictures:
    """Makes the prompts of conversations."""

    def __init__(self, limits: Limits, engine: Engine, read: Callable[..., Awaitable[Any]]):
        """
        Args:
            read: runs a function on the thread of tokenizers.
        """
        self._limits, self._engine, self._read = limits, engine, read
        self._open = asyncio.Semaphore(limits.pictures_at_once)
        # A canceled request leaves its thread running, so the number of threads is limited too.
        self._opener = ThreadPoolExecutor(limits.pictures_at_once, "lowbit-pictures")

    def close(self) -> None:
        """Ends the threads that open pictures."""
        self._opener.shutdown(cancel_futures=True)

    async def prompt(self, model: LanguageModel, asked: Conversation, tools: list[dict[str, Any]] | None) -> list[int]:
        """The tokens of a conversation, whose pictures are computed unless they are known.

        Raises:
            ApiError: the model takes no pictures, a picture is refused, or the template refuses the conversation.
        """
        urls = asked.pictures
        if not urls:
            tokens: list[int] = await self._read(model.conversation, asked, tools)
            return tokens
        if not isinstance(model, PictureModel):
            raise bad("messages", f"the model {model.name} takes no pictures; expected text parts", "no_pictures")
        if asked.continue_final_message or not asked.add_generation_prompt or asked.chat_template_kwargs:
            raise bad(
                "messages", "messages has pictures; expected no message to continue (continue_final_message, or a last message "
                "of the assistant), no chat_template_kwargs, and no add_generation_prompt", "no_pictures",
            )  # fmt: skip
        if len(urls) > self._limits.pictures:
            raise bad("messages", f"messages has {len(urls)} pictures; expected at most {self._limits.pictures}")
        async with self._open:  # others wait, because decoded pictures take much memory
            opening = asyncio.get_running_loop().run_in_executor(self._opener, self._opened, urls, model.pixels)
            opened = await opening
            return await self._prompt(model, asked, tools, opened)

    def _opened(self, urls: list[Url], pixels: int | None) -> list[_Opened]:
        from ..llm.images import MOST_PIXELS, digest, read_image, scaled

        opened, left = [], self._limits.picture_pixels
        for number, url in enumerate(urls):
            name = f"picture {number}" if len(urls) > 1 else "the picture"
            data = _decoded(url.url, name)
            url.url = ""  # it would stay in memory until the answer
            try:
                image = read_image(io.BytesIO(data), name, left)
            except ValueError as error:
                raise bad("messages", str(error), "invalid_image") from error
            left -= image.width * image.height
            budgets = [pixels or MOST_PIXELS, _LOW_PIXELS if url.detail == "low" else MOST_PIXELS]
            image = scaled(image, min(budgets))
            opened.append(_Opened(image, digest(image)))
        return opened

    async def _prompt(self, model: PictureModel, asked: Conversation, tools: Any, opened: list[_Opened]) -> list[int]:
        from ..llm.image_decoder import PicturePrompt

        following = iter(opened)
        messages = [_document(message, following) for message in asked.messages]
        ready: list[tuple[_Opened, Any, dict[str, Any]]] = []
        count = 0
        for each in opened:  # one by one, because the numbers of a large picture take much memory
            picture, alone = model.decoder.picture(each.digest), {}
            if picture is None:
                # One picture in a call: its result does not depend on others, and running texts get their turn in between.
                alone = await self._read(model.inputs, [_shown(each.image)])
            count += int((alone["input_ids"] == model.decoder.image_token).sum()) if picture is None else len(picture)
            if count >= model.max_length:
                raise bad(
                    "messages", f"messages has pictures of {count} tokens or more; expected fewer than the {model.max_length} "
                    "of the context", "context_length_exceeded",
                )  # fmt: skip
            ready.append((each, picture, alone))
        inputs = await self._read(model.inputs, messages, tools)
        plain: list[int] = inputs["input_ids"][0].tolist()
        model.check_prompt(plain, "messages")  # before its pictures are computed
        found: list[Any] = []
        try:
            for each, picture, alone in ready:
                if picture is None:
                    future: Future = self._engine.call(partial(model.decoder.look, each.digest, alone))
                    picture = await asyncio.wrap_future(future)
                found.append(picture)
            return PicturePrompt(plain, found, model.decoder.image_token)
        except ValueError as error:
            raise bad("messages", f"the model {model.name} does not take these pictures: {error}", "invalid_image") from error


def _shown(image: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}


def _document(message: Message, pictures: Any) -> dict[str, Any]:
    """A message for chat templates of models that see pictures."""

    def part(each: Content) -> dict[str, Any]:
        if each.type == "image_url":
            return {"type": "image", "image": next(pictures).image}
        return {"type": "text", "text": each.text}

    return _in_parts(message.document, [part(each) for each in message.content or ()])


def _in_parts(document: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A message whose content is a list. A tool's result stays a string, because templates insert it unchanged."""
    is_text = document["role"] == "tool" and all(each["type"] == "text" for each in parts)
    return document if is_text else document | {"content": parts}


def _decoded(url: str, name: str) -> bytes:
    """The bytes of a data URL."""
    start = _DATA.match(url)
    if start is None:
        raise bad(
            "messages", f"{name} is at {shortened(url, 60)!r}; expected a data URL (data:image/png;base64,...), because the "
            "server fetches nothing", "invalid_image_url",
        )  # fmt: skip
    try:
        return base64.b64decode(url[start.end() :].encode(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad("messages", f"{name} is not base64: {error}", "invalid_image_url") from error


def refuse_pictures(asked: Conversation) -> None:
    """Raises ApiError for a conversation with pictures, for endpoints that need only its text."""
    if asked.pictures:
        raise ApiError(400, "messages has a picture; expected text parts", param="messages", code="no_pictures")
