"""Decodes lowbit's packed matrices with only numpy, implemented from docs/format.md alone.

python examples/decode_packed.py model.safetensors                     # lists the packed matrices
python examples/decode_packed.py model.safetensors NAME weight.npy     # dequantizes one of them to float32
python examples/decode_packed.py matrix.bin weight.npy                 # a file that is one packed matrix
"""

import json
import struct
import sys
from typing import NamedTuple

import numpy as np

MAGIC = bytes.fromhex("894c4f574249540a")
BASIS, PRIME = 0xCBF29CE484222325, 0x100000001B3
SIGNS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # signs of rotated inputs, one bit each

# For each width: the packed lines, from bit 7 to bit 0; j.t is bit t of the code of unpacked line j.
PLACEMENT = {
    1: ["7.0 6.0 5.0 4.0 3.0 2.0 1.0 0.0"],
    2: ["3.1 3.0 2.1 2.0 1.1 1.0 0.1 0.0", "7.1 7.0 6.1 6.0 5.1 5.0 4.1 4.0"],
    3: ["6.2 6.1 3.2 3.1 3.0 0.2 0.1 0.0", "6.0 7.0 4.2 4.1 4.0 1.2 1.1 1.0", "7.2 7.1 5.2 5.1 5.0 2.2 2.1 2.0"],
    4: [f"{j + 4}.3 {j + 4}.2 {j + 4}.1 {j + 4}.0 {j}.3 {j}.2 {j}.1 {j}.0" for j in range(4)],
    5: [*(f"{j + 4}.4 {j + 4}.3 {j + 4}.2 {j}.4 {j}.3 {j}.2 {j}.1 {j}.0" for j in range(4)), "7.1 7.0 6.1 6.0 5.1 5.0 4.1 4.0"],
    6: [
        f"{top}.{t + 1} {top}.{t} {j}.5 {j}.4 {j}.3 {j}.2 {j}.1 {j}.0"
        for top in (3, 7)
        for j, t in ((top - 3, 4), (top - 2, 2), (top - 1, 0))
    ],
    7: [f"7.{6 - j} {j}.6 {j}.5 {j}.4 {j}.3 {j}.2 {j}.1 {j}.0" for j in range(7)],
    8: [f"{j}.7 {j}.6 {j}.5 {j}.4 {j}.3 {j}.2 {j}.1 {j}.0" for j in range(8)],
}


class Header(NamedTuple):
    bits: int
    mapping: int  # 0 symmetric, 1 affine, 2 levels
    has_bias: bool
    n: int
    k: int
    group_size: int  # 0: one group per row
    rotated: int  # inputs per rotated block; 0: inputs are not rotated
    activation_bits: int  # 8 or 16; the weights do not depend on it
    levels: np.ndarray  # int8 [2**bits], empty without a table
    checksum: int  # of the panels
    bytes: int  # of the header


class Matrix(NamedTuple):
    weight: np.ndarray  # float32 [n, k]
    bias: np.ndarray | None  # float32 [n]


