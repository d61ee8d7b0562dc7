// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * File locks that exclude across members. The records of one inode are a table that is scanned whole: files with more than a few locks are rare,
 * and a scan of a block is 64 cache lines. A dead member's records are void and are reused, so its death releases its locks.
 *
 * A file's table has a lock of its own (tfs_table_lock), so programs that lock ranges and programs that write the file don't wait for each other.
 * A directory's lock covers its table. The table grows under both, the inode's lock first, and in a transaction; it shrinks only when the inode
 * is freed. Other changes need no transaction: a record's first word makes it valid.
 *
 * Unlocking a range, or changing its type, in the middle of a record splits it. All records involved belong to one owner, so a death in between
 * leaves only void records.
 */
#include "tfs_internal.h"

#define MAX_BLOCKS 512u /* 32,767 locks on one inode */
#define MAX_DEPTH 16u	/* of a chain of owners that wait for each other */
#define MAX_LOOKS 65536u /* records looked at for one chain */

#define NO_ROOM 1 /* the table must grow first */

struct tfs_table {
	struct tfs *fs;
	struct tfs_inode *inode;
	tmb_u64 root, blocks;
	tmb_u64 at; /* the block of records that 'records' points to ... */
	struct tfs_lock_record *records; /* ... where it lies; NULL: none yet */
};

/* --- the table's lock --------------------------------------------------------------------------------------------- */

/* Returns the lock of the table; NULL: it is the inode's own. */
static struct tmb_lock *tfs_own_lock(struct tfs_inode *inode)
{
	return TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR) ? NULL : tfs_table_lock(inode);
}

static void tfs_table_unlock(struct tfs *fs, struct tfs_inode *inode)
{
	struct tmb_lock *lock = tfs_own_lock(inode);

	tfs_unlock(fs, lock ? lock : &inode->lock);
}

static int tfs_lock_table(struct tfs *fs, struct tfs_handle h, enum tfs_how how, struct tfs_inode **out)
{
	struct tfs_inode *inode = *out = tfs_inode(fs, h.ino);
	struct tmb_lock *lock;
	int err;

	if (!inode)
		return -ESTALE;
	lock = tfs_own_lock(inode);
	/* A release may come when its file is closed, and gone. Then the words of the table's lock may be a directory's. */
	err = lock ? tfs_lock_of(fs, lock, how, inode, h) : tfs_lock(fs, &inode->lock, how);
	if (err)
		return err;
	/* An inode keeps its type for life, and a later inode with its number is not the handle's. */
	if (tfs_is(inode, h) && tfs_own_lock(inode) == lock)
		return 0;
	tfs_unlock(fs, lock ? lock : &inode->lock);
	return -ESTALE;
}

int tfs_lock_table_to_free(struct tfs *fs, struct tfs_inode *inode)
{
	struct tmb_lock *lock = tfs_own_lock(inode);

	return lock && tmb_load(&inode->locks) ? tfs_lock(fs, lock, TFS_SURE) : 0;
}

