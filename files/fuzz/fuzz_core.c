// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * libFuzzer on the core: an input is a program that damages a good file system (mutate.c), then has two members call the core's
 * functions, and damages more between the calls and during them. Whatever it writes there, the core must touch nothing outside the
 * area and the member table (both lie between inaccessible pages), must end, and must free its memory.
 *
 * During a call: accesses to shared memory are counted (hooks.h). At an access that the input chooses, the word accessed, or another
 * one, changes first. So each race that a hostile member could win follows from the input alone.
 *
 * Time is simulated: each read of the clock is a second later, so that the core's bounded waits end at once; a signal ends the other
 * waits. A call that makes LOOKS accesses to shared memory is endless.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mutate.h"
#include "tfs.h"

#define AREA_BYTES (7u << 20)
#define TABLE_BYTES (TFS_MEMBERS * sizeof(struct tmb_member))
#define GUARD (1u << 20)
#define MAX_STEPS 80
#define MEMBERS 2 /* active ones; the other slots are dead, or live and do nothing */
#define LOOKS (48u << 20)
#define NAPS 8 /* in one call, then the caller is killed */
#define EPOCH 4

struct input {
	const tmb_u8 *data;
	size_t left;
};

static tmb_u8 *area;
static struct tmb_member *members;
static int image; /* a memory file with the good file system, of which 'area' is a private copy */
static struct mutator *mutator;
static tmb_u64 ticks, looks, naps, next_change;
static long allocations;
static struct input in;
static struct tfs_listener listeners[MEMBERS];
static struct tfs_handle dirs[4];
static bool running;
volatile tmb_u8 fuzz_sink;

void *tfs_os_alloc(tmb_u64 bytes)
{
	allocations++;
	return calloc(1, bytes);
}

void tfs_os_free(void *p)
{
	allocations--;
	free(p);
}

void tfs_os_relax(void) {}
void tfs_os_wait(struct tfs *fs, tmb_u32 round) { (void)fs, (void)round; }
void tfs_os_wake(struct tfs *fs, tmb_u32 *word) { (void)fs, (void)word; }
bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable)
{
	(void)fs, (void)word, (void)value, (void)ns;
	return killable && ++naps > NAPS;
}
void tfs_os_yield(void) {}
bool tfs_os_killed(struct tfs *fs) { (void)fs; return false; }
void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds) { (void)fs, (void)member, (void)answers, (void)seconds; }
tmb_u64 tfs_os_clock(void) { return ticks += 1000000000ULL; }
tmb_s64 tfs_os_now(void) { return 1; }
tmb_u32 tfs_os_cpu(void) { return 0; }
void tfs_os_flush(const void *p, tmb_u64 len) { (void)p, (void)len; }
void tfs_os_drain(void) {}
void tfs_os_ring(struct tfs *fs, tmb_u32 member) { (void)fs, (void)member; }
void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b) { (void)fs, (void)what, (void)a, (void)b; }

static tmb_u64 take(void *ctx, unsigned bytes)
{
	tmb_u64 v = 0;

	(void)ctx;
	for (; bytes && in.left; bytes--, in.left--)
		v = v << 8 | *in.data++;
	return v;
}

/* Chooses the access before which the next word changes: mostly soon. */
static void plan_change(void)
{
	tmb_u64 n = take(NULL, 1);

	next_change = n < 64 || !in.left ? 0 : looks + 1 + (n < 192 ? n - 64 : take(NULL, 2));
}

void fuzz_look(const volatile void *p, unsigned bytes)
{
	looks++;
	if (!running || looks != next_change) {
		if (running && looks > LOOKS) {
			fprintf(stderr, "no end: %llu looks at shared memory in one call\n", (unsigned long long)looks);
			abort();
		}
		return;
	}
	running = false;
	if (take(NULL, 1) % 4 == 0) {
		mutate(mutator, area, take, NULL);
	} else { /* the accessed word, whole */
		tmb_u64 *word = (tmb_u64 *)((uintptr_t)p & ~7ULL), offset = (tmb_u64)((tmb_u8 *)word - area);
		bool shared = (tmb_u8 *)word >= area && offset < AREA_BYTES;

		if (shared || ((void *)word >= (void *)members && (tmb_u8 *)word < (tmb_u8 *)members + TABLE_BYTES))
			*word = mutate_value(mutator, *word, shared ? offset : 0, take, NULL);
	}
	(void)bytes;
	plan_change();
	running = true;
}

