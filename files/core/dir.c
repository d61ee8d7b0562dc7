// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Entries of one directory. Blocks of 64 granules hold them; entries never move, so positions are readdir cookies. A directory of one block
 * is scanned. A larger one has a hash table (open addressing, in a tree of its own) that gives the positions of entries by hash; lookups
 * compare the entry itself. So superfluous places in the table, which deaths leave, are harmless. None is missing: an entry is in the table before its
 * ref makes it exist.
 *
 * Readers take no lock: they load the directory's seq before and after, and try again if it changed.
 */
#include "tfs_internal.h"

#define SPACE_SEARCH 16u /* tfs_search_space() looks at this many blocks before a new one is added */
#define READ_TRIES 100u

static tmb_u64 tfs_mix(tmb_u64 h, tmb_u64 word)
{
	h = (h ^ word) * 0x9e3779b97f4a7c15ULL;
	return h ^ h >> 29;
}

/* Returns the last len < 8 bytes of a name of 'all' bytes. Loads as many at once as the name has; some of them twice, to the same place. */
static inline tmb_u64 tfs_last_word(const char *name, tmb_u32 len, tmb_u32 all)
{
	tmb_u64 word;
	tmb_u32 first, last;

	if (!len)
		return 0;
	if (all >= 8) {
		memcpy(&word, name + len - 8, 8);
		return word >> (64 - 8 * len);
	}
	if (len >= 4) {
		memcpy(&first, name, 4);
		memcpy(&last, name + len - 4, 4);
		return first | (tmb_u64)last << 8 * (len - 4);
	}
	first = (tmb_u8)name[0];
	return first | (tmb_u32)(tmb_u8)name[len / 2] << 8 * (len / 2) | (tmb_u32)(tmb_u8)name[len - 1] << 8 * (len - 1);
}

/* Of file systems from before TFS_INCOMPAT_KEYED_HASH. Names of one hash can be chosen whatever the seed is. */
static TFS_SELDOM tmb_u32 tfs_unkeyed_hash(tmb_u64 seed, const char *name, tmb_u32 len)
{
	tmb_u64 h = seed ^ len, word;
	tmb_u32 all = len;

	for (; len >= 8; name += 8, len -= 8) {
		memcpy(&word, name, 8);
		h = tfs_mix(h, word);
	}
	if (len)
		h = tfs_mix(h, tfs_last_word(name, len, all));
	h *= 0xbf58476d1ce4e5b9ULL;
	h ^= h >> 32;
	return (tmb_u32)h;
}

struct tfs_sip {
	tmb_u64 a, b, c, d;
};

static inline tmb_u64 tfs_rotated(tmb_u64 x, tmb_u32 by)
{
	return x << by | x >> (64 - by);
}

static inline void tfs_sip_round(struct tfs_sip *v)
{
	v->a += v->b;
	v->b = tfs_rotated(v->b, 13) ^ v->a;
	v->a = tfs_rotated(v->a, 32);
	v->c += v->d;
	v->d = tfs_rotated(v->d, 16) ^ v->c;
	v->a += v->d;
	v->d = tfs_rotated(v->d, 21) ^ v->a;
	v->c += v->b;
	v->b = tfs_rotated(v->b, 17) ^ v->c;
	v->c = tfs_rotated(v->c, 32);
}

static inline void tfs_sip_word(struct tfs_sip *v, tmb_u64 word)
{
	v->d ^= word;
	tfs_sip_round(v);
	v->a ^= word;
}

/*
 * SipHash-1-3 (Aumasson and Bernstein, 2012), whose key follows from the seed: a user who does not know that can't choose names of one hash, by
 * which all users of a directory would wait at each of its names.
 */
tmb_u32 tfs_hash(struct tfs *fs, const char *name, tmb_u32 len)
{
	tmb_u64 key = fs->hash_seed, other = key ^ 0x9e3779b97f4a7c15ULL, word, bytes = (tmb_u64)len << 56;
	tmb_u32 all = len;
	struct tfs_sip v = {key ^ 0x736f6d6570736575ULL, other ^ 0x646f72616e646f6dULL, key ^ 0x6c7967656e657261ULL, other ^ 0x7465646279746573ULL};

	if (__builtin_expect(!fs->keyed, 0))
		return tfs_unkeyed_hash(fs->hash_seed, name, len);
	for (; len >= 8; name += 8, len -= 8) {
		memcpy(&word, name, 8);
		tfs_sip_word(&v, word);
	}
	tfs_sip_word(&v, bytes | tfs_last_word(name, len, all));
	v.c ^= 0xff;
	tfs_sip_round(&v);
	tfs_sip_round(&v);
	tfs_sip_round(&v);
	word = v.a ^ v.b ^ v.c ^ v.d;
	return (tmb_u32)(word ^ word >> 32);
}

