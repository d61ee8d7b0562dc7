// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The DMA operations of a bypassed device.
 *
 * Memory that is contiguous on the host too is mapped by looking up its address. Other memory (what crosses huge pages that are apart on the
 * host, zones, whatever else is not in the map) is copied to a bounce buffer within one huge page, which has the same offset in its
 * 4 KiB page as the memory: NVMe's lists of pages ask for it.
 */
#include <linux/hashtable.h>
#include <linux/mempool.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "bypass_guest.h"

/* A mapping is at most this large, so that a buffer for it can be kept in reserve. */
#define TBP_MAPPING_MAX SZ_256K
#define TBP_RESERVE_ORDER get_order(2 * TBP_MAPPING_MAX)
#define TBP_RESERVES 4

/* Memory that a device reaches through a copy. */
struct tbp_bounce {
	struct hlist_node node; /* by the frame of `dma` */
	dma_addr_t dma;
	void *memory;
	size_t size;
	struct page *block;
	unsigned int order;
	bool reserve;
	void *buffer; /* in the block */
};

static DEFINE_HASHTABLE(tbp_bounces, 8);
static DEFINE_SPINLOCK(tbp_bounces_lock);
static atomic_t tbp_bounced = ATOMIC_INIT(0);
static unsigned long tbp_bounces_so_far; /* under the lock */
module_param_named(bounces, tbp_bounces_so_far, ulong, 0444);
MODULE_PARM_DESC(bounces, "mappings that went through a copy so far");
static mempool_t *tbp_reserve;
static mempool_t *tbp_records;

int tbp_dma_begin(void)
{
	tbp_reserve = mempool_create_page_pool(TBP_RESERVES, TBP_RESERVE_ORDER);
	tbp_records = mempool_create_kmalloc_pool(TBP_RESERVES, sizeof(struct tbp_bounce));
	if (tbp_reserve && tbp_records)
		return 0;
	tbp_dma_end();
	return -ENOMEM;
}

void tbp_dma_end(void)
{
	mempool_destroy(tbp_reserve);
	mempool_destroy(tbp_records);
}

static void tbp_bounce_free(struct tbp_bounce *bounce)
{
	if (bounce->reserve)
		mempool_free(bounce->block, tbp_reserve);
	else
		__free_pages(bounce->block, bounce->order);
	mempool_free(bounce, tbp_records);
}

/* A block of pages lies within one huge page: it is aligned to its size. */
static struct tbp_bounce *tbp_bounce_alloc(size_t size, unsigned int offset)
{
	struct tbp_bounce *bounce = mempool_alloc(tbp_records, GFP_ATOMIC | __GFP_NOWARN);

	if (!bounce)
		return NULL;
	bounce->size = size;
	bounce->order = get_order(size + offset);
	bounce->reserve = false;
	bounce->block = alloc_pages(GFP_ATOMIC | __GFP_NOWARN, bounce->order);
	if (!bounce->block && bounce->order <= TBP_RESERVE_ORDER) {
		bounce->reserve = true;
		bounce->block = mempool_alloc(tbp_reserve, GFP_ATOMIC | __GFP_NOWARN);
	}
	if (!bounce->block) {
		mempool_free(bounce, tbp_records);
		return NULL;
	}
	bounce->buffer = page_address(bounce->block) + offset;
	return bounce;
}

/* Whether a device can address a mapping. A driver that has set no mask has one of 32 bits. */
static bool tbp_reaches(u64 mask, dma_addr_t dma, size_t size)
{
	return dma != DMA_MAPPING_ERROR && dma + size - 1 <= mask;
}

