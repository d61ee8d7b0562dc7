/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Declarations that the core's files share. */
#ifndef TFS_INTERNAL_H
#define TFS_INTERNAL_H

#include "tfs.h"

#ifndef DT_UNKNOWN
#define DT_UNKNOWN 0
#endif
#define TFS_MODE_TYPE 0170000u
#define TFS_IS(mode, type) (((mode) & TFS_MODE_TYPE) == (type))
#define TFS_MODE_DIR 0040000u
#define TFS_MODE_REG 0100000u
#define TFS_MODE_LNK 0120000u
#define TFS_MODE_CHR 0020000u
#define TFS_DT(mode) (((mode) >> 12) & 15)

/* A function for what seldom happens, so that its caller is short. */
#define TFS_SELDOM __attribute__((__noinline__))

/* Evaluates each argument once: one may be memory that another member is changing. */
#define TFS_MIN(a, b)                                    \
	({                                               \
		__typeof__(1 ? (a) : (b)) tfs_a = (a);   \
		__typeof__(1 ? (a) : (b)) tfs_b = (b);   \
		tfs_a < tfs_b ? tfs_a : tfs_b;           \
	})

/* A freeze gives up after it has waited so long for other members' operations. */
#define TFS_FREEZE_LIMIT_NS (30ULL * 1000 * 1000 * 1000)
/* Others end a freeze that was not renewed for so long. More than the former, and than the longest time for which a snapshot can't write its image. */
#define TFS_FREEZE_IDLE_NS (60ULL * 1000 * 1000 * 1000)
/* A thread that has a transaction's slot waits so long for an owner. Else as many threads as there are slots, waiting for a suspended member, would hold
 * up all others. */
#define TFS_BRIEF_NS (50ULL * 1000 * 1000)
/* A removal waits so long for mappers, then freeing the blocks is deferred. */
#define TFS_REVOKE_LIMIT_NS (2ULL * 1000 * 1000 * 1000)

static inline struct tfs_super *tfs_sb(struct tfs *fs)
{
	return (struct tfs_super *)fs->area;
}

static inline struct tfs_member_area *tfs_member_area(struct tfs *fs, tmb_u32 member)
{
	return (struct tfs_member_area *)tfs_block(fs, fs->member_start + (tmb_u64)member * TFS_MEMBER_BLOCKS);
}

static inline tmb_u8 *tfs_map_bytes(struct tfs *fs)
{
	return tfs_block(fs, fs->map_start);
}

static inline bool tfs_block_ok(struct tfs *fs, tmb_u64 block)
{
	return block >= fs->data_start && block < fs->blocks;
}

static inline tmb_u8 tfs_tag(struct tfs *fs)
{
	return (tmb_u8)(fs->member + 1);
}

/* Orders stores on persistent memory; does nothing elsewhere. Ranges passed to tfs_persist are durable after tfs_barrier. */
static inline void tfs_persist(struct tfs *fs, const void *p, tmb_u64 len)
{
	if (__builtin_expect(fs->persistent, 0))
		tfs_os_flush(p, len);
}

static inline void tfs_barrier(struct tfs *fs)
{
	if (__builtin_expect(fs->persistent, 0))
		tfs_os_drain();
}

/* Stores a word that other members read, and begins to write it back. */
static inline void tfs_store_word(struct tfs *fs, tmb_u64 *word, tmb_u64 value)
{
	tmb_store_release(word, value);
	tfs_persist(fs, word, sizeof(*word));
}

static inline tmb_u64 tfs_root_word(tmb_u64 block, tmb_u32 height)
{
	return block | (tmb_u64)height << TFS_HEIGHT_SHIFT;
}

static inline tmb_u32 tfs_root_height(tmb_u64 root)
{
	return (root >> TFS_HEIGHT_SHIFT) & 15;
}

static inline int tfs_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b)
{
	if (tfs_expelled(fs))
		return -ESHUTDOWN; /* it has followed what others have put there since */
	if (!fs->read_only)
		tmb_fetch_add(&tfs_sb(fs)->errors, 1);
	tfs_os_damage(fs, what, a, b);
	return -EUCLEAN;
}

/* Steps of a loop between two yields. */
#define TFS_STEPS 16u
/*
 * Called at step n of a loop that may be long, above all where damage or a hostile member can make it so: yields the CPU now and then. -EINTR: the
 * caller was killed, and the loop should end.
 */
