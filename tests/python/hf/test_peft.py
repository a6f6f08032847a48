"""LoRA on packed layers, through peft."""

import copy

import checkpoints
import lowbit
import pytest
import reference
import torch
from lowbit import EmbeddingConfig, LinearConfig
from needs import need_packages

need_packages("peft")

import lowbit.peft
import peft

TARGETS = ["q_proj", "down_proj"]


def packed_model(kind: str = "tied", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    down = LinearConfig(2, 16, "affine", activation_bits=16)
    configs = {"*": LinearConfig(4, 32), "*down_proj": down, "*embed*": EmbeddingConfig(4, 32)}
    return lowbit.quantize_(checkpoints.make_model(kind, dtype), configs)


def config(**arguments) -> peft.LoraConfig:
    return lowbit.peft.for_packed_layers(peft.LoraConfig(r=4, target_modules=TARGETS, **arguments))


def test_adapters_learn_and_packed_weights_stay():
    model = packed_model()
    with torch.no_grad():
        expected = model(checkpoints.TOKENS).logits
    state = copy.deepcopy(model.state_dict())
    adapted = peft.get_peft_model(model, config())
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, lowbit.peft.LoraLinear) and isinstance(layer.base_layer, lowbit.nn.Linear)
    trainable = [name for name, value in adapted.named_parameters() if value.requires_grad]
    assert len(trainable) == 2 * 2 * 2 and all("lora_" in name for name in trainable)
    with torch.no_grad():
        assert torch.equal(adapted(checkpoints.TOKENS).logits, expected)  # B is initialized to zero

    optimizer = torch.optim.Adam((value for value in adapted.parameters() if value.requires_grad), 1e-2)
    losses = []
    for _ in range(8):
        loss = adapted(checkpoints.TOKENS, labels=checkpoints.TOKENS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    checkpoints.assert_same_model(adapted.unload(), _loaded(state))


def _loaded(state: dict) -> torch.nn.Module:
    model = packed_model()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_gradients_are_those_of_the_dequantized_weight(activation_bits):
    base = lowbit.nn.Linear.from_float(torch.nn.Linear(64, 48), LinearConfig(3, 32, activation_bits=activation_bits))
    model = torch.nn.Sequential(base, torch.nn.LayerNorm(48))  # peft reads the first parameter's device
    adapted = peft.get_peft_model(model, lowbit.peft.for_packed_layers(peft.LoraConfig(r=4, target_modules=["0"])))
    layer = model[0]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = reference.random_rows(5, 64).requires_grad_()
    upstream = reference.random_rows(5, 48, seed=1)
    layer(x).backward(upstream)
    scaling = layer.scaling["default"]
    torch.testing.assert_close(x.grad, upstream @ (base.dequantize() + scaling * b @ a).detach())
    torch.testing.assert_close(b.grad, scaling * upstream.T @ (x @ a.T).detach())
    torch.testing.assert_close(a.grad, scaling * (upstream @ b).detach().T @ x.detach())
    assert adapted.get_nb_trainable_parameters()[0] == 4 * (64 + 48)


def test_adapters_are_saved_and_loaded(tmp_path):
    model = peft.get_peft_model(packed_model(dtype=torch.bfloat16), config())
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    with torch.no_grad():
        expected = model(checkpoints.TOKENS).logits
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000  # contains no packed weight
    read = lowbit.peft.for_packed_layers(peft.PeftConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(packed_model(dtype=torch.bfloat16), tmp_path, config=read)
    with torch.no_grad():
        assert torch.equal(again(checkpoints.TOKENS).logits, expected)
        with again.disable_adapter():
            without = packed_model(dtype=torch.bfloat16)(checkpoints.TOKENS).logits
            assert torch.equal(again(checkpoints.TOKENS).logits, without)


@pytest.mark.parametrize("targets", [TARGETS, "all-linear"])
def test_nothing_has_to_be_said_to_peft(tmp_path, targets):
    model = packed_model("untied")
    model.extra = torch.nn.Linear(4, 4)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}
    if targets == TARGETS:
        assert set(kinds.values()) == {lowbit.peft.LoraLinear} and len(kinds) == 4
    else:  # 7 layers in each of 2 blocks, one of which stays float; not the head
        assert kinds.pop("extra") is peft.tuners.lora.Linear and len(kinds) == 14
        assert set(kinds.values()) == {lowbit.peft.LoraLinear} and isinstance(model.lm_head, lowbit.nn.Linear)
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    with torch.no_grad():
        expected = adapted(checkpoints.TOKENS).logits
    adapted.save_pretrained(tmp_path)
    fresh = packed_model("untied")
    fresh.extra = torch.nn.Linear(4, 4)
    with torch.no_grad():
        assert torch.equal(peft.PeftModel.from_pretrained(fresh, tmp_path)(checkpoints.TOKENS).logits, expected)


def test_merging_is_refused():
    model = peft.get_peft_model(packed_model(), config())
    for merge in (model.merge_and_unload, model.merge_adapter, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(ValueError, match="adapters cannot be merged into packed weights: rounding to . bits would"):
            merge()


def test_refusals():
    with pytest.raises(TypeError, match="config is a dict; expected a peft.LoraConfig"):
        lowbit.peft.for_packed_layers({})
    with pytest.raises(TypeError, match="config is a AdaLoraConfig; expected a peft.LoraConfig"):
        lowbit.peft.for_packed_layers(peft.AdaLoraConfig(total_step=10))
    with pytest.raises(ValueError, match="use_dora=True; expected False"):
        config(use_dora=True)
    with pytest.raises(ValueError, match="use_qalora=True; expected False"):
        config(use_qalora=True)
    with pytest.raises(ValueError, match="use_dora=True; expected False"):
        peft.get_peft_model(packed_model(), peft.LoraConfig(target_modules=TARGETS, use_dora=True))
    for start in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"init_lora_weights is '{start}'; expected True, False"):
            peft.get_peft_model(packed_model(), config(init_lora_weights=start))


def test_transformers_trainer_trains_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    packed_model().save_pretrained(tmp_path / "packed")
    data = [{"input_ids": row, "labels": row} for row in checkpoints.TOKENS]
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=2, report_to=[], save_strategy="no", use_cpu=True)
    model = peft.get_peft_model(checkpoints.load(tmp_path / "packed"), config())
    trainer = Trainer(model, arguments, train_dataset=data)
    assert trainer.train().global_step == 2
    # Without adapters no parameter can be trained.
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(checkpoints.load(tmp_path / "packed"), arguments, train_dataset=data)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradient_checkpointing_of_prepare_model_for_kbit_training(reentrant):
    """peft has a list of quantization methods that get gradient checkpointing."""
    plain = peft.get_peft_model(packed_model("untied"), config(init_lora_weights=False))
    model = packed_model("untied")
    options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    prepared = peft.prepare_model_for_kbit_training(model, **options)
    assert prepared is model and model.is_gradient_checkpointing and not hasattr(model, "is_loaded_in_4bit")
    model = peft.get_peft_model(model, config(init_lora_weights=False))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        each.train()(checkpoints.TOKENS, labels=checkpoints.TOKENS).loss.backward()
    grads = [[value.grad for value in each.parameters() if value.requires_grad] for each in (plain, model)]
    assert len(grads[0]) > 0
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
    without = peft.prepare_model_for_kbit_training(packed_model("untied"), use_gradient_checkpointing=False)
    assert not without.is_gradient_checkpointing
    float_model = peft.prepare_model_for_kbit_training(checkpoints.make_model("untied"))
    assert not float_model.is_gradient_checkpointing  # as peft has it


