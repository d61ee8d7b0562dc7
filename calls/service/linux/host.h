/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The host's module: services and their clients (host.c), contexts (context.c, door.S), entries and exits of vCPUs (visit.c). */
#ifndef TOMBOLO_SERVICE_HOST_H
#define TOMBOLO_SERVICE_HOST_H

#include <linux/kvm_host.h>
#include <linux/list.h>
#include <linux/mutex.h>

#include "visit.h"

/* Guest-physical addresses in the contexts: the GiB, the second level of the page tables, and where nothing is mapped. A 32-bit mode reaches none. */
#define TMB_GPA_GIB 0x2000000000ULL
#define TMB_GPA_LEVEL2 0x2080000000ULL
#define TMB_GPA_HOLE 0x20c0000000ULL

#define TMB_WINDOW_PAGES (TMB_VISIT_WINDOW_SIZE / PAGE_SIZE)
#define TMB_STACK_PAGES (TMB_VISIT_STACK_SIZE / PAGE_SIZE)

struct tmb_segment {
	u64 at;
	u32 flags;
	unsigned long n;
	struct page **pages;
};

struct tmb_service {
	struct list_head link;
	struct list_head bindings;
	struct list_head admissions;
	char name[TMB_VISIT_NAME];
	u32 n_segments, n_calls;
	struct tmb_segment *segments;
	struct page *shared, *table;
	u64 n_bindings;
	atomic64_t ended;
};

/* Page tables for EPT; the pages that they map belong to others. */
struct tmb_ept {
	struct list_head tables;
	u64 *root;
	u64 pointer;
};

/* A binding as one vCPU has it: only the list and the stack differ from another vCPU's. */
struct tmb_context {
	struct tmb_ept gate, service;
	struct page *stack[TMB_STACK_PAGES];
	struct page *frame;
};

struct tmb_binding {
	struct list_head link; /* in its service */
	struct tmb_service *service;
	struct tmb_client *client;
	u32 number, index, generation;
	u64 root, gate;
	struct page *level1, *level2, *gate_code, *door;
	struct page *window[TMB_WINDOW_PAGES];
	struct tmb_context *contexts; /* of each visitor of the client */
};

/* A vCPU of a client. What follows `own` belongs to the thread that has the vCPU's VMCS loaded. */
struct tmb_visitor {
	struct hlist_node hash;
	struct kvm_vcpu *vcpu; /* NULL: freed by KVM */
	struct tmb_client *client;
	u64 *list;
	/* Under the client's lock. The pointers and gates of bindings that are gone stay, so that their visits are known. */
	struct tmb_context *contexts[TMB_VISIT_BINDINGS];
	u64 pointers[TMB_VISIT_BINDINGS][2]; /* gate, service */
	u64 gates[TMB_VISIT_BINDINGS];
	bool detach; /* give the VMCS back as it was */
	bool attached; /* the VMCS has the list */
	u64 own; /* KVM's EPT pointer at the last entry */
	bool visiting;
	bool masked; /* interrupts are; `interrupts` says whether they were on */
	bool interrupts;
	bool armed; /* the return to the VM's own memory exits */
	bool replaced; /* KVM must not see this exit */
	int binding; /* -1: none that is known */
	u64 visit; /* the EPT pointer of the visit */
	u64 gate;
	u32 end; /* a reason to end the visit */
	u64 count, since; /* of the visit that an exit found last */
	int counted;
};

/* A VM. */
struct tmb_client {
	struct list_head link;
	struct list_head admissions;
	struct kvm *kvm; /* valid as long as a visitor has its vCPU */
	raw_spinlock_t lock; /* taken with interrupts off */
	struct tmb_binding *bindings[TMB_VISIT_BINDINGS];
	unsigned int n_visitors;
	struct tmb_visitor visitors[];
};

struct tmb_admission {
	struct list_head of_service, of_client;
	struct tmb_service *service;
	struct tmb_client *client;
};

/* context.c */
int tmb_contexts_make(struct tmb_binding *binding);
void tmb_contexts_free(struct tmb_binding *binding);
extern const char tmb_door[], tmb_door_index[], tmb_door_leave[];

/* visit.c */
int tmb_hooks_set(void);
void tmb_hooks_unset(void);
void tmb_visitor_add(struct tmb_visitor *visitor);
void tmb_visitor_remove(struct tmb_visitor *visitor);
/* Returns with no CPU in guest mode that entered before the call. */
void tmb_client_stop(struct tmb_client *client);
/* Returns when no VMCS of the client has a list. */
void tmb_client_detach(struct tmb_client *client);
void tmb_forget_translations(void);

/* host.c; called by a vCPU's thread that executed VMCALL */
long tmb_bind(struct tmb_visitor *visitor, struct tmb_visit_request *request);
long tmb_unbind(struct tmb_visitor *visitor, const struct tmb_visit_request *request);
void tmb_vcpu_freed(void);

#endif
