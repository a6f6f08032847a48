"""Image-text models: their prompts, and a decoding step for prompts with images."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from ..files.config_json import read_config
from ..files.untrusted import check_regular, interpreting, one_line
from ..hf import decoding
from ..hf.continuing import OwnCaches
from ..machine.one_text import OneText
from ..plan.recording import Unplannable, reason_of
from .chat import Chat, sampling_of
from .image_decoder import ImageDecoder, ImagePrompt
from .image_plan import ImagePlan, Inputs
from .loading import check_image_type, load_image_model, load_image_processor, stop_tokens
from .sampling import check_max_length
from .templates import chat_template, check_control_tokens
from .token_calls import check_call

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

_LOG = logging.getLogger(__name__)
_FILTERS = threading.Lock()  # Python's warning filters apply to all threads
_CONTEXT = 4096
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # without a list Pillow tries all formats, also EPS, which runs Ghostscript
_MOST_BYTES = 128 << 20  # of an image file
MOST_PIXELS = 1 << 26  # 200 MB when decoded
_REASON = "the language model runs by transformers' attention"


def takes_images(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint is an image-text model, according to its config.json.

    Raises:
        OSError, ValueError: there is no config.json, or it is damaged.
    """
    from ..hf.from_pretrained import image_model_types

    return read_config(path).get("model_type") in image_model_types()


def sees_only(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint loads only as an image-text model, and not also as a causal language model."""
    from ..hf.from_pretrained import causal_model_types

    return takes_images(path) and read_config(path).get("model_type") not in causal_model_types()


def check_takes_images(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless a checkpoint is an image-text model."""
    check_image_type(read_config(path).get("model_type"), Path(path))


def open_image(path: str | os.PathLike[str]) -> Any:
    """Reads an image file with Pillow as RGB, rotated according to its EXIF orientation; an animation's first frame.

    Args:
        path: a PNG, JPEG, WebP, GIF or BMP file of up to 128 MiB and 2**26 pixels.

    Raises:
        ImportError: Pillow is not installed.
        OSError: there is no such file, or it cannot be read.
        ValueError: the file has another format, is damaged, or is too large.
    """
    path = Path(path)
    check_regular(path)
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes; expected an image of at most {_MOST_BYTES}")
    with open(path, "rb") as file:
        return read_image(file, str(path))


def read_image(file: BinaryIO, name: str, most: int = MOST_PIXELS) -> Any:
    """Reads an image as :func:`open_image`.

    Args:
        name: the file's name in errors.
        most: the largest number of pixels.

    Raises:
        ImportError: Pillow is not installed.
        OSError: the file cannot be read.
        ValueError: the file has another format, is damaged, or has more pixels.
    """
    try:
        pillow: Any = import_module("PIL.Image")
        turned: Any = import_module("PIL.ImageOps")
    except ImportError as error:
        raise ImportError(f"{name} is read by Pillow, which is not installed: pip install pillow") from error
    try:
        with _FILTERS, warnings.catch_warnings():
            # Pillow also warns of damaged metadata that it does not need.
            warnings.simplefilter("ignore")
            with pillow.open(file, formats=_FORMATS) as image:
                pixels = image.width * image.height
                if pixels <= most:  # checked before decoding
                    return _upright(image, turned)
    except MemoryError:
        raise
    except pillow.UnidentifiedImageError as error:
        raise ValueError(f"{name} is not a readable image; expected {', '.join(_FORMATS)}") from error
    except pillow.DecompressionBombError as error:
        raise ValueError(f"{name} has too many pixels: {one_line(error)}; expected at most {most}") from error
    except Exception as error:  # Pillow raises all kinds of exceptions for damaged files
        raise ValueError(f"{name} is a damaged image: {one_line(error)}") from error
    raise ValueError(f"{name} has {pixels} pixels; expected at most {most}")


def _upright(image: Any, turned: Any) -> Any:
    """A Pillow image as RGB, rotated according to its EXIF orientation.

    Raises:
        ValueError: its numbers have no fixed range.
    """
    image = turned.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 256, "L").convert("RGB")  # Pillow itself cuts off everything above 255
    if image.mode in ("I", "F"):
        least, most = image.getextrema()
        if not (least >= 0 and 1 < most <= 255):
            raise ValueError(
                f"the image has the mode {image.mode} with values from {least:g} to {most:g}; expected 0 to 255, or the mode L "
                "or RGB"
            )
    return image.convert("RGB")


def scaled(image: Any, most: int) -> Any:
    """A Pillow image, scaled down to at most this many pixels if it has more."""
    pixels = image.width * image.height
    if pixels <= most:
        return image
    factor = (most / pixels) ** 0.5
    return image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))


