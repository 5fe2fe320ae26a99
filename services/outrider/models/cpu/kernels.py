"""Kernels for a CPU: attention and the steps between a layer's products, each as one call.

Between two products of a layer torch runs up to twenty operators; at a few rows each of them costs more than its
arithmetic. Here one compiled loop over rows does the work of all of them.

A kernel computes each row by itself, by the same instructions in the same order. So its bits depend neither on how many
rows there are, nor on where their keys and values lie: sums over a text go by position.

Tensors are passed as arrays. bfloat16 is passed as uint16, its bits: numpy has no such type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload
from torch import Tensor

from outrider.models.cpu.vectors import (
    FLOAT,
    INDEX,
    LANE,
    NUM_LANES,
    VECTOR,
    Matrix,
    Sum,
    intrinsic,
    loop,
    matrices,
    multiple_of,
    totals_of,
)

Array = npt.NDArray[Any]

COMPILER = f"numba {numba.__version__}"
"""Name and version of the compiler of the kernels; their bits depend on it."""
TYPES = (torch.float32, torch.bfloat16)
"""Types of activations that the kernels read and write."""
MAX_NUM_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
"""Threads that numba has: one for each core."""
GROUP = 4
"""Rows whose attention is computed together, as far as they see the same places: each key is read once for all of
them."""
BLOCK = 256
"""Columns of a product that are computed together: their sums stay in a core's first cache."""

# Sums may be split over the lanes of a vector. The compiler splits them once, and so alike for all rows.
FAST_MATH = {"contract", "reassoc", "nsz"}

_LOCK = threading.Lock()
"""Held by a call that uses several threads, or numba's own pool, which takes one call at a time."""


def _start_threads() -> None:
    """Lets numba start its threads. It mostly shares torch's, and then sets their number to that of the cores."""
    num_threads = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(num_threads)


_start_threads()
_MAY_OVERLAP = numba.threading_layer() != "workqueue"  # type: ignore[attr-defined]
"""True if calls that use one thread may run at the same time."""


class Kernel:
    """Runs a compiled function on as many threads as torch uses.

    It is compiled at the first call, or read from numba's cache: once, for any number of threads. That number divides
    the iterations of a loop and changes nothing in them, so bits do not depend on it. (numba's cache could not tell
    apart a version for one thread and one for several.)
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.compiled = _compile(function)
        """The compiled function, for other kernels to call. Its loops over threads stay parallel; in an inlined
        function they would not."""

    def __call__(self, *arguments: object) -> None:
        """Calls the function, which writes its results into given arrays."""
        num_threads = min(torch.get_num_threads(), MAX_NUM_THREADS)
        if num_threads == 1 and _MAY_OVERLAP:
            numba.set_num_threads(1)
            self.compiled(*arguments)
            return
        with _LOCK:
            numba.set_num_threads(num_threads)
            self.compiled(*arguments)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # numba warns about a function that has no parallel loop of its own because it only calls others.
    has_loop = "prange" in function.__code__.co_names
    # Divides as the CPU does: a check for zero would keep a loop from being vectorised.
    make = partial(numba.njit, fastmath=FAST_MATH, nogil=True, error_model="numpy", parallel=has_loop)
    compiled: Callable[..., Any]
    try:
        compiled = make(cache=True)(function)
    except RuntimeError:  # there is no place for the cache: each process compiles anew
        compiled = make()(function)
    return compiled


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declares a function as a part of kernels."""
    compiled: Callable[..., Any] = numba.njit(fastmath=FAST_MATH, error_model="numpy", inline="always")(function)
    return compiled


def as_array(tensor: Tensor) -> Array:
    """Returns a view of a contiguous tensor in host memory as an array."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


@intrinsic
def _float_of_bits(_context: Any, _bits: Any) -> Any:
    """Reinterprets the bits of an int32 as a float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@intrinsic
def _bits_of_float(_context: Any, _value: Any) -> Any:
    """Reinterprets the bits of a float32 as a uint32."""

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
    """Writes a float32 into an array of float32, or, rounded, into one of bfloat16's bits."""


@overload(_put, inline="always", strict=False)
def _put_into(array: Any, index: Any, value: Any) -> Any:
    if isinstance(array.dtype, types.Float):

        def put(array: Any, index: Any, value: Any) -> None:
            array[index] = value
    else:

        def put(array: Any, index: Any, value: Any) -> None:
            bits = _bits_of_float(value)
            # Rounds to the nearest, ties to even. No value of a forward is so large that it overflows.
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            array[index] = np.uint16(bits >> np.uint32(16))

    return put


