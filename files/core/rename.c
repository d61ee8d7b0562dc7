// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Renaming. A rename takes all its locks first: two directories under the rename lock, the upper one first; then the inodes of the names, in
 * the order of their numbers. One transaction changes both names, the counts of both directories and the link count of a file that is replaced.
 */
#include "tfs_internal.h"

/*
 * Is 'above' the directory 'ino' or an ancestor of it? 1, 0 or -EUCLEAN. The caller holds the rename lock, which keeps the answer true. A circle, which
 * damage may have made, is found after some three turns: the walk comes by a mark that it sets anew after 1, 2, 4, ... directories.
 */
static int tfs_is_above(struct tfs *fs, tmb_u64 above, tmb_u64 ino)
{
	tmb_u64 mark = 0, most = tfs_table_inodes(fs);

	for (tmb_u64 n = 1; n <= most && ino != mark; n++) {
		if (!(n & (n - 1)))
			mark = ino;
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

struct tfs_renaming {
	const struct tfs_name *old, *new;
	tmb_u32 flags; /* TFS_RENAME_* */
	tmb_u32 slot;  /* of the transaction */
	tmb_s64 now;
	tmb_u64 old_ino, new_ino; /* directories */
	struct tfs_inode *old_dir, *new_dir;
	struct tfs_slot from, to;
	tmb_u64 source_ino, target_ino; /* target_ino 0: the new name is free */
	struct tfs_inode *source, *target;
	bool source_is_dir, target_is_dir;
	struct tfs_inode *whiteout; /* to be left at the old name; NULL: none */
	tmb_u64 whiteout_ino;
	bool wait;    /* whether to wait for locks of inodes, TFS_BRIEFLY; else -EAGAIN ... */
	tmb_u64 busy; /* ... with 'busy' the inode whose lock is taken; 0: the rename lock is; TFS_TX_ITABLE: that of the inode table */
};

/* Tries of a rename that waits with nothing locked, before it waits with the rename lock held. */
#define TRIES 16u

static bool tfs_exchanges(const struct tfs_renaming *r)
{
	return r->flags & TFS_RENAME_EXCHANGE;
}

static bool tfs_between_dirs(const struct tfs_renaming *r)
{
	return r->old_ino != r->new_ino;
}

static void tfs_unlock_dirs(struct tfs *fs, struct tfs_renaming *r)
{
	struct tfs_super *sb = tfs_sb(fs);

	tfs_unlock(fs, &r->old_dir->lock);
	if (tfs_between_dirs(r)) {
		tfs_unlock(fs, &r->new_dir->lock);
		tfs_unlock(fs, &sb->rename_lock);
	}
}

/* Locks both directories: under the rename lock the upper one first, unrelated ones by number. */
static int tfs_lock_dirs(struct tfs *fs, struct tfs_renaming *r)
{
	struct tfs_super *sb = tfs_sb(fs);
	bool old_first;
	int err;

	if (!tfs_between_dirs(r)) {
		r->busy = r->old_ino;
		err = tfs_lock_dir(fs, r->old->dir, true, &r->old_dir);
		r->new_dir = r->old_dir;
		return err;
	}
	r->busy = 0;
	err = tfs_lock(fs, &sb->rename_lock, TFS_BRIEFLY);
	if (err)
		return err;
	err = tfs_is_above(fs, r->old_ino, r->new_ino);
	old_first = err == 1;
	if (!err) {
		err = tfs_is_above(fs, r->new_ino, r->old_ino);
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
	tfs_unlock(fs, old_first ? &r->old_dir->lock : &r->new_dir->lock);
unlock:
	tfs_unlock(fs, &sb->rename_lock);
	return err;
}

static void tfs_unlock_children(struct tfs *fs, struct tfs_renaming *r)
{
	tfs_unlock(fs, &r->source->lock);
	if (r->target_ino && r->target != r->source)
		tfs_unlock(fs, &r->target->lock);
}

static int tfs_lock_child(struct tfs *fs, struct tfs_renaming *r, tmb_u64 ino, struct tfs_inode **inode)
{
	r->busy = ino;
	return r->wait ? tfs_lock_inode_as(fs, tfs_any(ino), TFS_BRIEFLY, inode) : tfs_try_lock_inode(fs, tfs_any(ino), inode);
}

static int tfs_lock_children(struct tfs *fs, struct tfs_renaming *r)
{
	tmb_u64 a = r->source_ino, b = r->target_ino;
	bool target_first = b && b < a;
	int err;

	if (a == r->old_ino || a == r->new_ino || b == r->old_ino || b == r->new_ino)
		return tfs_damage(fs, "directory inside itself", a, b);
	err = target_first ? tfs_lock_child(fs, r, b, &r->target) : tfs_lock_child(fs, r, a, &r->source);
	if (!err && b && b != a) {
		err = target_first ? tfs_lock_child(fs, r, a, &r->source) : tfs_lock_child(fs, r, b, &r->target);
		if (err)
			tfs_unlock(fs, target_first ? &r->target->lock : &r->source->lock);
	}
	if (err)
		return err == -ESTALE ? tfs_damage(fs, "name of a free inode", a, b) : err;
	if (b == a)
		r->target = r->source;
	r->source_is_dir = TFS_IS(tmb_load(&r->source->mode), TFS_MODE_DIR);
	if (b)
		r->target_is_dir = TFS_IS(tmb_load(&r->target->mode), TFS_MODE_DIR);
	return 0;
}

/* Refuses a rename after which a directory would be its own descendant. The caller holds the rename lock. */
static int tfs_check_ancestors(struct tfs *fs, struct tfs_renaming *r)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, tfs_any(r->source_ino), &inode);

	if (!err && TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR)) {
		err = tfs_is_above(fs, r->source_ino, r->new_ino);
		if (err > 0)
			return -EINVAL;
	}
	if (err || !r->target_ino)
		return err;
	err = tfs_live_inode(fs, tfs_any(r->target_ino), &inode);
	if (!err && TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR)) {
		err = tfs_is_above(fs, r->target_ino, r->old_ino);
		if (err > 0)
			return tfs_exchanges(r) ? -EINVAL : -ENOTEMPTY;
	}
	return err;
}

