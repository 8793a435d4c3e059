"""`ctrans.diagnose`, `screen`, `simulate`, `compare` and `costate`: of any model. One of
another library is opened first.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ctrans.base.option import Seed
from ctrans.control.costate import Costate
from ctrans.control.costate import costate as costate_of
from ctrans.dynamics.depth import Depth
from ctrans.examine.comparison import compare as comparison
from ctrans.examine.comparison.model_comparison import ModelComparison
from ctrans.examine.comparison.recording import Recording, is_recording, read_recording
from ctrans.examine.diagnosis import diagnose as diagnosis
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.future_tokens import follows
from ctrans.examine.screening import screen as screening
from ctrans.examine.screening.screen import Effort, Screening
from ctrans.interop import open_model
from ctrans.interop.class_targets import with_class_targets
from ctrans.interop.loss_names import Loss
from ctrans.interop.open_model import check_model
from ctrans.measure.forward import simulation
from ctrans.measure.forward.simulation import Simulation
from ctrans.measure.walk import Instrument, SegmentCallback, terminal_loss
from ctrans.model.gpt import counted
from solvers import ConfigError, Method, Norm, shown

TARGETS = "the targets"
"""By this name `missing` says why targets are not used."""
Parameters = ParamSpec("Parameters")
Examination = TypeVar("Examination")


def with_derivatives(
    function: Callable[Parameters, Examination],
) -> Callable[Parameters, Examination]:
    """The function, which then also works where torch.inference_mode turns derivatives off."""

    @functools.wraps(function)
    def examined(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Examination:
        with torch.inference_mode(mode=False):
            own: Any = [_with_versions(value) for value in args]
            named: Any = {name: _with_versions(value) for name, value in kwargs.items()}
            return function(*own, **named)

    return examined


def _with_versions(value: Any) -> Any:
    """A copy of a tensor that was made in inference mode, which autograd cannot keep."""
    if isinstance(value, Tensor) and value.is_inference():
        return value.clone()
    return value


@with_derivatives
def diagnose(
    model: Any,
    tokens: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    weight_decay: float | None = None,
    search: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Findings about a model on a text, the most severe first, from one forward and, with targets,
    one backward pass.

    It calls `ctrans.examine.diagnosis.diagnose.diagnose`. A model of another library is first
    opened on these tokens.

    - `model`: a model of ctrans or of another library, any `nn.Module`, or the path of a checkpoint
    - `tokens`, `targets`: token ids, or whatever the model reads and its loss compares with
      (images, features). Without targets, `Diagnosis.missing` lists what needs a loss
    - `loss`: as in `ctrans.open_model`: a name of its losses, or a function of output and targets.
      None is the model's own. If that is not known, targets that are class ids along one axis of
      the output give a cross-entropy. Others are not used, and `missing` says why
    - `weight_decay`: the weight decay of its training, compared with dt lam*
    - `search`: for so many seconds, look for edits of the model that lower its loss, such as
      queries and keys in each other's place. What lowers it on half of the sequences is tested on
      the other half. It needs targets
    - `progress(k)`: called whenever segment k is done, in the forward and in the backward pass

    Raises ConfigError for a model that cannot be opened, as `open_model` does, and for a weight
    decay that is negative or not finite.
    """
    opened = _opened(model, tokens, loss)
    tokens, targets = _sequences_first(model, opened, tokens, targets)
    _check_ids(opened, tokens, targets)
    opened, unused = with_class_targets(opened, tokens, targets)
    if targets is not None:
        _check_loss(opened, tokens, targets)
    found = diagnosis.diagnose(
        opened,
        tokens,
        targets,
        weight_decay=weight_decay,
        search=None if search is None else diagnosis.SearchRequest(search),
        progress=progress,
    )
    if unused:
        found.missing[TARGETS] = unused
    return found


