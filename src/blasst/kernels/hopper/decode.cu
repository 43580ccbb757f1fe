// Decode on Hopper: 1 to 8 new tokens of a sequence against its cache; bound by the bytes of K and of the V kept.
//
// A CTA owns one split of the keys of one KV head of one sequence; its rows are all query heads of the KV head at
// all new positions (up to kRows). One producer warp fetches K tiles of 64 keys through TMA; two consumer
// warpgroups take them in turns. K is the A operand (64 keys = M), Q the B operand (rows = N): scores^T. The
// decision of a tile needs the anchors alone (docs/method.md): every CTA scores the first and the last two
// visible tiles itself, so no split depends on another. Only for a kept tile V is fetched, by the warpgroup that
// kept it, into its own slots; P.V follows up to kSlots kept tiles later, so nobody waits for the load. Exponents are
// taken relative to the anchors' maximum, which a kept tile may exceed: then (rarely) the base is raised.
// Split boundaries are a function of the sequence's length and the KV heads alone. The last CTA of a KV head
// combines the splits in their order.
//
// Compile-time: HEAD_DIM (64, 96, 128), BF16, ROWS (8 to 128), SKIP, SOFTCAP, PAGED, KEY_STAGES, SLOTS.
#include "ptx.cuh"

#define kInfinity __int_as_float(0x7F800000)

namespace {

constexpr int kRows = ROWS;
constexpr int kKeys = 64;
constexpr int kChunk = 64;
constexpr int kChunks = (HEAD_DIM + kChunk - 1) / kChunk;
constexpr u32 kTileChunkBytes = kKeys * kChunk * 2;
constexpr u32 kTileBytes = kChunks * kTileChunkBytes;
constexpr u32 kQueryChunkBytes = kRows * kChunk * 2;
constexpr u32 kQueryBytes = kChunks * kQueryChunkBytes;
constexpr u32 kWeightBytes = kRows * kKeys * 2;
constexpr int kStages = KEY_STAGES;
constexpr int kSlots = SLOTS;       // kept tiles of a warpgroup whose P.V is still to come
constexpr int kScores = kRows / 2;  // registers of the scores of one tile, and of 64 rows of O^T
constexpr int kColumns = kRows / 4; // query rows of which a thread sees scores
constexpr int kMaxAnchors = 8;
// Exponents may exceed the base by this much (base 2) before it is raised: P must stay finite in its dtype.
constexpr float kHeadroom = BF16 ? 64.f : 12.f;

struct Shared {
    u64 key_full[kStages], key_empty[kStages];
    u64 value_full[2][kSlots];
    float maxima[8][kRows];  // of each warp
    float sums[8][kRows];
    int last;
};

}  // namespace

struct Params {
    TensorMap k, v;
    const void* q;
    void* out;
    float* lse;
    float* partial;  // (batch, KV heads, splits, HEAD_DIM + 2, kRows): O^T, base, sum
    int* arrivals;   // (batch, KV heads), zero before and after
    u8* kept;
    i64* skipped;
    i64* visited;
    const float* threshold;
    const float* sinks;
    const int* seqused;
    const int* leftpad;
    const int* table;
    i64 q_stride_b, q_stride_s, q_stride_h;
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;
    int table_stride, threshold_stride;
    int num_kv_heads, group, tokens;
    int seqlen_k;
    int splits;         // upper bound, of the grid and the partial results
    int wanted_splits;  // of a long sequence
    int min_tiles;      // of a split
    int page_shift;
    int window_left, window_right;
    int key_tiles;      // of the kept map
    int guard_values;
    float scale_log2, unit, score_factor, score_cap;
};

namespace {

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

// What a CTA works on; the same for all its threads.
struct Job {
    int sequence, kv_head, split, splits;
    int keys, base;         // of the sequence: how many, first slot
    int first, last;        // tiles that some row sees
    int head_anchors;       // tiles from `first` that are anchors
    int tail_anchor;        // tiles from here on are anchors
    int begin, end;         // tiles of this split
    int anchors;

