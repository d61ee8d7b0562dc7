// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The host's half of the IOMMU bypass (bypass.h).
 *
 * A device starts as VFIO gives it to a VM: its DMA is translated by the domain of VFIO's container. TBP_IOC_ON resets it, so that nothing that
 * ran on it before goes on with addresses that mean something else now, has its accesses snoop the caches, detaches its group from that domain and attaches
 * a domain of the session, which hands each device on to the IOMMU driver's identity domain. The core keeps the group under its own mutex, so VFIO may give
 * the group back at any time: it then goes where VFIO puts it, and the session's domain is out.
 *
 * The session pins the VM's memory itself, whatever VFIO pins. The memory goes back at the last close of the session's file, after each device
 * whose group still has the session's domain was stopped: bus mastering off, transactions done, DMA blocked, function reset. QEMU inherits the
 * file, so that close comes after the death of both the supervisor and QEMU.
 *
 * That close may be the supervisor's while another thread, QEMU's last, has VFIO close the device. VFIO then restores the device's configuration, as each
 * reset does, from the one copy that the device has: with two at a time, one restores nothing. VFIO's own lock of the device keeps them apart.
 */
#include <linux/capability.h>
#include <linux/delay.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/pid.h>
#include <linux/pm_runtime.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/vfio_pci_core.h>

#include "bypass.h"

/* Pages of one call, at most: 8 TiB of 2 MiB. */
#define TBP_PAGES_MAX (1UL << 22)

/* Pinned pages. */
struct tbp_pinned {
	struct list_head link;
	unsigned long count;
	struct folio *folios[];
};

/* A device of a session. */
struct tbp_bypassed {
	struct list_head link; /* in its session */
	struct list_head all;
	struct pci_dev *pdev;
	struct vfio_device *vfio; /* kept, with the module that frees it */
	struct module *driver;
	struct iommu_group *group;
	bool used; /* untranslated since it is in the session */
	struct iommu_domain domain; /* stands for `identity` */
	struct iommu_domain *identity; /* of the IOMMU driver */
	bool owns_identity;
};

struct tbp_session {
	struct pid *owner; /* the process that opened it */
	struct mutex lock;
	struct list_head pinned;
	struct list_head devices;
};

static DEFINE_MUTEX(tbp_lock);
static LIST_HEAD(tbp_all); /* the devices of all sessions, under tbp_lock */

static const struct iommu_ops *tbp_ops(struct device *dev)
{
	if (!dev->iommu || !dev->iommu->iommu_dev)
		return NULL;
	return dev->iommu->iommu_dev->ops;
}

#if TBP_HAS_ATTACH_OLD /* 6.19 */
static int tbp_attach_identity(struct iommu_domain *domain, struct device *dev, struct iommu_domain *old)
{
	struct iommu_domain *identity = container_of(domain, struct tbp_bypassed, domain)->identity;

	return identity->ops->attach_dev(identity, dev, old);
}
#else
static int tbp_attach_identity(struct iommu_domain *domain, struct device *dev)
{
	struct iommu_domain *identity = container_of(domain, struct tbp_bypassed, domain)->identity;

	return identity->ops->attach_dev(identity, dev);
}
#endif

static const struct iommu_domain_ops tbp_domain_ops = {
	.attach_dev = tbp_attach_identity,
};

/* Whether the device's DMA goes untranslated by this session. */
static bool tbp_is_on(struct tbp_bypassed *one)
{
	return iommu_get_domain_for_dev(&one->pdev->dev) == &one->domain;
}

/* The caller holds the device's lock. */
static bool tbp_has_vfio(struct pci_dev *pdev)
{
	return pdev->dev.driver && !strcmp(pdev->dev.driver->name, "vfio-pci");
}

/* What VFIO has for the device. The caller holds the device's lock. */
static struct vfio_device *tbp_vfio(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *core = tbp_has_vfio(pdev) ? dev_get_drvdata(&pdev->dev) : NULL;

	return core ? &core->vdev : NULL;
}

/*
 * Has the device ask for the processors' caches with each access. VFIO tells KVM that this is so, and then KVM takes all of the guest's memory for
 * cached, whatever the guest says of it. But it is the IOMMU's translation that sees to it, and that is about to be left out.
 */
static int tbp_snoop(struct pci_dev *pdev)
{
	return pcibios_err_to_errno(pcie_capability_clear_word(pdev, PCI_EXP_DEVCTL, PCI_EXP_DEVCTL_NOSNOOP_EN));
}

