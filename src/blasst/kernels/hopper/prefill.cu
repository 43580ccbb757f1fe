// Prefill on Hopper: a CTA owns 128 query rows of one head, two consumer warpgroups of 64 rows each.
//
// Work of a CTA (persistent; work comes from a ticket counter, longest first): producer warps, one each,
// fetch Q, K and V, in tiles of 128 keys through TMA into rings of kStages; each consumer warpgroup visits the tiles in the
// order of the rule (first tile, then from the last leftwards). Scores are double buffered: while the tensor
// cores compute Q.K^T of the next tile, the warpgroup looks at the scores of this one. Skipping build: maxima,
// one vote of the 128 threads, and only for a kept tile exp, row sum and P.V. Nothing is in flight where
// branches meet: otherwise ptxas serialises every wgmma.
//
// Shared memory (head_dim 128): Q 32 KB, K and V 32 KB a stage. Registers of a consumer thread: O 64, scores
// 2 x 64, row state. Compile-time: HEAD_DIM, HEAD_DIM_V (64, 96, 128), BF16, SKIP, MASS, BUDGET, SOFTCAP, PAGED,
// STAGES, PARTS, TURNS. What is computed: docs/method.md.
#include "ptx.cuh"

namespace {

constexpr int kRows = 64;    // of a query tile: one warpgroup
constexpr int kKeys = 128;   // of a key tile
constexpr int kChunk = 64;   // elements of a row that are contiguous in shared memory (128 bytes)
constexpr int kStages = STAGES;
constexpr int kWorkSlots = 2;
// 128 x one + 256 x the other is what 384 threads get at launch, 168 each.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kParts = PARTS;  // of a kept tile: P.V of one runs while exp of the next is computed
constexpr int kChunksK = (HEAD_DIM + kChunk - 1) / kChunk;
constexpr int kChunksV = (HEAD_DIM_V + kChunk - 1) / kChunk;
constexpr u32 kChunkBytes = 128 * kChunk * 2;
constexpr u32 kQueryBytes = kChunksK * kChunkBytes;
constexpr u32 kKeyBytes = kChunksK * kChunkBytes;
constexpr u32 kValueBytes = kChunksV * kChunkBytes;
constexpr int kOut = HEAD_DIM_V / 2;  // registers of O
constexpr int kScores = kKeys / 2;    // registers of the scores of one tile
#define kInfinity __int_as_float(0x7F800000)

// Named barriers: 0 is __syncthreads.
constexpr int kVoteBarrier = 1;  // + warpgroup
constexpr int kTurnBarrier = 3;  // + warpgroup

struct Barriers {
    u64 key_full[kStages], key_empty[kStages];
    u64 value_full[kStages], value_empty[kStages];
    u64 value_raw;
    u64 query_full, query_empty;
    u64 work_full[kWorkSlots], work_empty[kWorkSlots];
};

// What the consumers need to know of a tile in the ring: its number and these.
constexpr int kLast = 1;    // no tile of this work follows
constexpr int kActive = 2;  // << warpgroup: its query tile visits the key tile here
constexpr int kEdge = 8;    // << warpgroup: not every row sees every key, or some row does not exist
constexpr int kTileShift = 5;

// One query block of one head of one sequence.
struct Work {
    int sequence;   // -1: no more work
    int head;
    int block;      // of 128 rows
    int row_base;   // where the sequence's rows begin in q
    int rows;       // of the sequence
    int key_base;   // where its keys begin in k
    int keys;
    int kv_head;
    u8* kept[2];    // rows of the kept map, if there is one

    // Which key tiles the two query tiles of the block visit, and in which order.
    int first[2], last[2];           // of each query tile; last = -1: none
    int whole_from[2], whole_to[2];  // keys that every row sees; none if a row does not exist
    int start;                       // tile visited first
    int extra;                       // 1: the lower query tile starts one tile later, which is fetched second
    int end;                         // tile visited after these
    int count;                       // tiles to visit
    int plain_from, plain_to;        // tiles that both query tiles visit in turn and see whole

