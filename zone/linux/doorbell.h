/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Doorbells between the members of a zone, in a guest: the driver of ivshmem-doorbell (PCI 1af4:1110), linked into tombolo.ko.
 *
 * A doorbell carries no data: it only has its member look at the zone (struct tmb_member's 'pending', set before ringing). The device and the
 * zone's memory are two devices that come and go in any order; they find each other by the zone's uuid, which the doorbell's memory part (struct
 * tmb_doorbell_page) carries. A client registers for a uuid whether or not the device is there yet.
 */
#ifndef TOMBOLO_DOORBELL_H
#define TOMBOLO_DOORBELL_H

#include <linux/list.h>
#include <linux/types.h>
#include <linux/workqueue.h>

struct eventfd_ctx;
struct file;
struct tmb_doorbell;
struct tmb_doorbell_process;

struct tmb_doorbell_client {
	u8 zone_uuid[16];
	/*
	 * Called when the doorbell rang, or the device was plugged or unplugged (which changes the own peer id). Runs in a work item of the
	 * client's own; may sleep; calls of one client don't overlap. Must not unregister this client.
	 */
	void (*look)(struct tmb_doorbell_client *client);
	/* private */
	struct list_head link;
	struct work_struct work;
	struct tmb_doorbell __rcu *bell;
	struct tmb_doorbell_process __rcu *process;
};

/* Called by the module's init and exit; exit after every client is unregistered. */
int tmb_doorbell_init(void);
void tmb_doorbell_exit(void);

/* Registers a client whose zone_uuid and look are set. May sleep. If the device is there already, look is called soon. */
void tmb_doorbell_register(struct tmb_doorbell_client *client);
/* Unregisters a client and waits until look is not running; afterwards it isn't called any more. May sleep. */
void tmb_doorbell_unregister(struct tmb_doorbell_client *client);

/*
 * On a host, which has no device, a process rings for a registered client: it is asked to by the eventfd 'rings', and then rings the members that have pending
 * bits. The process signals the eventfd 'rung' when the client's own doorbell rang. May sleep. 0, or -EINVAL: not eventfds, -ENOMEM.
 */
int tmb_doorbell_by_process(struct tmb_doorbell_client *client, struct file *rings, struct file *rung);
/* Returns whether there is a device or a process for the client's rings. Any context. */
bool tmb_doorbell_attached(struct tmb_doorbell_client *client);

/*
 * Rings a member: 'doorbell' is the value of its slot's field (ivshmem peer id + 1). 0, or -ENODEV: no device for this zone, -EINVAL: 0 or not a
 * peer id. Ringing a dead or unknown peer is harmless. Any context.
 */
int tmb_doorbell_ring(struct tmb_doorbell_client *client, u32 doorbell);
/* Returns the own value of that field, by which a guest finds its slot; 0: no device. Any context. */
u32 tmb_doorbell_self(struct tmb_doorbell_client *client);

#endif
