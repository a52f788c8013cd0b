/* The writer: takes the values of rows from a GPU back to their stores, for one loop.
 *
 * The loop makes one call for a batch. It copies the values on the GPU, because the program may
 * change them at once. A thread does the rest, without Python, in the order of the batches: it
 * copies the values to page-locked staging memory, and writes them from there to the stores. Rows
 * of page-locked stores may go to them from the GPU itself (see direct.c).
 *
 *     the thread of the loop              the writer's thread
 *
 *     write:  copy(values -> held, compute)
 *             ready = record(compute)
 *                                         begin:   wait(side, ready)                        (7)
 *                                                  copy(held -> staging, side)
 *                                                  write(held -> store, side)   direct route
 *                                                  arrived = record(side)
 *                                         arrive:  arrived.sync()                           (8)
 *                                         finish:  staging -> store
 *     stop:   joins the thread, which finishes all writes
 *
 * The numbers are those of the hazards in pinfeed/pipeline/transfer.py:
 *
 * (6) a scatter may still read staging memory; and rows that the GPU writes itself must not be
 *     written after a write that has failed
 * (7) the values may not be computed yet
 * (8) the values may not have arrived yet
 *
 * Two writes overlap: the next one begins before the rows of one are written to the stores, so its
 * copies run meanwhile. There are two staging memories, and (6) `begin` comes after `finish` of the
 * last write but one. If the GPU writes rows itself, it comes after `finish` of the last one.
 *
 * `stop` and `write` hold a lock when they note that the writer is stopped, or that there is one
 * more write. So each write is either finished or refused, whatever interrupts Python after the
 * call.
 *
 * Long writes are finished in pieces, which helping threads take as those of engine.c do. */
#define _GNU_SOURCE
#include "pinfeed.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_NBYTES (1 << 20)
#define MOST_HELPERS 3
/* Many rows are written past the caches if the store is larger than those. */
#define BYPASS_NBYTES (2 << 20)
#define UNCACHED_NBYTES (64 << 20)

struct write {
    const int64_t *rows;
    int64_t n;
    void *ready;
    int64_t *offsets; /* of each part in staging memory */
    char **devices;   /* where the values are held; NULL for a store that stays as it is */
};

struct pf_writer {
    struct pf_written written;
    const struct pf_driver *driver;
    void *side;
    const struct pf_direct *direct;
    int64_t n_parts;
    int64_t n_staged; /* number of first parts that go through staging memory */
    struct pf_store *stores;
    char *staging[2];
    void *arrived[2];
    uint32_t n_places;
    struct write *writes;
    uint32_t n_begun;
    uint32_t n_arrived;
    uint32_t n_finished;
    uint32_t first_failed; /* after an error: the first write that is left out */
    double begun_s[2];
    double last_s;            /* when the last write was finished */
    pthread_mutex_t lock;     /* see above; never held for long */
    pthread_mutex_t joining;  /* held while threads start or end */
    pthread_mutex_t stepping; /* held during a step without threads */
    _Atomic uint32_t is_stopped;
    _Atomic uint32_t bell; /* changes when there is a write, or when the writer is stopped */
    _Atomic int n_threads;
    pthread_t threads[1 + MOST_HELPERS];
    /* Pieces of the write that is being finished. */
    _Atomic uint64_t ticket; /* high half: number of the write; low half: pieces to take */
    _Atomic uint32_t unfinished;
    _Atomic uint32_t helpers_bell;
    uint32_t n_pieces;
};

static struct write *write_of(const struct pf_writer *writer, uint32_t number)
{
    return &writer->writes[number % writer->n_places];
}

/* Notes an error of the driver, after which a write and all later ones are left out. */
static void note(struct pf_writer *writer, uint32_t number, int error)
{
    if (!error)
        return;
    if (!atomic_load(&writer->written.error) || (int32_t)(number - writer->first_failed) < 0)
        writer->first_failed = number;
    int32_t none = 0;
    atomic_compare_exchange_strong(&writer->written.error, &none, error);
}

static int has_failed(const struct pf_writer *writer, uint32_t number)
{
    return atomic_load(&writer->written.error) && (int32_t)(number - writer->first_failed) >= 0;
}

/* ---- begin ----------------------------------------------------------------------------------- */

/* Queues copies of all values that are staged. Returns 0 or an error of the driver. */
static int stage(const struct pf_writer *writer, const struct write *write, char *staging)
{
    int error = 0;
    for (int64_t k = 0, end; k < writer->n_staged && !error; k = end) {
        end = k + 1;
        if (!write->devices[k])
            continue;
        /* Small parts lie next to each other on the GPU, too. */
        while (end < writer->n_staged && write->devices[end]
               && write->devices[end] - write->devices[k]
                      == write->offsets[end] - write->offsets[k])
            end++;
        const int64_t nbytes = write->offsets[end - 1] - write->offsets[k]
                               + write->n * writer->stores[end - 1].row_nbytes;
        if (nbytes)
            error = writer->driver->copy(staging + write->offsets[k], write->devices[k],
                                         (size_t)nbytes, writer->side);
    }
    return error;
}

