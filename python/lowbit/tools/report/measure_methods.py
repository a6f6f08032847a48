"""Measures a model at every bit width and with every method, and stores the figures in a JSON file."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import nn
from ...calibration import calibrate
from ...calibration.capture import inputs_of
from ...calibration.data import MOST_TOKENS, Inputs, batches
from ...calibration.model import evaluating, run
from ...calibration.widths import LEVELS_BITS, Item, config_of, measure_losses, options_of, within
from ...files.config_json import read_config
from ...files.replace import replacing
from ...files.safetensors import files_of, read_files
from ...files.untrusted import interpreting
from ...layers.packable import names_by_weight, put_linears, replace_layers
from ...llm.decoder import Decoder
from ...llm.loading import is_packed, load_model, load_tokenizer
from ...llm.perplexity import Perplexity, perplexity
from ...machine.facts import cpu_name
from ...packed.rounding import ConvConfig
from ...quantizing.quantize_model import described_to_transformers
from ..model_speed import measure, stored_bytes
from .peers import hold_all, peers

if TYPE_CHECKING:
    from ...hf.config import LowBitConfig

VERSION = 3  # of the JSON file
_SENSITIVITY_TOKENS = 2048  # tokens of the text per layer
_SENSITIVITY_SENTENCES = 64
_NEIGHBORS = 5  # number of nearest sentences that a search should find
_GPTQ_GROUP = 128  # the most common group size of GPTQ, measured besides the report's
_PROMPT, _NEW = 16, 32  # tokens for measuring decoding
_REFERENCE_BITS = 3  # bit width at which the loss of each layer is measured, for all target sizes
CALIBRATED = ("importance", "auto")  # default methods
LEVELS = ", levels"  # suffix of a method: with a table fitted to each matrix
PLANES = ", 16-bit activations"  # suffix of a method, if the others have 8
_TIMED = ("nearest", "nearest" + PLANES)  # methods whose decoding speed is measured
WIDTHS = "widths by layer"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to measure; the arguments of ``lowbit report``."""

    model: Path
    text: str
    calibration: str | None
    bits: list[int]
    target_bits: list[float]
    group_size: int | None = 32
    mapping: str = "symmetric"
    embedding_bits: int | None = None
    methods: Sequence[str] = CALIBRATED  # for one width in all layers
    target_methods: Sequence[str] = ("auto",)  # for mixed precision per layer
    window: int = 512
    calibration_tokens: int = MOST_TOKENS
    sensitivity: bool = True
    speed: bool = True
    activation_bits: Sequence[int] = (8,)  # of all methods; a second number is only for round-to-nearest

    def identity(self) -> dict[str, Any]:
        """Settings that the figures depend on; figures with another identity are not reused."""

        def digest(text: str | None) -> str | None:
            return None if text is None else hashlib.sha256(text.encode()).hexdigest()

        files = sorted(path for path in self.model.iterdir() if path.suffix in (".json", ".safetensors"))
        return {
            "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
            "text": digest(self.text),
            "calibration": digest(self.calibration),
            "group_size": self.group_size,
            "mapping": self.mapping,
            "embedding_bits": self.embedding_bits,
            "activation_bits": self.activation_bits[0],
            "window": self.window,
            "calibration_tokens": self.calibration_tokens,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }


