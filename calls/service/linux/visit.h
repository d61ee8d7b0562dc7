/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Visits: a thread of a client VM executes a service's code by VMFUNC. What the host's module, the guest's module and programs agree on.
 *
 * The host keeps for each vCPU of a client VM a list of EPT roots, which VMFUNC takes an index of. Entry 0 is the VM's own memory. A client process
 * that is bound has two more: its gate and its service, each with page tables of this module, in which nothing is mapped but what stands below.
 *
 * All of them lie in one GiB of linear addresses of the client's choice, at equal offsets in gate and service; the guest-physical address of the root
 * of the process' page tables leads to two read-only pages that map this GiB by one entry. So a process with another root has no translation there.
 *
 *	TMB_VISIT_GATE		the gate's code, execute-only; in the service's context the door's; in the client's own memory its own code
 *	TMB_VISIT_LIST		in the gate's context: the vCPU's list
 *	TMB_VISIT_SERVICE	in the service's context: the service, from here on
 *	TMB_VISIT_SHARED	struct tmb_visit_shared, TMB_VISIT_TABLE, the calls' offsets in the service
 *	TMB_VISIT_STACK		the stack of this vCPU, and struct tmb_visit_frame at TMB_VISIT_FRAME
 *	TMB_VISIT_WINDOW	the client's window
 *
 * The lowest byte of the service's entry in the list makes it invalid, except while a visit lasts: only the gate makes it valid, and VMFUNC with its
 * index follows in the gate at once. The entry's index is therefore a constant in the gate's code, whose bytes are harmless wherever a client enters:
 * those of the two displacements and of the index are no instruction in 64-bit mode (tests/gate.rs decodes from each byte).
 *
 * A call: the client executes VMFUNC with the gate's index right before TMB_VISIT_ENTER; the gate goes on into the door, which calls the service, and
 * leaves through the gate; the client goes on behind the gate's code at TMB_VISIT_EXIT_AT. If a visit ends early the client goes
 * on at TMB_VISIT_LANDING with a reason in rax.
 *
 *	at entry: eax 0, ecx the gate's index, rdi the call, rsi, r8, r9 its arguments
 *	at return: r8 the result, r9d TMB_VISIT_DONE or why there is none; all other registers are lost
 */
#ifndef TOMBOLO_VISIT_H
#define TOMBOLO_VISIT_H

#include <linux/types.h>

#define TMB_VISIT_VERSION 1
#define TMB_VISIT_NAME 48 /* bytes of a name, with its final zero */

/* Offsets in the GiB. Nothing lies in its first 2 MiB, which is all that page tables of other modes reach through these tables. */
#define TMB_VISIT_GATE 0x10000000
#define TMB_VISIT_LIST 0x16061000
#define TMB_VISIT_SERVICE 0x20000000
#define TMB_VISIT_SERVICE_MAX 0x08000000
#define TMB_VISIT_SHARED 0x2f000000
#define TMB_VISIT_TABLE 0x2f001000
#define TMB_VISIT_STACK 0x30000000
#define TMB_VISIT_STACK_SIZE 0x8000
#define TMB_VISIT_FRAME 0x30008000
#define TMB_VISIT_WINDOW 0x38000000
#define TMB_VISIT_WINDOW_SIZE 0x10000

#define TMB_VISIT_CALLS 1024

/* Indices in the list: a binding's gate, and its service by tmb_visit_service(). */
#define TMB_VISIT_BINDINGS 13
#define TMB_VISIT_GATE_INDEX 0x80
/* Bytes that are no instruction in 64-bit mode. */
#define TMB_VISIT_INDICES { 0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37, 0x3f, 0x60, 0x61 }

/* The low byte of an entry of the list: write-back, four levels; and one that is valid for no processor. */
#define TMB_VISIT_VALID 0x1e
#define TMB_VISIT_INVALID 0x06

/* The gate's code, in which only the index differs: movb $VALID, entry(%rip); movb $index, %cl; vmfunc */
#define TMB_VISIT_ENTER_CODE(index) { 0xc6, 0x05, 0x16, 0x07, 0x06, 0x06, TMB_VISIT_VALID, 0xb1, index, 0x0f, 0x01, 0xd4 }
#define TMB_VISIT_ENTER_SIZE 12
/* movb $INVALID, entry(%rip); xchg %eax, %ecx; xchg %eax, %edx; xchg %eax, %ecx; vmfunc */
#define TMB_VISIT_EXIT_CODE { 0xc6, 0x05, 0x06, 0x06, 0x06, 0x06, TMB_VISIT_INVALID, 0x91, 0x92, 0x91, 0x0f, 0x01, 0xd4 }
#define TMB_VISIT_EXIT_SIZE 13
#define TMB_VISIT_BETWEEN 0x110 /* bytes from the one to the other: the difference of their displacements */
#define TMB_VISIT_VMFUNC_SIZE 3