@with_derivatives
def screen(
    model: Any,
    tokens: Any,
    targets: Any,
    effort: str | Effort = "full",
    *,
    loss: str | Loss | None = None,
    other: Any = None,
    seed: Seed = 0,
    trained: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Screening:
    """All verdicts of the screening at the model's current weights, from one forward and one
    backward pass.

    It calls `ctrans.examine.screening.screen.screen`. A model of another library is first opened
    on these tokens.

    - `model`, `tokens`, `targets`, `loss`: as in `diagnose`; targets are needed unless the model
      has a loss of its own
    - `effort`: a name in `ctrans.examine.screening.screen.EFFORTS`, or such an object
    - `other`: another text of the same shape, for the transport step
    - `seed`: of perturbations and of the start vectors of iterations
    - `trained`: whether the weights differ from those of the configuration's initialisation
    - `progress`: called with a word whenever a segment is done in the forward or backward pass.
      Without a loss there is no backward pass, and it is called for that too

    Raises ConfigError for a model that cannot be opened, if tokens, targets and the other text
    differ in shape, and for an unknown effort.
    """
    opened = _opened(model, tokens, loss)
    if other is not None:
        other, _ = _sequences_first(model, opened, other, None)
        _check_ids(opened, other, None, "tokens of the other text")
    tokens, targets = _sequences_first(model, opened, tokens, targets)
    _check_ids(opened, tokens, targets)
    opened, unused = with_class_targets(opened, tokens, targets)
    _check_loss(opened, tokens, targets)
    screened = screening.screen(
        opened, tokens, targets, effort, other=other, seed=seed, trained=trained, progress=progress
    )
    if unused:
        screened.missing[TARGETS] = unused
    return screened


@with_derivatives
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
    progress: SegmentCallback | None = None,
    instruments: Sequence[Instrument] = (),
) -> Simulation:
    """X(t) of any model on these tokens by a method, with the bounds and laws of theory.

    It calls `ctrans.measure.forward.simulation.simulate`, whose options it takes. A model of
    another library is first opened on these tokens.

    - `model`, `tokens`: as in `diagnose`
    - `method`, `steps`, `rtol`, `atol`, `norm`: as in `solvers.solve`
    - `reference`: whether to solve the ODE accurately too
    - `progress(k)`: called after each segment
    - `instruments`: observe the states of the discrete model. They have their figures afterwards

    Raises ConfigError for a model that cannot be opened, and for invalid options.
    """
    opened = _opened(model, tokens, None)
    tokens, _ = _sequences_first(model, opened, tokens, None)
    return simulation.simulate(
        opened,
        tokens,
        method=method,
        steps=steps,
        rtol=rtol,
        atol=atol,
        norm=norm,
        reference=reference,
        progress=progress,
        instruments=instruments,
    )


