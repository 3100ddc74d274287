"""Tensor maps: strides that TMA takes, and a cache that never serves another tensor's map."""

from __future__ import annotations

import pytest
import torch

from attncc.runtime.tensor_map import MapCache, tensor_map, zero_map

BOX = (64, 128, 1, 1)


def of(t):
    return tensor_map(t.shape, t.stride(), "bf16", BOX, 3)


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_dimensions_are_innermost_first_and_strides_in_bytes():
    m = of(meta(2, 300, 8, 128))
    assert m.dims == (128, 300, 8, 2)
    assert m.strides == (8 * 128 * 2, 128 * 2, 300 * 8 * 128 * 2)
    assert m.span == 2 * 300 * 8 * 128 * 2
    assert (m.box, m.swizzle) == (BOX, 3)


def test_views_keep_their_strides():
    packed = meta(2, 300, 3, 8, 128)
    assert of(packed[:, :, 1]).strides == (3 * 8 * 128 * 2, 128 * 2, 300 * 3 * 8 * 128 * 2)
    hnd = meta(2, 8, 300, 128).transpose(1, 2)
    assert of(hnd).strides == (128 * 2, 300 * 128 * 2, 8 * 300 * 128 * 2)


def test_a_dimension_of_one_gets_a_stride_that_tma_takes():
    odd = torch.empty_strided((1, 300, 1, 72), (7, 72, 3, 1), dtype=torch.bfloat16, device="meta")
    assert of(odd).strides == (144, 144, 144)


def test_broadcast_dimensions_have_stride_zero():
    assert of(meta(1, 300, 8, 128).expand(4, -1, -1, -1)).strides[2] == 0
    assert of(meta(2, 300, 1, 128).expand(-1, -1, 8, -1)).strides[1] == 0


@pytest.mark.parametrize("stride", [(300 * 1028, 1028, 128, 1), (300 * 1024, 1024, 132, 1), (2**39, 1024, 128, 1)])
def test_strides_that_tma_cannot_use(stride):
    t = torch.empty_strided((2, 300, 8, 128), stride, dtype=torch.bfloat16, device="meta")
    assert of(t) is None


def test_the_cache_encodes_once_for_each_map():
    calls = []

    def encode(wanted, address):
        calls.append(wanted)
        return bytes([len(calls)]) * 128

    cache = MapCache(encode)
    a, b = of(meta(2, 300, 8, 128)), of(meta(2, 301, 8, 128))
    assert cache.get(a, 16) == cache.get(of(meta(2, 300, 8, 128)), 4096)
    assert cache.get(b, 16) != cache.get(a, 16)
    assert cache.get(zero_map("bf16", BOX, 3), 0) != cache.get(zero_map("bf16", BOX, 2), 0)
    assert len(calls) == 4


def test_the_map_of_an_empty_tensor_holds_sixteen_bytes():
    assert zero_map("f16", BOX, 3).span == 16
