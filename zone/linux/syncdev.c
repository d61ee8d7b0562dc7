// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The device of a zone's SYNC area (syncdev.h).
 *
 * A process that opens the device gets a session in the area. Closing it, also by dying, ends the session, by which other processes
 * see that a lock's owner is dead. A device outlives its zone's membership while processes have it open, and then only returns
 * ENODEV. Their mappings end before their sessions do: a process whose session has ended could take a lock as a dead owner, which another process
 * would take from it. An access after that gives SIGBUS.
 */
#include <linux/ctype.h>
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "doorbell.h"
#include "probed.h"
#include "syncdev.h"
#include "tombolo_sync.h"

#define TMB_SYNC_QUEUES 64

struct tmb_syncdev {
	struct kref refs;
	struct miscdevice misc;
	struct tmb_doorbell_client client;
	struct tmb_sync_header *header;
	unsigned long pfn;
	u64 length;
	u32 n_objects;
	struct tmb_member *members;
	u32 member, epoch;
	struct mutex lock; /* beginning and ending sessions, and page faults, against destroy */
	bool gone;
	struct list_head files; /* that are open */
	u64 sessions[TMB_SYNC_SESSIONS]; /* words of this guest's open sessions */
	wait_queue_head_t queues[TMB_SYNC_QUEUES]; /* by object */
};

struct tmb_sync_file {
	struct list_head link;
	struct address_space *mapping; /* of the device node that was opened */
	struct tmb_syncdev *dev;
	u32 session;
	u64 word;
};

static void tmb_sync_release_dev(struct kref *refs)
{
	struct tmb_syncdev *dev = container_of(refs, struct tmb_syncdev, refs);

	kfree(dev->misc.name);
	kvfree(dev);
}

static struct tmb_sync_object *tmb_sync_object(struct tmb_syncdev *dev, u32 index)
{
	return (struct tmb_sync_object *)((u8 *)dev->header + TMB_SYNC_OBJECTS_OFF) + index;
}

/* The doorbell rang: every sleeper checks whether its object's seq has moved. */
static void tmb_sync_look(struct tmb_doorbell_client *client)
{
	struct tmb_syncdev *dev = container_of(client, struct tmb_syncdev, client);
	int i;

	tmb_fetch_and(&dev->members[dev->member].pending, ~TMB_PENDING_SYNC);
	for (i = 0; i < TMB_SYNC_QUEUES; i++)
		wake_up_all(&dev->queues[i]);
}

static int tmb_sync_open_file(struct inode *inode, struct file *file)
{
	struct tmb_syncdev *dev = container_of(file->private_data, struct tmb_syncdev, misc);
	struct tmb_sync_file *f;
	int err = -ENOMEM;
	u32 i;

	f = kzalloc(sizeof(*f), GFP_KERNEL);
	if (!f)
		return -ENOMEM;
	/* misc_open holds its mutex, so destroy's misc_deregister waits for us. */
	kref_get(&dev->refs);
	f->dev = dev;
	mutex_lock(&dev->lock);
	err = -ENODEV;
	if (dev->gone)
		goto fail;
	err = -ENODATA; /* the zone has no server yet */
	if (tmb_load_acquire(&dev->header->magic) != TMB_SYNC_MAGIC)
		goto fail;
	err = -EUSERS;
	for (i = 0; i < TMB_SYNC_SESSIONS && !f->word; i++) {
		/* The kernel knows whether this guest uses a slot; the shared memory is not asked. */
		if (dev->sessions[i])
			continue;
		f->word = tmb_session_take(dev->header, dev->members, i, dev->member, dev->epoch);
		f->session = i;
	}
	if (!f->word)
		goto fail;
	tmb_session_clear_reads(dev->header, dev->n_objects, f->session);
	dev->sessions[f->session] = f->word;
	f->mapping = file->f_mapping;
	list_add(&f->link, &dev->files);
	mutex_unlock(&dev->lock);
	file->private_data = f;
	return 0;
fail:
	mutex_unlock(&dev->lock);
	kref_put(&dev->refs, tmb_sync_release_dev);
	kfree(f);
	return err;
}

