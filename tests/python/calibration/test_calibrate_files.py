"""calibrate_checkpoint and `lowbit quantize --calibrate`: from file to file, and refusals."""

import os
import re
import shutil
import subprocess
import sys

import lowbit
import pytest
import torch
import transformers
from calibration_files import CONFIG, WORDS, hidden, make, packed_of, relative, save, source, text, words  # noqa: F401
from checkpoints import change_tensors
from command_line import document, error, invoke
from lowbit.calibration.checkpoint import calibrate_checkpoint
from lowbit.llm.loading import load_tokenizer

pytestmark = pytest.mark.more


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("method", ["gptq", "importance"])
def test_files_equal_the_model_in_memory(kind, method, tmp_path):
    """The bytes equal those of calibrate in memory and save_pretrained."""
    source = save(make(kind), tmp_path / "source")
    summary, result = calibrate_checkpoint(source, tmp_path / "out", CONFIG, words(2000), method)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    again = lowbit.calibrate(model, [words(2000)], CONFIG, method, tokenizer=tokenizer)
    assert result.methods == again.methods and set(result.methods.values()) == {method}
    assert result.tokens == again.tokens == result.text_tokens == 2000
    model.save_pretrained(tmp_path / "memory")
    ours, theirs = packed_of(tmp_path / "out"), packed_of(tmp_path / "memory")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(hidden(loaded), hidden(model))
    assert sorted(os.listdir(tmp_path)) == ["memory", "out", "source"]
    assert summary.target_bytes == sum(entry.bytes for entry in lowbit.inspect_checkpoint(tmp_path / "out"))


def test_a_matrix_in_bands_is_the_same(source, tmp_path, monkeypatch):
    from lowbit.calibration import bands

    calibrate_checkpoint(source, tmp_path / "one", CONFIG, words(1500))
    monkeypatch.setattr(bands, "_BAND_WEIGHTS", 64 * 32)
    calibrate_checkpoint(source, tmp_path / "other", CONFIG, words(1500))
    one, other = packed_of(tmp_path / "one"), packed_of(tmp_path / "other")
    for name in one:
        assert lowbit.verify(other[name]) == lowbit.info(one[name])
        # Float sums may have another order, but the first layers see the same inputs.
        same = (lowbit.unpack(one[name]).codes == lowbit.unpack(other[name]).codes).float().mean()
        assert same > 0.98 or ".layers." in name, name


def test_an_encoder_sees_each_line_by_itself(tmp_path):
    source = save(make("bert"), tmp_path / "source")
    config = lowbit.LowBitConfig(bits=2, overrides={"*pooler*": None})
    _, result = calibrate_checkpoint(source, tmp_path / "out", config, words(6000), "gptq")
    assert result.tokens == 6000 + 2 * 500  # each line, with the two tokens around it
    lowbit.quantize_checkpoint(source, tmp_path / "plain", config)
    load = transformers.AutoModel.from_pretrained
    wanted = hidden(load(source).eval())
    errors = [relative(hidden(load(tmp_path / name).eval()), wanted) for name in ("out", "plain")]
    assert errors[0] < 0.7 * errors[1], errors


def test_fitted_levels_from_file_to_file(source, text, tmp_path):
    options = ["--bits", 2, "--mapping", "levels", "--embedding-bits", "8"]
    said = document(invoke("quantize", source, tmp_path / "out", *options, "--calibrate", text, "--json"))
    assert set(said["methods"].values()) == {"gptq"}
    assert invoke("quantize", source, tmp_path / "plain", *options).exit_code == 0
    kinds = [{entry.name: (entry.mapping, entry.bits) for entry in lowbit.inspect_checkpoint(tmp_path / name)
              if entry.kind == "packed"} for name in ("out", "plain")]  # fmt: skip
    assert kinds[0] == kinds[1] and set(kinds[0].values()) == {("levels", 2), ("symmetric", 8)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    wanted = hidden(load(source).eval())
    errors = [relative(hidden(load(tmp_path / name).eval()), wanted) for name in ("out", "plain")]
    assert errors[0] < 0.8 * errors[1], errors


def test_layers_that_cannot_be_packed_stay_float_and_are_reported(tmp_path):
    """GPT-2's Conv1D is packed like any linear layer; only layers that the config excludes stay float."""
    source = save(make("gpt2"), tmp_path / "gpt2")
    config = lowbit.LowBitConfig(bits=3, overrides={"*.c_fc": None})
    summary, done = calibrate_checkpoint(source, tmp_path / "out", config, words(1500), "auto")
    assert set(summary.unquantized) == {f"transformer.h.{i}.mlp.c_fc.weight" for i in range(2)}
    assert done.methods["transformer.h.0.attn.c_attn"] == "gptq"
    load = transformers.AutoModelForCausalLM.from_pretrained
    wanted = hidden(load(source).eval())
    plain = load(source, quantization_config=config).eval()
    errors = [relative(hidden(model), wanted) for model in (load(tmp_path / "out").eval(), plain)]
    assert errors[0] < 0.8 * errors[1], errors
    assert hidden(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()).isfinite().all()


@pytest.mark.parametrize("method", ["auto", "tuned"])
def test_experts_in_one_tensor_are_calibrated_too(method, tmp_path):
    source, text = save(make("mixtral"), tmp_path / "mixtral"), words(800)

    def stop(step, done, total, detail):
        if done == 20:  # in the second of three blocks: four layers and 2 x 4 matrices of experts each
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, tmp_path / "out", CONFIG, text, method, progress=stop)
    _, result = calibrate_checkpoint(source, tmp_path / "out", CONFIG, text, method)
    assert result.resumed >= 6
    out, inside = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "mixtral"))
    found = [how for name, how in result.methods.items() if ".experts." in name]
    assert len(found) == 3 * 2 * 4 and ("tuned" in found) == (method == "tuned")  # there is enough text
    expected = lowbit.calibrate(inside.eval(), [text], CONFIG, method, tokenizer=load_tokenizer(source))
    assert result.methods == expected.methods
    found, expected = out.state_dict(), inside.state_dict()
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 6 and all(torch.equal(found[name], expected[name]) for name in experts)
    assert hidden(out.eval()).isfinite().all()


