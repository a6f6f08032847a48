"""`lowbit import` of the layouts of bitsandbytes: NF4, and LLM.int8()."""

import json
import math

import lowbit
import pytest
import torch
from test_importing_directory import GROUP, check, checkpoint

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(tmp_path, nested):
    generator, block = torch.Generator().manual_seed(0), GROUP

    def make(n: int, k: int):
        codes = torch.randint(0, 16, (n, k), generator=generator)
        absmax = torch.rand((n * k // block,), generator=generator) + 0.1
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": [n, k]}
        packed = {"weight.absmax": absmax, "weight.quant_map": torch.tensor(NF4)}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.3}
            indices = torch.randint(0, 256, absmax.shape, generator=generator)
            largest = torch.rand((math.ceil(len(absmax) / 256),), generator=generator)
            values = torch.linspace(-1, 1, 256)
            absmax = values[indices] * largest.repeat_interleave(256)[: len(absmax)] + 0.3
            packed |= {
                "weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": largest,
                "weight.nested_quant_map": values,
            }  # fmt: skip
        packed["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        packed["weight"] = (codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8).reshape(-1, 1)
        weight = torch.tensor(NF4)[codes] * absmax.view(n, k // block).repeat_interleave(block, 1)
        return weight, packed

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = checkpoint(tmp_path / "in", settings, make)
    summary = check(tmp_path, model, "rounded")
    assert max(tensor.steps for tensor in summary.tensors) < 0.06
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {"bitsandbytes nf4"}


@pytest.mark.parametrize(("block", "exact"), [(2 * GROUP, True), (3 * GROUP, True), (40, False)])
def test_bitsandbytes_blocks_across_rows(tmp_path, block, exact):
    """Blocks that no row consists of: smaller groups where they have a multiple of 16 inputs, otherwise requantized."""
    generator = torch.Generator().manual_seed(0)

    def make(n: int, k: int):
        codes = torch.randint(0, 16, (n, k), generator=generator)
        absmax = torch.rand((math.ceil(n * k / block),), generator=generator) + 0.1
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": [n, k]}
        weight = torch.tensor(NF4)[codes] * absmax.repeat_interleave(block)[: n * k].view(n, k)
        return weight, {
            "weight": (codes.view(-1)[0::2] << 4 | codes.view(-1)[1::2]).to(torch.uint8)[:, None], "weight.absmax": absmax,
            "weight.quant_map": torch.tensor(NF4),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }  # fmt: skip

    model = checkpoint(tmp_path / "in", {"quant_method": "bitsandbytes", "load_in_4bit": True}, make)
    check(tmp_path, model, "rounded" if exact else "requantized")


def test_bitsandbytes_int8(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def make(n: int, k: int):
        codes = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
        largest = torch.rand(n, generator=generator) + 0.1
        return codes * (largest[:, None] / 127), {
            "weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)
        }  # fmt: skip

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    summary = check(tmp_path, checkpoint(tmp_path / "in", settings, make), "exact")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {"bitsandbytes int8"}
    columns = lambda: {"weight_format": torch.tensor(2, dtype=torch.uint8)}  # noqa: E731
    checkpoint(tmp_path / "other", settings, lambda n, k: (torch.zeros(n, k), make(n, k)[1] | columns()))
    with pytest.raises(ValueError, match="has weight_format 2; expected 0, codes in rows"):
        lowbit.import_checkpoint(tmp_path / "other", tmp_path / "out2")
