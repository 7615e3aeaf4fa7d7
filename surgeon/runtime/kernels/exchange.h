// Sums over the ranks of one machine, and what all of them have side by side, through memory that all of them see: what
// shared_memory.py does, for replays.
//
// That file says how the memory is laid out, and why ranks wait as they do.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "pool.h"
#include "vector.h"

// One rank's view of a group's memory; shared_memory.py has the same fields.
struct Exchanges {
    int64_t started;  // exchanges so far
    int64_t failed;   // the member that was waited for in vain, counted from 1; 0 for none
    int64_t *words;   // flags: [written, read][slot][rank], `line` words apart
    char *room;       // [slot][rank], `room_bytes` each
    int64_t slots, room_bytes, line;
    int64_t ranks, members, member;
    int64_t spin_microseconds;  // as long as has paid lately, between the next two
    int64_t fewest_microseconds, most_microseconds;
    int64_t timeout_seconds;

    int64_t *flag(bool read, int64_t slot, int64_t of) const {
        return words + ((read * slots + slot) * ranks + of) * line;
    }
    float *part(int64_t slot, int64_t of) const {
        return reinterpret_cast<float *>(room + (slot * ranks + of) * room_bytes);
    }
};

// Memory that a thread reads next: it is fetched while others are waited for, when nobody else might use the time.
class ReadNext {
public:
    ReadNext() = default;
    ReadNext(const float *numbers, int64_t count)
        : next_(reinterpret_cast<const char *>(numbers)),
          end_(next_ + std::min<int64_t>(kMost, sizeof(float) * count)) {}

    // Asks for the next few lines; false if all have been asked for.
    bool fetch() {
        if (next_ >= end_) return false;
        ::fetch(next_, kAtOnce);
        next_ += kAtOnce;
        return true;
    }

private:
    static constexpr int64_t kMost = 1 << 18;  // bytes: the second cache has room for them and for more
    static constexpr int64_t kAtOnce = 256;  // of them between two looks: too many requests stop the thread
    const char *next_ = nullptr, *end_ = nullptr;
};

static thread_local ReadNext read_next;

static inline bool has_come(const int64_t *flag, int64_t number) {
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE) >= number;
}

// Waits until a flag has come to a number; false if that took too long.
static bool wait_for(Exchanges &own, const int64_t *flag, int64_t number) {
    using namespace std::chrono;
    constexpr int kLooks = 64;  // between two looks at the clock
    constexpr microseconds kShort{20}, kLong{5000};
    constexpr int kLateness = 20;  // sleeps are such a part of the time waited
    if (has_come(flag, number)) return true;
    const auto began = steady_clock::now();
    const microseconds spin{own.spin_microseconds};
    for (int looks = 1;; ++looks) {
        if (has_come(flag, number)) return true;
        if (!read_next.fetch()) PAUSE();
        if (looks % kLooks == 0 && steady_clock::now() - began >= spin) break;
    }
    while (!has_come(flag, number)) {
        const auto waited = duration_cast<microseconds>(steady_clock::now() - began);
        if (waited > seconds(own.timeout_seconds)) return false;
        std::this_thread::sleep_for(std::clamp(waited / kLateness, kShort, kLong));
    }
    const bool longer = steady_clock::now() - began < microseconds(own.most_microseconds);
    own.spin_microseconds = std::clamp(
        longer ? 2 * own.spin_microseconds : own.spin_microseconds / 2, own.fewest_microseconds,
        own.most_microseconds);
    return true;
}

// Waits for all members; false if one has not come, now or before.
static bool wait_for_all(Exchanges &own, bool read, int64_t slot, int64_t number) {
    for (int64_t of = 0; of < own.members && !own.failed; ++of)
        if (!wait_for(own, own.flag(read, slot, of), number)) own.failed = of + 1;
    return !own.failed;
}

// Writes this rank's part, `count` numbers; nobody may wait for what was in its slot before.
static void start(Exchanges &own, const float *part, int64_t count) {
    const int64_t number = own.started++, slot = number % own.slots;
    if (!wait_for_all(own, true, slot, number - own.slots + 1)) return;
    std::memcpy(own.part(slot, own.member), part, sizeof(float) * count);
    __atomic_store_n(own.flag(false, slot, own.member), number + 1, __ATOMIC_RELEASE);
}

// Reads what all members wrote for the exchange that was started as the `back`-th from the end, in its slot.
template <typename Read>
static void finish(Exchanges &own, int64_t back, Read read) {
    const int64_t number = own.started - back, slot = number % own.slots;
    if (!wait_for_all(own, false, slot, number + 1)) return;
    read(slot);
    __atomic_store_n(own.flag(true, slot, own.member), number + 1, __ATOMIC_RELEASE);
}

// The sum of all parts, in the order of the members.
static void sum_parts(const Exchanges &own, int64_t slot, int64_t count, float *y) {
    const float *first = own.part(slot, 0), *second = own.part(slot, 1);
    for (int64_t at = 0; at < count; ++at) y[at] = first[at] + second[at];
    for (int64_t of = 2; of < own.members; ++of) {
        const float *part = own.part(slot, of);
        for (int64_t at = 0; at < count; ++at) y[at] += part[at];
    }
}

// All parts, (members, count).
static void gather_parts(const Exchanges &own, int64_t slot, int64_t count, float *y) {
    for (int64_t of = 0; of < own.members; ++of) std::memcpy(y + of * count, own.part(slot, of), sizeof(float) * count);
}