/* Queues the writes of the GPU itself. Returns 0 or an error of the driver. */
static int write_directly(const struct pf_writer *writer, const struct write *write, char *staging)
{
    const struct pf_direct *const direct = writer->direct;
    char *const indices = staging + write->offsets[direct->part];
    const int64_t nbytes = write->n * direct->index_nbytes;
    int64_t start = write->rows[0];
    int error = 0;
    if (!pf_stage_indices(direct, write->rows, 0, write->n, indices)) {
        start = -1;
        error = writer->driver->copy(write->devices[direct->part], indices, (size_t)nbytes,
                                     writer->side);
    }
    return error ? error
                 : pf_move_rows(writer->driver, writer->side, direct, PF_TO_TABLES, start,
                                write->n, write->devices);
}

static void begin(struct pf_writer *writer)
{
    const uint32_t number = writer->n_begun, k = number % 2;
    const struct write *const write = write_of(writer, number);
    writer->begun_s[k] = pf_now_s();
    if (!has_failed(writer, number)) {
        int error = writer->driver->wait(writer->side, write->ready, 0); /* (7) */
        if (!error)
            error = stage(writer, write, writer->staging[k]);
        if (!error && writer->direct)
            error = write_directly(writer, write, writer->staging[k]);
        note(writer, number, error);
        /* After an error, too, copies may use the memory of the write until this has passed. */
        note(writer, number, writer->driver->record(writer->arrived[k], writer->side));
    }
    writer->n_begun++;
}

/* ---- finish ---------------------------------------------------------------------------------- */

static int64_t rows_per_piece(const struct pf_writer *writer, int64_t k)
{
    const int64_t nbytes = writer->stores[k].row_nbytes;
    const int64_t n = nbytes ? PIECE_NBYTES / nbytes : INT64_MAX / 2;
    return n ? n : 1;
}

static int64_t n_pieces_of(const struct pf_writer *writer, const struct write *write, int64_t k)
{
    const int64_t step = rows_per_piece(writer, k);
    return write->devices[k] ? (write->n + step - 1) / step : 0;
}

static void finish_piece(const struct pf_writer *writer, uint32_t number, int64_t piece)
{
    const struct write *const write = write_of(writer, number);
    int64_t k = 0;
    for (int64_t n; piece >= (n = n_pieces_of(writer, write, k)); k++)
        piece -= n;
    const int64_t step = rows_per_piece(writer, k), first = piece * step;
    const int64_t end = first + step < write->n ? first + step : write->n;
    const int64_t row_nbytes = writer->stores[k].row_nbytes;
    const struct pf_rows *const rows = &writer->stores[k].rows;
    const struct pf_rows values = {.base = writer->staging[number % 2] + write->offsets[k],
                                   .n = write->n,
                                   .stride = row_nbytes};
    const int bypass =
        write->n * row_nbytes >= BYPASS_NBYTES && rows->n * rows->stride >= UNCACHED_NBYTES;
    pf_copy(&values, NULL, 0, rows, write->rows, row_nbytes, first, end, bypass);
}

/* Takes a piece and finishes it. Returns whether there was one. */
static int help(struct pf_writer *writer)
{
    uint64_t ticket = atomic_load(&writer->ticket);
    do {
        if (!(uint32_t)ticket)
            return 0;
    } while (!atomic_compare_exchange_weak(&writer->ticket, &ticket, ticket - 1));
    /* The write is not finished before this piece is, so its fields are valid now. */
    finish_piece(writer, (uint32_t)(ticket >> 32), writer->n_pieces - (uint32_t)ticket);
    if (atomic_fetch_sub(&writer->unfinished, 1) == 1 && atomic_load(&writer->n_threads) > 1)
        pf_wake(&writer->unfinished, 1);
    return 1;
}

