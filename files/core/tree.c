// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Radix trees over blocks, as an MMU has them. Readers walk without a lock: each step copies one entry and checks the
 * block number, so a changing or hostile tree can at worst end the walk. Writers hold the lock of the tree's inode;
 * each change is one store of one entry.
 */
#include "tfs_internal.h"

static inline tmb_u64 tfs_span_of(tmb_u32 level) /* blocks below one entry of a node at 'level' (1: leaf node) */
{
	return 1ULL << (TFS_FANOUT_SHIFT * (level - 1));
}

static inline tmb_u64 *tfs_node_entries(struct tfs *fs, tmb_u64 node)
{
	return (tmb_u64 *)tfs_block(fs, node);
}

static inline bool tfs_huge_ok(struct tfs *fs, tmb_u32 level, tmb_u64 block)
{
	return level == 2 && !(block & (TFS_FANOUT - 1)) && tfs_block_ok(fs, block) && tfs_block_ok(fs, block + TFS_FANOUT - 1);
}

static bool tfs_beyond(tmb_u32 height, tmb_u64 fblock)
{
	return height < 7 && fblock >> (TFS_FANOUT_SHIFT * height);
}

int tfs_tree_look(struct tfs *fs, tmb_u64 root, tmb_u64 fblock, tmb_u64 count, struct tfs_run *run)
{
	tmb_u32 height = tfs_root_height(root), level;
	tmb_u64 node = root & TFS_BLOCKNR_MASK;

	run->block = 0;
	run->count = count;
	if (!node)
		return 0;
	if (height > TFS_MAX_HEIGHT || !tfs_block_ok(fs, node))
		return -EUCLEAN;
	if (tfs_beyond(height, fblock))
		return 0;
	if (!height) {
		run->block = node;
		run->count = 1;
		return 0;
	}
	for (level = height; level; level--) {
		tmb_u64 *entries = tfs_node_entries(fs, node), span = tfs_span_of(level);
		tmb_u32 i = (fblock / span) & (TFS_FANOUT - 1);
		tmb_u64 entry = tmb_load_acquire(&entries[i]), block = entry & TFS_BLOCKNR_MASK;
		tmb_u64 within = fblock & (span - 1), n = span - within;

		if (!block) {
			while (n < count && ++i < TFS_FANOUT && !(tmb_load(&entries[i]) & TFS_BLOCKNR_MASK))
				n += span;
			run->count = TFS_MIN(n, count);
			return 0;
		}
		if (entry & TFS_ENTRY_HUGE) {
			if (!tfs_huge_ok(fs, level, block))
				return -EUCLEAN;
			run->block = block + within;
			while (n < count && ++i < TFS_FANOUT) {
				block += TFS_FANOUT;
				if (tmb_load_acquire(&entries[i]) != (block | TFS_ENTRY_HUGE) || !tfs_huge_ok(fs, level, block))
					break;
				n += span;
			}
			run->count = TFS_MIN(n, count);
			return 0;
		}
		if (!tfs_block_ok(fs, block))
			return -EUCLEAN;
		if (level == 1) {
			run->block = block;
			n = 1;
			while (n < count && ++i < TFS_FANOUT && tfs_block_ok(fs, block + n) &&
			       tmb_load_acquire(&entries[i]) == block + n)
				n++;
			run->count = n;
			return 0;
		}
		node = block;
	}
	return 0;
}

static int tfs_new_node(struct tfs *fs, tmb_u64 *nodes, tmb_u64 *node) /* tagged */
{
	struct tfs_run run;
	int err = tfs_alloc(fs, 0, 1, &run);

	if (err)
		return err;
	memset(tfs_block(fs, run.block), 0, TFS_BLOCK);
	tfs_persist(fs, tfs_block(fs, run.block), TFS_BLOCK);
	*node = run.block;
	(*nodes)++;
	return 0;
}

/* Stores an entry or a root word. The blocks that it refers to, or referred to, are tagged and filled. */
static void tfs_set_entry(struct tfs *fs, tmb_u64 *slot, tmb_u64 value)
{
	tfs_barrier(fs);
	tmb_store_release(slot, value);
	tfs_persist(fs, slot, sizeof(*slot));
}

