/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A guest's part of the module's tests (claims.py). `claims NAME ARGS…`: exit code 0 when the claim holds, else 1 and a line
 * that says where it does not. Names are the functions in the table at the end.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			printf("%s:%d: not so: %s (errno %d, %s)\n", __func__, __LINE__, #what, errno, strerror(errno)); \
			exit(1); \
		} \
	} while (0)
#define FAILS(call, error) CHECK((errno = 0, (call) == -1) && errno == (error))

static char buf[1 << 20], buf2[1 << 20];

static char *at(const char *dir, const char *name)
{
	static char ring[8][4096];
	static int i;

	i = (i + 1) % 8;
	snprintf(ring[i], sizeof(ring[i]), "%s/%s", dir, name);
	return ring[i];
}

static void fill(char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (char)((seed * 2654435761u + i * 40503u) >> 8);
}

static jmp_buf bus;
static void on_bus(int sig)
{
	(void)sig;
	siglongjmp(bus, 1);
}
/* -1: SIGBUS */
static int peek(volatile unsigned char *p)
{
	if (sigsetjmp(bus, 1))
		return -1;
	return *p;
}

/* --- one guest --------------------------------------------------------------------------------------------------- */

static int data(char **a)
{
	int fd = open(at(a[0], "data"), O_RDWR | O_CREAT | O_EXCL, 0644), fd2;
	struct stat st;
	struct iovec v[3];

	CHECK(fd >= 0);
	fill(buf, 100000, 1);
	CHECK(pwrite(fd, buf, 100000, 5000) == 100000);
	CHECK(!fstat(fd, &st) && st.st_size == 105000);
	memset(buf2, 1, 5000);
	CHECK(pread(fd, buf2, 5000, 0) == 5000 && !buf2[0] && !memcmp(buf2, buf2 + 1, 4999));
	CHECK(pread(fd, buf2, 200000, 5000) == 100000 && !memcmp(buf, buf2, 100000));
	CHECK(pread(fd, buf2, 10, 105000) == 0);
	/* shrink and grow: zeroes come back, not old bytes */
	CHECK(!ftruncate(fd, 6001) && !ftruncate(fd, 20000));
	CHECK(pread(fd, buf2, 20000, 0) == 20000 && buf2[6000] == buf[1000] && !buf2[6001] && !buf2[19999]);
	/* sparse */
	CHECK(pwrite(fd, "x", 1, 10 << 20) == 1);
	CHECK(lseek(fd, 0, SEEK_DATA) == 4096 || lseek(fd, 0, SEEK_DATA) == 0);
	CHECK(lseek(fd, 100000, SEEK_DATA) == 10 << 20);
	CHECK(lseek(fd, 10 << 20, SEEK_HOLE) == (10 << 20) + 1);
	FAILS(lseek(fd, 11 << 20, SEEK_DATA), ENXIO);
	CHECK(!fstat(fd, &st) && st.st_blocks < 200);
	/* fallocate */
	CHECK(!fallocate(fd, FALLOC_FL_KEEP_SIZE, 1 << 20, 1 << 20));
	CHECK(!fstat(fd, &st) && st.st_size == (10 << 20) + 1 && st.st_blocks >= 2048);
	CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 1 << 20, 1 << 20));
	CHECK(!fstat(fd, &st) && st.st_blocks < 200);
	CHECK(pwrite(fd, buf, 10000, 1 << 20) == 10000);
	CHECK(!fallocate(fd, FALLOC_FL_ZERO_RANGE, (1 << 20) + 100, 5000));
	CHECK(pread(fd, buf2, 10000, 1 << 20) == 10000 && !memcmp(buf, buf2, 100) && !buf2[100] && !buf2[5099] && buf2[5100] == buf[5100]);
	CHECK(!fallocate(fd, 0, 20 << 20, 1) && !fstat(fd, &st) && st.st_size == (20 << 20) + 1);
	FAILS(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 0, 4096), EOPNOTSUPP);
	/* append, vectors, O_DIRECT, sendfile */
	fd2 = open(at(a[0], "data"), O_WRONLY | O_APPEND | O_TRUNC);
	CHECK(fd2 >= 0);
	v[0] = (struct iovec){buf, 3};
	v[1] = (struct iovec){buf + 3, 5000};
	v[2] = (struct iovec){buf + 5003, 1};
	CHECK(writev(fd2, v, 3) == 5004 && pwrite(fd2, buf + 5004, 10, 0) == 10);
	CHECK(pread(fd, buf2, 100000, 0) == 5014 && !memcmp(buf, buf2, 5014));
	close(fd2);
	fd2 = open(at(a[0], "data"), O_RDWR | O_DIRECT);
	CHECK(fd2 >= 0);
	void *aligned = aligned_alloc(4096, 8192);
	memset(aligned, 7, 8192);
	CHECK(pwrite(fd2, aligned, 8192, 4096) == 8192 && pread(fd2, aligned, 4096, 8192) == 4096 && *(char *)aligned == 7);
	close(fd2);
	fd2 = open(at(a[0], "copy"), O_RDWR | O_CREAT | O_TRUNC, 0600);
	off_t zero = 0;
	CHECK(sendfile(fd2, fd, &zero, 1 << 20) == 12288);
	CHECK(pread(fd2, buf, 1 << 20, 0) == 12288 && pread(fd, buf2, 1 << 20, 0) == 12288 && !memcmp(buf, buf2, 12288));
	loff_t in = 0, out = 100;
	CHECK(copy_file_range(fd, &in, fd2, &out, 12288, 0) == 12288);
	CHECK(pread(fd2, buf, 12288, 100) == 12288 && !memcmp(buf, buf2, 12288));
	/* bad buffers */
	char *volatile nowhere = (char *)1;
	FAILS(pread(fd, nowhere, 10, 0), EFAULT);
	FAILS(pwrite(fd, nowhere, 10, 0), EFAULT);
	char *half = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(half + 4096, 4096);
	memset(half, 9, 4096);
	CHECK(pwrite(fd, half + 4000, 200, 0) == 96);
	CHECK(pread(fd, half + 4000, 200, 0) == 96);
	CHECK(!fsync(fd) && !fdatasync(fd) && !posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
	FAILS(pwrite(fd, buf, 10, 1ll << 47), EFBIG);
	close(fd);
	close(fd2);
	CHECK(!unlink(at(a[0], "data")) && !unlink(at(a[0], "copy")));
	return 0;
}

static int names(char **a)
{
	const char *d = a[0];
	struct stat st, st2;
	char long_name[300], target[4200];
	int fd;

	CHECK(!mkdir(at(d, "n"), 0755));
	d = strdup(at(d, "n"));
	FAILS(mkdir(at(d, "."), 0755), EEXIST);
	CHECK((fd = open(at(d, "a"), O_CREAT | O_EXCL | O_WRONLY, 0600)) >= 0);
	FAILS(open(at(d, "a"), O_CREAT | O_EXCL | O_WRONLY, 0600), EEXIST);
	CHECK(!link(at(d, "a"), at(d, "b")) && !stat(at(d, "a"), &st) && st.st_nlink == 2);
	FAILS(link(at(d, "a"), at(d, "b")), EEXIST);
	FAILS(rmdir(at(d, "a")), ENOTDIR);
	CHECK(!unlink(at(d, "a")) && !fstat(fd, &st) && st.st_nlink == 1);
	CHECK(!unlink(at(d, "b")) && !fstat(fd, &st) && st.st_nlink == 0 && write(fd, "abc", 3) == 3 && !fstat(fd, &st) && st.st_size == 3);
	CHECK(!close(fd));
	/* renames */
	CHECK(!mkdir(at(d, "d1"), 0755) && !mkdir(at(d, "d2"), 0755) && !mkdir(at(d, "d1/in"), 0755));
	CHECK(!stat(at(d, "d1"), &st) && st.st_nlink == 3);
	FAILS(rmdir(at(d, "d1")), ENOTEMPTY);
	FAILS(rename(at(d, "d1"), at(d, "d1/in/x")), EINVAL);
	FAILS(rename(at(d, "d2"), at(d, "d1")), ENOTEMPTY);
	CHECK(!rename(at(d, "d1/in"), at(d, "d2/in")) && !stat(at(d, "d1"), &st) && st.st_nlink == 2);
	CHECK(!rename(at(d, "d2"), at(d, "d1")) && !stat(at(d, "d1/in"), &st));
	CHECK(!symlink("d1/in", at(d, "s")) && !stat(at(d, "s"), &st) && !stat(at(d, "d1/in"), &st2) && st.st_ino == st2.st_ino);
	CHECK(readlink(at(d, "s"), buf, 100) == 5 && !memcmp(buf, "d1/in", 5) && !lstat(at(d, "s"), &st) && st.st_size == 5);
	close(open(at(d, "f"), O_CREAT | O_WRONLY, 0600));
	FAILS(renameat2(AT_FDCWD, at(d, "f"), AT_FDCWD, at(d, "d1"), RENAME_NOREPLACE), EEXIST);
	FAILS(rename(at(d, "f"), at(d, "d1")), EISDIR);
	FAILS(rename(at(d, "d1"), at(d, "f")), ENOTDIR);
	CHECK(!renameat2(AT_FDCWD, at(d, "f"), AT_FDCWD, at(d, "d1"), RENAME_EXCHANGE));
	CHECK(!stat(at(d, "f/in"), &st) && !stat(at(d, "d1"), &st) && S_ISREG(st.st_mode));
	CHECK(!renameat2(AT_FDCWD, at(d, "d1"), AT_FDCWD, at(d, "d3"), RENAME_WHITEOUT) && !stat(at(d, "d1"), &st) && S_ISCHR(st.st_mode) && !st.st_rdev);
	/* kinds */
	CHECK(!mkfifo(at(d, "fifo"), 0600) && !stat(at(d, "fifo"), &st) && S_ISFIFO(st.st_mode));
	CHECK(!mknod(at(d, "null"), S_IFCHR | 0666, 0x103) && (fd = open(at(d, "null"), O_WRONLY)) >= 0 && write(fd, "x", 1) == 1);
	close(fd);
	CHECK(!stat(at(d, "null"), &st) && st.st_rdev == 0x103);
	/* O_TMPFILE */
	CHECK((fd = open(d, O_TMPFILE | O_RDWR, 0644)) >= 0 && write(fd, "tmp", 3) == 3 && !fstat(fd, &st) && !st.st_nlink);
	snprintf(buf, 100, "/proc/self/fd/%d", fd);
	CHECK(!linkat(AT_FDCWD, buf, AT_FDCWD, at(d, "kept"), AT_SYMLINK_FOLLOW));
	close(fd);
	CHECK(!stat(at(d, "kept"), &st) && st.st_size == 3 && st.st_nlink == 1);
	CHECK((fd = open(d, O_TMPFILE | O_RDWR, 0644)) >= 0);
	close(fd);
	/* limits */
	memset(long_name, 'n', 256);
	long_name[255] = 0;
	CHECK(!mkdir(at(d, long_name), 0755) && !rmdir(at(d, long_name)));
	long_name[255] = 'n';
	long_name[256] = 0;
	FAILS(mkdir(at(d, long_name), 0755), ENAMETOOLONG);
	memset(target, 't', 4095);
	target[4095] = 0;
	CHECK(!symlink(target, at(d, "long")) && readlink(at(d, "long"), buf, 5000) == 4095 && !memcmp(buf, target, 4095));
	/* a directory that is gone */
	CHECK(!mkdir(at(d, "cwd"), 0755) && !chdir(at(d, "cwd")) && !rmdir(at(d, "cwd")));
	FAILS(open("x", O_CREAT | O_WRONLY, 0600), ENOENT);
	CHECK(!stat(".", &st) && !st.st_nlink);
	CHECK(!chdir("/"));
	snprintf(buf, sizeof(buf), "rm -r %s", d);
	CHECK(!system(buf));
	return 0;
}

