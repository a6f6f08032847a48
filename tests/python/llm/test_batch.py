"""Several texts at once: each has the tokens that it has alone."""

import copy
import gc
import pickle

import lowbit
import pytest
import torch
import transformers
from command_line import FLOAT
from lowbit import llm
from lowbit.hf import decoding
from lowbit.hf.activations import RowWise
from lowbit.llm.loading import load_tokenizer
from lowbit.llm.sampling import common

MAX_LENGTH = 192
TWO = {"*": lowbit.LinearConfig(2, 32)}
KINDS = ["float32", "bfloat16", "float16", "int8,int4"]
REPEATED = "The list contains the following items: one, two, three. " * 3 + "The list contains"
SYSTEM = "This function takes a list of names and returns a dictionary. It raises an error if a name is empty. "
TEXTS = ["Return the number of items", REPEATED, "a", SYSTEM + "The names are", SYSTEM + "An error", SYSTEM]
DRAWN = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FLOAT)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    found = [tokenizer(text)["input_ids"] for text in TEXTS]
    return [*found, found[0][:1]]  # and a text of a single token


@pytest.fixture(scope="module")
def model():
    model = transformers.AutoModelForCausalLM.from_pretrained(FLOAT, dtype=torch.float32).eval()
    return lowbit.quantize_(model, {"*": lowbit.LinearConfig(4, 32), "*embed_tokens": lowbit.EmbeddingConfig(4, 32)})


@pytest.fixture
def decoder(model):
    return llm.Decoder(model, MAX_LENGTH)


def alone(decoder, prompts, count, seed=0, **settings):
    return [
        llm.generate(decoder, prompt, count, max_length=MAX_LENGTH, seed=seed + i, **settings)
        for i, prompt in enumerate(prompts)
    ]


def written(generations):
    return [(each.tokens, each.stopped, each.decode_steps) for each in generations]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, DRAWN], ids=["likeliest", "drawn"])
