"""A small trained language model in ExecuTorch and AOTInductor, from Python and C++, gives the tokens of eager.

lowbit's operators have the same bits everywhere. A .pte is a plan of them in one delegate, or a program with them, which runs
them for norms, rotary positions and activation functions, too: its logits are eager's, bit for bit. In a .pt2 these
are AOTInductor's code, whose last bits may differ and can move an activation to the next int8 value: logits are near eager's
(measured: 0.16 of about 20), and the likeliest token is the same except for near ties.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import lowbit
import lowbit.llm
import pytest
import torch
from lowbit.exports.token_file import TextSettings, token_bytes
from lowbit.llm import TextUntil
from lowbit.llm.loading import load_model
from reference import HEADER_BYTES
from runners import EXAMPLE, HERE, KINDS, KINDS_AND_CPUS, KINDS_AND_PROCESSORS, Runner, packed_bytes_altered

transformers = pytest.importorskip("transformers")

# executorch and torch.export emit deprecation warnings about their own and each other's code.
pytestmark = [
    pytest.mark.more,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
    ),
]

MODEL = EXAMPLE.parent / "tiny_llama" / "model"
MAX_LENGTH, CHUNK, NEW = 256, 32, 32
# The second is longer than two chunks.
PROMPTS = ["Create a new", " ".join(["The following example shows how to use the class in a program."] * 6)]
NEAR_TIE = 0.3  # between the logits of two tokens
WITHOUT_PLAN = "operators"  # a .pte whose program has operators instead of a plan
FILES = [*KINDS, WITHOUT_PLAN]


@dataclass
class Exported:
    decoder: lowbit.llm.Decoder
    prompts: list[list[int]]
    expected: list[list[int]]  # NEW tokens for each prompt, in eager
    files: dict[str, Path]  # one of each of FILES

    @torch.inference_mode()
    def check_likeliest(self, prompt: list[int], tokens: list[int]) -> None:
        """Each token is the likeliest one in eager after the prompt and the tokens before it, or a near tie."""
        assert len(tokens) == NEW
        text, start = torch.tensor([prompt]), 0
        for i, token in enumerate(tokens):
            logits = self.decoder(text, torch.tensor([start]))[0]
            assert logits.max() - logits[token] < NEAR_TIE, (i, tokens, logits.topk(3))
            start += text.shape[1]
            text = torch.tensor([[token]])


def export_all(decoder: lowbit.llm.Decoder, directory: Path, **options) -> dict[str, Path]:
    files = {kind: directory / f"{kind}.{'pte' if kind == WITHOUT_PLAN else kind}" for kind in FILES}
    for kind, file in files.items():
        lowbit.llm.export_decoder(decoder, file, chunk=CHUNK, plan=kind != WITHOUT_PLAN, **options)
    return files


@pytest.fixture(scope="session")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def quantized() -> torch.nn.Module:
    """The first and last of five layers, because each takes seconds to export. With these the text does not just repeat a few
    tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    del model.model.layers[1:-1]
    model.model.layers[1].self_attn.layer_idx = 1
    model.config.num_hidden_layers = 2
    embedding = lowbit.EmbeddingConfig(bits=4, group_size=32)
    return lowbit.quantize_(model, {"*": lowbit.LinearConfig(bits=4, group_size=32), "*embed_tokens": embedding})


