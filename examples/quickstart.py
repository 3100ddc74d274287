"""A variant in a few lines, called on a Hopper GPU where there is one and on the reference elsewhere.

python examples/quickstart.py
"""

from __future__ import annotations

import torch

import attncc

SOURCE = """
attention my_window(window: i32):
    "Soft-capped scores over a sliding window, farther keys weighing less."
    tensor slope[h]: f32
    f_logits = softcap(s, 30.0) + slope[h] * (j - i)
    mask     = i - window < j <= i
"""


def main() -> None:
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = "cuda" if on_gpu else "cpu"
    reference = attncc.reference(SOURCE, head_dim=128)
    attention = attncc.compile(SOURCE, head_dim=128) if on_gpu else reference

    # 100 new queries after 400 keys that are already there: [batch, length, heads, head_dim], four heads share a key.
    q = torch.randn(2, 100, 8, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 500, 2, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    slope = 2.0 ** -torch.arange(1.0, 9.0, device=device)

    out, lse = attention(q, k, v, window=128, slope=slope, return_lse=True)
    print(f"{'kernel' if on_gpu else 'reference'} on {device}: out {list(out.shape)}, lse {list(lse.shape)}")

    want = reference(q, k, v, window=128, slope=slope)  # float64, from the same text
    print(f"relative error against the float64 reference: {float((out - want).norm() / want.norm()):.1e}")


if __name__ == "__main__":
    main()
