// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * libFuzzer on the core: an input is a program that overwrites words of a good file system where they mean something, and calls the
 * core's functions. Whatever is written there, nothing may be touched outside the area (it lies between pages that
 * can't be accessed), nothing may go on without end, and memory that the core took must come back.
 *
 * Time is made up here: each look at the clock is a second later, so that the core's bounded waits end at once.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tfs.h"

#define AREA_BYTES (6u << 20)
#define WORDS (AREA_BYTES / 8)
#define GUARD (1u << 20)
#define MAX_STEPS 60

static tmb_u8 *area, *base;
static struct tmb_member members[TFS_MEMBERS];
static tmb_u64 ticks;
static tmb_u32 used[2048], n_used; /* blocks in use */

void *tfs_os_alloc(tmb_u64 bytes) { return calloc(1, bytes); }
void tfs_os_free(void *p) { free(p); }
void tfs_os_relax(void) {}
void tfs_os_wait(struct tfs *fs, tmb_u32 round) { (void)fs, (void)round; }
tmb_u64 tfs_os_clock(void) { return ticks += 1000000000ULL; }
tmb_s64 tfs_os_now(void) { return 1; }
tmb_u32 tfs_os_cpu(void) { return 0; }
void tfs_os_flush(const void *p, tmb_u64 len) { (void)p, (void)len; }
void tfs_os_drain(void) {}
void tfs_os_ring(struct tfs *fs, tmb_u32 member) { (void)fs, (void)member; }
void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b) { (void)fs, (void)what, (void)a, (void)b; }

struct input {
	const tmb_u8 *data;
	size_t left;
};

static tmb_u64 take(struct input *in, unsigned bytes)
{
	tmb_u64 v = 0;

	for (; bytes && in->left; bytes--, in->left--)
		v = v << 8 | *in->data++;
	return v;
}

static tmb_u64 make(struct tfs *fs, tmb_u64 dir, const char *name, tmb_u32 mode)
{
	struct tfs_create c = {.mode = mode};
	tmb_u64 ino = 0;

	if (tfs_create(fs, dir, name, (tmb_u32)strlen(name), &c, &ino))
		abort();
	return ino;
}

static void reset_members(void)
{
	memset(members, 0, sizeof(members));
	members[0].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, 2);
	members[1].state_epoch = tmb_state_epoch(TMB_MEMBER_DEAD, 2); /* whose leftovers a recovery looks at */
}