@pytest.fixture(scope="session")
def exported(executorch, tokenizer, tmp_path_factory) -> Exported:
    """At 4 bits; test_cpp_runners.py tests all widths in a small module."""
    decoder = lowbit.llm.Decoder(quantized(), MAX_LENGTH)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert len(prompts[0]) < CHUNK and 2 * CHUNK < len(prompts[1]) < MAX_LENGTH - NEW
    expected = [lowbit.llm.generate(decoder, p, NEW, max_length=MAX_LENGTH).tokens for p in prompts]
    assert all(len(tokens) == NEW and len(set(tokens)) > 8 for tokens in expected)
    return Exported(decoder, prompts, expected, export_all(decoder, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session", params=["int8", "int8,int4"])
def small_caches(request, executorch, tmp_path_factory) -> Exported:
    """Random weights over caches of codes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
        tie_word_embeddings=True, head_dim=32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    decoder = lowbit.llm.Decoder(lowbit.quantize_(model, {"*": lowbit.LinearConfig(4, 16)}), 128, request.param)
    prompts = [[5, 91, 3, 44, 17], [(7 * i + 3) % 97 for i in range(70)]]
    expected = [lowbit.llm.generate(decoder, p, NEW, max_length=128).tokens for p in prompts]
    # Without XNNPACK, whose lowering is slowest; the other model uses it.
    return Exported(decoder, prompts, expected, export_all(decoder, tmp_path_factory.mktemp(request.param), xnnpack=False))


@pytest.fixture(scope="session")
def others(executorch, tmp_path_factory) -> dict[str, Path]:
    """Programs that are not decoders, by kind."""
    files = {kind: tmp_path_factory.mktemp("others") / f"other.{kind}" for kind in KINDS}
    for kind, file in files.items():
        getattr(lowbit, f"export_{kind}")(torch.nn.ReLU(), (torch.zeros(2),), file)
    return files


@pytest.mark.parametrize("kind", FILES)
def test_caches_of_codes_in_a_file(kind, small_caches, runners):
    """The file describes its caches; neither Python nor C++ needs another argument."""
    program = runners("llm_runner_pt2" if kind == "pt2" else "llm_runner", HERE)
    step = lowbit.llm.load_decoder(small_caches.files[kind])
    for prompt in small_caches.prompts:
        tokens = lowbit.llm.generate(step, prompt, NEW, max_length=128, stop=step.stop).tokens
        if kind != "pt2":
            assert tokens == lowbit.llm.generate(small_caches.decoder, prompt, NEW, max_length=128).tokens
        elif small_caches.decoder.cache_type == "int8":
            # With 4-bit codes, the last bit can change a code, and a step of 16 levels is large.
            small_caches.check_likeliest(prompt, tokens)
        process = program("--ids", listed(prompt), "--max-new-tokens", NEW, small_caches.files[kind])
        assert process.returncode == 0, process.stderr
        assert [int(token) for token in process.stdout.split()] == tokens


def load(exported: Exported, kind: str) -> lowbit.llm.ExportedDecoder:
    return lowbit.llm.load_decoder(exported.files[kind])


@pytest.fixture(params=KINDS_AND_PROCESSORS, ids=" ".join)
def runner(runners, request) -> Runner:
    kind, cpu = request.param
    return runners({"pte": "llm_runner", "pt2": "llm_runner_pt2"}[kind], cpu)


@pytest.fixture(params=KINDS_AND_CPUS, ids=" ".join)
def every_runner(runners, request) -> Runner:
    kind, cpu = request.param
    return runners({"pte": "llm_runner", "pt2": "llm_runner_pt2"}[kind], cpu)


def listed(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def made(exported: Exported, kind: str, prompt: int) -> list[int]:
    """Results of a file for a prompt, in Python."""
    step = load(exported, kind)
    return lowbit.llm.generate(step, exported.prompts[prompt], NEW, max_length=MAX_LENGTH, stop=step.stop).tokens


# In C++.


def test_the_runner_makes_the_tokens_of_eager(every_runner, exported):
    for kind in ["pt2"] if every_runner.kind == "pt2" else ["pte", WITHOUT_PLAN]:
        for prompt in exported.prompts:
            process = every_runner("--ids", listed(prompt), "--max-new-tokens", NEW, exported.files[kind])
            assert process.returncode == 0, process.stderr
            exported.check_likeliest(prompt, [int(token) for token in process.stdout.split()])
            assert process.stderr == ""


def test_the_runner_samples(runner, exported):
    prompt, file = exported.prompts[0], exported.files[runner.kind]

    def tokens(*options) -> list[int]:
        process = runner("--ids", listed(prompt), "--max-new-tokens", NEW, *options, file)
        assert process.returncode == 0, process.stderr
        return [int(token) for token in process.stdout.split()]

    likeliest = tokens()
    drawn = tokens("--temperature", 1.5, "--seed", 1)
    assert drawn == tokens("--temperature", 1.5, "--seed", 1, "--threads", 1)
    assert drawn != likeliest and drawn != tokens("--temperature", 1.5, "--seed", 2)
    # Only one token remains to sample from; the others have probability zero.
    assert tokens("--temperature", 1.5, "--top-p", 0) == tokens("--temperature", 0.0001) == likeliest


def test_the_runner_stops(runner, exported):
    """At the model's maximum length."""
    prompt, file = exported.prompts[0] * 100, exported.files[runner.kind]
    process = runner("--ids", listed(prompt[: MAX_LENGTH - 3]), "--stats", file)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.split()) <= 3
    assert re.search(rf"^prompt: {MAX_LENGTH - 3} tokens in \S+ s, \S+ tokens/s$", process.stderr, re.M)


@pytest.mark.parametrize("kind", ["pte", "plan"])
def test_the_runner_continues_a_saved_text(kind, runners, exported, tmp_path):
    """Length and caches chosen at load; a text in two calls has the tokens of one."""
    file, name = exported.files["pte"], "llm_runner"
    if kind == "plan":
        name = "llm_runner_plan"
        lowbit.quantize_checkpoint(MODEL, tmp_path / "model", lowbit.LowBitConfig(bits=4))
        file = tmp_path / "model" / "lowbit.plan"
        lowbit.llm.export_decoder(lowbit.llm.Decoder(load_model(file.parent), 64), file)
    program, text = runners(name, HERE), tmp_path / "text"
    options = ["--max-length", 100, "--cache", "int8,int4", file]

    def tokens(ids, new, *more) -> list[int]:
        process = program("--ids", listed(ids), "--max-new-tokens", new, *more, *options)
        assert process.returncode == 0, process.stderr
        return [int(token) for token in process.stdout.split()]

    whole = tokens(exported.prompts[0], 24)
    first = tokens(exported.prompts[0], 9, "--save", text)
    assert first + tokens(first[-1:], 15, "--load", text) == whole
    length = len(exported.prompts[0])
    for wrong, message in (
        (["--max-length", length], f"expected fewer than the model's {length}"),
        (["--max-length", 1 << 30], "a text has room for"),
        (["--cache", "int3"], "int3"),
        (["--cache", "int8,float16"], "keys and values have the cache types 3 and 2"),
        (["--load", tmp_path / "none"], "none"),
        (["--save", tmp_path / "none" / "text"], "none"),
    ):
        assert message in program.refusal("--ids", listed(exported.prompts[0]), *wrong, file)
    if kind == "pte":
        for wrong in (["--max-length", 100], ["--load", text]):
            message = program.refusal("--ids", "5", *wrong, exported.files[WITHOUT_PLAN])
            assert "has no plan" in message


def test_the_runner_refuses(runner, exported, tmp_path):
    file = exported.files[runner.kind]
    for arguments, expected in (
        ([file], "no prompt was given"),
        (["--ids", "1"], "no model was given"),
        (["--ids", "1,,2", file], "--ids is '1,,2'; expected numbers separated by commas"),
        (["--ids", "1,2,", file], "--ids is '1,2,'; expected numbers"),
        (["--ids", "1;2", file], "--ids is '1;2'; expected numbers"),
        (["--ids", "99999999999999999999", file], "expected numbers"),
        (["--ids", "5,2048", file], "the prompt has token 2048; expected 0 to 2047"),
        (["--ids", "5,-1", file], "the prompt has token -1; expected 0 to 2047"),
        (["--ids", listed([5] * MAX_LENGTH), file], f"has {MAX_LENGTH} tokens; expected fewer than the model's"),
        (["--ids", "5", "--max-new-tokens", "0", file], "--max-new-tokens is '0'; expected a number from 1"),
        (["--ids", "5", "--temperature", "nan", file], "--temperature is 'nan'; expected a number from 0"),
        (["--ids", "5", "--top-p", "2", file], "--top-p is '2'; expected"),
        (["--ids", "5", "--threads", "x", file], "--threads is 'x'; expected"),
        (["--ids", "5", "--nonsense", file], "unknown option --nonsense"),
        (["--ids", "5", file, file], "more than one model"),
        (["--ids", "5", file, "--seed"], "--seed needs a value"),
        (["--ids", "5", tmp_path / f"none.{runner.kind}"], f"none.{runner.kind} does not load"),
    ):
        message = runner.refusal(*arguments)
        assert expected in message, (arguments, message)


def test_the_runner_refuses_files(runner, exported, tmp_path):
    file = exported.files[runner.kind]
    data, broken = file.read_bytes(), tmp_path / f"broken.{runner.kind}"
    for length in (0, 40, len(data) // 2, len(data) - 200):
        broken.write_bytes(data[:length])
        assert f"{broken} does not load" in runner.refusal("--ids", "5", broken), length
    if runner.kind == "pte":
        packed_bytes_altered(file, broken, HEADER_BYTES - 1)
        message = runner.refusal("--ids", "5", broken)
        assert f"{broken} does not load" in message and "has changed since the plan was made" in message
        file = exported.files[WITHOUT_PLAN]
    packed_bytes_altered(file, broken, HEADER_BYTES - 1)
    message = runner.refusal("--ids", "5", broken)
    assert "the call failed" in message and "packed" in message


def test_the_runner_refuses_other_models(runner, others, tmp_path):
    expected = {"pte": "does not have inputs tokens [1, s] and start [1], both int64", "pt2": "has no 'lowbit.llm.max_length'"}
    assert expected[runner.kind] in runner.refusal("--ids", "5", others[runner.kind])
    if runner.kind == "pte":
        step = exported_step_without_constants(tmp_path / "step.pte")
        assert "has no method 'get_max_context_len'" in runner.refusal("--ids", "5", step)


def exported_step_without_constants(path: Path) -> Path:
    class Step(torch.nn.Module):
        def forward(self, tokens, start):
            return (tokens + start).float()

    lowbit.export_pte(Step(), (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)), path)
    return path


def test_neither_python_nor_torch_is_needed(runners):
    libraries = {name: runners(name, HERE).libraries() for name in ("llm_runner", "llm_runner_pt2")}
    assert {"liblowbit.so", "lowbit_executorch.so", "libexecutorch.so"} <= libraries["llm_runner"]
    assert not [name for name in libraries["llm_runner"] if name.startswith(("libtorch", "libc10"))]
    assert not [name for names in libraries.values() for name in names if "python" in name]


def test_text_to_text(runners, exported, tokenizer, tmp_path):
    """With the tokenizer and the chat template in C++."""
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content | trim }}\n{% endfor %}# assistant:"
    content = token_bytes(tokenizer.backend_tokenizer, TextSettings(template=template))
    (tmp_path / "lowbit.tokens").write_bytes(content)
    chat = tokenizer(f"# user: {PROMPTS[0]}\n# assistant:", add_special_tokens=False)["input_ids"]
    for kind in ("pte", WITHOUT_PLAN, "pt2"):
        program, file = runners("llm_runner_pt2" if kind == "pt2" else "llm_runner", HERE), exported.files[kind]
        options = ("--tokens", tmp_path, "--max-new-tokens", NEW)
        for prompt, given in (
            (exported.prompts[0], ["--prompt", PROMPTS[0]]),
            (chat, ["--chat", "--prompt", f" {PROMPTS[0]} "]),
        ):
            tokens = program("--ids", listed(prompt), "--max-new-tokens", NEW, file).stdout.split()
            text = TextUntil(tokenizer, prompt)
            for token in tokens:
                text(int(token))
            process = program(*options, *given, file)
            assert process.returncode == 0 and process.stderr == "", process.stderr
            assert process.stdout == text.finish() + "\n"
    for wrong, message in (
        (["--prompt", "a"], "expected --ids alone, or --tokens and --prompt"),
        (["--ids", "1", *options, "--prompt", "a"], "expected --ids alone"),
        ([*options], "expected --ids alone"),
        (["--ids", "1", "--chat"], "expected --ids alone"),
        (["--tokens", tmp_path / "none", "--prompt", "a"], "none"),
    ):
        assert message in runners("llm_runner", HERE).refusal(*wrong, exported.files["pte"])


