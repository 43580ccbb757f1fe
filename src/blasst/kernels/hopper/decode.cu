// Decode on Hopper: 1 to 8 new tokens of a sequence against its cache; bound by the bytes of K and of the V kept.
//
// A CTA owns one split of the keys of one KV head of one sequence; its rows are all query heads of the KV head at
// all new positions. One producer warp fetches K tiles of 64 keys through TMA. One consumer warpgroup (two for 128
// rows, 64 each) scores them: K is the A operand (64 keys = M), Q the B operand (rows = N). The decision of a tile
// needs the anchors alone (docs/method.md), the first and the last two visible tiles: the first split scores them and
// tells the others the maximum of each row. A split that hears nothing for a while scores them itself, with the same
// result, so none depends on another. The producer hears of the vote on a tile and fetches V only if it is kept;
// P.V follows up to kLag kept tiles later, so nobody waits for the load. While a tile is decided, the tensor cores score
// the next one. Exponents are taken relative to the maximum of the first kept tile; where a later one lies far above it,
// the base is raised. Split boundaries are a function of the sequence's length alone. The last CTA of a KV head combines
// the splits in their order.
//
// Few warps share a scheduler, so each instruction of a step counts: bounds of what is masked are worked out before the
// loop, and addresses are made uniform.
//
// fp8 caches: K goes through registers, where e4m3 becomes f16 (exact), and so does V. The columns of Q are stored
// in the order in which a thread finds them in its piece of a K row; rows of a bf16 Q are scaled by a power of two into
// the range of f16.
//
// Compile-time: HEAD_DIM (64, 96, 128), BF16, FP8, ROWS (8 to 128), SKIP, MASS, SLOTS, CTAS, PATIENCE.
#include "ptx.cuh"

#ifndef AHEAD
#define AHEAD (SKIP && !MASS && !FP8 && ROWS == 8 ? 4 : 1)
#endif
#ifndef PATIENCE
#define PATIENCE 50  // some 0.7 us each; the message takes less than 5
#endif

#define kInfinity __int_as_float(0x7F800000)
#define kNaN __int_as_float(0x7FFFFFFF)

namespace {

constexpr int kRows = ROWS;
constexpr int kGroups = kRows > 64 ? 2 : 1;  // consumer warpgroups
constexpr int kColumns = kRows / kGroups;    // rows of a warpgroup: columns of its scores
constexpr int kConsumers = 128 * kGroups;
// Two warpgroups of 64 rows need more registers than 168: then the producer warp brings a warpgroup that lends its own.
constexpr int kThreads = kConsumers + (kGroups == 2 ? 128 : 32);
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of the 168 that each has at launch
constexpr int kKeys = 64;
constexpr int kRowBytes = 128;                              // of a chunk of a row in shared memory
constexpr int kChunks = (HEAD_DIM + 63) / 64;               // of Q, and of O^T
constexpr int kTileChunks = FP8 ? 1 : kChunks;              // of K and V
constexpr u32 kTileChunkBytes = kKeys * kRowBytes;
constexpr u32 kTileBytes = kTileChunks * kTileChunkBytes;
constexpr u32 kQueryChunkBytes = kRows * kRowBytes;
constexpr u32 kQueryBytes = kChunks * kQueryChunkBytes;
constexpr u32 kWeightBytes = kRows * kKeys * 2;
constexpr int kMaxStages = 12;
constexpr int kDecisions = 16;         // of tiles that the producer has not heard of
constexpr int kSlots = SLOTS;          // kept tiles whose P.V is still to come
constexpr int kScores = kColumns / 2;  // registers of the scores of one tile, and of 64 rows of O^T
constexpr int kOwn = kColumns / 4;     // rows of which a thread sees scores
// Tiles that are scored before the bounds are known, so that K need not wait for them.
constexpr int kAhead = SKIP ? AHEAD : 1;
constexpr int kQueued = kAhead > 1 ? kAhead - 1 : 1;
static_assert(kDecisions >= kMaxStages + kAhead && kDecisions > kMaxStages + 1);
constexpr int kMaxSplits = 32;
constexpr int kPart = HEAD_DIM + 4;    // of a row: O, base, sum, bound, base of the bound
constexpr int kWords = 1 + MASS;       // of a row's message: maximum over the anchors, sum
constexpr int kWidth = HEAD_DIM == 64 ? 2 : 4;  // numbers of O that a lane combines
// Splits of which it asks for them at a time, as registers allow.
constexpr int kFlight = CTAS > 2 ? 8 : ROWS > 8 || MASS ? 16 : 32;
[[maybe_unused]] constexpr int kPatience = PATIENCE;  // times that a message is looked for
constexpr int kVoteBarrier = 1;  // 0 is __syncthreads
// Exponents may exceed the base by this much (base 2) before it is raised: P must stay finite in its dtype.
constexpr float kHeadroom = BF16 && !FP8 ? 32.f : 12.f;
// Tiles by which P.V follows: one slot is free at every vote. A dense build fetches V ahead instead.
constexpr int kLag = SKIP ? kSlots - 2 : 0;
constexpr bool kSharedJob = ROWS > 32 || CTAS > 2 || (ROWS == 32 && FP8);
// The vote has branches, or its registers are not there while the next scores are in flight.
constexpr bool kVoteAlone = SKIP && (MASS || ROWS > 64);
constexpr float kLn2 = 0.693147182f;
constexpr float kNoBase = -1e30f;  // of a row that has seen nothing

// Keys from `low` to before `high`.
struct Range {
    int low, high;
    __device__ __forceinline__ int overlap(int begin, int end) const { return max(min(high, end) - max(low, begin), 0); }
};

struct Shared {
    u64 key_full[kMaxStages], key_empty[kMaxStages], value_full[kSlots], value_empty[kSlots];
    u64 decided[kDecisions];
    int first_slot;  // for V
    u8 keeps[kDecisions];
    int raise[2];  // of even and odd tiles: tile + 1 if it lies above the base
    float maxima[4 * kGroups][kColumns];  // of each warp
    float sums[4 * kGroups][kColumns];
    Range sight[kRows];  // keys that a row sees; none if there is no such row
#if MASS
    float groups[4 * kGroups][4][kColumns];  // maxima of 8 keys, half of them in the neighbouring warp
#endif
#if FP8
    float scale[kRows];   // of the rows of Q in f16
    float factor[kRows];  // of their scores
#endif
    alignas(8) u8 job[96];  // struct Job, where registers are scarce
    alignas(16) float nothing[kPart], waste[4 * 32];  // read and written where nothing shall come of it
};

}  // namespace

