"""How a training run is shown: a word for the bar, a line per evaluation, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from ctrans.report.axes import PLAIN, show_at_least_a_decade

SMOOTH = 100
"""The training loss is drawn as means of about this many stretches of equal length, over the single losses in grey."""


def bar_words(row: dict[str, Any]) -> str:
    """What the progress bar says of an iteration."""
    return f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s"


def evaluation_line(row: dict[str, Any], iterations: int) -> str:
    """What is printed of an evaluation."""
    width = len(str(iterations))
    parts = [f"step {row['step']:{width}d}/{iterations}", f"validation loss {row['validation_loss']:.4f}"]
    if "loss" in row:
        parts += [f"loss {row['loss']:.4f}", f"|gradient| {row['gradient_norm']:.2g}", f"lr {row['learning_rate']:.1e}"]
    parts.append(f"rms X_T/X_0 {row['growth']:.3g}")
    if "accuracy" in row:
        parts.insert(2, f"accuracy {100 * row['accuracy']:.1f} %")
    if "theta" in row:
        parts.append(f"theta {row['theta']:.4f}")
    return ", ".join(parts)


def loss_figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Training and validation loss, learning rate with gradient norm, and hidden-state growth by iteration."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    losses, rates, growth = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "validation_loss" in row]
    at, train = _column(steps, "step"), _column(steps, "loss")
    losses.plot(at, train, color="0.8", linewidth=0.6)
    stretch = max(1, len(steps) // SMOOTH)
    means = [slice(i, i + stretch) for i in range(0, len(steps) - stretch + 1, stretch)]
    losses.plot([_mean(at[part]) for part in means], [_mean(train[part]) for part in means], color=PLAIN[0], label="training")
    at_evaluation = _column(evaluations, "step")
    losses.plot(at_evaluation, _column(evaluations, "validation_loss"), "o-", color=PLAIN[1], markersize=3, label="validation")
    losses.set(title="loss", ylabel="cross-entropy, nats a token")
    losses.legend(frameon=False)
    rates.plot(at, _column(steps, "learning_rate"), color=PLAIN[0], label="learning rate")
    rates.plot(at, _column(steps, "gradient_norm"), color=PLAIN[1], linewidth=0.6, label="|gradient| before clipping")
    rates.set(title="step", yscale="log", ylabel="learning rate; norm of the gradient")
    rates.legend(frameon=False)
    growth.plot(at_evaluation, _column(evaluations, "growth"), "o-", color=PLAIN[0], markersize=3, label="rms X_T / rms X_0")
    growth.plot(
        at_evaluation, _column(evaluations, "largest"), "s-", color=PLAIN[1], markersize=3, label="largest entry of any X"
    )
    growth.set(title="hidden state", yscale="log", ylabel="multiple of rms X_0; largest |x|")
    show_at_least_a_decade(growth)
    growth.legend(frameon=False)
    for axes in (losses, rates, growth):
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    return figure


def by_step(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(step, loss) of the training, as means of about `SMOOTH` stretches of equal length, and of each evaluation."""
    steps = [row for row in rows if "loss" in row]
    stretch = max(1, len(steps) // SMOOTH)
    parts = [steps[i : i + stretch] for i in range(0, len(steps) - stretch + 1, stretch)]
    training = [(_mean(_column(part, "step")), _mean(_column(part, "loss"))) for part in parts]
    evaluated = [(float(row["step"]), float(row["validation_loss"])) for row in rows if "validation_loss" in row]
    return {"training": training, "validation": evaluated}


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
