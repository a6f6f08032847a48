"""A vision tower in an mmproj GGUF file, imported with its language model: the logits of transformers, and refusals."""

import json

import gguf
import lowbit
import numpy as np
import pytest
import torch
from command_line import error, invoke
from gguf_files import tower_tensors, write_model, write_tower
from image_models import lfm2_vl_inputs, save_image, save_image_model
from lowbit import llm
from lowbit.importing import open_source
from lowbit.llm.images import inputs_of, message
from lowbit.llm.loading import load_image_model, load_image_processor

transformers = pytest.importorskip("transformers")

NAMES = {"<boi>": "<start_of_image>", "<eoi>": "<end_of_image>"}  # of Gemma, whose names the model in the files must have
SETTINGS = {"idefics3": {"vision__projector__scale_factor": 2, "vision__preproc_image_size": 64},
            "gemma3": {"vision__projector__scale_factor": 2}, "lfm2_vl": {"vision__projector__scale_factor": 2},
            "qwen2_5_vl": {"use_gelu": None, "use_silu": True, "vision__n_wa_pattern": 2, "vision__window_size": 32,
                           "vision__image_min_pixels": 1024, "vision__image_max_pixels": 4096}}  # fmt: skip
PROJECTORS = {"idefics3": "idefics3", "gemma3": "gemma3", "lfm2_vl": "lfm2", "qwen2_5_vl": "qwen2.5vl_merger"}


def text_model(model):
    """The language model of an image-text model alone, with its weights."""
    config = model.config.text_config
    config.tie_word_embeddings = model.config.tie_word_embeddings
    if config.model_type == "qwen2_5_vl_text":
        settings = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        config = transformers.Qwen2Config(**settings)
    text = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {
        name.replace("model.text_model.", "model.").replace("model.language_model.", "model."): value
        for name, value in model.state_dict().items()
    }
    missing, _ = text.load_state_dict({k: v for k, v in state.items() if k in text.state_dict()}, strict=False)
    assert not missing
    return text