static int attributes(char **a)
{
	const char *f = strdup(at(a[0], "attr"));
	struct timespec times[2] = {{1000000000, 123456789}, {1, 999999999}};
	struct stat st;
	struct statx sx;
	int fd = open(f, O_RDWR | O_CREAT | O_EXCL, 0640), flags, status;
	pid_t pid;

	CHECK(fd >= 0 && !chmod(f, 04755) && !chown(f, 1000, 1001) && !stat(f, &st) && st.st_uid == 1000 && st.st_gid == 1001);
	CHECK((st.st_mode & 07777) == 0755); /* chown takes setuid away */
	CHECK(!utimensat(AT_FDCWD, f, times, 0) && !stat(f, &st));
	CHECK(st.st_atim.tv_sec == 1000000000 && st.st_atim.tv_nsec == 123456789 && st.st_mtim.tv_sec == 1 && st.st_mtim.tv_nsec == 999999999);
	CHECK(!statx(AT_FDCWD, f, 0, STATX_ALL, &sx) && sx.stx_mask & STATX_BTIME && sx.stx_btime.tv_sec > 1600000000);
	/* the last time that the file system stores, as FUSE mounts of the host have it */
	times[0] = times[1] = (struct timespec){1ll << 34, 5};
	CHECK(!utimensat(AT_FDCWD, f, times, 0) && !stat(f, &st) && st.st_mtim.tv_sec == 9223372035 && !st.st_mtim.tv_nsec);
	/* neither leases, which would not exclude other members, nor flags that the file system does not have */
	FAILS(fcntl(fd, F_SETLEASE, F_WRLCK), EINVAL);
	flags = FS_NODUMP_FL;
	FAILS(ioctl(fd, FS_IOC_SETFLAGS, &flags), EOPNOTSUPP);
	/* changes by a process that is not in the group clear setgid, also where the group may not execute the file */
	for (int way = 0; way < 3; way++) {
		CHECK(!chmod(f, 02666));
		pid = fork();
		if (!pid) {
			CHECK(!setgid(2000) && !setuid(2000));
			int g = open(f, O_WRONLY);
			CHECK(g >= 0 && (way == 0 ? !fallocate(g, 0, 0, 8192) : way == 1 ? write(g, "x", 1) == 1 : !ftruncate(g, 0)));
			CHECK(!fstat(g, &st) && (st.st_mode & 07777) == 0666);
			exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid && !status);
	}
	/* a write by a process without privilege clears setuid */
	CHECK(!chmod(f, 06777));
	if (!(pid = fork())) {
		CHECK(!setgid(2000) && !setuid(2000));
		int g = open(f, O_WRONLY);
		CHECK(g >= 0 && write(g, "x", 1) == 1 && !fstat(g, &st) && (st.st_mode & 07777) == 0777);
		FAILS(chmod(f, 0600), EPERM);
		FAILS(open(at(a[0], "../root-only"), O_RDONLY), ENOENT);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	/* attributes */
	FAILS(getxattr(f, "user.none", buf, 10), ENODATA);
	CHECK(!setxattr(f, "user.a", "hello", 5, 0) && getxattr(f, "user.a", buf, 100) == 5 && !memcmp(buf, "hello", 5));
	FAILS(setxattr(f, "user.a", "x", 1, XATTR_CREATE), EEXIST);
	FAILS(setxattr(f, "user.b", "x", 1, XATTR_REPLACE), ENODATA);
	FAILS(getxattr(f, "user.a", buf, 2), ERANGE);
	CHECK(!setxattr(f, "trusted.t", "x", 1, 0) && !setxattr(f, "security.s", "", 0, 0));
	memset(buf2, 3, 30000);
	CHECK(!setxattr(f, "user.big", buf2, 30000, 0) && getxattr(f, "user.big", buf, 30000) == 30000 && !memcmp(buf, buf2, 30000));
	CHECK(listxattr(f, buf, 1000) == 7 + 10 + 11 + 9);
	CHECK(!removexattr(f, "user.big") && !removexattr(f, "user.a") && listxattr(f, NULL, 0) == 21);
	FAILS(removexattr(f, "user.a"), ENODATA);
	/* flags */
	flags = FS_IMMUTABLE_FL;
	CHECK(!ioctl(fd, FS_IOC_SETFLAGS, &flags));
	FAILS(open(f, O_WRONLY), EPERM);
	FAILS(unlink(f), EPERM);
	FAILS(write(fd, "x", 1), EPERM); /* also through an old descriptor */
	FAILS(ftruncate(fd, 1), EPERM);
	FAILS(fchmod(fd, 0600), EPERM);
	flags = FS_APPEND_FL;
	CHECK(!ioctl(fd, FS_IOC_SETFLAGS, &flags) && !ioctl(fd, FS_IOC_GETFLAGS, &flags) && flags == FS_APPEND_FL);
	FAILS(open(f, O_WRONLY), EPERM);
	flags = 0;
	CHECK(!ioctl(fd, FS_IOC_SETFLAGS, &flags));
	/* ACLs: user 2000 may read another user's file of mode 0600 */
	static const unsigned char acl[] = {2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0xd0, 7, 0, 0,
					    4, 0, 0, 0, 255, 255, 255, 255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};
	CHECK(!chmod(f, 0600) && !setxattr(f, "system.posix_acl_access", acl, sizeof(acl), 0));
	CHECK(!stat(f, &st) && (st.st_mode & 0777) == 0640);
	if (!(pid = fork())) {
		CHECK(!setgid(2000) && !setuid(2000) && open(f, O_RDONLY) >= 0);
		FAILS(open(f, O_WRONLY), EACCES);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	CHECK(!chmod(f, 0600) && getxattr(f, "system.posix_acl_access", buf, 1000) == sizeof(acl) && buf[4 + 3 * 8 + 2] == 0);
	/* chmod changes all bits of a file with an ACL, setting one only the permissions */
	CHECK(!chmod(f, 07640) && !stat(f, &st) && (st.st_mode & 07777) == 07640);
	CHECK(!setxattr(f, "system.posix_acl_access", acl, sizeof(acl), 0) && !stat(f, &st) && (st.st_mode & 07777) == 07640);
	CHECK(!chmod(f, 0700) && !stat(f, &st) && (st.st_mode & 07777) == 0700);
	CHECK(!chmod(f, 02755) && !chown(f, 1000, 1001) && !stat(f, &st) && (st.st_mode & 07777) == 0755);
	/* a default ACL is inherited, and wins over the umask */
	const char *d = strdup(at(a[0], "acldir"));
	umask(077);
	CHECK(!mkdir(d, 0777) && !setxattr(d, "system.posix_acl_default", acl, sizeof(acl), 0));
	CHECK(!close(open(at(d, "x"), O_CREAT | O_WRONLY, 0666)) && !stat(at(d, "x"), &st) && (st.st_mode & 0777) == 0640);
	CHECK(getxattr(at(d, "x"), "system.posix_acl_access", buf, 1000) == sizeof(acl));
	CHECK(!mkdir(at(d, "y"), 0777) && getxattr(at(d, "y"), "system.posix_acl_default", buf, 1000) == sizeof(acl));
	umask(022);
	snprintf(buf, sizeof(buf), "rm -r %s", d);
	CHECK(!system(buf));
	/* set-group-id directories */
	CHECK(!mkdir(d, 0777) && !chown(d, 0, 3000) && !chmod(d, 02777) && !mkdir(at(d, "z"), 0755) && !stat(at(d, "z"), &st));
	CHECK(st.st_gid == 3000 && st.st_mode & S_ISGID);
	CHECK(!rmdir(at(d, "z")) && !rmdir(d));
	close(fd);
	CHECK(!unlink(f));
	return 0;
}

static int directory(char **a)
{
	const char *d = strdup(at(a[0], "big"));
	int n = atoi(a[1]), seen = 0;
	char name[64];
	struct dirent *e;
	char *got = calloc(n, 1);

	CHECK(!mkdir(d, 0755));
	for (int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "file-with-some-name-%d", i);
		CHECK(!mknod(at(d, name), S_IFREG | 0600, 0));
	}
	DIR *dir = opendir(d);
	/* every name exactly once, though half of them are removed while reading */
	while ((e = readdir(dir))) {
		int i;

		if (sscanf(e->d_name, "file-with-some-name-%d", &i) != 1)
			continue;
		CHECK(e->d_type == DT_REG && !got[i]);
		got[i] = 1;
		seen++;
		if (i & 1)
			CHECK(!unlink(at(d, e->d_name)));
	}
	CHECK(seen == n);
	rewinddir(dir);
	for (seen = 0; (e = readdir(dir)); seen++)
		;
	CHECK(seen == n / 2 + 2 + (n & 1));
	/* a position comes back to the same place */
	rewinddir(dir);
	for (int i = 0; i < n / 4; i++)
		e = readdir(dir);
	long where = telldir(dir);
	e = readdir(dir);
	strcpy(name, e->d_name);
	while (readdir(dir))
		;
	seekdir(dir, where);
	CHECK((e = readdir(dir)) && !strcmp(e->d_name, name));
	closedir(dir);
	snprintf(buf, sizeof(buf), "rm -r %s", d);
	CHECK(!system(buf));
	return 0;
}

/* A mapping of a mount by the zone's memory: the kernel takes no references to its pages. */
static int lent(char **a)
{
	int fd = open(at(a[0], "lent"), O_RDWR | O_CREAT | O_TRUNC, 0600), p[2];
	char buf[8192], *m, *own;

	CHECK(fd >= 0 && !ftruncate(fd, 100000));
	m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(m != MAP_FAILED && peek((void *)m) == 0 && peek((void *)(m + 99999)) == 0 && peek((void *)(m + 102400)) == -1);
	memcpy(m + 4000, "across pages", 12);
	CHECK(pread(fd, buf, 12, 4000) == 12 && !memcmp(buf, "across pages", 12));
	CHECK(pwrite(fd, "back", 4, 50000) == 4 && !memcmp(m + 50000, "back", 4));
	own = mmap(NULL, 100000, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(own != MAP_FAILED && !memcmp(own + 50000, "back", 4));
	own[50000] = 'p';
	own[8192] = 'p'; /* written before it is read */
	CHECK(m[50000] == 'b' && own[50000] == 'p' && own[50001] == 'a' && m[8192] == 0);
	CHECK(!ftruncate(fd, 200000) && peek((void *)(m + 150000)) == 0);
	m[150000] = 1;
	CHECK(!ftruncate(fd, 100001) && peek((void *)(m + 150000)) == -1 && peek((void *)(m + 100000)) == 0);
	memset(m, 5, 100000);
	CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8192, 8192) && m[8192] == 0 && m[8191] == 5 && m[16384] == 5);
	CHECK(pwrite(fd, m, 50000, 50001) == 50000 && !memcmp(m, m + 50001, 8000) && pread(fd, m + 4096, 4096, 0) == 4096);
	/* What takes a reference of a page is refused. */
	struct iovec v = {m, 4096};
	CHECK(!pipe(p) && vmsplice(p[1], &v, 1, 0) == -1 && errno == EFAULT);
	CHECK(syscall(SYS_futex, m + 40000, FUTEX_WAKE, 1, NULL, NULL, 0) == -1 && errno == EFAULT);
	CHECK(!munmap(m, 1 << 20) && !munmap(own, 100000) && !close(fd) && !unlink(at(a[0], "lent")));
	return 0;
}

