"""The arithmetic behind docs/x86_cost.md: from executed addresses to blocks to cycles. The numbers are made up."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench"))

import x86_cost

CODE = {
    0x10: "mov %rax,%rbx",
    0x13: "vpdpbusd (%rdx){1to16},%zmm1,%zmm0",
    0x1A: "dec %rcx",
    0x1D: "jne 13",
    0x1F: "vzeroupper",
    0x22: "ret",
    0x40: "dec %rcx",
}


def test_the_lines_of_the_program_are_read():
    text = "row_a\tsymmetric g32 m1\t128\t640\t10*1\t13*40\nrow_a\taffine g32 m1\t128\t700\nrow_b\tf32 g32\t1024\t2048\n"
    traced = x86_cost.parse(text)
    assert traced["row_a"]["symmetric g32 m1"] == (128, 640, {0x10: 1, 0x13: 40})
    assert x86_cost.per_unit(traced) == {
        "row_a": {"symmetric g32 m1": 5.0, "affine g32 m1": pytest.approx(5.469)},
        "row_b": {"f32 g32": 2.0},
    }
    emulated = "booting\r\nprogram starts\r\nrow_b\tf32 g32\t1024\t2048\t22*3\r\nprogram ends: 0\r\n"
    assert x86_cost.parse_emulated(emulated) == {"row_b": {"f32 g32": (1024, 2048, {0x22: 3})}}


def test_a_loop_is_a_separate_block():
    times = {0x10: 2, 0x13: 80, 0x1A: 80, 0x1D: 80, 0x1F: 2, 0x22: 2, 0x40: 2}
    assert x86_cost.blocks_of(times, CODE) == {
        (CODE[0x10],): 2,
        (CODE[0x13], CODE[0x1A], CODE[0x1D]): 80,
        (CODE[0x1F], CODE[0x22]): 2,
        (CODE[0x40],): 2,
    }


def test_neighbors_that_ran_as_often_are_cut_at_a_branch_and_at_a_gap():
    times = {0x1A: 5, 0x1D: 5, 0x1F: 5, 0x40: 5}  # 0x22 did not run
    assert x86_cost.blocks_of(times, CODE) == {(CODE[0x1A], CODE[0x1D]): 5, (CODE[0x1F],): 5, (CODE[0x40],): 5}


def test_the_hot_blocks_cover_most_instructions():
    blocks = {("add",) * 10: 980, ("nop",): 150, ("ret",): 49, ("dec",): 1}
    hot, share = x86_cost.hot(blocks)
    assert hot == {("add",) * 10: 980, ("nop",): 150}
    assert share == pytest.approx(9950 / 10000)


def test_branches_become_nops_in_the_model():
    assert x86_cost.plain("jne 4012f0") == "jne 0f"
    assert x86_cost.plain("call 401000") == x86_cost.plain("ret") == x86_cost.plain("jmp *%rax") == "jmp 0f"
    assert x86_cost.plain("vpaddd %zmm1,%zmm2,%zmm3") == "vpaddd %zmm1,%zmm2,%zmm3"


def test_tiles_take_the_cycles_of_the_manual():
    block = ("tilezero %tmm0", "tileloadd (%rax,%rbx,1),%tmm1", "tdpbssd %tmm2,%tmm1,%tmm0", "tilestored %tmm0,(%rcx,%rbx,1)")
    assert x86_cost.tile_cycles(block) == 8 + 16 + 16
    assert x86_cost.tile_cycles(("vpdpbusd %zmm1,%zmm2,%zmm3", "ret")) == 0


def test_three_per_cent_more_are_too_many():
    assert not x86_cost.growth({"row": {"task": 10.0}}, {"row": {"task": 10.2}})
    assert x86_cost.growth({"row": {"task": 10.0}}, {"row": {"task": 10.4}})
    assert x86_cost.growth({}, {"row": {"task": 1.0}})


def test_the_document_is_that_of_its_data():
    data = json.loads(x86_cost.DATA.read_text(encoding="utf-8"))
    assert x86_cost.DOCUMENT.read_text(encoding="utf-8") == x86_cost.document(data)
    kernels = x86_cost.linear_rows(data["counts"])
    assert {name.split(",")[0] for name in kernels} == {isa for _, isas in x86_cost.CORES.values() for isa in isas}
    for kernel, tasks in kernels.items():
        widths = {"8"} if kernel.startswith("avxvnniint8") else set(x86_cost.WIDTHS)
        assert all(set(cells) == widths for cells in tasks.values())
    attention = {row: tasks for row, tasks in data["counts"].items() if row.startswith("attention_")}
    assert set(attention) >= {"attention_avx2", "attention_avx512vnni"}
    for tasks in attention.values():
        assert set(tasks) == {
            f"{cache} {call}" for cache in ("f32", "bf16", "f16", "int8", "int4", "int8,int4") for call in ("prompt", "token")
        }


def test_rows_that_were_counted_anew_replace_their_own_numbers_alone(tmp_path, monkeypatch):
    cores = dict.fromkeys(x86_cost.CORES)
    before = {
        "compiler": "c",
        "counts": {"a": {"t": 1.0}, "b": {"t": 2.0}},
        "cycles": {"llvm": "19"} | {core: {"a": {"t": 3.0}, "b": {"t": 4.0}} for core in cores},
    }
    monkeypatch.setattr(x86_cost, "DATA", tmp_path / "cost.json")
    x86_cost.DATA.write_text(json.dumps(before), encoding="utf-8")
    counted = {
        "compiler": "c",
        "counts": {"b": {"t": 5.0}},
        "cycles": {"llvm": "19"} | {core: {"b": {"t": 6.0}} for core in cores},
    }
    assert x86_cost.merged(counted) == {
        "compiler": "c",
        "counts": {"a": {"t": 1.0}, "b": {"t": 5.0}},
        "cycles": {"llvm": "19"} | {core: {"a": {"t": 3.0}, "b": {"t": 6.0}} for core in cores},
    }
    with pytest.raises(SystemExit, match="counted with compiler c, this is d"):
        x86_cost.merged(counted | {"compiler": "d"})
