// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tombolo_service_host.ko: services that client VMs visit, beside stock KVM (visit.h). An open file of /dev/tombolo-services is a service: the module has a
 * copy of its code and data in pages of its own. Its owner admits VMs; a process of an admitted VM is bound by its kernel's request (visit.c). When the
 * file is closed, also by its owner's death, its bindings end, and VMs that no service admits any more get back the VMCS that KVM made.
 *
 * `tmb_lock` covers all lists. A vCPU's thread only tries to take it, since its holder may wait for vCPUs.
 */
#include <linux/capability.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>
#include <asm/msr.h>
#include <asm/vmx.h>

#include "host.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0) || LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#error "tombolo_service_host knows the KVM of Linux 6.12 and no other"
#endif

#define SEGMENTS_MAX 16
#define MSR_VMFUNC 0x491
#define LIST_ENTRIES 512
/* A service's entry of the list without a service: no processor has such an address, whatever the gate makes of the lowest byte. */
#define ENTRY_OF_NONE (0xfff0000000000000ULL | TMB_VISIT_INVALID)

static DEFINE_MUTEX(tmb_lock);
static LIST_HEAD(tmb_services);
static LIST_HEAD(tmb_clients);
static const u8 tmb_indices[TMB_VISIT_BINDINGS] = TMB_VISIT_INDICES;

/* Bindings. */

static void tmb_unpin(struct tmb_binding *binding)
{
	int i;

	for (i = 0; i < TMB_WINDOW_PAGES; i++)
		if (binding->window[i])
			unpin_user_page(binding->window[i]);
}

static void tmb_free_binding(struct tmb_binding *binding)
{
	tmb_contexts_free(binding);
	tmb_unpin(binding);
	kfree(binding);
}

static void tmb_end_binding(struct tmb_binding *binding)
{
	struct tmb_client *client = binding->client;
	unsigned long flags;
	unsigned int i;

	lockdep_assert_held(&tmb_lock);
	raw_spin_lock_irqsave(&client->lock, flags);
	client->bindings[binding->number] = NULL;
	for (i = 0; i < client->n_visitors; i++) {
		struct tmb_visitor *v = &client->visitors[i];

		WRITE_ONCE(v->list[TMB_VISIT_GATE_INDEX + binding->number], 0);
		WRITE_ONCE(v->list[binding->index], ENTRY_OF_NONE);
		v->contexts[binding->number] = NULL;
	}
	raw_spin_unlock_irqrestore(&client->lock, flags);
	tmb_client_stop(client);
	tmb_forget_translations();
	list_del(&binding->link);
	binding->service->n_bindings--;
	tmb_free_binding(binding);
}

static int tmb_pin_window(struct tmb_visitor *v, struct tmb_binding *binding, u64 at)
{
	int i;

	if (at & ~PAGE_MASK)
		return -EINVAL;
	for (i = 0; i < TMB_WINDOW_PAGES; i++) {
		unsigned long address = gfn_to_hva(v->vcpu->kvm, (at >> PAGE_SHIFT) + i);

		if (kvm_is_error_hva(address) || pin_user_pages_fast(address, 1, FOLL_WRITE | FOLL_LONGTERM, &binding->window[i]) != 1) {
			binding->window[i] = NULL;
			return -EFAULT;
		}
	}
	return 0;
}

static struct tmb_service *tmb_service_for(struct tmb_client *client, const char *name)
{
	struct tmb_admission *a;

	list_for_each_entry(a, &client->admissions, of_client)
		if (!strcmp(a->service->name, name))
			return a->service;
	return NULL;
}

static void tmb_publish(struct tmb_binding *binding)
{
	struct tmb_client *client = binding->client;
	u32 k = binding->number;
	unsigned long flags;
	unsigned int i;

	raw_spin_lock_irqsave(&client->lock, flags);
	client->bindings[k] = binding;
	for (i = 0; i < client->n_visitors; i++) {
		struct tmb_visitor *v = &client->visitors[i];
		struct tmb_context *context = &binding->contexts[i];

		v->contexts[k] = context;
		v->pointers[k][0] = context->gate.pointer;
		v->pointers[k][1] = context->service.pointer;
		v->gates[k] = binding->gate;
		WRITE_ONCE(v->list[binding->index], (context->service.pointer & ~0xffULL) | TMB_VISIT_INVALID);
		WRITE_ONCE(v->list[TMB_VISIT_GATE_INDEX + k], context->gate.pointer);
	}
	raw_spin_unlock_irqrestore(&client->lock, flags);
}

