"""Prefix caching on disk: the same texts from files; files of other models and damaged files are ignored."""

import contextlib
import json
import os
import resource
import shutil
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from command_line import FLOAT, document, error, invoke, run
from lowbit import llm
from lowbit.llm.chat import Chat
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.prefixes import BLOCK
from lowbit.serve.prefix_store import PrefixBatch
from test_chat import PLAIN

LENGTH = 512
TEXT = [(7 * i * i + 3 * i) % 2000 + 3 for i in range(300)]
WORDS = "Return the number of items in the list, and raise an error where there are none of them. " * 20


@pytest.fixture(scope="module")
def model(packed):
    return load_model(packed[0])


@pytest.fixture
def decoder(model):
    return llm.Decoder(model, LENGTH)


def written(decoder: llm.Decoder, prompt: list[int], cache: llm.PrefixCache | None, count: int = 12) -> tuple[list[int], int]:
    """New tokens, and the number of prompt tokens from the cache."""
    cached = 0 if cache is None else cache.read(prompt, decoder.caches())
    result = llm.generate(decoder, prompt, count, cached=cached)
    if cache is not None:
        cache.write(prompt + result.tokens[:-1], decoder.caches())
    return result.tokens, cached


def empty(decoder: llm.Decoder) -> None:
    """Clears the decoder as in a new process, without earlier texts."""
    for pair in decoder.caches():
        for each in pair:
            each.fill_(1)


def files(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8,int4", "int4"])
def test_a_text_is_the_same_from_files(model, tmp_path, kind):
    decoder = llm.Decoder(model, LENGTH, kind)
    others = [TEXT[:200] + [5] * 60, TEXT[:40] + TEXT[:90], TEXT[:1], TEXT[: 4 * BLOCK], TEXT[: 4 * BLOCK + 1]]
    expected = [written(decoder, prompt, None)[0] for prompt in [TEXT, *others]]
    cache = llm.PrefixCache(tmp_path / "kept", decoder)
    assert written(decoder, TEXT, cache) == (expected[0], 0)
    assert len(files(cache.directory)) == (len(TEXT) + 11) // BLOCK
    for prompt, tokens, found in zip([TEXT, *others], expected, [256, 192, 0, 0, 192, 256], strict=True):
        empty(decoder)
        again = llm.PrefixCache(tmp_path / "kept", decoder)
        assert again.count(prompt) == found
        assert written(decoder, prompt, again) == (tokens, found)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.directory.iterdir())
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_tokens_in_caches_are_not_read_again(decoder, tmp_path):
    cache = llm.PrefixCache(tmp_path, decoder)
    expected, _ = written(decoder, TEXT, cache)
    empty(decoder)
    with torch.inference_mode():
        decoder(torch.tensor([TEXT[:130]]), torch.tensor([0]))
    os.truncate(
        max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), 0
    )  # the first block, which the test does not need
    assert cache.read(TEXT, decoder.caches(), 130) == 256
    assert llm.generate(decoder, TEXT, 12, cached=256).tokens == expected
    assert cache.read(TEXT, decoder.caches(), 280) == 280


def test_other_models_and_caches_do_not_find_a_text(model, packed, tmp_path):
    decoder = llm.Decoder(model, LENGTH)
    written(decoder, TEXT, llm.PrefixCache(tmp_path, decoder))

    def found(other: llm.Decoder) -> int:
        return llm.PrefixCache(tmp_path, other).count(TEXT)

    assert found(decoder) == 256
    assert found(llm.Decoder(model, 2 * LENGTH)) == 256, "the length of the caches does not matter"
    assert found(llm.Decoder(model, LENGTH, "int8")) == 0
    assert found(llm.Decoder(load_model(packed[0]), LENGTH)) == 256
    changed = load_model(packed[0])
    with torch.no_grad():
        changed.model.norm.weight[3] += 1
    assert found(llm.Decoder(changed, LENGTH)) == 0
    changed = load_model(packed[0])
    changed.config.rms_norm_eps *= 2
    assert found(llm.Decoder(changed, LENGTH)) == 0
    changed = load_model(packed[0])
    changed.model.layers[1].self_attn.k_proj.load_state_dict(changed.model.layers[2].self_attn.k_proj.state_dict())
    assert found(llm.Decoder(changed, LENGTH)) == 0


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    with open(path, "ab") as file:
        file.write(b"\0")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def exchange(path):
    """Stores another position's block under this name."""
    other = next(each for each in path.parent.iterdir() if each != path)
    shutil.copy(other, path)


