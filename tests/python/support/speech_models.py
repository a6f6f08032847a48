"""A small random Whisper model with its processor, and files in CTranslate2's layout."""

import json
import struct
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SECOND = 16000
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|fi|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
]
POSITIONS = 50  # of the encoder: windows of one second, 51 timestamps


def save_tokenizer(directory: Path) -> dict[str, int]:
    """Saves tokenizer.json with a token for each byte and Whisper's special tokens; returns the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return {name: backend.token_to_id(name) for name in _SPECIAL}


def tiny_whisper(directory: Path, seed: int = 0, width: int = 64) -> dict[str, int]:
    """Saves a model and its processor; returns the special tokens."""
    tokens = save_tokenizer(directory)
    first = tokens["<|notimestamps|>"] + 1
    torch.manual_seed(seed)
    end = tokens["<|endoftext|>"]
    config = transformers.WhisperConfig(
        d_model=width, encoder_layers=2, decoder_layers=2, encoder_attention_heads=width // 32,
        decoder_attention_heads=width // 32, encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width, num_mel_bins=16,
        max_source_positions=POSITIONS, max_target_positions=32, vocab_size=first + POSITIONS + 1, init_std=0.3,
        bos_token_id=end, eos_token_id=end, pad_token_id=end, decoder_start_token_id=tokens["<|startoftranscript|>"],
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    settings = dict(
        no_timestamps_token_id=tokens["<|notimestamps|>"],
        lang_to_id={name: tokens[name] for name in ("<|en|>", "<|fi|>")},
        task_to_id={"transcribe": tokens["<|transcribe|>"], "translate": tokens["<|translate|>"]},
        is_multilingual=True, suppress_tokens=[1, 2, *range(end + 1, first - 1)], begin_suppress_tokens=[3, end],
        max_initial_timestamp_index=10, max_length=32, return_timestamps=False,
    )  # fmt: skip
    for name, value in {"_from_model_config": False, **settings}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    tokenizer = {
        "tokenizer_class": "WhisperTokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(directory)
    return tokens


def _text(text: str) -> bytes:
    data = text.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def save_ctranslate2(
    source: Path, target: Path, dtype: torch.dtype, *, specification: str = "WhisperSpec", version: int = 6
) -> None:
    """Saves the model in ``source`` in CTranslate2's layout: float, or int8 matrices with the inverse of a scale per row."""
    target.mkdir()
    model = transformers.WhisperForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    state = model.state_dict()
    variables: dict[str, torch.Tensor] = {}

    def add(name: str, value: torch.Tensor, matrix: bool) -> None:
        if dtype is not torch.int8:
            variables[name] = value.to(dtype)
        elif not matrix:
            variables[name] = value
        else:
            scale = 127 / value.abs().amax(1).clamp(min=1e-6)  # the table has a row of zeros
            variables[name], variables[f"{name}_scale"] = (value * scale[:, None]).round().to(torch.int8), scale

    def put(theirs: str, *layers: str) -> None:
        add(f"{theirs}/weight", torch.cat([state[f"{layer}.weight"] for layer in layers]), True)
        width = state[f"{layers[0]}.weight"].shape[0]
        biases = [state.get(f"{layer}.bias", torch.zeros(width)) for layer in layers]
        add(f"{theirs}/bias", torch.cat(biases), False)

    def norm(theirs: str, ours: str) -> None:
        add(f"{theirs}/gamma", state[f"{ours}.weight"], False)
        add(f"{theirs}/beta", state[f"{ours}.bias"], False)

    add("decoder/embeddings/weight", state["model.decoder.embed_tokens.weight"], True)
    for conv in ("conv1", "conv2"):
        for leaf in ("weight", "bias"):
            add(f"encoder/{conv}/{leaf}", state[f"model.encoder.{conv}.{leaf}"], False)
    for part in ("encoder", "decoder"):
        heads = getattr(model.config, f"{part}_attention_heads")
        variables[f"{part}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        variables[f"{part}/activation"] = torch.tensor(3, dtype=torch.int8)
        add(f"{part}/position_encodings/encodings", state[f"model.{part}.embed_positions.weight"], False)
        norm(f"{part}/layer_norm", f"model.{part}.layer_norm")
        for number in range(2):
            theirs, ours = f"{part}/layer_{number}", f"model.{part}.layers.{number}"
            norm(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            put(f"{theirs}/self_attention/linear_0", *(f"{ours}.self_attn.{name}_proj" for name in "qkv"))
            put(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            put(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            put(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
            if part == "decoder":
                norm(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                put(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
                put(f"{theirs}/attention/linear_1", *(f"{ours}.encoder_attn.{name}_proj" for name in "kv"))
                put(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
    kinds = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4, torch.bfloat16: 5}
    with open(target / "model.bin", "wb") as file:
        file.write(struct.pack("<I", version) + _text(specification) + struct.pack("<II", 3, len(variables)))
        for name, value in variables.items():
            sizes = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            file.write(_text(name) + sizes + struct.pack("<BI", kinds[value.dtype], len(data)) + data)
        file.write(struct.pack("<I", 1) + _text("decoder/projection/weight") + _text("decoder/embeddings/weight"))
    settings = model.generation_config
    document = {
        "suppress_ids": settings.suppress_tokens,
        "suppress_ids_begin": settings.begin_suppress_tokens,
        "lang_ids": list(settings.lang_to_id.values()),
    }
    (target / "config.json").write_text(json.dumps(document))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
