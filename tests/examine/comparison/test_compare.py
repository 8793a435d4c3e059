"""Where two models part: shares that add up, rounding that is told from changes, and their names."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ctrans
from ctrans.examine.compared import answer
from ctrans.examine.comparison.compare import compare
from ctrans.examine.comparison.output_relations import output_relation, relation_of_rows
from ctrans.examine.comparison.part_rounding import PartRounding
from ctrans.examine.comparison.parts import ModelParts
from ctrans.examine.comparison.rounding_noise import Draws, RoundingNoise, changed_by
from ctrans.examine.comparison.weight_pairs import pairs_of, relations_of
from ctrans.examine.comparison.weight_relations import FORMATS, relation_of
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError

WIDTH = 16


def gpt(dtype=torch.float64, **options):
    defaults = {"depth": 3, "width": WIDTH, "heads": 2, "context": 8, "placement": "pre"}
    return GPT(GPTConfig(**defaults | options), seed=0).to(dtype)


def text():
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def moved(model, block, size, name="out"):
    """A copy in which a matrix of the attention of that block is changed by so much."""
    other = copy.deepcopy(model)
    field = other.depth.sublayers[2 * block].field
    weight = getattr(field, name).weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight.add_(size * direction.to(weight.dtype))
    return other


def matrix_name(model):
    """The name of the attention's last matrix."""
    field = model.depth.sublayers[0].field
    return next(name for name, part in field.named_children() if part is field.output_projection)


@pytest.mark.cases(1)
def test_shares_add_up_to_the_difference_of_the_losses():
    model = gpt()
    other = moved(model, 1, 0.3, matrix_name(model))
    other = moved(other, 2, 0.2, matrix_name(model))
    tokens, targets = text()

    found = compare(model, other, tokens, targets)

    own = model(tokens, targets)[1] - other(tokens, targets)[1]
    assert found.difference == pytest.approx(-float(own.detach()), abs=1e-12)
    assert sum(part.share for part in found.parts) == pytest.approx(found.difference, abs=1e-12)
    assert [part.name for part in found.changed] == ["block 1, attention", "block 2, attention"]


@pytest.mark.cases(1)
def test_first_order_shares_converge_at_order_two():
    """<P, e> leaves O(|e|^2): a tenth of the change leaves a hundredth of the error."""
    model = gpt()
    tokens, targets = text()
    errors = []
    for size in (1e-3, 1e-4):
        part = compare(model, moved(model, 1, size, matrix_name(model)), tokens, targets).parts[3]
        errors.append(abs(part.share - part.first_order))

    assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)


@pytest.mark.cases(1)
def test_equal_models_are_equal_and_stay_as_they_are():
    model = gpt().train()
    before = copy.deepcopy(model.state_dict())
    tokens, targets = text()

    found = compare(model, copy.deepcopy(model), tokens, targets)

    assert found.equal
    assert found.difference == 0
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_lower_precision_is_rounding(dtype):
    model = gpt()
    tokens, targets = text()

    found = compare(model, copy.deepcopy(model).to(dtype), tokens, targets)

    assert not found.changed
    assert not found.equal
    assert max(part.ratio for part in found.parts) > 0.1, "rounding is not overrated"


@pytest.mark.slow
def test_rounding_of_the_loss_is_that_of_passes_of_the_whole_model():
    """Part by part with costates, against 60 passes of the whole model with random rounding."""
    model = gpt()
    tokens, targets = text()
    parts = ModelParts(model, targets)
    noise = PartRounding(parts, torch.float32, torch.float64, [])
    with torch.no_grad():
        loss = parts.loss_of(parts.last_from(0, tokens))
        squares = [noise.of_loss(tokens, loss) ** 2 for _ in range(20)]

    found = compare(model, copy.deepcopy(model).float(), tokens, targets)

    # three samples of the last operation, the loss itself, which makes most of it
    assert 0.25 < found.rounding_of_loss / (sum(squares) / 20) ** 0.5 < 4