def step(hashes: np.ndarray, words: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (hashes ^ words) * np.uint64(PRIME)


def checksums(pieces: np.ndarray) -> np.ndarray:
    """The checksum of each row of uint8 [pieces, bytes]."""
    padded = np.zeros((len(pieces), -(-pieces.shape[1] // 64) * 64), np.uint8)
    padded[:, : pieces.shape[1]] = pieces
    words = padded.view("<u8").reshape(len(pieces), -1, 8)
    lanes = np.tile(np.arange(8, dtype=np.uint64) + np.uint64(BASIS), (len(pieces), 1))
    count = -(-pieces.shape[1] // 8)  # words; lanes after the last word get none
    for at in range(words.shape[1]):
        used = min(8, count - 8 * at)
        lanes[:, :used] = step(lanes[:, :used], words[:, at, :used])
    result = np.full(len(pieces), BASIS, np.uint64)
    for lane in range(8):
        result = step(result, lanes[:, lane] ^ (lanes[:, lane] >> np.uint64(32)))
    return result


def read_header(data: np.ndarray) -> Header:
    if len(data) < 64:
        raise ValueError(f"there are {len(data)} bytes; expected a header of at least 64")
    magic, version, layout, bits, mapping, bias, turn, activations, n, k, group, vendor, total, panels, own = struct.unpack(
        "<8sHBBBBBBqqI4sqQQ", data[:64].tobytes()
    )
    if magic != MAGIC or version not in (1, 2, 3, 4):
        raise ValueError(f"found magic {magic.hex()} and version {version}; expected {MAGIC.hex()} and version 1 to 4")
    size = 128 if mapping == 2 else 64
    if len(data) < size or int(checksums(np.concatenate([data[:56], data[64:size]])[None])[0]) != own:
        raise ValueError("the header's checksum does not match")
    if layout != 0 or any(vendor):
        raise ValueError(f"the layout is a vendor's, {vendor!r}; expected layout 0")
    levels = data[64 : 64 + 2**bits].view(np.int8) if mapping == 2 else np.empty(0, np.int8)
    valid = 1 <= bits <= 8 and mapping <= 2 and bias <= 1 and activations in (0, 16)
    valid = valid and 1 <= n <= 2**31 and 1 <= k <= 2**31 and group % 16 == 0 and group <= 2**31
    valid = valid and version == (4 if activations else 3 if turn else 2 if mapping == 2 else 1)
    valid = valid and (turn == 0 or 4 <= turn <= 7 and k % 2**turn == 0)
    if mapping == 2:
        valid = valid and 2 <= bits <= 4 and -128 not in levels and not data[64 + len(levels) : size].any()
    if not valid or total != len(data):
        raise ValueError(f"a field of the header is invalid, or its size of {total} bytes is not the data's {len(data)}")
    return Header(bits, mapping, bool(bias), n, k, group, 2**turn if turn else 0, activations or 8, levels, panels, size)


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once, for float32 values whose product is exact in float64.

    The sum is rounded to odd in float64 (Boldo and Melquiond, 2008), so that rounding it to float32 is right.
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)  # exact
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(np.isfinite(total) & (error != 0) & even, odd, total).astype(np.float32)


def unpack_codes(lines: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [panels, blocks, bits, 64] -> codes, uint8 [panels, 16, 32 * blocks]."""
    panels, blocks = lines.shape[:2]
    unpacked = np.zeros((panels, blocks, 8, 64), np.uint8)
    for line, entries in enumerate(PLACEMENT[bits]):
        for position, entry in zip(range(7, -1, -1), entries.split(), strict=True):
            j, t = map(int, entry.split("."))
            unpacked[:, :, j] |= (lines[:, :, line] >> position & 1) << t
    if bits == 8:
        unpacked ^= 128
    # Byte 4 r + i of line j is row r, input 4 j + i.
    return unpacked.reshape(panels, blocks, 8, 16, 4).transpose(0, 3, 1, 2, 4).reshape(panels, 16, 32 * blocks)


def rotate_back(weight: np.ndarray, block: int) -> np.ndarray:
    """The weights for the original inputs, from those for rotated inputs, float32 [n, k]."""
    rows, h = weight.reshape(-1, block), 1
    while h < block:
        pairs = rows.reshape(-1, block // (2 * h), 2, h)
        rows = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, block)
        h *= 2
    negative = [SIGNS[i // 32] >> i % 32 & 1 for i in range(block)]
    factors = np.where(negative, -1, 1) * 2.0 ** -(block.bit_length() // 2)
    return (rows * factors.astype(np.float32)).reshape(weight.shape)


def decode(data: bytes | np.ndarray, verify: bool = True) -> Matrix:
    """Decodes one packed matrix.

    Args:
        data: all bytes of the matrix.
        verify: compare the panels with their checksum.

    Raises:
        ValueError: the bytes are not a packed matrix of versions 1 to 4, or were altered.
    """
    data = np.frombuffer(data, np.uint8)
    header = read_header(data)
    bits, n, k = header.bits, header.n, header.k
    blocks, panels = -(-k // 32), -(-n // 16)
    group = header.group_size or 32 * blocks
    groups = -(-k // group)
    group_bytes = 64 if header.mapping == 1 else 32

    ends = [min(-(-(at + 1) * group // 32), blocks) for at in range(groups)]  # number of blocks up to the end of each group
    scales_at = np.array([end * 64 * bits + at * group_bytes for at, end in enumerate(ends)])
    blocks_at = np.arange(blocks) * 64 * bits + np.searchsorted(ends, np.arange(blocks), "right") * group_bytes
    head_at = blocks * 64 * bits + groups * group_bytes
    panel_bytes = -(-(head_at + 192) // 64) * 64
    if len(data) != header.bytes + panels * panel_bytes:
        raise ValueError(f"there are {len(data)} bytes; expected {header.bytes + panels * panel_bytes}")
    body = data[header.bytes :].reshape(panels, panel_bytes)
    if verify:
        folded = np.uint64(0)
        for checksum in checksums(body):
            folded = step(folded, checksum)
        if int(folded) != header.checksum:
            raise ValueError(f"the checksum of the panels is {int(folded):016x}; the header says {header.checksum:016x}")

    lines = body[:, blocks_at[:, None] + np.arange(64 * bits)].reshape(panels, blocks, bits, 64)
    codes = unpack_codes(lines, bits)[:, :, :k]
    halves = body[:, scales_at[:, None] + np.arange(group_bytes)].copy().view("<f2").astype(np.float32)
    halves = halves.reshape(panels, groups, -1, 16).transpose(2, 0, 3, 1)  # [scales (and mins), panel, row, group]
    head = body[:, head_at : head_at + 192].copy().view("<f4").reshape(panels, 3, 16)
    with np.errstate(all="ignore"):  # any bytes may be scales
        by_input = np.arange(k) // group
        factors = (head[:, 0, :, None] * halves)[..., by_input]
        if header.mapping == 1:
            weight = fused_multiply_add(factors[0], codes.astype(np.float32), factors[1])
        else:
            plain = 2 * np.arange(2) - 1 if bits == 1 else np.arange(2**bits) - 2 ** (bits - 1)
            levels = header.levels if header.mapping == 2 else plain
            weight = factors[0] * levels.astype(np.float32)[codes]
        weight = weight.reshape(panels * 16, k)[:n]
        if header.rotated:
            weight = rotate_back(weight, header.rotated)
    bias = head[:, 2].reshape(-1)[:n] if header.has_bias else None
    return Matrix(weight, bias)


def packed_tensors(data: np.ndarray) -> dict[str, np.ndarray]:
    """The packed matrices of a safetensors file by name: uint8 [bytes], or [experts, bytes] for experts."""
    body = 8 + int(data[:8].view("<u8")[0])
    entries = json.loads(data[8:body].tobytes())
    return {
        name: data[body:][slice(*entry["data_offsets"])].reshape(entry["shape"])
        for name, entry in entries.items()
        if name.endswith(".packed_weight")
    }


def main(arguments: list[str]) -> None:
    if not 1 <= len(arguments) <= 3:
        raise SystemExit(__doc__)
    data = np.memmap(arguments[0], np.uint8, "r")
    if data[:8].tobytes() == MAGIC:
        if len(arguments) != 2:
            raise SystemExit("this file is one packed matrix; expected the arguments MATRIX OUTPUT.npy")
        np.save(arguments[1], decode(data).weight)
        return
    tensors = packed_tensors(data)
    if len(arguments) == 1:
        for name, tensor in tensors.items():
            header = read_header(tensor.reshape(-1, tensor.shape[-1])[0])
            print(f"{name}: {header.n} x {header.k}, {header.bits} bits, {tensor.nbytes} bytes")
    elif len(arguments) == 3 and arguments[1] in tensors:
        tensor = tensors[arguments[1]]
        weights = [decode(matrix).weight for matrix in tensor.reshape(-1, tensor.shape[-1])]
        np.save(arguments[2], weights[0] if tensor.ndim == 1 else np.stack(weights))
    else:
        raise SystemExit(f"expected OUTPUT.npy and one of these names: {', '.join(tensors)}")


if __name__ == "__main__":
    main(sys.argv[1:])
