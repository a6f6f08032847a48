"""``lowbit certify``."""

from __future__ import annotations

from . import options
from .models import load, set_threads
from .output import Output


def certify(output: Output, model: options.Model, *, threads: options.Threads = None) -> None:
    """Print a digest of a packed model's logits, which is the same on every machine."""
    import torch

    from .. import _C, isa, llm
    from ..llm.loading import is_packed, stop_tokens
    from ..llm.plan_files import PLAN

    set_threads(threads)
    if not is_packed(model):
        raise ValueError(f"{model} has float weights; expected those of lowbit quantize or lowbit import")
    file = model / PLAN
    made = not file.exists()
    if made:
        loaded = load(output, model, None)
        with output.progress(f"making {file}"):
            llm.export_decoder(llm.Decoder(loaded, 64), file, stop=stop_tokens(loaded))
    with output.progress("computing the logits of a fixed text"):
        certificate = f"{_C.PlanModel(str(file), torch.get_num_threads()).certify():016x}"
    document = {"model": str(model), "plan": str(file), "made": made, "certificate": certificate}
    output.result(document | {"isa": isa()["active"], "threads": torch.get_num_threads()}, certificate)
