// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Write-back to persistent memory (tfs_os.h), by the best instruction that this processor has. Tests record instead. */
#include <cpuid.h>

#include "host.h"

#define LINE 64u
enum { UNKNOWN, CLWB, CLFLUSHOPT, CLFLUSH };

static int best_flush(void)
{
	unsigned int a = 0, b = 0, c = 0, d = 0;

	__get_cpuid_count(7, 0, &a, &b, &c, &d);
	return b & 1u << 24 ? CLWB : b & 1u << 23 ? CLFLUSHOPT : CLFLUSH;
}

void tfs_os_flush(const void *p, tmb_u64 len)
{
	static int how = UNKNOWN;
	char *end = (char *)p + len;

	if (tmb_load(&how) == UNKNOWN)
		tmb_store(&how, best_flush());
	for (char *line = (char *)((uintptr_t)p & ~(uintptr_t)(LINE - 1)); line < end; line += LINE) {
		if (how == CLWB)
			__asm__ volatile(".byte 0x66; xsaveopt %0" : "+m"(*line)); /* clwb, for any assembler */
		else if (how == CLFLUSHOPT)
			__asm__ volatile(".byte 0x66; clflush %0" : "+m"(*line));
		else
			__asm__ volatile("clflush %0" : "+m"(*line));
	}
}

void tfs_os_drain(void)
{
	__asm__ volatile("sfence" ::: "memory");
}
