// Shared memory, and the copies into it that arrive some time after they were asked for.
#include "machine.h"

namespace emulated {

// --- shared memory ----------------------------------------------------------------------------------------

u8* shared_memory() { return machine.running->warp->cta->shared; }

u32 shared_offset(const void* pointer) {
    const Cta& cta = *machine.running->warp->cta;
    const i64 offset = static_cast<const u8*>(pointer) - cta.shared;
    if (offset < 0 || offset > cta.shared_size) fail("%p is not in shared memory", pointer);
    return kWindow + static_cast<u32>(offset);
}

u8* bytes_of(Cta& cta, u32 address, u32 bytes) {
    if (address < kWindow || address + bytes > kWindow + cta.shared_size) {
        fail("shared+%#x and %u bytes lie outside of the %u bytes of the CTA", address - kWindow, bytes,
             cta.shared_size);
    }
    return cta.shared + (address - kWindow);
}

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

// --- copies -----------------------------------------------------------------------------------------------

namespace {

bool within(i64 at, u32 size) { return at >= 0 && at < size; }

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
        const bool inside = within(y, map.size[1]) && within(z, map.size[2]) && within(w, map.size[3]);
        const u64 source = map.base + y * map.step[0] + z * map.step[1] + w * map.step[2];
        for (u32 x = 0; x < map.box[0]; ++x) {
            u8* to = bytes_of(*load.cta, swizzled(target + x * map.item), map.item);
            const i64 column = static_cast<i64>(load.at[0]) + x;
            if (inside && within(column, map.size[0])) {
                std::memcpy(to, reinterpret_cast<const u8*>(source) + column * map.item, map.item);
            } else {
                std::memset(to, 0, map.item);
            }
        }
    }
}

}  // namespace

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

namespace {

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
        fail("cp.async.bulk.tensor to shared+%#x in rows of %u bytes (128 are emulated)", target - kWindow,
             m.box[0] * m.item);
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

}  // namespace emulated
