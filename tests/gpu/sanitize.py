"""Every kernel once or twice on small shapes, and nothing else: what compute-sanitizer runs.

    compute-sanitizer --tool memcheck --report-api-errors no python3 tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck python3 tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck python3 tests/gpu/sanitize.py

memcheck and initcheck see small allocations only under PYTORCH_NO_CUDA_MEMORY_CACHING=1.  `--kernel-regex kns=attncc`
leaves out torch's own kernels, which saves memcheck and synccheck time; initcheck must see what those write.  Results
are not judged here: the tests do that.
"""

from __future__ import annotations

import sys

import block_checks
import cases
import serve_cases
import serve_checks
import torch
from checks import compile_case, inputs_for, poisoned

SHAPES = [(1, 129, 300, 2, 1), (2, 70, 33, 3, 1)]
# (qo_len, kv_len) of requests; kernels of listed blocks take the first one alone
SERVED = [[(1, 700), (1, 1), (0, 9), (3, 40)], [(150, 300), (1, 17), (2, 0), (5, 5)]]


def main() -> None:
    todo = [c for c in cases.all_cases() if c.variant != "enormous"]  # its table alone is gigabytes
    for case in todo:
        for sizes in SHAPES:
            shape = case.shape(*sizes)
            given = cases.ODD_SCALARS.get(case.variant, [{}])[0] if case in cases.odd_cases() else {}
            x = inputs_for(case, shape, 1, **given)
            out, lse = poisoned(case, shape)
            softmax = case.load().scan.kind == "softmax"
            wanted = {"lse": lse, "return_lse": True} if softmax else {}
            compile_case(case)(x.q, x.k, x.v, out=out, **wanted, **x.params)
        torch.cuda.synchronize()
    for served in serve_cases.all_served():
        for lengths in SERVED:
            if served.blocks:
                batch = block_checks.make_batch(served, lengths[0], (6, 2), 1)
                attn = block_checks.attention(batch)
                attn.plan_block_sparse(
                    *block_checks.lists(block_checks.blocks_for(batch, 3, 1)), **block_checks.sizes(batch, 3)
                )
            else:
                batch = serve_checks.make_batch(served, lengths, (6, 2), 1)
                attn = serve_checks.attention(batch)
                attn.plan(*batch.table)
            serve_checks.run(attn, batch)
        torch.cuda.synchronize()
    print(f"{len(todo)} + {len(serve_cases.all_served())} kernels, {len(SHAPES)} shapes each", file=sys.stderr)


if __name__ == "__main__":
    main()
