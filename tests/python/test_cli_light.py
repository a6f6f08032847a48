"""`lowbit generate` without what transformers imports and running a text model does not need."""

import pytest
from command_line import FLOAT, PROMPT, text_of

LEFT_OUT = ("scipy", "torchao", "accelerate", "torch.distributed.tensor", "torch._dynamo.convert_frame")


def test_generate_leaves_them_out(packed, expected, run_python):
    script = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {LEFT_OUT} if sys.modules.get(name)], file=sys.stderr))
from lowbit.cli import main
main()
"""
    result = run_python(script, "generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 40)
    assert result.returncode == 0 and result.stdout == text_of(expected) + "\n", result.stderr
    assert result.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("first", ["torch._dynamo.utils", "torch._dynamo.exc", "sympy.core.numbers", "torch._dynamo", "sympy"])
def test_what_is_lazy_is_whole_when_it_is_used(first, run_python):
    """Whatever part is asked for first: each is there once, and the compiler compiles."""
    script = f"""
import sys
from lowbit.cli.light import leave_out_extras
leave_out_extras()
import transformers.masking_utils
assert "torch._dynamo.convert_frame" not in sys.modules
import {first}
import sympy, torch, torch._dynamo.utils, torch._dynamo.exc
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
with TransformGetItemToIndex():
    pass
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo.exc is sys.modules["torch._dynamo.exc"]
assert torch._dynamo.utils.torch is torch and sympy.Symbol("x") + 1 != 0
assert type(sys.modules["sympy"]).__name__ == type(sys.modules["torch._dynamo"]).__name__ == "module"
f = torch.compile(lambda x: x + 1, backend="eager")
assert f(torch.ones(2)).tolist() == [2, 2]
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_float_model_too(run_python):
    script = "from lowbit.cli import main; main()"
    result = run_python(script, "generate", FLOAT, "--prompt", PROMPT, "--max-new-tokens", 3, "--bits", 4)
    assert result.returncode == 0 and result.stdout, result.stderr