/* The GiB must not be one that a mode with short linear addresses reaches, and the root of the client's page tables none of the contexts' own addresses. */
static bool tmb_makes_sense(const struct tmb_visit_request *r)
{
	return r->gate % SZ_1G == TMB_VISIT_GATE && r->gate >> 39 > 0 && r->gate >> 47 == 0 && r->root % PAGE_SIZE == 0 && r->root < TMB_GPA_GIB;
}

static long tmb_bind_locked(struct tmb_visitor *v, struct tmb_visit_request *request)
{
	static u32 generations;
	struct tmb_client *client = v->client;
	struct tmb_service *service = tmb_service_for(client, request->name);
	struct tmb_binding *binding;
	int k, r;

	if (!service)
		return -ENOENT;
	if (!tmb_makes_sense(request))
		return -EINVAL;
	for (k = 0; k < TMB_VISIT_BINDINGS && client->bindings[k]; k++)
		;
	if (k == TMB_VISIT_BINDINGS)
		return -EUSERS;
	binding = kzalloc(sizeof(*binding), GFP_KERNEL_ACCOUNT);
	if (!binding)
		return -ENOMEM;
	binding->service = service;
	binding->client = client;
	binding->number = k;
	binding->index = tmb_indices[k];
	binding->generation = ++generations ?: ++generations;
	binding->root = request->root;
	binding->gate = request->gate;
	r = tmb_pin_window(v, binding, request->window);
	if (!r)
		r = tmb_contexts_make(binding);
	if (r) {
		tmb_free_binding(binding);
		return r;
	}
	list_add(&binding->link, &service->bindings);
	service->n_bindings++;
	tmb_publish(binding);
	request->binding = k;
	request->index = binding->index;
	request->generation = binding->generation;
	return 0;
}

long tmb_bind(struct tmb_visitor *v, struct tmb_visit_request *request)
{
	long r;

	if (!mutex_trylock(&tmb_lock))
		return -EAGAIN;
	r = tmb_bind_locked(v, request);
	mutex_unlock(&tmb_lock);
	return r;
}

long tmb_unbind(struct tmb_visitor *v, const struct tmb_visit_request *request)
{
	struct tmb_binding *binding;
	long r = -ENOENT;

	if (request->binding >= TMB_VISIT_BINDINGS)
		return -EINVAL;
	if (!mutex_trylock(&tmb_lock))
		return -EAGAIN;
	binding = v->client->bindings[request->binding];
	if (binding && binding->generation == request->generation) {
		tmb_end_binding(binding);
		r = 0;
	}
	mutex_unlock(&tmb_lock);
	return r;
}

/* Clients. */

static void tmb_end_client(struct tmb_client *client)
{
	unsigned int i;

	for (i = 0; i < TMB_VISIT_BINDINGS; i++)
		if (client->bindings[i])
			tmb_end_binding(client->bindings[i]);
	tmb_client_detach(client);
	for (i = 0; i < client->n_visitors; i++)
		tmb_visitor_remove(&client->visitors[i]);
	synchronize_rcu();
	for (i = 0; i < client->n_visitors; i++)
		free_page((unsigned long)client->visitors[i].list);
	list_del(&client->link);
	kvfree(client);
}

static void tmb_end_admission(struct tmb_admission *a)
{
	struct tmb_client *client = a->client;

	list_del(&a->of_service);
	list_del(&a->of_client);
	kfree(a);
	if (list_empty(&client->admissions))
		tmb_end_client(client);
}

static void tmb_reap(struct work_struct *work)
{
	struct tmb_client *client, *next;

	mutex_lock(&tmb_lock);
	list_for_each_entry_safe(client, next, &tmb_clients, link) {
		unsigned int i, left = 0;
		bool last;

		for (i = 0; i < client->n_visitors; i++)
			left += READ_ONCE(client->visitors[i].vcpu) != NULL;
		if (left)
			continue;
		/* The last of them ends the client. */
		do {
			last = list_is_singular(&client->admissions);
			tmb_end_admission(list_first_entry(&client->admissions, struct tmb_admission, of_client));
		} while (!last);
	}
	mutex_unlock(&tmb_lock);
}
static DECLARE_WORK(tmb_reaping, tmb_reap);

