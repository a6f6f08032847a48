"""What test_vllm.py runs in a process of its own: vLLM's greedy tokens as JSON, or the errors that it ends with.

    generate.py RANKS OUTPUT {"name": [DIRECTORY, quantization_config or null], ...}
"""

import json
import sys

PROMPTS = [[1, 5, 9, 20, 33], [7] * 12, list(range(3, 40))]
TOKENS = 12


def main(ranks: str, output: str, cases: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    found = {}
    for name, (directory, config) in json.loads(cases).items():
        options = {"hf_overrides": {"quantization_config": config}} if config else {}
        try:
            llm = LLM(
                directory, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
                tensor_parallel_size=int(ranks), kv_cache_memory_bytes=1 << 24, **options,
            )  # fmt: skip
        except Exception as error:  # what it is, the test says
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
