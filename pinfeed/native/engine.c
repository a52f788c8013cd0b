/* The engine: threads that gather the rows of the next batches, and move them to a GPU, for one
 * loop.
 *
 * The loop submits a job for each batch, or for several short ones: the indices of the rows, and
 * where the rows of each source go. A job is divided into pieces of about 128 KiB, so that all
 * threads can gather one batch. The threads take pieces of the oldest job first. When the loop
 * needs a batch, it takes pieces of that job, too, instead of sleeping until a thread wakes up.
 * Without threads, it takes all of them.
 *
 * Without a driver, the rows go straight into the batch, which is in host memory. With one, they go
 * into the page-locked staging memory of a slot. All parts of a job lie one after the other, in
 * staging memory as on the GPU, so a short job is one copy. A long one is copied while its later
 * pieces are gathered: the thread that ends a piece also queues the copies, and calls the driver
 * itself. No Python runs between two requests of the loop.
 *
 * The GPU may read some rows itself (see direct.c). Then a job gathers its row indices like rows,
 * and the last thing that is queued for it is the reads.
 *
 *     the thread of the loop              any thread: one of the engine, or the loop that waits
 *
 *     submit: released = record(compute)
 *             ticket = all pieces
 *                                         open:   copied.sync(), of the slot's last job      (1)
 *                                         pieces: rows -> staging
 *                                         send, one thread at a time, in the order of jobs:
 *                                                 wait(side, released)                       (2)
 *                                                 copy(staging -> device, side)
 *                                                 read(store -> device, side)  direct route
 *                                                 copied = record(side)
 *                                                 state = ENDED
 *     wait:   takes pieces until ENDED
 *             wait(compute, copied)  (4)
 *     again:  wait(compute, copied)  (4)  in another stream
 *     stop:   record(side).sync()    (9)
 *
 * The numbers are those of the hazards in pinfeed/pipeline/transfer.py:
 *
 * (1) the last copies may still read staging memory
 * (2) kernels may still use an earlier tensor in the same memory of the GPU
 * (4) the rows may not have arrived yet
 * (9) copies may still write memory of the GPU that was not lent
 *
 * The events of a slot are recorded again for each of its jobs. That is safe, because a wait refers
 * to the last record before it, and a slot has one job at a time: (2) comes after submit, (4) after
 * ENDED, and the loop submits to a slot only after it has lent the slot's last batch. (1) comes
 * before the first copy of the slot's next job.
 *
 * One thread at a time sends. The side stream is one queue. If a copy of job k + 1 came before one
 * of job k, job k would wait for `released` of job k + 1, which comes after later work of the
 * training step. A thread that finds another one sending leaves its piece to it.
 *
 * States of a job, which is in a place of a ring that later jobs use again:
 *
 *   submitted   `ticket` has the job's number and the pieces that no thread has taken
 *   taken       the ticket has no pieces left
 *   ended       all rows are gathered, all copies queued, and `state` is ENDED; only now does the
 *               loop use the rows, and only when the loop has seen this may it submit another job
 *               in the same place
 *
 * Hazards of the threads:
 *
 * (a) A slow thread looks for pieces of a job that has ended, while the place already belongs to
 *     another job. The ticket contains the number of the job, and a piece is taken by comparing
 *     and exchanging the whole ticket. So a thread reads the other fields only after it has taken
 *     a piece, and the job cannot end before this piece has. It may open the gate of the other job,
 *     which is work that this job needs, too. Therefore a job without pieces has no gate: it could
 *     end while this thread opens it.
 * (b) A thread goes to sleep while the loop submits a job. It reads `bell` before it looks for
 *     jobs, and counts itself in `n_asleep`; then it sleeps only if `bell` has not changed. The
 *     loop submits first, then rings, and then looks whether threads sleep.
 * (c) The loop goes to sleep while the last piece ends. It announces that in `state` by comparing
 *     and exchanging, which fails if the job has ended.
 * (d) Another thread stops the engine while the loop waits. A thread ends every piece that it has
 *     taken, and the loop takes all others, so the job ends all the same. A thread that goes to
 *     sleep reads `is_stopped` after `bell`, which the other thread changes last.
 * (e) A thread takes the last piece of a job that the loop has not counted yet. The loop counts a
 *     job in `n_untaken` before it writes the ticket, so it never counts too few.
 * (f) A piece ends while another thread has just looked for pieces to send. Each piece is counted
 *     in `n_to_send` after it is marked as done. The sender ends only if no piece was counted since
 *     it last looked.
 *
 * tests/native/test_engine_model.py checks (a) to (e) for every order of the steps, and
 * tests/native/test_send_model.py checks (f) and the gates. tests/pipeline/test_engine_protocol.py
 * checks the waits of the streams.
 *
 * The loop's thread submits and waits. It keeps the memory of each job alive until it has waited
 * for the job, or has stopped the engine. */
