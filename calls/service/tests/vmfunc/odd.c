/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A service that does what none may. What the check refuses hides inside of other instructions. */
#include <tombolo/service.h>

/* mov $…, %eax, entered at its second byte. */
#define HIDDEN(a, b, c, d) __asm__ volatile("jmp 1f + 1\n1:\t.byte 0xb8, " #a ", " #b ", " #c ", " #d : : : "rax", "rbx", "rcx", "rdx", "r11", "memory")

static volatile uint64_t visits;

#define ODD(index, name, ...)                                                                                  \
	uint64_t name(const struct tombolo_visit *v, uint64_t a, uint64_t b, uint64_t c)                       \
	{                                                                                                      \
		(void)v, (void)a, (void)b, (void)c;                                                            \
		visits++;                                                                                      \
		__VA_ARGS__;                                                                                   \
		return 1;                                                                                      \
	}                                                                                                      \
	TOMBOLO_CALL(index, name)

ODD(0, count, return visits);
ODD(1, ended, return v->ended);
ODD(2, loops, for (;;) __asm__ volatile(""));
ODD(3, writes_nowhere, *(volatile int *)a = 1);
ODD(4, writes_code, *(volatile char *)(uintptr_t)&count = 1);
ODD(5, makes_a_system_call, HIDDEN(0x0f, 0x05, 0x90, 0x90));
ODD(6, interrupts, HIDDEN(0xcd, 0x80, 0x90, 0x90));
ODD(7, asks_the_processor, HIDDEN(0x0f, 0xa2, 0x90, 0x90));
ODD(8, reads_a_port, HIDDEN(0xec, 0x90, 0x90, 0x90));
ODD(9, calls_the_hypervisor, HIDDEN(0x0f, 0x01, 0xc1, 0x90));
ODD(10, halts, HIDDEN(0xf4, 0x90, 0x90, 0x90));
ODD(11, is_undefined, __asm__ volatile("ud2"));
ODD(12, divides_by_zero, __asm__ volatile("div %%ecx" : : "c"(0), "a"(1), "d"(0)));
ODD(13, breaks, __asm__ volatile("int3"));
ODD(14, executes_data, visits--; ((void (*)(void))(uintptr_t)&visits)());
ODD(15, loses_its_stack, __asm__ volatile("xor %%esp, %%esp\n\tpush %%rax" : : : "memory"));
