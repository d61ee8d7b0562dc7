// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Operations on names. Each prepares what nobody sees yet (inode, entry), then changes everything that shows in one
 * transaction. Locks: a directory before what is in it; two directories as rename_locks() says; two files by number.
 */
#include "tfs_internal.h"

/* A directory that names can be put into or taken from, locked. */
static int lock_dir(struct tfs *fs, struct tfs_handle h, struct tfs_inode **dir)
{
	int err = tfs_lock_inode(fs, h);

	if (err)
		return err == -ESTALE ? -ENOENT : err;
	*dir = tfs_inode(fs, h.ino);
	if (!*dir)
		err = -ENOENT;
	else if (!TFS_IS(tmb_load(&(*dir)->mode), TFS_MODE_DIR))
		err = -ENOTDIR;
	else if (!tmb_load(&(*dir)->nlink))
		err = -ENOENT;
	if (err)
		tfs_unlock_inode(fs, h.ino);
	return err;
}

static int check_name(tmb_u32 len)
{
	return len && len <= TFS_NAME_MAX ? 0 : len ? -ENAMETOOLONG : -ENOENT;
}

static tmb_u64 make_ref(tmb_u64 ino, tmb_u64 mode)
{
	return ino | (tmb_u64)TFS_DT(mode) << TFS_REF_TYPE_SHIFT;
}

static tmb_u64 ref_ino(tmb_u64 ref)
{
	return ref & TFS_REF_INO_MASK;
}

/* --- create, link ------------------------------------------------------------------------------------------------- */

/* Contents that a new inode has from the start. */
static int first_image(struct tfs *fs, struct tfs_inode *inode, tmb_u64 *rootp, const void *data, tmb_u64 len)
{
	tmb_u64 taken;
	int err;

	if (tfs_image_blocks(len) > tfs_blocks_left(fs, inode))
		return -EDQUOT;
	err = tfs_write_image(fs, rootp, data, len, TFS_MAP_USED, &taken);
	tfs_count_blocks(fs, inode, (tmb_s64)taken);
	return err;
}

static int init_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u64 parent, const struct tfs_create *c)
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
	if (c->open)
		tmb_store(&inode->openers, 1ULL << fs->member);
	if (TFS_IS(c->mode, TFS_MODE_LNK)) {
		if (!c->symlink_len)
			return -ENOENT;
		if (c->symlink_len > TFS_SYMLINK_MAX)
			return -ENAMETOOLONG;
		err = first_image(fs, inode, &inode->root, c->symlink, c->symlink_len);
		tmb_store(&inode->size, c->symlink_len);
	}
	if (!err && c->xattrs) {
		err = tfs_xattr_image_ok(c->xattrs, c->xattrs_len);
		if (!err)
			err = first_image(fs, inode, &inode->xattr_root, c->xattrs, c->xattrs_len);
	}
	tfs_persist(fs, inode, sizeof(*inode));
	return err;
}

static tmb_u64 live_state(struct tfs_inode *inode)
{
	return (tmb_load(&inode->state_gen) & ~0xffffffffULL) | TFS_INODE_LIVE;
}

int tfs_create(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, const struct tfs_create *c, struct tfs_handle *made)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	bool is_dir = TFS_IS(c->mode, TFS_MODE_DIR);
	tmb_u8 type;
	tmb_u32 slot;
	int err;

	if (name) {
		err = check_name(len);
		if (!err && !tfs_lookup(fs, dir_h, name, len, made, &type))
			err = -EEXIST;
		if (err)
			return err;
	}
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	err = tfs_new_inode(fs, slot, 1, made, &inode);
	if (err)
		goto end;
	err = init_inode(fs, inode, dir_h.ino, c);
	if (err)
		goto drop;
	if (!name) {
		tfs_barrier(fs);
		tmb_store(&inode->nlink, 0);
		tmb_store_release(&inode->state_gen, live_state(inode));
		tfs_persist(fs, inode, sizeof(*inode));
		goto end;
	}
	err = lock_dir(fs, dir_h, &dir);
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
			tfs_tx_word(fs, slot, &inode->state_gen, live_state(inode));
			tfs_tx_word(fs, slot, &entry.entry->ref, make_ref(made->ino, c->mode));
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
	tfs_unlock_inode(fs, dir_h.ino);
	return err;
