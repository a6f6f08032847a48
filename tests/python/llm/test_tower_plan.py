"""Vision towers by plans: results as those of the tower's own code, for each image by itself."""

import lowbit
import pytest
import torch
from image_models import save_image_model
from lowbit.llm.loading import load_image_model
from lowbit.llm.tower_plan import PlannedTower

pytestmark = pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")


@pytest.mark.parametrize("kind", ["gemma3", "idefics3"])
@pytest.mark.parametrize("config", [lowbit.LowBitConfig(4), lowbit.LowBitConfig(8, conv_bits=8)], ids=["4", "8 and 8"])
@torch.inference_mode()
def test_results(tmp_path, kind, config):
    save_image_model(kind, tmp_path)
    model = load_image_model(tmp_path, config)
    tower = PlannedTower(model)
    module = model.model.vision_tower if kind == "gemma3" else model.model.vision_model
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 32, 32, generator=generator)

    def call(images):
        masks = {} if kind == "gemma3" else {"patch_attention_mask": torch.ones(len(images), 4, 4, dtype=torch.bool)}
        return module(pixel_values=images, **masks).last_hidden_state

    own = call(images)
    with tower.active():
        found = call(images)
        again = torch.cat([call(image[None]) for image in images.flip(0)]).flip(0)
    assert tower.plan_refusal is None and tower.calls == 4
    assert torch.equal(found, again)  # neither the number of images nor earlier ones matter
    assert 0 < (found - own).norm() < 0.05 * own.norm()
    assert torch.equal(call(images), own)  # by its own code
    if kind == "idefics3":  # only a part of an image
        mask = torch.ones(1, 4, 4, dtype=torch.bool)
        mask[:, 2:] = False
        own = module(pixel_values=images[:1], patch_attention_mask=mask).last_hidden_state
        with tower.active():
            found = module(pixel_values=images[:1], patch_attention_mask=mask).last_hidden_state
        assert (found - own)[:, :8].norm() < 0.05 * own[:, :8].norm()
    next(module.parameters()).mul_(2)
    with tower.active():
        changed = call(images)
    assert (changed - call(images)).norm() < 0.05 * changed.norm()
    assert not torch.equal(changed, again)


def test_towers_without_a_plan(tmp_path):
    save_image_model("qwen3_vl", tmp_path)
    model = load_image_model(tmp_path, lowbit.LowBitConfig(4))
    tower, grid, images = PlannedTower(model), torch.tensor([[1, 4, 4]]), torch.randn(16, 3 * 2 * 8 * 8)
    with torch.no_grad(), tower.active():
        model.model.visual(images, grid_thw=grid)
    assert tower.plan_refusal == "its images have 2 dimensions; expected [n, channels, height, width]"
    assert PlannedTower(torch.nn.Linear(2, 2)).plan_refusal == "it has no vision tower of a known name"