static inline int tfs_long_loop(struct tfs *fs, tmb_u64 n)
{
	if (n % TFS_STEPS != TFS_STEPS - 1)
		return 0;
	tfs_os_yield();
	return tfs_os_killed(fs) ? -EINTR : 0;
}

/* alloc.c: the block map */
/* Tags up to 'want' contiguous free blocks. goal: where to look first (0: anywhere). -ENOSPC. */
int tfs_alloc(struct tfs *fs, tmb_u64 goal, tmb_u64 want, struct tfs_run *run);
/* Tags 512 free blocks that are aligned to 512, or a part of such a chunk from 'offset' on. -ENOSPC. */
int tfs_alloc_chunk(struct tfs *fs, tmb_u64 offset, tmb_u64 want, struct tfs_run *run);
#define TFS_RESERVE 2u /* blocks: as many nodes as one removal may need */
_Static_assert(sizeof(((struct tfs *)0)->reserve) == TFS_RESERVE * sizeof(tmb_u64), "a place for each reserved block");
/* Tags one free block, a reserved one if there is no other. -ENOSPC. */
int tfs_alloc_spare(struct tfs *fs, tmb_u64 *block);
/* Fills the reserve up if it has fewer blocks. */
void tfs_keep_reserve(struct tfs *fs);
/* The same after blocks became free: another member may have taken the reserve, and have died or left before it could fill it again. */
static inline void tfs_refill_reserve(struct tfs *fs)
{
	tmb_u64 a = tmb_load(&fs->reserve[0]), b = tmb_load(&fs->reserve[1]);
	tmb_u8 *map = tfs_map_bytes(fs);

	if (a == b || tmb_load(&map[a]) != TFS_MAP_RESERVED || tmb_load(&map[b]) != TFS_MAP_RESERVED)
		tfs_keep_reserve(fs);
}
void tfs_set_map(struct tfs *fs, tmb_u64 block, tmb_u64 count, tmb_u8 value);
/* First block in [from, to) with this map byte, or 'to'. */
tmb_u64 tfs_find_map(struct tfs *fs, tmb_u64 from, tmb_u64 to, tmb_u8 value);
tmb_u64 tfs_count_free(struct tfs *fs);

/* tree.c: radix trees. 'root' is a copied root word; 'rootp' points to one, in the zone or private. */
/* As tfs_tree_map, without a report of damage: a reader may find the tree freed under it, and -EUCLEAN then means nothing. */
int tfs_tree_look(struct tfs *fs, tmb_u64 root, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run);
static inline int tfs_tree_map(struct tfs *fs, tmb_u64 root, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	int err = tfs_tree_look(fs, root, fblock, count, run);

	return __builtin_expect(err, 0) ? tfs_damage(fs, "tree entry out of range", root, fblock) : 0;
}
/* Links run.count blocks, tagged as the caller's, at a hole, then gives them and new nodes the map byte 'mark': used, or still the tag if the root
 * itself is not linked yet. *nodes grows by the nodes it took. */
int tfs_tree_link(struct tfs *fs, tmb_u64 *rootp, tmb_u64 fblock, const struct tfs_run *run, tmb_u8 mark, tmb_u64 *nodes);
/* As tfs_tree_link; on failure it frees the blocks that it could not link. *taken grows by all new blocks of the tree, nodes included. */
int tfs_tree_add(struct tfs *fs, tmb_u64 *rootp, tmb_u64 fblock, const struct tfs_run *run, tmb_u8 mark, tmb_u64 *taken);
/* Counts the blocks of a tree, nodes included. */
tmb_u64 tfs_tree_count(struct tfs *fs, tmb_u64 root);
/* Unlinked blocks, to be freed when no member can look at them any more. */
#define TFS_GONE_RUNS 240u
struct tfs_gone {
	tmb_u32 n;
	tmb_u64 blocks;
	tmb_u64 spare[2]; /* tagged blocks for the nodes of large entries that are split */
	struct tfs_run runs[TFS_GONE_RUNS];
};
/* Returns whether a large entry lies across the border before 'fblock', so that a removal that begins or ends there splits it. */
bool tfs_tree_splits(struct tfs *fs, tmb_u64 root, tmb_u64 fblock);
/* Tags, then unlinks, the blocks in [from, to). 1: 'gone' is full, call again; 0: done. */
int tfs_tree_unlink(struct tfs *fs, tmb_u64 *rootp, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone);
/* Calls visit for every block of the tree, nodes after their children, and subtracts them from the budget (fs->blocks for a whole walk). */
typedef int (*tfs_visit)(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node);
int tfs_tree_walk(struct tfs *fs, tmb_u64 root, tfs_visit visit, void *ctx, tmb_u64 *budget);
/* Changes the map byte of all blocks of a tree: to the caller's tag before the tree is replaced, to free after that, to used once it is linked. Stops
 * at a block whose byte is not 'from': a block that two trees refer to, or one twice, is not freed twice. */
