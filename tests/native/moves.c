/* Moves to a simulated GPU under stress, for ThreadSanitizer and AddressSanitizer: engines with a
 * driver, and batches of a loader. See test_sanitizers.py.
 *
 * Memory of the GPU is used as torch's allocator uses it: a block that the training step no longer
 * needs is memory of the next job at once, although the step runs late. A training step is a copy
 * from the block, which is compared when it has run. */
#define _GNU_SOURCE
#include "async_driver.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N_SLOTS = 3, N_BLOCKS = N_SLOTS + 1, N_READINGS = 4, MOST_PARTS = 7 };
enum { N_ROWS = 5000, LONG = 4500, LINE = 64 };

static const struct pf_driver *const driver = &async_driver;
static const char freed = 0x5B;

static uint32_t random_below(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % n;
}

#define check(is_right) ((is_right) ? (void)0 : fail_at(__LINE__))

static void fail_at(int line)
{
    fprintf(stderr, "moves.c:%d\n", line);
    abort();
}

static int64_t aligned(int64_t nbytes)
{
    return (nbytes + LINE - 1) / LINE * LINE;
}

static char *memory(int64_t nbytes)
{
    char *const found = aligned_alloc(LINE, (size_t)aligned(nbytes + 1));
    check(found != NULL);
    memset(found, freed, (size_t)nbytes);
    return found;
}

/* Fills memory with numbers that depend on the seed. */
static void fill(char *to, int64_t nbytes, uint32_t *seed)
{
    for (int64_t i = 0; i < nbytes; i += 4) {
        const uint32_t number = *seed = *seed * 1664525u + 1013904223u;
        memcpy(to + i, &number, (size_t)(nbytes - i < 4 ? nbytes - i : 4));
    }
}

/* Parts of a batch: one after the other in staging memory, and on the GPU together or apart. */
struct layout {
    int64_t n;
    int64_t offsets[MOST_PARTS];
    int64_t nbytes[MOST_PARTS];
    int64_t at[MOST_PARTS]; /* on the GPU */
    char *devices[MOST_PARTS];
    int64_t end; /* bytes on the GPU */
};

/* Adds a part to a layout. */
static void add(struct layout *layout, int64_t nbytes, uint32_t *seed)
{
    const int64_t k = layout->n++;
    layout->nbytes[k] = nbytes;
    layout->offsets[k] = k ? layout->offsets[k - 1] + aligned(layout->nbytes[k - 1]) : 0;
    layout->at[k] = aligned(layout->end) + (random_below(seed, 2) ? LINE : 0);
    layout->end = layout->at[k] + nbytes;
}

/* ---- the program on the GPU ------------------------------------------------------------------ */

struct part {
    int64_t at;
    int64_t nbytes;
};

/* The parts of its block that a training step reads. */
struct reading {
    void *read; /* event after the step */
    char *found;
    char *want;
    struct part parts[2 * MOST_PARTS];
    int64_t n;
};

struct program {
    void *streams[2]; /* the program's usual stream, and another one */
    void *other;      /* event of the other stream */
    char *blocks[N_BLOCKS];
    char *blank;
    int64_t block_nbytes;
    int n_free;
    struct reading readings[N_READINGS];
    uint32_t n_steps;
};

static void begin_program(struct program *program, int64_t block_nbytes)
{
    *program = (struct program){.block_nbytes = block_nbytes};
    for (int i = 0; i < 2; i++)
        program->streams[i] = async_stream();
    program->blank = memory(block_nbytes);
    check(!driver->create(&program->other, PF_EVENT_FLAGS));
    for (int i = 0; i < N_BLOCKS; i++)
        program->blocks[program->n_free++] = memory(block_nbytes);
    for (int i = 0; i < N_READINGS; i++) {
        struct reading *const reading = &program->readings[i];
        check(!driver->create(&reading->read, PF_EVENT_FLAGS));
        reading->found = memory(block_nbytes);
        reading->want = memory(block_nbytes);
    }
}

static void compare(struct reading *reading)
{
    check(!driver->sync(reading->read));
    for (int64_t i = 0; i < reading->n; i++) {
        const struct part *const part = &reading->parts[i];
        check(!memcmp(reading->found + part->at, reading->want + part->at,
                      (size_t)part->nbytes));
    }
    reading->n = 0;
}