void tfs_unlock_table(struct tfs *fs, struct tfs_inode *inode)
{
	struct tmb_lock *lock = tfs_own_lock(inode);

	if (lock && tmb_load(&inode->locks))
		tfs_unlock(fs, lock);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static struct tfs_lock_head *tfs_table_open(struct tfs_table *t, struct tfs *fs, struct tfs_inode *inode)
{
	struct tfs_run run;

	t->fs = fs;
	t->inode = inode;
	t->root = tmb_load_acquire(&inode->locks);
	t->blocks = 0;
	t->records = NULL;
	if (!t->root || tfs_tree_map(fs, t->root, 0, 1, &run) || !run.block)
		return NULL;
	struct tfs_lock_head *head = tfs_block(fs, run.block);

	t->blocks = TFS_MIN(tmb_load(&head->blocks), MAX_BLOCKS);
	return head;
}

/* Returns record i of the table; NULL: past the end. */
static struct tfs_lock_record *tfs_record_at(struct tfs_table *t, tmb_u64 i)
{
	tmb_u64 at = i + 1, block = at / TFS_LOCK_RECORDS; /* place 0 of block 0 is the head */
	struct tfs_run run;

	if (block >= t->blocks)
		return NULL;
	if (!t->records || t->at != block) {
		if (tfs_tree_map(t->fs, t->root, block, 1, &run) || !run.block)
			return NULL;
		t->records = tfs_block(t->fs, run.block);
		t->at = block;
	}
	return t->records + at % TFS_LOCK_RECORDS;
}

/* Adds a block of free records. The caller holds both locks. */
static int tfs_table_grow(struct tfs_table *t)
{
	struct tfs_run run;
	tmb_u64 taken = 0;
	int err;

	if (t->blocks >= MAX_BLOCKS)
		return -ENOLCK;
	/* A member that died between linking and counting left the block there. */
	err = tfs_tree_map(t->fs, tmb_load(&t->inode->locks), t->blocks, 1, &run);
	if (err)
		return err;
	if (!run.block) {
		if (!tfs_blocks_left(t->fs, t->inode))
			return -ENOLCK;
		err = tfs_alloc(t->fs, 0, 1, &run);
		if (err)
			return err == -ENOSPC ? -ENOLCK : err;
		memset(tfs_block(t->fs, run.block), 0, TFS_BLOCK);
		err = tfs_tree_add(t->fs, &t->inode->locks, t->blocks, &run, TFS_MAP_USED, &taken);
		tfs_count_blocks(t->fs, t->inode, (tmb_s64)taken);
		if (err)
			return err == -ENOSPC ? -ENOLCK : err;
	}
	t->root = tmb_load(&t->inode->locks);
	t->blocks++;
	/* Stored also for a block that was there: this repairs a count that damage made smaller. */
	if (tfs_tree_map(t->fs, t->root, 0, 1, &run) || !run.block)
		return tfs_damage(t->fs, "file-lock records missing", t->root, 0);
	tmb_store(&((struct tfs_lock_head *)tfs_block(t->fs, run.block))->blocks, t->blocks);
	return 0;
}

static bool tfs_counts(struct tfs *fs, tmb_u64 holder)
{
	return holder && tfs_member_alive(fs, tmb_lock_owner(holder), (tmb_u32)(holder >> 32));
}

static tmb_u64 tfs_self_word(struct tfs *fs)
{
	return tmb_lock_word(fs->member, fs->epoch, 0);
}

static bool tfs_same_owner(struct tfs *fs, const struct tfs_lock_record *r, const struct tfs_file_lock *lock)
{
	return tmb_load(&r->holder) == tfs_self_word(fs) && tmb_load(&r->owner) == lock->owner && tmb_load(&r->kind) == lock->kind;
}

/* Returns whether the record's type and range exclude 'lock'. */
static bool tfs_excludes(const struct tfs_lock_record *r, const struct tfs_file_lock *lock)
{
	return (tmb_load(&r->type) == TFS_LK_WRITE || lock->type == TFS_LK_WRITE) && tmb_load(&r->start) <= lock->end &&
	       tmb_load(&r->end) >= lock->start;
}

static bool tfs_conflicts(struct tfs *fs, const struct tfs_lock_record *r, const struct tfs_file_lock *lock)
{
	return tfs_counts(fs, tmb_load(&r->holder)) && tmb_load(&r->kind) == lock->kind && !tfs_same_owner(fs, r, lock) && tfs_excludes(r, lock);
}

static void tfs_fill(struct tfs_lock_record *r, tmb_u64 holder, const struct tfs_file_lock *lock, tmb_u64 start, tmb_u64 end, tmb_u32 type,
		     tmb_u64 order)
{
	tmb_store(&r->owner, lock->owner);
	tmb_store(&r->start, start);
	tmb_store(&r->end, end);
	tmb_store(&r->type, type);
	tmb_store(&r->kind, lock->kind);
	tmb_store(&r->pid, lock->pid);
	tmb_store(&r->order, order);
	tmb_store_release(&r->holder, holder);
}

/* The order in which F_GETLK chooses among conflicting locks. Linux orders owners by arrival and an owner's locks by their start. */
static bool tfs_comes_before(const struct tfs_lock_record *a, const struct tfs_lock_record *b)
{
	tmb_u64 first = tmb_load(&a->order), second = tmb_load(&b->order);

	return first != second ? first < second : tmb_load(&a->start) < tmb_load(&b->start);
}

/* Returns a free record; NULL: none. */
static struct tfs_lock_record *tfs_free_record(struct tfs_table *t)
{
	struct tfs_lock_record *r;

	for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++)
		if (!tfs_counts(t->fs, tmb_load(&r->holder)))
			return r;
	return NULL;
}

/* Returns whether 'need' records are free. */
static bool tfs_has_room(struct tfs_table *t, tmb_u32 need)
{
	struct tfs_lock_record *r;

	for (tmb_u64 i = 0; need && (r = tfs_record_at(t, i)); i++)
		need -= !tfs_counts(t->fs, tmb_load(&r->holder));
	return !need;
}

