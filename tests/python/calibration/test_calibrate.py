"""calibrate: scales and codes of one matrix, compared with plain references."""

import lowbit
import pytest
import torch
from lowbit import LinearConfig
from lowbit.calibration import bands
from lowbit.calibration.collect import add_to
from lowbit.calibration.descent import SWEEPS, descend
from lowbit.calibration.gptq_solver import Moments, Solver, best_correction, gptq
from lowbit.calibration.grid import Quantized, levels_near, nearest, stored, table_in, with_table
from lowbit.calibration.importance import search
from lowbit.calibration.learning import Learning
from reference import MAPPINGS, WIDTHS
from torch import Tensor

pytestmark = pytest.mark.first

TOKENS = 400


def correlated(k: int, seed: int = 0) -> Tensor:
    """Inputs [TOKENS, k], some of them large and many correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator) * 0.3 + torch.eye(k)
    return torch.randn(TOKENS, k, generator=generator) @ mix


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return 0.05 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def moments_of(x: Tensor, y: Tensor | None = None) -> Moments:
    return Moments(x.T @ x, None if y is None else (y - x).T @ x, len(x))


def output_error(weight: Tensor, quantized: Quantized, x: Tensor, y: Tensor | None = None) -> float:
    """The mean squared error of the outputs relative to that of zeros."""
    wanted = (x if y is None else y).double() @ weight.double().T
    found = x.double() @ quantized.dequantize().double().T
    return float((found - wanted).square().sum() / wanted.square().sum())


def nearest_by_lowbit(weight: Tensor, config: LinearConfig) -> Quantized:
    unpacked = lowbit.unpack(lowbit.quantize_tensor(weight, config))
    return nearest(weight, unpacked.scales, unpacked.mins, config)


# Odd n; a short last group at 32 and 48; inputs that fill no block.
SHAPES = [(21, 80, 32), (5, 50, 48), (33, 16, 16), (3, 7, None), (17, 130, None), (2, 600, None), (2, 1100, 528)]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_chosen_codes_are_stored(bits, mapping):
    """The format rounds scales; codes must be chosen for the rounded scales, and the layer must contain them."""
    for n, k, group in SHAPES:
        config = LinearConfig(bits, group, mapping)
        weight, moments = weights(n, k), moments_of(correlated(k))
        bias = weights(1, n)[0]
        for quantized in (
            search(weight, None, config),
            search(weight, moments.importance(), config),
            gptq(weight, moments, config),
            gptq(weight, moments, config, by_importance=True),
        ):
            packed = quantized.pack(bias)
            unpacked = lowbit.unpack(packed)
            assert torch.equal(unpacked.codes, quantized.codes()), (n, k, group)
            assert torch.equal(unpacked.scales, quantized.scales), (n, k, group)
            assert mapping == "symmetric" or torch.equal(unpacked.mins, quantized.mins), (n, k, group)
            assert torch.equal(unpacked.bias, bias)
            torch.testing.assert_close(lowbit.nn.Linear(packed).dequantize(), quantized.dequantize(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_each_method_is_better_than_the_one_before(bits, mapping):
    weight, x = weights(40, 96), correlated(96)
    moments = moments_of(x)
    for group in (16, 32, None):
        config = LinearConfig(bits, group, mapping)
        errors = [
            output_error(weight, quantized, x)
            for quantized in (
                nearest_by_lowbit(weight, config),
                search(weight, moments.importance(), config),
                gptq(weight, moments, config),
            )
        ]
        assert errors[0] > errors[1] > errors[2], (group, errors)
        assert errors[2] < 0.85 * errors[0], (group, errors)


def test_search_without_importance_beats_rounding_to_nearest():
    weight = weights(64, 256)
    for bits in (2, 3, 4):
        for mapping in MAPPINGS:
            config = LinearConfig(bits, 32, mapping)
            ours, theirs = search(weight, None, config), nearest_by_lowbit(weight, config)
            assert (ours.dequantize() - weight).square().sum() < (theirs.dequantize() - weight).square().sum()


def test_importance_counts():
    """If only one input matters, its error is nearly zero, and the others have larger errors."""
    weight = weights(16, 32)
    importance = torch.full((32,), 1e-4)
    importance[[3, 17]] = 1.0
    config = LinearConfig(2, 32)
    with_it, without = search(weight, importance, config), search(weight, None, config)
    errors = [(each.dequantize() - weight).square().mean(0) for each in (with_it, without)]
    assert errors[0][[3, 17]].mean() < 0.3 * errors[1][[3, 17]].mean()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_weights_on_a_grid_stay_exact(bits, mapping):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (9, 64), generator=generator, dtype=torch.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 2**bits - 1  # both ends of every group
    scales = torch.full((9, 2), 2.0**-6)
    mins = torch.full((9, 2), -(2.0**-4)) if mapping == "affine" else None
    weight = lowbit.nn.Linear(lowbit.pack(codes, scales, mins, bits=bits, group_size=32, mapping=mapping)).dequantize()
    config = LinearConfig(bits, 32, mapping)
    moments = moments_of(correlated(64))
    for quantized in (search(weight, None, config), gptq(weight, moments, config)):
        torch.testing.assert_close(quantized.dequantize(), weight, rtol=0, atol=1e-6)


# ---- GPTQ


def plain_gptq(weight: Tensor, square: Tensor, grid: Quantized, order: list[int], damping: float) -> Tensor:
    """GPTQ as derived: one input at a time, with the inverse of the remaining matrix, in float64."""
    square = square.double() + damping * square.double().diagonal().mean() * torch.eye(len(square))
    work = weight.double().clone()
    result = torch.empty_like(work)
    scales = grid.per_input(grid.scales).double()
    mins = None if grid.mins is None else grid.per_input(grid.mins)
    for position, column in enumerate(order):
        rest = order[position:]
        inverse = torch.linalg.inv(square[rest][:, rest])
        config = LinearConfig(grid.config.bits, None, grid.config.mapping)
        min = None if mins is None else mins[:, [column]]
        found = nearest(work[:, [column]].float(), scales[:, [column]].float(), min, config)
        result[:, column] = found.dequantize()[:, 0]
        error = (work[:, column] - result[:, column]) / inverse[0, 0]
        work[:, rest] -= error[:, None] * inverse[0][None]
    return result


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_gptq_follows_the_derivation_in_the_paper(mapping):
    weight, x = weights(11, 70), correlated(70)
    moments, config = moments_of(x), LinearConfig(3, 32, mapping)
    order = torch.argsort(moments.square.diagonal(), descending=True, stable=True).tolist()
    expected = plain_gptq(weight, moments.square, search(weight, moments.importance(), config), order, 0.01)
    found = gptq(weight, moments, config, by_importance=True, damping=0.01, sweeps=0)
    torch.testing.assert_close(found.dequantize().double(), expected, rtol=0, atol=1e-6)


def test_blocks_change_nothing():
    """Errors are propagated in blocks of 128 inputs, with the same result as one by one."""
    weight, x = weights(4, 300), correlated(300)
    moments, config = moments_of(x), LinearConfig(4, None)
    order = torch.argsort(moments.square.diagonal(), descending=True, stable=True).tolist()
    expected = plain_gptq(weight, moments.square, search(weight, moments.importance(), config), order, 0.05)
    found = gptq(weight, moments, config, by_importance=True, damping=0.05, sweeps=0)
    torch.testing.assert_close(found.dequantize().double(), expected, rtol=0, atol=1e-6)


def plain_descent(start: Quantized, square: Tensor, wanted: Tensor, sweeps: int) -> Tensor:
    """Coordinate descent over the codes, then the group's scale (and minimum) by least squares, in float64."""
    k, table = start.levels.shape[1], table_in(start.config)
    square, wanted, group = square.double(), wanted.double(), start.config.group_size or k
    values, levels = start.dequantize().double(), start.levels.clone()
    scales, mins = start.scales.clone(), None if start.mins is None else start.mins.clone()
    largest = (scales if mins is None else torch.maximum(scales.abs(), mins)).abs().amax(1, keepdim=True)
    for _ in range(sweeps):
        for number, first in enumerate(range(0, k, group)):
            columns, at = range(first, min(first + group, k)), slice(number, number + 1)
            low = None if mins is None else mins[:, at]
            for column in columns:
                slope = values @ square[column] - wanted[:, column]
                best = (values[:, column] - slope / square[column, column])[:, None].float()
                levels[:, column] = levels_near(best, scales[:, at], low, start.config.bits, table)[:, 0]
                values[:, column] = levels[:, column] * scales[:, number] + (0.0 if low is None else low[:, 0])
            slope, own = values @ square - wanted, square[columns][:, columns]
            for row in range(len(values)):
                basis = levels[row, columns].double()[:, None]
                if mins is not None:
                    basis = torch.cat([basis, torch.ones_like(basis)], 1)
                step = torch.linalg.pinv(basis.T @ own @ basis) @ -(basis.T @ slope[row, columns])
                scales[row, number] += float(step[0])
                if mins is not None:
                    mins[row, number] += float(step[1])
            scales[:, at] = stored(scales[:, at], largest)
            if mins is not None:
                mins[:, at] = stored(mins[:, at], largest)
            values = Quantized(levels, scales, mins, start.config).dequantize().double()
    return values