struct Params {
    TensorMap k, v;
    const void* q;
    void* out;
    float* lse;         // or null
    float* mass_bound;  // or null
    float* partial;  // (batch, KV heads, splits, rows, kPart)
    int* arrivals;   // (batch, KV heads), zero before and after
    u64* messages;   // (batch, KV heads, rows, kWords), the same: a float, and 1 above it when it is there
    u8* kept;
    i64* skipped;
    i64* visited;
    const float* threshold;
    const float* sinks;
    const float* k_descale;
    const float* v_descale;
    const int* seqused;
    const int* leftpad;
    const int* table;
    i64 q_stride_b, q_stride_s, q_stride_h;
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;  // also of the bound
    int table_stride, threshold_stride;
    int k_descale_stride_b, k_descale_stride_h, v_descale_stride_b, v_descale_stride_h;
    int num_kv_heads, group, tokens;
    int seqlen_k;
    int stages;         // of the ring of K tiles, at most kMaxStages
    int splits;         // of the grid and the partial results
    int wanted_splits;  // of a long sequence
    int min_tiles;      // of a split
    int page_shift;
    int window_left, window_right;
    int key_tiles;      // of the kept map
    int guard_values;
    float scale_log2, unit, score_factor, score_cap;
    float cut_factor;   // of log2(threshold)
    float eps;          // error budget; negative: none
};

namespace {

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next(const Params& p) {
        if (++stage == p.stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// What a CTA works on; the same for all its threads.
struct Job {
    int sequence, kv_head, split, splits;
    int keys, base;         // of the sequence: how many, first slot
    Range seen;             // keys that some row sees
    int first, last;        // their tiles
    int head_anchors;       // tiles from `first` that are anchors
    int tail_anchor;        // tiles from here on are anchors
    int begin, end;         // tiles of this split
    Range inner;            // tiles of which all rows see all keys
    int anchors;

    // used, leftpad: as read from the device, where nothing was checked: they must not lead beyond the cache or the grid.
    __device__ __forceinline__ Job(const Params& p, int used, int leftpad) {
        kv_head = blockIdx.x;
        split = blockIdx.y;
        sequence = blockIdx.z;
        keys = min(max(used, 0), p.seqlen_k);
        base = min(max(leftpad, 0), keys);
        keys -= base;
        // Rows slide by one key: the first token sees from here, the last one to there.
        const int shift = keys - p.tokens;
        seen = {max(shift - p.window_left, 0), min(shift + p.tokens - 1 + p.window_right + 1, keys)};
        first = 0;
        last = -1;
        head_anchors = tail_anchor = 0;
        if (seen.high > seen.low) {
            first = seen.low / kKeys;
            last = (seen.high - 1) / kKeys;
            // First tiles of all rows, last two of all rows (rows that see nothing have none).
            const int last_low = min(max(shift + p.tokens - 1 - p.window_left, 0), keys - 1);
            const int seeing = max(0, -(shift + p.window_right));  // first token that sees a key
            const int first_high = min(shift + seeing + p.window_right + 1, keys);
            head_anchors = min(last_low / kKeys, last) - first + 1;
            tail_anchor = max(max((first_high - 1) / kKeys - 1, first), first + head_anchors);
        }
        const int tiles = last - first + 1;
        const int each = max(p.min_tiles, (tiles + p.wanted_splits - 1) / p.wanted_splits);
        splits = max((tiles + each - 1) / each, 1);
        inner = {(max(shift + p.tokens - 1 - p.window_left, 0) + kKeys - 1) / kKeys,
                 max(min(shift + p.window_right + 1, keys), 0) / kKeys};
        begin = first + split * each;
        end = min(begin + each, last + 1);
        anchors = head_anchors + max(last + 1 - tail_anchor, 0);
        if (tiles <= 0) anchors = 0;
        static_assert(sizeof(Job) <= sizeof(Shared::job));
    }

    __device__ __forceinline__ int anchor(int i) const {
        return i < head_anchors ? first + i : tail_anchor + i - head_anchors;
    }
    __device__ __forceinline__ bool is_anchor(int tile) const {
        return tile < first + head_anchors || tile >= tail_anchor;
    }
    // Keys that a row sees.
    __device__ __forceinline__ Range sight(const Params& p, int row) const {
        const int position = keys - p.tokens + row / p.group;
        if (row >= p.tokens * p.group) return {0, 0};
        return {max(position - p.window_left, 0), min(position + p.window_right + 1, keys)};
    }
    // Whether some row does not see some key of the tile.
    __device__ __forceinline__ bool edge(int tile) const { return tile < inner.low || tile >= inner.high; }
    __device__ __forceinline__ i64 head(const Params& p) const {
        return static_cast<i64>(sequence) * p.num_kv_heads + kv_head;
    }
};

// Fetch a tile; one warp together (lane < 32). policy: whether L2 should keep it.
__device__ __forceinline__ void load_tile(
    const Params& p, const TensorMap* map, u64 policy, const Job& job, int tile, u32 target, u32 barrier, int lane) {
    const int slot_first = tile * kKeys;
    if (p.table == nullptr) {
        if (lane == 0) {
            barrier_expect(barrier, kTileBytes);
#pragma unroll
            for (int chunk = 0; chunk < kTileChunks; ++chunk) {
                tma_load(target + chunk * kTileChunkBytes, map, policy, barrier, chunk * 64, job.base + slot_first,
                         job.kv_head, job.sequence);
            }
        }
        return;
    }
    const int shift = min(p.page_shift, 6);
    const int boxes = (min(job.keys - slot_first, kKeys) + (1 << shift) - 1) >> shift;
    if (lane == 0) barrier_expect(barrier, (boxes << shift) * kRowBytes * kTileChunks);
    __syncwarp();
    if (lane < boxes) {
        const int slot = slot_first + (lane << shift);
        const int page = p.table[static_cast<i64>(job.sequence) * p.table_stride + (slot >> p.page_shift)];
#pragma unroll
        for (int chunk = 0; chunk < kTileChunks; ++chunk) {
            tma_load(target + chunk * kTileChunkBytes + (lane << shift) * kRowBytes, map, policy, barrier, chunk * 64,
                     slot & ((1 << p.page_shift) - 1), job.kv_head, page);
        }
    }
}

// Of an operand that begins so many bytes later; the addition never carries out of the address.
__device__ __forceinline__ u64 later(u64 descriptor, u32 bytes) {
    return (descriptor & 0xFFFFFFFF00000000) | (static_cast<u32>(descriptor) + (bytes >> 4));
}

// The same in all lanes, which the compiler does not see otherwise.
__device__ __forceinline__ u32 uniform(u32 x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

__device__ __forceinline__ float finite(float maximum) { return maximum == -kInfinity ? 0.f : maximum; }

// Over the 8 lanes that hold keys of the same rows.
__device__ __forceinline__ float keys_max(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, lane));
    return x;
}
__device__ __forceinline__ float keys_sum(float x) {
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, lane);
    return x;
}

// 8 numbers of a row of q; 0 for rows that do not exist.
__device__ __forceinline__ void read_query(const Params& p, const Job& job, int row, int piece, u32 (&pairs)[4]) {
    pairs[0] = pairs[1] = pairs[2] = pairs[3] = 0;
    if (row >= p.tokens * p.group) return;
    const u16* place = static_cast<const u16*>(p.q) + job.sequence * p.q_stride_b + row / p.group * p.q_stride_s +
                       (job.kv_head * p.group + row % p.group) * p.q_stride_h + piece * 8;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "l"(place));
}