tmb_u32 tfs_granules_of(tmb_u32 name_len)
{
	return (TFS_DIRENT_HEADER + name_len + TFS_GRANULE - 1) / TFS_GRANULE;
}

/*
 * Returns whether the word can be an entry's reference: it has a type, and nothing between that and the number. Of a granule in which a longer name goes
 * on, the first word can't: it is zero but for bytes of names. These have no NUL, so where one reaches the byte of the type, the byte before it is
 * not zero.
 */
static inline bool tfs_is_ref(tmb_u64 ref)
{
	return ref >> TFS_REF_TYPE_SHIFT && !(ref >> 48 & 0xff);
}

/* Compares the entry with the name. left: granules to the end of its block. An index may give a granule that has become a part of another entry. */
bool tfs_entry_matches(struct tfs_dirent *entry, tmb_u32 left, const char *name, tmb_u32 len, tmb_u32 hash, tmb_u64 *ref)
{
	tmb_u8 granules = tmb_load(&entry->granules);

	*ref = tmb_load_acquire(&entry->ref);
	return tfs_is_ref(*ref) && tmb_load(&entry->hash) == hash && tmb_load(&entry->name_len) == len && granules <= left &&
	       tfs_granules_of(len) <= granules && !memcmp(entry->name, name, len);
}

static int tfs_find_by_scan(struct tfs *fs, struct tfs_inode *dir, tmb_u64 blocks, const char *name, tmb_u32 len, struct tfs_slot *slot)
{
	for (tmb_u64 b = 0; b < blocks; b++) {
		struct tfs_dirent *block = tfs_granule_at(fs, dir, b * TFS_GRANULES_PER_BLOCK);
		tmb_u32 i = 0;

		if (!block)
			return -EUCLEAN;
		if (tfs_long_loop(fs, b))
			return -EINTR;
		while (i < TFS_GRANULES_PER_BLOCK) {
			if (tfs_entry_matches(block + i, TFS_GRANULES_PER_BLOCK - i, name, len, slot->hash, &slot->ref)) {
				slot->entry = block + i;
				slot->granule = b * TFS_GRANULES_PER_BLOCK + i;
				return 0;
			}
			tmb_u8 step = tmb_load(&block[i].granules);

			i += step ? step : 1;
		}
	}
	return -ENOENT;
}

/* An entry may change or go while a reader looks at it. So callers look again before they report damage. */
int tfs_dir_find(struct tfs *fs, struct tfs_inode *dir, const char *name, tmb_u32 len, struct tfs_slot *slot)
{
	tmb_u64 index_root = tmb_load_acquire(&dir->index_root);

	slot->hash = tfs_hash(fs, name, len);
	slot->place = NULL;
	slot->rebuilt = false;
	if (index_root)
		return tfs_index_find(fs, dir, index_root, name, len, slot);
	return tfs_find_by_scan(fs, dir, tfs_dir_blocks(fs, dir), name, len, slot);
}

/* --- space for entries ------------------------------------------------------------------------------------------ */

/* Finds a free run of at least 'need' granules in this block, merging neighbours. *have: its length; -1: none. */
static int tfs_free_run(struct tfs_dirent *block, tmb_u32 need, tmb_u32 *have)
{
	for (tmb_u32 i = 0; i < TFS_GRANULES_PER_BLOCK;) {
		tmb_u32 n = 0;

		if (tmb_load(&block[i].ref)) {
			tmb_u8 step = tmb_load(&block[i].granules);

			i += step ? step : 1;
			continue;
		}
		while (i + n < TFS_GRANULES_PER_BLOCK && !tmb_load(&block[i + n].ref)) {
			tmb_u8 step = tmb_load(&block[i + n].granules);

			n += step ? step : 1;
		}
		n = TFS_MIN(n, TFS_GRANULES_PER_BLOCK - i);
		if (n >= need) {
			tmb_store(&block[i].granules, (tmb_u8)n);
			*have = n;
			return (int)i;
		}
		i += n;
	}
	return -1;
}

