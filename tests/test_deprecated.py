"""Old names give what stands at the new place, with a warning; a row whose new name is gone is an error of the table."""

import importlib
import subprocess
import sys

import pytest
import torch

from ctrans.control import admissible_set
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.norm import RMSNorm
from ctrans.walk import Attempt, Instrument, walk
from solvers.deprecated import ALIASES
from tests.helpers import small_model, tokens


def at(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", ALIASES)
def test_an_old_name_is_the_new_one_and_says_so(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {ALIASES[old]}"):
        assert at(old) is at(ALIASES[old])


def test_a_moved_name_works_from_a_module_that_is_gone_and_from_one_that_is_there(monkeypatch):
    monkeypatch.setitem(ALIASES, "ctrans.gone.thing.Layers", "ctrans.depth.Depth")
    monkeypatch.setitem(ALIASES, "solvers.Integrate", "solvers.solve.solve")
    monkeypatch.setitem(ALIASES, "ctrans.Block", "ctrans.ode_block.ODEBlock")
    for old in ("ctrans.gone.thing.Layers", "solvers.Integrate", "ctrans.Block"):
        with pytest.warns(DeprecationWarning, match="works until the next version"):
            assert at(old) is at(ALIASES[old])


def test_a_module_that_is_gone_is_found_by_whoever_imports_it_first():
    code = "from ctrans.verify.convergence import own_methods; assert 'rk4' in own_methods()"
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], check=True)


def test_a_name_that_never_was_is_an_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        at("solvers.nonsense")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ctrans.nonsense")


def test_an_old_keyword_is_the_new_one_and_says_so():
    norm, active = RMSNorm(3), torch.tensor([True, True, False])
    given = {"norm": norm, "placement": "post", "state": norm(torch.ones(1, 3))}
    with pytest.warns(DeprecationWarning, match=r"admissible_set\(moving=...\) is now admissible_set\(active_channels=...\)"):
        assert admissible_set(**given, moving=active).words == admissible_set(**given, active_channels=active).words
    with pytest.raises(TypeError, match="twice"):
        admissible_set(**given, moving=active, active_channels=active)


def test_check_model_takes_its_regularization_by_the_old_keyword():
    model, text = small_model("peri", depth=1), tokens(1, 5)
    with pytest.warns(DeprecationWarning, match="remedy"):
        check_model(model, text[:, :-1], text[:, 1:], remedy=Regularization())


def test_an_instrument_that_still_has_of_text_gets_the_tokens_that_are_text():
    class Older(Instrument):
        def of_text(self, kept):
            self.told = kept

        def figures(self):
            return self.told

    model = small_model("pre")
    for instrument in (Older(), Attempt(Older())):
        with pytest.warns(DeprecationWarning, match="of_text is now kept"):
            (told,) = walk(model, tokens(), None, [instrument])
        assert told is None, "all tokens are text"
