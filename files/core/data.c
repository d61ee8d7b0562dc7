// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * File data. Reads map and copy under a pin, without a lock. Writes go in place into blocks that exist, or into new ones that are
 * linked once they are filled. A file that grows gets long runs: the block after its last one if that is free, else an empty aligned
 * chunk. Data lies at the same offset in the chunk as in the file, so that large pages can map it.
 */
#include "tfs_internal.h"

#define FALLOC_STEP (4ULL << 20) /* bytes filled under one hold of the inode's lock; whole chunks */
#define FEW (2 * FALLOC_STEP >> TFS_BLOCK_SHIFT) /* for so many blocks the area's free blocks are not counted */
#define LARGE_FBLOCK 16u /* a file that grows past 64 KiB gets a chunk */

static inline int tfs_map_inode(struct tfs *fs, struct tfs_inode *inode, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	tmb_u64 stamp = 0; /* no inode's */

	/* Without a pin, nodes may be freed and used again during the walk. */
	for (tmb_u32 tries = 0; tries <= TFS_READ_TRIES; tries++) {
		tmb_u64 root = tmb_load_acquire(&inode->root), before = stamp;

		if (!tfs_is(inode, h))
			return tfs_refuse(fs, h, inode);
		if (!tfs_tree_look(fs, root, fblock, count, run))
			return 0;
		stamp = tfs_stamp_of(inode);
		if (stamp == before)
			return tfs_damage(fs, "tree entry out of range", root, fblock);
	}
	return -EBUSY;
}

int tfs_map(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	return tfs_may_look(fs, h, inode) ? tfs_map_inode(fs, inode, h, fblock, count, run) : tfs_refuse(fs, h, inode);
}

/* As tfs_tree_map, for a caller that walks a whole file. Bounded: a file has no more runs than the area has blocks, and holes between
 * them. */
static int tfs_next_run(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run, tmb_u64 *runs)
{
	if (++*runs > 2 * (fs->blocks + 1))
		return tfs_damage(fs, "file without end", fblock, *runs);
	if (tfs_long_loop(fs, *runs))
		return -EINTR;
	return tfs_tree_map(fs, tmb_load_acquire(&inode->root), fblock, count, run);
}

/* --- writing -------------------------------------------------------------------------------------------------------- */

/* Allocates one run of blocks for a hole of 'count' blocks at 'fblock', possibly shorter than the hole. */
static int tfs_place(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	tmb_u64 in_chunk = fblock & (TFS_FANOUT - 1), want = TFS_MIN(count, TFS_FANOUT - in_chunk), goal = 0;
	struct tfs_run before;
	tmb_u64 left = tfs_blocks_left(fs, inode);

	if (!left)
		return -EDQUOT;
	want = TFS_MIN(want, left);
	if (want == TFS_FANOUT && !tfs_alloc_chunk(fs, 0, want, run))
		return 0;
	if (fblock && !tfs_tree_map(fs, tmb_load(&inode->root), fblock - 1, 1, &before) && before.block)
		goal = before.block + 1;
	if (tfs_block_ok(fs, goal) && !tmb_load(tfs_map_bytes(fs) + goal))
		return tfs_alloc(fs, goal, want, run);
	if (fblock >= LARGE_FBLOCK && !tfs_alloc_chunk(fs, in_chunk, want, run))
		return 0;
	return tfs_alloc(fs, 0, want, run);
}

static int tfs_link_run(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock, const struct tfs_run *run)
{
	tmb_u64 taken = 0;
	int err = tfs_tree_add(fs, &inode->root, fblock, run, TFS_MAP_USED, &taken);

	tfs_count_blocks(fs, inode, (tmb_s64)taken);
	return err;
}

/*
 * Called before the write adds file blocks [from, to), which are holes. A write in place needs only a transaction slot; the first new block starts the
 * transaction. Its recovery takes back the last blocks in a row that it has added behind the end, and none that a fallocate put there before.
 */