static int tfs_add_block(struct tfs *fs, struct tfs_inode *dir, tmb_u64 b)
{
	struct tfs_run run;
	tmb_u64 taken = 0;
	int err = tfs_tree_map(fs, tmb_load(&dir->root), b, 1, &run);

	if (err)
		return err;
	if (run.block) { /* a member died between linking the block and counting it */
		memset(tfs_block(fs, run.block), 0, TFS_BLOCK);
		((struct tfs_dirent *)tfs_block(fs, run.block))->granules = TFS_GRANULES_PER_BLOCK;
		tfs_persist(fs, tfs_block(fs, run.block), TFS_BLOCK);
		tfs_barrier(fs);
	} else {
		err = tfs_blocks_left(fs, dir) ? tfs_alloc(fs, 0, 1, &run) : -EDQUOT;
		if (err)
			return err;
		memset(tfs_block(fs, run.block), 0, TFS_BLOCK);
		((struct tfs_dirent *)tfs_block(fs, run.block))->granules = TFS_GRANULES_PER_BLOCK;
		err = tfs_tree_add(fs, &dir->root, b, &run, TFS_MAP_USED, &taken);
		tfs_count_blocks(fs, dir, (tmb_s64)taken);
		if (err)
			return err;
		tfs_barrier(fs);
	}
	tmb_store(&dir->free_granules, tmb_load(&dir->free_granules) + TFS_GRANULES_PER_BLOCK);
	tmb_store_release(&dir->size, (b + 1) << TFS_BLOCK_SHIFT);
	tfs_persist(fs, &dir->root, 64);
	return 0;
}

/* Looks for free granules in at most 'most' blocks from 'b' on. -ENOSPC: none. */
static int tfs_search_space(struct tfs *fs, struct tfs_inode *dir, tmb_u32 need, tmb_u64 b, tmb_u64 most, struct tfs_slot *slot, tmb_u32 *have)
{
	tmb_u64 blocks = tfs_dir_blocks(fs, dir);

	if (b >= blocks)
		b = blocks ? blocks - 1 : 0;
	for (tmb_u64 tries = 0; tries < most && tries < blocks; tries++) {
		struct tfs_dirent *block = tfs_granule_at(fs, dir, b * TFS_GRANULES_PER_BLOCK);
		int at;

		if (!block)
			return tfs_damage(fs, "directory block missing", tmb_load(&dir->root), b);
		if (tfs_long_loop(fs, tries))
			return -EINTR;
		at = tfs_free_run(block, need, have);
		if (at >= 0) {
			tmb_store(&dir->dir_hint, b);
			slot->entry = block + at;
			slot->granule = b * TFS_GRANULES_PER_BLOCK + (tmb_u32)at;
			return 0;
		}
		b = b + 1 < blocks ? b + 1 : 0;
	}
	tmb_store(&dir->dir_hint, b);
	return -ENOSPC;
}

static int tfs_find_space(struct tfs *fs, struct tfs_inode *dir, tmb_u32 need, struct tfs_slot *slot, tmb_u32 *have)
{
	tmb_u64 blocks = tfs_dir_blocks(fs, dir), hint = tmb_load(&dir->dir_hint);
	int err;

	/* The newest block first; older ones when a quarter of the granules is free. */
	if (blocks && tmb_load(&dir->free_granules) >= need) {
		bool worth = tmb_load(&dir->free_granules) * 4 >= blocks * TFS_GRANULES_PER_BLOCK;

		err = tfs_search_space(fs, dir, need, hint, worth ? SPACE_SEARCH : 1, slot, have);
		if (err != -ENOSPC)
			return err;
	}
	err = tfs_add_block(fs, dir, blocks);
	if (err == -ENOSPC || err == -EDQUOT) {
		/* Then the other blocks. */
		int found = tfs_search_space(fs, dir, need, 0, blocks, slot, have);

		return found == -ENOSPC ? err : found;
	}
	if (err)
		return err;
	tmb_store(&dir->dir_hint, blocks);
	slot->granule = blocks * TFS_GRANULES_PER_BLOCK;
	*have = TFS_GRANULES_PER_BLOCK;
	slot->entry = tfs_granule_at(fs, dir, slot->granule);
	return slot->entry ? 0 : tfs_damage(fs, "directory block missing", tmb_load(&dir->root), blocks);
}