/* With the device's lock, under which no driver is bound to it. */
static int tbp_on_locked(struct tbp_bypassed *one)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&one->pdev->dev);
	int ret;

	if (tbp_is_on(one))
		return 0;
	/* A paging domain of a user: VFIO has the group. After TBP_IOC_OFF it is blocked. */
	if (tbp_vfio(one->pdev) != one->vfio || !domain ||
	    (domain->type != IOMMU_DOMAIN_UNMANAGED && domain->type != IOMMU_DOMAIN_BLOCKED))
		return -ENODEV;
	ret = pci_reset_function_locked(one->pdev) ?: tbp_snoop(one->pdev);
	if (ret)
		return ret;
	iommu_detach_group(domain, one->group);
	one->used = true;
	ret = iommu_attach_group(&one->domain, one->group);
	/* VFIO may have given the group back just before: the next driver of the device must not find it untranslated. */
	if (!ret && !iommu_group_dma_owner_claimed(one->group)) {
		iommu_detach_group(&one->domain, one->group);
		ret = -ENODEV;
	}
	return ret;
}

/* Tries for a second: others hold the device's lock for a moment, and who unbinds the driver holds it until QEMU has ended. */
static int tbp_lock_device(struct pci_dev *pdev)
{
	int tries;

	for (tries = 0; tries < 100; tries++) {
		if (pci_dev_trylock(pdev))
			return 0;
		msleep(10);
	}
	return -EAGAIN;
}

static int tbp_on(struct tbp_bypassed *one)
{
	int ret;

	mutex_lock(&one->vfio->dev_set->lock);
	ret = tbp_lock_device(one->pdev);
	if (!ret) {
		ret = tbp_on_locked(one);
		pci_dev_unlock(one->pdev);
	}
	mutex_unlock(&one->vfio->dev_set->lock);
	return ret;
}

/* The group's owner is VFIO, so what it falls back to blocks all DMA. */
static void tbp_off(struct tbp_bypassed *one)
{
	if (tbp_is_on(one))
		iommu_detach_group(&one->domain, one->group);
}

/*
 * Returns true if VFIO has closed the device without a reset and no driver has taken it since. VFIO skips the reset where it does not get the device's lock
 * at once. The caller holds that lock and VFIO's.
 */
static bool tbp_is_unreset(struct tbp_bypassed *one)
{
	return container_of(one->vfio, struct vfio_pci_core_device, vdev)->needs_reset &&
	       !iommu_group_dma_owner_claimed(one->group) &&
	       (!one->pdev->dev.driver || tbp_has_vfio(one->pdev));
}

/*
 * After this the device writes to no memory, and nothing of the guest's is left in it. Usually VFIO has stopped and reset it when it gave it back: then the
 * session's domain is out.
 *
 * The device's lock may be held by who unbinds its driver and waits until VFIO has closed the device. No driver comes or goes then, and VFIO does not reset the
 * device. Resets by others hold the lock of the configuration space, too.
 */
static void tbp_stop(struct tbp_bypassed *one)
{
	struct pci_dev *pdev = one->pdev;
	bool locked, on;
	int ret;

	if (!one->used)
		return;
	mutex_lock(&one->vfio->dev_set->lock);
	locked = !tbp_lock_device(pdev);
	if (!locked)
		pci_cfg_access_lock(pdev);
	on = tbp_is_on(one);
	if (on || (locked && tbp_is_unreset(one))) {
		/* One that VFIO has closed sleeps. */
		pm_runtime_get_sync(&pdev->dev);
		pci_clear_master(pdev);
		if (!pci_wait_for_pending_transaction(pdev))
			pci_warn(pdev, "transactions are still pending; the IOMMU blocks them\n");
		if (on)
			iommu_detach_group(&one->domain, one->group);
		ret = pci_reset_function_locked(pdev);
		if (ret)
			pci_warn(pdev, "not reset (%d): reset it before a driver gets it\n", ret);
		else
			pci_info(pdev, "%s\n", on ? "stopped: its VM died with its supervisor" :
						    "reset: VFIO could not");
		pm_runtime_put(&pdev->dev);
	}
	if (locked)
		pci_dev_unlock(pdev);
	else
		pci_cfg_access_unlock(pdev);
	mutex_unlock(&one->vfio->dev_set->lock);
}

static struct tbp_bypassed *tbp_find(struct tbp_session *session, const struct tbp_device *wanted)
{
	struct tbp_bypassed *one;

	list_for_each_entry(one, &session->devices, link)
		if (pci_domain_nr(one->pdev->bus) == wanted->domain && one->pdev->bus->number == wanted->bus &&
		    one->pdev->devfn == wanted->devfn)
			return one;
	return NULL;
}

static int tbp_count_device(struct device *dev, void *count)
{
	++*(unsigned int *)count;
	return 0;
}