/* Generation 0: most steps name the number's present inode, so that they pass the check. */
static struct tfs_handle any(tmb_u64 ino)
{
	return (struct tfs_handle){.ino = ino};
}

static struct tfs_handle make(struct tfs *fs, struct tfs_handle dir, const char *name, tmb_u32 mode)
{
	struct tfs_create c = {.mode = mode};
	struct tfs_handle made = {0};

	if (tfs_create(fs, dir, name, (tmb_u32)strlen(name), &c, &made))
		abort();
	return made;
}

static void reset_members(void)
{
	memset(members, 0, TABLE_BYTES);
	members[0].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, EPOCH);
	members[1].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, EPOCH);
	members[2].state_epoch = tmb_state_epoch(TMB_MEMBER_DEAD, EPOCH); /* a recovery looks at its leftovers */
	members[3].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, EPOCH); /* never releases a lock */
}

/* Memory between pages that can't be accessed. */
static void *guarded(size_t bytes, int fd)
{
	tmb_u8 *space = mmap(NULL, bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);

	if (space == MAP_FAILED || mmap(space + GUARD, bytes, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED)
		abort();
	return space + GUARD;
}

static void names(struct tfs *fs, struct tfs_handle dir, int from, int to)
{
	char name[64];

	for (int i = from; i < to; i++) {
		snprintf(name, sizeof(name), "f%d-a-name-that-takes-more-than-one-granule-of-space", i);
		make(fs, dir, name, 0100644);
	}
}

static void write_some(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 len)
{
	static tmb_u8 data[20000];

	memset(data, 7, sizeof(data));
	if (tfs_pwrite(fs, h, data, len, &at, false, false, 1) != (tmb_s64)len)
		abort();
}

/* Leaves the state of a member that died: a lock, blocks with its tag, an open transaction and a committed one. */
static void die_halfway(struct tfs_handle h)
{
	struct tfs fs = {0};
	struct tfs_write w;

	members[2].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, EPOCH - 1);
	if (tfs_open(&fs, area, AREA_BYTES, members, 2, EPOCH - 1) || tfs_open_ref(&fs, h) ||
	    tfs_write_begin(&fs, h, &w) || tfs_write_map_locked(&fs, &w, 90, 4) || tfs_write_done_locked(&fs, &w) ||
	    tfs_write_map_locked(&fs, &w, 100, 3))
		abort();
	struct tfs_member_area *mine = (struct tfs_member_area *)tfs_block(&fs, fs.member_start + 2 * TFS_MEMBER_BLOCKS);
	struct tfs_tx *tx = &mine->tx[1];

	tx->state = (tmb_u64)(EPOCH - 1) << 32 | TFS_TX_COMMITTED;
	tx->redo = TFS_REDO_TRUNCATE;
	tx->ino[0] = h.ino;
	tx->arg[0] = 2;
	tx->arg[1] = ~0ULL;
	tx->n_words = 1;
	tx->words[0].offset = (fs.data_start << TFS_BLOCK_SHIFT) + h.ino * sizeof(struct tfs_inode) + offsetof(struct tfs_inode, size);
	tx->words[0].value = 8192;
}

