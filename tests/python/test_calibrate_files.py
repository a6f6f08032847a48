"""calibrate_checkpoint and `lowbit quantize --calibrate`: from file to file, resumed, and within a budget."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import lowbit
from checkpoints import change_tensors
from command_line import documented_keys, document, error, invoke
from lowbit.calibration import checkpoint as implementation
from lowbit.calibration import distilling
from lowbit.calibration.checkpoint import calibrate_checkpoint
from lowbit.calibration.journal import Journal
from lowbit.calibration.widths import Item, Option, _hull, assign, extremes
from lowbit.checkpoint import planned_size
from lowbit.llm.loading import load_tokenizer

WORDS = 120
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIG = lowbit.LowBitConfig(bits=3)


def words(count: int, seed: int = 0, per_line: int = 12) -> str:
    """A text in which a word says much about the next."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 6, (count,), generator=generator).cumsum(0) * 7 % WORDS
    listed = [f"w{step}" for step in steps.tolist()]
    return "\n".join(" ".join(listed[at : at + per_line]) for at in range(0, count, per_line))


def save(model, path: Path) -> Path:
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "Bert" in type(model).__name__:
        tokenizer.post_processor = TemplateProcessing(single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def make(kind: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    if kind == "bert":
        config = transformers.BertConfig(**SIZES, intermediate_size=96, max_position_embeddings=64, initializer_range=0.1)
        model = transformers.BertModel(config)
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        )
    elif kind == "mixtral":
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=32, num_local_experts=4)
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SIZES, num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
                tie_word_embeddings=kind == "tied", initializer_range=0.1,
            )  # fmt: skip
        )
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save(make("tied"), tmp_path_factory.mktemp("calibrate") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "text.txt"
    path.write_text(words(1200))
    return path


def packed_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for name, value in load_file(path / "model.safetensors").items() if name.endswith(".packed_weight")}


def hidden(model, seed: int = 7) -> torch.Tensor:
    ids = torch.tensor([[int(word[1:]) for word in line.split()] for line in words(600, seed).splitlines()])
    with torch.no_grad():
        output = model(input_ids=ids)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state).float()


def mean_bits(model) -> float:
    """Bits per packed weight; small matrices have more than their codes and scales."""
    packed = [module.info for module in model.modules() if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding)]
    return 8 * sum(info.total_bytes for info in packed) / sum(info.out_features * info.in_features for info in packed)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())


# ---- what is written


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("method", ["gptq", "importance"])
def test_files_have_what_memory_has(kind, method, tmp_path):
    """The same bytes as calibrate in memory and save_pretrained."""
    source = save(make(kind), tmp_path / "source")
    summary, result = calibrate_checkpoint(source, tmp_path / "out", CONFIG, words(2000), method)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    again = lowbit.calibrate(model, [words(2000)], CONFIG, method, tokenizer=tokenizer)
    assert result.methods == again.methods and set(result.methods.values()) == {method}
    assert result.tokens == again.tokens == result.there == 2000
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
        # Sums of floats may come in another order; the first layers see the same inputs.
        same = (lowbit.unpack(one[name]).codes == lowbit.unpack(other[name]).codes).float().mean()
        assert same > 0.98 or ".layers." in name, name


def test_an_encoder_sees_each_line_by_itself(tmp_path):
    source = save(make("bert"), tmp_path / "source")
    config = lowbit.LowBitConfig(bits=2, overrides={"*pooler*": None})
    _, result = calibrate_checkpoint(source, tmp_path / "out", config, words(6000), "gptq")
    assert result.tokens == 6000 + 2 * 500  # of each line with the two tokens that are put around it
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


def test_what_cannot_be_packed_stays_float_and_is_said(tmp_path):
    """GPT-2's Conv1D is packed like any linear layer: what stays float is what the config says."""
    source = save(make("gpt2"), tmp_path / "gpt2")
    config = lowbit.LowBitConfig(bits=3, overrides={"*.c_fc": None})
    summary, done = calibrate_checkpoint(source, tmp_path / "out", config, words(1500), "auto")
    assert set(summary.left) == {f"transformer.h.{i}.mlp.c_fc.weight" for i in range(2)}
    assert done.methods["transformer.h.0.attn.c_attn"] == "gptq"
    load = transformers.AutoModelForCausalLM.from_pretrained
    wanted = hidden(load(source).eval())
    plain = load(source, quantization_config=config).eval()
    errors = [relative(hidden(model), wanted) for model in (load(tmp_path / "out").eval(), plain)]
    assert errors[0] < 0.8 * errors[1], errors
    assert hidden(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()).isfinite().all()


