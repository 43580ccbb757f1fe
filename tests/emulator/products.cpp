// wgmma, stmatrix and ldmatrix. A product reads shared memory at some moment between its issue and the wait;
// its registers hold NaN from the issue to the wait. The four warps of a warpgroup go their own ways.
#include <algorithm>

#include "machine.h"

namespace emulated {

namespace {

// Row (of the warp's 16) and column of register i of a lane, in accumulators.
int row_of(u32 lane, int i) { return static_cast<int>(lane / 4) + 8 * (i / 2 % 2); }
int column_of(u32 lane, int i) { return 8 * (i / 4) + 2 * static_cast<int>(lane % 4) + i % 2; }

u32 item_bytes(Element element) { return element == Element::f16 || element == Element::bf16 ? 2 : 1; }
int depth_of(Element element) { return item_bytes(element) == 2 ? 16 : 32; }

template <class T>
T decode(Element element, const u8* place) {
    u16 wide;
    switch (element) {
        case Element::s8: return static_cast<T>(static_cast<signed char>(*place));
        case Element::u8: return static_cast<T>(*place);
        case Element::e4m3: return static_cast<T>(from_e4m3(*place));
        case Element::f16: std::memcpy(&wide, place, 2); return static_cast<T>(from_f16(wide));
        case Element::bf16: std::memcpy(&wide, place, 2); return static_cast<T>(from_bf16(wide));
    }
    return T();
}

// A 16-byte unit of an operand in shared memory, which no thread may have written without a fence.
const u8* unit_at(const Warp& warp, u32 address) {
    const Cta& cta = *warp.cta;
    address ^= (address >> 7 & 7) << 4;
    if (address < kWindow || address + 16 > kWindow + cta.shared_size) {
        fail("wgmma reads shared+%#x, outside of the %u bytes of the CTA", address - kWindow,
             cta.shared_size);
    }
    const u16 writer = cta.unfenced[(address - kWindow) / 16];
    if (writer != 0) {
        fail("wgmma of warp %u reads shared+%#x, which thread %d wrote with no fence.proxy.async after it",
             warp.index, address - kWindow, writer - 1);
    }
    return cta.shared + (address - kWindow);
}

// `count` rows from `first` on of an operand (rows x depth) in shared memory, as to[k * stride + row].
template <class T>
void read_operand(const Warp& warp, u64 descriptor, Element element, bool transposed, int first, int count,
                  T* to, int stride) {
    const u32 begin = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4,
              group = (descriptor >> 32 & 0x3FFF) << 4;
    const u64 swizzle = descriptor >> 62, offset = descriptor >> 49 & 7;
    if (swizzle != 1) fail("wgmma: swizzle mode %llu of a descriptor is not emulated", swizzle);
    if (offset != 0) fail("wgmma: base offset %llu of a descriptor is not emulated", offset);
    const int item = static_cast<int>(item_bytes(element)), each = 16 / item, depth = depth_of(element);
    if (transposed && item != 2) fail("wgmma: only operands of 16 bits may be transposed");
    if (!transposed) {  // groups of 8 rows of 128 bytes
        for (int row = 0; row < count; ++row) {
            const u32 line = begin + (first + row) / 8 * group + (first + row) % 8 * 128;
            for (int k = 0; k < depth; k += each) {
                const u8* unit = unit_at(warp, line + k * item);
                T* const out = to + k * stride + row;
                for (int i = 0; i < each; ++i) out[i * stride] = decode<T>(element, unit + i * item);
            }
        }
        return;
    }
    for (int k = 0; k < depth; ++k) {  // 64 rows lie side by side in 128 bytes
        for (int row = 0; row < count; row += each) {
            const u32 at = first + row;
            const u32 line = begin + at / 64 * leading + k / 8 * group + k % 8 * 128;
            const u8* unit = unit_at(warp, line + at % 64 * 2);
            for (int i = 0; i < each; ++i) to[k * stride + row + i] = decode<T>(element, unit + i * item);
        }
    }
}

// a of the warp (16 x depth) from its lanes' registers, as to[k * 16 + row].
template <class T>
void read_registers(const Operation& operation, T* to) {
    const int item = static_cast<int>(item_bytes(operation.element)), each = 4 / item;
    for (u32 lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            u8 bytes[4];
            std::memcpy(bytes, &operation.a_registers[lane][i], 4);
            const int row = static_cast<int>(lane / 4) + 8 * (i % 2);
            const int k = (static_cast<int>(lane % 4) + 4 * (i / 2)) * each;
            for (int x = 0; x < each; ++x) {
                to[(k + x) * 16 + row] = decode<T>(operation.element, bytes + x * item);
            }
        }
    }
}

template <class T>
void multiply(const Warp& warp, const Operation& operation) {
    const int columns = operation.d->columns, depth = depth_of(operation.element);
    T a[32 * 16], b[32 * 256];
    if (operation.a_in_registers) {
        read_registers(operation, a);
    } else {
        const int first = static_cast<int>(warp.index % 4 * 16);
        read_operand(warp, operation.a, operation.element, operation.transpose_a, first, 16, a, 16);
    }
    read_operand(warp, operation.b, operation.element, operation.transpose_b, 0, columns, b, columns);
    T* const d = reinterpret_cast<T*>(operation.d->values.data());
    if (!operation.accumulate) std::fill(d, d + 16 * columns, T());
    // The products of one instruction are added exactly, and rounded with the sum so far.
    using Wide = std::conditional_t<std::is_same_v<T, float>, double, int>;
    Wide sum[256];
    for (int row = 0; row < 16; ++row) {
        T* const out = d + row * columns;
        std::copy(out, out + columns, sum);
        for (int k = 0; k < depth; ++k) {
            const Wide x = a[k * 16 + row];
            for (int column = 0; column < columns; ++column) sum[column] += x * b[k * columns + column];
        }
        for (int column = 0; column < columns; ++column) out[column] = static_cast<T>(sum[column]);
    }
}

Operation& operation_of(Warp& warp, u32 lane) { return warp.operations[warp.issued[lane] - warp.executed]; }

// The accumulator in these registers, if one is under way, else a new one.
std::shared_ptr<Accumulator> accumulator_of(Warp& warp, u32 lane, int columns, void* const* d) {
    for (const auto& known : warp.accumulators) {
        if (known->filled >> lane & 1 && known->registers[lane][0] == d[0]) {
            if (known->columns != columns) {
                fail("wgmma of %d columns into registers of %d", columns, known->columns);
            }
            return known;
        }
    }
    auto made = std::make_shared<Accumulator>();
    made->columns = columns;
    made->values.assign(16 * columns, kPoison);
    warp.accumulators.push_back(made);
    return made;
}

// Take the registers of a lane, which hold NaN from now on.
void fill(Accumulator& to, u32 lane, void* const* d) {
    to.filled |= 1u << lane;
    to.registers[lane].assign(d, d + to.columns / 2);
    for (int i = 0; i < to.columns / 2; ++i) {
        std::memcpy(&to.values[row_of(lane, i) * to.columns + column_of(lane, i)], d[i], 4);
        std::memcpy(d[i], &kPoison, 4);
    }
}

}  // namespace

