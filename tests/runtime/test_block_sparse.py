"""Block-sparse plans: which keys every row and head is given, what runs must have, and what is refused."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, served_artifact
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_sizes, check_states, make_shape
from test_batch import attention, ints, plan_of, rows

from attncc.runtime import block_sparse
from attncc.runtime import plan as planning
from attncc.runtime.kernel import Kernel


@pytest.fixture
def driver():
    return FakeDriver(sms=4)


def kernel_for_blocks(driver, asked=None, **options):
    """A kernel that has ragged keys, and blocks of any size when these are asked for."""

    def build(layout, page_size):
        if asked is not None:
            asked.append((layout, page_size))
        return served_artifact(page_size=page_size, blocks=layout == "blocks", **options)

    return Kernel(served_artifact(page_size=None, **options), driver, build=build)


def over_blocks(driver, asked=None, heads=(8, 2), **options):
    named = {n: options.pop(n) for n in ("positions", "tensors", "scalars", "source") if n in options}
    return attention(driver, page_size=None, heads=heads, kernel=kernel_for_blocks(driver, asked, **named), **options)


# ---------------------------------------------------------------------- which keys a row is given


def check_covers(shape, matrix, cells):
    """Every row and kv head is given the keys of `cells` [kv heads, rows, keys] once, and told of the whole request."""
    made = block_sparse.plan(shape, matrix)
    check_sizes(shape, made)
    owners = check_states(shape, made)
    assert len(owners) == matrix.qo_len * shape.group_size * shape.num_kv_heads
    for records in (made.items[:, planning.Q_START :], made.targets[:, planning.T_Q_START :]):
        assert (records[:, :3] == (0, matrix.qo_len, matrix.kv_len)).all()
    for packed, head in owners:
        found = []
        for record in owners[packed, head]:
            item = made.items[record]
            local = np.arange(item[planning.BEGIN], item[planning.END])
            listed = matrix.columns[item[planning.TABLE] + local // matrix.block_cols]
            found += (listed * matrix.block_cols + local % matrix.block_cols).tolist()
            assert item[planning.REQUEST] == 0 and item[planning.OFFSET] == 0
        assert found == np.flatnonzero(cells[head, packed // shape.group_size]).tolist()
    return made


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_blocks_of_one_size(data):
    """Any order of columns, the last row and column cut short, kv heads alike or each with blocks of its own."""
    r, c = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([1, 5, 16, 200]))
    count, heads = data.draw(st.integers(1, 4)), 2
    alike = data.draw(st.booleans())
    sees = [
        [data.draw(st.permutations(sorted(data.draw(st.sets(st.integers(0, 5)))))) for _ in range(count)]
        for _ in range(1 if alike else heads)
    ]
    top = 1 + max((x for one in sees for row in one for x in row), default=0)
    kv_len = data.draw(st.integers((top - 1) * c + 1, 6 * c))
    qo_len = data.draw(st.integers((count - 1) * r + 1, count * r))
    indptr = [[0, *accumulate(map(len, one))] for one in sees]
    indices = [[x for row in one for x in row] + [-1] for one in sees]  # padded with anything
    matrix = block_sparse.uniform(
        heads, indptr[0] if alike else indptr, indices[0] if alike else indices, r, c, qo_len, kv_len
    )  # fmt: skip
    cells = np.zeros((heads, qo_len, kv_len), bool)
    for g in range(heads):
        for m, row in enumerate(sees[0 if alike else g]):
            for x in row:
                cells[g, m * r : (m + 1) * r, x * c : (x + 1) * c] = True
    shape = make_shape(page_size=c, num_kv_heads=heads, partial_rows=data.draw(st.sampled_from([100, 4096])))
    check_covers(shape, matrix, cells)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_blocks_of_any_sizes(data):
    """Sizes from 0, alike in all heads or not, and as many rows and keys in each head."""
    heads, step = 2, data.draw(st.sampled_from([1, 8, 24]))
    sizes = []
    for most, unit in ((40, 1), (60, step)):
        one = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
        both = [one, data.draw(st.permutations(one))]
        sizes.append(unit * np.array(both if data.draw(st.booleans()) else [one]))
    row_sizes, col_sizes = sizes
    shape = (data.draw(st.sampled_from([1, heads])), row_sizes.shape[1], col_sizes.shape[1])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    mask = mask.reshape(shape)
    given_ = [x[0] if len(x) == 1 else x for x in (mask, row_sizes, col_sizes)]
    matrix = block_sparse.variable(heads, torch.from_numpy(given_[0]), *given_[1:])
    assert matrix.block_cols % step == 0 or matrix.block_cols == 1 or not col_sizes.any()
    cells = np.stack([
        mask[g % len(mask)].repeat(row_sizes[g % len(row_sizes)], 0).repeat(col_sizes[g % len(col_sizes)], 1)
        for g in range(heads)
    ])  # fmt: skip
    check_covers(make_shape(page_size=matrix.block_cols, num_kv_heads=heads), matrix, cells)


def test_heads_of_their_own_share_the_device():
    """Four heads with one long row each, cut and merged; and where there is room for few partial rows, or none."""
    indptr, indices = [[0, 900]] * 4, [list(range(g, 900 + g)) for g in range(4)]
    matrix = block_sparse.uniform(4, indptr, indices, 3, 16, None, 904 * 16)
    cells = np.stack([(np.arange(904 * 16) // 16 >= g) & (np.arange(904 * 16) // 16 < 900 + g) for g in range(4)])
    cells = cells[:, None].repeat(3, 1)
    for partial_rows, cut in ((4096, True), (30, True), (1, False)):
        shape = make_shape(num_qo_heads=4, num_kv_heads=4, sm_count=16, partial_rows=partial_rows)
        made = check_covers(shape, matrix, cells)
        assert (len(made.targets) > 0) == cut
    assert made.header.tolist() == [4, 1, 0, 0]


# ---------------------------------------------------------------------- runs


def test_what_a_launch_finds(driver):
    """The kernel for such blocks is fetched once; k and v are rows, or blocks seen as rows; ragged plans go on
    beside."""
    asked = []
    attn = over_blocks(driver, asked)
    q, k = rows(6, 8, 128), rows(40, 2, 128)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values))
    for _ in range(2):
        attn.plan_block_sparse([0, 2, 3], [3, 0, 1], block_rows=3, block_cols=8, kv_len=29)
        attn.run(q, (k, k))
        attn.run(q, (k.view(5, 8, 2, 128),) * 2)
        attn.plan([0, 6], [0, 40])
        attn.run(q, (k, k))
    assert asked == [("blocks", 8)]
    assert [launch.values["page_size"] for launch in driver.launches] == [8, 8, 0] * 2
    assert [launch.values["map_k"][0] for launch in driver.launches] == [k.data_ptr()] * 6
    assert {m.dims for m in driver.encoded} == {(128, 40, 2, 1)}
    pages = {(int(x[planning.ROW0]), int(x[planning.KEYS])): p.tolist() for x, p in zip(*seen[0], strict=True)}
    assert pages == {(0, 13): [0, 3], (12, 8): [1]}
    driver.capturing = {0}
    attn.run(q, (k, k))
    driver.capturing = set()
    with pytest.raises(ValueError, match="plan: expected keys that lie as those of captured runs"):
        attn.plan_block_sparse([0, 2, 3], [0, 3, 1], block_rows=3, block_cols=8)


def test_heads_that_see_other_blocks(driver):
    attn = over_blocks(driver)
    seen = []
    driver.on_launch = lambda values: seen.append((ints(values["header"], 2).tolist(), *plan_of(values)))
    lists = [torch.tensor([3, 0]), torch.tensor([1])]
    attn.plan_block_sparse(torch.tensor([[0, 2], [0, 1]]), lists, block_rows=6, block_cols=8)
    attn.run(rows(6, 8, 128), (rows(32, 2, 128),) * 2)
    header, items, pages = seen[0]
    assert header == [2, 1]
    found = {int(x[planning.HEAD]): (int(x[planning.ROW0]), p.tolist()) for x, p in zip(items, pages, strict=True)}
    assert found == {0: (0, [0, 3]), 1: (0, [1])}


def test_variable_blocks(driver):
    asked = []
    attn = over_blocks(driver, asked)
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values))
    attn.plan_variable_blocks([[True, False, True], [False, True, False]], [1, 5], [16, 8, 24])
    attn.run(rows(6, 8, 128), (rows(48, 2, 128),) * 2)
    found = {int(x[planning.ROW0]): p.tolist() for x, p in zip(*seen[0], strict=True)}
    assert asked == [("blocks", 8)] and found == {0: [0, 1, 3, 4, 5], 4: [2]}
    attn.plan_variable_blocks(torch.tensor([[True, True]]), torch.tensor([6]), torch.tensor([3, 4]))
    attn.run(rows(6, 8, 128), (rows(7, 2, 128),) * 2)
    assert asked[1:] == [("blocks", 1)] and seen[1][1][0].tolist() == list(range(7))


def test_strides_of_gathered_rows(driver):
    """A block is a run of rows; tensors over j are rows too."""
    attn = over_blocks(driver, source="gather", tensors=[("scale", ("j", "g"), "f32")])
    attn.plan_block_sparse([0, 1], [1], block_rows=2, block_cols=5, kv_len=8)
    k, v = rows(8, 4, 128)[:, :2], rows(2, 8, 128).transpose(0, 1)
    attn.run(rows(2, 8, 128), (k, v), scale=torch.ones(8, 2))
    values = driver.launches[0].values
    named = {n: x for n, x in values.items() if n.endswith("_stride") and n[0] in "kv"}
    assert named == {
        "k_page_stride": 320, "k_row_stride": 64, "k_head_stride": 16,
        "v_page_stride": 80, "v_row_stride": 16, "v_head_stride": 128,
    }  # fmt: skip
    assert [values[f"t.scale.stride.{n}"] for n in range(3)] == [0, 2, 1]


def test_a_variant_that_counts_from_the_last_key(driver):
    """Without kv_len the keys end with the last listed block: k must have just these where it matters."""
    q = rows(3, 8, 128)
    attn = over_blocks(driver, positions=("i", "j"))
    attn.plan_block_sparse([0, 1], [1], block_rows=3, block_cols=8)
    attn.run(q, (rows(16, 2, 128),) * 2)
    with pytest.raises(ValueError, match=r"k: expected 16 keys, those up to the last listed block.*kv_len=…"):
        attn.run(q, (rows(24, 2, 128),) * 2)
    attn.plan_block_sparse([0, 1], [1], block_rows=3, block_cols=8, kv_len=24)
    attn.run(q, (rows(30, 2, 128),) * 2)
    attn = over_blocks(driver, positions=("j",))
    attn.plan_block_sparse([0, 1], [1], block_rows=3, block_cols=8)
    attn.run(q, (rows(24, 2, 128),) * 2)
    with pytest.raises(ValueError, match="k: expected at least 16 rows"):
        attn.run(q, (rows(15, 2, 128),) * 2)


def test_blocks_that_do_not_follow_one_another(driver):
    attn = over_blocks(driver)
    attn.plan_block_sparse([0, 1], [1], block_rows=3, block_cols=8)
    k, q = rows(2, 2, 8, 128).transpose(1, 2), rows(3, 8, 128)
    with pytest.raises(ValueError, match="k: expected blocks that follow one another like their rows"):
        attn.run(q, (k, k))
    with pytest.raises(ValueError, match="v: expected blocks of 8 keys, found shape"):
        attn.run(q, (rows(16, 2, 128), rows(4, 4, 2, 128)))


# ---------------------------------------------------------------------- counts and room


@pytest.mark.parametrize("integer", [np.uint8, np.int16, np.uint16, np.int32])
def test_counts_may_be_small_integers_of_numpy(integer):
    found = block_sparse.uniform(2, [0, 1, 3], [0, 1, 9], integer(100), integer(128), None, None)
    want = block_sparse.uniform(2, [0, 1, 3], [0, 1, 9], 100, 128, None, None)
    assert (found.kv_len, found.qo_len, found.keys.tolist()) == (1280, 200, [128, 256])
    assert found.row_offsets.tolist() == want.row_offsets.tolist() == [0, 100, 200]
    found = block_sparse.uniform(2, [0, 3], [0, 1, 9], integer(100), integer(128), integer(7), 1200)
    assert (found.kv_len, found.qo_len, found.keys.tolist()) == (1200, 7, [304])


def test_the_last_key_that_an_int32_counts():
    assert block_sparse.uniform(1, [0, 1], [2**31 - 2], 1, 1, None, None).kv_len == 2**31 - 1
    assert block_sparse.uniform(1, [0, 1], [2**27 - 1], 1, 16, None, 2**31 - 1).keys.tolist() == [15]


def grown(error, given):
    """What an error says to pass: "a, b: expected at least 1, 2, since …, found …"."""
    names, _, rest = str(error).partition(": expected at least ")
    least = rest.split(", since")[0].split(", ")
    return {**given, **{n: int(x) for n, x in zip(names.split(", "), least, strict=True)}}


@pytest.mark.parametrize("maxima", [{}, {"partial_rows": 24}, {"partial_rows": 1}, {"max_batch_size": 2}])
@pytest.mark.parametrize(("rows_of_blocks", "block_rows"), [(1, 1), (3, 1), (2, 150)])
def test_heads_that_are_cut_alike_in_any_batch(driver, maxima, rows_of_blocks, block_rows):
    """What does not fit says what to pass; with that it fits, and with one less it does not."""
    n, heads = 625, 8
    layout = {
        "indptr": [[n * m for m in range(rows_of_blocks + 1)]] * heads,
        "indices": [list(range(n)) * rows_of_blocks] * heads, "block_rows": block_rows, "block_cols": 8,
    }  # fmt: skip

    def planned(given):
        attn = over_blocks(driver, heads=(8, 8), deterministic="batch_invariant", **given)
        attn.plan_block_sparse(**layout)
        return attn

    given = {"max_batch_size": rows_of_blocks, "max_qo_rows": rows_of_blocks * block_rows, **maxima}
    given["max_batch_size"] = max(given["max_batch_size"], rows_of_blocks)
    with pytest.raises(ValueError, match="expected at least") as e:
        planned(given)
    enough = grown(e.value, given)
    assert enough != given
    attn = planned(enough)
    for name in enough:
        if enough[name] > given.get(name, enough[name]):
            with pytest.raises(ValueError, match=f"{name}.*: expected at least {enough[name]}"):
                planned({**enough, name: enough[name] - 1})
    seen = []
    driver.on_launch = lambda values: seen.append(plan_of(values)[0])
    qo, keys = given["max_qo_rows"], rows(8 * n, 8, 128)
    attn.run(rows(qo, 8, 128), (keys, keys))
    ((items),) = seen
    assert sorted(set(items[:, planning.HEAD])) == list(range(heads))
    covered = (items[:, planning.ROWS] * (items[:, planning.END] - items[:, planning.BEGIN])).sum()
    assert covered == heads * qo * 8 * n


def test_what_room_heads_of_their_own_need(driver):
    """8 heads, one row each, 5000 keys in 3 pieces: 24 partial rows and 8 targets."""
    given = {"max_batch_size": 1, "max_qo_rows": 1, "heads": (8, 8), "deterministic": "batch_invariant"}
    with pytest.raises(ValueError, match="expected at least") as e:
        over_blocks(driver, **given).plan_block_sparse([[0, 625]] * 8, [range(625)] * 8, block_rows=1, block_cols=8)
    assert str(e.value) == (
        "partial_rows, max_batch_size: expected at least 24, 2, since kv heads with blocks of their own are cut one by "
        "one, found 16, 1"
    )


# ---------------------------------------------------------------------- refusals

LAYOUT = {"indptr": [0, 2, 3], "indices": [3, 0, 2], "block_rows": 3, "block_cols": 16, "qo_len": 5, "kv_len": 50}
BAD = [
    ({"block_rows": 0}, ValueError, "block_rows: expected 1 to 2³¹−1, found 0"),
    ({"block_rows": None}, TypeError, "block_rows: expected an int, found NoneType"),
    ({"indptr": [0, 2]}, ValueError, "qo_len: expected 1 to 3 rows, those of 1 rows of blocks, found 5"),
    ({"indptr": [0, 3, 2]}, ValueError, "indptr: expected offsets that don't decrease, found 2 after 3 at index 2"),
    ({"indices": [3, 0]}, ValueError, "indices: expected at least 3 block columns, indptr[-1], found 2"),
    ({"indices": [3, -1, 2]}, ValueError, "indices: expected block columns from 0 to 2³¹−1, found -1 at index 1"),
    ({"indices": [3, 3, 2]}, ValueError, "expected every column once in a row of blocks, found 3 twice in row 0"),
    ({"qo_len": 7}, ValueError, "qo_len: expected 4 to 6 rows, those of 2 rows of blocks, found 7"),
    ({"kv_len": 48}, ValueError, "indices: expected blocks of 48 keys (kv_len), found column 3"),
    ({"indptr": [[0, 2, 3]]}, ValueError, "indptr: expected offsets of 2 kv heads, or of all alike, found 1"),
    ({"indptr": [[0, 2, 3]] * 2}, ValueError, "indices: expected 2 lists, one a kv head as in indptr, found list of 3"),
    ({"indptr": [[0, 2, 3], [0, 1]], "indices": [[3, 0, 2]] * 2}, ValueError,
     "indptr[1]: expected 3 offsets as in indptr[0], found 2"),
    ({"indptr": [[0, 2, 3]] * 2, "indices": [[3, 0, 2], [1, 1, 0]]}, ValueError, "indices[1]: expected every column"),
    ({"indptr": list(range(10)), "indices": [0] * 9, "qo_len": None}, ValueError,
     "max_batch_size: expected at least 9, the rows of blocks, found 8"),
    ({"block_rows": 300, "qo_len": None}, ValueError, "max_qo_rows: expected at least 600 (qo_len), found 512"),
]  # fmt: skip


META = torch.tensor([[0, 2, 3]] * 2, device="meta")
BAD += [
    ({"indices": [3, 2**31 - 1, 2], "kv_len": None}, ValueError,
     "indices: expected blocks of 16 keys that end below 2³¹, or a kv_len, found column 2147483647"),
    ({"indices": [3, 2**27, 2], "kv_len": None}, ValueError, "or a kv_len, found column 134217728"),
    ({"indices": [3, 2**31 - 1, 2], "block_cols": 1, "kv_len": None}, ValueError, "found column 2147483647"),
    ({"indptr": META, "indices": [[3, 0, 2]] * 2}, ValueError, "indptr: expected a tensor with values, found one on m"),
    ({"indptr": torch.zeros(2, 3).long().to_sparse(), "indices": [[3, 0, 2]] * 2}, TypeError,
     "indptr: expected a strided tensor, found layout torch.sparse_coo"),
    ({"indptr": [[0, 2, 3]] * 2, "indices": np.array(3)}, ValueError, "indices: expected 2 lists, one a kv head as in"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), BAD)
def test_bad_layouts(driver, change, error, says):
    attn = over_blocks(driver)
    with pytest.raises(error) as e:
        attn.plan_block_sparse(**{**LAYOUT, **change})
    assert says in str(e.value)
    attn.plan_block_sparse(**LAYOUT)


SIZES = ([[True, False]], [4], [8, 16])
BAD_SIZES = [
    (([[True]], [4], [8, 16]), ValueError, "mask: expected shape [1, 2], rows and columns of blocks, or [2, 1"),
    (([[1, 0]], [4], [8, 16]), TypeError, "mask: expected bool, found int64"),
    (([True, False], [4], [8, 16]), ValueError, "mask: expected 2 dimensions, or 3, found shape [2]"),
    ((SIZES[0], [4.0], [8, 16]), TypeError, "block_row_sizes: expected int32 or int64, found float64"),
    ((SIZES[0], [4], [8, -1]), ValueError, "block_col_sizes: expected sizes from 0, found -1"),
    ((SIZES[0], [4], [[8, 16]] * 3), ValueError, "block_col_sizes: expected sizes of 2 kv heads, or of all alike, fou"),
    ((SIZES[0], [4], [[8, 16], [8, 8]]), ValueError, "block_col_sizes: expected the same sum in every kv head, foun"),
    ((SIZES[0], [4], [2**31, 16]), ValueError, "block_col_sizes: expected a sum below 2³¹, found 2147483664"),
    ((SIZES[0], [[4], [4, 5]], [8, 16]), ValueError, "block_row_sizes: expected lists of one length"),
    (([[False] * 4], [3], [2**62] * 4), ValueError, "block_col_sizes: expected a sum below 2³¹, found 184467440737095"),
    (([[False] * 4], [[3], [3]], [[2**62] * 4, [0] * 4]), ValueError, "block_col_sizes: expected the same sum in eve"),
    (([[False] * 4] * 4, [2**62] * 4, [3] * 4), ValueError, "block_row_sizes: expected a sum below 2³¹, found 1844674"),
    ((torch.ones(1, 2, dtype=torch.bool, device="meta"), [4], [8, 16]), ValueError,
     "mask: expected a tensor with values, found one on meta"),
    ((torch.ones(1, 2, dtype=torch.bfloat16), [4], [8, 16]), TypeError, "mask: expected bool, found bfloat16"),
    ((torch.ones(1, 2).bool().to_sparse(), [4], [8, 16]), TypeError,
     "mask: expected a strided tensor, found layout torch.sparse_coo"),
    ((SIZES[0], torch.ones(1, dtype=torch.bfloat16), [8, 16]), TypeError,
     "block_row_sizes: expected int32 or int64, found bfloat16"),
    ((SIZES[0], [4], torch.ones(2, device="meta").long()), ValueError, "block_col_sizes: expected a tensor with val"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "error", "says"), BAD_SIZES)
def test_bad_variable_layouts(driver, layout, error, says):
    attn = over_blocks(driver)
    with pytest.raises(error) as e:
        attn.plan_variable_blocks(*layout)
    assert says in str(e.value)
    attn.plan_variable_blocks(*SIZES)


def test_blocks_that_a_kernel_was_not_built_for(driver):
    with pytest.raises(ValueError, match="expected an artifact for layout 'blocks', page_size 8, found one for"):
        attention(driver).plan_block_sparse([0, 1], [0], block_rows=1, block_cols=8)