@pytest.mark.parametrize("bits, mapping, group", [(3, "symmetric", 32), (1, "symmetric", None), (2, "affine", 48)])
def test_descent_is_coordinate_descent(bits, mapping, group):
    """With a short last group, and a group longer than a block of inputs."""
    k = 140
    moments, weight, config = moments_of(correlated(k)), weights(6, k), LinearConfig(bits, group, mapping)
    solver = Solver(moments)
    start = solver.quantize(weight, config, 0.0, sweeps=0)
    found = descend(start, solver.square, weight, sweeps=2)
    expected = plain_descent(start, solver.square, weight @ solver.square, sweeps=2)
    assert (found.levels != start.levels).float().mean() > 0.02
    torch.testing.assert_close(found.dequantize().double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "bits, mapping",
    [(bits, mapping) for bits in (1, 2, 3, 4) for mapping in (*MAPPINGS, "levels") if (bits, mapping) != (1, "levels")],
)
def test_descent_makes_the_error_smaller(bits, mapping):
    """Also on other tokens, and with drift of the inputs."""
    y = torch.cat([correlated(64, seed) for seed in (0, 0, 0)]) + 0.1 * torch.randn(
        1200, 64, generator=torch.Generator().manual_seed(3)
    )
    x, weight = y + 0.2 * torch.roll(y, 1, 1), weights(40, 64)
    moments = moments_of(x[:1000], y[:1000])
    config = LinearConfig(bits, 32, mapping, levels="fit" if mapping == "levels" else None)
    config = with_table(config, weight, moments.importance())
    plain, better = (gptq(weight, moments, config, sweeps=sweeps) for sweeps in (0, SWEEPS))
    assert torch.equal(lowbit.unpack(better.pack()).codes, better.codes())
    for part in (slice(0, 1000), slice(1000, None)):
        errors = [output_error(weight, each, x[part], y[part]) for each in (plain, better)]
        assert errors[1] < 0.97 * errors[0], errors
    # With fewer than two tokens per input, or above 5 bits, there is no descent.
    few = moments_of(x[:127], y[:127])
    assert torch.equal(gptq(weight, few, config, sweeps=0).levels, gptq(weight, few, config).levels)
    assert torch.equal(gptq(weight, moments, LinearConfig(6), sweeps=0).levels, gptq(weight, moments, LinearConfig(6)).levels)


