"""lowbit.export_pte and lowbit.export_pt2: whole models, and what becomes of the file."""

import pytest
import torch

import lowbit
from reference import DTYPES, MAPPINGS, assert_same_bits, random_packed, random_rows

# executorch and torch.export warn of their own and each other's old calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
]


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.up = torch.nn.Linear(48, 80)
        self.down = torch.nn.Linear(80, 48, bias=False)

    def forward(self, indices):
        x = self.norm(self.table(indices))
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(1)
    return lowbit.quantize_(
        Small().eval(), {"*": lowbit.LinearConfig(bits=4, group_size=16), "table": lowbit.EmbeddingConfig(bits=3)}
    )


INDICES = torch.arange(6).view(2, 3)
OTHERS = (torch.arange(35).view(5, 7), torch.tensor([[49]]), INDICES)


def shapes() -> tuple:
    return ({0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", max=32)},)


@pytest.mark.parametrize("xnnpack", [True, False], ids=["xnnpack", "portable"])
def test_a_model_as_pte(executorch, tmp_path, small, xnnpack):
    path = tmp_path / "small.pte"
    lowbit.export_pte(small, (INDICES,), path, dynamic_shapes=shapes(), xnnpack=xnnpack)
    assert (b"XnnpackBackend" in path.read_bytes()) == xnnpack
    method = executorch.load_program(path).load_method("forward")
    for indices in OTHERS:
        (output,) = method.execute((indices,))
        with torch.no_grad():
            # Not ==: the float layers in between are another library's, and may round a value to the next int8.
            torch.testing.assert_close(output, small(indices), rtol=1e-2, atol=1e-2)


class Several(torch.nn.Module):
    """Nothing but lowbit's operators."""

    def __init__(self):
        super().__init__()
        weights = [random_packed(21, 80, bits, 32, mapping, bias=True) for bits in (1, 4, 5) for mapping in MAPPINGS]
        self.linears = torch.nn.ModuleList(map(lowbit.nn.Linear, weights))
        self.tables = torch.nn.ModuleList(
            lowbit.nn.Embedding(weight, dtype) for weight, dtype in zip(weights, DTYPES * len(MAPPINGS))
        )

    def forward(self, indices, *rows):
        results = [linear(x) for linear in self.linears for x in rows]
        return tuple(results + [table(indices) for table in self.tables])


@pytest.fixture(scope="module")
def pt2(tmp_path_factory, small):
    """One compilation for all tests: it takes long."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.several, self.small = Several(), small

        def forward(self, indices, *rows):
            return self.several(indices, *rows), self.small(indices.unsqueeze(0))

    model = Both().eval()
    m = torch.export.Dim("m", max=32)
    path = tmp_path_factory.mktemp("pt2") / "both.pt2"
    dynamic = {"indices": {0: m}, "rows": tuple({0: m} for _ in DTYPES)}
    lowbit.export_pt2(model, inputs(5), path, dynamic_shapes=dynamic)
    return model, path


def inputs(m: int) -> tuple:
    return torch.arange(m) * 13 % 21, *(random_rows(m, 80, seed=m).to(dtype) for dtype in DTYPES)


def test_a_model_as_pt2(pt2):
    model, path = pt2
    assert [entry.name for entry in path.parent.iterdir()] == ["both.pt2"]
    loaded = torch._inductor.aoti_load_package(path)
    for m in (1, 7, 32):
        outputs, small = loaded(*inputs(m))
        with torch.no_grad():
            expected, expected_small = model(*inputs(m))
        for output, value in zip(outputs, expected, strict=True):
            assert_same_bits(output, value)
        torch.testing.assert_close(small, expected_small, rtol=1e-2, atol=1e-2)


class Refuses(torch.nn.Module):
    def forward(self, x):
        raise NotImplementedError("cannot be exported")


@pytest.mark.parametrize("suffix", ["pte", "pt2"])
def test_a_failed_export_leaves_no_trace(request, tmp_path, suffix):
    if suffix == "pte":
        request.getfixturevalue("executorch")
    export = getattr(lowbit, "export_" + suffix)
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"an earlier export")
    with pytest.raises(Exception, match="cannot be exported"):
        export(Refuses(), (torch.zeros(2),), path)
    assert path.read_bytes() == b"an earlier export"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", ["pte", "pt2"])
def test_a_wrong_name_is_refused_at_once(request, tmp_path, small, suffix):
    if suffix == "pte":
        request.getfixturevalue("executorch")
    with pytest.raises(ValueError, match=rf"model\.bin'; expected a name that ends in \.{suffix}$"):
        getattr(lowbit, "export_" + suffix)(small, (INDICES,), tmp_path / "model.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_pte_is_replaced(executorch, tmp_path, small):
    path = tmp_path / "model.pte"
    path.write_bytes(b"an earlier export")
    lowbit.export_pte(small, (INDICES,), str(path))
    assert list(tmp_path.iterdir()) == [path]
    (output,) = executorch.load_program(path).load_method("forward").execute((INDICES,))
    assert output.shape == (2, 3, 48)
