"""Decodes texts with images by the plan of their language model, several texts in a call.

Each token of an image has an id of its own, which is derived from the image's pixels. So KV caches, prefix caching and
batches work as for texts without images, and texts share keys and values exactly if they show the same images.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..hf import decoding
from .image_plan import ImagePlan, Inputs
from .sampling import check_max_length
from .texts_call import Part, TextsCall, TextsDecoder
from .tower_plan import PlannedTower

_INDEX_BITS = 24  # lowest bits of the id: the token's index in its image. Above them are the digest, and a 1.
_DIGEST_BYTES = 16
_FIRST = 1 << 8 * _DIGEST_BYTES + _INDEX_BITS  # the least id of a token of an image
_KEPT_BYTES = 256 << 20  # bytes of images that stay in memory although no text needs them now


@dataclass(eq=False)
class Image:
    """The inputs of the language model for one image."""

    first: int  # id of its first token
    inputs: Inputs  # of its tokens; positions relative to that of the first one
    advance: int  # by how many positions the image moves the text after it

    def __len__(self) -> int:
        return int(self.inputs.embeddings.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of its embeddings and features."""
        return sum(tensor.nbytes for tensor in (self.inputs.embeddings, *self.inputs.features))


class ImagePrompt(list[int]):
    """The tokens of a prompt with those of images; it keeps their embeddings in memory."""

    def __init__(self, plain: list[int], images: Sequence[Image], token: int):
        """
        Args:
            plain: the tokens as a processor gives them.
            images: in the order of the text.
            token: the id that stands for each token of an image.

        Raises:
            ValueError: the text has another number of placeholders than the images have tokens.
        """
        numbers = [image.first + index for image in images for index in range(len(image))]
        if plain.count(token) != len(numbers):
            raise ValueError(f"the text has places for {plain.count(token)} tokens of images; expected {len(numbers)}")
        following = iter(numbers)
        super().__init__(next(following) if each == token else each for each in plain)
        self.plain, self.images = plain, list(images)


