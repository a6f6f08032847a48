"""Actions that test_crashes.py records, kills and repeats: everything in lowbit that writes files, on small models.

crash_actions.py SOURCES PLACE NAME...    # each in PLACE/NAME
"""

import os
import sys
import warnings
from pathlib import Path

import lowbit
import lowbit.importing.gguf_source
import lowbit.transformers
import torch
from checkpoints import load, save_model
from lowbit import LowBitConfig
from lowbit.calibration.journal import Journal
from lowbit.exports.gguf import export_gguf
from lowbit.tools.report.measure_methods import write
from reference import random_packed, random_rows

CONFIG = LowBitConfig(scale="absmax")


def make_sources(base: Path) -> None:
    """A float checkpoint in two precisions, and a GGUF file."""
    from command_line import FLOAT

    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048, "num_hidden_layers": 1}
    save_model(base / "model", num_hidden_layers=1)
    save_model(base / "older", num_hidden_layers=1, seed=1)
    (base / "model" / "more" / "files").mkdir(parents=True)
    (base / "model" / "more" / "files" / "LICENSE").write_text("as you like")
    save_model(base / "float32", dtype=torch.float32, **small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / "float32" / name).write_bytes((FLOAT / name).read_bytes())
    export_gguf(base / "float32", base / "m.gguf")


def quantize(sources: Path, place: Path) -> None:
    lowbit.quantize_checkpoint(sources / "model", place / "packed", CONFIG, max_shard_bytes=40_000)


def gguf(sources: Path, place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_gguf(sources / "float32", place / "m.gguf")


def importing(sources: Path, place: Path) -> None:
    lowbit.import_checkpoint(sources / "m.gguf", place / "imported")


def pte(sources: Path, place: Path) -> None:
    layer = lowbit.nn.Linear(random_packed(40, 64, 4, 32, "symmetric"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowbit.export_pte(layer, (random_rows(2, 64),), place / "m.pte")


def pt2(sources: Path, place: Path) -> None:
    layer = lowbit.nn.Linear(random_packed(40, 64, 4, 32, "symmetric"))
    with torch.no_grad():
        lowbit.export_pt2(layer, (random_rows(2, 64),), place / "m.pt2")


def report(sources: Path, place: Path) -> None:
    """The figures, which are rewritten after each measurement, like the page."""
    write(place / "figures.json", {"version": 1, "rows": [{"bits": 4}, {"bits": 3}]})


def saved(sources: Path, place: Path, size: str = "1GB") -> None:
    load(sources / "model", quantization_config=CONFIG).save_pretrained(place / "saved", max_shard_size=size)


def saved_in_shards(sources: Path, place: Path) -> None:
    saved(sources, place, "30KB")


# The layers that a calibration has kept, and their identity: two runs with one, then two with another.
JOURNALS = (({"config": "a"}, 0), ({"config": "a"}, 2), ({"config": "b"}, 4), ({"config": "b"}, 6))


def journal_layers(first: int):
    return [([f"layer {i}"], "gptq", random_packed(20, 64, 4, 32, "symmetric", seed=i)) for i in (first, first + 1)]


def journal(sources: Path, place: Path) -> None:
    for identity, first in JOURNALS:
        try:
            with Journal(place / "target", identity) as kept:
                kept.keep(journal_layers(first)[:1])
                kept.keep_widths({"of": identity["config"]})
                kept.keep(journal_layers(first)[1:])
                raise OSError("so that what is there stays")
        except OSError as error:
            assert "stays" in str(error), error


ACTIONS = {
    "quantize": quantize, "quantize into": quantize, "gguf": gguf, "import": importing, "pte": pte, "report": report,
    "saved": saved_in_shards, "one over one": saved, "shards over one": saved_in_shards, "journal": journal,
}  # fmt: skip
if "LOWBIT_CRASH_CHANGES" in os.environ:  # compiling takes half a minute: `make soak`
    ACTIONS["pt2"] = pt2

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[3:]:
        ACTIONS[name](Path(sys.argv[1]), Path(sys.argv[2]) / name)
