// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The hooks by which a client's vCPU enters and leaves visits. They are put into functions of kvm_intel by ftrace, as live patches are; KVM knows nothing of
 * visits. Only vCPUs of clients are touched.
 *
 * vmx_vcpu_run (before an entry): the VMCS has the list and the VMFUNC controls; entry 0 is KVM's EPT pointer; a visit that goes on has its own again.
 * vmx_handle_exit_irqoff (after an exit): the EPT pointer tells whether it left a visit. Then the guest's interrupts are off in the VMCS, so KVM holds
 *	back what it would inject, and asks for a window. If it did, entry 0 becomes invalid before the entry: the VMFUNC that ends the visit exits,
 *	and KVM injects.
 * vmx_handle_exit: exits of visits that KVM must not see, and the guest's requests, are handled here instead.
 * vmx_vcpu_put, vmx_vcpu_free: a VMCS is given back; a vCPU is gone.
 *
 * A visit ends early by any exit but a host's interrupt, an NMI or the timer: the client's thread goes on at the landing in its own memory, in user mode.
 */
#include <linux/ftrace.h>
#include <linux/hashtable.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/timekeeping.h>
#include <asm/vmx.h>

#include "host.h"

static unsigned int tmb_limit_us = 10000;
module_param_named(limit_us, tmb_limit_us, uint, 0644);
MODULE_PARM_DESC(limit_us, "the longest visit, in microseconds; it is looked at when an interrupt of the host arrives");

#define USER_CS 0x33
#define USER_SS 0x2b
#define USER_CODE 0xa0fb /* 64-bit code, DPL 3 */
#define USER_DATA 0xc0f3
#define FLAT 0xffffffff
#define NMI_BLOCKED 8
#define ENTRY_BLOCKED 3 /* by STI or MOV SS */

static DEFINE_HASHTABLE(tmb_visitors, 6);
static DEFINE_RAW_SPINLOCK(tmb_visitors_lock); /* taken with interrupts off */

static u64 tmb_vmread(unsigned long field)
{
	unsigned long value;

	asm volatile("vmread %1, %0" : "=r"(value) : "r"(field) : "cc");
	return value;
}

static void tmb_vmwrite(unsigned long field, u64 value)
{
	asm volatile("vmwrite %1, %0" : : "r"(field), "r"(value) : "cc");
}

/* Under RCU: interrupts are off, or the vCPU's thread calls, whose visitor lives as long as the vCPU. */
static struct tmb_visitor *tmb_visitor_of(struct kvm_vcpu *vcpu)
{
	struct tmb_visitor *v;

	hash_for_each_possible_rcu_notrace(tmb_visitors, v, hash, (unsigned long)vcpu)
		if (v->vcpu == vcpu)
			return v;
	return NULL;
}

static void tmb_forget_here(void *unused)
{
	struct {
		u64 pointer, zero;
	} all = { 0, 0 };

	/* No VM is left, and the CPU has left VMX operation: it forgot all when it did. */
	asm volatile("1: invept %0, %1\n2:" _ASM_EXTABLE(1b, 2b) : : "m"(all), "r"(2UL) : "cc", "memory");
}

void tmb_forget_translations(void)
{
	on_each_cpu(tmb_forget_here, NULL, 1);
}

/* Masks. */

static void tmb_mask(struct tmb_visitor *v)
{
	u64 flags = tmb_vmread(GUEST_RFLAGS);

	if (v->masked)
		return;
	v->masked = true;
	v->interrupts = flags & X86_EFLAGS_IF;
	tmb_vmwrite(GUEST_RFLAGS, flags & ~(u64)X86_EFLAGS_IF);
	tmb_vmwrite(GUEST_INTERRUPTIBILITY_INFO, tmb_vmread(GUEST_INTERRUPTIBILITY_INFO) | NMI_BLOCKED);
}

static void tmb_unmask(struct tmb_visitor *v)
{
	if (!v->masked)
		return;
	v->masked = false;
	if (v->interrupts)
		tmb_vmwrite(GUEST_RFLAGS, tmb_vmread(GUEST_RFLAGS) | X86_EFLAGS_IF);
	tmb_vmwrite(GUEST_INTERRUPTIBILITY_INFO, tmb_vmread(GUEST_INTERRUPTIBILITY_INFO) & ~(u64)NMI_BLOCKED);
	__clear_bit(VCPU_EXREG_RFLAGS, (unsigned long *)&v->vcpu->arch.regs_avail);
}

