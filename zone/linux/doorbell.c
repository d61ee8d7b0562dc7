// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The driver of ivshmem-doorbell for zones (doorbell.h).
 *
 * BAR 0 of the device has the registers, BAR 2 the page that names its zone; MSI-X vector 0 is a ring. Devices and clients are
 * two lists under one mutex; a client points to the device of its zone. Ringing and the interrupt only read these pointers, under
 * RCU, so they take no lock and a device may be unplugged at any time: it is removed from every client, and a grace period later
 * its registers are unmapped.
 */
#include <linux/eventfd.h>
#include <linux/file.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/poll.h>
#include <linux/rculist.h>
#include <linux/slab.h>

#include "doorbell.h"
#include "probed.h"

/* 6.17 wants it said that work stays on the CPU that queues it. */
#if TMB_HAS_WQ_PERCPU
#define TMB_BELL_PERCPU WQ_PERCPU
#else
#define TMB_BELL_PERCPU 0
#endif
/* 6.8: a signal is always one. */
#if TMB_HAS_EVENTFD_ONE
#define tmb_eventfd_signal(eventfd) eventfd_signal(eventfd)
#else
#define tmb_eventfd_signal(eventfd) eventfd_signal(eventfd, 1)
#endif
#include "tombolo_zone.h"

#define IVSHMEM_VENDOR 0x1af4
#define IVSHMEM_DEVICE 0x1110
/* Registers in BAR 0 (QEMU, docs/specs/ivshmem-spec). */
#define IVSHMEM_POSITION 8
#define IVSHMEM_DOORBELL 12

struct tmb_doorbell {
	struct list_head link;
	struct pci_dev *pdev;
	void __iomem *regs;
	u32 self; /* own peer id + 1 */
	u8 zone_uuid[16];
};

struct tmb_doorbell_process {
	struct tmb_doorbell_client *client;
	struct eventfd_ctx *rings, *rung;
	struct file *rung_file; /* whose wait queue 'wait' is in */
	wait_queue_entry_t wait;
	poll_table table;
};

static DEFINE_MUTEX(tmb_bell_mutex); /* both lists, and every client's bell pointer */
static LIST_HEAD(tmb_bells);
static LIST_HEAD(tmb_clients);
static struct workqueue_struct *tmb_bell_wq;

static void tmb_bell_look(struct work_struct *work)
{
	struct tmb_doorbell_client *client = container_of(work, struct tmb_doorbell_client, work);

	client->look(client);
}

static irqreturn_t tmb_bell_irq(int irq, void *data)
{
	struct tmb_doorbell *bell = data;
	struct tmb_doorbell_client *client;

	rcu_read_lock();
	list_for_each_entry_rcu(client, &tmb_clients, link)
		if (rcu_access_pointer(client->bell) == bell)
			queue_work(tmb_bell_wq, &client->work);
	rcu_read_unlock();
	return IRQ_HANDLED;
}

/* Points a client to the device of its zone, if there is one, and calls its look. */
static void tmb_bell_bind(struct tmb_doorbell_client *client)
{
	struct tmb_doorbell *bell, *found = NULL;

	lockdep_assert_held(&tmb_bell_mutex);
	/* The newest device: the doorbell of an earlier membership stays where QEMU can't unplug it, and gets no rings. */
	list_for_each_entry_reverse(bell, &tmb_bells, link) {
		if (!memcmp(bell->zone_uuid, client->zone_uuid, sizeof(bell->zone_uuid))) {
			found = bell;
			break;
		}
	}
	if (rcu_access_pointer(client->bell) == found)
		return;
	rcu_assign_pointer(client->bell, found);
	queue_work(tmb_bell_wq, &client->work);
}

void tmb_doorbell_register(struct tmb_doorbell_client *client)
{
	INIT_WORK(&client->work, tmb_bell_look);
	RCU_INIT_POINTER(client->bell, NULL);
	RCU_INIT_POINTER(client->process, NULL);
	mutex_lock(&tmb_bell_mutex);
	list_add_tail_rcu(&client->link, &tmb_clients);
	tmb_bell_bind(client);
	mutex_unlock(&tmb_bell_mutex);
}

