// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "mutate.h"

#include <stdlib.h>
#include <string.h>

#define MEMBERS 4u /* transactions of so many members are changed */

const char *const mutation_names[MUTATE_KINDS] = {
	"super block", "transaction", "block map", "inode", "lock", "tree node", "directory entry", "hash index", "attributes", "file lock",
};

struct place {
	tmb_u64 offset; /* of a structure */
	tmb_u32 words;	/* of it that are worth changing */
};

struct list {
	struct place *at;
	tmb_u32 n, room;
};

struct mutator {
	tmb_u64 blocks, data_start, map_start;
	struct list lists[MUTATE_KINDS];
	struct list used; /* blocks that something refers to */
	tmb_u8 *seen;	  /* a byte per block */
	bool failed;
};

static tmb_u64 load(const void *area, tmb_u64 offset)
{
	return tmb_load((const tmb_u64 *)((const tmb_u8 *)area + offset));
}

static void add(struct mutator *m, struct list *list, tmb_u64 offset, tmb_u32 words)
{
	if (list->n == list->room) {
		tmb_u32 room = list->room ? 2 * list->room : 64;
		struct place *at = realloc(list->at, room * sizeof(*at));

		if (!at) {
			m->failed = true;
			return;
		}
		list->at = at;
		list->room = room;
	}
	list->at[list->n++] = (struct place){offset, words};
}

static bool ok(struct mutator *m, tmb_u64 block)
{
	return block >= m->data_start && block < m->blocks;
}

typedef void (*visit)(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock);

/* Walks each block once, so that it ends for any tree. */
static void walk(struct mutator *m, const void *area, tmb_u64 block, tmb_u32 level, tmb_u64 fblock, visit leaf)
{
	if (!ok(m, block) || level > TFS_MAX_HEIGHT || m->seen[block])
		return;
	m->seen[block] = 1;
	add(m, &m->used, block, 1);
	if (!level) {
		if (leaf)
			leaf(m, area, block, fblock);
		return;
	}
	add(m, &m->lists[MUTATE_NODE], block << TFS_BLOCK_SHIFT, TFS_FANOUT);
	for (tmb_u32 i = 0; i < TFS_FANOUT; i++) {
		tmb_u64 entry = load(area, (block << TFS_BLOCK_SHIFT) + 8 * i);

		if (!entry)
			continue;
		/* Present entries get a list of their own: most of a node is holes. */
		add(m, &m->lists[MUTATE_NODE], (block << TFS_BLOCK_SHIFT) + 8 * i, 1);
		if (!(entry & TFS_ENTRY_HUGE))
			walk(m, area, entry & TFS_BLOCKNR_MASK, level - 1, fblock * TFS_FANOUT + i, leaf);
	}
}

static void walk_root(struct mutator *m, const void *area, tmb_u64 root, visit leaf)
{
	walk(m, area, root & TFS_BLOCKNR_MASK, (root >> TFS_HEIGHT_SHIFT) & 15, 0, leaf);
}

static void entries(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock)
{
	(void)fblock;
	for (tmb_u64 i = 0; i < TFS_GRANULES_PER_BLOCK;) {
		tmb_u64 at = (block << TFS_BLOCK_SHIFT) + i * TFS_GRANULE;
		tmb_u8 step = (tmb_u8)(load(area, at + 8) >> 40);

		add(m, &m->lists[MUTATE_ENTRY], at, 3); /* reference; hash and lengths; the name's start */
		i += step ? step : 1;
	}
}

static void index_words(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock)
{
	(void)fblock;
	for (tmb_u32 i = 0; i < TFS_FANOUT; i++)
		if (load(area, (block << TFS_BLOCK_SHIFT) + 8 * i) || !(i % 64))
			add(m, &m->lists[MUTATE_INDEX], (block << TFS_BLOCK_SHIFT) + 8 * i, 1);
}

static void image(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock)
{
	(void)area;
	add(m, &m->lists[MUTATE_XATTR], block << TFS_BLOCK_SHIFT, fblock ? TFS_FANOUT : 8);
}

static void records(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock)
{
	(void)area, (void)fblock;
	for (tmb_u32 i = 0; i < 4; i++)
		add(m, &m->lists[MUTATE_RECORD], (block << TFS_BLOCK_SHIFT) + i * sizeof(struct tfs_lock_record), 6);
}

