// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A zone's CALLS area and a device for it (callsarea.h). */
#include <linux/err.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "callsarea.h"

static int tmb_calls_geometry(struct tmb_calls_area *area)
{
	struct tmb_calls_header *header = area->header;
	struct tmb_calls_info *info = &area->info;
	u64 length = area->length, ring, window, size;
	u32 n;

	if (length < TMB_CALLS_FIRST || tmb_load_acquire(&header->magic) != TMB_CALLS_MAGIC)
		return -ENODATA;
	if (tmb_load(&header->version) != TMB_CALLS_VERSION)
		return -EPROTONOSUPPORT;
	area->n_channels = n = tmb_load(&header->n_channels);
	info->channel_size = size = tmb_load(&header->channel_size);
	info->ring = ring = tmb_load(&header->ring);
	info->window = window = tmb_load(&header->window);
	if (n == 0 || n > TMB_CALLS_CHANNELS || size % PAGE_SIZE || window % PAGE_SIZE || ring < PAGE_SIZE ||
	    ring % PAGE_SIZE || ring > length || window > length ||
	    size < TMB_CALLS_RINGS_OFF + 2 * (PAGE_SIZE + ring) + window || size > (length - TMB_CALLS_FIRST) / n)
		return -EUCLEAN;
	return 0;
}

int tmb_calls_area_join(struct tmb_calls_area *area, const struct tmb_calls_config *config,
			void (*look)(struct tmb_doorbell_client *client))
{
	int err;

	area->header = config->area;
	area->pfn = config->pfn;
	area->length = config->length;
	area->members = config->members;
	area->member = config->member;
	err = tmb_calls_geometry(area);
	if (err)
		return err;
	memcpy(area->client.zone_uuid, config->zone_uuid, sizeof(area->client.zone_uuid));
	area->client.look = look;
	tmb_doorbell_register(&area->client);
	return 0;
}

int tmb_calls_area_publish(struct tmb_calls_area *area, const struct file_operations *fops, char *name)
{
	int err = -ENOMEM;

	area->misc.minor = MISC_DYNAMIC_MINOR;
	area->misc.fops = fops;
	area->misc.mode = 0600;
	area->misc.name = name;
	if (name)
		err = misc_register(&area->misc);
	if (err) {
		tmb_doorbell_unregister(&area->client);
		kfree(name);
	}
	return err;
}

void tmb_calls_area_leave(struct tmb_calls_area *area)
{
	misc_deregister(&area->misc);
	tmb_doorbell_unregister(&area->client);
	kfree(area->misc.name);
}

int tmb_calls_area_mmap(struct vm_area_struct *vma, unsigned long pfn, u64 length)
{
	u64 wanted = vma->vm_end - vma->vm_start;

	if (vma->vm_pgoff > length >> PAGE_SHIFT || wanted > length - ((u64)vma->vm_pgoff << PAGE_SHIFT))
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	return remap_pfn_range(vma, vma->vm_start, pfn + vma->vm_pgoff, wanted, vma->vm_page_prot);
}
