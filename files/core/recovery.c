// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The recovery of dead members, in two halves:
 * - Transactions: repeats the committed ones, discards the others, and frees the blocks with the dead member's tag. It takes no lock of an inode.
 *   Afterwards the dead member's locks may be taken over.
 * - References: clears the dead member's open and map bits and frees its orphans. It takes locks of inodes.
 *
 * Any member does it, when it waits for a dead member's lock (the first half), when it joins, or when the host declares a member dead. It may die
 * at it: each step can be repeated.
 */
#include "tfs_internal.h"

#define CHAIN 4u /* recoveries within each other, where each dead member died while it recovered the next; bounds the stack */

/* --- transactions ----------------------------------------------------------------------------------------------- */

/* The findings of one member's recovery in its transactions. */
struct tfs_settling {
	tmb_u8 tag;
	tmb_u64 budget;	 /* blocks of trees that are still looked at */
	tmb_u64 linked;	 /* blocks of the present inode's trees */
	tmb_u64 holders; /* members that may still look at blocks that were unlinked */
	bool damaged;	 /* a tree could not be walked to its end */
};

/* Keeps a linked block that carries the dead member's tag. */
static int tfs_keep_tagged(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node)
{
	struct tfs_settling *s = ctx;
	tmb_u8 *map = tfs_map_bytes(fs);

	(void)node;
	s->linked += count;
	for (; count; count--, block++)
		if (tmb_load(&map[block]) == s->tag)
			tfs_set_map(fs, block, 1, TFS_MAP_USED);
	return 0;
}

static void tfs_keep_tree(struct tfs *fs, tmb_u64 root, struct tfs_settling *s)
{
	if (tfs_tree_walk(fs, root, tfs_keep_tagged, s, &s->budget))
		s->damaged = true;
}

static void tfs_keep_inode_blocks(struct tfs *fs, tmb_u64 ino, struct tfs_settling *s)
{
	struct tfs_inode *inode;
	tmb_u32 owner;

	if (ino == TFS_TX_ITABLE) {
		tfs_keep_tree(fs, tmb_load(&tfs_sb(fs)->itable_root), s);
		return;
	}
	inode = tfs_inode(fs, ino);
	if (!inode)
		return;
	s->linked = 0;
	tfs_keep_tree(fs, tmb_load(&inode->root), s);
	tfs_keep_tree(fs, tmb_load(&inode->index_root), s);
	tfs_keep_tree(fs, tmb_load(&inode->xattr_root), s);
	tfs_keep_tree(fs, tmb_load(&inode->locks), s);
	/* The dead member may have linked or unlinked blocks that it did not count any more. Without its lock, another member may be changing the file now. */
	if (!s->damaged && tfs_lock_held(&inode->lock, &owner) && owner + 1 == s->tag)
		tfs_count_blocks(fs, inode, (tmb_s64)(s->linked - tmb_load(&inode->blocks)));
}

/* Repeats the work of a transaction that had begun; the dead member still holds its inode's lock. */
static int tfs_redo(struct tfs *fs, struct tfs_tx *tx, tmb_u8 tag)
{
	bool own = tag == tfs_tag(fs);
	tmb_u32 what = tmb_load(&tx->redo);
	tmb_u64 ino = tmb_load(&tx->ino[0]), from = tmb_load(&tx->arg[0]), to = tmb_load(&tx->arg[1]);
	struct tfs_inode *inode = tfs_tx_listed(fs, tx, 0);
	struct tfs_gone *gone;
	int err;

	if (what == TFS_REDO_NONE || what == TFS_REDO_FREE || !inode || !tfs_is(inode, tfs_any(ino)))
		return 0; /* the scan of the inode table frees orphans */
	if (what == TFS_REDO_TRIM) {
		tmb_u64 behind = tfs_blocks_of(tmb_load(&inode->size));

		from = from > behind ? from : behind;
		if (from < to && !tfs_has_blocks(fs, inode, to))
			to = ~0ULL; /* also the nodes */
	}
	gone = tfs_os_alloc(sizeof(*gone));
	if (!gone)
		return -ENOMEM;
	/* The dead member's spare blocks carry its tag and are linked to nothing. */
	for (tmb_u32 i = 0; what == TFS_REDO_TRUNCATE && i < 2; i++) {
		tmb_u64 spare = tmb_load(&tx->spare[i]);

		if (tfs_block_ok(fs, spare) && tmb_load(tfs_map_bytes(fs) + spare) == tag)
			gone->spare[i] = spare;
	}
	err = tfs_tx_begin_redo(fs, ino, own);
	if (!err) {
		err = tfs_remove_blocks(fs, inode, ino, from, to, gone, true);
		tfs_tx_end_redo(fs, own);
	}
	tfs_os_free(gone);
	return err;
}

