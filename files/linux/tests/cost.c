// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Measures calls on a mount in the guest of cost.py, whose time stamp counter counts instructions. `cost DIR` prints a line for each call. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <x86intrin.h>

#define FILES 3000
#define BLOCKS 14000L
#define BLOCK 4096L

static char buf[1 << 20];
static unsigned int seed;

static long a_block(void)
{
	seed = seed * 1103515245 + 12345;
	return (seed >> 8) % 2000 * BLOCK;
}

#define CALLS(what, n, ...)                                              \
	do {                                                             \
		unsigned long long begun = __rdtsc();                    \
		for (int i = 0; i < (n); i++)                            \
			if (!(__VA_ARGS__))                              \
				return 1;                                \
		printf("%s %.0f\n", what, (double)(__rdtsc() - begun) / (n)); \
	} while (0)

static int data(void)
{
	int fd = open("f", O_RDWR | O_CREAT | O_TRUNC, 0644);
	volatile char *mapped;

	seed = 1;
	CALLS("append-4k", BLOCKS, write(fd, buf, BLOCK) == BLOCK);
	CALLS("pwrite-4k", 30000, pwrite(fd, buf, BLOCK, a_block()) == BLOCK);
	CALLS("pread-4k", 30000, pread(fd, buf, BLOCK, a_block()) == BLOCK);
	CALLS("pread-64", 30000, pread(fd, buf, 64, a_block()) == 64);
	CALLS("pwrite-64", 30000, pwrite(fd, buf, 64, a_block()) == 64);
	CALLS("pread-128k", 1000, pread(fd, buf, 131072, i % 60 * 131072L) == 131072);
	CALLS("pwrite-128k", 1000, pwrite(fd, buf, 131072, i % 60 * 131072L) == 131072);
	CALLS("append-1m", 40, write(fd, buf, sizeof(buf)) == sizeof(buf));
	CALLS("fsync", 30000, !fsync(fd));
	mapped = mmap(NULL, BLOCKS * BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CALLS("fault-read", BLOCKS, mapped[i * BLOCK] == buf[0]);
	munmap((void *)mapped, BLOCKS * BLOCK);
	mapped = mmap(NULL, BLOCKS * BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CALLS("fault-write", BLOCKS, mapped[i * BLOCK] = 1);
	munmap((void *)mapped, BLOCKS * BLOCK);
	CALLS("truncate-twice", FILES, !ftruncate(fd, BLOCK * (3000 + i % 500)) && !ftruncate(fd, BLOCK * 2000));
	CALLS("fallocate", FILES, !fallocate(fd, 0, BLOCK * (16000 + 4 * i), 4 * BLOCK));
	close(fd);
	return unlink("f");
}

static const char *name(char letter, int i)
{
	static char names[2][16];

	snprintf(names[letter == 'g'], sizeof(names[0]), "%c-%06d", letter, i);
	return names[letter == 'g'];
}

static int count_names(void)
{
	DIR *dir = opendir(".");
	int n = 0;

	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

static int made(int i)
{
	int fd = open(name('f', i), O_CREAT | O_EXCL | O_WRONLY, 0644);

	return fd >= 0 && !close(fd);
}

/* As tar does. */
static int unpacked(int i)
{
	static const struct timespec times[2] = { { 1700000000 }, { 1700000000 } };
	int fd = open(name('f', i), O_CREAT | O_EXCL | O_WRONLY, 0600);

	return fd >= 0 && write(fd, buf, 9000) == 9000 && !futimens(fd, times) && !fchmod(fd, 0644) && !close(fd);
}

static int opened(int i)
{
	int fd = open(name('f', i), O_RDONLY);

	return fd >= 0 && !close(fd);
}

static int names(void)
{
	struct stat st;

	if (mkdir("d", 0755) || chdir("d"))
		return 1;
	CALLS("create", FILES, made(i));
	CALLS("stat", FILES, !stat(name('f', i), &st));
	CALLS("open", FILES, opened(i));
	CALLS("readdir-3000", 5, count_names() == FILES + 2);
	CALLS("rename", FILES, !rename(name('f', i), name('g', i)));
	CALLS("unlink", FILES, !unlink(name('g', i)));
	CALLS("unpack-9k", FILES, unpacked(i));
	CALLS("unlink-9k", FILES, !unlink(name('f', i)));
	return chdir("..") || rmdir("d");
}

int main(int argc, char **argv)
{
	memset(buf, 7, sizeof(buf));
	return argc != 2 || chdir(argv[1]) || data() || names();
}