// Q of all rows, swizzled, and what they see; by the consumers.
__device__ __forceinline__ void load_queries(const Params& p, Shared& shared, const Job& job, u32 query) {
    constexpr int kPieces = HEAD_DIM / 8;  // of 16 bytes
    for (int r = threadIdx.x; r < kRows; r += kConsumers) shared.sight[r] = job.sight(p, r);
#if FP8
    float k_descale = 1.f;
    if (p.k_descale != nullptr) {
        k_descale = p.k_descale[static_cast<i64>(job.sequence) * p.k_descale_stride_b +
                                job.kv_head * p.k_descale_stride_h];
    }
    for (int r = threadIdx.x; r < kRows; r += kConsumers) {
        u32 exponent = 127;  // of the power of two
#if BF16
        float top = 0.f;
        for (int piece = 0; piece < kPieces; ++piece) {
            u32 pairs[4];
            read_query(p, job, r, piece, pairs);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float low, high;
                unpack(pairs[i], low, high);
                top = max_or_nan(top, max_or_nan(fabsf(low), fabsf(high)));
            }
        }
        // The largest number of the row becomes one in [2**14, 2**15).
        if (top > 0.f && top < kInfinity) exponent = min(127 + 127 + 14 - (__float_as_uint(top) >> 23), 253u);
#endif
        shared.factor[r] = __uint_as_float((254 - exponent) << 23) * k_descale;
        shared.scale[r] = __uint_as_float(exponent << 23);
    }
    named_sync(kVoteBarrier, kConsumers);
#endif
    for (int i = threadIdx.x; i < kRows * kPieces; i += kConsumers) {
        const int r = i / kPieces, piece = i % kPieces;
        u32 pairs[4];
        read_query(p, job, r, piece, pairs);
        const u32 target = query + r * kRowBytes;
#if FP8
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            float low, high;
            unpack(pairs[x], low, high);
            const int d = piece * 8 + 2 * x, of_thread = d / (HEAD_DIM / 4), rest = d % (HEAD_DIM / 4);
            const int column = rest / 4 * 16 + 2 * of_thread + rest % 4 / 2 * 8;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(target + column / 64 * kQueryChunkBytes +
                                                         ((column % 64 / 8) ^ (r % 8)) * 16 + column % 8 * 2),
                         "r"(pack(low * shared.scale[r], high * shared.scale[r]))
                         : "memory");
        }
#else
        store_16_bytes(target + piece / 8 * kQueryChunkBytes + ((piece % 8) ^ (r % 8)) * 16, pairs[0], pairs[1], pairs[2],
                       pairs[3]);
#endif
    }
    async_proxy_fence();
}

#if MASS
// What the bound of one row needs; thread r of a warpgroup keeps it for row r.
struct RowBound {
    float cut;    // scores below it need not be kept
    float base;   // of exponents, base 2: the anchors' maximum
    float share;  // of the budget, for each visible key
    float sum = 0.f;
    Range sight;
};
#endif

// One consumer warpgroup. A thread sees keys 16 warp + lane / 4 (+ 8) of a tile and rows 8 i + 2 (lane % 4) + e of its
// warpgroup, in its arrays at 2 i + e.
struct Consumer {
    const Params& p;
    Shared& shared;
    const Job& job;
    const int w;
    const u32 query, keys, values, weights;  // in shared memory; query and weights: from this warpgroup's rows on
    Ring ring;
    float cut;
    u32 exists[kOwn];   // all bits or none: whether there is such a row
    float bound[kOwn];  // scores below it need not be kept
    float base[kOwn];   // of the exponents, base 2; the splits may differ
    float sum[kOwn];    // over this thread's keys
    float o[kChunks][kScores];
    int issued = 0, done = 0;  // uses of slots: anchors, then kept tiles
    int ragged = -1;           // the use for the tile that reaches beyond the sequence
    int leading = -1;          // the use for the tile that begins before the first key that a row sees
    int skipped = 0;
#if MASS
    RowBound mine;
#endif

    __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
    __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
    __device__ __forceinline__ int column(int own) const { return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2; }
    __device__ __forceinline__ int row(int own) const { return w * kColumns + column(own); }
    __device__ __forceinline__ int rows() const { return p.tokens * p.group; }
    __device__ __forceinline__ int key(int half) const { return thread() / 32 * 16 + lane() / 4 + 8 * half; }
    static __device__ __forceinline__ void meet() { named_sync(kVoteBarrier, kConsumers); }

    static __device__ __forceinline__ float of(const float (&s)[kScores], int own, int half) {
        return s[own / 2 * 4 + 2 * half + own % 2];
    }

    __device__ __forceinline__ float sink(int own) const {
        if (p.sinks == nullptr || row(own) >= rows()) return -kInfinity;
        return p.sinks[job.kv_head * p.group + row(own) % p.group];
    }

