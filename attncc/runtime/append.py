"""Writing a step's new keys and values into a paged cache: one launch, or torch operations that do the same."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncc.runtime.arguments import refuse_grad
from attncc.runtime.serving_arguments import host

if TYPE_CHECKING:
    from attncc.runtime.utilities import Utilities

Table = tuple[Tensor, Tensor, Tensor, Tensor]  # qo_indptr, kv_indptr, kv_indices, last_page_len
Ints = tuple[int, ...]
TABLE = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
CACHES = ("k_cache", "v_cache")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def append_kv(
    k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor], qo_indptr: Any, kv_indptr: Any, kv_indices: Any,
    last_page_len: Any, kernels: Utilities | None = None,
) -> None:  # fmt: skip
    """attncc.append_kv (attncc/utilities.py), by one of `kernels` where there is one for these tensors."""
    caches = _check_rows(k, v, kv)
    table = _check_table(qo_indptr, kv_indptr, kv_indices, last_page_len, k.device)
    num_pages, page_size = caches[0].shape[:2]
    on_host = all(t.device.type == "cpu" for t in table)
    rows = _check_values(table, k.shape[0], num_pages, page_size) if on_host else k.shape[0]
    k, v = (_apart(t[:rows], caches) for t in (k, v))
    if not rows or (kernels is not None and _launched(kernels, k, v, caches, table)):
        return
    if on_host:
        page, slot, _ = _places(table, rows, num_pages, page_size)
        _write(caches, (k, v), *_to(k.device, page, slot))
    else:
        _append(k, v, caches, _to(k.device, *table))


def _apart(rows: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
    """The rows, copied where they may lie in memory that is written."""
    place = rows.untyped_storage().data_ptr()
    shared = [c for c in caches if c.untyped_storage().data_ptr() == place]
    low, high = _extent(rows) if shared else (0, 0)
    return rows.clone() if any(a < high and low < b for a, b in map(_extent, shared)) else rows


def _extent(t: Tensor) -> tuple[int, int]:
    """Addresses from the first byte to past the last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size() * (t.numel() > 0)


