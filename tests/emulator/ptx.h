// The PTX instructions that kernels use, one function for each form: translate.py turns `asm` into calls.
// Operands come in the order of the asm statement, results by reference.
#pragma once

#include "device.h"

namespace emulated {

// --- mbarrier, named barriers -----------------------------------------------------------------------------

void mbarrier_init(u32 barrier, u32 arrivals);
void mbarrier_arrive(u32 barrier);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes);
void mbarrier_try_wait(u32& passed, u32 barrier, u32 parity);
inline void nothing() {}
void async_proxy_fence();

inline void bar_sync(int barrier, int threads) { named_barrier(barrier, threads, true); }
inline void bar_arrive(int barrier, int threads) { named_barrier(barrier, threads, false); }
inline void bar_red_and(int& all, int agree, int barrier, int threads) {
    all = named_barrier_all(barrier, threads, agree != 0);
}
void set_registers(int count, bool more);
inline void setmaxnreg_dec(int count) { set_registers(count, false); }
inline void setmaxnreg_inc(int count) { set_registers(count, true); }

// --- copies -----------------------------------------------------------------------------------------------

void tensor_load(u32 target, const void* map, u32 barrier, int x, int y, int z, int w);
inline void tensor_load_hinted(u32 target, const void* map, u32 barrier, int x, int y, int z, int w, u64) {
    tensor_load(target, map, barrier, x, y, z, w);
}
void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier);
inline void prefetch(const void*) {}

// --- wgmma ------------------------------------------------------------------------------------------------

enum class Element { f16, bf16, e4m3, s8, u8 };
// d (64 x columns): its registers in this thread. a: four registers, or null where it lies in shared memory.
void wgmma(int columns, Element element, void* const* d, const u32* a, u64 a_descriptor, u64 b_descriptor,
           bool accumulate, int transpose_a, int transpose_b);
inline void wgmma_fence() {}
void wgmma_commit();
void wgmma_wait(int in_flight);

// --- arithmetic -------------------------------------------------------------------------------------------

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
inline void ex2_approx_ftz(float& y, float x) { y = flushed(std::exp2(flushed(x))); }
inline void lg2_approx(float& y, float x) { y = std::log2(x); }
inline void max_nan(float& c, float a, float b) { c = a != a ? a : b != b ? b : a < b ? b : a; }

