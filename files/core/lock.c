// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The members that live, their doorbells, and the locks of inodes (wait.c has the lock itself).
 */
#include "tfs_internal.h"

bool tfs_member_alive(struct tfs *fs, tmb_u32 member, tmb_u32 epoch)
{
	if (member == fs->member)
		return epoch == fs->epoch;
	if (member >= TFS_MEMBERS || !fs->members)
		return false;
	return tmb_load_acquire(&fs->members[member].state_epoch) == tmb_state_epoch(TMB_MEMBER_ACTIVE, epoch);
}

int tfs_try_lock_inode(struct tfs *fs, struct tfs_handle h, struct tfs_inode **out)
{
	struct tfs_inode *inode = *out = tfs_inode(fs, h.ino);

	if (!inode || !tfs_in_reach(fs, h))
		return -ESTALE;
	if (fs->read_only)
		return -EROFS;
	if (tfs_fenced(fs))
		return -ESHUTDOWN;
	if (!tfs_try_lock(fs, &inode->lock))
		return -EAGAIN;
	if (tfs_is(inode, h))
		return 0;
	tfs_unlock(fs, &inode->lock);
	return -ESTALE;
}

static void tfs_ring(struct tfs *fs, tmb_u32 member, tmb_u64 reason)
{
	if (!fs->members)
		return;
	tmb_fetch_or(&fs->members[member].pending, reason);
	tfs_os_ring(fs, member);
}

void tfs_ring_members(struct tfs *fs, tmb_u64 members, tmb_u64 reason)
{
	for (; members; members &= members - 1)
		tfs_ring(fs, (tmb_u32)__builtin_ctzll(members), reason);
}

int tfs_lock_inode(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;

	return tfs_lock_inode_as(fs, h, TFS_KILLABLE, &inode);
}

int tfs_lock_inode_as(struct tfs *fs, struct tfs_handle h, enum tfs_how how, struct tfs_inode **out)
{
	struct tfs_inode *inode = *out = tfs_inode(fs, h.ino);
	int err;

	if (!inode || !tfs_in_reach(fs, h))
		return -ESTALE;
	err = tfs_lock(fs, &inode->lock, how);
	if (err)
		return err;
	if (tfs_is(inode, h))
		return 0;
	tfs_unlock(fs, &inode->lock);
	return -ESTALE;
}

int tfs_await_inode(struct tfs *fs, struct tfs_handle h, enum tfs_how how)
{
	struct tfs_inode *inode;
	int err = tfs_lock_inode_as(fs, h, how, &inode);

	if (!err)
		tfs_unlock(fs, &inode->lock);
	return err == -ESTALE ? 0 : err; /* the operation says it in its way */
}

void tfs_unlock_inode(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	if (inode)
		tfs_unlock(fs, &inode->lock);
}