@pytest.mark.cases(1)
def test_a_change_of_ten_times_rounding_is_seen_beside_rounding():
    model = gpt(torch.float32)
    tokens, _ = text()
    other = moved(model, 1, 1e-5, matrix_name(model))

    found = compare(model, other, tokens)

    assert [part.name for part in found.changed] == ["block 1, attention"]
    assert found.stage.name == "output map"


@pytest.mark.cases(1)
def test_a_users_module_and_its_port():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 32)
            self.down = nn.Linear(32, WIDTH)
            self.scale = 1.0

        def forward(self, x):
            return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 50)

        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Model().eval()
    port = copy.deepcopy(model)
    port.blocks[1].scale = 0.9
    ids = torch.randint(0, 50, (2, 9))

    found = ctrans.compare(model, port, ids[:, :-1], ids[:, 1:])

    assert found.changed[0].name.startswith("block 1")
    assert found.stage.relation == "times 0.9"


class Halved(nn.Module):
    """x/2 + f(x), where another model has x + f(x)."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.factor * x + self.map(x).tanh()


class OfFactors(nn.Module):
    def __init__(self, factors):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Halved(factor) for factor in factors)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.cases(1)
def test_a_factor_on_the_state_alone_is_a_change():
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    first = OfFactors((1.0, 1.0, 1.0)).eval()

    found = ctrans.compare(first, OfFactors((1.0, 0.5, 1.0)).eval(), ids)

    assert not found.equal
    assert found.changed[0].name.startswith("block 1")
    assert found.changed[0].defect > 0.1


@pytest.mark.cases(1)
def test_a_weight_that_the_text_does_not_show_is_named():
    model = gpt(tied=False)
    other = copy.deepcopy(model)
    tokens, _ = text()
    unread = next(i for i in range(256) if i not in tokens)
    with torch.no_grad():
        other.token_embedding.weight[unread] += 1

    found = compare(model, other, tokens)
    said = answer("a", "b", found)

    assert found.equal
    assert said.mark == "note"
    assert "token_embedding.weight" in said.text


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(3, 4, dtype=torch.complex64),
        torch.arange(12).reshape(3, 4),
        torch.ones(3, 4, dtype=torch.bool),
    ],
)
def test_a_buffer_of_any_kind_that_differs_is_named(buffer):
    model = nn.Module()
    model.register_buffer("table", buffer)
    model.register_buffer("batches_seen", torch.tensor(3))
    other = copy.deepcopy(model)
    other.batches_seen += 1
    other.table[2, 1] = complex(1, 1e-3) if buffer.is_complex() else 0

    pairs, unmatched = pairs_of(model, other)

    assert not unmatched
    assert [pair.first_name for pair in pairs] == ["table"]
    relation = relation_of(pairs[0].first, pairs[0].second)
    assert relation.words == "row 2 of 3 differ"
    assert not relation.adds
    assert relation_of(model.table, model.table.clone()).kind == "equal"


@pytest.mark.parametrize("entry", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", [(8, 64), (48,)])
def test_entries_that_are_not_finite_have_a_relation_of_their_own(entry, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    other = weight.clone()
    other.view(-1)[5] = entry
    for first, second in ((weight, other), (other, weight)):
        relation = relation_of(first, second)
        assert relation.kind == "not finite"
        assert relation.words.startswith(f"1 of {weight.numel()} entries")
        assert not relation.adds
    assert relation_of(other, other.clone()).kind == "equal"
    assert relation_of(other, 3 * other).kind == "scaled"
    assert relation_of(1e308 * weight.double().sign(), -1e308 * weight.double().sign()).kind == (
        "opposite sign"
    )


@pytest.mark.parametrize(
    "targets",
    [
        lambda y: y.t().contiguous(),
        lambda y: y.flatten(),
        lambda y: y[:, :-1],
        lambda y: y[None],
        lambda y: y + 256,
        lambda y: y - 256,
        lambda y: y.double(),
    ],
)
def test_targets_are_one_for_each_token(targets):
    tokens, expected = text()
    model = gpt()
    with pytest.raises(ConfigError, match="targets"):
        ctrans.compare(model, model, tokens, targets(expected))


def test_broken_numbers_are_never_rounding():
    model = gpt()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.depth.sublayers[2].field.output_projection.weight[0, 0] = torch.nan
    tokens, _ = text()

    found = compare(model, other, tokens)

    assert found.changed[0].name == "block 1, attention"
    assert "not finite" in answer("a", "b", found).text


def test_two_models_with_the_same_nan_do_not_part_there():
    model = gpt()
    with torch.no_grad():
        model.depth.sublayers[2].field.output_projection.weight[0, 0] = torch.nan
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.depth.sublayers[4].field.output_projection.weight.mul_(2)
    tokens, _ = text()

    words = answer("a", "b", compare(model, other, tokens))

    assert words.text.startswith("a and b are both not finite from block 1, attention on, first in")
    assert words.mark == "bad"


def test_models_of_other_depths_are_refused():
    tokens, _ = text()
    with pytest.raises(ConfigError, match="6 and 4 sublayers"):
        compare(gpt(), gpt(depth=2), tokens)


RELATIONS = {
    "equal": lambda w: w.clone(),
    "rounded": lambda w: w.bfloat16().float(),
    "transposed": lambda w: w.t().clone(),
    "opposite sign": lambda w: -w,
    "scaled": lambda w: 3 * w,
    "rows in another order": lambda w: w.roll(4, 0),
    "columns in another order": lambda w: w.roll(4, 1),
    "some rows differ": lambda w: torch.cat([w[:2] + 1, w[2:]]),
    "slightly different": lambda w: w + 0.01 * w.flip(1),
    "unrelated": lambda w: torch.randn(w.shape, generator=torch.Generator().manual_seed(9)),
}


@pytest.mark.parametrize("kind", RELATIONS)
def test_relations_of_weights(kind):
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    assert relation_of(weight, RELATIONS[kind](weight)).kind == kind


def test_eight_bits_are_rounding_and_a_coarser_change_is_not():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / step).round() * step

    assert relation_of(weight, rounded).kind == "rounded"
    assert relation_of(weight, rounded.flip(1)).kind != "rounded"


def test_what_loses_more_than_rounding_is_no_rounding():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    of_two_values = 0.8 * weight.sign()
    cut_off = (1270 * weight).round().clamp(-127, 127) / 1270
    small = 1e-9 * weight

    assert relation_of(weight, of_two_values).kind != "rounded"
    assert relation_of(weight, cut_off).kind != "rounded"
    assert relation_of(small, small.half().float()).kind != "rounded"


@pytest.mark.parametrize("number_format", FORMATS)
def test_rounding_shows_where_what_it_takes_is_spread_over_its_cells(number_format):
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=draws, dtype=torch.float64)
    rounded = weight.to(number_format).double()
    assert relation_of(weight, rounded).evident
    assert relation_of(rounded, weight).evident
    eps = torch.finfo(number_format).eps
    for changed in (
        rounded * (1 + eps / 8),  # a factor
        rounded * (1 + eps / 100 * torch.randn_like(rounded)),  # a small change
    ):
        relation = relation_of(rounded, changed)
        assert (relation.kind, relation.evident) == ("rounded", False)


def near(weight):
    """A weight with changes far larger than roundings, and far smaller than the weight."""
    return weight * (1 + 1e-6 * torch.randn(48, generator=torch.Generator().manual_seed(1)))


WEIGHT = 0.02 * torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
FP8 = torch.float8_e4m3fn
HUGE = torch.cat([torch.full((1, 48), 1e5), WEIGHT[1:]])


@pytest.mark.parametrize(
    ("first", "second", "kind", "words"),
    [
        (WEIGHT, near(WEIGHT), "slightly different", "e-0"),
        (WEIGHT[0], near(WEIGHT[0]), "slightly different", "e-0"),
        (WEIGHT, torch.cat([near(WEIGHT)[:1], WEIGHT[1:]]), "some rows differ", "row 0"),
        (WEIGHT, WEIGHT * (1 + 2e-4), "scaled", "times 1 + 0.0002"),
        (WEIGHT, WEIGHT / 3 * 3, "rounded", "a few roundings"),
        (WEIGHT.double() / 3, (WEIGHT.double() / 3).float(), "rounded", "float32"),
        (WEIGHT.bfloat16(), (WEIGHT.bfloat16() * 1.01).bfloat16(), "slightly different", "%"),
        (WEIGHT.to(FP8), (WEIGHT * 1.3).to(FP8), "unrelated", "of its size"),
        (WEIGHT, WEIGHT.flip(0), "rows in another order", "rows reversed"),
        (HUGE, torch.cat([HUGE[:1], WEIGHT[1:] + 0.02]), "slightly different", "e-0"),
    ],
)
def test_a_small_difference_is_no_order_of_rows(first, second, kind, words):
    found = relation_of(first, second)
    assert (found.kind, words in found.words) == (kind, True), found


@pytest.mark.parametrize("number_format", FORMATS)
def test_gains_of_one_are_rounded_gains_only_where_the_model_is_rounded(number_format):
    draws = torch.Generator().manual_seed(0)
    first = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).double()
    with torch.no_grad():
        eps = torch.finfo(number_format).eps
        first[0].weight.normal_(generator=draws)
        first[1].weight.add_(eps / 5 * torch.randn(32, generator=draws).clamp(-2, 2))
    forgotten = copy.deepcopy(first)
    nn.init.ones_(forgotten[1].weight)
    saved = copy.deepcopy(first).to(torch.bfloat16).double()
    saved[0].weight.data = first[0].weight.detach().to(number_format).double()
    saved[1].weight.data = first[1].weight.detach().to(number_format).double()

    def kinds(second):
        pairs, _ = pairs_of(first, second)
        return {
            pair.first_name: each.kind
            for pair, each in zip(pairs, relations_of(pairs), strict=True)
        }

    assert kinds(forgotten)["1.weight"] not in ("equal", "rounded")
    assert kinds(forgotten)["0.weight"] == "equal"
    assert kinds(saved)["1.weight"] == "rounded"


OUTPUTS = {
    "scaled": lambda x: 0.7 * x,
    "shifted": lambda x: x + torch.arange(8.0),
    "scaled by channel": lambda x: x * torch.arange(1.0, 9.0),
    "scaled by token": lambda x: x * torch.arange(1.0, 7.0)[:, None],
    "some tokens": lambda x: torch.cat([x[:, :5], x[:, 5:].flip(-1)], 1),
    "zero": torch.zeros_like,
    "not finite": lambda x: x / 0.0,
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_relations_of_outputs(kind):
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))

    assert output_relation(x, OUTPUTS[kind](x), 0.0).kind == kind


def test_relations_of_rows():
    scores = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    rows = scores.masked_fill(later, -torch.inf).softmax(-1)

    assert relation_of_rows(rows, scores.softmax(-1)).kind == "mask"
    halved = (0.5 * scores).masked_fill(later, -torch.inf).softmax(-1)
    assert relation_of_rows(rows, halved).kind == "scores scaled"
    assert relation_of_rows(rows, rows.flip(1)).kind == "heads in another order"


def test_rounding_noise_has_the_size_of_its_unit_and_spares_exact_results():
    x = torch.rand(10_000, dtype=torch.float64) + 1
    with RoundingNoise(1e-3, Draws()):
        noisy = x * 1.0
        copied = x.clone()

        hidden = torch.full((9,), -torch.inf) + torch.ones(9)
        turned = torch.polar(x, x) * 1.0
        counts = torch.histc((torch.arange(40) % 4).float(), bins=4, min=0, max=3)
        positions = torch.arange(50).to(torch.float64)

    share = (noisy / x - 1).abs()
    assert counts.int().tolist() == [10] * 4, "or experts would get each other's tokens"
    assert torch.equal(positions, torch.arange(50).double())
    assert bool((hidden == -torch.inf).all()), "a mask that is added hides as before"
    assert 1e-4 < float((turned / torch.polar(x, x) - 1).abs().mean()) < 2e-3
    assert float(share.max()) <= 1e-3
    assert float(share.mean()) == pytest.approx(5e-4, rel=0.05)
    assert torch.equal(copied, x)


def test_changed_weights_are_put_back_to_the_bit():
    parameter = nn.Parameter(torch.rand(4))
    before = parameter.detach().clone()
    with changed_by({parameter: torch.ones(4)}):
        assert not torch.equal(parameter, before)
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("terms", [16, 256, 768, 4096])
@pytest.mark.parametrize("shape", ["square", "wide"])
def test_random_rounding_of_a_product_is_as_large_as_that_of_float32(terms, shape):
    """A product adds up its terms, and each partial sum is rounded."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (64, 64) if shape == "square" else (4, 4096)
    first = torch.randn(rows, terms, generator=generator)
    second = torch.randn(terms, columns, generator=generator)
    exact = first.double() @ second.double()
    error = float((first @ second - exact).norm())
    with RoundingNoise(torch.finfo(torch.float32).eps / 2, Draws()):
        moved = first.double() @ second.double()
    assert 0.1 < error / float((moved - exact).norm()) < 2