def test_experts_in_one_tensor_are_calibrated_too(tmp_path):
    source, text = save(make("mixtral"), tmp_path / "mixtral"), words(1500)

    def stop(step, done, total, detail):
        if done == 20:  # in the second of three blocks: four layers and 2 x 4 matrices of experts each
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, tmp_path / "out", CONFIG, text, "auto", progress=stop)
    _, result = calibrate_checkpoint(source, tmp_path / "out", CONFIG, text, "auto")
    assert result.resumed >= 6
    out, inside = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "mixtral"))
    assert sum(".experts." in name for name in result.methods) == 3 * 2 * 4
    expected = lowbit.calibrate(inside.eval(), [text], CONFIG, tokenizer=load_tokenizer(source))
    assert result.methods == expected.methods
    found, expected = out.state_dict(), inside.state_dict()
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 6 and all(torch.equal(found[name], expected[name]) for name in experts)
    assert hidden(out.eval()).isfinite().all()


def test_a_size_for_a_model_with_experts(tmp_path):
    source, text = save(make("mixtral"), tmp_path / "mixtral"), words(1500)
    whole = planned_size(source, lowbit.LowBitConfig(bits=4)).bytes
    summary, result = calibrate_checkpoint(source, tmp_path / "out", lowbit.LowBitConfig(), text, "auto", target_bytes=whole)
    assert 0.9 * whole < summary.target_bytes <= whole  # a tensor of experts takes one width
    assert sum(".experts." in name for name in result.methods) == 3 * 2 * 4
    with pytest.raises(ValueError, match="bytes cannot be had; the weights' files of this model take"):
        calibrate_checkpoint(source, tmp_path / "none", lowbit.LowBitConfig(), text, "auto", target_bytes=whole // 8)


def test_bfloat16_stays_mapped(source, tmp_path):
    """Weights are read from the mapping of the file: what is taken of memory itself is far less than they are."""
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
    # With glibc's own threshold, which grows, freed bands stay in its heap as holes between smaller pieces.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    assert size > 90e6
    layers, grown = map(int, result.stdout.split())
    assert layers == 1 + 12 * 7 and grown < 0.4 * size, (grown, size)


# ---- on again after a kill


def killed_after(layers: int, arguments: list[str], run_python):
    script = f"""
import os, signal
from lowbit.calibration import journal
from lowbit.cli import main
keep, calls = journal.Journal.keep, 0
def killed(*arguments):
    global calls
    calls += 1
    result = keep(*arguments)
    if calls == {layers}:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
journal.Journal.keep = killed
main()
"""
    result = run_python(script, *arguments)
    assert result.returncode == -signal.SIGKILL, (result.returncode, result.stderr)


# What is kept before the kill: the table, which is the head too, and layer after layer, or block after block.
@pytest.mark.parametrize("method, budget, kept, resumed", [("gptq", [], 9, 10), ("tuned", ["--target-bits", "6"], 2, 9)])
def test_a_killed_run_goes_on(method, budget, kept, resumed, source, text, tmp_path, run_python):
    options = ["--calibrate", text, "--method", method, *budget]
    expected = document(invoke("quantize", source, tmp_path / "whole", *options, "--json"))
    assert expected["resumed_layers"] == 0 and set(expected) == documented_keys("quantize")
    killed_after(kept, ["quantize", source, tmp_path / "out", *options], run_python)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.calibration").is_dir()
    said = document(invoke("quantize", source, tmp_path / "out", *options, "--json"))
    assert said["resumed_layers"] == resumed  # the table and the head are two of them
    assert said["methods"] == expected["methods"]
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_distilled_run_that_is_stopped_goes_on(source, text, tmp_path, monkeypatch):
    """Stopped behind the learning, when all layers are there for the second time."""
    monkeypatch.setattr(distilling, "STEPS", 8)
    config = lowbit.LowBitConfig(bits=2, levels="fit")
    _, whole = calibrate_checkpoint(source, tmp_path / "whole", config, text.read_text(), "distilled")
    assert set(whole.methods.values()) == {"distilled"}
    keep = Journal.keep

    def stopped(journal, layers):
        result = keep(journal, layers)
        if layers[0][1] == "distilled":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Journal, "keep", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate_checkpoint(source, tmp_path / "out", config, text.read_text(), "distilled")
    monkeypatch.setattr(Journal, "keep", keep)
    monkeypatch.setattr(distilling, "distilled", None)  # nothing is learnt again
    _, again = calibrate_checkpoint(source, tmp_path / "out", config, text.read_text(), "distilled")
    assert again.methods == whole.methods and again.resumed == len(whole.methods) + 1  # and the table
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("change", ["text", "source", "config", "method", "damage"])
def test_what_an_earlier_run_left_is_only_used_where_it_is_the_same(change, source, text, tmp_path, run_python):
    copied = shutil.copytree(source, tmp_path / "source")
    shutil.copy(text, tmp_path / "text.txt")
    options = ["quantize", copied, tmp_path / "out", "--calibrate", tmp_path / "text.txt"]
    killed_after(4, options, run_python)
    if change == "text":
        (tmp_path / "text.txt").write_text(words(1199))
    elif change == "source":
        change_tensors(copied / "model.safetensors", lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    elif change == "damage":
        file = sorted((tmp_path / ".out.calibration").glob("*.packed"))[1]
        damaged = bytearray(file.read_bytes())
        damaged[100] ^= 1
        file.write_bytes(damaged)
    more = {"config": ["--bits", 3], "method": ["--method", "importance"]}.get(change, [])
    result = invoke(*options, *more, "--json")
    assert result.exit_code == 0, result.stderr
    # The first layer that is whole is still good: table and head.
    assert json.loads(result.stdout)["resumed_layers"] == (2 if change == "damage" else 0)
    warnings = [line for line in result.stderr.splitlines() if line.startswith("lowbit: warning: ")]
    if change == "damage":
        assert warnings == []
    else:
        assert len(warnings) == 1 and f"had another {change}: begun anew" in warnings[0]
    assert invoke(*[*options[:2], tmp_path / "whole", *options[3:]], *more).exit_code == 0
    ours, theirs = packed_of(tmp_path / "out"), packed_of(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_runs_for_one_target(source, text, tmp_path):
    with Journal(tmp_path / "out", {"source": "another"}):
        assert "in use: another run calibrates" in error(
            invoke("quantize", source, tmp_path / "out", "--calibrate", text)
        )


# ---- within a budget


def weights_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def test_a_target_size_is_met_to_the_byte(source, text, tmp_path):
    sizes = {}
    for bits in (2, 5):
        lowbit.quantize_checkpoint(source, tmp_path / f"{bits}", lowbit.LowBitConfig(bits=bits))
        sizes[bits] = weights_bytes(tmp_path / f"{bits}")
    largest = 0
    for target in (sizes[2] + 1, sizes[2] + 4000, sizes[5] - 1):
        out = tmp_path / f"target-{target}"
        options = ["--calibrate", text, "--target-size", target, "--method", "importance"]
        said = document(invoke("quantize", source, out, *options, "--json"))
        found = weights_bytes(out)
        assert largest < found <= target and target - found < 4000
        largest = found
        entries = [entry for entry in lowbit.inspect_checkpoint(out) if entry.kind == "packed"]
        assert len({(entry.bits, entry.group_size) for entry in entries}) > 1
        assert all(1 <= entry.bits <= 8 and entry.group_size in (16, 32, 64, 128) for entry in entries)
        assert said["bits_per_weight"] == 8 * said["packed_bytes"] / said["packed_weights"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert hidden(loaded).isfinite().all()


def test_what_is_named_keeps_its_width(source, text, tmp_path):
    options = ["--calibrate", text, "--target-bits", 7, "--method", "importance"]
    pins = ["--override", "*.0.*=7,64", "--override", "*.1.mlp.*=float", "--embedding-bits", "8"]
    assert invoke("quantize", source, tmp_path / "out", *options, *pins).exit_code == 0
    entries = {entry.name: entry for entry in lowbit.inspect_checkpoint(tmp_path / "out")}
    assert entries["model.embed_tokens.packed_weight"].bits == 8
    named = [entry for name, entry in entries.items() if ".layers.0." in name and entry.kind == "packed"]
    assert {(entry.bits, entry.group_size) for entry in named} == {(7, 64)}
    assert all(entry.kind != "packed" for name, entry in entries.items() if ".layers.1.mlp" in name)


def test_widths_in_memory_and_that_they_pay():
    model = make("untied")
    # Blocks that differ: the first matters most.
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data.mul_((4.0, 1.0, 0.05)[at])
        layer.mlp.down_proj.weight.data.mul_((4.0, 1.0, 0.05)[at])
    ids = [torch.tensor([[int(word[1:]) for word in words(48, seed).split()]]) for seed in range(20)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = lowbit.assign_widths(model, ids, lowbit.LowBitConfig(bits=3), 5.4)
    assert config.overrides == lowbit.assign_widths(model, ids, lowbit.LowBitConfig(bits=3), 5.4).overrides
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    chosen = {name: each for name, each in config.select(model).items() if "down_proj" in name}
    assert chosen["model.layers.0.mlp.down_proj"].bits > chosen["model.layers.2.mlp.down_proj"].bits
    wanted = hidden(model)
    uniform, mixed = make("untied"), make("untied")
    for each in (uniform, mixed):
        each.load_state_dict(before)
    lowbit.calibrate(uniform, ids, lowbit.LowBitConfig(bits=3), "importance")
    lowbit.calibrate(mixed, ids, lowbit.LowBitConfig(bits=3), "importance", target_bits=mean_bits(uniform))
    assert mean_bits(uniform) - 0.1 < mean_bits(mixed) <= mean_bits(uniform)
    assert relative(hidden(mixed), wanted) < 0.8 * relative(hidden(uniform), wanted)


def test_assignment_is_best_at_its_size():
    """Against all combinations: none of the same size or less is better where the budget is a corner of the hull."""
    import itertools

    generator = torch.Generator().manual_seed(0)
    items = []
    for index in range(4):
        losses = torch.rand(5, generator=generator).cumsum(0).flip(0) * 10**index
        options = [Option(100 + 60 * at + 7 * index, float(loss), None) for at, loss in enumerate(losses)]
        items.append(Item([f"layer{index}"], 1000, options, None))
    smallest, largest = extremes(items)
    seen = set()
    for most in range(smallest, largest + 1, 13):
        chosen = assign(items, most)
        total, loss = sum(each.bytes for each in chosen), sum(each.loss for each in chosen)
        assert total <= most
        seen.add(total)
        everything = list(itertools.product(*(item.options for item in items)))
        best = min(sum(each.loss for each in way) for way in everything if sum(each.bytes for each in way) <= most)
        hulls = [_hull(item.options) for item in items]
        step = max(first.loss - second.loss for hull in hulls for first, second in zip(hull, hull[1:]))
        assert loss <= best + step  # a budget between two corners of the hull loses at most one step
    assert len(seen) > 5
    with pytest.raises(ValueError, match=f"the smallest widths take {smallest} bytes"):
        assign(items, smallest - 1)


# ---- what is refused


def test_budgets_that_cannot_be(source, text, tmp_path):
    out = tmp_path / "out"
    for target in ("1kB", "1GB"):
        said = error(invoke("quantize", source, out, "--calibrate", text, "--target-size", target))
        found = re.search(r"cannot be had; .* take (\d+) bytes at the least and (\d+) at the most", said)
        assert found, said
        assert int(found[1]) < int(found[2])
    # Both ends can be had.
    for end in found.groups():
        options = ["--calibrate", text, "--target-size", end, "--method", "importance"]
        assert invoke("quantize", source, tmp_path / end, *options).exit_code == 0
    assert weights_bytes(tmp_path / found[1]) == int(found[1])
    for bits in (1.1, 20):
        said = error(invoke("quantize", source, out, "--calibrate", text, "--target-bits", bits))
        assert re.search(r"bits per weight cannot be had; this model takes [\d.]+ at the least and [\d.]+ at the", said)
    assert "--calibrate" in error(invoke("quantize", source, out, "--target-bits", 3))
    assert "expected one of them" in error(
        invoke("quantize", source, out, "--calibrate", text, "--target-bits", 3, "--target-size", "1MB")
    )
    assert invoke("quantize", source, out, "--calibrate", text, "--target-size", "much").exit_code == 2
    assert sorted(os.listdir(tmp_path)) == sorted(found.groups())


@pytest.mark.parametrize(
    "case, message",
    [
        ("short", r"the calibration text has 12 tokens; expected at least 128"),
        ("binary", r"is not UTF-8 text: .* at byte 0"),
        ("missing", r"No such file"),
        ("tokenizer", r"has no tokenizer.json"),
        ("method", r"method is 'awq'; expected one of 'auto', 'gptq', 'importance', 'tuned', 'distilled'"),
        ("nan", r"the inputs of model.layers.1.self_attn.\w+ have NaN or infinite values on the calibration text"),
        ("blocks", r"LlamaForCausalLM has no list of blocks with layers to quantise, which gptq goes through"),
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
