"""A functional interpreter of the PTX that attncc's kernels compile to: kernels run on small shapes with no GPU.

It models values, and the mistakes that a GPU hides or answers with a hang:

- addresses outside an allocation, misaligned or read-only; global or shared memory read before it is written;
- asynchronous copies that land as late as they may: what is read too early is NaN, a buffer that is refilled while a
  product or a store still reads it is an error; accumulators read before their wait are NaN;
- a generic write (cp.async is one) that reaches the async proxy with no fence between;
- what one CTA reads or writes where another one wrote, with no release and acquire between (CTAs give way to each other
  at atomics and fences, in an order by the seed);
- deadlock, told with what every warp waits for.

It does not model time, caches, or the memory order between ordinary loads and stores of the warps of a CTA.

    program.py    text -> instructions            translate.py  instructions -> Python functions
    ops.py        arithmetic, as a table          effects.py    memory, shuffles, votes
    sync.py       barriers                        tma.py, cp_async.py, wgmma.py, mma.py
    memory.py     global and shared memory        races.py      what CTAs know of each other's writes
    machine.py    warps, CTAs, the scheduler      launch.py     a built artifact on torch CPU tensors
"""
