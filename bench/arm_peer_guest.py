"""The program that arm_peer.py runs in an emulated Arm Python: arm_peer_guest.py MARKERS OPERATORS

Executes an empty pair of markers, and then one call of each operator between markers. Prints a line for each call:
library, task, 128-weight units.
"""

import ctypes
import sys
from collections.abc import Callable

import torch

N = K = 1024


def count(line: str | None, call: Callable, *arguments) -> None:
    for _ in range(3):
        call(*arguments)  # not counted: work of the first call alone
    markers.start()
    call(*arguments)
    markers.stop()
    if line:
        print(line)


markers = ctypes.CDLL(sys.argv[1])
torch.ops.load_library(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
count(None, lambda: None)
codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
pairs = codes[:, 1::2] << 4 | codes[:, ::2]
with torch.inference_mode():
    for m in (1, 16):
        x = torch.randn(m, K)
        for group_size in (32, 128, K):
            scales = torch.full((N, K // group_size), 0.01)
            task = f"{'per channel' if group_size == K else f'g{group_size}'} m{m}\t{m * N * K // 128}"
            packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
                pairs, scales if group_size == K else scales.bfloat16(), None, group_size, K, N
            )
            theirs = torch.ops.aten._dyn_quant_matmul_4bit, x, packed, group_size, K, N
            packed = torch.ops.lowbit.pack(codes, scales, None, None, 4, 0 if group_size == K else group_size)
            ours = torch.ops.lowbit.linear, x, packed, N
            expected = x @ ((codes.float() - 8) * 0.01).t()
            for library, (call, *arguments) in {"KleidiAI": theirs, "lowbit": ours}.items():
                error = ((call(*arguments) - expected).norm() / expected.norm()).item()
                if not error < 0.02:
                    sys.exit(f"{library}, {task}: relative error {error}")
                count(f"{library}\t{task}", call, *arguments)
