// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Transactions (tfs_format.h says how they work). recovery.c repeats those of dead members.
 */
#include "tfs_internal.h"

/* The cache line with state, redo, n_words and ino: stores to one line become durable in their order. */
#define TX_HEAD 64u
_Static_assert(offsetof(struct tfs_tx, arg) <= TX_HEAD, "transaction head");

struct tfs_inode *tfs_tx_listed(struct tfs *fs, struct tfs_tx *tx, tmb_u32 i)
{
	tmb_u64 ino = tmb_load(&tx->ino[i]);

	return ino && ino != TFS_TX_ITABLE ? tfs_inode(fs, ino) : NULL;
}

static inline tmb_u64 tfs_tx_state(struct tfs *fs, tmb_u32 state)
{
	return (tmb_u64)fs->epoch << 32 | state;
}

static inline bool tfs_open_slot(struct tfs *fs, tmb_u32 i)
{
	struct tfs_tx *tx = tfs_tx(fs, i);
	tmb_u64 old = tmb_load(&tx->state);

	return (old & 0xff) == TFS_TX_FREE && tmb_cas64(&tx->state, old, tfs_tx_state(fs, TFS_TX_OPEN));
}

/* Looks for another free slot than number i. */
static TFS_SELDOM int tfs_claim_other(struct tfs *fs, tmb_u32 i, tmb_u32 *slot)
{
	struct tfs_wait w;

	for (tmb_u32 round = 1;; round++) {
		i = (i + 1) % TFS_TX_RECOVERY;
		if (tfs_open_slot(fs, i)) {
			*slot = i;
			return 0;
		}
		if (round % TFS_TX_RECOVERY == 0) {
			int err;

			if (round == TFS_TX_RECOVERY)
				tfs_wait_start(&w, TFS_SURE); /* a killed process that closes a file must get one */
			err = tfs_wait_more(fs, &w, 0, TFS_MEMBERS, NULL, 0);
			if (err)
				return err;
		}
	}
}

int tfs_tx_claim(struct tfs *fs, tmb_u32 *slot)
{
	tmb_u32 i;

	if (fs->read_only)
		return -EROFS;
	if (tfs_fenced(fs))
		return -ESHUTDOWN;
	i = tfs_os_cpu() % TFS_TX_RECOVERY;
	*slot = i;
	return tfs_open_slot(fs, i) ? 0 : tfs_claim_other(fs, i, slot);
}

int tfs_tx_begin(struct tfs *fs, tmb_u32 *slot)
{
	int err;

	while (!(err = tfs_tx_claim(fs, slot)) && tfs_is_frozen(fs)) {
		tfs_tx_drop(fs, *slot);
		err = tfs_wait_thaw(fs);
		if (err)
			break;
	}
	return err;
}

int tfs_tx_try_begin(struct tfs *fs, tmb_u32 *slot)
{
	int err = tfs_tx_claim(fs, slot);

	if (err || !tfs_is_frozen(fs))
		return err;
	tfs_tx_drop(fs, *slot);
	return -EAGAIN;
}

int tfs_tx_begin_on(struct tfs *fs, struct tfs_handle h, tmb_u32 *slot, struct tfs_inode **inode)
{
	for (;;) {
		int err = tfs_tx_begin(fs, slot);

		if (err)
			return err;
		err = tfs_lock_inode_as(fs, h, TFS_BRIEFLY, inode);
		if (!err)
			return 0;
		tfs_tx_drop(fs, *slot);
		if (err == -EAGAIN)
			err = tfs_await_inode(fs, h, TFS_KILLABLE);
		if (err)
			return err;
	}
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

void tfs_tx_trim_range(struct tfs *fs, tmb_u32 slot, tmb_u64 from, tmb_u64 to)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	/* In this order: a death in between leaves the old range, the new one, or an empty one. */
	tmb_store(&tx->arg[0], from);
	tmb_store_release(&tx->arg[1], to);
	tfs_persist(fs, tx->arg, sizeof(tx->arg));
}

