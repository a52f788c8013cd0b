/* Writes from a simulated GPU under stress, for ThreadSanitizer and AddressSanitizer. See
 * test_sanitizers.py.
 *
 * Each write has other rows, as those of an epoch. Values and the memory that holds them are used
 * again as torch's allocator uses memory: at once, by later work of the program's stream. */
#define _GNU_SOURCE
#include "async_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PLACES = 3, N_STAGED = 3, INDICES = N_STAGED, DIRECT, N_PARTS, N_ROUNDS = 24 };
enum { N_ROWS = 60000, MOST_ROWS = 6000, LINE = 64 };

static const struct pf_driver *const driver = &async_driver;
/* Bytes of a row of each part. Long writes of the last two have several pieces. */
static const int64_t row_nbytes[N_PARTS] = {4, 192, 1024, 4, 100};

#define check(is_right) ((is_right) ? (void)0 : fail_at(__LINE__))

static void fail_at(int line)
{
    fprintf(stderr, "writes.c:%d\n", line);
    abort();
}

static uint32_t random_below(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % n;
}

static char *memory(int64_t nbytes)
{
    char *const found = aligned_alloc(LINE, (size_t)((nbytes + LINE) / LINE * LINE));
    check(found != NULL);
    memset(found, 0, (size_t)nbytes);
    return found;
}

struct run {
    uint32_t seed;
    void *compute;
    struct pf_writer *writer;
    struct pf_store stores[N_PARTS];
    struct pf_direct *direct;
    char *staging[2];
    char *want[N_PARTS];       /* what the stores must have at the end */
    char *values;              /* memory of the GPU that every write computes its values in */
    char *blank;
    char *held[N_PLACES + 1];  /* memory of the GPU of each write that has not ended */
    char *computed[N_PLACES + 1]; /* page-locked memory with the values of each write */
    int64_t rows[N_ROWS];      /* all rows: some that follow each other, and others */
    int64_t offsets[N_PARTS];
    int64_t begin;             /* of the rows of the next write */
    int64_t begins[N_ROUNDS + 1]; /* of the rows of each write */
};

static struct run *new_run(uint32_t seed)
{
    struct run *const run = calloc(1, sizeof *run);
    check(run != NULL);
    run->seed = seed;
    run->compute = async_stream();
    int64_t end = 0;
    for (int k = 0; k < N_PARTS; k++) {
        run->offsets[k] = end;
        end += (MOST_ROWS * row_nbytes[k] + LINE - 1) / LINE * LINE;
        run->want[k] = memory(N_ROWS * row_nbytes[k]);
        run->stores[k].row_nbytes = row_nbytes[k];
        if (k != INDICES)
            run->stores[k].rows = (struct pf_rows){
                .base = memory(N_ROWS * row_nbytes[k]), .n = N_ROWS, .stride = row_nbytes[k]};
    }
    run->direct = calloc(1, sizeof *run->direct + sizeof run->direct->launches[0]);
    check(run->direct != NULL);
    *run->direct = (struct pf_direct){
        .index_nbytes = 4, .shift = -1, .part = INDICES, .n_tables = 1, .n_launches = 1};
    run->direct->launches[0] = (struct pf_launch){
        .kernel = async_kernel(ASYNC_SCATTER), .n_blocks = 2, .n_threads = 32, .width = 4,
        .n_tables = 1, .tables = {{run->stores[DIRECT].rows.base, row_nbytes[DIRECT], DIRECT}}};
    run->values = memory(end);
    run->blank = memory(end);
    for (int i = 0; i < 2; i++)
        run->staging[i] = memory(end);
    for (int i = 0; i <= N_PLACES; i++) {
        run->held[i] = memory(end);
        run->computed[i] = memory(end);
    }
    for (int64_t i = 0; i < N_ROWS; i++) {
        const int64_t first = N_ROWS / 4;
        const int64_t j =
            i < first ? i : first + random_below(&run->seed, (uint32_t)(i - first) + 1);
        run->rows[i] = run->rows[j];
        run->rows[j] = i;
    }
    check(!pf_writer_open(&run->writer, driver, async_stream(), run->staging, N_PLACES + 1, N_PARTS,
                          N_STAGED, run->stores, run->direct));
    return run;
}

static void free_run(struct run *run)
{
    for (int k = 0; k < N_PARTS; k++) {
        free(run->want[k]);
        free(run->stores[k].rows.base);
    }
    for (int i = 0; i <= N_PLACES; i++) {
        free(run->held[i]);
        free(run->computed[i]);
    }
    free(run->staging[0]);
    free(run->staging[1]);
    free(run->values);
    free(run->blank);
    free(run->direct);
    free(run);
}

