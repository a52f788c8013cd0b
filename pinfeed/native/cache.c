/* Rows of a table that the device keeps for a whole loop; see pinfeed/pipeline/row_cache.py.
 *
 * Most of the time goes into waiting for memory, because rows and slots are read at random. The
 * loops over many rows have little to do and no branch that depends on them, so the processor reads
 * ahead. */
#include "pinfeed.h"

void pf_decide(struct pf_cache *cache, const int64_t *rows, int64_t n, int32_t *positions,
               int64_t *gathered, int64_t *counts)
{
    int32_t *const slots = positions + n, *const missed = slots + n;
    const uint32_t batch = (uint32_t)cache->n_batches++;
    int64_t n_hits = 0, n_missed = 0, n_bypassed = 0;
    for (int64_t i = 0; i < n; i++)
        slots[i] = ~cache->rows[rows[i]];
    for (int64_t i = 0; i < n; i++) {
        const int32_t slot = slots[i];
        positions[n_hits] = (int32_t)i;
        slots[n_hits] = slot;
        missed[n_missed] = (int32_t)i;
        n_hits += slot >= 0;
        n_missed += slot < 0;
    }
    for (int64_t i = 0; i < n_hits; i++) {
        cache->slots[slots[i]].n_uses++;
        cache->slots[slots[i]].last_used = batch;
    }

    int64_t n_held = n_hits;
    for (int64_t i = 0; i < n_missed; i++) {
        const int64_t row = rows[missed[i]];
        const int32_t n_uses = ++cache->rows[row];
        if (cache->n_used == cache->capacity || n_uses < cache->least) {
            missed[n_bypassed++] = missed[i];
            continue;
        }
        cache->slots[cache->n_used] = (struct pf_cache_slot){row, n_uses, batch};
        cache->rows[row] = ~(int32_t)cache->n_used;
        slots[n_held] = (int32_t)cache->n_used++;
        gathered[n_held - n_hits] = row;
        positions[n_held++] = missed[i];
    }
    for (int64_t i = 0; i < n_bypassed; i++) {
        positions[n_held + i] = missed[i];
        gathered[n_held - n_hits + i] = rows[missed[i]];
    }
    counts[0] = n_hits;
    counts[1] = n_held - n_hits;
}
