"""Models of images and text: tokens compared with transformers' generation, conversations, and refusals."""

import io
import json
import shutil
import sys

import lowbit
import numpy
import pytest
import torch
from command_line import FLOAT, document, documented_keys, error, invoke, keys_in
from image_models import FAMILIES, PIL, lfm2_vl_inputs, save_image, save_image_model
from lowbit import llm
from lowbit.llm.batch import Batch
from lowbit.llm.generation import Text
from lowbit.llm.image_decoder import ImageDecoder, ImagePrompt
from lowbit.llm.images import ImageStep, as_image, message
from lowbit.llm.loading import load_image_model, load_image_processor
from needs import need_packages

transformers = pytest.importorskip("transformers")

CONFIG = lowbit.LowBitConfig(bits=4, conv_bits=8)
NEW = 10
REFUSALS = {"gemma3": "its language model gets a mask of its own"}
PLANNED = ("gemma4", "idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Packed checkpoints by family, each made once, and three images."""
    root, made = tmp_path_factory.mktemp("images"), {}
    for number, size in enumerate([(40, 30), (64, 64), (17, 50)]):
        save_image(root / f"{number}.png", number, size)

    def of(kind):
        if kind == "smolvlm":
            need_packages("num2words")
        if kind not in made:
            save_image_model(kind, root / kind / "float")
            lowbit.quantize_checkpoint(root / kind / "float", root / kind / "packed", CONFIG)
            made[kind] = root / kind / "packed"
        return made[kind], root

    return of


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_calibration_with_images_improves_the_tower_too(packed, kind):
    _, root = packed(kind)
    path, texts = root / kind / "float", ["What is this?", "And what color?", "Name three things that you see here."] * 4
    samples = llm.image_samples(path, [(text, [root / f"{number % 3}.png"]) for number, text in enumerate(texts)])
    floats, config = load_image_model(path), lowbit.LowBitConfig(bits=3)
    calibrated, nearest = load_image_model(path), load_image_model(path)
    methods = lowbit.calibrate(calibrated, samples, config).methods
    lowbit.quantize_(nearest, {"*": lowbit.LinearConfig(3)})
    tower = {name: method for name, method in methods.items() if "vis" in name}
    assert len(tower) >= 8 and "gptq" in tower.values()
    (text, image), (held_out,) = ("Is it a cat?", root / "1.png"), llm.image_samples(path, [("Is it a cat?", [root / "1.png"])])
    assert held_out["pixel_values"].equal(llm.image_samples(path, [(text, [PIL.Image.open(image)])])[0]["pixel_values"])
    with torch.inference_mode():
        expected = floats(**held_out).logits
        errors = [(model(**held_out).logits - expected).square().mean().item() for model in (calibrated, nearest)]
    assert errors[0] < 0.8 * errors[1], errors


def generated(path, messages):
    """The tokens of transformers' greedy generation, and of the prompt."""
    processor = load_image_processor(path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    count = inputs["input_ids"].shape[1]
    tokens = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, count:].tolist()
    return tokens[:-1] if tokens[-1] == 256 else tokens, count


def shown(root, *numbers):
    return [PIL.Image.open(root / f"{number}.png").convert("RGB") for number in numbers]


def test_a_message_with_the_text_of_a_control_token_is_refused(packed):
    path, root = packed("gemma3")
    processor, image = load_image_processor(path), shown(root, 0)
    template = llm.images.image_template(processor, path)
    for text in ("a <eos> b", "<eos>"):
        with pytest.raises(ValueError, match="has the text of a control token of the model; lowbit does not support this"):
            llm.images.inputs_of(processor, [message("user", text, image)], template)
    for text in ("a <b> c <", "os>"):  # text that only begins or ends like a control token
        messages = [message("user", text, image)]
        expected = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert llm.images.inputs_of(processor, messages, template)["input_ids"].equal(expected["input_ids"])


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_the_tokens_are_those_of_transformers(packed, kind):
    path, root = packed(kind)
    chat = llm.load_image_chat(path, max_new_tokens=NEW)
    convs = [layer for layer in chat.model.modules() if isinstance(layer, lowbit.nn.Conv)]
    # The patch embedding; that of Gemma 4 is a linear layer.
    assert [layer.info.bits for layer in convs] == ([] if kind == "gemma4" else [8])
    if kind in PLANNED:  # a plan sums attention in another order, which rounds activations of packed layers differently
        path = path.parent / "float"
        chat = llm.load_image_chat(path, max_new_tokens=NEW)
    answers, step = {}, chat.step
    assert step.plan_refusal == REFUSALS.get(kind)
    for numbers in ((0,), (1,), (0, 2), ()):
        chat.reset(None)
        answer = chat.answer("What?", images=[root / f"{number}.png" for number in numbers])
        expected, count = generated(path, [message("user", "What?", shown(root, *numbers))])
        assert (answer.tokens, answer.prompt_tokens) == (expected, count)
        answers[numbers] = tuple(answer.tokens)
    assert len(set(answers.values())) == 4  # the images matter
    # Another turn with another image, and one without an image.
    chat.reset("Be brief.")
    first = chat.answer("What?", images=shown(root, 0))
    second = chat.answer("And this?", images=[root / "1.png"])
    third = chat.answer("Why?")
    talk = [message("system", "Be brief."), message("user", "What?", shown(root, 0)), message("assistant", first.text)]
    talk.append(message("user", "And this?", shown(root, 1)))
    assert (second.tokens, second.prompt_tokens) == generated(path, talk)
    talk += [message("assistant", second.text), message("user", "Why?")]
    assert (third.tokens, third.prompt_tokens) == generated(path, talk)
    if kind in PLANNED:
        assert step.plan_refusal is step.refusal is None
        assert step.computed == 3  # each of the images once, in all conversations
        assert (step._decoder._tower.calls > 0) == (kind in ("idefics3", "smolvlm"))  # its images have one size
    else:
        assert step.refusal == f"the language model runs by transformers' attention: {step.plan_refusal}"


@pytest.mark.parametrize("kind", ["qwen3_vl", "idefics3", "gemma4"])
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_plans(packed, kind):
    """Calls of any sizes, texts that begin again, and a model that changes; at 4 bits."""
    path, root = packed(kind)
    model, processor = load_image_model(path), load_image_processor(path)
    template = llm.images.image_template(processor, path)
    inputs = llm.images.inputs_of(processor, [message("user", "What is it? " * 30, shown(root, 0, 1))], template)
    with torch.inference_mode():
        own = model(**inputs, use_cache=False).logits[0, -1]
    step = ImageStep(model, 1024)
    ids, start = step.look(inputs), torch.tensor([0])
    assert len(ids) > 256 and step.plan_refusal is None  # more than one piece
    first = step(torch.tensor([ids]), start)
    assert (first[0] - own).square().mean().sqrt() < 0.05 * own.std()
    one = [step(torch.tensor([[token]]), torch.tensor([len(ids) + i])) for i, token in enumerate((5, 6, 7))]
    rows, run = [], step._plan._run
    step._plan._run = lambda inputs, *rest: rows.append(inputs.embeddings.shape[1]) or run(inputs, *rest)
    step.look(inputs)
    assert torch.equal(step(torch.tensor([[*ids, 5, 6, 7]]), start), one[2])  # a text that begins with an answer
    assert rows == [1, 3]  # the same beginning is not computed again
    more = {**inputs, "input_ids": torch.tensor([[*ids, 5, 6, 8, 9]])}
    if "mm_token_type_ids" in more:
        more["mm_token_type_ids"] = torch.nn.functional.pad(more["mm_token_type_ids"], (0, 4))
    more["attention_mask"] = torch.ones_like(more["input_ids"])
    found, fresh = step(torch.tensor([step.look(more)]), start), ImageStep(model, 1024)
    assert rows[2:] == [2] and torch.equal(found, fresh(torch.tensor([fresh.look(more)]), start))
    step.look(inputs)
    step(torch.tensor([ids]), start)
    rows.clear()
    other = llm.images.inputs_of(processor, [message("user", "What is it? " * 30, shown(root, 1, 0))], template)
    step(torch.tensor([step.look(other)]), start)
    assert sum(rows) > len(ids) - 20  # other images
    step.look(inputs)
    assert torch.equal(step(torch.tensor([[*ids, 5, 6, 7]]), start), one[2])
    assert torch.equal(step(torch.tensor([[6, 7]]), torch.tensor([len(ids) + 1])), one[2])  # cut back
    assert step.plan_refusal is None
    with torch.no_grad():  # transformers' own code still runs the model
        assert torch.equal(model(**inputs, use_cache=False).logits[0, -1], own)
        model.lm_head.packed_weight.view(-1)[-1:].mul_(1)
    step.look(inputs)
    step(torch.tensor([ids]), start)
    assert "has been changed" in step.plan_refusal


def test_lfm2_vl_has_the_logits_of_transformers(tmp_path):
    """By a plan with states, with its images computed one by one, as the server does; inputs are made by hand."""
    save_image_model("lfm2_vl", tmp_path)
    model = load_image_model(tmp_path)
    inputs = lfm2_vl_inputs(1, [(4, 4), (2, 6)])
    with torch.inference_mode():
        own = model(**inputs, use_cache=False).logits[0, -1]
        other = model(**lfm2_vl_inputs(2, [(4, 4), (2, 6)]), use_cache=False).logits[0, -1]
    step = ImageStep(model, 128)
    logits = step(torch.tensor([step.look(inputs)]), torch.tensor([0]))[0]
    assert step.plan_refusal is None and (other - own).abs().max() > 1e-2  # the images matter
    assert (logits - own).abs().max() < 1e-5 * own.abs().max()
    decoder, plain = ImageDecoder(model, 128), inputs["input_ids"][0].tolist()
    images = []
    for number, (rows, columns) in enumerate([(4, 4), (2, 6)]):
        count = rows * columns
        alone = {name: value[number : number + 1, :count] for name, value in inputs.items() if name.startswith("pixel")}
        alone |= {"input_ids": torch.tensor([[5] + [decoder.image_token] * (count // 4)])}
        alone |= {"spatial_shapes": inputs["spatial_shapes"][number : number + 1]}
        images.append(decoder.look(bytes([number]) * 16, alone))
    prompt = ImagePrompt(plain, images, decoder.image_token)
    caches = [decoder.new_caches(64) for _ in range(3)]
    with torch.inference_mode():
        (together,) = decoder.run_texts([(caches[0], prompt)])
        decoder.run_texts([(caches[1], prompt[:7])])  # ends within an image
        pieces, again = decoder.run_texts([(caches[1], prompt[7:]), (caches[2], prompt)])
    for found in (together, pieces, again):
        assert (found - own).abs().max() < 1e-5 * own.abs().max()


@pytest.mark.parametrize("window", [3, 6, 512])
@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_tokens_of_an_image_see_each_other(packed, tmp_path, window):
    """Gemma 3 in batches: with windows shorter and longer than an image, in calls that end within one, and from prefixes."""
    _, root = packed("gemma3")
    shutil.copytree(root / "gemma3" / "float", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["text_config"] |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model, processor = load_image_model(tmp_path / "model"), load_image_processor(tmp_path / "model")
    template, images = llm.images.image_template(processor, tmp_path / "model"), shown(root, 0, 1)
    inputs = llm.images.inputs_of(processor, [message("user", "What?", images), message("user", "And", images[:1])], template)
    causal = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    with torch.inference_mode():
        own, without = (model(**each, use_cache=False).logits[0] for each in (inputs, causal))
    assert (own - without)[-1].abs().max() > 1e-3  # it matters
    decoder = ImageDecoder(model, 128)
    alone = [llm.images.inputs_of(processor, [message("user", "?", [image])], template) for image in images]
    images = [decoder.look(bytes([number]) * 16, each) for number, each in enumerate(alone)]
    prompt = ImagePrompt(inputs["input_ids"][0].tolist(), [*images, images[0]], decoder.image_token)
    first = prompt.index(images[0].first)
    for count in range(1, len(prompt)):
        whole = decoder.whole(prompt, count)
        assert whole == (first + 4 if first < count < first + 4 else whole) and whole >= count
    cut, end = decoder.whole(prompt, first + 2), len(prompt) - 3
    caches = [decoder.new_caches(128) for _ in range(3)]
    with torch.inference_mode():
        everywhere = decoder.run_texts([(caches[0], prompt[:cut]), (caches[1], [1, 2, 3])], everywhere=True)[0]
        later = decoder.run_texts([(caches[0], prompt[cut:])], everywhere=True)[0]
        caches[2].copy_from(caches[0], end)
        copied = decoder.run_texts([(caches[2], prompt[end:]), (caches[1], prompt[:5])])[0]
    limit = 1e-5 * own.abs().max()
    assert (torch.cat([everywhere, later]) - own).abs().max() < limit and (copied - own[-1]).abs().max() < limit
    batch = Batch(decoder, rows=first + 2)  # an image does not fit in the rest of the first call
    results = []
    for _ in range(2):
        batch.add(Text(prompt, 4, on_end=results.append))
        batch.add(Text(ImagePrompt([5, 6, 7], [], decoder.image_token), 4, on_end=results.append))
    while batch.step():
        pass
    tokens = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model").generate(
        **inputs, max_new_tokens=4, do_sample=False
    )  # fmt: skip
    expected = tokens[0, len(prompt) :].tolist()
    assert [result.tokens for result in results if result.prompt_tokens > 3] == [expected] * 2


def test_images_of_a_decoder(packed):
    """What keeps, finds and refuses numbers of tokens."""
    path, root = packed("qwen2_5_vl")
    model, processor = load_image_model(path.parent / "float"), load_image_processor(path)
    template, images = llm.images.image_template(processor, path), shown(root, 0, 1)
    decoder = ImageDecoder(model, 256)
    alone = [llm.images.inputs_of(processor, [message("user", "?", [image])], template) for image in images]
    first, second = (decoder.look(bytes([number]) * 16, inputs) for number, inputs in enumerate(alone))
    assert decoder.look(bytes(16), alone[1]) is first and decoder.computed == 2  # by its digest only
    token = decoder.image_token
    prompt = ImagePrompt([1, *[token] * len(first), 2], [first], token)
    assert prompt.plain == [1, *[token] * len(first), 2] and len(set(prompt)) == len(prompt)
    assert all(map(decoder.takes, prompt)) and not decoder.takes(first.first + len(first)) and not decoder.takes(-1)
    with pytest.raises(ValueError, match=rf"places for {len(first)} tokens of images; expected {len(first) + len(second)}"):
        ImagePrompt(prompt.plain, [first, second], token)
    with pytest.raises(ValueError, match="the digest has 3 bytes; expected 16 or more"):
        decoder.look(b"abc", alone[0])
    number = second.first
    del second
    decoder._kept.clear()
    assert not decoder.takes(number) and decoder.takes(first.first)  # a prompt keeps its images
    with pytest.raises(ValueError, match="there is no token"):
        decoder.run_texts([(decoder.new_caches(64), [1, number])])
    with pytest.raises(ValueError, match="a prefix cache on disk does not keep texts with images"):
        decoder.prefix_key()
    assert decoder.image(bytes([1]) * 16) is None and decoder.image(bytes(16)) is first


@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_quantizing_while_loading(packed):
    path, root = packed("idefics3")
    chat = llm.load_image_chat(path.parent / "float", CONFIG, max_new_tokens=NEW)
    assert (
        chat.answer("What?", images=[root / "0.png"]).tokens == generated(path, [message("user", "What?", shown(root, 0))])[0]
    )


@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_commands(packed):
    path, root = packed("qwen2_5_vl")
    path = path.parent / "float"
    expected, count = generated(path, [message("user", "What?", shown(root, 0, 1))])
    images = ("--image", root / "0.png", "--image", root / "1.png")
    result = document(invoke("generate", path, *images, "--prompt", "What?", "--max-new-tokens", NEW, "--json"))
    assert (result["tokens"], result["prompt_tokens"]) == (expected, count)
    assert result["refusal"] is None
    assert keys_in(result) == documented_keys("generate")
    talk = document(
        invoke("chat", path, *images, "--max-new-tokens", NEW, "--json", stdin=f"What?\n/image {root / '2.png'}\nAnd?\n")
    )
    first, second = talk["turns"]
    assert (first["tokens"], first["prompt_tokens"]) == (expected, count)
    turns = [message("user", "What?", shown(root, 0, 1)), message("assistant", first["answer"])]
    assert second["tokens"] == generated(path, [*turns, message("user", "And?", shown(root, 2))])[0]
    # Without an image, with or without the template, with the placeholder of an image.
    plain = document(invoke("generate", path, "--chat", "--prompt", "What?", "--max-new-tokens", NEW, "--json"))
    assert plain["tokens"] == generated(path, [message("user", "What?")])[0]
    bare = document(invoke("generate", path, "--prompt", "What?", "--max-new-tokens", NEW, "--json"))
    assert bare["prompt_tokens"] == 5


@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float")
def test_refusals(packed, tmp_path, monkeypatch):
    path, root = packed("qwen2_5_vl")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "zero.ppm").write_bytes(b"P6 0 0 255\n")
    (tmp_path / "cut.png").write_bytes((root / "1.png").read_bytes()[:2000])

    def refused(image, *more, model=path):
        return error(invoke("generate", model, "--image", image, "--prompt", "What?", *more))

    for name, said in {
        "text.png": "is not a readable image; expected PNG, JPEG",
        "empty.png": "is not a readable image; expected PNG, JPEG",
        "zero.ppm": "is not a readable image; expected PNG, JPEG",
        "cut.png": "is a damaged image",
        "none.png": "No such file",
    }.items():
        message_of = refused(tmp_path / name)
        assert str(tmp_path / name) in message_of and said in message_of, message_of
    image = root / "0.png"
    assert "has model_type 'llama', which takes no images; expected a model of images and text" in refused(image, model=FLOAT)
    for option in (("--cache", "int8"), ("--guesses", 2), ("--expert-memory", "1GB")):
        assert f"{option[0]} requires lowbit's decoder, which sees no images; leave it out" in refused(image, *option)
    (tmp_path / "template").write_text("{{ messages[-1].content }}")
    talk = ("chat", FLOAT, "--template", tmp_path / "template")
    assert "this model takes no images" in error(invoke(*talk, stdin=f"/image {image}\n"))
    chat = llm.load_image_chat(path)
    for wrong, kind, said in (
        (PIL.Image.new("RGB", (0, 5)), ValueError, "the image has 0x5 pixels; expected at least one"),
        ([[0]], TypeError, "the image is a list; expected a path or an image of Pillow"),
    ):
        with pytest.raises(kind, match=said):
            chat.answer("What?", images=[wrong])
    assert not chat.turns and not chat.pending
    step = ImageStep(load_image_model(path), 64)
    inputs = load_image_processor(path)(text=["What?"], return_tensors="pt")
    ids = step.look(inputs)
    with pytest.raises(ValueError, match=r"the text does not begin with the prompt of look\(\)"):
        step(torch.tensor([[5, 6]]), torch.tensor([0]))
    with pytest.raises(IndexError, match="start is 3; expected at most 0"):
        step(torch.tensor([[5]]), torch.tensor([3]))
    assert step(torch.tensor([ids]), torch.tensor([0])).shape == (1, step.vocabulary)
    with pytest.raises(ValueError, match="max_length is 0; expected a positive number"):
        ImageStep(step.model, 0)
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 5\]; expected \[1, tokens\]"):
        step.look({"input_ids": torch.zeros(2, 5, dtype=torch.int64)})
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="is read by Pillow, which is not installed: pip install pillow"):
        llm.open_image(image)


def bomb(width, height, kind="PNG"):
    """A small file with many pixels."""
    file = io.BytesIO()
    PIL.Image.new("1", (width, height)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_of_images(tmp_path, kind):
    PIL.Image.new("RGB", (40, 30), (0, 255, 0)).save(tmp_path / "a.jpg", kind)  # the file name does not matter
    image = llm.open_image(tmp_path / "a.jpg")
    assert (image.size, image.mode) == ((40, 30), "RGB") and image.getpixel((5, 5))[1] > 250


def test_images_of_wide_numbers(tmp_path):
    """Pillow's own conversion would make everything above 255 white."""
    grays = numpy.array([[0, 255, 256], [32768, 65000, 65535]], numpy.uint16)
    image = PIL.Image.fromarray(grays)
    image.save(tmp_path / "gray.png")
    for given in (tmp_path / "gray.png", image):
        assert numpy.array_equal(numpy.asarray(as_image(given))[..., 2], grays // 256)
    small = PIL.Image.fromarray(numpy.array([[7, 200]], numpy.int32))
    assert [as_image(small).getpixel((x, 0)) for x in range(2)] == [(7, 7, 7), (200, 200, 200)]
    for values, message in (
        (numpy.array([[0, 1000]], numpy.int32), "mode I with values from 0 to 1000; expected 0 to 255"),
        (numpy.array([[0.0, 0.5]], numpy.float32), "mode F with values from 0 to 0.5; expected 0 to 255"),
    ):
        with pytest.raises(ValueError, match=message):
            as_image(PIL.Image.fromarray(values))


def test_images_of_pillow_are_rotated_as_files_are(tmp_path):
    image = PIL.Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 255, 255))
    image.getexif()[0x0112] = 6  # orientation
    image.save(tmp_path / "x.png", exif=image.getexif())
    with PIL.Image.open(tmp_path / "x.png") as opened:
        for given in (tmp_path / "x.png", opened):
            found = as_image(given)
            assert found.size == (2, 4) and found.getpixel((1, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "PPM", "ICO", "PDF", "TGA", "PCX", "SGI", "ICNS", "DDS", "JPEG2000"])
def test_other_formats_never_reach_their_readers(tmp_path, monkeypatch, kind):
    if kind == "EPS":  # Pillow would run Ghostscript
        data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
        from PIL import EpsImagePlugin

        monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was called"))
    else:
        file = io.BytesIO()
        PIL.Image.new("RGB", (32, 32)).save(file, kind)
        data = file.getvalue()
    (tmp_path / "x.jpg").write_bytes(data)
    with pytest.raises(ValueError, match="x.jpg is not a readable image; expected PNG, JPEG, WEBP, GIF, BMP"):
        llm.open_image(tmp_path / "x.jpg")


def test_limits_of_images(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    for size in ((8193, 8192), (12000, 9000), (20000, 20000)):  # below and above Pillow's own limits
        path.write_bytes(bomb(*size))
        monkeypatch.setattr(PIL.Image.Image, "convert", lambda *_: pytest.fail("the pixels were decoded"))
        with pytest.raises(ValueError, match=r"x.png has (\d+|too many) pixels.*; expected at most 67108864"):
            llm.open_image(path)
        monkeypatch.undo()
    with open(path, "wb") as file:
        file.truncate((128 << 20) + 1)
    with pytest.raises(ValueError, match="x.png has 134217729 bytes; expected an image of at most 134217728"):
        llm.open_image(path)


def test_damaged_images_give_one_sentence(tmp_path):
    """Changes of each byte of each format's header, and truncated files."""
    path = tmp_path / "x"
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        PIL.Image.effect_noise((17, 13), 50).convert("RGB").save(file, kind)
        data = file.getvalue()
        mutants = [data[:at] for at in range(0, len(data), 29)]
        mutants += [data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :] for at in range(0, min(len(data), 200), 2)]
        for mutant in mutants:
            path.write_bytes(mutant)
            try:
                assert llm.open_image(path).mode == "RGB"
            except ValueError as failure:
                assert str(failure).startswith(str(path)) and "\n" not in str(failure), failure


def test_the_first_frame_of_an_animation_is_decoded(tmp_path):
    frames = [PIL.Image.new("RGB", (20, 10), (number * 9 % 256, 9, 9)) for number in range(60)]
    for kind in ("GIF", "WEBP", "PNG"):
        frames[0].save(tmp_path / "x", kind, save_all=True, append_images=frames[1:])
        image = llm.open_image(tmp_path / "x")
        assert image.size == (20, 10) and max(image.getpixel((3, 3))) < 20


@pytest.mark.filterwarnings("ignore:.* of the bytes of this .* stay float", "ignore:.*:UserWarning")
def test_a_calibration_rounds_convolutions_to_nearest(packed, tmp_path):
    path, _ = packed("gemma3")
    source = path.parent / "float"
    text = "A text of some length about nothing in particular, " * 40
    _, calibration = lowbit.calibrate_checkpoint(source, tmp_path / "calibrated", CONFIG, text, "importance", window=64)
    calibrated, nearest = (load_image_model(one) for one in (tmp_path / "calibrated", path))
    in_memory = load_image_model(source)
    tokens = load_image_processor(source).tokenizer(text, return_tensors="pt")["input_ids"]
    lowbit.calibrate(in_memory, list(tokens[:, :640].split(64, dim=1)), CONFIG, "importance")
    (name,) = [name for name, layer in nearest.named_modules() if isinstance(layer, lowbit.nn.Conv)]
    assert name not in calibration.methods
    for model in (calibrated, in_memory):
        assert torch.equal(model.get_submodule(name).packed_weight, nearest.get_submodule(name).packed_weight)
    query = "model.language_model.layers.0.self_attn.q_proj"
    assert calibration.methods[query] == "importance"
    assert not torch.equal(calibrated.get_submodule(query).packed_weight, nearest.get_submodule(query).packed_weight)