static void tfs_start_tx(struct tfs *fs, struct tfs_write *w, tmb_u64 from, tmb_u64 to)
{
	tfs_tx_trim_range(fs, w->slot, from, to);
	if (w->started)
		return;
	tfs_tx_trim(fs, w->slot, w->h.ino);
	w->started = true;
}

static void tfs_end_tx(struct tfs *fs, struct tfs_write *w)
{
	if (w->started)
		tfs_tx_end(fs, w->slot);
	else
		tfs_tx_drop(fs, w->slot);
}

int tfs_write_begin(struct tfs *fs, struct tfs_handle h, struct tfs_write *w)
{
	w->h = h;
	w->is_new = w->started = false;
	w->added_from = w->added_to = 0;
	return tfs_tx_begin_on(fs, h, &w->slot, &w->inode);
}

int tfs_write_map_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 fblock, tmb_u64 count)
{
	int err;

	if (fblock + count > TFS_MAX_SIZE >> TFS_BLOCK_SHIFT)
		return -EFBIG;
	w->fblock = fblock;
	err = tfs_tree_map(fs, tmb_load(&w->inode->root), fblock, count, &w->run);
	if (err || w->run.block) {
		w->is_new = false;
		return err;
	}
	tfs_start_tx(fs, w, w->added_to == fblock ? w->added_from : fblock, fblock + w->run.count);
	err = tfs_place(fs, w->inode, fblock, w->run.count, &w->run);
	w->is_new = !err;
	return err;
}

int tfs_write_done_locked(struct tfs *fs, struct tfs_write *w)
{
	if (!w->is_new) {
		tfs_persist(fs, tfs_block(fs, w->run.block), w->run.count << TFS_BLOCK_SHIFT);
		return 0;
	}
	w->is_new = false;
	if (w->added_to != w->fblock)
		w->added_from = w->fblock;
	w->added_to = w->fblock + w->run.count;
	return tfs_link_run(fs, w->inode, w->fblock, &w->run);
}

bool tfs_has_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock)
{
	tmb_u64 end = TFS_MAX_SIZE >> TFS_BLOCK_SHIFT, runs = 0;
	struct tfs_run run = {0};

	for (; fblock < end; fblock += run.count)
		if (tfs_next_run(fs, inode, fblock, end - fblock, &run, &runs) || run.block)
			return true;
	return false;
}

void tfs_write_trim_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 end)
{
	struct tfs_inode *inode = w->inode;
	struct tfs_gone *gone;
	tmb_u64 from, to = w->added_to, size;

	if (!to)
		return;
	size = tmb_load(&inode->size);
	from = tfs_blocks_of(end > size ? end : size);
	from = from > w->added_from ? from : w->added_from;
	if (from >= to)
		return;
	if (!tfs_has_blocks(fs, inode, to))
		to = ~0ULL; /* also the nodes */
	/* Without memory they stay, until the file is truncated. */
	if (tfs_begin_removal(fs, w->slot, inode, from, to, &gone))
		return;
	/* A recovery removes them, too (TFS_REDO_TRIM). */
	tfs_remove_blocks(fs, inode, w->h.ino, from, to, gone, true);
	tfs_end_removal(fs, gone);
}

static void tfs_drop_suid(struct tfs_inode *inode)
{
	tmb_u64 mode = tmb_load(&inode->mode);

	if (mode & 06000)
		tmb_store(&inode->mode, tfs_without_set_id(mode));
}

/* Revokes the zeroes that other members map where holes were filled, as far as those members answer. */
static void tfs_show_filled(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_fence(); /* a member that set its 'hole_mappers' bit is seen here, or sees the new blocks */
	if (tfs_active_members(fs, tmb_load(&inode->hole_mappers) & ~(1ULL << fs->member)))
		tfs_wait_mappers(fs, inode);
}

int tfs_write_end_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 end, bool kill_suid, tmb_s64 now)
{
	struct tfs_inode *inode = w->inode;

	tfs_barrier(fs); /* the data before the size */
	if (end) {
		if (end > tmb_load(&inode->size))
			tmb_store_release(&inode->size, end);
		if (kill_suid)
			tfs_drop_suid(inode);
		tfs_changed(inode, now, true);
		tfs_persist(fs, inode, sizeof(*inode));
		tfs_barrier(fs);
	}
	if (w->started)
		tfs_show_filled(fs, inode);
	tfs_end_tx(fs, w);
	return 0;
}