    __device__ __forceinline__ explicit Job(const Params& p) {
        split = blockIdx.x;
        kv_head = blockIdx.y;
        sequence = blockIdx.z;
        keys = p.seqused != nullptr ? p.seqused[sequence] : p.seqlen_k;
        base = 0;
        if (p.leftpad != nullptr) {
            base = p.leftpad[sequence];
            keys -= base;
        }
        // Rows slide by one key: the first token sees from here, the last one to there.
        const int shift = keys - p.tokens;
        const int low = max(shift - p.window_left, 0);
        const int high = min(shift + p.tokens - 1 + p.window_right + 1, keys);
        first = 0;
        last = -1;
        head_anchors = tail_anchor = 0;
        if (high > low) {
            first = low / kKeys;
            last = (high - 1) / kKeys;
            // First tiles of all rows, last two of all rows (rows that see nothing have none).
            const int last_low = min(max(shift + p.tokens - 1 - p.window_left, 0), keys - 1);
            const int seeing = max(0, -(shift + p.window_right));  // first token that sees a key
            const int first_high = min(shift + seeing + p.window_right + 1, keys);
            head_anchors = min(last_low / kKeys, last) - first + 1;
            tail_anchor = max((first_high - 1) / kKeys - 1, first);
        }
        const int tiles = last - first + 1;
        const int each = max(p.min_tiles, (tiles + p.wanted_splits - 1) / p.wanted_splits);
        splits = max((tiles + each - 1) / each, 1);
        begin = first + split * each;
        end = min(begin + each, last + 1);
        anchors = tiles <= 0 ? 0 : min(head_anchors + last - max(tail_anchor, first + head_anchors) + 1, tiles);
    }

    __device__ __forceinline__ int anchor(int i) const {
        return i < head_anchors ? first + i : max(tail_anchor, first + head_anchors) + i - head_anchors;
    }
    __device__ __forceinline__ bool is_anchor(int tile) const {
        return tile < first + head_anchors || tile >= tail_anchor;
    }
};

// Fetch a tile; one warp together (lane < 32).
__device__ __forceinline__ void load_tile(
    const Params& p, const TensorMap* map, const Job& job, int tile, u32 target, u32 barrier, int lane) {
    const int slot_first = tile * kKeys;
#if PAGED
    const int shift = min(p.page_shift, 6);
    const int boxes = (min(job.keys - slot_first, kKeys) + (1 << shift) - 1) >> shift;
    if (lane == 0) barrier_expect(barrier, (boxes << shift) * kChunk * 2 * kChunks);
    __syncwarp();
    if (lane < boxes) {
        const int slot = slot_first + (lane << shift);
        const int page = p.table[static_cast<i64>(job.sequence) * p.table_stride + (slot >> p.page_shift)];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            tma_load(target + chunk * kTileChunkBytes + (lane << shift) * kChunk * 2, map, barrier, chunk * kChunk,
                     slot & ((1 << p.page_shift) - 1), job.kv_head, page);
        }
    }
#else
    if (lane == 0) {
        barrier_expect(barrier, kTileBytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            tma_load(target + chunk * kTileChunkBytes, map, barrier, chunk * kChunk, job.base + slot_first, job.kv_head,
                     job.sequence);
        }
    }
#endif
}


__device__ __forceinline__ float finite(float maximum) { return maximum == -kInfinity ? 0.f : maximum; }

// Over the 8 lanes that hold keys of the same query rows.
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

// One consumer warpgroup. A thread sees keys 16 warp + lane / 4 (+ 8) of a tile and query rows 8 i + 2 (lane % 4) + e,
// in its arrays at 2 i + e.
struct Consumer {
    const Params& p;
    Shared& shared;
    const Job& job;
    const int w;
    const u32 query, keys, values, weights;  // in shared memory; values and weights: of this warpgroup
    Ring ring;
    float cut;
    float bound[kColumns];  // scores below it need not be kept
    float base[kColumns];   // of the exponents, base 2
    float sum[kColumns];    // over this thread's keys
    float o[kChunks][kScores];
    int issued = 0, done = 0;  // kept tiles
    int ragged = -1;           // number of the kept tile that reaches beyond the sequence
    int skipped = 0;

