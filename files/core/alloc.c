// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The block map: one byte per block. A member claims a block by a compare and swap, from 0 to its tag, of the eight bytes
 * that the block's byte lies in. So claims need no lock, and a recovery can tell a dead member's claims from those of
 * other members.
 *
 * Files want long aligned runs: reads are then one copy, and mappings use large pages. A request for a chunk (512 blocks,
 * 2 MiB) gets an empty aligned one while there are any. Small requests fill up from a cursor, which starts at a different
 * place in each member.
 */
#include "tfs_internal.h"

#define CHUNK TFS_FANOUT
#define ONES 0x0101010101010101ULL
#define HIGHS 0x8080808080808080ULL
/* The search for an empty chunk gives up after this many (8 GiB). */
#define CHUNK_SEARCH 4096u
#define YIELD_BYTES 65536u /* of the map */

static inline tmb_u64 *tfs_map_word(struct tfs *fs, tmb_u64 block)
{
	return (tmb_u64 *)(tfs_map_bytes(fs) + (block & ~7ULL));
}

/* Claims one block whose map byte is 'value'. */
static bool tfs_claim_one(struct tfs *fs, tmb_u64 block, tmb_u8 value)
{
	tmb_u64 *word = tfs_map_word(fs, block);
	tmb_u32 shift = 8 * (block & 7);

	for (;;) {
		tmb_u64 old = tmb_load(word);

		if ((old >> shift & 0xff) != value)
			return false;
		if (tmb_cas64(word, old, old ^ (tmb_u64)(value ^ tfs_tag(fs)) << shift)) {
			tfs_persist(fs, word, sizeof(*word));
			return true;
		}
	}
}

/* Claims free bytes from 'block' on: at most 'want', and none past the end of their word. Returns how many. */
static tmb_u64 tfs_claim_in_word(struct tfs *fs, tmb_u64 block, tmb_u64 want)
{
	tmb_u64 *word = tfs_map_word(fs, block);
	tmb_u32 first = block & 7;

	for (;;) {
		tmb_u64 old = tmb_load(word), add = 0;
		tmb_u32 i = first;

		while (i < 8 && i - first < want && block - first + i < fs->blocks && !(old >> (8 * i) & 0xff)) {
			add |= (tmb_u64)tfs_tag(fs) << (8 * i);
			i++;
		}
		if (i == first)
			return 0;
		if (tmb_cas64(word, old, old | add)) {
			tfs_persist(fs, word, sizeof(*word));
			return i - first;
		}
	}
}

static tmb_u64 tfs_claim_run(struct tfs *fs, tmb_u64 block, tmb_u64 want)
{
	tmb_u64 got = 0;

	while (got < want && block + got < fs->blocks) {
		tmb_u64 room = 8 - ((block + got) & 7);
		tmb_u64 ask = TFS_MIN(want - got, room);
		tmb_u64 n = tfs_claim_in_word(fs, block + got, ask);

		got += n;
		if (n < ask)
			break;
	}
	return got;
}

void tfs_set_map(struct tfs *fs, tmb_u64 block, tmb_u64 count, tmb_u8 value)
{
	tmb_u8 *byte = tfs_map_bytes(fs) + block;
	tmb_u64 end = block + count;

	/* Stores about the blocks come before their release. A word is stored whole where all its bytes are in the range. */
	while (block < end) {
		if (!(block & 7) && end - block >= 8) {
			tmb_store_release((tmb_u64 *)byte, ONES * value);
			block += 8;
			byte += 8;
		} else {
			tmb_store_release(byte, value);
			block++;
			byte++;
		}
	}
	tfs_persist(fs, byte - count, count);
}

static bool tfs_chunk_is_free(struct tfs *fs, tmb_u64 block)
{
	tmb_u64 *word = tfs_map_word(fs, block), seen = 0;

	if (tmb_load(word))
		return false;
	for (tmb_u32 i = 1; i < CHUNK / 8; i++)
		seen |= tmb_load(word + i);
	return !seen;
}

int tfs_alloc_chunk(struct tfs *fs, tmb_u64 offset, tmb_u64 want, struct tfs_run *run)
{
	tmb_u64 first = (fs->data_start + CHUNK - 1) / CHUNK, chunks = fs->blocks / CHUNK;
	tmb_u64 at = tmb_load(&fs->chunk_cursor);

	if (first >= chunks)
		return -ENOSPC;
	for (tmb_u64 i = 0; i < chunks - first && i < CHUNK_SEARCH; i++, at++) {
		if (at < first || at >= chunks)
			at = first;
		if (!tfs_chunk_is_free(fs, at * CHUNK))
			continue;
		run->block = at * CHUNK + offset;
		run->count = tfs_claim_run(fs, run->block, TFS_MIN(want, CHUNK - offset));
		if (run->count) {
			tmb_store(&fs->chunk_cursor, at + 1);
			return 0;
		}
	}
	return -ENOSPC;
}

