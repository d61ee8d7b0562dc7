/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * abuse DIR SEED N: uses a file system whose memory is damaged: N operations of all kinds on whatever is there. Errors are what it is
 * for; it prints which ones came, and ends. Directories and files that seem to have no end are not followed to it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#define PATHS 256
#define ERRORS 200

static char paths[PATHS][512], buf[1 << 16];
static int n_paths;
static uint64_t state;
static unsigned seen[ERRORS];

static unsigned R(unsigned n)
{
	state += 0x9e3779b97f4a7c15;
	uint64_t z = state;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (unsigned)((z ^ z >> 31) % n);
}

static void tell(long result)
{
	if (result < 0 && errno < ERRORS)
		seen[errno]++;
}

static sigjmp_buf bus;
static void on_bus(int sig)
{
	(void)sig;
	siglongjmp(bus, 1);
}

static void find(const char *dir, int depth)
{
	DIR *d = opendir(dir);
	struct dirent *e;
	int names = 0;

	if (!d) {
		tell(-1);
		return;
	}
	while (names++ < 100 && (errno = 0, e = readdir(d))) {
		char path[1024];
		struct stat st;

		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || strlen(dir) + strlen(e->d_name) > 500)
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
		if (n_paths < PATHS)
			strcpy(paths[n_paths++], path);
		int r = lstat(path, &st);

		tell(r);
		if (!r && S_ISDIR(st.st_mode) && depth < 5)
			find(path, depth + 1);
	}
	tell(errno ? -1 : 0);
	closedir(d);
}

static void with_file(const char *path)
{
	int fd = open(path, O_RDWR | O_NONBLOCK | (R(4) ? 0 : O_CREAT), 0600);
	off_t at = R(8) ? (off_t)R(1 << 22) : (off_t)R(1 << 30) << R(18);
	struct flock lock = {.l_type = (short[]){F_RDLCK, F_WRLCK, F_UNLCK}[R(3)], .l_start = R(100), .l_len = R(100)};
	char *map;

	if (fd < 0) {
		tell(-1);
		return;
	}
	switch (R(12)) {
	case 0: tell(pread(fd, buf, R(sizeof(buf)), at)); break;
	case 1: tell(pwrite(fd, buf, R(sizeof(buf)), at)); break;
	case 2: tell(ftruncate(fd, at)); break;
	case 3: tell(fallocate(fd, 0, at, R(1 << 20) + 1)); break;
	case 4: tell(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, R(1 << 24) + 1)); break;
	case 5: tell(fallocate(fd, FALLOC_FL_ZERO_RANGE, at, R(1 << 24) + 1)); break;
	case 6: tell(lseek(fd, at, R(2) ? SEEK_DATA : SEEK_HOLE)); break;
	case 7: tell(fcntl(fd, R(2) ? F_SETLK : F_GETLK, &lock)); break;
	case 8: tell(flock(fd, (R(2) ? LOCK_EX : LOCK_UN) | LOCK_NB)); break;
	case 9: tell(fsync(fd)); break;
	default:
		map = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, R(2) ? MAP_SHARED : MAP_PRIVATE, fd, at & ~4095L);
		if (map == MAP_FAILED) {
			tell(-1);
			break;
		}
		if (!sigsetjmp(bus, 1))
			for (int i = 0; i < 16; i++) {
				volatile char *byte = map + R(1 << 16);

				*byte = (char)(R(2) ? *byte : 1);
			}
		munmap(map, 1 << 16);
	}
	close(fd);
}

/* A path's handle, bent now and then, and the file that it names. */
static void with_handle(const char *dir, const char *path)
{
	static _Alignas(struct file_handle) char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
	struct file_handle *handle = (void *)room;
	int mount, at = open(dir, O_RDONLY | O_DIRECTORY), fd;

	handle->handle_bytes = MAX_HANDLE_SZ;
	fd = name_to_handle_at(AT_FDCWD, path, handle, &mount, 0);
	tell(fd);
	if (!fd) {
		if (!R(3))
			room[sizeof(*handle) + R(handle->handle_bytes)] ^= (char)(1 << R(8));
		fd = open_by_handle_at(at, handle, O_RDONLY | O_NONBLOCK);
		tell(fd);
		close(fd);
	}
	close(at);
}

static void one(const char *dir)
{
	const char *path = n_paths ? paths[R((unsigned)n_paths)] : dir;
	char other[600];
	struct statvfs vfs;
	struct stat st;

	if (R(3))
		snprintf(other, sizeof(other), "%s/new%u", dir, R(20));
	else
		snprintf(other, sizeof(other), "%s", n_paths ? paths[R((unsigned)n_paths)] : dir);
	switch (R(19)) {
	case 0: tell(stat(path, &st)); break;
	case 1: tell(rename(path, other)); break;
	case 2: tell(link(path, other)); break;
	case 3: tell(unlink(path)); break;
	case 4: tell(mkdir(other, 0755)); break;
	case 5: tell(rmdir(path)); break;
	case 6: tell(symlink("somewhere", other)); break;
	case 7: tell(readlink(path, buf, sizeof(buf))); break;
	case 8: tell(getxattr(path, "user.a", buf, sizeof(buf))); break;
	case 9: tell(setxattr(path, R(2) ? "user.a" : "user.b", buf, R(6000), 0)); break;
	case 10: tell(listxattr(path, buf, sizeof(buf))); break;
	case 11: tell(removexattr(path, "user.a")); break;
	case 12: tell(chmod(path, R(01000))); break;
	case 13: tell(statvfs(dir, &vfs)); break;
	case 14: with_file(other); break;
	case 15: with_handle(dir, path); break;
	default: with_file(path);
	}
}

int main(int argc, char **argv)
{
	int n;

	if (argc != 4)
		return 2;
	signal(SIGBUS, on_bus);
	state = strtoull(argv[2], NULL, 0);
	n = atoi(argv[3]);
	find(argv[1], 0);
	for (int i = 0; i < n; i++)
		one(argv[1]);
	for (int i = 0; i < ERRORS; i++)
		if (seen[i])
			printf("%s:%u ", strerrorname_np(i), seen[i]);
	printf("\n");
	return 0;
}