/* Gives the blocks that an entry now refers to the map byte 'mark'. */
static void tfs_mark_linked(struct tfs *fs, tmb_u64 block, tmb_u64 count, tmb_u8 mark)
{
	tfs_barrier(fs);
	tfs_set_map(fs, block, count, mark);
}

/* Makes the tree at least 'height' high. */
static int tfs_grow(struct tfs *fs, tmb_u64 *rootp, tmb_u32 height, tmb_u8 mark, tmb_u64 *nodes)
{
	tmb_u64 root = tmb_load(rootp), node;
	int err;

	if (!(root & TFS_BLOCKNR_MASK)) {
		if (!height)
			return 0;
		err = tfs_new_node(fs, nodes, &node);
		if (err)
			return err;
		tfs_set_entry(fs, rootp, tfs_root_word(node, height));
		tfs_mark_linked(fs, node, 1, mark);
		return 0;
	}
	while (tfs_root_height(root) < height) {
		err = tfs_new_node(fs, nodes, &node);
		if (err)
			return err;
		tfs_node_entries(fs, node)[0] = root & TFS_BLOCKNR_MASK;
		tfs_persist(fs, tfs_node_entries(fs, node), sizeof(tmb_u64));
		root = tfs_root_word(node, tfs_root_height(root) + 1);
		tfs_set_entry(fs, rootp, root);
		tfs_mark_linked(fs, node, 1, mark);
	}
	return 0;
}

/* A run that is being linked at file block 'fblock' of a tree. */
struct tfs_linking {
	struct tfs *fs;
	tmb_u64 *rootp, fblock;
	const struct tfs_run *run;
	tmb_u8 mark;
	tmb_u64 *nodes;
};

/* Returns the node at level 'bottom' that holds file block 'at', and makes nodes that are missing on the way down. */
static int tfs_node_for(const struct tfs_linking *l, tmb_u64 at, tmb_u32 bottom, tmb_u64 *node)
{
	struct tfs *fs = l->fs;
	tmb_u64 root = tmb_load(l->rootp);
	tmb_u32 level = tfs_root_height(root);

	if (level > TFS_MAX_HEIGHT)
		return tfs_damage(fs, "tree too high", root, l->fblock);
	for (*node = root & TFS_BLOCKNR_MASK; tfs_block_ok(fs, *node); level--) {
		tmb_u64 *slot, entry, child;
		int err;

		if (level <= bottom)
			return 0;
		slot = &tfs_node_entries(fs, *node)[(at / tfs_span_of(level)) & (TFS_FANOUT - 1)];
		entry = tmb_load(slot);
		if (entry & TFS_ENTRY_HUGE)
			return tfs_damage(fs, "large entry where a hole was", entry, l->fblock);
		child = entry & TFS_BLOCKNR_MASK;
		if (!child) {
			err = tfs_new_node(fs, l->nodes, &child);
			if (err)
				return err;
			tfs_set_entry(fs, slot, child);
			tfs_mark_linked(fs, child, 1, l->mark);
		}
		*node = child;
	}
	return tfs_damage(fs, "tree node out of range", *node, l->fblock);
}

/* Links a run of TFS_FANOUT aligned blocks by one large entry. 1: linked; 0: a leaf node is there; or an error. */
static int tfs_link_large(const struct tfs_linking *l)
{
	tmb_u64 node, *slot;
	int err = tfs_node_for(l, l->fblock, 2, &node);

	if (err)
		return err;
	slot = &tfs_node_entries(l->fs, node)[(l->fblock >> TFS_FANOUT_SHIFT) & (TFS_FANOUT - 1)];
	if (tmb_load(slot))
		return 0;
	tfs_set_entry(l->fs, slot, l->run->block | TFS_ENTRY_HUGE);
	return 1;
}