    __device__ __forceinline__ void plan(int window_left, int window_right) {
        const int shift = keys - rows;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int row_first = (2 * block + w) * kRows;
            const int row_last = min(row_first + kRows, rows) - 1;
            const int low = max(row_first + shift - window_left, 0);
            const int high = min(row_last + shift + window_right + 1, keys);
            const bool sees = row_first < rows && high > low;
            first[w] = sees ? low / kKeys : 0;
            last[w] = sees ? (high - 1) / kKeys : -1;
            whole_from[w] = row_last + shift - window_left;
            whole_to[w] = row_first + kRows > rows ? 0 : min(row_first + shift + window_right + 1, keys);
        }
        const bool sees0 = last[0] >= 0, sees1 = last[1] >= 0;
        start = sees0 ? first[0] : first[1];
        end = max(last[0], last[1]);
        extra = sees0 && sees1 && first[1] != first[0];
        count = sees0 || sees1 ? 1 + extra + end - start : 0;
        plain_from = max(max(first[0], first[1]) + 1, (max(max(whole_from[0], whole_from[1]), 0) + kKeys - 1) / kKeys);
        plain_to = min(min(last[0], last[1]) + 1, min(whole_to[0], whole_to[1]) / kKeys);
    }

    // For the consumers: tile and flags.
    __device__ __forceinline__ int describe(int position, int t, bool is_last) const {
        int word = t << kTileShift | (is_last ? kLast : 0);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const bool active = position == 0            ? last[w] >= 0 && first[w] == start
                                : extra && position == 1 ? w == 1
                                                         : t > first[w] && t <= last[w];
            const bool whole = active && t * kKeys >= whole_from[w] && (t + 1) * kKeys <= whole_to[w];
            word |= (active ? kActive << w : 0) | (whole ? 0 : kEdge << w);
        }
        return word;
    }
};

// The tiles of a work in their order.
struct Order {
    int left, tile;
    int lead;  // tiles before the walk from right to left

    __device__ __forceinline__ explicit Order(const Work& work)
        : left(work.count), tile(work.start), lead(1 + work.extra) {}
    __device__ __forceinline__ void next(const Work& work) {
        --left;
        if (lead == 0) {
            --tile;
        } else {
            tile = --lead == 0 ? work.end : tile + 1;
        }
    }
};

struct Shared {
    Barriers barriers;
    Work work[kWorkSlots];
    int tiles[kStages];
};

}  // namespace

struct Params {
    TensorMap q, k, v;
    void* out;
    float* lse;
    float* mass;
    u8* kept;
    i64* skipped;
    i64* visited;
    const float* threshold;
    const float* sinks;
    const int* cu_q;
    const int* cu_k;
    const int* seqused;
    const int* leftpad;
    const int* table;
    int* ticket;
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;
    int table_stride, threshold_stride;
    int batch, num_heads, group;
    int seqlen_q, seqlen_k;
    int blocks;             // of 128 rows per sequence; packed: slots
    int section;            // query heads whose work is handed out together
    int total;
    int page_shift;         // log2 of the page size
    int window_left, window_right;
    int dense_tail;  // rows at the end of a sequence whose query tiles skip nothing
    int query_tiles, key_tiles;  // of the kept map
    int guard_values;       // values beyond a sequence may be anything
    float scale_log2;       // exponent per unit of score, base 2
    float unit;             // natural units per unit of score
    float score_factor, score_cap;
    float eps;
};

namespace {

// Works so far, and the phase of the Q barriers, in one register.
struct Turns {
    u32 word = 0;
    __device__ __forceinline__ u32 slot() const { return word / 2 % kWorkSlots; }
    __device__ __forceinline__ u32 phase() const { return word / 2 / kWorkSlots % 2; }
    __device__ __forceinline__ u32 query_phase() const { return word % 2; }
    __device__ __forceinline__ void next_work() { word += 2; }
    __device__ __forceinline__ void next_query() { word ^= 1; }
};

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// --- producer ---------------------------------------------------------------------------------------------

// Work number -> query block. A section's heads share K and V in the L2 cache; long blocks come first.
__device__ __forceinline__ void find_work(const Params& p, int number, Work& work) {
    work.sequence = -1;
    if (number >= p.total) return;
    const int per_section = p.section * p.blocks;
    const int section = number / per_section;
    const int rest = number - section * per_section;
    const int slot = p.blocks - 1 - rest / p.section;
    const int outer = section * p.section + rest % p.section;
    work.head = outer % p.num_heads;
    work.kv_head = work.head / p.group;
    work.block = slot;
    work.key_base = 0;
    work.keys = p.seqlen_k;
    if (p.cu_q != nullptr) {
        int low = 0, high = p.batch;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (p.cu_q[middle] / (2 * kRows) + middle <= slot) low = middle; else high = middle;
        }
        work.sequence = low;
        work.row_base = p.cu_q[low];
        work.rows = p.cu_q[low + 1] - work.row_base;
        work.block = slot - (work.row_base / (2 * kRows) + low);
    } else {
        work.sequence = outer / p.num_heads;
        work.row_base = 0;
        work.rows = p.seqlen_q;
    }
    if (p.cu_k != nullptr) {
        const int begin = p.cu_k[work.sequence];
        work.keys = p.cu_k[work.sequence + 1] - begin;
        if (!PAGED) work.key_base = begin;
    }
    if (p.seqused != nullptr) work.keys = p.seqused[work.sequence];
    if (p.leftpad != nullptr) {
        const int pad = p.leftpad[work.sequence];
        work.key_base += pad;
        work.keys -= pad;
    }
    if (p.kept != nullptr) {
        const i64 head = static_cast<i64>(work.sequence) * p.num_heads + work.head;
        work.kept[0] = p.kept + (head * p.query_tiles + 2 * work.block) * p.key_tiles;
        work.kept[1] = work.kept[0] + p.key_tiles;
    }
}

