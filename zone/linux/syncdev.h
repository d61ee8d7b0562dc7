/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * /dev/tombolo-sync-NAME: a zone's SYNC area for processes of this guest (format/tombolo_sync.h). They work on the mapped area
 * themselves; the kernel only puts them to sleep, wakes them, rings other members for them, and ends their sessions when they die.
 */
#ifndef TOMBOLO_SYNCDEV_H
#define TOMBOLO_SYNCDEV_H

#include <linux/types.h>

#include "tombolo_zone.h"

struct tmb_syncdev;

struct tmb_syncdev_config {
	const u8 *zone_uuid;	    /* 16 bytes */
	const char *zone_name;	    /* a checked copy, with its NUL */
	void *area;		    /* the SYNC area in the kernel's mapping of the zone … */
	unsigned long pfn;	    /* … its first page frame … */
	u64 length;		    /* … and its checked length, a multiple of the page size */
	struct tmb_member *members; /* the zone's member table */
	u32 member, epoch;	    /* own */
};

/* Makes the device of a joined zone. ERR_PTR. May sleep. */
struct tmb_syncdev *tmb_syncdev_create(const struct tmb_syncdev_config *config);
/*
 * Called before the zone is left: removes the device, ends its processes' sessions, and sleepers get ENODEV. The zone's memory
 * must stay (virtio-pmem can't be unplugged): mappings of processes live until they unmap. May sleep. NULL is allowed.
 */
void tmb_syncdev_destroy(struct tmb_syncdev *dev);

#endif
