"""The commands. What needs transformers is imported where a command needs it, so that ``lowbit --help`` is quick."""

from __future__ import annotations

import enum
import functools
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import typer

import lowbit
from lowbit import _C
from lowbit._machine import cpu_name, peak_memory
from lowbit.threads import available_cpus

from .output import Output, quieten, reporting, size, table

if TYPE_CHECKING:
    from lowbit import LowBitConfig

app = typer.Typer(
    help="Language models with 1- to 8-bit weights on CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_state = {"debug": False}


@app.callback(invoke_without_command=True)
def _common(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code an error comes from.")] = False,
) -> None:
    _state["debug"] = debug
    if show_version:
        print(f"lowbit {lowbit.__version__}")
        raise typer.Exit


def _command(name: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        @app.command(name)
        @functools.wraps(function)
        def run(**arguments) -> None:
            quieten()
            with reporting(arguments["as_json"], _state["debug"]):
                function(**arguments)

        return function

    return register


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead (docs/cli.md has its keys).")]
Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Directory of a checkpoint, float or packed.", show_default=False)
]
ModelOrShape = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|SHAPE",
        help="Directory of a checkpoint; or random weights of a shape: llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, qwen3-0.6b.",
        show_default=False,
    ),
]
Bits = Annotated[int, typer.Option("--bits", min=1, max=8, help="Bits per weight.")]
OptionalBits = Annotated[
    int | None,
    typer.Option("--bits", min=1, max=8, help="Quantise a float checkpoint to so many bits first.", show_default=False),
]
GroupSize = Annotated[
    str, typer.Option("--group-size", help="Inputs that share a scale, a multiple of 16; or none: a scale per output.")
]
Mapping = Annotated[Literal["symmetric", "affine"], typer.Option("--mapping", help="Scale only, or scale and minimum.")]
EmbeddingBits = Annotated[
    int | None,
    typer.Option("--embedding-bits", min=1, max=8, help="Of embedding tables and heads that share one.", show_default="--bits"),
]  # fmt: skip
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads to run on.", show_default="torch's")]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", min=16, help="Tokens in the KV cache, a multiple of 16.", show_default=False),
]


def _group_size(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no group size; expected a multiple of 16, or none", param_hint="--group-size"
        ) from None


def _config(
    bits: int, group_size: str, mapping: str = "symmetric", embedding_bits: int | None = None, **others
) -> LowBitConfig:
    return lowbit.LowBitConfig(
        bits=bits, group_size=_group_size(group_size), mapping=mapping, embedding_bits=embedding_bits, **others
    )


def _override(text: str) -> tuple[str, dict | None]:
    """PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float, as LowBitConfig takes it."""
    pattern, _, value = text.rpartition("=")
    if pattern and value == "float":
        return pattern, None
    bits, *rest = value.split(",")
    if not pattern or not bits.isdecimal() or len(rest) > 2:
        raise typer.BadParameter(
            f"{text!r}; expected PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float", param_hint="--override"
        )
    changes: dict = {"bits": int(bits)}
    if rest:
        changes["group_size"] = _group_size(rest[0])
    if len(rest) == 2:
        changes["mapping"] = rest[1]
    return pattern, changes


def _load(output: Output, model: Path, config: LowBitConfig | None) -> torch.nn.Module:
    from lowbit.llm.loading import load_model

    with output.progress(
        f"loading {model}" if config is None else f"loading {model} to {config.bits} bits", "tensors"
    ) as advance:
        return load_model(model, config, progress=advance)


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """The state of a model, shared tensors once."""
    return list({tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.numel()}.values())


def _need_compiler() -> None:
    """Says what is missing before torch does, after a long step."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise OSError(f"{error} Install g++ or clang, or name one in the environment variable CXX") from error


def _positions(model: torch.nn.Module) -> int:
    """The longest text that a model is made for, in tokens."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


