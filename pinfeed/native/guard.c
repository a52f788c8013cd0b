/* Copies from mapped files that survive pages which cannot be loaded.
 *
 * A page behind the end of a file that has shrunk, or one that the disk cannot deliver, raises
 * SIGBUS in the thread that touches it. Before a thread copies, it notes where to continue. If the
 * signal comes from the file that the thread is copying, the handler jumps there, and the copy
 * ends with an error. Every other signal goes to the handler that was there before.
 *
 * Rules: the handler calls nothing but sigaction, raise, pthread_sigmask, siglongjmp and earlier
 * handlers. It acts only on threads that are copying. It is installed while files are mapped.
 * Other libraries may install handlers later, such as faulthandler; each copy looks for that,
 * and puts this handler in front again. A later handler may call this one, because it was there
 * before. So each such call goes to the handler that was there before the later one, and the
 * last call ends the process. */
#define _GNU_SOURCE
#include "pinfeed.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <ucontext.h>
#include <unistd.h>

struct attempt {
    sigjmp_buf back;
    const struct pf_source *source;
};

/* The copy that this thread makes. The initial-exec model needs no allocation, which a signal
 * handler could not do. */
static _Thread_local struct attempt *volatile attempt
    __attribute__((tls_model("initial-exec")));
/* Earlier handlers that this thread is calling, one within the other. */
static _Thread_local volatile sig_atomic_t n_calls __attribute__((tls_model("initial-exec")));
/* The last fault of this thread that was passed on, and how often in a row. */
static _Thread_local const void *volatile passed_on __attribute__((tls_model("initial-exec")));
static _Thread_local volatile sig_atomic_t n_passed_on __attribute__((tls_model("initial-exec")));

/* A handler that returns without a remedy lets the same access fault again, forever. */
#define MOST_TIMES 100
#define MOST_EARLIER 8

static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;
static int n_mapped;
/* The handlers before which this one was put, the latest last. A handler must not wait for the
 * lock, so it reads them without it. They change only when pf_guard_arm finds a handler that it
 * has not noted. */
static struct sigaction earlier[MOST_EARLIER];
static _Atomic int n_earlier;

static void handle(int signal_number, siginfo_t *info, void *context);

static void lock(void)
{
    pthread_mutex_lock(&changing);
}

static void unlock(void)
{
    pthread_mutex_unlock(&changing);
}

/* In a child that is forked while another thread holds the lock, it would stay locked. */
__attribute__((constructor)) static void prepare_forks(void)
{
    pthread_atfork(lock, unlock, unlock);
}

static void die(int signal_number)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(signal_number, &action, NULL);
    raise(signal_number);
}

/* Gives the signal to the handler that was there before this one. */
static void pass_on(int signal_number, siginfo_t *info, void *context)
{
    const int number = atomic_load(&n_earlier) - 1 - n_calls;
    const struct sigaction none = {.sa_handler = SIG_DFL};
    const struct sigaction before = number < 0 ? none : earlier[number];
    const int is_fault = info->si_code > 0;
    const int is_plain = !(before.sa_flags & SA_SIGINFO);
    n_passed_on = is_fault && info->si_addr == passed_on ? n_passed_on + 1 : 0;
    passed_on = is_fault ? info->si_addr : NULL;
    if (is_plain && before.sa_handler == SIG_IGN && !is_fault)
        return;
    /* The kernel does not permit that a fault is ignored. */
    if (n_passed_on > MOST_TIMES
        || (is_plain && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))) {
        die(signal_number);
        return;
    }
    n_calls++;
    if (is_plain)
        before.sa_handler(signal_number);
    else
        before.sa_sigaction(signal_number, info, context);
    n_calls--;
}

static int has_address(const struct pf_source *source, const char *address)
{
    for (int64_t k = 0; k < source->n_parts; k++)
        if (address >= source->parts[k].base && address < source->parts[k].limit)
            return 1;
    return 0;
}

static void handle(int signal_number, siginfo_t *info, void *context)
{
    struct attempt *const copy = attempt;
    /* A positive code says that the kernel reports a fault, at si_addr. */
    if (copy && info->si_code > 0 && has_address(copy->source, info->si_addr)) {
        attempt = NULL;
        /* The handler that called this one may have blocked signals. */
        pthread_sigmask(SIG_SETMASK, &((const ucontext_t *)context)->uc_sigmask, NULL);
        siglongjmp(copy->back, 1);
    }
    pass_on(signal_number, info, context);
}

static int is_in_front(struct sigaction *now)
{
    return !sigaction(SIGBUS, NULL, now) && (now->sa_flags & SA_SIGINFO)
           && now->sa_sigaction == handle;
}

static void note_earlier(struct sigaction now)
{
    int number = 0;
    while (number < atomic_load(&n_earlier) && earlier[number].sa_sigaction != now.sa_sigaction)
        number++;
    if (number == MOST_EARLIER)
        number--;
    earlier[number] = now;
    atomic_store(&n_earlier, number + 1);
}

void pf_guard_arm(void)
{
    struct sigaction now;
    if (is_in_front(&now))
        return;
    lock();
    if (n_mapped && !is_in_front(&now)) {
        note_earlier(now);
        struct sigaction action = {.sa_sigaction = handle};
        /* SA_NODEFER: a signal that an earlier handler raises, as faulthandler does, must arrive
         * here within the call of that handler. */
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, &action, NULL);
    }
    unlock();
}

void pf_guard_count(int change)
{
    struct sigaction now;
    lock();
    n_mapped += change;
    /* A handler that was installed later may call this one, or may have been turned off since. Then
     * this one stays. */
    if (!n_mapped && n_earlier == 1 && is_in_front(&now)) {
        sigaction(SIGBUS, &earlier[0], NULL);
        n_earlier = 0;
    }
    unlock();
    if (change > 0)
        pf_guard_arm();
}

int pf_has_shrunk(const struct pf_source *source)
{
    for (int64_t k = 0; k < source->n_parts; k++) {
        const struct pf_rows *const part = &source->parts[k];
        if (part->limit && lseek((int)part->fd, 0, SEEK_END) < part->size)
            return 1;
    }
    return 0;
}

int pf_copy_guarded(const struct pf_source *source, const int64_t *from,
                    const struct pf_rows *target, const int64_t *to, int64_t begin, int64_t end,
                    int bypass)
{
    struct attempt copy = {.source = source};
    if (source->parts->limit) {
        if (sigsetjmp(copy.back, 0))
            return -1;
        attempt = &copy;
    }
    pf_copy_parts(source, from, 0, target, to, begin, end, bypass);
    attempt = NULL;
    return 0;
}

int pf_copy_runs_guarded(const struct pf_source *source, const int64_t *starts,
                         const int64_t *lengths, const int64_t *places, int64_t n_runs,
                         const struct pf_rows *target)
{
    struct attempt copy = {.source = source};
    if (source->parts->limit) {
        if (sigsetjmp(copy.back, 0))
            return -1;
        attempt = &copy;
    }
    for (int64_t k = 0; k < n_runs; k++) {
        struct pf_rows part = *target;
        part.base += places[k] * target->stride;
        part.n = lengths[k];
        pf_copy_parts(source, NULL, starts[k], &part, NULL, 0, lengths[k], 0);
    }
    attempt = NULL;
    return 0;
}