static bool tfs_listed_before(struct tfs_member_area *area, tmb_u32 slot, tmb_u32 index, tmb_u64 ino)
{
	for (tmb_u32 i = 0; i < slot; i++)
		for (tmb_u32 k = 0; (tmb_load(&area->tx[i].state) & 0xff) != TFS_TX_FREE && k < TFS_TX_INODES; k++)
			if (tmb_load(&area->tx[i].ino[k]) == ino)
				return true;
	for (tmb_u32 k = 0; k < index; k++)
		if (tmb_load(&area->tx[slot].ino[k]) == ino)
			return true;
	return false;
}

static tmb_u32 tfs_tx_state(struct tfs_tx *tx)
{
	return tmb_load_acquire(&tx->state) & 0xff;
}

/*
 * Settles inode 'k' of an open or committed transaction: keeps the blocks that are linked, and ends a change of a directory that no other member is
 * making.
 */
static void tfs_settle(struct tfs *fs, tmb_u32 member, tmb_u32 slot, tmb_u32 k, struct tfs_settling *s)
{
	struct tfs_member_area *area = tfs_member_area(fs, member);
	tmb_u64 ino = tmb_load(&area->tx[slot].ino[k]);
	struct tfs_inode *inode = tfs_tx_listed(fs, &area->tx[slot], k);
	tmb_u32 owner;

	if (ino && !tfs_listed_before(area, slot, k, ino))
		tfs_keep_inode_blocks(fs, ino, s);
	if (!inode)
		return;
	s->holders |= tfs_holders(fs, inode, ino, false);
	if (TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR) && tmb_load(&inode->seq) & 1 &&
	    (!tfs_lock_held(&inode->lock, &owner) || owner == member))
		tfs_dir_end(fs, inode);
}

/* Repeats the work of all transactions that have begun it. Fails only if a later recovery can complete it. */
static int tfs_redo_all(struct tfs *fs, struct tfs_member_area *area, tmb_u8 tag)
{
	for (tmb_u32 i = 0; i < TFS_TX_SLOTS; i++) {
		struct tfs_tx *tx = &area->tx[i];
		tmb_u32 state = tfs_tx_state(tx);
		int err = 0;

		if (state == TFS_TX_COMMITTED || (state == TFS_TX_OPEN && tmb_load(&tx->redo) == TFS_REDO_TRIM))
			err = tfs_redo(fs, tx, tag);
		if (err == -ENOMEM || err == -EINTR || err == -ESHUTDOWN)
			return err;
	}
	return 0;
}

/*
 * Frees the blocks with the tag. After damage any of them may be linked where no walk came, so none is freed: a block that two files have is worse than
 * one that is lost until fsck finds it.
 */
static void tfs_free_unlinked(struct tfs *fs, const struct tfs_settling *s)
{
	tmb_u64 block = fs->data_start;

	if (!s->damaged)
		tfs_free_tagged(fs, s->tag, s->holders);
	while (s->damaged && (block = tfs_find_map(fs, block, fs->blocks, s->tag)) < fs->blocks)
		tfs_set_map(fs, block, 1, TFS_MAP_USED);
}

/* Empties the area of a member whose transactions are done: its pins, slots, waits, and its place among the watchers. */
static void tfs_clear_area(struct tfs *fs, tmb_u32 member)
{
	struct tfs_member_area *area = tfs_member_area(fs, member);

	tfs_store_word(fs, &area->kept_for, 0);
	for (tmb_u32 i = 0; i < TFS_PINS; i++)
		tmb_store(&area->pins[i].ino, 0);
	tfs_barrier(fs);
	for (tmb_u32 i = 0; i < TFS_TX_SLOTS; i++)
		tfs_tx_clear(fs, &area->tx[i]);
	memset(area->waits, 0, sizeof(area->waits));
	tmb_fetch_and(&tfs_sb(fs)->watchers, ~(1ULL << member));
	tfs_barrier(fs);
}

/* Recovers a dead member's transactions. The caller holds the lock of its recovery. */
static int tfs_recover_transactions(struct tfs *fs, tmb_u32 member)
{
	struct tfs_member_area *area = tfs_member_area(fs, member);
	struct tfs_settling s = {.tag = (tmb_u8)(member + 1), .budget = 2 * fs->blocks};
	int err;

	s.holders = tfs_active_members(fs, tmb_load(&area->kept_for));
	for (tmb_u32 i = 0; i < TFS_TX_SLOTS; i++)
		if (tfs_tx_state(&area->tx[i]) == TFS_TX_COMMITTED)
			tfs_tx_repeat(fs, &area->tx[i]);
	for (tmb_u32 i = 0; i < TFS_TX_SLOTS; i++) {
		tmb_u32 inodes = tfs_tx_state(&area->tx[i]) == TFS_TX_FREE ? 0 : TFS_TX_INODES;

		for (tmb_u32 k = 0; k < inodes; k++)
			tfs_settle(fs, member, i, k, &s);
	}
	err = tfs_redo_all(fs, area, s.tag);
	if (!err && tfs_fenced(fs))
		err = -ESHUTDOWN;
	if (err)
		return err;
	tfs_free_unlinked(fs, &s);
	tfs_clear_area(fs, member);
	return 0;
}