@_command("quantize")
def quantize(
    source: Annotated[Path, typer.Argument(help="Directory of a float checkpoint.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Directory to write; empty, or not there yet.", show_default=False)],
    bits: Bits = 4,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    scale: Annotated[
        Literal["mse", "absmax"], typer.Option("--scale", help="Least squared error, or the whole range of a group.")
    ] = "mse",
    embedding_bits: EmbeddingBits = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="PATTERN=...",
            help="For layers of these names: PATTERN=BITS[,GROUP[,MAPPING]] or PATTERN=float. The last match counts.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantise a checkpoint, without ever holding it in memory."""
    output = Output(as_json)
    overrides = dict(map(_override, override or ()))
    config = _config(bits, group_size, mapping, embedding_bits, scale=scale, overrides=overrides)
    with output.progress(f"quantising {source}", "bytes") as advance:
        summary = lowbit.quantize_checkpoint(source, target, config, progress=advance)
    packed = [entry for entry in summary.entries if entry.kind == "packed"]
    packed_bytes = sum(entry.bytes for entry in packed)
    weights = sum(math.prod(entry.shape) for entry in packed)
    document = {
        "source": str(source),
        "target": str(target),
        "bytes_before": summary.source_bytes,
        "bytes_after": summary.target_bytes,
        "packed_layers": len(packed),
        "packed_bytes": packed_bytes,
        "packed_weights": weights,
        "bits_per_weight": 8 * packed_bytes / weights,
        "float_bytes": summary.target_bytes - packed_bytes,
        "left_float": summary.left,
        "seconds": summary.seconds,
    }
    shown = table("", "before", "after", "")
    share = f"{100 * summary.target_bytes / summary.source_bytes:.1f} %"
    shown.add_row("all tensors", size(summary.source_bytes), size(summary.target_bytes), share)
    shown.add_row(
        f"{len(packed)} packed layers", "", size(packed_bytes), f"{document['bits_per_weight']:.2f} bits per weight"
    )
    shown.add_row("left as they were", "", size(document["float_bytes"]), "")
    left = [f"{name} stays float: {why}" for name, why in summary.left.items()]
    output.result(document, shown, *left, f"{target} written in {summary.seconds:.1f} s")


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give one of --prompt and --prompt-file", param_hint="--prompt")
    if prompt == "-" or str(prompt_file) == "-":
        return sys.stdin.read()
    return prompt if prompt_file is None else _read_text(prompt_file)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


@_command("generate")
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="File with the text to continue; - is stdin.", show_default=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the most likely token, always.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Draw from so many tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", min=0, max=1, help="Draw from the likeliest that reach this probability.", show_default="1"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    max_length: MaxLength = None,
    threads: Threads = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Make machine code of the whole model first; needs a C++ compiler.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue a text: the new text goes to stdout as it comes, all else to stderr."""
    from lowbit import llm
    from lowbit.llm.loading import TextStream, load_tokenizer, stop_tokens

    output = Output(as_json)
    text = _prompt(prompt, prompt_file)
    config = None if bits is None else _config(bits, group_size, mapping, embedding_bits)
    if compile_:
        _need_compiler()
    _set_threads(threads)
    loaded = _load(output, model, config)
    tokenizer = load_tokenizer(model)
    if chat:
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {model} has no chat template; leave out --chat")
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    if max_length is None:
        max_length = min(-(-(len(ids) + max_new_tokens) // 16), _positions(loaded) // 16) * 16
    step = llm.Decoder(loaded, max_length)
    if compile_:
        with output.progress("compiling"):
            step = llm.compile_decoder(step)
    stream, pieces = TextStream(tokenizer, ids), []
    if not as_json:
        sys.stdout.reconfigure(errors="replace")

    def on_token(token: int) -> None:
        pieces.append(stream.push(token))
        if not as_json:
            print(pieces[-1], end="", flush=True)

    generation = llm.generate(
        step,
        ids,
        max_new_tokens,
        max_length=max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop_tokens(loaded, tokenizer),
        on_token=on_token,
    )
    memory = peak_memory()
    document = {
        "model": str(model),
        "text": "".join(pieces),
        "tokens": generation.tokens,
        "stopped": generation.stopped,
        "prompt_tokens": generation.prompt_tokens,
        "prefill_seconds": generation.prefill_seconds,
        "decode_seconds": generation.decode_seconds,
        "prefill_tokens_per_second": generation.prefill_rate,
        "decode_tokens_per_second": generation.decode_rate,
        "peak_memory_bytes": memory,
        "threads": torch.get_num_threads(),
    }
    if not as_json:
        print(flush=True)
        decode = "" if math.isnan(generation.decode_rate) else f", decode {generation.decode_rate:.1f} tokens/s"
        used = "" if memory is None else f", peak memory {size(memory)}"
        output.note(
            f"{generation.prompt_tokens} prompt tokens, prefill {generation.prefill_rate:.1f} tokens/s; "
            f"{len(generation.tokens)} new tokens{decode}{used}"
        )
    else:
        output.result(document)


@_command("eval")
def evaluate(
    model: Model,
    text: Annotated[Path, typer.Option("--text", help="File of text, UTF-8.", show_default=False)],
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits", metavar="N,N,...", help="Also quantise a float checkpoint to these widths.", show_default=False
        ),
    ] = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens that the model sees at once.")] = 512,
    stride: Annotated[int, typer.Option("--stride", min=1, help="New tokens per window.")] = 256,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text, for the checkpoint as it is and at other widths."""
    from lowbit.llm.loading import is_packed, load_tokenizer
    from lowbit.llm.perplexity import perplexity

    output = Output(as_json)
    try:
        widths = [int(part) for part in bits.split(",")] if bits else []
    except ValueError:
        raise typer.BadParameter(f"{bits!r}; expected numbers from 1 to 8, as in 8,4,2", param_hint="--bits") from None
    configs = [None, *(_config(width, group_size, mapping, embedding_bits) for width in widths)]
    _set_threads(threads)
    content = _read_text(text)
    if is_packed(model) and widths:
        raise ValueError(f"{model} is packed already; --bits needs a float checkpoint")
    tokenizer = load_tokenizer(model)
    tokens = tokenizer(content, verbose=False)[
        "input_ids"
    ]  # verbose: a warning that they are more than the model takes
    results = []
    shown = table("weights", "size", "perplexity", "bits per byte", "seconds")
    for config in configs:
        loaded = _load(output, model, config)
        name = _name_weights(loaded) if config is None else f"{config.bits} bits"
        begin = time.perf_counter()
        with output.progress(f"{text}, {name}", "tokens") as advance:
            measured = perplexity(loaded, tokens, window=window, stride=stride, progress=advance)
        row = {
            "weights": name,
            "bits": None if config is None else config.bits,
            "weight_bytes": sum(tensor.nbytes for tensor in _tensors(loaded)),
            "perplexity": measured.perplexity,
            "bits_per_byte": measured.bits_per_byte(len(content.encode())),
            "seconds": time.perf_counter() - begin,
        }
        results.append(row)
        figures = f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}", f"{row['seconds']:.1f}"
        shown.add_row(name, size(row["weight_bytes"]), *figures)
        del loaded  # before the next one is loaded
    document = {
        "model": str(model),
        "text": str(text),
        "text_bytes": len(content.encode()),
        "predicted_tokens": len(tokens) - 1,
        "window": window,
        "stride": stride,
        "threads": torch.get_num_threads(),
        "results": results,
    }
    output.result(document, shown)


