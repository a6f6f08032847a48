"""Norms of transformers' models computed by lowbit: classes, modules and calls that stay, gradients, compiled code, models."""

import copy
import pickle
from importlib import import_module

import lowbit
import pytest
import torch
from lowbit.hf import norms
from lowbit.operators.elementwise import each_operator_alone
from torch.nn import LayerNorm
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from lowbit.llm import Decoder, generate_batch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Count(TorchDispatchMode):
    """Counts calls of the two operators."""

    def __init__(self):
        super().__init__()
        self.layer_norms = self.rms_norms = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.layer_norms += func is torch.ops.lowbit.layer_norm.default
        self.rms_norms += func is torch.ops.lowbit.rms_norm.default
        return func(*args, **(kwargs or {}))


def of(kind, name, *arguments, **more):
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)(*arguments, **more)


def trained(module, dtype):
    """The module with parameters that are not 1 and 0, as after training."""
    for parameter in module.parameters():
        parameter.data = 1 + torch.randn(parameter.shape) / 4
    return module.to(dtype)


# A module of width 48; its epsilon and the offset of its weight, or None for LayerNorm.
CLASSES = {
    "torch": (lambda: LayerNorm(48), 1e-5, None),
    "torch without bias": (lambda: LayerNorm(48, eps=1e-3, bias=False), 1e-3, None),
    "torch without parameters": (lambda: LayerNorm(48, elementwise_affine=False), 1e-5, None),
    "cohere": (lambda: of("cohere", "CohereLayerNorm", 48), 1e-5, None),
    "olmo": (lambda: of("olmo", "OlmoLayerNorm", 48), 1e-5, None),
    "deberta": (lambda: of("deberta", "DebertaLayerNorm", 48), 1e-12, None),
    "convnext": (lambda: of("convnext", "ConvNextLayerNorm", 48), 1e-6, None),
    "llama": (lambda: of("llama", "LlamaRMSNorm", 48), 1e-6, 0.0),
    "gemma": (lambda: of("gemma", "GemmaRMSNorm", 48), 1e-6, 1.0),
    "weightless": (lambda: of("falcon_mamba", "FalconMambaWeightlessRMSNorm", 48), 1e-6, 0.0),
    "t5": (lambda: of("t5", "T5LayerNorm", 48), 1e-6, 0.0),
    "imagegpt": (lambda: of("imagegpt", "ImageGPTLayerNorm", 48), 1e-5, 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_classes(kind, dtype):
    torch.manual_seed(0)
    make, epsilon, offset = CLASSES[kind]
    module = trained(make(), dtype)
    x = (3 * torch.randn(2, 5, 48) + 1).to(dtype)
    with torch.no_grad():
        expected = module(x)
        assert norms.replace(module) == [module] and norms.replace(module) == []
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if offset is None:
            own = lowbit.layer_norm(x, weight, bias, epsilon=epsilon)
        else:
            own = lowbit.rms_norm(x, weight, epsilon=epsilon, weight_offset=offset)
        for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert each(x).equal(own)
            assert each(x.transpose(0, 1)).equal(own.transpose(0, 1))
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)


class UnbiasedLayerNorm(LayerNorm):
    """Divides by a standard deviation of n - 1 numbers."""

    def forward(self, x):
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class IndifferentRMSNorm(torch.nn.RMSNorm):
    """Ignores its weight, which is 1."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, None, self.eps)


class ChannelsFirstLayerNorm(LayerNorm):
    """Normalizes the second of four dimensions."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1) if x.ndim == 4 else super().forward(x)


class GatedRMSNorm(torch.nn.RMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


def with_own_forward():
    module = LayerNorm(48)
    module.forward = torch.nn.functional.relu
    return module


MODULES_THAT_STAY = [
    lambda: LayerNorm((3, 48)),
    lambda: LayerNorm((3, 48), elementwise_affine=False),
    lambda: LayerNorm(48).double(),
    lambda: LayerNorm(48, device="meta"),
    lambda: LayerNorm(48, eps=2.0),
    lambda: torch.nn.RMSNorm(48),  # its epsilon is that of the type
    lambda: torch.nn.GroupNorm(4, 48),
    lambda: of("nemotron", "NemotronLayerNorm1P", 48),
    lambda: of("vitdet", "VitDetLayerNorm", 48),
    lambda: of("convnext", "ConvNextLayerNorm", 48, data_format="channels_first"),
    lambda: of("cohere", "CohereLayerNorm", (4, 48)),
    lambda: UnbiasedLayerNorm(48).bfloat16(),
    lambda: IndifferentRMSNorm(48, eps=1e-6),
    lambda: ChannelsFirstLayerNorm(48),
    lambda: GatedRMSNorm(48, eps=1e-6),
    with_own_forward,
]


@pytest.mark.parametrize("make", MODULES_THAT_STAY)
def test_modules_that_are_not_replaced(make):
    module = make()
    forward = vars(module).get("forward")
    assert norms.replace(module) == []
    assert vars(module).get("forward") is forward


def test_calls_that_run_the_original_code():
    torch.manual_seed(0)
    module = trained(LayerNorm(48), torch.float32)
    plain, bare = copy.deepcopy(module), LayerNorm(48, elementwise_affine=False)
    scalar = of("llama", "LlamaRMSNorm", 1)  # a weight for all numbers
    norms.replace(torch.nn.Sequential(module, bare, scalar))
    x = torch.randn(2, 3, 48)
    with Count() as count, torch.no_grad():
        assert module(x.bfloat16()).equal(plain(x.bfloat16()))  # parameters of another type
        with pytest.raises(RuntimeError, match="normalized_shape"):
            bare(x[..., :16])
        with pytest.raises(RuntimeError, match="normalized_shape"):
            module(x[..., :16])
        assert scalar(x).equal(of("llama", "LlamaRMSNorm", 1)(x))
    for each in (module, plain):
        each(x).square().sum().backward()
    assert module.weight.grad.equal(plain.weight.grad) and module.bias.grad.equal(plain.bias.grad)
    assert count.layer_norms == count.rms_norms == 0
    graphs = []
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(graph.code) or graph.forward, fullgraph=True)
    with torch.no_grad():
        assert compiled(x).equal(plain(x))
    assert len(graphs) == 1 and "layer_norm" in graphs[0] and "lowbit" not in graphs[0]
    with Count() as count, torch.inference_mode():
        found = module(x)
    assert count.layer_norms == 1
    with torch.no_grad():
        assert found.equal(lowbit.layer_norm(x, plain.weight, plain.bias))


@pytest.mark.parametrize("kind", ["torch", "olmo", "gemma"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_programs_that_run_each_operator_alone(kind):
    """A .pte has lowbit's operators, with the bits of eager mode."""
    torch.manual_seed(0)
    module, x = trained(CLASSES[kind][0](), torch.float32), torch.randn(2, 3, 48)
    norms.replace(module)
    with torch.no_grad():
        with each_operator_alone():
            program = torch.export.export(module, (x,))
        assert [str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"] == ["lowbit"]
        assert program.module()(x).equal(module(x))


SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, pad_token_id=0,
    tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip
# Model type, its own settings, number of LayerNorms.
MODELS = {
    "opt": (dict(ffn_dim=96, word_embed_proj_dim=64), 5),
    "gpt2": (dict(n_embd=64, n_layer=2, n_head=4, n_positions=64), 5),
    "gpt_neox": ({}, 5),
    "falcon": (dict(alibi=False), 3),
    "phi": ({}, 3),
    "stablelm": (dict(num_key_value_heads=2), 5),
    "cohere": (dict(num_key_value_heads=2), 3),
    "olmo": (dict(num_key_value_heads=2), 5),
}


@pytest.mark.filterwarnings("ignore:.*stay float")  # OPT's positions
@pytest.mark.parametrize("kind", MODELS)
def test_decoders(kind, monkeypatch):
    torch.manual_seed(0)
    own, number = MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **SIZES | own)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(8, 32)})
    texts, tokens = [[5, 8, 13], [21, 34]], torch.tensor([[5, 8, 13, 21, 34, 55]])
    with torch.no_grad():
        decoder = Decoder(model, 32, plan=False)
        with Count() as count:
            found = decoder(tokens, torch.tensor([0]))
        assert count.layer_norms == number
        pieces = [decoder(tokens[:, i : i + 1], torch.tensor([i])) for i in range(6)]
        assert pieces[-1].equal(found)
        generated = [each.tokens for each in generate_batch(decoder, texts, 5)]
        decoder.release()
        assert not any("forward" in vars(module) for module in model.modules())
        monkeypatch.setattr(norms, "replace", lambda model, decoding: [])
        plain = Decoder(model, 32, plan=False)
        torch.testing.assert_close(plain(tokens, torch.tensor([0])), found, rtol=1e-2, atol=1e-2)
        assert [each.tokens for each in generate_batch(plain, texts, 5)] == generated


def test_encoders_and_whisper():
    torch.manual_seed(0)
    for kind, sizes, number in (
        ("bert", SIZES, (5, 0)),
        ("deberta", SIZES, (5, 0)),
        ("vit", dict(image_size=32, patch_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4), (5, 0)),
        ("whisper", dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                         encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=97, num_mel_bins=8, max_source_positions=16,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1), (12, 0)),
        ("t5", dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=97), (0, 12)),
    ):  # fmt: skip
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
        tokens = torch.randint(3, 97, (2, 7))
        inputs = {
            "vit": dict(pixel_values=torch.randn(2, 3, 32, 32)),
            "whisper": dict(input_features=torch.randn(2, 8, 32), decoder_input_ids=tokens),
            "t5": dict(input_ids=tokens, decoder_input_ids=tokens),
        }.get(kind, dict(input_ids=tokens))
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            summary = lowbit.fuse_(model)
            with Count() as count:
                found = model(**inputs).last_hidden_state
        assert (count.layer_norms, count.rms_norms) == number
        assert summary.norms == count.layer_norms + count.rms_norms
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