/* Compares what an earlier step has read, and returns the reading of the next one. */
static struct reading *next_reading(struct program *program)
{
    struct reading *const reading = &program->readings[program->n_steps % N_READINGS];
    compare(reading);
    return reading;
}

/* Allocates memory for the parts of a batch. The program uses it before, in its usual stream. */
static char *allocate(struct program *program, struct layout *layout)
{
    char *const block = program->blocks[--program->n_free];
    check(layout->end <= program->block_nbytes);
    driver->copy(block, program->blank, (size_t)layout->end, program->streams[0]);
    for (int64_t k = 0; k < layout->n; k++)
        layout->devices[k] = block + layout->at[k];
    return block;
}

/* Adds the part of a layout to what a step reads, and the gap after it, which no copy may write
 * unless the next part is together with this one. Returns where the wanted bytes go. */
static char *add_part(struct reading *reading, const struct layout *layout, int64_t k)
{
    const int64_t at = layout->at[k], end = at + layout->nbytes[k];
    reading->parts[reading->n++] = (struct part){at, layout->nbytes[k]};
    if (k + 1 < layout->n
        && layout->at[k + 1] - at != layout->offsets[k + 1] - layout->offsets[k]) {
        reading->parts[reading->n++] = (struct part){end, layout->at[k + 1] - end};
        memset(reading->want + end, freed, (size_t)(layout->at[k + 1] - end));
    }
    return reading->want + at;
}

/* Queues a training step in a stream, and frees its block. */
static void step(struct program *program, int in, char *block)
{
    struct reading *const reading = &program->readings[program->n_steps++ % N_READINGS];
    void *const stream = program->streams[in];
    for (int64_t i = 0; i < reading->n; i++) {
        const struct part *const part = &reading->parts[i];
        check(!driver->copy(reading->found + part->at, block + part->at, (size_t)part->nbytes,
                            stream));
    }
    check(!driver->record(reading->read, stream));
    if (in) {
        /* The allocator does this for memory that was shared with another stream. */
        check(!driver->record(program->other, stream));
        check(!driver->wait(program->streams[0], program->other, 0));
    }
    program->blocks[program->n_free++] = block;
}

static void end_program(struct program *program)
{
    for (int i = 0; i < N_READINGS; i++) {
        compare(&program->readings[i]);
        driver->destroy(program->readings[i].read);
        free(program->readings[i].found);
        free(program->readings[i].want);
    }
    driver->destroy(program->other);
    free(program->blank);
    check(program->n_free == N_BLOCKS);
    for (int i = 0; i < N_BLOCKS; i++)
        free(program->blocks[i]);
}

/* ---- engines --------------------------------------------------------------------------------- */

enum { N_TABLES = 5, INDICES = N_TABLES, N_SOURCES, DIRECT = N_SOURCES, N_PARTS, N_JOBS = 30,
       N_ROUNDS = 6 };

/* Bytes of a row of each table, of a row index at most, and of a row that the GPU reads itself. */
static const int64_t row_nbytes[N_PARTS] = {4, 192, 0, 1024, 0, sizeof(struct pf_pair), 100};

/* A job that was submitted. */
struct job {
    int64_t rows[LONG];
    int64_t n;
    struct layout layout;
    char *block;
};

struct run {
    struct pf_source sources[N_SOURCES];
    struct pf_rows parts[N_PARTS];
    struct pf_direct *read;
    struct program program;
    struct job jobs[N_SLOTS];
    struct pf_engine *engine;
    void *side;
    char *staging[N_SLOTS];
    uint32_t seed;
};

static void *stop(void *engine)
{
    pf_engine_stop(engine);
    return NULL;
}

static void ignore(int number)
{
    (void)number;
}

struct poker {
    pthread_t loop;
    pthread_t thread;
    _Atomic int is_over;
};

/* Interrupts the waits of a loop. */
static void *poke(void *argument)
{
    struct poker *const poker = argument;
    while (!poker->is_over) {
        const struct timespec nap = {0, 100000};
        nanosleep(&nap, NULL);
        pthread_kill(poker->loop, SIGUSR1);
    }
    return NULL;
}

