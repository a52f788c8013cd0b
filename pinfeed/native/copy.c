/* Copies of rows.
 *
 * A gather of short rows waits for memory: the processor does not know the next row before it has
 * read the next index. Therefore the rows some places ahead are prefetched. A long batch, which no
 * cache can hold until the loop uses it, is written past the caches, because an ordinary store
 * would first read each line of the target. The same holds for many rows that are scattered. Rows
 * that are written twice end as the last ones, because a thread's stores to one address keep their
 * order. */
#include "pinfeed.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
/* Rows that are prefetched ahead: enough to cover a miss, and few enough for the line buffers. */
#define AHEAD 12
/* The hardware prefetches the rest of a longer row itself. */
#define MOST_PREFETCHED 512
/* Rows whose parts are looked up together. */
#define CHUNK 512

static inline void prefetch(const char *row, int64_t nbytes)
{
    const int64_t n = nbytes < MOST_PREFETCHED ? nbytes : MOST_PREFETCHED;
    for (int64_t k = 0; k < n; k += LINE)
        __builtin_prefetch(row + k, 0, 0);
}

/* Copies whole lines to an aligned target past the caches. */
static inline void copy_lines(char *to, const char *from, int64_t nbytes)
{
#ifdef __SSE2__
    for (int64_t k = 0; k < nbytes; k += LINE) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + k));
        const __m128i b = _mm_loadu_si128((const __m128i *)(from + k + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(from + k + 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(from + k + 48));
        _mm_stream_si128((__m128i *)(to + k), a);
        _mm_stream_si128((__m128i *)(to + k + 16), b);
        _mm_stream_si128((__m128i *)(to + k + 32), c);
        _mm_stream_si128((__m128i *)(to + k + 48), d);
    }
#else
    memcpy(to, from, (size_t)nbytes);
#endif
}

static void copy_run(char *to, const char *from, int64_t nbytes, int bypass)
{
    if (!bypass) {
        memcpy(to, from, (size_t)nbytes);
        return;
    }
    int64_t head = (int64_t)(-(uintptr_t)to & (LINE - 1));
    if (head > nbytes)
        head = nbytes;
    const int64_t lines = (nbytes - head) & ~(int64_t)(LINE - 1);
    memcpy(to, from, (size_t)head);
    copy_lines(to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, (size_t)(nbytes - head - lines));
}

/* The caller has checked every index. If another thread changes the indices after that, the copy
 * takes other rows, but no other memory. */
static inline char *row_at(const struct pf_rows *rows, int64_t i)
{
    return rows->base + ((uint64_t)i < (uint64_t)rows->n ? i : rows->n - 1) * rows->stride;
}

/* Copies rows one by one. The compiler makes a loop of its own for each constant `nbytes`. */
static inline __attribute__((always_inline)) void
copy_each(const struct pf_rows *source, const int64_t *from, int64_t first,
          const struct pf_rows *target, const int64_t *to, int64_t nbytes, int64_t begin,
          int64_t end, int bypass)
{
    for (int64_t i = begin; i < end; i++) {
        if (from && i + AHEAD < end)
            prefetch(source->base + from[i + AHEAD] * source->stride, nbytes);
        const char *row = row_at(source, from ? from[i] : first + i);
        char *place = row_at(target, to ? to[i] : i);
        if (bypass)
            copy_lines(place, row, nbytes);
        else
            memcpy(place, row, (size_t)nbytes);
    }
}

/* Returns the first of rows [begin, end) if they are a run of consecutive rows on both sides, or
 * -1. */
static int64_t run_of(const struct pf_rows *source, const int64_t *from, int64_t first,
                      const struct pf_rows *target, const int64_t *to, int64_t row_nbytes,
                      int64_t begin, int64_t end)
{
    if (source->stride != row_nbytes || target->stride != row_nbytes || to || begin == end)
        return -1;
    if (!from)
        return first + begin;
    const int64_t row = from[begin], n = end - begin;
    if (row < 0 || row + n > source->n || from[end - 1] != row + n - 1)
        return -1;
    for (int64_t i = 1; i < n; i++)
        if (from[begin + i] != row + i)
            return -1;
    return row;
}

