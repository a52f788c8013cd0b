/* Shuffled row indices: the network of pinfeed/rows/permutation.py, which describes it. */
#include "pinfeed.h"

#define CHUNK 512

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) \
    && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
/* The library chooses the version for the processor when it is loaded. */
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline uint32_t mixed(uint32_t x, uint32_t key)
{
    x = (x ^ key) * 0x7FEB352Du;
    x ^= x >> 15;
    return x * 0x846CA68Bu;
}

static inline uint32_t moved(uint32_t x, uint32_t random, uint32_t size)
{
    const uint32_t sum = x + (((random >> 16) * size) >> 16);
    const uint32_t wrapped = sum - size;
    return sum < wrapped ? sum : wrapped;
}

FOR_EACH_PROCESSOR
static void apply(const struct pf_network *net, uint32_t *x, int64_t n)
{
    const uint32_t width = net->width, height = net->height;
    const double per_width = 1.0 / width;
    for (int64_t i = 0; i < n; i++) {
        /* The quotient may be off by one. */
        uint32_t left = (uint32_t)(int32_t)((double)(int32_t)x[i] * per_width);
        const int32_t rest = (int32_t)(x[i] - left * width);
        left += (uint32_t)(rest >= (int32_t)width) - (uint32_t)(rest < 0);
        uint32_t right = x[i] - left * width;
        for (int k = 0; k < PF_N_KEYS; k += 2) {
            left = moved(left, mixed(right, net->keys[k]), height);
            right = moved(right, mixed(left, net->keys[k + 1]), width);
        }
        x[i] = left * width + right;
    }
}

void pf_permute(const struct pf_network *net, const int64_t *positions, int64_t n, int64_t *out)
{
    uint32_t x[CHUNK];
    for (int64_t done = 0; done < n; done += CHUNK) {
        const int64_t m = n - done < CHUNK ? n - done : CHUNK;
        for (int64_t i = 0; i < m; i++)
            x[i] = (uint32_t)positions[done + i];
        apply(net, x, m);
        for (int64_t i = 0; i < m; i++) {
            while (x[i] >= net->n)
                apply(net, &x[i], 1);
            out[done + i] = x[i];
        }
    }
}