int tfs_tree_mark(struct tfs *fs, tmb_u64 root, tmb_u8 from, tmb_u8 to);

/* The inode table never shrinks. It may take a quarter of the blocks, so that many empty files leave room for data once they are removed. */
static inline tmb_u64 tfs_most_inodes(struct tfs *fs)
{
	return (fs->blocks - fs->data_start) / 4 * TFS_INODES_PER_BLOCK;
}
/* Returns the number of inodes in the table: the super block's count, bounded by the table's size. */
static inline tmb_u64 tfs_table_inodes(struct tfs *fs)
{
	return TFS_MIN(tmb_load(&tfs_sb(fs)->itable_inodes), fs->blocks * TFS_INODES_PER_BLOCK);
}

/* Returns the sum of the members' counts; a damaged sum is a large number. */
static inline tmb_u64 tfs_inodes_used(struct tfs *fs)
{
	tmb_u64 used = 0;

	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++)
		used += (tmb_u64)tmb_load(&tfs_member_area(fs, m)->inodes_used);
	return used;
}

/* wait.c: the lock across members */
enum tfs_how {
	TFS_KILLABLE,	 /* a signal ends the wait: -EINTR */
	TFS_BRIEFLY,	 /* the same; and -EAGAIN if one owner keeps the lock for TFS_BRIEF_NS: for callers that have a transaction's slot */
	TFS_SURE,	 /* a signal ends only a long wait: for callers whose end leaves work undone */
	TFS_NO_RECOVERY, /* no wait: a dead owner's lock is taken over without recovering the owner */
};
int tfs_lock(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how);
/* The same for a lock in an inode's record whose memory has another use once the inode is gone. -ESTALE: it is gone. */
int tfs_lock_of(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how, struct tfs_inode *inode, struct tfs_handle h);
/* Returns the word with this member as owner of the lock in state 'now'. */
static inline tmb_u64 tfs_lock_owned(struct tfs *fs, tmb_u64 now)
{
	tmb_u64 one = TFS_LOCK_COUNT & -TFS_LOCK_COUNT, count = (now + one) & TFS_LOCK_COUNT;

	/* A lock that was taken once is never 0 again: that may be a count of names, in a later inode with the number. */
	count = count ? count : one;
	return (now & TFS_LOCK_TURN) | count | tmb_lock_word(fs->member, fs->epoch, 0) | TFS_LOCK_HELD;
}
static inline bool tfs_try_lock(struct tfs *fs, struct tmb_lock *lock)
{
	tmb_u64 now = tmb_load(&lock->word);

	return !(now & 0xff) && tmb_cas64(&lock->word, now, tfs_lock_owned(fs, now));
}
/* Takes the lock if it is free or its owner is dead, without a wait and without the owner's recovery. False: *owner, a living member, has it or is to
 * have it; or its word has just changed. */
bool tfs_lock_at_once(struct tfs *fs, struct tmb_lock *lock, tmb_u32 *owner);
void tfs_unlock(struct tfs *fs, struct tmb_lock *lock);
/* Waits, without a transaction's slot, for a lock that an operation found kept (TFS_BRIEFLY). 0: the operation may begin again. */
static inline int tfs_await(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how)
{
	int err = tfs_lock(fs, lock, how);

	if (!err)
		tfs_unlock(fs, lock);
	return err;
}
bool tfs_lock_held(const struct tmb_lock *lock, tmb_u32 *owner); /* by a member, dead or alive */
/* One wait for something that another thread or member holds. */
struct tfs_wait {
	enum tfs_how how;
	bool asked;
	tmb_u64 started, changed, seen, tell;
	struct tfs_inode *inode; /* NULL: any. The wait ends when this is no longer the handle's inode */
	struct tfs_handle h;
};
void tfs_wait_start(struct tfs_wait *w, enum tfs_how how);
/* Sleeps a little, or until *bell (NULL: none) is no longer 'rung'. While 'seen' stays the same, 'owner' (TFS_MEMBERS: none) is asked for a sign of
 * life. -EINTR, or -ESHUTDOWN: this member was declared dead. */
