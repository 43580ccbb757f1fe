// Fibers, the scheduler, barriers, copies. See hopper_emulator.py.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

Machine machine;
Index thread_index, block_index, block_size, grid_size;

// --- fibers -----------------------------------------------------------------------------------------------

namespace {

constexpr u64 kMaxPolls = 20'000'000;
constexpr size_t kStackBytes = 128 * 1024;  // the last page is never touched
std::vector<u8*> free_stacks;
void* scheduler_pointer;

u8* take_stack() {
    if (free_stacks.empty()) {
        void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) std::abort();
        mprotect(stack, 4096, PROT_NONE);
        free_stacks.push_back(static_cast<u8*>(stack));
    }
    u8* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}

}  // namespace

#if defined(__x86_64__)
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void* prepare_stack(u8* stack, void (*start)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // as a return address: the stack is aligned as at a call
    *--top = reinterpret_cast<void*>(start);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    return top;
}
#else
void emulated_switch(void** from, void* to) {
    ucontext_t own;
    *from = &own;
    swapcontext(&own, static_cast<ucontext_t*>(to));
}

void* prepare_stack(u8* stack, void (*start)()) {
    auto* context = reinterpret_cast<ucontext_t*>(stack + 4096);
    getcontext(context);
    context->uc_stack.ss_sp = stack + 8192;
    context->uc_stack.ss_size = kStackBytes - 8192;
    makecontext(context, start, 0);
    return context;
}
#endif

namespace {

void to_scheduler() { emulated_switch(&machine.running->stack_pointer, scheduler_pointer); }

void run_fiber(Fiber& fiber) {
    machine.running = &fiber;
    thread_index = {fiber.thread, 0, 0};
    block_index = fiber.warp->cta->index;
    emulated_switch(&scheduler_pointer, fiber.stack_pointer);
    machine.running = nullptr;
}

void end_fiber() {
    Fiber& fiber = *machine.running;
    Warp& warp = *fiber.warp;
    fiber.done = true;
    fiber.waits = "has ended";
    warp.ended |= 1u << fiber.lane;
    --warp.running;
    --warp.cta->running;
    for (u32 lane = 0; lane < 32; ++lane) {
        if (warp.arrived >> lane & 1 && warp.arrivals[lane].mask & warp.ended) {
            fail("lane %u ends, for which lane %u of its warp waits", fiber.lane, lane);
        }
    }
    to_scheduler();
}

void start_fiber() {
    machine.entry(machine.params);
    end_fiber();
}

// Of the scheduler itself; a fiber that fails is left where it stands.
struct Failure {};

std::string text(const char* format, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof(buffer), format, arguments);
    va_end(arguments);
    return buffer;
}

}  // namespace

void fail(const char* format, ...) {
    char buffer[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof(buffer), format, arguments);
    va_end(arguments);
    machine.error = buffer;
    if (machine.running != nullptr) {
        const Fiber& fiber = *machine.running;
        const Index cta = fiber.warp->cta->index;
        machine.error += text(" [CTA (%u, %u, %u), thread %u]", cta.x, cta.y, cta.z, fiber.thread);
        void* address = __builtin_return_address(0);
        machine.error += text(" at %p", address);
        to_scheduler();  // which never comes back to this fiber
    }
    throw Failure();
}

void block(const char* waits, void* at, u32 detail0, u32 detail1) {
    Fiber& fiber = *machine.running;
    fiber.ready = false;
    fiber.waits = waits;
    fiber.detail[0] = detail0, fiber.detail[1] = detail1;
    fiber.at = at;
    to_scheduler();
}

void pause() {
    if (!machine.in_order && machine.random.one_in(8)) to_scheduler();
}

void ld_relaxed(u64& x, const u64* place) {
    x = *const_cast<const volatile u64*>(aligned<u64, 1>(place));
    if (++machine.polls > kMaxPolls) fail("threads looked at global memory %llu times, and nothing came", machine.polls);
    to_scheduler();
}

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

