"""`ctrans.diagnose` and the others take a module as it is; what they find is said in the user's own
names, and as text.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.interop.families import VOCABULARY as IDS
from ctrans.interop.families import small_model
from ctrans.measure.walk import states_of
from tests.interop.plain_modules import VOCABULARY, LanguageModel, ids


def language():
    torch.manual_seed(0)
    return LanguageModel().eval()


def pair():
    tokens = ids(tokens=8)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.slow
def test_a_plain_module_is_opened_and_what_is_found_has_its_own_names():
    model = language()
    nn.init.zeros_(model.stack[1].mix.proj.weight)
    model.ln.weight.data[3] = 0
    found = ctrans.diagnose(model, *pair())
    by_name = {finding.check: finding for finding in found.findings}
    assert (
        by_name["zero weight"].place
        == "block 1, attention (segment 2): the weight stack.1.mix.proj.weight"
    )
    assert by_name["dead gain outside the depth"].place == "ln"
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "zero weight (serious)" in text
    assert "stack.1.mix.proj.weight" in text
    assert (
        f"of {len(ctrans.diagnose(model, *pair()).examined) + len(found.unexamined)} kinds" in text
    )


class Counted(nn.Module):
    """A module that calls its number of blocks `depth`, its embedding `embed` and what is before
    its last map `model`.
    """

    def __init__(self):
        super().__init__()
        self.model = LanguageModel()
        self.depth, self.embed, self.model.out = 3, self.model.tok, nn.Identity()
        self.last = nn.Linear(self.embed.embedding_dim, VOCABULARY)

    def forward(self, idx):
        return self.last(self.model(idx))


@pytest.mark.slow
def test_attributes_of_our_names_make_no_module_one_of_ours():
    torch.manual_seed(0)
    module, (tokens, targets) = Counted().eval(), pair()
    nn.init.zeros_(module.last.weight)
    assert len(ctrans.simulate(module, tokens, reference=False).times) == 7
    findings = ctrans.diagnose(module, tokens, targets).findings
    assert "the weight last.weight" in {
        finding.place for finding in findings if finding.check == "zero weight"
    }


@pytest.mark.slow
def test_weights_that_are_not_finite_are_the_first_thing_said():
    model = language()
    model.stack[1].grow.weight.data[3, 3] = math.nan
    first = ctrans.diagnose(model, *pair()).findings[0]
    assert first.check == "not finite"
    assert first.place == "block 1, FFN (segment 3): the weight stack.1.grow.weight"


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mamba", "llama4_text"])
def test_a_hugging_face_model_is_opened_by_its_family_and_by_an_example_has_the_same_states(family):
    model, tokens = (
        small_model(family),
        torch.randint(3, IDS, (2, 6), generator=torch.Generator().manual_seed(0)),
    )
    found = ctrans.diagnose(model, tokens, tokens)
    by_family, by_example = ctrans.open_model(model), ctrans.open_model(model, example=tokens)
    assert str(found) == str(ctrans.diagnose(by_family, tokens, tokens))
    states = [states_of(each.depth, each.embed(tokens)) for each in (by_family, by_example)]
    assert len(states[0]) == len(states[1])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_loss_is_given_beside_the_module():
    model, (tokens, _) = language(), pair()
    found = ctrans.diagnose(
        model, tokens, torch.tensor([1, 2]), loss=lambda out, y: F.cross_entropy(out[:, -1], y)
    )
    assert "costates" not in found.missing
    assert ctrans.simulate(model, tokens, reference=False).placement == "pre"


@pytest.mark.slow
def test_what_is_close_to_a_limit_is_said_and_is_no_finding():
    model = language()
    model.stack[0].ln_a.weight.data[5] = 40.0  # a finding above 50
    found = ctrans.diagnose(model, *pair())
    assert "gain too large" not in {finding.check for finding in found.findings}
    assert found.near["gain too large"].value == pytest.approx(40)
    assert (
        "close to a limit: gain too large: block 0, attention (segment 0), the input norm"
        in " ".join(str(found).split())
    )


def test_the_longest_text_is_found_by_trying():
    opened = ctrans.open_model(language(), example=ids())
    assert opened.longest(128) == 16 == language().pos.num_embeddings
    assert opened.longest(9) == 9
    assert opened.vocabulary == VOCABULARY


def test_an_examination_in_inference_mode_is_the_one_outside():
    model = LanguageModel()
    tokens, targets = ids(), ids(seed=1)
    outside = [str(finding) for finding in ctrans.diagnose(model, tokens, targets).findings]
    with torch.inference_mode():
        made_inside = tokens.clone()
        inside = ctrans.diagnose(model, made_inside, targets.clone())
        ctrans.screen(model, made_inside, targets, "quick")
    assert [str(finding) for finding in inside.findings] == outside