#define _GNU_SOURCE
#include "pinfeed.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PIECE_NBYTES (128 << 10)
#define MOST_THREADS 64
/* Sleeping and waking up takes longer than a piece, which takes 10 to 40 us. So a thread without
 * work looks again before it sleeps: for about 250 us while that succeeds, and for a few us
 * otherwise, because the training step needs the cores. Once in a while it tries again. */
#define MOST_LOOKS 8000
#define FEW_LOOKS 200
#define SLEEPS_BEFORE_TRIAL 16

enum { RUNNING, AWAITED, ENDED };
enum { OPEN, CLOSED, OPENING };

/* Staging memory of one job at a time, and the events that guard it. */
struct slot {
    char *staging;
    void *released; /* after the work that may still use an earlier tensor in the job's memory */
    void *copied;   /* after the copies of the last job; an event without a record has passed */
};

struct job {
    _Atomic uint64_t ticket; /* high half: number of the job; low half: pieces to take */
    _Atomic uint32_t unfinished;
    _Atomic uint32_t state;
    _Atomic uint32_t gate;  /* whether its staging memory may be written */
    _Atomic int32_t failed; /* 1 + the number of a source that could not be read; 0 for none */
    _Atomic int32_t error;  /* of the driver; 0 for none */
    _Atomic uint32_t is_mixed; /* whether the rows do not follow each other */
    uint32_t n_pieces;
    const int64_t *rows;
    int64_t n;
    double begin_s;
    double end_s;
    int64_t *outs; /* where the rows of each source go: addresses, or offsets in the slot */
    /* With a driver only: */
    struct slot *slot;
    int64_t *nbytes;       /* of the rows of each source */
    char **devices;        /* where they go on the GPU, and the rows that the GPU reads itself */
    uint32_t n_sent;       /* pieces whose copies are queued; the sender's */
    _Atomic uint8_t *done; /* by piece */
    uint32_t n_done;       /* room in `done` */
};

struct source {
    struct pf_source rows;
    int64_t rows_per_piece;
};

struct pf_engine {
    const struct pf_driver *driver; /* NULL if batches are in host memory */
    void *side;                     /* stream of the copies */
    const struct pf_direct *direct; /* rows that the GPU reads itself; NULL for none */
    int n_sources;
    size_t n_devices; /* parts of a job on the GPU */
    int n_threads;
    int bypass;
    int may_fail; /* whether a source has mapped files */
    uint32_t n_places;
    uint32_t ring_at; /* jobs with pieces to take at which a sleeping thread is woken */
    uint32_t n_slots;
    uint32_t next_slot;
    struct source *sources;
    struct job *jobs;
    struct slot *slots;
    _Atomic uint32_t head;      /* number of submitted jobs */
    _Atomic uint32_t next;      /* number of the job to send */
    _Atomic uint32_t n_to_send; /* pieces that ended since the sender last looked */
    _Atomic int32_t n_untaken;  /* jobs with pieces to take */
    _Atomic uint32_t bell;
    _Atomic uint32_t n_asleep;
    _Atomic uint32_t is_stopped;
    pthread_mutex_t stopping; /* held while n_threads changes */
    pthread_t threads[MOST_THREADS];
};

