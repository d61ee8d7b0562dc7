// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The server's side of a CALLS area (servedev.h).
 *
 * The client VM writes the zone too. The area's geometry is copied and checked once; of the member table only a slot's state, role and
 * doorbell are used, each loaded once. False values there harm only the client VM, since each has a zone of its own.
 */
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/wait.h>

#include "servedev.h"

struct tmb_servedev {
	struct tmb_calls_area area;
	/* this kernel's own memory */
	atomic64_t rings;
	s64 seen; /* by the server's last read */
	atomic_t served;
	wait_queue_head_t rung, free;
};

/* Returns the client VM's life, and the value of its doorbell; 0: it has not joined. */
static u64 tmb_serve_life(struct tmb_servedev *dev, u32 *doorbell)
{
	u32 i;

	for (i = 0; i < TMB_MAX_MEMBERS; i++) {
		struct tmb_member *m = &dev->area.members[i];
		u64 word = tmb_load_acquire(&m->state_epoch);

		if (i == dev->area.member || tmb_state(word) != TMB_MEMBER_ACTIVE || tmb_load(&m->role) != TMB_ROLE_VM)
			continue;
		*doorbell = tmb_load(&m->doorbell);
		return (u64)(i + 1) << 32 | tmb_epoch(word);
	}
	*doorbell = 0;
	return 0;
}

static void tmb_serve_ring(struct tmb_servedev *dev)
{
	u32 doorbell;

	/* A client VM without a doorbell is about to end, or has ended. */
	if (tmb_serve_life(dev, &doorbell))
		tmb_doorbell_ring(&dev->area.client, doorbell);
}

/* Called when the client VM rang, or the host after a change of the member table. */
static void tmb_serve_look(struct tmb_doorbell_client *client)
{
	struct tmb_servedev *dev = container_of(client, struct tmb_servedev, area.client);

	tmb_exchange(&dev->area.members[dev->area.member].pending, 0);
	atomic64_inc(&dev->rings);
	wake_up_all(&dev->rung);
}

/* Called when the server has ended: waiting clients get an error, and no further one waits. */
static void tmb_serve_abandon(struct tmb_servedev *dev)
{
	u32 i;

	tmb_store(&dev->area.header->doorbell, 0);
	/* A client that takes a channel looks at the doorbell afterwards: it sees the 0, or its channel is seen below. */
	tmb_fence();
	for (i = 0; i < dev->area.n_channels; i++) {
		u64 word = tmb_load_acquire(&dev->area.header->states[i]);

		if (tmb_calls_state(word) != TMB_CALLS_WANTED && tmb_calls_state(word) != TMB_CALLS_SERVED)
			continue;
		if (tmb_cas64(&dev->area.header->states[i], word, tmb_calls_to(word, TMB_CALLS_LOST)))
			tmb_store(&tmb_calls_channel(&dev->area, i)->client_rung, 1);
	}
	tmb_serve_ring(dev);
}

static bool tmb_serve_is_server(struct file *file)
{
	return file->f_mode & FMODE_READ;
}

static int tmb_serve_open(struct inode *inode, struct file *file)
{
	struct tmb_servedev *dev = container_of(file->private_data, struct tmb_servedev, area.misc);

	file->private_data = dev;
	if (!tmb_serve_is_server(file))
		return 0;
	if (wait_event_interruptible(dev->free, atomic_cmpxchg(&dev->served, 0, 1) == 0))
		return -ERESTARTSYS;
	/* The first read returns the present state. */
	dev->seen = atomic64_read(&dev->rings) - 1;
	return 0;
}

/* A mapping holds its file: neither the server nor its workers have the area mapped any more. */
static int tmb_serve_release(struct inode *inode, struct file *file)
{
	struct tmb_servedev *dev = file->private_data;

	if (!tmb_serve_is_server(file))
		return 0;
	tmb_serve_abandon(dev);
	atomic_set(&dev->served, 0);
	wake_up_all(&dev->free);
	return 0;
}

static ssize_t tmb_serve_read(struct file *file, char __user *to, size_t length, loff_t *at)
{
	struct tmb_servedev *dev = file->private_data;
	u32 doorbell;
	u64 life;

	if (length != sizeof(life))
		return -EINVAL;
	if (wait_event_interruptible(dev->rung, atomic64_read(&dev->rings) != READ_ONCE(dev->seen)))
		return -ERESTARTSYS;
	WRITE_ONCE(dev->seen, atomic64_read(&dev->rings));
	/* A client that takes a channel from here on rings this VM. */
	tmb_store(&dev->area.header->doorbell, tmb_doorbell_self(&dev->area.client));
	life = tmb_serve_life(dev, &doorbell);
	return copy_to_user(to, &life, sizeof(life)) ? -EFAULT : sizeof(life);
}

static ssize_t tmb_serve_write(struct file *file, const char __user *from, size_t length, loff_t *at)
{
	tmb_serve_ring(file->private_data);
	return length;
}

/* The kernel refuses a file that was not opened for reading. */
static int tmb_serve_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct tmb_servedev *dev = file->private_data;

	return tmb_calls_area_mmap(vma, dev->area.pfn, dev->area.length);
}

static const struct file_operations tmb_serve_fops = {
	.owner = THIS_MODULE,
	.open = tmb_serve_open,
	.release = tmb_serve_release,
	.read = tmb_serve_read,
	.write = tmb_serve_write,
	.mmap = tmb_serve_mmap,
};

struct tmb_servedev *tmb_servedev_create(const struct tmb_calls_config *config)
{
	struct tmb_servedev *dev;
	int err;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	init_waitqueue_head(&dev->rung);
	init_waitqueue_head(&dev->free);
	err = tmb_calls_area_join(&dev->area, config, tmb_serve_look);
	if (!err)
		err = tmb_calls_area_publish(&dev->area, &tmb_serve_fops,
					     kasprintf(GFP_KERNEL, "tombolo-serve-%pUb", config->zone_uuid));
	if (!err)
		return dev;
	kfree(dev);
	return ERR_PTR(err);
}

void tmb_servedev_destroy(struct tmb_servedev *dev)
{
	tmb_calls_area_leave(&dev->area);
	kfree(dev);
}
