// Average and max pooling. Specification: hpcdp/kernels/reference.py, with the same order of additions and the same
// bits; 16-bit results are those of float32 rounded once. A thread computes one element of the result, or of the
// gradient, from all windows that contain it: no atomics. For adjacent windows of 2 x 2, the usual ones, it reads 16
// bytes of a row at once: of two rows for results, of one for the gradient.
#include "common.cuh"
#include "windows.cuh"

// Calls `body(Width<elements that a thread takes at once>)`.
template <class T, class Body> __device__ inline void by_packs(const Windows& w, bool aligned, Body body) {
    constexpr int N = 16 / sizeof(T);
    if (aligned && are_packs_of_pairs<N>(w)) {
        body(Width<N>());
    } else {
        body(Width<1>());
    }
}

// Calls `body(Width<n>, first of the PAIRS<n> results, the first element of their plane, y, x)`.
template <class T, class Body> __device__ inline void for_results(const Windows& w, bool aligned, Body body) {
    by_packs<T>(w, aligned, [&](auto width) {
        constexpr int results = PAIRS<decltype(width)::value>;
        for_elements(w.planes, w.out_height, w.out_width / results, [&](Index i, Index plane, int y, int x) {
            body(width, i * results, plane * w.height * w.width, y, x * results);
        });
    });
}

// Calls `body(Width<n>, first of n elements, the first window of their plane, y, x)`.
template <class T, class Body> __device__ inline void for_gradients(const Windows& w, bool aligned, Body body) {
    by_packs<T>(w, aligned, [&](auto width) {
        constexpr int n = decltype(width)::value;
        for_elements(w.planes, w.height, w.width / n, [&](Index i, Index plane, int y, int x) {
            body(width, i * n, plane * w.out_height * w.out_width, y, x * n);
        });
    });
}

// Whether packs of elements can be loaded or stored, and those of the results of their windows.
template <class T, class... Results> __device__ inline bool are_aligned(const T* elements, const Results*... results) {
    constexpr int N = 16 / sizeof(T);
    return is_aligned<N>(elements) && is_aligned<PAIRS<N>>(results...);
}

template <class T, class Wide>
__device__ void average_pool(const T* __restrict__ x, T* __restrict__ out, const Windows& w, Wide share) {
    for_results<T>(w, are_aligned(x, out), [&](auto width, Index i, Index plane, int at_y, int at_x) {
        constexpr int n = decltype(width)::value;
        Wide total[PAIRS<n>] = {};
        for_window<n>(w, at_y, at_x, [&](Index at, int) {
            const auto pack = load<n>(x + plane + at);
            for (int k = 0; k < n; ++k) total[k / 2] += widened(pack.at[k]);
        });
        Pack<T, PAIRS<n>> means;
        for (int k = 0; k < PAIRS<n>; ++k) means.at[k] = narrowed<T>(total[k] * share);
        store(out + i, means);
    });
}

template <class T, class Wide>
__device__ void average_pool_gradient(const T* __restrict__ gy, T* __restrict__ dx, const Windows& w, Wide share) {
    for_gradients<T>(w, are_aligned(dx, gy), [&](auto width, Index i, Index plane, int y, int x) {
        constexpr int n = decltype(width)::value;
        Wide total[n] = {};
        for_windows_of<n>(w, y, x, [&](Index at, int) {
            const auto given = load<PAIRS<n>>(gy + plane + at);
            for (int k = 0; k < n; ++k) total[k] += widened(given.at[k / 2]) * share;
        });
        Pack<T, n> pack;
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(total[k]);
        store(dx + i, pack);
    });
}

template <class T>
__device__ void max_pool(const T* __restrict__ x, T* __restrict__ out, int* __restrict__ chosen, const Windows& w) {
    typedef typename WideOf<T>::Type Wide;
    for_results<T>(w, are_aligned(x, out, chosen), [&](auto width, Index i, Index plane, int at_y, int at_x) {
        constexpr int n = decltype(width)::value;
        Wide largest[PAIRS<n>];
        Pack<int, PAIRS<n>> places;
        for (int k = 0; k < PAIRS<n>; ++k) {
            largest[k] = -1 / Wide(0);
            places.at[k] = -1;
        }
        for_window<n>(w, at_y, at_x, [&](Index at, int number) {
            const auto pack = load<n>(x + plane + at);
            for (int k = 0; k < n; ++k) {
                const Wide each = widened(pack.at[k]);
                if (places.at[k / 2] < 0 || each > largest[k / 2] || each != each) {  // no NaN is lost
                    largest[k / 2] = each;
                    places.at[k / 2] = number + k % 2;
                }
            }
        });
        Pack<T, PAIRS<n>> found;
        for (int k = 0; k < PAIRS<n>; ++k) found.at[k] = narrowed<T>(largest[k]);
        store(out + i, found);
        store(chosen + i, places);
    });
}

template <class T>
__device__ void max_pool_gradient(
    const T* __restrict__ gy, const int* __restrict__ chosen, T* __restrict__ dx, const Windows& w
) {
    for_gradients<T>(w, are_aligned(dx, gy, chosen), [&](auto width, Index i, Index plane, int y, int x) {
        constexpr int n = decltype(width)::value;
        typename WideOf<T>::Type total[n] = {};
        for_windows_of<n>(w, y, x, [&](Index at, int number) {
            const auto given = load<PAIRS<n>>(gy + plane + at);
            const auto places = load<PAIRS<n>>(chosen + plane + at);
            for (int k = 0; k < n; ++k) {
                if (places.at[k / 2] == number + k % 2) total[k] += widened(given.at[k / 2]);
            }
        });
        Pack<T, n> pack;
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(total[k]);
        store(dx + i, pack);
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void average_pool_##NAME(const T* x, T* out, Windows w, WIDE share) {                        \
        average_pool(x, out, w, share);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void average_pool_gradient_##NAME(const T* gy, T* dx, Windows w, WIDE share) {               \
        average_pool_gradient(gy, dx, w, share);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_##NAME(const T* x, T* out, int* chosen, Windows w) {                           \
        max_pool(x, out, chosen, w);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_gradient_##NAME(const T* gy, const int* chosen, T* dx, Windows w) {            \
        max_pool_gradient(gy, chosen, dx, w);                                                                          \
    }

KERNELS(Half, float, f16)
KERNELS(BFloat16, float, bf16)
KERNELS(float, float, f32)
KERNELS(double, double, f64)
