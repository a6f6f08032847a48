"""Decoders with a plan: the same logits as with the model's Python code."""

import copy
import gc
import os
import re
import signal
import sys
import threading
import weakref
from pathlib import Path

import lowbit
import pytest
import torch

transformers = pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[2] / "models"))

import tiny_models
from lowbit.llm import Decoder, generate
from lowbit.llm.batch import generate_batch
from test_llm import SIZES, make

MODELS = Path(__file__).parents[3] / "docs/models.md"
TEXT = [(7 * i * i + 3 * i + 5) % 90 + 4 for i in range(30)]
# Kinds of tiny models, and whether their plan has the bits of torch's operators at 4 bits.
KINDS = {
    "llama": True, "qwen3": True, "gemma3_text": True, "gpt_oss": False, "lfm2": False, "qwen3_next": False, "mixtral": False,
    "olmo2": True, "granite": True, "phi3": True, "gemma2": False, "falcon_h1": False, "mamba2": False,
}  # fmt: skip
USUAL = ("qwen3", "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "mixtral")


def model_of(kind: str, dtype: torch.dtype = torch.float32, quantized: bool = True) -> torch.nn.Module:
    model = tiny_models.make(kind)
    if quantized:
        assert tiny_models.quantize(model)
    return model.to(dtype)


@torch.inference_mode()
def exercise(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of calls of all kinds."""
    text = TEXT

    def step(begin: int, end: int) -> torch.Tensor:
        return decoder(torch.tensor([text[begin:end]]), torch.tensor([begin]))

    found = [step(0, 11), *(step(at, at + 1) for at in range(11, 16)), step(16, 30)]
    found.append(decoder.all_logits(torch.tensor([text]), torch.tensor([0])))
    if decoder.kept(5) == 5:
        found += [step(5, 9), step(9, 10), step(2, 3)]
    first, second, third = (decoder.new_caches(48) for _ in range(3))
    found += decoder.run_texts([(first, text[:9]), (second, text[3:4])])
    found += decoder.run_texts([(second, text[4:9]), (first, text[9:10])], everywhere=True)
    found += decoder.run_texts([(first, text[10:11]), (second, text[9:10])])
    if not decoder.recurrent:
        third.copy_from(first, 7)
        found += decoder.run_texts([(third, text[7:12]), (first, text[11:12])])
    fourth = decoder.new_caches(48)
    found += (
        decoder.run_texts([(fourth, text[:6]), (third, text[12:13])])
        if third.tokens
        else decoder.run_texts([(fourth, text[:6])])
    )
    return found


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], exact: bool) -> None:
    assert [each.shape for each in found] == [each.shape for each in expected]
    if exact:
        assert all(map(torch.equal, found, expected))
    else:  # the median, because rounding chooses other experts for some tokens
        one, other = (
            torch.cat([each.reshape(-1, each.shape[-1]) for each in results]).float() for results in (found, expected)
        )
        assert ((one - other).square().mean(-1).sqrt() / other.std(-1)).median() < 0.05


def agree(with_plan: Decoder, without: Decoder, exact: bool) -> None:
    assert with_plan.plan_refusal is None and without.plan_refusal == "it is switched off"
    compare(exercise(with_plan), exercise(without), exact)
    assert with_plan.plan_refusal is None


@pytest.mark.parametrize("kind", [kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.more) for kind in KINDS])
def test_plans_have_the_logits_of_the_model(kind):
    model = model_of(kind)
    plain = Decoder(copy.deepcopy(model), 128, plan=False)
    decoder = Decoder(model, 128)
    assert decoder.plan_refusal is None and (decoder.measured["plan"] == 0.0 or not KINDS[kind])
    agree(decoder, plain, KINDS[kind])
    text = torch.tensor([[(7 * i * i + 5) % 90 + 4 for i in range(120)]])  # longer than the calls that were recorded
    with torch.inference_mode():
        compare(*([each.all_logits(text, torch.tensor([0]))] for each in (decoder, plain)), KINDS[kind])


def _families() -> dict[str, str]:
    """Why each model type that the decoder decodes has no plan, or nothing; from docs/models.md."""
    rows = re.findall(r"^\| (\S+) \| \w+ \| right \| [^|]*\| (.*) \|$", MODELS.read_text(), re.MULTILINE)
    found = {name: re.search(r"no plan: ([^;]*)", said) for name, said in rows if "by transformers' own attention" not in said}
    return {name: match[1] if match else "" for name, match in found.items()}


FEW = ("dbrx", "gemma3n_text", "longcat_flash", "mpt", "phimoe")


@pytest.mark.parametrize("kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.more) for kind in _families()])
def test_families(kind):
    assert (Decoder(model_of(kind), 64).plan_refusal or "") == _families()[kind]


@pytest.mark.parametrize("cache", ["int8", "int8,int4", "int4", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_caches_of_every_type(kind, cache):
    sizes = {"head_dim": 32} if "int4" in cache else {}
    model = make("llama", **sizes) if kind == "llama" else model_of(kind)
    if kind != "llama" and "int4" in cache and model.config.head_dim % 32:
        pytest.skip("4-bit caches have widths of 32")
    agree(Decoder(model, 64, cache), Decoder(copy.deepcopy(model), 64, cache, plan=False), exact=True)


@pytest.mark.parametrize("quantized", [True, False], ids=["4 bits", "floats"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "lfm2"])
def test_bfloat16(kind, quantized):
    model = model_of(kind, torch.bfloat16, quantized)
    agree(Decoder(model, 64), Decoder(copy.deepcopy(model), 64, plan=False), exact=quantized and KINDS[kind])


def test_windows():
    torch.manual_seed(0)
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    config = transformers.Gemma3TextConfig(**SIZES | layers | {"max_position_embeddings": 1024})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(4, 16)})
    text = [(7 * i * i + 3 * i + 5) % 90 + 4 for i in range(900)]
    decoder, plain = Decoder(copy.deepcopy(model), 1024), Decoder(copy.deepcopy(model), 1024, plan=False)
    whole = Decoder(model, 1024, windows=False)
    assert decoder.windowed and plain.windowed and not whole.windowed and decoder.plan_refusal is whole.plan_refusal is None
    sizes = [300, 1, 1, 550, 40, *[1] * 8]
    with torch.inference_mode():
        at = 0
        for size in sizes:
            tokens, start = torch.tensor([text[at : at + size]]), torch.tensor([at])
            found = [each(tokens, start) for each in (decoder, plain, whole)]
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
            at += size
        assert at == len(text)
        for begin in (890, 880):  # a text that goes back within the window
            tokens, start = torch.tensor([text[begin : begin + 4]]), torch.tensor([begin])
            found = [each(tokens, start) for each in (decoder, plain, whole)]
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        for each in (decoder, plain):  # further back than the windows
            assert each.kept(20) == 0
            with pytest.raises((IndexError, ValueError), match=""):
                each(torch.tensor([text[20:22]]), torch.tensor([20]))


def test_threads():
    model = make("llama", num_hidden_layers=3, hidden_size=128, intermediate_size=512)
    decoder, plain = Decoder(copy.deepcopy(model), 64), Decoder(model, 64, plan=False)
    expected, threads = exercise(plain), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            assert all(map(torch.equal, exercise(decoder), expected)), count
    finally:
        torch.set_num_threads(threads)
    assert decoder.plan_refusal is None


def test_guesses_and_batches():
    model = make("qwen3")
    decoder, plain = Decoder(copy.deepcopy(model), 96), Decoder(model, 96, plan=False)
    expected = generate(plain, TEXT, 40, max_length=96).tokens
    assert generate(decoder, TEXT, 40, max_length=96).tokens == expected
    assert generate(decoder, TEXT, 40, max_length=96, guesses=3).tokens == expected
    prompts = [TEXT, TEXT[:20], TEXT[:20] + [5, 6], TEXT[4:]]
    batches = [[each.tokens for each in generate_batch(each, prompts, 12)] for each in (decoder, plain)]
    assert batches[0] == batches[1] and batches[0][0] == expected[:12]
    prefix = decoder.read(TEXT[:16])
    assert decoder.begin(prefix, TEXT) == 16
    assert generate(decoder, TEXT, 40, max_length=96, cached=16).tokens == expected


def test_replaced_states(monkeypatch):
    """Verification of guesses changes copies of states, which are freed; later copies may get their addresses."""
    # With one layer of each kind, CPython's lists of free tuples give each layer its last address.
    monkeypatch.setitem(tiny_models.SPECIAL, "lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2})
    decoder = Decoder(model_of("lfm2"), 64)
    caches = decoder.new_caches(32)
    kept = caches.layers
    for _ in range(100):
        caches.layers = [(*[part.clone() for part in layer],) for layer in kept]
        known = {id(part) for layer in caches.layers for part in layer}
        assert {id(part) for part in caches.planned(decoder.plan, decoder.plan.caches).tensors if part is not None} == known
        caches.layers = kept


def logits(decoder: Decoder, tokens: list[int] = TEXT) -> torch.Tensor:
    with torch.inference_mode():
        first = decoder(torch.tensor([tokens[:-1]]), torch.tensor([0]))
        return torch.cat([first, decoder(torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1]))])


def test_a_released_decoder_keeps_nothing():
    model = make("llama")
    decoder = Decoder(model, 64)
    logits(decoder)
    caches = decoder.new_caches(16)
    with torch.inference_mode():
        decoder.run_texts([(caches, TEXT[:3])])
    kept = [weakref.ref(decoder._plan), weakref.ref(decoder._plan._planned), weakref.ref(decoder._caches()[0][0])]
    assert all(reference() is not None for reference in kept)
    decoder.release()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    with pytest.raises(RuntimeError, match="released"):
        decoder(torch.tensor([[1]]), torch.tensor([0]))
    again = Decoder(model, 64)
    assert again.plan_refusal is None
    logits(again)


def test_models_without_a_plan_say_why():
    class Shifted(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, x):
            return self.own(x) + torch.special.bessel_j0(x)

    model = make("llama")
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp)
    decoder = Decoder(model, 64)
    assert "bessel_j0" in decoder.plan_refusal
    assert torch.equal(logits(decoder), logits(Decoder(copy.deepcopy(model), 64, plan=False)))


def test_wrong_calls_change_nothing():
    decoder = Decoder(make("llama"), 64)
    expected = logits(decoder)
    for tokens, start, error in (
        ([[97]], 3, ValueError),
        ([[-1]], 3, ValueError),
        ([[1]], 64, IndexError),
        ([[1]], -1, IndexError),
    ):
        with pytest.raises(error):
            decoder(torch.tensor(tokens), torch.tensor([start]))
    with torch.inference_mode():
        caches = decoder.new_caches(16)
        with pytest.raises(IndexError):
            decoder.run_texts([(caches, TEXT)])
    assert torch.equal(logits(decoder), expected) and decoder.plan_refusal is None


def test_two_threads_of_python():
    """Texts with caches of their own, fed by several threads."""
    decoder = Decoder(make("qwen3"), 64)
    wrong = []

    def text_of(number: int) -> list[int]:
        return [(number * 13 + 7 * i) % 97 for i in range(20)]

    def feed(text: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            caches = decoder.new_caches(32)
            decoder.run_texts([(caches, text[:12])])
            return torch.stack([decoder.run_texts([(caches, [token])])[0] for token in text[12:]])

    expected = [feed(text_of(number)) for number in range(4)]

    def work(number: int) -> None:
        for _ in range(4):
            if not torch.equal(feed(text_of(number)), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_forked_process_decodes():
    decoder = Decoder(make("llama"), 64)
    expected = logits(decoder)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    busy, ended = threading.Event(), threading.Event()

    def decode() -> None:  # another thread is in the middle of a call when the process forks
        other = decoder.new_caches(64)
        with torch.inference_mode():
            while not ended.is_set():
                other.tokens = []
                decoder.run_texts([(other, TEXT)])
                busy.set()

    thread = threading.Thread(target=decode)
    try:
        assert torch.equal(logits(decoder), expected)
        thread.start()
        busy.wait()
        for count in (2, 1):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(120)
                    torch.set_num_threads(count)
                    code = 0 if all(torch.equal(logits(decoder), expected) for _ in range(2)) else 2
                    decoder.release()
                    gc.collect()
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ended.set()
        thread.join()
        torch.set_num_threads(threads)
    assert torch.equal(logits(decoder), expected)


_DIGESTS = """
import copy, hashlib, sys
import torch
sys.path += sys.argv[1:]
import lowbit, tiny_models
from lowbit.llm import Decoder

torch.set_num_threads(1)
for kind, quantized in (("llama", True), ("llama", False), ("gemma3_text", False), ("mixtral", True)):
    model = tiny_models.make(kind)
    quantized and tiny_models.quantize(model)
    decoder, digest = Decoder(model, 32), hashlib.sha256()
    assert decoder.plan_refusal is None
    with torch.inference_mode():
        for begin, end in ((0, 9), (9, 10), (10, 16)):
            logits = decoder(torch.arange(begin + 5, end + 5)[None] * 3, torch.tensor([begin]))
            digest.update(logits.numpy().tobytes())
    print(kind, quantized, digest.hexdigest())
"""


@pytest.mark.more
def test_every_instruction_set_has_the_same_bits(fork_python):
    """Also of layers in floats, which torch computes in other ways on each CPU."""
    said = [fork_python(_DIGESTS, Path(tiny_models.__file__).parent, isa=isa) for isa in ("portable", "avx2", None)]
    assert all(each.returncode == 0 for each in said), [each.stderr for each in said]
    assert len({each.stdout for each in said}) == 1 and said[0].stdout.count("\n") == 4
