"""Models that the decoder refuses run with transformers' own attention and caches: `lowbit generate`, `chat` and `eval`."""

import json
import math
import shutil

import pytest
import torch
from command_line import FLOAT, document, error, invoke
from lowbit import LowBitConfig, llm
from lowbit.llm.chat import Chat
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity
from test_chat import PLAIN

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
# DiffLlama's layers call attention twice. Mamba's states cannot be cut back, and take one token at a time.
CONFIGS = {
    "diffllama": lambda: transformers.DiffLlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256, **SIZES
    ),
    "mamba": lambda: transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, state_size=8, **SIZES),
}  # fmt: skip
PROMPT = "Return the number of items"
# In transformers 5.0 states are wrong after a prompt of one token. The fallback detects this and computes each token anew.
STATES_ARE_WRONG = transformers.__version__.startswith("5.0.")


def continues(model) -> bool:
    """Whether a fallback should continue a text with the model's caches."""
    return not (STATES_ARE_WRONG and model.config.model_type == "mamba")


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2))
    path = tmp_path_factory.mktemp(request.param) / "model"
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    for file in FLOAT.glob("token*"):
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text(PLAIN)
    return path


def generated(model, ids: list[int], new: int) -> list[int]:
    """The result of transformers' generate()."""
    prompt = torch.tensor([ids])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
    return made[0, len(ids) :].tolist()


