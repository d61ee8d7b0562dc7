// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Does the same random calls, above all the rarer ones, in two directories, of which one lies on the file system under test, and compares all that a
 * program can see: `differ DIR[,DIR] DIR SEED CALLS [WITHOUT...]`. Ends with 1 at the first difference and says which call it was. Run as root: each call is
 * some user's. DIR,DIR: one directory as two members mount it, of which each call takes either. WITHOUT: what one of the file systems lacks or does in its
 * own way: zero (fallocate with FALLOC_FL_ZERO_RANGE), flags (chattr), acl, xattr, atime, whiteout, chown (of neither owner nor group), sgid (on what its
 * group may not execute), size (of a file that another member changed: RWF_APPEND and copy_file_range go by the size that the kernel saw last, so an
 * fstat comes before them).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#define FILES 10
#define MAX_SIZE 300000

enum { ZERO, FLAGS, ACL, XATTR, ATIME, WHITEOUT, CHOWN, SGID, SIZE, FEATURES };
static const char *const features[FEATURES] = {"zero", "flags", "acl", "xattr", "atime", "whiteout", "chown", "sgid", "size"};
static int without[FEATURES];

static const char *top[2]; /* the mounts that the present call uses */
static int top_fd[2];
static const char *tops[2][2];
static int tops_fd[2][2];
static unsigned used;
static int fds[2][FILES]; /* -1: none */
static unsigned fd_of[FILES]; /* by which mount it was opened */
static char what[4096];	  /* the present call, in words */
static uint64_t state;
static long step;

static uint64_t rnd(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1dULL;
}

static unsigned below(unsigned n)
{
	return (unsigned)((rnd() >> 33) % n);
}

static __attribute__((format(printf, 1, 2))) void say(const char *format, ...)
{
	size_t len = strlen(what);
	va_list args;

	va_start(args, format);
	vsnprintf(what + len, sizeof(what) - len, format, args);
	va_end(args);
}

/* What one side gave: compared as it is. */
struct got {
	long ret;
	int err;
	char more[9000];
	size_t len;
};

static void note(struct got *g, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	g->len += (size_t)vsnprintf(g->more + g->len, sizeof(g->more) - g->len, format, args);
	va_end(args);
	if (g->len >= sizeof(g->more))
		g->len = sizeof(g->more) - 1;
}

static uint64_t hash(const void *p, size_t n)
{
	const unsigned char *at = p;
	uint64_t h = 1469598103934665603ULL;

	while (n--)
		h = (h ^ *at++) * 1099511628211ULL;
	return h;
}

static int failed;
static void compare(const struct got *g)
{
	if (g[0].ret == g[1].ret && (g[0].ret >= 0 || g[0].err == g[1].err) && !strcmp(g[0].more, g[1].more))
		return;
	printf("call %ld: %s\n  %s: %ld %s %s\n  %s: %ld %s %s\n", step, what, top[0], g[0].ret, g[0].ret < 0 ? strerror(g[0].err) : "", g[0].more, top[1],
	       g[1].ret, g[1].ret < 0 ? strerror(g[1].err) : "", g[1].more);
	failed++;
}

static char lengthy[256];
static const char *names[] = {"a", "b", "c", "d", "e", "f", lengthy, "a", "b", "c"};

static void path_of(char *path)
{
	unsigned depth = 1 + below(3);

	*path = 0;
	for (unsigned i = 0; i < depth; i++) {
		if (i)
			strcat(path, "/");
		strcat(path, names[below(10)]);
	}
	if (!below(40))
		strcat(path, "/");
	if (!below(60))
		strcat(path, "/..");
	if (!below(60))
		strcat(path, "/.");
}

static const char *shown(const char *path)
{
	static char text[4][4096];
	static int turn;
	char *out = text[turn++ % 4], *to = out;

	for (; *path; path++)
		if (!strncmp(path, lengthy, 255)) {
			to = stpcpy(to, "LONG");
			path += 254;
		} else {
			*to++ = *path;
		}
	*to = 0;
	return out;
}

static int euid;
static void become(int uid)
{
	gid_t groups[] = {2000};

	if (seteuid(0) || setegid(0) || setgroups(uid ? 1 : 0, groups) || (uid && setegid((gid_t)uid)) || (uid && seteuid((uid_t)uid))) {
		perror("seteuid");
		exit(2);
	}
	euid = uid;
}