tmb_u64 tfs_find_map(struct tfs *fs, tmb_u64 from, tmb_u64 to, tmb_u8 value)
{
	while (from < to) {
		tmb_u64 word = tmb_load(tfs_map_word(fs, from)) ^ ONES * value;

		word |= (1ULL << 8 * (from & 7)) - 1; /* ignore bytes before 'from' */
		tmb_u64 zero = (word - ONES) & ~word & HIGHS;

		if (zero) {
			tmb_u64 block = (from & ~7ULL) + (tmb_u64)(__builtin_ctzll(zero) / 8);

			return TFS_MIN(block, to);
		}
		from = (from & ~7ULL) + 8;
		if (!(from % YIELD_BYTES))
			tfs_os_yield();
	}
	return to;
}

/* Tags free blocks from the cursor on. */
static int tfs_search(struct tfs *fs, tmb_u64 want, struct tfs_run *run)
{
	tmb_u64 start = tmb_load(&fs->alloc_cursor), pass;

	if (!tfs_block_ok(fs, start))
		start = fs->data_start;
	for (pass = 0; pass < 2; pass++) {
		tmb_u64 from = pass ? fs->data_start : start, to = pass ? start : fs->blocks;

		while ((from = tfs_find_map(fs, from, to, TFS_MAP_FREE)) < to) {
			run->count = tfs_claim_run(fs, from, want);
			if (run->count) {
				run->block = from;
				tmb_store(&fs->alloc_cursor, from + run->count);
				return 0;
			}
			from++;
		}
	}
	return -ENOSPC;
}

int tfs_alloc(struct tfs *fs, tmb_u64 goal, tmb_u64 want, struct tfs_run *run)
{
	if (tfs_block_ok(fs, goal)) {
		run->count = tfs_claim_run(fs, goal, want);
		if (run->count) {
			run->block = goal;
			return 0;
		}
	}
	/* Blocks that were removed a moment ago may be deferred for a reader that is about to finish. */
	if (!tfs_search(fs, want, run) || (tfs_await_deferred(fs) && !tfs_search(fs, want, run)))
		return 0;
	return -ENOSPC;
}

int tfs_alloc_spare(struct tfs *fs, tmb_u64 *block)
{
	struct tfs_run run;

	if (!tfs_alloc(fs, 0, 1, &run)) {
		*block = run.block;
		return 0;
	}
	*block = fs->data_start;
	while ((*block = tfs_find_map(fs, *block, fs->blocks, TFS_MAP_RESERVED)) < fs->blocks) {
		if (tfs_claim_one(fs, *block, TFS_MAP_RESERVED))
			return 0;
		(*block)++;
	}
	return -ENOSPC;
}

void tfs_keep_reserve(struct tfs *fs)
{
	tmb_u64 block = fs->data_start;
	struct tfs_run run;

	for (tmb_u32 n = 0; n < TFS_RESERVE; n++, block++) {
		block = tfs_find_map(fs, block, fs->blocks, TFS_MAP_RESERVED);
		run.block = block;
		if (block == fs->blocks) {
			if (tfs_alloc(fs, 0, 1, &run)) { /* the area is full: the next removal fills the reserve */
				tmb_store(&fs->reserve[n], 0);
				return;
			}
			tfs_set_map(fs, run.block, 1, TFS_MAP_RESERVED);
		}
		tmb_store(&fs->reserve[n], run.block);
	}
}

tmb_u64 tfs_count_free(struct tfs *fs)
{
	tmb_u64 from = fs->data_start, n = 0;

	for (; from < fs->blocks && (from & 7); from++)
		n += !tmb_load(tfs_map_bytes(fs) + from);
	for (; from + 8 <= fs->blocks; from += 8) {
		tmb_u64 word = tmb_load(tfs_map_word(fs, from));

		if (!(from % YIELD_BYTES))
			tfs_os_yield();
		if (!word)
			n += 8;
		else if (word != ~0ULL) /* exact test: a byte is zero when neither its low seven bits nor its top bit is set */
			n += (((~(((word & ~HIGHS) + ~HIGHS) | word) & HIGHS) >> 7) * 0x0101010101010101ULL) >> 56;
	}
	for (; from < fs->blocks; from++)
		n += !tmb_load(tfs_map_bytes(fs) + from);
	return n;
}