def names_of(tokenizer, kind):
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    tokens[tokens.index("\u00ff")] = "QQ"  # for the only merge, because files have at least one; no text has this byte
    if kind == "gemma3":
        tokens = [{**NAMES, "<image>": "<image_soft_token>"}.get(token, token) for token in tokens]
    return tokens, [3 if number in special or number > 255 else 1 for number in range(len(tokens))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """For each family a float model of transformers, and its two files."""
    root, known = tmp_path_factory.mktemp("mmproj"), {}

    def of(kind):
        if kind not in known:
            path = root / kind
            save_image_model(kind, path / "float")
            model = load_image_model(path / "float")
            if kind == "gemma3":
                model.config.text_config.query_pre_attn_scalar = 16  # files have no other one
                for layer in model.model.language_model.layers:
                    layer.self_attn.scaling = 16**-0.5
            tokenizer = transformers.AutoTokenizer.from_pretrained(path / "float")
            tokens, types = names_of(tokenizer, kind)
            template = (path / "float" / "chat_template.jinja").read_text() if kind != "lfm2_vl" else "x"
            for old, new in NAMES.items():
                template = template.replace(old, new)
            more = {"attention__sliding_window": 32} if kind == "gemma3" else {}
            if kind == "lfm2_vl":
                more = {"shortconv__l_cache": 3}
            language = text_model(model)
            if kind == "qwen2_5_vl":
                language.config.model_type = "qwen2_5_vl_text"  # for the name of its architecture
                more = {"rope__dimension_sections": [2, 3, 3, 0]}
            write_model(path / "text.gguf", language, tokens=tokens, types=types, merges=("Q Q",), template=template, **more)
            write_tower(path / "tower.gguf", PROJECTORS[kind], model, **SETTINGS[kind])
            known[kind] = path, model
        return known[kind]

    return of


@pytest.mark.parametrize("kind", ["idefics3", "gemma3", "qwen2_5_vl"])
def test_a_model_has_the_logits_of_transformers(written, kind, tmp_path):
    path, model = written(kind)
    summary = lowbit.import_checkpoint(path / "text.gguf", tmp_path / "made", mmproj=path / "tower.gguf")
    assert {tensor.kind for tensor in summary.tensors} == {"float"} and {tensor.error for tensor in summary.tensors} == {0.0}
    made, processor = load_image_model(tmp_path / "made"), load_image_processor(tmp_path / "made")
    assert type(made) is type(model)
    images = [llm.open_image(save_image(tmp_path / f"{n}.png", n, size)) for n, size in enumerate([(40, 30), (64, 64)])]
    template = llm.images.image_template(processor, tmp_path / "made")
    inputs = inputs_of(processor, [message("user", "What is it?", images)], template)
    # The same tokens as by the processor of the model, and pixels that differ only by the colors' mean and deviation.
    own = load_image_processor(path / "float")
    own.image_processor.image_mean, own.image_processor.image_std = [0.5, 0.25, 0.48145467], [0.5, 0.5, 0.26862955]
    expected = inputs_of(own, [message("user", "What is it?", images)], llm.images.image_template(own, path))
    assert inputs.keys() == expected.keys() and all(inputs[name].equal(expected[name]) for name in inputs)
    with torch.inference_mode():
        assert torch.equal(made(**inputs).logits, model(**expected).logits)


def test_lfm2_vl_has_the_logits_of_transformers(written, tmp_path):
    path, model = written("lfm2_vl")
    lowbit.import_checkpoint(path / "text.gguf", tmp_path / "made", mmproj=path / "tower.gguf")
    made, inputs = load_image_model(tmp_path / "made"), lfm2_vl_inputs(3, [(4, 4), (2, 6)])
    with torch.inference_mode():
        assert torch.equal(made(**inputs).logits, model(**inputs).logits)
    settings = json.loads((tmp_path / "made" / "preprocessor_config.json").read_text())
    assert (settings["downsample_factor"], settings["encoder_patch_size"]) == (2, 8)
    tensors = tower_tensors(model)
    flat = tensors["v.patch_embd.weight"].reshape(64, -1)
    tower = write_tower(tmp_path / "flat.gguf", "lfm2", model, {**tensors, "v.patch_embd.weight": flat}, **SETTINGS["lfm2_vl"])
    with pytest.raises(ValueError, match=r"weight has the shape \[64, 192\]; expected \[n, colors, rows, columns\]"):
        lowbit.import_checkpoint(path / "text.gguf", tmp_path / "other", mmproj=tower)


def test_the_language_model_of_qwen2_5_vl_alone(written, tmp_path):
    path, model = written("qwen2_5_vl")
    lowbit.import_checkpoint(path / "text.gguf", tmp_path / "made")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(made(tokens).logits, model(input_ids=tokens).logits)
    assert llm.Decoder(made.eval(), 64).plan_refusal is None


def test_quantized_files_and_exchanged_names(written, tmp_path):
    """Matrices of 8 bits keep their codes, floats of 16 bits their values, and early converters swapped two names."""
    path, model = written("idefics3")
    tensors = tower_tensors(model)
    swapped = {}
    for name, array in tensors.items():
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(name.split(".")[-2])
        called = name if other is None else name.replace(name.split(".")[-2], other)
        swapped[called] = array.astype(np.float16) if array.ndim > 1 else array
    write_tower(tmp_path / "tower.gguf", "idefics3", model, swapped, **SETTINGS["idefics3"])
    tokens, types = names_of(transformers.AutoTokenizer.from_pretrained(path / "float"), "idefics3")
    template = (path / "float" / "chat_template.jinja").read_text()
    write_model(
        tmp_path / "text.gguf", text_model(model), "Q8_0", tokens=tokens, types=types, merges=("Q Q",), template=template
    )  # fmt: skip
    result = invoke("import", tmp_path / "text.gguf", tmp_path / "made", "--mmproj", tmp_path / "tower.gguf", "--json")
    assert result.exit_code == 0, result.output
    made = load_image_model(tmp_path / "made")
    for name, array in tensors.items():
        if name.startswith("v.blk.1.ffn_up"):
            part = dict(made.named_parameters())[f"model.vision_model.encoder.layers.1.mlp.fc1.{name.rsplit('.')[-1]}"]
            assert np.array_equal(part.detach().numpy(), array.astype(np.float16) if array.ndim > 1 else array)
    packed = [name for name, layer in made.named_modules() if isinstance(layer, lowbit.nn.Linear)]
    assert len(packed) >= 14 and all(".text_model." in name or name == "lm_head" for name in packed)
    chat = llm.load_image_chat(tmp_path / "made", max_new_tokens=4)
    save_image(tmp_path / "0.png")
    assert chat.answer("What?", images=[tmp_path / "0.png"]).prompt_tokens > 20 and chat.step.plan_refusal is None


def test_refusals(written, tmp_path):
    path, model = written("idefics3")
    other, _ = written("gemma3")

    def refused(tensors=None, kind="idefics3", text=path / "text.gguf", tower=None, **settings):
        made = tower or write_tower(tmp_path / "tower.gguf", kind, model, tensors, **SETTINGS["idefics3"] | settings)
        said = error(invoke("import", text, tmp_path / "made", "--mmproj", made))
        assert not (tmp_path / "made").exists()
        return said

    assert "has a projector of the type 'qwen3vl_merger'; lowbit imports idefics3, gemma3, lfm2, qwen2.5vl_merger" in refused(
        kind="qwen3vl_merger"
    )
    assert "has the architecture 'llama'; expected 'clip', a vision tower (mmproj)" in refused(tower=path / "text.gguf")
    assert f"belongs to a model of type 'llama'; {other}/text.gguf has 'gemma3_text'" in refused(text=other / "text.gguf")
    assert "has clip.use_gelu False; expected True" in refused(use_gelu=False)
    assert "has clip.has_audio_encoder True; expected False" in refused(has_audio_encoder=True)
    assert "has clip.vision.odd, which lowbit does not know" in refused(vision__odd=3)
    assert "weight', which lowbit does not know in a tower of 1 layers" in refused(vision__block_count=1)
    assert "has clip.vision.patch_size 0; expected 1 or more" in refused(vision__patch_size=0)
    assert "has clip.vision.block_count 2147483647; expected at most its " in refused(vision__block_count=2**31 - 1)
    assert "has no clip.vision.projector.scale_factor" in refused(vision__projector__scale_factor=None)
    assert "has no three finite numbers as clip.vision.image_mean" in refused(vision__image_mean=[0.5, float("nan"), 0.5])
    tensors = tower_tensors(model)
    assert "has the tensor 'v.odd.weight', which lowbit does not know in a tower of 2 layers" in refused(
        tensors | {"v.odd.weight": np.zeros(3, np.float32)}
    )
    fc = tensors["mm.model.fc.weight"]
    assert "proj.weight" in refused({**tensors, "mm.model.fc.weight": fc[:-1]})
    assert "expected [64, 256]" in refused({**tensors, "mm.model.fc.weight": fc[:-1]})
    missing = {name: array for name, array in tensors.items() if name != "v.post_ln.bias"}
    assert "model.vision_model.post_layernorm.bias" in refused(missing)
    assert f"{tmp_path}/none is not a file; expected a .gguf file" in refused(tower=tmp_path / "none")
    directory = error(invoke("import", path / "float", tmp_path / "made", "--mmproj", path / "tower.gguf"))
    assert f"{path}/float is a directory; expected a .gguf file" in directory
    data = bytearray((path / "tower.gguf").read_bytes())
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    assert "cut.gguf" in refused(tower=tmp_path / "cut.gguf")
    tokens, types = names_of(transformers.AutoTokenizer.from_pretrained(path / "float"), "idefics3")
    tokens = [token.replace("<global-img>", "<other>") for token in tokens]
    write_model(tmp_path / "text.gguf", text_model(model), tokens=tokens, types=types, merges=("Q Q",))
    assert "has no token '<global-img>', which" in refused(text=tmp_path / "text.gguf")
    assert gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ] == "clip"  # the name that the package writes


