"""Inputs of bounded tokens that make a map's output as large as ascent finds."""

import torch


def longest_output(field, like, radius, steps=30, seed=0):
    """max_i |f(x)_i| that projected gradient ascent finds over tokens |x_j| = radius, from random x
    and from equal tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    largest = 0.0
    random = torch.randn(like.shape, generator=generator).to(like)
    for start in (random, random[:, :1].expand_as(random)):
        x = start
        for _ in range(steps):
            x = (radius * x / x.norm(dim=-1, keepdim=True)).detach().requires_grad_()
            with torch.enable_grad():
                longest = field(x).norm(dim=-1).amax()
            largest = max(largest, float(longest.detach()))
            (gradient,) = torch.autograd.grad(longest, x)
            x = x + radius * gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return largest