/* The offset of the gate's code in its page for this index: its displacement then leads to the index's entry of the list. */
#define TMB_VISIT_ENTER_BASE (TMB_VISIT_LIST - 0x06060716 - 7 - TMB_VISIT_GATE)
#define TMB_VISIT_ENTER(index) (TMB_VISIT_ENTER_BASE + 8 * (index))
#define TMB_VISIT_EXIT_AT(index) (TMB_VISIT_ENTER(index) + TMB_VISIT_BETWEEN)

/* The offset in the client's own page at which it goes on after a visit that ended early. */
#define TMB_VISIT_LANDING 0x40

/* r9d at return. */
#define TMB_VISIT_DONE 0
#define TMB_VISIT_NO_CALL 1
#define TMB_VISIT_BUSY 2 /* another visit is in the service: call again */
/* rax at the landing: one of these, or TMB_VISIT_EXIT_REASON plus VMX's basic exit reason. */
#define TMB_VISIT_TOO_LONG 0x100
#define TMB_VISIT_FAULT 0x101
#define TMB_VISIT_GONE 0x102
#define TMB_VISIT_EXIT_REASON 0x1000

/* Written by the door and the host; the service could, too, which harms only its own visits. */
struct tmb_visit_shared {
	__u32 owner; /* the frame whose visit is in the service; 0: none */
	__u32 pad;
	__u64 ended; /* visits that ended early in the service */
};

struct tmb_visit_frame {
	/* struct tombolo_visit */
	__u64 window;
	__u64 window_size;
	__u64 client;
	__u64 ended;
	/* the door's own */
	__u64 count; /* of visits */
	__u32 id;
	__u32 mxcsr;
	__u32 n_calls;
	__u32 pad;
};

/* The guest asks its host by VMCALL: rax TMB_VISIT_HYPERCALL, rbx the guest-physical address of the request, which lies in one page.
 * rax: 0 or a negative errno. */
#define TMB_VISIT_HYPERCALL 0x746d6276UL
#define TMB_VISIT_BIND 1
#define TMB_VISIT_UNBIND 2

struct tmb_visit_request {
	__u32 version;
	__u32 operation;
	__u64 root;   /* BIND: the guest-physical root of the page tables of the process in user mode */
	__u64 gate;   /* BIND: the linear address of TMB_VISIT_GATE */
	__u64 window; /* BIND: guest-physical, TMB_VISIT_WINDOW_SIZE bytes without a gap */
	char name[TMB_VISIT_NAME];
	__u32 binding;	 /* out; UNBIND: in */
	__u32 index;	 /* out: the service's entry */
	__u32 generation; /* out; UNBIND: in: tells a binding from an earlier one of the same number */
	__u32 pad;
};

/* /dev/tombolo-service in a guest. An open file is one binding; its window is mapped from offset 0. */
struct tmb_visit_bind {
	char name[TMB_VISIT_NAME];
	__u64 gate;
	__u32 binding; /* out */
	__u32 index;   /* out */
};
#define TMB_VISIT_IOC_BIND 0xc0407640 /* _IOWR('v', 0x40, struct tmb_visit_bind) */

/* /dev/tombolo-services on a host. An open file is one service, until it is closed. */
#define TMB_SERVICE_WRITE 1
#define TMB_SERVICE_EXECUTE 2

struct tmb_service_segment {
	__u64 at; /* multiples of the page size */
	__u64 size;
	__u64 bytes; /* address in the caller */
	__u32 flags;
	__u32 pad;
};

struct tmb_service_register {
	__u32 version;
	__u32 n_segments;
	__u32 n_calls;
	__u32 pad;
	__u64 segments; /* addresses in the caller */
	__u64 calls;	/* __u32 offsets in the service */
	char name[TMB_VISIT_NAME];
};

struct tmb_service_stat {
	__u64 bindings;
	__u64 ended; /* visits that ended early */
};
#define TMB_SERVICE_IOC_REGISTER 0x40507650 /* _IOW('v', 0x50, struct tmb_service_register) */
#define TMB_SERVICE_IOC_ADMIT 0x7651 /* _IO('v', 0x51); the argument: a descriptor of the VM (KVM_CREATE_VM) */
#define TMB_SERVICE_IOC_STAT 0x80107652 /* _IOR('v', 0x52, struct tmb_service_stat) */

#endif