def as_image(image: Any) -> Any:
    """Opens an image file, or converts a Pillow image, as :func:`open_image` does.

    Raises:
        TypeError: it is neither.
        ImportError, OSError, ValueError: as :func:`open_image`, or it has no pixels, or numbers without a fixed range.
    """
    if isinstance(image, str | os.PathLike):
        return open_image(image)
    if not hasattr(image, "convert") or not hasattr(image, "size"):
        raise TypeError(f"the image is a {type(image).__name__}; expected a path or an image of Pillow")
    if not all(image.size):
        raise ValueError(f"the image has {'x'.join(map(str, image.size))} pixels; expected at least one")
    return _upright(image, import_module("PIL.ImageOps"))


class ImageStep:
    """A decoding step of an image-text model for `generate()`.

    :meth:`look` sets a prompt with images. A text that grows is continued; any other text is recomputed. The language model
    runs by a plan, or by transformers' attention and caches; :attr:`plan_refusal` says why a model has no plan.
    """

    def __init__(self, model: torch.nn.Module, max_length: int = _CONTEXT):
        """
        Args:
            model: from :func:`load_image_model`, in eval mode.
            max_length: the longest text in tokens, those of images included.

        Raises:
            ValueError: max_length is not positive or beyond the model's positions.
        """
        config: Any = model.config.get_text_config()
        check_max_length(max_length, decoding.position_limit(config))
        self.model, self.max_length, self.vocabulary = model, max_length, config.vocab_size
        self.one_text = OneText()
        self._caches = OwnCaches(model)
        self.plan_refusal: str | None = None
        self._plan: ImagePlan | None = None
        try:
            self._plan = ImagePlan(model, max_length)
        except Exception as reason:  # transformers' attention works as well, so nothing is lost
            self._drop_plan(reason)
        self._decoder: ImageDecoder | None = None  # made for the first text whose images are computed one by one
        self._shown: Sequence[tuple[bytes, Callable[[], Mapping[str, Any]]]] = ()
        self._text: list[int] = []
        self._planned = 0  # tokens in the plan's caches
        self._prompt: list[int] = []
        self._inputs: dict[str, Any] = {}

    @property
    def refusal(self) -> str | None:
        """Why the language model does not run by a plan; None if it does."""
        return None if self.plan_refusal is None else f"{_REASON}: {self.plan_refusal}"

    def _drop_plan(self, reason: Exception | str) -> None:
        self._plan = None
        self.plan_refusal = str(reason) if isinstance(reason, (str, decoding.Refusal)) else reason_of(reason)
        _LOG.info("%s", self.refusal)

    @property
    def computed(self) -> int:
        """How many images were computed one by one; each is computed once."""
        return 0 if self._decoder is None else self._decoder.computed

    def look(
        self, inputs: Mapping[str, Any], images: Sequence[tuple[bytes, Callable[[], Mapping[str, Any]]]] = ()
    ) -> list[int]:
        """Sets the prompt with its images; returns its tokens.

        Args:
            inputs: from a processor of transformers: ``input_ids`` [1, tokens] and the inputs for images.
            images: for each image its digest (:func:`digest`), and a function that gives the inputs for a text with this
                image alone; it is called if a plan does not know the image. Without them, all images are computed for each
                text.

        Raises:
            ValueError: more than one text.
        """
        ids = inputs["input_ids"]
        if ids.dim() != 2 or len(ids) != 1:
            raise ValueError(f"input_ids has shape {list(ids.shape)}; expected [1, tokens]")
        self._inputs = {name: value for name, value in inputs.items() if name != "input_ids" and value is not None}
        self._prompt, self._shown = ids[0].tolist(), images
        self._text = []
        return list(self._prompt)

    def kept(self, count: int) -> int:
        """Number of a text's first tokens that need not be recomputed: none, because positions depend on images."""
        return 0

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Computes a step, as :meth:`lowbit.llm.Decoder.forward`.

        Raises:
            ValueError: tokens or start has another shape or dtype, a token is not in the vocabulary, or a text does not begin
                with the prompt of :meth:`look`.
            IndexError: the text is longer than max_length, or start is beyond the text.
            RuntimeError: the step is computing another text.
        """
        with self.one_text:
            check_call(tokens, start, self.vocabulary, self.max_length, len(self._text))
            return self._compute(tokens, int(start))

    def _compute(self, tokens: Tensor, begin: int) -> Tensor:
        text = self._text[:begin] + tokens[0].tolist()
        if text[: len(self._prompt)] != self._prompt:
            raise ValueError(
                "the text does not begin with the prompt of look(); expected a call of look() with this prompt first"
            )
        if self._plan is not None and (logits := self._by_plan(self._plan, text, begin)) is not None:
            return logits
        one_more = begin == len(self._text) == self._caches.count and tokens.shape[1] == 1 and begin > 0
        self._text = text
        if not one_more:
            self._caches.reset()
            count = len(self._prompt)
            logits = self._caches.run(torch.tensor([text[:count] if count else text]), 1, self._inputs)
            for end in range(count + 1, len(text) + 1) if count else ():
                logits = self._caches.run(torch.tensor([text[:end]]), 1)
            return logits[:, -1]
        return self._caches.run(torch.tensor([text]), 1)[:, -1]

    def _by_plan(self, plan: ImagePlan, text: list[int], begin: int) -> Tensor | None:
        """The logits [1, vocabulary] after a text whose first ``begin`` tokens were computed before; None if it has no plan."""
        continues = 0 < begin == self._planned
        self._planned = 0
        if not continues and not plan.fits():
            self._drop_plan("the model has been changed since the step was made")
            return None
        if continues:
            logits = plan.add(torch.tensor([text[begin:]]), begin)
        else:
            count = len(self._prompt) or len(text)
            try:
                inputs = self._separately(plan)
                logits = plan.read(torch.tensor([text[:count]]), self._inputs) if inputs is None else plan.begin(inputs)
            except Unplannable as reason:
                self._drop_plan(reason)
                return None
            if count < len(text):
                logits = plan.add(torch.tensor([text[count:]]), count)
        self._planned, self._text = len(text), text
        return logits

    def _separately(self, plan: ImagePlan) -> Inputs | None:
        """The inputs of the language model for the prompt. Images of earlier prompts are not computed again.

        None if there are no images, or if the tokens of an image depend on the images beside it.
        """
        if not (self._shown and self._prompt):
            return None
        try:
            if self._decoder is None:
                self._decoder = ImageDecoder(self.model, max(16, self.max_length // 16 * 16), plan=plan)
            images = []
            for name, alone in self._shown:
                known = self._decoder.image(name)
                images.append(self._decoder.look(name, alone()) if known is None else known)
            inputs: Inputs = self._decoder.inputs(ImagePrompt(self._prompt, images, self._decoder.image_token))
        except ValueError as reason:
            if isinstance(reason, Unplannable):
                raise
            _LOG.info("all images are computed for each text: %s", reason)
            return None
        return inputs


def digest(image: Any) -> bytes:
    """A number of 256 bits for the pixels of a Pillow image."""
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()


def inputs_of(
    processor: Any, messages: Sequence[Mapping[str, Any]], template: str, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The inputs of an image-text model for a conversation, up to the model's answer.

    Args:
        messages: with a list of parts, which may be images, as content (:func:`message`).
        tools: as for :func:`lowbit.llm.templates.render`.

    Raises:
        ValueError: the template or the processor refuses them, or a text contains the text of a control token.
    """
    check_control_tokens(processor.tokenizer, processor, list(messages), template, tools)
    with interpreting("the chat template or the image processor does not take this conversation"):
        inputs = processor.apply_chat_template(
            list(messages), chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=True,
            return_tensors="pt", **({} if tools is None else {"tools": tools}),
        )  # fmt: skip
    return dict(inputs)


