/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * File handles and extents in a guest:
 * handles of FILE: prints the file's handle in hexadecimal digits.
 * handles open MOUNT HANDLE: opens the handle and prints the file's path and first line, or the error's name.
 * handles forge MOUNT: tries handles that no file system gave out.
 * handles extents FILE: prints the extents of FIEMAP and the alignment of statx(2).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/stat.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Alignas(struct file_handle) unsigned char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
static struct file_handle *const handle = (void *)room;
static unsigned char *const bytes = room + sizeof(struct file_handle);

static int of(const char *path)
{
	int mount;

	handle->handle_bytes = MAX_HANDLE_SZ;
	if (name_to_handle_at(AT_FDCWD, path, handle, &mount, 0)) {
		puts(strerrorname_np(errno));
		return 1;
	}
	printf("%02x", (unsigned)handle->handle_type);
	for (unsigned i = 0; i < handle->handle_bytes; i++)
		printf("%02x", bytes[i]);
	puts("");
	return 0;
}

static void parse(const char *digits)
{
	unsigned value;

	sscanf(digits, "%2x", &value);
	handle->handle_type = (int)value;
	handle->handle_bytes = 0;
	for (digits += 2; sscanf(digits, "%2x", &value) == 1; digits += 2)
		bytes[handle->handle_bytes++] = (unsigned char)value;
}

static int open_in(const char *mount)
{
	int at = open(mount, O_RDONLY | O_DIRECTORY), fd = open_by_handle_at(at, handle, O_RDONLY);
	char link[64], path[4096] = "", line[4096] = "";

	if (fd < 0) {
		puts(strerrorname_np(errno));
		return 0;
	}
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	if (readlink(link, path, sizeof(path) - 1) < 0 || (read(fd, line, sizeof(line) - 1) < 0 && errno != EISDIR))
		return 1;
	line[strcspn(line, "\n")] = 0;
	printf("%s %s\n", path, line);
	return 0;
}

/* Handles of numbers and generations near those that exist, of all lengths and types: errors, or some file. */
static int forge(const char *mount)
{
	int at = open(mount, O_RDONLY | O_DIRECTORY), found = 0;

	srand(1);
	for (int i = 0; i < 20000; i++) {
		uint32_t words[6] = {
			(uint32_t)rand() % 64, rand() % 8 ? 0 : (uint32_t)rand(), (uint32_t)rand() % 4, (uint32_t)rand() % 64, 0, (uint32_t)rand() % 4};

		memcpy(bytes, words, sizeof(words));
		handle->handle_type = rand() % 4 ? 0x74 + rand() % 2 : rand() % 256;
		handle->handle_bytes = rand() % 4 ? 12 + 12 * (rand() % 2) : rand() % 25;
		int fd = open_by_handle_at(at, handle, O_RDONLY | O_NONBLOCK);

		if (fd >= 0)
			found++;
		else if (errno != ESTALE && errno != EINVAL && errno != ELOOP && errno != ENXIO)
			return printf("%s\n", strerrorname_np(errno)), 1;
		/* The numbers of a handle with generation 0 are nobody's. */
		if (fd >= 0 && !words[2])
			return puts("a handle without a generation was opened"), 1;
		close(fd);
	}
	printf("%s\n", found ? "some" : "none");
	return 0;
}

static int extents(const char *path)
{
	union {
		struct fiemap map;
		char room[sizeof(struct fiemap) + 64 * sizeof(struct fiemap_extent)];
	} of = {.map = {.fm_length = ~0ull, .fm_extent_count = 64}};
	struct statx st;
	int fd = open(path, O_RDONLY);

	if (fd < 0 || ioctl(fd, FS_IOC_FIEMAP, &of.map) || syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st))
		return perror(path), 1;
	for (unsigned i = 0; i < of.map.fm_mapped_extents; i++) {
		struct fiemap_extent *e = &of.map.fm_extents[i];

		printf("%llu+%llu%s ", e->fe_logical >> 12, e->fe_length >> 12, e->fe_flags & FIEMAP_EXTENT_LAST ? " last" : "");
		if (e->fe_physical % 4096 || !e->fe_physical)
			return puts("not in the zone"), 1;
	}
	printf("align %u %u\n", st.stx_dio_mem_align, st.stx_dio_offset_align);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "of"))
		return of(argv[2]);
	if (argc == 4 && !strcmp(argv[1], "open"))
		return parse(argv[3]), open_in(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "forge"))
		return forge(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "extents"))
		return extents(argv[2]);
	return 2;
}