static void submit(struct run *run, uint32_t number)
{
    struct job *const job = &run->jobs[number % N_SLOTS];
    /* Without rows, of one piece of each source, of some pieces, and of several copies. */
    static const uint32_t most[] = {1, 50, 50, 700, 700, LONG};
    job->n = random_below(&run->seed, most[random_below(&run->seed, 6)]);
    const int follow = !random_below(&run->seed, 4);
    for (int64_t i = 0; i < job->n; i++)
        job->rows[i] = follow ? N_ROWS - job->n + i : random_below(&run->seed, N_ROWS);
    job->layout = (struct layout){0};
    for (int k = 0; k < N_PARTS; k++) {
        const int64_t nbytes = k == INDICES ? run->sources[k].row_nbytes : row_nbytes[k];
        add(&job->layout, job->n * nbytes, &run->seed);
    }
    job->block = allocate(&run->program, &job->layout);
    check(pf_engine_submit(run->engine, job->rows, job->n, run->program.streams[0],
                           job->layout.offsets, job->layout.devices)
          == number);
}

/* Waits for a job, and queues a training step that reads its rows. */
static void receive(struct run *run, uint32_t number)
{
    struct job *const job = &run->jobs[number % N_SLOTS];
    struct program *const program = &run->program;
    for (uint32_t n = random_below(&run->seed, 3); n && pf_engine_help(run->engine, number); n--) {
    }
    struct pf_result result;
    while (pf_engine_wait(run->engine, number, program->streams[0], &result)) {
    }
    check(!result.failed && !result.error && result.end_s >= result.begin_s);
    const int in = !random_below(&run->seed, 4);
    if (in)
        check(!pf_engine_wait_again(run->engine, number, program->streams[in]));
    struct reading *const reading = next_reading(program);
    for (int k = 0; k < N_PARTS; k++) {
        if (k == INDICES)
            continue;
        char *const want = add_part(reading, &job->layout, k);
        for (int64_t i = 0; i < job->n; i++)
            memcpy(want + i * row_nbytes[k], run->parts[k].base + job->rows[i] * row_nbytes[k],
                   (size_t)row_nbytes[k]);
    }
    step(program, in, job->block);
}

static void open_engine(struct run *run, int round)
{
    const int is_paired = round % 3 != 2;
    run->sources[INDICES].row_nbytes = is_paired ? sizeof(struct pf_pair) : sizeof(int32_t);
    run->read->shift = is_paired ? 4 : -1;
    run->read->launches[0].kernel = async_kernel(is_paired);
    run->engine = pf_engine_open(N_SOURCES, run->sources, N_SLOTS, 1 + (uint32_t)round % 2,
                                 round % 2);
    check(!pf_engine_use_driver(run->engine, driver, run->side, N_SLOTS, run->staging, run->read));
}

/* Runs one loop, which other threads may stop or interrupt. It may leave jobs. */
static void run_engine(struct run *run, int round)
{
    open_engine(run, round);
    pf_engine_start(run->engine, round % 4);
    pthread_t stopper;
    struct poker poker = {.loop = pthread_self()};
    const int stops = round % 3 == 1, is_poked = round % 3 == 2;
    const uint32_t leaves = (uint32_t)round % 2;
    if (is_poked)
        pthread_create(&poker.thread, NULL, poke, &poker);
    uint32_t submitted = 0;
    for (uint32_t waited = 0; waited + leaves < N_JOBS; waited++) {
        while (submitted < N_JOBS && submitted < waited + N_SLOTS)
            submit(run, submitted++);
        if (stops && waited == N_JOBS / 2)
            pthread_create(&stopper, NULL, stop, run->engine);
        receive(run, waited);
    }
    if (stops)
        pthread_join(stopper, NULL);
    poker.is_over = 1;
    if (is_poked)
        pthread_join(poker.thread, NULL);
    pf_engine_stop(run->engine);
    if (leaves) {
        /* The program uses the memory of the job that the loop has left for something else. */
        char *const block = run->jobs[(N_JOBS - 1) % N_SLOTS].block;
        struct reading *const reading = next_reading(&run->program);
        const int64_t nbytes = run->program.block_nbytes;
        memset(reading->want, freed, (size_t)nbytes);
        check(!driver->copy(block, run->program.blank, (size_t)nbytes, run->program.streams[0]));
        reading->parts[reading->n++] = (struct part){0, nbytes};
        step(&run->program, 0, block);
    }
    pf_engine_free(run->engine, 0);
}

