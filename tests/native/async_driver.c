/* A simulated driver of a GPU. One thread does the work of all streams, late: it chooses at random
 * which stream does its next piece of work, sometimes sleeps first, and lets streams fall behind.
 *
 * A wait refers to the last record of its event before the call, as with a real driver. Copies move
 * their bytes when the stream reaches them.
 *
 * ThreadSanitizer must not see the lock of this file, which would order all threads that call the
 * driver. It sees only what a real driver promises: work happens after the call that queues it, and
 * before a query or a sync of a later record returns 0. */
#define _GNU_SOURCE
#include "async_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum kind { COPY, WAIT, RECORD, MOVE };

/* Work of a stream. Records live until the driver stops, because events and waits refer to them. */
struct work {
    enum kind kind;
    int is_done;
    struct work *record; /* for which to wait; NULL for none */
    struct work *next;   /* in the stream */
    struct work *older;  /* of all work */
    char *to;
    const char *from;
    size_t nbytes;
    void *kernel;
    struct pf_moves moves;
};

struct stream {
    struct work *first;
    struct work *last;
    struct stream *older;
};

struct event {
    struct work *record; /* NULL before the first one */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t thread;
static struct stream *streams;
static struct work *all_work;
static uint32_t seed;
static struct stream *stalled;
static int n_waiting, is_ending, failure;

#define WEAK __attribute__((weak))
WEAK void AnnotateIgnoreSyncBegin(const char *file, int line);
WEAK void AnnotateIgnoreSyncEnd(const char *file, int line);
WEAK void AnnotateIgnoreReadsBegin(const char *file, int line);
WEAK void AnnotateIgnoreReadsEnd(const char *file, int line);
WEAK void AnnotateIgnoreWritesBegin(const char *file, int line);
WEAK void AnnotateIgnoreWritesEnd(const char *file, int line);
WEAK void __tsan_acquire(void *address);
WEAK void __tsan_release(void *address);

static void lock(void)
{
    if (AnnotateIgnoreSyncBegin) {
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    pthread_mutex_lock(&mutex);
}

static void unlock(void)
{
    pthread_mutex_unlock(&mutex);
    if (AnnotateIgnoreSyncBegin) {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
}

static void acquire(void *address)
{
    if (__tsan_acquire)
        __tsan_acquire(address);
}

static void release(void *address)
{
    if (__tsan_release)
        __tsan_release(address);
}

static uint32_t random_below(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

static int may_run(const struct stream *stream)
{
    const struct work *work = stream->first;
    return work && !(work->record && !work->record->is_done);
}

/* Returns a stream that can do its next work, or NULL. For a while, one stream does nothing unless
 * a thread waits and no other stream can do anything. */
static struct stream *choose(void)
{
    struct stream *chosen = NULL;
    uint32_t n = 0;
    if (!random_below(20)) {
        stalled = NULL;
        for (struct stream *stream = streams; stream; stream = stream->older)
            if (!random_below(++n))
                stalled = stream;
    }
    n = 0;
    for (struct stream *stream = streams; stream; stream = stream->older)
        if (stream != stalled && may_run(stream) && !random_below(++n))
            chosen = stream;
    if (!chosen && stalled && may_run(stalled) && (n_waiting || is_ending))
        chosen = stalled;
    return chosen;
}

/* Moves rows as the kernels do (pinfeed/devices/kernels.py). */
static void move_rows(const void *kernel, const struct pf_moves *moves)
{
    for (uint32_t t = 0; t < moves->n_tables; t++) {
        const size_t nbytes = moves->tables[t].row_nbytes;
        for (uint32_t i = 0; i < moves->n_rows; i++) {
            struct pf_pair pair = {0, (int32_t)i};
            if (kernel == async_kernel(ASYNC_PAIRED))
                pair = ((const struct pf_pair *)moves->indices)[i];
            else
                pair.row = ((const int32_t *)moves->indices)[i];
            char *const packed = moves->tables[t].packed + (size_t)pair.place * nbytes;
            char *const row = moves->tables[t].rows + (size_t)pair.row * nbytes;
            const int is_write = kernel == async_kernel(ASYNC_SCATTER);
            memcpy(is_write ? row : packed, is_write ? packed : row, nbytes);
        }
    }
}

static void *run(void *unused)
{
    lock();
    for (;;) {
        struct stream *const stream = choose();
        if (!stream && is_ending)
            break;
        if (!stream) {
            pthread_cond_wait(&changed, &mutex);
            continue;
        }
        const int naps = !is_ending && !random_below(4);
        const struct timespec nap = {0, naps ? (long)random_below(300) * 1000 : 0};
        struct work *const work = stream->first;
        unlock();
        if (naps)
            nanosleep(&nap, NULL);
        acquire(work);
        if (work->kind == COPY)
            memcpy(work->to, work->from, work->nbytes);
        if (work->kind == MOVE)
            move_rows(work->kernel, &work->moves);
        release(work);
        lock();
        work->is_done = 1;
        stream->first = work->next;
        if (!stream->first)
            stream->last = NULL;
        pthread_cond_broadcast(&changed);
    }
    unlock();
    return unused;
}

/* Queues work of a stream, and lets an event refer to it. */
static int queue(struct stream *stream, struct event *event, struct work wanted)
{
    struct work *const work = malloc(sizeof *work);
    release(work);
    lock();
    const int error = failure;
    if (error) {
        unlock();
        free(work);
        return error;
    }
    if (wanted.kind == WAIT)
        wanted.record = event->record;
    *work = wanted;
    work->older = all_work;
    all_work = work;
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    if (wanted.kind == RECORD)
        event->record = work;
    pthread_cond_broadcast(&changed);
    unlock();
    return 0;
}

static int push(void *context)
{
    return context != NULL;
}

static int pop(void **context)
{
    *context = NULL;
    return 0;
}

static int exchange_capture_mode(int *mode)
{
    return *mode < 0 || *mode > PF_CAPTURE_RELAXED;
}

static int create(void **event, unsigned flags)
{
    *event = calloc(1, sizeof(struct event));
    return !*event || flags != PF_EVENT_FLAGS;
}

static int destroy(void *event)
{
    free(event);
    return 0;
}

static int record(void *event, void *stream)
{
    return queue(stream, event, (struct work){.kind = RECORD});
}

static int wait(void *stream, void *event, unsigned flags)
{
    return queue(stream, event, (struct work){.kind = WAIT}) | (int)flags;
}

static int copy(void *to, const void *from, size_t nbytes, void *stream)
{
    return queue(stream, NULL,
                 (struct work){.kind = COPY, .to = to, .from = from, .nbytes = nbytes});
}

static int launch(void *kernel, unsigned n_blocks, unsigned n_y, unsigned n_z, unsigned n_threads,
                  unsigned t_y, unsigned t_z, unsigned shared, void *stream, void **arguments,
                  void **extra)
{
    struct work work = {.kind = MOVE, .kernel = kernel};
    memcpy(&work.moves, arguments[0], sizeof work.moves);
    const int is_right = n_blocks && n_y == 1 && n_z == 1 && n_threads && t_y == 1 && t_z == 1;
    return is_right && !shared && !extra ? queue(stream, NULL, work) : 1;
}

void *async_kernel(int kind)
{
    static char kernels[3];
    return &kernels[kind];
}

/* Returns whether the last record of an event has passed; waits for it if `sleeps`. */
static int look(void *event, int sleeps)
{
    lock();
    struct work *const last = ((struct event *)event)->record;
    n_waiting += sleeps;
    pthread_cond_broadcast(&changed);
    while (sleeps && last && !last->is_done)
        pthread_cond_wait(&changed, &mutex);
    n_waiting -= sleeps;
    const int is_done = !last || last->is_done, error = failure;
    unlock();
    if (is_done && last)
        acquire(last);
    return error ? error : is_done ? 0 : PF_NOT_READY;
}

static int query(void *event)
{
    return look(event, 0);
}

static int sync(void *event)
{
    return look(event, 1);
}

void async_start(uint32_t new_seed)
{
    seed = new_seed;
    is_ending = failure = 0;
    if (pthread_create(&thread, NULL, run, NULL))
        abort();
}

void async_stop(void)
{
    lock();
    is_ending = 1;
    pthread_cond_broadcast(&changed);
    unlock();
    pthread_join(thread, NULL);
    for (struct work *work = all_work, *older; work; work = older) {
        older = work->older;
        free(work);
    }
    for (struct stream *stream = streams, *older; stream; stream = older) {
        older = stream->older;
        free(stream);
    }
    all_work = NULL;
    streams = stalled = NULL;
}

void *async_stream(void)
{
    struct stream *const stream = calloc(1, sizeof *stream);
    lock();
    stream->older = streams;
    streams = stream;
    unlock();
    return stream;
}

void async_fail(int error)
{
    lock();
    failure = error;
    unlock();
}

const struct pf_driver async_driver = {
    NULL,   push, pop,   exchange_capture_mode, create, destroy,
    record, wait, query, sync,                  copy,   launch,
};