static int mapped(char **a)
{
	const char *f = strdup(at(a[0], "map"));
	int fd = open(f, O_RDWR | O_CREAT | O_TRUNC, 0600), fd2, p[2];
	char *m, *m2;
	struct stat st;

	CHECK(fd >= 0 && !ftruncate(fd, 100000));
	m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(m != MAP_FAILED);
	CHECK(peek((void *)m) == 0 && peek((void *)(m + 99999)) == 0 && peek((void *)(m + 102400)) == -1 && peek((void *)(m + 500000)) == -1);
	memcpy(m + 4000, "across pages", 12);
	CHECK(pread(fd, buf, 12, 4000) == 12 && !memcmp(buf, "across pages", 12));
	CHECK(pwrite(fd, "back", 4, 50000) == 4 && !memcmp(m + 50000, "back", 4));
	/* private copies */
	m2 = mmap(NULL, 100000, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(!memcmp(m2 + 50000, "back", 4));
	m2[50000] = 'p';
	CHECK(m[50000] == 'b' && m2[50000] == 'p');
	munmap(m2, 100000);
	/* growing and shrinking under the mapping */
	CHECK(!ftruncate(fd, 200000) && peek((void *)(m + 150000)) == 0);
	m[150000] = 1;
	CHECK(!ftruncate(fd, 100001) && peek((void *)(m + 150000)) == -1 && peek((void *)(m + 100000)) == 0);
	m[100001] = 77; /* beyond the end, in its page */
	CHECK(!ftruncate(fd, 200000) && m[100001] == 0 && m[150000] == 0);
	/* punch */
	memset(m, 5, 100000);
	CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 8192, 8192) && m[8192] == 0 && m[8191] == 5 && m[16384] == 5);
	/* read and write whose buffer is the mapping itself */
	CHECK(pwrite(fd, m, 50000, 50001) == 50000 && !memcmp(m, m + 50001, 8000));
	CHECK(pread(fd, m + 4096, 4096, 0) == 4096 && m[4096] == 5);
	munmap(m, 1 << 20);
	m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(pwrite(fd, m, 8192, 100) == 8192 && pread(fd, m, 8192, 100) == 8192); /* nothing is faulted in before */
	/* O_DIRECT of another file system's read into the mapping needs pages; so do pipes */
	CHECK(!pipe(p));
	struct iovec v = {m, 4096};
	m[0] = 'q';
	CHECK(vmsplice(p[1], &v, 1, 0) == 4096 && read(p[0], buf, 4096) == 4096 && buf[0] == 'q');
	/* a futex in the mapping, between processes */
	int *word = (int *)(m + 40000);
	*word = 0;
	pid_t pid = fork();
	if (!pid) {
		for (int i = 0; i < 1000 && !__atomic_load_n(word, __ATOMIC_SEQ_CST); i++) {
			struct timespec t = {10, 0};
			syscall(SYS_futex, word, FUTEX_WAIT, 0, &t, NULL, 0);
		}
		exit(*word == 1 ? 0 : 1);
	}
	usleep(100000);
	__atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
	CHECK(syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0) >= 0);
	int status;
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	/* mmap stores change mtime */
	CHECK(!fstat(fd, &st));
	/* huge pages where the file is aligned */
	fd2 = open(at(a[0], "huge"), O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK(!fallocate(fd2, 0, 0, 8 << 20));
	m2 = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd2, 0);
	/* one fault for each of the four, not 2048 */
	struct rusage before, after;
	CHECK(!getrusage(RUSAGE_SELF, &before));
	memset(m2, 3, 8 << 20);
	CHECK(!getrusage(RUSAGE_SELF, &after));
	CHECK(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt < 100);
	CHECK(pread(fd2, buf, 1 << 20, 5 << 20) == 1 << 20 && buf[12345] == 3);
	CHECK(!ftruncate(fd2, 4 << 20) && peek((void *)(m2 + (5 << 20))) == -1 && m2[(4 << 20) - 1] == 3);
	CHECK(!unlink(at(a[0], "huge")) && m2[1 << 20] == 3);
	munmap(m2, 8 << 20);
	close(fd2);
	close(fd);
	CHECK(!unlink(f));
	return 0;
}

/* --- several guests ------------------------------------------------------------------------------------------------ */

/* barrier FILE N ID: returns when N have called it with their ids; the file is mapped, so it is a test of its own. */
static int barrier(char **a)
{
	int n = atoi(a[1]), id = atoi(a[2]), fd = open(a[0], O_RDWR | O_CREAT, 0600);
	uint64_t *m;

	CHECK(fd >= 0 && !ftruncate(fd, 4096));
	m = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	__atomic_fetch_or(m, 1ull << id, __ATOMIC_SEQ_CST);
	for (int i = 0; __atomic_load_n(m, __ATOMIC_SEQ_CST) != (1ull << n) - 1; i++) {
		CHECK(i < 600000);
		usleep(100);
	}
	return 0;
}

/* append FILE ID COUNT: records of various lengths, each filled with a tag of its writer */
static int append(char **a)
{
	int fd = open(a[0], O_WRONLY | O_CREAT | O_APPEND, 0600), id = atoi(a[1]), count = atoi(a[2]);

	CHECK(fd >= 0);
	for (int i = 0; i < count; i++) {
		uint32_t length = 16 + (uint32_t)(i * 7919 + id * 104729) % 9000;

		memset(buf, 'a' + (id + i) % 26, length);
		memcpy(buf, &length, 4);
		memcpy(buf + 4, &id, 4);
		memcpy(buf + 8, &i, 4);
		CHECK(write(fd, buf, length) == (ssize_t)length);
	}
	return 0;
}

/* appended FILE WRITERS COUNT: every record whole, each writer's in order */
static int appended(char **a)
{
	int fd = open(a[0], O_RDONLY), writers = atoi(a[1]), count = atoi(a[2]);
	int next[64] = {0};
	uint32_t length;
	int id, i;

	CHECK(fd >= 0);
	while (read(fd, &length, 4) == 4) {
		CHECK(length >= 16 && length < 10000 && read(fd, buf, length - 4) == (ssize_t)length - 4);
		memcpy(&id, buf, 4);
		memcpy(&i, buf + 4, 4);
		CHECK(id >= 0 && id < writers && next[id] == i);
		next[id]++;
		for (uint32_t k = 8; k < length - 4; k++)
			CHECK(buf[k] == 'a' + (id + i) % 26);
	}
	for (id = 0; id < writers; id++)
		CHECK(next[id] == count);
	return 0;
}

