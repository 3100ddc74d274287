"""What a batch must look like, and what to say when it doesn't: indices given to `plan`, tensors given to `run`.

As arguments.py, pure functions; indices on the device are copied to the host, which waits for them, and nothing else
here touches a device.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from attncc.runtime import arguments as check
from attncc.runtime.arguments import I32_MAX, Space, Spec

ZERO = np.array(0)  # numpy takes it in half the time that an int takes
TENSORS, INDICES = (torch.int32, torch.int64), (np.dtype(np.int32), np.dtype(np.int64))


class Table(NamedTuple):
    """Checked indices of a batch, or of one level of a cascade; int64 on the host.

    qo_indptr [B+1]: first row in q of every request.  kv_start [B]: its first page in kv_indices (paged) or first row
    in k and v (ragged).  kv_len [B]: its keys.  kv_indices: the page ids that are used, int32 or int64, below `pages`;
    None: ragged.
    """

    qo_indptr: np.ndarray
    kv_start: np.ndarray
    kv_len: np.ndarray
    kv_indices: np.ndarray | None
    pages: int = 0

    @property
    def batch(self) -> int:
        return len(self.kv_len)

    @property
    def rows(self) -> int:
        return int(self.qo_indptr[-1])


def table(
    page_size: int | None, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, last_page_len: Any, where: str = ""
) -> Table:  # fmt: skip
    """The checked indices of a batch; `where` goes before the names in errors.

    Raises ValueError and TypeError: offsets that don't start at 0 or decrease, another number of requests, a
    last_page_len outside 1…page_size for a request that has pages, page ids below 0 or above 2³¹−1.
    """
    qo, _, _ = _offsets(f"{where}qo_indptr", qo_indptr)
    # levels of a cascade share k and v, so their ragged rows start anywhere
    kv, each, no_empty = _offsets(f"{where}kv_indptr", kv_indptr, anywhere=page_size is None and where != "")
    if len(kv) != len(qo):
        raise ValueError(
            f"{where}kv_indptr: expected {len(qo)} offsets as in qo_indptr (a batch of {len(qo) - 1}), found {len(kv)}"
        )
    if page_size is None:
        for name, given in (("kv_indices", kv_indices), ("last_page_len", last_page_len)):
            if given is not None:
                raise ValueError(f"{where}{name}: expected none, since keys are ragged (page_size None), found some")
        return Table(qo, kv[:-1], each, None)
    count = kv.item(-1)
    ids, pages = _page_ids(f"{where}kv_indices", kv_indices, count)
    lengths = _kv_len(where, page_size, each, no_empty, last_page_len)
    if count * page_size > I32_MAX and int(lengths.max()) > I32_MAX:
        raise ValueError(f"{where}kv_indptr: expected requests of fewer than 2³¹ keys, found {lengths.max()}")
    return Table(qo, kv[:-1], lengths, ids, pages)


def _kv_len(where: str, page_size: int, pages: np.ndarray, no_empty: bool, last_page_len: Any) -> np.ndarray:
    last = host(f"{where}last_page_len", last_page_len)
    if len(last) != len(pages):
        raise ValueError(f"{where}last_page_len: expected {len(pages)} lengths, one a request, found {len(last)}")
    size = np.array(page_size)
    lacks = size - last  # keys that the last page lacks: 0 to page_size - 1
    lengths = pages * size - lacks
    wrong = lacks.view(np.uint64) >= size.view(np.uint64)  # as unsigned a negative number is beyond all others
    if np.count_nonzero(wrong) or not no_empty:
        wrong &= pages > 0
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{where}last_page_len: expected 1 to {page_size} (page_size), found {last[at]} at index {at}"
            )
        lengths[pages == 0] = 0
    return lengths


def _page_ids(name: str, given: Any, count: int) -> tuple[np.ndarray, int]:
    """(the first `count` ids, how many pages they need); what lies after them is padding and may be anything."""
    ids = host(name, given)
    if len(ids) < count:
        raise ValueError(f"{name}: expected at least {count} page ids, kv_indptr[-1], found {len(ids)}")
    ids = ids[:count]
    # unsigned, so one pass over what may be a million of them
    unsigned = ids.view(np.uint32 if ids.itemsize == 4 else np.uint64)
    highest = int(np.maximum.reduce(unsigned)) if count else -1
    if highest > I32_MAX:
        at = int(((ids < 0) | (ids > I32_MAX)).argmax())
        raise ValueError(f"{name}: expected page ids from 0 to 2³¹−1, found {ids[at]} at index {at}")
    return ids, highest + 1


def offsets(name: str, given: Any, anywhere: bool = False) -> np.ndarray:
    """Offsets as int64: from 0 (or from `anywhere` after it), never decreasing, below 2³¹."""
    return _offsets(name, given, anywhere)[0]


def _offsets(name: str, given: Any, anywhere: bool = False) -> tuple[np.ndarray, np.ndarray, bool]:
    """(offsets, the steps between them, whether all of these are above 0)."""
    found = host(name, given).astype(np.int64)
    if not len(found):
        raise ValueError(f"{name}: expected B + 1 offsets, found none")
    first = found.item(0)
    if first < 0 and anywhere:
        raise ValueError(f"{name}: expected offsets from 0, found {first}")
    if first != 0 and not anywhere:
        raise ValueError(f"{name}: expected offsets that start at 0, found {first}")
    steps = found[1:] - found[:-1]
    ascending = np.count_nonzero(steps > ZERO) == len(steps)
    if not ascending and np.count_nonzero(back := steps < ZERO):
        at = int(back.argmax()) + 1
        raise ValueError(
            f"{name}: expected offsets that don't decrease, found {found[at]} after {found[at - 1]} at index {at}"
        )
    if found.item(-1) > I32_MAX:
        raise ValueError(f"{name}: expected offsets below 2³¹, found {found[-1]}")
    return found, steps, ascending


def host(name: str, given: Any) -> np.ndarray:
    """Indices as a one-dimensional array on the host, int32 or int64; a view where they are there already."""
    if isinstance(given, torch.Tensor):
        if given.dtype not in TENSORS or given.layout != torch.strided:
            raise TypeError(f"{name}: expected int32 or int64, found {str(given.dtype).removeprefix('torch.')}")
        if given.is_meta:
            raise ValueError(f"{name}: expected a tensor with values, found one on meta")
        found = given.numpy() if given.is_cpu else given.cpu().numpy()
    elif isinstance(given, np.ndarray):
        found = given
    elif isinstance(given, (list, tuple, range)):
        try:
            found = np.asarray(given) if len(given) else np.zeros(0, np.int64)
        except (ValueError, OverflowError):
            raise TypeError(f"{name}: expected a list of ints, found one of other things") from None
    else:
        raise TypeError(f"{name}: expected a tensor, an array or a list of ints, found {type(given).__name__}")
    if found.dtype not in INDICES:
        raise TypeError(f"{name}: expected int32 or int64, found {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, found shape {list(found.shape)}")
    return found


def levels(page_size: int | None, given: Any) -> list[Table]:
    """The checked levels of a cascade, each by itself (plan_levels checks that they nest).  `kv_start` counts as if the
    kv_indices of all levels followed one another."""
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(f"levels: expected a list of levels, outermost first, found {described(given)}")
    names = (
        ("qo_indptr", "kv_indptr") if page_size is None else ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
    )
    tables, before = [], 0
    for n, level in enumerate(given):
        if not isinstance(level, (list, tuple)) or len(level) != len(names):
            raise TypeError(f"levels[{n}]: expected ({', '.join(names)}), found {described(level)}")
        found = table(page_size, *level, *(None,) * (4 - len(names)), where=f"levels[{n}].")
        tables.append(found._replace(kv_start=found.kv_start + before))
        before += 0 if found.kv_indices is None else len(found.kv_indices)
    return tables


# ---------------------------------------------------------------------- the object and its runs


OPTIONAL = ("page_size", "max_kv_pages", "partial_rows", "qo_len", "kv_len")


def check_counts(**counts: Any) -> None:
    """Counts that users give: ints from 1, or None where that means something."""
    for name, value in counts.items():
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, found {described(value)}")
        if not 1 <= int(value) <= I32_MAX:
            raise ValueError(f"{name}: expected 1 to 2³¹−1, found {value}")


def check_heads(num_qo_heads: int, num_kv_heads: int, max_qo_rows: int) -> None:
    """Heads that group evenly, and packed rows that an int32 counts."""
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads: expected a multiple of num_kv_heads, found {num_qo_heads} query heads and "
            f"{num_kv_heads} kv heads"
        )
    if max_qo_rows * (num_qo_heads // num_kv_heads) > I32_MAX:
        raise ValueError(f"max_qo_rows: expected fewer than 2³¹ rows times heads of a group, found {max_qo_rows}")


def check_device(given: Any, device_type: str) -> torch.device:
    """The device, where it is one of the type."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type != device_type:
        raise ValueError(
            f"device: expected a {device_type} device, found {repr(given) if device is None else device}; "
            f"attncc.reference(…).paged and .ragged compute the same anywhere"
        )
    return device