int tfs_wait_more(struct tfs *fs, struct tfs_wait *w, tmb_u64 seen, tmb_u32 owner, tmb_u32 *bell, tmb_u32 rung);

/* freeze.c */
int tfs_wait_thaw(struct tfs *fs); /* waits while another member has frozen the file system */
static inline bool tfs_is_frozen(struct tfs *fs)
{
	return tmb_load(&tfs_sb(fs)->freeze) && tfs_frozen(fs);
}

/* lock.c: which members live; locks of inodes */
/* As tfs_lock_inode; gives the inode, whose lock tfs_unlock releases. */
int tfs_lock_inode_as(struct tfs *fs, struct tfs_handle h, enum tfs_how how, struct tfs_inode **inode);
int tfs_try_lock_inode(struct tfs *fs, struct tfs_handle h, struct tfs_inode **inode); /* -EAGAIN: taken */
/* As tfs_await, for the lock of an inode. */
int tfs_await_inode(struct tfs *fs, struct tfs_handle h, enum tfs_how how);
bool tfs_member_alive(struct tfs *fs, tmb_u32 member, tmb_u32 epoch);
static inline bool tfs_member_active(struct tfs *fs, tmb_u32 member)
{
	return member == fs->member ||
	       (fs->members && tmb_state(tmb_load_acquire(&fs->members[member].state_epoch)) == TMB_MEMBER_ACTIVE);
}
void tfs_ring_members(struct tfs *fs, tmb_u64 members, tmb_u64 reason); /* bit per member */
/* Returns whether this member was declared dead: it must not write any more. */
static inline bool tfs_fenced(struct tfs *fs)
{
	return fs->members && tmb_load(&fs->members[fs->member].state_epoch) != tmb_state_epoch(TMB_MEMBER_ACTIVE, fs->epoch);
}

/* reuse.c: which members may still look at blocks that were unlinked from an inode; each a bit per member */
tmb_u64 tfs_active_members(struct tfs *fs, tmb_u64 members); /* those of 'members' that live */
/* Asks the inode's mappers to let go, and returns the members that still map or read it. Without 'wait' it does not wait for mappers, and includes
 * this member if it maps the inode. */
tmb_u64 tfs_holders(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, bool wait);
tmb_u64 tfs_wait_mappers(struct tfs *fs, struct tfs_inode *inode); /* of other members */
tmb_u64 tfs_reading(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino);
/* Between these, the caller stores what begin returns in the map bytes of unlinked blocks: free; deferred, if there are 'holders' that may still look at
 * them; or its own tag if it was declared dead. Neither waits. */
tmb_u8 tfs_free_begin(struct tfs *fs, tmb_u64 holders);
void tfs_free_end(struct tfs *fs, tmb_u8 mark, tmb_u64 holders);
/* Frees the blocks that have the tag and are not linked; deferred if there are 'holders' that may still look at them. */
void tfs_free_tagged(struct tfs *fs, tmb_u8 tag, tmb_u64 holders);
void tfs_deferred_release(struct tfs *fs, tmb_u64 members); /* these members look at no deferred block any more */
/* The same, whatever the bits say, and asks the other holders once more: these members have died, or were this one's former epochs. */
void tfs_deferred_settle(struct tfs *fs, tmb_u64 members);
bool tfs_await_deferred(struct tfs *fs); /* waits a moment; true: the deferred blocks are free */

/* recovery.c: recovery of dead members */
/* The first half of tfs_recover, after which the dead member's locks may be taken over. It takes no inode's lock, so a thread that waits for one may
 * call it. The references that the member had open wait for tfs_recover. */
int tfs_recover_locks(struct tfs *fs, tmb_u32 member, enum tfs_how how);

/* tx.c: transactions */
/*
 * A thread takes a slot before any lock: threads that have slots may wait for locks, so a thread that waited for a slot with a lock held could wait
 * for itself. These two, with which an operation begins, are the only ones that take slots. Waits while the file system is frozen.
 */
