// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The guest's half of the IOMMU bypass (bypass.h).
 *
 * The module reads the map of the guest's memory from the supervisor. From then on, before a driver is bound to one of the VM's devices, it
 * asks the supervisor to let the device's DMA go untranslated and gives the device DMA operations that translate (dma.c). When the driver
 * is unbound, and at the end of this kernel, it asks to have the DMA blocked. A device whose driver is bound without the module stays
 * as it was: translated by the IOMMU. So does one whose driver hands it to programs, which know nothing of the map.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/kexec.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/suspend.h>
#include <linux/syscore_ops.h>

#include "bypass_guest.h"

/* Looks for an answer of the supervisor before a request is withdrawn: some 20 seconds. */
#define TBP_PATIENCE 20000

static bool tbp_rebind;
module_param_named(rebind, tbp_rebind, bool, 0444);
MODULE_PARM_DESC(rebind, "unbind the drivers that the VM's devices have already, and bind them again");

struct tbp_map tbp_guest_map;

static DEFINE_MUTEX(tbp_lock); /* one request at a time */
static struct tbp_page *tbp_page;
static u32 tbp_devices;
static u32 tbp_functions[TBP_DEVICES];
static bool tbp_is_on[TBP_DEVICES];
static bool tbp_ending; /* under tbp_lock: the kernel ends */
static bool tbp_withdrew; /* a request, whose page the supervisor may still look at */

/* Writes the page's address to the port. QEMU takes each byte. The first newline ends what another has begun to write there. */
static void tbp_ring(void)
{
	char line[19];
	int i;

	snprintf(line, sizeof(line), "\n%016llx\n", (u64)virt_to_phys(tbp_page));
	for (i = 0; i < 18; i++)
		outb(line[i], TBP_PORT);
}

/*
 * Sends the request that is in the page and waits for the answer. A request that the supervisor has not taken up after TBP_PATIENCE is
 * withdrawn, if `withdraw` says so. Otherwise this waits on: a request to block DMA must be carried out, and one that the supervisor works on
 * can't be taken back.
 */
static int tbp_ask(u16 operation, bool withdraw)
{
	unsigned int looks;
	u32 status;

	tbp_page->magic = TBP_MAGIC;
	tbp_page->version = TBP_VERSION;
	tbp_page->operation = operation;
	/* The supervisor may look at the page for an earlier line. */
	smp_store_release(&tbp_page->status, TBP_PENDING);
	tbp_ring();
	for (looks = 1;; looks++) {
		status = smp_load_acquire(&tbp_page->status);
		if (status == TBP_DONE || status == TBP_REFUSED)
			return status == TBP_DONE ? 0 : -EPERM;
		if (looks % TBP_PATIENCE == 0) {
			/* Not cmpxchg(): a kernel with one CPU leaves out its lock prefix. */
			if (withdraw && sync_cmpxchg(&tbp_page->status, TBP_PENDING, TBP_WITHDRAWN) == TBP_PENDING) {
				tbp_withdrew = true;
				return -ETIMEDOUT;
			}
			pr_warn("the host has not answered yet\n");
		}
		usleep_range(500, 1000);
	}
}

/* Asks for a device's DMA to go untranslated, or to be blocked. */
static int tbp_switch(u32 device, bool on)
{
	tbp_page->device = device;
	return tbp_ask(on ? TBP_ON : TBP_OFF, on);
}

static int tbp_read_map(void)
{
	u64 first = 0, frames;
	u32 count;
	int ret = tbp_ask(TBP_HELLO, true);

	if (ret)
		return ret;
	frames = tbp_page->frames;
	tbp_devices = tbp_page->devices;
	if (tbp_devices > TBP_DEVICES)
		return -EPROTO;
	memcpy(tbp_functions, tbp_page->functions, sizeof(tbp_functions));
	ret = tbp_map_begin(&tbp_guest_map, tbp_page->page, frames, tbp_page->highest);
	while (!ret && first < frames) {
		tbp_page->first = first;
		ret = tbp_ask(TBP_MAP, true);
		count = tbp_page->count;
		if (!ret)
			ret = tbp_map_take(&tbp_guest_map, first, count, tbp_page->frame);
		first += count;
	}
	return ret;
}

