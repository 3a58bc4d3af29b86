// What the kernels of this folder share. Neither CUDA's headers nor the standard library's are included: NVRTC then
// compiles the files wherever it is, in a fraction of the time, and cuda_on_host.h of the tests can stand in for CUDA.
//
// All are compiled with -fmad=false: the specification rounds a product before it is added, and the same bits as on a
// CPU are the contract. What waits for memory does not become slower by it.

typedef long long Index;      // a count may exceed 2^31
typedef unsigned short Half;  // the bits of float16; of bfloat16, too, where a cast's name says so
typedef unsigned int Word;

struct BFloat16 {  // no number, so that nothing computes with its bits
    Half bits;
};

enum { THREADS = 256, WARP = 32 };  // of a block, as cuda/__init__.py launches it, and of those that vote together

#ifdef __CUDACC__
__device__ inline float float_from_half(Half x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
}

__device__ inline Half half_from(float x) {
    Half nearest;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(nearest) : "f"(x));
    return nearest;
}

__device__ inline Half half_from(double x) {
    Half nearest;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(nearest) : "d"(x));
    return nearest;
}

__device__ inline float float_of_bits(Word bits) { return __uint_as_float(bits); }
__device__ inline Word bits_of_float(float x) { return __float_as_uint(x); }
__device__ inline unsigned long long bits_of_double(double x) { return __double_as_longlong(x); }
#endif

// Adding 0x7fff carries into the upper half above a tie, and one more does at a tie whose upper half is odd. A NaN is
// cut off and made quiet: rounded, it could become infinite.
__device__ inline Half bfloat16_from(float x) {
    const Word bits = bits_of_float(x), upper = bits >> 16;
    return Half(x != x ? upper | 0x40 : (bits + ((upper & 1) + 0x7FFF)) >> 16);
}

__device__ inline float float_from_bfloat16(Half x) { return float_of_bits(Word(x) << 16); }

// An element in the type it is computed in: those of 16 bits in float32, anything else as it is.
__device__ inline float widened(Half x) { return float_from_half(x); }
__device__ inline float widened(BFloat16 x) { return float_from_bfloat16(x.bits); }
template <class T> __device__ inline T widened(T x) { return x; }

// An accumulator as an element again, rounded to nearest even.
template <class T, class Wide> __device__ inline T narrowed(Wide x) { return x; }
template <> __device__ inline Half narrowed<Half, float>(float x) { return half_from(x); }
template <> __device__ inline BFloat16 narrowed<BFloat16, float>(float x) { return {bfloat16_from(x)}; }

template <class T> struct WideOf { typedef T Type; };
template <> struct WideOf<Half> { typedef float Type; };
template <> struct WideOf<BFloat16> { typedef float Type; };

// The sum of two elements, rounded as an element, in the type that is computed in.
template <class T> __device__ inline typename WideOf<T>::Type added(const T& a, const T& b) {
    return widened(narrowed<T>(widened(a) + widened(b)));
}

// ReLU, if it is one; a NaN stays.
template <class T> __device__ inline T activated(T x, bool relu) { return !relu || x > 0 || x != x ? x : 0; }

// `x - x` of an infinity or a NaN is a NaN.
template <class T> __device__ inline bool is_finite(T x) { return x - x == T(0); }

// Elements that are loaded or stored at once, 16 bytes if there are as many.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    static constexpr int size = N;
    T at[N];
};