void tfs_tx_trim(struct tfs *fs, tmb_u32 slot, tmb_u64 ino)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	tfs_barrier(fs); /* the range is durable first */
	tmb_store_release(&tx->ino[0], ino);
	tmb_store_release(&tx->redo, TFS_REDO_TRIM);
	tfs_persist(fs, tx, TX_HEAD);
	tfs_barrier(fs);
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

void tfs_tx_repeat(struct tfs *fs, struct tfs_tx *tx)
{
	tmb_u64 n = TFS_MIN(tmb_load(&tx->n_words), TFS_TX_WORDS);

	for (tmb_u64 i = 0; i < n; i++) {
		tmb_u64 offset = tmb_load(&tx->words[i].offset), value = tmb_load(&tx->words[i].value);

		/* Transactions change words of inodes and directories only. */
		if (offset % 8 || !tfs_block_ok(fs, offset >> TFS_BLOCK_SHIFT))
			tfs_damage(fs, "transaction word out of range", offset, i);
		else
			tfs_store_word(fs, (tmb_u64 *)(fs->area + offset), value);
	}
}

void tfs_tx_commit(struct tfs *fs, tmb_u32 slot)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	tfs_persist(fs, tx, sizeof(*tx));
	tfs_barrier(fs);
	tmb_store_release(&tx->state, tfs_tx_state(fs, TFS_TX_COMMITTED));
	tfs_persist(fs, tx, TX_HEAD);
	tfs_barrier(fs);
	tfs_tx_repeat(fs, tx);
}

static void tfs_clear_tx(struct tfs *fs, struct tfs_tx *tx, tmb_u64 state)
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
	tmb_store_release(&tfs_tx(fs, slot)->state, tfs_tx_state(fs, TFS_TX_FREE));
}

/* The end of a transaction that has freed inodes. */
static TFS_SELDOM void tfs_end_freeing(struct tfs *fs, tmb_u32 slot, struct tfs_tx *tx)
{
	struct tfs_inode *freed[TFS_TX_INODES];
	tmb_u32 n = 0;

	for (tmb_u32 i = 0; n < fs->freeing[slot] && i < TFS_TX_INODES; i++) {
		struct tfs_inode *inode = tfs_tx_listed(fs, tx, i);

		if (inode && tfs_is_freeing(fs, inode, slot))
			freed[n++] = inode;
	}
	fs->freeing[slot] = 0;
	tfs_barrier(fs);
	tfs_clear_tx(fs, tx, tfs_tx_state(fs, TFS_TX_FREE));
	tfs_barrier(fs);
	while (n)
		tfs_set_free(fs, freed[--n]);
}

void tfs_tx_end(struct tfs *fs, tmb_u32 slot)
{
	struct tfs_tx *tx = tfs_tx(fs, slot);

	if (fs->freeing[slot]) {
		tfs_end_freeing(fs, slot, tx);
		return;
	}
	tfs_barrier(fs);
	tfs_clear_tx(fs, tx, tfs_tx_state(fs, TFS_TX_FREE));
	tfs_barrier(fs);
}

void tfs_tx_clear(struct tfs *fs, struct tfs_tx *tx)
{
	tfs_clear_tx(fs, tx, 0);
}

/*
 * Opens the transaction in which this member repeats another one's work: it tags and unlinks blocks, too, and may die of it. The lock of its
 * threads is in private memory, so no member can keep the slot taken by writing to the zone: with the lock held, an open slot is damage. Work
 * of this member's own former epoch has the same tag, and the repeated transaction names the inode, so it needs no other. Its slot may be one
 * of those that are recovered, and stays as it is until all are.
 */
int tfs_tx_begin_redo(struct tfs *fs, tmb_u64 ino, bool own)
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
	if (!tfs_open_slot(fs, TFS_TX_RECOVERY)) {
		tfs_damage(fs, "the transaction of recoveries is open", fs->member, tmb_load(&tx->state));
		tfs_clear_tx(fs, tx, tfs_tx_state(fs, TFS_TX_OPEN));
	}
	tfs_tx_inode(fs, TFS_TX_RECOVERY, 0, ino);
	return 0;
}

void tfs_tx_end_redo(struct tfs *fs, bool own)
{
	if (own)
		return;
	tfs_tx_end(fs, TFS_TX_RECOVERY);
	tmb_store_release(&fs->recovery_lock, 0);
}
