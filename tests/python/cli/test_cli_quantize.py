"""`lowbit quantize`, compared with the library."""

import json
import math
import os
import re
import shutil
import signal

import lowbit
import pytest
import torch
from command_line import FLOAT, document, documented_keys, error, invoke
from transformers import JetMoeConfig, JetMoeForCausalLM

pytestmark = pytest.mark.first


def test_quantize_writes_what_the_library_writes(packed, tmp_path):
    target, said = packed
    override = {"*.0.*o_proj": {"bits": 8, "group_size": None, "mapping": "affine"}}
    config = lowbit.LowBitConfig(bits=4, embedding_bits=6, overrides=override)
    summary = lowbit.quantize_checkpoint(FLOAT, tmp_path / "other", config)
    assert sorted(os.listdir(target)) == sorted(os.listdir(tmp_path / "other"))
    for name in os.listdir(target):
        assert (target / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    entries = [entry for entry in summary.entries if entry.kind == "packed"]
    assert {entry.bits for entry in entries} == {4, 6, 8}
    assert said["packed_layers"] == len(entries)
    assert said["packed_bytes"] == sum(entry.bytes for entry in entries)
    assert said["packed_weights"] == sum(math.prod(entry.shape) for entry in entries)
    assert said["bits_per_weight"] == 8 * said["packed_bytes"] / said["packed_weights"]
    assert said["bytes_before"] == summary.source_bytes
    assert said["bytes_after"] == summary.target_bytes == said["packed_bytes"] + said["float_bytes"]
    assert (said["source"], said["target"], said["left_float"]) == (str(FLOAT), str(target), {})
    assert set(said) == documented_keys("quantize")


def test_quantize_prints_a_summary_and_leaves_layers_float(tmp_path):
    result = invoke("quantize", FLOAT, tmp_path / "out", "--bits", 2, "--scale", "absmax", "--override", "*.mlp.*=float")
    assert result.exit_code == 0, result.stderr
    entries = lowbit.inspect_checkpoint(tmp_path / "out")
    assert all((entry.kind == "packed") == ("norm" not in entry.name and ".mlp." not in entry.name) for entry in entries)
    assert {entry.bits for entry in entries if entry.kind == "packed"} == {2}
    layers = sum(entry.kind == "packed" for entry in entries)
    assert re.search(rf"^{layers} packed layers .* 2\.\d\d bits per weight$", result.stdout, re.M)


def test_quantize_warns_of_patterns_that_match_nothing(tmp_path):
    result = invoke("quantize", FLOAT, tmp_path / "out", "--override", "lm_haed=8", "--override", "*.q_proj=8")
    assert result.exit_code == 0
    warning = "lowbit: warning: the pattern 'lm_haed' matches no linear layer or embedding of LlamaForCausalLM"
    assert [line for line in result.stderr.splitlines() if not line.endswith(" ...")] == [warning]


def test_quantize_shows_progress_on_a_terminal(tmp_path, monkeypatch):
    import io

    from lowbit.cli import output
    from rich.console import Console

    terminal = io.StringIO()
    plain = output.console
    monkeypatch.setattr(
        output, "console",
        lambda stderr: Console(file=terminal, force_terminal=True, width=200) if stderr else plain(stderr=False),
    )  # fmt: skip
    assert invoke("quantize", FLOAT, tmp_path / "out").exit_code == 0
    total = sum(entry.bytes for entry in lowbit.inspect_checkpoint(FLOAT))
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    assert f"quantizing {FLOAT}" in shown
    assert re.search(rf"\b{total / 1e6:.1f}/{total / 1e6:.1f} MB", shown), shown[-500:]
    assert any(entry.name in shown for entry in lowbit.inspect_checkpoint(tmp_path / "out"))


def test_quantize_keeps_existing_files(packed, tmp_path):
    before = sorted(packed[0].iterdir())
    assert f"{packed[0]} has {len(before)} files" in error(invoke("quantize", FLOAT, packed[0]))
    assert sorted(packed[0].iterdir()) == before
    assert "share one weight but have different configs" in error(
        invoke("quantize", FLOAT, tmp_path / "new", "--override", "lm_head=8")
    )
    assert list(tmp_path.iterdir()) == []


# A process that has done the slow imports forks one for each case: a signal, "nohup" or "full".
SIGNALED = """
import json, os, resource, shutil, signal, sys
import lowbit.hf.from_pretrained, lowbit.hf.placing, transformers.models.llama.modeling_llama
from lowbit.checkpoint import quantizing
from lowbit.cli import main

base, source, *cases = sys.argv[1:]
pack, rmtree = quantizing.write_output, shutil.rmtree

def interrupted(number, target):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup does with this one
    def again(*arguments, **options):  # an impatient user sends a second signal while partial files are removed
        os.kill(os.getpid(), number)
        rmtree(*arguments, **options)
    shutil.rmtree = again
    def packing(*arguments):
        pack(*arguments)
        assert any(name.endswith(".partial") for name in os.listdir(os.path.dirname(target)))
        os.kill(os.getpid(), number)
    quantizing.write_output = packing

def closed():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    def packing(*arguments):
        os.kill(os.getpid(), signal.SIGHUP)
        pack(*arguments)
    quantizing.write_output = packing

def full():
    # A limit on the size of files fails as a full disk does, in the middle of the file.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # Python does not notice a short write, and would keep a part of a .pyc
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

found = {}
for case in cases:
    os.mkdir(f"{base}/{case}")
    child = os.fork()
    if child == 0:
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{base}/{case}.{kind}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = ["lowbit", "quantize", source, f"{base}/{case}/new", "--scale", "absmax"]
        if case in ("nohup", "full"):
            {"nohup": closed, "full": full}[case]()
        else:
            interrupted(int(case), sys.argv[3])
        status = 1
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code
        finally:  # without taking all down that was imported, which takes longer than the rest
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[case] = [status, *(open(f"{base}/{case}.{kind}").read() for kind in ("out", "err"))]
print(json.dumps(found))
"""


@pytest.mark.more
def test_interrupted_and_no_space(tmp_path, run_python):
    codes = {str(int(number)): 128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    done = run_python(SIGNALED, tmp_path, FLOAT, *codes, "nohup", "full")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for number, code in codes.items():
        assert found[number] == [code, "", f"quantizing {FLOAT} ...\n"]
        assert list((tmp_path / number).iterdir()) == []
    # A command started by nohup must continue when the terminal is closed.
    status, _, said = found["nohup"]
    assert status == 0, said
    assert len(lowbit.inspect_checkpoint(tmp_path / "nohup" / "new")) == 47
    assert os.listdir(tmp_path / "nohup") == ["new"]
    status, out, said = found["full"]
    assert (status, out) == (1, "")
    _, said = said.splitlines()
    assert said.startswith("lowbit: error: ") and f"{tmp_path / 'full' / 'new'}" in said and "nothing of it was kept" in said
    assert list((tmp_path / "full").iterdir()) == []


def test_the_last_override_that_matches_counts(tmp_path):
    overrides = ("*.0.*=4", "*.0.*.q_proj=8", "*.0.*=2", "*.1.*=float", "*.1.*=5")
    more = [part for override in overrides for part in ("--override", override)]
    result = invoke("quantize", FLOAT, tmp_path / "new", "--scale", "absmax", "--bits", 3, *more)
    assert result.exit_code == 0, result.stderr
    packed = [entry for entry in lowbit.inspect_checkpoint(tmp_path / "new") if entry.kind == "packed"]
    bits = {layer: {entry.bits for entry in packed if f".layers.{layer}." in entry.name} for layer in range(3)}
    assert bits == {0: {2}, 1: {5}, 2: {3}}


def mostly_float(path):
    """A checkpoint with most matrices in layers that lowbit does not pack."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16}
    config = JetMoeConfig(**sizes, intermediate_size=96, num_local_experts=4, max_position_embeddings=32, pad_token_id=0)
    JetMoeForCausalLM(config).save_pretrained(path)
    return path


def test_quantize_says_what_stays_float(tmp_path):
    source = mostly_float(tmp_path / "float")
    result = invoke("quantize", source, tmp_path / "new", "--override", "*.0.self_attention.kv_proj=float")
    assert result.exit_code == 0, result.stderr
    entries = lowbit.inspect_checkpoint(tmp_path / "new")
    total = sum(entry.bytes for entry in entries)
    floats = [entry for entry in entries if entry.kind != "packed" and len(entry.shape) > 1]
    experts = [entry for entry in floats if len(entry.shape) == 3]
    share = 100 * sum(entry.bytes for entry in experts) / total
    assert len(experts) == 8
    for line in (
        rf"^8 matrices \(.*\) stay float, {share:.1f} % of the bytes: [^:]*JetMoeParallelExperts",
        r"^model\.layers\.0\.self_attention\.kv_proj\.weight stays float, [\d.]+ % of the bytes: ",
    ):
        assert re.search(line, result.stdout, re.M)
    warnings = [line for line in result.stderr.splitlines() if line.startswith("lowbit: warning: MOST OF THIS MODEL")]
    left = sum(entry.bytes for entry in floats)
    assert warnings == [
        f"lowbit: warning: MOST OF THIS MODEL STAYS FLOAT: 9 matrices, {100 * left / total:.0f} % of the bytes in "
        f"{tmp_path / 'new'}"
    ]
    said = document(invoke("quantize", source, tmp_path / "again", "--json"))
    assert len(said["left_float"]) == 8 and all("Experts" in why for why in said["left_float"].values())
    assert said["left_bytes"] == sum(entry.bytes for entry in experts)


def test_a_float_model_quantized_to_run_reports_float_layers(tmp_path):
    source = mostly_float(tmp_path / "float")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FLOAT / name, source)
    # The tokenizer of another model, with more tokens than this one.
    result = invoke("generate", source, "--prompt", "Return", "--bits", 4)
    warnings = [line for line in result.stderr.splitlines() if line.startswith("lowbit: warning: ")]
    assert len(warnings) == 1 and "JetMoeParallelExperts" in warnings[0] and "stay float" in warnings[0]
