// Of all elements the k of largest magnitude, of equal ones the first, in the order in which they lie. The magnitude of
// the last of them is found digit by digit (radix select); then every warp writes its own behind those of the warps
// before it, which are counted, so that none waits for another. Counting is in integers, so that its order does not
// matter, with atomic additions.

typedef unsigned long long Bits;

enum { DIGITS = 2048 };  // as many as leave room for other blocks in shared memory: each digit is a reading of all

// What is known of the magnitude of the last element that is sent, and how many of just that magnitude are sent.
struct Limit {
    Bits digits;
    Index ties;
};

// Without the sign; a NaN is larger than all others, which are equal.
__device__ inline Bits magnitude_of(Half x) { return (x & 0x7FFF) > 0x7C00 ? 0x7FFF : x & 0x7FFF; }
__device__ inline Bits magnitude_of(BFloat16 x) { return (x.bits & 0x7FFF) > 0x7F80 ? 0x7FFF : x.bits & 0x7FFF; }
__device__ inline Bits magnitude_of(float x) { return x != x ? 0x7FFFFFFF : bits_of_float(x) & 0x7FFFFFFF; }
__device__ inline Bits magnitude_of(double x) { return x != x ? ~0ull >> 1 : bits_of_double(x) & ~0ull >> 1; }

// That of an infinity of this type.
__device__ inline Bits infinity_of(Half) { return 0x7C00; }
__device__ inline Bits infinity_of(BFloat16) { return 0x7F80; }
__device__ inline Bits infinity_of(float) { return 0x7F800000; }
__device__ inline Bits infinity_of(double) { return 0x7FFull << 52; }

// Adds to `counts`, shape (DIGITS,), zeros before, the digits at `shift` of elements whose higher digits are those that
// are known. First of all, where `adds`, `residual += grad`.
template <class T>
__device__ void count_digits(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, int shift, bool adds,
    const Limit* __restrict__ limit, Word* __restrict__ counts
) {
    __shared__ Word of_block[DIGITS];
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) of_block[digit] = 0;
    __syncthreads();
    const Bits known = adds ? 0 : limit->digits;
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(grad, residual), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto kept = load<n>(residual + i);
        if (adds) {
            const auto given = load<n>(grad + i);
            for (int k = 0; k < n; ++k) kept.at[k] = narrowed<T>(added(given.at[k], kept.at[k]));
            store(residual + i, kept);
        }
        for (int k = 0; k < n; ++k) {
            const Bits digits = magnitude_of(kept.at[k]) >> shift;
            if (digits / DIGITS == known) atomicAdd(&of_block[digits % DIGITS], 1u);
        }
    });
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
        if (of_block[digit] > 0) atomicAdd(&counts[digit], of_block[digit]);
    }
}

// One block: from the counts one digit more of `limit`, which the first call sets for `k` elements.
__device__ inline void choose_next_digit(const Word* counts, Index k, bool is_first, Limit* limit) {
    enum { EACH = DIGITS / THREADS };
    __shared__ Index from_here[THREADS];  // how many have the digits of this thread or higher ones
    const Limit before = is_first ? Limit{0, k} : *limit;
    const int thread = threadIdx.x;
    Index own = 0;
    for (int each = 0; each < EACH; ++each) own += counts[thread * EACH + each];
    from_here[thread] = own;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const Index more = thread + step < THREADS ? from_here[thread + step] : 0;
        __syncthreads();
        from_here[thread] += more;
    }
    Index above = from_here[thread] - own;
    for (int digit = thread * EACH + EACH - 1; digit >= thread * EACH; --digit) {
        const bool is_here = above < before.ties && before.ties <= above + counts[digit];
        if (before.ties > 0 ? is_here : digit == DIGITS - 1) {
            *limit = {before.digits * DIGITS + digit, before.ties - above};
        }
        above += counts[digit];
    }
}

// The elements of this thread's warp, of which each has as many, a multiple of what it has in packs of a lane each.
struct Share {
    Index warp, warps, first, last;
};

__device__ inline Share share_of_warp(Index count, Index chunk) {
    const Index warp = this_thread() / WARP, first = warp * chunk, last = first + chunk;
    return {warp, all_threads() / WARP, first < count ? first : count, last < count ? last : count};
}

