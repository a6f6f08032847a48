"""Records the operators of a function's first call and replays them without its Python code."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_LOG = logging.getLogger(__name__)


class _Unreplayable(Exception):
    """Later calls may need other operators, so the function cannot be replayed."""


class _Recorder(TorchDispatchMode):
    """Records the operators that run, with their arguments, as lines of Python."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []  # for each operator: name of its result, operator, arguments
        self.constants: dict[str, Any] = {}
        self._names = {id(tensor): f"x{number}" for number, tensor in enumerate(inputs)}
        self._kept: list[Any] = list(inputs)  # keeps tensors alive, so that ids are unique
        self._operators: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._shows_values(func, args):
            raise _Unreplayable(f"Python code sees what {func} gives, which depends on the text")
        written = [self._write(arg) for arg in args] + [f"{name}={self._write(value)}" for name, value in kwargs.items()]
        if func not in self._operators:
            self._operators[func] = self._constant(func._op)  # what OpOverload calls
        result = func(*args, **kwargs)
        name = f"v{len(self.lines)}"
        self.lines.append((name, self._operators[func], ", ".join(written)))
        self._kept.append(result)
        for part, tensor in enumerate(result) if isinstance(result, (list, tuple)) else [(None, result)]:
            if isinstance(tensor, Tensor) and id(tensor) not in self._names:  # a tensor changed in place keeps its name
                self._names[id(tensor)] = name if part is None else f"{name}[{part}]"
        return result

    def name_of(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]

    def depends_on_inputs(self, tensor: Tensor) -> bool:
        return self._names.get(id(tensor), "k")[0] != "k"

    def _shows_values(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a number or a size depends on values that other inputs would change."""
        flat = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
        tensors = [each for each in flat if isinstance(each, Tensor)]
        if not any(map(self.depends_on_inputs, tensors)):
            return False
        if func is torch.ops.aten.index.Tensor:  # indexing with a mask has a result of variable size
            return any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
        return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)

    def _write(self, arg: Any) -> str:
        if isinstance(arg, Tensor):
            if id(arg) not in self._names:
                self._names[id(arg)] = self._constant(arg)
                self._kept.append(arg)
            return self._names[id(arg)]
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(map(self._write, arg))}]"
        return repr(arg) if arg is None or isinstance(arg, (bool, int, str)) else self._constant(arg)

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name


class _Watch(TorchFunctionMode):
    """Detects reads of a tensor that do not go through an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr") and self._recorder.depends_on_inputs(args[0]):
            raise _Unreplayable(f"Python code calls {name}() of what depends on the text")
        return func(*args, **(kwargs or {}))


def _function_of(recorder: _Recorder, inputs: int, result: Tensor) -> Callable[..., Tensor]:
    """The recorded operators as a function that frees each result after its last use."""
    returned = recorder.name_of(result)
    last_use: dict[str, int] = {}
    for line, (name, _, arguments) in enumerate(recorder.lines):
        last_use |= dict.fromkeys([name, *re.findall(r"\bv\d+", arguments)], line)
    freed: dict[int, list[str]] = {}
    for name, line in last_use.items():
        if name != returned.partition("[")[0]:
            freed.setdefault(line, []).append(name)
    body = []
    for line, (name, operator, arguments) in enumerate(recorder.lines):
        body.append(f"    {name} = {operator}({arguments})")
        body += [f"    {' = '.join(freed[line])} = None"] if line in freed else []
    parameters = [*(f"x{number}" for number in range(inputs)), *(f"{name}={name}" for name in recorder.constants)]
    code = "\n".join([f"def run({', '.join(parameters)}):", *body, f"    return {returned}"])
    scope = dict(recorder.constants)
    exec(compile(code, "<operators of a decoder>", "exec"), scope)  # contains only names and numbers generated here
    run: Callable[..., Tensor] = scope["run"]
    return run


class Replay:
    """A function of tensors whose operators are recorded in the first call and replayed from the third call on.

    The second call runs both and compares the results bit for bit. So calling the function twice must give the same results
    and leave the same tensors. If the results differ, or the function reads numbers from tensors, it is called normally.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._run: Callable[..., Tensor] | None = None
        self._proven = False
        self.refusal: str | None = None  # why the function is not replayed

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._proven and self._run is not None:
            return self._run(*inputs)
        if self.refusal is not None:
            return self._function(*inputs)
        if self._run is None:
            return self._record(inputs)
        expected = self._function(*inputs)
        self._proven = torch.equal(self._run(*inputs), expected)
        if not self._proven:
            self._refuse("its operators depend on the text")
        return expected

    def _record(self, inputs: tuple[Tensor, ...]) -> Tensor:
        recorder = _Recorder(inputs)
        try:
            with recorder, _Watch(recorder):
                result = self._function(*inputs)
            self._run = _function_of(recorder, len(inputs), result)
        except _Unreplayable as reason:
            self._refuse(str(reason))
            return self._function(*inputs)
        return result

    def _refuse(self, reason: str) -> None:
        self.refusal, self._run = reason, None
        _LOG.info("each token runs the model's Python code: %s", reason)