def _launched(kernels: Utilities, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], table: Table) -> bool:
    """Write the rows in one launch; False where there is no kernel for these tensors."""
    num_pages, page_size, heads, _ = caches[0].shape
    if not kernels.able(k.device) or not num_pages or len(table[0]) < 2 or not len(table[2]):
        return False
    pointers = {"k": k.data_ptr(), "k_cache": caches[0].data_ptr(), "v": v.data_ptr(), "v_cache": caches[1].data_ptr()}
    of_k, of_v = (
        _strides(name, t.shape, t.stride(), cache.shape, cache.stride(), t.element_size())
        for name, t, cache in (("k", k, caches[0]), ("v", v, caches[1]))
    )
    if of_k is None or of_v is None:
        return False
    unit = 16 | of_k[0] | of_v[0]
    for address in pointers.values():
        unit |= address
    unit &= -unit  # the widest copy that suits all: the lowest bit
    kernel = kernels.get(f"append_{unit}", k.device)
    if kernel is None:
        return False
    units = k.shape[2] * k.element_size() // unit, v.shape[2] * v.element_size() // unit
    pieces = -(-heads * sum(units) // (32 * kernel.ahead))
    fields = {
        **pointers, **of_k[1], **of_v[1], "k_units": units[0], "v_units": units[1], "rows": len(k), "pieces": pieces,
        "heads": heads, "batch": len(table[3]), "num_indices": len(table[2]), "num_pages": num_pages,
        "page_size": page_size, "wide": 0,
    }  # fmt: skip
    table = _together(table, k.device)
    for n, (name, t) in enumerate(zip(TABLE, table, strict=True)):
        item = t.element_size()
        fields[name], fields[f"{name}_stride"] = t.data_ptr(), t.stride(0) * item
        fields["wide"] |= (item == 8) << n
    kernel.launch(-(-len(k) * pieces * 32 // kernel.threads), fields)
    return True


@functools.lru_cache(1024)
def _strides(
    name: str, shape: Ints, stride: Ints, cache_shape: Ints, cache_stride: Ints, item: int
) -> tuple[int, dict[str, int]] | None:  # fmt: skip
    """(the bits of all that a copy's width must divide, the kernel's strides in bytes) of k or v and its cache; None
    where there are no elements or where they don't lie side by side."""
    if 0 in shape or (shape[-1] > 1 and (stride[-1] != 1 or cache_stride[-1] != 1)):
        return None
    bits = shape[-1] * item
    for n, s in (*zip(shape[:-1], stride, strict=False), *zip(cache_shape[:-1], cache_stride, strict=False)):
        bits |= s * item if n > 1 else 0
    dims = ("row", "head", "page_stride", "slot_stride", "head_stride")
    return bits, {f"{name}_{d}": s * item for d, s in zip(dims, (*stride[:2], *cache_stride[:3]), strict=True)}


def _together(table: Table, device: torch.device) -> Table:
    """The table on `device`, by one copy where all of it is on the host."""
    if device.type == "cpu" or any(t.device.type != "cpu" for t in table):
        return _to(device, *table)
    (whole,) = _to(device, torch.cat(table))
    qo, pages, ids, last = whole.split([len(t) for t in table])
    return qo, pages, ids, last


def _append(k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], table: Table) -> None:
    """With the table where the caches are and its values unknown."""
    rows, (num_pages, page_size) = k.shape[0], caches[0].shape[:2]
    if not rows or not num_pages or len(table[0]) < 2 or not len(table[2]):
        return
    page, slot, lost = _places(table, rows, num_pages, page_size)
    # The rows that have no place write what the first row that has one writes, where that does.
    row = torch.arange(rows, device=k.device)
    first = row.masked_fill(lost, rows).amin()
    row = torch.where(lost, first.clamp(max=rows - 1), row)
    _write(caches, (k[row], v[row]), page[row], slot[row], first < rows)


def _places(table: Table, rows: int, num_pages: int, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(page id, row within the page, has the row no place) of the first `rows` rows, on the table's device; the first
    two are always within the cache.  In a graph every operation here is a kernel of a microsecond or two."""
    qo, pages, ids, last = (t.contiguous() for t in table)
    ends, page_ends = qo[1:], pages[1:]
    # A row of request b is at position row + shift[b].  Without a page that is below 0, or past the request's pages.
    shift = torch.add(last - ends, page_ends - pages[:-1] - 1, alpha=page_size)
    row = torch.arange(rows, dtype=qo.dtype, device=qo.device)
    b = torch.searchsorted(ends, row, right=True).clamp(max=len(last) - 1)
    position = row + shift[b]
    at = pages[b] + position.div(page_size, rounding_mode="floor")
    page = ids[at.clamp(0, len(ids) - 1)]
    kept = page.clamp(0, num_pages - 1)
    lost = (row >= qo[-1]) | (position < 0) | (at >= page_ends.clamp(max=len(ids))[b]) | (page != kept)
    return kept, position.remainder(page_size), lost


def _write(
    caches: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], page: Tensor, slot: Tensor, wanted: Tensor | None = None
) -> None:  # fmt: skip
    """caches[page, slot] = rows; where `wanted` is false (on the device), with the first place's own content."""
    for cache, new in zip(caches, rows, strict=True):
        bits = BITS[cache.element_size()]
        cache, new = cache.view(bits), new.view(bits)
        if wanted is not None:
            new = torch.where(wanted, new, cache[page[:1], slot[:1]])
        cache.index_put_((page, slot), new)


def _to(device: torch.device, *tensors: Tensor) -> Any:
    """The tensors on `device`; copies from the host wait for nothing."""
    if device.type != "cuda":
        return tensors
    return tuple(t.pin_memory().to(device, non_blocking=True) if t.device != device else t for t in tensors)


# ---------------------------------------------------------------------- checks


def _check_rows(k: Any, v: Any, kv: Any) -> tuple[Tensor, Tensor]:
    """The caches, after everything but indices was checked."""
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise TypeError(f"kv: expected (k_cache, v_cache), found {type(kv).__name__}")
    for name, t in (("k", k), ("v", v), *zip(CACHES, kv, strict=True)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, found {type(t).__name__}")
        if t.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, found layout {t.layout}")
        if t.device != k.device:
            raise ValueError(f"{name}: expected a tensor on {k.device} as k is, found {t.device}")
    if torch.is_grad_enabled():
        refuse_grad([("k", k), ("v", v), *zip(CACHES, kv, strict=True)])
    for name, t, cache_name, cache in (("k", k, "k_cache", kv[0]), ("v", v, "v_cache", kv[1])):
        if cache.dim() != 4:
            wanted = "[num_pages, page_size, num_kv_heads, head_dim]"
            raise ValueError(f"{cache_name}: expected shape {wanted}, found {list(cache.shape)}")
        if not cache.shape[1]:
            raise ValueError(f"{cache_name}: expected a page_size of at least 1, found shape {list(cache.shape)}")
        if any(n > 1 and stride == 0 for n, stride in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{cache_name}: expected elements that don't overlap, found strides {cache.stride()}")
        heads, head_dim = cache.shape[2:]
        if t.dim() != 3 or tuple(t.shape[1:]) != (heads, head_dim):
            wanted = f"[nnz, {heads}, {head_dim}] (num_kv_heads, head_dim of {cache_name})"
            raise ValueError(f"{name}: expected shape {wanted}, found {list(t.shape)}")
        if t.dtype != cache.dtype:
            raise TypeError(f"{name}: expected dtype {_short(cache)} as {cache_name}, found {_short(t)}")
        if t.is_complex():
            raise TypeError(f"{name}: expected a dtype that is not complex, found {_short(t)}")
    if kv[1].shape[:3] != kv[0].shape[:3]:
        wanted = f"{list(kv[0].shape[:3])} as k_cache"
        raise ValueError(
            f"v_cache: expected [num_pages, page_size, num_kv_heads] = {wanted}, found {list(kv[1].shape)}"
        )
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v: expected {k.shape[0]} rows as in k, found {v.shape[0]}")
    return kv[0], kv[1]


def _check_table(
    qo_indptr: Any, kv_indptr: Any, kv_indices: Any, last_page_len: Any, device: torch.device
) -> Table:  # fmt: skip
    """What shapes, dtypes and devices tell of the indices."""
    given = (qo_indptr, kv_indptr, kv_indices, last_page_len)
    table = tuple(
        t if isinstance(t, Tensor) else torch.from_numpy(host(name, t)) for name, t in zip(TABLE, given, strict=True)
    )
    for name, t in zip(TABLE, table, strict=True):
        if t.layout != torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, found layout {t.layout}")
        if t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected dtype int32 or int64, found {_short(t)}")
        if t.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, found shape {list(t.shape)}")
        if t.device.type != "cpu" and t.device != device:
            raise ValueError(f"{name}: expected a tensor on the host or on {device} as k is, found {t.device}")
        if t.device != device and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name}: expected a tensor on {device} while a CUDA graph is captured, found {t.device}")
    batch = len(qo_indptr) - 1
    for name, t, wanted in zip(TABLE, table, (max(batch + 1, 1), batch + 1, None, batch), strict=True):
        if wanted is not None and len(t) != wanted:
            raise ValueError(f"{name}: expected {wanted} values, for {max(batch, 0)} requests, found {len(t)}")
    return table[0], table[1], table[2], table[3]


def _check_values(table: Table, rows: int, num_pages: int, page_size: int) -> int:
    """Refuse a table on the host whose values can't be; returns the number of rows to write."""
    qo, pages, ids, last = (t.to(torch.int64) for t in table)
    for name, offsets in (("qo_indptr", qo), ("kv_indptr", pages)):
        if int(offsets[0]) != 0:
            raise ValueError(f"{name}: expected offsets that start at 0, found {int(offsets[0])}")
        b = _first(offsets[1:] < offsets[:-1])
        if b is not None:
            low, high = offsets[b : b + 2].tolist()
            raise ValueError(f"{name}: expected offsets that never decrease, found {low}, {high} for request {b}")
    if int(qo[-1]) > rows:
        raise ValueError(f"qo_indptr: expected at most {rows} rows, as in k, found {int(qo[-1])}")
    if len(ids) < int(pages[-1]):
        raise ValueError(f"kv_indices: expected at least {int(pages[-1])} page ids (kv_indptr[-1]), found {len(ids)}")
    n = _first((ids < 0) | (ids >= num_pages), int(pages[-1]))
    if n is not None:
        raise ValueError(f"kv_indices: expected page ids in 0…{num_pages - 1}, found {int(ids[n])} at {n}")
    count = pages[1:] - pages[:-1]
    b = _first((count > 0) & ((last < 1) | (last > page_size)))
    if b is not None:
        raise ValueError(f"last_page_len: expected 1…{page_size} (page_size), found {int(last[b])} for request {b}")
    kv_len = ((count - 1) * page_size + last).masked_fill(count < 1, 0)
    new = qo[1:] - qo[:-1]
    b = _first(new > kv_len)
    if b is not None:
        raise ValueError(
            f"kv_indptr: expected pages for the {int(new[b])} new rows of request {b} (the table is as it is after "
            f"appending), found {int(kv_len[b])} positions"
        )
    return int(qo[-1])


def _first(wrong: Tensor, end: int | None = None) -> int | None:
    """Where the first of `wrong`, before `end`, is true."""
    found = wrong[:end].nonzero()
    return int(found[0]) if len(found) else None


def _short(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