static void inodes(struct mutator *m, const void *area, tmb_u64 block, tmb_u64 fblock)
{
	for (tmb_u32 i = 0; i < TFS_INODES_PER_BLOCK; i++) {
		tmb_u64 at = (block << TFS_BLOCK_SHIFT) + i * sizeof(struct tfs_inode);
		struct tfs_inode inode;

		memcpy(&inode, (const tmb_u8 *)area + at, sizeof(inode));
		if (!inode.state_gen && fblock)
			continue;
		add(m, &m->lists[MUTATE_INODE], at, sizeof(inode) / 8);
		add(m, &m->lists[MUTATE_LOCK], at + offsetof(struct tfs_inode, lock), 4); /* word, waiters, openers, mappers */
		walk_root(m, area, inode.root, (inode.mode & 0170000) == 0040000 ? entries : NULL);
		walk_root(m, area, inode.index_root & ((1ULL << TFS_INDEX_LOG_SHIFT) - 1), index_words);
		walk_root(m, area, inode.xattr_root, image);
		walk_root(m, area, inode.locks, records);
	}
}

struct mutator *mutator_new(const void *area, tmb_u64 bytes)
{
	struct mutator *m = calloc(1, sizeof(*m));

	if (!m)
		return NULL;
	m->blocks = bytes >> TFS_BLOCK_SHIFT;
	m->map_start = 1 + TFS_MEMBERS * TFS_MEMBER_BLOCKS;
	m->data_start = m->map_start + (m->blocks + TFS_BLOCK - 1) / TFS_BLOCK;
	m->seen = calloc(1, m->blocks);
	if (!m->seen || m->data_start >= m->blocks)
		goto fail;
	/* Magic, version and features stay: without them there is no file system to use or repair. */
	add(m, &m->lists[MUTATE_SUPER], offsetof(struct tfs_super, blocks), 1);
	add(m, &m->lists[MUTATE_SUPER], offsetof(struct tfs_super, member_start), 8);
	for (int i = 0; i < 6; i++)
		add(m, &m->lists[MUTATE_SUPER], offsetof(struct tfs_super, itable_root), 2);
	add(m, &m->lists[MUTATE_SUPER], offsetof(struct tfs_super, rename_lock), 10);
	add(m, &m->lists[MUTATE_LOCK], offsetof(struct tfs_super, itable_lock), 2);
	add(m, &m->lists[MUTATE_LOCK], offsetof(struct tfs_super, rename_lock), 2);
	for (tmb_u32 member = 0; member < MEMBERS; member++) {
		tmb_u64 base = (1 + (tmb_u64)member * TFS_MEMBER_BLOCKS) << TFS_BLOCK_SHIFT;

		for (tmb_u32 i = 0; i < 4; i++)
			add(m, &m->lists[MUTATE_TX], base + i * sizeof(struct tfs_tx), sizeof(struct tfs_tx) / 8);
		add(m, &m->lists[MUTATE_TX], base + offsetof(struct tfs_member_area, pins), 4 * sizeof(struct tfs_pin) / 8);
		add(m, &m->lists[MUTATE_TX], base + offsetof(struct tfs_member_area, inodes_used), 5);
		add(m, &m->lists[MUTATE_TX], base + offsetof(struct tfs_member_area, waits), 4 * sizeof(struct tfs_lock_wait) / 8);
	}
	walk_root(m, area, load(area, offsetof(struct tfs_super, itable_root)), inodes);
	for (tmb_u64 block = m->data_start & ~7ULL; block < m->blocks; block += 8)
		if (load(area, (m->map_start << TFS_BLOCK_SHIFT) + block))
			add(m, &m->lists[MUTATE_MAP], (m->map_start << TFS_BLOCK_SHIFT) + block, 1);
	if (!m->used.n) /* not even an inode table is found */
		add(m, &m->used, m->data_start, 1);
	if (!m->failed)
		return m;
fail:
	mutator_free(m);
	return NULL;
}

void mutator_free(struct mutator *m)
{
	for (int i = 0; i < MUTATE_KINDS; i++)
		free(m->lists[i].at);
	free(m->used.at);
	free(m->seen);
	free(m);
}

static tmb_u64 pick_block(struct mutator *m, mutate_take take, void *ctx)
{
	return m->used.at[take(ctx, 2) % m->used.n].offset;
}

