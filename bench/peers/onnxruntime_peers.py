"""ONNX Runtime's MatMulNBits with accuracy level 4: int8 activations, quantized inside."""

from __future__ import annotations

import numpy as np

from .contender import Absent, Contender, Problem, Runner, Spec

WIDTHS, BLOCKS = (8, 4, 2), (128, 32)


def quantize(rows: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes (uint8 [rows, blocks, bytes], the first in the low bits) and scales (float32 [rows, blocks]).

    Symmetric, with the code of zero at 2**(bits - 1), which is the operator's default.
    """
    blocks = rows.reshape(len(rows), -1, block)
    half = 2 ** (bits - 1)
    # The sign of the scale maps the longer tail to -half.
    extremes = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)
    scales = extremes / -half
    if bits == 2:
        scales *= np.float32(0.65)  # the scale of least error is smaller than that of the largest magnitude
    codes = np.clip(np.rint(blocks / scales) + half, 0, 2 * half - 1).astype(np.uint8)
    per_byte = 8 // bits
    packed = np.zeros((*codes.shape[:2], block // per_byte), np.uint8)
    for i in range(per_byte):
        packed |= codes[:, :, i::per_byte] << np.uint8(i * bits)
    return packed, scales[:, :, 0]


def model(n: int, k: int, bits: int, block: int, packed: np.ndarray, scales: np.ndarray, copies: int) -> bytes:
    """A graph with one MatMulNBits per copy, each with separate weights."""
    from onnx import TensorProto, helper

    nodes, weights, outputs = [], [], []
    for i in range(copies):
        weights += [
            helper.make_tensor(f"b{i}", TensorProto.UINT8, packed.shape, packed.tobytes(), raw=True),
            helper.make_tensor(f"s{i}", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
        ]
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                ["x", f"b{i}", f"s{i}"],
                [f"y{i}"],
                domain="com.microsoft",
                K=k,
                N=n,
                bits=bits,
                block_size=block,
                accuracy_level=4,
            )
        )
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["m", n]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])
    graph = helper.make_graph(nodes, "linears", [x], outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


class OnnxRunner(Runner):
    """A session per number of threads and graph; a pool spins only during and shortly after its calls."""

    def __init__(self, size: int, x: np.ndarray, single: bytes, several: bytes, threads: list[int]):
        self.bytes, self.x = size, x
        self.single = {count: self.session(single, count, stop_spinning=True) for count in threads}
        self.several = {count: self.session(several, count, stop_spinning=False) for count in threads}

    @staticmethod
    def session(graph: bytes, threads: int, stop_spinning: bool):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # The pool that woke the CPUs must not spin while the next one is timed.
        options.add_session_config_entry("session.force_spinning_stop", "1" if stop_spinning else "0")
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def one(self, m, threads):
        return self.single[threads].run(None, {"x": self.x[:m]})[0]

    def all(self, m, threads):
        return self.several[threads].run(None, {"x": self.x[:m]})[-1]


def contender(bits: int, block: int) -> Contender:
    def make(problem: Problem, copies, threads) -> Runner:
        packed, scales = map(problem.repeat, quantize(problem.rows, bits, block))
        size = packed.nbytes + scales.nbytes
        graphs = [model(problem.n, problem.k, bits, block, packed, scales, count) for count in (1, copies(size))]
        return OnnxRunner(size, problem.x, *graphs, threads)

    name = f"onnxruntime {bits} bits g{block}"
    note = "MatMulNBits, accuracy_level 4; one graph for all copies of a weight"
    return Contender(Spec(name, "onnxruntime", bits, block, "float32, quantized to int8 per block", note), make)


def contenders() -> tuple[list[Contender], list[Absent], dict[str, str]]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return [], [Absent("onnxruntime MatMulNBits", f"{error}; make bench-peers installs it")], {}
    found, absent = [], []
    sample = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    for bits in WIDTHS:
        try:  # does this version know the width?
            graph = model(64, 256, bits, 32, *quantize(sample, bits, 32), 1)
            OnnxRunner.session(graph, 1, False).run(None, {"x": sample[:1]})
        except Exception as error:
            absent.append(Absent(f"onnxruntime {bits} bits", " ".join(str(error).split())[:300]))
            continue
        found += [contender(bits, block) for block in BLOCKS]
    absent.append(Absent("onnxruntime 7, 6, 5, 3 and 1 bits", "MatMulNBits has 2, 4 and 8 bits"))
    return found, absent, {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
