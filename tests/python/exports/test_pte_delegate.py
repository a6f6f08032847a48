"""Plans in a .pte: its texts and their commands, and the damaged plans and wrong calls that the delegate refuses."""

import copy
import struct
import zlib
from pathlib import Path

import lowbit
import lowbit.llm
import pytest
import torch
from lowbit.exports.module import Delegate, export_delegates
from lowbit.exports.plan_export import plan_with_weights
from lowbit.plan.plan_file import Kind, to_bytes

transformers = pytest.importorskip("transformers")

# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.more,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
    ),
]


class Program:
    """The bytes of a decoder's plan with its weights, which can be changed, in a program."""

    def __init__(self, executorch, decoder: lowbit.llm.Decoder, path: Path):
        self.executorch, self.decoder, self.path = executorch, decoder, path
        self.content = plan_with_weights(decoder, decoder.plan, [])
        size = struct.unpack("<Q", self.content[:8])[0]
        self.weights = self.content[-(-(8 + size) // 128) * 128 :]

    def changed(self, change) -> bytes:
        """The bytes with another plan and the same weights."""
        plan = copy.deepcopy(self.decoder.plan.plan)
        plan.about = {"vocabulary": [97], "positions": [128], "stop": [], "length": [128], "caches": [3, 3]}
        at = 0
        for number, tensor in self.decoder.plan.weights.items():
            content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert self.weights[at : at + len(content)] == content
            plan.buffers[number].offset, plan.buffers[number].checksum = at, zlib.crc32(content[:4096])
            at += -(-len(content) // 128) * 128
        change(plan)
        content = to_bytes(plan)
        head = struct.pack("<Q", len(content)) + content
        return head + bytes(-len(head) % 128) + self.weights

    def load(self, outline: torch.nn.Module, inputs: tuple[torch.Tensor, ...]):
        """The method of a program whose delegate has other inputs and another output."""
        export_delegates("LowbitPlan", {"forward": Delegate(self.content, outline, inputs)}, self.path)
        return self.executorch.load_program(self.path).load_method("forward")


@pytest.fixture
def delegate(executorch, tmp_path) -> Program:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=97, max_position_embeddings=128, head_dim=32,
    )  # fmt: skip
    model = lowbit.quantize_(transformers.AutoModelForCausalLM.from_config(config).eval(), {"*": lowbit.LinearConfig(4, 32)})
    return Program(executorch, lowbit.llm.Decoder(model, 128, "int8"), tmp_path / "m.pte")


@torch.inference_mode()
@pytest.mark.parametrize("cache", [None, "int8", "int8,int4"])
def test_texts_of_a_pte(delegate, cache, tmp_path):
    """Length and caches chosen at load, texts side by side, and texts in files have the bits of a decoder."""
    lowbit.llm.export_decoder(delegate.decoder, delegate.path, chunk=4, stop=[])
    step = lowbit.llm.load_decoder(delegate.path, max_length=None if cache is None else 40, cache=cache)
    assert step.max_length == (128 if cache is None else 40)
    own = lowbit.llm.Decoder(delegate.decoder.model, 128, cache or "int8", plan=False)
    first, other = [5, 91, 3, 44, 17], [9, 9, 1]

    def both(text: list[int], tokens: list[int], start: int) -> None:
        expected = own(torch.tensor([text[:start] + tokens]), torch.tensor([0]))
        assert torch.equal(step(torch.tensor([tokens]), torch.tensor([start])), expected)

    both([], first, 0)
    assert step.use(7) == 0
    both([], other, 0)
    assert step.use(0) == 5
    both(first, [8], 5)
    assert step.use(7) == 3
    both(other, [2, 3], 3)
    assert step.save(tmp_path / "a text") == 5
    both(other, [6], 1)  # cut back
    assert step.use(1) == 0 and step.load(tmp_path / "a text") == 5
    both([*other, 2, 3], [4], 5)
    step.end(7)
    assert step.use(7) == 0  # anew
    before = (tmp_path / "a text").read_bytes()
    with pytest.raises(RuntimeError):
        step.save(tmp_path / "none" / "text")
    assert step.save(tmp_path / "a text") == 0 and (tmp_path / "a text").read_bytes() != before
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".pte"] == ["a text"]
    with pytest.raises(IndexError, match=f"max_length of {step.max_length}"):
        step(torch.zeros(1, step.max_length + 1, dtype=torch.int64), torch.tensor([0]))


def test_commands_that_a_pte_refuses(delegate, tmp_path, capfd):
    lowbit.llm.export_decoder(delegate.decoder, delegate.path, chunk=4, stop=[])
    program = delegate.executorch.load_program(delegate.path)
    session = program.load_method("session")

    def refused(command: bytes, expected: str) -> None:
        with pytest.raises(RuntimeError):
            session.execute((torch.frombuffer(bytearray(command), dtype=torch.uint8),))
        logged = capfd.readouterr().err
        assert f"LowbitPlan: {expected}" in logged, (command, logged)

    refused(b"use 0", "'forward' of the program is not loaded; expected that it is loaded first")
    forward = program.load_method("forward")
    for command in (b"x", b"begin", b"begin x", b"begin 1 x", b"use", b"use 1 2", b"use 99999999999999999999"):
        refused(command, f"the command is '{command.decode()}'; expected begin NUMBER")
    refused(b"begin 1 129", "a text has room for 129 tokens; expected 1 to 128")
    refused(b"begin 1 -1", "a text has room for -1 tokens")
    refused(b"begin 1 0 int3", "a cache is 'int3'; expected float32, bfloat16")
    refused(b"begin 1 0 int4,int8", "keys and values have the cache types 4 and 3; expected the same, or int8 (3) and int4 (4)")
    refused(b"begin 1 2 int8 3", "a cache is 'int8 3'")
    refused(b"use 5", "there is no text 5; expected one that was begun")
    refused(b"end 5", "there is no text 5; expected one that was begun")
    refused(b"end 0", "text 0 is in use; use another one first")
    refused(b"save", "'save' names no file")
    refused(b"load ", "'load ' names no file")
    refused(b"load /no/such file", "/no/such file does not open: No such file or directory")
    (logits,) = forward.execute((torch.tensor([[5]]), torch.tensor([0])))
    assert torch.equal(logits, delegate.decoder(torch.tensor([[5]]), torch.tensor([0])))
    for path in ("a.pt2", "b.pte"):
        lowbit.llm.export_decoder(delegate.decoder, tmp_path / path, chunk=4, stop=[], plan=False, xnnpack=False)
        message = "expected them for a .plan or .pte" if path == "a.pt2" else "it has no plan"
        with pytest.raises(ValueError, match=message):
            lowbit.llm.load_decoder(tmp_path / path, max_length=16)
        with pytest.raises(ValueError, match="the program has one text, which cannot be saved"):
            lowbit.llm.load_decoder(tmp_path / path).save(tmp_path / "text")


def test_a_damaged_plan_is_refused(delegate, capfd):
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    lowbit.llm.export_decoder(delegate.decoder, delegate.path, chunk=4, stop=[])
    program = deserialize_pte_binary(delegate.path.read_bytes())
    whole = delegate.content
    (data,) = (each for each in program.program.backend_delegate_data if each.data == whole)
    weights = len(whole) - len(delegate.weights)
    assert delegate.changed(lambda plan: plan.about.update(stop=[])) == whole

    def fact(name, *values):
        return delegate.changed(lambda plan: plan.about.__setitem__(name, list(values)))

    def weight(**values):
        def change(plan):
            buffer = next(buffer for buffer in plan.buffers if buffer.kind is Kind.WEIGHT)
            vars(buffer).update(values)

        return delegate.changed(change)

    for content, expected in (
        (b"l", "1 bytes begin with a plan of 0; expected a plan and its weights"),
        (whole[:7], "7 bytes begin with a plan of 0"),
        (struct.pack("<Q", 2**64 - 1) + whole[8:], "bytes begin with a plan of 18446744073709551615"),
        (struct.pack("<Q", len(whole) - 7) + whole[8:], f"{len(whole)} bytes begin with a plan of {len(whole) - 7}"),
        (struct.pack("<Q", len(whole) - 8) + whole[8:], "checksum does not fit"),
        (struct.pack("<Q", 5) + whole[8:], "does not begin with 'lowbit plan'"),
        (whole[:300] + bytes([whole[300] ^ 1]) + whole[301:], "checksum does not fit"),
        (whole[:weights], "which has 0; expected the weights that the plan was made for"),
        (whole[:-128], "expected the weights that the plan was made for"),
        (whole[:weights] + bytes([whole[weights] ^ 1]) + whole[weights + 1 :], "has changed since the plan was made"),
        (weight(file="model.safetensors"), "is in the file 'model.safetensors'; expected it after the plan"),
        (weight(offset=1 << 40), "bytes from byte 1099511627776 of the delegate"),
        (fact("length"), "a text has room for 0 tokens; expected 1 to 128"),
        (fact("length", 129), "a text has room for 129 tokens"),
        (fact("length", -1), "a text has room for -1 tokens"),
        (fact("caches"), "does not name the types of its caches"),
        (fact("caches", 0), "does not name the types of its caches"),
        (fact("caches", 0, 5), "does not name the types of its caches"),
        (fact("caches", -1, 0), "does not name the types of its caches"),
        (fact("vocabulary", 0), "expected the plan of a language model"),
    ):
        data.data = content
        with pytest.raises(RuntimeError):
            delegate.executorch.load_program(bytes(serialize_pte_binary(program))).load_method("forward")
        logged = capfd.readouterr().err
        assert expected in logged and "LowbitPlan: " in logged, (expected, logged)


def test_wrong_calls_of_a_plan_fail(delegate, capfd):
    class Other(torch.nn.Module):
        def __init__(self, *size, dtype=torch.float32):
            super().__init__()
            self.size, self.dtype = size or (1, 97), dtype

        def forward(self, *inputs):
            return torch.zeros(self.size, dtype=self.dtype)

    one, zero = torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for outline, inputs, expected in (
        (Other(), (one,), "a call has 2 values; expected tokens, start and logits"),
        (Other(), (one, zero, zero), "a call has 4 values"),
        (Other(), (one.int(), zero), "tokens [1, s] or start [1] is not int64"),
        (Other(), (one, zero.int()), "tokens [1, s] or start [1] is not int64"),
        (Other(), (one, one[0]), "tokens [1, s] or start [1] is not int64"),
        (Other(), (one[0], zero), "tokens is not a contiguous tensor of shape [1, n]"),
        (Other(), (one.t().contiguous(), zero), "tokens is not a contiguous tensor of shape [1, n]"),
        (Other(), (one, one), "start is not a contiguous tensor of shape [n]"),
        (Other(97), (one, zero), "logits is not a contiguous tensor of shape [1, n]"),
        (Other(1, 96), (one, zero), "logits has dtype float32 and 96 elements; expected floats and 97"),
        (Other(1, 97, dtype=torch.int32), (one, zero), "logits has dtype int32 and 97 elements"),
        (Other(), (one + 96, zero), "there is no token 97; expected 0 to 96"),
        (Other(), (one - 2, zero), "there is no token -1"),
        (Other(), (one, zero + 3), "a text of 0 tokens is cut to 3"),
        (Other(), (one, zero - 1), "a text of 0 tokens is cut to -1"),
        (Other(), (torch.ones(1, 129, dtype=torch.int64), zero), "gets 129; expected at most 128 altogether"),
    ):
        method = delegate.load(outline, inputs)
        with pytest.raises(RuntimeError):
            method.execute(inputs)
        logged = capfd.readouterr().err
        assert "LowbitPlan: " in logged and expected in logged, (expected, logged)
    # Logits of another float type are rounded.
    halves = delegate.load(Other(dtype=torch.bfloat16), (one, zero)).execute((one, zero))[0]
    with torch.inference_mode():
        assert torch.equal(halves, delegate.decoder(one, zero).bfloat16())