/* Links the run's blocks from number 'done' on, as far as one leaf node holds them. Returns how many are linked then. */
static tmb_u64 tfs_link_in_leaf(const struct tfs_linking *l, tmb_u64 node, tmb_u64 done)
{
	tmb_u64 *entries = tfs_node_entries(l->fs, node);
	tmb_u32 first = (l->fblock + done) & (TFS_FANOUT - 1), i = first;

	tfs_barrier(l->fs);
	for (; i < TFS_FANOUT && done < l->run->count; i++, done++)
		tmb_store_release(&entries[i], l->run->block + done);
	tfs_persist(l->fs, &entries[first], (i - first) * sizeof(*entries));
	return done;
}

static int tfs_link_blocks(const struct tfs_linking *l, bool large)
{
	tmb_u64 done = 0;
	int err;

	if (large) {
		err = tfs_link_large(l);
		if (err < 0)
			return err;
		done = err ? l->run->count : 0;
	}
	while (done < l->run->count) {
		tmb_u64 node;

		err = tfs_node_for(l, l->fblock + done, 1, &node);
		if (err)
			return err;
		done = tfs_link_in_leaf(l, node, done);
	}
	return 0;
}

int tfs_tree_link(struct tfs *fs, tmb_u64 *rootp, tmb_u64 fblock, const struct tfs_run *run, tmb_u8 mark, tmb_u64 *nodes)
{
	const struct tfs_linking l = {fs, rootp, fblock, run, mark, nodes};
	bool large = run->count == TFS_FANOUT && !(run->block & (TFS_FANOUT - 1)) && !(fblock & (TFS_FANOUT - 1));
	tmb_u64 last = fblock + run->count - 1, root = tmb_load(rootp);
	tmb_u32 height = large ? 2 : 0;
	int err;

	while (height <= TFS_MAX_HEIGHT && tfs_beyond(height, last))
		height++;
	if (height > TFS_MAX_HEIGHT)
		return -EFBIG;
	if (tfs_root_height(root) > TFS_MAX_HEIGHT)
		return tfs_damage(fs, "tree too high", root, fblock);
	tfs_persist(fs, tfs_block(fs, run->block), run->count << TFS_BLOCK_SHIFT);
	if (!height && !root) {
		tfs_set_entry(fs, rootp, tfs_root_word(run->block, 0));
	} else {
		/* A single-block tree grows to the height asked for, no higher: block 0 then exists, and the run goes beside it. */
		err = tfs_grow(fs, rootp, height ? height : 1, mark, nodes);
		if (!err)
			err = tfs_link_blocks(&l, large);
		if (err)
			return err;
	}
	tfs_mark_linked(fs, run->block, run->count, mark);
	return 0;
}

/* Frees the blocks of a run that could not be linked as a whole, but for those that were. */
static TFS_SELDOM void tfs_keep_linked(struct tfs *fs, tmb_u64 *rootp, tmb_u64 fblock, const struct tfs_run *run, tmb_u8 mark, tmb_u64 *taken)
{
	for (tmb_u64 i = 0; i < run->count; i++) {
		struct tfs_run there;
		bool linked = !tfs_tree_map(fs, tmb_load(rootp), fblock + i, 1, &there) && there.block == run->block + i;

		*taken += linked;
		tfs_set_map(fs, run->block + i, 1, linked ? mark : TFS_MAP_FREE);
	}
}

int tfs_tree_add(struct tfs *fs, tmb_u64 *rootp, tmb_u64 fblock, const struct tfs_run *run, tmb_u8 mark, tmb_u64 *taken)
{
	int err = tfs_tree_link(fs, rootp, fblock, run, mark, taken);

	if (!err)
		*taken += run->count;
	else
		tfs_keep_linked(fs, rootp, fblock, run, mark, taken);
	return err;
}

/* --- removing --------------------------------------------------------------------------------------------- */

static bool tfs_gone_add(struct tfs_gone *gone, tmb_u64 block, tmb_u64 count)
{
	if (gone->n && gone->runs[gone->n - 1].block + gone->runs[gone->n - 1].count == block) {
		gone->runs[gone->n - 1].count += count;
	} else {
		if (gone->n == TFS_GONE_RUNS)
			return false;
		gone->runs[gone->n].block = block;
		gone->runs[gone->n].count = count;
		gone->n++;
	}
	gone->blocks += count;
	return true;
}

