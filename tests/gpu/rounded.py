"""The reference as kernels compute: what f_k and f_v make is rounded to the dtype of k and v, which nothing else of it
is.  So kernels are held to the error of their own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from attncc.ir import reference


@contextmanager
def rounded_keys(dtype: torch.dtype) -> Iterator[None]:
    init = reference._Heads.__init__

    def rounding(self, *arguments) -> None:
        init(self, *arguments)
        if self.request.qo_len:
            self.k, self.v, self.v_finite = (x.to(dtype).to(x.dtype) for x in (self.k, self.v, self.v_finite))

    with patch.object(reference._Heads, "__init__", rounding):
        yield