class ImageDecoder(TextsDecoder):
    """What :class:`lowbit.llm.Decoder` does for several texts, for an image-text model whose language model has a plan."""

    def __init__(self, model: Any, max_length: int, cache: str | None = None, plan: ImagePlan | None = None):
        """
        Args:
            model: an image-text model in eval mode.
            max_length: the longest text in tokens, those of images included.
            cache: the type of the KV cache, as for :class:`lowbit.llm.Decoder`.
            plan: the plan of the language model; None: it is made.

        Raises:
            ValueError: an invalid length or type, or the language model has no plan.
        """
        config = model.config.get_text_config()
        check_max_length(max_length, decoding.position_limit(config), 16)
        self.model, self.max_length, self.vocabulary = model, max_length, config.vocab_size
        names = ("image_token_id", "image_token_index")
        token = next((found for name in names if isinstance(found := getattr(model.config, name, None), int)), None)
        if token is None:
            raise ValueError(f"the config of {type(model).__name__} has no image_token_id")
        self.image_token = token
        try:
            self._plan = ImagePlan(model, max_length, cache, blocks=True) if plan is None else plan
        except Exception as reason:
            raise decoding.refusal(model, reason) from reason
        self._tower = PlannedTower(model)
        self.cache_type = self._plan.cache_type
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[int, Image] = WeakValueDictionary()  # by the bits above the index
        self._kept: OrderedDict[int, Image] = OrderedDict()  # the most recently used ones
        self.computed = 0  # images that the vision tower has computed

    @property
    def recurrent(self) -> bool:
        return self._plan.recurrent

    def check_texts(self) -> None:
        self._plan.check_texts()

    def make_caches(self, length: int, cache_type: str) -> list[tuple[Tensor, ...]]:
        return self._plan.make_caches(length, cache_type)

    def prefix_key(self) -> bytes:
        raise ValueError("a prefix cache on disk does not keep texts with images; leave it out")

    @staticmethod
    def model_key(model: Any) -> bytes:
        raise ValueError("caches of texts with images cannot be pickled")

    def takes(self, token: int) -> bool:
        if token < _FIRST:
            return 0 <= token < self.vocabulary
        image = self._known.get(token >> _INDEX_BITS)
        return image is not None and token - image.first < len(image)

    def image(self, digest: bytes) -> Image | None:
        """The image with this digest if it was computed and is still in memory."""
        key = _key(digest)
        with self._lock:
            image = self._known.get(key)
            if image is not None:
                self._keep(key, image)
        return image

    @torch.inference_mode()
    def look(self, digest: bytes, inputs: Mapping[str, Any]) -> Image:
        """Computes an image, unless it is known.

        Args:
            digest: the digest of its pixels, at least 16 bytes.
            inputs: from a processor of transformers, for a text with this image alone.

        Raises:
            Unplannable, ValueError: the language model gets other inputs for it than embeddings, positions and features.
        """
        known = self.image(digest)
        if known is not None:
            return known
        tokens = inputs["input_ids"]
        more = {name: value for name, value in inputs.items() if name != "input_ids" and value is not None}
        with self._tower.active():
            found = self._plan.captured(tokens, more)
        self.computed += 1
        (rows,) = (tokens[0] == self.image_token).nonzero(as_tuple=True)
        if not 0 < len(rows) < 1 << _INDEX_BITS:
            raise ValueError(f"the processor gives an image {len(rows)} tokens; expected 1 to {(1 << _INDEX_BITS) - 1}")
        first, last, advance = int(rows[0]), int(rows[-1]), len(rows)
        positions = found.positions[..., rows]
        if self._plan.axes > 1:
            if last - first + 1 != len(rows):
                raise ValueError("the tokens of an image are not consecutive; expected no text between them")
            positions = positions - first
            end = found.positions[:, last + 1] if last + 1 < tokens.shape[1] else found.positions[:, first:].max() + 1
            advance = int(end.max()) - first
        features = [each[:, rows].clone() for each in found.features]
        key = _key(digest)
        image = Image(key << _INDEX_BITS, Inputs(found.embeddings[:, rows].clone(), positions, features), advance)
        with self._lock:
            self._known[key] = image
            self._keep(key, image)
        return image

    def _keep(self, key: int, image: Image) -> None:
        self._kept[key] = image
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    @torch.inference_mode()
    def run_call(self, call: TextsCall, everywhere: bool) -> Tensor:
        rows, parts, positions = call.rows, call.parts, torch.tensor(call.positions)
        if self._plan.axes > 1:
            each = [self._positions(part.caches.tokens + rows[part.begin : part.end])[:, part.start :] for part in parts]
            positions = torch.cat(each, 1)
        if self._plan.blocks and max(rows) >= _FIRST:
            return torch.cat([self._in_blocks(call, part, everywhere) for part in parts])
        keep = list(range(len(rows))) if everywhere else [part.end - 1 for part in parts]
        texts = [(part.begin, part.end, part.start, part.caches.planned(self._plan, self._plan.arranged)) for part in parts]
        return self._plan.run(self._inputs(rows, positions), torch.tensor(keep), texts)

    def _in_blocks(self, call: TextsCall, part: Part, everywhere: bool) -> Tensor:
        """Logits after each row of a text, or after the last one, if the tokens of an image attend to each other."""
        rows, caches, logits = call.rows[part.begin : part.end], part.caches, []
        for begin, end, image in self._runs(rows):
            inputs = self._inputs(rows[begin:end], torch.tensor(call.positions[part.begin + begin : part.begin + end]))
            # Only logits of the last rows are computed: a row of the vocabulary may take a megabyte.
            keep = torch.arange(0 if everywhere else end - begin - 1, end - begin)
            if image is None:
                planned = caches.planned(self._plan, self._plan.arranged)
                text = (0, end - begin, part.start + begin, planned)
                logits.append(self._plan.run(inputs, keep, [text]))
            else:
                logits.append(self._plan.run_block(inputs, keep, part.start + begin, caches.layers))
        return torch.cat(logits) if everywhere else logits[-1]

    def whole(self, tokens: Sequence[int], count: int) -> int:
        if self._plan.blocks and count:
            while count < len(tokens) and tokens[count] >= _FIRST and tokens[count] == tokens[count - 1] + 1:
                count += 1
        return count

    @torch.inference_mode()
    def inputs(self, prompt: ImagePrompt) -> Inputs:
        """The inputs of the language model for a whole prompt."""
        return self._inputs(prompt, torch.arange(len(prompt)) if self._plan.axes == 1 else self._positions(prompt))

    def _inputs(self, rows: list[int], positions: Tensor) -> Inputs:
        tokens = torch.tensor([[0 if row >= _FIRST else row for row in rows]])
        embeddings = self._plan.embed(tokens)
        inputs = Inputs(embeddings, positions, self._plan.features_of(tokens, embeddings))
        for begin, end, image in self._runs(rows):
            if image is not None:
                index = rows[begin] - image.first
                shown = image.inputs.part(index, index + end - begin)
                pairs = zip((inputs.embeddings, *inputs.features), (shown.embeddings, *shown.features), strict=True)
                for target, source in pairs:
                    target[:, begin:end] = source
        return inputs

    def _positions(self, tokens: list[int]) -> Tensor:
        """The positions [axes, s] of all tokens of a text. An image may take fewer positions than it has tokens."""
        found, place = [], 0  # `place`: the position of the next token of text
        for begin, end, image in self._runs(tokens):
            count = end - begin
            if image is None:
                found.append(torch.arange(place, place + count).expand(self._plan.axes, -1))
                place += count
            else:
                found.append(place + image.inputs.positions[:, :count])
                place += image.advance
        return torch.cat(found, 1)

    def _runs(self, tokens: Sequence[int]) -> Iterator[tuple[int, int, Image | None]]:
        """Yields ranges of tokens, each of text or of one image without a gap."""
        begin = 0
        while begin < len(tokens):
            image, end = None, begin + 1
            if tokens[begin] >= _FIRST:
                image = self._known[tokens[begin] >> _INDEX_BITS]
                while end < len(tokens) and tokens[end] == tokens[end - 1] + 1:
                    end += 1
            else:
                while end < len(tokens) and tokens[end] < _FIRST:
                    end += 1
            yield begin, end, image
            begin = end


def _key(digest: bytes) -> int:
    if len(digest) < _DIGEST_BYTES:
        raise ValueError(f"the digest has {len(digest)} bytes; expected {_DIGEST_BYTES} or more")
    return (1 << 8 * _DIGEST_BYTES) | int.from_bytes(digest[:_DIGEST_BYTES], "big")