def read(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The figures in a file with this identity; empty figures for another identity or a missing file."""
    fresh = {"version": VERSION, "identity": identity, "rows": [], "sensitivity": None, "notes": []}
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return fresh
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; remove it, or choose another name for the report") from error
    if not isinstance(figures, dict) or "version" not in figures or not isinstance(figures.get("rows"), list):
        raise ValueError(f"{path} has no figures of a report; remove it, or choose another name for the report")
    same = figures["version"] == VERSION and figures.get("identity") == identity
    return figures if same and figures.keys() >= fresh.keys() else fresh


def write(path: Path, figures: dict[str, Any]) -> None:
    """Writes figures to a file, replacing it atomically."""
    with replacing(path, ".json") as target:
        target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


class _Subject:
    """The float model, and the measure of its quality: perplexity, or the cosine with the float embeddings."""

    def __init__(self, options: Options):
        self.options = options
        config = read_config(options.model)
        if is_packed(options.model):
            raise ValueError(f"{options.model} is packed already; a report needs the float checkpoint")
        names = config.get("architectures")
        self.language = not isinstance(names, list) or any("ForCausalLM" in str(name) for name in names)
        self.tokenizer = load_tokenizer(options.model)
        if self.language:
            self.model = load_model(options.model)
            self.tokens = self.tokenizer(options.text, verbose=False)["input_ids"]
            if len(self.tokens) < 2:
                raise ValueError(f"the text has {len(self.tokens)} tokens; expected 2 or more")
        else:
            transformers = import_module("transformers")
            from ...hf.building import check_fits
            from ...hf.from_pretrained import counting, meta_model

            tensors = read_files(*files_of(options.model))
            with counting(None), interpreting(f"{options.model} does not load"):
                # Checked because missing tensors would be random.
                check_fits(meta_model(options.model, len(tensors)), tensors, options.model)
                self.model = transformers.AutoModel.from_pretrained(
                    options.model, local_files_only=True, trust_remote_code=False, dtype="auto"
                ).eval()
            self.sentences = [line.strip() for line in options.text.splitlines() if line.strip()]
            if not self.sentences:
                raise ValueError("the text has no lines; expected a sentence in each")
        # Count bytes as stored; then convert to float32, so that results differ only by format.
        self.model_bytes = stored_bytes(self.model)
        self.stored = self.model.dtype
        self.model.float()
        if not self.language:
            self.expected = self.embeddings(self.model, self.sentences)

    @torch.inference_mode()
    def embeddings(self, model: torch.nn.Module, sentences: list[str]) -> torch.Tensor:
        """Normalized embeddings [sentences, features]: means over the tokens of each sentence."""
        rows = []
        limit = getattr(model.config, "max_position_embeddings", 512)
        for begin in range(0, len(sentences), 16):
            part = sentences[begin : begin + 16]
            inputs = self.tokenizer(part, padding=True, truncation=True, max_length=min(limit, 256), return_tensors="pt")
            hidden = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1)
            rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(rows)

    def quality(self, model: torch.nn.Module) -> float:
        if self.language:
            window = self.options.window
            measured: Perplexity = perplexity(model, self.tokens, window=window)
            return measured.perplexity
        return self.search_quality(model)[0]

    def search_quality(self, model: torch.nn.Module) -> tuple[float, float]:
        """Mean cosine of an embedding model with the float embeddings, and :func:`same_neighbors`."""
        embeddings = self.embeddings(model, self.sentences)
        return float((embeddings * self.expected).sum(1).mean()), same_neighbors(embeddings, self.expected)

    def loss(self, model: torch.nn.Module) -> float:
        """The loss on part of the text, for single layers: nats per token, or 1 - cosine."""
        if self.language:
            tokens = self.tokens[:_SENSITIVITY_TOKENS]
            measured: Perplexity = perplexity(model, tokens, window=self.options.window)
            return measured.nats / measured.tokens
        part = self.sentences[:_SENSITIVITY_SENTENCES]
        return 1 - float((self.embeddings(model, part) * self.expected[: len(part)]).sum(1).mean())

    def config(self, bits: int, mapping: str | None = None, activation_bits: int | None = None) -> LowBitConfig:
        from ...transformers import LowBitConfig

        options = self.options
        return LowBitConfig(
            bits, options.group_size, mapping or options.mapping, embedding_bits=options.embedding_bits,
            activation_bits=activation_bits or options.activation_bits[0],
        )  # fmt: skip

    def batches(self) -> list[Inputs]:
        """The calibration text as inputs of the model."""
        options = self.options
        return batches(self.model, self.calibration_texts(), self.tokenizer, options.window, options.calibration_tokens)[0]

    def calibration_texts(self) -> list[str]:
        text = self.options.calibration or ""
        return [text] if self.language else [line for line in text.splitlines() if line.strip()]

    def speed(self, model: torch.nn.Module) -> float | None:
        """Decoding speed after a short prompt, in tokens per second; None for models that no decoder supports."""
        if not self.language or not self.options.speed:
            return None
        try:
            decoder = Decoder(model, 64)
        except ValueError:
            return None
        prompt = torch.tensor([(self.tokens * _PROMPT)[:_PROMPT]])
        measure(decoder, prompt, 2)
        _, seconds = measure(decoder, prompt, _NEW)
        decoder.release()
        return 1 / statistics.median(seconds) if statistics.median(seconds) > 0 else None


def same_neighbors(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of the five nearest rows of each row of ``expected`` [n, features] that are also nearest in ``rows``.

    Nearest means the largest dot product. 1 for a single row.
    """
    nearest = [
        (vectors @ vectors.T).fill_diagonal_(-torch.inf).topk(min(_NEIGHBORS, len(vectors) - 1), dim=1).indices
        for vectors in (rows, expected)
    ]
    same = (nearest[0][:, :, None] == nearest[1][:, None, :]).any(2).float()
    return float(same.mean()) if same.numel() else 1.0


@contextmanager
def _quiet() -> Iterator[None]:
    # Hides the list of unquantized layers, which is the same at every bit width.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class _Collection:
    """Collects the figures of a report; each is written to the JSON file before the next is measured."""

    def __init__(self, options: Options, path: Path, say: Say):
        self.options, self.path, self.say = options, path, say
        self.figures = read(path, options.identity())
        self.known = {(row["method"], row["bits"]) for row in self.figures["rows"]}
        self.figures["notes"] = []  # failed measurements are retried in each run
        say(f"loading {options.model}")
        self.subject = subject = _Subject(options)
        with _quiet():
            chosen = subject.config(4).select(subject.model, experts=False)
        self.selected = {name: config for name, config in chosen.items() if not isinstance(config, ConvConfig)}
        put_linears(subject.model, self.selected)
        self.modules = {name: subject.model.get_submodule(name) for name in self.selected}
        if not self.selected:
            raise ValueError(f"{options.model} has no linear layer or embedding")
        self.shared = names_by_weight(self.modules)
        self.weights = sum(self.modules[names[0]].weight.numel() for names in self.shared.values())
        self.matrix_bytes = self.weights * subject.stored.itemsize
        self.figures["about"] = {
            "model": str(options.model),
            "architecture": type(subject.model).__name__,
            "quality": "perplexity" if subject.language else "cosine",
            "measured_on": len(subject.tokens) - 1 if subject.language else len(subject.sentences),
            "weights": self.weights,
            "rest_bytes": subject.model_bytes - self.matrix_bytes,
            "activation_bits": options.activation_bits[0],
            "machine": cpu_name(),
            "threads": torch.get_num_threads(),
        }

    def add(self, method: str, bits: float | None, family: str, size: int, model: torch.nn.Module, timed: bool = False) -> None:
        subject = self.subject
        quality, same = (subject.quality(model), None) if subject.language else subject.search_quality(model)
        self.figures["rows"].append({
            "method": method, "bits": bits, "family": family, "bytes": size, "bits_per_weight": 8 * size / self.weights,
            "quality": quality, "same_neighbors": same,
            "tokens_per_second": subject.speed(model) if timed else None,
        })  # fmt: skip
        self.write()

    def write(self) -> None:
        write(self.path, self.figures)

    def widths(self) -> None:
        """Measures the float model, and the model with one bit width for all layers."""
        if ("float", None) not in self.known:
            self.say("float")
            self.add("float", None, "float", self.matrix_bytes, self.subject.model, timed=True)
        for bits in self.options.bits:
            for method in _methods(self.options, bits):
                if (method, bits) not in self.known:
                    self.say(f"{method}, {bits} bits")
                    model = copy.deepcopy(self.subject.model)
                    with _quiet():
                        _quantize(self.subject, model, method, bits)
                    self.add(method, bits, "lowbit", _packed_bytes(model), model, timed=method in _TIMED)

    def widths_by_layer(self) -> None:
        """Measures mixed precision per layer, for each target."""
        options, subject = self.options, self.subject
        items: list[Item] = []
        for target, method in ((target, method) for target in options.target_bits for method in options.target_methods):
            name = WIDTHS if method == "auto" else f"{WIDTHS}, {method}"
            if (name, target) in self.known:
                continue
            if not items:
                self.say("layers, for widths by layer")
                with _quiet(), evaluating(subject.model):
                    items = options_of(subject.model, subject.config(_REFERENCE_BITS))
                    measure_losses(subject.model, subject.batches(), items, _REFERENCE_BITS)
            try:
                config = config_of(subject.config(_REFERENCE_BITS), items, within(items, target))
            except ValueError as error:
                self.figures["notes"].append(f"{name}: {error}")
                continue
            self.say(f"{name}, {target:g} bits")
            model = copy.deepcopy(subject.model)
            with _quiet():
                _calibrate(subject, model, config, method)
            self.add(name, target, "lowbit", _packed_bytes(model), model)

    def by_peers(self) -> None:
        """Measures the formats of other projects, quantized by their libraries."""
        squares: dict[int, torch.Tensor] | None = None
        for name, peer in peers(self.options.bits, self.options.calibration is not None).items():
            if (name, None) in self.known:
                continue
            self.say(name)
            if peer.importance and squares is None:
                squares = _mean_squares(self.subject, self.shared)
            model, size = copy.deepcopy(self.subject.model), 0
            matrices = (
                (self.modules[names[0]].weight.detach().float(), squares[key] if peer.importance and squares else None)
                for key, names in self.shared.items()
            )
            try:
                for (held, more), names in zip(hold_all(peer, matrices), self.shared.values(), strict=True):
                    size += more
                    for layer in names:
                        model.get_submodule(layer).weight.data.copy_(held)
            except (ValueError, OSError) as error:  # does not fit these shapes, or its library does not load
                self.figures["notes"].append(f"{name}: {error}")
                continue
            self.add(name, None, name.split()[0], size, model)

    def by_gptq(self) -> None:
        """Measures plain GPTQ with the report's group size and the usual one."""
        group_size = self.options.group_size
        for bits in (bits for bits in self.options.bits if bits > 1):
            for group in dict.fromkeys((group_size, _GPTQ_GROUP)):
                name = f"GPTQ {bits} bits" if group == group_size else f"GPTQ {bits} bits, groups of {group}"
                if (name, None) not in self.known:
                    self.say(name)
                    model = copy.deepcopy(self.subject.model)
                    with _quiet():
                        size = _plain_gptq(self.subject, model, bits, group, self.shared)
                    self.add(name, None, "GPTQ", size, model)


def collect(options: Options, path: Path, say: Say) -> dict[str, Any]:
    """Measures the figures that the JSON file at ``path`` does not have, and writes it after every figure.

    Args:
        options: what to measure.
        path: ends in .json.
        say: called with the name of each measurement.

    Returns:
        The content of the file.

    Raises:
        OSError, ValueError: as :func:`lowbit.llm.loading.load_model`, or the file at ``path`` is not from a report.
    """
    collection = _Collection(options, path, say)
    collection.widths()
    if options.calibration is not None:
        collection.widths_by_layer()
    collection.by_peers()
    if options.calibration is not None:
        collection.by_gptq()
    if options.sensitivity and collection.figures["sensitivity"] is None:
        collection.figures["sensitivity"] = _sensitivity(collection.subject, collection.shared, min(options.bits), say)
    collection.write()
    return collection.figures


def _methods(options: Options, bits: int) -> list[str]:
    methods = ["nearest", *(options.methods if options.calibration is not None else ())]
    if options.mapping == "symmetric" and bits in LEVELS_BITS:
        methods += [name + LEVELS for name in methods if name != "importance"]
    return methods + ["nearest" + PLANES] * (len(options.activation_bits) - 1)


def _packed_bytes(model: torch.nn.Module) -> int:
    packed = {
        layer.packed_weight.data_ptr(): layer.packed_weight.nbytes for layer in model.modules() if isinstance(layer, nn.Packed)
    }
    return sum(packed.values())


def _quantize(subject: _Subject, model: torch.nn.Module, method: str, bits: int) -> None:
    config = subject.config(bits, "levels" if method.endswith(LEVELS) else None, 16 if method.endswith(PLANES) else None)
    if method.startswith("nearest"):
        with described_to_transformers(model):
            replace_layers(model, config.select(model))
        return
    _calibrate(subject, model, config, method.removesuffix(LEVELS))


def _calibrate(subject: _Subject, model: torch.nn.Module, config: Any, method: str) -> None:
    options = subject.options
    calibrate(
        model, subject.calibration_texts(), config, method, tokenizer=subject.tokenizer, window=options.window,
        max_tokens=options.calibration_tokens,
    )  # fmt: skip


def _plain_gptq(subject: _Subject, model: torch.nn.Module, bits: int, group: int | None, shared: dict[int, list[str]]) -> int:
    """Replaces a float model's weights by dequantized ones of GPTQ without GPTAQ's term; returns their bytes in GPTQ's format.

    The format is symmetric: codes, and 16 bits for the scale of a group.
    """
    from ...transformers import LowBitConfig

    packed, options = copy.deepcopy(model), subject.options
    config = LowBitConfig(bits, group, embedding_bits=options.embedding_bits)
    run(
        packed, subject.calibration_texts(), config, "gptq",
        tokenizer=subject.tokenizer, window=options.window, max_tokens=options.calibration_tokens, progress=None,
        options={"correction": 0.0},
    )  # fmt: skip
    size = 0
    for names in shared.values():
        layer = packed.get_submodule(names[0])
        model.get_submodule(names[0]).weight.data.copy_(layer.dequantize())  # shared by the other layers
        n, k = layer.info.shape
        size += n * k * layer.info.bits // 8 + 2 * n * -(-k // (layer.info.group_size or k))
    return size


@torch.inference_mode()
def _mean_squares(subject: _Subject, shared: dict[int, list[str]]) -> dict[int, torch.Tensor]:
    """Sums of the squared inputs of the float model's matrices on the calibration text, by the weight's id.

    Ones for tables without a head, and for layers without tokens.
    """
    linears = {name: subject.model.get_submodule(name) for names in shared.values() for name in names}
    linears = {name: layer for name, layer in linears.items() if isinstance(layer, torch.nn.Linear)}
    sums = {id(layer.weight): torch.zeros(layer.in_features) for layer in linears.values()}

    def take(name: str, x: torch.Tensor) -> None:
        sums[id(linears[name].weight)] += x.float().flatten(0, -2).square().sum(0)

    with inputs_of(linears, take):
        for batch in subject.batches():
            subject.model(**batch)
    squares = {}
    for key, names in shared.items():
        square = sums.get(key)
        unused = square is None or not float(square.sum()) > 0
        squares[key] = torch.ones(subject.model.get_submodule(names[0]).weight.shape[1]) if unused else square
    return squares


def _sensitivity(subject: _Subject, shared: dict[int, list[str]], bits: int, say: Say) -> dict[str, Any]:
    """Loss of each layer quantized alone at ``bits``: nats per token, or 1 - cosine."""
    say(f"{len(shared)} layers alone, {bits} bits")
    before = subject.loss(subject.model)
    kinds, layers = subject.config(bits).select(subject.model, experts=False), []
    for names in shared.values():
        floats = {name: subject.model.get_submodule(name) for name in names}
        replace_layers(subject.model, {name: kinds[name] for name in names})
        try:
            cost = subject.loss(subject.model) - before
        finally:
            for name, layer in floats.items():
                subject.model.set_submodule(name, layer)
        layers.append({"layer": names[0], "cost": cost if math.isfinite(cost) else None})
    return {"bits": bits, "layers": layers}