/* Called with the eventfd's lock held, as eventfd_ctx_do_read() wants it. */
static int tmb_bell_wake(wait_queue_entry_t *wait, unsigned int mode, int sync, void *key)
{
	struct tmb_doorbell_process *process = container_of(wait, struct tmb_doorbell_process, wait);
	u64 rings;

	if (key_to_poll(key) & EPOLLIN) {
		eventfd_ctx_do_read(process->rung, &rings);
		queue_work(tmb_bell_wq, &process->client->work);
	}
	return 0;
}

static void tmb_bell_wait(struct file *file, wait_queue_head_t *queue, poll_table *table)
{
	add_wait_queue(queue, &container_of(table, struct tmb_doorbell_process, table)->wait);
}

int tmb_doorbell_by_process(struct tmb_doorbell_client *client, struct file *rings, struct file *rung)
{
	struct tmb_doorbell_process *process = kzalloc(sizeof(*process), GFP_KERNEL);
	int err;

	if (!process)
		return -ENOMEM;
	process->client = client;
	process->rings = eventfd_ctx_fileget(rings);
	if (IS_ERR(process->rings)) {
		err = PTR_ERR(process->rings);
		goto free;
	}
	process->rung = eventfd_ctx_fileget(rung);
	if (IS_ERR(process->rung)) {
		err = PTR_ERR(process->rung);
		goto put;
	}
	process->rung_file = get_file(rung);
	init_waitqueue_func_entry(&process->wait, tmb_bell_wake);
	init_poll_funcptr(&process->table, tmb_bell_wait);
	vfs_poll(rung, &process->table);
	rcu_assign_pointer(client->process, process);
	queue_work(tmb_bell_wq, &client->work);
	return 0;
put:
	eventfd_ctx_put(process->rings);
free:
	kfree(process);
	return err;
}

static void tmb_bell_end_process(struct tmb_doorbell_process *process)
{
	eventfd_ctx_put(process->rings);
	eventfd_ctx_put(process->rung);
	fput(process->rung_file);
	kfree(process);
}

void tmb_doorbell_unregister(struct tmb_doorbell_client *client)
{
	struct tmb_doorbell_process *process = rcu_dereference_protected(client->process, true);
	u64 rings;

	RCU_INIT_POINTER(client->process, NULL);
	if (process)
		eventfd_ctx_remove_wait_queue(process->rung, &process->wait, &rings);
	mutex_lock(&tmb_bell_mutex);
	list_del_rcu(&client->link);
	mutex_unlock(&tmb_bell_mutex);
	/* No interrupt finds it after this, so the work is not queued again. */
	synchronize_rcu();
	cancel_work_sync(&client->work);
	RCU_INIT_POINTER(client->bell, NULL);
	if (process)
		tmb_bell_end_process(process);
}

bool tmb_doorbell_attached(struct tmb_doorbell_client *client)
{
	return rcu_access_pointer(client->bell) || rcu_access_pointer(client->process);
}

int tmb_doorbell_ring(struct tmb_doorbell_client *client, u32 doorbell)
{
	struct tmb_doorbell_process *process;
	struct tmb_doorbell *bell;
	int err = -ENODEV;

	if (doorbell == 0 || doorbell - 1 > 0xffff)
		return -EINVAL;
	/* The pending bits for the peer must be stored before it looks. */
	tmb_fence();
	rcu_read_lock();
	bell = rcu_dereference(client->bell);
	process = rcu_dereference(client->process);
	if (bell) {
		iowrite32((doorbell - 1) << 16, bell->regs + IVSHMEM_DOORBELL);
		err = 0;
	} else if (process) {
		tmb_eventfd_signal(process->rings);
		err = 0;
	}
	rcu_read_unlock();
	return err;
}

u32 tmb_doorbell_self(struct tmb_doorbell_client *client)
{
	struct tmb_doorbell *bell;
	u32 self;

	rcu_read_lock();
	bell = rcu_dereference(client->bell);
	self = bell ? bell->self : 0;
	rcu_read_unlock();
	return self;
}

/* Reads the page in BAR 2. -ENODEV: an ivshmem device for another use. */
static int tmb_bell_identify(struct tmb_doorbell *bell)
{
	void __iomem *page;
	u64 magic;

	if (pci_resource_len(bell->pdev, 2) < sizeof(struct tmb_doorbell_page))
		return -ENODEV;
	page = pci_iomap(bell->pdev, 2, sizeof(struct tmb_doorbell_page));
	if (!page)
		return -ENOMEM;
	memcpy_fromio(&magic, page + offsetof(struct tmb_doorbell_page, magic), sizeof(magic));
	memcpy_fromio(bell->zone_uuid, page + offsetof(struct tmb_doorbell_page, zone_uuid), sizeof(bell->zone_uuid));
	pci_iounmap(bell->pdev, page);
	return magic == TMB_DOORBELL_MAGIC ? 0 : -ENODEV;
}

