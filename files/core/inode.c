// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Inodes: a table of 256-byte records, itself a tree that grows by 16 blocks at a time. A free record is claimed by compare
 * and swap of its state word, so that creating files takes no common lock. Attributes are single words, read without a
 * lock and written under the inode's.
 */
#include "tfs_internal.h"

#define GROW_BLOCKS 16u
#define SEARCH 256u /* records looked at for a free one, before the table grows */

tmb_u64 tfs_blocks_of(tmb_u64 bytes)
{
	return (bytes + TFS_BLOCK - 1) >> TFS_BLOCK_SHIFT;
}

struct tfs_inode *tfs_search_inode(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 fblock = ino / TFS_INODES_PER_BLOCK;
	struct tfs_run run;

	if (!ino || ino > TFS_REF_INO_MASK)
		return NULL;
	if (tfs_tree_map(fs, tmb_load_acquire(&tfs_sb(fs)->itable_root), fblock, 1, &run) || !run.block)
		return NULL;
	if (!(fblock >> 32) && !(run.block >> 32))
		tmb_store(&fs->itable_cache[fblock % TFS_ITABLE_CACHE], fblock << 32 | run.block);
	return (struct tfs_inode *)tfs_block(fs, run.block) + ino % TFS_INODES_PER_BLOCK;
}

int tfs_live_inode(struct tfs *fs, struct tfs_handle h, struct tfs_inode **out)
{
	*out = tfs_inode(fs, h.ino);
	if (!*out)
		return tfs_damage(fs, "inode number out of range", h.ino, 0);
	return tfs_is(*out, h) ? 0 : -ESTALE;
}

/* Durable before any of the new ones is taken: recovery looks at no more. */
static void set_inodes(struct tfs *fs, tmb_u64 n)
{
	struct tfs_super *sb = tfs_sb(fs);

	tmb_store_release(&sb->itable_inodes, n);
	tfs_persist(fs, &sb->itable_inodes, sizeof(sb->itable_inodes));
	tfs_barrier(fs);
}

static int grow_table(struct tfs *fs, tmb_u32 slot, tmb_u64 seen)
{
	struct tfs_super *sb = tfs_sb(fs);
	tmb_u64 had, taken = 0;
	int err;

	tfs_tx_inode(fs, slot, TFS_TX_INODES - 1, TFS_TX_ITABLE);
	err = tfs_lock(fs, &sb->itable_lock, TFS_KILLABLE);
	if (err)
		return err;
	had = tmb_load(&sb->itable_inodes);
	if (had == seen) { /* else another member was faster */
		struct tfs_run run, there;

		err = tfs_alloc(fs, 0, GROW_BLOCKS, &run);
		/* After a death between linking and counting, blocks are there already. */
		if (!err)
			err = tfs_tree_map(fs, tmb_load(&sb->itable_root), had / TFS_INODES_PER_BLOCK, run.count, &there);
		if (!err && !there.block && there.count < run.count) { /* some further on, where power failed */
			tfs_set_map(fs, run.block + there.count, run.count - there.count, TFS_MAP_FREE);
			run.count = there.count;
		}
		if (!err && there.block) {
			tfs_set_map(fs, run.block, run.count, TFS_MAP_FREE);
			set_inodes(fs, had + there.count * TFS_INODES_PER_BLOCK);
		} else if (!err) {
			memset(tfs_block(fs, run.block), 0, run.count << TFS_BLOCK_SHIFT);
			err = tfs_tree_add(fs, &sb->itable_root, had / TFS_INODES_PER_BLOCK, &run, TFS_MAP_USED, &taken);
			if (!err)
				set_inodes(fs, had + run.count * TFS_INODES_PER_BLOCK);
		}
	}
	tfs_unlock(fs, &sb->itable_lock);
	tfs_tx_inode(fs, slot, TFS_TX_INODES - 1, 0);
	return err;
}