// One sequence's K or V of one head, fetched by one warp together.
template <int kChunks>
struct Source {
    const Params& p;
    const TensorMap* map;
    const Work& work;

    __device__ __forceinline__ Source(const Params& p, const TensorMap* map, const Work& work)
        : p(p), map(map), work(work) {}

    // A tile into shared memory; the barrier gets its bytes and one arrival.
    __device__ __forceinline__ void load(int tile, u32 target, u32 barrier) const {
        const int lane = threadIdx.x % 32;
        const int first = tile * kKeys;
        const int kv_head = work.kv_head;
#if PAGED
        // Lane i fetches box i of min(page_size, 128) keys.
        const int shift = min(p.page_shift, 7);
        const int boxes = (min(work.keys - first, kKeys) + (1 << shift) - 1) >> shift;
        if (lane == 0) barrier_expect(barrier, (boxes << shift) * kChunk * 2 * kChunks);
        __syncwarp();
        if (lane < boxes) {
            const int slot = first + (lane << shift);
            const int page = p.table[static_cast<i64>(work.sequence) * p.table_stride + (slot >> p.page_shift)];
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                tma_load(target + chunk * kChunkBytes + (lane << shift) * kChunk * 2, map, barrier, chunk * kChunk,
                         slot & ((1 << p.page_shift) - 1), kv_head, page);
            }
        }
#else
        const int row = work.key_base + first;
        const int sequence = p.cu_k != nullptr ? 0 : work.sequence;
        if (lane == 0) {
            barrier_expect(barrier, kChunks * kChunkBytes);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                tma_load(target + chunk * kChunkBytes, map, barrier, chunk * kChunk, row, kv_head, sequence);
            }
        }
#endif
        __syncwarp();
    }
};

// Values beyond the sequence become 0: 0 x NaN would reach every row.
__device__ __forceinline__ void clear_values(u32 target, int from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kChunksV; ++chunk) {
        const u32 begin = target + chunk * kChunkBytes + from * kChunk * 2;
        const u32 end = target + (chunk + 1) * kChunkBytes;
#pragma unroll 1
        for (u32 place = begin + lane * 16; place < end; place += 32 * 16) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0) : "memory");
        }
    }
    async_proxy_fence();
    __syncwarp();
}

// One warp: hands out work, fetches K.
__device__ __forceinline__ void produce_keys(const Params& p, Shared& shared, u32 keys) {
    const int lane = threadIdx.x % 32;
    Barriers& barriers = shared.barriers;
    Ring ring;
    Turns turns;
    while (true) {
        int number = 0;
        if (lane == 0) number = atomicAdd(p.ticket, 1);
        barrier_wait(shared_address(&barriers.work_empty[turns.slot()]), turns.phase() ^ 1);
        Work& work = shared.work[turns.slot()];
        __syncwarp();
        if (lane == 0) {
            find_work(p, number, work);
            if (work.sequence >= 0) work.plan(p.window_left, p.window_right);
        }
        __syncwarp();
        if (work.sequence >= 0 && work.block * 2 * kRows >= work.rows) continue;  // a slot without rows
        if (lane == 0) barrier_arrive(shared_address(&barriers.work_full[turns.slot()]));
        turns.next_work();
        if (work.sequence < 0) return;
        if (work.count == 0) continue;
        const Source<kChunksK> source(p, &p.k, work);
        for (Order order(work); order.left > 0; order.next(work), ring.next()) {
            int word = order.tile << kTileShift | kActive | kActive << 1 | (order.left == 1 ? kLast : 0);
            if (order.lead > 0 || order.tile < work.plain_from || order.tile >= work.plain_to) {
                word = work.describe(work.count - order.left, order.tile, order.left == 1);
            }
            barrier_wait(shared_address(&barriers.key_empty[ring.stage]), ring.phase ^ 1);
            if (lane == 0) shared.tiles[ring.stage] = word;
            source.load(order.tile, keys + ring.stage * kKeyBytes, shared_address(&barriers.key_full[ring.stage]));
        }
    }
}