int tfs_dir_reserve(struct tfs *fs, struct tfs_inode *dir, const char *name, tmb_u32 len, struct tfs_slot *slot)
{
	tmb_u32 need = tfs_granules_of(len), have;
	struct tfs_dirent *entry;
	int err = tfs_find_space(fs, dir, need, slot, &have);

	if (err)
		return err;
	entry = slot->entry;
	slot->ref = 0;
	if (have > need) { /* the rest stays a free run, whose length is stored first */
		tmb_store(&entry[need].ref, 0);
		tmb_store_release(&entry[need].granules, (tmb_u8)(have - need));
		tfs_persist(fs, &entry[need], TFS_DIRENT_HEADER);
		tfs_barrier(fs);
	}
	tmb_store(&entry->hash, slot->hash);
	tmb_store(&entry->name_len, (tmb_u8)len);
	/* The name may go on in the next granules; a checked copy into the field would refuse that. */
	memcpy((char *)entry + offsetof(struct tfs_dirent, name), name, len);
	tmb_store_release(&entry->granules, (tmb_u8)need);
	tfs_persist(fs, entry, need * TFS_GRANULE);
	err = tfs_index_add(fs, dir, slot);
	if (err)
		return err;
	tmb_store(&dir->free_granules, tmb_load(&dir->free_granules) - need);
	return 0;
}

void tfs_dir_forget(struct tfs *fs, struct tfs_inode *dir, const struct tfs_slot *slot)
{
	tmb_store(&dir->free_granules, tmb_load(&dir->free_granules) + tmb_load(&slot->entry->granules));
	tfs_index_forget(fs, dir, slot);
}

/* --- readers ------------------------------------------------------------------------------------------------------ */

static inline int tfs_live_dir(struct tfs *fs, struct tfs_handle h, struct tfs_inode **dir)
{
	int err = tfs_live_inode(fs, h, dir);

	if (err)
		return err;
	return TFS_IS(tmb_load(&(*dir)->mode), TFS_MODE_DIR) ? 0 : -ENOTDIR;
}

/*
 * Waits until no writer changes the directory, and gives its sequence number. For a member that can take no lock. It sleeps at least once, so
 * a reader that always meets a writer yields the CPU and can be killed.
 */
static int tfs_wait_for_writer(struct tfs *fs, struct tfs_inode *dir, tmb_u64 *seq)
{
	struct tfs_wait w;

	tfs_wait_start(&w, TFS_KILLABLE);
	do {
		if (tfs_wait_more(fs, &w, tmb_load(&dir->seq), TFS_MEMBERS, NULL, 0) == -EINTR)
			return -EINTR;
		*seq = tmb_load_acquire(&dir->seq);
	} while (*seq & 1);
	return 0;
}

/* Waits for an even seq. After many tries it takes the directory's lock, which also cleans up after a dead writer; a read-only member takes
 * no lock. */
static int tfs_read_begin(struct tfs *fs, struct tfs_handle h, struct tfs_inode *dir, tmb_u32 *tries, tmb_u64 *seq, bool *locked)
{
	int err;

	for (; *tries < READ_TRIES; ++*tries) {
		*seq = tmb_load_acquire(&dir->seq);
		if (!(*seq & 1))
			return 0;
		tfs_os_relax();
	}
	if (fs->read_only)
		return tfs_wait_for_writer(fs, dir, seq);
	err = tfs_lock_inode(fs, h);
	*locked = !err;
	return err;
}

static bool tfs_read_retry(struct tfs *fs, tmb_u64 ino, struct tfs_inode *dir, tmb_u64 seq, bool *locked)
{
	if (*locked) {
		tfs_unlock_inode(fs, ino);
		*locked = false;
		return false;
	}
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return tmb_load(&dir->seq) != seq;
}

