"""Rings of shared-memory slots between producer and consumer warps, on full/empty mbarriers."""

from math import log2

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm


class Ring:
    """`stages` full barriers, then as many empty ones.  Users keep (slot, phase): readers start at 0, writers at 1."""

    def __init__(self, barriers, stages: int):
        self.full, self.empty, self.stages = barriers, barriers + stages, stages


def rings_of(barriers, stages) -> tuple[Ring, ...]:
    """Rings of so many stages, one after another."""
    return tuple(Ring(barriers + 2 * sum(stages[:n]), count) for n, count in enumerate(stages))


def open_ring(ring: Ring, readers: int, writers: int = 1) -> None:
    for i in range(ring.stages):
        cute.arch.mbarrier_init(ring.full + i, writers)
        cute.arch.mbarrier_init(ring.empty + i, readers)


def ring_place(stages: int, at):
    """(slot, phase) of the block that is the `at`-th of this CTA; as many stages as a power of two."""
    shift = int(log2(stages))
    return at & (stages - 1), (at >> shift) & 1


@cute.jit
def wait_block(ring: cutlass.Constexpr, at: Int32):
    slot, phase = ring_place(ring.stages, at)
    cute.arch.mbarrier_wait(ring.full + slot, phase)
    return slot


def has_passed(barrier, phase):
    """Would a wait for this phase end at once?  The same in all lanes."""
    asm = "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.b32 {$w0}, 1, 0, p; }"
    found = cute.arch.inline_ptx(asm, write_only_types=[Int32], read_only_args=[barrier.toint(), phase])
    return cute.arch.shuffle_sync(found, 0) != 0


def advance(stages: int, slot, phase):
    """The slot that follows; the phase flips on wrap-around."""
    if stages == 1:
        return slot, phase ^ 1
    if stages == 2:
        return slot ^ 1, phase ^ slot
    wrap = slot == stages - 1
    return cutlass.select_(wrap, Int32(0), slot + 1), cutlass.select_(wrap, phase ^ 1, phase)


def arrive(barrier, lead) -> None:
    """One arrival a warp.  A predicate, not a branch: a branch here can make ptxas treat the whole loop as
    divergent, and then every wgmma descriptor goes through vector registers."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier.toint()], predicate=lead
    )


def release(ring: Ring, slot, lead) -> None:
    arrive(ring.empty + slot, lead)


def release_for(ring: Ring, slot, lead, count) -> None:
    """As `release`, counted `count` times: for the warps of another warpgroup, too."""
    bar = ring.empty + slot
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[bar.toint(), count], predicate=lead
    )


@cute.jit
def fill(ring: cutlass.Constexpr, slot: Int32, phase: Int32, nbytes: cutlass.Constexpr, atom, src, dst):
    """Wait for the slot, announce the bytes, copy."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, nbytes)
    cute.copy(atom, src, dst, tma_bar_ptr=ring.full + slot)


@cute.jit
def fill_tagged(
    ring: cutlass.Constexpr, slot: Int32, phase: Int32, nbytes: cutlass.Constexpr, atom, src, dst, tags, tag: Int32
):
    """The same, with a word for whoever reads the slot; the arrival on `full` releases it."""
    cute.arch.mbarrier_wait(ring.empty + slot, phase)
    with cute.arch.elect_one():
        cute.make_tensor(tags + slot, cute.make_layout(1))[0] = tag
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, nbytes)
    cute.copy(atom, src, dst, tma_bar_ptr=ring.full + slot)


def warp_uniform(x):
    return cute.arch.make_warp_uniform(x)


def is_lead():
    """True on one fixed lane of the warp."""
    return Boolean(cute.arch.lane_idx() == 0)


def own_thread():
    """This thread's number in its CTA, read afresh from the hardware: no register keeps it, or what follows from it,
    from before."""
    return Int32(llvm.inline_asm(Int32.mlir_type, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True))