// One warp: fetches V.
__device__ __forceinline__ void produce_values(const Params& p, Shared& shared, u32 values) {
    const int lane = threadIdx.x % 32;
    Barriers& barriers = shared.barriers;
    Ring ring;
    u32 raw_phase = 0;
    for (Turns turns;; turns.next_work()) {
        barrier_wait(shared_address(&barriers.work_full[turns.slot()]), turns.phase());
        const Work& work = shared.work[turns.slot()];
        if (work.sequence < 0) return;
        const Source<kChunksV> source(p, &p.v, work);
        for (Order order(work); order.left > 0; order.next(work), ring.next()) {
            const u32 full = shared_address(&barriers.value_full[ring.stage]);
            const u32 target = values + ring.stage * kValueBytes;
            barrier_wait(shared_address(&barriers.value_empty[ring.stage]), ring.phase ^ 1);
            if (p.guard_values && (order.tile + 1) * kKeys > work.keys) {
                const u32 raw = shared_address(&barriers.value_raw);
                source.load(order.tile, target, raw);
                barrier_wait(raw, raw_phase);
                raw_phase ^= 1;
                clear_values(target, work.keys - order.tile * kKeys);
                if (lane == 0) barrier_arrive(full);
            } else {
                source.load(order.tile, target, full);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&barriers.work_empty[turns.slot()]));
    }
}

// One warp: fetches Q.
__device__ __forceinline__ void produce_queries(const Params& p, Shared& shared, u32 query) {
    const int lane = threadIdx.x % 32;
    Barriers& barriers = shared.barriers;
    for (Turns turns;; turns.next_work()) {
        barrier_wait(shared_address(&barriers.work_full[turns.slot()]), turns.phase());
        const Work& work = shared.work[turns.slot()];
        if (work.sequence < 0) return;
        if (work.count > 0) {
            barrier_wait(shared_address(&barriers.query_empty), turns.query_phase() ^ 1);
            turns.next_query();
            if (lane == 0) {
                const u32 barrier = shared_address(&barriers.query_full);
                barrier_expect(barrier, kQueryBytes);
                const int sequence = p.cu_q != nullptr ? 0 : work.sequence;
#pragma unroll
                for (int chunk = 0; chunk < kChunksK; ++chunk) {
                    tma_load(query + chunk * kChunkBytes, &p.q, barrier, chunk * kChunk,
                             work.row_base + work.block * 2 * kRows, work.head, sequence);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&barriers.work_empty[turns.slot()]));
    }
}

// --- consumers --------------------------------------------------------------------------------------------

// State of the two rows of a thread: row r of the warpgroup's 64 is warp * 16 + lane / 4 (+ 8); a thread holds
// keys 8 n + 2 (lane % 4) and the next of each.
struct RowState {
    float maximum[2];
    float sum[2];    // of this thread's keys only
    float bound[2];  // of this thread's groups only
};

__device__ __forceinline__ float finite_base(float maximum, float scale_log2) {
    return maximum == -kInfinity ? 0.f : __fmul_rn(maximum, scale_log2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, 1));
    return max_or_nan(x, __shfl_xor_sync(0xFFFFFFFF, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Q.K^T of a tile, issued.
__device__ __forceinline__ void issue_scores(float (&s)[kScores], u64 query, u64 keys) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        const u32 offset = (i / 4 * kChunkBytes + i % 4 * 32) >> 4;
        Wgmma<kKeys>::ss<0, 0>(s, query + offset, keys + offset, i > 0);
    }
    wgmma_commit();
}

__device__ __forceinline__ void cap_scores(const Params& p, float (&s)[kScores]) {
#if SOFTCAP
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
        // cap * tanh(x) with tanh(x) = 1 - 2 / (exp(2 x) + 1)
        const float twice = exp2_fast(s[i] * p.score_factor);
        s[i] = __fmaf_rn(p.score_cap, -2.f / (twice + 1.f), p.score_cap);
    }
#endif
}