    // Start K.Q^T of a tile in shared memory.
    __device__ __forceinline__ void multiply_keys(u32 tile, float (&s)[kScores]) const {
        const u64 b = matrix_descriptor(query, 0);
#if FP8
        constexpr int kTogether = kGroups == 2 ? 2 : HEAD_DIM / 16;  // steps of 16 columns: two warpgroups lack registers
        constexpr int kLoaded = kTogether % 4 == 0 && HEAD_DIM % 64 == 0 ? 4 : 2;  // of one load
#pragma unroll
        for (int from = 0; from < HEAD_DIM / 16; from += kTogether) {
            u32 a[kTogether][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < kTogether; i += kLoaded) {
                    const int place = threadIdx.x % 4 * (HEAD_DIM / 4) + 4 * (from + i);
                    u32 raw[kLoaded];  // four numbers each
                    load_words(tile + key(half) * kRowBytes + ((place / 16) ^ (lane() / 4)) * 16 + place % 16, raw);
#pragma unroll
                    for (int x = 0; x < kLoaded; ++x) {
                        a[i + x][half] = widen(raw[x]);
                        a[i + x][2 + half] = widen(raw[x] >> 16);
                    }
                }
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int step = from + i;
                Wgmma<kColumns>::rs<0>(s, a[i][0], a[i][1], a[i][2], a[i][3],
                                       later(b, step / 4 * kQueryChunkBytes + step % 4 * 32), step > 0);
            }
            if (kGroups == 2) {
                wgmma_commit();
                wgmma_wait<0>();
                pin(s);
            }
        }
#else
        const u64 a = matrix_descriptor(uniform(tile), 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            Wgmma<kColumns>::ss<0, 0>(s, later(a, i / 4 * kTileChunkBytes + i % 4 * 32),
                                      later(b, i / 4 * kQueryChunkBytes + i % 4 * 32), i > 0);
        }
#endif
        wgmma_commit();
    }

    // The same for the tile of the split that is next in the ring. After the last one the tensor cores multiply what lies
    // there, which nobody reads: a product in flight must not depend on a branch.
    __device__ __forceinline__ void begin_scores(bool wanted, float (&s)[kScores]) const {
        if (wanted) barrier_wait(shared_address(&shared.key_full[ring.stage]), ring.phase);
        multiply_keys(keys + ring.stage * kTileBytes, s);
    }

    __device__ __forceinline__ void end_scores(bool wanted, float (&s)[kScores]) {
        wgmma_wait<0>();
        pin(s);
        if (FP8) __syncwarp();  // each lane has read its part of K
        if (lane() == 0 && wanted) barrier_arrive(shared_address(&shared.key_empty[ring.stage]));
        if (kAhead == 1 || wanted) ring.next(p);
    }

    // Of the first tiles: the scores of the very first one, and of those that follow.
    __device__ __forceinline__ void first_scores(float (&next)[kScores], float (&queue)[kQueued][kScores]) {
#pragma unroll 1
        for (int tile = job.begin, i = 0; i < kAhead; ++tile, ++i) {
            float other[kScores];
            float(&fresh)[kScores] = kAhead > 1 ? other : next;
            begin_scores(tile < job.end, fresh);
            end_scores(tile < job.end, fresh);
            if (kAhead > 1) advance(next, queue, fresh);
        }
    }

    static __device__ __forceinline__ void advance(
        float (&next)[kScores], float (&queue)[kQueued][kScores], const float (&fresh)[kScores]) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            next[i] = queue[0][i];
#pragma unroll
            for (int x = 0; x + 1 < kQueued; ++x) queue[x][i] = queue[x + 1][i];
            queue[kQueued - 1][i] = fresh[i];
        }
    }

    // The larger of a row's two scores in this thread. A row that does not exist has 0, whatever K holds.
    __device__ __forceinline__ float larger(const float (&s)[kScores], int own) const {
        const float x = max_or_nan(of(s, own, 0), of(s, own, 1));
        return __uint_as_float(__float_as_uint(x) & exists[own]);
    }

    // From products to scores: scale of fp8, softcap, masks.
    __device__ __forceinline__ void finish_scores(int tile, float (&s)[kScores]) const {
#if FP8
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
#pragma unroll
            for (int half = 0; half < 2; ++half) s[own / 2 * 4 + 2 * half + own % 2] *= shared.factor[row(own)];
        }
#endif
        if (__builtin_expect(p.score_cap > 0.f, 0)) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                const float twice = exp2_fast(s[i] * p.score_factor);
                s[i] = __fmaf_rn(p.score_cap, -2.f / (twice + 1.f), p.score_cap);
            }
        }
        if (__builtin_expect(job.edge(tile), 0)) mask(tile, s);
    }

    __device__ __forceinline__ void mask(int tile, float (&s)[kScores]) const {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const Range sight = shared.sight[row(own)];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = tile * kKeys + key(half);
                if (k < sight.low || k >= sight.high) s[own / 2 * 4 + 2 * half + own % 2] = -kInfinity;
            }
        }
    }

    // Maxima over all keys of the warpgroup, from those of the threads.
    __device__ __forceinline__ void share_maxima(float (&top)[kOwn]) const {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const float x = keys_max(top[own]);
            if (lane() < 4) shared.maxima[threadIdx.x / 32][column(own)] = x;
        }
        meet();
#pragma unroll
        for (int own = 0; own < kOwn; ++own) top[own] = shared_maximum(column(own));
    }

    __device__ __forceinline__ float shared_maximum(int column) const {
        const int f = 4 * w;
        return max_or_nan(max_or_nan(shared.maxima[f][column], shared.maxima[f + 1][column]),
                          max_or_nan(shared.maxima[f + 2][column], shared.maxima[f + 3][column]));
    }

    // Sums over all keys, from those of the threads; afterwards thread r may ask for row r of its warpgroup.
    __device__ __forceinline__ void share_sums(const float (&x)[kOwn]) const {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const float y = keys_sum(x[own]);
            if (lane() < 4) shared.sums[threadIdx.x / 32][column(own)] = y;
        }
        meet();
    }

    __device__ __forceinline__ float shared_sum(int column) const {
        const int f = 4 * w;
        return (shared.sums[f][column] + shared.sums[f + 1][column]) +
               (shared.sums[f + 2][column] + shared.sums[f + 3][column]);
    }

    __device__ __forceinline__ void wait_for_slot() const {
        barrier_wait(shared_address(&shared.value_full[done % kSlots]), done / kSlots % 2);
    }

    // Scores of the anchors: the maximum of every row, and its sum relative to that. Nothing comes of it before the keys
    // are there.
    __device__ __forceinline__ void score_anchors(bool there) {
        float top[kOwn];
#pragma unroll
        for (int own = 0; own < kOwn; ++own) top[own] = p.sinks != nullptr ? sink(own) / p.unit : -kInfinity;
#if MASS
        float mass[kOwn];
#pragma unroll
        for (int own = 0; own < kOwn; ++own) mass[own] = 0.f;
#endif
        // The first ones together: what is not there is multiplied too, and not looked at.
        constexpr int kTogether = FP8 || kColumns > 16 ? 1 : kSlots;
        while (done < job.anchors) {
            float s[kTogether][kScores];
            const int count = min(job.anchors - done, kTogether), first = done;
            for (int i = 0; there && i < count; ++i, ++done) wait_for_slot();
#pragma unroll
            for (int i = 0; i < kTogether; ++i) multiply_keys(values + (first + i) % kSlots * kTileBytes, s[i]);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kTogether; ++i) pin(s[i]);
            if (there && issued < job.anchors) {
                meet();  // nobody reads the slots any more
                fetch_anchors();
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                if (i >= count) break;
                finish_scores(job.anchor(first + i), s[i]);
#pragma unroll
                for (int own = 0; own < kOwn; ++own) {
                    const float now = max_or_nan(top[own], max_or_nan(of(s[i], own, 0), of(s[i], own, 1)));
#if MASS
                    const float from = __fmul_rn(finite(now), p.scale_log2);
                    mass[own] = __fmaf_rn(mass[own], exp2_fast(__fmul_rn(top[own], p.scale_log2) - from),
                                          exp2_fast(__fmaf_rn(of(s[i], own, 0), p.scale_log2, -from)) +
                                              exp2_fast(__fmaf_rn(of(s[i], own, 1), p.scale_log2, -from)));
#endif
                    top[own] = now;
                }
            }
            if (!there) break;
        }