@inlined
def _exp(x: Any) -> Any:
    """Computes the exponential of a float32, to 1e-7 of itself: a polynomial, as the Cephes library has it.

    A loop over it is vectorised; one that calls the system's function is not.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    # The nearest whole number: truncation rounds down, because the number is not negative.
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


# Attention's own two loops are written in the compiler's language: left to itself the compiler would split the sums of
# one row differently from those of several, and their bits would differ.


def _make_score(num_rows: int, num_keys: int) -> Any:
    """Makes the function that computes the scores of queries, `num_keys` keys at a time."""

    @intrinsic
    def score(_context: Any, queries: Any, keys: Any, places: Any, first: Any, last: Any, scores: Any) -> Any:
        """Writes scores[:num_rows, i] = queries[:num_rows] @ keys[places[i]], for i from first to last."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            asked, kept, listed, found = matrices(context, builder, signature, arguments)
            rows = [INDEX(row) for row in range(num_rows)]
            width = kept.num_columns
            in_lanes = multiple_of(builder, width, NUM_LANES)

            def block(index: Any, count: int) -> None:
                bases = [kept.row(listed.at(builder.add(index, INDEX(key)))) for key in range(count)]
                pairs = [(row, key) for row in range(num_rows) for key in range(count)]
                sums = [Sum(builder, ir.Constant(VECTOR, None)) for _ in pairs]
                rest = [Sum(builder, ir.Constant(FLOAT, None)) for _ in pairs]
                for some, read, end, begin, step in (
                    (sums, Matrix.lanes_at, in_lanes, INDEX(0), NUM_LANES),
                    (rest, Matrix.at, width, in_lanes, 1),
                ):
                    with loop(builder, begin, end, INDEX(step)) as d:
                        theirs = [read(kept, builder.add(base, d)) for base in bases]
                        own = [read(asked, builder.add(asked.row(row), d)) for row in rows]
                        for each, (row, key) in zip(some, pairs, strict=True):
                            each.add(own[row], theirs[key])
                totals = totals_of(builder, [each.value for each in sums])
                for number, (row, key) in enumerate(pairs):
                    total = builder.fadd(builder.extract_element(totals, LANE(number)), rest[number].value)
                    found.put(total, builder.add(found.row(rows[row]), builder.add(index, INDEX(key))))

            first, last = arguments[3], arguments[4]
            whole = builder.add(first, multiple_of(builder, builder.sub(last, first), num_keys))
            with loop(builder, first, whole, INDEX(num_keys)) as index:
                block(index, num_keys)
            with loop(builder, whole, last, INDEX(1)) as index:
                block(index, 1)
            return context.get_dummy_value()

        return types.void(queries, keys, places, first, last, scores), generate

    return score


def _make_weigh(num_rows: int, num_vectors: int) -> Any:
    """Makes the function that adds up values, `num_vectors` vectors of their columns at a time."""

    @intrinsic
    def weigh(_context: Any, weights: Any, values: Any, places: Any, first: Any, last: Any, sums: Any) -> Any:
        """Adds weights[:num_rows, i] * values[places[i]] to sums[:num_rows], for i from first to last, in order."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given, kept, listed, found = matrices(context, builder, signature, arguments)
            rows = [INDEX(row) for row in range(num_rows)]
            width = kept.num_columns

            def spread(number: Any) -> Any:
                undefined = ir.Constant(VECTOR, ir.Undefined)
                lanes = ir.Constant(ir.VectorType(LANE, NUM_LANES), [0] * NUM_LANES)
                return builder.shuffle_vector(builder.insert_element(undefined, number, LANE(0)), undefined, lanes)

            def columns(begin: Any, count: int, *, are_lanes: bool) -> None:
                read = Matrix.lanes_at if are_lanes else Matrix.at
                offsets = [builder.add(begin, INDEX(column * NUM_LANES)) for column in range(count)]
                own = [[builder.add(found.row(row), offset) for offset in offsets] for row in rows]
                totals = [[Sum(builder, read(found, place)) for place in of_row] for of_row in own]
                with loop(builder, arguments[3], arguments[4], INDEX(1)) as index:
                    base = kept.row(listed.at(index))
                    theirs = [read(kept, builder.add(base, offset)) for offset in offsets]
                    for row, of_row in zip(rows, totals, strict=True):
                        weight = given.at(builder.add(given.row(row), index))
                        for total, value in zip(of_row, theirs, strict=True):
                            total.add(spread(weight) if are_lanes else weight, value)
                for places_of_row, of_row in zip(own, totals, strict=True):
                    for place, total in zip(places_of_row, of_row, strict=True):
                        found.put(total.value, place)

            in_vectors = multiple_of(builder, width, num_vectors * NUM_LANES)
            in_lanes = multiple_of(builder, width, NUM_LANES)
            with loop(builder, INDEX(0), in_vectors, INDEX(num_vectors * NUM_LANES)) as begin:
                columns(begin, num_vectors, are_lanes=True)
            with loop(builder, in_vectors, in_lanes, INDEX(NUM_LANES)) as begin:
                columns(begin, 1, are_lanes=True)
            with loop(builder, in_lanes, width, INDEX(1)) as begin:
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
        slots: int64: for each row the places in the pool that it sees, by position.
        starts: int64 [rows]: where the places of each row begin in `slots`.
        counts: int64 [rows without padding]: number of places of each row; at least 1.
        groups: int64 [groups + 1]: the first row of each group, and then the number of rows.
        shared: int64 [groups]: how many first places all rows of a group of `GROUP` share.
        scores: float32 [threads, GROUP, most places of a row + head_dim]: room to work in.
        out: [rows, K, G, head_dim]; padding rows are left as they are.
    """
    _, num_heads, num_queries, head_dim = queries.shape
    num_tasks = (len(groups) - 1) * num_heads * num_queries
    num_workers = scores.shape[0]
    for worker in numba.prange(num_workers):
        own = scores[worker]
        sums = own[:, own.shape[1] - head_dim :]
        # The last rows of a prompt see the most, so groups are dealt to workers in turn.
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
        heads: [rows, (G + 2) * K, head_dim]: queries, keys, values; dimensions 2i and 2i + 1 of queries and keys are
            turned together.
        turns: float32 [positions, head_dim / 2, 2]: cosines and sines.
        position_ids: int64 [rows].
        places: int64 [rows without padding]: where their keys and values go.
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
                break  # a padding row is not stored
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
        gate_up: [rows, 2 * size]: gates, and then the values that are gated.
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