static void finish(struct pf_writer *writer)
{
    const uint32_t number = writer->n_finished;
    const struct write *const write = write_of(writer, number);
    int64_t n_pieces = 0;
    for (int64_t k = 0; k < writer->n_staged && !has_failed(writer, number); k++)
        n_pieces += n_pieces_of(writer, write, k);
    writer->n_pieces = (uint32_t)n_pieces;
    atomic_store(&writer->unfinished, (uint32_t)n_pieces);
    atomic_store(&writer->ticket, (uint64_t)number << 32 | (uint64_t)n_pieces);
    if (n_pieces > 1 && atomic_load(&writer->n_threads) > 1) {
        atomic_fetch_add(&writer->helpers_bell, 1);
        pf_wake(&writer->helpers_bell, MOST_HELPERS);
    }
    while (help(writer)) {
    }
    for (uint32_t left; (left = atomic_load(&writer->unfinished));)
        pf_sleep_if(&writer->unfinished, left);
    if (!has_failed(writer, number)) {
        /* The time in which two writes overlap counts only once. */
        const double now_s = pf_now_s(), begun_s = writer->begun_s[number % 2];
        writer->written.seconds += now_s - (begun_s > writer->last_s ? begun_s : writer->last_s);
        writer->last_s = now_s;
    }
    atomic_store(&writer->written.n_done, ++writer->n_finished);
    pf_wake(&writer->written.n_done, INT_MAX);
}

/* ---- steps and threads ----------------------------------------------------------------------- */

/* Makes the next step. Returns whether there was one. */
static int step(struct pf_writer *writer)
{
    const uint32_t most = writer->direct ? 1 : 2; /* (6) */
    if (writer->n_begun != atomic_load(&writer->written.n_queued)
        && writer->n_begun - writer->n_finished < most) {
        begin(writer);
    } else if (writer->n_arrived != writer->n_finished) {
        finish(writer);
    } else if (writer->n_arrived != writer->n_begun) {
        void *const arrived = writer->arrived[writer->n_arrived % 2];
        note(writer, writer->n_arrived, writer->driver->sync(arrived)); /* (8) */
        writer->n_arrived++;
    } else {
        return 0;
    }
    return 1;
}

static void *work(void *argument)
{
    struct pf_writer *const writer = argument;
    pf_enter(writer->driver);
    for (;;) {
        /* The thread sleeps only if there was nothing new since it has looked. */
        const uint32_t bell = atomic_load(&writer->bell);
        while (step(writer)) {
        }
        if (atomic_load(&writer->is_stopped))
            return NULL;
        pf_sleep_if(&writer->bell, bell);
    }
}

static void *work_as_helper(void *argument)
{
    struct pf_writer *const writer = argument;
    for (;;) {
        const uint32_t bell = atomic_load(&writer->helpers_bell);
        if (atomic_load(&writer->is_stopped))
            return NULL;
        while (help(writer)) {
        }
        pf_sleep_if(&writer->helpers_bell, bell);
    }
}

/* ---- what the loop calls --------------------------------------------------------------------- */

void pf_writer_free(struct pf_writer *writer, int is_forked)
{
    struct pf_scope scope = pf_enter(is_forked ? NULL : writer->driver);
    for (uint32_t i = 0; writer->writes && i < writer->n_places; i++) {
        if (!is_forked && writer->writes[i].ready)
            writer->driver->destroy(writer->writes[i].ready);
        free(writer->writes[i].offsets);
        free(writer->writes[i].devices);
    }
    for (int k = 0; k < 2; k++)
        if (!is_forked && writer->arrived[k])
            writer->driver->destroy(writer->arrived[k]);
    pf_leave(is_forked ? NULL : writer->driver, &scope);
    free(writer->writes);
    free(writer->stores);
    free(writer);
}

static int allocate(struct pf_writer *writer, const struct pf_store *stores)
{
    writer->stores = calloc((size_t)writer->n_parts, sizeof *stores);
    writer->writes = calloc(writer->n_places, sizeof *writer->writes);
    if (!writer->stores || !writer->writes)
        return PF_OUT_OF_MEMORY;
    memcpy(writer->stores, stores, (size_t)writer->n_parts * sizeof *stores);
    int error = 0;
    for (uint32_t i = 0; i < writer->n_places && !error; i++) {
        struct write *const write = &writer->writes[i];
        write->offsets = calloc((size_t)writer->n_parts, sizeof *write->offsets);
        write->devices = calloc((size_t)writer->n_parts, sizeof *write->devices);
        error = write->offsets && write->devices
                    ? writer->driver->create(&write->ready, PF_EVENT_FLAGS)
                    : PF_OUT_OF_MEMORY;
    }
    for (int k = 0; k < 2 && !error; k++)
        error = writer->driver->create(&writer->arrived[k], PF_EVENT_FLAGS);
    return error;
}

