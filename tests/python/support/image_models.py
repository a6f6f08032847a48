"""Small random models of images and text with processors, in the shapes of real families."""

import json
from pathlib import Path

import torch
import transformers
from needs import need_packages
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

need_packages("PIL")

import PIL.Image

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}  # fmt: skip
# Modeled on the families' templates, which differ only in the image placeholder.
_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
FAMILIES = ("gemma3", "gemma4", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")


def _tokenizer(special: list[str], **named: str) -> transformers.PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", *special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", extra_special_tokens=named
    )


def _save_parts(directory: Path, images, tokenizer, image: str, **settings) -> None:
    """Saves the parts of a processor separately, because one with a video part needs torchvision."""
    images.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(_TEMPLATE.replace("IMAGE", image))


def _gemma3(directory: Path):
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokenizer = _tokenizer(list(names.values()), **names)
    number = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": 32},
        vision_config={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
            "patch_size": 8, "vision_use_head": False,
        },
        mm_tokens_per_image=4, boi_token_index=number("<boi>"), eoi_token_index=number("<eoi>"),
        image_token_index=number("<image>"), eos_token_id=number("<eos>"),
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    _save_parts(directory, images, tokenizer, "<boi>", processor_class="Gemma3Processor", image_seq_length=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4(directory: Path, **more):
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    names |= {"boa_token": "<boa>", "eoa_token": "<eoa>", "audio_token": "<audio>"}
    tokenizer = _tokenizer([*names.values(), "<|video|>"], **names)
    number = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma4Config(
        text_config={
            **TEXT, "vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer), "head_dim": 16,
            "global_head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 16, "pad_token_id": 256, "final_logit_softcapping": 30.0, **more,
        },
        vision_config={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 16, "patch_size": 4,
        },
        boi_token_id=number("<boi>"), eoi_token_id=number("<eoi>"), image_token_id=number("<image>"),
        audio_token_id=number("<audio>"), video_token_id=number("<|video|>"), eos_token_id=number("<eos>"),
    )  # fmt: skip
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    _save_parts(directory, images, tokenizer, "<image>", processor_class="Gemma4Processor", image_seq_length=70)
    return transformers.Gemma4ForConditionalGeneration(config)


def _gemma4_large(directory: Path):
    """Without inputs for each layer; the tokens of an image see each other in layers with a window."""
    return _gemma4(directory, hidden_size_per_layer_input=0, use_bidirectional_attention="vision")


def _idefics3(directory: Path, kind: str = "Idefics3"):
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    named = {"image_token": "<image>", "fake_image_token": special[0], "global_image_token": "<global-img>"}
    tokenizer = _tokenizer(special, **named)
    vision = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer), "pad_token_id": 256}, vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2, pad_token_id=256, eos_token_id=256,
    )  # fmt: skip
    images = getattr(transformers, f"{kind}ImageProcessor")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    _save_parts(directory, images, tokenizer, "<image>", processor_class=f"{kind}Processor", image_seq_len=4)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _smolvlm(directory: Path):
    return _idefics3(directory, "SmolVLM")


def _lfm2_vl(directory: Path):
    special = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    special += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 3) for column in range(1, 3)]
    tokenizer = _tokenizer(special, image_token="<image>")
    text = {**TEXT, "layer_types": ["conv", "full_attention"], "vocab_size": len(tokenizer)}
    config = transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **text, "block_auto_adjust_ff_dim": False, "pad_token_id": 256},
        vision_config={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
            "num_patches": 16, "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), downsample_factor=2, projector_hidden_size=48,
        eos_token_id=256,
    )  # fmt: skip
    tokenizer.save_pretrained(directory)  # the image processor needs torchvision
    return transformers.Lfm2VlForConditionalGeneration(config)


def _qwen(directory: Path, kind: str, vision: dict, **more):
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(special, image_token=special[2], video_token=special[3])
    number = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **more}
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "vocab_size": len(tokenizer), "head_dim": 16, "rope_parameters": rope},
        vision_config={"patch_size": 8, "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96,
                       "out_hidden_size": 64, **vision},
        vision_start_token_id=number(special[0]), vision_end_token_id=number(special[1]), image_token_id=number(special[2]),
        video_token_id=number(special[3]), eos_token_id=256,
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessor(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 1024, "longest_edge": 4096}
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    _save_parts(directory, images, tokenizer, image, processor_class=f"{kind}Processor")
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _qwen2_5_vl(directory: Path):
    return _qwen(directory, "Qwen2_5_VL", {"window_size": 32, "fullatt_block_indexes": [1]})


def _qwen3_vl(directory: Path):
    vision = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return _qwen(directory, "Qwen3VL", vision, mrope_interleaved=True)


def save_image_model(kind: str, directory: Path) -> None:
    """A model of this family and its processor."""
    torch.manual_seed(0)
    model = globals()[f"_{kind}"](directory)
    for name, parameter in model.named_parameters():  # so that random logits depend on the image and no token always wins
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08 if "vision" not in name and "visual" not in name else 0.15)
    model.generation_config.eos_token_id = 256
    model.eval().save_pretrained(directory)
    config = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps({**config, "do_sample": False, "eos_token_id": 256}))


def save_image(path: Path, seed: int = 0, size: tuple[int, int] = (40, 30)) -> Path:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    PIL.Image.fromarray(pixels.numpy()).save(path)
    return path


def lfm2_vl_inputs(seed: int, sizes: list[tuple[int, int]], image: int = 257) -> dict[str, torch.Tensor]:
    """Inputs of an LFM2-VL model, with images of these numbers of patches (rows, columns) among other tokens."""
    generator = torch.Generator().manual_seed(seed)
    most = max(rows * columns for rows, columns in sizes)
    pixels, mask, ids = torch.zeros(len(sizes), most, 192), torch.zeros(len(sizes), most, dtype=torch.int64), [5, 6, 7]
    for number, (rows, columns) in enumerate(sizes):
        pixels[number, : rows * columns] = torch.randn(rows * columns, 192, generator=generator)
        mask[number, : rows * columns] = 1
        ids += [image] * (rows * columns // 4) + [8 + number, 9]
    shapes = torch.tensor(sizes)
    return {"input_ids": torch.tensor([ids]), "pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