def test_each_text_equals_the_one_computed_alone(model, prompts, kind, settings):
    decoder = llm.Decoder(model, MAX_LENGTH, kind)
    expected = alone(decoder, prompts, 10, seed=5, **settings)
    threads = torch.get_num_threads()
    try:
        for count, more in ((1, {"rows": 7}), (3, {"at_once": 5}) if settings else (2, {})):
            torch.set_num_threads(count)
            found = llm.generate_batch(decoder, prompts, 10, seed=5, **settings, **more)
            assert written(found) == written(expected)
    finally:
        torch.set_num_threads(threads)
    assert len({tuple(each.tokens) for each in expected}) == len(prompts)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_do_not_depend_on_what_else_is_in_the_call(prompts, dtype):
    """Not only tokens but all bits of the logits are equal, whatever else is in the call."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FLOAT, dtype=dtype).eval()
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(3, 32), "*embed_tokens": lowbit.EmbeddingConfig(3, 32)})
    decoder = llm.Decoder(model, MAX_LENGTH)
    expected = [decoder.all_logits(torch.tensor([prompt]), torch.tensor([0]))[0] for prompt in prompts]
    for chosen in (range(len(prompts)), (1,), (2, 0), (6, 6, 1)):
        found = decoder.run_texts([(decoder.new_caches(64), prompts[i]) for i in chosen], everywhere=True)
        assert all(torch.equal(logits, expected[i]) for logits, i in zip(found, chosen, strict=True))
    caches = [decoder.new_caches(64) for _ in prompts]
    for begin in range(0, max(map(len, prompts)), 5):  # all texts in pieces
        now = [i for i, prompt in enumerate(prompts) if begin < len(prompt)]
        found = decoder.run_texts([(caches[i], prompts[i][begin : begin + 5]) for i in now], everywhere=True)
        for i, logits in zip(now, found, strict=True):
            assert torch.equal(logits, expected[i][begin : begin + 5])
    assert [each.tokens for each in caches] == prompts


def test_caches_grow_with_their_text(decoder, prompts, monkeypatch):
    monkeypatch.setattr(llm.batch, "_ROOM", 3)
    lengths = []
    new = decoder.new_caches
    decoder.new_caches = lambda length: lengths.append(length) or new(length)
    found = llm.generate_batch(decoder, prompts[:3], 70)
    assert written(found) == written(alone(decoder, prompts[:3], 70))
    assert len(lengths) > 8 and max(lengths) <= -(-(max(map(len, prompts[:3])) + 70) // 16) * 16


def test_a_text_that_ends_makes_room(decoder, prompts):
    plain = alone(decoder, prompts, 16)
    stop = plain[1].tokens[3]
    expected = alone(decoder, prompts, 16, stop=[stop])
    ended, came = [], {i: [] for i in range(len(prompts))}
    calls = []
    run = decoder.run_texts
    decoder.run_texts = lambda texts: calls.append(len(texts)) or run(texts)
    found = llm.generate_batch(
        decoder, prompts, 16, stop=[stop], at_once=2, on_token=lambda i, token: came[i].append(token),
        on_end=lambda i, generation: ended.append((i, generation.stopped)),
    )  # fmt: skip
    assert written(found) == written(expected) and "stop" in {each.stopped for each in found}
    assert len(found[1].tokens) <= 3 and ended[0] == (1, "stop")
    assert [came[i] for i in range(len(prompts))] == [each.tokens for each in found]
    assert sorted(i for i, _ in ended) == list(range(len(prompts)))
    assert max(calls) == 2 and len(calls) < sum(len(each.tokens) + 1 for each in found)


def test_numbers_for_each_text(decoder, prompts):
    counts, seeds = [1, 5, 2, 9, 3, 1, 7], [3, 1, 4, 1, 5, 9, 2]
    found = llm.generate_batch(decoder, prompts, counts, seed=seeds, temperature=0.9)
    for prompt, count, seed, each in zip(prompts, counts, seeds, found, strict=True):
        expected = llm.generate(decoder, prompt, count, max_length=MAX_LENGTH, temperature=0.9, seed=seed)
        assert written([each]) == written([expected]) and len(each.tokens) == count
    filled = (prompts[1] * 9)[: MAX_LENGTH - 4]
    one, two = llm.generate_batch(decoder, [filled, prompts[0]], 9)
    assert written([one, two]) == written(alone(decoder, [filled, prompts[0]], 9))
    assert (len(one.tokens), one.stopped, len(two.tokens), two.stopped) == (4, "max_length", 9, "max_new_tokens")


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_is_computed_once(model, prompts, kind):
    decoder = llm.Decoder(model, MAX_LENGTH, kind)
    texts = [prompts[i] for i in (3, 4, 5, 3, 0)]
    same = [0, common(texts[1], texts[0]), len(texts[2]) - 1, len(texts[0]) - 1, 0]
    assert same[1] > 16 and same[1] % 16
    expected = alone(decoder, texts, 6)
    for more in ({}, {"at_once": 2}, {"at_once": 1}, {"rows": 5}):
        rows = []
        run = model.forward
        model.forward = lambda *a, run=run, rows=rows, **k: rows.append(k["input_ids"].numel()) or run(*a, **k)
        try:
            found = llm.generate_batch(decoder, texts, 6, **more)
        finally:
            del model.forward
        assert written(found) == written(expected)
        assert [each.cached_tokens for each in found[:2]] == same[:2]
        if more.get("at_once") != 1:  # of two at once, the first has left when the equal fourth begins
            assert [each.cached_tokens for each in found] == ([*same[:3], same[1], 0] if more.get("at_once") else same)
        computed = sum(map(len, texts)) - sum(each.cached_tokens for each in found)
        assert sum(rows) == computed + sum(each.decode_steps for each in found)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_beginning_that_is_kept(model, prompts, tokenizer, kind):
    decoder = llm.Decoder(model, MAX_LENGTH, kind)
    prefix = decoder.read(prompts[5])
    assert prefix.tokens == prompts[5] and prefix.length % 16 == 0 and prefix.nbytes > 0
    before = [(k.clone(), v.clone()) for k, v in prefix.layers]
    longer = decoder.read(prompts[3], prefix=prefix)
    for text in (prompts[3], prompts[4], prompts[5], prompts[0]):
        expected = llm.generate(decoder, text, 12, max_length=MAX_LENGTH, temperature=0.8)
        found = llm.generate_batch(decoder, [text], 12, temperature=0.8, prefixes=[prefix, longer])
        assert written(found) == written([expected])
        assert found[0].cached_tokens == (len(text) - 1 if text in (prompts[3], prompts[5]) else
                                          common(text, prefix.tokens) if text is prompts[4] else 0)  # fmt: skip
        cached = decoder.begin(prefix, text)
        again = llm.generate(decoder, text, 12, max_length=MAX_LENGTH, temperature=0.8, cached=cached)
        assert written([again]) == written([expected])
        assert again.cached_tokens == min(common(text, prefix.tokens), len(text) - 1)
    assert all(torch.equal(a, b) for x, y in zip(before, prefix.layers, strict=True) for a, b in zip(x, y, strict=True))


def test_models_whose_texts_would_see_each_other(decoder, prompts):
    """No such model is known; if a decoder's trial detects one, the first call is refused."""
    assert decoder.measured["texts"] < 0.1
    decoder.measured["texts"] = 0.5
    with pytest.raises(ValueError, match=r"LlamaForCausalLM change when a call has several texts \(by 0.5 of"):
        llm.generate_batch(decoder, prompts, 2)


