"""The package for Hugging Face's `kernels`: loaded without lowbit, equal bits, and what it depends on."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lowbit
import pytest
import torch
from needs import need_packages

need_packages("kernels", "kernel_abi_check")
if platform.system() != "Linux":
    pytest.skip("the package is for Linux", allow_module_level=True)

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import hub_kernel
from kernels._rust import Digest, DigestAlgorithm
from kernels.variants import get_variants_local, resolve_variants

from kernels import (
    LocalLayerRepository,
    Metadata,
    Mode,
    get_local_kernel,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)

# In a process that cannot import lowbit: layers put in place by kernelize, and all functions.
ALONE = """
import sys
sys.modules["lowbit"] = None
import pathlib, torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

path, given, result = map(pathlib.Path, sys.argv[1:])
weight, bias, gain, x = torch.load(given)
hub = get_local_kernel(path)
codes, scales, mins = hub.quantize(weight, bits=3, group_size=32, affine=True, search=False)
packed = [hub.pack_linear(weight, bias, bits=4, group_size=32), hub.pack(codes, scales, mins, bits=3, group_size=32)]

@use_kernel_forward_from_hub("Packed")
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.packed_weight, self.out_features = packed[0], len(weight)

    def forward(self, x):
        raise AssertionError("the forward function was not replaced")

model = torch.nn.Sequential(Layer())
with torch.inference_mode(), use_kernel_mapping({"Packed": {"cpu": LocalLayerRepository(path, layer_name="PackedLinear")}}):
    kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
    replaced = model(x)
rows = torch.arange(5)
torch.save([
    packed, hub.unpack(packed[1]), hub.linear(x, packed[1], len(weight)), hub.linears(x, packed, 2 * [len(weight)]),
    hub.embedding(rows, packed[0], weight.shape[1], torch.bfloat16), hub.rms_norm(x, gain, 1e-5), replaced, str(hub.ops.linear),
], result)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub")
    # A fixed name, with which ccache has compiled the operators before.
    command = [sys.executable, ROOT / "scripts" / "hub_kernel.py", "--output", path, "--name", "_lowbit_cpu_test"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def variant(hub):
    (found,) = (each for each in (hub / "build").iterdir() if each.is_dir())
    return found


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    return torch.randn(48, 96), torch.randn(48), torch.rand(96), torch.randn(2, 5, 96)


def expected(weight, bias, gain, x):
    """What the installed package gives."""
    four = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=4, group_size=32), bias)
    codes, scales, mins = torch.ops.lowbit.quantize(weight, 3, 32, True, False)
    three = lowbit.pack(codes, scales, mins, bits=3, group_size=32, mapping="affine")
    unpacked, normed = lowbit.unpack(three), lowbit.rms_norm(x, gain, epsilon=1e-5)
    return [
        [four, three], (unpacked.codes, unpacked.scales, unpacked.mins, torch.empty(0)), lowbit.linear(x, three, 48),
        lowbit.linears(x, [four, three], [48, 48]), lowbit.embedding(torch.arange(5), four, 96, dtype=torch.bfloat16), normed,
        lowbit.linear(x, four, 48),
    ]  # fmt: skip


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return len(one) == len(other) and all(map(equal, one, other))


def test_alone_it_gives_the_bits_of_the_package(hub, variant, tensors, tmp_path):
    torch.save(tensors, tmp_path / "given")
    command = [sys.executable, "-c", ALONE, hub, tmp_path / "given", tmp_path / "result"]
    # Otherwise `import torch` imports lowbit.
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *found, name = torch.load(tmp_path / "result")
    assert equal(found, expected(*tensors))
    assert name == f"{json.loads((variant / 'metadata.json').read_text())['id']}.linear"


def test_beside_the_package_and_a_copy(hub, tensors, tmp_path):
    """Each has its own operators; a copy of the same build uses those of the first."""
    shutil.copytree(hub, tmp_path / "copy")
    weight, bias, gain, x = tensors
    first, second = get_local_kernel(hub), get_local_kernel(tmp_path / "copy")
    assert first is not second and first.ops is second.ops and first.NAMESPACE != "lowbit"
    packed = first.pack_linear(weight, bias)
    assert equal(second.linear(x, packed, 48), lowbit.linear(x, packed, 48))
    assert equal(second.rms_norm(x, gain), lowbit.rms_norm(x, gain))
    # docs/hub.md: scales of GPTQ, which are stored exactly.
    codes, scales = torch.randint(0, 16, (48, 96), dtype=torch.uint8), torch.rand(3, 48).half()
    packed = first.pack(codes, scales.T.float(), None, bias, bits=4, group_size=32)
    assert equal(first.unpack(packed), (codes, scales.T.float(), torch.empty(0, 0), bias))
    with pytest.raises(ValueError, match=r"x has shape \[2, 5, 95\]; expected \[..., 96\]"):
        first.linear(x[..., 1:], packed, 48)


@pytest.mark.more
def test_layers_of_a_model_that_is_compiled(hub, tensors):
    """A norm of transformers and lowbit's own linear layer; also in bfloat16, with a weight in float32."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    weight, bias, gain, x = tensors
    packed = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=4, group_size=32), bias)
    norm, layer = (type(each.__name__, (each,), {}) for each in (modeling.LlamaRMSNorm, lowbit.nn.Linear))
    mapping = {name: {"cpu": LocalLayerRepository(hub, layer_name=name)} for name in ("RMSNorm", "PackedLinear")}
    for name, replaced in zip(mapping, (norm, layer), strict=True):
        replace_kernel_forward_from_hub(replaced, name)
    model = torch.nn.Sequential(norm(96, 1e-5), layer(packed))
    model[0].weight.data = gain
    with torch.inference_mode(), use_kernel_mapping(mapping):
        kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
        for given in (x, x.bfloat16()):
            expected = lowbit.linear(lowbit.rms_norm(given, gain.to(given.dtype), epsilon=1e-5), packed, 48)
            assert torch.equal(model(given), expected)
            assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(given), expected)


def test_what_the_loader_and_the_hub_read(hub, variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    written = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata.digest.validate(written)
    assert (str(metadata.name), metadata.version, metadata.license) == ("lowbit", 0, "BSD-3-Clause")
    assert set(written.files) == {
        "LICENSE", "__init__.py", "_ops.py", "layers.py", f"{metadata.id}.abi3.so",
    }  # fmt: skip
    assert re.fullmatch("_lowbit_cpu_[0-9a-f]{7}", hub_kernel.build_id())
    (accepted,), _ = resolve_variants(get_variants_local(hub / "build"))
    assert accepted.variant_str == variant.name
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    major, minor = map(int, hub_kernel.TORCH.split("."))
    assert f"TORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000" in cmake
    names = dir(get_local_kernel(hub))
    card = (hub / "build" / "CARD.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"`(\w+)`", card) if name not in {*names, "PackedLinear", "RMSNorm", "kernelize"}] == []


def test_problems_are_found(variant):
    """The package's own libraries are built for this system only, and the module for Python has more than the stable ABI."""
    (library,) = variant.glob("*.so")
    assert hub_kernel.problems(library) == []
    exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert exported == ""
    directory = Path(lowbit._C.__file__).parent
    assert "liblowbit.so" in hub_kernel.problems(directory / "lowbit_torch.so")
    found = " ".join(hub_kernel.problems(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    assert "NonAbi3Symbol" in found and "_ZN3c10" in found
