"""Training with torch.distributed, with packed and prepared layers: bit-equal to the weights of one process."""

import os

import lowbit
import pytest
import torch
from lowbit import EmbeddingConfig, LinearConfig
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CONFIGS = {"*": LinearConfig(4, 32), "0": EmbeddingConfig(4, 32)}
ROWS = torch.arange(12).reshape(4, 3)


def make(change) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Embedding(12, 64), torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 12)
    return change(torch.nn.Sequential(*layers), CONFIGS)


def train(model: torch.nn.Module, parts: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        sum(model(part).square().mean() / len(parts) for part in parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def rank(number: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(os.path.join(directory, "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=number, world_size=2)
    for change in (lowbit.quantize_, lowbit.qat.prepare_):
        alone = make(change)
        train(alone, list(ROWS.split(2)))
        for wrap in (DistributedDataParallel, fully_shard):
            model = wrap(make(change))
            train(model, [ROWS.split(2)[number]])
            state = model.module.state_dict() if wrap is DistributedDataParallel else model.state_dict()
            for name, expected in alone.state_dict().items():
                found = state[name]
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                assert torch.equal(found, expected), (change.__name__, wrap.__name__, name)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_train_as_one(tmp_path):
    torch.multiprocessing.spawn(rank, (str(tmp_path),), nprocs=2)
