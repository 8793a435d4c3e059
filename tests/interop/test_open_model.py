"""Models from disk, with their tokens: what is opened, how it reads, and that fields end in the
linear map they name.
"""

import dataclasses
import json
import pickle
import socket

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from ctrans.base.json_values import plain
from ctrans.control import costate
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.control.segment_check import check_segment
from ctrans.dynamics.norm import LayerNorm
from ctrans.examine.screened import as_object
from ctrans.examine.screening.screen import EFFORTS, screen
from ctrans.examine.simulated import Simulated
from ctrans.examine.simulated import measured as simulated_table
from ctrans.interop import from_transformers, to_nanogpt
from ctrans.interop.directory_tokeniser import find_tokeniser
from ctrans.interop.families import small_model
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.open_model import open_model
from ctrans.interop.tokens import read_ids
from ctrans.measure.forward.simulation import simulate
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.contents import page_of
from ctrans.report.picture import pictures
from solvers import ConfigError
from tests.helpers import learned
from tests.interop.models import FAMILIES, SMALL, TEXT, VOCABULARY, inputs, made

TEXTUAL = [name for name in FAMILIES if name != "vit"]
TINY = dataclasses.replace(EFFORTS["quick"], tokens=5, certified=2, layers=1, starts=1)
WORDS = ["[UNK]", "[MASK]", "the", "depth", "is", "a", "time", "."]


