/* A crew: threads that copy the rows of the next batches, for one loop.
 *
 * The loop submits a job for each batch, or for several short ones: the indices of the rows, and
 * where the rows of each source go. A job is divided into pieces of about 128 KiB, so that all
 * threads can copy one batch. The threads take pieces of the oldest job first. When the loop needs
 * a batch, it takes pieces of that job, too, instead of sleeping until a thread wakes up.
 *
 * States of a job, which is in a place of a ring that later jobs use again:
 *
 *   submitted   `ticket` has the job's number and the pieces that no thread has taken
 *   taken       the ticket has no pieces left
 *   ended       `unfinished` is 0 and `state` is ENDED; only now does the loop read the rows, and
 *               only when the loop has seen this may it submit another job in the same place
 *
 * Hazards:
 *
 * (1) A slow thread looks for pieces of a job that has ended, while the place already belongs to
 *     another job. The ticket contains the number of the job, and a piece is taken by comparing
 *     and exchanging the whole ticket. So a thread reads the other fields only after it has taken
 *     a piece, and the job cannot end before this piece has.
 * (2) A thread goes to sleep while the loop submits a job. It reads `bell` before it looks for
 *     jobs, and counts itself in `n_asleep`; then it sleeps only if `bell` has not changed. The
 *     loop submits first, then rings, and then looks whether threads sleep.
 * (3) The loop goes to sleep while the last piece ends. It announces that in `state` by comparing
 *     and exchanging, which fails if the job has ended.
 * (4) Another thread stops the crew while the loop waits. A thread ends every piece that it has
 *     taken, and the loop takes all others, so the job ends all the same. A thread that goes to
 *     sleep reads `is_stopped` after `bell`, which the other thread changes last.
 * (5) A thread takes the last piece of a job that the loop has not counted yet. The loop counts a
 *     job in `n_untaken` before it writes the ticket, so it never counts too few.
 *
 * tests/native/test_crew_model.py checks these for every order of the steps.
 *
 * The loop's thread submits and waits. It keeps the memory of each job alive until it has waited
 * for the job, or has stopped the crew. */
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

struct job {
    _Atomic uint64_t ticket; /* high half: number of the job; low half: pieces to take */
    _Atomic uint32_t unfinished;
    _Atomic uint32_t state;
    _Atomic int32_t failed; /* 1 + the number of a source that could not be read; 0 for none */
    uint32_t n_pieces;
    const int64_t *rows;
    int64_t first;
    int64_t n;
    double begin_s;
    double end_s;
    char **outs; /* where the rows of each source go */
};

struct source {
    struct pf_source rows;
    int64_t rows_per_piece;
};

struct pf_crew {
    int n_sources;
    int n_threads;
    int bypass;
    int may_fail; /* whether a source has mapped files */
    uint32_t n_places;
    uint32_t ring_at; /* jobs with pieces to take at which a sleeping thread is woken */
    struct source *sources;
    struct job *jobs;
    _Atomic uint32_t head;     /* number of submitted jobs */
    _Atomic int32_t n_untaken; /* jobs with pieces to take */
    _Atomic uint32_t bell;
    _Atomic uint32_t n_asleep;
    _Atomic uint32_t is_stopped;
    pthread_mutex_t stopping; /* held while n_threads changes */
    pthread_t threads[MOST_THREADS];
};

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static long sleep_if(_Atomic uint32_t *word, uint32_t value)
{
    return syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int n)
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

static int64_t n_pieces_of(const struct source *source, int64_t n)
{
    return (n + source->rows_per_piece - 1) / source->rows_per_piece;
}

static void note_failure(struct job *job, int k)
{
    int32_t none = 0;
    atomic_compare_exchange_strong(&job->failed, &none, k + 1);
}

/* Copies one piece of a job. The pieces of all sources are numbered one after the other. */
static void copy_piece(const struct pf_crew *crew, struct job *job, int64_t piece)
{
    int k = 0;
    for (int64_t n; piece >= (n = n_pieces_of(&crew->sources[k], job->n)); k++)
        piece -= n;
    const struct source *source = &crew->sources[k];
    const struct pf_rows target = {
        .base = job->outs[k], .n = job->n, .stride = source->rows.row_nbytes};
    const int64_t begin = piece * source->rows_per_piece;
    int64_t end = begin + source->rows_per_piece;
    if (end > job->n)
        end = job->n;
    if (pf_copy_guarded(&source->rows, job->rows, job->first, &target, NULL, begin, end,
                        crew->bypass))
        note_failure(job, k);
}

