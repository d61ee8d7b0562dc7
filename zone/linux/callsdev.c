// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The device of a zone's CALLS area (callsdev.h).
 *
 * The area's geometry is copied and checked once. A file stores its channel's state word as it took it. When the word in the area shows
 * another use, or the worker's end, the server has ended for this file, whatever other memory says.
 */
#include <linux/ctype.h>
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/poll.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "callsdev.h"

static_assert(TMB_CALLS_IOC_INFO == _IOR('T', 0x43, struct tmb_calls_info));
static_assert(TMB_CALLS_IOC_WAIT == _IOWR('T', 0x44, u64));
static_assert(TMB_CALLS_IOC_RING == _IO('T', 0x45));
static_assert(TMB_CALLS_IOC_WAKE == _IO('T', 0x46));

/* A process waits so long for a channel that another one has just left. */
#define TMB_CALLS_TAKE_TIMEOUT (30 * HZ)

struct tmb_calls_file {
	struct tmb_callsdev *dev;
	u32 index;
	u64 taken;	       /* the state word as this file took it: WANTED */
	atomic64_t rings;      /* this kernel's own memory */
	wait_queue_head_t rung;
};

struct tmb_callsdev {
	struct tmb_calls_area area;
	atomic_t looks; /* this kernel's own memory */
	wait_queue_head_t looked;
	struct mutex lock; /* files */
	struct tmb_calls_file *files[TMB_CALLS_CHANNELS];
};

static bool tmb_calls_gone(struct tmb_calls_file *f)
{
	u64 word = tmb_load_acquire(&f->dev->area.header->states[f->index]);

	return word != f->taken && word != tmb_calls_to(f->taken, TMB_CALLS_SERVED);
}

static void tmb_calls_wake(struct tmb_calls_file *f)
{
	atomic64_inc(&f->rings);
	wake_up_all(&f->rung);
}

/* Called after a ring: wakes the channels whose word is set. */
static void tmb_calls_look(struct tmb_doorbell_client *client)
{
	struct tmb_callsdev *dev = container_of(client, struct tmb_callsdev, area.client);
	u32 i;

	tmb_fetch_and(&dev->area.members[dev->area.member].pending, ~TMB_PENDING_CALLS);
	mutex_lock(&dev->lock);
	for (i = 0; i < dev->area.n_channels; i++)
		if (dev->files[i] && tmb_exchange(&tmb_calls_channel(&dev->area, i)->client_rung, 0))
			tmb_calls_wake(dev->files[i]);
	mutex_unlock(&dev->lock);
	atomic_inc(&dev->looks);
	wake_up_all(&dev->looked);
}

/*
 * Sets the server's word before the doorbell is rung. An exchange: it orders the store before the load of the server's doorbell id, so a
 * server that has just started sees the word, or its id is seen here. -ENOTCONN: there is no server.
 */
static int tmb_calls_ring(struct tmb_calls_file *f)
{
	u32 server;

	tmb_exchange(&tmb_calls_channel(&f->dev->area, f->index)->server_rung, 1);
	server = tmb_load(&f->dev->area.header->doorbell);
	return server ? tmb_doorbell_ring(&f->dev->area.client, server) : -ENOTCONN;
}

/*
 * Takes a free channel. -EUSERS: processes of this guest have all of them; -EAGAIN: one was left, and the server has not cleared it yet;
 * -ENOTCONN: there is no server.
 */
static int tmb_calls_take(struct tmb_calls_file *f)
{
	struct tmb_callsdev *dev = f->dev;
	int err = -EUSERS;
	u32 i;

	if (!tmb_load(&dev->area.header->doorbell))
		return -ENOTCONN;
	mutex_lock(&dev->lock);
	for (i = 0; i < dev->area.n_channels; i++) {
		u64 word = tmb_load_acquire(&dev->area.header->states[i]);

		/* The kernel knows whether this guest uses a channel; the shared memory is not asked. */
		if (dev->files[i])
			continue;
		err = -EAGAIN;
		if (tmb_calls_state(word) != TMB_CALLS_FREE)
			continue;
		f->taken = tmb_calls_to(word, TMB_CALLS_WANTED);
		if (!tmb_cas64(&dev->area.header->states[i], word, f->taken))
			continue;
		f->index = i;
		dev->files[i] = f;
		err = 0;
		break;
	}
	mutex_unlock(&dev->lock);
	return err;
}

/* Takes a channel, and waits for one that is being cleared: the server rings when it has cleared one. */
static int tmb_calls_await(struct tmb_calls_file *f)
{
	long left = TMB_CALLS_TAKE_TIMEOUT;

	for (;;) {
		int looks = atomic_read(&f->dev->looks);
		int err = tmb_calls_take(f);

		if (err != -EAGAIN)
			return err;
		left = wait_event_interruptible_timeout(f->dev->looked, atomic_read(&f->dev->looks) != looks, left);
		if (left <= 0)
			return left ?: -EUSERS;
	}
}

