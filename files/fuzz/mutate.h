/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Damage with a plan: overwrites words of a file system where they mean something (super block, transactions, block map, inodes, tree
 * nodes, directory entries, hash indexes, attribute images, file locks, lock words) with values that nearly make sense there.
 *
 * mutator_new lists the structures of an area, which may be damaged already; mutate changes one of them. What it does follows from the
 * numbers that 'take' gives: a fuzzer's input or a random generator.
 */
#ifndef TFS_MUTATE_H
#define TFS_MUTATE_H

#include "tfs_format.h"

enum mutation_kind { /* their numbers: also in files/host/torture/damage.rs */
	MUTATE_SUPER,
	MUTATE_TX,	/* transaction slots, read pins, lock waits of a few members */
	MUTATE_MAP,	/* the block map */
	MUTATE_INODE,
	MUTATE_LOCK,	/* lock words of inodes and of the super block */
	MUTATE_NODE,	/* nodes of trees */
	MUTATE_ENTRY,	/* directory entries */
	MUTATE_INDEX,	/* hash indexes of directories */
	MUTATE_XATTR,	/* attribute images */
	MUTATE_RECORD,	/* records of file locks */
	MUTATE_KINDS
};

typedef tmb_u64 (*mutate_take)(void *ctx, unsigned bytes); /* a number of that many bytes */

struct mutator;
/* NULL: no memory, or not even the super block's sizes can be. */
struct mutator *mutator_new(const void *area, tmb_u64 bytes);
void mutator_free(struct mutator *m);

struct mutation {
	enum mutation_kind kind;
	tmb_u64 offset; /* bytes from the start of the area, of a word */
	tmb_u64 old, new_value;
};
/* Changes a word (now and then copies a whole structure over another of its kind). */
struct mutation mutate(struct mutator *m, void *area, mutate_take take, void *ctx);
/* A value that nearly makes sense where 'old' is. 'offset': of the word, for references to itself. */
tmb_u64 mutate_value(struct mutator *m, tmb_u64 old, tmb_u64 offset, mutate_take take, void *ctx);
extern const char *const mutation_names[MUTATE_KINDS];

#endif
