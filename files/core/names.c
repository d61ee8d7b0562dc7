// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Operations on names. Each prepares an inode and an entry that are not visible yet, then changes all that is visible in one transaction.
 * Lock order: a directory before the inodes in it; rename.c says how two directories are locked.
 */
#include "tfs_internal.h"

int tfs_lock_dir(struct tfs *fs, struct tfs_handle h, bool wait, struct tfs_inode **dir)
{
	int err = wait ? tfs_lock_inode_as(fs, h, TFS_BRIEFLY, dir) : tfs_try_lock_inode(fs, h, dir);

	if (err)
		return err == -ESTALE ? -ENOENT : err;
	if (!TFS_IS(tmb_load(&(*dir)->mode), TFS_MODE_DIR))
		err = -ENOTDIR;
	else if (!tmb_load(&(*dir)->nlink))
		err = -ENOENT;
	if (err)
		tfs_unlock(fs, &(*dir)->lock);
	return err;
}

int tfs_check_name(tmb_u32 len)
{
	return len && len <= TFS_NAME_MAX ? 0 : len ? -ENAMETOOLONG : -ENOENT;
}

/* --- create, link ------------------------------------------------------------------------------------------------- */

/* Stores the contents that a new inode has from the start. */
static int tfs_first_image(struct tfs *fs, struct tfs_inode *inode, tmb_u64 *rootp, const void *data, tmb_u64 len)
{
	tmb_u64 taken;
	int err;

	if (tfs_image_blocks(len) > tfs_blocks_left(fs, inode))
		return -EDQUOT;
	err = tfs_write_image(fs, rootp, data, len, TFS_MAP_USED, false, &taken);
	tfs_count_blocks(fs, inode, (tmb_s64)taken);
	return err;
}

int tfs_init_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u64 parent, const struct tfs_create *c)
{
	bool dir = TFS_IS(c->mode, TFS_MODE_DIR);
	int err = 0;

	tmb_store(&inode->mode, c->mode & 0177777);
	tmb_store(&inode->owner, c->uid | (tmb_u64)c->gid << 32);
	tmb_store(&inode->rdev, c->rdev);
	tmb_store(&inode->nlink, dir ? 2 : 1);
	tmb_store(&inode->parent, dir ? parent : 0);
	tmb_store(&inode->atime, c->now);
	tmb_store(&inode->mtime, c->now);
	tmb_store(&inode->ctime, c->now);
	tmb_store(&inode->btime, c->now);
	tmb_store(&inode->version, 1);
	if (TFS_IS(c->mode, TFS_MODE_LNK)) {
		if (!c->symlink_len)
			return -ENOENT;
		if (c->symlink_len > TFS_SYMLINK_MAX)
			return -ENAMETOOLONG;
		err = tfs_first_image(fs, inode, &inode->root, c->symlink, c->symlink_len);
		tmb_store(&inode->size, c->symlink_len);
	}
	if (!err && c->xattrs) {
		err = tfs_xattr_image_ok(c->xattrs, c->xattrs_len);
		if (!err)
			err = tfs_first_image(fs, inode, &inode->xattr_root, c->xattrs, c->xattrs_len);
	}
	tfs_persist(fs, inode, sizeof(*inode));
	return err;
}

/* -EAGAIN: the lock of the directory, or of the inode table, is kept. */
static int tfs_create_once(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, const struct tfs_create *c, struct tfs_handle *made)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	bool is_dir = TFS_IS(c->mode, TFS_MODE_DIR);
	tmb_u32 slot;
	int err = name ? tfs_check_name(len) : 0;

	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	err = tfs_new_inode(fs, slot, 1, made, &inode);
	if (err)
		goto end;
	if (c->open)
		tfs_open_new(fs, made->ino, inode);
	err = tfs_init_inode(fs, inode, dir_h.ino, c);
	if (err)
		goto drop;
	if (!name) {
		tfs_barrier(fs);
		tmb_store(&inode->nlink, 0);
		tmb_store_release(&inode->state_gen, tfs_live_state(inode));
		tfs_persist(fs, inode, sizeof(*inode));
		goto end;
	}
	err = tfs_lock_dir(fs, dir_h, true, &dir);
	if (err)
		goto drop;
	tfs_tx_inode(fs, slot, 0, dir_h.ino);
	err = tfs_dir_find_locked(fs, dir, name, len, &entry);
	if (!err)
		err = -EEXIST;
	else if (err == -ENOENT)
		err = is_dir && tmb_load(&dir->nlink) >= TFS_LINK_MAX ? -EMLINK : 0;
	if (!err) {
		tfs_dir_begin(fs, dir);
		err = tfs_dir_reserve(fs, dir, name, len, &entry);
		if (!err) {
			tfs_tx_word(fs, slot, &inode->state_gen, tfs_live_state(inode));
			tfs_tx_word(fs, slot, &entry.entry->ref, tfs_make_ref(made->ino, c->mode));
			tfs_tx_word(fs, slot, &dir->entries, tmb_load(&dir->entries) + 1);
			if (is_dir)
				tfs_tx_word(fs, slot, &dir->nlink, tmb_load(&dir->nlink) + 1);
			tfs_tx_commit(fs, slot);
			tfs_changed(dir, c->now, true);
		}
		tfs_dir_end(fs, dir);
	}
	if (err)
		tfs_drop_new_inode(fs, inode, slot);
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &dir->lock);
	return err;