#if MASS
        float part[kOwn];
#pragma unroll
        for (int own = 0; own < kOwn; ++own) part[own] = top[own];
#endif
        share_maxima(top);
#if MASS
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const float from = __fmul_rn(finite(top[own]), p.scale_log2);
            part[own] = mass[own] == 0.f ? 0.f : mass[own] * exp2_fast(__fmul_rn(part[own], p.scale_log2) - from);
        }
        share_sums(part);
#endif
        if (!there) meet();
    }

    // K of anchors into free slots; by the first warp.
    __device__ __forceinline__ void fetch_anchors() {
        for (; issued < min(job.anchors, done + kSlots); ++issued) {
            const int slot = issued % kSlots;
            const u32 barrier = shared_address(&shared.value_full[slot]);
            if (threadIdx.x >= 32) continue;
            load_tile(p, &p.k, kKeepInCache, job, job.anchor(issued), values + slot * kTileBytes, barrier, lane());
        }
    }

    // What the first split tells the others; by thread r for row r of its warpgroup.
    __device__ __forceinline__ u64* message() const {
        const int r = w * kColumns + thread();
        const u32 place = (static_cast<u32>(job.head(p)) * rows() + r) * kWords;
        return thread() < kColumns && r < rows() ? p.messages + place : nullptr;
    }

    __device__ __forceinline__ void tell() const {
        u64* words = message();
        if (words == nullptr) return;
        store_relaxed(words, 1ull << 32 | __float_as_uint(shared_maximum(thread())));
#if MASS
        store_relaxed(words + 1, 1ull << 32 | __float_as_uint(shared_sum(thread())));
#endif
    }

    // Whether everything was heard in time.
    __device__ __forceinline__ bool hear() const {
        const u64* words = message();
        u64 found[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) found[i] = words == nullptr ? 1ull << 32 : 0;
        for (int turn = 0; turn < kPatience && !(found[0] >> 32 && found[kWords - 1] >> 32); ++turn) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) found[i] = load_relaxed(words + i);
        }
        __syncwarp();
        if (thread() < kColumns) {  // as share_maxima and share_sums would leave them
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) {
                shared.maxima[4 * w + warp][thread()] = __uint_as_float(static_cast<u32>(found[0]));
#if MASS
                shared.sums[4 * w + warp][thread()] = warp == 0 ? __uint_as_float(static_cast<u32>(found[1])) : 0.f;
#endif
            }
        }
        return named_all(kVoteBarrier, kConsumers, found[0] >> 32 && found[kWords - 1] >> 32);
    }

    // The bound of every row, if the keys are there.
    __device__ __forceinline__ void look_at_anchors(bool there) {
        const bool leads = job.split == 0;
        if (!there || leads || !hear()) {
            if (there) fetch_anchors();
            score_anchors(there);
            if (!there) return;
        }
        if (leads && job.splits > 1) tell();
#pragma unroll
        for (int own = 0; own < kOwn; ++own) bound[own] = exists[own] ? shared_maximum(column(own)) + cut : kInfinity;
#if MASS
        if (thread() < kColumns) {
            const int r = w * kColumns + thread();
            const float maximum = shared_maximum(thread());
            mine.cut = maximum + cut;
            mine.base = __fmul_rn(finite(maximum), p.scale_log2);
            mine.sight = shared.sight[r];
            float whole = shared_sum(thread());
            if (p.sinks != nullptr && r < rows()) {
                const float logit = p.sinks[job.kv_head * p.group + r % p.group] / p.unit;
                whole += exp2_fast(__fmaf_rn(logit, p.scale_log2, -mine.base));
            }
            const int rest = mine.sight.high - mine.sight.low -
                             mine.sight.overlap(job.first * kKeys, (job.first + job.head_anchors) * kKeys) -
                             mine.sight.overlap(job.tail_anchor * kKeys, (job.last + 1) * kKeys);
            mine.share = p.eps * whole / static_cast<float>(max(rest, 1));
        }
#endif
    }

    // Values that nobody sees may be anything, and 0 x NaN would reach every row.
    __device__ __forceinline__ void clear_values(u32 place, int from, int to) const {
        const int units = (to - from) * 8;  // of 16 bytes
        for (int i = threadIdx.x; i < kTileChunks * units; i += kConsumers) {
            store_16_bytes(place + i / units * kTileChunkBytes + from * kRowBytes + i % units * 16, 0, 0, 0, 0);
        }
        async_proxy_fence();
        meet();
    }

    // P.V of the kept tile that has waited longest.
    __device__ __forceinline__ void drain() {
        const int slot = done % kSlots;
        const u32 place = values + slot * kTileBytes;
        wait_for_slot();
        if (done == leading) clear_values(place, 0, job.seen.low % kKeys);
        if (done == ragged) clear_values(place, job.seen.high % kKeys, kKeys);
        const u64 b = matrix_descriptor(uniform(weights + slot * kWeightBytes), 0);
#if FP8
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            u32 a[kKeys / 16][4];
#pragma unroll
            for (int i = 0; i < kKeys / 32; ++i) {
                u32 pairs[4];  // of two keys: bytes of columns d, d + 1 of the first, then of the second
                const int unit = 4 * chunk + thread() / 32;
                load_transposed(place + (32 * i + lane()) * kRowBytes + (unit ^ (lane() % 8)) * 16, pairs);
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const u32 by_column = __byte_perm(pairs[x], 0, 0x3120);
                    a[2 * i + x / 2][x % 2 * 2] = widen(by_column);
                    a[2 * i + x / 2][x % 2 * 2 + 1] = widen(by_column >> 16);
                }
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                Wgmma<kColumns>::rs<0>(o[chunk], a[i][0], a[i][1], a[i][2], a[i][3], later(b, i * 32), 1);
            }
            if (kGroups == 2) {  // the operands of both chunks do not fit
                wgmma_commit();
                wgmma_wait<0>();
                pin(o[chunk]);
            }
        }
#else
        wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const u64 a = matrix_descriptor(uniform(place) + chunk * kTileChunkBytes, kTileChunkBytes);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                Wgmma<kColumns>::ss<1, 0>(o[chunk], later(a, i * 16 * kRowBytes), later(b, i * 32), 1);
            }
        }
