"""The time of a vision tower by its plan and by transformers' code, per picture, in turns.

    python bench/towers.py [--rounds 7] [--threads 1]

The tower has the shape of SigLIP base (SmolVLM-500M, Idefics3: 12 layers of 768, pictures of 512 x 512 in patches of 16) and
random weights of 8 bits; its convolution stays float.
"""

from __future__ import annotations

import argparse
import statistics
import time

import lowbit
import torch
from lowbit.llm.tower_plan import PlannedTower
from transformers import SiglipVisionConfig, SiglipVisionModel


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512, patch_size=16,
            vision_use_head=False,
        )  # fmt: skip
        self.vision_tower = SiglipVisionModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = _Model().eval()
    lowbit.quantize_(model, lowbit.LinearConfig(8, 32))
    tower, picture = PlannedTower(model), torch.randn(1, 3, 512, 512)

    def run() -> float:
        begin = time.perf_counter()
        model.vision_tower(pixel_values=picture)
        return time.perf_counter() - begin

    own, planned = [], []
    with torch.inference_mode():
        with tower.active():
            first = run()  # also makes the plan
        for _ in range(arguments.rounds):
            own.append(run())
            with tower.active():
                planned.append(run())
    if tower.plan_refusal is not None:
        raise SystemExit(f"the tower has no plan: {tower.plan_refusal}")
    ratio = statistics.median(a / b for a, b in zip(own, planned, strict=True))
    print(f"transformers' code {statistics.median(own):.2f} s, plan {statistics.median(planned):.2f} s, ratio {ratio:.2f}")
    print(f"the first picture {first:.2f} s")


if __name__ == "__main__":
    main()