int tfs_tx_begin(struct tfs *fs, tmb_u32 *slot);
int tfs_tx_try_begin(struct tfs *fs, tmb_u32 *slot); /* -EAGAIN: frozen */
/* Begins an operation on one inode: takes a slot, then the inode's lock. */
int tfs_tx_begin_on(struct tfs *fs, struct tfs_handle h, tmb_u32 *slot, struct tfs_inode **inode);
void tfs_tx_drop(struct tfs *fs, tmb_u32 slot); /* ends a transaction that has listed nothing */
static inline struct tfs_tx *tfs_tx(struct tfs *fs, tmb_u32 slot)
{
	return &tfs_member_area(fs, fs->member)->tx[slot];
}
void tfs_tx_inode(struct tfs *fs, tmb_u32 slot, tmb_u32 index, tmb_u64 ino);
void tfs_tx_redo(struct tfs *fs, tmb_u32 slot, tmb_u32 redo, tmb_u64 arg0, tmb_u64 arg1);
/* Names inode 0 of an open transaction whose recovery trims it: frees those of the file blocks [from, to) that lie behind its end. The range is given first,
 * and may be changed to one of holes, and to one that goes on with blocks that follow. */
void tfs_tx_trim_range(struct tfs *fs, tmb_u32 slot, tmb_u64 from, tmb_u64 to);
void tfs_tx_trim(struct tfs *fs, tmb_u32 slot, tmb_u64 ino);
void tfs_tx_word(struct tfs *fs, tmb_u32 slot, void *field, tmb_u64 value);
void tfs_tx_commit(struct tfs *fs, tmb_u32 slot); /* stores the words */
/* Called before the locks of what was changed are released: a recovery would otherwise store the words again, over later changes. */
void tfs_tx_end(struct tfs *fs, tmb_u32 slot);
/* For recoveries: takes a slot, also while the file system is frozen. Waits while other threads of this member have all slots; the caller holds no lock
 * that these could wait for. */
int tfs_tx_claim(struct tfs *fs, tmb_u32 *slot);
/* Returns inode i of those whose trees may hold tagged blocks; NULL: none, or the inode table. */
struct tfs_inode *tfs_tx_listed(struct tfs *fs, struct tfs_tx *tx, tmb_u32 i);
void tfs_tx_repeat(struct tfs *fs, struct tfs_tx *tx); /* stores the words */
void tfs_tx_clear(struct tfs *fs, struct tfs_tx *tx);
/* Around the repetition of a dead member's work on an inode; 'own': of this member's own former epoch. */
int tfs_tx_begin_redo(struct tfs *fs, tmb_u64 ino, bool own);
void tfs_tx_end_redo(struct tfs *fs, bool own);

/* filelock.c */
/* The lock of the table of file locks of an inode that is no directory. */
static inline struct tmb_lock *tfs_table_lock(struct tfs_inode *inode)
{
	return (struct tmb_lock *)&inode->entries;
}
/* With the inode locked, before it is freed: keeps out programs that lock ranges. */
int tfs_lock_table_to_free(struct tfs *fs, struct tfs_inode *inode);
void tfs_unlock_table(struct tfs *fs, struct tfs_inode *inode);