static int tmb_sync_release_file(struct inode *inode, struct file *file)
{
	struct tmb_sync_file *f = file->private_data;
	struct tmb_syncdev *dev = f->dev;

	mutex_lock(&dev->lock);
	list_del(&f->link);
	if (!dev->gone) {
		dev->sessions[f->session] = 0;
		tmb_session_free(dev->header, f->session, f->word);
	}
	mutex_unlock(&dev->lock);
	kref_put(&dev->refs, tmb_sync_release_dev);
	kfree(f);
	return 0;
}

/* Maps a page, unless the zone has gone: after that no page is mapped any more, and destroy has unmapped all before. */
static vm_fault_t tmb_sync_fault(struct vm_fault *vmf)
{
	struct tmb_sync_file *f = vmf->vma->vm_file->private_data;
	vm_fault_t done = VM_FAULT_SIGBUS;

	mutex_lock(&f->dev->lock);
	if (!f->dev->gone && vmf->pgoff < f->dev->length >> PAGE_SHIFT)
		done = vmf_insert_pfn(vmf->vma, vmf->address, f->dev->pfn + vmf->pgoff);
	mutex_unlock(&f->dev->lock);
	return done;
}

static const struct vm_operations_struct tmb_sync_vm_ops = {
	.fault = tmb_sync_fault,
};

static int tmb_sync_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct tmb_sync_file *f = file->private_data;
	unsigned long length = vma->vm_end - vma->vm_start;

	if (READ_ONCE(f->dev->gone))
		return -ENODEV;
	if (vma->vm_pgoff > f->dev->length >> PAGE_SHIFT ||
	    length > f->dev->length - ((u64)vma->vm_pgoff << PAGE_SHIFT))
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	vma->vm_ops = &tmb_sync_vm_ops;
#if TMB_HAS_VM_FLAGS_SET
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP);
#else
	vma->vm_flags |= VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP;
#endif
	return 0;
}

static long tmb_sync_wait(struct tmb_syncdev *dev, const struct tmb_sync_wait *w)
{
	struct tmb_sync_object *o;
	long left;

	if (w->object >= dev->n_objects)
		return -EINVAL;
	o = tmb_sync_object(dev, w->object);
	left = wait_event_interruptible_timeout(dev->queues[w->object % TMB_SYNC_QUEUES],
						tmb_load_acquire(&o->seq) != w->seq || READ_ONCE(dev->gone),
						nsecs_to_jiffies(min_t(u64, w->timeout_ns, TMB_SYNC_SLICE_NS)) + 1);
	if (READ_ONCE(dev->gone))
		return -ENODEV;
	return left < 0 ? -EINTR : 0;
}

static long tmb_sync_wake(struct tmb_syncdev *dev, const struct tmb_sync_wake *w)
{
	u32 i;

	if (w->object >= dev->n_objects)
		return -EINVAL;
	for (i = 0; i < TMB_MAX_MEMBERS; i++) {
		struct tmb_member *m = &dev->members[i];

		if (!(w->members >> i & 1))
			continue;
		if (i == dev->member) {
			wake_up_all(&dev->queues[w->object % TMB_SYNC_QUEUES]);
			continue;
		}
		tmb_fetch_or(&m->pending, TMB_PENDING_SYNC);
		/* A member without a doorbell notices at the end of its slice. */
		tmb_doorbell_ring(&dev->client, tmb_load(&m->doorbell));
	}
	return 0;
}

static long tmb_sync_ioctl(struct file *file, unsigned int command, unsigned long arg)
{
	struct tmb_sync_file *f = file->private_data;
	struct tmb_syncdev *dev = f->dev;
	void __user *user = (void __user *)arg;

	if (READ_ONCE(dev->gone))
		return -ENODEV;
	switch (command) {
	case TMB_SYNC_IOC_INFO: {
		struct tmb_sync_info info = {
			.area_len = dev->length,
			.session_word = f->word,
			.session = f->session,
			.member = dev->member,
			.epoch = dev->epoch,
		};

		return copy_to_user(user, &info, sizeof(info)) ? -EFAULT : 0;
	}
	case TMB_SYNC_IOC_WAIT: {
		struct tmb_sync_wait w;

		return copy_from_user(&w, user, sizeof(w)) ? -EFAULT : tmb_sync_wait(dev, &w);
	}
	case TMB_SYNC_IOC_WAKE: {
		struct tmb_sync_wake w;

		return copy_from_user(&w, user, sizeof(w)) ? -EFAULT : tmb_sync_wake(dev, &w);
	}
	}
	return -ENOTTY;
}