/* Ends of visits. The VMCS is loaded. */

static void tmb_set_register(struct kvm_vcpu *vcpu, int which, unsigned long value)
{
	vcpu->arch.regs[which] = value;
	__set_bit(which, (unsigned long *)&vcpu->arch.regs_avail);
	__set_bit(which, (unsigned long *)&vcpu->arch.regs_dirty);
}

/* The binding whose visit this is, if it is still there. */
static struct tmb_binding *tmb_visited(struct tmb_visitor *v)
{
	int i = v->binding;

	lockdep_assert_held(&v->client->lock);
	if (i < 0 || !v->contexts[i] || (v->visit != v->pointers[i][0] && v->visit != v->pointers[i][1]))
		return NULL;
	return v->client->bindings[i];
}

/* Back to the VM's own memory, with no service's entry valid, and nobody in the service. Returns whether the binding is still there. */
static bool tmb_leave(struct tmb_visitor *v)
{
	static const u8 indices[] = TMB_VISIT_INDICES;
	struct tmb_binding *binding;
	unsigned long flags;
	int i;

	raw_spin_lock_irqsave(&v->client->lock, flags);
	for (i = 0; i < TMB_VISIT_BINDINGS; i++) {
		u64 entry = READ_ONCE(v->list[indices[i]]);

		WRITE_ONCE(v->list[indices[i]], (entry & ~0xffULL) | TMB_VISIT_INVALID);
	}
	binding = tmb_visited(v);
	if (binding) {
		struct tmb_visit_frame *frame = page_address(v->contexts[v->binding]->frame);
		struct tmb_visit_shared *shared = page_address(binding->service->shared);

		/* The service can write both words; then it is its own visits that are one too many, or none. */
		if (cmpxchg(&shared->owner, READ_ONCE(frame->id), 0) == READ_ONCE(frame->id))
			WRITE_ONCE(shared->ended, shared->ended + 1);
		atomic64_inc(&binding->service->ended);
	}
	raw_spin_unlock_irqrestore(&v->client->lock, flags);
	tmb_vmwrite(EPT_POINTER, v->own);
	WRITE_ONCE(v->list[0], v->own);
	v->visiting = v->armed = false;
	return binding;
}

static void tmb_user_segment(unsigned long selector, unsigned long base, unsigned long limit, unsigned long rights, u16 value, u32 kind)
{
	tmb_vmwrite(selector, value);
	tmb_vmwrite(base, 0);
	tmb_vmwrite(limit, FLAT);
	tmb_vmwrite(rights, kind);
}

static void tmb_land(struct tmb_visitor *v, u64 gate, u32 reason)
{
	struct kvm_vcpu *vcpu = v->vcpu;

	if (!gate || !(tmb_vmread(VM_ENTRY_CONTROLS) & VM_ENTRY_IA32E_MODE)) {
		kvm_make_request(KVM_REQ_TRIPLE_FAULT, vcpu);
		return;
	}
	tmb_user_segment(GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_AR_BYTES, USER_CS, USER_CODE);
	tmb_user_segment(GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_AR_BYTES, USER_SS, USER_DATA);
	tmb_vmwrite(GUEST_RFLAGS, X86_EFLAGS_FIXED | X86_EFLAGS_IF);
	tmb_vmwrite(GUEST_INTERRUPTIBILITY_INFO, tmb_vmread(GUEST_INTERRUPTIBILITY_INFO) & ~(u64)(NMI_BLOCKED | ENTRY_BLOCKED));
	tmb_vmwrite(GUEST_PENDING_DBG_EXCEPTIONS, 0);
	__clear_bit(VCPU_EXREG_RFLAGS, (unsigned long *)&vcpu->arch.regs_avail);
	__clear_bit(VCPU_EXREG_SEGMENTS, (unsigned long *)&vcpu->arch.regs_avail);
	/* An exception that the service caused was never delivered; KVM would deliver it to the client now. Nothing else is under way in a visit. */
	vcpu->arch.exception.pending = vcpu->arch.exception.injected = false;
	vcpu->arch.interrupt.injected = false;
	vcpu->arch.nmi_injected = false;
	tmb_set_register(vcpu, VCPU_REGS_RIP, gate + TMB_VISIT_LANDING);
	tmb_set_register(vcpu, VCPU_REGS_RAX, reason);
}