def test_quantizing_a_model_with_adapters():
    """Quantizes float layers that already have adapters."""
    model = peft.get_peft_model(checkpoints.make_model("untied"), peft.LoraConfig(r=4, target_modules=TARGETS))
    for change in (lowbit.quantize_, lowbit.qat.prepare_):
        with pytest.raises(ValueError, match="q_proj.lora_A.default is an adapter of peft, which could no longer be trained"):
            change(model, LinearConfig(4, 32))
    lowbit.quantize_(model, {"*.base_layer": LinearConfig(4, 32)})
    model(checkpoints.TOKENS, labels=checkpoints.TOKENS).loss.backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    assert len(trained) == 8 and all(value.grad is not None for value in trained)
    with pytest.raises(RuntimeError, match="the weight of a packed layer cannot be changed"):
        model.merge_and_unload()


def test_a_fully_trained_layer_is_not_lost(tmp_path):
    """An adapter with its own head, from a float model."""
    model = peft.get_peft_model(checkpoints.make_model("untied"), peft.LoraConfig(r=4, target_modules=TARGETS))
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    read = lowbit.peft.for_packed_layers(peft.PeftConfig.from_pretrained(tmp_path))
    with pytest.raises(RuntimeError, match="lm_head.weight: it is a float weight, and the layer is packed"):
        peft.PeftModel.from_pretrained(packed_model("untied"), tmp_path, config=read)
