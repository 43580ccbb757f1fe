"""The emulator of tests/emulator on a kernel written here: how one runs it, and what it computes."""

import ctypes

import pytest
import torch
from hopper_emulator import EmulatorError, build, map_of

from blasst.kernels.hopper.compile import sources

#: One warpgroup: out (64 x 16) = a (64 x 128) . b (16 x 128)^T in int8, both fetched through TMA.
INT8_PRODUCT = r"""
#include "ptx.cuh"

struct Params {
    TensorMap a, b;
    int* out;
    int* sums;
};

__device__ __forceinline__ void multiply(int (&d)[8], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0;"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8"
                 " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p;}"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]),
                   "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7])
                 : "l"(a), "l"(b), "r"(accumulate));
}

extern "C" __global__ void product(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 a = shared_address(memory), b = a + 64 * 128, barrier = b + 16 * 128;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_expect(barrier, (64 + 16) * 128);
        tma_load(a, &p.a, barrier, 0, 0, 0, blockIdx.x);
        tma_load(b, &p.b, barrier, 0, 0, 0, blockIdx.x);
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    int d[8];
    wgmma_fence();
    for (int i = 0; i < 4; ++i) {
        multiply(d, matrix_descriptor(a + 32 * i, 0), matrix_descriptor(b + 32 * i, 0), i > 0);
    }
    wgmma_commit();
    WAIT
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    int sum = 0;
    for (int i = 0; i < 8; ++i) {
        p.out[(blockIdx.x * 64 + row + i / 2 % 2 * 8) * 16 + column + i / 4 * 8 + i % 2] = d[i];
        sum += d[i];
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
    if (threadIdx.x % 32 == 0) atomicAdd(p.sums + blockIdx.x, sum);
}
"""


class Params(ctypes.Structure):
    """Of the product."""

    _fields_ = (
        ("a", ctypes.c_uint64 * 16),
        ("b", ctypes.c_uint64 * 16),
        ("out", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("padding", ctypes.c_uint8 * 64),
    )


def product(seed=0, text=INT8_PRODUCT, wait="wgmma_wait<0>();", rows=64):
    """(out, sums, what they must be) for three CTAs."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randint(-128, 128, (3, n, 1, 128), dtype=torch.int8, generator=generator) for n in (rows, 16)
    )
    out, sums = torch.full((3, 64, 16), -1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    files = {**sources(), "product.cu": text.replace("WAIT", wait)}
    kernel = build(files, "product.cu", "product", {"BF16": 0, "FP8": 0})
    params = Params(map_of(a, 64), map_of(b, 16), out.data_ptr(), sums.data_ptr())
    kernel.launch(params, grid=(3, 1, 1), threads=128, shared=16384, seed=seed, resident=2)
    want = a[:, :, 0].int() @ b[:, :, 0].int().transpose(1, 2)
    return out, sums, torch.nn.functional.pad(want, (0, 0, 0, 64 - rows))


@pytest.mark.parametrize("rows", [64, 50])  # rows beyond the tensor read as 0
@pytest.mark.parametrize("seed", range(4))
def test_a_product_in_int8_is_exact(seed, rows):
    out, sums, want = product(seed, rows=rows)
    assert torch.equal(out, want)
    assert torch.equal(sums, want.sum((1, 2)).int())


def test_products_under_way_at_the_end_are_refused():
    with pytest.raises(EmulatorError, match=r"ended with wgmma of warp \d under way"):
        product(wait="")


def test_operands_out_of_shared_memory_are_refused():
    text = INT8_PRODUCT.replace("matrix_descriptor(b + 32 * i, 0)", "matrix_descriptor(b + 16384, 0)")
    with pytest.raises(
        EmulatorError, match=r"wgmma reads shared\+.*outside of the 16384 bytes.* product\.cu:"
    ):
        product(text=text)