void tmb_vcpu_freed(void)
{
	schedule_work(&tmb_reaping);
}

static u64 *tmb_new_list(void)
{
	u64 *list = (u64 *)get_zeroed_page(GFP_KERNEL_ACCOUNT);
	int i;

	for (i = 0; list && i < TMB_VISIT_BINDINGS; i++)
		list[tmb_indices[i]] = ENTRY_OF_NONE;
	return list;
}

static struct tmb_client *tmb_new_client(struct kvm *kvm)
{
	unsigned int n = atomic_read(&kvm->online_vcpus), i;
	struct tmb_client *client = kvzalloc(struct_size(client, visitors, n), GFP_KERNEL_ACCOUNT);

	if (!client || !n) {
		kvfree(client);
		return ERR_PTR(n ? -ENOMEM : -ENXIO);
	}
	INIT_LIST_HEAD(&client->admissions);
	raw_spin_lock_init(&client->lock);
	client->kvm = kvm;
	client->n_visitors = n;
	for (i = 0; i < n; i++) {
		client->visitors[i].list = tmb_new_list();
		if (!client->visitors[i].list)
			goto no_memory;
	}
	list_add(&client->link, &tmb_clients);
	for (i = 0; i < n; i++) {
		struct tmb_visitor *v = &client->visitors[i];

		v->client = client;
		v->vcpu = kvm_get_vcpu(kvm, i);
		v->binding = v->counted = -1;
		tmb_visitor_add(v);
	}
	return client;
no_memory:
	for (i = 0; i < n; i++)
		free_page((unsigned long)client->visitors[i].list);
	kvfree(client);
	return ERR_PTR(-ENOMEM);
}

static struct tmb_client *tmb_client_of(struct kvm *kvm)
{
	struct tmb_client *client;

	list_for_each_entry(client, &tmb_clients, link)
		if (client->kvm == kvm && READ_ONCE(client->visitors[0].vcpu))
			return client;
	return tmb_new_client(kvm);
}

static long tmb_admit(struct tmb_service *service, int fd)
{
	struct file *file = fget(fd);
	struct tmb_client *client;
	struct tmb_admission *a;
	long r = 0;

	if (!file)
		return -EBADF;
	if (!file_is_kvm(file)) {
		fput(file);
		return -EINVAL;
	}
	a = kzalloc(sizeof(*a), GFP_KERNEL_ACCOUNT);
	client = a ? tmb_client_of(file->private_data) : ERR_PTR(-ENOMEM);
	if (IS_ERR(client)) {
		r = PTR_ERR(client);
	} else if (tmb_service_for(client, service->name)) {
		r = -EEXIST;
	} else {
		a->service = service;
		a->client = client;
		list_add(&a->of_service, &service->admissions);
		list_add(&a->of_client, &client->admissions);
	}
	if (r)
		kfree(a);
	fput(file);
	return r;
}

/* Services. */

static void tmb_free_pages_of(struct tmb_segment *s)
{
	unsigned long i;

	for (i = 0; s->pages && i < s->n; i++)
		if (s->pages[i])
			__free_page(s->pages[i]);
	kvfree(s->pages);
}

static void tmb_free_service(struct tmb_service *service)
{
	unsigned int i;

	for (i = 0; service->segments && i < service->n_segments; i++)
		tmb_free_pages_of(&service->segments[i]);
	kfree(service->segments);
	if (service->shared)
		__free_page(service->shared);
	if (service->table)
		__free_page(service->table);
	kfree(service);
}

/* Bytes by which a service could leave its context elsewhere than through the door, or change its client's address space. */
static bool tmb_forbidden(const u8 *b)
{
	return b[0] == 0x0f && ((b[1] == 0x01 && (b[2] == 0xd4 || b[2] == 0xef)) || (b[1] == 0xae && b[2] >= 0xd0 && b[2] <= 0xdf));
}