/* inode.c */
struct tfs_inode *tfs_search_inode(struct tfs *fs, tmb_u64 ino);
/* Returns the inode in any state; NULL: no such inode. Places in the cache were checked. */
static inline struct tfs_inode *tfs_inode(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 fblock = ino / TFS_INODES_PER_BLOCK, known = tmb_load(&fs->itable_cache[fblock % TFS_ITABLE_CACHE]);

	if (__builtin_expect(!ino || known >> 32 != fblock + 1, 0))
		return tfs_search_inode(fs, ino);
	return (struct tfs_inode *)tfs_block(fs, known & 0xffffffff) + ino % TFS_INODES_PER_BLOCK;
}
/* The number's present inode: for names, read with their directory locked, and for recovery. */
static inline struct tfs_handle tfs_any(tmb_u64 ino)
{
	return (struct tfs_handle){.ino = ino};
}
/* Returns whether an inode in this state lives and is the handle's. */
static inline bool tfs_state_is(tmb_u64 state, struct tfs_handle h)
{
	return (state & 0xff) == TFS_INODE_LIVE && (!h.generation || state >> TFS_GEN_SHIFT == h.generation);
}
static inline bool tfs_is(struct tfs_inode *inode, struct tfs_handle h)
{
	return tfs_state_is(tmb_load_acquire(&inode->state_gen), h);
}
/* Returns whether this member may name the inode. One that is confined has no way to the file system's root, by whose names it reaches all others. */
static inline bool tfs_in_reach(struct tfs *fs, struct tfs_handle h)
{
	return h.ino != TFS_ROOT_INO || fs->root.ino == TFS_ROOT_INO;
}
/* Returns whether this member may look at the record, whatever lives there by now. */
static inline bool tfs_may_look(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode)
{
	return inode && !tfs_expelled(fs) && tfs_in_reach(fs, h);
}
int tfs_refuse(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode); /* the error where it may not, or where no inode of the handle lives */
static inline int tfs_live_inode(struct tfs *fs, struct tfs_handle h, struct tfs_inode **out) /* -ESTALE, -EUCLEAN, -ESHUTDOWN */
{
	struct tfs_inode *inode = *out = tfs_inode(fs, h.ino);

	if (__builtin_expect(tfs_may_look(fs, h, inode) && tfs_is(inode, h), 1))
		return 0;
	return tfs_refuse(fs, h, inode);
}
/* Equal before a walk of the inode's blocks and after a copy of them: none was unlinked in between. */
static inline tmb_u64 tfs_stamp_of(struct tfs_inode *inode)
{
	tmb_u64 state;

	__atomic_thread_fence(__ATOMIC_ACQUIRE); /* orders the copy before the second stamp */
	state = tmb_load_acquire(&inode->state_gen);
	/* The generation grows when the inode is freed, the state differs while it is being freed, and map_seq grows when blocks are unlinked. */
	return (state & ~0xffffffffULL) | (state & 0xff) << 24 | (tmb_load_acquire(&inode->map_seq) & 0xffffff);
}
/* Surround a walk of the inode's blocks and the copy of them, without a lock: by a pin, or, without one, by stamps. */
static inline void tfs_keep(struct tfs *fs, struct tfs_look *look)
{
	look->pin = tfs_pin(fs, look->h.ino);
	if (look->pin == TFS_PINS)
		look->stamp = tfs_stamp_of(look->inode);
}
static inline void tfs_end_pin(struct tfs *fs, tmb_u32 pin) /* pin < TFS_PINS */
{
	tmb_store_release(&tfs_member_area(fs, fs->member)->pins[pin].ino, 0);
}
/* False: the copy may hold another file's bytes. */
static inline bool tfs_kept(struct tfs *fs, const struct tfs_look *look)
{
	if (look->pin == TFS_PINS)
		return tfs_stamp_of(look->inode) == look->stamp;
	tfs_end_pin(fs, look->pin);
	return true;
}
/* Claims a record, state NEW, and names it in the transaction as number 'index'. -EAGAIN: another member keeps the lock of the inode table, which must
 * grow; the caller ends the transaction, calls tfs_await_table, and begins again. */
int tfs_new_inode(struct tfs *fs, tmb_u32 slot, tmb_u32 index, struct tfs_handle *made, struct tfs_inode **out);
int tfs_await_table(struct tfs *fs);
/* Undoes tfs_new_inode and frees the contents. The transaction names the inode, and its end frees the number. */
void tfs_drop_new_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot);
/* Returns whether the transaction in this slot has freed the inode; tfs_tx_end then makes the record claimable (tfs_set_free). */
bool tfs_is_freeing(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot);
void tfs_set_free(struct tfs *fs, struct tfs_inode *inode);
/* Frees the contents, and has the end of the transaction free the number. The caller holds the inode's lock; nlink is 0 and no member has it open. */
int tfs_free_inode_locked(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot);
/* Sets this member's open bit of a record that it has claimed; a thread that came too late for the record's last inode does not clear it. */
void tfs_open_new(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode);
/* Frees the inode if it has neither name nor opener, in a transaction that 'begin' begins, whose error it returns. */
int tfs_free_orphan(struct tfs *fs, tmb_u64 ino, int (*begin)(struct tfs *fs, tmb_u32 *slot));
/*
 * Removes and frees blocks [from, to) of the data tree, once readers and mappers are gone. A recovery does not wait for mappers: a member that is
 * asked to unmap may itself be waiting for the recovery. Before the transaction commits, tfs_begin_removal takes all that the removal needs, so that
 * it can't fail half-way; tfs_end_removal gives back what was not used.
 */
