// State of the emulated multiprocessor: threads as fibers, warps, CTAs, what is still under way.
#pragma once

#include <bitset>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

namespace emulated {

constexpr u32 kWindow = 1024;       // where a CTA's shared memory begins in its window
constexpr u32 kMaxThreads = 1024;
constexpr u32 kPoison = 0xFFFFFFFF;  // NaN as float, f16, bf16 and e4m3

struct Warp;
struct Cta;

// One thread.
struct Fiber {
    void* stack_pointer = nullptr;
    Warp* warp = nullptr;
    u32 lane = 0, thread = 0;
    u32 calls = 0;  // in this turn
    bool ready = true, done = false;
    const char* waits = "";  // for what
    u32 detail[2] = {};
    void* at = nullptr;      // where in the kernel
    bool answer = false;     // of a barrier with a vote
    std::vector<u32> unfenced;  // units of 16 bytes that it wrote in the generic proxy
};

// 64 x n products of a warpgroup, the 16 rows of one warp.
struct Accumulator {
    int columns = 0;
    u32 filled = 0;              // lanes whose registers were taken
    u64 last = 0;                // number of the last operation on it
    std::vector<u32> values;     // [16][columns], float or int
    std::vector<void*> registers[32];
};

struct Operation {
    Element element;
    std::shared_ptr<Accumulator> d;
    bool accumulate, a_in_registers;
    u32 a_registers[32][4];
    u64 a, b;
    int transpose_a, transpose_b;
    u32 issued = 0;  // lanes
};

struct Warp {
    Cta* cta = nullptr;
    u32 index = 0, priority = 0;
    Fiber lanes[32];
    int running = 32;
    int registers = 0;  // of setmaxnreg
    u32 allowance = 0;  // calls of each lane in this turn

    // Lanes that wait in `together`.
    struct Arrival {
        Kind kind;
        u32 mask;
        u64 value;
        u32 argument;
        int line;
    };
    Arrival arrivals[32];
    u64 results[32];
    u32 arrived = 0, ended = 0;

    // wgmma: operations from number `executed` on, and where each committed group ends.
    std::deque<Operation> operations;
    std::vector<std::shared_ptr<Accumulator>> accumulators;
    u64 executed = 0, issued[32] = {};
    std::vector<u64> groups;
    u32 committed[32] = {};

    u32 ready() const {  // lanes that can go on
        u32 mask = 0;
        for (const Fiber& fiber : lanes) mask |= static_cast<u32>(fiber.ready && !fiber.done) << fiber.lane;
        return mask;
    }
    bool executable() const { return !operations.empty() && operations.front().issued == 0xFFFFFFFF; }
};

struct Mbarrier {
    u32 expected = 0, pending = 0, phase = 0;
    i64 bytes = 0;
    std::vector<Fiber*> waiting;
};

struct NamedBarrier {
    u32 threads = 0, arrived = 0;
    bool all = true;
    std::bitset<kMaxThreads> who;
    std::vector<Fiber*> waiting;
};

struct Cta {
    Index index{};
    u8* shared = nullptr;
    u8* stacks = nullptr;
    u32 shared_size = 0;
    std::vector<std::unique_ptr<Warp>> warps;
    std::unordered_map<u32, Mbarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<u16> unfenced;  // of each unit of 16 bytes: 1 + thread that wrote it, 0 once it fenced
    int running = 0;            // threads
    int loads = 0;              // copies under way
};

// As the Python side encodes it into the 128 opaque bytes.
struct Map {
    u64 magic, base;
    u32 size[4];
    u64 step[3];  // bytes, of dimensions 1 to 3
    u32 box[4];
    u32 item;     // bytes
};
constexpr u64 kMapMagic = 0x70616D5F756D65;

// A copy that was asked for and has not arrived.
struct Load {
    Cta* cta;
    u32 target, barrier, bytes;
    const u8* source;  // of a plain one, else null
    Map map;
    int at[4];
};

struct Random {
    u64 state;
    u32 next() {
        state += 0x9E3779B97F4A7C15;
        u64 x = state;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
        x = (x ^ x >> 27) * 0x94D049BB133111EB;
        return static_cast<u32>((x ^ x >> 31) >> 32);
    }
    bool one_in(u32 n) { return n != 0 && next() % n == 0; }
};

struct Machine {
    Random random{0};
    bool in_order = true;  // no random choices: warps in turn, copies and products as late as possible
    u32 eager = 0;         // one in so many steps a copy arrives or a product is computed; 0: when all wait
    u32 stay = 1;          // one in so many turns a warp's priority changes
    u32 most_calls = 1;    // of a turn
    std::vector<std::unique_ptr<Cta>> ctas;
    std::deque<Load> loads;
    Fiber* running = nullptr;
    std::string error;
    void (*entry)(const void*) = nullptr;
    const void* params = nullptr;
    std::vector<u8*> free_stacks;  // of CTAs that ended
    u64 polls = 0;  // turns without a result, of threads that only look
};
extern Machine machine;

// scheduler.cpp
void yield();
void block(const char* waits, void* at, u32 detail0 = 0, u32 detail1 = 0);
// barriers.cpp
Mbarrier& mbarrier_at(Cta& cta, u32 address);
void look_at(Mbarrier& barrier);
// copies.cpp
u8* bytes_of(Cta& cta, u32 address, u32 bytes);
void arrive_load(size_t which);
// products.cpp
void execute_operation(Warp& warp);
void finish_wait(Warp& warp, u32 in_flight);
void move_matrices(Warp& warp, bool store);

}  // namespace emulated
