// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A driver for an NVMe disk of a guest with bypass that tells what the device and its DMA operations do. It takes the device by driver_override
 * alone, says each finding in a line of the kernel's log, and leaves the device running when it is unbound.
 */
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

/* Controller Configuration (NVMe 1.4 §3.1.5), with sizes of queue entries in it and not enabled. A reset clears it. */
#define REGISTER_CC 0x14
#define MARK 0x00460000

#define SIZE SZ_4K

static void say_mapping(struct pci_dev *pdev, const char *what, int mask, int set)
{
	void *memory = kmalloc(SIZE, GFP_KERNEL), *coherent;
	dma_addr_t dma;

	if (!memory)
		return;
	dma = dma_map_single(&pdev->dev, memory, SIZE, DMA_FROM_DEVICE);
	if (dma_mapping_error(&pdev->dev, dma)) {
		pci_info(pdev, "test: %s, mapping refused (set_mask %d)\n", what, set);
	} else {
		pci_info(pdev, "test: %s, mapping %s (set_mask %d)\n", what,
			 dma + SIZE - 1 > DMA_BIT_MASK(mask) ? "OUT OF REACH" : "in reach", set);
		dma_unmap_single(&pdev->dev, dma, SIZE, DMA_FROM_DEVICE);
	}
	kfree(memory);
	coherent = dma_alloc_coherent(&pdev->dev, SIZE, &dma, GFP_KERNEL);
	pci_info(pdev, "test: %s, buffer %s\n", what,
		 !coherent ? "refused" : dma + SIZE - 1 > DMA_BIT_MASK(mask) ? "OUT OF REACH" : "in reach");
	if (coherent)
		dma_free_coherent(&pdev->dev, SIZE, coherent, dma);
}

static int test_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	void __iomem *registers;
	int ret = pcim_enable_device(pdev);

	if (ret)
		return ret;
	registers = pci_ioremap_bar(pdev, 0);
	if (!registers)
		return -ENOMEM;
	pci_info(pdev, "test: %s\n", readl(registers + REGISTER_CC) == MARK ? "LEFT RUNNING" : "reset");
	writel(MARK, registers + REGISTER_CC);
	readl(registers + REGISTER_CC);
	iounmap(registers);

	pci_info(pdev, "test: memory of the host up to %llx\n", dma_get_required_mask(&pdev->dev));
	say_mapping(pdev, "no mask set", 32, 0);
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(30));
	say_mapping(pdev, "30 bits asked for", ret ? 32 : 30, ret);
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	say_mapping(pdev, "64 bits asked for", 64, ret);
	/* The next driver finds what a driver finds at the start. */
	*pdev->dev.dma_mask = DMA_BIT_MASK(32);
	pdev->dev.coherent_dma_mask = DMA_BIT_MASK(32);
	return 0;
}

static void test_remove(struct pci_dev *pdev)
{
}

/* No device has this identity: it is bound by driver_override alone. */
static const struct pci_device_id test_ids[] = { { PCI_DEVICE(0xfffe, 0xfffe) }, {} };

static struct pci_driver test_driver = {
	.name = "tombolo_bypass_test",
	.id_table = test_ids,
	.probe = test_probe,
	.remove = test_remove,
};
module_pci_driver(test_driver);

MODULE_DESCRIPTION("Findings about a bypassed device");
MODULE_LICENSE("Dual BSD/GPL");