/* --- references --------------------------------------------------------------------------------------------------- */

static bool tfs_created_by(tmb_u64 state_gen, tmb_u64 members)
{
	tmb_u64 tag = state_gen >> 8 & 0xff;

	return (state_gen & 0xff) == TFS_INODE_NEW && tag && tag <= TFS_MEMBERS && members >> (tag - 1) & 1;
}

/* Frees the new inode of a dead member, in a transaction: this member may die, too. */
static int tfs_drop_dead_inode(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode)
{
	tmb_u32 slot;
	int err = tfs_tx_claim(fs, &slot);

	if (err)
		return err;
	tfs_tx_inode(fs, slot, 0, ino);
	tfs_drop_new_inode(fs, inode, slot);
	tfs_tx_end(fs, slot);
	return 0;
}

static void tfs_clear_bits(tmb_u64 *word, tmb_u64 members)
{
	if (tmb_load(word) & members)
		tmb_fetch_and(word, ~members);
}

/* Clears the dead members' bits of an inode, and frees it if it was theirs alone. */
static int tfs_forget_in_inode(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u64 members)
{
	tmb_u64 state = tmb_load(&inode->state_gen);

	if (tfs_created_by(state, members))
		return tfs_drop_dead_inode(fs, ino, inode);
	if ((state & 0xff) != TFS_INODE_LIVE)
		return 0;
	tfs_clear_bits(&inode->openers, members);
	tfs_clear_bits(&inode->mappers, members);
	tfs_clear_bits(&inode->hole_mappers, members);
	if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
		return 0;
	return tfs_free_orphan(fs, ino, tfs_tx_claim);
}

/* One pass for all of the members: the inode table is the largest thing that a recovery reads. An error: the next recovery repeats the pass. */
static int tfs_forget_in_inodes(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 n = tfs_table_inodes(fs);
	int err = 0;

	for (tmb_u64 ino = TFS_ROOT_INO; !err && ino < n; ino++) {
		struct tfs_inode *inode = tfs_inode(fs, ino);

		if (!inode)
			break; /* itable_inodes is larger than the table */
		if (!(ino % TFS_INODES_PER_BLOCK))
			tfs_os_yield();
		err = tfs_forget_in_inode(fs, ino, inode, members);
	}
	return err;
}

/* --- members ------------------------------------------------------------------------------------------------------ */

/* The newest epoch that may have left work to a recovery. */
static tmb_u32 tfs_ended_epoch(struct tmb_member *slot)
{
	tmb_u64 state_epoch = tmb_load_acquire(&slot->state_epoch);
	tmb_u32 epoch = tmb_epoch(state_epoch);

	/* The present epoch starts nothing before its predecessors are recovered (tfs_open). */
	return tmb_state(state_epoch) == TMB_MEMBER_ACTIVE && epoch ? epoch - 1 : epoch;
}

static int tfs_recover_members(struct tfs *fs, tmb_u64 members, bool references, enum tfs_how how, tmb_u32 chain);

/* Returns whether the dead member that owned a recovery's lock has transactions that are not recovered: it may have died in that recovery. */
static bool tfs_is_half_done(struct tfs *fs, tmb_u64 lock)
{
	tmb_u32 owner = tmb_lock_owner(lock);

	return owner < TFS_MEMBERS && tmb_load_acquire(&fs->members[owner].recovered_epoch) < (tmb_u32)(lock >> 32);
}

/*
 * Takes the lock of a member's recovery. A dead owner's transactions are recovered first: it may have been changing the same inodes, and another member
 * may be recovering it now. 1: not needed, because the transactions are recovered and the
 * caller wants no more. The owner recovers transactions first, which waits for no lock. So a thread that holds
 * locks of inodes and waits here goes on, even while the owner waits for locks of inodes to forget open references. A thread takes several in
 * the order of their members, and holds no other lock then.
 */
