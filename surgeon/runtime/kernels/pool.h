// Threads that share work in small pieces, and never wait for one that has not come.
//
// Threads of OpenMP begin and end a loop together: where another process has the core of one of them, all wait until it
// is given back, at every loop. Here whoever has time takes the next piece, the calling thread like any other, and it
// waits at the end only for pieces that others have begun. Threads without work look for some for a short while, then
// sleep. Who calls while another thread's work is shared does its own work alone.
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

class Pool {
public:
    // How many threads may work, the calling one included.
    void set_threads(int64_t threads) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wanted_.store(threads);
        while (started_ + 1 < threads) std::thread(&Pool::help, this, ++started_).detach();
        awake_.notify_all();
        recalled_.notify_all();
    }

    int64_t threads() const { return wanted_.load(std::memory_order_relaxed); }

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
        if (pieces <= 1 || threads() <= 1 || !ours.try_lock()) {
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
        for (int looks = 0; done_.load(std::memory_order_acquire) < pieces; ++looks)
            if (looks < kLooks) PAUSE();
            else std::this_thread::yield();
    }

private:
    static constexpr int64_t kWorthTaking = 1 << 13;          // numbers: some microseconds
    static constexpr int kLooks = 1000;                       // before a core is offered to others
    static constexpr std::chrono::microseconds kIdle{200};    // before a thread sleeps

    using Call = void (*)(const void *, int64_t);

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
        auto since = std::chrono::steady_clock::now();
        for (int looks = 1;; ++looks) {
            const bool wanted = number < threads();
            if (wanted && work()) {
                while (work()) {}
                since = std::chrono::steady_clock::now();
            }
            PAUSE();
            if (wanted && (looks % 64 || std::chrono::steady_clock::now() - since < kIdle)) continue;
            sleep(number);
            since = std::chrono::steady_clock::now();
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
    std::atomic<int64_t> pieces_{0}, done_{0}, wanted_{1}, sleeping_{0};
    uint64_t round_ = 0;
    int64_t started_ = 0;
    std::mutex callers_, mutex_;
    std::condition_variable awake_, recalled_;
};

// Never destroyed: its threads end with the process.
inline Pool &pool() {
    static Pool *const one = new Pool;
    return *one;
}
