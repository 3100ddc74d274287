"""The arena: fixed addresses, one copy of what is used, and no copy in flight overwritten."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from attncc.runtime import arena as arena_module
from attncc.runtime.arena import ALIGN, JOIN, RING, Arena, joined, place

CPU = torch.device("cpu")


def read(address, count):
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


class Late(FakeDriver):
    """Copies are made when something waits for them."""

    def __init__(self):
        super().__init__()
        self.waiting, self.made, self.destroyed = {}, [], []
        self.stream[0] = 7

    def make_event(self, device):
        self.made.append(object())
        return self.made[-1]

    def upload(self, copies, stream, event):
        assert stream == 7 and event not in self.waiting
        self.waiting[event] = copies

    def wait(self, event):
        super().upload(self.waiting.pop(event, []), 7, event)

    def destroy(self, event):
        self.wait(event)
        self.destroyed.append(event)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=6))
def test_every_plan_is_what_was_given(plans):
    """Whatever was there before, at the same addresses, the tail right behind the last slice."""
    arena = Arena({"head": 4, "a": 200, "b": 200}, 300, {"scratch": 10}, CPU, FakeDriver())
    where = {name: arena.address(name) for name in ("head", "a", "b", "scratch")}
    assert all(address % 4 == 0 for address in where.values())
    for n, (a, b, tail) in enumerate(plans):
        parts = {"a": np.arange(a, dtype=np.int32) + n, "b": np.arange(b, dtype=np.int32) - n}
        ids = np.arange(tail, dtype=np.int64) * 3
        arena.upload(parts, [ids[: tail // 2], ids[tail // 2 :]])
        assert read(where["a"], a) == parts["a"].tolist()
        assert read(where["b"], b) == parts["b"].tolist()
        at = arena.tail_at(b)
        assert arena.base + 4 * at - where["b"] in range(4 * b, 4 * b + 4 * ALIGN)
        assert read(arena.base + 4 * at, tail) == ids.tolist()
        assert {name: arena.address(name) for name in where} == where
    assert read(where["scratch"], 10) == [0] * 10


def test_slices_do_not_meet():
    offsets, total = place({"a": 1, "b": ALIGN, "c": ALIGN + 1, "d": 0, "e": 5})
    assert offsets == {"a": 0, "b": ALIGN, "c": 2 * ALIGN, "d": 4 * ALIGN, "e": 4 * ALIGN}
    assert total == 5 * ALIGN


def test_ranges_that_lie_close_are_one_copy():
    assert joined([]) == []
    assert joined([(0, 4), (64, 65), (128, 130)]) == [(0, 130)]
    assert joined([(JOIN + 5, JOIN + 6), (0, 4)]) == [(0, 4), (JOIN + 5, JOIN + 6)]
    assert joined([(JOIN + 4, JOIN + 6), (0, 4)]) == [(0, JOIN + 6)]
    assert joined([(2 * JOIN, 2 * JOIN + 1), (JOIN + 5, JOIN + 6), (0, 4)]) == [(0, 4), (JOIN + 5, 2 * JOIN + 1)]


def test_more_than_a_slice_holds_is_a_fault():
    arena = Arena({"a": 4}, 8, {}, CPU, FakeDriver())
    with pytest.raises(AssertionError, match="a: 5 elements in a slice of 4"):
        arena.upload({"a": np.zeros(5, np.int32)})
    with pytest.raises(AssertionError):
        arena.upload({"a": np.zeros(4, np.int32)}, [np.zeros(9, np.int32)])


def test_a_plan_waits_for_the_copy_that_still_reads_its_buffer():
    """Copies that happen late: every one must still find what was put there for it."""
    driver = Late()
    arena = Arena({"a": 4}, 0, {}, CPU, driver)
    for n in range(RING):
        arena.upload({"a": np.full(4, n, np.int32)})
    assert list(driver.waiting) == driver.made  # none has been waited for
    assert read(arena.address("a"), 4) == [0] * 4
    for n in range(RING, RING + 2):
        arena.upload({"a": np.full(4, n, np.int32)})
        assert read(arena.address("a"), 4) == [n - RING] * 4
    assert list(driver.waiting) == [*driver.made[2:], *driver.made[:2]]


@pytest.mark.parametrize("freed_by", ["growth", "deletion"])
def test_a_buffer_is_not_freed_while_a_copy_reads_it(freed_by):
    driver = Late()
    arena = Arena({"a": 4}, 8, {}, CPU, driver)
    plan, events = arena._plan, driver.made.copy()
    arena.upload({"a": np.full(4, 5, np.int32)})
    if freed_by == "growth":
        arena.grow(100)
    else:
        del arena
    gc.collect()
    assert set(driver.destroyed) == set(events)
    assert plan[:4].tolist() == [5] * 4


def test_growing_keeps_what_only_the_device_uses():
    arena = Arena({"a": 4}, 8, {"scratch": 4}, CPU, FakeDriver())
    scratch = arena.address("scratch")
    arena.grow(1000)
    assert arena.tail == 1000
    arena.upload({"a": np.zeros(4, np.int32)}, [np.arange(1000)])
    assert read(arena.base + 4 * arena.tail_at(4), 1000) == list(range(1000))
    assert arena.address("scratch") == scratch


def test_one_copy_a_plan(monkeypatch):
    """Of a plan as serving makes it: nothing between its slices is worth a second copy."""
    copies = []
    monkeypatch.setattr(arena_module, "joined", lambda used: copies.append(joined(used)) or copies[-1])
    arena = Arena({"header": 4, "sources": 4096, "targets": 8192, "items": 1 << 18}, 1 << 16, {}, CPU, FakeDriver())
    ints = lambda n: np.zeros(n, np.int32)  # noqa: E731
    parts = {"header": ints(4), "sources": ints(30), "targets": ints(100), "items": ints(3000)}
    arena.upload(parts, [ints(60_000)])
    assert [len(x) for x in copies] == [1]


def test_made_in_inference_mode_used_outside():
    with torch.inference_mode():
        arena = Arena({"a": 4}, 0, {"scratch": 4}, CPU, FakeDriver())
    arena.upload({"a": np.arange(4, dtype=np.int32)})
    assert read(arena.address("a"), 4) == [0, 1, 2, 3]
