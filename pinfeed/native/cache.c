/* Rows of a table that the device keeps between batches; see pinfeed/pipeline/cache_policy.py.
 *
 * A row outside the cache has a count of its uses. A row in the cache has a slot, which has the
 * count. A later use counts more, so old counts age without a pass over all of them.
 *
 * A hand moves over the slots, from batch to batch. For each missed row, it passes a few slots. The
 * row takes the one with the lowest count, if its own count is higher. Otherwise this slot is
 * offered to the next missed row as well. So a batch replaces the rarest of the rows that the hand
 * has passed, without sorting them.
 *
 * Most of the time goes into waiting for memory, because rows and slots are read at random. The
 * loops over many rows have little to do and no branch that depends on them, so the processor reads
 * ahead. */
#include "pinfeed.h"

/* Slots that the hand passes for each missed row. With one, the hits fall by up to 1 %. */
#define N_PASSED 2
/* A use counts e times as much after batches with this many times as many rows as the cache holds.
 * This separates the least frequent rows that belong in the cache from slightly less frequent ones.
 */
#define AGEING 92.0
/* If a use counts more than this, all counts are scaled down. */
#define MAX_USE 0x1p60

/* Makes later uses count more, after a batch of `n` rows. */
static void age(struct pf_cache *cache, int64_t n)
{
    cache->use *= 1 + (double)n / (AGEING * (double)cache->capacity);
    if (cache->use < MAX_USE)
        return;
    for (int64_t i = 0; i < cache->n_rows; i++)
        if (cache->rows[i].held >= 0)
            cache->rows[i].count /= (float)cache->use;
    for (int64_t i = 0; i < cache->n_used; i++)
        cache->slots[i].count /= (float)cache->use;
    cache->use = 1;
}

/* Passes some slots. Returns the one with the lowest count, or `offered`. No row of the batch is
 * evicted. */
static struct pf_cache_slot *offer(struct pf_cache *cache, struct pf_cache_slot *offered,
                                   uint32_t batch)
{
    for (int k = 0; k < N_PASSED; k++) {
        struct pf_cache_slot *const slot = cache->slots + cache->hand;
        if (slot->last_used != batch && (!offered || slot->count < offered->count))
            offered = slot;
        cache->hand = cache->hand + 1 < cache->capacity ? cache->hand + 1 : 0;
    }
    return offered;
}

void pf_decide(struct pf_cache *cache, const int64_t *rows, int64_t n, int32_t *positions,
               int64_t *moved, int64_t *counts)
{
    int32_t *const slots = positions + n, *const missed = slots + n;
    const uint32_t batch = (uint32_t)cache->n_batches++;
    const float use = (float)cache->use;
    int64_t n_hits = 0, n_missed = 0, n_bypassed = 0, n_evicted = 0;
    for (int64_t i = 0; i < n; i++)
        slots[i] = ~cache->rows[rows[i]].held;
    for (int64_t i = 0; i < n; i++) {
        const int32_t slot = slots[i];
        positions[n_hits] = (int32_t)i;
        moved[n_hits] = rows[i];
        slots[n_hits] = slot;
        missed[n_missed] = (int32_t)i;
        n_hits += slot >= 0;
        n_missed += slot < 0;
    }
    for (int64_t i = 0; i < n_hits; i++) {
        cache->slots[slots[i]].count += use;
        cache->slots[slots[i]].last_used = batch;
    }

    int64_t n_held = n_hits;
    struct pf_cache_slot *offered = NULL;
    for (int64_t i = 0; i < n_missed; i++) {
        union pf_cache_row *const row = cache->rows + rows[missed[i]];
        row->count += use;
        struct pf_cache_slot *slot = cache->slots + cache->n_used;
        if (cache->n_used < cache->capacity)
            cache->n_used++;
        else {
            offered = offer(cache, offered, batch);
            if (!offered || offered->count >= row->count) {
                missed[n_bypassed++] = missed[i];
                continue;
            }
            slot = offered;
            offered = NULL;
            cache->rows[slot->row].count = slot->count;
            moved[n + n_evicted++] = slot->row;
        }
        *slot = (struct pf_cache_slot){rows[missed[i]], row->count, batch};
        slots[n_held] = (int32_t)(slot - cache->slots);
        row->held = ~slots[n_held];
        positions[n_held] = missed[i];
        moved[n_held++] = slot->row;
    }
    for (int64_t i = 0; i < n_bypassed; i++) {
        positions[n_held + i] = missed[i];
        moved[n_held + i] = rows[missed[i]];
    }
    counts[0] = n_hits;
    counts[1] = n_held - n_hits;
    counts[2] = n_evicted;
    age(cache, n);
}
