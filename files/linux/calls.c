// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Zones for accelerator calls: `echo NAME > /sys/module/tombolo/parameters/calls` joins a zone and makes its device
 * (zone/linux/callsdev.h); in the VM that owns the accelerator `echo UUID > …/serve` does so for a client VM's zone
 * (zone/linux/servedev.h). It stays until the module goes, as virtio-pmem itself can't be unplugged.
 */
#include "tombolo.h"
#include "callsdev.h"
#include "servedev.h"

#include <linux/list.h>
#include <linux/slab.h>

struct tmb_calls_zone {
	struct list_head link;
	struct tmb_zone zone;
	struct tmb_doorbell_client doorbell; /* to find the own slot */
	struct tmb_callsdev *dev;    /* one of the two, */
	struct tmb_servedev *served; /* the other one is NULL */
	u32 member, epoch;
};

static DEFINE_MUTEX(calls_mutex); /* the list */
static LIST_HEAD(calls_zones);

static void tmb_nothing_to_look_for(struct tmb_doorbell_client *client)
{
}

static int tmb_start_device(struct tmb_calls_zone *c, bool serve)
{
	const struct tmb_calls_config config = {
		.zone_uuid = c->zone.uuid,
		.zone_name = c->zone.name,
		.area = c->zone.addr + c->zone.calls_offset,
		.pfn = c->zone.pfn + PHYS_PFN(c->zone.calls_offset),
		.length = c->zone.calls_length,
		.members = c->zone.members,
		.member = c->member,
	};

	if (serve) {
		c->served = tmb_servedev_create(&config);
		return PTR_ERR_OR_ZERO(c->served);
	}
	c->dev = tmb_callsdev_create(&config);
	return PTR_ERR_OR_ZERO(c->dev);
}

static int tmb_join(struct tmb_calls_zone *c, bool serve)
{
	bool writable, joined;
	u32 doorbell;
	int err;

	memcpy(c->doorbell.zone_uuid, c->zone.uuid, sizeof(c->zone.uuid));
	c->doorbell.look = tmb_nothing_to_look_for;
	tmb_doorbell_register(&c->doorbell);
	doorbell = tmb_doorbell_self(&c->doorbell);
	tmb_doorbell_unregister(&c->doorbell);
	if (!doorbell)
		return -ENODEV;
	err = tmb_zone_join(&c->zone, -1, doorbell, false, &c->member, &c->epoch, &writable, &joined);
	if (err)
		return err;
	if (!joined)
		return -EROFS;
	err = tmb_start_device(c, serve);
	if (err)
		tmb_zone_leave(&c->zone, c->member, c->epoch);
	return err;
}

static int tmb_add(const char *source, bool serve)
{
	struct tmb_calls_zone *c = kzalloc(sizeof(*c), GFP_KERNEL);
	char *path = NULL;
	int err;

	if (!c)
		return -ENOMEM;
	err = tmb_zone_find(source, &c->zone, &path);
	if (err)
		goto free;
	err = tmb_zone_attach(&c->zone, path, c);
	kfree(path);
	if (err)
		goto free;
	err = c->zone.calls_length ? tmb_join(c, serve) : -ENODATA;
	if (err) {
		tmb_zone_detach(&c->zone, c);
		goto free;
	}
	mutex_lock(&calls_mutex);
	list_add(&c->link, &calls_zones);
	mutex_unlock(&calls_mutex);
	return 0;
free:
	pr_err("tombolo: %s: no zone for calls%s (%d)\n", source,
	       err == -ENODATA ? ": it has no such area, or its server hasn't made it ready" :
	       err == -ENODEV  ? " with a doorbell of this VM" :
	       err == -ENOSPC  ? ": it keeps no slot for this VM" :
				 "",
	       err);
	kfree(c);
	return err;
}

static int tmb_set(const char *value, bool serve)
{
	char *source = kstrdup(value, GFP_KERNEL);
	int err;

	if (!source)
		return -ENOMEM;
	err = tmb_add(strim(source), serve);
	kfree(source);
	return err;
}

static int tmb_calls_set(const char *value, const struct kernel_param *param)
{
	return tmb_set(value, false);
}

static int tmb_serve_set(const char *value, const struct kernel_param *param)
{
	return tmb_set(value, true);
}

static int tmb_get(char *buffer, bool serve)
{
	struct tmb_calls_zone *c;
	int n = 0;

	mutex_lock(&calls_mutex);
	list_for_each_entry(c, &calls_zones, link)
		if (serve && c->served)
			n += scnprintf(buffer + n, PAGE_SIZE - n, "%pUb\n", c->zone.uuid);
		else if (!serve && c->dev)
			n += scnprintf(buffer + n, PAGE_SIZE - n, "%s\n", c->zone.name);
	mutex_unlock(&calls_mutex);
	return n;
}

static int tmb_calls_get(char *buffer, const struct kernel_param *param)
{
	return tmb_get(buffer, false);
}

static int tmb_serve_get(char *buffer, const struct kernel_param *param)
{
	return tmb_get(buffer, true);
}

static const struct kernel_param_ops tmb_calls_ops = { .set = tmb_calls_set, .get = tmb_calls_get };
module_param_cb(calls, &tmb_calls_ops, NULL, 0600);
MODULE_PARM_DESC(calls, "write a zone's name, uuid or device: its channels for calls become /dev/tombolo-calls-NAME");

static const struct kernel_param_ops tmb_serve_ops = { .set = tmb_serve_set, .get = tmb_serve_get };
module_param_cb(serve, &tmb_serve_ops, NULL, 0600);
MODULE_PARM_DESC(serve, "write the uuid of a client VM's zone: /dev/tombolo-serve-UUID is for the server of its calls");

/* Runs when no file is open any more: open files keep the module loaded. */
void tmb_calls_exit(void)
{
	struct tmb_calls_zone *c, *next;

	list_for_each_entry_safe(c, next, &calls_zones, link) {
		if (c->served)
			tmb_servedev_destroy(c->served);
		else
			tmb_callsdev_destroy(c->dev);
		tmb_zone_leave(&c->zone, c->member, c->epoch);
		tmb_zone_detach(&c->zone, c);
		kfree(c);
	}
}