inline u32 to_f16(float x) { return bits_of(static_cast<_Float16>(x)); }
inline float from_f16(u32 x) { return from_bits<_Float16>(x & 0xFFFF); }
inline u32 to_bf16(float x) {
    const u32 bits = bits_of(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float from_bf16(u32 x) { return from_bits<float>(x << 16); }

inline float from_e4m3(u32 x) {
    const u32 exponent = x >> 3 & 0xF, mantissa = x & 7;
    if ((x & 0x7F) == 0x7F) return __builtin_nanf("");
    const u32 units = exponent == 0 ? mantissa : 8 + mantissa;
    const int shift = exponent == 0 ? -9 : static_cast<int>(exponent) - 10;
    const float size = std::ldexp(static_cast<float>(units), shift);
    return x & 0x80 ? -size : size;
}

template <class R>
void cvt_f16x2(R& both, float high, float low) {
    both = to_f16(high) << 16 | to_f16(low);
}
template <class R>
void cvt_bf16x2(R& both, float high, float low) {
    both = to_bf16(high) << 16 | to_bf16(low);
}
inline void unpack_f16x2(float& low, float& high, u32 both) {
    low = from_f16(both);
    high = from_f16(both >> 16);
}
inline void widen_e4m3x2(u32& both, u32 bytes) {
    both = to_f16(from_e4m3(bytes >> 8 & 0xFF)) << 16 | to_f16(from_e4m3(bytes & 0xFF));
}

// --- shared memory ----------------------------------------------------------------------------------------

// Bytes of the CTA's window, checked for bounds and alignment.
u8* shared_bytes(u32 address, u32 bytes);
// The same to be written in the generic proxy: wgmma must not read them before a fence.
u8* shared_target(u32 address, u32 bytes);

inline void shared_load(u32 place, u32* x, u32 words) {
    std::memcpy(x, shared_bytes(place, 4 * words), 4 * words);
}
inline void ld_shared_v2(u32& x, u32& y, u32 place) {
    u32 words[2];
    shared_load(place, words, 2);
    x = words[0], y = words[1];
}
inline void ld_shared_v4(u32& x, u32& y, u32& z, u32& w, u32 place) {
    u32 words[4];
    shared_load(place, words, 4);
    x = words[0], y = words[1], z = words[2], w = words[3];
}
inline void st_shared(u32 place, u32 x) { std::memcpy(shared_target(place, 4), &x, 4); }
inline void st_shared_v4(u32 place, u32 x, u32 y, u32 z, u32 w) {
    const u32 words[4] = {x, y, z, w};
    std::memcpy(shared_target(place, 16), words, 16);
}
inline void st_shared_v4_same(u32 place, u32 x) { st_shared_v4(place, x, x, x, x); }

// Matrices of 8 x 8 units of 16 bits, transposed: unit e (0, 1) of lane l is row 2 (l % 4) + e, column l / 4.
struct Matrices {
    u32 place;
    int count;
    u32* units;
};
inline void stmatrix_x2_trans(u32 place, u32 first, u32 second) {
    u32 units[2] = {first, second};
    const Matrices matrices{place, 2, units};
    together(kStoreMatrix, 0xFFFFFFFF, bits_of(&matrices), 0, 0);
}
inline void ldmatrix_x4_trans(u32& a, u32& b, u32& c, u32& d, u32 place) {
    u32 units[4];
    const Matrices matrices{place, 4, units};
    together(kLoadMatrix, 0xFFFFFFFF, bits_of(&matrices), 0, 0);
    a = units[0], b = units[1], c = units[2], d = units[3];
}

// --- global memory ----------------------------------------------------------------------------------------

template <class T, int kCount>
const T* aligned(const void* place) {
    if (reinterpret_cast<u64>(place) % (sizeof(T) * kCount)) fail("global address %p is not aligned", place);
    return static_cast<const T*>(place);
}
inline void ld_global_v4(u32& x, u32& y, u32& z, u32& w, const void* place) {
    const u32* from = aligned<u32, 4>(place);
    x = from[0], y = from[1], z = from[2], w = from[3];
}
inline void st_global(const void* place, u32 x) { *const_cast<u32*>(aligned<u32, 1>(place)) = x; }
inline void st_global_v2(const void* place, u32 x, u32 y) {
    u32* to = const_cast<u32*>(aligned<u32, 2>(place));
    to[0] = x, to[1] = y;
}
inline void st_global_v4(const void* place, u32 x, u32 y, u32 z, u32 w) {
    u32* to = const_cast<u32*>(aligned<u32, 4>(place));
    to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}
// 0 where the predicate does not hold; the place is not touched then.
inline void ld_v4_if(float& x, float& y, float& z, float& w, const void* place, int there) {
    const float nothing[4] = {};
    const float* from = there ? aligned<float, 4>(place) : nothing;
    x = from[0], y = from[1], z = from[2], w = from[3];
}
inline void ld_v2_if(float& x, float& y, const void* place, int there) {
    const float nothing[2] = {};
    const float* from = there ? aligned<float, 2>(place) : nothing;
    x = from[0], y = from[1];
}
inline void st_relaxed(u64* place, u64 x) {
    pause();
    *const_cast<u64*>(aligned<u64, 1>(place)) = x;
}
void ld_relaxed(u64& x, const u64* place);
inline void atom_add(int& before, int* place, int x) {
    pause();
    before = *place;
    *place += x;
}

}  // namespace emulated
