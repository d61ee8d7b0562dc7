/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * /dev/tombolo-serve-UUID: the server's side of a client VM's CALLS area, in the VM that owns an accelerator (format/tombolo_calls.h).
 * The server and its workers map the area and work on it themselves; the kernel puts the server to sleep, rings the client VM, and marks
 * the channels as lost when the server dies.
 */
#ifndef TOMBOLO_SERVEDEV_H
#define TOMBOLO_SERVEDEV_H

#include "callsdev.h"

struct tmb_servedev;

/* Makes the device of a joined zone. ERR_PTR; -ENODATA: the host has not initialized the area. May sleep. */
struct tmb_servedev *tmb_servedev_create(const struct tmb_callsdev_config *config);
/* Removes the device. Called when no process has it open: its files keep the module loaded. May sleep. */
void tmb_servedev_destroy(struct tmb_servedev *dev);

#endif