@pytest.mark.parametrize(("channels", "side", "stride"), [(3, 16, 16), (3, 4, 4), (64, 3, 1)])
def test_random_rounding_of_a_convolution_is_as_large_as_that_of_float32(channels, side, stride):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, channels, 32, 32, generator=generator)
    weight = torch.randn(256, channels, side, side, generator=generator)
    exact = F.conv2d(x.double(), weight.double(), stride=stride)
    error = F.conv2d(x, weight, stride=stride) - exact
    with RoundingNoise(torch.finfo(torch.float32).eps / 2, Draws()):
        moved = F.conv2d(x.double(), weight.double(), stride=stride) - exact
    assert 0.1 < float(error.norm() / moved.norm()) < 2
    assert float(error.abs().amax() / moved.abs().amax()) < 4


def test_a_complex_product_is_rounded_too():
    x = torch.ones(3, 3, dtype=torch.complex64)
    with RoundingNoise(1e-7, Draws()):
        assert torch.allclose(x @ x, 3 * x, rtol=1e-5)


def test_patches_of_an_image_in_float32_are_rounding():
    torch.manual_seed(0)
    settings = {"hidden_size": 768, "num_hidden_layers": 1, "intermediate_size": 64}
    config = transformers.ViTConfig(**settings, image_size=64, patch_size=16, num_labels=3)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(2, 3, 64, 64)
    found = ctrans.compare(copy.deepcopy(model).double(), model, images.double())
    assert found.parts[0].ratio > 0
    assert found.changed == []


def test_a_product_in_bfloat16_is_rounded_once():
    first = torch.ones(8, 512, dtype=torch.bfloat16)
    with RoundingNoise(torch.finfo(torch.bfloat16).eps / 2, Draws()):
        moved = first @ first.t()
    assert float((moved.float() / 512 - 1).abs().max()) <= torch.finfo(torch.bfloat16).eps


def test_a_float32_copy_of_a_wide_model_is_rounding():
    model = gpt(torch.float32, width=512, heads=4, depth=1, vocab_size=500, context=32)
    tokens = torch.arange(64).reshape(2, 32)
    found = ctrans.compare(copy.deepcopy(model).double(), model, tokens, tokens.flip(1))
    assert found.changed == []
    assert "Rounding explains every difference" in str(found)