void pf_copy(const struct pf_rows *source, const int64_t *from, int64_t first,
             const struct pf_rows *target, const int64_t *to, int64_t row_nbytes, int64_t begin,
             int64_t end, int bypass)
{
    const int64_t row = run_of(source, from, first, target, to, row_nbytes, begin, end);
    if (row >= 0) {
        copy_run(row_at(target, begin), source->base + row * row_nbytes,
                 (end - begin) * row_nbytes, bypass);
    } else {
        /* A row that begins or ends within a line would be written by two kinds of stores. */
        bypass = bypass && row_nbytes % LINE == 0 && (uintptr_t)target->base % LINE == 0
                 && target->stride % LINE == 0;
        switch (bypass ? 0 : row_nbytes) {
        case 1: copy_each(source, from, first, target, to, 1, begin, end, 0); break;
        case 2: copy_each(source, from, first, target, to, 2, begin, end, 0); break;
        case 4: copy_each(source, from, first, target, to, 4, begin, end, 0); break;
        case 8: copy_each(source, from, first, target, to, 8, begin, end, 0); break;
        case 16: copy_each(source, from, first, target, to, 16, begin, end, 0); break;
        case 32: copy_each(source, from, first, target, to, 32, begin, end, 0); break;
        case 64: copy_each(source, from, first, target, to, 64, begin, end, 0); break;
        default: copy_each(source, from, first, target, to, row_nbytes, begin, end, bypass);
        }
    }
#ifdef __SSE2__
    /* The thread that learns of the end of the copy must see these stores. */
    if (bypass)
        _mm_sfence();
#endif
}

/* This takes one step if all parts have about equally many rows. */
static const struct pf_rows *part_of(const struct pf_source *source, int64_t row)
{
    const struct pf_rows *part = source->parts, *const last = part + source->n_parts - 1;
    const int64_t guess = row / part->n;
    part = guess < source->n_parts ? part + (guess < 0 ? 0 : guess) : last;
    while (part > source->parts && row < part->first)
        part--;
    while (part < last && row >= part->first + part->n)
        part++;
    return part;
}

/* Returns the target of row `done` of a list and of later rows. */
static struct pf_rows target_from(const struct pf_rows *target, const int64_t *to, int64_t done)
{
    struct pf_rows places = *target;
    if (!to) {
        places.base += done * target->stride;
        places.n -= done;
    }
    return places;
}

/* Copies consecutive rows, which the caller has checked, part by part. */
static void copy_run_of_parts(const struct pf_source *source, int64_t first,
                              const struct pf_rows *target, const int64_t *to, int64_t begin,
                              int64_t end, int bypass)
{
    for (int64_t done = begin; done < end;) {
        const struct pf_rows *const part = part_of(source, first + done);
        const int64_t row = first + done - part->first;
        const int64_t n = part->n - row < end - done ? part->n - row : end - done;
        const struct pf_rows places = target_from(target, to, done);
        pf_copy(part, NULL, row, &places, to ? to + done : NULL, source->row_nbytes, 0, n, bypass);
        done += n;
    }
}

void pf_copy_parts(const struct pf_source *source, const int64_t *from, int64_t first,
                   const struct pf_rows *target, const int64_t *to, int64_t begin, int64_t end,
                   int bypass)
{
    if (source->n_parts == 1) {
        pf_copy(source->parts, from, first, target, to, source->row_nbytes, begin, end, bypass);
        return;
    }
    if (!from) {
        copy_run_of_parts(source, first, target, to, begin, end, bypass);
        return;
    }
    static const struct pf_rows all_memory = {.n = INT64_MAX, .stride = 1};
    int64_t rows[CHUNK];
    for (int64_t done = begin; done < end; done += CHUNK) {
        const int64_t n = end - done < CHUNK ? end - done : CHUNK;
        const struct pf_rows *part = part_of(source, from[done]);
        int is_one = 1;
        for (int64_t i = 0; i < n; i++) {
            rows[i] = from[done + i] - part->first;
            is_one &= (uint64_t)rows[i] < (uint64_t)part->n;
        }
        if (!is_one) {
            /* The rows become addresses. */
            const int64_t before = part->first;
            for (int64_t i = 0; i < n; i++) {
                part = part_of(source, before + rows[i]);
                rows[i] = (intptr_t)row_at(part, before + rows[i] - part->first);
            }
        }
        const struct pf_rows places = target_from(target, to, done);
        pf_copy(is_one ? part : &all_memory, rows, 0, &places, to ? to + done : NULL,
                source->row_nbytes, 0, n, bypass);
    }
}