constexpr const char* kNames[] = {"__syncwarp", "__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync",
                                  "__all_sync", "__any_sync", "__ballot_sync", "__reduce_add_sync",
                                  "__reduce_min_sync", "__reduce_max_sync", "__reduce_or_sync", "stmatrix",
                                  "ldmatrix", "wgmma.wait_group", "setmaxnreg"};

}  // namespace

u64 together(Kind kind, u32 mask, u64 value, u32 argument, int line) {
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
            fail("lanes of a warp meet at different calls: lane %u in %s (line %d, mask %#x), lane %u in %s (line %d, "
                 "mask %#x)", fiber.lane, kNames[kind], line, mask, lane, kNames[other.kind], other.line, other.mask);
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
    }
    return warp.results[fiber.lane];
}

void set_registers(int count, bool) {
    if (count < 24 || count > 256 || count % 8) fail("setmaxnreg %d", count);
    together(kRegisters, 0xFFFFFFFF, 0, count, count);
    machine.running->warp->registers = count;
}

// --- shared memory ----------------------------------------------------------------------------------------

u8* shared_memory() { return machine.running->warp->cta->shared; }

u32 shared_offset(const void* pointer) {
    const Cta& cta = *machine.running->warp->cta;
    const i64 offset = static_cast<const u8*>(pointer) - cta.shared;
    if (offset < 0 || offset > cta.shared_size) fail("%p is not in shared memory", pointer);
    return kWindow + static_cast<u32>(offset);
}

namespace {

u8* bytes_of(Cta& cta, u32 address, u32 bytes) {
    if (address < kWindow || address + bytes > kWindow + cta.shared_size) {
        fail("shared address %#x + %u lies outside of the %u bytes of the CTA", address - kWindow, bytes, cta.shared_size);
    }
    return cta.shared + (address - kWindow);
}

}  // namespace

u8* shared_bytes(u32 address, u32 bytes) {
    if (address % bytes) fail("shared address %#x is not a multiple of %u", address - kWindow, bytes);
    return bytes_of(*machine.running->warp->cta, address, bytes);
}

u8* shared_target(u32 address, u32 bytes) {
    u8* place = shared_bytes(address, bytes);
    Fiber& fiber = *machine.running;
    const u32 unit = (address - kWindow) / 16;
    fiber.warp->cta->unfenced[unit] = static_cast<u16>(fiber.thread + 1);
    fiber.unfenced.push_back(unit);
    return place;
}

void async_proxy_fence() {
    Fiber& fiber = *machine.running;
    std::vector<u16>& marks = fiber.warp->cta->unfenced;
    for (const u32 unit : fiber.unfenced) {
        if (marks[unit] == fiber.thread + 1) marks[unit] = 0;
    }
    fiber.unfenced.clear();
    pause();
}

// --- mbarrier ---------------------------------------------------------------------------------------------

namespace {

Mbarrier& mbarrier_at(Cta& cta, u32 address) {
    const auto found = cta.mbarriers.find(address);
    if (found == cta.mbarriers.end()) fail("no mbarrier was initialised at shared+%#x", address - kWindow);
    return found->second;
}

void look_at(Mbarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.expected;
    for (Fiber* fiber : barrier.waiting) fiber->ready = true;
    barrier.waiting.clear();
}

void arrive(u32 address, u32 bytes) {
    pause();
    Mbarrier& barrier = mbarrier_at(*machine.running->warp->cta, address);
    if (barrier.pending == 0) {
        fail("mbarrier shared+%#x: one arrival more than the %u of a phase", address - kWindow, barrier.expected);
    }
    barrier.bytes += bytes;
    --barrier.pending;
    look_at(barrier);
}

}  // namespace

