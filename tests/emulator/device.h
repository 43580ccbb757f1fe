// What CUDA C++ has built in, for a kernel that g++ compiles: qualifiers, indices, warp functions,
// arithmetic. The PTX instructions are in ptx.h; what both need of the machine is in the .cpp files.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

namespace emulated {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Index {
    u32 x, y, z;
};
// Of the thread that runs.
extern Index thread_index, block_index, block_size, grid_size;

// What a warp does together; the lanes of the mask wait for one another.
enum Kind : int {
    kSync, kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kAll, kAny, kBallot, kSumLanes, kMinLanes,
    kMaxLanes, kOrLanes, kStoreMatrix, kLoadMatrix, kWaitProducts, kRegisters,
};
u64 together(Kind kind, u32 mask, u64 value, u32 argument, int line);

u8* shared_memory();                  // of the CTA
u32 shared_offset(const void* pointer);  // an address in its window
void pause();                         // another thread may go on here
void named_barrier(int barrier, u32 threads, bool waits);
bool named_barrier_all(int barrier, u32 threads, bool agree);
void sync_threads();
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T>
u64 bits_of(T x) {
    static_assert(sizeof(T) <= 8);
    u64 bits = 0;
    std::memcpy(&bits, &x, sizeof(T));
    return bits;
}

template <class T>
T from_bits(u64 bits) {
    T x;
    std::memcpy(&x, &bits, sizeof(T));
    return x;
}

template <class T>
struct Same {
    using type = T;
};

}  // namespace emulated

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size

// --- warps ------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulated::sync_threads(); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFF, int line = __builtin_LINE()) {
    emulated::together(emulated::kSync, mask, 0, 0, line);
}

#define EMULATED_SHUFFLE(NAME, KIND)                                                               \
    template <class T>                                                                             \
    T NAME(unsigned mask, T x, int lane, int width = 32, int line = __builtin_LINE()) {             \
        using namespace emulated;                                                                  \
        if (width != 32) fail(#NAME " of width %d is not emulated", width);                        \
        return from_bits<T>(together(KIND, mask, bits_of(x), static_cast<u32>(lane), line));       \
    }
EMULATED_SHUFFLE(__shfl_sync, kShuffle)
EMULATED_SHUFFLE(__shfl_xor_sync, kShuffleXor)
EMULATED_SHUFFLE(__shfl_up_sync, kShuffleUp)
EMULATED_SHUFFLE(__shfl_down_sync, kShuffleDown)

#define EMULATED_VOTE(NAME, KIND, RESULT)                                                            \
    inline RESULT NAME(unsigned mask, int predicate, int line = __builtin_LINE()) {                  \
        return static_cast<RESULT>(emulated::together(emulated::KIND, mask, predicate != 0, 0, line)); \
    }
EMULATED_VOTE(__all_sync, kAll, int)
EMULATED_VOTE(__any_sync, kAny, int)
EMULATED_VOTE(__ballot_sync, kBallot, unsigned)

#define EMULATED_REDUCTION(NAME, KIND)                                                             \
    template <class T>                                                                             \
    T NAME(unsigned mask, T x, int line = __builtin_LINE()) {                                      \
        using namespace emulated;                                                                  \
        static_assert(sizeof(T) == 4 && std::is_integral_v<T>);                                    \
        return static_cast<T>(together(KIND, mask, bits_of(static_cast<i64>(x)), 0, line));        \
    }
EMULATED_REDUCTION(__reduce_add_sync, kSumLanes)
EMULATED_REDUCTION(__reduce_min_sync, kMinLanes)
EMULATED_REDUCTION(__reduce_max_sync, kMaxLanes)
EMULATED_REDUCTION(__reduce_or_sync, kOrLanes)

// --- memory -----------------------------------------------------------------------------------------------

inline emulated::u64 __cvta_generic_to_shared(const void* pointer) {
    return emulated::shared_offset(pointer);
}

template <class T>
T __ldg(const T* place) {
    return *place;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulated::pause(); }
[[noreturn]] inline void __trap() { emulated::fail("__trap() was called"); }

// Threads change only inside the functions of the machine: what stands here is atomic.
#define EMULATED_ATOMIC(NAME, RESULT)                                    \
    template <class T>                                                   \
    T NAME(T* place, typename emulated::Same<T>::type x) {               \
        emulated::pause();                                               \
        const T before = *place;                                         \
        *place = RESULT;                                                 \
        return before;                                                   \
    }
EMULATED_ATOMIC(atomicAdd, before + x)
EMULATED_ATOMIC(atomicMax, before < x ? x : before)
EMULATED_ATOMIC(atomicMin, x < before ? x : before)
EMULATED_ATOMIC(atomicOr, before | x)
EMULATED_ATOMIC(atomicAnd, before& x)
EMULATED_ATOMIC(atomicExch, x)

template <class T>
T atomicCAS(T* place, typename emulated::Same<T>::type expected, typename emulated::Same<T>::type x) {
    emulated::pause();
    const T before = *place;
    if (before == expected) *place = x;
    return before;
}

// --- arithmetic -------------------------------------------------------------------------------------------

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

inline float __int_as_float(int x) { return emulated::from_bits<float>(static_cast<unsigned>(x)); }
inline float __uint_as_float(unsigned x) { return emulated::from_bits<float>(x); }
inline int __float_as_int(float x) { return emulated::from_bits<int>(emulated::bits_of(x)); }
inline unsigned __float_as_uint(float x) { return emulated::from_bits<unsigned>(emulated::bits_of(x)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const emulated::u64 bytes = static_cast<emulated::u64>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i & 0xF;
        unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7)) & 0xFF;
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;  // its sign instead
        result |= byte << 8 * i;
    }
    return result;
}

inline int __dp4a(int a, int b, int sum) {
    const auto byte = [](int x, int i) { return static_cast<signed char>(x >> i); };
    for (int i = 0; i < 32; i += 8) sum += byte(a, i) * byte(b, i);
    return sum;
}