/* The bytes of a segment one after the other; those of neighbours make one run of code, so all executable segments are looked at as one. */
static int tmb_check_code(struct tmb_service *service)
{
	u8 last[3] = { 0 };
	unsigned int i;
	unsigned long p;
	int at;

	for (i = 0; i < service->n_segments; i++) {
		struct tmb_segment *s = &service->segments[i];

		if (!(s->flags & TMB_SERVICE_EXECUTE))
			continue;
		for (p = 0; p < s->n; p++) {
			const u8 *bytes = page_address(s->pages[p]);

			for (at = 0; at < PAGE_SIZE; at++) {
				last[0] = last[1];
				last[1] = last[2];
				last[2] = bytes[at];
				if (tmb_forbidden(last))
					return -ENOEXEC;
			}
			cond_resched();
		}
	}
	return 0;
}

static int tmb_take_segment(struct tmb_segment *s, const struct tmb_service_segment *from, u64 after)
{
	unsigned long i;

	if (from->at % PAGE_SIZE || from->size % PAGE_SIZE || !from->size || from->at < after || from->at > TMB_VISIT_SERVICE_MAX ||
	    from->size > TMB_VISIT_SERVICE_MAX - from->at || from->flags & ~(TMB_SERVICE_WRITE | TMB_SERVICE_EXECUTE) ||
	    from->flags == (TMB_SERVICE_WRITE | TMB_SERVICE_EXECUTE))
		return -EINVAL;
	s->at = from->at;
	s->flags = from->flags;
	s->n = from->size / PAGE_SIZE;
	s->pages = kvcalloc(s->n, sizeof(*s->pages), GFP_KERNEL_ACCOUNT);
	if (!s->pages)
		return -ENOMEM;
	for (i = 0; i < s->n; i++) {
		s->pages[i] = alloc_page(GFP_KERNEL_ACCOUNT);
		if (!s->pages[i])
			return -ENOMEM;
		if (copy_from_user(page_address(s->pages[i]), u64_to_user_ptr(from->bytes + i * PAGE_SIZE), PAGE_SIZE))
			return -EFAULT;
	}
	return 0;
}

static int tmb_take_table(struct tmb_service *service, u64 calls)
{
	u32 *table = page_address(service->table);
	u32 i, j;

	if (copy_from_user(table, u64_to_user_ptr(calls), service->n_calls * sizeof(*table)))
		return -EFAULT;
	for (i = 0; i < service->n_calls; i++) {
		for (j = 0; j < service->n_segments; j++) {
			struct tmb_segment *s = &service->segments[j];

			if (s->flags & TMB_SERVICE_EXECUTE && table[i] >= s->at && table[i] < s->at + s->n * PAGE_SIZE)
				break;
		}
		if (j == service->n_segments)
			return -EINVAL;
	}
	return 0;
}

static int tmb_fill_service(struct tmb_service *service, const struct tmb_service_register *r)
{
	u64 after = 0;
	u32 i;
	int e;

	service->shared = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	service->table = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	service->segments = kcalloc(r->n_segments, sizeof(*service->segments), GFP_KERNEL_ACCOUNT);
	if (!service->shared || !service->table || !service->segments)
		return -ENOMEM;
	for (i = 0; i < r->n_segments; i++) {
		struct tmb_service_segment from;

		if (copy_from_user(&from, u64_to_user_ptr(r->segments + i * sizeof(from)), sizeof(from)))
			return -EFAULT;
		service->n_segments = i + 1;
		e = tmb_take_segment(&service->segments[i], &from, after);
		if (e)
			return e;
		after = from.at + from.size;
	}
	e = tmb_take_table(service, r->calls);
	return e ?: tmb_check_code(service);
}

static long tmb_register_service(struct file *file, const void __user *argument)
{
	struct tmb_service_register r;
	struct tmb_service *service;
	int e;

	if (file->private_data)
		return -EBUSY;
	if (copy_from_user(&r, argument, sizeof(r)))
		return -EFAULT;
	if (r.version != TMB_VISIT_VERSION || !r.n_segments || r.n_segments > SEGMENTS_MAX || !r.n_calls || r.n_calls > TMB_VISIT_CALLS ||
	    strnlen(r.name, sizeof(r.name)) % sizeof(r.name) == 0)
		return -EINVAL;
	service = kzalloc(sizeof(*service), GFP_KERNEL_ACCOUNT);
	if (!service)
		return -ENOMEM;
	INIT_LIST_HEAD(&service->bindings);
	INIT_LIST_HEAD(&service->admissions);
	strscpy(service->name, r.name, sizeof(service->name));
	service->n_calls = r.n_calls;
	e = tmb_fill_service(service, &r);
	if (e) {
		tmb_free_service(service);
		return e;
	}
	list_add(&service->link, &tmb_services);
	file->private_data = service;
	return 0;
}