def inputs_of_text(processor: Any, text: str, images: Sequence[Any], template: str | None) -> dict[str, Any]:
    """The inputs of an image-text model for a text with images: as a message, or as plain text without a template.

    Raises:
        ValueError: the template or the processor refuses them.
    """
    if template is not None:
        return inputs_of(processor, [message("user", text, images)], template)
    with interpreting("the processor does not take this text with its images"):
        return dict(processor(text=[text], images=list(images) or None, return_tensors="pt"))


def message(role: str, text: str, images: Sequence[Any] = ()) -> dict[str, Any]:
    """A message of a conversation, images first."""
    return {"role": role, "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": text}]}


@dataclass
class ImageChat(Chat):
    """A conversation with an image-text model (:func:`load_image_chat`).

    If the language model has a plan, a turn computes only what is new, and each image is computed once. Otherwise each turn
    computes all images and the whole conversation.
    """

    processor: Any = None
    pending: list[Any] = field(default_factory=list)  # images of the next message
    _shown: list[list[Any]] = field(default_factory=list)  # images of each turn that is in the context

    def show(self, image: Any) -> None:
        """Adds an image to the next message.

        Args:
            image: a path, or an image of Pillow.

        Raises:
            TypeError: it is neither.
            ImportError, OSError, ValueError: as :func:`open_image`, or it has no pixels.
        """
        self.pending.append(as_image(image))

    def reset(self, system: str | None) -> None:
        super().reset(system)
        self._shown, self.pending = [], []

    def answer(self, text: str, on_text: Callable[[str], None] | None = None, images: Sequence[Any] = ()) -> Any:
        """Answers a message, as :meth:`Chat.answer`.

        Args:
            images: the images of the message, as for :meth:`show`.
        """
        self.pending += [as_image(image) for image in images]
        count = self.answers
        result = super().answer(text, on_text)
        if self.answers > count:
            self._shown = [*self._shown[result.forgotten :], self.pending]
        self.pending = []
        return result

    def _alone(self, image: Any) -> dict[str, Any]:
        return inputs_of(self.processor, [message("user", "?", [image])], self.template)

    def _system_tokens(self) -> int:
        system = [] if self.system is None else [message("system", self.system)]
        return int(inputs_of(self.processor, [*system, message("user", "?")], self.template)["input_ids"].shape[1])

    def _tokens(self, forgotten: int, text: str) -> list[int]:
        system = [] if self.system is None else [message("system", self.system)]
        turns = [
            part
            for (asked, answer), images in zip(self.turns[forgotten:], self._shown[forgotten:], strict=True)
            for part in (message("user", asked, images), message("assistant", answer))
        ]
        inputs = inputs_of(self.processor, [*system, *turns, message("user", text, self.pending)], self.template)
        images = [image for each in (*self._shown[forgotten:], self.pending) for image in each]
        ids: list[int] = self.step.look(inputs, [(digest(image), partial(self._alone, image)) for image in images])
        return ids