static void tmb_end_visit(struct tmb_visitor *v)
{
	u32 reason = tmb_leave(v) ? v->end : TMB_VISIT_GONE;

	v->masked = false;
	v->end = 0;
	tmb_land(v, v->gate, reason);
}

/* The registers of the vCPU were set from outside, or KVM reset it: whatever it did in its visit, it is somewhere else now. */
static void tmb_drop_visit(struct tmb_visitor *v)
{
	tmb_leave(v);
	tmb_vmwrite(GUEST_INTERRUPTIBILITY_INFO, tmb_vmread(GUEST_INTERRUPTIBILITY_INFO) & ~(u64)NMI_BLOCKED);
	v->masked = false;
	v->end = 0;
}

/* The VMFUNC that ends a visit has exited, because an interrupt waits. */
static void tmb_finish_return(struct tmb_visitor *v)
{
	tmb_set_register(v->vcpu, VCPU_REGS_RIP, tmb_vmread(GUEST_RIP) + TMB_VISIT_VMFUNC_SIZE);
	tmb_vmwrite(EPT_POINTER, v->own);
	WRITE_ONCE(v->list[0], v->own);
	v->visiting = v->armed = false;
	tmb_unmask(v);
}

/* Before an entry. */

static void tmb_attach(struct tmb_visitor *v)
{
	u64 controls = tmb_vmread(SECONDARY_VM_EXEC_CONTROL);

	if (!(controls & SECONDARY_EXEC_ENABLE_VMFUNC)) {
		tmb_vmwrite(SECONDARY_VM_EXEC_CONTROL, controls | SECONDARY_EXEC_ENABLE_VMFUNC);
		tmb_vmwrite(VM_FUNCTION_CONTROL, 1);
		tmb_vmwrite(EPTP_LIST_ADDRESS, virt_to_phys(v->list));
	}
	v->attached = true;
}

static void tmb_detach(struct tmb_visitor *v)
{
	if (v->visiting) {
		v->end = TMB_VISIT_GONE;
		tmb_end_visit(v);
	}
	if (v->attached)
		tmb_vmwrite(SECONDARY_VM_EXEC_CONTROL, tmb_vmread(SECONDARY_VM_EXEC_CONTROL) & ~(u64)SECONDARY_EXEC_ENABLE_VMFUNC);
	WRITE_ONCE(v->attached, false);
}

static int tmb_binding_of(struct tmb_visitor *v, u64 pointer)
{
	int i;

	for (i = 0; i < TMB_VISIT_BINDINGS; i++)
		if (pointer == v->pointers[i][0] || pointer == v->pointers[i][1])
			return i;
	return -1;
}

static void tmb_go_on(struct tmb_visitor *v)
{
	u64 windows = tmb_vmread(CPU_BASED_VM_EXEC_CONTROL) & (CPU_BASED_INTR_WINDOW_EXITING | CPU_BASED_NMI_WINDOW_EXITING);

	tmb_vmwrite(EPT_POINTER, v->visit);
	if (windows) {
		WRITE_ONCE(v->list[0], 0);
		v->armed = true;
		return;
	}
	tmb_unmask(v);
	WRITE_ONCE(v->list[0], v->own);
	v->visiting = v->armed = false;
}

static bool tmb_gone(struct tmb_visitor *v)
{
	bool gone;

	raw_spin_lock(&v->client->lock);
	gone = !tmb_visited(v);
	raw_spin_unlock(&v->client->lock);
	return gone;
}

static void notrace tmb_before_entry(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	struct kvm_vcpu *vcpu = (void *)ftrace_regs_get_argument(regs, 0);
	struct tmb_visitor *v = tmb_visitor_of(vcpu);
	u64 pointer;

	if (!v || vcpu->arch.hflags & HF_GUEST_MASK)
		return;
	if (READ_ONCE(v->detach)) {
		tmb_detach(v);
		return;
	}
	pointer = tmb_vmread(EPT_POINTER);
	if (!v->visiting && tmb_binding_of(v, pointer) >= 0) {
		/* KVM enters again without having looked at the exit. */
		v->visiting = true;
		v->visit = pointer;
		v->binding = tmb_binding_of(v, pointer);
		v->gate = v->gates[v->binding];
		v->end = 0;
		tmb_mask(v);
	} else if (!v->visiting || pointer != v->visit) {
		v->own = pointer;
	}
	tmb_attach(v);
	if (!v->visiting)
		WRITE_ONCE(v->list[0], v->own);
	else if (test_bit(VCPU_REGS_RIP, (unsigned long *)&vcpu->arch.regs_dirty))
		tmb_drop_visit(v);
	else if (v->end || tmb_gone(v))
		tmb_end_visit(v);
	else
		tmb_go_on(v);
}