tmb_u64 mutate_value(struct mutator *m, tmb_u64 old, tmb_u64 offset, mutate_take take, void *ctx)
{
	switch (take(ctx, 1) % 18) {
	case 0: return 0;
	case 1: return ~0ULL;
	case 2: return take(ctx, 8);
	case 3:
	case 4: return old ^ 1ULL << (take(ctx, 1) & 63);
	case 5: return old + (tmb_u64)(tmb_s64)(signed char)take(ctx, 1);
	case 6: return pick_block(m, take, ctx);
	case 7: return pick_block(m, take, ctx) | (take(ctx, 1) % 6) << TFS_HEIGHT_SHIFT;
	case 8: return (pick_block(m, take, ctx) & ~(tmb_u64)(TFS_FANOUT - 1)) | TFS_ENTRY_HUGE;
	case 9: return offset >> TFS_BLOCK_SHIFT;					   /* the block it lies in */
	case 10: return offset >> TFS_BLOCK_SHIFT | (take(ctx, 1) % 6) << TFS_HEIGHT_SHIFT; /* with a height */
	case 11: return m->blocks - 1 - take(ctx, 1) % 3;				   /* the end of the area */
	case 12: return take(ctx, 1);							   /* a number of an inode, a count */
	case 13: return (old & ~TFS_REF_INO_MASK) | take(ctx, 1);			   /* an entry's inode */
	case 14: return tmb_lock_word((tmb_u32)take(ctx, 1) % 66, (tmb_u32)take(ctx, 1) % 4, 1);
	case 15: return (old & ~0xffULL) | take(ctx, 1) % 6; /* a state */
	case 16: {
		tmb_u32 shift = 8 * (take(ctx, 1) & 7); /* one byte: the block map, lengths in entries */
		static const tmb_u8 bytes[] = {0, 1, 2, 3, 5, 63, 64, 65, 0x7f, 0x80, 0xfd, 0xfe, 0xff};

		return (old & ~(0xffULL << shift)) | (tmb_u64)bytes[take(ctx, 1) % sizeof(bytes)] << shift;
	}
	default: return 1ULL << (take(ctx, 1) & 63);
	}
}

struct mutation mutate(struct mutator *m, void *area, mutate_take take, void *ctx)
{
	/* The structures that fill most of a file system come up more often. */
	static const tmb_u8 kinds[] = {
		MUTATE_SUPER, MUTATE_TX,    MUTATE_TX,	  MUTATE_MAP,	MUTATE_INODE, MUTATE_INODE, MUTATE_INODE,  MUTATE_LOCK,
		MUTATE_NODE,  MUTATE_NODE,  MUTATE_ENTRY, MUTATE_ENTRY, MUTATE_INDEX, MUTATE_XATTR, MUTATE_RECORD, MUTATE_LOCK,
	};
	struct mutation done = {.kind = kinds[take(ctx, 1) % sizeof(kinds)]};
	struct list *list = &m->lists[done.kind];
	struct place place;
	tmb_u64 *word, how = take(ctx, 1);

	if (!list->n)
		list = &m->lists[done.kind = MUTATE_INODE];
	if (!list->n)
		list = &m->lists[done.kind = MUTATE_SUPER];
	place = list->at[take(ctx, 2) % list->n];
	done.offset = place.offset + 8 * (place.words == 1 ? 0 : take(ctx, 2) % place.words);
	word = (tmb_u64 *)((tmb_u8 *)area + done.offset);
	done.old = tmb_load(word);
	if (how % 16 == 0 && place.words > 1) {
		struct place from = list->at[take(ctx, 2) % list->n];
		tmb_u32 words = from.words < place.words ? from.words : place.words;

		done.offset = place.offset;
		done.old = load(area, place.offset);
		done.new_value = load(area, from.offset);
		for (tmb_u32 i = 0; i < words; i++)
			tmb_store((tmb_u64 *)((tmb_u8 *)area + place.offset) + i, load(area, from.offset + 8 * i));
		return done;
	}
	done.new_value = how % 16 == 1 ? load(area, list->at[take(ctx, 2) % list->n].offset) : mutate_value(m, done.old, done.offset, take, ctx);
	tmb_store(word, done.new_value);
	return done;
}
