// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * No hibernation while a zone is in use. A hibernated guest's QEMU ends, so the host declares its member dead and the others go on. The image would
 * continue as that member: its processes' mappings would show, and change, blocks that belong to other files by then.
 */
#include "tombolo.h"

#include <linux/atomic.h>
#include <linux/notifier.h>
#include <linux/suspend.h>

#define TMB_HIBERNATES (-1)

static atomic_t tmb_zones_used; /* or TMB_HIBERNATES: none can be taken until the hibernation has ended */

/* Called before a zone is used. False: the system hibernates. */
bool tmb_zone_use(void)
{
	return atomic_inc_unless_negative(&tmb_zones_used);
}

void tmb_zone_unuse(void)
{
	atomic_dec(&tmb_zones_used);
}

static int tmb_notified(struct notifier_block *block, unsigned long action, void *data)
{
	switch (action) {
	/* The kernel that loads an image is lost with it, so it may not be a member, either. */
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		if (!atomic_cmpxchg(&tmb_zones_used, 0, TMB_HIBERNATES))
			return NOTIFY_OK;
		pr_err("tombolo: no hibernation while a zone is in use: unmount it first, or suspend to memory\n");
		return notifier_from_errno(-EBUSY);
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		atomic_cmpxchg(&tmb_zones_used, TMB_HIBERNATES, 0);
	}
	return NOTIFY_DONE;
}

static struct notifier_block tmb_notifier = { .notifier_call = tmb_notified };

int tmb_hibernate_init(void)
{
	return register_pm_notifier(&tmb_notifier);
}

void tmb_hibernate_exit(void)
{
	unregister_pm_notifier(&tmb_notifier);
}
