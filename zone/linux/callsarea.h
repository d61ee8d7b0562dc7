/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A zone's CALLS area (format/tombolo_calls.h) and a device for it: what the clients' side (callsdev.h) and the server's side (servedev.h)
 * share. Both embed struct tmb_calls_area, set it up with tmb_calls_area_join(), and show the device with tmb_calls_area_publish().
 */
#ifndef TOMBOLO_CALLSAREA_H
#define TOMBOLO_CALLSAREA_H

#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/types.h>

#include "doorbell.h"
#include "tombolo_calls.h"
#include "tombolo_zone.h"

struct tmb_calls_config {
	const u8 *zone_uuid;	    /* 16 bytes */
	const char *zone_name;	    /* a checked copy, with its NUL */
	void *area;		    /* the CALLS area in the kernel's mapping of the zone … */
	unsigned long pfn;	    /* … its first page frame … */
	u64 length;		    /* … and its checked length, a multiple of the page size */
	struct tmb_member *members; /* the zone's member table */
	u32 member;		    /* own */
};

struct tmb_calls_area {
	struct miscdevice misc;
	struct tmb_doorbell_client client;
	struct tmb_calls_header *header;
	struct tmb_calls_info info; /* checked */
	u32 n_channels;		    /* checked */
	unsigned long pfn;
	u64 length;
	struct tmb_member *members;
	u32 member;
};

/*
 * Copies the area's geometry, checks it against the area's length, and registers for the zone's doorbell, which calls 'look' from then on.
 * -ENODATA: the area is not ready; -EPROTONOSUPPORT: another version; -EUCLEAN: its channels don't fit. May sleep.
 */
int tmb_calls_area_join(struct tmb_calls_area *area, const struct tmb_calls_config *config,
			void (*look)(struct tmb_doorbell_client *client));
/* Makes the device /dev/NAME and takes over 'name'; NULL is -ENOMEM. After an error the area is left. May sleep. */
int tmb_calls_area_publish(struct tmb_calls_area *area, const struct file_operations *fops, char *name);
/* Removes the device and leaves the doorbell: 'look' isn't called any more. May sleep. */
void tmb_calls_area_leave(struct tmb_calls_area *area);
/* Maps 'length' bytes of the zone from a page frame on: all of them or, by the offset, a part. They must be mapped shared. */
int tmb_calls_area_mmap(struct vm_area_struct *vma, unsigned long pfn, u64 length);

static inline struct tmb_calls_channel *tmb_calls_channel(struct tmb_calls_area *area, u32 index)
{
	return (void *)((u8 *)area->header + TMB_CALLS_FIRST + index * area->info.channel_size);
}

#endif