def scribble(path):
    path.write_bytes(b"not a block")


@pytest.mark.parametrize("damage", [cut, lengthen, flip, exchange, scribble])
def test_a_damaged_file_is_computed_again(decoder, tmp_path, damage):
    cache = llm.PrefixCache(tmp_path, decoder)
    expected, _ = written(decoder, TEXT, cache)
    blocks = [path for _, path in cache._blocks(TEXT)]
    whole = blocks[2].read_bytes()
    damage(blocks[2])
    empty(decoder)
    with pytest.warns(UserWarning, match="is damaged or belongs to another text; it is removed and computed again"):
        assert written(decoder, TEXT, cache) == (expected, 2 * BLOCK)
    assert blocks[2].read_bytes() == whole
    empty(decoder)
    assert written(decoder, TEXT, cache) == (expected, 4 * BLOCK)


@contextmanager
def files_up_to(size: int):
    """Limits file sizes, so that writes fail as on a full disk."""
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python does not notice a short write, and would keep a part of a .pyc
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none


def test_a_full_disk_is_one_warning(decoder, tmp_path):
    expected, _ = written(decoder, TEXT, None)
    cache = llm.PrefixCache(tmp_path, decoder)
    with (
        files_up_to(10_000),
        pytest.warns(UserWarning, match=r"is not written to: File too large; the text is the same") as said,
    ):
        assert written(decoder, TEXT, cache) == (expected, 0)
        assert written(decoder, TEXT, cache) == (expected, 0)
    assert len(said) == 1
    assert files(tmp_path) == []
    written(decoder, TEXT, llm.PrefixCache(tmp_path, decoder))
    assert len(files(tmp_path)) == 4


def test_the_size_is_never_exceeded_and_beginnings_stay_longest(decoder, tmp_path):
    written(decoder, TEXT, llm.PrefixCache(tmp_path / "one", decoder))
    size = next((tmp_path / "one").iterdir()).stat().st_size
    cache = llm.PrefixCache(tmp_path / "few", decoder, 5 * size)
    written(decoder, TEXT, cache)
    other = TEXT[::-1]
    written(decoder, other[:140], cache)  # two blocks, which evict the last of the earlier four
    assert (cache.count(TEXT), cache.count(other)) == (192, 128)
    written(decoder, TEXT[:130], cache)  # used again, so its prefix is now the newest
    written(decoder, [9] * 140, cache)
    assert (cache.count(TEXT), cache.count(other)) == (128, 64)
    written(decoder, TEXT + TEXT[:150], cache)  # longer than the available space
    assert len(files(cache.directory)) == 5 and cache.count(TEXT + TEXT) == 5 * BLOCK
    assert llm.PrefixCache(tmp_path / "few", decoder, size - 1).write(TEXT, decoder.caches()) == 0
    assert len(files(cache.directory)) == 5


