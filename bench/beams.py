"""Compares beam search with greedy decoding, for Whisper base on the recordings of bench/speech.py.

    python bench/beams.py [--recordings N] [--work DIRECTORY]

All contenders have one thread, and compute in float32 unless their row names bits. Times are CPU seconds per second of speech,
of one run. A second copy of each recording has noise, because beams and temperatures are meant for speech that is hard to hear.
"""

import argparse
import time
from pathlib import Path

import jiwer
import lowbit
import numpy as np
import torch
import transformers
from lowbit.speech import SAMPLE_RATE
from speech import of_lowbit, of_transformers, speech, whisper_base, words

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NOISE = 0.5  # its root mean square, times that of the speech


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("build/bench-speech"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    options.work.mkdir(parents=True, exist_ok=True)
    _, model = whisper_base(options.work)
    packed = lowbit.LowBitConfig(bits=8, group_size=32)
    recordings, random = speech(options.work, options.recordings), np.random.default_rng(0)
    noisy = [
        (text, samples + NOISE * samples.std() * random.standard_normal(len(samples), np.float32))
        for text, samples in recordings
    ]
    runs = {
        "lowbit, greedy": of_lowbit(model, None, None),
        "lowbit, greedy with fallback": of_lowbit(model, None, None, temperature=FALLBACK),
        "lowbit, 5 beams": of_lowbit(model, None, None, beams=5),
        "lowbit 8 bits, greedy": of_lowbit(model, packed, None),
        "lowbit 8 bits, 5 beams": of_lowbit(model, packed, None, beams=5),
        "transformers, greedy": of_transformers(model),
        "transformers, 5 beams": of_transformers(model, num_beams=5),
    }
    for kind, chosen in (("clear", recordings), ("noisy", noisy)):
        seconds, spoken = sum(len(samples) for _, samples in chosen) / SAMPLE_RATE, words(" ".join(text for text, _ in chosen))
        print(f"{kind}: {len(chosen)} recordings, {seconds:.0f} seconds, {len(spoken.split())} words")
        greedy = None
        for who, run in runs.items():
            begin = time.process_time()
            heard = words(" ".join(run(samples) for _, samples in chosen))
            taken = (time.process_time() - begin) / seconds
            greedy = heard if greedy is None else greedy
            changed = 100 * jiwer.wer(greedy, heard)
            print(
                f"  {who}: {100 * jiwer.wer(spoken, heard):.1f} % errors, {changed:.1f} % unlike greedy, {taken:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