/* Compares the inodes of both names with those that the caller expects and the flags want. */
static int tfs_check_expected(struct tfs *fs, struct tfs_renaming *r)
{
	bool taken = r->target_ino;

	if (!tfs_is_expected(fs, r->source_ino, r->old->expect))
		return -ESTALE;
	if (taken && r->flags & TFS_RENAME_NOREPLACE)
		return -EEXIST;
	if (r->new->expect.ino == TFS_NOTHING ? taken : !tfs_is_expected(fs, r->target_ino, r->new->expect))
		return -ESTALE;
	return !taken && tfs_exchanges(r) ? -ENOENT : 0;
}

/* Finds both names, and refuses what rename(2) refuses. */
static int tfs_find_names(struct tfs *fs, struct tfs_renaming *r)
{
	int err = tfs_dir_find_locked(fs, r->old_dir, r->old->name, r->old->len, &r->from);

	if (err)
		return err;
	r->source_ino = tfs_ref_ino(r->from.ref);
	err = tfs_dir_find_locked(fs, r->new_dir, r->new->name, r->new->len, &r->to);
	if (err && err != -ENOENT)
		return err;
	r->target_ino = err ? 0 : tfs_ref_ino(r->to.ref);
	err = tfs_check_expected(fs, r);
	return !err && tfs_between_dirs(r) ? tfs_check_ancestors(fs, r) : err;
}

/*
 * Finds both names and takes the locks of all that the rename changes. 1: there is nothing to do. -EAGAIN: the lock of 'busy' is taken. The rename lock
 * admits one rename between directories at a time, so a rename must not wait for another member's file or directory while holding it.
 */
static int tfs_lock_all(struct tfs *fs, struct tfs_renaming *r)
{
	int err = tfs_lock_dirs(fs, r);

	if (err)
		return err;
	err = tfs_find_names(fs, r);
	/* POSIX: a rename between two links of one file changes nothing. */
	if (!err && r->source_ino == r->target_ino && !tfs_exchanges(r))
		err = 1;
	if (!err)
		err = tfs_lock_children(fs, r);
	if (err)
		tfs_unlock_dirs(fs, r);
	return err;
}

/* Waits with nothing held until the lock that was taken may be free. */
static int tfs_await_busy(struct tfs *fs, const struct tfs_renaming *r)
{
	if (r->busy == TFS_TX_ITABLE)
		return tfs_await_table(fs);
	if (r->busy)
		return tfs_await_inode(fs, tfs_any(r->busy), TFS_KILLABLE);
	return tfs_await(fs, &tfs_sb(fs)->rename_lock, TFS_KILLABLE);
}

/* Called before the old name is taken out of the index, which may be another one than when the name was found. */
static void tfs_forget_place(struct tfs_renaming *r)
{
	if (r->to.rebuilt)
		r->from.place = NULL;
}

/*
 * Without room for another entry: puts the new name into the old entry's place, if it fits there and into the transaction. Lookups try again
 * while the directory changes, so they see the old name or the new one.
 */
