// Where threads wait for one another: lanes of a warp, mbarriers, named barriers.
#include <algorithm>

#include "machine.h"

namespace emulated {

// --- warps ------------------------------------------------------------------------------------------------

namespace {

void complete(Warp& warp, const Warp::Arrival& call) {
    const u32 mask = call.mask;
    u64 sum = 0;
    i64 least = INT64_MAX, most = INT64_MIN, any = 0;
    u32 ballot = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const u64 value = warp.arrivals[lane].value;
        sum += value;
        least = std::min(least, static_cast<i64>(value));
        most = std::max(most, static_cast<i64>(value));
        any |= static_cast<i64>(value);
        ballot |= static_cast<u32>(value != 0) << lane;
    }
    if (call.kind == kStoreMatrix || call.kind == kLoadMatrix) move_matrices(warp, call.kind == kStoreMatrix);
    if (call.kind == kWaitProducts) finish_wait(warp, call.argument);
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const Warp::Arrival& own = warp.arrivals[lane];
        u32 source = lane;
        u64& result = warp.results[lane];
        switch (call.kind) {
            case kShuffle: source = own.argument % 32; break;
            case kShuffleXor: source = (lane ^ own.argument) % 32; break;
            case kShuffleUp: source = lane < own.argument ? lane : lane - own.argument; break;
            case kShuffleDown: source = lane + own.argument > 31 ? lane : lane + own.argument; break;
            case kAll: result = ballot == mask; continue;
            case kAny: result = ballot != 0; continue;
            case kBallot: result = ballot; continue;
            case kSumLanes: result = sum; continue;
            case kMinLanes: result = least; continue;
            case kMaxLanes: result = most; continue;
            case kOrLanes: result = any; continue;
            default: continue;
        }
        if (!(mask >> source & 1)) fail("lane %u asks lane %u, which the mask %#x lacks", lane, source, mask);
        result = warp.arrivals[source].value;
    }
}

constexpr const char* kNames[] = {
    "__syncwarp", "__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync", "__all_sync",
    "__any_sync", "__ballot_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_or_sync", "stmatrix", "ldmatrix", "wgmma.wait_group", "setmaxnreg",
};

}  // namespace

u64 together(Kind kind, u32 mask, u64 value, u32 argument, int line) {
    pause();
    Fiber& fiber = *machine.running;
    Warp& warp = *fiber.warp;
    if (!(mask >> fiber.lane & 1)) fail("%s: the mask %#x lacks lane %u", kNames[kind], mask, fiber.lane);
    warp.arrivals[fiber.lane] = {kind, mask, value, argument, line};
    warp.arrived |= 1u << fiber.lane;
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (warp.ended >> lane & 1) fail("%s: lane %u of the mask %#x has ended", kNames[kind], lane, mask);
        const Warp::Arrival& other = warp.arrivals[lane];
        if (warp.arrived >> lane & 1 && (other.kind != kind || other.mask != mask || other.line != line)) {
            fail("lanes of a warp meet at different calls: lane %u in %s (line %d, mask %#x), "
                 "lane %u in %s (line %d, mask %#x)",
                 fiber.lane, kNames[kind], line, mask, lane, kNames[other.kind], other.line, other.mask);
        }
    }
    if (mask & ~warp.arrived) {
        block(kNames[kind], __builtin_return_address(0), mask, warp.index);
    } else {
        complete(warp, warp.arrivals[fiber.lane]);
        warp.arrived &= ~mask;
        for (u32 lane = 0; lane < 32; ++lane) {
            if (mask >> lane & 1) warp.lanes[lane].ready = true;
        }
        yield();  // they go on together
    }
    return warp.results[fiber.lane];
}

void set_registers(int count, bool) {
    if (count < 24 || count > 256 || count % 8) fail("setmaxnreg %d", count);
    together(kRegisters, 0xFFFFFFFF, 0, count, count);
    machine.running->warp->registers = count;
}

// --- mbarrier ---------------------------------------------------------------------------------------------

Mbarrier& mbarrier_at(Cta& cta, u32 address) {
    const auto found = cta.mbarriers.find(address);
    if (found == cta.mbarriers.end()) fail("no mbarrier was initialised at shared+%#x", address - kWindow);
    return found->second;
}

// Perhaps its phase is over.
void look_at(Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.expected;
    for (Fiber* fiber : barrier.waiting) fiber->ready = true;
    barrier.waiting.clear();
}

namespace {

void arrive(u32 address, u32 bytes) {
    pause();
    Mbarrier& barrier = mbarrier_at(*machine.running->warp->cta, address);
    if (barrier.pending == 0) {
        fail("mbarrier shared+%#x: one arrival more than the %u of a phase", address - kWindow,
             barrier.expected);
    }
    barrier.bytes += bytes;
    --barrier.pending;
    look_at(barrier);
    pause();
}

}  // namespace

void mbarrier_init(u32 address, u32 arrivals) {
    bytes_of(*machine.running->warp->cta, address, 8);
    if (address % 8 || arrivals == 0) {
        fail("mbarrier.init of shared+%#x for %u arrivals", address - kWindow, arrivals);
    }
    Mbarrier& barrier = machine.running->warp->cta->mbarriers[address];
    barrier = Mbarrier();
    barrier.expected = barrier.pending = arrivals;
}

void mbarrier_arrive(u32 barrier) { arrive(barrier, 0); }
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { arrive(barrier, bytes); }

void mbarrier_try_wait(u32& passed, u32 address, u32 parity) {
    pause();
    Mbarrier& barrier = mbarrier_at(*machine.running->warp->cta, address);
    if (barrier.phase % 2 == parity % 2) {
        barrier.waiting.push_back(machine.running);
        block("mbarrier", __builtin_return_address(0), address, parity);
    }
    passed = barrier.phase % 2 != parity % 2;
}

// --- named barriers ---------------------------------------------------------------------------------------

namespace {

void join(int number, u32 threads, bool waits, bool agree, void* at) {
    pause();
    Fiber& fiber = *machine.running;
    if (number < 0 || number > 15) fail("named barrier %d", number);
    NamedBarrier& barrier = fiber.warp->cta->named[number];
    if (threads == 0 || threads % 32) fail("named barrier %d of %u threads", number, threads);
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) {
        fail("named barrier %d of %u threads, which others use for %u", number, threads, barrier.threads);
    }
    if (barrier.who[fiber.thread]) fail("thread %u comes to named barrier %d twice", fiber.thread, number);
    barrier.who[fiber.thread] = true;
    barrier.all &= agree;
    if (++barrier.arrived == threads) {
        for (Fiber* other : barrier.waiting) other->answer = barrier.all, other->ready = true;
        fiber.answer = barrier.all;
        barrier = NamedBarrier();
    } else if (waits) {
        barrier.waiting.push_back(&fiber);
        block("named barrier", at, number, threads);
    }
}

}  // namespace

void named_barrier(int barrier, u32 threads, bool waits) {
    join(barrier, threads, waits, true, __builtin_return_address(0));
}

bool named_barrier_all(int barrier, u32 threads, bool agree) {
    join(barrier, threads, true, agree, __builtin_return_address(0));
    return machine.running->answer;
}

void sync_threads() { join(0, block_size.x, true, true, __builtin_return_address(0)); }

}  // namespace emulated
