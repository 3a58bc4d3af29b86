// What a convolution does beside its product (im2col). reference.py is the specification: same order of additions, same
// bits. Images are (batch, channels, positions), factors and results of products (rows, batch x positions), so that one
// product does for all images. A thread computes one element, which it collects from where it lies: no atomics.
#include "common.cuh"
#include "windows.cuh"

// Patches: row (channel, place in the window), column (image, position); neighbouring threads read along a line.
template <class T>
__device__ void unfold(const T* __restrict__ x, T* __restrict__ columns, const Windows& w, Index channels) {
    const Index positions = w.out_height * w.out_width, width = w.planes / channels * positions;
    const Index places = w.kernel_y * w.kernel_x;
    for (Index i = this_thread(); i < channels * places * width; i += all_threads()) {
        const Index row = i / width, column = i % width, place = row % places, at = column % positions;
        const Index y = at / w.out_width * w.stride_y - w.padding_y + place / w.kernel_x;
        const Index z = at % w.out_width * w.stride_x - w.padding_x + place % w.kernel_x;
        const Index plane = column / positions * channels + row / places;
        const bool is_inside = y >= 0 && y < w.height && z >= 0 && z < w.width;
        columns[i] = is_inside ? x[(plane * w.height + y) * w.width + z] : T(0);
    }
}

// The sum over all patches that an element lies in, in the order of its places in them.
template <class T>
__device__ void fold(const T* __restrict__ columns, T* __restrict__ x, const Windows& w, Index channels) {
    const Index positions = w.out_height * w.out_width, width = w.planes / channels * positions;
    const Index places = w.kernel_y * w.kernel_x;
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, Index y, Index z) {
        const T* from = columns + plane % channels * places * width + plane / channels * positions;
        T total = 0;
        for_windows_of(w, y, z, [&](Index at, int place) { total += from[place * width + at]; });
        x[i] = total;
    });
}

// From (channels, batch x positions) to images, with bias and ReLU on the way.
template <class T>
__device__ void to_images(
    const T* __restrict__ product, const T* __restrict__ bias, T* __restrict__ out, Index count, Index channels,
    Index positions, bool has_bias, bool relu
) {
    const Index width = count / channels;
    for (Index i = this_thread(); i < count; i += all_threads()) {
        const Index channel = i / positions % channels, image = i / positions / channels;
        T value = product[channel * width + image * positions + i % positions];
        if (has_bias) value = value + bias[channel];
        out[i] = !relu || value > T(0) || value != value ? value : T(0);  // a NaN stays
    }
}

// And back, from images of the gradient; those where the result `out` of ReLU is not positive are 0.
template <class T>
__device__ void from_images(
    const T* __restrict__ gy, const T* __restrict__ out, T* __restrict__ flat, Index count, Index channels,
    Index positions, bool relu
) {
    const Index width = count / channels;
    for (Index i = this_thread(); i < count; i += all_threads()) {
        const Index channel = i / width, image = i % width / positions;
        const Index from = (image * channels + channel) * positions + i % positions;
        flat[i] = !relu || out[from] > T(0) ? gy[from] : T(0);
    }
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

KERNELS(float, f32)
KERNELS(double, f64)