int tfs_begin_removal(struct tfs *fs, tmb_u32 slot, struct tfs_inode *inode, tmb_u64 from, tmb_u64 to, struct tfs_gone **gone);
int tfs_remove_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone,
		      bool recovering);
void tfs_end_removal(struct tfs *fs, struct tfs_gone *gone);
/* Returns whether the file has blocks from here on, or is damaged. */
bool tfs_has_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_u64 fblock);
static inline tmb_u64 tfs_blocks_of(tmb_u64 bytes)
{
	return (bytes + TFS_BLOCK - 1) >> TFS_BLOCK_SHIFT;
}
static inline tmb_u64 tfs_free_state(tmb_u64 state_gen)
{
	return ((state_gen >> TFS_GEN_SHIFT) + 1) << TFS_GEN_SHIFT;
}
/* As Linux does it: S_ISGID without group execution is a mark for mandatory locking, and stays. */
static inline tmb_u64 tfs_without_set_id(tmb_u64 mode)
{
	return mode & ~(tmb_u64)(04000 | (mode & 010 ? 02000 : 0));
}
static inline void tfs_changed(struct tfs_inode *inode, tmb_s64 now, bool data) /* ctime, version; mtime if data */
{
	if (data)
		tmb_store(&inode->mtime, now);
	tmb_store(&inode->ctime, now);
	tmb_store_release(&inode->version, tmb_load(&inode->version) + 1);
}
/* Returns whether the inode, which is locked, has the owner and the flags by which the caller checked its right to change it. */
static inline bool tfs_is_checked(struct tfs_inode *inode, const struct tfs_attr *checked)
{
	return !checked || (tmb_load(&inode->owner) == (checked->uid | (tmb_u64)checked->gid << 32) &&
			    (tmb_u32)tmb_load(&inode->flags) == checked->flags);
}
/* Makes a tree over a copy of 'data' and stores its root word; 'mark' as in tfs_tree_link. *taken: its blocks, at most tfs_image_blocks. spare: it replaces
 * one that takes as many blocks, so a reserved block may be used. */
int tfs_write_image(struct tfs *fs, tmb_u64 *rootp, const void *data, tmb_u64 len, tmb_u8 mark, bool spare, tmb_u64 *taken);
tmb_u64 tfs_image_blocks(tmb_u64 len);

/* dir.c: entries of one directory. The caller holds the directory's lock for all but tfs_dir_find (with a seq check). */
struct tfs_slot {
	struct tfs_dirent *entry;
	tmb_u64 granule; /* position */
	tmb_u64 ref;	 /* copied */
	tmb_u32 hash;	 /* of the name that was looked up */
	tmb_u64 *place;	 /* the entry's place in the index; NULL: not known */
	bool rebuilt;	 /* tfs_index_add() has replaced the index: places that were found before are not valid */
};
tmb_u32 tfs_hash(struct tfs *fs, const char *name, tmb_u32 len);
/* -ENOENT: sets only the hash of 'slot'. Does not report -EUCLEAN as damage; tfs_dir_find_locked does. */
int tfs_dir_find(struct tfs *fs, struct tfs_inode *dir, const char *name, tmb_u32 len, struct tfs_slot *slot);
static inline int tfs_dir_find_locked(struct tfs *fs, struct tfs_inode *dir, const char *name, tmb_u32 len, struct tfs_slot *slot)
{
	int err = tfs_dir_find(fs, dir, name, len, slot);

	return err == -EUCLEAN ? tfs_damage(fs, "directory not readable", tmb_load(&dir->root), slot->hash) : err;
}
/* After -ENOENT of tfs_dir_find: makes an entry with ref 0, already in the index, that lookups do not see yet. */
int tfs_dir_reserve(struct tfs *fs, struct tfs_inode *dir, const char *name, tmb_u32 len, struct tfs_slot *slot);
tmb_u32 tfs_granules_of(tmb_u32 name_len);
/* After the entry's ref became 0: frees its place and takes it out of the index. */
void tfs_dir_forget(struct tfs *fs, struct tfs_inode *dir, const struct tfs_slot *slot);
static inline void tfs_dir_begin(struct tfs *fs, struct tfs_inode *dir)
{
	tmb_u64 seq = tmb_load(&dir->seq);

	tfs_barrier(fs); /* the transaction that names the directory is durable first: its recovery makes 'seq' even again */
	tmb_store(&dir->seq, seq | 1);
	tmb_fence();
}
static inline void tfs_dir_end(struct tfs *fs, struct tfs_inode *dir)
{
	tmb_store_release(&dir->seq, (tmb_load(&dir->seq) | 1) + 1);
	tfs_persist(fs, &dir->seq, sizeof(dir->seq));
}

