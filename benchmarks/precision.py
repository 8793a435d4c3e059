"""What `ctrans.low_precision` and `--precision` predict from float32, against real casts and real
trainings in low precision.

1. Casts: of weights of checkpoints that two packages ship, and of weights, outputs and gradients of a small trained model, torch's casts.
   Shares must agree to 0.001, and relative errors to 1%.
2. Runs: the same batch through the trained model with all weights and states in bf16 and in fp16. Shares of zeros must agree to 0.02.
3. Trainings of 500 steps on the recall task: what share of the updates is lost, and the loss beside its spread over seeds.

    pip install --no-deps antiberty==0.1.3 rxnmapper==0.4.3
    python benchmarks/precision.py [casts] [trainings]
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# in place of this file's own folder, where `import solvers` would find a benchmark
sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.record import keep
from ctrans.examine.diagnosis.low_precision import InFormats, low_precision
from ctrans.examine.diagnosis.number_formats import format_of
from ctrans.examine.diagnosis.weights_only import parts_of
from ctrans.interop.checkpoint_weights import checkpoint_weights
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, next_token_loss
from ctrans.study.bootstrap import gap_over_seeds
from ctrans.training.tasks import TASKS

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
SCALED = [*DTYPES, "e4m3:tensor", "e5m2:tensor", "e4m3:32", "e4m3:128"]
SEEDS, STEPS, WARMUP, BATCH, RATES = (0, 1, 2), 500, 50, 16, (3e-3, 3e-4)
LOOKED = (20, 100, 250, 499)
"""Steps at which shares of lost updates are compared."""
Tensors = dict[str, Tensor]


def cast(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The finite entries of x in float32 and their real casts, both over the scales. Overflow is
    inf.
    """
    base, _, scale = name.partition(":")
    x, largest = x.float().nan_to_num(0, 0, 0), torch.finfo(DTYPES[base]).max
    if scale == "tensor":
        x = x / (x.abs().max() / largest).clamp(min=1e-38)
    elif scale:
        x = F.pad(x.unsqueeze(0) if x.dim() == 0 else x, (0, -x.shape[-1] % int(scale))).unflatten(
            -1, (-1, int(scale))
        )
        x = x / (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-38)
    real = x.to(DTYPES[base]).float()
    if base == "e4m3":  # it has no inf: a cast gives nan or the largest number, by torch's version
        real = torch.where((x.abs() > 464) | real.isnan(), torch.inf, real)
    return x, real


def figures_of_cast(x: Tensor, name: str) -> list[float]:
    """Shares that overflow, become 0 and are subnormal, by the cast."""
    least = torch.finfo(DTYPES[name.partition(":")[0]]).smallest_normal
    x, real = cast(x, name)
    entries = max(int((x != 0).sum()), 1)
    size = real.abs()
    parts = (size.isinf(), (real == 0) & (x != 0), (size > 0) & (size < least))
    return [int(part.sum()) / entries for part in parts]


def error_of_cast(x: Tensor, name: str) -> float:
    """The relative error of the tensor, without entries that overflow, in its own units."""
    base, _, scale = name.partition(":")
    units = torch.ones(())
    if scale.isdecimal():
        units = (
            F.pad(x, (0, -x.shape[-1] % int(scale)))
            .unflatten(-1, (-1, int(scale)))
            .double()
            .nan_to_num(0, 0, 0)
        )
        units = (units.abs().amax(-1, keepdim=True) / torch.finfo(DTYPES[base]).max).clamp(
            min=1e-38
        )
    x, real = cast(x, name)
    over = real.isinf()
    missed, size = (((part.double() * units).masked_fill(over, 0)).norm() for part in (real - x, x))
    return float(missed / size) if size else 0.0


def agreement(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, list[bool]]:
    """By format, whether each tensor's prediction agrees with its cast."""
    found: dict[str, list[bool]] = {name: [] for name in SCALED}
    for place, tensor in tensors:
        predicted = InFormats(",".join(SCALED))
        predicted.add(place, None, tensor)
        sums = {name: each.tolist() for (name, _, _), each in predicted.sums.items()}
        for name in SCALED if sums else ():
            entries, over, kept, normal, missed, size = sums[name]
            shares = [count / (entries or 1) for count in (over, entries - kept, kept - normal)]
            error, real = (missed / (size or 1)) ** 0.5, error_of_cast(tensor, name)
            close = all(
                abs(a - b) <= 1e-3
                for a, b in zip(shares, figures_of_cast(tensor, name), strict=True)
            )
            found[name].append(close and abs(error - real) <= 0.01 * real)
    return found


