"""The session of ``lowbit generate`` and ``lowbit chat``: a model, its tokenizer, a decoding step and sampling settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..machine.facts import cpp_compiler
from .models import (
    check_text,
    imported,
    load,
    load_draft,
    make_prefix_cache,
    make_step,
    parse_prefix_size,
    set_threads,
    wants_prefix_cache,
)
from .options import parse_sampling, parse_size
from .output import Output

if TYPE_CHECKING:
    from .. import LowBitConfig
    from ..llm import Decoder, Mtp


class Session:
    """A model that generates text.

    The constructor checks the options that need no model; :meth:`load` loads the model and its tokenizer, and :meth:`start`
    makes the decoding step.

    Attributes:
        strings: stop strings.
        template: the chat template, or None.
        stop: tokens that end a text.
        sampling: fields of :class:`lowbit.llm.Sampling` that the options set.
        prefix_cache: on disk, or None.
    """

    def __init__(
        self,
        output: Output,
        path: Path,
        config: LowBitConfig | None,
        *,
        stop: Iterable[str] | None,
        compiled: bool,
        cache: str | None,
        threads: int | None,
        prefix_cache: Path | None,
        prefix_cache_size: str,
        expert_memory: str | None = None,
    ):
        from ..llm.stopping import check_stop_strings

        self.output, self.path, self._config = output, path, config
        self.strings = check_stop_strings(check_text(text, "--stop") for text in stop or ())
        self.model: Any = None
        self.tokenizer: Any = None
        self.processor: Any = None  # of an image-text model
        self.images: list[Any] = []
        self._inputs: dict[str, Any] | None = None
        self.step: Any = None
        self._compiled, self._cache = compiled, cache
        self._prefixes = prefix_cache, parse_prefix_size(prefix_cache, prefix_cache_size)
        self._expert_memory = None if expert_memory is None else parse_size(expert_memory, "--expert-memory")
        if compiled and expert_memory is not None:
            raise ValueError("--compile needs all experts in memory; leave out --expert-memory")
        if compiled:
            cpp_compiler()
        set_threads(threads)

    def load(
        self,
        sampling: dict[str, Any],
        template: str | None = None,
        has_turns: bool = True,
        images: Sequence[Path] = (),
        needs: dict[str, bool] | None = None,
    ) -> None:
        """Loads the model and its tokenizer; with images, or if it is only an image-text model, also its processor.

        Args:
            sampling: values of the sampling options by name; None: not given.
            template: a chat template; None: the tokenizer's, if the session ``has_turns``.
            images: files of the images to show to the model.
            needs: option that requires lowbit's decoder -> whether it was given.
        """
        from ..llm.images import check_takes_images, open_image, sees_only
        from ..llm.loading import load_tokenizer, stop_tokens
        from ..llm.templates import chat_template

        self.images = [open_image(image) for image in images]  # before the model is loaded, to report errors early
        with imported(self.output, self.path) as self.path:
            if images:
                check_takes_images(self.path)
            if images or sees_only(self.path):
                self._load_with_images(template, has_turns, needs or {})
                self.sampling = parse_sampling(self.tokenizer, sampling)
                return
            self.model = load(self.output, self.path, self._config)
            if self._expert_memory is not None:
                from ..llm import stream_experts

                places = stream_experts(self.model, self.path, self._expert_memory)
                self.output.note(f"each layer keeps {places} experts in memory and reads the others from {self.path}")
            self.tokenizer = load_tokenizer(self.path)
            self.template = chat_template(self.tokenizer, self.path) if has_turns and template is None else template
        self.stop = stop_tokens(self.model, self.tokenizer)
        self.sampling = parse_sampling(self.tokenizer, sampling)

    def _load_with_images(self, template: str | None, has_turns: bool, needs: dict[str, bool]) -> None:
        from ..llm.images import image_template
        from ..llm.loading import load_image_processor, stop_tokens

        given = {
            "--compile": self._compiled,
            "--cache": self._cache is not None,
            "--expert-memory": self._expert_memory is not None,
        }
        given |= {"--prefix-cache": self._prefixes[0] is not None, **needs}
        for option, asked in given.items():
            if asked:
                raise ValueError(f"{option} requires lowbit's decoder, which sees no images; leave it out")
        self.processor = load_image_processor(self.path)  # first, to report missing packages early
        self.tokenizer = self.processor.tokenizer
        self.template = image_template(self.processor, self.path) if has_turns and template is None else template
        self.model = load(self.output, self.path, self._config, images=True)
        self.stop = stop_tokens(self.model, self.tokenizer)

    def start(self, max_length: int, needs: dict[str, bool] | None = None) -> None:
        """Makes the decoding step, as :func:`make_step`, and its prefix cache."""
        self.max_length = max_length
        if self.processor is not None:
            from ..llm.images import ImageStep

            self.step, self.prefix_cache = ImageStep(self.model, max_length), None
            if self._inputs is not None:
                self.step.look(self._inputs)
            return
        windows = not wants_prefix_cache(self._prefixes[0])
        self.step = make_step(self.output, self.model, max_length, self._compiled, self._cache, needs, windows)
        self.prefix_cache = make_prefix_cache(self.output, *self._prefixes, self.step)

    @property
    def refusal(self) -> str | None:
        """Why the model does not run in lowbit's decoder; None if it does."""
        return getattr(self.step, "refusal", None)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text, or of a message in the chat template."""
        from ..llm.loading import check_tokens
        from ..llm.templates import render

        ids: list[int]
        if self.processor is not None:
            from ..llm.images import inputs_of_text

            self._inputs = inputs_of_text(self.processor, text, self.images, self.template)
            ids = self._inputs["input_ids"][0].tolist()
        elif self.template is not None:
            ids = render(self.tokenizer, [{"role": "user", "content": text}], self.template)
        else:
            ids = self.tokenizer(text)["input_ids"]
        check_tokens(self.model, ids, self.path)
        return ids

    def draft(self, path: Path) -> Decoder | Mtp:
        """The decoder of a draft model with the same tokens, or the model's own head."""
        return load_draft(self.output, path, self.tokenizer, self.path, self.step, self._config, self._cache)