/* Unlinks one entry that refers to 'count' blocks. */
static bool tfs_unlink_entry(struct tfs *fs, tmb_u64 *slot, tmb_u64 block, tmb_u64 count, struct tfs_gone *gone)
{
	if (gone->n == TFS_GONE_RUNS)
		return false;
	tfs_set_map(fs, block, count, tfs_tag(fs));
	tfs_set_entry(fs, slot, 0);
	return tfs_gone_add(gone, block, count);
}

/* Replaces a large entry, of which only a part is removed, by a node of single entries. */
static int tfs_split(struct tfs *fs, tmb_u64 *slot, tmb_u64 block, tmb_u64 *node, struct tfs_gone *gone)
{
	tmb_u64 *spare = gone->spare[0] ? &gone->spare[0] : &gone->spare[1];

	if (!*spare && tfs_alloc_spare(fs, spare))
		return -ENOSPC;
	*node = *spare;
	*spare = 0;
	for (tmb_u32 i = 0; i < TFS_FANOUT; i++)
		tfs_node_entries(fs, *node)[i] = block + i;
	tfs_persist(fs, tfs_node_entries(fs, *node), TFS_BLOCK);
	tfs_set_entry(fs, slot, *node);
	tfs_mark_linked(fs, *node, 1, TFS_MAP_USED);
	return 0;
}

bool tfs_tree_splits(struct tfs *fs, tmb_u64 root, tmb_u64 fblock)
{
	tmb_u64 node = root & TFS_BLOCKNR_MASK;
	tmb_u32 height = tfs_root_height(root);

	if (!(fblock & (TFS_FANOUT - 1)) || height < 2 || height > TFS_MAX_HEIGHT || tfs_beyond(height, fblock))
		return false;
	for (tmb_u32 level = height; tfs_block_ok(fs, node); level--) {
		tmb_u64 entry = tmb_load(&tfs_node_entries(fs, node)[(fblock / tfs_span_of(level)) & (TFS_FANOUT - 1)]);

		if (level == 2)
			return entry & TFS_ENTRY_HUGE;
		node = entry & TFS_BLOCKNR_MASK;
	}
	return false;
}

/* Unlinks [from, to), relative to the first file block below 'node'. 0, 1 (gone is full) or -errno. */
static int tfs_unlink_below(struct tfs *fs, tmb_u64 node, tmb_u32 level, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone)
{
	tmb_u64 *entries = tfs_node_entries(fs, node), span = tfs_span_of(level);

	tfs_os_yield();
	for (tmb_u64 i = from / span; i < TFS_FANOUT && i * span < to; i++) {
		tmb_u64 entry = tmb_load(&entries[i]), block = entry & TFS_BLOCKNR_MASK, start = i * span;
		tmb_u64 a = from > start ? from - start : 0, b = TFS_MIN(to - start, span);
		bool whole = !a && b == span;
		int err;

		if (!block)
			continue;
		if (entry & TFS_ENTRY_HUGE) {
			if (!tfs_huge_ok(fs, level, block))
				return tfs_damage(fs, "large tree entry out of range", entry, node);
			if (whole) {
				if (!tfs_unlink_entry(fs, &entries[i], block, TFS_FANOUT, gone))
					return 1;
				continue;
			}
			err = tfs_split(fs, &entries[i], block, &block, gone);
			if (err)
				return err;
			gone->blocks--; /* one node more; the caller subtracts 'gone' from the inode's count */
		}
		if (!tfs_block_ok(fs, block))
			return tfs_damage(fs, "tree entry out of range", entry, node);
		if (level > 1) {
			err = tfs_unlink_below(fs, block, level - 1, a, b, gone);
			if (err)
				return err;
			if (!whole)
				continue;
		}
		if (!tfs_unlink_entry(fs, &entries[i], block, 1, gone))
			return 1;
	}
	return 0;
}