# At 2 bits the weights cause most of the error.
@pytest.mark.parametrize("bits, most", [(2, 0.9), (3, 0.8), (4, 0.7)])
def test_the_correction_brings_outputs_back(bits, most):
    """With inputs that already have an error, outputs must come closer to those of the float inputs."""
    y = correlated(64)
    x = y + 0.3 * torch.roll(y, 1, 1) + 0.05 * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    weight, config = weights(48, 64), LinearConfig(bits, 32)
    plain, corrected = (gptq(weight, moments_of(x, y), config, correction=c) for c in (0.0, 1.0))
    errors = [output_error(weight, each, x, y) for each in (plain, corrected)]
    assert errors[1] < most * errors[0]


def test_the_shift_brings_float_outputs_back():
    """On inputs with an error, corrected weights give the result of least squares with the same damping."""
    y = correlated(64)
    x = y + 0.3 * torch.roll(y, 1, 1)
    weight, moments = weights(48, 64), moments_of(x, y)
    square = moments.square.double()
    square.diagonal().add_(0.01 * square.diagonal().mean())
    expected = torch.linalg.solve(square, (weight.double() @ (y - x).double().T @ x.double()).T).T
    for by_importance in (False, True):
        found = Solver(moments, by_importance=by_importance).shift(weight)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
    better, plain = (((x @ w.T) - y @ weight.T).square().sum() for w in (weight + expected.float(), weight))
    assert better < 0.05 * plain
    assert not Solver(moments_of(x)).shift(weight).any()


