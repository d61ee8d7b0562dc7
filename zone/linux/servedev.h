/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * /dev/tombolo-serve-UUID: the server's side of a client VM's CALLS area, in the VM that owns an accelerator (format/tombolo_calls.h).
 * The server and its workers map the area and work on it themselves; the kernel puts the server to sleep, rings the client VM, and marks
 * the channels as lost when the server dies.
 */
#ifndef TOMBOLO_SERVEDEV_H
#define TOMBOLO_SERVEDEV_H

#include "callsarea.h"

struct tmb_servedev;

/* The zone was joined: makes the device. ERR_PTR; -ENODATA: the host has not made the area ready. May sleep. */
struct tmb_servedev *tmb_servedev_create(const struct tmb_calls_config *config);
/* The device goes. Only when no process has it open: its files hold the module. May sleep. */
void tmb_servedev_destroy(struct tmb_servedev *dev);

#endif