def save_tokenizer(directory):
    """A tokenizer of a few words, as save_pretrained writes it."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(
        directory
    )


def nanogpt(path):
    """A small model, also saved as nanoGPT saves its own."""
    config = GPTConfig(
        vocab_size=VOCABULARY, placement="pre", width=16, depth=2, heads=2, context=16
    )
    model = GPT(config)
    torch.save(to_nanogpt(model), path)
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_fields_are_their_last_linear_map_of_their_features(name):
    imported = from_transformers(made(name))
    x = imported.embed(inputs(imported.model)).detach()
    for part in imported.depth.sublayers:
        h = part.field.pre_projection(x)
        assert h.shape[:-1] == x.shape[:-1]
        assert isinstance(part.field.output_projection, torch.nn.Linear)
        assert torch.allclose(
            torch.nn.functional.linear(
                h, part.field.output_projection.weight, part.field.output_projection.bias
            ),
            part.field(x),
            atol=1e-6,
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_last_maps_weights_are_the_models_own(name):
    imported = from_transformers(made(name).requires_grad_(False))
    part, x = imported.depth.sublayers[1], torch.randn(1, 3, imported.config.width)
    before = part.field(x)
    part.field.output_projection.weight.mul_(2)
    if part.field.output_projection.bias is not None:
        part.field.output_projection.bias.mul_(2)
    assert torch.allclose(part.field(x), 2 * before, rtol=1e-5)


def test_a_map_that_ends_in_something_else_names_no_last_weights():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.body(x) * self.gate(x).sigmoid()

    chain = ModuleChain([Gated()])
    chain.find_output_projection(torch.randn(1, 2, 4))
    for ask in (
        lambda: chain.output_projection,
        lambda: chain.pre_projection(torch.randn(1, 2, 4)),
    ):
        with pytest.raises(ConfigError, match="Gated does not end in one linear map"):
            ask()


def test_the_last_linear_map_is_the_one_that_acts_last_whatever_the_order_of_registration():
    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)

        def forward(self, x):
            return self.down(self.up(x).relu())

    chain = ModuleChain([Backwards(), torch.nn.Dropout()]).eval()
    chain.find_output_projection(torch.randn(1, 2, 4))
    assert chain.output_projection is chain.stages[0].down


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", TEXTUAL)
def test_every_instrument_runs_on_every_family(name, tmp_path):
    made(name).save_pretrained(tmp_path)
    opened = open_model(tmp_path, dt=0.1)
    model, windows = opened.model, inputs(opened.model.model)[:, :5]
    tokens, targets = opened.pairs(windows)
    assert opened.causal == (name != "bert")
    assert model.depth.dt == model.config.dt == 0.1
    simulated = simulate(model, tokens)
    assert simulated.discrete_distance[-1] > 0
    assert all(0 < share <= 1 + 1e-12 for share in simulated.used)
    found = costate(model, tokens, targets, form="continuous")
    assert max(found.drift) < 1e-5
    for k in (0, 1):
        step = found.states[k], found.costates[k + 1]
        given = {
            "continuous": True,
            "segment": k,
            "time": found.times[k],
            "dt": 0.1,
            "regularization": Regularization(),
        }
        certificate = check_segment(
            model.depth.sublayers[k], step, found.starts[k], **given
        ).certificate
        bounded = model.config.placement in ("peri", "output")
        assert certificate.verdict == ("well-posed for bounded gains" if bounded else "degenerate")
        assert certificate.agrees, certificate.findings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "olmo2"])
def test_the_screening_of_an_imported_model_lacks_only_what_it_cannot_show(name):
    model = from_transformers(made(name).double().requires_grad_(False))
    text = inputs(model.model)
    result = screen(model, text[:, :-1], text[:, 1:], TINY, other=inputs(model.model, 3)[:, :-1])
    unknown = {step for step, finding in result.steps.items() if finding.verdict == "unknown"}
    lost = unknown | set(result.missing)
    assert not lost
    attention = result.steps["attention"]
    assert attention.quantities["attention path"] > 0
    if name == "olmo2":  # Emadi's theorem does not cover the norms on its queries and keys
        assert "norms act on its queries and keys" in attention.why
    else:
        assert all(layer.measured <= layer.bound for layer in attention.result.layers)
    assert "lack" in result.steps["initialisation"].why  # weights freshly drawn
    assert (result.placement, result.initialisation) == (model.config.placement, None)


@pytest.mark.slow
def test_the_screening_of_nanogpts_model_is_that_of_the_same_gpt(tmp_path):
    model = nanogpt(tmp_path / "ckpt.pt")
    opened = open_model(tmp_path, torch.float32)
    text = torch.arange(20).reshape(2, 10)
    tokens, targets = opened.pairs(text)
    assert torch.equal(targets, text[:, 1:])
    first, second = (
        screen(each.eval().requires_grad_(False), tokens, targets, TINY)
        for each in (opened.model, model)
    )
    assert first == second


def test_dt_of_nanogpts_model_is_changed_and_its_weights_are_not(tmp_path):
    model = nanogpt(tmp_path / "ckpt.pt")
    opened = open_model(tmp_path / "ckpt.pt", torch.float32, dt=0.25).model
    assert opened.config.dt == opened.depth.dt == 0.25
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), opened.state_dict().values(), strict=True)
    )
    tokens = torch.arange(8)
    expected = GPT(dataclasses.replace(model.config, dt=0.25))
    expected.load_state_dict(model.state_dict())
    assert torch.equal(opened(tokens)[0], expected(tokens)[0])


def test_a_model_that_fills_gaps_is_asked_for_hidden_tokens(tmp_path):
    made("bert").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    opened = open_model(tmp_path)
    mask = opened.tokeniser().mask
    text = torch.arange(2, 18).reshape(1, 16)
    tokens, targets = opened.pairs(text, mask)
    hidden = targets != -1
    assert mask == WORDS.index("[MASK]")
    assert hidden.sum() == 3
    assert (tokens[hidden] == mask).all()
    assert torch.equal(torch.where(hidden, targets, tokens), text[:, :-1])
    alone, same = opened.pairs(text)
    assert torch.equal(alone, same)
    assert not torch.equal(
        torch.tensor(costate(opened.model, tokens, targets).loss),
        torch.tensor(costate(opened.model, alone, same).loss),
    )


@pytest.mark.slow
def test_a_model_without_a_head_has_a_stand_in_for_a_loss_and_says_so(tmp_path):
    model = made("gpt2").transformer
    model.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    text = inputs(model)
    assert (opened.predicts, opened.loss) == (False, "random")
    assert "a stand-in" in opened.described
    assert len(simulate(opened.model, text).mean_abs) == 7
    assert float(costate(opened, *opened.pairs(text)).costates[0].norm()) > 0


def test_text_goes_through_the_tokenizer_beside_the_model(tmp_path):
    save_tokenizer(tmp_path)
    tokeniser = find_tokeniser(tmp_path, VOCABULARY)
    assert tokeniser.encode(b"the depth is a time .").tolist() == [2, 3, 4, 5, 6, 7]
    assert f"the tokenizer in '{tmp_path}'" in tokeniser.description
    with pytest.raises(ConfigError, match=r"byte 4 is no UTF-8.*--ids"):
        tokeniser.encode(b"the \xff")


def test_reading_a_tokenizer_opens_no_socket_and_runs_no_code(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    save_tokenizer(tmp_path)
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    find_tokeniser(tmp_path, VOCABULARY)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(
        json.dumps(
            json.loads(settings.read_text()) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
        )
    )
    assert find_tokeniser(tmp_path, VOCABULARY).encode(b"depth").tolist() == [3]
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(ConfigError, match="names code of its own, which is never run"):
        find_tokeniser(tmp_path, VOCABULARY)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', '{"model": {"type": "Magic"}}', ""])
def test_a_damaged_tokenizer_is_one_line(content, tmp_path):
    made("gpt2").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"the tokenizer in .* does not work") as caught:
        find_tokeniser(tmp_path, VOCABULARY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": ""}, "tokenizer.json: it is empty"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: it lacks 'model' and 'added_tokens'"),
        ({"tokenizer.json": "no"}, "tokenizer.json: it is no JSON"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: it holds no JSON object"),
        ({"vocab.json": '{"a": 0}'}, "vocab.json: it needs merges.txt next to it"),
        ({"tokenizer.model": "damaged"}, "tokenizer.model: it is no SentencePiece model"),
        ({"vocab.txt": "a\n"}, "vocab.txt: it makes no token of the text"),
    ],
)
def test_a_tokenizer_that_does_not_work_names_its_file_and_the_way_out(files, words, tmp_path):
    made("gpt2").save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        find_tokeniser(tmp_path, VOCABULARY).encode(b"some text")
    assert "remove it and give token ids by --ids FILE" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "encoding", "words"),
    [
        ("tokenizer.json", "utf-8-sig", "begins with a byte order mark"),
        ("tokenizer_config.json", "utf-16", "is UTF-16"),
        ("special_tokens_map.json", "utf-16-le", "is UTF-16"),
        ("vocab.txt", "utf-8-sig", "begins with a byte order mark"),
    ],
)
def test_a_tokenizers_text_that_is_not_plain_utf_8_is_named(name, encoding, words, tmp_path):
    save_tokenizer(tmp_path)
    text = "{}"
    if (tmp_path / name).exists():
        text = (tmp_path / name).read_text()
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match=rf"{name}' {words}, .* UTF-8 without a byte order mark"):
        find_tokeniser(tmp_path, VOCABULARY)


def test_without_a_tokenizer_bytes_are_the_tokens_and_doubt_is_said(tmp_path):
    assert find_tokeniser(tmp_path, 256).description == "bytes as token ids"
    assert find_tokeniser(tmp_path, 256).encode(b"\x00\xff").tolist() == [0, 255]
    assert "probably mean another text" in find_tokeniser(tmp_path, 50304).description
    with pytest.raises(ConfigError, match=r"too small for bytes \(256\): give token ids by --ids"):
        find_tokeniser(tmp_path, 65)
    module = find_tokeniser(
        None, 65
    )  # of the user's own, with no file that a tokenizer could be beside
    assert module.encode(b"\x00\x40\x41\xff").tolist() == [0, 64, 0, 60]
    assert "modulo 65" in module.description


def test_ids_are_read_as_numpy_and_nanogpt_write_them(tmp_path):
    ids = np.array([0, 7, 65535])
    np.save(tmp_path / "a.npy", ids)
    ids.astype("<u2").tofile(tmp_path / "val.bin")
    assert [read_ids(tmp_path / name).tolist() for name in ("a.npy", "val.bin")] == [
        [0, 7, 65535]
    ] * 2


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: np.save(p, np.zeros((2, 2), dtype=int)), "int64 of shape"),
        (lambda p: np.save(p, np.zeros(3)), "float64 of shape"),
        (lambda p: np.save(p, np.array([{}, {}]), allow_pickle=True), "no array of numpy.save"),
        (lambda p: p.write_bytes(b""), "no array of numpy.save"),
        (lambda p: p.write_bytes(pickle.dumps([1, 2])), "no array of numpy.save"),
        (lambda p: None, "No such file"),
    ],
)
def test_files_that_hold_no_row_of_integers_are_refused(write, words, tmp_path):
    path = tmp_path / "a.npy"
    write(path)
    with pytest.raises(ConfigError, match=words):
        read_ids(path)


@pytest.mark.parametrize("name", ["book.txt", "val", "ids.npz", "tokens.BIN"])
def test_ids_in_a_file_of_another_name_are_refused_with_what_to_do(name, tmp_path):
    (tmp_path / name).write_bytes(b"of even length")
    with pytest.raises(
        ConfigError, match=rf"{name}' is neither .bin .* nor .npy .*give text by --file"
    ):
        read_ids(tmp_path / name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [transformers.BertForPreTraining, transformers.BertForMaskedLM])
def test_heads_of_other_names_are_the_models_logits(make):
    torch.manual_seed(0)
    own = make(
        transformers.BertConfig(**SMALL, max_position_embeddings=32, return_dict=False)
    ).eval()
    model, text = from_transformers(own), torch.arange(1, 9).reshape(2, 4)
    expected = own(text)[0]
    assert expected.shape == (2, 4, VOCABULARY)
    assert torch.allclose(model(text)[0], expected, atol=1e-5)


def test_a_head_of_something_else_is_said_and_the_depth_goes_on_working():
    config = transformers.BertConfig(**SMALL, max_position_embeddings=32)
    model, text = (
        from_transformers(transformers.BertForQuestionAnswering(config).eval()),
        torch.arange(1, 9).reshape(2, 4),
    )
    assert len(model.trajectory(text).states) == 7
    with pytest.raises(
        ConfigError,
        match="BertForQuestionAnswering returns start_logits, end_logits, not one of logits",
    ):
        model(text)


def test_a_model_whose_weights_are_all_read_on_demand_is_opened(tmp_path):
    """OLMo's norms have no weights, so that none stays in memory."""
    small_model("olmo").save_pretrained(tmp_path)
    opened = open_model(tmp_path, on_demand=True)
    assert opened.model.depth.streamed
    assert list(opened.parameters()) == []


