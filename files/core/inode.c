// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Inodes: a table of 256-byte records, itself a tree that grows by 16 blocks at a time. A member claims a free record by a compare and swap of its
 * state word, so that creating files takes no common lock. Freeing an inode and removing its blocks are here, too.
 */
#include "tfs_internal.h"

#define GROW_BLOCKS 16u
#define SEARCH 256u /* a search looks at this many records before the table grows */

struct tfs_inode *tfs_search_inode(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 fblock = ino / TFS_INODES_PER_BLOCK;
	struct tfs_run run;

	if (!ino || ino > TFS_REF_INO_MASK)
		return NULL;
	if (tfs_tree_map(fs, tmb_load_acquire(&tfs_sb(fs)->itable_root), fblock, 1, &run) || !run.block)
		return NULL;
	if (!((fblock + 1) >> 32) && !(run.block >> 32))
		tmb_store(&fs->itable_cache[fblock % TFS_ITABLE_CACHE], (fblock + 1) << 32 | run.block);
	return (struct tfs_inode *)tfs_block(fs, run.block) + ino % TFS_INODES_PER_BLOCK;
}

bool tfs_exists(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	return inode && tfs_is(inode, h);
}

int tfs_refuse(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode)
{
	if (!inode)
		return tfs_damage(fs, "inode number out of range", h.ino, 0);
	return tfs_expelled(fs) ? -ESHUTDOWN : -ESTALE;
}

/* The count is durable before any new record is claimed: a recovery looks at no more records than it says. */
static void tfs_set_inodes(struct tfs *fs, tmb_u64 n)
{
	struct tfs_super *sb = tfs_sb(fs);

	tmb_store_release(&sb->itable_inodes, n);
	tfs_persist(fs, &sb->itable_inodes, sizeof(sb->itable_inodes));
	tfs_barrier(fs);
}

static int tfs_grow_table(struct tfs *fs, tmb_u32 slot, tmb_u64 seen)
{
	struct tfs_super *sb = tfs_sb(fs);
	tmb_u64 had, most = tfs_most_inodes(fs), taken = 0;
	int err;

	tfs_tx_inode(fs, slot, TFS_TX_INODES - 1, TFS_TX_ITABLE);
	err = tfs_lock(fs, &sb->itable_lock, TFS_BRIEFLY);
	if (err)
		return err;
	had = tmb_load(&sb->itable_inodes);
	if (had == seen) { /* else another member has grown it */
		struct tfs_run run, there;

		err = had < most ? tfs_alloc(fs, 0, TFS_MIN(GROW_BLOCKS, (most - had) / TFS_INODES_PER_BLOCK), &run) : -ENOSPC;
		/* A member that died between linking and counting left blocks there. */
		if (!err)
			err = tfs_tree_map(fs, tmb_load(&sb->itable_root), had / TFS_INODES_PER_BLOCK, run.count, &there);
		if (!err && !there.block && there.count < run.count) { /* some further on, after a power failure */
			tfs_set_map(fs, run.block + there.count, run.count - there.count, TFS_MAP_FREE);
			run.count = there.count;
		}
		if (!err && there.block) {
			tfs_set_map(fs, run.block, run.count, TFS_MAP_FREE);
			tfs_set_inodes(fs, had + there.count * TFS_INODES_PER_BLOCK);
		} else if (!err) {
			memset(tfs_block(fs, run.block), 0, run.count << TFS_BLOCK_SHIFT);
			err = tfs_tree_add(fs, &sb->itable_root, had / TFS_INODES_PER_BLOCK, &run, TFS_MAP_USED, &taken);
			if (!err)
				tfs_set_inodes(fs, had + run.count * TFS_INODES_PER_BLOCK);
		}
	}
	tfs_unlock(fs, &sb->itable_lock);
	tfs_tx_inode(fs, slot, TFS_TX_INODES - 1, 0);
	return err;
}

