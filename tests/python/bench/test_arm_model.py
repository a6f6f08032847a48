"""The arithmetic behind docs/arm_cost.md: from executed blocks to cycles to tokens. The numbers are made up."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench"))

import arm_cost
import arm_cycles
import arm_page
import arm_project

NOP, ADD, RET, BL, LOOP, LDADDAL = 0xD503201F, 0x8B010000, 0xD65F03C0, 0x97FFF956, 0x54FFFFC1, 0xF8E00020
START, STOP = 0xD5032C3F, 0xD5032C5F


def plugin_line(number: int, address: int, *words: int) -> str:
    return f"block {number} {address:x} " + " ".join(f"{word:08x}" for word in words)


def test_a_block_cut_at_a_page_is_whole_again():
    text = "\n".join(
        [
            plugin_line(1, 0xFF8, NOP, NOP),
            plugin_line(2, 0x1000, ADD, LOOP),
            plugin_line(3, 0x1008, RET),
            "200 1*40 2*50 3*1",
            "7 2*3",
        ]
    )
    first, second = arm_cycles.Trace(text).calls
    assert first == (200, {(NOP, NOP, ADD, LOOP): 40, (ADD, LOOP): 10, (RET,): 1})
    assert second == (7, {(ADD, LOOP): 3})


def test_blocks_after_a_branch_stay_separate_and_equal_blocks_merge():
    text = "\n".join(
        [plugin_line(1, 0x1000, ADD, LOOP), plugin_line(2, 0x1008, ADD, RET), plugin_line(3, 0x2000, ADD, RET), "9 1*2 2*2 3*4"]
    )
    assert arm_cycles.Trace(text).calls == [(9, {(ADD, LOOP): 2, (ADD, RET): 6})]


def test_markers_are_not_modeled():
    text = "\n".join([plugin_line(1, 0x1000, START, RET), plugin_line(2, 0x2000, ADD, STOP, RET), "4 1*1 2*1"])
    assert arm_cycles.Trace(text).calls == [(4, {})]


def test_calls_and_atomics_become_instructions_that_every_model_knows():
    assert arm_cycles.plain(BL) == 0x17FFF956
    assert arm_cycles.plain(RET) == 0xD61F03C0
    assert arm_cycles.plain(LDADDAL) == NOP
    for word in (NOP, ADD, LOOP, 0x3CA16875, 0xF9402260):  # stores and loads that look like atomics
        assert arm_cycles.plain(word) == word


def test_the_hot_blocks_cover_most_instructions():
    blocks = {(ADD,) * 10: 980, (NOP,): 150, (RET,): 49, (LOOP,): 1}
    hot, share = arm_cycles.hot(blocks)
    assert hot == {(ADD,) * 10: 980, (NOP,): 150}
    assert share == pytest.approx(9950 / 10000)


def test_projection_takes_the_slower_of_computing_and_reading():
    cores = (arm_project.Cores(2, 1e9, "big"), arm_project.Cores(2, 0.5e9, "little"))
    cycles = {
        "big": {
            "linear_a8w4_1x16_x": {"symmetric g32 m1": 8.0},
            "quantize_x": {"f32 g32": 2.0},
            "linear_a8w4_1x16_slow": {"symmetric g32 m1": 80.0},
        },
        "little": {"linear_a8w4_1x16_x": {"symmetric g32 m1": 16.0}, "quantize_x": {"f32 g32": 2.0}},
    }
    layers = ((3, 256, 512), (1, 1024, 512))
    weights = 3 * 256 * 512 + 1024 * 512
    machine = arm_project.Machine("m", cores, bandwidth=1e9, memory=1e9, source="")
    computing, reading = arm_project.seconds(machine, layers, 4, cycles, packed=weights * 0.5)
    # 2 / 8 + 2 * 0.5 / 16 blocks of 128 weights per ns; the first core quantizes 512 activations per layer, for 4 layers.
    assert computing == pytest.approx((weights / 128 / 0.3125 + 4 * 512 * 2.0) * 1e-9)
    assert reading == pytest.approx(weights * 0.5 / 0.8e9)


def test_the_models_have_their_published_sizes():
    """In billions of weights, without the embedding unless it is also the head."""
    sizes = {name: sum(count * n * k for count, n, k in layers) / 1e9 for name, layers in arm_project.MODELS.items()}
    assert sizes == {"Llama 3.1 8B": pytest.approx(8.03 - 0.525, abs=0.005), "Llama 3.2 1B": pytest.approx(1.236, abs=0.005)}


def test_the_page_is_that_of_its_data():
    data = json.loads(arm_cost.DATA.read_text(encoding="utf-8"))
    assert arm_cost.DOCUMENT.read_text(encoding="utf-8") == arm_page.document(data)
