/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the core needs from the place it runs in. The kernel skin and the user-space skin each define these. */
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

/* A short pause in a spin loop. */
void tfs_os_relax(void);
/* Called when spinning did not help: gives the CPU away, sleeps up to 'round' × some 10 µs or until a doorbell. */
void tfs_os_wait(struct tfs *fs, tmb_u32 round);
/* Sleeps while *word, of this member's own memory, is 'value', for at most so long; may return early. True: the caller is to end, being
 * killed; only if 'killable'. */
bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable);
/* Wakes those who sleep on the word, after it was changed. */
void tfs_os_wake(struct tfs *fs, tmb_u32 *word);
/* In a long loop: gives the CPU away if somebody else wants it. */
void tfs_os_yield(void);
/* One line for the log: a member that lives has not given back a lock, or removed blocks, for so long; it answers when it is rung, or not. */
void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds);
/* Monotonic time in ns, for bounded waits. */
tmb_u64 tfs_os_clock(void);
/* Wall clock in ns since 1970, for time stamps. */
tmb_s64 tfs_os_now(void);
/* A number that differs between CPUs or threads, to spread over slots. Any value will do. */
tmb_u32 tfs_os_cpu(void);
/* Rings the doorbell of a member after its 'pending' bit was set (best effort). Its own: wakes its own threads that wait. */
void tfs_os_ring(struct tfs *fs, tmb_u32 member);
/* Persistent memory: has the cache lines of [p, p + len) written back; and waits until those asked for before are. */
void tfs_os_flush(const void *p, tmb_u64 len) __attribute__((cold));
void tfs_os_drain(void) __attribute__((cold));
/* Damage was found: one line for the log. 'what' is static text, 'a' and 'b' details (inode, block, …). */
void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b);

#endif
