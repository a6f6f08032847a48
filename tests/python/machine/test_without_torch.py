"""lowbit in an environment with its required packages only: no torch, no transformers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import lowbit
import pytest
from command_line import LOWBIT, PROMPT, UNICODE
from lowbit import llm
from lowbit.exports.plan_export import write_plan
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.llm.plan_files import PLAN
from needs import need_packages
from packaging.requirements import Requirement
from served_models import Client

need_packages("starlette", "uvicorn", "llguidance", "jinja2")

ROOT = Path(__file__).parents[3]
PROGRAM = "import sys; sys.argv[0] = 'lowbit'; from lowbit_autoload.command import main; main()"


def install_required(site: Path) -> None:
    """Links the packages that pyproject.toml requires, with the extra `serve`, and those that they require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    left, done = [*project["dependencies"], *project["optional-dependencies"]["serve"]], set()
    while left:
        needed = Requirement(left.pop())
        if needed.name in done or not (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            continue
        done.add(needed.name)
        found = metadata.distribution(needed.name)
        left += found.requires or []
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    assert not {"torch", "transformers"} & done


def copy_package(site: Path) -> None:
    sources = Path(lowbit.__file__).parent
    shutil.copytree(sources, site / "lowbit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(sources.parent / "lowbit_autoload", site / "lowbit_autoload", ignore=shutil.ignore_patterns("__pycache__"))
    for source in Path(lowbit._C.__file__).parent.iterdir():
        if source.suffix in (".so", ".dylib") and source.stem != "lowbit_torch":
            shutil.copy(source, site / "lowbit")


def build_wheel(site: Path) -> None:
    """Builds a wheel as where torch is not installed, and unpacks it."""
    ccache = shutil.which("ccache")
    environment = os.environ | ({"CMAKE_CXX_COMPILER_LAUNCHER": ccache, "CCACHE_BASEDIR": str(ROOT)} if ccache else {})
    definitions = {"LOWBIT_TORCH_DIR": "/nowhere", "LOWBIT_BUILD_EXECUTORCH": "OFF"}
    target = site.parent / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "-v", ".", "-w", target, "--no-build-isolation", "--no-deps"]
    command += [
        f"-Cbuild-dir={site.parent / 'build'}",
        *(f"-Ccmake.define.{name}={value}" for name, value in definitions.items()),
    ]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "lowbit is built without PyTorch's operators" in done.stdout + done.stderr
    (wheel,) = target.iterdir()
    shutil.unpack_archive(wheel, site, "zip")
    assert not (site / "lowbit/lowbit_torch.so").exists()


@pytest.fixture(scope="module", params=["package", pytest.param("wheel", marks=pytest.mark.more)])
def site(request, tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("clean") / "site"
    site.mkdir()
    install_required(site)
    (build_wheel if request.param == "wheel" else copy_package)(site)
    return site


@pytest.fixture(scope="module")
def planned(packed, tmp_path_factory):
    """A packed model with its plan, and the text that torch continues a prompt with."""
    directory = tmp_path_factory.mktemp("planned") / "model"
    shutil.copytree(packed[0], directory)
    decoder, tokenizer = llm.Decoder(load_model(directory), 64), load_tokenizer(directory)
    stop = stop_tokens(decoder.model, tokenizer)
    write_plan(decoder, directory / PLAN, stop)
    ids = tokenizer(f"{PROMPT} {UNICODE}")["input_ids"]
    until = llm.TextUntil(tokenizer, ids)
    llm.generate(decoder, ids, 12, stop=stop, until=until)
    return directory, until.finish()


def start(site: Path, script: str, *arguments, **options) -> subprocess.Popen:
    begin = f"import sys; sys.path.insert(0, {str(site)!r}); "  # without the path of this environment's packages
    command = [sys.executable, "-I", "-S", "-c", begin + script, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")} | {
        "OMP_NUM_THREADS": "1", "LOWBIT_PLAN": "1",
    }  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options)


def run(site: Path, script: str, *arguments) -> tuple[int, str, str]:
    process = start(site, script, *arguments)
    said, errors = process.communicate(timeout=300)
    return process.returncode, said, errors


def test_features_that_need_no_torch(site):
    script = """
import lowbit, lowbit.llm
assert lowbit.isa()["active"] and lowbit.kernels() and lowbit.llm.Sampling(temperature=0.5).temperature == 0.5
for name in ("linear", "quantize_", "LinearConfig", "nn", "quantize_checkpoint"):
    try:
        getattr(lowbit, name)
    except AttributeError as error:
        assert str(error) == f"lowbit.{name} needs torch: pip install 'lowbit[torch]'", error
    else:
        raise AssertionError(name)
try:
    from lowbit import quantize_
except ImportError as error:
    assert str(error) == "lowbit.quantize_ needs torch: pip install 'lowbit[torch]'", error
assert not hasattr(lowbit.llm, "Decoder")
try:
    from lowbit.llm import Decoder
except ImportError as error:
    assert str(error) == "lowbit.llm.Decoder needs torch: pip install 'lowbit[llm]'", error
try:
    lowbit.nothing
except AttributeError as error:
    assert "has no attribute" in str(error)
print("works")
"""
    assert run(site, script) == (0, "works\n", "")


def test_commands(site, planned):
    directory, text = planned
    given = ("--prompt", f"{PROMPT} {UNICODE}", "--max-new-tokens", 12)
    code, said, errors = run(site, PROGRAM, "generate", directory, *given)
    assert (code, said) == (0, text + "\n"), errors
    code, said, errors = run(site, PROGRAM, "generate", directory, *given, "--guesses", 3, "--json")
    assert code == 0 and json.loads(said)["text"] == text, errors
    code, said, errors = run(site, PROGRAM, "certify", directory)
    assert (code, said) == (0, subprocess.run([LOWBIT, "certify", directory], capture_output=True, text=True).stdout), errors
    code, said, errors = run(site, PROGRAM, "inspect", directory, "--json")
    assert code == 0 and json.loads(said) == json.loads(subprocess.check_output([LOWBIT, "inspect", directory, "--json"])), (
        errors
    )
    code, said, errors = run(site, PROGRAM, "bench", directory, "--prompt", 16, "--new", 2, "--rounds", 1, "--json")
    assert code == 0 and json.loads(said)["modes"]["plan"]["decode_tokens_per_second"] > 0, errors
    code, said, errors = run(site, PROGRAM, "--help")
    assert code == 0 and "quantize" in said and "serve" in said, errors
    for command in (("quantize", directory, "x", "--bits", 4), ("generate", directory, "--prompt", "a", "--compile")):
        code, said, errors = run(site, PROGRAM, *command)
        expected = "torch and transformers not installed; install it with: pip install 'lowbit[llm]'"
        assert (code, said, errors.splitlines()[-1]) == (1, "", f"lowbit: error: {expected}")


def test_serve(site, planned):
    directory, text = planned
    with start(site, PROGRAM, "serve", directory, "--port", 0) as process:
        try:
            line = process.stderr.readline()
            match = re.search(r"on http://127.0.0.1:(\d+)/v1", line)
            assert match, line + process.stderr.read()
            body = {"prompt": f"{PROMPT} {UNICODE}", "max_tokens": 12, "temperature": 0}
            (choice,) = Client(int(match[1])).post("/v1/completions", **body)["choices"]
            assert choice["text"] == text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