static int tfs_rename_in_place(struct tfs *fs, struct tfs_renaming *r)
{
	struct tfs_dirent *entry = r->from.entry;
	tmb_u32 len = r->new->len, hash = r->to.hash;
	tmb_u8 granules = tmb_load(&entry->granules);
	tmb_u64 head = hash | (tmb_u64)len << 32 | (tmb_u64)granules << 40;
	int err;

	_Static_assert(offsetof(struct tfs_dirent, name_len) == 12 && offsetof(struct tfs_dirent, granules) == 13, "the word of an entry's head");
	if (tfs_granules_of(len) > granules || 1 + (len + 7) / 8 > TFS_TX_WORDS)
		return -ENOSPC;
	r->to.granule = r->from.granule;
	err = tfs_index_add(fs, r->old_dir, &r->to);
	if (err)
		return err;
	tfs_tx_word(fs, r->slot, (tmb_u8 *)entry + offsetof(struct tfs_dirent, hash), head);
	for (tmb_u32 at = 0; at < len; at += 8) {
		tmb_u64 word = 0;

		memcpy(&word, r->new->name + at, TFS_MIN(len - at, 8u));
		tfs_tx_word(fs, r->slot, (tmb_u8 *)entry + TFS_DIRENT_HEADER + at, word);
	}
	tfs_tx_commit(fs, r->slot);
	tfs_forget_place(r);
	tfs_index_forget(fs, r->old_dir, &r->from);
	return 0;
}

static void tfs_add_to(struct tfs *fs, struct tfs_renaming *r, tmb_u64 *field, tmb_s64 delta)
{
	if (delta)
		tfs_tx_word(fs, r->slot, field, tmb_load(field) + (tmb_u64)delta);
}

static int tfs_exchange(struct tfs *fs, struct tfs_renaming *r)
{
	tmb_s64 delta = (tmb_s64)r->source_is_dir - (tmb_s64)r->target_is_dir;

	tfs_tx_word(fs, r->slot, &r->from.entry->ref, r->to.ref);
	tfs_tx_word(fs, r->slot, &r->to.entry->ref, r->from.ref);
	if (tfs_between_dirs(r)) {
		tfs_add_to(fs, r, &r->old_dir->nlink, -delta);
		tfs_add_to(fs, r, &r->new_dir->nlink, delta);
		if (r->source_is_dir)
			tfs_tx_word(fs, r->slot, &r->source->parent, r->new_ino);
		if (r->target_is_dir)
			tfs_tx_word(fs, r->slot, &r->target->parent, r->old_ino);
	}
	tfs_tx_commit(fs, r->slot);
	return 0;
}

/* Lists the changes of both directories' counts, and of the parent of a directory that moves. */
static void tfs_count_move(struct tfs *fs, struct tfs_renaming *r)
{
	tmb_s64 entries_old = r->whiteout ? 0 : -1, entries_new = r->target_ino ? 0 : 1;
	tmb_s64 links_old = r->source_is_dir ? -1 : 0, links_new = (r->source_is_dir ? 1 : 0) - (r->target_is_dir ? 1 : 0);

	if (!tfs_between_dirs(r)) {
		tfs_add_to(fs, r, &r->old_dir->entries, entries_old + entries_new);
		tfs_add_to(fs, r, &r->old_dir->nlink, links_old + links_new);
		return;
	}
	tfs_add_to(fs, r, &r->old_dir->entries, entries_old);
	tfs_add_to(fs, r, &r->new_dir->entries, entries_new);
	tfs_add_to(fs, r, &r->old_dir->nlink, links_old);
	tfs_add_to(fs, r, &r->new_dir->nlink, links_new);
	if (r->source_is_dir)
		tfs_tx_word(fs, r->slot, &r->source->parent, r->new_ino);
}

static int tfs_move(struct tfs *fs, struct tfs_renaming *r)
{
	if (!r->target_ino) {
		int err = tfs_dir_reserve(fs, r->new_dir, r->new->name, r->new->len, &r->to);

		if ((err == -ENOSPC || err == -EDQUOT) && !tfs_between_dirs(r) && !r->whiteout)
			return tfs_rename_in_place(fs, r);
		if (err)
			return err;
	}
	tfs_tx_word(fs, r->slot, &r->to.entry->ref, r->from.ref);
	tfs_tx_word(fs, r->slot, &r->from.entry->ref, r->whiteout ? tfs_make_ref(r->whiteout_ino, TFS_MODE_CHR) : 0);
	if (r->whiteout)
		tfs_tx_word(fs, r->slot, &r->whiteout->state_gen, tfs_live_state(r->whiteout));
	if (r->target_ino)
		tfs_tx_word(fs, r->slot, &r->target->nlink, r->target_is_dir ? 0 : tmb_load(&r->target->nlink) - 1);
	tfs_count_move(fs, r);
	tfs_tx_commit(fs, r->slot);
	tfs_forget_place(r);
	if (!r->whiteout)
		tfs_dir_forget(fs, r->old_dir, &r->from);
	return 0;
}

