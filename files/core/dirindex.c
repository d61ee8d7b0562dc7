// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The hash index of a directory with more than one block: a table with open addressing, in a tree of its own. dir.c says what the index guarantees.
 */
#include "tfs_internal.h"

#define INDEX_MIN_LOG 9u  /* one block of 512 */
#define INDEX_MAX_LOG 34u
#define PROBE_MAX (1u << 20)

static tmb_u32 tfs_index_log(tmb_u64 index_root)
{
	return (index_root >> TFS_INDEX_LOG_SHIFT) & 63;
}

/* Returns the root word of the index's tree: height and block only. */
static tmb_u64 tfs_index_tree(tmb_u64 index_root)
{
	return index_root & ((1ULL << TFS_INDEX_LOG_SHIFT) - 1);
}

/* A position in the probe sequence of a hash. */
struct tfs_probe {
	tmb_u64 tree, mask, at, left;
	tmb_u64 *block;
	tmb_u64 block_no;
};

static inline int tfs_probe_start(struct tfs_probe *p, tmb_u64 index_root, tmb_u32 hash)
{
	tmb_u32 log = tfs_index_log(index_root);

	if (log < INDEX_MIN_LOG || log > INDEX_MAX_LOG)
		return -EUCLEAN;
	p->tree = tfs_index_tree(index_root);
	p->mask = (1ULL << log) - 1;
	/* Spreads the 32 bits over larger tables. */
	p->at = (log > 32 ? (tmb_u64)hash << (log - 32) : hash) & p->mask;
	p->left = TFS_MIN(p->mask + 1, PROBE_MAX);
	p->block = NULL;
	p->block_no = 0;
	return 0;
}

/* Returns the address of the next table entry; NULL: no more, or damaged. */
static inline tmb_u64 *tfs_probe_next(struct tfs *fs, struct tfs_probe *p)
{
	tmb_u64 at = p->at;

	if (!p->left--)
		return NULL;
	if (!p->block || at / TFS_FANOUT != p->block_no) {
		struct tfs_run run;

		if (tfs_tree_look(fs, p->tree, at / TFS_FANOUT, 1, &run) || !run.block)
			return NULL;
		p->block_no = at / TFS_FANOUT;
		p->block = tfs_block(fs, run.block);
	}
	p->at = (at + 1) & p->mask;
	return p->block + at % TFS_FANOUT;
}

int tfs_index_find(struct tfs *fs, struct tfs_inode *dir, tmb_u64 index_root, const char *name, tmb_u32 len,
			 struct tfs_slot *slot)
{
	tmb_u32 hash = slot->hash;
	struct tfs_probe p;
	tmb_u64 *e;
	int err = tfs_probe_start(&p, index_root, hash);

	if (err)
		return err;
	while ((e = tfs_probe_next(fs, &p))) {
		tmb_u64 value = tmb_load_acquire(e), granule;

		if (!value)
			return -ENOENT;
		if (value == TFS_INDEX_TOMB || value >> 32 != hash || !(tmb_u32)value)
			continue;
		granule = (tmb_u32)value - 1;
		slot->entry = tfs_granule_at(fs, dir, granule);
		slot->granule = granule;
		if (slot->entry && tfs_entry_matches(slot->entry, TFS_GRANULES_PER_BLOCK - granule % TFS_GRANULES_PER_BLOCK, name, len,
					   hash, &slot->ref)) {
			slot->place = e;
			return 0;
		}
	}
	return -EUCLEAN;
}

/* Stores an entry in a table that has room. *used grows before an empty place is taken, so it may be too large and is never too small. *probes: how many
 * more places may be probed. -ENOSPC: they do not suffice, since a member has chosen names of one hash. */
static int tfs_index_put(struct tfs *fs, tmb_u64 index_root, tmb_u32 hash, tmb_u64 granule, tmb_u64 *used, tmb_u64 *probes)
{
	struct tfs_probe p;
	tmb_u64 *e;
	int err = tfs_probe_start(&p, index_root, hash);

	if (err)
		return err;
	while (*probes && (e = tfs_probe_next(fs, &p))) {
		tmb_u64 value = tmb_load(e);

		--*probes;
		if (value && value != TFS_INDEX_TOMB)
			continue;
		if (!value) {
			tmb_store(used, tmb_load(used) + 1);
			tfs_persist(fs, used, sizeof(*used));
			tfs_barrier(fs);
		}
		tmb_store_release(e, (tmb_u64)hash << 32 | (granule + 1));
		tfs_persist(fs, e, sizeof(*e));
		return 0;
	}
	return *probes ? tfs_damage(fs, "directory index without room", index_root, hash) : -ENOSPC;
}