static void end_job(const struct pf_crew *crew, struct job *job)
{
    for (int k = 0; k < crew->n_sources; k++)
        if (pf_has_shrunk(&crew->sources[k].rows))
            note_failure(job, k);
    job->end_s = now_s();
    if (atomic_exchange(&job->state, ENDED) == AWAITED)
        wake(&job->state, 1);
}

/* Takes a piece of job `number` and copies it. Returns 0 if no piece is left. */
static int help(struct pf_crew *crew, uint32_t number)
{
    struct job *job = &crew->jobs[number % crew->n_places];
    uint64_t ticket = atomic_load(&job->ticket);
    do {
        if (ticket >> 32 != number || !(uint32_t)ticket)
            return 0;
    } while (!atomic_compare_exchange_weak(&job->ticket, &ticket, ticket - 1));
    const uint32_t left = (uint32_t)ticket;
    if (left == job->n_pieces)
        job->begin_s = now_s();
    if (left == 1)
        atomic_fetch_sub(&crew->n_untaken, 1);
    copy_piece(crew, job, job->n_pieces - left);
    if (atomic_fetch_sub(&job->unfinished, 1) == 1)
        end_job(crew, job);
    return 1;
}

static void *work(void *argument)
{
    struct pf_crew *crew = argument;
    uint32_t number = 0, n_sleeps = 0;
    int n_looks = MOST_LOOKS;
    while (!atomic_load(&crew->is_stopped)) {
        const uint32_t bell = atomic_load(&crew->bell);
        uint32_t head = atomic_load(&crew->head);
        const int has_waited = number == head;
        for (int i = 0; number == head && i < n_looks; i++) {
            pause_briefly();
            head = atomic_load(&crew->head);
        }
        if (number == head) {
            n_looks = ++n_sleeps % SLEEPS_BEFORE_TRIAL ? FEW_LOOKS : MOST_LOOKS;
            atomic_fetch_add(&crew->n_asleep, 1);
            if (!atomic_load(&crew->is_stopped))
                sleep_if(&crew->bell, bell);
            atomic_fetch_sub(&crew->n_asleep, 1);
            continue;
        }
        if (has_waited)
            n_looks = MOST_LOOKS;
        while (!atomic_load(&crew->is_stopped) && help(crew, number)) {
        }
        number++;
    }
    return NULL;
}

static void ring(struct pf_crew *crew)
{
    atomic_fetch_add(&crew->bell, 1);
    if (atomic_load(&crew->n_asleep))
        wake(&crew->bell, MOST_THREADS);
}

void pf_crew_stop(struct pf_crew *crew)
{
    atomic_store(&crew->is_stopped, 1);
    atomic_fetch_add(&crew->bell, 1);
    wake(&crew->bell, MOST_THREADS);
    pthread_mutex_lock(&crew->stopping);
    while (crew->n_threads)
        pthread_join(crew->threads[--crew->n_threads], NULL);
    pthread_mutex_unlock(&crew->stopping);
}

void pf_crew_free(struct pf_crew *crew)
{
    if (crew->jobs)
        for (uint32_t i = 0; i < crew->n_places; i++)
            free(crew->jobs[i].outs);
    if (crew->sources)
        for (int k = 0; k < crew->n_sources; k++)
            free((void *)crew->sources[k].rows.parts);
    free(crew->jobs);
    free(crew->sources);
    free(crew);
}

