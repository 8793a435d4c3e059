"""`ctrans.diagnose`, `ctrans.screen` and `ctrans.simulate` of any module: what is no model of ours is opened on the tokens given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.losses import Loss
from ctrans.interop.open_model import open_model
from ctrans.stability.diagnosis import diagnose as diagnosis
from ctrans.stability.diagnosis.diagnose import Diagnosis
from ctrans.stability.forward import simulation
from ctrans.stability.forward.simulation import Simulation
from ctrans.stability.screening import screen as screening
from ctrans.stability.screening.screen import Effort, Screening
from solvers import Method, Norm


def diagnose(
    model: Any,
    tokens: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    weight_decay: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """What is wrong with a model on a text, the most severe first, from one walk there and, with targets, back:
    `ctrans.stability.diagnosis.diagnose.diagnose` of a model, or of any module, which is opened on these tokens with that loss.

    - `model`: one of ctrans, another library's, any `nn.Module`, or the path of a checkpoint
    - `tokens`, `targets`: token ids, or whatever the model reads and its loss compares with (images, features); without targets, what
      needs a loss is in `Diagnosis.unknown`
    - `loss`: as `ctrans.open_model` takes it, a name of its losses or a function of output and targets; None is the model's own
    - `weight_decay`: that of its training, to be compared with dt lam*
    - `progress(k)`: called whenever segment k is done, on the way down and on the way back

    Raises ConfigError for a model that cannot be opened, in `open_model`'s words, and for a weight decay that is negative or not finite.
    """
    return diagnosis.diagnose(opened(model, tokens, loss), tokens, targets, weight_decay=weight_decay, progress=progress)


def screen(
    model: Any,
    tokens: Any,
    targets: Any,
    effort: str | Effort = "full",
    *,
    loss: str | Loss | None = None,
    other: Any = None,
    seed: int = 0,
    trained: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Screening:
    """Every verdict of the screening at the model's weights as they are, in one walk of these tokens there and back:
    `ctrans.stability.screening.screen.screen` of a model, or of any module, which is opened on these tokens with that loss.

    - `model`, `tokens`, `targets`, `loss`: as `diagnose` takes them; targets are needed unless the model has a loss of its own
    - `effort`: a name of `ctrans.stability.screening.screen.EFFORTS`, or such an object
    - `other`: another text of the same shape, for the transport step
    - `seed`: of perturbations and of the vectors that iterations start with
    - `trained`: whether the weights are other than those of the configuration's initialisation
    - `progress`: called with a word whenever a segment is done on the way down, on the way back or, where there is no loss and so no
      way back, for that too

    Raises ConfigError for a model that cannot be opened, where tokens, targets and the other text do not have one shape, and for an
    unknown effort.
    """
    return screening.screen(
        opened(model, tokens, loss), tokens, targets, effort, other=other, seed=seed, trained=trained, progress=progress
    )


def simulate(
    model: Any,
    tokens: Tensor,
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    norm: str | Norm | None = None,
    reference: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """X(t) of the model on those tokens by that method, and what theory says of it:
    `ctrans.stability.forward.simulation.simulate` of a model, or of any module, which is opened on these tokens.

    - `model`: as `diagnose` takes it
    - `tokens`: token ids, or what else the model reads as one tensor
    - `method`, `steps`, `rtol`, `atol`, `norm`: those of `solvers.solve`; Euler with one step is the discrete model
    - `reference`: whether the ODE is solved finely too; without it, distances to it are None
    - `progress(k)`: called for each segment done, of the trajectory, of the discrete model if the trajectory is another, and of the
      reference

    A trajectory that breaks off is returned up to there with its status. Raises ConfigError for a model that cannot be opened, and for
    a request that makes no sense.
    """
    return simulation.simulate(
        opened(model, tokens, None),
        tokens,
        method=method,
        steps=steps,
        rtol=rtol,
        atol=atol,
        norm=norm,
        reference=reference,
        progress=progress,
    )


def opened(model: Any, tokens: Any, loss: str | Loss | None) -> Any:
    """The model as it is where it has a `Depth` and no other loss is asked for; any other module opened on these tokens.

    A number of blocks that a module calls its depth is none. A Hugging Face model says itself what it reads, and is opened by its family.
    """
    if isinstance(getattr(model, "depth", None), Depth) and loss is None:
        return model
    if not isinstance(model, nn.Module):
        return open_model(model, loss=loss)  # a path, or an error that says what is allowed
    family = isinstance(tokens, Tensor) and hasattr(getattr(model, "config", None), "model_type")
    return open_model(model, example=None if family else tokens, loss=loss)
