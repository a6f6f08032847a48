"""Speculative decoding with a model's own multi-token prediction head."""

import json
import shutil
import warnings

import lowbit
import pytest
import torch
import transformers
from command_line import FLOAT, document, invoke
from lowbit import llm
from lowbit.llm.batch import Batch, Text
from lowbit.llm.loading import load_model
from mtp_checkpoints import KINDS, is_beside, reference, without_head, write

pytestmark = pytest.mark.first

PROMPT = [5, 9, 3, 22, 17, 5, 9, 3, 22, 17, 5, 9]
DRAWN = {"temperature": 0.8, "top_k": 40, "seed": 3}
CONFIG = lowbit.LowBitConfig(bits=4, group_size=32, embedding_bits=4)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def quantized(path, config=CONFIG):
    """The packed checkpoint of a float one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no tensor is unused
        lowbit.quantize_checkpoint(path, path.with_name(f"{path.name}-packed"), config)
    return path.with_name(f"{path.name}-packed")


@torch.inference_mode()
def test_guesses_are_those_of_the_heads_definition(kind, tmp_path):
    """After each token, after wrong guesses, after another text with the same prefix, and with a part of the text."""
    tensors = write(kind, tmp_path / "float")
    config = json.loads((tmp_path / "float/config.json").read_text())
    expected = reference(kind, tensors, config, tmp_path / "reference")
    model = load_model(tmp_path / "float")
    text = torch.randint(2, 320, [40], generator=torch.Generator().manual_seed(1)).tolist()
    states = model.model(torch.tensor([text])).last_hidden_state[0]

    def guesses_of(begin: int, end: int, count: int = 3) -> list[int]:
        hidden, following, found = states[begin:end], text[begin + 1 : end + 1], []
        for _ in range(count):
            results, guesses = expected(hidden, following)
            found.append(guesses[-1])
            hidden, following = torch.cat([hidden, results[-1:]]), [*following, guesses[-1]]
        return found

    decoder = llm.Decoder(model, 64)
    mtp = llm.Mtp(decoder, tmp_path / "float")

    def call(begin: int, tokens: list[int]) -> None:
        decoder.all_logits(torch.tensor([tokens]), torch.tensor([begin]))

    call(0, text[:5])
    for end in range(5, 12):
        assert mtp.guess(text[: end + 1], 3) == guesses_of(0, end)
        call(end, text[end : end + 1])
    assert mtp.guess(text[:13], 1) == guesses_of(0, 12, 1) and mtp.guess(text[:13], 0) == []
    call(12, [*text[12:15], 7, 8])  # the last two guesses were wrong
    assert mtp.guess(text[:16], 3) == guesses_of(0, 15)
    call(12, text[12:18])  # tokens are computed again, as with states that cannot be cut back
    assert mtp.guess(text[:19], 3) == guesses_of(0, 18)
    assert mtp.guess([*text[:10], 1, *text[11:19]], 3) == []  # another text
    call(0, text[:20])
    assert mtp.guess(text[:21], 3) == guesses_of(0, 20)
    copied = decoder.read(text[:30])
    mtp.note(200, [1], states[:1])  # an unrelated text
    assert decoder.begin(copied, text[:36]) == 30
    call(30, text[30:35])
    assert mtp.guess(text[:36], 3) == guesses_of(30, 35)  # the states of copied tokens are not known
    mtp.release()
    call(0, text[:20])
    assert mtp.guess(text[:21], 3) == []


def test_the_text_is_that_of_plain_decoding(kind, tmp_path):
    """With a head that is always right, and with a random one."""
    for agreeing in (True, False):
        path = tmp_path / str(agreeing)
        write(kind, path, agreeing)
        decoder = llm.Decoder(load_model(quantized(path)), 96)
        mtp = llm.Mtp(decoder)
        for settings in ({}, DRAWN):
            plain = llm.generate(decoder, PROMPT, 40, **settings)
            for guesses in (1, 3):
                found = llm.generate(decoder, PROMPT, 40, guesses=guesses, draft=mtp, **settings)
                assert (found.tokens, found.stopped, found.decode_steps) == (plain.tokens, plain.stopped, plain.decode_steps)
                assert found.decode_calls <= 39 and found.guessed > 0
                if agreeing and not settings:
                    assert found.accepted == found.guessed == 39 - found.decode_calls
        assert decoder.recurrent == is_beside(kind)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])  # with states, and with experts
@torch.inference_mode()
def test_plans(kind, tmp_path):
    """The model and its head run by plans: guesses, texts and exported plans are those of the Python code."""
    write(kind, tmp_path / "float")
    path = quantized(tmp_path / "float")
    planned, plain = llm.Decoder(load_model(path), 96), llm.Decoder(load_model(path), 96, plan=False)
    heads = [llm.Mtp(decoder) for decoder in (planned, plain)]
    assert planned.plan_refusal is heads[0].plan_refusal is None
    assert heads[1].plan_refusal == plain.plan_refusal == "it is switched off"
    text = [(7 * i * i + 5) % 300 + 4 for i in range(60)]
    for begin, end in ((0, 21), (21, 22), (22, 25), (22, 24), (24, 60)):  # the fourth call cuts the text back
        found = []
        for decoder, mtp in zip((planned, plain), heads, strict=True):
            decoder.all_logits(torch.tensor([text[begin:end]]), torch.tensor([begin]))
            found.append(mtp.guess([*text[:end], 9], 4))
        assert found[0] == found[1] and len(found[0]) == 4
    for settings in ({}, DRAWN):
        expected = llm.generate(plain, PROMPT, 40, **settings)
        for decoder, mtp in zip((planned, plain), heads, strict=True):
            found = llm.generate(decoder, PROMPT, 40, guesses=3, draft=mtp, **settings)
            assert found.tokens == expected.tokens and found.guessed > found.accepted
    for decoder in (planned, plain):
        decoder.read(PROMPT)
    assert heads[0].guess([*PROMPT, 9], 4) == heads[1].guess([*PROMPT, 9], 4) != []
    llm.export_decoder(planned, path / "model.plan")
    program, start = llm.load_decoder(path / "model.plan", max_length=96), torch.tensor([0])
    assert torch.equal(program(torch.tensor([PROMPT]), start), planned(torch.tensor([PROMPT]), start))
    assert planned.plan_refusal is heads[0].plan_refusal is None
    next(heads[0]._head.parameters()).mul_(2)
    heads[0].guess([*PROMPT, 9], 1)
    assert "the model has been changed" in heads[0].plan_refusal and planned.plan_refusal is None


@pytest.fixture
def row_by_row(monkeypatch):
    """Makes float layers such as routers multiply one row at a time, because MKL rounds several rows differently."""
    usual = torch.nn.functional.linear

    def linear(x, *weights):
        return torch.cat([usual(row, *weights) for row in x.reshape(-1, 1, x.shape[-1])]).reshape(*x.shape[:-1], -1)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


@pytest.mark.more
@pytest.mark.usefixtures("row_by_row")
def test_texts_of_a_batch(kind, tmp_path):
    """A single text uses guesses, and continues without them when another one starts; also with states."""
    for agreeing in (True, False):
        write(kind, tmp_path / str(agreeing), agreeing)
        decoder = llm.Decoder(load_model(quantized(tmp_path / str(agreeing))), 256)
        prompts, counts = [PROMPT, PROMPT[:5], PROMPT[3:]], [240, 10, 30]
        plain = [llm.generate(decoder, ids, count, **DRAWN) for ids, count in zip(prompts, counts, strict=True)]
        batch, kept = Batch(decoder), {}
        batch.speculate(3, llm.Mtp(decoder))
        batch.ending = lambda text, caches, kept=kept: kept.update({text: caches})
        drawn = {name: value for name, value in DRAWN.items() if name != "seed"}
        texts = [Text(ids, count, llm.Sampling(**drawn), 3) for ids, count in zip(prompts, counts, strict=True)]
        batch.add(texts[0])
        while len(getattr(texts[0].result, "tokens", [])) < 20:
            batch.step()
        before = texts[0].result.guessed
        batch.add(texts[1])
        batch.step()
        assert texts[0].result.guessed == before > 0
        while batch.step():
            pass
        batch.add(texts[2])
        while batch.step():
            pass
        for text, expected in zip(texts, plain, strict=True):
            assert (text.result.tokens, text.result.stopped) == (expected.tokens, expected.stopped)
            # Caches kept for later texts match their tokens.
            caches = kept[text]
            known = text.prompt + text.result.tokens
            assert caches.tokens == known[: len(caches.tokens)] and len(caches.tokens) >= len(known) - 16
            following = known[len(caches.tokens) :]
            with torch.inference_mode():
                logits = decoder(torch.tensor([known]), torch.tensor([0]))[0]
                # Routers are float, so the last bit may depend on the number of rows.
                torch.testing.assert_close(decoder.run_texts([(caches, following)])[0], logits, rtol=0.01, atol=0.05)
        assert texts[0].result.guessed > texts[0].result.accepted > 0 or not agreeing


def test_tensors_that_quantizing_keeps(kind, tmp_path):
    """Every matrix of the head is packed; tables shared with the model are left out; the model loads as before."""
    write(kind, tmp_path / "float")
    packed = quantized(tmp_path / "float")
    prefix = "mtp." if is_beside(kind) else "model.layers.2."
    _, before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", output_loading_info=True)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(packed, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert bool(before["unexpected_keys"]) == (not is_beside(kind))
    names = {
        name: stored.shape
        for name, stored in lowbit.files.safetensors.read_files([packed / "model.safetensors"]).items()
        if name.startswith(prefix)
    }
    projection = f"{prefix}{'fc' if is_beside(kind) else 'eh_proj'}"
    assert f"{projection}.packed_weight" in names and f"{projection}.weight" not in names
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names)
    floats = {name for name, shape in names.items() if len(shape) > 1 and "packed" not in name}
    assert all(name.endswith(("gate.weight", "shared_expert_gate.weight")) for name in floats), floats
    # A float head of a packed model.
    config = lowbit.LowBitConfig(bits=4, overrides={f"{prefix}*": None})
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "float-head", config)
    half = llm.Mtp(llm.Decoder(load_model(tmp_path / "float-head"), 64))
    assert not any(isinstance(module, lowbit.nn.Packed) for module in half._head.modules())
    lowbit.dequantize_checkpoint(packed, tmp_path / "back")
    back = llm.Mtp(llm.Decoder(load_model(tmp_path / "back"), 64))
    assert back.vocabulary == 320
    # Quantizing a float checkpoint while loading gives the same head.
    quantization = lowbit.LowBitConfig(bits=4, group_size=32, embedding_bits=4)
    decoder = llm.Decoder(load_model(tmp_path / "float", quantization), 64)
    at_once = llm.Mtp(decoder, quantization=quantization)
    other = llm.Decoder(model.eval(), 64)
    of_files = llm.Mtp(other)
    with torch.inference_mode():
        for step in (decoder, other):
            step(torch.tensor([PROMPT]), torch.tensor([0]))
        assert at_once.guess([*PROMPT, 4], 4) == of_files.guess([*PROMPT, 4], 4)


def test_tables_that_differ_from_the_models_are_kept(tmp_path):
    tensors = write("deepseek_v3", tmp_path / "float")
    name = "model.layers.2.shared_head.head.weight"
    tensors[name] += 1
    without_head(tmp_path / "float", tensors, "nothing")
    with pytest.warns(UserWarning, match=rf"1 matrix of the files \(81.9 kB\), {name} for example"):
        lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", CONFIG)
    assert name in lowbit.files.safetensors.read_files([tmp_path / "packed/model.safetensors"])


def test_refusals(kind, tmp_path):
    tensors = write(kind, tmp_path / "float")
    decoder = llm.Decoder(load_model(tmp_path / "float"), 64)
    mtp = llm.Mtp(decoder)
    other = llm.Decoder(load_model(tmp_path / "float"), 64)
    with pytest.raises(ValueError, match="the draft is the multi-token prediction head of another decoder; expected an Mtp of"):
        llm.generate(other, PROMPT, 4, guesses=2, draft=mtp)
    with pytest.raises(ValueError, match="the draft is the multi-token prediction head of another decoder"):
        Batch(other).speculate(2, mtp)
    with pytest.raises(ValueError, match="a function gives no hidden states; expected a Decoder, not compiled"):
        llm.Mtp(lambda tokens, start: None, tmp_path / "float")
    missing = "mtp.norm.weight" if is_beside(kind) else "model.layers.2.shared_head.norm.weight"
    without_head(tmp_path / "float", tensors, missing)
    with pytest.raises(ValueError, match=f"the multi-token prediction head's {missing} is missing; the files do not belong"):
        llm.Mtp(decoder)
    with pytest.raises(ValueError, match=rf"lacks 1 of the \d+ tensors of \w+: {missing}"):
        lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", CONFIG)
    without_head(tmp_path / "float", tensors)
    with pytest.raises(ValueError, match=r"float has no multi-token prediction \(MTP\) head; expected tensors mtp\.\*, or a"):
        llm.Mtp(decoder)


def test_the_command(tmp_path):
    tensors = write("qwen3_5_text", tmp_path / "float", agreeing=True, vocabulary=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FLOAT / name, tmp_path / "float")
    result = invoke("quantize", tmp_path / "float", tmp_path / "packed", "--bits", 4)
    assert result.exit_code == 0, result.stderr
    arguments = ["--prompt", "a list", "--max-new-tokens", 24, "--json"]
    for model, more in ((tmp_path / "packed", []), (tmp_path / "float", ["--bits", 4])):
        plain = document(invoke("generate", model, *arguments, *more))
        found = document(invoke("generate", model, *arguments, *more, "--draft", "mtp"))
        assert found["tokens"] == plain["tokens"] and found["guessed"] == found["accepted"] >= 12
        assert found["decode_calls"] == plain["decode_calls"] - found["accepted"]
    without_head(tmp_path / "float", tensors)
    result = invoke("generate", tmp_path / "float", *arguments[:-1], "--draft", "mtp")
    assert result.exit_code == 1 and "has no multi-token prediction (MTP) head" in result.stderr
    assert result.stdout == ""


def test_the_servers_command(tmp_path, monkeypatch):
    """The server's guesses come from the head."""
    write("qwen3_5_text", tmp_path / "float", agreeing=True, vocabulary=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FLOAT / name, tmp_path / "float")
    started = []
    monkeypatch.setattr("lowbit.serve.run.run", lambda models, *_, **__: started.extend(models))
    result = invoke("serve", tmp_path / "float", "--bits", 4, "--draft", "mtp", "--max-length", 64)
    assert result.exit_code == 0, result.stderr
    batch = started[0].batch
    text = Text(PROMPT, 20)
    batch.add(text)
    while batch.step():
        pass
    assert text.result.guessed == text.result.accepted >= 12