def device_of(given: Any, device_type: str) -> torch.device:
    """The device, with its index where it is a CUDA device."""
    device = check_device(given, device_type)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def described(x: Any) -> str:
    """What was found, of things that should be pairs or lists."""
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list)) else type(x).__name__


@dataclass(frozen=True)
class ServedSizes:
    """The sizes of one run that its tensors tell.  How many requests, and how long they are, the plan says."""

    rows: int
    kv: Space
    num_qo_heads: int
    num_kv_heads: int

    @property
    def spaces(self) -> dict[str, Space]:
        return {
            "b": [("B", None)], "h": [("h", self.num_qo_heads)], "g": [("g", self.num_kv_heads)],
            "iq": [("nnz_qo", self.rows)], "j": self.kv, "pos": [("pos", 0)],
        }  # fmt: skip


def check_run(
    spec: Spec, heads: tuple[int, int], page_size: int | None, device: torch.device, q: Any, k: Any, v: Any
) -> ServedSizes:  # fmt: skip
    """Check q, k, v of a run; `heads`: (num_qo_heads, num_kv_heads) of the plan."""
    first = ("nnz_kv",) if page_size is None else ("num_pages", "page_size")
    where = "the BatchAttention is"
    check.check_input("q", q, ("nnz_qo", "num_qo_heads", "head_dim_qk"), spec, device, where)
    check.check_input("k", k, (*first, "num_kv_heads", "head_dim_qk"), spec, device, where)
    check.check_input("v", v, (*first, "num_kv_heads", "head_dim_vo"), spec, device, where)
    for name, t, label, want in (
        ("q", q, "num_qo_heads", heads[0]), ("k", k, "num_kv_heads", heads[1]), ("v", v, "num_kv_heads", heads[1]),
    ):  # fmt: skip
        if t.shape[-2] != want:
            raise ValueError(f"{name}: expected {label} {want} as in BatchAttention, found shape {list(t.shape)}")
    if page_size is not None:
        for name, t in (("k", k), ("v", v)):
            if t.shape[1] != page_size:
                raise ValueError(
                    f"{name}: expected page_size {page_size} as in BatchAttention, found shape {list(t.shape)}"
                )
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v: expected {first[0]} {k.shape[0]} as in k, found shape {list(v.shape)}")
    for name, size in (("q", q.shape[0]), ("k", k.shape[0])):
        if size > I32_MAX:
            raise ValueError(f"{name}: expected sizes below 2³¹, found {size}")
    kv: Space = list(zip(first, (int(n) for n in k.shape[: len(first)]), strict=True))
    return ServedSizes(q.shape[0], kv, *heads)