/* Queues write `number`, and returns what `pf_writer_write` does. */
static int write_rows(struct run *run, uint32_t number)
{
    static const uint32_t most[] = {2, 50, MOST_ROWS};
    const int64_t n = 1 + random_below(&run->seed, most[random_below(&run->seed, 3)]);
    if (run->begin + n > N_ROWS)
        return 0;
    const int64_t *const rows = run->rows + run->begin;
    char *const held = run->held[number % (N_PLACES + 1)];
    char *const computed = run->computed[number % (N_PLACES + 1)];
    char *values[N_PARTS], *devices[N_PARTS];
    const uint32_t unchanged = random_below(&run->seed, 2 * N_PARTS);
    for (int k = 0; k < N_PARTS; k++) {
        const int64_t nbytes = n * row_nbytes[k];
        values[k] = k == INDICES || (uint32_t)k == unchanged ? NULL : run->values + run->offsets[k];
        devices[k] = held + run->offsets[k];
        if (!values[k])
            continue;
        for (int64_t i = 0; i < nbytes; i += 4) {
            const uint32_t value = random_below(&run->seed, 1 << 24);
            memcpy(computed + run->offsets[k] + i, &value, 4);
        }
        check(!driver->copy(values[k], computed + run->offsets[k], (size_t)nbytes, run->compute));
    }
    const int result = pf_writer_write(run->writer, run->compute, rows, n, run->offsets, values,
                                       devices);
    if (result)
        return result;
    run->begin += n;
    run->begins[number + 1] = run->begin;
    for (int k = 0; k < N_PARTS; k++) {
        if (!values[k])
            continue;
        for (int64_t i = 0; i < n; i++)
            memcpy(run->want[k] + rows[i] * row_nbytes[k],
                   computed + run->offsets[k] + i * row_nbytes[k], (size_t)row_nbytes[k]);
        /* The program changes its values at once. */
        check(!driver->copy(values[k], run->blank, (size_t)(n * row_nbytes[k]), run->compute));
    }
    return 0;
}

/* Checks the rows of a write that has ended. */
static void check_rows(const struct run *run, uint32_t number)
{
    for (int64_t i = run->begins[number]; i < run->begins[number + 1]; i++)
        for (int k = 0; k < N_PARTS; k++) {
            const int64_t at = run->rows[i] * row_nbytes[k];
            check(k == INDICES
                  || !memcmp(run->want[k] + at, run->stores[k].rows.base + at,
                             (size_t)row_nbytes[k]));
        }
}

static void *stop(void *writer)
{
    pf_writer_stop(writer);
    return NULL;
}

/* Runs one loop, which another thread may stop, and checks that every accepted write was made. */
static void run_loop(uint32_t seed)
{
    struct run *const run = new_run(seed);
    const int n_threads = (int)(seed % 4);
    if (n_threads)
        pf_writer_start(run->writer, n_threads - 1);
    pthread_t stopper;
    const int stops = seed % 3 == 1;
    int result = 0;
    for (uint32_t number = 0; number < N_ROUNDS && !result; number++) {
        if (number >= N_PLACES) {
            pf_writer_is_computed(run->writer);
            while (pf_writer_wait(run->writer, number - N_PLACES)) {
            }
            check_rows(run, number - N_PLACES);
        }
        if (stops && number == N_ROUNDS / 2)
            pthread_create(&stopper, NULL, stop, run->writer);
        const int64_t begin = run->begin;
        result = write_rows(run, number);
        check(!result || (stops && result == PF_STOPPED));
        if (!result && run->begin == begin)
            break;
    }
    if (stops)
        pthread_join(stopper, NULL);
    pf_writer_stop(run->writer);
    for (int k = 0; k < N_PARTS; k++)
        check(k == INDICES
              || !memcmp(run->want[k], run->stores[k].rows.base,
                         (size_t)(N_ROWS * row_nbytes[k])));
    /* The program's stream may still use the memory. */
    void *last = NULL;
    check(!driver->create(&last, PF_EVENT_FLAGS) && !driver->record(last, run->compute));
    check(!driver->sync(last) && !driver->destroy(last));
    pf_writer_free(run->writer, 0);
    free_run(run);
}

/* Runs a loop on a GPU that fails. Every wait ends. */
static void fail(uint32_t seed)
{
    enum { ERROR = 700 };
    struct run *const run = new_run(seed);
    pf_writer_start(run->writer, (int)seed % 3);
    const struct pf_written *const written = (const struct pf_written *)run->writer;
    for (uint32_t number = 0; number < 6; number++) {
        if (number == 3)
            async_fail(ERROR);
        if (number < 3)
            check(!write_rows(run, number));
        else
            check(pf_writer_write(run->writer, run->compute, run->rows, 1, run->offsets, run->held,
                                  run->held)
                  == ERROR);
    }
    while (pf_writer_wait(run->writer, 2)) {
    }
    check(!written->error || written->error == ERROR);
    pf_writer_stop(run->writer);
    async_fail(0);
    pf_writer_free(run->writer, 0);
    async_stop();
    free_run(run);
}

int main(void)
{
    for (uint32_t seed = 0; seed < 12; seed++) {
        async_start(seed);
        run_loop(seed);
        async_stop();
    }
    for (uint32_t seed = 0; seed < 6; seed++) {
        async_start(seed);
        fail(seed);
    }
    puts("all rows are written");
}