static void build(void)
{
	static tmb_u8 data[9000];
	tmb_u8 uuid[16] = {1};
	struct tfs fs = {0};
	struct tfs_handle dir, last, ino;

	image = memfd_create("image", 0);
	if (image < 0 || ftruncate(image, AREA_BYTES))
		abort();
	area = guarded(AREA_BYTES, image);
	members = guarded(TABLE_BYTES, -1);
	reset_members();
	if (tfs_mkfs(area, AREA_BYTES, uuid, "fuzz", 7, 0, 0, 0, 0755, 0) || tfs_open(&fs, area, AREA_BYTES, members, 0, EPOCH))
		abort();
	dir = make(&fs, any(TFS_ROOT_INO), "d", 0040755);
	dirs[0] = any(TFS_ROOT_INO);
	dirs[1] = dir;
	dirs[2] = make(&fs, dir, "e", 0040755);
	names(&fs, dir, 0, 130); /* enough for an index */
	ino = make(&fs, any(TFS_ROOT_INO), "file", 0100644);
	write_some(&fs, ino, 0, 20000);
	write_some(&fs, ino, 1ULL << 33, 100);
	if (tfs_xattr_set(&fs, ino, "user.a", data, 9000, 0, -1, NULL, 1) || tfs_xattr_set(&fs, dir, "user.b", data, 10, 0, -1, NULL, 1))
		abort();
	ino = make(&fs, any(TFS_ROOT_INO), "huge", 0100644);
	if (tfs_fallocate(&fs, ino, 0, 0, 2u << 20, 1))
		abort();
	struct tfs_create link = {.mode = 0120777, .symlink = "target", .symlink_len = 6};

	if (tfs_create(&fs, any(TFS_ROOT_INO), "link", 4, &link, &ino))
		abort();
	struct tfs_file_lock lock = {.owner = 1, .end = 100, .type = TFS_LK_WRITE, .kind = TFS_LK_POSIX};

	if (tfs_set_lock(&fs, any(2), &lock))
		abort();
	/* One object of each kind at the very end of the area, where an access one step too far faults. */
	fs.alloc_cursor = fs.blocks - 4;
	last = make(&fs, any(TFS_ROOT_INO), "last", 0040755);
	if (tfs_xattr_set(&fs, last, "user.c", data, 100, 0, -1, NULL, 1))
		abort();
	fs.alloc_cursor = fs.blocks - 3;
	if (tfs_set_lock(&fs, last, &lock))
		abort();
	fs.alloc_cursor = fs.blocks - 2;
	if (tfs_create(&fs, last, "link", 4, &link, &ino)) /* takes the block of the target, then one for the name */
		abort();
	names(&fs, last, 0, 31); /* all but two granules of the block */
	dirs[3] = last;
	tmb_u8 *map = area + (fs.map_start << TFS_BLOCK_SHIFT);

	if (map[fs.blocks - 1] != TFS_MAP_USED || map[fs.blocks - 2] != TFS_MAP_USED || map[fs.blocks - 3] != TFS_MAP_USED)
		abort();
	die_halfway(make(&fs, any(TFS_ROOT_INO), "half", 0100644));
	mutator = mutator_new(area, AREA_BYTES);
	if (!mutator || mmap(area, AREA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, image, 0) == MAP_FAILED)
		abort();
}

static bool emit(void *ctx, const char *name, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next)
{
	for (tmb_u32 i = 0; i < len; i++)
		fuzz_sink ^= (tmb_u8)name[i];
	fuzz_sink ^= (tmb_u8)(ino ^ type ^ next);
	return --*(int *)ctx > 0;
}

static void name_of(char *name)
{
	static const char *const known[] = {"d", "file", "huge", "link", "new", "e", "other", "last", "half"};
	tmb_u64 i = take(NULL, 1);

	if (i % 4)
		snprintf(name, 64, "%s", known[i / 4 % 9]);
	else
		snprintf(name, 64, "f%d-a-name-that-takes-more-than-one-granule-of-space", (int)(i / 4 % 130));
}

/* A write, map and copy in pieces as the kernel does it. */
static void write_in_steps(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count)
{
	struct tfs_write w;

	if (tfs_write_begin(fs, h, &w))
		return;
	int err = tfs_extend_zero_locked(fs, h, fblock << TFS_BLOCK_SHIFT);

	if (!err)
		err = tfs_write_map_locked(fs, &w, fblock, count);
	if (!err) {
		memset(tfs_block(fs, w.run.block), 1, w.run.count << TFS_BLOCK_SHIFT);
		err = tfs_write_done_locked(fs, &w);
	}
	tfs_write_trim_locked(fs, &w, err ? 0 : (fblock + 1) << TFS_BLOCK_SHIFT);
	tfs_write_end_locked(fs, &w, err ? 0 : (fblock + 1) << TFS_BLOCK_SHIFT, true, 1);
	tfs_unlock_inode(fs, h.ino);
}