/* The member that freed the record holds its lock a moment longer, and may have died with it: a new file there would wait for the recovery. */
static bool tfs_is_locked(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u32 owner, epoch = (tmb_u32)(tmb_load(&inode->lock.word) >> 32);

	if (!tfs_lock_held(&inode->lock, &owner) || owner >= TFS_MEMBERS || !fs->members)
		return false;
	return tfs_member_alive(fs, owner, epoch) || tmb_load_acquire(&fs->members[owner].recovered_epoch) < epoch;
}

static bool tfs_claim(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 old = tmb_load(&inode->state_gen);
	tmb_u64 generation = old >> TFS_GEN_SHIFT ? old & ~0xffffffffULL : 1ULL << TFS_GEN_SHIFT;

	return (old & 0xff) == TFS_INODE_FREE && !tfs_is_locked(fs, inode) &&
	       tmb_cas64(&inode->state_gen, old, generation | (tmb_u64)tfs_tag(fs) << 8 | TFS_INODE_NEW);
}

/* Returns whether too few records are free for a search to be worth it. */
static bool tfs_table_is_full(struct tfs *fs, tmb_u64 inodes)
{
	tmb_u64 used = tfs_inodes_used(fs);

	return used > inodes || used + inodes / 8 > inodes;
}

/* Claims a free record among 'count' from the cursor on; 0: none. */
static tmb_u64 tfs_search(struct tfs *fs, tmb_u64 inodes, tmb_u64 count, struct tfs_inode **out)
{
	tmb_u64 at = tmb_load(&fs->inode_cursor);
	struct tfs_inode *inode = NULL;

	for (tmb_u64 i = 0; i < count; i++, at++) {
		if (at <= TFS_ROOT_INO || at >= inodes) {
			at = TFS_ROOT_INO + 1;
			inode = NULL;
		}
		if (!inode || !(at % TFS_INODES_PER_BLOCK)) {
			tfs_os_yield();
			inode = tfs_inode(fs, at);
		} else {
			inode++;
		}
		if (!inode)
			break;
		if (!tfs_claim(fs, inode))
			continue;
		tmb_store(&fs->inode_cursor, at + 1);
		*out = inode;
		return at;
	}
	tmb_store(&fs->inode_cursor, at);
	return 0;
}

int tfs_new_inode(struct tfs *fs, tmb_u32 slot, tmb_u32 index, struct tfs_handle *made, struct tfs_inode **out)
{
	bool grows = true;

	for (tmb_u32 tries = 0; tries < 1000; tries++) {
		tmb_u64 inodes = tfs_table_inodes(fs);
		struct tfs_inode *inode;
		int err;

		made->ino = tfs_search(fs, inodes, TFS_MIN(inodes, SEARCH), &inode);
		/* If an eighth of the table is free, the whole table is searched before it grows: else every run of live inodes would make it grow. */
		if (!made->ino && (!grows || !tfs_table_is_full(fs, inodes)))
			made->ino = tfs_search(fs, inodes, inodes, &inode);
		if (made->ino) {
			tfs_tx_inode(fs, slot, index, made->ino);
			/* Everything but the state, and the lock, which a late waiter may hold. */
			memset((tmb_u8 *)inode + offsetof(struct tfs_inode, mode), 0,
			       offsetof(struct tfs_inode, lock) - offsetof(struct tfs_inode, mode));
			tmb_store(&inode->openers, 0);
			tmb_store(&inode->mappers, 0);
			tmb_store(&inode->locks, 0);
			tmb_store(&inode->account, 0);
			tmb_store(&inode->dir_hint, 0);
			tfs_persist(fs, inode, sizeof(*inode));
			tmb_fetch_add(&tfs_member_area(fs, fs->member)->inodes_used, 1);
			made->generation = (tmb_u32)(tmb_load(&inode->state_gen) >> TFS_GEN_SHIFT);
			*out = inode;
			err = tfs_open_account(fs, inode);
			if (err)
				tfs_drop_new_inode(fs, inode, slot);
			return err;
		}
		tmb_store(&fs->inode_cursor, inodes); /* the new records */
		err = tfs_grow_table(fs, slot, inodes);
		if (err && (err != -ENOSPC || !grows))
			return err;
		grows = !err;
	}
	return -ENOSPC;
}

