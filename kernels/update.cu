// Fused optimizer updates, one pass over memory. Specification: hpcdp/kernels/reference.py, with the same bits.
//
// Coefficients are arguments, or are read from memory if `from` is not null, because a CUDA graph would freeze
// arguments. The scale, too, may be in memory (`scale_at`), where clipping has computed it on the GPU.
#include "common.cuh"
#include "sgd.cuh"

template <class... T> __device__ inline void take(const double* from, T&... coefficients) {
    if (from) ((coefficients = T(*from++)), ...);
}

template <class T>
__device__ void adam(
    T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ m, T* __restrict__ v, Index count,
    T step_size, T weight_decay, T scale, T shrink, T one_minus_beta1, T beta2, T one_minus_beta2, T root_scale, T eps
) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(param, grad, m, v), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto p = load<n>(param + i);
        auto first = load<n>(m + i);
        auto second = load<n>(v + i);
        const auto given = load<n>(grad + i);
        for (int k = 0; k < n; ++k) {
            const T g = given.at[k] * scale + p.at[k] * weight_decay;
            first.at[k] = first.at[k] + (g - first.at[k]) * one_minus_beta1;
            second.at[k] = second.at[k] * beta2 + (g * g) * one_minus_beta2;
            const T root = sqrt(second.at[k]) * root_scale + eps;
            p.at[k] = p.at[k] * shrink - (first.at[k] / root) * step_size;
        }
        store(m + i, first);
        store(v + i, second);
        store(param + i, p);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void sgd_##NAME(                                                                             \
        T* param, const T* grad, Index count, T lr, T weight_decay, T scale,                                           \
        const double* from, const double* scale_at                                                                     \
    ) {                                                                                                                \
        take(from, lr, weight_decay, scale);                                                                           \
        take(scale_at, scale);                                                                                         \
        sgd(param, grad, count, lr, weight_decay, scale);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void sgd_momentum_##NAME(                                                                    \
        T* param, const T* grad, T* velocity, Index count, T lr, T weight_decay, T scale, T momentum,                  \
        const double* from, const double* scale_at                                                                     \
    ) {                                                                                                                \
        take(from, lr, weight_decay, scale, momentum);                                                                 \
        take(scale_at, scale);                                                                                         \
        momentum_sgd<false>(param, grad, velocity, count, lr, weight_decay, scale, momentum);                          \
    }                                                                                                                  \
    extern "C" __global__ void sgd_nesterov_##NAME(                                                                    \
        T* param, const T* grad, T* velocity, Index count, T lr, T weight_decay, T scale, T momentum,                  \
        const double* from, const double* scale_at                                                                     \
    ) {                                                                                                                \
        take(from, lr, weight_decay, scale, momentum);                                                                 \
        take(scale_at, scale);                                                                                         \
        momentum_sgd<true>(param, grad, velocity, count, lr, weight_decay, scale, momentum);                           \
    }                                                                                                                  \
    extern "C" __global__ void adam_##NAME(                                                                            \
        T* param, const T* grad, T* m, T* v, Index count, T step_size, T weight_decay, T scale, T shrink,              \
        T one_minus_beta1, T beta2, T one_minus_beta2, T root_scale, T eps, const double* from, const double* scale_at \
    ) {                                                                                                                \
        take(                                                                                                          \
            from, step_size, weight_decay, scale, shrink, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps     \
        );                                                                                                             \
        take(scale_at, scale);                                                                                         \
        adam(                                                                                                          \
            param, grad, m, v, count, step_size, weight_decay, scale, shrink, one_minus_beta1, beta2, one_minus_beta2, \
            root_scale, eps                                                                                            \
        );                                                                                                             \
    }

KERNELS(float, f32)
KERNELS(double, f64)
