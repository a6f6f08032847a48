"""lowbit.plan: functions recorded, lowered and run by C++, against torch."""

import math
from functools import partial

import pytest
import torch
from lowbit import _C
from lowbit.plan.lowering import lowered
from lowbit.plan.plan_builder import Roles
from lowbit.plan.plan_file import Extent, to_bytes
from lowbit.plan.recording import CALLS, Sizes, Unplannable, record
from lowbit.plan.running import Caches, Planned
from torch import Tensor

F = torch.nn.functional
SIZES = ((1, 1), (1, 0), (2, 1), (5, 5), (33, 7), (200, 64))
WEIGHT, BIAS = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6.0)
KERNELS = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(2))
LARGE = torch.zeros(2**16, 8)
NONE = Caches([], [])


def inputs(rows: int, kept: int) -> list[Tensor]:
    """Floats x [rows, 8], y [rows, 8] of bfloat16, integers n [rows, 4] and the kept rows."""
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    return [x, y.bfloat16(), torch.randint(-3, 4, (rows, 4), generator=generator), torch.arange(rows - kept, rows)]


def plan_of(function, make=inputs, state=None) -> Planned:
    given = [make(*call) for call in CALLS]
    recordings = [record(partial(function, *each), each) for each in given]
    return Planned(lowered(recordings, Roles(len(given[0]), []), state or {}))


def check(function, exact: bool = True, state=None) -> None:
    """Fails unless a plan of the function gives torch's results: the same bits, or within rounding of float32."""
    planned = plan_of(function, state=state)
    for rows, kept in SIZES:
        given = inputs(rows, kept)
        expected = function(*given)
        for result, value in zip(
            planned.run(given, kept, [(0, rows, 0, NONE)]),
            [expected] if isinstance(expected, Tensor) else expected,
            strict=True,
        ):
            assert (result.dtype, result.shape) == (value.dtype, value.shape)
            if exact:
                assert torch.equal(result.nan_to_num(777.0), value.nan_to_num(777.0)), (rows, kept)
            else:
                limit = 8e-3 if value.dtype is torch.bfloat16 else 2e-6
                torch.testing.assert_close(result, value, rtol=limit, atol=3 * limit, equal_nan=True)


