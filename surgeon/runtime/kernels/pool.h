// Threads that share work in small pieces, and never wait for one that has not come.
//
// Threads of OpenMP begin and end a loop together: where another process has the core of one of them, all wait until it
// is given back, at every loop. Here whoever has time takes the next piece, the calling thread like any other, and it
// waits at the end only for pieces that others have begun. Threads without work look for some for a short while, then
// sleep. Who calls while another thread's work is shared does its own work alone.
//
// A thread that loses its core in the middle of a piece holds up the others. Where that takes much of the time, another
// process wants that core: one thread fewer works for a while, which is faster than waiting, and leaves the core to it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() asm volatile("yield")
#else
#define PAUSE() std::this_thread::yield()
#endif

// Its clock is the system's, but where a test says how much time has passed.
template <typename Clock>
class PoolBy {
public:
    // How many threads may work, the calling one included.
    void set_threads(int64_t threads) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wanted_.store(threads);
        resting_.store(0);
        while (started_ + 1 < threads) std::thread(&PoolBy::help, this, ++started_).detach();
        awake_.notify_all();
        recalled_.notify_all();
    }

    // How many may at present.
    int64_t threads() const {
        return std::max<int64_t>(1, wanted_.load(std::memory_order_relaxed) - resting_.load(std::memory_order_relaxed));
    }

    // Calls body(row) for all rows, of `width` numbers each; as many of them as are worth another thread's taking are one
    // piece.
    template <typename Body>
    void share_rows(int64_t rows, int64_t width, const Body &body) {
        const int64_t together = std::max<int64_t>(1, kWorthTaking / std::max<int64_t>(1, width));
        share((rows + together - 1) / together, [&](int64_t piece) {
            const int64_t end = std::min(rows, (piece + 1) * together);
            for (int64_t row = piece * together; row < end; ++row) body(row);
        });
    }

    // Calls body(piece) for all pieces from 0 to `pieces`, in any order.
    template <typename Body>
    void share(int64_t pieces, const Body &body) {
        std::unique_lock<std::mutex> ours(callers_, std::defer_lock);
        if (pieces > 1 && wanted_.load(std::memory_order_relaxed) > 1 && ours.try_lock()) judge();
        if (!ours.owns_lock() || threads() <= 1) {
            for (int64_t piece = 0; piece < pieces; ++piece) body(piece);
            return;
        }
        pieces_.store(pieces);
        call_.store([](const void *context, int64_t piece) { (*static_cast<const Body *>(context))(piece); });
        context_.store(&body);
        done_.store(0);
        left_.store((++round_ << 32) | static_cast<uint64_t>(pieces));
        if (sleeping_.load() > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            awake_.notify_all();
        }
        while (work()) {}
        wait([&] { return done_.load(std::memory_order_acquire) == pieces; });
    }

private:
    using Time = typename Clock::time_point;
    using Duration = typename Clock::duration;

    static constexpr int64_t kWorthTaking = 1 << 13;          // numbers: some microseconds
    static constexpr int kLooks = 1000;                       // before a core is offered to others
    static constexpr std::chrono::microseconds kIdle{200};    // before a thread sleeps
    static constexpr std::chrono::microseconds kStall{500};   // a shorter wait is for a piece, not for a core
    static constexpr std::chrono::milliseconds kWatched{100}; // time of which no more than `kLost` is to be lost
    static constexpr std::chrono::milliseconds kLost{40};     // two threads do less then than one
    static constexpr int kOften = 3;                          // and not by an interruption or two of all the machine
    static constexpr std::chrono::seconds kRest{1};           // of a thread, before it is tried again

    using Call = void (*)(const void *, int64_t);

    // Waits for pieces that others have begun, and takes note if one of them seems to have no core.
    template <typename Done>
    void wait(const Done &done) {
        for (int looks = 0; looks < kLooks && !done(); ++looks) PAUSE();
        if (done()) return;
        const Time begun = Clock::now();
        while (!done()) std::this_thread::yield();
        const auto lost = Clock::now() - begun;
        if (lost < kStall) return;
        lost_.fetch_add(lost.count());
        times_.fetch_add(1);
    }

    // Has one thread fewer work from now on where too much time is lost, and one more again when it has rested.
    void judge() {
        const bool rests = resting_.load(std::memory_order_relaxed) > 0, loses = times_.load(std::memory_order_relaxed) > 0;
        if (!rests && !loses) return;
        const Time now = Clock::now();
        const int64_t others = threads() - 1;  // all of them take note of one that holds them up
        const bool too_much = others && times_.load() >= kOften * others && Duration(lost_.load()) >= kLost * others;
        if (too_much || now - watched_since_ > kWatched) {
            watched_since_ = now;
            lost_.store(0);
            times_.store(0);
        }
        if (!too_much && !(rests && now >= rested_)) return;
        rested_ = now + kRest;
        const std::lock_guard<std::mutex> lock(mutex_);
        const int64_t resting = resting_.load() + (too_much ? 1 : -1);
        resting_.store(std::clamp<int64_t>(resting, 0, wanted_.load() - 1));
        recalled_.notify_all();
    }

    static bool any(uint64_t left) { return static_cast<uint32_t>(left) > 0; }

    // Does one piece, if one is left.
    //
    // What is read of a round before its piece is taken may be of the next one already, but then taking fails: pieces
    // are left of a round as long as what it is has not been replaced.
    bool work() {
        uint64_t left = left_.load();
        while (any(left)) {
            const Call call = call_.load();
            const void *context = context_.load();
            const int64_t piece = pieces_.load() - static_cast<int64_t>(static_cast<uint32_t>(left));
            if (left_.compare_exchange_weak(left, left - 1)) {
                call(context, piece);
                done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    void help(int64_t number) {
        Time since = Clock::now();
        for (int looks = 1;; ++looks) {
            const bool wanted = number < threads();
            if (wanted && work()) {
                while (work()) {}
                const uint64_t round = left_.load();
                if (!any(round)) wait([&] { return left_.load() != round || done_.load() == pieces_.load(); });
                since = Clock::now();
            }
            PAUSE();
            if (wanted && (looks % 64 || Clock::now() - since < kIdle)) continue;
            sleep(number);
            since = Clock::now();
        }
    }

    void sleep(int64_t number) {
        std::unique_lock<std::mutex> lock(mutex_);
        recalled_.wait(lock, [&] { return number < threads(); });
        ++sleeping_;  // before looking: who brings work looks for sleepers after it has brought it
        awake_.wait(lock, [&] { return number >= threads() || any(left_.load()); });
        --sleeping_;
    }

    std::atomic<uint64_t> left_{0};  // the round's number, and in the lower half how many pieces are left
    std::atomic<Call> call_{nullptr};
    std::atomic<const void *> context_{nullptr};
    std::atomic<int64_t> pieces_{0}, done_{0}, wanted_{1}, resting_{0}, sleeping_{0};
    std::atomic<typename Duration::rep> lost_{0};  // time that threads have waited for others that seem to have no core
    std::atomic<int64_t> times_{0};
    Time watched_since_{}, rested_{};  // the caller's whose work is shared
    uint64_t round_ = 0;
    int64_t started_ = 0;
    std::mutex callers_, mutex_;
    std::condition_variable awake_, recalled_;
};

using Pool = PoolBy<std::chrono::steady_clock>;

// Never destroyed: its threads end with the process.
inline Pool &pool() {
    static Pool *const one = new Pool;
    return *one;
}
