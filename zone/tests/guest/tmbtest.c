// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The kernel half of zone/'s tests in VMs: hammers a counter in a zone, rings and answers doorbells, and lets user space
 * drive it through /sys/module/tmbtest/parameters.
 *
 * With TMB_TEST_ORDINARY_ATOMICS the counter is incremented by the kernel's own atomic64_inc, which a guest with one vCPU
 * runs without LOCK: the test must then fail.
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/wait.h>

#include "doorbell.h"
#include "syncdev.h"
#include "tombolo_zone.h"

static unsigned long long phys, size;
module_param(phys, ullong, 0444);
MODULE_PARM_DESC(phys, "physical address of the zone (/proc/iomem: Persistent Memory)");
module_param(size, ullong, 0444);

static u8 *zone;
static struct tmb_doorbell_client client;
static DECLARE_WAIT_QUEUE_HEAD(rang);
static atomic_t rings; /* doorbells with pending bits */
static int echo_to = -1;
module_param(echo_to, int, 0644);
MODULE_PARM_DESC(echo_to, "member slot to ring whenever this guest is rung; -1: none");

static struct tmb_member *slot(unsigned int id)
{
	return (struct tmb_member *)(zone + TMB_PAGE) + (id % TMB_MAX_MEMBERS);
}

/* Returns the own slot, by the own peer id; NULL: no doorbell yet. */
static struct tmb_member *own_slot(void)
{
	u32 self = tmb_doorbell_self(&client);
	unsigned int i;

	for (i = 0; self && i < TMB_MAX_MEMBERS; i++)
		if (tmb_load(&slot(i)->doorbell) == self)
			return slot(i);
	return NULL;
}

static int ring(unsigned int id)
{
	tmb_fetch_or(&slot(id)->pending, TMB_PENDING_SYNC);
	return tmb_doorbell_ring(&client, tmb_load(&slot(id)->doorbell));
}

static void look(struct tmb_doorbell_client *c)
{
	struct tmb_member *own = own_slot();

	if (!own || !tmb_exchange(&own->pending, 0ULL))
		return;
	atomic_inc(&rings);
	wake_up(&rang);
	if (READ_ONCE(echo_to) >= 0)
		ring(READ_ONCE(echo_to));
}

/* A write of n increments the counter at the start of the first area after the member table's page n times. */
static int hammer_set(const char *val, const struct kernel_param *kp)
{
	u64 *counter = (u64 *)(zone + (1 << 20));
	unsigned long long n, i;
	int err = kstrtoull(val, 0, &n);

	if (err)
		return err;
	/* Both guests start together: the first word after the counter counts the ready ones. */
	tmb_fetch_add(&counter[8], 1ULL);
	for (i = 0; tmb_load_acquire(&counter[8]) < 2; i++) {
		if (i > 60 * 1000)
			return -ETIMEDOUT;
		usleep_range(900, 1100);
	}
	for (i = 0; i < n; i++) {
#ifdef TMB_TEST_ORDINARY_ATOMICS
		atomic64_inc((atomic64_t *)counter);
#else
		tmb_fetch_add(counter, 1ULL);
#endif
		if (!(i & 0xffff))
			cond_resched();
	}
	return 0;
}
static const struct kernel_param_ops hammer_ops = { .set = hammer_set };
module_param_cb(hammer, &hammer_ops, NULL, 0200);

/* A write of "slot n" rings the slot n times and waits for each answer; the mean round trip goes to round_trip_ns. */
static unsigned long long round_trip_ns;
module_param(round_trip_ns, ullong, 0444);

static int ping_set(const char *val, const struct kernel_param *kp)
{
	unsigned int id, n, i;
	ktime_t start;

	if (sscanf(val, "%u %u", &id, &n) != 2 || !n)
		return -EINVAL;
	start = ktime_get();
	for (i = 0; i < n; i++) {
		int before = atomic_read(&rings);
		int err = ring(id);

		if (err)
			return err;
		if (!wait_event_timeout(rang, atomic_read(&rings) != before, 10 * HZ))
			return -ETIMEDOUT;
	}
	round_trip_ns = div_u64(ktime_to_ns(ktime_sub(ktime_get(), start)), n);
	return 0;
}
static const struct kernel_param_ops ping_ops = { .set = ping_set };
module_param_cb(ping, &ping_ops, NULL, 0200);

