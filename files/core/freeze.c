// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Freezing: for a snapshot one member stops all changes by other members. The word in the super block names the freezing member, so a freeze ends
 * with that member's life. An operation begins with a transaction (tfs_tx_begin) and loads the word after taking its slot; the freezing member sets
 * the word, then looks at transactions and locks. Of two that race, at least one sees the other. An operation that has begun goes on to its end,
 * with all locks that it still needs. References (open, mapped), records of file locks, claims of free inodes and access times may still change:
 * recovery repairs them in the copy, in which no member lives. Mappings are revoked, and come back after the thaw.
 *
 * The freezing member may be suspended, with everyone else waiting. So it renews the word, whose tag counts that, and whoever finds the file system frozen
 * ends a freeze that this member first saw TFS_FREEZE_IDLE_NS ago and that was not renewed since. A member keeps that time, not a waiter: page faults don't
 * wait here, they are tried again, and processes may be killed and begin again. The freezing member learns of the end when it next renews the word, or at
 * the thaw: its copy is of no use then.
 */
#include "tfs_internal.h"

#define INODES_PER_RENEWAL 0x10000

/* The owner and the epoch; between them is the tag, which counts renewals from RENEWED on. A member of an earlier release renews nothing, and stores 1. */
#define OWNER 0xffffffff000000ffULL
#define TAG 0xffffff
#define RENEWED 2

static tmb_u64 tfs_own_freeze(struct tfs *fs, tmb_u32 tag)
{
	return tmb_lock_word(fs->member, fs->epoch, tag);
}

/* Replaces the word by 'next' while it is this member's. -ESTALE: it is not. */
static int tfs_exchange_own(struct tfs *fs, tmb_u64 (*next)(struct tfs *fs, tmb_u64 now))
{
	tmb_u64 *word = &tfs_sb(fs)->freeze, now;

	do {
		now = tmb_load(word);
		if (((now ^ tfs_own_freeze(fs, 0)) & OWNER) != 0)
			return -ESTALE;
	} while (!tmb_cas64(word, now, next(fs, now)));
	return 0;
}

/* The next freeze of this epoch goes on counting: others must not take it for this one. */
static tmb_u64 tfs_next_word(struct tfs *fs)
{
	tmb_u32 tag = (tmb_load(&fs->freeze_tag) + 1) & TAG;

	tag = tag < RENEWED ? RENEWED : tag;
	tmb_store(&fs->freeze_tag, tag);
	return tfs_own_freeze(fs, tag);
}

static tmb_u64 tfs_renewed(struct tfs *fs, tmb_u64 now)
{
	(void)now;
	return tfs_next_word(fs);
}

static tmb_u64 tfs_none(struct tfs *fs, tmb_u64 now)
{
	(void)fs, (void)now;
	return 0;
}

/* Ends a freeze of another member that is not renewed. One thread looks at a time, so that 'freeze_since' is of 'freeze_seen'. */
static void tfs_end_idle(struct tfs *fs)
{
	tmb_u64 *word = &tfs_sb(fs)->freeze, now;

	if (!tmb_cas32(&fs->freeze_looking, 0, 1))
		return;
	now = tmb_load(word);
	if (now != fs->freeze_seen) {
		fs->freeze_seen = now;
		fs->freeze_since = tfs_os_clock();
	} else if ((now >> 8 & TAG) >= RENEWED && tfs_os_clock() - fs->freeze_since > TFS_FREEZE_IDLE_NS) {
		tmb_cas64(word, now, 0);
	}
	tmb_store_release(&fs->freeze_looking, 0);
}

bool tfs_frozen(struct tfs *fs)
{
	tmb_u64 *word = &tfs_sb(fs)->freeze, now = tmb_load(word);
	tmb_u32 owner = tmb_lock_owner(now), epoch = (tmb_u32)(now >> 32);

	if (!now || (owner == fs->member && epoch == fs->epoch))
		return false;
	if (!tfs_member_alive(fs, owner, epoch)) {
		tmb_cas64(word, now, 0);
		return false;
	}
	tfs_end_idle(fs);
	return tmb_load(word) != 0;
}

int tfs_wait_thaw(struct tfs *fs)
{
	tmb_u64 *word = &tfs_sb(fs)->freeze, now;
	struct tfs_wait w;
	int err = 0;

	if (!tfs_frozen(fs))
		return 0;
	tfs_wait_start(&w, TFS_SURE);
	while (!err && tfs_frozen(fs)) {
		now = tmb_load(word);
		err = tfs_wait_more(fs, &w, now, now ? tmb_lock_owner(now) : TFS_MEMBERS, NULL, 0);
	}
	return err;
}

/* Waits for the end of a member's transactions, as long as it lives. */
static int tfs_end_of_transactions(struct tfs *fs, tmb_u32 member, tmb_u64 since)
{
	for (tmb_u32 i = 0; i < TFS_TX_SLOTS; i++) {
		struct tfs_tx *tx = &tfs_member_area(fs, member)->tx[i];

		while ((tmb_load_acquire(&tx->state) & 0xff) != TFS_TX_FREE) {
			if (!tfs_member_active(fs, member))
				return tfs_recover(fs, member);
			if (tfs_os_clock() - since > TFS_FREEZE_LIMIT_NS)
				return -EBUSY;
			tfs_os_wait(fs, 10);
		}
	}
	return 0;
}

/* Waits for the operations that began before the freeze, and revokes all mappings. */
static int tfs_settle(struct tfs *fs)
{
	tmb_u64 inodes, since = tfs_os_clock();
	int err = tfs_recover_all(fs);

	for (tmb_u32 m = 0; m < TFS_MEMBERS && !err; m++) {
		err = m == fs->member ? 0 : tfs_end_of_transactions(fs, m, since);
		if (!err)
			err = tfs_renew_freeze(fs);
	}
	inodes = tfs_table_inodes(fs);
	for (tmb_u64 ino = TFS_ROOT_INO; ino < inodes && !err; ino++) {
		struct tfs_inode *inode = tfs_inode(fs, ino);
		tmb_u32 owner;

		if (!inode)
			break; /* itable_inodes is larger than the table */
		err = tfs_long_loop(fs, ino);
		if (!err && ino % INODES_PER_RENEWAL == 0)
			err = tfs_renew_freeze(fs);
		if (!err && tfs_lock_held(&inode->lock, &owner)) {
			err = tfs_lock(fs, &inode->lock, TFS_KILLABLE);
			if (!err)
				tfs_unlock(fs, &inode->lock);
		}
		if (!err && tmb_load(&inode->mappers) & ~(1ULL << fs->member))
			err = tfs_wait_mappers(fs, inode) ? -EBUSY : tfs_renew_freeze(fs);
	}
	return err;
}

int tfs_freeze(struct tfs *fs)
{
	tmb_u64 *word = &tfs_sb(fs)->freeze;
	int err;

	if (fs->read_only)
		return -EROFS;
	if (tfs_frozen(fs) || !tmb_cas64(word, 0, tfs_next_word(fs)))
		return -EBUSY;
	err = tfs_settle(fs);
	if (err)
		tfs_thaw(fs);
	return err;
}

int tfs_renew_freeze(struct tfs *fs)
{
	return tfs_exchange_own(fs, tfs_renewed);
}

int tfs_thaw(struct tfs *fs)
{
	return tfs_exchange_own(fs, tfs_none);
}
