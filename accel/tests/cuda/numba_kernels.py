# SPDX-License-Identifier: Apache-2.0 OR MIT
"""numba-cuda: kernels written in Python, with shared memory, atomics, shuffles, mathematics and a device function."""

import math

import numpy
from numba import cuda, float32, int32


@cuda.jit(device=True)
def wave(value):
    return math.sin(value) + math.exp(-value)


@cuda.jit
def waves(values, out):
    i = cuda.grid(1)
    if i < values.size:
        out[i] = wave(values[i])


@cuda.jit
def multiply(a, b, c):
    left = cuda.shared.array((16, 16), float32)
    right = cuda.shared.array((16, 16), float32)
    x, y = cuda.grid(2)
    total = float32(0)
    for tile in range(a.shape[1] // 16):
        left[cuda.threadIdx.x, cuda.threadIdx.y] = a[x, tile * 16 + cuda.threadIdx.y]
        right[cuda.threadIdx.x, cuda.threadIdx.y] = b[tile * 16 + cuda.threadIdx.x, y]
        cuda.syncthreads()
        for k in range(16):
            total += left[cuda.threadIdx.x, k] * right[k, cuda.threadIdx.y]
        cuda.syncthreads()
    c[x, y] = total


@cuda.jit
def count(values, counts):
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(counts, values[i] % counts.size, 1)


@cuda.jit
def warp_sums(values, out):
    lane = cuda.threadIdx.x
    total = int32(values[lane])
    offset = 16
    while offset > 0:
        total += cuda.shfl_down_sync(0xFFFFFFFF, total, offset)
        offset //= 2
    if lane % 32 == 0:
        out[lane // 32] = total


def main():
    values = numpy.linspace(0, 3, 1000)
    out = numpy.zeros_like(values)
    waves[8, 128](values, out)
    numpy.testing.assert_allclose(out, numpy.sin(values) + numpy.exp(-values), rtol=1e-14)

    a = numpy.arange(48 * 32, dtype=numpy.float32).reshape(48, 32) % 13
    b = numpy.arange(32 * 16, dtype=numpy.float32).reshape(32, 16) % 7
    c = numpy.zeros((48, 16), numpy.float32)
    multiply[(3, 1), (16, 16)](a, b, c)
    numpy.testing.assert_array_equal(c, a @ b)

    numbers = numpy.arange(5000, dtype=numpy.int32) ** 2 % 1009
    counts = numpy.zeros(16, numpy.int32)
    count[20, 256](numbers, counts)
    numpy.testing.assert_array_equal(counts, numpy.bincount(numbers % 16, minlength=16))

    sums = numpy.zeros(2, numpy.int32)
    warp_sums[1, 64](numbers[:64], sums)
    numpy.testing.assert_array_equal(sums, numbers[:64].reshape(2, 32).sum(1))
    print("ok")


if __name__ == "__main__":
    main()