def _name_weights(model: torch.nn.Module) -> str:
    """What a model's weights are, in a few words: "bfloat16", "packed, 4 and 8 bits"."""
    bits = sorted(
        {module.info.bits for module in model.modules() if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding)}
    )
    return f"packed, {' and '.join(map(str, bits))} bits" if bits else str(model.dtype).removeprefix("torch.")


@_command("export")
def export(
    model: Model,
    to: Annotated[
        Literal["pte", "pt2"], typer.Option("--to", help="ExecuTorch's format, or AOTInductor's.", show_default=False)
    ],
    file: Annotated[
        Path, typer.Option("--output", help="File to write; its name ends in .pte or .pt2.", show_default=False)
    ],
    max_length: MaxLength = None,
    chunk: Annotated[
        int, typer.Option("--chunk", min=1, help="The most tokens of one call; longer prompts come in pieces.")
    ] = 128,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    mapping: Mapping = "symmetric",
    embedding_bits: EmbeddingBits = None,
    as_json: Json = False,
) -> None:
    """Write a model, with its KV cache, to a file that runs without Python."""
    from lowbit import llm

    output = Output(as_json)
    if file.suffix != f".{to}":
        raise ValueError(f"--output is {str(file)!r}; expected a name that ends in .{to}")
    if not file.absolute().parent.is_dir():
        raise NotADirectoryError(f"{file.absolute().parent} is not a directory; make it first")
    config = None if bits is None else _config(bits, group_size, mapping, embedding_bits)
    if to == "pt2":
        _need_compiler()
    loaded = _load(output, model, config)
    if max_length is None:
        max_length = min(2048, _positions(loaded) // 16 * 16)
    decoder = llm.Decoder(loaded, max_length)
    begin = time.perf_counter()
    with output.progress(f"exporting to {file}"):
        (llm.export_pte if to == "pte" else llm.export_pt2)(decoder, file, chunk=min(chunk, max_length))
    document = {
        "model": str(model),
        "output": str(file),
        "to": to,
        "max_length": max_length,
        "chunk": min(chunk, max_length),
        "bytes": file.stat().st_size,
        "seconds": time.perf_counter() - begin,
    }
    output.result(
        document,
        f"{file}: {size(document['bytes'])}, up to {max_length} tokens, written in {document['seconds']:.1f} s",
    )


@_command("inspect")
def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Directory of a checkpoint, or one .safetensors file.", show_default=False),
    ],
    as_json: Json = False,
) -> None:
    """List the tensors of a checkpoint, with their bits and bytes."""
    output = Output(as_json)
    entries = lowbit.inspect_checkpoint(path)
    packed = [entry for entry in entries if entry.kind == "packed"]
    packed_bytes, weights = sum(entry.bytes for entry in packed), sum(math.prod(entry.shape) for entry in packed)
    document = {
        "path": str(path),
        "bytes": sum(entry.bytes for entry in entries),
        "packed_bytes": packed_bytes,
        "packed_weights": weights,
        "bits_per_weight": 8 * packed_bytes / weights if weights else None,
        "tensors": [asdict(entry) for entry in entries],
    }
    shown = table("tensor", "kind", "shape", "bits", "group", "mapping", "bytes")
    for entry in entries:
        is_packed = entry.kind == "packed"
        group = "" if not is_packed else "row" if entry.group_size is None else str(entry.group_size)
        shape = " x ".join(map(str, entry.shape))
        shown.add_row(entry.name, entry.kind, shape, str(entry.bits), group, entry.mapping or "", str(entry.bytes))
    total = f"{len(entries)} tensors, {size(document['bytes'])}"
    if packed:
        total += f"; {len(packed)} packed: {size(packed_bytes)}, {document['bits_per_weight']:.2f} bits per weight"
    output.result(document, shown, total)