static const struct file_operations tmb_sync_fops = {
	.owner = THIS_MODULE,
	.open = tmb_sync_open_file,
	.release = tmb_sync_release_file,
	.mmap = tmb_sync_mmap,
	.unlocked_ioctl = tmb_sync_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

/* Returns the zone's name if it can be a device name, else its uuid. */
static char *tmb_sync_dev_name(const struct tmb_syncdev_config *config)
{
	const char *c = config->zone_name;

	while (isalnum(*c) || *c == '-' || *c == '_' || *c == '.')
		c++;
	if (*c || c == config->zone_name)
		return kasprintf(GFP_KERNEL, "tombolo-sync-%pUb", config->zone_uuid);
	return kasprintf(GFP_KERNEL, "tombolo-sync-%s", config->zone_name);
}

struct tmb_syncdev *tmb_syncdev_create(const struct tmb_syncdev_config *config)
{
	struct tmb_syncdev *dev;
	int err, i;
	u64 fits;

	if (config->length < TMB_SYNC_OBJECTS_OFF + sizeof(struct tmb_sync_object) || config->length % PAGE_SIZE ||
	    config->member >= TMB_MAX_MEMBERS)
		return ERR_PTR(-EINVAL);
	dev = kvzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	kref_init(&dev->refs);
	mutex_init(&dev->lock);
	INIT_LIST_HEAD(&dev->files);
	for (i = 0; i < TMB_SYNC_QUEUES; i++)
		init_waitqueue_head(&dev->queues[i]);
	fits = (config->length - TMB_SYNC_OBJECTS_OFF) / sizeof(struct tmb_sync_object);
	dev->n_objects = min_t(u64, fits, TMB_SYNC_KEYS);
	dev->header = config->area;
	dev->pfn = config->pfn;
	dev->length = config->length;
	dev->members = config->members;
	dev->member = config->member;
	dev->epoch = config->epoch;
	memcpy(dev->client.zone_uuid, config->zone_uuid, sizeof(dev->client.zone_uuid));
	dev->client.look = tmb_sync_look;
	dev->misc.minor = MISC_DYNAMIC_MINOR;
	dev->misc.fops = &tmb_sync_fops;
	dev->misc.mode = 0600;
	dev->misc.name = tmb_sync_dev_name(config);
	err = -ENOMEM;
	if (!dev->misc.name)
		goto free;
	tmb_doorbell_register(&dev->client);
	err = misc_register(&dev->misc);
	if (!err)
		return dev;
	tmb_doorbell_unregister(&dev->client);
free:
	kref_put(&dev->refs, tmb_sync_release_dev);
	return ERR_PTR(err);
}

void tmb_syncdev_destroy(struct tmb_syncdev *dev)
{
	struct tmb_sync_file *f;
	u32 i;

	if (!dev)
		return;
	misc_deregister(&dev->misc);
	mutex_lock(&dev->lock);
	WRITE_ONCE(dev->gone, true);
	list_for_each_entry(f, &dev->files, link)
		unmap_mapping_range(f->mapping, 0, 0, 1);
	for (i = 0; i < TMB_SYNC_SESSIONS; i++)
		if (dev->sessions[i])
			tmb_session_free(dev->header, i, dev->sessions[i]);
	mutex_unlock(&dev->lock);
	for (i = 0; i < TMB_SYNC_QUEUES; i++)
		wake_up_all(&dev->queues[i]);
	tmb_doorbell_unregister(&dev->client);
	kref_put(&dev->refs, tmb_sync_release_dev);
}
