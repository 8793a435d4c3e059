"""Every family of `ctrans.interop.families`: the library's own states, logits and gradients, or a
refusal that says why.
"""

import pytest
import torch

from ctrans.interop import from_transformers, open_model
from ctrans.interop.block_calls import is_state
from ctrans.interop.example_inputs import EXAMPLES, main_input
from ctrans.interop.families import FAMILIES, VOCABULARY, found_family, small_model
from ctrans.interop.recorded_calls import CACHES
from docs._site.tables import DOCS, family_tables
from tests.helpers import learned

TOLERANCE = 1e-5
SUPPORTED = [name for name, family in FAMILIES.items() if not family.refused]


def made(name):
    return learned(small_model(name), 0.1)


def batch(model, count=2, tokens=9):
    generator = torch.Generator().manual_seed(0)
    if main_input(model) == "input_ids":
        return torch.randint(3, VOCABULARY, (count, tokens), generator=generator)
    like = EXAMPLES[main_input(model)](model)
    return torch.randn(count, *like.shape[1:], generator=generator)


def own_blocks(model):
    """The first list of as many modules as the config says. ALBERT calls one block again."""
    config = model.config
    if config.model_type == "albert":
        return model.albert.encoder.albert_layer_groups[0].albert_layers
    count = getattr(config, "num_hidden_layers", None) or config.encoder_layers
    return next(
        part
        for part in model.modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) == count
    )


def own_states(model, x):
    """What the library puts out after each of its blocks, and at the end."""
    seen, blocks = [], own_blocks(model)

    def note(block, args, output):
        parts = output if isinstance(output, tuple) else (output,)
        seen.append(next(part for part in parts if is_state(part)))

    handles = [block.register_forward_hook(note) for block in blocks]
    with torch.no_grad():
        output = model(**{main_input(model): x}, return_dict=True)
    for handle in handles:
        handle.remove()
    return seen, output


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SUPPORTED)
def test_states_after_each_block_and_what_the_head_gives_are_the_librarys(name):
    model = made(name)
    x, imported = batch(model), from_transformers(model)
    expected, output = own_states(model, x)
    with torch.no_grad():
        states = imported.trajectory(x).states
        each = imported.depth.per_block
        assert len(states) == each * len(expected) + 1
        for own, state in zip(expected, states[each::each], strict=True):
            assert torch.allclose(state, own, rtol=TOLERANCE, atol=TOLERANCE)
        head, own = imported.head(states[-1]), imported.adapter.tensor(output)
        assert torch.allclose(head, own, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SUPPORTED)
def test_maps_are_functions_of_any_state_and_length(name):
    """Contexts (masks, positions) are the model's for that length: the first tokens of a causal
    model do not feel the others.
    """
    imported = from_transformers(made(name))
    x = torch.randn(1, 6, imported.config.width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in imported.depth.sublayers:
            assert torch.allclose(part(x.expand(3, -1, -1))[2], part(x)[0], atol=1e-5)
            assert torch.allclose(part(x.unsqueeze(0)), part(x).unsqueeze(0), atol=1e-5)
            assert part(x[:, :4]).shape == (1, 4, imported.config.width)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].refused])
def test_of_what_is_no_sequence_of_segments_the_reason_is_said(name):
    imported = from_transformers(made(name))
    assert "unknown" in imported.config.placement
    assert FAMILIES[name].refused in str(imported.config)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_of_a_family_is_so(name):
    found = found_family(name)
    assert found.supported == (not FAMILIES[name].refused)
    if not found.supported:
        return
    model = made(name)
    imported, x = from_transformers(model), batch(model)
    assert found.placement == imported.config.placement
    for k, (part, state) in enumerate(
        zip(imported.depth.sublayers, imported.trajectory(x).states, strict=False)
    ):
        given = state if part.input_norm is None else part.input_norm(state)
        if found.bounds:
            longest = float(given.norm(dim=-1).max())
            assert float(part.field(given).norm(dim=-1).max()) <= part.field.bound().at(longest) * (
                1 + 1e-5
            ), (name, k)
        if found.last:
            assert torch.allclose(
                part.field.output_projection(part.field.pre_projection(given)),
                part.field(given),
                atol=1e-5,
            )
        if found.matrices:
            assert sum(matrix.last for matrix in part.field.matrices()) == (
                2 if found.parallel else 1
            )
    if not (found.bounds and found.theta and found.matrices and found.last):
        assert found.unread, f"{name} lacks something and does not say why"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "placement", "parallel", "length"),
    [
        ("gptj", "pre", True, 1.0),
        ("gpt_neox", "pre", True, 1.0),
        ("cohere2", "pre", True, 1.0),
        ("falcon", "pre", True, 1.0),
        ("granite", "pre", False, 0.22),
        ("glm4", "peri", False, 1.0),
        ("olmo3", "output", False, 1.0),
        ("mpnet", "post", False, 1.0),
        ("t5", "pre", False, 1.0),
        ("bloom", "pre", False, 1.0),
        ("mamba", "pre", False, 1.0),
    ],
)
def test_placement_and_length_are_found(name, placement, parallel, length):
    found = found_family(name)
    assert (found.placement, found.parallel, found.lengths) == (placement, parallel, (length,))


def test_attention_and_ffn_at_once_are_one_segment_whose_velocity_is_their_sum():
    imported = open_model(made("gpt_neox")).model
    assert (imported.depth.per_block, len(imported.depth.sublayers), imported.depth.times[-1]) == (
        1,
        3,
        3.0,
    )
    block = imported.adapter.blocks()[0]
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        context = imported.depth.sublayers[0].field.attention.adapter.block_context(0, x)
        attention = block.attention(block.input_layernorm(x), **context)[0]
        expected = attention + block.mlp(block.post_attention_layernorm(x))
        assert torch.allclose(imported.depth.sublayers[0].velocity(x), expected, atol=1e-5)


def test_a_recurrent_cache_is_not_filled_while_a_model_is_read():
    """Mamba gives its mixers a cache of states, which would make what they compute depend on what
    was computed before.
    """
    imported = from_transformers(small_model("mamba"))
    mixer = imported.depth.sublayers[0].field
    with torch.no_grad():
        x = imported.embed(torch.arange(1, 6).unsqueeze(0))
        context = mixer.adapter.block_context(0, x)
        assert [context[name] for name in CACHES if name in context] == [None]
        assert torch.equal(mixer(x), mixer(x))


@pytest.mark.slow
def test_the_page_of_families_says_what_is_found():
    """If not, `python -m docs._site.tables` writes it."""
    page = (DOCS / "howto" / "model-families.md").read_text()
    for table in family_tables([found_family(name) for name in FAMILIES]):
        assert table in page


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_is_opened_by_three_forward_passes_of_a_few_tokens(name):
    model = made(name)
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(next(iter(kwargs.values())).shape[:2].numel()),
        with_kwargs=True,
    )
    open_model(model)
    assert len(sizes) == 3
    assert max(sizes) <= 8