/* After an exit. */

/* Returns whether the visit that the exit left has lasted too long. Only its door changes `count`. */
static bool tmb_too_long(struct tmb_visitor *v)
{
	u64 count = 0, now = ktime_get_ns();

	raw_spin_lock(&v->client->lock);
	if (tmb_visited(v))
		count = READ_ONCE(((struct tmb_visit_frame *)page_address(v->contexts[v->binding]->frame))->count);
	raw_spin_unlock(&v->client->lock);
	if (v->counted == v->binding && v->count == count)
		return now - v->since > (u64)READ_ONCE(tmb_limit_us) * NSEC_PER_USEC;
	v->counted = v->binding;
	v->count = count;
	v->since = now;
	return false;
}

static bool tmb_is_return(struct tmb_visitor *v, u32 reason)
{
	unsigned long *regs = v->vcpu->arch.regs;
	static const u8 indices[] = TMB_VISIT_INDICES;

	return reason == EXIT_REASON_VMFUNC && v->armed && v->binding >= 0 && v->visit == v->pointers[v->binding][0] &&
	       !(u32)regs[VCPU_REGS_RAX] && !(u32)regs[VCPU_REGS_RCX] &&
	       tmb_vmread(GUEST_RIP) == v->gate + TMB_VISIT_EXIT_AT(indices[v->binding]) + TMB_VISIT_EXIT_SIZE - TMB_VISIT_VMFUNC_SIZE;
}

static bool tmb_is_hosts(u32 reason)
{
	if (reason == EXIT_REASON_EXCEPTION_NMI)
		return (tmb_vmread(VM_EXIT_INTR_INFO) & INTR_INFO_INTR_TYPE_MASK) == INTR_TYPE_NMI_INTR;
	return reason == EXIT_REASON_EXTERNAL_INTERRUPT || reason == EXIT_REASON_PREEMPTION_TIMER;
}

static bool tmb_is_fault(u32 reason)
{
	return reason == EXIT_REASON_EXCEPTION_NMI || reason == EXIT_REASON_EPT_VIOLATION || reason == EXIT_REASON_EPT_MISCONFIG ||
	       reason == EXIT_REASON_TRIPLE_FAULT;
}

static void notrace tmb_after_exit(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	struct kvm_vcpu *vcpu = (void *)ftrace_regs_get_argument(regs, 0);
	struct tmb_visitor *v = tmb_visitor_of(vcpu);
	u32 reason;
	u64 pointer;

	if (!v || vcpu->arch.hflags & HF_GUEST_MASK || !v->attached)
		return;
	v->replaced = false;
	pointer = tmb_vmread(EPT_POINTER);
	if (pointer == v->own) {
		/* A return that no interrupt held up: tmb_go_on() had nothing to hold. */
		v->visiting = v->armed = false;
		return;
	}
	reason = tmb_vmread(VM_EXIT_REASON);
	v->visiting = true;
	v->visit = pointer;
	v->binding = tmb_binding_of(v, pointer);
	v->gate = v->binding < 0 ? 0 : v->gates[v->binding];
	tmb_mask(v);
	if (reason & VMX_EXIT_REASONS_FAILED_VMENTRY)
		return;
	reason = (u16)reason;
	if (tmb_is_hosts(reason)) {
		v->end = tmb_too_long(v) ? TMB_VISIT_TOO_LONG : 0;
		return;
	}
	v->replaced = true;
	v->end = tmb_is_return(v, reason) ? 0 : tmb_is_fault(reason) ? TMB_VISIT_FAULT : TMB_VISIT_EXIT_REASON + reason;
}

/* Posted interrupts would be delivered into a visit; the contexts have page tables of four levels. */
static bool tmb_fits(void)
{
	return !(tmb_vmread(SECONDARY_VM_EXEC_CONTROL) & SECONDARY_EXEC_VIRTUAL_INTR_DELIVERY) && !(tmb_vmread(GUEST_CR4) & X86_CR4_LA57);
}

/* In place of vmx_handle_exit: 1 enters the guest again. */

static int tmb_visit_exited(struct kvm_vcpu *vcpu)
{
	struct tmb_visitor *v = tmb_visitor_of(vcpu);

	v->replaced = false;
	if (v->end)
		tmb_end_visit(v);
	else
		tmb_finish_return(v);
	return 1;
}