/* Zeroes bytes of the zone, and lets other threads run in between. */
static int tfs_zero(struct tfs *fs, tmb_u8 *at, tmb_u64 len)
{
	while (len) {
		tmb_u64 n = TFS_MIN(len, FALLOC_STEP);

		memset(at, 0, n);
		tfs_persist(fs, at, n);
		at += n;
		len -= n;
		tfs_os_yield();
		if (len && tfs_os_killed(fs))
			return -EINTR;
	}
	return 0;
}

/* Zeroes the range in place where there are blocks; holes are zero already. -EINTR: the caller was killed, and a range of more than one step is zeroed
 * in part. */
static int tfs_zero_range(struct tfs *fs, struct tfs_inode *inode, tmb_u64 offset, tmb_u64 end)
{
	tmb_u64 runs = 0;

	while (offset < end) {
		tmb_u64 in_block = offset & (TFS_BLOCK - 1), n;
		struct tfs_run run;
		int err = tfs_next_run(fs, inode, offset >> TFS_BLOCK_SHIFT, tfs_blocks_of(in_block + end - offset), &run, &runs);

		if (err)
			return err;
		n = TFS_MIN(end - offset, (run.count << TFS_BLOCK_SHIFT) - in_block);
		err = run.block ? tfs_zero(fs, (tmb_u8 *)tfs_block(fs, run.block) + in_block, n) : 0;
		if (err)
			return err;
		offset += n;
	}
	return 0;
}

static tmb_u64 tfs_end_of_block(tmb_u64 at)
{
	return tfs_blocks_of(at) << TFS_BLOCK_SHIFT;
}

/*
 * Called before a file grows: zeroes what lies between its end and 'to', where its new bytes begin. Blocks behind the end may have bytes: a preallocated
 * block to which a member wrote, and died before it stored the size; blocks of a write that was killed; stores to the mapped rest of the last block.
 */
static int tfs_zero_behind_end(struct tfs *fs, struct tfs_inode *inode, tmb_u64 to)
{
	return tfs_zero_range(fs, inode, tmb_load(&inode->size), to);
}

int tfs_extend_zero_locked(struct tfs *fs, struct tfs_handle h, tmb_u64 to)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	return inode ? tfs_zero_behind_end(fs, inode, to) : -EUCLEAN;
}

static int tfs_fault_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	int err;

	if (fblock >= tfs_blocks_of(tmb_load(&w->inode->size)))
		return -ENXIO;
	err = tfs_write_map_locked(fs, w, fblock, count >= TFS_FANOUT && !(fblock & (TFS_FANOUT - 1)) ? TFS_FANOUT : 1);
	if (!err && w->is_new)
		memset(tfs_block(fs, w->run.block), 0, w->run.count << TFS_BLOCK_SHIFT);
	*run = w->run;
	return err ? err : tfs_write_done_locked(fs, w);
}

int tfs_fault_block(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	struct tfs_write w = {.h = h};
	int err = tfs_map(fs, h, fblock, count, run);

	if (err || run->block)
		return err;
	err = tfs_tx_try_begin(fs, &w.slot);
	if (err)
		return err;
	err = tfs_try_lock_inode(fs, h, &w.inode);
	if (err) {
		tfs_end_tx(fs, &w);
		return err;
	}
	err = tfs_fault_locked(fs, &w, fblock, run->count, run);
	tfs_write_end_locked(fs, &w, 0, false, 0);
	tfs_unlock(fs, &w.inode->lock);
	return err;
}

int tfs_wait_inode(struct tfs *fs, struct tfs_handle h)
{
	int err = tfs_wait_thaw(fs);

	if (!err)
		err = tfs_lock_inode(fs, h);
	if (!err)
		tfs_unlock_inode(fs, h.ino);
	return err;
}

/* --- whole calls ------------------------------------------------------------------------------------------------------ */

