// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Where a file has data and where holes (lseek with SEEK_DATA and SEEK_HOLE). */
#include "tfs_internal.h"

/* One step of a seek: tfs_map under a pin, repeated until no block was unlinked meanwhile. */
static int tfs_look_at(struct tfs *fs, struct tfs_inode *inode, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	struct tfs_look look = {.h = h, .inode = inode};

	for (tmb_u32 tries = 0; tries < TFS_READ_TRIES; tries++) {
		int err;

		tfs_keep(fs, &look);
		err = tfs_map(fs, h, fblock, count, run);
		if (tfs_kept(fs, &look) || err)
			return err;
	}
	return -EBUSY;
}

tmb_s64 tfs_seek(struct tfs *fs, struct tfs_handle h, tmb_u64 offset, bool hole)
{
	struct tfs_inode *inode;
	tmb_u64 size = tfs_size(fs, h), runs = 0;
	int gone = tfs_live_inode(fs, h, &inode);

	if (gone)
		return gone;
	if (offset >= size)
		return -ENXIO;
	while (offset < size) {
		tmb_u64 fblock = offset >> TFS_BLOCK_SHIFT;
		struct tfs_run run;
		int err = tfs_look_at(fs, inode, h, fblock, tfs_blocks_of(size) - fblock, &run);

		if (!err && ++runs > 2 * (fs->blocks + 1))
			err = tfs_damage(fs, "file without end", fblock, runs);
		if (!err)
			err = tfs_long_loop(fs, runs);
		if (err)
			return err;
		if (hole == !run.block)
			return (tmb_s64)offset;
		offset = (fblock + run.count) << TFS_BLOCK_SHIFT;
	}
	return hole ? (tmb_s64)size : -ENXIO;
}