/* A read, as the kernel does it. */
static void read_pinned(struct tfs *fs, struct tfs_handle h, tmb_u64 fblock, tmb_u64 count)
{
	tmb_u64 at = fblock << TFS_BLOCK_SHIFT;
	struct tfs_look look;
	tmb_s64 n = tfs_look_begin(fs, h, at, count << TFS_BLOCK_SHIFT, &look);

	if (n <= 0)
		return;
	if (!look.run.count || look.run.count > count || (tmb_u64)n > look.run.count << TFS_BLOCK_SHIFT)
		abort();
	if (look.run.block) {
		fuzz_sink ^= *(tmb_u8 *)tfs_block(fs, look.run.block);
		fuzz_sink ^= *((tmb_u8 *)tfs_block(fs, look.run.block + look.run.count) - 1);
	}
	if (tfs_look_end(fs, &look, at, (tmb_u64)n) > n)
		abort();
}

static void locks(struct tfs *fs, struct tfs_handle h, tmb_u64 at, tmb_u64 len)
{
	struct tfs_file_lock lock = {.owner = at % 8, .start = at, .end = at + len, .type = (tmb_u32)len % 4, .kind = (tmb_u32)at % 3};
	struct tfs_file_lock who = lock;
	int slot;

	tfs_get_lock(fs, h, &who);
	if (tfs_set_lock(fs, h, &lock) != -EAGAIN)
		return;
	slot = tfs_lock_wait_begin(fs, h, &lock);
	/* Every other waiter keeps waiting, so that other calls find it. */
	if (slot >= 0 && len & 4)
		tfs_lock_wait_end(fs, slot);
}

/* Every other time with the inodes that the names are expected to mean. */
static void rename_some(struct tfs *fs, struct tfs_handle dir, const char *name, struct tfs_handle to_dir, const char *other, tmb_u32 how)
{
	struct tfs_name from = {.dir = dir, .name = name, .len = (tmb_u32)strlen(name)};
	struct tfs_name to = {.dir = to_dir, .name = other, .len = (tmb_u32)strlen(other)};
	tmb_u8 type;

	if (how & 8)
		tfs_lookup(fs, dir, name, from.len, &from.expect, &type);
	if (how & 16 && tfs_lookup(fs, to_dir, other, to.len, &to.expect, &type))
		to.expect.ino = TFS_NOTHING;
	tfs_rename(fs, &from, &to, how % 8, 1);
}

/* Posts a change and reads other members' changes. */
static void changes(struct tfs *fs, tmb_u64 ino, tmb_u64 dir, const char *name, tmb_u32 len)
{
	struct tfs_change c = {.ino = ino, .dir = dir, .mask = 1, .name_len = len};
	struct tfs_listener *l = &listeners[fs->member];

	memcpy(c.name, name, len);
	if (tfs_change_wanted(fs))
		tfs_change_unheard(fs, tfs_change_post(fs, &c));
	if (ino % 4 == 0 && tfs_listen_begin(fs, l))
		return;
	for (int i = 0; i < 300 && tfs_listen_next(fs, l, &c) > 0; i++)
		for (tmb_u32 k = 0; k <= c.name_len; k++)
			fuzz_sink ^= (tmb_u8)c.name[k];
}