static struct run *new_run(uint32_t seed)
{
    struct run *const run = calloc(1, sizeof *run);
    check(run != NULL);
    run->seed = seed;
    run->side = async_stream();
    int64_t most = 0;
    for (int k = 0; k < N_PARTS; k++) {
        run->parts[k].base = memory(N_ROWS * row_nbytes[k]);
        run->parts[k].n = N_ROWS;
        run->parts[k].stride = row_nbytes[k];
        if (k < N_SOURCES)
            run->sources[k] = (struct pf_source){&run->parts[k], k < N_TABLES, row_nbytes[k]};
        fill(run->parts[k].base, N_ROWS * row_nbytes[k], &run->seed);
        most += aligned(LONG * row_nbytes[k]) + LINE;
    }
    run->read = calloc(1, sizeof *run->read + sizeof run->read->launches[0]);
    check(run->read != NULL);
    *run->read =
        (struct pf_direct){.index_nbytes = 4, .part = INDICES, .n_tables = 1, .n_launches = 1};
    run->read->launches[0] = (struct pf_launch){
        .n_blocks = 2, .n_threads = 32, .width = 4, .n_tables = 1,
        .tables = {{run->parts[DIRECT].base, row_nbytes[DIRECT], DIRECT}}};
    for (int i = 0; i < N_SLOTS; i++)
        run->staging[i] = memory(most);
    begin_program(&run->program, most);
    return run;
}

static void free_run(struct run *run)
{
    end_program(&run->program);
    for (int i = 0; i < N_SLOTS; i++)
        free(run->staging[i]);
    for (int k = 0; k < N_PARTS; k++)
        free(run->parts[k].base);
    free(run->read);
    free(run);
}

static void *engine_loop(void *argument)
{
    struct run *const run = new_run((uint32_t)(uintptr_t)argument);
    for (int round = 0; round < N_ROUNDS; round++)
        run_engine(run, round);
    free_run(run);
    return NULL;
}

/* Runs a loop on a GPU that fails. Every wait ends, and from then on has the first error. */
static void fail(uint32_t seed)
{
    enum { FIRST = 700, LATER = 719, BEGIN = 8, MIDDLE = 16 };
    struct run *const run = new_run(seed);
    open_engine(run, (int)seed);
    pf_engine_start(run->engine, (int)seed % 3);
    uint32_t submitted = 0;
    for (uint32_t waited = 0; waited < N_JOBS; waited++) {
        while (submitted < N_JOBS && submitted < waited + N_SLOTS)
            submit(run, submitted++);
        if (waited == BEGIN)
            async_fail(FIRST);
        struct pf_result result;
        check(!pf_engine_wait(run->engine, waited, run->program.streams[0], &result));
        /* The last jobs with the first error were submitted before the next line. */
        check(result.error == (waited < BEGIN ? 0 : waited < MIDDLE + N_SLOTS ? FIRST : LATER));
        if (waited == MIDDLE)
            async_fail(LATER);
        run->program.blocks[run->program.n_free++] = run->jobs[waited % N_SLOTS].block;
    }
    pf_engine_stop(run->engine);
    pf_engine_free(run->engine, 0);
    /* Copies that were queued before may still run, in each stream. */
    async_fail(0);
    void *const used[] = {run->side, run->program.streams[0]};
    for (int i = 0; i < 2; i++) {
        check(!driver->record(run->program.other, used[i]));
        check(!driver->sync(run->program.other));
    }
    free_run(run);
}

/* ---- batches of a loader --------------------------------------------------------------------- */

enum { N_MOVES = 100, MOST_NBYTES = 5 << 20 };

struct batch {
    struct layout layout;
    char *memory[MOST_PARTS]; /* of the loader */
    const char *from[MOST_PARTS];
    void *released;
    void *copied;
    char *staging;
    struct pf_queue queue;
};

