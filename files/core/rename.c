// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Renaming. A rename takes all its locks first: two directories under the rename lock, the upper one first; then the inodes of the names, in
 * the order of their numbers. One transaction changes both names, the counts of both directories and the link count of a file that is replaced.
 */
#include "tfs_internal.h"

/* Is 'above' the directory 'ino' or an ancestor of it? 1, 0 or -EUCLEAN. The caller holds the rename lock, which keeps the answer true. */
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
	tmb_u64 source_ino, target_ino; /* target_ino 0: the new name is free */
	struct tfs_inode *source, *target;
	bool source_is_dir, target_is_dir;
	bool wait;    /* whether to wait for locks of inodes; else -EAGAIN ... */
	tmb_u64 busy; /* ... with 'busy' the inode whose lock is taken */
};

/* Tries of a rename that waits with nothing locked, before it waits with the rename lock held. */
#define TRIES 16u

static void unlock_dirs(struct tfs *fs, struct rename *r)
{
	struct tfs_super *sb = tfs_sb(fs);

	tfs_unlock_inode(fs, r->old_ino);
	if (r->new_ino != r->old_ino) {
		tfs_unlock_inode(fs, r->new_ino);
		tfs_unlock(fs, &sb->rename_lock);
	}
}

/* Locks both directories: under the rename lock the upper one first, unrelated ones by number. */
static int lock_dirs(struct tfs *fs, struct rename *r)
{
	struct tfs_super *sb = tfs_sb(fs);
	bool old_first;
	int err;

	if (r->old_ino == r->new_ino) {
		err = tfs_lock_dir(fs, r->old->dir, true, &r->old_dir);
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
	r->busy = old_first ? r->old_ino : r->new_ino;
	err = tfs_lock_dir(fs, old_first ? r->old->dir : r->new->dir, r->wait, old_first ? &r->old_dir : &r->new_dir);
	if (err)
		goto unlock;
	r->busy = old_first ? r->new_ino : r->old_ino;
	err = tfs_lock_dir(fs, old_first ? r->new->dir : r->old->dir, r->wait, old_first ? &r->new_dir : &r->old_dir);
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

static int lock_child(struct tfs *fs, struct rename *r, tmb_u64 ino)
{
	r->busy = ino;
	return r->wait ? tfs_lock_inode(fs, tfs_any(ino)) : tfs_try_lock_inode(fs, tfs_any(ino));
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
	err = lock_child(fs, r, a);
	if (!err && b && b != a) {
		err = lock_child(fs, r, b);
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
	r->source_ino = tfs_ref_ino(r->from.ref);
	err = tfs_dir_find_locked(fs, r->new_dir, r->new->name, r->new->len, &r->to);
	if (err && err != -ENOENT)
		return err;
	r->target_ino = err ? 0 : tfs_ref_ino(r->to.ref);
	if (!tfs_is_expected(fs, r->source_ino, r->old->expect))
		return -ESTALE;
	if (r->new->expect.ino == TFS_NOTHING ? r->target_ino != 0 : !tfs_is_expected(fs, r->target_ino, r->new->expect))
		return flags & TFS_RENAME_NOREPLACE && r->target_ino ? -EEXIST : -ESTALE;
	if (r->target_ino && flags & TFS_RENAME_NOREPLACE)
		return -EEXIST;
	if (!r->target_ino && flags & TFS_RENAME_EXCHANGE)
		return -ENOENT;
	if (r->old_ino != r->new_ino) {
		/* Under the rename lock: a directory must not become its own descendant. */
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

/*
 * Finds both names and takes the locks of all that the rename changes. 1: there is nothing to do. The rename lock admits one rename between
 * directories at a time, so a rename must not wait for another member's file or directory while holding it.
 */
static int lock_all(struct tfs *fs, struct rename *r, tmb_u32 flags)
{
	for (tmb_u32 tries = 0;; tries++) {
		int err;

		r->wait = r->old_ino == r->new_ino || tries == TRIES;
		err = lock_dirs(fs, r);
		if (!err) {
			err = find_names(fs, r, flags);
			/* POSIX: a rename between two links of one file changes nothing. */
			if (!err && r->source_ino == r->target_ino && !(flags & TFS_RENAME_EXCHANGE))
				err = 1;
			if (!err)
				err = lock_children(fs, r);
			if (err)
				unlock_dirs(fs, r);
		}
		if (err != -EAGAIN)
			return err;
		err = tfs_lock_inode(fs, tfs_any(r->busy));
		if (!err)
			tfs_unlock_inode(fs, r->busy);
		else if (err != -ESTALE)
			return err;
	}
}

/*
 * Without room for another entry: puts the new name into the old entry's place, if it fits there and into the transaction. Lookups try again
 * while the directory changes, so they see the old name or the new one.
 */
static int rename_in_place(struct tfs *fs, struct rename *r, tmb_u32 slot)
{
	struct tfs_dirent *entry = r->from.entry;
	tmb_u32 len = r->new->len, hash = r->to.hash;
	tmb_u8 granules = tmb_load(&entry->granules);
	tmb_u64 head = hash | (tmb_u64)len << 32 | (tmb_u64)granules << 40;
	int err;

	_Static_assert(offsetof(struct tfs_dirent, name_len) == 12 && offsetof(struct tfs_dirent, granules) == 13, "the word of an entry's head");
	if (tfs_granules_of(len) > granules || 1 + (len + 7) / 8 > TFS_TX_WORDS)
		return -ENOSPC;
	err = tfs_index_add(fs, r->old_dir, hash, r->from.granule);
	if (err)
		return err;
	tfs_tx_word(fs, slot, (tmb_u8 *)entry + offsetof(struct tfs_dirent, hash), head);
	for (tmb_u32 at = 0; at < len; at += 8) {
		tmb_u64 word = 0;

		memcpy(&word, r->new->name + at, TFS_MIN(len - at, 8u));
		tfs_tx_word(fs, slot, (tmb_u8 *)entry + TFS_DIRENT_HEADER + at, word);
	}
	tfs_tx_commit(fs, slot);
	tfs_index_forget(fs, r->old_dir, r->from.hash, r->from.granule);
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

		if ((err == -ENOSPC || err == -EDQUOT) && r->old_ino == r->new_ino && !whiteout)
			return rename_in_place(fs, r, slot);
		if (err)
			return err;
	}
	tfs_tx_word(fs, slot, &r->to.entry->ref, r->from.ref);
	tfs_tx_word(fs, slot, &r->from.entry->ref, whiteout ? tfs_make_ref(whiteout_ino, TFS_MODE_CHR) : 0);
	if (whiteout)
		tfs_tx_word(fs, slot, &whiteout->state_gen, tfs_live_state(whiteout));
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
	if (!whiteout)
		tfs_dir_forget(fs, r->old_dir, &r->from);
	return 0;
}

int tfs_rename(struct tfs *fs, const struct tfs_name *from, const struct tfs_name *to, tmb_u32 flags, tmb_s64 now)
{
	struct rename r = {.old = from, .new = to, .old_ino = from->dir.ino, .new_ino = to->dir.ino};
	tmb_u64 old_dir = from->dir.ino, new_dir = to->dir.ino;
	struct tfs_inode *whiteout = NULL;
	struct tfs_handle whiteout_h = {0};
	tmb_u32 slot;
	int err = tfs_check_name(from->len);

	if (!err)
		err = tfs_check_name(to->len);
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
		tfs_init_inode(fs, whiteout, old_dir, &c);
	}
	err = lock_all(fs, &r, flags);
	if (err)
		goto drop;
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
				tfs_drop_if_unused(fs, r.target_ino, r.target, slot);
		}
	} else if (whiteout) {
		tfs_drop_new_inode(fs, whiteout, slot);
	}
	tfs_tx_end(fs, slot);
	unlock_children(fs, &r);
	unlock_dirs(fs, &r);
	return err;
drop:
	if (err && whiteout)
		tfs_drop_new_inode(fs, whiteout, slot);
	if (err > 0)
		err = 0;
end:
	tfs_tx_end(fs, slot);
	return err;
}