/* Whoever freed it has its lock for a moment longer, and may have died with it: a new file there would have to wait for the recovery. */
static bool is_locked(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u32 owner, epoch = (tmb_u32)(tmb_load(&inode->lock.word) >> 32);

	if (!tfs_lock_held(&inode->lock, &owner) || owner >= TFS_MEMBERS || !fs->members)
		return false;
	return tfs_member_alive(fs, owner, epoch) || tmb_load_acquire(&fs->members[owner].recovered_epoch) < epoch;
}

static bool claim(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 old = tmb_load(&inode->state_gen);
	tmb_u64 generation = old >> TFS_GEN_SHIFT ? old & ~0xffffffffULL : 1ULL << TFS_GEN_SHIFT;

	return (old & 0xff) == TFS_INODE_FREE && !is_locked(fs, inode) &&
	       tmb_cas64(&inode->state_gen, old, generation | (tmb_u64)tfs_tag(fs) << 8 | TFS_INODE_NEW);
}

/* Whether the table has so few free records that a search for one is not worth it. */
static bool table_is_full(struct tfs *fs, tmb_u64 inodes)
{
	tmb_u64 used = tfs_inodes_used(fs);

	return used > inodes || used + inodes / 8 > inodes;
}

/* Claims a free record among 'count' from the cursor on; 0: none. */
static tmb_u64 search(struct tfs *fs, tmb_u64 inodes, tmb_u64 count, struct tfs_inode **out)
{
	tmb_u64 at = tmb_load(&fs->inode_cursor);
	struct tfs_inode *inode = NULL;

	for (tmb_u64 i = 0; i < count; i++, at++) {
		if (at <= TFS_ROOT_INO || at >= inodes) {
			at = TFS_ROOT_INO + 1;
			inode = NULL;
		}
		if (!inode || !(at % TFS_INODES_PER_BLOCK))
			inode = tfs_inode(fs, at);
		else
			inode++;
		if (!inode)
			break;
		if (!claim(fs, inode))
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
	for (tmb_u32 tries = 0; tries < 1000; tries++) {
		tmb_u64 inodes = tfs_table_inodes(fs);
		struct tfs_inode *inode;
		int err;

		made->ino = search(fs, inodes, TFS_MIN(inodes, SEARCH), &inode);
		/* The whole table before it grows, if an eighth of it is free: else it would grow with every run of live inodes. */
		if (!made->ino && !table_is_full(fs, inodes))
			made->ino = search(fs, inodes, inodes, &inode);
		if (made->ino) {
			tfs_tx_inode(fs, slot, index, made->ino);
			/* Everything but state, and the lock, on which a latecomer may sit. */
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
		tmb_store(&fs->inode_cursor, inodes); /* new ones come there */
		err = grow_table(fs, slot, inodes);
		if (err)
			return err;
	}
	return -ENOSPC;
}

static void free_contents(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 *roots[] = {&inode->root, &inode->index_root, &inode->xattr_root, &inode->locks};

	tfs_barrier(fs); /* the transaction that names the inode, before any tag */
	for (tmb_u32 i = 0; i < 4; i++) {
		tmb_u64 root = tmb_load(roots[i]);

		if (!root)
			continue;
		tfs_tree_mark(fs, root, TFS_MAP_USED, tfs_tag(fs)); /* so that a death in between loses nothing */
		tfs_barrier(fs);
		tmb_store_release(roots[i], 0);
		tfs_persist(fs, roots[i], sizeof(*roots[i]));
		tfs_barrier(fs);
		tfs_tree_mark(fs, root, tfs_tag(fs), TFS_MAP_FREE);
	}
}

static tmb_u64 freeing_state(struct tfs *fs, tmb_u32 slot)
{
	return (tmb_u64)(slot + 1) << 16 | (tmb_u64)tfs_tag(fs) << 8 | TFS_INODE_NEW;
}

/*
 * Nobody can claim the record yet: a death before the end of the transaction has its words stored once more, which must not hit somebody
 * else's new inode.
 */
static void set_freeing(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	tmb_store_release(&inode->state_gen, (tmb_load(&inode->state_gen) & ~0xffffffffULL) | freeing_state(fs, slot));
	tfs_persist(fs, inode, sizeof(inode->state_gen));
}

bool tfs_is_freeing(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	return (tmb_load(&inode->state_gen) & 0xffffffff) == freeing_state(fs, slot);
}

void tfs_set_free(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_store_release(&inode->state_gen, tfs_free_state(tmb_load(&inode->state_gen)));
	tfs_persist(fs, inode, sizeof(inode->state_gen));
	tmb_fetch_add(&tfs_member_area(fs, fs->member)->inodes_used, -1);
}

void tfs_drop_new_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot)
{
	set_freeing(fs, inode, slot); /* a dead member's: this one's now */
	free_contents(fs, inode);
	tfs_close_account(fs, inode);
}

int tfs_free_inode_locked(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot)
{
	struct tfs_gone *gone;

	tfs_tx_inode(fs, slot, 0, ino);
	if (tmb_load(&inode->mappers)) {
		int err = tfs_begin_removal(fs, slot, inode, 0, ~0ULL, &gone);

		if (err) {
			tmb_store(&fs->unclean, true); /* unused as it is, the recovery of this member frees it */
			return err;
		}
		tfs_remove_blocks(fs, inode, ino, 0, ~0ULL, gone, false);
		tfs_end_removal(fs, gone);
	}
	tmb_fetch_add(&inode->map_seq, 1); /* read-only members leave no mapper bit, and look here */
	free_contents(fs, inode);
	tfs_close_account(fs, inode);
	set_freeing(fs, inode, slot);
	return 0;
}

/* Who did not let go of removed blocks; these stay in limbo until it does. */
static void tell_holders(struct tfs *fs, tmb_u64 holders)
{
	for (; holders && fs->members; holders &= holders - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(holders);
		bool answers = m == fs->member || !(tmb_load(&fs->members[m].pending) & TMB_PENDING_REVOKE);

		tfs_os_waiting(fs, m, answers, TFS_REVOKE_LIMIT_NS / 1000000000);
	}
}

int tfs_begin_removal(struct tfs *fs, tmb_u32 slot, struct tfs_inode *inode, tmb_u64 from, tmb_u64 to, struct tfs_gone **gone)
{
	tmb_u64 root = tmb_load(&inode->root), borders[2] = {from, to};
	struct tfs_tx *tx = tfs_tx(fs, slot);
	struct tfs_gone *g = tfs_os_alloc(sizeof(*g));

	if (!g)
		return -ENOMEM;
	for (tmb_u32 i = 0; i < 2; i++) {
		/* Both in one large entry: it is split once. */
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
	if (tmb_load(&fs->reserve_taken))
		tfs_keep_reserve(fs);
}

int tfs_remove_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone,
		      bool recovering)
{
	tmb_u64 removed = 0, holders = 0;
	bool keep = false;
	int more = 0;

	if (from >= to || !tmb_load(&inode->root))
		return 0;
	do {
		tmb_u8 mark = TFS_MAP_FREE;

		gone->n = 0;
		gone->blocks = 0;
		more = tfs_tree_unlink(fs, &inode->root, from, to, gone);
		if (!gone->n)
			break;
		/* Who did not let go once is not waited for again. */
		holders = recovering || holders ? tfs_holders(fs, inode, ino) : tfs_wait_unused(fs, inode, ino);
		tfs_barrier(fs);
		if (holders) {
			int err;

			if (!recovering && !keep)
				tell_holders(fs, holders);
			err = keep ? -EINTR : tfs_limbo_begin(fs, holders);
			if (err == -ESHUTDOWN)
				break; /* declared dead: they have this member's tag, recovery sees to them */
			if (err) {
				/* Killed. The removal goes on, or what is left would show when the file grows; this member's recovery frees the blocks. */
				keep = true;
				tmb_store(&fs->unclean, true);
			}
			mark = TFS_MAP_LIMBO;
		}
		for (tmb_u32 i = 0; i < gone->n && !keep; i++)
			tfs_set_map(fs, gone->runs[i].block, gone->runs[i].count, mark);
		if (holders && !keep)
			tfs_limbo_end(fs);
		tfs_count_blocks(fs, inode, -(tmb_s64)gone->blocks);
		removed += gone->blocks;
		tfs_os_yield();
		if (removed > fs->blocks)
			more = tfs_damage(fs, "blocks to remove without end", ino, removed);
	} while (more > 0);
	return more < 0 ? more : 0;
}

/* --- attributes ----------------------------------------------------------------------------------------------- */

int tfs_getattr(struct tfs *fs, struct tfs_handle h, struct tfs_attr *out)
{
	struct tfs_inode *inode;
	tmb_u64 owner;
	int err = tfs_live_inode(fs, h, &inode);

	if (err)
		return err;
	owner = tmb_load(&inode->owner);
	out->ino = h.ino;
	out->generation = (tmb_u32)(tmb_load(&inode->state_gen) >> TFS_GEN_SHIFT);
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
	/* Freed meanwhile, it may be a mixture of two. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return tfs_is(inode, (struct tfs_handle){h.ino, out->generation}) ? 0 : -ESTALE;
}

/* All other changes come with a new version; these may show a moment before it, or without one. */
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

void tfs_changed(struct tfs_inode *inode, tmb_s64 now, bool data)
{
	if (data)
		tmb_store(&inode->mtime, now);
	tmb_store(&inode->ctime, now);
	tmb_store_release(&inode->version, tmb_load(&inode->version) + 1);
}

int tfs_setattr(struct tfs *fs, struct tfs_handle h, tmb_u32 what, const struct tfs_attr *attr)
{
	struct tfs_inode *inode;
	tmb_u32 slot;
	int err = tfs_tx_begin(fs, &slot);

	if (err)
		return err;
	err = tfs_lock_inode(fs, h);
	if (err)
		goto end;
	inode = tfs_inode(fs, h.ino);
	tfs_tx_inode(fs, slot, 0, h.ino);
	/* chown takes S_ISUID away: both or neither. */
	if (what & TFS_SET_MODE)
		tfs_tx_word(fs, slot, &inode->mode, (tmb_load(&inode->mode) & TFS_MODE_TYPE) | (attr->mode & 07777));
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
	tfs_tx_end(fs, slot);
	tfs_unlock_inode(fs, h.ino);
	return 0;
end:
	tfs_tx_end(fs, slot);
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

/* --- who has it open or mapped -------------------------------------------------------------------------------- */

/*
 * The bits of this member are changed by one of its threads at a time: else a thread that finds itself late, and takes back the bit that it
 * set on somebody else's inode, would take the bit of another thread that meanwhile opened that inode.
 */
static void lock_bits(struct tfs *fs, tmb_u64 ino)
{
	for (tmb_u32 round = 0; !tmb_cas32(&fs->bit_locks[ino % TFS_BIT_LOCKS], 0, 1); round++)
		if (round % 128)
			tfs_os_relax();
		else
			tfs_os_wait(fs, 0);
}

static void unlock_bits(struct tfs *fs, tmb_u64 ino)
{
	tmb_store_release(&fs->bit_locks[ino % TFS_BIT_LOCKS], 0);
}

/* Sets this member's bit in a word of the handle's inode; *had: it was set before. */
static int set_own_bit(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u64 *word, bool opening)
{
	tmb_u64 bit = 1ULL << fs->member, had;
	int err = 0;

	lock_bits(fs, h.ino);
	had = tmb_fetch_or(word, bit);
	/* Whoever frees the inode, or removed its last link, meanwhile either sees the bit or is seen here. */
	if (!tfs_is(inode, h) || (opening && !had && !tmb_load(&inode->nlink)))
		err = -ESTALE;
	if (err && !(had & bit))
		tmb_fetch_and(word, ~bit);
	unlock_bits(fs, h.ino);
	return err;
}

static void clear_own_bit(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u64 *word)
{
	lock_bits(fs, h.ino);
	if (tfs_is(inode, h))
		tmb_fetch_and(word, ~(1ULL << fs->member));
	unlock_bits(fs, h.ino);
}

/* After a bit of 'openers' went: the inode may have lost its last name meanwhile, for somebody who left it to the bit's owner to free it. */
static int free_unused(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode)
{
	tmb_u32 slot;
	int err;

	if (tmb_load(&inode->nlink) || tmb_load(&inode->openers))
		return 0;
	err = tfs_tx_begin(fs, &slot);
	if (err) {
		tmb_store(&fs->unclean, true);
		return err;
	}
	tfs_free_orphan(fs, ino, slot);
	return 0;
}

int tfs_open_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	if (err || fs->read_only)
		return err;
	err = set_own_bit(fs, h, inode, &inode->openers, true);
	if (err)
		free_unused(fs, h.ino, inode);
	return err;
}

void tfs_free_orphan(struct tfs *fs, tmb_u64 ino, tmb_u32 slot)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);
	int err = inode ? tfs_lock_inode_as(fs, tfs_any(ino), TFS_SURE) : -ESTALE;
	bool locked = !err;

	if (err == -EINTR) /* for who recovers this member */
		tmb_store(&fs->unclean, true);
	if (locked && !tmb_load(&inode->nlink) && !tmb_load(&inode->openers))
		tfs_free_inode_locked(fs, ino, inode, slot);
	tfs_tx_end(fs, slot);
	if (locked)
		tfs_unlock_inode(fs, ino);
}