void wgmma(int columns, Element element, void* const* d, const u32* a, u64 a_descriptor, u64 b,
           bool accumulate, int transpose_a, int transpose_b) {
    Fiber& fiber = *machine.running;
    Warp& warp = *fiber.warp;
    const u32 lane = fiber.lane;
    if (warp.issued[lane] - warp.executed == warp.operations.size()) {
        const auto into = accumulator_of(warp, lane, columns, d);
        warp.operations.push_back(
            {element, into, accumulate, a != nullptr, {}, a_descriptor, b, transpose_a, transpose_b});
        warp.operations.back().d->last = warp.issued[lane];
    }
    Operation& operation = operation_of(warp, lane);
    Accumulator& into = *operation.d;
    if (!(into.filled >> lane & 1)) fill(into, lane, d);
    if (into.registers[lane][0] != d[0] || into.columns != columns || operation.element != element ||
        operation.a != a_descriptor || operation.b != b || operation.accumulate != accumulate ||
        operation.a_in_registers != (a != nullptr)) {
        fail("wgmma: lane %u issues another product than the lanes before it", lane);
    }
    if (a != nullptr) std::copy(a, a + 4, operation.a_registers[lane]);
    operation.issued |= 1u << lane;
    ++warp.issued[lane];
    pause();
}

