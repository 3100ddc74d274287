"""Attention variants written out in plain torch, one function each, without the IR, the language or the oracle.

Every formula takes q [B, qo_len, H, D], k [B, kv_len, G, D], v [B, kv_len, G, E] in float64 and its parameters by name,
and returns (out, lse), lse None where the variant has none.  Positions are the language's: the last query stands at
the last key.
"""

from __future__ import annotations

import cmath
import math

import torch
import torch.nn.functional as F


def positions(q, k):
    """Query positions as a column, key positions as a row."""
    qo_len, kv_len = q.shape[1], k.shape[1]
    return torch.arange(kv_len - qo_len, kv_len)[:, None], torch.arange(kv_len)[None, :]


def scores(q, k, scale=None):
    """Scaled scores [B, H, qo_len, kv_len]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)


def weigh(w, v):
    return torch.einsum("bhij,bjhe->bihe", w, v.repeat_interleave(w.shape[1] // v.shape[2], dim=2))


def attend(logits, visible, v, sink=None):
    """Softmax over the visible keys, beside one more logit a head where there is a sink."""
    logits = logits.masked_fill(~visible, -math.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    lse = logits.logsumexp(-1)
    w = logits.softmax(-1).nan_to_num(0.0)
    return weigh(w[..., : v.shape[1]], v), lse.transpose(1, 2)


def plain(q, k, v):
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
    ).transpose(1, 2), scores(q, k).logsumexp(-1).transpose(1, 2)


def causal(q, k, v):
    i, j = positions(q, k)
    return attend(scores(q, k), j <= i, v)


def sliding_window(q, k, v, window):
    i, j = positions(q, k)
    return attend(scores(q, k), (j <= i) & (j > i - window), v)


def sliding_window_sink(q, k, v, window, sinks):
    i, j = positions(q, k)
    return attend(scores(q, k), (j <= i) & ((j > i - window) | (j < sinks)), v)


def alibi_bloom(q, k, v, slope):
    """Bloom adds slope * j before the softmax: a constant of the row away from the paper's slope * (j - i)."""
    i, j = positions(q, k)
    return attend(scores(q, k) + slope.view(-1, 1, 1) * j, j <= i, v)


def alibi_falcon(q, k, v, slope):
    """Falcon scales score and bias together: (q k + slope * j) / sqrt(D)."""
    i, j = positions(q, k)
    return attend((scores(q, k, 1.0) + slope.view(-1, 1, 1) * j) / math.sqrt(q.shape[-1]), j <= i, v)


