"""lowbit.files.safetensors: reading files that may be damaged or change meanwhile."""

import os
from dataclasses import replace

import lowbit
import pytest
import torch
from lowbit.files.io import read_bytes
from lowbit.files.safetensors import files_of, packed_info, read_file
from lowbit.files.tensors import same_bytes
from safetensors.torch import save_file

NAME = "a.packed_weight"


@pytest.fixture
def file(tmp_path):
    packed = lowbit.quantize_tensor(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), lowbit.LinearConfig(4))
    tensors = {NAME: packed, "experts": torch.stack([packed])}
    tensors |= {"empty": packed[:0], "none": packed[None, :0], "half": packed[None, :32].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_file_that_becomes_shorter(file):
    stored = read_file(file)[NAME]
    assert len(read_bytes(stored)) == stored.bytes
    os.truncate(file, stored.offset + 100)
    assert len(read_bytes(stored, 0, 100)) == 100
    with pytest.raises(OSError, match=f"{file} ended in the middle of {NAME}: it was changed while being read"):
        read_bytes(stored)


def test_headers_of_packed_tensors(file):
    tensors = read_file(file)
    one, experts = packed_info(tensors[NAME]), packed_info(tensors["experts"])
    assert one.experts is None and one.shape == (20, 64) and experts == replace(one, experts=1)
    for name, message in (("empty", "found dtype U8 and shape [0]"), ("none", "shape [1, 0]"), ("half", "has 32 bytes")):
        with pytest.raises(ValueError) as caught:
            packed_info(tensors[name])
        assert str(caught.value).startswith(f"{name} in {file}: ") and message in str(caught.value)
    with pytest.raises(ValueError, match="found dtype I8 and shape"):
        packed_info(replace(tensors[NAME], dtype="I8"))


def test_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("lowbit.files.tensors._CHUNK", 16)
    first = torch.arange(25, dtype=torch.float32)
    last = first.clone()
    last[24] = 0
    other = first.view(5, 5).clone()
    save_file({"a": first, "b": first.clone(), "last": last, "other": other, "int": first.int()}, tmp_path / "f")
    tensors = read_file(tmp_path / "f")
    assert {name for name in tensors if same_bytes(tensors["a"], tensors[name])} == {"a", "b"}


def test_not_a_file(file):
    """A pipe would block, and a device has no end."""
    file.unlink()
    for make, kind in (
        (lambda: os.mkfifo(file), "a pipe, a socket or a device"),
        (lambda: file.symlink_to("/dev/zero"), "a pipe, a socket or a device"),
        (lambda: file.mkdir(), "a directory"),
    ):
        make()
        (path,), _ = files_of(file.parent)
        with pytest.raises(ValueError, match=f"{file} is {kind}; expected a file"):
            read_file(path)
        file.rmdir() if file.is_dir() else file.unlink()
