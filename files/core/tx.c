// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Transactions, and the recovery of dead members, which they make possible (tfs_format.h says how they work).
 */
#include "tfs_internal.h"

/* The cache line with state, redo, n_words and ino: stores to one line become durable in their order. */
#define TX_HEAD 64u
_Static_assert(offsetof(struct tfs_tx, arg) <= TX_HEAD, "transaction head");

struct tfs_tx *tfs_tx(struct tfs *fs, tmb_u32 slot)
{
	return &tfs_member_area(fs, fs->member)->tx[slot];
}

/* Returns inode i of those whose trees may hold tagged blocks; NULL: none, or the inode table. */
static struct tfs_inode *listed_inode(struct tfs *fs, struct tfs_tx *tx, tmb_u32 i)
{
	tmb_u64 ino = tmb_load(&tx->ino[i]);

	return ino && ino != TFS_TX_ITABLE ? tfs_inode(fs, ino) : NULL;
}

static tmb_u64 tx_state(struct tfs *fs, tmb_u32 state)
{
	return (tmb_u64)fs->epoch << 32 | state;
}

static bool open_slot(struct tfs *fs, tmb_u32 i)
{
	struct tfs_tx *tx = tfs_tx(fs, i);
	tmb_u64 old = tmb_load(&tx->state);

	return (old & 0xff) == TFS_TX_FREE && tmb_cas64(&tx->state, old, tx_state(fs, TFS_TX_OPEN));
}

/* Waits while other threads of this member have all slots; the caller holds no lock that these could wait for. */
static int claim(struct tfs *fs, tmb_u32 *slot)
{
	tmb_u32 i = tfs_os_cpu() % TFS_TX_RECOVERY;
	struct tfs_wait w;

	if (fs->read_only)
		return -EROFS;
	if (tfs_fenced(fs))
		return -ESHUTDOWN;
	for (tmb_u32 round = 0;; round++, i = (i + 1) % TFS_TX_RECOVERY) {
		if (open_slot(fs, i)) {
			*slot = i;
			return 0;
		}
		if (round && round % TFS_TX_RECOVERY == 0) {
			int err;

			if (round == TFS_TX_RECOVERY)
				tfs_wait_start(&w, TFS_SURE); /* a killed process that closes a file must get one */
			err = tfs_wait_more(fs, &w, 0, TFS_MEMBERS, NULL, 0);
			if (err)
				return err;
		}
	}
}

int tfs_tx_begin(struct tfs *fs, tmb_u32 *slot)
{
	int err;

	while (!(err = claim(fs, slot)) && tfs_frozen(fs)) {
		tfs_tx_drop(fs, *slot);
		err = tfs_wait_thaw(fs);
		if (err)
			break;
	}
	return err;
}

int tfs_tx_try_begin(struct tfs *fs, tmb_u32 *slot)
{
	int err = claim(fs, slot);

	if (err || !tfs_frozen(fs))
		return err;
	tfs_tx_drop(fs, *slot);
	return -EAGAIN;
}

void tfs_tx_inode(struct tfs *fs, tmb_u32 slot, tmb_u32 index, tmb_u64 ino)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	tmb_store_release(&tx->ino[index], ino);
	tfs_persist(fs, tx, TX_HEAD);
}

void tfs_tx_redo(struct tfs *fs, tmb_u32 slot, tmb_u32 redo, tmb_u64 arg0, tmb_u64 arg1)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	tmb_store(&tx->arg[0], arg0);
	tmb_store(&tx->arg[1], arg1);
	tfs_persist(fs, tx->arg, sizeof(tx->arg));
	tfs_barrier(fs);
	tmb_store_release(&tx->redo, redo);
	tfs_persist(fs, tx, TX_HEAD);
}

void tfs_tx_word(struct tfs *fs, tmb_u32 slot, void *field, tmb_u64 value)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);
	tmb_u32 n = tmb_load(&tx->n_words);

	/* No operation needs more. The count is memory that other members can write, so it is checked. */
	if (n >= TFS_TX_WORDS)
		return;
	tx->words[n].offset = (tmb_u64)((tmb_u8 *)field - fs->area);
	tx->words[n].value = value;
	tmb_store(&tx->n_words, n + 1);
}

