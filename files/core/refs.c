// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The members that have an inode open or mapped; the last one to close an unlinked inode frees it. */
#include "tfs_internal.h"

/*
 * One thread of this member at a time changes the member's bits of an inode. Otherwise a thread that came too late, and clears the bit that
 * it set on the inode's successor, could clear the bit of another thread that has just opened the successor.
 */
static void tfs_lock_bits(struct tfs *fs, tmb_u64 ino)
{
	for (tmb_u32 round = 0; !tmb_cas32(&fs->bit_locks[ino % TFS_BIT_LOCKS], 0, 1); round++)
		if (round % 128)
			tfs_os_relax();
		else
			tfs_os_wait(fs, 0);
}

static void tfs_unlock_bits(struct tfs *fs, tmb_u64 ino)
{
	tmb_store_release(&fs->bit_locks[ino % TFS_BIT_LOCKS], 0);
}

/* Sets this member's bit in a word of the handle's inode; *had: it was set before. */
static int tfs_set_own_bit(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u64 *word, bool opening)
{
	tmb_u64 bit = 1ULL << fs->member, had;
	int err = 0;

	tfs_lock_bits(fs, h.ino);
	had = tmb_fetch_or(word, bit);
	/* A member that frees the inode, or removes its last link, meanwhile sees the bit, or its change is seen here. */
	if (!tfs_is(inode, h) || (opening && !had && !tmb_load(&inode->nlink)))
		err = -ESTALE;
	if (err && !(had & bit))
		tmb_fetch_and(word, ~bit);
	tfs_unlock_bits(fs, h.ino);
	return err;
}

static void tfs_clear_own_bit(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u64 *word)
{
	tfs_lock_bits(fs, h.ino);
	if (tfs_is(inode, h) && !tfs_fenced(fs)) /* else the bit is that of the slot's next member */
		tmb_fetch_and(word, ~(1ULL << fs->member));
	tfs_unlock_bits(fs, h.ino);
}

/* Called after a bit of 'openers' was cleared: if the inode lost its last name meanwhile, the member that removed the name left the freeing
 * to this one. */
static int tfs_free_if_unused(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode)
{
	int err;

	if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
		return 0;
	err = tfs_free_orphan(fs, ino, tfs_tx_begin);
	if (err)
		tmb_store(&fs->unclean, true);
	return err;
}

int tfs_open_bit(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	return err || fs->read_only ? err : tfs_set_own_bit(fs, h, inode, &inode->openers, true);
}

int tfs_open_ref(struct tfs *fs, struct tfs_handle h)
{
	int err = tfs_open_bit(fs, h);

	if (err)
		tfs_free_unused(fs, h);
	return err;
}

void tfs_open_new(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode)
{
	tfs_lock_bits(fs, ino);
	tmb_store(&inode->openers, 1ULL << fs->member);
	tfs_unlock_bits(fs, ino);
}

int tfs_free_orphan(struct tfs *fs, tmb_u64 ino, int (*begin)(struct tfs *fs, tmb_u32 *slot))
{
	struct tfs_inode *inode;
	tmb_u32 slot;
	int err;

	do {
		err = begin(fs, &slot);
		if (err)
			return err;
		err = tfs_lock_inode_as(fs, tfs_any(ino), TFS_BRIEFLY, &inode);
		if (!err) {
			if (!tmb_load(&inode->nlink) && !tmb_load(&inode->openers))
				tfs_free_inode_locked(fs, ino, inode, slot);
			tfs_tx_end(fs, slot);
			tfs_unlock(fs, &inode->lock);
			return 0;
		}
		tfs_tx_drop(fs, slot);
		if (err != -EAGAIN && err != -EINTR)
			return 0;
		/* Also for a killed process: it must close its files. */
		err = tfs_await_inode(fs, tfs_any(ino), TFS_SURE);
	} while (!err);
	if (err == -EINTR) /* the recovery of this member closes it */
		tmb_store(&fs->unclean, true);
	return 0;
}

void tfs_close_bit(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (inode && !fs->read_only)
		tfs_clear_own_bit(fs, h, inode, &inode->openers);
}

int tfs_free_unused(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (!inode)
		return -EUCLEAN;
	return fs->read_only ? 0 : tfs_free_if_unused(fs, h.ino, inode);
}

int tfs_close_ref(struct tfs *fs, struct tfs_handle h)
{
	tfs_close_bit(fs, h);
	return tfs_free_unused(fs, h);
}

int tfs_map_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	if (err || fs->read_only)
		return err;
	err = tfs_set_own_bit(fs, h, inode, &inode->mappers, false);
	if (!err && fs->persistent)
		tmb_fetch_add(&inode->unsynced, 1); /* after the bit: a fsync that does not see that leaves this */
	if (err || !tfs_frozen(fs))
		return err;
	tfs_clear_own_bit(fs, h, inode, &inode->mappers);
	return -EAGAIN;
}

int tfs_hole_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	return err || fs->read_only ? err : tfs_set_own_bit(fs, h, inode, &inode->hole_mappers, false);
}

int tfs_unmap_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (inode && !fs->read_only) {
		tfs_clear_own_bit(fs, h, inode, &inode->hole_mappers);
		tfs_clear_own_bit(fs, h, inode, &inode->mappers);
	}
	return inode ? 0 : -EUCLEAN;
}

tmb_u64 tfs_map_seq(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	return inode ? tmb_load_acquire(&inode->map_seq) : 0;
}
