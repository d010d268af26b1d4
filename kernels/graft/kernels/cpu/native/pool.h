// Threads that share the pieces of one call. Knows nothing of what a piece computes.
//
// A piece must not depend on which thread runs it or when: results are the same for any number
// of threads. A call from inside a piece, or while another thread uses the pool, runs serially.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#define GRAFT_API extern "C" __attribute__((visibility("default")))

namespace graft {

class Pool;

using Body = void (*)(void* context, int piece);

// Runs body(context, piece) for every piece in 0..num_pieces-1 and returns when all are done.
// A null pool runs them here, in order.
void run_pieces(Pool* pool, int num_pieces, Body body, void* context);

// Threads that may work on a call, the caller included.
int num_threads(const Pool* pool);

// Calls fn(piece) for every piece in 0..num_pieces-1, on the caller and the pool's workers. Each
// thread starts on its own contiguous share, in ascending order, then takes from the others.
template <class Fn>
void parallel_for(Pool* pool, int num_pieces, Fn&& fn) {
    using Callable = std::remove_reference_t<Fn>;
    run_pieces(
        pool, num_pieces,
        [](void* context, int piece) { (*static_cast<Callable*>(context))(piece); },
        const_cast<void*>(static_cast<const void*>(&fn)));
}

// A buffer of the calling thread, 64-byte aligned, at least `count` floats, kept until the next
// call with the same `slot` from this thread. Slots keep one caller's buffers apart.
enum class Scratch {
    activations,
    partials,
    keys,
    scores,
    normed,
    hidden,
    projected,
    quants,
    features,
    fused,
    joined,
    logits,
    count
};
float* scratch(Scratch slot, std::size_t count);

}  // namespace graft
