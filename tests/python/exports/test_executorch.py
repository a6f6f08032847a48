"""The operators in ExecuTorch: registration, threads, and failed calls instead of crashes on bad input."""

import json
import re
import sys

import lowbit
import pytest
import torch
from models import GROUP, MAGIC, Every, K, check_every, inputs
from reference import HEADER_BYTES, assert_same_bits, random_packed, random_rows

# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.first,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
    ),
]


def test_static_shapes_bit_for_bit(executorch, tmp_path):
    """With several rows; test_cpp_runners.py also tests one row, with dynamic shapes."""
    m = 7
    every = Every().eval()
    lowbit.export_pte(every, inputs(m), tmp_path / "every.pte")
    method = executorch.load_program(tmp_path / "every.pte").load_method("forward")
    check_every(method.execute(inputs(m)), every, inputs(m))


class Flat(torch.nn.Module):
    """Leading dimensions: embedding of [b, t] and linear of [b, t, k]."""

    def __init__(self, n: int, k: int, bits: int = 4):
        super().__init__()
        self.table = lowbit.nn.Embedding(random_packed(n, k, bits, 64, "affine"))
        self.linear = lowbit.nn.Linear(random_packed(n, k, bits, 64, "symmetric", bias=True))

    def forward(self, indices):
        return self.linear(self.table(indices))


@pytest.fixture(scope="module")
def flat(executorch, tmp_path_factory):
    """A model with [b, t] indices, b <= 2 and t <= 40, as a module and as a file."""
    model = Flat(520, 256).eval()
    path = tmp_path_factory.mktemp("flat") / "flat.pte"
    shapes = ({0: torch.export.Dim("b", max=2), 1: torch.export.Dim("t", max=40)},)
    lowbit.export_pte(model, (torch.zeros(2, 3, dtype=torch.int64),), path, dynamic_shapes=shapes)
    return model, path


def indices_of(b: int, t: int) -> torch.Tensor:
    return torch.arange(b * t).view(b, t) * 37 % 520


def test_any_number_of_threads(executorch, flat):
    from executorch.extension.pybindings import portable_lib

    model, path = flat
    method = executorch.load_program(path).load_method("forward")
    before = portable_lib._threadpool_get_thread_count()
    try:
        for threads in (1, 2, 3, 5):
            portable_lib._unsafe_reset_threadpool(threads)
            assert portable_lib._threadpool_get_thread_count() == threads
            for b, t in ((1, 1), (2, 7), (1, 40)):
                (output,) = method.execute((indices_of(b, t),))
                assert_same_bits(output, model(indices_of(b, t)))
    finally:
        portable_lib._unsafe_reset_threadpool(before)


def test_an_index_out_of_range_fails_the_call(executorch, flat, capfd):
    model, path = flat
    method = executorch.load_program(path).load_method("forward")
    for index in (520, -1, 2**62):
        with pytest.raises(RuntimeError, match="0x12"):  # InvalidArgument
            method.execute((torch.tensor([[3, index]]),))
        assert f"lowbit::embedding.out: index {index} (number 1 of 2) is out of range; expected 0 to 519" in (
            capfd.readouterr().err
        )
    (output,) = method.execute((indices_of(1, 2),))
    assert_same_bits(output, model(indices_of(1, 2)))


def test_a_wrong_input_fails_the_call(executorch, flat):
    model, path = flat
    method = executorch.load_program(path).load_method("forward")
    # Too large for the planned memory, wrong rank, wrong dtype.
    for wrong in (indices_of(3, 40), indices_of(1, 4)[0], indices_of(1, 4).float()):
        with pytest.raises(RuntimeError):
            method.execute((wrong,))
    (output,) = method.execute((indices_of(2, 40),))
    assert_same_bits(output, model(indices_of(2, 40)))


class One(torch.nn.Module):
    def __init__(self, linear: bool, packed: torch.Tensor):
        super().__init__()
        self.layer = lowbit.nn.Linear(packed) if linear else lowbit.nn.Embedding(packed)

    def forward(self, x):
        return self.layer(x)