/* win DIR ID COUNT: how many of COUNT names this one created first; "won-ID" keeps it */
static int win(char **a)
{
	int id = atoi(a[1]), count = atoi(a[2]), won = 0;
	char name[64];

	for (int i = 0; i < count; i++) {
		int fd;

		snprintf(name, sizeof(name), "race%d", i);
		fd = open(at(a[0], name), O_CREAT | O_EXCL | O_WRONLY, 0600);
		CHECK(fd >= 0 || errno == EEXIST);
		if (fd >= 0) {
			won++;
			close(fd);
		}
		/* without O_EXCL both get it */
		snprintf(name, sizeof(name), "both%d", i);
		fd = open(at(a[0], name), O_CREAT | O_WRONLY, 0600);
		CHECK(fd >= 0);
		close(fd);
	}
	printf("%d %d\n", id, won);
	return 0;
}

/* Makes 'path' as an object of a kind; returns 0 or -1 with errno. */
static int make_as(const char *path, const char *kind)
{
	int fd;

	if (!strcmp(kind, "mkdir"))
		return mkdir(path, 0700);
	if (!strcmp(kind, "mknod"))
		return mknod(path, S_IFREG | 0600, 0);
	if (!strcmp(kind, "symlink"))
		return symlink("target", path);
	fd = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
	if (fd < 0)
		return -1;
	CHECK(write(fd, "x", 1) == 1 && !close(fd));
	return 0;
}

/* make PATH KIND COUNT: makes PATH COUNT times, each time after another process removed it, then PATH.end */
static int make(char **a)
{
	char end[4096];
	int why = EEXIST;

	snprintf(end, sizeof(end), "%s.end", a[0]);
	for (int i = 0; i < atoi(a[2]) && why == EEXIST;) {
		int err = make_as(a[0], a[1]);

		why = err ? errno : EEXIST;
		i += !err;
	}
	CHECK(!close(open(end, O_CREAT | O_WRONLY, 0600)));
	errno = why;
	CHECK(why == EEXIST);
	return 0;
}

/* unmake PATH KIND: removes PATH whenever it is there, until PATH.end is; prints how often it did */
static int unmake(char **a)
{
	bool is_dir = !strcmp(a[1], "mkdir"), ended = false;
	char end[4096];
	struct stat st;
	int removed = 0;

	snprintf(end, sizeof(end), "%s.end", a[0]);
	for (;;) {
		int err = is_dir ? rmdir(a[0]) : unlink(a[0]);

		CHECK(!err || errno == ENOENT);
		removed += !err;
		if (err && ended)
			break;
		if (err)
			ended = !stat(end, &st);
	}
	CHECK(!unlink(end));
	printf("%d\n", removed);
	return 0;
}

/* Computes for a random number of rounds up to 'most'. */
static void pause_at_random(unsigned int *seed, int most)
{
	for (volatile int n = rand_r(seed) % most; n; n--)
		;
}

/* toggle PATH ROUNDS: makes PATH and removes it again, each after a random pause, until PATH.end is there; prints how often */
static int toggle(char **a)
{
	unsigned int seed = 1;
	char end[4096];
	struct stat st;
	int n = 0;

	snprintf(end, sizeof(end), "%s.end", a[0]);
	for (; stat(end, &st); n++) {
		int fd = open(a[0], O_CREAT | O_WRONLY, 0600);

		CHECK(fd >= 0 && !close(fd));
		pause_at_random(&seed, atoi(a[1]));
		CHECK(!unlink(a[0]) || errno == ENOENT);
		pause_at_random(&seed, atoi(a[1]));
	}
	CHECK(!unlink(end) && (!unlink(a[0]) || errno == ENOENT));
	printf("%d\n", n);
	return 0;
}

/* reopen PATH make|find COUNT: opens PATH COUNT times, with O_CREAT or if it is there, and then goes on until it has met it there and not there; then makes
 * PATH.end */
static int reopen(char **a)
{
	bool makes = !strcmp(a[1], "make");
	int there = 0, none = 0, why = 0;
	char end[4096];

	snprintf(end, sizeof(end), "%s.end", a[0]);
	while (!why && (there + none < atoi(a[2]) || (!makes && (!there || !none)))) {
		int fd = open(a[0], makes ? O_CREAT | O_RDWR : O_RDWR, 0600);

		if (fd >= 0) {
			CHECK(!close(fd));
			there++;
		} else if (errno == ENOENT && !makes) {
			none++;
		} else {
			why = errno;
		}
	}
	CHECK(!close(open(end, O_CREAT | O_WRONLY, 0600)));
	errno = why;
	CHECK(!why);
	return 0;
}

/* count FILE N: adds 1 N times to a word that all map, and prints it */
static int count(char **a)
{
	int fd = open(a[0], O_RDWR), n = atoi(a[1]);
	uint64_t *m = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK(m != MAP_FAILED);
	for (int i = 0; i < n; i++)
		__atomic_fetch_add(m + 5, 1, __ATOMIC_SEQ_CST);
	printf("%llu\n", (unsigned long long)m[5]);
	return 0;
}

/* watch FILE STOP: maps it, reads all the time; sees its own byte, zero or SIGBUS, and never another file's ('F') */
static int watch(char **a)
{
	int fd = open(a[0], O_RDWR);
	unsigned char *m;
	long good = 0, gone = 0;
	struct stat st;

	CHECK(fd >= 0);
	m = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(m != MAP_FAILED);
	for (unsigned i = 0; i % 4096 || stat(a[1], &st); i++) {
		int v = peek(m + (i * 40961ull) % (4 << 20));

		CHECK(v == -1 || v == 0 || v == 'W');
		if (v == -1)
			gone++;
		else
			good++;
	}
	printf("%ld read, %ld SIGBUS\n", good, gone);
	return 0;
}

/* cut DIR ROUNDS: truncates and punches DIR/watched, refills it, and fills another file with what was freed */
static int cut(char **a)
{
	int fd = open(at(a[0], "watched"), O_RDWR), other = open(at(a[0], "other"), O_RDWR | O_CREAT, 0600);

	CHECK(fd >= 0 && other >= 0);
	for (int i = 0; i < atoi(a[1]); i++) {
		if (i & 1)
			CHECK(!ftruncate(fd, 4096 * (i % 100)) && !ftruncate(fd, 4 << 20));
		else
			CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (i % 50) << 14, 2 << 20));
		memset(buf, 'F', sizeof(buf));
		CHECK(!ftruncate(other, 0));
		for (int k = 0; k < 6; k++)
			CHECK(pwrite(other, buf, sizeof(buf), (off_t)k << 20) == (ssize_t)sizeof(buf));
		memset(buf, 'W', sizeof(buf));
		for (int k = 0; k < 4; k++)
			CHECK(pwrite(fd, buf, sizeof(buf), (off_t)k << 20) == (ssize_t)sizeof(buf));
	}
	return 0;
}

static unsigned seed;
static int R(int n)
{
	seed = seed * 1103515245 + 12345;
	return (int)((seed >> 16) % (unsigned)n);
}

/* storm DIR ID ROUNDS: everything at once in one small tree; only errors that concurrency explains are allowed */
static int storm(char **a)
{
	static const int fine[] = {0, ENOENT, EEXIST, ENOTEMPTY, ENOTDIR, EISDIR, ESTALE, EINVAL, ELOOP, ENODATA, EBUSY, EPERM};
	long did = 0;

	seed = (unsigned)atoi(a[1]) * 7919 + 1;

	for (int i = 0; i < atoi(a[2]); i++) {
		char x[256], y[256];
		int rc = 0, fd;
		struct stat st;

		snprintf(x, sizeof(x), R(2) ? "%s/d%d/n%d" : "%s/d%d", a[0], R(4), R(12));
		snprintf(y, sizeof(y), R(2) ? "%s/d%d/n%d" : "%s/d%d", a[0], R(4), R(12));
		errno = 0;
		switch (R(14)) {
		case 0: case 1:
			rc = mkdir(x, 0755);
			break;
		case 2: case 3: case 4:
			rc = fd = open(x, O_CREAT | O_RDWR, 0644);
			if (fd >= 0) {
				fill(buf, 6000, seed);
				if (pwrite(fd, buf, 6000, R(20000)) < 0 || pread(fd, buf2, 20000, 0) < 0)
					rc = -1;
				close(fd);
			}
			break;
		case 5:
			rc = rename(x, y);
			break;
		case 6:
			rc = renameat2(AT_FDCWD, x, AT_FDCWD, y, RENAME_EXCHANGE);
			break;
		case 7:
			rc = unlink(x);
			break;
		case 8:
			rc = rmdir(x);
			break;
		case 9:
			rc = link(x, y);
			break;
		case 10:
			rc = stat(x, &st);
			break;
		case 11: {
			DIR *dir = opendir(x);
			rc = dir ? 0 : -1;
			while (dir && readdir(dir))
				;
			if (dir)
				closedir(dir);
			break;
		}
		case 12:
			rc = truncate(x, R(30000));
			break;
		case 13:
			rc = setxattr(x, "user.s", buf, R(200), 0);
			break;
		}
		if (rc < 0) {
			unsigned k;

			for (k = 0; k < sizeof(fine) / sizeof(fine[0]) && fine[k] != errno; k++)
				;
			if (k == sizeof(fine) / sizeof(fine[0])) {
				printf("round %d, %s %s: %s\n", i, x, y, strerror(errno));
				return 1;
			}
		} else {
			did++;
		}
	}
	printf("%ld of %s worked\n", did, a[2]);
	return 0;
}

/* hold FILE GO: opens FILE and waits for GO to exist; then it must read "held" through the descriptor, and write */
static int hold(char **a)
{
	int fd = open(a[0], O_RDWR);
	char held[4096];
	struct stat st;

	CHECK(fd >= 0);
	snprintf(held, sizeof(held), "%s.held", a[1]);
	CHECK(!close(open(held, O_CREAT | O_WRONLY, 0600)));
	for (int i = 0; stat(a[1], &st); i++) {
		CHECK(i < 60000);
		usleep(1000);
	}
	CHECK(pread(fd, buf, 10, 0) == 4 && !memcmp(buf, "held", 4) && !fstat(fd, &st) && st.st_nlink == 0);
	CHECK(pwrite(fd, "more", 4, 4) == 4 && pread(fd, buf, 10, 0) == 8);
	return 0;
}