drop:
	tfs_drop_new_inode(fs, inode, slot);
end:
	tfs_tx_end(fs, slot);
	return err;
}

int tfs_link(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, struct tfs_handle h, tmb_s64 now)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	tmb_u64 nlink;
	tmb_u32 slot;
	int err = check_name(len);

	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	err = lock_dir(fs, dir_h, &dir);
	if (err)
		goto end;
	err = h.ino == dir_h.ino ? -EPERM : tfs_lock_inode(fs, h);
	if (err) {
		err = err == -ESTALE ? -ENOENT : err;
		goto unlock_dir;
	}
	inode = tfs_inode(fs, h.ino);
	tfs_tx_inode(fs, slot, 0, dir_h.ino);
	tfs_tx_inode(fs, slot, 1, h.ino);
	nlink = tmb_load(&inode->nlink);
	if (TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR))
		err = -EPERM;
	else if (!nlink && !(tmb_load(&inode->openers) >> fs->member & 1))
		err = -ENOENT; /* only what is open here comes back: O_TMPFILE */
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
			tfs_tx_word(fs, slot, &entry.entry->ref, make_ref(h.ino, tmb_load(&inode->mode)));
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
	tfs_unlock_inode(fs, h.ino);
	tfs_unlock_inode(fs, dir_h.ino);
	return err;
unlock_dir:
	tfs_unlock_inode(fs, dir_h.ino);
end:
	tfs_tx_end(fs, slot);
	return err;
}

/* --- unlink, rmdir -------------------------------------------------------------------------------------------------- */

/* After a commit that took the last link: frees the inode (locked) unless somebody has it open. */
static void drop_if_unused(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot)
{
	tmb_fence();
	if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
		return;
	tfs_tx_redo(fs, slot, TFS_REDO_FREE, 0, 0);
	tfs_free_inode_locked(fs, ino, inode, slot);
}

/* Whether the inode that a name means is the one that the caller means. With the name's directory locked, which keeps the inode alive. */
static bool is_expected(struct tfs *fs, tmb_u64 ino, struct tfs_handle expect)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	return !expect.ino || (ino == expect.ino && inode && tfs_is(inode, expect));
}

static int remove_name(struct tfs *fs, struct tfs_handle dir_h, const char *name, tmb_u32 len, struct tfs_handle expect, bool want_dir, tmb_s64 now)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot entry;
	tmb_u32 slot;
	tmb_u64 ino;
	bool is_dir;
	int err = check_name(len);

	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	err = lock_dir(fs, dir_h, &dir);
	if (err)
		goto end;
	err = tfs_dir_find_locked(fs, dir, name, len, &entry);
	if (err)
		goto unlock_dir;
	ino = ref_ino(entry.ref);
	if (!is_expected(fs, ino, expect)) {
		err = -ESTALE;
		goto unlock_dir;
	}
	err = ino == dir_h.ino ? -ESTALE : tfs_lock_inode(fs, tfs_any(ino));
	if (err) {
		err = err == -ESTALE ? tfs_damage(fs, "name of a free inode", dir_h.ino, ino) : err;
		goto unlock_dir;
	}
	inode = tfs_inode(fs, ino);
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
		drop_if_unused(fs, ino, inode, slot);
	}
	tfs_tx_end(fs, slot);
	tfs_unlock_inode(fs, ino);
	tfs_unlock_inode(fs, dir_h.ino);
	return err;
unlock_dir:
	tfs_unlock_inode(fs, dir_h.ino);
end:
	tfs_tx_end(fs, slot);
	return err;
}

int tfs_unlink(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now)
{
	return remove_name(fs, dir, name, len, expect, false, now);
}

int tfs_rmdir(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 len, struct tfs_handle expect, tmb_s64 now)
{
	return remove_name(fs, dir, name, len, expect, true, now);
}

/* --- rename --------------------------------------------------------------------------------------------------------- */