# ---------------------------------------------------------------------- a run against its plan

# (what of SAYS, argument, how much of it the argument has)
Limit = tuple[str, str, int]
EXACT = ("rows", "requests")  # what a run must have just so many of; of the rest it must have as many at least
SAYS = {
    "rows": "{who}: expected {need} rows, qo_indptr[-1] of the plan, found {has}",
    "requests": "{who}: expected B = {need}, the requests of the plan, found {has}",
    "pages": "{who}: expected at least {need} pages, since kv_indices of the plan has id {last}, found {has}",
    "kv_rows": "{who}: expected at least {need} rows, kv_indptr[-1] or kv_len of the plan, found {has}",
    "positions": "{who}: expected at least {need} positions, the largest kv_len of the plan, found {has}",
}


def needs(tables: Sequence[Table]) -> dict[str, int]:
    """What a plan needs of the tensors of its runs."""
    inner = tables[-1]
    paged, keys = inner.kv_indices is not None, keys_of(tables)
    ends = [0] if paged else [np.maximum.reduce(t.kv_start + t.kv_len, initial=0) for t in tables]
    return {
        "rows": inner.rows, "requests": inner.batch, "pages": max([t.pages for t in tables]),
        "kv_rows": int(max(ends)), "positions": int(np.maximum.reduce(keys, initial=0)),
    }  # fmt: skip


def keys_of(tables: Sequence[Table]) -> np.ndarray:
    """How many keys every request has: those of its groups in all levels."""
    inner = tables[-1]
    keys = inner.kv_len
    for t in tables[:-1]:
        keys = keys + t.kv_len[np.minimum(t.qo_indptr.searchsorted(inner.qo_indptr[:-1], "right"), t.batch) - 1]
    return keys


def limits(spec: Spec, sizes: ServedSizes, tensors: Sequence[torch.Tensor]) -> list[Limit]:
    """What the tensors of a run have; `tensors`: the variant's, and rows of emits."""
    found: list[Limit] = [("rows", "q", sizes.rows)]
    found.append(("pages" if sizes.kv[0][0] == "num_pages" else "kv_rows", "k", sizes.kv[0][1] or 0))
    for param, t in zip(spec.bound, tensors, strict=True):
        for size, (label, _) in zip(t.shape, check.expand(param, sizes, spec), strict=True):
            if label in ("B", "pos"):
                found.append(("requests" if label == "B" else "positions", param.name, size))
    return found


def check_fit(limits: Iterable[Limit], needs: Mapping[str, int], spare: bool, hint: str = "") -> None:
    """ValueError where the tensors of a run don't hold what a plan needs.

    `spare`: there may be more rows and requests than the
    plan needs, as while a graph is captured, which later plans will use.
    """
    for key, who, has in limits:
        need = needs[key]
        if has < need or (has > need and key in EXACT and not spare):
            raise ValueError(SAYS[key].format(who=who, need=need, has=has, last=need - 1) + hint)


def same(a: float, b: float) -> bool:
    """Are two values of a scalar the same one?  NaN is."""
    return a == b or (a != a and b != b)