def t5_bucket(distance, bidirectional, num_buckets=32, max_distance=128):
    """Bucket of a memory position minus a query position (mesh-tensorflow's definition)."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    far = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return bucket + min(exact + int(far), num_buckets - 1)


def _t5(q, k, v, table, bidirectional):
    i, j = positions(q, k)
    bucket = torch.tensor([[t5_bucket(int(d), bidirectional) for d in row] for row in j - i]).view(len(i), -1)
    visible = torch.ones_like(bucket, dtype=torch.bool) if bidirectional else j <= i
    return attend(scores(q, k, 1.0) + table[:, bucket], visible, v)


def t5_encoder(q, k, v, table):
    return _t5(q, k, v, table, True)


def t5_decoder(q, k, v, table):
    return _t5(q, k, v, table, False)


def softcap(q, k, v, cap):
    i, j = positions(q, k)
    return attend(cap * torch.tanh(scores(q, k, 256**-0.5) / cap), j <= i, v)


def sink(q, k, v, sink):
    i, j = positions(q, k)
    return attend(scores(q, k), j <= i, v, sink)


def softmax_one(q, k, v):
    i, j = positions(q, k)
    e = scores(q, k).exp() * (j <= i)
    total = 1 + e.sum(-1, keepdim=True)
    return weigh(e / total, v), total.log().squeeze(-1).transpose(1, 2)


def sigmoid(q, k, v, bias):
    i, j = positions(q, k)
    return weigh(1 / (1 + (-scores(q, k) - bias).exp()) * (j <= i), v), None


def relu_squared(q, k, v):
    i, j = positions(q, k)
    return weigh(scores(q, k).clamp(min=0) ** 2 * (j <= i), v), None


def documents(q, k, v, doc):
    i, _ = positions(q, k)
    visible = torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool)
    for b in range(q.shape[0]):
        for r in range(q.shape[1]):
            for c in range(int(i[r]) + 1):
                visible[b, 0, r, c] = doc[b, i[r, 0]] == doc[b, c]
    return attend(scores(q, k), visible, v)


def prefix_lm(q, k, v, prefix):
    i, j = positions(q, k)
    return attend(scores(q, k), (j <= i) | (j < prefix.view(-1, 1, 1, 1)), v)


def block_diffusion_sampling(q, k, v, block):
    i, j = positions(q, k)
    return attend(scores(q, k), j < (i.div(block, rounding_mode="floor") + 1) * block, v)


def block_diffusion_training(q, k, v, block):
    """[noisy; clean]: noisy blocks see themselves and earlier clean blocks, clean blocks are block-causal."""
    n = k.shape[1] // 2
    visible = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    for r in range(q.shape[1]):
        at = r + k.shape[1] - q.shape[1]
        for c in range(k.shape[1]):
            if at < n:
                own, before = c < n and c // block == at // block, c >= n and (c - n) // block < at // block
            else:
                own, before = False, c >= n and (c - n) // block <= (at - n) // block
            visible[r, c] = own or before
    return attend(scores(q, k), visible, v)


def neighbourhood_2d(q, k, v, width, radius):
    height = k.shape[1] // width
    visible = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    for r in range(q.shape[1]):
        at = r + k.shape[1] - q.shape[1]
        top = min(max(at // width - radius, 0), height - 1 - 2 * radius)
        left = min(max(at % width - radius, 0), width - 1 - 2 * radius)
        for y in range(top, top + 2 * radius + 1):
            for x in range(left, left + 2 * radius + 1):
                visible[r, y * width + x] = True
    return attend(scores(q, k), visible, v)


def tree_verify(q, k, v, prefix, parents):
    """parents[b][t] is the draft that draft t continues, -1 at the root: a draft sees the chain up from itself."""
    visible = torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool)
    for b, tree in enumerate(parents):
        for r in range(q.shape[1]):
            visible[b, 0, r, : int(prefix[b])] = True
            t = r
            while t >= 0:
                visible[b, 0, r, int(prefix[b]) + t] = True
                t = tree[t]
    return attend(scores(q, k), visible, v)


def turn(x, at, inv_freq, style, magnitude=1.0):
    """RoPE by complex numbers: feature pair n of row r is turned by at[r] * inv_freq[n]."""
    out = x.clone()
    half = len(inv_freq)
    for n, f in enumerate(inv_freq):
        a, b = (n, n + half) if style == "neox" else (2 * n, 2 * n + 1)
        for r in range(x.shape[1]):
            z = torch.complex(x[:, r, :, a], x[:, r, :, b]) * cmath.rect(magnitude, int(at[r]) * f)
            out[:, r, :, a], out[:, r, :, b] = z.real, z.imag
    return out


def frequencies(theta, dims):
    return [1.0 / theta ** (2 * n / dims) for n in range(dims // 2)]


def frequencies_llama31(theta, dims, factor, low_freq_factor, high_freq_factor, original):
    """transformers' "llama3" rope type."""
    found = []
    for f in frequencies(theta, dims):
        wavelength = 2 * math.pi / f
        if wavelength < original / high_freq_factor:
            found.append(f)
        elif wavelength > original / low_freq_factor:
            found.append(f / factor)
        else:
            smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            found.append((1 - smooth) * f / factor + smooth * f)
    return found


def frequencies_yarn(theta, dims, factor, original, beta_fast=32, beta_slow=1):
    """transformers' "yarn" rope type, truncated bounds."""

    def correction_dim(rotations):
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction_dim(beta_fast)), 0), min(math.ceil(correction_dim(beta_slow)), dims - 1)
    high = high + 0.001 if low == high else high
    found = []
    for n, f in enumerate(frequencies(theta, dims)):
        extrapolated = 1 - min(max((n - low) / (high - low), 0), 1)
        found.append(f / factor * (1 - extrapolated) + f * extrapolated)
    return found


def rope(q, k, v, inv_freq, style="neox", magnitude=1.0):
    i, j = positions(q, k)
    q, k = turn(q, i[:, 0], inv_freq, style, magnitude), turn(k, j[0], inv_freq, style, magnitude)
    return attend(scores(q, k), j <= i, v)


