"""The variants that the oracle is checked on: .attn text, the independent formula, and parameters for a shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import formulas
import torch

torch.set_num_threads(1)  # tensors are tiny: with more, threads wait for each other (11 ms a product on a busy machine)


@dataclass(frozen=True)
class Shape:
    B: int
    qo_len: int
    kv_len: int
    H: int
    G: int
    D: int = 16
    E: int = 8


SHAPES = (Shape(2, 5, 9, 4, 2), Shape(1, 12, 12, 6, 1), Shape(2, 7, 4, 3, 3), Shape(3, 1, 11, 2, 1))
LONG = (Shape(1, 40, 150, 2, 1), Shape(2, 30, 30, 2, 2))
GRIDS = (Shape(1, 30, 30, 2, 1), Shape(2, 7, 25, 2, 2))  # images of width 5
FULL = tuple(s for s in SHAPES if s.qo_len <= s.kv_len)


@dataclass(frozen=True)
class Case:
    """`params(shape, g)` gives the call's parameters with random values from generator g; `given(params)` what the
    formula takes (the same, in float64, unless said otherwise)."""

    name: str
    text: str
    formula: Callable
    params: Callable = lambda s, g: {}
    given: Callable = lambda p: p
    shapes: tuple[Shape, ...] = SHAPES

    def attn(self) -> str:
        lines = [line.strip() for line in self.text.strip().splitlines()]
        return f"attention {lines[0]}:\n" + "".join(f"    {line}\n" for line in lines[1:])


def rand(g, *shape):
    return torch.randn(*shape, generator=g)


def ints(g, low, high, *shape):
    return torch.randint(low, high, shape, generator=g, dtype=torch.int32)


def tree(s: Shape, g) -> dict:
    """Random draft trees: every row of q is a draft, and a draft continues an earlier one or the prefix."""
    prefix = torch.full((s.B,), s.kv_len - s.qo_len, dtype=torch.int32)
    words = -(-s.qo_len // 32)
    ancestors = torch.zeros(s.B, s.qo_len, words, dtype=torch.int64)
    for b in range(s.B):
        for t in range(s.qo_len):
            parent = int(torch.randint(-1, t, (), generator=g)) if t else -1
            if parent >= 0:
                ancestors[b, t] = ancestors[b, parent]
            ancestors[b, t, t // 32] |= 1 << (t % 32)
    return {"prefix": prefix, "ancestors": ancestors.to(torch.uint32)}


def parents(p: dict) -> dict:
    """The trees again, from the bits: the nearest earlier draft whose ancestors are a draft's own less itself."""
    found = []
    for rows in p["ancestors"].to(torch.int64).tolist():
        words = [sum(w << (32 * n) for n, w in enumerate(row)) for row in rows]
        found.append([words.index(w ^ (1 << t)) if w ^ (1 << t) else -1 for t, w in enumerate(words)])
    return {"prefix": p["prefix"], "parents": found}


