// LARS: SGD with a rate for each layer, which depends on norms. Specification: hpcdp/kernels/reference.py, with the
// same bits.
#include "common.cuh"
#include "sgd.cuh"

template <class T> struct Rates {
    T weight_decay, scale;
};

// `squares` are of the norms of the layer's weights and of its gradient. Every thread computes it for itself: a kernel
// before would cost more, and numbers from the host a wait.
template <class T>
__device__ inline Rates<T> rates_of(const double* squares, double weight_decay, double scale, double trust) {
    const double weights = sqrt(squares[0]), gradient = sqrt(squares[1]);
    const double length = gradient * scale + weight_decay * weights;
    const double factor = weights != 0 && gradient != 0 ? trust * weights / length : 1;
    return {T(weight_decay * factor), T(scale * factor)};
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void lars_sgd_##NAME(                                                                        \
        T* param, const T* grad, Index count, T lr, const double* squares, double weight_decay, double scale,          \
        double trust                                                                                                   \
    ) {                                                                                                                \
        const Rates<T> rates = rates_of<T>(squares, weight_decay, scale, trust);                                       \
        sgd(param, grad, count, lr, rates.weight_decay, rates.scale);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void lars_sgd_momentum_##NAME(                                                               \
        T* param, const T* grad, T* velocity, Index count, T lr, T momentum, const double* squares,                    \
        double weight_decay, double scale, double trust                                                                \
    ) {                                                                                                                \
        const Rates<T> rates = rates_of<T>(squares, weight_decay, scale, trust);                                       \
        momentum_sgd<false>(param, grad, velocity, count, lr, rates.weight_decay, rates.scale, momentum);              \
    }                                                                                                                  \
    extern "C" __global__ void lars_sgd_nesterov_##NAME(                                                               \
        T* param, const T* grad, T* velocity, Index count, T lr, T momentum, const double* squares,                    \
        double weight_decay, double scale, double trust                                                                \
    ) {                                                                                                                \
        const Rates<T> rates = rates_of<T>(squares, weight_decay, scale, trust);                                       \
        momentum_sgd<true>(param, grad, velocity, count, lr, rates.weight_decay, rates.scale, momentum);               \
    }

KERNELS(float, f32)
KERNELS(double, f64)