// Keys that a row sees, relative to the tile that begins at `first`.
struct Sight {
    int low, high;
    __device__ __forceinline__ Sight(const Params& p, int aligned, int keys, int first) {
        low = aligned - p.window_left - first;
        high = min(aligned + p.window_right + 1, keys) - first;
    }
    __device__ __forceinline__ bool nothing() const { return high <= max(low, 0) || low >= kKeys; }
};

// What the rows do not see becomes -inf.
__device__ __forceinline__ void mask_scores(float (&s)[kScores], const Sight (&sight)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int low = sight[r].low - column;
        const u32 width = max(sight[r].high - sight[r].low, 0);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (static_cast<u32>(8 * n + e - low) >= width) s[4 * n + 2 * r + e] = -kInfinity;
            }
        }
    }
}

// Maxima of this thread's keys of both rows.
__device__ __forceinline__ void thread_maxima(const float (&s)[kScores], float (&top)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float even = s[2 * r], odd = s[2 * r + 1];
#pragma unroll
        for (int n = 1; n < kKeys / 8; ++n) {
            even = max_or_nan(even, s[4 * n + 2 * r]);
            odd = max_or_nan(odd, s[4 * n + 2 * r + 1]);
        }
        top[r] = max_or_nan(even, odd);
    }
}

// Bound of the tile's mass over this thread's groups of 8 keys in one of its rows, relative to the row maximum.
__device__ __forceinline__ float thread_bound(
    const float (&s)[kScores], int r, float maximum, float scale_log2, const Sight& sight) {
    const float base = finite_base(maximum, scale_log2);
    const int low = sight.low - threadIdx.x % 4 * 2, high = sight.high - threadIdx.x % 4 * 2;
    float bound = 0.f;
#pragma unroll
    for (int g = 0; g < kKeys / 32; ++g) {
        float top = -kInfinity;
        int count = 0;
#pragma unroll
        for (int key = 32 * g; key < 32 * (g + 1); key += 8) {
            top = max_or_nan(top, max_or_nan(s[key / 2 + 2 * r], s[key / 2 + 2 * r + 1]));
            count += (key >= low && key < high) + (key + 1 >= low && key + 1 < high);
        }
        bound += count > 0 ? count * exp2_fast(__fmaf_rn(top, scale_log2, -base)) : 0.f;
    }
    return bound;
}

// New row maxima; what O, sums and bounds so far must be multiplied with.
__device__ __forceinline__ void raise_maxima(
    RowState& rows, const float (&top)[2], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float now = max_or_nan(rows.maximum[r], quad_max(top[r]));
        // The rounded products are what the exponents were taken from: a maximum that stays gives exactly 1.
        rescale[r] = exp2_fast(__fmul_rn(rows.maximum[r], scale_log2) - finite_base(now, scale_log2));
        rows.maximum[r] = now;
    }
}

__device__ __forceinline__ void scale_out(float (&o)[kOut], const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
}

// One query tile of a warpgroup.
struct Consumer {
    const Params& p;
    Shared& shared;
    const u32 keys, values;  // in shared memory
    const int w;             // warpgroup among the consumers
    u32 query;
    Ring ring;               // place of the tile whose scores are complete
    RowState rows;
    float o[kOut];
    float top[2];            // maxima of a tile over this thread's keys
    float cut;               // ln(threshold) in units of scores
    int skipped;
    bool dead;               // the tile that was decided last
    Turns turns;