@pytest.mark.parametrize("bits", [None, 4])
def test_generate_writes_what_transformers_generate_writes(checkpoint, bits):
    ids = load_tokenizer(checkpoint)(PROMPT)["input_ids"]
    model = load_model(checkpoint, bits and LowBitConfig(bits=bits))
    expected = generated(model, ids, 24)
    assert len(set(expected)) > 3
    more = ("--bits", bits) if bits else ()
    result = invoke("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24, "--json", *more)
    said = document(result)
    assert said["tokens"] == expected
    notes = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    how = "its caches continue" if continues(model) else "its caches do not continue"
    assert len(notes) == 1 and f"the model runs with transformers' own attention instead, and {how}" in notes[0]
    assert notes[0].startswith("lowbit's decoder is not for ") and said["refusal"] in notes[0]
    shown = invoke("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24, *more)
    assert shown.stdout == said["text"] + "\n"


def test_generate_draws_and_stops_as_with_the_decoder(checkpoint, tmp_path):
    model = load_model(checkpoint)
    ids = load_tokenizer(checkpoint)(PROMPT)["input_ids"]
    step, settings = llm.Fallback(model, 128), {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 5}
    drawn = llm.generate(step, ids, 12, max_length=128, **settings).tokens
    # Samples equally from logits that are computed for the whole text each time.
    text = list(ids)

    def whole(tokens, start):
        text[int(start) :] = tokens[0].tolist()
        return model(torch.tensor([text]), use_cache=False).logits[:, -1]

    assert drawn == llm.generate(whole, ids, 12, max_length=128, **settings).tokens
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    said = document(invoke("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", *options))
    assert said["tokens"] == drawn
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": drawn[5]}))
    said = document(invoke("generate", tmp_path / "model", "--prompt", PROMPT, "--json", *options))
    assert (said["tokens"], said["stopped"]) == (drawn[: drawn.index(drawn[5])], "stop")


def test_a_continued_conversation_equals_one_from_scratch(checkpoint):
    messages = ["Return the number", " of", "\nSee also"]
    said = document(invoke("chat", checkpoint, "--max-new-tokens", 8, "--json", stdin="\n".join(messages[:2]) + "\n"))
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)

    def talk(template: str) -> Chat:
        return Chat(llm.Fallback(model, 256), model, tokenizer, template, 256, max_new_tokens=8)

    # A template that rewrites earlier answers changes the text: caches are cut back, or restarted.
    changing = "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else 'so' }}{% endfor %}"
    for template in (PLAIN, changing):
        going = talk(template)
        for number, message in enumerate(messages):
            anew = talk(template)
            anew.turns = list(going.turns)
            expected, answer = anew.answer(message), going.answer(message)
            assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
            assert expected.cached_tokens == 0
            if going.step.cuts:
                assert (answer.cached_tokens > 0) == (number > 0)
            if template == PLAIN and number < 2:
                assert said["turns"][number]["answer"] == answer.text
    step, computed = going.step, answer.prompt_tokens + 7  # all but the last token
    kept = (computed, 5 if step.cuts else 0) if continues(model) else (0, 0)
    assert (step.kept(computed), step.kept(5)) == kept


def test_an_interrupted_call_does_not_change_the_text(checkpoint, monkeypatch):
    model = load_model(checkpoint)
    step, ids = llm.Fallback(model, 128), load_tokenizer(checkpoint)(PROMPT)["input_ids"]
    tokens = torch.tensor([ids])
    expected = [step(tokens, torch.tensor([0])), step(torch.tensor([[7]]), torch.tensor([len(ids)]))]
    assert torch.equal(step(tokens, torch.tensor([0])), expected[0])
    forward = type(model).forward

    def interrupted(*arguments, **more):
        forward(*arguments, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(torch.tensor([[7]]), torch.tensor([len(ids)]))
    monkeypatch.undo()
    again = step(torch.tensor([[7]]), torch.tensor([len(ids)]))
    assert (again - expected[1]).abs().max() <= 1e-4 * expected[1].std()


def test_options_that_need_the_decoder_are_refused(checkpoint):
    base = ("generate", checkpoint, "--prompt", PROMPT)
    for options in (("--guesses", 4), ("--draft", FLOAT)):
        message = error(invoke(*base, *options))
        assert message.startswith(f"{options[0]} requires lowbit's decoder; lowbit's decoder is not for ")
    step = llm.Fallback(load_model(checkpoint), 64)
    with pytest.raises(ValueError, match="a Fallback gives no logits for guesses"):
        llm.generate(step, [5], 4, max_length=64, guesses=2)
    with pytest.raises(IndexError, match="start is 5; expected at most 0, the tokens that came before"):
        step(torch.tensor([[1]]), torch.tensor([5]))
    with pytest.raises(IndexError, match="no more than the max_length of 64"):
        step(torch.ones(1, 65, dtype=torch.int64), torch.tensor([0]))
    with pytest.raises(ValueError, match="there is no token 2048"):
        step(torch.tensor([[2048]]), torch.tensor([0]))


def test_eval(checkpoint, tmp_path):
    tokens = load_tokenizer(checkpoint)("Return the number of items.\n" * 6)["input_ids"]
    model = load_model(checkpoint)
    found = perplexity(model, tokens, window=len(tokens), stride=1)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
    assert math.isclose(found.nats, nats, rel_tol=1e-6)
    (tmp_path / "text.txt").write_text("Return the number of items.\n" * 6)
    result = invoke("eval", checkpoint, "--text", tmp_path / "text.txt", "--window", len(tokens), "--stride", 9, "--json")
    assert math.isclose(document(result)["results"][0]["perplexity"], found.perplexity, rel_tol=1e-6)


def test_a_model_that_attends_to_later_tokens_is_refused():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.BertLMHeadModel(config).eval()
    for attempt in (lambda: llm.Fallback(model, 64), lambda: perplexity(model, [1, 2, 3], window=2, stride=1)):
        with pytest.raises(ValueError, match=r"\(model_type bert\) .*change with the tokens that follow"):
            attempt()
    with pytest.raises(ValueError, match="max_length is 1024; expected at most the model's 512 positions"):
        llm.Fallback(model, 1024)
    with pytest.raises(ValueError, match="max_length is 0; expected a positive number"):
        llm.Fallback(model, 0)
    with pytest.raises(ValueError, match="training mode"):
        llm.Fallback(model.train(), 64)