int tfs_tree_unlink(struct tfs *fs, tmb_u64 *rootp, tmb_u64 from, tmb_u64 to, struct tfs_gone *gone)
{
	tmb_u64 root = tmb_load(rootp), block = root & TFS_BLOCKNR_MASK, covered;
	tmb_u32 height = tfs_root_height(root);
	int err = 0;

	if (!block)
		return 0;
	if (height > TFS_MAX_HEIGHT || !tfs_block_ok(fs, block))
		return tfs_damage(fs, "tree root out of range", root, 0);
	covered = 1ULL << (TFS_FANOUT_SHIFT * height);
	to = TFS_MIN(to, covered);
	if (from >= to)
		return 0;
	if (height)
		err = tfs_unlink_below(fs, block, height, from, to, gone);
	if (!err && !from && to == covered && !tfs_unlink_entry(fs, rootp, block, 1, gone))
		err = 1;
	return err;
}

/* --- whole trees ------------------------------------------------------------------------------------------- */

static int tfs_walk_below(struct tfs *fs, tmb_u64 node, tmb_u32 level, tfs_visit visit, void *ctx, tmb_u64 *budget)
{
	int err;

	if (!tfs_block_ok(fs, node))
		return tfs_damage(fs, "tree entry out of range", node, level);
	/* A tree that refers to more blocks than the area has contains a cycle. */
	if (!*budget)
		return tfs_damage(fs, "tree without end", node, level);
	--*budget;
	if (level) {
		tmb_u64 *entries = tfs_node_entries(fs, node);

		tfs_os_yield();
		for (tmb_u32 i = 0; i < TFS_FANOUT; i++) {
			tmb_u64 entry = tmb_load(&entries[i]), block = entry & TFS_BLOCKNR_MASK;

			if (!block)
				continue;
			if (entry & TFS_ENTRY_HUGE) {
				if (!tfs_huge_ok(fs, level, block) || *budget < TFS_FANOUT)
					return tfs_damage(fs, "large tree entry out of range", entry, node);
				*budget -= TFS_FANOUT;
				err = visit(fs, ctx, block, TFS_FANOUT, false);
			} else {
				err = tfs_walk_below(fs, block, level - 1, visit, ctx, budget);
			}
			if (err)
				return err;
		}
	}
	return visit(fs, ctx, node, 1, level > 0);
}

int tfs_tree_walk(struct tfs *fs, tmb_u64 root, tfs_visit visit, void *ctx, tmb_u64 *budget)
{
	if (!(root & TFS_BLOCKNR_MASK))
		return 0;
	if (tfs_root_height(root) > TFS_MAX_HEIGHT)
		return tfs_damage(fs, "tree too high", root, 0);
	return tfs_walk_below(fs, root & TFS_BLOCKNR_MASK, tfs_root_height(root), visit, ctx, budget);
}

struct tfs_node_change {
	tmb_u8 from, to;
};

static int tfs_visit_change(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node)
{
	const struct tfs_node_change *change = ctx;

	(void)node;
	for (tmb_u64 i = 0; i < count; i++)
		if (tmb_load(tfs_map_bytes(fs) + block + i) != change->from)
			return tfs_damage(fs, "block of a tree is not its own", block + i, tmb_load(tfs_map_bytes(fs) + block + i));
	tfs_set_map(fs, block, count, change->to);
	return 0;
}

int tfs_tree_mark(struct tfs *fs, tmb_u64 root, tmb_u8 from, tmb_u8 to)
{
	struct tfs_node_change change = {from, to};
	tmb_u64 budget = fs->blocks;

	return tfs_tree_walk(fs, root, tfs_visit_change, &change, &budget);
}

static int tfs_visit_count(struct tfs *fs, void *ctx, tmb_u64 block, tmb_u64 count, bool node)
{
	(void)fs, (void)block, (void)node;
	*(tmb_u64 *)ctx += count;
	return 0;
}

tmb_u64 tfs_tree_count(struct tfs *fs, tmb_u64 root)
{
	tmb_u64 blocks = 0, budget = fs->blocks;

	tfs_tree_walk(fs, root, tfs_visit_count, &blocks, &budget);
	return blocks;
}
