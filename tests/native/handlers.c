/* Signal handlers of other libraries before and after the one of guard.c: see test_guard.py.
 *
 * The first argument is a list of steps, one letter each:
 *
 *   A B C   install a handler, which writes its letter and then calls the handler before it
 *   S       install a handler that does nothing, as that of faulthandler after it was turned off
 *   d       install again what was there before the last of these handlers
 *   m u     note that a file was mapped, or unmapped
 *   a       look whether the handler of guard.c is in front
 *   o       copy a row of a file that has shrunk: writes r if this is an error
 *   f       touch another page that cannot be loaded
 *   F       fork while another thread installs and removes the handler; write k if all children
 *           could install it, too */
#define _GNU_SOURCE
#include "../../pinfeed/native/pinfeed.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NBYTES = 8192 };

static struct sigaction before[4];

static void say(char letter)
{
    if (write(1, &letter, 1) != 1)
        abort();
}

static void chain(int k, int signal_number, siginfo_t *info, void *context)
{
    say((char)('A' + k));
    if (before[k].sa_flags & SA_SIGINFO)
        before[k].sa_sigaction(signal_number, info, context);
    else if (before[k].sa_handler == SIG_DFL)
        signal(signal_number, SIG_DFL);
}

static void first(int signal_number, siginfo_t *info, void *context)
{
    chain(0, signal_number, info, context);
}

static void second(int signal_number, siginfo_t *info, void *context)
{
    chain(1, signal_number, info, context);
}

static void third(int signal_number, siginfo_t *info, void *context)
{
    chain(2, signal_number, info, context);
}

static void do_nothing(int signal_number)
{
    (void)signal_number;
}

static void *change(void *is_over)
{
    while (!atomic_load((atomic_int *)is_over)) {
        pf_guard_count(1);
        pf_guard_count(-1);
    }
    return NULL;
}

static void fork_often(void)
{
    atomic_int is_over = 0;
    pthread_t thread;
    pthread_create(&thread, NULL, change, &is_over);
    for (int i = 0; i < 500; i++) {
        const pid_t child = fork();
        if (!child) {
            alarm(10);
            pf_guard_count(1);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status)
            abort();
    }
    atomic_store(&is_over, 1);
    pthread_join(thread, NULL);
    say('k');
}

int main(int argc, char **argv)
{
    void (*const handlers[])(int, siginfo_t *, void *) = {first, second, third};
    char row[NBYTES], name[] = "/tmp/handlers-XXXXXX";
    int last = 0;
    const int fd = mkstemp(name);
    if (argc != 2 || fd < 0 || unlink(name) || ftruncate(fd, NBYTES))
        abort();
    char *const map = mmap(NULL, NBYTES, PROT_READ, MAP_SHARED, fd, 0);
    char *const other = mmap(NULL, NBYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || other == MAP_FAILED || ftruncate(fd, 0))
        abort();
    const struct pf_rows rows = {map, 1, NBYTES, map + NBYTES, NBYTES, fd, 0};
    const struct pf_source source = {&rows, 1, NBYTES};
    const struct pf_rows target = {.base = row, .n = 1, .stride = NBYTES};
    for (const char *step = argv[1]; *step; step++) {
        struct sigaction action = {0};
        switch (*step) {
        case 'm':
        case 'u':
            pf_guard_count(*step == 'm' ? 1 : -1);
            break;
        case 'a':
            pf_guard_arm();
            break;
        case 'd':
            sigaction(SIGBUS, &before[last], NULL);
            break;
        case 'o':
            if (pf_copy_guarded(&source, NULL, &target, NULL, 0, 1, 0))
                say('r');
            break;
        case 'f':
            row[0] = *(volatile char *)other;
            break;
        case 'F':
            fork_often();
            break;
        case 'S':
            action.sa_handler = do_nothing;
            sigaction(SIGBUS, &action, &before[last = 3]);
            break;
        default:
            action.sa_flags = SA_SIGINFO;
            action.sa_sigaction = handlers[last = *step - 'A'];
            sigaction(SIGBUS, &action, &before[last]);
        }
    }
    return 0;
}