@with_derivatives
def costate(
    model: Any,
    tokens: Tensor,
    targets: Any,
    *,
    loss: str | Loss | None = None,
    form: str = "discrete",
    method: str | Method | None = None,
    steps: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Costate:
    """P_k = dL/dX_k of any model, at the state before each sublayer.

    It calls `ctrans.control.costate.costate`, whose options it takes. A model of another library is
    first opened on these tokens.

    - `model`, `tokens`, `targets`, `loss`: as in `diagnose`
    - `form`: "discrete" is the model as trained; "continuous" solves the ODE and its adjoint
    - `method`, `steps`, `rtol`, `atol`: of the continuous form, as in `solvers.solve`

    Raises ConfigError for a model that cannot be opened, an unknown form, and targets that do not
    match the tokens. Raises SolveError if the state or the costate becomes non-finite.
    """
    opened = _opened(model, tokens, loss)
    tokens, targets = _sequences_first(model, opened, tokens, targets)
    _check_ids(opened, tokens, targets)
    opened, unused = with_class_targets(opened, tokens, targets)
    if unused:
        warnings.warn(unused, stacklevel=3)
    _check_loss(opened, tokens, targets)
    return costate_of(
        opened,
        tokens,
        targets,
        form=form,
        method=method,
        steps=steps,
        rtol=rtol,
        atol=atol,
    )


@with_derivatives
def compare(
    first: Any,
    second: Any,
    tokens: Any = None,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    progress: Callable[[int], None] | None = None,
) -> ModelComparison:
    """Where the second model parts from the first on a text, and whether rounding explains it.

    It calls `ctrans.examine.comparison.compare.compare`. Models of another library are first opened
    on these tokens. Each computes in its own dtype.

    - `first`, `second`: as `model` in `diagnose`. One may be the path of a recording, a file of
      safetensors with the states of another program (`ctrans.examine.comparison.recording`). It
      counts as the first
    - `tokens`, `targets`, `loss`: as in `diagnose`; without targets no part has a share. A
      recording has its own tokens
    - `progress(k)`: called after part k

    Raises ConfigError for models that cannot be opened, for models of other depths or widths, for
    two recordings, and for tokens beside those of a recording.

    >>> ctrans.compare(model, copy.deepcopy(model).bfloat16(), tokens).changed
    """
    if is_recording(first) or is_recording(second):
        recorded, model = _recorded_first(first, second)
        if tokens is not None:
            raise ConfigError("a recording has the tokens that it is of: leave tokens out")
        tokens = recorded.tokens
        if targets is None:
            targets = recorded.targets
    else:
        recorded, model = None, second
    opened = _opened(model, tokens, loss)
    opened, rows, row_targets = _checked_rows(model, opened, tokens, targets)
    own: Any = recorded
    if recorded is None:
        own = _opened(first, tokens, loss)
        own, rows, row_targets = _checked_rows(first, own, tokens, targets)
    return comparison.compare(own, opened, rows, row_targets, progress=progress)


def _recorded_first(first: Any, second: Any) -> tuple[Recording, Any]:
    """The recording among the two, and the model."""
    if is_recording(first) and is_recording(second):
        raise ConfigError("both are recordings, which have no parts to run: one must be a model")
    if is_recording(second):
        first, second = second, first
    if not isinstance(first, Recording):
        first = read_recording(Path(first))
    return first, second


def _checked_rows(model: Any, opened: Any, tokens: Any, targets: Any) -> tuple[Any, Any, Any]:
    """The model with its loss, and the inputs and targets, sequences first, after all checks."""
    rows, row_targets = _sequences_first(model, opened, tokens, targets)
    _check_ids(opened, rows, row_targets)
    opened, unused = with_class_targets(opened, rows, row_targets)
    if unused:
        warnings.warn(unused, stacklevel=4)
    if row_targets is not None:
        _check_loss(opened, rows, row_targets)
    return opened, rows, row_targets


def _opened(model: Any, tokens: Any, loss: str | Loss | None) -> Any:
    """The model itself if it has a `Depth` and no other loss is given; any other model opened on
    these tokens.

    Some modules have an attribute `depth` that counts blocks. A Hugging Face model states what it
    reads, so it is opened by its family.
    """
    if isinstance(tokens, Mapping):
        raise ConfigError(
            f"the inputs are a {type(tokens).__name__}: open the module first, open_model(module,"
            " example=inputs, loss=..), then pass the tensor of its first argument alone"
        )
    if not isinstance(tokens, Tensor) or tokens.dim() == 0 or tokens.numel() == 0:
        raise ConfigError(
            f"tokens = {shown(tokens)}: give a tensor of token ids of shape (sequences, tokens), or"
            " of what else the model reads, with at least one entry"
        )
    _check_dense("tokens", tokens)
    check_model(model)
    if isinstance(getattr(model, "depth", None), Depth) and loss is None:
        return model
    if not isinstance(model, nn.Module):
        return open_model(model, loss=loss)  # a path, or an error that says what is allowed
    states_its_inputs = hasattr(getattr(model, "config", None), "model_type")
    if isinstance(tokens, Tensor) and states_its_inputs:
        return open_model(model, loss=loss)
    return open_model(model, example=tokens, loss=loss)


def _check_dense(name: str, given: Any) -> None:
    """Raises ConfigError for a sparse tensor, which few operations take."""
    if isinstance(given, Tensor) and given.layout is not torch.strided:
        raise ConfigError(f"the {name} are a sparse tensor: give {name}.to_dense()")


def _check_ids(opened: Any, tokens: Any, targets: Any, name: str = "tokens") -> None:
    """Raises ConfigError for token ids, and for targets of a loss over tokens, that the vocabulary
    lacks.
    """
    described = getattr(opened, "config", None)
    vocabulary = getattr(opened, "vocabulary", getattr(described, "vocab_size", 0))
    if not vocabulary:
        return
    if isinstance(tokens, Tensor) and _can_be_ids(tokens):
        _check_range(name, tokens, vocabulary, "give ids in that range")
    is_of_tokens = getattr(opened, "loss", "next") in ("next", "mlm")
    has_logits = getattr(opened, "predicts", True)
    if is_of_tokens and has_logits and isinstance(targets, Tensor) and _can_be_ids(targets):
        ids = counted(targets)
        ids = ids[ids != -1]
        if ids.numel():
            advice = "give ids in that range, or -1 or -100 where there is no target"
            _check_range("targets", ids, vocabulary, advice)


def _check_range(name: str, ids: Tensor, vocabulary: int, advice: str) -> None:
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise ConfigError(
            f"{name} run from {lowest} to {highest}, the vocabulary from 0 to {vocabulary - 1}:"
            f" {advice}"
        )


def _can_be_ids(x: Tensor) -> bool:
    """Whether it has whole numbers on the host: elsewhere a check would wait for the device."""
    return x.dtype == torch.int64 and x.device.type == "cpu" and x.numel() > 0


def _check_loss(opened: Any, tokens: Any, targets: Any) -> None:
    """Raises ConfigError for a user's loss that is not one number with derivatives, and for a
    module whose output has none, found by the head at X_0 before other work.
    """
    imported = getattr(opened, "imported", None)
    is_given = getattr(opened, "loss", None) == "given"
    if not is_given and (imported is None or imported.adapter.family != "module"):
        return
    with torch.no_grad():
        x = opened.embed(tokens)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        if is_given:
            terminal_loss(opened, x, targets)
        elif imported is not None and not opened.head(x).requires_grad:
            raise ConfigError(
                f"the output of {imported.config.model} has no derivatives: its forward turns them"
                " off (torch.no_grad, detach), so there are no gradients to examine"
            )


def _sequences_first(model: Any, opened: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
    """The inputs and targets of a module, sequences first. Those of a module that reads (tokens,
    sequences) are turned, unless the targets show that its rows are sequences: it then mixes them,
    and raises ConfigError.
    """
    _check_dense("targets", targets)
    if opened is model or not getattr(opened, "tokens_first", False):
        return tokens, targets
    if follows(tokens, targets):
        raise ConfigError(
            f"{type(model).__name__} reads the first axis of its input as tokens, so that sequences"
            " of the batch read each other, but the targets are the next tokens along the second:"
            " build it with batch_first=True, or turn tokens and targets"
        )
    turned = tokens.transpose(0, 1)
    if isinstance(targets, Tensor) and targets.shape[:2] == tokens.shape[:2]:
        targets = targets.transpose(0, 1)
    return turned, targets