static void store_word(struct tfs *fs, tmb_u64 *word, tmb_u64 value)
{
	tmb_store_release(word, value);
	tfs_persist(fs, word, sizeof(*word));
}

static void store_words(struct tfs *fs, struct tfs_tx *tx)
{
	tmb_u64 n = TFS_MIN(tmb_load(&tx->n_words), TFS_TX_WORDS);

	for (tmb_u64 i = 0; i < n; i++) {
		tmb_u64 offset = tmb_load(&tx->words[i].offset), value = tmb_load(&tx->words[i].value);

		/* Transactions change words of inodes and directories only. */
		if (offset % 8 || !tfs_block_ok(fs, offset >> TFS_BLOCK_SHIFT))
			tfs_damage(fs, "transaction word out of range", offset, i);
		else
			store_word(fs, (tmb_u64 *)(fs->area + offset), value);
	}
}

void tfs_tx_commit(struct tfs *fs, tmb_u32 slot)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	tfs_persist(fs, tx, sizeof(*tx));
	tfs_barrier(fs);
	tmb_store_release(&tx->state, tx_state(fs, TFS_TX_COMMITTED));
	tfs_persist(fs, tx, TX_HEAD);
	tfs_barrier(fs);
	store_words(fs, tx);
}

static void clear_tx(struct tfs *fs, struct tfs_tx *tx, tmb_u64 state)
{
	tmb_store_release(&tx->redo, TFS_REDO_NONE); /* first, since it is about ino[0] */
	for (tmb_u32 i = 0; i < TFS_TX_INODES; i++)
		tmb_store(&tx->ino[i], 0);
	tmb_store(&tx->n_words, 0);
	tmb_store_release(&tx->state, state);
	tfs_persist(fs, tx, TX_HEAD);
}

void tfs_tx_drop(struct tfs *fs, tmb_u32 slot)
{
	tmb_store_release(&tfs_tx(fs, slot)->state, tx_state(fs, TFS_TX_FREE));
}

void tfs_tx_end(struct tfs *fs, tmb_u32 slot)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);
	struct tfs_inode *freed[TFS_TX_INODES];
	tmb_u32 n = 0;

	for (tmb_u32 i = 0; i < TFS_TX_INODES; i++) {
		struct tfs_inode *inode = listed_inode(fs, tx, i);

		if (inode && tfs_is_freeing(fs, inode, slot))
			freed[n++] = inode;
	}
	tfs_barrier(fs);
	clear_tx(fs, tx, tx_state(fs, TFS_TX_FREE));
	tfs_barrier(fs);
	while (n)
		tfs_set_free(fs, freed[--n]);
}

/* --- after a death ------------------------------------------------------------------------------------------- */

/* Keeps a linked block that carries the dead member's tag. */
static int keep_tagged(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node)
{
	tmb_u8 *map = tfs_map_bytes(fs), tag = *(tmb_u8 *)ctx;

	(void)node;
	for (; count; count--, block++)
		if (tmb_load(&map[block]) == tag)
			tfs_set_map(fs, block, 1, TFS_MAP_USED);
	return 0;
}

static void keep_inode_blocks(struct tfs *fs, tmb_u64 ino, tmb_u8 tag, tmb_u64 *budget)
{
	struct tfs_inode *inode;

	if (ino == TFS_TX_ITABLE) {
		tfs_tree_walk(fs, tmb_load(&tfs_sb(fs)->itable_root), keep_tagged, &tag, budget);
		return;
	}
	inode = tfs_inode(fs, ino);
	if (!inode)
		return;
	tfs_tree_walk(fs, tmb_load(&inode->root), keep_tagged, &tag, budget);
	tfs_tree_walk(fs, tmb_load(&inode->index_root), keep_tagged, &tag, budget);
	tfs_tree_walk(fs, tmb_load(&inode->xattr_root), keep_tagged, &tag, budget);
	tfs_tree_walk(fs, tmb_load(&inode->locks), keep_tagged, &tag, budget);
}

