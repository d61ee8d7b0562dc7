// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Making and opening a file system, and its statistics. The layout follows from the area's length alone, so each member computes it and compares. */
#include "tfs_internal.h"

#define MIN_BLOCKS 1024u	 /* 4 MiB */
#define ALIGN_DATA_FROM 16384u	 /* from 64 MiB on the data starts at a multiple of a chunk */
#define FIRST_INODE_BLOCKS 16u
#define JOIN_NS (1000ULL * 1000 * 1000) /* at most this long passes between a member's joining and its opening */

struct tfs_layout {
	tmb_u64 blocks, member_start, map_start, data_start;
};

static int tfs_lay_out(tmb_u64 length, struct tfs_layout *l)
{
	l->blocks = length >> TFS_BLOCK_SHIFT;
	if (l->blocks < MIN_BLOCKS || l->blocks > TFS_BLOCKNR_MASK)
		return -EINVAL;
	l->member_start = 1;
	l->map_start = l->member_start + TFS_MEMBERS * TFS_MEMBER_BLOCKS;
	l->data_start = l->map_start + (l->blocks + TFS_BLOCK - 1) / TFS_BLOCK;
	if (l->blocks >= ALIGN_DATA_FROM)
		l->data_start = (l->data_start + TFS_FANOUT - 1) / TFS_FANOUT * TFS_FANOUT;
	return 0;
}

static void tfs_use_layout(struct tfs *fs, void *area, const struct tfs_layout *l)
{
	fs->area = area;
	fs->blocks = l->blocks;
	fs->member_start = l->member_start;
	fs->map_start = l->map_start;
	fs->data_start = l->data_start;
	fs->state_epoch = NULL;
}

static int tfs_make_root(struct tfs *fs, tmb_u32 uid, tmb_u32 gid, tmb_u32 mode)
{
	struct tfs_super *sb = tfs_sb(fs);
	struct tfs_inode *root;
	struct tfs_run run;
	tmb_u64 nodes = 0;
	tmb_s64 now = tfs_os_now();
	int err = tfs_alloc(fs, fs->data_start, FIRST_INODE_BLOCKS, &run);

	if (err)
		return err;
	memset(tfs_block(fs, run.block), 0, run.count << TFS_BLOCK_SHIFT);
	err = tfs_tree_link(fs, &sb->itable_root, 0, &run, TFS_MAP_USED, &nodes);
	if (err)
		return err;
	sb->itable_inodes = run.count * TFS_INODES_PER_BLOCK;
	root = tfs_inode(fs, TFS_ROOT_INO);
	root->mode = TFS_MODE_DIR | (mode & 07777);
	root->owner = uid | (tmb_u64)gid << 32;
	root->nlink = 2;
	root->parent = TFS_ROOT_INO;
	root->atime = root->mtime = root->ctime = root->btime = now;
	root->version = 1;
	root->state_gen = 1ULL << TFS_GEN_SHIFT | TFS_INODE_LIVE;
	tfs_keep_reserve(fs);
	return 0;
}

