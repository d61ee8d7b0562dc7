// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Emulates the bit Enable No Snoop of a PCI function (PCI Express 4.0 §7.5.3.4), which QEMU's devices have fixed to 0. As in hardware, it is 1 at first,
 * and a write changes it. The parameter `no_snoop` is its value.
 */
#include <linux/module.h>
#include <linux/pci.h>

static char *address;
module_param(address, charp, 0444);
MODULE_PARM_DESC(address, "the function: domain:bus:device.function");
static bool no_snoop = true;
module_param(no_snoop, bool, 0444);

static struct pci_dev *function;
static struct pci_ops *hardware;
static struct pci_ops altered;

/* The place of the bit in an access to the configuration space. Negative: it is not in it. */
static int place(unsigned int devfn, int where, int size)
{
	int bit = 8 * (function->pcie_cap + PCI_EXP_DEVCTL - where) + ilog2(PCI_EXP_DEVCTL_NOSNOOP_EN);

	return devfn == function->devfn && bit < 8 * size ? bit : -1;
}

static int snoop_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	int ret = hardware->read(bus, devfn, where, size, value), bit = place(devfn, where, size);

	if (!ret && bit >= 0)
		*value = (*value & ~BIT(bit)) | (u32)no_snoop << bit;
	return ret;
}

static int snoop_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	int bit = place(devfn, where, size);

	if (bit >= 0)
		no_snoop = value >> bit & 1;
	return hardware->write(bus, devfn, where, size, value);
}

static int __init snoop_begin(void)
{
	unsigned int domain, bus, device, number;

	if (!address || sscanf(address, "%x:%x:%x.%x", &domain, &bus, &device, &number) != 4)
		return -EINVAL;
	function = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(device, number));
	if (!function || !function->pcie_cap) {
		pci_dev_put(function);
		return -ENODEV;
	}
	hardware = function->bus->ops;
	altered = *hardware;
	altered.read = snoop_read;
	altered.write = snoop_write;
	pci_bus_set_ops(function->bus, &altered);
	return 0;
}

static void __exit snoop_end(void)
{
	pci_bus_set_ops(function->bus, hardware);
	pci_dev_put(function);
}

module_init(snoop_begin);
module_exit(snoop_end);
MODULE_DESCRIPTION("A PCI function that may leave the caches unasked");
MODULE_LICENSE("Dual BSD/GPL");