int pf_writer_open(struct pf_writer **opened, const struct pf_driver *driver, void *side,
                   char *const *staging, uint32_t n_places, int64_t n_parts, int64_t n_staged,
                   const struct pf_store *stores, const struct pf_direct *direct)
{
    struct pf_writer *const writer = calloc(1, sizeof *writer);
    if (!writer)
        return PF_OUT_OF_MEMORY;
    writer->driver = driver;
    writer->side = side;
    writer->staging[0] = staging[0];
    writer->staging[1] = staging[1];
    /* A power of two, so that the places follow each other when the numbers wrap around. */
    for (writer->n_places = 1; writer->n_places < n_places;)
        writer->n_places *= 2;
    writer->n_parts = n_parts;
    writer->n_staged = n_staged;
    writer->direct = direct;
    pthread_mutex_init(&writer->lock, NULL);
    pthread_mutex_init(&writer->joining, NULL);
    pthread_mutex_init(&writer->stepping, NULL);
    struct pf_scope scope = pf_enter(driver);
    const int error = allocate(writer, stores);
    pf_leave(driver, &scope);
    if (error)
        pf_writer_free(writer, 0);
    else
        *opened = writer;
    return error;
}

void pf_writer_start(struct pf_writer *writer, int n_helpers)
{
    const int n_threads = 1 + (n_helpers < MOST_HELPERS ? n_helpers : MOST_HELPERS);
    pthread_mutex_lock(&writer->joining);
    for (int i = 0; i < n_threads && !atomic_load(&writer->is_stopped); i++) {
        if (pf_start_thread(&writer->threads[i], i ? work_as_helper : work, writer))
            break;
        atomic_store(&writer->n_threads, i + 1);
    }
    pthread_mutex_unlock(&writer->joining);
}

int pf_writer_write(struct pf_writer *writer, void *compute, const int64_t *rows, int64_t n,
                    const int64_t *offsets, char *const *values, char *const *devices)
{
    const struct pf_driver *const driver = writer->driver;
    struct write *const write = write_of(writer, atomic_load(&writer->written.n_queued));
    write->rows = rows;
    write->n = n;
    memcpy(write->offsets, offsets, (size_t)writer->n_parts * sizeof *offsets);
    struct pf_scope scope = pf_enter(driver);
    int error = 0;
    const int64_t indices = writer->direct ? writer->direct->part : -1;
    for (int64_t k = 0; k < writer->n_parts && !error; k++) {
        write->devices[k] = values[k] || k == indices ? devices[k] : NULL;
        const int64_t nbytes = n * writer->stores[k].row_nbytes;
        if (values[k] && values[k] != devices[k] && nbytes)
            error = driver->copy(devices[k], values[k], (size_t)nbytes, compute);
    }
    if (!error)
        error = driver->record(write->ready, compute);
    pf_leave(driver, &scope);
    if (error)
        return error;
    pthread_mutex_lock(&writer->lock);
    const int is_stopped = (int)atomic_load(&writer->is_stopped);
    if (!is_stopped)
        atomic_fetch_add(&writer->written.n_queued, 1);
    pthread_mutex_unlock(&writer->lock);
    atomic_fetch_add(&writer->bell, 1);
    pf_wake(&writer->bell, 1);
    return is_stopped ? PF_STOPPED : 0;
}

int pf_writer_step(struct pf_writer *writer)
{
    struct pf_scope scope = pf_enter(writer->driver);
    pthread_mutex_lock(&writer->stepping);
    const int has_step = step(writer);
    pthread_mutex_unlock(&writer->stepping);
    pf_leave(writer->driver, &scope);
    return has_step;
}

int pf_writer_wait(struct pf_writer *writer, uint32_t number)
{
    for (uint32_t n_done; (int32_t)((n_done = atomic_load(&writer->written.n_done)) - number) <= 0;)
        if (!atomic_load(&writer->n_threads))
            pf_writer_step(writer);
        else if (pf_sleep_if(&writer->written.n_done, n_done) && errno == EINTR)
            return -1;
    return 0;
}

int pf_writer_is_computed(const struct pf_writer *writer)
{
    const uint32_t number = atomic_load(&writer->written.n_queued) - 1;
    struct pf_scope scope = pf_enter(writer->driver);
    const int found = writer->driver->query(write_of(writer, number)->ready) != PF_NOT_READY;
    pf_leave(writer->driver, &scope);
    return found;
}

void pf_writer_stop(struct pf_writer *writer)
{
    pthread_mutex_lock(&writer->lock);
    atomic_store(&writer->is_stopped, 1);
    pthread_mutex_unlock(&writer->lock);
    pthread_mutex_lock(&writer->joining);
    atomic_fetch_add(&writer->bell, 1);
    atomic_fetch_add(&writer->helpers_bell, 1);
    pf_wake(&writer->bell, 1);
    pf_wake(&writer->helpers_bell, MOST_HELPERS);
    for (int i = 0; i < atomic_load(&writer->n_threads); i++)
        pthread_join(writer->threads[i], NULL);
    atomic_store(&writer->n_threads, 0);
    pthread_mutex_unlock(&writer->joining);
    while (pf_writer_step(writer)) {
    }
}