static void step(struct tfs *fs)
{
	static tmb_u8 buf[70000];
	char name[64], other[64];
	struct tfs_handle h = any(take(NULL, 1)), dir = dirs[take(NULL, 1) % 4], made;
	tmb_u64 ino = h.ino, at = take(NULL, 2) << (take(NULL, 1) % 34), pos = at, len = take(NULL, 2);
	struct tfs_create c = {.mode = 0100644};
	struct tfs_attr attr = {.mode = 0640};
	struct tfs_statfs st;
	struct tfs_run run;
	tmb_u32 length, other_length;
	tmb_u8 type;
	int count = 300;

	name_of(name);
	name_of(other);
	length = (tmb_u32)strlen(name);
	other_length = (tmb_u32)strlen(other);
	switch (take(NULL, 1) % 38) {
	case 0: tfs_lookup(fs, dir, name, length, &made, &type); break;
	case 1: tfs_readdir(fs, dir, &pos, emit, &count); break;
	case 2: tfs_getattr(fs, h, &attr); break;
	case 3: c.open = len & 1; tfs_create(fs, dir, name, length, &c, &made); break;
	case 4: c.mode = 0040755; tfs_create(fs, dir, name, length, &c, &made); break;
	case 5: tfs_unlink(fs, dir, name, length, any(0), 1); break;
	case 6: tfs_rmdir(fs, dir, name, length, any(0), 1); break;
	case 7: rename_some(fs, dir, name, dirs[len % 4], other, (tmb_u32)at); break;
	case 8: tfs_link(fs, dir, name, length, h, 1); break;
	case 9: tfs_pread(fs, h, buf, len, at); break;
	case 10: tfs_pwrite(fs, h, buf, len, &pos, len & 1, len & 2, 1); break;
	case 11: tfs_truncate(fs, h, at, len & 1, 1); break;
	case 12: tfs_fallocate(fs, h, (tmb_u32)len % 8, at, len << (len % 32), 1); break;
	case 13: tfs_seek(fs, h, at, len & 1); break;
	case 14: tfs_xattr_get(fs, h, "user.a", buf, len); break;
	case 15: tfs_xattr_list(fs, h, (char *)buf, len); break;
	case 16:
		tfs_xattr_set(fs, h, len & 1 ? "user.a" : "user.n", len & 2 ? buf : NULL, len, (tmb_u32)at % 3, (int)at % 2 - 1,
			      at & 4 ? &attr : NULL, 1);
		break;
	case 17: tfs_readlink(fs, h, (char *)buf, (tmb_u32)len); break;
	case 18: tfs_open_ref(fs, h); break;
	case 19: tfs_close_ref(fs, h); break;
	case 20: tfs_setattr(fs, h, (tmb_u32)len, &attr, at & 1 ? &attr : NULL); break;
	case 21: tfs_statfs(fs, &st); break;
	case 22: tfs_fault_block(fs, h, at >> 12, len, &run); break;
	case 23: members[2].recovered_epoch = members[2].forgotten_epoch = 0; tfs_recover(fs, 2); break;
	case 24: locks(fs, h, at, len); break;
	case 25: write_in_steps(fs, h, at >> 12, len); break;
	case 26: read_pinned(fs, h, at >> 12, len + 1); break;
	case 27: tfs_map_ref(fs, h); break;
	case 28: tfs_unmap_ref(fs, h); break;
	case 29: tfs_recover_all(fs); break;
	case 30: c.open = true; tfs_create(fs, dir, NULL, 0, &c, &made); break;
	case 31: c.mode = 0120777; c.symlink = name; c.symlink_len = length; tfs_create(fs, dir, other, other_length, &c, &made); break;
	case 36: changes(fs, ino, dir.ino, other, other_length); break;
	case 37: tfs_listen_end(fs); break;
	case 32: { /* the host declares a member dead, or active */
		tmb_u64 *word = (tmb_u64 *)&members[len % 4] + at % (sizeof(*members) / 8);

		*word = mutate_value(mutator, *word, 0, take, NULL);
		break;
	}
	default: mutate(mutator, area, take, NULL); break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tfs fs[MEMBERS] = {0};

	if (!area)
		build();
	in = (struct input){data, size};
	if (madvise(area, AREA_BYTES, MADV_DONTNEED))
		abort();
	reset_members();
	memset(listeners, 0, sizeof(listeners));
	ticks = looks = 0;
	for (tmb_u64 n = take(NULL, 1) % 12; n; n--)
		mutate(mutator, area, take, NULL);
	plan_change();
	running = true;
	fs[1].read_only = take(NULL, 1) % 8 == 0;
	for (tmb_u32 i = 0; i < MEMBERS; i++) {
		looks = naps = 0;
		if (tfs_open(&fs[i], area, AREA_BYTES, members, i, EPOCH))
			goto end;
	}
	for (int i = 0; i < MAX_STEPS && in.left; i++) {
		looks = naps = 0;
		plan_change();
		step(&fs[take(NULL, 1) % MEMBERS]);
	}
	tfs_close(&fs[0]);
end:
	running = false;
	if (allocations)
		abort();
	return 0;
}
