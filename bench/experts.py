"""Compares `lowbit.linear_experts` with a loop of `lowbit.linear` over the experts and with torch's grouped matmul.

    python bench/experts.py [--rounds N]

Prints a table of medians of the ratios of runs that took turns. Also compares the results.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import lowbit
import torch
from lowbit.machine.facts import cpu_name

# Experts, experts per row, outputs and inputs of an expert.
SHAPES = {
    "Mixtral 8x7B, gate and up, a quarter of the outputs": (8, 2, 7168, 4096),
    "OLMoE 1B-7B, gate and up": (64, 8, 2048, 2048),
}
ROWS, THREADS, BITS = (1, 16, 256), (1, 2), 4
SECONDS = 0.05  # of one measurement


def seconds(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


class Case:
    """Weights of one shape; all experts are equal, each in its own memory."""

    def __init__(self, experts: int, each: int, outputs: int, inputs: int):
        self.each, self.outputs, self.inputs = each, outputs, inputs
        matrix = torch.randn(outputs, inputs)
        one = lowbit.quantize_tensor(matrix, lowbit.LinearConfig(bits=BITS, scale="absmax"))
        self.packed = one.expand(experts, -1).contiguous()
        self.floats = matrix.bfloat16().T.expand(experts, -1, -1).contiguous()

    def measure(self, rows: int, rounds: int) -> tuple[float, float, float]:
        """Time of one call: relative to the loop, relative to torch's grouped matmul, and in seconds."""
        x = torch.randn(rows, self.inputs, dtype=torch.bfloat16)
        index = torch.rand(rows, len(self.packed)).topk(self.each).indices

        def together() -> torch.Tensor:
            return lowbit.linear_experts(x, self.packed, index, self.outputs)

        def loop() -> torch.Tensor:
            out = x.new_empty(*index.shape, self.outputs)
            for expert in index.unique().tolist():
                row, slot = torch.where(index == expert)
                out[row, slot] = lowbit.linear(x[row], self.packed[expert], self.outputs)
            return out

        # As in transformers' grouped_mm, but without sorting: contiguous rows, and the end of each expert's rows.
        order = index.flatten().argsort(stable=True)
        sorted_x = x[order // self.each]
        ends = torch.bincount(index.flatten(), minlength=len(self.packed)).cumsum(0).int()

        def grouped() -> torch.Tensor:
            return torch.nn.functional.grouped_mm(sorted_x, self.floats, offs=ends)

        result = together()
        assert torch.equal(result, loop())
        expected = grouped().float()
        difference = result.flatten(0, 1)[order].float() - expected
        assert difference.std() < 0.2 * expected.std()  # 4 bits
        counts = {call: max(1, int(SECONDS / seconds(call, 1))) for call in (together, loop, grouped)}
        times = [tuple(seconds(call, count) for call, count in counts.items()) for _ in range(rounds)]
        return tuple(map(statistics.median, zip(*((own / looped, own / floats, own) for own, looped, floats in times))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"{cpu_name()}, torch {torch.__version__}, {BITS} bits, bfloat16 rows; in turns\n")
    print("| experts | rows | threads | time / loop | time / grouped_mm, bfloat16 | time |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            case = Case(*shape)
            for rows in ROWS:
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    over_loop, over_floats, own = case.measure(rows, rounds)
                    print(
                        f"| {name} | {rows} | {threads} | {over_loop:.2f} | {over_floats:.2f} | {own * 1e3:.2f} ms |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
