// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The functions that the core needs from the kernel (tfs_os.h). */
#include "tombolo.h"

#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/libnvdimm.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/sched/signal.h>
#include <linux/timekeeping.h>
#include <linux/wait_bit.h>

void *tfs_os_alloc(tmb_u64 bytes)
{
	return kvzalloc(bytes, GFP_NOFS);
}

void tfs_os_free(void *p)
{
	kvfree(p);
}

void tfs_os_relax(void)
{
	cpu_relax();
}

/* A doorbell between the caller's last look and this sleep is missed: hence the short limit. */
void tfs_os_wait(struct tfs *fs, tmb_u32 round)
{
	unsigned long us = min_t(unsigned long, 20ul * (round + 1), 2000);
	struct tmb_sb *s = fs ? fs->os : NULL;
	int seen;

	if (!s || !s->listening) {
		usleep_range(us, us + us / 4 + 10);
		return;
	}
	seen = atomic_read(&s->rings);
	wait_event_hrtimeout(s->rung, atomic_read(&s->rings) != seen, ns_to_ktime(us * NSEC_PER_USEC));
}

bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable)
{
	struct tmb_sb *s = fs ? fs->os : NULL;
	unsigned int state = killable ? TASK_KILLABLE : TASK_UNINTERRUPTIBLE;
	ktime_t until = ktime_add_ns(ktime_get(), ns);
	long ended;

	if (killable && s && READ_ONCE(s->ending))
		return true;
	/* wait_var_event() has no form with a fine timeout. */
	ended = ___wait_var_event(word, READ_ONCE(*word) != value || ktime_after(ktime_get(), until), state, 0, 0,
				  schedule_hrtimeout(&until, HRTIMER_MODE_ABS));
	return ended == -ERESTARTSYS;
}

void tfs_os_wake(struct tfs *fs, tmb_u32 *word)
{
	wake_up_var(word);
}

void tfs_os_yield(void)
{
	cond_resched();
}

bool tfs_os_killed(struct tfs *fs)
{
	return fatal_signal_pending(current);
}

void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds)
{
	struct tmb_sb *s = fs ? fs->os : NULL;
	char name[TMB_NAME_LEN + 1] = "";

	if (!s || member >= TMB_MAX_MEMBERS)
		return;
	memcpy(name, s->zone.members[member].name, TMB_NAME_LEN);
	pr_warn_ratelimited("tombolo: zone %s: waiting for member %u (%*pE) for %llu s; it %s\n", s->zone.name, member,
			    (int)strnlen(name, TMB_NAME_LEN), name, seconds,
			    answers ? "is at work" : "does not answer: it is suspended, or its machine hangs");
}

tmb_u64 tfs_os_clock(void)
{
	return ktime_get_ns();
}

/* The clock that the VFS stamps files with. */
tmb_s64 tfs_os_now(void)
{
	struct timespec64 ts;

	ktime_get_coarse_real_ts64(&ts);
	return timespec64_to_ns(&ts);
}

tmb_u32 tfs_os_cpu(void)
{
	return raw_smp_processor_id();
}

void tfs_os_flush(const void *p, tmb_u64 len)
{
	arch_wb_cache_pmem((void *)p, len);
}

void tfs_os_drain(void)
{
	wmb();
}

void tfs_os_ring(struct tfs *fs, tmb_u32 member)
{
	struct tmb_sb *s = fs->os;

	if (s && s->listening && member < TMB_MAX_MEMBERS)
		tmb_doorbell_ring(&s->doorbell, tmb_load(&s->zone.members[member].doorbell));
}

void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b)
{
	struct tmb_sb *s = fs ? fs->os : NULL;

	pr_err_ratelimited("tombolo: zone %s is damaged: %s (%llu, %llu); run `tombolo files fsck`\n",
			   s ? s->zone.name : "?", what, a, b);
}

/* A time as the zone stores it, clamped to its range. */
s64 tmb_to_ns(struct timespec64 ts)
{
	if (ts.tv_sec >= KTIME_SEC_MAX)
		return S64_MAX;
	if (ts.tv_sec <= -KTIME_SEC_MAX)
		return S64_MIN;
	return timespec64_to_ns(&ts);
}
