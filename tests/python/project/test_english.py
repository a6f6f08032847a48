"""Plain American English in all tracked texts and sources: the part of CONTRIBUTING.md's rule that a test can check."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OWN = "tests/python/project/test_english.py"  # contains the forbidden forms

# British spellings; verbs in -ise without an -ize form are American.
AMERICAN_ISE = (
    r"(?:[fm]?adv|appra|ar|comprom|compr|conc|cru|dem|dev|disgu|enterpr|exc|exerc|expert|franch|improv|no|parad|po|pra|prec"
    r"|prem|prom|ra|rev|r|superv|surpr|telev|treat|\w*w)is(?:e|es|ed|ing|er|ers)|nraises?|awaitpromise|\w*disable[ds]?"
)
BRITISH = re.compile(
    rf"(?!(?:{AMERICAN_ISE})$)\w{{3,}}is(?:e|es|ed|ing|er|ers|ation|ations)"
    r"|\w*(?:colour|behaviour|favour|honour|neighbour|labour|flavour|fibre|theatre|catalogue|paralyse|licence|defence|offence"
    r"|travelled|travelling|modelled|modelling|labelled|labelling|cancelled|cancelling|signalled|signalling|levelled|fuelled"
    r"|skilful|judgement|artefact|manoeuvre)\w*"
    r"|grey|centre[sd]?|metres?|litres?|analyse[sdr]?|analysing|fulfil|enrol|cheque|tyre|whilst|amongst|learnt|spelt|burnt",
    re.IGNORECASE,
)

# Phrases that readers had to read twice, in every file.
EVERYWHERE = [
    r"for ever\b",
    r"guessed tokens\b",
    r"means? nothing (?:with|without|here)",
    r"as far as there (?:is|are)\b",
    r"(?:,|and|or) so (?:is|are|does|do) (?:one|those|who)\b",
    r"of (?:it|them|those) what\b(?! mkdocstrings)",
    r"what is none\b",
    r"but is none\b",
    r"which is not that\b",
    r"panel after panel\b",
    r"of old\b",
    r"as is (?:faster|told)\b",
    r"mends?\b",
    r"seldom\b",
    r"full citizen",
    r"without a word\b",
    r"heads of (?:queries|keys|values)\b",
    r"says? of (?:it|itself|themselves)\b",
    r"what it (?:says|takes|makes)\b",
    r"behind (?:it|them|the (?:last|first|others?|end)|another|nothing)\b",
    r"lies? (?:behind|beside)\b",
    r"as (?:it|they) lies?\b",
    r"(?:comes?|came) to (?:before|nothing|now)\b",
    r"of so many\b",
    r"by way of\b",
    r"changes? (?:its|their) minds?\b",
    r"made up for by\b",
    r"the other way round\b",
    r"is for good\b",
    r"[Ww]hoever\b",
    r"nobody\b",
    r"somebody\b",
    r"(?:one|panels?) (?:behind the other|in step)\b",
    r"(?<![Tt]here )(?:is|are|was|were) no (?!longer\b|more\b|less\b|other\b|\w+er\b)[a-z]+",
    r"in the place of\b",
    r"wants? (?!to\b)(?:a|an|its|CUDA|torch|one)\b",
    r"who (?:asks|knows|calls|adds|builds|keeps|reads|needs|wants|releases|runs)\b",
    r"at hand\b",
    r"of our own\b",
    r"all but where\b",
    r"so is what\b",
    r"one a line\b",
    r"tokens' file\b",
]
# The same, in documents only.
IN_DOCUMENTS = [r"anew\b", r"that there (?:is|are)\b"]
# Pages written by a program, and pages not yet rewritten.
GENERATED = {"docs/arm_cost.md", "docs/x86_cost.md", "docs/bench.md", "docs/models.md", "docs/overhead.md"}
TO_REWRITE: set[str] = set()


@cache
def texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name.endswith((".md", ".py", ".pyi", ".h", ".cpp", ".c")) and name != OWN]
    assert len(names) > 400
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).is_file()}


def documents() -> dict[str, str]:
    return {name: text for name, text in texts().items() if name.endswith(".md") and name not in GENERATED | TO_REWRITE}


def found(pattern: re.Pattern, inside: dict[str, str]) -> list[str]:
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in inside.items()
        for match in pattern.finditer(text)
    ]


def phrases(patterns: list[str]) -> re.Pattern:
    return re.compile(rf"\b(?:{'|'.join(patterns)})")


def headings_without_text(text: str) -> list[int]:
    """Lines of tables with an empty heading. A drawing in a code block is not a table."""
    lines = text.split("\n")
    return [
        number
        for number, (line, below) in enumerate(zip(lines, lines[1:], strict=False), 1)
        if re.fullmatch(r"\|(?: *:?-+:? *\|)+", below) and "" in (cell.strip() for cell in line.strip()[1:-1].split("|"))
    ]


@pytest.mark.parametrize(
    "word", ["quantise", "initialisation", "Colours", "behaviour", "neighbouring", "grey", "labelled", "analyse"]
)
def test_british_forms_are_found(word):
    assert BRITISH.fullmatch(word)


@pytest.mark.parametrize(
    "word", ["quantize", "raise", "otherwise", "noise", "promised", "rising", "exercises", "analysis", "greyhound"]
)
def test_american_forms_are_not(word):
    assert not BRITISH.fullmatch(word)


def test_spelling():
    words = {name: {word.lower() for word in set(re.findall("[A-Za-z]+", text))} for name, text in texts().items()}
    british = {word for word in set().union(*words.values()) if BRITISH.fullmatch(word)}
    assert {word: [name for name, inside in words.items() if word in inside] for word in british} == {}


def test_phrases():
    assert phrases(EVERYWHERE).search("it waits for ever") and phrases(IN_DOCUMENTS).search("start anew")
    assert found(phrases(EVERYWHERE), texts()) == []
    assert found(phrases(IN_DOCUMENTS), documents()) == []
    assert all((ROOT / name).is_file() for name in GENERATED | TO_REWRITE)


def test_tables_have_a_heading_for_each_column():
    assert headings_without_text("| a | |\n|---|---|\n| 1 | 2 |") == [1] and headings_without_text("| a |\n|---|") == []
    assert [f"{name}:{line}" for name, text in documents().items() for line in headings_without_text(text)] == []


def public_docstrings(tree: ast.AST, path: str) -> list[tuple[str, str]]:
    """The docstrings of a module and its public functions and classes, by name."""
    text = ast.get_docstring(tree)
    inner = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")]
    return [
        *([(path, text)] if text else []),
        *(each for node in inner for each in public_docstrings(node, f"{path}:{node.name}")),
    ]


def test_arguments_in_docstrings_are_described_by_a_noun():
    """For example "seed: the seed of the weights", not "seed: of the weights"."""
    fragment = re.compile(r"^ +\w+(?:, \w+)*: of \w.*", re.MULTILINE)
    assert fragment.search("    Args:\n        seed: of the weights.")
    assert found(fragment, {name: text for name, text in texts().items() if name.endswith(".py")}) == []


def test_docstrings_begin_with_a_sentence_in_one_line():
    """Folders about other programs' internals are excluded."""
    left_out = {"hf", "importing", "llm", "vllm"}
    seen = 0
    for name, text in texts().items():
        if name.startswith("python/") and name.endswith(".py") and not {*name.split("/")[2:3]} & left_out:
            for where, docstring in public_docstrings(ast.parse(text), name):
                seen += 1
                first = docstring.split("\n\n")[0]
                assert "\n" not in first and first.endswith((".", ":")), f"{where}: {first}"
    assert seen > 300
