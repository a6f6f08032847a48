"""Many concurrent Python threads: all operators, models of both runtimes, threads that flush subnormal numbers and threads that
do not, changing numbers of threads, and loading of kernel libraries. Every call must give the same bits, and memory must not
grow.

    call_soak.py CALLS ACME DIRECTORY    # a library of examples/vendor_kernel, and a directory for a program
"""

import faulthandler
import itertools
import sys
import threading
import time
import warnings

import lowbit
import lowbit.executorch
import torch
from models import Small
from reference import random_packed, random_rows

warnings.simplefilter("ignore")
calls, acme, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
faulthandler.dump_traceback_later(250 + calls // 100, exit=True)  # of all threads, in case of a deadlock
lowbit.executorch.register()
from executorch.runtime import Runtime

# The calls by name: functions without arguments that return tensors.
work = {}


def linear(i):
    n, k = 40 + 97 * (i % 5), 64 + 160 * (i % 4)
    packed = random_packed(n, k, 1 + i % 8, 32, ("symmetric", "affine")[i % 2], seed=i)
    # Every third has activations and scales so small that flushing subnormal numbers would change the result.
    x = random_rows((1, 3, 70)[i % 3], k, seed=i) * (1e-36 if i % 3 == 0 else 1.0)
    indices = torch.arange(300) * 7 % n
    return {f"linear {i}": lambda: lowbit.linear(x, packed, n), f"embedding {i}": lambda: lowbit.embedding(indices, packed, k)}


for i in range(16):
    work |= linear(i)
experts = torch.stack([random_packed(40, 64, 4, 32, "affine", seed=i) for i in range(4)])
chosen, many = torch.arange(60).view(30, 2) % 4, random_rows(30, 64)
work["experts"] = lambda: lowbit.linear_experts(many, experts, chosen, 40)
codes, scales = torch.arange(300 * 64, dtype=torch.uint8).view(300, 64) % 16, torch.rand(300, 2) + 0.1
packed = lowbit.pack(codes, scales, bits=4, group_size=32)
work["pack"] = lambda: lowbit.pack(codes, scales, bits=4, group_size=32)
work["unpack"] = lambda: torch.ops.lowbit.unpack(packed)[0]


def model(seed):
    torch.manual_seed(seed)
    small = Small().eval().requires_grad_(False)
    lowbit.quantize_(small, lowbit.LinearConfig(bits=2 + seed))
    tokens = torch.arange(20).view(2, 10) + seed
    return lambda: small(tokens)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = lowbit.nn.Embedding(random_packed(520, 256, 4, 64, "affine"))
        self.linear = lowbit.nn.Linear(random_packed(520, 256, 4, 64, "symmetric", bias=True))

    def forward(self, indices):
        return self.linear(self.table(indices))


layer, rows = Layer().eval(), torch.arange(40)[None] * 13 % 520
lowbit.export_pte(layer, (rows,), directory + "/layer.pte")


def program():  # a method has its own memory, so each thread needs one
    kept = threading.local()

    def call():
        if not hasattr(kept, "method"):
            kept.method = Runtime.get().load_program(directory + "/layer.pte").load_method("forward")
        return kept.method.execute((rows,))[0]

    return call


for seed in range(3):
    work[f"model {seed}"] = model(seed)
work["layer in torch"] = lambda: layer(rows)
work["layer in ExecuTorch"] = program()
torch.set_num_threads(1)
expected = {name: call().clone() for name, call in work.items()}
small = torch.cat([value.flatten() for name, value in expected.items() if name.startswith("linear")]).abs()
assert ((small > 0) & (small < 2.0**-126)).any(), "no result is subnormal"
assert torch.equal(expected["layer in torch"], expected["layer in ExecuTorch"])


def same_bits(a, b):  # in a thread that flushes, subnormal numbers compare as zeros
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


done, wrong, failures, stop = itertools.count(), [], [], threading.Event()


def worker(number):
    torch.set_flush_denormal(number % 2 == 1)  # of this thread
    names = list(work)
    for turn in itertools.count(number * 5):
        if turn % 50 == 0:
            torch.set_num_threads(1 + (turn // 50 + number) % 3)
        name = names[turn * 7 % len(names)]
        try:
            if not same_bits(work[name](), expected[name]):
                wrong.append(name)
        except Exception as error:
            failures.append((name, repr(error)))
        if wrong or failures or next(done) >= calls:
            return stop.set()


def loader():
    # Loads the library while calls run; then repeatedly loads libraries that change nothing or are refused.
    lowbit.load_kernels(acme)
    while not stop.is_set():
        lowbit.load_kernels(acme)
        lowbit.kernels()
        try:
            lowbit.load_kernels(directory + "/layer.pte")
            failures.append("a program passed for a kernel library")
        except (OSError, ValueError, RuntimeError):
            pass


def measure():
    while not stop.is_set():
        time.sleep(0.02)
        if done.__reduce__()[1][0] > calls // 4:
            return memory.append(resident())


memory = []
threads = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
threads += [threading.Thread(target=loader), threading.Thread(target=measure)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong and not failures, (wrong, failures)
assert any(row["library"] == acme and row["active"] for row in lowbit.kernels())
grown = resident() - memory[0]
assert grown < 32 << 20, f"{grown} bytes more after three quarters of the calls"
print(calls, "calls", grown)
