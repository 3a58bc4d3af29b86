// SGD, plain and with momentum, element by element. Specification: hpcdp/kernels/reference.py.

template <class T>
__device__ void sgd(T* __restrict__ param, const T* __restrict__ grad, Index count, T lr, T weight_decay, T scale) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(param, grad), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto p = load<n>(param + i);
        const auto g = load<n>(grad + i);
        for (int k = 0; k < n; ++k) {
            const T step = g.at[k] * scale + p.at[k] * weight_decay;
            p.at[k] = p.at[k] - step * lr;
        }
        store(param + i, p);
    });
}

template <bool nesterov, class T>
__device__ void momentum_sgd(
    T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ velocity, Index count,
    T lr, T weight_decay, T scale, T momentum
) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(param, grad, velocity), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto p = load<n>(param + i);
        auto v = load<n>(velocity + i);
        const auto g = load<n>(grad + i);
        for (int k = 0; k < n; ++k) {
            const T step = g.at[k] * scale + p.at[k] * weight_decay;
            v.at[k] = v.at[k] * momentum + step;
            p.at[k] = p.at[k] - (nesterov ? step + v.at[k] * momentum : v.at[k]) * lr;
        }
        store(velocity + i, v);
        store(param + i, p);
    });
}