/* Called after a copy of n bytes from 'at' on, before the unpin: returns how many of them were the file's. A removal first stores the new size, and
 * where it has unlinked blocks a reader finds a hole. -ESTALE: the inode was freed; -ESHUTDOWN: others do not wait for this member's readers. */
static inline tmb_s64 tfs_bytes_still_there(struct tfs *fs, struct tfs_inode *inode, struct tfs_handle h, tmb_u64 at, tmb_u64 n)
{
	tmb_u64 size;

	__atomic_thread_fence(__ATOMIC_ACQUIRE); /* the size after the copy */
	size = tmb_load_acquire(&inode->size);
	if (!tfs_is(inode, h))
		return -ESTALE;
	if (tfs_expelled(fs))
		return -ESHUTDOWN;
	return (tmb_s64)(size <= at ? 0 : TFS_MIN(n, size - at));
}

tmb_s64 tfs_still_there(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 n)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	return inode ? tfs_bytes_still_there(fs, inode, h, at, n) : -ESTALE;
}

tmb_s64 tfs_look_begin(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 n, struct tfs_look *look)
{
	tmb_u64 skip = at & (TFS_BLOCK - 1), size, left;
	int err;

	look->h = h;
	look->inode = tfs_inode(fs, h.ino);
	/* A pin of an expelled member would be its slot's next member's, and would not keep what is copied from being another file's. */
	if (!tfs_may_look(fs, h, look->inode))
		return tfs_refuse(fs, h, look->inode);
	tfs_keep(fs, look);
	size = TFS_MIN(tmb_load_acquire(&look->inode->size), TFS_MAX_SIZE);
	left = at < size ? TFS_MIN(n, size - at) : 0;
	if (left)
		err = tfs_map_inode(fs, look->inode, h, at >> TFS_BLOCK_SHIFT, tfs_blocks_of(skip + left), &look->run);
	else
		err = tfs_live_inode(fs, h, &look->inode);
	if (!err && left)
		return (tmb_s64)TFS_MIN(left, (look->run.count << TFS_BLOCK_SHIFT) - skip);
	tfs_unpin(fs, look->pin);
	return err;
}

tmb_s64 tfs_look_end(struct tfs *fs, const struct tfs_look *look, tmb_u64 at, tmb_u64 n)
{
	tmb_s64 there = tfs_bytes_still_there(fs, look->inode, look->h, at, n);

	return tfs_kept(fs, look) ? there : -EAGAIN;
}

tmb_s64 tfs_pread(struct tfs *fs, struct tfs_handle h, void *buf, tmb_u64 len, tmb_u64 offset)
{
	tmb_u64 done = 0;
	tmb_u32 tries = 0;
	tmb_s64 there = 0;

	while (done < len) {
		tmb_u64 at = offset + done;
		struct tfs_look look;
		tmb_s64 n = there = tfs_look_begin(fs, h, at, len - done, &look);

		if (n <= 0)
			break;
		if (look.run.block)
			memcpy((tmb_u8 *)buf + done, (tmb_u8 *)tfs_block(fs, look.run.block) + (at & (TFS_BLOCK - 1)), (size_t)n);
		else
			memset((tmb_u8 *)buf + done, 0, (size_t)n);
		there = tfs_look_end(fs, &look, at, (tmb_u64)n);
		if (there == -EAGAIN && ++tries <= TFS_READ_TRIES)
			continue;
		if (there == -EAGAIN)
			there = -EBUSY;
		if (there > 0)
			done += (tmb_u64)there;
		if (there < n)
			break;
	}
	return done ? (tmb_s64)done : there;
}

