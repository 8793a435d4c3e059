"""What a loop feeds to a model: its batches, from the ids that the embedding gets, and its targets,
from the gradient at the logits. The figures need no change of the loop.

The hooks change no bit of the training and draw no random number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.measure.reductions import host_numbers
from ctrans.training.monitor.gradients_before import (
    GradientNorms,
    are_reset,
    gradient_norms,
    stepped_weights,
)
from ctrans.training.monitor.hooks import Hook, in_a_line, local, traced
from ctrans.training.monitor.memory import Memory, packed, unpacked
from ctrans.training.monitor.sites import Sites
from ctrans.training.monitor.target_gradient import (
    FEWEST_CLASSES,
    TargetRows,
    exchanged_targets,
    target_rows,
)
from ctrans.training.monitor.training_measures import GaugeAt
from ctrans.training.monitor.updates import sign_of_step

THE_TARGETS = "the targets"
NO_LOGITS = "the model returns no logits through which the loss goes back"
NO_PASS = "the loop calls the parts of the model, and not the model, in training mode"
NOT_BACK = "no gradient came back to what the model returns: it was detached, or changed in place"
ANOTHER_LOSS = "the gradient at what the model returns is not that of a cross-entropy"
FEW_CLASSES = f"with fewer than {FEWEST_CLASSES} classes no gradient shows which loss it is of"
BINS = 256
"""Into so many bins the tokens are counted."""
ENTRIES = 4096
"""A batch is known by at most so many of its entries."""
SHIFTS = range(-3, 4)
"""How far the targets may lie ahead of their tokens."""
ALL_BUT_FEW = 0.99
"""The share of targets that lie at one distance from their tokens."""
PADDING = 8
"""So many equal tokens at the end of a sequence are padding."""
EVEN = 0.01
"""How far the weights of targets may lie apart in the mean over them."""
OTHER_LOSS = 0.01
"""The share of rows whose gradient is that of another loss, above which none is read."""


@dataclass(eq=False)
class Pass:
    """A forward pass of the training: its input, and the ids of each call of the embedding, such as
    those of an encoder and of a decoder.
    """

    inputs: Tensor | None = None
    ids: list[Tensor] = field(default_factory=list)

    def ids_of(self, rows: int) -> Tensor | None:
        """The ids (sequences, tokens) of so many rows of logits: those of the last such call."""
        for ids in reversed(self.ids):
            if ids.dim() == 2 and ids.numel() == rows:
                return ids
        return None


@dataclass
class TargetsOfPass:
    """The figures of the targets of one pass. `backward` is autograd's number of the backward pass,
    `before` the norms of the gradients when it began: they may have been reset.
    """

    figures: dict[str, Tensor]
    backward: int
    before: GradientNorms | None


class LoopReader:
    """The hooks of one model. `arm` adds them; `take` removes them and returns the figures of the
    passes between.
    """

    def __init__(self, sites: Sites):
        self.sites = sites
        self.missing: dict[str, str] = {}
        self.hooks = ExitStack()
        self._passes: list[Pass] = []
        self._targets: list[TargetsOfPass] = []
        """The figures of each backward pass through logits."""
        self._inside = False
        self._is_called_whole = False
        """Whether the loop calls the model, and not its parts one by one."""
        self._previous: tuple[int, Tensor | float] | None = None
        """The last step of which the batch is known, and its fingerprint."""
        self._counts: Tensor | None = None
        """The tokens of the reports before, by bin."""
        self._repeated: Tensor | None = None
        """Whether a report had a run of that token with text behind it, by bin."""

    def arm(self, *, targets: bool) -> None:
        """Reads the batch of the next passes, and their targets if asked to."""
        self.disarm()
        self.missing = {}
        self._passes = []
        self._targets = []
        self._is_called_whole = False
        root = self.sites.root
        self._add(root.register_forward_pre_hook(Hook(self._begins), with_kwargs=True))
        for table in _token_tables(root, self.sites.vocabulary):
            self._add(table.register_forward_pre_hook(Hook(self._embeds)))
        end = Hook(self._ends_with_targets if targets else self._ends)
        self._add(root.register_forward_hook(end, always_call=True))

    def disarm(self) -> None:
        self.hooks.close()
        self._inside = False

    def note_batch(self, step: int) -> None:
        """Removes the hooks, and keeps by what the batch of this step is known."""
        self.disarm()
        self._keep(step, self._try("the batch", self._fingerprint))
        self._passes = []

    def take(
        self, step: int, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[GaugeAt, Tensor]:
        """Removes the hooks. Returns the figures of the passes since `arm`, of this step. Targets
        weigh as the optimiser steps: it may raise the loss.
        """
        self.disarm()
        before: Tensor | float | None = None
        if self._previous is not None:
            last_step, fingerprint = self._previous
            if last_step == step - 1:
                before = fingerprint
        figures = self._try("the batch", self._of_batch, before) or {}
        self._keep(step, figures.pop("fingerprint", None))
        figures.update(self._try(THE_TARGETS, self._of_targets, optimizer) or {})
        if not self._targets:
            self.missing.setdefault(THE_TARGETS, NOT_BACK if self._is_called_whole else NO_PASS)
        self._passes = []
        self._targets = []
        return {(name, 0): value for name, value in figures.items()}

    def memory(self) -> Memory:
        """What a resumed run needs, as plain JSON."""
        memory: Memory = {"batch": None, "counts": None, "repeated": None}
        if self._previous is not None:
            step, fingerprint = self._previous
            memory["batch"] = [step, packed(host_numbers([fingerprint]))]
        if self._counts is not None:
            memory["counts"] = packed(self._counts.cpu())
        if self._repeated is not None:
            memory["repeated"] = self._repeated.nonzero().flatten().tolist()
        return memory

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continues from a result of `memory`."""
        if memory.get("batch") is not None:
            step, fingerprint = memory["batch"]
            self._previous = (int(step), unpacked(fingerprint)[0])
        if memory.get("counts") is not None:
            self._counts = torch.tensor(unpacked(memory["counts"]), dtype=torch.float64)
        if memory.get("repeated") is not None:
            self._repeated = torch.zeros(BINS, dtype=torch.bool)
            self._repeated[memory["repeated"]] = True

    def _keep(self, step: int, fingerprint: Tensor | None) -> None:
        """Keeps by what a step's batch is known, for the next step."""
        self._previous = None
        if fingerprint is not None:
            self._previous = (step, fingerprint)

    def _add(self, handle: Any) -> None:
        self.hooks.callback(handle.remove)

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.sites.root.training and not traced()

    def _begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside = self._trains
        self._is_called_whole = True
        if self._inside:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
            self._passes.append(Pass(given[0].detach() if given else None))

    def _embeds(self, _: nn.Module, args: Any) -> None:
        if not self._trains or not args or not isinstance(args[0], Tensor):
            return
        if not self._inside:
            if self._is_called_whole:  # a checkpoint computes this part once more
                return
            self._passes.append(Pass())
        present = self._passes[-1]
        # the loop may fill the same buffer again
        present.ids.append(local(args[0].detach()).clone())

    def _ends(self, *_: Any) -> None:
        self._inside = False

    def _ends_with_targets(self, _: nn.Module, args: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside = False
        logits = self._logits(output)
        if logits is None:
            self.missing.setdefault(THE_TARGETS, NO_LOGITS)
            return
        present = self._passes[-1]
        version = logits._version
        values = logits.detach()

        def returns(gradient: Tensor) -> None:
            if values._version == version:
                self._try(THE_TARGETS, self._read, present, values, gradient)
            else:
                self.missing.setdefault(THE_TARGETS, "the logits were changed in place")

        self._add(logits.register_hook(returns))

    def _logits(self, output: Any) -> Tensor | None:
        """The logits in an output of the root: of its vocabulary, or else the first matrix."""
        logits = self.sites.logits(output)
        if logits is None:
            logits = next((x for x in _tensors(output) if x.dim() > 1), None)
        if logits is None or not logits.is_floating_point() or not logits.requires_grad:
            return None
        return logits

    def _try(self, where: str, look: Callable[..., Any], *args: Any) -> Any:
        """Notes any exception: users' models may hand on anything, and a training must not stop for
        a figure.
        """
        try:
            with torch.no_grad():
                return look(*args)
        except Exception as error:
            self.missing.setdefault(where, in_a_line(error))
            return None

    def _read(self, present: Pass, logits: Tensor, gradient: Tensor) -> None:
        """The figures of the targets of one pass."""
        classes = logits.shape[-1]
        if classes < FEWEST_CLASSES:
            self.missing.setdefault(THE_TARGETS, FEW_CLASSES)
            return
        z = local(logits).reshape(-1, classes)
        rows = target_rows(z, local(gradient).reshape(-1, classes))
        counted = rows.is_counted
        count = counted.sum()
        mean = rows.weight.nansum() / count.clamp(min=1)
        loss, deviations = exchanged_targets(z, rows)
        others = rows.weight.isnan().sum()
        is_read = others <= OTHER_LOSS * (others + count)
        is_even = (rows.weight - mean).abs() <= EVEN * mean.abs()
        figures = {
            "weight": torch.where(is_read, mean * (count + others), torch.nan),
            "mean": torch.where(is_read & (count > 0), mean, torch.nan),
            "is_even": (is_even | ~counted).all() & (count > 0),
            "smoothing": torch.where(
                is_read & (count > 0), rows.smoothing[counted].nanmedian(), torch.nan
            ),
            "over_guessing": torch.where(is_read, loss - math.log(classes), torch.nan),
            "exchanged": torch.where(is_read, deviations, torch.nan),
        }
        tokens = present.ids_of(len(z))
        if tokens is not None:
            ahead = _ahead(tokens, rows)
            figures["ahead"] = torch.where(is_read, ahead, torch.nan)
            padding = self._padding_counted(tokens, rows)
            figures["padding"] = torch.where(is_read, padding, torch.nan)
        backward = torch._C._current_graph_task_id()
        self._targets.append(TargetsOfPass(figures, backward, gradient_norms(self.sites.root)))

    def _padding_counted(self, tokens: Tensor, rows: TargetRows) -> Tensor:
        """The share of counted targets that are padding: one token with which sequences end at
        least `PADDING` times, behind its first one. A token that had such a run with text behind
        it, as spaces and dashes have, is none.
        """
        bins = _bins(tokens, self.sites.vocabulary)
        within_text = _begins_a_run(tokens) & ~_run_at_end(tokens)
        repeated = torch.zeros(BINS, device=tokens.device)
        repeated.scatter_reduce_(0, bins.flatten(), within_text.flatten().float(), "amax")
        if self._repeated is not None:
            repeated = repeated + self._repeated.to(repeated)
        self._repeated = repeated > 0

        at_end = _run_at_end(tokens)
        last = tokens[:, -1:]
        ends = at_end.any(1, keepdim=True)
        is_one_token = (last == last.where(ends, -1).amax()) | ~ends
        is_text = self._repeated[bins[:, -1:]]
        counted = rows.is_counted.reshape(tokens.shape)
        targets = rows.target.reshape(tokens.shape)
        padding = counted & at_end & (targets == last) & is_one_token.all() & ~is_text
        return padding.sum() / counted.sum().clamp(min=1)

    def _of_targets(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
        """The figures of the step's targets, from those of its passes, times the sign of what the
        optimiser lowers.
        """
        if not self._targets:
            return {}
        sign = sign_of_step(optimizer)
        stepped = stepped_weights(self.sites.root, optimizer)
        passes = [one.figures for one in self._of_step(stepped)]
        first = passes[0]
        means = sign * torch.stack([one["mean"] for one in passes])
        is_even = torch.stack([one["is_even"] for one in passes]).all()
        figures = {
            "target_weight": sign * torch.stack([one["weight"] for one in passes]).sum(),
            "raised_targets": torch.where(
                means.isfinite().all(), (is_even & (means < 0).all()).double(), torch.nan
            ),
            "backward_passes": torch.tensor(float(len(passes))),
            # chosen and rejected answers, of two signs, are meant to differ
            "target_unevenness": torch.where(
                (means > 0).all() | (means < 0).all(),
                means.abs().max() / means.abs().min(),
                torch.nan,
            ),
            "label_smoothing": first["smoothing"],
            "over_guessing": first["over_guessing"],
            "exchanged_targets": first["exchanged"],
        }
        if "ahead" in first:
            figures["target_ahead"] = first["ahead"]
            figures["padding_counted"] = first["padding"]
        return figures

    def _of_step(self, stepped: set[int]) -> list[TargetsOfPass]:
        """The passes of which the step has the gradient: those since the gradients of these weights
        were reset. Passes of one backward pass stay together.
        """
        passes = self._targets
        if are_reset(gradient_norms(self.sites.root), stepped) is True:
            return passes  # they are not where they can be seen
        begins = [
            later
            for later in range(1, len(passes))
            if passes[later].backward != passes[later - 1].backward
        ]
        is_fresh = host_numbers([are_reset(passes[k].before, stepped) for k in begins])
        first = max((k for k, fresh in zip(begins, is_fresh, strict=True) if fresh), default=0)
        return passes[first:]

    def _fingerprint(self) -> Tensor | None:
        """One number of all entries of the step's batch that are looked at."""
        parts = [part for part in map(_fingerprint, self._passes) if part is not None]
        if not parts:
            return None
        together = torch.stack(parts)
        order = torch.arange(1, 1 + len(parts), device=together.device)
        return (together * order).sum()

    def _of_batch(self, before: Tensor | float | None) -> dict[str, Tensor]:
        figures: dict[str, Tensor] = {}
        fingerprint = self._fingerprint()
        if fingerprint is not None:
            figures["fingerprint"] = fingerprint
            if before is not None:
                figures["same_batch"] = (fingerprint == before).double()
        tokens = [rows.flatten() for rows in map(_rows, self._passes)]
        if not sum(map(len, tokens)):
            return figures
        ids = torch.cat(tokens)
        text = torch.cat([_without_padding(one) for one in map(_rows, self._passes)])
        if not len(text):
            text = ids  # a batch of one token
        figures["commonest_token"] = (text == text.mode().values).double().mean()
        counts = torch.bincount(_bins(ids, self.sites.vocabulary), minlength=BINS).double()
        if self._counts is None:
            self._counts = counts
        else:
            earlier = self._counts.to(counts)
            figures["unlike_before"] = _divergence(counts, earlier)
            self._counts = earlier + counts
        return figures


def _token_tables(root: nn.Module, vocabulary: int) -> list[nn.Embedding]:
    """The embeddings of tokens, not of positions: those with the vocabulary's rows, or else with
    the most.
    """
    tables = [part for part in root.modules() if isinstance(part, nn.Embedding)]
    rows = {table.num_embeddings for table in tables}
    if vocabulary in rows:
        wanted = vocabulary
    else:
        wanted = max(rows, default=0)
    return [table for table in tables if table.num_embeddings == wanted]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)


def _fingerprint(one: Pass) -> Tensor | None:
    """The sum of entries of a batch, each times a factor of its place."""
    x = one.ids[0] if one.ids else one.inputs
    if x is None:
        return None
    entries = local(x).flatten()
    entries = entries[:: max(1, math.ceil(len(entries) / ENTRIES))].double()
    places = torch.arange(1, len(entries) + 1, dtype=torch.float64, device=entries.device)
    factors = (places * (math.sqrt(5) - 1) / 2) % 1  # spread evenly, and never twice the same
    return (entries * factors).sum()


def _rows(one: Pass) -> Tensor:
    """The ids of a pass, a row for each sequence; none if it has none."""
    if not one.ids or not one.ids[0].dim():
        return torch.zeros(0, 1, dtype=torch.long)
    return one.ids[0].reshape(-1, one.ids[0].shape[-1])


def _without_padding(rows: Tensor) -> Tensor:
    """All tokens but `PADDING` or more equal ones at an end of a sequence."""
    is_padding = _run_at_end(rows) | _run_at_end(rows.flip(1)).flip(1)
    return rows[~is_padding]


def _begins_a_run(rows: Tensor) -> Tensor:
    """Whether the token and the `PADDING` - 1 behind it are equal."""
    is_same = rows[:, 1:] == rows[:, :-1]
    begins = torch.zeros_like(rows, dtype=torch.bool)
    if rows.shape[1] >= PADDING:
        begins[:, : 1 - PADDING] = is_same.unfold(1, PADDING - 1, 1).all(-1)
    return begins


def _run_at_end(rows: Tensor) -> Tensor:
    """Whether a token belongs to `PADDING` or more equal ones at the end of its row."""
    run = (rows == rows[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    return run & (run.sum(1, keepdim=True) >= PADDING)


def _bins(ids: Tensor, vocabulary: int) -> Tensor:
    if vocabulary <= BINS:
        return ids.clamp(0, BINS - 1)
    return (ids.long() * 2654435761 >> 12) % BINS


def _divergence(counts: Tensor, earlier: Tensor) -> Tensor:
    """sum_b q_b log(q_b/r_b) in nats of a batch's shares q of the bins from those before, r."""
    q = counts / counts.sum()
    r = (earlier + 0.5) / (earlier + 0.5).sum()
    return torch.where(q > 0, q * (q / r).log(), 0.0).sum()


def _ahead(tokens: Tensor, rows: TargetRows) -> Tensor:
    """How many tokens ahead of its own position all but few targets lie; nan if none, or if two
    distances say so.
    """
    targets = rows.target.reshape(tokens.shape)
    counted = rows.is_counted.reshape(tokens.shape)
    length = tokens.shape[1]
    shares = []
    for shift in SHIFTS:
        here = slice(max(0, -shift), length - max(0, shift))
        there = slice(max(0, shift), length - max(0, -shift))
        both = counted[:, here]
        equal = both & (targets[:, here] == tokens[:, there])
        shares.append(equal.sum() / both.sum())
    by_shift = torch.stack(shares).nan_to_num(0.0)
    two_best = by_shift.topk(2)
    is_one = (two_best.values[0] >= ALL_BUT_FEW) & (two_best.values[1] < 0.9)
    return torch.where(is_one, two_best.indices[0] + SHIFTS[0], torch.nan).double()
