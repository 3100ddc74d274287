"""Extra outputs at run time: what a launch is given to write, and what becomes of it."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from fake_driver import FakeDriver, artifact, served_artifact

from attncc.runtime.batch import BatchAttention
from attncc.runtime.kernel import Kernel

BF16 = torch.bfloat16
INF = float("inf")
HEADS, KV_HEADS = 6, 2
# every way to keep some of b, h, g and iq; two reductions, the first behind four outputs
EMITS = [
    ("rows", ["iq", "h"], "max", 0), ("turned", ["h", "iq"], "max", 0), ("head", ["h"], "max", 0),
    ("request", ["b", "h"], "max", 0), ("group", ["g"], "sum", 1), ("groups", ["g", "b"], "sum", 1),
    ("row_groups", ["iq", "g"], "sum", 1), ("row", ["iq"], "sum", 1), ("requests", ["b"], "sum", 1),
    ("both", ["g", "h"], "sum", 1), ("low", ["h", "g", "b"], "min", 2),
]  # fmt: skip


def rows(*shape):
    return torch.randn(*shape).to(BF16)


@pytest.fixture
def driver():
    """Its kernel writes whole numbers, whose sums are exact, to every reduction: `driver.written`, [rows, heads]."""
    made = FakeDriver(sms=4)
    made.written = []

    def run(values):
        count = values["rows"] if "rows" in values else values["qo_len"] * values["num_heads_batch"] // HEADS
        live = min(count, getattr(made, "live", count))
        made.written = []
        for k in range(3):
            x = torch.randint(-50, 50, (live, HEADS), generator=torch.Generator().manual_seed(k)).float()
            made.written.append(x)
            ctypes.memmove(values[f"t.emit.{k}"], x.data_ptr(), 4 * x.numel())

    made.on_launch = run
    return made


def by_hand(written, ends):
    """The outputs of EMITS, apart from those over iq, one request and head after another."""

    def reduced(k, reduce, request, heads):
        over, empty = {"max": (max, -INF), "min": (min, INF), "sum": (sum, 0.0)}[reduce]
        cells = written[k][request][:, heads].flatten().tolist()
        return over(cells) if cells else empty

    requests = [slice(a, b) for a, b in pairwise(ends)]
    whole, every, group = slice(0, ends[-1]), list(range(HEADS)), HEADS // KV_HEADS
    of = [list(range(g * group, (g + 1) * group)) for g in range(KV_HEADS)]
    return {
        "head": [reduced(0, "max", whole, [h]) for h in every],
        "request": [[reduced(0, "max", b, [h]) for h in every] for b in requests],
        "group": [reduced(1, "sum", whole, of[g]) for g in range(KV_HEADS)],
        "groups": [[reduced(1, "sum", b, of[g]) for b in requests] for g in range(KV_HEADS)],
        "requests": [reduced(1, "sum", b, every) for b in requests],
        "both": [[reduced(1, "sum", whole, [h]) if h in of[g] else 0.0 for h in every] for g in range(KV_HEADS)],
        "low": [
            [[reduced(2, "min", b, [h]) if h in of[g] else INF for b in requests] for g in range(KV_HEADS)]
            for h in every
        ],
    }  # fmt: skip


def check(found, written, ends, lead):
    """`lead`: q's leading dimensions."""
    assert list(found) == [name for name, *_ in EMITS]
    first, second = (written[k].view(*lead, HEADS) for k in (0, 1))
    assert torch.equal(found["rows"], first)
    assert torch.equal(found["turned"], torch.stack([first[..., h] for h in range(HEADS)]))
    assert torch.equal(found["row_groups"], torch.stack([second[..., :3].sum(-1), second[..., 3:].sum(-1)], -1))
    assert torch.equal(found["row"], second.sum(-1))
    for name, want in by_hand(written, ends).items():
        assert found[name].tolist() == want, name
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in found.values())


# ---------------------------------------------------------------------- dense


def dense(driver, **options):
    return Kernel(artifact(emits=EMITS, **options), driver)


