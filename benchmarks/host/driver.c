/* A driver of a GPU that does not exist, for measurements of the host's work.
 *
 * A call occupies its thread for the time of a real driver's call. A copy is done when a link would
 * have moved its bytes, after the earlier work of its stream. So waits take as long as with such a
 * link. Bytes move only after sim_move(1), at once, so that results can be compared. */
#define _GNU_SOURCE
#include "../../pinfeed/native/pinfeed.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Nanoseconds of the host in a call. They were chosen to repeat the gaps between batches that were
 * measured on the host of one NVIDIA H200; `benchmarks.gpu --parts prices` measures single calls. */
enum {
    COPY = 4000,
    LAUNCH = 3000,
    RECORD = 800,
    WAIT = 800,
    QUERY = 700,
    SYNC = 1000,
    CREATE = 2400,
    DESTROY = 2600
};

/* The link: nanoseconds of a copy without bytes, and bytes in a nanosecond (GB/s). */
enum { LINK_LATENCY = 1500, LINK_RATE = 55 };

/* When a stream has done its work so far, or has passed an event. NULL is the default stream. */
struct moment {
    _Atomic int64_t ns;
};

static struct moment default_stream;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int moves;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void occupy(int64_t ns)
{
    const int64_t end = now_ns() + ns;
    while (now_ns() < end) {
    }
}

static struct moment *of(void *stream) { return stream ? stream : &default_stream; }

/* Adds work to a stream that begins at `earliest` or after the stream's earlier work. */
static int add(void *stream, int64_t earliest, int64_t ns)
{
    pthread_mutex_lock(&lock);
    const int64_t done = of(stream)->ns;
    of(stream)->ns = (done > earliest ? done : earliest) + ns;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int push(void *context) { return context != NULL; }

static int pop(void **context)
{
    *context = NULL;
    return 0;
}

static int exchange_capture_mode(int *mode) { return *mode != PF_CAPTURE_RELAXED; }

int sim_create(void **event, unsigned flags)
{
    (void)flags;
    occupy(CREATE);
    *event = calloc(1, sizeof(struct moment));
    return *event == NULL;
}

int sim_destroy(void *event)
{
    occupy(DESTROY);
    free(event);
    return 0;
}

int sim_record(void *event, void *stream)
{
    occupy(RECORD);
    ((struct moment *)event)->ns = of(stream)->ns;
    return 0;
}

int sim_wait(void *stream, void *event, unsigned flags)
{
    (void)flags;
    occupy(WAIT);
    return add(stream, ((struct moment *)event)->ns, 0);
}

int sim_query(void *event)
{
    occupy(QUERY);
    return ((struct moment *)event)->ns > now_ns() ? PF_NOT_READY : 0;
}

int sim_sync(void *event)
{
    occupy(SYNC);
    const int64_t ns = ((struct moment *)event)->ns;
    const struct timespec end = {ns / 1000000000, ns % 1000000000};
    while (now_ns() < ns)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
    return 0;
}

int sim_copy(void *to, const void *from, size_t nbytes, void *stream)
{
    occupy(COPY);
    if (moves)
        memcpy(to, from, nbytes);
    return add(stream, now_ns(), LINK_LATENCY + (int64_t)nbytes / LINK_RATE);
}

/* Handles of kernels; those of rows have the form of the row indices in addition. */
enum { GATHER = 1, SCATTER, COPY_ROWS, KIND = 3, INT64 = 4, PAIR = 8 };

/* Moves rows, as the kernels do (pinfeed/devices/kernels.py). */
static int64_t move_rows(const struct pf_moves *all, int kernel)
{
    const int is_write = (kernel & KIND) == SCATTER;
    const int64_t *const wide = all->indices;
    const struct pf_pair *const pairs = all->indices;
    const int32_t *const rows = all->indices;
    int64_t nbytes = 0;
    for (uint32_t t = 0; t < all->n_tables; t++) {
        const size_t row_nbytes = all->tables[t].row_nbytes;
        nbytes += (int64_t)(all->n_rows * row_nbytes);
        for (uint32_t i = 0; moves && i < all->n_rows; i++) {
            const int64_t at = kernel & INT64 ? wide[i] : kernel & PAIR ? pairs[i].row : rows[i];
            const uint32_t place = kernel & PAIR ? (uint32_t)pairs[i].place : i;
            char *const packed = all->tables[t].packed + place * row_nbytes;
            char *const row = all->tables[t].rows + (size_t)at * row_nbytes;
            memcpy(is_write ? row : packed, is_write ? packed : row, row_nbytes);
        }
    }
    return nbytes;
}

/* The argument of the kernel that copies rows on the GPU (pinfeed/devices/row_copies.py). */
struct row_copy {
    const char *source;
    char *target;
    const int32_t *taken;
    const int32_t *into;
    uint32_t n_rows, n_words, width, n_lanes;
};

static void copy_rows(const struct row_copy *copy)
{
    const size_t row_nbytes = (size_t)copy->n_words * copy->width;
    for (uint32_t i = 0; moves && i < copy->n_rows; i++)
        memcpy(copy->target + (size_t)(copy->into ? copy->into[i] : (int32_t)i) * row_nbytes,
               copy->source + (size_t)(copy->taken ? copy->taken[i] : (int32_t)i) * row_nbytes,
               row_nbytes);
}

int sim_launch(void *kernel, unsigned n_blocks, unsigned n_y, unsigned n_z, unsigned n_threads,
               unsigned t_y, unsigned t_z, unsigned shared, void *stream, void **arguments,
               void **extra)
{
    (void)n_blocks, (void)n_z, (void)n_threads, (void)t_y, (void)t_z, (void)shared, (void)extra;
    int64_t nbytes = 0;
    occupy(LAUNCH);
    if ((intptr_t)kernel == COPY_ROWS)
        for (unsigned i = 0; i < n_y; i++)
            copy_rows((const struct row_copy *)arguments[0] + i);
    else
        nbytes = move_rows(arguments[0], (int)(intptr_t)kernel);
    return add(stream, now_ns(), LINK_LATENCY + nbytes / LINK_RATE);
}

void *sim_stream(void) { return calloc(1, sizeof(struct moment)); }
void sim_move(int on) { moves = on; }

const struct pf_driver sim_driver = {
    NULL,       push,     pop,       exchange_capture_mode, sim_create, sim_destroy,
    sim_record, sim_wait, sim_query, sim_sync,              sim_copy,   sim_launch,
};