static void describe(struct got *g, const struct stat *given)
{
	struct stat copy = *given, *st = &copy;

	if (without[SGID] && !(st->st_mode & S_IXGRP))
		st->st_mode &= ~(mode_t)S_ISGID;
	note(g, " mode %o uid %d gid %d rdev %lx", st->st_mode, st->st_uid, st->st_gid,
	     S_ISCHR(st->st_mode) || S_ISBLK(st->st_mode) ? (unsigned long)st->st_rdev : 0);
	note(g, " links %ld", (long)st->st_nlink);
	if (!S_ISDIR(st->st_mode))
		note(g, " size %lld", (long long)st->st_size);
}

#define BOTH for (int s = 0; s < 2; s++)
#define DID(call) (g[s].ret = (call), g[s].err = errno)

static unsigned char data[MAX_SIZE], back[2][MAX_SIZE + 8192];

static void fill(unsigned len)
{
	unsigned char c = (unsigned char)(1 + below(255));

	for (unsigned i = 0; i < len; i++)
		data[i] = (unsigned char)(c + i / 7);
}

static const off_t sizes[] = {0, 1, 4095, 4096, 4097, 8192, 12287, 65536, 65537, 131072, 262144, 299999};
static off_t some_offset(void)
{
	if (below(2))
		return (off_t)below(MAX_SIZE);
	return sizes[below(12)];
}

/* Has the kernel see the size of this open file. */
static void see_size(unsigned k)
{
	struct stat st;

	if (without[SIZE])
		BOTH fstat(fds[s][k], &st);
}

static const mode_t modes[] = {0644, 0600, 0666, 0755, 0777, 0, 04755, 02755, 02644, 06777, 01777, 0444, 0222, 0555, 0700, 07777};
static mode_t some_mode(void)
{
	return modes[below(16)] & ~(mode_t)(without[SGID] ? S_ISGID : 0);
}

static const int users[] = {0, 0, 0, 1000, 1000, 1001};