/* Frees the blocks that have the tag and are not linked; deferred if there are 'holders' that may still look at them. */
static int free_tagged(struct tfs *fs, tmb_u8 tag, tmb_u64 holders)
{
	tmb_u64 block = fs->data_start;
	int err = holders ? tfs_deferred_begin(fs, holders) : 0;

	if (err)
		return err;
	while ((block = tfs_find_map(fs, block, fs->blocks, tag)) < fs->blocks)
		tfs_set_map(fs, block, 1, holders ? TFS_MAP_DEFERRED : TFS_MAP_FREE);
	if (holders)
		tfs_deferred_end(fs);
	return 0;
}

static bool created_by(tmb_u64 state_gen, tmb_u64 members)
{
	tmb_u64 tag = state_gen >> 8 & 0xff;

	return (state_gen & 0xff) == TFS_INODE_NEW && tag && tag <= TFS_MEMBERS && members >> (tag - 1) & 1;
}

/*
 * Opens the transaction in which this member repeats another one's work: it tags and unlinks blocks, too, and may die of it. The lock of its
 * threads is in private memory, so no member can keep the slot taken by writing to the zone: with the lock held, an open slot is damage. Work
 * of this member's own former epoch has the same tag, and the repeated transaction names the inode, so it needs no other. Its slot may be one
 * of those that are recovered, and stays as it is until all are.
 */
static int begin_redo(struct tfs *fs, tmb_u64 ino, bool own)
{
	struct tfs_tx *tx = tfs_tx(fs, TFS_TX_RECOVERY);
	struct tfs_wait w;
	int err = 0;

	if (own)
		return 0;
	tfs_wait_start(&w, TFS_SURE);
	while (!err && !tmb_cas32(&fs->recovery_lock, 0, 1)) /* another thread's recovery has it */
		err = tfs_wait_more(fs, &w, 0, TFS_MEMBERS, NULL, 0);
	if (err)
		return err;
	if (!open_slot(fs, TFS_TX_RECOVERY)) {
		tfs_damage(fs, "the transaction of recoveries is open", fs->member, tmb_load(&tx->state));
		clear_tx(fs, tx, tx_state(fs, TFS_TX_OPEN));
	}
	tfs_tx_inode(fs, TFS_TX_RECOVERY, 0, ino);
	return 0;
}

static void end_redo(struct tfs *fs, bool own)
{
	if (own)
		return;
	tfs_tx_end(fs, TFS_TX_RECOVERY);
	tmb_store_release(&fs->recovery_lock, 0);
}