    __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
    __device__ __forceinline__ int row(int column) const { return column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2; }
    __device__ __forceinline__ int rows() const { return p.tokens * p.group; }
    __device__ __forceinline__ int key(int half) const { return thread() / 32 * 16 + thread() % 32 / 4 + 8 * half; }

    __device__ __forceinline__ void score(float (&s)[kScores]) {
        barrier_wait(shared_address(&shared.key_full[ring.stage]), ring.phase);
        const u64 a = matrix_descriptor(keys + ring.stage * kTileBytes, 0), b = matrix_descriptor(query, 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
            WgmmaSs<kRows, 0>::run(s, a + ((i / 4 * kTileChunkBytes + i % 4 * 32) >> 4),
                                   b + ((i / 4 * kQueryChunkBytes + i % 4 * 32) >> 4), i > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&shared.key_empty[ring.stage]));
#if SOFTCAP
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const float twice = exp2_fast(s[i] * p.score_factor);
            s[i] = __fmaf_rn(p.score_cap, -2.f / (twice + 1.f), p.score_cap);
        }
#endif
    }

    // Whether some row does not see some key of the tile.
    __device__ __forceinline__ bool edge(int tile) const {
        const int shift = job.keys - p.tokens;
        return tile * kKeys < shift + p.tokens - 1 - p.window_left ||
               (tile + 1) * kKeys > min(shift + p.window_right + 1, job.keys);
    }

    __device__ __forceinline__ void mask(int tile, float (&s)[kScores]) const {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const int position = job.keys - p.tokens + row(column) / p.group;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = tile * kKeys + key(half);
                const bool sees = k >= position - p.window_left && k < min(position + p.window_right + 1, job.keys);
                if (!sees) s[column / 2 * 4 + 2 * half + column % 2] = -kInfinity;
            }
        }
    }

    static __device__ __forceinline__ float of(const float (&s)[kScores], int column, int half) {
        return s[column / 2 * 4 + 2 * half + column % 2];
    }

    // Maxima over a whole warpgroup's (or both warpgroups') keys, from those of the threads.
    __device__ __forceinline__ void share_maxima(float (&top)[kColumns], int warps, int barrier, int threads) {
        const int warp = threadIdx.x / 32;
        named_sync(barrier, threads);  // the last ones have been read
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const float x = keys_max(top[column]);
            if (threadIdx.x % 32 < 4) shared.maxima[warp][row(column)] = x;
        }
        named_sync(barrier, threads);
        const int begin = warps == 8 ? 0 : 4 * w;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            top[column] = shared.maxima[begin][row(column)];
            for (int other = 1; other < warps; ++other) {
                top[column] = max_or_nan(top[column], shared.maxima[begin + other][row(column)]);
            }
        }
    }

    // Scores of the anchors: the bound of every row and the base of its exponents.
    __device__ __forceinline__ void look_at_anchors() {
        float top[kColumns];
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const int head = job.kv_head * p.group + row(column) % p.group;
            top[column] = p.sinks != nullptr && row(column) < rows() ? p.sinks[head] / p.unit : -kInfinity;
            sum[column] = 0.f;
        }
        for (int i = 0; i < job.anchors; ++i, ring.next()) {
            if (i % 2 != w) continue;
            float s[kScores];
            score(s);
            if (edge(job.anchor(i))) mask(job.anchor(i), s);
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
                top[column] = max_or_nan(top[column], max_or_nan(of(s, column, 0), of(s, column, 1)));
            }
        }
        share_maxima(top, 8, 3, 256);
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            bound[column] = top[column] + cut;
            base[column] = __fmul_rn(finite(top[column]), p.scale_log2);
        }
    }

    // P.V of the kept tile that has waited longest.
    __device__ __forceinline__ void drain() {
        const int slot = done % kSlots;
        const u32 place = values + slot * kTileBytes;
        barrier_wait(shared_address(&shared.value_full[w][slot]), done / kSlots % 2);
        if (done == ragged) {  // values beyond the sequence may be anything, 0 x NaN would reach every row
            const int from = job.keys % kKeys;
            for (int i = thread(); i < kChunks * (kKeys - from) * 8; i += 128) {
                const int chunk = i / ((kKeys - from) * 8), piece = i % ((kKeys - from) * 8);
                const u32 target = place + chunk * kTileChunkBytes + from * kChunk * 2 + piece * 16;
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(0) : "memory");
            }
            async_proxy_fence();
            named_sync(1 + w, 128);
        }
        const u64 b = matrix_descriptor(weights + slot * kWeightBytes, 0);
        wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const u64 a = matrix_descriptor(place + chunk * kTileChunkBytes, kTileChunkBytes);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                WgmmaSs<kRows, 1>::run(o[chunk], a + ((i * 16 * kChunk * 2) >> 4), b + ((i * 32) >> 4), 1);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) pin(o[chunk]);
        ++done;
    }

    __device__ __forceinline__ void drain_all() {
        named_sync(1 + w, 128);  // the last weights are there
        while (done < issued) drain();
    }

    // A kept tile lies far above the anchors: everything so far is put relative to its maximum.
    __device__ __forceinline__ void raise(const float (&s)[kScores]) {
        drain_all();
        float top[kColumns];
#pragma unroll
        for (int column = 0; column < kColumns; ++column) top[column] = max_or_nan(of(s, column, 0), of(s, column, 1));
        share_maxima(top, 4, 1 + w, 128);
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const float now = max_or_nan(base[column], __fmul_rn(finite(top[column]), p.scale_log2));
            const float factor = exp2_fast(base[column] - now);
            base[column] = now;
            sum[column] *= factor;
            // O^T: its columns are the query rows.
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
                for (int half = 0; half < 2; ++half) o[chunk][column / 2 * 4 + 2 * half + column % 2] *= factor;
            }
        }
    }

    __device__ __forceinline__ void step(int tile) {
        float s[kScores];
        score(s);
        const bool ragged_edge = edge(tile);
        if (ragged_edge) mask(tile, s);
        if (issued - done == kSlots) drain();
        bool dead = false;
#if SKIP
        bool agree = true;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            bool below = of(s, column, 0) < bound[column] && of(s, column, 1) < bound[column];
            if (ragged_edge) {  // what a row does not see has no say
                below = (of(s, column, 0) < bound[column] || of(s, column, 0) == -kInfinity) &&
                        (of(s, column, 1) < bound[column] || of(s, column, 1) == -kInfinity);
            }
            agree &= below || row(column) >= rows();
        }
        agree &= !job.is_anchor(tile);
        dead = named_all(1 + w, 128, agree);
