"""Damaged copies of bytes and of JSON documents."""

from __future__ import annotations

import copy
import json
import random
import struct

_SIZES = (0, 1, 7, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES = (
    None, True, -1, 0, 1, 3, 10**6, 2**31, 2**63, -(2**65), 10**300, 1e-45, 1e39, float("nan"), float("-inf"), "", "none",
    "../../etc", "\0", "\x1b]0;x\x07", "\udfff", "ab" * 5000, [], {}, [[[]]], [None, 0], [-1] * 3000, {"a": {}},
)  # fmt: skip


def damaged(whole: bytes, draw: random.Random, hot: list[tuple[int, int]] | None = None) -> bytes:
    """A copy with one to six changes.

    Args:
        hot: ranges that get three quarters of the changes, such as headers.
    """
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        if not data:
            break
        start, end = draw.choice(hot) if hot and draw.random() < 0.75 else (0, len(data))
        at = min(draw.randrange(start, max(start + 1, end)), len(data) - 1)
        kind = draw.randrange(9)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, ord("0"), ord("-"), ord('"'), 10))
        elif kind == 2:  # a number in either byte order
            size = draw.choice((1, 2, 4, 8))
            number = draw.choice((*_SIZES, len(whole), len(whole) + 1)) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, draw.choice(("little", "little", "big")))
        elif kind == 3:
            data[at : at + draw.randrange(1, 64)] = b""
        elif kind == 4:
            data[at:at] = draw.randbytes(draw.randrange(1, 64))
        elif kind == 5:  # a piece of another place
            source = draw.randrange(len(data))
            data[at : at + 32] = data[source : source + draw.randrange(1, 64)]
        elif kind == 6:
            data[at:at] = data[at : at + draw.randrange(1, 64)] * draw.choice((1, 2, 50))
        elif kind == 7:
            data[at : at + 4] = struct.pack("<f", draw.choice((float("nan"), float("inf"), -1e38, 1e-40)))
        else:
            del data[at:]
    return bytes(data)


def damaged_json(whole: bytes, draw: random.Random) -> bytes:
    """A JSON document with changed values, as bytes; in a quarter of the cases bytes change instead."""
    if draw.random() < 0.25:
        return damaged(whole, draw)
    document = json.loads(whole)
    for _ in range(draw.choice((1, 1, 2, 3))):
        node, key, parent = document, None, None
        while isinstance(node, dict | list) and node and (parent is None or draw.random() < 0.85):
            parent, key = node, draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            node = parent[key]
        if parent is None:
            break
        kind = draw.choice((0, 1, 2, 3, 4, 5, 5, 5, 6, 7))
        if kind < 4:
            parent[key] = copy.deepcopy(draw.choice(_VALUES))
        elif kind == 4:
            del parent[key]
        elif kind == 5 and isinstance(node, int | float) and not isinstance(node, bool):
            parent[key] = draw.choice((node * 2, node + 1, -node, node * 1000, float(node), str(node)))
        elif kind == 5 and isinstance(node, str) and node:  # a similar text
            at = draw.randrange(len(node))
            parent[key] = draw.choice((node[:at] + node[at + 1 :], node[:at] + "e" + node[at:], node[::-1], node.upper()))
        elif kind == 6:
            parent[key] = draw.choice(([node], {"a": node}, [node] * 3))
        elif isinstance(parent, dict):
            parent[key + draw.choice(("_", "\0", "s"))] = parent.pop(key)
        else:
            parent[key:key] = [copy.deepcopy(node)] * draw.choice((1, 2, 100))
    if draw.random() < 0.02:
        depth = draw.choice((90, 2000, 200_000))
        return b'{"a":' + b"[" * depth + b"]" * depth + b"," + whole[1:]
    return json.dumps(document).encode()