static int tbp_find(struct pci_dev *pdev)
{
	u32 i;

	for (i = 0; i < tbp_devices; i++)
		if (!pci_domain_nr(pdev->bus) && tbp_functions[i] == (pdev->bus->number << 8 | pdev->devfn))
			return i;
	return -ENODEV;
}

static int tbp_found(struct resource *resource, void *unused)
{
	return 1;
}

/* Whether a kernel may start at a crash, with the device as the crash leaves it: memory is reserved for one. */
static bool tbp_has_crash_kernel(void)
{
	return kexec_crash_loaded() || walk_iomem_res_desc(IORES_DESC_CRASH_KERNEL, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0,
							   ~0ULL, NULL, tbp_found) == 1;
}

/* Has DMA go untranslated and gives the device its operations. Holds the module for as long as the device has them. */
static int tbp_switch_on(struct pci_dev *pdev, u32 device)
{
	bool new = pdev->dev.dma_ops != &tbp_dma_ops;
	int ret = -ESHUTDOWN;

	if (new && !try_module_get(THIS_MODULE))
		return ret;
	mutex_lock(&tbp_lock);
	if (!tbp_ending)
		ret = tbp_switch(device, true);
	tbp_is_on[device] = !ret;
	mutex_unlock(&tbp_lock);
	if (new && !ret)
		set_dma_ops(&pdev->dev, &tbp_dma_ops);
	else if (new)
		module_put(THIS_MODULE);
	return ret;
}

/* Returns whether the driver lets programs use the device. They give it guest-physical addresses, since no DMA operation translates theirs. */
static bool tbp_is_for_programs(const struct device_driver *driver)
{
	return to_pci_driver(driver)->driver_managed_dma || !strcmp(driver->name, "uio_pci_generic") ||
	       !strcmp(driver->name, "igb_uio");
}

static void tbp_start(struct pci_dev *pdev, u32 device)
{
	int ret;

	if (tbp_is_on[device])
		return;
	if (tbp_is_for_programs(pdev->dev.driver)) {
		pci_warn(pdev, "does not go untranslated: programs that use it by %s would have it write to the host's memory\n",
			 pdev->dev.driver->name);
		return;
	}
	if (device_iommu_mapped(&pdev->dev)) {
		pci_warn(pdev, "stays translated: it is behind an IOMMU of this machine's own\n");
		return;
	}
	if (tbp_has_crash_kernel()) {
		pci_warn(pdev, "stays translated: a crash kernel's driver would write to the host's memory (crashkernel=, /sys/kernel/kexec_crash_size)\n");
		return;
	}
	ret = tbp_switch_on(pdev, device);
	if (ret) {
		pci_warn(pdev, "the host refuses untranslated DMA (%d)\n", ret);
		return;
	}
#ifdef CONFIG_DMA_NEED_SYNC
#if TBP_HAS_SKIP_SYNC_FLAG /* 7.1 */
	dev_clear_dma_skip_sync(&pdev->dev);
#else
	pdev->dev.dma_skip_sync = false;
#endif
#endif
	pci_info(pdev, "DMA goes untranslated\n");
}

/* A device whose DMA the host does not block keeps its operations: no driver may use it without. */
static void tbp_block(struct pci_dev *pdev, u32 device)
{
	mutex_lock(&tbp_lock);
	if (tbp_is_on[device]) {
		tbp_is_on[device] = tbp_switch(device, false);
		if (tbp_is_on[device])
			pci_err(pdev, "the host does not block its DMA, which goes untranslated\n");
	}
	mutex_unlock(&tbp_lock);
}

static void tbp_end(struct pci_dev *pdev, u32 device)
{
	if (pdev->dev.dma_ops != &tbp_dma_ops || tbp_is_on[device])
		return;
	set_dma_ops(&pdev->dev, NULL);
	module_put(THIS_MODULE);
}

static int tbp_bound(struct notifier_block *block, unsigned long action, void *data)
{
	struct pci_dev *pdev = to_pci_dev(data);
	int device = tbp_find(pdev);

	if (device < 0)
		return NOTIFY_DONE;
	switch (action) {
	case BUS_NOTIFY_BIND_DRIVER:
		tbp_start(pdev, device);
		break;
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
		/* What the driver has allocated is freed after this, by the operations that allocated it: they stay. */
		tbp_block(pdev, device);
		break;
	case BUS_NOTIFY_UNBOUND_DRIVER:
		tbp_block(pdev, device);
		tbp_end(pdev, device);
		break;
	}
	return NOTIFY_OK;
}