static int allocate(struct pf_crew *crew, const struct pf_source *sources)
{
    crew->sources = calloc((size_t)crew->n_sources, sizeof *crew->sources);
    crew->jobs = calloc(crew->n_places, sizeof *crew->jobs);
    if (!crew->sources || !crew->jobs)
        return -1;
    for (int k = 0; k < crew->n_sources; k++) {
        struct source *const source = &crew->sources[k];
        const size_t nbytes = (size_t)sources[k].n_parts * sizeof *sources[k].parts;
        struct pf_rows *const parts = malloc(nbytes);
        if (!parts)
            return -1;
        memcpy(parts, sources[k].parts, nbytes);
        source->rows = sources[k];
        source->rows.parts = parts;
        const int64_t row_nbytes = sources[k].row_nbytes;
        const int64_t per_piece = row_nbytes ? PIECE_NBYTES / row_nbytes : INT64_MAX / 2;
        source->rows_per_piece = per_piece ? per_piece : 1;
        crew->may_fail |= parts->limit != NULL;
    }
    for (uint32_t i = 0; i < crew->n_places; i++) {
        struct job *job = &crew->jobs[i];
        job->outs = calloc((size_t)crew->n_sources, sizeof *job->outs);
        if (!job->outs)
            return -1;
    }
    return 0;
}

/* The threads block all signals, because those of the program are for its own threads. */
void pf_crew_start(struct pf_crew *crew, int n_threads)
{
    if (n_threads > MOST_THREADS)
        n_threads = MOST_THREADS;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&crew->stopping);
    while (!atomic_load(&crew->is_stopped) && crew->n_threads < n_threads
           && !pthread_create(&crew->threads[crew->n_threads], NULL, work, crew))
        crew->n_threads++;
    pthread_mutex_unlock(&crew->stopping);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct pf_crew *pf_crew_open(int n_sources, const struct pf_source *sources, uint32_t n_places,
                             uint32_t ring_at, int bypass)
{
    struct pf_crew *crew = calloc(1, sizeof *crew);
    if (!crew)
        return NULL;
    crew->n_sources = n_sources;
    /* A power of two, so that the places follow each other when the job numbers wrap around. */
    for (crew->n_places = 1; crew->n_places < n_places;)
        crew->n_places *= 2;
    crew->ring_at = ring_at;
    crew->bypass = bypass;
    pthread_mutex_init(&crew->stopping, NULL);
    if (allocate(crew, sources)) {
        pf_crew_free(crew);
        return NULL;
    }
    return crew;
}

uint32_t pf_crew_submit(struct pf_crew *crew, const int64_t *rows, int64_t first, int64_t n,
                        char *const *outs)
{
    const uint32_t number = atomic_load(&crew->head);
    struct job *job = &crew->jobs[number % crew->n_places];
    if (crew->may_fail)
        pf_guard_arm();
    int64_t n_pieces = 0;
    for (int k = 0; k < crew->n_sources; k++)
        n_pieces += n_pieces_of(&crew->sources[k], n);
    job->rows = rows;
    job->first = first;
    job->n = n;
    job->n_pieces = (uint32_t)n_pieces;
    memcpy(job->outs, outs, (size_t)crew->n_sources * sizeof *outs);
    atomic_store(&job->unfinished, job->n_pieces);
    atomic_store(&job->failed, 0);
    atomic_store(&job->state, n_pieces ? RUNNING : ENDED);
    if (n_pieces)
        atomic_fetch_add(&crew->n_untaken, 1);
    else
        job->begin_s = job->end_s = now_s();
    atomic_store(&job->ticket, (uint64_t)number << 32 | job->n_pieces);
    atomic_store(&crew->head, number + 1);
    if (atomic_load(&crew->n_untaken) >= (int32_t)crew->ring_at)
        ring(crew);
    return number;
}

int pf_crew_wait(struct pf_crew *crew, uint32_t number, double *times)
{
    struct job *job = &crew->jobs[number % crew->n_places];
    while (help(crew, number)) {
    }
    for (int i = 0; i < MOST_LOOKS && atomic_load(&job->state) != ENDED; i++)
        pause_briefly();
    uint32_t running = RUNNING;
    atomic_compare_exchange_strong(&job->state, &running, AWAITED);
    while (atomic_load(&job->state) != ENDED)
        if (sleep_if(&job->state, AWAITED) && errno == EINTR)
            return -1;
    times[0] = job->begin_s;
    times[1] = job->end_s;
    return atomic_load(&job->failed);
}