int tfs_mkfs(void *area, tmb_u64 length, const tmb_u8 *uuid, const char *label, tmb_u64 hash_seed, tmb_u64 area_offset, tmb_u32 uid,
	     tmb_u32 gid, tmb_u32 mode, tmb_u64 ro_compat)
{
	struct tfs *fs;
	struct tfs_super *sb = area;
	struct tfs_layout l;
	int err = tfs_lay_out(length, &l);

	if (err)
		return err;
	fs = tfs_os_alloc(sizeof(*fs));
	if (!fs)
		return -ENOMEM;
	fs->hash_seed = hash_seed;
	fs->persistent = ro_compat & TFS_RO_COMPAT_PERSISTENT;
	tmb_store_release(&sb->magic, 0);
	memset(area, 0, l.data_start << TFS_BLOCK_SHIFT);
	tfs_use_layout(fs, area, &l);
	memset(tfs_map_bytes(fs), TFS_MAP_META, l.data_start);
	memset(tfs_map_bytes(fs) + l.blocks, TFS_MAP_META, ((l.data_start - l.map_start) << TFS_BLOCK_SHIFT) - l.blocks);
	sb->version = TFS_VERSION;
	sb->block_size = TFS_BLOCK;
	memcpy(sb->uuid, uuid, 16);
	sb->blocks = l.blocks;
	sb->member_start = l.member_start;
	sb->member_blocks = TFS_MEMBER_BLOCKS;
	sb->map_start = l.map_start;
	sb->data_start = l.data_start;
	sb->hash_seed = hash_seed;
	sb->created_ns = (tmb_u64)tfs_os_now();
	sb->area_offset = area_offset;
	sb->incompat = TFS_INCOMPAT_KNOWN;
	sb->ro_compat = ro_compat;
	for (tmb_u32 i = 0; label && label[i] && i < sizeof(sb->label) - 1; i++)
		sb->label[i] = label[i];
	err = tfs_make_root(fs, uid, gid, mode);
	if (err)
		goto out;
	tfs_persist(fs, area, l.data_start << TFS_BLOCK_SHIFT);
	tfs_persist(fs, tfs_inode(fs, TFS_ROOT_INO), sizeof(struct tfs_inode));
	tfs_barrier(fs);
	tmb_store_release(&sb->magic, TFS_MAGIC);
	tfs_persist(fs, sb, sizeof(*sb));
	tfs_barrier(fs);
out:
	tfs_os_free(fs);
	return err;
}

/* Returns whether every other member that may write has declared, in its present epoch, that it knows all features. */
static bool tfs_all_know(struct tfs *fs)
{
	for (tmb_u32 m = 0; fs->members && m < TFS_MEMBERS; m++) {
		tmb_u64 features = tmb_load(&tfs_member_area(fs, m)->features);
		tmb_u32 epoch = tmb_epoch(tmb_load(&fs->members[m].state_epoch));

		if (m == fs->member || !tfs_member_active(fs, m) || !(tmb_load(&fs->members[m].rights) & TMB_RIGHT_WRITE))
			continue;
		if ((features & TFS_INCOMPAT_ALL) != TFS_INCOMPAT_ALL || features >> 32 != epoch)
			return false;
	}
	return true;
}

/*
 * For a file system of an older program: an unused feature changes nothing on memory, so it can be declared now, and from then on only members
 * that know it may open. A member that has just joined may not have declared its features yet; one that does not within JOIN_NS runs an older
 * program.
 */
static int tfs_use_features(struct tfs *fs)
{
	struct tfs_super *sb = tfs_sb(fs);
	tmb_u64 since = tfs_os_clock();

	tmb_store(&tfs_member_area(fs, fs->member)->features, (tmb_u64)fs->epoch << 32 | TFS_INCOMPAT_ALL);
	tmb_fence();
	for (tmb_u32 round = 0; (tmb_load(&sb->incompat) & TFS_INCOMPAT_ALL) != TFS_INCOMPAT_ALL; round++) {
		if (tfs_all_know(fs)) {
			tmb_fetch_or(&sb->incompat, TFS_INCOMPAT_ALL);
			tfs_persist(fs, sb, sizeof(*sb));
			tfs_barrier(fs);
		} else if (tfs_os_clock() - since > JOIN_NS) {
			return -EPROTONOSUPPORT;
		} else {
			tfs_os_wait(fs, round);
		}
	}
	return 0;
}

/* The generation after the number, which a grant stores last. */
static void tfs_set_root(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);

	fs->root = tfs_any(fs->members ? tmb_load_acquire(&area->root) : 0);
	if (fs->root.ino)
		fs->root.generation = (tmb_u32)tmb_load(&area->root_generation);
	else
		fs->root.ino = TFS_ROOT_INO;
}