/* Lets the loader fill the memory of its next batch. */
static void load(struct batch *batch, uint32_t *seed)
{
    static const uint32_t most[] = {1, 300, 300, 100000, 3 << 20};
    struct pf_queue *const queue = &batch->queue;
    /* Direct copies may still read this memory. */
    if (queue->n_staged < queue->n_copies)
        check(!driver->sync(batch->copied));
    queue->n_copies = 1 + random_below(seed, MOST_PARTS);
    queue->n_staged = random_below(seed, 2) ? queue->n_copies
                                            : random_below(seed, (uint32_t)queue->n_copies + 1);
    batch->layout = (struct layout){0};
    for (int64_t i = 0; i < queue->n_copies; i++) {
        const int64_t n = random_below(seed, most[random_below(seed, 5)]);
        add(&batch->layout, batch->layout.end + n < MOST_NBYTES ? n : 0, seed);
        fill(batch->memory[i], batch->layout.nbytes[i], seed);
        batch->from[i] = batch->memory[i];
    }
}

/* Queues the copies of a batch. Staged parts may be filled again at once. */
static void send(struct batch *batch)
{
    const struct layout *const layout = &batch->layout;
    for (;;) {
        const int error = pf_queue(&batch->queue, layout->offsets, layout->nbytes, layout->devices,
                                   batch->from, NULL);
        if (error != PF_NOT_READY) {
            check(!error);
            return;
        }
        check(!driver->sync(batch->copied));
    }
}

static void *loader_loop(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument;
    struct program program;
    struct batch batches[N_SLOTS] = {0};
    begin_program(&program, MOST_NBYTES + 2 * MOST_PARTS * LINE);
    void *const side = async_stream();
    for (int i = 0; i < N_SLOTS; i++) {
        struct batch *const batch = &batches[i];
        check(!driver->create(&batch->released, PF_EVENT_FLAGS));
        check(!driver->create(&batch->copied, PF_EVENT_FLAGS));
        batch->staging = memory(program.block_nbytes);
        for (int k = 0; k < MOST_PARTS; k++)
            batch->memory[k] = memory(3 << 20);
        batch->queue = (struct pf_queue){.driver = driver,
                                         .before = program.streams[0],
                                         .stream = side,
                                         .released = batch->released,
                                         .done = batch->copied,
                                         .staging = batch->staging};
    }
    char *blocks[N_SLOTS];
    for (uint32_t sent = 0, received = 0; received < N_MOVES; received++) {
        for (; sent < N_MOVES && sent < received + N_SLOTS; sent++) {
            struct batch *const batch = &batches[sent % N_SLOTS];
            load(batch, &seed);
            blocks[sent % N_SLOTS] = allocate(&program, &batch->layout);
            send(batch);
        }
        const struct batch *const batch = &batches[received % N_SLOTS];
        check(pf_receive(driver, program.streams[0], batch->released, batch->copied) >= 0);
        struct reading *const reading = next_reading(&program);
        for (int64_t i = 0; i < batch->queue.n_copies; i++) {
            const size_t nbytes = (size_t)batch->layout.nbytes[i];
            memcpy(add_part(reading, &batch->layout, i), batch->memory[i], nbytes);
            if (i < batch->queue.n_staged)
                memset(batch->memory[i], freed, nbytes);
        }
        step(&program, 0, blocks[received % N_SLOTS]);
    }
    end_program(&program);
    for (int i = 0; i < N_SLOTS; i++) {
        check(!driver->sync(batches[i].copied));
        driver->destroy(batches[i].released);
        driver->destroy(batches[i].copied);
        free(batches[i].staging);
        for (int k = 0; k < MOST_PARTS; k++)
            free(batches[i].memory[k]);
    }
    return NULL;
}

int main(void)
{
    struct sigaction action = {.sa_handler = ignore};
    sigaction(SIGUSR1, &action, NULL);
    async_start(1);
    pthread_t loops[3];
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&loops[i], NULL, i < 2 ? engine_loop : loader_loop, (void *)(i + 1));
    for (int i = 0; i < 3; i++)
        pthread_join(loops[i], NULL);
    for (uint32_t seed = 0; seed < 6; seed++)
        fail(seed);
    async_stop();
    puts("all bytes are right");
    return 0;
}