@pytest.mark.slow
def test_weights_of_more_than_a_quarter_of_the_memory_come_on_demand_unless_told_otherwise(
    tmp_path, monkeypatch
):
    made("gpt2").save_pretrained(tmp_path)
    assert not open_model(tmp_path).model.depth.streamed
    assert open_model(tmp_path, on_demand=True).model.depth.streamed
    size = sum(p.numel() for p in made("gpt2").parameters()) * 8
    monkeypatch.setattr("ctrans.base.memory.memory", lambda: 2 * size)
    assert open_model(tmp_path).model.depth.streamed
    assert not open_model(tmp_path, on_demand=False).model.depth.streamed
    monkeypatch.setattr("ctrans.base.memory.memory", lambda: size // 2)
    with pytest.raises(
        ConfigError, match=r"--dtype, or read the weights on demand \(on_demand=True, --stream\)"
    ):
        open_model(tmp_path, on_demand=False)


def test_rotary_tables_keep_their_precision_in_bfloat16(tmp_path):
    made("llama").save_pretrained(tmp_path)
    model = open_model(tmp_path, torch.bfloat16).model.model
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_words_without_a_whole_tokenizer_are_read_by_the_familys_own(tmp_path):
    made("bert").save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "depth"])
    )
    tokeniser = find_tokeniser(tmp_path, VOCABULARY)
    assert tokeniser.encode(b"the depth").tolist() == [5, 6]
    assert tokeniser.mask == 4


