"""`lowbit bench`, `tune` and `info`: their output about this machine."""

import math
import re

import lowbit
import pytest
import torch
from command_line import FLOAT, document, documented_keys, error, invoke, run
from lowbit.llm.loading import load_model
from lowbit.machine.cpus import available_cpus
from lowbit.machine.threads import _candidates

pytestmark = pytest.mark.first


@pytest.mark.more
def test_bench(packed):
    from lowbit.tools.model_speed import bytes_per_token

    options = ("--prompt", 32, "--new", 4, "--rounds", 1, "--mode", "plan")
    said = document(invoke("bench", packed[0], *options, "--json"))
    model = load_model(packed[0])
    assert said["packed_bytes_per_token"] == bytes_per_token(model)
    assert (said["prompt"], said["new"], said["threads"], list(said["modes"])) == (32, 4, 1, ["plan"])
    figures = said["modes"]["plan"]
    assert math.isclose(figures["prefill_tokens_per_second"], 32 / figures["seconds_to_first_token"])
    assert set(said) | set(figures) == documented_keys("bench")
    table = run(
        "bench", FLOAT, *options, "--bits", 2
    )  # in a separate process, because torch's profiler can be queried only once
    assert table.returncode == 0, table.stderr
    weights = bytes_per_token(load_model(FLOAT, lowbit.LowBitConfig(bits=2)))
    assert table.stdout.startswith(f"{FLOAT}: {weights / 1e6:.2f} MB of packed weights per token; 1 threads of ")
    assert re.search(r"^plan( +[\d.]+( %)?){5}$", table.stdout, re.M)
    assert "profiler" not in table.stderr


def test_bench_requests_the_given_options(monkeypatch):
    from lowbit.tools import model_speed

    asked = []

    def run(*arguments, **options):
        asked.append((arguments, options))
        raise ValueError("enough")

    monkeypatch.setattr(model_speed, "run", run)
    for more, modes in (((), ["plan"]), (("--mode", "eager", "--mode", "compile"), ["eager", "compile"])):
        widths = ("--bits", 3, "--group-size", "none", "--activation-bits", 16)
        options = (*widths, "--prompt", 7, "--new", 5, "--rounds", 2, "--threads", 2)
        assert error(invoke("bench", "llama-3.1-8b", *options, *more)) == "enough"
        expected = {"activation_bits": 16, "prompt": 7, "new": 5, "modes": modes, "rounds": 2, "cache": None}
        assert asked.pop() == (("llama-3.1-8b", 3, None), expected)
        assert torch.get_num_threads() == 2


@pytest.mark.more
def test_tune(packed, monkeypatch):
    said = document(run("tune", packed[0], "--seconds", 0.1, "--json"))
    assert set(said) == documented_keys("tune")
    counts = _candidates(available_cpus())  # all of few CPUs, some of many
    assert list(said["seconds"]) == [str(count) for count in counts]
    best = min(said["seconds"].values())
    assert said["seconds"][str(said["threads"])] <= 1.02 * best

    asked = []

    def tuning(model_or_shapes, **options):
        asked.append((model_or_shapes, options))
        return lowbit.ThreadTuning(2, {1: 2e-3, 2: 1e-3})

    monkeypatch.setattr(lowbit, "tune_threads", tuning)
    widths = ("--bits", 3, "--group-size", "none", "--activation-bits", 16)
    result = invoke("tune", "qwen3-0.6b", *widths, "--rows", 7, "--seconds", 1)
    assert [line.split() for line in result.stdout.splitlines()[:3]] == [
        ["threads", "ms", "per", "pass"],
        ["1", "2.000"],
        ["2", "*", "1.000"],
    ]
    shapes, options = asked[0]
    assert shapes == [
        (2048, 1024),
        (1024, 1024),
        (1024, 1024),
        (1024, 2048),
        (3072, 1024),
        (3072, 1024),
        (1024, 3072),
        (151936, 1024),
    ]
    assert options == {"rows": 7, "bits": 3, "group_size": None, "activation_bits": 16, "seconds": 1.0, "apply": False}


def test_info():
    result = run("info", "--json", LOWBIT_ISA="portable")
    assert (result.returncode, result.stderr) == (0, "")
    said = document(result)
    assert set(said) | {"kernels", "supported", "active"} == documented_keys("info")
    assert said["isa"] == {**lowbit.isa(), "cap": "portable", "active": ["portable"]}
    assert (said["lowbit"], said["torch"]) == (lowbit.__version__, torch.__version__)
    assert {"linear", "embedding", "attention"} <= set(said["kernels"])
    for family, isas in said["kernels"].items():
        for isa, counts in isas.items():
            rows = [row for row in lowbit.kernels() if (row["family"], row["isa"]) == (family, isa)]
            assert (counts["kernels"], counts["supported"]) == (len(rows), sum(row["supported"] for row in rows))
            assert (counts["active"] > 0) == (isa == "portable")
    text = invoke("info").stdout
    for value in (said["cpu"], said["torch"], *lowbit.isa()["cpu"]):
        assert value in text


def test_help_and_info_do_not_import_transformers(fork_python):
    script = """
import contextlib, sys
from lowbit.cli import main
for sys.argv in (["lowbit", "--help"], ["lowbit", "generate", "--help"], ["lowbit", "info"]):
    with contextlib.suppress(SystemExit):
        main()
print(sorted({"transformers", "torchao", "executorch"} & set(sys.modules)))
"""
    assert fork_python(script).stdout.endswith("\n[]\n")


def test_version():
    assert invoke("--version").stdout == f"lowbit {lowbit.__version__}\n"
