"""`lowbit report`: its figures compared with the library's, its page in a real browser."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import lowbit
import pytest
import torch
from browser import WATCH, browser
from checkpoints import change_tensors
from command_line import FLOAT, TINY, document, documented_keys, error, invoke, keys_in, run
from lowbit.calibration import model as calibration
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity
from lowbit.tools.report.measure_methods import same_neighbors
from needs import need_packages


def look(page: Path, width: int, height: int) -> dict:
    """Measurements of the page in a browser window of this size."""
    watched = page.with_name(f"watched-{width}.html")
    watched.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}"), encoding="utf-8")
    process = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
         f"--user-data-dir={page.parent / f'profile-{width}'}", f"--window-size={width},{height}", "--dump-dom",
         watched.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert ":CONSOLE" not in process.stderr, process.stderr
    return json.loads(html.unescape(re.search(r'<pre id="measured">(.*?)</pre>', process.stdout, re.S)[1]))


PLANES = "nearest, 16-bit activations"
OURS = ("nearest", "nearest, levels", PLANES, "importance", "auto", "auto, levels")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random model of two blocks with examples/tiny_llama's tokenizer, and inputs of different sizes."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("small") / "model"
    tokenizer = AutoTokenizer.from_pretrained(FLOAT)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
    ))  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A report on a short text: its directory and the command's output."""
    directory = tmp_path_factory.mktemp("report")
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    (directory / "text.txt").write_text(text[:1500], encoding="utf-8")
    (directory / "other.txt").write_text(text[-3000:], encoding="utf-8")
    options = ("--text", directory / "text.txt", "--window", 64)
    other = ("--calibrate", directory / "other.txt")
    calibrated = (*other, "--target-methods", "auto,importance", "--target-bits", "3.5,1")
    widths = ("--bits", "2", "--activation-bits", "8,16")
    result = run("report", small, directory, *options, *calibrated, *widths, "--json", "--threads", 1)
    assert result.returncode == 0, result.stderr
    return directory, options, calibrated, result


@pytest.mark.more
def test_figures_are_the_librarys(made, small):
    directory, _, _, result = made
    said = document(result)
    assert set(said) | keys_in(said["results"]) == documented_keys("report")
    rows = {(row["method"], row["bits"]): row for row in said["results"]}
    widths = {("widths by layer", 3.5), ("widths by layer, importance", 3.5)}
    ours = {("float", None)} | widths | {(method, 2) for method in OURS}
    assert ours <= set(rows)
    assert 3.4 < rows["widths by layer", 3.5]["bits_per_weight"] <= 3.5
    assert len({rows[each]["bytes"] for each in widths}) == 1 < len({rows[each]["quality"] for each in widths})
    assert all(row["family"] in ("GGUF", "torchao", "HQQ", "GPTQ") for key, row in rows.items() if key not in ours)
    assert all(rows[key]["tokens_per_second"] > 0 for key in rows if key[0] in ("float", "nearest", PLANES))

    tokens = load_tokenizer(small)((directory / "text.txt").read_text(encoding="utf-8"))["input_ids"]
    text = (directory / "other.txt").read_text(encoding="utf-8")
    for method, bits in (("float", None), ("nearest", 2), (PLANES, 2), ("auto, levels", 2)):
        model = load_model(small).float()
        if method.startswith("nearest"):
            activation_bits = 16 if method == PLANES else 8
            lowbit.quantize_(model, lowbit.LowBitConfig(bits, activation_bits=activation_bits).select(model))
        elif bits is not None:
            config = lowbit.LowBitConfig(bits, levels="fit")
            lowbit.calibrate(model, [text], config, tokenizer=load_tokenizer(small), window=64)
        if bits is not None:
            packed = {layer.packed_weight.data_ptr(): layer.packed_weight.nbytes for layer in model.modules()
                      if isinstance(layer, lowbit.nn.Packed)}  # fmt: skip
            assert rows[method, bits]["bytes"] == sum(packed.values())
        expected = perplexity(model, tokens, window=64, stride=32).perplexity
        assert rows[method, bits]["quality"] == pytest.approx(expected, rel=1e-4)
    assert said["measured_on"] == len(tokens) - 1

    # GPTQ: only the bytes of codes and scales, and float activations.
    packed, plain = load_model(small).float(), load_model(small).float()
    calibration.run(
        packed, [text], lowbit.LowBitConfig(2), "gptq", tokenizer=load_tokenizer(small), window=64, max_tokens=32768,
        progress=None, options={"correction": 0.0},
    )  # fmt: skip
    for name, layer in packed.named_modules():
        if isinstance(layer, lowbit.nn.Packed):
            plain.get_submodule(name).weight.data.copy_(layer.dequantize())
    assert rows["GPTQ 2 bits", None]["bits_per_weight"] == 2.5
    # A scale per 128 weights, or per shorter row, of 64 and 96.
    assert 2.125 < rows["GPTQ 2 bits, groups of 128", None]["bits_per_weight"] <= 2.25
    expected = perplexity(plain, tokens, window=64, stride=32).perplexity
    assert rows["GPTQ 2 bits", None]["quality"] == pytest.approx(expected, rel=1e-4)

    figures = json.loads((directory / "report.json").read_text())
    costs = {layer["layer"]: layer["cost"] for layer in figures["sensitivity"]["layers"]}
    assert len(costs) == 15 and max(costs.values()) > 0.001  # 14 layers, and the table, which is also the head
    assert any("1 bits per weight cannot be reached" in note for note in figures["notes"])
    assert type(load_model(small)).__name__ == said["architecture"]