#else
        named_sync(1 + w, 128);
#endif
        if (dead) {
            ++skipped;
            return;
        }
        if (p.kept != nullptr && thread() == 0) {
            p.kept[(static_cast<i64>(job.sequence) * p.num_kv_heads + job.kv_head) * p.key_tiles + tile] = 1;
        }
        const int slot = issued % kSlots;
        if (thread() < 32) {
            load_tile(p, &p.v, job, tile, values + slot * kTileBytes, shared_address(&shared.value_full[w][slot]),
                      threadIdx.x % 32);
        }
        if (p.guard_values && (tile + 1) * kKeys > job.keys) ragged = issued;
        bool over = false;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const float top = fmaxf(of(s, column, 0), of(s, column, 1));
            over |= __fmaf_rn(top, p.scale_log2, -base[column]) > kHeadroom && row(column) < rows();
        }
        if (!named_all(1 + w, 128, !over)) raise(s);
        const int lane = threadIdx.x % 32;
        const u32 place = weights + slot * kWeightBytes;
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
            float weight[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                weight[x] = exp2_fast(__fmaf_rn(s[4 * i + x], p.scale_log2, -base[2 * i + x % 2]));
            }
            sum[2 * i] += weight[0] + weight[2];
            sum[2 * i + 1] += weight[1] + weight[3];
            const int r = 8 * i + lane % 8, unit = thread() / 32 * 2 + lane / 8 % 2;
            store_transposed(place + r * 128 + (unit ^ (r % 8)) * 16, pack(weight[0], weight[1]),
                             pack(weight[2], weight[3]));
        }
        async_proxy_fence();
        ++issued;
    }

    // O^T, base and sum of this warpgroup's part of the split.
    __device__ __forceinline__ void store_partial() {
        const i64 part = ((static_cast<i64>(job.sequence) * p.num_kv_heads + job.kv_head) * p.splits + job.split) * 2 + w;
        float* target = p.partial + part * (HEAD_DIM + 2) * kRows;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int d = chunk * kChunk + key(half);
                    if (d < HEAD_DIM) target[d * kRows + row(column)] = of(o[chunk], column, half);
                }
            }
        }
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const float x = keys_sum(sum[column]);
            if (threadIdx.x % 32 < 4) shared.sums[warp][row(column)] = x;
            if (warp % 4 == 0 && threadIdx.x % 32 < 4) target[HEAD_DIM * kRows + row(column)] = base[column];
        }
        named_sync(1 + w, 128);
        if (thread() < kRows) {
            const int first = 4 * w;
            target[(HEAD_DIM + 1) * kRows + thread()] =
                (shared.sums[first][thread()] + shared.sums[first + 1][thread()]) +
                (shared.sums[first + 2][thread()] + shared.sums[first + 3][thread()]);
        }
    }

    __device__ __forceinline__ void run() {
#if SKIP
        const float threshold = p.threshold[static_cast<i64>(job.sequence) * p.threshold_stride];
        cut = threshold > 0.f ? logf(fminf(threshold, 1.f)) / p.unit : -kInfinity;
#else
        cut = -kInfinity;
#endif
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[chunk][i] = 0.f;
        }
        look_at_anchors();
        for (int tile = job.begin; tile < job.end; ++tile, ring.next()) {
            if ((tile - job.begin) % 2 == w) step(tile);
        }
        drain_all();
        store_partial();
        if (p.skipped != nullptr && thread() == 0) {
            const i64 head = static_cast<i64>(job.sequence) * p.num_kv_heads + job.kv_head;
            atomicAdd(reinterpret_cast<u64*>(p.skipped + head), static_cast<u64>(skipped));
            if (job.split == 0 && w == 0) p.visited[head] = job.last - job.first + 1;
        }
    }
};