static int tmb_bell_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct tmb_doorbell_client *client;
	struct tmb_doorbell *bell;
	u32 position;
	int err;

	bell = kzalloc(sizeof(*bell), GFP_KERNEL);
	if (!bell)
		return -ENOMEM;
	bell->pdev = pdev;
	err = pci_enable_device_mem(pdev);
	if (err)
		goto free;
	err = pci_request_regions(pdev, "tombolo_doorbell");
	if (err)
		goto disable;
	err = tmb_bell_identify(bell);
	if (err)
		goto release;
	err = -ENOMEM;
	bell->regs = pci_iomap(pdev, 0, 0);
	if (!bell->regs)
		goto release;
	position = ioread32(bell->regs + IVSHMEM_POSITION);
	err = -EIO;
	if (position > 0xffff) {
		dev_err(&pdev->dev, "tombolo: no peer id from the doorbell server (position %#x)\n", position);
		goto unmap;
	}
	bell->self = position + 1;
	pci_set_master(pdev);
	err = pci_alloc_irq_vectors(pdev, 1, 1, PCI_IRQ_MSIX);
	if (err < 0) {
		dev_err(&pdev->dev, "tombolo: no MSI-X vector (%d); give the device vectors=1\n", err);
		goto master;
	}
	err = request_irq(pci_irq_vector(pdev, 0), tmb_bell_irq, 0, "tombolo_doorbell", bell);
	if (err)
		goto vectors;
	pci_set_drvdata(pdev, bell);

	mutex_lock(&tmb_bell_mutex);
	list_add_tail(&bell->link, &tmb_bells);
	list_for_each_entry(client, &tmb_clients, link)
		tmb_bell_bind(client);
	mutex_unlock(&tmb_bell_mutex);
	dev_info(&pdev->dev, "tombolo: doorbell of zone %pUb, peer %u\n", bell->zone_uuid, position);
	return 0;

vectors:
	pci_free_irq_vectors(pdev);
master:
	pci_clear_master(pdev);
unmap:
	pci_iounmap(pdev, bell->regs);
release:
	pci_release_regions(pdev);
disable:
	pci_disable_device(pdev);
free:
	kfree(bell);
	return err;
}

static void tmb_bell_remove(struct pci_dev *pdev)
{
	struct tmb_doorbell *bell = pci_get_drvdata(pdev);
	struct tmb_doorbell_client *client;

	mutex_lock(&tmb_bell_mutex);
	list_del(&bell->link);
	list_for_each_entry(client, &tmb_clients, link)
		if (rcu_access_pointer(client->bell) == bell)
			tmb_bell_bind(client);
	mutex_unlock(&tmb_bell_mutex);
	synchronize_rcu();
	free_irq(pci_irq_vector(pdev, 0), bell);
	pci_free_irq_vectors(pdev);
	pci_clear_master(pdev);
	pci_iounmap(pdev, bell->regs);
	pci_release_regions(pdev);
	pci_disable_device(pdev);
	kfree(bell);
}

static const struct pci_device_id tmb_bell_ids[] = {
	{ PCI_DEVICE(IVSHMEM_VENDOR, IVSHMEM_DEVICE) },
	{ 0 },
};
MODULE_DEVICE_TABLE(pci, tmb_bell_ids);

static struct pci_driver tmb_bell_driver = {
	.name = "tombolo_doorbell",
	.id_table = tmb_bell_ids,
	.probe = tmb_bell_probe,
	.remove = tmb_bell_remove,
};

int tmb_doorbell_init(void)
{
	int err;

	tmb_bell_wq = alloc_workqueue("tombolo_doorbell", WQ_HIGHPRI | WQ_MEM_RECLAIM | TMB_BELL_PERCPU, 0);
	if (!tmb_bell_wq)
		return -ENOMEM;
	err = pci_register_driver(&tmb_bell_driver);
	if (err)
		destroy_workqueue(tmb_bell_wq);
	return err;
}

void tmb_doorbell_exit(void)
{
	pci_unregister_driver(&tmb_bell_driver);
	destroy_workqueue(tmb_bell_wq);
}