def test_bfloat16_stays_mapped(source, tmp_path):
    """Weights are read from the mapped file, so allocated memory is far smaller than the weights."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
            num_key_value_heads=8, tie_word_embeddings=True,
        )
    )  # fmt: skip
    large = save(model.to(torch.bfloat16), tmp_path / "large")
    size = (large / "model.safetensors").stat().st_size
    del model
    script = f"""
import lowbit
from lowbit.calibration.journal import Journal
def own():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
def calibrate(source, target):
    lowbit.calibrate_checkpoint(source, target, lowbit.LowBitConfig(bits=1), {words(300)!r}, "importance")
calibrate({str(source)!r}, {str(tmp_path / "first")!r})  # imports, and what torch keeps
before, most, keep = own(), [], Journal.keep
def spy(*arguments):
    most.append(own())
    return keep(*arguments)
Journal.keep = spy
calibrate({str(large)!r}, {str(tmp_path / "out")!r})
print(len(most), max(most) - before)
"""
    # With glibc's default threshold, which grows, freed bands stay in the heap as holes between smaller blocks.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    assert size > 90e6
    layers, grown = map(int, result.stdout.split())
    assert layers == 1 + 12 * 7 and grown < 0.4 * size, (grown, size)


# ---- refusals


@pytest.mark.parametrize(
    "case, message",
    [
        ("short", r"the calibration text has 12 tokens; expected at least 128"),
        ("binary", r"is not UTF-8 text: .* at byte 0"),
        ("missing", r"No such file"),
        ("tokenizer", r"has no tokenizer.json"),
        ("method", r"method is 'awq'; expected one of 'auto', 'gptq', 'importance', 'tuned', 'distilled'"),
        ("nan", r"the inputs of model.layers.1.self_attn.\w+ have NaN or infinite values on the calibration text"),
        ("blocks", r"LlamaForCausalLM has no list of blocks with layers to quantize, which gptq goes through"),
        ("taken", r"has 1 files; expected a directory that is empty"),
    ],
)
def test_refused_in_one_line(case, message, source, text, tmp_path):
    copied, other, out, more = shutil.copytree(source, tmp_path / "source"), tmp_path / "text.txt", tmp_path / "out", []
    shutil.copy(text, other)
    if case == "short":
        other.write_text(words(12))
    elif case == "binary":
        other.write_bytes(b"\xff\xfe\x00")
    elif case == "missing":
        other.unlink()
    elif case == "tokenizer":
        (copied / "tokenizer.json").unlink()
        (copied / "tokenizer_config.json").unlink()
    elif case == "method":
        more = ["--method", "awq"]
    elif case == "nan":
        name = "model.layers.1.input_layernorm.weight"
        change_tensors(copied / "model.safetensors", lambda tensors: tensors[name].fill_(torch.inf))
    elif case == "blocks":
        more = ["--method", "gptq", "--override", "model.layers.*=float"]
    elif case == "taken":
        out.mkdir()
        (out / "file").write_text("")
    before = sorted(os.listdir(tmp_path))
    assert re.search(message, error(invoke("quantize", copied, out, "--calibrate", other, *more)))
    assert sorted(os.listdir(tmp_path)) == before
