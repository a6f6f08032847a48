"""Runs three ranks for test_tensor_parallel.py; each writes its results as JSON.

    python tensor_parallel_ranks.py TINY DIRECTORY

The ranks have the environment of torchrun's processes, but are forks, because each would import transformers for seconds.

DIRECTORY: has PACKED and FLOAT checkpoints of some models, and gets the results.
"""

import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import lowbit
import torch
import torch.distributed as dist
from lowbit import tensor_parallel
from lowbit.hf import placing
from lowbit.machine.memory import give_back
from lowbit.tensor_parallel import PARTS, LinearPart, shard_
from transformers import AutoModelForCausalLM

RANKS = 3
# Layers of every kind with activations of 16 bits, and layers with the same input that have 8.
PLANES = ("*q_proj", "*qkv_proj", "*down*", "*head", "*embed*")
CONFIG = lowbit.LowBitConfig(bits=4, group_size=16, overrides={name: {"activation_bits": 16} for name in PLANES})


class Gated(torch.nn.Module):
    """Every way to split a layer, with large biases; inputs [..., 96], outputs [..., 80]."""

    plan = {
        "up.*": "colwise", "down": "rowwise", "whole": "colwise_gather_output", "split": "rowwise_split_input",
    }  # fmt: skip

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.up = torch.nn.ModuleList([torch.nn.Linear(96, 192), torch.nn.Linear(96, 192)])
        self.down = torch.nn.Linear(192, 96)
        self.whole = torch.nn.Linear(96, 192)
        self.split = torch.nn.Linear(192, 80)
        for parameter in self.parameters():
            parameter.data.mul_(10 if parameter.dim() == 1 else 1)
        more = {"activation_bits": 16}
        each = {"*": {}, "up.1": more, "down": more, "whole": more}
        lowbit.quantize_(
            self.to(dtype), {name: lowbit.LinearConfig(bits=4, group_size=32, **change) for name, change in each.items()}
        )

    def forward(self, x):
        return self.split(self.whole(self.down(self.up[0](x) * self.up[1](x).sigmoid())))


