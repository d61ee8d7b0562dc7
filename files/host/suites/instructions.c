// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Runs each operation of the core many times over private memory, each kind in a function of its own, under callgrind: instructions.sh prints how many
 * instructions each kind takes.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "host.h"

#define AREA (256ull << 20)
#define FILES 2000
#define BLOCKS 4096
#define KIND __attribute__((noinline))
#define EACH(n) for (int i = 0; i < (n); i++)

#ifdef NUMBERS /* a checkout from before handles: inodes are named by their numbers */
typedef tmb_u64 handle;
#define ROOT TFS_ROOT_INO
#define NONE 0
#define RENAME(fs, a, n, b, m) tfs_rename(fs, a, n, (tmb_u32)strlen(n), b, m, (tmb_u32)strlen(m), 0, 1)
#define GETATTR(fs, h, a) tfs_getattr(fs, h, 0, a)
#else
typedef struct tfs_handle handle;
#define ROOT ((struct tfs_handle){ TFS_ROOT_INO, 0 })
#define NONE ((struct tfs_handle){})
#define RENAME(fs, a, n, b, m) \
	tfs_rename(fs, &(struct tfs_name){ a, n, (tmb_u32)strlen(n), NONE }, &(struct tfs_name){ b, m, (tmb_u32)strlen(m), NONE }, 0, 1)
#define GETATTR(fs, h, a) tfs_getattr(fs, h, a)
#endif

static struct tmb_member members[TMB_MAX_MEMBERS];
static struct tfs fs;
static char buf[65536];
static handle files[FILES];

static void check(long long r, const char *what)
{
	if (r < 0) {
		fprintf(stderr, "%s: %lld\n", what, r);
		exit(1);
	}
}

static const char *name(char kind, int i)
{
	static char text[32];

	snprintf(text, sizeof(text), "%c%06d", kind, i);
	return text;
}

static handle make(const char *what, unsigned mode)
{
	struct tfs_create c = { .mode = mode, .now = 1 };
	handle h;

	check(tfs_create(&fs, ROOT, what, (tmb_u32)strlen(what), &c, &h), "create");
	return h;
}

KIND void op_create(void) { EACH(FILES) files[i] = make(name('f', i), S_IFREG | 0600); }

KIND void op_lookup(void)
{
	EACH(FILES) {
		const char *n = name('f', i);
		tmb_u8 type;
		handle h;

		check(tfs_lookup(&fs, ROOT, n, (tmb_u32)strlen(n), &h, &type), "lookup");
	}
}

KIND void op_getattr(void)
{
	struct tfs_attr a;

	EACH(FILES) check(GETATTR(&fs, files[i], &a), "getattr");
}

static bool emit(void *ctx, const char *n, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next)
{
	(void)n, (void)len, (void)ino, (void)type, (void)next;
	++*(int *)ctx;
	return true;
}

KIND void op_readdir(void)
{
	tmb_u64 pos = 0;
	int n = 0;

	check(tfs_readdir(&fs, ROOT, &pos, emit, &n), "readdir");
	check(n - FILES, "names");
}

KIND void op_first_4k(void)
{
	EACH(FILES) {
		tmb_u64 at = 0;
		check(tfs_pwrite(&fs, files[i], buf, 4096, &at, false, true, 1), "write");
	}
}

KIND void op_rename(void)
{
	EACH(FILES) {
		char to[32];
		strcpy(to, name('g', i));
		check(RENAME(&fs, ROOT, name('f', i), ROOT, to), "rename");
	}
}

KIND void op_truncate(void) { EACH(FILES / 2) check(tfs_truncate(&fs, files[i], 0, true, 1), "truncate"); }

KIND void op_unlink(void)
{
	EACH(FILES) {
		const char *n = name('g', i);
		check(tfs_unlink(&fs, ROOT, n, (tmb_u32)strlen(n), NONE, 1), "unlink");
	}
}

static handle big;

KIND void op_append_4k(void)
{
	EACH(BLOCKS) {
		tmb_u64 at;
		check(tfs_pwrite(&fs, big, buf, 4096, &at, true, true, 1), "append");
	}
}

KIND void op_append_64(void)
{
	EACH(BLOCKS) {
		tmb_u64 at;
		check(tfs_pwrite(&fs, big, buf, 64, &at, true, true, 1), "append");
	}
}

KIND void op_rewrite_4k(void)
{
	EACH(BLOCKS) {
		tmb_u64 at = (tmb_u64)(i * 7919 % BLOCKS) << 12;
		check(tfs_pwrite(&fs, big, buf, 4096, &at, false, true, 1), "write");
	}
}

KIND void op_read_4k(void) { EACH(BLOCKS) check(tfs_pread(&fs, big, buf, 4096, (tmb_u64)(i * 7919 % BLOCKS) << 12), "read"); }

KIND void op_truncate_16m(void) { check(tfs_truncate(&fs, big, 0, true, 1), "truncate"); }

/* Block 2i of a file, so that each is a run of its own. */
KIND void op_scattered_4k(void)
{
	EACH(BLOCKS) {
		tmb_u64 at = (tmb_u64)i << 13;
		check(tfs_pwrite(&fs, big, buf, 4096, &at, false, true, 1), "write");
	}
}

KIND void op_truncate_runs(void) { check(tfs_truncate(&fs, big, 0, true, 1), "truncate"); }

int main(void)
{
	static const tmb_u8 uuid[16] = { 1 };
	void *area = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (int m = 0; m < 3; m++) {
		members[m].rights = TMB_RIGHT_WRITE;
		members[m].state_epoch = tmb_state_epoch(TMB_MEMBER_ACTIVE, 1);
	}
	check(tfs_mkfs(area, AREA, uuid, "", 5, 0, 0, 0, 0755, 0), "mkfs");
	check(tfs_open(&fs, area, AREA, members, 0, 1), "open");
	op_create();
	op_lookup();
	op_getattr();
	op_readdir();
	op_first_4k();
	op_rename();
	op_truncate();
	op_unlink();
	big = make("big", S_IFREG | 0600);
	op_append_4k();
	op_rewrite_4k();
	op_read_4k();
	op_append_64();
	op_truncate_16m();
	op_scattered_4k();
	op_truncate_runs();
	return 0;
}
