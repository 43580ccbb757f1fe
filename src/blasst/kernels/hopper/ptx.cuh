// Thin layer over the Hopper instructions that the kernels use: wgmma, TMA, mbarrier, named barriers, setmaxnreg.
// Source of every form: the PTX ISA manual. No CUDA header is needed, so that NVRTC alone can compile it.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// DTYPE: of q and out. OPERAND: of what is multiplied; fp8 is exact as f16.
#if BF16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif
#if FP8
#define OPERAND "f16"
#else
#define OPERAND DTYPE
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier -------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}

// Wait until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary stores to shared memory before this are seen by wgmma and TMA after it.
__device__ __forceinline__ void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- named barriers -------------------------------------------------------------------------------------

__device__ __forceinline__ void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Whether all threads that meet at the barrier agree.
__device__ __forceinline__ bool named_all(int barrier, int threads, bool agree) {
    int all;
    asm volatile(
        "{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.and.pred q, %2, %3, p; selp.s32 %0, 1, 0, q;}"
        : "=r"(all)
        : "r"(static_cast<int>(agree)), "r"(barrier), "r"(threads)
        : "memory");
    return all != 0;
}

template <int kRegisters>
__device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- TMA ------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One box of a 4-D tensor into shared memory; its bytes count on the barrier.
__device__ __forceinline__ void tma_load(
    u32 target, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same with a policy for the L2 cache.
__device__ __forceinline__ void tma_load(
    u32 target, const TensorMap* map, u64 policy, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
        : "memory");
}

// Policies, as createpolicy encodes them: evict first, and evict normally.
constexpr u64 kPassThrough = 0x12F0000000000000, kKeepInCache = 0x16F0000000000000;

// --- wgmma ----------------------------------------------------------------------------------------------

// Descriptor of a shared-memory operand in rows of 128 bytes with 128-byte swizzle.
// leading: bytes between 64-element chunks along the contiguous dimension (MN-major only); groups of 8 rows
// lie 1024 bytes apart.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// The compiler must not move uses of these registers across this point.
template <int kSize>
__device__ __forceinline__ void pin(float (&registers)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kSize>
__device__ __forceinline__ void pin(u32 (&registers)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// d (64 x kColumns, fp32) = or += a (64 x 16) . b (16 x kColumns, shared). Operands in shared memory are K-major, or
// MN-major where kTransposeA or kTransposeB is 1; a may also lie in registers.
template <int kColumns>
struct Wgmma;

#define WGMMA_LIST_4 "%0, %1, %2, %3"
#define WGMMA_LIST_8 WGMMA_LIST_4 ", %4, %5, %6, %7"
#define WGMMA_LIST_16 WGMMA_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_LIST_32 WGMMA_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_LIST_48 WGMMA_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_LIST_64 WGMMA_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_REGISTERS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define WGMMA_REGISTERS_8(i) WGMMA_REGISTERS_4(i), WGMMA_REGISTERS_4((i) + 4)
#define WGMMA_REGISTERS_16(i) WGMMA_REGISTERS_8(i), WGMMA_REGISTERS_8((i) + 8)
#define WGMMA_REGISTERS_32(i) WGMMA_REGISTERS_16(i), WGMMA_REGISTERS_16((i) + 16)
#define WGMMA_REGISTERS_48(i) WGMMA_REGISTERS_32(i), WGMMA_REGISTERS_16((i) + 32)
#define WGMMA_REGISTERS_64(i) WGMMA_REGISTERS_32(i), WGMMA_REGISTERS_32((i) + 32)

// COLUMNS: of d. COUNT: registers of d. I0 to I6: COUNT, COUNT + 1, ... as numerals.
#define WGMMA(COLUMNS, COUNT, I0, I1, I2, I3, I4, I5, I6)                                                      \
    template <>                                                                                                \
    struct Wgmma<COLUMNS> {                                                                                    \
        template <int kTransposeA, int kTransposeB>                                                            \
        static __device__ __forceinline__ void ss(float (&d)[COUNT], u64 a, u64 b, int accumulate) {           \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." OPERAND "." OPERAND           \
                         " {" WGMMA_LIST_##COUNT "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";}"        \
                         : WGMMA_REGISTERS_##COUNT(0)                                                          \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));               \
        }                                                                                                      \
        template <int kTransposeB>                                                                             \
        static __device__ __forceinline__ void rs(                                                             \
            float (&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {                        \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." OPERAND "." OPERAND           \
                         " {" WGMMA_LIST_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4          \
                         ", p, 1, 1, %" #I6 ";}"                                                               \
                         : WGMMA_REGISTERS_##COUNT(0)                                                          \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kTransposeB));     \
        }                                                                                                      \
    };

WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)

// --- arithmetic -----------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Maximum that keeps NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Two numbers rounded to the dtype of operands, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn." OPERAND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// The same in the dtype of out.
__device__ __forceinline__ u32 pack_out(float low, float high) {
    u32 both;
    asm("cvt.rn." DTYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Two numbers of q.
__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
#if BF16
    low = __uint_as_float(both << 16);
    high = __uint_as_float(both & 0xFFFF0000u);
#else
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(both));
#endif
}

// The lower two bytes (e4m3) as f16, the first in the low half.
__device__ __forceinline__ u32 widen(u32 bytes) {
    u32 both;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(both) : "r"(bytes));
    return both;
}

// --- shared memory ---------------------------------------------------------------------------------------

// Two 8 x 8 matrices of 16-bit numbers, transposed; lane i < 16 names the place of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed(u32 place, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(place), "r"(first), "r"(second)
                 : "memory");
}

// Four 8 x 8 matrices of 16-bit units, transposed; lane i names the place of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_transposed(u32 place, u32 (&units)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(place)
                 : "memory");
}

__device__ __forceinline__ void load_words(u32 place, u32 (&x)[2]) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(place) : "memory");
}

__device__ __forceinline__ void load_words(u32 place, u32 (&x)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(place)
                 : "memory");
}

__device__ __forceinline__ void store_16_bytes(u32 place, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// --- global memory ---------------------------------------------------------------------------------------

// 8 bytes at once, in no order with anything else.
__device__ __forceinline__ void store_relaxed(u64* place, u64 x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(x) : "memory");
}

__device__ __forceinline__ u64 load_relaxed(const u64* place) {
    u64 x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(place) : "memory");
    return x;
}

// Add; what this CTA wrote before is seen by whoever reads the sum, what others wrote by this CTA.
__device__ __forceinline__ int add_acquire_release(int* place, int x) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(place), "r"(x) : "memory");
    return before;
}
