"""`SFTTrainer` and `DPOTrainer` train LoRA adapters on a packed model, and the loss falls.

Packages: trl, peft
"""

from datasets import Dataset
from given import LLAMA, PROMPTS, expected
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained(LLAMA)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
options = {"max_steps": 6, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
           "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
           "per_device_train_batch_size": 2}  # fmt: skip
texts = {"text": [PROMPTS[0] + expected()["texts"][1], PROMPTS[1] + expected()["texts"][0]]}
pairs = {"prompt": PROMPTS[:2], "chosen": expected()["texts"][:2], "rejected": expected()["texts"][1::-1]}
for trainer, config, data in ((SFTTrainer, SFTConfig, texts), (DPOTrainer, DPOConfig, pairs)):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32")
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    run = trainer(
        model, args=config("out", max_length=64, **options), train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer, peft_config=adapters,
    )  # fmt: skip
    run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0], (trainer.__name__, losses)