tmb_s64 tfs_pwrite(struct tfs *fs, struct tfs_handle h, const void *buf, tmb_u64 len, tmb_u64 *offset, bool append, bool kill_suid, tmb_s64 now)
{
	struct tfs_write w;
	tmb_u64 done = 0, size;
	int err = tfs_write_begin(fs, h, &w);

	if (err)
		return err;
	size = TFS_MIN(tmb_load_acquire(&w.inode->size), TFS_MAX_SIZE);
	if (append)
		*offset = size;
	if (len && *offset >= TFS_MAX_SIZE)
		err = -EFBIG;
	else
		len = TFS_MIN(len, TFS_MAX_SIZE - *offset);
	if (!err && len && *offset > size)
		err = tfs_zero_behind_end(fs, w.inode, *offset);
	while (!err && done < len) {
		tmb_u64 at = *offset + done, in_block = at & (TFS_BLOCK - 1), n;
		tmb_u8 *to;

		err = tfs_write_map_locked(fs, &w, at >> TFS_BLOCK_SHIFT, tfs_blocks_of(in_block + len - done));
		if (err)
			break;
		to = tfs_block(fs, w.run.block);
		n = TFS_MIN(len - done, (w.run.count << TFS_BLOCK_SHIFT) - in_block);
		if (w.is_new) {
			memset(to, 0, in_block);
			memset(to + in_block + n, 0, (w.run.count << TFS_BLOCK_SHIFT) - in_block - n);
		}
		memcpy(to + in_block, (const tmb_u8 *)buf + done, n);
		err = tfs_write_done_locked(fs, &w);
		if (!err)
			done += n;
	}
	if (done < len) /* a whole write has added no block behind its end */
		tfs_write_trim_locked(fs, &w, done ? *offset + done : 0);
	tfs_write_end_locked(fs, &w, done ? *offset + done : 0, kill_suid, now);
	tfs_unlock(fs, &w.inode->lock);
	return done ? (tmb_s64)done : err;
}

static int tfs_flush_run(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node)
{
	(void)ctx;
	if (!node)
		tfs_persist(fs, tfs_block(fs, block), count << TFS_BLOCK_SHIFT);
	return 0;
}

static int tfs_flush_all(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode)
{
	tmb_u32 pin = tfs_pin(fs, h.ino);
	tmb_u64 budget = 2 * fs->blocks;
	int err = pin == TFS_PINS ? tfs_lock_inode(fs, h) : 0;

	if (err)
		return err;
	err = tfs_tree_walk(fs, tmb_load_acquire(&inode->root), tfs_flush_run, NULL, &budget);
	tfs_barrier(fs);
	if (pin == TFS_PINS)
		tfs_unlock_inode(fs, h.ino);
	else
		tfs_unpin(fs, pin);
	return err;
}

/*
 * Writes flush what they write. A mapping that was revoked may have left stores in caches, and a present one makes more. The count of mappings is
 * cleared once all is durable, so that another fsync does not rely on this one before; and only if it is still that of before, when there was no
 * mapping.
 */
int tfs_sync(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	tmb_u64 mappings;
	int err = tfs_live_inode(fs, h, &inode);

	if (err)
		return err;
	mappings = fs->persistent ? tmb_load_acquire(&inode->unsynced) : 0;
	if (mappings) {
		bool is_mapped = tmb_load_acquire(&inode->mappers);

		err = tfs_flush_all(fs, h, inode);
		if (!err && !is_mapped)
			tmb_cas64(&inode->unsynced, mappings, 0);
	}
	tfs_barrier(fs);
	return err;
}

/* --- size, space, holes ------------------------------------------------------------------------------------------------- */

int tfs_truncate_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 size, bool kill_suid, tmb_s64 now)
{
	struct tfs_inode *inode = w->inode;
	struct tfs_gone *gone = NULL;
	tmb_u64 old = tmb_load(&inode->size), from = tfs_blocks_of(size);
	int err = 0;

	tfs_tx_inode(fs, w->slot, 0, w->h.ino);
	if (size > TFS_MAX_SIZE)
		err = -EFBIG;
	else if (size > old)
		err = tfs_zero_behind_end(fs, inode, size);
	else
		err = tfs_begin_removal(fs, w->slot, inode, from, ~0ULL, &gone);
	if (!err) {
		if (size <= old)
			tfs_tx_redo(fs, w->slot, TFS_REDO_TRUNCATE, from, ~0ULL);
		tfs_tx_word(fs, w->slot, &inode->size, size);
		tfs_tx_commit(fs, w->slot);
		if (kill_suid)
			tfs_drop_suid(inode);
		tfs_changed(inode, now, true);
		if (size <= old) {
			err = tfs_zero_range(fs, inode, size, tfs_end_of_block(size));
			if (!err)
				err = tfs_remove_blocks(fs, inode, w->h.ino, from, ~0ULL, gone, false);
		}
	}
	if (gone)
		tfs_end_removal(fs, gone);
	tfs_tx_end(fs, w->slot);
	return err;
}

