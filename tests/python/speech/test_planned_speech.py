"""`lowbit transcribe` by the plans beside a Whisper model's weights has the segments of torch, which it does not import."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict

import lowbit
import numpy as np
import pytest
from command_line import PROGRAM, document, invoke
from lowbit.checkpoint import quantize_checkpoint
from lowbit.files.plan_facts import PLAN, NoPlan
from lowbit.speech import load_transcriber, planned_speech
from lowbit.speech.planned_speech import LISTEN_PLAN, PlannedTranscriber, open_transcriber
from recordings import sound, write_wave
from speech_models import tiny_whisper


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A packed model, whose plans the first load writes."""
    made = tmp_path_factory.mktemp("speech")
    tiny_whisper(made / "float")
    quantize_checkpoint(made / "float", made / "model", lowbit.LowBitConfig(bits=4, group_size=32))
    notes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_PLAN", "1")
        open_transcriber(made / "model", note=notes.append)
    assert notes == [f"{made / 'model' / PLAN} is written: the next run starts without torch"]
    return made / "model"


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    monkeypatch.setenv("LOWBIT_PLAN", "1")


def test_transcriptions_are_those_of_torch(whisper):
    planned, theirs = open_transcriber(whisper, threads=2), load_transcriber(whisper)
    assert type(planned) is PlannedTranscriber and planned.languages == theirs.languages
    for seconds, options in (
        (0.4, {}), (4.3, {}), (1.0, {"timestamps": False}), (2.2, {"language": "fi"}),
        (2.0, {"language": "en", "task": "translate"}),
    ):  # fmt: skip
        expected = theirs.transcribe(sound(seconds), **options)
        assert planned.transcribe(sound(seconds), **options) == expected and expected.segments


def test_the_program_imports_neither_torch_nor_transformers(whisper, tmp_path):
    write_wave(tmp_path / "a.wav", sound(2.4))
    arguments = ["transcribe", str(whisper), str(tmp_path / "a.wav"), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0 and result.stderr.splitlines()[-1] == "", result.stderr
    found, expected = json.loads(result.stdout), load_transcriber(whisper).transcribe(tmp_path / "a.wav")
    (recording,) = found["recordings"]
    assert {name: recording[name] for name in asdict(expected)} == asdict(expected)
    by_torch = invoke(*arguments, "--cache", "int8", "--language", "en")  # for which the plan was not proven
    assert by_torch.stderr.startswith("loading ") and document(by_torch)["recordings"]


@pytest.mark.parametrize("damage", ["settings", "bytes", "version", "other", "missing"])
def test_plans_that_do_not_fit_are_replaced(whisper, tmp_path, monkeypatch, damage):
    directory = shutil.copytree(whisper, tmp_path / "model")
    said = {
        "settings": "the files of settings beside it have changed", "bytes": "the plan's checksum does not fit its bytes",
        "other": "was made for another model",
    }.get(damage)  # fmt: skip
    if damage == "settings":
        file = directory / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_initial_timestamp_index": 5}))
    elif damage == "bytes":
        content = bytearray((directory / LISTEN_PLAN).read_bytes())
        content[len(content) // 2] ^= 1
        (directory / LISTEN_PLAN).write_bytes(content)
    elif damage == "version":
        with monkeypatch.context() as patch:
            patch.setattr(planned_speech, "__version__", "0.0.9")
            planned_speech.write_plans(load_transcriber(directory), directory)
    elif damage == "other":
        content = (directory / LISTEN_PLAN).read_bytes()
        made = load_transcriber(directory)
        made._settings.suppress_tokens = [3]
        planned_speech.write_plans(made, directory)
        (directory / LISTEN_PLAN).write_bytes(content)
    else:
        (directory / LISTEN_PLAN).unlink()
    notes = []
    first = open_transcriber(directory, note=notes.append)
    assert notes.pop() == f"{directory / PLAN} is written: the next run starts without torch"
    assert len(notes) == (said is not None) and all(said in note for note in notes)
    second = open_transcriber(directory, note=notes.append)
    assert type(second) is PlannedTranscriber and second.transcribe(sound(2)) == first.transcribe(sound(2))


def test_refusals(whisper, tmp_path):
    notes = []
    open_transcriber(whisper.parent / "float", note=notes.append)
    assert notes == [] and not (whisper.parent / "float" / PLAN).exists()
    made = load_transcriber(whisper)
    assert "numpy has no bfloat16" in planned_speech._refusal(made, "bfloat16", whisper)
    assert planned_speech._refusal(made, "float32", tmp_path) == "there is no tokenizer.json"
    planned = PlannedTranscriber(whisper)
    with pytest.raises(ValueError, match=r"features is \[1, 16, 99\]; expected \[1, 16, 100\]"):
        planned.decoder.listen(np.zeros((1, 16, 99), np.float32))
    planned.decoder.listen(np.zeros((1, 16, 100), np.float32))
    with pytest.raises(IndexError, match="embedding: index 1099511627776 .* is out of range"):
        planned.decoder.feed([1 << 40], 0)
    with pytest.raises(NoPlan, match="^$"):
        PlannedTranscriber(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float64"}, "the dtype is 'float64'; expected float32 or float16"),
        ({"dtype": "object"}, "the dtype is 'object'"),
        ({"caches": lambda cache: cache[:2] + [cache[2] // 2] + cache[3:]}, "expected bytes that fit"),
        ({"caches": lambda cache: cache[:4] + [[1 << 20] * 3]}, "expected bytes that fit"),
        ({"caches": lambda cache: cache[:4] + [[-1, -cache[2] // 4]]}, "expected bytes that fit"),
        ({"caches": lambda cache: cache[:3] + [99, cache[4]]}, "of kind 99"),
    ],
)
def test_hostile_settings_of_a_plan(whisper, monkeypatch, change, said):
    """Sizes that do not fit their shapes would be written out of bounds."""
    made = planned_speech.PlannedSpeech.__init__
    ((name, value),) = change.items()

    def hostile(speech, step, listen, content):
        value_of = content[name]
        made(speech, step, listen, content | {name: [*map(value, map(list, value_of))] if callable(value) else value})

    monkeypatch.setattr(planned_speech.PlannedSpeech, "__init__", hostile)
    with pytest.raises(NoPlan, match=said):
        PlannedTranscriber(whisper)
