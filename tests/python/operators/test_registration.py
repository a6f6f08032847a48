"""lowbit is registered with other libraries in programs that do not import it: torch's autoload hooks their imports."""

import pickle
import sys
import types
import warnings

import checkpoints
import lowbit
import lowbit_autoload.imports as autoload
import pytest
import torch
from lowbit import LinearConfig
from lowbit.machine.imports import why_not
from lowbit.quantizing.quantize_model import described_to_transformers

FOUR_AT_ONCE = """
import sys, threading
{imports}
import torch, transformers
from transformers import AutoModelForCausalLM, LlamaForCausalLM

assert "lowbit.transformers" not in sys.modules and "lowbit.hf" not in sys.modules
packed, float_, outputs = sys.argv[1:]
tokens, found = torch.load(outputs)[0], []
def load(path, **options):
    with torch.no_grad():
        found.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)(tokens).logits)
config = dict(quant_method="lowbit", bits=4, group_size=32)
threads = [threading.Thread(target=load, args=[packed]) for _ in range(3)]
threads.append(threading.Thread(target=load, args=[float_], kwargs=dict(quantization_config=config)))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 4 and all(torch.equal(logits, torch.load(outputs)[1]) for logits in found)
tables = transformers.quantizers.auto
import lowbit.transformers as registered
assert tables.AUTO_QUANTIZER_MAPPING["lowbit"] is registered.LowBitQuantizer
assert tables.AUTO_QUANTIZATION_CONFIG_MAPPING["lowbit"] is registered.LowBitConfig
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A packed checkpoint, the float one, and a file with tokens and the packed model's logits."""
    directory = tmp_path_factory.mktemp("saved")
    model = checkpoints.make_model("untied", torch.float32)
    model.save_pretrained(directory / "float")
    config = lowbit.LowBitConfig(bits=4, group_size=32)
    lowbit.quantize_checkpoint(directory / "float", directory / "packed", config)
    with torch.no_grad():
        logits = checkpoints.load(directory / "packed", dtype=torch.float32)(checkpoints.TOKENS).logits
    torch.save((checkpoints.TOKENS, logits), directory / "outputs")
    return [directory / name for name in ("packed", "float", "outputs")]


# The first imports torch, so its own import cannot be hooked; the second imports torch during its import.
@pytest.mark.parametrize("imports", ["from transformers.quantizers import auto", "import lowbit"])
def test_transformers_loads_and_quantizes(run_python, saved, imports):
    process = run_python(FOUR_AT_ONCE.format(imports=imports), *saved)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch(fork_python, monkeypatch, value):
    monkeypatch.setenv("LOWBIT_AUTOLOAD", value)
    script = "import sys, lowbit_autoload; lowbit_autoload.register(); print([type(each).__name__ for each in sys.meta_path])"
    process = fork_python(script)
    assert process.returncode == 0 and ("_Finder" in process.stdout) == (value == "1"), process.stderr


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes packages that this process can import, and removes them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


class _Asking:
    """Another library's import finder, which calls all others, like ours."""

    def find_spec(self, name, path=None, target=None):
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        return next((spec for spec in found if spec is not None), None) if name == "watched" else None


@pytest.mark.parametrize("place", [0, 1, len(sys.meta_path)])
def test_a_step_runs_after_the_module_whatever_other_finders_do(package, monkeypatch, place):
    seen = []
    package(watched="import beside\nvalue = 3", beside="import torch")
    monkeypatch.setitem(autoload._STEPS, "watched", lambda module: seen.append(module.value))
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, autoload._Finder)])
    autoload.watch()
    autoload.watch()  # once is enough
    assert sum(isinstance(each, autoload._Finder) for each in sys.meta_path) == 1
    sys.meta_path.insert(place, _Asking())
    import watched

    assert seen and set(seen) == {3} and watched.__spec__.loader.get_source("watched").endswith("value = 3")


