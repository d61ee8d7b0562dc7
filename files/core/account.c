// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Accounts count and limit the blocks and inodes that a member's files take. An inode carries the number of its account, and each change of the
 * inode's block count changes the account's too. A member that dies between the two leaves the account's sum wrong until fsck counts again.
 */
#include "tfs_internal.h"

/* 'number' is the account's number + 1, as inodes and member areas store it. */
static struct tfs_account *tfs_account_at(struct tfs *fs, tmb_u64 number)
{
	return number && number <= TFS_ACCOUNTS ? &tfs_member_area(fs, (tmb_u32)number - 1)->own : NULL;
}

/* Returns how many more the account may have; ~0: no limit. */
static tmb_u64 tfs_left_of(tmb_s64 *used, tmb_u64 *limit)
{
	tmb_u64 most = tmb_load(limit);
	tmb_s64 now = tmb_load(used);

	if (!most)
		return ~0ULL;
	return now < 0 ? most : (tmb_u64)now >= most ? 0 : most - (tmb_u64)now;
}

tmb_u64 tfs_blocks_left(struct tfs *fs, struct tfs_inode *inode)
{
	struct tfs_account *a = tfs_account_at(fs, tmb_load(&inode->account));

	return a ? tfs_left_of(&a->blocks, &a->blocks_limit) : ~0ULL;
}

void tfs_count_blocks(struct tfs *fs, struct tfs_inode *inode, tmb_s64 more)
{
	struct tfs_account *a = tfs_account_at(fs, tmb_load(&inode->account));

	tmb_store(&inode->blocks, tmb_load(&inode->blocks) + (tmb_u64)more);
	if (a)
		tmb_fetch_add(&a->blocks, more);
}

/* Returns the account for what this member creates. Not cached: the host may grant or revoke it at any time. */
static tmb_u64 tfs_own_number(struct tfs *fs)
{
	return fs->members ? tmb_load(&tfs_member_area(fs, fs->member)->account) : 0;
}

int tfs_open_account(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 number = tfs_own_number(fs);
	struct tfs_account *a = tfs_account_at(fs, number);

	if (!a)
		return 0;
	if (!tfs_left_of(&a->inodes, &a->inodes_limit) || !tfs_left_of(&a->blocks, &a->blocks_limit))
		return -EDQUOT;
	tmb_fetch_add(&a->inodes, 1);
	tmb_store(&inode->account, number);
	return 0;
}

void tfs_close_account(struct tfs *fs, struct tfs_inode *inode)
{
	struct tfs_account *a = tfs_account_at(fs, tmb_load(&inode->account));

	if (!a)
		return;
	tmb_fetch_add(&a->inodes, -1);
	tmb_fetch_add(&a->blocks, (tmb_s64)(0 - tmb_load(&inode->blocks)));
	tmb_store(&inode->account, 0);
}

void tfs_statfs_account(struct tfs *fs, struct tfs_statfs *st)
{
	struct tfs_account *a = tfs_account_at(fs, tfs_own_number(fs));
	tmb_u64 left;

	if (!a)
		return;
	if (tmb_load(&a->blocks_limit)) {
		left = tfs_left_of(&a->blocks, &a->blocks_limit);
		st->blocks = TFS_MIN(st->blocks, tmb_load(&a->blocks_limit));
		st->blocks_free = TFS_MIN(TFS_MIN(st->blocks_free, left), st->blocks);
	}
	if (tmb_load(&a->inodes_limit)) {
		left = tfs_left_of(&a->inodes, &a->inodes_limit);
		st->inodes = TFS_MIN(st->inodes, tmb_load(&a->inodes_limit));
		st->inodes_free = TFS_MIN(TFS_MIN(st->inodes_free, left), st->inodes);
	}
}

static bool tfs_is_named(struct tfs_account *a, const char *name, tmb_u32 len)
{
	char copy[sizeof(a->name)];

	memcpy(copy, a->name, sizeof(copy));
	return !memcmp(copy, name, len) && !copy[len];
}

int tfs_grant(struct tfs *fs, tmb_u32 member, const char *name, tmb_u32 len, tmb_u64 blocks, tmb_u64 inodes, struct tfs_handle root)
{
	struct tfs_account *a;
	tmb_u32 i, use = TFS_ACCOUNTS;

	if (fs->read_only)
		return -EROFS;
	if (!len || len >= sizeof(a->name) || member >= TFS_MEMBERS)
		return -EINVAL;
	for (i = 0; i < TFS_ACCOUNTS; i++) {
		a = &tfs_member_area(fs, i)->own;
		if (tfs_is_named(a, name, len))
			break;
		if (use == TFS_ACCOUNTS && !tmb_load(&a->name[0]))
			use = i;
	}
	if (i == TFS_ACCOUNTS && use == TFS_ACCOUNTS)
		return -ENOSPC;
	if (i == TFS_ACCOUNTS) {
		i = use;
		a = &tfs_member_area(fs, i)->own;
		memset(a, 0, sizeof(*a));
		memcpy(a->name, name, len);
	}
	tmb_store(&a->blocks_limit, blocks);
	tmb_store(&a->inodes_limit, inodes);
	tmb_store(&tfs_member_area(fs, member)->root_generation, (tmb_u64)root.generation);
	tmb_store_release(&tfs_member_area(fs, member)->root, root.ino);
	tmb_store_release(&tfs_member_area(fs, member)->account, i + 1);
	return 0;
}