    __device__ __forceinline__ void release(u64* barrier) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(barrier));
    }

    // Scores of the tile at a place of the ring, issued; returns its description.
    __device__ __forceinline__ int issue(float (&s)[kScores], const Ring& at) {
        barrier_wait(shared_address(&shared.barriers.key_full[at.stage]), at.phase);
        int word = 0;
        if (threadIdx.x % 32 == 0) word = shared.tiles[at.stage];  // the lane that gives the place back
        word = __shfl_sync(0xFFFFFFFF, word, 0);
        issue_scores(s, matrix_descriptor(query, 0), matrix_descriptor(keys + at.stage * kKeyBytes, 0));
        return word;
    }

    // The scores of a tile are complete: its K is free, after the last tile Q too.
    __device__ __forceinline__ void release_operands(int word, const Ring& at) const {
        release(&shared.barriers.key_empty[at.stage]);
        if (word & kLast) release(&shared.barriers.query_empty);
    }

    // Also for a tile that is left out, before its V is given back: a warpgroup that is far ahead would arrive twice where
    // the other has yet to arrive once, and V would be overwritten while it is read.
    __device__ __forceinline__ u64 wait_values() const {
        barrier_wait(shared_address(&shared.barriers.value_full[ring.stage]), ring.phase);
        return matrix_descriptor(values + ring.stage * kValueBytes, kChunkBytes);
    }

    __device__ __forceinline__ void mark_kept(int word) const {
        if (p.kept != nullptr && (word & kActive << w) && threadIdx.x % 128 == 0) work().kept[w][word >> kTileShift] = 1;
    }

    __device__ __forceinline__ const Work& work() const { return shared.work[turns.slot()]; }

    // First of this thread's two rows, in the query tile.
    static __device__ __forceinline__ int row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

    // Position of a row on the key axis.
    __device__ __forceinline__ int aligned(int r) const {
        return (2 * work().block + w) * kRows + row() + 8 * r + work().keys - work().rows;
    }

    // Keys of a tile that a row sees.
    __device__ __forceinline__ Sight sight(int word, int r) const {
        return Sight(p, aligned(r), word & kActive << w ? work().keys : 0, (word >> kTileShift) * kKeys);
    }

    __device__ __forceinline__ void bound_of(int word, const float (&s)[kScores], float (&bound)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) bound[r] = thread_bound(s, r, rows.maximum[r], p.scale_log2, sight(word, r));
    }

    // Softcap, masks, maxima and the vote of a tile whose scores are complete.
    __device__ __forceinline__ void decide(int word, float (&s)[kScores]) {
        cap_scores(p, s);
        int absent = 0;  // bit r: row r does not exist or sees nothing here
        if (__builtin_expect(word & kEdge << w, 0)) {
            const Sight sights[2] = {sight(word, 0), sight(word, 1)};
            mask_scores(s, sights);
#pragma unroll
            for (int r = 0; r < 2; ++r) absent |= (sights[r].nothing() || aligned(r) >= work().keys) << r;
        }
        thread_maxima(s, top);
#if SKIP
        bool agree = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) agree &= top[r] < rows.maximum[r] + cut || (absent & 1 << r);
#if BUDGET
        float share[2];
        bound_of(word, s, share);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = quad_sum(rows.bound[r] + share[r]);
            agree &= before <= p.eps * quad_sum(rows.sum[r]) || (absent & 1 << r);
        }
#endif
        dead = __all_sync(0xFFFFFFFF, named_all(kVoteBarrier + w, 128, agree));  // known to be uniform
#if MASS
        if (dead) {
#if !BUDGET
            float share[2];
            bound_of(word, s, share);
#endif
            rows.bound[0] += share[0];
            rows.bound[1] += share[1];
        }
#endif
#else
        // Not visited: neither weight 0 times NaN, nor a product with 1. (Without a branch ptxas 13.0 to 13.5 finds too
        // few registers.)
        dead = !(word & kActive << w);
#endif
    }

    // Counters, map and bound of a tile that was decided.
    __device__ __forceinline__ void record(int word) {
        if (dead) {
            skipped += (word & kActive << w) != 0;
        } else {
            mark_kept(word);
        }
    }

    __device__ __forceinline__ void take_turn() const {
        if (TURNS) named_sync(kTurnBarrier + w, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) named_arrive(kTurnBarrier + 1 - w, 256);
    }

    // Take a kept tile in: P.V is issued in kParts, each as soon as its part of P is there.
    __device__ __forceinline__ void absorb(float (&now)[kScores]) {
        constexpr int kBlocks = kKeys / 16 / kParts;  // of 16 keys in a part
        float factor[2], base[2], even[2], odd[2];
        raise_maxima(rows, top, p.scale_log2, factor);
        // Most tiles raise no maximum. At head_dim 64 the question costs more than the products.
        if (HEAD_DIM_V == 64 || !__all_sync(0xFFFFFFFF, factor[0] == 1.f && factor[1] == 1.f)) scale_out(o, factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            base[r] = finite_base(rows.maximum[r], p.scale_log2);
            even[r] = odd[r] = 0.f;
        }
        u64 place;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            u32 weights[4 * kBlocks];
#pragma unroll
            for (int n = 0; n < 2 * kBlocks; ++n) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = 4 * (part * 2 * kBlocks + n) + 2 * r;
                    const float a = exp2_fast(__fmaf_rn(now[i], p.scale_log2, -base[r]));
                    const float b = exp2_fast(__fmaf_rn(now[i + 1], p.scale_log2, -base[r]));
                    even[r] += a;
                    odd[r] += b;
                    weights[2 * n + r] = pack(a, b);
                }
            }
            if (part == 0) place = wait_values();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                Wgmma<HEAD_DIM_V>::rs<1>(o, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3],
                                         place + (((part * kBlocks + i) * 16 * kChunk * 2) >> 4), 1);
            }
        }
        wgmma_commit();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.sum[r] = __fmaf_rn(rows.sum[r], factor[r], even[r] + odd[r]);
