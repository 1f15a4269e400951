"""One object for each distinct node, for as long as somebody has it."""

from __future__ import annotations

import gc
import threading

from fusec.ir import intern


class Pair(intern.Node):
    __slots__ = ("left", "right")

    def __init__(self, left: int, right: int) -> None:
        self.left = left
        self.right = right


class Unordered(Pair):
    """A pair that is the same either way round."""

    __slots__ = ()

    @classmethod
    def intern_key(cls, *fields: int) -> tuple[int, ...]:
        return tuple(sorted(fields))


def held(kind: type) -> int:
    return sum(key[0] is kind for key in list(intern._table))


def test_equal_fields_are_one_object() -> None:
    assert Pair(1, 2) is Pair(1, 2)
    assert Pair(1, 2) is not Pair(2, 1)
    assert Pair(1, 2) is not Unordered(1, 2)


def test_a_class_says_what_makes_its_nodes_the_same() -> None:
    assert Unordered(1, 2) is Unordered(2, 1)


def test_what_nobody_has_is_forgotten() -> None:
    pair = Pair(3, 4)
    assert held(Pair) == 1
    del pair
    gc.collect(1)
    assert held(Pair) == 0
    assert Pair(3, 4).left == 3


def test_threads_get_one_object() -> None:
    made: list[list[Pair]] = []
    start = threading.Barrier(4)

    def make() -> None:
        start.wait()
        made.append([Pair(5, n) for n in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(pair) for pair in same}) == 1 for same in zip(*made, strict=True))
