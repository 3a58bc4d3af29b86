// Softmax and cross-entropy. reference_cross_entropy.py is the specification: the same numbers up to the rounding of
// exp and log, and the same bits of the gradient for the same chances. Sums are in float64, in an order that depends on
// the number of classes alone. A label that is out of range, which nobody can see without waiting for the device, makes
// the loss and all chances of its row NaN.
#include "common.cuh"

// `lanes` neighbouring threads have a row, so that short rows share a block; see `among_lanes`.
template <class T>
__device__ void softmax_cross_entropy(
    const T* __restrict__ logits, const Index* __restrict__ labels, T* __restrict__ chances, T* __restrict__ losses,
    Index rows, Index classes, int lanes
) {
    constexpr int N = 16 / sizeof(T);
    const int lane = threadIdx.x % lanes;
    const Index at_once = blockDim.x / lanes;
    for (Index first = blockIdx.x * at_once; first < rows; first += gridDim.x * at_once) {
        const Index row = first + threadIdx.x / lanes;
        const Index width = row < rows ? classes : 0;  // what is no row waits with the others
        const T* const x = logits + row * classes;
        T largest = -1 / T(0);  // a NaN is lost here, and found again in the sum
        for_same_packs<N>(x, width, lane, lanes, [&](Index, const auto& pack) {
            for (int k = 0; k < pack.size; ++k) largest = pack.at[k] > largest ? pack.at[k] : largest;
        });
        largest = among_lanes(largest, lanes, [](T a, T b) { return a > b ? a : b; });
        double sum = 0;
        for_same_packs<N>(x, width, lane, lanes, [&](Index, const auto& pack) {
            for (int k = 0; k < pack.size; ++k) sum += exp(pack.at[k] - largest);
        });
        T total = sum_of_lanes(sum, lanes);
        if (width == 0) continue;
        const Index label = labels[row];
        const bool is_class = label >= 0 && label < classes;
        if (!is_class) total = float_of_bits(0x7FC00000);
        T* const out = chances + row * classes;
        const bool aligned = is_aligned<N>(out);
        for_same_packs<N>(x, width, lane, lanes, [&](Index i, auto pack) {
            for (int k = 0; k < pack.size; ++k) pack.at[k] = exp(pack.at[k] - largest) / total;
            store_to(out + i, pack, aligned);
        });
        if (lane == 0) losses[row] = log(total) - (is_class ? x[label] - largest : T(0));
    }
}

template <class T>
__device__ void softmax_cross_entropy_gradient(
    const T* __restrict__ gy, const Index* __restrict__ labels, const T* __restrict__ chances, T* __restrict__ dx,
    Index count, Index classes
) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(chances, dx) && classes % N == 0;  // no pack lies in two rows
    for_packs<N>(count, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index row = i / classes;
        const Index place = labels[row] - i % classes;  // of the label in the pack
        const T of_row = gy[row];
        auto pack = load<n>(chances + i);
        for (int k = 0; k < n; ++k) {
            const T share = pack.at[k] * of_row;
            pack.at[k] = place == k ? share - of_row : share;
        }
        store(dx + i, pack);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void softmax_cross_entropy_##NAME(                                                           \
        const T* logits, const Index* labels, T* chances, T* losses, Index rows, Index classes, int lanes              \
    ) {                                                                                                                \
        softmax_cross_entropy(logits, labels, chances, losses, rows, classes, lanes);                                  \
    }                                                                                                                  \
    extern "C" __global__ void softmax_cross_entropy_gradient_##NAME(                                                  \
        const T* gy, const Index* labels, const T* chances, T* dx, Index count, Index classes                          \
    ) {                                                                                                                \
        softmax_cross_entropy_gradient(gy, labels, chances, dx, count, classes);                                       \
    }

KERNELS(float, f32)
KERNELS(double, f64)