template <int N, class T> __device__ inline Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T> __device__ inline void store(T* to, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Whether packs of N elements can be loaded from `first`, and from all other arrays too.
template <int N> __device__ inline bool is_aligned() { return true; }
template <int N, class T, class... Others> __device__ inline bool is_aligned(const T* first, const Others*... others) {
    return reinterpret_cast<unsigned long long>(first) % alignof(Pack<T, N>) == 0 && is_aligned<N>(others...);
}

// This thread among those of all blocks, and how many there are: all loops stride by that, so any grid will do.
__device__ inline Index this_thread() { return Index(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline Index all_threads() { return Index(gridDim.x) * blockDim.x; }

template <int N> struct Width {
    static constexpr int value = N;
};

// Calls `body(first element, Width<N>)` for whole packs, then `body(element, Width<1>)` for what is left, or for all
// elements if `aligned` says that an array begins within a pack. Neighboring threads take neighboring packs.
template <int N, class Body> __device__ inline void for_packs(Index count, bool aligned, Body body) {
    const Index packs = aligned ? count / N : 0;
    for (Index pack = this_thread(); pack < packs; pack += all_threads()) body(pack * N, Width<N>());
    for (Index i = packs * N + this_thread(); i < count; i += all_threads()) body(i, Width<1>());
}

// `out = compute(element of x, elements of others...)`, element by element; `out` may be any of them.
template <class T, class Compute, class... Others>
__device__ inline void map_packs(T* out, Index count, Compute compute, const T* x, const Others*... others) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(out, x, others...), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const auto computed = [&](auto pack, const auto&... more) {
            for (int k = 0; k < n; ++k) pack.at[k] = compute(pack.at[k], more.at[k]...);
            return pack;
        };
        store(out + i, computed(load<n>(x + i), load<n>(others + i)...));
    });
}

// A pack from where `first` is, which is `aligned` or begins within one.
template <int N, class T> __device__ inline Pack<T, N> load_from(const T* first, bool aligned) {
    if (aligned) return load<N>(first);
    Pack<T, N> pack;
    for (int k = 0; k < N; ++k) pack.at[k] = first[k];
    return pack;
}

template <class T, int N> __device__ inline void store_to(T* first, const Pack<T, N>& pack, bool aligned) {
    if (aligned) {
        store(first, pack);
    } else {
        for (int k = 0; k < N; ++k) first[k] = pack.at[k];
    }
}

// Calls `body(first element, pack)` for the packs of N that are this thread's among `threads`, and for packs of 1 at
// the end. Which elements that are depends on `count` alone, not on where `x` begins, and so does what is added up.
// AT_ONCE packs are loaded before the first of them is used: where a thread does nothing but read, one after the other
// would leave memory idle.
template <int N, int AT_ONCE = 1, class T, class Body>
__device__ inline void for_same_packs(const T* x, Index count, Index thread, Index threads, Body body) {
    const bool aligned = is_aligned<N>(x);
    const Index packs = count / N;
    Index pack = thread;
    for (; pack + (AT_ONCE - 1) * threads < packs; pack += AT_ONCE * threads) {
        Pack<T, N> loaded[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) loaded[k] = load_from<N>(x + (pack + k * threads) * N, aligned);
        for (int k = 0; k < AT_ONCE; ++k) body((pack + k * threads) * N, loaded[k]);
    }
    for (; pack < packs; pack += threads) body(pack * N, load_from<N>(x + pack * N, aligned));
    if (pack != packs) return;
    for (Index i = packs * N; i < count; ++i) body(i, load<1>(x + i));
}

// `combined`, which is the same both ways, of the values of `lanes` neighboring threads, in a fixed order, returned to
// all of them; all threads of the block must call it. `lanes` must be a power of two, at most THREADS.
template <class T, class Combined> __device__ inline T among_lanes(T value, int lanes, Combined combined) {
    const int within_warp = lanes < WARP ? lanes : WARP;
    for (int half = 1; half < within_warp; half *= 2) value = combined(value, __shfl_xor_sync(~0u, value, half));
    if (lanes <= WARP) return value;
    __shared__ T of_warp[THREADS / WARP];
    const int warp = threadIdx.x / WARP, warps = lanes / WARP, first = warp / warps * warps;
    if (threadIdx.x % WARP == 0) of_warp[warp] = value;
    __syncthreads();
    T total = of_warp[first];
    for (int k = 1; k < warps; ++k) total = combined(total, of_warp[first + k]);
    __syncthreads();  // before what comes next overwrites it
    return total;
}

template <class T> __device__ inline T sum_of_lanes(T value, int lanes) {
    return among_lanes(value, lanes, [](T a, T b) { return a + b; });
}

template <class T> __device__ inline T block_sum(T value) { return sum_of_lanes(value, THREADS); }
template <class T> __device__ inline T warp_sum(T value) { return sum_of_lanes(value, WARP); }