static inline tmb_u64 tfs_dir_blocks(struct tfs *fs, struct tfs_inode *dir)
{
	tmb_u64 n = tmb_load_acquire(&dir->size) >> TFS_BLOCK_SHIFT;

	return TFS_MIN(n, fs->blocks);
}
/* Returns the granule's address; NULL: no such granule. */
static inline struct tfs_dirent *tfs_granule_at(struct tfs *fs, struct tfs_inode *dir, tmb_u64 granule)
{
	struct tfs_run run;

	if (tfs_tree_look(fs, tmb_load_acquire(&dir->root), granule / TFS_GRANULES_PER_BLOCK, 1, &run) || !run.block)
		return NULL;
	return (struct tfs_dirent *)tfs_block(fs, run.block) + granule % TFS_GRANULES_PER_BLOCK;
}

/* dirindex.c: the hash index of a large directory */
/* Compares the entry with the name. left: granules to the end of its block. */
bool tfs_entry_matches(struct tfs_dirent *entry, tmb_u32 left, const char *name, tmb_u32 len, tmb_u32 hash, tmb_u64 *ref);
int tfs_index_find(struct tfs *fs, struct tfs_inode *dir, tmb_u64 index_root, const char *name, tmb_u32 len, struct tfs_slot *slot);
/* Stores the slot's hash and granule. */
int tfs_index_add(struct tfs *fs, struct tfs_inode *dir, struct tfs_slot *slot);
void tfs_index_forget(struct tfs *fs, struct tfs_inode *dir, const struct tfs_slot *slot);

/* names.c: shared with rename.c */
int tfs_check_name(tmb_u32 len);
/* Locks a directory for changes of its names. -EAGAIN: the lock is taken, and 'wait' is false. */
int tfs_lock_dir(struct tfs *fs, struct tfs_handle h, bool wait, struct tfs_inode **dir);
int tfs_init_inode(struct tfs *fs, struct tfs_inode *inode, tmb_u64 parent, const struct tfs_create *c);
/* After a commit that removed the last link: frees the inode (locked) unless a member has it open. */
void tfs_drop_if_unused(struct tfs *fs, tmb_u64 ino, struct tfs_inode *inode, tmb_u32 slot);
/* Returns whether the name's inode is the one that the caller checked. The caller holds the lock of the name's directory, which keeps the inode alive. */
bool tfs_is_expected(struct tfs *fs, tmb_u64 ino, struct tfs_handle expect);
static inline tmb_u64 tfs_make_ref(tmb_u64 ino, tmb_u64 mode)
{
	return ino | (tmb_u64)TFS_DT(mode) << TFS_REF_TYPE_SHIFT;
}
static inline tmb_u64 tfs_ref_ino(tmb_u64 ref)
{
	return ref & TFS_REF_INO_MASK;
}
static inline tmb_u64 tfs_live_state(struct tfs_inode *inode)
{
	return (tmb_load(&inode->state_gen) & ~0xffffffffULL) | TFS_INODE_LIVE;
}

/* account.c */
tmb_u64 tfs_blocks_left(struct tfs *fs, struct tfs_inode *inode); /* blocks that its account may still take; ~0: no limit */
void tfs_count_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_s64 more);
int tfs_open_account(struct tfs *fs, struct tfs_inode *inode); /* of a new inode; -EDQUOT */
void tfs_close_account(struct tfs *fs, struct tfs_inode *inode);
void tfs_statfs_account(struct tfs *fs, struct tfs_statfs *st);

/* xattr.c */
int tfs_xattr_image_ok(const void *image, tmb_u64 len);
struct tfs_xattr_change {
	bool is_prepared; /* else nothing changes */
	tmb_u64 old, root, had, taken;
};
/* Before the commit of a change of the inode's mode (0777): makes its access ACL agree with that, if it has one, in the same transaction. */
int tfs_acl_chmod(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u32 slot, tmb_u32 mode, struct tfs_xattr_change *change);
/* After the commit: frees what the change has replaced. */
void tfs_xattr_changed(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, const struct tfs_xattr_change *change);

#endif