def topk(s: Shape, g) -> dict:
    blocks = -(-s.kv_len // 3)
    return {"selected": ints(g, -1, blocks + 2, s.B, s.qo_len, s.G, 4)}


def tables(s: Shape, g) -> dict:
    angle = rand(g, s.kv_len + 3, s.D // 2)
    return {"c": angle.cos(), "sn": angle.sin()}


def rope_case(name: str, arguments: str, shapes=SHAPES, **given) -> Case:
    text = f"{name}()\nf_q = rope(q, i, {arguments})\nf_k = rope(k, j, {arguments})\nmask = j <= i"
    return Case(name, text, formulas.rope, given=lambda p: given, shapes=shapes)


YARN = formulas.frequencies_yarn(1e4, 16, 4.0, 64)

CASES = [
    Case("plain", "plain()\nmask = true", formulas.plain),
    Case("causal", "causal()\nmask = j <= i", formulas.causal),
    Case(
        "sliding_window", "sliding_window(window: i32)\nmask = i - window < j <= i", formulas.sliding_window,
        lambda s, g: {"window": 3},
    ),
    Case(
        "sliding_window_sink",
        "sliding_window_sink(window: i32, sinks: i32 = 2)\nmask = j <= i and (j < sinks or i - window < j)",
        formulas.sliding_window_sink, lambda s, g: {"window": 4}, lambda p: {**p, "sinks": 2},
    ),
    Case(
        "alibi_bloom", "alibi_bloom()\ntensor slope[h]: f32\nf_logits = s + slope[h] * j\nmask = j <= i",
        formulas.alibi_bloom, lambda s, g: {"slope": 2.0 ** -torch.arange(1.0, s.H + 1)},
    ),
    Case(
        "alibi_falcon",
        """alibi_falcon()
           tensor slope[h]: f32
           scale = 1.0
           f_logits = (s + slope[h] * j) * rsqrt(head_dim_qk)
           mask = j <= i""",
        formulas.alibi_falcon, lambda s, g: {"slope": 2.0 ** -torch.arange(1.0, s.H + 1)},
    ),
    Case(
        "t5_encoder",
        """t5_encoder()
           tensor table[h, 32]: f32 grad
           let r = j - i
           let n = abs(r)
           def far(a) = min(8 + i32(log(f32(a) / 8.0) / log(16.0) * 8.0), 15)
           scale = 1.0
           f_logits = s + table[h, (16 if r > 0 else 0) + (n if n < 8 else far(n))]""",
        formulas.t5_encoder, lambda s, g: {"table": rand(g, s.H, 32)}, shapes=LONG,
    ),
    Case(
        "t5_decoder",
        """t5_decoder()
           tensor table[h, 32]: f32 grad
           let n = max(i - j, 0)
           scale = 1.0
           f_logits = s + table[h, n if n < 16 else min(16 + i32(log(n / 16) / log(8.0) * 16.0), 31)]
           mask = j <= i""",
        formulas.t5_decoder, lambda s, g: {"table": rand(g, s.H, 32)}, shapes=LONG,
    ),
    Case(
        "softcap",
        "gemma2(cap: const f32 = 5.0)\nscale = rsqrt(256.0)\nf_logits = softcap(s, cap)\nmask = j <= i",
        formulas.softcap, given=lambda p: {"cap": 5.0},
    ),
    Case(
        "sink", "gpt_oss()\ntensor bias[h]: f32 grad\nmask = j <= i\nscan = softmax(sink = bias[h])",
        formulas.sink, lambda s, g: {"bias": rand(g, s.H)}, lambda p: {"sink": p["bias"]},
    ),
    Case("softmax_one", "softmax_one()\nmask = j <= i\nscan = softmax(sink = 0.0)", formulas.softmax_one),
    Case(
        "sigmoid", "flash_sigmoid(bias: f32)\nf_logits = sigmoid(s + bias)\nmask = j <= i\nscan = none",
        formulas.sigmoid, lambda s, g: {"bias": -math.log(s.kv_len + 1)},
    ),
    Case("relu_squared", "relu2()\nf_logits = relu(s) ** 2\nmask = j <= i\nscan = none", formulas.relu_squared),
    Case(
        "documents",
        "documents()\ntensor doc[b, pos]: i32 sorted\nmask = j <= i and doc[b, i] == doc[b, j]",
        formulas.documents, lambda s, g: {"doc": ints(g, 0, 4, s.B, s.kv_len + 2).sort(-1).values},
    ),
    Case(
        "prefix_lm", "prefix_lm()\ntensor prefix[b]: i32\nmask = j < prefix[b] or j <= i", formulas.prefix_lm,
        lambda s, g: {"prefix": ints(g, 0, s.kv_len + 1, s.B)},
    ),
    Case(
        "block_diffusion_sampling", "sampling(block: i32 = 16)\nmask = j // block <= i // block",
        formulas.block_diffusion_sampling, lambda s, g: {"block": 3},
    ),
    Case(
        "block_diffusion_training",
        """training(block: i32)
           let n = kv_len // 2
           let clean_i = i >= n
           let clean_j = j >= n
           let block_i = (i - n if clean_i else i) // block
           let block_j = (j - n if clean_j else j) // block
           let own = clean_i == clean_j and block_i == block_j
           mask = own or clean_j and block_j < block_i""",
        formulas.block_diffusion_training, lambda s, g: {"block": 2},
        shapes=(Shape(1, 12, 12, 2, 1), Shape(2, 5, 16, 2, 2)),
    ),
    Case(
        "neighbourhood_2d",
        """neighbourhood(width: i32, radius: i32)
           let height = kv_len // width
           let row = clamp(i // width, radius, height - 1 - radius)
           let column = clamp(i % width, radius, width - 1 - radius)
           mask = abs(j // width - row) <= radius and abs(j % width - column) <= radius""",
        formulas.neighbourhood_2d, lambda s, g: {"width": 5, "radius": 1}, shapes=GRIDS,
    ),
    Case(
        "tree_verify",
        """tree_verify()
           tensor prefix[b]: i32
           tensor ancestors[iq, w]: u32
           let t = j - prefix[b]
           mask = t < 0 or bit(ancestors[iq, t // 32], t % 32)""",
        formulas.tree_verify, tree, parents, shapes=(*FULL, Shape(1, 40, 50, 2, 1)),
    ),
    rope_case("rope_neox", "1e4", inv_freq=formulas.frequencies(1e4, 16)),
    rope_case(
        "rope_interleaved", "500000.0, style = interleaved", inv_freq=formulas.frequencies(5e5, 16), style="interleaved"
    ),
    rope_case("rope_partial", "1e4, dims = 6", inv_freq=formulas.frequencies(1e4, 6)),
    rope_case("rope_linear", "1e4, scaling = linear(2.5)", inv_freq=[f / 2.5 for f in formulas.frequencies(1e4, 16)]),
    rope_case(
        "rope_llama31", "500000.0, scaling = llama31(8.0, 1.0, 4.0, 256)", LONG,
        inv_freq=formulas.frequencies_llama31(5e5, 16, 8.0, 1.0, 4.0, 256),
    ),
    rope_case(
        "rope_yarn", "1e4, scaling = yarn(4.0, 64)", LONG, inv_freq=YARN, magnitude=0.1 * math.log(4.0) + 1
    ),
    rope_case(
        "rope_yarn_far", "1e4, scaling = yarn(40.0, 4096)", inv_freq=formulas.frequencies_yarn(1e4, 16, 40.0, 4096),
        magnitude=0.1 * math.log(40.0) + 1,
    ),
    rope_case(
        "rope_yarn_given", "1e6, dims = 8, style = interleaved, scaling = yarn(4.0, 64, 16, 2, attention_factor = 1.5)",
        LONG, inv_freq=formulas.frequencies_yarn(1e6, 8, 4.0, 64, 16, 2), style="interleaved", magnitude=1.5,
    ),
    Case(
        "rope_tables",
        """rope_tables()
           tensor c[pos, 8]: f32
           tensor sn[pos, 8]: f32
           f_q = rope(q, max(i, 0), style = interleaved, cos = c, sin = sn)
           f_k = rope(k, j, style = interleaved, cos = c, sin = sn)
           mask = j <= i""",
        formulas.rope_tables, tables, lambda p: {"cos": p["c"], "sin": p["sn"]},
    ),
    Case(
        "qk_norm",
        """qk_norm(eps: const f32 = 1e-3)
           tensor wq[d]: f32 grad
           tensor wk[d]: f32 grad
           f_q = rmsnorm(q, wq, eps)
           f_k = rmsnorm(k, wk, eps)
           mask = j <= i""",
        formulas.qk_norm, lambda s, g: {"wq": rand(g, s.D), "wk": rand(g, s.D)}, lambda p: {**p, "eps": 1e-3},
    ),
    Case(
        "qk_layernorm",
        """qk_layernorm()
           tensor w[d]: f32
           tensor bias[d]: f32
           f_q = layernorm(q, w, bias)
           f_k = layernorm(k, w)
           mask = j <= i""",
        formulas.qk_layernorm, lambda s, g: {"w": rand(g, s.D), "bias": rand(g, s.D)},
        lambda p: {"w": p["w"], "b": p["bias"]},
    ),
    Case(
        "qk_l2norm",
        """qk_l2norm()
           tensor tau[h]: f32
           scale = 1.0
           f_q = l2norm(q)
           f_k = l2norm(k)
           f_logits = tau[h] * dot
           mask = j <= i""",
        formulas.qk_l2norm, lambda s, g: {"tau": rand(g, s.H)},
    ),
    Case(
        "gated_output",
        "gated()\ntensor gate[iq, h, e]: bf16 grad\nmask = j <= i\nepilogue = o * sigmoid(gate[iq, h, e])",
        formulas.gated_output, lambda s, g: {"gate": rand(g, s.B, s.qo_len, s.H, s.E).bfloat16()},
    ),
    Case(
        "kv_scales",
        """kv_scales()
           tensor k_scale[j, g]: f32
           tensor v_scale[j, g]: f32
           f_k = k * k_scale[j, g]
           f_v = v * v_scale[j, g]
           mask = j <= i""",
        formulas.kv_scales,
        lambda s, g: {"k_scale": rand(g, s.B, s.kv_len, s.G), "v_scale": rand(g, s.B, s.kv_len, s.G)},
    ),
    Case(
        "forgetting",
        """forgetting()
           tensor decay[b, h, pos]: f32 grad
           f_logits = s + (decay[b, h, i] - decay[b, h, j])
           mask = j <= i""",
        formulas.forgetting,
        lambda s, g: {"decay": -rand(g, s.B, s.H, s.kv_len + 1).abs().cumsum(-1)},
    ),
    Case(
        "block_topk",
        """block_topk()
           tensor selected[iq, g, top]: i32
           domain = blocks(selected[iq, g, :], size = 3)
           mask = j <= i""",
        formulas.block_topk, topk, lambda p: {**p, "size": 3},
    ),
    Case(
        "dilated", "dilated(window: i32, step: i32)\nmask = 0 <= i - j < window * step and (i - j) % step == 0",
        formulas.dilated, lambda s, g: {"window": 3, "step": 2},
    ),
    Case(
        "chunked", "chunked(chunk: i32)\nmask = j <= i and i // chunk == j // chunk", formulas.chunked,
        lambda s, g: {"chunk": 4},
    ),
    Case(
        "global_window",
        "longformer(window: i32, first: i32)\nmask = abs(i - j) <= window or i < first or j < first",
        formulas.global_window, lambda s, g: {"window": 2, "first": 1},
    ),
    Case(
        "position_bias", "position_bias()\ntensor bias[h, pos]: f16\nf_logits = s + bias[h, j]",
        formulas.position_bias, lambda s, g: {"bias": rand(g, s.H, s.kv_len + 4).half()},
    ),
    Case(
        "row_bias", "row_bias()\ntensor bias[iq, h, pos]: f32\nf_logits = s + bias[iq, h, j]",
        formulas.row_bias, lambda s, g: {"bias": rand(g, s.B, s.qo_len, s.H, s.kv_len)},
    ),
    Case(
        "temperature",
        """llama4_temperature(period: f32 = 3.0, factor: f32 = 0.1)
           let at = f32(i if i > 0 else 0)
           f_q = q * (log(floor((at + 1.0) / period) + 1.0) * factor + 1.0)
           mask = j <= i""",
        formulas.temperature, given=lambda p: {"floor": 3.0, "factor": 0.1},
    ),
    Case(
        "swin_v2",
        """swin_v2()
           tensor tau[h]: f32
           tensor bias[h, pos, pos]: f32
           scale = 1.0
           f_q = q * rsqrt(sum(q * q))
           f_k = k * rsqrt(sum(k * k))
           f_logits = s * exp(min(tau[h], log(100.0))) + 16.0 * sigmoid(bias[h, max(i, 0), j])""",
        formulas.swin_v2, lambda s, g: {"tau": 4 + rand(g, s.H), "bias": rand(g, s.H, s.kv_len, s.kv_len + 1)},
    ),
    Case(
        "normed_output",
        """normed_output()
           tensor w[e]: f32
           mask = j <= i
           epilogue = rmsnorm(o, w) * (1.0 if lse > 0.0 else 0.0)""",
        formulas.normed_output, lambda s, g: {"w": rand(g, s.E)}, lambda p: {"weight": p["w"]},
    ),
    Case(
        "key_mask", "padding()\ntensor keep[b, pos]: bool\nmask = keep[b, j]", formulas.key_mask,
        lambda s, g: {"keep": ints(g, 0, 2, s.B, s.kv_len + 1).bool()},
    ),
    Case(
        "key_mask_u8", "padding()\ntensor keep[b, pos]: u8\nmask = keep[b, j] != 0", formulas.key_mask,
        lambda s, g: {"keep": ints(g, 0, 2, s.B, s.kv_len + 1).to(torch.uint8) * 200},
    ),
]  # fmt: skip
