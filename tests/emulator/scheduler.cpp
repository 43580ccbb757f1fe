// Fibers and the scheduler. See hopper_emulator.py.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
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
constexpr size_t kStackBytes = 128 * 1024;  // the first page is never touched
constexpr size_t kPage = 4096;
void* scheduler_pointer;

// One after the other, for the threads of a CTA; they stay until the end of a launch.
u8* take_stacks(u32 threads) {
    if (!machine.free_stacks.empty()) {
        u8* const stacks = machine.free_stacks.back();
        machine.free_stacks.pop_back();
        return stacks;
    }
    void* const place = mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) fail("no memory for the stacks of %u threads", threads);
    u8* const stacks = static_cast<u8*>(place);
    for (u32 i = 0; i < threads; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
    return stacks;
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
    auto* context = reinterpret_cast<ucontext_t*>(stack + kPage);
    getcontext(context);
    context->uc_stack.ss_sp = stack + 2 * kPage;
    context->uc_stack.ss_size = kStackBytes - 2 * kPage;
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
        void* frames[24];
        const int count = backtrace(frames, 24);
        for (int i = 1; i < count; ++i) machine.error += text("%s%p", i == 1 ? " at " : " <- at ", frames[i]);
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

void yield() { to_scheduler(); }

void pause() {
    if (++machine.running->calls >= machine.running->warp->allowance) yield();
}

void ld_relaxed(u64& x, const u64* place) {
    x = *const_cast<const volatile u64*>(aligned<u64, 1>(place));
    if (++machine.polls > kMaxPolls) {
        fail("threads looked at global memory %llu times, and nothing came", machine.polls);
    }
    to_scheduler();
}

// --- scheduler --------------------------------------------------------------------------------------------

namespace {

void start_cta(u32 number, u32 threads, u32 shared) {
    auto cta = std::make_unique<Cta>();
    const u32 row = number / grid_size.x;
    cta->index = {number % grid_size.x, row % grid_size.y, row / grid_size.y};
    cta->shared_size = shared;
    cta->shared = static_cast<u8*>(std::aligned_alloc(1024, (shared + 1023) / 1024 * 1024 + 1024));
    std::memset(cta->shared, 0xFF, shared);
    cta->unfenced.assign(shared / 16 + 1, 0);
    cta->running = static_cast<int>(threads);
    cta->stacks = take_stacks(threads);
    for (u32 first = 0; first < threads; first += 32) {
        auto warp = std::make_unique<Warp>();
        warp->cta = cta.get();
        warp->index = first / 32;
        warp->priority = machine.random.next();
        for (u32 lane = 0; lane < 32; ++lane) {
            Fiber& fiber = warp->lanes[lane];
            fiber.warp = warp.get();
            fiber.lane = lane, fiber.thread = first + lane;
            fiber.stack_pointer = prepare_stack(cta->stacks + (first + lane) * kStackBytes, start_fiber);
        }
        cta->warps.push_back(std::move(warp));
    }
    machine.ctas.push_back(std::move(cta));
}

void free_cta(Cta& cta) {
    std::free(cta.shared);
    machine.free_stacks.push_back(cta.stacks);
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
    const auto [x, y, z] = cta.index;
    check_registers(cta);
    if (cta.loads) fail("CTA (%u, %u, %u) ended with %d copies under way", x, y, z, cta.loads);
    for (const auto& warp : cta.warps) {
        if (!warp->operations.empty()) {
            fail("CTA (%u, %u, %u) ended with wgmma of warp %u under way", x, y, z, warp->index);
        }
        const Warp& first = *cta.warps[warp->index / 4 * 4];
        if (warp->executed != first.executed) {
            fail("warp %u issued %llu wgmma, warp %u of its warpgroup %llu", warp->index, warp->executed,
                 first.index, first.executed);
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
                     fiber.detail[0] - kWindow, fiber.detail[1], barrier.pending, barrier.expected,
                     barrier.bytes);
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
        const auto [x, y, z] = cta->index;
        for (const auto& warp : cta->warps) {
            for (u32 lane = 0; lane < 32;) {
                const u32 first = lane;
                const std::string line = describe(warp->lanes[first]);
                while (lane < 32 && describe(warp->lanes[lane]) == line) ++lane;
                report += text("\nCTA (%u, %u, %u) warp %u lanes %u to %u: ", x, y, z, warp->index, first,
                               lane - 1);
                report += line;
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
    if (machine.random.one_in(machine.stay)) best->priority = machine.random.next();
    return best;
}

bool step(size_t& turn) {
    if (!machine.in_order && machine.random.one_in(machine.eager)) advance_one();
    Warp* warp = choose(turn);
    if (warp == nullptr) {
        if (!advance_one()) machine.error = "deadlock: nobody can go on" + where_all_stand();
        return machine.error.empty();
    }
    // Lanes stay together, as on the GPU: all may make the same number of calls, and who is woken waits for
    // the next turn.
    warp->allowance = machine.in_order ? ~0u : machine.random.next() % machine.most_calls + 1;
    const u32 ready = warp->ready(), first = machine.in_order ? 0 : machine.random.next() % 32;
    for (u32 i = 0; i < 32 && machine.error.empty(); ++i) {
        const u32 lane = (first + i) % 32;
        if (!(ready >> lane & 1)) continue;
        warp->lanes[lane].calls = 0;
        run_fiber(warp->lanes[lane]);
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
extern "C" int emulated_launch(void (*entry)(const void*), const void* params, const u32* grid, u32 threads,
                               u32 shared, u64 seed, u32 resident, char* message, u32 message_size) {
    machine = Machine();
    machine.random.state = seed;
    machine.in_order = seed == 0;
    const auto pick = [](const u32 (&choices)[4]) { return choices[machine.random.next() % 4]; };
    machine.eager = pick({0, 2, 16, 128});
    machine.stay = pick({2, 4, 16, 128});
    machine.most_calls = pick({1, 1, 4, 16});
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
    for (u8* stacks : machine.free_stacks) munmap(stacks, threads * kStackBytes);
    snprintf(message, message_size, "%s", machine.error.c_str());
    return !machine.error.empty();
}

}  // namespace emulated