drop:
	tfs_drop_new_inode(fs, inode, slot);
end:
	tfs_tx_end(fs, slot);
	return err;
}

int tfs_create(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, const struct tfs_create *c, struct tfs_handle *made)
{
	tmb_u8 type;
	int err;

	while ((err = tfs_create_once(fs, dir, name, len, c, made)) == -EAGAIN) {
		err = tfs_await_table(fs);
		if (!err)
			err = tfs_await_inode(fs, dir, TFS_KILLABLE);
		if (err)
			break;
	}
	/* The inode is made before the directory is looked at. A name that is there needs no room, and may be what has taken the last. */
	if (name && (err == -ENOSPC || err == -EDQUOT) && !tfs_lookup(fs, dir, name, len, made, &type))
		err = -EEXIST;
	return err;
}

/* -EAGAIN: the lock of 'busy' is kept. */
static int tfs_link_once(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, struct tfs_handle h, tmb_s64 now, struct tfs_handle *busy)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	tmb_u64 nlink;
	tmb_u32 slot;
	int err = tfs_check_name(len);

	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	*busy = dir_h;
	err = tfs_lock_dir(fs, dir_h, true, &dir);
	if (err)
		goto end;
	*busy = h;
	err = h.ino == dir_h.ino ? -EPERM : tfs_lock_inode_as(fs, h, TFS_BRIEFLY, &inode);
	if (err) {
		err = err == -ESTALE ? -ENOENT : err;
		goto unlock_dir;
	}
	tfs_tx_inode(fs, slot, 0, dir_h.ino);
	tfs_tx_inode(fs, slot, 1, h.ino);
	nlink = tmb_load(&inode->nlink);
	if (TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR))
		err = -EPERM;
	else if (!nlink && !(tmb_load(&inode->openers) >> fs->member & 1))
		err = -ENOENT; /* only what is open here can be linked: O_TMPFILE */
	else if (nlink >= TFS_LINK_MAX)
		err = -EMLINK;
	if (err)
		goto unlock;
	err = tfs_dir_find_locked(fs, dir, name, len, &entry);
	if (!err)
		err = -EEXIST;
	if (err == -ENOENT) {
		tfs_dir_begin(fs, dir);
		err = tfs_dir_reserve(fs, dir, name, len, &entry);
		if (!err) {
			tfs_tx_word(fs, slot, &entry.entry->ref, tfs_make_ref(h.ino, tmb_load(&inode->mode)));
			tfs_tx_word(fs, slot, &inode->nlink, nlink + 1);
			tfs_tx_word(fs, slot, &dir->entries, tmb_load(&dir->entries) + 1);
			tfs_tx_commit(fs, slot);
			tfs_changed(dir, now, true);
			tfs_changed(inode, now, false);
		}
		tfs_dir_end(fs, dir);
	}
unlock:
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &inode->lock);
	tfs_unlock(fs, &dir->lock);
	return err;
unlock_dir:
	tfs_unlock(fs, &dir->lock);
end:
	tfs_tx_end(fs, slot);
	return err;
}

int tfs_link(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle h, tmb_s64 now)
{
	struct tfs_handle busy;
	int err;

	while ((err = tfs_link_once(fs, dir, name, len, h, now, &busy)) == -EAGAIN) {
		err = tfs_await_inode(fs, busy, TFS_KILLABLE);
		if (err)
			break;
	}
	return err;
}

/* --- unlink, rmdir -------------------------------------------------------------------------------------------------- */

/* After a commit that removed the last link: frees the inode (locked) unless a member has it open. */
void tfs_drop_if_unused(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot)
{
	tmb_fence();
	if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
		return;
	tfs_tx_redo(fs, slot, TFS_REDO_FREE, 0, 0);
	tfs_free_inode_locked(fs, ino, inode, slot);
}

/* Returns whether the name's inode is the one that the caller checked. The caller holds the lock of the name's directory, which keeps the
 * inode alive. */