# In Python.


@pytest.mark.parametrize("kind", FILES)
def test_generate_makes_the_tokens_of_eager(exported, kind):
    step = load(exported, kind)
    assert (step.max_length, step.chunk, step.vocabulary, step.stop) == (MAX_LENGTH, CHUNK, 2048, (1,))
    for number, prompt in enumerate(exported.prompts):
        exported.check_likeliest(prompt, made(exported, kind, number))


@torch.inference_mode()
@pytest.mark.parametrize("kind", FILES)
def test_pieces(exported, kind):
    """Logits do not depend on how a text is split into calls, nor earlier content of the caches; in a .pt2 up to rounding."""
    step, decoder = load(exported, kind), exported.decoder
    text = torch.tensor([exported.prompts[1]])
    length = text.shape[1]
    whole = step(text, torch.tensor([0]))
    expected = decoder(text, torch.tensor([0]))
    assert whole.shape == expected.shape and whole.dtype == expected.dtype
    bound = NEAR_TIE if kind == "pt2" else 0
    assert (whole - expected).abs().max() <= bound
    for pieces in ([1] * length, [CHUNK] * 2 + [length - 2 * CHUNK], [5, length - 6, 1]):
        start = 0
        for size in pieces:
            logits = step(text[:, start : start + size], torch.tensor([start]))
            start += size
        assert start == length and (logits - whole).abs().max() <= bound, pieces
    # The caches matter: the last token alone, or after another text, gives other logits.
    assert (step(text[:, -1:], torch.tensor([0])) - whole).abs().max() > 10 * NEAR_TIE
    step(text.flip(1), torch.tensor([0]))
    assert (step(text[:, -1:], torch.tensor([length - 1])) - whole).abs().max() > 3 * NEAR_TIE


