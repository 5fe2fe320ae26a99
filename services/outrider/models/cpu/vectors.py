"""Loops written in the compiler's own language, for cases where its choice of instructions would change bits or cost
time.

Left to itself the compiler splits the sums of one row differently from those of several, and their bits differ. Here
the code says which lanes are added, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic as untyped_intrinsic

cgutils: Any = untyped_cgutils
binding.initialize_native_asmparser()  # for instructions given as text

FLOAT, INDEX, LANE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
NUM_LANES = 8
VECTOR = ir.VectorType(FLOAT, NUM_LANES)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Declares a function that generates the compiler's own code. Only numba passes its first argument."""
    return untyped_intrinsic(function)


class Matrix:
    """Reads and writes an array of numbers, [rows, columns] or [rows], whose last axis is contiguous."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value=value)
        self._builder, self._data = builder, array.data
        shape, strides = (cgutils.unpack_tuple(builder, values) for values in (array.shape, array.strides))
        self.num_columns = shape[-1]
        self._num_bytes = kind.dtype.bitwidth // 8
        self._stride = builder.sdiv(strides[0], INDEX(self._num_bytes))

    def row(self, number: Any) -> Any:
        """Returns the offset at which a row begins."""
        return self._builder.mul(number, self._stride)

    def at(self, offset: Any) -> Any:
        """Reads one number."""
        return self._builder.load(self._builder.gep(self._data, [offset]))

    def lanes_at(self, offset: Any) -> Any:
        """Reads a vector of the usual size."""
        return self.vector_at(offset, VECTOR)

    def vector_at(self, offset: Any, kind: Any) -> Any:
        """Reads a vector of a kind."""
        loaded = self._builder.load(self._pointer(offset, kind))
        loaded.align = self._num_bytes
        return loaded

    def put(self, value: Any, offset: Any) -> None:
        """Writes one number, or those of a vector."""
        self._builder.store(value, self._pointer(offset, value.type)).align = self._num_bytes

    def _pointer(self, offset: Any, kind: Any) -> Any:
        return self._builder.bitcast(self._builder.gep(self._data, [offset]), kind.as_pointer())


def matrices(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Matrix]:
    """Returns the arguments that are arrays."""
    pairs = zip(signature.args, arguments, strict=True)
    return [Matrix(context, builder, kind, value) for kind, value in pairs if isinstance(kind, types.Array)]


class Sum:
    """Adds up products, in one number or in each lane of a vector. The compiler keeps it in a register."""

    def __init__(self, builder: Any, first: Any) -> None:
        self._builder, self._kind = builder, first.type
        self._place = cgutils.alloca_once(builder, first.type)
        builder.store(first, self._place)

    def add(self, x: Any, y: Any) -> None:
        """Adds x * y, rounded once."""
        name = "llvm.fma.f32" if self._kind is FLOAT else f"llvm.fma.v{NUM_LANES}f32"
        kind = ir.FunctionType(self._kind, [self._kind] * 3)
        fma = cgutils.get_or_insert_function(self._builder.module, kind, name)
        self._builder.store(self._builder.call(fma, [x, y, self.value]), self._place)

    @property
    def value(self) -> Any:
        """The sum so far."""
        return self._builder.load(self._place)


def totals_of(builder: Any, vectors: Sequence[Any]) -> Any:
    """Adds up the lanes of up to 8 vectors, each by itself: lane i of the result is the sum of vector i."""
    left = list(vectors)
    evens, odds = (
        ir.Constant(ir.VectorType(LANE, NUM_LANES), list(range(first, 2 * NUM_LANES, 2))) for first in (0, 1)
    )
    for _ in range(NUM_LANES.bit_length() - 1):
        # Adds neighbours: of two vectors, or of one and itself if there is only one.
        left = [
            builder.fadd(builder.shuffle_vector(one, other, evens), builder.shuffle_vector(one, other, odds))
            for one, other in zip(left[::2], left[1::2] or left[:1], strict=True)
        ]
    return left[0]


@contextmanager
def loop(builder: Any, first: Any, last: Any, step: Any) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, first, last, step) as (index, _):
        yield index


def multiple_of(builder: Any, count: Any, size: int) -> Any:
    """Returns the largest multiple of `size` that is not above `count`."""
    return builder.mul(builder.sdiv(count, INDEX(size)), INDEX(size))
