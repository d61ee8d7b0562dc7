/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * /dev/tombolo-calls-NAME: a zone's CALLS area for processes of this guest (format/tombolo_calls.h). Each open file is a channel to the
 * server. The process works on the mapped channel itself; the kernel only puts it to sleep, rings the server for it, and releases the
 * channel when it dies.
 */
#ifndef TOMBOLO_CALLSDEV_H
#define TOMBOLO_CALLSDEV_H

#include <linux/types.h>

#include "tombolo_calls.h"
#include "tombolo_zone.h"

struct tmb_callsdev;

struct tmb_callsdev_config {
	const u8 *zone_uuid;	    /* 16 bytes */
	const char *zone_name;	    /* a checked copy, with its NUL */
	void *area;		    /* the CALLS area in the kernel's mapping of the zone … */
	unsigned long pfn;	    /* … its first page frame … */
	u64 length;		    /* … and its checked length, a multiple of the page size */
	struct tmb_member *members; /* the zone's member table */
	u32 member;		    /* own */
};

/*
 * Copies an area's geometry and checks it against the area's length. -ENODATA: no server has initialized the area; -EPROTONOSUPPORT:
 * another version; -EUCLEAN: its channels don't fit.
 */
int tmb_calls_geometry(struct tmb_calls_header *header, u64 length, struct tmb_calls_info *info, u32 *n_channels);

/* Makes the device of a joined zone. ERR_PTR; -ENODATA: no server has initialized the area. May sleep. */
struct tmb_callsdev *tmb_callsdev_create(const struct tmb_callsdev_config *config);
/* Removes the device. Called when no process has it open: its files keep the module loaded. May sleep. */
void tmb_callsdev_destroy(struct tmb_callsdev *dev);

#endif