// How many of its `chunk` elements each warp has above the limit, and just at it: `numbers` has shape (2, warps).
template <class T>
__device__ void count_chosen(
    const T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, Word* __restrict__ numbers
) {
    const Share own = share_of_warp(count, chunk);
    const Bits digits = limit->digits;
    Word above = 0, ties = 0;
    const int lane = threadIdx.x % WARP;
    for_same_packs<16 / sizeof(T), 4>(x + own.first, own.last - own.first, lane, WARP, [&](Index, const auto& pack) {
        for (int k = 0; k < pack.size; ++k) {
            above += magnitude_of(pack.at[k]) > digits;
            ties += magnitude_of(pack.at[k]) == digits;
        }
    });
    above = warp_sum(above);
    ties = warp_sum(ties);
    if (lane > 0) return;
    numbers[own.warp] = above;
    numbers[own.warps + own.warp] = ties;
}

// Two numbers in one word, each below 2^16: of elements above the limit, and just at it.
struct Chosen {
    Word both;
    __device__ Index above() const { return both & 0xFFFF; }
    __device__ Index ties() const { return both >> 16; }
};

// What the lanes of the warp before this one have, and all.
struct Place {
    Chosen before, all;
};

__device__ inline Place place_in_warp(Chosen own) {
    Word up_to_here = own.both;
    for (int step = 1; step < WARP; step *= 2) {
        const Word more = __shfl_up_sync(~0u, up_to_here, step);
        if (threadIdx.x % WARP >= step) up_to_here += more;
    }
    return {{up_to_here - own.both}, {__shfl_sync(~0u, up_to_here, WARP - 1)}};
}

// What is sent becomes 0 in `x`, and what is not finite, of which there may be more.
template <class T>
__device__ void write_chosen(
    T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, const Word* __restrict__ numbers,
    Word* __restrict__ indices, T* __restrict__ values
) {
    constexpr int N = 16 / sizeof(T), AT_ONCE = 4;
    const Share own = share_of_warp(count, chunk);
    const Index of_block = own.warp - threadIdx.x / WARP;
    Index above = 0, ties = 0;
    for (Index warp = threadIdx.x; warp < of_block; warp += blockDim.x) {
        above += numbers[warp];
        ties += numbers[own.warps + warp];
    }
    above = block_sum(above);
    ties = block_sum(ties);
    for (Index warp = of_block; warp < own.warp; ++warp) {
        above += numbers[warp];
        ties += numbers[own.warps + warp];
    }
    const Limit at_least = *limit;
    const bool aligned = is_aligned<N>(x);
    for (Index at = own.first; at < own.last; at += AT_ONCE * WARP * N) {
        const Index first = at + threadIdx.x % WARP * N;
        Pack<T, N> packs[AT_ONCE];
        for (int p = 0; p < AT_ONCE; ++p) {
            const Index i = first + p * WARP * N;
            if (i + N <= own.last) {
                packs[p] = load_from<N>(x + i, aligned);
            } else {
                for (int k = 0; k < N; ++k) packs[p].at[k] = i + k < own.last ? x[i + k] : T{};
            }
        }
        for (int p = 0; p < AT_ONCE; ++p) {
            const Index i = first + p * WARP * N;
            Chosen chosen = {0};
            Word marked = 0;  // those of the pack that are sent, perhaps, or are not finite
            for (int k = 0; k < N; ++k) {
                const Bits magnitude = i + k < own.last ? magnitude_of(packs[p].at[k]) : 0;
                const bool is_above = magnitude > at_least.digits;
                const bool is_tie = i + k < own.last && magnitude == at_least.digits;
                chosen.both += Word(is_above) | Word(is_tie) << 16;
                marked |= Word(is_above || is_tie || magnitude >= infinity_of(T())) << k;
            }
            if (!__ballot_sync(~0u, marked > 0)) continue;
            const Place place = place_in_warp(chosen);
            Index above_before = above + place.before.above(), ties_before = ties + place.before.ties();
            for (; marked > 0; marked &= marked - 1) {
                const Index here = i + __ffs(marked) - 1;
                const T value = x[here];
                const Bits magnitude = magnitude_of(value);
                const bool is_above = magnitude > at_least.digits, is_tie = magnitude == at_least.digits;
                if (is_above || (is_tie && ties_before < at_least.ties)) {
                    const Index to = above_before + (ties_before < at_least.ties ? ties_before : at_least.ties);
                    indices[to] = Word(here);
                    values[to] = value;
                    x[here] = T{};
                } else if (magnitude >= infinity_of(T())) {
                    x[here] = T{};
                }
                above_before += is_above;
                ties_before += is_tie;
            }
            above += place.all.above();
            ties += place.all.ties();
        }
    }
}

// The other way; what is not sent is 0 before.
template <class T>
__device__ void decode_top_k(
    const Word* __restrict__ indices, const T* __restrict__ values, Index k, T* __restrict__ out, Index count
) {
    for (Index i = this_thread(); i < k; i += all_threads()) {
        if (indices[i] < count) out[indices[i]] = values[i];
    }
}