/* Finds or allocates the identity domain of the device's IOMMU driver. Returns 0 if the device can be bypassed. */
static int tbp_prepare(struct tbp_bypassed *one)
{
	const struct iommu_ops *ops = tbp_ops(&one->pdev->dev);
	unsigned int devices = 0;

	if (!one->group || !ops)
		return -EOPNOTSUPP;
	iommu_group_for_each_dev(one->group, &devices, tbp_count_device);
	if (devices != 1)
		return -EMLINK;
	if (!one->pdev->reset_methods[0])
		return -EPERM;
	one->vfio = tbp_vfio(one->pdev);
	if (!one->vfio)
		return -ENODEV;
	one->driver = one->pdev->dev.driver->owner;
	__module_get(one->driver); /* its driver is bound, and can't go under the device's lock */
	get_device(&one->vfio->device);
	one->identity = ops->identity_domain;
#if TBP_HAS_DOMAIN_ALLOC
	/* AMD's driver has no identity domain of its own there, and allocates one for each that asks. */
	if (!one->identity && ops->domain_alloc) {
		one->identity = ops->domain_alloc(IOMMU_DOMAIN_IDENTITY);
		one->owns_identity = one->identity;
		if (one->identity) {
			one->identity->type = IOMMU_DOMAIN_IDENTITY;
			one->identity->owner = ops;
			one->identity->ops = one->identity->ops ?: ops->default_domain_ops;
		}
	}
#endif
	if (!one->identity || !one->identity->ops || !one->identity->ops->attach_dev)
		return -EOPNOTSUPP;
	one->domain.type = IOMMU_DOMAIN_IDENTITY;
	one->domain.ops = &tbp_domain_ops;
	one->domain.owner = ops;
	return 0;
}

static void tbp_free(struct tbp_bypassed *one)
{
	if (one->owns_identity)
		iommu_domain_free(one->identity);
	if (one->vfio) {
		put_device(&one->vfio->device);
		module_put(one->driver);
	}
	iommu_group_put(one->group);
	pci_dev_put(one->pdev);
	kfree(one);
}

/* Makes the device one of the session, unless another session has it. */
static int tbp_join(struct tbp_session *session, struct tbp_bypassed *one)
{
	struct tbp_bypassed *other;
	int ret = 0;

	mutex_lock(&tbp_lock);
	list_for_each_entry(other, &tbp_all, all)
		if (other->pdev == one->pdev)
			ret = -EBUSY;
	if (!ret) {
		list_add_tail(&one->all, &tbp_all);
		list_add_tail(&one->link, &session->devices);
	}
	mutex_unlock(&tbp_lock);
	return ret;
}

static int tbp_add(struct tbp_session *session, const struct tbp_device *wanted)
{
	struct tbp_bypassed *one;
	int ret;

	one = kzalloc(sizeof(*one), GFP_KERNEL);
	if (!one)
		return -ENOMEM;
	one->pdev = pci_get_domain_bus_and_slot(wanted->domain, wanted->bus, wanted->devfn);
	if (!one->pdev) {
		kfree(one);
		return -ENXIO;
	}
	one->group = iommu_group_get(&one->pdev->dev);
	ret = tbp_lock_device(one->pdev);
	if (!ret) {
		ret = tbp_prepare(one) ?: tbp_join(session, one);
		pci_dev_unlock(one->pdev);
	}
	if (ret)
		tbp_free(one);
	return ret;
}

static void tbp_unpin(struct tbp_pinned *pinned)
{
	unpin_folios(pinned->folios, pinned->count);
	kvfree(pinned);
}

/* Pins pages one after the other into `pinned`. */
static int tbp_pin_pages(struct tbp_pinned *pinned, struct file *memfd, const struct tbp_pin *wanted)
{
	unsigned long count = wanted->size / wanted->page;
	loff_t last = wanted->offset + wanted->size - 1;

	while (pinned->count < count) {
		loff_t next = wanted->offset + pinned->count * wanted->page;
		unsigned int most = min(count - pinned->count, 1024UL);
		pgoff_t inside;
		long got, i;

		got = memfd_pin_folios(memfd, next, last, pinned->folios + pinned->count, most, &inside);
		if (got <= 0)
			return got ?: -EFAULT;
		pinned->count += got;
		for (i = pinned->count - got; i < pinned->count; i++)
			if (folio_size(pinned->folios[i]) != wanted->page)
				return -EINVAL;
		cond_resched();
	}
	return 0;
}

static int tbp_tell_frames(const struct tbp_pinned *pinned, u64 __user *frames)
{
	unsigned long i;

	for (i = 0; i < pinned->count; i++)
		if (put_user((u64)PFN_PHYS(folio_pfn(pinned->folios[i])), frames + i))
			return -EFAULT;
	return 0;
}