static int rings_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%d\n", atomic_read(&rings));
}
static const struct kernel_param_ops rings_ops = { .get = rings_get };
module_param_cb(rings, &rings_ops, NULL, 0444);

/* Own member slot, -1 while there is none. */
static int self_get(char *buf, const struct kernel_param *kp)
{
	struct tmb_member *own = zone ? own_slot() : NULL;

	return sysfs_emit(buf, "%d\n", own ? (int)(own - slot(0)) : -1);
}
static const struct kernel_param_ops self_ops = { .get = self_get };
module_param_cb(self, &self_ops, NULL, 0444);

/*
 * "leave" takes the device away, as an unmount does, though processes have it open. Another write joins the zone as the member whose doorbell this guest
 * has, and makes the device of its SYNC area.
 */
static struct tmb_syncdev *syncdev;

static int join_set(const char *val, const struct kernel_param *kp)
{
	struct tmb_zone_header *h = (struct tmb_zone_header *)zone;
	struct tmb_member *own = own_slot();
	struct tmb_syncdev_config config = { .zone_uuid = h->uuid, .zone_name = "test" };
	u64 was;
	u32 i;

	if (!strncmp(val, "leave", 5)) {
		tmb_syncdev_destroy(syncdev);
		syncdev = NULL;
		return 0;
	}
	if (!own || syncdev)
		return -EBUSY;
	was = tmb_load_acquire(&own->state_epoch);
	if (tmb_state(was) != TMB_MEMBER_INVITED && tmb_state(was) != TMB_MEMBER_DEAD)
		return -EPERM;
	config.epoch = tmb_epoch(was) + 1;
	if (!tmb_cas64(&own->state_epoch, was, tmb_state_epoch(TMB_MEMBER_ACTIVE, config.epoch)))
		return -EAGAIN;
	config.members = slot(0);
	config.member = own - slot(0);
	for (i = 0; i < TMB_MAX_AREAS; i++) {
		if (h->areas[i].type != TMB_AREA_SYNC)
			continue;
		config.area = zone + h->areas[i].offset;
		config.pfn = PHYS_PFN(phys + h->areas[i].offset);
		config.length = h->areas[i].length;
	}
	syncdev = tmb_syncdev_create(&config);
	if (IS_ERR(syncdev)) {
		int err = PTR_ERR(syncdev);

		syncdev = NULL;
		return err;
	}
	return 0;
}
static const struct kernel_param_ops join_ops = { .set = join_set };
module_param_cb(join, &join_ops, NULL, 0200);

static int __init tmbtest_init(void)
{
	struct tmb_zone_header *header;
	int err;

	zone = memremap(phys, size, MEMREMAP_WB);
	if (!zone)
		return -ENOMEM;
	header = (struct tmb_zone_header *)zone;
	if (tmb_load_acquire(&header->magic) != TMB_ZONE_MAGIC) {
		pr_err("tmbtest: no zone at %#llx\n", phys);
		memunmap(zone);
		return -EINVAL;
	}
	err = tmb_doorbell_init();
	if (err) {
		memunmap(zone);
		return err;
	}
	memcpy(client.zone_uuid, header->uuid, 16);
	client.look = look;
	tmb_doorbell_register(&client);
	return 0;
}

static void __exit tmbtest_exit(void)
{
	tmb_syncdev_destroy(syncdev);
	tmb_doorbell_unregister(&client);
	tmb_doorbell_exit();
	memunmap(zone);
}

module_init(tmbtest_init);
module_exit(tmbtest_exit);
MODULE_LICENSE("Dual BSD/GPL");
MODULE_DESCRIPTION("Tests of zones in VMs");
