// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Where the guest's memory is on the host: a table of the host-physical addresses of its huge pages. */
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/sizes.h>

#include "bypass_guest.h"

/* 64 TiB of 2 MiB pages. */
#define TBP_FRAMES_MAX (1ULL << 25)

int tbp_map_begin(struct tbp_map *map, u64 page, u64 frames, u64 highest)
{
	if ((page != SZ_2M && page != SZ_1G) || !frames || frames > TBP_FRAMES_MAX)
		return -EPROTO;
	map->shift = ilog2(page);
	map->frames = frames;
	map->highest = highest;
	map->frame = kvmalloc_array(frames, sizeof(*map->frame), GFP_KERNEL);
	if (!map->frame)
		return -ENOMEM;
	memset(map->frame, 0xff, frames * sizeof(*map->frame)); /* TBP_NO_FRAME */
	return 0;
}

int tbp_map_take(struct tbp_map *map, u64 first, u32 count, const u64 *frame)
{
	u64 size = 1ULL << map->shift;
	u32 i;

	if (!count || count > TBP_FRAMES || first > map->frames || count > map->frames - first)
		return -EPROTO;
	for (i = 0; i < count; i++)
		if (frame[i] != TBP_NO_FRAME && (!IS_ALIGNED(frame[i], size) || frame[i] + (size - 1) > map->highest))
			return -EPROTO;
	memcpy(map->frame + first, frame, count * sizeof(*frame));
	return 0;
}

void tbp_map_end(struct tbp_map *map)
{
	kvfree(map->frame);
	map->frame = NULL;
}

dma_addr_t tbp_map_find(const struct tbp_map *map, phys_addr_t at, size_t size)
{
	u64 first = at >> map->shift, last = (at + size - 1) >> map->shift, i;

	if (!size || last >= map->frames || last < first || map->frame[first] == TBP_NO_FRAME)
		return DMA_MAPPING_ERROR;
	for (i = first; i < last; i++)
		if (map->frame[i + 1] == TBP_NO_FRAME || map->frame[i] + (1ULL << map->shift) != map->frame[i + 1])
			return DMA_MAPPING_ERROR;
	return map->frame[first] + (at & ((1ULL << map->shift) - 1));
}
