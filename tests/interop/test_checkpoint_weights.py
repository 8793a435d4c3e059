"""Weights without a model: codes become numbers or are refused by name, and every layout of files
is found.
"""

import inspect
import itertools
import json
import os

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModel

from ctrans.examine.diagnosis.weights_only import weight_diagnosis
from ctrans.interop.checkpoint_weights import checkpoint_weights, read_checkpoint
from ctrans.interop.weight_names import GAIN
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import sums
from solvers import ConfigError


def stored(directory, weights, **config):
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return checkpoint_weights(directory)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_blocks_of_fp8_are_multiplied_by_their_scales_entry_by_entry(kind, tmp_path):
    codes, scales = torch.randn(200, 300).to(kind), torch.rand(2, 3) + 0.5
    found = stored(
        tmp_path,
        {"layers.0.up.weight": codes, "layers.0.up.weight_scale_inv": scales, "b": torch.ones(2)},
    )
    assert found.keys() == {"layers.0.up.weight", "b"}
    numbers = found["layers.0.up.weight"]()
    for i, j in ((0, 0), (127, 128), (128, 127), (199, 299), (5, 256)):
        assert numbers[i, j] == codes[i, j].float() * scales[i // 128, j // 128]


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1), (6, 2)])
def test_scales_of_a_tensor_of_rows_and_of_groups(shape, tmp_path):
    codes, scales = torch.randint(-127, 128, (6, 8), dtype=torch.int8), torch.rand(shape) + 0.5
    numbers = stored(tmp_path, {"a.weight": codes, "a.weight_scale": scales})["a.weight"]()
    for i in range(6):
        for j in range(8):
            scale = (
                scales.reshape(-1)[0]
                if scales.numel() == 1
                else scales.reshape(6, -1)[i, j // (8 * 6 // scales.numel())]
            )
            assert numbers[i, j] == codes[i, j] * scale


@pytest.mark.parametrize(
    "shape", [(2,), (2, 1), (2, 1, 1), (2, 4), (2, 4, 1), (2, 1, 8), (2, 4, 2)]
)
def test_scales_of_experts_their_rows_columns_and_groups(shape, tmp_path):
    codes = torch.randn(2, 4, 8).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) + 0.5
    weights = {"mlp.experts.up": codes, "mlp.experts.up_scale": scales}
    numbers = stored(tmp_path, weights)["mlp.experts.up"]()
    sizes = (*shape, 1, 1)[:3]
    for place in itertools.product(range(2), range(4), range(8)):
        spot = tuple(i * size // n for i, size, n in zip(place, sizes, (2, 4, 8), strict=True))
        assert numbers[place] == codes[place].float() * scales.reshape(sizes)[spot]


def test_blocks_of_experts_are_multiplied_entry_by_entry(tmp_path):
    codes = torch.randn(2, 130, 260).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 3) + 0.5
    weights = {"experts.up": codes, "experts.up_scale_inv": scales}
    numbers = stored(tmp_path, weights)["experts.up"]()
    for e, i, j in ((0, 0, 0), (1, 127, 128), (0, 128, 127), (1, 129, 259), (1, 5, 256)):
        assert numbers[e, i, j] == codes[e, i, j].float() * scales[e, i // 128, j // 128]


@pytest.mark.parametrize(
    ("shape", "scales"), [((4,), (4,)), ((0, 4), (0,)), ((0, 4), (0, 1)), ((4, 0), (4,)), ((), ())]
)
def test_scales_of_weights_without_rows_or_numbers(shape, scales, tmp_path):
    weights = {
        "a.weight": torch.full(shape, 2.0).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.full(scales, 3.0),
    }
    numbers = stored(tmp_path, weights)["a.weight"]()
    assert torch.equal(numbers, torch.full(shape, 6.0))


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((4, 8), (4, 0)), ((4,), (3,)), ((4,), (4, 2)), ((2, 4, 8), (3,)), ((), (2,)), ((0, 4), (2,))],
)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_scales_that_do_not_fit_are_refused_with_both_shapes(kind, shape, scales, tmp_path):
    weights = {"a.weight": torch.ones(shape).to(kind), "a.weight_scale": torch.ones(scales)}
    with pytest.raises(ConfigError) as caught:
        stored(tmp_path, weights)
    assert f"a.weight {shape} with scales {scales}, which do not fit" in str(caught.value)


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_bytes_are_powers_of_2(kind, tmp_path):
    codes = torch.randn(3, 64).to(E4M3)
    exponents = torch.tensor([[127, 130], [0, 120], [255, 127]], dtype=torch.uint8)
    found = stored(tmp_path, {"a.weight": codes, "a.weight_scale": exponents.view(kind)})
    assert found.keys() == {"a.weight"}
    powers = 2.0 ** (exponents.double() - 127)
    powers[2, 0] = torch.nan
    expected = codes.double() * powers.repeat_interleave(32, 1)
    torch.testing.assert_close(
        found["a.weight"]().double(), expected, atol=0, rtol=0, equal_nan=True
    )