#if MASS
            rows.bound[r] *= factor[r];
#endif
        }
    }

    // The tile with scores `now` is decided; on return the next one is. Returns its description.
    __device__ __forceinline__ int step(int word, float (&now)[kScores], float (&next)[kScores]) {
        Ring after = ring;
        after.next();
        const int next_word = issue(next, after);
        record(word);
        take_turn();
        if (!dead) {
            absorb(now);
            pass_turn();
            wgmma_wait<1>();
            pin(next);
            release_operands(next_word, after);
            decide(next_word, next);
            wgmma_wait<0>();
        } else {
            pass_turn();
            wait_values();
            wgmma_wait<0>();
            pin(next);
            release_operands(next_word, after);
            decide(next_word, next);
        }
        pin(o);
        release(&shared.barriers.value_empty[ring.stage]);
        ring = after;
        return next_word;
    }

    // The last tile.
    __device__ __forceinline__ void finish(int word, float (&now)[kScores]) {
        record(word);
        take_turn();
        if (!dead) {
            absorb(now);
            pass_turn();
            wgmma_wait<0>();
            pin(o);
        } else {
            pass_turn();
            wait_values();
        }
        release(&shared.barriers.value_empty[ring.stage]);
        ring.next();
    }

    // All tiles of a query tile that has any.
    __device__ __forceinline__ void attend() {
        float even[kScores], odd[kScores];
        int word = issue(even, ring);
        wgmma_wait<0>();
        pin(even);
        release_operands(word, ring);
        decide(word, even);
        while (true) {
            if (word & kLast) {
                finish(word, even);
                break;
            }
            word = step(word, even, odd);
            if (word & kLast) {
                finish(word, odd);
                break;
            }
            word = step(word, odd, even);
        }
    }

    // Write O of the query tile: four lanes share a row of the accumulator, 8 bytes a turn; after a transposition
    // each holds 16 bytes that lie together.
    __device__ __forceinline__ void store_out(const Work& work, const float (&inverse)[2]) const {
        const int turn = threadIdx.x % 4, row_first = (2 * work.block + w) * kRows;
        u8* out = static_cast<u8*>(p.out) +
                  2 * ((p.cu_q != nullptr ? 0 : work.sequence * p.out_stride_b) + work.head * p.out_stride_h);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = row_first + row() + 8 * r;
            u8* target = out + 2 * ((work.row_base + at) * p.out_stride_s + turn * 8);
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 32; ++i) {
                u32 x[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int first = 4 * (4 * i + n) + 2 * r;
                    x[n] = pack(o[first] * inverse[r], o[first + 1] * inverse[r]);
                }
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    const u32 other = __shfl_xor_sync(0xFFFFFFFF, turn % 2 ? x[n] : x[n + 1], 1);
                    (turn % 2 ? x[n] : x[n + 1]) = other;
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const u32 other = __shfl_xor_sync(0xFFFFFFFF, turn / 2 ? x[n] : x[n + 2], 2);
                    (turn / 2 ? x[n] : x[n + 2]) = other;
                }
                if (at < work.rows) {
                    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target + i * 64), "r"(x[0]),
                                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                                 : "memory");
                }
            }
        }
    }

    __device__ __forceinline__ float sink() const { return p.sinks != nullptr ? p.sinks[work().head] : -kInfinity; }

    // State of a query tile that has seen nothing.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            rows.maximum[r] = sink() / p.unit;
            rows.sum[r] = sink() > -kInfinity && threadIdx.x % 4 == 0 ? 1.f : 0.f;
            rows.bound[r] = 0.f;
        }