void wgmma_commit() {
    Fiber& fiber = *machine.running;
    Warp& warp = *fiber.warp;
    const u64 end = warp.issued[fiber.lane];
    u32& number = warp.committed[fiber.lane];
    if (number == warp.groups.size()) warp.groups.push_back(end);
    if (warp.groups[number++] != end) {
        fail("wgmma: lane %u commits another group than the lanes before it", fiber.lane);
    }
}

void wgmma_wait(int in_flight) {
    together(kWaitProducts, 0xFFFFFFFF, 0, static_cast<u32>(in_flight), in_flight);
}

void execute_operation(Warp& warp) {
    const Operation& operation = warp.operations.front();
    if (operation.issued != 0xFFFFFFFF) {
        fail("wgmma: only lanes %#x of warp %u issued it", operation.issued, warp.index);
    }
    if (operation.element == Element::s8 || operation.element == Element::u8) {
        multiply<int>(warp, operation);
    } else {
        multiply<float>(warp, operation);
    }
    warp.operations.pop_front();
    ++warp.executed;
}

// All lanes are in wgmma.wait_group: what they wait for is computed, and registers get what is complete.
void finish_wait(Warp& warp, u32 in_flight) {
    for (u32 lane = 1; lane < 32; ++lane) {
        if (warp.issued[lane] != warp.issued[0] || warp.committed[lane] != warp.committed[0]) {
            fail("wgmma: lanes 0 and %u of warp %u issued different products", lane, warp.index);
        }
    }
    const u64 end = warp.groups.size() > in_flight ? warp.groups[warp.groups.size() - 1 - in_flight] : 0;
    while (warp.executed < end) execute_operation(warp);
    auto& all = warp.accumulators;
    for (const auto& one : all) {
        if (one->last >= end) continue;
        for (u32 lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < one->columns / 2; ++i) {
                const int at = row_of(lane, i) * one->columns + column_of(lane, i);
                std::memcpy(one->registers[lane][i], &one->values[at], 4);
            }
        }
    }
    const auto complete = [&](const auto& one) { return one->last < end; };
    all.erase(std::remove_if(all.begin(), all.end(), complete), all.end());
}

void move_matrices(Warp& warp, bool store) {
    const Matrices* lanes[32];
    for (u32 lane = 0; lane < 32; ++lane) lanes[lane] = from_bits<const Matrices*>(warp.arrivals[lane].value);
    Fiber* const caller = machine.running;
    for (int matrix = 0; matrix < lanes[0]->count; ++matrix) {
        for (u32 row = 0; row < 8; ++row) {
            const u32 owner = 8 * matrix + row, place = lanes[owner]->place;
            machine.running = &warp.lanes[owner];
            u8* const line = store ? shared_target(place, 16) : shared_bytes(place, 16);
            for (u32 column = 0; column < 8; ++column) {
                // Transposed: the unit lies with the lane that would hold it at (column, row).
                u32* const word = &lanes[column * 4 + row / 2]->units[matrix];
                u8* const unit = reinterpret_cast<u8*>(word) + row % 2 * 2;
                std::memcpy(store ? line + 2 * column : unit, store ? unit : line + 2 * column, 2);
            }
        }
    }
    machine.running = caller;
}

}  // namespace emulated
