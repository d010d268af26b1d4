// Workers spin for some tens of microseconds after a call, then sleep until the next one.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace graft {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// True as soon as `ready` holds, false after kSpin.
template <class Ready>
bool spin_until(Ready&& ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Pieces low..high-1 that nobody has taken: the owner takes from the front, others from the back.
struct alignas(64) Share {
    std::atomic<std::uint64_t> word{0};

    static std::uint64_t pack(std::uint32_t low, std::uint32_t high) {
        return (std::uint64_t(high) << 32) | low;
    }

    int take(bool front) {
        std::uint64_t seen = word.load(std::memory_order_acquire);
        for (;;) {
            const auto low = std::uint32_t(seen), high = std::uint32_t(seen >> 32);
            if (low >= high) return -1;
            const std::uint64_t rest = front ? pack(low + 1, high) : pack(low, high - 1);
            // A piece that was taken keeps its call alive, so what the call published before
            // the share is what the taker sees.
            if (word.compare_exchange_weak(seen, rest, std::memory_order_acq_rel)) {
                return int(front ? low : high - 1);
            }
        }
    }
};

}  // namespace

class Pool {
  public:
    explicit Pool(int threads) : threads_(threads), shares_(new Share[threads]) {
        for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { serve(t); });
    }

    ~Pool() {
        closing_.store(true);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    void run(int pieces, Body body, void* context) {
        if (threads_ == 1 || pieces <= 1 || busy_.test_and_set(std::memory_order_acquire)) {
            for (int piece = 0; piece < pieces; ++piece) body(context, piece);
            return;
        }
        body_ = body;
        context_ = context;
        pending_.store(pieces, std::memory_order_relaxed);
        for (int t = 0; t < threads_; ++t) {
            const auto low = std::uint32_t(std::int64_t(pieces) * t / threads_);
            const auto high = std::uint32_t(std::int64_t(pieces) * (t + 1) / threads_);
            shares_[t].word.store(Share::pack(low, high), std::memory_order_release);
        }
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) epoch_.notify_all();
        work(0);
        const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
        if (!spin_until(done)) {
            for (int left; (left = pending_.load(std::memory_order_acquire)) != 0;) {
                pending_.wait(left, std::memory_order_acquire);
            }
        }
        busy_.clear(std::memory_order_release);
    }

  private:
    void work(int self) {
        for (int turn = 0; turn < threads_; ++turn) {
            Share& share = shares_[(self + turn) % threads_];
            for (int piece; (piece = share.take(turn == 0)) >= 0;) {
                body_(context_, piece);
                if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
            }
        }
    }

    void serve(int self) {
        std::uint32_t seen = 0;
        while (!closing_.load(std::memory_order_acquire)) {
            const auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
            if (!spin_until(called)) {
                sleepers_.fetch_add(1);
                epoch_.wait(seen);
                sleepers_.fetch_sub(1);
            }
            seen = epoch_.load(std::memory_order_acquire);
            work(self);
        }
    }

    const int threads_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> workers_;
    Body body_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int> pending_{0};
    alignas(64) std::atomic<std::uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> closing_{false};
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

void run_pieces(Pool* pool, int num_pieces, Body body, void* context) {
    if (pool != nullptr) return pool->run(num_pieces, body, context);
    for (int piece = 0; piece < num_pieces; ++piece) body(context, piece);
}

int num_threads(const Pool* pool) { return pool == nullptr ? 1 : pool->threads(); }

float* scratch(Scratch slot, std::size_t count) {
    struct Buffer {
        float* start = nullptr;
        std::size_t size = 0;
        ~Buffer() { std::free(start); }
    };
    thread_local Buffer buffers[int(Scratch::count)];
    Buffer& buffer = buffers[int(slot)];
    if (buffer.size < count) {
        std::free(buffer.start);
        buffer.size = (count + count / 4 + 1023) / 1024 * 1024;
        buffer.start = static_cast<float*>(std::aligned_alloc(64, buffer.size * sizeof(float)));
        if (buffer.start == nullptr) throw std::bad_alloc();
    }
    return buffer.start;
}

}  // namespace graft

GRAFT_API graft::Pool* graft_pool_create(int threads) { return new graft::Pool(threads); }

GRAFT_API void graft_pool_destroy(graft::Pool* pool) { delete pool; }
