"""Serving: one plan a step, one launch a layer, over paged or ragged keys and values.

A plan (plan.py) is a few arrays of int32.  They go to fixed places on the device (arena.py) by one asynchronous copy,
and every `run` launches the same grid, which reads there what to do: a CUDA graph that captured `run` follows whatever
is planned later.  `run` is to BatchAttention what a call is to Kernel: bound once for a signature, then pointers and
scalars alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from attncc.runtime import arguments as check
from attncc.runtime import block_sparse, emits, launch, prefix, routes
from attncc.runtime import plan as planning
from attncc.runtime import serving_arguments as serving
from attncc.runtime.arena import Arena
from attncc.runtime.driver import driver as cuda_driver
from attncc.runtime.kernel import MAX_BINDINGS, Kernel
from attncc.runtime.plan_levels import plan_levels
from attncc.runtime.results import Copies, Nothing, Results
from attncc.runtime.served_launch import Served, ServedLaunch, unfit_rows
from attncc.runtime.visible import Visible

PARTIAL_BYTES = 256 << 20  # of partial states, unless more is asked for
FIRST_TAIL = 1 << 14  # entries of kv_indices that there is room for at first, where max_kv_pages doesn't say


@dataclass(frozen=True, eq=False)
class Planned:
    """What runs are checked against.  `served`: which kernel they launch; `needs`: what their tensors must have, by the
    keys of serving.SAYS; `scalars`: the values that the plan relies on, by place and name; `owners`: whose rows are,
    for kernels that ask; `qo_indptr`: the rows of every request; `keys`: how many rows k and v must have, where a
    block-sparse plan had to guess."""

    served: Served
    needs: Mapping[str, int]
    scalars: tuple[tuple[int, str, int | float], ...]
    owners: Callable[[], dict[str, np.ndarray]]
    qo_indptr: np.ndarray
    keys: int | None = None


class BatchAttention:
    """A variant over a batch of requests of any lengths, planned once a step and run once a layer.

        attn = attncc.BatchAttention(kernel, num_qo_heads=32, num_kv_heads=8, page_size=16,
                                     max_batch_size=256, max_qo_rows=8192)
        attn.plan(qo_indptr, kv_indptr, kv_indices, last_page_len)
        out, lse = attn.run(q, (k_cache, v_cache), window=4096, return_lse=True)

    `page_size`: rows of a page; None: keys are ragged.  A plan may have `max_batch_size` requests and `max_qo_rows`
    query rows at most.  `max_kv_pages`: entries of kv_indices; None: as many as are needed, until a run is captured.
    `deterministic`: None: same lengths, same bits; "batch_invariant": nor do a request's bits depend on the others.
    `device`: where everything lies.  `partial_rows`: room for partial states, of 4 · num_kv_heads · (head_dim_vo + 1)
    bytes each; None: what plans can use, but at most 256 MiB.

    Memory is allocated here, and every address stays: a CUDA graph that captured `run` follows the latest plan, as long
    as this object lives.  It keeps the tensors and scalars of the captured run: a later plan that needs more of k, v or
    the parameters, or relies on other scalars, is refused.  A plan may have more query rows than the captured q: then
    a replay does nothing.  Where several graphs are captured, those that fit a plan may be replayed.

    Plans and runs of an object belong on one stream, or on streams that wait for one another, and to one thread at a
    time.  Objects know nothing of each other.

    Raises ValueError and TypeError naming the argument, what was expected and what was found; the object still works,
    with the plan that it had.
    """

    def __init__(
        self, kernel: Kernel, *, num_qo_heads: int, num_kv_heads: int, max_batch_size: int, max_qo_rows: int,
        page_size: int | None = None, max_kv_pages: int | None = None, deterministic: str | None = None,
        device: Any = "cuda", partial_rows: int | None = None, driver: Any = None,
    ):  # fmt: skip
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel: expected an attncc.Kernel, found {type(kernel).__name__}")
        serving.check_counts(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, max_batch_size=max_batch_size,
            max_qo_rows=max_qo_rows, page_size=page_size, max_kv_pages=max_kv_pages, partial_rows=partial_rows,
        )  # fmt: skip
        serving.check_heads(num_qo_heads, num_kv_heads, max_qo_rows)
        if deterministic not in (None, "batch_invariant"):
            raise ValueError(f"deterministic: expected None or 'batch_invariant', found {deterministic!r}")
        used = driver or kernel.driver
        if used is None:  # a machine without a GPU would else complain of that first
            serving.check_device(device, "cuda")
            kernel.serving("ragged" if page_size is None else "paged", page_size)
            used = cuda_driver()
        self._device = serving.device_of(device, used.device_type)
        self._kernel, self._driver = kernel, driver
        self._served = self._load("ragged") if page_size is None else self._load("paged", int(page_size))
        loaded, self._spec, says = self._served.loaded, self._served.spec, self._served.manifest.get("visible")
        self._parameters = check.Parameters(self._spec)
        self._by_request = [e for e in self._spec.emits if emits.position_of_b(e) is not None]
        self._visible = Visible(says) if says else None
        self._max_kv_pages = max_kv_pages
        shape = planning.Shape(
            num_qo_heads=int(num_qo_heads), num_kv_heads=int(num_kv_heads), head_dim_vo=self._spec.head_dim_vo,
            tile_q=loaded.entry["tile_q"], tile_kv=loaded.entry["tile_kv"], page_size=self._served.page_size or 0,
            sm_count=loaded.sm_count, max_batch_size=int(max_batch_size), max_qo_rows=int(max_qo_rows),
            partial_rows=int(partial_rows or 0), batch_invariant=deterministic is not None,
            kv_bytes=(self._spec.head_dim_qk + self._spec.head_dim_vo) * self._spec.dtype.itemsize,
        )  # fmt: skip
        self._shape = shape if partial_rows is not None else replace(shape, partial_rows=default_partial_rows(shape))
        self._arena = self._make_arena()
        self._bound: tuple[Any, Any] | None = None  # scalars of the last plan, and what they show
        self._planned: Planned | None = None
        self._bindings: dict[tuple, Any] = {}
        self._blocks: dict[int, Served] = {}
        self._prepared: Served | None = None  # the kernel that a pre-pass comes before, once a plan has asked for it
        self._held: set[serving.Limit] = set()  # what tensors of captured runs have,
        self._held_kinds: set[tuple[str, int | None, str]] = set()  # how these lie,
        self._held_scalars: dict[Planned, list[Sequence[int | float]]] = {}  # and by plan their scalars
        self._lock = threading.Lock()

    def _load(self, layout: str, page_size: int | None = None) -> Served:
        """The variant's kernel for keys that lie so."""
        artifact = self._kernel.serving(layout, page_size)
        if self._driver in (None, self._kernel.driver):
            loaded = self._kernel.loaded(self._device, layout, page_size)
        else:
            loaded = launch.Loaded(self._driver, artifact, self._device)
        return Served(loaded, artifact.manifest)

    def _make_arena(self) -> Arena:
        sizes = planning.capacity(self._shape)
        # what few plans fill, or what is small, stands first: of most plans one range is copied
        planned = {n: sizes[n] for n in ("row_request", "requests", "header", "sources", "targets", "items")}
        scratch = {"zeros": 64, "tickets": 2, **{n: sizes[n] for n in ("counters", "part_o", "part_lse")}}
        scratch["part_emits"] = sizes["part_lse"] * len(self._spec.rows)
        if self._by_request:
            planned = {"qo_indptr": self._shape.max_batch_size + 1, **planned}
        tail = self._max_kv_pages or (0 if self._served.page_size is None else FIRST_TAIL)
        return Arena(planned, tail, scratch, self._device, self._served.loaded.driver)

    # ------------------------------------------------------------------ plan

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any = None, last_page_len: Any = None, *,
        shared_prefix: str | None = None, **scalars: Any,
    ) -> None:  # fmt: skip
        """Balance the work of a batch over the device, for all runs until the next plan.

        qo_indptr [B + 1]: offsets of every request in q.  Paged: kv_indptr [B + 1] counts pages in kv_indices (page
        ids; may be longer, padded with anything), last_page_len [B] the keys in a request's last page, 1 to
        page_size, ignored where it has no page.  Ragged: kv_indptr [B + 1] alone, offsets in k and v.  int32 or int64,
        as lists, arrays or tensors; those on the device are copied to the host, which waits; others cost no wait.

        `shared_prefix="auto"`: requests whose page ids start alike read those keys once, where that pays.  Scalars of
        the variant given here leave out keys that the mask can't show with these values; runs must give the same.

        Copied to the device on torch's current stream; waits only while the third plan before is still being copied.
        """
        if shared_prefix not in (None, "auto"):
            raise ValueError(f"shared_prefix: expected None or 'auto', found {shared_prefix!r}")
        values = self._plan_scalars(scalars)
        table = serving.table(self._served.page_size, qo_indptr, kv_indptr, kv_indices, last_page_len)
        batch = planning.Batch(table.qo_indptr, table.kv_start, table.kv_len)
        visible = self._visible_keys(values)
        served = self._served
        if shared_prefix == "auto" and table.kv_indices is not None and not served.manifest.get("keys_by_request"):
            made = prefix.auto(self._shape, batch, table.kv_indices, visible)
        elif routes.PREPASS in served.manifest["kernels"]:
            served = self._route(batch, visible)
            made = planning.plan(replace(self._shape, tile_kv=served.loaded.entry["tile_kv"]), batch, visible)
            if served.first is not None:
                made = planning.with_requests(made, batch)
        else:
            made = planning.plan(self._shape, batch, visible)
        self._adopt_tables(served, [table], values, made)

    def plan_cascade(self, levels: Sequence[Sequence[Any]], **scalars: Any) -> None:
        """Plan a batch whose requests share keys: a level is (qo_indptr, kv_indptr, kv_indices, last_page_len) as in
        `plan`, or (qo_indptr, kv_indptr) where keys are ragged, with a group of query rows in the place of a request.

        Outermost level first: a row sees the keys of its group in every level, one after another, and positions count
        through all of them.  Groups lie inside those of the level before; those of the last level are the requests.
        """
        if self._served.first is not None:
            raise ValueError(
                "plan_cascade: expected a kernel that transforms k and v itself, since rows that share keys may have "
                "them at different positions, found one built with prepass=True; nearest: prepass=None or False"
            )
        values = self._plan_scalars(scalars)
        tables = serving.levels(self._served.page_size, levels)
        own = self._served.manifest.get("keys_by_request")
        if own and len(tables) > 1:
            raise ValueError(
                f"levels: expected one, since requests can't share keys of which f_k or f_v of {self._spec.name} makes "
                f"what depends on the request ({', '.join(own)}), found {len(tables)}; nearest: plan"
            )
        batches = [planning.Batch(t.qo_indptr, t.kv_start, t.kv_len) for t in tables]
        made = plan_levels(self._shape, batches, self._visible_keys(values))
        self._adopt_tables(self._served, tables, values, made)

    def plan_block_sparse(
        self, indptr: Any, indices: Any, *, block_rows: int, block_cols: int, qo_len: int | None = None,
        kv_len: int | None = None, **scalars: Any,
    ) -> None:  # fmt: skip
        """Plan attention of one request in blocks of `block_rows` query rows and `block_cols` keys: row m of blocks
        sees the block columns indices[indptr[m] : indptr[m + 1]], in any order, none of them twice.

        Where kv heads see other blocks: indptr [num_kv_heads, M + 1], indices a list for each kv head.  `qo_len` and
        `kv_len` cut the last row and column of blocks short; without kv_len keys end with the last listed block.  The
        variant's mask and positions are those of the whole request: a row sees the keys of its blocks that the mask
        shows.  A row of blocks counts as a request of max_batch_size.

        Runs take k and v as [nnz_kv, num_kv_heads, head_dim], whatever `page_size` is, and tensors over j as [nnz_kv];
        the kernel for such blocks is loaded, or built, at the first plan that needs it.
        """
        heads = self._shape.num_kv_heads
        matrix = block_sparse.uniform(heads, indptr, indices, block_rows, block_cols, qo_len, kv_len)
        self._plan_matrix(matrix, self._plan_scalars(scalars))

    def plan_variable_blocks(self, mask: Any, block_row_sizes: Any, block_col_sizes: Any, **scalars: Any) -> None:
        """Plan attention of one request in blocks of any sizes: row m of blocks sees block column n where mask[m, n].

        block_row_sizes [M] and block_col_sizes [N] are ints from 0, mask [M, N] bool, each with a dimension
        num_kv_heads before where kv heads differ; all heads have the same rows and keys in all.  The rest is as for
        plan_block_sparse.  Keys are listed one by one, or in blocks of the sizes' greatest common divisor where that is
        a multiple of 8.
        """
        matrix = block_sparse.variable(self._shape.num_kv_heads, mask, block_row_sizes, block_col_sizes)
        self._plan_matrix(matrix, self._plan_scalars(scalars))

    def _plan_matrix(self, matrix: block_sparse.Matrix, values: tuple[tuple[int, str, int | float], ...]) -> None:
        size = matrix.block_cols
        if size not in self._blocks:
            self._blocks[size] = self._load("blocks", size)
        served = self._blocks[size]
        shape = replace(self._shape, page_size=size, tile_kv=served.loaded.entry["tile_kv"])
        made = block_sparse.plan(shape, matrix)
        exact = matrix.exact and block_sparse.reads_kv_len(served.manifest)
        rows = np.array([0, matrix.qo_len])
        owners = partial(planning.owners, rows, np.array([matrix.kv_len]))
        planned = Planned(served, matrix.needs, values, owners, rows, matrix.kv_len if exact else None)
        self._adopt(planned, made, [matrix.columns])

    def _plan_scalars(self, given: Mapping[str, Any]) -> tuple[tuple[int, str, int | float], ...]:
        """(place, name, value) of the scalars given to a plan."""
        if self._capturing():
            raise ValueError("plan: expected outside a graph capture, found one; capture run, and plan before a replay")
        if not given:
            return ()
        for name in given:
            if name in self._parameters.tensors:
                raise TypeError(f"{name}: expected in run, since it is a tensor, found in a plan")
        known = {name for name, _ in self._parameters.scalars}
        if not given.keys() <= known:
            check.refuse_names(self._spec, [name for name in given if name not in known])
        return tuple(
            (n, name, convert(given[name]))
            for n, (name, convert) in enumerate(self._parameters.scalars)
            if name in given
        )

    def _visible_keys(self, values: Sequence[tuple[int, str, int | float]]) -> Any:
        """What plans may leave out, with these values of scalars."""
        if self._visible is None:
            return None
        if self._bound is not None and self._bound[0] == values:  # as in most steps
            return self._bound[1]
        known = check.as_declared(self._spec, {name: value for _, name, value in values})
        self._bound = values, self._visible.bind({**known, "group_size": self._shape.group_size})
        return self._bound[1]

    def _route(self, batch: planning.Batch, visible: planning.Visible | None) -> Served:
        """The kernel for ragged keys that may go through a pre-pass first."""
        main = self._served
        tiles = -(-np.diff(batch.qo_indptr) * self._shape.group_size // self._shape.tile_q)
        keys, reads = (int(n.sum()) * self._shape.num_kv_heads for n in (batch.kv_len, tiles * batch.kv_len))
        name = routes.choose(main.manifest, keys, reads, main.loaded.sm_count)
        if name == routes.PREPARED and visible is not None:  # which all keys would be read too often for
            reads = planning.reads(self._shape, batch, visible)
            name = routes.choose(main.manifest, keys, reads, main.loaded.sm_count)
        held = {kind[2] for kind in self._held_kinds}
        if held and name not in held:
            name = main.loaded.name if main.loaded.name in held else routes.PREPARED
        if name == main.loaded.name:
            return main
        if self._prepared is None:
            self._prepared = Served(main.loaded.other(name), main.manifest)
        return self._prepared

    def _adopt_tables(self, served: Served, tables: Sequence[serving.Table], values: Any, made: planning.Plan) -> None:
        inner = tables[-1]
        owners = partial(planning.owners, inner.qo_indptr, serving.keys_of(tables))
        planned = Planned(served, serving.needs(tables), tuple(values), owners, inner.qo_indptr)
        self._adopt(planned, made, [t.kv_indices for t in tables if t.kv_indices is not None])

    def _adopt(self, planned: Planned, made: planning.Plan, ids: Sequence[np.ndarray]) -> None:
        """Copy a plan with its page ids to the device and take it as the present one; nothing has changed where that
        is refused."""
        if self._held_kinds and planned.served.kind not in self._held_kinds:
            raise ValueError(
                "plan: expected keys that lie as those of captured runs, and a kernel as they launch, found others"
            )
        hint = "; a captured run holds it"
        serving.check_fit([limit for limit in self._held if limit[0] != "rows"], planned.needs, True, hint)
        self._check_held_scalars(planned.scalars)
        made.header[2] = planned.needs["rows"]  # a launch with fewer rows does nothing
        parts = {"header": made.header, "sources": made.sources, "targets": made.targets, "items": made.items}
        lists = {"row_request": made.row_request, "requests": made.requests}
        if planned.served.lists and made.row_request is None:
            parts |= planned.owners()
        parts |= {name: x for name, x in lists.items() if x is not None}  # a pre-pass asks for more of requests
        if self._by_request:  # requests that a captured run has beyond the plan's are empty
            rows = planned.qo_indptr
            parts = {"qo_indptr": np.pad(rows, (0, self._shape.max_batch_size + 1 - len(rows)), mode="edge"), **parts}
        self._make_room(sum(map(len, ids)), parts)
        if ids:  # tables count from the start of kv_indices, which is wherever the items end
            made.items[:, planning.TABLE] += self._arena.tail_at(made.items.size)
        self._arena.upload(parts, ids)
        self._planned = planned

    def _check_held_scalars(self, values: Sequence[tuple[int, str, int | float]]) -> None:
        """ValueError where no graph could follow a plan that relies on these scalars.  Runs captured under one plan are
        taken for one graph."""
        wrong = [
            next(((name, run[n], x) for run in runs for n, name, x in values if not serving.same(run[n], x)), None)
            for runs in self._held_scalars.values()
        ]
        if wrong and wrong[-1] is not None and None not in wrong:
            name, held, found = wrong[-1]
            raise ValueError(f"{name}: expected {held} as in a captured run, found {found}")

    def _make_room(self, pages: int, parts: Mapping[str, np.ndarray]) -> None:
        """Have room for so many page ids.  Growing loses the plan before: only for one that fits otherwise."""
        room = self._arena.tail
        if pages <= room:
            return
        if self._max_kv_pages is not None:
            raise ValueError(f"kv_indices: expected at most max_kv_pages = {room} page ids, found {pages}")
        if self._held:
            raise ValueError(
                f"kv_indices: expected at most {room} page ids, since a captured run holds their buffer, found "
                f"{pages}; max_kv_pages={pages} makes room beforehand"
            )
        self._arena.check(parts)
        self._arena.grow(max(pages, 2 * room))
        self._bindings.clear()

    def _capturing(self) -> bool:
        loaded = self._served.loaded
        return loaded.driver.is_capturing(loaded.driver.current_stream(loaded.index))

    # ------------------------------------------------------------------ run

    def run(self, /, q, kv, *, out=None, lse=None, return_lse=False, emit=None, **params):
        """Attention of the planned batch: out, or (out, lse) with `return_lse`; where the variant emits also, last, a
        dict of the emitted tensors, float32.

        q [nnz_qo, num_qo_heads, head_dim_qk] with the plan's rows.  kv: (k, v), paged [num_pages, page_size,
        num_kv_heads, head_dim] or ragged [nnz_kv, num_kv_heads, head_dim].  Any strides with a contiguous last
        dimension; those of k and v, and where they start, must be multiples of 16 bytes (caches are never copied).
        `out` [nnz_qo, num_qo_heads, head_dim_vo] of q's dtype, `lse` float32 [nnz_qo, num_qo_heads], natural log, give
        the memory to write, which nothing else here lies in.  Variant parameters by name, tensors over iq as [nnz_qo],
        over j as k's leading dimensions.  `emit`, {name: tensor}, gives the memory of emitted tensors.

        Launches on torch's current stream; never waits, and allocates nothing where `out`, `lse` and emits [iq, h] are
        given, but for the lists of a domain, which it turns into bits first.  While a graph is captured q may have more
        rows than the plan, and emits [b, …] more requests, for later plans to use; rows beyond a plan's are not
        written, and emits find no key there.
        """
        if (type(kv) is not tuple and type(kv) is not list) or len(kv) != 2:
            raise TypeError(f"kv: expected a pair (k, v), found {serving.described(kv)}")
        if self._planned is not None and self._planned.served.blocks:
            kv = block_sparse.as_rows(kv, self._planned.served.page_size, self._planned.keys)
        tensors, scalars = (q, *kv), ()
        if params or self._spec.names:
            scalars, given = self._parameters.split(params)
            tensors += given
        if emit is not None or self._spec.emits:
            return self._run_and_emit(tensors, scalars, out, lse, return_lse, emit)
        return self._run(tensors, scalars, out, lse, return_lse)

    def _run_and_emit(self, tensors, scalars, out, lse, return_lse, emit) -> Any:
        """The same, with what is emitted behind it."""
        spec, q, planned, capturing = self._spec, tensors[0], self._planned, self._capturing()
        heads = (self._shape.num_qo_heads, self._shape.num_kv_heads)
        if planned is None:
            raise ValueError("run: expected a plan before it, found none")

        def extent() -> emits.Extent:
            offsets = self._arena.view("qo_indptr") if self._by_request else None
            return emits.Extent((len(q),), planned.needs["requests"], *heads, offsets)

        if emit is not None:
            serving.check_run(spec, heads, planned.served.pages, self._device, *tensors[:3])
            emits.check_given(spec, emit, extent(), self._device, spare=capturing)
        given = emit or {}
        rows = emits.make_rows(spec, given, q)
        if capturing:  # a later plan may leave rows out
            emits.clear(spec, rows)
        results = self._run((*tensors, *rows), scalars, out, lse, return_lse)
        found = emits.outputs(spec, rows, given, extent())
        if capturing:
            for e in self._by_request:
                self._held.add(("requests", f"emit {e.name}", found[e.name].shape[e.index.index("b")]))
        return emits.beside(results, found)

    def _run(self, tensors: tuple[Any, ...], scalars: Sequence[int | float], out: Any, lse: Any, return_lse: bool):
        planned = self._planned
        if planned is None:
            raise ValueError("run: expected a plan before it, found none")
        for n, name, value in planned.scalars:
            if not serving.same(scalars[n], value):
                raise ValueError(f"{name}: expected {value} as in the plan, found {scalars[n]}")
        given = tensors
        if out is not None:
            given += (out,)
        if lse is not None:
            given += (lse,)
        try:
            signature = (planned.served.kind, out is None, lse is None, return_lse)
            for t in given:
                signature += (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
            bound = self._bindings.get(signature)
        except (AttributeError, TypeError, RuntimeError):  # not strided tensors: _bind says which
            signature = bound = None
        if bound is None:
            bound = self._bind(planned.served, signature, tensors, out, lse, return_lse)
        if bound.planned is not planned:
            self._fit(bound, planned)
        if bound.requires_grad and torch.is_grad_enabled():
            names = ("q", "k", "v", *(t.name for t in self._spec.bound), "out", "lse")
            check.refuse_grad(zip(names, (*tensors, out, lse), strict=True))
        return bound.call(tensors, scalars, out, lse, return_lse)

    def _fit(self, bound: Any, planned: Planned) -> None:
        """Check a run's tensors against a plan that they were not checked against before."""
        try:
            serving.check_fit(bound.limits, planned.needs, spare=False)
        except ValueError:
            if not self._capturing():
                raise
            serving.check_fit(bound.limits, planned.needs, spare=True)
        else:
            bound.planned = planned

    def _positions(self) -> int:
        """The most keys of a request of the plan."""
        assert self._planned is not None
        return self._planned.needs["positions"]

    def _hold(self, bound: Any, scalars: Sequence[int | float], limits: Sequence[serving.Limit]) -> None:
        """A graph captures a run: from now on plans must fit what it holds."""
        assert self._planned is not None
        self._held.update(bound.limits, limits)
        self._held_kinds.add(self._planned.served.kind)
        self._held_scalars.setdefault(self._planned, []).append(tuple(scalars))

    def _bind(
        self, served: Served, signature: tuple | None, tensors: Sequence[Any], out: Any, lse: Any, return_lse: bool
    ):  # fmt: skip
        """Check everything that a signature tells, and prepare its launch."""
        spec = self._spec
        heads = (self._shape.num_qo_heads, self._shape.num_kv_heads)
        sizes = serving.check_run(spec, heads, served.pages, self._device, *tensors[:3])
        q, k, _, *rest = tensors
        for param, t in zip(spec.bound, rest, strict=True):
            check.check_tensor(param, t, sizes, spec, q.device)
        lse_shape = (sizes.rows, sizes.num_qo_heads)
        out_shape = check.check_results(spec, return_lse, out, lse, lse_shape, q.device)
        if signature is None:
            raise TypeError("q, k, v: expected plain torch tensors")
        results = Results(out_shape, lse_shape, q.dtype, q.device)
        written = results.like if out is None else out
        unfit = {name for name, t in (("q", q), ("out", written)) if unfit_rows(t)}
        unfit |= {"lse"} if lse is not None and not lse.is_contiguous() else set()
        bound: Any
        if not sizes.rows:
            bound = Nothing(results)
        elif unfit:
            bound = Copies(self._run, frozenset(unfit))
        else:
            launches = served.bind(sizes, tensors, written, self._addresses())
            zeros = 0 if k.numel() else self._arena.address("zeros")
            room = math.prod(k.shape[:-2])  # keys of one request at most, unless it has a page twice
            bound = ServedLaunch(
                served, launches, results, zeros, self._run, self._hold, lambda: (self._positions(), room)
            )
        bound.requires_grad = any(t.requires_grad for t in (*tensors, out, lse) if t is not None)
        bound.limits, bound.planned = serving.limits(spec, sizes, rest), None
        with self._lock:
            while len(self._bindings) >= MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            self._bindings[signature] = bound
        return bound

    def _addresses(self) -> dict[str, int]:
        named = {name: self._arena.address(name) for name in launch.ARENA if name != "kv_indices"}
        return {**named, "kv_indices": self._arena.base}


def default_partial_rows(shape: planning.Shape) -> int:
    """Rows of partial states that any plan can use, and a cascade of two levels needs, or what PARTIAL_BYTES hold."""
    row = 4 * shape.num_kv_heads * (shape.head_dim_vo + 1)
    cascade = 2 * shape.max_qo_rows * shape.group_size
    return max(1, min(max(planning.ample_partial_rows(shape), cascade), PARTIAL_BYTES // row))
