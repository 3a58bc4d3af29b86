// Gradients in 2 bits or 1 bit an element. A warp takes 32 neighbouring elements and votes: the votes are the words.

// All threads of a warp must call the following, with element `i` each: `residual[i]` becomes what is left of `total`,
// and the votes go to `words`. Of the first thread `i` is a multiple of 32; elements from `count` on do not exist.

template <class T, class Wide>
__device__ inline void vote_in_two_bits(
    T* residual, Word* words, Index i, Index count, Wide total, Wide limit, Wide sent
) {
    const bool is_there = i < count;
    const bool plus = is_there && total >= limit, minus = is_there && total <= -limit;
    if (is_there) residual[i] = narrowed<T>(total - (plus ? sent : minus ? -sent : Wide(0)));
    const Word up = __ballot_sync(~0u, plus), down = __ballot_sync(~0u, minus);
    if (is_there && i % 32 == 0) words[i / 16] = (up & 0xFFFF) | (down << 16);
    if (is_there && i % 32 == 16) words[i / 16] = (up >> 16) | (down & 0xFFFF0000);
}

template <class T, class Wide>
__device__ inline void vote_in_one_bit(
    T* residual, Word* words, Index i, Index count, Wide total, Wide limit, Wide sent
) {
    const bool is_there = i < count, plus = is_there && total > limit;
    if (is_there) residual[i] = narrowed<T>(total - (plus ? sent : -sent));
    const Word up = __ballot_sync(~0u, plus);
    if (is_there && i % 32 == 0) words[i / 32] = up;
}

// What was sent for the `n` elements from `i` on, which lie in one word.

template <class T, int n, class Wide>
__device__ inline Pack<T, n> read_two_bits(const Word* words, Index i, Wide sent) {
    const Word word = words[i / 16] >> i % 16;
    Pack<T, n> pack;
    for (int k = 0; k < n; ++k) {
        pack.at[k] = narrowed<T>(word >> k & 1 ? sent : word >> (16 + k) & 1 ? -sent : Wide(0));
    }
    return pack;
}

template <class T, int n, class Wide>
__device__ inline Pack<T, n> read_one_bit(const Word* words, Index i, Wide sent) {
    const Word word = words[i / 32] >> i % 32;
    Pack<T, n> pack;
    for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(word >> k & 1 ? sent : -sent);
    return pack;
}