def _is_shape(name: str) -> bool:
    """Whether this names random weights of a known shape rather than a directory."""
    from lowbit.llm.shapes import NAMES

    if name in NAMES:
        return True
    if not Path(name).exists():
        raise FileNotFoundError(
            f"{name} does not exist; expected the directory of a checkpoint, or one of {', '.join(NAMES)}"
        )
    return False


class _Mode(str, enum.Enum):  # typer takes no list of literals
    eager = "eager"
    compile = "compile"
    aot = "aot"


@_command("bench")
def bench(
    model: ModelOrShape,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option("--new", min=1, help="Tokens that are decoded behind it.")] = 64,
    mode: Annotated[
        list[_Mode],
        typer.Option("--mode", help="As it is, with torch.compile, with AOTInductor; several take turns."),
    ] = (_Mode.aot,),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often; medians count.")] = 3,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure a prompt and decoding, beside the bandwidth of this machine's memory."""
    from lowbit.llm import bench as library

    output = Output(as_json)
    modes = list(dict.fromkeys(each.value for each in mode))
    if modes != ["eager"]:
        _need_compiler()
    _set_threads(threads)
    measured = model if _is_shape(model) else _load_packed(output, Path(model), bits, group_size)
    with output.progress(f"measuring {model}"):
        figures = library.run(
            measured, bits or 4, _group_size(group_size), prompt=prompt, new=new, modes=modes, rounds=rounds
        )
    shown = table("", "decode, tokens/s", "of the bandwidth", "prompt, tokens/s", "first token, s", "compiled in, s")
    for name, row in figures["modes"].items():
        shown.add_row(
            name,
            f"{row['decode_tokens_per_second']:.1f}",
            f"{100 * row['share_of_bandwidth']:.0f} %",
            f"{row['prefill_tokens_per_second']:.1f}",
            f"{row['seconds_to_first_token']:.3f}",
            f"{row['prepare_seconds']:.1f}",
        )
    machine = (
        f"{figures['threads']} threads of {figures['machine']}, memory read at {size(figures['read_bandwidth'])}/s"
    )
    weights = f"{size(figures['packed_bytes_per_token'])} of packed weights per token"
    memory = figures["peak_memory_bytes"]
    used = [] if memory is None else [f"peak memory {size(memory)}"]
    output.result({"model": model, **figures}, f"{model}: {weights}; {machine}", shown, *used)