static long tmb_service_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct tmb_service *service;
	struct tmb_service_stat stat;
	long r = -ENOTTY;

	mutex_lock(&tmb_lock);
	service = file->private_data;
	if (command == TMB_SERVICE_IOC_REGISTER) {
		r = tmb_register_service(file, (const void __user *)argument);
	} else if (!service) {
		r = -ENXIO;
	} else if (command == TMB_SERVICE_IOC_ADMIT) {
		r = tmb_admit(service, argument);
	} else if (command == TMB_SERVICE_IOC_STAT) {
		stat.bindings = service->n_bindings;
		stat.ended = atomic64_read(&service->ended);
		r = copy_to_user((void __user *)argument, &stat, sizeof(stat)) ? -EFAULT : 0;
	}
	mutex_unlock(&tmb_lock);
	return r;
}

static int tmb_service_open(struct inode *inode, struct file *file)
{
	file->private_data = NULL; /* the misc device's own */
	return capable(CAP_SYS_ADMIN) ? 0 : -EPERM;
}

static int tmb_service_release(struct inode *inode, struct file *file)
{
	struct tmb_service *service = file->private_data;
	struct tmb_binding *binding, *next;
	struct tmb_admission *a, *following;

	if (!service)
		return 0;
	mutex_lock(&tmb_lock);
	list_for_each_entry_safe(binding, next, &service->bindings, link)
		tmb_end_binding(binding);
	list_for_each_entry_safe(a, following, &service->admissions, of_service)
		tmb_end_admission(a);
	list_del(&service->link);
	mutex_unlock(&tmb_lock);
	tmb_free_service(service);
	return 0;
}

static const struct file_operations tmb_service_fops = {
	.owner = THIS_MODULE,
	.open = tmb_service_open,
	.release = tmb_service_release,
	.unlocked_ioctl = tmb_service_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice tmb_service_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "tombolo-services",
	.fops = &tmb_service_fops,
	.mode = 0600,
};

/* VMFUNC with EPTP switching, and pages that are only executable. */
static bool tmb_processor_fits(void)
{
	u64 controls, ept, functions;

	return boot_cpu_has(X86_FEATURE_VMX) && boot_cpu_has(X86_FEATURE_GBPAGES) && !rdmsrl_safe(MSR_IA32_VMX_PROCBASED_CTLS2, &controls) &&
	       controls >> 32 & SECONDARY_EXEC_ENABLE_VMFUNC && !rdmsrl_safe(MSR_IA32_VMX_EPT_VPID_CAP, &ept) && ept & VMX_EPT_EXECUTE_ONLY_BIT &&
	       ept & VMX_EPT_EXTENT_GLOBAL_BIT && !rdmsrl_safe(MSR_VMFUNC, &functions) && functions & 1;
}

static int __init tmb_service_init(void)
{
	int r;

	BUILD_BUG_ON(sizeof(struct tmb_service_register) != 80 || sizeof(struct tmb_service_stat) != 16);
	BUILD_BUG_ON(offsetof(struct tmb_visit_frame, count) != 32 || offsetof(struct tmb_visit_frame, n_calls) != 48);
	BUILD_BUG_ON(offsetof(struct tmb_visit_shared, ended) != 8 || sizeof(struct tmb_visit_request) != 96);
	BUILD_BUG_ON(TMB_VISIT_GATE_INDEX + TMB_VISIT_BINDINGS > LIST_ENTRIES);
	if (!tmb_processor_fits()) {
		pr_err("tombolo: this processor has no VMFUNC with EPTP switching and execute-only pages; services are called by rings here\n");
		return -ENODEV;
	}
	r = tmb_hooks_set();
	if (r)
		return r;
	r = misc_register(&tmb_service_device);
	if (r)
		tmb_hooks_unset();
	return r;
}

static void __exit tmb_service_exit(void)
{
	/* No service is left, so no client either. */
	misc_deregister(&tmb_service_device);
	tmb_hooks_unset();
	cancel_work_sync(&tmb_reaping);
}

module_init(tmb_service_init);
module_exit(tmb_service_exit);
MODULE_LICENSE("Dual BSD/GPL");
MODULE_DESCRIPTION("Services that VMs call by VMFUNC, beside stock KVM");