@pytest.mark.parametrize("kind", FILES)
def test_bad_calls(exported, kind):
    step = load(exported, kind)
    one, zero = torch.tensor([[5]]), torch.tensor([0])
    good = step(one, zero)
    for tokens, start, expected in (
        (one.int(), zero, "tokens is torch.int32"),
        (one[0], zero, r"tokens is torch.int64 \[1\]; expected torch.int64 \[1, s\]"),
        (one[:, :0], zero, r"tokens is torch.int64 \[1, 0\]"),
        (one, zero[0], r"start is torch.int64 \[\]; expected torch.int64 \[1\]"),
    ):
        with pytest.raises(ValueError, match=expected):
            step(tokens, start)
    for tokens, start, error, expected in (
        (one * 2048, zero, ValueError, "there is no token 10240; expected 0 to 2047"),
        (-one, zero, ValueError, "there is no token -5"),
        (one, zero + MAX_LENGTH, IndexError, "start is 256 and there are 1 tokens; .* max_length of 256"),
        (one, zero - 1, IndexError, "start is -1"),
    ):
        with pytest.raises(error, match=expected):
            step(tokens, start)
    assert torch.equal(step(one, zero), good)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_files(exported, others, kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*none"):
        lowbit.llm.load_decoder(tmp_path / f"none.{kind}")
    other = tmp_path / f"other.{kind}"
    other.write_bytes(exported.files[kind].read_bytes()[:5000])
    with pytest.raises(ValueError, match=f"other.{kind} does not load, or is not what lowbit.llm.export_decoder writes"):
        lowbit.llm.load_decoder(other)
    with pytest.raises(ValueError, match=f"other.{kind} does not load, or is not what lowbit.llm.export_decoder writes"):
        lowbit.llm.load_decoder(others[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_bad_exports(exported, kind, tmp_path):
    export = lowbit.llm.export_decoder
    for chunk in (0, MAX_LENGTH + 1):
        with pytest.raises(ValueError, match=f"chunk is {chunk}; expected 1 to the decoder's max_length of 256"):
            export(exported.decoder, tmp_path / f"m.{kind}", chunk=chunk)
    with pytest.raises(ValueError, match="ends in .plan, .pte or .pt2"):
        export(exported.decoder, tmp_path / "m.bin")
    assert not list(tmp_path.iterdir())


def test_a_file_of_single_steps_and_stop_tokens(exported, executorch, runners, tokenizer, tmp_path):
    """With a chunk of 1 nothing is dynamic. Custom stop tokens end the text."""
    prompt, expected = exported.prompts[0], exported.expected[0]
    stop = next(token for token in expected[4:] if expected.index(token) > 4)
    file = tmp_path / "single.pte"
    lowbit.llm.export_decoder(exported.decoder, file, chunk=1, stop=[2047, stop], xnnpack=False)
    step = lowbit.llm.load_decoder(file)
    assert step.chunk == 1 and step.stop == (2047, stop)
    free = lowbit.llm.generate(step, prompt, NEW, max_length=step.max_length).tokens
    exported.check_likeliest(prompt, free)
    until = free[: free.index(stop)]
    assert lowbit.llm.generate(step, prompt, NEW, max_length=step.max_length, stop=step.stop).tokens == until
    process = runners("llm_runner", HERE)("--ids", listed(prompt), file)
    assert process.stdout.split() == [str(token) for token in until], process.stderr


TEXT_LLM_RUNNER = """
import sys
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
model, tokenizer, new, *prompts = sys.argv[1:]
runner = TextLLMRunner(model, tokenizer)
config = GenerationConfig(echo=False, temperature=0.0, max_new_tokens=int(new), num_bos=1, num_eos=0)
for prompt in prompts:
    pieces = []
    for _ in range(2):
        runner.generate(prompt, config, pieces.append)
        runner.reset()
    sys.stdout.write("<<" + "".join(pieces) + ">>")
"""


def test_executorchs_own_runner(exported, run_python, tokenizer):
    """TextLLMRunner, twice with the same text, without lowbit's code; in a separate process, because it has its own threads."""
    for kind in ("pte", WITHOUT_PLAN):
        process = run_python(TEXT_LLM_RUNNER, exported.files[kind], MODEL / "tokenizer.json", NEW, *PROMPTS)
        assert process.returncode == 0, process.stderr
        for prompt in range(len(PROMPTS)):
            text = tokenizer.decode(made(exported, kind, prompt), skip_special_tokens=True)
            assert f"<<{text}{text}>>" in process.stdout, process.stderr


# Plans in a .pte.


def test_a_changed_model_is_exported_without_its_plan(executorch, tmp_path):
    decoder = lowbit.llm.Decoder(quantized(), 32)
    decoder.model.model.norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    lowbit.llm.export_decoder(decoder, tmp_path / "m.pte", chunk=4, xnnpack=False)
    assert decoder.plan_refusal == "the model has been changed since the decoder was made"
    assert b"lowbit plan" not in (tmp_path / "m.pte").read_bytes()