int tfs_truncate(struct tfs *fs, struct tfs_handle h, tmb_u64 size, bool kill_suid, tmb_s64 now)
{
	struct tfs_write w;
	int err = tfs_write_begin(fs, h, &w);

	if (err)
		return err;
	err = tfs_truncate_locked(fs, &w, size, kill_suid, now);
	tfs_unlock(fs, &w.inode->lock);
	return err;
}

static int tfs_punch(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, tmb_u32 slot, tmb_u64 offset, tmb_u64 end)
{
	tmb_u64 from = tfs_blocks_of(offset), to = end >> TFS_BLOCK_SHIFT;
	struct tfs_gone *gone;
	int err;

	if (from >= to)
		return tfs_zero_range(fs, inode, offset, end);
	err = tfs_begin_removal(fs, slot, inode, from, to, &gone);
	if (err)
		return err;
	err = tfs_zero_range(fs, inode, offset, from << TFS_BLOCK_SHIFT);
	if (!err)
		err = tfs_zero_range(fs, inode, to << TFS_BLOCK_SHIFT, end);
	if (!err) {
		tfs_tx_redo(fs, slot, TFS_REDO_TRUNCATE, from, to);
		tfs_tx_commit(fs, slot);
		err = tfs_remove_blocks(fs, inode, ino, from, to, gone, false);
	}
	tfs_end_removal(fs, gone);
	return err;
}

static int tfs_fill_holes(struct tfs *fs, struct tfs_inode *inode, struct tfs_write *w, tmb_u64 fblock, tmb_u64 end)
{
	tmb_u64 runs = 0;

	while (fblock < end) {
		int err = tfs_next_run(fs, inode, fblock, end - fblock, &w->run, &runs);

		if (!err && !w->run.block) {
			err = tfs_write_map_locked(fs, w, fblock, w->run.count);
			if (!err) {
				memset(tfs_block(fs, w->run.block), 0, w->run.count << TFS_BLOCK_SHIFT);
				err = tfs_write_done_locked(fs, w);
			}
		}
		if (err)
			return err;
		fblock += w->run.count;
	}
	return 0;
}

int tfs_punch_locked(struct tfs *fs, struct tfs_write *w, tmb_u64 offset, tmb_u64 end, tmb_s64 now)
{
	int err;

	tfs_start_tx(fs, w, 0, 0); /* it adds nothing */
	err = tfs_punch(fs, w->inode, w->h.ino, w->slot, offset, end);
	tfs_write_end_locked(fs, w, 0, false, 0);
	if (!err)
		tfs_changed(w->inode, now, true);
	return err;
}

static int tfs_punch_whole(struct tfs *fs, struct tfs_handle h, tmb_u64 offset, tmb_u64 end, tmb_s64 now)
{
	struct tfs_write w;
	int err = tfs_write_begin(fs, h, &w);

	if (err)
		return err;
	err = tfs_punch_locked(fs, &w, offset, end, now);
	tfs_unlock(fs, &w.inode->lock);
	return err;
}

/* A call that fills a range. */
struct tfs_filling {
	struct tfs_handle h;
	tmb_u32 mode; /* TFS_FALLOC_* */
	tmb_u64 end;
	tmb_u64 zeroed; /* what lies behind the file's end is zero up to here */
	bool only_own;	/* behind the file's end the range had no block before this call */
	tmb_s64 now;
};

/*
 * Before the first step of a range of several: returns whether there are as many blocks as it has holes. Otherwise the call would take all blocks that
 * are left from everybody before it fails.
 */
