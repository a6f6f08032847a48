"""Small undamaged models and files, which the parts damage."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import sys
import tempfile
import wave
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny_llama" / "model"
PROMPT = "Return the number of"


@functools.cache
def helper(name: str) -> ModuleType:
    """Imports a helper module from one of the tests' folders."""
    for file in sorted((ROOT / "tests" / "python").rglob("*.py")):  # helpers import other helpers and tests
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
    return importlib.import_module(name)


def save_llama(target: Path) -> None:
    """A language model of two narrow layers with the tokenizer of examples/tiny_llama."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = json.loads((TINY / "config.json").read_text())
    settings |= {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "initializer_range": 0.3,
    }  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((TINY / name).read_bytes())


def gguf_files(target: Path, llama: Path) -> list[Path]:
    """Files of many types from the tests, and a complete model."""
    from outcomes import command

    importing = helper("importing_files")
    contents = {
        "types": helper("gguf_files").file_bytes(importing.METADATA, importing.tensors()),
        "experts": importing.expert_file(),
        "i2s": importing.i2s_file(),
    }
    for name, content in contents.items():
        (target / f"{name}.gguf").write_bytes(content)
    run_here(command("quantize", llama, target / "packed", "--scale", "absmax"))
    run_here(command("export", target / "packed", "--to", "gguf", "--output", target / "whole.gguf"))
    return [target / f"{name}.gguf" for name in (*contents, "whole")]


def save_others(llama: Path, target: Path) -> list[str]:
    """Writes a float checkpoint's layers in the formats of other tools, a directory each; returns their names."""
    import torch
    from safetensors.torch import load_file, save_file

    made = functools.cache(helper("importing_files").layers_of_others)
    floats, settings = load_file(llama / "model.safetensors"), json.loads((llama / "config.json").read_text())
    for name in made(32, 32):
        directory, tensors, metadata = target / name, dict(floats), {}
        for layer in [each.removesuffix(".weight") for each in floats if each.endswith("_proj.weight")]:
            quantization, found, described = made(*tensors.pop(f"{layer}.weight").shape)[name]
            tensors |= {
                f"{layer}.{leaf}": tensor.clone(memory_format=torch.contiguous_format) for leaf, tensor in found.items()
            }
            metadata |= {key.replace("model.a", layer): text for key, text in described.items()}
        directory.mkdir(parents=True)
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        (directory / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).write_bytes((llama / file).read_bytes())
    return list(made(32, 32))


def run_here(action: Callable[[], None]) -> None:
    """Runs a command in this process, so that its imports are done before forking."""
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as said:
        try:
            sys.stdout.flush()
            for number in (1, 2):
                os.dup2(said.fileno(), number)
            action()
        except SystemExit as ended:
            if ended.code:
                said.seek(0)
                raise RuntimeError(f"{sys.argv}: {said.read().decode()}") from None
        finally:
            sys.stdout.flush()
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)


def sound(seconds: float, rate: int = 16000) -> np.ndarray:
    """int16 [samples]: a tone and noise."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(0).normal(size=time.size)
    return ((0.4 * np.sin(2 * np.pi * 440 * time) + 0.05 * noise) * 20000).astype(np.int16)


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes(sound(seconds).tobytes())
    return file.getvalue()


# Containers and codecs that PyAV's FFmpeg can write.
_RECORDINGS = {
    "flac": ("flac", 16000, "s16"), "mp3": ("libmp3lame", 16000, "s16p"), "ogg": ("libopus", 48000, "s16"),
    "mp4": ("aac", 16000, "fltp"), "matroska": ("libvorbis", 48000, "fltp"), "webm": ("libopus", 48000, "s16"),
    "adts": ("aac", 16000, "fltp"), "aiff": ("pcm_s16be", 16000, "s16"), "caf": ("pcm_s16le", 16000, "s16"),
    "asf": ("wmav2", 44100, "fltp"), "avi": ("mp2", 44100, "s16"), "au": ("pcm_mulaw", 8000, "s16"),
    "w64": ("pcm_s24le", 16000, "s32"), "mov": ("alac", 16000, "s16p"), "wv": ("wavpack", 16000, "s16p"),
    "mpegts": ("ac3", 48000, "fltp"),
}  # fmt: skip


def recordings(seconds: float = 0.6) -> dict[str, bytes]:
    """A recording in each format that this PyAV can write, by format."""
    import av

    made = {"wav": wav(seconds)}
    for name, (codec, rate, kind) in _RECORDINGS.items():
        file = io.BytesIO()
        try:
            with av.open(file, "w", format=name) as container:
                stream = container.add_stream(codec, rate=rate, layout="mono")
                frame = av.AudioFrame.from_ndarray(sound(seconds, rate)[None], format="s16", layout="mono")
                frame.sample_rate = rate
                resampler = av.AudioResampler(format=kind, layout="mono", rate=rate, frame_size=stream.frame_size or 0)
                for part in (*resampler.resample(frame), *resampler.resample(None), None):
                    container.mux(stream.encode(part))
        except (av.FFmpegError, ValueError):
            continue
        made[name] = file.getvalue()
    assert len(made) > 8, sorted(made)
    return made


def images() -> dict[str, bytes]:
    """An image in each format and in several modes."""
    import PIL.Image

    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 4), np.uint8)
    made = {}
    for kind, modes in {
        "PNG": ("RGB", "RGBA", "L", "P", "1", "I;16"), "JPEG": ("RGB", "L", "CMYK"), "WEBP": ("RGB", "RGBA"), "GIF": ("P", "L"),
        "BMP": ("RGB", "P", "1"),
    }.items():  # fmt: skip
        for mode in modes:
            image = PIL.Image.fromarray(noise[..., 0].astype(np.uint16)) if mode == "I;16" else PIL.Image.fromarray(noise)
            more = {}
            if kind == "GIF" and mode == "P":
                more = {"save_all": True, "append_images": [PIL.Image.fromarray(noise).convert("P")] * 3}
            if kind == "JPEG" and mode == "RGB":
                more = {"progressive": True}
            file = io.BytesIO()
            (image if mode in ("RGBA", "I;16") else image.convert(mode)).save(file, kind, **more)
            made[f"{kind} {mode}"] = file.getvalue()
    return made
