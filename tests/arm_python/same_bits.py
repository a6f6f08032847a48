"""Checks that the package gives the same bytes and bits on another processor.

    python same_bits.py write FILE                          on this machine: inputs and lowbit's results
    python same_bits.py check FILE --isa neon,neondot       there (emulated): computes them again, compares with ==

`make test-arm-python` does both. Compares only lowbit's operators and torch operators that do not round. The file contains the
random inputs, because torch's generators may differ between processors.
"""

import argparse
import copy
import ctypes
import os
import platform
import sys
from pathlib import Path

import lowbit
import torch

WIDTHS = range(1, 9)
MAPPINGS = ("symmetric", "affine")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = ("codes", "scales", "mins", "bias")
ROWS = (1, 7, 40)  # one row, not a multiple of a tile, and more than a chunk
# Odd sizes with a short last group, and per channel; "grouped" is large enough for two threads at 7 rows and at 40.
SHAPES = {"grouped": (150, 232, 48), "per channel": (37, 129, None)}


def random_inputs() -> dict:
    torch.manual_seed(0)
    inputs = {}
    for name, (n, k, _) in SHAPES.items():
        inputs[f"{name} weight"] = torch.randn(n, k)
        inputs[f"{name} bias"] = torch.randn(n)
        for m in ROWS:
            x = 3 * torch.randn(m, k)
            x[0] = x[0].abs()  # a range without a change of sign
            if m > 1:
                x[1, 5] = torch.inf
            inputs[f"{name} x {m}"] = x
        inputs[f"{name} indices"] = torch.randint(n, (3, 11))
    for name, tensor in make_model().state_dict().items():
        inputs[f"model {name}"] = tensor
    inputs["model tokens"] = torch.randint(100, (2, 9))
    return inputs


def make_model() -> torch.nn.Module:
    table, head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100, bias=False)
    head.weight = table.weight
    return torch.nn.Sequential(table, torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64), head).eval()


def compute(inputs: dict) -> dict:
    results = {}
    for name, (n, k, group_size) in SHAPES.items():
        for bits in WIDTHS:
            for mapping in MAPPINGS:
                for scale in ("absmax", "mse"):
                    config = lowbit.LinearConfig(bits, group_size, mapping, scale)
                    packed = lowbit.quantize_tensor(inputs[f"{name} weight"], config, bias=inputs[f"{name} bias"])
                    results[f"{name} {bits} {mapping} {scale} packed"] = packed
                # From here on, `packed` is that of "mse".
                for part, tensor in zip(PARTS, torch.ops.lowbit.unpack(packed), strict=True):
                    results[f"{name} {bits} {mapping} {part}"] = tensor
                for dtype in DTYPES:
                    for m in ROWS:
                        y = lowbit.linear(inputs[f"{name} x {m}"].to(dtype), packed, n)
                        results[f"{name} {bits} {mapping} linear {m} {dtype}"] = y
                    rows = lowbit.embedding(inputs[f"{name} indices"], packed, k, dtype=dtype)
                    results[f"{name} {bits} {mapping} embedding {dtype}"] = rows

    model = make_model()
    model.load_state_dict({name[6:]: inputs[name] for name in inputs if name.startswith("model ") and "." in name})
    lowbit.quantize_(
        model,
        {
            "*": lowbit.LinearConfig(3, 32, "affine"),
            "1": lowbit.LinearConfig(5, None, rotate=True),
            "0": lowbit.EmbeddingConfig(4, 16, rotate=True),
            "4": lowbit.LinearConfig(4, 16, rotate=True),
        },
    )
    for name, tensor in model.state_dict().items():
        results[f"model {name}"] = tensor
    results["model logits"] = model(inputs["model tokens"])
    return results


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return [f"{name}: {found.dtype} {list(found.shape)}; expected {expected.dtype} {list(expected.shape)}"]
    # Compare bytes, so that equal NaNs are equal and 0 differs from -0.
    different = found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    return [f"{name}: {int(different.sum())} of {different.numel()} bytes differ"] if different.any() else []


def check_results(expected: dict, inputs: dict, threads: int) -> list[str]:
    torch.set_num_threads(threads)
    found = compute(inputs)
    failures = [] if found.keys() == expected.keys() else [f"results differ: {found.keys() ^ expected.keys()}"]
    for name in found.keys() & expected.keys():
        failures += [f"{threads} threads, {line}" for line in compare(name, found[name], expected[name])]
    return failures


def check_state_dict(expected: dict, inputs: dict) -> list[str]:
    """A model of other widths loads the state dict from the other machine."""
    model = lowbit.quantize_(make_model(), {"*": lowbit.LinearConfig(8), "0": lowbit.EmbeddingConfig(8)})
    model.load_state_dict({name[6:]: tensor for name, tensor in expected.items() if name.endswith(".packed_weight")})
    if model[0].packed_weight.data_ptr() != model[4].packed_weight.data_ptr():
        return ["the table and the head of a loaded model have a buffer each"]
    found = copy.deepcopy(model)(inputs["model tokens"])
    return compare("a loaded model's logits", found, expected["model logits"])


