"""Runs in a separate process for test_vllm.py: writes vLLM's greedy tokens as JSON, or its errors.

generate.py OUTPUT {"name": {"model": DIRECTORY, ...}, ...}     with other arguments of vllm.LLM
"""

import json
import sys

PROMPTS = [[1, 5, 9, 20, 33], [7] * 12, list(range(3, 40))]
TOKENS = 12


def order_of_shared_inputs() -> str:
    """The error about permuted inputs on two ranks. In vLLM it is raised in a process whose errors only appear in the log."""
    import torch
    from lowbit.vllm.linear import PackedMethod
    from lowbit.vllm.model_facts import ServedModel
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.input_size = 2, 32
    return refused(PackedMethod(ServedModel(), "o_proj")._load_order, layer, None, torch.arange(32).int())


def float_in_vllm() -> str:
    """The error about a packed layer for which vLLM's model does not request quantization."""
    from lowbit.vllm.method import ServedConfig

    config = ServedConfig()
    config.model.selected, config.model.asked = {"model.gate": object(), "model.up": object()}, {"model.up"}
    return refused(config.get_checkpoint_weight_mapper)


def refused(function, *arguments) -> str:
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def main(output: str, cases: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    common = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    common |= {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}
    found = {"order of shared inputs": order_of_shared_inputs(), "float in vLLM": float_in_vllm()}
    for name, options in json.loads(cases).items():
        try:
            llm = LLM(**common | options)
        except Exception as error:  # test_vllm.py checks the message
            found[name] = str(error)
            continue
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        found[name] = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, greedy, use_tqdm=False)]
        del llm
        cleanup_dist_env_and_memory()
    with open(output, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