/*
 * spliced DIR STOP: pages of 8 mapped files are in pipes after the files were closed. When STOP is there, each pipe still shows its own
 * file's bytes.
 */
static int spliced(char **a)
{
	int pipes[8][2], fd;
	struct stat st;
	char *m;

	for (int i = 0; i < 8; i++) {
		struct iovec io = {.iov_len = 4096};
		char name[8] = {'s', (char)('0' + i), 0};

		fd = open(at(a[0], name), O_RDWR | O_CREAT, 0600);
		CHECK(fd >= 0 && !ftruncate(fd, 1 << 20));
		m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(m != MAP_FAILED);
		memset(m, 'a' + i, 1 << 20);
		io.iov_base = m;
		CHECK(!pipe(pipes[i]) && vmsplice(pipes[i][1], &io, 1, 0) == 4096);
		CHECK(!munmap(m, 1 << 20) && !close(fd));
		if (i & 1)
			CHECK(!unlink(at(a[0], name)));
	}
	fd = open("/proc/sys/vm/drop_caches", O_WRONLY);
	CHECK(fd >= 0 && write(fd, "2", 1) == 1);
	printf("held\n");
	fflush(stdout);
	for (int i = 0; stat(a[1], &st); i++) {
		CHECK(i < 600000);
		usleep(1000);
	}
	for (int i = 0; i < 8; i++) {
		CHECK(read(pipes[i][0], buf, 4096) == 4096);
		for (int k = 0; k < 4096; k++)
			CHECK(buf[k] == 'a' + i);
	}
	printf("shown\n");
	return 0;
}

/* kept FILE STOP: pages of FILE that private and shared mappings show, a written one among these, are in pipes until STOP is there, and keep their bytes */
static int kept(char **a)
{
	const int flags[3] = {MAP_PRIVATE, MAP_SHARED, MAP_SHARED};
	int pipes[3][2], fd = open(a[0], O_RDWR);
	struct stat st;
	char was = 0;

	CHECK(fd >= 0 && !fstat(fd, &st) && pread(fd, &was, 1, 0) == 1);
	for (int i = 0; i < 3; i++) {
		char *m = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, flags[i], fd, 0);
		struct iovec io = {m + 5L * 4096 * i, 4096};

		CHECK(m != MAP_FAILED);
		if (i == 2)
			memset(io.iov_base, was, 4096);
		CHECK(*(volatile char *)io.iov_base == was && !pipe(pipes[i]) && vmsplice(pipes[i][1], &io, 1, 0) == 4096);
	}
	printf("held\n");
	fflush(stdout);
	for (int i = 0; stat(a[1], &st); i++) {
		CHECK(i < 600000);
		usleep(1000);
	}
	for (int i = 0; i < 3; i++) {
		CHECK(read(pipes[i][0], buf, 4096) == 4096);
		for (int k = 0; k < 4096; k++)
			CHECK(buf[k] == was);
	}
	printf("shown\n");
	return 0;
}

/* shows FILE LETTER: all kinds of mappings show LETTER in all of FILE; a futex is found there, and a store is */
static int shows(char **a)
{
	const int flags[3] = {MAP_PRIVATE, MAP_SHARED, MAP_SHARED}, rights[3] = {PROT_READ, PROT_READ, PROT_READ | PROT_WRITE};
	int fd = open(a[0], O_RDWR);
	struct stat st;
	char c;

	CHECK(fd >= 0 && !fstat(fd, &st));
	for (int i = 0; i < 3; i++) {
		volatile char *m = mmap(NULL, (size_t)st.st_size, rights[i], flags[i], fd, 0);

		CHECK(m != MAP_FAILED);
		for (off_t k = 0; k < st.st_size; k += 1024)
			CHECK(m[k] == a[1][0]);
		if (rights[i] & PROT_WRITE)
			for (off_t k = 0; k < st.st_size; k += 4096) {
				CHECK(!syscall(SYS_futex, m + k, FUTEX_WAKE, 1, NULL, NULL, 0));
				m[k + 1] = 'S';
				CHECK(pread(fd, &c, 1, k + 1) == 1 && c == 'S');
				m[k + 1] = a[1][0];
			}
	}
	return 0;
}

/* kept_at FILE PAGE STOP: a page of FILE that a shared mapping shows is in a pipe until STOP is there, and keeps its bytes */
static int kept_at(char **a)
{
	int pipes[2], fd = open(a[0], O_RDWR);
	struct stat st;
	char *m, was;

	CHECK(fd >= 0 && !fstat(fd, &st));
	m = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(m != MAP_FAILED);
	struct iovec io = {m + 4096 * atol(a[1]), 4096};

	was = *(volatile char *)io.iov_base;
	CHECK(!pipe(pipes) && vmsplice(pipes[1], &io, 1, 0) == 4096);
	printf("held\n");
	fflush(stdout);
	for (int i = 0; stat(a[2], &st); i++) {
		CHECK(i < 600000);
		usleep(1000);
	}
	CHECK(read(pipes[0], buf, 4096) == 4096);
	for (int k = 0; k < 4096; k++)
		CHECK(buf[k] == was);
	printf("shown\n");
	return 0;
}

/* Returns when the process sleeps in this system call. */
static void comes_to_sleep_in(pid_t pid, long call)
{
	char path[64], now[256];
	long in = -1;

	snprintf(path, sizeof(path), "/proc/%d/syscall", pid);
	for (int i = 0; in != call; i++) {
		FILE *f = fopen(path, "r");

		CHECK(f && i < 600000);
		if (!fgets(now, sizeof(now), f) || sscanf(now, "%ld", &in) != 1)
			in = -1;
		fclose(f);
		usleep(1000);
	}
}

/* overtaken FILE: a removal by an ordinary user that waits for a page in a pipe does what the flags and the mode allow that FILE has got meanwhile */
static int overtaken(char **a)
{
	static const unsigned int given[3] = {FS_IMMUTABLE_FL, FS_APPEND_FL, 0};

	for (int i = 0; i < 6; i++) {
		bool punches = i & 1, forbidden = given[i / 2];
		unsigned int flags = given[i / 2];
		int pipes[2], status, fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0777);
		struct stat st;
		pid_t pid;

		memset(buf, 'a', 8192);
		CHECK(fd >= 0 && !fchmod(fd, 0777) && write(fd, buf, 8192) == 8192 && !pipe(pipes));
		char *m = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		struct iovec io = {m, 4096};

		CHECK(m != MAP_FAILED && *(volatile char *)m == 'a' && vmsplice(pipes[1], &io, 1, 0) == 4096);
		pid = fork();
		if (!pid) {
			CHECK(!setgid(1000) && !setuid(1000));
			status = punches ? fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192) : ftruncate(fd, 0);
			_exit(status ? errno : 0);
		}
		comes_to_sleep_in(pid, punches ? SYS_fallocate : SYS_ftruncate);
		CHECK(!(forbidden ? ioctl(fd, FS_IOC_SETFLAGS, &flags) : fchmod(fd, 04777)));
		CHECK(read(pipes[0], buf, 4096) == 4096 && buf[0] == 'a');
		CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == (forbidden ? EPERM : 0));
		CHECK(!fstat(fd, &st) && st.st_size == (forbidden || punches ? 8192 : 0) && (st.st_mode & 07777) == 0777);
		if (forbidden || punches)
			CHECK(pread(fd, buf, 8192, 0) == 8192 && buf[0] == (forbidden ? 'a' : 0) && buf[8191] == buf[0]);
		flags = 0;
		CHECK(!ioctl(fd, FS_IOC_SETFLAGS, &flags) && !munmap(m, 8192) && !close(fd) && !close(pipes[0]) && !close(pipes[1]) && !unlink(a[0]));
	}
	return 0;
}

/* anew FILE PAGE LETTER: the page gets another block, full of LETTER */
static int anew(char **a)
{
	int fd = open(a[0], O_RDWR);
	off_t pos = 4096 * atol(a[1]);

	memset(buf, a[2][0], 4096);
	CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, pos, 4096) && pwrite(fd, buf, 4096, pos) == 4096);
	return 0;
}

/* shows_at FILE PAGE LETTER: a shared mapping of all of FILE shows LETTER in the page */
static int shows_at(char **a)
{
	int fd = open(a[0], O_RDWR);
	struct stat st;
	volatile char *m;

	CHECK(fd >= 0 && !fstat(fd, &st));
	m = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(m != MAP_FAILED && m[4096 * atol(a[1])] == a[2][0]);
	return 0;
}

/* polls FILE STOP: looks at a page of FILE through a mapping all the time, until STOP is there; SIGBUS: prints 'gone' */
static int polls(char **a)
{
	int fd = open(a[0], O_RDONLY);
	volatile char *m = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	struct stat st;

	CHECK(m != MAP_FAILED && m[0] == 'p');
	printf("polls\n");
	fflush(stdout);
	if (sigsetjmp(bus, 1)) {
		printf("gone\n");
		return 1;
	}
	for (unsigned long n = 0; n % 4096 || stat(a[1], &st); n++)
		CHECK(m[0] == 'p');
	return 0;
}

/* seen FILE SIZE: prints the sum of its bytes, as a mapping for reading shows them */
static int seen(char **a)
{
	size_t size = (size_t)atol(a[1]);
	int fd = open(a[0], O_RDONLY);
	unsigned char *m = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	unsigned long sum = 0;

	CHECK(m != MAP_FAILED);
	for (size_t i = 0; i < size; i++)
		sum += m[i];
	printf("%lu\n", sum);
	return 0;
}

/* sparse FILE: in a full zone, a file of holes is read through a mapping to which may be stored; a store finds no room */
static int sparse(char **a)
{
	int fd = open(a[0], O_RDWR);
	volatile unsigned char *m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK(fd >= 0 && m != MAP_FAILED);
	for (int i = 0; i < 256; i++)
		CHECK(peek(m + i * 4096) == 0);
	if (sigsetjmp(bus, 1))
		return 0;
	m[0] = 1;
	CHECK(!"a store to a hole of a full zone is refused");
	return 1;
}

