"""A Whisper model in ExecuTorch and AOTInductor gives the logits and tokens of eager.

lowbit's operators have the same bits everywhere. The code between them is XNNPACK's or AOTInductor's, whose last bits may
differ and can move an activation to the next int8 value.
"""

import copy

import lowbit
import pytest
import torch
from lowbit.llm.loading import load_speech_model
from lowbit.speech import SpeechDecoder, export_speech, load_speech
from speech_models import POSITIONS, tiny_whisper

pytestmark = [
    pytest.mark.more,
    *(
        pytest.mark.filterwarnings("ignore:" + what)
        for what in (":DeprecationWarning", ":FutureWarning", "This API is experimental", "Mutation on a buffer")
    ),
]

ROUNDING = 0.2  # relative to the spread of the logits; measured: 0.05
# The same for most calls: convolutions (and in a .pt2 norms) are those of other libraries, whose last bits round a few
# activations to other values. Measured: 0.02 and 0.04.
MOST = 0.08


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("speech") / "model"
    tiny_whisper(directory)
    return SpeechDecoder(load_speech_model(directory, lowbit.LowBitConfig(bits=4, group_size=32)))


@pytest.mark.parametrize("kind", ["pte", "pt2"])
def test_exported(executorch, decoder, tmp_path, kind):
    encoder_path, decoder_path = tmp_path / f"encoder.{kind}", tmp_path / f"decoder.{kind}"
    weights = sum(tensor.nbytes for tensor in decoder.model.model.decoder.state_dict().values())
    caches = sum(tensor.nbytes for name, tensor in decoder.named_buffers() if "_cache_" in name and "." not in name)
    export_speech(decoder, encoder_path, decoder_path)
    if kind == "pte":  # the weights once, and no caches
        assert weights < decoder_path.stat().st_size < weights + caches // 2 + 200_000
    exported = load_speech(encoder_path, decoder_path)
    assert (exported.max_length, exported.vocabulary, exported.positions) == (32, decoder.vocabulary, POSITIONS)
    with pytest.raises(RuntimeError, match="has no audio"):
        exported(torch.tensor([[1]]), torch.tensor([0]))
    differences, spread = [], 0.0
    for _ in range(3):
        features = torch.randn(1, 16, 2 * POSITIONS)
        for model in (decoder, exported):
            model.listen(features)
        tokens, start = torch.randint(0, 250, (1, 4)), 0
        for _ in range(8):
            expected, logits = (model(tokens, torch.tensor([start])) for model in (decoder, exported))
            differences.append(float((expected - logits).abs().max()))
            spread = float(expected.std())
            start += tokens.shape[1]
            tokens = expected.argmax(-1, keepdim=True)
    assert max(differences) < ROUNDING * spread
    assert sorted(differences)[len(differences) // 2] < MOST * spread
    with pytest.raises(IndexError, match="max_length of 32"):
        exported(torch.zeros(1, 33, dtype=torch.int64), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"features is \[1, 16, 99\]; expected \[1, 16, 100\]"):
        exported.listen(torch.zeros(1, 16, 99))


def test_bad_files(executorch, decoder, tmp_path):
    with pytest.raises(ValueError, match=r"expected names that end in .pte, or both in .pt2"):
        export_speech(decoder, tmp_path / "a.pte", tmp_path / "b.pt2")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_speech(tmp_path / "a.pte", tmp_path / "b.pte")
    for kind in ("pte", "pt2"):
        file = tmp_path / f"x.{kind}"
        file.write_bytes(b"nothing")
        with pytest.raises(ValueError, match=r"is not what lowbit.speech.export_speech writes"):
            load_speech(file, file)
    changed = copy.deepcopy(decoder)  # stays whole when an export fails
    with pytest.raises(OSError, match="No such file|missing"):
        export_speech(changed, tmp_path / "missing/a.pte", tmp_path / "missing/b.pte")
    assert type(changed.model.model.encoder) is type(decoder.model.model.encoder)