static dma_addr_t tbp_bounce_map(u64 mask, void *memory, size_t size)
{
	struct tbp_bounce *bounce = tbp_bounce_alloc(size, offset_in_page(memory));
	unsigned long flags;

	if (!bounce)
		return DMA_MAPPING_ERROR;
	bounce->memory = memory;
	bounce->dma = tbp_map_find(&tbp_guest_map, virt_to_phys(bounce->buffer), size);
	if (!tbp_reaches(mask, bounce->dma, size)) {
		tbp_bounce_free(bounce);
		return DMA_MAPPING_ERROR;
	}
	/* Also for a device that is going to write: it may write a part only. */
	memcpy(bounce->buffer, memory, size);
	spin_lock_irqsave(&tbp_bounces_lock, flags);
	hash_add(tbp_bounces, &bounce->node, bounce->dma >> PAGE_SHIFT);
	tbp_bounces_so_far++;
	spin_unlock_irqrestore(&tbp_bounces_lock, flags);
	atomic_inc(&tbp_bounced);
	return bounce->dma;
}

/* The bounce buffer that a mapping begins in; a part of a mapping may be synchronized. */
static struct tbp_bounce *tbp_bounce_find(dma_addr_t dma, bool remove)
{
	struct tbp_bounce *bounce, *found = NULL;
	unsigned long flags;
	int bucket;

	if (!atomic_read(&tbp_bounced))
		return NULL;
	spin_lock_irqsave(&tbp_bounces_lock, flags);
	hash_for_each_possible(tbp_bounces, bounce, node, dma >> PAGE_SHIFT)
		if (bounce->dma == dma)
			found = bounce;
	if (!found && !remove)
		hash_for_each(tbp_bounces, bucket, bounce, node)
			if (dma > bounce->dma && dma - bounce->dma < bounce->size)
				found = bounce;
	if (found && remove) {
		hash_del(&found->node);
		atomic_dec(&tbp_bounced);
	}
	spin_unlock_irqrestore(&tbp_bounces_lock, flags);
	return found;
}

static dma_addr_t tbp_map_phys(struct device *dev, phys_addr_t phys, size_t size, enum dma_data_direction dir,
			       unsigned long attrs)
{
	dma_addr_t dma = tbp_map_find(&tbp_guest_map, phys, size);
	u64 mask = min_not_zero(dma_get_mask(dev), dev->bus_dma_limit);

	if (dma == DMA_MAPPING_ERROR) /* no memory of the VM's: another device's registers can't be reached by a copy */
		return pfn_valid(PHYS_PFN(phys)) ? tbp_bounce_map(mask, phys_to_virt(phys), size) : DMA_MAPPING_ERROR;
	return tbp_reaches(mask, dma, size) ? dma : DMA_MAPPING_ERROR;
}

#if !TBP_HAS_MAP_PHYS
static dma_addr_t tbp_map_page(struct device *dev, struct page *page, unsigned long offset, size_t size,
			       enum dma_data_direction dir, unsigned long attrs)
{
	return tbp_map_phys(dev, page_to_phys(page) + offset, size, dir, attrs);
}
#endif

static void tbp_unmap_phys(struct device *dev, dma_addr_t dma, size_t size, enum dma_data_direction dir,
			   unsigned long attrs)
{
	struct tbp_bounce *bounce = tbp_bounce_find(dma, true);

	if (!bounce)
		return;
	if (dir != DMA_TO_DEVICE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		memcpy(bounce->memory, bounce->buffer, bounce->size);
	tbp_bounce_free(bounce);
}

static void tbp_sync(dma_addr_t dma, size_t size, bool for_device)
{
	struct tbp_bounce *bounce = tbp_bounce_find(dma, false);
	size_t at;

	if (!bounce)
		return;
	at = dma - bounce->dma;
	size = min(size, bounce->size - at);
	if (for_device)
		memcpy(bounce->buffer + at, bounce->memory + at, size);
	else
		memcpy(bounce->memory + at, bounce->buffer + at, size);
}

static void tbp_sync_for_cpu(struct device *dev, dma_addr_t dma, size_t size, enum dma_data_direction dir)
{
	if (dir != DMA_TO_DEVICE)
		tbp_sync(dma, size, false);
}

static void tbp_sync_for_device(struct device *dev, dma_addr_t dma, size_t size, enum dma_data_direction dir)
{
	if (dir != DMA_FROM_DEVICE)
		tbp_sync(dma, size, true);
}

static void tbp_unmap_sg(struct device *dev, struct scatterlist *list, int count, enum dma_data_direction dir,
			 unsigned long attrs)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, count, i)
		tbp_unmap_phys(dev, sg_dma_address(sg), sg_dma_len(sg), dir, attrs);
}

