/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The guest's half of the IOMMU bypass: guest.c gives devices their DMA operations, dma.c has these, map.c knows where memory is on the host.
 */
#ifndef TOMBOLO_BYPASS_GUEST_H
#define TOMBOLO_BYPASS_GUEST_H

#include <linux/dma-map-ops.h>
#include <linux/types.h>

#include "bypass.h"

/* The map: fixed once it has been read. */
struct tbp_map {
	unsigned int shift; /* of a frame's size */
	u64 frames;
	u64 highest;
	u64 *frame;
};

/* Allocates the map and takes frames into it as they come. */
int tbp_map_begin(struct tbp_map *map, u64 page, u64 frames, u64 highest);
int tbp_map_take(struct tbp_map *map, u64 first, u32 count, const u64 *frame);
void tbp_map_end(struct tbp_map *map);
/* The host-physical address of `size` bytes that are contiguous there too, else DMA_MAPPING_ERROR. */
dma_addr_t tbp_map_find(const struct tbp_map *map, phys_addr_t at, size_t size);

extern const struct dma_map_ops tbp_dma_ops;
extern struct tbp_map tbp_guest_map;
/* Memory for bounces that can't wait. */
int tbp_dma_begin(void);
void tbp_dma_end(void);

#endif
