"""ggml, llama.cpp's tensor library, called through ctypes: ggml_mul_mat on its CPU backend.

The weights use the buffer type that llama.cpp would choose: one that repacks them for this CPU if ggml has one for their type,
otherwise the plain one.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from .contender import Absent, Contender, Problem, Runner, Spec

LIBRARIES = Path(sys.prefix) / "ggml"  # where `make bench-peers` puts them

# name: number, bits, weights per scale. The numbers are those of the GGUF file format.
TYPES = {
    "q8_0": (8, 8, 32),
    "q6_K": (14, 6, 16),
    "q5_K": (13, 5, 32),
    "q4_0": (2, 4, 32),
    "q4_K": (12, 4, 32),
    "q3_K": (11, 3, 16),
    "q2_K": (10, 2, 16),
    "q2_0": (42, 2, 64),
    "tq2_0": (35, 2, 256),
    "tq1_0": (34, 2, 256),
    "q1_0": (41, 1, 128),
}
# Their quantizers scale by the largest magnitude, so most normally distributed weights become 0.
LARGEST_MAGNITUDE = ("q2_0", "tq2_0", "tq1_0")
NOTES = {"tq2_0": "ternary, 2.06 bits", "tq1_0": "ternary, 1.69 bits, beside 2 bits"}
F32 = 0


class InitParameters(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


SIGNATURES = {
    "ggml_version": (c_char_p,),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_type_name": (c_char_p, c_int),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_init": (c_void_p, InitParameters),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_get_device": (c_void_p, c_void_p),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
}
GRAPH_SIZE = 2048  # tensors in a graph
SILENT = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, data: None)


class Ggml:
    """The functions, a CPU backend and the buffer types that repack."""

    def __init__(self, directory: Path):
        suffix = "dylib" if sys.platform == "darwin" else "so"
        # Dependencies first, so that the loader does not search for them.
        libraries = [
            ctypes.CDLL(str(directory / f"lib{name}.{suffix}"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]
        for name, (result, *arguments) in SIGNATURES.items():
            function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
            if function is None:
                raise OSError(f"the library has no function {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.log_set(ctypes.cast(SILENT, c_void_p), None)  # it reports each weight that it repacks
        self.backend = self.backend_cpu_init()
        self.device = self.backend_get_device(self.backend)
        self.plain = self.backend_cpu_buffer_type()
        for name, (number, _, _) in TYPES.items():
            if self.type_name(number) != name.encode():
                raise OSError(f"type {number} of this ggml is {self.type_name(number)}; expected {name}")

    def repacking(self) -> list[int]:
        """The buffer types that repack weights, best first."""
        registry = self.backend_dev_backend_reg(self.device)
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if address is None:
            return []
        listed = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
        found = []
        while listed and listed[len(found)]:
            found.append(listed[len(found)])
        return found

    def context(self, tensors: int, graphs: int = 0) -> int:
        size = tensors * self.tensor_overhead() + graphs * self.graph_overhead_custom(GRAPH_SIZE, False)
        return self.init(InitParameters(size + 1024, None, True))

    def allocate(self, context: int, buffer_type: int) -> int:
        buffer = self.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if buffer is None:
            raise MemoryError("ggml could not allocate its tensors")
        return buffer

    def best_buffer_type(self, number: int, n: int, k: int) -> int:
        """The first repacking buffer type that multiplies such a matrix, else the plain one."""
        for buffer_type in self.repacking():
            weights, rest = self.context(1), self.context(2)
            weight = self.new_tensor_2d(weights, number, k, n)
            buffer = self.allocate(weights, buffer_type)
            product = self.mul_mat(rest, weight, self.new_tensor_2d(rest, F32, k, 1))
            supported = self.backend_dev_supports_op(self.device, product)
            self.backend_buffer_free(buffer)
            self.free(weights)
            self.free(rest)
            if supported:
                return buffer_type
        return self.plain


class GgmlRunner(Runner):
    """A graph per number of rows: one product, or one with each copy."""

    def __init__(self, ggml: Ggml, number: int, problem: Problem, copies):
        self.ggml, self.problem = ggml, problem
        n, k = problem.n, problem.k
        few = np.empty(len(problem.rows) * ggml.row_size(number, k), np.uint8)
        ggml.quantize_chunk(number, problem.rows.ctypes.data, few.ctypes.data, 0, len(problem.rows), k, None)
        weight = problem.repeat(few.reshape(len(problem.rows), -1))
        self.bytes = weight.nbytes
        self.count = 1 + copies(weight.nbytes)
        self.weights_context = ggml.context(self.count)
        self.weights = [ggml.new_tensor_2d(self.weights_context, number, k, n) for _ in range(self.count)]
        self.buffers = [ggml.allocate(self.weights_context, ggml.best_buffer_type(number, n, k))]
        for tensor in self.weights:
            ggml.backend_tensor_set(tensor, weight.ctypes.data, 0, weight.nbytes)
        self.graphs: dict[tuple[int, int], tuple] = {}
        self.contexts = [self.weights_context]

    def graph(self, m: int, first: int, last: int) -> tuple[int, int]:
        """Graph and last product of the first m rows with the matrices first..last."""
        if (m, first) not in self.graphs:
            ggml, problem = self.ggml, self.problem
            context = ggml.context(1 + last - first, graphs=1)
            x = ggml.new_tensor_2d(context, F32, problem.k, m)
            products = [ggml.mul_mat(context, weight, x) for weight in self.weights[first:last]]
            graph = ggml.new_graph_custom(context, GRAPH_SIZE, False)
            for product in products:
                ggml.build_forward_expand(graph, product)
            self.buffers.append(ggml.allocate(context, ggml.plain))
            self.contexts.append(context)
            rows = np.ascontiguousarray(problem.x[:m])
            ggml.backend_tensor_set(x, rows.ctypes.data, 0, rows.nbytes)
            self.graphs[m, first] = graph, products[-1]
        return self.graphs[m, first]

    def run(self, m: int, threads: int, first: int, last: int) -> np.ndarray:
        graph, product = self.graph(m, first, last)
        self.ggml.backend_cpu_set_n_threads(self.ggml.backend, threads)
        status = self.ggml.backend_graph_compute(self.ggml.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        output = np.empty((m, self.problem.n), np.float32)
        self.ggml.backend_tensor_get(product, output.ctypes.data, 0, output.nbytes)
        return output

    def one(self, m, threads):
        return self.run(m, threads, 0, 1)

    def all(self, m, threads):
        return self.run(m, threads, 1, self.count)

    def __del__(self):
        for buffer in self.buffers:
            self.ggml.backend_buffer_free(buffer)
        for context in self.contexts:
            self.ggml.free(context)


def contender(ggml: Ggml, name: str) -> Contender:
    number, bits, group_size = TYPES[name]
    buffer = ggml.backend_buft_name(ggml.best_buffer_type(number, 256, 256)).decode()
    notes = [f"weights in ggml's buffer type {buffer}; one graph for all copies of a weight", NOTES.get(name, "")]
    spec = Spec(
        f"ggml {name}",
        "ggml",
        bits,
        group_size,
        "float32, quantized to int8 per block",
        "; ".join(filter(None, notes)),
        0.9 if name in LARGEST_MAGNITUDE else None,
    )
    return Contender(spec, lambda problem, copies, threads: GgmlRunner(ggml, number, problem, copies))


def contenders() -> tuple[list[Contender], list[Absent], dict[str, str]]:
    try:
        ggml = Ggml(LIBRARIES)
    except OSError as error:
        return [], [Absent("ggml (llama.cpp)", f"{error}; make bench-peers builds it")], {}
    absent = [Absent("ggml at 7 bits", "ggml has no such type")]
    return [contender(ggml, name) for name in TYPES], absent, {"ggml": ggml.version().decode()}
