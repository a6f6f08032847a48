"""ExecuTorch's `TextLLMRunner` runs a `.pte` of `lowbit export`: lowbit's own text, in a process without transformers.

Packages: executorch
"""

import subprocess
import sys

from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same

subprocess.run(["lowbit", "export", str(LLAMA), "llama.pte", "--max-length", "64"], check=True)
pieces: list[str] = []
options = GenerationConfig(echo=False, max_new_tokens=NEW_TOKENS, temperature=0, num_bos=1)
TextLLMRunner("llama.pte", str(LLAMA / "tokenizer.json")).generate(PROMPTS[0], options, pieces.append)
assert "transformers" not in sys.modules
same("".join(pieces), expected()["texts"][0])