int tfs_lookup(struct tfs *fs, struct tfs_handle h, const char *name, tmb_u32 len, struct tfs_handle *found, tmb_u8 *type)
{
	struct tfs_inode *dir, *inode;
	struct tfs_slot slot;
	tmb_u32 tries = 0;
	bool locked = false;
	tmb_u64 seq;
	int err = tfs_live_dir(fs, h, &dir);

	if (err)
		return err;
	if (!len || len > TFS_NAME_MAX)
		return len ? -ENAMETOOLONG : -ENOENT;
	do {
		err = tfs_read_begin(fs, h, dir, &tries, &seq, &locked);
		if (err)
			return err;
		err = tfs_dir_find(fs, dir, name, len, &slot);
		if (!err) {
			/* A name keeps its inode alive, so this is the generation that the name means. */
			inode = tfs_inode(fs, slot.ref & TFS_REF_INO_MASK);
			found->ino = slot.ref & TFS_REF_INO_MASK;
			found->generation = inode ? (tmb_u32)(tmb_load(&inode->state_gen) >> TFS_GEN_SHIFT) : 0;
		}
		tries++;
	} while (tfs_read_retry(fs, h.ino, dir, seq, &locked));
	if (!tfs_is(dir, h))
		return -ESTALE;
	if (err)
		return err == -EUCLEAN ? tfs_damage(fs, "directory not readable", h.ino, slot.hash) : err;
	if (!found->generation)
		return tfs_damage(fs, "name of no inode", h.ino, found->ino);
	*type = (tmb_u8)(slot.ref >> TFS_REF_TYPE_SHIFT);
	return 0;
}

tmb_u64 tfs_dir_seq(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *dir = tfs_inode(fs, h.ino);

	return dir && tfs_is(dir, h) ? tmb_load_acquire(&dir->seq) : 1;
}

tmb_u64 tfs_parent(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *dir;

	return tfs_live_dir(fs, h, &dir) ? 0 : tmb_load(&dir->parent) & TFS_REF_INO_MASK;
}

/* Copies one block at a moment when no writer changes the directory. */
static int tfs_copy_block(struct tfs *fs, struct tfs_handle h, struct tfs_inode *dir, tmb_u64 b, struct tfs_dirent *copy)
{
	tmb_u32 tries = 0;
	bool locked = false;
	tmb_u64 seq;
	int err;

	do {
		struct tfs_dirent *block;

		err = tfs_read_begin(fs, h, dir, &tries, &seq, &locked);
		if (err)
			return err;
		block = tfs_granule_at(fs, dir, b * TFS_GRANULES_PER_BLOCK);
		if (block)
			memcpy(copy, block, TFS_BLOCK);
		else
			err = -EUCLEAN;
		tries++;
	} while (tfs_read_retry(fs, h.ino, dir, seq, &locked));
	if (!tfs_is(dir, h))
		return -ESTALE;
	return err ? tfs_damage(fs, "directory block missing", h.ino, b) : 0;
}

int tfs_readdir(struct tfs *fs, struct tfs_handle h, tmb_u64 *pos, tfs_emit emit, void *ctx)
{
	struct tfs_inode *dir;
	struct tfs_dirent *copy;
	int err = tfs_live_dir(fs, h, &dir);

	if (err)
		return err;
	copy = tfs_os_alloc(TFS_BLOCK);
	if (!copy)
		return -ENOMEM;
	while (*pos / TFS_GRANULES_PER_BLOCK < tfs_dir_blocks(fs, dir)) {
		tmb_u64 b = *pos / TFS_GRANULES_PER_BLOCK;
		tmb_u32 i = 0;

		err = tfs_copy_block(fs, h, dir, b, copy);
		if (!err)
			err = tfs_long_loop(fs, b);
		if (err)
			break;
		while (i < TFS_GRANULES_PER_BLOCK) {
			tmb_u32 step = copy[i].granules ? copy[i].granules : 1, len = copy[i].name_len;
			tmb_u64 here = b * TFS_GRANULES_PER_BLOCK + i;

			i += step;
			/* An entry that starts before *pos was given out with a smaller position: skip it. */
			if (here < *pos || !copy[here % TFS_GRANULES_PER_BLOCK].ref)
				continue;
			if (!len || i > TFS_GRANULES_PER_BLOCK || tfs_granules_of(len) > step) {
				err = tfs_damage(fs, "directory entry malformed", h.ino, here);
				goto out;
			}
			if (!emit(ctx, copy[here % TFS_GRANULES_PER_BLOCK].name, len,
				  copy[here % TFS_GRANULES_PER_BLOCK].ref & TFS_REF_INO_MASK,
				  (tmb_u8)(copy[here % TFS_GRANULES_PER_BLOCK].ref >> TFS_REF_TYPE_SHIFT), here + step)) {
				*pos = here;
				goto out;
			}
		}
		*pos = (b + 1) * TFS_GRANULES_PER_BLOCK;
	}
out:
	tfs_os_free(copy);
	return err;
}
