"""Kernels for a CPU: attention and the steps between a layer's products, each as one call.

Between two products of a layer torch runs up to twenty operators; at a few rows each of them costs more than its
arithmetic. Here one compiled loop over rows does what they do together.

A kernel computes each row by itself, by the same instructions in the same order. So its bits depend neither on how many
rows there are, nor on where their keys and values lie: sums over a text go by position.

Tensors are passed as arrays. What is bfloat16 comes as uint16, its bits: numpy has no such type.
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
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

Array = npt.NDArray[Any]

COMPILER = f"numba {numba.__version__}"
"""What compiles the kernels, on which their bits depend."""
TYPES = (torch.float32, torch.bfloat16)
"""Types of activations that the kernels read and write."""
MAX_NUM_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
"""Threads that numba has: one for each core."""
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


@Kernel
def attend(
    queries: Array, data: Array, slots: Array, starts: Array, counts: Array, scores: Array, out: Array
) -> None:  # pragma: no cover
    """Computes the attention of rows over what each of them sees.

    In the shapes, K stands for key-value heads and G for queries per key.

    Args:
        queries: float32 [rows, K, G, head_dim], scaled.
        data: float32 [2, K, slots, head_dim]: a layer's keys and values in the pool.
        slots: int64: places in the pool, for each row those that it sees, by position.
        starts: int64 [rows]: where the places of each row begin in `slots`.
        counts: int64 [rows that are somebody's]: how many there are; at least 1.
        scores: float32 [threads, most places of a row + head_dim]: room to work in.
        out: [rows, K, G, head_dim]; rows that are nobody's are left as they are.
    """
    num_rows = len(counts)
    _, num_heads, num_queries, head_dim = queries.shape
    num_workers = scores.shape[0]
    for worker in numba.prange(num_workers):
        own = scores[worker]
        sums = own[len(own) - head_dim :]
        # The last rows of a prompt see the most: workers take turns.
        for task in range(worker, num_rows * num_heads, num_workers):
            row, head = task // num_heads, task % num_heads
            places = slots[starts[row] : starts[row] + counts[row]]
            count = len(places)
            keys, values = data[0, head], data[1, head]
            for query in range(num_queries):
                asked = queries[row, head, query]
                for i in range(count):
                    key = keys[places[i]]
                    score = np.float32(0.0)
                    for d in range(head_dim):
                        score += asked[d] * key[d]
                    own[i] = score
                most = own[0]
                for i in range(count):
                    most = max(most, own[i])
                for i in range(count):
                    own[i] = _exp(own[i] - most)
                total = np.float32(0.0)
                for i in range(count):
                    total += own[i]
                for d in range(head_dim):
                    sums[d] = np.float32(0.0)
                # Four at a time: a sum is read and written once for all of them.
                in_fours = count - count % 4
                for i in range(0, in_fours, 4):
                    v0, v1 = values[places[i]], values[places[i + 1]]
                    v2, v3 = values[places[i + 2]], values[places[i + 3]]
                    w0, w1, w2, w3 = own[i], own[i + 1], own[i + 2], own[i + 3]
                    for d in range(head_dim):
                        sums[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
                for i in range(in_fours, count):
                    value, weight = values[places[i]], own[i]
                    for d in range(head_dim):
                        sums[d] += weight * value[d]
                inverse = np.float32(1.0) / total
                found = out[row, head, query]
                for d in range(head_dim):
                    _put(found, d, sums[d] * inverse)


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
