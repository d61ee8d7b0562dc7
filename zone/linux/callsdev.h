/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * /dev/tombolo-calls-NAME: a zone's CALLS area for processes of this guest (format/tombolo_calls.h). Each open file is a channel to the
 * server. The process works on the mapped channel itself; the kernel only puts it to sleep, rings the server for it, and releases the
 * channel when it dies.
 */
#ifndef TOMBOLO_CALLSDEV_H
#define TOMBOLO_CALLSDEV_H

#include "callsarea.h"

struct tmb_callsdev;

/* The zone was joined: makes the device. ERR_PTR; -ENODATA: no server has made the area ready. May sleep. */
struct tmb_callsdev *tmb_callsdev_create(const struct tmb_calls_config *config);
/* The device goes. Only when no process has it open: its files hold the module. May sleep. */
void tmb_callsdev_destroy(struct tmb_callsdev *dev);

#endif
