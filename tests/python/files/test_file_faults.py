"""Failing disk calls, read-only file systems, unusual names, files that change while a model uses them."""

import os
import shutil
import signal
from pathlib import Path

import crash_actions
import lowbit
import pytest
import torch
from checkpoints import TOKENS, load, refuse
from command_line import error, invoke
from crash_actions import CONFIG
from needs import lacking

pytestmark = pytest.mark.first


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("sources")
    crash_actions.make_sources(base)
    return base


INJECT = """
import os, shutil, subprocess, sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
from crash_actions import ACTIONS
from crash_states import tree_of

warnings.simplefilter("ignore")
sources, base, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
FAULTS = [("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EXDEV"), ("mkdir", "EDQUOT")]

def run(name, place, call, fault, number):
    # Whether the fault was met, and 0: it went well, 3: an error with a message.
    traced, go = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go)
            os.read(traced, 1)
            ACTIONS[name](sources, place)
            status = 0
        except (OSError, RuntimeError, ValueError) as error:  # torch and tokenizers say so for what the system refuses
            status = 3 if str(error).strip() else 4
        finally:
            os._exit(status)
    os.close(traced)
    inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={fault}:when={number}", "-o", base / "log"]
    tracer = subprocess.Popen(["strace", "-f", "-p", str(child), *inject], stderr=subprocess.PIPE, text=True)
    said = tracer.stderr.readline()
    os.close(go)
    assert "attached" in said, said
    status = os.waitpid(child, 0)[1]
    tracer.communicate()
    assert os.WIFEXITED(status), (name, call, fault, number, status)
    return "(INJECTED)" in (base / "log").read_text(), os.WEXITSTATUS(status)

for name, target in (("quantize", "packed"), ("gguf", "m.gguf"), ("import", "imported")):
    place, met, errors, whole = base / name, 0, 0, None
    for call, fault in [("write", "EIO"), *FAULTS]:
        number, injected = 50_000 if whole is None else 1, True  # first of all without a fault
        while injected:
            where = name, call, fault, number
            place.mkdir()
            if "." in target:
                (place / target).write_bytes(b"what was there")
            before = tree_of(place)
            injected, status = run(name, place, call, fault, number)
            after = tree_of(place)
            if status == 0:
                whole = whole or after
                assert after == whole, where
            else:
                assert injected and status == 3, (*where, status)
                errors += 1
                # The files are as before; or the new ones are there, and only a last fsync failed; or the last rename
                # failed, and the complete result is next to the target, as the error says.
                beside = {path: found for path, found in after.items() if path not in before}
                if call == "rename" and beside:
                    assert sorted(beside.values(), key=str) == sorted(whole.values(), key=str), where
                    assert not any(path.startswith(".") for path in beside), where
                else:
                    assert after == before or call == "fsync" and after == whole, (*where, sorted(after))
            shutil.rmtree(place)
            met += injected
            number += {"write": step, "fsync": (step + 3) // 4}.get(call, 1)
    print(name, met, errors)
"""


@pytest.mark.more
def test_a_disk_that_refuses_any_call(sources, tmp_path, run_python):
    """Each write, fsync, rename and mkdir fails in turn: an error, the old file or none, and no leftovers. All calls with
    LOWBIT_ALL_FAULTS, else every thirtieth write and every eighth fsync."""
    if shutil.which("strace") is None:
        lacking("there is no strace; scripts/need.sh test installs it")
    done = run_python(INJECT, sources, tmp_path, 1 if os.environ.get("LOWBIT_ALL_FAULTS") else 30)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [line.split() for line in done.stdout.splitlines()]
    assert len(counts) == 3 and all(int(met) >= int(errors) > 3 for _, met, errors in counts), counts


# 250 of the 255 bytes that a name may have, and special characters of terminals and patterns.
NAMES = ["y" * 250, "a\nb", "%s {x} *.[a]", "\x1b[31m", "ü"]


@pytest.mark.parametrize("name", NAMES, ids=["long", "two lines", "patterns", "control", "letters"])
def test_names_of_all_kinds(name, sources, tmp_path):
    target = tmp_path / name
    lowbit.quantize_checkpoint(sources / "model", target, CONFIG)
    assert os.listdir(tmp_path) == [name]
    assert torch.isfinite(load(target)(TOKENS).logits).all()
    assert invoke("inspect", target, "--json").exit_code == 0
    shutil.rmtree(target)
    lowbit.import_checkpoint(sources / "m.gguf", target)
    assert os.listdir(tmp_path) == [name] and lowbit.inspect_checkpoint(target)


def test_a_name_that_is_not_utf8(sources, tmp_path):
    """safetensors cannot read it, which is reported before the work, not after it."""
    target = tmp_path / os.fsdecode(b"caf\xe9")
    refuse(sources / "model", target, OSError, "caf\\udce9' is not UTF-8, which safetensors needs")
    assert "is not UTF-8" in error(invoke("quantize", sources / "model", target))
    shutil.copytree(sources / "model", target)
    with pytest.raises(OSError, match="is not UTF-8"):
        lowbit.inspect_checkpoint(target)
    with pytest.raises(OSError, match="kernel library does not load: the path .* is not UTF-8"):
        lowbit.load_kernels(target / "k.so")


def test_a_path_that_is_too_long(sources, tmp_path):
    long = tmp_path.joinpath(*["d" * 200] * 25)
    refuse(sources / "model", long / "packed", OSError, "File name too long")
    refuse(sources / "model", tmp_path / ("y" * 256), OSError, "File name too long")


CHANGE = """
import os, shutil, sys
import torch, lowbit.transformers
from checkpoints import TOKENS, load

packed, other = sys.argv[1:]
model = load(packed)
before = model(TOKENS).logits
shutil.rmtree(packed)
lowbit.quantize_checkpoint(other, packed, lowbit.LowBitConfig(bits=2))
print(torch.equal(model(TOKENS).logits, before), flush=True)
model = load(packed)
os.truncate(packed + "/model.safetensors", 4096)
print(model(TOKENS).logits)
"""


@pytest.mark.more
def test_a_model_whose_files_change(sources, tmp_path, run_python):
    """Weights are mapped. An open model keeps files that are removed or replaced. A truncated file ends the process
    (SECURITY.md), and never gives other numbers."""
    lowbit.quantize_checkpoint(sources / "model", tmp_path / "packed", CONFIG)
    done = run_python(CHANGE, tmp_path / "packed", sources / "older")
    assert done.stdout == "True\n" and done.returncode == -signal.SIGBUS, (done.returncode, done.stdout, done.stderr)


def test_a_read_only_file_system(sources, tmp_path):
    """/sys is read-only, even for root."""
    refuse(sources / "model", Path("/sys/kernel/packed"), OSError, "/sys/kernel cannot be written: ")
    with pytest.raises(OSError, match="/sys/kernel cannot be written: "):
        crash_actions.export_gguf(sources / "float32", "/sys/kernel/m.gguf")
    with pytest.raises(OSError, match="/sys/kernel cannot be written: "):
        lowbit.import_checkpoint(sources / "m.gguf", "/sys/kernel/imported")