/* VMFUNC in the VM's own memory, with an index that leads nowhere. KVM expects none, and warns. */
static int tmb_undefined(struct kvm_vcpu *vcpu)
{
	kvm_queue_exception(vcpu, UD_VECTOR);
	return 1;
}

static int tmb_guest_asks(struct kvm_vcpu *vcpu)
{
	struct tmb_visitor *v = tmb_visitor_of(vcpu);
	struct tmb_visit_request request;
	gpa_t at = vcpu->arch.regs[VCPU_REGS_RBX];
	long r = -EFAULT;

	if (offset_in_page(at) + sizeof(request) <= PAGE_SIZE && !kvm_read_guest(vcpu->kvm, at, &request, sizeof(request))) {
		request.name[TMB_VISIT_NAME - 1] = 0;
		r = -EINVAL;
		if (request.version == TMB_VISIT_VERSION && request.operation == TMB_VISIT_BIND)
			r = tmb_fits() ? tmb_bind(v, &request) : -EOPNOTSUPP;
		else if (request.version == TMB_VISIT_VERSION && request.operation == TMB_VISIT_UNBIND)
			r = tmb_unbind(v, &request);
		if (!r && kvm_write_guest(vcpu->kvm, at, &request, sizeof(request)))
			r = -EFAULT;
	}
	tmb_set_register(vcpu, VCPU_REGS_RAX, r);
	return kvm_skip_emulated_instruction(vcpu);
}

static void notrace tmb_at_handling(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	struct kvm_vcpu *vcpu = (void *)ftrace_regs_get_argument(regs, 0);
	struct tmb_visitor *v = tmb_visitor_of(vcpu);

	if (!v || vcpu->arch.hflags & HF_GUEST_MASK)
		return;
	if (v->replaced)
		ftrace_regs_set_instruction_pointer(regs, (unsigned long)tmb_visit_exited);
	else if (!v->visiting && (u32)tmb_vmread(VM_EXIT_REASON) == EXIT_REASON_VMFUNC)
		ftrace_regs_set_instruction_pointer(regs, (unsigned long)tmb_undefined);
	else if (!v->visiting && (u32)tmb_vmread(VM_EXIT_REASON) == EXIT_REASON_VMCALL && (tmb_vmread(GUEST_SS_AR_BYTES) >> 5 & 3) == 0 &&
		 vcpu->arch.regs[VCPU_REGS_RAX] == TMB_VISIT_HYPERCALL)
		ftrace_regs_set_instruction_pointer(regs, (unsigned long)tmb_guest_asks);
}

/* A VMCS is given back, a vCPU is gone. */

static void notrace tmb_before_put(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	struct kvm_vcpu *vcpu = (void *)ftrace_regs_get_argument(regs, 0);
	struct tmb_visitor *v = tmb_visitor_of(vcpu);

	if (v && READ_ONCE(v->detach) && !(vcpu->arch.hflags & HF_GUEST_MASK))
		tmb_detach(v);
}

static void notrace tmb_at_free(unsigned long ip, unsigned long parent, struct ftrace_ops *ops, struct ftrace_regs *regs)
{
	struct kvm_vcpu *vcpu = (void *)ftrace_regs_get_argument(regs, 0);
	struct tmb_visitor *v;
	unsigned long flags;

	raw_spin_lock_irqsave(&tmb_visitors_lock, flags);
	v = tmb_visitor_of(vcpu);
	if (v) {
		hash_del_rcu(&v->hash);
		WRITE_ONCE(v->vcpu, NULL);
		WRITE_ONCE(v->attached, false);
	}
	raw_spin_unlock_irqrestore(&tmb_visitors_lock, flags);
	if (v)
		tmb_vcpu_freed();
}

void tmb_visitor_add(struct tmb_visitor *v)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&tmb_visitors_lock, flags);
	hash_add_rcu(tmb_visitors, &v->hash, (unsigned long)v->vcpu);
	raw_spin_unlock_irqrestore(&tmb_visitors_lock, flags);
}

void tmb_visitor_remove(struct tmb_visitor *v)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&tmb_visitors_lock, flags);
	if (v->vcpu)
		hash_del_rcu(&v->hash);
	v->vcpu = NULL;
	raw_spin_unlock_irqrestore(&tmb_visitors_lock, flags);
}

