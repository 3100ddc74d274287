"""Bad plans and bad runs: refused before anything changes, naming the argument; the object goes on with its plan."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, artifact, served_artifact
from test_batch import CAUSAL, TABLE, attention, rows

from attncc.runtime.kernel import Kernel
from attncc.runtime.served_launch import check_reach, key_strides, unfit_rows

BF16 = torch.bfloat16


@pytest.fixture
def driver():
    return FakeDriver(sms=4)


def zeros(*shape, dtype=BF16, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


# ---------------------------------------------------------------------- the object

OBJECTS = [
    (
        {"num_qo_heads": 7},
        ValueError,
        "num_qo_heads: expected a multiple of num_kv_heads, found 7 query heads and 2 kv",
    ),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads: expected 1 to 2³¹−1, found 0"),
    ({"num_qo_heads": 8.0}, TypeError, "num_qo_heads: expected an int, found float"),
    ({"max_batch_size": None}, TypeError, "max_batch_size: expected an int, found NoneType"),
    ({"max_batch_size": True}, TypeError, "max_batch_size: expected an int, found bool"),
    ({"max_qo_rows": 2**30}, ValueError, "max_qo_rows: expected fewer than 2³¹ rows times heads of a group, found"),
    ({"max_kv_pages": 0}, ValueError, "max_kv_pages: expected 1 to 2³¹−1, found 0"),
    ({"page_size": -1}, ValueError, "page_size: expected 1 to 2³¹−1, found -1"),
    ({"partial_rows": 0}, ValueError, "partial_rows: expected 1 to 2³¹−1, found 0"),
    ({"deterministic": True}, ValueError, "deterministic: expected None or 'batch_invariant', found True"),
    ({"device": "cuda"}, ValueError, "device: expected a cpu device, found cuda"),
    ({"device": "gpu"}, ValueError, "device: expected a cpu device, found 'gpu'"),
    ({"kernel": "causal.attn"}, TypeError, "kernel: expected an attncc.Kernel, found str"),
]


@pytest.mark.parametrize(("change", "error", "says"), OBJECTS)
def test_bad_objects(driver, change, error, says):
    from attncc.runtime.batch import BatchAttention

    given = {
        "num_qo_heads": 8, "num_kv_heads": 2, "page_size": 16, "max_batch_size": 8, "max_qo_rows": 512, "device": "cpu",
        "kernel": Kernel(served_artifact(), driver), **change,
    }  # fmt: skip
    with pytest.raises(error) as e:
        BatchAttention(given.pop("kernel"), **given)
    assert says in str(e.value)


# ---------------------------------------------------------------------- plans

NAMES = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
PLANS = [
    ({"qo_indptr": [1, 1, 1, 6]}, ValueError, "qo_indptr: expected offsets that start at 0, found 1"),
    ({"qo_indptr": [0, 2, 1, 6]}, ValueError, "qo_indptr: expected offsets that don't decrease, found 1 after 2 at in"),
    ({"qo_indptr": []}, ValueError, "qo_indptr: expected B + 1 offsets, found none"),
    ({"qo_indptr": [0.0, 1.0, 1.0, 6.0]}, TypeError, "qo_indptr: expected int32 or int64, found float64"),
    ({"qo_indptr": torch.tensor([0, 1, 1, 6], dtype=torch.int16)}, TypeError, "qo_indptr: expected int32 or int64"),
    ({"qo_indptr": torch.tensor([True])}, TypeError, "qo_indptr: expected int32 or int64, found bool"),
    ({"qo_indptr": [False, True]}, TypeError, "qo_indptr: expected int32 or int64, found bool"),
    ({"qo_indptr": [[0, 1], [1, 6]]}, ValueError, "qo_indptr: expected one dimension, found shape [2, 2]"),
    ({"qo_indptr": [[0], [1, 6]]}, TypeError, "qo_indptr: expected a list of ints, found one of other things"),
    ({"qo_indptr": [0, 2**70]}, TypeError, "qo_indptr: expected"),
    ({"qo_indptr": torch.zeros(4, dtype=torch.int32, device="meta")}, ValueError, "qo_indptr: expected a tensor with"),
    ({"qo_indptr": 6}, TypeError, "qo_indptr: expected a tensor, an array or a list of ints, found int"),
    ({"qo_indptr": None}, TypeError, "qo_indptr: expected a tensor, an array or a list of ints, found NoneType"),
    ({"qo_indptr": [0, 1, 2, 2**31]}, ValueError, "qo_indptr: expected offsets below 2³¹, found 2147483648"),
    ({"qo_indptr": [0, 1, 2, 600]}, ValueError, "qo_indptr: expected at most max_qo_rows = 512 query rows, found 600"),
    ({"qo_indptr": [0] * 10, "kv_indptr": [0] * 10, "last_page_len": [0] * 9}, ValueError,
     "qo_indptr: expected at most max_batch_size = 8 requests, found 9"),
    ({"kv_indptr": [0, 3, 4]}, ValueError, "kv_indptr: expected 4 offsets as in qo_indptr (a batch of 3), found 3"),
    ({"kv_indptr": [0, 3, 2, 6]}, ValueError, "kv_indptr: expected offsets that don't decrease, found 2 after 3"),
    ({"kv_indices": None}, TypeError, "kv_indices: expected a tensor, an array or a list of ints, found NoneType"),
    ({"kv_indices": [7, 2, 9]}, ValueError, "kv_indices: expected at least 6 page ids, kv_indptr[-1], found 3"),
    ({"kv_indices": [7, 2, 9, 4, -1, 5]}, ValueError, "kv_indices: expected page ids from 0 to 2³¹−1, found -1 at ind"),
    ({"kv_indices": [7, 2, 9, 4, 0, 2**31]}, ValueError, "found 2147483648 at index 5"),
    ({"last_page_len": [16, 0, 3]}, ValueError, "last_page_len: expected 1 to 16 (page_size), found 0 at index 1"),
    ({"last_page_len": [16, 1, 17]}, ValueError, "last_page_len: expected 1 to 16 (page_size), found 17 at index 2"),
    ({"last_page_len": [16, 1]}, ValueError, "last_page_len: expected 3 lengths, one a request, found 2"),
    ({"last_page_len": None}, TypeError, "last_page_len: expected a tensor, an array or a list of ints, found NoneTyp"),
    ({"shared_prefix": True}, ValueError, "shared_prefix: expected None or 'auto', found True"),
    ({"window": 1.5}, TypeError, "window: expected an int (i32), found float 1.5"),
    ({"wimdow": 1}, TypeError, "wimdow: unknown parameter; test takes sink, window; did you mean 'window'?"),
    ({"sink": torch.zeros(8)}, TypeError, "sink: expected in run, since it is a tensor, found in a plan"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), PLANS)
def test_bad_plans(driver, change, error, says):
    attn = attention(driver, scalars=[("window", "i32", 5)], tensors=[("sink", ["h"], "f32")], visible=CAUSAL)
    good = dict(zip(NAMES, TABLE, strict=True))
    attn.plan(**good)
    before = attn._planned
    with pytest.raises(error) as e:
        attn.plan(**{**good, **change})
    assert says in str(e.value)
    assert attn._planned is before
    k = rows(10, 16, 2, 128)
    attn.run(rows(6, 8, 128), (k, k), sink=torch.zeros(8))
    assert len(driver.launches) == 1


def test_more_pages_than_declared(driver):
    attn = attention(driver, max_kv_pages=5)
    with pytest.raises(ValueError, match="kv_indices: expected at most max_kv_pages = 5 page ids, found 6"):
        attn.plan(*TABLE)
    attn.plan([0, 1], [0, 5], [7, 2, 9, 4, 0, -1, -1], [3])


def test_ragged_plans_take_no_pages(driver):
    attn = attention(driver, page_size=None)
    for name, given in (("kv_indices", [0]), ("last_page_len", [1])):
        with pytest.raises(ValueError, match=f"{name}: expected none, since keys are ragged"):
            attn.plan([0, 1], [0, 1], **{name: given})


def test_more_partial_states_than_there_is_room_for(driver):
    attn = attention(driver, deterministic="batch_invariant", partial_rows=8)
    with pytest.raises(ValueError, match="partial_rows: expected at least 64, found 8"):
        attn.plan([0, 1], [0, 4000], [0] * 4000, [16])


CASCADES = [
    (5, TypeError, "levels: expected a list of levels, outermost first, found int"),
    ([], TypeError, "levels: expected a list of levels, outermost first, found list of 0"),
    ([([0, 2], [0, 1])], TypeError, "levels[0]: expected (qo_indptr, kv_indptr, kv_indices, last_page_len), found tup"),
    ([([0, 2], [0, 1], [3], [16]), ([0, 1, 3], [0, 1, 2], [4, 5], [1, 2])], ValueError, "levels[1].qo_indptr"),
    ([([0, 1, 2], [0, 1, 2], [3, 4], [16, 16]), ([0, 2], [0, 1], [4], [1])], ValueError, "crosses row 1"),
    ([([0, 2], [0, 1], [3], [17])], ValueError, "levels[0].last_page_len: expected 1 to 16 (page_size), found 17 at i"),
    ([([0, 2], [0, 1], [3], [16])] * 9, ValueError, "levels: expected 1 to 4, found 9"),
]  # fmt: skip


@pytest.mark.parametrize(("levels", "error", "says"), CASCADES)
def test_bad_cascades(driver, levels, error, says):
    with pytest.raises(error) as e:
        attention(driver).plan_cascade(levels)
    assert says in str(e.value)


# ---------------------------------------------------------------------- runs

SHIFTED = zeros(10 * 16 * 2 * 128 + 1)[1:].view(10, 16, 2, 128)
ODD = zeros(10, 16, 2, 132)[..., :128]
RUNS = [
    ({"q": zeros(6, 1, 8, 128)}, ValueError, "q: expected rank 3, [nnz_qo, num_qo_heads, head_dim_qk], found shape [6"),
    ({"q": zeros(5, 8, 128), "gate": torch.zeros(5, 8)}, ValueError, "q: expected 6 rows, qo_indptr[-1] of the plan"),
    ({"q": zeros(7, 8, 128), "gate": torch.zeros(7, 8)}, ValueError, "q: expected 6 rows, qo_indptr[-1] of the plan"),
    ({"q": zeros(6, 4, 128)}, ValueError, "q: expected num_qo_heads 8 as in BatchAttention, found shape [6, 4, 128]"),
    ({"q": zeros(6, 8, 64)}, ValueError, "q: expected head_dim_qk 128 (what the kernel was compiled for)"),
    ({"q": zeros(6, 8, 128, dtype=torch.float16)}, TypeError, "q: expected dtype bfloat16"),
    ({"q": zeros(6, 8, 128, device="meta")}, ValueError, "q: expected a tensor on a cpu device, found meta"),
    ({"q": zeros(6, 8, 256)[..., ::2]}, ValueError, "q: expected a contiguous last dimension"),
    ({"q": None}, TypeError, "q: expected a torch.Tensor, found NoneType"),
    ({"kv": zeros(2, 10, 16, 2, 128)}, TypeError, "kv: expected a pair (k, v), found a tensor of shape [2, 10, 16, 2,"),
    ({"kv": (zeros(10, 16, 2, 128),)}, TypeError, "kv: expected a pair (k, v), found tuple of 1"),
    ({"kv": None}, TypeError, "kv: expected a pair (k, v), found NoneType"),
    ({"k": zeros(10, 2, 128)}, ValueError, "k: expected rank 4, [num_pages, page_size, num_kv_heads, head_dim_qk]"),
    ({"k": zeros(10, 8, 2, 128)}, ValueError, "k: expected page_size 16 as in BatchAttention, found shape [10, 8, 2,"),
    ({"v": zeros(10, 16, 4, 128)}, ValueError, "v: expected num_kv_heads 2 as in BatchAttention, found"),
    ({"v": zeros(11, 16, 2, 128)}, ValueError, "v: expected num_pages 10 as in k, found shape [11, 16, 2, 128]"),
    ({"k": zeros(9, 16, 2, 128), "v": zeros(9, 16, 2, 128)}, ValueError,
     "k: expected at least 10 pages, since kv_indices of the plan has id 9, found 9"),
    ({"k": SHIFTED}, ValueError, "k: expected a base address that is a multiple of 16 bytes, found 0x"),
    ({"v": ODD}, ValueError, "v: expected strides that are multiples of 16 bytes, below 32 GiB, found [4224, 264, 132"),
    ({"out": zeros(6, 8, 64)}, ValueError, "out: expected shape [6, 8, 128], found shape [6, 8, 64]"),
    ({"lse": torch.zeros(8, 6)}, ValueError, "lse: expected shape [6, 8], found shape [8, 6]"),
    ({"lse": zeros(6, 8)}, TypeError, "lse: expected dtype float32, found bfloat16"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool, found int"),
    ({"doc": torch.zeros(2, 60)}, ValueError, "doc: expected B = 3, the requests of the plan, found 2"),
    ({"doc": torch.zeros(4, 60)}, ValueError, "doc: expected B = 3, the requests of the plan, found 4"),
    ({"doc": torch.zeros(3, 47)}, ValueError, "doc: expected at least 48 positions, the largest kv_len of the plan, f"),
    ({"gate": torch.zeros(5, 8)}, ValueError, "gate: expected shape [nnz_qo, h] = [6, 8], found shape [5, 8]"),
    ({"window": None}, TypeError, "window: expected an int (i32), found NoneType"),
    ({"wimdow": 3}, TypeError, "wimdow: unknown parameter"),
    ({"q": zeros(6, 8, 128).requires_grad_()}, ValueError, "q: expected a tensor that needs no gradient"),
]  # fmt: skip


def good():
    tensors = {"doc": torch.zeros(3, 60), "gate": torch.zeros(6, 8)}
    return {"q": zeros(6, 8, 128), "k": zeros(10, 16, 2, 128), "v": zeros(10, 16, 2, 128), "window": 5, **tensors}


def run(attn, given):
    given = dict(given)
    kv = (given.pop("k"), given.pop("v"))
    return attn.run(given.pop("q"), given.pop("kv", kv), **given)


@pytest.mark.parametrize(("change", "error", "says"), RUNS)
def test_bad_runs(driver, change, error, says):
    attn = attention(
        driver, scalars=[("window", "i32", None)], tensors=[("doc", ["b", "pos"], "f32"), ("gate", ["iq", "h"], "f32")]
    )
    attn.plan(*TABLE)
    for _ in range(2):
        with pytest.raises(error) as e:
            run(attn, {**good(), **change})
        assert says in str(e.value)
        assert driver.launches == []
    run(attn, good())
    assert len(driver.launches) == 1
    for _ in range(2):  # also when all else is bound
        with pytest.raises(error):
            run(attn, {**good(), **change})
    assert len(driver.launches) == 1


def test_a_run_before_any_plan(driver):
    with pytest.raises(ValueError, match="run: expected a plan before it, found none"):
        run(attention(driver), {x: good()[x] for x in "qkv"})


def test_a_bound_run_is_checked_against_every_plan(driver):
    attn = attention(driver)
    q, k = rows(6, 8, 128), rows(10, 16, 2, 128)
    for _ in range(2):
        attn.plan(*TABLE)
        attn.run(q, (k, k))
        attn.plan([0, 6], [0, 1], [10], [1])
        with pytest.raises(ValueError, match="k: expected at least 11 pages"):
            attn.run(q, (k, k))
        attn.plan([0, 5], [0, 1], [9], [1])
        with pytest.raises(ValueError, match="q: expected 5 rows"):
            attn.run(q, (k, k))
    assert len(driver.launches) == 2


def test_ragged_rows_must_be_there(driver):
    attn = attention(driver, page_size=None)
    attn.plan([0, 1, 2], [0, 30, 60])
    k = rows(59, 2, 128)
    with pytest.raises(
        ValueError, match=r"k: expected at least 60 rows, kv_indptr\[-1\] or kv_len of the plan, found 59"
    ):
        attn.run(rows(2, 8, 128), (k, k))
    k = rows(64, 2, 128)
    attn.run(rows(2, 8, 128), (k, k))


def test_weights_without_lse(driver):
    attn = attention(driver, scan="none")
    attn.plan(*TABLE)
    k = rows(10, 16, 2, 128)
    for options in ({"return_lse": True}, {"lse": torch.zeros(6, 8)}):
        with pytest.raises(ValueError, match="expected none, since test has scan = none"):
            attn.run(rows(6, 8, 128), (k, k), **options)
    attn.run(rows(6, 8, 128), (k, k))


def test_a_scalar_that_is_nan_is_the_same_as_itself(driver):
    attn = attention(driver, scalars=[("x", "f32", None)])
    attn.plan(*TABLE, x=math.nan)
    k = rows(10, 16, 2, 128)
    attn.run(rows(6, 8, 128), (k, k), x=np.float32(math.nan))
    with pytest.raises(ValueError, match="x: expected nan as in the plan, found 1"):
        attn.run(rows(6, 8, 128), (k, k), x=1.0)


@pytest.mark.parametrize("stride_zero", [True, False])
def test_a_cache_that_tma_cannot_see(stride_zero):
    driver = FakeDriver(stride_zero=stride_zero)
    attn = attention(driver)
    attn.plan(*TABLE)
    shared = rows(10, 16, 1, 128).expand(-1, -1, 2, -1)
    if stride_zero:
        attn.run(rows(6, 8, 128), (shared, shared))
        assert driver.encoded[0].strides[1] == 0
    else:
        with pytest.raises(ValueError, match="k: expected strides that TMA can address, found"):
            attn.run(rows(6, 8, 128), (shared, shared))


@pytest.mark.parametrize(
    ("pages", "says"), [(2**22, None), (2**22 + 1, "k: expected a cache that spans at most 64 GiB")]
)
def test_a_cache_too_far_to_gather(pages, says):
    """Pages of 4 rows, 16 KiB apart: the last row of 2^22 pages starts just below 64 GiB."""
    far = torch.empty_strided((pages, 4, 2, 128), (8192, 256, 128, 1), dtype=BF16, device="meta")
    units = key_strides("k", far)
    assert units == [1024, 32, 16]
    if says is None:
        check_reach("k", far.shape, units)
    else:
        with pytest.raises(ValueError, match=says):
            check_reach("k", far.shape, units)


def test_only_kernels_that_gather_mind(driver, monkeypatch):
    monkeypatch.setattr("attncc.runtime.served_launch.GATHERED", 2000)
    q, k = rows(6, 1, 128), rows(10, 16, 1, 128)
    for source in ("tma", "gather"):
        attn = attention(driver, source=source, heads=(1, 1))
        attn.plan(*TABLE)
        if source == "tma":
            attn.run(q, (k, k))
        else:
            with pytest.raises(ValueError, match="v: expected a cache that spans at most 64 GiB"):
                attn.run(q, (k.as_strided((10, 16, 1, 128), (128, 128, 128, 1)), k))


def test_rows_too_far_apart_are_copied():
    far = lambda n: torch.empty_strided((n, 8, 128), (2**30, 128, 1), dtype=BF16, device="meta")  # noqa: E731
    assert not unfit_rows(far(32))
    assert unfit_rows(far(33))
    assert unfit_rows(torch.empty_strided((2, 8, 128), (2**31, 128, 1), dtype=BF16, device="meta"))
    assert not unfit_rows(torch.empty_strided((1, 8, 128), (2**31 + 1, 128, 1), dtype=BF16, device="meta"))


def test_a_dense_artifact_serves_nothing(driver):
    with pytest.raises(ValueError, match="expected an artifact for layout 'paged', page_size 16"):
        attention(driver, kernel=Kernel(artifact(), driver))
