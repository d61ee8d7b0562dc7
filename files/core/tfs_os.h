/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The functions that the core needs from its surroundings. The kernel skin and the user-space skin each define them. */
#ifndef TFS_OS_H
#define TFS_OS_H

#include "tombolo_atomic.h"

#ifdef __KERNEL__
#include <linux/errno.h>
#include <linux/stat.h>
#include <linux/string.h>
#include <linux/limits.h>
#else
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#endif

struct tfs;

/* Private memory, zeroed; NULL when there is none. Freed by tfs_os_free. May sleep. */
void *tfs_os_alloc(tmb_u64 bytes);
void tfs_os_free(void *p);

/* Pauses briefly in a spin loop. */
void tfs_os_relax(void);
/* Called when spinning did not help: yields the CPU, sleeps up to 'round' × some 10 µs or until a doorbell. */
void tfs_os_wait(struct tfs *fs, tmb_u32 round);
/* Sleeps while *word, in this member's own memory, is 'value', for at most 'ns'; may return early. True: the caller was killed and must
 * return; only if 'killable'. */
bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable);
/* Wakes the threads that sleep on the word, after it was changed. */
void tfs_os_wake(struct tfs *fs, tmb_u32 *word);
/* Called in long loops: yields the CPU if another thread wants it. */
void tfs_os_yield(void);
/* Returns whether the caller was killed and should return soon. */
bool tfs_os_killed(struct tfs *fs);
/* Logs one line: a living member has not released a lock, or removed blocks, for so long; 'answers': it reacts to its doorbell. */
void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds);
/* Monotonic time in ns, for bounded waits. */
tmb_u64 tfs_os_clock(void);
/* Wall clock in ns since 1970, for time stamps. */
tmb_s64 tfs_os_now(void);
/* A number that differs between CPUs or threads, to spread over slots. Any value will do. */
tmb_u32 tfs_os_cpu(void);
/* Rings the doorbell of a member after its 'pending' bit was set (best effort). For the own member: wakes its waiting threads. */
void tfs_os_ring(struct tfs *fs, tmb_u32 member);
/* Persistent memory: starts to write back the cache lines of [p, p + len); and waits until those started before are durable. */
void tfs_os_flush(const void *p, tmb_u64 len) __attribute__((cold));
void tfs_os_drain(void) __attribute__((cold));
/* Logs one line: damage was found. 'what' is static text, 'a' and 'b' details (inode, block, …). */
void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b);

#endif