void mbarrier_init(u32 address, u32 arrivals) {
    bytes_of(*machine.running->warp->cta, address, 8);
    if (address % 8 || arrivals == 0) fail("mbarrier.init of shared+%#x for %u arrivals", address - kWindow, arrivals);
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

// --- copies -----------------------------------------------------------------------------------------------

namespace {

u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

void poison(Cta& cta, const Load& load) {
    std::memset(bytes_of(cta, load.target, load.bytes), 0xFF, load.bytes);
    const u32 first = (load.target - kWindow) / 16;
    for (u32 i = 0; i < load.bytes / 16; ++i) cta.unfenced[first + i] = 0;
}

// Rows of 128 bytes, 16-byte units swizzled; 0 outside of the tensor.
void arrive_box(const Load& load) {
    const Map& map = load.map;
    u32 target = load.target;
    const u32 rows = map.box[1] * map.box[2] * map.box[3], row_bytes = map.box[0] * map.item;
    for (u32 row = 0; row < rows; ++row, target += row_bytes) {
        const i64 y = load.at[1] + row % map.box[1], z = load.at[2] + row / map.box[1] % map.box[2],
                  w = load.at[3] + row / map.box[1] / map.box[2];
        const bool inside = y >= 0 && y < map.size[1] && z >= 0 && z < map.size[2] && w >= 0 && w < map.size[3];
        const u8* source = reinterpret_cast<const u8*>(map.base) + y * map.step[0] + z * map.step[1] + w * map.step[2];
        for (u32 x = 0; x < map.box[0]; ++x) {
            u8* to = bytes_of(*load.cta, swizzled(target + x * map.item), map.item);
            const i64 column = static_cast<i64>(load.at[0]) + x;
            if (inside && column >= 0 && column < map.size[0]) {
                std::memcpy(to, source + column * map.item, map.item);
            } else {
                std::memset(to, 0, map.item);
            }
        }
    }
}

void arrive_load(size_t which) {
    const Load load = machine.loads[which];
    machine.loads.erase(machine.loads.begin() + static_cast<std::ptrdiff_t>(which));
    if (load.source != nullptr) {
        std::memcpy(bytes_of(*load.cta, load.target, load.bytes), load.source, load.bytes);
    } else {
        arrive_box(load);
    }
    --load.cta->loads;
    Mbarrier& barrier = mbarrier_at(*load.cta, load.barrier);
    barrier.bytes -= load.bytes;
    look_at(barrier);
}

void ask(const Load& load) {
    mbarrier_at(*load.cta, load.barrier);
    poison(*load.cta, load);
    ++load.cta->loads;
    machine.loads.push_back(load);
    pause();
}

}  // namespace

void tensor_load(u32 target, const void* map, u32 barrier, int x, int y, int z, int w) {
    Load load{machine.running->warp->cta, target, barrier, 0, nullptr, {}, {x, y, z, w}};
    std::memcpy(&load.map, map, sizeof(Map));
    const Map& m = load.map;
    if (m.magic != kMapMagic) fail("cp.async.bulk.tensor: %p is no tensor map", map);
    if (m.box[0] * m.item != 128 || target % 128) {
        fail("cp.async.bulk.tensor to shared+%#x in rows of %u bytes (128 are emulated)", target - kWindow, m.box[0] * m.item);
    }
    load.bytes = m.box[0] * m.item * m.box[1] * m.box[2] * m.box[3];
    ask(load);
}

void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    if (target % 16 || reinterpret_cast<u64>(source) % 16 || bytes % 16) {
        fail("cp.async.bulk of %u bytes from %p to shared+%#x", bytes, source, target - kWindow);
    }
    ask({machine.running->warp->cta, target, barrier, bytes, static_cast<const u8*>(source), {}, {}});
}

// --- scheduler --------------------------------------------------------------------------------------------