static void acl_of(unsigned char *acl, size_t *len)
{
	static const unsigned short perm[] = {0, 4, 5, 6, 7};
	struct {
		unsigned short tag, perm;
		unsigned id;
	} e[6];
	unsigned n = 0, version = 2;
	int extended = (int)below(3);

	e[n].tag = 1, e[n].perm = perm[below(5)], e[n++].id = ~0u;
	if (extended)
		e[n].tag = 2, e[n].perm = perm[below(5)], e[n++].id = 1000 + below(2);
	e[n].tag = 4, e[n].perm = perm[below(5)], e[n++].id = ~0u;
	if (extended == 2)
		e[n].tag = 8, e[n].perm = perm[below(5)], e[n++].id = 2000;
	if (extended)
		e[n].tag = 0x10, e[n].perm = perm[below(5)], e[n++].id = ~0u;
	e[n].tag = 0x20, e[n].perm = perm[below(5)], e[n++].id = ~0u;
	memcpy(acl, &version, 4);
	memcpy(acl + 4, e, n * 8);
	*len = 4 + n * 8;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void listed(struct got *g, int fd)
{
	char *all[200];
	int n = 0;
	struct dirent *e;
	DIR *d = fdopendir(fd);

	if (!d) {
		g->ret = -1;
		g->err = errno;
		close(fd);
		return;
	}
	errno = 0;
	while ((e = readdir(d)) && n < 200) {
		asprintf(&all[n], "%s:%d", e->d_name, e->d_type);
		n++;
	}
	g->err = errno;
	qsort(all, (size_t)n, sizeof(*all), by_name);
	for (int i = 0; i < n; i++) {
		note(g, " %s", shown(all[i]));
		free(all[i]);
	}
	closedir(d);
}

static void attributes(struct got *g, const char *path)
{
	char list[70000], *all[50];
	unsigned char value[70000];
	ssize_t len = llistxattr(path, list, sizeof(list));
	int n = 0;

	if (len < 0) {
		note(g, " xattrs %s", strerror(errno));
		return;
	}
	for (char *name = list; name < list + len && n < 50; name += strlen(name) + 1)
		all[n++] = name;
	qsort(all, (size_t)n, sizeof(*all), by_name);
	for (int i = 0; i < n; i++) {
		ssize_t got = lgetxattr(path, all[i], value, sizeof(value));

		if (!strcmp(all[i], "security.selinux"))
			continue;
		note(g, " %s=%zd:%llx", all[i], got, got > 0 ? (unsigned long long)hash(value, (size_t)got) : 0);
	}
}

/* Compares the whole trees, as root. */
static void walk(const char *inside)
{
	struct got g[2] = {0};
	char path[2][4600], *entries[200];
	int n = 0;
	struct stat st[2];
	DIR *d;
	struct dirent *e;

	snprintf(what, sizeof(what), "comparison of %s", shown(inside));
	BOTH {
		snprintf(path[s], sizeof(path[s]), "%s%s", top[s], inside);
		DID(lstat(path[s], &st[s]));
		if (g[s].ret)
			continue;
		describe(&g[s], &st[s]);
		if (!S_ISCHR(st[s].st_mode) || st[s].st_rdev) /* whether a whiteout has its directory's ACL is each file system's affair */
			attributes(&g[s], path[s]);
		if (S_ISREG(st[s].st_mode)) {
			int fd = open(path[s], O_RDONLY);
			ssize_t len = pread(fd, back[s], sizeof(back[s]), 0);

			note(&g[s], " data %zd %llx", len, len > 0 ? (unsigned long long)hash(back[s], (size_t)len) : 0);
			close(fd);
		} else if (S_ISLNK(st[s].st_mode)) {
			ssize_t len = readlink(path[s], (char *)back[s], sizeof(back[s]));

			note(&g[s], " to %zd %llx", len, len > 0 ? (unsigned long long)hash(back[s], (size_t)len) : 0);
		} else if (S_ISDIR(st[s].st_mode)) {
			listed(&g[s], open(path[s], O_RDONLY | O_DIRECTORY));
		}
	}
	compare(g);
	if (failed || !S_ISDIR(st[0].st_mode))
		return;
	d = opendir(path[0]);
	while (d && (e = readdir(d)) && n < 200)
		if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
			entries[n++] = strdup(e->d_name);
	if (d)
		closedir(d);
	for (int i = 0; i < n; i++) {
		char *below_it;

		asprintf(&below_it, "%s/%s", inside, entries[i]);
		if (!failed)
			walk(below_it);
		free(below_it);
		free(entries[i]);
	}
}

#define PAST 1000000000L

static void parent_of(char *parent, const char *path)
{
	char *end;

	strcpy(parent, path);
	end = strrchr(parent, '/');
	strcpy(end ? end : parent, end ? "" : ".");
	if (!*parent)
		strcpy(parent, ".");
}

/* Gives the inodes of a call old times, and stores their times of change. */
static void age(const char *path, int fd[2], struct timespec changed[2][3])
{
	struct timespec old[2] = {{PAST, 0}, {PAST, 0}};
	char parent[1600];

	parent_of(parent, path);
	BOTH {
		struct stat st[3];

		memset(st, 0, sizeof(st));
		utimensat(top_fd[s], path, old, AT_SYMLINK_NOFOLLOW);
		utimensat(top_fd[s], parent, old, 0);
		futimens(fd[s], old);
		fstatat(top_fd[s], path, &st[0], AT_SYMLINK_NOFOLLOW);
		fstatat(top_fd[s], parent, &st[1], 0);
		fstat(fd[s], &st[2]);
		for (int i = 0; i < 3; i++)
			changed[s][i] = st[i].st_ctim;
	}
	usleep(6000);
}

static void aged(struct got *g, const char *path, int fd[2], struct timespec changed[2][3])
{
	char parent[1600];

	parent_of(parent, path);
	memset(g, 0, 2 * sizeof(*g));
	say(", then times");
	BOTH {
		struct stat st[3];
		int there[3] = {
			!fstatat(top_fd[s], path, &st[0], AT_SYMLINK_NOFOLLOW),
			!fstatat(top_fd[s], parent, &st[1], 0),
			!fstat(fd[s], &st[2]) && S_ISREG(st[2].st_mode) && !(fcntl(fd[s], F_GETFL) & O_PATH),
		};

		for (int i = 0; i < 3; i++) {
			if (!there[i]) {
				note(&g[s], " none");
				continue;
			}
			note(&g[s], " %s%s%s", st[i].st_mtim.tv_sec == PAST ? "" : "m",
			     st[i].st_ctim.tv_sec == changed[s][i].tv_sec && st[i].st_ctim.tv_nsec == changed[s][i].tv_nsec ? "" : "c",
			     st[i].st_atim.tv_sec == PAST || without[ATIME] ? "" : "a");
		}
	}
	compare(g);
}

/* Opens a file on both sides in place of the k-th one. */
static void reopen(struct got *g, unsigned k, const char *path, int flags, int mode)
{
	fd_of[k] = used;
	BOTH {
		if (fds[s][k] >= 0)
			close(fds[s][k]);
		fds[s][k] = openat(top_fd[s], path, flags, mode);
		g[s].ret = fds[s][k] < 0 ? -1 : 0;
		g[s].err = errno;
	}
}

/* Takes this one of each side's mounts for the present call. */
static void use(unsigned mount)
{
	used = mount;
	BOTH {
		top[s] = tops[s][mount];
		top_fd[s] = tops_fd[s][mount];
	}
}

static void one(void)
{
	static struct got g[2];
	struct timespec changed[2][3];
	int ages = !below(6), aged_fds[2], replaced = 0, none[2] = {-1, -1};
	char a[1600], b[1600];
	unsigned k = below(FILES), j = below(FILES), len;
	off_t at, to;
	int flags, uid = users[below(6)];
	mode_t mode;

	memset(g, 0, sizeof(g));
	*what = 0;
	use(tops[0][0] == tops[0][1] ? 0 : below(2));
	path_of(a);
	path_of(b);
	if (ages) {
		become(0);
		BOTH aged_fds[s] = fds[s][k];
		age(a, aged_fds, changed);
	}
	if (uid != euid)
		become(uid);
	say("[%d%s] ", uid, used ? ", the other mount" : "");
	switch (below(50)) {
	case 0:
	case 1:
	case 2:
	case 3: { /* open */
		static const int access[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR, O_RDWR};
		static const int extra[] = {0, 0, 0, O_CREAT, O_CREAT, O_CREAT, O_CREAT | O_EXCL, O_TRUNC, O_CREAT | O_TRUNC, O_APPEND, O_CREAT | O_APPEND,
					    O_DIRECTORY, O_NOFOLLOW, O_PATH, O_PATH | O_NOFOLLOW, O_RDONLY, O_NOATIME, O_SYNC | O_CREAT};

		flags = access[below(5)] | extra[below(19)] | O_NONBLOCK;
		mode = some_mode();
		say("%u = open(%s, %#o, %o)", k, shown(a), flags, mode);
		reopen(g, k, a, flags, mode);
		replaced = 1;
		break;
	}
	case 4: /* a nameless file */
		flags = O_TMPFILE | (below(2) ? O_RDWR : O_WRONLY) | (below(4) ? 0 : O_EXCL);
		mode = some_mode();
		say("%u = tmpfile(%s, %#o, %o)", k, shown(a), flags, mode);
		reopen(g, k, a, flags, mode);
		replaced = 1;
		break;
	case 5: /* link by descriptor */
		use(fd_of[k]);
		say("linkat(%u, %s)", k, shown(a));
		flags = (int)below(2);
		BOTH {
			char own[64];

			snprintf(own, sizeof(own), "/proc/self/fd/%d", fds[s][k]);
			DID(flags ? linkat(AT_FDCWD, own, top_fd[s], a, AT_SYMLINK_FOLLOW) : linkat(fds[s][k], "", top_fd[s], a, AT_EMPTY_PATH));
		}
		break;
	case 6:
		flags = below(2) ? AT_SYMLINK_FOLLOW : 0;
		say("linkat(%s, %s, %x)", shown(a), shown(b), flags);
		BOTH DID(linkat(top_fd[s], a, top_fd[s], b, flags));
		break;
	case 7:
	case 8:
	case 9: {
		static const unsigned how[] = {0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_EXCHANGE, RENAME_WHITEOUT, RENAME_WHITEOUT | RENAME_NOREPLACE,
					       RENAME_WHITEOUT | RENAME_EXCHANGE};
		unsigned f = how[below(without[WHITEOUT] ? 5 : 8)];

		say("renameat2(%s, %s, %x)", shown(a), shown(b), f);
		BOTH DID(renameat2(top_fd[s], a, top_fd[s], b, f));
		break;
	}
	case 10:
	case 11:
		say("unlink(%s)", shown(a));
		BOTH DID(unlinkat(top_fd[s], a, 0));
		break;
	case 12:
		say("rmdir(%s)", shown(a));
		BOTH DID(unlinkat(top_fd[s], a, AT_REMOVEDIR));
		break;
	case 13:
	case 14:
	case 15:
		mode = modes[below(16)];
		say("mkdir(%s, %o)", shown(a), mode);
		BOTH DID(mkdirat(top_fd[s], a, mode));
		break;
	case 16: {
		static const unsigned lengths[] = {0, 1, 5, 100, 4095, 4094, 2048};
		unsigned n = lengths[below(7)];

		if (below(2)) {
			say("symlink(%s, %s)", shown(b), shown(a));
			BOTH DID(symlinkat(b, top_fd[s], a));
		} else {
			memset(data, 'x', n);
			data[n] = 0;
			say("symlink(%u times x, %s)", n, shown(a));
			BOTH DID(symlinkat((char *)data, top_fd[s], a));
		}
		break;
	}
	case 17: {
		static const mode_t types[] = {S_IFREG, S_IFIFO, S_IFSOCK, S_IFCHR, S_IFBLK, 0, S_IFDIR, S_IFLNK};
		static const unsigned devices[][2] = {{0, 0}, {1, 3}, {4095, 1048575}, {8, 255}, {259, 256}, {0, 1048575}};
		const unsigned *dev = devices[below(6)];

		mode = types[below(8)] | some_mode();
		say("mknod(%s, %o, %u:%u)", shown(a), mode, dev[0], dev[1]);
		BOTH DID(mknodat(top_fd[s], a, mode, makedev(dev[0], dev[1])));
		break;
	}
	case 18:
	case 19:
		mode = some_mode();
		if (below(2)) {
			say("chmod(%s, %o)", shown(a), mode);
			BOTH DID(fchmodat(top_fd[s], a, mode, 0));
		} else {
			say("fchmod(%u, %o)", k, mode);
			BOTH DID(fchmod(fds[s][k], mode));
		}
		break;
	case 20:
	case 21: {
		static const int owners[] = {0, 1000, 1001, -1, 2000, 1000, -1, 4294967294u};
		uid_t u = (uid_t)owners[below(8)];
		gid_t o = (gid_t)owners[below(8)];

		flags = (int)below(3);
		if (without[CHOWN] && u == (uid_t)-1 && o == (gid_t)-1)
			o = 2000;
		say("chown%d(%s or %u, %d, %d)", flags, shown(a), k, (int)u, (int)o);
		BOTH DID(flags == 2 ? fchown(fds[s][k], u, o) : fchownat(top_fd[s], a, u, o, flags ? AT_SYMLINK_NOFOLLOW : 0));
		break;
	}
	case 22: {
		static const long times[] = {0, -1, -1000000000L, 1700000000L, 4000000000L, 2000000000L, 86400L};
		struct timespec t[2] = {{times[below(7)], (long)below(1000000000)}, {times[below(7)], (long)below(1000000000)}};
		int omit = (int)below(8);

		if (omit < 2)
			t[omit].tv_nsec = UTIME_OMIT;
		if (omit == 2)
			t[0].tv_nsec = t[1].tv_nsec = UTIME_NOW;
		say("utimensat(%s, %ld.%ld, %ld.%ld)", shown(a), t[0].tv_sec, t[0].tv_nsec, t[1].tv_sec, t[1].tv_nsec);
		BOTH {
			struct stat st;

			DID(utimensat(top_fd[s], a, t, AT_SYMLINK_NOFOLLOW));
			if (!g[s].ret && !fstatat(top_fd[s], a, &st, AT_SYMLINK_NOFOLLOW)) {
				if (omit > 2 || omit == 1)
					note(&g[s], " %ld.%ld", (long)st.st_atim.tv_sec, st.st_atim.tv_nsec);
				if (omit > 2 || omit == 0)
					note(&g[s], " %ld.%ld", (long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
			}
		}
		break;
	}
	case 23:
	case 24:
		to = below(20) ? some_offset() : -1;
		if (below(2)) {
			say("truncate(%s, %ld)", shown(a), (long)to);
			BOTH {
				char whole[4096];

				snprintf(whole, sizeof(whole), "%s/%s", top[s], a);
				DID(truncate(whole, to));
			}
		} else {
			say("ftruncate(%u, %ld)", k, (long)to);
			BOTH DID(ftruncate(fds[s][k], to));
		}
		break;
	case 25:
	case 26: {
		static const int how[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE,
					  FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE};

		flags = how[below(without[ZERO] ? 3 : 6)];
		at = some_offset();
		to = some_offset();
		say("fallocate(%u, %x, %ld, %ld)", k, flags, (long)at, (long)to);
		if (at + to > MAX_SIZE)
			to = MAX_SIZE - at;
		BOTH DID(fallocate(fds[s][k], flags, at, to));
		break;
	}
	case 27:
	case 28:
	case 29:
	case 30:
		at = some_offset();
		len = below(below(4) ? 9000 : 100000);
		if (at + len > MAX_SIZE)
			len = (unsigned)(MAX_SIZE - at);
		fill(len);
		flags = (int)below(4);
		say("pwrite%d(%u, %u, %ld)", flags, k, len, (long)at);
		see_size(k);
		BOTH {
			struct iovec v[3] = {{data, len / 3}, {data + len / 3, 0}, {data + len / 3, len - len / 3}};

			if (flags == 0)
				DID(pwritev2(fds[s][k], v, 3, at, 0));
			else if (flags == 1)
				DID(pwritev2(fds[s][k], v, 3, at, RWF_APPEND));
			else
				DID(pwrite(fds[s][k], data, len, at));
		}
		break;
	case 31:
	case 32:
		at = some_offset();
		len = below(below(4) ? 9000 : 100000);
		say("pread(%u, %u, %ld)", k, len, (long)at);
		BOTH {
			DID(pread(fds[s][k], back[s], len, at));
			if (g[s].ret > 0)
				note(&g[s], " %llx", (unsigned long long)hash(back[s], (size_t)g[s].ret));
		}
		break;
	case 33: { /* positions */
		int whence = (int)below(5); /* SET CUR END DATA HOLE */

		at = below(10) ? some_offset() : -(off_t)below(5000);
		say("lseek(%u, %ld, %d)", k, (long)at, whence);
		if (whence >= 3) /* where there are holes is each file system's affair */
			whence = SEEK_END;
		BOTH {
			struct stat st;

			if (!fstat(fds[s][k], &st) && S_ISDIR(st.st_mode))
				continue;
			DID(lseek(fds[s][k], at, whence));
		}
		break;
	}
	case 34: /* at the position */
		len = below(5000);
		fill(len);
		flags = (int)below(2);
		say("%s(%u, %u)", flags ? "write" : "read", k, len);
		BOTH {
			struct stat st;
			off_t now = lseek(fds[s][k], 0, SEEK_CUR);

			if (now + len > MAX_SIZE && flags)
				continue;
			if (!fstat(fds[s][k], &st) && !S_ISREG(st.st_mode))
				continue;
			DID(flags ? write(fds[s][k], data, len) : read(fds[s][k], back[s], len));
			note(&g[s], " at %ld", (long)lseek(fds[s][k], 0, SEEK_CUR));
			if (!flags && g[s].ret > 0)
				note(&g[s], " %llx", (unsigned long long)hash(back[s], (size_t)g[s].ret));
		}
		break;
	case 35:
		at = some_offset();
		to = some_offset();
		len = below(100000);
		if (to + len > MAX_SIZE)
			len = (unsigned)(MAX_SIZE - to);
		say("copy_file_range(%u, %ld, %u, %ld, %u)", k, (long)at, j, (long)to, len);
		see_size(k);
		BOTH {
			loff_t from = at, into = to;

			DID(copy_file_range(fds[s][k], &from, fds[s][j], &into, len, 0));
			note(&g[s], " %ld %ld", (long)from, (long)into);
		}
		break;
	case 36:
		at = some_offset();
		len = below(50000);
		say("sendfile(%u, %u, %ld, %u)", j, k, (long)at, len);
		BOTH {
			off_t from = at, now = lseek(fds[s][j], 0, SEEK_CUR);
			struct stat st;

			if (now + (off_t)len > MAX_SIZE || fstat(fds[s][j], &st) || !S_ISREG(st.st_mode) || st.st_size + len > MAX_SIZE)
				continue;
			if (fstat(fds[s][k], &st) || !S_ISREG(st.st_mode))
				continue;
			DID(sendfile(fds[s][j], fds[s][k], &from, len));
			note(&g[s], " %ld", (long)from);
		}
		break;
	case 37: { /* through a pipe */
		int pipes[2];

		at = some_offset();
		to = some_offset();
		len = below(60000);
		if (to + len > MAX_SIZE)
			len = (unsigned)(MAX_SIZE - to);
		say("splice(%u, %ld, %u, %ld, %u)", k, (long)at, j, (long)to, len);
		BOTH {
			loff_t from = at, into = to;
			struct stat st;
			long in, sum = 0;

			if (fstat(fds[s][k], &st) || !S_ISREG(st.st_mode) || pipe(pipes))
				continue;
			in = splice(fds[s][k], &from, pipes[1], NULL, len, SPLICE_F_NONBLOCK);
			g[s].err = errno;
			close(pipes[1]);
			while (in > 0) {
				long out = splice(pipes[0], NULL, fds[s][j], &into, (size_t)in, 0);

				if (out <= 0) {
					note(&g[s], " out %ld %s", out, strerror(errno));
					break;
				}
				sum += out;
				if (out >= in)
					break;
				in -= out;
			}
			close(pipes[0]);
			g[s].ret = in < 0 ? -1 : 0;
			if (in >= 0 && len < 4096)
				note(&g[s], " %ld", sum);
		}
		break;
	}
	case 38:
	case 39:
	case 40: { /* extended attributes */
		static const char *keys[] = {"user.a", "user.bb", "trusted.c", "security.x", "user.", "system.x", "user.nul", "plain"};
		static const unsigned lengths[] = {0, 1, 10, 100, 1000, 3000, 5000, 20000, 65537, 30000};
		const char *key = keys[below(8)];

		len = lengths[below(10)];
		fill(len);
		flags = (int)below(3);
		if (without[XATTR])
			break;
		say("lsetxattr(%s, %s, %u, %d)", shown(a), key, len, flags);
		BOTH {
			char whole[4096];

			snprintf(whole, sizeof(whole), "%s/%s", top[s], a);
			DID(lsetxattr(whole, key, data, len, flags));
		}
		break;
	}
	case 41: {
		static const char *keys[] = {"user.a", "user.bb", "trusted.c", "security.x", "user.", "system.x", "system.posix_acl_access",
					     "system.posix_acl_default"};
		const char *key = keys[below(8)];

		flags = (int)below(2);
		if (without[XATTR])
			break;
		say("%s(%s, %s)", flags ? "lremovexattr" : "lgetxattr", shown(a), key);
		len = below(2) ? 70000 : 5;
		BOTH {
			char whole[4096];

			snprintf(whole, sizeof(whole), "%s/%s", top[s], a);
			if (flags) {
				DID(lremovexattr(whole, key));
				continue;
			}
			DID(lgetxattr(whole, key, back[s], len));
			if (g[s].ret > 0)
				note(&g[s], " %llx", (unsigned long long)hash(back[s], (size_t)g[s].ret));
		}
		break;
	}
	case 42:
	case 43: {
		unsigned char acl[64];
		size_t size;
		const char *key = below(2) ? "system.posix_acl_access" : "system.posix_acl_default";

		if (without[ACL])
			break;
		acl_of(acl, &size);
		say("setfacl(%s, %s, %zu bytes)", shown(a), key, size);
		for (size_t i = 4; i < size; i += 8)
			say(" %x:%d", acl[i], acl[i + 2]);
		BOTH {
			char whole[4096];

			snprintf(whole, sizeof(whole), "%s/%s", top[s], a);
			DID(setxattr(whole, key, acl, size, 0));
		}
		break;
	}
	case 44:
		flags = below(2) ? AT_EACCESS : 0;
		len = below(8);
		say("faccessat(%s, %u, %x)", shown(a), len, flags);
		BOTH DID(faccessat(top_fd[s], a, (int)len, flags));
		break;
	case 45:
		if (below(2)) {
			say("stat(%s)", shown(a));
			BOTH {
				struct stat st;

				DID(fstatat(top_fd[s], a, &st, 0));
				if (!g[s].ret)
					describe(&g[s], &st);
			}
		} else {
			say("fstat(%u)", k);
			BOTH {
				struct stat st;

				if (fcntl(fds[s][k], F_GETFL) & O_PATH)
					continue;
				DID(fstat(fds[s][k], &st));
				if (!g[s].ret && S_ISREG(st.st_mode))
					describe(&g[s], &st);
			}
		}
		break;
	case 46:
		say("list(%s)", shown(a));
		BOTH {
			int fd = openat(top_fd[s], a, O_RDONLY | O_DIRECTORY);

			DID(fd < 0 ? -1 : 0);
			if (fd >= 0)
				listed(&g[s], fd);
		}
		break;
	case 47: { /* flags */
		static const int sets[] = {0, FS_APPEND_FL, FS_IMMUTABLE_FL, 0, FS_APPEND_FL | FS_IMMUTABLE_FL};
		int set = sets[below(5)];

		if (without[FLAGS] || below(3)) {
			say("readlink(%s)", shown(a));
			BOTH {
				DID(readlinkat(top_fd[s], a, (char *)back[s], sizeof(back[s])));
				if (g[s].ret > 0)
					note(&g[s], " %llx", (unsigned long long)hash(back[s], (size_t)g[s].ret));
			}
			break;
		}
		say("chattr(%s, %x), some calls, chattr(0)", shown(a), set);
		BOTH {
			int fd = openat(top_fd[s], a, O_RDONLY | O_NONBLOCK | O_NOFOLLOW), now = 0, ret;
			struct stat st;
			int no;

			if (fd < 0 || fstat(fd, &st) || (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))) {
				if (fd >= 0)
					close(fd);
				continue;
			}
			ioctl(fd, FS_IOC_GETFLAGS, &now);
			now = (now & ~(FS_APPEND_FL | FS_IMMUTABLE_FL)) | set;
			DID(ioctl(fd, FS_IOC_SETFLAGS, &now));
#define TRY(call) (errno = 0, ret = (int)(call), no = errno, note(&g[s], " %d/%d", ret < 0 ? ret : 0, ret < 0 ? no : 0))
			TRY(fchmod(fd, st.st_mode & 07777));
			TRY(fchown(fd, st.st_uid, st.st_gid));
			TRY(futimens(fd, NULL));
			TRY(linkat(top_fd[s], a, top_fd[s], "linked", 0));
			unlinkat(top_fd[s], "linked", 0);
			TRY(fsetxattr(fd, "user.f", "x", 1, 0));
			TRY(fremovexattr(fd, "user.f"));
			if (S_ISREG(st.st_mode)) {
				int w = openat(top_fd[s], a, O_WRONLY), ap = openat(top_fd[s], a, O_WRONLY | O_APPEND);

				note(&g[s], " w %d ap %d", w >= 0, ap >= 0);
				if (ap >= 0) {
					TRY(write(ap, "", 0));
					TRY(fallocate(ap, 0, 0, 1));
					TRY(fallocate(ap, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, MAX_SIZE, 1));
					TRY(ftruncate(ap, st.st_size));
				}
				if (w >= 0)
					close(w);
				if (ap >= 0)
					close(ap);
			} else {
				int made = openat(fd, "made-there", O_CREAT | O_WRONLY, 0600);

				note(&g[s], " made %d", made >= 0);
				if (made >= 0)
					close(made);
				TRY(renameat(fd, "made-there", fd, "moved-there"));
				TRY(unlinkat(fd, "made-there", 0));
			}
			now &= ~(FS_APPEND_FL | FS_IMMUTABLE_FL);
			become(0);
			ioctl(fd, FS_IOC_SETFLAGS, &now);
			if (S_ISDIR(st.st_mode)) {
				unlinkat(fd, "made-there", 0);
				unlinkat(fd, "moved-there", 0);
			}
			unlinkat(top_fd[s], "linked", 0);
			close(fd);
			become(uid);
		}
		break;
	}
	case 48: { /* by a mapping */
		size_t size = 1 + below(40000);

		at = (off_t)(below(60) * 4096);
		flags = (int)below(2);
		say("map(%u, %zu, %ld, %s)", k, size, (long)at, flags ? "private" : "shared reading");
		BOTH {
			struct stat st;
			unsigned char *p;

			if (fstat(fds[s][k], &st) || !S_ISREG(st.st_mode) || st.st_size <= at)
				continue;
			p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fds[s][k], at);
			g[s].err = errno;
			g[s].ret = p == MAP_FAILED ? -1 : 0;
			if (p == MAP_FAILED)
				continue;
			if ((off_t)size > st.st_size - at)
				size = (size_t)(st.st_size - at);
			note(&g[s], " %llx", (unsigned long long)hash(p, size));
			p[0] ^= 1;
			munmap(p, size);
		}
		break;
	}
	case 49:
		say("close(%u), sync(%u)", k, j);
		replaced = 1;
		BOTH {
			if (fds[s][k] >= 0)
				close(fds[s][k]);
			fds[s][k] = -1;
			DID(fsync(fds[s][j]));
			if (g[s].err == EINVAL) /* of pipes */
				g[s].ret = 0;
		}
		break;
	}
	compare(g);
	if (failed)
		return;
	/* What the call left of the inode. */
	if (ages) {
		become(0);
		BOTH aged_fds[s] = fds[s][k];
		aged(g, a, replaced ? none : aged_fds, changed);
	} else if (!below(3)) {
		become(0);
		memset(g, 0, sizeof(g));
		say(", then lstat");
		BOTH {
			struct stat st;

			DID(fstatat(top_fd[s], a, &st, AT_SYMLINK_NOFOLLOW));
			if (!g[s].ret)
				describe(&g[s], &st);
		}
		compare(g);
	}
}

int main(int argc, char **argv)
{
	long calls;

	if (argc < 5) {
		fprintf(stderr, "differ DIR[,DIR] DIR SEED CALLS [WITHOUT...]\n");
		return 2;
	}
	for (int i = 5; i < argc; i++)
		for (int f = 0; f < FEATURES; f++)
			without[f] |= !strcmp(argv[i], features[f]);
	state = strtoull(argv[3], NULL, 0) * 0x9e3779b97f4a7c15ULL + 1;
	calls = atol(argv[4]);
	memset(lengthy, 'L', 255);
	umask(022);
	setvbuf(stdout, NULL, _IOLBF, 0);
	BOTH {
		char *other = strchr(argv[1 + s], ',');

		if (other)
			*other++ = 0;
		tops[s][0] = argv[1 + s];
		tops[s][1] = other ? other : argv[1 + s];
		for (int i = 0; i < 2; i++) {
			tops_fd[s][i] = open(tops[s][i], O_RDONLY | O_DIRECTORY);
			if (tops_fd[s][i] < 0 || fchmod(tops_fd[s][i], 01777)) {
				perror(tops[s][i]);
				return 2;
			}
		}
		for (int i = 0; i < FILES; i++)
			fds[s][i] = -1;
	}
	for (step = 0; step < calls && !failed; step++) {
		one();
		if (!failed && step % 500 == 499) {
			become(0);
			walk("");
		}
	}
	become(0);
	if (!failed)
		walk("");
	if (failed)
		return 1;
	printf("%ld calls without a difference\n", calls);
	return 0;
}