def test_a_step_that_fails_is_a_warning(package, monkeypatch):
    package(watched="value = 3", broken="raise ValueError('its own')")
    steps = {"watched": lambda module: module.value / 0, "broken": lambda module: None}
    for name, step in steps.items():
        monkeypatch.setitem(autoload._STEPS, name, step)
    with pytest.warns(RuntimeWarning, match="lowbit cannot extend watched: ZeroDivisionError: .*LOWBIT_AUTOLOAD=0"):
        import watched
    assert watched.value == 3
    del sys.modules["watched"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import watched
    with pytest.raises(ValueError, match="its own"):
        import broken  # noqa: F401


def test_a_name_that_has_gone_is_passed_over(package, monkeypatch):
    package(watched="value = 3", again="value = 3", third="value = 3")
    steps = {
        "watched": lambda module: module.missing,
        "again": lambda module: __import__("gone"),
        "third": lambda module: {}["x"],
    }
    for name, step in steps.items():
        monkeypatch.setitem(autoload._STEPS, name, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import again
        import third
        import watched
    assert watched.value == again.value == third.value == 3


LIBRARIES = r"""
import sys
from pathlib import Path
root = Path(sys.argv[1])
files = {
    "peft/__init__": "from .tuners import lora\nLoraConfig = AdaLoraConfig = type('LoraConfig', (), {})",
    "peft/tuners/__init__": "",
    "peft/tuners/tuners_utils": "def _maybe_include_all_linear_layers(*_): pass",
    "peft/tuners/lora": "class Linear: pass\nclass model:\n    class LoraModel:\n        def _prepare_model(self, a, b): pass",
    "transformers/__init__": "",
    "transformers/trainer_callback": "class DefaultFlowCallback: pass",
}
for name, text in files.items():
    file = root / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
sys.path.insert(0, str(root))
import torch

def libraries():
    import peft, transformers.trainer_callback as callbacks
    lora = peft.tuners.lora.model.LoraModel._prepare_model
    return hasattr(lora, "__wrapped__"), hasattr(callbacks.DefaultFlowCallback, "on_train_begin")

if sys.argv[2] == "before":
    assert libraries() == (False, False) and "lowbit.peft" not in sys.modules  # a program without packed layers
import lowbit.nn
assert libraries() == (True, True)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_other_libraries_stay_as_they_are_without_packed_layers(run_python, tmp_path, order):
    """Small packages stand in for peft and transformers."""
    process = run_python(LIBRARIES, tmp_path, order)
    assert process.returncode == 0, process.stderr


def test_the_package_at_fault_is_named(package):
    package(
        outer="try:\n    import middle\nexcept OSError as error:\n    raise ImportError('outer is lazy') from error",
        middle="import vision",
        vision="import torch\ntorch.ops.load_library('/nowhere/at/all.so')",
        needy="import not_there",
    )
    for script, expected in [
        ("outer", "outer does not load, and the cause is vision: OSError: /nowhere/at/all.so"),
        ("needy", "needy does not load, and the cause is not_there: ModuleNotFoundError: No module named 'not_there'"),
        ("absent", "absent is not installed, or not a version for lowbit: No module named 'absent'. Install it with `do`."),
    ]:
        with pytest.raises(ImportError) as caught:
            __import__(script)
        assert why_not(script, caught.value, "do").startswith(expected)


def test_training_a_packed_model_warns(tmp_path):
    from transformers import Trainer, TrainingArguments

    def train(model) -> None:
        data = [{"input_ids": row, "labels": row} for row in checkpoints.TOKENS]
        arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True)
        assert Trainer(model, arguments, train_dataset=data).train().global_step == 1

    packed = {"*": LinearConfig(4, 32), "*embed*": lowbit.EmbeddingConfig(4)}
    with pytest.warns(UserWarning, match=r"training changes 0\.\d+ % of the weights of this LlamaForCausalLM: \d+ % are pack"):
        train(lowbit.quantize_(checkpoints.make_model("tied"), packed))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "training changes")
        train(checkpoints.make_model("tied"))
        train(lowbit.quantize_(checkpoints.make_model("tied"), {"*.q_proj": LinearConfig(4, 32)}))


def test_models_of_diffusers_are_not_saved(monkeypatch):
    """diffusers would write packed layers that it cannot read. It is not installed for the tests, so a class stands in for
    it."""
    library = types.ModuleType("diffusers.models.modeling_utils")
    library.ModelMixin = Diffuser
    monkeypatch.setitem(sys.modules, library.__name__, library)
    model = torch.nn.ModuleList([Diffuser(), Diffuser()])
    with described_to_transformers(model):
        lowbit.quantize_(model[0], LinearConfig(4, 16))
    with pytest.raises(RuntimeError, match="diffusers saves packed layers, but cannot load them. Save the float model"):
        pickle.loads(pickle.dumps(model[0])).save_pretrained("anywhere")
    assert model[1].save_pretrained("anywhere") == "saved"


AUTO = """
AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING = {"other": 1}, {}
"""
BASE = """
class DiffusersQuantizer:
    def __init__(self, quantization_config, pre_quantized=True):
        self.quantization_config, self.pre_quantized = quantization_config, pre_quantized
"""
LOAD_WITH_DIFFUSERS = """
import sys
from pathlib import Path
import diffusers.quantizers.auto as auto
assert "lowbit.hf.diffusion" not in sys.modules and "transformers" not in sys.modules
import lowbit, torch
from safetensors.torch import load_file, save_file

def load(file, given, quantized):
    # As diffusers does it: the configuration may be a dict, and the model is on the meta device at first.
    if isinstance(given, dict):
        given = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[given["quant_method"]].from_dict(given)
    quantizer = auto.AUTO_QUANTIZER_MAPPING[given.quant_method](given, pre_quantized=quantized)
    assert quantizer.quantization_config.quant_method.value == "lowbit" and quantizer.is_serializable
    assert quantizer.update_torch_dtype(None) is torch.float32
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 64, bias=False))
    quantizer.maybe_update_loaded_keys([], [file])
    quantizer._process_model_before_weight_loading(model, device_map=None)
    for name, tensor in load_file(file).items():
        layer, _, leaf = name.rpartition(".")
        owner = model.get_submodule(layer)
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor
        else:
            owner._parameters[leaf] = torch.nn.Parameter(tensor)
    return quantizer._process_model_after_weight_loading(model)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 64, bias=False))