# Functions of x, y, n and k (kept rows), whose results have torch's bits.
EXACT = {
    "add": lambda x, y, n, k: x + 1.5,
    "add of two types": lambda x, y, n, k: x + y,
    "add of integers": lambda x, y, n, k: n + 7,
    "add of integers and floats": lambda x, y, n, k: x[:, :4] + n,
    "add of bfloat16": lambda x, y, n, k: y + y * 0.1,
    "add of bfloat16 and integers": lambda x, y, n, k: y[:, :4] + n * 1001,
    "sub": lambda x, y, n, k: x - x[:, :1],
    "mul of a row": lambda x, y, n, k: x * x[:1],
    "mul of bool": lambda x, y, n, k: x * (x > 0),
    "div": lambda x, y, n, k: x / (y.float() + 3),
    "div of integers": lambda x, y, n, k: n / 4,
    "neg": lambda x, y, n, k: -x,
    "abs": lambda x, y, n, k: x.abs(),
    "reciprocal": lambda x, y, n, k: x.reciprocal(),
    "floor": lambda x, y, n, k: (x * 5).floor(),
    "square": lambda x, y, n, k: x.square(),
    "power 2": lambda x, y, n, k: y.pow(2),
    "relu": lambda x, y, n, k: F.relu(y),
    "minimum": lambda x, y, n, k: torch.minimum(x, y.float()),
    "maximum": lambda x, y, n, k: torch.maximum(x / 0 * 0, y.float()),
    "clamp": lambda x, y, n, k: x.clamp(-0.5, 1.0),
    "clamp min": lambda x, y, n, k: x.clamp(min=0.25),
    "clamp of tensors": lambda x, y, n, k: x.clamp(y.float() - 1, y.float() + 1),
    "comparisons": lambda x, y, n, k: (x > 0) & (x <= 1) | (x != x),
    "comparison of integers": lambda x, y, n, k: (n >= 1) | (n == -2),
    "comparison of integers with a float": lambda x, y, n, k: n > 0.5,
    "comparison of bfloat16 with a number": lambda x, y, n, k: y.mul(0).add(0.1) == 0.1,
    "comparison of bfloat16 with float32": lambda x, y, n, k: y > x,
    "comparison of bfloat16 with integers": lambda x, y, n, k: y[:, :4] * 300 > n * 257,
    "logical and of integers": lambda x, y, n, k: torch.logical_and(n, n + 1),
    "logical or of integers": lambda x, y, n, k: torch.logical_or(n, n - 1),
    "logical not": lambda x, y, n, k: torch.logical_not(n),
    "logical not of floats": lambda x, y, n, k: torch.logical_not(x.clamp(min=0)),
    "bitwise and": lambda x, y, n, k: n & 2,
    "bitwise or of bool": lambda x, y, n, k: (n > 0) | (n < -1),
    "bitwise not": lambda x, y, n, k: ~(n > 0),
    "sum of bool": lambda x, y, n, k: (n > 0) + (n < 2),
    "where": lambda x, y, n, k: torch.where(x > 0, x, y.float()),
    "where with numbers": lambda x, y, n, k: torch.where(n > 0, 1.5, -2.0),
    "where with a number": lambda x, y, n, k: torch.where(x > 0, x, -math.inf),
    "masked fill": lambda x, y, n, k: x.masked_fill(x > 1, -math.inf),
    "masked fill of rows": lambda x, y, n, k: y.masked_fill(n[:, :1] > 0, 0.3),
    "masked fill of integers": lambda x, y, n, k: n.masked_fill(n > 1, -(2**63)),
    "in place": lambda x, y, n, k: (x * 2).add_(1).mul_(3).sub_(x).div_(4),
    "fill in place": lambda x, y, n, k: (x * 2).masked_fill_(x > 0, 1).clamp_(-1, 1),
    "zeros": lambda x, y, n, k: torch.zeros_like(x) + torch.ones(x.shape[0], 8) * x.new_full((1, 8), 0.7),
    "arange": lambda x, y, n, k: x + torch.arange(x.shape[0])[:, None],
    "arange of floats": lambda x, y, n, k: torch.arange(x.shape[0], dtype=torch.float32) * 0.5 + x[:, 0],
    "conversions": lambda x, y, n, k: (x * 10).long() + (x > 0).int(),
    "conversion to bfloat16": lambda x, y, n, k: x.bfloat16(),
    "conversion to float16": lambda x, y, n, k: (x * 3e4).to(torch.float16),
    "conversion to bool": lambda x, y, n, k: n.bool(),
    "views": lambda x, y, n, k: x.view(-1, 2, 4).transpose(1, 2).reshape(x.shape[0], 8) * 1,
    "slices": lambda x, y, n, k: x[:, 1::3].contiguous(),
    "unbound": lambda x, y, n, k: x.unbind(1)[3] * x.unbind(1)[1],
    "chunks": lambda x, y, n, k: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0]], 1),
    "cat of rows": lambda x, y, n, k: torch.cat([x, y.float(), x], 0),
    "cat of columns": lambda x, y, n, k: torch.cat([x[:, :3], -x[:, 3:]], -1),
    "cat of two types": lambda x, y, n, k: torch.cat([x, y], 1),
    "stack": lambda x, y, n, k: torch.stack([x, x * 2], 1),
    "stack last": lambda x, y, n, k: torch.stack((x, -x), -1).flatten(-2),
    "expand": lambda x, y, n, k: x[:, None].expand(-1, 3, -1).reshape(x.shape[0], 24),
    "repeat": lambda x, y, n, k: x[:, None].repeat(1, 3, 1),
    "repeat_interleave": lambda x, y, n, k: x.repeat_interleave(3, dim=1),
    "kept rows": lambda x, y, n, k: x[k],
    "index_select": lambda x, y, n, k: x.index_select(0, k),
    "indices of columns": lambda x, y, n, k: x[:, torch.tensor([3, 1, 1, 7])] + 0 * n,
    "rows of a table": lambda x, y, n, k: F.embedding(n.abs(), WEIGHT),
    "gather": lambda x, y, n, k: x.gather(1, n.abs()),
    "scatter": lambda x, y, n, k: torch.zeros_like(x).scatter_(1, n.abs(), 1.0),
    "scatter to a copy": lambda x, y, n, k: x.scatter(1, n.abs(), 0.0),
    "top": lambda x, y, n, k: torch.topk(x, 3, dim=-1)[0],
    "top of bfloat16": lambda x, y, n, k: torch.topk(y + torch.arange(8) * 8, 3, dim=-1)[1],
    "largest": lambda x, y, n, k: x.max(-1)[0],
    "place of the largest": lambda x, y, n, k: y.max(1, keepdim=True)[1],
    "both": lambda x, y, n, k: tuple(each * 1 for each in x.masked_fill(x > 1, -math.inf).max(-1)),
    "a square that no result needs": lambda x, y, n, k: (torch.ones(len(x), len(x)).tril(), x * 2)[1],
    "outer product": lambda x, y, n, k: x[:, :, None] @ x[:, None, :4],
    "dropout": lambda x, y, n, k: F.dropout(x, 0.5, training=False) + 1,
    "several results": lambda x, y, n, k: (x * 2, n + 1),
    "copy into a part": lambda x, y, n, k: _copied(x),
}