static int tbp_pin(struct tbp_session *session, const struct tbp_pin *wanted)
{
	struct tbp_pinned *pinned;
	struct file *memfd;
	unsigned long count;
	int ret;

	if ((wanted->page != SZ_2M && wanted->page != SZ_1G) || wanted->reserved || !wanted->size ||
	    !IS_ALIGNED(wanted->offset | wanted->size, wanted->page) ||
	    wanted->offset + wanted->size < wanted->size || wanted->offset + wanted->size > MAX_LFS_FILESIZE)
		return -EINVAL;
	count = wanted->size / wanted->page;
	if (count > TBP_PAGES_MAX)
		return -E2BIG;
	memfd = fget(wanted->memfd);
	if (!memfd)
		return -EBADF;
	pinned = kvzalloc(struct_size(pinned, folios, count), GFP_KERNEL);
	ret = !(memfd->f_mode & FMODE_WRITE) ? -EPERM : pinned ? tbp_pin_pages(pinned, memfd, wanted) : -ENOMEM;
	fput(memfd);
	ret = ret ?: tbp_tell_frames(pinned, u64_to_user_ptr(wanted->frames));
	if (!ret)
		list_add_tail(&pinned->link, &session->pinned);
	else if (pinned)
		tbp_unpin(pinned);
	return ret;
}

static int tbp_switch(struct tbp_session *session, const struct tbp_device *wanted, bool on)
{
	struct tbp_bypassed *one = tbp_find(session, wanted);

	if (!one)
		return -ENXIO;
	if (list_empty(&session->pinned))
		return -EINVAL;
	if (on)
		return tbp_on(one);
	tbp_off(one);
	return 0;
}

static int tbp_device_ioctl(struct tbp_session *session, unsigned int command, const void __user *from)
{
	struct tbp_device wanted;

	if (copy_from_user(&wanted, from, sizeof(wanted)))
		return -EFAULT;
	if (wanted.reserved)
		return -EINVAL;
	if (command == TBP_IOC_ADD)
		return tbp_add(session, &wanted);
	return tbp_switch(session, &wanted, command == TBP_IOC_ON);
}

static long tbp_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct tbp_session *session = file->private_data;
	const void __user *from = (const void __user *)argument;
	struct tbp_pin wanted;
	long ret;

	/* QEMU holds the file so that the session outlives the supervisor. A QEMU that its guest controls could name another VM's device here. */
	if (task_tgid(current) != session->owner)
		return -EPERM;
	mutex_lock(&session->lock);
	switch (command) {
	case TBP_IOC_PIN:
		ret = copy_from_user(&wanted, from, sizeof(wanted)) ? -EFAULT : tbp_pin(session, &wanted);
		break;
	case TBP_IOC_ADD:
	case TBP_IOC_ON:
	case TBP_IOC_OFF:
		ret = tbp_device_ioctl(session, command, from);
		break;
	default:
		ret = -ENOTTY;
	}
	mutex_unlock(&session->lock);
	return ret;
}

static int tbp_open(struct inode *inode, struct file *file)
{
	struct tbp_session *session;

	/* Who opens a session can give a device all of the host's memory. */
	if (!capable(CAP_SYS_RAWIO))
		return -EPERM;
	session = kzalloc(sizeof(*session), GFP_KERNEL);
	if (!session)
		return -ENOMEM;
	session->owner = get_pid(task_tgid(current));
	mutex_init(&session->lock);
	INIT_LIST_HEAD(&session->pinned);
	INIT_LIST_HEAD(&session->devices);
	file->private_data = session;
	return 0;
}

static int tbp_release(struct inode *inode, struct file *file)
{
	struct tbp_session *session = file->private_data;
	struct tbp_bypassed *one, *next_one;
	struct tbp_pinned *pinned, *next_pinned;

	list_for_each_entry(one, &session->devices, link)
		tbp_stop(one);
	list_for_each_entry_safe(pinned, next_pinned, &session->pinned, link)
		tbp_unpin(pinned);
	mutex_lock(&tbp_lock);
	list_for_each_entry_safe(one, next_one, &session->devices, link) {
		list_del(&one->all);
		tbp_free(one);
	}
	mutex_unlock(&tbp_lock);
	put_pid(session->owner);
	kfree(session);
	return 0;
}

static const struct file_operations tbp_fops = {
	.owner = THIS_MODULE,
	.open = tbp_open,
	.release = tbp_release,
	.unlocked_ioctl = tbp_ioctl,
};

static struct miscdevice tbp_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "tombolo-bypass",
	.fops = &tbp_fops,
	.mode = 0600,
};
module_misc_device(tbp_misc);

MODULE_DESCRIPTION("Untranslated DMA of passed-through devices of trusted VMs");
MODULE_LICENSE("Dual BSD/GPL");