def check_errors(expected: dict) -> list[str]:
    packed = expected["grouped 4 affine mse packed"]
    n, k, _ = SHAPES["grouped"]
    altered = packed.clone()
    altered[1000] ^= 1
    calls = {
        "activations of a wrong size": (ValueError, lambda: lowbit.linear(torch.ones(2, k + 1), packed, n)),
        "bytes cut off": (ValueError, lambda: lowbit.linear(torch.ones(2, k), packed[:-64], n)),
        "one bit altered": (ValueError, lambda: lowbit.verify(altered)),
        "an index out of range": (IndexError, lambda: lowbit.embedding(torch.tensor([n]), packed, k)),
    }
    failures = []
    for name, (kind, call) in calls.items():
        try:
            call()
            failures.append(f"{name}: no error; expected {kind.__name__}")
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            if type(error) is not kind:
                failures.append(f"{name}: {type(error).__name__}: {error}; expected {kind.__name__}")
    return failures


def check_executorch() -> list[str]:
    """The ExecuTorch operators find their runtime. Its Python part needs a newer torch than is tested here."""
    try:
        ctypes.CDLL(str(Path(lowbit.__file__).parent / "lowbit_executorch.so"), mode=os.RTLD_NOW)
    except OSError as error:
        return [f"the ExecuTorch operators do not load: {error}"]
    return []


def describe_kernels() -> str:
    active = [kernel for kernel in lowbit.kernels() if kernel["active"]]
    lines = [f"torch {torch.__version__} on {platform.machine()}, ISA {lowbit.isa()['active']}"]
    for family in ("linear", "embedding", "quantize"):
        names = [kernel["name"] for kernel in active if kernel["family"] == family]
        lines.append(f"  {family}: {' '.join(names)}")
    return "\n".join(lines)


# Instruction sets that only vendors' kernels use.
WITHOUT_KERNELS = ("bf16", "sve2")


def check_isa(expected: list[str]) -> list[str]:
    failures = []
    last = [isa for isa in expected if isa not in WITHOUT_KERNELS][-1]
    if lowbit.isa()["active"] != expected:
        failures.append(f"active ISA: {lowbit.isa()['active']}; expected {expected}")
    best = {
        kernel["bits"]
        for kernel in lowbit.kernels()
        if kernel["active"] and kernel["family"] == "linear" and kernel["isa"] == last
    }
    if best != set(WIDTHS):
        failures.append(f"widths with an active linear kernel for {last}: {sorted(best)}; expected 1 to 8")
    return failures


def check_threads(inputs: dict, packed: torch.Tensor) -> list[str]:
    """A second thread starts for a call of this size. Must be the first parallel work of the process."""
    torch.set_num_threads(2)
    before = len(os.listdir("/proc/self/task"))
    lowbit.linear(inputs["grouped x 40"], packed, SHAPES["grouped"][0])
    after = len(os.listdir("/proc/self/task"))
    return [] if after > before else [f"{after} threads after a call with two, {before} before; expected more"]


MODEL = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"


def write_plan(directory: Path) -> int:
    """Packs a language model, writes its plan, and returns the certificate of its logits."""
    import shutil

    import lowbit.llm
    from lowbit.llm.loading import load_model

    shutil.rmtree(directory, ignore_errors=True)
    lowbit.quantize_checkpoint(MODEL, directory, lowbit.LowBitConfig(bits=3, mapping="affine", activation_bits=16))
    lowbit.llm.export_decoder(lowbit.llm.Decoder(load_model(directory), 64), directory / "lowbit.plan")
    return certificate(directory, 1)


def certificate(directory: Path, threads: int) -> int:
    return lowbit._C.PlanModel(str(directory / "lowbit.plan"), threads).certify()


def check_plan(directory: Path, expected: int) -> list[str]:
    """The logits of a whole model, by its plan."""
    found = {threads: certificate(directory, threads) for threads in (1, 2)}
    return [
        f"certificate of a model with {t} threads: {each:x}; expected {expected:x}"
        for t, each in found.items()
        if each != expected
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("write", "check"))
    parser.add_argument("file")
    parser.add_argument("--isa", help="check: what lowbit.isa() must say is active beside portable, comma-separated")
    arguments = parser.parse_args()
    print(describe_kernels())
    if arguments.role == "write":
        inputs, plan = random_inputs(), write_plan(Path(f"{arguments.file}.model"))
        saved = {"inputs": inputs, "results": compute(inputs), "plan": plan, "machine": platform.machine()}
        torch.save(saved, arguments.file)
        return

    saved = torch.load(arguments.file, weights_only=True)
    inputs, expected = saved["inputs"], saved["results"]
    failures = check_isa(["portable", *arguments.isa.split(",")])
    failures += check_threads(inputs, expected["grouped 4 affine mse packed"])
    failures += check_results(expected, inputs, threads=2) + check_results(expected, inputs, threads=1)
    failures += check_state_dict(expected, inputs) + check_errors(expected) + check_executorch()
    failures += check_plan(Path(f"{arguments.file}.model"), saved["plan"])
    if failures:
        sys.exit("\n".join(failures))
    print(
        f"  {len(expected)} results and the logits of a language model have the bits that they have on {saved['machine']}, "
        "with 1 and 2 threads"
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