def test_the_correction_is_chosen_by_other_tokens():
    """A drift that all tokens share is followed; a random one is not."""
    y = correlated(64)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    weight = weights(48, 64)
    for x, few, least, most in ((y + 0.3 * torch.roll(y, 1, 1), 400, 0.95, 1.0), (y + noise, 40, 0.0, 0.02)):
        # With few tokens and errors independent of the inputs, a fit to these tokens does not generalize.
        wanted = y if least else x + noise.flip(0)
        held = [(x[-200:], wanted[-200:])]
        solver = Solver(moments_of(x[: min(few, 200)], wanted[: min(few, 200)]))
        assert least <= best_correction(solver, weight, held) <= most
    assert best_correction(Solver(moments_of(y, y)), weight, [(y, y)]) == 0.0  # no drift at all


@pytest.mark.parametrize("block", [0, 64])
def test_a_drift_times_the_weight_gives_the_same_correction(block):
    """Of a layer with fewer outputs than inputs, whole and in bands, with held-out tokens, also for rotated inputs."""
    y = correlated(128)
    x = y + 0.3 * torch.roll(y, 1, 1)
    config, weight = LinearConfig(4, 32, rotate=block > 0), weights(48, 128)
    found = {}
    for name, known in (("whole", None), ("projected", weight)):
        moments: dict[str, Moments] = {}
        for part in (slice(0, 150), slice(150, None)):
            add_to(moments, "x", x[part], y[part], diagonal=False, held=0.25, weight=known)
        sums = moments["x"]
        assert sums.drift.shape == ((128, 128) if known is None else (48, 128))
        sums.rotate(block)
        rounded, solver = config.as_rounded(weight), Solver(sums)
        correction = best_correction(solver, rounded, sums.held)
        sums.join()
        solver = Solver(sums)
        bands = torch.cat([solver.shift(rounded[rows], rows) for rows in (slice(0, 30), slice(30, 48))])
        assert torch.equal(bands, solver.shift(rounded))
        assert torch.equal(
            gptq(rounded[30:], sums, config, rows=slice(30, 48)).dequantize(), gptq(rounded, sums, config).dequantize()[30:]
        )
        found[name] = correction, bands
    assert 0.5 < found["whole"][0] <= 1.0 and abs(found["whole"][0] - found["projected"][0]) < 1e-3
    torch.testing.assert_close(found["projected"][1], found["whole"][1], rtol=1e-3, atol=1e-4)


def test_moments_that_are_not_positive_definite():
    """Also with the quick factor, which is in float64 if float32 fails."""
    square = torch.eye(64)
    square[0, 0] = -1.0
    for quick in (False, True):
        with pytest.raises(ValueError, match="the moments are not positive definite .*; expected a larger damping"):
            Solver(Moments(square, None, 10), quick=quick)
    ones = torch.ones(64, 64) + 1e-6 * torch.eye(64)
    found, exact = (Solver(Moments(ones, None, 10), damping=1e-9, quick=quick).root for quick in (True, False))
    torch.testing.assert_close(found, exact, rtol=0.1, atol=1e-3)