/* Is 'above' the directory 'ino' or one above it? 1, 0 or -EUCLEAN. With the rename lock, which keeps the answer true. */
static int is_above(struct tfs *fs, tmb_u64 above, tmb_u64 ino)
{
	for (tmb_u64 n = tfs_table_inodes(fs); n; n--) {
		if (ino == above)
			return 1;
		if (ino == TFS_ROOT_INO)
			return 0;
		ino = tfs_parent(fs, tfs_any(ino));
		if (!ino)
			return -ENOENT; /* removed meanwhile */
	}
	return tfs_damage(fs, "directories in a circle", above, ino);
}

struct rename {
	const struct tfs_name *old, *new;
	tmb_u64 old_ino, new_ino; /* directories */
	struct tfs_inode *old_dir, *new_dir;
	struct tfs_slot from, to;
	tmb_u64 source_ino, target_ino; /* target 0: the new name is free */
	struct tfs_inode *source, *target;
	bool source_is_dir, target_is_dir;
};

static void unlock_dirs(struct tfs *fs, struct rename *r)
{
	struct tfs_super *sb = tfs_sb(fs);

	tfs_unlock_inode(fs, r->old_ino);
	if (r->new_ino != r->old_ino) {
		tfs_unlock_inode(fs, r->new_ino);
		tfs_unlock(fs, &sb->rename_lock);
	}
}

/* Two directories: under the rename lock, the one above first; unrelated ones by number. */
static int lock_dirs(struct tfs *fs, struct rename *r)
{
	struct tfs_super *sb = tfs_sb(fs);
	bool old_first;
	int err;

	if (r->old_ino == r->new_ino) {
		err = lock_dir(fs, r->old->dir, &r->old_dir);
		r->new_dir = r->old_dir;
		return err;
	}
	err = tfs_lock(fs, &sb->rename_lock, TFS_KILLABLE);
	if (err)
		return err;
	err = is_above(fs, r->old_ino, r->new_ino);
	old_first = err == 1;
	if (!err) {
		err = is_above(fs, r->new_ino, r->old_ino);
		old_first = !err && r->old_ino < r->new_ino;
	}
	if (err < 0)
		goto unlock;
	err = lock_dir(fs, old_first ? r->old->dir : r->new->dir, old_first ? &r->old_dir : &r->new_dir);
	if (err)
		goto unlock;
	err = lock_dir(fs, old_first ? r->new->dir : r->old->dir, old_first ? &r->new_dir : &r->old_dir);
	if (!err)
		return 0;
	tfs_unlock_inode(fs, old_first ? r->old_ino : r->new_ino);
unlock:
	tfs_unlock(fs, &sb->rename_lock);
	return err;
}

static void unlock_children(struct tfs *fs, struct rename *r)
{
	tfs_unlock_inode(fs, r->source_ino);
	if (r->target_ino && r->target_ino != r->source_ino)
		tfs_unlock_inode(fs, r->target_ino);
}

static int lock_children(struct tfs *fs, struct rename *r)
{
	tmb_u64 a = r->source_ino, b = r->target_ino;
	int err;

	if (a == r->old_ino || a == r->new_ino || b == r->old_ino || b == r->new_ino)
		return tfs_damage(fs, "directory inside itself", a, b);
	if (b && b < a) {
		a = r->target_ino;
		b = r->source_ino;
	}
	err = tfs_lock_inode(fs, tfs_any(a));
	if (!err && b && b != a) {
		err = tfs_lock_inode(fs, tfs_any(b));
		if (err)
			tfs_unlock_inode(fs, a);
	}
	if (err)
		return err == -ESTALE ? tfs_damage(fs, "name of a free inode", a, b) : err;
	r->source = tfs_inode(fs, r->source_ino);
	r->source_is_dir = TFS_IS(tmb_load(&r->source->mode), TFS_MODE_DIR);
	if (r->target_ino) {
		r->target = tfs_inode(fs, r->target_ino);
		r->target_is_dir = TFS_IS(tmb_load(&r->target->mode), TFS_MODE_DIR);
	}
	return 0;
}