/* Returns whether the range lies inside one of this owner's records, so that removing it leaves two. */
static bool tfs_is_split(struct tfs_table *t, const struct tfs_file_lock *lock)
{
	struct tfs_lock_record *r;

	for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++)
		if (tfs_same_owner(t->fs, r, lock) && tmb_load(&r->start) < lock->start && tmb_load(&r->end) > lock->end)
			return true;
	return false;
}

/* Removes [start, end] from this owner's records. One of them may be split: the caller has checked that there is room. True: something was
 * removed. */
static bool tfs_cut_out(struct tfs_table *t, const struct tfs_file_lock *lock)
{
	struct tfs_lock_record *r, *rest;
	bool gave = false;

	for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++) {
		tmb_u64 start = tmb_load(&r->start), end = tmb_load(&r->end);

		if (!tfs_same_owner(t->fs, r, lock) || start > lock->end || end < lock->start)
			continue;
		gave = true;
		if (start < lock->start && end > lock->end) {
			rest = tfs_free_record(t);
			if (rest)
				tfs_fill(rest, tfs_self_word(t->fs), lock, lock->end + 1, end, tmb_load(&r->type), tmb_load(&r->order));
			tmb_store_release(&r->end, lock->start - 1);
		} else if (start < lock->start) {
			tmb_store_release(&r->end, lock->start - 1);
		} else if (end > lock->end) {
			tmb_store_release(&r->start, lock->end + 1);
		} else {
			tmb_store_release(&r->holder, 0);
		}
	}
	return gave;
}

/* Extends the new range by this owner's records of the same type that touch it, and removes these. */
static void tfs_absorb(struct tfs_table *t, struct tfs_file_lock *lock)
{
	struct tfs_lock_record *r;
	bool more = true;

	/* After one pass the range can touch no further record, so the second pass finds none. */
	for (int times = 0; more && times < 3; times++) {
		more = false;
		for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++) {
			tmb_u64 start = tmb_load(&r->start), end = tmb_load(&r->end);

			if (!tfs_same_owner(t->fs, r, lock) || tmb_load(&r->type) != lock->type ||
			    (lock->end != ~0ULL && start > lock->end + 1) || (end != ~0ULL && end + 1 < lock->start))
				continue;
			lock->start = TFS_MIN(lock->start, start);
			lock->end = lock->end > end ? lock->end : end;
			tmb_store_release(&r->holder, 0);
			more = true;
		}
	}
}

static void tfs_wake(struct tfs *fs, struct tfs_inode *inode)
{
	struct tfs_table t;
	struct tfs_lock_head *head = tfs_table_open(&t, fs, inode);

	if (head && tmb_load(&head->waiters))
		tfs_ring_members(fs, tmb_exchange(&head->waiters, 0), TMB_PENDING_LOCK);
}

static struct tfs_lock_record *tfs_find_own(struct tfs_table *t, const struct tfs_file_lock *lock)
{
	struct tfs_lock_record *r;

	for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++)
		if (tfs_same_owner(t->fs, r, lock))
			return r;
	return NULL;
}

static bool tfs_is_in_the_way(struct tfs_table *t, const struct tfs_file_lock *lock)
{
	struct tfs_lock_record *r;

	for (tmb_u64 i = 0; (r = tfs_record_at(t, i)); i++)
		if (tfs_conflicts(t->fs, r, lock))
			return true;
	return false;
}

/* NO_ROOM: nothing is changed, except that a flock that was to change its type is released. */
static int tfs_set_locked(struct tfs *fs, struct tfs_inode *inode, struct tfs_file_lock lock)
{
	struct tfs_table t;
	struct tfs_lock_head *head = tfs_table_open(&t, fs, inode);
	struct tfs_lock_record *own = head ? tfs_find_own(&t, &lock) : NULL, *r;
	bool taking = lock.type != TFS_LK_UNLOCK;
	tmb_u64 order = own ? tmb_load(&own->order) : 0;

	if (!taking && !own)
		return 0;
	if (lock.kind == TFS_LK_FLOCK && own && taking) {
		if (tmb_load(&own->type) == lock.type)
			return 0;
		/* As flock(2) does: the old lock is released first, even if the new one can't be taken. So two owners that convert don't wait for
		 * each other. */
		tfs_cut_out(&t, &lock);
		tfs_wake(fs, inode);
	}
	if (taking && head && tfs_is_in_the_way(&t, &lock)) {
		tmb_fetch_or(&head->waiters, 1ULL << fs->member);
		return -EAGAIN;
	}
	if (!tfs_has_room(&t, tfs_is_split(&t, &lock) + taking))
		return NO_ROOM;
	bool gave = tfs_cut_out(&t, &lock);
	if (taking) {
		if (lock.kind == TFS_LK_POSIX)
			tfs_absorb(&t, &lock);
		if (!own) {
			order = tmb_load(&head->orders) + 1;
			tmb_store(&head->orders, order);
		}
		r = tfs_free_record(&t);
		if (!r)
			return tfs_damage(fs, "file-lock records changing", lock.start, lock.end);
		tfs_fill(r, tfs_self_word(fs), &lock, lock.start, lock.end, lock.type, order);
	}
	if (gave)
		tfs_wake(fs, inode);
	return 0;
}