static int tfs_expect_room(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock, tmb_u64 end, bool *only_own)
{
	tmb_u64 holes = 0, runs = 0, behind = tfs_blocks_of(tmb_load(&inode->size));
	struct tfs_run run;

	*only_own = true;
	for (; fblock < end; fblock += run.count) {
		int err = tfs_next_run(fs, inode, fblock, end - fblock, &run, &runs);

		if (err)
			return err;
		if (!run.block)
			holes += run.count;
		else if (fblock + run.count > behind)
			*only_own = false;
	}
	if (holes > tfs_blocks_left(fs, inode))
		return -EDQUOT;
	if (holes <= FEW)
		return 0;
	return holes > tfs_count_free(fs) && (!tfs_await_deferred(fs) || holes > tfs_count_free(fs)) ? -ENOSPC : 0;
}

/* Fills one step of the range, up to 'to', under the inode's lock. */
static int tfs_fill_step(struct tfs *fs, struct tfs_filling *f, tmb_u64 offset, tmb_u64 to, bool first)
{
	bool grows = !(f->mode & TFS_FALLOC_KEEP_SIZE);
	struct tfs_inode *inode;
	struct tfs_write w;
	tmb_u64 size, from;
	int err = tfs_write_begin(fs, f->h, &w);

	if (err)
		return err;
	inode = w.inode;
	size = tmb_load(&inode->size);
	from = f->zeroed > size ? f->zeroed : size;
	if (first && to < f->end)
		err = tfs_expect_room(fs, inode, offset >> TFS_BLOCK_SHIFT, tfs_blocks_of(f->end), &f->only_own);
	if (!err && grows && from < to)
		err = tfs_zero_range(fs, inode, from, to);
	if (!err && f->mode & TFS_FALLOC_ZERO)
		err = tfs_zero_range(fs, inode, offset, to);
	if (!err)
		err = tfs_fill_holes(fs, inode, &w, offset >> TFS_BLOCK_SHIFT, tfs_blocks_of(to));
	if (err)
		tfs_write_trim_locked(fs, &w, 0);
	tfs_barrier(fs);
	if (!err && grows && to == f->end && to > size) {
		tmb_store_release(&inode->size, to);
		tfs_persist(fs, &inode->size, sizeof(inode->size));
	}
	tfs_write_end_locked(fs, &w, 0, false, 0);
	if (!err)
		tfs_changed(inode, f->now, true);
	tfs_unlock(fs, &inode->lock);
	f->zeroed = to;
	return err;
}

/* Frees what the steps of a failed call have added behind the file's end. */
static void tfs_take_back(struct tfs *fs, struct tfs_filling *f, tmb_u64 from, tmb_u64 to)
{
	struct tfs_write w;

	if (tfs_write_begin(fs, f->h, &w))
		return;
	w.added_from = from >> TFS_BLOCK_SHIFT;
	w.added_to = tfs_blocks_of(to);
	tfs_start_tx(fs, &w, w.added_from, w.added_to);
	tfs_write_trim_locked(fs, &w, 0);
	tfs_write_end_locked(fs, &w, 0, false, 0);
	tfs_unlock(fs, &w.inode->lock);
}

int tfs_fallocate(struct tfs *fs, struct tfs_handle h, tmb_u32 mode, tmb_u64 offset, tmb_u64 len, tmb_s64 now)
{
	tmb_u64 end = offset + len, begin = offset;
	struct tfs_filling f = {.h = h, .mode = mode, .end = end, .now = now};
	int err = 0;

	if (!len || end < offset)
		return -EINVAL;
	if (end > TFS_MAX_SIZE)
		return -EFBIG;
	if (mode & TFS_FALLOC_PUNCH)
		return tfs_punch_whole(fs, h, offset, end, now);
	/* In steps, so that other members get the lock in between; the size last. */
	while (!err && offset < end) {
		tmb_u64 to = TFS_MIN(end, (offset / FALLOC_STEP + 1) * FALLOC_STEP);

		err = tfs_fill_step(fs, &f, offset, to, offset == begin);
		if (!err)
			offset = to;
		tfs_os_yield();
	}
	if (err && offset > begin && f.only_own)
		tfs_take_back(fs, &f, begin, offset);
	return err;
}
