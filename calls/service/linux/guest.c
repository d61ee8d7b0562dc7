// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * tombolo_service.ko: binds processes of a VM to services of its host (visit.h). An open file of /dev/tombolo-service is a binding; it ends when the file is
 * closed. The host is told the root of the process' page tables, which the file keeps from being used by another process.
 */
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/kvm_para.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "visit.h"

#define WINDOW_ORDER get_order(TMB_VISIT_WINDOW_SIZE)

struct tmb_bound {
	struct mutex lock;
	struct mm_struct *mm; /* NULL: not bound */
	struct page *window;
	u32 binding, generation;
};

/* The host's answer, 0 or an errno. */
static long tmb_ask(struct tmb_visit_request *request)
{
	struct tmb_visit_request *page = (void *)get_zeroed_page(GFP_KERNEL); /* in one page, whatever the stack is */
	long r;

	if (!page)
		return -ENOMEM;
	*page = *request;
	/* The host answers EAGAIN while it changes another binding. */
	while ((r = kvm_hypercall1(TMB_VISIT_HYPERCALL, virt_to_phys(page))) == -EAGAIN)
		cond_resched();
	*request = *page;
	free_page((unsigned long)page);
	return r == -KVM_ENOSYS ? -ENOSYS : r;
}

/* With page-table isolation a process in user mode has the second page of its root. */
static u64 tmb_root_of(struct mm_struct *mm)
{
	pgd_t *root = mm->pgd;

	if (boot_cpu_has(X86_FEATURE_PTI))
		root = (pgd_t *)((unsigned long)root | PAGE_SIZE);
	return virt_to_phys(root);
}

static long tmb_bind(struct tmb_bound *bound, struct tmb_visit_bind *bind)
{
	struct tmb_visit_request request = {
		.version = TMB_VISIT_VERSION,
		.operation = TMB_VISIT_BIND,
		.root = tmb_root_of(current->mm),
		.gate = bind->gate,
	};
	long r;

	if (bound->mm)
		return -EBUSY;
	bound->window = alloc_pages(GFP_KERNEL | __GFP_ZERO | __GFP_COMP, WINDOW_ORDER);
	if (!bound->window)
		return -ENOMEM;
	request.window = page_to_phys(bound->window);
	memcpy(request.name, bind->name, sizeof(request.name));
	r = tmb_ask(&request);
	if (r) {
		__free_pages(bound->window, WINDOW_ORDER);
		bound->window = NULL;
		return r;
	}
	mmgrab(current->mm);
	bound->mm = current->mm;
	bound->binding = bind->binding = request.binding;
	bound->generation = request.generation;
	bind->index = request.index;
	return 0;
}

static long tmb_bound_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct tmb_bound *bound = file->private_data;
	struct tmb_visit_bind request;
	long r;

	if (command != TMB_VISIT_IOC_BIND)
		return -ENOTTY;
	if (copy_from_user(&request, (void __user *)argument, sizeof(request)))
		return -EFAULT;
	mutex_lock(&bound->lock);
	r = tmb_bind(bound, &request);
	mutex_unlock(&bound->lock);
	if (!r && copy_to_user((void __user *)argument, &request, sizeof(request)))
		r = -EFAULT;
	return r;
}

static int tmb_bound_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct tmb_bound *bound = file->private_data;
	int r = -ENXIO;

	mutex_lock(&bound->lock);
	if (bound->mm && vma->vm_pgoff == 0 && vma->vm_end - vma->vm_start == TMB_VISIT_WINDOW_SIZE) {
		vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
		r = vm_insert_page(vma, vma->vm_start, bound->window);
		for (unsigned long i = 1; !r && i < 1 << WINDOW_ORDER; i++)
			r = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE, bound->window + i);
	}
	mutex_unlock(&bound->lock);
	return r;
}

static int tmb_bound_open(struct inode *inode, struct file *file)
{
	struct tmb_bound *bound = kzalloc(sizeof(*bound), GFP_KERNEL_ACCOUNT);

	if (!bound)
		return -ENOMEM;
	mutex_init(&bound->lock);
	file->private_data = bound;
	return 0;
}

static int tmb_bound_release(struct inode *inode, struct file *file)
{
	struct tmb_bound *bound = file->private_data;

	if (bound->mm) {
		struct tmb_visit_request request = {
			.version = TMB_VISIT_VERSION,
			.operation = TMB_VISIT_UNBIND,
			.binding = bound->binding,
			.generation = bound->generation,
		};
		long r = tmb_ask(&request);

		/* ENOENT, ENOSYS: the service is gone. While a binding may stand, the host translates by this root and writes into this window. */
		if (r && r != -ENOENT && r != -ENOSYS) {
			pr_err("tombolo: a binding can't be ended (%ld); its memory is kept\n", r);
		} else {
			mmdrop(bound->mm);
			__free_pages(bound->window, WINDOW_ORDER);
		}
	}
	kfree(bound);
	return 0;
}

static const struct file_operations tmb_bound_fops = {
	.owner = THIS_MODULE,
	.open = tmb_bound_open,
	.release = tmb_bound_release,
	.unlocked_ioctl = tmb_bound_ioctl,
	.mmap = tmb_bound_mmap,
	.llseek = noop_llseek,
};

static struct miscdevice tmb_bound_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "tombolo-service",
	.fops = &tmb_bound_fops,
	.mode = 0666,
};

static int __init tmb_bound_init(void)
{
	BUILD_BUG_ON(sizeof(struct tmb_visit_bind) != 64 || sizeof(struct tmb_visit_request) > PAGE_SIZE);
	if (!kvm_para_available() || boot_cpu_has(X86_FEATURE_LA57) || !boot_cpu_has(X86_FEATURE_XMM2)) {
		pr_err("tombolo: services are called in VMs of KVM, with page tables of four levels\n");
		return -ENODEV;
	}
	return misc_register(&tmb_bound_device);
}

static void __exit tmb_bound_exit(void)
{
	misc_deregister(&tmb_bound_device);
}

module_init(tmb_bound_init);
module_exit(tmb_bound_exit);
MODULE_LICENSE("Dual BSD/GPL");
MODULE_DESCRIPTION("Binds processes of a VM to services of its host");