def refused(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def parts(model) -> list[str]:
    return sorted(name for name, layer in model.named_modules() if isinstance(layer, PARTS))


class Mixture(torch.nn.Module):
    """Experts, each with two matrices; inputs [rows, 96]."""

    plan = {"first": "packed_colwise", "second": "rowwise"}
    joined_at_the_end = plan | {"": "moe_tp_experts"}

    def __init__(self, inner=64):
        super().__init__()
        torch.manual_seed(1)

        def packed(rows, inputs):
            config = lowbit.LinearConfig(bits=4, group_size=32, activation_bits=16)
            return torch.stack([
                lowbit.quantize_tensor(torch.randn(rows, inputs) / 10, config, 10 * torch.randn(rows)) for _ in range(5)
            ])  # fmt: skip

        self.first = lowbit.nn.LinearExperts(packed(2 * inner, 96))
        self.second = lowbit.nn.LinearExperts(packed(80, inner))

    def forward(self, x):
        experts = torch.arange(2 * len(x)).view(-1, 2) % 5
        gate, up = self.first(x, experts).chunk(2, -1)
        return (self.second(gate.sigmoid() * up, experts[..., None])[..., 0, :] * torch.tensor([[0.25], [0.5]])).sum(-2)


def of_experts(two, x) -> dict:
    whole = Mixture()
    found = {"exact": torch.equal(shard_(Mixture(), two, Mixture.plan)(x), whole(x))}
    found["late"] = torch.equal(shard_(Mixture(), two, Mixture.joined_at_the_end)(x), whole(x))
    sums = shard_(Mixture(), two, Mixture.plan, exact=False)
    found["difference"] = (sums(x) - whole(x)).abs().max().item()
    late = shard_(Mixture(), two, Mixture.joined_at_the_end, exact=False)
    found["late difference"] = (late(x) - whole(x)).abs().max().item()
    inner, experts = torch.randn(7, 64), torch.arange(7)[:, None] % 5
    rank = dist.get_rank(two)
    each = [
        torch.stack([lowbit.linear(row, lowbit.slice_columns(whole.second.packed_weight[i % 5], at, at + 32), 80)
                     for i, row in enumerate(inner[:, at : at + 32])]) for at in (0, 32)
    ]  # fmt: skip
    found["sums"] = torch.equal(sums.second(inner[:, rank * 32 : rank * 32 + 32], experts)[:, 0], each[0] + each[1])
    found["bytes"] = sum(part.packed_weight.numel() for part in (sums.first, sums.second))
    found["whole bytes"] = sum(layer.packed_weight.numel() for layer in (whole.first, whole.second))
    found["refused"] = {
        "rows": refused(shard_, Mixture(49), two, Mixture.plan),
        "inputs": refused(shard_, Mixture(49), two, {"second": "rowwise"}),
        "groups": refused(shard_, Mixture(48), two, {"second": "rowwise"}, exact=False),
        "style": refused(shard_, Mixture(), two, {"first": "grouped_gemm"}),
        "float": refused(shard_, torch.nn.ModuleDict({"experts": Gated()}), two, {"experts": "moe_tp_experts"}),
        "twice": refused(shard_, sums, two, Mixture.plan),
    }
    return found


def of_layers(two, x) -> dict:
    whole, model = Gated(), Gated()
    rank = dist.get_rank(two)
    column, row, bias = whole.up[0], whole.down, whole.down.bias
    found = {}
    exact = shard_(Gated(), two, Gated.plan)
    found["columns"] = torch.equal(exact.up[0](x), column(x)[..., rank * 96 : (rank + 1) * 96])
    found["exact"] = torch.equal(exact(x), whole(x))
    half = shard_(Gated(torch.bfloat16), two, Gated.plan)
    found["exact bfloat16"] = torch.equal(half(x.bfloat16()), Gated(torch.bfloat16)(x.bfloat16()))
    sums = shard_(model, two, Gated.plan, exact=False)
    wide = column(x)
    mine = wide[..., rank * 96 : (rank + 1) * 96]
    each = [lowbit.linear(wide[..., i : i + 96], lowbit.slice_columns(row.packed_weight, i, i + 96), 96) for i in (0, 96)]
    found["sums"] = torch.equal(sums.down(mine), each[0] + each[1])
    found["bias"] = bias.abs().mean().item()
    found["difference"] = (sums(x) - whole(x)).abs().max().item()
    # One group per row; a permutation of the inputs.
    order = torch.randperm(192).int()
    ordered = torch.nn.ModuleList([lowbit.nn.Linear(row.packed_weight, input_order=order)])
    expected, plan = ordered[0](wide), {"*": "rowwise"}
    found["order refused"] = refused(shard_, ordered, two, plan, exact=False)
    found["order"] = torch.equal(shard_(ordered, two, plan)[0](mine), expected)
    return found


def of_tiny_llama(two, directory, ids) -> dict:
    whole = AutoModelForCausalLM.from_pretrained(directory)
    expected = whole(ids).logits
    exact = shard_(AutoModelForCausalLM.from_pretrained(directory), two)
    sums = shard_(AutoModelForCausalLM.from_pretrained(directory), two, exact=False)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    difference = sums(ids).logits - expected
    return {
        "exact": torch.equal(exact(ids).logits, expected),
        "tokens": torch.equal(exact.generate(ids, **options), whole.generate(ids, **options)),
        "sums": (difference.norm() / expected.norm()).item(),
        "bytes": sum(layer.packed_weight.numel() for layer in exact.modules() if isinstance(layer, LinearPart)),
        "whole bytes": sum(layer.packed_weight.numel() for layer in whole.modules() if isinstance(layer, lowbit.nn.Linear)),
        "twice": refused(shard_, exact, two),
        "save": refused(exact.save_pretrained, "never"),
        "heads": refused(shard_, whole),  # refused by all three ranks
        "unchanged": parts(whole),
    }


def of_random(packed, floats, ids) -> dict:
    whole = AutoModelForCausalLM.from_pretrained(packed)
    expected = whole(ids).logits
    auto = AutoModelForCausalLM.from_pretrained(packed, tp_plan="auto")
    here = AutoModelForCausalLM.from_pretrained(floats, quantization_config=CONFIG, tp_plan="auto")
    own = AutoModelForCausalLM.from_pretrained(packed)
    plan = dict(own.tp_plan)
    shard_(own)
    return {
        "auto": torch.equal(auto(ids).logits, expected),
        "at load": torch.equal(here(ids).logits, expected),
        "by hand": torch.equal(own(ids).logits, expected),
        "parts": [parts(model) == parts(own) for model in (auto, here)],
        "plan": auto.tp_plan == plan,
        "rows": {name: layer.out_features for name, layer in own.named_modules() if isinstance(layer, PARTS)},
    }


def of_two(packed, two, ids) -> dict:
    """Tokens of two ranks, exact and with sums, and of one."""
    whole, exact, sums = (AutoModelForCausalLM.from_pretrained(packed) for _ in range(3))
    shard_(exact, two), shard_(sums, two, exact=False)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = whole(ids).logits
    return {
        "logits": torch.equal(exact(ids).logits, expected),
        "tokens": torch.equal(exact.generate(ids, **options), whole.generate(ids, **options)),
        "sums": ((sums(ids).logits - expected).norm() / expected.norm()).item(),
    }


def mapped_bytes(file) -> int:
    """Bytes of a mapped file that are now in this process's memory."""
    ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def of_memory(packed) -> dict:
    """Memory of a rank for a file while it loads its part of a model, and afterwards."""
    file, seen = Path(packed, "model.safetensors").resolve(), []

    def watched(tensor):
        seen.append(mapped_bytes(file))  # a matrix was just read, so memory is at its peak
        give_back(tensor)

    placing.give_back = tensor_parallel.give_back = watched
    model = AutoModelForCausalLM.from_pretrained(packed, tp_plan="auto")
    placing.give_back = tensor_parallel.give_back = give_back
    weights = [layer.packed_weight for layer in model.modules() if isinstance(layer, lowbit.nn.Packed)]
    return {
        "file": file.stat().st_size,
        "largest": model.model.embed_tokens.packed_weight.numel(),
        "most mapped": max(seen),
        "left mapped": mapped_bytes(file),
        "own": sum(weight.numel() for weight in weights) - model.model.embed_tokens.packed_weight.numel(),
    }


def of_refusals() -> dict:
    def model(*sizes, **layers):
        made = torch.nn.ModuleDict(layers or {"up": torch.nn.Linear(*sizes)})
        return lowbit.quantize_(made, lowbit.LinearConfig(bits=4, group_size=32)) if not layers else made

    return {
        "outputs": refused(shard_, model(32, 50), None, {"up": "colwise"}),
        "few": refused(shard_, model(32, 2), None, {"up": "colwise_rep"}),
        "inputs": refused(shard_, model(32, 50), None, {"up": "rowwise"}),
        "groups": refused(shard_, model(48, 50), None, {"up": "rowwise"}, exact=False),
        "style": refused(shard_, model(32, 48), None, {"up": "packed_colwise"}),
        "float": refused(shard_, model(up=torch.nn.Linear(96, 96)), None, {"up": "colwise"}),
        "no plan": refused(shard_, model(96, 96)),
        "no layer": refused(shard_, model(96, 96), None, {"down": "colwise"}),
    }


def main(tiny, directory) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{directory}/group", rank=int(os.environ["RANK"]), world_size=RANKS)
    two = dist.new_group([0, 1])
    ids = torch.arange(3, 30)[None]
    torch.manual_seed(2)
    x = torch.randn(5, 96)
    found = {}
    with torch.no_grad():
        if dist.get_rank() < 2:
            found |= {"layers": of_layers(two, x), "experts": of_experts(two, x)}
        for name in ("qwen2", "phi3", "one head", "mixtral", "gemma3"):
            found[name] = of_random(f"{directory}/{name} packed", f"{directory}/{name}", ids)
        found["refusals"] = of_refusals()
        found["memory"] = of_memory(f"{directory}/large packed")
        damaged = f"{directory}/damaged"
        found["damaged"] = refused(AutoModelForCausalLM.from_pretrained, damaged, tp_plan="auto")
        if dist.get_rank() < 2:
            found["tiny"] = of_tiny_llama(two, tiny, ids)
            for name in ("phi3", "one head", "mixtral"):
                found[f"{name} on two"] = of_two(f"{directory}/{name} packed", two, ids)
    with open(f"{directory}/{dist.get_rank()}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def fork(rank: int, *arguments) -> int:
    """Starts a rank; returns its process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            main(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


if __name__ == "__main__":
    ranks = {fork(rank, *sys.argv[1:]) for rank in range(RANKS)}
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:  # the others would wait for it
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            sys.exit(1)