save_file(model.state_dict(), "float.safetensors")
config, x = lowbit.LowBitConfig(bits=4, group_size=16), torch.randn(3, 64)
packed = load("float.safetensors", config, False)
assert torch.equal(packed(x), lowbit.quantize_(model, config.select(model))(x)) and not torch.equal(packed(x), x)
save_file(packed.state_dict(), "packed.safetensors")
again = load("packed.safetensors", config.to_dict(), True)
assert torch.equal(again(x), packed(x)) and all(isinstance(again[i], lowbit.nn.Linear) for i in (0, 2))
assert sorted(auto.AUTO_QUANTIZER_MAPPING) == ["lowbit", "other"]

def refused(message, *arguments):
    try:
        load(*arguments)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

refused("the checkpoint has no tensor .packed_weight", "float.safetensors", config, True)
save_file({"1.packed_weight": packed.state_dict()["0.packed_weight"]}, "other.safetensors")
refused("has ReLU there; expected a Linear or Embedding of that shape", "other.safetensors", config, True)
save_file({"2.packed_weight": packed.state_dict()["0.packed_weight"]}, "other.safetensors")
refused("has Linear of shape [64, 48] there", "other.safetensors", config, True)
bytes_ = bytearray(Path("packed.safetensors").read_bytes())
bytes_[-5] ^= 1
Path("packed.safetensors").write_bytes(bytes_)
refused("The file was damaged", "packed.safetensors", config, True)
"""


@pytest.mark.more
def test_diffusers_loads_and_quantizes(run_python, tmp_path, monkeypatch):
    """diffusers is not installed for the tests; stand-ins provide its tables and the base class of quantizers."""
    files = {"__init__": "import torch", "quantizers/__init__": "", "quantizers/auto": AUTO, "quantizers/base": BASE}
    for name, text in files.items():
        file = tmp_path / "diffusers" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_python(LOAD_WITH_DIFFUSERS)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("LOWBIT_AUTOLOAD", "0")
    done = run_python("import diffusers.quantizers.auto as auto; print(*auto.AUTO_QUANTIZER_MAPPING)")
    assert done.stdout == "other\n", done.stderr


class Diffuser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 16)

    def save_pretrained(self, directory):
        return "saved"