ODD = [True, "", "\x1b[2J", 0, 1, 33, 2**31 - 1, -1.5, float("nan"), ["a"], [0] * 3, [1e38] * 3]


def test_keys_of_other_kinds_and_sizes(written, tmp_path):
    """Each key of a tower's file: a clear error, or a description of a model."""
    path, model = written("idefics3")
    keys = [
        "has_vision_encoder", "projector_type", "use_gelu", "vision__embedding_length", "vision__feed_forward_length",
        "vision__block_count", "vision__attention__head_count", "vision__attention__layer_norm_epsilon", "vision__patch_size",
        "vision__image_size", "vision__image_mean", "vision__image_std", "vision__projector__scale_factor",
        "vision__preproc_image_size",
    ]  # fmt: skip
    accepted, tensors = [], tower_tensors(model)
    for key in keys:
        for odd in ODD:
            tower = write_tower(tmp_path / "odd.gguf", "idefics3", model, tensors, **SETTINGS["idefics3"] | {key: odd})
            try:
                open_source(path / "text.gguf", mmproj=tower)
                accepted.append((key, odd))
            except (ValueError, OSError) as error:
                assert str(error).isprintable() and str(tower) in str(error), (key, odd, error)
    assert 10 < len(accepted) < 40
    # Sizes that differ from the tensors' are found at the latest when the model is built.
    for key, odd in [("vision__attention__head_count", 33), ("vision__embedding_length", 2**31 - 1), ("vision__patch_size", 1)]:
        assert (key, odd) in accepted
        tower = write_tower(tmp_path / "odd.gguf", "idefics3", model, tensors, **SETTINGS["idefics3"] | {key: odd})
        with pytest.raises(ValueError) as raised:
            lowbit.import_checkpoint(path / "text.gguf", tmp_path / "made", mmproj=tower)
        assert str(raised.value).isprintable() and not (tmp_path / "made").exists()