@pytest.mark.slow
def test_experts_are_opened_in_float64_and_only_what_needs_last_weights_is_left_out(tmp_path):
    torch.manual_seed(0)
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=4)
    )
    learned(experts.eval(), 0.1).save_pretrained(tmp_path)
    model = open_model(tmp_path).model
    text = inputs(model.model)
    assert isinstance(model.depth.sublayers[0].field.output_projection, torch.nn.Linear)
    result = screen(model, text[:, :-1], text[:, 1:], TINY)
    reasons = result.steps["well-posedness"].missing.values()
    assert reasons
    assert all("MixtralSparseMoeBlock does not end in one linear map" in why for why in reasons)
    assert result.steps["forward"].result.mean_abs[-1] > 0


def test_what_a_model_says_against_running_is_one_line(tmp_path, monkeypatch):
    made("gpt2").save_pretrained(tmp_path)

    def fail(*_, **__):
        raise RuntimeError("no kernel\nfor Double")

    monkeypatch.setattr(transformers.models.gpt2.modeling_gpt2.GPT2MLP, "forward", fail)
    with pytest.raises(
        ConfigError, match="does not run in float64, choose another --dtype: no kernel for Double"
    ):
        open_model(tmp_path)


@pytest.mark.slow
def test_models_whose_sublayers_differ_in_placement_are_shown():
    model = from_transformers(made("gpt2").double().requires_grad_(False))
    model.depth.sublayers[1].output_norm = LayerNorm(model.config.width).double()
    model.config = dataclasses.replace(model.config, placement="pre/peri, pre")
    text = inputs(model.model)
    simulated = simulate(model, text)
    page = page_of({"simulate": {"command": "simulate", "placements": {"mixed": plain(simulated)}}})
    remarks = simulated_table({"mixed": Simulated(simulated)}).reasons["mixed"]
    assert "sublayers differ in their placement: pre/peri, pre" in remarks
    assert pictures(page)["simulate.png"]().startswith(b"\x89PNG")
    checked = check_model(model, text[:1, :2], text[:1, 1:3], thorough=True)
    assert checked.placement == "peri, pre"
    screened = as_object({"mixed": screen(model, text[:, :-1], text[:, 1:], TINY)})
    assert page_of({"screen": plain({"command": "screen", **screened})}).answers


@pytest.mark.parametrize(
    ("option", "value"),
    [("embed", abs), ("head", abs), ("example", torch.zeros(1)), ("blocks", "layers")],
)
def test_a_pickled_checkpoint_takes_no_parts_of_a_module(tmp_path, option, value):
    (tmp_path / "ckpt.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"^{option} given for"):
        open_model(tmp_path / "ckpt.pt", **{option: value})


def test_a_number_of_heads_too_long_to_print_is_named():
    with pytest.raises(ConfigError, match="heads = a number of 5001 digits"):
        open_model(
            GPT(GPTConfig(vocab_size=8, context=8, depth=1, width=8, heads=2)), heads=10**5000
        )
