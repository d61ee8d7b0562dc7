// SPDX-License-Identifier: Apache-2.0 OR MIT
// Loaded into a QEMU (LD_PRELOAD), it unmaps the guest's shared huge pages from that process, and so from KVM, and holds each one that the guest then
// misses for a known time. Nothing of the memory is lost: userfaultfd(2) maps the same pages again.
//
// UNMAP is a folder with two FIFOs. A line in 'ask' names two files: the second one is made when the work begins, and it goes on while the first one
// exists. 'answer' then has a line for each page: ticks of the time-stamp counter from when its fault was known until it was about to be mapped.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

enum { PAGE = 2 << 20, MOST = 100000 };
// In each period one page is unmapped, all of them in turn. Its mapping takes KVM far shorter than it is held.
static const unsigned long PERIOD_NS = 10 * 1000 * 1000, HOLD_NS = 5 * 1000 * 1000;

static struct {
	unsigned long long begin, end;
	int thread;
} held[MOST];

static void check(int good, const char *what)
{
	if (good)
		return;
	perror(what);
	_exit(1);
}

static unsigned long nanoseconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000UL + now.tv_nsec;
}

static unsigned long long ticks(void)
{
	_mm_lfence();
	return _rdtsc();
}

// The largest piece of the guest's memory.
static struct uffdio_range memory(void)
{
	struct uffdio_range largest = { 0 };
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	check(maps != NULL, "/proc/self/maps");
	while (fgets(line, sizeof(line), maps)) {
		unsigned long start, end;
		if (strstr(line, "memfd:memory-backend") && sscanf(line, "%lx-%lx", &start, &end) == 2 && end - start > largest.len)
			largest = (struct uffdio_range){ start, end - start };
	}
	fclose(maps);
	check(largest.len > 0, "no shared memory of the guest");
	return largest;
}

// Maps a page again once it was held. Returns the number of pages held.
static unsigned long serve(int faults, unsigned long count)
{
	struct uffd_msg message;
	if (read(faults, &message, sizeof(message)) != sizeof(message))
		return count;
	unsigned long long begin = ticks();
	unsigned long until = nanoseconds() + HOLD_NS;
	while (nanoseconds() < until)
		usleep(50);
	check(count < MOST, "too many pages");
	held[count].begin = begin;
	held[count].thread = message.arg.pagefault.feat.ptid;
	held[count].end = ticks();
	struct uffdio_continue map = { .range = { message.arg.pagefault.address & -(unsigned long)PAGE, PAGE } };
	if (ioctl(faults, UFFDIO_CONTINUE, &map))
		check(!ioctl(faults, UFFDIO_WAKE, &map.range), "UFFDIO_WAKE");
	return count + 1;
}

// The guest waits for pages that the threads of its vCPUs miss, and those that KVM fetches by a thread of the kernel.
static int is_guests(int thread)
{
	char path[64], name[32] = "";
	snprintf(path, sizeof(path), "/proc/self/task/%d/comm", thread);
	FILE *file = fopen(path, "re");
	if (!file)
		return 1;
	if (!fgets(name, sizeof(name), file))
		name[0] = 0;
	fclose(file);
	return !strncmp(name, "CPU ", 4);
}

static void plant(const char *file, const char *begun)
{
	struct uffdio_range all = memory();
	int faults = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	check(faults >= 0, "userfaultfd");
	struct uffdio_api api = { .api = UFFD_API, .features = UFFD_FEATURE_MINOR_HUGETLBFS | UFFD_FEATURE_THREAD_ID };
	check(!ioctl(faults, UFFDIO_API, &api), "UFFDIO_API");
	struct uffdio_register registered = { .range = all, .mode = UFFDIO_REGISTER_MODE_MINOR };
	check(!ioctl(faults, UFFDIO_REGISTER, &registered), "UFFDIO_REGISTER");

	int made = open(begun, O_CREAT | O_CLOEXEC | O_WRONLY, 0600);
	check(made >= 0, begun);
	close(made);
	unsigned long next = nanoseconds(), page = 0, count = 0;
	while (!access(file, F_OK)) {
		struct pollfd ready = { faults, POLLIN, 0 };
		if (poll(&ready, 1, 1) > 0)
			count = serve(faults, count);
		if (nanoseconds() < next)
			continue;
		check(!madvise((void *)(all.start + page * PAGE), PAGE, MADV_DONTNEED), "madvise");
		page = (page + 1) % (all.len / PAGE);
		next = nanoseconds() + PERIOD_NS;
	}
	// Closing it maps the rest at once.
	close(faults);
	FILE *answer = fopen("answer", "we");
	check(answer != NULL, "answer");
	for (unsigned long n = 0; n < count; n++) {
		if (is_guests(held[n].thread))
			fprintf(answer, "%llu %llu\n", held[n].begin, held[n].end);
	}
	fclose(answer);
}

static void *wait_for_orders(void *folder)
{
	for (;;) {
		char path[256], file[256], begun[256];
		snprintf(path, sizeof(path), "%s/ask", (char *)folder);
		FILE *ask = fopen(path, "re");
		check(ask != NULL, path);
		int words = fscanf(ask, "%255s %255s", file, begun);
		fclose(ask);
		if (words != 2)
			continue;
		check(!chdir(folder), folder);
		cpu_set_t first;
		CPU_ZERO(&first);
		CPU_SET(0, &first);
		check(!sched_setaffinity(0, sizeof(first), &first), "sched_setaffinity");
		plant(file, begun);
	}
	return NULL;
}

__attribute__((constructor)) static void begin(void)
{
	char *folder = getenv("UNMAP");
	sigset_t all, before;
	pthread_t thread;
	if (!folder)
		return;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	check(!pthread_create(&thread, NULL, wait_for_orders, folder), "pthread_create");
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}
