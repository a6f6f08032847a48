"""Conversations with kept caches: the same answers as from scratch, with less computation."""

import pytest
import torch
from command_line import FLOAT, TINY
from lowbit import llm
from lowbit.llm.chat import Chat, Sampling, sampling_of
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.llm.templates import chat_template, render
from transformers import GenerationConfig

PLAIN = (TINY / "plain.jinja").read_text()  # concatenates the texts of all turns
STRICT = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role here') }}"
    "{% endif %}{{ message.content }}{% endfor %}"
)
STOP = 16  # a frequent token: ". "


@pytest.fixture(scope="module")
def model(packed):
    return load_model(packed[0])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FLOAT)


class Counted:
    """A decoder that records the number of tokens of each call, and raises in one of them."""

    def __init__(self, model, max_length: int):
        self.decoder, self.calls, self.stop_at = llm.Decoder(model, max_length), [], None

    def __call__(self, tokens, start):
        self.calls.append((int(start), tokens.shape[1]))
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        return self.decoder(tokens, start)


def chat(model, tokenizer, max_length: int = 256, **options) -> Chat:
    options = {"template": PLAIN, "max_new_tokens": 12} | options
    return Chat(Counted(model, max_length), model, tokenizer, max_length=max_length, **options)


def from_scratch(talk: Chat, message: str, number: int = 0) -> list[int]:
    """The answer after a new prefill of the whole conversation."""
    ids = render(talk.tokenizer, [*talk.messages, {"role": "user", "content": message}], talk.template)
    return llm.generate(
        talk.step.decoder, ids, talk.max_new_tokens, max_length=talk.max_length, seed=talk.seed + number,
        stop=talk.stop, **vars(talk.sampling),
    ).tokens  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, 40, 0.9, 1.3)], ids=["greedy", "drawn"])
def test_turns_are_those_from_scratch_and_compute_only_what_is_new(model, tokenizer, sampling):
    talk = chat(model, tokenizer, system="The module.\n", sampling=sampling, seed=3, stop=[STOP])
    last = None
    for number, message in enumerate(["Return the number", "\nRaise an error", "\nSee also"]):
        expected = from_scratch(talk, message, number)
        before = [int(token) for token in talk._cached]
        talk.step.calls.clear()
        if before:  # because the comparison used the same caches
            talk.step.decoder(torch.tensor([before]), torch.zeros(1, dtype=torch.int64))
        answer = talk.answer(message)
        assert answer.tokens == expected
        start, count = talk.step.calls[0]
        assert (start, start + count) == (answer.cached_tokens, answer.prompt_tokens)
        if number:  # the earlier prompt; for greedy answers also the answer, because sampled text may be tokenized differently
            assert answer.cached_tokens >= (last.prompt_tokens if sampling.temperature else len(before))
        last = answer
    assert talk.messages[0] == {"role": "system", "content": "The module.\n"} and len(talk.messages) == 7
    talk.reset(None)
    assert talk.messages == [] and talk.answer("Return").cached_tokens == 1  # only the first token


def test_tokens_that_the_template_writes_differently_are_computed_again(model, tokenizer):
    # Like templates that remove thoughts from earlier answers.
    template = "{% for message in messages %}{{ message.content if message.role == 'user' or loop.last else 'so' }}{% endfor %}"
    talk = chat(model, tokenizer, template=template)
    first = talk.answer("Return the number")
    expected = from_scratch(talk, " of items")
    talk.step.decoder(torch.tensor([talk._cached]), torch.zeros(1, dtype=torch.int64))
    answer = talk.answer(" of items")
    assert answer.tokens == expected
    assert 0 < answer.cached_tokens <= first.prompt_tokens < answer.prompt_tokens


def test_a_full_context_forgets_the_oldest_turns(model, tokenizer):
    talk = chat(model, tokenizer, max_length=64, system="The module.", max_new_tokens=8)
    forgotten = []
    for number in range(9):
        forgotten.append(talk.answer(f"\nReturn the number {number}").forgotten)
        ids = render(tokenizer, talk.messages, PLAIN)
        assert len(ids) <= 64 and talk.messages[0]["role"] == "system"
        assert talk.turns[-1][0].endswith(str(number))
    assert sum(forgotten) == 9 - len(talk.turns) > 2 and 0 in forgotten[4:]  # not again in every turn
    turns = list(talk.turns)
    with pytest.raises(ValueError, match=r"the message takes \d+ tokens with its template; expected fewer than the 64"):
        talk.answer("many words " * 40)
    assert talk.turns == turns
    long = chat(model, tokenizer, max_length=32, max_new_tokens=100)
    answer = long.answer("Return the number")
    assert (answer.stopped, answer.prompt_tokens + len(answer.tokens)) == ("max_length", 32)