/* Builds a table of a size that fits and replaces the old one by it. */
static int tfs_index_build(struct tfs *fs, struct tfs_inode *dir)
{
	tmb_u64 old = tmb_load(&dir->index_root), blocks = tfs_dir_blocks(fs, dir), used = 0, taken = 0, root = 0, done = 0, n, probes, had;
	tmb_u64 entries = TFS_MIN(tmb_load(&dir->entries), blocks * TFS_GRANULES_PER_BLOCK);
	tmb_u32 log = INDEX_MIN_LOG;
	int err = 0;

	while (log < INDEX_MAX_LOG && (1ULL << log) < (entries + 64) * 3)
		log++;
	n = 1ULL << log >> TFS_FANOUT_SHIFT;
	had = tfs_tree_count(fs, tfs_index_tree(old));
	if (n > had && n - had > tfs_blocks_left(fs, dir))
		return -EDQUOT;
	/* Two or three probes per entry are enough, unless a member chose names of one hash. */
	probes = PROBE_MAX + (64ULL << log);
	while (done < n && !err) {
		struct tfs_run run;

		err = tfs_alloc(fs, 0, n - done, &run);
		if (err)
			break;
		memset(tfs_block(fs, run.block), 0, run.count << TFS_BLOCK_SHIFT);
		err = tfs_tree_add(fs, &root, done, &run, tfs_tag(fs), &taken);
		done += run.count;
	}
	root |= (tmb_u64)log << TFS_INDEX_LOG_SHIFT;
	for (tmb_u64 b = 0; b < blocks && !err; b++) {
		struct tfs_dirent *block = tfs_granule_at(fs, dir, b * TFS_GRANULES_PER_BLOCK);

		if (!block) {
			err = tfs_damage(fs, "directory block missing", tmb_load(&dir->root), b);
			break;
		}
		err = tfs_long_loop(fs, b);
		for (tmb_u32 i = 0; i < TFS_GRANULES_PER_BLOCK && !err;) {
			tmb_u8 step = tmb_load(&block[i].granules);

			if (tmb_load(&block[i].ref))
				err = tfs_index_put(fs, root, tmb_load(&block[i].hash), b * TFS_GRANULES_PER_BLOCK + i, &used, &probes);
			i += step ? step : 1;
		}
	}
	if (err) {
		tfs_tree_mark(fs, tfs_index_tree(root), tfs_tag(fs), TFS_MAP_FREE);
		return err;
	}
	tfs_tree_mark(fs, tfs_index_tree(old), TFS_MAP_USED, tfs_tag(fs));
	tfs_barrier(fs);
	tmb_store(&dir->index_used, used);
	tmb_store_release(&dir->index_root, root);
	tfs_persist(fs, &dir->index_root, 2 * sizeof(dir->index_root));
	tfs_barrier(fs);
	tfs_tree_mark(fs, tfs_index_tree(root), tfs_tag(fs), TFS_MAP_USED);
	tfs_tree_mark(fs, tfs_index_tree(old), tfs_tag(fs), TFS_MAP_FREE);
	tfs_count_blocks(fs, dir, (tmb_s64)(taken - had));
	return 0;
}

/* Readers wait until the directory's change is over. */
static void tfs_index_drop(struct tfs *fs, struct tfs_inode *dir)
{
	tmb_u64 old = tmb_load(&dir->index_root), had = tfs_tree_count(fs, tfs_index_tree(old));

	tfs_tree_mark(fs, tfs_index_tree(old), TFS_MAP_USED, tfs_tag(fs));
	tfs_barrier(fs);
	tmb_store_release(&dir->index_root, 0);
	tmb_store(&dir->index_used, 0);
	tfs_persist(fs, &dir->index_root, 2 * sizeof(dir->index_root));
	tfs_barrier(fs);
	tfs_tree_mark(fs, tfs_index_tree(old), tfs_tag(fs), TFS_MAP_FREE);
	tfs_count_blocks(fs, dir, (tmb_s64)(0 - had));
}

int tfs_index_add(struct tfs *fs, struct tfs_inode *dir, struct tfs_slot *slot)
{
	tmb_u64 root = tmb_load(&dir->index_root), probes = PROBE_MAX;
	int err;

	if (slot->granule > 0xfffffffeULL - 1)
		return -ENOSPC; /* 2^32 granules: 256 GiB of names */
	if (!root && tfs_dir_blocks(fs, dir) < 2)
		return 0;
	if (!root || (tmb_load(&dir->index_used) + 1) * 4 > (1ULL << tfs_index_log(root)) * 3) {
		bool full = root && (tmb_load(&dir->index_used) + 1) * 16 > (1ULL << tfs_index_log(root)) * 15;

		/* Without room for a larger table, or with too many names of one hash, the old one gets fuller than it should, then loses its
		 * tombstones, then is dropped and lookups scan. */
		slot->rebuilt = true;
		err = tfs_index_build(fs, dir);
		if (full && (err == -ENOSPC || err == -EDQUOT)) {
			tfs_index_drop(fs, dir);
			err = tfs_index_build(fs, dir);
		}
		if (err && err != -ENOSPC && err != -EDQUOT)
			return err;
		root = tmb_load(&dir->index_root);
		if (!root)
			return 0;
	}
	err = tfs_index_put(fs, root, slot->hash, slot->granule, &dir->index_used, &probes);
	if (err == -ENOSPC) {
		slot->rebuilt = true;
		tfs_index_drop(fs, dir);
		return 0;
	}
	return err;
}

static void tfs_bury(struct tfs *fs, tmb_u64 *place)
{
	tmb_store_release(place, TFS_INDEX_TOMB);
	tfs_persist(fs, place, sizeof(*place));
}

void tfs_index_forget(struct tfs *fs, struct tfs_inode *dir, const struct tfs_slot *slot)
{
	tmb_u64 root = tmb_load(&dir->index_root), known = (tmb_u64)slot->hash << 32 | (slot->granule + 1), *e;
	struct tfs_probe p;

	if (slot->place && tmb_load(slot->place) == known) {
		tfs_bury(fs, slot->place);
		return;
	}
	if (!root || tfs_probe_start(&p, root, slot->hash))
		return;
	while ((e = tfs_probe_next(fs, &p))) {
		tmb_u64 value = tmb_load(e);

		if (!value)
			return;
		if (value == known) {
			tfs_bury(fs, e);
			return;
		}
	}
}