def of_packages() -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    """The weights of the checkpoints that installed packages ship."""
    for name, pattern in (
        ("antiberty", "trained_models/*/config.json"),
        ("rxnmapper", "models/transformers/*/config.json"),
    ):
        package = importlib.util.find_spec(name)
        if package is not None and package.submodule_search_locations:
            (config,) = Path(package.submodule_search_locations[0]).glob(pattern)
            weights = checkpoint_weights(config.parent, allow_pickle=True)
            yield (
                f"weights of {name}",
                (
                    (place, part)
                    for key, read in weights.items()
                    for place, _, part in parts_of(key, read())
                ),
            )


def small(seed: int) -> GPT:
    shape = {"depth": 2, "width": 32, "heads": 2, "placement": "pre", "initialisation": "gpt2"}
    return GPT(GPTConfig(**TASKS["recall"].architecture, **shape), seed=seed)


def optimiser_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.99), fused=True
    )


def step_of(
    model: GPT, optimiser: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], rate: float
) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    next_token_loss(model(batch[0])[0].float(), batch[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def rate_at(step: int, peak: float) -> float:
    """Linear warm-up, then linear decay to a tenth."""
    return peak * min((step + 1) / WARMUP, 1 - 0.9 * step / STEPS)


def stored(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.to(dtype).to(weight.dtype)


SETTINGS: dict[str, tuple[Callable[[Tensor], Tensor] | None, torch.dtype, bool]] = {
    "float32": (None, torch.float32, False),
    "bf16 autocast, float32 weights": (None, torch.float32, True),
    "weights stored in bf16": (stored(torch.bfloat16), torch.float32, False),
    "weights stored in fp16": (stored(torch.float16), torch.float32, False),
    "weights stored in e4m3": (stored(torch.float8_e4m3fn), torch.float32, False),
    "all of it in bf16": (None, torch.bfloat16, False),
}
"""How weights are stored after each step, in which dtype the model and AdamW's states are, and
autocast.
"""


def trained(
    setting: str, seed: int, rate: float
) -> tuple[float, dict[tuple[int, str], float], dict[tuple[int, str, str], float], GPT]:
    """The final validation loss; by step and weight, the share of updates that were really lost;
    and in float32, the predicted one by step, format and weight.
    """
    storing, dtype, autocast = SETTINGS[setting]
    data = TASKS["recall"].data()
    model = small(seed).to(dtype)
    optimiser = optimiser_of(model, rate)
    lost: dict[tuple[int, str], float] = {}
    predicted: dict[tuple[int, str, str], float] = {}
    for step in range(STEPS):
        batch = data.batch(step, 0, batch=BATCH, seed=seed)
        before = (
            {name: weight.detach().clone() for name, weight in model.named_parameters()}
            if step in LOOKED and storing
            else {}
        )
        looking = (
            low_precision(model, "bf16,fp16,e4m3")
            if setting == "float32" and step in LOOKED
            else contextlib.nullcontext()
        )
        with looking as found, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step_of(model, optimiser, batch, rate_at(step, rate))
        if found is not None:
            for name, each in found.diagnoses().items():
                for reading in each.readings.get("lost updates", ()):
                    predicted[step, name, reading.place.rpartition("the update of ")[2]] = (
                        reading.value
                    )
        with torch.no_grad():
            for name, weight in model.named_parameters() if storing is not None else ():
                moved = (weight != before[name]) if before else None
                weight.copy_(storing(weight))
                if moved is not None and moved.any():
                    lost[step, name] = float((weight == before[name])[moved].double().mean())
    rows, targets = data.validation_windows(512)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = float(next_token_loss(model(rows)[0].float(), targets))
    return loss, lost, predicted, model


def seen(model: GPT, batch: tuple[Tensor, Tensor]) -> Tensors:
    """Weights, outputs of modules, and the gradients of both in a pass."""
    found: Tensors = {}
    handles = []

    def see(name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            found.setdefault(f"the output of {name}", output.detach().clone())
            if output.requires_grad:
                output.register_hook(
                    lambda grad: found.__setitem__(
                        f"the gradient of the output of {name}", grad.clone()
                    )
                )

    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(
                lambda module, inputs, output, name=name: see(name, output)
            )
        )
    model.zero_grad(set_to_none=True)
    next_token_loss(model(batch[0])[0], batch[1]).backward()
    for handle in handles:
        handle.remove()
    for name, weight in model.named_parameters():
        found[f"the weight {name}"] = weight.detach()
        if weight.grad is not None:
            found[f"the gradient of {name}"] = weight.grad
    return found


def runs_agree(model: GPT, batch: tuple[Tensor, Tensor], name: str) -> list[bool]:
    """Whether the shares of zeros and of overflow in a real run in the format are as predicted from
    float32, by tensor.
    """
    exact, real = seen(model, batch), seen(copy.deepcopy(model).to(DTYPES[name]), batch)
    found = []
    for place, x in exact.items():
        near = format_of(name).rounded(x.double().nan_to_num(0, 0, 0))
        shares = [
            (float((part == 0).double().mean()), float((~part.isfinite()).double().mean()))
            for part in (near, real[place].double())
        ]
        found.append(all(abs(a - b) <= 0.02 for a, b in zip(*shares, strict=True)))
    return found


def percent(found: list[bool]) -> str:
    return f"{sum(found)} of {len(found)} ({100 * sum(found) / len(found):.1f}%)"


def casts() -> list[str]:
    """The lines of parts 1 and 2."""
    model = trained("float32", 0, RATES[0])[3]
    batch = TASKS["recall"].data().batch(STEPS, 0, batch=BATCH, seed=0)
    lines = ["1. Tensors whose predicted shares and error agree with torch's cast", ""]
    for what, tensors in [
        ("weights, outputs and gradients of the trained model", iter(seen(model, batch).items())),
        *of_packages(),
    ]:
        found = agreement(tensors)
        lines += [f"  {what}: {percent([each for several in found.values() for each in several])}"]
        lines += [f"    {name:12} {percent(found[name])}" for name in SCALED]
    lines += [
        "",
        "2. Tensors whose shares of zeros and overflow in a real run are as predicted from float32",
        "",
    ]
    for what, one in (("after training", model), ("before training", small(0))):
        lines += [
            f"  {what:16} in {name}  {percent(runs_agree(one, batch, name))}"
            for name in ("bf16", "fp16")
        ]
    return lines


def trainings() -> list[str]:
    """The lines of part 3: lost updates, and losses."""
    start, runs = time.process_time(), {}
    for rate, setting in itertools.product(RATES, SETTINGS):
        runs[setting, rate] = [trained(setting, seed, rate)[:3] for seed in SEEDS]
        losses = " ".join(f"{run[0]:.4f}" for run in runs[setting, rate])
        print(
            f"{setting}, rate {rate:g}: {losses}; {time.process_time() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    lines = [
        (
            f"3. Lost updates at steps {LOOKED} of {STEPS}, by weight and seed: predicted in a"
            " float32 run, and real"
        ),
        "",
    ]
    for rate, name in itertools.product(RATES, ("bf16", "fp16", "e4m3")):
        pairs = [
            (exact[2][step, name, weight], share)
            for exact, real in zip(
                runs["float32", rate], runs[f"weights stored in {name}", rate], strict=True
            )
            for (step, weight), share in real[1].items()
        ]
        means = [statistics.fmean(column) for column in zip(*pairs, strict=True)]
        apart = statistics.fmean(abs(a - b) for a, b in pairs)
        lines.append(
            f"  rate {rate:g}, {name}: mean predicted {means[0]:.3f}, real {means[1]:.3f}, mean"
            f" difference {apart:.3f}; same verdict (above 0.5) in"
            f" {percent([(a > 0.5) == (b > 0.5) for a, b in pairs])}"
        )
    lines += [
        "",
        (
            f"   Validation loss of the recall task after {STEPS} steps, seeds {SEEDS}; ln 8 ="
            " 2.079 is guessing"
        ),
        "",
    ]
    for rate, setting in itertools.product(RATES, SETTINGS):
        losses = [run[0] for run in runs[setting, rate]]
        gap, spread, chance = gap_over_seeds([run[0] for run in runs["float32", rate]], losses)
        said = (
            ""
            if setting == "float32"
            else f"  gap {gap:+.4f}, spread {spread:.4f}, by seeds alone in {100 * chance:.2g}%"
        )
        lines.append(
            f"  rate {rate:g}  {setting:32} " + " ".join(f"{loss:.4f}" for loss in losses) + said
        )
    return lines


def main(parts: list[str]) -> None:
    torch.set_num_threads(1)
    for part in parts:
        start = time.process_time()
        lines = PARTS[part]()
        keep(
            f"precision-{part}", [*lines, "", f"{time.process_time() - start:.0f} s of a processor"]
        )


PARTS = {"casts": casts, "trainings": trainings}

if __name__ == "__main__":
    main(sys.argv[1:] or list(PARTS))