/* -EAGAIN: the lock of the inode or of the table is kept. */
static int tfs_grow_once(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	struct tmb_lock *lock;
	struct tfs_table t;
	tmb_u32 slot;
	int err = tfs_tx_begin(fs, &slot);

	if (err)
		return err;
	err = tfs_lock_inode_as(fs, h, TFS_BRIEFLY, &inode);
	if (err)
		goto end;
	lock = tfs_own_lock(inode);
	if (lock)
		err = tfs_lock(fs, lock, TFS_BRIEFLY);
	if (!err) {
		tfs_table_open(&t, fs, inode);
		if (!tfs_has_room(&t, 2)) {
			tfs_tx_inode(fs, slot, 0, h.ino);
			err = tfs_table_grow(&t);
		}
		if (lock)
			tfs_unlock(fs, lock);
	}
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &inode->lock);
	return err;
end:
	tfs_tx_end(fs, slot);
	return err;
}

/* Adds a block to the table, unless it has gained enough room since the caller looked. */
static int tfs_grow(struct tfs *fs, struct tfs_handle h, enum tfs_how how)
{
	struct tfs_inode *inode;
	int err;

	while ((err = tfs_grow_once(fs, h)) == -EAGAIN) {
		err = tfs_await_inode(fs, h, how);
		if (!err)
			err = tfs_lock_table(fs, h, how, &inode);
		if (err)
			break;
		tfs_table_unlock(fs, inode);
	}
	return err;
}

int tfs_set_lock(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock)
{
	enum tfs_how how = lock->type == TFS_LK_UNLOCK ? TFS_SURE : TFS_KILLABLE;
	struct tfs_inode *inode;
	int err;

	if (lock->start > lock->end)
		return -EINVAL;
	/* A pass without room adds a block, so a sound table is full after MAX_BLOCKS passes, whatever other members take meanwhile. */
	for (tmb_u32 grown = 0; grown <= MAX_BLOCKS; grown++) {
		err = tfs_lock_table(fs, h, how, &inode);
		if (err)
			return err;
		err = tfs_set_locked(fs, inode, *lock);
		tfs_table_unlock(fs, inode);
		if (err != NO_ROOM)
			return err;
		err = tfs_grow(fs, h, how);
		if (err)
			return err;
	}
	return tfs_damage(fs, "file-lock records that never suffice", h.ino, 0);
}

