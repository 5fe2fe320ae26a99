"""Kernels for a CPU: attention and the steps between a layer's products, each as one call.

Between two products of a layer torch runs up to twenty operators; at a few rows each of them costs more than its
arithmetic. Here one compiled loop over rows does what they do together.

A kernel computes each row by itself, by the same instructions in the same order. So its bits depend neither on how many
rows there are, nor on where their keys and values lie: sums over a text go by position.

Tensors are passed as arrays. What is bfloat16 comes as uint16, its bits: numpy has no such type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

Array = npt.NDArray[Any]

COMPILER = f"numba {numba.__version__}"
"""What compiles the kernels, on which their bits depend."""
TYPES = (torch.float32, torch.bfloat16)
"""Types of activations that the kernels read and write."""
MAX_NUM_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
"""Threads that numba has: one for each core."""
GROUP = 4
"""Rows whose attention is computed together, as far as they see the same places: each key is read once for them."""
BLOCK = 256
"""Columns of a product that are computed together: their sums stay in a core's first cache."""

# Sums may be split over the lanes of a vector. They are split once, when they are compiled, and so alike for all rows.
FAST_MATH = {"contract", "reassoc", "nsz"}

_LOCK = threading.Lock()
"""numba's own pool of threads takes one call at a time."""


def _start_threads() -> None:
    """Lets numba start its threads. It mostly shares torch's own, whose number it sets to that of the cores then."""
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num_threads)


_start_threads()


class Kernel:
    """Runs a function that was compiled, on as many threads as torch uses.

    It is compiled at the first call, or read from numba's cache, for one thread and for several: the two may split sums
    differently, so one process uses one of them.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._serial = _compile(function, parallel=False)
        self._parallel = _compile(function, parallel=True)

    def __call__(self, *arguments: object) -> None:
        """Calls the function, which writes its results into arrays that it is given."""
        num_threads = torch.get_num_threads()
        if num_threads == 1:
            self._serial(*arguments)
            return
        with _LOCK:
            numba.set_num_threads(min(num_threads, MAX_NUM_THREADS))
            self._parallel(*arguments)


def _compile(function: Callable[..., Any], *, parallel: bool) -> Callable[..., Any]:
    # Divides as the CPU does: a check for zero in a loop would keep it from being one of vectors.
    make = partial(numba.njit, fastmath=FAST_MATH, nogil=True, error_model="numpy", parallel=parallel)
    compiled: Callable[..., Any]
    try:
        compiled = make(cache=True)(function)
    except RuntimeError:  # there is nowhere to keep what was compiled: each process compiles it anew
        compiled = make()(function)
    return compiled


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(fastmath=FAST_MATH, error_model="numpy", inline="always")(function)
    return compiled


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Declares a function as one that writes the compiler's own code. Its first argument is passed by numba alone."""
    return intrinsic(function)


def as_array(tensor: Tensor) -> Array:
    """Returns a view of a contiguous tensor in the computer's memory as an array."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


@_intrinsic
def _float_of_bits(_context: Any, _bits: Any) -> Any:
    """Takes the bits of an int32 as those of a float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@_intrinsic
def _bits_of_float(_context: Any, _value: Any) -> Any:
    """Takes the bits of a float32 as those of a uint32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


def _widened(value: Any) -> Any:
    """Returns a float32, or the bits of a bfloat16, as a float32."""


@overload(_widened, inline="always", strict=False)
def _widened_as(value: Any) -> Any:
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: _float_of_bits(np.int32(np.uint32(value) << np.uint32(16)))


def _put(array: Any, index: Any, value: Any) -> None:
    """Writes a float32 into an array of float32, or rounded into one of bfloat16's bits."""


@overload(_put, inline="always", strict=False)
def _put_into(array: Any, index: Any, value: Any) -> Any:
    if isinstance(array.dtype, types.Float):

        def put(array: Any, index: Any, value: Any) -> None:
            array[index] = value
    else:

        def put(array: Any, index: Any, value: Any) -> None:
            bits = _bits_of_float(value)
            # To the nearest, and of two as near to the even one. No value of a forward is so large that it overflows.
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            array[index] = np.uint16(bits >> np.uint32(16))

    return put


