"""Conversations with images: models that see them, and the prompts of requests."""

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
_LOW_PIXELS = 1 << 18  # of an image with the detail "low", as in OpenAI's API


@dataclass(eq=False)
class ImageModel(LanguageModel):
    """A model that generates texts about images."""

    processor: Any = None  # of transformers
    pixels: int | None = None  # images with more are scaled down

    @property
    def decoder(self) -> ImageDecoder:
        """The decoder of the batch."""
        decoder: Any = self.batch.decoder
        return decoder

    def _documents(self, asked: Conversation) -> list[dict[str, Any]]:
        return [_in_parts(each, [{"type": "text", "text": each["content"]}]) for each in asked.documents]

    def inputs(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The processor's inputs for a conversation with images.

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
) -> ImageModel:  # fmt: skip
    """Prepares a loaded model.

    Args:
        path: its directory, with a processor.
        template: a chat template; None: the processor's.
        pixels: images with more are scaled down.
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
    made = ImageModel.of(name, decoder, model, tokenizer, template, stop_tokens(model, tokenizer), **settings)
    assert isinstance(made, ImageModel)
    made.processor, made.pixels = processor, pixels
    return made


@dataclass
class _Opened:
    image: Any  # of Pillow
    digest: bytes


class Images:
    """Makes the prompts of conversations."""

    def __init__(self, limits: Limits, engine: Engine, read: Callable[..., Awaitable[Any]]):
        """
        Args:
            read: runs a function on the thread of tokenizers.
        """
        self._limits, self._engine, self._read = limits, engine, read
        self._open = asyncio.Semaphore(limits.images_at_once)
        # A canceled request leaves its thread running, so the number of threads is limited too.
        self._opener = ThreadPoolExecutor(limits.images_at_once, "lowbit-images")

    def close(self) -> None:
        """Ends the threads that open images."""
        self._opener.shutdown(cancel_futures=True)

    async def prompt(self, model: LanguageModel, asked: Conversation, tools: list[dict[str, Any]] | None) -> list[int]:
        """The tokens of a conversation, whose images are computed unless they are known.

        Raises:
            ApiError: the model takes no images, an image is refused, or the template refuses the conversation.
        """
        urls = asked.images
        if not urls:
            tokens: list[int] = await self._read(model.conversation, asked, tools)
            return tokens
        if not isinstance(model, ImageModel):
            raise bad("messages", f"the model {model.name} takes no images; expected text parts", "no_images")
        if asked.continue_final_message or not asked.add_generation_prompt or asked.chat_template_kwargs:
            raise bad(
                "messages", "messages has images; expected no message to continue (continue_final_message, or a last message "
                "of the assistant), no chat_template_kwargs, and no add_generation_prompt", "no_images",
            )  # fmt: skip
        if len(urls) > self._limits.images:
            raise bad("messages", f"messages has {len(urls)} images; expected at most {self._limits.images}")
        async with self._open:  # others wait, because decoded images take much memory
            opening = asyncio.get_running_loop().run_in_executor(self._opener, self._opened, urls, model.pixels)
            opened = await opening
            return await self._prompt(model, asked, tools, opened)

    def _opened(self, urls: list[Url], pixels: int | None) -> list[_Opened]:
        from ..llm.images import MOST_PIXELS, digest, read_image, scaled

        opened, left = [], self._limits.image_pixels
        for number, url in enumerate(urls):
            name = f"image {number}" if len(urls) > 1 else "the image"
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

    async def _prompt(self, model: ImageModel, asked: Conversation, tools: Any, opened: list[_Opened]) -> list[int]:
        from ..llm.image_decoder import ImagePrompt

        following = iter(opened)
        messages = [_document(message, following) for message in asked.messages]
        ready: list[tuple[_Opened, Any, dict[str, Any]]] = []
        count = 0
        for each in opened:  # one by one, because the numbers of a large image take much memory
            image, alone = model.decoder.image(each.digest), {}
            if image is None:
                # One image in a call: its result does not depend on others, and running texts get their turn in between.
                alone = await self._read(model.inputs, [_shown(each.image)])
            count += int((alone["input_ids"] == model.decoder.image_token).sum()) if image is None else len(image)
            if count >= model.max_length:
                raise bad(
                    "messages", f"messages has images of {count} tokens or more; expected fewer than the {model.max_length} "
                    "of the context", "context_length_exceeded",
                )  # fmt: skip
            ready.append((each, image, alone))
        inputs = await self._read(model.inputs, messages, tools)
        plain: list[int] = inputs["input_ids"][0].tolist()
        model.check_prompt(plain, "messages")  # before its images are computed
        found: list[Any] = []
        try:
            for each, image, alone in ready:
                if image is None:
                    future: Future = self._engine.call(partial(model.decoder.look, each.digest, alone))
                    image = await asyncio.wrap_future(future)
                found.append(image)
            return ImagePrompt(plain, found, model.decoder.image_token)
        except ValueError as error:
            raise bad("messages", f"the model {model.name} does not take these images: {error}", "invalid_image") from error


def _shown(image: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}


def _document(message: Message, images: Any) -> dict[str, Any]:
    """A message for chat templates of models that see images."""

    def part(each: Content) -> dict[str, Any]:
        if each.type == "image_url":
            return {"type": "image", "image": next(images).image}
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


def refuse_images(asked: Conversation) -> None:
    """Raises ApiError for a conversation with images, for endpoints that need only its text."""
    if asked.images:
        raise ApiError(400, "messages has an image; expected text parts", param="messages", code="no_images")
