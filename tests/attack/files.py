"""Runs commands on damaged files, each case in a fork of this process."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import sources
from mutants import damaged, damaged_json
from outcomes import SAME, Found, command, empty, forked, judged, tree
from sources import PROMPT, run_here, save_llama

GENERATE = ("--prompt", PROMPT, "--max-new-tokens", 3)


@contextlib.contextmanager
def gguf(room: Path, quick: bool) -> Iterator:
    save_llama(room / "llama")
    bases = sources.gguf_files(room, room / "llama")
    wholes, expected = [], []

    def run(place: Path, name: str):
        order = ("--i2s-order", "x86") if "i2s" in name else ()
        action = command("import", place / name, place / "out", *order)
        return _then(action, command("generate", place / "out", *GENERATE)) if "whole" in name else action

    def attempt(which: int, content: bytes, place: Path, expected: object) -> Found:
        (place / bases[which].name).write_bytes(content)
        ended = forked(run(place, bases[which].name), place)
        return _no_leftovers(judged(ended, lambda: tree(place / "out"), expected), place)

    for which, base in enumerate(bases):
        wholes.append(base.read_bytes())
        place = empty(room / "whole")
        shutil.copy(base, place)
        run_here(run(place, base.name))
        expected.append(tree(place / "out"))
        must_be_same(attempt(which, wholes[which], empty(room / "whole"), expected[which]))
    header = [wholes[-1].find(b"tokenizer.ggml.merges"), len(wholes[-1])]
    hot = [[(0, len(whole) // 2)] for whole in wholes[:-1]] + [[(0, 1500), (header[0], header[0] + 200), (0, header[1] // 2)]]

    def case(number: int, draw: random.Random, place: Path) -> Found:
        which = draw.choice((0, 0, 1, 2, 3))
        return attempt(which, damaged(wholes[which], draw, hot[which]), place, expected[which])

    yield case


def must_be_same(found: Found) -> None:
    """Holds an undamaged copy against what its part expects: a part that finds another result there would find nothing."""
    if found.outcome != SAME:
        raise RuntimeError(f"a whole file gives: {found}")


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """Runs a second command if the first succeeds."""

    def both() -> None:
        try:
            first()
        except SystemExit as ended:
            if ended.code:
                raise
        second()

    return both


def _no_leftovers(found: Found, place: Path) -> Found:
    """Checks that a refused import leaves no files behind."""
    left = [path.name for path in place.iterdir() if "out" in path.name and path.name != "stdout"]
    if found.outcome == "refused" and left and "imported" not in found.detail:
        whole = (place / "out" / "config.json").exists()  # an imported model may still fail to run
        return found if whole and left == ["out"] else Found("traceback", f"refused, but left {left}")
    return found


def _model_part(
    room: Path, name: str, made: Callable[[Path], None], change: Callable[[bytes, random.Random], bytes],
    *runs: tuple[Callable[[Path], Callable[[], None]], Callable[[Path, str], object]],
) -> Callable[[int, random.Random, Path], Found]:  # fmt: skip
    """Cases that damage one file of a model's directory.

    Args:
        made: saves the model.
        runs: commands on a directory `model`, each with a function of the case's directory and stdout to its result.
    """
    made(room / "model")
    whole, expected = (room / "model" / name).read_bytes(), []

    def attempt(which: int, content: bytes, place: Path, expected: object) -> Found:
        (place / "model").mkdir()
        for file in (room / "model").iterdir():
            if file.name != name:
                (place / "model" / file.name).symlink_to(file)
        (place / "model" / name).write_bytes(content)
        action, result = runs[which]
        ended = forked(action(place), place)
        return _no_leftovers(judged(ended, lambda: result(place, ended.out), expected), place)

    for which, (action, result) in enumerate(runs):
        place = empty(room / "whole")
        shutil.copytree(room / "model", place / "model")
        run_here(action(place))  # imports
        shutil.rmtree(place / "out", ignore_errors=True)
        ended = forked(action(place), place)
        assert ended.status == 0, ended.err
        expected.append(result(place, ended.out))
        must_be_same(attempt(which, whole, empty(room / "whole"), expected[which]))

    def case(number: int, draw: random.Random, place: Path) -> Found:
        which = number % len(runs)
        return attempt(which, change(whole, draw), place, expected[which])

    return case


def _stdout(place: Path, out: str) -> str:
    return out


def _out(place: Path, out: str) -> dict[str, str]:
    return tree(place / "out")


def _generate(place: Path):
    return command("generate", place / "model", *GENERATE)


def _quantize(place: Path):
    return command("quantize", place / "model", place / "out", "--scale", "absmax")


def save_packed(target: Path) -> None:
    save_llama(target.with_name("float"))
    run_here(command("quantize", target.with_name("float"), target, "--scale", "absmax"))


def _header(whole: bytes) -> list[tuple[int, int]]:
    return [(0, 8), (8, 8 + int.from_bytes(whole[:8], "little"))]


@contextlib.contextmanager
def safetensors(room: Path, quick: bool) -> Iterator:
    change = lambda whole, draw: damaged(whole, draw, _header(whole))  # noqa: E731
    inspect = lambda place: command("inspect", place / "model", "--json")  # noqa: E731
    name = "model.safetensors"
    empty(room / "f"), empty(room / "p")
    on_float = _model_part(room / "f", name, save_llama, change, (_quantize, _out), (inspect, _stdout), (_generate, _stdout))
    on_packed = _model_part(room / "p", name, save_packed, change, (_generate, _stdout))

    def case(number: int, draw: random.Random, place: Path) -> Found:
        return (on_packed if draw.random() < 0.3 else on_float)(number, draw, place)

    yield case


@contextlib.contextmanager
def directories(room: Path, quick: bool) -> Iterator:
    """Checkpoints of other tools: config.json or the weights."""
    save_llama(room / "llama")
    names, parts = sources.save_others(room / "llama", room / "others"), []
    action = lambda place: _then(  # noqa: E731
        command("import", place / "model", place / "out"), command("generate", place / "out", *GENERATE)
    )
    change = lambda whole, draw: damaged(whole, draw, _header(whole))  # noqa: E731
    for name in names[:1] if quick else names:
        for file, changed in (("config.json", damaged_json), ("model.safetensors", change)):
            made = functools.partial(shutil.copytree, room / "others" / name)
            parts.append(_model_part(empty(room / name / file), file, made, changed, (action, _out)))

    def case(number: int, draw: random.Random, place: Path) -> Found:
        return parts[number % len(parts)](number, draw, place)

    yield case


@contextlib.contextmanager
def packed(room: Path, quick: bool) -> Iterator:
    """Damages only bytes of packed weights, which have checksums: the same text, or an error."""

    def change(whole: bytes, draw: random.Random) -> bytes:
        size = int.from_bytes(whole[:8], "little")
        listed = json.loads(whole[8 : 8 + size])
        entries = {name: each for name, each in listed.items() if name.endswith(".packed_weight")}
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            start, end = entries[draw.choice(sorted(entries))]["data_offsets"]
            data[8 + size + start + draw.randrange(draw.choice((end - start, 64)))] ^= draw.randrange(1, 256)
        return bytes(data)

    dequantize = lambda place: command("dequantize", place / "model", place / "out")  # noqa: E731
    yield _model_part(room, "model.safetensors", save_packed, change, (_generate, _stdout), (dequantize, _out))


@contextlib.contextmanager
def config(room: Path, quick: bool) -> Iterator:
    empty(room / "f"), empty(room / "p")
    on_float = _model_part(room / "f", "config.json", save_llama, damaged_json, (_generate, _stdout), (_quantize, _out))
    on_packed = _model_part(room / "p", "config.json", save_packed, damaged_json, (_generate, _stdout))

    def case(number: int, draw: random.Random, place: Path) -> Found:
        return (on_packed if draw.random() < 0.4 else on_float)(number, draw, place)

    yield case


@contextlib.contextmanager
def tokenizer(room: Path, quick: bool) -> Iterator:
    yield _model_part(room, "tokenizer.json", save_packed, damaged_json, (_generate, _stdout))


@contextlib.contextmanager
def ctranslate2(room: Path, quick: bool) -> Iterator:
    import torch

    speech = sources.helper("speech_models")
    speech.tiny_whisper(room / "whisper", width=32)
    (room / "0.wav").write_bytes(sources.wav(0.6))

    def made(target: Path) -> None:
        speech.save_ctranslate2(room / "whisper", target, torch.int8)

    def change(whole: bytes, draw: random.Random) -> bytes:
        names = [match.start() for match in re.finditer(rb"(?:en|de)coder/[a-z_0-9/]+\0", whole)]
        return damaged(whole, draw, [(0, 24), *((max(0, at - 6), at + 70) for at in names)])

    def action(place: Path) -> Callable[[], None]:
        transcribe = command("transcribe", place / "out", room / "0.wav", "--language", "en")
        return _then(command("import", place / "model", place / "out"), transcribe)

    yield _model_part(room, "model.bin", made, change, (action, _out))


def _media(room: Path, wholes: dict[str, bytes], action: Callable[[Path], Callable[[], None]]):
    """Cases that damage one of several media files, `media` in the case's directory."""
    expected, names = {}, list(wholes)
    for name, whole in wholes.items():
        place = empty(room / "whole")
        (place / "media").write_bytes(whole)
        if not expected:
            run_here(action(place))
        ended = forked(action(place), place)
        assert ended.status == 0, (name, ended.err)
        expected[name] = ended.out

    def case(number: int, draw: random.Random, place: Path) -> Found:
        name = names[number % len(names)]
        whole = wholes[name]
        (place / "media").write_bytes(damaged(whole, draw, [(0, 128), (0, 1000), (max(0, len(whole) - 600), len(whole))]))
        ended = forked(action(place), place)
        return judged(ended, lambda: ended.out, expected[name])

    return case


@contextlib.contextmanager
def recordings(room: Path, quick: bool) -> Iterator:
    sources.helper("speech_models").tiny_whisper(room / "whisper")
    action = lambda place: command("transcribe", room / "whisper", place / "media", "--language", "en")  # noqa: E731
    yield _media(room, sources.recordings(), action)


@contextlib.contextmanager
def images(room: Path, quick: bool) -> Iterator:
    sources.helper("image_models").save_image_model("smolvlm", room / "images")
    action = lambda place: command(  # noqa: E731
        "generate", room / "images", "--image", place / "media", "--prompt", "What?", "--max-new-tokens", 2
    )
    yield _media(room, sources.images(), action)