@_inlined
def _exp(x: Any) -> Any:
    """Computes the exponential of a float32, to 1e-7 of itself: a polynomial, as the Cephes library has it.

    A loop over it becomes one of vectors, which a call of the system's function does not.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    # The nearest whole number: what is cut off is no negative number's.
    power = np.int32(x * np.float32(1.44269504) + np.float32(127.5))
    n = np.float32(power) - np.float32(127.0)
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * _float_of_bits(np.int32(power << np.int32(23)))


# Attention's own two loops are written in the compiler's language: left to itself it would split the sums of one row
# otherwise than those of several, and their bits would differ.

cgutils: Any = untyped_cgutils

_FLOAT, _INDEX, _LANE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_NUM_LANES = 8
_VECTOR = ir.VectorType(_FLOAT, _NUM_LANES)


class _Matrix:
    """Reads and writes an array of float32 [rows, columns], or of int64 [rows], whose last axis is contiguous."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value=value)
        self._builder, self._data = builder, array.data
        shape, strides = (cgutils.unpack_tuple(builder, values) for values in (array.shape, array.strides))
        self.num_columns = shape[-1]
        size = _INDEX(kind.dtype.bitwidth // 8)
        self._stride = builder.sdiv(strides[0], size)

    def row(self, number: Any) -> Any:
        """Returns the offset at which a row begins."""
        return self._builder.mul(number, self._stride)

    def at(self, offset: Any) -> Any:
        """Reads one number."""
        return self._builder.load(self._builder.gep(self._data, [offset]))

    def lanes_at(self, offset: Any) -> Any:
        """Reads the numbers of a vector."""
        loaded = self._builder.load(self._pointer(offset, _VECTOR))
        loaded.align = 4
        return loaded

    def put(self, value: Any, offset: Any) -> None:
        """Writes one number, or those of a vector."""
        self._builder.store(value, self._pointer(offset, value.type)).align = 4

    def _pointer(self, offset: Any, kind: Any) -> Any:
        return self._builder.bitcast(self._builder.gep(self._data, [offset]), kind.as_pointer())


def _matrices(context: Any, builder: Any, signature: Any, arguments: Any) -> list[_Matrix]:
    """Returns the arguments that are arrays."""
    pairs = zip(signature.args, arguments, strict=True)
    return [_Matrix(context, builder, kind, value) for kind, value in pairs if isinstance(kind, types.Array)]


class _Sum:
    """Adds up products, in one number or in each lane of a vector. The compiler keeps it in a register."""

    def __init__(self, builder: Any, first: Any) -> None:
        self._builder, self._kind = builder, first.type
        self._place = cgutils.alloca_once(builder, first.type)
        builder.store(first, self._place)

    def add(self, x: Any, y: Any) -> None:
        """Adds x * y, rounded once."""
        name = "llvm.fma.f32" if self._kind is _FLOAT else f"llvm.fma.v{_NUM_LANES}f32"
        kind = ir.FunctionType(self._kind, [self._kind] * 3)
        fma = cgutils.get_or_insert_function(self._builder.module, kind, name)
        self._builder.store(self._builder.call(fma, [x, y, self.value]), self._place)

    @property
    def value(self) -> Any:
        """The sum so far."""
        return self._builder.load(self._place)


def _totals(builder: Any, vectors: Sequence[Any]) -> Any:
    """Adds up the lanes of up to 8 vectors, each by itself: lane i of the result is the sum of vector i."""
    left = list(vectors)
    evens, odds = (
        ir.Constant(ir.VectorType(_LANE, _NUM_LANES), list(range(first, 2 * _NUM_LANES, 2))) for first in (0, 1)
    )
    for _ in range(_NUM_LANES.bit_length() - 1):
        # Neighbours are added: of two vectors, or where there is one alone, of it and itself.
        left = [
            builder.fadd(builder.shuffle_vector(one, other, evens), builder.shuffle_vector(one, other, odds))
            for one, other in zip(left[::2], left[1::2] or left[:1], strict=True)
        ]
    return left[0]


@contextmanager
def _loop(builder: Any, first: Any, last: Any, step: Any) -> Iterator[Any]:
    with cgutils.for_range_slice(builder, first, last, step) as (index, _):
        yield index


def _whole(builder: Any, count: Any, size: int) -> Any:
    """Returns the largest multiple of a size that is not above a count."""
    return builder.mul(builder.sdiv(count, _INDEX(size)), _INDEX(size))


def _make_score(num_rows: int, num_keys: int) -> Any:
    """Makes the function that computes the scores of queries, `num_keys` keys at a time."""

    @_intrinsic
    def score(_context: Any, queries: Any, keys: Any, places: Any, first: Any, last: Any, scores: Any) -> Any:
        """Writes scores[:num_rows, i] = queries[:num_rows] @ keys[places[i]], for i from first to last."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            asked, kept, listed, found = _matrices(context, builder, signature, arguments)
            rows = [_INDEX(row) for row in range(num_rows)]
            width = kept.num_columns
            in_lanes = _whole(builder, width, _NUM_LANES)

            def block(index: Any, count: int) -> None:
                bases = [kept.row(listed.at(builder.add(index, _INDEX(key)))) for key in range(count)]
                pairs = [(row, key) for row in range(num_rows) for key in range(count)]
                sums = [_Sum(builder, ir.Constant(_VECTOR, None)) for _ in pairs]
                rest = [_Sum(builder, ir.Constant(_FLOAT, None)) for _ in pairs]
                for some, read, end, begin, step in (
                    (sums, _Matrix.lanes_at, in_lanes, _INDEX(0), _NUM_LANES),
                    (rest, _Matrix.at, width, in_lanes, 1),
                ):
                    with _loop(builder, begin, end, _INDEX(step)) as d:
                        theirs = [read(kept, builder.add(base, d)) for base in bases]
                        own = [read(asked, builder.add(asked.row(row), d)) for row in rows]
                        for each, (row, key) in zip(some, pairs, strict=True):
                            each.add(own[row], theirs[key])
                totals = _totals(builder, [each.value for each in sums])
                for number, (row, key) in enumerate(pairs):
                    total = builder.fadd(builder.extract_element(totals, _LANE(number)), rest[number].value)
                    found.put(total, builder.add(found.row(rows[row]), builder.add(index, _INDEX(key))))

            first, last = arguments[3], arguments[4]
            whole = builder.add(first, _whole(builder, builder.sub(last, first), num_keys))
            with _loop(builder, first, whole, _INDEX(num_keys)) as index:
                block(index, num_keys)
            with _loop(builder, whole, last, _INDEX(1)) as index:
                block(index, 1)
            return context.get_dummy_value()

        return types.void(queries, keys, places, first, last, scores), generate

    return score


def _make_weigh(num_rows: int, num_vectors: int) -> Any:
    """Makes the function that adds up values, `num_vectors` vectors of their columns at a time."""

    @_intrinsic
    def weigh(_context: Any, weights: Any, values: Any, places: Any, first: Any, last: Any, sums: Any) -> Any:
        """Adds weights[:num_rows, i] * values[places[i]] to sums[:num_rows], for i from first to last, in order."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given, kept, listed, found = _matrices(context, builder, signature, arguments)
            rows = [_INDEX(row) for row in range(num_rows)]
            width = kept.num_columns

            def spread(number: Any) -> Any:
                undefined = ir.Constant(_VECTOR, ir.Undefined)
                lanes = ir.Constant(ir.VectorType(_LANE, _NUM_LANES), [0] * _NUM_LANES)
                return builder.shuffle_vector(builder.insert_element(undefined, number, _LANE(0)), undefined, lanes)

            def columns(begin: Any, count: int, *, are_lanes: bool) -> None:
                read = _Matrix.lanes_at if are_lanes else _Matrix.at
                offsets = [builder.add(begin, _INDEX(column * _NUM_LANES)) for column in range(count)]
                own = [[builder.add(found.row(row), offset) for offset in offsets] for row in rows]
                totals = [[_Sum(builder, read(found, place)) for place in of_row] for of_row in own]
                with _loop(builder, arguments[3], arguments[4], _INDEX(1)) as index:
                    base = kept.row(listed.at(index))
                    theirs = [read(kept, builder.add(base, offset)) for offset in offsets]
                    for row, of_row in zip(rows, totals, strict=True):
                        weight = given.at(builder.add(given.row(row), index))
                        for total, value in zip(of_row, theirs, strict=True):
                            total.add(spread(weight) if are_lanes else weight, value)
                for places_of_row, of_row in zip(own, totals, strict=True):
                    for place, total in zip(places_of_row, of_row, strict=True):
                        found.put(total.value, place)

            in_vectors = _whole(builder, width, num_vectors * _NUM_LANES)
            in_lanes = _whole(builder, width, _NUM_LANES)
            with _loop(builder, _INDEX(0), in_vectors, _INDEX(num_vectors * _NUM_LANES)) as begin:
                columns(begin, num_vectors, are_lanes=True)
            with _loop(builder, in_vectors, in_lanes, _INDEX(_NUM_LANES)) as begin:
                columns(begin, 1, are_lanes=True)
            with _loop(builder, in_lanes, width, _INDEX(1)) as begin:
                columns(begin, 1, are_lanes=False)
            return context.get_dummy_value()

        return types.void(weights, values, places, first, last, sums), generate

    return weigh


_score_group, _score_row = _make_score(GROUP, 2), _make_score(1, 4)
_weigh_group, _weigh_row = _make_weigh(GROUP, 2), _make_weigh(1, 4)


@Kernel
def attend(
    queries: Array,
    data: Array,
    slots: Array,
    starts: Array,
    counts: Array,
    groups: Array,
    shared: Array,
    scores: Array,
    out: Array,
) -> None:  # pragma: no cover
    """Computes the attention of rows over what each of them sees.

    In the shapes, K stands for key-value heads and G for queries per key.

    Args:
        queries: float32 [rows, K, G, head_dim], scaled.
        data: float32 [2, K, slots, head_dim]: a layer's keys and values in the pool.
        slots: int64: places in the pool, for each row those that it sees, by position.
        starts: int64 [rows]: where the places of each row begin in `slots`.
        counts: int64 [rows that are somebody's]: how many there are; at least 1.
        groups: int64 [groups + 1]: the first row of each group, and behind them the number of rows.
        shared: int64 [groups]: how many of their first places all rows of a group of `GROUP` share.
        scores: float32 [threads, GROUP, most places of a row + head_dim]: room to work in.
        out: [rows, K, G, head_dim]; rows that are nobody's are left as they are.
    """
    _, num_heads, num_queries, head_dim = queries.shape
    num_tasks = (len(groups) - 1) * num_heads * num_queries
    num_workers = scores.shape[0]
    for worker in numba.prange(num_workers):
        own = scores[worker]
        sums = own[:, own.shape[1] - head_dim :]
        # The last rows of a prompt see the most: workers take turns.
        for task in range(worker, num_tasks, num_workers):
            group, head, query = task // (num_heads * num_queries), task // num_queries % num_heads, task % num_queries
            first, last = groups[group], groups[group + 1]
            keys, values = data[0, head], data[1, head]
            asked = queries[first:last, head, query]
            num_rows = last - first
            num_shared = shared[group] if num_rows == GROUP else 0
            if num_shared:
                _score_group(asked, keys, slots[starts[first] :], 0, num_shared, own)
            for row in range(num_rows):
                count = counts[first + row]
                places = slots[starts[first + row] : starts[first + row] + count]
                score = own[row]
                _score_row(asked[row:], keys, places, num_shared, count, own[row:])
                most = score[0]
                for i in range(count):
                    most = max(most, score[i])
                for i in range(count):
                    score[i] = _exp(score[i] - most)
                for d in range(head_dim):
                    sums[row, d] = np.float32(0.0)
            if num_shared:
                _weigh_group(own, values, slots[starts[first] :], 0, num_shared, sums)
            for row in range(num_rows):
                count = counts[first + row]
                places = slots[starts[first + row] : starts[first + row] + count]
                score = own[row]
                _weigh_row(own[row:], values, places, num_shared, count, sums[row:])
                total = np.float32(0.0)
                for i in range(count):
                    total += score[i]
                inverse = np.float32(1.0) / total
                found = out[first + row, head, query]
                for d in range(head_dim):
                    _put(found, d, sums[row, d] * inverse)


@Kernel
def store_heads(
    heads: Array,
    turns: Array,
    position_ids: Array,
    places: Array,
    norms: Array,
    epsilon: float,
    scale: float,
    queries: Array,
    data: Array,
) -> None:  # pragma: no cover
    """Norms and turns queries and keys, and puts keys and values into the pool.

    In the shapes, K stands for key-value heads and G for queries per key.

    Args:
        heads: [rows, (G + 2) * K, head_dim]: queries, keys, values; of queries and keys dimensions 2i and 2i + 1 are
            turned together.
        turns: float32 [positions, head_dim / 2, 2]: cosines and sines.
        position_ids: int64 [rows].
        places: int64 [rows that are somebody's]: where their keys and values go.
        norms: float32 [(G + 1) * K, head_dim]: weights of the norms of queries and keys; empty if there are none.
        epsilon: That of the norms.
        scale: Factor of the queries.
        queries: float32 [rows, K, G, head_dim], written.
        data: float32 [2, K, slots, head_dim], written: a layer's keys and values in the pool.
    """
    num_rows, num_all, head_dim = heads.shape
    num_keys, per_key = queries.shape[1], queries.shape[2]
    num_queries = num_keys * per_key
    for row in numba.prange(num_rows):
        turn = turns[position_ids[row]]
        for head in range(num_all):
            number = (head - num_queries) % num_keys
            if head >= num_queries and row >= len(places):
                break  # a row that is nobody's is not kept
            given = heads[row, head]
            if head >= num_queries + num_keys:
                value = data[1, number, places[row]]
                for d in range(head_dim):
                    value[d] = _widened(given[d])
                continue
            is_query = head < num_queries
            kept = queries[row, head // per_key, head % per_key] if is_query else data[0, number, places[row]]
            factor = np.float32(scale) if is_query else np.float32(1.0)
            if len(norms):
                squares = np.float32(0.0)
                for d in range(head_dim):
                    squares += _widened(given[d]) * _widened(given[d])
                factor /= np.sqrt(squares / np.float32(head_dim) + np.float32(epsilon))
                norm = norms[head]
                for d in range(head_dim):
                    kept[d] = _widened(given[d]) * (factor * norm[d])
            else:
                for d in range(head_dim):
                    kept[d] = _widened(given[d]) * factor
            for pair in range(head_dim // 2):
                x, y = kept[2 * pair], kept[2 * pair + 1]
                cosine, sine = turn[pair, 0], turn[pair, 1]
                kept[2 * pair] = x * cosine - y * sine
                kept[2 * pair + 1] = x * sine + y * cosine


@Kernel
def add_and_norm(hidden: Array, summand: Array, weight: Array, epsilon: float, out: Array) -> None:  # pragma: no cover
    """Adds to the residual stream, and computes its RMS norm.

    Args:
        hidden: float32 [rows, size], written.
        summand: [rows, size], or [0, size] if nothing is added.
        weight: float32 [size].
        epsilon: That of the norm.
        out: [rows, size], written.
    """
    num_rows, size = hidden.shape
    for row in numba.prange(num_rows):
        stream, normed = hidden[row], out[row]
        if len(summand):
            added = summand[row]
            for i in range(size):
                stream[i] += _widened(added[i])
        squares = np.float32(0.0)
        for i in range(size):
            squares += stream[i] * stream[i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(size) + np.float32(epsilon))
        for i in range(size):
            _put(normed, i, stream[i] * factor * weight[i])


@Kernel
def gate_silu(gate_up: Array, out: Array) -> None:  # pragma: no cover
    """Computes silu(gate) * up.

    Args:
        gate_up: [rows, 2 * size]: gates, and behind them what is gated.
        out: [rows, size], written.
    """
    num_rows, size = out.shape
    for row in numba.prange(num_rows):
        gate, up, found = gate_up[row, :size], gate_up[row, size:], out[row]
        for i in range(size):
            x = _widened(gate[i])
            _put(found, i, x / (np.float32(1.0) + _exp(-x)) * _widened(up[i]))


@Kernel
def multiply(x: Array, weight: Array, bias: Array, out: Array) -> None:  # pragma: no cover
    """Computes `x @ weight + bias` for small matrices. Every sum adds one by one.

    Args:
        x: [rows, in].
        weight: float32 [in, out].
        bias: float32 [out].
        out: [rows, out], written.
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[1]
    in_fours = num_inputs - num_inputs % 4
    for block in numba.prange((num_outputs + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        size = min(BLOCK, num_outputs - first)
        sums = np.empty((num_rows, size), np.float32)
        for row in range(num_rows):
            for o in range(size):
                sums[row, o] = bias[first + o]
        # Four inputs at a time: a sum is read and written once for all of them.
        for i in range(0, in_fours, 4):
            w0, w1 = weight[i, first : first + size], weight[i + 1, first : first + size]
            w2, w3 = weight[i + 2, first : first + size], weight[i + 3, first : first + size]
            for row in range(num_rows):
                own = sums[row]
                x0, x1 = _widened(x[row, i]), _widened(x[row, i + 1])
                x2, x3 = _widened(x[row, i + 2]), _widened(x[row, i + 3])
                for o in range(size):
                    own[o] = (((own[o] + x0 * w0[o]) + x1 * w1[o]) + x2 * w2[o]) + x3 * w3[o]
        for i in range(in_fours, num_inputs):
            for row in range(num_rows):
                for o in range(size):
                    sums[row, o] += _widened(x[row, i]) * weight[i, first + o]
        for row in range(num_rows):
            for o in range(size):
                _put(out[row], first + o, sums[row, o])