def _copied(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 10)
    out[:, 1:9].copy_(x)
    out[:, 0] = x[:, 3]
    return out


# Those with sums or functions of C's library, which torch computes in other ways on each CPU.
CLOSE = {
    "power one half": lambda x, y, n, k: x.abs() ** 0.5,
    "sqrt": lambda x, y, n, k: x.sqrt(),
    "rsqrt": lambda x, y, n, k: (x.abs() + 0.1).rsqrt(),
    "power minus one half": lambda x, y, n, k: (x.abs() + 0.1) ** -0.5,
    "exp": lambda x, y, n, k: x.exp(),
    "log": lambda x, y, n, k: x.log(),
    "log1p": lambda x, y, n, k: (x.abs() * 1e-4).log1p() * 1e4,
    "tanh": lambda x, y, n, k: x.tanh(),
    "tanh of bfloat16": lambda x, y, n, k: y.tanh(),
    "sigmoid": lambda x, y, n, k: x.sigmoid(),
    "sigmoid of integers": lambda x, y, n, k: n.sigmoid(),
    "gelu": lambda x, y, n, k: F.gelu(x) + F.gelu(y, approximate="tanh").float(),
    "convolution": lambda x, y, n, k: F.conv1d(x.T[None], KERNELS, BIAS[:3], padding=1),
    "convolution with steps": lambda x, y, n, k: F.conv1d(x.repeat_interleave(2, 0).T[None], KERNELS, stride=2, padding=1),
    "convolution of planes": lambda x, y, n, k: F.conv2d(
        x[None, None].repeat(2, 3, 1, 1),
        KERNELS.view(3, -1)[:, :9].reshape(3, 1, 3, 3).repeat(1, 3, 1, 1),
        BIAS[:3],
        padding=(1, 1),
        stride=(1, 2),
    ),
    "convolution of patches": lambda x, y, n, k: F.conv3d(
        x.view(-1, 2, 1, 2, 2), torch.arange(32.0).view(4, 2, 1, 2, 2) / 8, BIAS[:4], stride=(1, 2, 2), padding="valid"
    ).flatten(1),
    "silu": lambda x, y, n, k: F.silu(x.T.contiguous().T).contiguous(),
    "softplus": lambda x, y, n, k: F.softplus(x * 20),
    "sin and cos": lambda x, y, n, k: torch.cat([x.sin(), (x * 9).cos()], -1),
    "sum": lambda x, y, n, k: x.sum(-1),
    "sum of the first dimension": lambda x, y, n, k: x.view(-1, 4, 2).sum(1),
    "sum kept": lambda x, y, n, k: x.sum(1, keepdim=True),
    "mean": lambda x, y, n, k: x.mean(-1, keepdim=True),
    "mean of bfloat16": lambda x, y, n, k: y.mean(-1),
    "deviation": lambda x, y, n, k: x.std(-1, keepdim=True, unbiased=False),
    "deviation of bfloat16": lambda x, y, n, k: y.std(1, unbiased=False),
    "short products": lambda x, y, n, k: x.view(-1, 4, 2) @ y.float().view(-1, 2, 4),
    "short products of bfloat16": lambda x, y, n, k: y.view(-1, 2, 4).mT @ y.view(-1, 2, 4)[:, :, :3],
    "softmax": lambda x, y, n, k: F.softmax(x * 5, -1),
    "softmax in float32": lambda x, y, n, k: F.softmax(y, -1, dtype=torch.float32),
    "linear": lambda x, y, n, k: F.linear(x, WEIGHT, BIAS),
    "matmul": lambda x, y, n, k: x @ WEIGHT.T,
    "matmul of kept rows": lambda x, y, n, k: x[k] @ WEIGHT.T,
    "norm": lambda x, y, n, k: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "integers": lambda x, y, n, k: n.abs().float().sqrt(),
    "router": lambda x, y, n, k: (lambda p: p / p.sum(-1, keepdim=True))(torch.topk(x.softmax(-1), 2)[0]),
}


@pytest.mark.parametrize("name", EXACT)
def test_bits_of_torch(name):
    check(EXACT[name])


@pytest.mark.parametrize("name", CLOSE)
def test_close_to_torch(name):
    check(CLOSE[name], exact=False)


def test_weights_are_bound_and_constants_copied():
    weight, scale = torch.randn(6, 8), torch.tensor(3.0)
    function = lambda x, y, n, k: F.linear(x, weight) * (scale + 1)  # noqa: E731
    check(function, exact=False, state={"w": weight, "scale": scale})
    planned = plan_of(function, state={"w": weight, "scale": scale})
    assert [tensor is weight for tensor in planned.weights.values()] == [True]
    weight.mul_(2)  # the plan has the tensor itself
    given = inputs(5, 2)
    torch.testing.assert_close(planned.run(given, 2, [(0, 5, 0, NONE)])[0], function(*given))