@pytest.mark.more
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_page_in_a_browser(made, width, height):
    directory = made[0]
    page = directory / "report.html"
    source = page.read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)="(?!#|data:)', source) and "@import" not in source and "url(http" not in source
    axis = "perplexity (lower is better)"
    texts = ("Quality per byte", "Decoding", "Layers", "auto, 2 bits", "widths by layer, 3.5 bits", axis, "embed_tokens", "A16")
    for text in texts:
        assert text in source
    seen = look(page, width, height)
    assert seen["problems"] == [] and seen["loaded"] == [] and seen["doubled"] == 0
    assert seen["view"] == width and seen["width"] <= width  # no element makes the page wider than the window
    assert [box["plot"] for box in seen["boxes"]] == ["quality", "speed", "layers"]
    for box in seen["boxes"]:
        assert box["left"] >= 0 and box["left"] + box["width"] <= width
        assert box["width"] >= min(340, 0.85 * width) and box["height"] >= 200
        assert box["texts"] >= 6 and box["paths"] >= 10 and box["inside"]


@pytest.mark.more
def test_measured_methods_are_not_measured_again(made, small):
    directory, options, calibrated, _ = made
    before = json.loads((directory / "report.json").read_text())
    first = (directory / "report.html").read_text(encoding="utf-8")
    again = invoke("report", small, directory, *options, *calibrated[:-1], "3.5", "--bits", "2", "--threads", 1)
    assert again.exit_code == 0, again.stderr
    # Matrices that do not fit GGUF's blocks of 256 or HQQ's groups of 64 are handled separately, and the notes name them.
    before["notes"] = [note for note in before["notes"] if "cannot be reached" not in note]
    misfits = [f"{note.partition(': ')[0]} ..." for note in before["notes"]]
    assert {"GGUF TQ1_0 ...", "GGUF TQ2_0 ..."} <= set(misfits) or importlib.util.find_spec("gguf") is None
    assert again.stderr.splitlines() == [f"loading {small} ...", *misfits]
    assert json.loads((directory / "report.json").read_text()) == before
    # The same page except for the command, which is pytest's here.
    second = (directory / "report.html").read_text(encoding="utf-8")
    footer = re.compile(r"<footer>.*</footer>", re.S)
    assert footer.sub("", first) == footer.sub("", second)
    # With another width, only that is measured; with another text, everything.
    widths = ("--bits", "5,2", "--methods", "gptq")
    more = invoke("report", small, directory, *options, *calibrated[:-1], "3.5", *widths, "--threads", 1)
    assert [line for line in more.stderr.splitlines() if "bits" in line and not re.match("torchao|HQQ", line)] == [
        "nearest, 5 bits ...", "gptq, 5 bits ...", "gptq, 2 bits ...", "gptq, levels, 2 bits ...", "GPTQ 5 bits ...",
        "GPTQ 5 bits, groups of 128 ...",
    ]  # fmt: skip
    copied = directory / "copy.html"
    shutil.copy(directory / "report.json", directory / "copy.json")
    other = invoke(
        "report", small, copied, "--text", directory / "other.txt", "--bits", 4, "--skip-layers", "--skip-speed",
        "--window", 64, "--threads", 1,
    )  # fmt: skip
    assert "float ..." in other.stderr.splitlines()
    figures = json.loads((directory / "copy.json").read_text())
    assert {row["bits"] for row in figures["rows"] if row["family"] == "lowbit"} == {4}
    assert figures["sensitivity"] is None and not any(row["tokens_per_second"] for row in figures["rows"])
    page = copied.read_text(encoding="utf-8")
    assert 'data-plot="quality"' in page and 'data-plot="speed"' not in page and 'data-plot="layers"' not in page


@pytest.mark.more
def test_an_embedding_model(tmp_path):
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FLOAT)
    model = BertModel(BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    ))  # fmt: skip
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    sentences = [line for line in (TINY / "heldout.txt").read_text().splitlines() if len(line) > 40]
    (tmp_path / "text.txt").write_text("\n".join(sentences[:40]))
    (tmp_path / "other.txt").write_text("\n".join(sentences[100:200]))
    result = invoke(
        "report", tmp_path / "bert", tmp_path / "<b>page.html", "--text", tmp_path / "text.txt", "--calibrate",
        tmp_path / "other.txt", "--bits", "8,2", "--target-bits", "none", "--methods", "importance", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, (result.stderr, result.exception)
    said = json.loads(result.stdout)
    quality = {(row["method"], row["bits"]): row["quality"] for row in said["results"]}
    assert said["quality"] == "cosine" and said["measured_on"] == 40
    assert quality["float", None] == pytest.approx(1, abs=1e-5)
    assert quality["nearest", 8] > 0.99 > quality["nearest", 2]
    same = {(row["method"], row["bits"]): row["same_neighbors"] for row in said["results"]}
    assert same["float", None] == 1 and same["nearest", 8] > same["nearest", 2]
    assert not any(row["tokens_per_second"] for row in said["results"])
    page = (tmp_path / "<b>page.html").read_text(encoding="utf-8")
    assert "cosine with float (higher is better)" in page and "<b>" not in page
    assert f"<td>{same['nearest', 2]:.3f}</td>" in page
    dropped = "encoder.layer.1.output.dense.weight"  # torch would initialize it randomly
    change_tensors(tmp_path / "bert" / "model.safetensors", lambda tensors: tensors.pop(dropped))
    refused = invoke("report", tmp_path / "bert", tmp_path / "other.html", "--text", tmp_path / "text.txt")
    assert f"lacks 1 of the 39 tensors of BertModel: {dropped}" in error(refused)


def test_neighbors_that_stay():
    torch.manual_seed(0)
    both = [torch.nn.functional.normalize(torch.randn(12, 6), dim=1) for _ in range(2)]
    kept = []
    for rows in both:
        order = [sorted(set(range(12)) - {i}, key=lambda j, i=i, rows=rows: -float(rows[i] @ rows[j])) for i in range(12)]
        kept.append([set(each[:5]) for each in order])
    expected = sum(len(a & b) for a, b in zip(*kept, strict=True)) / 60
    assert same_neighbors(*both) == pytest.approx(expected)
    assert 0 < expected < 1 == same_neighbors(both[0], both[0]) == same_neighbors(both[0][:1], both[1][:1])


def test_refusals(packed, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Return the number of items in the list.")
    (tmp_path / "same.txt").write_text(text.read_text())
    (tmp_path / "r.json").write_text("[]")
    (tmp_path / "s.json").write_text("{")
    (tmp_path / "mine.html").write_text("<title>about lowbit</title>")
    (tmp_path / "earlier.html").write_text('<section><h2>All figures</h2><div class="wide"><table>')
    for arguments, message in (
        (
            (FLOAT, tmp_path / "r.pdf"),
            r"r\.pdf does not end in \.html; expected the name of the page, or an existing directory",
        ),
        ((FLOAT, tmp_path / "no" / "r.html"), "no is not a directory; make it first"),
        ((tmp_path / "no", tmp_path / "q.html"), "no is not a directory; expected a float checkpoint"),
        ((tmp_path / "no", tmp_path / "earlier.html"), "no is not a directory; expected a float checkpoint"),
        ((packed[0], tmp_path / "q.html"), "is packed already; a report needs the float checkpoint"),
        ((FLOAT, tmp_path / "r.html"), "r.json has no figures of a report; remove it, or choose another name"),
        ((FLOAT, tmp_path / "mine.html"), "mine.html exists and is not a report of lowbit; choose another name, or delete it"),
        ((FLOAT, tmp_path / "s.html"), "s.json is not JSON: .*; remove it, or choose another name"),
        ((FLOAT, tmp_path / "q.html", "--calibrate", tmp_path / "same.txt"), "are the same text; calibrate on"),
    ):
        assert re.search(message, error(invoke("report", *arguments, "--text", text))), message
    targets = (("--target-bits", value) for value in ("0.5", "nan", "some"))
    for wrong in (("--methods", "awq"), ("--target-methods", "auto;gptq"), ("--bits", "9"), ("--group-size", "20"), *targets):
        assert invoke("report", FLOAT, tmp_path / "q.html", "--text", text, *wrong).exit_code == 2
    assert not (tmp_path / "q.html").exists()


@pytest.mark.more
def test_without_matplotlib(tmp_path, run_python):
    (tmp_path / "text.txt").write_text("Return the number of items.")
    script = "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'lowbit'\nfrom lowbit.cli import main; main()"
    process = run_python(script, "report", FLOAT, tmp_path / "q.html", "--text", tmp_path / "text.txt")
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1
    assert "matplotlib is not installed" in process.stderr and "pip install matplotlib" in process.stderr


def test_where_others_are_ahead_is_said():
    from lowbit.tools.report.report_page import ahead

    def row(family: str, size: int, quality: float) -> dict:
        return {"family": family, "method": family, "bytes": size, "quality": quality}

    ours = [row("lowbit", 100, 40.0), row("lowbit", 200, 37.0), row("lowbit", 250, 37.5)]
    better, worse, smaller = row("GGUF", 199, 39.0), row("GGUF", 260, 37.2), row("HQQ", 99, 90.0)
    found = ahead([row("float", 1000, 36.0), *ours, worse, smaller, better], True)
    assert found == [(better, ours[0]), (smaller, None)]
    assert ahead([*ours, better, row("GGUF", 100, 40.5)], False) == [(row("GGUF", 100, 40.5), ours[0])]  # higher is better


@pytest.mark.more
def test_formats_of_other_projects():
    from lowbit.tools.report.peers import peers

    need_packages("gguf", "torchao")
    weight = torch.randn(48, 256)
    found = peers([8, 4], importance=False)
    bits = {"GGUF Q8_0": 8.5, "GGUF Q5_1": 6, "GGUF Q4_0": 4.5, "GGUF MXFP4": 4.25}
    bits |= {"torchao int8": 8.5, "torchao int4": 4.5}
    errors = {}
    for name, expected in bits.items():
        held, size = found[name].hold(weight, None)
        assert 8 * size / weight.numel() == expected and held.shape == weight.shape
        errors[name] = float((held - weight).norm() / weight.norm())
    assert errors["GGUF Q8_0"] < 0.01 and errors["torchao int8"] < 0.01
    assert 0.05 < errors["GGUF Q4_0"] < 0.12 and 0.05 < errors["torchao int4"] < 0.15
    # K- and I-quants need llama-cpp-python, which `make bench-peers` installs.
    if "GGUF Q4_K" in found:
        importance = torch.rand(256) ** 4
        plain, aimed = (held for held, _ in (
            found["GGUF Q4_K"].hold(weight, None),
            peers([4], importance=True)["GGUF Q4_K, importance"].hold(weight, importance),
        ))  # fmt: skip
        lost = [float(((held - weight).square() * importance).sum()) for held in (plain, aimed)]
        assert 0 < lost[1] < 0.95 * lost[0]
        for name, expected in (("IQ1_S", 1.5625), ("IQ1_M", 1.75), ("IQ2_XXS", 2.0625), ("IQ3_XXS", 3.0625)):
            held, size = peers([4], importance=True)[f"GGUF {name}, importance"].hold(weight, importance)
            assert 8 * size / weight.numel() == expected
            assert 0 < float(((held - weight).square() * importance).sum()) < float((weight.square() * importance).sum())
    # HQQ: 16 bits each for scale and zero per 64 weights.
    for width in (8, 3) if "HQQ 4 bits" in found else ():
        held, size = peers([width], importance=False)[f"HQQ {width} bits"].hold(weight, None)
        assert 8 * size / weight.numel() == width + 0.5 and held.shape == weight.shape
        assert float((held - weight).norm() / weight.norm()) < {8: 0.01, 3: 0.25}[width]
    for name in ("GGUF Q4_0", "torchao int4"):
        with pytest.raises(ValueError, match="a matrix has 40 inputs"):
            found[name].hold(torch.randn(16, 40), None)


def test_matrices_that_a_gguf_type_does_not_fit():
    from lowbit.tools.report.peers import Misfit, hold_all, peers

    need_packages("gguf")
    found = peers([4], importance=False)
    wide, narrow = torch.randn(16, 512), torch.randn(16, 96)
    # Like llama.cpp's quantizer: another type for some matrices; if that were all matrices, the model is left out.
    for name, other in {"TQ1_0": "Q4_0", "Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q3_K": "Q4_0", "IQ3_S": "IQ4_NL"}.items():
        if f"GGUF {name}" not in found:
            continue  # without llama-cpp-python
        peer = found[f"GGUF {name}"]
        held = list(hold_all(peer, [(wide, None), (narrow, None)]))
        for (weight, size), (expected, own) in zip(
            held, (peer.hold(wide, None), found[f"GGUF {other}"].hold(narrow, None)), strict=True
        ):
            assert torch.equal(weight, expected) and size == own
        with pytest.raises(Misfit, match="blocks of 256; a matrix has 96 inputs"):
            list(hold_all(peer, [(narrow, None)]))
    with pytest.raises(Misfit, match="a matrix has 40 inputs"):
        list(hold_all(found["GGUF Q4_0"], [(wide, None), (torch.randn(16, 40), None)]))


def test_a_format_between_two_of_lowbit_is_compared_with_both():
    from lowbit.tools.report.report_page import _ahead

    def row(family, bits, quality):
        return {
            "family": family, "method": "auto" if family == "lowbit" else family, "bits": round(bits), "bytes": int(100 * bits),
            "bits_per_weight": bits, "quality": quality,
        }  # fmt: skip

    rows = [row("float", 16.0, 10.0), row("lowbit", 4.84, 10.2), row("lowbit", 2.6, 14.0), row("GGUF", 4.5, 10.3)]
    text = _ahead({"rows": rows, "about": {"quality": "perplexity"}})
    assert "GGUF at 4.50 bits per weight: 10.30, against 14.00 of auto, 3 bits at 2.60, the best that was" in text
    assert "the smallest above has 10.20 of auto, 5 bits at 4.84. To measure lowbit at this size too: --target-bits 4.5" in text
    text = _ahead({"rows": [*rows, row("lowbit", 4.4, 10.4)], "about": {"quality": "perplexity"}})
    assert "against 10.40 of auto, 4 bits at 4.40</li>" in text