NO_SCALES = [torch.int32, torch.int64, torch.bool, torch.int8]


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        *itertools.product([E4M3, torch.int8], NO_SCALES),
        (torch.int8, torch.uint8),
    ],  # bytes beside fp8 are
)
def test_scales_that_are_no_numbers_are_refused(codes, kind, tmp_path):
    weights = {"a.weight": torch.ones(4, 4).to(codes), "a.weight_scale": torch.ones(4, 1).to(kind)}
    with pytest.raises(ConfigError, match=r"holds a\.weight_scale, the scales of a\.weight, as "):
        stored(tmp_path, weights)


@pytest.mark.parametrize(
    "scale",
    [
        "scale_weight",
        "weight_scales",
        "scale_inv",
        "scale",
        "weight_scale_2",
        "weight.scale",
        "weightScale",
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_codes_beside_a_scale_of_another_name_are_refused(known, scale, tmp_path):
    weights = {"l.0.a.weight": torch.ones(4, 4).to(E4M3), f"l.0.a.{scale}": torch.ones(())}
    if known:
        weights["l.0.a.weight_scale"] = torch.ones(())
    with pytest.raises(ConfigError) as caught:
        stored(tmp_path, weights)
    assert f"holds l.0.a.{scale} beside the F8_E4M3 codes l.0.a.weight" in str(caught.value)


def test_scales_of_other_modules_and_of_activations_are_no_scales_of_codes(tmp_path):
    more = ["a.input_scale", "a.k_scale", "a.scale_input", "b.scale", "layer_scale", "a.bias"]
    weights = {"a.weight": torch.ones(4, 4).to(E4M3), "a.weight_scale": torch.tensor(2.0)}
    found = stored(tmp_path, weights | {name: torch.ones(1) for name in more})
    assert found.keys() == {"a.weight", *more}


def test_parameters_that_are_called_scales_are_read_beside_codes(tmp_path):
    coded = ["l.0.norm.key_norm.scale", "l.0.attn.qkv.weight", "l.0.b.in_proj_weight", "positions"]
    weights = {name: torch.ones(4, 4).to(E4M3) for name in coded}
    weights |= {name: torch.ones(2) for name in ("l.0.b.logit_scale", "logit_scale")}
    weights |= {"l.0.attn.layer_scale": torch.ones(2), "l.0.attn.input_scale_ub": torch.ones(1)}
    assert stored(tmp_path, weights).keys() == weights.keys()


def test_two_scales_of_one_weight_are_refused(tmp_path):
    weights = {f"a.weight{end}": torch.ones(()) for end in ("_scale", "_scale_inv")}
    with pytest.raises(ConfigError, match=r"two scales of a\.weight, a\.weight_scale_inv and"):
        stored(tmp_path, weights | {"a.weight": torch.ones(4, 4).to(E4M3)})


@pytest.mark.parametrize("sides", [[100, 100], [1, 32], [64, 200], None])
@pytest.mark.parametrize("as_a_file", [False, True])
def test_blocks_have_the_size_that_the_config_says(as_a_file, sides, tmp_path):
    rows, columns = sides or (128, 128)
    codes = torch.randn(200, 200).to(E4M3)
    scales = torch.rand(-(-200 // rows), -(-200 // columns)) + 0.5
    weights = {"a.weight": codes, "a.weight_scale_inv": scales}
    settings = {"quant_method": "fp8", "weight_block_size": sides}
    found = stored(tmp_path, weights, quantization_config=settings)
    if as_a_file:
        found = checkpoint_weights(tmp_path / "model.safetensors")
    numbers = found["a.weight"]()
    for i, j in ((0, 0), (99, 100), (100, 99), (127, 128), (199, 199), (5, 130)):
        assert numbers[i, j] == codes[i, j].float() * scales[i // rows, j // columns]


@pytest.mark.parametrize("sides", [3, "128", [128], [0, 128], [True, 128], [128.0, 128], [-1, 1]])
def test_a_size_of_blocks_that_is_none_is_refused(sides, tmp_path):
    weights = {"a.weight": torch.ones(4, 4).to(E4M3)}
    with pytest.raises(ConfigError, match=r"config\.json' says weight_block_size = "):
        stored(tmp_path, weights, quantization_config={"weight_block_size": sides})
    assert stored(tmp_path, {"a.weight": torch.ones(4)}, model_type="llama")
    with pytest.raises(ConfigError, match="says quantization_config = 3: it must be an object"):
        stored(tmp_path, weights, quantization_config=3)


def test_rows_of_bitsandbytes_have_their_largest_entry(tmp_path):
    weight = torch.randn(5, 7)
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    found = stored(tmp_path, {"a.weight": codes, "a.SCB": largest})
    assert found.keys() == {"a.weight"}
    torch.testing.assert_close(found["a.weight"](), weight, atol=float(largest.max()) / 250, rtol=0)


def test_fp8_without_scales_is_its_numbers(tmp_path):
    codes = torch.randn(4, 4).to(torch.float8_e4m3fn)
    assert torch.equal(stored(tmp_path, {"a.weight": codes})["a.weight"]().float(), codes.float())


@pytest.mark.parametrize("name", ["layers.0.mlp.experts.down_proj", "layers.0.mlp.up.bias"])
@pytest.mark.parametrize("suffix", ["", "_scale", "_scale_inv"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_codes_whose_names_do_not_end_in_weight_are_read_or_refused(kind, suffix, name, tmp_path):
    weights = {name: torch.ones(4).to(kind), "layers.0.q.weight": torch.ones(2, 2)}
    if suffix:
        weights[name + suffix] = torch.tensor(3.0)
    if kind == torch.int8 and not suffix:
        with pytest.raises(ConfigError, match=f"{name} as I8 without scales"):
            stored(tmp_path, weights)
        return
    found = stored(tmp_path, weights)
    assert found.keys() == {name, "layers.0.q.weight"}
    assert torch.equal(found[name]().float(), torch.full((4,), 3.0 if suffix else 1.0))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {"a.qweight": torch.ones(2, 2, dtype=torch.int32)},
            "holds a.qweight, codes of a quantisation",
        ),
        ({"a.weight_packed": torch.ones(2, 2, dtype=torch.int32)}, "holds a.weight_packed, codes"),
        (
            {"experts.down_proj_blocks": torch.ones(2, 2, dtype=torch.uint8)},
            "holds experts.down_proj_blocks, codes",
        ),
        (
            {"a.weight": torch.ones(4, 1, dtype=torch.uint8)},
            "holds a.weight as U8, and ctrans reads F64",
        ),
        ({"a.weight": torch.ones(4, 4, dtype=torch.int8)}, "a.weight as I8 without scales"),
        (
            {"a.weight": torch.ones(4, 4, dtype=torch.int8), "a.weight_scale": torch.ones(3)},
            "which do not fit",
        ),
    ],
)
def test_other_quantised_weights_are_refused_by_name(weights, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        stored(tmp_path, weights)


def test_buffers_are_left_out(tmp_path):
    more = {
        "embeddings.position_ids": torch.arange(4),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "n": torch.tensor(3),
    }
    assert stored(tmp_path, {"a.weight": torch.ones(2, 2)} | more).keys() == {"a.weight"}
    assert read_checkpoint(tmp_path).buffers.keys() == {"h.0.attn.bias"}


@pytest.mark.parametrize(
    "kind", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("name", ["layers.0.attention.bias", "layers.0.up.bias", "experts.up"])
def test_a_parameter_of_whole_numbers_is_named(name, kind, tmp_path):
    beside = f"{name.rpartition('.')[0]}.weight"
    weights = {beside: torch.ones(2, 2), name: torch.ones(4).to(kind)}
    assert stored(tmp_path, weights).keys() == {beside}
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.unread.keys() == {name}
    missing = weight_diagnosis(checkpoint.weights, unread=checkpoint.unread).missing
    reason = missing["tensors that are no floating-point numbers"]
    assert reason.startswith(f"1 not read, such as {name} ({checkpoint.unread[name]}): save")


def test_a_parameter_in_less_than_a_byte_is_named(tmp_path):
    bias = {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}
    weight = {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}
    header = json.dumps({"a.bias": bias, "a.weight": weight}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    assert read_checkpoint(path).unread == {"a.bias": "F4"}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("embeddings.position_ids", torch.arange(4)),
        ("embeddings.token_type_ids", torch.zeros(1, 4, dtype=torch.int64)),
        ("bn.num_batches_tracked", torch.tensor(3)),
        ("h.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.uint8)),
        ("h.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.int8)),
        ("h.0.attn.attention.bias", torch.ones(1, 1, 4, 4, dtype=torch.bool)),
        ("h.0.attn.masked_bias", torch.tensor(-1)),
        ("layers.0.attn_mask", torch.ones(3, 4, 4, dtype=torch.int8)),
        ("layers.0.relative_position_index", torch.ones(9, 9, dtype=torch.int64)),
        ("layers.0.qkv._extra_state", torch.ones(40, dtype=torch.uint8)),
        ("layers.0.qkv.weight_format", torch.tensor(0, dtype=torch.uint8)),
        ("step", torch.tensor([7])),
    ],
)
def test_buffers_of_whole_numbers_are_left_out_without_a_word(name, numbers, tmp_path):
    assert stored(tmp_path, {"a.weight": torch.ones(2, 2), name: numbers}).keys() == {"a.weight"}
    assert not read_checkpoint(tmp_path).unread


@pytest.mark.parametrize(
    "weights",
    [{}, {"n": torch.tensor(3)}, {"embeddings.position_ids": torch.arange(4)}],
    ids=["nothing", "a number", "a buffer"],
)
def test_files_without_weights_are_refused(weights, tmp_path):
    path = tmp_path / "empty.safetensors"
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ConfigError, match="holds no weights in F64"):
        checkpoint_weights(path)


@pytest.mark.parametrize("shape", [[2**40, 0], [2**43, 0, 3], [0, 2**50]])
def test_an_axis_without_end_of_a_weight_without_numbers_is_refused(shape, tmp_path):
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"a.weight": entry}).encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="an axis may have at most"):
        checkpoint_weights(path)


@pytest.mark.parametrize(
    ("family", "shift"), [("gemma3_text", 1), ("gemma3n_text", 0), ("llama", 0), ("qwen3_next", 1)]
)
def test_gains_that_are_stored_less_1_are_gains(family, shift, tmp_path):
    kept = torch.randn(4)
    found = stored(
        tmp_path,
        {"layers.0.input_layernorm.weight": kept, "layers.0.up.weight": kept[None].clone()},
        model_type=family,
    )
    assert torch.equal(found["layers.0.input_layernorm.weight"](), kept + shift)
    assert torch.equal(found["layers.0.up.weight"](), kept[None])


INPUT = "model.language_model.layers.0.input_layernorm.weight"
LESS_ONE = {
    "gemma3": (INPUT, "multi_modal_projector.mm_soft_emb_norm.weight"),
    "paligemma": (INPUT,),
    "t5gemma2": ("model.encoder.text_model.layers.0.self_attn.q_norm.weight",),
    "qwen3_5": (INPUT, "model.language_model.norm.weight"),
    "qwen4_exp": (INPUT,),
    "minimax_m3_vl": (INPUT,),
    "step3p7": (INPUT,),
    "muse_spark": (INPUT,),
    "videoprism": ("video_model.vision_model.spatial_layers.0.layernorm_before.weight",),
}
WHOLE = {
    "gemma3": ("model.vision_tower.encoder.layers.0.layer_norm1.weight",),
    "paligemma": ("model.vision_tower.post_layernorm.weight",),
    "t5gemma2": ("model.encoder.vision_tower.encoder.layers.0.layer_norm1.weight",),
    "qwen3_5": (
        "model.visual.blocks.0.norm1.weight",
        "model.language_model.layers.0.linear_attn.norm.weight",
    ),
    "qwen3_5_vision": ("blocks.0.norm1.weight",),
    "qwen4_exp": ("model.visual.merger.norm.weight",),
    "minimax_m3_vl": ("model.vision_tower.layers.0.layer_norm1.weight",),
    "step3p7": ("model.vision_model.layers.0.layernorm_before.weight",),
    "muse_spark": ("model.language_model.norm.weight", "model.audio_tower.norm.weight"),
    "gemma4": (INPUT,),
}


@pytest.mark.parametrize("family", LESS_ONE | WHOLE)
def test_gains_of_towers_are_stored_whole(family, tmp_path):
    less_one = LESS_ONE.get(family, ())
    whole = WHOLE.get(family, ())
    weights = {name: torch.zeros(4) for name in (*less_one, *whole)}
    config = {"model_type": family}
    if family == "paligemma":
        config["text_config"] = {"model_type": "gemma2"}
    found = stored(tmp_path, weights, **config)
    assert {name for name in less_one if float(found[name]()[0]) == 1} == set(less_one)
    assert {name for name in whole if float(found[name]()[0]) == 0} == set(whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_gains_are_stored_less_1_where_the_library_adds_1(family, tmp_path):
    config = CONFIG_MAPPING[family]()
    config.text_config.num_hidden_layers = 4  # the fewest with both kinds of attention
    config.text_config.layer_types = config.text_config.layer_types[:4]
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    adds_one = {}
    for name, module in model.named_modules():
        adds_one[f"{name}.weight"] = "1.0 + self.weight" in inspect.getsource(type(module))
    names = [name for name, _ in model.named_parameters() if GAIN.search(name)]
    found = stored(tmp_path, {name: torch.zeros(1) for name in names}, model_type=family)
    assert {name: bool(found[name]()) for name in names} == {name: adds_one[name] for name in names}


def test_shards_files_and_checkpoints_of_ctrans_are_found(tmp_path):
    whole = {f"layers.{i}.w": torch.randn(3, 3) for i in range(4)}
    for i, name in enumerate(whole):
        save_file({name: whole[name]}, tmp_path / f"{i}.safetensors")
    index = {name: f"{i}.safetensors" for i, name in enumerate(whole)}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    assert all(
        torch.equal(read(), whole[name]) for name, read in checkpoint_weights(tmp_path).items()
    )
    assert checkpoint_weights(tmp_path / "2.safetensors").keys() == {"layers.2.w"}
    model = GPT(GPTConfig(depth=1, width=16, heads=2, context=8))
    save(model, tmp_path / "ours")
    read = checkpoint_weights(tmp_path / "ours")
    assert all(
        torch.equal(read[name](), value)
        for name, value in model.state_dict().items()
        if name in read
    )
    assert read
    for wrong in (tmp_path / "absent", tmp_path / "ours" / "config.json"):
        with pytest.raises(ConfigError, match="holds no weights: give a directory"):
            checkpoint_weights(wrong)


def test_a_checkpoint_of_nanogpt_is_read_if_pickles_are_allowed(tmp_path):
    torch.save({"model": {"a.weight": torch.ones(2)}, "model_args": {}}, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match=r"ckpt\.pt' is a pickle .*--allow-pickle") as caught:
        checkpoint_weights(tmp_path)
    assert "safe_serialization" not in str(caught.value)
    assert checkpoint_weights(tmp_path, allow_pickle=True).keys() == {"a.weight"}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_directory_whose_name_is_no_utf8_is_to_be_renamed(name, tmp_path):
    place = tmp_path / os.fsdecode(b"\xff")
    try:
        place.mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    (place / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is not UTF-8.*: rename the directory"):
        checkpoint_weights(place, allow_pickle=True)


@pytest.mark.parametrize("in_a_run", [False, True])
def test_a_flipped_bit_in_weights_of_ctrans_is_found(in_a_run, tmp_path):
    save(GPT(GPTConfig(depth=1, width=8, heads=2, context=8)), tmp_path)
    path = tmp_path / "model.safetensors"
    if in_a_run:
        (tmp_path / "train.json").write_text("{}")
        (tmp_path / "optimiser.safetensors").write_bytes(b"")
        (tmp_path / "SHA256SUMS").write_bytes(sums(tmp_path))
    assert checkpoint_weights(tmp_path)
    data = bytearray(path.read_bytes())
    data[-30] ^= 0x40
    path.write_bytes(data)
    for given in (tmp_path, path):
        with pytest.raises(ConfigError, match=r"model\.safetensors' is damaged"):
            checkpoint_weights(given)


def test_sums_of_others_are_no_damage(tmp_path):
    """Directories of Hugging Face often have a list of sums, and may have any other file."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "SHA256SUMS").write_text("of other files\n")
    assert stored(tmp_path, {"a.weight": torch.ones(2, 2)}, model_type="llama")