#endif
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) pin(o[chunk]);
        if (FP8 && !SKIP) __syncwarp();
        if (!SKIP && lane() == 0) barrier_arrive(shared_address(&shared.value_empty[slot]));
        ++done;
    }

    // A kept tile lies far above the base, as the first one does: everything so far is put relative to its maximum.
    __device__ __forceinline__ void raise(const float (&s)[kScores]) {
        float top[kOwn];
#pragma unroll
        for (int own = 0; own < kOwn; ++own) top[own] = max_or_nan(of(s, own, 0), of(s, own, 1));
        share_maxima(top);  // a vote lies between this and the last time
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const float now = max_or_nan(base[own], __fmul_rn(top[own], p.scale_log2));
            const float factor = exp2_fast(base[own] - now);
            base[own] = now;
            sum[own] *= factor;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
                for (int half = 0; half < 2; ++half) o[chunk][own / 2 * 4 + 2 * half + own % 2] *= factor;
            }
        }
    }

#if MASS
    // Whether the tile goes, asked by row: its bound of the tile is known, and added if it does.
    __device__ __forceinline__ bool vote(int tile, const float (&s)[kScores]) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            float x = max_or_nan(of(s, own, 0), of(s, own, 1));
            x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, 4));
            if (lane() / 4 % 2 == 0) shared.groups[threadIdx.x / 32][lane() / 8][column(own)] = x;
        }
        meet();
        bool agree = !job.is_anchor(tile);
        float share = 0.f;
        if (thread() < kColumns) {
            float top = -kInfinity;
            int seen = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll 1  // registers: with all four at once 128 rows spill
                for (int pair = 0; pair < 4; ++pair) {
                    const float x = max_or_nan(shared.groups[4 * w + 2 * half][pair][thread()],
                                               shared.groups[4 * w + 2 * half + 1][pair][thread()]);
                    top = max_or_nan(top, x);
                    int count = 0;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int k = tile * kKeys + 32 * half + 8 * i + 2 * pair;
                        count += mine.sight.overlap(k, k + 2);
                    }
                    seen += count;
                    if (count > 0) {
                        share = __fmaf_rn(static_cast<float>(count),
                                          exp2_fast(__fmaf_rn(x, p.scale_log2, -mine.base)), share);
                    }
                }
            }
            const bool below = top < mine.cut && (p.eps < 0.f || share <= mine.share * static_cast<float>(seen));
            agree &= below || seen == 0;
        }
        const bool dead = named_all(kVoteBarrier, kConsumers, agree);
        if (dead) mine.sum += share;
        return dead;
    }
#else
    // Whether the tile goes. Without a branch: the next scores are in flight.
    __device__ __forceinline__ bool vote(int tile, const float (&top)[kOwn]) {
        bool agree = !job.is_anchor(tile);
        const float hidden = job.edge(tile) ? -kInfinity : kNaN;  // what a row does not see has no say
#pragma unroll
        for (int own = 0; own < kOwn; ++own) agree &= top[own] < bound[own] | top[own] == hidden;
        return named_all(kVoteBarrier, kConsumers, agree);
    }
#endif

    __device__ __forceinline__ void tell_producer(int tile, bool keeps) const {
        const int place = (tile - job.begin) % kDecisions;
        shared.keeps[place] = keeps;
        barrier_arrive(shared_address(&shared.decided[place]));
    }

    __device__ __forceinline__ void step(int tile, float (&next)[kScores], float (&queue)[kQueued][kScores]) {
        float s[kScores], other[kScores];
        float(&fresh)[kScores] = kAhead > 1 ? other : next;
        // The first ones are there already: then nothing comes of the product.
        const bool queued = kAhead > 1 && tile + 1 < job.begin + kAhead, wanted = !queued && tile + 1 < job.end;
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = next[i];
        finish_scores(tile, s);
        float top[kOwn];
        bool over = false;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            top[own] = larger(s, own);
            over |= __fmaf_rn(top[own], p.scale_log2, -base[own]) > kHeadroom;
        }
        if (over) shared.raise[tile % 2] = tile + 1;
        begin_scores(wanted, fresh);
        if (kVoteAlone) end_scores(wanted, fresh);
#if SKIP && MASS
        const bool dead = vote(tile, s);
#elif SKIP
        const bool dead = vote(tile, top);
#else
        const bool dead = false;
        meet();
#endif
        if (SKIP && threadIdx.x == 0) tell_producer(tile, !dead);
        if (!kVoteAlone) end_scores(wanted, fresh);
        if (kAhead > 1) {
            advance(next, queue, fresh);
#pragma unroll
            for (int i = 0; i < kScores; ++i) next[i] = queued ? next[i] : fresh[i];
        }
        if (dead) {
            ++skipped;
            return;
        }
        if (p.kept != nullptr && threadIdx.x == 0) p.kept[job.head(p) * p.key_tiles + tile] = 1;
        if (p.guard_values && tile * kKeys < job.seen.low) leading = issued;
        if (p.guard_values && (tile + 1) * kKeys > job.seen.high) ragged = issued;
        // Nobody fills a drained slot before the next vote, and the weights of earlier tiles are there since this one.
        const bool above = shared.raise[tile % 2] == tile + 1;
        while (issued - done > (above ? 0 : kLag)) drain();
        if (above) raise(s);
        const u32 place = weights + issued % kSlots * kWeightBytes;
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i) {
            float weight[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                weight[x] = exp2_fast(__fmaf_rn(s[4 * i + x], p.scale_log2, -base[2 * i + x % 2]));
            }
            sum[2 * i] += weight[0] + weight[2];
            sum[2 * i + 1] += weight[1] + weight[3];
            const int r = 8 * i + lane() % 8, unit = thread() / 32 * 2 + lane() / 8 % 2;
            store_transposed(place + r * kRowBytes + (unit ^ (r % 8)) * 16, pack(weight[0], weight[1]),
                             pack(weight[2], weight[3]));
        }
        async_proxy_fence();
        ++issued;
    }

    // O, base, sum and bound of this split.
    __device__ __forceinline__ void store_partial() {
        float* target = p.partial + (job.head(p) * p.splits + job.split) * rows() * kPart;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            if (row(own) >= rows()) continue;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int d = chunk * 64 + (FP8 ? thread() / 32 * 16 + lane() / 4 * 2 + half : key(half));
                    if (d < HEAD_DIM) target[row(own) * kPart + d] = of(o[chunk], own, half);
                }
            }
            if (thread() < 4) target[row(own) * kPart + HEAD_DIM] = base[own];
        }
        const int r = w * kColumns + thread();
        if (thread() < kColumns && r < rows()) {
            target[r * kPart + HEAD_DIM + 1] = shared_sum(thread());
#if MASS
            target[r * kPart + HEAD_DIM + 2] = mine.sum;
            target[r * kPart + HEAD_DIM + 3] = mine.base;
#endif
        }
    }

    __device__ __forceinline__ void run([[maybe_unused]] float threshold) {
        float next[kScores], queue[kQueued][kScores];
        if (SKIP && job.split == 0) issued = min(job.anchors, kSlots);  // the producer fetches them
#pragma unroll
        for (int own = 0; own < kOwn; ++own) exists[own] = row(own) < rows() ? 0xFFFFFFFF : 0;
        load_queries(p, shared, job, query - w * kColumns * kRowBytes);
        meet();
#if SKIP
        cut = log2_fast(fminf(fmaxf(threshold, 0.f), 1.f)) * p.cut_factor;
#endif
#if SKIP && ROWS <= 64
        // The first split looks at the anchors before its first tile, and once before their keys are there, which only
        // brings the code: it is in no cache yet. The others score their first tile before they wait for the first split.
        const bool leads = job.split == 0;
#pragma unroll 1
        for (int turn = 0; turn < 3; ++turn) {
            if (turn == (leads ? 2 : 1)) {
                first_scores(next, queue);
            } else if (leads || turn == 2) {
                look_at_anchors(turn > 0);
            }
        }
#else
        if (SKIP) look_at_anchors(true);
        first_scores(next, queue);  // above 64 rows there are no registers for it meanwhile
#endif
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            base[own] = exists[own] ? kNoBase : -kNoBase;  // weights of a row that does not exist are 0
            sum[own] = 0.f;
        }
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[chunk][i] = 0.f;
        }
        if (SKIP && threadIdx.x == 0) shared.first_slot = issued % kSlots;
        for (int tile = job.begin; tile < job.end; ++tile) step(tile, next, queue);
        share_sums(sum);  // the last weights are there
        while (done < issued) drain();
        store_partial();
        if (p.skipped != nullptr && threadIdx.x == 0) {
            atomicAdd(reinterpret_cast<u64*>(p.skipped + job.head(p)), static_cast<u64>(skipped));
            if (job.split == 0) p.visited[job.head(p)] = job.last - job.first + 1;
        }
    }
};

