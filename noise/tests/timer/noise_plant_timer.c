// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A timer that takes a CPU for 200 µs every 10 ms, in the kernel's interrupt handler. /proc/noise-plant-timer has the begin and end of each time, in ticks of
 * the time-stamp counter.
 */
#include <linux/hrtimer.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/smp.h>
#include <linux/timekeeping.h>
#include <asm/msr.h>

#define PERIOD (10 * NSEC_PER_MSEC)
#define BUSY (200 * NSEC_PER_USEC)
#define STRETCHES 10000

static unsigned int cpu;
module_param(cpu, uint, 0444);

static struct hrtimer timer;
static u64 stretches[STRETCHES][2];
static unsigned int count; /* of those that are complete */

static enum hrtimer_restart expire(struct hrtimer *expired)
{
	u64 begin = ktime_get_ns(), start = rdtsc_ordered();
	unsigned int number = count;

	while (ktime_get_ns() - begin < BUSY)
		cpu_relax();
	if (number < STRETCHES) {
		stretches[number][0] = start;
		stretches[number][1] = rdtsc_ordered();
		smp_store_release(&count, number + 1);
	}
	hrtimer_forward_now(expired, ns_to_ktime(PERIOD));
	return HRTIMER_RESTART;
}

static void start_here(void *unused)
{
	hrtimer_start(&timer, ns_to_ktime(PERIOD), HRTIMER_MODE_REL_PINNED_HARD);
}

static int show(struct seq_file *file, void *unused)
{
	unsigned int i, complete = smp_load_acquire(&count);

	for (i = 0; i < complete; i++)
		seq_printf(file, "%llu %llu\n", stretches[i][0], stretches[i][1]);
	return 0;
}

static int __init begin(void)
{
	int ret;

	hrtimer_init(&timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
	timer.function = expire;
	if (!proc_create_single("noise-plant-timer", 0444, NULL, show))
		return -ENOMEM;
	ret = smp_call_function_single(cpu, start_here, NULL, 1);
	if (ret)
		remove_proc_entry("noise-plant-timer", NULL);
	return ret;
}

static void __exit end(void)
{
	hrtimer_cancel(&timer);
	remove_proc_entry("noise-plant-timer", NULL);
}

module_init(begin);
module_exit(end);
MODULE_DESCRIPTION("A timer that interrupts programs for a known time");
MODULE_LICENSE("Dual BSD/GPL");
