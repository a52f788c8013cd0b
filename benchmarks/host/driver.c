/* A driver of a GPU that does not exist, with the host's time of each call.
 *
 * A call occupies its thread for as long as the call of a real driver does. A copy is done when a
 * link would have moved its bytes, after the earlier work of its stream, and events are passed in
 * the order of the stream. So every wait takes as long as it would with this link. Bytes move only
 * if `move` is 1, at once, which lets results be compared. The stream NULL is the default one. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* As in pinfeed/native/pinfeed.h. */
struct pf_driver {
    void *context;
    int (*attach)(void *context);
    int (*create)(void **event);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event);
    int (*query)(void *event);
    int (*sync)(void *event);
    int (*copy)(void *to, const void *from, size_t nbytes, void *stream);
};

/* Nanoseconds of the thread in a call. With these, pinfeed's loops take about the times that they took
 * on the host of one NVIDIA H200 (docs/benchmarks.md); `benchmarks.gpu --parts prices` measures them. */
enum {
    COPY = 4000,
    RECORD = 800,
    WAIT = 800,
    QUERY = 700,
    SYNC = 1000,
    LAUNCH = 3000,
    CREATE = 2400,
    DESTROY = 2600,
};

/* The link: bytes per nanosecond (GB/s), and nanoseconds of each copy. */
static const double LINK_RATE = 55;
enum { LINK_LATENCY = 1500 };

enum { NOT_YET = 600 /* cudaErrorNotReady */ };

/* A stream, or an event: when it has done its work so far. */
struct timeline {
    int64_t done_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct timeline default_stream;
static int moves;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Occupies the thread. */
static void spend(int64_t ns)
{
    const int64_t end = now_ns() + ns;
    while (now_ns() < end) {
    }
}

/* Adds work to a stream, which begins after `earliest_ns` and after the stream's earlier work. */
static void extend(void *stream, int64_t earliest_ns, int64_t ns)
{
    struct timeline *line = stream ? stream : &default_stream;
    pthread_mutex_lock(&lock);
    line->done_ns = (line->done_ns > earliest_ns ? line->done_ns : earliest_ns) + ns;
    pthread_mutex_unlock(&lock);
}

static int64_t done_ns(void *stream_or_event)
{
    struct timeline *line = stream_or_event ? stream_or_event : &default_stream;
    pthread_mutex_lock(&lock);
    const int64_t ns = line->done_ns;
    pthread_mutex_unlock(&lock);
    return ns;
}

void sim_move(int move) { moves = move; }

/* Streams live as long as the process. */
void *sim_stream(void) { return calloc(1, sizeof(struct timeline)); }

static int attach(void *context)
{
    (void)context;
    return 0;
}

int sim_create(void **event)
{
    spend(CREATE);
    *event = calloc(1, sizeof(struct timeline));
    return *event ? 0 : 2;
}

int sim_destroy(void *event)
{
    spend(DESTROY);
    free(event);
    return 0;
}

int sim_record(void *event, void *stream)
{
    spend(RECORD);
    const int64_t ns = done_ns(stream);
    pthread_mutex_lock(&lock);
    ((struct timeline *)event)->done_ns = ns;
    pthread_mutex_unlock(&lock);
    return 0;
}

int sim_wait(void *stream, void *event)
{
    spend(WAIT);
    extend(stream, done_ns(event), 0);
    return 0;
}

int sim_query(void *event)
{
    spend(QUERY);
    return done_ns(event) > now_ns() ? NOT_YET : 0;
}

int sim_sync(void *event)
{
    spend(SYNC);
    const int64_t ns = done_ns(event);
    const struct timespec until = {ns / 1000000000, ns % 1000000000};
    while (now_ns() < ns)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    return 0;
}

int sim_copy(void *to, const void *from, size_t nbytes, void *stream)
{
    spend(COPY);
    if (moves)
        memcpy(to, from, nbytes);
    extend(stream, now_ns(), LINK_LATENCY + (int64_t)((double)nbytes / LINK_RATE));
    return 0;
}

/* A kernel, whose own time is not simulated. */
void sim_launch(void) { spend(LAUNCH); }

const struct pf_driver sim_driver = {
    NULL, attach, sim_create, sim_destroy, sim_record, sim_wait, sim_query, sim_sync, sim_copy,
};