def qkv(b=2, qo=5, kv=9):
    return rows(b, qo, HEADS, 128), rows(b, kv, KV_HEADS, 128), rows(b, kv, KV_HEADS, 128)


def test_every_index(driver):
    out, lse, found = dense(driver)(*qkv(), return_lse=True)
    assert out.shape == (2, 5, HEADS, 128) and lse.shape == (2, 5, HEADS)
    (launch,) = driver.launches
    assert launch.values["t.emit.0"] == found["rows"].data_ptr()
    check(found, driver.written, [0, 5, 10], (2, 5))


def test_the_dict_comes_last(driver):
    result = dense(driver)(*qkv())
    assert len(result) == 2 and isinstance(result[1], dict)
    plain = Kernel(artifact(), FakeDriver())(*qkv())
    assert isinstance(plain, torch.Tensor)


@pytest.mark.parametrize("b, qo", [(0, 5), (2, 0)])
def test_no_rows(driver, b, qo):
    _, found = dense(driver)(*qkv(b, qo))
    assert not driver.launches
    check(found, [torch.zeros(0, HEADS)] * 3, [0] * (b + 1), (b, qo))


def test_memory_that_the_caller_gives(driver):
    kernel, x = dense(driver), qkv()
    given = {
        "rows": torch.full((2, 5, HEADS), 7.0), "group": torch.full((KV_HEADS, 2), 7.0)[:, 0],
        "turned": torch.full((HEADS, 2, 5), 7.0), "low": torch.full((HEADS, KV_HEADS, 2), 7.0),
    }  # fmt: skip
    _, found = kernel(*x, emit=given)
    assert all(found[name] is t for name, t in given.items())
    assert driver.launches[-1].values["t.emit.0"] == given["rows"].data_ptr()
    check({**found, "group": found["group"].contiguous()}, driver.written, [0, 5, 10], (2, 5))
    apart = torch.full((2, 5, HEADS, 2), 7.0)[..., 0]  # not as a kernel writes it
    _, found = kernel(*x, emit={"rows": apart})
    assert found["rows"] is apart and torch.equal(apart.flatten(0, 1), driver.written[0])


def test_two_names_of_one_value_are_two_tensors(driver):
    twice = [("a", ["iq", "h"], "max", 0), ("b", ["iq", "h"], "max", 0), ("c", ["h"], "sum", 1), ("d", ["h"], "min", 2)]
    _, found = Kernel(artifact(emits=twice), driver)(*qkv())
    assert torch.equal(found["a"], found["b"]) and found["a"].data_ptr() != found["b"].data_ptr()


def test_copies_of_what_a_kernel_cannot_address(driver):
    q, k, v = qkv()
    wide = torch.zeros(2, 5, HEADS, 129).to(BF16)
    wide[..., 1:] = q
    _, found = dense(driver)(wide[..., 1:], k, v)
    check(found, driver.written, [0, 5, 10], (2, 5))


@pytest.mark.parametrize("given, error, says", [
    ([1], TypeError, "emit: expected a dict of tensors by name, found list"),
    ({"rws": torch.zeros(1)}, ValueError, r"emit: expected some of rows, turned, .*, found 'rws'; did you mean 'rows'"),
    ({"rows": torch.zeros(2, 5, 7)}, ValueError, r"emit\['rows'\]: expected shape \[2, 5, 6\], found"),
    ({"head": torch.zeros(6, dtype=torch.float64)}, TypeError, r"emit\['head'\]: expected dtype float32"),
    ({"head": torch.zeros(1).expand(6)}, ValueError, r"emit\['head'\]: expected elements that don't overlap"),
    ({"head": torch.zeros(6, requires_grad=True)}, ValueError, r"emit\['head'\]: expected a tensor that needs no grad"),
    ({"head": None}, TypeError, r"emit\['head'\]: expected a torch.Tensor, found NoneType"),
])  # fmt: skip
def test_bad_memory(driver, given, error, says):
    with pytest.raises(error, match=says):
        dense(driver)(*qkv(), emit=given)
    assert not driver.launches