/* Marks the file's channel as left. */
static void tmb_calls_give_back(struct tmb_calls_file *f)
{
	static const u32 mine[] = { TMB_CALLS_WANTED, TMB_CALLS_SERVED, TMB_CALLS_LOST };
	struct tmb_callsdev *dev = f->dev;
	u32 i;

	mutex_lock(&dev->lock);
	dev->files[f->index] = NULL;
	mutex_unlock(&dev->lock);
	/* In the order in which the server may change it; a word of another use stays. */
	for (i = 0; i < ARRAY_SIZE(mine); i++)
		if (tmb_cas64(&dev->area.header->states[f->index], tmb_calls_to(f->taken, mine[i]),
			      tmb_calls_to(f->taken, TMB_CALLS_LEFT)))
			break;
}

static int tmb_calls_open(struct inode *inode, struct file *file)
{
	struct tmb_callsdev *dev = container_of(file->private_data, struct tmb_callsdev, area.misc);
	struct tmb_calls_file *f;
	int err;

	f = kzalloc(sizeof(*f), GFP_KERNEL);
	if (!f)
		return -ENOMEM;
	f->dev = dev;
	init_waitqueue_head(&f->rung);
	err = tmb_calls_await(f);
	if (err) {
		kfree(f);
		return err;
	}
	err = tmb_calls_ring(f);
	if (err) {
		tmb_calls_give_back(f);
		kfree(f);
		return err;
	}
	file->private_data = f;
	return 0;
}

static int tmb_calls_release(struct inode *inode, struct file *file)
{
	struct tmb_calls_file *f = file->private_data;

	tmb_calls_give_back(f);
	tmb_calls_ring(f);
	kfree(f);
	return 0;
}

static int tmb_calls_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct tmb_calls_file *f = file->private_data;
	u64 size = f->dev->area.info.channel_size;

	return tmb_calls_area_mmap(vma, f->dev->area.pfn + PHYS_PFN(TMB_CALLS_FIRST + f->index * size), size);
}

static __poll_t tmb_calls_poll(struct file *file, poll_table *table)
{
	struct tmb_calls_file *f = file->private_data;

	poll_wait(file, &f->rung, table);
	return tmb_calls_gone(f) ? EPOLLIN | EPOLLHUP : 0;
}

static long tmb_calls_wait(struct tmb_calls_file *f, u64 __user *count)
{
	u64 seen, now;

	if (get_user(seen, count))
		return -EFAULT;
	if (wait_event_interruptible(f->rung, atomic64_read(&f->rings) != seen || tmb_calls_gone(f)))
		return -EINTR;
	now = atomic64_read(&f->rings);
	if (now == seen)
		return -ENOTCONN;
	return put_user(now, count) ? -EFAULT : 0;
}

static long tmb_calls_ioctl(struct file *file, unsigned int command, unsigned long arg)
{
	struct tmb_calls_file *f = file->private_data;

	switch (command) {
	case TMB_CALLS_IOC_INFO:
		return copy_to_user((void __user *)arg, &f->dev->area.info, sizeof(f->dev->area.info)) ? -EFAULT : 0;
	case TMB_CALLS_IOC_WAIT:
		return tmb_calls_wait(f, (u64 __user *)arg);
	case TMB_CALLS_IOC_RING:
		return tmb_calls_ring(f);
	case TMB_CALLS_IOC_WAKE:
		tmb_calls_wake(f);
		return 0;
	}
	return -ENOTTY;
}

static const struct file_operations tmb_calls_fops = {
	.owner = THIS_MODULE,
	.open = tmb_calls_open,
	.release = tmb_calls_release,
	.mmap = tmb_calls_mmap,
	.poll = tmb_calls_poll,
	.unlocked_ioctl = tmb_calls_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

/* Marks the channels of a former life of this guest as left. */
static void tmb_calls_forget(struct tmb_callsdev *dev)
{
	u32 i;

	for (i = 0; i < dev->area.n_channels; i++) {
		u64 word = tmb_load_acquire(&dev->area.header->states[i]);

		if (tmb_calls_state(word) == TMB_CALLS_FREE)
			continue;
		if (tmb_cas64(&dev->area.header->states[i], word, tmb_calls_to(word, TMB_CALLS_LEFT)))
			tmb_store(&tmb_calls_channel(&dev->area, i)->server_rung, 1);
	}
	tmb_doorbell_ring(&dev->area.client, tmb_load(&dev->area.header->doorbell));
}

/* The zone's name where it makes a device name, else its uuid. */
static char *tmb_calls_dev_name(const struct tmb_calls_config *config)
{
	const char *c = config->zone_name;

	while (isalnum(*c) || *c == '-' || *c == '_' || *c == '.')
		c++;
	if (*c || c == config->zone_name)
		return kasprintf(GFP_KERNEL, "tombolo-calls-%pUb", config->zone_uuid);
	return kasprintf(GFP_KERNEL, "tombolo-calls-%s", config->zone_name);
}

struct tmb_callsdev *tmb_callsdev_create(const struct tmb_calls_config *config)
{
	struct tmb_callsdev *dev;
	int err;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	mutex_init(&dev->lock);
	init_waitqueue_head(&dev->looked);
	err = tmb_calls_area_join(&dev->area, config, tmb_calls_look);
	if (err)
		goto free;
	tmb_calls_forget(dev);
	err = tmb_calls_area_publish(&dev->area, &tmb_calls_fops, tmb_calls_dev_name(config));
	if (!err)
		return dev;
free:
	kfree(dev);
	return ERR_PTR(err);
}

void tmb_callsdev_destroy(struct tmb_callsdev *dev)
{
	tmb_calls_area_leave(&dev->area);
	kfree(dev);
}
