/* A separate wall clock for the processes of one host of the test bed, by /etc/ld.so.preload.
 *
 * /dev/shm/clock_skew holds the seconds that the host's clock is ahead, in digits; it may change at any time.
 * Deadlines that a process gives as times of the wall clock are put back before the kernel, whose clock is right,
 * sees them.
 * Built by: gcc -shared -fPIC -O2 -o clock_skew.so clock_skew.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *shared;

static long skew(void) {
  if (!shared) {
    int file = open("/dev/shm/clock_skew", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    void *page = mmap(0, 16, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page == MAP_FAILED) return 0;
    shared = page;
  }
  return atol(shared);
}

/* Only a time of the wall clock is so large: the other clocks count from the machine's start. */
static struct timespec put_back(const struct timespec *when) {
  struct timespec real = *when;
  if (real.tv_sec > 1000000000) real.tv_sec -= skew();
  return real;
}

#define NEXT(name) \
  static __typeof__(&name) next; \
  if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
  NEXT(clock_gettime);
  int status = next(clock, now);
  if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += skew();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (kept) *kept = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  NEXT(pthread_cond_timedwait);
  struct timespec real = put_back(until);
  return next(cond, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  NEXT(sem_timedwait);
  struct timespec real = put_back(until);
  return next(semaphore, &real);
}

long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  long word[6];
  va_list words;
  va_start(words, number);
  for (int i = 0; i < 6; i++) word[i] = va_arg(words, long);
  va_end(words);
  struct timespec real;
  if (number == SYS_futex && (word[1] & FUTEX_CLOCK_REALTIME) && word[3]) {
    real = put_back((const struct timespec *)word[3]);
    word[3] = (long)&real;
  }
  return next(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}
