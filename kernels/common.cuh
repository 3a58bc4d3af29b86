// What the kernels of this folder share. Neither CUDA's headers nor the standard library's are included: NVRTC then
// compiles the files wherever it is, in a fraction of the time, and tests/kernels/cuda_on_host.h can stand in for CUDA.
//
// All are compiled with -fmad=false: the specification rounds a product before it is added, and the same bits as on a
// CPU are the contract. What waits for memory does not become slower by it.

typedef long long Index;      // a count may exceed 2^31
typedef unsigned short Half;  // the bits of float16; of bfloat16, too, where a cast's name says so
typedef unsigned int Word;

struct BFloat16 {  // no number, so that nothing computes with its bits
    Half bits;
};

enum { THREADS = 256, WARP = 32 };  // of a block, as cuda.py launches it, and of those that vote together

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
// elements if `aligned` says that an array begins within a pack. Neighbouring threads take neighbouring packs.
template <int N, class Body> __device__ inline void for_packs(Index count, bool aligned, Body body) {
    const Index packs = aligned ? count / N : 0;
    for (Index pack = this_thread(); pack < packs; pack += all_threads()) body(pack * N, Width<N>());
    for (Index i = packs * N + this_thread(); i < count; i += all_threads()) body(i, Width<1>());
}

// Calls `body(first element, pack, how many elements are in it)` for the packs of N that are this thread's among
// `threads`. Which elements that are depends on `count` alone, not on where `x` begins, and so does what is added up.
template <int N, class T, class Body>
__device__ inline void for_same_packs(const T* x, Index count, Index thread, Index threads, Body body) {
    const bool aligned = is_aligned<N>(x);
    for (Index first = thread * N; first < count; first += threads * N) {
        const int n = count - first < N ? int(count - first) : N;
        Pack<T, N> pack;
        if (aligned && n == N) {
            pack = load<N>(x + first);
        } else {
            for (int k = 0; k < n; ++k) pack.at[k] = x[first + k];
        }
        body(first, pack, n);
    }
}

// Stores the first `n` elements of a pack, at once if it is whole and `to` allows it.
template <class T, int N> __device__ inline void store_some(T* to, const Pack<T, N>& pack, int n) {
    if (n == N && is_aligned<N>(to)) {
        store(to, pack);
    } else {
        for (int k = 0; k < n; ++k) to[k] = pack.at[k];
    }
}

// `combined` of the values of `lanes` neighbouring threads, in a fixed order, returned to all of them; all threads of
// the block must call it. `lanes` must be a power of two that divides blockDim.x, at most THREADS.
template <class T, class Combined> __device__ inline T among_lanes(T value, unsigned lanes, Combined combined) {
    __shared__ T partial[THREADS];
    const unsigned first = threadIdx.x / lanes * lanes, lane = threadIdx.x % lanes;
    partial[threadIdx.x] = value;
    for (unsigned half = lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) partial[threadIdx.x] = combined(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    __syncthreads();
    const T total = partial[first];
    __syncthreads();  // before what comes next overwrites it
    return total;
}

template <class T> __device__ inline T sum_of_lanes(T value, unsigned lanes) {
    return among_lanes(value, lanes, [](T a, T b) { return a + b; });
}

template <class T> __device__ inline T block_sum(T value) { return sum_of_lanes(value, blockDim.x); }
