"""The CPU time of a vision tower, or of Whisper's encoder, by its plan and by transformers' code, in turns.

    python bench/towers.py [--rounds 7] [--threads 1] [--whisper DIRECTORY]

The tower has the shape of SigLIP base (SmolVLM-500M, Idefics3: 12 layers of 768, images of 512 x 512 in patches of 16) and
random weights of 8 bits; its convolution stays float. DIRECTORY is a packed Whisper model, whose encoder reads a window.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lowbit
import torch
from lowbit.llm.tower_plan import PlannedTower
from lowbit.speech import load_transcriber
from transformers import SiglipVisionConfig, SiglipVisionModel


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512,
            patch_size=16, vision_use_head=False,
        )  # fmt: skip
        self.vision_tower = SiglipVisionModel(config)


def _tower() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """An image by transformers' code, and by the plan."""
    torch.manual_seed(0)
    model = _Model().eval()
    lowbit.quantize_(model, lowbit.LinearConfig(8, 32))
    tower, image = PlannedTower(model), torch.randn(1, 3, 512, 512)

    def planned() -> None:
        with tower.active():
            model.vision_tower(pixel_values=image)
        if tower.plan_refusal is not None:
            raise SystemExit(f"the tower has no plan: {tower.plan_refusal}")

    return lambda: model.vision_tower(pixel_values=image), planned


def _whisper(directory: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A window by transformers' code, and by the plan."""
    transcriber: Any = load_transcriber(directory)
    decoder = transcriber.decoder
    plan, features = decoder.listen_plan, torch.randn(1, decoder.mel_bins, 2 * decoder.positions)
    if plan is None:
        raise SystemExit(f"the encoder has no plan: {decoder.listen_refusal}")

    def listen(by: Any) -> None:
        decoder.listen_plan = by
        decoder.listen(features)

    return partial(listen, None), partial(listen, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--whisper", metavar="DIRECTORY")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ways = _tower() if arguments.whisper is None else _whisper(arguments.whisper)

    def seconds(run: Callable[[], Any]) -> float:
        begin = time.process_time()
        with torch.inference_mode():
            run()
        return time.process_time() - begin

    first = seconds(ways[1])  # a tower's plan is made
    turns = [[seconds(way) for way in ways] for _ in range(arguments.rounds)]
    own, planned = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    print(f"transformers' code {own:.2f} s, plan {planned:.2f} s, ratio {ratio:.2f}; first call {first:.2f} s")


if __name__ == "__main__":
    main()
