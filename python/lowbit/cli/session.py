"""The session of ``lowbit generate`` and ``lowbit chat``: a model, its tokenizer, a decoding step and sampling settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowbit

from ..machine.cpus import default_threads
from ..machine.facts import cpp_compiler
from .models import imported, load, positions, set_threads
from .options import Running, Sampling, parse_size
from .output import Output

if TYPE_CHECKING:
    from torch import Tensor

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

    def __init__(self, output: Output, path: Path, running: Running, sampling: Sampling, needs: dict[str, bool] | None = None):
        """
        Args:
            needs: option that requires lowbit's decoder -> whether it was given.
        """
        self.output, self.path, self.running, self._sampling = output, path, running, sampling
        self._config = running.config()
        self.strings = sampling.stop_strings()
        self.processor: Any = None  # of an image-text model
        self.images: list[Any] = []
        self._inputs: dict[str, Any] | None = None
        memory = running.expert_memory
        self._expert_bytes = None if memory is None else parse_size(memory, "--expert-memory")
        self._needs = {"--compile": running.compile, "--cache": running.cache is not None, **(needs or {})}
        running.prefix_bytes()  # checks the option
        if running.compile and memory is not None:
            raise ValueError("--compile needs all experts in memory; leave out --expert-memory")
        if running.compile:
            cpp_compiler()
        self.plan_caches: tuple[str, ...] | None = None  # a plan is to be written, for these cache types too

    def load(self, template: str | None = None, has_turns: bool = True, images: Sequence[Path] = ()) -> None:
        """Loads the model and its tokenizer; with images, or if it is only an image-text model, also its processor.

        Args:
            template: a chat template; None: the tokenizer's, if the session ``has_turns``.
            images: files of the images to show to the model.
        """
        lowbit.load_torch()
        set_threads(self.running.threads)
        from ..llm.images import check_takes_images, image_template, open_image, sees_only
        from ..llm.loading import load_image_processor, load_tokenizer, stop_tokens
        from ..llm.templates import chat_template

        self.images = [open_image(image) for image in images]  # before the model is loaded, to report errors early
        with imported(self.output, self.path) as self.path:
            if images:
                check_takes_images(self.path)
            sees = bool(images) or sees_only(self.path)
            if sees:
                more = {"--expert-memory": self._expert_bytes, "--prefix-cache": self.running.prefix_cache}
                for option, asked in (self._needs | {option: value is not None for option, value in more.items()}).items():
                    if asked:
                        raise ValueError(f"{option} requires lowbit's decoder, which sees no images; leave it out")
                self.processor = load_image_processor(self.path)  # first, to report missing packages early
            self.model: Any = load(self.output, self.path, self._config, images=sees)
            if self._expert_bytes is not None:
                from ..llm import stream_experts

                places = stream_experts(self.model, self.path, self._expert_bytes)
                self.output.note(f"each layer keeps {places} experts in memory and reads the others from {self.path}")
            self.tokenizer: Any = self.processor.tokenizer if sees else load_tokenizer(self.path)
            if has_turns and template is None:
                template = image_template(self.processor, self.path) if sees else chat_template(self.tokenizer, self.path)
        self.template, self.stop = template, stop_tokens(self.model, self.tokenizer)
        self.sampling = self._sampling.parsed(self.tokenizer)

    @property
    def positions(self) -> int:
        """The model's context length in tokens."""
        return positions(self.model)

    @property
    def threads(self) -> int:
        import torch

        return int(torch.get_num_threads())

    @property
    def refusal(self) -> str | None:
        """Why the model does not run in lowbit's decoder or by a plan; None if it does."""
        return getattr(self.step, "refusal", None)

    def start(self, max_length: int) -> None:
        """Makes the decoding step and its prefix cache.

        If lowbit's decoder refuses the model, the step is a :class:`lowbit.llm.Fallback`, with a note.
        """
        self.max_length = max_length
        if self.processor is not None:
            from ..llm.images import ImageStep

            self.step: Any = ImageStep(self.model, max_length)
            self.prefix_cache = None
            if self._inputs is not None:
                self.step.look(self._inputs)
        else:
            self.step = self._step()
            self.prefix_cache = self.running.open_prefix_cache(self.output, self.step)

    def _step(self) -> Callable[[Tensor, Tensor], Tensor]:
        from .. import llm
        from ..llm.compiled_files import usable_directory

        running = self.running
        try:
            decoder = llm.Decoder(self.model, self.max_length, running.cache, windows=not running.wants_prefixes)
            if not running.compile:
                return decoder
            with self.output.progress("compiling, or loading what was compiled before"):
                return llm.compile_decoder(decoder, directory=usable_directory(self.output.note))
        except llm.Refusal as refusal:
            for option, given in self._needs.items():
                if given:
                    raise ValueError(f"{option} requires lowbit's decoder; {refusal}") from refusal
            step = llm.Fallback(self.model, self.max_length)
            step.refusal = str(refusal).split("; use transformers' generate()")[0]
            self.output.note(f"{step.refusal}; the model runs with transformers' own attention instead, and {step.how}")
            return step

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
        from .drafts import load_draft

        return load_draft(self.output, path, self.tokenizer, self.path, self.step, self._config, self.running.cache)

    def keep_plan(self) -> None:
        """Writes the model's plan beside its weights, if it has one, so that the next run needs no torch; never an error."""
        from .plans import keep_plan

        keep_plan(self.output, self.path, self.step, self.stop, self.plan_caches)