int tfs_open(struct tfs *fs, void *area, tmb_u64 length, struct tmb_member *members, tmb_u32 member, tmb_u32 epoch)
{
	struct tfs_super *sb = area;
	struct tfs_layout l;
	tmb_u64 blocks, incompat;
	int err;

	if (length < sizeof(*sb) || tmb_load_acquire(&sb->magic) != TFS_MAGIC || member >= TFS_MEMBERS)
		return -EINVAL;
	incompat = tmb_load(&sb->incompat);
	if (tmb_load(&sb->version) != TFS_VERSION || incompat & ~TFS_INCOMPAT_KNOWN ||
	    (tmb_load(&sb->ro_compat) & ~TFS_RO_COMPAT_PERSISTENT && !fs->read_only) || tmb_load(&sb->block_size) != TFS_BLOCK)
		return -EPROTONOSUPPORT;
	blocks = tmb_load(&sb->blocks);
	if (blocks > length >> TFS_BLOCK_SHIFT || tfs_lay_out(blocks << TFS_BLOCK_SHIFT, &l) || tmb_load(&sb->member_start) != l.member_start ||
	    tmb_load(&sb->member_blocks) != TFS_MEMBER_BLOCKS || tmb_load(&sb->map_start) != l.map_start ||
	    tmb_load(&sb->data_start) != l.data_start)
		return -EUCLEAN;
	tfs_use_layout(fs, area, &l);
	memset(fs->itable_cache, 0, sizeof(fs->itable_cache));
	memset(fs->queue, 0, sizeof(fs->queue));
	memset(fs->freeing, 0, sizeof(fs->freeing));
	memset(fs->reserve, 0, sizeof(fs->reserve));
	fs->freeze_seen = fs->freeze_since = 0;
	fs->freeze_looking = fs->freeze_tag = 0;
	fs->numbers = 0;
	fs->silent.members = fs->keeping.members = 0;
	fs->unclean = fs->asked = false;
	fs->taking = 0;
	fs->hash_seed = tmb_load(&sb->hash_seed);
	fs->keyed = incompat & TFS_INCOMPAT_KEYED_HASH;
	fs->persistent = tmb_load(&sb->ro_compat) & TFS_RO_COMPAT_PERSISTENT && !fs->read_only;
	fs->members = members;
	fs->member = member;
	fs->epoch = epoch;
	fs->state_epoch = members && !fs->read_only ? &members[member].state_epoch : NULL;
	fs->active = tmb_state_epoch(TMB_MEMBER_ACTIVE, epoch);
	/* Members start at different places, so that they seldom meet on a word of the map or a record of the inode table. */
	fs->alloc_cursor = l.data_start + (l.blocks - l.data_start) / 8 * (member % 8);
	fs->chunk_cursor = fs->alloc_cursor / TFS_FANOUT;
	fs->inode_cursor = TFS_ROOT_INO + 1;
	tfs_set_root(fs);
	if (members) { /* the joining is durable before any work of this member */
		tfs_persist(fs, &members[member], sizeof(members[member]));
		tfs_barrier(fs);
	}
	if (fs->read_only)
		return 0;
	err = tfs_use_features(fs);
	if (!err)
		err = tfs_recover(fs, member);
	if (err)
		return err;
	if (members)
		tfs_deferred_settle(fs, 1ULL << member);
	tfs_keep_reserve(fs);
	return 0;
}

void tfs_close(struct tfs *fs)
{
	if (!fs->members || fs->read_only || tfs_fenced(fs))
		return;
	tfs_listen_end(fs);
	tfs_deferred_release(fs, 1ULL << fs->member);
	if (tmb_load(&fs->unclean))
		return;
	tmb_store_release(&fs->members[fs->member].recovered_epoch, fs->epoch);
	tmb_store_release(&fs->members[fs->member].forgotten_epoch, fs->epoch);
}

void tfs_statfs(struct tfs *fs, struct tfs_statfs *out)
{
	tmb_u64 table = tfs_table_inodes(fs), most = tfs_most_inodes(fs);
	tmb_u64 used = 1 + tfs_inodes_used(fs);

	out->blocks = fs->blocks - fs->data_start;
	out->blocks_free = tfs_count_free(fs);
	/* The table grows while there are free blocks. */
	table += table < most ? TFS_MIN(out->blocks_free * TFS_INODES_PER_BLOCK, most - table) : 0;
	out->inodes = table ? table - 1 : 0; /* no inode has the number 0 */
	out->inodes_free = used > out->inodes ? 0 : out->inodes - used;
	tfs_statfs_account(fs, out);
}
