"""`lm_eval --model hf` on a custom task matches lowbit's own log-likelihood of each document.

Packages: lm-eval
"""

import json
import subprocess
import sys
from pathlib import Path

from given import LLAMA, TASK, expected

Path("task.yaml").write_text(f"""
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {TASK}/documents.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
""")
command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={LLAMA},dtype=float32"]
command += ["--tasks", "own", "--include_path", ".", "--device", "cpu", "--batch_size", "1"]
subprocess.run([*command, "--output_path", "out", "--log_samples"], check=True)
(samples,) = Path("out").rglob("samples_own_*.jsonl")
found = sorted(float(json.loads(line)["filtered_resps"][0][0]) for line in samples.read_text().splitlines())
wanted = sorted(expected()["loglikelihoods"])
assert len(found) == len(wanted) and all(abs(a - b) <= 1e-3 for a, b in zip(found, wanted)), (found, wanted)
