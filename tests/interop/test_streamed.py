"""Models larger than memory: on demand the numbers are those of the model in memory, and what
cannot be read is said.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ctrans.control.costate import costate
from ctrans.control.model_check import check_model
from ctrans.dynamics.weights.on_demand import weights_of
from ctrans.interop import continuize, from_architecture, from_transformers
from ctrans.interop.architecture import PRESETS, skeleton
from ctrans.interop.block_structure import make_of
from ctrans.interop.families import small_model
from ctrans.interop.stored_weights import stored_weights
from ctrans.interop.streamed import piece_seed
from ctrans.interop.streamed import read as read_weights
from solvers import ConfigError
from tests.interop.models import FAMILIES, inputs, made
from tests.interop.test_hugging_face import edit

# the library renames ViT's weights as it loads them
TEXT = [name for name in FAMILIES if name != "vit"]
each_family = pytest.mark.parametrize("name", TEXT)


def saved(name, path, **options):
    model = made(name)
    model.save_pretrained(path, **options)
    return inputs(model)


def same(first, second, x):
    """Whether states, logits and costates of two models have the same bits."""
    y = x.roll(1, -1)
    one, other = costate(first, x, y), costate(second, x, y)
    return (
        all(map(torch.equal, one.states, other.states))
        and all(map(torch.equal, one.costates, other.costates))
        and torch.equal(first(x)[0], second(x)[0])
    )


@pytest.mark.cases(1)
@each_family
def test_weights_read_on_demand_give_the_bits_of_the_model_in_memory(name, tmp_path):
    x = saved(name, tmp_path)
    whole, streamed = from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True)
    assert streamed.depth.streamed
    assert str(streamed.config) == str(whole.config)
    assert same(whole, streamed, x)


@pytest.mark.slow
@each_family
def test_weights_drawn_on_demand_give_the_bits_of_the_model_in_memory(name, tmp_path):
    made(name).config.save_pretrained(tmp_path)
    x = inputs(made(name))
    whole, streamed = (
        from_architecture(tmp_path, seed=4, on_demand=each) for each in (False, True)
    )
    assert same(whole, streamed, x)
    other = from_architecture(tmp_path / "config.json", seed=5)
    assert not torch.equal(other(x)[0], whole(x)[0])


def test_shards_are_read_from_the_files_that_the_index_names(tmp_path):
    x = saved("llama", tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True), x)


def test_a_penalty_needed_is_not_shown_untested(tmp_path):
    """On demand no large weights can be tried, so that a clip of a model would not be seen."""
    x = saved("gpt2", tmp_path)
    found = {}
    for on_demand in (False, True):
        model = from_transformers(tmp_path, on_demand=on_demand)
        found[on_demand] = check_model(model.double(), x, x.roll(1, -1))
        verdicts = {segment.verdict for segment in found[on_demand].segments}
        assert verdicts == {"degenerate"}
    assert found[False].training_threshold is not None
    assert found[True].training_threshold is None
    assert "loaded on demand" in found[True].no_threshold


def test_no_matrix_stays(tmp_path):
    saved("gemma2", tmp_path)
    streamed = from_transformers(tmp_path, on_demand=True)
    assert all(parameter.dim() < 2 for parameter in streamed.parameters())
    assert (
        sum(weight.dim() == 2 for weight in weights_of(streamed.depth.sublayers[1]).values()) == 3
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_can_be_asked_for(dtype, tmp_path):
    x = saved("olmo2", tmp_path)
    assert same(
        from_transformers(tmp_path, dtype=dtype),
        from_transformers(tmp_path, dtype=dtype, on_demand=True),
        x,
    )


@pytest.mark.slow
@pytest.mark.parametrize("on_demand", [False, True])
def test_a_seed_means_the_same_weights_in_every_precision(on_demand, tmp_path):
    made("gemma3").config.save_pretrained(tmp_path)
    single, double = (
        from_architecture(tmp_path, dtype=dtype, on_demand=on_demand)
        for dtype in (torch.float32, torch.float64)
    )
    for k in (0, 1):
        expected, got = (weights_of(model.depth.sublayers[k]) for model in (single, double))
        assert all(torch.equal(got[name], weight.double()) for name, weight in expected.items())


@pytest.mark.slow
def test_the_librarys_own_initialisation_is_drawn():
    model = from_architecture("gpt2", blocks=2, on_demand=True)
    attention, ffn = (weights_of(model.depth.sublayers[k]) for k in (0, 1))
    sizes = {
        name: float(weight.std()) for name, weight in (attention | ffn).items() if weight.dim() == 2
    }
    for name, size in sizes.items():
        # residual maps are drawn smaller, by the root of the number of sublayers
        expected = 0.02 / 2 if "c_proj" in name else 0.02
        assert size == pytest.approx(expected, rel=0.01), name


# published counts, in the order of PRESETS
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_weights_as_the_published_models(name):
    assert sum(parameter.numel() for parameter in skeleton(name).parameters()) == COUNTS[name]


@pytest.mark.slow
def test_number_of_blocks_can_be_chosen():
    assert from_architecture("gpt2", blocks=3, on_demand=True).depth.blocks == 3
    with pytest.raises(ConfigError, match="blocks = 0"):
        from_architecture("gpt2", blocks=0)


def test_pieces_have_seeds_of_their_own():
    seeds = {piece_seed(seed, name) for seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def change(path, edit):
    weights = safetensors.torch.load_file(path / "model.safetensors")
    edit(weights)
    safetensors.torch.save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "no weight 'model.layers.1.mlp.up_proj.weight'",
        ),
        (lambda w: w.pop("model.norm.weight"), "no weight 'model.norm.weight'"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}),
            r"up_proj.weight is \(3, 3\), expected",
        ),
        (
            lambda w: w.update(
                {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3, dtype=torch.int8)}
            ),
            "up_proj.weight as I8",
        ),
    ],
)
def test_files_that_do_not_hold_the_model_are_refused_before_anything_is_computed(
    edit, words, tmp_path
):
    saved("llama", tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ConfigError, match=words):
        from_transformers(tmp_path, on_demand=True)


def test_truncated_shards_are_refused(tmp_path):
    saved("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="no complete safetensors file"):
        from_transformers(tmp_path, on_demand=True)


def test_a_file_that_goes_away_while_it_is_used_is_an_error_in_a_line(tmp_path):
    x = saved("llama", tmp_path)
    streamed = from_transformers(tmp_path, on_demand=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        streamed(x)


def test_families_whose_weights_are_renamed_on_loading_are_refused_with_what_to_do(tmp_path):
    made("vit").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="load it without on_demand"):
        from_transformers(tmp_path, on_demand=True)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "unheard-of"}, "model_type .*'unheard-of'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size = 'wide': .* whole number"),
        ({"model_type": "t5"}, "makes no model|no list|attention|inputs known"),
    ],
)
def test_configs_that_make_no_model_are_refused(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        from_architecture(tmp_path)


@pytest.mark.parametrize("name", ["llama-7", Path("nowhere/config.json")])
def test_unknown_architectures_are_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match="llama-7b"):
        from_architecture(name)


def test_on_demand_is_for_directories():
    with pytest.raises(ConfigError, match="loaded from a directory"):
        from_transformers(made("llama"), on_demand=True)


@pytest.mark.parametrize("place", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "kernel",
    ["someuser/attention", "kernels-community/flash-mla", "flash_attention_2", {"": "a/b"}],
)
def test_kernels_that_would_be_fetched_are_refused_wherever_a_config_names_them(
    place, kernel, tmp_path
):
    made("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    edit(path, **{place: kernel})
    for read in (
        lambda: from_transformers(tmp_path),
        lambda: from_transformers(tmp_path, on_demand=True),
        lambda: from_architecture(path),
        lambda: from_architecture(json.loads(path.read_text())),
    ):
        with pytest.raises(ConfigError, match='set it to "sdpa"'):
            read()


@pytest.mark.slow
def test_the_config_file_that_is_named_is_read_whatever_its_name(tmp_path):
    config = made("llama").config.to_dict()
    for name, blocks in (("config.json", 3), ("five.json", 5)):
        (tmp_path / name).write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    assert from_architecture(tmp_path / "five.json").depth.blocks == 5
    assert from_architecture(tmp_path).depth.blocks == 3


def test_a_stale_index_is_left_alone_as_the_library_does(tmp_path):
    x = saved("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "other.safetensors"}})
    )
    assert same(from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True), x)


def test_without_a_dtype_both_ways_take_the_configs(tmp_path):
    x = saved("llama", tmp_path)
    change(
        tmp_path,
        lambda weights: weights.update({name: value.bfloat16() for name, value in weights.items()}),
    )
    whole, streamed = from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True)
    assert whole.embed(x).dtype == streamed.embed(x).dtype == torch.float32
    assert same(whole, streamed, x)


@pytest.mark.parametrize("on_demand", [False, True])
def test_weights_of_blocks_beyond_the_configs_are_not_dropped_without_a_word(on_demand, tmp_path):
    saved("llama", tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=2)
    with pytest.raises(
        ConfigError, match=r"holds weights of model.layers.2, but its config.json says 2 blocks"
    ):
        from_transformers(tmp_path, on_demand=on_demand)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_norm.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_weights_of_a_part_of_the_model_that_does_not_use_them_are_named(name, on_demand, tmp_path):
    saved("llama", tmp_path)
    change(tmp_path, lambda weights: weights.update({name: torch.full((32,), 100.0)}))
    with pytest.raises(
        ConfigError, match=rf"its config.json does not use \(1\), such as \S*{name}: fix the"
    ):
        from_transformers(tmp_path, on_demand=on_demand)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("name", ["cls.seq_relationship.weight", "bert.pooler.dense.bias"])
def test_weights_of_whole_parts_that_the_class_does_not_have_pass(name, on_demand, tmp_path):
    x = saved("bert", tmp_path)
    plain = from_transformers(tmp_path)
    change(tmp_path, lambda weights: weights.update({name: torch.full((32,), 100.0)}))
    assert same(plain, from_transformers(tmp_path, on_demand=on_demand), x)


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_head_that_the_config_ties_must_be_the_embedding(on_demand, tmp_path):
    x = saved("gpt2", tmp_path)
    plain = from_transformers(tmp_path)
    change(
        tmp_path,
        lambda weights: weights.update(
            {"lm_head.weight": weights["transformer.wte.weight"].clone()}
        ),
    )
    assert same(plain, from_transformers(tmp_path, on_demand=on_demand), x)
    change(tmp_path, lambda weights: weights["lm_head.weight"][0].add_(1))
    with pytest.raises(
        ConfigError, match=r"lm_head.weight with other values than transformer.wte.weight, but its"
    ):
        from_transformers(tmp_path, on_demand=on_demand)


def test_a_tied_head_that_is_stored_under_another_name_must_be_the_embedding_too(tmp_path):
    small_model("gpt_neox").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(
        ConfigError,
        match=(
            r"hold lm_head.weight with other values than \S*embed_in.weight, but the config.json"
            r" ties"
        ),
    ):
        from_transformers(tmp_path)


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_tensor_of_another_shape_is_named(on_demand, tmp_path):
    saved("llama", tmp_path)
    edit(tmp_path / "config.json", vocab_size=40)
    with pytest.raises(
        ConfigError,
        match=r"embed_tokens.weight is \(\d+, \d+\), expected \(40, \d+\)|lm_head.weight is",
    ):
        from_transformers(tmp_path, on_demand=on_demand)


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("int8", "I8"), ("bool", "BOOL"), ("complex64", "C64"), ("float8_e4m3fn", "F8_E4M3")],
)
def test_a_weight_of_another_kind_of_numbers_is_not_cast_without_a_word(
    dtype, stored, on_demand, tmp_path
):
    saved("llama", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    change(
        tmp_path, lambda weights: weights.update({name: weights[name].to(getattr(torch, dtype))})
    )
    with pytest.raises(
        ConfigError, match=f"{name} as {stored}, and weights must be F64, F32, F16, BF16"
    ):
        from_transformers(tmp_path, on_demand=on_demand)


@pytest.mark.parametrize(
    ("family", "name", "stored"),
    [
        ("bert", "bert.embeddings.position_ids", torch.arange(16)),
        ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 32, 32).bool().tril()),
        ("gpt2", "h.0.attn.bias", torch.ones(1, 1, 32, 32).tril().byte()),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    ],
)
def test_buffers_of_older_files_that_the_library_no_longer_reads_pass(
    family, name, stored, tmp_path
):
    x = saved(family, tmp_path)
    change(tmp_path, lambda weights: weights.update({name: stored}))
    assert same(from_transformers(tmp_path), from_transformers(tmp_path, on_demand=True), x)


class Damped(torch.nn.Module):
    """A GPT-2 block that multiplies what it returns by a buffer, as some families do."""

    def __init__(self, block, scalar):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = block.ln_1, block.attn, block.ln_2, block.mlp
        self.register_buffer("layer_scalar", torch.tensor([scalar]))

    def forward(self, x, *args, **context):
        x = x + self.attn(self.ln_1(x), *args, **context)[0]
        return (x + self.mlp(self.ln_2(x))) * self.layer_scalar


def test_blocks_that_differ_in_a_buffer_are_of_different_makes():
    blocks = made("gpt2").transformer.h
    one, other, third = (make_of(Damped(blocks[0], scalar)) for scalar in (1.0, 0.5, 1.0))
    assert one == third != other
    assert make_of(blocks[0]) == make_of(blocks[1])


def test_buffers_in_the_files_are_read(tmp_path):
    model = Damped(made("gpt2").transformer.h[0], 1.0)
    weights = {name: value.clone() for name, value in model.state_dict().items()} | {
        "layer_scalar": torch.tensor([0.5])
    }
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    _, unused = read_weights(model, stored_weights([tmp_path / "model.safetensors"]))
    assert float(model.layer_scalar) == 0.5
    assert not unused


def test_what_would_lose_weights_on_demand_is_refused(tmp_path):
    saved("gpt2", tmp_path)
    model = from_transformers(tmp_path, on_demand=True).model
    for use in (model.state_dict, lambda: model.load_state_dict({}), lambda: continuize(model)):
        with pytest.raises(ConfigError, match="without on_demand"):
            use()


def test_reading_leaves_the_random_numbers_alone(tmp_path):
    saved("bert", tmp_path)
    before = torch.get_rng_state()
    from_transformers(tmp_path, on_demand=True)
    from_architecture(tmp_path, on_demand=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_weights_than_memory_are_only_taken_on_demand(monkeypatch):
    monkeypatch.setattr("ctrans.base.memory.memory", lambda: 10**8)
    with pytest.raises(ConfigError, match=r"need 0.498 GB and this machine has 0.1: .*--stream"):
        from_architecture("gpt2", on_demand=False)


CONTEXTS = {
    "gpt2": 1024,
    "llama-7b": 4096,
    "llama3-70b": 8192,
    "qwen2.5-7b": 131072,
    "gemma2-9b": 8192,
    "olmo2-7b": 4096,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_presets_have_the_published_models_context(name):
    assert skeleton(name, blocks=1).config.max_position_embeddings == CONTEXTS[name]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("n_layers", "n_layer"), ("n_embed", "n_embd"), ("num_hidden_layer", "num_hidden_layers")],
)
def test_an_entry_that_is_misspelt_is_named_with_the_one_that_is_meant(name, meant):
    with pytest.raises(ConfigError, match=f"no entry '{name}': did you mean '{meant}'"):
        from_architecture({"model_type": "gpt2", name: 2})


def test_an_entry_of_another_family_or_version_passes():
    small = {
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 9,
        "n_ctx": 8,
        "temperature": 1.0,
        "sliding_window": 4,
    }
    assert from_architecture({"model_type": "gpt2", **small}).depth.blocks == 1
