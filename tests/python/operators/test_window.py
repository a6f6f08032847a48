"""Attention over window caches has the bits of caches of the whole text."""

import copy

import lowbit
import pytest
import torch
import transformers
from lowbit import llm
from lowbit.exports.plan_export import write_plan
from lowbit.llm.batch import Batch
from lowbit.llm.caches import dtypes_of
from lowbit.llm.generation import Text as Wanted
from lowbit.llm.plan_decoder import PlanDecoder
from lowbit.llm.plan_files import PLAN
from lowbit.operators.ops import cache_storage, cache_width
from lowbit.serve.prefix_store import PrefixBatch
from models import BACKENDS

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 32, 4096
CACHES = ["float32", "bfloat16", "int8,int4", "int4"]


class Text:
    """A text in both kinds of caches."""

    def __init__(self, window: int, cache: str = "float32", batch: int = 1, room: int = 64, **more):
        torch.manual_seed(0)
        self.window, self.more = window, more
        self.values = [torch.randn(batch, heads, LENGTH, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        length = lowbit.window_length(window, room)
        pair = [(cache_width(WIDTH, dtype), cache_storage(dtype)) for dtype in dtypes_of(cache)]
        self.whole, self.short = (
            [torch.zeros(batch, KV_HEADS, size, width, dtype=dtype) for width, dtype in pair] for size in (LENGTH, length)
        )
        self.held = torch.zeros(2, dtype=torch.int64)

    def call(self, begin: int, end: int) -> None:
        q, k, v = (value[:, :, begin:end] for value in self.values)
        start = torch.tensor([begin])
        expected = lowbit.attention(q, k, v, *self.whole, start, window=self.window, **self.more)
        if self.held[1] == begin:
            start = self.held[1:]  # continues the text
        actual = lowbit.window_attention(q, k, v, *self.short, self.held, start, window=self.window, **self.more)
        assert torch.equal(actual, expected), (begin, end)
        assert self.held[1] == end and self.held[0] % 512 == 0 and end - self.held[0] <= self.short[0].shape[2]


def cuts(*ends: int) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [1, 16, 100, 512, 700])
def test_the_bits_of_long_caches(window, cache):
    text = Text(window, cache)
    for begin, end in cuts(1, 2, 33, 34, 600, 601, 640, 1800, 1801, 1802, 2999, 3000, LENGTH):
        text.call(begin, end)


def test_one_call_longer_than_the_caches():
    for batch in (1, 3):
        text = Text(40, batch=batch, softcap=3.0, sinks=torch.randn(HEADS))
        text.call(0, 3000)
        text.call(3000, 3001)


def test_token_by_token():
    text = Text(130, "int8", room=16)
    for position in range(1500):
        text.call(position, position + 1)


def test_threads_and_a_text_that_is_cut_back():
    text, threads = Text(300), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            text.call(0, 1500)  # a new text each time
            text.call(1490, 1700)
            text.call(1699, 1730)
    finally:
        torch.set_num_threads(threads)


def arguments(**changes) -> dict:
    text = Text(100)
    q, k, v = (value[:, :, :40] for value in text.values)
    keys, values = text.short
    return {
        "q": q, "k": k, "v": v, "k_cache": keys, "v_cache": values, "held": text.held, "start": torch.tensor([0]),
        "window": 100,
    } | changes  # fmt: skip


BAD = {
    "a gap": ({"start": torch.tensor([1])}, IndexError, "start is 1, and the caches hold positions 0 to -1"),
    "cut too far": (
        {"start": torch.tensor([900]), "held": torch.tensor([1024, 1100])}, IndexError, "hold positions 1024 to 1099"
    ),
    "negative": ({"start": torch.tensor([-1])}, IndexError, "start is -1"),
    "no window": ({"window": 0}, ValueError, "expected a window of 1 or more"),
    "a window as long": ({"window": 400}, ValueError, "a max_length of 528 more"),
    "held": ({"held": torch.tensor([0])}, ValueError, "held"),
    "held dtype": ({"held": torch.tensor([0, 0], dtype=torch.int32)}, ValueError, "held"),
    "held apart": ({"held": torch.tensor([5, 9])}, ValueError, "held is [5, 9]; expected a multiple of 512"),
    "held too many": ({"held": torch.tensor([0, 99999])}, ValueError, "held is [0, 99999]"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    "keys": ({"k": torch.zeros(1, 2, 39, WIDTH)}, ValueError, "expected 40 positions, as q has"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_change_nothing(case):
    changes, kind, message = BAD[case]
    given = arguments(**changes)
    before = [given[name].clone() for name in ("k_cache", "v_cache", "held")]
    with pytest.raises(kind) as raised:
        lowbit.window_attention(**given)
    assert message in str(raised.value)
    assert all(torch.equal(given[name], value) for name, value in zip(("k_cache", "v_cache", "held"), before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_and_exported(backend):
    torch._dynamo.reset()

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            text = Text(20)
            for name, value in zip(("keys", "values", "held"), (*text.short, text.held), strict=True):
                self.register_buffer(name, value)

        def forward(self, q, k, v, start):
            return torch.ops.lowbit.window_attention(q, k, v, self.keys, self.values, self.held, start, 0.2, 20)

    text = Text(20)
    inputs = [tuple(value[:, :, begin:end].clone() for value in text.values) + (torch.tensor([begin]),)
              for begin, end in cuts(700, 701, 1600)]  # fmt: skip
    with torch.no_grad():
        step = Step()
        expected = [step(*each) for each in inputs]
        compiled = torch.compile(Step(), fullgraph=True, dynamic=True, backend=backend)
        assert all(torch.equal(compiled(*each), one) for each, one in zip(inputs, expected, strict=True))
        sizes = {2: torch.export.Dim("s", min=1, max=2000)}
        program = torch.export.export(Step(), inputs[0], dynamic_shapes=(sizes, sizes, sizes, None)).module()
        assert all(torch.equal(program(*each), one) for each, one in zip(inputs, expected, strict=True))


def test_gradients_are_refused():
    given = arguments()
    with pytest.raises(RuntimeError, match="has no gradients"):
        lowbit.window_attention(**given | {"q": given["q"].requires_grad_()})


def gemma(layers: int = 4):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=24, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    return lowbit.quantize_(model, lowbit.LinearConfig(4, 32))


def decoders(cache: str | None = None):
    return [llm.Decoder(gemma(), 2048, cache, windows=windows) for windows in (True, False)]


TEXT = [(7 + 13 * i + i * i) % 490 + 4 for i in range(1500)]


@pytest.mark.parametrize("cache", [None, "int8,int4", "int4"])
def test_a_decoder_keeps_windows_and_the_bits(cache):
    short, whole = decoders(cache)
    assert short.windowed and not whole.windowed
    assert sum(each.nbytes for layer in short.caches() for each in layer) < 0.75 * sum(
        each.nbytes for layer in whole.caches() for each in layer
    )
    results = [llm.generate(step, TEXT, 40, max_length=2048).tokens for step in (short, whole)]
    assert results[0] == results[1]
    for step in (short, whole):
        assert step.kept(1530) == 1530
    assert short.kept(300) == 0 and whole.kept(300) == 300  # the window before 300 was overwritten


def test_a_text_that_was_read_continues_in_windows():
    short, whole = decoders()
    logits = [step(torch.tensor([TEXT]), torch.tensor([0])) for step in (short, whole)]
    assert torch.equal(*logits)
    caches = short.read(TEXT[:1400])
    assert short.begin(caches, TEXT) == 1400
    assert torch.equal(short(torch.tensor([TEXT[1400:]]), torch.tensor([1400])), logits[0])
    with pytest.raises(IndexError, match="hold positions"):
        short(torch.tensor([TEXT[10:12]]), torch.tensor([10]))


def test_speculation_and_batches_over_windows():
    short, whole = decoders()
    draft = llm.Decoder(gemma(2), 2048)
    expected = llm.generate(whole, TEXT, 30, max_length=2048).tokens
    assert llm.generate(short, TEXT, 30, max_length=2048, draft=draft, guesses=4).tokens == expected
    batch = llm.generate_batch(short, [TEXT, TEXT[:40]], 30)
    assert batch[0].tokens == expected


def test_chat_continues_over_windows():
    """Turns continue at the end of the text; a text that is cut back too far starts again."""
    short, whole = decoders()
    for tokens in (TEXT[:1300], TEXT[:1310], TEXT[:1308] + TEXT[:5], TEXT[:50] + TEXT[:9]):
        results = []
        for step in (short, whole):
            known = getattr(step, "known", [])
            same = step.kept(next((i for i, (a, b) in enumerate(zip(known, tokens)) if a != b), min(len(known), len(tokens))))
            same = min(same, len(tokens) - 1)
            results.append(step(torch.tensor([tokens[same:]]), torch.tensor([same])))
            step.known = tokens
        assert torch.equal(*results)


@pytest.mark.more
@pytest.mark.parametrize("suffix, plan", [(".pte", True), (".pte", False), (".pt2", False)])
def test_exported_with_windows(tmp_path, suffix, plan):
    short, whole = decoders()
    llm.export_decoder(short, tmp_path / f"m{suffix}", chunk=128, plan=plan)
    step = llm.load_decoder(tmp_path / f"m{suffix}")
    expected = llm.generate(whole, TEXT, 20, max_length=2048).tokens
    assert llm.generate(step, TEXT, 20, max_length=2048).tokens == expected
    if plan:  # its caches hold the whole text
        assert step.kept(30) == 30
        return
    assert step.kept(30) == 0
    with pytest.raises(ValueError, match="cannot be cut back"):
        step(torch.tensor([[5]]), torch.tensor([30]))


def test_many_guesses_do_not_drop_what_a_rejected_one_needs():
    """A call of more rows than a piece moves the window between its pieces."""
    short, whole = decoders()
    prompt = TEXT[:10] * 103

    def until():
        """Ends a text that could be longer, because guesses do not go beyond its largest length."""
        seen = []
        return lambda token: seen.append(token) or len(seen) == 12

    expected = llm.generate(whole, prompt, 12, max_length=2048).tokens
    assert llm.generate(short, prompt, 500, max_length=2048, guesses=400, until=until()).tokens == expected
    batch, results = Batch(short), []
    batch.speculate(400)
    batch.add(Wanted(prompt, 500, until=until(), on_end=results.append))
    while batch.step():
        pass
    assert results[0].tokens == expected and results[0].guessed > 0


def mistral():
    """All layers have a window."""
    config = transformers.MistralConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=40, max_position_embeddings=4096,
    )  # fmt: skip
    return lowbit.quantize_(transformers.MistralForCausalLM(config).eval(), lowbit.LinearConfig(4, 32))


MODELS = {"gemma3": gemma, "mistral": mistral}
OTHER = [(5 + 7 * i + 3 * i * i) % 480 + 9 for i in range(900)]


@pytest.fixture(scope="module", params=["gemma3", "mistral", "gemma3 plan", "mistral plan"])
def engines(request, tmp_path_factory):
    """Decoders of a model that keep windows and whole texts, by torch or by the plan in a file."""
    torch.manual_seed(0)
    kind, *plan = request.param.split()
    model = MODELS[kind]()
    if not plan:
        return llm.Decoder(model, 2048, "int8"), llm.Decoder(copy.deepcopy(model), 2048, "int8", windows=False)
    directory = tmp_path_factory.mktemp(kind)
    model.save_pretrained(directory)
    write_plan(llm.Decoder(model, 64), directory / PLAN, [])
    made = lowbit._C.PlanModel(str(directory / PLAN), 1)
    return [PlanDecoder(made, 2048, "int8", b"key", windows=windows) for windows in (True, False)]


def texts(decoder, prompts, count=12, **more):
    """Tokens, log-probabilities of the best ones, and numbers of cached tokens."""
    found = llm.generate_batch(decoder, prompts, count, logprobs=2, **more)
    return [(each.tokens, each.logprobs) for each in found], [each.cached_tokens for each in found]


def test_a_batch_keeps_windows_and_the_bits(engines):
    short, whole = engines
    assert short.windowed and not whole.windowed and short.windows.keys() <= {0, 1, 2, 3}
    assert short.new_caches(2048).nbytes < 0.75 * whole.new_caches(2048).nbytes
    assert short.new_caches(512).nbytes == whole.new_caches(512).nbytes
    prompts = [TEXT, TEXT[:1000] + OTHER[:300], OTHER[:30], OTHER, TEXT[:1000] + OTHER[5:9], OTHER[:600]]
    for more in ({"rows": 300}, {"at_once": 2, "rows": 700}):
        expected, found = (texts(each, prompts, **more) for each in (whole, short))
        assert found[0] == expected[0]
    # Prefixes of texts that run at the same time are copied where a call ends with them.
    assert texts(short, prompts[:2] + prompts[3:], rows=300)[1] == [0, 1000, 0, 1000, 599]
    grown, alone = texts(short, [TEXT[:500]], 400), texts(whole, [TEXT[:500]], 400)  # its caches grow beyond the window
    assert grown == alone


def test_what_a_window_has_lost_is_computed_again(engines):
    short, whole = engines
    caches = short.new_caches(1408)
    for at in range(0, 1400, 200):
        short.run_texts([(caches, TEXT[at : at + 200])])
    assert caches.usable(1400) == 1400 and caches.usable(1350) == 1350 and caches.usable(1000) == caches.usable(30) == 0
    for count, cached in ((1400, 1400), (1350, 1350), (1000, 0)):
        prompt = TEXT[:count] + [5] * 30
        assert texts(short, [prompt], prefixes=[caches]) == (texts(whole, [prompt])[0], [cached])
    with pytest.raises(ValueError, match="hold positions from 1024 on; expected those of the whole text"):
        whole.new_caches(1408).copy_from(caches, 1400)
    with pytest.raises(ValueError, match="a call has two parts of the same text"):
        short.run_texts([(caches, [1]), (caches, [2])])
    assert len(caches.tokens) == 1400


def test_windows_in_files(engines, tmp_path):
    """A text continues where a prompt or a text ended, or where a second text left a first one."""
    short, whole = engines
    with pytest.raises(ValueError, match=r"of single texts needs .* expected Decoder\(windows=False\)"):
        llm.PrefixCache(tmp_path, short)

    def cache() -> llm.PrefixCache:
        return llm.PrefixCache(tmp_path, short, snapshots=True)

    prompt = TEXT[:1100]
    (expected,), _ = texts(whole, [prompt], 60)
    assert texts(short, [prompt], 60, prefix_cache=cache()) == ([expected], [0])
    ends = sorted(path.stat().st_size for path in tmp_path.iterdir() if "-states" in path.name)
    assert len(ends) == 2  # after 1088 and 1152 tokens
    prompts = [
        (prompt, 1088), ([*prompt, *expected[0], 7, 8], 1152), (TEXT[:700] + OTHER[:50], 0), (TEXT[:700] + OTHER[50:99], 640),
        (OTHER[:200], 0), (OTHER[:201], 192), (OTHER, 192),
    ]  # fmt: skip
    for each, cached in prompts:
        assert texts(short, [each], prefix_cache=cache()) == (texts(whole, [each])[0], [cached])
    for path in tmp_path.iterdir():
        if "-states" in path.name:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="is damaged or belongs to another text"):
        assert texts(short, [prompt], 60, prefix_cache=cache()) == ([expected], [0])
    assert texts(short, [prompt], 60, prefix_cache=cache()) == ([expected], [1088])


def test_windows_that_a_server_keeps(engines):
    """The next turn of a conversation, and a prefix that a second text shares with a text that has lost it."""
    short, whole = engines
    batch = PrefixBatch(short, 4, 300, 1 << 30)

    def text(prompt):
        results = []
        batch.add(Wanted(prompt, 12, on_end=results.append))
        while batch.step():
            pass
        assert results[0].tokens == llm.generate_batch(whole, [prompt], 12)[0].tokens
        return results[0].tokens, results[0].cached_tokens

    first, cached = text(TEXT[:1200])
    assert cached == 0 and text([*TEXT[:1200], *first, 9, 8])[1] == 1211
    assert [text(TEXT[:480] + OTHER[at : at + 700])[1] for at in (0, 10, 30)] == [0, 480, 480]
    assert batch.kept_bytes == sum(each.nbytes for each, _ in batch.beginnings())


def test_windows_are_not_copied_where_whole_texts_are_kept():
    """Refused before anything is copied, so the text before is not mixed with another one."""
    torch.manual_seed(0)
    model = mistral()
    again = llm.Decoder(copy.deepcopy(model), 2048, windows=False)
    kept = llm.Decoder(model, 2048).read(TEXT)
    whole = llm.Decoder(model, 2048, windows=False)
    first = torch.tensor([OTHER[:100]])
    for each in (whole, again):
        each(first, torch.tensor([0]))
    for call in (lambda: whole.begin(kept, [*TEXT, 7]), lambda: llm.generate_batch(whole, [[*TEXT, 7]], 2, prefixes=[kept])):
        with pytest.raises(
            ValueError, match="hold only the windows of some layers; expected those of a decoder with windows=Fa"
        ):
            call()
    logits = [each(torch.tensor([[7]]), torch.tensor([100])) for each in (whole, again)]
    assert torch.equal(*logits)
