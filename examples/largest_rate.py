"""The largest stable learning rate of a small GPT: `python examples/largest_rate.py`.

One training at each of several rates. The answer is the rate at which the end loss, going up from
the best rate, crosses the middle between the best loss and that of a model without depth. At the
next rate above, the first alarm of a monitor says what gives way. See also `ctrans study`.
"""

import copy
import statistics

import torch

from ctrans import GPT, GPTConfig, Monitor
from ctrans.study.outcomes import Floor, StableRate, rate_by_floor
from ctrans.training.depth_tasks import sorting


def train(model, data, rate, steps):
    """Trains the model. Before each step of the optimizer it yields the loss and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        warm_up = min(1.0, (step + 1) / (0.1 * steps))
        optimizer.param_groups[0]["lr"] = rate * warm_up * (1 - step / steps)
        _, loss = model(*data.batch(step, 0, batch=32, seed=0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield loss, optimizer
        optimizer.step()


def main(steps: int = 200, rates=(0.003, 0.01, 0.03, 0.1, 0.3)) -> StableRate:
    data = sorting()
    floor = Floor(data.depthless_loss(), data.guess_loss())
    model = GPT(GPTConfig(vocab_size=16, context=15, depth=2, width=32, heads=2), seed=0)
    ends = {}
    for rate in rates:
        losses = [loss.item() for loss, _ in train(copy.deepcopy(model), data, rate, steps)]
        ends[rate] = [statistics.fmean(losses[-steps // 10 :])]
        print(f"rate {rate:g}: loss {ends[rate][0]:.3f}")
    print(f"a model without depth: loss {floor.depth:.3f}")
    stable = rate_by_floor(ends, floor)
    if stable.rate is None:
        print(f"no stable rate: {stable.reason}")
    elif stable.at_least:
        print(f"largest stable rate: at least {stable.rate:.2g}")
    else:
        print(f"largest stable rate: {stable.rate:.2g}")
        higher = min(rate for rate in rates if rate > stable.rate)
        monitor = Monitor(model, every=1)
        for loss, optimizer in train(model, data, higher, steps):
            if monitor.step(loss, optimizer):
                break
        for alarm in monitor.alarms[:1]:
            print(f"at {higher:g} gives way first: {alarm.check} at {alarm.place}: {alarm.figure}")
    return stable


if __name__ == "__main__":
    main()
