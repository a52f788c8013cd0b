/* Engines under stress, for ThreadSanitizer and AddressSanitizer: see test_sanitizers.py. */
#define _GNU_SOURCE
#include "../../pinfeed/native/pinfeed.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { N_ROWS = 5000, N_PLACES = 3, N_JOBS = 60, MOST = 700 };

static const int64_t row_nbytes[] = {4, 192, 1024};
enum { N_SOURCES = 3 };

static uint32_t random_below(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % n;
}

static void *stop(void *engine)
{
    pf_engine_stop(engine);
    return NULL;
}

/* Runs one loop: submits and waits for jobs, and checks every row. */
static void *loop(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument;
    struct pf_rows parts[N_SOURCES] = {{0}};
    struct pf_source sources[N_SOURCES];
    int64_t outs[N_PLACES][N_SOURCES];
    int64_t rows[N_PLACES][MOST], n[N_PLACES];
    for (int k = 0; k < N_SOURCES; k++) {
        parts[k].base = malloc((size_t)(N_ROWS * row_nbytes[k]));
        parts[k].n = N_ROWS;
        parts[k].stride = row_nbytes[k];
        sources[k] = (struct pf_source){&parts[k], 1, row_nbytes[k]};
        for (int64_t i = 0; i < N_ROWS; i++)
            memset(parts[k].base + i * row_nbytes[k], (int)((i * 7 + k) & 0xFF),
                   (size_t)row_nbytes[k]);
        for (int place = 0; place < N_PLACES; place++)
            outs[place][k] = (intptr_t)malloc((size_t)(MOST * row_nbytes[k]));
    }
    for (int round = 0; round < 6; round++) {
        struct pf_engine *engine =
            pf_engine_open(N_SOURCES, sources, N_PLACES, 1 + (uint32_t)round % 2, round % 2);
        pf_engine_start(engine, 1 + round % 3);
        pthread_t stopper;
        const int stops = round > 3;
        uint32_t submitted = 0;
        for (uint32_t waited = 0; waited < N_JOBS; waited++) {
            for (; submitted < N_JOBS && submitted < waited + N_PLACES; submitted++) {
                const uint32_t place = submitted % N_PLACES;
                n[place] = random_below(&seed, MOST);
                for (int64_t i = 0; i < n[place]; i++)
                    rows[place][i] = random_below(&seed, N_ROWS);
                if (pf_engine_submit(engine, rows[place], n[place], NULL, outs[place], NULL)
                    != submitted)
                    abort();
            }
            if (stops && waited == N_JOBS / 2)
                pthread_create(&stopper, NULL, stop, engine);
            struct pf_result result;
            if (pf_engine_wait(engine, waited, NULL, &result) || result.failed
                || result.end_s < result.begin_s)
                abort();
            const uint32_t place = waited % N_PLACES;
            for (int k = 0; k < N_SOURCES; k++)
                for (int64_t i = 0; i < n[place]; i++)
                    if (memcmp((char *)outs[place][k] + i * row_nbytes[k],
                               parts[k].base + rows[place][i] * row_nbytes[k],
                               (size_t)row_nbytes[k]))
                        abort();
        }
        if (stops)
            pthread_join(stopper, NULL);
        pf_engine_stop(engine);
        pf_engine_free(engine, 0);
    }
    /* An engine that is stopped while jobs are left. */
    struct pf_engine *engine = pf_engine_open(N_SOURCES, sources, N_PLACES, 1, 0);
    pf_engine_start(engine, 2);
    pf_engine_submit(engine, rows[0], 100, NULL, outs[0], NULL);
    pf_engine_stop(engine);
    pf_engine_free(engine, 0);
    for (int k = 0; k < N_SOURCES; k++) {
        free(parts[k].base);
        for (int place = 0; place < N_PLACES; place++)
            free((void *)outs[place][k]);
    }
    return NULL;
}

enum { NBYTES = 192, SHRUNK = 5000 };

static void *shrink(void *fd)
{
    if (ftruncate((int)(intptr_t)fd, SHRUNK))
        abort();
    return NULL;
}

/* Runs a loop over a mapped file, which shrinks meanwhile and is whole again in the next round. */
static void *loop_over_file(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument;
    const size_t size = N_ROWS * NBYTES;
    FILE *const file = tmpfile();
    const int fd = file ? fileno(file) : -1;
    char *const content = malloc(size);
    char *const copies = malloc((size_t)N_PLACES * MOST * NBYTES);
    int64_t rows[N_PLACES][MOST];
    for (int64_t i = 0; i < N_ROWS; i++)
        memset(content + i * NBYTES, (int)(i % 255 + 1), NBYTES);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        abort();
    char *const map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        abort();
    /* In two parts, as the rows of two files are. */
    enum { HALF = N_ROWS / 2 };
    const struct pf_rows halves[] = {
        {map, HALF, NBYTES, map + size, (int64_t)size, fd, 0},
        {map + HALF * NBYTES, N_ROWS - HALF, NBYTES, map + size, (int64_t)size, fd, HALF},
    };
    const struct pf_source source = {halves, 2, NBYTES};
    for (int round = 0; round < 10; round++) {
        if (pwrite(fd, content, size, 0) != (ssize_t)size)
            abort();
        pf_guard_count(1);
        struct pf_engine *engine = pf_engine_open(1, &source, N_PLACES, 1, round % 2);
        pf_engine_start(engine, 1 + round % 3);
        pthread_t shrinker;
        uint32_t submitted = 0, first_without_file = N_JOBS;
        for (uint32_t waited = 0; waited < N_JOBS; waited++) {
            for (; submitted < N_JOBS && submitted < waited + N_PLACES; submitted++) {
                int64_t *const own = rows[submitted % N_PLACES];
                const int64_t out = (intptr_t)copies + submitted % N_PLACES * MOST * NBYTES;
                for (int64_t i = 0; i < MOST; i++)
                    own[i] = random_below(&seed, N_ROWS);
                pf_engine_submit(engine, own, MOST, NULL, &out, NULL);
            }
            if (waited == N_JOBS / 3)
                pthread_create(&shrinker, NULL, shrink, (void *)(intptr_t)fd);
            if (waited == N_JOBS / 2) {
                pthread_join(shrinker, NULL);
                first_without_file = submitted;
            }
            struct pf_result result;
            if (pf_engine_wait(engine, waited, NULL, &result))
                abort();
            const int64_t failed = result.failed;
            if (failed > 1 || (failed && waited < N_JOBS / 3)
                || (!failed && waited >= first_without_file))
                abort();
            const char *const found = copies + waited % N_PLACES * MOST * NBYTES;
            for (int64_t i = 0; i < MOST && !failed; i++)
                if (memcmp(found + i * NBYTES,
                           content + rows[waited % N_PLACES][i] * NBYTES, NBYTES))
                    abort();
        }
        pf_engine_stop(engine);
        pf_engine_free(engine, 0);
        pf_guard_count(-1);
    }
    munmap(map, size);
    free(copies);
    free(content);
    fclose(file);
    return NULL;
}