double pf_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

long pf_sleep_if(_Atomic uint32_t *word, uint32_t value)
{
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

void pf_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static struct job *job_of(const struct pf_engine *engine, uint32_t number)
{
    return &engine->jobs[number % engine->n_places];
}

/* Notes the first failure of a job: of a source, or of the driver. */
static void note(_Atomic int32_t *noted, int failure)
{
    int32_t none = 0;
    if (failure)
        atomic_compare_exchange_strong(noted, &none, failure);
}

/* ---- pieces ------------------------------------------------------------------------------------
 * The pieces of all sources are numbered one after the other. */

static int64_t n_pieces_of(const struct source *source, int64_t n)
{
    return (n + source->rows_per_piece - 1) / source->rows_per_piece;
}

/* Returns the source of a piece, and its rows [*begin, *end). */
static int source_of_piece(const struct pf_engine *engine, const struct job *job, int64_t piece,
                           int64_t *begin, int64_t *end)
{
    int k = 0;
    for (int64_t n; piece >= (n = n_pieces_of(&engine->sources[k], job->n)); k++)
        piece -= n;
    *begin = piece * engine->sources[k].rows_per_piece;
    *end = *begin + engine->sources[k].rows_per_piece;
    if (*end > job->n)
        *end = job->n;
    return k;
}

static void gather_piece(const struct pf_engine *engine, struct job *job, int64_t piece)
{
    int64_t begin, end;
    const int k = source_of_piece(engine, job, piece, &begin, &end);
    const struct pf_source *rows = &engine->sources[k].rows;
    char *const out = job->slot ? job->slot->staging + job->outs[k] : (char *)job->outs[k];
    if (!rows->n_parts) {
        if (!pf_stage_indices(engine->direct, job->rows, begin, end, out))
            atomic_store(&job->is_mixed, 1);
        return;
    }
    const struct pf_rows target = {.base = out, .n = job->n, .stride = rows->row_nbytes};
    if (pf_copy_guarded(rows, job->rows, &target, NULL, begin, end, engine->bypass))
        note(&job->failed, k + 1);
}

static void end_job(const struct pf_engine *engine, struct job *job)
{
    for (int k = 0; k < engine->n_sources; k++)
        if (pf_has_shrunk(&engine->sources[k].rows))
            note(&job->failed, k + 1);
    job->end_s = pf_now_s();
    if (atomic_exchange(&job->state, ENDED) == AWAITED)
        pf_wake(&job->state, 1);
}

/* ---- copies to the GPU: one thread at a time ------------------------------------------------- */

/* Returns the bytes of staging memory up to the end of a number of pieces. */
static int64_t end_of_pieces(const struct pf_engine *engine, const struct job *job, uint32_t n)
{
    if (!n)
        return 0;
    int64_t begin, end;
    const int k = source_of_piece(engine, job, (int64_t)n - 1, &begin, &end);
    return job->outs[k] + end * engine->sources[k].rows.row_nbytes;
}

/* Queues copies of what was gathered of a job, unless that is little. Returns whether the job has
 * ended. */
static int send_job(const struct pf_engine *engine, struct job *job)
{
    const struct pf_driver *driver = engine->driver;
    struct slot *slot = job->slot;
    uint32_t n = job->n_sent;
    while (n < job->n_pieces && atomic_load(&job->done[n]))
        n++;
    const int is_whole = n == job->n_pieces;
    const int64_t from = end_of_pieces(engine, job, job->n_sent);
    const int64_t to = end_of_pieces(engine, job, n);
    if (!is_whole && to - from < PF_COPY_NBYTES)
        return 0;
    if (!job->n_sent)
        note(&job->error, driver->wait(engine->side, slot->released, 0)); /* (2) */
    const struct pf_staged staged = {driver,      engine->side, slot->staging,    job->outs,
                                     job->nbytes, job->devices, engine->n_sources};
    note(&job->error, pf_copy_staged(&staged, from, to));
    job->n_sent = n;
    if (!is_whole)
        return 0;
    /* Row indices that have not arrived may be any numbers. */
    if (engine->direct && !atomic_load(&job->error)) {
        const int64_t start = atomic_load(&job->is_mixed) || !job->n ? -1 : job->rows[0];
        note(&job->error,
             pf_move_rows(driver, engine->side, engine->direct, PF_FROM_TABLES, start, job->n,
                          job->devices));
    }
    note(&job->error, driver->record(slot->copied, engine->side));
    end_job(engine, job);
    return 1;
}

static void send_ready(struct pf_engine *engine)
{
    if (atomic_fetch_add(&engine->n_to_send, 1))
        return;
    for (uint32_t seen = 1;;) {
        uint32_t number;
        while ((number = atomic_load(&engine->next)) != atomic_load(&engine->head)
               && send_job(engine, job_of(engine, number)))
            atomic_store(&engine->next, number + 1);
        const uint32_t counted = atomic_fetch_sub(&engine->n_to_send, seen);
        if (counted == seen)
            return;
        seen = counted - seen;
    }
}

/* ---- threads --------------------------------------------------------------------------------- */

/* Waits until staging memory may be written, for a job that was just looked at. Returns -1 if a
 * signal arrived. */
static int open_gate(const struct pf_engine *engine, struct job *job)
{
    uint32_t gate = CLOSED;
    if (atomic_compare_exchange_strong(&job->gate, &gate, OPENING)) {
        note(&job->error, engine->driver->sync(job->slot->copied)); /* (1) */
        atomic_store(&job->gate, OPEN);
        pf_wake(&job->gate, MOST_THREADS);
        return 0;
    }
    while (gate == OPENING) {
        if (pf_sleep_if(&job->gate, OPENING) && errno == EINTR)
            return -1;
        gate = atomic_load(&job->gate);
    }
    return 0;
}

/* Takes a piece of job `number` and gathers it. Returns 0 if no piece is left, and -1 if a signal
 * arrived. */
static int help(struct pf_engine *engine, uint32_t number)
{
    struct job *job = job_of(engine, number);
    uint64_t ticket = atomic_load(&job->ticket);
    do {
        if (ticket >> 32 != number || !(uint32_t)ticket)
            return 0;
        if (atomic_load(&job->gate) != OPEN && open_gate(engine, job))
            return -1;
    } while (!atomic_compare_exchange_weak(&job->ticket, &ticket, ticket - 1));
    const uint32_t left = (uint32_t)ticket;
    if (left == job->n_pieces)
        job->begin_s = pf_now_s();
    if (left == 1)
        atomic_fetch_sub(&engine->n_untaken, 1);
    const uint32_t piece = job->n_pieces - left;
    gather_piece(engine, job, piece);
    if (engine->driver) {
        atomic_store(&job->done[piece], 1);
        send_ready(engine);
    } else if (atomic_fetch_sub(&job->unfinished, 1) == 1)
        end_job(engine, job);
    return 1;
}

static void *work(void *argument)
{
    struct pf_engine *engine = argument;
    uint32_t number = 0, n_sleeps = 0;
    int n_looks = MOST_LOOKS;
    pf_enter(engine->driver);
    while (!atomic_load(&engine->is_stopped)) {
        const uint32_t bell = atomic_load(&engine->bell);
        uint32_t head = atomic_load(&engine->head);
        const int has_waited = number == head;
        for (int i = 0; number == head && i < n_looks; i++) {
            pause_briefly();
            head = atomic_load(&engine->head);
        }
        if (number == head) {
            n_looks = ++n_sleeps % SLEEPS_BEFORE_TRIAL ? FEW_LOOKS : MOST_LOOKS;
            atomic_fetch_add(&engine->n_asleep, 1);
            if (!atomic_load(&engine->is_stopped))
                pf_sleep_if(&engine->bell, bell);
            atomic_fetch_sub(&engine->n_asleep, 1);
            continue;
        }
        if (has_waited)
            n_looks = MOST_LOOKS;
        while (!atomic_load(&engine->is_stopped) && help(engine, number)) {
        }
        number++;
    }
    return NULL;
}

static void ring(struct pf_engine *engine)
{
    atomic_fetch_add(&engine->bell, 1);
    if (atomic_load(&engine->n_asleep))
        pf_wake(&engine->bell, MOST_THREADS);
}

/* ---- what the loop calls --------------------------------------------------------------------- */

void pf_engine_free(struct pf_engine *engine, int is_forked)
{
    if (engine->driver && !is_forked) {
        struct pf_scope scope = pf_enter(engine->driver);
        for (uint32_t i = 0; engine->slots && i < engine->n_slots; i++) {
            if (engine->slots[i].released)
                engine->driver->destroy(engine->slots[i].released);
            if (engine->slots[i].copied)
                engine->driver->destroy(engine->slots[i].copied);
        }
        pf_leave(engine->driver, &scope);
    }
    for (uint32_t i = 0; engine->jobs && i < engine->n_places; i++) {
        free(engine->jobs[i].outs);
        free(engine->jobs[i].nbytes);
        free(engine->jobs[i].devices);
        free(engine->jobs[i].done);
    }
    for (int k = 0; engine->sources && k < engine->n_sources; k++)
        free((void *)engine->sources[k].rows.parts);
    free(engine->slots);
    free(engine->jobs);
    free(engine->sources);
    free(engine);
}

static int allocate(struct pf_engine *engine, const struct pf_source *sources)
{
    engine->sources = calloc((size_t)engine->n_sources, sizeof *engine->sources);
    engine->jobs = calloc(engine->n_places, sizeof *engine->jobs);
    if (!engine->sources || !engine->jobs)
        return -1;
    for (int k = 0; k < engine->n_sources; k++) {
        struct source *const source = &engine->sources[k];
        const size_t n_parts = (size_t)sources[k].n_parts;
        struct pf_rows *const parts = calloc(n_parts + 1, sizeof *parts);
        if (!parts)
            return -1;
        memcpy(parts, sources[k].parts, n_parts * sizeof *parts);
        source->rows = sources[k];
        source->rows.parts = parts;
        const int64_t row_nbytes = sources[k].row_nbytes;
        const int64_t per_piece = row_nbytes ? PIECE_NBYTES / row_nbytes : INT64_MAX / 2;
        source->rows_per_piece = per_piece ? per_piece : 1;
        engine->may_fail |= parts->limit != NULL;
    }
    for (uint32_t i = 0; i < engine->n_places; i++) {
        struct job *job = &engine->jobs[i];
        job->outs = calloc((size_t)engine->n_sources, sizeof *job->outs);
        job->nbytes = calloc((size_t)engine->n_sources, sizeof *job->nbytes);
        if (!job->outs || !job->nbytes)
            return -1;
    }
    return 0;
}

struct pf_engine *pf_engine_open(int n_sources, const struct pf_source *sources, uint32_t n_places,
                                 uint32_t ring_at, int bypass)
{
    struct pf_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return NULL;
    engine->n_sources = n_sources;
    /* A power of two, so that the places follow each other when the job numbers wrap around. */
    for (engine->n_places = 1; engine->n_places < n_places;)
        engine->n_places *= 2;
    engine->ring_at = ring_at;
    engine->bypass = bypass;
    pthread_mutex_init(&engine->stopping, NULL);
    if (allocate(engine, sources)) {
        pf_engine_free(engine, 0);
        return NULL;
    }
    return engine;
}

int pf_engine_use_driver(struct pf_engine *engine, const struct pf_driver *driver, void *side,
                         uint32_t n_slots, char *const *staging, const struct pf_direct *direct)
{
    int error = 0;
    engine->slots = calloc(n_slots, sizeof *engine->slots);
    if (!engine->slots)
        return PF_OUT_OF_MEMORY;
    engine->driver = driver;
    engine->side = side;
    engine->n_slots = n_slots;
    engine->direct = direct;
    engine->n_devices = (size_t)engine->n_sources + (direct ? (size_t)direct->n_tables : 0);
    for (uint32_t i = 0; i < engine->n_places; i++) {
        engine->jobs[i].devices = calloc(engine->n_devices, sizeof(char *));
        if (!engine->jobs[i].devices)
            return PF_OUT_OF_MEMORY;
    }
    /* One thread sorts all row indices of a job. */
    for (int k = 0; k < engine->n_sources; k++)
        if (!engine->sources[k].rows.n_parts && direct->shift >= 0)
            engine->sources[k].rows_per_piece = INT64_MAX / 2;
    struct pf_scope scope = pf_enter(engine->driver);
    for (uint32_t i = 0; i < n_slots && !error; i++) {
        struct slot *slot = &engine->slots[i];
        slot->staging = staging[i];
        error = driver->create(&slot->released, PF_EVENT_FLAGS);
        if (!error)
            error = driver->create(&slot->copied, PF_EVENT_FLAGS);
    }
    pf_leave(engine->driver, &scope);
    return error;
}

int pf_start_thread(pthread_t *thread, void *(*work)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(thread, NULL, work, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void pf_engine_start(struct pf_engine *engine, int n_threads)
{
    if (n_threads > MOST_THREADS)
        n_threads = MOST_THREADS;
    pthread_mutex_lock(&engine->stopping);
    while (!atomic_load(&engine->is_stopped) && engine->n_threads < n_threads
           && !pf_start_thread(&engine->threads[engine->n_threads], work, engine))
        engine->n_threads++;
    pthread_mutex_unlock(&engine->stopping);
}

/* Prepares the copies of a job, whose place no thread uses. Returns whether its gate is closed. */
static int prepare_copies(struct pf_engine *engine, struct job *job, void *compute)
{
    const struct pf_driver *driver = engine->driver;
    const struct slot *slot = job->slot;
    job->n_sent = 0;
    for (uint32_t i = 0; i < job->n_pieces; i++)
        atomic_store_explicit(&job->done[i], 0, memory_order_relaxed);
    struct pf_scope scope = pf_enter(engine->driver);
    note(&job->error, driver->record(slot->released, compute));
    const int is_closed = driver->query(slot->copied) != 0;
    pf_leave(engine->driver, &scope);
    return is_closed;
}

int64_t pf_engine_submit(struct pf_engine *engine, const int64_t *rows, int64_t n, void *compute,
                         const int64_t *outs, char *const *devices)
{
    const uint32_t number = atomic_load(&engine->head);
    struct job *job = job_of(engine, number);
    if (engine->may_fail)
        pf_guard_arm();
    int64_t n_pieces = 0;
    for (int k = 0; k < engine->n_sources; k++)
        n_pieces += n_pieces_of(&engine->sources[k], n);
    if (engine->driver && n_pieces > job->n_done) {
        free(job->done);
        job->n_done = 0;
        job->done = malloc((size_t)n_pieces * sizeof *job->done);
        if (!job->done)
            return -1;
        job->n_done = (uint32_t)n_pieces;
    }
    job->rows = rows;
    job->n = n;
    job->n_pieces = (uint32_t)n_pieces;
    memcpy(job->outs, outs, (size_t)engine->n_sources * sizeof *outs);
    if (engine->driver) {
        job->slot = &engine->slots[engine->next_slot];
        engine->next_slot = (engine->next_slot + 1) % engine->n_slots;
        memcpy(job->devices, devices, (size_t)engine->n_devices * sizeof *devices);
    }
    for (int k = 0; k < engine->n_sources; k++)
        job->nbytes[k] = n * engine->sources[k].rows.row_nbytes;
    atomic_store(&job->unfinished, job->n_pieces);
    atomic_store(&job->failed, 0);
    atomic_store(&job->error, 0);
    atomic_store(&job->is_mixed, 0);
    const int is_closed = engine->driver && prepare_copies(engine, job, compute);
    atomic_store(&job->gate, is_closed && n_pieces ? CLOSED : OPEN); /* (a) */
    job->begin_s = job->end_s = pf_now_s();
    atomic_store(&job->state, n_pieces || engine->driver ? RUNNING : ENDED);
    if (n_pieces)
        atomic_fetch_add(&engine->n_untaken, 1);
    atomic_store(&job->ticket, (uint64_t)number << 32 | job->n_pieces);
    atomic_store(&engine->head, number + 1);
    if (atomic_load(&engine->n_untaken) >= (int32_t)engine->ring_at)
        ring(engine);
    return number;
}

static int wait_for(struct pf_engine *engine, uint32_t number)
{
    struct job *job = job_of(engine, number);
    for (int helped; (helped = help(engine, number));)
        if (helped < 0)
            return -1;
    if (engine->driver && !job->n_pieces)
        send_ready(engine);
    for (int i = 0; i < MOST_LOOKS && atomic_load(&job->state) != ENDED; i++)
        pause_briefly();
    uint32_t running = RUNNING;
    atomic_compare_exchange_strong(&job->state, &running, AWAITED);
    while (atomic_load(&job->state) != ENDED)
        if (pf_sleep_if(&job->state, AWAITED) && errno == EINTR)
            return -1;
    return 0;
}

int pf_engine_wait(struct pf_engine *engine, uint32_t number, void *compute,
                   struct pf_result *result)
{
    struct job *job = job_of(engine, number);
    struct pf_scope scope = pf_enter(engine->driver);
    if (wait_for(engine, number)) {
        pf_leave(engine->driver, &scope);
        return -1;
    }
    if (engine->driver) {
        const uint32_t last = (engine->next_slot + engine->n_slots - 1) % engine->n_slots;
        result->is_idle = engine->driver->query(engine->slots[last].released) != PF_NOT_READY;
        note(&job->error, engine->driver->wait(compute, job->slot->copied, 0)); /* (4) */
    }
    pf_leave(engine->driver, &scope);
    result->begin_s = job->begin_s;
    result->end_s = job->end_s;
    result->failed = atomic_load(&job->failed);
    result->error = atomic_load(&job->error);
    return 0;
}

int pf_engine_wait_again(const struct pf_engine *engine, uint32_t number, void *compute)
{
    const struct slot *slot = job_of(engine, number)->slot;
    struct pf_scope scope = pf_enter(engine->driver);
    const int error = engine->driver->wait(compute, slot->copied, 0); /* (4) */
    pf_leave(engine->driver, &scope);
    return error;
}

int pf_engine_help(struct pf_engine *engine, uint32_t number)
{
    struct pf_scope scope = pf_enter(engine->driver);
    const int helped = help(engine, number);
    pf_leave(engine->driver, &scope);
    return helped > 0;
}

void pf_engine_stop(struct pf_engine *engine)
{
    atomic_store(&engine->is_stopped, 1);
    atomic_fetch_add(&engine->bell, 1);
    pf_wake(&engine->bell, MOST_THREADS);
    pthread_mutex_lock(&engine->stopping);
    while (engine->n_threads)
        pthread_join(engine->threads[--engine->n_threads], NULL);
    pthread_mutex_unlock(&engine->stopping);
    void *last = NULL;
    struct pf_scope scope = pf_enter(engine->driver);
    if (engine->driver && !engine->driver->create(&last, PF_EVENT_FLAGS)) {
        engine->driver->record(last, engine->side);
        engine->driver->sync(last); /* (9) */
        engine->driver->destroy(last);
    }
    pf_leave(engine->driver, &scope);
}
