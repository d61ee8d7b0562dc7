/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * idmapped MOUNT DIR: mounts MOUNT once more at DIR, with owners 0 to 999 of the file system shown as 10000 to 10999, and tries
 * what then must hold. Exit code 0, or 1 and a line that says what does not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			printf("%d: not so: %s (errno %d, %s)\n", __LINE__, #what, errno, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

static char *at(const char *dir, const char *name)
{
	static char ring[4][4096];
	static int i;

	i = (i + 1) % 4;
	snprintf(ring[i], sizeof(ring[i]), "%s/%s", dir, name);
	return ring[i];
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* A user namespace in which 0 to 999 are 10000 to 10999 outside. */
static int name_space(void)
{
	char path[64];
	int ready[2], fd;
	pid_t child;

	CHECK(!pipe(ready));
	child = fork();
	if (!child) {
		CHECK(!unshare(CLONE_NEWUSER) && write(ready[1], "x", 1) == 1);
		pause();
	}
	CHECK(child > 0 && read(ready[0], path, 1) == 1);
	snprintf(path, sizeof(path), "/proc/%d/uid_map", child);
	put(path, "0 10000 1000");
	snprintf(path, sizeof(path), "/proc/%d/gid_map", child);
	put(path, "0 10000 1000");
	snprintf(path, sizeof(path), "/proc/%d/ns/user", child);
	fd = open(path, O_RDONLY);
	CHECK(fd >= 0 && !kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	return fd;
}

static void mount_mapped(const char *from, const char *to)
{
	struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)name_space()};
	int tree = (int)syscall(SYS_open_tree, AT_FDCWD, from, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);

	CHECK(tree >= 0);
	CHECK(!syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof(attr)));
	CHECK(!syscall(SYS_move_mount, tree, "", AT_FDCWD, to, MOVE_MOUNT_F_EMPTY_PATH));
}

static bool owned(const char *path, uid_t uid, gid_t gid)
{
	struct stat st;

	CHECK(!lstat(path, &st));
	return st.st_uid == uid && st.st_gid == gid;
}

/* In a process of that user. */
static int as_user(uid_t id, int (*what)(const char *dir), const char *dir)
{
	int status;
	pid_t child = fork();

	if (!child) {
		CHECK(!setresgid(id, id, id) && !setresuid(id, id, id));
		exit(what(dir));
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
	return WEXITSTATUS(status);
}

static int create_all(const char *dir)
{
	int fd = open(at(dir, "file"), O_CREAT | O_EXCL | O_WRONLY, 0600);

	return fd < 0 || mkdir(at(dir, "dir"), 0755) || symlink("x", at(dir, "link")) || mkfifo(at(dir, "fifo"), 0600) ||
	       open(dir, O_TMPFILE | O_RDWR, 0600) < 0 || rename(at(dir, "fifo"), at(dir, "pipe"));
}

static int create(const char *dir)
{
	return open(at(dir, "unmapped"), O_CREAT | O_EXCL | O_WRONLY, 0600) < 0 ? errno : 0;
}

static int change_own(const char *dir)
{
	return chmod(at(dir, "five"), 0640) || utimensat(AT_FDCWD, at(dir, "five"), NULL, 0) || truncate(at(dir, "five"), 3);
}

static int read_acl_protected(const char *dir)
{
	return open(at(dir, "acl"), O_RDONLY) < 0 ? errno : 0;
}

/* user::rw- user:UID:r-- group::--- mask::r-- other::--- */
static size_t acl_of(uint32_t uid, unsigned char *acl)
{
	static const unsigned char form[] = {2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0, 0, 0, 0, 4, 0, 0, 0, 255, 255, 255, 255,
					     16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};

	memcpy(acl, form, sizeof(form));
	memcpy(acl + 16, &uid, 4);
	return sizeof(form);
}

int main(int argc, char **argv)
{
	const char *plain = argv[1], *mapped = argv[2], *acl_name = "system.posix_acl_access";
	unsigned char acl[64], got[64];
	size_t n;

	if (argc != 3)
		return 2;
	CHECK(!chmod(plain, 0777) && !mknod(at(plain, "five"), S_IFREG | 0600, 0) && !chown(at(plain, "five"), 5, 6));
	CHECK(!mknod(at(plain, "far"), S_IFREG | 0600, 0) && !chown(at(plain, "far"), 5000, 5000));
	mount_mapped(plain, mapped);

	/* Owners are shown mapped; an unmapped owner is shown as the overflow id. */
	CHECK(owned(at(mapped, "five"), 10005, 10006));
	CHECK(owned(at(mapped, "far"), 65534, 65534));
	/* New files belong to the ids that the file system stores. */
	CHECK(as_user(10007, create_all, mapped) == 0);
	CHECK(owned(at(mapped, "file"), 10007, 10007) && owned(at(plain, "file"), 7, 7));
	CHECK(owned(at(plain, "dir"), 7, 7) && owned(at(plain, "link"), 7, 7) && owned(at(plain, "pipe"), 7, 7));
	/* A user without a mapping can't create files. */
	CHECK(as_user(2000, create, mapped) == EOVERFLOW);
	/* An owner is an owner. */
	CHECK(as_user(10005, change_own, mapped) == 0);
	CHECK(as_user(5, change_own, mapped) != 0);
	CHECK(!chown(at(mapped, "five"), 10008, 10009) && owned(at(plain, "five"), 8, 9));
	CHECK(chown(at(mapped, "five"), 20, 20) == -1 && owned(at(plain, "five"), 8, 9));
	/* Access control lists name mapped users. Linux 6.1 maps them only in a buffer of exactly their size. */
	CHECK(!mknod(at(plain, "acl"), S_IFREG | 0600, 0));
	n = acl_of(5, acl);
	CHECK(!setxattr(at(plain, "acl"), acl_name, acl, n, 0));
	CHECK(getxattr(at(mapped, "acl"), acl_name, got, n) == (ssize_t)n);
	acl_of(10005, acl);
	CHECK(!memcmp(acl, got, n));
	CHECK(as_user(10005, read_acl_protected, mapped) == 0 && as_user(10006, read_acl_protected, mapped) == EACCES);
	acl_of(10006, acl);
	CHECK(!setxattr(at(mapped, "acl"), acl_name, acl, n, 0));
	CHECK(getxattr(at(plain, "acl"), acl_name, got, n) == (ssize_t)n);
	acl_of(6, acl);
	CHECK(!memcmp(acl, got, n));
	return 0;
}