static int tbp_map_sg(struct device *dev, struct scatterlist *list, int count, enum dma_data_direction dir,
		      unsigned long attrs)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, count, i) {
		dma_addr_t dma = tbp_map_phys(dev, sg_phys(sg), sg->length, dir, attrs);

		if (dma == DMA_MAPPING_ERROR) {
			tbp_unmap_sg(dev, list, i, dir, attrs | DMA_ATTR_SKIP_CPU_SYNC);
			return -ENOMEM;
		}
		sg_dma_address(sg) = dma;
		sg_dma_len(sg) = sg->length;
	}
	return count;
}

static void tbp_sync_sg_for_cpu(struct device *dev, struct scatterlist *list, int count, enum dma_data_direction dir)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, count, i)
		tbp_sync_for_cpu(dev, sg_dma_address(sg), sg_dma_len(sg), dir);
}

static void tbp_sync_sg_for_device(struct device *dev, struct scatterlist *list, int count,
				   enum dma_data_direction dir)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, count, i)
		tbp_sync_for_device(dev, sg_dma_address(sg), sg_dma_len(sg), dir);
}

/* Pages that are contiguous on the host. None is taken by its zone: what counts is the address on the host. */
static void *tbp_alloc(struct device *dev, size_t size, dma_addr_t *dma, gfp_t gfp, unsigned long attrs)
{
	void *memory;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	memory = alloc_pages_exact(size, gfp | __GFP_ZERO);
	if (!memory)
		return NULL;
	*dma = tbp_map_find(&tbp_guest_map, virt_to_phys(memory), size);
	if (!tbp_reaches(min_not_zero(dev->coherent_dma_mask, dev->bus_dma_limit), *dma, size)) {
		free_pages_exact(memory, size);
		return NULL;
	}
	return memory;
}

static void tbp_free(struct device *dev, size_t size, void *memory, dma_addr_t dma, unsigned long attrs)
{
	free_pages_exact(memory, size);
}

static struct page *tbp_alloc_pages(struct device *dev, size_t size, dma_addr_t *dma, enum dma_data_direction dir,
				    gfp_t gfp)
{
	void *memory = tbp_alloc(dev, size, dma, gfp, 0);

	return memory ? virt_to_page(memory) : NULL;
}

static void tbp_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t dma,
			   enum dma_data_direction dir)
{
	free_pages_exact(page_address(page), size);
}

/* A device must reach all of the VM's memory where it is on the host. */
static int tbp_supported(struct device *dev, u64 mask)
{
	return mask >= tbp_guest_map.highest;
}

static u64 tbp_required_mask(struct device *dev)
{
	return DMA_BIT_MASK(fls64(tbp_guest_map.highest));
}

static size_t tbp_max_mapping_size(struct device *dev)
{
	return TBP_MAPPING_MAX;
}

const struct dma_map_ops tbp_dma_ops = {
	.alloc = tbp_alloc,
	.free = tbp_free,
	.alloc_pages_op = tbp_alloc_pages,
	.free_pages = tbp_free_pages,
#if TBP_HAS_MAP_PHYS /* 6.19 */
	.map_phys = tbp_map_phys,
	.unmap_phys = tbp_unmap_phys,
#else
	.map_page = tbp_map_page,
	.unmap_page = tbp_unmap_phys,
#endif
	.map_sg = tbp_map_sg,
	.unmap_sg = tbp_unmap_sg,
	.sync_single_for_cpu = tbp_sync_for_cpu,
	.sync_single_for_device = tbp_sync_for_device,
	.sync_sg_for_cpu = tbp_sync_sg_for_cpu,
	.sync_sg_for_device = tbp_sync_sg_for_device,
	.dma_supported = tbp_supported,
	.get_required_mask = tbp_required_mask,
	.max_mapping_size = tbp_max_mapping_size,
};
