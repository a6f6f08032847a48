"""lowbit and torch's linear layers. They share a process because they share torch's threads."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import lowbit
import numpy as np
import torch
from lowbit.machine.memory import in_huge_pages

from .contender import Absent, Contender, Problem, Runner, Spec

ARM = platform.machine() in ("aarch64", "arm64")


class TorchRunner(Runner):
    """Calls `call(x, weight)` once per matrix from Python, as a user's layer does."""

    def __init__(self, call: Callable, weights: list, size: int, x: torch.Tensor):
        self.call, self.weights, self.bytes, self.x = call, weights, size, x

    def one(self, m, threads):
        return self._run(self.weights[:1], m, threads)

    def all(self, m, threads):
        return self._run(self.weights[1:], m, threads)

    def _run(self, weights, m, threads) -> np.ndarray:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call, x = self.call, self.x[:m]
        with torch.inference_mode():
            for weight in weights:
                output = call(x, weight)
        return output.float().numpy()


def rounded(rows: np.ndarray, bits: int, group_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes (signed, int8 [rows, k]) and scales (float32 [rows, groups]); a group's largest magnitude gets the largest code."""
    groups = rows.reshape(len(rows), -1, group_size or rows.shape[1])
    scales = np.abs(groups).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
    codes = np.clip(np.rint(groups / scales), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.astype(np.int8).reshape(rows.shape), scales[:, :, 0]


def lowbit_contender(bits: int, group_size: int | None, dtype: torch.dtype) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        config = lowbit.LinearConfig(bits=bits, group_size=group_size)
        few = lowbit.unpack(lowbit.quantize_tensor(torch.from_numpy(problem.rows), config))
        packed = lowbit.pack(
            torch.from_numpy(problem.repeat(few.codes.numpy())),
            torch.from_numpy(problem.repeat(few.scales.numpy())),
            bits=bits,
            group_size=group_size,
        )
        weights = [in_huge_pages(packed.clone()) for _ in range(1 + copies(packed.numel()))]
        linear, n = torch.ops.lowbit.linear, problem.n
        x = torch.from_numpy(problem.x).to(dtype)
        return TorchRunner(lambda x, weight: linear(x, weight, n), weights, packed.numel(), x)

    name = f"lowbit {bits} bit{'s' * (bits > 1)} {f'g{group_size}' if group_size else 'per row'}"
    if dtype == torch.bfloat16:
        name += " bf16"
    return Contender(Spec(name, "lowbit", bits, group_size, f"{str(dtype)[6:]}, quantized to int8 per row"), make)


def float_contender(dtype: torch.dtype) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        weight = torch.from_numpy(problem.repeat(problem.rows)).to(dtype)
        size = weight.numel() * weight.element_size()
        weights = [weight] + [weight.clone() for _ in range(copies(size))]
        return TorchRunner(torch.nn.functional.linear, weights, size, torch.from_numpy(problem.x).to(dtype))

    name = str(dtype)[6:]
    return Contender(Spec(f"torch {name}", "torch", dtype.itemsize * 8, None, name), make)


def int8_contender(engine: str) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*deprecated")
        torch.backends.quantized.engine = engine
        codes, scales = rounded(problem.rows, 8, None)
        codes, scales = problem.repeat(codes), problem.repeat(scales)[:, 0]
        weight = torch._make_per_channel_quantized_tensor(
            torch.from_numpy(codes), torch.from_numpy(scales).double(), torch.zeros(problem.n, dtype=torch.int64), 0
        )
        size = codes.nbytes + scales.nbytes
        weights = [torch.ops.quantized.linear_prepack(weight, None) for _ in range(1 + copies(size))]
        linear = torch.ops.quantized.linear_dynamic
        return TorchRunner(lambda x, weight: linear(x, weight), weights, size, torch.from_numpy(problem.x))

    note = f"quantized::linear_dynamic, engine {engine}"
    return Contender(Spec("torch int8 dynamic", "torch", 8, None, "float32, quantized to int8 per tensor", note), make)


def int4_contender(group_size: int) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        codes, scales = rounded(problem.rows, 4, group_size)
        # A weight is (code - 8) * scale + zero.
        scales_and_zeros = np.stack([scales, np.zeros_like(scales)], axis=2)
        codes = torch.from_numpy(problem.repeat(codes).astype(np.int32) + 8)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.from_numpy(problem.repeat(scales_and_zeros)).transpose(0, 1).contiguous().to(torch.bfloat16)
        size = packed.numel() * packed.element_size() + scales.numel() * scales.element_size()
        weights = [(packed.clone(), scales.clone()) for _ in range(1 + copies(size))]
        linear = torch.ops.aten._weight_int4pack_mm_for_cpu
        return TorchRunner(
            lambda x, weight: linear(x, weight[0], group_size, weight[1]),
            weights,
            size,
            torch.from_numpy(problem.x).to(torch.bfloat16),
        )

    return Contender(
        Spec(f"torch int4 g{group_size}", "torch", 4, group_size, "bfloat16", "aten::_weight_int4pack_mm_for_cpu"), make
    )


def kleidi_contender(group_size: int) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        n, k = problem.n, problem.k
        codes, scales = rounded(problem.rows, 4, group_size)
        codes = problem.repeat((codes + 8).astype(np.uint8))
        nibbles = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        scales = torch.from_numpy(problem.repeat(scales)).to(torch.bfloat16)
        pack = torch.ops.aten._dyn_quant_pack_4bit_weight
        packed = pack(nibbles, scales, None, group_size, k, n)
        size = packed.numel() * packed.element_size()
        weights = [packed] + [packed.clone() for _ in range(copies(size))]
        linear = torch.ops.aten._dyn_quant_matmul_4bit
        return TorchRunner(lambda x, weight: linear(x, weight, group_size, k, n), weights, size, torch.from_numpy(problem.x))

    note = "aten::_dyn_quant_matmul_4bit (KleidiAI)"
    return Contender(
        Spec(f"torch KleidiAI 4 bits g{group_size}", "torch", 4, group_size, "float32, quantized to int8 per row", note), make
    )


def contenders() -> tuple[list[Contender], list[Absent], dict[str, str]]:
    found = [lowbit_contender(bits, group_size, torch.float32) for group_size in (128, 32) for bits in range(8, 0, -1)]
    found += [lowbit_contender(8, None, torch.float32), lowbit_contender(4, 128, torch.bfloat16)]
    found += [float_contender(torch.float32), float_contender(torch.bfloat16)]
    absent: list[Absent] = []
    versions = {"lowbit": lowbit.__version__, "torch": torch.__version__}

    engines = [
        engine for engine in ("onednn", "x86", "fbgemm", "qnnpack") if engine in torch.backends.quantized.supported_engines
    ]
    if engines:
        found.append(int8_contender(engines[0]))
    else:
        absent.append(Absent("torch int8 dynamic", "this torch has no engine for quantized operators"))

    found += [int4_contender(128), int4_contender(32)]

    if ARM:
        found += [kleidi_contender(128), kleidi_contender(32)]
    else:
        absent.append(Absent("torch KleidiAI 4 bits", "aten::_dyn_quant_matmul_4bit has kernels for Arm only"))

    try:
        logging.disable(logging.WARNING)  # about its GPU libraries
        import torchao  # noqa: F401  registers the operators

        versions["torchao"] = version("torchao")
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("torchao::da8w4_linear_cpu", "CPU")
        reason = (
            "this torchao has a CPU kernel for torchao::da8w4_linear_cpu, but no contender was written for it"
            if has_kernel
            else "the installed torchao has no CPU kernel for torchao::da8w4_linear_cpu"
        )
    except (PackageNotFoundError, ImportError, RuntimeError) as error:
        reason = f"torchao cannot be used: {type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    absent.append(Absent("torchao da8w4", reason))
    return found, absent, versions