def test_the_trial_measures_what_texts_change_in_each_other(model, monkeypatch):
    attend = decoding.Texts.attend
    monkeypatch.setattr(decoding.Texts, "attend", lambda *inputs: attend(*inputs).flip(1))
    assert 0.5 < llm.Decoder(model, MAX_LENGTH).measured["texts"] < 5


def test_refusals(decoder, prompts):
    def refused(message, *arguments, kind=ValueError, step=decoder, **more):
        with pytest.raises(kind, match=message):
            llm.generate_batch(step, *arguments, **more)

    refused("there are no prompts; expected at least one", [], 4)
    refused("prompt 1 has no tokens; expected at least one", [[1], []], 4)
    refused(f"prompt 0 has {MAX_LENGTH} tokens; expected fewer than", [[1] * MAX_LENGTH], 4)
    refused(r"prompt 1 has a token 99999; expected 0 to \d+", [[1], [99999]], 4)
    refused("max_new_tokens is 0; expected 1 or more", [[1]], 0)
    refused("max_new_tokens has 1 numbers; expected 2, one for each prompt", [[1], [2]], [4])
    refused("seed has 3 numbers; expected 1, one for each prompt", [[1]], 4, seed=[1, 2, 3])
    refused("at_once is 0; expected 1 or more", [[1]], 4, at_once=0)
    refused("rows is 0; expected 1 or more", [[1]], 4, rows=0)
    refused("temperature is -1; expected 0 or more", [[1]], 4, temperature=-1)
    refused("a function takes one text at a time; expected a Decoder", [[1]], 4, step=lambda tokens, start: None)
    with pytest.raises(IndexError, match="there are 208 tokens; expected a start from 0 and no more than the max_length"):
        decoder.read([1] * 208)
    with pytest.raises(ValueError, match="expected at least one token"):
        decoder.read([])
    with pytest.raises(IndexError, match="a text has 17 tokens; expected at most 16, as its caches"):
        decoder.run_texts([(decoder.new_caches(16), [1] * 17)])
    decoder.release()
    refused("this decoder was released", [[1]], 4, kind=RuntimeError)


