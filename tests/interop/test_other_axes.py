"""States whose channels are not last, or whose sequences are not first: images, alignments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesHeads, ExposesWeights
from ctrans.interop import open_model
from solvers import ConfigError

WIDTH = 16
HEADS = 2
SIDE = 4


class NormOfChannels(nn.Module):
    """LayerNorm of the second axis, with gains (1, width, 1, 1) or one for each channel."""

    def __init__(self, with_axes):
        super().__init__()
        shape = (1, WIDTH, 1, 1) if with_axes else (WIDTH,)
        self.gain = nn.Parameter(1 + 0.3 * torch.randn(shape))
        self.offset = nn.Parameter(0.3 * torch.randn(shape))

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
        if self.gain.dim() == 1:
            return normed * self.gain[:, None, None] + self.offset[:, None, None]
        return normed * self.gain + self.offset


class AttentionOfImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Conv2d(WIDTH, 3 * WIDTH, 1)
        self.out = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        q, k, v = self.maps(x).flatten(2).unflatten(1, (3, HEADS, -1)).mT.unbind(1)
        self.rows = (q @ k.mT / 2).softmax(-1)
        return self.out((self.rows @ v).mT.flatten(1, 2).view_as(x))


class Images(nn.Module):
    def __init__(self, with_axes):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.norms = nn.ModuleList(NormOfChannels(with_axes) for _ in range(4))
        ffns = [
            nn.Sequential(nn.Conv2d(WIDTH, 32, 1), nn.GELU(), nn.Conv2d(32, WIDTH, 1))
            for _ in range(2)
        ]
        self.fields = nn.ModuleList([AttentionOfImages(), ffns[0], AttentionOfImages(), ffns[1]])
        self.head = nn.Linear(WIDTH, 5)

    def states(self, x):
        states = [self.patches(x)]
        for norm, field in zip(self.norms, self.fields, strict=True):
            states.append(states[-1] + field(norm(states[-1])))
        return states

    def forward(self, x):
        return self.head(self.states(x)[-1].mean((2, 3)))


def pictures(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 2 * SIDE, 2 * SIDE, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("with_axes", [False, True])
def test_convolutions_of_one_pixel_are_linear_maps_of_channels(with_axes):
    torch.manual_seed(0)
    module = Images(with_axes).double().eval()
    opened = open_model(module, example=pictures())
    assert not opened.model.config.unread
    parts = opened.depth.sublayers
    assert [part.kind for part in parts] == ["attention", "ffn"] * 2
    with torch.no_grad():
        found = opened.trajectory(pictures(1)).states
        for x, own in zip(found, module.states(pictures(1)), strict=True):
            torch.testing.assert_close(x, own.flatten(2).mT)
    for part, norm in zip(parts, module.norms, strict=True):
        torch.testing.assert_close(part.input_norm.gamma, norm.gain.flatten())
        torch.testing.assert_close(part.input_norm.beta, norm.offset.flatten())
        assert part.input_norm.eps == pytest.approx(1e-6)
    attention, ffn = parts[:2]
    assert isinstance(attention.field, ExposesHeads)
    rows = attention.field.probabilities(attention.given(found[0]))
    torch.testing.assert_close(rows, module.fields[0].rows)
    assert isinstance(ffn.field, ExposesWeights)
    up, down = (matrix.weight for matrix in ffn.field.matrices())
    torch.testing.assert_close(up, module.fields[1][0].weight.flatten(1))
    torch.testing.assert_close(down, module.fields[1][2].weight.flatten(1))


class AttentionOfAlignments(nn.Module):
    """Of states (rows, columns, sequences, width): tied over the rows, or in each column."""

    def __init__(self, tied):
        super().__init__()
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.tied = tied

    def forward(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        if self.tied:
            rows = torch.einsum("rinhd,rjnhd->hnij", q, k).softmax(-1)
            y = torch.einsum("hnij,rjnhd->rinhd", rows, v)
        else:
            rows = torch.einsum("icnhd,jcnhd->hcnij", q, k).softmax(-1)
            y = torch.einsum("hcnij,jcnhd->icnhd", rows, v)
        return self.out(y.flatten(-2))


class Alignments(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        ffn = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.fields = nn.ModuleList(
            [AttentionOfAlignments(tied=True), AttentionOfAlignments(tied=False), ffn]
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 20)

    def states(self, tokens):
        states = [self.table(tokens).permute(1, 2, 0, 3)]
        for norm, field in zip(self.norms, self.fields, strict=True):
            states.append(states[-1] + field(norm(states[-1])))
        return states

    def forward(self, tokens):
        return self.head(self.states(tokens)[-1]).permute(2, 0, 1, 3)


def test_sequences_may_be_on_any_axis_of_states():
    torch.manual_seed(0)
    module = Alignments().double().eval()
    tokens = torch.randint(20, (2, 3, 5))
    opened = open_model(module, example=tokens)
    parts = opened.depth.sublayers
    assert [part.kind for part in parts] == ["attention", "attention", "ffn"]
    assert {part.placement.name for part in parts} == {"pre"}
    tokens = torch.randint(20, (2, 3, 5))
    with torch.no_grad():
        for x, own in zip(opened.trajectory(tokens).states, module.states(tokens), strict=True):
            torch.testing.assert_close(x, own.permute(2, 0, 1, 3).flatten(1, 2))
    said = "are of groups of its 15 tokens, such as windows or columns"
    assert opened.described.count(said) == 2
    assert "FFN:" not in opened.described
    assert isinstance(parts[2].field, ExposesWeights)


class LocalImages(Images):
    """Its vectors are most often as long as its images, not as its channels."""

    def __init__(self):
        super().__init__(with_axes=True)
        self.of_positions = nn.Sequential(*[nn.LayerNorm(SIDE) for _ in range(9)])

    def forward(self, x):
        moved = self.of_positions(torch.ones(SIDE, SIDE, dtype=x.dtype))
        return super().forward(x) + moved.sum()


def test_the_axis_along_which_maps_act_counts_channels():
    torch.manual_seed(0)
    opened = open_model(LocalImages().double().eval(), example=pictures())
    assert opened.model.config.width == WIDTH
    assert opened.model.config.placement == "pre"
    assert not ctrans.diagnose(opened, pictures()).readings.get("not finite")


def test_an_ffn_whose_output_is_scaled_says_what_follows_its_last_map():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, WIDTH)
            self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, 20)

        def forward(self, tokens):
            x = self.table(tokens)
            for up, down in zip(self.up, self.down, strict=True):
                x = x + F.softplus(down(up(x).tanh()))
            return self.head(x)

    opened = open_model(Scaled().double().eval(), example=torch.randint(20, (2, 5)))
    assert "it does not end in a linear map: softplus follows its last one" in opened.described


class InWindows(nn.Module):
    """Attention in windows of an image (batch, height, width, channels), which may be shifted."""

    def __init__(self, shift, size, of_torch):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.of_torch = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if of_torch else None
        self.shift = shift
        self.size = size

    def windows(self, x):
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = F.pad(x, (0, 0, 0, -SIDE % self.size, 0, -SIDE % self.size))
        x = x.unflatten(2, (-1, self.size)).unflatten(1, (-1, self.size))
        return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def whole(self, windows):
        count = -(-SIDE // self.size)
        x = windows.unflatten(0, (-1, count, count)).unflatten(3, (self.size, self.size))
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :SIDE, :SIDE]
        return torch.roll(x, (self.shift, self.shift), (1, 2))

    def forward(self, x):
        windows = self.windows(self.norm(x))
        if self.of_torch is not None:
            return x + self.whole(self.of_torch(windows, windows, windows, need_weights=False)[0])
        q, k, v = self.maps(windows).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        averages = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x + self.whole(self.out(averages))


class OfWindows(nn.Module):
    def __init__(self, *options):
        super().__init__()
        self.patches = nn.Linear(3, WIDTH)
        self.parts = nn.ModuleList(InWindows(*options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.patches(x)
        for part in self.parts:
            x = part(x)
        return self.head(x.mean((1, 2)))


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_in_windows_are_rows_of_whole_sequences(shift, of_torch):
    torch.manual_seed(0)
    module = OfWindows(shift, 2, of_torch).double().eval()
    x = torch.randn(2, SIDE, SIDE, 3, dtype=torch.float64)
    opened = open_model(module, example=x)
    attention = opened.depth.sublayers[0]
    states = opened.embed(x)
    given = attention.given(states)
    rows = attention.field.probabilities(given)
    part = module.parts[0]
    if of_torch:
        maps = [part.of_torch.in_proj_weight, part.of_torch.in_proj_bias]
        scale = (WIDTH // HEADS) ** -0.5
    else:
        maps = [part.maps.weight, part.maps.bias]
        scale = 1.0
    q, k, _ = F.linear(given, *maps).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    side = (torch.arange(SIDE) - shift) % SIDE // 2
    window = (2 * side[:, None] + side).flatten()
    apart = window[:, None] != window
    expected = (scale * q @ k.mT).masked_fill(apart, -torch.inf).softmax(-1)
    torch.testing.assert_close(rows, expected)


def test_windows_with_places_that_are_filled_in_have_no_rows_of_whole_sequences():
    """A row of a softmax weighs what is filled in, so that the weights of tokens sum to less."""
    torch.manual_seed(0)
    module = OfWindows(0, 3, False).double().eval()
    x = torch.randn(2, SIDE, SIDE, 3, dtype=torch.float64)
    opened = open_model(module, example=x)
    states = opened.trajectory(x).states
    torch.testing.assert_close(opened.head(states[-1]), module(x))
    assert not hasattr(opened.depth.sublayers[0].field, "probabilities")


class Rolled(nn.Module):
    """Windows of four tokens that are shifted by two."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def rows(self, x):
        windows = self.norm(x).roll(-2, 1).unflatten(1, (-1, 4)).flatten(0, 1)
        q, k, self.v = self.maps(windows).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT).softmax(-1)

    def forward(self, x):
        y = (self.rows(x) @ self.v).transpose(1, 2).flatten(-2)
        return x + self.out(y).unflatten(0, (len(x), -1)).flatten(1, 2).roll(2, 1)


