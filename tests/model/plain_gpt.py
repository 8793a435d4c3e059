"""A pre-LN GPT written down plainly and independently of the package: the oracle for its model.
Shares nothing but weights.
"""

import math

import torch


def layer_norm(x, weight, bias, eps=1e-5):
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def attention(x, w, prefix, heads):
    batch, tokens, width = x.shape
    qkv = x @ w[f"{prefix}.qkv.weight"].T + w[f"{prefix}.qkv.bias"]
    q, k, v = (
        part.reshape(batch, tokens, heads, width // heads).permute(0, 2, 1, 3)
        for part in torch.chunk(qkv, 3, dim=2)
    )
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(width // heads)
    mask = torch.tril(torch.ones(tokens, tokens))
    scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    mixed = (
        torch.einsum("bhij,bhjd->bhid", weights, v)
        .permute(0, 2, 1, 3)
        .reshape(batch, tokens, width)
    )
    return mixed @ w[f"{prefix}.out.weight"].T + w[f"{prefix}.out.bias"]


def ffn(x, w, prefix):
    hidden = gelu(x @ w[f"{prefix}.up.weight"].T + w[f"{prefix}.up.bias"])
    return hidden @ w[f"{prefix}.down.weight"].T + w[f"{prefix}.down.bias"]


def logits(w, tokens, blocks, heads, dt):
    """Logits from a state dict, for a batch of token ids."""
    x = w["token_embedding.weight"][tokens] + w["position_embedding.weight"][: tokens.shape[1]]
    for block in range(blocks):
        first, second = f"depth.sublayers.{2 * block}", f"depth.sublayers.{2 * block + 1}"
        normed = layer_norm(x, w[f"{first}.input_norm.weight"], w[f"{first}.input_norm.bias"])
        x = x + dt * attention(normed, w, f"{first}.field", heads)
        normed = layer_norm(x, w[f"{second}.input_norm.weight"], w[f"{second}.input_norm.bias"])
        x = x + dt * ffn(normed, w, f"{second}.field")
    x = layer_norm(x, w["final_norm.weight"], w["final_norm.bias"])
    return x @ w["token_embedding.weight"].T


def loss(w, tokens, targets, blocks, heads, dt):
    """Mean cross-entropy in nats."""
    out = logits(w, tokens, blocks, heads, dt)
    return (torch.logsumexp(out, dim=-1) - torch.gather(out, -1, targets[..., None])[..., 0]).mean()