int tfs_get_lock(struct tfs *fs, struct tfs_handle h, struct tfs_file_lock *lock)
{
	struct tfs_inode *inode;
	struct tfs_lock_record *r, *found = NULL;
	struct tfs_table t;
	int err = tfs_lock_table(fs, h, TFS_KILLABLE, &inode);

	if (err)
		return err;
	tfs_table_open(&t, fs, inode);
	for (tmb_u64 i = 0; (r = tfs_record_at(&t, i)); i++)
		if (tfs_conflicts(fs, r, lock) && (!found || tfs_comes_before(r, found)))
			found = r;
	if (found) {
		lock->type = tmb_load(&found->type);
		lock->start = tmb_load(&found->start);
		lock->end = tmb_load(&found->end);
		lock->pid = tmb_load(&found->pid);
		lock->owner = tmb_load(&found->owner);
		lock->member = tmb_lock_owner(tmb_load(&found->holder));
	} else {
		lock->type = TFS_LK_UNLOCK;
	}
	tfs_table_unlock(fs, inode);
	return 0;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

struct tfs_lock_waiter {
	tmb_u32 member;
	tmb_u64 owner;
};

static bool tfs_is_same(struct tfs_lock_waiter a, struct tfs_lock_waiter b)
{
	return a.member == b.member && a.owner == b.owner;
}

/* A search for a deadlock: for a chain of waits that ends at 'end'. */
struct tfs_search {
	struct tfs *fs;
	struct tfs_lock_waiter end;
	tmb_u32 looks; /* at so many more records */
};

static bool tfs_is_blocked(struct tfs_search *s, tmb_u64 ino, const struct tfs_file_lock *lock, struct tfs_lock_waiter waiting, tmb_u32 depth);

/* Does one of the waits of 'holder' lead to the end? */
static bool tfs_waits_for_end(struct tfs_search *s, struct tfs_lock_waiter holder, tmb_u32 depth)
{
	struct tfs_member_area *area = tfs_member_area(s->fs, holder.member);

	for (tmb_u32 k = 0; k < TFS_LOCK_WAITS; k++) {
		struct tfs_lock_wait *w = &area->waits[k];
		tmb_u64 ino = tmb_load_acquire(&w->ino);
		struct tfs_file_lock wanted = {.start = tmb_load(&w->start), .end = tmb_load(&w->end), .type = tmb_load(&w->type)};

		if (ino && tmb_load(&w->owner) == holder.owner && tfs_is_blocked(s, ino, &wanted, holder, depth))
			return true;
	}
	return false;
}

/*
 * Is 'waiting', which wants 'lock' on an inode, blocked by the end of the search, directly or along at most 'depth' - 1 other owners? Reads records
 * of other inodes without their locks: each side stores its wait before it looks, so of two that wait for each other at least one sees it.
 */
static bool tfs_is_blocked(struct tfs_search *s, tmb_u64 ino, const struct tfs_file_lock *lock, struct tfs_lock_waiter waiting, tmb_u32 depth)
{
	struct tfs_inode *inode = tfs_inode(s->fs, ino);
	struct tfs_lock_record *r;
	struct tfs_table t;

	if (!depth || !inode || !tfs_table_open(&t, s->fs, inode))
		return false;
	for (tmb_u64 i = 0; s->looks && (r = tfs_record_at(&t, i)); i++, s->looks--) {
		tmb_u64 word = tmb_load(&r->holder);
		struct tfs_lock_waiter holder = {.member = tmb_lock_owner(word), .owner = tmb_load(&r->owner)};

		if (!tfs_counts(s->fs, word) || tfs_is_same(holder, waiting) || tmb_load(&r->kind) != TFS_LK_POSIX || !tfs_excludes(r, lock))
			continue;
		if (tfs_is_same(holder, s->end) || tfs_waits_for_end(s, holder, depth - 1))
			return true;
	}
	return false;
}

/* Would a wait of 'self' for a POSIX lock never end? */
static bool tfs_is_deadlock(struct tfs *fs, tmb_u64 ino, const struct tfs_file_lock *lock, struct tfs_lock_waiter self)
{
	struct tfs_search s = {.fs = fs, .end = self, .looks = MAX_LOOKS};

	return tfs_is_blocked(&s, ino, lock, self, MAX_DEPTH);
}

int tfs_lock_wait_begin(struct tfs *fs, struct tfs_handle h, const struct tfs_file_lock *lock)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	struct tfs_lock_waiter self = {.member = fs->member, .owner = lock->owner};

	for (tmb_u32 i = 0; lock->kind == TFS_LK_POSIX && i < TFS_LOCK_WAITS; i++) {
		struct tfs_lock_wait *w = &area->waits[i];

		if (!tmb_cas32(&w->claimed, 0, 1))
			continue;
		tmb_store(&w->owner, lock->owner);
		tmb_store(&w->start, lock->start);
		tmb_store(&w->end, lock->end);
		tmb_store(&w->type, lock->type);
		tmb_store_release(&w->ino, h.ino);
		tmb_fence();
		if (tfs_is_deadlock(fs, h.ino, lock, self)) {
			tfs_lock_wait_end(fs, (int)i);
			return -EDEADLK;
		}
		return (int)i;
	}
	/* Other members can't see this waiter, so it only looks for itself. */
	return lock->kind == TFS_LK_POSIX && tfs_is_deadlock(fs, h.ino, lock, self) ? -EDEADLK : (int)TFS_LOCK_WAITS;
}

void tfs_lock_wait_end(struct tfs *fs, int slot)
{
	struct tfs_lock_wait *w;

	if (slot >= (int)TFS_LOCK_WAITS || tfs_fenced(fs))
		return;
	w = &tfs_member_area(fs, fs->member)->waits[slot];

	tmb_store(&w->ino, 0);
	tmb_store_release(&w->claimed, 0);
}