/* holes FILE: what is stored into a hole shows in a mapping that showed zeroes there, however it is stored */
static int holes(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0600), reader = open(a[0], O_RDONLY);
	volatile char *r;
	char *w;

	CHECK(fd >= 0 && !ftruncate(fd, 1 << 20));
	r = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, reader, 0);
	w = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(r != MAP_FAILED && w != MAP_FAILED);
	for (int i = 0; i < 256; i++)
		CHECK(!r[i * 4096]);
	CHECK(pwrite(fd, "p", 1, 5 * 4096) == 1 && r[5 * 4096] == 'p' && w[5 * 4096] == 'p');
	w[7 * 4096] = 'w';
	CHECK(r[7 * 4096] == 'w');
	CHECK(!fallocate(fd, 0, 9 * 4096, 4096) && !r[9 * 4096]);
	CHECK(pwrite(fd, "f", 1, 9 * 4096) == 1 && r[9 * 4096] == 'f' && w[9 * 4096] == 'f');
	CHECK(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 20));
	for (int i = 0; i < 256; i++)
		CHECK(!r[i * 4096]);
	CHECK(pwrite(fd, "q", 1, 5 * 4096) == 1 && r[5 * 4096] == 'q');
	return 0;
}

/* filled FILE READY GO: maps the file, sees zeroes; once GO is there, another member has stored 'x' at the start of each of its first 64 pages */
static int filled(char **a)
{
	int fd = open(a[0], O_RDONLY);
	volatile char *m = mmap(NULL, 64 * 4096, PROT_READ, MAP_SHARED, fd, 0);
	struct stat st;

	CHECK(m != MAP_FAILED);
	for (int i = 0; i < 64; i++)
		CHECK(!m[i * 4096]);
	CHECK(close(open(a[1], O_CREAT | O_WRONLY, 0600)) == 0);
	for (int i = 0; stat(a[2], &st); i++)
		CHECK(i < 600000);
	for (int i = 0; i < 64; i++)
		CHECK(m[i * 4096] == 'x');
	return 0;
}

/* fill FILE HOW: stores 'x' at the start of each of the first 64 pages, with write(2) or through a mapping */
static int fill_pages(char **a)
{
	int fd = open(a[0], O_RDWR);
	char *m = mmap(NULL, 64 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	CHECK(m != MAP_FAILED);
	for (int i = 0; i < 64; i++)
		if (!strcmp(a[1], "write"))
			CHECK(pwrite(fd, "x", 1, i * 4096) == 1);
		else
			m[i * 4096] = 'x';
	return 0;
}

/* touched DIR N: maps N files one after the other, stores to each */
static int touched(char **a)
{
	for (int i = 0; i < atoi(a[1]); i++) {
		int fd = open(at(a[0], "touched"), O_RDWR | O_CREAT, 0600);
		char *m;

		CHECK(fd >= 0 && !ftruncate(fd, 65536));
		m = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(m != MAP_FAILED);
		m[4096 * (i % 16)] = 1;
		CHECK(!munmap(m, 65536) && !close(fd) && !unlink(at(a[0], "touched")));
	}
	return 0;
}

/* cut_short DIR: a write whose buffer ends early leaves no blocks behind the end */
static int cut_short(char **a)
{
	const size_t there = 4 * 4096;
	char *m = mmap(NULL, 2 * there, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int whole = open(at(a[0], "whole"), O_RDWR | O_CREAT, 0600), cut = open(at(a[0], "cut"), O_RDWR | O_CREAT, 0600);
	struct stat of_whole, of_cut;

	CHECK(m != MAP_FAILED && whole >= 0 && cut >= 0 && !munmap(m + there, there));
	memset(m, 'x', there);
	FAILS(write(cut, m + there, there), EFAULT);
	CHECK(!fstat(cut, &of_cut) && !of_cut.st_size && !of_cut.st_blocks);
	CHECK(write(whole, m, there) == (ssize_t)there && write(cut, m, 2 * there) == (ssize_t)there);
	CHECK(!fstat(whole, &of_whole) && !fstat(cut, &of_cut));
	CHECK(of_cut.st_size == of_whole.st_size && of_cut.st_blocks == of_whole.st_blocks);
	CHECK(!close(whole) && !close(cut) && !unlink(at(a[0], "whole")) && !unlink(at(a[0], "cut")));
	return 0;
}

/* shown FILE BYTE: a mapping of the file begins with it */
static int shown(char **a)
{
	int fd = open(a[0], O_RDONLY);
	unsigned char *m = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	CHECK(fd >= 0 && m != MAP_FAILED && peek(m) == a[1][0]);
	return 0;
}

/* move FROM TO: without a look at either before, unlike mv */
static int move(char **a)
{
	CHECK(!rename(a[0], a[1]));
	return 0;
}

/* locks DIR: flock, fcntl and OFD locks between processes of one guest */
static int locks(char **a)
{
	const char *f = strdup(at(a[0], "locks"));
	int fd = open(f, O_RDWR | O_CREAT, 0600), fd2 = open(f, O_RDWR), status;
	struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 100, .l_len = 100};
	pid_t pid;

	CHECK(fd >= 0 && fd2 >= 0);
	CHECK(!flock(fd, LOCK_EX));
	FAILS(flock(fd2, LOCK_SH | LOCK_NB), EWOULDBLOCK);
	CHECK(!flock(fd, LOCK_SH) && !flock(fd2, LOCK_SH | LOCK_NB));
	FAILS(flock(fd, LOCK_EX | LOCK_NB), EWOULDBLOCK);
	close(fd2);
	CHECK(!flock(fd, LOCK_EX | LOCK_NB) && !flock(fd, LOCK_UN));
	CHECK(!fcntl(fd, F_SETLK, &l));
	if (!(pid = fork())) {
		struct flock g = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};

		FAILS(fcntl(fd, F_SETLK, &g), EAGAIN);
		CHECK(!fcntl(fd, F_GETLK, &g) && g.l_type == F_WRLCK && g.l_start == 100 && g.l_len == 100 && g.l_pid == getppid());
		g = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 200, .l_len = 50};
		CHECK(!fcntl(fd, F_SETLK, &g));
		g.l_start = 150;
		alarm(20);
		CHECK(!fcntl(fd, F_SETLKW, &g)); /* until the parent lets go */
		exit(0);
	}
	usleep(200000);
	l.l_type = F_UNLCK;
	CHECK(!fcntl(fd, F_SETLK, &l) && waitpid(pid, &status, 0) == pid && !status);
	/* the child's went with it */
	l = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
	CHECK(!fcntl(fd, F_SETLK, &l));
	/* two processes that wait for each other: one is told */
	l = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
	CHECK(!fcntl(fd, F_SETLK, &l));
	l = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
	CHECK(!fcntl(fd, F_SETLK, &l));
	if (!(pid = fork())) {
		struct flock g = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1, .l_len = 1};

		CHECK(!fcntl(fd, F_SETLK, &g));
		g.l_start = 0;
		alarm(20);
		exit(fcntl(fd, F_SETLKW, &g) ? 0 : 7);
	}
	usleep(300000);
	l.l_start = 1;
	alarm(20);
	int mine = fcntl(fd, F_SETLKW, &l) ? errno : 0;
	alarm(0);
	CHECK(mine == EDEADLK || !mine);
	l = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
	CHECK(!fcntl(fd, F_SETLK, &l) && waitpid(pid, &status, 0) == pid);
	CHECK(mine == EDEADLK ? WIFEXITED(status) && WEXITSTATUS(status) == 7 : !status);
	/* open file descriptions */
	fd2 = open(f, O_RDWR);
	l = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
	CHECK(!fcntl(fd, F_OFD_SETLK, &l));
	FAILS(fcntl(fd2, F_OFD_SETLK, &l), EAGAIN);
	FAILS(fcntl(fd, F_SETLEASE, F_RDLCK), EINVAL);
	close(fd);
	CHECK(!fcntl(fd2, F_OFD_SETLK, &l));
	close(fd2);
	CHECK(!unlink(f));
	return 0;
}

/* tally FILE N KIND: adds 1 N times to a number in FILE, by read and write under a lock ("flock", "fcntl" or "ofd") */
static int tally(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT, 0600), n = atoi(a[1]), whole = !strcmp(a[2], "flock"), ofd = !strcmp(a[2], "ofd");
	struct flock l = {.l_whence = SEEK_SET, .l_start = 1000, .l_len = 10};
	long value = 0;

	CHECK(fd >= 0);
	for (int i = 0; i < n; i++) {
		l.l_type = F_WRLCK;
		CHECK(whole ? !flock(fd, LOCK_EX) : !fcntl(fd, ofd ? F_OFD_SETLKW : F_SETLKW, &l));
		value = 0;
		CHECK(pread(fd, &value, sizeof(value), 0) >= 0);
		value++;
		CHECK(pwrite(fd, &value, sizeof(value), 0) == sizeof(value));
		l.l_type = F_UNLCK;
		CHECK(whole ? !flock(fd, LOCK_UN) : !fcntl(fd, ofd ? F_OFD_SETLK : F_SETLK, &l));
	}
	CHECK(pread(fd, &value, sizeof(value), 0) >= 0);
	printf("%ld\n", value);
	return 0;
}

/* locked FILE MS: takes flock and says how long that took, in ms; fails beyond MS. With MS 0: holds it until killed. */
static double now(void);
static int locked(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT, 0600);
	double start = now();

	CHECK(fd >= 0 && !flock(fd, LOCK_EX));
	printf("%.0f ms\n", (now() - start) * 1000);
	fflush(stdout);
	if (!atoi(a[1]))
		pause();
	CHECK((now() - start) * 1000 < atoi(a[1]));
	return 0;
}