WITHOUT = {
    "a value": (lambda x, y, n, k: x * int(n.sum()), "sees values that depend on the text"),
    "a list": (lambda x, y, n, k: x + len((x * 1).tolist()), "tolist"),
    "an array": (lambda x, y, n, k: x + torch.from_numpy((x * 1).numpy()), "numpy"),
    "a mask": (lambda x, y, n, k: x[x > 2].sum() + x, "aten.index"),
    "a size": (lambda x, y, n, k: x + (n > 2).nonzero().shape[0], "nonzero"),
    "a decision": (lambda x, y, n, k: x + 1 if (x > 0).any() else x - 1, "sees values"),
    "a decision by equality": (lambda x, y, n, k: x + 1 if torch.equal(n, -n) else x - 1, "sees values"),
    "places": (lambda x, y, n, k: x + torch.where(n > 2)[0].shape[0], "sees values"),
    "numbers of places": (lambda x, y, n, k: x + len(torch.argwhere(n > 2)), "sees values"),
    "a transposed tensor": (lambda x, y, n, k: (x * 2).T.contiguous().T * 2, "not new contiguous tensors"),
    "another operator": (lambda x, y, n, k: torch.special.bessel_j0(x), "bessel_j0.default is not supported in plans"),
    "other operators for longer calls": (lambda x, y, n, k: x + 1 if len(x) < 8 else x - 1, "depend on the length"),
    "a size that is not a multiple": (lambda x, y, n, k: torch.zeros(len(x) ** 2) + 1 * x.sum(), "a size is"),
    "a number that depends on the length": (lambda x, y, n, k: x * len(x), "depend"),
    "its input": (lambda x, y, n, k: x, "not new contiguous tensors"),
    "a part of a tensor": (lambda x, y, n, k: (x * 2)[:, :3], "not new contiguous tensors"),
    "a constant": (lambda x, y, n, k: torch.ones(3), "not new contiguous tensors"),
    "a tensor of its own": (lambda x, y, n, k: x + LARGE[: len(x)], "not part of its state"),
    "long products": (lambda x, y, n, k: x[:, None] @ x[..., None], "batched matrix products are not supported"),
    "deviation of samples": (lambda x, y, n, k: x.std(-1), "aten.std.* is not supported in plans|unbiased=False"),
    "rounding division": (lambda x, y, n, k: x.div(2, rounding_mode="floor"), "aten.div.Tensor_mode .*is not supported"),
    "float64": (lambda x, y, n, k: x.double() * 2, "float64"),
    "random numbers": (lambda x, y, n, k: x + torch.randn(8), "is not supported in plans"),
    "a large integer": (lambda x, y, n, k: n.masked_fill(n > 0, 2**63 - 1), "9223372036854775807"),
    "another large integer": (lambda x, y, n, k: n + (2**53 + 1), "9007199254740993"),
    "padding to a multiple": (lambda x, y, n, k: torch.cat([x, x.new_zeros(64 - len(x), 8)]) + 1, "padding"),
    "fewer rows": (lambda x, y, n, k: x[3:] + 1, "slices"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_functions_without_a_plan(name):
    function, reason = WITHOUT[name]
    with pytest.raises(Unplannable, match=reason):
        plan_of(function)


def test_sizes():
    sizes = Sizes()
    for extent in (Extent(5), Extent(0, 1), Extent(3, 0, 2), Extent(-4, 7, 1)):
        assert sizes.extent(tuple(extent.at(*call) for call in CALLS)) == extent
    for values in ((1, 2, 3, 5), (4, 6, 9, 13), (16, 36, 81, 144), (1, 1, 1, 2)):
        with pytest.raises(Unplannable, match="a size is"):
            sizes.extent(values)


def test_calls_that_do_not_fit():
    planned = plan_of(lambda x, y, n, k: x[k] * 2)
    given = inputs(5, 2)
    for wrong in (given[:1], [given[0][:4], *given[1:]], [*given[:3], given[3][:1]]):
        with pytest.raises(ValueError, match="missing or too small"):
            planned.run(wrong, 2, [(0, 5, 0, NONE)])
    with pytest.raises(ValueError, match="6 are kept"):
        planned.run(given, 6, [(0, 5, 0, NONE)])
    with pytest.raises(IndexError, match="an index is 9"):
        planned.run([*given[:3], torch.tensor([0, 9])], 2, [(0, 5, 0, NONE)])
    runner = _C.PlanRunner(to_bytes(planned.plan), 2)
    assert runner.weights == [] and runner.caches == []
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match=f"threads is {threads}; expected 1 to 1024"):
            _C.PlanRunner(to_bytes(planned.plan), threads)
    with pytest.raises(ValueError, match="checksum"):
        _C.PlanRunner(to_bytes(planned.plan)[:-1] + b"x", 1)