int tfs_close_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (!inode)
		return -EUCLEAN;
	if (fs->read_only)
		return 0;
	clear_own_bit(fs, h, inode, &inode->openers);
	return free_unused(fs, h.ino, inode);
}

int tfs_map_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	if (err || fs->read_only)
		return err;
	err = set_own_bit(fs, h, inode, &inode->mappers, false);
	if (!err && fs->persistent)
		tmb_store(&inode->unsynced, 1);
	if (err || !tfs_frozen(fs))
		return err;
	clear_own_bit(fs, h, inode, &inode->mappers);
	return -EAGAIN;
}

int tfs_hole_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	return err || fs->read_only ? err : set_own_bit(fs, h, inode, &inode->hole_mappers, false);
}

int tfs_unmap_ref(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (inode && !fs->read_only) {
		clear_own_bit(fs, h, inode, &inode->hole_mappers);
		clear_own_bit(fs, h, inode, &inode->mappers);
	}
	return inode ? 0 : -EUCLEAN;
}

tmb_u64 tfs_map_seq(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	return inode ? tmb_load_acquire(&inode->map_seq) : 0;
}

/* --- contents given whole: symlink targets, attribute images ---------------------------------------------------- */

tmb_u64 tfs_image_blocks(tmb_u64 len)
{
	tmb_u64 blocks = tfs_blocks_of(len);

	return blocks > 1 ? blocks + 1 : blocks; /* an image needs one node at most */
}
_Static_assert(2 * TFS_XATTR_MAX <= TFS_FANOUT * TFS_BLOCK, "an image of one node");

int tfs_write_image(struct tfs *fs, tmb_u64 *rootp, const void *data, tmb_u64 len, tmb_u8 mark, tmb_u64 *taken)
{
	tmb_u64 blocks = tfs_blocks_of(len), done = 0;

	*rootp = 0;
	*taken = 0;
	while (done < blocks) {
		struct tfs_run run;
		int err = tfs_alloc(fs, 0, blocks - done, &run);
		tmb_u64 at = done << TFS_BLOCK_SHIFT, n;

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
			return err;
		}
		done += run.count;
	}
	return 0;
}
