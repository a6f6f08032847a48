"""Decodes a causal language model of transformers over a static KV cache."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..hf import decoding
from ..hf.shared_inputs import observed
from ..machine.one_text import OneText
from ..operators.cache_layout import can_continue, copy_layer, states_of, window_length
from ..plan.plan_file import Slot
from ..plan.recording import reason_of
from . import texts_call
from .caches import Caches, dtypes_of, empty_caches, name_of, type_of
from .planning import DecoderPlan
from .proof import EXACT_LIMIT, PIECES_LIMIT, TOKENS, Reference, sample_text
from .sampling import check_max_length, common, prompt_ids
from .states import StateKeeper
from .texts_call import TextsCall, TextsDecoder
from .token_calls import check_call, pieces

_LOG = logging.getLogger(__name__)

# Called with the number of earlier tokens, the tokens [1, s] of a call, and their hidden states [1, s, size].
Observer = Callable[[int, Tensor, Tensor], None]


class Decoder(torch.nn.Module, TextsDecoder):
    """A decoding step of a causal language model, with its own static KV caches and states of recurrent layers.

    The same module runs in eager mode, under torch.compile, and exported to .pte and .pt2. Each call updates the caches, which
    are buffers, so a text may be split into calls in any way; ``start`` is the number of earlier tokens. A new text starts
    at 0.

    Recurrent layers (linear attention, Mamba-2, short convolutions) have states, which cannot be truncated: a text continues
    at its end, at the end of an earlier call with several tokens, or from 0. :meth:`kept` returns the place.

    Some models have other state. So at construction a few tokens are run through the unchanged model, and through the decoder
    at once and in pieces. If the logits differ, the model is refused and left unchanged.
    """

    _STEP = 16  # max_length is a multiple of this; caches are rounded up to a multiple of 16

    def __init__(
        self,
        model: torch.nn.Module,
        max_length: int = 2048,
        cache: str | None = None,
        *,
        windows: bool = True,
        plan: bool = True,
    ):
        """
        Args:
            model: a transformers causal language model, quantized or not, in eval mode. The decoder owns it until
                :meth:`release`: its attention runs over the decoder's caches. An earlier decoder of the model is released.
            max_length: the longest text in tokens, prompt included; a multiple of 16.
            cache: type of the KV cache: "float32", "bfloat16", "float16", or "int8", "int8,int4" (keys of int8, values of int4)
                or "int4", which have a scale for each position of a head; None: the model's dtype.
            windows: sliding-window layers cache only the window. A text can then be truncated by a few hundred tokens only;
                further back, it starts at 0 again (:meth:`kept`).
            plan: run calls without gradients by a plan (docs/internals/plan.md), several times as fast for single tokens. The
                model then has the weights and modules that it has now; after a change of modules, parameters, hooks or plain
                attributes, new texts run its Python code again. :attr:`plan_refusal` says why a model has none.

        Raises:
            ValueError: max_length is not a positive multiple of 16, or beyond the model's positions; an unknown cache type,
                or one whose range is too small for the model; a layer belongs to another decoder's model; or the decoder's
                results differ from the model's. The message says how.
        """
        super().__init__()
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise ValueError(f"the model is a {type(model).__name__}; expected a causal language model of transformers")
        config = model.config.get_text_config()
        max_length = check_max_length(max_length, decoding.position_limit(config), self._STEP)
        self.cache_type = type_of(cache, model.dtype)
        if model.training:
            raise ValueError("the model is in training mode; call its eval() first")
        self.model = model
        self.max_length = max_length
        decoding.give_back(model)
        decoding.check_attention(model)
        self.plan_refusal = None if plan else "it is switched off"  # why calls run the model's Python code
        self._plan: DecoderPlan | None = None
        self._plan_caches: Any = None
        self._observers: list[Observer] = []
        self.one_text, self.count = OneText(), max_length  # the proofs fill the caches
        try:
            self._take(config, windows, plan)
        except Exception as error:
            decoding.give_back(model)
            raise decoding.refusal(model, error) from error
        self.count = 0  # tokens of the text in the caches

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        copied = memo[id(self)] = Decoder.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> Any:
        raise TypeError("a Decoder cannot be pickled; save its model, and make a new Decoder of it")

    def _take(self, config: Any, windows: bool, plan: bool) -> None:
        decoding.check_config(config, self.max_length)
        with torch.inference_mode():
            reference = Reference(self.model, self.max_length)
        vocabulary, layers = (getattr(config, name, None) for name in ("vocab_size", "num_hidden_layers"))
        if not isinstance(vocabulary, int) or vocabulary <= 0 or not isinstance(layers, int) or layers <= 0:
            raise decoding.Unsupported("its configuration does not say how many layers it has")
        self.vocabulary, self.layers = vocabulary, layers
        self._takeover = decoding.Takeover(self.model, self.max_length)
        if self._takeover.has_alibi and not dtypes_of(self.cache_type)[0].is_floating_point:
            raise decoding.Unsupported(
                f"the keys of its attention carry positions (alibi), which a cache of {self.cache_type} would round; "
                "expected a cache of float32, bfloat16 or float16"
            )
        try:
            asked = self._ask(reference, self._takeover)
        except decoding.NoCaches:
            self._takeover.hand_on(self.model)
            asked = self._ask(reference, self._takeover)
        self._shapes, self._states, self.exact = asked.shapes, asked.states, reference.exact
        decoding.check_windows(config, asked, self.max_length)
        self.keep_windows(asked.windows if windows else {})
        for layer, tensors in enumerate(self._make(self.max_length, self.cache_type)):
            for name, cache in zip(self._names(layer), tensors, strict=True):
                self.register_buffer(name, cache, persistent=False)
        states = states_of(self._caches())
        self._keeper = StateKeeper(states) if states else None
        unrounded = name_of(self.model.dtype)

        def run_texts(texts: list[list[int]]) -> list[Tensor]:
            return self.run_texts([(self.new_caches(16, unrounded), text) for text in texts], everywhere=True)

        # The check needs unrounded caches, here for a short text.
        rounds = self.cache_type != unrounded
        caches = self._make(reference.tokens.shape[1], unrounded) if rounds else self.caches()
        uses = [(layer in self._shapes) + (layer in self._states) for layer in range(self.layers)]
        self.measured = reference.prove(self.run, run_texts, caches, uses)
        if plan:
            self._replace_plan(lambda made: self.measured.update(plan=made.prove(self, reference.tokens, reference)))
        if rounds:
            self.measured["cache"] = reference.rounding_of_caches(self.run, self.caches(), self.cache_type)

    def _replace_plan(self, prove: Callable[[DecoderPlan], None]) -> None:
        """Makes calls run a new plan, if it has the model's results."""
        try:
            plan = DecoderPlan(self)
            prove(plan)
        except Exception as reason:  # the model's own code runs, too, so nothing is lost
            self.drop_plan(reason_of(reason))
        else:
            self._plan, self._plan_caches = plan, plan.caches(self._caches())

    def observe(self, observer: Observer) -> None:
        """Calls a function with the hidden states of each call with one text: the inputs of the model's output head."""
        self._observers.append(observer)
        plan = self.fitting_plan()
        if plan is not None and not plan.gives_hidden:
            tokens = sample_text(self.model.config.get_text_config(), min(TOKENS, self.max_length))
            self._replace_plan(lambda made: made.check_same(self, tokens, plan))

    def end_observing(self, observer: Observer) -> None:
        """Does not call a function of :meth:`observe` any more."""
        self._observers.remove(observer)

    @property
    def plan(self) -> DecoderPlan | None:
        """The plan that calls use; None without one."""
        return self._plan

    def cache_shape(self, layer: int, slot: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Heads and width of a layer's keys or values, or shape and dtype of a state; ``slot`` is that of a plan."""
        if slot < Slot.HELD:
            heads, *widths = self._shapes[layer]
            return (heads, widths[slot]), self.model.dtype
        return self._states[layer][slot - Slot.STATE]

    def drop_plan(self, reason: str) -> None:
        """Makes calls run the model's Python code from now on."""
        self._plan = self._plan_caches = None
        self.plan_refusal = reason
        _LOG.info("each call runs the model's Python code: %s", reason)

    def plan_times(self, run: Callable[[], object]) -> dict[str, float]:
        """The seconds that each operator of the plan takes in ``run()``; none without a plan."""
        return {} if self._plan is None else self._plan.measured(run)

    def _usable_plan(self, new: bool) -> DecoderPlan | None:
        """The plan, if a call can use it; ``new``: for a call that begins a text, or has several tokens."""
        if torch.compiler.is_compiling():
            return None
        plan = self.fitting_plan() if new else self._plan
        if new and plan is None and not self._takeover.uses_caches(self.model):
            raise RuntimeError(
                "a module of this decoder's model was replaced by one whose attention does not use the decoder's caches; call "
                "release(), and make a new Decoder"
            )
        return None if torch.is_grad_enabled() else plan

    def fitting_plan(self) -> DecoderPlan | None:
        """The plan, unless there is none, or the model has been changed since."""
        if self._plan is not None and not self._plan.fits():
            self.drop_plan("the model has been changed since the decoder was made")
        return self._plan

    def _ask(self, reference: Reference, takeover: decoding.Takeover) -> decoding.Asked:
        """Runs a trial that records the caches each layer needs, and makes packed layers share the quantization of inputs."""
        with observed(self.model) as groups:
            asked: decoding.Asked = reference.ask(self.run, self.layers)
        takeover.share_inputs(groups)
        return asked

    def _names(self, layer: int) -> list[str]:
        """Names of a layer's buffers: keys and values if it has attention, then states."""
        attention = [f"{name}_cache_{layer}" for name in "kv"] if layer in self._shapes else []
        attention += [f"held_cache_{layer}"] if layer in self.windows else []
        return attention + [f"state_{number}_cache_{layer}" for number in range(len(self._states.get(layer, ())))]

    @torch.inference_mode(False)  # its tensors could not be changed outside of it
    def _make(self, length: int, cache_type: str) -> list[tuple[Tensor, ...]]:
        caches = []
        for layer in range(self.layers):
            heads, *widths = self._shapes.get(layer, (0,))
            window = self.window_of(layer, length)
            room = length if window is None else window_length(window, texts_call.PIECE)
            tensors = empty_caches(heads, widths, room, cache_type)
            tensors += [] if window is None else [torch.zeros(2, dtype=torch.int64)]
            states = [torch.zeros(shape, dtype=state_dtype) for shape, state_dtype in self._states.get(layer, ())]
            caches.append((*tensors, *states))
        return caches

    @property
    def recurrent(self) -> bool:
        return self._keeper is not None

    def kept(self, count: int) -> int:
        """The number of the first ``count`` tokens of the decoder's text after which a call can continue."""
        count = min(count, self.count) if self._keeper is None else self._keeper.kept(count)
        return count if can_continue(self._caches(), self.windows, count) else 0

    def check_texts(self) -> None:
        """Checks that texts in one call do not change each other's logits.

        Raises:
            Unsupported: logits change.
        """
        difference, limit = self.measured["texts"], EXACT_LIMIT if self.exact else PIECES_LIMIT
        if not difference <= limit:
            raise decoding.Unsupported(
                f"the logits of {type(self.model).__name__} change when a call has several texts (by {difference:.2g} of the "
                f"earlier text's effect; rounding is below {limit:g}); expected one text at a time"
            )

    @property
    def released(self) -> bool:
        """Whether the model no longer belongs to this decoder."""
        return not self._takeover.active

    def each_layer_alone(self) -> AbstractContextManager[None]:
        """A context in which each packed layer quantizes its own input, which is fastest for one token; same results."""
        self.check()
        return self._takeover.each_layer_alone()

    def release(self) -> torch.nn.Module:
        """Frees the caches and returns the model, restored to its state before the decoder.

        Steps compiled from the decoder cannot be used any more; exported files can. A second call has no effect.

        Returns:
            The model.
        """
        self._takeover.end(self.model)
        for name in [name for name, _ in self.named_buffers(recurse=False)]:
            delattr(self, name)
        self._plan = self._plan_caches = None
        return self.model

    def check(self) -> None:
        """Raises RuntimeError if the decoder was released, or its model changed."""
        if self.released:
            raise RuntimeError("this decoder was released, or its model taken by a later one; make a new Decoder")
        if not self._takeover.is_whole():
            raise RuntimeError(
                "the model of this decoder was given another attention implementation; call release(), and make a new Decoder"
            )

    def make_caches(self, length: int, cache_type: str) -> list[tuple[Tensor, ...]]:
        made: list[tuple[Tensor, ...]] = self._make(length, cache_type)  # a decorator of torch hides its type
        return made

    def prefix_key(self) -> bytes:
        from .prefixes import prefix_key

        return prefix_key(self)

    @staticmethod
    def model_key(model: Any) -> bytes:
        from .prefixes import model_key

        return model_key(model)

    def caches(self) -> list[tuple[Tensor, ...]]:
        """Keys, values and states of each layer; docs/internals/operators.md describes their layout.

        If the caches of a layer hold only a window, the tensor after keys and values says which positions they hold.
        """
        self.count = self.max_length  # the caller may change them
        if self._keeper is not None:
            self._keeper.position = None
        return self._caches()

    def _caches(self) -> list[tuple[Tensor, ...]]:
        return [tuple(getattr(self, name) for name in self._names(layer)) for layer in range(self.layers)]

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        start: Tensor,
        caches: Sequence[Any] | decoding.Asked | decoding.Texts,
        keep: int | Tensor = 0,
    ) -> Tensor:
        """Logits [1, s, vocabulary] of the last ``keep`` tokens, of all tokens if 0, or of the tokens at these indices."""
        return self._takeover.run(self.model, tokens, positions, start, caches, keep)

    def run_observed(
        self, tokens: Tensor, positions: Tensor, start: Tensor, caches: Any, keep: int | Tensor = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits as :meth:`run`, and the hidden states of all tokens [1, s, size] if they are observed."""
        if not self._observers:
            return self.run(tokens, positions, start, caches, keep), None
        found: list[Tensor] = []
        decoder: Any = self.model
        hook = decoder.get_decoder().register_forward_hook(lambda module, inputs, output: found.append(output[0]))
        try:
            return self.run(tokens, positions, start, caches, keep), found[-1]
        finally:
            hook.remove()

    def _show(self, start: int, tokens: Tensor, hidden: Tensor | None) -> None:
        for observer in self._observers if hidden is not None else ():
            observer(start, tokens, hidden)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Computes a step; a long prompt is split into pieces, with bitwise equal results in packed layers.

        Args:
            tokens: [1, s] int64.
            start: [1] int64, the number of tokens in the caches.

        Returns:
            [1, vocabulary] of the model's dtype: the logits after the last token.

        Raises:
            ValueError: tokens or start has another shape or dtype, a token is not in the vocabulary, or the states are not
                those after ``start`` tokens.
            IndexError: the text is longer than max_length, or has fewer than ``start`` tokens.
            RuntimeError: the decoder was released, is computing another text, or its model has a new layer whose attention
                does not use the decoder's caches.
        """
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():
                self.count = self.max_length  # compiled code does not count tokens
            return self.run_eagerly(tokens, start)
        return self.run_pieces(self._step, tokens, start)

    def run_pieces(self, step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, start: Tensor) -> Tensor:
        """Calls ``step``, of this decoder, with pieces of a text, as :meth:`forward`."""
        with self._call(tokens, start, keep=tokens.dim() == 2 and tokens.shape[1] > 1):
            for piece in pieces(tokens, start):
                logits = step(*piece)
        return logits

    @contextmanager
    def _call(self, tokens: Tensor, start: Tensor, keep: bool = False, keep_start: bool = False) -> Iterator[None]:
        """A context that computes tokens of the text in the decoder's caches, and checks them before.

        Args:
            keep, keep_start: keep copies of the states after the call, or before it.
        """
        with self.one_text:
            self.check()
            count = self.count if self._keeper is None else self.max_length  # a keeper knows where its text can continue
            check_call(tokens, start, self.vocabulary, self.max_length, count)
            begin = int(start)
            if self._keeper is not None:
                self._keeper.begin(begin, keep_start)
            self.count = begin  # if the call fails
            yield
            self.count = begin + tokens.shape[1]
            if self._keeper is not None:
                self._keeper.end(self.count, keep)

    def _step(self, tokens: Tensor, start: Tensor) -> Tensor:
        rows, before = tokens.shape[1], 0 if self._plan is None else int(start)
        plan = self._usable_plan(rows > 1 or before == 0)
        if plan is None and not self._observers:
            return self.run_eagerly(tokens, start)
        positions = start + torch.arange(rows)
        if plan is None:
            logits, hidden = self.run_observed(tokens, positions, start, self._caches(), 1)
            logits = logits[:, -1]
        else:
            logits, hidden = plan.run(tokens, positions, torch.tensor([rows - 1]), [(0, rows, before, self._plan_caches)])
        self._show(int(start), tokens, hidden)
        return logits

    def run_eagerly(self, tokens: Tensor, start: Tensor) -> Tensor:
        """A step without the plan: at most PIECE tokens, which are not checked."""
        return self.run(tokens, start + torch.arange(tokens.shape[1]), start, self._caches(), keep=1)[:, -1]

    def all_logits(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Logits [1, s, vocabulary] after each token; otherwise as :meth:`forward`."""
        with self._call(tokens, start, keep_start=True):
            rows = torch.arange(tokens.shape[1])
            if (plan := self._usable_plan(True)) is None:
                logits, hidden = self.run_observed(tokens, start + rows, start, self._caches())
            else:
                logits, hidden = plan.run(tokens, start + rows, rows, [(0, len(rows), int(start), self._plan_caches)])
                logits = logits[None]
            self._show(int(start), tokens, hidden)
        return logits

    def read(self, tokens: Sequence[int], prefix: Caches | None = None) -> Caches:
        """Computes keys and values of a prefix (a system prompt, a document) for texts that begin with it.

        Args:
            tokens: at least one.
            prefix: caches of another text, from which the common prefix is copied.

        Raises:
            ValueError: no tokens, or one that is not in the vocabulary; or ``prefix`` is of another model or type.
            IndexError: more than max_length tokens.
            RuntimeError: the decoder was released.
        """
        tokens = prompt_ids("the text", tokens)
        if prefix is not None:
            self.check_caches(prefix)
        check_call(torch.tensor([tokens]).long(), torch.tensor([0]), self.vocabulary, self.max_length, 0)
        caches = self.new_caches(-(-len(tokens) // 16) * 16)
        shared = 0 if prefix is None else prefix.usable(common(prefix.tokens, tokens))
        if prefix is not None and shared:
            caches.copy_from(prefix, shared)
        with torch.inference_mode():
            for at in range(shared, len(tokens), texts_call.PIECE):
                self.run_texts([(caches, tokens[at : at + texts_call.PIECE])])
        return caches

    def begin(self, caches: Caches, tokens: Sequence[int]) -> int:
        """Copies the common prefix of a text and ``caches`` to the decoder's caches, which compiled steps share.

        Returns:
            The number of tokens copied, less than the number of tokens: the argument ``cached`` of :func:`generate`.

        Raises:
            ValueError: the text has no tokens, or the caches are of another model or dtype.
            RuntimeError: the decoder was released.
        """
        self.check()
        self.check_caches(caches)
        tokens = prompt_ids("the text", tokens)
        if not tokens:
            raise ValueError("the text has no tokens; expected at least one")
        count = caches.usable(min(common(caches.tokens, tokens), len(tokens) - 1, self.max_length))
        if count:
            with self.one_text:
                self.count = 0  # if copying fails
                for source, target in zip(caches.layers, self._caches(), strict=True):
                    copy_layer(source, target, count)
                self.count = count
                if self._keeper is not None:
                    self._keeper.begin(0)
                    self._keeper.end(count, keep=True)
        return count

    def run_call(self, call: TextsCall, everywhere: bool) -> Tensor:
        parts = call.parts
        keep = torch.arange(len(call.rows)) if everywhere else torch.tensor([part.end - 1 for part in parts])
        inputs = torch.tensor([call.rows]), torch.tensor(call.positions)
        plan = self._usable_plan(len(call.rows) > len(parts))
        if plan is None:
            texts = [decoding.Part(part.begin, part.end, torch.tensor([part.start]), part.caches.layers) for part in parts]
            kept = 0 if everywhere else keep
            with self.one_text:  # layers of the model find the call's caches in one place
                (logits, *_), hidden = self.run_observed(*inputs, torch.tensor([0]), decoding.Texts(texts), kept)
        else:
            planned = [(part.begin, part.end, part.start, part.caches.planned(plan, plan.caches)) for part in parts]
            logits, hidden = plan.run(*inputs, keep, planned)
        if len(parts) == 1:
            self._show(parts[0].start, inputs[0], hidden)
        return logits if logits.shape[0] == len(keep) else logits[keep]  # some models ignore logits_to_keep