def test_rows_of_a_single_shifted_window_are_those_of_its_tokens():
    torch.manual_seed(0)
    parts = [Rolled(), Rolled()]
    module = nn.Sequential(nn.Linear(3, WIDTH), *parts, nn.Linear(WIDTH, 5)).double().eval()
    opened = open_model(module, example=torch.randn(2, 8, 3, dtype=torch.float64))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    attention = opened.depth.sublayers[0]
    states = opened.embed(x)
    rows = attention.field.probabilities(attention.given(states))
    expected = parts[0].rows(states).roll((2, 2), (-2, -1))
    torch.testing.assert_close(rows, expected)


class ByChannel(nn.Module):
    """Each channel of a series is a sequence of its own, as PatchTST's."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, series):
        x = self.patches(series.mT.unflatten(-1, (-1, 4)).flatten(0, 1))
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            y = norm(x)
            y, self.rows = attention(y, y, y, average_attn_weights=False)
            x = x + y
        return self.head(x).unflatten(0, (len(series), -1)).mean((1, 2))


@pytest.mark.parametrize("sequences", [2, 5])  # of a channel there are 5 tokens
def test_rows_of_channels_are_blocks_of_whole_rows(sequences):
    torch.manual_seed(0)
    module = ByChannel().double().eval()
    series = torch.randn(sequences, 20, 3, dtype=torch.float64)
    opened = open_model(module, example=series)
    assert opened.model.config.placement == "pre"
    states = opened.trajectory(series).states
    attention = opened.depth.sublayers[1]
    rows = attention.field.probabilities(attention.given(states[1]))
    module(series)
    own = module.rows.unflatten(0, (sequences, 3))
    for channel in range(3):
        places = slice(5 * channel, 5 * channel + 5)
        torch.testing.assert_close(rows[:, :, places, places], own[:, channel])
    whole = torch.ones(sequences, HEADS, 15, dtype=torch.float64)
    torch.testing.assert_close(rows.sum(-1), whole)


class OfTwoGroups(nn.Module):
    """Tokens of a grid are in rows for one part, and in columns for the next, as Crossformer's."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        grid = x
        for i in (0, 2):
            rows = self.norm(grid.flatten(0, 1))
            rows = self.norm(rows + self.maps[i](rows.cumsum(1)))
            columns = rows.unflatten(0, x.shape[:2]).transpose(1, 2).flatten(0, 1)
            columns = self.norm(columns).tanh()
            columns = self.norm(columns + self.maps[i + 1](columns.cumsum(1)))
            grid = columns.unflatten(0, (len(x), -1)).transpose(1, 2)
        return grid


def test_tokens_in_two_kinds_of_groups_are_refused():
    with pytest.raises(ConfigError, match="grouped in another way from part to part"):
        open_model(OfTwoGroups().eval(), example=torch.randn(3, 4, 2, WIDTH))


class ByTheBatch(nn.Module):
    """What it does depends on the mean over the batch, as the periods of TimesNet."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for linear in self.maps:
            x = x + linear(x.cumsum(1) - x.mean(0, keepdim=True)).tanh()
        return x


class ImagesByTheBatch(ByTheBatch):
    """Does not run with its axes turned."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)

    def forward(self, x):
        return super().forward(self.patches(x).flatten(2).mT)


@pytest.mark.parametrize(
    ("kind", "shape"), [(ByTheBatch, (3, 4, WIDTH)), (ImagesByTheBatch, (2, 3, 4, 4))]
)
def test_sequences_that_read_each_other_are_named(kind, shape):
    with pytest.raises(ConfigError, match="code that averages over the batch"):
        open_model(kind().eval(), example=torch.randn(shape))