def test_caches_of_another_kind_or_model_are_not_copied(model, prompts):
    """The bytes of one kind mean other numbers in another kind, so the text would silently differ."""
    kept = {kind: llm.Decoder(model, MAX_LENGTH, kind).read(prompts[5]) for kind in (None, "int8", "int4", "int8,int4")}
    for kind in kept:
        decoder = llm.Decoder(model, MAX_LENGTH, kind)
        text = [*prompts[5], 7]
        assert decoder.begin(kept[kind], text) == len(prompts[5])
        with pytest.raises(ValueError, match="the text has no tokens; expected at least one"):
            decoder.begin(kept[kind], [])
        for other in kept.keys() - {kind}:
            for call in (
                lambda: decoder.begin(kept[other], text),
                lambda: decoder.read(text, prefix=kept[other]),
                lambda: llm.generate_batch(decoder, [text], 2, prefixes=[kept[other]]),
            ):
                with pytest.raises(ValueError, match=r"the caches are of \w+(,int4)?; expected \w+"):
                    call()
    twin = llm.Decoder(copy.deepcopy(decoder.release()), MAX_LENGTH, kind)
    with pytest.raises(ValueError, match="the caches have keys and values of another model"):
        llm.generate_batch(twin, [text], 2, prefixes=[kept[kind]])
    # Caches from a file, whose model is unknown, and caches of another decoder with the same model.
    for caches in (pickle.loads(pickle.dumps(kept[kind])), copy.deepcopy(kept[kind])):
        assert twin.begin(caches, text) == len(prompts[5])
    other = llm.Decoder(
        lowbit.quantize_(transformers.AutoModelForCausalLM.from_pretrained(FLOAT).eval(), TWO), MAX_LENGTH, kind
    )
    for caches in (kept[kind], pickle.loads(pickle.dumps(kept[kind]))):
        for call in (
            lambda: other.begin(caches, text),
            lambda: other.read(text, prefix=caches),
            lambda: llm.generate_batch(other, [text], 2, prefixes=[caches]),
            lambda: other.run_texts([(caches, [7])]),
        ):
            with pytest.raises(ValueError, match="the caches have keys and values of another model"):
                call()
    assert kept[kind].tokens == prompts[5]
    model = other.release()
    again = llm.Decoder(copy.deepcopy(model), MAX_LENGTH, kind)
    caches = copy.deepcopy(again.read(prompts[5]))
    del again
    gc.collect()
    # The model that the copy belongs to may be gone; its key fits one that was loaded again.
    assert llm.Decoder(model, MAX_LENGTH, kind).begin(pickle.loads(pickle.dumps(caches)), text) == len(prompts[5])


def test_caches_are_copied_if_nothing_identifies_the_model(decoder, prompts, monkeypatch):
    def refuse(model):
        raise ValueError("it has no key")

    monkeypatch.setattr(type(decoder), "model_key", staticmethod(refuse))
    kept = copy.deepcopy(decoder.read(prompts[5]))
    assert decoder.begin(kept, [*prompts[5], 7]) == len(prompts[5])
    with pytest.raises(ValueError, match="it has no key"):
        pickle.dumps(kept)


def test_caches_of_another_version_are_refused(decoder, prompts):
    caches = decoder.read(prompts[5])
    state = caches.__getstate__()
    for other in ({name: each for name, each in state.items() if name != "_windows"}, state | {"_spans": {}}):
        with pytest.raises(
            ValueError, match=r"of another version of lowbit \(they differ in _(windows|spans)\); compute them again"
        ):
            object.__new__(type(caches)).__setstate__(other)


def test_a_decoder_that_torch_compiles(model, prompts):
    """Compiled code does not count tokens, so that the decoder takes any start after it."""
    decoder, plain = (llm.Decoder(each, MAX_LENGTH, plan=False) for each in (model, copy.deepcopy(model)))
    compiled = torch.compile(decoder, backend="eager")
    tokens, end = torch.tensor([prompts[5]]), torch.tensor([len(prompts[5])])
    for step in (compiled, plain):
        step(tokens, torch.tensor([0]))
    found, expected = (each(torch.tensor([[7]]), end) for each in (decoder, plain))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # the compiler rounds float sums in another order