def load_image_chat(
    path: str | os.PathLike[str],
    quantization: LowBitConfig | None = None,
    *,
    system: str | None = None,
    max_length: int | None = None,
    max_new_tokens: int = 1024,
    template: str | None = None,
) -> ImageChat:
    """Loads an image-text model for a conversation.

    >>> chat = lowbit.llm.load_image_chat("packed")  # doctest: +SKIP
    >>> print(chat.answer("What is this?", images=["cat.jpg"]).text)  # doctest: +SKIP

    Args:
        path: a directory of transformers, float or packed, with a processor.
        quantization: how to quantize a float checkpoint while it is loaded.
        system: the system prompt.
        max_length: the length of the conversation in tokens, including images; None: 4096, or the model's limit if lower.
        max_new_tokens: the largest length of an answer.
        template: a chat template; None: the processor's.

    Raises:
        ImportError, OSError, ValueError: as :func:`load_image_model` and :func:`load_image_processor`.
    """
    model: Any = load_image_model(path, quantization)
    processor = load_image_processor(path)
    limit = decoding.position_limit(model.config.get_text_config())
    step = ImageStep(model, min(_CONTEXT, limit or _CONTEXT) if max_length is None else max_length)
    chat = ImageChat(
        step, model, processor.tokenizer, template or image_template(processor, path), step.max_length, system=system,
        sampling=sampling_of(model)[0], max_new_tokens=max_new_tokens, stop=stop_tokens(model, processor.tokenizer),
        processor=processor,
    )  # fmt: skip
    chat.check()
    return chat


def image_samples(path: str | os.PathLike[str], samples: Iterable[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """Data for :func:`lowbit.calibrate` of an image-text model: a batch of inputs for each sample.

    >>> data = lowbit.llm.image_samples("MODEL", [("What is this?", ["cat.jpg"])])  # doctest: +SKIP
    >>> lowbit.calibrate(model, data, lowbit.LowBitConfig(bits=4))  # doctest: +SKIP

    Args:
        path: a directory of transformers with a processor and a chat template.
        samples: messages, each with a text and its images: paths, or images of Pillow.

    Raises:
        TypeError: an image is neither.
        ImportError, OSError, ValueError: as :func:`load_image_chat` and :func:`open_image`.
    """
    processor = load_image_processor(path)
    template = image_template(processor, path)
    return [inputs_of_text(processor, text, [as_image(image) for image in images], template) for text, images in samples]


def image_template(processor: Any, path: str | os.PathLike[str]) -> str:
    """The chat template of a processor, or of its tokenizer. Raises ValueError if there is none."""
    own = getattr(processor, "chat_template", None)
    own = own.get("default") if isinstance(own, dict) else own
    return str(own) if own else chat_template(processor.tokenizer, path)