static struct notifier_block tbp_notifier = { .notifier_call = tbp_bound };

/* An image of this kernel would continue in memory that is elsewhere on the host. */
static int tbp_suspending(struct notifier_block *block, unsigned long action, void *data)
{
	return action == PM_HIBERNATION_PREPARE ? NOTIFY_BAD : NOTIFY_DONE;
}

static struct notifier_block tbp_pm_notifier = { .notifier_call = tbp_suspending };

/* The drivers have stopped their devices; the next kernel may not have this module. Other CPUs may still run, and bind drivers. */
static void tbp_shutdown(void)
{
	u32 i;

	mutex_lock(&tbp_lock);
	tbp_ending = true;
	for (i = 0; i < tbp_devices; i++)
		if (tbp_is_on[i] && tbp_switch(i, false))
			pr_emerg("the host does not block DMA, which goes untranslated\n");
	mutex_unlock(&tbp_lock);
}

#if TBP_HAS_SYSCORE_DATA
static void tbp_syscore_shutdown(void *data)
{
	tbp_shutdown();
}

static const struct syscore_ops tbp_syscore_ops = { .shutdown = tbp_syscore_shutdown };
static struct syscore tbp_syscore = { .ops = &tbp_syscore_ops };
#else
static struct syscore_ops tbp_syscore = { .shutdown = tbp_shutdown };
#define register_syscore register_syscore_ops
#define unregister_syscore unregister_syscore_ops
#endif

/* Devices whose drivers were here first. */
static int tbp_late(struct device *dev, void *unused)
{
	struct pci_dev *pdev = to_pci_dev(dev);

	if (tbp_find(pdev) < 0 || !pdev->driver)
		return 0;
	if (!tbp_rebind)
		pci_notice(pdev, "stays translated until its driver is bound again\n");
	else if (device_reprobe(dev) < 0)
		pci_warn(pdev, "no driver takes it again\n");
	return 0;
}

/* A page that the supervisor may still look at is never another's memory. */
static void tbp_free_page(void)
{
	if (!tbp_withdrew)
		free_page((unsigned long)tbp_page);
}

static int __init tbp_init(void)
{
	int ret;

	if (inb(TBP_PORT) != TBP_PORT_READS)
		return -ENODEV;
	tbp_page = (void *)get_zeroed_page(GFP_KERNEL);
	if (!tbp_page)
		return -ENOMEM;
	ret = tbp_read_map() ?: tbp_dma_begin();
	if (ret) {
		pr_err("the host gives no map of this machine's memory (%d)\n", ret);
		goto fail;
	}
	ret = register_pm_notifier(&tbp_pm_notifier) ?: bus_register_notifier(&pci_bus_type, &tbp_notifier);
	if (ret) {
		unregister_pm_notifier(&tbp_pm_notifier);
		tbp_dma_end();
		goto fail;
	}
	register_syscore(&tbp_syscore);
	pr_info("%u devices, %llu pages of %llu KiB\n", tbp_devices, tbp_guest_map.frames,
		(1ULL << tbp_guest_map.shift) >> 10);
	bus_for_each_dev(&pci_bus_type, NULL, NULL, tbp_late);
	return 0;
fail:
	tbp_map_end(&tbp_guest_map);
	tbp_free_page();
	return ret;
}

/* No device has these operations: each that has holds the module. */
static void __exit tbp_exit(void)
{
	bus_unregister_notifier(&pci_bus_type, &tbp_notifier);
	unregister_pm_notifier(&tbp_pm_notifier);
	unregister_syscore(&tbp_syscore);
	tbp_dma_end();
	tbp_map_end(&tbp_guest_map);
	tbp_free_page();
}

module_init(tbp_init);
module_exit(tbp_exit);
MODULE_DESCRIPTION("Untranslated DMA of passed-through devices in a trusted VM");
MODULE_LICENSE("Dual BSD/GPL");
