// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The core's surroundings in user space (tfs_os.h). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

#define NS 1000000000ULL
/* A wait polls at least this often, since no event here wakes it. */
#define CPU_USES 64u
#define LONGEST_WAIT_NS (2 * 1000 * 1000L)

void *tfs_os_alloc(tmb_u64 bytes)
{
	return calloc(1, bytes);
}

void tfs_os_free(void *p)
{
	free(p);
}

void tfs_os_relax(void)
{
	__builtin_ia32_pause();
}

void tfs_os_wait(struct tfs *fs, tmb_u32 round)
{
	struct timespec pause = { 0, 0 };

	(void)fs;
	if (round < 4) {
		sched_yield();
		return;
	}
	pause.tv_nsec = round < 200 ? (long)round * 10000 : LONGEST_WAIT_NS;
	nanosleep(&pause, NULL);
}

bool tfs_os_killed(struct tfs *fs)
{
	const struct tfs_host *host = fs->os;

	return host && (tmb_load(&host->ending) || (host->killed && host->killed(host->ctx)));
}

bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable)
{
	struct timespec pause = { (time_t)(ns / NS), (long)(ns % NS) };

	if (killable && tfs_os_killed(fs))
		return true;
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &pause, NULL, 0);
	return false;
}

void tfs_os_wake(struct tfs *fs, tmb_u32 *word)
{
	(void)fs;
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void tfs_os_yield(void)
{
}

void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds)
{
	const struct tfs_host *host = fs->os;

	if (host && host->waiting)
		host->waiting(host->ctx, member, answers, seconds);
}

static tmb_u64 now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (tmb_u64)t.tv_sec * NS + (tmb_u64)t.tv_nsec;
}

tmb_u64 tfs_os_clock(void)
{
	return now(CLOCK_MONOTONIC);
}

tmb_s64 tfs_os_now(void)
{
	return (tmb_s64)now(CLOCK_REALTIME);
}

/* A thread seldom changes its CPU, so it looks seldom. */
tmb_u32 tfs_os_cpu(void)
{
	static __thread tmb_u32 cpu, uses;

	if (!(uses++ % CPU_USES)) {
		int now = sched_getcpu();

		cpu = now < 0 ? 0 : (tmb_u32)now;
	}
	return cpu;
}

void tfs_os_ring(struct tfs *fs, tmb_u32 member)
{
	const struct tfs_host *host = fs->os;

	if (host && host->ring)
		host->ring(host->ctx, member);
}

void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b)
{
	const struct tfs_host *host = fs->os;

	if (host && host->damage)
		host->damage(host->ctx, what, a, b);
}
