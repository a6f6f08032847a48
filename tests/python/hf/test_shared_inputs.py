"""Packed layers with the same input in a decoder use one call of lowbit.linears, with the same bits."""

from collections import Counter

import lowbit
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from lowbit.exports import decoder_program as exports
from lowbit.hf.shared_inputs import SharedInput, observed
from lowbit.llm import Decoder, compile_decoder, export_decoder
from test_llm import PROMPT, make


class Calls(TorchDispatchMode):
    """Counts lowbit's operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lowbit":
            self.counts[function._opname] += 1
        return function(*args, **kwargs or {})


def plain(decoder: Decoder) -> Decoder:
    """The same without shared inputs."""
    for shared in decoder._takeover._shared:
        shared.end()
    decoder._takeover._shared = []
    return decoder


def logits(step, tokens, start=0):
    with torch.inference_mode():
        return step(torch.tensor([tokens]), torch.tensor([start])).clone()


def mixed(name: str, planes: bool) -> torch.nn.Module:
    """A model; with ``planes``, some layers have activations of 16 bits, and others with the same input 8."""
    model = make(name)
    for path, layer in model.named_modules():
        if planes and path.endswith(("k_proj", "up_proj")):
            layer.to_activation_bits(16)
    return model


@pytest.mark.parametrize("name, planes", [("llama", False), ("qwen3", False), ("qwen3", True)])
def test_a_decoder_has_the_same_bits(name, planes):
    shared, alone = (Decoder(mixed(name, planes), 32, plan=False) for _ in range(2))
    alone = plain(alone)
    groups = [len(group.layers) for group in shared._takeover._shared]
    assert groups == [3, 2] * shared.layers
    assert not alone._takeover._shared
    with Calls() as calls:
        first = logits(shared, PROMPT)
    assert (calls.counts["linears"], calls.counts["linear"]) == (len(groups), 1 + 2 * shared.layers)
    assert torch.equal(first, logits(alone, PROMPT))
    with Calls() as calls:
        second = logits(shared, [5], len(PROMPT))
    assert calls.counts["linears"] == 0  # with one row, a call for each layer is faster
    assert torch.equal(second, logits(alone, [5], len(PROMPT)))
    planned = Decoder(mixed(name, planes), 32)  # with one call for the layers of an input, for any number of rows
    assert torch.equal(logits(planned, PROMPT), first) and torch.equal(logits(planned, [5], len(PROMPT)), second)


def test_release_gives_the_layers_back():
    model = make("llama")
    expected = logits(lambda tokens, start: model(tokens).logits, PROMPT)
    decoder = Decoder(model, 32)
    query = model.model.layers[0].self_attn.q_proj
    assert "forward" in vars(query)
    decoder.release()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(lambda tokens, start: model(tokens).logits, PROMPT), expected)


def test_exported_programs_decode_token_by_token(monkeypatch, tmp_path):
    decoder, counted = Decoder(make("llama"), 32), []

    def export(decoder, *_):
        with Calls() as calls:
            counted.append(logits(decoder, PROMPT))
        assert calls.counts["linears"] == 0
        raise OSError("no room")

    for name in ("_export_pte", "_export_pt2"):
        monkeypatch.setattr(exports, name, export)
    for name in ("m.pte", "m.pt2"):
        with pytest.raises(OSError, match="no room"):
            export_decoder(decoder, tmp_path / name, chunk=8, plan=False)
    with Calls() as calls:
        assert torch.equal(logits(decoder, PROMPT), counted[0]) and torch.equal(counted[1], counted[0])
    assert calls.counts["linears"] == 2 * decoder.layers


class Parts(torch.nn.Module):
    """Layers whose inputs are the same object, or only look the same."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        for name in "abc":
            setattr(self, name, torch.nn.Linear(32, 16))
        lowbit.quantize_(self, lowbit.LinearConfig(bits=4))
        if kind == "float":
            self.b = torch.nn.Linear(32, 16)
        if kind == "ordered":
            order = torch.arange(32, dtype=torch.int32).flip(0)
            self.b = lowbit.nn.Linear(self.b.packed_weight, input_order=order)

    def forward(self, x):
        y = self.a(x)
        if self.kind == "changed":
            x.mul_(2.0)
        if self.kind == "copied":
            x = x.clone()
        y = y + self.b(x) * (self.b(x) if self.kind == "twice" else 1.0)
        return y - self.c(x)


@pytest.mark.parametrize(
    "kind, names",
    [("same", ["abc"]), ("changed", ["bc"]), ("copied", ["bc"]), ("twice", ["ac"]), ("float", ["ac"]), ("ordered", ["ac"])],
)
def test_which_layers_share(kind, names):
    model = Parts(kind)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        with observed(model) as groups:
            expected = model(x.clone())
        assert groups == [[getattr(model, name) for name in group] for group in names]
        assert not any(module._forward_pre_hooks for module in model.modules())
        shared = [SharedInput(group) for group in groups]
        with Calls() as calls:
            assert torch.equal(model(x.clone()), expected)
        assert calls.counts["linears"] == 1
        assert all(each._input is None and not each._outputs for each in shared)
        # A layer called with another input computes separately.
        last = getattr(model, names[0][-1])
        assert torch.equal(last(x[:1]), lowbit.linear(x[:1], last.packed_weight, 16))


def test_nothing_is_shared_where_the_input_is_not_a_number():
    model = Parts("same")
    with torch.no_grad(), observed(model) as groups:
        model(torch.full((1, 2, 32), float("nan")))
    assert groups == []


@pytest.mark.more
@pytest.mark.parametrize("backend", ["aot", "inductor"])
def test_compiled(backend):
    """The graph for many tokens shares inputs, the one for one token does not; bits differ only in fused float operations."""
    decoder = Decoder(make("qwen3"), 32, plan=False)
    step = compile_decoder(decoder, backend)
    with Calls() as eager:
        expected = logits(decoder, PROMPT)
    assert eager.counts["linears"] == 2 * decoder.layers
    torch.testing.assert_close(logits(step, PROMPT), expected, rtol=0.05, atol=0.05)
    with torch.no_grad():
        for tokens, count in ((torch.zeros(1, 4, dtype=torch.int64), 2 * decoder.layers), (torch.zeros(1, 1).long(), 0)):
            sizes = ({1: torch.export.Dim("s", min=2, max=32)}, None) if count else None
            graph = torch.export.export(decoder, (tokens, torch.tensor([0])), dynamic_shapes=sizes).graph
            assert sum(node.target is torch.ops.lowbit.linears.default for node in graph.nodes) == count
