"""Models from a directory: whole safetensors files only, no pickle, no code, no network; every
refusal is one line.
"""

import json
import math
import socket

import pytest
import safetensors.torch
import torch
import transformers

import ctrans
from ctrans.interop import from_transformers
from ctrans.interop.config_checks import check_settings
from ctrans.interop.families import small_model
from ctrans.interop.model_class import model_class
from ctrans.training.monitor.log import read_log
from solvers import ConfigError
from tests.interop.models import inputs, made


@pytest.fixture
def saved(tmp_path):
    made("gpt2").save_pretrained(tmp_path)
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3", "vit"])
def test_saved_model_is_the_model(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path)
    x, imported = inputs(model), from_transformers(tmp_path)
    assert type(imported.model) is type(model)
    assert torch.equal(imported(x)[0], from_transformers(model)(x)[0])


@pytest.mark.slow
def test_shards_are_read(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(
        from_transformers(str(tmp_path))(inputs(model))[0],
        from_transformers(model)(inputs(model))[0],
    )


def test_dtype_can_be_chosen(saved):
    assert next(from_transformers(saved, dtype=torch.float64).parameters()).dtype == torch.float64
    with pytest.raises(ConfigError, match="convert this one"):
        from_transformers(made("gpt2"), dtype=torch.float64)


def test_loading_opens_no_socket(saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    from_transformers(saved)


def test_code_in_the_directory_is_not_run(saved):
    marker = saved / "was_run"
    (saved / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    edit(
        saved / "config.json",
        auto_map={"AutoModel": "modeling_own.Own", "AutoConfig": "modeling_own.Own"},
    )
    from_transformers(saved)
    edit(saved / "config.json", model_type="own", architectures=["Own"])
    with pytest.raises(ConfigError, match="names code of its own, which is never run"):
        from_transformers(saved)
    assert not marker.exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def to_pickle(path):
    transformers_weights = dict(made("gpt2").state_dict())
    torch.save(transformers_weights, path.with_name("pytorch_model.bin"))
    path.unlink()


def index_alone(directory, text):
    """An index in place of the one file, which the library would prefer."""
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(text)


def in_shards(directory, changes, copies=0):
    """The model in shard a, one more weight in shard b, `copies` of those of a in b too, and an
    index with changes.
    """
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    other = {"more": torch.ones(1)} | {name: 2 * weights[name] for name in list(weights)[:copies]}
    index = dict.fromkeys(weights, "a.safetensors") | {"more": "b.safetensors"} | changes
    safetensors.torch.save_file(weights, directory / "a.safetensors", {"format": "pt"})
    safetensors.torch.save_file(other, directory / "b.safetensors", {"format": "pt"})
    kept = {name: file for name, file in index.items() if file is not None}
    index_alone(directory, json.dumps({"metadata": {}, "weight_map": kept}))


def with_dtype(path, dtype, bits):
    """The file with the first embedding's bytes in place of numbers of so many bits."""

    def changed(header, data):
        name = "transformer.wte.weight"
        begin, _ = header[name]["data_offsets"]
        size = math.prod(header[name]["shape"]) * bits // 8
        part = {**header[name], "dtype": dtype, "data_offsets": [0, size]}
        return {name: part}, data[begin : begin + size]

    rewrite(path, changed)


def rename(path, old, new):
    rewrite(
        path,
        lambda header, data: (
            {name.replace(old, new): part for name, part in header.items()},
            data,
        ),
    )


def rewrite(path, change):
    """The safetensors file with another header and other data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = change(json.loads(content[8 : 8 + size]), content[8 + size :])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def encode(path, encoding):
    path.write_bytes(path.read_text().encode(encoding))


DAMAGE = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "is no JSON"),
    "config with a byte order mark": (
        lambda d: encode(d / "config.json", "utf-8-sig"),
        r"config\.json' begins with a byte order mark, .* without a byte order mark: save it so",
    ),
    "config in UTF-16": (
        lambda d: encode(d / "config.json", "utf-16"),
        r"config\.json' is UTF-16, and Hugging Face reads only UTF-8",
    ),
    "config in Latin-1": (
        lambda d: (d / "config.json").write_bytes(b'{"a": "\xe9"}'),
        r"config\.json' is no JSON: byte 7 is no UTF-8: save it as UTF-8",
    ),
    "index with a byte order mark": (
        lambda d: (in_shards(d, {}), encode(d / "model.safetensors.index.json", "utf-8-sig")),
        r"index\.json' begins with a byte order mark",
    ),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "must hold a JSON object"),
    "unknown family": (lambda d: edit(d / "config.json", model_type="gtp2"), "did you mean 'gpt2'"),
    "no family": (lambda d: (d / "config.json").write_text("{}"), "model_type"),
    "quantised": (
        lambda d: edit(d / "config.json", quantization_config={"quant_method": "gptq"}),
        "quantised weights",
    ),
    "adapter": (
        lambda d: (d / "adapter_config.json").write_text("{}"),
        "an adapter for another model",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "lacks 1 of 1 weight files, such as model.safetensors",
    ),
    "pickled weights": (
        lambda d: to_pickle(d / "model.safetensors"),
        "pytorch_model.bin is a pickle and is not read",
    ),
    "truncated": (lambda d: truncate(d / "model.safetensors"), "no complete safetensors file"),
    "no safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x80\x04"),
        "no complete safetensors file",
    ),
    "wrong shapes": (lambda d: edit(d / "config.json", n_embd=64), "does not fit its config.json"),
    "missing blocks": (
        lambda d: edit(d / "config.json", n_layer=4),
        "lacks all 12 weights of transformer.h.3",
    ),
    "a weight of half a byte": (
        lambda d: with_dtype(d / "model.safetensors", "F4", 4),
        "holds transformer.wte.weight as F4, and weights must be F64",
    ),
    "a block's number of other digits": (
        lambda d: rename(d / "model.safetensors", "h.1.", "h.\u00b2\u00b3."),
        "'\u00b2\u00b3' is no number in ASCII digits: rename the weight",
    ),
    "missing shards": (
        lambda d: index_alone(
            d, '{"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}'
        ),
        "lacks 2 of 2 weight files, such as x.safetensors",
    ),
    "index without map": (
        lambda d: index_alone(d, '{"metadata": {}}'),
        "its weight_map must be a JSON object",
    ),
    "index is a list": (
        lambda d: index_alone(d, "[]"),
        "index.json' is no index of shards: its metadata",
    ),
    "metadata is a list": (
        lambda d: index_alone(d, '{"metadata": [1], "weight_map": {}}'),
        "index.json' is no .*: its metadata must be",
    ),
    "metadata is null": (
        lambda d: index_alone(d, '{"metadata": null, "weight_map": {}}'),
        "its metadata must be a JSON object",
    ),
    "empty map": (
        lambda d: index_alone(d, '{"metadata": {}, "weight_map": {}}'),
        "its weight_map names no weights",
    ),
    "a file is a list": (
        lambda d: index_alone(d, '{"metadata": {}, "weight_map": {"a": ["b"]}}'),
        "weight_map must give 'a' the name",
    ),
    "a weight in two shards": (
        lambda d: in_shards(d, {}, copies=1),
        "b.safetensors' holds .*, which the index of shards expects in a.saf",
    ),
    "index omits a weight": (
        lambda d: in_shards(d, {"transformer.ln_f.bias": None}),
        "ln_f.bias, which the index of shards does not",
    ),
    "index invents a weight": (
        lambda d: in_shards(d, {"ghost": "a.safetensors"}),
        "1 weights that its files do not hold, such as ghost",
    ),
    "index names the other shard": (
        lambda d: in_shards(d, {"transformer.ln_f.bias": "b.safetensors"}),
        "expects in b.safetensors",
    ),
}


WRONG_ENTRIES = [
    ({"n_head": "four"}, "n_head = 'four': it must be a whole number"),
    ({"n_embd": None}, "n_embd = None: it must be a whole number"),
    ({"layer_types": [0, 1, 2]}, "layer_types with 0: it must be one of full_attention"),
    ({"n_inner": "x"}, "n_inner = 'x': it must be a whole number or null"),
    ({"tie_word_embeddings": "x"}, "tie_word_embeddings = 'x': it must be true or false"),
    ({"n_inner": -1}, "n_inner = -1: it must be at least 1"),
    ({"n_positions": -1}, "n_positions = -1: it must be at least 1"),
    ({"n_embd": 10**30}, "n_embd = a number of 100 bits: .* at most 100,000,000"),
    ({"n_embd": 2**40}, "n_embd = 1,099,511,627,776: .* at most 100,000,000"),
    ({"dtype": []}, r"dtype = \[\]: it must be one of float64"),
    ({"dtype": "x"}, 'dtype = "x": it must be one of float64'),
    ({"dtype": math.nan}, "dtype = NaN: it must be one of float64"),
    ({"embd_pdrop": math.nan}, "embd_pdrop = NaN: it must be a number from 0 to 1"),
    ({"attn_pdrop": 2.0}, "attn_pdrop = 2.0: it must be a number from 0 to 1"),
    ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon = NaN: it must be a finite number"),
    ({"initializer_range": math.inf}, "initializer_range = Infinity: it must be a finite number"),
    ({"rope_scaling": {"factor": math.nan}}, "factor = NaN: it must be a finite number"),
    (
        {"rope_scaling": {"type": "linear", "factor": -2}},
        "factor = -2: it must be a number above 0",
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0: it must be a number above 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": -1.0}}, "factor = -1.0: it must be"),
    ({"rope_parameters": {"full_attention": {"factor": "x"}}}, 'factor = "x": it must be a number'),
    (
        {"rope_parameters": {"long_factor": [1.0, 0.0]}},
        "long_factor = .*: it must be a number above 0",
    ),
    ({"text_config": {"rope_theta": -1}}, "rope_theta = -1: it must be a number above 0"),
    ({"limits": [1.0, math.nan]}, "limits = .*: it must be numbers"),
    ({"id2label": 3}, "id2label = 3: it must be an object, or null"),
]


@pytest.mark.parametrize(("entries", "words"), WRONG_ENTRIES)
def test_an_entry_of_a_config_that_makes_no_model_is_named_with_what_is_allowed(
    entries, words, saved
):
    edit(saved / "config.json", **entries)
    with pytest.raises(ConfigError, match=rf"config\.json' says {words}"):
        from_transformers(saved)


def test_entries_that_are_free_stay_free():
    check_settings("here", {"time_step_limit": [0.0, math.inf], "n_inner": None, "dtype": None})
    check_settings("here", {"classifier_dropout": None, "torch_dtype": "torch.bfloat16"})
    positions = {"factor": 0.5, "attention_factor": None, "mscale": 0.0, "short_factor": [1, 2.0]}
    check_settings("here", {"rope_scaling": positions, "rope_theta": {"full_attention": 1e4}})


def test_shards_that_agree_with_their_index_are_read(saved):
    x, whole = inputs(made("gpt2")), from_transformers(saved)
    in_shards(saved, {})
    for on_demand in (False, True):
        assert torch.equal(from_transformers(saved, on_demand=on_demand)(x)[0], whole(x)[0])


@pytest.mark.slow
def test_an_index_that_ctrans_alone_reads_may_begin_with_a_byte_order_mark(saved):
    x = inputs(made("gpt2"))
    whole = from_transformers(saved)
    in_shards(saved, {})
    encode(saved / "model.safetensors.index.json", "utf-8-sig")
    assert torch.equal(from_transformers(saved, on_demand=True)(x)[0], whole(x)[0])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_directories_are_refused_in_one_line(kind, saved):
    damage, words = DAMAGE[kind]
    damage(saved)
    with pytest.raises(ConfigError, match=words) as caught:
        from_transformers(saved)
    assert "\n" not in str(caught.value)


def test_what_is_no_directory_is_refused(tmp_path):
    for path in (tmp_path / "absent", "gpt2", __file__):
        with pytest.raises(ConfigError, match="is no directory"):
            from_transformers(path)


def test_quantised_model_is_refused():
    model = made("gpt2")
    model.transformer.h[0].attn.c_attn.weight = torch.nn.Parameter(
        torch.ones(4, 4, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(
        ConfigError, match=r"quantised weights, such as transformer\.h\.0\.attn\.c_attn\.weight"
    ):
        from_transformers(model)


def test_more_weights_than_the_model_uses_are_no_reason_to_refuse(saved):
    edit(saved / "config.json", architectures=["GPT2Model"])
    assert isinstance(from_transformers(saved).model, transformers.GPT2Model)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ("GPT2LMHeadModel", "= 'GPT2LMHeadModel': it must be a list of texts"),
        (3, "= 3: it must be a list of texts"),
        ([3], "= [3]: it must be a list of texts"),
        ({}, "it must be a list of texts"),
        (["GPT2LMHeadModl"], "no class of the library: did you mean 'GPT2LMHeadModel'?"),
        (["gpt2lmheadmodel"], "no class of the library: did you mean 'GPT2LMHeadModel'?"),
        (["GPT2Config"], "which is no class of the library: "),
        (["qqqqqqqqqq"], "no class of the library: give the name of a class"),
    ],
)
@pytest.mark.parametrize("on_demand", [False, True])
def test_a_class_that_the_library_does_not_have_is_refused(on_demand, classes, words, saved):
    edit(saved / "config.json", architectures=classes)
    with pytest.raises(ConfigError) as caught:
        from_transformers(saved, on_demand=on_demand)
    assert "config.json' says architectures = " in str(caught.value)
    assert words in str(caught.value)


def test_the_first_class_that_is_known_counts(saved):
    edit(saved / "config.json", architectures=["MyGPT", "GPT2LMHeadModel"])
    assert isinstance(from_transformers(saved).model, transformers.GPT2LMHeadModel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt2", "LlamaForCausalLM"),
        ("gemma", "LlamaForCausalLM"),
        ("mistral", "LlamaForCausalLM"),
        ("granite", "LlamaForCausalLM"),
        ("cohere", "LlamaForCausalLM"),
        ("llama", "MistralForCausalLM"),
    ],
)
def test_a_class_of_another_family_is_refused(family, kind):
    settings = {"model_type": family, "architectures": [kind]}
    with pytest.raises(ConfigError, match=f"says model_type = '{family}' and .* is a class of"):
        model_class("config.json", settings, transformers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt2", "GPT2Model"),
        ("gpt-sw3", "GPT2LMHeadModel"),  # the library's tables pair the two
        ("internlm3", "LlamaForCausalLM"),
        ("llama4", "Llama4ForCausalLM"),  # the class is of a part
        ("clip", "CLIPTextModel"),
        ("funnel", "FunnelBaseModel"),  # of two default models
        ("whisper", "WhisperEncoder"),
        ("llama", None),
    ],
)
def test_a_class_that_the_library_uses_for_a_family_is_found(family, kind):
    settings = {"model_type": family}
    if kind:
        settings["architectures"] = [kind]
    found = model_class("config.json", settings, transformers)
    assert getattr(found, "__name__", None) == kind


@pytest.mark.parametrize("classes", [None, []])
def test_without_a_class_the_model_has_no_head(classes, saved):
    edit(saved / "config.json", architectures=classes)
    assert isinstance(from_transformers(saved).model, transformers.GPT2Model)


def test_a_class_that_only_its_family_has_is_found(tmp_path):
    small_model("whisper").save_pretrained(tmp_path)
    assert type(from_transformers(tmp_path).model).__name__ == "WhisperEncoder"


def add_weight(directory, old, new):
    """Stores twice the weight `old` under the name `new` too."""
    path = directory / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights[new] = 2 * weights[old]
    safetensors.torch.save_file(weights, path, {"format": "pt"})


TWICE = {
    "without its prefix": (
        "llama",
        "model.layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.q_proj.weight",
    ),
    "with the prefix twice": ("llama", "model.norm.weight", "model.model.norm.weight"),
    "by an old name": (
        "bert",
        "bert.encoder.layer.0.output.LayerNorm.weight",
        "bert.encoder.layer.0.output.LayerNorm.gamma",
    ),
}


@pytest.mark.parametrize("kind", TWICE)
@pytest.mark.parametrize("on_demand", [False, True])
def test_two_weights_for_one_parameter_are_refused(on_demand, kind, tmp_path):
    family, name, other = TWICE[kind]
    if family == "bert":
        transformers.BertForMaskedLM(made(family).config).save_pretrained(tmp_path)
    else:
        made(family).save_pretrained(tmp_path)
    add_weight(tmp_path, name, other)
    with pytest.raises(ConfigError) as caught:
        from_transformers(tmp_path, on_demand=on_demand)
    assert other in str(caught.value)
    assert on_demand or f"holds {name} twice, as" in str(caught.value)


def test_of_an_encoder_with_a_decoder_it_says_which_is_read_and_watched(tmp_path):
    sizes = {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=32, **sizes)
    )
    ids, said = (
        torch.ones(2, 5, dtype=torch.int64),
        "T5Stack, only the encoder of T5ForConditionalGeneration (t5): 2 blocks",
    )
    assert (
        from_transformers(model).config.model
        == "T5Stack, only the encoder of T5ForConditionalGeneration"
    )
    with ctrans.Monitor(model, out=tmp_path) as monitor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        monitor.step(loss)
    assert read_log(tmp_path).header.model.startswith(said)
    assert ctrans.open_model(model.get_decoder()).described.startswith("T5Stack (t5): 3 blocks")