def test_an_answer_that_is_stopped(model, tokenizer):
    talk = chat(model, tokenizer)
    expected = from_scratch(talk, "Return the number")
    talk.step.stop_at = 4
    answer = talk.answer("Return the number")
    assert (answer.stopped, answer.tokens) == ("interrupted", expected[:3])
    assert talk.turns == [("Return the number", answer.text)]
    talk.step.stop_at = None
    next_ = from_scratch(talk, "\nSee")
    talk.step.decoder(torch.tensor([talk._cached]), torch.zeros(1, dtype=torch.int64))
    assert talk.answer("\nSee").tokens == next_

    # Before its first token: as if the message had not been sent.
    turns = list(talk.turns)
    talk.step.calls.clear()
    talk.step.stop_at = 1
    answer = talk.answer("\nWhat")
    assert (answer.stopped, answer.tokens, talk.turns) == ("interrupted", [], turns)


def test_templates_that_are_missing_or_refuse(model, tokenizer):
    with pytest.raises(ValueError, match="has no chat template.*lowbit chat --template FILE"):
        chat_template(tokenizer, FLOAT)
    talk = chat(model, tokenizer, template=STRICT)
    talk.answer("x")
    turns = list(talk.turns)
    with pytest.raises(ValueError, match="does not take this conversation: .*no system role here"):
        talk.reset("Be brief")
    assert (talk.system, talk.turns) == (None, turns)
    with pytest.raises(ValueError, match="does not take this conversation"):
        chat(model, tokenizer, template="{% for %}").check()
    with pytest.raises(ValueError, match="the system prompt takes .* expected fewer than the 32"):
        chat(model, tokenizer, max_length=32, system="many words " * 40).check()


def test_settings_of_generation_config(model):
    def of(**settings):
        model.generation_config = GenerationConfig(**settings)
        return sampling_of(model)

    before = model.generation_config
    try:
        assert of() == (Sampling(), None, [])
        assert of(do_sample=True) == (Sampling(1.0, 50), None, [])
        assert of(do_sample=True, temperature=0.6, top_p=0.9, top_k=0) == (Sampling(0.6, None, 0.9), None, [])
        assert of(temperature=0.6, repetition_penalty=1.1, max_new_tokens=7) == (Sampling(0, None, None, 1.1), 7, [])
        assert of(do_sample=True, min_p=0.1) == (Sampling(1.0, 50, min_p=0.1), None, [])
        assert of(do_sample=True, top_h=0.1, num_beams=1)[2] == ["top_h"]
        model.generation_config.top_p = "high"
        with pytest.raises(ValueError, match="generation_config.json has top_p 'high'; expected a number"):
            sampling_of(model)
        model.generation_config.top_p = 1.5
        with pytest.raises(ValueError, match="top_p is 1.5; expected 0 to 1"):
            sampling_of(model)
        for wrong in ("yes", 1):
            model.generation_config = GenerationConfig()
            model.generation_config.do_sample = wrong
            with pytest.raises(ValueError, match=f"generation_config.json has do_sample {wrong!r}; expected true or false"):
                sampling_of(model)
        for stop in (-1, [1, True], [1, 2.0], "2"):
            model.generation_config.eos_token_id = stop
            with pytest.raises(ValueError, match="the eos_token_id of the model is .*; expected token ids"):
                stop_tokens(model)
        model.generation_config.eos_token_id = [2, 99999]
        with pytest.warns(UserWarning, match=r"the eos_token_id of the model has \[99999\]; its tokens are 0 to 2047"):
            assert stop_tokens(model) == [2, 99999]
    finally:
        model.generation_config = before


def test_repetition_penalty_is_that_of_transformers(model, tokenizer):
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = tokenizer("Return the number of items")["input_ids"]
    logits = llm.Decoder(model, 64)(torch.tensor([tokens]), torch.zeros(1, dtype=torch.int64))[0].float()
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), logits[None].clone())[0]
    found = torch.from_numpy(llm.penalties.penalize(logits, set(tokens), 1.3))
    assert torch.equal(found, expected) and not torch.equal(found, logits)
    with pytest.raises(ValueError, match="repetition_penalty is 0"):
        Sampling(repetition_penalty=0)
