"""ExecuTorch programs with damaged calls of lowbit's operators: the call fails, or gives a result within bounds.

Half of the mutants have changed arguments: values of another kind, hostile numbers, tensors of other sizes, types and places,
lists of wrong lengths, altered packed weights. The others are files with changed bytes. Each runs in a separate process.
Crashes while ExecuTorch reads the file, or in ExecuTorch's checks around the call, are ExecuTorch's errors (SECURITY.md) and
are counted. Nothing else may end the process while the program, a single operator call, runs.

`make fuzz-pte` tries more: LOWBIT_FUZZ is the number, LOWBIT_FUZZ_SEED the first seed.
"""

import copy
import faulthandler
import os
import random
import re
import signal
import struct
import sys
import time
from collections import Counter

import lowbit
import pytest
import torch
from reference import HEADER_BYTES, random_packed, random_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:" + what)
    for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental")
]

MUTANTS = int(os.environ.get("LOWBIT_FUZZ", 8))
SEED = int(os.environ.get("LOWBIT_FUZZ_SEED", 1))
SECONDS = 600  # on a quiet machine a mutant takes less than one
NUMBERS = [0, 1, 2, 3, 15, 16, 17, 20, 32, 64, 80, 255, 2**15, 2**16, 2**31 - 1, -1, -2, -(2**31)]
ENDS = ("refused", "returned", "ended while reading", "ended by a check of ExecuTorch", "ended while running")
OURS = ("evalue.h", "executorch_ops.cpp")  # files whose checks run within our operators
INT64 = [*NUMBERS, 2**31, 2**32, 2**61 + 1, 2**62, 2**63 - 1, -(2**63)]


class Call(torch.nn.Module):
    """A single call of an operator."""

    def __init__(self, call, **buffers: torch.Tensor):
        super().__init__()
        self.call = call
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.call(self, x)


def calls() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    weight = random_packed(20, 80, 3, 32, "affine", bias=True)
    other = random_packed(12, 80, 4, 16, "symmetric", bias=False)
    experts = torch.stack([random_packed(20, 80, 4, 32, "symmetric", bias=False) for _ in range(3)])
    chosen = torch.tensor([[0, 2], [1, 1]])
    caches = {name: torch.zeros(1, 2, 16, 16) for name in ("k_cache", "v_cache")}
    ops = torch.ops.lowbit
    return {
        "linear": (Call(lambda m, x: ops.linear(x, m.w, 20), w=weight), random_rows(2, 80)),
        "linears": (Call(lambda m, x: ops.linears(x, [m.w, m.v], [20, 12]), w=weight, v=other), random_rows(2, 80)),
        "linear_experts": (
            Call(lambda m, x: ops.linear_experts(x, m.w, m.chosen, 20), w=experts, chosen=chosen),
            random_rows(2, 80),
        ),
        "embedding": (Call(lambda m, x: lowbit.embedding(x, m.w, 80), w=weight), torch.tensor([4, 19])),
        "attention": (
            Call(lambda m, x: lowbit.attention(x, x, x, m.k_cache, m.v_cache, m.start), **caches, start=torch.tensor([1])),
            random_rows(1, 2, 3, 16),
        ),
    }


def damage_call(program, choose: random.Random) -> None:
    """Changes the call in the file, in one to three places."""
    from executorch.exir import schema

    plan = program.program.execution_plan[0]
    arguments = plan.chains[0].instructions[0].instr_args.args
    for _ in range(choose.choice((1, 1, 2, 3))):
        if not arguments:
            return
        at = choose.randrange(len(arguments))
        value = plan.values[arguments[at]].val
        tensors = [i for i, each in enumerate(plan.values) if isinstance(each.val, schema.Tensor)]
        kind = choose.choice(("other", "new", "tensor", "tensor", "tensor", "number", "list", "fewer"))
        if kind == "other":
            arguments[at] = choose.randrange(len(plan.values))
        elif kind == "new":
            made = choose.choice([
                schema.Null(), schema.Int(choose.choice(INT64)), schema.Bool(True),
                schema.Double(choose.choice((0.0, -1e308, float("nan")))),
                schema.String("x"), schema.BoolList([True]), schema.DoubleList([1.0]),
                schema.IntList([choose.randrange(len(plan.values)) for _ in range(choose.randrange(5))]),
                schema.TensorList([choose.choice(tensors) for _ in range(choose.choice((0, 1, 2, 3, 17, 40)))]),
            ])  # fmt: skip
            plan.values.append(schema.EValue(made))
            arguments[at] = len(plan.values) - 1
        elif kind == "tensor" and isinstance(value, schema.Tensor):
            changed = copy.deepcopy(value)
            what = choose.choice(("sizes", "rank", "type", "place", "buffer", "dynamism"))
            if what == "sizes" and changed.sizes:
                changed.sizes[choose.randrange(len(changed.sizes))] = choose.choice(NUMBERS)
            elif what == "rank":
                changed.sizes = [choose.choice((1, 2, 16, 65536)) for _ in range(choose.randrange(17))]
                changed.dim_order = list(range(len(changed.sizes)))
            elif what == "type":
                changed.scalar_type = choose.choice(list(type(changed.scalar_type)))
            elif what == "place":
                changed.allocation_info = copy.deepcopy(plan.values[choose.choice(tensors)].val.allocation_info)
                if changed.allocation_info is not None:
                    changed.allocation_info.memory_offset_low += choose.choice((0, 0, 1, 4, 16, 64))
            elif what == "buffer":
                changed.data_buffer_idx = plan.values[choose.choice(tensors)].val.data_buffer_idx
            else:
                changed.shape_dynamism = choose.choice(list(type(changed.shape_dynamism)))
            if choose.random() < 0.5:
                plan.values[arguments[at]] = schema.EValue(changed)  # also used where the program reads or returns the value
            else:
                plan.values.append(schema.EValue(changed))
                arguments[at] = len(plan.values) - 1
        elif kind == "number":
            numbers = [i for i in arguments if isinstance(plan.values[i].val, schema.Int)]
            if numbers:
                plan.values[choose.choice(numbers)] = schema.EValue(schema.Int(choose.choice(INT64)))
        elif kind == "list" and isinstance(value, schema.IntList | schema.TensorList):
            kept = value.items[: choose.randrange(len(value.items) + 1)]
            value.items = kept + value.items[:1] * choose.choice((0, 1, 15, 16))
        elif kind == "fewer":
            del arguments[choose.randrange(len(arguments)) :]


