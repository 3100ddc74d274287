"""A compiled variant as a callable on torch tensors.

The first call with a new signature (shapes, strides, dtypes, devices) checks everything and binds a launch; a later
call with the same signature checks what the signature doesn't tell (parameter names, scalars, alignment, gradients),
rewrites pointers and scalars, and launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attncc.runtime import arguments as check
from attncc.runtime import emits, launch, prepass, routes
from attncc.runtime.artifact import Artifact
from attncc.runtime.driver import driver as cuda_driver
from attncc.runtime.listing import Listing, line_param
from attncc.runtime.results import Copies, Nothing, Results
from attncc.runtime.tensor_map import ALIGNMENT
from attncc.runtime.workspace import Workspace

MAX_BINDINGS = 1024
MISALIGNED = ALIGNMENT - 1
# layout -> the kernel that an artifact must hold
KERNELS = {"dense": "forward", "ragged": "serve", "paged": "serve", "blocks": "serve"}


class Kernel:
    """A variant on dense tensors: `kernel(q, k, v, *, return_lse=False, out=None, lse=None, emit=None, **params)`.

    q [B, qo_len, num_qo_heads, head_dim_qk], k [B, kv_len, num_kv_heads, head_dim_qk], v [B, kv_len, num_kv_heads,
    head_dim_vo]: of the dtype that the kernel was compiled for, on one CUDA device, with any strides and a contiguous
    last dimension.  Rows that TMA can't address (a base or a stride that isn't a multiple of 16 bytes) are honoured
    through an aligned copy, which is slower.  Variant parameters are keyword arguments: scalars as Python or numpy
    numbers, tensors by name.

    Returns out [B, qo_len, num_qo_heads, head_dim_vo] of q's dtype; with return_lse also lse, float32 [B, qo_len,
    num_qo_heads], natural log; where the variant emits also, last, a dict of the emitted tensors, float32.  `out`,
    `lse` and `emit`, {name: tensor}, give the memory to write.  Runs on torch's current stream of q's device; may be
    captured in a CUDA graph.  Threads may share a kernel.

    Paged and ragged batches go through BatchAttention, which asks for the variant's other kernels (`serving`).

    Raises ValueError or TypeError naming the argument, what was expected and what was found, before any launch.
    """

    def __init__(
        self, artifact: Artifact, driver: Any = None, build: Callable[[str, int | None], Artifact] | None = None
    ):  # fmt: skip
        """`build(layout, page_size)` makes the variant's artifacts for other layouts; without it there are none."""
        self.manifest: Mapping[str, Any] = artifact.manifest
        self._build = build
        self._driver = driver
        self._device_type = "cuda" if driver is None else driver.device_type
        self._artifacts = {(self.manifest["layout"], self.manifest.get("page_size")): self._checked(artifact)}
        self._spec = check.Spec.of(self.manifest, self._device_type)
        self._parameters = check.Parameters(self._spec)
        self._building = threading.Lock()
        self._bindings: dict[tuple, Any] = {}
        self._loaded: dict[tuple, launch.Loaded] = {}
        self._workspaces: dict[tuple, Workspace] = {}
        self._lock = threading.Lock()

    @property
    def variant(self) -> str:
        """The variant's name."""
        return self._spec.name

    @property
    def driver(self) -> Any:
        """What launches it, as given or used; None: CUDA's, which no call has needed yet."""
        return self._driver

    @property
    def params(self) -> dict[str, str]:
        """What a call takes by name, and how it is declared: {"window": "i32", "sink": "f32[h]"}."""
        scalars = {
            s.name: s.type if s.default is None else f"{s.type} = {s.default}" for s in self._spec.scalars
        }  # fmt: skip
        return scalars | {t.name: f"{t.dtype}[{', '.join(map(str, t.dims))}]" for t in self._spec.tensors}

    def __repr__(self) -> str:
        m = self.manifest
        takes = [f"{name}: {kind}" for name, kind in self.params.items()]
        takes += [f"{name}: const = {value}" for name, value in m["const"].items()]
        dims = {m["head_dim_qk"], m["head_dim_vo"]}
        head_dim = "/".join(map(str, (m["head_dim_qk"], m["head_dim_vo"]) if len(dims) > 1 else dims))
        kind = [f"head_dim {head_dim}", m["dtype"], m["arch"]]
        if m["layout"] != "dense":
            kind.append(" ".join(str(x) for x in (m["layout"], m.get("page_size")) if x))
        return f"<attncc.Kernel {self.variant}({', '.join(takes)}) {', '.join(kind)}>"

    def __call__(self, /, q, k, v, *, return_lse=False, out=None, lse=None, emit=None, **params):
        tensors, scalars = (q, k, v), ()
        if params or self._spec.names:
            scalars, given = self._parameters.split(params)
            tensors += given
        if emit is not None or self._spec.emits:
            return self._run_and_emit(tensors, scalars, out, lse, return_lse, emit)
        return self._run(tensors, scalars, out, lse, return_lse)

    def _run_and_emit(self, tensors, scalars, out, lse, return_lse, emit) -> Any:
        """The same, with what is emitted behind it."""
        spec, q = self._spec, tensors[0]
        if emit is not None:
            check.check_inputs(spec, *tensors[:3])
            emits.check_given(spec, emit, _extent(q, tensors[1]), q.device)
        given = emit or {}
        rows = emits.make_rows(spec, given, q)
        results = self._run((*tensors, *rows), scalars, out, lse, return_lse)
        return emits.beside(results, emits.outputs(spec, rows, given, _extent(q, tensors[1])))

    def serving(self, layout: str, page_size: int | None = None) -> Artifact:
        """The variant's artifact for `layout`: "dense", "ragged", "paged" (with pages of `page_size` rows) or "blocks"
        (of `page_size` keys).

        Built or found in the cache where `attncc.compile` made this kernel.  Raises ValueError where it came from an
        artifact directory of another layout.
        """
        wanted = (layout, page_size)
        with self._building:
            if wanted not in self._artifacts:
                if self._build is None:
                    command = f"`attncc build FILE:{self.variant} {_flags(*wanted)}` builds it, and "
                    raise ValueError(
                        f"kernel: expected an artifact for {_said(*wanted)}, found one for "
                        f"{_said(self.manifest['layout'], self.manifest.get('page_size'))}; "
                        f"{'' if layout == 'blocks' else command}attncc.compile makes kernels for any layout"
                    )
                self._artifacts[wanted] = self._checked(self._build(layout, page_size))
            return self._artifacts[wanted]

    def _checked(self, artifact: Artifact) -> Artifact:
        """The artifact, where it is one that this runtime can launch."""
        m = artifact.manifest
        name = KERNELS.get(m["layout"])
        others = [routes.PREPARED]
        if "ahead" not in m["kernels"].get(routes.PREPARED, {}):
            others.append(routes.PREPASS)
        lists = m.get("domain")
        names = list(m["kernels"])
        if lists and names[-1:] == [launch.LISTING]:
            names.pop()
        elif lists:
            names = []
        if m["dtype"] not in check.DTYPES or names not in ([name], [name, *others], others):
            kind = (m["layout"], m["dtype"], *sorted(m["kernels"]))
            raise ValueError(f"artifact {artifact.path}: {', '.join(kind)}: not a kind of kernel that this attncc runs")
        lines = [line_param(lists)] if lists else []
        for kernel in m["kernels"].values():
            launch.check_params(kernel, check.Spec.of(m, self._device_type), m["layout"], lines)
        return artifact

    def _run(self, tensors: tuple[Any, ...], scalars: Sequence[int | float], out: Any, lse: Any, return_lse: bool):
        q, k, v = tensors[:3]
        try:  # q, k, v by hand: a loop over them takes half as long again
            signature = (
                q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
                k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
                v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
                out is None, lse is None, return_lse,
            )  # fmt: skip
            given = tensors[3:]
            if out is not None:
                given += (out,)
            if lse is not None:
                given += (lse,)
            for t in given:
                signature += (t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
            bound = self._bindings.get(signature)
        except (AttributeError, TypeError, RuntimeError):  # not strided tensors: _bind says which
            signature = bound = None
        if bound is None:
            bound = self._bind(signature, tensors, out, lse, return_lse)
        if bound.requires_grad and torch.is_grad_enabled():
            names = ("q", "k", "v", *(t.name for t in self._spec.bound), "out", "lse")
            check.refuse_grad(zip(names, (*tensors, out, lse), strict=True))
        return bound.call(tensors, scalars, out, lse, return_lse)

    # ------------------------------------------------------------------ a new signature

    def _bind(self, signature: tuple | None, tensors: Sequence[Any], out: Any, lse: Any, return_lse: bool):
        """Check everything that a signature tells, and prepare its launch."""
        spec = self._spec
        q, k, v, *rest = tensors
        sizes = check.check_inputs(spec, q, k, v)
        for param, t in zip(spec.bound, rest, strict=True):
            check.check_tensor(param, t, sizes, spec, q.device)
        lse_shape = (sizes.batch, sizes.qo_len, sizes.num_qo_heads)
        out_shape = check.check_results(spec, return_lse, out, lse, lse_shape, q.device)
        if signature is None:
            raise TypeError("q, k, v: expected plain torch tensors")
        results = Results(out_shape, lse_shape, q.dtype, q.device)
        bound = Nothing(results) if 0 in lse_shape else self._bind_launch(sizes, results, tensors, out, lse)
        bound.requires_grad = any(t.requires_grad for t in (*tensors, out, lse) if t is not None)
        with self._lock:
            while len(self._bindings) >= MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            self._bindings[signature] = bound
        return bound

    def _bind_launch(self, sizes: check.Sizes, results: Results, tensors: Sequence[torch.Tensor], out: Any, lse: Any):
        device = self.loaded(results.device)
        if not routes.leaves_choice(self.serving("dense").manifest):
            return self._bind_route(device.name, sizes, results, tensors, out, lse)
        route = _Route(self, device, sizes, results)
        return route if route.scalars else self._bind_route(route.choose({}), sizes, results, tensors, out, lse)

    def _bind_route(
        self, name: str, sizes: check.Sizes, results: Results, tensors: Sequence[torch.Tensor], out: Any, lse: Any
    ):  # fmt: skip
        """`name`: of the main kernel."""
        spec, q, k, v = self._spec, *tensors[:3]
        device = self.loaded(results.device).other(name)
        keys = sizes.batch * sizes.kv_len * sizes.num_kv_heads
        entry, before = device.entry, None
        if device.name == routes.PREPARED and keys and "ahead" not in entry:
            before = device.other(routes.PREPASS)
        made = entry.get("ahead", {}) if before is None else before.entry["of"]
        fields = launch.geometry(entry, spec, sizes)
        for param, t in zip(spec.bound, tensors[3:], strict=True):
            fields |= launch.tensor_fields(param, t.shape, t.stride())
        written = torch.empty(results.out_shape, dtype=results.dtype, device="meta") if out is None else out
        maps, unfit = {}, []
        named = {"q": q, "k": k, "v": v, "out": written}
        unfit += [name for name in made if prepass.unfit(named[name])]
        named |= {name: prepass.written(named[name], by_head=before is None) for name in made}
        for name, t in named.items():
            key = "map_o" if name == "out" else f"map_{name}"
            tma = {**entry["tma"][key], "box": launch.box_of(entry, key, fields["pack_shift"])}
            encoded = device.encode(t, self.manifest["dtype"], tma, q.data_ptr())
            if encoded is None:
                unfit.append(name)
            else:
                maps[key] = encoded
        if lse is not None and not lse.is_contiguous():
            unfit.append("lse")
        if unfit:
            return Copies(self._run, frozenset(unfit))
        tiles = fields["num_tiles_q"] * fields["num_heads_batch"] >> fields["pack_shift"]
        binding = launch.Binding(entry, device.function, min(tiles, device.sm_count))
        binding.set_maps(maps)
        binding.set_fields(fields)
        take = self._workspaces[results.device, "dense", None].take
        first = None if before is None else prepass.Prepass(before, spec, k, v, fields, {})
        listing, manifest = None, self.serving("dense").manifest
        if "domain" in manifest:
            heads, rows = (sizes.num_qo_heads, sizes.num_kv_heads), (sizes.batch, sizes.qo_len)
            listing = Listing(device, manifest, spec, binding, fields, heads, rows, {})
        ahead = prepass.Ahead(binding, entry, k, v) if "ahead" in entry else None
        return _Launch(self, device, take, binding, results, sizes.kv_len, first, ahead, listing)

    def loaded(self, where: torch.device, layout: str = "dense", page_size: int | None = None) -> launch.Loaded:
        """The kernel for a layout, loaded on a device once for all who launch it.  Raises as `serving`, and as
        Driver.load."""
        artifact = self.serving(layout, page_size)
        with self._lock:
            key = (where, layout, page_size)
            if key not in self._loaded:
                self._driver = self._driver or cuda_driver()
                self._loaded[key] = launch.Loaded(self._driver, artifact, where)
                self._workspaces[key] = Workspace(where)
            return self._loaded[key]


class _Route:
    """A call whose scalars say how much the mask leaves, and so which way it goes: bound once for either way."""

    requires_grad = False

    def __init__(self, kernel: Kernel, device: launch.Loaded, sizes: check.Sizes, results: Results):
        from attncc.runtime.visible import Visible

        spec, self._manifest = kernel._spec, kernel.serving("dense").manifest
        self._kernel, self._device, self._sizes, self._results = kernel, device, sizes, results
        self._visible = Visible(self._manifest.get("visible") or {})
        asked = self._visible.asks()
        self.scalars = [(n, s.name) for n, s in enumerate(spec.scalars) if s.name in asked]
        self._names: dict[tuple, str] = {}  # of main kernels, by values of these scalars
        self._bound: dict[str, Any] = {}

    def choose(self, scalars: Mapping[str, int | float]) -> str:
        """The main kernel, with these values of the scalars that are asked for."""
        n, entry = self._sizes, self._device.entry
        known = check.as_declared(self._kernel._spec, scalars)
        visible = self._visible.bind({**known, "group_size": n.group_size})
        tile = entry["tile_q"], entry["tile_kv"]
        reads = routes.dense_reads(tile, n.batch, n.qo_len, n.kv_len, n.num_qo_heads, visible)
        return routes.choose(self._manifest, n.batch * n.kv_len * n.num_kv_heads, reads, self._device.sm_count)

    def call(self, tensors, scalars, out, lse, return_lse):
        values = tuple([scalars[n] for n, _ in self.scalars])
        name = self._names.get(values)
        if name is None:
            if len(self._names) >= MAX_BINDINGS:
                self._names.clear()
            name = self._names[values] = self.choose(
                {s: x for (_, s), x in zip(self.scalars, values, strict=True)}
            )  # fmt: skip
        bound = self._bound.get(name)
        if bound is None:
            bound = self._kernel._bind_route(name, self._sizes, self._results, tensors, out, lse)
            self._bound[name] = bound
        return bound.call(tensors, scalars, out, lse, return_lse)


class _Launch:
    """A call that launches: everything but pointers, scalars and the stream is in place."""

    requires_grad = False

    def __init__(
        self, kernel: Kernel, device: launch.Loaded, take: Callable[[int, bool], tuple[int, int, Any]],
        binding: launch.Binding, results: Results, kv_len: int, first: prepass.Prepass | None,
        ahead: prepass.Ahead | None, listing: Listing | None,
    ):  # fmt: skip
        """`first`: the pre-pass that makes its k and v; `ahead`: or it makes them itself; `listing`: what makes the
        lines of a domain."""
        spec = kernel._spec
        self._first, self._ahead = first, ahead
        self._kernel, self._driver, self._binding = kernel, device.driver, binding
        self._index, self._take = device.index, take
        self._results, self._kv_len, self._listing = results, kv_len, listing
        self._q, self._k, self._v, self._o = (binding.cell(name) for name in launch.MAPS)
        self._lse, self._tickets = binding.cell("lse"), binding.cell("tickets")
        # With the places of their values among the arguments of `call`: `zip` takes longer than a look-up.
        self._scalars = [(n, binding.cell(f"s.{s.name}")) for n, s in enumerate(spec.scalars)]
        self._pointers = [
            (n, binding.cell(f"t.{t.name}"), check.PARAM_DTYPES[t.dtype][0].itemsize - 1)
            for n, t in enumerate(spec.bound, start=3)
        ]

    def call(self, tensors, scalars, out, lse, return_lse):
        q, k, v = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
        o = 0 if out is None else out.data_ptr()
        if (q | k | v | o) & MISALIGNED:
            named = zip(("q", "k", "v", "out"), (q, k, v, o), strict=True)
            unfit = frozenset(name for name, pointer in named if pointer & MISALIGNED)
            return Copies(self._kernel._run, unfit).call(tensors, scalars, out, lse, return_lse)
        out = self._results.make_out() if out is None else out
        lse = self._results.make_lse() if lse is None and return_lse else lse
        driver, binding = self._driver, self._binding
        stream = driver.current_stream(self._index)
        capturing = driver.is_capturing(stream)
        tickets, zeros, alive = self._take(stream, capturing)
        if not self._kv_len:
            k = v = zeros
        lines = made = None
        if self._first is not None:
            made = self._first.call(tensors, scalars, stream)
            k, v = made[1].data_ptr(), made[2].data_ptr()
        with binding.lock:
            if self._ahead is not None:
                made = self._ahead.make(tensors, stream, capturing)
                if self._kv_len:
                    k, v = made[1].data_ptr(), made[2].data_ptr()
            self._q.value = q
            self._k.value = k
            self._v.value = v
            self._o.value = out.data_ptr()
            self._lse.value = 0 if lse is None else lse.data_ptr()
            self._tickets.value = tickets
            for n, cell in self._scalars:
                cell.value = scalars[n]
            for n, cell, mask in self._pointers:
                cell.value = pointer = tensors[n].data_ptr()
                if pointer & mask:
                    raise ValueError(
                        f"a tensor parameter of {self._kernel.variant}: misaligned elements at {pointer:#x}"
                    )
            if self._listing is not None:
                words = self._listing.words(self._kv_len, self._listing.block(scalars))
                lines = self._listing.launch(stream, tensors, scalars, words)
            driver.launch(binding.function, binding.grid, stream, binding.arguments)
        del alive, lines, made  # the allocator reuses them in stream order
        return (out, lse) if return_lse else out


def _extent(q: torch.Tensor, k: torch.Tensor) -> emits.Extent:
    """Of a checked call."""
    return emits.Extent(tuple(q.shape[:2]), q.shape[0], q.shape[2], k.shape[2])


def _said(layout: str, page_size: int | None) -> str:
    return f"layout {layout!r}" + (f", page_size {page_size}" if page_size else "")


def _flags(layout: str, page_size: int | None) -> str:
    return f"--layout {layout}" + (f" --page-size {page_size}" if page_size else "")
