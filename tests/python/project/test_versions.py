"""Version numbers in docs/versions.md, CHANGELOG.md and pyproject.toml agree with the code."""

import re
import tomllib
from pathlib import Path

import lowbit
import torch
from lowbit.hf.config import FORMAT_VERSION

ROOT = Path(__file__).parents[3]


def test_numbers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == lowbit.__version__
    assert re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[1] == lowbit.__version__
    document = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| of (?:the |a )(.*?) \| (.*?) \|", document, re.M))
    interface = (ROOT / "kernels" / "lowbit_ukernel.h").read_text(encoding="utf-8")
    assert rows == {
        "package": lowbit.__version__,
        "packed format": "1, 2 with a table of levels, 3 with rotated inputs, 4 with activations of 16 bits",
        "checkpoint": f"1, {FORMAT_VERSION} with act-order permutations",
        "vendor interface": re.search(r"LOWBIT_KERNEL_ABI (\d+)u", interface)[1],
    }
    weight = torch.randn(16, 32)
    plain = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=4))
    levels = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=4, levels="nf4"))
    rotated = lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits=4, levels="nf4", rotate=True))
    planes = lowbit.with_activation_bits(plain, 16)
    assert [lowbit.info(each).version for each in (plain, levels, rotated, planes)] == [1, 2, 3, 4]
