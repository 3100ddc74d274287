"""Build a kernel on any machine, no GPU needed, and load it where there is one.

python examples/build_and_load.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import attncc
from attncc.compiler import build_artifact

HERE = Path(__file__).parent


def main(directory: str) -> None:
    manifest = build_artifact(HERE / "gpt_oss.attn", directory, variant="gpt_oss_sliding", head_dim=64)
    kernel = manifest["kernels"]["forward"]
    print(f"{kernel['entry']}: tile {kernel['tile_q']}x{kernel['tile_kv']}, {kernel['registers']} registers")
    print("in", directory, "are", ", ".join(sorted(p.name for p in Path(directory).iterdir())))

    # Everything below needs torch, numpy and cuda-bindings alone: the directory is all there is to deploy.
    attention = attncc.load(directory)
    if not torch.cuda.is_available():
        print("no GPU here: copy the directory to a machine with a Hopper GPU and load it there")
        return
    q = torch.randn(1, 300, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 300, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(attention(q, k, v, sink=torch.zeros(64, device="cuda")).shape)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