def test_factors_are_those_of_the_papers():
    """More inputs than rows in a block. Values below the diagonal of the squares are not read."""
    y = correlated(600)
    x = y + 0.3 * torch.roll(y, 1, 1)
    whole = moments_of(x, y)
    upper = Moments(torch.zeros(600, 600), torch.zeros(600, 600), 0)
    for part in (slice(0, 150), slice(150, None)):
        upper.add(x[part], y[part])
    assert upper.tokens == TOKENS and not upper.square[256:, :256].any()
    torch.testing.assert_close(upper.square.triu(), whole.square.triu(), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(upper.drift, whole.drift, rtol=1e-4, atol=1e-2)
    halves = Moments(whole.square.triu(), whole.drift, TOKENS)
    solver, again = Solver(whole), Solver(halves)
    assert torch.equal(solver.factor, again.factor)
    square = whole.square.double()
    square.diagonal().add_(0.01 * square.diagonal().mean())
    factor = torch.linalg.cholesky(torch.linalg.inv(square), upper=True)
    torch.testing.assert_close(solver.factor.double(), factor, rtol=1e-4, atol=1e-6)


def test_inputs_that_were_never_used_are_rounded_to_nearest():
    x = correlated(64)
    x[:, [0, 5, 40]] = 0.0
    weight, config = weights(8, 64), LinearConfig(4, 32)
    quantized = gptq(weight, moments_of(x), config)
    error, step, size = (
        values[:, [0, 5, 40]].abs()
        for values in (quantized.dequantize() - weight, quantized.per_input(quantized.scales), weight)
    )
    assert (error <= 0.5001 * step + (size - 7 * step).clamp(min=0)).all()  # or beyond the levels
    # All inputs are zero.
    quantized = gptq(weight, Moments(torch.zeros(64, 64), None, 10), config)
    assert (quantized.dequantize() - weight).square().mean() < 0.02 * weight.square().mean()


def test_zeros_stay_zeros():
    for mapping in MAPPINGS:
        for bits in WIDTHS:
            quantized = gptq(torch.zeros(3, 40), moments_of(correlated(40)), LinearConfig(bits, 16, mapping))
            assert not quantized.dequantize().any() and lowbit.verify(quantized.pack())


def test_repeats():
    weight, moments = weights(30, 96), moments_of(correlated(96))
    first, second = (gptq(weight, moments, LinearConfig(2, 32)).pack() for _ in range(2))
    assert torch.equal(first, second)


def test_refusals():
    weight, x, config = weights(4, 32), correlated(32), LinearConfig(4, 32)
    x[7, 3] = torch.nan
    with pytest.raises(ValueError, match="inputs of the layer have NaN or infinite values"):
        gptq(weight, moments_of(x), config)
    with pytest.raises(ValueError, match="inputs of the layer in the float model have NaN"):
        gptq(weight, moments_of(correlated(32), x), config)
    with pytest.raises(ValueError, match="moments are of 33 inputs; expected 32"):
        gptq(weight, moments_of(correlated(33)), config)
    with pytest.raises(ValueError, match="saw no tokens"):
        gptq(weight, Moments(torch.zeros(32, 32), None, 0), config)


# ---- tables of levels


@pytest.mark.parametrize("bits, levels", [(2, "fit"), (3, "fit"), (4, "fit"), (4, "mxfp4"), (4, "nf4")])
def test_tables_of_levels(bits, levels):
    """Weights as stored; each method is better than the one before."""
    for n, k, group in ((24, 80, 32), (5, 50, 48), (3, 130, None)):
        weight, x = weights(n, k), correlated(k)
        moments = moments_of(x)
        config = with_table(LinearConfig(bits, group, levels=levels), weight, moments.importance())
        assert len(config.levels) == 2**bits and set(map(type, config.levels)) == {int}
        by_lowbit = lowbit.nn.Linear(lowbit.quantize_tensor(weight, config)).dequantize()
        found = [search(weight, moments.importance(), config), gptq(weight, moments, config)]
        for quantized in found:
            unpacked = lowbit.unpack(quantized.pack())
            assert unpacked.mapping == "levels" and tuple(unpacked.levels.tolist()) == config.levels
            assert torch.equal(unpacked.codes, quantized.codes()) and torch.equal(unpacked.scales, quantized.scales)
            assert torch.equal(lowbit.nn.Linear(quantized.pack()).dequantize(), quantized.dequantize())
        assert torch.equal(gptq(weight, moments, config).levels, found[1].levels)
        wanted = x @ weight.T
        errors = [float((x @ by_lowbit.T - wanted).square().sum())]
        errors += [float((x @ quantized.dequantize().T - wanted).square().sum()) for quantized in found]
        assert min(errors[:2]) > errors[2], (errors, n, k, group)


def test_a_fitted_table_is_better_than_whole_numbers_at_two_bits():
    weight, moments = weights(48, 96), moments_of(correlated(96))
    symmetric, fitted = (
        output_error(weight, gptq(weight, moments, LinearConfig(2, 32, levels=levels)), correlated(96))
        for levels in (None, "fit")
    )
    assert fitted < 0.95 * symmetric, (fitted, symmetric)


def test_bands_of_a_matrix_have_one_table(monkeypatch):
    weight, moments = weights(70, 96), moments_of(correlated(96))
    config, bias = with_table(LinearConfig(3, 32, levels="fit"), weight, moments.importance()), weights(1, 70)[0]
    solver = Solver(moments)
    whole = bands.packed_in_bands(weight, config, lambda rows, _: solver.quantize(rows, config, 1.0), bias)
    monkeypatch.setattr(bands, "_BAND_WEIGHTS", 32 * 96)
    seen = []

    def quantize(rows: Tensor, band: slice) -> Quantized:
        assert torch.equal(rows, weight[band])
        seen.append(len(rows))
        return solver.quantize(rows, config, 1.0)

    parts = bands.packed_in_bands(weight, config, quantize, bias)
    assert seen == [32, 32, 6] and torch.equal(parts, whole)
    assert lowbit.info(whole).levels == config.levels


# ---- learned parameters


@pytest.mark.parametrize("bits, mapping", [(1, "symmetric"), (3, "symmetric"), (2, "affine"), (2, "levels"), (4, "levels")])
def test_an_untrained_layer_equals_the_packed_one(bits, mapping):
    torch.manual_seed(0)
    packed = search(torch.randn(20, 70), None, LinearConfig(bits, 32, mapping)).pack(torch.randn(20))
    learning = Learning(packed, True)
    assert torch.equal(learning.pack(), packed)
    x = torch.randn(3, 70)
    torch.testing.assert_close(learning.linear(x), x @ dequantized(packed).T + lowbit.unpack(packed).bias)
    rows = torch.tensor([[3, 3], [19, 0]])
    torch.testing.assert_close(learning.embedding(rows), dequantized(packed)[rows])


def dequantized(packed: torch.Tensor) -> torch.Tensor:
    info = lowbit.operators.ops.info(packed)
    return lowbit.operators.ops.embedding(torch.arange(info.out_features), packed, info.in_features)


@pytest.mark.parametrize("mapping", ["affine", "levels"])
def test_gradients_of_what_is_learned(mapping):
    """Equal to autograd through plain operators."""
    torch.manual_seed(0)
    learning = Learning(search(torch.randn(12, 40), None, LinearConfig(2, 16, mapping)).pack(), True)
    x, wanted = torch.randn(9, 40, requires_grad=True), torch.randn(9, 12)
    parameters = [x, *learning.parameters()]
    (learning.linear(x) * wanted).sum().backward()
    found = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    levels, scales, mins = learning.values()
    weight = levels[learning.unpacked.codes.long()] * scales.repeat_interleave(16, 1)[:, :40]
    if mins is not None:
        weight = weight + mins.repeat_interleave(16, 1)[:, :40]
    ((x @ weight.T) * wanted).sum().backward()
    assert len(parameters) == 3
    for parameter, gradient in zip(parameters, found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
