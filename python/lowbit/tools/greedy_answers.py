"""Evaluates texts of a language model: greedy answers compared with a reference's, and tasks that a program checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..llm.batch import generate_batch
from ..llm.decoder import Decoder

if TYPE_CHECKING:
    from .tasks import Problem

LENGTHS = (16, 64, 256)  # numbers of first tokens of an answer that are compared
_AT_ONCE = 32  # answers that are computed together
_STEP = 16  # a decoder's length is a multiple of this
Answers = list[list[int]]  # token ids of each


@dataclass(frozen=True)
class Equality:
    """Result of :func:`compare_answers`."""

    equal: dict[int, float]  # number n of tokens -> share of answers whose first n tokens equal the reference's
    first: float | None  # mean number of equal tokens before the first difference, over answers that differ; None: all equal


@dataclass(frozen=True)
class Score:
    """The share of a task's problems that a model solves."""

    solved: int
    problems: int

    @property
    def share(self) -> float:
        return self.solved / self.problems

    @property
    def error(self) -> float:
        """The standard error of the share, if the problems are a sample of many."""
        return math.sqrt(self.share * (1 - self.share) / self.problems)


def read_prompts(path: Path) -> list[str]:
    """The prompts in a UTF-8 text file, one in a line; empty lines are left out.

    Raises:
        ValueError: the file has no prompt, or is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not prompts:
        raise ValueError(f"{path} has no prompt; expected a prompt in each line")
    return prompts


def prompt_tokens(tokenizer: Any, turns: Sequence[dict[str, str]]) -> list[int]:
    """The ids of a conversation that the model continues: in its chat template, or as lines of text if it has none.

    Args:
        tokenizer: a tokenizer of transformers.
        turns: messages with "role" ("user" or "assistant") and "content"; the last is the user's.
    """
    if tokenizer.chat_template is not None:
        return list(tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)["input_ids"])
    if len(turns) == 1:  # a text to continue
        return list(tokenizer(turns[0]["content"], verbose=False)["input_ids"])
    names = {"user": "Question", "assistant": "Answer"}
    text = "".join(f"{names[turn['role']]}: {turn['content']}\n" for turn in turns)
    return list(tokenizer(text + "Answer:", verbose=False)["input_ids"])


@torch.inference_mode()
def greedy_answers(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    new: int | Sequence[int],
    *,
    stop: Sequence[int] = (),
    until: Sequence[Callable[[int], bool] | None] | None = None,
    reference: Answers | None = None,
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Answers:
    """Continues each prompt with the most likely tokens.

    Args:
        model: a causal language model of transformers, quantized or not, in eval mode.
        prompts: token ids of each, at least one.
        new: largest number of tokens of an answer, for all or for each.
        stop: tokens that end an answer; they are not part of it.
        until: for each prompt, as for :func:`~lowbit.llm.batch.generate_batch`.
        reference: answers to the same prompts; instead of ``until``. Each answer ends at its first token that differs from
            them, because :func:`compare_answers` needs no more.
        cache: type of the KV cache; None: the model's dtype.
        progress: called with the number of answers so far and of all.

    Raises:
        ValueError: what :class:`~lowbit.llm.decoder.Decoder` and :func:`~lowbit.llm.batch.generate_batch` refuse.
    """
    counts = [new] * len(prompts) if isinstance(new, int) else list(new)
    longest = max(len(prompt) + count for prompt, count in zip(prompts, counts, strict=True))
    if reference is not None:
        if len(reference) != len(prompts):
            raise ValueError(f"the reference has {len(reference)} answers; expected {len(prompts)}, one for each prompt")
        until = [_differs_from(answer) for answer in reference]
    done = 0

    def on_end(_number: int, _result: Any) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(prompts))

    decoder = Decoder(model, -(-longest // _STEP) * _STEP, cache)
    try:
        found = generate_batch(decoder, prompts, counts, at_once=_AT_ONCE, stop=stop, until=until, on_end=on_end)
    finally:
        decoder.release()
    return [text.tokens for text in found]


def first_differences(answers: Answers, reference: Answers) -> list[int | None]:
    """The number of equal tokens before the first difference of each answer; None: the answer is the reference's.

    Raises:
        ValueError: another number of answers.
    """
    if len(answers) != len(reference):
        raise ValueError(f"{len(answers)} answers and {len(reference)} of the reference; expected as many")
    return [
        None if ours == theirs else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        for ours, theirs in zip(answers, reference, strict=True)
    ]


def equal_share(places: Sequence[int | None], length: int) -> float:
    """The share of answers whose first ``length`` tokens are the reference's, from :func:`first_differences`."""
    return sum(place is None or place >= length for place in places) / len(places)


def compare_answers(answers: Answers, reference: Answers, new: int) -> Equality:
    """Compares answers of up to ``new`` tokens with a reference's to the same prompts.

    The first n tokens are compared, for each n of LENGTHS up to ``new``. Shorter answers must end at the same token.

    Raises:
        ValueError: as :func:`first_differences`.
    """
    places = first_differences(answers, reference)
    different = [place for place in places if place is not None]
    equal = {length: equal_share(places, length) for length in LENGTHS if length <= new}
    return Equality(equal, sum(different) / len(different) if different else None)


def _differs_from(answer: list[int]) -> Callable[[int], bool]:
    """Whether a text's next token is not that of an answer."""
    expected = iter(answer)
    return lambda token: token != next(expected, None)


def _until(tokenizer: Any, is_complete: Callable[[str], bool]) -> Callable[[int], bool]:
    """Whether a text is complete with a further token."""
    tokens: list[int] = []

    def until(token: int) -> bool:
        tokens.append(token)
        return is_complete(tokenizer.decode(tokens))

    return until


def solve(
    model: torch.nn.Module,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    stop: Sequence[int] = (),
    cache: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """The share of problems that a model's greedy answers solve; arguments as for :func:`greedy_answers`."""
    prompts = [
        list(tokenizer(problem.text, verbose=False)["input_ids"])
        if problem.text is not None
        else prompt_tokens(tokenizer, problem.turns)
        for problem in problems
    ]
    until = [None if problem.is_complete is None else _until(tokenizer, problem.is_complete) for problem in problems]
    answers = greedy_answers(
        model, prompts, [problem.new for problem in problems], stop=stop, until=until, cache=cache, progress=progress
    )
    texts = (tokenizer.decode(answer, skip_special_tokens=True) for answer in answers)
    return Score(sum(problem.check(text) for problem, text in zip(problems, texts, strict=True)), len(problems))