/* Finds both names and refuses what rename(2) refuses. */
static int find_names(struct tfs *fs, struct rename *r, tmb_u32 flags)
{
	int err = tfs_dir_find_locked(fs, r->old_dir, r->old->name, r->old->len, &r->from);

	if (err)
		return err;
	r->source_ino = ref_ino(r->from.ref);
	err = tfs_dir_find_locked(fs, r->new_dir, r->new->name, r->new->len, &r->to);
	if (err && err != -ENOENT)
		return err;
	r->target_ino = err ? 0 : ref_ino(r->to.ref);
	if (!is_expected(fs, r->source_ino, r->old->expect))
		return -ESTALE;
	if (r->new->expect.ino == TFS_NOTHING ? r->target_ino != 0 : !is_expected(fs, r->target_ino, r->new->expect))
		return flags & TFS_RENAME_NOREPLACE && r->target_ino ? -EEXIST : -ESTALE;
	if (r->target_ino && flags & TFS_RENAME_NOREPLACE)
		return -EEXIST;
	if (!r->target_ino && flags & TFS_RENAME_EXCHANGE)
		return -ENOENT;
	if (r->old_ino != r->new_ino) {
		/* Under the rename lock: nothing may end up below itself. */
		struct tfs_inode *inode;

		err = tfs_live_inode(fs, tfs_any(r->source_ino), &inode);
		if (!err && TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR)) {
			err = is_above(fs, r->source_ino, r->new_ino);
			if (err > 0)
				return -EINVAL;
		}
		if (!err && r->target_ino)
			err = tfs_live_inode(fs, tfs_any(r->target_ino), &inode);
		if (!err && r->target_ino && TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR)) {
			err = is_above(fs, r->target_ino, r->old_ino);
			if (err > 0)
				return flags & TFS_RENAME_EXCHANGE ? -EINVAL : -ENOTEMPTY;
		}
		if (err < 0)
			return err;
	}
	return 0;
}

static void add_to(struct tfs *fs, tmb_u32 slot, tmb_u64 *field, tmb_s64 delta)
{
	if (delta)
		tfs_tx_word(fs, slot, field, tmb_load(field) + (tmb_u64)delta);
}

static int exchange(struct tfs *fs, struct rename *r, tmb_u32 slot)
{
	tmb_s64 delta = (tmb_s64)r->source_is_dir - (tmb_s64)r->target_is_dir;

	tfs_tx_word(fs, slot, &r->from.entry->ref, r->to.ref);
	tfs_tx_word(fs, slot, &r->to.entry->ref, r->from.ref);
	if (r->old_ino != r->new_ino) {
		add_to(fs, slot, &r->old_dir->nlink, -delta);
		add_to(fs, slot, &r->new_dir->nlink, delta);
		if (r->source_is_dir)
			tfs_tx_word(fs, slot, &r->source->parent, r->new_ino);
		if (r->target_is_dir)
			tfs_tx_word(fs, slot, &r->target->parent, r->old_ino);
	}
	tfs_tx_commit(fs, slot);
	return 0;
}

static int move(struct tfs *fs, struct rename *r, tmb_u32 slot, struct tfs_inode *whiteout, tmb_u64 whiteout_ino)
{
	tmb_s64 entries_old = whiteout ? 0 : -1, entries_new = r->target_ino ? 0 : 1;
	tmb_s64 links_old = r->source_is_dir ? -1 : 0, links_new = (r->source_is_dir ? 1 : 0) - (r->target_is_dir ? 1 : 0);

	if (!r->target_ino) {
		int err = tfs_dir_reserve(fs, r->new_dir, r->new->name, r->new->len, &r->to);

		if (err)
			return err;
	}
	tfs_tx_word(fs, slot, &r->to.entry->ref, r->from.ref);
	tfs_tx_word(fs, slot, &r->from.entry->ref, whiteout ? make_ref(whiteout_ino, TFS_MODE_CHR) : 0);
	if (whiteout)
		tfs_tx_word(fs, slot, &whiteout->state_gen, live_state(whiteout));
	if (r->target_ino)
		tfs_tx_word(fs, slot, &r->target->nlink, r->target_is_dir ? 0 : tmb_load(&r->target->nlink) - 1);
	if (r->old_ino == r->new_ino) {
		add_to(fs, slot, &r->old_dir->entries, entries_old + entries_new);
		add_to(fs, slot, &r->old_dir->nlink, links_old + links_new);
	} else {
		add_to(fs, slot, &r->old_dir->entries, entries_old);
		add_to(fs, slot, &r->new_dir->entries, entries_new);
		add_to(fs, slot, &r->old_dir->nlink, links_old);
		add_to(fs, slot, &r->new_dir->nlink, links_new);
		if (r->source_is_dir)
			tfs_tx_word(fs, slot, &r->source->parent, r->new_ino);
	}
	tfs_tx_commit(fs, slot);
	return 0;
}

