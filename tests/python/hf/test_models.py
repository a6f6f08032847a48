"""The decoder on tiny random models of 61 architectures of transformers: right, or refused and unchanged.

`make models` tries all architectures, and also exports them.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "models"))
import causal_lm
import tiny_models

OWN = "its attention is the model's own code, which transformers does not let others replace"
HALF = "2 of its 4 layers use the decoder's caches"
NO_POSITIONS = "it takes no position_ids"
OTHERS = "its logits differ from those of its own attention"
# Model type: text of the refusal, or None if the decoder is right.
MODELS = {
    # Recurrent layers or convolutions, with states other than keys and values.
    "jamba": HALF,
    "mamba": NO_POSITIONS,
    "minimax": HALF,
    "recurrent_gemma": "1 of its 4 layers use the decoder's caches",
    "rwkv": OWN,
    # Own attention code.
    "openai-gpt": OWN,
    "roformer": OWN,
    # Attention that sees later tokens, or gets arguments that the decoder's attention lacks.
    "bert": OTHERS,
    "doge": "its attention has a mask or bias of its own",
    # Recurrent layers with operators in lowbit.
    "bailing_hybrid": None,
    "bamba": None,
    "falcon_h1": None,
    "granitemoehybrid": None,
    "lfm2": None,
    "lfm2_moe": None,
    "mamba2": None,
    "nemotron_h": None,
    "olmo_hybrid": None,
    "qwen3_5_text": None,
    "qwen3_5_moe_text": None,
    "qwen3_next": None,
    # Positions counted by the model, and own attention code for which lowbit has replacements.
    "bart": None,
    "blenderbot-small": None,
    "gpt_neo": None,
    "gpt_neox_japanese": None,
    "gptj": None,
    "marian": None,
    "mvp": None,
    "trocr": None,
    "whisper": None,
    "xglm": None,
    # Only attention.
    "apertus": None,
    "biogpt": None,
    "bitnet": None,
    "bloom": None,
    "codegen": None,
    "cohere": None,
    "deepseek_v3": None,
    "falcon": None,
    "gemma2": None,
    "gemma3_text": None,
    "gpt_oss": None,
    "gemma4_text": None,
    "gemma3n_text": None,
    "glm4": None,
    "gpt2": None,
    "gpt_neox": None,
    "llama": None,
    "llama4_text": None,
    "mixtral": None,
    "mpt": None,
    "nemotron": None,
    "opt": None,
    "persimmon": None,
    "phi": None,
    "phi3": None,
    "qwen2_moe": None,
    "smollm3": None,
    "stablelm": None,
    "starcoder2": None,
}


# For refused models: what their caches cannot do, or that they see later tokens.
SEES = "its logits after a token change with the tokens that follow"
STATES = "cannot be cut back"
SINGLY = "token by token, and cannot be cut back"
WHOLE = "any number of tokens, and can be cut back"
FALLBACK = {
    "bert": SEES, "rwkv": STATES, "mamba": SINGLY, "jamba": SINGLY, "roformer": SEES, "openai-gpt": "with all of the text",
}  # fmt: skip
# It scales its weights in its first run.
PACKED = {"rwkv": "transformers' own forward raises RuntimeError: the weight of a packed layer cannot be changed"}


@pytest.mark.more
@pytest.mark.parametrize("kind", causal_lm.CLOSE)
@pytest.mark.parametrize("name", MODELS)
def test_right_or_refused(name, kind):
    outcome = causal_lm.try_model(name, [kind], export=False)[kind]
    figures = [value for name, value in outcome.figures.items() if not name.startswith("proof")]
    if MODELS[name] is None:
        assert (outcome.state, outcome.refusal) == ("right", ""), outcome
        assert len(figures) == 4 and max(figures) <= causal_lm.CLOSE[kind]
        return
    assert MODELS[name] in outcome.refusal and f"(model_type {name})" in outcome.refusal, outcome
    assert "use transformers' generate()" in outcome.refusal
    refused = FALLBACK.get(name) if FALLBACK.get(name) == SEES else PACKED.get(name) if kind != "float" else None
    if refused is not None:
        assert outcome.state == "refused" and refused in outcome.reason, outcome
    else:
        assert outcome.state == "right", outcome
        assert len(figures) == 5 and max(figures) <= causal_lm.CLOSE[kind]
        expected = FALLBACK.get(name, STATES if outcome.figures.get("proof, cut back") is None else WHOLE)
        assert expected in outcome.how


def test_the_models_have_each_kind_of_layer():
    """With other sizes than requested, models might lack a kind of layer: each kind must exist."""
    for name, kinds in (("lfm2", {"conv", "full_attention"}), ("jamba", {"linear_attention", "full_attention"})):
        assert set(tiny_models.make(name).config.layer_types) == kinds
    for name in ("llama", "gpt2"):
        model = tiny_models.make(name)
        assert sum(parameter.numel() for parameter in model.parameters()) < 1 << 18
        assert tiny_models.quantize(model) > 0
        tokens = causal_lm.text(128)
        with torch.inference_mode():  # the context of a token matters
            one, other = model(tokens).logits[:, -1], model(tokens.flip(1))
            assert (one - other.logits[:, -1]).std() > 0.3 * one.std()