static int tfs_check_arguments(const struct tfs_renaming *r)
{
	int err = tfs_check_name(r->old->len);

	if (!err)
		err = tfs_check_name(r->new->len);
	if (!err && tfs_exchanges(r) && r->flags & (TFS_RENAME_NOREPLACE | TFS_RENAME_WHITEOUT))
		err = -EINVAL;
	return err;
}

/* Makes the inode that is to be left at the old name, if one is wanted. */
static int tfs_make_whiteout(struct tfs *fs, struct tfs_renaming *r)
{
	struct tfs_create c = {.mode = TFS_MODE_CHR, .now = r->now};
	struct tfs_handle made;
	struct tfs_inode *inode;
	int err;

	if (!(r->flags & TFS_RENAME_WHITEOUT))
		return 0;
	r->busy = TFS_TX_ITABLE;
	err = tfs_new_inode(fs, r->slot, 4, &made, &inode);
	if (err)
		return err;
	tfs_init_inode(fs, inode, r->old_ino, &c);
	r->whiteout = inode;
	r->whiteout_ino = made.ino;
	return 0;
}

/* Refuses to replace an inode by one of another type, or a directory that is not empty. The caller holds both inodes' locks. */
static int tfs_check_replaced(const struct tfs_renaming *r)
{
	if (!r->target_ino || tfs_exchanges(r))
		return 0;
	if (r->source_is_dir != r->target_is_dir)
		return r->source_is_dir ? -ENOTDIR : -EISDIR;
	return r->target_is_dir && tmb_load(&r->target->entries) ? -ENOTEMPTY : 0;
}

/* Changes both names in one transaction, while lookups in both directories wait. */
static int tfs_change_names(struct tfs *fs, struct tfs_renaming *r)
{
	int err;

	tfs_tx_inode(fs, r->slot, 0, r->target_ino);
	tfs_tx_inode(fs, r->slot, 1, r->source_ino);
	tfs_tx_inode(fs, r->slot, 2, r->old_ino);
	tfs_tx_inode(fs, r->slot, 3, r->new_ino);
	tfs_dir_begin(fs, r->old_dir);
	if (tfs_between_dirs(r))
		tfs_dir_begin(fs, r->new_dir);
	err = tfs_exchanges(r) ? tfs_exchange(fs, r) : tfs_move(fs, r);
	if (tfs_between_dirs(r))
		tfs_dir_end(fs, r->new_dir);
	tfs_dir_end(fs, r->old_dir);
	return err;
}

/* After the commit: stamps the inodes, and frees a replaced one that no member has open. */
static void tfs_finish(struct tfs *fs, struct tfs_renaming *r)
{
	tfs_changed(r->old_dir, r->now, true);
	if (tfs_between_dirs(r))
		tfs_changed(r->new_dir, r->now, true);
	tfs_changed(r->source, r->now, false);
	if (!r->target_ino || r->target_ino == r->source_ino)
		return;
	tfs_changed(r->target, r->now, false);
	if (!tfs_exchanges(r))
		tfs_drop_if_unused(fs, r->target_ino, r->target, r->slot);
}

static int tfs_rename_locked(struct tfs *fs, struct tfs_renaming *r)
{
	int err = tfs_check_replaced(r);

	if (!err)
		err = tfs_change_names(fs, r);
	if (!err)
		tfs_finish(fs, r);
	return err;
}

/* -EAGAIN: the lock of 'busy' is taken. */
static int tfs_rename_once(struct tfs *fs, struct tfs_renaming *r)
{
	bool locked = false;
	int err = tfs_tx_begin(fs, &r->slot);

	if (err)
		return err;
	err = tfs_make_whiteout(fs, r);
	if (!err) {
		err = tfs_lock_all(fs, r);
		locked = !err;
	}
	if (locked)
		err = tfs_rename_locked(fs, r);
	if (err && r->whiteout)
		tfs_drop_new_inode(fs, r->whiteout, r->slot);
	tfs_tx_end(fs, r->slot);
	if (locked) {
		tfs_unlock_children(fs, r);
		tfs_unlock_dirs(fs, r);
	}
	return err < 0 ? err : 0;
}

int tfs_rename(struct tfs *fs, const struct tfs_name *from, const struct tfs_name *to, tmb_u32 flags, tmb_s64 now)
{
	const struct tfs_renaming first = {.old = from, .new = to, .flags = flags, .now = now, .old_ino = from->dir.ino, .new_ino = to->dir.ino};
	struct tfs_renaming r = first;
	int err = tfs_check_arguments(&r);

	for (tmb_u32 tries = 0; !err; tries++) {
		r = first;
		r.wait = !tfs_between_dirs(&r) || tries >= TRIES;
		err = tfs_rename_once(fs, &r);
		if (err != -EAGAIN)
			break;
		err = tfs_await_busy(fs, &r);
	}
	return err;
}
