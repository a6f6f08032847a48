"""Continues a text with a packed model split over the processes of torchrun. README.md has the commands.

torchrun ... generate.py MODEL "the text so far" [--tokens 20] [--compare]
"""

import argparse
import time

import torch
import torch.distributed
import transformers
from lowbit.tensor_parallel import shard_


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--compare", action="store_true", help="with the whole model in each process")
    arguments = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    inputs = tokenizer(arguments.text, return_tensors="pt")
    options = {"max_new_tokens": arguments.tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}

    model = shard_(transformers.AutoModelForCausalLM.from_pretrained(arguments.model))
    begin = time.perf_counter()
    found = model.generate(**inputs, **options)
    seconds = time.perf_counter() - begin
    if rank == 0:
        print(tokenizer.decode(found[0]))
        print(f"{found.shape[1] - inputs['input_ids'].shape[1]} tokens in {seconds:.2f} s", flush=True)
    if arguments.compare:
        whole = transformers.AutoModelForCausalLM.from_pretrained(arguments.model)
        same = torch.equal(whole(found).logits, model(found).logits)
        print(f"rank {rank}: {'the same bits' if same else 'different bits'} as one process", flush=True)
    torch.distributed.destroy_process_group()


main()
