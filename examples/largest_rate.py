"""The largest stable learning rate of a small GPT: `python examples/largest_rate.py`.

One whole training at each of several rates, from the same weights on the same batches. The answer
is the rate at which the end loss, going up from the best rate, crosses the middle between the best
loss and that of a model without depth. One more training, at the next rate above, has a monitor:
its first alarm says what gives way. For a study with seeds, workers and a database, see
`ctrans study`.
"""

import copy
import math
import statistics

import torch

from ctrans import GPT, GPTConfig, Monitor
from ctrans.study.outcomes import Floor, StableRate, rate_by_floor
from ctrans.training.depth_tasks import sorting

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
WARM_UP = 0.1  # the share of the steps in which the rate grows
AVERAGED = 0.1  # the loss of a training is the mean over this share of its last steps


def train(model, data, rate, steps, monitor=None):
    """The loss of each step, and the monitor's first alarm, at which the training ends."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        growth = min(1.0, (step + 1) / (WARM_UP * steps))
        decay = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = rate * growth * decay
        tokens, targets = data.batch(step, 0, batch=32, seed=0)
        _, loss = model(tokens, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not gradient_norm.isfinite():
            return [math.inf], ""
        if monitor is not None:
            for alarm in monitor.step(loss, optimizer):
                return losses, f"{alarm.check} at {alarm.place}: {alarm.figure}"
        optimizer.step()
    return losses, ""


def main(steps: int = 200, rates=RATES) -> StableRate:
    data = sorting()
    floor = Floor(data.depthless_loss(), data.guess_loss())
    model = GPT(GPTConfig(vocab_size=16, context=15, depth=2, width=32, heads=2), seed=0)
    ends = {}
    for rate in rates:
        losses, _ = train(copy.deepcopy(model), data, rate, steps)
        ends[rate] = [statistics.fmean(losses[-max(1, round(AVERAGED * steps)) :])]
        print(f"rate {rate:g}: loss {ends[rate][0]:.3f}")
    print(f"a model without depth: loss {floor.depth:.3f}")
    stable = rate_by_floor(ends, floor)
    if stable.rate is None:
        print(f"no stable rate: {stable.reason}")
    elif stable.at_least:
        print(f"largest stable rate: at least {stable.rate:.2g}")
    else:
        print(f"largest stable rate: {stable.rate:.2g}")
        next_rate = min(rate for rate in rates if rate > stable.rate)
        watched = copy.deepcopy(model)
        monitor = Monitor(watched, every=1)
        _, first_alarm = train(watched, data, next_rate, steps, monitor)
        print(f"at {next_rate:g} gives way first: {first_alarm or 'nothing that has an alarm'}")
    return stable


if __name__ == "__main__":
    main()
