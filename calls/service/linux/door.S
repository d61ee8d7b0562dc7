/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The service's side of the gate: a page that the service's context has where the gate has its code. context.c copies it and fills in: a jump to its
 * start behind the gate's entry, VMFUNC before the gate's exit, the gate's index, and the jump to that VMFUNC. Nothing that the client left in registers or
 * flags reaches the service but the call and its arguments, and nothing of the service reaches the client but the result.
 */
#include <linux/linkage.h>

#define GATE 0x10000000
#define SERVICE 0x20000000
#define SHARED 0x2f000000
#define TABLE 0x2f001000
#define FRAME 0x30008000
#define AT(place) (.Ldoor + (place) - GATE)(%rip)

#define SHARED_OWNER 0
#define SHARED_ENDED 8
#define FRAME_ENDED 24
#define FRAME_COUNT 32
#define FRAME_ID 40
#define FRAME_MXCSR 44
#define FRAME_CALLS 48

	.section .rodata
	.balign 4096
SYM_DATA_START(tmb_door)
.Ldoor:
	lea AT(FRAME), %rsp
	push $2
	popf
	ldmxcsr AT(FRAME + FRAME_MXCSR)
	incq AT(FRAME + FRAME_COUNT)
	mov %r9, %r11			/* the third argument */
	mov $1, %r9d			/* TMB_VISIT_NO_CALL */
	cmp AT(FRAME + FRAME_CALLS), %edi
	jae 1f
	mov $2, %r9d			/* TMB_VISIT_BUSY */
	xor %eax, %eax
	mov AT(FRAME + FRAME_ID), %ecx
	lock cmpxchg %ecx, AT(SHARED + SHARED_OWNER)
	jne 1f
	/* A prediction must not read the table beyond its end. */
	cmp AT(FRAME + FRAME_CALLS), %edi
	sbb %eax, %eax
	and %eax, %edi
	mov AT(SHARED + SHARED_ENDED), %rax
	mov %rax, AT(FRAME + FRAME_ENDED)
	lea AT(TABLE), %rax
	mov (%rax,%rdi,4), %eax
	lea AT(SERVICE), %r10
	add %r10, %rax
	mov %r8, %rdx
	mov %r11, %rcx
	lea AT(FRAME), %rdi
	call 2f
	mov %rax, %r8
	xor %r9d, %r9d
	movl $0, AT(SHARED + SHARED_OWNER)
1:
	xor %ebx, %ebx
	xor %ebp, %ebp
	xor %esi, %esi
	xor %edi, %edi
	xor %r10d, %r10d
	xor %r11d, %r11d
	xor %r12d, %r12d
	xor %r13d, %r13d
	xor %r14d, %r14d
	xor %r15d, %r15d
	pxor %xmm0, %xmm0
	pxor %xmm1, %xmm1
	pxor %xmm2, %xmm2
	pxor %xmm3, %xmm3
	pxor %xmm4, %xmm4
	pxor %xmm5, %xmm5
	pxor %xmm6, %xmm6
	pxor %xmm7, %xmm7
	pxor %xmm8, %xmm8
	pxor %xmm9, %xmm9
	pxor %xmm10, %xmm10
	pxor %xmm11, %xmm11
	pxor %xmm12, %xmm12
	pxor %xmm13, %xmm13
	pxor %xmm14, %xmm14
	pxor %xmm15, %xmm15
	xor %eax, %eax
	xor %edx, %edx
	.byte 0xb9			/* mov $index, %ecx */
	.globl tmb_door_index
tmb_door_index:
	.long 0
	.byte 0xe9			/* jmp to VMFUNC */
	.globl tmb_door_leave
tmb_door_leave:
	.long 0
	/* A jump to rax that no trained prediction leads elsewhere. */
2:	call 4f
3:	pause
	lfence
	jmp 3b
4:	mov %rax, (%rsp)
	.byte 0xc3
	.balign 4096, 0xcc
SYM_DATA_END(tmb_door)