// Fetch K: the anchors, then the split.
__device__ __forceinline__ void produce(const Params& p, Shared& shared, const Job& job, u32 keys) {
    const int lane = threadIdx.x % 32;
    Ring ring;
    const int tiles = max(job.end - job.begin, 0);
    for (int i = 0; i < job.anchors + tiles; ++i, ring.next()) {
        const int tile = i < job.anchors ? job.anchor(i) : job.begin + i - job.anchors;
        barrier_wait(shared_address(&shared.key_empty[ring.stage]), ring.phase ^ 1);
        load_tile(p, &p.k, job, tile, keys + ring.stage * kTileBytes, shared_address(&shared.key_full[ring.stage]), lane);
        __syncwarp();
    }
}

// Q of all rows, swizzled; rows that do not exist are 0.
__device__ __forceinline__ void load_queries(const Params& p, const Job& job, u32 query) {
    constexpr int kPieces = HEAD_DIM / 8;  // of 16 bytes
    const u16* source = static_cast<const u16*>(p.q) + job.sequence * p.q_stride_b;
    for (int i = threadIdx.x; i < kRows * kPieces; i += blockDim.x) {
        const int r = i / kPieces, piece = i % kPieces;
        u32 x = 0, y = 0, z = 0, u = 0;
        if (r < p.tokens * p.group) {
            const u16* place = source + r / p.group * p.q_stride_s +
                               (job.kv_head * p.group + r % p.group) * p.q_stride_h + piece * 8;
            asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x), "=r"(y), "=r"(z), "=r"(u)
                         : "l"(place));
        }
        const u32 target = query + piece / 8 * kQueryChunkBytes + r * 128 + ((piece % 8) ^ (r % 8)) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(x), "r"(y), "r"(z), "r"(u)
                     : "memory");
    }
    async_proxy_fence();
}