def test_a_call_that_fails_leaves_no_tokens_behind(decoder, prompts):
    """Tokens that were not computed must not count as computed later."""
    first, second = decoder.new_caches(16), decoder.new_caches(16)
    decoder.run_texts([(first, prompts[0][:3])])
    for texts, kind, message in (
        ([(first, [1]), (second, [2] * 17)], IndexError, "a text has 17 tokens; expected at most 16"),
        ([(first, [1]), (second, [])], ValueError, "a text has no tokens; expected at least one"),
        ([(first, [1]), (second, [99999])], ValueError, r"there is no token 99999; expected 0 to \d+"),
        ([(first, [1]), (second, [-1])], ValueError, "there is no token -1"),
        ([(first, [1]), (second, [1.7, 2.2])], ValueError, "a text is a list; expected token ids, whole numbers"),
        ([], ValueError, "there are no texts; expected at least one"),
    ):
        with pytest.raises(kind, match=message):
            decoder.run_texts(texts)
        assert first.tokens == prompts[0][:3] and second.tokens == []
    with pytest.raises(ZeroDivisionError):
        with_hook = decoder.model.lm_head.register_forward_pre_hook(lambda module, inputs: 1 / 0)
        decoder.run_texts([(first, [1]), (second, [1])])
    with_hook.remove()
    assert first.tokens == prompts[0][:3] and second.tokens == []
    second.copy_from(first, 2)
    logits = decoder.run_texts([(first, [5]), (second, prompts[0][2:3] + [5])])
    assert torch.equal(*logits) and first.tokens == second.tokens == prompts[0][:3] + [5]
    for length in (0, -16, 17):
        with pytest.raises(ValueError, match=f"length is {length}; expected a positive multiple of 16"):
            decoder.new_caches(length)
    with pytest.raises(ValueError, match="cache_type is 'float64'; expected one of 'float32'"):
        decoder.new_caches(16, "float64")


@pytest.mark.parametrize("function", [torch.nn.SiLU(), torch.nn.GELU(approximate="tanh"), torch.nn.Sigmoid()], ids=repr)
def test_an_activation_of_a_row_does_not_depend_on_the_others(function):
    torch.manual_seed(0)
    found, threads = RowWise(function), torch.get_num_threads()
    differ = 0
    try:
        for width in (48, 100, 688, 5632, 14336):
            rows = torch.randn(65, width) * 3
            torch.set_num_threads(1)
            expected = torch.cat([found(row) for row in rows.split(1)])
            torch.testing.assert_close(expected, function(rows), rtol=2e-6, atol=1e-6)
            for count in (1, 2, 3, 4, 6):
                torch.set_num_threads(count)
                for some in (2, 7, 16, 65):
                    assert torch.equal(found(rows[:some]), expected[:some])
                    differ += not torch.equal(function(rows[:some]), expected[:some])
    finally:
        torch.set_num_threads(threads)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        assert differ  # torch's results do differ; otherwise this would test nothing
    assert found(torch.zeros(0, 8)).shape == (0, 8)


def test_a_decoder_has_such_activations(model):
    layers = model.model.layers
    before = [layer.mlp.act_fn for layer in layers]
    decoder = llm.Decoder(model, MAX_LENGTH)
    for layer, own in zip(layers, before, strict=True):
        own = own.function if isinstance(own, RowWise) else own  # belongs to another decoder, which this one replaces
        assert isinstance(layer.mlp.act_fn, RowWise) and layer.mlp.act_fn.function is own
    decoder.release()
    assert [layer.mlp.act_fn for layer in layers] == [getattr(own, "function", own) for own in before]