#if SKIP
        const i64 place = static_cast<i64>(work().sequence) * p.threshold_stride;
        const int last = work().rows - p.dense_tail;  // behind it no row may lie of a tile that skips
        const bool skips = p.threshold != nullptr && min((2 * work().block + w + 1) * kRows, work().rows) <= last;
        const float threshold = skips ? p.threshold[place] : 0.f;
        cut = threshold > 0.f ? logf(fminf(threshold, 1.f)) / p.unit : -kInfinity;
#endif
        skipped = 0;
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] = 0.f;
    }

    // Counters, lse, mass bound and O of the query tile.
    __device__ __forceinline__ void end() const {
        const Work& work = this->work();
        const int lane = threadIdx.x % 32, row_first = (2 * work.block + w) * kRows;
        if (p.visited != nullptr && threadIdx.x % 128 == 0) {
            const i64 head = static_cast<i64>(work.sequence) * p.num_heads + work.head;
            atomicAdd(reinterpret_cast<u64*>(p.visited + head), static_cast<u64>(work.last[w] - work.first[w] + 1));
            atomicAdd(reinterpret_cast<u64*>(p.skipped + head), static_cast<u64>(skipped));
        }
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(rows.sum[r]);
            inverse[r] = sum == 0.f ? 0.f : 1.f / sum;
            const int at = row_first + row() + 8 * r;
            const i64 place = (p.cu_q != nullptr ? 0 : work.sequence * p.lse_stride_b) + work.head * p.lse_stride_h +
                              work.row_base + at;
            float lse = sum == 0.f ? -kInfinity : __fmaf_rn(rows.maximum[r], p.unit, logf(sum));
            if (sum == 1.f && rows.maximum[r] == sink() / p.unit) lse = sink();
            if (lane % 4 == 0 && at < work.rows) p.lse[place] = lse;
#if MASS
            const float bound = quad_sum(rows.bound[r]);
            if (p.mass != nullptr && lane % 4 == 0 && at < work.rows) {
                p.mass[place] = bound == 0.f ? 0.f : bound / (bound + sum);
            }
#endif
        }
        store_out(work, inverse);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(shared_address(&shared.barriers.work_full[turns.slot()]), turns.phase());
            if (work().sequence < 0) return;
            begin();
            if (work().count > 0) {
                barrier_wait(shared_address(&shared.barriers.query_full), turns.query_phase());
                turns.next_query();
                attend();
            }
            asm volatile("" : "+r"(turns.word));  // what follows from it is cheaper to find again than to keep
            end();
            __syncwarp();
            release(&shared.barriers.work_empty[turns.slot()]);
            turns.next_work();
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1) prefill(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 query = shared_address(memory);
    const u32 keys = query + kQueryBytes;
    const u32 values = keys + kStages * kKeyBytes;
    Shared& shared = *reinterpret_cast<Shared*>(memory + kQueryBytes + kStages * (kKeyBytes + kValueBytes));
    Barriers& barriers = shared.barriers;
    if (threadIdx.x == 0) {
        if (query % 1024 != 0) __trap();
        for (int i = 0; i < kStages; ++i) {
            barrier_init(shared_address(&barriers.key_full[i]), 1);
            barrier_init(shared_address(&barriers.key_empty[i]), 8);
            barrier_init(shared_address(&barriers.value_full[i]), 1);
            barrier_init(shared_address(&barriers.value_empty[i]), 8);
        }
        barrier_init(shared_address(&barriers.value_raw), 1);
        barrier_init(shared_address(&barriers.query_full), 1);
        barrier_init(shared_address(&barriers.query_empty), 8);
        for (int i = 0; i < kWorkSlots; ++i) {
            barrier_init(shared_address(&barriers.work_full[i]), 1);
            barrier_init(shared_address(&barriers.work_empty[i]), 10);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<kProducerRegisters>();
        if (threadIdx.x < 32) {
            produce_keys(p, shared, keys);
        } else if (threadIdx.x < 64) {
            produce_values(p, shared, values);
        } else if (threadIdx.x < 96) {
            produce_queries(p, shared, query);
        }
    } else {
        registers_up<kConsumerRegisters>();
        const int w = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) - 1;  // known to be uniform
        if (TURNS && w == 1) named_arrive(kTurnBarrier, 256);
        Consumer{p, shared, keys, values, w, query + w * kRows * kChunk * 2}.run();
    }
}