class PlannedSession(Session):
    """A session without torch and transformers, by the plan beside the model's weights."""

    def open(self, template: str | None, has_turns: bool, draft: Path | None) -> None:
        """Opens the plan, that of the draft model, and the tokenizer.

        Raises:
            NoPlan: there is no plan that can be used; a Session loads the model instead.
        """
        from ..llm.templates import chat_template
        from .drafts import open_with_draft

        running = self.running
        self._planned, self._draft = open_with_draft(self.output, self.path, running.threads, running.cache, draft)
        self._threads = self.running.threads or default_threads()
        self.path = self._planned.directory
        self.model, self.tokenizer, self.stop = self._planned.model, self._planned.tokenizer, self._planned.stop
        self.template = chat_template(self.tokenizer, self.path) if has_turns and template is None else template
        self.sampling = self._sampling.parsed(self.tokenizer)

    @property
    def positions(self) -> int:
        return self._planned.plan.positions

    @property
    def threads(self) -> int:
        return self._threads

    def start(self, max_length: int) -> None:
        self.max_length = max_length
        self.step = self._planned.decoder(max_length, windows=not self.running.wants_prefixes)
        self.prefix_cache = self.running.open_prefix_cache(self.output, self.step)

    def draft(self, path: Path) -> Any:
        from .drafts import draft_decoder

        assert self._draft is not None
        return draft_decoder(self._draft, self._planned, self.max_length)

    def keep_plan(self) -> None:
        """Does nothing: the model has a plan."""


def open_session(
    output: Output,
    path: Path,
    running: Running,
    sampling: Sampling,
    needs: dict[str, bool] | None = None,
    *,
    template: str | None = None,
    has_turns: bool = True,
    images: Sequence[Path] = (),
    draft: Path | None = None,
) -> Session:
    """A session with its model loaded: by its plan if that is current and the options allow it, else by torch.

    Arguments as for :class:`Session` and :meth:`Session.load`; ``draft`` is the path for :meth:`Session.draft`.
    """
    from .plans import NoPlan, missing

    caches = None
    if running.bits is None and running.expert_memory is None and not running.compile and not images:
        planned = PlannedSession(output, path, running, sampling, needs)
        try:
            planned.open(template, has_turns, draft)
            return planned
        except NoPlan as reason:
            caches = missing(output, reason)
    session = Session(output, path, running, sampling, needs)
    session.load(template, has_turns, images)
    session.plan_caches = caches
    return session