static void build(void)
{
	tmb_u8 uuid[16] = {1}, *space;
	struct tfs fs = {0};
	tmb_u64 dir, ino, at;
	char name[64], data[20000];

	space = mmap(NULL, AREA_BYTES + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (space == MAP_FAILED || mprotect(space + GUARD, AREA_BYTES, PROT_READ | PROT_WRITE))
		abort();
	area = space + GUARD;
	base = malloc(AREA_BYTES);
	reset_members();
	if (!base || tfs_mkfs(area, AREA_BYTES, uuid, "fuzz", 7, 0, 0, 0, 0755, 0) || tfs_open(&fs, area, AREA_BYTES, members, 0, 2))
		abort();
	dir = make(&fs, TFS_ROOT_INO, "d", 0040755);
	make(&fs, dir, "e", 0040755);
	memset(data, 7, sizeof(data));
	for (int i = 0; i < 130; i++) { /* enough for an index */
		snprintf(name, sizeof(name), "f%d-a-name-that-takes-more-than-one-granule-of-space", i);
		make(&fs, dir, name, 0100644);
	}
	ino = make(&fs, TFS_ROOT_INO, "file", 0100644);
	at = 0;
	tfs_pwrite(&fs, ino, data, sizeof(data), &at, false, false, 1);
	at = 1ULL << 33;
	tfs_pwrite(&fs, ino, data, 100, &at, false, false, 1);
	tfs_xattr_set(&fs, ino, "user.a", data, 9000, 0, -1, 1);
	tfs_xattr_set(&fs, dir, "user.b", data, 10, 0, -1, 1);
	ino = make(&fs, TFS_ROOT_INO, "huge", 0100644);
	tfs_fallocate(&fs, ino, 0, 0, 2u << 20, 1);
	struct tfs_create link = {.mode = 0120777, .symlink = "target", .symlink_len = 6};

	if (tfs_create(&fs, TFS_ROOT_INO, "link", 4, &link, &ino))
		abort();
	struct tfs_file_lock lock = {.owner = 1, .end = 100, .type = TFS_LK_WRITE, .kind = TFS_LK_POSIX};

	tfs_set_lock(&fs, 2, &lock);
	for (tmb_u32 b = 0; b < AREA_BYTES / TFS_BLOCK && n_used < 2048; b++) {
		tmb_u8 byte = area[(fs.map_start << TFS_BLOCK_SHIFT) + b];

		if (b < 8 || byte == TFS_MAP_USED || b == fs.map_start)
			used[n_used++] = b;
	}
	memcpy(base, area, AREA_BYTES);
}

static void overwrite(struct input *in)
{
	tmb_u64 block = used[take(in, 2) % n_used], word = take(in, 2) % 512, value;
	tmb_u64 *at = (tmb_u64 *)(area + block * TFS_BLOCK) + word;

	switch (take(in, 1) % 8) {
	case 0: value = 0; break;
	case 1: value = ~0ULL; break;
	case 2: value = take(in, 8); break;
	case 3: value = *at ^ 1ULL << (take(in, 1) & 63); break;
	case 4: value = used[take(in, 2) % n_used]; break;
	case 5: value = used[take(in, 2) % n_used] | (take(in, 1) % 6) << 48; break;
	case 6: value = *at + (tmb_u64)(tmb_s64)(int8_t)take(in, 1); break;
	default: value = used[take(in, 2) % n_used] | TFS_ENTRY_HUGE; break;
	}
	*at = value;
}

static bool emit(void *ctx, const char *name, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next)
{
	static volatile tmb_u8 sink;

	for (tmb_u32 i = 0; i < len; i++)
		sink ^= (tmb_u8)name[i];
	sink ^= (tmb_u8)(ino ^ type ^ next);
	return --*(int *)ctx > 0;
}

static void name_of(struct input *in, char *name)
{
	static const char *const known[] = {"d", "file", "huge", "link", "new", "e", "other"};
	tmb_u64 i = take(in, 1);

	if (i % 4)
		snprintf(name, 64, "%s", known[i / 4 % 7]);
	else
		snprintf(name, 64, "f%d-a-name-that-takes-more-than-one-granule-of-space", (int)(i / 4 % 130));
}

static void step(struct tfs *fs, struct input *in)
{
	static tmb_u8 buf[70000];
	char name[64], other[64];
	tmb_u64 ino = take(in, 1), dir = take(in, 1) % 4 + 1, at = take(in, 2) << (take(in, 1) % 24), pos = at, len = take(in, 2);
	struct tfs_create c = {.mode = 0100644};
	struct tfs_attr attr = {.mode = 0640};
	struct tfs_statfs st;
	struct tfs_run run;
	tmb_u8 type;
	int count = 300;

	name_of(in, name);
	name_of(in, other);
	switch (take(in, 1) % 26) {
	case 0: tfs_lookup(fs, dir, name, (tmb_u32)strlen(name), &ino, &type); break;
	case 1: tfs_readdir(fs, dir, &pos, emit, &count); break;
	case 2: tfs_getattr(fs, ino, 0, &attr); break;
	case 3: c.open = len & 1; tfs_create(fs, dir, name, (tmb_u32)strlen(name), &c, &ino); break;
	case 4: c.mode = 0040755; tfs_create(fs, dir, name, (tmb_u32)strlen(name), &c, &ino); break;
	case 5: tfs_unlink(fs, dir, name, (tmb_u32)strlen(name), 0, 1); break;
	case 6: tfs_rmdir(fs, dir, name, (tmb_u32)strlen(name), 0, 1); break;
	case 7: tfs_rename(fs, dir, name, (tmb_u32)strlen(name), len % 4 + 1, other, (tmb_u32)strlen(other), (tmb_u32)at % 8, 1); break;
	case 8: tfs_link(fs, dir, name, (tmb_u32)strlen(name), ino, 1); break;
	case 9: tfs_pread(fs, ino, buf, len, at); break;
	case 10: tfs_pwrite(fs, ino, buf, len, &pos, len & 1, len & 2, 1); break;
	case 11: tfs_truncate(fs, ino, at, len & 1, 1); break;
	case 12: tfs_fallocate(fs, ino, (tmb_u32)len % 8, at, len, 1); break;
	case 13: tfs_seek(fs, ino, at, len & 1); break;
	case 14: tfs_xattr_get(fs, ino, "user.a", buf, len); break;
	case 15: tfs_xattr_list(fs, ino, (char *)buf, len); break;
	case 16: tfs_xattr_set(fs, ino, len & 1 ? "user.a" : "user.n", len & 2 ? buf : NULL, len, (tmb_u32)at % 3, (int)at % 2 - 1, 1); break;
	case 17: tfs_readlink(fs, ino, (char *)buf, (tmb_u32)len); break;
	case 18: tfs_open_ref(fs, ino, 0); break;
	case 19: tfs_close_ref(fs, ino); break;
	case 20: tfs_setattr(fs, ino, (tmb_u32)len, &attr); break;
	case 21: tfs_statfs(fs, &st); break;
	case 22: tfs_fault_block(fs, ino, at >> 12, len, &run); break;
	case 23: members[1].recovered_epoch = members[1].forgotten_epoch = 0; tfs_recover(fs, 1); break;
	case 24: {
		struct tfs_file_lock lock = {.owner = at, .start = at, .end = at + len, .type = (tmb_u32)len % 4, .kind = (tmb_u32)at % 3};

		tfs_get_lock(fs, ino, &lock);
		tfs_set_lock(fs, ino, &lock);
		break;
	}
	default: overwrite(in); break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in = {data, size};
	struct tfs fs = {0};

	if (!area)
		build();
	memcpy(area, base, AREA_BYTES);
	reset_members();
	ticks = 0;
	for (tmb_u64 n = take(&in, 1) % 12; n; n--)
		overwrite(&in);
	if (tfs_open(&fs, area, AREA_BYTES, members, 0, 2))
		return 0;
	for (int i = 0; i < MAX_STEPS && in.left; i++)
		step(&fs, &in);
	tfs_close(&fs);
	return 0;
}