def rope_tables(q, k, v, cos, sin):
    """Interleaved rotation of all features with given tables; a row before position 0 turns as position 0 does."""
    i, j = positions(q, k)

    def apply(x, at):
        c, s = cos[at][None, :, None], sin[at][None, :, None]
        a, b = x[..., 0::2], x[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = a * c - b * s, a * s + b * c
        return out

    return attend(scores(apply(q, i[:, 0].clamp(min=0)), apply(k, j[0])), j <= i, v)


def qk_norm(q, k, v, wq, wk, eps):
    def norm(x, w):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w

    return causal(norm(q, wq), norm(k, wk), v)


def qk_layernorm(q, k, v, w, b):
    return causal(F.layer_norm(q, q.shape[-1:], w, b, 1e-6), F.layer_norm(k, k.shape[-1:], w, None, 1e-6), v)


def qk_l2norm(q, k, v, tau):
    def norm(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    i, j = positions(q, k)
    return attend(scores(norm(q), norm(k), 1.0) * tau.view(1, -1, 1, 1), j <= i, v)


def gated_output(q, k, v, gate):
    out, lse = causal(q, k, v)
    return out / (1 + (-gate).exp()), lse


def kv_scales(q, k, v, k_scale, v_scale):
    return causal(q, k * k_scale[..., None], v * v_scale[..., None])


def forgetting(q, k, v, decay):
    i, j = positions(q, k)
    at = i[:, 0].clamp(min=0)
    bias = decay[:, :, at, None] - decay[:, :, None, : k.shape[1]]
    return attend(scores(q, k) + bias, j <= i, v)


def block_topk(q, k, v, selected, size):
    """selected [B, qo_len, G, n]: a query row of a kv head sees only keys of its blocks; -1 selects nothing."""
    i, j = positions(q, k)
    group = q.shape[2] // k.shape[2]
    visible = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for r in range(q.shape[1]):
                for block in selected[b, r, h // group].tolist():
                    if block >= 0:
                        visible[b, h, r, block * size : (block + 1) * size] = True
    return attend(scores(q, k), visible & (j <= i), v)


def dilated(q, k, v, window, step):
    i, j = positions(q, k)
    visible = torch.zeros(len(i), k.shape[1], dtype=torch.bool)
    for n in range(window):
        visible |= j == i - n * step
    return attend(scores(q, k), visible, v)


def chunked(q, k, v, chunk):
    i, j = positions(q, k)
    return attend(scores(q, k), (j <= i) & (j >= i - i % chunk), v)


def global_window(q, k, v, window, first):
    i, j = positions(q, k)
    return attend(scores(q, k), ((i - j).abs() <= window) | (i < first) | (j < first), v)


def position_bias(q, k, v, bias):
    return attend(scores(q, k) + bias[None, :, None, : k.shape[1]], torch.tensor(True), v)


def row_bias(q, k, v, bias):
    """bias [B, qo_len, H, kv_len] added in full."""
    return attend(scores(q, k) + bias.transpose(1, 2), torch.tensor(True), v)


def temperature(q, k, v, floor, factor):
    """Llama 4's attention temperature: q is scaled by a logarithm of its position."""
    i, _ = positions(q, k)
    scale = torch.log(torch.floor((i.clamp(min=0).double() + 1) / floor) + 1) * factor + 1
    return causal(q * scale.view(1, -1, 1, 1), k, v)


def swin_v2(q, k, v, tau, bias):
    """Cosine attention with a clamped learned temperature and a bias looked up in a table of all pairs."""
    cosine = scores(F.normalize(q, dim=-1), F.normalize(k, dim=-1), 1.0)
    logits = cosine * tau.clamp(max=math.log(100.0)).exp().view(1, -1, 1, 1)
    i, j = positions(q, k)
    return attend(logits + 16 * torch.sigmoid(bias[:, i.clamp(min=0), j]), torch.tensor(True), v)


def normed_output(q, k, v, weight):
    """RMS norm of the output, and no output at all where the row attends with little weight: lse below 0."""
    out, lse = causal(q, k, v)
    return F.rms_norm(out, out.shape[-1:], weight, 1e-6) * (lse > 0)[..., None], lse


def key_mask(q, k, v, keep):
    """Padding: keep [B, at least kv_len] says which keys exist."""
    return attend(scores(q, k), keep[:, None, None, : k.shape[1]].bool(), v)
