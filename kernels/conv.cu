// The steps of a convolution beside its product (im2col). Specification: hpcdp/kernels/reference.py, with the same
// order of additions and the same bits; 16-bit results are those of float32 rounded once. Images are (batch, channels,
// positions); factors and results of products are (rows, batch x positions), so one product serves all images. A thread
// computes one element from all elements that contribute to it: no atomics.
#include "common.cuh"
#include "windows.cuh"

// Patches: row (channel, place in the window), column (image, position). A thread has one position in a plane, and
// writes all places of it; neighboring threads write along a row.
template <class T>
__device__ void unfold(const T* __restrict__ x, T* __restrict__ columns, const Windows& w, Index channels) {
    const Index positions = Index(w.out_height) * w.out_width, width = w.planes / channels * positions;
    for_elements(w.planes, w.out_height, w.out_width, [&](Index, Index plane, int at_y, int at_x) {
        const int top = at_y * w.stride_y - w.padding_y, left = at_x * w.stride_x - w.padding_x;
        const Index channel = plane % channels, image = plane / channels;
        const T* from = x + plane * w.height * w.width;
        const Index position = Index(at_y) * w.out_width + at_x;
        T* to = columns + channel * w.kernel_y * w.kernel_x * width + image * positions + position;
        for (int y = top; y < top + w.kernel_y; ++y) {
            for (int z = left; z < left + w.kernel_x; ++z, to += width) {
                const bool is_inside = y >= 0 && y < w.height && z >= 0 && z < w.width;
                *to = is_inside ? from[Index(y) * w.width + z] : T{};
            }
        }
    });
}

// The sum over all patches that an element lies in, in the order of its places in them.
template <class T>
__device__ void fold(const T* __restrict__ columns, T* __restrict__ x, const Windows& w, Index channels) {
    const Index positions = Index(w.out_height) * w.out_width, width = w.planes / channels * positions;
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, int y, int z) {
        const Index channel = plane % channels, image = plane / channels;
        const T* from = columns + channel * w.kernel_y * w.kernel_x * width + image * positions;
        typename WideOf<T>::Type total = 0;
        for_windows_of(w, y, z, [&](Index at, int place) { total += widened(from[place * width + at]); });
        x[i] = narrowed<T>(total);
    });
}

// From (channels, batch x positions) to images, with bias and ReLU on the way.
template <class T>
__device__ void to_images(
    const T* __restrict__ product, const T* __restrict__ bias, T* __restrict__ out, Index count, Index channels,
    Index positions, bool has_bias, bool relu
) {
    constexpr int N = 16 / sizeof(T);
    const Index width = count / channels;
    const bool aligned = is_aligned<N>(product, out) && positions % N == 0;  // no pack lies in two planes
    for_packs<N>(count, aligned, [&](Index i, auto pack_width) {
        constexpr int n = decltype(pack_width)::value;
        const Index plane = i / positions, channel = plane % channels, image = plane / channels;
        auto pack = load<n>(product + channel * width + image * positions + i % positions);
        const auto added = widened(has_bias ? bias[channel] : T{});
        for (int k = 0; k < n; ++k) {
            const auto value = widened(pack.at[k]);
            pack.at[k] = narrowed<T>(activated(has_bias ? value + added : value, relu));
        }
        store(out + i, pack);
    });
}

// And back, from images of the gradient; those where the result `out` of ReLU is not positive are 0.
template <class T>
__device__ void from_images(
    const T* __restrict__ gy, const T* __restrict__ out, T* __restrict__ flat, Index count, Index channels,
    Index positions, bool relu
) {
    constexpr int N = 16 / sizeof(T);
    const Index width = count / channels;
    const bool aligned = is_aligned<N>(gy, out, flat) && positions % N == 0;
    for_packs<N>(count, aligned, [&](Index i, auto pack_width) {
        constexpr int n = decltype(pack_width)::value;
        const Index channel = i / width, image = i % width / positions;
        const Index from = (image * channels + channel) * positions + i % positions;
        auto pack = load<n>(gy + from);
        if (relu) {
            const auto result = load<n>(out + from);
            for (int k = 0; k < n; ++k) pack.at[k] = widened(result.at[k]) > 0 ? pack.at[k] : T{};
        }
        store(flat + i, pack);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void unfold_##NAME(const T* x, T* columns, Windows w, Index channels) {                      \
        unfold(x, columns, w, channels);                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void fold_##NAME(const T* columns, T* x, Windows w, Index channels) {                        \
        fold(columns, x, w, channels);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void to_images_##NAME(                                                                       \
        const T* product, const T* bias, T* out, Index count, Index channels, Index positions, bool has_bias,          \
        bool relu                                                                                                      \
    ) {                                                                                                                \
        to_images(product, bias, out, count, channels, positions, has_bias, relu);                                     \
    }                                                                                                                  \
    extern "C" __global__ void from_images_##NAME(                                                                     \
        const T* gy, const T* out, T* flat, Index count, Index channels, Index positions, bool relu                    \
    ) {                                                                                                                \
        from_images(gy, out, flat, count, channels, positions, relu);                                                  \
    }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