def damage_weights(data: bytearray, choose: random.Random) -> None:
    """Changes packed weights in the file, mostly headers."""
    magic = b"\x89LOWBIT\n"
    starts = [at for at in range(len(data)) if data.startswith(magic, at)]
    for _ in range(choose.choice((0, 0, 1, 2))):
        if starts:
            at = choose.choice(starts) + choose.choice((choose.randrange(HEADER_BYTES), choose.randrange(600)))
            if at < len(data):
                data[at] = choose.randrange(256)


def damage_bytes(data: bytearray, choose: random.Random) -> None:
    """Changes bytes of the file: half of the time its last bytes, otherwise anywhere else."""
    for _ in range(choose.choice((1, 1, 2, 4))):
        at = choose.randrange(len(data))
        kind = choose.randrange(4)
        if kind == 0:
            data[at] ^= 1 << choose.randrange(8)
        elif kind == 1:
            data[at] = choose.randrange(256)
        elif kind == 2:
            at = min(at & ~3, len(data) - 4)
            data[at : at + 4] = struct.pack("<I", choose.choice(NUMBERS) & 0xFFFFFFFF)
        elif len(data) > 64:
            del data[choose.randrange(32, len(data)) :]
            return


def run(data: bytes, x: torch.Tensor) -> str:
    """Runs a program in a separate process; returns one of ENDS."""
    reading, writing = os.pipe()
    log = os.memfd_create("log")
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            faulthandler.disable()
            signal.alarm(SECONDS)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = sys.stderr = open(log, "w", buffering=1, encoding="utf-8")  # for the runtime's messages
            from executorch.runtime import Runtime

            try:
                method = Runtime.get().load_program(data).load_method("forward")
                os.write(writing, b"L")
                method.execute((x,))
                os.write(writing, b"R")
            except Exception:  # the runtime maps error codes to various exceptions
                os.write(writing, b"E")
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        stages = file.read()
    _, status = os.waitpid(child, 0)
    with open(log, "rb") as file:
        file.seek(0)
        said = file.read().decode(errors="replace")
    if stages.endswith(b"E"):
        return "refused"
    if stages.endswith(b"R"):
        return "returned"
    if not stages:
        return "ended while reading"
    # ExecuTorch's checks end a process by abort() and print the place. Only those of EValue are compiled into lowbit.
    checks = re.findall(r"^\[(\w+\.\w+):\d+\] In function .* assert failed", said, re.M)
    own = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT and checks and checks[-1] not in OURS
    return "ended by a check of ExecuTorch" if own else "ended while running"


@pytest.fixture(scope="module")
def programs(executorch, tmp_path_factory):
    """{operator: (a file with one call of it, its input)}"""
    found = {}
    for name, (model, x) in calls().items():
        path = tmp_path_factory.mktemp("fuzz") / f"{name}.pte"
        lowbit.export_pte(model.eval(), (x,), path)
        found[name] = (path.read_bytes(), x)
        assert run(*found[name]) == "returned", name
    return found


def mutants(programs, name: str, whole_file: bool):
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    data, x = programs[name]
    program = None if whole_file else deserialize_pte_binary(data)
    for number in range(MUTANTS):
        choose = random.Random(f"{SEED} {name} {number} {whole_file}")
        changed = bytearray(data)
        if not whole_file:
            other = copy.deepcopy(program)
            damage_call(other, choose)
            try:
                changed = bytearray(bytes(serialize_pte_binary(other)))
            except Exception:  # not representable in the format
                continue
            damage_weights(changed, choose)
        else:
            damage_bytes(changed, choose)
        yield number, bytes(changed), x


@pytest.mark.parametrize("whole_file", [False, True], ids=["call", "bytes"])
@pytest.mark.parametrize("name", ["linear", "linears", "linear_experts", "embedding", "attention"])
def test_mutants(programs, name, whole_file, tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("forks a process that has threads")
    ends, begin = Counter(), time.perf_counter()
    for number, data, x in mutants(programs, name, whole_file):
        end = run(data, x)
        ends[end] += 1
        if end == "ended while running":
            found = tmp_path / f"{name}-{SEED}-{number}.pte"
            found.write_bytes(data)
            pytest.fail(f"seed {SEED}, mutant {number} of {name} ended the process while it ran: {found}")
    print(f"{name}, {'bytes' if whole_file else 'call'}: {dict(ends)}, {time.perf_counter() - begin:.0f} s")
    # If all damage were refused, or none, the fuzzer would test nothing.
    assert ends["refused"] > 0 and (MUTANTS < 40 or ends["returned"] > 0), ends
