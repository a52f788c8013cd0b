/* Distinct row indices, with their positions: pinfeed/rows/indices.py describes them.
 *
 * A key has a row index in its high bits and its position in the others. A sort of the keys by the
 * row index alone gives both, and equal rows keep their order. It is a radix sort from the lowest
 * digit to the highest one, which takes as long for rows that repeat as for others. While it moves
 * the keys by one digit, it counts the next one. The outputs are the only memory that it needs. */
#include "pinfeed.h"

#include <string.h>

/* The counts of two digits fit the first cache of a processor. */
#define MOST_DIGIT_BITS 12

static int bits_of(uint64_t x)
{
    return x ? 64 - __builtin_clzll(x) : 0;
}

/* Replaces the number of keys with each digit by the place of the first of them. */
static void add_up(uint32_t *places, int64_t n_digits)
{
    uint32_t begin = 0;
    for (int64_t digit = 0; digit < n_digits; digit++) {
        const uint32_t count = places[digit];
        places[digit] = begin;
        begin += count;
    }
}

int pf_sort_keys(const int64_t *rows, int64_t n, uint64_t *keys, uint64_t *spare)
{
    uint32_t places[2][1 << MOST_DIGIT_BITS];
    uint64_t every = 0;
    for (int64_t i = 0; i < n; i++)
        every |= (uint64_t)rows[i];
    const int n_bits = bits_of(every), n_position_bits = bits_of((uint64_t)n);
    if (n_bits + n_position_bits > 64 || n > UINT32_MAX)
        return -1;

    /* With few keys, a wide digit takes longer to count than a further one to move. */
    const int most = n_position_bits < MOST_DIGIT_BITS ? n_position_bits : MOST_DIGIT_BITS;
    const int n_digits = n_bits > most ? (n_bits + most - 1) / most : 1;
    const int width = (n_bits + n_digits - 1) / n_digits;
    const uint64_t mask = ((uint64_t)1 << width) - 1;
    uint32_t *now = places[0], *next = places[1];
    uint64_t *from = n_digits & 1 ? spare : keys, *to = n_digits & 1 ? keys : spare;
    memset(next, 0, sizeof *next << width);
    /* The sort counts and moves these keys only, because the user might change the rows. */
    for (int64_t i = 0; i < n; i++) {
        const uint64_t value = (uint64_t)rows[i];
        from[i] = value << n_position_bits | (uint64_t)i;
        next[value & mask]++;
    }
    for (int k = 0; k < n_digits; k++) {
        uint32_t *const counted = next;
        const int shift = n_position_bits + k * width;
        next = now;
        now = counted;
        add_up(now, (int64_t)mask + 1);
        memset(next, 0, sizeof *next << width);
        for (int64_t i = 0; i < n; i++) {
            const uint64_t key = from[i], rest = key >> shift;
            next[rest >> width & mask]++;
            to[now[rest & mask]++] = key;
        }
        uint64_t *const moved = to;
        to = from;
        from = moved;
    }
    return n_position_bits;
}

int64_t pf_distinct_rows(const int64_t *rows, int64_t n, int64_t *distinct, int64_t *positions)
{
    uint64_t *const keys = (uint64_t *)distinct;
    const int shift = pf_sort_keys(rows, n, keys, (uint64_t *)positions);
    if (shift < 0)
        return -1;
    const uint64_t mask = ((uint64_t)1 << shift) - 1;
    int64_t last = -1;
    uint64_t previous = UINT64_MAX;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t key = keys[i], row = key >> shift;
        last += row != previous;
        previous = row;
        /* The key in this place was read. */
        distinct[last] = (int64_t)row;
        positions[key & mask] = last;
    }
    return last + 1;
}

int64_t pf_first_occurrences(const int64_t *rows, int64_t n, int64_t *distinct, int64_t *positions)
{
    const uint64_t *const keys = (uint64_t *)distinct;
    const int shift = pf_sort_keys(rows, n, (uint64_t *)distinct, (uint64_t *)positions);
    if (shift < 0)
        return -1;
    const uint64_t mask = ((uint64_t)1 << shift) - 1;
    uint64_t first = UINT64_MAX;
    for (int64_t i = 0; i < n; i++) {
        /* Equal rows keep their order, so the first of them is the first occurrence. */
        first = (first ^ keys[i]) > mask ? keys[i] : first;
        positions[keys[i] & mask] = (int64_t)(first & mask);
    }
    int64_t n_distinct = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t earlier = positions[i], is_first = earlier == i;
        /* Without a branch, which the processor could not predict. The keys are not needed any
         * more. */
        distinct[n_distinct] = rows[i];
        positions[i] = n_distinct;
        positions[i] = positions[earlier];
        n_distinct += is_first;
    }
    return n_distinct;
}