/* release FILE GO: takes flock, and releases it when GO is there. */
static int release(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT, 0600);
	struct stat st;

	CHECK(fd >= 0 && !flock(fd, LOCK_EX));
	printf("held\n");
	fflush(stdout);
	while (stat(a[1], &st))
		usleep(1000);
	return flock(fd, LOCK_UN) ? 1 : 0;
}

/* free FILE: fails if a flock is on it */
static int is_free(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT, 0600);

	CHECK(fd >= 0);
	return flock(fd, LOCK_EX | LOCK_NB) ? 1 : 0;
}

/* meta DIR COUNT: files per second by operation */
static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static int meta(char **a)
{
	int n = atoi(a[1]);
	const char *d = strdup(at(a[0], "meta"));
	char name[32], name2[32];
	double t[7];
	struct stat st;

	CHECK(!mkdir(d, 0755));
	t[0] = now();
	for (int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		int fd = open(at(d, name), O_CREAT | O_EXCL | O_WRONLY, 0600);
		CHECK(fd >= 0);
		close(fd);
	}
	t[1] = now();
	for (int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		CHECK(!stat(at(d, name), &st));
	}
	t[2] = now();
	DIR *dir = opendir(d);
	while (readdir(dir))
		;
	closedir(dir);
	t[3] = now();
	for (int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "f%d", i);
		snprintf(name2, sizeof(name2), "g%d", i);
		CHECK(!rename(at(d, name), at(d, name2)));
	}
	t[4] = now();
	for (int i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "g%d", i);
		CHECK(!unlink(at(d, name)));
	}
	t[5] = now();
	CHECK(!rmdir(d));
	printf("create %.0f stat %.0f readdir %.0f rename %.0f unlink %.0f per s\n", n / (t[1] - t[0]), n / (t[2] - t[1]), n / (t[3] - t[2]),
	       n / (t[4] - t[3]), n / (t[5] - t[4]));
	return 0;
}

/* late WHAT FILE READY GO: looks at the file and makes READY; does WHAT once there is GO, by when another guest has changed the file's owner or mode */
static int late(char **a)
{
	static const unsigned char acl[] = {2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 5, 0, 0xd0, 7, 0, 0,
					    4, 0, 5, 0, 255, 255, 255, 255, 16, 0, 5, 0, 255, 255, 255, 255, 32, 0, 5, 0, 255, 255, 255, 255};
	const char *what = a[0], *f = a[1], *name = "system.posix_acl_access";
	struct stat st;
	int fd = open(f, strncmp(what, "fixed", 5) ? O_RDONLY : O_RDWR);

	CHECK(fd >= 0 && !fstat(fd, &st) && !close(open(a[2], O_CREAT | O_WRONLY, 0600)));
	if (!strcmp(what, "truncate") || !strcmp(what, "owner"))
		CHECK(!setgid(2000) && !setuid(2000));
	for (int i = 0; access(a[3], F_OK); i++) {
		CHECK(i < 3000);
		usleep(100000);
	}
	if (!strcmp(what, "acl")) {
		CHECK(!fsetxattr(fd, name, acl, sizeof(acl), 0));
	} else if (!strcmp(what, "chown")) {
		CHECK(!chown(f, 3000, -1));
	} else if (!strcmp(what, "fchown")) {
		CHECK(!fchown(fd, 3000, -1));
	} else if (!strcmp(what, "truncate")) {
		CHECK(!truncate(f, 1));
	} else if (!strcmp(what, "fixed-fallocate")) {
		FAILS(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), EPERM);
	} else if (!strcmp(what, "fixed-xattr")) {
		FAILS(fsetxattr(fd, "user.a", "x", 1, 0), EPERM);
	} else if (!strcmp(what, "fixed-acl")) {
		FAILS(fsetxattr(fd, name, acl, sizeof(acl), 0), EPERM);
	} else if (!strcmp(what, "fixed-write")) {
		FAILS(write(fd, "x", 1), EPERM);
	} else {
		FAILS(fsetxattr(fd, name, acl, sizeof(acl), 0), EPERM);
		FAILS(setxattr(f, name, acl, sizeof(acl), 0), EPERM);
		FAILS(unlink(f), EPERM);
	}
	return 0;
}

/* chattr FILE FLAGS: sets these (FS_*_FL) and no others */
static int chattr(char **a)
{
	int fd = open(a[0], O_RDONLY), flags = atoi(a[1]);

	CHECK(fd >= 0 && !ioctl(fd, FS_IOC_SETFLAGS, &flags));
	return 0;
}

/* mine WHAT FILE: its owner, user 2000, does WHAT, which has to wait; meanwhile another guest changes the file's owner or flags */
static int mine(char **a)
{
	static const unsigned char acl[] = {2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 7, 0, 0xd0, 7, 0, 0,
					    4, 0, 0, 0, 255, 255, 255, 255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};
	const char *what = a[0], *f = a[1], *name = "system.posix_acl_access";
	struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
	int fd = open(f, O_RDONLY), none = 0;

	if (!strcmp(what, "give-acl")) {
		CHECK(!setxattr(f, name, acl, sizeof(acl), 0));
		return 0;
	}
	CHECK(fd >= 0 && !setgid(2000) && !setuid(2000));
	if (!strcmp(what, "chmod"))
		FAILS(chmod(f, 04755), EPERM);
	else if (!strcmp(what, "acl"))
		FAILS(setxattr(f, name, acl, sizeof(acl), 0), EPERM);
	else if (!strcmp(what, "times"))
		FAILS(utimensat(AT_FDCWD, f, times, 0), EPERM);
	else
		FAILS(ioctl(fd, FS_IOC_SETFLAGS, &none), EPERM);
	return 0;
}

/* share FILE UID: gives the file an ACL by which user UID, too, may read and write it */
static int share(char **a)
{
	uint32_t uid = strtoul(a[1], NULL, 10);
	unsigned char acl[] = {2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 6, 0, uid, uid >> 8, uid >> 16, uid >> 24,
			       4, 0, 0, 0, 255, 255, 255, 255, 16, 0, 6, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};

	CHECK(!setxattr(a[0], "system.posix_acl_access", acl, sizeof(acl), 0));
	return 0;
}

/* opens FILE UID: user UID may open the file to read and write it */
static int opens(char **a)
{
	uid_t uid = strtoul(a[1], NULL, 10);

	CHECK(!setgid(uid) && !setuid(uid) && open(a[0], O_RDWR) >= 0);
	return 0;
}

/* look FILE STOP: looks at the file's attributes until there is STOP */
static int look(char **a)
{
	int fd = open(a[0], O_RDONLY);
	struct stat st;

	CHECK(fd >= 0);
	do {
		for (int i = 0; i < 1000; i++)
			CHECK(!fstat(fd, &st));
	} while (access(a[1], F_OK));
	return 0;
}

/* io FILE MIB: MB/s by operation and block size, one job */
static int io(char **a)
{
	size_t total = (size_t)atoi(a[1]) << 20;
	static const size_t sizes[] = {4096, 131072, 1 << 20};
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	for (int k = 0; k < 3; k++) {
		size_t bs = sizes[k], n = total / bs;
		double t[5];

		t[0] = now();
		for (size_t i = 0; i < n; i++)
			CHECK(pwrite(fd, buf, bs, (off_t)(i * bs)) == (ssize_t)bs);
		t[1] = now();
		for (size_t i = 0; i < n; i++)
			CHECK(pwrite(fd, buf, bs, (off_t)((i * 7919 % n) * bs)) == (ssize_t)bs);
		t[2] = now();
		for (size_t i = 0; i < n; i++)
			CHECK(pread(fd, buf, bs, (off_t)(i * bs)) == (ssize_t)bs);
		t[3] = now();
		for (size_t i = 0; i < n; i++)
			CHECK(pread(fd, buf, bs, (off_t)((i * 7919 % n) * bs)) == (ssize_t)bs);
		t[4] = now();
		printf("%zuk: write %.0f randwrite %.0f read %.0f randread %.0f MB/s\n", bs >> 10, total / 1e6 / (t[1] - t[0]),
		       total / 1e6 / (t[2] - t[1]), total / 1e6 / (t[3] - t[2]), total / 1e6 / (t[4] - t[3]));
	}
	close(fd);
	CHECK(!unlink(a[0]));
	return 0;
}

#ifndef __NR_cachestat
#define __NR_cachestat 451
#endif

/* cached FILE: an unprivileged user asks for the page cache's statistics of a file that it maps in each way, which has no page there. */
static int cached(char **a)
{
	static const int ways[][2] = {
		{PROT_READ, MAP_SHARED}, {PROT_READ, MAP_PRIVATE}, {PROT_READ | PROT_WRITE, MAP_SHARED}, {PROT_READ | PROT_WRITE, MAP_PRIVATE},
	};
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0666);
	const size_t size = 8 << 20;

	CHECK(fd >= 0 && !ftruncate(fd, (off_t)size) && pwrite(fd, buf, 65536, 0) == 65536 && pwrite(fd, buf, sizeof(buf), 4 << 20) == sizeof(buf));
	CHECK(!setgid(1000) && !setuid(1000));
	for (int way = 0; way < 4; way++) {
		struct { uint64_t off, len; } all = {0, 0};
		uint64_t counts[5] = {1, 1, 1, 1, 1}; /* cached, dirty, under writeback, evicted, evicted lately */
		volatile char *m = mmap(NULL, size, ways[way][0], ways[way][1], fd, 0);
		long got;

		CHECK(m != MAP_FAILED);
		for (size_t at = 0; at < size; at += 4096)
			(void)m[at];
		got = syscall(__NR_cachestat, fd, &all, counts, 0);
		/* Linux has it since 6.5. */
		CHECK((got == -1 && errno == ENOSYS) || (!got && !counts[0] && !counts[1] && !counts[2] && !counts[3] && !counts[4]));
		CHECK(!munmap((void *)m, size));
	}
	return 0;
}

/*
 * many FILE: an unprivileged user maps a file by one descriptor more often than the system has open files left. All of it succeeds, and leaves the others
 * theirs. Memory and the limit of mappings for a process bound it, not the limit that all users share.
 */