namespace {

void start_cta(u32 number, u32 threads, u32 shared) {
    auto cta = std::make_unique<Cta>();
    cta->index = {number % grid_size.x, number / grid_size.x % grid_size.y, number / grid_size.x / grid_size.y};
    cta->shared_size = shared;
    cta->shared = static_cast<u8*>(std::aligned_alloc(1024, (shared + 1023) / 1024 * 1024 + 1024));
    std::memset(cta->shared, 0xFF, shared);
    cta->unfenced.assign(shared / 16 + 1, 0);
    cta->running = static_cast<int>(threads);
    for (u32 first = 0; first < threads; first += 32) {
        auto warp = std::make_unique<Warp>();
        warp->cta = cta.get();
        warp->index = first / 32;
        warp->priority = machine.random.next();
        for (u32 lane = 0; lane < 32; ++lane) {
            Fiber& fiber = warp->lanes[lane];
            fiber.warp = warp.get();
            fiber.lane = lane, fiber.thread = first + lane;
            fiber.stack = take_stack();
            fiber.stack_pointer = prepare_stack(fiber.stack, start_fiber);
        }
        cta->warps.push_back(std::move(warp));
    }
    machine.ctas.push_back(std::move(cta));
}

void free_cta(Cta& cta) {
    std::free(cta.shared);
    for (const auto& warp : cta.warps) {
        for (const Fiber& fiber : warp->lanes) free_stacks.push_back(fiber.stack);
    }
}

// What setmaxnreg left: as many registers as there are, alike in all warps of a warpgroup.
void check_registers(const Cta& cta) {
    const int at_launch = 65536 / (32 * static_cast<int>(cta.warps.size())) / 8 * 8;
    int sum = 0;
    bool asked = false;
    for (const auto& warp : cta.warps) {
        sum += 32 * (warp->registers ? warp->registers : at_launch);
        asked |= warp->registers != 0;
        if (warp->registers != cta.warps[warp->index / 4 * 4]->registers) {
            fail("setmaxnreg: warp %u has other registers than its warpgroup", warp->index);
        }
    }
    if (asked && sum > 65536) fail("setmaxnreg: the warps want %d registers of 65536", sum);
}

void check_ended(const Cta& cta) {
    check_registers(cta);
    if (cta.loads) fail("CTA (%u, %u, %u) ended with %d copies under way", cta.index.x, cta.index.y, cta.index.z, cta.loads);
    for (const auto& warp : cta.warps) {
        if (!warp->operations.empty()) {
            fail("CTA (%u, %u, %u) ended with wgmma of warp %u under way", cta.index.x, cta.index.y, cta.index.z, warp->index);
        }
        const Warp& first = *cta.warps[warp->index / 4 * 4];
        if (warp->executed != first.executed) {
            fail("warp %u issued %llu wgmma, warp %u of its warpgroup %llu", warp->index, warp->executed, first.index,
                 first.executed);
        }
    }
}

// Something that is under way arrives; false if there is nothing.
bool advance_one() {
    std::vector<Warp*> able;
    for (const auto& cta : machine.ctas) {
        for (const auto& warp : cta->warps) {
            if (warp->executable()) able.push_back(warp.get());
        }
    }
    if (machine.in_order) able.clear();  // at the wait
    const size_t count = able.size() + machine.loads.size();
    if (count == 0) return false;
    const size_t pick = machine.in_order ? 0 : machine.random.next() % count;
    if (pick < able.size()) {
        execute_operation(*able[pick]);
    } else {
        arrive_load(pick - able.size());
    }
    return true;
}

std::string describe(const Fiber& fiber) {
    std::string line = fiber.waits;
    if (line == "mbarrier") {
        const Mbarrier& barrier = fiber.warp->cta->mbarriers[fiber.detail[0]];
        line += text(" shared+%#x, phase of parity %u (%u of %u arrivals and %lld bytes are missing)",
                     fiber.detail[0] - kWindow, fiber.detail[1], barrier.pending, barrier.expected, barrier.bytes);
    } else if (line == "named barrier") {
        const NamedBarrier& barrier = fiber.warp->cta->named[fiber.detail[0]];
        line += text(" %u (%u of %u threads are there)", fiber.detail[0], barrier.arrived, barrier.threads);
    } else if (!fiber.done) {
        line += text(" with the lanes %#x", fiber.detail[0]);
    }
    return fiber.done ? line : line + text(" at %p", fiber.at);
}

std::string where_all_stand() {
    std::string report;
    for (const auto& cta : machine.ctas) {
        for (const auto& warp : cta->warps) {
            for (u32 lane = 0; lane < 32;) {
                const u32 first = lane;
                const std::string line = describe(warp->lanes[first]);
                while (lane < 32 && describe(warp->lanes[lane]) == line) ++lane;
                report += text("\nCTA (%u, %u, %u) warp %u lanes %u to %u: ", cta->index.x, cta->index.y, cta->index.z,
                               warp->index, first, lane - 1) + line;
            }
        }
    }
    return report;
}

// The warp that goes on; null if all wait.
Warp* choose(size_t& turn) {
    std::vector<Warp*> warps;
    for (const auto& cta : machine.ctas) {
        for (const auto& warp : cta->warps) {
            if (warp->ready()) warps.push_back(warp.get());
        }
    }
    if (warps.empty()) return nullptr;
    if (machine.in_order) return warps[turn++ % warps.size()];
    Warp* best = warps[0];
    for (Warp* warp : warps) {
        if (warp->priority > best->priority) best = warp;
    }
    // Some warps are far ahead for a while, then others.
    if (machine.random.one_in(32)) best->priority = machine.random.next();
    return best;
}

bool step(size_t& turn) {
    if (!machine.in_order && machine.random.one_in(machine.eager)) advance_one();
    Warp* warp = choose(turn);
    if (warp == nullptr) {
        if (!advance_one()) machine.error = "deadlock: nobody can go on" + where_all_stand();
        return machine.error.empty();
    }
    const u32 first = machine.in_order ? 0 : machine.random.next() % 32;
    for (u32 i = 0; i < 32 && machine.error.empty(); ++i) {
        Fiber& fiber = warp->lanes[(first + i) % 32];
        if (fiber.ready && !fiber.done) run_fiber(fiber);
    }
    return machine.error.empty();
}

void run_grid(u32 threads, u32 shared, u32 resident) {
    const u32 count = grid_size.x * grid_size.y * grid_size.z;
    u32 started = 0;
    size_t turn = 0;
    while (machine.error.empty()) {
        while (started < count && machine.ctas.size() < resident) start_cta(started++, threads, shared);
        if (machine.ctas.empty()) return;
        if (!step(turn)) return;
        for (size_t i = 0; i < machine.ctas.size();) {
            Cta& cta = *machine.ctas[i];
            if (cta.running > 0) {
                ++i;
                continue;
            }
            check_ended(cta);
            free_cta(cta);
            machine.ctas.erase(machine.ctas.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
}

}  // namespace

// Run a grid; 0, or 1 with a message.
extern "C" int emulated_launch(void (*entry)(const void*), const void* params, const u32* grid, u32 threads, u32 shared,
                               u64 seed, u32 resident, char* message, u32 message_size) {
    machine = Machine();
    machine.random.state = seed;
    machine.in_order = seed == 0;
    const u32 rates[] = {0, 2, 16, 128};
    machine.eager = rates[machine.random.next() % 4];
    machine.entry = entry;
    machine.params = params;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {threads, 1, 1};
    try {
        run_grid(threads, shared, resident);
    } catch (const Failure&) {  // machine.error says what
    }
    for (const auto& cta : machine.ctas) free_cta(*cta);
    machine.ctas.clear();
    snprintf(message, message_size, "%s", machine.error.c_str());
    return !machine.error.empty();
}

}  // namespace emulated
