"""Packed weights in huge pages: the same bytes, still shared, and actually in huge pages."""

import copy
import io
import os
import pickle
import platform
import re
import sys
from pathlib import Path

import lowbit
import pytest
import torch
from lowbit.machine import memory

MIB = 1 << 20


def packed(n: int, k: int) -> torch.Tensor:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return lowbit.pack(codes, torch.rand(n, k // 32), bits=4, group_size=32)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system whose settings the test writes."""

    def write(enabled: str, size: str = str(2 * MIB)) -> None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(size)

    monkeypatch.setattr(memory, "_SYSTEM", tmp_path)
    return write


class Tied(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.table = lowbit.nn.Embedding(weight)
        self.head = lowbit.nn.Linear(weight)
        self.small = lowbit.nn.Linear(packed(32, 64))


def test_weights_move_and_stay_shared(system):
    system("always [madvise] never")
    weight = packed(4096, 2048)  # 4.5 MiB
    model = Tied(weight)
    x, before = torch.randn(3, 2048), model.small.packed_weight
    expected = model.head(x)
    assert lowbit.use_huge_pages(model) == weight.numel()
    assert model.head.packed_weight.data_ptr() == model.table.packed_weight.data_ptr() != weight.data_ptr()
    assert model.head.packed_weight.data_ptr() % (2 * MIB) == 0
    assert torch.equal(model.head.packed_weight, weight) and torch.equal(model.head(x), expected)
    assert model.small.packed_weight is before  # smaller than a page


@pytest.mark.parametrize("enabled", ["[always] madvise never", "always madvise [never]", ""])
def test_nothing_moves_if_pages_cannot_be_requested(system, enabled):
    system(enabled)
    model = Tied(packed(4096, 2048))
    before = model.head.packed_weight
    assert lowbit.use_huge_pages(model) == 0 and model.head.packed_weight is before


def test_nothing_moves_if_the_setting_is_unknown(system):
    assert lowbit.use_huge_pages(Tied(packed(4096, 2048))) == 0


def test_quantized_layers_begin_there(system):
    system("always [madvise] never")
    model = torch.nn.Sequential(torch.nn.Embedding(4096, 2048), torch.nn.Linear(2048, 4096))
    config = {"0": lowbit.EmbeddingConfig(bits=4), "1": lowbit.LinearConfig(bits=4)}
    alone = lowbit.nn.Linear.from_float(model[1], config["1"])
    lowbit.quantize_(model, config)
    for weight in (model[0].packed_weight, model[1].packed_weight, alone.packed_weight):
        assert weight.data_ptr() % (2 * MIB) == 0
        lowbit.verify(weight)


def test_moved_weights_are_saved_and_copied(system):
    system("always [madvise] never")
    model = Tied(packed(4096, 2048))
    lowbit.use_huge_pages(model)
    x = torch.randn(1, 2048)
    expected = model.head(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.head(x), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 2 * 5 * MIB  # the shared table is stored once
    fresh = Tied(packed(4096, 2048))
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh.head(x), expected)


def test_this_system_gives_the_pages_it_is_asked_for():
    """At least a quarter of 64 MiB is in huge pages, if the system supports them and memory is not fragmented."""
    if memory._huge_page_bytes() is None:
        pytest.skip("this system gives huge pages to none or to all")
    moved = memory.in_huge_pages(torch.ones(64 * MIB, dtype=torch.uint8))
    found = None
    with open("/proc/self/smaps") as file:
        for line in file:
            if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(region[1], 16) <= moved.data_ptr() < int(region[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                found = int(line.split()[1]) << 10
    assert found is not None and found >= 16 * MIB


def in_memory(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that contains a tensor."""
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            ours = begin <= tensor.data_ptr() < end
        elif ours and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("there is no such mapping")


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the mapping that contains a tensor has the flag of MADV_HUGEPAGE."""
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            ours = begin <= tensor.data_ptr() < end
        elif ours and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("there is no such mapping")


@pytest.mark.skipif(memory.huge_page_setting() is None, reason="this system has no huge pages")
def test_mapped_files_are_read_in_huge_pages(tmp_path):
    def mapped(name: str) -> torch.Tensor:
        (tmp_path / name).write_bytes(bytes(4 * MIB))
        return torch.from_file(str(tmp_path / name), shared=False, size=4 * MIB, dtype=torch.uint8)

    (tmp_path / "link").symlink_to(tmp_path / "a file")
    tensor, other = mapped("a file"), mapped("other")
    memory.read_in_huge_pages([tmp_path / "link", tmp_path / "absent"])
    assert asks_for_huge_pages(tensor) and not asks_for_huge_pages(other)


@pytest.mark.skipif(memory.huge_page_setting() is None, reason="this system has no huge pages")
def test_packed_models_are_read_in_huge_pages(tmp_path):
    from lowbit.llm.loading import load_model

    source = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
    lowbit.quantize_checkpoint(source, tmp_path, lowbit.LowBitConfig(bits=4))
    packed = [layer.packed_weight for layer in load_model(tmp_path).modules() if hasattr(layer, "packed_weight")]
    assert packed and all(asks_for_huge_pages(weight) for weight in packed)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nothing is given back elsewhere")
def test_pages_of_files_are_given_back_and_no_others(tmp_path):
    content = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=4 * MIB, dtype=torch.uint8)
    assert torch.equal(mapped, content) and in_memory(mapped) == 4 * MIB
    memory.give_back(mapped[: 2 * MIB])
    assert in_memory(mapped) <= 2 * MIB
    assert torch.equal(mapped, content)
    # Changed pages and memory without a file would be lost.
    mapped[5] ^= 1
    content[5] ^= 1
    memory.give_back(mapped)
    assert torch.equal(mapped, content)
    own = content.clone()
    memory.give_back(own)
    assert torch.equal(own, content)


@pytest.fixture
def nodes(monkeypatch):
    """Two fake memory nodes with this machine's CPUs, and the CPUs on which each copy was allowed to run."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    halves = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    copies = []

    class Copies:
        def __init__(self, module):
            self._module = module

        def __getattr__(self, name):
            return getattr(self._module, name)

        def memmove(self, to, source, size):
            copies.append((sorted(os.sched_getaffinity(0)), size))
            return self._module.memmove(to, source, size)

    monkeypatch.setattr(memory, "ctypes", Copies(memory.ctypes))

    def divide(placement: str) -> tuple[list[list[int]], list[tuple[list[int], int]]]:
        monkeypatch.setattr(memory._C, "memory_placement", lambda: (placement, halves))
        return halves, copies

    return divide


def test_each_node_of_memory_gets_its_part(system, nodes):
    system("always [madvise] never")
    halves, copies = nodes("local")
    weight = torch.randint(0, 256, (9 * MIB + 5,), dtype=torch.uint8)
    before = os.sched_getaffinity(0)
    moved = memory.in_huge_pages(weight)
    assert torch.equal(moved, weight)
    assert copies == [(halves[0], 4 * MIB), (halves[1], 5 * MIB + 5)]  # split at a page boundary
    assert os.sched_getaffinity(0) == before


def test_pages_go_round_the_nodes_of_memory(system, nodes):
    system("always [madvise] never")
    halves, copies = nodes("interleave")
    weight = torch.randint(0, 256, (5 * MIB,), dtype=torch.uint8)
    assert torch.equal(memory.in_huge_pages(weight), weight)
    assert copies == [(halves[0], 2 * MIB), (halves[1], 2 * MIB), (halves[0], MIB)]


def test_no_parts_without_numa_placement(system, nodes):
    system("always [madvise] never")
    _, copies = nodes("off")
    weight = torch.randint(0, 256, (5 * MIB,), dtype=torch.uint8)
    assert torch.equal(memory.in_huge_pages(weight), weight) and copies == []


@pytest.mark.parametrize("setting", ["local", "interleave", "off", ""])
def test_the_placement_is_read_from_the_environment(setting, fork_python, monkeypatch):
    monkeypatch.setenv("LOWBIT_NUMA", setting)
    done = fork_python("from lowbit import _C; print(_C.memory_placement()[0])")
    assert done.stdout.strip() == (setting or "local"), done.stderr


def test_an_unknown_placement_is_an_error(fork_python, monkeypatch):
    script = (
        "import torch, lowbit\n"
        "weight = lowbit.pack(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1), bits=4, group_size=32)\n"
        "lowbit.linear(torch.ones(1, 32), weight, 16)"
    )
    monkeypatch.setenv("LOWBIT_NUMA", "far")
    assert "LOWBIT_NUMA is 'far'; expected local, interleave or off" in fork_python(script).stderr


_KEPT = """
import sys
from pathlib import Path

import lowbit
import torch


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])


if sys.argv[1] == "keep":
    assert lowbit.keep_freed_memory()
before = resident()
tensors = [torch.ones(2 << 20) for _ in range(10)]  # of 8 MiB
del tensors
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_freed_memory_is_kept(fork_python):
    def kept(how: str) -> int:
        return int(fork_python(_KEPT, how).stdout) * os.sysconf("SC_PAGESIZE")

    assert kept("keep") > 64 * MIB and kept("return") < 32 * MIB


def test_without_glibc_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert lowbit.keep_freed_memory() is False