// Fetch K of the split, and V: in a dense build of every tile, else of the tiles that are kept, as the consumers tell.
// The first split brings K of the anchors before that, into the slots, which V does not need yet.
__device__ __forceinline__ void produce(const Params& p, Shared& shared, const Job& job, u32 keys, u32 values) {
    const int lane = threadIdx.x % 32;
    Ring ring;
    int slot = 0;
    const auto load_keys = [&](int tile) {
        barrier_wait(shared_address(&shared.key_empty[ring.stage]), ring.phase ^ 1);
        load_tile(p, &p.k, kPassThrough, job, tile, keys + ring.stage * kTileBytes,
                  shared_address(&shared.key_full[ring.stage]), lane);
        __syncwarp();
        ring.next(p);
    };
    const auto load_values = [&](int tile) {
        load_tile(p, &p.v, kPassThrough, job, tile, values + slot * kTileBytes, shared_address(&shared.value_full[slot]),
                  lane);
        __syncwarp();
        if (++slot == kSlots) slot = 0;
    };
#if SKIP
    for (int i = 0; job.split == 0 && i < min(job.anchors, kSlots); ++i) {
        load_tile(p, &p.k, kKeepInCache, job, job.anchor(i), values + i * kTileBytes,
                  shared_address(&shared.value_full[i]), lane);
        __syncwarp();
    }
    // The first tile is scored before the vote on it, the next one beside each vote: then the place of its K is free.
    int asked = job.begin;
    for (int tile = job.begin - 1; tile < job.end; ++tile) {
        if (tile >= job.begin) {
            const u32 place = (tile - job.begin) % kDecisions, turn = (tile - job.begin) / kDecisions;
            barrier_wait(shared_address(&shared.decided[place]), turn % 2);
            if (tile == job.begin) slot = shared.first_slot;
            if (shared.keeps[place]) load_values(tile);
        }
        const int scored = max(tile + 2, job.begin + kAhead);
        for (; asked < min(scored + p.stages, job.end); ++asked) load_keys(asked);
    }
#else
    u32 slot_phase = 0;
    for (int tile = job.begin; tile < job.end; ++tile) {
        load_keys(tile);
        barrier_wait(shared_address(&shared.value_empty[slot]), slot_phase ^ 1);
        load_values(tile);
        if (slot == 0) slot_phase ^= 1;
    }
#endif
}

__device__ __forceinline__ float sink_log2(const Params& p, const Job& job, int row) {
    if (p.sinks == nullptr) return -kInfinity;
    return p.sinks[job.kv_head * p.group + row % p.group] / p.unit * p.scale_log2;
}

// Numbers of a partial result, several loads of them to be under way at a time; 0 if there are none.
template <int kNumbers = kWidth>
__device__ __forceinline__ void load_numbers(const float* place, bool there, float (&x)[4]) {
    x[2] = x[3] = 0.f;
    if (kNumbers == 4) {
        asm volatile(
            "{.reg .pred p; setp.ne.s32 p, %5, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
            " mov.f32 %2, 0f00000000; mov.f32 %3, 0f00000000; @p ld.v4.f32 {%0, %1, %2, %3}, [%4];}"
            : "=&f"(x[0]), "=&f"(x[1]), "=&f"(x[2]), "=&f"(x[3])
            : "l"(place), "r"(static_cast<int>(there))
            : "memory");
    } else {
        asm volatile(
            "{.reg .pred p; setp.ne.s32 p, %3, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
            " @p ld.v2.f32 {%0, %1}, [%2];}"
            : "=&f"(x[0]), "=&f"(x[1])
            : "l"(place), "r"(static_cast<int>(there))
            : "memory");
    }
}