/* The client's VM with a reference; NULL: it is being destroyed, and none of its vCPUs runs. */
static struct kvm *tmb_vm_of(struct tmb_client *client)
{
	struct kvm *kvm = NULL;
	unsigned long flags;
	unsigned int i;

	raw_spin_lock_irqsave(&tmb_visitors_lock, flags);
	for (i = 0; i < client->n_visitors && !kvm; i++)
		if (client->visitors[i].vcpu && kvm_get_kvm_safe(client->kvm))
			kvm = client->kvm;
	raw_spin_unlock_irqrestore(&tmb_visitors_lock, flags);
	return kvm;
}

void tmb_client_stop(struct tmb_client *client)
{
	struct kvm *kvm = tmb_vm_of(client);

	if (!kvm)
		return;
	kvm_make_all_cpus_request(kvm, KVM_REQ_OUTSIDE_GUEST_MODE);
	kvm_put_kvm(kvm);
}

static bool tmb_detach_one(struct tmb_visitor *v)
{
	struct kvm_vcpu *vcpu = v->vcpu;

	if (!vcpu || !READ_ONCE(v->attached))
		return true;
	/* Either no thread runs it, and its VMCS is loaded and put here; or one does, and puts or enters when it is woken. */
	if (mutex_trylock(&vcpu->mutex)) {
		vcpu_load(vcpu);
		vcpu_put(vcpu);
		mutex_unlock(&vcpu->mutex);
	} else {
		kvm_make_request(KVM_REQ_UNBLOCK, vcpu);
		kvm_vcpu_kick(vcpu);
	}
	return !READ_ONCE(v->attached);
}

void tmb_client_detach(struct tmb_client *client)
{
	struct kvm *kvm = tmb_vm_of(client);
	unsigned int i;

	if (!kvm)
		return;
	for (i = 0; i < client->n_visitors; i++) {
		WRITE_ONCE(client->visitors[i].detach, true);
		while (!tmb_detach_one(&client->visitors[i]))
			schedule_timeout_uninterruptible(1);
	}
	kvm_put_kvm(kvm);
}

/* The tmb_hooks. */

static struct {
	const char *name;
	struct ftrace_ops ops;
	bool filtered, set;
} tmb_hooks[] = {
	{ "kvm_intel:vmx_vcpu_run", { .func = tmb_before_entry, .flags = FTRACE_OPS_FL_PERMANENT } },
	{ "kvm_intel:vmx_handle_exit_irqoff", { .func = tmb_after_exit, .flags = FTRACE_OPS_FL_PERMANENT } },
	{ "kvm_intel:vmx_handle_exit", { .func = tmb_at_handling, .flags = FTRACE_OPS_FL_PERMANENT | FTRACE_OPS_FL_IPMODIFY } },
	{ "kvm_intel:vmx_vcpu_put", { .func = tmb_before_put, .flags = FTRACE_OPS_FL_PERMANENT } },
	{ "kvm_intel:vmx_vcpu_free", { .func = tmb_at_free, .flags = FTRACE_OPS_FL_PERMANENT } },
};

static unsigned long tmb_address_of(const char *name)
{
	struct kprobe probe = { .symbol_name = name };
	unsigned long address;

	if (register_kprobe(&probe))
		return 0;
	address = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	return address;
}

int tmb_hooks_set(void)
{
	int i, r = 0;

	for (i = 0; i < ARRAY_SIZE(tmb_hooks) && !r; i++) {
		unsigned long address = tmb_address_of(tmb_hooks[i].name);

		r = address ? ftrace_set_filter_ip(&tmb_hooks[i].ops, address, 0, 0) : -ENOENT;
		tmb_hooks[i].filtered = !r;
		if (!r)
			r = register_ftrace_function(&tmb_hooks[i].ops);
		tmb_hooks[i].set = !r && tmb_hooks[i].filtered;
		if (r)
			pr_err("tombolo: %s can't be hooked: %d; this module needs kvm_intel of Linux 6.12, loaded, and ftrace\n", tmb_hooks[i].name, r);
	}
	if (r)
		tmb_hooks_unset();
	return r;
}

void tmb_hooks_unset(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(tmb_hooks); i++) {
		if (tmb_hooks[i].set)
			unregister_ftrace_function(&tmb_hooks[i].ops);
		if (tmb_hooks[i].filtered)
			ftrace_free_filter(&tmb_hooks[i].ops);
		tmb_hooks[i].set = tmb_hooks[i].filtered = false;
	}
	synchronize_rcu();
}
