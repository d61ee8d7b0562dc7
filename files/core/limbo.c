// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Blocks in limbo: nothing refers to them, but a member that did not let go in time may still map or read them. The super block
 * says which members may. A member stops being one of them when it has revoked all its stale mappings, leaves or dies; when there
 * are none, all blocks in limbo become free. Setting and clearing are under one lock, so no block goes to limbo unseen in between.
 *
 * The lock's owner may die at it: whoever takes it over finds bits set for blocks that are not in limbo, or blocks free early whose bits
 * are still set, both harmless.
 */
#include "tfs_internal.h"

#define READER_ROUNDS 64u /* some 20 ms */

/* Its dead owner's other leftovers are not waited for by those who hold an inode's lock. */
static int lock(struct tfs *fs)
{
	return tfs_lock(fs, &tfs_sb(fs)->limbo_lock, TFS_NO_RECOVERY);
}

void tfs_limbo_end(struct tfs *fs)
{
	tfs_unlock(fs, &tfs_sb(fs)->limbo_lock);
}

int tfs_limbo_begin(struct tfs *fs, tmb_u64 holders)
{
	struct tfs_super *sb = tfs_sb(fs);
	int err = lock(fs);

	if (err)
		return err;
	tfs_ring_members(fs, holders, TMB_PENDING_REVOKE);
	tmb_fetch_or(&sb->limbo_members, holders);
	tfs_persist(fs, &sb->limbo_members, sizeof(sb->limbo_members));
	tfs_barrier(fs);
	return 0;
}

/* With the lock. */
static void release(struct tfs *fs, tmb_u64 members)
{
	struct tfs_super *sb = tfs_sb(fs);
	tmb_u64 left = tfs_active_members(fs, tmb_load(&sb->limbo_members) & ~members), block = fs->data_start;

	if (!left)
		while ((block = tfs_find_map(fs, block, fs->blocks, TFS_MAP_LIMBO)) < fs->blocks)
			tfs_set_map(fs, block, 1, TFS_MAP_FREE);
	tfs_barrier(fs);
	tmb_store_release(&sb->limbo_members, left);
	tfs_persist(fs, &sb->limbo_members, sizeof(sb->limbo_members));
}

void tfs_limbo_release(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 holders = tmb_load(&tfs_sb(fs)->limbo_members);

	if (holders == tfs_active_members(fs, holders & ~members) || lock(fs))
		return;
	release(fs, members);
	tfs_limbo_end(fs);
}

void tfs_revoke(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);

	if (fs->read_only)
		return;
	tmb_store(&area->revokes_begun, tmb_load(&area->revokes_begun) + 1);
	tmb_fence(); /* who sees the old number unlinked before what is looked at now */
}

/* Waits a little for the own readers that are at it now. Who pins anew finds nothing that was unlinked before. */
static bool readers_left(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);

	for (tmb_u32 i = 0; i < TFS_PINS; i++) {
		tmb_u64 ino = tmb_load_acquire(&area->pins[i].ino);

		for (tmb_u32 round = 0; ino && tmb_load_acquire(&area->pins[i].ino) == ino; round++) {
			if (round == READER_ROUNDS)
				return false;
			tfs_os_wait(fs, round);
		}
	}
	return true;
}

void tfs_revoked(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	tmb_u64 bit = 1ULL << fs->member;

	if (!fs->read_only)
		tmb_store_release(&area->revokes_done, tmb_load(&area->revokes_begun));
	if (!fs->members || fs->read_only || !(tmb_load(&tfs_sb(fs)->limbo_members) & bit))
		return;
	if (!readers_left(fs)) {
		tmb_fetch_or(&fs->members[fs->member].pending, TMB_PENDING_REVOKE);
		return;
	}
	if (lock(fs))
		return;
	/* Asked again meanwhile: then what is in limbo since is only revoked by the next round. */
	if (!(tmb_load(&fs->members[fs->member].pending) & TMB_PENDING_REVOKE))
		release(fs, bit);
	tfs_limbo_end(fs);
}