def test_writers_at_once_stay_within_the_size(decoder, tmp_path):
    written(decoder, TEXT, llm.PrefixCache(tmp_path / "one", decoder))
    size = next((tmp_path / "one").iterdir()).stat().st_size
    texts = [[number] * 200 for number in range(10, 16)]
    found = []

    def bytes_now() -> int:
        total = 0
        for path in (tmp_path / "many").glob("*.lowbit-prefix"):
            with contextlib.suppress(FileNotFoundError):  # another writer may have removed it
                total += path.stat().st_size
        return total

    def write(text: list[int]) -> None:
        cache = llm.PrefixCache(tmp_path / "many", decoder, 7 * size)
        for _ in range(5):
            cache.write(text, decoder.caches())
            found.append(bytes_now())

    threads = [threading.Thread(target=write, args=[text]) for text in texts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(found) == 5 * len(texts) and max(found) <= 7 * size
    assert sorted(llm.PrefixCache(tmp_path / "many", decoder).count(text) for text in texts)[-1] == 3 * BLOCK


def test_files_of_a_killed_process_are_removed(decoder, tmp_path):
    child = os.fork()
    if child == 0:
        from lowbit.files.replace import PartialDirectory

        partial = PartialDirectory(tmp_path / "blocks")
        (partial.path / "half").write_bytes(b"LOWBITK2")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert len(files(tmp_path)) == 1
    written(decoder, TEXT, llm.PrefixCache(tmp_path, decoder))
    assert len(files(tmp_path)) == 4 and all(name.endswith(".lowbit-prefix") for name in files(tmp_path))


def test_decoders_without_prefix_cache(model, decoder, tmp_path):
    with pytest.raises(ValueError, match=r"for a Decoder, not compiled; found a Fallback"):
        llm.PrefixCache(tmp_path, llm.Fallback(load_model(FLOAT), LENGTH))
    floats = llm.Decoder(load_model(FLOAT), LENGTH)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight is float"):
        llm.PrefixCache(tmp_path, floats)
    with pytest.raises(ValueError, match="most_bytes is 0; expected 1 or more"):
        llm.PrefixCache(tmp_path, decoder, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        llm.PrefixCache(tmp_path / "file", decoder)


def test_several_texts_at_once(decoder, tmp_path):
    prompts = [TEXT, TEXT[:200] + [5] * 30, TEXT[::-1], [4, 5, 6]]
    expected = [each.tokens for each in llm.generate_batch(decoder, prompts, 9)]
    cache = llm.PrefixCache(tmp_path, decoder)
    found = llm.generate_batch(decoder, prompts, 9, prefix_cache=cache, at_once=2)
    assert [each.tokens for each in found] == expected
    again = llm.generate_batch(decoder, prompts, 9, prefix_cache=cache, at_once=2)
    assert [each.tokens for each in again] == expected
    assert [each.cached_tokens for each in again] == [256, 200, 256, 0]  # memory has more of the second text than the files
    alone = llm.generate_batch(decoder, prompts[1:2], 9, prefix_cache=cache)[0]
    assert (alone.tokens, alone.cached_tokens) == (expected[1], 192)


def test_a_conversation_continues_in_another_process(model, decoder, tmp_path):
    tokenizer = load_tokenizer(FLOAT)

    def talk(cache: llm.PrefixCache | None) -> list:
        empty(decoder)
        made = Chat(decoder, model, tokenizer, PLAIN, LENGTH, system=WORDS[:600], max_new_tokens=20, prefix_cache=cache)
        return [made.answer(message) for message in ("Return the number", " and raise an error")]

    expected = talk(None)
    cache = llm.PrefixCache(tmp_path, decoder)
    for first in (0, None):
        answers = talk(cache)
        assert [each.tokens for each in answers] == [each.tokens for each in expected]
        if first is None:
            assert answers[0].cached_tokens == (answers[0].prompt_tokens - 1) // BLOCK * BLOCK > 0
        else:
            assert [each.cached_tokens for each in answers] == [each.cached_tokens for each in expected]


@pytest.mark.more
def test_generate_reads_what_another_instruction_set_wrote(packed, tmp_path):
    directory = tmp_path / "kept"
    arguments = ["generate", packed[0], "--prompt", WORDS, "--max-new-tokens", 10, "--json"]
    expected = document(run(*arguments))
    portable = document(run(*arguments, LOWBIT_ISA="portable", LOWBIT_PREFIX_CACHE=str(directory)))
    assert portable["tokens"] == expected["tokens"] and portable["cached_tokens"] == 0
    blocks = {path.name: path.read_bytes() for path in directory.iterdir()}
    found = document(invoke(*arguments, "--prefix-cache", directory))
    assert found["tokens"] == expected["tokens"]
    assert found["cached_tokens"] == (found["prompt_tokens"] - 1) // BLOCK * BLOCK == len(blocks) * BLOCK > 0
    for path in directory.iterdir():
        path.unlink()
    assert document(invoke(*arguments, "--prefix-cache", directory))["cached_tokens"] == 0
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == blocks, (
        "the files are those of every instruction set"
    )


def test_the_commands_say_what_came_from_files(packed, tmp_path):
    arguments = ["generate", packed[0], "--prompt", WORDS, "--max-new-tokens", 4, "--prefix-cache", tmp_path / "kept"]
    texts = []
    for found in ("(0 from ", f"({len(load_tokenizer(packed[0])(WORDS)['input_ids']) // BLOCK * BLOCK} from "):
        result = invoke(*arguments)
        assert found in result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    (tmp_path / "prompts").write_text(WORDS)
    many = invoke(*arguments[:2], "--prompts", tmp_path / "prompts", *arguments[4:])
    assert json.loads(many.stdout)["text"] + "\n" == texts[0] and json.loads(many.stdout)["cached_tokens"] > 0
    refused = invoke(*arguments[:4], "--prefix-cache-size", "1GB")
    assert refused.exit_code == 2 and "--prefix-cache-size" in refused.stderr


def test_ctrl_c_keeps_the_blocks_of_the_prompt(packed, tmp_path, monkeypatch):
    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.cli.generate.print_piece", stop)
    assert invoke("generate", packed[0], "--prompt", WORDS, "--prefix-cache", tmp_path).exit_code == 130
    assert len(files(tmp_path)) == len(load_tokenizer(packed[0])(WORDS)["input_ids"]) // BLOCK > 0


def test_models_without_prefix_cache_ignore_the_environment(tmp_path, monkeypatch):
    arguments = ["generate", FLOAT, "--prompt", "Return", "--max-new-tokens", 2]
    assert "requires that all linear layers are packed" in error(invoke(*arguments, "--prefix-cache", tmp_path / "kept"))
    plain = invoke(*arguments)
    monkeypatch.setenv("LOWBIT_PREFIX_CACHE", str(tmp_path / "kept"))
    result = invoke(*arguments)
    assert result.stdout == plain.stdout
    assert "LOWBIT_PREFIX_CACHE is not used: a prefix cache requires that all linear layers are packed" in result.stderr


HYBRIDS = ["lfm2", "qwen3_5_text", "falcon_h1", "mamba2"]


@pytest.fixture(params=HYBRIDS)
def hybrid(request, monkeypatch):
    """A model with recurrent layers, and blocks of 16 tokens."""
    sys.path.append(str(Path(__file__).parents[2] / "models"))
    import tiny_models

    for module in ("batch", "prefixes"):
        monkeypatch.setattr(f"lowbit.llm.{module}.BLOCK", 16)
    torch.manual_seed(0)
    model = tiny_models.make(request.param).eval()
    assert tiny_models.quantize(model)
    return model


def small(*tokens: int) -> list[int]:
    return [token % 120 + 3 for token in tokens]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_states_at_ends_of_blocks(hybrid, tmp_path):
    """A text continues from the end of its prompt's last block, or from its own; it is the same as without files."""
    decoder = llm.Decoder(hybrid, 128)
    prompt = small(*TEXT[:45])

    def texts(prompts, cache=None, **more):
        found = llm.generate_batch(decoder, prompts, 12, prefix_cache=cache, **more)
        return [each.tokens for each in found], [each.cached_tokens for each in found]

    (answer,), _ = texts([prompt])
    prompts = [
        prompt,
        [*prompt, *answer, 9, 8, 7],
        [*prompt[:40], 5, 6],
        [*prompt[:20], 5, 6],
        prompt[:33],
        prompt[:32],
        [4, 5],
    ]
    expected = [texts([each])[0][0] for each in prompts]

    def cache():
        return llm.PrefixCache(tmp_path, decoder, snapshots=True)

    assert texts([prompt], cache(), rows=7) == ([answer], [0])
    assert len(files(tmp_path)) == 3 + 2  # 48 of 56 tokens; states after 32 and 48
    for each, tokens, cached in zip(prompts, expected, [32, 48, 32, 0, 32, 16, 0], strict=True):
        assert texts([each], cache()) == ([tokens], [cached])
    found, cached = texts(prompts[::-1], cache(), at_once=3, rows=20)
    assert found == expected[::-1] and min(cached[2:]) >= 16
    batch = llm.batch.Batch(decoder)
    batch.prefix_cache = cache()
    batch.speculate(4)
    results = []
    for each in (prompt, [*prompt, *answer, *prompt, *answer[:6]]):
        batch.add(llm.batch.Text(each, 12, on_end=results.append))
        while batch.step():
            pass
    assert [each.tokens for each in results] == [answer, texts([[*prompt, *answer, *prompt, *answer[:6]]])[0][0]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hybrid", ["lfm2", "qwen3_5_text"], indirect=True)
def test_states_that_a_server_keeps(hybrid):
    """At ends of texts, and after a prefix that a second text shares with a first one."""
    decoder = llm.Decoder(hybrid, 128)
    batch = PrefixBatch(decoder, 4, 64, 1 << 24)

    def text(*tokens: int) -> tuple[list[int], int]:
        results = []
        batch.add(llm.batch.Text(list(tokens), 4, on_end=results.append))
        while batch.step():
            pass
        assert results[0].tokens == llm.generate_batch(decoder, [tokens], 4)[0].tokens
        return results[0].tokens, results[0].cached_tokens

    first = small(*TEXT[:50])
    answer, _ = text(*first)
    assert text(*first, *answer, 9)[1] == 53
    assert [text(*first[:30], 7, 7, 7 + number)[1] for number in range(3)] == [0, 30, 30]
    assert text(*first[:30], 9)[1] == 30 and len(list(batch.beginnings())) == 6


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hybrid", ["lfm2"], indirect=True)
def test_damaged_states_and_little_room(hybrid, tmp_path):
    decoder = llm.Decoder(hybrid, 128)
    prompt = small(*TEXT[:45])

    def text(cache):
        (found,) = llm.generate_batch(decoder, [prompt], 2, prefix_cache=cache)
        return found.tokens, found.cached_tokens

    cache = llm.PrefixCache(tmp_path / "a", decoder, snapshots=True)
    expected, _ = text(cache)
    (states,) = [path for path in cache.directory.iterdir() if "states" in path.name]
    states.write_bytes(states.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="is damaged or belongs to another text; it is removed and computed again"):
        assert text(cache) == (expected, 0)
    assert text(cache) == (expected, 32)  # written again
    sizes = [path.stat().st_size for path in cache.directory.iterdir()]
    for most in (1, min(sizes), sum(sizes) - 1, sum(sizes)):
        little = llm.PrefixCache(tmp_path / f"{most}", decoder, most, snapshots=True)
        assert text(little) == (expected, 0)
        assert sum(path.stat().st_size for path in little.directory.iterdir()) <= most
        assert text(little) == (expected, 32 if most == sum(sizes) else 0)
    with pytest.raises(ValueError, match="a prefix cache of single texts requires a model with keys and values only"):
        llm.PrefixCache(tmp_path / "b", decoder)