int tfs_await_table(struct tfs *fs)
{
	return tfs_await(fs, &tfs_sb(fs)->itable_lock, TFS_KILLABLE);
}

static void tfs_free_contents(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 *roots[] = {&inode->root, &inode->index_root, &inode->xattr_root, &inode->locks};

	tfs_barrier(fs); /* the transaction that names the inode is durable before any tag */
	for (tmb_u32 i = 0; i < 4; i++) {
		tmb_u64 root = tmb_load(roots[i]);

		if (!root)
			continue;
		tfs_tree_mark(fs, root, TFS_MAP_USED, tfs_tag(fs)); /* a death before the next store loses no block */
		tfs_barrier(fs);
		tmb_store_release(roots[i], 0);
		tfs_persist(fs, roots[i], sizeof(*roots[i]));
		tfs_barrier(fs);
		tmb_fetch_add(&inode->map_seq, 1); /* after the unlinking: for readers without a pin */
		tfs_tree_mark(fs, root, tfs_tag(fs), TFS_MAP_FREE);
	}
}

static tmb_u64 tfs_freeing_state(struct tfs *fs, tmb_u32 slot)
{
	return (tmb_u64)(slot + 1) << 16 | (tmb_u64)tfs_tag(fs) << 8 | TFS_INODE_NEW;
}

/*
 * Marks the record as being freed by the transaction in 'slot', so that no member can claim it before the transaction ends. If this member dies
 * before, its recovery repeats the transaction's words, which must not hit another member's new inode.
 */
static void tfs_set_freeing(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	tmb_store_release(&inode->state_gen, (tmb_load(&inode->state_gen) & ~0xffffffffULL) | tfs_freeing_state(fs, slot));
	tfs_persist(fs, inode, sizeof(inode->state_gen));
	fs->freeing[slot]++;
}

bool tfs_is_freeing(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	return (tmb_load(&inode->state_gen) & 0xffffffff) == tfs_freeing_state(fs, slot);
}

void tfs_set_free(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_store_release(&inode->state_gen, tfs_free_state(tmb_load(&inode->state_gen)));
	tfs_persist(fs, inode, sizeof(inode->state_gen));
	tmb_fetch_add(&tfs_member_area(fs, fs->member)->inodes_used, -1);
}

void tfs_drop_new_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	tfs_set_freeing(fs, inode, slot); /* a dead member's record becomes this member's */
	tfs_free_contents(fs, inode);
	tfs_close_account(fs, inode);
}

/* Removes the blocks that members still map. */
static int tfs_remove_mapped(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot)
{
	struct tfs_gone *gone;
	int err = tfs_begin_removal(fs, slot, inode, 0, ~0ULL, &gone);

	if (err)
		return err;
	err = tfs_remove_blocks(fs, inode, ino, 0, ~0ULL, gone, false);
	tfs_end_removal(fs, gone);
	return err == -EUCLEAN ? 0 : err;
}

int tfs_free_inode_locked(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot)
{
	int err = 0;

	tfs_tx_inode(fs, slot, 0, ino);
	if (tmb_load(&inode->mappers))
		err = tfs_remove_mapped(fs, ino, inode, slot);
	if (!err)
		err = tfs_lock_table_to_free(fs, inode);
	if (err) {
		tmb_store(&fs->unclean, true); /* the recovery of this member frees the inode */
		return err;
	}
	/*
	 * From here on the inode is freed for every reader. Readers without a pin (lookup, readlink) load the state after their copy, so the state
	 * changes before the first block can be used again.
	 */
	tfs_set_freeing(fs, inode, slot);
	tfs_unlock_table(fs, inode);
	tfs_free_contents(fs, inode);
	tfs_close_account(fs, inode);
	if (tmb_load(&inode->blocks))
		tfs_refill_reserve(fs);
	return 0;
}

