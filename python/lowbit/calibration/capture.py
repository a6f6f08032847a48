"""Records inputs of modules and calls of blocks while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .float_products import FloatLinears


class StopRun(Exception):
    """Ends a run of a model early, once everything is recorded."""


@contextmanager
def slow_paths() -> Iterator[None]:
    """Turns off the fused operators of torch's encoder layers, which use weights without calling the linear layers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def removed_after(hooks: Iterable[Any]) -> Iterator[None]:
    """A context at whose end hooks are removed."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def inputs_of(modules: dict[str, torch.nn.Module], take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls ``take(name, input)`` before each run of one of the modules."""
    handles = []
    for name, module in modules.items():

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            take(name, args[0] if args else kwargs["input"])

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with removed_after(handles):
        yield


class MeanSquares:
    """Mean squares of the inputs of layers, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Adds inputs [..., k]."""
        x = x.reshape(-1, x.shape[-1]).float()
        self._sums[name] = self._sums.get(name, 0.0) + x.square().sum(0)
        self._counts[name] = self._counts.get(name, 0) + len(x)

    def means(self) -> dict[str, Tensor]:
        """float32 [k] for each name."""
        return {name: values / max(1, self._counts[name]) for name, values in self._sums.items()}


@dataclass
class BlockCall:
    """Arguments of a call of a block, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool  # whether the hidden states were a keyword argument

    def run(self, block: torch.nn.Module, hidden: Tensor | None) -> Tensor:
        """Calls a block with other hidden states; returns its hidden states."""
        with FloatLinears():
            if self.named:
                return hidden_of(block(*self.args, **{**self.kwargs, "hidden_states": hidden}))
            return hidden_of(block(hidden, *self.args, **self.kwargs))


def last_hidden_of(output: Any) -> Any:
    """The last hidden states in a model's output."""
    states = getattr(output, "last_hidden_state", None)
    return hidden_of(output) if states is None else states


def hidden_of(output: Any) -> Any:
    """The hidden states in a block's output."""
    return output[0] if isinstance(output, tuple) else output


@dataclass
class Recorded:
    """A run through a list of blocks."""

    calls: list[BlockCall]
    first: Tensor | None  # hidden states before the first block
    chained: bool  # whether each block was called once, in order, with the output of the previous block
    plain: bool  # whether each block returned nothing but its hidden states
    skippable: bool = False  # whether the blocks have the same arguments, apart from the hidden states, if they do not compute

    def same_arguments(self, other: Recorded) -> bool:
        """Whether the blocks had equal arguments in another run, apart from the hidden states."""
        return len(self.calls) == len(other.calls) and all(
            a.named == b.named and _equal(a.args, b.args) and _equal(a.kwargs, b.kwargs)
            for a, b in zip(self.calls, other.calls, strict=True)
        )


@contextmanager
def blocks_of(blocks: list[torch.nn.Module], stop_after: bool = False, skips: bool = False) -> Iterator[Recorded]:
    """Records the calls of blocks.

    Args:
        stop_after: end the run before the last block.
        skips: blocks do not compute, but return their hidden states.
    """
    recorded = Recorded([], None, True, True)
    last: list[Any] = [None]
    handles = []
    for index, block in enumerate(blocks):

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
            named = not args
            hidden = kwargs.get("hidden_states") if named else args[0]
            if index != len(recorded.calls) or not isinstance(hidden, Tensor):
                recorded.chained = False
                return
            if index == 0:
                recorded.first = hidden.detach().clone()
            elif not _same(hidden, last[0]):
                recorded.chained = False
            arguments = {name: value for name, value in kwargs.items() if not named or name != "hidden_states"}
            recorded.calls.append(BlockCall(args[1:], arguments, named))
            if stop_after and index == len(blocks) - 1:
                raise StopRun

        def after(_: Any, args: Any, output: Any) -> None:
            last[0] = hidden_of(output)
            recorded.plain &= last[0] is output

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after))
    try:
        with removed_after(handles), ExitStack() as stack:
            for block in blocks if skips else ():
                stack.enter_context(answering(block, lambda hidden_states, *_, **__: hidden_states))
            yield recorded
    finally:
        last[0] = None
        recorded.chained &= len(recorded.calls) == len(blocks)


@contextmanager
def answering(block: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a block has another ``forward``."""
    own = vars(block).get("forward")  # of the module instead of its class, as accelerate sets it
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments are equal; False for objects that may have a state."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return isinstance(a, str | int | float | None) and bool(a == b)


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(b, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype)
