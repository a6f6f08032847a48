"""docs/first_steps.ipynb runs from top to bottom, and its stored output is what it prints.

``python tests/python/project/test_notebook.py`` updates the stored output.
"""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

pytestmark = pytest.mark.more

NOTEBOOK = Path(__file__).parents[3] / "docs" / "first_steps.ipynb"
NUMBER = r"\d+\.\d+"


def executed() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable  # this Python, not a kernel installed for the user
    client = NotebookClient(notebook, km=manager, timeout=300, coalesce_streams=True,
                            resources={"metadata": {"path": str(NOTEBOOK.parent)}})  # fmt: skip
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # libraries print warnings for their developers on stderr
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Output of each code cell."""
    outputs = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text") or output["data"]["text/plain"] for output in each) for each in outputs]


def test_the_notebook_runs():
    ours, shown = texts(executed()), texts(nbformat.read(NOTEBOOK, as_version=4))
    assert len(ours) == len(shown) == 7
    for one, other in zip(ours[1:-2], shown[1:-2], strict=True):  # the first and the last contain this CPU's kernels
        assert re.sub(NUMBER, "#", one) == re.sub(NUMBER, "#", other)
        numbers = ([float(number) for number in re.findall(NUMBER, text)] for text in (one, other))
        assert next(numbers) == pytest.approx(next(numbers), rel=0.1)  # float sums differ between CPUs
    # Texts of a model may differ too, because near ties may choose another token.
    assert re.findall(r"^\d bits: .", ours[-2], re.M) == re.findall(r"^\d bits: .", shown[-2], re.M)
    assert ours[-2].count("\n") == 3 and all(ours)


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
