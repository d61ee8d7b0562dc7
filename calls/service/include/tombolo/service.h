/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * For services: code that runs in a context of its own, which holds nothing but the service's code and data, a stack, and the window of the client
 * that calls (docs/calls.md). A service is one freestanding, position-independent object:
 *
 *     cc -O2 -ffreestanding -fPIC -fvisibility=hidden -fno-stack-protector -fcf-protection=none -mno-avx -shared -nostdlib -Wl,-Bsymbolic
 *        -Wl,--no-undefined -o kv.service kv.c
 *
 * It may not execute system calls nor have relocations; `Image::read` of the crate tombolo-service refuses what does. One visit is in a service at a
 * time, so a service needs no locks. A visit can end at any instruction: a client may be killed, or end its visit by a trick, and a limit of time ends
 * it, too. What the visit had stored by then stays: a service changes its data so that each single store leaves them valid, or repairs them when
 * `ended` is not what it last was.
 */
#ifndef TOMBOLO_SERVICE_H
#define TOMBOLO_SERVICE_H

#include <stddef.h>
#include <stdint.h>

/* What a visit has beside the service's own data. The window may change at any time: copy a value, check the copy, use the copy. */
struct tombolo_visit {
	void *window;
	uint64_t window_size;
	uint64_t client; /* differs between clients that are bound at the same time; never 0 */
	uint64_t ended; /* visits of any client that ended before they returned */
};

/* A function of a service. */
typedef uint64_t tombolo_call(const struct tombolo_visit *visit, uint64_t a, uint64_t b, uint64_t c);

/* Makes `function` the call of this index, a number without a suffix; the indices of a service are 0, 1, 2 … without a gap. */
#define TOMBOLO_CALL(index, function)                                                                                                     \
	extern tombolo_call function __attribute__((used));                                                                                     \
	__asm__(".pushsection .tombolo.calls, " #index ", \"a\", @progbits\n\t.long " #function " - .\n\t.popsection")

/* Compilers call these four in freestanding code, too. */
__attribute__((weak)) void *memcpy(void *restrict to, const void *restrict from, size_t bytes)
{
	void *at = to;

	__asm__ volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(bytes) : : "memory");
	return to;
}

__attribute__((weak)) void *memset(void *to, int value, size_t bytes)
{
	void *at = to;

	__asm__ volatile("rep stosb" : "+D"(at), "+c"(bytes) : "a"(value) : "memory");
	return to;
}

__attribute__((weak)) void *memmove(void *to, const void *from, size_t bytes)
{
	char *t = to;
	const char *f = from;

	if ((uintptr_t)t - (uintptr_t)f >= bytes)
		return memcpy(to, from, bytes);
	while (bytes--)
		__asm__ volatile("movb (%1), %%al\n\tmovb %%al, (%0)" : : "r"(t + bytes), "r"(f + bytes) : "rax", "memory");
	return to;
}

__attribute__((weak)) int memcmp(const void *a, const void *b, size_t bytes)
{
	const unsigned char *x = a, *y = b;

	for (size_t i = 0; i < bytes; i++) {
		__asm__ volatile("" : : : "memory"); /* or else the compiler makes a call of memcmp of this loop */
		if (x[i] != y[i])
			return x[i] < y[i] ? -1 : 1;
	}
	return 0;
}

#endif
