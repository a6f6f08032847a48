"""Plans in files: export_decoder, load_decoder, lowbit certify, and the C++ program."""

import ctypes
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import lowbit
import lowbit.exports.plan_export
import lowbit.llm
import pytest
import torch
from command_line import document, error, invoke, run
from runners import EXAMPLE, build

pytest.importorskip("transformers")
from lowbit.llm import plan_files
from lowbit.llm.loading import load_model

MODEL = EXAMPLE.parent / "tiny_llama" / "model"
PROMPT = [0, 423, 265, 570, 297, 1474]
CAPS = [isa for isa in ("portable", "avx2", "avx512vnni", "neon", "neondot") if isa == "portable" or isa in lowbit.isa()["cpu"]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A packed model with its plan."""
    directory = tmp_path_factory.mktemp("plan") / "packed"
    lowbit.quantize_checkpoint(MODEL, directory, lowbit.LowBitConfig(bits=4))
    lowbit.llm.export_decoder(lowbit.llm.Decoder(load_model(directory), 64), directory / "lowbit.plan")
    return directory


@pytest.fixture(scope="module")
def decoder(packed) -> lowbit.llm.Decoder:
    return lowbit.llm.Decoder(load_model(packed), 128, plan=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """llm_runner_plan, built with nothing but lowbit."""
    directory = tmp_path_factory.mktemp("runner")
    build(EXAMPLE, directory, f"CMAKE_PREFIX_PATH={lowbit.cmake_prefix_path}", "PTE_RUNNER=OFF", "PT2_RUNNER=OFF")
    return directory / "llm_runner_plan"


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_weights_are_mapped_for_huge_pages(packed):
    model = lowbit._C.PlanModel(str(packed / "lowbit.plan"), 1)  # keeps the mapping
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    of_weights = [each for each in mappings if f"{packed}/model.safetensors\n" in each]
    assert of_weights
    assert any("hg" in each.partition("VmFlags:")[2].split() for each in of_weights)
    del model


@pytest.mark.parametrize("cache", [None, "bfloat16", "float16", "int8", "int8,int4", "int4"])
def test_a_plan_has_the_bits_of_the_decoder(packed, decoder, cache):
    step = lowbit.llm.load_decoder(packed / "lowbit.plan", max_length=128, cache=cache)
    assert (step.max_length, step.vocabulary, step.recurrent) == (128, decoder.vocabulary, False)
    own = decoder if cache is None else lowbit.llm.Decoder(load_model(packed), 128, cache, plan=False)
    # A prompt, single tokens, and a text that is cut back.
    calls = [(PROMPT, 0), ([7], 6), ([9], 7), ([5, 6, 8], 4), ([11], 7), ([3], 0)]
    with torch.inference_mode():
        for tokens, start in calls:
            inputs = torch.tensor([tokens]), torch.tensor([start])
            assert torch.equal(step(*inputs), own(*inputs))


def test_generation(packed, decoder):
    step = lowbit.llm.load_decoder(packed / "lowbit.plan")
    expected = lowbit.llm.generate(decoder, PROMPT, 30, stop=step.stop)
    assert lowbit.llm.generate(step, PROMPT, 30, max_length=128, stop=step.stop).tokens == expected.tokens


def test_errors_of_a_step(packed):
    step = lowbit.llm.load_decoder(packed / "lowbit.plan", max_length=32)
    with pytest.raises(IndexError, match="no more than the max_length of 32 tokens"):
        step(torch.zeros(1, 33, dtype=torch.int64), torch.tensor([0]))
    with pytest.raises(IndexError, match="start is 3; expected at most 0, the tokens that came before"):
        step(torch.tensor([[1]]), torch.tensor([3]))
    for more, message in (
        ({"max_length": 1 << 20}, r"has room for 1048576 tokens; expected 1 to \d+"),
        ({"cache": "int3"}, "a cache is 'int3'; expected float32"),
    ):
        with pytest.raises(ValueError, match=message):
            lowbit.llm.load_decoder(packed / "lowbit.plan", **more)


def test_a_path_that_is_not_utf_8(packed, tmp_path):
    odd = tmp_path / "sur\udcff"
    shutil.copytree(packed, odd)
    step = lowbit.llm.load_decoder(odd / "lowbit.plan", max_length=32)
    expected = lowbit.llm.load_decoder(packed / "lowbit.plan", max_length=32)
    assert lowbit.llm.generate(step, PROMPT, 4).tokens == lowbit.llm.generate(expected, PROMPT, 4).tokens
    step.save(odd / "text")
    assert lowbit.llm.load_decoder(odd / "lowbit.plan", max_length=32).load(odd / "text") == len(PROMPT) + 3
    certificates = [document(invoke("certify", directory, "--json"))["certificate"] for directory in (packed, odd)]
    assert certificates[0] == certificates[1]
    assert plan_files.open_planned(odd, 1, None).tokenizer.tables is not None


def _changed(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damaged_files(packed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    file, weights = copy / "lowbit.plan", copy / "model.safetensors"
    whole = file.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            lowbit.llm.load_decoder(file)

    _changed(file, len(whole) // 2)
    refused("checksum does not fit")
    file.write_bytes(whole[:100])
    refused("checksum does not fit")
    file.write_bytes(b"no plan at all")
    refused("does not begin with 'lowbit plan'")
    version = whole[:12] + b"\x04" + whole[13:-4]  # zigzag of 2
    file.write_bytes(version + struct.pack("<I", zlib.crc32(version)))
    refused("version 2; expected 1")
    file.write_bytes(whole)
    content = weights.read_bytes()
    weights.write_bytes(content[:-4096])
    refused("bytes from byte")
    weights.write_bytes(content)
    lowbit.llm.load_decoder(file)
    # The header of a packed weight has the checksum of its codes, so other weights are noticed.
    lowbit.quantize_checkpoint(MODEL, tmp_path / "others", lowbit.LowBitConfig(bits=4, scale="absmax"))
    shutil.copy(tmp_path / "others" / "model.safetensors", weights)
    refused("has changed since the plan was made")


def test_a_plan_is_written_beside_its_weights(packed, tmp_path, monkeypatch):
    decoder = lowbit.llm.Decoder(load_model(packed), 64)
    with pytest.raises(OSError, match="neither model.safetensors"):
        lowbit.llm.export_decoder(decoder, tmp_path / "lowbit.plan")
    lowbit.quantize_checkpoint(MODEL, tmp_path / "others", lowbit.LowBitConfig(bits=2))
    monkeypatch.setattr(lowbit.exports.plan_export, "_MOST_INSIDE", 1 << 12)  # more are not kept in the plan
    with pytest.raises(ValueError, match="expected the checkpoint that the decoder's model was loaded from"):
        lowbit.llm.export_decoder(decoder, tmp_path / "others" / "lowbit.plan")
    decoder.drop_plan("a test")
    with pytest.raises(ValueError, match="has no plan: a test"):
        lowbit.llm.export_decoder(decoder, packed / "other.plan")
    assert not (packed / "other.plan").exists()


def test_commands(packed, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    before = (copy / "lowbit.plan").read_bytes()
    assert document(invoke("export", copy, "--to", "plan", "--json"))["bytes"] == len(before)
    assert (copy / "lowbit.plan").read_bytes() == before
    said = document(invoke("certify", copy, "--json"))
    assert said["made"] is False
    (copy / "lowbit.plan").unlink()
    again = document(invoke("certify", copy, "--json", "--threads", 2))
    assert again["made"] is True and again["certificate"] == said["certificate"]
    config = (copy / "config.json").read_bytes()
    (copy / "config.json").unlink()  # a board has the plan and the weights only
    assert document(invoke("certify", copy, "--json"))["certificate"] == said["certificate"]
    (copy / "config.json").write_text(json.dumps(json.loads(config) | {"rms_norm_eps": 0.1}))
    changed = "config.json beside .*lowbit.plan has changed since the plan was made"
    assert re.search(changed, error(invoke("certify", copy)))
    with pytest.raises(ValueError, match=changed):
        lowbit.llm.load_decoder(copy / "lowbit.plan")
    assert "expected a checkpoint of lowbit quantize" in error(invoke("certify", MODEL))
    assert "expected a file in" in error(invoke("export", copy, "--to", "plan", "--output", tmp_path / "x.plan"))
    assert "expected a model of lowbit quantize or import" in error(invoke("export", MODEL, "--to", "plan"))


def test_all_processors_compute_the_same(packed, program):
    """The certificate, with every instruction set of this CPU and for any number of threads, from Python and from C++."""
    file = packed / "lowbit.plan"
    expected = f"{lowbit._C.PlanModel(str(file), 1).certify():016x}"
    for isa in CAPS:
        for threads in (1, 3):
            command = ["env", f"LOWBIT_ISA={isa}", program, "--certify", "--threads", str(threads), file]
            ran = subprocess.run(command, capture_output=True, text=True)
            assert (ran.stdout.strip(), ran.stderr) == (expected, ""), isa
    assert f"{run('certify', packed).stdout.strip()}" == expected


def test_the_program_needs_only_lowbit(packed, program, decoder):
    step = lowbit.llm.load_decoder(packed / "lowbit.plan")
    expected = lowbit.llm.generate(decoder, PROMPT, 20, stop=step.stop).tokens
    command = [program, "--ids", ",".join(map(str, PROMPT)), "--max-new-tokens", "20", packed / "lowbit.plan"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [int(token) for token in ran.stdout.split()] == expected
    command = [program.with_name("tokens"), packed / "lowbit.plan", "20", *map(str, PROMPT)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [int(token) for token in ran.stdout.split()] == expected
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "liblowbit" in libraries and not any(name in libraries for name in ("libtorch", "libexecutorch", "libgomp"))
    wrong = subprocess.run([program, "--ids", "1", packed / "config.json"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "does not begin with 'lowbit plan'" in wrong.stderr


def test_the_c_interface_uses_the_callers_threads(packed):
    """By ctypes, which any language has; tests/cpp/plan_c_interface_test.cpp has every function and misuse."""
    library = ctypes.CDLL(str(Path(lowbit._C.__file__).parent / "liblowbit.so"))
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
    run_tasks = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, task, ctypes.c_void_p)

    class Options(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("threads", ctypes.c_int), ("run", run_tasks), ("host", ctypes.c_void_p)]

    counts = []

    def run(host, count, task, context):
        counts.append(count)
        for i in reversed(range(count)):
            task(context, i)

    def digest(options: Options | None) -> int:
        model, certificate, error = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(320)
        given = None if options is None else ctypes.byref(options)
        assert library.lowbit_open(str(packed).encode(), given, ctypes.byref(model), error) == 0, error.value
        assert library.lowbit_certify(model, ctypes.byref(certificate), error) == 0, error.value
        library.lowbit_close(model)
        return certificate.value

    expected = digest(None)
    assert digest(Options(ctypes.sizeof(Options), 3, run_tasks(run))) == expected
    assert set(counts) <= {1, 2, 3} and max(counts) > 1


@pytest.mark.more
def test_a_program_in_rust(packed, decoder, tmp_path):
    """examples/rust, built by the command of its page."""
    library, program = Path(lowbit._C.__file__).parent, tmp_path / "tokens"
    command = ["rustc", "-O", "--edition", "2021", EXAMPLE.parent / "rust" / "tokens.rs", "-o", program, "-L", library]
    subprocess.run([*command, "-D", "warnings", "-C", f"link-arg=-Wl,-rpath,{library}"], check=True, timeout=600)

    def ran(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)

    step = lowbit.llm.load_decoder(packed / "lowbit.plan")
    expected = lowbit.llm.generate(decoder, PROMPT, 20, stop=step.stop).tokens
    done = ran(packed, 20, *PROMPT)
    assert done.returncode == 0 and [int(token) for token in done.stdout.split()] == expected, done.stderr
    for arguments, message in (
        ((packed / "none", 1, 0), "none does not open"),
        ((packed, 1, 1 << 20), "there is no token 1048576"),
        ((packed, 1, "x"), "'x' is not a number"),
        ((packed,), "usage: tokens MODEL COUNT ID..."),
    ):
        refused = ran(*arguments)
        assert refused.returncode == 1 and message in refused.stderr


def test_saved_texts(packed, tmp_path):
    """A text that Python saved goes on in another length, after others, and not with another model."""
    step = lowbit.llm.load_decoder(packed / "lowbit.plan", max_length=64, cache="int8")
    tokens, zero = torch.tensor([PROMPT]), torch.tensor([0])
    step(tokens, zero)
    assert step.save(tmp_path / "text") == len(PROMPT)
    following = torch.tensor([[7]]), torch.tensor([len(PROMPT)])
    expected = step(*following)
    other = lowbit.llm.load_decoder(packed / "lowbit.plan", max_length=16, cache="int8")
    assert other.use(3) == 0 and other.load(tmp_path / "text") == len(PROMPT)
    assert torch.equal(other(*following), expected)
    assert other.use(0) == 0
    other.end(3)
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"text {wrong} does not exist, or is in use"):
            other.end(wrong)
    with pytest.raises(ValueError, match="has caches of types 3 and 3; expected those of the text, 0 and 0"):
        lowbit.llm.load_decoder(packed / "lowbit.plan").load(tmp_path / "text")
    with pytest.raises(OSError, match="No such file"):
        other.load(tmp_path / "none")