/* Repeats the work of a transaction that had begun; the dead member still holds its inode's lock. */
static int redo(struct tfs *fs, struct tfs_tx *tx, tmb_u8 tag)
{
	bool own = tag == tfs_tag(fs);
	tmb_u32 what = tmb_load(&tx->redo);
	tmb_u64 ino = tmb_load(&tx->ino[0]), from = tmb_load(&tx->arg[0]), to = tmb_load(&tx->arg[1]);
	struct tfs_inode *inode = listed_inode(fs, tx, 0);
	struct tfs_gone *gone;
	int err;

	if (what == TFS_REDO_NONE || what == TFS_REDO_FREE || !inode || !tfs_is(inode, tfs_any(ino)))
		return 0; /* the scan of the inode table frees orphans */
	if (what == TFS_REDO_TRIM) {
		from = tfs_blocks_of(tmb_load(&inode->size));
		to = ~0ULL;
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
	err = begin_redo(fs, ino, own);
	if (!err) {
		err = tfs_remove_blocks(fs, inode, ino, from, to, gone, true);
		end_redo(fs, own);
	}
	tfs_os_free(gone);
	return err;
}

/* One pass for all of the members: the inode table is the largest thing that a recovery reads. An error: the next recovery repeats the pass. */
static int forget_in_inodes(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 n = tfs_table_inodes(fs);
	int err = 0;

	for (tmb_u64 ino = TFS_ROOT_INO; ino < n; ino++) {
		struct tfs_inode *inode = tfs_inode(fs, ino);
		tmb_u64 state;
		tmb_u32 slot;

		if (!inode)
			break; /* itable_inodes is larger than the table */
		if (!(ino % TFS_INODES_PER_BLOCK))
			tfs_os_yield();
		state = tmb_load(&inode->state_gen);
		if (created_by(state, members)) {
			/* In a transaction: this member may die, too, while it frees the dead member's inode. */
			err = claim(fs, &slot);
			if (err)
				return err;
			tfs_tx_inode(fs, slot, 0, ino);
			tfs_drop_new_inode(fs, inode, slot);
			tfs_tx_end(fs, slot);
			continue;
		}
		if ((state & 0xff) != TFS_INODE_LIVE)
			continue;
		if (tmb_load(&inode->openers) & members)
			tmb_fetch_and(&inode->openers, ~members);
		if (tmb_load(&inode->mappers) & members)
			tmb_fetch_and(&inode->mappers, ~members);
		if (tmb_load(&inode->hole_mappers) & members)
			tmb_fetch_and(&inode->hole_mappers, ~members);
		if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
			continue;
		err = claim(fs, &slot);
		if (err)
			return err;
		tfs_free_orphan(fs, ino, slot);
	}
	return 0;
}

/* The newest epoch that may have left work to a recovery. */
static tmb_u32 ended_epoch(struct tmb_member *slot)
{
	tmb_u64 state_epoch = tmb_load_acquire(&slot->state_epoch);
	tmb_u32 epoch = tmb_epoch(state_epoch);

	/* The present epoch starts nothing before its predecessors are recovered (tfs_open). */
	return tmb_state(state_epoch) == TMB_MEMBER_ACTIVE && epoch ? epoch - 1 : epoch;
}

static bool listed_before(struct tfs_member_area *area, tmb_u32 slot, tmb_u32 index, tmb_u64 ino)
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

/* Recovers a dead member's transactions. The caller holds the lock of its recovery. */
static int recover_transactions(struct tfs *fs, tmb_u32 member)
{
	struct tfs_member_area *area = tfs_member_area(fs, member);
	tmb_u8 tag = (tmb_u8)(member + 1);
	tmb_u64 budget = 2 * fs->blocks, holders = tfs_active_members(fs, tmb_load(&area->kept_for));
	tmb_u32 i, k, owner;
	int err = 0;

	for (i = 0; i < TFS_TX_SLOTS; i++)
		if ((tmb_load_acquire(&area->tx[i].state) & 0xff) == TFS_TX_COMMITTED)
			store_words(fs, &area->tx[i]);
	for (i = 0; i < TFS_TX_SLOTS; i++) {
		if ((tmb_load(&area->tx[i].state) & 0xff) == TFS_TX_FREE)
			continue;
		for (k = 0; k < TFS_TX_INODES; k++) {
			tmb_u64 ino = tmb_load(&area->tx[i].ino[k]);
			struct tfs_inode *inode = listed_inode(fs, &area->tx[i], k);

			if (ino && !listed_before(area, i, k, ino))
				keep_inode_blocks(fs, ino, tag, &budget);
			if (inode)
				holders |= tfs_holders(fs, inode, ino, false);
			if (inode && TFS_IS(tmb_load(&inode->mode), TFS_MODE_DIR) && tmb_load(&inode->seq) & 1 &&
			    (!tfs_lock_held(&inode->lock, &owner) || owner == member))
				tfs_dir_end(fs, inode); /* and no other member is changing it */
		}
	}
	for (i = 0; i < TFS_TX_SLOTS; i++) {
		struct tfs_tx *tx = &area->tx[i];
		tmb_u32 state = tmb_load(&tx->state) & 0xff;

		if (state == TFS_TX_COMMITTED || (state == TFS_TX_OPEN && tmb_load(&tx->redo) == TFS_REDO_TRIM))
			err = redo(fs, tx, tag);
		/* A later recovery can complete these. */
		if (err == -ENOMEM || err == -EINTR || err == -ESHUTDOWN)
			return err;
	}
	err = free_tagged(fs, tag, holders);
	if (err)
		return err;
	store_word(fs, &area->kept_for, 0);
	for (i = 0; i < TFS_PINS; i++)
		tmb_store(&area->pins[i].ino, 0);
	tfs_barrier(fs);
	for (i = 0; i < TFS_TX_SLOTS; i++)
		clear_tx(fs, &area->tx[i], 0);
	memset(area->waits, 0, sizeof(area->waits));
	tmb_fetch_and(&tfs_sb(fs)->watchers, ~(1ULL << member));
	tfs_barrier(fs);
	return 0;
}

/*
 * Takes the lock of a member's recovery; a dead owner's is taken over as it is. 1: not needed, because the transactions are recovered and the
 * caller wants no more. The owner recovers transactions first, which waits for no lock but that of the deferred blocks. So a thread that holds
 * locks of inodes and waits here goes on, even while the owner waits for locks of inodes to forget open references. A thread takes several in
 * the order of their members, and holds no other lock then.
 */
static int lock_recovery(struct tfs *fs, struct tmb_member *slot, bool too, tmb_u32 upto, enum tfs_how how)
{
	tmb_u64 mine = tmb_lock_word(fs->member, fs->epoch, 1);
	struct tfs_wait w;
	int err = 0;

	tfs_wait_start(&w, how);
	while (!err) {
		tmb_u64 now = tmb_load(&slot->recovery_lock);
		tmb_u32 owner = tmb_lock_owner(now);

		if (!too && tmb_load_acquire(&slot->recovered_epoch) >= upto)
			return 1;
		if (now && tfs_member_alive(fs, owner, (tmb_u32)(now >> 32)))
			err = tfs_wait_more(fs, &w, now, owner, NULL, 0);
		else if (tmb_cas64(&slot->recovery_lock, now, mine))
			return 0;
	}
	return err;
}

static void unlock_recovery(struct tfs *fs, tmb_u32 member)
{
	tmb_cas64(&fs->members[member].recovery_lock, tmb_lock_word(fs->member, fs->epoch, 1), 0);
}

/* too: also forgets the members' open references, for which it takes locks of inodes. */
static int recover_members(struct tfs *fs, tmb_u64 members, bool too, enum tfs_how how)
{
	tmb_u32 upto[TFS_MEMBERS];
	tmb_u64 locked = 0, forget = 0, left;
	int err = 0;

	if (!fs->members)
		return 0;
	for (left = members; left && !err; left &= left - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(left);
		struct tmb_member *slot = &fs->members[m];

		if (tmb_load_acquire(too ? &slot->forgotten_epoch : &slot->recovered_epoch) >= ended_epoch(slot))
			continue;
		upto[m] = ended_epoch(slot);
		err = lock_recovery(fs, slot, too, upto[m], how);
		if (err) {
			if (err > 0)
				err = 0;
			continue;
		}
		locked |= 1ULL << m;
		upto[m] = ended_epoch(slot);
		if (tmb_load_acquire(&slot->recovered_epoch) < upto[m]) {
			err = recover_transactions(fs, m);
			if (err) {
				/* The members' open references remain, and this member may hold the lock of one of them. */
				unlock_recovery(fs, m);
				locked &= ~(1ULL << m);
				break;
			}
			store_word(fs, &slot->recovered_epoch, upto[m]);
		}
		if (too && tmb_load_acquire(&slot->forgotten_epoch) < upto[m])
			forget |= 1ULL << m;
	}
	/* From here on the dead members' locks can be taken over; the scan does so. */
	if (forget) {
		int left_over = forget_in_inodes(fs, forget);

		if (left_over) { /* killed: the next recovery repeats the scan */
			forget = 0;
			err = err ? err : left_over;
		}
	}
	tfs_deferred_release(fs, forget);
	if (forget && !err)
		tfs_keep_reserve(fs);
	tfs_barrier(fs);
	for (left = forget; left; left &= left - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(left);

		store_word(fs, &fs->members[m].forgotten_epoch, upto[m]);
	}
	tfs_barrier(fs);
	for (left = locked; left; left &= left - 1)
		unlock_recovery(fs, (tmb_u32)__builtin_ctzll(left));
	return err;
}

int tfs_recover(struct tfs *fs, tmb_u32 member)
{
	return member < TFS_MEMBERS ? recover_members(fs, 1ULL << member, true, TFS_KILLABLE) : 0;
}

int tfs_recover_locks(struct tfs *fs, tmb_u32 member, enum tfs_how how)
{
	return member < TFS_MEMBERS ? recover_members(fs, 1ULL << member, false, how) : 0;
}

int tfs_recover_all(struct tfs *fs)
{
	if (!fs->members || fs->read_only)
		return 0;
	int err = tfs_wait_thaw(fs);

	return err ? err : recover_members(fs, ~0ULL, true, TFS_KILLABLE);
}
