"""--images as users type it: a folder, an array, a tower of two; and the one line that hostile or
wrong files get.
"""

import os
import struct
import zlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from ctrans.interop import from_transformers
from ctrans.interop.families import small_model
from ctrans.interop.image_inputs import images_for
from solvers import ConfigError
from tests.cli.test_commands import run, strict
from tests.helpers import learned

FEW = ["--batch", "2", "--json", "-"]
COMMANDS = {
    "simulate": ["--no-reference"],
    "hjb-check": [],
    "control": [],
    "diagnose": [],
    "screen": ["--quick", "--batch", "1"],
}


def png(width, height):
    """A file that says it is that large, and holds nothing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(header, zlib.crc32(header)), (b"IEND", zlib.crc32(b"IEND"))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", s) for c, s in chunks
    )


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    learned(small_model("vit"), 0.1).save_pretrained(root / "vit")
    learned(small_model("llama"), 0.1).save_pretrained(root / "llama")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    text = {**sizes, "vocab_size": 300, "max_position_embeddings": 16, "eos_token_id": 2}
    clip = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    learned(transformers.CLIPModel(clip).eval(), 0.1).save_pretrained(root / "clip")
    whisper = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, decoder_layers=1, decoder_attention_heads=4,
        decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=6, max_target_positions=8, vocab_size=31, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    learned(transformers.WhisperForConditionalGeneration(whisper).eval(), 0.1).save_pretrained(
        root / "whisper"
    )
    draw = np.random.default_rng(0)
    (root / "folder").mkdir()
    for i in range(4):
        Image.fromarray(draw.integers(0, 255, (20, 12, 3), dtype=np.uint8)).save(
            root / "folder" / f"{i}.png"
        )
    np.save(root / "floats.npy", draw.standard_normal((4, 3, 8, 8)))
    np.save(root / "bytes.npy", draw.integers(0, 255, (4, 3, 8, 8), dtype=np.uint8))
    np.save(root / "sounds.npy", draw.standard_normal((4, 8, 12)))
    np.save(root / "wide.npy", np.zeros((4, 3, 9, 9), dtype=np.float32))
    np.save(root / "nan.npy", np.full((4, 3, 8, 8), np.nan))
    np.save(root / "objects.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    np.save(root / "words.npy", np.array([["a"], ["b"]]))
    data = (root / "floats.npy").read_bytes()
    (root / "cut.npy").write_bytes(data[: len(data) // 2])
    (root / "text.npy").write_text("no array")
    (root / "empty").mkdir()
    for name, content in {
        "bomb": png(60_000, 60_000),
        "hollow": png(8, 8),
        "none": b"no image",
    }.items():
        (root / name).mkdir()
        for i in range(2):
            (root / name / f"{i}.png").write_bytes(content)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "0.png")
    os.mkfifo(root / "pipe" / "1.png")
    return root


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_looks_at_a_vit_on_a_folder_of_images(name, there):
    args = ["--model", there / "vit", "--images", there / "folder", *FEW, *COMMANDS[name]]
    result = run(name, *args)
    assert result.exit_code == 0, result.output
    model = strict(result.stdout)["model"]
    assert model["described"].startswith("ViTForImageClassification")
    assert model["tokens"] == 5


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "images", "tokens"), [
    ("vit", "floats.npy", 5), ("vit", "bytes.npy", 5), ("clip", "floats.npy", 5), ("whisper", "sounds.npy", 6),
])  # fmt: skip
def test_arrays_towers_and_audio_are_read(model, images, tokens, there):
    result = run(
        "simulate", "--model", there / model, "--images", there / images, "--no-reference", *FEW
    )
    assert result.exit_code == 0, result.output
    assert strict(result.stdout)["model"]["tokens"] == tokens


def test_without_images_the_tower_of_texts_is_looked_at(there):
    result = run(
        "simulate",
        "--model",
        there / "clip",
        "--text",
        "abc" * 20,
        "--context",
        "8",
        "--no-reference",
        *FEW,
    )
    assert strict(result.stdout)["model"]["described"].startswith("CLIPText")


def test_what_is_simulated_is_the_models_own_state_of_those_images(there):
    result = run(
        "simulate",
        "--model",
        there / "vit",
        "--images",
        there / "floats.npy",
        "--no-reference",
        *FEW,
    )
    found = strict(result.stdout)["placements"]["pre"]["mean_abs"]
    imported = from_transformers(there / "vit", dtype=torch.float64)
    x = torch.from_numpy(np.load(there / "floats.npy"))[[0, 2]]
    with torch.no_grad():
        states = imported.trajectory(x).states
    assert np.allclose(found, [float(state.abs().mean()) for state in states], rtol=1e-9)


def test_bytes_are_shifted_and_scaled_as_the_directory_says(there, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0]}'
    )
    x = images_for(there / "bytes.npy", (3, 8, 8), torch.float64, tmp_path).batch(4)
    own = np.load(there / "bytes.npy") / 255
    expected = (own - np.array([0.1, 0.2, 0.3]).reshape(3, 1, 1)) / np.array(
        [0.5, 0.25, 1.0]
    ).reshape(3, 1, 1)
    assert np.allclose(x.numpy(), expected)


@pytest.mark.parametrize("name", ["image_mean", "image_std"])
@pytest.mark.parametrize("value", ["1" * 401, "NaN", "true", "[0.5, 0.5]", '["a", 1, 1]', "1e300"])
def test_settings_that_no_channel_can_have_are_named(name, value, there, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(f'{{"{name}": {value}}}')
    with pytest.raises(
        ConfigError, match=f"preprocessor_config.json.*({name}.*give 3 finite numbers|NaN)"
    ):
        images_for(there / "bytes.npy", (3, 8, 8), torch.float64, tmp_path)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "count"), [("simulate", 4), ("screen", 2)])
def test_as_many_images_are_read_as_a_small_folder_has(name, count, there):
    args = COMMANDS[name][:1]
    result = run(name, there / "vit", "--images", there / "folder", "--json", "-", *args)
    assert result.exit_code == 0, result.output
    assert (
        strict(result.stdout)["model"]["sequences"] == count
    )  # the default is 4, and a screening holds as many beside


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "vit"], "reads no text: give --images PATH"),
        (["--images", "folder"], "--images is for a model of images, and peri reads token ids"),
        (["--model", "llama", "--images", "folder"], "reads token ids: leave it out"),
        (["--model", "vit", "--images", "folder", "--text", "a"], "--images and --text are given"),
        (
            ["--model", "vit", "--images", "folder", "--batch", "9"],
            "holds 4 images, and 9 are wanted: give more, or lower --batch to 4",
        ),
        (["--model", "vit", "--images", "absent"], "cannot read"),
        (["--model", "vit", "--images", "empty"], "has no images: give files that end in .png"),
        (["--model", "vit", "--images", "none"], "is no complete image"),
        (["--model", "vit", "--images", "hollow"], "is no complete image"),
        (["--model", "vit", "--images", "bomb"], "0.png' is"),
        (["--model", "vit", "--images", "pipe"], "it is a pipe"),
        (
            ["--model", "vit", "--images", "wide.npy"],
            "has shape (4, 3, 9, 9), but the model reads (count, 3, 8, 8)",
        ),
        (["--model", "vit", "--images", "nan.npy"], "not finite"),
        (["--model", "vit", "--images", "objects.npy"], "is no array of numpy.save"),
        (["--model", "vit", "--images", "words.npy"], "give bytes (uint8) or floats"),
        (["--model", "vit", "--images", "cut.npy"], "is no array of numpy.save"),
        (["--model", "vit", "--images", "text.npy"], "is no array of numpy.save"),
        (
            ["--model", "whisper", "--images", "folder"],
            "the model reads arrays (8, 12) and not images",
        ),
    ],
)
def test_wrong_and_hostile_files_get_a_line(args, words, there):
    resolved = [
        there / each if i and args[i - 1] in ("--model", "--images") else each
        for i, each in enumerate(args)
    ]
    result = run("simulate", "--no-reference", *FEW, *resolved)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split()), result.stderr
    assert "Traceback" not in result.output
