"""The thread tuner: numbers that it tries and chooses, and the state it leaves. The caller measures the times."""

import os
from pathlib import Path

import lowbit
import pytest
import torch
from lowbit.machine import cpus as cpus_of_machine
from lowbit.machine import threads


@pytest.fixture
def quantized():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    return lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32))


@pytest.fixture
def machine(monkeypatch):
    """A machine with this many CPUs, and a given time of a pass for each number of threads."""

    def make(seconds: dict[int, float]):
        now, running = [0.0], [1]
        monkeypatch.setattr(threads, "available_cpus", lambda: max(seconds))
        monkeypatch.setattr(torch, "set_num_threads", lambda count: running.__setitem__(0, count))
        monkeypatch.setattr(torch, "get_num_threads", lambda: running[0])

        def perf_counter():
            now[0] += seconds[running[0]]
            return now[0]

        monkeypatch.setattr(threads.time, "perf_counter", perf_counter)
        return running

    return make


def test_takes_the_fastest_and_sets_it(machine, quantized):
    running = machine({1: 4.0, 2: 2.5, 3: 2.0, 4: 3.0})
    result = lowbit.tune_threads(quantized)
    assert result.threads == running[0] == 3
    assert result.seconds == pytest.approx({1: 4.0, 2: 2.5, 3: 2.0, 4: 3.0})


def test_prefers_fewer_threads_when_more_gain_nothing(machine, quantized):
    machine({1: 4.0, 2: 2.03, 3: 2.0, 4: 2.0})
    assert lowbit.tune_threads(quantized).threads == 2


def test_the_number_can_be_left_unchanged(machine, quantized):
    running = machine({1: 4.0, 2: 2.0})
    assert lowbit.tune_threads(quantized, apply=False).threads == 2
    assert running[0] == 1


def test_restores_the_number_after_an_error(machine, quantized, monkeypatch):
    running = machine({1: 4.0, 2: 2.0})

    def fail():
        raise RuntimeError("stop")

    monkeypatch.setattr(threads.time, "perf_counter", fail)
    running[0] = 7
    with pytest.raises(RuntimeError, match="stop"):
        lowbit.tune_threads(quantized)
    assert running[0] == 7


def test_for_real(quantized, monkeypatch):
    monkeypatch.setattr(threads, "_SHAPES_BYTES", 1 << 20)
    before = torch.get_num_threads()
    for what in (quantized, [(64, 128), (200, 64)]):
        result = lowbit.tune_threads(what, seconds=0.01, apply=False)
        assert result.threads in result.seconds
        assert list(result.seconds) == threads._candidates(threads.available_cpus())
        assert all(seconds > 0 for seconds in result.seconds.values())
    assert torch.get_num_threads() == before


def test_shapes_are_measured_beyond_the_caches():
    weights = threads._weights([(64, 128), (200, 64)], 4, 32, 8)
    assert sum(weight.numel() for weight in weights) >= 128 << 20
    assert {lowbit.info(weight).out_features for weight in weights} == {64, 200}
    assert len({weight.data_ptr() for weight in weights}) == len(weights)


@pytest.mark.parametrize("cpus", [1, 2, 7, 8, 9, 64, 100, 192])
def test_candidates_reach_every_cpu_in_small_steps(cpus):
    counts = threads._candidates(cpus)
    assert counts[0] == 1 and counts[-1] == cpus
    assert counts[:8] == list(range(1, min(cpus, 8) + 1))
    assert all(a < b <= a * 1.125 + 1 for a, b in zip(counts, counts[1:]))


@pytest.mark.parametrize(
    "argument, message",
    [
        (torch.nn.Linear(4, 4), "no lowbit.nn.Linear"),
        ([], "no shapes"),
        ([(4,)], r"a shape is \(4,\)"),
        ([(4, 8.0)], "a shape is"),
    ],
)
def test_refuses(argument, message):
    with pytest.raises(ValueError, match=message):
        lowbit.tune_threads(argument)


def test_refuses_sizes(quantized):
    with pytest.raises(ValueError, match="rows is 0"):
        lowbit.tune_threads(quantized, rows=0)
    with pytest.raises(ValueError, match="seconds is 0"):
        lowbit.tune_threads(quantized, seconds=0)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "files, cpus",
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        ({"proc/self/cgroup": "0::/docker/x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_control_groups(tmp_path, files, cpus):
    assert cpus_of_machine._cgroup_cpus(write(tmp_path, files)) == cpus


def test_a_group_of_any_name(tmp_path):
    """A name that is not valid in any encoding."""
    group = os.fsdecode(b"caf\xe9")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    write(tmp_path, {f"sys/fs/cgroup/{group}/cpu.max": "150000 100000\n"})
    assert cpus_of_machine._cgroup_cpus(tmp_path) == 1.5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity(fork_python):
    script = "import os; os.sched_setaffinity(0, {0}); from lowbit.machine import cpus; print(cpus.available_cpus())"
    finished = fork_python(script)
    assert finished.stdout.strip() == "1", finished.stderr
