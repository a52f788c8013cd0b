/* Rows that a batch has in common with earlier ones; see pinfeed/pipeline/forwarding.py.
 *
 * The rows of every batch are sorted, so one pass over two batches finds the rows that both have.
 * No branch of a step of this pass depends on rows, which the processor could not predict. But a
 * step waits for the one before it. Therefore the batch is cut into sections, and each step is made
 * for all of them. */
#include "pinfeed.h"

#include <string.h>

#define N_SECTIONS 4

/* Rows [later, end) of the batch, and the rows of the earlier batch from `earlier` on. */
struct section {
    int64_t later;
    int64_t end;
    int64_t earlier;
    uint64_t *pair; /* the next one to write */
};

/* Makes `n` steps in each section. A row of the batch may repeat, so the earlier batch stays at a
 * row that both have. */
static inline __attribute__((always_inline)) void
make_steps(const int64_t *rows, const int64_t *others, struct section *sections, int n_sections,
           int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < n_sections; k++) {
            struct section *const at = sections + k;
            const int64_t row = rows[at->later], other = others[at->earlier];
            *at->pair = (uint64_t)at->later << 32 | (uint64_t)at->earlier;
            at->pair += row == other;
            at->later += row <= other;
            at->earlier += other < row;
        }
}

/* Returns the number of rows below `row`. */
static int64_t n_below(const struct pf_sorted *sorted, int64_t row)
{
    int64_t begin = 0, end = sorted->n;
    while (begin < end) {
        const int64_t middle = begin + (end - begin) / 2;
        if (sorted->rows[middle] < row)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Writes the positions of equal rows to `pairs`, that of the batch in the high bits. Returns their
 * number. */
static int64_t find_pairs(const struct pf_sorted *batch, const struct pf_sorted *earlier,
                          uint64_t *pairs)
{
    struct section sections[N_SECTIONS];
    for (int k = 0; k < N_SECTIONS; k++) {
        const int64_t begin = batch->n * k / N_SECTIONS, end = batch->n * (k + 1) / N_SECTIONS;
        sections[k] = (struct section){begin, end, 0, pairs + begin};
        if (begin < end)
            sections[k].earlier = n_below(earlier, batch->rows[begin]);
    }
    for (int64_t n = -1; n;) {
        n = batch->n;
        for (int k = 0; k < N_SECTIONS; k++) {
            const int64_t left = sections[k].end - sections[k].later;
            const int64_t others = earlier->n - sections[k].earlier;
            n = left < n ? left : n;
            n = others < n ? others : n;
        }
        make_steps(batch->rows, earlier->rows, sections, N_SECTIONS, n);
    }
    uint64_t *last = pairs;
    for (int k = 0; k < N_SECTIONS; k++) {
        struct section *const at = sections + k;
        while (at->later < at->end && at->earlier < earlier->n)
            make_steps(batch->rows, earlier->rows, at, 1, 1);
        for (uint64_t *pair = pairs + batch->n * k / N_SECTIONS; pair < at->pair;)
            *last++ = *pair++;
    }
    return last - pairs;
}

/* Sorts the rows of a batch. Returns as pf_overlaps does. */
static int64_t sort_rows(const int64_t *rows, const struct pf_sorted *batch, uint64_t *spare)
{
    int64_t repeated = batch->n;
    int ascends = 1;
    /* The rest uses this copy only, because the user might change the rows. */
    memcpy(batch->rows, rows, (size_t)batch->n * sizeof *rows);
    for (int64_t i = 0; i < batch->n; i++) {
        batch->order[i] = (int32_t)i;
        ascends &= !i || batch->rows[i - 1] < batch->rows[i];
    }
    if (ascends)
        return repeated;
    /* The keys may replace the rows, because the sort first makes all keys. */
    uint64_t *const keys = (uint64_t *)batch->rows;
    const int shift = pf_sort_keys(batch->rows, batch->n, keys, spare);
    if (shift < 0)
        return -1;
    for (int64_t i = 0; i < batch->n; i++) {
        batch->order[i] = (int32_t)(keys[i] & (((uint64_t)1 << shift) - 1));
        batch->rows[i] = (int64_t)(keys[i] >> shift);
        if (i && batch->rows[i] == batch->rows[i - 1])
            repeated = i;
    }
    return repeated;
}

int64_t pf_overlaps(const int64_t *rows, const struct pf_sorted *batch,
                    const struct pf_sorted *earlier, int64_t n_earlier, uint64_t *spare,
                    int32_t *found, int64_t *counts, int finds_unread)
{
    uint64_t *const pairs = spare;
    unsigned char *const is_hidden = (unsigned char *)(spare + batch->n);
    const int64_t repeated = sort_rows(rows, batch, spare);
    if (repeated < 0)
        return -1;
    memset(is_hidden, 0, (size_t)batch->n);
    for (int64_t k = 0; k < n_earlier; k++, counts += 2) {
        const int64_t n = find_pairs(batch, earlier + k, pairs);
        counts[1] = 0;
        for (int64_t i = 0; i < n; i++)
            counts[1] += is_hidden[pairs[i] >> 32];
        counts[0] = n - counts[1];
        int32_t *to[2] = {found, found + 2 * counts[0]};
        for (int64_t i = 0; i < n; i++) {
            const uint64_t later = pairs[i] >> 32;
            const int kind = is_hidden[later];
            to[kind][0] = batch->order[later];
            to[kind][counts[kind]] = earlier[k].order[(uint32_t)pairs[i]];
            to[kind]++;
            is_hidden[later] = 1;
        }
        found += 2 * n;
    }
    struct pf_pair *const unread = (struct pf_pair *)found;
    for (int64_t i = *counts = 0; finds_unread && i < batch->n; i++) {
        unread[*counts] = (struct pf_pair){(int32_t)batch->rows[i], batch->order[i]};
        *counts += !is_hidden[i];
    }
    return repeated;
}