static int tfs_lock_recovery(struct tfs *fs, struct tmb_member *slot, bool references, tmb_u32 upto, enum tfs_how how, tmb_u32 chain)
{
	tmb_u64 mine = tmb_lock_word(fs->member, fs->epoch, 1);
	struct tfs_wait w;
	int err = 0;

	tfs_wait_start(&w, how);
	while (!err) {
		tmb_u64 now = tmb_load(&slot->recovery_lock);
		tmb_u32 owner = tmb_lock_owner(now);

		if (!references && tmb_load_acquire(&slot->recovered_epoch) >= upto)
			return 1;
		if (now && tfs_member_alive(fs, owner, (tmb_u32)(now >> 32)))
			err = tfs_wait_more(fs, &w, now, owner, NULL, 0);
		else if (chain && &fs->members[owner % TFS_MEMBERS] != slot && tfs_is_half_done(fs, now))
			err = tfs_recover_members(fs, 1ULL << owner, false, how, --chain);
		else if (tmb_cas64(&slot->recovery_lock, now, mine))
			return 0;
	}
	return err;
}

static void tfs_unlock_recovery(struct tfs *fs, tmb_u32 member)
{
	tmb_cas64(&fs->members[member].recovery_lock, tmb_lock_word(fs->member, fs->epoch, 1), 0);
}

/* Members that this one recovers, a bit each. */
struct tfs_recovery {
	tmb_u64 locked;	/* whose recovery it has locked */
	tmb_u64 forget;	/* of these, whose references are to be forgotten */
	tmb_u32 upto[TFS_MEMBERS];
};

/* Locks a member's recovery and recovers its transactions, as far as there is anything to recover. */
static int tfs_recover_one(struct tfs *fs, struct tfs_recovery *r, tmb_u32 m, bool references, enum tfs_how how, tmb_u32 chain)
{
	struct tmb_member *slot = &fs->members[m];
	int err;

	if (tmb_load_acquire(references ? &slot->forgotten_epoch : &slot->recovered_epoch) >= tfs_ended_epoch(slot))
		return 0;
	err = tfs_lock_recovery(fs, slot, references, tfs_ended_epoch(slot), how, chain);
	if (err)
		return err < 0 ? err : 0;
	r->upto[m] = tfs_ended_epoch(slot);
	if (tmb_load_acquire(&slot->recovered_epoch) < r->upto[m]) {
		err = tfs_recover_transactions(fs, m);
		if (err) {
			/* Other members' references remain to be forgotten, and this member may hold the lock of one of them. */
			tfs_unlock_recovery(fs, m);
			return err;
		}
		tfs_store_word(fs, &slot->recovered_epoch, r->upto[m]);
	}
	r->locked |= 1ULL << m;
	if (references && tmb_load_acquire(&slot->forgotten_epoch) < r->upto[m])
		r->forget |= 1ULL << m;
	return 0;
}

/* references: also forgets the members' open references, for which it takes locks of inodes. chain: of so many dead members each may have died while it
 * recovered the next; from there on a recovery's lock is taken over as it is. */
static int tfs_recover_members(struct tfs *fs, tmb_u64 members, bool references, enum tfs_how how, tmb_u32 chain)
{
	struct tfs_recovery r = {0};
	tmb_u64 left;
	int err = 0;

	if (!fs->members)
		return 0;
	for (left = members; left && !err; left &= left - 1)
		err = tfs_recover_one(fs, &r, (tmb_u32)__builtin_ctzll(left), references, how, chain);
	/* From here on the dead members' locks can be taken over; the scan does so. */
	if (r.forget) {
		int left_over = tfs_forget_in_inodes(fs, r.forget);

		if (left_over) { /* killed: the next recovery repeats the scan */
			r.forget = 0;
			err = err ? err : left_over;
		}
	}
	if (r.forget)
		tfs_deferred_settle(fs, r.forget);
	if (r.forget && !err)
		tfs_keep_reserve(fs);
	tfs_barrier(fs);
	for (left = r.forget; left; left &= left - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(left);

		tfs_store_word(fs, &fs->members[m].forgotten_epoch, r.upto[m]);
	}
	tfs_barrier(fs);
	for (left = r.locked; left; left &= left - 1)
		tfs_unlock_recovery(fs, (tmb_u32)__builtin_ctzll(left));
	return err;
}

int tfs_recover(struct tfs *fs, tmb_u32 member)
{
	return member < TFS_MEMBERS ? tfs_recover_members(fs, 1ULL << member, true, TFS_KILLABLE, CHAIN) : 0;
}

int tfs_recover_locks(struct tfs *fs, tmb_u32 member, enum tfs_how how)
{
	return member < TFS_MEMBERS ? tfs_recover_members(fs, 1ULL << member, false, how, CHAIN) : 0;
}

int tfs_recover_all(struct tfs *fs)
{
	if (!fs->members || fs->read_only)
		return 0;
	int err = tfs_wait_thaw(fs);

	return err ? err : tfs_recover_members(fs, ~0ULL, true, TFS_KILLABLE, CHAIN);
}