// All splits in their order, a warp for a row. Not `real`: one warp runs through it and nothing comes of it, but its
// code is then at hand.
__device__ __forceinline__ void combine(const Params& p, Shared& shared, const Job& job, bool real) {
    static_assert(kMaxSplits == 32 && 32 % kFlight == 0);  // a lane each
    const int lane = threadIdx.x % 32, rows = real ? p.tokens * p.group : 1, splits = job.splits;
    const i64 step = real ? rows * kPart : 0;
    float* const waste = shared.waste + 4 * lane;
    float v_descale = 1.f;
    if (p.v_descale != nullptr) {
        v_descale = p.v_descale[static_cast<i64>(job.sequence) * p.v_descale_stride_b +
                                job.kv_head * p.v_descale_stride_h];
    }
#pragma unroll 1
    for (int r = real ? threadIdx.x / 32 : 0; r < rows; r += kConsumers / 32) {
        const float* part = real ? p.partial + (job.head(p) * p.splits * rows + r) * kPart : shared.nothing;
        const bool wide = lane * kWidth < HEAD_DIM;
        float end[4], x[4] = {0.f, 0.f, 0.f, 0.f}, y[kFlight][4];
        load_numbers<4>(part + lane * step + HEAD_DIM, lane < splits, end);  // base, sum, bound, its base
        const float* piece = part + lane * kWidth;
        const auto ask = [&](int from) {
#pragma unroll
            for (int i = 0; i < kFlight; ++i, piece += step) load_numbers(piece, wide && from + i < splits, y[i]);
        };
        ask(0);
        const float base = lane < splits ? end[0] : kNoBase, sink = sink_log2(p, job, r);
        float top = max_or_nan(sink, base);
#pragma unroll
        for (int other = 16; other > 0; other /= 2) top = max_or_nan(top, __shfl_xor_sync(0xFFFFFFFF, top, other));
        const float factor = exp2_fast(base - top);
        float sum = end[1] * factor;
#if MASS
        float bound = end[2];
#endif
#pragma unroll
        for (int other = 16; other > 0; other /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
#if MASS
            bound += __shfl_xor_sync(0xFFFFFFFF, bound, other);
#endif
        }
        if (sink > -kInfinity) sum += exp2_fast(sink - top);
        const int query_head = job.kv_head * p.group + r % p.group;
        if (lane == 0) {
            float lse = sum == 0.f ? -kInfinity : (top + log2_fast(sum)) * kLn2;
            if (top == sink && sum == 1.f) lse = p.sinks[query_head];
            const i64 place = job.sequence * p.lse_stride_b + query_head * p.lse_stride_h + r / p.group;
            if (p.lse != nullptr) *(real ? p.lse + place : waste) = lse;
#if MASS
            if (bound != 0.f) bound *= exp2_fast(end[3] - top);
            if (p.mass_bound != nullptr) {
                *(real ? p.mass_bound + place : waste) = bound == 0.f ? 0.f : bound / (bound + sum);
            }
#endif
        }
#pragma unroll 1
        for (int from = 0; from < min(splits, kMaxSplits); from += kFlight) {
            if (from > 0) ask(from);
#pragma unroll
            for (int i = 0; i < kFlight; ++i) {
                const float of_split = __shfl_sync(0xFFFFFFFF, factor, from + i);
#pragma unroll
                for (int d = 0; d < kWidth; ++d) x[d] = __fmaf_rn(y[i][d], of_split, x[d]);
            }
        }
        if (sum == 0.f) x[0] = x[1] = x[2] = x[3] = 0.f;  // saw nothing, but perhaps 0 x NaN
        const float scale = sum == 0.f ? 0.f : __fdividef(v_descale, sum);
        u16* out = static_cast<u16*>(p.out) + job.sequence * p.out_stride_b + r / p.group * p.out_stride_s +
                   query_head * p.out_stride_h + lane * kWidth;
        if (!real) out = reinterpret_cast<u16*>(waste);
        const u32 first = pack_out(x[0] * scale, x[1] * scale);
        [[maybe_unused]] const u32 second = pack_out(x[2] * scale, x[3] * scale);
        if (!wide) continue;
        if (kWidth == 4) {
            asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(out), "r"(first), "r"(second) : "memory");
        } else {
            asm volatile("st.b32 [%0], %1;" ::"l"(out), "r"(first) : "memory");
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    // From one lane, so that the compiler knows that all of the warp goes the same way.
    const int used = __shfl_sync(0xFFFFFFFF, p.seqused != nullptr ? p.seqused[blockIdx.z] : p.seqlen_k, 0);
    const int leftpad = __shfl_sync(0xFFFFFFFF, p.leftpad != nullptr ? p.leftpad[blockIdx.z] : 0, 0);
    const float threshold = SKIP ? p.threshold[static_cast<i64>(blockIdx.z) * p.threshold_stride] : 0.f;
    const u32 query = shared_address(memory);
    const u32 keys = query + (kQueryBytes + 1023) / 1024 * 1024;
    const u32 values = keys + p.stages * kTileBytes;
    const u32 weights = values + kSlots * kTileBytes;
    Shared& shared = *reinterpret_cast<Shared*>(memory + (weights - query) + kSlots * kWeightBytes);
    if (threadIdx.x == 0) {
        tma_prefetch(&p.k);
        tma_prefetch(&p.v);
        if (query % 1024 != 0) __trap();
        for (int i = 0; i < p.stages; ++i) {
            barrier_init(shared_address(&shared.key_full[i]), 1);
            barrier_init(shared_address(&shared.key_empty[i]), 4 * kGroups);
        }
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(shared_address(&shared.value_full[i]), 1);
            barrier_init(shared_address(&shared.value_empty[i]), 4 * kGroups);
        }
        for (int i = 0; SKIP && i < kDecisions; ++i) barrier_init(shared_address(&shared.decided[i]), 1);
        shared.raise[0] = shared.raise[1] = 0;
        barrier_init_fence();
    }
    const Job found(p, used, leftpad);
    if (found.split >= found.splits) return;
    if (kSharedJob && threadIdx.x == 0) *reinterpret_cast<Job*>(shared.job) = found;
    __syncthreads();
    const Job& job = kSharedJob ? *reinterpret_cast<const Job*>(shared.job) : found;
    if (threadIdx.x >= kConsumers) {
        if (kGroups == 2) registers_down<kProducerRegisters>();
        if (threadIdx.x < kConsumers + 32) produce(p, shared, job, keys, values);
        if (kGroups == 2) return;
    } else {
        if (kGroups == 2) registers_up<kConsumerRegisters>();
        const int w = kGroups == 1 ? 0 : __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
        const u32 rows_before = w * kColumns * kRowBytes;
        Consumer{p, shared, job, w, query + rows_before, keys, values, weights + rows_before}.run(threshold);
    }
    // Before it ends, the producer warp goes through what the last CTA has to do.
    const bool rehearses = threadIdx.x >= kConsumers;
#pragma unroll 1
    for (int turn = rehearses ? 0 : 1; turn < 2; ++turn) {
        if (turn == 1) {
            if (rehearses) return;
            named_sync(kVoteBarrier, kConsumers);
            bool last = true;
            if (threadIdx.x == 0) {
                int* arrivals = p.arrivals + job.head(p);
                last = add_acquire_release(arrivals, 1) == job.splits - 1;
                if (last) *arrivals = 0;
            }
            if (!named_all(kVoteBarrier, kConsumers, last)) return;
#if SKIP
            const int words = p.tokens * p.group * kWords;
            for (int i = threadIdx.x; i < words; i += kConsumers) p.messages[job.head(p) * words + i] = 0;
#endif
        }
        combine(p, shared, job, turn == 1);
    }
}
