"""Layers that a checkpoint lacks, such as a classifier's new head, stay float and can be trained."""

import json

import lowbit
import pytest
import torch
import transformers
from checkpoints import SIZES, TOKENS, change_tensors, save_model
from safetensors.torch import load_file

CONFIG = lowbit.LowBitConfig(bits=4, group_size=32)


def classifier(path, config=CONFIG, **options):
    torch.manual_seed(1)
    return transformers.AutoModelForSequenceClassification.from_pretrained(path, quantization_config=config, **options)


def kinds(model) -> dict[str, bool]:
    """Linear layers and tables -> whether they are packed."""
    kind = (lowbit.nn.Packed, torch.nn.Linear, torch.nn.Embedding)
    return {name: isinstance(layer, lowbit.nn.Packed) for name, layer in model.named_modules() if isinstance(layer, kind)}


def trains(model, head: torch.nn.Linear) -> None:
    model.config.pad_token_id = 0
    before = head.weight.clone()
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
    model(input_ids=TOKENS, labels=torch.tensor([0, 2])).loss.backward()
    optimizer.step()
    assert (head.weight != before).any()


@pytest.mark.parametrize("files", ["safetensors", "bin"])
def test_a_new_head(tmp_path, files):
    path = save_model(tmp_path / "float", dtype=torch.float32)
    if files == "bin":
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()
    model = classifier(path, num_labels=3)
    assert [name for name, packed in kinds(model).items() if not packed] == ["score"]
    assert type(model.score) is torch.nn.Linear and 0.01 < model.score.weight.std() < 0.03  # transformers' initialization
    trains(model, model.score)
    # It is saved and loaded unchanged.
    model.save_pretrained(tmp_path / "packed")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "packed")
    assert kinds(again) == kinds(model) and torch.equal(again.score.weight, model.score.weight)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_a_new_head_inside_its_own_module(tmp_path):
    """T5 initializes both layers of its head in the surrounding module."""
    sizes = {"vocab_size": 403, "d_model": 64, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    torch.manual_seed(0)
    transformers.T5Model(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "float")
    torch.manual_seed(1)
    model = transformers.T5ForSequenceClassification.from_pretrained(
        tmp_path / "float", num_labels=3, quantization_config=CONFIG
    )
    assert {name for name, packed in kinds(model).items() if not packed and "classification_head" in name} == {
        "classification_head.dense", "classification_head.out_proj"
    }  # fmt: skip
    head = model.classification_head
    assert head.dense.weight.isfinite().all() and head.dense.weight.std() > 0.01 and not head.dense.bias.any()
    assert any(kinds(model).values())


def test_a_new_pooler_and_head(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 403}
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "float")
    model = classifier(tmp_path / "float", num_labels=3)
    assert [name for name, packed in kinds(model).items() if not packed] == ["bert.pooler.dense", "classifier"]
    trains(model, model.classifier)


def test_a_head_of_another_name(tmp_path):
    classifier(save_model(tmp_path / "float", dtype=torch.float32), None, num_labels=3).save_pretrained(tmp_path / "three")
    change_tensors(
        tmp_path / "three" / "model.safetensors",
        lambda tensors: tensors.update({"classifier.weight": tensors.pop("score.weight")}),
    )
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    (tmp_path / "three" / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSomethingElse"]}))
    assert not kinds(classifier(tmp_path / "three", num_labels=3))["score"]


def test_a_head_of_another_number_of_labels(tmp_path):
    classifier(save_model(tmp_path / "float", dtype=torch.float32), None, num_labels=3).save_pretrained(tmp_path / "three")
    assert kinds(classifier(tmp_path / "three"))["score"]  # the checkpoint's own
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        classifier(tmp_path / "three", num_labels=5)
    model = classifier(tmp_path / "three", num_labels=5, ignore_mismatched_sizes=True)
    assert model.score.weight.shape == (5, SIZES["hidden_size"])
    assert [name for name, packed in kinds(model).items() if not packed] == ["score"]
    trains(model, model.score)


def test_tied_layers_are_not_new(tmp_path):
    path = save_model(tmp_path / "float", kind="tied", dtype=torch.float32)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=CONFIG)
    assert all(kinds(model).values())


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_larger_vocabulary_is_new_in_the_head_too(tmp_path, kind):
    path = save_model(tmp_path / "float", **({"kind": "tied"} if kind == "tied" else {}), dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, vocab_size=SIZES["vocab_size"] + 16, ignore_mismatched_sizes=True, quantization_config=CONFIG
    )
    assert {name for name, packed in kinds(model).items() if not packed} == {"model.embed_tokens", "lm_head"}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (kind == "tied")
    assert model(TOKENS).logits.isfinite().all()


def test_a_new_head_trains_with_lora(tmp_path):
    peft = pytest.importorskip("peft")
    model = classifier(save_model(tmp_path / "float", dtype=torch.float32), num_labels=3)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"]))
    head = model.base_model.model.score.modules_to_save["default"]
    assert sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad) == 3 * 64
    trains(model, head)


@pytest.mark.parametrize("saved", [["score"], ["embed_tokens"], ["mlp"]])
def test_packed_layers_in_modules_to_save_are_refused(tmp_path, saved):
    peft = pytest.importorskip("peft")
    classifier(save_model(tmp_path / "float", dtype=torch.float32), None, num_labels=3).save_pretrained(tmp_path / "three")
    model = classifier(tmp_path / "three")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
    with pytest.raises(
        ValueError, match=rf"modules_to_save has '{saved[0]}', but \S+ is packed and cannot be trained: leave it"
    ):
        peft.get_peft_model(model, config)
    model = classifier(tmp_path / "three", lowbit.LowBitConfig(bits=4, overrides={f"*{saved[0]}*": None}))
    peft.get_peft_model(model, config)