class OneAttention(torch.nn.Module):
    """Two heads; queries, keys and values are all x [1, 2, 3, 16]."""

    def __init__(self):
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, 16, 16))
        self.register_buffer("start", torch.tensor([1]))

    def forward(self, x):
        return lowbit.attention(x, x, x, self.k_cache, self.v_cache, self.start)


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "embedding"])
def test_altered_packed_bytes_fail_the_call(executorch, tmp_path, capfd, linear):
    packed = random_packed(20, 80, 3, 32, "affine", bias=True)
    model = One(linear, packed)
    x = random_rows(2, 80) if linear else torch.tensor([4, 19])
    lowbit.export_pte(model, (x,), tmp_path / "one.pte")
    data = (tmp_path / "one.pte").read_bytes()
    at = data.find(bytes(packed.tolist()))
    assert data.count(MAGIC) == 1 and at == data.find(MAGIC)

    def run(changed: bytes):
        return executorch.load_program(changed).load_method("forward").execute((x,))

    (output,) = run(data)
    assert_same_bits(output, model(x))
    name = "lowbit::linear.out: " if linear else "lowbit::embedding.out: "
    for offset in range(HEADER_BYTES):
        for flip in (0x01, 0xFF):
            changed = bytearray(data)
            changed[at + offset] ^= flip
            with pytest.raises(RuntimeError):
                run(bytes(changed))
            assert name in capfd.readouterr().err, f"byte {offset} of the header"

    # A valid weight of the same size, but not of the program's shape.
    other = random_packed(18, 80, 3, 32, "affine", bias=True)
    assert other.numel() == packed.numel()
    changed = data[:at] + bytes(other.tolist()) + data[at + other.numel() :]
    with pytest.raises(RuntimeError, match="0x12"):
        run(changed)
    expected = "out_features is 20; expected 18" if linear else "index 19 (number 1 of 2) is out of range"
    assert name + expected in capfd.readouterr().err

    # Any codes and scales are valid, and so is the end of the file.
    for offset in range(HEADER_BYTES, packed.numel(), 7):
        changed = bytearray(data)
        changed[at + offset] ^= 0xFF
        assert run(bytes(changed))[0].shape == output.shape
    with pytest.raises(RuntimeError):
        run(data[: at + packed.numel() // 2])


# Calls that no export writes: values of the wrong kind, too few values, memory used twice.
WRONG_CALLS = {
    "linear": {
        "too few": ("call.args = call.args[:3]", "the call has 3 values; expected 4"),
        "none at all": ("call.args = []", "the call has 0 values; expected 4"),
        "x is an int": ("change(0, schema.Int(3))", "argument x is of kind Int; expected Tensor"),
        "weight is none": ("change(1, schema.Null())", "argument packed_weight is of kind None; expected Tensor"),
        "size is none": ("change(2, schema.Null())", "argument out_features is of kind None; expected Int"),
        "size is a float": ("change(2, schema.Double(20.0))", "argument out_features is of kind Double; expected Int"),
        "size is a tensor": ("call.args[2] = call.args[0]", "argument out_features is of kind Tensor; expected Int"),
        "size is a list": ("change(2, schema.BoolList([True]))", "argument out_features is of kind ListBool; expected"),
        "out is a string": ("change(3, schema.String('y'))", "argument out is of kind String; expected Tensor"),
        "out is x": ("call.args[3] = call.args[0]", "out has shape [2, 80]; expected [2, 20]"),
        "out lies over x": ("move(3, 0)", "out and x share memory"),
        "out is the weight": ("call.args[3] = call.args[1]", "out has dtype uint8; expected float32"),
    },
    "embedding": {
        "too few": ("call.args = call.args[:4]", "the call has 4 values; expected 5"),
        "indices are a bool": ("change(0, schema.Bool(True))", "argument indices is of kind Bool; expected Tensor"),
        "dtype is a float": ("change(3, schema.Double(6.0))", "argument dtype is of kind Double; expected Int"),
        "out is an int": ("change(4, schema.Int(0))", "argument out is of kind Int; expected Tensor"),
        "indices lie over out": ("move(0, 4)", "out and indices share memory"),
    },
    "attention": {
        "too few": ("call.args = call.args[:7]", "the call has 7 values; expected 11"),
        "q is an int": ("change(0, schema.Int(3))", "argument q is of kind Int; expected Tensor"),
        "k is none": ("change(1, schema.Null())", "argument k is of kind None; expected Tensor"),
        "cache is a list": ("change(3, schema.BoolList([True]))", "argument k_cache is of kind ListBool; expected"),
        "start is an int": ("change(5, schema.Int(0))", "argument start is of kind Int; expected Tensor"),
        "start is q": ("call.args[5] = call.args[0]", "start has dtype float32 and shape [1, 2, 3, 16]"),
        "scale is an int": ("change(6, schema.Int(1))", "argument scale is of kind Int; expected Double"),
        "window is a float": ("change(7, schema.Double(2.0))", "argument window is of kind Double; expected Int"),
        "window is negative": ("change(7, schema.Int(-2))", "window is -2; expected 1 or more, or 0 for none"),
        "softcap is an int": ("change(8, schema.Int(1))", "argument softcap is of kind Int; expected Double"),
        "sinks is an int": ("change(9, schema.Int(1))", "argument sinks is of kind Int; expected Tensor"),
        "sinks is q": ("call.args[9] = call.args[0]", "sinks has dtype float32 and shape [1, 2, 3, 16]; expected"),
        "out is none": ("change(10, schema.Null())", "argument out is of kind None; expected Tensor"),
        "out is q": ("call.args[10] = call.args[0]", "out has shape [1, 2, 3, 16]; expected [1, 3, 2, 16]"),
        "cache is q": ("call.args[3] = call.args[0]", "k_cache has shape [1, 2, 3, 16]; expected"),
        "q lies over a cache": ("move(0, 3)", "k_cache and q share memory"),
        "one cache": ("call.args[4] = call.args[3]", "k_cache and v_cache share memory"),
        "caches overlap": ("move(4, 3)", "k_cache and v_cache share memory"),
        "out lies over a cache": ("move(10, 4)", "out and v_cache share memory"),
        "start beyond the cache": ("plan.values[call.args[5]].val.sizes = [0]", "start has dtype int64 and shape [0]"),
    },
}

WRONG_CALL_SCRIPT = """
import copy, json, os, sys
import torch  # which registers the operators
from executorch.exir import schema
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.runtime import Runtime

os.dup2(1, 2)  # the runtime's log among the results
for family, codes in json.loads(sys.argv[2]).items():
    x = torch.load(f"{sys.argv[1]}/{family}.pt")
    with open(f"{sys.argv[1]}/{family}.pte", "rb") as file:
        whole = deserialize_pte_binary(file.read())
    for name, code in {"as it was": "", **codes}.items():
        program = copy.deepcopy(whole)
        plan = program.program.execution_plan[0]
        (instruction,) = plan.chains[0].instructions
        call = instruction.instr_args

        def change(argument, value):
            # A new value: the program's input and output stay what they are.
            plan.values.append(schema.EValue(value))
            call.args[argument] = len(plan.values) - 1

        def move(argument, over):
            tensor = copy.deepcopy(plan.values[call.args[argument]].val)
            tensor.allocation_info = plan.values[call.args[over]].val.allocation_info
            change(argument, tensor)

        exec(code)
        print("==", f"{family}: {name}", flush=True)
        data = bytes(serialize_pte_binary(program))
        loaded = Runtime.get().load_program(data)  # its methods read the bytes, and refer neither to them nor to it
        try:
            result, = loaded.load_method("forward").execute((x,))
            print("returned", tuple(result.shape), flush=True)
        except RuntimeError as error:
            print("refused", error, flush=True)
"""


@pytest.mark.more
def test_wrong_calls_in_a_program_fail(executorch, run_python, tmp_path):
    expected = {}
    for family in WRONG_CALLS:
        if family == "attention":
            model, x = OneAttention(), random_rows(1, 2, 3, 16)
        else:
            model = One(family == "linear", random_packed(20, K, 3, GROUP, "affine", bias=True))
            x = random_rows(2, K) if family == "linear" else torch.tensor([4, 19])
        lowbit.export_pte(model, (x,), tmp_path / f"{family}.pte")
        torch.save(x, tmp_path / f"{family}.pt")
        expected[family] = f"returned {tuple(model(x).shape)}"
    codes = {family: {name: code for name, (code, _) in cases.items()} for family, cases in WRONG_CALLS.items()}
    process = run_python(WRONG_CALL_SCRIPT, tmp_path, json.dumps(codes))
    assert process.returncode == 0, process.stdout + process.stderr
    found = dict(part.split("\n", 1) for part in process.stdout.split("== ")[1:])
    assert len(found) == sum(len(cases) + 1 for cases in WRONG_CALLS.values())
    for family, cases in WRONG_CALLS.items():
        assert expected[family] in found[f"{family}: as it was"]
        for name, (_, message) in cases.items():
            log = found[f"{family}: {name}"]
            assert f"lowbit::{family}.out: {message}" in log and "\nrefused " in log, f"{family}, {name}: {log}"


def test_one_core_for_both_frameworks(executorch):
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc/self/maps")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "liblowbit" in line or "libexecutorch.so" in line}
    assert len([path for path in paths if "liblowbit" in path]) == 1
    assert len([path for path in paths if "libexecutorch.so" in path]) == 1


def run_script(run_python, script: str, *arguments) -> str:
    process = run_python(script, *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


@pytest.mark.more
def test_without_register_the_operators_are_missing(run_python, flat, monkeypatch):
    monkeypatch.setenv("LOWBIT_AUTOLOAD", "0")
    output = run_script(
        run_python,
        """
import sys
import lowbit
from executorch.runtime import Runtime
program = Runtime.get().load_program(sys.argv[1])
try:
    program.load_method("forward")
except RuntimeError as error:
    print("refused:", error)
""",
        flat[1],
    )
    assert re.search("^refused: .*0x:?14", output, re.M)  # OperatorMissing
    assert re.search(r"Missing operator: \[\d\] lowbit::(linear|embedding)\.out", output)


def test_register_is_harmless_again(executorch):
    lowbit.executorch.register()
    lowbit.executorch.register()


@pytest.mark.more
def test_register_in_a_new_process(executorch, run_python):
    """One process for all tests that need unregistered operators, because importing ExecuTorch takes seconds."""
    output = run_script(
        run_python,
        """
import ctypes, importlib, pathlib, sys, tempfile, types
import lowbit, lowbit.executorch
assert not any(name.split(".")[0] == "executorch" for name in sys.modules), "importing lowbit imports executorch"

def message():
    try:
        lowbit.executorch.register()
    except ImportError as error:
        return str(error)
    return "nothing was raised"

path, version = lowbit._C.__file__, lowbit._C.executorch_version
with tempfile.TemporaryDirectory() as directory:
    lowbit.executorch._C = types.SimpleNamespace(__file__=path, executorch_version="")
    print("built without:", message())
    lowbit.executorch._C = types.SimpleNamespace(__file__=path, executorch_version="1.4.0")
    print("other version:", message())
    lowbit.executorch._C = types.SimpleNamespace(__file__=directory + "/_C.so", executorch_version=version)
    print("deleted:", message())
    pathlib.Path(directory, "lowbit_executorch.so").write_bytes(b"not a library")
    print("broken:", message())

# Someone else loads the library.
ctypes.CDLL(str(pathlib.Path(path).parent / "lowbit_executorch.so"))
print("by others:", message())
importlib.reload(lowbit.executorch)
print("again:", message())

for name in [name for name in sys.modules if name.split(".")[0] == "executorch"]:
    del sys.modules[name]
sys.modules["executorch"] = None
print("uninstalled:", message())
try:
    lowbit.export_pte(None, (), "x.pte")
except ImportError as error:
    print("export:", error)
lowbit._C.executorch_version = ""
importlib.reload(lowbit.executorch)
try:
    lowbit.export_pte(None, (), "x.pte")
except ImportError as error:
    print("export of a build without:", error)
""",
    )
    lines = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
    remedy = "`pip install executorch==1.5.1`"
    for case in ("built without", "deleted"):
        assert lines[case].startswith("lowbit was built without executorch: ") and remedy in lines[case]
    assert lines["other version"].startswith("lowbit was built with executorch 1.4.0; found 1.")
    assert lines["broken"].startswith("lowbit's ExecuTorch library does not load: ")
    assert lines["by others"] == lines["again"] == "nothing was raised"
    assert lines["uninstalled"].startswith("executorch is not installed, or does not load: ")
    assert remedy in lines["uninstalled"] and remedy in lines["export"]
    assert lines["export of a build without"].endswith(f"{remedy}, then build lowbit again with `pip install .`.")