bool tfs_is_expected(struct tfs *fs, tmb_u64 ino, struct tfs_handle expect)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	return !expect.ino || (ino == expect.ino && inode && tfs_is(inode, expect));
}

/* -EAGAIN: the lock of 'busy' is kept. */
static int tfs_remove_once(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, struct tfs_handle expect, bool want_dir, tmb_s64 now,
			   struct tfs_handle *busy)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	tmb_u32 slot;
	tmb_u64 ino;
	bool is_dir;
	int err = tfs_check_name(len);

	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	*busy = dir_h;
	err = tfs_lock_dir(fs, dir_h, true, &dir);
	if (err)
		goto end;
	err = tfs_dir_find_locked(fs, dir, name, len, &entry);
	if (err)
		goto unlock_dir;
	ino = tfs_ref_ino(entry.ref);
	if (!tfs_is_expected(fs, ino, expect)) {
		err = -ESTALE;
		goto unlock_dir;
	}
	*busy = tfs_any(ino);
	err = ino == dir_h.ino ? -ESTALE : tfs_lock_inode_as(fs, tfs_any(ino), TFS_BRIEFLY, &inode);
	if (err) {
		err = err == -ESTALE ? tfs_damage(fs, "name of a free inode", dir_h.ino, ino) : err;
		goto unlock_dir;
	}
	is_dir = TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR);
	if (is_dir != want_dir)
		err = want_dir ? -ENOTDIR : -EISDIR;
	else if (is_dir && tmb_load(&inode->entries))
		err = -ENOTEMPTY;
	if (!err) {
		tmb_u64 nlink = tmb_load(&inode->nlink);

		tfs_tx_inode(fs, slot, 0, ino);
		tfs_tx_inode(fs, slot, 1, dir_h.ino);
		tfs_dir_begin(fs, dir);
		tfs_tx_word(fs, slot, &entry.entry->ref, 0);
		tfs_tx_word(fs, slot, &inode->nlink, is_dir || !nlink ? 0 : nlink - 1);
		tfs_tx_word(fs, slot, &dir->entries, tmb_load(&dir->entries) - 1);
		if (is_dir)
			tfs_tx_word(fs, slot, &dir->nlink, tmb_load(&dir->nlink) - 1);
		tfs_tx_commit(fs, slot);
		tfs_dir_forget(fs, dir, &entry);
		tfs_dir_end(fs, dir);
		tfs_changed(dir, now, true);
		tfs_changed(inode, now, false);
		tfs_drop_if_unused(fs, ino, inode, slot);
	}
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &inode->lock);
	tfs_unlock(fs, &dir->lock);
	return err;
unlock_dir:
	tfs_unlock(fs, &dir->lock);
end:
	tfs_tx_end(fs, slot);
	return err;
}

static int tfs_remove_name(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, bool want_dir, tmb_s64 now)
{
	struct tfs_handle busy;
	int err;

	while ((err = tfs_remove_once(fs, dir, name, len, expect, want_dir, now, &busy)) == -EAGAIN) {
		err = tfs_await_inode(fs, busy, TFS_KILLABLE);
		if (err)
			break;
	}
	return err;
}

int tfs_unlink(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now)
{
	return tfs_remove_name(fs, dir, name, len, expect, false, now);
}

int tfs_rmdir(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now)
{
	return tfs_remove_name(fs, dir, name, len, expect, true, now);
}

/* --- symbolic links -------------------------------------------------------------------------------------------------- */

int tfs_readlink(struct tfs *fs, struct tfs_handle h, char *buf, tmb_u32 size)
{
	struct tfs_inode *inode;
	struct tfs_run run;
	tmb_u64 len;
	int err = tfs_live_inode(fs, h, &inode);

	if (err)
		return err;
	len = tmb_load(&inode->size);
	if (!TFS_IS(tmb_load(&inode->mode), TFS_MODE_LNK))
		return tfs_is(inode, h) ? -EINVAL : -ESTALE;
	if (!len || len > TFS_SYMLINK_MAX)
		return tfs_is(inode, h) ? tfs_damage(fs, "symlink length", h.ino, len) : -ESTALE;
	/* A symlink never changes; a look at its state after the copy shows whether it was freed meanwhile. */
	err = tfs_tree_look(fs, tmb_load_acquire(&inode->root), 0, 1, &run);
	if (err || !run.block)
		return tfs_is(inode, h) ? tfs_damage(fs, "symlink without target", h.ino, 0) : -ESTALE;
	len = TFS_MIN(len, size);
	memcpy(buf, tfs_block(fs, run.block), len);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (!tfs_is(inode, h))
		return -ESTALE;
	return (int)len;
}
