"""lowbit.export_pte and lowbit.export_pt2: whole models, and the written files."""

import struct
import sys
import zipfile

import lowbit
import pytest
import torch
from lowbit.files.elf import without_executable_stack
from models import Small

# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.first,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
    ),
]


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
    path.write_bytes(b"an earlier export")
    lowbit.export_pte(small, (INDICES,), str(path), dynamic_shapes=shapes(), xnnpack=xnnpack)
    assert list(tmp_path.iterdir()) == [path]
    assert (b"XnnpackBackend" in path.read_bytes()) == xnnpack
    method = executorch.load_program(path).load_method("forward")
    for indices in OTHERS:
        (output,) = method.execute((indices,))
        with torch.no_grad():
            # Not ==, because float layers in between are other libraries', and may round a value to the next int8.
            torch.testing.assert_close(output, small(indices), rtol=1e-2, atol=1e-2)


def stacks_of(package) -> dict[str, str | None]:
    """The stack flags of every file in a .pt2, as printed by readelf; None for files that are not ELF."""
    found = {}
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            found[name] = None
            if data.startswith(b"\x7fELF"):
                table, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
                entries = [struct.unpack_from("<II", data, table + size * i) for i in range(count)]
                (flags,) = (flags for kind, flags in entries if kind == 0x6474E551)
                found[name] = "".join(letter for letter, bit in (("R", 4), ("W", 2), ("E", 1)) if flags & bit)
    return found


def test_a_library_that_asks_for_an_executable_stack(tmp_path):
    header = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<Q", 64) + bytes(14) + struct.pack("<HH", 56, 3) + bytes(6)
    entries = [struct.pack("<II", kind, flags) + bytes(48) for kind, flags in ((1, 5), (1, 7), (0x6474E551, 7))]
    library = tmp_path / "a.so"
    library.write_bytes(header + b"".join(entries))
    for _ in range(2):
        without_executable_stack(library)
        assert library.read_bytes() == header + entries[0] + entries[1] + struct.pack("<II", 0x6474E551, 6) + bytes(48)
    for other in (b"", header[:63], header, b"!<arch>\n" + bytes(200)):
        library.write_bytes(other)
        without_executable_stack(library)
        assert library.read_bytes() == other


class Counts(torch.nn.Module):
    """Keeps a cache in a buffer, and counts its calls in an attribute."""

    def __init__(self, small: torch.nn.Module):
        super().__init__()
        self.small, self.calls = small, 0
        self.register_buffer("cache", torch.zeros(4, 48))

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.small(indices)
        self.cache.index_copy_(0, torch.tensor([1]), y[:1, 0])
        self.calls += 1
        return y, self.cache.clone()


@pytest.mark.more
def test_a_model_as_pt2(tmp_path, run_python, small):
    """With a cache that each call updates."""
    path = tmp_path / "small.pt2"
    model = Counts(small).eval()
    with pytest.warns(UserWarning, match="a call of the model changes calls: the exported program computes each call"):
        lowbit.export_pt2(model, (INDICES,), path, dynamic_shapes=shapes())
    assert list(tmp_path.iterdir()) == [path] and model.calls == 0 and not model._forward_hooks
    stacks = [stack for name, stack in stacks_of(path).items() if name.endswith(".so")]
    assert stacks == (["RW"] if sys.platform == "linux" else [None])  # glibc 2.41 refuses others
    loaded = torch._inductor.aoti_load_package(path)
    for indices in OTHERS:
        with torch.no_grad():
            for found, expected in zip(loaded(indices), model(indices), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    # A program that does not mention lowbit.
    script = "import sys, torch; run = torch._inductor.aoti_load_package(sys.argv[1]); torch.save("
    process = run_python(script + "run(torch.arange(6).view(2, 3))[0], sys.argv[2])", path, tmp_path / "output.pt")
    assert process.returncode == 0, process.stdout + process.stderr
    assert torch.equal(torch.load(tmp_path / "output.pt"), loaded(INDICES)[0])


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
    with pytest.raises(TypeError, match="^example_inputs is a Tensor; expected a tuple of a call's arguments$"):
        getattr(lowbit, "export_" + suffix)(small, INDICES, tmp_path / f"model.{suffix}")
    assert list(tmp_path.iterdir()) == []


class Changes(torch.nn.Module):
    """A packed layer, and a buffer that each call changes."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, torch.nn.Linear(64, 32)
        self.register_buffer("state", torch.ones(1 if "count" in kind else (4, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.kind == "counter":
            self.state.add_(1)
            return self.state.clone()
        if self.kind == "sum with a counter":
            self.state.add_(1)
            return y + self.state
        if self.kind == "average":
            self.state.mul_(0.9).add_(y, alpha=0.1)
            return self.state * 2
        self.state.index_copy_(0, torch.tensor([1]), y)
        return self.state.clone()


def changing(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return lowbit.quantize_(Changes(kind).eval(), lowbit.LinearConfig(bits=4)), torch.randn(1, 64)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["counter", "sum with a counter", "average", "cache"])
def test_buffers_that_a_pte_changes(executorch, tmp_path, kind):
    """They start as in the model. XNNPACK fails if a counter is an output."""
    model, x = changing(kind)
    if kind != "counter":
        lowbit.export_pte(model, (x,), tmp_path / "m.pte")
    else:
        with pytest.warns(
            UserWarning, match="XNNPACK does not run the operators that change state; all operators but lowbit's"
        ):
            lowbit.export_pte(model, (x,), tmp_path / "m.pte")
    assert torch.equal(model.state, changing(kind)[0].state)  # the export does not change the model
    method = executorch.load_program(tmp_path / "m.pte").load_method("forward")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(method.execute((x,))[0], model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.more
def test_a_counter_in_a_pt2_is_refused(tmp_path):
    model, x = changing("counter")
    with pytest.raises(ValueError, match="does not change state as the model does: .* an input and an output of the model"):
        lowbit.export_pt2(model, (x,), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


class Keeps(torch.nn.Module):
    """Keeps state in attributes. A value computed at the first call, objects and constants do not count as state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.inner.seen, self.inner.fixed = [], {"a": [1, 2.0, float("nan")]}
        self.largest, self.first, self.object = {"size": 0}, None, object()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.seen.append(x.shape[0])
        self.largest["size"] = max(self.largest["size"], 3)
        self.first, self.object = 1.0, object()
        return self.inner(x)


def test_state_in_attributes_is_named(executorch, tmp_path):
    model = Keeps()
    with pytest.warns(UserWarning, match=r"a call of the model changes largest, inner\.seen: the exported program"):
        lowbit.export_pte(model, (torch.zeros(2, 4),), tmp_path / "m.pte", xnnpack=False)
    assert executorch.load_program(tmp_path / "m.pte").load_method("forward").execute((torch.zeros(2, 4),))