/* Compares batches whose rows repeat, or do not ascend, with an earlier one that has every row, and
 * with one that has the lower half. The arrays of each batch end where their memory ends. */
static void compare_batches(void)
{
    enum { N = 1001, N_EARLIER = 500 };
    int64_t given[N], sorted[N], every[N_EARLIER], counts[3];
    int32_t order[N], positions[N_EARLIER], memory[4 * N];
    uint64_t spare[2 * N];
    for (int i = 0; i < N_EARLIER; i++) {
        every[i] = i;
        positions[i] = N_EARLIER - 1 - i;
    }
    const struct pf_sorted earlier = {every, positions, N_EARLIER};
    const struct pf_sorted half = {every, positions, N_EARLIER / 2};
    for (int64_t n = 0; n <= N; n++) {
        int64_t *const rows = given + N - n;
        for (int64_t i = 0; i < n; i++)
            rows[i] = n & 1 ? i / 3 : 7 * (n - i) % N_EARLIER;
        const struct pf_sorted batch = {sorted + N - n, order + N - n, n};
        int32_t *found = memory + 4 * (N - n);
        pf_overlaps(rows, &batch, &half, 1, spare, found, counts, 1);
        const struct pf_pair *const unread = (struct pf_pair *)(found + 2 * counts[0]);
        if (counts[0] + counts[2] != n || counts[1])
            abort();
        for (int64_t i = 0; i < counts[2]; i++)
            if (unread[i].row < N_EARLIER / 2 || rows[unread[i].place] != unread[i].row)
                abort();
        found = memory + 2 * (2 * N - n);
        pf_overlaps(rows, &batch, &earlier, 1, spare, found, counts, 0);
        if (counts[0] != n || counts[1] || counts[2])
            abort();
        for (int64_t i = 0; i < n; i++)
            if (rows[found[i]] != N_EARLIER - 1 - found[n + i])
                abort();
    }
}

/* Decides about random batches, and checks that hits are those rows that a slot has. The arrays of
 * each batch end where their memory ends. */
static void decide_batches(void)
{
    enum { N = 200, CAPACITY = 30, N_BATCHES = 500 };
    int32_t states[N] = {0};
    struct pf_cache_slot slots[CAPACITY];
    struct pf_cache cache = {states, slots, CAPACITY, 0, 0, 2};
    uint32_t seed = 1;
    for (int number = 0; number < N_BATCHES; number++) {
        const uint32_t share = 1 + random_below(&seed, 8);
        int64_t rows[N], counts[2], n = 0, n_hits = 0;
        for (int64_t row = 0; row < N; row++)
            if (!random_below(&seed, share)) {
                rows[n++] = row;
                n_hits += states[row] < 0;
            }
        int64_t *const own = malloc((size_t)n * sizeof *own + 1);
        int32_t *const positions = malloc(3 * (size_t)n * sizeof *positions + 1);
        int64_t *const gathered = malloc((size_t)n * sizeof *gathered + 1);
        memcpy(own, rows, (size_t)n * sizeof *own);
        pf_decide(&cache, own, n, positions, gathered, counts);
        if (counts[0] != n_hits || n_hits + counts[1] > n)
            abort();
        for (int64_t i = 0; i < n_hits + counts[1]; i++)
            if (slots[positions[n + i]].row != rows[positions[i]])
                abort();
        for (int64_t i = n_hits; i < n; i++)
            if (gathered[i - n_hits] != rows[positions[i]])
                abort();
        for (int64_t i = 0; i < cache.n_used; i++)
            if (states[slots[i].row] != ~(int32_t)i)
                abort();
        free(own);
        free(positions);
        free(gathered);
    }
}

int main(void)
{
    pthread_t loops[5];
    for (uintptr_t i = 0; i < 5; i++)
        pthread_create(&loops[i], NULL, i < 3 ? loop : loop_over_file, (void *)(i + 1));
    for (int i = 0; i < 5; i++)
        pthread_join(loops[i], NULL);
    struct pf_network network = {100003, 317, 316, {1, 2, 3, 4, 5, 6}};
    int64_t positions[1000], out[1000];
    for (int i = 0; i < 1000; i++)
        positions[i] = 100 * i;
    pf_permute(&network, positions, 1000, out);
    for (int i = 0; i < 1000; i++)
        if (out[i] < 0 || out[i] >= 100003)
            abort();
    compare_batches();
    decide_batches();
    puts("all rows are right");
    return 0;
}