static int many(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0666), status;
	FILE *limit = fopen("/proc/sys/fs/file-max", "r+"), *used = fopen("/proc/sys/fs/file-nr", "r");
	unsigned long was, now;
	pid_t child;

	CHECK(fd >= 0 && limit && used && pwrite(fd, buf, 4096, 0) == 4096);
	CHECK(fscanf(limit, "%lu", &was) == 1 && fscanf(used, "%lu", &now) == 1);
	rewind(limit);
	CHECK(fprintf(limit, "%lu", now + 500) > 0 && !fflush(limit) && (child = fork()) >= 0);
	if (!child) {
		CHECK(!setgid(1000) && !setuid(1000));
		for (int i = 0; i < 4000; i++) {
			volatile char *m = mmap(NULL, 4096, PROT_READ, i % 2 ? MAP_SHARED : MAP_PRIVATE, fd, 0);

			CHECK(m != MAP_FAILED && m[0] == buf[0]);
		}
		CHECK(open("/dev/null", O_RDONLY) >= 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	rewind(limit);
	CHECK(fprintf(limit, "%lu", was) > 0 && !fflush(limit) && !status);
	return 0;
}

/* overlaid FILE: a file that a program maps through overlayfs has there the name that the program opened. Statistics of the page cache harm no kernel. */
static int overlaid(char **a)
{
	struct { uint64_t off, len; } all = {0, 0};
	uint64_t counts[5];
	int fd = open(a[0], O_RDONLY);
	char line[4096], start[32];
	bool named = false;
	FILE *maps;

	CHECK(fd >= 0 && read(fd, buf, 4096) == 4096);
	for (int shared = 0; shared < 2; shared++) {
		char *m = mmap(NULL, 4096, PROT_READ, shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);

		CHECK(m != MAP_FAILED && !memcmp(m, buf, 4096));
		CHECK(!syscall(__NR_cachestat, fd, &all, counts, 0) || errno == ENOSYS);
		sprintf(start, "%lx-", (unsigned long)m);
		CHECK((maps = fopen("/proc/self/maps", "r")));
		while (fgets(line, sizeof(line), maps))
			if (strstr(line, start) == line)
				named = strstr(line, a[0]);
		CHECK(named && !fclose(maps) && !munmap(m, 4096));
		named = false;
	}
	return 0;
}

/* A fanotify group with file identifiers hears what another member makes where the mark is, once 'ready' is there; prints its name. */
static int hears(const char *path, const char *ready, unsigned int mark, uint64_t mask)
{
	int group = fanotify_init(FAN_CLASS_NOTIF | FAN_REPORT_DIR_FID | FAN_REPORT_NAME, O_RDONLY);
	struct fanotify_event_metadata *event = (void *)buf;
	struct fanotify_event_info_fid *info = (void *)(event + 1);
	struct file_handle *dir = (void *)info->handle;
	size_t event_size = sizeof(*event) + sizeof(*info) + sizeof(*dir) + 64; /* room for one */
	const char *name;

	CHECK(group >= 0 && !fanotify_mark(group, FAN_MARK_ADD | mark, mask, AT_FDCWD, path));
	CHECK(!close(open(ready, O_CREAT | O_WRONLY, 0600)));
	alarm(60);
	do {
		CHECK(read(group, buf, event_size) > 0 && event->mask & FAN_CREATE && info->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID_NAME);
		name = (char *)dir->f_handle + dir->handle_bytes;
	} while (!strcmp(name, strrchr(ready, '/') + 1));
	puts(name);
	return 0;
}

/* fan DIR READY */
static int fan(char **a)
{
	return hears(a[0], a[1], 0, FAN_CREATE);
}

/* fan_all MOUNT READY: of directories, wherever they are. */
static int fan_all(char **a)
{
	return hears(a[0], a[1], FAN_MARK_FILESYSTEM, FAN_CREATE | FAN_ONDIR);
}

#define MINE_ONLY 1 /* UFFD_USER_MODE_ONLY */
#define WP_UNPOPULATED (1ull << 13)
#define WP_ASYNC (1ull << 15)

/*
 * guarded FILE: an unprivileged user lets userfaultfd(2) watch for writes to a mapping, as Linux offers it since 6.7, and has system calls read and write
 * pages of it that were not there. They end; a fault that comes back for ever in a system call ends by no signal.
 */
static int guarded(char **a)
{
	struct { uint64_t start, len, mode, ioctls; } watch = {.len = 1 << 20, .mode = UFFDIO_REGISTER_MODE_WP};
	struct { uint64_t start, len, mode; } protect = {.len = 1 << 20, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0666), zero = open("/dev/zero", O_RDONLY), ends[2];

	CHECK(fd >= 0 && zero >= 0 && !pipe(ends) && pwrite(fd, buf, 1 << 20, 0) == 1 << 20);
	CHECK(!setgid(1000) && !setuid(1000));
	for (int shared = 0; shared < 2; shared++) {
		char *m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);
		int watcher = (int)syscall(__NR_userfaultfd, MINE_ONLY | O_CLOEXEC);
		struct { uint64_t api, features, ioctls; } api = {UFFD_API, WP_UNPOPULATED | WP_ASYNC, 0};

		CHECK(m != MAP_FAILED);
		watch.start = protect.start = (uintptr_t)m;
		if (watcher < 0 || ioctl(watcher, UFFDIO_API, &api) || ioctl(watcher, UFFDIO_REGISTER, &watch)) {
			CHECK(errno == EINVAL);
			return 0;
		}
		CHECK(!ioctl(watcher, UFFDIO_WRITEPROTECT, &protect));
		CHECK(write(ends[1], m, 4096) == 4096 ? read(ends[0], buf2, 4096) == 4096 : errno == EFAULT);
		CHECK(read(zero, m + 4096, 4096) == 4096 || errno == EFAULT);
		CHECK(!close(watcher));
		CHECK(read(zero, m, 8192) == 8192 && m[0] == 0);
		CHECK(!munmap(m, 1 << 20));
	}
	return 0;
}

#define POKED_AT 0x700000000000

/*
 * poked FILE: an unprivileged user writes a word into another process's private mapping of a file, whose page is there by a read. The other bytes stay the
 * file's; they are neither zeroes nor what the writing process has at that address.
 */
static int poked(char **a)
{
	int fd = open(a[0], O_RDWR | O_CREAT | O_TRUNC, 0666), status;
	const int own_memory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE;

	fill(buf, 65536, 3);
	CHECK(fd >= 0 && pwrite(fd, buf, 65536, 0) == 65536);
	CHECK(!setgid(1000) && !setuid(1000) && !prctl(PR_SET_DUMPABLE, 1));
	for (int own = 0; own < 2; own++) {
		uint64_t word = 0x4141414141414141;
		struct iovec from = {&word, 8}, to = {(char *)POKED_AT + 96, 8};
		int ready[2], go[2];
		pid_t child;
		char c;

		CHECK(!pipe(ready) && !pipe(go) && (child = fork()) >= 0);
		if (!child) {
			char *m = mmap((void *)POKED_AT, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0);

			CHECK(m != MAP_FAILED && *(volatile char *)m == buf[0]);
			CHECK(write(ready[1], "x", 1) == 1 && read(go[0], &c, 1) == 1);
			memcpy(buf + 96, &word, 8);
			_exit(memcmp(m, buf, 65536) != 0);
		}
		CHECK(read(ready[0], &c, 1) == 1);
		if (own)
			CHECK(mmap((void *)POKED_AT, 65536, PROT_READ | PROT_WRITE, own_memory, -1, 0) != MAP_FAILED);
		CHECK(process_vm_writev(child, &from, 1, &to, 1, 0) == 8 && write(go[1], "x", 1) == 1);
		CHECK(waitpid(child, &status, 0) == child && !status);
	}
	return 0;
}

static const struct {
	const char *name;
	int (*run)(char **args);
	int args;
} table[] = {
	{"share", share, 2}, {"opens", opens, 2},
	{"data", data, 1}, {"names", names, 1}, {"attributes", attributes, 1}, {"directory", directory, 2}, {"mapped", mapped, 1},
	{"lent", lent, 1},
	{"barrier", barrier, 3}, {"append", append, 3}, {"appended", appended, 3}, {"win", win, 3}, {"count", count, 2},
	{"watch", watch, 2}, {"cut", cut, 2}, {"storm", storm, 3}, {"make", make, 3}, {"unmake", unmake, 2},
	{"toggle", toggle, 2}, {"reopen", reopen, 3}, {"hold", hold, 2}, {"spliced", spliced, 2}, {"kept", kept, 2}, {"shows", shows, 2},
	{"kept_at", kept_at, 3}, {"anew", anew, 3}, {"overtaken", overtaken, 1}, {"shows_at", shows_at, 3},
	{"touched", touched, 2}, {"cut_short", cut_short, 1}, {"shown", shown, 2}, {"seen", seen, 2}, {"holes", holes, 1}, {"filled", filled, 3},
	{"fill", fill_pages, 2}, {"move", move, 2}, {"locks", locks, 1}, {"tally", tally, 3},
	{"locked", locked, 2}, {"free", is_free, 1}, {"release", release, 2}, {"meta", meta, 2}, {"io", io, 2}, {"late", late, 4},
	{"polls", polls, 2}, {"chattr", chattr, 2}, {"sparse", sparse, 1}, {"mine", mine, 2}, {"look", look, 2},
	{"cached", cached, 1}, {"guarded", guarded, 1}, {"poked", poked, 1}, {"many", many, 1},
	{"overlaid", overlaid, 1}, {"fan", fan, 2}, {"fan_all", fan_all, 2},
};

int main(int argc, char **argv)
{
	signal(SIGBUS, on_bus);
	umask(022);
	for (size_t i = 0; argc > 1 && i < sizeof(table) / sizeof(table[0]); i++)
		if (!strcmp(argv[1], table[i].name) && argc == table[i].args + 2)
			return table[i].run(argv + 2);
	fprintf(stderr, "usage: claims NAME ARGS\n");
	return 2;
}
