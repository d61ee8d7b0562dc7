// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Attributes of inodes: single words, read without a lock and written under the inode's lock. */
#include "tfs_internal.h"

int tfs_getattr(struct tfs *fs, struct tfs_handle h, struct tfs_attr *out)
{
	struct tfs_inode *inode;
	tmb_u64 owner, state;
	int err = tfs_live_inode(fs, h, &inode);

	if (err)
		return err;
	state = tmb_load_acquire(&inode->state_gen);
	owner = tmb_load(&inode->owner);
	out->ino = h.ino;
	out->generation = (tmb_u32)(state >> TFS_GEN_SHIFT);
	out->size = TFS_MIN(tmb_load_acquire(&inode->size), TFS_MAX_SIZE);
	out->blocks = tmb_load(&inode->blocks);
	out->version = tmb_load(&inode->version);
	out->rdev = tmb_load(&inode->rdev);
	out->mode = (tmb_u32)tmb_load(&inode->mode) & 0177777;
	out->uid = (tmb_u32)owner;
	out->gid = (tmb_u32)(owner >> 32);
	out->nlink = (tmb_u32)tmb_load(&inode->nlink);
	out->flags = (tmb_u32)tmb_load(&inode->flags);
	out->atime = tmb_load(&inode->atime);
	out->mtime = tmb_load(&inode->mtime);
	out->ctime = tmb_load(&inode->ctime);
	out->btime = tmb_load(&inode->btime);
	out->has_xattr = tmb_load(&inode->xattr_root) != 0;
	/* An inode that was freed meanwhile may have given a mixture of two inodes' attributes. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return tmb_load(&inode->state_gen) == state && tfs_state_is(state, h) ? 0 : -ESTALE;
}

/* Every other change comes with a new version; a change of one of these may show before its version does, or have none. */
bool tfs_attr_same(struct tfs *fs, const struct tfs_attr *before)
{
	struct tfs_inode *inode = tfs_inode(fs, before->ino);

	return inode && tmb_load_acquire(&inode->state_gen) == ((tmb_u64)before->generation << TFS_GEN_SHIFT | TFS_INODE_LIVE) &&
	       tmb_load_acquire(&inode->size) == before->size && tmb_load(&inode->version) == before->version &&
	       tmb_load(&inode->atime) == before->atime && tmb_load(&inode->nlink) == before->nlink &&
	       tmb_load(&inode->mode) == before->mode && tmb_load(&inode->flags) == before->flags &&
	       tmb_load(&inode->owner) == (before->uid | (tmb_u64)before->gid << 32) && tmb_load(&inode->blocks) == before->blocks &&
	       (tmb_load(&inode->xattr_root) != 0) == before->has_xattr;
}

/* Returns the mode that replaces 'mode'. */
static tmb_u64 tfs_new_mode(tmb_u64 mode, tmb_u32 what, const struct tfs_attr *attr)
{
	if (what & TFS_SET_MODE)
		return (mode & TFS_MODE_TYPE) | (attr->mode & 07777);
	if (what & TFS_KILL_SET_ID)
		mode = tfs_without_set_id(mode);
	return what & TFS_KILL_SGID ? mode & ~02000ULL : mode;
}

int tfs_setattr(struct tfs *fs, struct tfs_handle h, tmb_u32 what, const struct tfs_attr *attr, const struct tfs_attr *checked)
{
	struct tfs_xattr_change acl = {0};
	struct tfs_inode *inode;
	tmb_u32 slot;
	int err = tfs_tx_begin_on(fs, h, &slot, &inode);

	if (err)
		return err;
	if (!tfs_is_checked(inode, checked)) {
		err = -EAGAIN;
		goto unlock;
	}
	tfs_tx_inode(fs, slot, 0, h.ino);
	if (what & TFS_SET_MODE)
		err = tfs_acl_chmod(fs, h, inode, slot, attr->mode, &acl);
	if (err)
		goto unlock;
	/* chown clears S_ISUID: both changes happen or neither. */
	if (what & (TFS_SET_MODE | TFS_KILL_SET_ID | TFS_KILL_SGID))
		tfs_tx_word(fs, slot, &inode->mode, tfs_new_mode(tmb_load(&inode->mode), what, attr));
	if (what & (TFS_SET_OWNER | TFS_SET_UID | TFS_SET_GID)) {
		tmb_u64 owner = tmb_load(&inode->owner);

		if (what & (TFS_SET_OWNER | TFS_SET_UID))
			owner = (owner & ~0xffffffffULL) | attr->uid;
		if (what & (TFS_SET_OWNER | TFS_SET_GID))
			owner = (owner & 0xffffffffULL) | (tmb_u64)attr->gid << 32;
		tfs_tx_word(fs, slot, &inode->owner, owner);
	}
	if (what & TFS_SET_FLAGS)
		tfs_tx_word(fs, slot, &inode->flags, attr->flags);
	tfs_tx_commit(fs, slot);
	if (what & TFS_SET_ATIME)
		tmb_store(&inode->atime, attr->atime);
	if (what & TFS_SET_MTIME)
		tmb_store(&inode->mtime, attr->mtime);
	tfs_changed(inode, what & TFS_SET_CTIME ? attr->ctime : tfs_os_now(), false);
	tfs_persist(fs, &inode->atime, sizeof(inode->atime) * 4);
	tfs_xattr_changed(fs, h, inode, &acl);
unlock:
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &inode->lock);
	return err;
}

int tfs_touch_atime(struct tfs *fs, struct tfs_handle h, tmb_s64 now)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	if (err || fs->read_only)
		return err;
	tmb_store(&inode->atime, now);
	return 0;
}

tmb_u64 tfs_size(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	return inode && tfs_is(inode, h) ? TFS_MIN(tmb_load_acquire(&inode->size), TFS_MAX_SIZE) : 0;
}