@_command("tune")
def tune(
    model: ModelOrShape,
    bits: OptionalBits = None,
    group_size: GroupSize = "32",
    rows: Annotated[
        int, typer.Option("--rows", min=1, help="Rows of activations: 1 for decoding, more for a prompt.")
    ] = 1,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to measure, about.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Measure with how many threads the linear layers run fastest."""
    output = Output(as_json)
    measured = _layer_shapes(model) if _is_shape(model) else _load_packed(output, Path(model), bits, group_size)
    with output.progress(f"measuring 1 to {available_cpus()} threads"):
        tuning = lowbit.tune_threads(
            measured, rows=rows, bits=bits or 4, group_size=_group_size(group_size), seconds=seconds, apply=False
        )
    document = {
        "model": model,
        "rows": rows,
        "threads": tuning.threads,
        "seconds": {str(threads): median for threads, median in tuning.seconds.items()},
    }
    shown = table("threads", "ms per pass")
    for threads, median in tuning.seconds.items():
        shown.add_row(f"{threads}{' *' if threads == tuning.threads else ''}", f"{1e3 * median:.3f}")
    output.result(document, shown, f"fastest: --threads {tuning.threads}, or torch.set_num_threads({tuning.threads})")


def _load_packed(output: Output, model: Path, bits: int | None, group_size: str) -> torch.nn.Module:
    """A packed checkpoint as it is, a float one with `bits` or 4."""
    from lowbit.llm.loading import is_packed

    as_it_is = bits is None and is_packed(model)
    return _load(output, model, None if as_it_is else _config(bits or 4, group_size))


def _layer_shapes(shape: str) -> list[tuple[int, int]]:
    """[out_features, in_features] of the linear layers of one block of a named shape, and of its head."""
    from lowbit.llm.shapes import shape_config

    config = shape_config(shape)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = import_module("transformers").AutoModelForCausalLM.from_config(config)
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return [(layer.out_features, layer.in_features) for layer in linear]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@_command("info")
def info(as_json: Json = False) -> None:
    """Describe this installation: versions, CPU, instruction sets, kernels."""
    isa, threads = lowbit.isa(), torch.get_num_threads()
    packages = ("torch", "transformers", "executorch")
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for row in lowbit.kernels():
        counts = kernels.setdefault(row["family"], {}).setdefault(
            row["isa"], {"kernels": 0, "supported": 0, "active": 0}
        )
        counts["kernels"] += 1
        counts["supported"] += row["supported"]
        counts["active"] += row["active"]
    document = {
        "lowbit": lowbit.__version__,
        "python": platform.python_version(),
        **{package: _installed(package) for package in packages},
        "built_with_executorch": _C.executorch_version or None,
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cpus_allowed": available_cpus(),
        "threads": threads,
        "isa": isa,
        "kernels": kernels,
    }
    facts = table("", "")
    facts.show_header = False
    facts.columns[1].justify = "left"
    executorch = document["executorch"] or "not installed"
    built = f"operators for {_C.executorch_version}" if _C.executorch_version else "lowbit was built without it"
    for name, value in (
        ("lowbit", lowbit.__version__),
        ("python", document["python"]),
        ("torch", document["torch"]),
        ("transformers", document["transformers"] or "not installed"),
        ("executorch", f"{executorch}; {built}"),
        ("CPU", f"{document['cpu']}, {document['architecture']}"),
        ("instruction sets", ", ".join(isa["cpu"])),
        ("in use", ", ".join(isa["active"]) + (f" (LOWBIT_ISA={isa['cap']})" if isa["cap"] else "")),
        ("threads", f"{threads}; this process may use {available_cpus()} CPUs"),
    ):
        facts.add_row(name, value)
    counts = table("kernels", "instruction set", "all", "this CPU's", "in use", title=None)
    for family, by_isa in kernels.items():
        for name, row in by_isa.items():
            counts.add_row(family, name, *map(str, row.values()))
    Output(as_json).result(document, facts, "", counts)
