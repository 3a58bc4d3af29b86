// What kernels/*.cu need of CUDA, for a host compiler: the tests run the same bodies where there is no GPU.
//
// The threads of a block are fibers of one thread, which take turns where they wait for each other, so barriers and
// ballots work as on a GPU; blocks run one after another. Every other launch has blocks, and threads between barriers, in
// the opposite order: where a barrier is missing, one of two launches differs. A wait that can never end, because a
// thread of the block or of the warp has returned or waits elsewhere, ends the launch with an error. So does a load or
// store that a GPU refuses because of its alignment: g++ calls the handler below (-fsanitize=alignment).
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __restrict__ __restrict
#define __launch_bounds__(...)

using std::exp;
using std::log;
using std::sqrt;

struct Dim {
    unsigned x, y, z;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

inline float float_from_half(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}

template <class T> inline unsigned short half_from(T x) {
    const _Float16 half = x;
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline float float_of_bits(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline unsigned bits_of_float(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline unsigned long long bits_of_double(double x) {
    unsigned long long bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

inline long long clock64() {
    static long long now;
    return now += 1000;
}

inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Of integers alone: the result of adding floats would depend on the order.
inline unsigned atomicAdd(unsigned* to, unsigned value) { return std::exchange(*to, *to + value); }

namespace on_host {

constexpr unsigned WARP_SIZE = 32;
constexpr std::size_t STACK_NBYTES = 1 << 15;

struct Barrier {
    unsigned arrived = 0, passed = 0;
};

struct Warp {
    Barrier barrier;
    unsigned votes = 0;
    unsigned long long given[2][WARP_SIZE] = {};
};

struct Fiber {
    unsigned exchanges = 0;
    jmp_buf place;  // swapcontext would ask the system twice a turn
    std::vector<char> stack = std::vector<char>(STACK_NBYTES);
    bool has_begun = false, is_done = false;
};

static jmp_buf scheduler;
static std::deque<Fiber> fibers;  // kept for the blocks that follow
static unsigned current;
static bool has_moved;  // whether any thread of the block went on in this round
static bool is_backwards;
static Barrier block_barrier;
static std::vector<Warp> warps;
static bool is_misaligned;
static void (*body)(void*);
static void* body_of;

inline void let_others() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

inline void meet(Barrier& barrier, unsigned threads) {
    const unsigned turn = barrier.passed;
    has_moved = true;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.passed;
    }
    while (barrier.passed == turn) let_others();
    has_moved = true;
}

inline unsigned warp_size() {  // the last warp of a block may be smaller
    const unsigned first = threadIdx.x / WARP_SIZE * WARP_SIZE;
    return blockDim.x - first < WARP_SIZE ? blockDim.x - first : WARP_SIZE;
}

inline void end_fiber() {
    fibers[current].is_done = true;
    has_moved = true;
    let_others();
}

inline void run_fiber() {
    while (true) {  // each time in another block
        body(body_of);
        end_fiber();
    }
}

inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.has_begun) _longjmp(fiber.place, 1);
    fiber.has_begun = true;
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = fiber.stack.data();
    first.uc_stack.ss_size = fiber.stack.size();
    makecontext(&first, run_fiber, 0);
    setcontext(&first);
}

[[noreturn]] inline void fail(const char* why) {
    fibers.clear();  // they stand somewhere in the body
    throw std::runtime_error(why);
}

inline unsigned in_order(unsigned turn, unsigned of) { return is_backwards ? of - 1 - turn : turn; }

inline void run_block() {
    is_misaligned = false;
    block_barrier = Barrier();
    warps.assign(blockDim.x / WARP_SIZE + 1, Warp());
    while (fibers.size() < blockDim.x) fibers.emplace_back();
    for (Fiber& fiber : fibers) {
        fiber.is_done = false;
        fiber.exchanges = 0;
    }
    for (unsigned done = 0; done < blockDim.x;) {
        has_moved = false;
        for (unsigned turn = 0; turn < blockDim.x; ++turn) {
            current = in_order(turn, blockDim.x);
            if (fibers[current].is_done) continue;
            threadIdx.x = current;
            resume(fibers[current]);
            done += fibers[current].is_done;
        }
        if (is_misaligned) fail("a load or store of misaligned memory");
        if (!has_moved) fail("a thread waits at a barrier that others never reach");
    }
}

template <class... Args, std::size_t... I>
void launch(void (*kernel)(Args...), void** args, unsigned grid, unsigned block, std::index_sequence<I...>) {
    auto call = [&] { kernel(*static_cast<Args*>(args[I])...); };
    body = [](void* of) { (*static_cast<decltype(call)*>(of))(); };
    body_of = &call;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    is_backwards = !is_backwards;
    for (unsigned turn = 0; turn < grid; ++turn) {
        blockIdx.x = in_order(turn, grid);
        run_block();
    }
}

}  // namespace on_host

// Called instead of the access; the thread ends there.
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void*, unsigned long) {
    on_host::is_misaligned = true;
    on_host::end_fiber();
}

inline void __syncthreads() { on_host::meet(on_host::block_barrier, blockDim.x); }

inline void __syncwarp() {
    on_host::meet(on_host::warps[threadIdx.x / on_host::WARP_SIZE].barrier, on_host::warp_size());
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    on_host::Warp& warp = on_host::warps[threadIdx.x / on_host::WARP_SIZE];
    const unsigned threads = on_host::warp_size(), lane = threadIdx.x % on_host::WARP_SIZE;
    if (lane == 0) warp.votes = 0;
    on_host::meet(warp.barrier, threads);
    warp.votes |= unsigned(vote) << lane;
    on_host::meet(warp.barrier, threads);
    const unsigned votes = warp.votes;
    on_host::meet(warp.barrier, threads);  // before the next ballot clears it
    return votes;
}

// Every other exchange has the same room, so one meeting each is enough: who comes to the next has read from this one.
template <class T> inline T exchanged(T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "as on a GPU");
    on_host::Warp& warp = on_host::warps[threadIdx.x / on_host::WARP_SIZE];
    auto& given = warp.given[on_host::fibers[on_host::current].exchanges++ % 2];
    std::memcpy(&given[threadIdx.x % on_host::WARP_SIZE], &value, sizeof value);
    on_host::meet(warp.barrier, on_host::warp_size());
    std::memcpy(&value, &given[from], sizeof value);
    return value;
}

template <class T> inline T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return exchanged(value, threadIdx.x % on_host::WARP_SIZE ^ mask);
}

template <class T> inline T __shfl_sync(unsigned, T value, unsigned from) { return exchanged(value, from); }

template <class T> inline T __shfl_up_sync(unsigned, T value, unsigned by) {
    const unsigned lane = threadIdx.x % on_host::WARP_SIZE;
    return exchanged(value, lane < by ? lane : lane - by);
}

// `args` are the addresses of the arguments, as cuLaunchKernel takes them. Returns null or what went wrong.
template <class... Args>
const char* launch_on_host(void (*kernel)(Args...), void** args, unsigned num_args, unsigned grid, unsigned block) {
    if (num_args != sizeof...(Args)) return "another number of arguments than the kernel has";
    try {
        on_host::launch(kernel, args, grid, block, std::index_sequence_for<Args...>());
    } catch (const std::exception& error) {
        static std::string said;
        said = error.what();
        return said.c_str();
    }
    return nullptr;
}