int tfs_rename(struct tfs *fs, const struct tfs_name *from, const struct tfs_name *to, tmb_u32 flags, tmb_s64 now)
{
	struct rename r = {.old = from, .new = to, .old_ino = from->dir.ino, .new_ino = to->dir.ino};
	tmb_u64 old_dir = from->dir.ino, new_dir = to->dir.ino;
	struct tfs_inode *whiteout = NULL;
	struct tfs_handle whiteout_h = {0};
	tmb_u32 slot;
	int err = check_name(from->len);

	if (!err)
		err = check_name(to->len);
	if (!err && flags & TFS_RENAME_EXCHANGE && flags & (TFS_RENAME_NOREPLACE | TFS_RENAME_WHITEOUT))
		err = -EINVAL;
	if (err)
		return err;
	err = tfs_tx_begin(fs, &slot);
	if (err)
		return err;
	if (flags & TFS_RENAME_WHITEOUT) {
		struct tfs_create c = {.mode = TFS_MODE_CHR, .now = now};

		err = tfs_new_inode(fs, slot, 4, &whiteout_h, &whiteout);
		if (err)
			goto end;
		init_inode(fs, whiteout, old_dir, &c);
	}
	err = lock_dirs(fs, &r);
	if (err)
		goto drop;
	err = find_names(fs, &r, flags);
	if (err)
		goto unlock_dirs;
	if (r.source_ino == r.target_ino && !(flags & TFS_RENAME_EXCHANGE)) {
		/* Two links of one file, or one name: POSIX wants nothing to happen. */
		err = 1;
		goto unlock_dirs;
	}
	err = lock_children(fs, &r);
	if (err)
		goto unlock_dirs;
	if (r.target_ino && !(flags & TFS_RENAME_EXCHANGE)) {
		if (r.source_is_dir != r.target_is_dir)
			err = r.source_is_dir ? -ENOTDIR : -EISDIR;
		else if (r.target_is_dir && tmb_load(&r.target->entries))
			err = -ENOTEMPTY;
	}
	if (!err) {
		tfs_tx_inode(fs, slot, 0, r.target_ino);
		tfs_tx_inode(fs, slot, 1, r.source_ino);
		tfs_tx_inode(fs, slot, 2, old_dir);
		tfs_tx_inode(fs, slot, 3, new_dir);
		tfs_dir_begin(fs, r.old_dir);
		if (new_dir != old_dir)
			tfs_dir_begin(fs, r.new_dir);
		if (flags & TFS_RENAME_EXCHANGE)
			err = exchange(fs, &r, slot);
		else
			err = move(fs, &r, slot, whiteout, whiteout_h.ino);
		if (!err && !whiteout && !(flags & TFS_RENAME_EXCHANGE))
			tfs_dir_forget(fs, r.old_dir, &r.from);
		if (new_dir != old_dir)
			tfs_dir_end(fs, r.new_dir);
		tfs_dir_end(fs, r.old_dir);
	}
	if (!err) {
		tfs_changed(r.old_dir, now, true);
		if (new_dir != old_dir)
			tfs_changed(r.new_dir, now, true);
		tfs_changed(r.source, now, false);
		if (r.target_ino && r.target_ino != r.source_ino) {
			tfs_changed(r.target, now, false);
			if (!(flags & TFS_RENAME_EXCHANGE))
				drop_if_unused(fs, r.target_ino, r.target, slot);
		}
	} else if (whiteout) {
		tfs_drop_new_inode(fs, whiteout, slot);
	}
	tfs_tx_end(fs, slot);
	unlock_children(fs, &r);
	unlock_dirs(fs, &r);
	return err;
unlock_dirs:
	unlock_dirs(fs, &r);
drop:
	if (err && whiteout)
		tfs_drop_new_inode(fs, whiteout, slot);
	if (err > 0)
		err = 0;
end:
	tfs_tx_end(fs, slot);
	return err;
}

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
	/* A symlink never changes; what it needs against being freed meanwhile is a look at its state afterwards. */
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