// The parts of all splits in their order.
__device__ __forceinline__ void combine(const Params& p, const Job& job) {
    const i64 head = static_cast<i64>(job.sequence) * p.num_kv_heads + job.kv_head;
    const float* parts = p.partial + head * p.splits * 2 * (HEAD_DIM + 2) * kRows;
    const int count = job.splits * 2;
    const int rows = p.tokens * p.group;
    constexpr int kPairs = HEAD_DIM / 2;
    for (int i = threadIdx.x; i < rows * kPairs; i += blockDim.x) {
        const int r = i / kPairs, d = i % kPairs * 2;
        const int query_head = job.kv_head * p.group + r % p.group, token = r / p.group;
        const float sink = p.sinks != nullptr ? p.sinks[query_head] : -kInfinity;
        const float sink_log2 = sink / p.unit * p.scale_log2;
        // A part that kept nothing has sum 0; its base says nothing.
        float top = sink_log2;
        for (int part = 0; part < count; ++part) {
            const float* source = parts + part * (HEAD_DIM + 2) * kRows + r;
            if (source[(HEAD_DIM + 1) * kRows] != 0.f) top = max_or_nan(top, source[HEAD_DIM * kRows]);
        }
        const float base = finite(top);
        float sum = sink > -kInfinity ? exp2_fast(sink_log2 - base) : 0.f, x = 0.f, y = 0.f;
        for (int part = 0; part < count; ++part) {
            const float* source = parts + part * (HEAD_DIM + 2) * kRows + r;
            const float own = source[(HEAD_DIM + 1) * kRows];
            if (own == 0.f) continue;
            const float factor = exp2_fast(source[HEAD_DIM * kRows] - base);
            sum = __fmaf_rn(own, factor, sum);
            x = __fmaf_rn(source[d * kRows], factor, x);
            y = __fmaf_rn(source[(d + 1) * kRows], factor, y);
        }
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        u16* out = static_cast<u16*>(p.out) + job.sequence * p.out_stride_b + token * p.out_stride_s +
                   query_head * p.out_stride_h + d;
        const u32 both = pack(x * inverse, y * inverse);
        asm volatile("st.global.b32 [%0], %1;" ::"l"(out), "r"(both) : "memory");
        if (d == 0) {
            float lse = sum == 0.f ? -kInfinity : (base / p.scale_log2) * p.unit + logf(sum);
            if (top == sink_log2 && sum == 1.f) lse = sink;
            p.lse[job.sequence * p.lse_stride_b + query_head * p.lse_stride_h + token] = lse;
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(288, 1) decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    const Job job(p);
    if (job.split >= job.splits) return;
    const u32 query = shared_address(memory);
    const u32 keys = query + (kQueryBytes + 1023) / 1024 * 1024;
    const u32 values = keys + kStages * kTileBytes;
    const u32 weights = values + 2 * kSlots * kTileBytes;
    Shared& shared = *reinterpret_cast<Shared*>(memory + (weights - query) + 2 * kSlots * kWeightBytes);
    if (threadIdx.x == 0) {
        if (query % 1024 != 0) __trap();
        for (int i = 0; i < kStages; ++i) {
            barrier_init(shared_address(&shared.key_full[i]), 1);
            barrier_init(shared_address(&shared.key_empty[i]), 4);
        }
        for (int i = 0; i < 2 * kSlots; ++i) barrier_init(shared_address(&shared.value_full[0][0]) + 8 * i, 1);
        barrier_init_fence();
    }
    load_queries(p, job, query);
    __syncthreads();
    if (threadIdx.x >= 256) {
        produce(p, shared, job, keys);
    } else {
        const int w = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
        Consumer{p, shared, job, w, query, keys, values + w * kSlots * kTileBytes, weights + w * kSlots * kWeightBytes}
            .run();
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* arrivals = p.arrivals + static_cast<i64>(job.sequence) * p.num_kv_heads + job.kv_head;
        shared.last = atomicAdd(arrivals, 1) == job.splits - 1;
        if (shared.last) *arrivals = 0;
    }
    __syncthreads();
    if (shared.last) {
        __threadfence();
        combine(p, job);
    }
}