int tfs_begin_removal(struct tfs *fs, tmb_u32 slot, struct tfs_inode *inode, tmb_u64 from, tmb_u64 to, struct tfs_gone **gone)
{
	tmb_u64 root = tmb_load(&inode->root), borders[2] = {from, to};
	struct tfs_tx *tx = tfs_tx(fs, slot);
	struct tfs_gone *g = tfs_os_alloc(sizeof(*g));

	if (!g)
		return -ENOMEM;
	for (tmb_u32 i = 0; i < 2; i++) {
		/* Both borders lie in one large entry, which is split once. */
		bool again = i && g->spare[0] && from / TFS_FANOUT == to / TFS_FANOUT;

		if (from < to && !again && tfs_tree_splits(fs, root, borders[i]) && tfs_alloc_spare(fs, &g->spare[i])) {
			g->spare[i] = 0;
			tfs_end_removal(fs, g);
			return -ENOSPC;
		}
		tmb_store(&tx->spare[i], g->spare[i]);
	}
	tfs_persist(fs, tx->spare, sizeof(tx->spare));
	*gone = g;
	return 0;
}

void tfs_end_removal(struct tfs *fs, struct tfs_gone *gone)
{
	for (tmb_u32 i = 0; i < 2; i++)
		if (gone->spare[i])
			tfs_set_map(fs, gone->spare[i], 1, TFS_MAP_FREE);
	tfs_os_free(gone);
	tfs_refill_reserve(fs);
}

int tfs_remove_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone,
		      bool recovering)
{
	tmb_u64 removed = 0, holders = 0;
	int more = 0;

	if (from >= to || !tmb_load(&inode->root))
		return 0;
	do {
		tmb_u8 mark;

		gone->n = 0;
		gone->blocks = 0;
		more = tfs_tree_unlink(fs, &inode->root, from, to, gone);
		if (!gone->n)
			break;
		/* A mapper that did not let go once is not waited for again. */
		holders = tfs_holders(fs, inode, ino, !recovering && !holders);
		tfs_barrier(fs);
		mark = tfs_free_begin(fs, holders);
		if (mark == tfs_tag(fs))
			break;
		for (tmb_u32 i = 0; i < gone->n; i++)
			tfs_set_map(fs, gone->runs[i].block, gone->runs[i].count, mark);
		tfs_free_end(fs, mark, holders);
		tfs_count_blocks(fs, inode, (tmb_s64)(0 - gone->blocks));
		removed += gone->blocks;
		tfs_os_yield();
		if (removed > fs->blocks)
			more = tfs_damage(fs, "blocks to remove without end", ino, removed);
	} while (more > 0);
	return more < 0 ? more : 0;
}

/* --- contents given whole: symlink targets, attribute images ---------------------------------------------------- */

tmb_u64 tfs_image_blocks(tmb_u64 len)
{
	tmb_u64 blocks = tfs_blocks_of(len);

	return blocks > 1 ? blocks + 1 : blocks; /* an image needs one node at most */
}
_Static_assert(2 * TFS_XATTR_MAX <= TFS_FANOUT * TFS_BLOCK, "an image of one node");

int tfs_write_image(struct tfs *fs, tmb_u64 *rootp, const void *data, tmb_u64 len, tmb_u8 mark, bool spare, tmb_u64 *taken)
{
	tmb_u64 blocks = tfs_blocks_of(len), done = 0;

	*rootp = 0;
	*taken = 0;
	while (done < blocks) {
		struct tfs_run run;
		int err = tfs_alloc(fs, 0, blocks - done, &run);
		tmb_u64 at = done << TFS_BLOCK_SHIFT, n;

		if (err && spare) {
			run.count = 1;
			err = tfs_alloc_spare(fs, &run.block);
		}
		if (!err) {
			n = TFS_MIN(len - at, run.count << TFS_BLOCK_SHIFT);
			memcpy(tfs_block(fs, run.block), (const tmb_u8 *)data + at, n);
			memset((tmb_u8 *)tfs_block(fs, run.block) + n, 0, (run.count << TFS_BLOCK_SHIFT) - n);
			err = tfs_tree_add(fs, rootp, done, &run, mark, taken);
		}
		if (err) {
			tfs_tree_mark(fs, *rootp, mark, TFS_MAP_FREE);
			*rootp = 0;
			*taken = 0;
			if (spare)
				tfs_refill_reserve(fs);
			return err;
		}
		done += run.count;
	}
	return 0;
}