def test_bad_calls(driver):
    kernel = dense(driver)
    q, k, v = qkv()
    for bad in (None, q[0], q.float(), rows(2, 5, 7, 128)):
        with pytest.raises((TypeError, ValueError), match="q: expected"):
            kernel(bad, k, v)
    with pytest.raises(ValueError, match="emit: expected some of none, found 'rows'"):
        Kernel(artifact(), driver)(q, k, v, emit={"rows": torch.zeros(2, 5, HEADS)})
    assert not driver.launches


# ---------------------------------------------------------------------- served


def serving(driver, **options):
    kernel = Kernel(served_artifact(emits=EMITS), driver)
    given = {"max_batch_size": 5, "max_qo_rows": 64, "device": "cpu", "page_size": 16, **options}
    return BatchAttention(kernel, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, **given)


def plan(attn, ends):
    """Requests of one page each."""
    count = len(ends) - 1
    attn.plan(ends, list(range(count + 1)), list(range(count)), [16] * count)


KV = (rows(8, 16, KV_HEADS, 128), rows(8, 16, KV_HEADS, 128))


@pytest.mark.parametrize("ends", [[0, 1], [0, 2, 2, 9], [0, 0, 5, 5], [0, 0]])
def test_served_requests(driver, ends):
    attn = serving(driver)
    plan(attn, ends)
    out, lse, found = attn.run(rows(ends[-1], HEADS, 128), KV, return_lse=True)
    assert out.shape == (ends[-1], HEADS, 128) and lse.shape == (ends[-1], HEADS)
    written = driver.written if ends[-1] else [torch.zeros(0, HEADS)] * 3
    check(found, written, ends, (ends[-1],))


def test_pieces_have_a_place(driver):
    attn = serving(driver)
    plan(attn, [0, 1])
    attn.run(rows(1, HEADS, 128), KV)
    values = driver.launches[-1].values
    assert len({values[n] for n in ("part_o", "part_lse", "part_emits", "counters")}) == 4
    # room for three reductions of every partial row
    room = attn._shape.partial_rows * KV_HEADS * 4
    end = attn._arena.address("part_emits") + 3 * room
    assert end <= attn._arena._scratch.data_ptr() + 4 * attn._arena._scratch.numel()


def test_a_captured_run_and_later_plans(driver):
    """Rows and requests that a plan leaves out hold no key; what a replay reduces follows the plan."""
    attn = serving(driver)
    plan(attn, [0, 3, 4])
    q = rows(9, HEADS, 128)
    given = {"request": torch.zeros(4, HEADS), "requests": torch.zeros(4), "groups": torch.zeros(KV_HEADS, 4),
             "low": torch.zeros(HEADS, KV_HEADS, 4)}  # fmt: skip
    with pytest.raises(ValueError, match="q: expected 4 rows"):
        attn.run(q, KV)
    driver.capturing, driver.live = {0}, 4
    _, found = attn.run(q, KV, emit=given)
    driver.capturing = set()
    identity = [torch.full((5, HEADS), x) for x in (-INF, 0.0, INF)]
    padded = [torch.cat(x) for x in zip(driver.written, identity, strict=True)]
    check(found, padded, [0, 3, 4, 4, 4], (9,))
    plan(attn, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"emit \w+: expected B = 5, the requests of the plan, found 4; a captured"):
        plan(attn, [0, 1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=r"emit\['request'\]: expected shape \[4, 6\], found shape \[3, 6\]"):
        attn.run(q[:4], KV, emit={"request": torch.zeros(3, HEADS)})


def test_offsets_of_requests_follow_the_plan(driver):
    attn = serving(driver)
    for ends in ([0, 3, 4], [0, 1, 1, 6]):
        plan(attn, ends)
        assert attn._arena.view("qo_indptr").tolist() == ends + [ends[-1]] * (6 - len(ends))
