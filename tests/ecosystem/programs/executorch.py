"""ExecuTorch's `TextLLMRunner` runs a `.pte` of `lowbit export`: the text of `lowbit generate`, without transformers.

Packages: executorch
"""

import json
import subprocess
import sys

from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
from given import LLAMA, NEW_TOKENS, PROMPTS, same

subprocess.run(["lowbit", "export", str(LLAMA), "--to", "pte", "--output", "llama.pte", "--max-length", "64"], check=True)
pieces: list[str] = []
options = GenerationConfig(echo=False, max_new_tokens=NEW_TOKENS, temperature=0, num_bos=1)
TextLLMRunner("llama.pte", str(LLAMA / "tokenizer.json")).generate(PROMPTS[0], options, pieces.append)
assert "transformers" not in sys.modules
command = ["lowbit", "generate", str(LLAMA), "--prompt", PROMPTS[0], "--max-new-tokens", str(NEW_TOKENS), "--json"]
same("".join(pieces), json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["text"])
